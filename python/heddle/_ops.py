# SPDX-License-Identifier: Apache-2.0
"""torch.ops.heddle.*: loads the operators written in C and tells PyTorch the rest about them.

The kernels (CPU and CUDA) and the schemas are in ``_torch_ops.so``. Here are their gradients, their autocast rules and
what calls them; second derivatives and forward mode are in ``_derivatives``, the fake kernels in ``_fake``, vmap in
``_vmap``. Importing this module imports torch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from heddle import _C, _derivatives, _fake, _flops, _kinds, _plain, _schema, _vmap
from heddle._errors import HeddleTypeError, HeddleValueError
from heddle._options import ACTIVATIONS, EPS, NO_NORM, NORMS, TINY, features_out

OLDEST_TORCH = (2, 13) if sys.platform == "win32" else (2, 10)  # Windows: what frees an optional's box


# Not all of torch is typed.
_library: Any = torch.library
_torch_ops: Any = torch.ops


def _load() -> None:
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found and tuple(map(int, found.groups())) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(f"heddle needs torch {oldest} or later, this is torch {torch.__version__}")
    _torch_ops.load_library(str(Path(__file__).with_name("_torch_ops.so")))


_load()
ops: Any = _torch_ops.heddle
Results = tuple[Tensor, Tensor, Tensor]

_EXCEPTIONS: dict[str, type[Exception]] = {
    "ValueError": HeddleValueError,
    "TypeError": HeddleTypeError,
    "NotImplementedError": NotImplementedError,
}


def fitting(error: RuntimeError | TypeError) -> Exception:
    """The exception that an operator's RuntimeError stands for: C can throw that type alone, so it names the other."""
    found = re.match(r"(?:.*?)heddle (\w+Error): (.*)", str(error), re.DOTALL)
    if not found:
        # What PyTorch itself says where an argument does not fit the operator's schema.
        wrong = re.match(r"heddle::\w+\(\) (Expected a value of type .*)", str(error))
        return HeddleTypeError(wrong.group(1)) if wrong else error
    text = found.group(2).split("\nException raised from", 1)[0]
    return _EXCEPTIONS.get(found.group(1), RuntimeError)(text)


_fake.register()

# -------------------------------------------------------------------------------------------------------- autograd

# torch.library.register_autograd would do, but spends 200 µs a call on filling in the defaults of thirty arguments.
# This is what it makes, without that: a kernel for the Autograd key that records an autograd.Function only when one is
# needed.

_registrations = _library.Library("heddle", "FRAGMENT")
_below_autograd = torch._C._after_autograd_keyset
_ATTENTION_GRADIENTS = _schema.differentiable("attention", "attention")
_LINEAR_GRADIENTS = _schema.differentiable("norm_linear", "norm_linear")
_ATTENTION_TENSORS = _schema.tensors("attention")
_BLOCK_TABLE = _schema.names("attention").index("block_table")
_DEFAULTS = _schema.defaults("attention")
_OPTION_DEFAULTS = tuple(_DEFAULTS[name] for name in _schema.names("attention")[_ATTENTION_TENSORS:])
_LINEAR_NAMES, _LINEAR_DEFAULTS = _schema.names("norm_linear"), _schema.defaults("norm_linear")
_RESIDUAL = _LINEAR_NAMES.index("residual")  # its gradient is dy: the backward operator does not hear of it
_GRADIENTS = {"attention": _ATTENTION_GRADIENTS, "norm_linear": (*_LINEAR_GRADIENTS, _RESIDUAL)}
# Of floating point, but without a gradient.
_CONSTANTS = {
    name: tuple(at for at in map(_schema.names(name).index, _schema.numbers(name)) if at not in known)
    for name, known in _GRADIENTS.items()
}
# Where the tensors that can require a gradient end.
_DIFFERENTIABLE = {name: max(*known, *_CONSTANTS[name]) + 1 for name, known in _GRADIENTS.items()} | {
    f"{name}_backward": max(_schema.differentiable(name, f"{name}_backward")) + 1 for name in _GRADIENTS
}
_DIFFERENTIABLE["norm_linear_backward"] = len(_schema.names("norm_linear_backward"))  # dz is its last
_LAST_TENSOR = max(_ATTENTION_TENSORS, *_DIFFERENTIABLE.values())  # of all operators
# Of so many arguments, those that can: PyTorch takes 0.08 µs to look at one, though it be None.
_CAN_REQUIRE: dict[str, Callable[[Sequence[Any]], tuple[Any, ...]]] = {
    name: itemgetter(*sorted({*known, *_CONSTANTS[name]})) for name, known in _GRADIENTS.items()
} | {name: itemgetter(*range(last)) for name, last in _DIFFERENTIABLE.items() if name not in _GRADIENTS}
NUMBER_DEFAULTS = _OPTION_DEFAULTS[3:]  # all those behind the two max_seqlens and causal


