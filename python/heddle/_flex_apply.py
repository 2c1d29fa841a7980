# SPDX-License-Identifier: Apache-2.0
"""What heddle knows of a score_mod or mask_mod, and what an operation makes of it.

An ``Expression`` is anything made of the indices b, h, q_idx and kv_idx, of tensors that the function captured, and of
numbers: it can be computed for all indices at once, by broadcasting. A ``Score`` is what heddle can make of a score:
scaled, capped, something added that is an Expression, and masked, in the order in which the kernels do it. Everything
else is a NotImplementedError that names the operation.
"""

from __future__ import annotations

import math
import operator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from heddle._flex_calls import (
    BINARY,
    INDEX,
    KNOWN,
    OPERATORS,
    REAL,
    TRUTH,
    WHOLE,
    bind,
    conversion,
    is_method_where,
    kind_made,
    kind_of,
    kind_of_dtype,
    refuse,
    unreversed,
)


class Symbol:
    """What has the operators of Python."""

    __slots__ = ()
    __hash__ = object.__hash__

    def _apply(self, name: str, function: Any, args: tuple[Any, ...]) -> Any:
        return apply(name, function, args, {})

    def __neg__(self) -> Any:
        return self._apply("neg", operator.neg, (self,))

    def __abs__(self) -> Any:
        return self._apply("abs", torch.abs, (self,))

    def __invert__(self) -> Any:
        return self._apply("invert", operator.invert, (self,))


def _operators() -> None:
    for name, function in OPERATORS.items():

        def forward(self: Any, other: Any, name: str = name, function: Any = function) -> Any:
            return self._apply(name, function, (self, other))

        def reverse(self: Any, other: Any, name: str = name, function: Any = function) -> Any:
            return self._apply(name, function, (other, self))

        setattr(Symbol, f"__{name}__", forward)
        if name in BINARY:
            setattr(Symbol, f"__r{name}__", reverse)


_operators()


class Expression(Symbol):
    """function(*args, **kwargs), or an index. uses: the indices it depends on; kind: of number (heddle._flex_calls);
    rest: dimensions without an index."""

    __slots__ = ("args", "function", "kind", "kwargs", "name", "rest", "uses")

    def __init__(
        self,
        name: str,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        uses: frozenset[str],
        kind: int,
        rest: int = 0,
    ) -> None:
        self.name, self.function, self.args, self.kwargs = name, function, args, kwargs
        self.uses, self.kind, self.rest = uses, kind, rest

    def tensors(self) -> list[Tensor]:
        """Those that were captured."""
        found: list[Tensor] = []
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, Expression):
                found += value.tensors()
            elif isinstance(value, Tensor):
                found.append(value)
        return found

    def key(self) -> tuple[Any, ...]:
        """Equal for what is computed in the same way from the same numbers."""
        return self.name, *(_key(value) for value in (*self.args, *self.kwargs.items()))

    def values(self, indices: dict[str, Tensor], known: dict[int, Any] | None = None) -> Any:
        """Computed for all `indices`, which broadcast against each other."""
        known = {} if known is None else known
        if id(self) not in known:
            if not self.args:
                known[id(self)] = indices[self.name]
            else:
                args = [_values(value, indices, known) for value in self.args]
                kwargs = {name: _values(value, indices, known) for name, value in self.kwargs.items()}
                known[id(self)] = self.function(*args, **kwargs)
        return known[id(self)]


def _key(value: Any) -> Any:
    if isinstance(value, Expression):
        return value.key()
    if isinstance(value, Tensor):
        return id(value), value._version, value.data_ptr()
    return type(value), value


def _values(value: Any, indices: dict[str, Tensor], known: dict[int, Any]) -> Any:
    return value.values(indices, known) if isinstance(value, Expression) else value


class Score(Symbol):
    """factor·score, or cap·tanh(factor·score/cap), plus all of `added`, where all of `seen` are true."""

    __slots__ = ("added", "cap", "device", "dtype", "factor", "read", "seen")

    def __init__(
        self,
        like: Any,
        factor: float = 1.0,
        cap: float = 0.0,
        added: tuple[Any, ...] = (),
        seen: tuple[Expression, ...] = (),
        read: list[Tensor] | None = None,
    ) -> None:
        self.dtype, self.device = like.dtype, like.device
        self.read = [] if read is None else read  # tensors whose numbers the trace has gone by
        self.factor, self.cap, self.added, self.seen = factor, cap, added, seen

    def but(self, **changed: Any) -> Score:
        fields = {name: getattr(self, name) for name in ("factor", "cap", "added", "seen")}
        return Score(self, **(fields | changed), read=self.read)


