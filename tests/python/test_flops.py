# SPDX-License-Identifier: Apache-2.0
"""torch.utils.flop_counter counts heddle's operators as it does PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import heddle
import heddle.nn


def counted(run):
    with FlopCounterMode(display=False) as counter:
        made = run()
        made.sum().backward() if made.requires_grad else None
    return counter.get_total_flops()


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 5.0}, {"window": (3, 3)}])
def test_attention(recorded, options):
    q, k, v = (torch.randn(2, 4, s, d, requires_grad=recorded) for s, d in ((5, 16), (7, 16), (7, 24)))
    forward, backward = 2 * (16 + 24), 2 * (3 * 16 + 2 * 24)
    pairs = 2 * 4 * 5 * 7
    if options.get("causal"):
        options = {"causal": "top_left"}
    assert counted(lambda: heddle.attention(q, k, v, **options)) == pairs * (forward + recorded * backward)


def test_as_pytorch_counts():
    q, k, v = (torch.randn(2, 4, 8, 16) for _ in range(3))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        theirs = counted(lambda: F.scaled_dot_product_attention(q, k, v))
    assert counted(lambda: heddle.scaled_dot_product_attention(q, k, v)) == theirs == 4 * 2 * 4 * 8 * 8 * 16


def test_multihead_attention():
    """The scores are formed once more than by PyTorch's products."""
    ours, theirs = (
        kind(32, 4, batch_first=True) for kind in (heddle.nn.MultiheadAttention, torch.nn.MultiheadAttention)
    )
    x = torch.randn(2, 6, 32, requires_grad=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = counted(lambda: theirs(x, x, x, need_weights=False)[0])
    assert counted(lambda: ours(x, x, x, need_weights=False)[0]) == expected + 2 * 2 * 4 * 6 * 6 * 8


def test_packed_and_paged():
    q, k, v = torch.randn(9, 4, 16), torch.randn(11, 2, 16), torch.randn(11, 2, 16)
    of_q, of_k = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([0, 5, 11], dtype=torch.int32)
    options = {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k, "max_seqlen_q": 5, "max_seqlen_k": 6}
    assert counted(lambda: heddle.attention(q, k, v, **options)) == 4 * 16 * 4 * (4 * 5 + 5 * 6)
    q, k, v = torch.randn(2, 4, 1, 16), torch.randn(6, 2, 16, 16), torch.randn(6, 2, 16, 16)
    table = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)
    lengths = torch.tensor([40, 48], dtype=torch.int32)
    assert counted(lambda: heddle.attention(q, k, v, block_table=table, seqlens_k=lengths)) == 4 * 16 * 2 * 4 * 48


@pytest.mark.parametrize("wanted", [(), ("x",), ("weight",), ("x", "weight")])
def test_norm_linear(wanted):
    given = {"x": torch.randn(3, 5, 16), "weight": torch.randn(24, 16)}
    for name in wanted:
        given[name].requires_grad_()
    bias = torch.randn(24, requires_grad=bool(wanted))
    expected = 2 * 15 * 16 * 24 * (1 + len(wanted))
    assert counted(lambda: heddle.norm_linear(given["x"], given["weight"], bias)) == expected
    assert counted(lambda: F.linear(given["x"], given["weight"], bias)) == expected
    halves = counted(lambda: heddle.norm_linear(given["x"], given["weight"], bias, activation="swiglu"))
    assert halves == expected


def test_in_a_module():
    model = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 24))
    x = torch.randn(5, 16)
    before = counted(lambda: model(x))
    heddle.replace(model)
    assert counted(lambda: model(x)) == before == 3 * 2 * 5 * 16 * 24