def _register_autograd(name: str, function: Any) -> None:
    """`function` is recorded where a gradient is wanted; elsewhere the call goes straight through."""
    redispatch_boxed = getattr(ops, name).default._handle.redispatch_boxed  # OpOverload.redispatch, one call less
    below = torch._C._AutoDispatchBelowAutograd
    enabled, any_requires = torch.is_grad_enabled, torch._C._any_requires_grad
    last, can_require = _DIFFERENTIABLE[name], _CAN_REQUIRE[name]
    transforms: Any = torch._C._are_functorch_transforms_active
    apply, both_modes = function.apply, _derivatives.both_modes(name, function)

    def kernel(keyset: Any, *args: Any) -> Any:
        transformed = transforms()
        found = _derivatives.duals(args) if transformed or forward_ad._current_level >= 0 else None
        keyset = keyset & _below_autograd
        if not (enabled() and any_requires(*(args if len(args) < last else can_require(args)))):
            if found:
                return _derivatives.forward_mode(name, partial(redispatch_boxed, keyset), *found)
            # No guard: the C kernels call no operator that autograd would record.
            return redispatch_boxed(keyset, *args)

        def redispatch(*given: Any) -> Any:
            with below():
                return redispatch_boxed(keyset, *given)

        if found or transformed:
            return _derivatives.record(both_modes if found else function, redispatch, args)
        return apply(redispatch, *args)

    _registrations.impl(name, kernel, "Autograd", with_keyset=True)


def _wants(ctx: Any, at: int) -> bool:
    # One before them is `redispatch`; the dispatcher leaves out trailing arguments that have their default.
    return at + 1 < len(ctx.needs_input_grad) and bool(ctx.needs_input_grad[at + 1])


def _refuse_constants(ctx: Any, name: str) -> None:
    for at in _CONSTANTS[name]:
        if _wants(ctx, at):
            raise NotImplementedError(
                f"{_schema.names(name)[at]} requires a gradient, but heddle computes none for it: detach it, or give "
                "it as a buffer"
            )


def _in_place(made: Sequence[Tensor | None], places: Sequence[int], arguments: int) -> tuple[Tensor | None, ...]:
    """The gradients of `redispatch`, which has none, and of an operator's arguments."""
    given = dict(zip(places, made, strict=True))
    return None, *(given.get(at) for at in range(arguments))


def _last_contiguous(tensor: Tensor | None) -> Tensor | None:
    if tensor is not None and tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        return tensor.contiguous()
    return tensor


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, redispatch: Callable[..., Results], *args: Any) -> Results:
        _refuse_constants(ctx, "attention")
        if len(args) > _BLOCK_TABLE and args[_BLOCK_TABLE] is not None:
            raise NotImplementedError(
                "keys in pages (block_table) have no gradient, and what attends to them neither: call it under "
                "torch.no_grad(), or detach q, k and v"
            )
        if args[1].dtype == torch.float8_e4m3fn:
            raise NotImplementedError(
                "keys of 8 bits (torch.float8_e4m3fn) have no gradient, and what attends to them neither: call it "
                "under torch.no_grad(), or detach q, k and v"
            )
        out, lse, weights = redispatch(*args)
        ctx.set_materialize_grads(False)
        if not _schema.is_made(weights):
            ctx.mark_non_differentiable(weights)
        ctx.options = args[_ATTENTION_TENSORS:]
        ctx.tensors = len(args[:_ATTENTION_TENSORS])
        ctx.save_for_backward(out, lse, *args[:_ATTENTION_TENSORS])
        return out, lse, weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dout, dlse, dweights = grads
        out, lse, *tensors = ctx.saved_tensors
        wanted = [_wants(ctx, at) for at in _ATTENTION_GRADIENTS]
        needs = sum(1 << at for at, want in enumerate(wanted) if want)
        made = call(
            ops.attention_backward,
            _last_contiguous(dout),
            None if dlse is None else dlse.contiguous(),
            _last_contiguous(dweights),
            out,
            lse,
            *tensors,
            *([None] * (_ATTENTION_TENSORS - ctx.tensors)),
            *(*ctx.options, *_OPTION_DEFAULTS[len(ctx.options) :]),
            needs,
        )
        return _in_place(made, _ATTENTION_GRADIENTS, len(_schema.names("attention")))


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, redispatch: Callable[..., Any], *args: Any) -> tuple[Tensor, ...]:
        _refuse_constants(ctx, "norm_linear")
        given = _LINEAR_DEFAULTS | dict(zip(_LINEAR_NAMES, args, strict=False))
        if given["activation"]:
            given["keep_u"] = True
            args = tuple(given[name] for name in _LINEAR_NAMES)
        y, mean, rstd, u, z = redispatch(*args)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mean, rstd, u, *(() if _schema.is_made(z) else (z,)))
        kept = ("x", "weight", "gamma", "beta", *(("bias",) if given["activation"] else ()))
        made = (t if _schema.is_made(t) else None for t in (mean, rstd, u))
        ctx.save_for_backward(*made, *(given[name] for name in kept))
        ctx.options = tuple(given[name] for name in ("eps", "norm", "tf32", "activation", "multiprocessors"))
        return y, mean, rstd, u, z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, *_, dz = grads
        if dy is None and dz is None:
            return (None,) * (1 + len(_LINEAR_NAMES))
        mean, rstd, u, x, weight, gamma, beta, *bias = ctx.saved_tensors
        eps, norm, tf32, activation, limit = ctx.options
        if dy is None:
            dy = x.new_zeros((*x.shape[:-1], features_out(weight.shape[0], activation)))
        wanted = [_wants(ctx, at) for at in _LINEAR_GRADIENTS]
        made: Any = (None,) * len(wanted)
        if any(wanted):
            made = call(
                ops.norm_linear_backward,
                dy.contiguous(),
                mean,
                rstd,
                x,
                weight,
                gamma,
                beta,
                eps,
                norm,
                torch.are_deterministic_algorithms_enabled(),
                tf32,
                sum(1 << at for at, want in enumerate(wanted) if want),
                *((activation, u, *bias) if activation else (0, None, None) if limit or dz is not None else ()),
                *((limit,) if limit or dz is not None else ()),
                *(() if dz is None else (dz.contiguous(),)),
            )
        dresidual = dy if _wants(ctx, _RESIDUAL) else None
        return _in_place((*made, dresidual), (*_LINEAR_GRADIENTS, _RESIDUAL), len(_LINEAR_NAMES))


