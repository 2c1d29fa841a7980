# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: after heddle.hf.register(), models take attn_implementation="heddle"."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from heddle import _hf_batches, _hf_models, attention
from heddle._ops import quick, quick_options
from heddle._options import Causal

_compiling = torch.compiler.is_dynamo_compiling

# What layers hand on to every implementation and what changes no result of attention, with the reason.
_NO_MATTER = {
    "cache_position": "where the keys lie in the cache: the mask has it in it",
    "position_ids": "already in query and key, or in the mask",
    "position_embeddings": "already in query and key",
    "use_cache": "of the model: key and value are what is to be attended to",
    "past_key_value": "of the model: key and value are what is to be attended to",
    "past_key_values": "of the model: key and value are what is to be attended to",
    "output_hidden_states": "of the model",
    "output_router_logits": "of the model's experts",
    "return_dict": "of the model",
    "return_loss": "of the model",
    "num_items_in_batch": "of the loss",
    "input_ids": "of the model",
    "token_type_ids": "of the model: what they hide is in the mask",
    "mm_token_type_ids": "of the model: what they hide is in the mask",
    "logits_to_keep": "of the model's head",
    "seq_idx": "of state-space layers",
    "grid_thw": "sizes of images, of other parts of a layer: it calls its attention for each by itself",
    "layer_idx": "the number of the layer",
}


def _refuse(module: Any, name: str, why: str) -> NotImplementedError:
    return NotImplementedError(
        f"{type(module).__name__} gives its attention {name!r}, {why}; "
        "load this model with attn_implementation='eager', or call it without"
    )


def _hides_the_future(module: Any) -> bool:
    """GPT-2 to transformers 4.51 has its causality in a buffer of the layer, and a mask of the padding alone."""
    # An attribute that there is not takes PyTorch microseconds.
    triangle = getattr(module, "bias", None) if _compiling() else getattr(module, "_buffers", {}).get("bias")
    inner = isinstance(triangle, Tensor) and triangle.dtype == torch.bool and triangle.dim() == 4
    return inner and not getattr(module, "is_cross_attention", False)


def _sequence_of(cu_seqlens: Tensor, length: int) -> Tensor:
    """Which of the packed sequences each row is of."""
    return torch.bucketize(torch.arange(length, device=cu_seqlens.device), cu_seqlens[1:].contiguous(), right=True)


def _packed(query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, **options: Any) -> Tensor:
    """One row of the batch that holds several sequences, as [1, sq, h, dv]."""
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    options = {"max_seqlen_q": q.shape[0], "max_seqlen_k": k.shape[0], **options}
    out: Tensor = attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    return out.unsqueeze(0).contiguous()


