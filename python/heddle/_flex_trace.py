# SPDX-License-Identifier: Apache-2.0
"""What a score_mod or mask_mod of FlexAttention computes, found out by calling it once with symbols.

An ``Expression`` is anything made of the indices b, h, q_idx and kv_idx, of tensors that the function captured, and of
numbers: it can be computed for all indices at once, by broadcasting. A ``Score`` is what heddle can make of a score:
scaled, capped, something added that is an Expression, and masked, in the order in which the kernels do it. Everything
else is a NotImplementedError that names the operation.
"""

from __future__ import annotations

import math
import operator
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

INDICES = ("b", "h", "q_idx", "kv_idx")
_BINARY = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
}
_COMPARE = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}
# PyTorch's names of the same.
_SAME = {
    "subtract": "sub", "multiply": "mul", "div": "truediv", "true_divide": "truediv", "divide": "truediv",
    "floor_divide": "floordiv", "remainder": "mod", "less": "lt", "less_equal": "le", "greater": "gt",
    "greater_equal": "ge", "not_equal": "ne", "negative": "neg", "absolute": "abs", "bitwise_and": "and",
    "bitwise_or": "or", "bitwise_xor": "xor", "bitwise_not": "invert", "bitwise_left_shift": "lshift",
    "bitwise_right_shift": "rshift", "float_power": "pow",
}  # fmt: skip
# Each element of the result is made of the same element of the arguments.
_POINTWISE = {
    "abs", "neg", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "square", "reciprocal",
    "tanh", "sigmoid", "sin", "cos", "tan", "atan", "erf", "relu", "sign", "sgn", "floor", "ceil", "round", "trunc",
    "frac", "clamp", "clip", "clamp_min", "clamp_max", "minimum", "maximum", "fmin", "fmax", "fmod", "where",
    "logical_and", "logical_or", "logical_xor", "logical_not", "isinf", "isneginf", "isposinf", "isnan", "isfinite",
    "masked_fill", "lerp", "nan_to_num", "to", "type", "float", "double", "half", "bfloat16", "int", "long", "bool",
    "zeros_like", "ones_like", "full_like", "clone", "contiguous", "pos", "positive",
}  # fmt: skip


def refuse(what: str) -> NoReturn:
    raise NotImplementedError(f"heddle.flex_attention does not understand {what}; PyTorch's flex_attention may")


class _Symbol:
    """Both kinds. The operators of Python come here, PyTorch's functions through the mode of ``trace``."""

    __slots__ = ()
    __hash__ = object.__hash__
    shape = torch.Size(())
    ndim = 0
    requires_grad = False
    is_nested = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return apply(name_of(func), func, args, kwargs or {})

    def __bool__(self) -> bool:
        refuse("a branch of Python that depends on an index or a score (say torch.where)")

    def __iter__(self) -> Iterator[Any]:
        refuse("a loop over an index or a score")

    def __index__(self) -> int:
        refuse("an index or a score made a number of Python")

    __int__ = __float__ = __index__

    def dim(self) -> int:
        return 0

    def size(self, dim: Any = None) -> Any:
        return self.shape

    def item(self) -> Any:
        refuse("item() of an index or a score")

    def __neg__(self) -> Any:
        return apply("neg", operator.neg, (self,), {})

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return apply("abs", torch.abs, (self,), {})

    def __invert__(self) -> Any:
        return apply("invert", operator.invert, (self,), {})

    def __getitem__(self, index: Any) -> Any:
        refuse("an index or a score with an index of its own")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("new_"):
            return maker(name)
        function = getattr(torch.Tensor, name, None)
        if name.startswith("_") or not callable(function):
            raise AttributeError(f"what stands for an index or a score has no attribute {name!r}")
        return lambda *args, **kwargs: apply(name_of(function), function, (self, *args), kwargs)


def _operators() -> None:
    for name, function in (*_BINARY.items(), *_COMPARE.items()):

        def forward(self: Any, other: Any, name: str = name, function: Any = function) -> Any:
            return apply(name, function, (self, other), {})

        def reverse(self: Any, other: Any, name: str = name, function: Any = function) -> Any:
            return apply(name, function, (other, self), {})

        setattr(_Symbol, f"__{name}__", forward)
        if name in _BINARY:
            setattr(_Symbol, f"__r{name}__", reverse)


