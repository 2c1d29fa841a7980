# SPDX-License-Identifier: Apache-2.0
"""heddle.replace: what it swaps computes the same with the same parameters; what it cannot prove it leaves."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from test_plain import ways
from torch import nn

import heddle
from heddle.nn import MultiheadAttention, TransformerEncoderLayer

E, S, B = 16, 6, 3


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.last = None

    def forward(self, x):
        q, k, v = self.qkv(x).view(x.shape[0], x.shape[1], 12, 4).transpose(1, 2).chunk(3, 1)
        self.last = q.detach()
        o = heddle.attention(q, k, v, causal="top_left")
        return self.out(o.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = norm(E), Attention(), norm(E)
        self.mlp = nn.Sequential(nn.Linear(E, 2 * E), nn.GELU(), nn.Linear(2 * E, E))

    def forward(self, x, scale=None):
        x = x + self.attn(self.ln_1(x))
        if scale is not None:
            x = x * scale
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A small one, whose forward asks for a length: torch.fx traces its blocks alone."""

    def __init__(self, norm=nn.LayerNorm, check=False):
        super().__init__()
        self.check = check
        self.embed, self.blocks = nn.Embedding(11, E), nn.ModuleList(Block(norm) for _ in range(2))
        self.ln_f, self.head = norm(E), nn.Linear(E, 11, bias=False)

    def forward(self, tokens):
        if self.check and tokens.shape[1] > 100:
            raise ValueError("too long")
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


class Twice(nn.Module):
    """A norm of two places."""

    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(E), nn.Linear(E, E), nn.Linear(E, E)

    def forward(self, x):
        return self.b(self.norm(self.a(self.norm(x))))


class Shared(Twice):
    """One result, two Linears."""

    def forward(self, x):
        x = self.norm(x)
        return self.a(x) + self.b(x)


class Sometimes(Twice):
    """The norm's result is the module's, too, but in training."""

    def forward(self, x):
        y = self.norm(x)
        return self.a(y) if self.training else (self.a(y), y)


class Given(Twice):
    """Another way where an argument is given."""

    def forward(self, x, more=None):
        y = self.norm(x)
        return self.a(y) if more is None else self.b(y) + more


class Between(Twice):
    def forward(self, x):
        return self.a(torch.relu(self.norm(x)))


def shake(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.3 + (p.dim() == 1) * 0.5)
    return model


def assert_same(model, was, x, tolerance=1e-4):
    """Results and all gradients, by name."""
    y, want = model(x), was(x)
    assert torch.allclose(y, want, atol=tolerance)
    dy = torch.randn_like(y)
    a, b = (torch.autograd.grad(t, [p for _, p in m.named_parameters()], dy) for t, m in ((y, model), (want, was)))
    for (name, _), got, true in zip(model.named_parameters(), a, b, strict=True):
        assert (got - true).abs().max() <= tolerance * max(1.0, true.abs().max()), name
        assert true.abs().max() > 0


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("check", [False, True])
def test_gpt(norm, check):
    model = shake(GPT(norm, check))
    was, parameters = copy.deepcopy(model), dict(model.named_parameters())
    x = torch.arange(B * S).reshape(B, S) % 11
    done = heddle.replace(model)
    inside = {f"blocks.{n}.{m}" for n in (0, 1) for m in ("ln_1", "ln_2", "mlp")}
    assert done.swapped.keys() == inside | (set() if check else {"ln_f"})
    sums = {f"blocks.{n}": "activations and sums: its forward has optional arguments" for n in (0, 1)}
    assert done.left == sums | ({"ln_f": "torch.fx cannot trace what calls it"} if check else {})
    assert "blocks.0.mlp.0 (by torch.fx)" in done.swapped["blocks.0.ln_2"]
    assert "swapped blocks.0.ln_1: " in str(done) and ("left    ln_f: " in str(done)) == check
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert [*model.state_dict()] == [*was.state_dict()] and model.training and model.blocks[0].attn.last is None
    assert_same(model, was, x)
    assert "heddle::norm_linear" in ways(lambda: model(x))
    again = heddle.replace(model)
    assert not again.swapped and again.left == done.left
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))
        with torch.no_grad():
            other.blocks[0].ln_1.weight.mul_(2)  # its own, and used
        assert not torch.equal(other(x), model(x))
    was.load_state_dict(model.state_dict())


