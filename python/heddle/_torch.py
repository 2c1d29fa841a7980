# SPDX-License-Identifier: Apache-2.0
"""``heddle.attention`` and ``heddle.norm_linear`` for torch tensors: from friendly options to torch.ops.heddle."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

import heddle
from heddle import _nothing
from heddle._errors import HeddleTypeError, HeddleValueError
from heddle._kinds import autocast_dtype, bias_of, need_tensors
from heddle._ops import NUMBER_DEFAULTS, call, ops, quick, quick_linear, quick_options
from heddle._options import (
    NO_NORM,
    activation_of,
    block_of,
    causal_of,
    eps_of,
    features_out,
    flag_of,
    limit_of,
    multiprocessors_of,
    norm_of,
    number_of,
    places_of,
    refuse_masked,
    scale_of,
    window_of,
)
from heddle._plain import new_rng_state


def _broadcastable(value: Tensor | None, name: str, sk: int) -> Tensor | None:
    """bias or mask as [b or 1, h or 1, sq or 1, sk] with a contiguous last dimension."""
    if value is None:
        return None
    if value.dim() > 4:
        raise HeddleValueError(f"{name} has {value.dim()} dimensions, but at most 4 are allowed")
    while value.dim() < 4:
        value = value.unsqueeze(0)
    if value.shape[3] == 1 and sk != 1:
        value = value.expand(*value.shape[:3], sk)
    if value.stride(3) != 1 and value.shape[3] != 1:
        value = value.contiguous()
    return value


def _lengths(name: str, value: Any, like: Tensor) -> Tensor | None:
    if value is None or (isinstance(value, Tensor) and value.dtype == torch.int32):
        return value
    if isinstance(value, Tensor):
        need_tensors(**{name: value})
    else:
        refuse_masked(name, value)
        try:
            value = torch.as_tensor(value, device=like.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise HeddleTypeError(f"{name} = {value!r} must be integers: {error}") from error
    return int32_of(name, value)


def int32_of(name: str, value: Tensor) -> Tensor:
    """Integers as the operators take them."""
    no_integers = value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
    if no_integers and value.numel():  # torch.as_tensor([]) is float32
        raise HeddleTypeError(f"{name} must be integers, not {value.dtype}")
    if value.dtype.itemsize > 2:
        value = value.to(torch.int64).clamp(-(2**31), 2**31 - 1)  # too large stays too large, and is told of
    return value.to(torch.int32)


def _retold(error: HeddleValueError, lengths: Mapping[str, Any]) -> NoReturn:
    """The operator's error about lengths, with the number that the caller gave where int32_of() made it a smaller."""
    found = re.match(r"(\w+)\[(\d+)\] = -?\d+ (.*)", str(error), re.DOTALL)
    given = None if found is None else lengths.get(found.group(1))
    if found is None or given is None:
        raise error
    at = int(found.group(2))
    raise HeddleValueError(f"{found.group(1)}[{at}] = {int(given[at])} {found.group(3)}") from None


def _table(table: Any, k: Tensor) -> tuple[Tensor, int]:
    """block_table as the operator takes it, and how many keys a row of it has room for."""
    numbers = _lengths("block_table", table, k)
    if numbers is None or numbers.dim() != 2 or k.dim() != 4:
        shape = None if numbers is None else list(numbers.shape)
        raise HeddleValueError(
            f"block_table has shape {shape}, k has {list(k.shape)}: must be [b, pages of a sequence] and "
            "[pages, hk, page, d]"
        )
    if numbers.stride(1) != 1 or numbers.stride(0) < numbers.shape[1]:
        numbers = numbers.contiguous()
    return numbers, numbers.shape[1] * k.shape[2]


