# SPDX-License-Identifier: Apache-2.0
"""What heddle.flex_attention keeps of a call, and what has to be found anew."""

from __future__ import annotations

import functools
import gc
import math
import random
import sys
import time
import types

import pytest
import torch
from conftest import devices
from flex_help import SK, SQ, H, block_mask, captured, eager, flex, lists, passed, problem, t5  # noqa: F401

import heddle
from heddle import _flex, _flex_kept, _flex_trace

WIDTH = 3


class Settings:
    width = 3


@pytest.mark.parametrize("what", ["global", "cell", "cell of a function", "default", "attribute", "list", "code"])
def test_nothing_is_taken_for_what_it_was(what, monkeypatch, passed):  # noqa: F811
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


FACTOR = 0.5


def given_by_no_argument():
    """score_mods that are a score times a number, 0.5; and what makes it 3.0, in ways that no cell tells."""
    things, few = {"c": 0.5}, [0.5]
    get, at = things.get, few.__getitem__
    of_another, number = (lambda: None), torch.tensor(0.5)
    of_another.factor = 0.5

    class Number(float):
        factor = 0.5

    a_number = Number(1)

    def of_itself(s, b, h, i, j):
        return s * of_itself.factor

    @functools.wraps(torch.nn.functional.relu)
    def of_torch(s, b, h, i, j):
        return s * FACTOR

    def named(*_):
        globals()["FACTOR"] = 3.0

    of_itself.factor = 0.5
    return {
        "dict.get": (lambda s, b, h, i, j: s * get("c"), lambda: things.update(c=3.0)),
        "list.__getitem__": (lambda s, b, h, i, j: s * at(0), lambda: few.__setitem__(0, 3.0)),
        "function's attribute": (of_itself, lambda: setattr(of_itself, "factor", 3.0)),
        "another's attribute": (
            lambda s, b, h, i, j: s * of_another.factor, lambda: setattr(of_another, "factor", 3.0),
        ),
        "number's attribute": (lambda s, b, h, i, j: s * a_number.factor, lambda: setattr(Number, "factor", 3.0)),
        "globals": (lambda s, b, h, i, j: s * globals()["FACTOR"], named),
        "eval": (lambda s, b, h, i, j: s * eval("FACTOR"), named),
        "wrapped": (lambda s, b, h, i, j: of_torch(s, b, h, i, j), named),
        "grad mode": (
            lambda s, b, h, i, j: s * (0.5 if torch.is_grad_enabled() else 3.0), lambda: torch.set_grad_enabled(False),
        ),
        "data": (lambda s, b, h, i, j: s * number, lambda: setattr(number, "data", torch.tensor(3.0))),
    }  # fmt: skip


@pytest.mark.parametrize("name", given_by_no_argument())
def test_what_no_cell_tells(name, monkeypatch):
    monkeypatch.setitem(globals(), "FACTOR", 0.5)
    q, k, v = (t.detach() for t in problem(torch.float32, hk=H))
    score_mod, change = given_by_no_argument()[name]
    own = q.shape[-1] ** -0.5
    try:
        for factor in (0.5, 3.0):
            for _ in range(2):
                truth = heddle.attention(q, k, v, scale=own * factor)
                assert torch.allclose(heddle.flex_attention(q, k, v, score_mod), truth, atol=1e-6), factor
            change()
    finally:
        torch.set_grad_enabled(True)


COUNT = 0


def counting():
    """score_mods that are a score times 1, 2, 3, ... at each call."""
    count, inside, following = 0, torch.zeros(()), iter(range(1, 9)).__next__

    def of_a_cell(s, b, h, i, j):
        nonlocal count
        count += 1
        return s * count

    def of_a_global(s, b, h, i, j):
        global COUNT
        COUNT += 1
        return s * COUNT

    def of_a_tensor(s, b, h, i, j):
        return s * inside.add_(1)

    def of_an_import(s, b, h, i, j):
        import counted_by_the_test  # of sys.modules alone

        return s * next(counted_by_the_test.numbers)

    return {
        "cell": of_a_cell,
        "global": of_a_global,
        "tensor": of_a_tensor,
        "builtin": lambda s, b, h, i, j: s * following(),
        "import": of_an_import,
    }


