# SPDX-License-Identifier: Apache-2.0
"""heddle.jax.norm_linear_prepare, and norm_linear with what it made: the same bits as without, or an error that names
it."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import devices
from jax_help import jax, jnp, on_the_cpu, x64  # noqa: F401

import heddle
import heddle.jax

K, N = 40, 48
HEADER = 320  # bytes in front of the CPU's panels
OPTIONS = [{}, {"norm": "rms", "activation": "gelu"}, {"norm": "none"}, {"activation": "swiglu"}, {"return_norm": True}]
each_device = pytest.mark.parametrize("device", devices())


def place(device):
    try:
        return jax.devices(device)[0]
    except RuntimeError:
        pytest.skip("this JAX has no GPU")


def given_of(dtype=jnp.float32, norm="layer", device="cpu", n=N, **_):
    """x, and weight, bias, and gamma and beta where there are some."""
    rng = np.random.default_rng(0)
    shapes = [(2, 35, K), (n, K), (n,)] + ([] if norm == "none" else [(K,), (K,)])
    x, *weights = (jax.device_put(jnp.asarray(rng.standard_normal(s), dtype), place(device)) for s in shapes)
    return x, weights


def assert_same(made, plain):
    jax.tree.map(np.testing.assert_array_equal, made, plain)


@each_device
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_same_bits(device, dtype, options):
    x, weights = given_of(dtype, device=device, **options)
    run, prepare = (partial(f, **options) for f in (heddle.jax.norm_linear, heddle.jax.norm_linear_prepare))
    plain, prepared = jax.jit(run)(x, *weights), prepare(*weights)
    assert prepared.dtype == jnp.uint8 and prepared.ndim == 1 and prepared.devices() == x.devices()
    of_torch = heddle.norm_linear_prepare(
        *(torch.from_numpy(np.array(t, np.float32)).to(device, getattr(torch, dtype)) for t in weights), **options
    )
    if device == "cpu":  # on a GPU what lies between two arrays of it is nobody's
        assert_same(prepared, of_torch.numpy())
    as_torch_made_it = jax.device_put(jnp.asarray(of_torch.cpu().numpy()), place(device))
    assert prepared.size > 0 or device != "cpu"
    residual = jnp.ones_like(plain[0] if "return_norm" in options else plain)
    for way in (run, jax.jit(run)):
        assert_same(way(x, *weights, prepared=prepared), plain)
        assert_same(way(x, *weights, prepared=as_torch_made_it), plain)
        assert_same(way(x, *weights, prepared=prepared, residual=residual), way(x, *weights, residual=residual))
        assert_same(way(x[:, :0], *weights, prepared=prepared), run(x[:, :0], *weights))
        assert_same(way(x[0, :1], *weights, prepared=prepared), run(x[0, :1], *weights))
    with jax.default_device(place(device)):  # of which the size is, where nobody has placed the weight yet
        assert_same(run(x, *weights, prepared=jax.jit(prepare)(*weights)), plain)
        assert_same(jax.jit(lambda x, *w: run(x, *w, prepared=prepare(*w)))(x, *weights), plain)


def test_it_is_read():
    """Other panels behind the header are another weight."""
    x, weights = given_of()
    prepared = heddle.jax.norm_linear_prepare(*weights)
    zeros = prepared.at[HEADER:].set(0)
    made = jax.jit(heddle.jax.norm_linear)(x, *weights, prepared=zeros)
    np.testing.assert_allclose(made, jnp.broadcast_to(weights[1], made.shape))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients(options):
    """Backward does not look at it, and it has none."""
    x, weights = given_of(**options)

    def loss(x, *weights, prepare=None):
        prepared = prepare and prepare(*weights)
        made = heddle.jax.norm_linear(x, *weights, prepared=prepared, **options)
        return sum((t**2).sum() for t in (made if isinstance(made, tuple) else (made,)))

    every = tuple(range(1 + len(weights)))
    plain = jax.jit(jax.value_and_grad(loss, every))(x, *weights)
    prepare = partial(heddle.jax.norm_linear_prepare, **options)
    before = prepare(*weights)
    for kept in (prepare, lambda *_: before):
        assert_same(jax.jit(jax.value_and_grad(partial(loss, prepare=kept), every))(x, *weights), plain)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(partial(loss, prepare=prepare), (x, *weights), (x, *weights))
    tangent = jax.jvp(prepare, (weights[0],), (weights[0],))[1]
    assert tangent.dtype == jax.dtypes.float0


def test_vmap():
    x, weights = given_of()
    prepared = heddle.jax.norm_linear_prepare(*weights)
    run = heddle.jax.norm_linear
    folded = jax.vmap(lambda x: run(x, *weights, prepared=prepared))
    assert "scan" not in str(jax.make_jaxpr(folded)(x))
    assert_same(folded(x), run(x, *weights))
    # A weight of each, and what is prepared of it.
    many = [jnp.stack((t, 2 * t)) for t in weights]
    each = jax.jit(jax.vmap(heddle.jax.norm_linear_prepare))(*many)
    assert_same(each, jnp.stack([heddle.jax.norm_linear_prepare(*(t[i] for t in many)) for i in range(2)]))
    made = jax.jit(jax.vmap(lambda x, kept, *w: run(x, *w, prepared=kept)))(x, each, *many)
    assert_same(made, jnp.stack([run(x[i], *(t[i] for t in many)) for i in range(2)]))


def test_shard_map():
    if len(jax.devices("cpu")) < 2:
        pytest.skip("JAX was started with one device")
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices("cpu")[:2], axis_types=(jax.sharding.AxisType.Auto,))
    x, weights = jax.tree.map(np.asarray, given_of(n=2 * N))  # which lie nowhere yet
    here, everywhere = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
    columns = (here, here, everywhere, everywhere)  # of y, by the weight's rows

    def prepare(*weights):
        return heddle.jax.norm_linear_prepare(*weights)

    def run(x, prepared, *weights):
        return heddle.jax.norm_linear(x, *weights, prepared=prepared)

    each = jax.jit(jax.shard_map(prepare, mesh=mesh, in_specs=columns, out_specs=here))(*weights)
    of_y = jax.sharding.PartitionSpec(None, None, "x")
    parts = jax.shard_map(run, mesh=mesh, in_specs=(everywhere, here, *columns), out_specs=of_y)
    made = jax.jit(parts)(x, each, *weights)
    halves = [heddle.jax.norm_linear(x, weights[0][n], weights[1][n], *weights[2:]) for n in (slice(N), slice(N, None))]
    assert_same(made, jnp.concatenate(halves, -1))


def test_float64():
    with x64():
        x, weights = given_of(jnp.float64)
        prepared = heddle.jax.norm_linear_prepare(*weights)
        assert prepared.shape == (0,) and prepared.dtype == jnp.uint8
        assert_same(heddle.jax.norm_linear(x, *weights, prepared=prepared), heddle.jax.norm_linear(x, *weights))


def test_errors():
    x, weights = given_of()
    prepare, run = heddle.jax.norm_linear_prepare, heddle.jax.norm_linear
    prepared = prepare(*weights)
    for wrong, kind, text in (
        (prepared[:-64], ValueError, f"prepared has {prepared.size - 64} bytes, .* {prepared.size} on a CPU"),
        (prepared[None], ValueError, "prepared has 2 dimensions, but must have 1"),
        (prepared.astype("float32"), TypeError, "prepared is float32, but must be uint8"),
        (prepared.tolist(), TypeError, "prepared must be an array of JAX or NumPy"),
    ):
        for way in (run, lambda *args, **kept: jax.eval_shape(run, *args, **kept)):
            if way is run or not isinstance(wrong, list):
                with pytest.raises(kind, match=text):
                    way(x, *weights, prepared=wrong)
    # What only the data say is an error when the call runs.
    for args in ((x, 2 * weights[0], *weights[1:]), (x, weights[0][::-1], *weights[1:])):
        with pytest.raises(Exception, match="prepared is of another weight") as caught:
            jax.block_until_ready(jax.jit(run)(*args, prepared=prepared))
        assert "INVALID_ARGUMENT" in str(caught.value)
    for args, options, kind, text in (
        ((weights[1],), {}, ValueError, r"weight has 1 dimensions, but must have 2"),
        ((*weights[:2], weights[2][:-1]), {}, ValueError, "gamma has shape"),
        ((*weights[:2], weights[2].astype("bfloat16")), {}, TypeError, "gamma is bfloat16"),
        ((weights[0],), {"norm": "batch"}, ValueError, "norm = 'batch'"),
        ((weights[0],), {"norm": "none", "return_norm": True}, ValueError, "z is x"),
        ((weights[0].astype("int32"),), {}, TypeError, "weight is int32|x is int32"),
        ((weights[0].tolist(),), {}, TypeError, "weight must be an array"),
    ):
        with pytest.raises(kind, match=text):
            prepare(*args, **options)


def test_the_handler_believes_nobody():
    """What was prepared for another device, or reaches XLA by another way, is refused before a byte is touched."""
    _, weights = given_of()
    size = heddle.jax.norm_linear_prepare(*weights).size
    description = {"dtype": 0, "norm": 0, "m": 0, "k": K, "n": N}
    places = list(heddle._C.fields("norm_linear"))
    x = jnp.ones((9, K))

    def call(which, names, arrays, result, **more):
        packed = np.frombuffer(heddle._C.pack("norm_linear", description | more), np.int64)
        fields = np.array([which, *map(places.index, names)])
        made = jax.ffi.ffi_call("heddle_norm_linear", result)(*arrays, description=packed, fields=fields)
        return jax.block_until_ready(made)

    def prepare(bytes_, dtype=jnp.uint8, which=2, names=("w", "prepared")):
        return call(which, names, (weights[0],), jax.ShapeDtypeStruct((bytes_,), dtype))

    kept = prepare(size)
    assert_same(kept, heddle.jax.norm_linear_prepare(weights[0]))
    flags = {"features": heddle._C.features()["prepared"], "m": 9}

    def run(prepared, bytes_=size):
        y = jax.ShapeDtypeStruct((9, N), jnp.float32)
        return call(0, ("x", "w", "prepared", "y"), (x, weights[0], prepared), y, prepared_bytes=bytes_, **flags)

    assert_same(run(kept), heddle.jax.norm_linear(x, weights[0]))
    for wrong, text in (
        (lambda: prepare(size + 64), f"prepared has {size + 64} bytes, but of this problem {size} are prepared"),
        (lambda: prepare(64), f"prepared has 64 bytes, but of this problem {size} are prepared"),
        (lambda: prepare(size, jnp.int8), "prepared has .* elements of XLA's type 2, but must have 0 of type 6"),
        (lambda: prepare(size, which=3), "there is no pass number 3"),
        (lambda: prepare(size, which=-1), "there is no pass number -1"),
        (lambda: prepare(size, names=("w", "y")), "y is no result of this pass"),
        (lambda: prepare(size, which=0), "prepared is no result of this pass"),
        (lambda: run(kept[:-1]), f"prepared has {size - 1} elements .* but must have {size}"),
        (lambda: run(kept, size - 1), f"prepared_bytes = {size - 1}, but of this problem {size} are prepared"),
        (lambda: run(kept[:0], 0), f"prepared_bytes = 0, but of this problem {size} are prepared"),
    ):
        with pytest.raises(Exception, match=text):
            wrong()


def test_another_device(monkeypatch):
    """A traced weight is taken to be where JAX runs what nobody has placed."""
    _, weights = given_of()
    sizes = {False: heddle.jax.norm_linear_prepare(*weights).size, True: 4096}
    monkeypatch.setattr(heddle.jax._jax_call, "_prepared_bytes", lambda description, cuda: sizes[cuda])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for default, cuda in ((None, True), (jax.devices("cpu")[0], False), ("cpu", False), ("cuda", True)):
        with monkeypatch.context() as patch:
            patch.setattr(heddle.jax.jax, "config", SimpleNamespace(jax_default_device=default))
            traced = jax.eval_shape(lambda w: heddle.jax.norm_linear_prepare(w), weights[0])
        assert traced.shape == (sizes[cuda],)
    assert heddle.jax.norm_linear_prepare(weights[0]).size == sizes[False]  # it is on the CPU
    x = jnp.ones((9, K))
    for good in sizes.values():
        jax.eval_shape(heddle.jax.norm_linear, x, weights[0], prepared=jnp.zeros(good, jnp.uint8))
    with pytest.raises(
        ValueError, match=f"has 64 bytes, but of this problem {sizes[False]} on a CPU and 4096 on a GPU"
    ):
        heddle.jax.norm_linear(x, weights[0], prepared=jnp.zeros(64, jnp.uint8))
    with pytest.raises(Exception, match="prepared_bytes = 4096, but of this problem"):
        jax.block_until_ready(heddle.jax.norm_linear(x, weights[0], prepared=jnp.zeros(4096, jnp.uint8)))
