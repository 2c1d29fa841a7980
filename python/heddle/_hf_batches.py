# SPDX-License-Identifier: Apache-2.0
"""Continuous batching of transformers (generate_batch): requests in one row, each with its keys in a paged cache."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from heddle._errors import HeddleValueError

# What comes with the cache and is of no account once it has given the keys.
OF_THE_CACHE = {
    "read_index",
    "write_index",
    "block_table",
    "logits_indices",
    "logits_processor_args",
    "max_seqlen_q",
    "max_seqlen_k",
    "k_cache",
    "v_cache",
}


def _caches() -> Any:
    """transformers' class, or None where it has none."""
    try:
        return importlib.import_module("transformers.generation.continuous_batching").PagedAttentionCache
    except (ImportError, AttributeError):  # before 4.53
        return None


def is_cache(cache: Any) -> bool:
    kind = _caches()
    return kind is not None and isinstance(cache, kind)


@functools.cache
def _arguments(kind: Any) -> frozenset[str]:
    return frozenset(inspect.signature(kind.update).parameters)


def _of_layer(given: Any, module: Any) -> Any:
    """Of what is by type of layer, this layer's."""
    if not isinstance(given, dict):
        return given
    return given["sliding_attention" if getattr(module, "sliding_window", None) else "full_attention"]


def have_entered(cache: Any, others: dict[str, Any]) -> bool:
    """Whether the layer itself has entered its keys, as it does from 5.24 on: it keeps the cache, the indices come."""
    return cache is None and others.get("write_index") is not None


def update(
    module: Any, key: Tensor, value: Tensor, cache: Any, cu_seqlens_k: Any, others: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Enters the new keys and values. Returns all that the rows see, as [1, hk, total_k, d], and where each begins."""
    if others.get("block_table") is not None:
        raise NotImplementedError(
            f"{type(module).__name__} gives its attention 'block_table', which transformers makes for FlashAttention "
            "alone; set max_blocks_per_request=0"
        )
    if cache is None:
        if not isinstance(cu_seqlens_k, Tensor):
            raise NotImplementedError(
                f"{type(module).__name__} gives its attention the indices of a paged cache, in which it has not "
                "entered its keys: continuous batching cannot run this model"
            )
        return key, value, cu_seqlens_k
    names = _arguments(cache.__class__)
    if "kwargs" in names and "read_index" not in names:  # 5.23
        given = {"cu_seq_lens_k": cu_seqlens_k, "max_length_k": others["max_length_k"], **others}
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=given)
        return key, value, given["cu_seq_lens_k"]
    if not {"read_index", "write_index"} <= names:
        import transformers

        raise NotImplementedError(f"heddle does not know the paged cache of transformers {transformers.__version__}")
    indices = {name: others[name] for name in ("read_index", "write_index")}
    key, value = cache.update(key, value, module.layer_idx, **indices)
    key, value = (t.transpose(0, 1).unsqueeze(0) for t in (key, value))  # from [total_k, hk, d]
    return key, value, _of_layer(cu_seqlens_k, module)


def watch(names: set[str], refusal: Callable[[Any], str | None]) -> None:
    """The manager takes heddle's names, of which it knows nothing, for models whose layers call what is registered."""
    try:
        manager: Any = importlib.import_module("transformers.generation.continuous_batching").ContinuousBatchingManager
    except (ImportError, AttributeError):
        return
    if hasattr(manager, "_heddle_watches"):
        return
    manager._heddle_watches = True
    make, switch = manager.__init__, getattr(manager, "switch_to_cb_friendly_attn", None)

    @functools.wraps(make)
    def __init__(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation in names:
            why = refusal(model)
            if why is not None:
                raise HeddleValueError(why)
        make(self, model, *args, **kwargs)

    manager.__init__ = __init__
    if switch is None:
        return

    @functools.wraps(switch)
    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        return None if model.config._attn_implementation in names else switch(self, model, *args, **kwargs)

    manager.switch_to_cb_friendly_attn = switch_to_cb_friendly_attn
