# SPDX-License-Identifier: Apache-2.0
"""heddle.hf for layers that write their attention out (GPT-J, GPT-Neo, MPT, ...), against transformers' eager.

All of them, with padding and generation, are in compatibility.py."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from conftest import devices

transformers = pytest.importorskip("transformers")

import heddle.hf  # noqa: E402
from heddle import _hf_written_out as written_out  # noqa: E402

heddle.hf.register()

everywhere = pytest.mark.parametrize("device", devices())
HEADS = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
FAMILIES = {
    "GPTJ": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64},
    "GPTNeo": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
        "max_position_embeddings": 64,
    },
    "Mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "Electra": {**HEADS, "embedding_size": 32, "is_decoder": True},
    "MPNet": HEADS,
    "RoFormer": {**HEADS, "embedding_size": 32},
}
for name in list(FAMILIES):  # this transformers may have taught a family to call what is registered
    module = inspect.getmodule(getattr(transformers, f"{name}Model"))
    if "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(module):
        del FAMILIES[name]
families = pytest.mark.parametrize("family", list(FAMILIES))


def made(family, name, kind="Model", **changes):
    config = getattr(transformers, f"{family}Config")(vocab_size=97, **FAMILIES[family] | changes)
    config._attn_implementation = name
    torch.manual_seed(0)
    model = getattr(transformers, family + kind)(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def layers(model):
    return [layer for layer in model.modules() if type(layer).__name__.startswith("Heddle")]


def text():
    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return ids, mask


def count_calls(monkeypatch):
    calls = []
    monkeypatch.setattr(
        written_out, "attention", lambda *a, _inner=written_out.attention, **k: calls.append(1) or _inner(*a, **k)
    )
    return calls


# ------------------------------------------------------------------------------------------- what is noted


def tensors(device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    return normal(2, 4, 6, 8), normal(2, 4, 7, 8), normal(2, 4, 7, 8), normal(4, 1, 7), normal(2, 1, 6, 7)


WAYS = {
    "scaled": lambda s, bias, more, hidden: s / 3,
    "scaled twice": lambda s, bias, more, hidden: 0.5 * (s * torch.tensor(0.7)),
    "bias": lambda s, bias, more, hidden: s + bias,
    "biases and scales": lambda s, bias, more, hidden: (bias + s / 2 + more) * 0.3 + more,
    "filled": lambda s, bias, more, hidden: s.masked_fill(hidden, torch.finfo(s.dtype).min) + bias,
    "where": lambda s, bias, more, hidden: torch.where(~hidden, s.float() / 2, torch.tensor(-1e30)),
    "filled twice": lambda s, bias, more, hidden: s.masked_fill(hidden, -1e9).masked_fill(
        torch.arange(7, device=s.device) == 1, -1e9
    ),
    "sizes": lambda s, bias, more, hidden: s + bias[:, :, : s.size(-1)].expand(s.shape[1], s.size()[2], 7),
}


@pytest.mark.parametrize("way", list(WAYS))
@everywhere
def test_what_a_layer_does_to_its_scores(way, device):
    """The layer's own code, with the scores and without them: the same results and gradients."""
    given = tensors(device)
    hidden = torch.ones(2, 1, 6, 7, dtype=torch.bool, device=device).triu(2)

    def layer(q, k, v, bias, more):
        scores = WAYS[way](torch.matmul(q, k.transpose(-1, -2)), bias, more, hidden)
        weights = F.softmax(scores.float(), dim=-1).type_as(scores).to(v.dtype)
        weights = F.dropout(weights, p=0.5, training=False)
        return torch.matmul(weights, v), weights

    want, _ = layer(*given)
    with written_out._Noting():
        got, weights = layer(*given)
    assert isinstance(weights, written_out.Scores) and weights.shape == (2, 4, 6, 7) and weights.dim() == 4
    assert torch.allclose(got, want, atol=1e-5)
    grads = [torch.autograd.grad(t.square().sum(), given, allow_unused=True) for t in (got, want)]
    for a, b in zip(*grads, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, atol=1e-4)


