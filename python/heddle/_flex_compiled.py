# SPDX-License-Identifier: Apache-2.0
"""heddle.flex_attention within torch.compile and torch.export.

Dynamo traces score_mod and mask_mod with our symbols as it traces everything else, so that what they read is guarded
and what they captured is an input of the graph. Only a BlockMask's lists are data, whose shapes alone are known then.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.comptime import comptime
from torch._dynamo.utils import get_real_value
from torch.overrides import TorchFunctionMode

from heddle._flex_apply import Expression, Score, apply
from heddle._flex_calls import INDEX, TRUTH, attribute_of, name_of, refuse, word_of
from heddle._flex_forms import band
from heddle._flex_masks import Masks, Problem, Tiles
from heddle._flex_trace import attribute, form_of, maker, perform


class _Carrier(Tensor):
    """A symbol, `form`, as a tensor: Dynamo compares a class of Python with a dynamic number by what it is not.

    Its memory is that of heddle._flex_trace.Held."""

    form: Any
    memory: list[Any]
    version: int
    plain: Tensor  # of its dtype and device
    made: _Made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _apply(func, args, kwargs or {})


class _Made:
    """All carriers of a trace, and those of them that stand for tensors that Dynamo has computed, with these."""

    def __init__(self) -> None:
        self.carriers: list[Any] = []
        self.owned: list[tuple[Tensor, Any]] = []


# And a carrier's place among the others: `apply` refuses what has sizes, so that it passes for no number.
_SIZE = (3, 0, 7)


def _carry(form: Any, like: Tensor, made: _Made) -> Any:
    if not isinstance(form, (Expression, Score)):
        return form
    dtype = like.dtype
    if isinstance(form, Score):
        dtype = form.dtype
    elif form.kind in (TRUTH, INDEX):
        dtype = torch.bool if form.kind == TRUTH else torch.int64
    plain = torch.empty((*_SIZE, len(made.carriers)), dtype=dtype, device=like.device)
    carrier = plain.as_subclass(_Carrier)
    carrier.form, carrier.plain, carrier.made = form, plain, made
    carrier.memory, carrier.version = [0, ""], 0
    made.carriers.append(carrier)
    return carrier


_UNARY = {"abs": operator.abs, "neg": operator.neg, "pos": operator.pos, "invert": operator.invert}
_steps = [""]


def _look_at_steps(context: Any) -> None:
    """By which operations Dynamo has made `value` of a carrier's tensor, the last one first."""
    node, names = context.get_local("value").as_proxy().node, []
    while getattr(node.target, "__name__", "") in _UNARY and len(node.args) == 1:
        names.append(node.target.__name__)
        (node,) = node.args
    _steps[0] = " ".join(names) if node.target is torch.empty else ""


def _last_steps() -> str:
    return _steps[0]


_last_steps._dynamo_marked_constant = True  # type: ignore[attr-defined]
_changes = [""]


def _look_at_changes(context: Any) -> None:
    """By which operation Dynamo has changed a carrier's tensor without asking its class, as by torch.relu_()."""
    found: set[Any] = set()
    _changes[0] = ""
    for node in context.graph().nodes:
        is_own = node.target is torch.empty and node.args and tuple(node.args[0][:3]) == _SIZE
        if not is_own and found.isdisjoint(node.all_input_nodes):
            continue
        found.add(node)
        if node.target in (operator.setitem, "__setitem__") or word_of(node.target):
            _changes[0] = word_of(node.target) or "setitem"


def _last_change() -> str:
    return _changes[0]


