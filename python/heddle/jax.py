# SPDX-License-Identifier: Apache-2.0
"""``heddle.jax.attention`` and ``heddle.jax.norm_linear``: heddle inside ``jax.jit``, ``grad``, ``vmap`` and
``shard_map``, on the CPU and on NVIDIA GPUs.

The options and their defaults are those of ``heddle.attention`` and ``heddle.norm_linear``. The work is done by
handlers in C that XLA calls with its buffers and its stream: nothing is copied, and nothing waits.
"""

from __future__ import annotations

import functools
import operator
import os
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from heddle import _jax_call
from heddle._errors import HeddleTypeError, HeddleValueError
from heddle._jax_call import Attention, NormLinear
from heddle._options import (
    CAUSAL,
    EPS,
    PLACES,
    Activation,
    Causal,
    activation_of,
    block_of,
    causal_of,
    eps_of,
    features_out,
    flag_of,
    limit_of,
    multiprocessors_of,
    norm_of,
    number_of,
    scale_of,
    state_of,
    window_of,
)

__all__ = ["attention", "norm_linear", "norm_linear_prepare"]

_CAUSAL = {value: str(name) if value else None for name, value in CAUSAL.items()}


# --------------------------------------------------------------------------------------------------------- gradients


def _perturbed(given: dict[str, Any]) -> set[str]:
    return {name for name, value in given.items() if value.perturbed}


def _marks(wanted: set[str], given: dict[str, Any]) -> dict[str, Any]:
    """Of which arguments a gradient is wanted, for the way from forward to backward: one element, else none.

    By shapes, since JAX takes what one trace left behind with the tree of another, which may want others."""
    return {name: jnp.zeros((int(name in wanted),), jnp.bool_) for name in given}


def _marked(marks: dict[str, Any]) -> set[str]:
    return {name for name, mark in marks.items() if mark.shape[0]}


def _outputs(what: Attention) -> list[str]:
    return ["o", *(["lse"] if what.return_lse else []), *(["weights"] if what.return_weights else [])]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(what: Attention, given: dict[str, Any]) -> tuple[Any, ...]:
    made = _jax_call.forward(what, given, _outputs(what))
    return tuple(made.values())


def _attention_fwd(what: Attention, given: dict[str, Any]) -> tuple[Any, Any]:
    wanted = _perturbed(given)
    if "alibi_slopes" in wanted:
        raise NotImplementedError(
            "heddle.jax.attention computes no gradient for alibi_slopes: give them through jax.lax.stop_gradient"
        )
    given = {name: value.value for name, value in given.items()}
    if wanted and given["k"].dtype == jnp.float8_e4m3fn:
        raise NotImplementedError(
            "heddle.jax.attention computes no gradient of keys of 8 bits (float8_e4m3fn), nor of what attends to them: "
            "give q, k, v and their scales through jax.lax.stop_gradient"
        )
    made = _jax_call.forward(what, given, tuple(dict.fromkeys(["o", "lse", *_outputs(what)])))
    return tuple(made[name] for name in _outputs(what)), (given, made["o"], made["lse"], _marks(wanted, given))


def _attention_bwd(what: Attention, kept: Any, cotangents: tuple[Any, ...]) -> tuple[Any]:
    given, o, lse, marks = kept
    wanted = _marked(marks)
    come = dict(zip(("d" + name for name in _outputs(what)), cotangents, strict=True))
    come = {"dout" if name == "do" else name: value for name, value in come.items() if not _is_zero(value)}
    grads = [f"d{name}" for name in given if name in wanted]
    if not come or not grads:
        return (dict.fromkeys(given),)
    made = _jax_call.backward(what, {**given, "o": o, "lse": lse, **come}, grads)
    return ({name: made.get(f"d{name}") for name in given},)


_attention.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm_linear(what: NormLinear, given: dict[str, Any]) -> Any:
    return tuple(_jax_call.forward(what, given, what.results).values())