def _batched(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Any,
    cu_q: Tensor | None,
    cu_k: Any,
    sliding_window: int | None,
    given: dict[str, Any],
    options: dict[str, Any],
) -> Tensor:
    """A step of continuous batching: requests in one row, of which each sees its own keys in the cache."""
    if cu_q is None or query.shape[0] != 1:
        raise _refuse(module, "cache", "a paged one, but not cu_seq_lens_q for a batch of one row")
    key, value, cu_k = _hf_batches.update(module, key, value, cache, cu_k, given)
    window = None if sliding_window is None else (operator.index(sliding_window) - 1, None)
    options |= {"causal": "bottom_right", "window": window}
    return _packed(query, key, value, cu_q.int(), cu_k.int(), **options)


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    deterministic: bool | None = None,
    output_attentions: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    cache: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls for a layer's attention.

    Args:
        module: the layer; its is_causal counts when the argument is None.
        query: [b, h, sq, d]; float32, bfloat16 or float16, CPU or CUDA.
        key, value: [b, hk, sk, d], not repeated; hk divides h.
        attention_mask: None, bool (True takes part) or additive, broadcasts to [b, h, sq, sk].
        dropout, scaling, softcap: as heddle.attention.
        sliding_window: keys that a query sees, itself included; counts when there is no mask (a mask has it in it).
        is_causal: counts when there is no mask and more than one query.
        s_aux: [h], the sink logits of gpt-oss.
        sinks: broadcasts to [b, h, sq, 1], a logit of each query for a key whose value is 0 (Inkling 2): with the
            log-sum-exp lse, results are those without it, times 1 / (1 + exp(sinks - lse)). Has a gradient.
        position_bias: broadcasts to [b, h, sq, sk], is added to the scores and has a gradient (T5).
        indices: integers [b, sq, n], the keys that a query sees at most (DeepSeek-V3.2).
        deterministic: as heddle.attention.
        output_attentions: return the weights, too.
        cu_seq_lens_q, cu_seq_lens_k: [n + 1], where packed sequences begin and end, in a batch of one row.
        max_length_q, max_length_k: the longest of them; not needed.
        cache: the paged cache of continuous batching (generate_batch), where the layer has not entered its keys itself
            (as it does from transformers 5.24 on); the mask is then of no account, as cu_seq_lens_q and the cache say
            which keys a query sees.
        others: what is None or changes nothing, such as position_ids and use_cache; anything else is refused.

    Returns:
        ([b, sq, h, d] contiguous, the weights [b, h, sq, sk] before dropout, or None where nobody asked for them).

    Raises:
        NotImplementedError: an argument that is not known here; the message has its name and the layer's.
        ValueError, TypeError, NotImplementedError: as heddle.attention.

    Source: transformers, docs/source/en/attention_interface.md.
    """
    batched = _hf_batches.have_entered(cache, others) or (cache is not None and _hf_batches.is_cache(cache))
    if cache is not None and not batched:
        others["cache"] = cache
    for name, given in others.items():
        if given is not None and name not in _NO_MATTER and not (batched and name in _hf_batches.OF_THE_CACHE):
            raise _refuse(module, name, "which heddle does not know")
    sq = query.shape[2]
    mask = bias = None
    if attention_mask is not None:
        sizes = attention_mask.shape
        if len(sizes) == 4 and sizes[3] > key.shape[-2]:
            attention_mask = attention_mask[..., : key.shape[-2]]  # of a static cache, in older versions
        if sizes[-1] == 1 < key.shape[-2] and attention_mask.is_floating_point():
            why = f"[{', '.join(map(str, sizes))}], a number for all keys, as vision models of transformers 4 hand on a"
            raise _refuse(module, "attention_mask", f"of shape {why} head_mask, which heddle does not know")
        mask, bias = (None, attention_mask) if attention_mask.is_floating_point() else (attention_mask, None)
    elif is_causal is None and sq > 1:
        # Where masks are made as for eager, they say it all, and nobody may have cared what the layer says. Where
        # config.is_causal is set to False, masks are made for that, whatever the layer says (from transformers 5 on).
        is_causal = getattr(module, "is_causal", True)
        if is_causal and _hf_models.masks_heed_configurations():
            is_causal = getattr(getattr(module, "config", None), "is_causal", True)
        is_causal = is_causal and not _hf_models.has_eager_masks(module)
    causal = attention_mask is None and sq > 1 and is_causal
    corner: Causal = "top_left" if causal else None
    if attention_mask is not None and sizes[-2] == 1 < sq and _hides_the_future(module):
        corner = "bottom_right"
    window = (operator.index(sliding_window) - 1, None) if sliding_window is not None and causal else None
    softcap = softcap or 0.0
    weights_too = bool(output_attentions) or _hf_models.weights_are_asked_for()
    if position_bias is indices is cu_seq_lens_q is cu_seq_lens_k is cache is sinks is None and not (
        batched or weights_too or dropout or _compiling()
    ):
        # What needs no work first; NotImplemented where it does, or where heddle has an error to say.
        if window is None and attention_mask is None and s_aux is None and deterministic is None and not softcap:
            out = quick(query, key, value, corner, scaling)
        else:
            short = query, key, value, corner, window, scaling, softcap, bias, mask, None, s_aux, 0.0, None, None, None
            out = quick_options(*short, False, deterministic, False, False)
        if out is not NotImplemented:
            return out.transpose(1, 2).contiguous(), None
    query, key, value = (t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in (query, key, value))
    options: dict[str, Any] = {
        "causal": corner,
        "window": window,
        "scale": scaling,
        "softcap": softcap,
        "sinks": s_aux,
        "dropout": dropout,
        "deterministic": deterministic,
    }
    if batched:
        for name, given in (("position_bias", position_bias), ("indices", indices), ("sinks", sinks)):
            if given is not None:
                raise _refuse(module, name, "which heddle does not have in continuous batching")
        if weights_too:
            raise _refuse(module, "output_attentions", "which continuous batching has no place for")
        others["max_length_k"] = max_length_k
        row = (cu_seq_lens_q, cu_seq_lens_k, sliding_window, others, options)
        return _batched(module, query, key, value, cache, *row), None
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    if indices is not None:
        chosen = indices.new_zeros((*indices.shape[:2], key.shape[2]), dtype=torch.bool)
        chosen = chosen.scatter(-1, indices.long(), True).unsqueeze(1)
        mask = chosen if mask is None else mask & chosen
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        if cu_seq_lens_q is None or cu_seq_lens_k is None:
            raise _refuse(module, "cu_seq_lens_q", "but not cu_seq_lens_k, or the other way round")
        if mask is bias is sinks is None and query.shape[0] == 1 and not weights_too:
            return _packed(query, key, value, cu_seq_lens_q, cu_seq_lens_k, **options), None
        if attention_mask is None or query.shape[0] != 1:
            raise _refuse(module, "cu_seq_lens_q", "with several rows, a bias or output_attentions, but without a mask")
        rows, columns = _sequence_of(cu_seq_lens_q, query.shape[2]), _sequence_of(cu_seq_lens_k, key.shape[2])
        same = rows[:, None] == columns[None, :]
        mask = same if mask is None else mask & same
    if query.shape[0] != key.shape[0] and 1 in (query.shape[0], key.shape[0]):  # learned queries, say
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (t.expand(batch, *t.shape[1:]) for t in (query, key, value))
    if sinks is not None:
        wanted = [query.shape[0], query.shape[1], sq, 1]
        if sinks.dim() != 4 or any(given not in (1, size) for given, size in zip(sinks.shape, wanted, strict=True)):
            raise _refuse(module, "sinks", f"of shape {[*sinks.shape]}, which is not a logit a query: {wanted}")
        out, weights = _with_sinks(sinks, query, key, value, bias, mask, weights_too, options)
    else:
        out = attention(query, key, value, bias=bias, mask=mask, return_weights=weights_too, **options)
        out, weights = out if weights_too else (out, None)
    return out.transpose(1, 2).contiguous(), weights


def _with_sinks(
    sinks: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    weights_too: bool,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """A sink of each query: what is left to the keys of a row of softmax is exp(lse) / (exp(lse) + exp(sink))."""
    out, lse, *weights = attention(
        query, key, value, bias=bias, mask=mask, return_lse=True, return_weights=weights_too, **options
    )
    lse = lse.clamp(min=torch.finfo(lse.dtype).min)  # or -inf of a row without keys, less a sink of -inf, would be NaN
    left = (lse.unsqueeze(-1) - sinks.to(lse.dtype)).sigmoid()
    return (out * left).to(out.dtype), (weights[0] * left).to(out.dtype) if weights_too else None


def register(name: str = "heddle") -> None:
    """Makes ``attn_implementation="heddle"`` known: transformers' attention registry, and its mask registry.

    From then on a model that would not call heddle refuses the name when it is made, loaded or told to use it.
    Works for transformers 4.50 to 5.x; calling it again does no harm.

    Args:
        name: the name to register under.

    Raises:
        ImportError: transformers is not installed, or older than 4.50.

    Source: transformers, docs/source/en/attention_interface.md.
    """
    try:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        raise ImportError("heddle.hf needs transformers 4.50 or later") from error
    _hf_models.watch(name)
    if isinstance(ALL_ATTENTION_FUNCTIONS, dict):  # 4.50
        ALL_ATTENTION_FUNCTIONS[name] = attention_forward
    else:
        ALL_ATTENTION_FUNCTIONS.register(name, attention_forward)
    try:
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError:
        return  # before 4.53 the models make their masks themselves
    # The class's register, not an instance's item: only what is in the common registry gets a mask at all.
    AttentionMaskInterface.register(name, _hf_models.make_mask)
