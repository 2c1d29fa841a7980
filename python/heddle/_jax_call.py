# SPDX-License-Identifier: Apache-2.0
"""heddle's passes as operations of JAX: the problem of arrays that are only traced, the call through XLA's foreign
functions, vmap, and shard_map's types. ``heddle.jax`` puts gradients and options on top."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from heddle import _C
from heddle._arrays import BACKWARD, FORWARD, PREPARE, Problem
from heddle._arrays_norm_linear import Rows
from heddle._errors import HeddleTypeError, HeddleValueError
from heddle._options import PLACES
from heddle._views import CUDA, View

for _operation, _platform, _handler in _C.jax_handlers():
    jax.ffi.register_ffi_target(f"heddle_{_operation}", _handler, platform=_platform)

_PLACES = {name: list(_C.fields(name)) for name in ("attention", "norm_linear")}
_RNG_STATE = _C.features()["rng_state"]
Arrays = dict[str, Any]  # by the library's names of them


class Traced(View):
    """What is known of an array while JAX traces: it lies row-major, on a device that XLA chooses later. The CPU's
    plan knows every rule, so the problem is described for the CPU; the handler fills in its own device."""

    readable = False

    def __init__(self, value: Any, name: str) -> None:
        self.dtype, self.shape = str(value.dtype), list(value.shape)
        self.strides = _steps(self.shape)
        self.address, self.device, self.device_id = 0, 0, 0


def _steps(shape: Sequence[int]) -> list[int]:
    return [math.prod(max(n, 1) for n in shape[x + 1 :]) for x in range(len(shape))]


def _swap(numbers: Sequence[int]) -> list[int]:
    """Of [b, s, h, d] as [b, h, s, d], and back."""
    b, s, h, d = numbers
    return [b, h, s, d]


class TracedProblem(Problem):
    view = Traced

    def __init__(self, q: Any, k: Any, v: Any, options: dict[str, Any], swapped: bool) -> None:
        self.swapped = swapped
        super().__init__(q, k, v, options)

    def _sizes(self) -> None:
        if self.swapped:
            for view in (self.q, self.k, self.v):
                view.shape, view.strides = _swap(view.shape), _swap(view.strides)
        super()._sizes()

    def lay(self, name: str, like: View, last: int) -> list[int]:
        """The shape of a result that lies as `like` does; its strides go into the description."""
        shape = [*like.shape[:-1], last]
        shape = _swap(shape) if self.swapped else shape
        steps = _swap(_steps(shape)) if self.swapped else _steps(shape)
        self.description[f"{name}_stride"] = (0, steps[1], steps[0]) if self.packed else tuple(steps[:3])
        return shape


class TracedRows(Rows):
    view = Traced


_NUMBERS = (
    *("causal", "window", "scale", "softcap", "dropout", "max_seqlen_q", "max_seqlen_k"),
    *("deterministic", "tf32", "return_weights", "block_size", "multiprocessors"),
)
_OPTIONAL = (
    *("bias", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k", "seqlens_q", "seqlens_k", "dweights"),
    *("q_segments", "k_segments", "block_rows", "block_columns", "k_scale", "v_scale"),
)


@dataclass(frozen=True)
class Attention:
    """All of a call of attention that is no array."""

    causal: str | None
    window: tuple[int, int]
    scale: float | None
    softcap: float
    dropout: float
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    deterministic: bool
    tf32: bool
    places: tuple[int, ...]  # of heddle._options.PLACES
    block_size: tuple[int, int] | None  # (queries, keys), where there are lists
    multiprocessors: int
    heads_inside: bool  # [b, s, h, d]
    return_lse: bool
    return_weights: bool

    @property
    def operation(self) -> str:
        return "attention"

    def describe(self, given: Arrays) -> tuple[dict[str, Any], dict[str, tuple[list[int], Any]]]:
        """heddle_attention as a dict, and (shape, dtype) of each array that a pass could write."""
        options = {name: given.get(name) for name in _OPTIONAL}
        options |= {name: getattr(self, name) for name in _NUMBERS} | dict(zip(PLACES, self.places, strict=True))
        options |= {
            "block_table": None,
            "mask": given.get("bool_mask"),
            "rng_state": (0, 0) if "rng_state" in given else None,
        }
        p = TracedProblem(given["q"], given["k"], given["v"], options, self.heads_inside)
        d = p.description
        d["features"] |= _RNG_STATE if "rng_state" in given else 0
        dtype, real = given["q"].dtype, np.dtype(np.float64 if p.q.dtype == "float64" else np.float32)
        makes: dict[str, tuple[list[int], Any]] = {"o": (p.lay("o", p.q, d["dv"]), dtype)}
        d["do_stride"] = d["o_stride"]
        makes |= {"dq": (p.lay("dq", p.q, d["d"]), dtype), "dk": (p.lay("dk", p.k, d["d"]), dtype)}
        makes |= {"dv": (p.lay("dv", p.v, d["dv"]), dtype), "lse": (p.rows(), real)}
        makes |= {"weights": ([d["b"], d["h"], d["sq"], d["sk"]], dtype), "dsinks": ([d["h"]], real)}
        if "bias" in given:
            makes["dbias"] = list(given["bias"].shape), dtype
            d["dbias_stride"] = d["bias_stride"]
        return d, makes

    def whole(self, description: dict[str, Any], given: Arrays) -> dict[str, Any]:
        """The description with what is not known where it is made."""
        return description

    def fold(self, size: int, mapped: dict[str, bool], given: Arrays, outputs: Sequence[str]) -> Arrays | None:
        """The arrays of a call whose batch is all `size` batches; None where one call does not do: packed sequences,
        random numbers that would be others in a larger batch, and gradients that the kernel would sum over it."""
        if {"cu_seqlens_q", "rng_state"} & given.keys() or {"dbias", "dsinks"} & set(outputs) or mapped.get("sinks"):
            return None
        if mapped.get("block_rows") or mapped.get("block_columns"):
            return None
        b = given["q"].shape[1 if mapped["q"] else 0]
        folded = {}
        for name, value in given.items():
            if name in ("sinks", "block_columns"):
                folded[name] = value
                continue
            if name in ("bias", "bool_mask", "block_rows") and not mapped[name] and value.shape[0] == 1:
                folded[name] = value
                continue
            if name == "alibi_slopes" and not mapped[name] and value.ndim == 1:
                folded[name] = value
                continue
            if name == "alibi_slopes" and value.ndim == 1 + mapped[name]:
                value = jnp.broadcast_to(value[..., None, :], (*value.shape[:-1], b, value.shape[-1]))
            value = value if mapped[name] else value[None]
            value = jnp.broadcast_to(value, (size, b, *value.shape[2:]))
            folded[name] = value.reshape(size * b, *value.shape[2:])
        return folded

    def unfold(self, size: int, made: Any) -> Any:
        return made.reshape(size, made.shape[0] // size, *made.shape[1:])


@dataclass(frozen=True)
class NormLinear:
    """All of a call of norm_linear that is no array."""

    norm: str
    eps: float
    deterministic: bool
    tf32: bool
    activation: str | None = None
    return_norm: bool = False
    multiprocessors: int = 0
    cuda: bool = False  # where PREPARE will run, which says how many bytes it makes

    @property
    def operation(self) -> str:
        return "norm_linear"

    @property
    def results(self) -> list[str]:
        return ["y", "z"] if self.return_norm else ["y"]

    def describe(self, given: Arrays) -> tuple[dict[str, Any], dict[str, tuple[list[int], Any]]]:
        bits = _C.features()
        features = (bits["deterministic"] if self.deterministic else 0) | (bits["tf32"] if self.tf32 else 0)
        features |= bits["z"] if self.return_norm else 0
        w: Any = given["w"]
        x: Any = given.get("x", w)  # nobody looks at it where the weight is prepared
        vectors = given.get("gamma"), given.get("beta")
        p = TracedRows(
            x, w, *vectors, self.eps, self.norm, features, given.get("bias"), self.activation, given.get("residual")
        )
        p.description["multiprocessors"] = self.multiprocessors
        m, k, n = (p.description[letter] for letter in "mkn")
        real = np.dtype(np.float64 if p.x.dtype == "float64" else np.float32)
        rows = w.shape[0]  # n, or 2n behind an activation of two halves
        makes = {"y": ([m, n], x.dtype), "mean": ([m], real), "rstd": ([m], real), "u": ([m, rows], x.dtype)}
        makes |= {name: ([size], x.dtype) for name, size in (("dgamma", k), ("dbeta", k), ("dbias", rows))}
        makes |= {"z": ([m, k], x.dtype), "dx": ([m, k], x.dtype), "dw": ([rows, k], x.dtype)}
        if "x" not in given:
            makes["prepared"] = [_prepared_bytes(p.description, self.cuda)], np.uint8
        return p.description, makes

    def whole(self, description: dict[str, Any], given: Arrays) -> dict[str, Any]:
        """With what is prepared, for the device on which it was: the handler refuses it on another."""
        if "prepared" not in given:
            return description
        prepared = given["prepared"]
        if prepared.dtype != np.uint8:
            raise HeddleTypeError(f"prepared is {prepared.dtype}, but must be uint8")
        if prepared.ndim != 1:
            raise HeddleValueError(f"prepared has {prepared.ndim} dimensions, but must have 1 ([bytes])")
        known = {"CPU": _prepared_bytes(description, False)}
        with contextlib.suppress(RuntimeError):  # there is none, or it has no such problem
            known["GPU"] = _prepared_bytes(description, True)
        if prepared.shape[0] not in known.values():
            right = " and ".join(f"{size} on a {device}" for device, size in known.items())
            raise HeddleValueError(f"prepared has {prepared.shape[0]} bytes, but of this problem {right} are prepared")
        features = description["features"] | _C.features()["prepared"]
        return {**description, "features": features, "prepared_bytes": prepared.shape[0]}

    def fold(self, size: int, mapped: dict[str, bool], given: Arrays, outputs: Sequence[str]) -> Arrays | None:
        """As Attention's, of rows: the other arrays must be the same for all, and have no gradient wanted."""
        of_rows = ("x", "y", "mean", "rstd", "dy", "u", "residual", "z", "dz")
        if not {*of_rows, "dx"}.issuperset(outputs) or any(mapped[name] for name in given if name not in of_rows):
            return None
        folded = dict(given)
        for name in of_rows:
            if name in given:
                value = given[name] if mapped[name] else given[name][None]
                value = jnp.broadcast_to(value, (size, *value.shape[1:]))
                folded[name] = value.reshape(size * value.shape[1], *value.shape[2:])
        return folded

    unfold = Attention.unfold


