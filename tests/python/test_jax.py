# SPDX-License-Identifier: Apache-2.0
"""heddle.jax within jit, grad, vmap and shard_map. The measure is the same call of torch, whose every option
test_attention.py and test_norm_linear.py hold to float64: the kernels are the same, so the bits must be. In float64,
jnp's own formulas and derivatives are a second one, which shares no line with it."""

from __future__ import annotations

import contextlib
import inspect
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import devices
from test_attention import OPTIONS, inputs

jax = pytest.importorskip("jax")
import heddle  # noqa: E402
import heddle.jax  # noqa: E402

jnp = jax.numpy
ROOT = Path(__file__).resolve().parents[2]
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(autouse=True)
def on_the_cpu():
    """Where nothing else is said: what is made without a device is not put on a GPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def x64():
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


def place(device):
    try:
        return jax.devices("cuda" if device == "cuda" else "cpu")[0]
    except RuntimeError:
        pytest.skip("this JAX has no GPU")


def to_jax(tensor):
    """The same numbers, on the same kind of device."""
    array = tensor.detach().cpu()
    bits = jnp.asarray(array.float().numpy()).astype("bfloat16") if array.dtype == torch.bfloat16 else array.numpy()
    return jax.device_put(bits, place(tensor.device.type))


def to_numpy(value):
    """As float32 or float64, so that bfloat16 can be compared."""
    if isinstance(value, torch.Tensor):
        value = value.detach().float() if value.dtype == torch.bfloat16 else value.detach()
        return value.cpu().numpy()
    return np.asarray(value.astype(jnp.float32) if value.dtype == jnp.bfloat16 else value)


def split(options):
    """Arrays for JAX; what is no tensor."""
    arrays = {n: to_jax(t) for n, t in options.items() if isinstance(t, torch.Tensor)}
    return arrays, {n: t for n, t in options.items() if not isinstance(t, torch.Tensor)}


def both_ways(function, run, given, seeds):
    """(results, gradients) of `run` in torch and of `function` in JAX, for the tensors in `given` that require one."""
    leaves = [n for n, t in given.items() if isinstance(t, torch.Tensor) and t.requires_grad]
    made = run(**given)
    made = made if isinstance(made, tuple) else (made,)
    seeds = [seed.to(t) for seed, t in zip(seeds, made, strict=True)]
    grads = torch.autograd.grad(made, [given[n] for n in leaves], seeds)
    arrays, numbers = split(given)

    @jax.jit
    def of_jax(arrays, seeds):
        def leaves_alone(values):
            made = function(**{**arrays, **values}, **numbers)
            return made if isinstance(made, tuple) else (made,)

        made, back = jax.vjp(leaves_alone, {n: arrays[n] for n in leaves})
        return made, back(seeds)[0]

    made_by_jax, back = of_jax(arrays, tuple(map(to_jax, seeds)))
    return (made, grads), (made_by_jax, [back[n] for n in leaves])


def assert_same(torchs, jaxs, summed=()):
    """The same bits; but for a gradient that torch and XLA sum on their own, in an order of their own."""
    for ours, theirs in zip(torchs, jaxs, strict=True):
        for x, (t, j) in enumerate(zip(ours, theirs, strict=True)):
            assert str(j.dtype) == str(t.dtype).removeprefix("torch.") and j.shape == t.shape
            t, j = to_numpy(t), to_numpy(j)
            same = np.allclose(t, j, atol=1e-5) if theirs is jaxs[1] and x in summed else np.array_equal(t, j)
            assert same, f"{x}: {np.abs(t - j).max()}"


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    "name,dtype", [(name, "float32") for name in OPTIONS] + [("all", "bfloat16"), ("all", "float16")]
)
def test_attention(name, dtype, device):
    torch.manual_seed(2)
    options = OPTIONS[name](device, TYPES[dtype])
    q, k, v = inputs(TYPES[dtype], device)
    given = {"q": q, "k": k, "v": v, **options, "deterministic": True, "return_lse": True, "return_weights": True}
    seeds = [torch.randn(2, 4, 13, last, device=device) for last in (16, 1, 17)]
    seeds[1] = seeds[1][..., 0]
    ways = both_ways(heddle.jax.attention, heddle.attention, given, seeds)
    assert_same(*ways, summed=(3,) if name == "bias of one" else ())


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("rank", [4, 3])
def test_rows_outside_heads(rank, device):
    """layout="bshd" is the memory of torch's transposed tensors."""
    q, k, v = (t if rank == 4 else t[0].detach().requires_grad_() for t in inputs(torch.float32, device, "bshd"))
    given = {"q": q, "k": k, "v": v, "causal": "bottom_right", "deterministic": True}

    def run(q, k, v, **options):
        return heddle.attention(q, k, v, **options)

    def function(q, k, v, **options):
        turn = partial(jnp.swapaxes, axis1=-2, axis2=-3)
        return turn(heddle.jax.attention(turn(q), turn(k), turn(v), layout="bshd", **options))

    assert_same(*both_ways(function, run, given, [torch.randn(*q.shape[:-1], 16, device=device)]))


