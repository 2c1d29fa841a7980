# SPDX-License-Identifier: Apache-2.0
"""Attention of no heads or head dims of 0, which no kernel has: of one more that is zero, and cut off again.

Scores of a head dim of 0 are all 0, as PyTorch has it, so a query's result is the mean of the values that it sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor


def is_there(q: Tensor, k: Tensor, v: Tensor, heads: int) -> bool:
    """Is a head dim 0, or the number of heads, which lies in dimension `heads`?"""
    rank = min(q.dim(), k.dim(), v.dim())
    if rank >= 2 and (q.shape[-1] == 0 == k.shape[-1] or v.shape[-1] == 0):
        return True
    return rank >= -heads and q.shape[heads] == k.shape[heads] == v.shape[heads] == 0


def _one_more(tensor: Tensor, dim: int) -> Tensor:
    if tensor.dim() < -dim or tensor.shape[dim] != 0:
        return tensor
    # Not torch.cat, which autocast to float16 refuses of bfloat16, and to bfloat16 of float16.
    return F.pad(tensor, (0, 0) * (-dim - 1) + (0, 1))


def attention(run: Callable[..., Any], heads: int, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
    """run(q, k, v, **options) where is_there() says so."""
    dv, no_heads = v.shape[-1], q.dim() >= -heads and q.shape[heads] == 0
    if q.shape[-1] == 0 == k.shape[-1] and options["scale"] is None:
        options["scale"] = 1.0  # 1/sqrt(0) times nothing
    q, k = (_one_more(t, -1) if q.shape[-1] == k.shape[-1] else t for t in (q, k))
    v = _one_more(v, -1)
    if no_heads:
        q, k, v = (_one_more(t, heads) for t in (q, k, v))
        for name, dim in (
            ("bias", -3),
            ("mask", -3),
            ("sinks", -1),
            ("alibi_slopes", -1),
            ("k_scale", -1),
            ("v_scale", -1),
        ):
            if options[name] is not None:
                options[name] = _one_more(options[name], dim)
        options |= dict.fromkeys(("block_rows", "block_columns", "block_size"))  # nobody looks
    results = run(q, k, v, **options)
    out, *others = results if isinstance(results, tuple) else (results,)
    out = out[..., :dv]
    if no_heads:
        out = out.narrow(heads, 0, 0)
        places = (-2,) * options["return_lse"] + (-3,) * options["return_weights"]
        others = [other.narrow(place, 0, 0) for other, place in zip(others, places, strict=True)]
    return (out, *others) if isinstance(results, tuple) else out
