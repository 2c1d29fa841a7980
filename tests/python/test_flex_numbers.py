# SPDX-License-Identifier: Apache-2.0
"""The numbers that score_mod and mask_mod compute with are those that PyTorch has, where it calls these functions with
tensors of no dimension: their dtypes, their digits and the ends of their ranges."""

from __future__ import annotations

import math

import pytest
import torch
from flex_help import eager, flex  # noqa: F401

import heddle

B, H, S, D = 2, 3, 40, 8
generator = torch.Generator().manual_seed(0)
ROWS = (8 * torch.randn(H, S, generator=generator)).bfloat16()
COLUMNS = (8 * torch.randn(S, generator=generator)).bfloat16()
BYTES = torch.randint(-100, 100, (S,), generator=generator).to(torch.int8)
NUMBERS = torch.tensor([100, 300])
SEVENTH = torch.tensor(1 / 7)

SCORES = {
    # A sum of tables is not rounded to their type, since each is added to a score by itself.
    "two tables": lambda s, b, h, i, j: s + ROWS[h, i] + COLUMNS[j],
    "two tables on a side": lambda s, b, h, i, j: torch.where(i > j, s + ROWS[h, i] + COLUMNS[j], s),
    "a table and a number": lambda s, b, h, i, j: s + COLUMNS[j] + SEVENTH,
    "a table beside a number": lambda s, b, h, i, j: torch.where(i > j, s + COLUMNS[j], s + 1 / 7),
    "a table beside integers": lambda s, b, h, i, j: torch.where(i > j, s + COLUMNS[j], s + (i * 301 - j * 301)),
    "a table times a number": lambda s, b, h, i, j: (s + COLUMNS[j]) * 0.3,
    # A tensor of one number has a say in the dtype.
    "a table times a captured number": lambda s, b, h, i, j: s + COLUMNS[j] * SEVENTH,
    "bytes times a captured number": lambda s, b, h, i, j: s + BYTES[j] * torch.tensor(100) * 0.001,
    "bytes times a number of a table": lambda s, b, h, i, j: s + BYTES[j] * NUMBERS[0] * 0.001,
    "bytes times a number of Python": lambda s, b, h, i, j: s + BYTES[j] * 100 * 0.001,
}
# Those that PyTorch's vmap computes in int8, as PyTorch itself does not of two tensors without dimensions; the same of
# int64 alone.
LONG = BYTES.long()
WIDE = {
    "below": (
        lambda s, b, h, i, j: s + torch.where(BYTES[j] < NUMBERS[1], 1.0 * j, 0.0),
        lambda s, b, h, i, j: s + torch.where(LONG[j] < NUMBERS[1], 1.0 * j, 0.0),
    ),
    "either": (
        lambda s, b, h, i, j: s + torch.where(i > j, BYTES[j], NUMBERS[1]) * 0.01,
        lambda s, b, h, i, j: s + torch.where(i > j, LONG[j], NUMBERS[1]) * 0.01,
    ),
    "at least": (
        lambda s, b, h, i, j: s + torch.clamp(BYTES[j], min=NUMBERS[1]) * 0.001 * j,
        lambda s, b, h, i, j: s + torch.clamp(LONG[j], min=NUMBERS[1]) * 0.001 * j,
    ),
}
CONDITIONS = {
    "no end": lambda b, h, i, j: (i >= j) & (i - j <= math.inf),
    "no end of both sides": lambda b, h, i, j: (i - j).abs() <= math.inf,
    "nothing": lambda b, h, i, j: (i >= j) & (j - i >= -math.inf) & (i - j > 1e30),
    "not a number": lambda b, h, i, j: (i - j <= math.nan) | (i == j),
    "not a number alone": lambda b, h, i, j: i - j <= math.nan,
    "a distance that is not a number": lambda b, h, i, j: abs(i - j) <= math.nan,
    "halfway": lambda b, h, i, j: (j - i == 0.5) | (j == 0),
    "halfway alone": lambda b, h, i, j: j - i == 0.5,
    "halves": lambda b, h, i, j: (i + 0.5 >= j) & (i - j <= 9 / 2),
    "rounded on the way": lambda b, h, i, j: (i + 0.7) - 0.7 >= j,
    "past the end": lambda b, h, i, j: i + (2**63 - 1) >= j,
    "past the end in two steps": lambda b, h, i, j: i + 2**62 + 2**62 >= j,
    "a window of all": lambda b, h, i, j: (i >= j) & (i - j < 2**63 - 1),
}
LENGTHS = {"square": (S, S), "few queries": (24, S), "few keys": (S, 24)}


