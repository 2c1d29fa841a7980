# SPDX-License-Identifier: Apache-2.0
"""What the tests of heddle.flex_attention share: functions of each form, a problem, the formula, what is compared."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import assert_close, natural_size

import heddle
from heddle import _flex

flex = pytest.importorskip("torch.nn.attention.flex_attention")
B, H, SQ, SK, D = 2, 4, 37, 53, 8


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """PyTorch's function without a compiler."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)


@pytest.fixture
def passed(monkeypatch):
    """The options with which heddle.attention was called."""
    calls = []

    def attention(*args, **options):
        calls.append({name: value for name, value in options.items() if value is not None and value is not False})
        return heddle.attention(*args, **options)

    monkeypatch.setattr(_flex, "attention", attention)
    # The short ways, by which what is kept goes past it, are closed.
    recall = _flex.recaller(_flex._known, _flex.functions, _flex.latest, None, _flex._refused)
    monkeypatch.setattr(_flex, "_recall", recall)
    return calls


def captured(dtype=torch.float64):
    """What the functions below read: fresh tensors, the first five with a gradient."""
    generator = torch.Generator().manual_seed(1)

    def made(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return {
        "per_head": made(H),
        "square": made(H, SQ, SK),
        "batched": made(B, H, SK),
        "relative": made(SQ + SK),
        "buckets": made(32, H),
        "slopes": torch.exp2(-torch.arange(1.0, H + 1)).to(dtype),
        "allowed": torch.rand(SQ, SK, generator=generator) > 0.3,
        "documents": torch.arange(max(SQ, SK)) // 11,
        "lengths": torch.tensor([13, SK]),
        "half": torch.tensor(0.5, dtype=dtype),
    }


def t5(distance):
    """Buckets of distances: exact to 8, then logarithmic."""
    far = 8 + (torch.log(distance.clamp(min=1).float() / 8) / math.log(16.0) * 8).to(torch.int64)
    return torch.where(distance < 8, distance, torch.clamp(far, max=15))


SCORES = {
    "identity": lambda c: lambda s, b, h, q, k: s,
    "softcap": lambda c: lambda s, b, h, q, k: 3.0 * torch.tanh(s / 3.0),
    "softcap the other way round": lambda c: lambda s, b, h, q, k: torch.tanh(s * 0.5) * 2.0,
    "softcap and more": lambda c: lambda s, b, h, q, k: -(torch.tanh(-s / 3) * 3) * 0.5 + c["per_head"][h],
    "scaled": lambda c: lambda s, b, h, q, k: s * 0.5 / 2 + 1,
    "negative": lambda c: lambda s, b, h, q, k: -s,
    "alibi": lambda c: lambda s, b, h, q, k: s + c["slopes"][h] * (k - q),
    "alibi, both sides": lambda c: lambda s, b, h, q, k: s - (q - k).abs() * c["slopes"][h],
    "alibi of a formula": lambda c: lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / H)),
    "alibi of numbers": lambda c: lambda s, b, h, q, k: s - 0.25 * abs(k - q),
    "alibi with a gradient": lambda c: lambda s, b, h, q, k: s + c["per_head"][h] * (k - q),
    "per head": lambda c: lambda s, b, h, q, k: s + c["per_head"][h],
    "square": lambda c: lambda s, b, h, q, k: s + c["square"][h, q, k],
    "square, one index at a time": lambda c: lambda s, b, h, q, k: c["square"][h][q][k] + s,
    "batched": lambda c: lambda s, b, h, q, k: s - 2 * c["batched"][b, h, k],
    "relative": lambda c: lambda s, b, h, q, k: s + c["relative"][q - k + SK - 1],
    "t5": lambda c: lambda s, b, h, q, k: s + c["buckets"][torch.where(k > q, 16, 0) + t5((q - k).abs()), h],
    "causal": lambda c: lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
    "causal, turned": lambda c: lambda s, b, h, q, k: torch.where(k > q, float("-inf"), s + c["per_head"][h]),
    "masked_fill": lambda c: lambda s, b, h, q, k: s.masked_fill(~c["allowed"][q, k], -math.inf),
    "window of tensors": lambda c: (
        lambda s, b, h, q, k: torch.where((q - k <= 5) & (k - q < 9), s, torch.tensor(-torch.inf))
    ),
    "all of them": lambda c: (
        lambda s, b, h, q, k: torch.where(
            q + 20 >= k, 5 * torch.tanh(s / 5) + c["square"][h, q, k] - c["slopes"][h] * (q - k).abs(), -math.inf
        )
    ),
    "either of two": lambda c: (
        lambda s, b, h, q, k: torch.where(
            h % 2 == 0, s + c["relative"][q], torch.where(c["allowed"][q, k], s - c["per_head"][h] * 2, -math.inf)
        )
    ),
    "captured number": lambda c: lambda s, b, h, q, k: s + c["half"] * k,
}
MASKS = {
    "causal": lambda c: lambda b, h, q, k: q >= k,
    "bottom right": lambda c: lambda b, h, q, k: q + (SK - SQ) >= k,
    "window": lambda c: lambda b, h, q, k: (q >= k) & (q - k <= 7),
    "window of both sides": lambda c: lambda b, h, q, k: (q - k).abs() < 6,
    "window apart": lambda c: lambda b, h, q, k: (k - q > 2) & (k - q < 30),
    "strictly before": lambda c: lambda b, h, q, k: k < q,
    "itself": lambda c: lambda b, h, q, k: k == q,
    "prefix": lambda c: lambda b, h, q, k: (k < c["lengths"][b]) | (k <= q),
    "documents": lambda c: flex.and_masks(
        lambda b, h, q, k: c["documents"][q] == c["documents"][k], lambda b, h, q, k: k <= q
    ),
    "lengths": lambda c: lambda b, h, q, k: k < c["lengths"][b],
    "heads": lambda c: flex.or_masks(lambda b, h, q, k: h == 1, lambda b, h, q, k: (q + k) % 3 == 0),
    "noop": lambda c: flex.noop_mask,
    "of a table": lambda c: lambda b, h, q, k: c["allowed"][q, k],
}


