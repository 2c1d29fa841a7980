# SPDX-License-Identifier: Apache-2.0
"""heddle.norm_linear for torch tensors, and the report of origins.md D."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, devices, exact, plain_norm_linear

import heddle


def check_derivatives(run, given):
    """First and second derivatives in both modes, and vmap over the first argument and over its gradient."""
    assert torch.autograd.gradcheck(run, given, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, given, check_fwd_over_rev=True)
    batched = torch.func.vmap(lambda x: run(x, *given[1:]))(given[0].detach())
    assert torch.allclose(batched, run(*given))
    rows = torch.func.vmap(torch.func.grad(lambda x: run(x, *given[1:]).sum()))(given[0].detach())
    assert torch.allclose(rows, torch.autograd.grad(run(*given).sum(), given[0])[0])


def check_both_passes(ours, plain, leaves):
    """y of ours and every gradient are as good as plain's; returns y, a random gradient of it, and those of leaves."""
    y = ours(**leaves)
    dy = torch.randn_like(y)
    grads = torch.autograd.grad(y, list(leaves.values()), dy)
    exacts = {name: exact(t) for name, t in leaves.items()}
    truth, eager = plain(**exacts), plain(**leaves)
    truth_grads = torch.autograd.grad(truth, list(exacts.values()), exact(dy))
    eager_grads = torch.autograd.grad(eager, list(leaves.values()), dy)
    assert y.dtype == dy.dtype == leaves["x"].dtype and y.is_contiguous()
    assert_close("y", y, truth, eager)
    for name, a, b, c in zip(leaves, grads, truth_grads, eager_grads, strict=True):
        assert a.dtype == y.dtype
        assert_close("d" + name, a, b, c)
    return y, dy, grads


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("given", ["", "bias", "gamma", "bias gamma beta", "beta"])
@pytest.mark.parametrize("shape", [(33,), (7, 33), (2, 3, 33)], ids=str)
def test_both_passes(shape, given, norm, dtype, device):
    torch.manual_seed(0)
    x = (torch.randn(shape, device=device) * 2 + 3).to(dtype).requires_grad_()
    leaves = {"x": x, "weight": (torch.randn(17, 33, device=device) / 6).to(dtype).requires_grad_()}
    for name in given.split():
        size = 17 if name == "bias" else 33
        leaves[name] = (torch.randn(size, device=device) + 0.5).to(dtype).requires_grad_()
    check_both_passes(
        functools.partial(heddle.norm_linear, norm=norm, eps=1e-3),
        functools.partial(plain_norm_linear, norm=norm, eps=1e-3),
        leaves,
    )


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("affine", [True, False])
def test_gradcheck(norm, affine):
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 6), (4, 6), (4,)))
    vectors = [torch.randn(6, dtype=torch.float64, requires_grad=True) for _ in range(2)] if affine else []
    assert torch.autograd.gradcheck(lambda *given: heddle.norm_linear(*given, norm=norm), (x, weight, bias, *vectors))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 20)[:, :9],
        lambda: torch.randn(3, 4, 20)[:, :, :9],
        lambda: torch.randn(4, 3, 9).transpose(0, 1),
        lambda: torch.randn(9).expand(5, 9),
        lambda: torch.randn(9, 4).T,
        lambda: torch.randn(0, 9),
        lambda: torch.randn(2, 0, 9),
    ],
)
def test_layouts(make):
    x = make().requires_grad_()
    weight = torch.randn(5, 20)[:, :9].requires_grad_()
    y = heddle.norm_linear(x, weight)
    expected = plain_norm_linear(x, weight)
    assert torch.allclose(y, expected, atol=1e-5)
    dy = torch.randn(y.shape)
    for got, want in zip(
        torch.autograd.grad(y, (x, weight), dy), torch.autograd.grad(expected, (x, weight), dy), strict=True
    ):
        assert torch.allclose(got, want, atol=1e-4)


