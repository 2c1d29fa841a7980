# SPDX-License-Identifier: Apache-2.0
"""heddle.hf: what the adapter makes of each argument that transformers gives it, and which models it refuses."""

from __future__ import annotations

import types

import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers")

import heddle.hf  # noqa: E402

heddle.hf.register()


def layer(causal=True):
    module = torch.nn.Module()
    module.is_causal = causal
    return module


def tensors(sq=6, sk=6, b=2):
    torch.manual_seed(0)
    return torch.randn(b, 4, sq, 8), torch.randn(b, 2, sk, 8), torch.randn(b, 2, sk, 8)


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "additive"])
def test_position_bias_is_a_bias(mask):
    """T5's: added to the scores in every layer, with a gradient. A row that a mask in numbers covers is not hidden."""
    q, k, v = tensors()
    bias = torch.randn(1, 4, 6, 6, requires_grad=True)
    sees = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    sees[0, ..., :2] = False
    given, options = None, {}
    if mask == "causal":
        options = {"causal": "top_left"}
    elif mask != "none":
        options = {"mask": sees}
        given = sees if mask == "bool" else (~sees).float() * torch.finfo(torch.float32).min
    out, weights = heddle.hf.attention_forward(layer(mask == "causal"), q, k, v, given, position_bias=bias)
    if mask == "additive":  # its rows that see nothing are the mean of all values
        wide = [t.repeat_interleave(2, 1) for t in (k, v)]
        expected = F.scaled_dot_product_attention(q, *wide, attn_mask=bias + given).transpose(1, 2)
        assert torch.allclose(expected[0, 0], wide[1][0].mean(1), atol=1e-6)
    else:
        expected = heddle.attention(q, k, v, bias=bias, **options).transpose(1, 2)
    assert weights is None and torch.allclose(out, expected, atol=1e-6)
    got, want = (torch.autograd.grad(t.square().sum(), bias)[0] for t in (out, expected))
    assert got.abs().max() > 0 and torch.allclose(got, want, atol=1e-5)


def test_unknown_arguments_are_refused_by_name():
    q, k, v = tensors()
    for name in ("sinks", "head_mask", "block_indices", "cache", "a_new_one"):
        with pytest.raises(NotImplementedError, match=rf"Module gives its attention '{name}'"):
            heddle.hf.attention_forward(layer(), q, k, v, None, **{name: torch.ones(4)})
    given = {"position_ids": torch.arange(6), "use_cache": True, "head_mask": None, "output_hidden_states": False}
    out, _ = heddle.hf.attention_forward(layer(), q, k, v, None, **given)
    assert torch.equal(out, heddle.attention(q, k, v, causal=True).transpose(1, 2))


def test_a_head_mask_in_the_place_of_the_mask_is_refused():
    """As vision models of transformers 4 give it. A number for each key is a mask, and so is what is boolean."""
    q, k, v = tensors()
    of_heads = torch.tensor([1.0, 0.0, 1.0, 0.5]).view(1, 4, 1, 1)
    with pytest.raises(NotImplementedError, match=r"'attention_mask', of shape \[1, 4, 1, 1\].* head_mask"):
        heddle.hf.attention_forward(layer(), q, k, v, of_heads)
    for name, mask in (("bias", of_heads.expand(1, 4, 1, 6)), ("mask", of_heads.bool())):
        out, _ = heddle.hf.attention_forward(layer(), q, k, v, mask)
        torch.testing.assert_close(out, heddle.attention(q, k, v, **{name: mask}).transpose(1, 2))


def test_a_head_mask_that_a_layer_forgets_is_refused():
    """As Albert's layers for sdpa do in transformers 4."""

    class Forgets(torch.nn.Module):
        def __init__(self, config):
            super().__init__()

        def forward(self, x, attention_mask=None, head_mask=None, output_attentions=False):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    made = heddle._hf_models._through_sdpa(Forgets)(types.SimpleNamespace())
    x, of_heads = torch.randn(1, 2, 3, 8), torch.ones(2)
    assert torch.equal(made(x, None, None), heddle.scaled_dot_product_attention(x, x, x))
    for given in ({"head_mask": of_heads}, (None, of_heads)):
        with pytest.raises(NotImplementedError, match="Forgets is given a head_mask, which it forgets"):
            made(x, **given) if isinstance(given, dict) else made(x, *given)


