# SPDX-License-Identifier: Apache-2.0
"""The short ways: of plain calls (q, k, v, a causal corner and a scale), and of those with options that are ready for
the kernel, with nobody between the caller and the kernel.

PyTorch's dispatcher takes time for each of the thirty arguments of ``heddle::attention``, twice, since the kernel for
its Autograd key is in Python. ``heddle::attention_plain`` and ``heddle::attention_backward_plain`` are the same C
kernels with few arguments, below autograd, and ``heddle::attention_options`` is the same with all of them, where lse
can be left out and bias and mask may have less than four dimensions. python/src/shortcut.c decides who goes a short
way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from heddle import _C, _schema

Pair = tuple[Tensor, Tensor]
Gradients = tuple[Tensor | None, ...]

_dispatcher: Any = torch._C
_builtins: Any = torch.jit._builtins
_grad_enabled, _is_compiling = torch.is_grad_enabled, torch.compiler.is_compiling
_function_mode, _dispatch_modes = _dispatcher._is_torch_function_mode_enabled, _dispatcher._len_torch_dispatch_stack
_transforms = _dispatcher._are_functorch_transforms_active
_below_autograd = _dispatcher._AutoDispatchBelowAutograd


class NotPlain(Exception):
    """The kernel refused; the long way says why."""


def _fewer(call: Callable[..., Any]) -> Callable[..., Any]:
    """heddle::attention_plain by heddle::attention."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, causal: int, scale: float, lse: bool) -> tuple[Tensor, Tensor | None]:
        out, its_lse, _ = call(q, k, v, causal=causal, scale=scale)
        return out, its_lse if lse else None

    return kernel


def _with_lse(call: Callable[..., Any]) -> Callable[..., Any]:
    """heddle::attention_options by heddle::attention."""

    def kernel(*args: Any) -> tuple[Tensor, Tensor | None]:
        arguments = len(_schema.names("attention"))
        given = (*args[:3], _of_four(_at(args, 3)), _of_four(_at(args, 4)), *args[5:arguments])
        out, its_lse, _ = call(*given)
        return out, its_lse if args[arguments:] in ((), (True,)) else None

    return kernel


def _at(args: tuple[Any, ...], at: int) -> Any:
    return args[at] if at < len(args) else None  # the dispatcher leaves out trailing arguments that have their default


def register(registrations: Any, packet: Any) -> None:
    """Autograd lets these operators through; under autocast heddle::attention takes over."""
    library: Any = torch.library
    for name in ("attention_plain", "attention_options", "attention_backward_plain", "attention_backward_heads"):
        registrations.impl(name, library.fallthrough_kernel, "Autograd")
    for key in ("AutocastCPU", "AutocastCUDA"):
        registrations.impl("attention_plain", _fewer(packet.default), key)
        registrations.impl("attention_options", _with_lse(packet.default), key)


def caller(name: str) -> tuple[Callable[..., Any], Any]:
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
    full: Any = None
    options: Any = None
    options_out: Any = None
    new_rng: Any = None
    dtype: Any = "dtype"
    device: Any = "device"
    int32: Any = torch.int32
    real: Any = torch.float32
    dtypes: Any = (torch.float32, torch.bfloat16, torch.float16)
    new_empty: Any = "new_empty"


def somebody() -> bool:
    """Who may want to see a gradient's operator: a compiler, a second derivative, a tangent, a mode, a transform."""
    modes = _is_compiling() or _grad_enabled() or _function_mode() or _dispatch_modes() or _transforms()
    return bool(modes or forward_ad._current_level >= 0)


def looked_at() -> bool:
    """Does a mode, a transform, a tangent or a trace look at each call?"""
    modes = _function_mode() or _dispatch_modes() or _transforms() or _dispatcher._is_tracing()
    return bool(modes or forward_ad._current_level >= 0)


def new_rng_state(device: torch.device) -> Tensor:
    """A seed and an offset from torch's generator: manual_seed, checkpointing and CUDA graphs hold for dropout."""
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)


def _of_four(value: Tensor | None) -> Tensor | None:
    """A mask or bias as heddle::attention_backward wants it."""
    return value if value is None or value.dim() >= 4 else value.expand((1,) * (4 - value.dim()) + value.shape)


