# SPDX-License-Identifier: Apache-2.0
"""What the options of ``attention`` mean, for tensors and arrays alike. Imports neither."""

from __future__ import annotations

import operator
import sys
from typing import Any, Literal

from heddle._errors import HeddleTypeError, HeddleValueError

Causal = Literal[False, True, "top_left", "bottom_right"] | None
CAUSAL = {None: 0, False: 0, "top_left": 1, "bottom_right": 2}
NORMS = {"layer": 0, "rms": 1, "none": 2}
NO_NORM = NORMS["none"]
EPS = 1e-5
ACTIVATIONS = {"gelu": 1, "gelu_tanh": 2, "silu": 3, "geglu": 4, "geglu_tanh": 5, "swiglu": 6}
Activation = Literal["gelu", "gelu_tanh", "silu", "geglu", "geglu_tanh", "swiglu"] | None
OF_GATE = ACTIVATIONS["geglu"] - ACTIVATIONS["gelu"]  # from an activation of two halves to that of the gate
TINY = 1e-300  # where 0 means the default to the library
LEAST_SCALE = 2.0**-100  # the least that it takes: scores of nothing
LARGEST = sys.float_info.max
FARTHEST = 2**62  # of a window; no sequence is as long
_BOOLS = ("bool", "bool_", "SymBool")  # Python's, NumPy's since 2.0 and before, and torch's while it traces
_NO_NUMBERS = "cmMOSU"  # kinds of NumPy's that float() takes or cuts: complex, times, objects, text
LONGEST = 2**40  # of a sequence, to the library


def causal_of(causal: Any, sq: Any, sk: Any) -> int:
    """0, 1 or 2 of heddle_mask. True means either corner, so it needs sq = sk."""
    if causal is True:
        if sq != sk:
            raise HeddleValueError(
                f"causal=True is ambiguous when sq = {sq} is not sk = {sk}: say 'top_left' (PyTorch) or "
                "'bottom_right' (FlashAttention)"
            )
        return 1
    if causal is None or causal is False:
        return 0
    if not isinstance(causal, str) or causal not in CAUSAL:
        raise HeddleValueError(f"causal = {causal!r} is none of None, False, True, 'top_left', 'bottom_right'")
    return CAUSAL[causal]


def window_of(window: Any) -> tuple[int, int]:
    """(left, right), with -1 for no limit."""
    if window is None:
        return -1, -1
    if not isinstance(window, (tuple, list)):
        if getattr(window, "shape", None) != (2,):  # an array or tensor of two
            raise HeddleValueError(f"window = {window!r} is no pair (left, right)")
        window = tuple(window)
    if len(window) != 2:
        raise HeddleValueError(f"window = {window!r} is no pair (left, right)")
    left, right = (-1 if side is None else _side_of(side, window) for side in window)
    return left, right


def refuse_masked(name: str, value: Any) -> None:
    """A masked array of NumPy: whoever takes it for an array reads what lies behind its mask, too."""
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(value, masked.MaskedArray):
        raise HeddleTypeError(
            f"{name} is a numpy.ma.{type(value).__name__}, whose mask nobody would see: give {name}.data, or "
            f"{name}.filled()"
        )


def integer_of(name: str, value: Any) -> Any:
    """NumPy's integers and those that are a tensor, too, but no bool. A size that torch only traces stays one."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if type(value).__name__ == "SymInt":
        return value
    refuse_masked(name, value)
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise HeddleTypeError(f"{name} = {value!r} is not an integer")


def limit_of(name: str, value: Any) -> Any:
    """The upper limit of one sequence's rows, which has to fit into the library's numbers; None stays."""
    if value is None:
        return None
    value = integer_of(name, value)
    if isinstance(value, int) and not 0 <= value <= LONGEST:
        raise HeddleValueError(f"{name} = {value} is outside 0 to {LONGEST}")
    return value


def multiprocessors_of(most: Any) -> int:
    """The most multiprocessors of a GPU that blocks which stay may take; 0: all."""
    if not isinstance(most, int) or not 0 <= most < 2**31:
        raise HeddleValueError(f"multiprocessors = {most!r} is no integer from 0 to 2147483647")
    return most


PLACES = ("q_offset", "k_offset", "h_offset", "whole_sq", "whole_sk", "whole_h")


def places_of(*numbers: Any) -> tuple[Any, ...]:
    """The numbers of PLACES: where in a larger problem this one lies. None: it does not say."""
    return tuple(0 if number is None else limit_of(name, number) for name, number in zip(PLACES, numbers, strict=True))


def block_of(size: Any, given: bool) -> tuple[int, int]:
    """Queries and keys of a block, (0, 0) where there are no lists of blocks. `given`: whether there are."""
    if not given:
        if size is not None:
            raise HeddleValueError(f"block_size = {size!r} is given without block_rows and block_columns")
        return 0, 0
    sizes = (128, 128) if size is None else (size, size) if isinstance(size, int) else size
    if not isinstance(sizes, (tuple, list)) or len(sizes) != 2 or any(each not in (64, 128) for each in sizes):
        raise HeddleValueError(f"block_size = {size!r} is neither 64 nor 128, nor two of these (queries, keys)")
    return int(sizes[0]), int(sizes[1])


def _side_of(side: Any, window: Any) -> int:
    if not isinstance(side, int) and hasattr(side, "dtype"):  # of NumPy or torch: integers alone, and one of them
        try:
            side = operator.index(side)
        except (TypeError, RuntimeError):
            side = None
    if not isinstance(side, int) and not hasattr(side, "__index__"):
        raise HeddleTypeError(f"window = {window!r}: its sides must be integers or None")
    return -1 if side < 0 or side > FARTHEST else side


def number_of(name: str, value: Any) -> float:
    """NumPy's numbers too, but no text, and no tensor, whose value may be on a GPU; finite."""
    if not isinstance(value, (int, float)):
        if isinstance(value, (str, bytes)) or hasattr(value, "requires_grad") or not hasattr(value, "__float__"):
            raise HeddleTypeError(f"{name} = {value!r} is not a number")
        value = _float_of(name, value)
    if not -LARGEST <= value <= LARGEST:
        raise HeddleValueError(f"{name} = {value!r} is not a finite number")
    return float(value)


