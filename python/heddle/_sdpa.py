# SPDX-License-Identifier: Apache-2.0
"""In the place of PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional
from torch import Tensor

from heddle import attention
from heddle._ops import quick

_broadcast_shapes: Any = torch.broadcast_shapes


def _as_four(tensor: Tensor, batch: tuple[int, ...], heads: int) -> Tensor:
    """[..., h, s, e] or [s, e] as [b, h, s, e], with its leading dimensions broadcast."""
    if tensor.dim() == 2:
        tensor = tensor.unsqueeze(0)
    if tensor.shape[-3] != heads:
        tensor = tensor.expand(*tensor.shape[:-3], heads, *tensor.shape[-2:])
    if tensor.dim() != 4 or tensor.shape[:-3] != batch:
        tensor = tensor.expand(*batch, *tensor.shape[-3:]).reshape(math.prod(batch), *tensor.shape[-3:])
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _mask_as_four(mask: Tensor, batch: tuple[int, ...], q: Tensor, k: Tensor) -> Tensor:
    if mask.dim() > 4 or (mask.dim() == 4 and len(batch) != 1) or (mask.dim() == 3 and len(batch) > 1):
        full = (*batch, q.shape[1], q.shape[2], k.shape[2])
        try:
            mask = mask.expand(full).reshape(math.prod(batch), *full[-3:])
        except RuntimeError:
            raise ValueError(f"attn_mask has shape {list(mask.shape)}, but must broadcast to {list(full)}") from None
    return mask


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, computed by heddle.

    Args:
        query: [..., h, sq, d] or [sq, d]; float32, bfloat16 or float16 on CPU or CUDA, float64 on the CPU.
        key, value: [..., hk, sk, d] and [..., hk, sk, dv]; leading dimensions broadcast.
        attn_mask: broadcasts to [..., h, sq, sk]. bool: True takes part. A float is added, and has a gradient.
        dropout_p: probability that a weight is dropped, whatever the mode of the module.
        is_causal: query i sees keys 0 to i (top left). Not together with attn_mask.
        scale: default 1/sqrt(d).
        enable_gqa: let hk be a divisor of h.

    Returns:
        [..., h, sq, dv]. A query that sees no key gets zeros.

    Raises:
        TypeError, ValueError, NotImplementedError: as heddle.attention.

    Source: the documentation of PyTorch's function.
    """
    if attn_mask is None and not dropout_p and not torch.compiler.is_dynamo_compiling():
        out: Tensor = quick(query, key, value, "top_left" if is_causal else None, scale, not enable_gqa)
        if out is not NotImplemented:
            return out
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
        if tensor.dim() < 2:
            raise ValueError(f"{name} has {tensor.dim()} dimensions, but must have 2 or more")
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask and is_causal=True cannot be given together")
    q_heads, k_heads, v_heads = (1 if t.dim() == 2 else t.shape[-3] for t in (query, key, value))
    if not enable_gqa and not (q_heads == k_heads == v_heads or 1 in (k_heads, v_heads, q_heads)):
        raise ValueError(f"query has {q_heads} heads, key {k_heads}, value {v_heads}: enable_gqa=True lets them differ")
    batch = tuple(query.shape[:-3])
    try:
        if not batch == key.shape[:-3] == value.shape[:-3]:
            batch = tuple(_broadcast_shapes(batch, key.shape[:-3], value.shape[:-3]))
    except RuntimeError:
        shapes = [list(t.shape) for t in (query, key, value)]
        raise ValueError(f"the leading dimensions of query, key and value do not broadcast: {shapes}") from None
    heads = max(k_heads, v_heads) if enable_gqa else max(q_heads, k_heads, v_heads)
    shape = (*batch, q_heads if enable_gqa else heads, query.shape[-2], value.shape[-1])
    q = _as_four(query, batch, shape[-3])
    k, v = _as_four(key, batch, heads), _as_four(value, batch, heads)
    bias, mask = None, None
    if attn_mask is not None:
        if not isinstance(attn_mask, Tensor):
            raise TypeError(f"attn_mask must be a torch.Tensor, not {type(attn_mask).__name__}")
        if attn_mask.dim() > max(len(batch) + 3, 4):
            raise ValueError(f"attn_mask has shape {list(attn_mask.shape)}: more dimensions than query, key and value")
        attn_mask = _mask_as_four(attn_mask, batch, q, k)
        if attn_mask.dtype == torch.bool:
            mask = attn_mask
        else:
            bias = attn_mask
    out = attention(
        q, k, v, causal="top_left" if is_causal else None, scale=scale, bias=bias, mask=mask, dropout=dropout_p
    )
    if query.dim() == key.dim() == value.dim() == 4:
        return out
    return out.reshape(shape[-2:] if query.dim() == key.dim() == value.dim() == 2 else shape)


@contextlib.contextmanager
def patch() -> Iterator[None]:
    """Within a ``with heddle.patch():``, torch.nn.functional.scaled_dot_product_attention is heddle's.

    For every caller in the process that looks it up there, torch.nn.MultiheadAttention included; not for those that
    took the function itself before (``from torch.nn.functional import scaled_dot_product_attention``), nor for
    PyTorch's C++ fast path of TransformerEncoderLayer in evaluation. Nested use is fine.

    Raises:
        Nothing itself; calls inside raise what heddle.scaled_dot_product_attention does.

    Source: none.
    """
    functional = torch.nn.functional
    before = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before
