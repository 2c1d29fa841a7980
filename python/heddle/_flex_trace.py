# SPDX-License-Identifier: Apache-2.0
"""What a score_mod or mask_mod of FlexAttention computes, found out by calling it once with symbols.

Each symbol holds a form (heddle._flex_apply) that an operation in place may change, as it changes a tensor.
"""

from __future__ import annotations

import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from heddle._flex_apply import Expression, Leaf, Score, Symbol, apply, conjuncts
from heddle._flex_calls import (
    BINARY,
    INDEX,
    KNOWN,
    REAL,
    SHARING,
    TRUTH,
    dtype_of,
    kind_of,
    kind_of_dtype,
    name_of,
    refuse,
    word_of,
)
from heddle._flex_reads import Reads

INDICES = ("b", "h", "q_idx", "kv_idx")


class Held(Symbol):
    """A form, an Expression or a Score, as a function is given it and gets it: in the place of a tensor of one number,
    which an operation in place may change, as all see who have it.

    mode: of the trace. memory: how often it was changed, and by what; shared with whatever else may be this tensor."""

    __slots__ = ("form", "memory", "mode", "version")

    def __init__(self, form: Any, mode: Any) -> None:
        self.form, self.mode = form, mode
        self.memory: list[Any] = [0, ""]
        self.version = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            for part in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(part, Held):
                    return part.mode.perform(func, args, kwargs or {})
        refuse(f"the operation {name_of(func)}")

    def _apply(self, name: str, function: Any, args: tuple[Any, ...]) -> Any:
        return self.mode.perform(function, args, {}, name)

    def __bool__(self) -> bool:
        refuse("a branch of Python that depends on an index or a score (say torch.where)")

    def __iter__(self) -> Iterator[Any]:
        refuse("a loop over an index or a score")

    def __index__(self) -> int:
        refuse("an index or a score made a number of Python")

    __int__ = __float__ = __index__

    @property
    def shape(self) -> Any:
        return self.size()

    def dim(self) -> int:
        rest: int = attribute("ndim", form_of(self, Held), None)
        return rest

    def size(self, dim: Any = None) -> Any:
        shape = attribute("shape", form_of(self, Held), None)
        return shape if dim is None else shape[dim]

    def item(self) -> Any:
        refuse("item() of an index or a score")

    def __pos__(self) -> Any:
        return self

    def __getitem__(self, index: Any) -> Any:
        if not self.dim():
            refuse("an index or a score with an index of its own")
        return self.mode.perform(operator.getitem, (self, index), {}, "getitem")

    def __setitem__(self, index: Any, value: Any) -> None:
        refuse("what is written into a part of an index or of a score")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("new_"):
            return maker(name, form_of(self, Held))
        function = getattr(torch.Tensor, name, None)
        if name.startswith("_") or function is None:
            raise AttributeError(f"what stands for an index or a score has no attribute {name!r}")
        if not callable(function):
            return attribute(name, form_of(self, Held), self.mode.device)
        return lambda *args, **kwargs: self.mode.perform(function, (self, *args), kwargs)


def _augmented() -> None:
    for name in BINARY:

        def change(self: Any, other: Any, word: str = f"__i{name}__") -> Any:
            return self.mode.perform(None, (self, other), {}, word[3:-2], word)

        setattr(Held, f"__i{name}__", change)


_augmented()

# ----------------------------------------------------------------------------------------------------- operations


def form_of(value: Any, kind: Any) -> Any:
    """What a symbol of this class holds; of a tuple or a list, what its parts do; else the value."""
    if isinstance(value, kind):
        if value.version != value.memory[0]:
            refuse(f"the operation {value.memory[1]} of what may be the same tensor as another that is used later")
        return value.form
    return tuple([form_of(part, kind) for part in value]) if isinstance(value, (tuple, list)) else value


