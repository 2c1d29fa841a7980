# SPDX-License-Identifier: Apache-2.0
"""What ``heddle.parallel`` takes of one process: tensors and options, looked at before anything is computed or sent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heddle._errors import HeddleTypeError, HeddleValueError
from heddle._kinds import autocast_dtype, need_tensors
from heddle._ops import cast
from heddle._parallel.travel import real_of

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}


def as_autocast(q: Any, k: Any, v: Any) -> tuple[Tensor, Tensor, Tensor]:
    """As autocast has heddle.attention take them."""
    need_tensors(q=q, k=k, v=v)
    dtype = autocast_dtype(q.device.type)
    if dtype is None or q.dtype == torch.float64:
        return q, k, v
    return cast(q, dtype), cast(k, dtype), cast(v, dtype)


def numbers_of(rng_state: Any) -> tuple[int, int]:
    """Seed and offset, zeros where there is no state. It may be on any device: each process reads it."""
    if rng_state is None:
        return 0, 0
    need_tensors(rng_state=rng_state)
    if rng_state.dtype != torch.int64:
        raise HeddleTypeError(f"rng_state is {rng_state.dtype}, but must be torch.int64")
    if list(rng_state.shape) != [2]:
        raise HeddleValueError(f"rng_state has shape {list(rng_state.shape)}, but must have [2]")
    seed, offset = rng_state.tolist()
    return seed, offset


def check(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, sinks: Tensor | None, runs: int, heads: int) -> None:
    """Of a process that has `runs` pieces; `heads` processes divide the heads."""
    for name, t in (("alibi_slopes", slopes), ("sinks", sinks)):
        if t is not None:
            need_tensors(**{name: t})
            if not t.is_floating_point():
                raise HeddleTypeError(f"{name} is {t.dtype}, but must be {real_of(q.dtype)}")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(f"{name} is on {t.device}: heddle.parallel runs on CPUs and CUDA GPUs")
        if t.device != q.device:
            raise HeddleValueError(f"{name} is on {t.device}, but q on {q.device}")
        if t.dtype not in DTYPES or t.dtype != q.dtype:
            raise HeddleTypeError(f"{name} is {t.dtype}; all must be float32, bfloat16, float16 or float64 alike")
        if t.dim() != 4:
            raise HeddleValueError(f"{name} has {t.dim()} dimensions, but must have 4 ([b, h, s, d])")
        if t.shape[2] % runs:
            raise HeddleValueError(f"{name} has {t.shape[2]} rows, which are not {runs} pieces as zigzag has")
        if 0 in t.shape:
            raise HeddleValueError(f"{name} has shape {list(t.shape)}: nothing to divide")
        if t.shape[1] % heads:
            raise HeddleValueError(f"{heads} processes cannot divide the {t.shape[1]} heads of {name}")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise HeddleValueError(f"q, k and v have shapes {list(q.shape)}, {list(k.shape)} and {list(v.shape)}")
    if q.shape[1] % k.shape[1]:
        raise HeddleValueError(f"hk = {k.shape[1]} does not divide h = {q.shape[1]}")
    h = q.shape[1]
    if slopes is not None and list(slopes.shape) not in ([h], [q.shape[0], h]):
        raise HeddleValueError(f"alibi_slopes has shape {list(slopes.shape)}, but must have {[h]} or {[len(q), h]}")
    if slopes is not None and slopes.requires_grad:
        raise NotImplementedError("alibi_slopes requires a gradient, but heddle computes none for it: detach it")
    if sinks is not None and list(sinks.shape) != [h]:
        raise HeddleValueError(f"sinks has shape {list(sinks.shape)}, but must have {[h]}")


def segments_of(q: Tensor, k: Tensor, q_segments: Any, k_segments: Any) -> tuple[Tensor, Tensor] | None:
    """Segments of this process's rows as int32 [b, s]."""
    if q_segments is None:
        if k_segments is not None:
            raise HeddleValueError("k_segments is given without q_segments")
        return None
    made = []
    for name, ids, like in (
        ("q_segments", q_segments, q),
        ("k_segments", q_segments if k_segments is None else k_segments, k),
    ):
        need_tensors(**{name: ids})
        if ids.dtype not in (torch.int32, torch.int16, torch.int8, torch.uint8):
            raise HeddleTypeError(f"{name} is {ids.dtype}, but must be torch.int32 (or of fewer bits)")
        if ids.device != q.device:
            raise HeddleValueError(f"{name} is on {ids.device}, but q on {q.device}")
        need = (like.shape[0], like.shape[2])
        if tuple(ids.shape) not in (need, need[1:]):
            raise HeddleValueError(
                f"{name} has shape {list(ids.shape)}, but must have {list(need)}: the ids of this process's rows"
            )
        made.append(ids.expand(need).to(torch.int32).resolve_neg())
    return made[0], made[1]


def length_of(tensor: Tensor, dim: int) -> int:
    if not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        raise HeddleValueError(f"dim = {dim!r}, but the tensor has {tensor.dim()} dimensions")
    return tensor.shape[dim]