def test_large_mean_does_not_cancel():
    torch.manual_seed(0)
    x = torch.randn(64, 256) + 1000
    weight = torch.randn(32, 256) / 16
    y = heddle.norm_linear(x, weight)
    truth = plain_norm_linear(x.double(), weight.double())
    assert (y - truth).abs().max() < 1e-3


@pytest.mark.parametrize("device", devices())
def test_the_puzzle(device):
    """origins.md D: the true values, which its own formulas missed."""
    torch.manual_seed(42)
    x = torch.randn(4, 4, 8).to(device).requires_grad_()
    weight = (0.02 * torch.randn(16, 8)).to(device).requires_grad_()
    gamma, beta, bias = (t.to(device).requires_grad_() for t in (torch.ones(8), torch.zeros(8), torch.zeros(16)))
    y = heddle.norm_linear(x, weight, bias, gamma, beta)
    y.backward(torch.ones_like(y))
    expected = {
        "x": (x[0, 0], [1.9269153, 1.4872841, 0.9007172, -2.1055212, 0.67841846, -1.2345449, -0.04306748, -1.604667]),
        "y": (y[0, 0, :4], [0.046287, -0.055208, -0.024811, -0.05856]),
        "dx": (x.grad[0, 0], [0.024315, 0.086069, -0.091481, -0.037464, -0.072742, -0.005885, 0.017093, 0.080095]),
        "dgamma": (gamma.grad, [0.026468, 0.376851, 0.356475, 0.07166, 0.040088, 0.199426, -0.169157, 0.193167]),
        "dbeta": (beta.grad, [-0.063771, 1.513258, -2.214776, 0.306764, -1.697501, 0.635861, 0.63235, 2.726165]),
        "dW": (weight.grad[9], [-6.640759, 3.984529, -2.575246, 3.737612, -0.377858, 5.018097, -4.280079, 1.133704]),
        "db": (bias.grad, [16.0] * 16),
    }
    for name, (got, want) in expected.items():
        assert torch.allclose(got.cpu(), torch.tensor(want), atol=2e-6), name
    assert x.grad.sum(-1).abs().max() < 1e-5


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", [(33,), (2, 3, 33), (150, 72)], ids=str)
def test_no_norm(shape, with_bias, dtype, device):
    torch.manual_seed(0)
    leaves = {"x": (torch.randn(shape, device=device) * 2 + 3).to(dtype)}
    leaves["weight"] = (torch.randn(17, shape[-1], device=device) / 6).to(dtype)
    if with_bias:
        leaves["bias"] = torch.randn(17, device=device).to(dtype)
    leaves = {name: t.requires_grad_() for name, t in leaves.items()}
    plain = functools.partial(plain_norm_linear, norm="none")
    check_both_passes(functools.partial(heddle.norm_linear, norm="none"), plain, leaves)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_no_norm_has_all_derivatives(activation):
    torch.manual_seed(2)
    given = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 6), (4, 6), (4,))]

    def run(*t):
        return heddle.norm_linear(*t, norm="none", activation=activation)

    check_derivatives(run, given)


