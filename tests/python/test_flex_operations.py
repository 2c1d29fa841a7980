# SPDX-License-Identifier: Apache-2.0
"""How score_mod and mask_mod may call an operation: in place, with keywords, of integers and of conditions. Outside of
torch.compile and within it, each gives what the formula gives, or is refused by name."""

from __future__ import annotations

import math
import re

import pytest
import torch
from flex_help import SK, SQ, B, D, H, flex, formula

import heddle

TABLE, SLOPES, HALF = torch.rand(H, SQ, SK), torch.tensor([0.5, 0.25, 0.125, 0.0625]), torch.tensor(0.5)
BYTES = torch.tensor([200, 7, 0, 255], dtype=torch.uint8)
DOCUMENTS = torch.arange(SK) // 11


def problem(dtype):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, n, D, generator=generator).to(dtype) for n in (SQ, SK, SK)]


def attend(score_mod, mask_mod, dtype=torch.float32):
    q, k, v = problem(dtype)
    # One cut tile of everything.
    one = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    given = mask_mod and flex.BlockMask.from_kv_blocks(*one, BLOCK_SIZE=64, mask_mod=mask_mod, seq_lengths=(SQ, SK))
    return lambda: heddle.flex_attention(q, k, v, score_mod, given)


def runs(score_mod, mask_mod, dtype=torch.float32):
    """A call, the next one, and one within a graph."""
    torch._dynamo.reset()
    run = attend(score_mod, mask_mod, dtype)
    return run, run, torch.compile(run, fullgraph=True, backend="eager")


def check(score_mod, mask_mod=None, graph=True, dtype=torch.float32):
    truth, _ = formula(*problem(dtype), score_mod, mask_mod)
    for run in runs(score_mod, mask_mod, dtype)[: 3 if graph else 2]:
        assert torch.allclose(run(), truth, rtol=1e-4, atol=1e-5) and truth.abs().max() > 0.1


def check_refused(text, score_mod, mask_mod=None):
    """Within a graph, mask_mods too; outside of one PyTorch's own vmap computes these."""
    outside, _, compiled = runs(score_mod, mask_mod)
    if mask_mod is None:
        with pytest.raises(NotImplementedError, match=f"does not understand .*{text}"):
            outside()
    with pytest.raises(Exception, match=f"does not understand .*{text}"):
        compiled()


def named(table):
    """Puts a function into a table, by its name."""

    def put(function):
        table[function.__name__] = function
        return function

    return put


# -------------------------------------------------------------------------------------------------------- in place

CHANGED, CHANGED_MASKS, REFUSED, REFUSED_IN_GRAPHS = {}, {}, {}, {}


@named(CHANGED)
def mul_(s, b, h, i, j):
    s.mul_(0.5)
    return s


@named(CHANGED)
def add_(s, b, h, i, j):
    s.add_(TABLE[h, i, j])
    return s


@named(CHANGED)
def masked_fill_(s, b, h, i, j):
    s.masked_fill_(i < j, -math.inf)
    return s


@named(CHANGED)
def clamp_(s, b, h, i, j):
    d = i - j
    d.clamp_(0, 5)
    return s - d


@named(CHANGED)
def augmented(s, b, h, i, j):
    s *= 0.5
    s /= 2
    s += TABLE[h, i, j]
    s -= SLOPES[h] * (i - j).abs()
    return s


@named(CHANGED)
def another_name(s, b, h, i, j):
    t = s
    t += TABLE[h, i, j]
    t *= 2
    return s


@named(CHANGED)
def another_name_of_an_expression(s, b, h, i, j):
    d = i - j
    e, before = d, d * 3
    d *= 2
    e.abs_()
    return s - d + before * 0.1


@named(CHANGED)
def a_copy(s, b, h, i, j):
    t = s.clone()
    t += j
    return s + 0


@named(CHANGED)
def an_index(s, b, h, i, j):
    before = i - j
    i += 3
    return s + (i - j).abs() * 0.1 + before


@named(CHANGED)
def a_conversion_that_is_not_used_again(s, b, h, i, j):
    s = s.float()
    s += (i - j).long() * 0.1
    return s


