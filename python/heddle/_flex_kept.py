# SPDX-License-Identifier: Apache-2.0
"""What heddle.flex_attention made of its functions in earlier calls, for as long as it can be proven to be the same.

A proof goes by what the functions are and read: their code, defaults, cells and globals, whose numbers must be equal,
whose tensors must be the same objects with the same version (PyTorch counts what is written into a tensor) and memory,
and by a BlockMask's own tensors and sizes. Functions that are made anew for every call, of the same code around the
same things, are the same. What reads something that could change unseen, a list or an attribute, is never kept.
"""

from __future__ import annotations

import types
import weakref
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heddle import _C
from heddle._flex_apply import Expression, sum_of
from heddle._flex_reads import globals_of, is_constant, is_torchs
from heddle._kinds import bias_of, stream_of

_MOST = 64  # on a shelf
_BYTES = 1 << 26  # of its tensors, where there is more than one
_LARGEST = 1 << 24  # of one that is no BlockMask's mask

_USUAL = (Tensor, torch.nn.Parameter)
_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
_SIZES = ("BLOCK_SIZE", "seq_lengths")
_ABSENT = object()  # a global that there is not
_dispatcher: Any = torch._C
_grad_enabled = torch.is_grad_enabled


class _Unseen(Exception):
    """It could change without being seen."""


_function: Any = types.FunctionType
_base: Any = _dispatcher.TensorBase
# prove((state, lists, state), score_mod, block_mask): they are what they were.
_names = (
    _function.__code__,
    _function.__defaults__,
    _function.__closure__,
    _function.__globals__,
    types.CellType.cell_contents,
    _base._version,
    _base.requires_grad,
    "data_ptr",
    "mask_mod",
    *_LISTS,
    *_SIZES,
    types.FunctionType,
    _ABSENT,
)
prove = _C.prover(_names)


class _Parts(NamedTuple):
    """What python/src/recall.c works with, in its order."""

    known: Any  # by a BlockMask's id; each has a Shelf
    functions: Any
    latest: Any  # the one that was used last, by a BlockMask's id, or by None
    short: Any  # what shortcut.c works with; None: nothing takes a short way
    refused: Any
    names: Any = _names
    grad_enabled: Any = _grad_enabled
    stream: Any = getattr(_dispatcher, "_cuda_getCurrentRawStream", None)
    capturing: Any = torch.cuda.is_current_stream_capturing
    shelf: Any = "shelf"
    code: Any = "__code__"
    shape: Any = _base.shape
    dtype: Any = _base.dtype
    device: Any = _base.device
    ready: Any = "ready"
    other: Any = "other"


def recaller(*parts: Any) -> Any:
    """recall(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse): the result by what was kept of
    an earlier call, or NotImplemented. `refused` is called where the short ways leave that to others."""
    return _C.recaller(tuple(_Parts(*parts)))


class _States:
    """By which values are known again (python/src/proof.c): tuples, or the values themselves where these cannot change.

    learns: whether a tensor among them wants a gradient. free: ids of those that are read anew at each call."""

    def __init__(self, free: frozenset[int] = frozenset()) -> None:
        self.learns, self.free = False, free
        self.around: list[Any] = []

    def of(self, value: Any) -> Any:
        if type(value) is types.FunctionType:
            return self.of_function(value)
        if type(value) in _USUAL:
            if value.is_inference():  # nobody counts what is written into it
                raise _Unseen
            self.learns = self.learns or value.requires_grad
            gradient = value.requires_grad if value.is_floating_point() or value.is_complex() else None
            version = None if id(value) in self.free else value._version
            return 1, weakref.ref(value), version, value.data_ptr(), gradient
        if type(value) in (int, float):
            return 2, value
        if type(value) is tuple:
            return 3, tuple(self.of(part) for part in value)
        if value is _ABSENT or is_constant(value):
            return value
        raise _Unseen

    def of_function(self, function: Any) -> Any:
        if is_torchs(function):
            return function
        code, names, looked_up = function.__code__, function.__globals__, globals_of(function.__code__)
        calls_itself = any(function is each for each in self.around)
        if code.co_kwonlyargcount or function.__dict__ or looked_up is None or calls_itself:
            raise _Unseen
        self.around.append(function)
        cells = tuple(self.of(cell.cell_contents) for cell in function.__closure__ or ())
        read = [(name, self.of(names.get(name, _ABSENT))) for name in looked_up]
        state = 4, code, self.of(function.__defaults__), cells, names, tuple(part for pair in read for part in pair)
        self.around.pop()
        return state


def lists_of(mask: Any) -> Any:
    """A state of a BlockMask's own tensors and sizes; None where nobody counts what is written into them."""
    tensors, sizes = (tuple(getattr(mask, name) for name in names) for names in (_LISTS, _SIZES))
    if any(each is not None and each.is_inference() for each in tensors):
        return None
    return weakref.ref(mask), tensors, tuple(None if each is None else each._version for each in tensors), sizes


def are_lists_of(lists: Any, mask: Any) -> bool:
    """Whether this state is still of this BlockMask."""
    return lists is not None and prove((None, lists, mask.mask_mod), None, mask)


