# SPDX-License-Identifier: Apache-2.0
"""What the fuzz of norm_linear, of heddle.nn's modules and of replaced models shares: they are compared with PyTorch.

Each case is made of its seed alone, which is in the message of a failure with the call: HEDDLE_SEED=n begins there.
HEDDLE_LONG takes 50 times as many. An error is judged by that of plain PyTorch in the same type, and by what the result
changes where the inputs change by a rounding."""

from __future__ import annotations

import os
import random
from collections import Counter

import torch
from conftest import ROUNDING

from heddle._errors import HeddleTypeError, HeddleValueError

FIRST, TIMES = int(os.environ.get("HEDDLE_SEED", "0")), 50 if os.environ.get("HEDDLE_LONG") else 1
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def sweep(count, case, least):
    """Runs cases; `least`: the share of them that must not be refused. Returns what was refused, counted."""
    refused, seeds = Counter(), range(FIRST, FIRST + count * TIMES)
    for seed in seeds:
        torch.manual_seed(seed)
        told = []
        try:
            case(random.Random(seed), told)
        except (HeddleValueError, HeddleTypeError, NotImplementedError) as error:
            refused[str(error)[:60]] += 1
        except Exception as error:
            raise AssertionError(f"HEDDLE_SEED={seed}: {error!r}\n{' '.join(map(str, told))}") from error
    assert sum(refused.values()) <= (1 - least) * len(seeds) + 2, refused
    return refused


def judge(names, got, truth, plain, moved, rounding, factor=8.0, least64=1e-11):
    """Every result by float64's, by plain PyTorch's error and by that of inputs that were moved by a rounding."""
    for name, ours, true, theirs, other in zip(names, got, truth, plain, moved, strict=True):
        if theirs is None:  # PyTorch has no gradient at all where ours may be zeros
            assert ours is None or not ours.any(), f"{name} is not zero"
            continue
        assert ours is not None, f"{name} is None"
        assert ours.shape == theirs.shape, f"{name}: {tuple(ours.shape)}, not {tuple(theirs.shape)}"
        assert ours.dtype == theirs.dtype, f"{name}: {ours.dtype}, not {theirs.dtype}"
        ours, true, theirs, other = (t.detach().double() for t in (ours, true, theirs, other))
        fine = torch.isfinite(true) & torch.isfinite(theirs) & (true.abs() < 6e4)
        assert torch.isfinite(ours[fine]).all(), f"{name}: not finite"
        if not fine.any():
            continue
        off, lost, shift = ((t - true)[fine].abs().max().item() for t in (ours, theirs, other))
        # Numbers are about 1. PyTorch's GELU in float64 takes a difference, and its float64 is the truth itself.
        least = rounding if rounding > ROUNDING[F64] else least64
        allowed = factor * max(lost, shift, least * (1 + true[fine].abs().max().item()))
        assert off <= allowed, f"{name} is off by {off:g} of {true[fine].abs().max():g}, allowed {allowed:g}"


def moved_by(t, rounding):
    return t * (1 + rounding * (2 * torch.rand_like(t) - 1))


def laid_out(rng, t, told=None, name="", often=0.5, more=()):
    """The same numbers in another layout; expanded ones are repeated rows of them."""
    kind = rng.choice(("padded", "offset", "turned", "strided", "expanded", *more)) if rng.random() < often else ""
    if kind in ("padded", "offset") and t.dim():
        at = kind == "offset"
        wide = torch.full((*t.shape[:-1], t.shape[-1] + 3), float("nan"), dtype=t.dtype)
        wide[..., at : at + t.shape[-1]] = t
        t = wide[..., at : at + t.shape[-1]]
    elif kind == "turned" and t.dim() > 1:
        a, b = rng.sample(range(t.dim()), 2)
        t = t.transpose(a, b).contiguous().transpose(a, b)
    elif kind == "strided" and t.dim():
        dim = rng.randrange(t.dim())
        t = torch.stack((t, torch.full_like(t, float("nan"))), dim + 1).flatten(dim, dim + 1)
        t = t[(slice(None),) * dim + (slice(None, None, 2),)]
    elif kind == "over" and t.dim() == 2 and all(t.shape):  # rows that overlap
        t = torch.cat((t[0], t[1:, -1])).unfold(0, t.shape[1], 1)
    elif kind == "expanded" and t.dim() and all(t.shape):
        dim = rng.randrange(t.dim())
        t = t.narrow(dim, 0, 1).expand(t.shape)
    if told is not None and kind:
        told.append(f"{name}:{kind}")
    return t