_operators()


class Expression(_Symbol):
    """function(*args, **kwargs), or an index. uses: the indices it depends on; rest: dimensions without an index."""

    __slots__ = ("args", "function", "kwargs", "name", "rest", "uses")

    def __init__(
        self,
        name: str,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        uses: frozenset[str],
        rest: int = 0,
    ) -> None:
        self.name, self.function, self.args, self.kwargs, self.uses, self.rest = (
            name,
            function,
            args,
            kwargs,
            uses,
            rest,
        )

    def __getitem__(self, index: Any) -> Any:
        return _index(self, index) if self.rest else super().__getitem__(index)

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


class Score(_Symbol):
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


# ----------------------------------------------------------------------------------------------------- operations


def name_of(function: Any) -> str:
    name: str = getattr(function, "__name__", str(function))
    name = name.strip("_") if name.startswith("__") else name.removesuffix("_") if name[:1] != "_" else name
    if name[:1] == "r" and name[1:] in _BINARY:
        return name
    return _SAME.get(name, name)


# torch.compiler.assume_constant_result, which would import the compiler: a function has the name that it has.
name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def maker(name: str) -> Callable[..., Any]:
    """new_ones(()) and the like: a number."""

    def make(size: Any = (), *args: Any, **kwargs: Any) -> Any:
        if tuple(size) != () or name not in ("new_ones", "new_zeros", "new_full", "new_tensor"):
            refuse(f"{name} of {size}")
        value = {"new_ones": 1, "new_zeros": 0}.get(name, args[0] if args else kwargs.get("fill_value", 0))
        return bool(value) if kwargs.get("dtype") == torch.bool else value

    return make


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
        elif not (isinstance(part, int) or (isinstance(part, Tensor) and part.dim() == 0)):
            refuse(f"the index {part!r} of a captured tensor")
    parts = (*earlier, *parts)
    for part in earlier:
        uses = uses | part.uses if isinstance(part, Expression) else uses
    if len(parts) > tensor.dim():
        raise IndexError(f"too many indices for a captured tensor of dimension {tensor.dim()}")
    return Expression("getitem", lambda t, *at: t[at], (tensor, *parts), {}, uses, tensor.dim() - len(parts))


