# SPDX-License-Identifier: Apache-2.0
"""How score_mod and mask_mod call an operation: its name, its arguments in their order, whether it changes its first
one, and the kind of number that comes out. What heddle does not know of it is refused by its name."""

from __future__ import annotations

import operator
from typing import Any, NoReturn

import torch
from torch import Tensor

BINARY = {
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
COMPARE = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}
OPERATORS = BINARY | COMPARE
# PyTorch's names of the same.
_SAME = {
    "subtract": "sub", "multiply": "mul", "div": "truediv", "true_divide": "truediv", "divide": "truediv",
    "floor_divide": "floordiv", "remainder": "mod", "less": "lt", "less_equal": "le", "greater": "gt",
    "greater_equal": "ge", "not_equal": "ne", "negative": "neg", "absolute": "abs", "bitwise_and": "and",
    "bitwise_or": "or", "bitwise_xor": "xor", "bitwise_not": "invert", "bitwise_left_shift": "lshift",
    "bitwise_right_shift": "rshift",
}  # fmt: skip
_FLOATS = {
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "tanh", "sigmoid", "sin",
    "cos", "tan", "atan", "erf", "frac", "float", "double", "half", "bfloat16", "float_power", "lerp",
}  # fmt: skip
_TRUTHS = {
    "logical_and", "logical_or", "logical_xor", "logical_not", "isinf", "isneginf", "isposinf", "isnan", "isfinite",
    "bool",
}  # fmt: skip
_LIKE_THE_FIRST = {
    "abs", "neg", "pos", "positive", "relu", "sign", "sgn", "floor", "ceil", "round", "trunc", "nan_to_num", "clone",
    "contiguous", "masked_fill",
}  # fmt: skip
_OF_ALL = {"clamp", "clip", "clamp_min", "clamp_max", "minimum", "maximum", "fmin", "fmax", "fmod"}
_MADE_LIKE = {"zeros_like", "ones_like", "full_like"}
_CONVERTED = {"to", "type"}
# Each element of the result is made of the same element of the arguments.
_POINTWISE = {
    *_FLOATS, *_TRUTHS, *_LIKE_THE_FIRST, *_OF_ALL, *_MADE_LIKE, *_CONVERTED,
    "square", "where", "int", "long", "invert",
}  # fmt: skip
KNOWN = {*_POINTWISE, *OPERATORS}
# What these make may be the very tensor that they were given.
SHARING = {*_CONVERTED, "float", "double", "half", "bfloat16", "int", "long", "bool", "contiguous", "pos", "positive"}

_TWO = (2, ("input", "other"))
# How many arguments there must be, and their names in PyTorch's order; one elsewhere.
_NAMES = {
    **dict.fromkeys((*OPERATORS, "minimum", "maximum", "fmin", "fmax", "fmod"), _TWO),
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor"), _TWO),
    "pow": (2, ("input", "exponent")),
    "float_power": (2, ("input", "exponent")),
    "where": (3, ("condition", "input", "other")),
    "masked_fill": (3, ("input", "mask", "value")),
    "clamp": (1, ("input", "min", "max")),
    "clip": (1, ("input", "min", "max")),
    "clamp_min": (2, ("input", "min")),
    "clamp_max": (2, ("input", "max")),
    "lerp": (3, ("input", "end", "weight")),
    "nan_to_num": (1, ("input", "nan", "posinf", "neginf")),
    "full_like": (2, ("input", "fill_value")),
}  # fmt: skip
_LIKE = {"dtype": None, "layout": None, "device": None, "memory_format": None, "pin_memory": False}
_LIKE["requires_grad"] = False
# Further ones by their names alone, with what is the same as nothing; those that Expressions are computed with.
_INERT: dict[str, dict[str, Any]] = {
    "add": {"alpha": 1}, "sub": {"alpha": 1}, "truediv": {"rounding_mode": None}, "round": {"decimals": 0},
    "relu": {"inplace": False}, "zeros_like": _LIKE, "ones_like": _LIKE, "full_like": _LIKE,
    **{name: {"memory_format": None} for name in SHARING | {"clone"}},
}  # fmt: skip
_PASSED = ("alpha", "rounding_mode", "decimals", "dtype", "device", "layout", "memory_format")


def refuse(what: str) -> NoReturn:
    raise NotImplementedError(f"heddle.flex_attention does not understand {what}; PyTorch's flex_attention may")


# ---------------------------------------------------------------------------------------------------------- names

_AUGMENTED = {f"__i{name}__": name for name in (*BINARY, "div")}
_AUGMENTED |= {f"i{name}": name for name in BINARY}  # of Python's module operator, as a strict torch.export has it
_REVERSED = {f"__r{name}__": f"r{name}" for name in BINARY}
_REVERSED |= {"__rdiv__": "rtruediv", "rsub": "rsub"}


def word_of(function: Any) -> str:
    """PyTorch's name of an operation that changes its first argument, mul_ or __iadd__; nothing for any other."""
    name: str = function if isinstance(function, str) else getattr(function, "__name__", "")
    if name in ("and_", "or_"):  # of Python's module operator
        return ""
    return name if name in _AUGMENTED or (name[-1:] == "_" and name[-2:] != "__") else ""


