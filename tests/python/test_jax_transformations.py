# SPDX-License-Identifier: Apache-2.0
"""heddle.jax under vmap, shard_map, checkpoint and scan: as without, and as jnp's own formulas."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from jax_help import arrays_of, formulas, jax, jnp, on_the_cpu  # noqa: F401

import heddle.jax


def one_by_one(function, axes, *args):
    """What vmap means."""
    n = next(a.shape[axis] for a, axis in zip(args, axes, strict=True) if axis is not None)
    args, function = [np.asarray(a) for a in args], jax.jit(function)
    each = [[a if axis is None else a.take(x, axis) for a, axis in zip(args, axes, strict=True)] for x in range(n)]
    return jax.tree.map(lambda *made: np.stack(made), *(jax.device_get(function(*these)) for these in each))


VMAPS = {
    "all": ((0, 1, 3, None), {"causal": "bottom_right"}, "folded"),
    "queries": ((0, None, None, None), {}, "folded"),
    "own bias": ((0, 0, 0, 0), {"bias": (3, 1, 4, 5, 7)}, "folded"),
    "same bias": ((0, 0, 0, None), {"bias": (4, 5, 7)}, "folded"),
    "bias of batches": ((None, 0, None, None), {"bias": (2, 4, 5, 7)}, "folded"),
    "own slopes": ((0, 0, 0, 0), {"alibi_slopes": (3, 4)}, "folded"),
    "slopes of batches": ((0, 0, 0, None), {"alibi_slopes": (2, 4)}, "folded"),
    "same sinks": ((0, 0, 0, None), {"sinks": (4,)}, "folded"),
    "own sinks": ((0, 0, 0, 0), {"sinks": (3, 4)}, "one by one"),
    "own lengths": ((0, 0, 0, 0), {"seqlens_k": (3, 2)}, "folded"),
    "dropout": ((0, 0, 0, None), {"dropout": 0.3, "rng_state": (2,)}, "one by one"),
}


@pytest.mark.parametrize("name", VMAPS)
def test_vmap(name):
    axes, options, how = VMAPS[name]
    shapes = [(2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)]
    shapes = [s if axis is None else (*s[:axis], 3, *s[axis:]) for s, axis in zip(shapes, axes, strict=False)]
    q, k, v = arrays_of(*shapes)
    (extra, shape), *_ = ((n, s) for n, s in {**options, "scale": ()}.items() if isinstance(s, tuple))
    numbers = {n: s for n, s in options.items() if not isinstance(s, tuple)}
    (other,) = arrays_of(shape, seed=1)
    if extra in ("seqlens_k", "rng_state"):
        other = jnp.abs(4 * other).astype(jnp.uint32 if extra == "rng_state" else jnp.int32) % 7

    def run(q, k, v, other):
        given = {} if extra == "scale" else {extra: other}
        return heddle.jax.attention(q, k, v, **given, **numbers, return_lse=True)

    floats = (0, 1, 2) if extra in ("scale", "alibi_slopes", "seqlens_k", "rng_state") else (0, 1, 2, 3)
    grad = jax.grad(lambda *args: (run(*args)[0] ** 2).sum(), floats)  # for each on its own, shared ones too
    mapped = jax.vmap(run, axes)
    back = jax.grad(lambda *args: (mapped(*args)[0] ** 2).sum(), floats)  # shared ones: summed
    assert ("scan" in str(jax.make_jaxpr(mapped)(q, k, v, other))) == (how == "one by one")
    made, grads, sums = jax.jit(lambda *args: (mapped(*args), jax.vmap(grad, axes)(*args), back(*args)))(q, k, v, other)
    alone, alone_grads = one_by_one(lambda *args: (run(*args), grad(*args)), axes, q, k, v, other)
    for got, want in zip(made, alone, strict=True):
        assert got.shape == want.shape and np.array_equal(got, want)
    for got, want in zip(grads, alone_grads, strict=True):
        assert got.shape == want.shape and np.allclose(got, want, atol=1e-5)
    for x, (got, want) in enumerate(zip(sums, alone_grads, strict=True)):
        want = want.sum(0) if axes[x] is None else np.moveaxis(want, 0, axes[x])
        assert got.shape == want.shape and np.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    "axes,how", [((0, None, None), "folded"), ((0, 0, 0), "one by one"), ((None, 1, None), "one by one")]
)
def test_vmap_of_norm_linear(axes, how):
    shapes = [(2, 8), (6, 8), (8,)]
    shapes = [s if axis is None else (*s[:axis], 3, *s[axis:]) for s, axis in zip(shapes, axes, strict=True)]
    args = arrays_of(*shapes)

    def run(x, weight, gamma):
        return heddle.jax.norm_linear(x, weight, gamma=gamma)

    grad = jax.grad(lambda *a: (run(*a) ** 2).sum(), (0, 1, 2))
    for function in (run, jax.grad(lambda *a: (run(*a) ** 2).sum())):
        text = str(jax.make_jaxpr(jax.vmap(function, axes))(*args))
        assert ("scan" in text) == (how == "one by one")
    got = jax.jit(lambda *a: (jax.vmap(run, axes)(*a), jax.vmap(grad, axes)(*a)))(*args)
    want = one_by_one(lambda *a: (run(*a), grad(*a)), axes, *args)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4), got, want)


def test_vmap_over_nothing():
    """Results and gradients of no calls, as jax.vmap has them of JAX's own."""
    q, k = jnp.ones((2, 4, 5, 8)), jnp.ones((2, 2, 7, 8))
    x, weight = jnp.ones((5, 8)), jnp.ones((3, 8))
    attend, norm = heddle.jax.attention, heddle.jax.norm_linear
    for function, args in (
        (lambda q: attend(q, k, k), (q,)),
        (lambda k: attend(q, k, k, return_lse=True), (k,)),
        (jax.grad(lambda q: attend(q, k, k).sum()), (q,)),
        (norm, (x, weight)),
        (lambda x: norm(x, weight, return_norm=True), (x,)),
        (lambda w: norm(x, w), (weight,)),
        (jax.grad(lambda x: norm(x, weight).sum()), (x,)),
    ):
        one = function(*args)
        for run in (jax.vmap(function), jax.jit(jax.vmap(function))):
            made = run(*(jnp.ones((0, *each.shape)) for each in args))
            jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, np.ones((0, *b.shape), b.dtype)), made, one)