def test_a_part_of_a_larger_problem():
    """q_offset and the others: the last rows on their own."""
    q, k, v = arrays_of((1, 2, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8))
    whole = heddle.jax.attention(q, k, v, causal=True)
    part = heddle.jax.attention(q[:, :, 4:], k, v, causal="top_left", q_offset=4, whole_sq=6)
    assert np.allclose(part, whole[:, :, 4:], atol=1e-6)


@pytest.mark.parametrize("device", devices())
def test_packed(device):
    """With rows of no sequence in front, behind, and in no order of lengths: they come out as zeros."""
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=device) for cu in ([2, 5, 5, 9], [0, 4, 5, 10]))
    torch.manual_seed(3)
    sizes = ((11, 4, 8), (12, 2, 8), (12, 2, 24))
    q, k, v = (torch.randn(size, device=device, requires_grad=True) for size in sizes)
    options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 5, "max_seqlen_k": 2**40}
    given = {"q": q, "k": k, "v": v, **options, "causal": "bottom_right", "return_lse": True, "deterministic": True}
    seeds = [torch.randn(11, 4, 24, device=device), torch.randn(4, 11, device=device)]
    torchs, jaxs = both_ways(heddle.jax.attention, heddle.attention, given, seeds)
    assert_same(torchs, jaxs)
    assert not jaxs[0][0][:2].any() and not jaxs[0][0][9:].any() and jaxs[0][0][2:5].any() and not jaxs[1][1][10:].any()


