# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's functions: its signatures, layouts and defaults (causal is bottom right).

Source: Dao et al., "FlashAttention", 2022, and "FlashAttention-2", 2023; the signatures are those of flash-attn 2.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from heddle import _append, attention
from heddle._errors import HeddleTypeError, HeddleValueError
from heddle._heads import attention_of_heads
from heddle._kinds import need_tensors
from heddle._ops import quick
from heddle._options import flag_of, integer_of, switch_of, window_of
from heddle._plain import new_rng_state
from heddle._torch import int32_of

_compiling = torch.compiler.is_dynamo_compiling
Probs = tuple[Tensor, Tensor, Tensor | None]

_COMMON = """
        dropout_p: probability that a weight is dropped; 0 in evaluation.
        softmax_scale: default 1/sqrt(d).
        causal: the last query sees the last key (bottom right).
        window_size: (left, right), integers or integer tensors of one element; -1 is no limit.
        softcap: c > 0 replaces a score t by c·tanh(t/c).
        alibi_slopes: float32 [h] or [b, h]; adds -slope·|i + sk - sq - j|.
        deterministic: gradients with the same bits every time.
        return_attn_probs: return (out, softmax_lse, S_dmask) instead of out: softmax_lse is float32 [b, h, sq]
            (packed: [h, total_q]); S_dmask, for tests only, is the weights with dropped ones negative where
            dropout_p > 0 and the call is not packed, else None.

    Returns:
        out, laid out as q with v's head dim; dtypes float32, bfloat16 and float16 on CPU or CUDA, as heddle.attention.

    Raises:
        TypeError, ValueError, NotImplementedError: as heddle.attention, and for an argument that cannot be honoured.

    Source: flash-attn 2, flash_attn_interface.py, whose meaning this keeps.
    """


def _document(function: Any) -> Any:
    function.__doc__ = (function.__doc__ or "").rstrip() + _COMMON
    return function


_NO_LIMIT = (-1, -1)
_NUMBERS = (float, int)  # of a plain call; what else is given attention looks at


def _corner(causal: Any) -> Literal["bottom_right"] | None:
    """FlashAttention's only one; a name of heddle.attention's corners is no bool."""
    return "bottom_right" if flag_of("causal", causal) else None


def _window(size: Any) -> tuple[int, int] | None:
    """None where there is no limit, so that the call stays a plain one."""
    if type(size) is tuple and len(size) == 2 and type(size[0]) is type(size[1]) is int and size == _NO_LIMIT:
        return None  # the default, without the 1 µs of what follows
    window = window_of(size)
    return None if window == _NO_LIMIT else window


def _heads_first(name: str, tensor: Tensor) -> Tensor:
    if type(tensor) is not Tensor or tensor.is_nested:  # attention looks at what else it may be
        need_tensors(**{name: tensor})
    if tensor.dim() != 4:
        raise HeddleValueError(f"{name} has {tensor.dim()} dimensions, but must have 4: [b, s, h, d]")
    return tensor.transpose(1, 2)


def _signed_weights(q: Tensor, k: Tensor, weights: Tensor, rng_state: Tensor, options: dict[str, Any]) -> Tensor:
    """The weights, dropped ones negative. What is kept shows when v is a unit matrix, up to 512 columns at a time."""
    eye = torch.eye(k.shape[2], dtype=q.dtype, device=q.device).expand(*k.shape[:2], -1, -1)
    kept = [
        attention(q, k, part, rng_state=rng_state, **options)
        for part in (eye[..., at : at + 512].contiguous() for at in range(0, k.shape[2], 512))
    ]
    return torch.where(torch.cat(kept, -1) > 0, weights, -weights)


@_document
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | Probs:
    """Attention of [b, s, h, d] tensors.

    Args:
        q: [b, sq, h, d].
        k, v: [b, sk, hk, d] and [b, sk, hk, dv]; hk divides h."""
    heads_q, heads_k, heads_v = _heads_first("q", q), _heads_first("k", k), _heads_first("v", v)
    window = _window(window_size)
    is_plain = return_attn_probs is deterministic is False and type(softcap) in _NUMBERS and type(dropout_p) in _NUMBERS
    if is_plain and window is None and alibi_slopes is None and not (softcap or dropout_p or _compiling()):
        plain = quick(heads_q, heads_k, heads_v, _corner(causal), softmax_scale)
        if plain is not NotImplemented:
            turned: Tensor = plain.transpose(1, 2)
            return turned
    options: dict[str, Any] = {
        "causal": _corner(causal),
        "window": window,
        "scale": softmax_scale,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "dropout": dropout_p,
        "deterministic": flag_of("deterministic", deterministic) or None,
    }
    if not flag_of("return_attn_probs", return_attn_probs):
        out: Tensor = attention(heads_q, heads_k, heads_v, **options)
        return out.transpose(1, 2)
    if not dropout_p:
        out, lse = attention(heads_q, heads_k, heads_v, return_lse=True, **options)
        return out.transpose(1, 2), lse, None
    rng_state = new_rng_state(q.device)
    out, lse, weights = attention(
        heads_q, heads_k, heads_v, rng_state=rng_state, return_lse=True, return_weights=True, **options
    )
    with torch.no_grad():
        signed = _signed_weights(heads_q, heads_k, weights, rng_state, options)
    return out.transpose(1, 2), lse, signed


