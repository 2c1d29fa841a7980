# SPDX-License-Identifier: Apache-2.0
"""heddle.nn's MultiheadAttention, TransformerEncoderLayer and LlamaBlock against PyTorch's (and transformers') own,
with their state dicts."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from conftest import devices
from torch import nn

import heddle.nn
from heddle import _nn_multihead
from heddle.nn import LlamaBlock, MultiheadAttention, TransformerEncoderLayer

everywhere = pytest.mark.parametrize("device", devices())
B, L, S, E, H = 3, 5, 7, 16, 4


def pair(ours, theirs, *args, dtype=torch.float32, device="cpu", **options):
    """The same parameters in both; none of them what a fresh module has."""
    torch.manual_seed(0)
    want = theirs(*args, **options).to(device, dtype)
    with torch.no_grad():
        for p in want.parameters():
            p.copy_(torch.randn(p.shape) * 0.3 + (p.dim() == 1) * 0.5)
    got = ours(*args, **options).to(device, dtype)
    assert [*got.state_dict()] == [*want.state_dict()]
    got.load_state_dict(want.state_dict())
    return got, want


def assert_same(got, want, tolerance):
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.shape == b.shape and a.dtype == b.dtype
            assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item())


def compare(got, want, inputs, tolerance, **masks):
    """Results and all gradients."""
    made = [module(*inputs, **masks) for module in (got, want)]
    made = [m if isinstance(m, tuple) else (m,) for m in made]
    assert_same(*made, tolerance)
    dy = torch.randn_like(made[1][0])
    leaves = [t for t in {id(t): t for t in inputs}.values() if t.requires_grad]
    grads = []
    for module, (y, *weights) in zip((got, want), made, strict=True):
        total = (y * dy).sum() + sum(w.square().sum() for w in weights if w is not None)
        grads.append(torch.autograd.grad(total, [*leaves, *module.parameters()], allow_unused=True))
    assert_same(*grads, 4 * tolerance)
    assert grads[1][0].abs().max() > 0


def padding(kind, device):
    hidden = torch.arange(S) >= torch.tensor([S, 4, 6])[:, None]
    hidden = hidden.to(device)
    return hidden if kind == "bool" else torch.zeros(hidden.shape, device=device).masked_fill(hidden, -3.0)


MASKS = {
    "none": lambda device: {},
    "padding": lambda device: {"key_padding_mask": padding("bool", device)},
    "added padding": lambda device: {"key_padding_mask": padding("float", device)},
    "2-D": lambda device: {"attn_mask": (torch.arange(S) > torch.arange(L)[:, None] + 1).to(device)},
    "3-D and padding": lambda device: {
        "attn_mask": (torch.arange(B * H * L * S).reshape(B * H, L, S) % 3 == 1).to(device),
        "key_padding_mask": padding("bool", device),
    },
    "3-D added": lambda device: {"attn_mask": torch.randn(B * H, L, S, device=device)},
    "added both": lambda device: {
        "attn_mask": torch.randn(L, S, device=device),
        "key_padding_mask": padding("float", device),
    },
}
OPTIONS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "kdim": {"kdim": 10, "vdim": 6},
    "bias_kv": {"add_bias_kv": True, "batch_first": True},
    "all": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 10, "vdim": 6},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", OPTIONS)
@everywhere
def test_multihead(name, mask, device):
    options = OPTIONS[name]
    got, want = pair(MultiheadAttention, nn.MultiheadAttention, E, H, device=device, **options)
    shapes = ((L, B, E), (S, B, options.get("kdim", E)), (S, B, options.get("vdim", E)))
    q, k, v = (torch.randn(shape, device=device, requires_grad=True) for shape in shapes)
    if options.get("batch_first"):
        q, k, v = (t.detach().transpose(0, 1).requires_grad_() for t in (q, k, v))
    masks = MASKS[mask](device)
    compare(got, want, (q, k, v), 2e-5, need_weights=False, **masks)
    compare(got, want, (q, k, v), 2e-5, average_attn_weights=name == "all", **masks)


@pytest.mark.parametrize("way", ["train", "eval", "no grad", "unbatched", "bfloat16", "causal", "causal and padding"])
@everywhere
def test_multihead_of_itself(way, device):
    dtype, tolerance = (torch.bfloat16, 0.05) if way == "bfloat16" else (torch.float32, 2e-5)
    got, want = pair(MultiheadAttention, nn.MultiheadAttention, E, H, batch_first=True, dtype=dtype, device=device)
    x = torch.randn(*(() if way == "unbatched" else (B,)), S, E, device=device).to(dtype).requires_grad_()
    options = {}
    if way in ("eval", "no grad"):
        got.eval(), want.eval()
    if "causal" in way:
        options = {"attn_mask": nn.Transformer.generate_square_subsequent_mask(S, device=device), "is_causal": True}
    if "padding" in way:
        options["key_padding_mask"] = padding("bool", device)
    if way == "no grad":
        with torch.no_grad():
            assert_same(got(x, x, x), want(x, x, x), tolerance)
        return
    compare(got, want, (x, x, x), tolerance, **options)
    compare(got, want, (x, x, x), tolerance, need_weights=False, **options)


def test_dropout_and_what_sees_nothing():
    torch.manual_seed(0)
    module = MultiheadAttention(E, H, dropout=0.5, batch_first=True)
    x = torch.randn(B, S, E)
    y, weights = module(x, x, x, average_attn_weights=False)
    v = F.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)[2].unflatten(-1, (H, -1)).transpose(1, 2)
    again = module.out_proj((weights @ v).transpose(1, 2).flatten(2))
    assert torch.allclose(y, again, atol=1e-5)  # the weights are those that were used
    assert 0.3 < (weights == 0).float().mean() < 0.7 and not torch.equal(y, module(x, x, x)[0])
    module.eval()
    hidden = torch.zeros(S, S, dtype=torch.bool)
    hidden[2] = True
    y, weights = module(x, x, x, attn_mask=hidden)
    assert torch.equal(y[:, 2], module.out_proj.bias.expand(B, E)) and not weights[:, 2].any()


LAYERS = {
    "post": {},
    "pre": {"norm_first": True},
    "pre, batch first, gelu": {"norm_first": True, "batch_first": True, "activation": "gelu"},
    "post, batch first, no bias": {"batch_first": True, "bias": False, "activation": F.silu, "layer_norm_eps": 1e-3},
    "pre, no bias": {"norm_first": True, "bias": False},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
@everywhere
def test_encoder_layer(name, dtype, device):
    options = {"dropout": 0.0, **LAYERS[name]}
    got, want = pair(
        TransformerEncoderLayer, nn.TransformerEncoderLayer, E, H, 24, dtype=dtype, device=device, **options
    )
    first = options.get("batch_first")
    x = torch.randn(*((B, S) if first else (S, B)), E, device=device).to(dtype).requires_grad_()
    causal = nn.Transformer.generate_square_subsequent_mask(S, device=device, dtype=dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    for masks in (
        {},
        {"src_key_padding_mask": padding("bool", device)},
        {"src_mask": causal, "is_causal": True},
        {"src_mask": causal, "src_key_padding_mask": padding("float", device).to(dtype), "is_causal": True},
    ):
        compare(got, want, (x,), tolerance, **masks)
    got.eval(), want.eval()
    # PyTorch's way of inference takes GELU by tanh on a GPU, 1e-3 off.
    torch.backends.mha.set_fastpath_enabled(device == "cpu")
    try:
        with torch.no_grad():
            assert_same((got(x),), (want(x),), tolerance)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    if dtype == torch.float32:
        compare(got, want, (x[:, 0].detach().requires_grad_(),), tolerance)


def test_encoder():
    """PyTorch's stack of our layers, in training and not: with padding, where its own would make nested tensors."""
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="enable_nested_tensor is True"):
        got = nn.TransformerEncoder(TransformerEncoderLayer(E, H, 24, 0.0, batch_first=True), 2, nn.LayerNorm(E))
    want = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 24, 0.0, batch_first=True), 2, nn.LayerNorm(E))
    want.load_state_dict(got.state_dict())
    x, hidden = torch.randn(B, S, E), padding("bool", "cpu")
    for train in (True, False):
        got.train(train), want.train(train)
        with torch.set_grad_enabled(train):
            a, b = (module(x, src_key_padding_mask=hidden) for module in (got, want))
        assert torch.allclose(a[~hidden], b[~hidden], atol=1e-5)
    mask = nn.Transformer.generate_square_subsequent_mask(S)
    assert torch.allclose(got(x, mask), want(x, mask), atol=1e-5)


