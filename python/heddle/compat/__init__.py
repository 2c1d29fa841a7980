# SPDX-License-Identifier: Apache-2.0
"""Modules with the names and signatures of systems that heddle takes the place of."""

from heddle.compat import gpu_kernels

__all__ = ["gpu_kernels"]
