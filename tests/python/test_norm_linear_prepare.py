# SPDX-License-Identifier: Apache-2.0
"""heddle.norm_linear_prepare: the same bits with what it made as without, or an error that names it."""

import numpy as np
import pytest
import torch
from conftest import devices

import heddle
from heddle._options import activation_of, norm_of

K, N = 40, 48
each_device = pytest.mark.parametrize("device", devices())
OPTIONS = [
    {},
    {"norm": "rms", "activation": "gelu"},
    {"norm": "none"},
    {"activation": "swiglu"},
    {"return_norm": True, "tf32": True},
]


def weights(device="cpu", dtype=torch.float32, norm="layer", k=K, **_):
    """weight, bias, and gamma and beta where there are some."""
    torch.manual_seed(0)
    given = [torch.randn(N, k), torch.randn(N)] + ([] if norm == "none" else [torch.randn(k), torch.randn(k)])
    return [x.to(device, dtype) for x in given]


@each_device
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_same_bits(device, dtype, options):
    if dtype == torch.float64 and device != "cpu":
        pytest.skip("float64 is the reference's")
    given = weights(device, dtype, **options)
    prepared = heddle.norm_linear_prepare(*given, **options)
    assert prepared.dtype == torch.uint8 and prepared.dim() == 1 and prepared.device == given[0].device
    assert (prepared.numel() == 0) == (dtype == torch.float64) or device != "cpu"
    for m in (0, 1, 9, 70):
        x = torch.randn(2, m, K, device=device).to(dtype)
        for residual in (None, torch.randn(2, m, N // (2 if "swiglu" in options.values() else 1)).to(x)):
            made = heddle.norm_linear(x, *given, residual=residual, prepared=prepared, **options)
            plain = heddle.norm_linear(x, *given, residual=residual, **options)
            for ours, theirs in zip(*(t if isinstance(t, tuple) else (t,) for t in (made, plain)), strict=True):
                assert torch.equal(ours, theirs)
        apart = torch.randn(m, 2, K, device=device).to(dtype).transpose(0, 1)
        made = heddle.norm_linear(apart, *given, prepared=prepared, **options)
        plain = heddle.norm_linear(apart, *given, **options)
        assert torch.equal(*(t[0] if isinstance(t, tuple) else t for t in (made, plain)))


@each_device
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("needs", [False, True])
def test_opcheck(device, options, needs):
    """All checks, the same bytes in each call among them; of what requires a gradient, too. A GPU leaves what pads the
    buffer unwritten, so that the bytes of two calls are not compared there."""
    given = [x.requires_grad_(needs) for x in weights(device, norm=options.get("norm", "layer"))]
    activation = activation_of(options.get("activation"))
    numbers = (norm_of(options.get("norm", "layer")), options.get("tf32", False), activation)
    args = (*given, *[None] * (4 - len(given)), *numbers, options.get("return_norm", False))
    names = ("test_schema", "test_autograd_registration", "test_faketensor")
    more = {"test_utils": names} if device == "cuda" else {}
    torch.library.opcheck(torch.ops.heddle.norm_linear_prepare.default, args, **more)


def test_ways_of_torch():
    given, x = weights(), torch.randn(20, K)
    prepared, plain = heddle.norm_linear_prepare(*given), heddle.norm_linear(x, *given)
    run = torch.compile(lambda x, *t: heddle.norm_linear(x, *t[:-1], prepared=t[-1]), backend="aot_eager")
    assert torch.equal(run(x, *given, prepared), plain)
    both = torch.compile(
        lambda x, *t: heddle.norm_linear(x, *t, prepared=heddle.norm_linear_prepare(*t)), backend="aot_eager"
    )
    assert torch.equal(both(x, *given), plain)
    many = torch.func.vmap(lambda x: heddle.norm_linear(x, *given, prepared=prepared))(torch.stack((2 * x, x)))
    torch.testing.assert_close(many[1], plain)
    gradients = []
    for kept in (None, prepared):
        wanting = [t.clone().requires_grad_() for t in (x, *given)]
        heddle.norm_linear(*wanting, prepared=kept).sum().backward()
        gradients.append([t.grad for t in wanting])
    assert all(map(torch.equal, *gradients))
    wanting = [t.clone().requires_grad_() for t in given]
    assert not heddle.norm_linear_prepare(*wanting).requires_grad


def fails(error, text, x, given, prepared, **options):
    with pytest.raises(error, match=text):
        heddle.norm_linear(x, *given, prepared=prepared, **options)


@each_device
def test_errors(device):
    given, x = weights(device), torch.randn(20, K, device=device)
    prepared = heddle.norm_linear_prepare(*given)
    fails(ValueError, "prepared", x, given, prepared[:-64])
    fails(ValueError, "prepared", x, given, prepared[:-1])
    fails(ValueError, "prepared", x, given, prepared[None])
    fails(TypeError, "prepared", x, given, prepared.float())
    fails(TypeError, r"prepared must be a torch\.Tensor", x, given, prepared.tolist())
    fails((ValueError, RuntimeError), "prepared", x, given, torch.cat((prepared[:1], prepared))[1:])
    with torch.autocast(device, torch.bfloat16):
        fails(ValueError, "prepared is given, but autocast makes another weight", x, given, prepared)
    wide = weights(device, k=K + 8)
    fails((ValueError, RuntimeError), "prepared", torch.randn(20, K + 8, device=device), wide, prepared)
    if device == "cpu":
        fails((ValueError, RuntimeError), "prepared", x, given, prepared.to("meta"))
        fails((ValueError, RuntimeError), "prepared is of another weight", x, [2 * given[0], *given[1:]], prepared)
        fails((ValueError, RuntimeError), "prepared", x, given, prepared, activation="swiglu")
        for options in ({"activation": "gelu"}, {"norm": "rms"}):  # for which the CPU prepares the same
            assert torch.equal(
                heddle.norm_linear(x, *given, prepared=prepared, **options), heddle.norm_linear(x, *given, **options)
            )
    else:
        fails(ValueError, "prepared is on", x, given, prepared.cpu())
    with pytest.raises(ValueError, match="weight has 1 dimensions, but must have 2"):
        heddle.norm_linear_prepare(given[1])
    with pytest.raises(ValueError, match="gamma has shape"):
        heddle.norm_linear_prepare(*given[:2], given[2][:-1])
    with pytest.raises(ValueError, match="return_norm is given, but with norm = 'none' z is x"):
        heddle.norm_linear_prepare(given[0], norm="none", return_norm=True)
    with pytest.raises(TypeError, match=r"bias must be a torch\.Tensor"):
        heddle.norm_linear_prepare(given[0], 3.0)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_arrays(options):
    given = [t.numpy() for t in weights(**options)]
    x = np.random.default_rng(0).standard_normal((20, K), dtype=np.float32)
    prepared = heddle.norm_linear_prepare(*given, **options)
    assert prepared.dtype == np.uint8 and prepared.ctypes.data % 64 == 0
    tensors = heddle.norm_linear_prepare(*map(torch.from_numpy, given), **options)
    np.testing.assert_array_equal(prepared, tensors.numpy())
    made = heddle.norm_linear(x, *given, prepared=prepared, **options)
    plain = heddle.norm_linear(x, *given, **options)
    for ours, theirs in zip(*(t if isinstance(t, tuple) else (t,) for t in (made, plain)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_errors_of_arrays():
    given, x = [t.numpy() for t in weights()], np.ones((20, K), np.float32)
    prepared = heddle.norm_linear_prepare(*given)
    fails(ValueError, "prepared", x, given, prepared[:-64])
    fails(ValueError, "prepared has 2 dimensions, but must have 1", x, given, prepared[None])
    fails(TypeError, "prepared is float32, but must be uint8", x, given, prepared.astype(np.float32))
    fails(TypeError, "prepared must be an array", x, given, 3)
    fails((ValueError, RuntimeError), "prepared is of another weight", x, [2 * given[0], *given[1:]], prepared)
    with pytest.raises(ValueError, match="weight has 1 dimensions, but must have 2"):
        heddle.norm_linear_prepare(given[1])
    with pytest.raises(TypeError, match="weight is int32"):
        heddle.norm_linear_prepare(given[0].astype(np.int32))
    with pytest.raises(ValueError, match="gamma has shape"):
        heddle.norm_linear_prepare(*given[:2], given[2][:-1])


def test_arrays_of_jax():
    jax = pytest.importorskip("jax")
    given, x = [jax.numpy.asarray(t.numpy()) for t in weights()], jax.numpy.ones((20, K))
    prepared = heddle.norm_linear_prepare(*given)
    made = heddle.norm_linear(x, *given, prepared=prepared)
    np.testing.assert_array_equal(made, heddle.norm_linear(x, *given))
    np.testing.assert_array_equal(heddle.jax.norm_linear(x, *given, prepared=prepared), made)