def _unpack(name: str, tensor: Tensor, parts: int, rank: int) -> tuple[Tensor, ...]:
    need_tensors(**{name: tensor})
    if tensor.dim() != rank or tensor.shape[-3] != parts:
        raise HeddleValueError(
            f"{name} has shape {list(tensor.shape)}, but must have {rank} dimensions, {parts} in the third last"
        )
    return tensor.unbind(-3)


@_document
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q, k and v in one tensor.

    Args:
        qkv: [b, s, 3, h, d]."""
    q, k, v = _unpack("qkv", qkv, 3, 5)
    is_plain = return_attn_probs is deterministic is False and type(softcap) in _NUMBERS and type(dropout_p) in _NUMBERS
    is_plain = is_plain and alibi_slopes is None and not (softcap or dropout_p) and _window(window_size) is None
    h = qkv.shape[3]
    if is_plain and qkv.stride(2) == h * qkv.stride(3):
        o = attention_of_heads(qkv.flatten(2, 3), h, h, _corner(causal), softmax_scale)
        if o is not NotImplemented:
            return o.transpose(1, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


@_document
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention with k and v in one tensor.

    Args:
        q: [b, sq, h, d].
        kv: [b, sk, 2, hk, d]."""
    k, v = _unpack("kv", kv, 2, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


@_document
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | Probs:
    """Attention of packed sequences of different lengths.

    Args:
        q: [total_q, h, d].
        k, v: [total_k, hk, d] and [total_k, hk, dv].
        cu_seqlens_q, cu_seqlens_k: int32 [b + 1], where each sequence begins, and the end.
        max_seqlen_q, max_seqlen_k: the upper limit of one sequence.
        block_table: must be None: paged caches are not supported."""
    if block_table is not None:
        raise NotImplementedError("block_table (a paged cache) is not supported: give k and v packed")
    return_attn_probs = flag_of("return_attn_probs", return_attn_probs)
    out, lse = attention(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        causal=_corner(causal),
        window=_window(window_size),
        scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout=dropout_p,
        deterministic=flag_of("deterministic", deterministic) or None,
        return_lse=True,
    )
    return (out, lse, None) if return_attn_probs else out


@_document
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0, *args: Any, **options: Any
) -> Any:
    """Packed sequences with q, k and v in one tensor; then as flash_attn_varlen_func from softmax_scale on.

    Args:
        qkv: [total, 3, h, d].
        cu_seqlens: int32 [b + 1].
        max_seqlen: the upper limit of one sequence."""
    q, k, v = _unpack("qkv", qkv, 3, 4)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, *args, **options)