@named(CHANGED)
def of_python_abs(s, b, h, i, j):
    d = abs(i - j)
    e = d
    d.neg_()
    return s + d + e


@named(CHANGED)
def short_integers(s, b, h, i, j):
    d = (i - j).to(torch.int8)
    d *= 3 * j + 100  # beyond 127
    return s + d * 0.01


@named(CHANGED)
def integers_stay_integers(s, b, h, i, j):
    d = i - j
    d //= 2
    d <<= 1
    d ^= 5
    d.lt_(3)
    return s + d


@named(CHANGED)
def conditions(s, b, h, i, j):
    c = i >= j
    same = c
    c &= DOCUMENTS[i] == DOCUMENTS[j]
    c |= j == 0
    return torch.where(same, s, -math.inf)


@named(CHANGED)
def numbers(s, b, h, i, j):
    x = TABLE[h, i, j] * 2
    x += SLOPES[h]
    x.sigmoid_()
    return s + x


@named(CHANGED_MASKS)
def logical_and_(b, h, i, j):
    c = i >= j
    c.logical_and_(DOCUMENTS[i] == DOCUMENTS[j])
    return c


@named(CHANGED_MASKS)
def a_band(b, h, i, j):
    d = i - j
    d -= 2
    i += 4
    return (d <= 7) & (i >= j)


@named(REFUSED)
def fill_(s, b, h, i, j):
    s.fill_(1)
    return s


@named(REFUSED)
def sub_(s, b, h, i, j):
    s.sub_(j, alpha=2)
    return s


@named(REFUSED)
def relu_(s, b, h, i, j):
    torch.relu_(s)
    return s


@named(REFUSED)
def inplace(s, b, h, i, j):
    d = i - j
    torch.nn.functional.relu(d, inplace=True)
    return s + d


@named(REFUSED)
def out(s, b, h, i, j):
    torch.add(s, 1, out=HALF)
    return s


@named(REFUSED)
def mul__of_a_captured_tensor(s, b, h, i, j):
    HALF.mul_(i)
    return s


@named(REFUSED)
def add__of_a_captured_tensor_of_which(s, b, h, i, j):
    x = TABLE[h]
    x.add_(1)
    return s + x[i, j]


@named(REFUSED)
def integers_or_conditions(s, b, h, i, j):
    d = i - j
    d += 0.5
    return s + d


@named(REFUSED)
def may_be_the_same_tensor(s, b, h, i, j):
    t = s.float()
    t += 1
    return s


@named(REFUSED)
def may_be_the_same_tensor_as_another(s, b, h, i, j):
    e = i.long()
    i += 3
    return s + e


@named(REFUSED)
def attribute_data(s, b, h, i, j):
    s.data.mul_(2)
    return s


@named(REFUSED_IN_GRAPHS)
def neg_(s, b, h, i, j):  # Dynamo itself computes it of what stands for the index
    torch.neg_(i)
    return s + i


@named(REFUSED_IN_GRAPHS)
def setitem(s, b, h, i, j):
    own = torch.ones(4)
    own[1] = 2
    return s + own[i % 4]


@named(REFUSED_IN_GRAPHS)
def iadd__of_what_abs(s, b, h, i, j):
    d = i - j
    d += 1
    return s + abs(d)


@pytest.mark.parametrize("name", CHANGED)
def test_in_place(name):
    """All who have the tensor see it."""
    check(CHANGED[name])


@pytest.mark.parametrize("name", CHANGED_MASKS)
def test_masks_in_place(name):
    check(None, CHANGED_MASKS[name])


def words(name):
    return name.replace("__of", "_ of").replace("of_", "of ").replace("_", ".")


@pytest.mark.parametrize("name", REFUSED)
def test_in_place_and_refused(name):
    check_refused(words(name), REFUSED[name])