@pytest.mark.parametrize(
    "make", [lambda: MultiheadAttention(E, H), lambda: TransformerEncoderLayer(E, H, 24, norm_first=True)]
)
def test_copies(make):
    module = make().eval()
    x = torch.randn(S, B, E)
    run = (lambda m: m(x, x, x)[0]) if isinstance(module, MultiheadAttention) else (lambda m: m(x))
    other = make().eval()
    other.load_state_dict(pickle.loads(pickle.dumps(module.state_dict())))
    for each in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), other):
        assert torch.equal(run(each), run(module))


@pytest.mark.parametrize(
    "call,error,text",
    [
        (lambda m, x: m(x, x, x, attn_mask=torch.ones(2, 2)), ValueError, r"attn_mask has shape \[2, 2\]"),
        (lambda m, x: m(x, x, x, attn_mask=torch.ones(S, S, dtype=torch.int64)), TypeError, "attn_mask is torch.int64"),
        (
            lambda m, x: m(x, x, x, key_padding_mask=torch.ones(2, 2)),
            ValueError,
            r"key_padding_mask has shape \[2, 2\]",
        ),
        (lambda m, x: m(x[..., :3], x, x), ValueError, "query has 3 features, but embed_dim = 16"),
        (lambda m, x: m(x, x[0], x), ValueError, "3, 2 and 3 dimensions"),
        (lambda m, x: m(x, x, x, is_causal=True), RuntimeError, "Need attn_mask"),
        (
            lambda m, x: m(*[torch.nested.nested_tensor([x[0]], layout=torch.jagged)] * 3),
            TypeError,
            "query is a nested",
        ),
        (lambda m, x: m(x, x, [1.0]), TypeError, "value must be a torch.Tensor"),
        (lambda m, x: TransformerEncoderLayer(E, H)(x[..., :3]), ValueError, r"src has shape \[7, 3, 3\]"),
        (lambda m, x: LlamaBlock(E, 3), ValueError, "heads = 3 does not divide dim = 16"),
        (lambda m, x: LlamaBlock(E, 4, 3), ValueError, "kv_heads = 3 does not divide"),
        (lambda m, x: LlamaBlock(E, 4, head_dim=5), ValueError, "head_dim = 5"),
        (lambda m, x: LlamaBlock(E, 4)(x[0]), ValueError, r"x has shape \[3, 16\]"),
    ],
)
def test_refused(call, error, text):
    with pytest.raises(error, match=text):
        call(MultiheadAttention(E, H), torch.randn(S, B, E))