REFUSED = {
    "gives its scores to tril": lambda s, v: torch.tril(s),
    "asks its scores for .view": lambda s, v: s.view(8, 6, 7),
    "gives its scores to cat": lambda s, v: torch.cat([s, s], -1),
    "adds a Scores": lambda s, v: s + s,
    "adds a float": lambda s, v: s + 1.0,
    "multiplies by a tensor of shape": lambda s, v: s * torch.ones(4, 1, 1),
    "multiplies its scores by -1": lambda s, v: s * -1.0,
    "fills scores with 0": lambda s, v: s.masked_fill(torch.ones(6, 7, dtype=torch.bool), 0.0),
    "takes a softmax over dimension 1": lambda s, v: F.softmax(s, dim=1),
    "multiplies scores without a softmax": lambda s, v: s @ v,
    "drops scores": lambda s, v: F.dropout(s, 0.5),
    "takes the softmax of its weights": lambda s, v: F.softmax(F.softmax(s, dim=-1), dim=-1),
    "multiplies its weights": lambda s, v: F.softmax(s, dim=-1) * torch.ones(1, 4, 1, 1),
    "adds to its weights": lambda s, v: F.softmax(s, dim=-1) + v,
    "chooses between other numbers": lambda s, v: torch.where(torch.ones(6, 7, dtype=torch.bool), torch.zeros(6, 7), s),
}


@pytest.mark.parametrize("why", list(REFUSED))
def test_what_is_refused(why):
    q, k, v, _, _ = tensors()
    with pytest.raises(NotImplementedError, match=f"writes its attention out and {why}"), written_out._Noting():
        REFUSED[why](torch.matmul(q, k.mT), v)


@everywhere
def test_dropout_is_drawn(device):
    q, k, v, _, _ = tensors(device)

    def drawn():
        with written_out._Noting():
            weights = F.dropout(F.softmax(q @ k.mT, dim=-1), p=0.4, training=True)
            return weights @ v

    torch.manual_seed(0)
    first, second = drawn(), drawn()
    torch.manual_seed(0)
    assert torch.equal(first, drawn()) and not torch.equal(first, second)
    mean = torch.stack([drawn() for _ in range(2000)]).mean(0)
    assert torch.allclose(mean, (q @ k.mT).softmax(-1) @ v, atol=0.15)


@everywhere
def test_wide_biases_keep_what_they_say(device):
    """ALiBi's of a thousand keys, in bfloat16: rounded to it they would be off by up to 4."""
    q, k, v, _, _ = (t.detach() for t in tensors(device, torch.bfloat16))
    bias = -1000.3 - torch.arange(7.0, device=device).expand(4, 1, 7) * torch.tensor(0.7, device=device)
    with written_out._Noting():
        got = (F.softmax(q @ k.mT + bias, dim=-1)) @ v
    want = F.softmax(q.double() @ k.double().mT + bias, dim=-1) @ v.double()
    assert got.dtype == torch.bfloat16 and torch.allclose(got.double(), want, atol=0.02)


# ------------------------------------------------------------------------------------------- models


@families
@pytest.mark.parametrize("padded", [False, True])
def test_models(family, padded, monkeypatch):
    ids, mask = text()
    results, calls = [], count_calls(monkeypatch)
    for name in ("eager", "heddle"):
        model = made(family, name)
        out = model(ids, attention_mask=mask if padded else None).last_hidden_state
        out = out[mask.bool()] if padded else out
        (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
        results.append((out, [p.grad for p in model.parameters() if p.grad is not None]))
        assert len(layers(model)) == len(calls) == (2 if name == "heddle" else 0)
    assert torch.allclose(results[0][0], results[1][0], atol=1e-4)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert torch.allclose(a, b, atol=1e-4 * a.abs().max().item() + 1e-5)


@families
def test_weights(family):
    ids, mask = text()
    want, got = (made(family, name)(ids, attention_mask=mask, output_attentions=True) for name in ("eager", "heddle"))
    assert len(want.attentions) == len(got.attentions) == 2
    for a, b in zip(want.attentions, got.attentions, strict=True):
        sees = mask.bool()[:, None].expand(2, 4, 9)
        assert torch.allclose(a[sees], b[sees], atol=1e-5)
    assert not made(family, "heddle")(ids).attentions


def test_weights_by_the_configuration():
    ids, _ = text()
    want, got = (made("Mpt", name, output_attentions=True)(ids) for name in ("eager", "heddle"))
    assert len(want.attentions) == len(got.attentions) == 2
    assert torch.allclose(want.attentions[1], got.attentions[1], atol=1e-5)


@pytest.mark.parametrize("family", sorted({"GPTJ", "GPTNeo", "Mpt", "Electra"} & set(FAMILIES)))
def test_generation(family, monkeypatch):
    ids, mask = text()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    calls = count_calls(monkeypatch)
    results = []
    for name in ("eager", "heddle"):
        model = made(family, name, "ForCausalLM")
        results += [model.generate(ids, attention_mask=mask, **options, **more) for more in ({}, {"num_beams": 3})]
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3]) and len(calls) >= 32