@pytest.mark.parametrize("name", REFUSED_IN_GRAPHS)
def test_in_place_and_refused_within_a_graph(name):
    check(REFUSED_IN_GRAPHS[name], graph=False)
    try:
        runs(REFUSED_IN_GRAPHS[name], None)[2]()
    except Exception as error:
        assert re.search(f"does not understand .*{words(name).replace('iadd', 'add')}", str(error), re.DOTALL)
    else:  # torch 2.11 has a graph of some
        check(REFUSED_IN_GRAPHS[name])


def test_a_captured_tensor_that_changes_in_between():
    """What was read before is not what would be read later."""
    table = TABLE.clone()

    def score_mod(s, b, h, i, j):
        read = s + table[h, i, j]
        table.mul_(2)
        return read

    with pytest.raises(NotImplementedError, match="captured tensor that the function changes"):
        attend(score_mod, None)()


# -------------------------------------------------------------------------------------------------------- keywords

KEYWORDS = {
    "where": lambda s, b, h, i, j: torch.where(i >= j, input=s, other=-math.inf),
    "where, all of them": lambda s, b, h, i, j: torch.where(input=s, condition=i >= j, other=-math.inf),
    "Tensor.where": lambda s, b, h, i, j: s.where(i >= j, -math.inf),
    "Tensor.where of an index": lambda s, b, h, i, j: s + i.where(i >= j, other=0) * 0.1,
    "masked_fill": lambda s, b, h, i, j: s.masked_fill(mask=i < j, value=-math.inf),
    "tanh": lambda s, b, h, i, j: torch.tanh(input=s),
    "add": lambda s, b, h, i, j: torch.add(torch.add(input=s, other=HALF), i, alpha=1),
    "mul": lambda s, b, h, i, j: torch.mul(s, other=0.5),
    "sub": lambda s, b, h, i, j: s.sub(other=torch.sub(i, other=j, alpha=2)),
    "div": lambda s, b, h, i, j: s + torch.div(i, other=3, rounding_mode="floor"),
    "pow": lambda s, b, h, i, j: s - torch.pow(i - j, exponent=2) * 0.1 - torch.float_power(i + 1, -1),
    "clamp": lambda s, b, h, i, j: s - torch.clamp(input=i - j, max=4) + torch.clamp(j - i, min=None, max=3),
    "maximum": lambda s, b, h, i, j: s - torch.maximum(i, other=j) * 0.1 + torch.full_like(i, fill_value=2.5),
    "lerp": lambda s, b, h, i, j: s + torch.lerp(TABLE[h, i, j], end=HALF, weight=0.25),
    "to": lambda s, b, h, i, j: s.to(dtype=torch.float32) + i.to(dtype=torch.float32) * 0.3 + (i - j).to(s),
    "to a device": lambda s, b, h, i, j: s.to("cpu", torch.float32, copy=True),
    "new_tensor": lambda s, b, h, i, j: s * s.new_tensor(0.3) + s.new_full(size=(), fill_value=0.5),
    "new_full of an index": lambda s, b, h, i, j: s + i * i.new_full((), 2.7) + j * j.new_tensor(0.3),
    "divided by": lambda s, b, h, i, j: s + 2 / (1 + abs(i - j)),
}
REFUSED_KEYWORDS = {
    "add of a score with .*alpha": lambda s, b, h, i, j: torch.add(s, i, alpha=2),
    "rsub with .*alpha": lambda s, b, h, i, j: s + torch.rsub(i, j, alpha=2),
    "truediv of a score with .*rounding_mode": lambda s, b, h, i, j: s.div(2, rounding_mode="floor"),
    "the operation to of a score, to torch.float64": lambda s, b, h, i, j: s.to(dtype=torch.float64),
    "moved to meta": lambda s, b, h, i, j: s.to(device="meta"),
    "the operation where of 4 arguments": lambda s, b, h, i, j: s.where(i >= j, -math.inf, 1),
    "masked_fill without value": lambda s, b, h, i, j: s.masked_fill(i < j),
    "new_tensor with .*requires_grad": lambda s, b, h, i, j: s + s.new_tensor(0.5, requires_grad=True),
    "new_zeros of the size 3": lambda s, b, h, i, j: s + s.new_zeros(3),
    "the attribute T": lambda s, b, h, i, j: s.T,
    "a score divided by zero": lambda s, b, h, i, j: s / 0,
    "the operation heddle_tests::tanh of a score": lambda s, b, h, i, j: torch.ops.heddle_tests.tanh(s),
}
# Somebody's own operators may have PyTorch's names.
OWN = torch.library.Library("heddle_tests", "FRAGMENT")
OWN.define("tanh(Tensor x) -> Tensor")
OWN.impl("tanh", lambda x: x * 3, "CompositeExplicitAutograd")
OWN.impl("tanh", torch.empty_like, "Meta")