def _norm_linear_fwd(what: NormLinear, given: dict[str, Any]) -> tuple[Any, Any]:
    wanted = _perturbed(given)
    given = {name: value.value for name, value in given.items()}
    kept = [*([] if what.norm == "none" else ["mean", "rstd"]), *(["u"] if what.activation else [])]
    made = _jax_call.forward(what, given, [*what.results, *kept])
    saved = {name: made[name] for name in kept}
    return tuple(made[name] for name in what.results), (given, saved, _marks(wanted, given))


def _norm_linear_bwd(what: NormLinear, kept: Any, cotangents: Any) -> tuple[Any]:
    given, made, marks = kept
    wanted = _marked(marks)
    come = dict(zip(("dy", "dz"), cotangents, strict=False))
    come = {name: value for name, value in come.items() if not _is_zero(value)}
    grads = [f"d{name}" for name in given if name in wanted]
    if not come or not grads:
        return (dict.fromkeys(given),)
    if "dy" not in come:
        come["dy"] = jnp.zeros(cotangents[0].shape, cotangents[0].dtype)
    needed = {name: value for name, value in given.items() if name not in ("bias", "residual", "prepared")}
    grads = [name for name in grads if name != "dresidual"]
    made = _jax_call.backward(what, {**needed, **made, **come}, grads) if grads else {}
    if "residual" in wanted:
        made = {**made, "dresidual": come["dy"]}
    return ({name: made.get(f"d{name}") for name in given},)


_norm_linear.defvjp(_norm_linear_fwd, _norm_linear_bwd, symbolic_zeros=True)


def _is_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, jax.custom_derivatives.SymbolicZero)


# Calls outside of a jax.jit take its short way.
_attention_jit = jax.jit(_attention, static_argnums=0, inline=True)
_norm_linear_jit = jax.jit(_norm_linear, static_argnums=0, inline=True)


# --------------------------------------------------------------------------------------------------------- arguments


def _as_given(name: str, value: Any) -> Any:
    """An array that JAX has not yet made a narrower one: without jax_enable_x64 it has no 64 bits, and asks nobody."""
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return value
    raise HeddleTypeError(f"{name} must be an array of JAX or NumPy, not {type(value).__name__}")


def _array(name: str, value: Any) -> Any:
    return jnp.asarray(_as_given(name, value))


