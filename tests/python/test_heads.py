# SPDX-License-Identifier: Apache-2.0
"""Gradients of q, k and v that are heads of one tensor: written as one, and the same as of three."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from conftest import devices
from torch import nn

import heddle
from heddle import _heads
from heddle._ops import ops
from heddle.nn import MultiheadAttention, SelfAttention

everywhere = pytest.mark.parametrize("device", devices())
B, S, D = 3, 37, 16


def operators(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        result = call()
    return result, {event.key for event in seen.key_averages()}


def three(heads, h, hk, causal, scale=None):
    q, k, v = _heads.parts_of(heads, h, hk)
    return heddle.attention(q, k, v, causal=causal, scale=scale)


@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("h,hk", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@everywhere
def test_same_as_three(dtype, rows_first, h, hk, scale, causal, device):
    torch.manual_seed(0)
    shape = (S, B) if rows_first else (B, S)
    whole = torch.randn(*shape, h + 2 * hk, D, device=device).to(dtype).requires_grad_()
    heads = whole.transpose(0, 1) if rows_first else whole
    out = _heads.attention_of_heads(heads, h, hk, causal, scale)
    dout = torch.randn_like(out)
    (got,), names = operators(lambda: torch.autograd.grad(out, whole, dout))
    assert "heddle::attention_backward_heads" in names and "aten::cat" not in names
    assert got.stride() == whole.stride()
    other = three(heads, h, hk, causal, scale)
    (want,) = torch.autograd.grad(other, whole, dout)
    near = {"rtol": 0, "atol": 0} if device == "cpu" else {"rtol": 1e-2, "atol": 1e-3}  # sums of atomics
    torch.testing.assert_close(out, other, **near)
    torch.testing.assert_close(got, want, **near)


@everywhere
def test_second_derivatives(device):
    torch.manual_seed(0)
    heads = torch.randn(2, 5, 6, 4, device=device, dtype=torch.float32, requires_grad=True)

    def penalty(attend):
        (grad,) = torch.autograd.grad(attend(heads, 2, 2, "top_left").sin().sum(), heads, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), heads)[0]

    torch.testing.assert_close(penalty(_heads.attention_of_heads), penalty(three), rtol=1e-4, atol=1e-5)


def test_who_else_looks():
    """Without a gradient, under autocast, transforms and tangents the three are seen one by one."""
    heads = torch.randn(B, S, 6, D)
    assert _heads.attention_of_heads(heads, 2, 2, None) is NotImplemented
    wanted = heads.clone().requires_grad_()
    with torch.no_grad():
        assert _heads.attention_of_heads(wanted, 2, 2, None) is NotImplemented
    with torch.autocast("cpu", torch.bfloat16):
        assert _heads.attention_of_heads(wanted, 2, 2, None) is NotImplemented
    module, x = SelfAttention(32, 4), torch.randn(B, S, 32)
    one = torch.func.grad(lambda x: module(x).sin().sum())(x)
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(module(leaf).sin().sum(), leaf)
    torch.testing.assert_close(one, want)
    torch.func.jvp(module, (x,), (torch.ones_like(x),))
    torch.func.vmap(lambda row: module(row[None])[0])(x)


@pytest.mark.parametrize("make", [lambda: SelfAttention(32, 4, 2), lambda: MultiheadAttention(32, 4)])
def test_modules(make):
    torch.manual_seed(0)
    module, x = make(), torch.randn(S, B, 32, requires_grad=True)
    call = (lambda: module(x, x, x, need_weights=False)[0]) if isinstance(module, nn.MultiheadAttention) else None
    _, names = operators(lambda: (call() if call else module(x)).sum().backward())
    assert "heddle::attention_backward_heads" in names and "aten::cat" not in names


@pytest.mark.parametrize("autocast", [False, True])
def test_compiled(autocast):
    torch.manual_seed(0)
    module, x = SelfAttention(32, 4, norm="layer", causal="top_left"), torch.randn(B, S, 32, requires_grad=True)

    def gradients(module):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = module(x)
        return torch.autograd.grad(out.float().sin().sum(), [x, *module.parameters()])

    compiled = torch.compile(module)
    gradients(compiled)
    made, names = operators(lambda: gradients(compiled))
    assert ("heddle::attention_backward_heads" in names) is not autocast
    for got, want in zip(made, gradients(module), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2 if autocast else 1e-4, atol=2e-2 if autocast else 1e-4)


def test_checkpoint():
    """What is kept may be computed anew."""
    module, x = SelfAttention(32, 4), torch.randn(B, S, 32, requires_grad=True)
    (want,) = torch.autograd.grad(module(x).sin().sum(), x)
    out = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
    (got,) = torch.autograd.grad(out.sin().sum(), x)
    torch.testing.assert_close(got, want)


def test_flash_attn_qkvpacked():
    qkv = torch.randn(B, S, 3, 2, D, requires_grad=True)
    _, names = operators(lambda: heddle.flash_attn_qkvpacked_func(qkv, causal=True).sum().backward())
    assert "heddle::attention_backward_heads" in names


def test_other_layouts():
    """What is no row of heads, one number beside the other, goes the long way, and is not copied for it."""
    qkv = torch.randn(B, S, 2, 3, D).transpose(2, 3).requires_grad_()
    out, names = operators(lambda: heddle.flash_attn_qkvpacked_func(qkv))
    assert "heddle::attention_plain" in names and "aten::copy_" not in names
    q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
    torch.testing.assert_close(out, heddle.attention(q, k, v).transpose(1, 2))
    heads = torch.randn(B, S, D, 6).transpose(2, 3).requires_grad_()
    assert _heads.attention_of_heads(heads, 2, 2, None) is NotImplemented


def test_no_heads_of_one_tensor():
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 6, 8)
    out, lse, _ = ops.attention(q, k, k)
    with pytest.raises(RuntimeError, match="no heads of one tensor"):
        ops.attention_backward_heads(out, out, lse, q, k, k, 0, 0.0, False)
    with pytest.raises(ValueError, match="causal = 'left'"):
        _heads.attention_of_heads(torch.randn(B, S, 6, D, requires_grad=True), 2, 2, "left")