def _prepared_bytes(description: dict[str, Any], cuda: bool) -> int:
    return _C.workspace("norm_linear", PREPARE, {**description, "device": CUDA} if cuda else description)


# ----------------------------------------------------------------------------------------------- shard_map's types


def _varying(value: Any) -> frozenset[str]:
    """The axes of a shard_map around us along which an array differs. Their name is another one in each JAX."""
    kind = jax.typeof(value)
    manual = getattr(kind, "manual_axis_type", None)
    axes: frozenset[str] = getattr(kind, "vma", frozenset()) if manual is None else manual.varying
    return axes


def alike(given: Arrays) -> Arrays:
    """All arrays varying along the same axes, as XLA's call needs them; the gradient of what did not is summed."""
    axes = frozenset().union(*map(_varying, given.values()))
    return {name: _vary(value, tuple(axes - _varying(value))) for name, value in given.items()} if axes else given


def _vary(value: Any, axes: tuple[str, ...]) -> Any:
    if not axes:
        return value
    return jax.lax.pcast(value, axes, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(value, axes)


def _result(shape: Sequence[int], dtype: Any, like: Any) -> Any:
    """What XLA is to make, varying as the arguments do."""
    axes, kind = _varying(like), jax.typeof(like)
    if not axes:
        return jax.ShapeDtypeStruct(shape, dtype)
    if not hasattr(kind, "manual_axis_type"):
        return jax.ShapeDtypeStruct(shape, dtype, vma=axes)
    here = jax.sharding.NamedSharding(kind.sharding.mesh, jax.sharding.PartitionSpec())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=here, manual_axis_type=kind.manual_axis_type)


