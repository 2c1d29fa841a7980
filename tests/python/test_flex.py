# SPDX-License-Identifier: Apache-2.0
"""heddle.flex_attention: values against PyTorch's own, gradients against the formula, and what heddle is told."""

from __future__ import annotations

import gc
import itertools
import math
import runpy
from pathlib import Path

import pytest
import torch
from conftest import assert_close, devices, natural_size

import heddle
from heddle import _flex, _flex_kept, _flex_trace

flex = pytest.importorskip("torch.nn.attention.flex_attention")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "flex.py"
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
    for name in ("quick", "quick_options"):  # by which what is kept goes past it
        monkeypatch.setattr(_flex, name, lambda *args: NotImplemented)
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("score", SCORES)
def test_scores(score, dtype):
    check(score, None, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, dtype):
    check(None, mask, dtype)


@pytest.mark.parametrize("mask", ["causal", "window", "documents", "bottom right"])
@pytest.mark.parametrize("score", ["alibi", "softcap and more", "all of them", "causal", "alibi with a gradient"])
def test_both(score, mask):
    check(score, mask, torch.float64)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits(dtype, device):
    q, k, v = (t.detach().to(device) for t in problem(dtype, sk=SQ))
    slopes = captured(torch.float32)["slopes"].to(device)
    out = heddle.flex_attention(q, k, v, lambda s, b, h, i, j: s + slopes[h] * (j - i) + 1, enable_gqa=True)
    truth, _ = formula(
        *(t.double().cpu() for t in (q, k, v)), lambda s, b, h, i, j: s + slopes.cpu()[h] * (j - i), None
    )
    plain, _ = formula(*(t.cpu() for t in (q, k, v)), lambda s, b, h, i, j: s + slopes.cpu()[h] * (j - i), None)
    assert_close("out", out, truth, plain)


# ------------------------------------------------------------------------------------------- what heddle is told

TOLD = {
    "causal": (None, MASKS["causal"], {"causal": "top_left"}),
    "causal in the score": (SCORES["causal"], None, {"causal": "top_left"}),
    "both say so": (SCORES["causal"], MASKS["causal"], {"causal": "top_left"}),
    "bottom right": (None, MASKS["bottom right"], {"causal": "bottom_right"}),
    "window": (None, MASKS["window"], {"causal": "top_left", "window": (7, None)}),
    "window of both sides": (None, MASKS["window of both sides"], {"window": (21, None), "mask": (1, 1, SQ, SK)}),
    "softcap": (SCORES["softcap"], None, {"softcap": 3.0}),
    "alibi": (SCORES["alibi"], MASKS["causal"], {"causal": "top_left", "alibi_slopes": (H,)}),
    "alibi that looks ahead": (SCORES["alibi"], None, {"bias": (H, SQ, SK)}),
    "alibi with a gradient": (
        SCORES["alibi with a gradient"], MASKS["causal"], {"causal": "top_left", "bias": (H, SQ, SK)},
    ),
    "per head": (SCORES["per head"], None, {"bias": (1, H, 1, SK)}),
    "documents": (None, MASKS["documents"], {"causal": "top_left", "mask": (1, 1, SQ, SK)}),
    "lengths": (None, MASKS["lengths"], {"mask": (B, 1, 1, SK)}),
    "strictly before": (None, MASKS["strictly before"], {"causal": "top_left", "mask": (1, 1, SQ, SK)}),
    "noop": (None, MASKS["noop"], {}),
}  # fmt: skip


@pytest.mark.parametrize("name", TOLD)
def test_what_heddle_is_told(name, passed):
    score, mask, expected = TOLD[name]
    used = captured(torch.float32)
    given = mask and flex.create_block_mask(mask(used), B, None, SQ, SK, device="cpu", BLOCK_SIZE=16)
    heddle.flex_attention(*problem(torch.float32), score and score(used), given, enable_gqa=True)
    (told,) = passed
    for each in ("alibi_slopes", "bias", "mask"):
        if each in told:
            shape = tuple(told[each].shape)
            told[each] = shape[len(shape) - len(expected.get(each, shape)) :]
    told = {key: value for key, value in told.items() if key != "softcap" or value}
    assert told == expected