def _floats(name: str, value: Any, dtype: Any) -> Any:
    value = _as_given(name, value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise HeddleTypeError(f"{name} is {value.dtype}, but must be {dtype}")
    if name == "bias" and value.dtype == np.float64 and isinstance(value, (np.ndarray, np.generic)):
        most = np.finfo(np.float32).max
        if not jax.config.jax_enable_x64:  # what is finite stays finite, as below
            value = np.where(np.isinf(value), value, np.clip(value, -most, most))
    return jnp.asarray(value)


def _same_type(name: str, value: Any, dtype: Any) -> Any:
    return None if value is None else _floats(name, value, dtype).astype(dtype)


def _bias_of(value: Any, dtype: Any) -> Any:
    """A bias in q's dtype, where what is finite stays finite, as in heddle.attention."""
    if value is None:
        return None
    value = _floats("bias", value, dtype)
    limit = float(jnp.finfo(dtype).max)
    if limit >= float(jnp.finfo(value.dtype).max):
        return value.astype(dtype)
    if float(jnp.finfo(value.dtype).eps) > float(jnp.finfo(dtype).eps):  # bfloat16 rounds float16's largest up
        value = value.astype(jnp.float32)
    given = jax.lax.stop_gradient(value)
    return jnp.where(jnp.isinf(given), value, jnp.clip(given, -limit, limit) + (value - given)).astype(dtype)


def _of_scores(name: str, value: Any, sk: int) -> Any:
    """bias or mask as [b or 1, h or 1, sq or 1, sk]."""
    if value is None:
        return None
    if value.ndim > 4:
        raise HeddleValueError(f"{name} has {value.ndim} dimensions, but at most 4 are allowed")
    value = value.reshape((1,) * (4 - value.ndim) + value.shape)
    if value.shape[3] == 1 != sk:
        value = jnp.broadcast_to(value, (*value.shape[:3], sk))
    return value


def _lengths(name: str, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        value = np.asarray(value) if value else np.zeros(0, np.int32)
    value = _as_given(name, value)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise HeddleTypeError(f"{name} must be integers, not {value.dtype}")
    if isinstance(value, (np.ndarray, np.generic)):  # JAX's own are as JAX has made them
        value = np.minimum(value, 2**31 - 1) if value.dtype.itemsize > 2 else value
        value = np.maximum(value, -(2**31)) if value.dtype == np.int64 else value
        return jnp.asarray(value.astype(np.int32))
    if value.dtype.itemsize > 2 and value.dtype != jnp.int32:
        value = jnp.clip(value, max=2**31 - 1)  # too large stays too large, and is told of
        value = value if jnp.issubdtype(value.dtype, jnp.unsignedinteger) else jnp.clip(value, min=-(2**31))
    return value.astype(jnp.int32)


def _ids(name: str, value: Any, b: int | None) -> Any:
    """Segments as [b, rows], or of packed rows (b is None) as they are; one for all batches is repeated."""
    if value is None:
        return None
    value = _as_given(name, value)
    if value.dtype not in (jnp.int32, jnp.int16, jnp.int8, jnp.uint8):
        raise HeddleTypeError(f"{name} is {value.dtype}, but must be int32 (or of fewer bits)")
    value = jnp.asarray(value)
    if b is not None and (value.ndim == 1 or (value.ndim == 2 and value.shape[0] == 1)):
        value = jnp.broadcast_to(value, (b, value.shape[-1]))
    return value.astype(jnp.int32)


def _lists(block_rows: Any, block_columns: Any) -> dict[str, Any]:
    """Lists of blocks as [b or 1, h or 1, lists + 1] and [columns]."""
    if block_rows is block_columns is None:
        return {}
    if block_rows is None or block_columns is None:
        raise HeddleValueError("block_rows and block_columns come together, but only one is given")
    rows, columns = _as_given("block_rows", block_rows), _as_given("block_columns", block_columns)
    for name, value, most in (("block_rows", rows, 3), ("block_columns", columns, 1)):
        if value.dtype != jnp.int32:
            raise HeddleTypeError(f"{name} is {value.dtype}, but must be int32")
        if not 1 <= value.ndim <= most:
            raise HeddleValueError(f"{name} has {value.ndim} dimensions, but must have {'1 to 3' if most == 3 else 1}")
    rows, columns = jnp.asarray(rows.reshape((1,) * (3 - rows.ndim) + rows.shape)), jnp.asarray(columns)
    # A GPU's kernels must not go behind the last column; on the CPU the handler says what is wrong.
    rows = jax.lax.platform_dependent(
        rows, cpu=lambda lists: lists, default=lambda lists: jnp.clip(lists, max=columns.shape[0])
    )
    return {"block_rows": rows, "block_columns": columns}


def _limit(name: str, value: Any) -> int | None:
    if value is None:
        return None
    try:
        return int(limit_of(name, operator.index(value)))
    except TypeError:
        raise HeddleTypeError(f"{name} must be an integer that is known when JAX traces, not {value!r}") from None


def _rng_words(given: Any) -> Any:
    """{seed, offset} as four 32-bit words, the low ones first. A key of jax.random is its own words."""
    if isinstance(given, jax.Array) and jnp.issubdtype(given.dtype, jax.dtypes.prng_key):
        given = jax.random.key_data(given)
    if isinstance(given, (jax.Array, np.ndarray)) and given.dtype == np.uint32 and given.shape in ((2,), (4,)):
        words = jnp.asarray(given)
        return words if words.shape == (4,) else jnp.concatenate([words, jnp.zeros_like(words)])
    if isinstance(given, jax.Array) and given.shape == (2,) and jnp.issubdtype(given.dtype, jnp.integer):
        if given.dtype.itemsize == 8:
            return jax.lax.bitcast_convert_type(given, jnp.uint32).reshape(4)
        high = jnp.where(given < 0, jnp.uint32(2**32 - 1), jnp.uint32(0))
        return jnp.stack([given.astype(jnp.uint32), high], 1).reshape(4)
    numbers = state_of(given, "neither a key of jax.random nor two integers, {seed, offset}")
    return jnp.asarray(np.array(numbers, np.uint64).view(np.uint32))


def _deterministic(asked: bool | None) -> bool:
    """XLA's own switches, where nobody says."""
    if asked is not None:
        return flag_of("deterministic", asked)
    flags = os.environ.get("XLA_FLAGS", "").split()
    names = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")
    return any(flag in (name, f"{name}=true") for flag in flags for name in names)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    layout: Literal["bhsd", "bshd"] = "bhsd",
    causal: Causal = None,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout: float = 0.0,
    rng_state: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqlens_q: Any = None,
    seqlens_k: Any = None,
    return_lse: bool = False,
    return_weights: bool = False,
    deterministic: bool | None = None,
    tf32: bool = False,
    q_offset: int = 0,
    k_offset: int = 0,
    h_offset: int = 0,
    whole_sq: int = 0,
    whole_sk: int = 0,
    whole_h: int = 0,
    block_table: Any = None,
    q_segments: Any = None,
    k_segments: Any = None,
    block_rows: Any = None,
    block_columns: Any = None,
    block_size: int | tuple[int, int] | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    multiprocessors: int = 0,
) -> Any:
    """heddle.attention for JAX: softmax(scale·q·kᵀ + bias, masked)·v, within jit, grad, vmap and shard_map.

    Args:
        q, k, v: [b, h, sq, d], [b, hk, sk, d], [b, hk, sk, dv], or without b, or without b and h; packed sequences:
            [total, h, d]. float32, bfloat16 or float16; float64 on the CPU runs on the reference.
        layout: "bshd": q, k, v and out are [b, s, h, d], as in jax.nn.dot_product_attention. Neither is copied.
        rng_state: with dropout: a key of jax.random, or {seed, offset}, two integers or an integer array of two. JAX
            has no generator to draw from, so that there is no default.
        max_seqlen_q, max_seqlen_k, causal, window, scale, softcap, dropout, block_size, multiprocessors: known when
            JAX traces, no arrays.
        deterministic: gradients with the same bits every time. Default: XLA's --xla_gpu_deterministic_ops.
        block_table: must be None: keys in pages are an error here.
        the others: as in heddle.attention. On the CPU lengths that are out of range are an error when the call runs,
            and so are numbers of lists of blocks.

    Returns:
        out, of q's layout and dtype; with return_lse or return_weights a tuple (out, lse, weights) of those asked for.

    Raises:
        TypeError, ValueError, NotImplementedError: as heddle.attention, when JAX traces. There is a gradient of the
            first order in reverse mode; forward mode (jvp) and second derivatives are errors.

    Source: as heddle.attention.
    """
    if layout not in ("bhsd", "bshd"):
        raise HeddleValueError(f"layout = {layout!r} is neither 'bhsd' nor 'bshd'")
    if block_table is not None:
        raise NotImplementedError("heddle.jax.attention takes no keys in pages: block_table must be None")
    q, k, v = _array("q", q), _array("k", k), _array("v", v)
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    inside, rank = layout == "bshd" and not packed, q.ndim
    if not packed and not (2 + inside <= rank == k.ndim == v.ndim <= 4):
        least = "3 or 4 with layout='bshd'" if inside else "2 to 4"
        raise HeddleValueError(f"q, k and v have {rank}, {k.ndim} and {v.ndim} dimensions: must be the same, {least}")
    if not packed:
        q, k, v = (t.reshape((1,) * (4 - rank) + t.shape) for t in (q, k, v))
    if packed:
        sq, sk = _limit("max_seqlen_q", max_seqlen_q), _limit("max_seqlen_k", max_seqlen_k)
    else:
        sq, sk = (t.shape[1 if inside else 2] for t in (q, k))
    real = np.dtype(np.float64 if q.dtype == jnp.float64 else np.float32)
    mask = None if mask is None else _array("mask", mask)
    if mask is not None and mask.dtype != jnp.bool_:
        raise HeddleTypeError(f"mask is {mask.dtype}, but must be bool; an additive one goes into bias")
    last = sk if sk is not None else 1
    given = {
        "q": q,
        "k": k,
        "v": v,
        "bias": _of_scores("bias", _bias_of(bias, q.dtype), last),
        "bool_mask": _of_scores("mask", mask, last),
        "alibi_slopes": _same_type("alibi_slopes", alibi_slopes, real),
        "sinks": _same_type("sinks", sinks, real),
        "k_scale": _same_type("k_scale", k_scale, real),
        "v_scale": _same_type("v_scale", v_scale, real),
        "cu_seqlens_q": _lengths("cu_seqlens_q", cu_seqlens_q),
        "cu_seqlens_k": _lengths("cu_seqlens_k", cu_seqlens_k),
        "seqlens_q": _lengths("seqlens_q", seqlens_q),
        "seqlens_k": _lengths("seqlens_k", seqlens_k),
        "q_segments": _ids("q_segments", q_segments, None if packed else q.shape[0]),
        "k_segments": _ids("k_segments", k_segments, None if packed else k.shape[0]),
    }
    if q_segments is None and k_segments is not None:
        raise HeddleValueError("k_segments is given without q_segments")
    if given["k_segments"] is None:
        given["k_segments"] = given["q_segments"]
    sizes = block_of(block_size, not block_rows is block_columns is None)
    given |= _lists(block_rows, block_columns)
    given = {name: value for name, value in given.items() if value is not None}
    dropout = number_of("dropout", dropout)
    if dropout and rng_state is None:
        raise HeddleValueError(f"dropout = {dropout:g} needs rng_state: a key of jax.random, or {{seed, offset}}")
    if rng_state is not None:
        words = _rng_words(rng_state)
        given |= {"rng_state": words} if dropout else {}
    places = tuple(
        _limit(name, value) or 0
        for name, value in zip(PLACES, (q_offset, k_offset, h_offset, whole_sq, whole_sk, whole_h), strict=True)
    )
    if causal is True:  # the corners of the whole
        sq, sk = places[3] or places[0] + (sq or 0), places[4] or places[1] + (sk or 0)
    what = Attention(
        causal=_CAUSAL[causal_of(causal, sq, sk)],
        window=window_of(window),
        scale=None if scale is None else scale_of(scale),
        softcap=number_of("softcap", softcap),
        dropout=dropout,
        max_seqlen_q=_limit("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=_limit("max_seqlen_k", max_seqlen_k),
        deterministic=_deterministic(deterministic),
        tf32=flag_of("tf32", tf32),
        places=places,
        block_size=sizes if sizes[0] else None,
        multiprocessors=multiprocessors_of(multiprocessors),
        heads_inside=inside,
        return_lse=flag_of("return_lse", return_lse),
        return_weights=flag_of("return_weights", return_weights),
    )
    made = _attention_jit(what, _jax_call.alike(given))
    if not packed:
        made = tuple(value.reshape(value.shape[4 - rank :]) for value in made)
    return made[0] if len(made) == 1 else made


def _rows_like_y(residual: Any, x: Any, w: Any, activation: int) -> Any:
    shape = (*x.shape[:-1], features_out(w.shape[0], activation) if w.ndim else 0)
    if residual.shape != shape:
        raise HeddleValueError(f"residual has shape {list(residual.shape)}, but must have {list(shape)}")
    return residual.reshape(-1, shape[-1]) if shape[-1] else residual


def norm_linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    gamma: Any = None,
    beta: Any = None,
    eps: float = 1e-5,
    *,
    norm: Literal["layer", "rms", "none"] = "layer",
    activation: Activation = None,
    residual: Any = None,
    return_norm: bool = False,
    tf32: bool = False,
    prepared: Any = None,
    multiprocessors: int = 0,
) -> Any:
    """heddle.norm_linear for JAX: act(norm(x)·weightᵀ + bias) + residual in one, within jit, grad, vmap and shard_map.

    Args:
        x: [..., k], float32, bfloat16 or float16; float64 on the CPU runs on the reference.
        weight: [n, k], x's dtype: the transpose of Flax's kernel, which is [k, n].
        bias, gamma, beta, eps, norm, activation, residual, return_norm, tf32, multiprocessors: as in
            heddle.norm_linear; eps and multiprocessors are known when JAX traces.
        prepared: what heddle.jax.norm_linear_prepare, or heddle.norm_linear_prepare of JAX's arrays, made of this
            weight, bias, gamma and beta, with these options, for the device on which the call runs; results have the
            same bits without it. Backward does not look at it. Prepare anew when any of them changes.

    Returns:
        y, [..., n] of x's dtype; with return_norm a tuple (y, z). All six arrays have gradients.

    Raises:
        TypeError, ValueError, NotImplementedError: as heddle.jax.attention.

    Source: as heddle.norm_linear.
    """
    x = _array("x", x)
    if x.ndim == 0:
        raise HeddleValueError("x has 0 dimensions, but must have 1 or more")
    norm_of(norm)
    kind = activation_of(activation)
    eps_of(eps, norm)  # what is no number is refused
    eps = float(eps)
    if not eps >= 0:
        raise HeddleValueError(f"eps = {eps} is not >= 0")
    given = {"x": x.reshape(-1, x.shape[-1]) if x.shape[-1] else x, "w": _array("weight", weight)}
    for name, value in (("gamma", gamma), ("beta", beta), ("bias", bias)):
        if value is not None:
            given[name] = _array(name, value)
    if residual is not None:
        given["residual"] = _rows_like_y(_array("residual", residual), x, given["w"], kind)
    if prepared is not None:
        given["prepared"] = _array("prepared", prepared)
    return_norm = flag_of("return_norm", return_norm)
    if return_norm and norm == "none":
        raise HeddleValueError("return_norm is given, but with norm = 'none' z is x")
    limit = multiprocessors_of(multiprocessors)
    what = NormLinear(norm, eps, _deterministic(None), flag_of("tf32", tf32), activation, return_norm, limit)
    made = tuple(t.reshape(*x.shape[:-1], t.shape[-1]) for t in _norm_linear_jit(what, _jax_call.alike(given)))
    return made if return_norm else made[0]


def _on_a_gpu(weight: Any) -> bool:
    """Where a call with this array runs; of one that is traced, where JAX runs what nobody has placed."""
    if isinstance(weight, jax.Array) and not isinstance(weight, jax.core.Tracer):
        return any(device.platform != "cpu" for device in weight.devices())
    device = jax.config.jax_default_device
    return bool((getattr(device, "platform", device) or jax.default_backend()) != "cpu")


def norm_linear_prepare(
    weight: Any,
    bias: Any = None,
    gamma: Any = None,
    beta: Any = None,
    *,
    norm: Literal["layer", "rms", "none"] = "layer",
    activation: Activation = None,
    return_norm: bool = False,
    tf32: bool = False,
) -> Any:
    """heddle.norm_linear_prepare for JAX: what norm_linear makes of its weight in every call before it looks at x.

    Args:
        weight, bias, gamma, beta, norm, activation, return_norm, tf32: as they will be given to heddle.jax.norm_linear;
            float32, bfloat16 or float16, or float64 on the CPU.

    Returns:
        uint8 [bytes] for heddle.jax.norm_linear as prepared, of no bytes where nothing is worth keeping. It has no
        gradient. How many bytes there are depends on the device: that of weight, and while JAX traces that on which it
        runs what nobody has placed (jax.default_device). On another one the call is an error when it runs.

    Raises:
        TypeError, ValueError, NotImplementedError: as heddle.jax.norm_linear.

    Source: as heddle.norm_linear.
    """
    norm_of(norm)
    return_norm = flag_of("return_norm", return_norm)
    if return_norm and norm == "none":
        raise HeddleValueError("return_norm is given, but with norm = 'none' z is x")
    given = {"w": _array("weight", weight)}
    if given["w"].ndim != 2:
        raise HeddleValueError(f"weight has {given['w'].ndim} dimensions, but must have 2 ([n, k])")
    for name, value in (("gamma", gamma), ("beta", beta), ("bias", bias)):
        if value is not None:
            given[name] = _array(name, value)
    what = NormLinear(norm, EPS, False, flag_of("tf32", tf32), activation, return_norm, cuda=_on_a_gpu(given["w"]))
    return _jax_call.prepare(what, jax.lax.stop_gradient(given))
