# SPDX-License-Identifier: Apache-2.0
"""heddle.jax within jit, grad, vmap and shard_map. The measure is the same call of torch, whose every option
test_attention.py and test_norm_linear.py hold to float64: the kernels are the same, so the bits must be. In float64,
jnp's own formulas and derivatives are a second one, which shares no line with it."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import devices
from jax_help import arrays_of, formulas, jax, jnp, on_the_cpu, x64  # noqa: F401
from test_attention import OPTIONS, inputs

import heddle
import heddle.jax

ROOT = Path(__file__).resolve().parents[2]
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    "norm,full,dtype",
    [("layer", True, "float32"), ("rms", False, "float32"), ("layer", True, "bfloat16"), ("none", False, "float32")],
)
def test_norm_linear(norm, full, dtype, device):
    torch.manual_seed(5)
    sizes = {"x": (2, 3, 40), "weight": (24, 40)} | ({"bias": (24,), "gamma": (40,), "beta": (40,)} if full else {})
    given = {n: torch.randn(s, device=device).to(TYPES[dtype]).requires_grad_() for n, s in sizes.items()}
    seed = torch.randn(2, 3, 24, device=device)
    options = {"norm": norm} | ({} if norm == "none" else {"eps": 1e-3})
    with contextlib.ExitStack() as stack:
        if device == "cuda":
            torch.use_deterministic_algorithms(True)
            stack.callback(torch.use_deterministic_algorithms, False)
        torchs, jaxs = both_ways(
            partial(heddle.jax.norm_linear, **options),
            partial(heddle.norm_linear, **options),
            given,
            [seed],
        )
    if device == "cpu":
        assert_same(torchs, jaxs)
    for ours, theirs in zip(torchs, jaxs, strict=True):
        for t, j in zip(ours, theirs, strict=True):
            assert np.allclose(to_numpy(t), to_numpy(j), rtol=1e-2 if dtype == "bfloat16" else 1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------ float64, by jnp alone


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


def test_float32_bias_beside_bfloat16():
    """A finite number that q's dtype has no room for becomes its least one; the gradient is a cast's."""
    q, k, v = (jnp.asarray(np.random.default_rng(x).normal(size=(1, 1, 3, 8)), jnp.bfloat16) for x in range(3))
    bias = jnp.zeros((3, 3)).at[1].set(jnp.finfo(jnp.float32).min).at[2, 0].set(-jnp.inf)
    o = heddle.jax.attention(q, k, v, bias=bias).astype(jnp.float32)
    mean = v.astype(jnp.float32)[0, 0].mean(0)
    assert jnp.allclose(o[0, 0, 1], mean, atol=1e-2) and jnp.abs(mean).max() > 0.1
    assert not jnp.allclose(o[0, 0, 2], mean, atol=5e-2)
    given = jnp.arange(24.0).reshape(1, 1, 3, 8)
    grad = jax.grad(lambda b: (heddle.jax.attention(q, k, v, bias=b).astype(jnp.float32) * given).sum())(bias)
    assert grad.dtype == jnp.float32 and jnp.abs(grad[1]).max() > 0.1 and grad[2, 0] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float64_bias_of_numpy(dtype):
    """Without 64 bits JAX makes infinity of a finite number that float32 has no room for."""
    assert not jax.config.jax_enable_x64
    q, k, v = (jnp.asarray(np.random.default_rng(x).normal(size=(1, 1, 3, 8)), dtype) for x in range(3))
    bias = np.zeros((3, 3))
    bias[1], bias[2] = np.finfo(np.float64).min, (-np.inf, np.finfo(np.float64).max, np.nan)
    for b in (bias, np.asfortranarray(bias)):
        o = np.asarray(heddle.jax.attention(q, k, v, bias=b).astype(jnp.float32))
        assert np.allclose(o[0, 0, 1], np.asarray(v.astype(jnp.float32))[0, 0].mean(0), atol=1e-2)
        assert np.isnan(o[0, 0, 2]).all()
    bias[2, 2] = 0
    o = np.asarray(heddle.jax.attention(q, k, v, bias=bias).astype(jnp.float32))
    assert np.allclose(o[0, 0, 2], np.asarray(v.astype(jnp.float32))[0, 0, 1], atol=1e-2)


def test_bfloat16_bias_beside_float16():
    """float16's largest number, rounded to bfloat16, is none of float16's."""
    q, k, v = (jnp.asarray(np.random.default_rng(x).normal(size=(1, 1, 3, 8)), jnp.float16) for x in range(3))
    bias = jnp.zeros((3, 3), jnp.bfloat16).at[1].set(jnp.finfo(jnp.bfloat16).min).at[2, 0].set(-jnp.inf)
    o = heddle.jax.attention(q, k, v, bias=bias)
    assert jnp.array_equal(o, heddle.jax.attention(q, k, v, bias=bias.astype(jnp.float32)))
    assert jnp.abs(o[0, 0, 1]).max() > 0.05


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


def test_arguments_are_those_of_heddle():
    for name, own in (("attention", {"layout"}), ("norm_linear", set()), ("norm_linear_prepare", set())):
        theirs = inspect.signature(getattr(heddle, name)).parameters
        ours = inspect.signature(getattr(heddle.jax, name)).parameters
        assert {n: p.default for n, p in ours.items() if n not in own} == {n: p.default for n, p in theirs.items()}
        assert [n for n in ours if n not in own] == list(theirs)
        text = getattr(heddle.jax, name).__doc__
        assert all(word in text for word in ("Args:", "Returns:", "Raises:", "Source:", "float32"))


def test_names():
    """heddle.jax is loaded when it is asked for, and is not what a star would import."""
    code = "import heddle, sys; assert 'jax' not in sys.modules; heddle.jax.attention; assert 'jax' in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "jax" not in heddle.__all__


def test_exported():
    """jax.export wants to be told of the handlers' names, which python.md has; then what was written is the same."""
    rng = np.random.default_rng(3)
    given = [rng.standard_normal(s).astype("f4") for s in ((2, 2, 16, 8), (2, 2, 16, 8), (2, 2, 16, 8), (4, 8))]

    @jax.jit
    def gradients(q, k, v, w):
        def loss(*x):
            return (heddle.jax.norm_linear(heddle.jax.attention(*x[:3], causal=True), x[3]) ** 2).sum()

        return jax.grad(loss, (0, 1, 2, 3))(q, k, v, w)

    page = (ROOT / "docs/python.md").read_text()
    export = pytest.importorskip("jax.export")
    with pytest.raises(ValueError, match="custom calls"):
        export.export(gradients, platforms=["cpu"])(*given)
    names = ["heddle_attention", "heddle_norm_linear"]
    assert all(f'"{name}"' in page for name in names)
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in names]
    exported = export.export(gradients, platforms=["cpu"], disabled_checks=checks)(*given)
    if importlib.util.find_spec("flatbuffers"):  # which JAX wants to write it as bytes
        exported = export.deserialize(exported.serialize())
    with jax.default_device(jax.devices("cpu")[0]):
        for ours, theirs in zip(exported.call(*given), gradients(*given), strict=True):
            np.testing.assert_array_equal(ours, theirs)


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


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "geglu", "geglu_tanh", "swiglu"])
def test_activations_of_norm_linear(activation):
    rng = np.random.default_rng(7)
    gated = "glu" in activation
    rows = 10 if gated else 5
    given = [rng.standard_normal(s).astype("f4") for s in ((2, 4, 6), (rows, 6), (rows,), (6,), (6,))]

    def plain(x, w, bias, gamma, beta):
        z = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * gamma + beta
        u = z @ w.T + bias
        u, up = jnp.split(u, 2, -1) if gated else (u, 1)
        return (jax.nn.gelu(u, approximate="tanh" in activation) if "ge" in activation else jax.nn.silu(u)) * up

    def of(f):
        return jax.jit(jax.value_and_grad(lambda *t: (f(*t) ** 2).sum(), argnums=tuple(range(5))))(*given)

    close = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4)
    ours = partial(heddle.jax.norm_linear, activation=activation)
    jax.tree.map(close, of(ours), of(plain))
    close(jax.vmap(ours, (0, None, None, None, None))(*given), plain(*given))
    close(ours(*given), plain(*given))
    if gated:
        with pytest.raises(ValueError, match="weight has 9 rows, but a gate"):
            ours(given[0], given[1][:9])


