# SPDX-License-Identifier: Apache-2.0
"""What a score_mod or mask_mod reads beside its arguments, and whether that can be told from other such things.

What cannot be told is never kept: a list or an attribute, what a function counts or imports, a number that comes from
somewhere else at each call.
"""

from __future__ import annotations

import dis
import types
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_CONSTANT = (bool, int, float, str, type(None), torch.dtype, torch.device)
# Of Python's own functions, those whose results depend on their arguments alone.
_PURE = {"abs", "all", "any", "divmod", "len", "max", "min", "pow", "round", "sum"}
_TORCH = ("torch", "math", "_operator")
# What these look up or return is in no argument of theirs.
_ELSEWHERE = {
    "eval", "exec", "globals", "locals", "vars", "dir", "open", "input", "__import__", "__dict__", "breakpoint",
    "is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "get_default_dtype", "get_default_device",
    "is_autocast_cpu_enabled", "get_autocast_dtype", "get_autocast_gpu_dtype", "get_autocast_cpu_dtype",
    "get_num_threads", "initial_seed", "seed", "get_rng_state", "current_device", "current_stream",
    "are_deterministic_algorithms_enabled", "get_float32_matmul_precision",
}  # fmt: skip


def is_torchs(function: Any) -> bool:
    """A function of Python that PyTorch defines, around nothing."""
    home = function.__globals__.get("__name__") or ""
    return home.partition(".")[0] == "torch" and not function.__closure__


def is_constant(value: Any) -> bool:
    """What is always the same, or makes the same of the same arguments."""
    if type(value) is types.ModuleType:
        return value.__name__.partition(".")[0] in ("torch", "math")
    if type(value) is not types.BuiltinFunctionType:
        return type(value) in _CONSTANT
    owner: Any = value.__self__
    if owner is None:
        return (value.__module__ or "").partition(".")[0] == "torch"
    if not isinstance(owner, types.ModuleType):  # a method of some object
        return False
    home = owner.__name__.partition(".")[0]
    return value.__name__ not in _ELSEWHERE and (home in _TORCH or (home == "builtins" and value.__name__ in _PURE))


@lru_cache(maxsize=256)
def globals_of(code: types.CodeType) -> tuple[str, ...] | None:
    """The names of those that it, or a function defined in it, looks up; None where that is not all."""
    if not _ELSEWHERE.isdisjoint(code.co_names):
        return None
    names = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME"):
            return None
        if instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval in code.co_freevars:
            return None  # nonlocal
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            names.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = globals_of(constant)
            if inner is None:
                return None
            names |= set(inner)
    return tuple(sorted(names))


class Reads:
    """What a function reads beside its arguments, where all of that can be told from other such things by `is`."""

    def __init__(self, like: tuple[Any, ...], result: Any, tensors: list[Tensor]) -> None:
        self.like, self.result = like, result
        self.tensors = [(tensor, tensor._version, tensor.data_ptr()) for tensor in tensors]
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
        if any(tensor._version != version or tensor.data_ptr() != at for tensor, version, at in self.tensors):
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
        if function.__kwdefaults__ or function.__dict__ or not self._is_told(function.__defaults__ or ()):
            return False
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not filled yet
                return False
            self.cells.append((cell, value))
            if value is not function and not self._is_told(value):
                return False
        names, looked_up = function.__globals__, globals_of(function.__code__)
        if looked_up is None:
            return False
        for name in looked_up:
            value = names.get(name, names)  # itself: no such global
            self.names.append((names, name, value))
            if value is not names and value is not function and not self._is_told(value):
                return False
        return True

    def _is_told(self, value: Any) -> bool:
        if type(value) is types.FunctionType:
            return is_torchs(value) or self.all_of(value)
        if type(value) is tuple:
            return all(map(self._is_told, value))
        return is_constant(value) or type(value) in (Tensor, torch.nn.Parameter)
