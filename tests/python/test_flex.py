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
from conftest import assert_close, devices
from flex_help import (  # noqa: F401
    MASKS,
    SCORES,
    SK,
    SQ,
    B,
    H,
    block_mask,
    captured,
    check,
    eager,
    flex,
    formula,
    lists,
    passed,
    problem,
)
from torch.autograd import forward_ad

import heddle
from heddle import _flex, _flex_masks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "flex.py"


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
def test_any_strides(device):
    """PyTorch's function takes a last dimension that is not contiguous, the first time and from what is kept."""
    torch.manual_seed(0)
    made = [torch.randn(2, 4, 9, 8, device=device) for _ in range(3)]
    given = made[0].mT.contiguous().mT, made[1].repeat_interleave(2, -1)[..., ::2], made[2][..., :1].expand(2, 4, 9, 8)
    given = [t.requires_grad_() for t in given]
    same = [t.detach().contiguous().requires_grad_() for t in given]

    def score_mod(s, b, h, i, j):
        return s + 0.1 * j

    for _ in range(3):
        out, wanted = (heddle.flex_attention(*leaves, score_mod) for leaves in (given, same))
        assert torch.equal(out, wanted)
        grads = (torch.autograd.grad(o.sum(), leaves) for o, leaves in ((out, given), (wanted, same)))
        assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))


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
def test_what_heddle_is_told(name, passed):  # noqa: F811
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


def test_window_of_both_sides_where_lengths_agree(passed):  # noqa: F811
    q, k, v = problem(torch.float32, sk=SQ)
    given = flex.create_block_mask(MASKS["window of both sides"](None), None, None, SQ, SQ, device="cpu", BLOCK_SIZE=16)
    heddle.flex_attention(q, k, v, None, given, enable_gqa=True)
    assert passed[0].get("window") == (5, 5) and "mask" not in passed[0]


def slopes_of(one):
    """ALiBi by a slope of each head, or by one number that is captured as such."""
    if one:
        return lambda w: (lambda slope: lambda s, b, h, i, j: s - slope * (i - j).abs())(w[0])
    return lambda w: lambda s, b, h, i, j: s - w[h] * abs(i - j)


@pytest.mark.parametrize("masked", [False, True])
def test_one_slope_that_learns(masked, passed):  # noqa: F811
    """Where it needs a gradient it is a bias, again and again; elsewhere alibi_slopes."""
    q, k, v = (t.detach() for t in problem(torch.float64, sk=SQ, hk=H))
    slope = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    given = block_mask(lambda b, h, i, j: i >= j, sk=SQ) if masked else None

    def score_mod(s, b, h, i, j):
        return s + slope * (j - i) if masked else s - slope * (i - j).abs()

    for _ in range(3):
        passed.clear()
        out = heddle.flex_attention(q, k, v, score_mod, given)
        truth, _ = formula(q, k, v, score_mod, given and given.mask_mod)
        assert torch.allclose(out, truth) and passed[0].keys() >= {"bias"}
        grad, its_truth = (torch.autograd.grad(each.square().sum(), slope)[0] for each in (out, truth))
        assert torch.allclose(grad, its_truth) and its_truth.abs() > 0.01
        with torch.no_grad():
            assert torch.allclose(heddle.flex_attention(q, k, v, score_mod, given), truth)
            assert passed[1].keys() >= {"alibi_slopes"}
            slope.mul_(1.5)


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("way", ["jvp", "jacfwd", "jacrev", "vmap", "jvp of vmap", "hessian"])
def test_slopes_that_torch_func_goes_through(way, one):
    q, k, v = (t.detach()[:, :, :9] for t in problem(torch.float64, sk=SQ, hk=H))
    w, along = torch.rand(2, H, dtype=torch.float64), torch.rand(2, H, dtype=torch.float64)

    def told(attend):
        return {
            "jvp": lambda: torch.func.jvp(attend, (w[0],), (along[0],))[1],
            "jacfwd": lambda: torch.func.jacfwd(attend)(w[0]),
            "jacrev": lambda: torch.func.jacrev(attend)(w[0]),
            "vmap": lambda: torch.func.vmap(attend)(w),
            "jvp of vmap": lambda: torch.func.jvp(torch.func.vmap(attend), (w,), (along,))[1],
            "hessian": lambda: torch.func.hessian(lambda w: attend(w).square().sum())(w[0]),
        }[way]()

    got = told(lambda w: heddle.flex_attention(q, k, v, slopes_of(one)(w)))
    truth = told(lambda w: formula(q, k, v, slopes_of(one)(w), None)[0])
    assert torch.allclose(got, truth) and truth.abs().max() > 0.01


@pytest.mark.parametrize("one", [False, True])
def test_tangents_of_slopes(one):
    """Of a dual level, whose second call goes by what the first one found."""
    q, k, v = (t.detach() for t in problem(torch.float64, sk=SQ, hk=H))
    w, along = torch.rand(H, dtype=torch.float64), torch.rand(H, dtype=torch.float64)
    with forward_ad.dual_level():
        score_mod = slopes_of(one)(forward_ad.make_dual(w, along))
        truth = forward_ad.unpack_dual(formula(q, k, v, score_mod, None)[0]).tangent
        for _ in range(2):
            tangent = forward_ad.unpack_dual(heddle.flex_attention(q, k, v, score_mod)).tangent
            assert torch.allclose(tangent, truth) and truth.abs().max() > 0.01


def test_a_factor_with_a_tangent_is_no_number():
    """Its derivative is not lost."""
    q, k, v = (t.detach() for t in problem(torch.float64, sk=SQ, hk=H))
    factor, one = torch.tensor(0.5, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)

    def attend(factor):
        return heddle.flex_attention(q, k, v, lambda s, b, h, i, j: s * factor)

    with pytest.raises(NotImplementedError, match="a score multiplied with what is no number"):
        torch.func.jvp(attend, (factor,), (one,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="a score multiplied with what is no number"):
        attend(forward_ad.make_dual(factor, one))
    with pytest.raises(NotImplementedError, match="a score multiplied with what is no number"):
        torch.func.vmap(attend)(torch.stack([factor, one]))


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
    monkeypatch.setattr(_flex_masks, "_STRIP", 3 * SK)
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


# ---------------------------------------------------------------------------------------------------- refusals

TABLE, NUMBER = torch.randn(H, SQ, SK), torch.tensor(2.0, requires_grad=True)
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
        ({"score_mod": 3}, TypeError, "score_mod must be a function, not int"),
        ({"block_mask": 3}, TypeError, "block_mask must be a BlockMask, not int"),
        ({"block_mask": torch.ones(3)}, TypeError, "block_mask must be a BlockMask, not Tensor"),
        ({"return_aux": 3}, TypeError, "return_aux must be an AuxRequest, not int"),
        ({"block_mask": block_mask(lambda b, h, q, k: q >= k, SQ + 1)}, ValueError, "made for lengths"),
        ({"block_mask": block_mask(lambda b, h, q, k: q >= k)[:, :, :1]}, ValueError, "sliced|lengths"),
    ],
)
def test_errors(changed, kind, text):
    q, k, v = problem(torch.float32)
    given = {"query": q, "key": k, "value": v, "enable_gqa": True}
    with pytest.raises(kind, match=text):
        heddle.flex_attention(**(given | changed))


def test_the_example(capsys):
    runpy.run_path(str(EXAMPLE))
    assert "gradient of the bias" in capsys.readouterr().out
