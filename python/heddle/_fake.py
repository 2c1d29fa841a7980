# SPDX-License-Identifier: Apache-2.0
"""Shapes and dtypes of the operators' results without computing them: for torch.compile, torch.export, meta tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heddle import _schema
from heddle._errors import HeddleTypeError, HeddleValueError
from heddle._options import ACTIVATIONS, NO_NORM, features_out

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _real(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def result_strides(like: Tensor, size: Sequence[int]) -> tuple[int, ...]:
    """Strides of a result in the layout of `like`: [b, s, h, d] in memory if `like` has that, else contiguous.

    The C kernels (result_layout in torch_attention.c) do the same."""
    if like.dim() == 4 and like.stride(1) < like.stride(2):
        last = max(size[3], 1)
        row = max(size[1], 1) * last
        return (max(size[2], 1) * row, last, row, 1)
    strides = [1] * len(size)
    for x in range(len(size) - 2, -1, -1):
        strides[x] = strides[x + 1] * max(size[x + 1], 1)
    return tuple(strides)


def _like(like: Tensor, last: int) -> Tensor:
    size = (*like.shape[:-1], last)
    return like.new_empty_strided(size, result_strides(like, size))


def _check(tensor: Tensor, name: str, first: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise HeddleTypeError(f"{name} is {tensor.dtype}, but must be {dtype} here")
    if tensor.device != first.device:
        raise HeddleValueError(f"{name} is on {tensor.device}, the first tensor on {first.device}")
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel():
        raise HeddleValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension, which must be contiguous")


def _check_devices(first: Tensor, **tensors: Tensor | None) -> None:
    """One tensor on "meta" brings a call here, and none of its results may then be taken for computed."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != first.device:
            raise HeddleValueError(f"{name} is on {tensor.device}, the first tensor on {first.device}")


E4M3 = torch.float8_e4m3fn