def _float_of(name: str, value: Any) -> float:
    refuse_masked(name, value)
    wrong = getattr(value, "ndim", 0) or getattr(getattr(value, "dtype", None), "kind", "f") in _NO_NUMBERS
    try:
        if not wrong:
            return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise HeddleTypeError(f"{name} = {value!r} is not a number") from error
    raise HeddleTypeError(f"{name} = {value!r} is not a number")


def scale_of(scale: Any) -> float:
    """What the library takes for `scale`: 0 means 1/sqrt(d) to it, so a real 0 becomes the next best."""
    return 0.0 if scale is None else number_of("scale", scale) or LEAST_SCALE


def flag_of(name: str, value: Any) -> bool:
    """What PyTorch takes for a bool (numbers, None, NumPy's), but no text: 'no' is true."""
    if value is None or isinstance(value, int) or type(value).__name__ in _BOOLS:
        return bool(value)
    raise HeddleTypeError(f"{name} = {value!r} is neither True nor False")


def switch_of(name: str, value: Any) -> bool:
    """A flag that is new with heddle: True or False, 1 or 0, of Python or NumPy. No other number, and not None."""
    if value is True or value is False:
        return bool(value)
    if (isinstance(value, int) and value in (0, 1)) or type(value).__name__ in _BOOLS:
        return bool(value)
    raise HeddleTypeError(f"{name} = {value!r} is neither True nor False")


def state_of(given: Any, wrong: str = "not two integers, {seed, offset}") -> tuple[int, int]:
    """rng_state as two numbers of 64 bits without a sign."""
    try:
        seed, offset = map(operator.index, given)
    except (TypeError, ValueError):
        raise HeddleTypeError(f"rng_state = {given!r} is {wrong}") from None
    for number in (seed, offset):
        if not -(2**63) <= number < 2**64:
            raise HeddleValueError(f"rng_state = {given!r} has {number}, which 64 bits do not hold")
    return seed % 2**64, offset % 2**64


def norm_of(norm: str) -> int:
    """0, 1 or 2 of heddle_norm."""
    if not isinstance(norm, str) or norm not in NORMS:
        raise HeddleValueError(f"norm = {norm!r} is none of 'layer', 'rms', 'none'")
    return NORMS[norm]


def eps_of(eps: float, norm: str) -> float:
    """As the library takes it: 0 means its default, and there is none without a norm."""
    if type(eps).__name__ in _BOOLS:
        raise HeddleTypeError(f"eps = {eps!r} is not a number")
    if not isinstance(eps, (int, float)):
        eps = number_of("eps", eps)
    if norm != "none":
        return eps or TINY
    if eps != EPS:
        raise HeddleValueError(f"eps = {eps}, but norm = 'none' has no variance to add it to")
    return 0.0


def activation_of(activation: str | None) -> int:
    """A heddle_activation."""
    if activation is None:
        return 0
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise HeddleValueError(f"activation = {activation!r} is none of None, {', '.join(map(repr, ACTIVATIONS))}")
    return ACTIVATIONS[activation]


def is_gated(activation: int) -> bool:
    """Whether a heddle_activation is of two halves, gate and up."""
    return activation >= ACTIVATIONS["geglu"]


def features_out(rows: Any, activation: int) -> Any:
    """y's features, of a weight with so many rows."""
    if not is_gated(activation):
        return rows
    if rows % 2:
        raise HeddleValueError(f"weight has {rows} rows, but a gate and what it gates have as many each")
    return rows // 2