_last_change._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _own(value: Any, made: _Made) -> Any:
    """A carrier in the place of a tensor that Dynamo has computed of one without asking its class, as it does abs()."""
    if isinstance(value, (tuple, list)):
        return tuple([_own(part, made) for part in value])
    if not isinstance(value, Tensor) or isinstance(value, _Carrier) or tuple(value.shape[:3]) != _SIZE:
        return value
    if value.dim() != 4 or value.shape[3] >= len(made.carriers):
        return value
    for tensor, carrier in made.owned:
        if tensor is value:
            return carrier
    comptime(_look_at_steps)
    names = _last_steps()
    if not names:
        return value
    carrier = made.carriers[value.shape[3]]
    form = form_of(carrier, _Carrier)
    steps = [name for name in names.split(" ") if name != "pos"]
    if not steps:
        return carrier
    for other in (carrier, *[each for tensor, each in made.owned if tensor.shape[3] == value.shape[3]]):
        if other.memory[0]:  # before or after this was computed: nobody knows
            refuse(f"the operation {other.memory[1]} of what {steps[0]} is computed of, within a graph")
    for name in reversed(steps):
        form = apply(name, _UNARY[name], (form,), {})
    own = _carry(form, carrier.plain, made)
    made.owned.append((value, own))
    return own


def _apply(func: Any, args: Any, kwargs: Any) -> Any:
    """One operation, of which `args` or the parts of one of these are carriers."""
    name, one = name_of(func), None
    for value in (*args, *kwargs.values()):
        for part in value if isinstance(value, (tuple, list)) else (value,):
            one = part if isinstance(part, _Carrier) else one
    assert one is not None
    if name == "get":
        return attribute(attribute_of(func), form_of(one, _Carrier), one.plain.device)
    if name.startswith("new_"):
        return maker(name, form_of(one, _Carrier))(*args[1:], **kwargs)

    def hold(form: Any) -> Any:
        return _carry(form, one.plain, one.made)

    return perform(name, word_of(func), func, args, kwargs, _Carrier, hold)


class _Mode(TorchFunctionMode):
    """Captured tensors with a symbol among several indices come here, and what Dynamo has made of symbols."""

    def __init__(self, made: _Made) -> None:
        super().__init__()
        self.made = made

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            value = _own(value, self.made)
            for part in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(part, _Carrier):
                    given = {key: _own(each, self.made) for key, each in (kwargs or {}).items()}
                    return _apply(func, tuple([_own(each, self.made) for each in args]), given)
        if word_of(func) or name_of(func) == "setitem" or (kwargs or {}).get("out") is not None:
            refuse(f"{word_of(func) or name_of(func)} of a captured tensor within a graph")
        return func(*args, **(kwargs or {}))


def call(function: Any, symbols: list[Any], like: Tensor) -> Any:
    """function(*symbols) within a graph."""
    made = _Made()
    carriers = [_carry(symbol, like, made) for symbol in symbols]
    with _Mode(made):
        result = function(*carriers)
    comptime(_look_at_changes)
    if _last_change():
        refuse(f"the operation {_last_change()} of an index or a score, within a graph")
    return form_of(_own(result, made), _Carrier)


_looked = [False]
_APART = (
    "heddle.flex_attention in a compiled part: the lists of block_mask say something else than its mask_mod; call it "
    "outside of torch.compile, or let the first BlockMask of the compiled part be one of this kind"
)


def _look(context: Any) -> None:
    """What `wrong` is for the inputs for which the graph is made."""
    proxy = context.get_local("wrong").as_proxy()
    try:
        _looked[0] = bool(get_real_value(proxy.node, proxy.tracer))
    except Exception:  # lists made within the graph, or dynamic shapes: nobody knows before it runs
        _looked[0] = False


def _was_wrong() -> bool:
    return _looked[0]


_was_wrong._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _are_apart(tiles: Tensor) -> bool:
    """Whether some of these tiles are true now; where none is, none of the graph's later calls may be."""
    wrong = tiles.any()
    if torch.compiler.is_dynamo_compiling():
        comptime(_look)
        if _was_wrong():
            return True
    torch._assert_async(~wrong, _APART)
    return False


def split(mask: Any, conditions: list[Any], p: Problem) -> tuple[list[Any], Tiles | None]:
    """The conditions of a BlockMask that the kernels may go by, and its tiles where these do not say all of it."""
    tiles = Tiles(mask, p)
    bands = [condition for condition in conditions if band(condition) is not None]
    if not bands:
        return [], tiles
    own = Masks(bands)
    missing, beyond = tiles.apart(own.low, own.high, p)
    if len(bands) == len(conditions) and not _are_apart(missing | beyond):
        return bands, None
    return ([] if _are_apart(beyond) else bands), tiles
