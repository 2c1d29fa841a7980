# SPDX-License-Identifier: Apache-2.0
"""torch.vmap over the operators, where it is free: the mapped dimension is folded into the batch (or the rows)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from heddle import _schema


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
    names = _schema.names("attention")
    given = _schema.defaults("attention") | dict(zip(names, args, strict=False))
    dims = dict.fromkeys(names) | dict(zip(names, in_dims, strict=False))
    if given["cu_seqlens_q"] is not None or given["cu_seqlens_k"] is not None:
        raise NotImplementedError("vmap over packed sequences (cu_seqlens) is not supported")
    for name in names[: _schema.tensors("attention")]:
        if name not in ("q", "k", "v", "bias", "mask") and dims[name] is not None:
            raise NotImplementedError(f"vmap over {name} is not supported")
    if any(given[name] is not None for name in ("seqlens_q", "seqlens_k", "rng_state")):
        raise NotImplementedError("vmap with seqlens or dropout is not supported")
    size = info.batch_size
    for name in ("q", "k", "v"):
        given[name] = _fold(given[name], dims[name], size)
    b = given["q"].shape[0] // size
    for name in ("bias", "mask"):
        if given[name] is not None:
            given[name] = _fold_broadcast(given[name], dims[name], size, b)
    if given["alibi_slopes"] is not None and given["alibi_slopes"].dim() == 2:
        given["alibi_slopes"] = _fold(given["alibi_slopes"], None, size)
    out, lse, weights = ops.attention(*(given[name] for name in names))
    unfolded = [None if value is None else value.reshape(size, b, *value.shape[1:]) for value in (out, lse, weights)]
    return tuple(unfolded), (0, 0, None if weights is None else 0)


def norm_linear(ops: Any, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, tuple[int, int, int]]:
    for name, dim in zip(_schema.names("norm_linear"), in_dims, strict=False):
        if name != "x" and dim is not None:
            raise NotImplementedError(f"vmap over {name} is not supported")
    x = args[0].movedim(in_dims[0], 0).contiguous()
    return ops.norm_linear(x, *args[1:]), (0, 0, 0)


def register(ops: Any) -> None:
    """Tells PyTorch of both rules."""
    library: Any = torch.library
    library.register_vmap("heddle::attention", partial(attention, ops))
    library.register_vmap("heddle::norm_linear", partial(norm_linear, ops))
