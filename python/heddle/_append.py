# SPDX-License-Identifier: Apache-2.0
"""heddle.attention_append: new keys and values into a cache, and rotary embedding."""

from __future__ import annotations

from torch import Tensor

from heddle._errors import HeddleValueError
from heddle._kinds import need_tensors
from heddle._ops import call, ops


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
    need_tensors(k_cache=k_cache, v_cache=v_cache, k=k, v=v, seqlens_k=seqlens_k)
    given = {"q": q, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "block_table": block_table}
    given |= {"cache_index": cache_index, "cu_seqlens": cu_seqlens, "k_scale": k_scale, "v_scale": v_scale}
    need_tensors(**{name: value for name, value in given.items() if value is not None})
    if cu_seqlens is None and max_seqlen is not None:
        raise HeddleValueError(f"max_seqlen = {max_seqlen} is given without cu_seqlens")
    if rotary_cos is not None and rotary_sin is not None and rotary_cos.stride() != rotary_sin.stride():
        rotary_cos, rotary_sin = rotary_cos.contiguous(), rotary_sin.contiguous()
    if rotary_cos is not None and rotary_cos.dim() == 2 and rotary_cos.shape[1] == 0:
        raise HeddleValueError(
            f"rotary_cos has shape {list(rotary_cos.shape)}, but must have [positions, rotary / 2] with one column or "
            "more"
        )
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
    return (None if q is None else rotated), lengths