def test_no_norm_elsewhere():
    torch.manual_seed(3)
    layer = heddle.nn.NormLinear(12, 20, norm="none", activation="gelu")
    assert layer.gamma is layer.beta is None
    x = torch.randn(5, 12, requires_grad=True)
    want = F.gelu(F.linear(x, layer.weight, layer.bias))
    compiled, inputs = torch.compile(layer, fullgraph=True), [x, *layer.parameters()]
    assert torch.allclose(compiled(x), want, atol=1e-5)
    grads = torch.autograd.grad(compiled(x).square().sum(), inputs)
    for got, expected in zip(grads, torch.autograd.grad(want.square().sum(), inputs), strict=True):
        assert torch.allclose(got, expected, atol=1e-4)
    args = (x.detach(), layer.weight.detach(), None, None, None, 0.0, 2)
    torch.library.opcheck(torch.ops.heddle.norm_linear.default, args)
    arrays = [t.detach().numpy() for t in inputs]
    assert np.allclose(heddle.norm_linear(*arrays, norm="none", activation="gelu"), want.detach().numpy(), atol=1e-5)
    dy = np.ones((5, 20), "f4")
    made = heddle.norm_linear_backward(dy, *arrays[:2], norm="none")
    assert set(made) == {"dx", "dweight", "dbias"}
    assert np.allclose(made["dx"], dy @ arrays[1], atol=1e-5) and np.allclose(made["dweight"], dy.T @ arrays[0])
    for vector in ("gamma", "beta"):
        with pytest.raises(ValueError, match=f"{vector} is given, but norm is HEDDLE_NO_NORM"):
            heddle.norm_linear(*arrays[:2], norm="none", **{vector: arrays[0][0]})
    with pytest.raises(ValueError, match="no variance"):
        heddle.nn.NormLinear(4, 3, norm="none", eps=1e-6)


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda u: F.gelu(u, approximate="tanh"),
    "silu": F.silu,
    "geglu": lambda u: F.gelu(u.chunk(2, -1)[0]) * u.chunk(2, -1)[1],
    "geglu_tanh": lambda u: F.gelu(u.chunk(2, -1)[0], approximate="tanh") * u.chunk(2, -1)[1],
    "swiglu": lambda u: F.silu(u.chunk(2, -1)[0]) * u.chunk(2, -1)[1],
}


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(3, 33), (2, 40, 72)], ids=str)
def test_activations(shape, activation, dtype, device):
    torch.manual_seed(1)
    k, act = shape[-1], ACTIVATIONS[activation]
    leaves = {
        "x": (torch.randn(shape, device=device) * 2 + 1).to(dtype),
        "weight": (torch.randn(24, k, device=device) / k**0.5 * 2).to(dtype),
        "bias": torch.randn(24, device=device).to(dtype),
        "gamma": (torch.randn(k, device=device) + 0.5).to(dtype),
        "beta": torch.randn(k, device=device).to(dtype),
    }
    leaves = {name: t.requires_grad_() for name, t in leaves.items()}
    ours = functools.partial(heddle.norm_linear, activation=activation)
    y, *_ = check_both_passes(ours, lambda **given: act(plain_norm_linear(**given)), leaves)
    with torch.no_grad():
        assert torch.equal(ours(**leaves), y)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_have_all_derivatives(activation):
    torch.manual_seed(2)
    given = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 6), (4, 6), (4,), (6,), (6,))]

    def run(*t):
        return heddle.norm_linear(*t, activation=activation)

    check_derivatives(run, given)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "norm,activation", [("layer", None), ("rms", "silu"), ("none", None), ("none", "gelu"), ("rms", "swiglu")]
)
@pytest.mark.parametrize("shape", [(3, 33), (2, 40, 72)], ids=str)
def test_residuals(shape, norm, activation, dtype, device):
    torch.manual_seed(1)
    k, act = shape[-1], ACTIVATIONS.get(activation, lambda u: u)
    leaves = {
        "x": (torch.randn(shape, device=device) * 2 + 1).to(dtype),
        "weight": (torch.randn(24, k, device=device) / k**0.5).to(dtype),
        "bias": torch.randn(24, device=device).to(dtype),
        "residual": torch.randn(*shape[:-1], 12 if activation == "swiglu" else 24, device=device).to(dtype),
    }
    leaves = {name: t.requires_grad_() for name, t in leaves.items()}

    def plain(residual, **given):
        return act(plain_norm_linear(**given, norm=norm)) + residual

    y, dy, grads = check_both_passes(
        functools.partial(heddle.norm_linear, norm=norm, activation=activation), plain, leaves
    )
    assert torch.equal(grads[-1], dy)
    frozen = {name: t.detach() for name, t in leaves.items()} | {"residual": leaves["residual"]}
    alone = heddle.norm_linear(**frozen, norm=norm, activation=activation)
    assert torch.equal(alone, y)
    assert torch.equal(torch.autograd.grad(alone, leaves["residual"], dy)[0], dy)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm,activation", [("layer", None), ("rms", "silu"), ("layer", "geglu")])
