# SPDX-License-Identifier: Apache-2.0
"""heddle.nn against torch.nn with the same parameters, and a block that learns."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from conftest import devices

from heddle.nn import NormLinear, SelfAttention, TransformerBlock


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_norm_linear(norm, bias, affine, device):
    torch.manual_seed(0)
    module = NormLinear(12, 7, bias, norm=norm, affine=affine, device=device)
    x = torch.randn(2, 3, 12, device=device, requires_grad=True)
    if norm == "layer":
        z = F.layer_norm(x, (12,), module.gamma, module.beta, module.eps)
    else:
        assert module.beta is None
        z = F.rms_norm(x, (12,), module.gamma, module.eps)
    want = F.linear(z, module.weight, module.bias)
    got = module(x)
    assert torch.allclose(got, want, atol=1e-5)
    leaves = [x, *module.parameters()]
    dy = torch.randn_like(got)
    for a, b in zip(torch.autograd.grad(got, leaves, dy), torch.autograd.grad(want, leaves, dy), strict=True):
        assert torch.allclose(a, b, atol=1e-4)
    assert "norm='" in repr(module)


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
@pytest.mark.parametrize("norm", [None, "layer", "rms"])
def test_self_attention(kv_heads, norm):
    torch.manual_seed(0)
    module = SelfAttention(16, 4, kv_heads, norm=norm, causal=True)
    x = torch.randn(2, 5, 16)
    hk = kv_heads or 4
    q, k, v = module.qkv(x).split((16, 4 * hk, 4 * hk), -1)
    q, k, v = (t.view(2, 5, -1, 4).transpose(1, 2) for t in (q, k, v))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.allclose(module(x), module.out(want.transpose(1, 2).reshape(2, 5, 16)), atol=1e-5)


def test_masks_and_dropout():
    module = SelfAttention(16, 4, dropout=0.5)
    x = torch.randn(2, 5, 16)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
    hidden = torch.arange(5) < 3
    changed = x.clone()
    changed[:, 3:] += 1
    assert torch.allclose(module(x, mask=hidden)[:, :3], module(changed, mask=hidden)[:, :3], atol=1e-6)
    bias = torch.randn(4, 5, 5, requires_grad=True)
    module(x, bias=bias).sum().backward()
    assert bias.grad.abs().max() > 0


@pytest.mark.parametrize("device", devices())
def test_block_learns(device):
    torch.manual_seed(0)
    block = TransformerBlock(16, 4, 2, hidden=32, norm="rms", causal="top_left", device=device)
    x = torch.randn(8, 6, 16, device=device)
    target = x.cumsum(1) / 6
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = F.mse_loss(block(x), target)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.3 * losses[0]
    state = {name: t.shape for name, t in block.state_dict().items()}
    assert state["attention.qkv.gamma"] == (16,) and state["attention.qkv.weight"] == (32, 16)


@pytest.mark.parametrize(
    "make,text",
    [
        (lambda: SelfAttention(16, 3), "heads = 3 does not divide dim = 16"),
        (lambda: SelfAttention(16, 4, 3), "kv_heads = 3 does not divide heads = 4"),
        (lambda: SelfAttention(16, 4, dropout=1.0), "dropout = 1.0"),
        (lambda: SelfAttention(16, 4, causal="left"), "'left'"),
        (lambda: NormLinear(0, 4), "in_features = 0"),
        (lambda: NormLinear(4, 4, norm="batch"), "'batch'"),
        (lambda: SelfAttention(16, 4)(torch.randn(2, 16)), r"x has shape \[2, 16\]"),
        (lambda: SelfAttention(0, 1), "dim = 0 must be positive"),
        (lambda: SelfAttention(-8, 2), "dim = -8 must be positive"),
    ],
)
def test_errors(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_copies_and_states():
    block = TransformerBlock(32, 4, 2, causal=True)
    x = torch.randn(2, 5, 32)
    other = TransformerBlock(32, 4, 2, causal=True)
    other.load_state_dict(block.state_dict())
    for each in (copy.deepcopy(block), pickle.loads(pickle.dumps(block)), other):
        assert torch.equal(each(x), block(x))


def test_autocast():
    attention = SelfAttention(32, 4, norm="rms", causal=True)
    seen = []
    attention.qkv.register_forward_hook(lambda module, given, made: seen.append(made.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        y = attention(torch.randn(2, 5, 32), bias=torch.randn(4, 5, 5), mask=torch.ones(5, 5, dtype=torch.bool))
    y.float().sum().backward()
    assert seen == [torch.bfloat16] and y.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 for p in attention.parameters())


def test_no_tensor():
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor, not list"):
        SelfAttention(16, 4)([1.0])
