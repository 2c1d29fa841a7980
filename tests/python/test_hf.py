# SPDX-License-Identifier: Apache-2.0
"""heddle.hf: small Llama- and GPT-2-shaped models with random weights, against transformers' sdpa.

What is refused, and the arguments of the adapter, are in test_hf_refusals.py."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import devices

transformers = pytest.importorskip("transformers")

import heddle.hf  # noqa: E402

heddle.hf.register()


def llama():
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM, config


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=97,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel, config


def mistral():
    config = transformers.MistralConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        sliding_window=5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return transformers.MistralForCausalLM, config


def pair(family, device="cpu"):
    """The same model twice: with sdpa and with heddle."""
    torch.manual_seed(0)
    kind, config = family()
    models = []
    state = None
    for name in ("sdpa", "heddle"):
        own = copy.deepcopy(config)
        own._attn_implementation = name
        model = kind(own)
        if state is None:
            state = model.state_dict()
        model.load_state_dict(state)
        assert model.config._attn_implementation == name
        models.append(model.to(device))
    return models


everywhere = pytest.mark.parametrize("device", devices())
families = pytest.mark.parametrize("family", [llama, gpt2, mistral])


@families
@pytest.mark.parametrize("padded", [False, True])
@everywhere
def test_training_matches_sdpa(family, padded, device, monkeypatch):
    expected, model = pair(family, device)
    calls = []

    def counted(name):
        function = getattr(heddle.hf, name)

        def call(*args, **options):
            result = function(*args, **options)
            calls.extend([1] * (result is not NotImplemented))
            return result

        monkeypatch.setattr(heddle.hf, name, call)

    counted("attention")
    counted("quick")
    counted("quick_options")
    ids = torch.randint(3, 97, (2, 11), device=device)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :4] = 0
    results = []
    for each in (expected, model):
        each.train()
        # Neither padding nor what is told from padding: a query that sees no key is anybody's choice.
        labels = ids.masked_fill(mask * mask.roll(1, 1) == 0, -100)
        got = each(input_ids=ids, attention_mask=mask if padded else None, labels=labels)
        got.loss.backward()
        results.append((got.loss.detach(), got.logits.detach()[mask == 1], [p.grad for p in each.parameters()]))
    assert len(calls) == 2  # one a layer: it was heddle that ran
    assert torch.allclose(results[0][0], results[1][0], atol=1e-5)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-4)
    for a, b in zip(results[0][2], results[1][2], strict=True):
        assert torch.allclose(a, b, atol=2e-5), (a - b).abs().max()


@families
@pytest.mark.parametrize("padded", [False, True])
@everywhere
def test_generation_matches_sdpa(family, padded, device):
    expected, model = (each.eval() for each in pair(family, device))
    ids = torch.randint(3, 97, (2, 7), device=device)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :3] = 0
    results = [
        each.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, use_cache=True)
        for each in (expected, model)
    ]
    assert torch.equal(*results)


@everywhere
def test_static_cache_and_beams(device):
    expected, model = (each.eval() for each in pair(llama, device))
    ids = torch.randint(3, 97, (2, 7), device=device)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    for options in ({"cache_implementation": "static"}, {"num_beams": 3}):
        options |= {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
        assert torch.equal(*(each.generate(ids, **options) for each in (expected, model)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    ids = torch.randint(3, 97, (2, 11))
    grads = []
    for each in pair(llama):
        each.train()
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        each(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        grads.append([p.grad for p in each.parameters()])
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, atol=2e-5)


def test_compile():
    expected, model = pair(llama)
    ids = torch.randint(3, 97, (2, 11))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    results = [each(input_ids=ids, labels=ids, use_cache=False) for each in (expected, compiled)]
    for each in results:
        each.loss.backward()
    assert torch.allclose(results[0].logits, results[1].logits, atol=1e-5)
    for a, b in zip(expected.parameters(), model.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=2e-5)


@families
def test_training_learns(family):
    _, model = pair(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(3, 97, (2, 11))
    losses = []
    for _ in range(15):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


def test_sinks_and_softcap_reach_the_operator():
    module = torch.nn.Module()
    module.is_causal = True
    q = torch.randn(1, 4, 6, 8)
    k, v = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    sinks = torch.randn(4)
    out, weights = heddle.hf.attention_forward(module, q, k, v, None, scaling=0.3, softcap=2.0, s_aux=sinks)
    assert weights is None and out.shape == (1, 6, 4, 8) and out.is_contiguous()
    expected = heddle.attention(q, k, v, causal=True, scale=0.3, softcap=2.0, sinks=sinks)
    assert torch.equal(out, expected.transpose(1, 2))


def eager_with_sinks(q, k, v, sinks, mask, scale):
    """As Inkling 2 writes it, in float64."""
    q, k, v, sinks = (x.double() for x in (q, k, v, sinks))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~mask, -torch.inf)
    weights = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], -1).softmax(-1)[..., :-1]
    return (weights @ v).transpose(1, 2), weights


@pytest.mark.parametrize("sizes", [(2, 4, 6, 1), (1, 4, 1, 1), (2, 1, 6, 1)])
@pytest.mark.parametrize("masked", [False, True])
@everywhere
def test_sinks_of_each_query(sizes, masked, device):
    module = torch.nn.Module()
    module.is_causal = True
    q = torch.randn(2, 4, 6, 8, device=device)
    k, v = (torch.randn(2, 2, 6, 8, device=device) for _ in range(2))
    sinks = 3 * torch.randn(sizes, device=device)
    sees = torch.ones(2, 1, 6, 6, dtype=torch.bool, device=device).tril()
    if masked:
        sees[0, :, :2] = False  # rows that see no key
    given = [x.requires_grad_() for x in (q, k, v, sinks)]
    options = {"scaling": 0.3, "output_attentions": True, "sinks": sinks}
    ours = heddle.hf.attention_forward(module, q, k, v, sees if masked else None, **options)
    theirs = eager_with_sinks(q, k, v, sinks, sees, 0.3)
    do = [torch.randn_like(x) for x in ours]
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a.double(), b, atol=1e-5)
    mine = torch.autograd.grad(ours, given, do, retain_graph=True)
    for a, b in zip(mine, torch.autograd.grad(theirs, given, [x.double() for x in do]), strict=True):
        assert torch.allclose(a, b.float(), atol=1e-4)
    alone, weights = heddle.hf.attention_forward(module, q, k, v, sees if masked else None, scaling=0.3, sinks=sinks)
    assert weights is None and torch.allclose(alone, ours[0], atol=1e-6)


def test_no_sink_and_no_key_is_zero():
    q = torch.randn(1, 2, 3, 8, requires_grad=True)
    sees = torch.ones(3, 3, dtype=torch.bool)
    sees[1] = False
    sinks = torch.full((1, 2, 3, 1), -torch.inf, requires_grad=True)
    out, _ = heddle.hf.attention_forward(torch.nn.Identity(), q, q, q, sees[None, None], scaling=0.3, sinks=sinks)
    without = heddle.attention(q, q, q, mask=sees, scale=0.3).transpose(1, 2)
    assert torch.equal(out, without) and not out[:, 1].any() and out[:, 0].any()
    for grad in torch.autograd.grad(out.square().sum(), (q, sinks)):
        assert torch.isfinite(grad).all()


@pytest.mark.parametrize("sizes", [(4,), (4, 1), (2, 4, 6), (2, 4, 6, 6), (2, 4, 5, 1), (3, 4, 6, 1)])
def test_sinks_of_another_shape_are_refused(sizes):
    q = torch.randn(2, 4, 6, 8)
    with pytest.raises(NotImplementedError, match=r"Identity .*'sinks', of shape \["):
        heddle.hf.attention_forward(torch.nn.Identity(), q, q, q, None, scaling=0.3, sinks=torch.randn(sizes))


def test_sinks_of_each_query_of_packed_sequences():
    module = torch.nn.Module()
    module.is_causal = True
    q, k, v = (torch.randn(1, 2, 7, 8) for _ in range(3))
    sinks = torch.randn(1, 2, 7, 1)
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    rows = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    sees = (rows[:, None] == rows).tril()[None, None]
    out, _ = heddle.hf.attention_forward(
        module, q, k, v, sees, scaling=0.3, sinks=sinks, cu_seq_lens_q=cu, cu_seq_lens_k=cu
    )
    assert torch.allclose(out.double(), eager_with_sinks(q, k, v, sinks, sees, 0.3)[0], atol=1e-5)
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q"):
        heddle.hf.attention_forward(module, q, k, v, None, sinks=sinks, cu_seq_lens_q=cu, cu_seq_lens_k=cu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@everywhere
def test_masks_of_older_versions(dtype, device):
    """Additive, with the least finite number; of GPT-2 to 4.51 the padding alone, as it hides the future itself."""
    atol = 1e-5 if dtype == torch.float32 else 1e-2
    module = torch.nn.Module()
    module.is_causal = True
    q, k, v = (torch.randn(2, 4, 6, 8, device=device, dtype=dtype) for _ in range(3))
    q.requires_grad_()
    sees = torch.ones(2, 1, 1, 6, dtype=torch.bool, device=device)
    sees[0, ..., :3] = False
    padding = (~sees).to(dtype) * torch.finfo(dtype).min
    expected = heddle.attention(q, k, v, mask=sees & torch.ones(6, 6, dtype=torch.bool, device=device).tril())
    full = padding.expand(2, 1, 6, 6).masked_fill(
        torch.ones(6, 6, dtype=torch.bool, device=device).triu(1), torch.finfo(dtype).min
    )
    out = heddle.hf.attention_forward(module, q, k, v, full)[0]
    out, expected = out[:, 3:], expected.transpose(1, 2)[:, 3:]  # what padding sees is anybody's choice
    assert torch.allclose(out, expected, atol=atol)
    assert torch.isfinite(torch.autograd.grad(out.sum(), q)[0]).all()
    module.register_buffer("bias", torch.ones(1, 1, 16, 16, dtype=torch.bool).tril())
    out = heddle.hf.attention_forward(module, q, k, v, padding, is_causal=False)[0][:, 3:]
    assert torch.allclose(out, expected, atol=atol)