@pytest.mark.parametrize("shape", [(3, 33), (2, 40, 72)], ids=str)
def test_return_norm(shape, norm, activation, dtype, device):
    torch.manual_seed(1)
    k, act = shape[-1], ACTIVATIONS.get(activation, lambda u: u)
    leaves = {
        "x": (torch.randn(shape, device=device) * 2 + 1).to(dtype),
        "weight": (torch.randn(24, k, device=device) / k**0.5).to(dtype),
        "gamma": (1 + 0.3 * torch.randn(k, device=device)).to(dtype),
        **({"beta": torch.randn(k, device=device).to(dtype)} if norm == "layer" else {}),
    }
    leaves = {name: t.requires_grad_() for name, t in leaves.items()}

    def plain(x, weight, gamma, beta=None):
        z = F.layer_norm(x, (k,), gamma, beta) if norm == "layer" else F.rms_norm(x, (k,), gamma, 1e-5)
        return act(F.linear(z, weight)), z

    both = heddle.norm_linear(**leaves, norm=norm, activation=activation, return_norm=True)
    alone = heddle.norm_linear(**leaves, norm=norm, activation=activation)
    exacts = {name: exact(t) for name, t in leaves.items()}
    truth, eager = plain(**exacts), plain(**leaves)
    for name, *made in zip("yz", both, truth, eager, strict=True):
        assert made[0].shape == made[1].shape
        assert_close(name, *made)
    assert_close("y alone", alone, truth[0], eager[0])
    directions = [torch.randn_like(t) for t in both]
    for wanted in (0, 1), (0,), (1,):
        along = [directions[at] for at in wanted]
        ours, theirs = ([made[at] for at in wanted] for made in (both, eager))
        names = [name for name in leaves if wanted != (1,) or name != "weight"]
        made = [
            torch.autograd.grad(results, [given[name] for name in names], [d.to(results[0]) for d in along], True)
            for results, given in ((ours, leaves), ([truth[at] for at in wanted], exacts), (theirs, leaves))
        ]
        for name, a, b, c in zip(names, *made, strict=True):
            assert b.abs().max() > 0
            assert_close(f"d{name} {wanted}", a, b, c)


def test_return_norm_has_all_derivatives():
    torch.manual_seed(2)
    given = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 6), (4, 6), (4,), (6,), (6,))]

    def run(*t):
        return torch.cat(heddle.norm_linear(*t, activation="gelu", return_norm=True), -1)

    check_derivatives(run, given)


def test_two_halves_with_all_that_there_is_have_all_derivatives():
    torch.manual_seed(2)
    given = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 6), (8, 6), (8,), (6,), (6,))]
    residual = torch.randn(2, 3, 4, dtype=torch.float64)

    def run(x, *t):
        options = {"activation": "geglu", "residual": residual[: len(x)], "return_norm": True}
        return torch.cat(heddle.norm_linear(x, *t, **options), -1)

    assert torch.autograd.gradcheck(run, given, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, given, check_fwd_over_rev=True)