def _recorders(run: Callable[..., Any], operator: Any, long_backward: Callable[..., Gradients]) -> tuple[Any, Any]:
    """The apply of two autograd.Functions: (q, k, v, bias, sinks, options), where `options` are all arguments of the
    operator behind v, bias and sinks too."""
    run_backward, operator_backward = caller("attention_backward")
    tensors = _schema.tensors("attention") - 3  # of the options

    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Any, options: Any) -> Pair:
        if k.dtype is not q.dtype:  # of 8 bits: they have no gradient
            raise NotPlain
        try:
            out, lse = run(operator, q, k, v, *options, True)
        except RuntimeError:
            raise NotPlain from None
        ctx.numbers, ctx.bias_shape = options[tensors:], None if bias is None else bias.shape
        # bias as it came: here a view of it would be cut off from what second derivatives go to.
        ctx.save_for_backward(out, lse, q, k, v, bias, _of_four(options[1]), *options[2:tensors])
        return out, lse

    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Gradients:
        wanted = ctx.needs_input_grad
        needs = wanted[0] + 2 * wanted[1] + 4 * wanted[2] + 8 * wanted[3] + 16 * wanted[4]
        saved = list(ctx.saved_tensors)
        saved[5] = _of_four(saved[5])
        given = (*saved, *ctx.numbers, needs)
        if somebody() or type(dout) is not Tensor or not (dlse is None or type(dlse) is Tensor):
            made = long_backward(dout, dlse, *given)
        else:
            if dout.stride(3) != 1:
                dout = dout.contiguous()
            dlse = None if dlse is None else dlse.contiguous()
            with _below_autograd():
                made = run_backward(operator_backward, dout, dlse, None, *given)
        dq, dk, dv, dbias, dsinks = made
        if dbias is not None and len(ctx.bias_shape) < 4:
            dbias = dbias.view(ctx.bias_shape)
        return dq, dk, dv, dbias, dsinks, None

    return _functions("AttentionOptions", forward, backward)


def _functions(name: str, forward: Callable[..., Pair], backward: Callable[..., Gradients]) -> tuple[Any, Any]:
    """The apply of an autograd.Function that returns out and lse, and of one, `name`Out, that returns out alone."""

    def forward_of_both(ctx: Any, *args: Any) -> Pair:
        ctx.set_materialize_grads(False)
        return forward(ctx, *args)

    both = {"forward": forward_of_both, "backward": backward}
    alone = {
        "forward": lambda ctx, *args: forward(ctx, *args)[0],
        "backward": lambda ctx, dout: backward(ctx, dout, None),
    }

    def made(name: str, passes: dict[str, Any]) -> Any:
        function: Any = torch.autograd.Function
        return apply_of(type(function)(name, (function,), {key: staticmethod(value) for key, value in passes.items()}))

    return made(name, both), made(f"{name}Out", alone)


def apply_of(function: Any) -> Any:
    """Where no functorch transform is active, autograd.Function.apply, written in Python, comes to this one in C++."""
    above: Any = super
    return above(torch.autograd.Function, function).apply


def shorten(
    packet: Any, long_backward: Callable[..., Gradients], long_options_backward: Callable[..., Gradients]
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], tuple[Any, ...]]:
    """Lets plain calls of torch.ops.heddle.attention go the short way. Returns the same for heddle.attention:
    ``quick(q, k, v, causal, scale, same_heads=False)`` is out, or NotImplemented where the long way must be gone. And
    with options: ``quick_options`` has its arguments told in python/src/shortcut.c. Then ``prepare``, by which these
    are made ready once for many calls (python/src/recall.c), and what that file works with."""
    run, operator = caller("attention_plain")
    run_backward, operator_backward = caller("attention_backward_plain")

    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: tuple[int, float, bool]) -> Pair:
        if k.dtype is not q.dtype:  # of 8 bits: they have no gradient
            raise NotPlain
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
        if somebody() or dlse is not None or type(dout) is not Tensor:
            return *long_backward(dout, dlse, out, lse, q, k, v, *ctx.options, needs), None
        if dout.stride(3) != 1:
            dout = dout.contiguous()
        return *run_backward(operator_backward, dout, out, lse, q, k, v, *ctx.options, needs), None

    run_full, full = caller("attention_options")
    parts = _Parts(packet._op, run, operator, *_functions("AttentionPlain", forward, backward))
    options, options_out = _recorders(run_full, full, long_options_backward)
    parts = parts._replace(full=full, options=options, options_out=options_out, new_rng=new_rng_state)
    short, quick, quick_options, prepare = _C.shortcut(tuple(parts))
    # torch.jit.script knows built-in functions by this table.
    _builtins._register_builtin(short, packet._qualified_op_name)
    packet._op = short
    return quick, quick_options, prepare, tuple(parts)