@_document
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    *args: Any,
    **options: Any,
) -> Any:
    """Packed sequences with k and v in one tensor; then as flash_attn_varlen_func from softmax_scale on.

    Args:
        q: [total_q, h, d].
        kv: [total_k, 2, hk, d].
        cu_seqlens_q, cu_seqlens_k: int32 [b + 1].
        max_seqlen_q, max_seqlen_k: the upper limit of one sequence."""
    k, v = _unpack("kv", kv, 2, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, *args, **options
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries over a cache of keys and values, to which k and v are added in place first.

    Args:
        q: [b, sq, h, d].
        k_cache, v_cache: [b_cache, s_cache, hk, d] and [..., dv]; with block_table pages, [pages, page, hk, d] and
            [..., dv], of 16, 32, 64, 128 or 256 keys. Written to when k and v are given.
        k, v: [b, s_new, hk, d]: written behind the cache_seqlens[n] rows of batch n.
        cache_seqlens: int or int32 [b], rows of the cache that count (before k and v are added); default: all.
        cache_batch_idx: int [b], the row of the cache that each batch uses (that part of the cache is then copied).
        block_table: int32 [b, n], the pages of each batch in order, as in heddle.attention.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as flash_attn_func.
        num_splits: a hint on speed for FlashAttention; the result does not depend on it here.
        rotary_cos, rotary_sin: [positions, rotary / 2], float32 or as q, at least as many rows as the cache has: k is
            rotated by its place as it is written, and q by its own: cache_seqlens[n] + i of query i with causal or a
            window, else cache_seqlens[n].
        rotary_interleaved: pairs are elements 2e and 2e + 1, else e and e + rotary/2, as in heddle.attention_append.
        cache_leftpad: must be None.
        k_descale, v_descale: float32 [b, hk], for caches of float8_e4m3fn alone: what the keys and values of each head
            of each batch are multiplied with, as in FlashAttention 3; None: ones. k and v, which have q's dtype, are
            divided by them and rounded to such caches.

    Returns:
        out [b, sq, h, dv], and with return_softmax_lse also the lse, float32 [b, h, sq]. No gradients.

    Raises:
        NotImplementedError: for an argument that cannot be honoured, and where q, k or v requires a gradient.
        ValueError, TypeError: as heddle.attention; a cache too short for k and v.

    Source: flash-attn 2, flash_attn_interface.py, whose meaning this keeps.
    """
    if cache_leftpad is not None:
        raise NotImplementedError("cache_leftpad is not supported: it must be None")
    return_softmax_lse = flag_of("return_softmax_lse", return_softmax_lse)
    rotary_interleaved = switch_of("rotary_interleaved", rotary_interleaved)
    integer_of("num_splits", num_splits)
    if (k is None) != (v is None):
        raise HeddleValueError("k and v come together, but only one is given")
    corner, window = _corner(causal), _window(window_size)
    _append.check_caches(q, k_cache, v_cache)
    if block_table is not None:
        _append.check_table(block_table, q, cache_batch_idx)
    b, page = q.shape[0], k_cache.shape[1]
    room = page if block_table is None else page * block_table.shape[1]
    if k is not None and v is not None:
        _append.check_new(q, k_cache, v_cache, k, v, room)
    if softmax_scale is not None or type(softcap) not in _NUMBERS or softcap:
        _append.check_scores(softmax_scale, softcap, q)
    if alibi_slopes is not None:
        alibi_slopes = _append.slopes_of(alibi_slopes, q)
    if k_descale is not None:
        k_descale = _append.descale_of("k_descale", k_descale, q, k_cache)
    if v_descale is not None:
        v_descale = _append.descale_of("v_descale", v_descale, q, k_cache)
    if (rotary_cos is None) != (rotary_sin is None):
        raise HeddleValueError("rotary_cos and rotary_sin come together, but only one is given")
    if rotary_cos is not None:
        _append.check_rotary(rotary_cos, k, room)
    constants = {"alibi_slopes": alibi_slopes, "k_descale": k_descale, "v_descale": v_descale}
    _append.check_derivatives(k is not None, q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, **constants)
    if q.stride(3) != 1 and q.shape[3] > 1:
        q = q.contiguous()
    if cache_batch_idx is None and block_table is None and k_cache.shape[0] != b:
        raise HeddleValueError(
            f"q has batch size {b}, the cache {k_cache.shape[0]}: they differ, and cache_batch_idx is None"
        )
    if cache_seqlens is None:
        if k is not None:
            raise HeddleValueError("k and v are given, but cache_seqlens does not say where they go")
        lengths = torch.full((b,), room, dtype=torch.int32, device=q.device)
    elif isinstance(cache_seqlens, Tensor):
        _append.check_integers("cache_seqlens", cache_seqlens, q)
        lengths = cache_seqlens.contiguous()
    elif not isinstance(cache_seqlens, int) or isinstance(cache_seqlens, bool):
        raise HeddleTypeError(f"cache_seqlens must be an int or a tensor of int32, not {type(cache_seqlens).__name__}")
    elif not 0 <= cache_seqlens <= room:
        raise HeddleValueError(
            f"cache_seqlens = {cache_seqlens} must not be negative, nor exceed the cache's {room} rows"
        )
    else:
        lengths = torch.full((b,), cache_seqlens, dtype=torch.int32, device=q.device)
    if cache_batch_idx is None:
        rows = torch.arange(b, device=q.device)
    else:
        _append.check_integers("cache_batch_idx", cache_batch_idx, q)
        rows = cache_batch_idx.to(torch.int64)
        if rows.device.type == "cpu":
            _append.check_rows(rows, k_cache.shape[0])
    if k is not None and v is not None:
        if lengths.device.type == "cpu" and b:
            _append.check_places(k.shape[1], lengths, block_table, k_cache, room)
        rotated, lengths = _append.attention_append(
            k_cache.transpose(1, 2),
            v_cache.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            int32_of("cache_seqlens", lengths),
            q=None if rotary_cos is None else q.to(k.dtype).transpose(1, 2),
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            rotary_interleaved=rotary_cos is not None and rotary_interleaved,
            rotary_together=rotary_cos is not None and corner is None and window is None,
            block_table=block_table,
            cache_index=None if cache_batch_idx is None else int32_of("cache_batch_idx", rows).contiguous(),
            k_scale=k_descale,
            v_scale=v_descale,
        )
        q = q if rotated is None else rotated.transpose(1, 2)
    if cache_batch_idx is not None:
        k_cache, v_cache = k_cache[rows], v_cache[rows]
    try:
        out, lse = attention(
            q.transpose(1, 2),
            k_cache.transpose(1, 2),
            v_cache.transpose(1, 2),
            seqlens_k=lengths,
            causal=corner,
            window=window,
            scale=softmax_scale,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            return_lse=True,
            block_table=block_table,
            k_scale=k_descale,
            v_scale=v_descale,
        )
    except HeddleValueError as error:
        raise HeddleValueError(str(error).replace("seqlens_k", "cache_seqlens")) from None
    out = out.transpose(1, 2)
    return (out, lse) if return_softmax_lse else out