def test_window_of_both_sides_where_lengths_agree(passed):
    q, k, v = problem(torch.float32, sk=SQ)
    given = flex.create_block_mask(MASKS["window of both sides"](None), None, None, SQ, SQ, device="cpu", BLOCK_SIZE=16)
    heddle.flex_attention(q, k, v, None, given, enable_gqa=True)
    assert passed[0].get("window") == (5, 5) and "mask" not in passed[0]


# ------------------------------------------------------------------------------------------------- block masks


def dense(given):
    """A BlockMask as PyTorch's kernels read it: full tiles, and cut ones where mask_mod is true."""
    (rows, columns), (sq, sk) = given.BLOCK_SIZE, given.seq_lengths
    b, h, tiles = given.kv_num_blocks.shape
    inside = flex.create_mask(given.mask_mod, b, h, sq, sk, device="cpu").expand(b, h, sq, sk)
    seen = torch.zeros(b, h, sq, sk, dtype=torch.bool)
    for counts, indices, full in (
        (given.kv_num_blocks, given.kv_indices, False),
        (given.full_kv_num_blocks, given.full_kv_indices, True),
    ):
        for at in itertools.product(range(b), range(h), range(tiles)):
            for column in indices[at][: counts[at]].tolist():
                tile = (
                    *at[:2],
                    slice(at[2] * rows, at[2] * rows + rows),
                    slice(column * columns, (column + 1) * columns),
                )
                seen[tile] = True if full else inside[tile]
    return seen


