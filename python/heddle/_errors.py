# SPDX-License-Identifier: Apache-2.0
"""What is raised for an argument that cannot be honoured. Imports nothing.

Python says ValueError or TypeError, PyTorch says RuntimeError: a caller of either catches these."""


class HeddleValueError(ValueError, RuntimeError):
    """A wrong shape, device, stride or number."""


class HeddleTypeError(TypeError, RuntimeError):
    """A wrong dtype or class."""
