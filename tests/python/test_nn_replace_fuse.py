# SPDX-License-Identifier: Apache-2.0
"""heddle.replace of activations and sums: in Sequentials, and in forwards that are straight lines. Others stay."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from conftest import devices
from test_nn_replace import E, assert_same, shake
from test_plain import ways
from torch import nn

import heddle

B, S = 3, 6


class Mlp(nn.Module):
    """As timm has it, with a Dropout behind each product."""

    def __init__(self, act=nn.GELU, drop=0.0):
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(E, 2 * E), act(), nn.Dropout(drop)
        self.fc2, self.drop2 = nn.Linear(2 * E, E), nn.Dropout(drop)

    def forward(self, x):
        x = self.fc1(x)
        x = self.act(x)
        x = self.drop1(x)
        return self.drop2(self.fc2(x))


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(E, E), nn.Linear(E, E), nn.Linear(E, E)

    def forward(self, x):
        return x + self.c(F.gelu(self.a(x), approximate="tanh") * F.silu(self.b(x)))


class Output(nn.Module):
    """As BERT has it: post-norm, the sum behind a Dropout."""

    def __init__(self, drop=0.1):
        super().__init__()
        self.dense, self.LayerNorm, self.dropout = nn.Linear(2 * E, E), nn.LayerNorm(E), nn.Dropout(drop)

    def forward(self, hidden_states, input_tensor):
        hidden_states = self.dense(hidden_states)
        hidden_states = self.dropout(hidden_states)
        return self.LayerNorm(hidden_states + input_tensor)


class ViT(nn.Module):
    """As torchvision has its blocks: a MultiheadAttention, and a Sequential with a Dropout at its end."""

    def __init__(self, drop=0.0):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(E), nn.LayerNorm(E)
        self.self_attention = nn.MultiheadAttention(E, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(E, 2 * E), nn.GELU(), nn.Dropout(drop), nn.Linear(2 * E, E), nn.Dropout(drop)
        )
        self.dropout = nn.Dropout(drop)

    def forward(self, input):
        x = self.ln_1(input)
        x, _ = self.self_attention(x, x, x, need_weights=False)
        x = self.dropout(x)
        x = x + input
        y = self.ln_2(x)
        y = self.mlp(y)
        return x + y


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.out = Mlp(), Output(0.0)

    def forward(self, x):
        return self.out(self.up.act(self.up.fc1(x)), x)


@pytest.mark.parametrize(
    "make,swapped",
    [
        (Mlp, {"": "gelu with fc1 (its forward, by torch.fx)"}),
        (lambda: Mlp(nn.SiLU), {"": "silu with fc1 (its forward, by torch.fx)"}),
        (Functional, {"": "gelu_tanh with a, silu with b, a sum with c (its forward, by torch.fx)"}),
        (ViT, {"mlp": "gelu with 0", "": "a sum with mlp (its forward, by torch.fx)"}),
        (lambda: nn.Sequential(nn.LayerNorm(E), nn.Linear(E, 7), nn.GELU("tanh")), {"": "gelu_tanh with 1"}),
        (lambda: nn.Sequential(Mlp(), ViT()), {"0": "gelu with fc1 (its forward, by torch.fx)"}),
    ],
)
@pytest.mark.parametrize("device", devices())
def test_same_as_it_was(make, swapped, device):
    model = shake(make()).to(device)
    was, x, parameters = copy.deepcopy(model), torch.randn(B, S, E, device=device), dict(model.named_parameters())
    done = heddle.replace(model)
    assert swapped.items() <= done.swapped.items(), done
    assert [*model.state_dict()] == [*was.state_dict()] and isinstance(model, type(was))
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert_same(model, was, x)
    if device == "cpu":
        torch._dynamo.reset()
        assert torch.allclose(torch.compile(model, fullgraph=True, backend="aot_eager")(x), was(x), atol=1e-4)
    assert not heddle.replace(model).swapped
    for other in copy.deepcopy(model), pickle.loads(pickle.dumps(model)) if type(model) is nn.Sequential else model:
        assert torch.equal(other(x), model(x))


def test_pickled_elsewhere():
    """A process that has not made the class has the one that it was made of."""
    model = shake(Mlp())
    heddle.replace(model)
    bytes_, x = pickle.dumps(model), torch.randn(2, E)
    assert type(pickle.loads(bytes_)) is type(model)
    heddle._replace_fuse._classes.clear()
    assert type(pickle.loads(bytes_)) is Mlp
    assert torch.allclose(pickle.loads(bytes_)(x), model(x), atol=1e-5)


def fused_with(model, *given):
    """How often norm_linear has had an activation, and a residual."""
    seen = []
    was = heddle._replace_fuse._run

    def watch(linear, x, activation=None, residual=None):
        seen.append((activation, residual is not None))
        return was(linear, x, activation, residual)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heddle._replace_fuse, "_run", watch)
        model(*given)
    return seen


def test_what_runs():
    model, x = shake(nn.Sequential(Mlp(drop=0.5), ViT(0.5))), torch.randn(B, S, E)
    heddle.replace(model)
    assert fused_with(model, x) == [("gelu", False), ("gelu", False)]  # Dropouts that drop stand before the sum
    model.eval()
    assert fused_with(model, x) == [("gelu", False), ("gelu", False), (None, True)]
    layer = shake(nn.Sequential(nn.LayerNorm(E), nn.Linear(E, E), nn.SiLU()))
    want = layer(x)
    heddle.replace(layer)
    assert "heddle::norm_linear" in ways(lambda: layer(x)) and fused_with(layer, x) == [("silu", False)]
    assert torch.allclose(layer(x), want, atol=1e-4)


def test_post_norm():
    model = shake(Output()).eval()
    was, hidden, x = copy.deepcopy(model), torch.randn(B, S, 2 * E), torch.randn(B, S, E)
    done = heddle.replace(model)
    assert done.swapped[""].startswith("a sum with dense") and fused_with(model, hidden, x) == [(None, True)]
    assert torch.allclose(model(hidden, x), was(hidden, x), atol=1e-5)
    wide = x[:1, :1]  # a sum that repeats one side
    assert torch.allclose(model(hidden, wide), was(hidden, wide), atol=1e-5) and not fused_with(model, hidden, wide)
    double = x.double()  # and one that changes the type
    assert model(hidden, x.bfloat16()).dtype == was(hidden, x.bfloat16()).dtype
    with pytest.raises(RuntimeError):
        model(hidden, double)
    model.train(), was.train()
    torch.manual_seed(1)
    want = was(hidden, x)
    torch.manual_seed(1)
    assert torch.allclose(model(hidden, x), want, atol=1e-5) and not fused_with(model, hidden, x)


def test_what_changes_afterwards():
    """Hooks, other parts, other types and other forwards are seen in each call."""
    model, x = shake(Mlp()), torch.randn(B, S, E)
    was = copy.deepcopy(model)
    heddle.replace(model)
    seen = []
    hook = model.fc1.register_forward_hook(lambda module, given, made: seen.append(made))
    assert torch.allclose(model(x), was(x), atol=1e-5) and len(seen) == 1
    hook.remove()
    model.act = was.act = nn.ReLU()
    assert torch.allclose(model(x), was(x), atol=1e-5) and not fused_with(model, x)
    model.fc1 = was.fc1 = nn.Identity()
    model.fc2 = was.fc2 = nn.Linear(E, E)
    assert torch.allclose(model(x), was(x), atol=1e-5)
    model, was = shake(Mlp()), shake(Mlp())
    heddle.replace(model)
    with torch.autocast("cpu"):
        assert (model(x) - was(x)).abs().max() < 0.1 and model(x).dtype == was(x).dtype
    assert torch.allclose(model.double()(x.double()), was.double()(x.double()))
    sequential = shake(nn.Sequential(nn.Linear(E, E), nn.GELU()))
    heddle.replace(sequential)
    sequential.append(nn.Linear(E, 5))
    sequential[1] = nn.ReLU()
    assert torch.allclose(sequential(x), sequential[2](F.relu(F.linear(x, sequential[0].weight, sequential[0].bias))))


class Scaled(Functional):
    def __init__(self):
        super().__init__()
        self.scale = 2.0

    def forward(self, x):
        return x + self.c(F.gelu(self.a(x))) * self.scale


class Branching(Functional):
    def forward(self, x):
        if self.training:
            return F.gelu(self.a(x))
        return x + self.c(x)


class Optional(Functional):
    def forward(self, x, more=None):
        return F.gelu(self.a(x))


class Keeping(Functional):
    def forward(self, x):
        self.last = F.gelu(self.a(x))
        return self.last


class Random(Functional):
    def forward(self, x):
        return x + self.c(x) + torch.rand(1)


class InPlace(Functional):
    def forward(self, x):
        x = F.gelu(self.a(x))
        x += self.c(x)
        return x


class Twice(Functional):
    """The sum of the activation and of what it is of."""

    def forward(self, x):
        y = self.a(x)
        return F.gelu(y) + y


class Between(Functional):
    """Another part, which may be random, runs between a Linear and the sum with it."""

    def forward(self, x):
        y = self.a(x)
        z = self.b(x)
        return y + z.relu()


@pytest.mark.parametrize(
    "make,why",
    [
        (Scaled, "reads scale"),
        (Branching, "reads training"),
        (Optional, "optional arguments"),
        (Keeping, "no straight line (STORE_ATTR)"),
        (Random, "reads rand"),
        (InPlace, "works in place"),
        (Twice, None),
        (Between, None),
    ],
)
def test_left_alone(make, why):
    model = shake(make())
    was, x = copy.deepcopy(model), torch.randn(B, S, E)
    done = heddle.replace(model)
    assert not done.swapped and type(model) is make
    assert (why in done.left[""]) if why else not done.left
    torch.manual_seed(0)
    want = was(x)
    torch.manual_seed(0)
    assert torch.equal(model(x), want)


def test_models_of_transformers():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ids = torch.arange(14).reshape(2, 7)
    common = {"vocab_size": 20, "max_position_embeddings": 16}
    bert = transformers.BertConfig(
        **common, hidden_size=E, intermediate_size=2 * E, num_hidden_layers=2, num_attention_heads=4
    )
    llama = transformers.LlamaConfig(
        **common, hidden_size=E, intermediate_size=2 * E, num_hidden_layers=2, num_attention_heads=4
    )
    gpt = transformers.GPT2Config(vocab_size=20, n_positions=16, n_embd=E, n_layer=2, n_head=4)
    expected = {
        "BertModel": (bert, "encoder.layer.0.", {"intermediate": "gelu", "output": "a sum with dense"}),
        "LlamaModel": (llama, "layers.1.", {"mlp": "silu with gate_proj"}),
        "GPT2Model": (gpt, "h.0.", {}),  # whose products are Conv1D
    }
    for name, (config, at, parts) in expected.items():
        model = getattr(transformers, name)(config).eval()
        was = copy.deepcopy(model)
        done = heddle.replace(model)
        for part, what in parts.items():
            assert done.swapped[at + part].startswith(what), done
        transposed = [each for each, why in done.left.items() if "Conv1D would be copied" in why]
        conv1d = [each for each, module in was.named_modules() if type(module).__name__ == "Conv1D"]
        assert transposed == conv1d and len(conv1d) == (8 if name == "GPT2Model" else 0)
        with torch.no_grad():
            a, b = (each(input_ids=ids).last_hidden_state for each in (model, was))
        assert torch.allclose(a, b, atol=1e-4) and b.abs().max() > 0.1