def test_window_as_a_tensor():
    q, k, v = tensors()
    want = heddle.hf.attention_forward(layer(), q, k, v, None, sliding_window=3)[0]
    got = heddle.hf.attention_forward(layer(), q, k, v, None, sliding_window=torch.tensor(3))[0]
    assert torch.equal(got, want)
    assert not torch.equal(got, heddle.hf.attention_forward(layer(), q, k, v, None)[0])
    with pytest.raises(TypeError):
        heddle.hf.attention_forward(layer(), q, k, v, None, sliding_window=torch.tensor(2.5))


def test_any_strides():
    """Inkling gives keys with the length innermost."""
    q, k, v = tensors()
    out, _ = heddle.hf.attention_forward(layer(), q, k.mT.contiguous().mT, v.mT.contiguous().mT, None)
    assert torch.equal(out, heddle.hf.attention_forward(layer(), q, k, v, None)[0])


@pytest.mark.parametrize("masked", [False, True])
def test_indices_are_the_keys_that_are_seen(masked):
    q, k, v = tensors()
    indices = torch.tensor([[0, 0, 0], [0, 1, 5], [2, 1, 0], [3, 0, 1], [4, 2, 0], [5, 1, 2]]).expand(2, 6, 3).int()
    sees = torch.zeros(2, 1, 6, 6, dtype=torch.bool).scatter(-1, indices.long().unsqueeze(1), True)
    triangle = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    mask = triangle if masked else None
    out, _ = heddle.hf.attention_forward(layer(), q, k, v, mask, indices=indices)
    assert torch.equal(out, heddle.attention(q, k, v, mask=sees & triangle).transpose(1, 2))


@pytest.mark.parametrize("masked", [False, True])
def test_packed_sequences(masked):
    """What DataCollatorWithFlattening hands out: each sequence is alone, whether there is a mask beside it or not."""
    q, k, v = tensors(b=1)
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)
    given = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 4, "max_length_k": 4}
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril() if masked else None
    out, _ = heddle.hf.attention_forward(layer(), q, k, v, mask, **given)
    parts = [heddle.attention(*(t[:, :, a:b] for t in (q, k, v)), causal=True) for a, b in ((0, 2), (2, 6))]
    assert torch.allclose(out, torch.cat(parts, 2).transpose(1, 2), atol=1e-6)
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q"):
        heddle.hf.attention_forward(layer(), *tensors(), None, **given)
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q"):
        heddle.hf.attention_forward(layer(), q, k, v, None, cu_seq_lens_q=cu)


