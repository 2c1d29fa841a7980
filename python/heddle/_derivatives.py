# SPDX-License-Identifier: Apache-2.0
"""Forward mode of all operators and the gradients of the backward operators; torch.func's transforms of all of them.

The formulas are in ``_tangents``. The backward operators are functions of what has a gradient (q, k, v, bias and sinks,
or norm-linear's tensors) and of the gradients that come in; out and lse (mean and rstd) are what forward made of them,
and no inputs of their own: what they contribute is in the others' derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from heddle import _schema, _tangents, _tangents_norm_linear

Maybe = Tensor | None
Redispatch = Callable[..., Any]
_c: Any = torch._C
_unpack_dual: Any = forward_ad.unpack_dual
_make_dual: Any = forward_ad.make_dual
_above: Any = super
# PyTorch has one level of forward mode, and transforms of torch.func make more of it. What torch.compile has traced
# enters it without telling forward_ad._current_level.
LEVEL = 0


def _by_name(operator: str, args: Sequence[Any]) -> dict[str, Any]:
    """The dispatcher leaves out trailing arguments that have their default."""
    return _schema.defaults(operator) | dict(zip(_schema.names(operator), args, strict=False))


class _Attention:
    """What the formulas of one operation are called with."""

    results, inputs, incoming = (
        ("out", "lse", "weights"),
        ("q", "k", "v", "bias", "sinks"),
        ("dout", "dlse", "dweights"),
    )
    added: tuple[str, ...] = ()  # inputs that backward does not take

    @staticmethod
    def tangents(
        given: Mapping[str, Any], along: Mapping[str, Maybe], wanted: frozenset[str], grads: Mapping[str, Maybe]
    ) -> dict[str, Tensor]:
        return _tangents.attention(given, along, wanted, grads)


class _NormLinear:
    results, inputs = ("y", "mean", "rstd", "u", "z"), ("x", "weight", "bias", "gamma", "beta")
    incoming = ("dy", "dz")  # the other results have no derivative
    added = ("residual",)

    @staticmethod
    def tangents(
        given: Mapping[str, Any], along: Mapping[str, Maybe], wanted: frozenset[str], grads: Mapping[str, Maybe]
    ) -> dict[str, Tensor]:
        return _tangents_norm_linear.norm_linear(given, along, wanted, grads)


_OPERATIONS: dict[str, Any] = {"attention": _Attention, "norm_linear": _NormLinear}


def results_of(operation: Any, forward: bool) -> tuple[str, ...]:
    """By name; a gradient's is that of its input."""
    names: tuple[str, ...] = operation.results if forward else operation.inputs
    return names


# ------------------------------------------------------------------------------------------------------ forward mode


def duals(args: Sequence[Any]) -> tuple[list[Any], list[Maybe]] | None:
    """The values of arguments and their tangents; None where none has one."""
    pairs = [_unpack_dual(arg, level=LEVEL) if isinstance(arg, Tensor) else (arg, None) for arg in args]
    tangents = [tangent for _, tangent in pairs]
    return None if all(t is None for t in tangents) else ([value for value, _ in pairs], tangents)


def _tangents_of(operator: str, values: Sequence[Any], tangents: Sequence[Maybe], there: Sequence[bool]) -> list[Maybe]:
    """The tangents of those of an operator's results that are there; None stands for zero."""
    name = operator.removesuffix("_backward")
    operation, backward = _OPERATIONS[name], operator != name
    given, along = _by_name(operator, values), _by_name(operator, tangents)
    known = (*operation.inputs, *operation.incoming, *operation.added)
    for key in _schema.numbers(name):
        if key not in known and along.get(key) is not None:
            raise NotImplementedError(f"{key} has a tangent, but heddle has no derivative by it: give it without one")
    along = {key: along.get(key) for key in known}
    grads = {key: given[key] for key in operation.incoming} if backward else {}
    places = results_of(operation, not backward)
    wanted = frozenset(key for key, is_there in zip(places, there, strict=True) if is_there)
    made = operation.tangents(given, along, wanted, grads)
    return [made.get(key) for key in places]


def _is_made(operator: str, result: Maybe) -> bool:
    return result is not None and (operator not in _OPERATIONS or _schema.is_made(result))


def forward_mode(operator: str, run: Redispatch, values: Sequence[Any], tangents: Sequence[Maybe]) -> Any:
    """run(*values) with the tangents of its results, where no gradient is wanted."""
    results = run(*values)
    made = _tangents_of(operator, values, tangents, [_is_made(operator, value) for value in results])
    pairs = zip(results, made, strict=True)
    return tuple(value if value is None or t is None else _make_dual(value, t, level=LEVEL) for value, t in pairs)