@pytest.mark.parametrize("name", counting())
def test_what_is_another_number_at_each_call(name, monkeypatch):
    monkeypatch.setitem(globals(), "COUNT", 0)
    counted = types.ModuleType("counted_by_the_test")
    counted.numbers = iter(range(1, 9))
    monkeypatch.setitem(sys.modules, "counted_by_the_test", counted)
    q, k, v = (t.detach() for t in problem(torch.float32, hk=H))
    score_mod, own = counting()[name], q.shape[-1] ** -0.5
    for count in range(1, 5):
        truth = heddle.attention(q, k, v, scale=own * count)
        assert torch.allclose(heddle.flex_attention(q, k, v, score_mod), truth, atol=1e-6), count


def test_builtins_of_other_modules_are_not_kept():
    """What PyTorch and math have is, and what of Python's own depends on its arguments alone."""
    draw, now, root, least, tanh = random.random, time.perf_counter, math.sqrt, min, torch.tanh
    q, k, v = (t.detach() for t in problem(torch.float32, hk=H))
    kept = {
        "random": lambda s, b, h, i, j: s * draw(),
        "time": lambda s, b, h, i, j: s * now(),
        "of torch and math": lambda s, b, h, i, j: tanh(s * root(4.0)) * least(3.0, 2.0),
    }
    for name, score_mod in kept.items():
        heddle.flex_attention(q, k, v, score_mod)
        assert _flex_trace.is_known(score_mod) == (name == "of torch and math")


def test_what_was_known_is_forgotten():
    """Once a function draws, nothing is kept of what it was before."""
    q, k, v = (t.detach() for t in problem(torch.float32, hk=H))
    draws = False

    def score_mod(s, b, h, i, j):
        return s + (torch.rand(()) * j if draws else 1)

    heddle.flex_attention(q, k, v, score_mod)
    draws = True
    first, second = (heddle.flex_attention(q, k, v, score_mod) for _ in range(2))
    assert not torch.equal(first, second)


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


def learning_forms():
    """score_mods, each of them with tensors that learn among what it reads."""
    square, near, buckets = (torch.randn(*shape, requires_grad=True) for shape in ((H, SQ, SK), (H,), (32, H)))
    fixed = torch.randn(SK)
    return {
        "a table": (lambda s, b, h, i, j: s + square[h, i, j], [square]),
        "buckets": (lambda s, b, h, i, j: s + buckets[torch.where(j > i, 16, 0) + t5((i - j).abs()), h], [buckets]),
        "slopes": (lambda s, b, h, i, j: s + near[h] * (j - i) + 1, [near]),
        "several": (
            lambda s, b, h, i, j: 5 * torch.tanh(s / 5) + fixed[j] - torch.where(i > j, near[h], square[h, i, j] * 2),
            [square, near],
        ),
    }


