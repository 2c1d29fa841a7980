# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own switch: ``torch.nn.attention.activate_flash_attention_impl("heddle")``, from torch 2.11 on.

While it is on, PyTorch's operators of flash attention are those of python/src/torch_switch.c, for the CPU and for CUDA:
from PyTorch's dispatcher to the kernel there is no Python. Importing this module imports torch.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

import heddle._ops

_aten: Any = torch.ops.aten

# The names of their arguments, as python/src/torch_switch.c reads them, in its order of the operators. A PyTorch may
# lack the last of an operator's arguments, and the last of the operators.
_QKV = ["query", "key", "value"]
_PACKING = ["cum_seq_q", "cum_seq_k", "max_q", "max_k"]
_SAVED = ["grad_out", *_QKV, "out", "logsumexp"]
_WINDOW = ["window_size_left", "window_size_right"]
_FORWARD = [*_QKV, *_PACKING, "dropout_p", "is_causal", "return_debug_mask", "scale", *_WINDOW, "seqused_k"]
_FORWARD += ["alibi_slopes", "block_table", "num_splits"]
_PHILOX = ["philox_seed", "philox_offset"]
_DROPOUT = ["dropout_p", "is_causal"]
OPERATORS = {
    "_scaled_dot_product_flash_attention_for_cpu": [*_QKV, *_DROPOUT, "attn_mask", "scale"],
    "_scaled_dot_product_flash_attention_for_cpu_backward": [*_SAVED, *_DROPOUT, "attn_mask", "scale"],
    "_scaled_dot_product_flash_attention": [*_QKV, *_DROPOUT, "return_debug_mask", "scale"],
    "_scaled_dot_product_flash_attention_backward": [*_SAVED, *_PACKING, *_DROPOUT, *_PHILOX, "scale"],
    "_flash_attention_forward": _FORWARD,
    "_flash_attention_backward": [*_SAVED, *_PACKING, *_DROPOUT, "rng_state", "unused", "scale", *_WINDOW],
    "_flash_attention_forward_no_dropout_inplace": ["out", *_FORWARD],
}
_FEWEST = 6  # operators: what torch 2.11 has


def _count() -> int:
    """How many of the operators this PyTorch has. An ImportError where one is not what we know."""
    there = [name for name in OPERATORS if hasattr(_aten, name)]
    if len(there) < _FEWEST or there != list(OPERATORS)[: len(there)]:
        raise ImportError(f"torch {torch.__version__} has no operators {sorted(set(OPERATORS) - set(there))}")
    for name in there:
        schema = getattr(_aten, name).default._schema
        arguments = [argument.name for argument in schema.arguments]
        if arguments != OPERATORS[name][: len(arguments)]:
            raise ImportError(
                f"torch {torch.__version__} gives aten::{name} the arguments {arguments}, "
                f"heddle knows {OPERATORS[name]}"
            )
    return len(there)


def _switch(count: int) -> None:
    library = ctypes.CDLL(str(Path(heddle._ops.__file__).with_name("_torch_ops.so")))
    if library.heddle_torch_switch(count) != 0:
        raise RuntimeError("torch's dispatcher did not take heddle's kernels for its operators, or not give them back")


class _Handle:
    """What PyTorch's registry keeps while the switch is on."""

    def __init__(self) -> None:
        _switch(_count())
        self.on = True

    def remove(self) -> None:
        if self.on:
            self.on = False
            _switch(0)


def activate() -> _Handle:
    """What PyTorch's registry calls for activate_flash_attention_impl("heddle")."""
    return _Handle()