class Recipe:
    """What is added to the scores, computed anew of the tensors in it that learn; all else in it is kept."""

    def __init__(self, terms: list[Any], p: Any, dtype: torch.dtype) -> None:
        self.steps: list[tuple[Any, list[Any], dict[str, Any]]] = []
        self.leaves: dict[int, weakref.ref[Tensor]] = {}
        self.constants: list[Tensor] = []
        self.dtype, self.indices = dtype, p.indices()
        self.known: dict[int, Any] = {}
        with torch.no_grad():
            places = [self._place(term) for term in terms]
        total = places[0] if len(places) == 1 else self._step(partial(sum_of, p.real), places, {})
        if not isinstance(total, _Step):
            raise _Unseen
        del self.indices, self.known

    def _step(self, function: Any, places: list[Any], options: dict[str, Any]) -> Any:
        self.steps.append((function, places, options))
        return _Step(len(self.steps) - 1)

    def _place(self, value: Any) -> Any:
        """A constant, or a _Step: the result of an earlier one."""
        if isinstance(value, Tensor) and value.requires_grad:
            if not value.is_leaf:  # another one the next time
                raise _Unseen
            self.leaves[id(value)] = reference = weakref.ref(value)
            return self._step(reference, [], {})
        if isinstance(value, Expression) and any(t.requires_grad for t in value.tensors()):
            if any(isinstance(each, Expression) for each in value.kwargs.values()):
                raise _Unseen
            return self._step(value.function, [self._place(each) for each in value.args], value.kwargs)
        value = value.values(self.indices, self.known) if isinstance(value, Expression) else value
        self.constants += [value] if isinstance(value, Tensor) else []
        return value

    def __call__(self) -> Tensor:
        made: list[Any] = []
        for function, places, options in self.steps:
            made.append(function(*[made[at] if type(at) is _Step else at for at in places], **options))
        bias: Tensor = made[-1]
        return bias if bias.dtype is self.dtype else bias_of(bias, self.dtype)


class _Step(int):
    """Which step's result is meant."""


class Kept:
    """heddle.attention's options for two functions and lengths.

    other: the same for calls with gradients, where this is for calls without, or the other way round."""

    __slots__ = ("bytes", "graded", "options", "other", "ready", "recipe")

    def __init__(
        self,
        score_mod: Any,
        block_mask: Any,
        options: dict[str, Any],
        mask: Any,
        recipe: Any,
        place: tuple[Any, ...],
        prepared: tuple[Any, ...] | None,
    ) -> None:
        states = _States(frozenset() if recipe is None else frozenset(recipe.leaves))
        lists = None if block_mask is None else lists_of(block_mask)
        if block_mask is not None and lists is None:
            raise _Unseen
        proof = states.of(score_mod), lists, None if block_mask is None else states.of(block_mask.mask_mod)
        tensors = [value for value in options.values() if isinstance(value, Tensor)]
        tensors += [] if recipe is None else recipe.constants
        if any(t.is_inference() or t.is_meta for t in tensors):
            raise _Unseen
        sizes = [t.untyped_storage().nbytes() for t in tensors]
        if any(size > _LARGEST and t is not mask for t, size in zip(tensors, sizes, strict=True)):
            raise _Unseen
        self.bytes = sum(sizes)
        # None: it is the same whether gradients are recorded or not.
        self.graded = _grad_enabled() if states.learns and (tensors or recipe is not None) else None
        device = tensors[0].device if tensors and tensors[0].is_cuda else None
        self.options, self.recipe = options, recipe
        self.other: Kept | None = None
        plain = recipe is None and options.keys() <= {"causal", "scale"}
        # python/src/recall.c has the order of these.
        self.ready = proof, self.graded, device and device.index, stream_of(device), recipe, place, plain, prepared


def capturing(device: torch.device | None) -> bool:
    """Whether a CUDA graph is being captured."""
    return device is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Shelf(dict[tuple[Any, ...], Kept]):
    """The latest, by what a call is asked for."""

    def keep(
        self,
        key: tuple[Any, ...],
        score_mod: Any,
        block_mask: Any,
        options: dict[str, Any],
        mask: Any = None,
        recipe: Any = None,
        prepared: tuple[Any, ...] | None = None,
    ) -> None:
        """For calls of the same key. `mask`: the tensor that is kept with the BlockMask anyway; `prepared`: the options
        as the short ways want them; None where these are closed."""
        latest.clear()
        if _dispatcher._len_torch_dispatch_stack() or _dispatcher._are_functorch_transforms_active():
            return
        if any(isinstance(value, Tensor) and capturing(value.device) for value in options.values()):
            return
        try:
            made = Kept(score_mod, block_mask, options, mask, None if recipe is None else recipe(), key[1:], prepared)
        except (_Unseen, ValueError):  # also an empty cell
            return
        before = self.pop(key, None)
        if before is not None and made.graded is not None and before.graded is (not made.graded):
            made.other, before.other = before, None
            made.bytes += before.bytes
        kept = list(self.items())
        self[key] = made
        total = made.bytes + sum(each.bytes for _, each in kept)
        for at, (oldest, each) in enumerate(kept):
            if len(kept) - at < _MOST and total <= _BYTES:
                break
            total -= each.bytes
            self.pop(oldest, None)


functions = Shelf()  # of calls without a BlockMask
latest: dict[int | None, Kept] = {}
