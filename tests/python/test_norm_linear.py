# SPDX-License-Identifier: Apache-2.0
"""heddle.norm_linear for torch tensors, and the report of origins.md D."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_close, devices, exact, plain_norm_linear

import heddle


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
    y = heddle.norm_linear(**leaves, norm=norm, eps=1e-3)
    dy = torch.randn_like(y)
    grads = torch.autograd.grad(y, list(leaves.values()), dy)
    truth_leaves = {name: exact(t) for name, t in leaves.items()}
    truth = plain_norm_linear(**truth_leaves, norm=norm, eps=1e-3)
    truth_grads = torch.autograd.grad(truth, list(truth_leaves.values()), exact(dy))
    plain = plain_norm_linear(**leaves, norm=norm, eps=1e-3)
    plain_grads = torch.autograd.grad(plain, list(leaves.values()), dy)
    assert y.dtype == dtype and y.is_contiguous()
    assert_close("y", y, truth, plain)
    for name, a, b, c in zip(leaves, grads, truth_grads, plain_grads, strict=True):
        assert a.dtype == dtype
        assert_close("d" + name, a, b, c)


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