def lists(seed, mask_mod, size=16):
    generator = torch.Generator().manual_seed(seed)
    rows, columns = -(-SQ // size), -(-SK // size)
    kinds = torch.randint(0, 3, (B, 1, rows, columns), generator=generator)
    pairs = []
    for kind in (1, 2):
        pairs += flex._dense_to_ordered((kinds == kind).to(torch.int8))
    return flex.BlockMask.from_kv_blocks(*pairs, BLOCK_SIZE=size, mask_mod=mask_mod, seq_lengths=(SQ, SK))


@pytest.mark.parametrize("mask_mod", [None, lambda b, h, q, k: q >= k, lambda b, h, q, k: (q + k) % 2 == 0])
def test_lists_that_say_something_else_than_mask_mod(mask_mod):
    q, k, v = (t.detach() for t in problem(torch.float32))
    given = lists(3, mask_mod)
    for _ in range(2):  # the second from what is kept
        out, lse = heddle.flex_attention(q, k, v, None, given, enable_gqa=True, return_lse=True)
        expected, expected_lse = heddle.attention(q, k, v, mask=dense(given), return_lse=True)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_empty_rows():
    q, k, v = problem(torch.float32)
    given = block_mask(lambda b, h, i, j: (i % 2 == 0) & (i >= j))
    out, lse = heddle.flex_attention(q, k, v, None, given, enable_gqa=True, return_lse=True)
    with torch.no_grad():
        theirs, aux = flex.flex_attention(
            q.detach(), k.detach(), v.detach(), None, given, enable_gqa=True, return_aux=flex.AuxRequest(lse=True)
        )
    assert torch.allclose(out, theirs, atol=1e-6) and torch.allclose(lse, aux.lse, atol=1e-6)
    assert not out[:, :, 1::2].any() and (lse[:, :, 1::2] == -math.inf).all()
    out.sum().backward()
    assert not q.grad[:, :, 1::2].any() and torch.isfinite(k.grad).all()


def test_a_mask_is_kept_until_its_tensors_change():
    q, k, v = (t.detach() for t in problem(torch.float32))
    allowed = torch.rand(SQ, SK) > 0.5
    given = flex.create_block_mask(lambda b, h, i, j: allowed[i, j], None, None, SQ, SK, device="cpu", BLOCK_SIZE=16)

    def run():
        return heddle.flex_attention(q, k, v, None, given, enable_gqa=True)

    first = run()
    kept = _flex._known[id(given)].mask[2]
    assert torch.equal(run(), first) and _flex._known[id(given)].mask[2] is kept
    allowed.logical_not_()
    assert torch.equal(run(), heddle.attention(q, k, v, mask=allowed[None, None]))
    gone = id(given)
    given = None
    gc.collect()
    assert gone not in _flex._known


def test_masks_are_computed_in_strips(monkeypatch):
    monkeypatch.setattr(_flex, "_STRIP", 3 * SK)
    for name in ("documents", "lengths", "heads", "of a table"):
        check(None, name, torch.float64)
    test_lists_that_say_something_else_than_mask_mod(lambda b, h, q, k: (q + k) % 2 == 0)


def test_results_as_asked_for():
    q, k, v = (t.detach() for t in problem(torch.float32, hk=4))
    out, lse = heddle.attention(q, k, v, scale=0.3, return_lse=True)
    assert torch.equal(heddle.flex_attention(q, k, v, scale=0.3), out)
    got, aux = heddle.flex_attention(q, k, v, scale=0.3, return_aux=flex.AuxRequest(lse=True))
    assert torch.equal(got, out) and torch.equal(aux.lse, lse) and aux.max_scores is None
    got, aux = heddle.flex_attention(q, k, v, scale=0.3, return_aux=flex.AuxRequest(), kernel_options={"BLOCK_M": 64})
    assert torch.equal(got, out) and aux.lse is None
    one = block_mask(lambda b, h, i, j: i >= j)
    assert torch.equal(
        heddle.flex_attention(q, k[:1], v[:1], None, one),
        heddle.attention(q, k[:1].repeat(B, 1, 1, 1), v[:1].repeat(B, 1, 1, 1), causal="top_left"),
    )


WIDTH = 3


class Settings:
    width = 3


@pytest.mark.parametrize("what", ["global", "cell", "cell of a function", "default", "attribute", "list", "code"])
def test_nothing_is_taken_for_what_it_was(what, monkeypatch, passed):
    """A trace is kept, but only as long as what the function reads is the same."""
    width, settings, few = 3, Settings(), [3]

    def inner(q, k):
        return q - k <= width

    window = {
        "global": lambda b, h, q, k: (q >= k) & (q - k <= WIDTH),
        "cell": lambda b, h, q, k: (q >= k) & (q - k <= width),
        "cell of a function": lambda b, h, q, k: (q >= k) & inner(q, k),
        "default": lambda b, h, q, k, limit=3: (q >= k) & (q - k <= limit),
        "attribute": lambda b, h, q, k: (q >= k) & (q - k <= settings.width),
        "list": lambda b, h, q, k: (q >= k) & (q - k <= few[0]),
        "code": lambda b, h, q, k: (q >= k) & (q - k <= 3),
    }[what]
    tensors = problem(torch.float32, sk=SQ)
    one = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    given = flex.BlockMask.from_kv_blocks(*one, BLOCK_SIZE=64, mask_mod=window, seq_lengths=(SQ, SQ))

    def run():
        return heddle.flex_attention(*(t.detach() for t in tensors), None, given, enable_gqa=True)

    results = [run() for _ in range(3)]
    assert [each["window"] for each in passed] == [(3, None)] * 3 and torch.equal(results[0], results[2])
    width, settings.width, few[0] = 5, 5, 5
    monkeypatch.setitem(globals(), "WIDTH", 5)
    if what == "default":
        window.__defaults__ = (5,)
    if what == "code":
        window.__code__ = (lambda b, h, q, k: (q >= k) & (q - k <= 5)).__code__
    assert not torch.equal(run(), results[0]) and passed[-1]["window"] == (5, None)


def test_what_is_the_same_is_not_traced_again(monkeypatch):
    slopes, calls = captured(torch.float32)["slopes"], []
    q, k, v = (t.detach() for t in problem(torch.float32, sk=SQ))
    given = block_mask(lambda b, h, i, j: i >= j, sk=SQ)
    capped, alibi = (lambda s, b, h, i, j: 5 * torch.tanh(s / 5)), (lambda s, b, h, i, j: s + slopes[h] * (j - i))
    heddle.flex_attention(q, k, v, capped, given, enable_gqa=True)
    first = heddle.flex_attention(q, k, v, alibi, given, enable_gqa=True)
    monkeypatch.setattr(_flex_trace, "_Mode", lambda read: calls.append(1))
    heddle.flex_attention(q, k, v, capped, given, enable_gqa=True)
    slopes.mul_(2)  # the same tensor with other numbers
    assert not torch.equal(heddle.flex_attention(q, k, v, alibi, given, enable_gqa=True), first)
    assert not calls


KEPT = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def kept_forms():
    """score_mod and mask_mod with what heddle.attention is told for them; each reads tensors."""
    table, allowed, width = torch.randn(H, SQ), torch.rand(SQ, SQ) > 0.3, 7
    index = torch.arange(SQ)
    ahead = (index[None, :] > index[:, None])[None, None]
    alibi = (lambda s, b, h, i, j: s + KEPT[h] * (j - i)), (lambda b, h, i, j: i >= j)
    near = (lambda s, b, h, i, j: s + table[h, j]), (lambda b, h, i, j: (i >= j) & (i - j <= width) & allowed[i, j])
    return {
        "alibi": (*alibi, lambda: {"alibi_slopes": KEPT, "causal": "top_left"}, [KEPT]),
        "bias and mask": (
            *near,
            lambda: {
                "bias": table[None, :, None, :],
                "mask": allowed[None, None] & ~ahead & ((index[:, None] - index[None, :]) <= width)[None, None],
            },
            [table, allowed],
        ),
        "bias alone": (near[0], None, lambda: {"bias": table[None, :, None, :]}, [table]),
    }


@pytest.mark.parametrize("name", kept_forms())
def test_what_is_kept_is_what_would_be_found(name, monkeypatch):
    """The second call finds its options ready, and none once a tensor that a function reads has been written to."""
    score_mod, mask_mod, expected, tensors = kept_forms()[name]
    q, k, v = (t.detach() for t in problem(torch.float32, sk=SQ, hk=H))
    given = mask_mod and block_mask(mask_mod, sk=SQ)

    def check():
        got, lse = heddle.flex_attention(q, k, v, score_mod, given, return_lse=True)
        truth, its_lse = heddle.attention(q, k, v, return_lse=True, **expected())
        assert torch.allclose(got, truth, atol=1e-6) and torch.allclose(lse, its_lse, atol=1e-6)
        assert torch.equal(heddle.flex_attention(q, k, v, score_mod, given), got)

    check()
    with monkeypatch.context() as patch:
        patch.setattr(_flex, "_options", None)  # cannot be called
        check()
        with torch.inference_mode():
            check()
        for tensor in tensors:
            tensor.copy_(tensor.flip(0))
            with pytest.raises(TypeError, match="not callable"):
                heddle.flex_attention(q, k, v, score_mod, given)
    check()
    if name != "alibi":  # other memory, and the version as it was
        tensors[0].data = torch.randn_like(tensors[0])
        check()


def test_functions_made_anew_are_known():
    """A function of the same code around the same things is the same; around others it is not."""
    q, k, v = (t.detach() for t in problem(torch.float32, hk=H))
    table, other = torch.randn(H, SK), torch.randn(H, SK)

    def attend(table, factor):
        return heddle.flex_attention(q, k, v, lambda s, b, h, i, j: s + factor * table[h, j])

    for it, factor in ((table, 1.0), (other, 1.0), (table, 1.0), (table, 2.0), (table, -0.0), (table, 0.0), (table, 0)):
        before = {id(each) for each in _flex.functions.values()}
        for _ in range(2):
            truth = heddle.attention(q, k, v, bias=factor * it[None, :, None, :])
            assert torch.allclose(attend(it, factor), truth, atol=1e-6)
        assert len({id(each) for each in _flex.functions.values()} - before) == 1


def test_gradients_are_not_lost_to_what_was_kept():
    """What was made without gradients is for calls without them, and what wants one is made for each call."""
    q, k, v = (t.detach() for t in problem(torch.float32, hk=H))
    table = torch.randn(H, SK, requires_grad=True)
    score_mods = [
        lambda s, b, h, i, j: s + table[h, j],
        lambda s, b, h, i, j: s + table.exp()[h, j],  # part of it is computed before any index is known
    ]
    for score_mod in score_mods:
        for _ in range(2):
            with torch.no_grad():
                assert not heddle.flex_attention(q, k, v, score_mod).requires_grad
            (grad,) = torch.autograd.grad(heddle.flex_attention(q, k, v, score_mod).square().sum(), table)
            bias = (table if score_mod is score_mods[0] else table.exp())[None, :, None, :]
            (truth,) = torch.autograd.grad(heddle.attention(q, k, v, bias=bias).square().sum(), table)
            assert torch.allclose(grad, truth, atol=1e-5) and truth.abs().max() > 0.01
    later = torch.randn(H, SK)
    for _ in range(2):
        heddle.flex_attention(q, k, v, lambda s, b, h, i, j: s + later[h, j])
    later.requires_grad_()
    assert heddle.flex_attention(q, k, v, lambda s, b, h, i, j: s + later[h, j]).requires_grad


def test_numbers_that_a_trace_went_by():
    q, k, v = (t.detach() for t in problem(torch.float32, hk=H))
    shift, limit = torch.tensor([1.0, 2.0]), torch.tensor(-math.inf)

    def shifted(s, b, h, i, j):
        return s + shift[0] * j

    def limited(s, b, h, i, j):
        return torch.where(i >= j, s, limit)

    for _ in range(2):
        truth = heddle.attention(q, k, v, bias=(shift[0] * torch.arange(SK))[None, None, None].expand(1, 1, 1, SK))
        assert torch.allclose(heddle.flex_attention(q, k, v, shifted), truth, atol=1e-6)
        shift.add_(1)
    assert torch.equal(heddle.flex_attention(q, k, v, limited), heddle.attention(q, k, v, causal="top_left"))
    limit.fill_(-5.0)
    with pytest.raises(NotImplementedError, match="something else than -inf"):
        heddle.flex_attention(q, k, v, limited)


def test_lists_that_are_written_to():
    q, k, v = (t.detach() for t in problem(torch.float32))
    given = lists(3, None)
    for _ in range(2):
        first = heddle.flex_attention(q, k, v, None, given, enable_gqa=True)
    given.kv_num_blocks.zero_()
    given.full_kv_num_blocks.zero_()
    assert first.abs().max() > 0 and not heddle.flex_attention(q, k, v, None, given, enable_gqa=True).any()


@pytest.mark.parametrize("device", [device for device in devices() if device != "cpu"])
def test_cuda_graphs_and_streams(device):
    """A graph makes what is added anew at every replay, and another stream does not take what this one made."""
    q, k, v = (torch.randn(1, H, 64, 32, device=device, dtype=torch.bfloat16) for _ in range(3))
    table, seen = torch.randn(H, 64, device=device), torch.rand(64, 64, device=device) > 0.3
    given = flex.create_block_mask(lambda b, h, i, j: seen[i, j], None, None, 64, 64, device=device, BLOCK_SIZE=32)

    def attend():
        return heddle.flex_attention(q, k, v, lambda s, b, h, i, j: s + table[h, j], given)

    def truth():
        return heddle.attention(q, k, v, bias=table[None, :, None, :], mask=seen[None, None])

    for _ in range(2):
        assert torch.equal(attend(), truth())
    (kept,) = _flex._known[id(given)].shelf.values()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert not kept.now()
        assert torch.equal(attend(), truth())
    torch.cuda.synchronize()
    assert torch.equal(attend(), truth())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = attend()
    for _ in range(2):
        table.copy_(torch.randn_like(table))
        graph.replay()
        assert torch.equal(made, truth())
    assert torch.equal(attend(), truth())


def test_little_is_kept(monkeypatch):
    """No more than so much of what was last asked for, and nothing that is large."""
    q, k, v = (torch.randn(1, 1, 8, 4) for _ in range(3))
    monkeypatch.setattr(_flex_kept, "_MOST", 3)
    score_mod, table = (lambda s, b, h, i, j: s + table[i, j]), torch.randn(20, 20)
    _flex.functions.clear()
    for n in range(1, 9):
        heddle.flex_attention(q[:, :, :n], k, v, score_mod)
    assert [key[1][2] for key in _flex.functions] == [6, 7, 8]
    monkeypatch.setattr(_flex_kept, "_BYTES", 7 * 8 * 4 + 8 * 8 * 4)
    heddle.flex_attention(q[:, :, :5], k, v, score_mod)
    assert [key[1][2] for key in _flex.functions] == [8, 5]
    monkeypatch.setattr(_flex_kept, "_LARGEST", 100)
    _flex.functions.clear()
    heddle.flex_attention(q, k, v, score_mod)
    assert not _flex.functions


# ---------------------------------------------------------------------------------------------------- refusals

TABLE, NUMBER = torch.randn(H, SQ, SK), torch.tensor(2.0)
REFUSED = {
    "sigmoid of a score": lambda s, b, h, q, k: torch.sigmoid(s),
    "pow of a score": lambda s, b, h, q, k: s**2,
    "score added to a score": lambda s, b, h, q, k: s + s,
    "something minus a score": lambda s, b, h, q, k: 1 - s,
    "tanh of a score that something": lambda s, b, h, q, k: torch.tanh(s + TABLE[h, q, k]),
    "multiplied with what is no number": lambda s, b, h, q, k: s * NUMBER,
    "not positive": lambda s, b, h, q, k: -torch.where(q >= k, s, -math.inf),
    "than -inf": lambda s, b, h, q, k: torch.where(q >= k, s, -1e9),
    "scaled or capped in two ways": lambda s, b, h, q, k: torch.where(q >= k, s, 2 * s),
    "condition on a score": lambda s, b, h, q, k: torch.where(s > 0, s, -math.inf),
    "operation gt of a score": lambda s, b, h, q, k: torch.where(s > 0, s, -math.inf),
    "branch of Python": lambda s, b, h, q, k: s if q >= k else -math.inf,
    "made a number of Python": lambda s, b, h, q, k: s + float(q),
    "has no index": lambda s, b, h, q, k: s + TABLE,
    "2 dimensions have no index": lambda s, b, h, q, k: s + TABLE[h],
    "the operation cumsum": lambda s, b, h, q, k: s + torch.cumsum(q, 0),
    "whatever the score is": lambda s, b, h, q, k: q - k,
    r"the index slice\(0, 2": lambda s, b, h, q, k: s + TABLE[h, 0:2].sum(),
    "infinite number added": lambda s, b, h, q, k: s + math.inf,
}


@pytest.mark.parametrize("text", [text for text in REFUSED if text != "condition on a score"])
def test_what_is_not_understood_is_named(text):
    with pytest.raises(NotImplementedError, match=f"does not understand .*{text}"):
        heddle.flex_attention(*problem(torch.float32), REFUSED[text], enable_gqa=True)


@pytest.mark.parametrize(
    "changed,kind,text",
    [
        ({"query": torch.randn(4, 3, 8)}, ValueError, "3, 4 and 4 dimensions"),
        ({"key": None}, TypeError, "key must be"),
        ({"enable_gqa": False}, ValueError, "enable_gqa=True"),
        ({"return_lse": True, "return_aux": flex.AuxRequest()}, ValueError, "cannot be given together"),
        ({"return_aux": flex.AuxRequest(max_scores=True)}, NotImplementedError, "max_scores"),
        ({"kernel_options": 3}, TypeError, "kernel_options must be a dict"),
        ({"block_mask": block_mask(lambda b, h, q, k: q >= k, SQ + 1)}, ValueError, "made for lengths"),
        ({"block_mask": block_mask(lambda b, h, q, k: q >= k)[:, :, :1]}, ValueError, "sliced|lengths"),
    ],
)
def test_errors(changed, kind, text):
    q, k, v = problem(torch.float32)
    given = {"query": q, "key": k, "value": v, "enable_gqa": True}
    with pytest.raises(kind, match=text):
        heddle.flex_attention(**(given | changed))


def test_compilers_are_told():
    q, k, v = (t.detach() for t in problem(torch.float32, hk=4))

    def run(q, k, v):
        return heddle.flex_attention(q + 1, k, v, lambda s, b, h, i, j: torch.where(i >= j, s, -math.inf)) * 2

    with pytest.raises(Exception, match=r"heddle.flex_attention calls score_mod|torch.compiler.disable"):
        torch.compile(run, backend="eager", fullgraph=True)(q, k, v)


def test_the_example(capsys):
    runpy.run_path(str(EXAMPLE))
    assert "gradient of the bias" in capsys.readouterr().out