def formula(q, k, v, score_mod, mask_mod, scale=None):
    """(out, lse) as FlexAttention defines them; all of these functions can be called with indices that broadcast."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    sizes = (*q.shape[:3], k.shape[2])
    index = [torch.arange(n).view([-1 if x == at else 1 for x in range(4)]) for at, n in enumerate(sizes)]
    scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    scores = score_mod(scores, *index) if score_mod else scores
    if mask_mod:
        seen = mask_mod(*index)
        scores = torch.where(seen if seen.shape else seen.expand(sizes), scores, -math.inf)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    lse = torch.logsumexp(scores.masked_fill(empty, 0), -1, keepdim=True).masked_fill(empty, -math.inf)
    weights = torch.exp(scores - lse.masked_fill(empty, 0))
    return weights.to(v.dtype) @ v, lse.squeeze(-1)


def problem(dtype, hk=2, sq=SQ, sk=SK):
    torch.manual_seed(0)
    return [torch.randn(B, *shape).to(dtype).requires_grad_() for shape in ((H, sq, D), (hk, sk, D), (hk, sk, D))]


def block_mask(mask_mod, sq=SQ, sk=SK, size=16):
    return flex.create_block_mask(mask_mod, B, H, sq, sk, device="cpu", BLOCK_SIZE=size)


def check(score, mask, dtype):
    leaves, used = problem(dtype), captured(dtype)
    score_mod = SCORES[score](used) if score else None
    mask_mod = MASKS[mask](used) if mask else None
    given = block_mask(mask_mod) if mask else None
    with torch.no_grad():
        theirs = flex.flex_attention(*(t.detach() for t in leaves), score_mod, given, enable_gqa=True)
    out, lse = heddle.flex_attention(*leaves, score_mod, given, enable_gqa=True, return_lse=True)
    assert out.shape == theirs.shape and out.dtype == theirs.dtype and lse.shape == out.shape[:3]
    truth_leaves, truth_used = problem(torch.float64), captured()
    truth_leaves = [a.detach().double().requires_grad_() for a in leaves]
    truth_used = {
        n: t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for n, t in used.items()
    }
    same = "square" if score == "square, one index at a time" else score  # which does not broadcast
    truth, truth_lse = formula(*truth_leaves, score and SCORES[same](truth_used), mask and MASKS[mask](truth_used))
    plain, plain_lse = formula(*leaves, score and SCORES[same](used), mask_mod)
    assert_close("out", out, truth, theirs)
    assert_close("lse", lse, truth_lse, plain_lse, 4.0)
    dout, dlse = torch.randn_like(truth), torch.randn_like(truth_lse)
    seen = torch.isfinite(truth_lse)
    learned = [name for name in used if used[name].requires_grad]

    def gradients(o, its_lse, leaves, used):
        loss = (o.double() * dout).sum() + (its_lse.double().masked_fill(~seen, 0) * dlse).sum()
        return torch.autograd.grad(loss, [*leaves, *(used[name] for name in learned)], allow_unused=True)

    grads = gradients(out, lse, leaves, used)
    truths = gradients(truth, truth_lse, truth_leaves, truth_used)
    plains = gradients(plain, plain_lse, leaves, used)
    natural = natural_size(dout, *truth_leaves) + dlse.abs().max().item() * 4
    for name, a, b, c in zip(["dq", "dk", "dv", *learned], grads, truths, plains, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            terms = 1 if name in ("dq", "dk", "dv") else B * SQ
            assert_close(name, a, b, c, natural * math.sqrt(terms))


def lists(seed, mask_mod, size=16):
    generator = torch.Generator().manual_seed(seed)
    rows, columns = -(-SQ // size), -(-SK // size)
    kinds = torch.randint(0, 3, (B, 1, rows, columns), generator=generator)
    pairs = []
    for kind in (1, 2):
        pairs += flex._dense_to_ordered((kinds == kind).to(torch.int8))
    return flex.BlockMask.from_kv_blocks(*pairs, BLOCK_SIZE=size, mask_mod=mask_mod, seq_lengths=(SQ, SK))