@pytest.mark.parametrize("name", learning_forms())
def test_what_learns_is_computed_anew(name, monkeypatch):
    """All else is kept: the second call finds nothing out, with other numbers, too, and gradients are its own."""
    q, k, v = (t.detach() for t in problem(torch.float32, hk=H))
    score_mod, learned = learning_forms()[name]
    given = block_mask(lambda b, h, i, j: (i >= j) & (i - j <= 7))

    def run():
        out = heddle.flex_attention(q, k, v, score_mod, given)
        return out.detach(), torch.autograd.grad(out.square().sum(), learned, allow_unused=True)

    run()
    assert heddle.flex_attention(q, k, v, score_mod, given).requires_grad
    for _ in range(3):
        with torch.no_grad():
            without = heddle.flex_attention(q, k, v, score_mod, given)
        with monkeypatch.context() as patch:
            patch.setattr(_flex, "_options", None)  # cannot be called
            out, grads = run()
            with torch.no_grad():
                assert torch.equal(heddle.flex_attention(q, k, v, score_mod, given), without)
        for each in (_flex.functions, _flex._known, _flex.latest):
            each.clear()
        truth, its_grads = run()
        assert torch.allclose(without, out, atol=1e-4) and torch.allclose(out, truth, atol=1e-6)
        for a, b in zip(grads, its_grads, strict=True):
            assert (a is None) == (b is None) and (a is None or torch.allclose(a, b, atol=1e-5))
        assert any(a is not None and a.abs().max() > 1e-3 for a in grads)
        with torch.no_grad():
            for tensor in learned:
                tensor.mul_(1.5).add_(0.1)


def test_what_learns_and_masks():
    """A mask that is made of what learns is not kept."""
    q, k, v = (t.detach() for t in problem(torch.float32, hk=H))
    table = torch.randn(H, SK, requires_grad=True)

    def score_mod(s, b, h, i, j):
        return torch.where(table[h, j] > 0, s + table[h, j], -math.inf)

    for _ in range(3):
        bias, seen = table[None, :, None, :], (table > 0)[None, :, None, :]
        truth = heddle.attention(q, k, v, bias=bias, mask=seen)
        assert torch.allclose(heddle.flex_attention(q, k, v, score_mod), truth, atol=1e-6)
        with torch.no_grad():
            table.neg_()


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


@pytest.mark.parametrize(
    "changed,message",
    [({"BLOCK_SIZE": (128, 128)}, "names tiles from 0 to 3"), ({"seq_lengths": (256, 192)}, "lengths")],
)
def test_sizes_that_are_changed(changed, message):
    """What a BlockMask's lists mean depends on its sizes, too."""
    q, k, v = (torch.randn(1, 1, 256, 16) for _ in range(3))
    given = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device="cpu", BLOCK_SIZE=64)
    for _ in range(3):
        heddle.flex_attention(q, k, v, None, given)
    for name, value in changed.items():
        setattr(given, name, value)
    with pytest.raises(ValueError, match=message):
        heddle.flex_attention(q, k, v, None, given)


@pytest.mark.parametrize("device", [device for device in devices() if device != "cpu"])
def test_cuda_graphs_and_streams(device):
    """A graph makes what is added anew at every replay, and another stream does not take what this one made."""
    q, k, v = (torch.randn(1, H, 64, 32, device=device, dtype=torch.bfloat16) for _ in range(3))
    table, seen = torch.randn(H, 64, device=device), torch.rand(64, 64, device=device) > 0.3
    given = flex.create_block_mask(lambda b, h, i, j: seen[i, j], None, None, 64, 64, device=device, BLOCK_SIZE=32)

    def score_mod(s, b, h, i, j):
        return s + table[h, j]

    def attend():
        return heddle.flex_attention(q, k, v, score_mod, given)

    def truth():
        return heddle.attention(q, k, v, bias=table[None, :, None, :], mask=seen[None, None])

    for _ in range(2):
        assert torch.equal(attend(), truth())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert _flex._recall(q, k, v, score_mod, given, None, False, False) is NotImplemented
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