def _segments(
    q_segments: Any, k_segments: Any, q: Tensor, k: Tensor, sk: int | None, packed: bool, paged: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Both as the operator takes them, [b, sq] and [b, sk], of packed rows [total]; one for all batches is repeated."""
    if q_segments is None and k_segments is None:
        return None, None
    if q_segments is None:
        raise HeddleValueError("k_segments is given without q_segments")
    if k_segments is None:
        k_segments = q_segments
    made = []
    for name, ids in (("q_segments", q_segments), ("k_segments", k_segments)):
        need_tensors(**{name: ids})
        if ids.dtype not in (torch.int32, torch.int16, torch.int8, torch.uint8):
            raise HeddleTypeError(f"{name} is {ids.dtype}, but must be torch.int32 (or of fewer bits)")
        of_packed = packed and not (paged and name == "k_segments")
        rows = (sk if paged else k.shape[2 - of_packed * 2]) if name == "k_segments" else q.shape[2 - of_packed * 2]
        if of_packed:
            need: tuple[Any, ...] = (rows,)
        else:
            ids = ids.unsqueeze(0) if ids.dim() == 1 else ids
            need = (q.shape[0], rows)
        if ids.dim() != len(need) or ids.shape[-1] != need[-1] or ids.shape[0] not in (1, need[0]):
            raise HeddleValueError(f"{name} has shape {list(ids.shape)}, but must have {list(need)}")
        made.append(ids.expand(need).to(torch.int32).contiguous())
    return made[0], made[1]


def blocks_of(
    block_rows: Any, block_columns: Any, block_size: Any
) -> tuple[Tensor | None, Tensor | None, tuple[int, int]]:
    """Lists of blocks as the operator takes them, [b or 1, h or 1, lists + 1] and [columns], and a block's sizes."""
    sizes = block_of(block_size, not block_rows is block_columns is None)
    if block_rows is block_columns is None:
        return None, None, sizes
    if block_rows is None or block_columns is None:
        raise HeddleValueError("block_rows and block_columns come together, but only one is given")
    for name, each, most in (("block_rows", block_rows, 3), ("block_columns", block_columns, 1)):
        need_tensors(**{name: each})
        if each.dtype != torch.int32:
            raise HeddleTypeError(f"{name} is {each.dtype}, but must be torch.int32")
        if not 1 <= each.dim() <= most:
            must = "1 to 3 ([lists + 1], in front of it heads and batches)" if most == 3 else "1"
            raise HeddleValueError(f"{name} has {each.dim()} dimensions, but must have {must}")
    while block_rows.dim() < 3:
        block_rows = block_rows.unsqueeze(0)
    if block_rows.is_cuda:  # nobody reads it here: the kernels must not go behind the last column
        block_rows = block_rows.clamp(max=block_columns.shape[0])
    return block_rows.contiguous(), block_columns.contiguous(), sizes


def real_type(q: Tensor) -> torch.dtype:
    """Of sums."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def of_head(name: str, value: Any, real: torch.dtype) -> Tensor:
    """A number for each head as the operator takes it; rows that repeat are written out."""
    need_tensors(**{name: value})
    return _real_of(name, value, real).contiguous()


def _real_of(name: str, value: Tensor, real: torch.dtype) -> Tensor:
    """A tensor in the type of sums: not of integers, bools or complex numbers, of which .to() makes something."""
    if not value.is_floating_point():
        raise HeddleTypeError(f"{name} is {value.dtype}, but must be {real}")
    return value.to(real)


def block_lists(shown: Tensor) -> tuple[Tensor, Tensor]:
    """See heddle.block_lists, which this is for torch tensors. No GPU is waited for: columns are as many as blocks."""
    if shown.dtype != torch.bool or not 2 <= shown.dim() <= 4:
        raise HeddleTypeError(
            f"shown is {shown.dtype} with {shown.dim()} dimensions, but must be torch.bool with 2 to 4"
        )
    while shown.dim() < 4:
        shown = shown.unsqueeze(0)
    counts = shown.sum(-1)
    ends = counts.flatten().cumsum(0).reshape(counts.shape)
    first = ends[..., :1] - counts[..., :1] if shown.shape[2] else ends.new_zeros((*ends.shape[:2], 1))
    flat, device = shown.flatten(), shown.device
    place = torch.where(flat, flat.cumsum(0) - 1, flat.shape[0])  # what is not shown goes behind the end
    block = torch.arange(shown.shape[3], device=device, dtype=torch.int32).expand(shown.shape).flatten()
    columns = torch.zeros(flat.shape[0] + 1, dtype=torch.int32, device=device).scatter(0, place, block)
    return torch.cat((first, ends), -1).to(torch.int32), columns[:-1]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Any = None,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    rng_state: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqlens_q: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
    deterministic: bool | None = None,
    tf32: bool = False,
    q_offset: int = 0,
    k_offset: int = 0,
    h_offset: int = 0,
    whole_sq: int = 0,
    whole_sk: int = 0,
    whole_h: int = 0,
    block_table: Tensor | None = None,
    q_segments: Tensor | None = None,
    k_segments: Tensor | None = None,
    block_rows: Tensor | None = None,
    block_columns: Tensor | None = None,
    block_size: int | tuple[int, int] | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    multiprocessors: int = 0,
) -> Any:
    """See heddle.attention, which this is for torch tensors."""
    need_tensors(q=q, k=k, v=v)
    if not (bias is mask is alibi_slopes is sinks is rng_state is None):
        given = {"bias": bias, "mask": mask, "alibi_slopes": alibi_slopes, "sinks": sinks, "rng_state": rng_state}
        need_tensors(**{name: value for name, value in given.items() if value is not None})
    return_lse, return_weights = flag_of("return_lse", return_lse), flag_of("return_weights", return_weights)
    tf32 = flag_of("tf32", tf32)
    deterministic = None if deterministic is None else flag_of("deterministic", deterministic)
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    heads = -2 if packed else -3
    if _nothing.is_there(q, k, v, heads):
        options_given: dict[str, Any] = {
            "causal": causal,
            "window": window,
            "scale": scale,
            "softcap": softcap,
            "bias": bias,
            "mask": mask,
            "alibi_slopes": alibi_slopes,
            "sinks": sinks,
            "dropout": dropout,
            "rng_state": rng_state,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_k": max_seqlen_k,
            "seqlens_q": seqlens_q,
            "seqlens_k": seqlens_k,
            "return_lse": return_lse,
            "return_weights": return_weights,
            "deterministic": deterministic,
            "tf32": tf32,
            "q_offset": q_offset,
            "k_offset": k_offset,
            "h_offset": h_offset,
            "whole_sq": whole_sq,
            "whole_sk": whole_sk,
            "whole_h": whole_h,
            "block_table": block_table,
            "q_segments": q_segments,
            "k_segments": k_segments,
            "block_rows": block_rows,
            "block_columns": block_columns,
            "block_size": block_size,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "multiprocessors": multiprocessors,
        }
        return _nothing.attention(attention, heads, q, k, v, options_given)
    paged = block_table is not None
    missing = 0 if packed or paged else 4 - q.dim()
    if missing > 0:
        if not 2 <= q.dim() == k.dim() == v.dim():
            raise HeddleValueError(
                f"q, k and v have {q.dim()}, {k.dim()} and {v.dim()} dimensions: must be the same, 2 to 4"
            )
        for _ in range(missing):
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    if packed:
        if max_seqlen_q is None or (max_seqlen_k is None and not paged):
            raise HeddleValueError(
                "packed sequences need max_seqlen_q and max_seqlen_k, the upper limits of one sequence"
            )
        sq = max_seqlen_q = limit_of("max_seqlen_q", max_seqlen_q)
        sk = max_seqlen_k = limit_of("max_seqlen_k", max_seqlen_k)
    elif paged:
        if q.dim() != 4:
            raise HeddleValueError(f"q has {q.dim()} dimensions, but with block_table must have 4 ([b, h, sq, d])")
        if max_seqlen_q is not None:
            raise HeddleValueError("max_seqlen_q is given without cu_seqlens_q")
        sq, sk = q.shape[2], limit_of("max_seqlen_k", max_seqlen_k)
    else:
        if q.dim() != 4 or k.dim() != 4:
            raise HeddleValueError(
                f"q, k and v have {q.dim()}, {k.dim()} and {v.dim()} dimensions: must be the same, 2 to 4"
            )
        if max_seqlen_q is not None or max_seqlen_k is not None:
            raise HeddleValueError("max_seqlen_q and max_seqlen_k are given without cu_seqlens_q and cu_seqlens_k")
        sq, sk = q.shape[2], k.shape[2]
    if block_table is not None:
        block_table, most = _table(block_table, k)
        sk = most if sk is None else min(sk, most)
        block_table = block_table if sk else block_table[:, :0]
        max_seqlen_k = sk or None
    real = real_type(q)
    if bias is not None and bias.dtype != q.dtype:
        if not bias.is_floating_point():
            raise HeddleTypeError(f"bias is {bias.dtype}; a mask of bools goes into mask")
        bias = bias_of(bias, q.dtype)
    if mask is not None and mask.dtype != torch.bool:
        raise HeddleTypeError(f"mask is {mask.dtype}, but must be torch.bool; an additive one goes into bias")
    q_segments, k_segments = _segments(q_segments, k_segments, q, k, sk, packed, paged)
    block_rows, block_columns, block_sizes = blocks_of(block_rows, block_columns, block_size)
    dropout = number_of("dropout", dropout)
    if dropout and rng_state is None:
        rng_state = new_rng_state(q.device)
    tensors = (
        _broadcastable(bias, "bias", sk),
        _broadcastable(mask, "mask", sk),
        alibi_slopes if alibi_slopes is None else _real_of("alibi_slopes", alibi_slopes, real),
        sinks if sinks is None else _real_of("sinks", sinks, real),
        _lengths("cu_seqlens_q", cu_seqlens_q, q),
        _lengths("cu_seqlens_k", cu_seqlens_k, q),
        _lengths("seqlens_q", seqlens_q, q),
        _lengths("seqlens_k", seqlens_k, q),
        rng_state,
        block_table,
        q_segments,
        k_segments,
        block_rows,
        block_columns,
        None if k_scale is None else of_head("k_scale", k_scale, real),
        None if v_scale is None else of_head("v_scale", v_scale, real),
    )
    places = places_of(q_offset, k_offset, h_offset, whole_sq, whole_sk, whole_h)
    numbers = (
        *window_of(window),
        scale_of(scale),
        number_of("softcap", softcap),
        dropout,
        return_weights,
        torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        tf32,
        *places,
        *block_sizes,
        multiprocessors_of(multiprocessors),
    )
    corner = causal_of(causal, places[3] or places[0] + sq, places[4] or places[1] + sk)
    # PyTorch fills in trailing defaults faster than it takes them from Python.
    options: tuple[Any, ...] = ()
    if numbers != NUMBER_DEFAULTS:
        options = (*tensors, max_seqlen_q or 0, max_seqlen_k or 0, corner, *numbers)
    elif packed or corner or max_seqlen_k:
        options = (*tensors, max_seqlen_q or 0, max_seqlen_k or 0, corner)
    elif any(value is not None for value in tensors):
        options = tensors
    try:
        out, lse, weights = call(ops.attention, q, k, v, *options)
    except HeddleValueError as error:
        lengths = {"seqlens_q": seqlens_q, "seqlens_k": seqlens_k}
        _retold(error, lengths | {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k})
    for _ in range(missing):
        out, lse = out.squeeze(0), lse.squeeze(0)
        weights = weights.squeeze(0) if return_weights else weights
    if not (return_lse or return_weights):
        return out
    return (out, *((lse,) if return_lse else ()), *((weights,) if return_weights else ()))


MOST_DIMENSIONS = 8  # of an operator's x


def _rows(x: Tensor) -> Tensor:
    """[rows, last], at one distance."""
    x = x.reshape(-1, x.shape[-1])
    return x.contiguous() if x.stride(0) < x.shape[1] or (x.shape[1] > 1 and x.stride(1) != 1) else x


def _check_prepared(prepared: Tensor, weight: Tensor) -> None:
    need_tensors(prepared=prepared)
    if autocast_dtype(weight.device.type) not in (None, weight.dtype) and weight.dtype != torch.float64:
        raise HeddleValueError("prepared is given, but autocast makes another weight in every call")


def norm_linear_prepare(
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    *,
    norm: str,
    activation: str | None,
    return_norm: bool,
    tf32: bool,
) -> Tensor:
    """See heddle.norm_linear_prepare, which this is for torch tensors."""
    given = {"weight": weight, "bias": bias, "gamma": gamma, "beta": beta}
    need_tensors(**{name: value for name, value in given.items() if name == "weight" or value is not None})
    kind, of_u = norm_of(norm), activation_of(activation)
    return_norm, tf32 = flag_of("return_norm", return_norm), flag_of("tf32", tf32)
    if return_norm and kind == NO_NORM:
        raise HeddleValueError("return_norm is given, but with norm = 'none' z is x")
    with torch.no_grad():
        prepared: Tensor = call(ops.norm_linear_prepare, *given.values(), kind, tf32, of_u, return_norm)
    return prepared


def norm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    eps: float = 1e-5,
    *,
    norm: str = "layer",
    activation: str | None = None,
    residual: Tensor | None = None,
    return_norm: bool = False,
    tf32: bool = False,
    prepared: Tensor | None = None,
    multiprocessors: int = 0,
) -> Any:
    """See heddle.norm_linear, which this is for torch tensors."""
    if not (return_norm or tf32 or prepared is not None or multiprocessors != 0):
        y = quick_linear(x, weight, bias, gamma, beta, eps, norm, activation, residual)
        if y is not NotImplemented:
            return y
    return long_linear(
        *(x, weight, bias, gamma, beta, eps, norm, activation, residual, return_norm),
        tf32=tf32,
        prepared=prepared,
        multiprocessors=multiprocessors,
    )


def long_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    norm: str,
    activation: str | None,
    residual: Tensor | None,
    return_norm: bool,
    *,
    tf32: bool = False,
    prepared: Tensor | None = None,
    multiprocessors: int = 0,
) -> Any:
    """norm_linear where quick_linear() answers NotImplemented, and all that it is not asked for."""
    need_tensors(x=x, weight=weight)
    for name, value in (("bias", bias), ("gamma", gamma), ("beta", beta), ("residual", residual)):
        if value is not None:
            need_tensors(**{name: value})
    kind, eps, of_u = norm_of(norm), eps_of(eps, norm), activation_of(activation)
    return_norm, tf32 = flag_of("return_norm", return_norm), flag_of("tf32", tf32)
    if return_norm and kind == NO_NORM:
        raise HeddleValueError("return_norm is given, but with norm = 'none' z is x")
    rows = None
    if (not x.is_contiguous() and x.dim() >= 1) or x.dim() > MOST_DIMENSIONS:
        # Rows at one distance are taken as they lie; others, and rows on top of each other, are copied first.
        rows = x.shape[:-1]
        x = _rows(x)
    if residual is not None and (rows is not None or not residual.is_contiguous()):
        shape = (*(x.shape[:-1] if rows is None else rows), features_out(weight.shape[0], of_u))
        if residual.shape != shape:
            raise HeddleValueError(f"residual has shape {list(residual.shape)}, but must have {list(shape)}")
        residual = residual.contiguous() if rows is None else _rows(residual)
    act: tuple[Any, ...] = ()
    if prepared is not None:
        _check_prepared(prepared, weight)
    if multiprocessors_of(multiprocessors):
        act = (of_u, False, residual, return_norm, prepared, multiprocessors)
    elif prepared is not None:
        act = (of_u, False, residual, return_norm, prepared)
    elif return_norm:
        act = (of_u, False, residual, True)
    elif residual is not None:
        act = (of_u, False, residual)
    elif of_u:
        act = (of_u,)
    y, *_, z = call(ops.norm_linear, x, weight, bias, gamma, beta, eps, kind, tf32, *act)
    if rows is not None:
        y, z = y.reshape(*rows, y.shape[-1]), z.reshape(*rows, x.shape[-1]) if return_norm else z
    return (y, z) if return_norm else y


heddle._quick, heddle._quick_options, heddle._goes_long = quick, quick_options, torch.compiler.is_dynamo_compiling
heddle._attention_of_torch, heddle._norm_linear_of_torch = attention, norm_linear
heddle._norm_linear_prepare_of_torch = norm_linear_prepare