def test_two_halves_elsewhere():
    """In a compiled graph, of arrays, under autocast, and with rows that are apart."""
    torch.manual_seed(3)
    layer = heddle.nn.NormLinear(12, 20, activation="swiglu")
    assert layer.weight.shape == (40, 12) and layer.bias.shape == (40,)
    x, residual = torch.randn(3, 5, 12), torch.randn(3, 5, 20)
    inputs = [layer.weight, layer.bias, layer.gamma, layer.beta]
    want = ACTIVATIONS["swiglu"](plain_norm_linear(x, *inputs)) + residual
    assert torch.allclose(layer(x, residual), want, atol=1e-5)
    compiled = torch.compile(layer, fullgraph=True)
    assert torch.allclose(compiled(x, residual), want, atol=1e-5)
    expected = torch.autograd.grad(want.square().sum(), inputs)
    for made in layer(x, residual), compiled(x, residual):
        for got, right in zip(torch.autograd.grad(made.square().sum(), inputs), expected, strict=True):
            assert torch.allclose(got, right, atol=1e-4, rtol=1e-4)
    across = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.allclose(layer(across, residual), want, atol=1e-5)
    arrays = [t.detach().numpy() for t in (x, *inputs)]
    got = heddle.norm_linear(*arrays, activation="swiglu", residual=residual.numpy())
    assert np.allclose(got, want.detach(), atol=1e-5)
    w, b, g, beta = arrays[1:]
    dy = 2 * got
    grads = heddle.norm_linear_backward(dy, arrays[0], w, g, beta, activation="swiglu", bias=b)
    for name, right in zip(("dweight", "dbias", "dgamma", "dbeta"), expected, strict=True):
        assert np.allclose(grads[name], right, atol=1e-4, rtol=1e-4)
    with torch.autocast("cpu"):
        assert layer(x, residual).dtype == torch.bfloat16
    for given in (residual[..., :5], residual[0]):
        with pytest.raises(ValueError, match="residual has"):
            layer(x, given)
    args = (x, layer.weight.detach(), None, None, None, 1e-5, 0, False, 6, True)
    torch.library.opcheck(torch.ops.heddle.norm_linear.default, args)


def test_return_norm_as_it_is_asked_for():
    torch.manual_seed(3)
    x, weight, gamma = torch.randn(3, 4, 9), torch.randn(5, 9), torch.randn(9)
    want = F.layer_norm(x, (9,), gamma)
    across = x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    y, z = heddle.norm_linear(across, weight, gamma=gamma, return_norm=True)
    assert torch.allclose(z, want, atol=1e-5) and torch.allclose(y, F.linear(want, weight), atol=1e-5)
    (dx,) = torch.autograd.grad(z, across, torch.ones_like(z).cumsum(-1))
    arrays = x.numpy(), weight.numpy(), None, gamma.numpy()
    of_y, of_z = heddle.norm_linear(*arrays, return_norm=True)
    assert np.allclose(of_y, y.detach(), atol=1e-5) and np.allclose(of_z, want, atol=1e-5)
    dz = np.cumsum(np.ones((3, 4, 9), "f4"), -1)
    got = heddle.norm_linear_backward(np.zeros((3, 4, 5), "f4"), x.numpy(), weight.numpy(), gamma.numpy(), dz=dz)
    assert np.allclose(got["dx"], dx, atol=1e-5) and np.allclose(got["dbeta"], dz.sum((0, 1)), atol=1e-4)
    for given in (x, x.numpy()):
        with pytest.raises(ValueError, match="z is x"):
            heddle.norm_linear(given, given[0, :, :], norm="none", return_norm=True)
    with pytest.raises(ValueError, match="dz has"):
        heddle.norm_linear_backward(np.zeros((3, 4, 5), "f4"), x.numpy(), weight.numpy(), dz=dz[0])


