# SPDX-License-Identifier: Apache-2.0
"""Arrays that speak DLPack: where one lies, what it may be, and results of its kind."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from heddle import _C
from heddle._errors import HeddleTypeError, HeddleValueError
from heddle._options import refuse_masked

CPU, REF, CUDA = 0, 1, 2
F32, BF16, F16, F64 = 0, 1, 2, 3
# By DLPack's (type code, bits).
_NAMES = {(2, 32): "float32", (4, 16): "bfloat16", (2, 16): "float16", (2, 64): "float64", (0, 32): "int32"}
E4M3 = "float8_e4m3fn"
_NAMES |= {
    (0, 16): "int16",
    (0, 8): "int8",
    (0, 64): "int64",
    (6, 8): "bool",
    (1, 8): "uint8",
    (1, 64): "uint64",
    (10, 8): E4M3,
}
DTYPES = {"float32": F32, "bfloat16": BF16, "float16": F16, "float64": F64}
_DEVICES = {1: CPU, 3: CPU, 2: CUDA, 13: CUDA}


def cupy_stream() -> int:
    """The stream that a call runs on: CuPy's current one where CuPy is in use, else the default one."""
    cupy = sys.modules.get("cupy")
    return int(cupy.cuda.get_current_stream().ptr) if cupy is not None else 0


def _plain(name: str, value: Any) -> Any:
    """An array that means what its memory says, or an error."""
    refuse_masked(name, value)
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "Tensor") or not isinstance(value, torch.Tensor):
        return value
    from heddle import _kinds

    wrong = _kinds.stranger(name, value)
    if not wrong and not _kinds.is_usual(value):
        wrong = f"{name} is a tensor of class {type(value).__qualname__}, whose memory is not its numbers"
    if wrong:
        raise HeddleTypeError(wrong)
    # DLPack has no word for the bit, and torch does not ask for it.
    return value.resolve_neg()


class View:
    """Where an array lies: address, shape and strides in elements. Keeps the memory alive."""

    readable = True  # on the CPU: its numbers, too

    def __init__(self, value: Any, name: str) -> None:
        if not hasattr(value, "__dlpack__") or not hasattr(value, "__dlpack_device__"):
            raise HeddleTypeError(
                f"{name} must be an array that speaks DLPack (__dlpack__), not {type(value).__name__}"
            )
        value = _plain(name, value)
        eight = type(value).__module__ == "numpy" and str(value.dtype) == E4M3
        value = value.view("uint8") if eight else value  # NumPy lends no types of other libraries (ml_dtypes)
        try:
            device_type, self.device_id = value.__dlpack_device__()
        except ValueError as error:  # torch, of a device that DLPack does not know
            raise HeddleValueError(f"{name}: {error}") from error
        if int(device_type) not in _DEVICES:
            raise HeddleValueError(
                f"{name} is on DLPack device type {int(device_type)}; heddle has CPU (1) and CUDA (2)"
            )
        self.device = _DEVICES[int(device_type)]
        stream = {"stream": cupy_stream() or 1} if self.device == CUDA else {}
        try:
            try:
                self.capsule = value.__dlpack__(max_version=(1, 0), **stream)  # so that read-only arrays are given too
            except TypeError:
                self.capsule = value.__dlpack__(**stream)
        except BufferError as error:
            raise HeddleTypeError(
                f"{name}: {type(value).__name__} does not give its memory through DLPack: {error}"
            ) from error
        try:
            self.address, lies_on, at, code, bits, shape, strides, _ = _C.view(self.capsule)
        except (TypeError, BufferError) as error:
            raise HeddleTypeError(f"{name}: {error}") from error
        # Memory of a GPU must not be read as the host's, whatever the array says of itself.
        if _DEVICES.get(lies_on) != self.device:
            said = f"({int(device_type)}, {self.device_id})"
            raise HeddleValueError(f"{name} says that it is on DLPack device {said}, but its memory on {(lies_on, at)}")
        if any(size < 0 for size in shape):
            raise HeddleValueError(f"{name} has shape {list(shape)}: sizes must not be negative")
        self.dtype = E4M3 if eight else _NAMES.get((code, bits), f"of type code {code} with {bits} bits")
        self.shape = list(shape)
        self.strides = list(strides) if strides is not None else contiguous(shape)

    def lead(self, rank: int) -> None:
        """Puts dimensions of size 1 in front until there are `rank`."""
        while len(self.shape) < rank:
            self.shape.insert(0, 1)
            self.strides.insert(0, 0)