class Leaf(Expression):
    """An index."""

    __slots__ = ("device", "dtype")

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name, None, (), {}, frozenset((name,)), INDEX)
        self.dtype, self.device = torch.int64, device


# ----------------------------------------------------------------------------------------------------- operations


def number_of(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _index(tensor: Any, index: Any) -> Expression:
    """tensor[h], tensor[b, h], tensor[b][h] and so on, where each part is a number for every index."""
    parts = index if isinstance(index, tuple) else (index,)
    earlier: tuple[Any, ...] = ()
    if isinstance(tensor, Expression):
        tensor, *earlier = tensor.args  # type: ignore[assignment]
    uses: frozenset[str] = frozenset()
    for part in parts:
        if isinstance(part, Expression) and not part.rest:
            uses = uses | part.uses  # torch.compile of torch 2.11 knows no |= of these
        elif isinstance(part, bool) or not (isinstance(part, int) or (isinstance(part, Tensor) and part.dim() == 0)):
            refuse(f"the index {part!r} of a captured tensor")
    parts = (*earlier, *parts)
    for part in earlier:
        uses = uses | part.uses if isinstance(part, Expression) else uses
    if len(parts) > tensor.dim():
        raise IndexError(f"too many indices for a captured tensor of dimension {tensor.dim()}")
    rest, kind = tensor.dim() - len(parts), kind_of_dtype(tensor.dtype)
    return Expression("getitem", _picked, (tensor, *parts), {}, uses, kind, rest)


def _picked(tensor: Tensor, *at: Any) -> Tensor:
    if any(part.dtype in (torch.bool, torch.uint8) for part in at if isinstance(part, Tensor)):
        refuse("an index of a captured tensor that is boolean or uint8, which PyTorch takes for a mask (say .long())")
    return tensor[at]


def apply(name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operation on forms."""
    usual = name in OPERATORS and len(args) == 2 and not kwargs
    if not usual:
        name, args, kwargs = unreversed(name, args, kwargs)
        if name in ("getitem", "index") and not isinstance(args[0], Score):
            return _index(args[0], tuple(args[1]) if name == "index" else args[1])
    uses: frozenset[str] = frozenset()
    scores = False
    for value in (*args, *kwargs.values()):
        if isinstance(value, Expression):
            if value.rest:
                refuse(f"{name} of a captured tensor of which {value.rest} dimensions have no index")
            uses = uses | value.uses
        elif isinstance(value, Score):
            scores = True
        elif isinstance(value, Tensor) and value.dim():
            refuse(f"{name} of a captured tensor of shape {list(value.shape)} that has no index")
    if usual:
        function = OPERATORS[name]
    elif name not in KNOWN:
        refuse(f"the operation {name} of a score" if scores else f"the operation {name}")
    elif name in ("to", "type"):
        if isinstance(args[0], Score):
            return _converted(name, args, kwargs)
        if name == "type" and not any(isinstance(value, torch.dtype) for value in (*args[1:], *kwargs.values())):
            refuse("type() of what is computed of the indices without a dtype")
        args, scores = tuple([value.dtype if isinstance(value, Score) else value for value in args]), False
    else:
        if name == "where" and is_method_where(function):
            if "self" in kwargs or "input" in kwargs:
                refuse("Tensor.where without its tensor in front")
            args, kwargs, function = args[1:2], kwargs | {"input": args[0]} | _third(args), torch.where
        args, kwargs = bind(name, args, kwargs)
        if name in OPERATORS and not kwargs:
            function = OPERATORS[name]
    if scores:
        return _of_score(name, args, kwargs)
    if name in ("and", "or") and kind_of(args[0]) == kind_of(args[1]) == TRUTH:
        for one, other in (args, args[::-1]):
            if one is (name == "and"):
                return other
    if name not in _OF_ONE_DTYPE and any(map(_has_no_index, (*args, *kwargs.values()))):
        function = partial(_of_equals, name, function)
    return Expression(name, function, args, kwargs, uses, kind_made(name, args, kwargs))


_OF_ONE_DTYPE = ("to", "type", "masked_fill", "full_like")  # that of one argument, whatever the others are


def _has_no_index(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, Expression) and not value.uses)


def _of_equals(name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    """function(...) for indices that all have dimensions, in the dtype that it has for one of each: there a tensor
    without dimensions has a say in it, as they all are such, and here PyTorch does not ask it."""
    first = 1 if name == "where" else 0
    tensors = [value for value in (*args[first:], *kwargs.values()) if isinstance(value, Tensor)]
    dtype = tensors[0].dtype
    for each in tensors[1:]:
        dtype = torch.promote_types(dtype, each.dtype)

    def cast(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim() or kind_of(value) == TRUTH:
            return value
        return value.to(dtype) if value.is_floating_point() == dtype.is_floating_point else value

    own = [*args[:first], *[cast(value) for value in args[first:]]]
    return function(*own, **{key: cast(value) for key, value in kwargs.items()})


def _third(args: tuple[Any, ...]) -> dict[str, Any]:
    """Of Tensor.where."""
    if len(args) > 3:
        refuse(f"the operation where of {len(args)} arguments")
    return {"other": args[2]} if len(args) == 3 else {}


def _of_score(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs and name in OPERATORS:
        refuse(f"{name} of a score with {kwargs}")
    if name == "add":
        return _add(args[0], args[1])
    if name == "sub":
        if isinstance(args[1], Score):
            refuse("something minus a score")
        if isinstance(args[1], (Expression, Tensor)) and kind_of(args[1]) == TRUTH:
            refuse("a score minus a condition")
        return _add(args[0], -_as_added(args[1], args[0]))
    if name == "neg":
        return _multiply(args[0], -1.0)
    if name == "mul":
        score, other = args if isinstance(args[0], Score) else args[::-1]
        return _multiply(score, other)
    if name == "truediv" and isinstance(args[0], Score):
        number = number_of(_constant_in(args[1], args[0]))
        if number is None:
            refuse("a score divided by what is no number of Python")
        if number == 0:
            refuse("a score divided by zero")
        return _multiply(args[0], 1 / number)
    if name == "tanh":
        score = args[0]
        if score.cap or score.added or score.seen:
            refuse("tanh of a score that something was added to, or that is capped or masked (heddle caps first)")
        return score.but(cap=1.0)
    if name == "where":
        return _where(*args)
    if name == "masked_fill":
        return _where(args[1], args[2], args[0])
    if name in ("clone", "contiguous", "pos", "positive") or (name == "float" and not kwargs):
        return args[0]
    refuse(f"the operation {name} of a score")


def _converted(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The score is held in float32 or better anyway."""
    score: Any = args[0]
    dtype, device = conversion(args, kwargs)
    if name == "type" and dtype is None:
        refuse("type() of a score without a dtype")
    if device is not None and torch.device(device) != score.device:
        refuse(f"a score that is moved to {device}")
    if dtype not in (None, torch.float32, score.dtype):
        refuse(f"the operation {name} of a score, to {dtype}")
    return score


def _add(a: Any, b: Any) -> Score:
    score, other = (a, b) if isinstance(a, Score) else (b, a)
    if isinstance(other, Score):
        refuse("a score added to a score")
    if isinstance(other, float) and math.isinf(other):
        refuse("an infinite number added to a score")
    return score.but(added=(*score.added, _as_added(other, score)))


def _as_added(value: Any, score: Any) -> Any:
    """Sums of booleans and of short integers are others than sums of the numbers that they are in a score."""
    if not isinstance(value, (Expression, Tensor)) or kind_of(value) in (INDEX, REAL):
        return value
    return _as_real(value, score)


def _as_real(value: Any, score: Any) -> Any:
    """What is added in the type in which PyTorch computes a score: other numbers than Python's, in less digits."""
    if not isinstance(value, (Expression, Tensor)):
        return value
    dtype = torch.float64 if score.dtype == torch.float64 else torch.float32
    if isinstance(value, Tensor):
        return in_digits(value, dtype)
    return Expression("to", in_digits, (value, dtype), {}, value.uses, REAL, value.rest)


def in_digits(value: Any, dtype: torch.dtype) -> Any:
    """A tensor in this dtype, or in its own if that has more digits."""
    return value.to(torch.promote_types(value.dtype, dtype)) if isinstance(value, Tensor) else value


def sum_of(dtype: torch.dtype, *values: Any) -> Any:
    """Of what is added to a score, which has this dtype: no sum is rounded to the type of bfloat16's tables."""
    if len(values) == 1:
        return values[0]
    total, *others = [in_digits(value, dtype) for value in values]
    for each in others:
        total = total + each
    return total


def _multiply(score: Any, other: Any) -> Score:
    number = number_of(_constant_in(other, score))
    if number is None or isinstance(score, (int, float)):
        refuse("a score multiplied with what is no number of Python")
    if score.seen and number <= 0:
        refuse("a masked score multiplied with a number that is not positive")
    # An integer times a number has a number's digits.
    added = [each if abs(number) == 1 or kind_of(each) != REAL else _as_real(each, score) for each in score.added]
    added = [each * number for each in added]
    if score.cap:
        # A sign goes through tanh.
        score = score.but(cap=score.cap * abs(number))
    multiplied: Score = score.but(factor=score.factor * number, added=tuple(added))
    return multiplied


def _total(added: tuple[Any, ...], score: Any, other: tuple[Any, ...]) -> Any:
    """The sum of what is added to a score on one side of torch.where; `other`: on its other side."""
    if not added:
        return 0.0
    if len(added) == 1 and not other:
        return added[0]
    total, *others = [_as_real(each, score) for each in added]
    for each in others:
        total = total + each
    return total


def every(conditions: tuple[Any, ...]) -> Any:
    """All of them."""
    total = conditions[0]
    for each in conditions[1:]:
        total = total & each
    return total


def _is_minus_infinity(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == -math.inf


def _where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, Score):
        refuse("a condition on a score")
    if isinstance(condition, Expression) and condition.kind == WHOLE:  # uint8, an old kind of boolean
        condition = apply("ne", operator.ne, (condition, 0), {})
    if isinstance(condition, Expression) and condition.kind != TRUTH:
        refuse("torch.where with a condition that is a number, not a boolean")
    a, b = (_number_in(v, b if isinstance(b, Score) else a) for v in (a, b))
    if isinstance(condition, bool):
        return a if condition else b
    if not isinstance(condition, Expression):
        refuse("torch.where with a condition that is no expression of the indices")
    if _is_minus_infinity(b):
        return a.but(seen=(*a.seen, condition))
    if _is_minus_infinity(a):
        return b.but(seen=(*b.seen, apply("logical_not", torch.logical_not, (condition,), {})))
    if not (isinstance(a, Score) and isinstance(b, Score)):
        refuse("torch.where of a score and of something else than -inf")
    if (a.factor, a.cap) != (b.factor, b.cap):
        refuse("torch.where of scores that are scaled or capped in two ways")
    added, seen = a.added, a.seen
    if not _same(a.added, b.added):
        sides = (condition, _total(a.added, a, b.added), _total(b.added, b, a.added))
        added = (apply("where", _where_of_numbers, sides, {}),)
    if not _same(a.seen, b.seen):
        other = apply("invert", operator.invert, (condition,), {})  # torch.compile knows no ~ of what is no tensor
        seen = tuple(apply("or", operator.or_, (other, each), {}) for each in a.seen)
        seen += tuple(apply("or", operator.or_, (condition, each), {}) for each in b.seen)
    return a.but(added=added, seen=seen)


def _number_in(value: Any, score: Any) -> Any:
    """The number of a tensor of none but one, such as torch.tensor(-torch.inf)."""
    if not isinstance(value, Tensor) or value.device.type != "cpu" or value.requires_grad or varies(value):
        return value
    if isinstance(score, Score):
        score.read.append(value)
    return float(value)


def varies(tensor: Tensor) -> bool:
    """Whether it has a tangent, or is what a transformation of torch.func goes through."""
    if torch.compiler.is_compiling():
        return False
    return _functorch.is_functorch_wrapped_tensor(tensor) or _unpack_dual(tensor).tangent is not None


_functorch: Any = torch._C._functorch
_unpack_dual: Any = forward_ad.unpack_dual


def _constant_in(value: Any, score: Any) -> Any:
    """The same, but where a graph is made, in which the tensor may later be another number."""
    return value if torch.compiler.is_compiling() else _number_in(value, score)


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _where_of_numbers(condition: Tensor, a: Any, b: Any) -> Tensor:
    return torch.where(condition, a, b)


def conjuncts(condition: Any) -> list[Any]:
    """The conditions that all have to hold. The `and` of integers is another number."""
    names = ("logical_and", "and" if kind_of(condition) == TRUTH else None)
    if isinstance(condition, Expression) and condition.name in names and not condition.kwargs:
        return [part for arg in condition.args for part in conjuncts(arg)]
    return [] if condition is True or (type(condition) is int and condition == 1) else [condition]