@pytest.mark.parametrize("device", devices())
def test_dropout(device):
    torch.manual_seed(4)
    q, k, v = inputs(torch.float32, device)
    state = (2**63 + 7, -3)
    given = {"q": q, "k": k, "v": v, "dropout": 0.4, "deterministic": True}
    torchs, jaxs = both_ways(
        partial(heddle.jax.attention, rng_state=state),
        partial(heddle.attention, rng_state=torch.tensor([7 - 2**63, -3], device=device)),
        given,
        [torch.randn(2, 4, 13, 16, device=device)],
    )
    assert_same(torchs, jaxs)
    arrays = [to_jax(t) for t in (q, k, v)]
    run = jax.jit(partial(heddle.jax.attention, dropout=0.4))
    key = jax.random.key(5)
    drawn = run(*arrays, rng_state=key)
    assert not np.array_equal(drawn, run(*arrays, rng_state=jax.random.key(6)))
    for same in (key, jax.random.key_data(key), (int(jax.random.key_data(key)[1]) * 2**32, 0)):
        assert np.array_equal(drawn, heddle.jax.attention(*arrays, dropout=0.4, rng_state=same))
    pair = np.array([7, -3], np.int32)
    want = heddle.jax.attention(*arrays, dropout=0.4, rng_state=(7, -3))
    assert np.array_equal(want, run(*arrays, rng_state=jnp.asarray(pair)))
    assert np.array_equal(want, heddle.jax.attention(*arrays, dropout=0.4, rng_state=pair))
    with x64():
        assert np.array_equal(want, run(*arrays, rng_state=jnp.asarray(pair.astype(np.int64))))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    "norm,full,dtype", [("layer", True, "float32"), ("rms", False, "float32"), ("layer", True, "bfloat16")]
)
def test_norm_linear(norm, full, dtype, device):
    torch.manual_seed(5)
    sizes = {"x": (2, 3, 40), "weight": (24, 40)} | ({"bias": (24,), "gamma": (40,), "beta": (40,)} if full else {})
    given = {n: torch.randn(s, device=device).to(TYPES[dtype]).requires_grad_() for n, s in sizes.items()}
    seed = torch.randn(2, 3, 24, device=device)
    with contextlib.ExitStack() as stack:
        if device == "cuda":
            torch.use_deterministic_algorithms(True)
            stack.callback(torch.use_deterministic_algorithms, False)
        torchs, jaxs = both_ways(
            partial(heddle.jax.norm_linear, norm=norm, eps=1e-3),
            partial(heddle.norm_linear, norm=norm, eps=1e-3),
            given,
            [seed],
        )
    if device == "cpu":
        assert_same(torchs, jaxs)
    for ours, theirs in zip(torchs, jaxs, strict=True):
        for t, j in zip(ours, theirs, strict=True):
            assert np.allclose(to_numpy(t), to_numpy(j), rtol=1e-2 if dtype == "bfloat16" else 1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------ float64, by jnp alone


def formulas(q, k, v, *, bias=None, mask=None, sinks=None, softcap=0.0, causal=False, slopes=None):
    """(out, lse) in jnp, with jnp's own derivatives."""
    group = q.shape[1] // k.shape[1]
    k, v = jnp.repeat(k, group, 1), jnp.repeat(v, group, 1)
    t = jnp.einsum("bhid,bhjd->bhij", q, k) / q.shape[-1] ** 0.5
    t = softcap * jnp.tanh(t / softcap) if softcap else t
    i, j = jnp.arange(q.shape[2])[:, None], jnp.arange(k.shape[2])[None]
    off = k.shape[2] - q.shape[2]
    t = t if slopes is None else t - slopes[:, None, None] * jnp.abs(i + off - j)
    t = t if bias is None else t + bias
    t = t if mask is None else jnp.where(mask, t, -jnp.inf)
    t = jnp.where(j <= i + off, t, -jnp.inf) if causal else t
    if sinks is not None:
        t = jnp.concatenate([t, jnp.broadcast_to(sinks[:, None, None], (*t.shape[:3], 1))], -1)
    lse = jax.nn.logsumexp(t, -1)
    return jnp.exp(t - lse[..., None])[..., : k.shape[2]] @ v, lse


def test_float64():
    """Values and gradients of all of them together, to the last digits but two."""
    with x64():
        draw = np.random.default_rng(7).standard_normal
        shapes = {"q": (2, 4, 5, 6), "k": (2, 2, 7, 6), "v": (2, 2, 7, 3), "bias": (2, 1, 5, 7), "sinks": (4,)}
        given = {name: jnp.asarray(draw(shape)) for name, shape in shapes.items()}
        mask, slopes = jnp.asarray(draw((2, 1, 5, 7)) > -0.5), jnp.arange(4.0) / 8

        def heddles(given):
            options = {"mask": mask, "alibi_slopes": slopes, "softcap": 2.0, "causal": "bottom_right"}
            return heddle.jax.attention(**given, **options, return_lse=True)

        def jnps(given):
            return formulas(**given, mask=mask, slopes=slopes, softcap=2.0, causal=True)

        def derivatives(function):
            made, back = jax.vjp(function, given)
            return made, back(jax.tree.map(jnp.cos, made))

        same = partial(np.testing.assert_allclose, rtol=1e-13, atol=1e-13)
        jax.tree.map(same, *(jax.jit(partial(derivatives, f))() for f in (heddles, jnps)))

        shapes = {"x": (3, 2, 8), "weight": (5, 8), "bias": (5,), "gamma": (8,), "beta": (8,)}
        rows = {name: jnp.asarray(draw(shape)) for name, shape in shapes.items()}

        def normed(x, weight, bias, gamma, beta):
            z = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
            return (z * gamma + beta) @ weight.T + bias

        def row_derivatives(function):
            made, back = jax.vjp(lambda given: function(**given), rows)
            return made, back(jnp.cos(made))

        jax.tree.map(same, *(jax.jit(partial(row_derivatives, f))() for f in (heddle.jax.norm_linear, normed)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_float64_on_a_gpu():
    """Nobody knows the device before the call runs."""
    with x64():
        q = jax.device_put(np.ones((1, 1, 2, 8)), place("cuda"))
        with pytest.raises(Exception, match="heddle: "):
            jax.block_until_ready(heddle.jax.attention(q, q, q))


# -------------------------------------------------------------------------------------------------- transformations


def arrays_of(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape).astype(np.float32)) for shape in shapes]


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


# ----------------------------------------------------------------------------------------------- nothing in between


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_nothing_is_copied_or_cleared(layout, monkeypatch):
    """The program of a call is the call; that of its gradient has one more, which makes what is asked for alone."""
    q, k, v, dout = (jnp.ones((2, 4, 4, 8)) for _ in range(4))
    run = partial(heddle.jax.attention, layout=layout, causal="top_left")
    text = jax.jit(run).lower(q, k, v).compile().as_text()
    assert text.count("custom-call(") == 1
    for word in ("copy(", "transpose(", "broadcast(", "fusion(", "pad(", "constant("):
        assert word not in text, text

    asked, backward = [], heddle._jax_call.backward
    monkeypatch.setattr(heddle._jax_call, "backward", lambda w, g, names: asked.extend(names) or backward(w, g, names))

    def grads(q, k, v, dout):
        return jax.vjp(lambda q: run(q, k, v), q)[1](dout)

    text = jax.jit(grads).lower(q, k, v, dout).compile().as_text()
    assert text.count("custom-call(") == 2 and "copy(" not in text and "broadcast(" not in text
    assert asked == ["dq"]


def test_no_lse_where_nobody_wants_it():
    q = jnp.ones((1, 2, 3, 8))
    assert "(f32[1,2,3,8]{3,2,1,0}, f32[1,2,3]" not in jax.jit(heddle.jax.attention).lower(q, q, q).compile().as_text()


@pytest.mark.parametrize("empty", [{"b": 0}, {"sq": 0}, {"sk": 0}, {"b": 0, "sk": 0}], ids=str)
def test_nothing_at_all(empty):
    n = {"b": 2, "sq": 3, "sk": 4} | empty
    q, k, v = (jnp.ones((n["b"], 2, n[rows], 8)) for rows in ("sq", "sk", "sk"))
    bias = jnp.ones((n["sq"], n["sk"]))

    def run(q, k, v, bias):
        return heddle.jax.attention(q, k, v, bias=bias, return_lse=True)

    (out, lse), back = jax.vjp(jax.jit(run), q, k, v, bias)
    assert out.shape == q.shape and not out.any() and (lse == -jnp.inf).all()
    for grad, like in zip(back((out, jnp.zeros_like(lse))), (q, k, v, bias), strict=True):
        assert grad.shape == like.shape and not grad.any()
    y, back = jax.vjp(heddle.jax.norm_linear, jnp.ones((0, 3, 8)), jnp.ones((5, 8)))
    assert y.shape == (0, 3, 5) and not back(y)[1].any()


def test_rows_that_see_nothing_and_hidden_nan():
    q, k, v = arrays_of((1, 1, 3, 8), (1, 1, 4, 8), (1, 1, 4, 8))
    hole = np.arange(4)[:, None] == 3
    k, v = np.where(hole, np.nan, k).astype(np.float32), np.where(hole, np.inf, v).astype(np.float32)
    mask = jnp.array([[True, True, True, False], [False] * 4, [True, False, False, False]])
    run = partial(heddle.jax.attention, mask=mask)
    out, grads = jax.jit(lambda *given: (run(*given), jax.grad(lambda *g: run(*g).sum(), (0, 1, 2))(*given)))(q, k, v)
    assert np.isfinite(out).all() and not out[0, 0, 1].any() and all(np.isfinite(g).all() for g in grads)


# ----------------------------------------------------------------------------------------------------------- errors


def test_arguments_are_those_of_heddle():
    for name, own in (("attention", {"layout"}), ("norm_linear", set())):
        theirs = inspect.signature(getattr(heddle, name)).parameters
        ours = inspect.signature(getattr(heddle.jax, name)).parameters
        assert {n: p.default for n, p in ours.items() if n not in own} == {n: p.default for n, p in theirs.items()}
        assert [n for n in ours if n not in own] == list(theirs)
        text = getattr(heddle.jax, name).__doc__
        assert all(word in text for word in ("Args:", "Returns:", "Raises:", "Source:", "float32"))


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
        ((x, weight), {"gamma": jnp.ones(7)}, ValueError, r"gamma has shape \[7\]"),
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


def test_names():
    """heddle.jax is loaded when it is asked for, and is not what a star would import."""
    code = "import heddle, sys; assert 'jax' not in sys.modules; heddle.jax.attention; assert 'jax' in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "jax" not in heddle.__all__


def test_flax_example():
    pytest.importorskip("flax")
    pytest.importorskip("optax")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/jax_train.py"), "--steps", "30"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if "loss" in line]
    assert len(losses) >= 3 and losses[-1] < 0.7 * losses[0], done.stdout


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_activations_of_norm_linear(activation):
    rng = np.random.default_rng(7)
    given = [rng.standard_normal(s).astype("f4") for s in ((2, 4, 6), (5, 6), (5,), (6,), (6,))]
    acts = {"gelu": False, "gelu_tanh": True}

    def plain(x, w, bias, gamma, beta):
        z = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * gamma + beta
        u = z @ w.T + bias
        return jax.nn.silu(u) if activation == "silu" else jax.nn.gelu(u, approximate=acts[activation])

    def of(f):
        return jax.jit(jax.value_and_grad(lambda *t: (f(*t) ** 2).sum(), argnums=tuple(range(5))))(*given)

    ours = of(partial(heddle.jax.norm_linear, activation=activation))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), ours, of(plain))