def perform(
    name: str, word: str, function: Any, args: Any, kwargs: dict[str, Any], kind: Any, hold: Callable[[Any], Any]
) -> Any:
    """One operation on symbols of the class `kind`, which `hold` makes of a form. `word`: of one in place."""
    forms = tuple([form_of(value, kind) for value in args])
    given = {key: form_of(value, kind) for key, value in kwargs.items()} if kwargs else kwargs
    first = args[0] if args else kwargs.get("input", kwargs.get("self"))
    if word:
        if not isinstance(first, kind):
            refuse(f"the operation {word} of a captured tensor")
        first.form = _changed(name, word, function, forms, given, form_of(first, kind))
        first.memory[0] += 1
        first.memory[1] = word
        first.version = first.memory[0]
        return first
    made = apply(name, function, forms, given)
    if not isinstance(made, (Expression, Score)):
        return made
    symbol = hold(made)
    if isinstance(first, kind) and (name in SHARING or name == "getitem"):
        symbol.memory, symbol.version = first.memory, first.version
    return symbol


def _changed(name: str, word: str, function: Any, args: Any, kwargs: dict[str, Any], before: Any) -> Any:
    """The form of what was `before` after an operation in place, which keeps its dtype."""
    if name not in KNOWN:
        refuse(f"the operation {word}")
    if isinstance(before, Expression) and before.rest:
        refuse(f"the operation {word} of a captured tensor of which {before.rest} dimensions have no index")
    usual = word[-1:] == "_" and word[-2:] != "__"
    function = getattr(torch.Tensor, word[:-1], None) if usual else BINARY[name]
    made = apply(name, function, args, kwargs)
    if isinstance(before, Score) and isinstance(made, Score):
        return made
    if not isinstance(made, Expression) or isinstance(before, Score):
        refuse(f"the operation {word} of what is computed of the indices alone with a score")
    if (kind_of(made) > TRUTH) + (kind_of(made) == REAL) > (before.kind > TRUTH) + (before.kind == REAL):
        refuse(f"the operation {word} of integers or conditions that become other numbers")
    others = (*args[1:], *kwargs.values())
    plain = made.kind == REAL and not any(isinstance(value, (Expression, Tensor)) for value in others)
    if made.kind == before.kind and (plain or made.kind in (TRUTH, INDEX)):
        return made
    return Expression("to", _made_like, (made, before), {}, made.uses, before.kind)


def _made_like(value: Tensor, other: Tensor) -> Tensor:
    return value.to(other.dtype)


def attribute(name: str, form: Any, device: Any) -> Any:
    """Of the tensor that a symbol stands for."""
    rest = getattr(form, "rest", 0)
    if name == "device":
        return device
    if name == "dtype":
        return dtype_of(form)
    if name == "shape":
        return torch.Size(form.args[0].shape[len(form.args) - 1 :]) if rest else torch.Size(())
    if name == "ndim":
        return rest
    if name in ("requires_grad", "is_nested", "is_sparse", "is_quantized"):
        return False
    refuse(f"the attribute {name} of an index or a score")


_NEW = {"new_ones": 1, "new_zeros": 0}


def maker(name: str, form: Any) -> Callable[..., Any]:
    """new_ones(()) and the like: a number."""

    def make(*args: Any, dtype: Any = None, **kwargs: Any) -> Any:
        data = "data" if name == "new_tensor" else "size"
        size = kwargs.pop(data, ()) if not args else args[0]
        value = size if data == "data" else args[1] if len(args) > 1 else kwargs.pop("fill_value", 0)
        value = _NEW.get(name, value)
        refused = [key for key in kwargs if key not in ("device", "layout", "pin_memory") and kwargs[key]]
        if name not in ("new_ones", "new_zeros", "new_full", "new_tensor") or len(args) > 2 or refused:
            refuse(f"{name} with {args} and {kwargs}")
        if not isinstance(value, (int, float)):
            refuse(f"{name} of what is no number of Python")
        if data == "size" and (not isinstance(size, (tuple, list)) or len(size)):
            refuse(f"{name} of the size {size}")
        kind = kind_of(form) if dtype is None else kind_of_dtype(dtype)
        return bool(value) if kind == TRUTH else float(value) if kind == REAL else int(value)

    return make


# --------------------------------------------------------------------------------------------------------- tracing


