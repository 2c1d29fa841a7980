# SPDX-License-Identifier: Apache-2.0
"""Whole blocks of heddle.nn against the same parameters in PyTorch's functions, and which operators they come to."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from conftest import devices
from torch import nn

import heddle
from heddle.nn import LlamaBlock, SelfAttention, TransformerBlock, TransformerEncoderLayer

everywhere = pytest.mark.parametrize("device", devices())
B, S, E, H = 2, 7, 16, 4


def normed(module, x):
    """The norm and the Linear of a NormLinear, without what is behind them."""
    shape = x.shape[-1:]
    if module.norm == "layer":
        z = F.layer_norm(x, shape, module.gamma, module.beta, module.eps)
    else:
        z = F.rms_norm(x, shape, module.gamma, module.eps)
    return F.linear(z, module.weight, module.bias)


def heads_of(x, count):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def plain_block(block, x):
    a = block.attention
    qkv = heads_of(normed(a.qkv, x), a.heads + 2 * a.kv_heads)
    q, k, v = qkv.split((a.heads, a.kv_heads, a.kv_heads), 1)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
    x = x + block.drop(F.linear(o, a.out.weight, a.out.bias))
    return x + block.drop(F.linear(F.gelu(normed(block.up, x)), block.down.weight, block.down.bias))


def plain_llama(block, x):
    q, k, v = heads_of(normed(block.qkv, x), block.heads + 2 * block.kv_heads).split(
        (block.heads, block.kv_heads, block.kv_heads), 1
    )
    cos, sin = (torch.cat((t, t), -1).to(x.dtype) for t in block.rotation(torch.arange(S, device=x.device)))

    def turned(t):
        first, second = t.chunk(2, -1)
        return t * cos + torch.cat((-second, first), -1) * sin

    o = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
    x = x + F.linear(o.transpose(1, 2).flatten(2), block.out.weight)
    gate, up = normed(block.up, x).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, block.down.weight)


BLOCKS = {
    "layer": (lambda: TransformerBlock(E, H, causal="top_left"), plain_block),
    "rms, grouped": (lambda: TransformerBlock(E, H, 2, norm="rms", bias=False, causal="top_left"), plain_block),
    "llama": (lambda: LlamaBlock(E, H, 2, hidden=24), plain_llama),
}


def made(name, device="cpu", dtype=torch.float32):
    """A block none of whose parameters is as it comes, and its formula."""
    make, formula = BLOCKS[name]
    torch.manual_seed(0)
    block = make()
    with torch.no_grad():
        for p in block.parameters():
            p.copy_(torch.randn(p.shape) * 0.3 + (p.dim() == 1) * 0.5)
    return block.to(device, dtype), formula


def gradients(y, x, block, dy):
    return torch.autograd.grad(y, [x, *block.parameters()], dy)


def assert_near(got, want, tolerance):
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and b.abs().max() > 0
        assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BLOCKS)
@everywhere
def test_block(name, dtype, device):
    block, formula = made(name, device, dtype)
    x = torch.randn(B, S, E, device=device).to(dtype).requires_grad_()
    got, want = block(x), formula(block, x)
    tolerance = 2e-5 if dtype == torch.float32 else 0.06
    assert_near((got,), (want,), tolerance)
    dy = torch.randn_like(got)
    assert_near(gradients(got, x, block, dy), gradients(want, x, block, dy), 2 * tolerance)


def called(call):
    """How often a call comes to each operator that computes."""
    with torch.profiler.profile() as profile:
        call()
    return Counter({event.key: event.count for event in profile.key_averages()})


def encoder(norm_first, **options):
    return TransformerEncoderLayer(E, H, 24, 0.0, F.gelu, batch_first=True, norm_first=norm_first, **options)


@pytest.mark.parametrize(
    "make,products,sums",
    [
        (lambda: made("layer")[0], 4, 0),
        (lambda: made("rms, grouped")[0], 4, 0),
        (lambda: made("llama")[0], 4, 1),  # of the rotation
        (lambda: encoder(True), 4, 0),
        (lambda: encoder(False), 3, 0),  # nothing is behind or in front of q, k and v
    ],
)
def test_all_is_heddles(make, products, sums):
    module, x = make().eval(), torch.randn(B, S, E)
    with torch.no_grad():
        ran = called(lambda: module(x))
    assert ran["heddle::norm_linear"] == products and ran["aten::add"] == sums
    norms = 0 if products == 4 else 2
    assert ran["aten::linear"] == 4 - products and ran["aten::layer_norm"] == norms and ran["aten::gelu"] == 0


def test_dropped():
    """What drops stands between a Linear and the sum."""
    block, formula = made("layer")
    block.drop.p = 0.5
    x = torch.randn(B, S, E, requires_grad=True)
    results = []
    for run in (block, lambda x: formula(block, x)):
        torch.manual_seed(1)
        results.append(run(x))
    assert_near(results[:1], results[1:], 2e-5)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert_near((block(x),), (formula(block, x),), 2e-5)


@pytest.mark.parametrize("name", BLOCKS)
def test_autocast_leaves_the_sums(name):
    """Under autocast x stays float32, and so do sums with it: bfloat16 would round it twice a block."""
    block, formula = made(name)
    x = 1000 * torch.randn(B, S, E)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = block(x), formula(block, x)
        low = block.to(torch.bfloat16)(x.to(torch.bfloat16))
    assert got.dtype == want.dtype == torch.float32 and low.dtype == torch.bfloat16
    assert (got - want).abs().max() < 0.5 and (got - got.to(torch.bfloat16)).abs().max() > 0.5


@pytest.mark.parametrize("name", BLOCKS)
def test_compiled(name):
    """One graph, forward and backward."""
    block, _ = made(name)
    x = torch.randn(B, S, E, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    got, want = compiled(x), block(x)
    dy = torch.randn_like(want)
    assert_near((got, *gradients(got, x, block, dy)), (want, *gradients(want, x, block, dy)), 1e-5)


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


@pytest.mark.parametrize("how", ["class", "hook", "forward"])
@pytest.mark.parametrize("where", ["attention.out", "down", "attention", "out", "linear1", "linear2"])
def test_nobody_is_passed_over(where, how):
    """What a Linear's class, hooks or own forward do with its result is done."""
    if where.startswith("linear"):
        module = encoder(False)
    else:
        module, _ = made("llama" if where == "out" else "layer")
    part, x = module.get_submodule(where), torch.randn(B, S, E)
    before = module(x)
    if how == "class":
        if where == "attention":
            part.__class__ = type(
                "Twice", (SelfAttention,), {"forward": lambda self, *a, **o: 2 * SelfAttention.forward(self, *a, **o)}
            )
        else:
            part.__class__ = Doubled
    elif how == "hook":
        part.register_forward_hook(lambda module, given, result: 2 * result)
    else:
        forward = part.forward
        part.forward = lambda *args, **options: 2 * forward(*args, **options)
    after = module(x)
    assert not torch.allclose(after, before, atol=1e-2)
    if where in ("down",):  # x + 2·(y - x)
        middle = module.attention(x, residual=x)
        assert torch.allclose(after, middle + 2 * (before - middle), atol=1e-4)


def test_residual_of_self_attention():
    attention, x = SelfAttention(E, H), torch.randn(B, S, E)
    assert torch.allclose(attention(x, residual=2 * x), 2 * x + attention(x), atol=1e-5)


def test_replaced():
    """heddle.replace's layers are as new ones."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 24, 0.0, F.gelu, batch_first=True, norm_first=True)
    x = torch.randn(B, S, E)
    want = layer(x)
    heddle.replace(layer)
    with torch.no_grad():
        assert called(lambda: layer(x))["heddle::norm_linear"] == 4
    assert torch.allclose(layer(x), want, atol=1e-5)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("name", [*BLOCKS, "encoder"])
def test_meta_tensors(name, norm_first, train):
    """Shapes of modules that have no memory: autocast knows no such device."""
    module = (encoder(norm_first) if name == "encoder" else made(name)[0]).to("meta").train(train)
    x = torch.randn(B, S, E, device="meta")
    y = module(x)
    assert y.is_meta and y.shape == x.shape and y.dtype == x.dtype