_register_autograd("attention", _Attention)
_register_autograd("norm_linear", _NormLinear)
_register_autograd("attention_backward", _derivatives.AttentionBackward)
_register_autograd("norm_linear_backward", _derivatives.NormLinearBackward)

# -------------------------------------------------------------------------------------------------------- autocast


_UNCAST = (torch.float64, torch.float8_e4m3fn)


def cast(value: Any, dtype: torch.dtype, to: Callable[..., Tensor] = Tensor.to) -> Any:
    # As PyTorch's own rule: float64 is left alone; and keys of 8 bits, which go with any dtype of q.
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype not in (dtype, *_UNCAST):
        return to(value, dtype)
    return value


def _register_autocast(name: str, device: str, casts: dict[int, Callable[..., Tensor]]) -> None:
    """Under autocast, casts the arguments `casts` to autocast's dtype: those that have q's (or x's) dtype anyway."""
    key = "Autocast" + ("CUDA" if device == "cuda" else "CPU")
    exclude = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    op = getattr(ops, name).default

    def kernel(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        if args[0].dtype != torch.float64:
            args = tuple(cast(value, dtype, casts[at]) if at in casts else value for at, value in enumerate(args))
        with torch._C._ExcludeDispatchKeyGuard(exclude):
            return op(*args)

    _registrations.impl(name, kernel, key)


_OF_DTYPE = [name for name, (element, role, *_) in _C.fields().items() if (element, role) == ("dtype", "input")]
for _device in ("cpu", "cuda"):
    _casts = {name: _kinds.bias_of if name == "bias" else Tensor.to for name in _OF_DTYPE}
    _register_autocast("attention", _device, {_schema.names("attention").index(name): _casts[name] for name in _casts})
    _register_autocast("norm_linear", _device, dict.fromkeys((*_LINEAR_GRADIENTS, _RESIDUAL), Tensor.to))

_vmap.register(ops)

# ---------------------------------------------------------------------------------------------- calls from Python


_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None), int, float, bool))
_grad_enabled, _any_requires_grad = torch.is_grad_enabled, torch._C._any_requires_grad
_function_mode, _dispatch_modes = torch._C._is_torch_function_mode_enabled, torch._C._len_torch_dispatch_stack
_transforms: Any = torch._C._are_functorch_transforms_active
_attention, _of_attention = ops.attention, _CAN_REQUIRE["attention"]


def _nothing_to_record(args: Sequence[Any], looked_at: Sequence[Any]) -> bool:
    """No gradient, no tangent, and nobody between the caller and the kernel who might want one."""
    return (
        not (_grad_enabled() and _any_requires_grad(*looked_at))
        and forward_ad._current_level < 0
        and not _function_mode()
        and not _dispatch_modes()
        and not _transforms()  # a tensor within vmap does not tell that the one it is made of requires a gradient
        and _PLAIN.issuperset(map(type, args))
    )