class _Mode(TorchFunctionMode):
    """Captured tensors with a symbol for an index come here, too."""

    def __init__(self, read: list[Tensor]) -> None:
        super().__init__()
        self.read = read
        self.used: list[tuple[Tensor, int]] = []  # along with symbols, and the version of each then
        self.device: Any = None
        self.again = False  # what the function computes without a symbol has to be computed anew for every call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = [*args, *(kwargs or {}).values()]
        values += [part for value in values if isinstance(value, (tuple, list)) for part in value]
        if any(isinstance(value, Held) for value in values):
            return self.perform(func, args, kwargs or {})
        tensors = [value for value in values if isinstance(value, Tensor)]
        self.read += tensors
        result = func(*args, **(kwargs or {}))
        name = name_of(func)
        made = isinstance(result, (Tensor, tuple, list)) and not isinstance(result, torch.Size)
        self.again |= (made and any(t.requires_grad for t in tensors)) or "rand" in name or name in _RANDOM
        self.again |= bool(word_of(func)) or name == "setitem" or "out" in (kwargs or {})
        return result

    def perform(self, function: Any, args: Any, kwargs: Any, name: str = "", word: str = "") -> Any:
        """One operation on what is Held."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                self.note(value)
            elif isinstance(value, (tuple, list)):
                for part in value:
                    self.note(part)
        if not name:
            name, word = name_of(function), word_of(function)
        return perform(name, word, function, args, kwargs, Held, self.hold)

    def note(self, value: Any) -> None:
        if isinstance(value, Tensor) and not value.is_inference():
            self.used.append((value, value._version))

    def hold(self, form: Any) -> Held:
        return Held(form, self)


def trace(function: Callable[..., Any], like: Tensor, with_score: bool) -> Any:
    """The result of function(score, b, h, q_idx, kv_idx), or for a mask the list of its conditions, for symbols.

    The same object as the last time, as long as nothing that the function reads is another one."""
    leaves: list[Any] = [Leaf(name, like.device) for name in INDICES]
    if torch.compiler.is_dynamo_compiling():
        from heddle._flex_compiled import call  # imports the compiler

        result = _checked(call(function, [Score(like), *leaves] if with_score else leaves, like), with_score)
        return result if with_score else conjuncts(result)
    known = _traced.get(function) if type(function) is types.FunctionType else None
    if known is not None and known.like == (like.dtype, like.device, with_score) and known.holds(function):
        return known.result
    now: Any = _trace_now
    if "torch._dynamo" in sys.modules:  # behind a break of a graph it would compile what records here
        disable: Any = torch.compiler.disable
        now = disable(now)
    return now(function, like, with_score, leaves)


def _checked(result: Any, with_score: bool) -> Any:
    """What a mask_mod returns has to be one condition, as it is asked about one query and one key."""
    if not with_score:
        if result is None:
            refuse("a mask_mod that returns None")
        rest = result.rest if isinstance(result, Expression) else result.dim() if isinstance(result, Tensor) else 0
        if rest:
            refuse(f"a mask_mod that returns a captured tensor of which {rest} dimensions have no index")
    return result


def _trace_now(function: Callable[..., Any], like: Tensor, with_score: bool, leaves: list[Any]) -> Any:
    read: list[Tensor] = []
    with _Mode(read) as mode:
        mode.device = like.device
        forms = [Score(like, read=read), *leaves] if with_score else leaves
        result = _checked(form_of(function(*[mode.hold(form) for form in forms]), Held), with_score)
    if any(tensor._version != version for tensor, version in mode.used):
        refuse("a captured tensor that the function changes after it has read it")
    result = result if with_score else conjuncts(result)
    if type(function) is types.FunctionType:
        _traced.pop(function, None)
        if not mode.again and all(map(_is_counted, read)) and not _transformed():
            reads = Reads((like.dtype, like.device, with_score), result, read)
            if reads.all_of(function, outermost=True):
                _traced[function] = reads
    return result


def _is_counted(tensor: Tensor) -> bool:
    """Whether PyTorch counts what is written into it, and it has a memory of its own."""
    usual = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return usual and not tensor.is_inference()


def _transformed() -> bool:
    """Whether tensors are something else than they seem, and have no memory of their own."""
    return torch.compiler.is_compiling() or _transforms()


def is_known(function: Any) -> bool:
    """Whether what it computes would be the same now, as far as `trace` can tell."""
    return type(function) is types.FunctionType and function in _traced


_transforms: Any = torch._C._are_functorch_transforms_active
_RANDOM = ("bernoulli", "normal", "multinomial", "poisson", "dropout")
_traced: weakref.WeakKeyDictionary[Any, Reads] = weakref.WeakKeyDictionary()