def test_llama_block():
    """Against transformers' own layer, the very weights side by side."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(hidden_size=E, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24)
    config._attn_implementation = "eager"
    config.rms_norm_eps = 1e-5
    torch.manual_seed(0)
    theirs = llama.LlamaDecoderLayer(config, 0)
    block = LlamaBlock(E, 4, 2, hidden=24)
    attn, mlp = theirs.self_attn, theirs.mlp
    with torch.no_grad():
        for norm, ours in ((theirs.input_layernorm, block.qkv), (theirs.post_attention_layernorm, block.up)):
            norm.weight.uniform_(0.5, 1.5)
            ours.gamma.copy_(norm.weight)
        block.qkv.weight.copy_(torch.cat([p.weight for p in (attn.q_proj, attn.k_proj, attn.v_proj)]))
        block.up.weight.copy_(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        block.out.weight.copy_(attn.o_proj.weight)
        block.down.weight.copy_(mlp.down_proj.weight)
    x = torch.randn(B, S, E, requires_grad=True)
    places = torch.arange(S) + 3
    rotary = llama.LlamaRotaryEmbedding(config)(x, places[None])
    hidden = torch.full((S, S), -torch.inf).triu(1)[None, None]
    want = theirs(x, attention_mask=hidden, position_embeddings=rotary)
    want = want[0] if isinstance(want, tuple) else want
    got = block(x, positions=places)
    assert torch.allclose(got, want, atol=1e-5)
    dy = torch.randn_like(got)
    for a, b in zip(*(torch.autograd.grad(y, x, dy) for y in (got, want)), strict=True):
        assert torch.allclose(a, b, atol=1e-4)
    assert torch.allclose(block(x), got, atol=1e-5)  # only the distance counts
    short = block(x[:, :4])
    assert torch.allclose(block(x, seqlens=torch.tensor([4, 4, 4]))[:, :4], short, atol=1e-5)
    assert heddle.nn.LlamaBlock is LlamaBlock and "rope_theta" in repr(block)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("first", [True, False])
def test_the_short_way(first, device, monkeypatch):
    """Self-attention without masks goes past the checks and look-ups, and comes to the same."""
    torch.manual_seed(0)
    module = MultiheadAttention(E, 4, batch_first=first, device=device)
    x = torch.randn(B, S, E, device=device, requires_grad=True)

    def run(query, key):
        out, _ = module(query, key, key, need_weights=False)
        return out, *torch.autograd.grad(out.square().sum(), (x, *module.parameters()))

    expected = run(x, x * 1)
    with monkeypatch.context() as patch:
        patch.setattr(_nn_multihead, "own", None)  # cannot be called
        got = run(x, x)
        with pytest.raises(TypeError, match="not callable"):
            run(x, x * 1)
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-4) and b.abs().max() > 0.01
    nn.utils.parametrize.register_parametrization(module, "in_proj_weight", nn.Softsign())
    weight = module.in_proj_weight
    plain = MultiheadAttention(E, 4, batch_first=first, device=device)
    plain.load_state_dict(
        {name: weight.detach() if name == "in_proj_weight" else getattr(module.out_proj, name[9:], module.in_proj_bias)
         for name in plain.state_dict()}
    )  # fmt: skip
    assert torch.allclose(module(x, x, x, need_weights=False)[0], plain(x, x, x)[0], atol=1e-5)
    with pytest.raises(ValueError, match="has 5 features"):
        plain(x[..., :5], x[..., :5], x[..., :5], need_weights=False)
    with pytest.raises(TypeError, match="sparse"):
        plain(*[x.detach().to_sparse()] * 3, need_weights=False)


OF_PYTORCH = {
    "MultiheadAttention": lambda **o: MultiheadAttention(E, H, **o),
    "MultiheadAttention, more keys": lambda **o: MultiheadAttention(E, H, add_bias_kv=True, add_zero_attn=True, **o),
    "TransformerEncoderLayer, pre-norm": lambda **o: TransformerEncoderLayer(E, H, 24, 0.0, norm_first=True, **o),
    "TransformerEncoderLayer, post-norm": lambda **o: TransformerEncoderLayer(E, H, 24, 0.1, activation="gelu", **o),
    "TransformerEncoder": lambda **o: nn.TransformerEncoder(
        TransformerEncoderLayer(E, H, 24, 0.0, **o), 2, nn.LayerNorm(E, device=o["device"]), enable_nested_tensor=False
    ),
}


def call_of(name, module):
    """As its arguments are: a query, keys and values, with and without masks and weights."""
    if not name.startswith("MultiheadAttention"):
        return lambda x, hidden: module(x, src_key_padding_mask=hidden)

    def attend(x, hidden):
        weighted, weights = module(x, 2 * x, x.sin(), key_padding_mask=hidden)
        return module(x, x, x, need_weights=False)[0] + weighted, weights

    return attend


@pytest.mark.parametrize("name", OF_PYTORCH)
@pytest.mark.parametrize("batch_first", [False, True])
@everywhere
def test_compiled(name, batch_first, device):
    """In one graph, forward and backward."""
    module = OF_PYTORCH[name](batch_first=batch_first, device=device).eval()
    call, x = call_of(name, module), torch.randn(L, L, E, device=device, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for hidden in (None, torch.arange(L, device=device).expand(L, L) > 2):
        results, grads = [], []
        for run in (compiled, call):
            made = run(x, hidden)
            made = made if isinstance(made, tuple) else (made,)
            results.append(made)
            loss = sum(t.sin().sum() for t in made)
            grads.append(torch.autograd.grad(loss, [x, *module.parameters()], allow_unused=True))
        assert_same(*results, 1e-5)
        assert_same(*grads, 1e-4)


class Called(nn.Module):
    def __init__(self, name, module):
        super().__init__()
        self.module, self.call = module, call_of(name, module)

    def forward(self, x, hidden):
        return self.call(x, hidden)


@pytest.mark.parametrize("name", OF_PYTORCH)
@pytest.mark.parametrize("strict", [False, True])
@everywhere
def test_exported(name, strict, device):
    """With the operators of heddle, for any number of tokens."""
    module = Called(name, OF_PYTORCH[name](batch_first=True, device=device).eval())
    x, hidden = torch.randn(B, S, E, device=device), torch.arange(S, device=device).expand(B, S) > 4
    tokens = torch.export.Dim("tokens", min=2, max=64)
    exported = torch.export.export(
        module, (x, hidden), dynamic_shapes={"x": {1: tokens}, "hidden": {1: tokens}}, strict=strict
    )
    called = {str(node.target) for node in exported.graph.nodes}
    assert "heddle.attention.default" in called and not any("scaled_dot_product" in each for each in called)
    assert ("heddle.norm_linear.default" in called) == name.startswith("TransformerEncoder")
    for s in (S, 12):
        x, hidden = torch.randn(B, s, E, device=device), torch.arange(s, device=device).expand(B, s) > 4
        made, want = (t if isinstance(t, tuple) else (t,) for t in (exported.module()(x, hidden), module(x, hidden)))
        assert_same(made, want, 1e-5)