def test_compiled():
    layer = nn.TransformerEncoderLayer(E, 4, 24, batch_first=True)
    model = shake(nn.Sequential(nn.LayerNorm(E), nn.Linear(E, E), layer)).eval()
    x = torch.randn(B, S, E)
    assert len(heddle.replace(model).swapped) == 2
    torch._dynamo.reset()
    assert torch.allclose(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x), atol=1e-5)


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder(norm_first):
    layer = nn.TransformerEncoderLayer(E, 4, 24, 0.0, batch_first=True, norm_first=norm_first)
    model = shake(nn.TransformerEncoder(layer, 2, nn.LayerNorm(E), enable_nested_tensor=not norm_first))
    was, x = copy.deepcopy(model), torch.randn(B, S, E)
    done = heddle.replace(model)
    assert {"layers.0", "layers.1"} <= done.swapped.keys() and "norm" in done.left
    assert ("layers.0.norm1" in done.swapped) == norm_first and ("layers.0.norm1" in done.left) != norm_first
    assert all(type(layer) is TransformerEncoderLayer for layer in model.layers)
    assert_same(model, was, x)
    hidden = torch.arange(S) >= torch.tensor([6, 3, 4])[:, None]
    model.eval(), was.eval()
    with torch.no_grad():
        a, b = (each(x, src_key_padding_mask=hidden) for each in (model, was))
    assert torch.allclose(a[~hidden], b[~hidden], atol=1e-4)
    again = heddle.replace(model)
    assert not again.swapped


def test_attention_of_a_decoder():
    model = shake(nn.TransformerDecoderLayer(E, 4, 24, 0.0, batch_first=True))
    was, x = copy.deepcopy(model), torch.randn(B, S, E)
    done = heddle.replace(model)
    assert done.swapped.keys() == {"self_attn", "multihead_attn"} and type(model.self_attn) is MultiheadAttention
    assert torch.allclose(model(x, x), was(x, x), atol=1e-4)
    assert done.left.keys() == {"norm1", "norm2", "norm3"}


class Opaque(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize("rms", [False, True])
def test_side_by_side(rms):
    """In a Sequential, also where torch.fx cannot look into what follows; a RMSNorm without an eps of its own."""
    norm = nn.RMSNorm(E) if rms else nn.LayerNorm(E, elementwise_affine=False)
    model = nn.Sequential(norm, nn.Linear(E, 8), Opaque(), nn.Dropout(0.0), nn.LayerNorm(8))
    x = 1e-3 * torch.randn(B, S, E)
    want = model(x)
    done = heddle.replace(model)
    assert "side by side" in done.swapped["0"] and done.left == {"4": "torch.fx cannot trace what calls it"}
    assert torch.allclose(model(x), want, atol=1e-4)


def hooked():
    model = nn.Sequential(nn.LayerNorm(E), nn.Linear(E, 8))
    model[0].register_forward_hook(lambda module, given, made: None)
    return model


def same_norm():
    norm = nn.LayerNorm(E)
    return nn.Sequential(norm, nn.Linear(E, E), nn.ReLU(), norm, nn.Linear(E, 8))


class Mine(nn.Linear):
    pass


class MyAttention(nn.MultiheadAttention):
    pass


@pytest.mark.parametrize(
    "make,why",
    [
        (Twice, "it is called 2 times"),
        (Sometimes, "its result goes to something else than one Linear"),
        (Given, "its result goes to different modules"),
        (Between, "its result goes to something else than one Linear"),
        (hooked, "the norm: it has hooks"),
        (same_norm, "it is called 2 times"),
        (lambda: nn.Sequential(nn.LayerNorm(E), Mine(E, E)), "what takes its result is of class Mine"),
        (lambda: nn.Sequential(nn.LayerNorm(E), nn.Dropout(), nn.Linear(E, E)), "is of class Dropout"),
        (lambda: nn.Sequential(nn.LayerNorm((S, E)), nn.Linear(E, E)), r"it normalises \[6, 16\]"),
        (lambda: nn.Sequential(nn.LayerNorm(E).double(), nn.Linear(E, E)), "float32 and torch.float64"),
        (lambda: MyAttention(E, 4), "it is of class MyAttention"),
    ],
)
def test_left_alone(make, why):
    model = make()
    kinds = [type(module) for module in model.modules()]
    done = heddle.replace(model)
    assert [type(module) for module in model.modules()] == kinds and not done.swapped
    assert pytest.importorskip("re").search(why, next(iter(done.left.values()))), done


def test_hook_of_the_layer():
    model = nn.TransformerEncoderLayer(E, 4, norm_first=True)
    model.norm1.register_forward_pre_hook(lambda module, given: None)
    done = heddle.replace(model)
    assert done.left[""] == "norm1: it has hooks" and "self_attn" in done.swapped
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not list"):
        heddle.replace([])