def test_windows_of_gpt_neo_and_static_caches():
    """Its local layers read the window's rows at the end of the cache: wrong in eager, too."""
    ids, mask = text()
    model = made("GPTNeo", "heddle", "ForCausalLM")
    options = {"max_new_tokens": 3, "do_sample": False, "disable_compile": True, "pad_token_id": 0}
    with pytest.raises(NotImplementedError, match=r"GPTNeoSelfAttention.*static cache"):
        model.generate(ids, attention_mask=mask, cache_implementation="static", **options)


@pytest.mark.parametrize("family", ["GPTNeo", "Mpt"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(family, dtype):
    """No further from float32 than eager is, twice."""
    ids, mask = text()
    truth = made(family, "eager")(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    errors = []
    for name in ("eager", "heddle"):
        out = made(family, name).to(dtype)(ids, attention_mask=mask).last_hidden_state[mask.bool()]
        errors.append((out.float() - truth).abs().max().item())
    assert errors[1] <= 2 * errors[0]


@families
def test_switching(family):
    """The name on and off a model that is made, which transformers itself would not do."""
    ids, mask = text()
    model, expected = made(family, "eager"), made(family, "eager")
    if not hasattr(model, "set_attn_implementation"):
        pytest.skip("not in this transformers")
    own = [type(layer) for layer in model.modules()]
    model.set_attn_implementation("heddle")
    assert model.config._attn_implementation == "heddle" and len(layers(model)) == 2
    got, want = (each(ids, attention_mask=mask).last_hidden_state[mask.bool()] for each in (model, expected))
    assert torch.allclose(got, want, atol=1e-4) and not torch.equal(got, want)
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager" and [type(layer) for layer in model.modules()] == own
    assert torch.equal(model(ids, attention_mask=mask).last_hidden_state[mask.bool()], want)


def test_copies_and_files(tmp_path):
    ids, mask = text()
    model = made("GPTNeo", "heddle")
    model.save_pretrained(tmp_path)
    loaded = transformers.GPTNeoModel.from_pretrained(tmp_path, attn_implementation="heddle").eval()
    for other in (copy.deepcopy(model), loaded):
        assert len(layers(other)) == 2
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)
        got, want = (each(ids, attention_mask=mask).last_hidden_state for each in (other, model))
        assert torch.equal(got, want)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    ids, _ = text()
    grads = []
    for checkpointing in (False, True):
        dropouts = {"attention_dropout": 0.3, "resid_dropout": 0.0, "embed_dropout": 0.0}
        model = made("GPTNeo", "heddle", "ForCausalLM", **dropouts).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        torch.manual_seed(0)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, atol=2e-5)


def test_compile():
    ids, _ = text()
    results = []
    torch._dynamo.reset()
    for name in ("eager", "heddle"):
        model = made("Mpt", name, "ForCausalLM")
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if name == "heddle" else model
        out = run(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
        results.append((out.logits, [p.grad for p in model.parameters()]))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-4)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert torch.allclose(a, b, atol=1e-4 * a.abs().max().item() + 1e-6)


def test_head_masks_are_refused():
    """Of transformers 4; from 5 on there are none."""
    ids, _ = text()
    model = made("GPTNeo", "heddle")
    if not transformers.__version__.startswith("4."):
        pytest.skip("not in this transformers")
    with pytest.raises(NotImplementedError, match="head_mask"):
        model(ids, head_mask=torch.ones(2, 4))
