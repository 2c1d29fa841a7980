# SPDX-License-Identifier: Apache-2.0
"""Jacobians, which map backward alone: of one batch and of one row, whose saved results are then repeated in memory."""

from __future__ import annotations

import pytest
import torch
from conftest import devices, plain_attention, plain_norm_linear

import heddle
import heddle.nn

func = torch.func
everywhere = pytest.mark.parametrize("device", devices())


def given(device, *shapes):
    rng = torch.Generator().manual_seed(0)
    real = torch.float64 if device == "cpu" else torch.float32  # no float64 there
    return [torch.randn(shape, generator=rng, dtype=torch.float64).to(device, real) for shape in shapes]


def close(got, want):
    tolerance = 1e-10 if want.dtype == torch.float64 else 1e-4
    assert got.shape == want.shape and torch.allclose(got, want, atol=tolerance) and want.abs().max() > 1e-3


def one_by_one(run, x):
    """The Jacobian by a backward for each element of the result."""
    x = x.detach().requires_grad_()
    y = run(x)
    rows = [torch.autograd.grad(each, x, retain_graph=True)[0] for each in y.flatten()]
    return torch.stack(rows).reshape(*y.shape, *x.shape)


def plain(q, k, v):
    return plain_attention(q, k, v)[0]


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("which", ["q", "k", "v"])
@everywhere
def test_attention(which, b, device):
    tensors = given(device, (b, 4, 3, 8), (b, 2, 4, 8), (b, 2, 4, 6))
    at = "qkv".index(which)

    def both(transform):
        """transform of the result as a function of one tensor, of heddle's and of the formula."""
        for attention in (heddle.attention, plain):
            yield transform(lambda x, run=attention: run(*tensors[:at], x, *tensors[at + 1 :]), tensors[at])

    close(*both(lambda run, x: func.jacrev(run)(x)))
    close(*both(lambda run, x: torch.autograd.functional.jacobian(run, x, vectorize=True)))
    if device == "cpu":  # where differences of derivatives are exact enough
        close(*both(lambda run, x: func.jacrev(func.jacfwd(lambda x: run(x).sin().sum()))(x)))
        close(*both(lambda run, x: func.jacrev(func.jacrev(lambda x: run(x).sin().sum()))(x)))


@everywhere
def test_all_of_one_tensor_and_its_results(device):
    """lse and weights, whose gradients come in, too; keys without a batch of their own."""
    (q,) = given(device, (1, 2, 3, 8))

    def run(attention):
        return func.jacrev(lambda t: torch.cat([each.flatten() for each in attention(t, t, t)]))(q)

    close(run(lambda *t: heddle.attention(*t, return_lse=True, return_weights=True)), run(plain_attention))
    got = func.jacrev(lambda t: heddle.attention(t, t, t))(q[0])
    close(got, func.jacrev(lambda t: plain(t[None], t[None], t[None])[0])(q[0]))


@everywhere
def test_batched_gradients(device):
    """vmap of autograd.grad, of what was recorded outside."""
    q, k, v, douts = given(device, (1, 2, 3, 8), (1, 2, 4, 8), (1, 2, 4, 8), (5, 1, 2, 3, 8))
    q.requires_grad_()
    out = heddle.attention(q, k, v, softcap=2.0)
    want = torch.stack([torch.autograd.grad(out, q, dout, retain_graph=True)[0] for dout in douts])
    close(torch.vmap(lambda dout: torch.autograd.grad(out, q, dout, retain_graph=True)[0])(douts), want)
    close(torch.autograd.grad(out, q, douts, is_grads_batched=True)[0], want)


@everywhere
def test_what_is_built_on_top(device):
    torch.manual_seed(0)
    x = given(device, (1, 3, 8))[0]
    ways = {
        "flash_attn_func": (lambda t: heddle.flash_attn_func(*[t.view(1, 3, 2, 4)] * 3), x),
        "SelfAttention": (heddle.nn.SelfAttention(8, 2, device=device, dtype=x.dtype), x),
        "TransformerEncoderLayer": (
            heddle.nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True, device=device, dtype=x.dtype),
            x[0],
        ),
    }
    for run, t in ways.values():
        close(func.jacrev(run)(t), one_by_one(run, t))


@pytest.mark.parametrize("rows", [(), (1,), (1, 1), (3,)], ids=str)
@everywhere
def test_norm_linear(rows, device):
    tensors = given(device, (*rows, 5), (4, 5), (4,), (5,), (5,))
    for at in range(5):
        got, want = (func.jacrev(run, argnums=at)(*tensors) for run in (heddle.norm_linear, plain_norm_linear))
        close(got, want)
        if device == "cpu":
            got, want = (
                func.jacrev(func.jacfwd(lambda *t, run=run: run(*t).sin().sum(), argnums=at), argnums=at)(*tensors)
                for run in (heddle.norm_linear, plain_norm_linear)
            )
            close(got, want)