def _check_attention(q: Tensor, k: Tensor, v: Tensor, packed: bool, paged: bool) -> None:
    if q.dtype not in _DTYPES:
        raise HeddleTypeError(f"q is {q.dtype}; it must be float32, bfloat16, float16 or float64")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        pages = paged and name != "q"
        if tensor.dim() != (3 if packed and not pages else 4):
            rows = "4 ([pages, hk, page, d])" if pages else "3 ([total, h, d])" if packed else "4 ([b, h, s, d])"
            raise HeddleValueError(f"{name} has {tensor.dim()} dimensions, but must have {rows}")
        _check(tensor, name, q, E4M3 if name != "q" and E4M3 in (k.dtype, v.dtype) else q.dtype)
    if q.shape[-1] != k.shape[-1]:
        raise HeddleValueError(f"q has head dim {q.shape[-1]}, but k has {k.shape[-1]}")
    if k.shape[:-1] != v.shape[:-1]:
        raise HeddleValueError(
            f"k has shape {list(k.shape)}, v has {list(v.shape)}: they may differ in the last dimension only"
        )
    if not packed and not paged and q.shape[0] != k.shape[0]:
        raise HeddleValueError(f"q has batch size {q.shape[0]}, but k has {k.shape[0]}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise HeddleValueError(f"hk = {k.shape[1]} does not divide h = {q.shape[1]}")
    if not (1 <= q.shape[-1] <= 512 and 1 <= v.shape[-1] <= 512):
        raise HeddleValueError(f"d = {q.shape[-1]} and dv = {v.shape[-1]} must be from 1 to 512")


def _check_blocks(
    q: Tensor, rows: Tensor | None, columns: Tensor | None, extents: tuple[Any, Any, Any], sizes: tuple[int, int]
) -> None:
    if (rows is None) != (columns is None):
        raise HeddleValueError("block_rows and block_columns come together, but only one is given")
    if any((size not in (64, 128)) if rows is not None else size != 0 for size in sizes):
        raise HeddleValueError(f"block_q, block_k = {sizes}: with block_rows they must be 64 or 128, else 0")
    if rows is None or columns is None:
        return
    for name, tensor, rank in (("block_rows", rows, 3), ("block_columns", columns, 1)):
        _check(tensor, name, q, torch.int32)
        if tensor.dim() != rank:
            raise HeddleValueError(f"{name} has {tensor.dim()} dimensions, but must have {rank}")
    b, h, sq = extents
    need = (b, h, (sq + sizes[0] - 1) // sizes[0] + 1)
    if any(have not in (1, full) for have, full in zip(rows.shape[:2], need, strict=False)) or rows.shape[2] != need[2]:
        raise HeddleValueError(f"block_rows has shape {list(rows.shape)}, but must broadcast to {list(need)}")


def _attention_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqlens_q: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    rng_state: Tensor | None = None,
    block_table: Tensor | None = None,
    q_segments: Tensor | None = None,
    k_segments: Tensor | None = None,
    block_rows: Tensor | None = None,
    block_columns: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    causal: int = 0,
    window_left: int = -1,
    window_right: int = -1,
    scale: float = 0.0,
    softcap: float = 0.0,
    dropout: float = 0.0,
    return_weights: bool = False,
    deterministic: bool = False,
    tf32: bool = False,
    q_offset: int = 0,
    k_offset: int = 0,
    h_offset: int = 0,
    whole_sq: int = 0,
    whole_sk: int = 0,
    whole_h: int = 0,
    block_q: int = 0,
    block_k: int = 0,
    multiprocessors: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    _check_attention(q, k, v, packed, block_table is not None)
    _check_devices(q, alibi_slopes=alibi_slopes, sinks=sinks, rng_state=rng_state, block_table=block_table)
    _check_devices(q, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqlens_q=seqlens_q, seqlens_k=seqlens_k)
    _check_devices(q, q_segments=q_segments, k_segments=k_segments, block_rows=block_rows, block_columns=block_columns)
    if block_table is not None and cu_seqlens_k is not None:
        raise HeddleValueError("cu_seqlens_k is given with block_table: keys in pages are not packed")
    if packed and (cu_seqlens_q is None or (cu_seqlens_k is None and block_table is None)):
        raise HeddleValueError("cu_seqlens_q and cu_seqlens_k come together, but only one is given")
    if cu_seqlens_q is not None:
        b, sq, sk = cu_seqlens_q.shape[0] - 1, max_seqlen_q, max_seqlen_k
        rows: tuple[int, ...] = (q.shape[1], q.shape[0])
    else:
        b, sq, sk = q.shape[0], q.shape[2], k.shape[2]
        rows = (b, q.shape[1], sq)
    if block_table is not None:
        if block_table.dim() != 2 or block_table.shape[0] != b:
            raise HeddleValueError(f"block_table has shape {list(block_table.shape)}, but must have [{b}, pages]")
        sk = block_table.shape[1] * k.shape[2]
        sk = min(sk, max_seqlen_k) if max_seqlen_k else sk
    if (q_segments is None) != (k_segments is None):
        raise HeddleValueError("q_segments and k_segments come together, but only one is given")
    if q_segments is not None and k_segments is not None:
        of_keys = (k.shape[0],) if packed and block_table is None else (b, sk)
        of_queries = (q.shape[0],) if packed else (b, sq)
        for name, ids, need in (("q_segments", q_segments, of_queries), ("k_segments", k_segments, of_keys)):
            _check(ids, name, q, torch.int32)
            if tuple(ids.shape) != need:
                raise HeddleValueError(f"{name} has shape {list(ids.shape)}, but must have {list(need)}")
    _check_blocks(q, block_rows, block_columns, (b, q.shape[1], sq), (block_q, block_k))
    for name, tensor in (("k_scale", k_scale), ("v_scale", v_scale)):
        if tensor is None:
            continue
        if k.dtype != E4M3:
            raise HeddleValueError(f"{name} is given, but k and v are not float8_e4m3fn")
        _check(tensor, name, q, _real(q.dtype))
        if tuple(tensor.shape) != (b, k.shape[1]):
            raise HeddleValueError(f"{name} has shape {list(tensor.shape)}, but must have {[b, k.shape[1]]}")
    for name, tensor, dtype in (("bias", bias, q.dtype), ("mask", mask, torch.bool)):
        if tensor is None:
            continue
        _check(tensor, name, q, dtype)
        full = (b, q.shape[1], sq, sk)
        if (
            tensor.dim() != 4
            or tensor.shape[3] != sk
            or any(tensor.shape[x] != 1 and tensor.shape[x] != full[x] for x in range(3))
        ):
            raise HeddleValueError(f"{name} has shape {list(tensor.shape)}, which does not broadcast to {list(full)}")
    weights = q.new_empty((b, q.shape[1], sq, sk) if return_weights else (0,))
    return _like(q, v.shape[-1]), q.new_empty(rows, dtype=_real(q.dtype)), weights


NEEDS_DQ, NEEDS_DK, NEEDS_DV, NEEDS_DBIAS, NEEDS_DSINKS = 1, 2, 4, 8, 16


def _attention_backward_fake(
    dout: Tensor | None,
    dlse: Tensor | None,
    dweights: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *options: Any,
    **more: Any,
) -> tuple[Tensor | None, ...]:
    names = _schema.names("attention_backward")[8:]
    given = _schema.defaults("attention_backward") | dict(zip(names, options, strict=False)) | more
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    _check_devices(q, k=k, v=v, dout=dout, dlse=dlse, dweights=dweights, out=out, lse=lse, **tensors)
    bias, sinks, needs = given["bias"], given["sinks"], given["needs"]
    return (
        _like(q, q.shape[-1]) if needs & NEEDS_DQ else None,
        _like(k, k.shape[-1]) if needs & NEEDS_DK else None,
        _like(v, v.shape[-1]) if needs & NEEDS_DV else None,
        q.new_empty(bias.shape) if bias is not None and needs & NEEDS_DBIAS else None,
        q.new_empty((q.shape[1],), dtype=_real(q.dtype)) if sinks is not None and needs & NEEDS_DSINKS else None,
    )


def _attention_plain_fake(q: Tensor, k: Tensor, v: Tensor, causal: int, scale: float, lse: bool) -> Any:
    out, its_lse, _ = _attention_fake(q, k, v)
    return out, its_lse if lse else None


def _attention_options_fake(q: Tensor, k: Tensor, v: Tensor, *options: Any, **more: Any) -> Any:
    given = _schema.defaults("attention_options") | dict(
        zip(_schema.names("attention_options")[3:], options, strict=False), **more
    )
    lse = given.pop("lse")
    for name in ("bias", "mask"):
        if given[name] is not None and given[name].dim() < 4:
            given[name] = given[name].expand((1,) * (4 - given[name].dim()) + given[name].shape)
    out, its_lse, _ = _attention_fake(q, k, v, **given)
    return out, its_lse if lse else None


def _attention_backward_plain_fake(
    dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> tuple[Tensor | None, ...]:
    _check_devices(q, k=k, v=v, dout=dout, out=out, lse=lse)
    return tuple(_like(t, t.shape[-1]) if options[-1] >> at & 1 else None for at, t in enumerate((q, k, v)))


def _attention_backward_heads_fake(
    dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> Tensor:
    _check_devices(q, k=k, v=v, dout=dout, out=out, lse=lse)
    if q.shape[2:] != k.shape[2:] or k.shape != v.shape:
        raise HeddleValueError("q, k and v are no heads of one tensor")
    b, h, s, d = q.shape
    if q.stride(2) > q.stride(0):  # [s, b, ...] in memory
        return q.new_empty((s, b, h + 2 * k.shape[1], d)).transpose(0, 1)
    return q.new_empty((b, s, h + 2 * k.shape[1], d))


def _check_norm_linear(x: Tensor, weight: Tensor, gamma: Tensor | None, beta: Tensor | None) -> None:
    if x.dtype not in _DTYPES:
        raise HeddleTypeError(f"x is {x.dtype}; it must be float32, bfloat16, float16 or float64")
    if x.dim() < 1 or x.dim() > 8:
        raise HeddleValueError(f"x has {x.dim()} dimensions, but must have 1 to 8")
    if weight.dim() != 2:
        raise HeddleValueError(f"weight has {weight.dim()} dimensions, but must have 2 ([n, k])")
    if weight.shape[1] != x.shape[-1]:
        raise HeddleValueError(f"x has {x.shape[-1]} features, but weight is {list(weight.shape)}")
    _check(x, "x", x, x.dtype)
    _check(weight, "weight", x, x.dtype)
    for name, vector in (("gamma", gamma), ("beta", beta)):
        if vector is not None:
            _check(vector, name, x, x.dtype)
            if vector.dim() != 1 or vector.shape[0] != x.shape[-1]:
                raise HeddleValueError(f"{name} has shape {list(vector.shape)}, but must have [{x.shape[-1]}]")


def _norm_linear_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    eps: float = 1e-5,
    norm: int = 0,
    tf32: bool = False,
    activation: int = 0,
    keep_u: bool = False,
    residual: Tensor | None = None,
    return_norm: bool = False,
    prepared: Tensor | None = None,
    multiprocessors: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check_norm_linear(x, weight, gamma, beta)
    if norm == NO_NORM and not (gamma is beta is None):
        raise HeddleValueError(f"{'beta' if gamma is None else 'gamma'} is given, but norm is HEDDLE_NO_NORM")
    if norm == NO_NORM and return_norm:
        raise HeddleValueError("HEDDLE_Z is set, but with HEDDLE_NO_NORM z is x")
    if not 0 <= activation <= len(ACTIVATIONS):
        raise HeddleValueError(f"activation = {activation} is none of heddle_activation, 0 to {len(ACTIVATIONS)}")
    if bias is not None:
        _check(bias, "bias", x, x.dtype)
        if bias.dim() != 1 or bias.shape[0] != weight.shape[0]:
            raise HeddleValueError(f"bias has shape {list(bias.shape)}, but must have [{weight.shape[0]}]")
    if prepared is not None:
        _check(prepared, "prepared", x, torch.uint8)
        if prepared.dim() != 1:
            raise HeddleValueError(f"prepared has {prepared.dim()} dimensions, but must have 1 ([bytes])")
    y = x.new_empty((*x.shape[:-1], features_out(weight.shape[0], activation)))
    if residual is not None:
        _check(residual, "residual", x, x.dtype)
        if residual.shape != y.shape:
            raise HeddleValueError(f"residual has shape {list(residual.shape)}, but must have {list(y.shape)}")
    if norm == NO_NORM:
        mean, rstd = (y.new_empty((0,)) for _ in range(2))
    else:
        mean, rstd = (x.new_empty(x.shape[:-1], dtype=_real(x.dtype)) for _ in range(2))
    u = y.new_empty((*x.shape[:-1], weight.shape[0]) if activation and keep_u else (0,))
    return y, mean, rstd, u, x.new_empty(x.shape if return_norm else (0,))


def _norm_linear_prepare_fake(
    weight: Tensor,
    bias: Tensor | None = None,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    norm: int = 0,
    tf32: bool = False,
    activation: int = 0,
    return_norm: bool = False,
) -> Tensor:
    """Of how many bytes, the processor decides."""
    _norm_linear_fake(weight, weight, bias, gamma, beta, norm=norm, activation=activation, return_norm=return_norm)
    if weight.device.type == "meta":
        raise HeddleValueError("weight is on meta, but how many bytes are prepared, a processor decides")
    library: Any = torch.library
    return weight.new_empty((library.get_ctx().new_dynamic_size(),), dtype=torch.uint8)


def _norm_linear_backward_fake(
    dy: Tensor,
    mean: Tensor | None,
    rstd: Tensor | None,
    x: Tensor,
    weight: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    eps: float = 1e-5,
    norm: int = 0,
    deterministic: bool = False,
    tf32: bool = False,
    needs: int = 31,
    activation: int = 0,
    u: Tensor | None = None,
    bias: Tensor | None = None,
    multiprocessors: int = 0,
    dz: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    _check_devices(x, weight=weight, dy=dy, mean=mean, rstd=rstd, gamma=gamma, beta=beta, u=u, dz=dz)
    shapes = (x.shape, weight.shape, weight.shape[:1], x.shape[-1:], x.shape[-1:])
    return tuple(x.new_empty(shape) if needs >> at & 1 else None for at, shape in enumerate(shapes))


def _append_fake(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    seqlens_k: Tensor,
    q: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_index: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int = 0,
    max_seqlen_k: int = 0,
    interleaved: bool = False,
    together: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    bytes_ = E4M3 in (k_cache.dtype, v_cache.dtype)
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v), ("q", q)):
        if tensor is not None:
            _check(tensor, name, k_cache, E4M3 if bytes_ and name.endswith("_cache") else k.dtype)
    for name, tensor in (("k_scale", k_scale), ("v_scale", v_scale)):
        if tensor is None:
            continue
        if not bytes_:
            raise HeddleValueError(f"{name} is given, but k_cache and v_cache are not float8_e4m3fn")
        _check(tensor, name, k_cache, _real(k.dtype))
        if tuple(tensor.shape) != (seqlens_k.shape[0], k_cache.shape[1]):
            need = [seqlens_k.shape[0], k_cache.shape[1]]
            raise HeddleValueError(f"{name} has shape {list(tensor.shape)}, but must have {need}")
    integers = {"block_table": block_table, "cache_index": cache_index, "cu_seqlens": cu_seqlens}
    for name, tensor in ({"seqlens_k": seqlens_k} | integers).items():
        if tensor is not None:
            _check(tensor, name, k_cache, torch.int32)
    if (cos is None) != (sin is None):
        raise HeddleValueError("cos and sin come together, but only one is given")
    _check_devices(k_cache, cos=cos, sin=sin)
    lengths = seqlens_k.new_empty(seqlens_k.shape)
    return (k.new_empty((0,)) if q is None else _like(q, q.shape[-1])), lengths


def register() -> None:
    """Tells PyTorch of all of them."""
    library: Any = torch.library
    library.register_fake("heddle::attention", _attention_fake)
    library.register_fake("heddle::attention_backward", _attention_backward_fake)
    library.register_fake("heddle::attention_plain", _attention_plain_fake)
    library.register_fake("heddle::attention_options", _attention_options_fake)
    library.register_fake("heddle::attention_backward_plain", _attention_backward_plain_fake)
    library.register_fake("heddle::attention_backward_heads", _attention_backward_heads_fake)
    library.register_fake("heddle::attention_append", _append_fake)
    library.register_fake("heddle::norm_linear", _norm_linear_fake)
    library.register_fake("heddle::norm_linear_prepare", _norm_linear_prepare_fake)
    library.register_fake("heddle::norm_linear_backward", _norm_linear_backward_fake)