def both_modes(operator: str, function: Any) -> Any:
    """`function` for arguments that have tangents: what it saves has them, and so have its results."""

    name = operator.removesuffix("_backward")
    operation = _OPERATIONS[name]
    forward = name == operator
    differentiable = [not forward or f"d{key}" in operation.incoming for key in results_of(operation, forward)]

    class Dual(function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, redispatch: Redispatch, *args: Any) -> Any:
            results = function.forward(ctx, redispatch, *args)
            there = (d and _is_made(operator, r) for d, r in zip(differentiable, results, strict=True))
            ctx.dual = (
                args,
                [(r.shape, r.dtype) if is_there else None for r, is_there in zip(results, there, strict=True)],
            )
            return results

        @staticmethod
        def jvp(ctx: Any, _: None, *tangents: Maybe) -> tuple[Maybe, ...]:
            args, likes = ctx.dual
            del ctx.dual
            found = duals(args)
            made = _tangents_of(operator, found[0] if found else args, tangents, [like is not None for like in likes])
            # PyTorch wants a tangent for each result that has a derivative, zeros too.
            some = next(t for t in tangents if t is not None)
            return tuple(
                some.new_zeros(like[0], dtype=like[1]) if like and t is None else t
                for t, like in zip(made, likes, strict=True)
            )

    Dual.__name__ = Dual.__qualname__ = function.__name__
    return Dual


# --------------------------------------------------------------------------------------------------- double backward


class _Backward(torch.autograd.Function):
    """The backward operators. Their own gradients are those of <u, gradients>, u being what comes in."""

    operator = ""

    @classmethod
    def keep(cls, ctx: Any, redispatch: Redispatch, args: Sequence[Any]) -> Any:
        tensors = {at: value for at, value in enumerate(args) if isinstance(value, Tensor)}
        ctx.set_materialize_grads(False)
        ctx.places = tuple(tensors)
        ctx.arguments = [None if at in tensors else value for at, value in enumerate(args)]
        ctx.save_for_backward(*tensors.values())
        return redispatch(*args)

    @classmethod
    def gradients(cls, ctx: Any, grads: Sequence[Maybe]) -> tuple[Maybe, ...]:
        operation, names = _OPERATIONS[cls.operator], _schema.names(f"{cls.operator}_backward")
        args = list(ctx.arguments)
        for at, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            args[at] = tensor
        given = _by_name(f"{cls.operator}_backward", args)
        needs = dict(zip(names, ctx.needs_input_grad[1:], strict=False))
        # The gradient of dout is what changes in out along u, and so on. None is for out itself, as said above.
        found_in = {key: key[1:] for key in operation.incoming} | {key: key for key in operation.inputs}
        wanted = {key for name, key in found_in.items() if needs.get(name)}
        along = dict(zip(operation.inputs, grads, strict=True))
        made = operation.tangents(given, along, frozenset(wanted), {key: given[key] for key in operation.incoming})
        return None, *(made.get(found_in.get(name, "")) if needs.get(name) else None for name in names[: len(args)])


class AttentionBackward(_Backward):
    operator = "attention"

    @staticmethod
    def forward(ctx: Any, redispatch: Redispatch, *args: Any) -> Any:
        return AttentionBackward.keep(ctx, redispatch, args)

    @staticmethod
    def backward(ctx: Any, *grads: Maybe) -> tuple[Maybe, ...]:
        return AttentionBackward.gradients(ctx, grads)


class NormLinearBackward(_Backward):
    operator = "norm_linear"

    @staticmethod
    def forward(ctx: Any, redispatch: Redispatch, *args: Any) -> Any:
        return NormLinearBackward.keep(ctx, redispatch, args)

    @staticmethod
    def backward(ctx: Any, *grads: Maybe) -> tuple[Maybe, ...]:
        return NormLinearBackward.gradients(ctx, grads)


# -------------------------------------------------------------------------------------------- transforms of torch.func


class _OneLevel:
    """Lets an autograd.Function be recorded from within a kernel that a transform has called for its own level."""

    def __enter__(self) -> None:
        self.before = _c._functorch.get_single_level_autograd_function_allowed()
        _c._functorch.set_single_level_autograd_function_allowed(True)

    def __exit__(self, *error: Any) -> None:
        _c._functorch.set_single_level_autograd_function_allowed(self.before)


def record(function: Any, redispatch: Redispatch, args: Sequence[Any]) -> Any:
    """function.apply(redispatch, *args), also for a transform that has called. Those outside of it are called by
    redispatch, and record for themselves: what apply turns off around forward is on for them."""
    if not _c._are_functorch_transforms_active():
        return function.apply(redispatch, *args)

    def lower(*given: Any) -> Any:
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return redispatch(*given)

    with _OneLevel():
        # autograd.Function.apply, in Python, refuses Functions without setup_context here; this is the one in C++.
        return _above(torch.autograd.Function, function).apply(lower, *args)
