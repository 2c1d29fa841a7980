# SPDX-License-Identifier: Apache-2.0
"""What heddle.flex_attention made of its functions in earlier calls, for as long as it can be proven to be the same.

A proof goes by what the functions are and read: their code, defaults, cells and globals, whose numbers must be equal,
whose tensors must be the same objects with the same version (PyTorch counts what is written into a tensor) and memory,
and by a BlockMask's own tensors. Functions that are made anew for every call, of the same code around the same things,
are the same. What reads something that could change unseen, a list or an attribute, is never kept.
"""

from __future__ import annotations

import dis
import types
import weakref
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from heddle import _C

_MOST = 64  # on a shelf
_BYTES = 1 << 26  # of its tensors, where there is more than one
_LARGEST = 1 << 24  # of one that is no BlockMask's mask

_CONSTANT = (bool, str, type(None), torch.dtype, torch.device, types.BuiltinFunctionType)
_USUAL = (Tensor, torch.nn.Parameter)
_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
_ABSENT = object()  # a global that there is not
_dispatcher: Any = torch._C
_grad_enabled = torch.is_grad_enabled


class _Unseen(Exception):
    """It could change without being seen."""


# prove((state, lists, state), score_mod, block_mask): they are what they were.
prove = _C.prover(
    (
        "__code__",
        "__defaults__",
        "__closure__",
        "__globals__",
        "cell_contents",
        "_version",
        "data_ptr",
        "requires_grad",
        "mask_mod",
        *_LISTS,
        types.FunctionType,
        _ABSENT,
    )
)


class _States:
    """By which values are known again (python/src/proof.c): tuples, or the values themselves where these cannot change.

    learns: whether a tensor among them wants a gradient."""

    def __init__(self) -> None:
        self.learns = False
        self.around: list[Any] = []

    def of(self, value: Any) -> Any:
        if type(value) is types.FunctionType:
            return self.of_function(value)
        if type(value) in _USUAL:
            if value.is_inference():  # nobody counts what is written into it
                raise _Unseen
            self.learns = self.learns or value.requires_grad
            gradient = value.requires_grad if value.is_floating_point() or value.is_complex() else None
            return 1, weakref.ref(value), value._version, value.data_ptr(), gradient
        if type(value) in (int, float):
            return 2, value
        if type(value) is tuple:
            return 3, tuple(self.of(part) for part in value)
        told = isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] in ("torch", "math")
        if told or value is _ABSENT or type(value) in _CONSTANT:
            return value
        raise _Unseen

    def of_function(self, function: Any) -> Any:
        if (function.__module__ or "").partition(".")[0] == "torch" and not function.__closure__:
            return function
        if function.__code__.co_kwonlyargcount or any(function is each for each in self.around):  # it calls itself
            raise _Unseen
        self.around.append(function)
        code, names = function.__code__, function.__globals__
        cells = tuple(self.of(cell.cell_contents) for cell in function.__closure__ or ())
        read = [(name, self.of(names.get(name, _ABSENT))) for name in _globals_of(code)]
        state = 4, code, self.of(function.__defaults__), cells, names, tuple(part for pair in read for part in pair)
        self.around.pop()
        return state


@lru_cache(maxsize=256)
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """Those that it, or a function defined in it, looks up."""
    names = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME"):
            raise _Unseen
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= set(_globals_of(constant))
    return tuple(sorted(names))


def lists_of(mask: Any) -> Any:
    """A state of a BlockMask's own tensors; None where nobody counts what is written into them."""
    tensors = tuple(getattr(mask, name) for name in _LISTS)
    if any(each is not None and each.is_inference() for each in tensors):
        return None
    return weakref.ref(mask), tensors, tuple(None if each is None else each._version for each in tensors)


def are_lists_of(lists: Any, mask: Any) -> bool:
    """Whether this state is still of this BlockMask."""
    return lists is not None and prove((None, lists, mask.mask_mod), None, mask)


class Kept:
    """heddle.attention's options for two functions and lengths."""

    __slots__ = ("always", "bytes", "device", "graded", "options", "plain", "proof", "rest", "stream")

    def __init__(self, score_mod: Any, block_mask: Any, options: dict[str, Any], mask: Any) -> None:
        states = _States()
        lists = None if block_mask is None else lists_of(block_mask)
        if block_mask is not None and lists is None:
            raise _Unseen
        self.proof = states.of(score_mod), lists, None if block_mask is None else states.of(block_mask.mask_mod)
        tensors = [value for value in options.values() if isinstance(value, Tensor)]
        if any(t.is_inference() or t.is_meta for t in tensors):
            raise _Unseen
        sizes = [t.untyped_storage().nbytes() for t in tensors]
        if any(size > _LARGEST and t is not mask for t, size in zip(tensors, sizes, strict=True)):
            raise _Unseen
        self.bytes = sum(sizes)
        # None: it is the same whether gradients are recorded or not.
        self.graded = _grad_enabled() if tensors and states.learns else None
        self.device = tensors[0].device if tensors and tensors[0].is_cuda else None
        self.stream = stream_of(self.device)
        self.always = self.graded is None and self.device is None
        self.options = options
        self.plain = options.keys() <= {"causal", "scale"}
        names = ("causal", "window", "scale", "softcap", "bias", "mask", "alibi_slopes")
        self.rest = tuple(options.get(name, 0.0 if name == "softcap" else None) for name in names)

    def now(self) -> bool:
        """Whether it can be used here and now, where its proof holds."""
        if self.graded is not None and self.graded is not _grad_enabled():
            return False
        # The GPU has made the tensors before it uses them, and no CUDA graph goes on using what may be freed.
        return self.device is None or (stream_of(self.device) == self.stream and not capturing(self.device))


def stream_of(device: torch.device | None) -> int:
    """PyTorch's current stream on a GPU; 0 elsewhere."""
    if device is None or device.type != "cuda":
        return 0
    return int(_dispatcher._cuda_getCurrentRawStream(device.index))


def capturing(device: torch.device | None) -> bool:
    """Whether a CUDA graph is being captured."""
    return device is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Shelf(dict[tuple[Any, ...], Kept]):
    """The latest, by what a call is asked for."""

    def keep(
        self, key: tuple[Any, ...], score_mod: Any, block_mask: Any, options: dict[str, Any], mask: Any = None
    ) -> None:
        """For calls of the same key. `mask`: the tensor that is kept with the BlockMask anyway."""
        if _dispatcher._len_torch_dispatch_stack() or _dispatcher._are_functorch_transforms_active():
            return
        if any(isinstance(value, Tensor) and capturing(value.device) for value in options.values()):
            return
        try:
            made = Kept(score_mod, block_mask, options, mask)
        except (_Unseen, ValueError):  # also an empty cell
            return
        self.pop(key, None)
        kept = list(self.items())
        self[key] = made
        total = made.bytes + sum(each.bytes for _, each in kept)
        for at, (oldest, each) in enumerate(kept):
            if len(kept) - at < _MOST and total <= _BYTES:
                break
            total -= each.bytes
            self.pop(oldest, None)


functions = Shelf()  # of calls without a BlockMask
