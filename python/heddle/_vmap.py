# SPDX-License-Identifier: Apache-2.0
"""torch.vmap over the operators, where it is free: the mapped dimension is folded into the batch (or the rows).

Backward operators that sum over what would be folded (gradients of sinks, of weights) are called for each sample."""

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


_SEGMENTS = ("q_segments", "k_segments")
_SCALES = ("k_scale", "v_scale")


def _fold_lists(given: dict[str, Any], size: int) -> None:
    """Lists of blocks, which are the same for all samples; those for each batch are repeated, their columns are not."""
    rows = given["block_rows"]
    if rows is not None and rows.shape[0] != 1:
        given["block_rows"] = _fold(rows, None, size).contiguous()


def attention(ops: Any, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, tuple[int | None, ...]]:
    names = _schema.names("attention")
    given = _schema.defaults("attention") | dict(zip(names, args, strict=False))
    dims = dict.fromkeys(names) | dict(zip(names, in_dims, strict=False))
    if given["cu_seqlens_q"] is not None or given["cu_seqlens_k"] is not None:
        raise NotImplementedError("vmap over packed sequences (cu_seqlens) is not supported")
    if given["block_table"] is not None:
        raise NotImplementedError("vmap over keys in pages (block_table) is not supported")
    for name in names[: _schema.tensors("attention")]:
        if name not in ("q", "k", "v", "bias", "mask", *_SEGMENTS, *_SCALES) and dims[name] is not None:
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
    for name in (*_SEGMENTS, *_SCALES):
        if given[name] is not None:
            given[name] = _fold(given[name], dims[name], size).contiguous()
    _fold_lists(given, size)
    if given["alibi_slopes"] is not None and given["alibi_slopes"].dim() == 2:
        given["alibi_slopes"] = _fold(given["alibi_slopes"], None, size)
    out, lse, weights = ops.attention(*(given[name] for name in names))
    made = (out, lse, weights) if given["return_weights"] else (out, lse)
    unfolded = [value.reshape(size, b, *value.shape[1:]) for value in made]
    return (*unfolded, weights)[:3], (0, 0, 0 if given["return_weights"] else None)


def norm_linear(ops: Any, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, tuple[int | None, ...]]:
    (given, dims), size = _given("norm_linear", args, in_dims), info.batch_size
    for name, dim in dims.items():
        if name not in ("x", "residual") and dim is not None:
            raise NotImplementedError(f"vmap over {name} is not supported")
    for name in ("x", "residual"):
        if given[name] is not None:
            value, dim = given[name], dims[name]
            given[name] = (value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)).contiguous()
    made = ops.norm_linear(*given.values())
    return made, tuple(0 if _schema.is_made(value) else None for value in made)


def _given(
    operator: str, args: tuple[Any, ...], in_dims: tuple[int | None, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    names = _schema.names(operator)
    dims = dict.fromkeys(names) | dict(zip(names, in_dims, strict=False))
    given = _schema.defaults(operator) | dict(zip(names, args, strict=False))
    return {name: given[name] for name in names}, dims


def _each(
    call: Any, size: int, given: dict[str, Any], dims: dict[str, int | None]
) -> tuple[Any, tuple[int | None, ...]]:
    """One call for each sample."""

    def sample(at: int) -> list[Any]:
        chosen = []
        for name, value in given.items():
            dim = dims[name]
            picked = value if dim is None else value.select(dim, at)
            # The last dimension may have been another one.
            chosen.append(picked if dim is None or picked.dim() == 0 or picked.stride(-1) == 1 else picked.contiguous())
        return chosen

    results = [call(*sample(at)) for at in range(size)]
    stacked = [None if made[0] is None else torch.stack(made) for made in zip(*results, strict=True)]
    return tuple(stacked), tuple(None if value is None else 0 for value in stacked)


_FOLDED = ("dout", "dlse", "dweights", "out", "lse", "q", "k", "v")
_KEPT = ("cu_seqlens_q", "cu_seqlens_k", "seqlens_q", "seqlens_k", "rng_state", "block_table", "sinks")


def attention_backward(ops: Any, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
    (given, dims), size = _given("attention_backward", args, in_dims), info.batch_size
    slopes = given["alibi_slopes"]
    if any(given[name] is not None for name in _KEPT) or (slopes is not None and slopes.dim() == 2):
        return _each(ops.attention_backward, size, given, dims)
    if dims["block_rows"] is not None or dims["block_columns"] is not None:
        return _each(ops.attention_backward, size, given, dims)
    _fold_lists(given, size)
    for name in _FOLDED:
        if given[name] is not None:
            folded = _fold(given[name], dims[name], size)
            # A batch of one is repeated by a stride of 0, which the library refuses for o: a forward would write it.
            solid = name in ("lse", "dlse") or (name == "out" and folded.stride(0) == 0)
            given[name] = folded.contiguous() if solid else folded
    for name in _SEGMENTS:
        if given[name] is not None:
            given[name] = _fold(given[name], dims[name], size).contiguous()
    b = given["q"].shape[0] // size
    bias = given["bias"]
    alone = bias is not None and b != 1 and bias.shape[1 if dims["bias"] == 0 else 0] == 1
    for name in ("bias", "mask"):
        value = given[name]
        if value is not None and name == "bias" and dims[name] is None and value.shape[0] == 1:
            given[name] = value.expand(size * b, *value.shape[1:])  # else its gradient would be a sum of all samples
        elif value is not None:
            given[name] = _fold_broadcast(value, dims[name], size, b)
    made = ops.attention_backward(*given.values())
    made = [None if value is None else value.reshape(size, b, *value.shape[1:]) for value in made]
    if alone and made[3] is not None:
        made[3] = made[3].sum(1, keepdim=True)
    return tuple(made), tuple(None if value is None else 0 for value in made)


def norm_linear_backward(ops: Any, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
    (given, dims), size = _given("norm_linear_backward", args, in_dims), info.batch_size
    rows = ("dy", "mean", "rstd", "x", "u", "dz")
    if given["needs"] != 1 or any(dim is not None for name, dim in dims.items() if name not in rows):
        return _each(ops.norm_linear_backward, size, given, dims)
    for name in rows:
        if given[name] is not None:
            value, dim = given[name], dims[name]
            given[name] = (value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)).contiguous()
    return ops.norm_linear_backward(*given.values()), (0, None, None, None, None)


def register(ops: Any) -> None:
    """Tells PyTorch of all rules."""
    library: Any = torch.library
    library.register_vmap("heddle::attention", partial(attention, ops))
    library.register_vmap("heddle::norm_linear", partial(norm_linear, ops))
    library.register_vmap("heddle::attention_backward", partial(attention_backward, ops))
    library.register_vmap("heddle::norm_linear_backward", partial(norm_linear_backward, ops))