@pytest.mark.parametrize("name", KEYWORDS)
def test_keywords(name):
    check(KEYWORDS[name])


def test_attributes():
    """Those of a tensor of one number."""

    def score_mod(s, b, h, i, j):
        assert s.shape == () and s.ndim == i.ndim == 0 and TABLE[h].shape == (SQ, SK) and TABLE[h, i].ndim == 1
        assert s.dtype == torch.float32 and (i - j).dtype == torch.int64 and (i > j).dtype == torch.bool
        assert (i - j).device == s.device == TABLE.device and not i.requires_grad and not hasattr(s, "other")
        return s

    for run in runs(score_mod, None):
        run()


@pytest.mark.parametrize("text", REFUSED_KEYWORDS)
def test_keywords_that_are_refused(text):
    check_refused(text, REFUSED_KEYWORDS[text])


# --------------------------------------------------------------------------------------- integers and conditions

WHOLE_MASKS = {
    "bit and causal": lambda b, h, i, j: torch.logical_and(i & 1, j <= i),
    "two bits": lambda b, h, i, j: torch.logical_and((i & 6) & 4, j <= i),
    "and True": lambda b, h, i, j: (i & True) == 1,
    "True and": lambda b, h, i, j: (True & j) == (i & 1),
    "numbers alone": lambda b, h, i, j: torch.logical_and(i - j, j <= i),
    "bytes": lambda b, h, i, j: torch.logical_and(BYTES[h] & 8, j <= i),
}
WHOLE_SCORES = {
    "bit and causal": lambda s, b, h, i, j: torch.where(torch.logical_and(i & 1, j <= i) | (j == 0), s, -math.inf),
    "conditions added": lambda s, b, h, i, j: s + (i > j) + (i > j),
    "bytes": lambda s, b, h, i, j: s - BYTES[h] * (j % 2) * 0.01 - torch.where(i > j, BYTES[h], 1),
    "bytes added": lambda s, b, h, i, j: s + (j % 2 * 100).to(torch.int8) + (j % 2 * 100).to(torch.int8),
    "bytes as a condition": lambda s, b, h, i, j: torch.where((BYTES[h] > 100) | (i >= j), s, s + 1),
}


@pytest.mark.parametrize("name", WHOLE_MASKS)
def test_masks_of_integers(name):
    check(None, WHOLE_MASKS[name])


@pytest.mark.parametrize("name", WHOLE_SCORES)
def test_scores_of_integers(name):
    check(WHOLE_SCORES[name], dtype=torch.float64)


@pytest.mark.parametrize("text", ["a number, not a boolean", "a score minus a condition"])
def test_integers_that_are_refused(text):
    """PyTorch takes neither."""
    score_mods = {
        "a number, not a boolean": lambda s, b, h, i, j: torch.where(i & 1, s, s + 1),
        "a score minus a condition": lambda s, b, h, i, j: s - (i > j),
    }
    check_refused(text, score_mods[text])


class Attend(torch.nn.Module):
    def __init__(self, score_mod):
        super().__init__()
        self.score_mod = score_mod

    def forward(self, q, k, v):
        return heddle.flex_attention(q, k, v, self.score_mod)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["augmented", "another_name_of_an_expression", "conditions"])
def test_exported(name, strict):
    truth, _ = formula(*problem(torch.float32), CHANGED[name], None)
    given = tuple(problem(torch.float32))
    program = torch.export.export(Attend(CHANGED[name]), given, strict=strict)
    assert torch.allclose(program.module()(*given), truth, rtol=1e-4, atol=1e-5)
