# SPDX-License-Identifier: Apache-2.0
"""heddle.compat.gpu_kernels: the tests of origins.md A and B, and those that they lacked."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import devices

from heddle.compat import gpu_kernels


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("rows,columns,d", [(32, 64, 64), (32, 64, 16), (200, 16, 16), (3, 130, 5), (1, 1, 1)])
@pytest.mark.parametrize("factor", [1, 1000])
def test_forward(rows, columns, d, factor, device):
    torch.manual_seed(0)
    x = torch.randn(rows, columns, device=device) * factor
    output = torch.full_like(x, math.nan)
    assert gpu_kernels.self_attention(x, output, d) is None
    truth = torch.softmax(x.double() @ x.double().T / math.sqrt(d), -1) @ x.double()
    assert (output - truth).abs().max() <= 2e-6 * truth.abs().max() * (1 if factor == 1 else 10)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("sq,sk,columns,dv,d", [(32, 32, 64, 64, 64), (7, 50, 24, 12, 9)])
def test_backward(sq, sk, columns, dv, d, device):
    torch.manual_seed(0)
    query, key, value, grad_output = (
        torch.randn(shape, device=device) for shape in ((sq, columns), (sk, columns), (sk, dv), (sq, dv))
    )
    leaves = [t.double().requires_grad_() for t in (query, key, value)]
    weights = torch.softmax(leaves[0] @ leaves[1].T / math.sqrt(d), -1)
    wants = torch.autograd.grad(weights @ leaves[2], leaves, grad_output.double())
    grads = [torch.full_like(t, math.nan) for t in (query, key, value)]
    given = (grad_output, query, key, value, weights.float().detach())
    assert gpu_kernels.self_attention_backward(*given, *grads, d) is None
    for got, want in zip(grads, wants, strict=True):
        assert (got - want).abs().max() <= 4e-6 * max(want.abs().max().item(), 1)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("mode", ["autocast", "inference_mode"])
def test_within_modes(mode, device):
    """float32 is what these compute in, and gradients are what the second is asked for."""
    torch.manual_seed(0)
    x = torch.randn(9, 8, device=device)
    weights = torch.softmax(x @ x.T / math.sqrt(8), -1)
    outside, inside = ([torch.empty_like(x) for _ in range(4)] for _ in range(2))
    gpu_kernels.self_attention(x, outside[0], 8)
    gpu_kernels.self_attention_backward(x, x, x, x, weights, *outside[1:], 8)
    with torch.inference_mode() if mode == "inference_mode" else torch.autocast(device, torch.bfloat16):
        gpu_kernels.self_attention(x, inside[0], 8)
        gpu_kernels.self_attention_backward(x, x, x, x, weights, *inside[1:], 8)
    for a, b in zip(outside, inside, strict=True):
        assert torch.equal(a, b)


def test_errors():
    x = torch.randn(4, 8)
    with pytest.raises(TypeError, match="float64"):
        gpu_kernels.self_attention(x.double(), x.double(), 8)
    with pytest.raises(ValueError, match="1 dimensions"):
        gpu_kernels.self_attention(x[0], x[0], 8)
    with pytest.raises(ValueError, match="output has shape"):
        gpu_kernels.self_attention(x, x[:2].clone(), 8)
    with pytest.raises(ValueError, match="d = 0"):
        gpu_kernels.self_attention(x, x.clone(), 0)
    with pytest.raises(TypeError, match="input must be"):
        gpu_kernels.self_attention([1.0], x, 8)
    grads = [x.clone() for _ in range(3)]
    with pytest.raises(ValueError, match="off by"):
        gpu_kernels.self_attention_backward(x, x, x, x, torch.full((4, 4), 0.9), *grads, 8)
    with pytest.raises(ValueError, match="attn_weights has shape"):
        gpu_kernels.self_attention_backward(x, x, x, x, torch.full((4, 5), 0.9), *grads, 8)
