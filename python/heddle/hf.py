# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: after heddle.hf.register(), models take attn_implementation="heddle"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heddle import Causal, attention


def _hides_the_future(module: Any) -> bool:
    """GPT-2 to transformers 4.51 has its causality in a buffer of the layer, and a mask of the padding alone."""
    triangle = getattr(module, "bias", None)
    inner = isinstance(triangle, Tensor) and triangle.dtype == torch.bool and triangle.dim() == 4
    return inner and not getattr(module, "is_cross_attention", False)


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
    **unused: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for a layer's attention.

    Args:
        module: the layer; its is_causal counts when the argument is None.
        query: [b, h, sq, d]; float32, bfloat16 or float16, CPU or CUDA.
        key, value: [b, hk, sk, d], not repeated; hk divides h.
        attention_mask: None, bool (True takes part) or additive, broadcasts to [b, h, sq, sk]. The least finite number
            masks as -inf does.
        dropout, scaling, softcap: as heddle.attention.
        sliding_window: keys that a query sees, itself included; counts when there is no mask (a mask has it in it).
        is_causal: counts when there is no mask and more than one query.
        s_aux: [h], the sink logits of gpt-oss.
        unused: what other implementations take, such as position_ids and cache_position.

    Returns:
        ([b, sq, h, d] contiguous, None): the weights are not returned; ask for them with "eager".

    Raises:
        ValueError, TypeError, NotImplementedError: as heddle.attention.

    Source: transformers, docs/source/en/attention_interface.md.
    """
    if attention_mask is not None and attention_mask.dim() == 4 and attention_mask.shape[-1] > key.shape[-2]:
        attention_mask = attention_mask[..., : key.shape[-2]]  # of a static cache, in older versions
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    causal = attention_mask is None and query.shape[2] > 1 and is_causal
    boolean = attention_mask is not None and not attention_mask.is_floating_point()
    if attention_mask is not None and not boolean:
        # To transformers 4.53; a row of nothing but the least number comes out as zeros.
        least = torch.finfo(attention_mask.dtype).min
        attention_mask = attention_mask.masked_fill(attention_mask == least, -torch.inf)
    corner: Causal = "top_left" if causal else None
    if attention_mask is not None and attention_mask.shape[-2] == 1 < query.shape[2] and _hides_the_future(module):
        corner = "bottom_right"
    window = None
    if sliding_window is not None and causal:
        window = (sliding_window - 1, None)
    out: Tensor = attention(
        query,
        key,
        value,
        causal=corner,
        window=window,
        scale=scaling,
        softcap=softcap or 0.0,
        bias=None if boolean else attention_mask,
        mask=attention_mask.bool() if boolean and attention_mask is not None else None,
        sinks=s_aux,
        dropout=dropout,
    )
    return out.transpose(1, 2).contiguous(), None


def register(name: str = "heddle") -> None:
    """Makes ``attn_implementation="heddle"`` known: transformers' attention registry, and its mask registry.

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
    if isinstance(ALL_ATTENTION_FUNCTIONS, dict):  # 4.50
        ALL_ATTENTION_FUNCTIONS[name] = attention_forward
    else:
        ALL_ATTENTION_FUNCTIONS.register(name, attention_forward)
    try:
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError:
        return  # before 4.53 the models make their masks themselves
    # Boolean masks, and None where causality alone says it all. The class's register, not an instance's item: only
    # what is in the common registry gets a mask at all.
    AttentionMaskInterface.register(name, sdpa_mask)