def apply(name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operation on symbols."""
    if name[:1] == "r" and name[1:] in _BINARY:  # Tensor.__rsub__ and its like
        name, args = name[1:], args[::-1]
    if name in _BINARY or name in _COMPARE:
        if kwargs.get("alpha", 1) != 1 or kwargs.get("rounding_mode"):
            if any(isinstance(a, Score) for a in args):
                refuse(f"{name} of a score with {kwargs}")
        else:
            function, kwargs = (_BINARY | _COMPARE)[name], {}
    if name in ("getitem", "index") and not isinstance(args[0], Score):
        return _index(args[0], tuple(args[1]) if name == "index" else args[1])
    everything = (*args, *kwargs.values())
    for value in everything:
        if isinstance(value, Expression) and value.rest:
            refuse(f"{name} of a captured tensor of which {value.rest} dimensions have no index")
        if isinstance(value, Tensor) and value.dim():
            refuse(f"{name} of a captured tensor of shape {list(value.shape)} that has no index")
    if any(isinstance(value, Score) for value in everything):
        return _of_score(name, args, kwargs)
    if name not in _POINTWISE and name not in _BINARY and name not in _COMPARE and name != "invert":
        refuse(f"the operation {name}")
    if name in ("and", "or") and any(value is (name == "and") for value in args):
        return args[1] if args[0] is (name == "and") else args[0]
    uses: frozenset[str] = frozenset().union(*(value.uses for value in everything if isinstance(value, Expression)))
    return Expression(name, function, args, kwargs, uses)


def _of_score(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name == "add":
        return _add(args[0], args[1])
    if name == "sub":
        if isinstance(args[1], Score):
            refuse("something minus a score")
        return _add(args[0], -args[1])
    if name == "neg":
        return _multiply(args[0], -1.0)
    if name == "mul":
        score, other = args if isinstance(args[0], Score) else args[::-1]
        return _multiply(score, other)
    if name == "truediv" and isinstance(args[0], Score):
        number = number_of(_constant_in(args[1], args[0]))
        if number is None:
            refuse("a score divided by what is no number of Python")
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
    if name in ("clone", "contiguous", "pos", "positive") or (name in ("to", "float", "type") and _widens(name, args)):
        return args[0]
    refuse(f"the operation {name} of a score")


def _widens(name: str, args: tuple[Any, ...]) -> bool:
    """The score is held in float32 or better anyway."""
    wanted = torch.float32 if name == "float" else args[1] if len(args) > 1 else None
    return wanted in (torch.float32, args[0].dtype)


def _add(a: Any, b: Any) -> Score:
    score, other = (a, b) if isinstance(a, Score) else (b, a)
    if isinstance(other, Score):
        refuse("a score added to a score")
    if isinstance(other, float) and math.isinf(other):
        refuse("an infinite number added to a score")
    return score.but(added=(*score.added, other))


def _multiply(score: Any, other: Any) -> Score:
    number = number_of(_constant_in(other, score))
    if number is None or isinstance(score, (int, float)):
        refuse("a score multiplied with what is no number of Python")
    if score.seen and number <= 0:
        refuse("a masked score multiplied with a number that is not positive")
    added = tuple(each * number for each in score.added)
    if score.cap:
        # A sign goes through tanh.
        score = score.but(cap=score.cap * abs(number))
    multiplied: Score = score.but(factor=score.factor * number, added=added)
    return multiplied


def _total(added: tuple[Any, ...]) -> Any:
    total: Any = 0.0
    for each in added:
        total = each if isinstance(total, float) and total == 0.0 else total + each
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
        sides = (condition, _total(a.added), _total(b.added))
        added = (apply("where", _where_of_numbers, sides, {}),)
    if not _same(a.seen, b.seen):
        other = apply("invert", operator.invert, (condition,), {})  # torch.compile knows no ~ of what is no tensor
        seen = tuple(apply("or", operator.or_, (other, each), {}) for each in a.seen)
        seen += tuple(apply("or", operator.or_, (condition, each), {}) for each in b.seen)
    return a.but(added=added, seen=seen)


def _number_in(value: Any, score: Any) -> Any:
    """The number of a tensor of none but one, such as torch.tensor(-torch.inf)."""
    if not isinstance(value, Tensor) or value.device.type != "cpu" or value.requires_grad:
        return value
    if isinstance(score, Score):
        score.read.append(value)
    return float(value)


def _constant_in(value: Any, score: Any) -> Any:
    """The same, but where a graph is made, in which the tensor may later be another number."""
    return value if torch.compiler.is_compiling() else _number_in(value, score)


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _where_of_numbers(condition: Tensor, a: Any, b: Any) -> Tensor:
    return torch.where(condition, a, b)


# --------------------------------------------------------------------------------------------------------- tracing


class _Mode(TorchFunctionMode):
    """Captured tensors with a symbol for an index come here, too."""

    def __init__(self, read: list[Tensor]) -> None:
        super().__init__()
        self.read = read
        self.again = False  # what the function computes without a symbol has to be computed anew for every call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = [*args, *(kwargs or {}).values()]
        values += [part for value in values if isinstance(value, (tuple, list)) for part in value]
        if any(isinstance(value, _Symbol) for value in values):
            return apply(name_of(func), func, args, kwargs or {})
        tensors = [value for value in values if isinstance(value, Tensor)]
        self.read += tensors
        result = func(*args, **(kwargs or {}))
        name = name_of(func)
        made = isinstance(result, (Tensor, tuple, list)) and not isinstance(result, torch.Size)
        self.again |= (made and any(t.requires_grad for t in tensors)) or "rand" in name or name in _RANDOM
        return result


class Leaf(Expression):
    """An index."""

    __slots__ = ("device", "dtype")

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name, None, (), {}, frozenset((name,)))
        self.dtype, self.device = torch.int64, device


def trace(function: Callable[..., Any], like: Tensor, with_score: bool) -> Any:
    """The result of function(score, b, h, q_idx, kv_idx), or for a mask the list of its conditions, for symbols.

    The same object as the last time, as long as nothing that the function reads is another one."""
    leaves: list[Any] = [Leaf(name, like.device) for name in INDICES]
    if torch.compiler.is_dynamo_compiling():
        from heddle._flex_compiled import call  # imports the compiler

        result = call(function, [Score(like), *leaves] if with_score else leaves, like)
        return result if with_score else conjuncts(result)
    known = _traced.get(function) if type(function) is types.FunctionType else None
    if known is not None and known.like == (like.dtype, like.device, with_score) and known.holds(function):
        return known.result
    read: list[Tensor] = []
    with _Mode(read) as mode:
        result = function(*([Score(like, read=read)] if with_score else []), *leaves)
    result = result if with_score else conjuncts(result)
    if type(function) is types.FunctionType and not mode.again and not any(t.is_inference() for t in read):
        reads = _Reads((like.dtype, like.device, with_score), result, [(t, t._version) for t in read])
        if reads.all_of(function, outermost=True):
            _traced[function] = reads
    return result


def is_known(function: Any) -> bool:
    """Whether what it computes would be the same now, as far as `trace` can tell."""
    return type(function) is types.FunctionType and function in _traced


_RANDOM = ("bernoulli", "normal", "multinomial", "poisson", "dropout")
_CONSTANT = (int, float, str, type(None), torch.dtype, torch.device, types.BuiltinFunctionType)
_traced: weakref.WeakKeyDictionary[Any, _Reads] = weakref.WeakKeyDictionary()


def conjuncts(condition: Any) -> list[Any]:
    """The conditions that all have to hold."""
    if isinstance(condition, Expression) and condition.name in ("and", "logical_and") and not condition.kwargs:
        return [part for arg in condition.args for part in conjuncts(arg)]
    return [] if condition is True or (type(condition) is int and condition == 1) else [condition]


class _Reads:
    """What a function reads beside its arguments, where all of that can be told from other such things by `is`."""

    def __init__(self, like: tuple[Any, ...], result: Any, tensors: list[tuple[Tensor, int]]) -> None:
        self.like, self.result, self.tensors = like, result, tensors
        self.code: Any = None  # of the outermost function, which must not be kept alive
        self.defaults: Any = None
        self.cells: list[tuple[Any, Any]] = []
        self.names: list[tuple[dict[str, Any], str, Any]] = []
        self.functions: list[tuple[Any, Any, Any]] = []

    def holds(self, function: Any) -> bool:
        if function.__code__ is not self.code or function.__defaults__ is not self.defaults:
            return False
        for cell, value in self.cells:
            if cell.cell_contents is not value:
                return False
        for names, name, value in self.names:
            if names.get(name, names) is not value:
                return False
        if any(tensor._version != version for tensor, version in self.tensors):
            return False
        return all(f.__code__ is code and f.__defaults__ is defaults for f, code, defaults in self.functions)

    def all_of(self, function: Any, outermost: bool = False) -> bool:
        """Notes what it reads; False if that could change unseen."""
        if outermost:
            self.code, self.defaults = function.__code__, function.__defaults__
        elif any(function is known for known, _, _ in self.functions):
            return True
        else:
            self.functions.append((function, function.__code__, function.__defaults__))
        if function.__kwdefaults__ or not self._is_told(function.__defaults__ or ()):
            return False
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not filled yet
                return False
            self.cells.append((cell, value))
            if value is not function and not self._is_told(value):
                return False
        names = function.__globals__
        for name in _names(function.__code__):
            value = names.get(name, names)  # itself: no such global
            self.names.append((names, name, value))
            if value is not names and value is not function and not self._is_told(value):
                return False
        return True

    def _is_told(self, value: Any) -> bool:
        if isinstance(value, types.FunctionType):
            its_own = (value.__module__ or "").partition(".")[0] == "torch" and not value.__closure__
            return its_own or self.all_of(value)
        if isinstance(value, types.ModuleType):
            return value.__name__.partition(".")[0] in ("torch", "math")
        if isinstance(value, tuple):
            return type(value) is tuple and all(map(self._is_told, value))
        return isinstance(value, _CONSTANT) or type(value) in (Tensor, torch.nn.Parameter)


def _names(code: types.CodeType) -> set[str]:
    """Those that it, or a function defined in it, may look up."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names