def call(operator: Callable[..., Any], *args: Any) -> Any:
    """Calls an operator; what it finds wrong becomes the exception that fits."""
    if torch.compiler.is_compiling():
        return operator(*args)
    try:
        whole = operator is _attention and len(args) >= _LAST_TENSOR
        if _nothing_to_record(args, _of_attention(args) if whole else args[:_LAST_TENSOR]):
            # Straight to the C kernel: the one for autograd above it is in Python and costs 3 µs.
            with torch._C._AutoDispatchBelowAutograd():
                return operator(*args)
        return operator(*args)
    except (RuntimeError, TypeError) as error:
        fit = fitting(error)
        if fit is not error:
            raise fit from None
        strange = _kinds.that_dispatch(args)
        if not strange or type(error) not in (RuntimeError, NotImplementedError, TypeError):
            raise
        # Each class says it in words of its own, and not all say which one they are.
        raise HeddleTypeError(f"{operator} does not take what it was given ({strange}): {error}") from error


# --------------------------------------------------------------------------------------------------------- append


def _register_append() -> None:
    """It has no gradient, and its caches are not what they were."""
    redispatch = ops.attention_append.default.redispatch
    written = torch._C._after_ADInplaceOrView_keyset

    def refuse(keyset: Any, *args: Any, **options: Any) -> Any:
        given = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in given):
            raise NotImplementedError("attention_append has no gradient: call it under torch.no_grad()")
        return redispatch(keyset & _below_autograd, *args, **options)

    def note(keyset: Any, *args: Any, **options: Any) -> Any:
        torch.autograd.graph.increment_version(args[:2])
        return redispatch(keyset & written, *args, **options)

    _registrations.impl("attention_append", refuse, "Autograd", with_keyset=True)
    _registrations.impl("attention_append", note, "ADInplaceOrView", with_keyset=True)


_register_append()

# ----------------------------------------------------------------------------------------------------- short ways


def long_backward(dout: Any, dlse: Any, out: Any, lse: Any, *rest: Any) -> tuple[Tensor | None, ...]:
    """The gradients of a plain call, with autograd above them: for lse's, for create_graph, and for compilers."""
    q, k, v, causal, scale, deterministic, needs = rest
    given = _DEFAULTS | {"causal": causal, "scale": scale, "deterministic": deterministic}
    dout, dlse = _last_contiguous(dout), None if dlse is None else dlse.contiguous()
    made = call(ops.attention_backward, dout, dlse, None, out, lse, q, k, v, *given.values(), needs)
    return tuple(made[:3])


def long_options_backward(dout: Any, dlse: Any, *rest: Any) -> tuple[Tensor | None, ...]:
    """The same of a call with options: `rest` is all that attention_backward takes behind dweights."""
    dout, dlse = _last_contiguous(dout), None if dlse is None else dlse.contiguous()
    return tuple(call(ops.attention_backward, dout, dlse, None, *rest))


_plain.register(_registrations, ops.attention)
quick, quick_options, prepare, short = _plain.shorten(ops.attention, long_backward, long_options_backward)
_flops.register()  # packets are told apart by what shorten() puts into them

_linear, _operator = _plain.caller("norm_linear")
_below, _tracing, _is_compiling = torch._C._AutoDispatchBelowAutograd, torch._C._is_tracing, torch.compiler.is_compiling


def quick_linear(
    x: Any,
    weight: Any,
    bias: Any,
    gamma: Any,
    beta: Any,
    eps: Any,
    norm: Any,
    activation: Any,
    residual: Any,
    keeper: Any = None,
) -> Any:
    """y of heddle.norm_linear where nothing is recorded and all lies as the kernel wants it; else NotImplemented, also
    where that is wrong: the long way says why. `keeper` is asked for what it keeps of the weight."""
    try:
        tensors = x, weight, bias, gamma, beta
        given = *tensors, residual
        if _is_compiling() or not _nothing_to_record(given, given) or _tracing() or not x.is_contiguous():
            return NotImplemented
        kind, act = NORMS[norm], 0 if activation is None else ACTIVATIONS[activation]
        if not isinstance(eps, (float, int)) or isinstance(eps, bool) or (kind == NO_NORM and eps != EPS):
            return NotImplemented
        eps = 0.0 if kind == NO_NORM else eps or TINY
        # The dispatcher finds no kernel for tensors that are not dense.
        with _below():
            if keeper is not None and (residual is None or residual.is_contiguous()):
                kept = keeper(*tensors, kind, act)
                if kept is not None:
                    return _linear(_operator, *tensors, eps, kind, False, act, False, residual, False, kept)[0]
            if residual is None:
                return _linear(_operator, *tensors, eps, kind, False, act)[0]
            if residual.is_contiguous():
                return _linear(_operator, *tensors, eps, kind, False, act, False, residual)[0]
    except (AttributeError, KeyError, RuntimeError, TypeError):
        pass
    return NotImplemented
