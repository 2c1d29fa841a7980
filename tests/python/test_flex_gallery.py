# SPDX-License-Identifier: Apache-2.0
"""The score_mods and mask_mods that people write (those of FlexAttention's documentation and its gallery among them):
outside of torch.compile, within it, and exported, each gives what PyTorch's own function gives, or is refused by name.
"""

from __future__ import annotations

import math

import pytest
import torch
from flex_help import eager, flex, formula  # noqa: F401

import heddle

B, H, S, D = 2, 4, 32, 8
SIDE = 8  # of a picture of 32 places, 8 wide


def tables():
    """What the functions captured."""
    generator = torch.Generator().manual_seed(2)

    def made(*shape):
        return torch.randn(*shape, generator=generator)

    lengths = torch.tensor([11, 9, 12])
    return {
        "cap": torch.tensor(5.0),
        "slopes": torch.exp2(-torch.arange(1.0, H + 1)),
        "per_head": made(H).requires_grad_(),
        "by_distance": made(2 * S).requires_grad_(),
        "clipped": made(H, 9).requires_grad_(),
        "picture": made(H, (2 * SIDE - 1) * (2 * SIDE - 1)).requires_grad_(),
        "document": torch.repeat_interleave(torch.arange(3), lengths),
        "offsets": torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]),
        "prefix": torch.tensor([5, 17]),
        "lengths": torch.tensor([20, S]),
        "spans": torch.tensor([[3, 6], [20, 9]]),
        "chosen": torch.rand(H, 4, 4, generator=generator) > 0.4,
        "rows": made(B, S),
    }


def t5(distance):
    far = 8 + (torch.log(distance.clamp(min=1).float() / 8) / math.log(16.0) * 8).to(torch.int64)
    return torch.minimum(torch.where(distance < 8, distance, far), torch.full_like(distance, 8))