def compare(score_mod, mask_mod, sq, sk):
    q, k, v = (torch.randn(B, H, n, D, generator=torch.Generator().manual_seed(n)).double() for n in (sq, sk, sk))
    given = mask_mod and flex.create_block_mask(mask_mod, None, None, sq, sk, device="cpu")
    with torch.no_grad():
        truth, lse = flex.flex_attention(q, k, v, score_mod, given, return_lse=True)
        for _ in range(2):
            o, own = heddle.flex_attention(q, k, v, score_mod, given, return_lse=True)
            assert torch.allclose(o, truth, rtol=1e-6, atol=1e-6)
            assert torch.allclose(own.double(), lse.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", SCORES)
def test_scores(name):
    compare(SCORES[name], None, S, S)


@pytest.mark.parametrize("name", WIDE)
def test_captured_numbers_beside_bytes(name):
    q, k, v = (torch.randn(B, H, S, D, generator=torch.Generator().manual_seed(n)).double() for n in range(3))
    o, truth = (heddle.flex_attention(q, k, v, each) for each in WIDE[name])
    assert torch.allclose(o, truth, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(o, heddle.flex_attention(q, k, v), atol=1e-2)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions(name, lengths):
    condition = CONDITIONS[name]
    compare(None, condition, *LENGTHS[lengths])
    compare(lambda s, b, h, i, j: torch.where(condition(b, h, i, j), s, -math.inf), None, *LENGTHS[lengths])


def test_gradients_of_sums_of_tables():
    """They are those of the formula in float64, also where the call goes by what was kept of an earlier one."""
    q, k, v = (torch.randn(B, H, S, D, generator=torch.Generator().manual_seed(n)) for n in range(3))
    one, other = COLUMNS.clone().requires_grad_(), torch.tensor(1 / 7, requires_grad=True)

    def score_mod(s, b, h, i, j):
        return s + ROWS[h, i] * other + one[j] * other + 0.1

    scores = (q @ k.mT * D**-0.5).double()
    columns, seventh = COLUMNS.double().requires_grad_(), other.detach().double().requires_grad_()
    (
        torch.softmax(scores + (ROWS.double()[:, :, None] + columns) * seventh + 0.1, -1) @ v.double()
    ).square().sum().backward()
    for _ in range(2):
        one.grad = other.grad = None
        heddle.flex_attention(q, k, v, score_mod).square().sum().backward()
        assert torch.allclose(other.grad.double(), seventh.grad, rtol=1e-4)
        assert torch.allclose(one.grad.double(), columns.grad, rtol=1e-2, atol=1e-2 * columns.grad.abs().max())


RETURNED = {
    "a score_mod that returns None": (lambda s, b, h, i, j: None, None),
    "a complex number added to a score": (lambda s, b, h, i, j: s + (i - j) * 1j, None),
    "a mask_mod that returns None": (None, lambda b, h, i, j: None),
    "of which 2 dimensions have no index": (None, lambda b, h, i, j: torch.ones(S, S, dtype=torch.bool)),
    "of which 1 dimensions have no index": (None, lambda b, h, i, j: (ROWS > 0)[h]),
    "that is boolean or uint8": (lambda s, b, h, i, j: s + COLUMNS[i > j], None),
    "that is boolean or uint8, ": (lambda s, b, h, i, j: s + COLUMNS[BYTES.to(torch.uint8)[i]], None),
    "the index True of a captured tensor": (lambda s, b, h, i, j: s + ROWS[True, i], None),
}


@pytest.mark.parametrize("text", RETURNED)
def test_refused(text):
    score_mod, mask_mod = RETURNED[text]
    q, k, v = (torch.randn(B, H, S, D) for _ in range(3))
    one = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    given = mask_mod and flex.BlockMask.from_kv_blocks(*one, BLOCK_SIZE=64, mask_mod=mask_mod, seq_lengths=(S, S))
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=f"does not understand .*{text}"):
            heddle.flex_attention(q, k, v, score_mod, given)