def contiguous(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for x in range(len(shape) - 2, -1, -1):
        strides[x] = strides[x + 1] * max(shape[x + 1], 1)
    return strides


def check(view: View, name: str, dtype: str, first: View, shape: Sequence[int] | None = None) -> View:
    if view.dtype != dtype:
        raise HeddleTypeError(f"{name} is {view.dtype}, but must be {dtype} here")
    if (view.device, view.device_id) != (first.device, first.device_id):
        raise HeddleValueError(f"{name} is on another device than the first array")
    if shape is not None and view.shape != list(shape):
        raise HeddleValueError(f"{name} has shape {view.shape}, but must have {list(shape)}")
    if any(stride < 0 for stride in view.strides):
        raise HeddleValueError(f"{name} has a negative stride: {view.strides}; make it contiguous")
    if view.shape and view.shape[-1] > 1 and view.strides[-1] != 1 and 0 not in view.shape:
        raise HeddleValueError(f"{name} has stride {view.strides[-1]} in its last dimension, which must be contiguous")
    return view


def real_of(first: View) -> str:
    return "float64" if first.dtype == "float64" else "float32"


def device_of(first: View, name: str) -> int:
    if first.dtype not in DTYPES:
        raise HeddleTypeError(f"{name} is {first.dtype}; it must be float32, bfloat16, float16 or float64")
    return REF if first.dtype == "float64" and first.device == CPU else first.device


class Memory:
    """Contiguous GPU memory of our own, zeros at first: a result for a library whose arrays cannot be written to."""

    def __init__(self, device_id: int, shape: Sequence[int], dtype: str, block: Any = None) -> None:
        self.device_id, self.shape, self.dtype = device_id, tuple(shape), dtype
        self.code, self.bits = next(key for key, name in _NAMES.items() if name == dtype)
        self.block = block or _C.cuda_memory(device_id, math.prod(self.shape) * self.bits // 8)

    def reshape(self, shape: Sequence[int]) -> Memory:
        return Memory(self.device_id, shape, self.dtype, self.block)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device_id

    def __dlpack__(self, **_: Any) -> Any:
        # The work is done when a call returns (see run), so that any stream may read.
        return _C.cuda_lend(self.block, self.shape, self.code, self.bits)


class Maker:
    """Makes results of the kind of array that `like` is."""

    def __init__(self, like: Any, view: View) -> None:
        self.kind = type(like).__module__.partition(".")[0]
        if self.kind not in ("numpy", "cupy", "jax", "jaxlib") and not hasattr(like, "__array_namespace__"):
            kind = f"{type(like).__module__}.{type(like).__qualname__}"
            raise HeddleTypeError(f"{kind} has no __array_namespace__, so that no result of its kind can be made")
        self.like, self.cuda = like, view.device == CUDA
        self.kinds = {view.dtype: like.dtype}
        self.device_id = view.device_id

    def _dtype(self, name: str) -> Any:
        import numpy

        return numpy.dtype(self.kinds.get(name, name))

    def empty(self, shape: Sequence[int], dtype: str) -> tuple[Any, int]:
        """Memory to write to, and its address."""
        import numpy

        if self.cuda and self.kind != "cupy":
            memory = Memory(self.device_id, shape, dtype)
            return memory, _C.cuda_address(memory.block)
        if self.cuda:
            made = sys.modules["cupy"].empty(tuple(shape), dtype=self._dtype(dtype))
            return made, int(made.data.ptr)
        kind = self._dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        room = numpy.empty(size + 64, dtype=numpy.uint8)
        start = -room.ctypes.data % 64  # JAX takes memory over only if it begins so
        made = room[start : start + size].view(kind).reshape(tuple(shape))
        return made, int(made.ctypes.data)

    def clear(self, *made: Any) -> None:
        for each in made:
            if not isinstance(each, Memory):
                each[...] = 0

    def finish(self, made: Any) -> Any:
        """The written memory as an array of the caller's library."""
        if self.kind in ("numpy", "cupy"):
            return made
        if self.cuda and self.kind in ("jax", "jaxlib"):
            return sys.modules["jax"].dlpack.from_dlpack(made)
        if self.kind in ("jax", "jaxlib"):
            return sys.modules["jax"].numpy.asarray(made)
        return self.like.__array_namespace__().from_dlpack(made)
