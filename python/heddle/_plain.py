# SPDX-License-Identifier: Apache-2.0
"""The short way of plain calls: q, k, v, a causal corner and a scale, and nobody between the caller and the kernel.

PyTorch's dispatcher takes time for each of the 23 arguments of ``heddle::attention``, twice, since the kernel for its
Autograd key is in Python. ``heddle::attention_plain`` and ``heddle::attention_backward_plain`` are the same C kernels
with few arguments, below autograd. What decides whether a call is plain is in python/src/shortcut.c.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from heddle import _C

Pair = tuple[Tensor, Tensor]
Gradients = tuple[Tensor | None, ...]

_dispatcher: Any = torch._C
_builtins: Any = torch.jit._builtins
_grad_enabled, _is_compiling = torch.is_grad_enabled, torch.compiler.is_compiling
_function_mode, _dispatch_modes = _dispatcher._is_torch_function_mode_enabled, _dispatcher._len_torch_dispatch_stack
_transforms = _dispatcher._are_functorch_transforms_active


class NotPlain(Exception):
    """The kernel refused; the long way says why."""


def _fewer(call: Callable[..., Any]) -> Callable[..., Any]:
    """heddle::attention_plain by heddle::attention."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, causal: int, scale: float, lse: bool) -> tuple[Tensor, Tensor | None]:
        out, its_lse, _ = call(q, k, v, causal=causal, scale=scale)
        return out, its_lse if lse else None

    return kernel


def register(registrations: Any, packet: Any) -> None:
    """Autograd lets the plain operators through; under autocast heddle::attention takes over."""
    library: Any = torch.library
    for name in ("attention_plain", "attention_backward_plain"):
        registrations.impl(name, library.fallthrough_kernel, "Autograd")
    for key in ("AutocastCPU", "AutocastCUDA"):
        registrations.impl("attention_plain", _fewer(packet.default), key)


def _caller(name: str) -> tuple[Callable[..., Any], Any]:
    """A function and its first argument: PyTorch's shortest way from Python to the dispatcher."""
    overload = getattr(torch.ops.heddle, name).default
    boxed = getattr(_dispatcher, "_dispatch_call_boxed", None)
    return (boxed, overload._handle) if boxed else (lambda operator, *args: operator(*args), overload)


class _Parts(NamedTuple):
    """What python/src/shortcut.c works with, in its order."""

    slow: Any
    call: Any
    handle: Any
    record: Any
    record_out: Any
    not_plain: Any = NotPlain
    tensor: Any = Tensor
    parameter: Any = torch.nn.Parameter
    grad_enabled: Any = _grad_enabled
    deterministic: Any = torch.are_deterministic_algorithms_enabled
    forward_ad: Any = forward_ad.__dict__
    autocast: Any = _dispatcher._is_any_autocast_enabled
    others: Any = (_function_mode, _dispatch_modes, _transforms, _dispatcher._is_tracing)
    unwrap: Any = _dispatcher._functorch.unwrap_if_dead
    level: Any = "_current_level"
    requires_grad: Any = "requires_grad"
    shape: Any = "shape"
    ndim: Any = "ndim"
    numbers: Any = (0, 1, 2)
    zero: Any = 0.0


def shorten(packet: Any, long_backward: Callable[..., Gradients]) -> Callable[..., Any]:
    """Lets plain calls of torch.ops.heddle.attention go the short way. Returns the same for heddle.attention:
    ``quick(q, k, v, causal, scale, same_heads=False)`` is out, or NotImplemented where the long way must be gone."""
    run, operator = _caller("attention_plain")
    run_backward, operator_backward = _caller("attention_backward_plain")

    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: tuple[int, float, bool]) -> Pair:
        ctx.options = options
        try:
            out, lse = run(operator, q, k, v, options[0], options[1], True)
        except RuntimeError:
            raise NotPlain from None
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Gradients:
        q, k, v, out, lse = ctx.saved_tensors
        needs_q, needs_k, needs_v, _ = ctx.needs_input_grad
        needs = needs_q + 2 * needs_k + 4 * needs_v
        somebody = _is_compiling() or _grad_enabled() or _function_mode() or _dispatch_modes() or _transforms()
        if somebody or dlse is not None or type(dout) is not Tensor:
            return *long_backward(dout, dlse, out, lse, q, k, v, *ctx.options, needs), None
        if dout.stride(3) != 1:
            dout = dout.contiguous()
        return *run_backward(operator_backward, dout, out, lse, q, k, v, *ctx.options, needs), None

    class AttentionPlain(torch.autograd.Function):
        """Returns out and lse."""

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Pair:
            ctx.set_materialize_grads(False)
            return forward(ctx, *args)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Gradients:
            return backward(ctx, grads[0], grads[1])

    class AttentionPlainOut(torch.autograd.Function):
        """Returns out alone."""

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            return forward(ctx, *args)[0]

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Gradients:
            return backward(ctx, grads[0], None)

    # Where no functorch transform is active, autograd.Function.apply, written in Python, comes to this one in C++.
    above: Any = super
    applies = [above(torch.autograd.Function, kind).apply for kind in (AttentionPlain, AttentionPlainOut)]
    short, quick = _C.shortcut(tuple(_Parts(packet._op, run, operator, *applies)))
    # torch.jit.script knows built-in functions by this table.
    _builtins._register_builtin(short, packet._qualified_op_name)
    packet._op = short
    return quick
