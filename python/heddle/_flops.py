# SPDX-License-Identifier: Apache-2.0
"""FLOPs of the operators for torch.utils.flop_counter, as PyTorch counts those of its own: every query with every key,
whatever a mask hides, and products alone. Backward of attention forms the scores anew, as PyTorch's fused kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from heddle import _schema


def _lengths(cu_seqlens: Tensor, longest: int) -> list[int]:
    """Where there are no values, all are taken to be the longest."""
    if type(cu_seqlens) is not Tensor or cu_seqlens.device.type == "meta":
        return [longest] * (cu_seqlens.shape[0] - 1)
    lengths: list[int] = cu_seqlens.diff().tolist()
    return lengths


def _pairs(q: Tensor, k: Tensor, given: dict[str, Any]) -> int:
    """Queries of all heads, times the keys of each."""
    table, of_q, of_k = (given.get(name) for name in ("block_table", "cu_seqlens_q", "cu_seqlens_k"))
    most_q, most_k = int(given.get("max_seqlen_q", 0)), int(given.get("max_seqlen_k", 0))
    keys = k.shape[-2] if table is None else most_k or table.shape[1] * k.shape[-2]
    if of_q is None:
        return int(q.shape[:-1].numel() * keys)
    queries = _lengths(of_q, most_q)
    each = [keys] * len(queries) if of_k is None else _lengths(of_k, most_k)
    return int(q.shape[-2] * sum(a * b for a, b in zip(queries, each, strict=True)))


def _attention(given: dict[str, Any]) -> int:
    q, k, v = given["q"], given["k"], given["v"]
    return 2 * _pairs(q, k, given) * int(q.shape[-1] + v.shape[-1])


def _attention_backward(given: dict[str, Any]) -> int:
    """q·kᵀ, dO·Vᵀ, dSᵀ·q, dS·k, Pᵀ·dO."""
    q, k, v = given["q"], given["k"], given["v"]
    return 2 * _pairs(q, k, given) * int(3 * q.shape[-1] + 2 * v.shape[-1])


def _norm_linear(given: dict[str, Any]) -> int:
    return int(2 * given["x"].numel() * given["weight"].shape[0])


def _norm_linear_backward(given: dict[str, Any]) -> int:
    """Of dx and of dW, where they are asked for."""
    needs = int(given.get("needs", _schema.defaults("norm_linear_backward")["needs"]))
    return _norm_linear(given) * ((needs & 1) + (needs >> 1 & 1))


def _register(operator: str, formula: Callable[[dict[str, Any]], int]) -> None:
    names = _schema.names(operator)

    def counted(*args: Any, out_val: Any = None, **options: Any) -> int:
        return formula(dict(zip(names, args, strict=False)) | options)

    ops: Any = torch.ops
    register_flop_formula(getattr(ops.heddle, operator), get_raw=True)(counted)


def register() -> None:
    """Once, when the operators are there."""
    for name in ("attention", "attention_options", "attention_plain"):
        _register(name, _attention)
    for name in ("attention_backward", "attention_backward_plain", "attention_backward_heads"):
        _register(name, _attention_backward)
    _register("norm_linear", _norm_linear)
    _register("norm_linear_backward", _norm_linear_backward)
