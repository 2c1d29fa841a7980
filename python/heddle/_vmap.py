# SPDX-License-Identifier: Apache-2.0
"""torch.vmap over the operators, where it is free: the mapped dimension is folded into the batch (or the rows)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor


def _fold(value: Tensor, dim: int | None, size: int) -> Tensor:
    """[v, b, ...] as [v·b, ...]; a tensor that is not mapped is repeated."""
    value = value.unsqueeze(0).expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
    value = value.reshape(size * value.shape[1], *value.shape[2:])
    return value if value.stride(-1) == 1 or value.shape[-1] == 1 else value.contiguous()


def _fold_broadcast(value: Tensor, dim: int | None, size: int, b: int) -> Tensor:
    if dim is None:
        if value.shape[0] == 1:
            return value
        return _fold(value, None, size)
    moved = value.movedim(dim, 0)
    return _fold(moved.expand(size, b, *moved.shape[2:]), 0, size)


def attention(ops: Any, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, tuple[int | None, ...]]:
    if any(value is not None for value in args[7:9]):
        raise NotImplementedError("vmap over packed sequences (cu_seqlens) is not supported")
    for at, name in ((5, "alibi_slopes"), (6, "sinks"), (9, "seqlens_q"), (10, "seqlens_k"), (11, "rng_state")):
        if len(in_dims) > at and in_dims[at] is not None:
            raise NotImplementedError(f"vmap over {name} is not supported")
    if any(value is not None for value in args[9:12]):
        raise NotImplementedError("vmap with seqlens or dropout is not supported")
    size = info.batch_size
    dims = (*in_dims, *([None] * len(args)))
    folded = list(args)
    for at in range(3):
        folded[at] = _fold(args[at], dims[at], size)
    b = folded[0].shape[0] // size
    for at in (3, 4):
        if len(args) > at and args[at] is not None:
            folded[at] = _fold_broadcast(args[at], dims[at], size, b)
    if len(args) > 5 and args[5] is not None and args[5].dim() == 2:
        folded[5] = _fold(args[5], None, size)
    out, lse, weights = ops.attention(*folded)
    unfolded = [None if value is None else value.reshape(size, b, *value.shape[1:]) for value in (out, lse, weights)]
    return tuple(unfolded), (0, 0, None if weights is None else 0)


def norm_linear(ops: Any, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, tuple[int, int, int]]:
    for at, name in ((1, "weight"), (2, "bias"), (3, "gamma"), (4, "beta")):
        if len(in_dims) > at and in_dims[at] is not None:
            raise NotImplementedError(f"vmap over {name} is not supported")
    x = args[0].movedim(in_dims[0], 0).contiguous()
    return ops.norm_linear(x, *args[1:]), (0, 0, 0)


def register(ops: Any) -> None:
    """Tells PyTorch of both rules."""
    library: Any = torch.library
    library.register_vmap("heddle::attention", partial(attention, ops))
    library.register_vmap("heddle::norm_linear", partial(norm_linear, ops))