def llama(name, **more):
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, **more)
    config._attn_implementation = name
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def test_output_attentions_gives_the_weights():
    ids = torch.randint(3, 97, (2, 7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    outputs = [llama(name)(ids, attention_mask=mask, output_attentions=True) for name in ("eager", "heddle")]
    assert len(outputs[1].attentions) == 2
    for want, got in zip(outputs[0].attentions, outputs[1].attentions, strict=True):
        assert torch.allclose(got[mask.bool()[:, None].expand(2, 4, 7)], want[mask.bool()[:, None].expand(2, 4, 7)])
    model = llama("heddle")
    assert not model(ids).attentions
    with pytest.raises(RuntimeError):  # of a call that ends by an exception nothing stays behind
        model(torch.full((2, 7), 3.5), output_attentions=True)
    assert not heddle.hf._hf_models.weights_are_asked_for()


def test_masks_and_layers_that_differ():
    """A mask for causality where the layers have none (PaliGemma), none where they have it (config.is_causal)."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    kinds = {"use_bidirectional_attention": transformers.GemmaConfig, "is_causal": transformers.LlamaConfig}
    ids = torch.randint(3, 97, (2, 7))
    for field, kind in kinds.items():
        results = []
        for name in ("eager", "heddle"):
            config = kind(**sizes)
            setattr(config, field, field != "is_causal")
            config._attn_implementation = name
            torch.manual_seed(0)
            model = transformers.AutoModel.from_config(config).eval()
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.2)
            results.append(model(ids).last_hidden_state)
        assert torch.allclose(*results, atol=1e-4), field


ALONE = {  # attention that no registry reaches and that heddle does not follow, in 4.57 and in 5
    "Bloom": {"hidden_size": 32, "n_layer": 1, "n_head": 4},
    "XGLM": {"d_model": 32, "num_layers": 1, "attention_heads": 4, "ffn_dim": 64},
}


@pytest.mark.parametrize("family", list(ALONE))
def test_models_that_call_nothing_of_ours_are_refused(family, tmp_path):
    """When they are made, loaded or told to use heddle; else their own code misreads our masks and sees the future."""
    kind, config = getattr(transformers, f"{family}Model"), getattr(transformers, f"{family}Config")
    name = f"{family}Model computes its attention itself"
    with pytest.raises(ValueError, match=name):
        transformers.AutoModel.from_config(config(vocab_size=97, **ALONE[family]), attn_implementation="heddle")
    model = kind(config(vocab_size=97, **ALONE[family]))
    before = model.config._attn_implementation
    if hasattr(model, "set_attn_implementation"):
        with pytest.raises(ValueError, match=name):
            model.set_attn_implementation("heddle")
    assert model.config._attn_implementation == before
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=name):
        kind.from_pretrained(tmp_path, attn_implementation="heddle")
    assert kind.from_pretrained(tmp_path, attn_implementation="eager") is not None


def test_switching_a_model_that_is_made():
    ids = torch.randint(3, 97, (2, 7))
    model, expected = llama("sdpa"), llama("eager")
    if not hasattr(model, "set_attn_implementation"):
        pytest.skip("not in this transformers")
    model.set_attn_implementation("heddle")
    got, want = (each(ids, output_attentions=True) for each in (model, expected))
    assert torch.allclose(got.logits, want.logits, atol=1e-5) and len(got.attentions) == len(want.attentions) == 2


@pytest.mark.parametrize("family", ["Bert", "Roberta", "DistilBert", "Electra", "Albert", "Falcon"])
def test_tables_of_classes(family):
    """Right, whether the architecture chooses from a table (4.57) or not; Electra's has none for sdpa there."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    if family == "DistilBert":
        sizes = {"vocab_size": 97, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
    elif family != "Falcon":
        sizes |= {"intermediate_size": 64, "embedding_size": 32}
    kind, config = getattr(transformers, f"{family}Model"), getattr(transformers, f"{family}Config")
    ids = torch.randint(3, 97, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    results = []
    for name in ("eager", "heddle"):
        own = config(**sizes)
        own._attn_implementation = name
        torch.manual_seed(0)
        try:
            model = kind(own).eval()
        except ValueError as error:
            assert f"{family}Model computes its attention itself" in str(error)
            assert family in ("Electra", "Falcon")
            return
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        out = model(ids, attention_mask=mask).last_hidden_state
        out[mask.bool()].square().sum().backward()
        results.append((out[mask.bool()], [p.grad for p in model.parameters() if p.grad is not None]))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-4)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert torch.allclose(a, b, atol=1e-3 * a.abs().max().item() + 1e-6)


@pytest.mark.skipif(int(transformers.__version__.split(".")[0]) >= 5, reason="it is right from transformers 5 on")
def test_moshi_before_5():
    """Its eager layers see the future where there is no mask, and its masks are cut at the wrong end."""
    with pytest.raises(ValueError, match=r"Moshi.*heddle cannot serve it: without an attention_mask"):
        transformers.MoshiForCausalLM._from_config(transformers.MoshiConfig(), attn_implementation="heddle")


def test_doge_has_its_masks():
    """Its layers add something of their own to the mask: without one they would see the future."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    ids = torch.randint(3, 97, (2, 9))
    results = []
    for name in ("eager", "heddle"):
        config = transformers.DogeConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
        torch.manual_seed(0)
        model = transformers.DogeForCausalLM._from_config(config, attn_implementation=name).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        results.append(model(ids).logits)
    assert torch.allclose(*results, atol=1e-4)


def test_weights_by_the_configuration():
    """Asked for by config.output_attentions, as by the argument."""
    ids = torch.randint(3, 97, (2, 7))
    want, got = (llama(name, output_attentions=True)(ids) for name in ("eager", "heddle"))
    assert len(want.attentions) == len(got.attentions) == 2
    assert torch.allclose(want.attentions[1], got.attentions[1], atol=1e-5)
