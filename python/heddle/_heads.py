# SPDX-License-Identifier: Apache-2.0
"""Attention of q, k and v that are heads of one tensor, as a Linear for all three leaves them: their gradients are
written as heads of one tensor, too, which nobody has to put together.

``heads`` is [b, s, h + 2·hk, d], of any strides: the first h are q's, hk are k's, the last v's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from heddle import _plain
from heddle._ops import long_backward, ops
from heddle._options import causal_of, scale_of

_is_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_autocast: Any = torch._C._is_any_autocast_enabled
_deterministic = torch.are_deterministic_algorithms_enabled
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

_forward: tuple[Callable[..., Any], Any] = _plain.caller("attention_plain")
_backward: tuple[Callable[..., Any], Any] = _plain.caller("attention_backward_heads")


def parts_of(heads: Tensor, h: int, hk: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, [b, h or hk, s, d]: views."""
    q, k, v = heads.chunk(3, 2) if h == hk else torch.split(heads, [h, hk, hk], 2)  # split() is in Python
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class _AttentionOfHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, h: int, hk: int, causal: int, scale: float, deterministic: bool) -> Tensor:
        q, k, v = parts_of(heads, h, hk)
        out: Tensor
        if _is_compiling():
            out, lse = ops.attention_plain(q, k, v, causal, scale, True)
        else:
            run, operator = _forward
            out, lse = run(operator, q, k, v, causal, scale, True)
        ctx.options = h, hk, causal, scale, deterministic
        ctx.save_for_backward(heads, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        heads, out, lse = ctx.saved_tensors
        h, hk, causal, scale, deterministic = ctx.options
        q, k, v = parts_of(heads, h, hk)
        if dout.stride(3) != 1:
            dout = dout.contiguous()
        made: Tensor
        if _is_compiling():
            made = ops.attention_backward_heads(dout, out, lse, q, k, v, causal, scale, deterministic)
        elif _plain.somebody() or type(dout) is not Tensor:
            each = long_backward(dout, None, out, lse, q, k, v, causal, scale, deterministic, 7)
            made = torch.cat([x.transpose(1, 2) for x in each if x is not None], 2)
        else:
            run, operator = _backward
            made = run(operator, dout, out, lse, q, k, v, causal, scale, deterministic)
        return made, None, None, None, None, None


_apply = _plain.apply_of(_AttentionOfHeads)


def attention_of_heads(heads: Tensor, h: int, hk: int, causal: Any, scale: Any = None) -> Any:
    """heddle.attention of the three with these options alone, [b, h, s, d]; NotImplemented where there is no gradient
    of `heads` to be recorded, or where somebody wants to see more of it than that."""
    if type(heads) is not Tensor or not (_grad_enabled() and heads.requires_grad):
        return NotImplemented
    if heads.dtype not in _DTYPES or heads.stride(3) != 1 or _autocast():
        return NotImplemented
    corner, number, function = causal_of(causal, 1, 1), scale_of(scale), cast(Any, _AttentionOfHeads)
    # What is exported may be differentiated by others, or compiled without Python. (Dynamo of torch 2.11 takes
    # is_exporting() for true in torch.compile, too.)
    if torch.compiler._is_exporting_flag:
        return NotImplemented
    if _is_compiling():
        return function.apply(heads, h, hk, corner, number, _deterministic())
    if _plain.looked_at():
        return NotImplemented
    try:
        return _apply(heads, h, hk, corner, number, _deterministic())
    except RuntimeError:
        return NotImplemented  # the long way says why