def name_of(function: Any) -> str:
    """Of what it computes."""
    name: str = getattr(function, "__name__", str(function))
    whole: str = getattr(function, "_qualified_op_name", "aten::")
    if not whole.startswith("aten::"):  # somebody's own operator, whatever its name
        return whole
    if name in _REVERSED:
        return _REVERSED[name]
    if name == "rand":  # which is not __rand__
        return "random"
    if name in _AUGMENTED:
        name = _AUGMENTED[name]
    elif name[:2] == "__":
        name = name.strip("_")
    elif name[:1] != "_":
        name = name.removesuffix("_")
    return _SAME.get(name, name)


def attribute_of(function: Any) -> str:
    """Which one Tensor.dtype.__get__ and its like ask for."""
    return getattr(getattr(function, "__self__", None), "__name__", "")


def is_method_where(function: Any) -> bool:
    """Tensor.where, whose condition comes second."""
    return function is Tensor.where


# torch.compiler.assume_constant_result, which would import the compiler: a function has the name that it has.
_constant: list[Any] = [word_of, name_of, attribute_of, is_method_where]
for _each in _constant:
    _each._dynamo_marked_constant = True


def unreversed(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """The same operation with its arguments the usual way round, for Tensor.__rsub__ and its like."""
    if name[:1] != "r" or name[1:] not in BINARY:
        return name, args, kwargs
    args, kwargs = bind(name[1:], args, kwargs)
    if kwargs:
        refuse(f"{name} with {kwargs}")
    return name[1:], args[::-1], {}


def bind(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a known operation, by place as far as they go, and those that stay keywords."""
    least, names = _NAMES.get(name, (1, ("input",)))
    given = {"input" if key == "self" else key: value for key, value in kwargs.items()}
    placed = list(args)
    while len(placed) < len(names) and names[len(placed)] in given:
        placed.append(given.pop(names[len(placed)]))
    if len(placed) > len(names):
        refuse(f"the operation {name} of {len(placed)} arguments")
    if len(placed) < least:
        refuse(f"the operation {name} without {names[len(placed)]}")
    inert, kept = _INERT.get(name, {}), {}
    for key, value in given.items():
        if key in names[len(placed) :]:
            kept[key] = value
        elif key == "out" and value is None:
            continue
        elif key not in inert:
            refuse(f"{key}= of the operation {name}")
        elif value is not inert[key] and value != inert[key]:
            if key not in _PASSED:
                refuse(f"{key}={value} of the operation {name}")
            kept[key] = value
    return tuple(placed), kept


# --------------------------------------------------------------------------------------------------- kinds of number

TRUTH, INDEX, WHOLE, REAL = range(4)  # boolean; exactly int64, or an int of Python; other integers; anything else


def kind_of_dtype(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return TRUTH
    if dtype == torch.int64:
        return INDEX
    return REAL if dtype.is_floating_point or dtype.is_complex else WHOLE


def kind_of(value: Any) -> int:
    """Of an Expression, a captured tensor or a number."""
    kind: int | None = getattr(value, "kind", None)
    if kind is not None:
        return kind
    if isinstance(value, Tensor):
        return kind_of_dtype(value.dtype)
    return TRUTH if isinstance(value, bool) else INDEX if isinstance(value, int) else REAL


def kind_made(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Of what a known operation makes of Expressions and numbers, as PyTorch promotes them."""
    if name in COMPARE or name in _TRUTHS:
        return TRUTH
    if name in BINARY and name != "truediv":
        return max(kind_of(args[0]), kind_of(args[1]))
    if name in _FLOATS or (name == "truediv" and "rounding_mode" not in kwargs):
        return REAL
    if name in ("int", "long"):
        return INDEX if name == "long" else WHOLE
    if name in _MADE_LIKE and kwargs.get("dtype") is not None:
        return kind_of_dtype(kwargs["dtype"])
    if name in _CONVERTED:
        for value in (*args[1:], *kwargs.values()):
            if isinstance(value, torch.dtype):
                return kind_of_dtype(value)
            if not isinstance(value, (str, int, torch.device, type(None))):
                return kind_of(value)  # what it shall be like
        return kind_of(args[0])
    if name in _LIKE_THE_FIRST or name in _MADE_LIKE or name == "invert":
        return kind_of(args[0])
    if name == "square":
        return max(INDEX, kind_of(args[0]))
    values = args[1:] if name == "where" else (*args, *kwargs.values())
    return max([kind_of(value) for value in values if value is not None and not isinstance(value, str)])


def conversion(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """(dtype, device) that Tensor.to or Tensor.type is asked for, each None where it is not."""
    dtype: Any = None
    device: Any = None
    for key in kwargs:
        if key not in ("dtype", "device", "other", "non_blocking", "copy", "memory_format"):
            refuse(f"{key}= of the operation to")
    for value in (*args[1:], kwargs.get("other"), kwargs.get("dtype"), kwargs.get("device")):
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, (str, torch.device)) or (isinstance(value, int) and not isinstance(value, bool)):
            device = value
        elif value is not None and not isinstance(value, (bool, torch.memory_format)):
            dtype = dtype_of(value)
    return dtype, device


def dtype_of(value: Any) -> torch.dtype:
    """Of a tensor, a Score, an index or what is made of these, where that is known."""
    dtype = getattr(value, "dtype", None)
    if dtype is not None:
        return dtype  # type: ignore[no-any-return]
    kind = getattr(value, "kind", REAL)
    if kind in (TRUTH, INDEX):
        return torch.bool if kind == TRUTH else torch.int64
    refuse("the dtype of what is computed of the indices")