def two_devices():
    if len(jax.devices("cpu")) < 2:
        pytest.skip("JAX was started with one device")
    return jax.make_mesh((2,), ("x",), devices=jax.devices("cpu")[:2], axis_types=(jax.sharding.AxisType.Auto,))


def test_shard_map():
    """Each device has its part; the gradient of what all have is the sum of theirs."""
    here, everywhere = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
    q, k, v, weight = arrays_of((4, 2, 5, 8), (1, 2, 7, 8), (4, 2, 7, 8), (6, 8))

    def inner(q, k, v, weight, reduce=lambda loss: jax.lax.psum(loss, "x")):
        k = jnp.broadcast_to(k, v.shape)
        out = heddle.jax.attention(q, k, v, bias=weight[:5, :7], causal="top_left")
        return reduce((heddle.jax.norm_linear(out, weight, norm="rms") ** 2).sum())

    specs = (here, everywhere, here, everywhere)
    parts = jax.shard_map(inner, mesh=two_devices(), in_specs=specs, out_specs=everywhere)
    got = jax.jit(jax.value_and_grad(parts, (0, 1, 2, 3)))(q, k, v, weight)
    want = jax.jit(jax.value_and_grad(partial(inner, reduce=lambda loss: loss), (0, 1, 2, 3)))(q, k, v, weight)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want)


def test_sharded_batches_without_shard_map():
    """XLA cannot divide what it does not know: it gathers, and every device computes all. The result is right."""
    q, k, v = arrays_of((4, 2, 5, 8), (4, 2, 7, 8), (4, 2, 7, 8))
    sharding = jax.sharding.NamedSharding(two_devices(), jax.sharding.PartitionSpec("x"))
    apart = [jax.device_put(t, sharding) for t in (q, k, v)]
    run = jax.jit(heddle.jax.attention)
    assert "all-gather" in run.lower(*apart).compile().as_text()
    assert np.array_equal(run(*apart), heddle.jax.attention(q, k, v))


def test_checkpoint_and_scan():
    x, weights = arrays_of((1, 2, 6, 8), (3, 8, 8))

    def layer(attend, x, weight):
        return x + attend(heddle_or_jnp(attend)(x, weight), x, x), None

    def heddle_or_jnp(attend):
        if attend is formulas_out:
            return lambda x, w: (x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)) @ w.T
        return partial(heddle.jax.norm_linear, norm="rms")

    def formulas_out(q, k, v):
        return formulas(q, k, v)[0]

    def loss(attend, weights):
        return (jax.lax.scan(jax.checkpoint(partial(layer, attend)), x, weights)[0] ** 2).mean()

    got, want = (jax.jit(jax.grad(partial(loss, f)))(weights) for f in (heddle.jax.attention, formulas_out))
    assert np.allclose(got, want, atol=1e-4) and np.abs(want).max() > 0.1