def test_return_norm_in_a_compiled_graph():
    torch.manual_seed(3)
    x, weight = torch.randn(5, 12, requires_grad=True), torch.randn(7, 12, requires_grad=True)

    def run(x, weight):
        y, z = heddle.norm_linear(x, weight, norm="rms", return_norm=True)
        return y.sum() * 2 + (z * z).cumsum(0).sum()

    got, want = torch.compile(run, fullgraph=True)(x, weight), run(x, weight)
    assert torch.allclose(got, want)
    for a, b in zip(*(torch.autograd.grad(made, (x, weight)) for made in (got, want)), strict=True):
        assert torch.allclose(a, b, atol=1e-4)
    args = (x.detach(), weight.detach(), None, None, None, 1e-5, 1, False, 0, False, None, True)
    torch.library.opcheck(torch.ops.heddle.norm_linear.default, args)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_return_norm_of_the_module(norm, device):
    torch.manual_seed(4)
    layer = heddle.nn.NormLinear(12, 20, norm=norm, activation="silu", return_norm=True, device=device)
    assert "return_norm=True" in repr(layer)
    with torch.no_grad():
        for p in (layer.gamma, layer.beta):
            if p is not None:
                p.add_(torch.randn_like(p))
    x, residual = torch.randn(2, 5, 12, device=device), torch.randn(2, 5, 20, device=device)
    x.requires_grad_()
    if norm == "layer":
        want = F.layer_norm(x, (12,), layer.gamma, layer.beta)
    else:
        want = F.rms_norm(x, (12,), layer.gamma, 1e-5)
    wanted = F.silu(F.linear(want, layer.weight, layer.bias)) + residual, want
    inputs = [x, *layer.parameters()]
    right = torch.autograd.grad(wanted[0].square().sum() + wanted[1].pow(3).sum(), inputs)
    for call in layer, torch.compile(layer, fullgraph=True):
        made = call(x, residual)
        assert isinstance(made, tuple) and all(
            torch.allclose(a, b, atol=1e-5) for a, b in zip(made, wanted, strict=True)
        )
        grads = torch.autograd.grad(made[0].square().sum() + made[1].pow(3).sum(), inputs)
        assert all(torch.allclose(a, b, atol=1e-3, rtol=1e-4) for a, b in zip(grads, right, strict=True))
    plain = heddle.nn.NormLinear(12, 20, norm=norm, activation="silu", device=device)
    plain.load_state_dict(layer.state_dict())
    assert torch.allclose(plain(x, residual), made[0], atol=1e-6)
    with pytest.raises(ValueError, match="z is x"):
        heddle.nn.NormLinear(12, 20, norm="none", return_norm=True)


def test_residuals_have_all_derivatives():
    torch.manual_seed(2)
    sizes = ((2, 3, 6), (4, 6), (2, 3, 4))
    given = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in sizes]

    def run(x, weight, residual):
        return heddle.norm_linear(x, weight, activation="gelu", residual=residual)

    assert torch.autograd.gradcheck(run, given, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, given, check_fwd_over_rev=True)
    x, weight, residual = (t.detach() for t in given)
    want = run(x, weight, residual)
    mapped = torch.func.vmap(lambda x, r: run(x, weight, r))
    assert torch.allclose(mapped(x, residual), want)
    for at in (x, residual), (x[0], residual), (x, residual[0]):
        dims = tuple(0 if t.dim() == 3 else None for t in at)
        each = [
            run(x[i] if dims[0] == 0 else x[0], weight, residual[i] if dims[1] == 0 else residual[0]) for i in (0, 1)
        ]
        assert torch.allclose(torch.func.vmap(lambda x, r: run(x, weight, r), dims)(*at), torch.stack(each))


def test_residuals_as_they_lie():
    torch.manual_seed(3)
    x, weight = torch.randn(3, 4, 9), torch.randn(5, 9)
    wide = torch.randn(3, 4, 20)
    for residual in (wide[..., :5], torch.randn(4, 3, 5).transpose(0, 1), torch.randn(5).expand(3, 4, 5)):
        want = F.linear(x, weight) + residual
        assert torch.allclose(heddle.norm_linear(x, weight, norm="none", residual=residual), want, atol=1e-5)
        across = x.transpose(0, 1).contiguous().transpose(0, 1)
        assert torch.allclose(heddle.norm_linear(across, weight, norm="none", residual=residual), want, atol=1e-5)
    arrays = x.numpy(), weight.numpy(), wide[..., :5].numpy()
    got = heddle.norm_linear(*arrays[:2], norm="none", residual=arrays[2])
    assert np.allclose(got, (F.linear(x, weight) + wide[..., :5]).numpy(), atol=1e-5)
    for given in (torch.randn(3, 5), torch.randn(3, 4, 6), torch.randn(12, 5)):
        with pytest.raises(ValueError, match="residual has"):
            heddle.norm_linear(x, weight, residual=given)
        with pytest.raises(ValueError, match="residual"):
            heddle.norm_linear(*arrays[:2], residual=given.numpy())
    with pytest.raises(TypeError, match="residual is bfloat16"):
        heddle.norm_linear(x, weight, residual=torch.zeros(3, 4, 5).bfloat16())