SCORES = {
    "nothing": lambda c: lambda s, b, h, q, k: s,
    "twice": lambda c: lambda s, b, h, q, k: s * 2,
    "relative": lambda c: lambda s, b, h, q, k: s + (q - k),
    "relative, Python's abs": lambda c: lambda s, b, h, q, k: s - 0.1 * abs(q - k),
    "relative, torch.abs": lambda c: lambda s, b, h, q, k: s - torch.abs(q - k) * 0.1,
    "relative, of a table": lambda c: lambda s, b, h, q, k: s + c["by_distance"][q - k + S],
    "relative, of abs in a table": lambda c: lambda s, b, h, q, k: s + c["by_distance"][abs(q - k)],
    "relative, clipped": lambda c: lambda s, b, h, q, k: s + c["clipped"][h, torch.clamp(q - k, -4, 4) + 4],
    "relative, at most": lambda c: (
        lambda s, b, h, q, k: s + c["clipped"][h, torch.minimum(abs(q - k), torch.tensor(8))]
    ),
    "t5": lambda c: lambda s, b, h, q, k: s + c["clipped"][h, t5(torch.abs(q - k))],
    "swin": lambda c: (
        lambda s, b, h, q, k: (
            s + c["picture"][h, (q // SIDE - k // SIDE + SIDE - 1) * (2 * SIDE - 1) + (q % SIDE - k % SIDE + SIDE - 1)]
        )
    ),
    "alibi": lambda c: lambda s, b, h, q, k: s + c["slopes"][h] * (k - q),
    "alibi of a formula": lambda c: lambda s, b, h, q, k: s + torch.exp2(-((h + 1) * 8.0 / H)) * (k - q),
    "alibi of both sides": lambda c: lambda s, b, h, q, k: s - c["slopes"][h] * abs(k - q),
    "alibi, negated": lambda c: lambda s, b, h, q, k: s + -abs(k - q) * c["slopes"][h],
    "softcap": lambda c: lambda s, b, h, q, k: 20 * torch.tanh(s / 20),
    "softcap, steps": lambda c: lambda s, b, h, q, k: (s / 20).tanh() * 20,
    "softcap of a tensor": lambda c: lambda s, b, h, q, k: c["cap"] * torch.tanh(s / c["cap"]),
    "scale of a tensor": lambda c: lambda s, b, h, q, k: s * c["cap"],
    "softcap, bias, causal": lambda c: (
        lambda s, b, h, q, k: torch.where(q >= k, 20 * torch.tanh(s / 20) + c["per_head"][h] * k, -float("inf"))
    ),
    "per head, learned": lambda c: lambda s, b, h, q, k: s + c["per_head"][h] * (k % 5),
    "causal": lambda c: lambda s, b, h, q, k: torch.where(q >= k, s, float("-inf")),
    "causal, abs": lambda c: lambda s, b, h, q, k: torch.where((abs(q - k) <= 6) & (q >= k), s, -math.inf),
    "distance, larger": lambda c: (
        lambda s, b, h, q, k: s - torch.maximum(q - k, torch.zeros_like(q)) * 0.1 + max(0.5, 0.25) * (k // 4)
    ),
    "signs": lambda c: lambda s, b, h, q, k: +s - (-(q % 3)) * 0.5 + ~(k % 4) * 0.1,
    "twice abs": lambda c: lambda s, b, h, q, k: s + abs(abs(q - k) - 7) * 0.1,
    "inside a row": lambda c: lambda s, b, h, q, k: s + c["rows"][b, k] * torch.where(h % 2 == 0, 1.0, 0.5),
    "powers": lambda c: lambda s, b, h, q, k: s - ((q - k) ** 2) / 64 + (q & 3) * 0.1 - (k >> 2) * 0.1,
    # Refused, as the kernels compute something else.
    "checkerboard": lambda c: lambda s, b, h, q, k: torch.where(abs(k - q) % 2 == 1, s * 0.5, s),
    "squared": lambda c: lambda s, b, h, q, k: s * s,
    "abs of a score": lambda c: lambda s, b, h, q, k: abs(s),
    "rotary part": lambda c: lambda s, b, h, q, k: s + torch.dot(c["clipped"][h], c["clipped"][h]),
    "gate": lambda c: lambda s, b, h, q, k: s * torch.sigmoid(c["per_head"][h]),
    "branch": lambda c: lambda s, b, h, q, k: s if q >= k else s - 1,
}
MASKS = {
    "causal": lambda c: lambda b, h, q, k: q >= k,
    "sliding window": lambda c: lambda b, h, q, k: (q >= k) & (q - k <= 6),
    "sliding window, functions": lambda c: flex.and_masks(
        lambda b, h, q, k: q >= k, lambda b, h, q, k: torch.abs(q - k) <= 6
    ),
    "both sides": lambda c: lambda b, h, q, k: abs(q - k) <= 5,
    "dilated": lambda c: lambda b, h, q, k: (abs(q - k) <= 9) & (abs(q - k) % 3 == 0) & (q >= k),
    "dilated, diff": lambda c: lambda b, h, q, k: ((q - k) >= 0) & ((q - k) < 9) & ((q - k) % 2 == 0),
    "prefix": lambda c: lambda b, h, q, k: (k < c["prefix"][b]) | (q >= k),
    "prefix of a number": lambda c: flex.or_masks(lambda b, h, q, k: k < 7, lambda b, h, q, k: q >= k),
    "documents": lambda c: lambda b, h, q, k: (c["document"][q] == c["document"][k]) & (q >= k),
    "jagged": lambda c: (
        lambda b, h, q, k: (
            (c["document"][q] == c["document"][k])
            & (q - c["offsets"][c["document"][q]] >= k - c["offsets"][c["document"][k]])
        )
    ),
    "padding": lambda c: lambda b, h, q, k: (q < c["lengths"][b]) & (k < c["lengths"][b]),
    "natten": lambda c: lambda b, h, q, k: (abs(q // SIDE - k // SIDE) <= 1) & (abs(q % SIDE - k % SIDE) <= 2),
    "natten, inside": lambda c: (
        lambda b, h, q, k: (
            ((torch.clamp(q // SIDE, 1, S // SIDE - 2) - k // SIDE).abs() <= 1)
            & ((torch.clamp(q % SIDE, 2, SIDE - 3) - k % SIDE).abs() <= 2)
        )
    ),
    "chunks": lambda c: lambda b, h, q, k: q // 8 == k // 8,
    "sinks and a window": lambda c: lambda b, h, q, k: ((k < 3) | (q - k < 6)) & (k <= q),
    "global": lambda c: lambda b, h, q, k: (abs(q - k) < 4) | (q < 2) | (k < 2),
    "blocks of a table": lambda c: lambda b, h, q, k: c["chosen"][h, q // 8, k // 8] | (q == k),
    "spans": lambda c: (
        lambda b, h, q, k: (
            (q >= k)
            | (
                (q >= c["spans"][b, 0])
                & (q < c["spans"][b, 0] + c["spans"][b, 1])
                & (k >= c["spans"][b, 0])
                & (k < c["spans"][b, 0] + c["spans"][b, 1])
            )
        )
    ),
    "logical": lambda c: lambda b, h, q, k: torch.logical_and(q >= k, torch.logical_not((q + k) % 5 == 4)) | (q == k),
    "exclusive": lambda c: lambda b, h, q, k: ((q % 2 == 0) ^ (k % 2 == 0)) | (q == k),
    "per head": lambda c: lambda b, h, q, k: torch.where(h < 2, q >= k, (q - k).abs() < 5),
}
# What heddle says where it does not compute this.
REFUSED = {
    "checkerboard": "scores that are scaled or capped in two ways",
    "squared": "a score multiplied with what is no number",
    "abs of a score": "the operation abs of a score",
    "rotary part": "dimensions have no index",
    "gate": "a score multiplied with what is no number",
    "branch": "a branch of Python",
}
# And in a graph, where a captured tensor may become another number.
REFUSED_IN_GRAPHS = REFUSED | {
    "softcap of a tensor": "what is no number of Python",
    "scale of a tensor": "what is no number of Python",
}
# torch.export has the trace in common with the first test, and the graph with the second.
EXPORTED = ("relative, of abs in a table", "softcap of a tensor", "swin", "softcap, bias, causal", "signs", "branch")
EXPORTED += ("causal", "sliding window", "documents", "natten", "spans", "per head", "blocks of a table")


def problem():
    torch.manual_seed(0)
    return [torch.randn(B, n, S, D) for n in (H, 2, 2)]


def attend(score, mask, used):
    """A module that calls heddle, the arguments of FlexAttention, and what it learns."""
    score_mod = SCORES[score](used) if score else None
    given = flex.create_block_mask(MASKS[mask](used), B, H, S, S, device="cpu", BLOCK_SIZE=16) if mask else None

    class Attend(torch.nn.Module):
        def forward(self, q, k, v):
            return heddle.flex_attention(q, k, v, score_mod, given, enable_gqa=True)

    return Attend(), score_mod, given


CASES = [(score, None) for score in SCORES] + [(None, mask) for mask in MASKS]
CASES += [("softcap", "documents"), ("relative, of abs in a table", "dilated"), ("alibi of both sides", "natten")]


def names(case):
    return " + ".join(name for name in case if name)


@pytest.fixture(params=CASES, ids=names)
def case(request):
    torch._dynamo.reset()
    used = tables()
    module, score_mod, given = attend(*request.param, used)
    q, k, v = problem()
    with torch.no_grad():
        try:
            truth = flex.flex_attention(q, k, v, score_mod, given, enable_gqa=True)
        except RuntimeError:  # a branch is what vmap does not do either
            truth = None
    return request.param[0], module, (q, k, v), truth, used


def compare(case, run, refused):
    score, _, given, truth, _ = case
    if score in refused:
        with pytest.raises(Exception, match=f"does not understand .*{refused[score]}"):
            run(*given)
        return
    out = run(*given)
    assert torch.allclose(out, truth, rtol=1e-5, atol=2e-6) and truth.abs().max() > 0.1


def test_as_it_is(case):
    compare(case, case[1], REFUSED)


def test_compiled(case):
    run = torch.compile(case[1], fullgraph=True, backend="eager")
    if case[0] == "branch":
        with pytest.raises(Exception, match=r"[Dd]ata-dependent branching"):  # Dynamo's own words
            run(*case[2])
    else:
        compare(case, run, REFUSED_IN_GRAPHS)


@pytest.mark.parametrize("case", [each for each in CASES if set(each) & set(EXPORTED)], ids=names, indirect=True)
def test_exported(case):
    compare(case, lambda *given: torch.export.export(case[1], given).module()(*given), REFUSED_IN_GRAPHS)


@pytest.mark.parametrize("score", ["relative, of abs in a table", "swin", "t5", "softcap, bias, causal"])
def test_gradients(score):
    """Of q, k, v and of what was captured, outside and within torch.compile."""
    torch._dynamo.reset()
    used = tables()
    module, score_mod, _ = attend(score, None, used)
    leaves = [t.requires_grad_() for t in problem()]
    learned = [t for t in used.values() if t.requires_grad]

    def gradients(out):
        made = torch.autograd.grad(out.square().sum(), [*leaves, *learned], allow_unused=True)
        return [t for t in made if t is not None]

    truth = gradients(formula(*leaves, score_mod, None)[0])
    for run in (module, torch.compile(module, fullgraph=True, backend="eager")):
        grads = gradients(run(*leaves))
        assert len(grads) == len(truth) == 4
        for a, b in zip(grads, truth, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-4) and b.abs().max() > 0.01
