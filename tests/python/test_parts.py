# SPDX-License-Identifier: Apache-2.0
"""A part of a larger problem: its results are those that the whole has there, with dropout to the bit."""

from __future__ import annotations

import numpy
import pytest
import torch
from conftest import devices
from torch.testing import assert_close

import heddle

RNG = torch.tensor([1234567, 2**40 + 5])
B, H, HK, S, D = 2, 6, 2, 96, 24


def inputs(dtype=torch.float32, s=S, device="cpu"):
    torch.manual_seed(3)
    return [torch.randn(B, heads, s, D).to(device, dtype).requires_grad_() for heads in (H, HK, HK)]


OPTIONS = {
    "causal": {"causal": "top_left"},
    "window": {"window": (13, 9)},
    "causal, alibi": {"causal": "bottom_right", "alibi_slopes": torch.arange(1, H + 1) / 8},
    "dropout": {"dropout": 0.4, "rng_state": RNG},
    "all": {"causal": True, "window": (30, None), "softcap": 3.0, "dropout": 0.2, "rng_state": RNG},
}


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_queries_of_a_whole(options, device):
    q, k, v = inputs(device=device)
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    whole = heddle.attention(q, k, v, **options)
    (dq,) = torch.autograd.grad(whole.sum(), q)
    for first, end in ((0, 96), (0, 31), (31, 33), (33, 96)):
        part = q[:, :, first:end].detach().requires_grad_()
        corner = {"causal": "bottom_right"} if options.get("causal") is True else {}
        out = heddle.attention(part, k, v, **options | corner, q_offset=first, whole_sq=S)
        assert_close(out, whole[:, :, first:end])
        (dpart,) = torch.autograd.grad(out.sum(), part)
        assert_close(dpart, dq[:, :, first:end], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", devices())
def test_keys_and_heads_of_a_whole(device):
    q, k, v = inputs(torch.float64 if device == "cpu" else torch.float32, device=device)
    options = {"causal": "top_left", "dropout": 0.3, "rng_state": RNG.to(device), "return_weights": True}
    rows = {"q_offset": 40, "h_offset": 3, "whole_h": H}
    _, whole = heddle.attention(q, k, v, **options)
    _, part = heddle.attention(q[:, 3:, 40:70], k[:, 1:, 11:50], v[:, 1:, 11:50], **options, **rows, k_offset=11)
    cut = whole[:, 3:, 40:70, 11:50]
    assert_close(part, cut / cut.sum(-1, keepdim=True))
    # Dropout's bits: a weight of the whole that is kept adds to out in the same proportion.
    value = torch.zeros_like(v)
    value[:, :, 20] = 1
    alone = heddle.attention(q, k, value, **options)[0][:, 3:, 40:70] != 0
    part_alone = heddle.attention(
        q[:, 3:, 40:70], k[:, 1:, 11:50], value[:, 1:, 11:50], **options, **rows, k_offset=11
    )[0]
    assert torch.equal(alone, part_alone != 0)
    assert 0.5 < alone.double().mean() < 0.9


def test_arrays():
    q, k, v = (x.detach().numpy() for x in inputs())
    options = {"causal": "top_left", "dropout": 0.3, "rng_state": (7, 9)}
    whole, lse = heddle.attention(q, k, v, **options, return_lse=True)
    part = q[:, :, 50:60]
    place = {"q_offset": 50, "whole_sq": S}
    numpy.testing.assert_allclose(heddle.attention(part, k, v, **options, **place), whole[:, :, 50:60], atol=1e-6)
    full = heddle.attention_backward(numpy.ones_like(whole), q, k, v, whole, lse, **options)
    mine = heddle.attention_backward(
        numpy.ones_like(part), part, k, v, whole[:, :, 50:60].copy(), lse[:, :, 50:60].copy(), **options, **place
    )
    numpy.testing.assert_allclose(mine["dq"], full["dq"][:, :, 50:60], atol=1e-5)


def test_compiled_and_packed():
    q, k, v = inputs()
    cu = torch.tensor([0, 40, 96], dtype=torch.int32)
    packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 56, "max_seqlen_k": 56}

    def run(*x):
        return heddle.attention(*x, **lengths, causal="top_left", q_offset=9, k_offset=4)

    torch.library.opcheck(
        torch.ops.heddle.attention.default, (*(x.detach() for x in inputs()),), {"causal": 1, "q_offset": 5}
    )
    assert_close(torch.compile(run, backend="aot_eager", fullgraph=True)(*packed), run(*packed))
    whole = heddle.attention(q[:1, :, :40], k[:1, :, :40], v[:1, :, :40], window=(None, 5))
    assert_close(run(*packed)[:40].transpose(0, 1)[None], whole)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"q_offset": -1}, "q_offset = -1"),
        ({"k_offset": 2**41}, "k_offset"),
        ({"q_offset": 4, "whole_sq": 99}, "whole_sq = 99 ends before"),
        ({"h_offset": 3}, "whole_h is not set"),
        ({"whole_h": 5}, "whole_h = 5"),
        ({"q_offset": 1.5}, "int"),
        ({"q_offset": 2, "causal": True}, "ambiguous"),
    ],
)
def test_wrong_places(wrong, message):
    q, k, v = inputs()
    for kind in (q, k, v), tuple(x.detach().numpy() for x in (q, k, v)):
        with pytest.raises((ValueError, TypeError), match=message):
            heddle.attention(*kind, **wrong)
