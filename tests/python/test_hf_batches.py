# SPDX-License-Identifier: Apache-2.0
"""Continuous batching of transformers (generate_batch) with heddle: the same text as eager's, or refused by name."""

from __future__ import annotations

import importlib

import pytest
import torch

transformers = pytest.importorskip("transformers")
batching = pytest.importorskip("transformers.generation.continuous_batching")

import small_models  # noqa: E402

import heddle.hf  # noqa: E402

heddle.hf.register()

PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 17], [20]]
# Full attention; a window in every layer; windows in some layers, and sinks.
KINDS = {"Llama": {}, "Mistral": {"sliding_window": 4}, "GptOss": {"sliding_window": 6, "num_local_experts": 4}}


def model(kind, implementation):
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    config = getattr(transformers, f"{kind}Config")(
        **sizes, num_attention_heads=4, num_key_value_heads=2, **KINDS[kind]
    )
    config._attn_implementation = implementation
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made


@pytest.fixture(autouse=True)
def some_memory(monkeypatch):
    """What transformers does not know of a CPU, or only with psutil."""
    small_models.tell_memory(monkeypatch.setattr)


def counted(monkeypatch):
    calls = []
    inner = heddle.hf.attention
    monkeypatch.setattr(heddle.hf, "attention", lambda *args, **given: calls.append(given) or inner(*args, **given))
    return calls


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_same_text_as_eager(kind, monkeypatch):
    paged = "eager_paged" if int(transformers.__version__.split(".")[0]) < 5 else "eager"
    want = small_models.generate_batch(model(kind, paged), PROMPTS)
    calls = counted(monkeypatch)
    ours = model(kind, "heddle")
    got = small_models.generate_batch(ours, PROMPTS)
    assert got == want and all(len(text) == 6 for text in got), (got, want)
    # Prompts in chunks of eight, then a token of each; keys of several requests in one call.
    assert len(calls) > 12 and all(given["causal"] == "bottom_right" for given in calls)
    assert max(given["cu_seqlens_k"].numel() for given in calls) == len(PROMPTS) + 1
    windows = {given["window"] for given in calls}
    assert windows == {"Llama": {None}, "Mistral": {(3, None)}, "GptOss": {None, (5, None)}}[kind]
    assert ours.config._attn_implementation == "heddle"


def test_layers_without_a_cache_are_refused(monkeypatch):
    """Which could not read it, with whatever implementation: before anything runs."""
    config = transformers.MptConfig(vocab_size=97, d_model=32, n_layers=1, n_heads=4, max_seq_len=64)
    config._attn_implementation = "heddle"
    alone = transformers.MptForCausalLM(config).eval()
    calls = counted(monkeypatch)
    with pytest.raises(ValueError, match=r"MptForCausalLM .*generate_batch"):
        small_models.generate_batch(alone, PROMPTS)
    assert not calls


@pytest.mark.parametrize("name", ["position_bias", "indices", "output_attentions", "block_table", "cu_seq_lens_q"])
def test_what_it_does_not_have_is_refused_by_name(name, monkeypatch):
    monkeypatch.setattr(heddle.hf._hf_batches, "is_cache", lambda cache: True)
    q, k, v = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    given = {"cache": object(), "cu_seq_lens_q": torch.tensor([0, 6]), name: torch.ones(1)}
    given |= {"cu_seq_lens_q": None} if name == "cu_seq_lens_q" else {}
    with pytest.raises(NotImplementedError, match=rf"Linear gives its attention '.*{name}|Linear .*{name}"):
        heddle.hf.attention_forward(torch.nn.Linear(1, 1), q, k, v, None, **given)


def test_keys_that_no_layer_entered_are_refused():
    """From transformers 5.24 on the cache stays with the layers; what a step means is by type of layer until then."""
    q, k, v = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    given = {"cu_seq_lens_q": torch.tensor([0, 6]), "read_index": [], "write_index": []}
    with pytest.raises(NotImplementedError, match=r"Linear .*has not entered its keys"):
        heddle.hf.attention_forward(
            torch.nn.Linear(1, 1), q, k, v, None, cu_seq_lens_k={"full_attention": torch.tensor([0, 6])}, **given
        )
    given["cu_seq_lens_k"] = torch.tensor([0, 6])
    got, _ = heddle.hf.attention_forward(torch.nn.Linear(1, 1), q, k, v, None, **given)
    want = heddle.attention(q, k, v, causal="bottom_right")
    assert torch.allclose(got, want.transpose(1, 2), atol=1e-6)


def test_what_is_no_paged_cache_is_refused():
    q, k, v = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    assert not heddle.hf._hf_batches.is_cache(object())
    with pytest.raises(NotImplementedError, match="'cache'"):
        heddle.hf.attention_forward(torch.nn.Linear(1, 1), q, k, v, None, cache=object())
    assert importlib.import_module("transformers.generation.continuous_batching").PagedAttentionCache
