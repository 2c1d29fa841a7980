# SPDX-License-Identifier: Apache-2.0
"""What a NormLinear's forward makes of its weight, kept for the next one while the weight is the same.

On the CPU alone, where the kernel itself finds a buffer that is older than its weight by 64 elements of that: a write
past the version counter (through ``.data`` or an array of NumPy's on the same memory) is seen by nothing else. On a GPU
nobody would see it. Modules do not have it: their copies, pickles and state_dicts are as ever.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from heddle._ops import ops, quick_linear

FEW_ROWS = 8  # of x: the kernel reads the weight where it lies

_kept: WeakKeyDictionary[Any, tuple[tuple[Any, ...], Tensor]] = WeakKeyDictionary()
_autocast: Any = torch.is_autocast_enabled


def _state(weight: Tensor) -> tuple[Any, ...]:
    # Whoever changes a tensor, but for the ways above, counts its version or gives it another place.
    return weight.data_ptr(), weight._version, weight.shape, weight.stride(), weight.dtype


def forward(module: Any, x: Any, tensors: tuple[Any, Any, Any, Any], eps: float, residual: Any) -> Any:
    """y, with what is kept of the weight; NotImplemented where that is of no use here, or wrong."""
    if not isinstance(x, Tensor) or x.device.type != "cpu" or _autocast("cpu"):
        return NotImplemented
    if x.dim() < 2 or x.numel() <= FEW_ROWS * x.shape[-1]:
        return NotImplemented

    def keeper(x: Any, weight: Any, bias: Any, gamma: Any, beta: Any, kind: int, act: int) -> Tensor | None:
        if weight.is_inference():  # nobody counts what is done to it
            return None
        state = (*_state(weight), kind, act)
        known = _kept.get(module)
        if known is None or known[0] != state:
            known = state, ops.norm_linear_prepare(weight, bias, gamma, beta, kind, False, act)
            _kept[module] = known
        return known[1] if known[1].numel() else None

    y = quick_linear(x, *tensors, eps, module.norm, module.activation, residual, keeper)
    if y is NotImplemented:  # the next call makes it anew
        _kept.pop(module, None)
    return y
