# SPDX-License-Identifier: Apache-2.0
"""heddle.attention_append: new keys and values into a cache, and rotary embedding; and what may not be wrong when
heddle.flash_attn_with_kvcache calls it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from heddle import _derivatives
from heddle._errors import HeddleTypeError, HeddleValueError
from heddle._kinds import answers, autocast_dtype, need_tensors, that_dispatch
from heddle._ops import call, ops
from heddle._options import LEAST_SCALE, limit_of, number_of, switch_of
from heddle._torch import of_head, real_type

_STRIDED = torch.strided
_compiling, _transforms = torch.compiler.is_compiling, torch._C._are_functorch_transforms_active
_MOST_STEPS = 10_000  # to find out whether elements meet
# Of attention_append's tensors.
_TENSORS = (
    *("k_cache", "v_cache", "k", "v", "seqlens_k", "q", "rotary_cos", "rotary_sin", "block_table", "cache_index"),
    *("cu_seqlens", "k_scale", "v_scale"),
)


def need_dense(name: str, value: Any) -> None:
    """need_tensors(), quickly where all is well."""
    if type(value) is not Tensor or value.layout is not _STRIDED or value.is_nested or value.is_quantized:
        need_tensors(**{name: value})


def _refuse_tangents(function: str, names: Iterable[str], tensors: Iterable[Tensor | None]) -> None:
    """Forward mode: the cache is written below it, and would have none."""
    if forward_ad._current_level < 0:
        return
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is not None and _derivatives.duals([tensor]) is not None:
            raise NotImplementedError(f"{name} has a tangent, but {function} has no derivatives")


Layout = tuple[int, tuple[int, ...], tuple[int, ...]]  # bytes of an element, sizes, strides


@lru_cache(256)
def _meet(one: Layout, other: Layout, distance: int) -> bool:
    """Does an element of one lie where one of the other does, that many bytes behind? What takes too long to find out
    counts as yes.

    Both are sums of multiples of strides: the first's minus the second's, up to the distance.
    """
    steps: dict[int, list[int]] = {}  # how often a stride can be taken, from and to
    for (size, shape, strides), sign in ((one, 1), (other, -1)):
        if 0 in shape:
            return False
        for n, stride in ((size, 1), *zip(shape, (each * size for each in strides), strict=True)):
            steps.setdefault(stride, [0, 0])[sign > 0] += sign * (n - 1)
    terms = sorted(((stride, *limits) for stride, limits in steps.items() if stride), reverse=True)
    rest = [(0, 0)]  # what the smaller strides come to, at least and at most
    for stride, low, high in reversed(terms):
        rest.append((rest[-1][0] + stride * low, rest[-1][1] + stride * high))
    rest.reverse()
    left = _MOST_STEPS

    def reaches(at: int, distance: int) -> bool:
        nonlocal left
        left -= 1
        if at == len(terms) or left < 0:
            return not distance or left < 0
        stride, low, high = terms[at]
        least, most = rest[at + 1]
        counts = range(max(low, -((most - distance) // stride)), min(high, (distance - least) // stride) + 1)
        return any(reaches(at + 1, distance - stride * count) for count in counts)

    return reaches(0, distance)


def _shares(one: Tensor, other: Tensor) -> bool:
    layouts = [(tensor.element_size(), tensor.shape, tensor.stride()) for tensor in (one, other)]
    return _meet(*layouts, other.data_ptr() - one.data_ptr())


def _refuse_shared(k_cache: Tensor, v_cache: Tensor, read: tuple[Tensor | None, ...]) -> None:
    """Of what is written and what is read meanwhile, nothing lies in one place. Looks at storages first."""
    of_k, of_v = k_cache.untyped_storage(), v_cache.untyped_storage()
    k_from, v_from = of_k.data_ptr(), of_v.data_ptr()
    if not k_from or not v_from:
        return  # of no elements, or on meta
    k_to, v_to = k_from + of_k.nbytes(), v_from + of_v.nbytes()
    if k_from < v_to and v_from < k_to and _shares(k_cache, v_cache):
        raise HeddleValueError("k_cache and v_cache share memory: values would be written over keys")
    for name, tensor in zip("kvq", read, strict=True):
        if tensor is None:
            continue
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        end = begin + storage.nbytes()
        for cache, there in (
            ("k_cache", begin < k_to and k_from < end and _shares(tensor, k_cache)),
            ("v_cache", begin < v_to and v_from < end and _shares(tensor, v_cache)),
        ):
            if there:
                raise HeddleValueError(f"{name} shares memory with {cache}, which is written: give a copy")


def _last_contiguous(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or tensor.shape[-1] == 1 or tensor.stride(-1) == 1 else tensor.contiguous()


def attention_append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    seqlens_k: Tensor,
    *,
    q: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    rotary_together: bool = False,
    block_table: Tensor | None = None,
    cache_index: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    max_seqlen_k: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Writes k and v behind what each sequence has in a cache, in place in one launch, and rotates k and q.

    Row i of sequence n becomes row j = seqlens_k[n] + i of its cache. With tables, element pairs (y, z) of the first
    2·rotary_cos.shape[1] elements of a row of k or q become (y·cos[j] - z·sin[j], y·sin[j] + z·cos[j]), in float32.

    Args:
        k_cache, v_cache: [b, hk, sk, d] and [..., dv], by any strides; with block_table pages, [pages, hk, page, d].
            Of k's dtype, or float8_e4m3fn.
        k, v: [b, hk, s, d] and [..., dv]; with cu_seqlens packed, [total, hk, d].
        seqlens_k: int32 [b], rows that each sequence has before.
        q: [b, h, sq, d], or packed as k is: queries to be rotated as the keys at their places are.
        rotary_cos, rotary_sin: [positions, rotary / 2], float32 or as k, at least as many rows as a sequence may have.
        rotary_interleaved: pairs are elements 2e and 2e + 1 (GPT-J); else e and e + rotary/2 (GPT-NeoX, Llama).
        rotary_together: all queries of a sequence are at seqlens_k[n], not at seqlens_k[n] + i.
        block_table: int32 [b, n], the pages of each sequence in order, as in heddle.attention.
        cache_index: int32 [b], which sequence of the cache each one is; without pages.
        cu_seqlens: int32 [b + 1], where each sequence begins among the packed rows.
        max_seqlen: no sequence has more new rows (packed; default: all rows).
        max_seqlen_k: no sequence has more rows in the cache; default: what there is room for.
        k_scale, v_scale: float32 [b, hk], of caches of float8_e4m3fn alone: what is written is divided by that of its
            sequence and head and rounded once, to 448 where it is larger. None: ones.

    Returns:
        (q rotated, or None without q; int32 [b], rows that each sequence has now). No gradients.

    Rows are not written where there is no place for them: behind the cache's end, in a page that is none, for an index
    that is none. A query at a position that the tables have not becomes NaN. Two rows must not go to one place.

    Raises:
        TypeError, ValueError: a wrong dtype, device, shape; NotImplementedError: where a tensor requires a gradient.

    Source: Su et al., "RoFormer", 2021.
    """
    tensors = (
        *(k_cache, v_cache, k, v, seqlens_k, q, rotary_cos, rotary_sin, block_table, cache_index, cu_seqlens),
        *(k_scale, v_scale),
    )
    if k_cache is None or v_cache is None or k is None or v is None or seqlens_k is None:
        need_tensors(k_cache=k_cache, v_cache=v_cache, k=k, v=v, seqlens_k=seqlens_k)
    usual = True
    for name, value in zip(_TENSORS, tensors, strict=True):
        if value is not None and (
            type(value) is not Tensor or value.layout is not _STRIDED or value.is_nested or value.is_quantized
        ):
            need_tensors(**{name: value})
            usual = False
    if cu_seqlens is None and max_seqlen is not None:
        raise HeddleValueError(f"max_seqlen = {max_seqlen} is given without cu_seqlens")
    max_seqlen, max_seqlen_k = limit_of("max_seqlen", max_seqlen), limit_of("max_seqlen_k", max_seqlen_k)
    if rotary_interleaved is not False or rotary_together is not False:
        rotary_interleaved = switch_of("rotary_interleaved", rotary_interleaved)
        rotary_together = switch_of("rotary_together", rotary_together)
        for name, flag in (("rotary_interleaved", rotary_interleaved), ("rotary_together", rotary_together)):
            if flag and rotary_cos is rotary_sin is None:
                raise HeddleValueError(f"{name} is given without rotary_cos and rotary_sin")
        if rotary_together and q is None:
            raise HeddleValueError("rotary_together is given without q, which it is for")
    if rotary_cos is not None and rotary_cos.dim() == 2 and rotary_cos.shape[1] == 0:
        raise HeddleValueError(
            f"rotary_cos has shape {list(rotary_cos.shape)}, but must have [positions, rotary / 2] with one column or "
            "more"
        )
    _refuse_tangents("attention_append", _TENSORS, tensors)
    if k_cache is v_cache:  # also while a compiler looks, who tells of no addresses
        raise HeddleValueError("k_cache and v_cache are one tensor: values would be written over keys")
    if not (_compiling() or _transforms()) and (usual or not that_dispatch(tensors)):
        _refuse_shared(k_cache, v_cache, (k, v, q))
    if max_seqlen_k == 0:  # which the operator takes for no limit: no row has a place, and lengths are clamped to 0
        if block_table is None and cache_index is None and k_cache.shape[0] != seqlens_k.shape[0]:
            raise HeddleValueError(f"seqlens_k has shape {list(seqlens_k.shape)}, but k_cache {list(k_cache.shape)}")
        seqlens_k = torch.zeros_like(seqlens_k)
        if block_table is None:
            cache_index = torch.full_like(seqlens_k if cache_index is None else cache_index, -1)
        else:
            block_table = torch.full_like(block_table, -1)
    if rotary_cos is not None and rotary_sin is not None and rotary_cos.stride() != rotary_sin.stride():
        rotary_cos, rotary_sin = rotary_cos.contiguous(), rotary_sin.contiguous()
    most = 0 if cu_seqlens is None else k.shape[0] if max_seqlen is None else max_seqlen
    rotated, lengths = call(
        ops.attention_append,
        k_cache,
        v_cache,
        _last_contiguous(k),
        _last_contiguous(v),
        seqlens_k,
        _last_contiguous(q),
        rotary_cos,
        rotary_sin,
        block_table,
        cache_index,
        cu_seqlens,
        most,
        max_seqlen_k or 0,
        rotary_interleaved,
        rotary_together,
        k_scale if k_scale is None else k_scale.contiguous(),
        v_scale if v_scale is None else v_scale.contiguous(),
    )
    if max_seqlen_k == 0:
        lengths = torch.zeros_like(lengths)
    return (None if q is None else rotated), lengths