def test_another_stream_takes_nothing():
    """Whose tensors are kept: for the stream that made them, while no CUDA graph is captured on it."""
    q, k, v = (t.detach() for t in problem(torch.float32, hk=H))
    table = torch.randn(H, SK)

    def score_mod(s, b, h, i, j):
        return s + table[h, j]

    truth = heddle.flex_attention(q, k, v, score_mod)
    kept = next(reversed(_flex.functions.values()))
    usual = kept.ready
    # Of the stream that made it, the one of now, whether a graph is captured.
    for made, now, capturing in ((7, 7, False), (7, 7, True), (7, 8, False), (0, 0, None), (0, 7, False)):
        kept.ready = (*usual[:2], 0, made, *usual[4:])
        parts = _flex_kept._Parts(_flex._known, _flex.functions, {}, _flex.short, _flex._refused)
        asked = {"stream": lambda device, now=now: now + device, "capturing": lambda answer=capturing: {}[answer]}
        if capturing is not None:  # where nobody needs to ask, asking is an error
            asked["capturing"] = lambda answer=capturing: answer
        result = heddle._C.recaller(tuple(parts._replace(**asked)))(q, k, v, score_mod, None, None, False, False)
        if made == now and not capturing:
            assert torch.equal(result, truth)
        else:
            assert result is NotImplemented
    kept.ready = usual


def test_latest_is_of_its_place():
    """What was used last is for its sizes, dtype, scale and BlockMask alone."""
    table = torch.randn(H, SQ, SK)
    score_mod = lambda s, b, h, i, j: s + table[h, i, j]  # noqa: E731
    given = [None, block_mask(lambda b, h, i, j: i >= j), block_mask(lambda b, h, i, j: i >= j + 1)]
    q, k, v = (t.detach() for t in problem(torch.float32, hk=H))
    calls = [
        (q, k, None, None), (q[:, :, :9], k, None, None), (q, k[:, :, :8], None, None), (q[:1], k[:1], None, None),
        (q.bfloat16(), k.bfloat16(), None, None), (q, k, 0.3, None), (q, k, 1, None), (q, k, 1.0, None),
        (q, k, None, given[1]), (q, k, None, given[2]), (q, k, 0.3, given[1]),
    ]  # fmt: skip

    def attend(q, k, scale, mask):
        its_v = v[: q.shape[0], :, : k.shape[2]].to(q.dtype)
        return heddle.flex_attention(q, k, its_v, score_mod, mask, scale)

    def found_anew(*call):
        for each in (_flex.functions, _flex._known, _flex.latest):
            each.clear()
        return attend(*call)

    truths = [found_anew(*call) for call in calls]
    for _ in range(3):
        for call, truth in zip(calls, truths, strict=True):
            assert torch.equal(attend(*call), truth)
            assert torch.equal(attend(*call), truth)


def test_calls_keep_no_references():
    """Neither those that are made by what was kept, nor those that are refused."""
    q, k, v = (t.detach() for t in problem(torch.float32, hk=H))
    table, learned = torch.randn(H, SK), torch.randn(H, SK, requires_grad=True)
    given = block_mask(lambda b, h, i, j: i >= j)
    mods = [lambda s, b, h, i, j: s + table[h, j], lambda s, b, h, i, j: s + learned[h, j], None]
    calls = [(score_mod, mask, lse) for score_mod in mods for mask in (None, given) for lse in (False, True)]

    def run():
        for score_mod, mask, lse in calls:
            heddle.flex_attention(q, k, v, score_mod, mask, return_lse=lse)
            heddle.flex_attention(q, k, v, score_mod, mask, 0.5)
            with pytest.raises(ValueError):
                heddle.flex_attention(q, k, v[:, :, :-1], score_mod, mask, return_lse=lse)

    run()
    gc.collect()
    shelves = [_flex.functions, _flex._known[id(given)].shelf]
    things = [q, k, v, table, learned, given, None, False, *mods[:2], q.dtype]
    things += [part for shelf in shelves for kept in shelf.values() for part in (kept, kept.ready, *kept.ready)]
    before = [sys.getrefcount(thing) for thing in things]
    for _ in range(20):
        run()
    gc.collect()
    after = [sys.getrefcount(thing) for thing in things]
    # From Python 3.12 on None and False are immortal, and what modules of the stable ABI add to their counts stays.
    grown = [(type(x), a, b) for x, a, b in zip(things, before, after, strict=True) if b - a >= 20 and a < 2**30]
    assert not grown
