# SPDX-License-Identifier: Apache-2.0
"""What heddle.jax refuses, when JAX traces or when it runs: by the type of the error and its words."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from jax_help import jax, jnp, on_the_cpu  # noqa: F401

import heddle.jax

ONES = {"q": (2, 4, 5, 8), "k": (2, 2, 7, 8), "v": (2, 2, 7, 8)}


@pytest.mark.parametrize(
    "changed,kind,text",
    [
        ({"q": np.ones((2, 3, 5, 8), np.float32)}, ValueError, "hk = 2 does not divide h = 3"),
        ({"q": np.ones((5, 8), np.float32)}, ValueError, "2, 4 and 4 dimensions"),
        ({"q": np.ones((2, 4, 5, 9), np.float32)}, ValueError, "head dim 9, but k has 8"),
        ({"q": np.ones((2, 4, 5, 8), np.int32)}, TypeError, "q is int32"),
        ({"q": jnp.ones((2, 4, 5, 8), "float8_e4m3fn")}, TypeError, "q is float8_e4m3fn"),
        ({"q": np.ones((2, 4, 5, 8), np.complex64)}, TypeError, "q is complex64"),
        ({"k": jnp.ones((2, 2, 7, 8), "bfloat16")}, TypeError, "k is bfloat16, but must be float32"),
        ({"v": torch.ones(2, 2, 7, 8)}, TypeError, "v must be an array of JAX or NumPy, not Tensor"),
        ({"q": np.ones((2, 4, 5, 600), np.float32), "k": np.ones((2, 2, 7, 600), np.float32)}, ValueError, "d = 600"),
        ({"layout": "sbhd"}, ValueError, "layout = 'sbhd'"),
        ({"causal": True}, ValueError, "ambiguous when sq = 5 is not sk = 7"),
        ({"mask": np.ones((5, 7), np.float32)}, TypeError, "mask is float32, but must be bool"),
        ({"bias": np.ones((5, 7), bool)}, TypeError, "bias is bool"),
        ({"bias": np.ones((5, 6), np.float32)}, ValueError, "bias has shape"),
        ({"sinks": np.ones(3, np.float32)}, ValueError, r"sinks has shape \[3\]"),
        ({"sinks": np.ones(4, np.int32)}, TypeError, "sinks is int32, but must be float32"),
        ({"alibi_slopes": np.ones(4, np.complex64)}, TypeError, "alibi_slopes is complex64, but must be float32"),
        ({"tf32": "no"}, TypeError, "tf32 = 'no' is neither True nor False"),
        ({"deterministic": "no"}, TypeError, "deterministic = 'no' is neither True nor False"),
        ({"return_lse": "no"}, TypeError, "return_lse = 'no' is neither True nor False"),
        ({"return_weights": "no"}, TypeError, "return_weights = 'no' is neither True nor False"),
        ({"dropout": 0.5, "rng_state": (2**64, 0)}, ValueError, "18446744073709551616, which 64 bits do not hold"),
        ({"rng_state": (0, -(2**63) - 1)}, ValueError, "which 64 bits do not hold"),
        ({"alibi_slopes": np.ones((3, 4), np.float32)}, ValueError, "alibi_slopes has shape"),
        ({"dropout": 0.5}, ValueError, "dropout = 0.5 needs rng_state"),
        ({"dropout": 1.0, "rng_state": (1, 2)}, ValueError, "dropout = 1"),
        ({"dropout": 0.5, "rng_state": (1.5, 2)}, TypeError, "neither a key of jax.random"),
        ({"dropout": 0.5, "rng_state": jnp.ones(3, "uint32")}, TypeError, "neither a key of jax.random"),
        ({"scale": "0.5"}, TypeError, "scale = '0.5' is not a number"),
        ({"softcap": -1.0}, ValueError, "softcap = -1"),
        ({"seqlens_k": np.ones(2, np.float32)}, TypeError, "seqlens_k must be integers"),
        ({"seqlens_k": [1, 2, 3]}, ValueError, r"seqlens_k has shape \[3\]"),
        ({"max_seqlen_q": 3}, ValueError, "given without cu_seqlens"),
        ({"cu_seqlens_q": [0, 5]}, ValueError, "3 .*total, h, d"),
        ({"max_seqlen_q": 1.5}, TypeError, "max_seqlen_q must be an integer"),
    ],
    ids=lambda value: None,
)
def test_errors(changed, kind, text):
    """When JAX traces, within jit too."""
    given = {name: jnp.ones(shape) for name, shape in ONES.items()} | changed
    numbers = {n: t for n, t in given.items() if not hasattr(t, "shape") or isinstance(t, torch.Tensor)}
    for call in (
        heddle.jax.attention,
        lambda **arrays: jax.eval_shape(partial(heddle.jax.attention, **numbers), **arrays),
    ):
        arrays = given if call is heddle.jax.attention else {n: t for n, t in given.items() if n not in numbers}
        with pytest.raises(kind, match=text):
            call(**arrays)


def test_errors_of_norm_linear():
    x, weight = jnp.ones((3, 8)), jnp.ones((5, 8))
    for args, options, kind, text in (
        ((x, weight[:, :7]), {}, ValueError, "x has 8 features"),
        ((x, weight.astype("bfloat16")), {}, TypeError, "weight is bfloat16"),
        ((jnp.float32(1.0), weight), {}, ValueError, "x has 0 dimensions"),
        ((x, weight), {"norm": "batch"}, ValueError, "norm = 'batch'"),
        ((x, weight), {"eps": -1.0}, ValueError, "eps = -1.0"),
        ((x, weight), {"eps": "0.5"}, TypeError, "eps = '0.5' is not a number"),
        ((x, weight), {"eps": True}, TypeError, "eps = True is not a number"),
        ((x, weight), {"eps": None}, TypeError, "eps = None is not a number"),
        ((x, weight), {"tf32": "no"}, TypeError, "tf32 = 'no' is neither True nor False"),
        ((x, weight), {"return_norm": "no"}, TypeError, "return_norm = 'no' is neither True nor False"),
        ((x, weight), {"gamma": jnp.ones(7)}, ValueError, r"gamma has shape \[7\]"),
        ((x, weight), {"norm": "none", "gamma": jnp.ones(8)}, ValueError, "gamma is given, but norm is HEDDLE_NO_NORM"),
        ((x, weight), {"norm": "none", "eps": 0.1}, ValueError, "eps = 0.1, but norm = 'none'"),
        (
            (x, weight),
            {"residual": jnp.ones((3, 4))},
            ValueError,
            r"residual has shape \[3, 4\], but must have \[3, 5\]",
        ),
        ((x, weight), {"residual": jnp.ones((3, 5), "bfloat16")}, TypeError, "residual is bfloat16"),
    ):
        with pytest.raises(kind, match=text):
            heddle.jax.norm_linear(*args, **options)


def test_derivatives_that_there_are_not():
    q, k, v = (jnp.ones(shape) for shape in ONES.values())

    def loss(q):
        return (heddle.jax.attention(q, k, v) ** 2).sum()

    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss, (q,), (q,))
    for second in (jax.hessian(loss), jax.jacrev(jax.jacrev(loss)), jax.grad(lambda q: jax.grad(loss)(q).sum())):
        with pytest.raises(NotImplementedError, match=r"heddle\.jax\.attention has no second derivative"):
            second(q)
    with pytest.raises(NotImplementedError, match=r"heddle\.jax\.norm_linear has no second derivative"):
        jax.hessian(lambda x: heddle.jax.norm_linear(x, jnp.ones((3, 8))).sum())(jnp.ones((1, 8)))
    slopes = jnp.ones(4)
    with pytest.raises(NotImplementedError, match="no gradient for alibi_slopes"):
        jax.grad(lambda s: heddle.jax.attention(q, k, v, alibi_slopes=s).sum())(slopes)
    stopped = jax.grad(lambda s: heddle.jax.attention(q, k, v, alibi_slopes=jax.lax.stop_gradient(s)).sum())(slopes)
    assert not stopped.any()


@pytest.mark.parametrize(
    "name,value,text",
    [
        ("seqlens_k", [1, 8], r"seqlens_k\[1\] = 8 is outside 0 to 7"),
        ("seqlens_q", [-1, 3], r"seqlens_q\[0\] = -1 is outside 0 to 5"),
        ("cu_seqlens_q", [0, 6, 4], r"cu_seqlens_q\[2\] = 4 after 6"),
        ("cu_seqlens_k", [0, 2, 15], r"cu_seqlens_k\[2\] = 15 after 2"),
    ],
)
def test_lengths_that_are_wrong_on_the_cpu(name, value, text):
    """Nobody knows them before the call runs."""
    q, k, v = (jnp.ones(shape) for shape in ONES.values())
    options = {name: jnp.array(value)}
    if name.startswith("cu"):
        q, k, v = (t.swapaxes(1, 2).reshape(-1, *t.shape[1:3:2], 8)[: t.shape[0] * t.shape[2]] for t in (q, k, v))
        q, k, v = jnp.ones((10, 4, 8)), jnp.ones((14, 2, 8)), jnp.ones((14, 2, 8))
        both = {"cu_seqlens_q": jnp.array([0, 5, 10]), "cu_seqlens_k": jnp.array([0, 7, 14])}
        options = both | options | {"max_seqlen_q": 7, "max_seqlen_k": 7}
    with pytest.raises(Exception, match=text) as caught:
        jax.block_until_ready(heddle.jax.attention(q, k, v, **options))
    assert "INVALID_ARGUMENT" in str(caught.value)


@pytest.mark.parametrize("make", [np.asarray, list, partial(np.asarray, dtype=np.uint64)])
def test_lengths_of_64_bits(make):
    """JAX would make 3 of 2**32 + 3, where it has no 64 bits: too large stays too large."""
    assert not jax.config.jax_enable_x64
    q, k, v = (jnp.ones(shape) for shape in ONES.values())
    wrong = 2**32 + 3
    for name in ("seqlens_q", "seqlens_k"):
        with pytest.raises(Exception, match=rf"{name}\[0\] = 2147483647 is outside"):
            jax.block_until_ready(heddle.jax.attention(q, k, v, **{name: make([wrong, 3])}))
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        options = {"cu_seqlens_q": [0, 5, 10], "cu_seqlens_k": [0, 5, 10], "max_seqlen_q": 7, "max_seqlen_k": 7}
        rows = jnp.ones((10, 2, 8))
        with pytest.raises(Exception, match=rf"{name}\[1\] = 2147483647 after 0"):
            jax.block_until_ready(heddle.jax.attention(rows, rows, rows, **options | {name: make([0, wrong, 10])}))
    if make is np.asarray:
        with pytest.raises(Exception, match=r"seqlens_k\[1\] = -2147483648 is outside"):
            jax.block_until_ready(heddle.jax.attention(q, k, v, seqlens_k=make([3, -(2**32) + 3])))
    right = heddle.jax.attention(q, k, v, seqlens_k=jnp.array([7, 3]))
    assert np.array_equal(heddle.jax.attention(q, k, v, seqlens_k=make([7, 3])), right)


def test_ids_and_lists_of_64_bits():
    """Refused as with 64 bits: without them JAX would cut them off."""
    q = jnp.ones((1, 2, 5, 8))
    rows, columns = heddle.block_lists(np.ones((1, 1), bool))
    for name, options in (
        ("q_segments", {"q_segments": np.arange(5)}),
        ("block_rows", {"block_rows": rows.astype(np.int64), "block_columns": columns}),
        ("block_columns", {"block_rows": rows, "block_columns": columns.astype(np.int64)}),
    ):
        with pytest.raises(TypeError, match=f"{name} is int64, but must be int32"):
            heddle.jax.attention(q, q, q, **options)


def test_handlers_believe_nobody():
    """What reaches XLA by another way than heddle.jax is refused before a byte is touched."""
    fields = list(heddle._C.fields())
    places = {name: np.int64(fields.index(name)) for name in fields}
    description = {"dtype": 0, "b": 2, "h": 4, "hk": 2, "sq": 5, "sk": 7, "d": 8, "dv": 8}
    packed = np.frombuffer(heddle._C.pack("attention", description), np.int64)
    q, k, v = (jnp.ones(shape) for shape in ONES.values())
    right = {"description": packed, "fields": np.array([0, *(places[n] for n in ("q", "k", "v", "o"))])}

    def call(*arrays, result=q.shape, **attributes):
        made = jax.ffi.ffi_call("heddle_attention", jax.ShapeDtypeStruct(result, jnp.float32))(*arrays, **attributes)
        return jax.block_until_ready(made)

    assert call(q, k, v, **right).shape == q.shape
    far = np.frombuffer(heddle._C.pack("attention", description | {"k_stride": (10**6, 10**5, 8)}), np.int64)
    bad = np.frombuffer(heddle._C.pack("attention", description | {"hk": 3}), np.int64)
    for arrays, changed, text in (
        ((q[:1], k, v), {}, "q has 160 elements .* but must have 320"),
        ((q, k.astype(jnp.bfloat16), v), {}, "k has 224 elements of XLA's type 16, but must have 224 of type 11"),
        ((q, k, v), {"result": (2, 4, 5, 7)}, "o has 280 elements"),
        ((q, k, v), {"description": far}, "k has 224 elements .* but must have 1100056"),
        ((q, k, v), {"description": bad}, "hk = 3 does not divide h = 4"),
        ((q, k, v), {"description": packed[:1]}, "no description that this version"),
        ((q, k, v), {"description": packed[:9]}, "no description that this version"),
        ((q, k, v), {"description": np.concatenate([packed, packed])}, "no description"),
        ((q, k, v), {"fields": right["fields"][:-1]}, "does not say what its buffers are"),
        ((q, k, v), {"fields": np.array([0, 0, 1, 99, places["o"]])}, "no tensor number 99"),
        ((q, k, v), {"fields": np.array([0, 0, 1, places["o"], 2])}, "o is no argument of this pass"),
        ((q, k, v), {"fields": np.array([1, 0, 1, 2, places["o"]])}, "o is no result of this pass"),
        ((q, k, v), {"fields": right["fields"].astype(np.int32)}, "does not say what its buffers are"),
    ):
        with pytest.raises(Exception, match=text):
            call(*arrays, **(right | changed))