# ------------------------------------------------------------------------------------------ flash_attn_with_kvcache
# What it asks of its arguments, in its own layout, before anything is written. Attention, which comes behind, asks the
# same, but then the cache is no longer what it was.


_EIGHT = torch.float8_e4m3fn
_CAST = (torch.float32, torch.bfloat16, torch.float16)  # by autocast
_FLOATS = (*_CAST, torch.float64)


def _need_rows(name: str, tensor: Any) -> None:
    need_dense(name, tensor)
    if tensor.dim() != 4:
        raise HeddleValueError(f"{name} has {tensor.dim()} dimensions, but must have 4: [b, s, h, d]")


def _need_device(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.device != q.device:
        raise HeddleValueError(f"{name} is on {tensor.device}, q on {q.device}")


def _is_cast(tensor: Tensor, q: Tensor) -> bool:
    """Autocast gives both one dtype."""
    return tensor.dtype in _CAST and q.dtype in _CAST and autocast_dtype(q.device.type) is not None


def check_caches(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        _need_rows(name, tensor)
        _need_device(name, tensor, q)
    if q.dtype not in _FLOATS:
        raise HeddleTypeError(f"q is {q.dtype}, but must be one of {', '.join(map(str, _FLOATS))}")
    eight = _EIGHT in (k_cache.dtype, v_cache.dtype)
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        if eight and tensor.dtype != _EIGHT:
            raise HeddleTypeError(f"{name} is {tensor.dtype}, but must be {_EIGHT} as the other cache")
        if not eight and tensor.dtype != q.dtype and not _is_cast(tensor, q):
            raise HeddleTypeError(f"{name} is {tensor.dtype}, but must be {q.dtype} as q")
    shapes = q.shape, k_cache.shape, v_cache.shape
    if shapes[1][:3] != shapes[2][:3] or shapes[1][3] != shapes[0][3]:
        raise HeddleValueError(
            f"q and the caches have shapes {list(map(list, shapes))}: head dims of q and k, or rows of k and v, differ"
        )
    h, hk = shapes[0][2], shapes[1][2]
    if hk and (h == 0 or h % hk):
        raise HeddleValueError(f"k_cache has hk = {hk} heads, which does not divide h = {h} of q")


def check_new(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, room: int) -> None:
    eight = k_cache.dtype == _EIGHT
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        _need_rows(name, new)
        must = [q.shape[0], k.shape[1], *cache.shape[2:]]
        if list(new.shape) != must:
            raise HeddleValueError(f"{name} has shape {list(new.shape)}, but must have {must}, as its cache")
        if new.dtype == _EIGHT:
            raise HeddleTypeError(f"{name} is {_EIGHT}, but must be of q's dtype: it is rounded as it is written")
        dtype = (k.dtype if _is_cast(k, q) else q.dtype) if eight else cache.dtype
        if new.dtype != dtype or new.device != cache.device:
            of = "q" if eight else "its cache"
            raise HeddleTypeError(f"{name} is {new.dtype} on {new.device}, {of} {dtype} on {cache.device}")
    if type(q) is not type(k_cache) and answers(q):
        raise HeddleTypeError(f"q is of class {type(q).__qualname__}, k_cache of {type(k_cache).__qualname__}")
    # check_limits of src/cuda/attention/plan.c
    rows = max(4, q.shape[1], room)
    if q.is_cuda and (rows >= 2**30 or q.shape[0] * q.shape[2] * rows >= 2**31):
        raise NotImplementedError(
            f"q has shape {list(q.shape)}, and a cache room for {room} rows: over 2^30 rows or 2^31 blocks on a GPU"
        )


def check_scores(softmax_scale: Any, softcap: Any, q: Tensor) -> None:
    """check_values of src/plan.c."""
    if type(softcap) is float and softcap == 0 and type(softmax_scale) is float and LEAST_SCALE <= softmax_scale <= 1:
        return  # as mostly, and quickly seen
    scale = 0.0 if softmax_scale is None else number_of("softmax_scale", softmax_scale)
    cap = number_of("softcap", softcap)
    if cap < 0:
        raise HeddleValueError(f"softcap = {cap:g} is negative")
    factors = {"softmax_scale": scale, "softcap": cap}
    if cap:
        own = max(q.shape[3], 1) ** -0.5 if softmax_scale is None else scale or LEAST_SCALE
        factors["softmax_scale / softcap"] = own / cap
    for name, factor in factors.items():
        if factor and q.dtype != torch.float64 and not LEAST_SCALE <= abs(factor) <= 1 / LEAST_SCALE:
            raise HeddleValueError(f"{name} = {factor:g} is not from 2^-100 to 2^100, as float32 scores need")


def slopes_of(slopes: Any, q: Tensor) -> Tensor:
    """alibi_slopes as attention takes them."""
    need_dense("alibi_slopes", slopes)
    b, _, h, _ = q.shape
    if list(slopes.shape) not in ([h], [b, h]):
        raise HeddleValueError(f"alibi_slopes has shape {list(slopes.shape)}, but must have {[h]} or {[b, h]}")
    _need_device("alibi_slopes", slopes, q)
    return of_head("alibi_slopes", slopes, real_type(q))


def descale_of(name: str, scale: Any, q: Tensor, k_cache: Tensor) -> Tensor:
    """k_descale or v_descale as attention and attention_append take it."""
    if k_cache.dtype != _EIGHT:
        raise HeddleValueError(f"{name} is given, but k_cache and v_cache are {k_cache.dtype}, not {_EIGHT}")
    need_dense(name, scale)
    must = [q.shape[0], k_cache.shape[2]]
    if list(scale.shape) != must:
        raise HeddleValueError(f"{name} has shape {list(scale.shape)}, but must have {must}")
    _need_device(name, scale, q)
    return of_head(name, scale, real_type(q))


def check_derivatives(written: bool, **tensors: Tensor | None) -> None:
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if tensor is not None and tensor.requires_grad:
                raise NotImplementedError(
                    f"{name} requires a gradient, but flash_attn_with_kvcache has no gradient: call it under "
                    "torch.no_grad()"
                )
    if written:
        _refuse_tangents("flash_attn_with_kvcache", tensors, tensors.values())


def check_table(table: Any, q: Tensor, cache_batch_idx: Tensor | None) -> None:
    need_dense("block_table", table)
    if table.dtype != torch.int32:
        raise HeddleTypeError(f"block_table is {table.dtype}, but must be torch.int32")
    if table.dim() != 2 or table.shape[0] != q.shape[0]:
        raise HeddleValueError(f"block_table has shape {list(table.shape)}, but must have [{q.shape[0]}, pages]")
    _need_device("block_table", table, q)
    if cache_batch_idx is not None:
        raise HeddleValueError("cache_batch_idx is given with block_table, which says where each batch's keys are")


def check_integers(name: str, value: Any, q: Tensor) -> None:
    need_dense(name, value)
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise HeddleTypeError(f"{name} is {value.dtype}, but must be integers")
    if value.shape != q.shape[:1]:
        raise HeddleValueError(f"{name} has shape {list(value.shape)}, but must have {[q.shape[0]]}")
    _need_device(name, value, q)


def check_rotary(rotary_cos: Any, k: Tensor | None, room: int) -> None:
    need_dense("rotary_cos", rotary_cos)
    if k is None:
        raise HeddleValueError("rotary_cos is given without k and v, which it is for")
    if rotary_cos.dim() != 2 or rotary_cos.shape[0] < room:
        raise HeddleValueError(
            f"rotary_cos has shape {list(rotary_cos.shape)}, but must have [positions, rotary / 2] with as many "
            f"positions as the cache has rows, {room}"
        )


def _pages(count: int, lengths: Tensor, table: Tensor, page: int) -> Tensor:
    """The pages of keys lengths[n] to lengths[n] + count - 1 of each n."""
    positions = lengths.to(torch.int64)[:, None] + torch.arange(count, device=lengths.device)
    return table.to(torch.int64).gather(1, positions // page)


def _readable(tensor: Tensor) -> bool:
    """Not while torch.compile or torch.export looks: what is wrong is told when the graph runs."""
    return type(tensor) is Tensor and not torch.compiler.is_compiling()


def check_places(count: int, lengths: Tensor, table: Tensor | None, cache: Tensor, room: int) -> None:
    """Where they can be read; on a GPU what has no place is not written."""
    parts = cache.shape[0]
    if not _readable(lengths):
        if count > room:
            raise HeddleValueError(f"the cache has {room} rows: too few for {count} new ones")
        fits = (lengths >= 0).all() & (lengths <= room - count).all()
        torch._assert_async(fits, "cache_seqlens has no place for k and v in the cache")
        if table is not None:
            part = _pages(count, lengths.clamp(0, room - count), table, cache.shape[1])
            named = ((part >= 0) & (part < parts)).all()
            torch._assert_async(named, "block_table has no page for k and v")
        return
    if int(lengths.min()) < 0:
        raise HeddleValueError(f"cache_seqlens has {int(lengths.min())}, but must not be negative")
    if int(lengths.max()) + count > room:
        raise HeddleValueError(f"the cache has {room} rows: too few for {int(lengths.max())} and {count} new ones")
    if table is None:
        return
    part = _pages(count, lengths, table, cache.shape[1])
    if not part.numel():
        return
    least, most = int(part.min()), int(part.max())
    if not 0 <= least <= most < parts:
        raise HeddleValueError(f"block_table has no page for k and v: {least} to {most} of {parts}")


def check_rows(rows: Tensor, parts: int) -> None:
    if not _readable(rows):
        torch._assert_async(((rows >= 0) & (rows < parts)).all(), "cache_batch_idx names a row that the cache has not")
    elif rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < parts:
        raise HeddleValueError(f"cache_batch_idx = {rows.tolist()} is not all from 0 to {parts - 1}")