@pytest.mark.parametrize("activation", [None, "silu"])
def test_return_norm_of_norm_linear(activation):
    rng = np.random.default_rng(9)
    given = [rng.standard_normal(s).astype("f4") for s in ((2, 4, 6), (5, 6), (6,), (6,))]

    def ours(x, w, gamma, beta):
        return heddle.jax.norm_linear(x, w, None, gamma, beta, activation=activation, return_norm=True)

    def plain(x, w, gamma, beta):
        z = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * gamma + beta
        u = z @ w.T
        return jax.nn.silu(u) if activation else u, z

    close = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4)
    for weights in ((1, 1), (0, 1), (1, 0)):

        def of(f, weights=weights):
            def loss(*t):
                parts = [part for n, part in zip(weights, f(*t), strict=True) if n]
                return sum((part**2 * (1 + np.arange(part.shape[-1]))).sum() for part in parts)

            return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*given)

        jax.tree.map(close, of(ours), of(plain))
    mapped = jax.vmap(ours, (0, None, None, None))(*given)
    jax.tree.map(close, mapped, plain(*given))
    with pytest.raises(ValueError, match="z is x"):
        heddle.jax.norm_linear(given[0], given[1], norm="none", return_norm=True)


@pytest.mark.parametrize("norm,activation", [("layer", "silu"), ("none", None)])
def test_residuals_of_norm_linear(norm, activation):
    rng = np.random.default_rng(8)
    given = [rng.standard_normal(s).astype("f4") for s in ((2, 4, 6), (5, 6), (2, 4, 5))]

    def ours(x, w, residual):
        return heddle.jax.norm_linear(x, w, norm=norm, activation=activation, residual=residual)

    def plain(x, w, residual):
        return heddle.jax.norm_linear(x, w, norm=norm, activation=activation) + residual

    def of(f, wanted):
        return jax.jit(jax.value_and_grad(lambda *t: (f(*t) ** 2).sum(), argnums=wanted))(*given)

    for wanted in ((0, 1, 2), (2,), (0,)):
        close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
        jax.tree.map(close, of(ours, wanted), of(plain, wanted))
    for dims in ((0, None, 0), (0, None, None), (None, None, 0)):
        args = [t[0] if dim is None and t.ndim == 3 else t for t, dim in zip(given, dims, strict=True)]
        np.testing.assert_allclose(jax.vmap(ours, dims)(*args), jax.vmap(plain, dims)(*args), rtol=1e-5, atol=1e-5)