def test_residual_in_a_compiled_graph():
    torch.manual_seed(3)
    layer = heddle.nn.NormLinear(12, 20, norm="none", activation="silu")
    x, residual = torch.randn(5, 12), torch.randn(5, 20, requires_grad=True)
    want = F.silu(F.linear(x, layer.weight, layer.bias)) + residual
    compiled, inputs = torch.compile(layer, fullgraph=True), [residual, *layer.parameters()]
    assert torch.allclose(compiled(x, residual), want, atol=1e-5)
    grads = torch.autograd.grad(compiled(x, residual).square().sum(), inputs)
    for got, expected in zip(grads, torch.autograd.grad(want.square().sum(), inputs), strict=True):
        assert torch.allclose(got, expected, atol=1e-4)
    args = (x, layer.weight.detach(), None, None, None, 1e-5, 0, False, 3, True, residual.detach())
    torch.library.opcheck(torch.ops.heddle.norm_linear.default, args)


def test_activation_in_a_compiled_graph():
    torch.manual_seed(3)
    layer = heddle.nn.NormLinear(12, 20, activation="silu")
    assert "activation='silu'" in repr(layer)
    x = torch.randn(5, 12)
    want = F.silu(plain_norm_linear(x, layer.weight, layer.bias, layer.gamma, layer.beta))
    compiled = torch.compile(layer, fullgraph=True)
    assert torch.allclose(compiled(x), want, atol=1e-5)
    grads = torch.autograd.grad(compiled(x).square().sum(), list(layer.parameters()))
    for got, expected in zip(grads, torch.autograd.grad(want.square().sum(), list(layer.parameters())), strict=True):
        assert torch.allclose(got, expected, atol=1e-4)
    args = (x, layer.weight.detach(), None, None, None, 1e-5, 0, False, 3, True)
    torch.library.opcheck(torch.ops.heddle.norm_linear.default, args)


def test_activations_of_arrays():
    rng = np.random.default_rng(4)
    x, weight, bias, dy = (rng.standard_normal(s).astype("f4") for s in ((4, 6), (5, 6), (5,), (4, 5)))
    leaves = [torch.tensor(t, requires_grad=True) for t in (x, weight, bias)]
    want = F.gelu(plain_norm_linear(*leaves))
    assert np.allclose(heddle.norm_linear(x, weight, bias, activation="gelu"), want.detach().numpy(), atol=1e-5)
    grads = heddle.norm_linear_backward(dy, x, weight, activation="gelu", bias=bias)
    expected = torch.autograd.grad(want, leaves, torch.tensor(dy))
    for name, value in zip(("dx", "dweight", "dbias"), expected, strict=True):
        assert np.allclose(grads[name], value.numpy(), atol=1e-4)


def test_unknown_activation():
    x, weight = torch.randn(2, 4), torch.randn(3, 4)
    for given in ("relu", 1, ""):
        with pytest.raises(ValueError, match=r"activation = .* is none of None, 'gelu'"):
            heddle.norm_linear(x, weight, activation=given)
        with pytest.raises(ValueError, match="activation"):
            heddle.nn.NormLinear(4, 3, activation=given)
    with pytest.raises(RuntimeError, match="activation = 7 is none of"):  # from the operator itself
        torch.ops.heddle.norm_linear(x, weight, activation=7)
    for given in ((x, weight), (x.to("meta"), weight.to("meta")), (x.numpy(), weight.numpy())):
        with pytest.raises(ValueError, match="weight has 3 rows, but a gate"):
            heddle.norm_linear(*given, activation="swiglu")
    y, mean, rstd, u, _ = torch.ops.heddle.norm_linear(x, weight, activation=1)
    assert u.shape == (0,)
    with pytest.raises(RuntimeError, match="u is NULL"):
        torch.ops.heddle.norm_linear_backward(y, mean, rstd, x, weight, activation=1)