# --------------------------------------------------------------------------------------------------------- the call


@functools.lru_cache(maxsize=4096)
def _passing(what: Any, which: int, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Any:
    """The pass as a function of its arrays alone, with a rule for vmap."""

    @jax.custom_batching.custom_vmap
    def run(*arrays: Any) -> Any:
        description, makes = what.describe(dict(zip(inputs, arrays, strict=True)))
        _C.workspace(what.operation, which, description)  # what the library refuses is an error here
        whole = what.whole(description, dict(zip(inputs, arrays, strict=True)))
        packed = np.frombuffer(_C.pack(what.operation, whole), np.int64)
        places = np.array([which, *map(_PLACES[what.operation].index, (*inputs, *outputs))], np.int64)
        results = [_result(shape, dtype, arrays[0]) for shape, dtype in (makes[name] for name in outputs)]
        return jax.ffi.ffi_call(f"heddle_{what.operation}", results)(*arrays, description=packed, fields=places)

    @run.def_vmap
    def rule(size: int, mapped: list[bool], *arrays: Any) -> Any:
        given = dict(zip(inputs, arrays, strict=True))
        # Of no calls at all jax.lax.map knows the shapes.
        folded = what.fold(size, dict(zip(inputs, mapped, strict=True)), given, outputs) if size else None
        if folded is not None:
            made = [what.unfold(size, value) for value in run(*folded.values())]
        else:

            def one(each: Sequence[Any]) -> Any:
                left = iter(each)
                return run(*(next(left) if is_mapped else a for is_mapped, a in zip(mapped, arrays, strict=True)))

            made = jax.lax.map(one, [a for is_mapped, a in zip(mapped, arrays, strict=True) if is_mapped])
        return made, [True] * len(outputs)

    return run


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _once(what: Any, which: int, outputs: tuple[str, ...], given: Arrays) -> list[Any]:
    made: list[Any] = _passing(what, which, tuple(given), outputs)(*given.values())
    return made


def _refuse(what: Any, *_: Any) -> Any:
    raise NotImplementedError(f"heddle.jax.{what.operation} has no second derivative")


_once.defvjp(_refuse, _refuse)
_once_jit = jax.jit(_once, static_argnums=(0, 1, 2), inline=True)  # calls outside of a jax.jit take its short way


def forward(what: Any, given: Arrays, outputs: Sequence[str]) -> Arrays:
    return dict(zip(outputs, _once_jit(what, FORWARD, tuple(outputs), given), strict=True))


def prepare(what: Any, given: Arrays) -> Any:
    """What norm-linear's forward makes of the weight."""
    return _once_jit(what, PREPARE, ("prepared",), alike(given))[0]


def backward(what: Any, given: Arrays, outputs: Sequence[str]) -> Arrays:
    return dict(zip(outputs, _once_jit(what, BACKWARD, tuple(outputs), alike(given)), strict=True))