@pytest.mark.parametrize("norm", ["layer", "rms", "none"])
@pytest.mark.parametrize("activation", [None, "gelu", "silu"])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("device", devices())
def test_the_short_way_is_the_long_way(norm, activation, added, device, monkeypatch):
    """Where nothing is recorded and all lies as the kernel wants it, the operator is called with fewer checks."""
    from heddle import _torch

    x, weight, bias = (torch.randn(*shape, device=device) for shape in ((2, 3, 8), (5, 8), (5,)))
    gamma = None if norm == "none" else torch.randn(8, device=device)
    beta = torch.randn(8, device=device) if norm == "layer" else None
    residual = torch.randn(2, 3, 5, device=device) if added else None
    options = {"norm": norm, "activation": activation, "residual": residual}
    layer = heddle.nn.NormLinear(8, 5, norm=norm, activation=activation, device=device)
    with torch.no_grad():
        for name, value in (("weight", weight), ("bias", bias), ("gamma", gamma), ("beta", beta)):
            if value is not None:
                getattr(layer, name).copy_(value)
    recorded = heddle.norm_linear(x.clone().requires_grad_(), weight, bias, gamma, beta, **options)
    assert recorded.requires_grad
    with monkeypatch.context() as patch:
        patch.setattr(_torch, "call", None)  # of the long way
        made = heddle.norm_linear(x, weight, bias, gamma, beta, **options)
        with torch.no_grad():
            assert torch.equal(layer(x, residual), made)
    assert torch.equal(made, recorded) and not made.requires_grad
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)  # has to be copied first
    assert torch.equal(heddle.norm_linear(turned, weight, bias, gamma, beta, **options), made)
    with torch.autocast(device, torch.bfloat16):
        assert (
            heddle.norm_linear(x, weight, bias, gamma, beta, norm=norm, activation=activation).dtype == torch.bfloat16
        )
    doubled = torch.vmap(lambda x: heddle.norm_linear(x, weight, bias, gamma, beta, norm=norm, activation=activation))
    assert torch.allclose(doubled(x), made - residual if added else made, atol=1e-5)
    with pytest.raises(ValueError, match="norm = 'none'" if norm == "none" else "norm = 'some'"):
        heddle.norm_linear(x, weight, eps=1e-3, norm="none" if norm == "none" else "some")


def test_eps_that_is_no_number():
    x, weight = torch.randn(2, 4), torch.randn(3, 4)
    for given in (None, "1e-5", torch.tensor(1e-5)):  # None is another number to torch.nn.RMSNorm than to LayerNorm
        for arrays in (x, weight), (x.requires_grad_(), weight), (x.detach().numpy(), weight.numpy()):
            with pytest.raises(TypeError, match=r"eps = .* is not a number"):
                heddle.norm_linear(*arrays, eps=given)
        with pytest.raises(TypeError, match=r"eps = .* is not a number"):
            heddle.nn.NormLinear(4, 3, eps=given)
    want = heddle.norm_linear(x, weight, eps=0.5)
    assert torch.equal(heddle.norm_linear(x, weight, eps=np.float32(0.5)), want)


def test_many_dimensions():
    x, weight = torch.randn(1, 2, 1, 2, 1, 1, 1, 1, 6), torch.randn(3, 6)
    residual = torch.randn(*x.shape[:-1], 3)
    got = heddle.norm_linear(x, weight, residual=residual)
    assert torch.allclose(got, plain_norm_linear(x, weight) + residual, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_second_derivatives_do_not_cancel(activation):
    """In float32, where the sigmoid is nearly 1: 1 less it has few of its digits."""
    made = []
    for dtype in (torch.float32, torch.float64):
        u = torch.linspace(2, 8, 601, dtype=dtype)[:, None].requires_grad_()
        weight = torch.ones(1, 1, dtype=dtype)
        y = heddle.norm_linear(u, weight, norm="none", activation=activation)
        (first,) = torch.autograd.grad(y.sum(), u, create_graph=True)
        made.append(torch.autograd.grad(first.sum(), u)[0].detach().double())
    assert (made[0] - made[1]).abs().max() < 5e-7 and made[1].abs().max() > 0.01
