# SPDX-License-Identifier: Apache-2.0
"""Keys in pages: the same results as without, and errors that say what is wrong."""

import numpy as np
import pytest
import torch
from conftest import devices

import heddle

each_device = pytest.mark.parametrize("device", devices())

torch.manual_seed(0)
B, H, HK, SQ, SK, D = 3, 4, 2, 5, 96, 16


def problem(page=16, device="cpu", dtype=torch.float32, rows=False):
    """q, k and v without pages, the pages of k and of v, and the table; two pages belong to nobody and are NaN."""
    q = torch.randn(B, H, SQ, D, device=device, dtype=dtype)
    k, v = (torch.randn(B, HK, SK, D, device=device, dtype=dtype) for _ in range(2))
    count = B * SK // page
    table = (torch.randperm(count + 2)[:count]).reshape(B, -1)
    pages = []
    for x in (k, v):
        of = torch.full((count + 2, HK, page, D), float("nan"), device=device, dtype=dtype)
        of[table.flatten()] = x.reshape(B, HK, -1, page, D).transpose(1, 2).reshape(-1, HK, page, D)
        pages.append(of.transpose(1, 2).contiguous().transpose(1, 2) if rows else of)
    return q, k, v, *pages, table.int().to(device)


@each_device
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("page", [16, 32])
def test_like_without(page, rows, device):
    q, k, v, kp, vp, table = problem(page, device, rows=rows)
    for options in (
        {},
        {"causal": "bottom_right"},
        {"window": (20, 3), "softcap": 5.0},
        {"seqlens_k": [SK, 7, 0], "causal": "bottom_right", "return_lse": True},
        {"return_weights": True, "bias": torch.randn(1, H, SQ, SK, device=device)},
    ):
        ours, theirs = (heddle.attention(q, *kv, **options, **more) for *kv, more in _both(k, v, kp, vp, table))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def _both(k, v, kp, vp, table):
    return (kp, vp, {"block_table": table}), (k, v, {})


@each_device
def test_limit_and_slice(device):
    q, k, v, kp, vp, table = problem(device=device)
    for most in (48, 41, 0):
        ours = heddle.attention(q, kp, vp, block_table=table, max_seqlen_k=most)
        torch.testing.assert_close(ours, heddle.attention(q, k[:, :, :most], v[:, :, :most]))
    ours = heddle.attention(q, kp, vp, block_table=table[:, :2])  # rows that do not follow each other
    torch.testing.assert_close(ours, heddle.attention(q, k[:, :, :32], v[:, :, :32]))
    ours = heddle.attention(q, kp, vp, block_table=table[:1].expand(B, -1))
    torch.testing.assert_close(ours, heddle.attention(q, k[:1].expand(B, -1, -1, -1), v[:1].expand(B, -1, -1, -1)))


@each_device
def test_hidden(device):
    q, k, v, kp, vp, table = problem(device=device)
    table[1, 2], table[2, 5] = -1, kp.shape[0]
    mask = torch.ones(B, 1, 1, SK, dtype=torch.bool, device=device)
    mask[1, :, :, 32:48] = False
    mask[2, :, :, 80:] = False
    torch.testing.assert_close(
        heddle.attention(q, kp, vp, block_table=table), heddle.attention(q, k, v, mask=mask), rtol=1e-5, atol=1e-5
    )


@each_device
def test_packed_queries(device):
    _, k, v, kp, vp, table = problem(device=device)
    cu = torch.tensor([0, 5, 5, 7], dtype=torch.int32, device=device)
    rows = torch.randn(7, H, D, device=device)
    lengths = torch.tensor([96, 20, 33], dtype=torch.int32, device=device)
    options = {"seqlens_k": lengths, "causal": "bottom_right"}
    ours = heddle.attention(rows, kp, vp, cu_seqlens_q=cu, max_seqlen_q=5, block_table=table, **options)
    for n, (a, b) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        size = int(lengths[n])
        one = heddle.attention(rows[a:b].transpose(0, 1), k[n, :, :size], v[n, :, :size], causal="bottom_right")
        torch.testing.assert_close(ours[a:b].transpose(0, 1), one, rtol=1e-5, atol=1e-5)


def test_arrays():
    q, k, v, kp, vp, table = (x.numpy() for x in problem())
    expected = heddle.attention(q, k, v, causal="bottom_right")
    np.testing.assert_allclose(
        heddle.attention(q, kp, vp, causal="bottom_right", block_table=table), expected, rtol=1e-5, atol=1e-5
    )
    cu = np.array([0, 1, 2, 3], np.int32)
    rows = np.ascontiguousarray(q[:, :, 0])
    packed = heddle.attention(rows, kp, vp, cu_seqlens_q=cu, max_seqlen_q=1, block_table=table)
    np.testing.assert_allclose(packed, heddle.attention(q[:, :, :1], k, v)[:, :, 0], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="block_table has shape"):
        heddle.attention(q, kp, vp, block_table=table[:2])
    with pytest.raises(ValueError, match="page = 48"):
        heddle.attention(
            q, np.zeros((2, HK, 48, D), np.float32), np.zeros((2, HK, 48, D), np.float32), block_table=table
        )
    with pytest.raises(NotImplementedError, match="no gradient"):
        heddle.attention_backward(q, q, kp, vp, q, q, block_table=table)


@each_device
def test_compiled(device):
    q, k, v, kp, vp, table = problem(device=device)
    run = torch.compile(
        lambda *t: heddle.attention(*t[:3], block_table=t[3], causal="bottom_right"), backend="aot_eager"
    )
    torch.testing.assert_close(
        run(q, kp, vp, table), heddle.attention(q, k, v, causal="bottom_right"), rtol=1e-5, atol=1e-5
    )


@each_device
def test_operator(device):
    q, _, _, kp, vp, table = problem(device=device)
    torch.library.opcheck(torch.ops.heddle.attention.default, (q, kp, vp), {"block_table": table, "causal": 2})
    meta = torch.ops.heddle.attention(*(x.to("meta") for x in (q, kp, vp)), block_table=table.to("meta"))
    assert meta[0].shape == q.shape and meta[1].shape == q.shape[:3]


@each_device
def test_errors(device):
    q, _, _, kp, vp, table = problem(device=device)

    def fails(error, text, *given, **options):
        with pytest.raises(error, match=text):
            heddle.attention(*(given or (q, kp, vp)), **{"block_table": table} | options)

    odd = torch.zeros(4, HK, 48, D, device=device)
    fails(ValueError, "page = 48 is not 16, 32, 64, 128 or 256", q, odd, odd)
    fails(ValueError, r"block_table has shape \[3\]", block_table=table[:, 0])
    fails(ValueError, "block_table has 2 dimensions, the first of size 2", block_table=table[:2])
    fails(TypeError, "block_table must be integers", block_table=table.float())
    fails(ValueError, "q has 3 dimensions", q[0], kp, vp)
    fails(ValueError, "block_table has shape .* k has", q, kp[0], vp[0])
    fails(ValueError, "max_seqlen_q is given without cu_seqlens_q", max_seqlen_q=3)
    cu = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=device)
    fails(
        ValueError,
        "cu_seqlens_k is given with block_table",
        q[:, :, 0].contiguous(),
        kp,
        vp,
        cu_seqlens_q=cu,
        cu_seqlens_k=cu,
        max_seqlen_q=1,
        max_seqlen_k=1,
    )
    fails(NotImplementedError, "block_table.*no gradient", q.clone().requires_grad_(), kp, vp)
    with torch.no_grad():
        heddle.attention(q.clone().requires_grad_(), kp, vp, block_table=table)
    with pytest.raises(NotImplementedError, match="block_table"):
        torch.func.vmap(lambda x: heddle.attention(x, kp, vp, block_table=table))(q[None])
    with pytest.raises(NotImplementedError, match="block_table"):
        torch.func.jvp(lambda x: heddle.attention(x, kp, vp, block_table=table), (q,), (q,))
    if device == "cpu":
        fails(ValueError, r"seqlens_k\[0\] = 97 is outside 0 to 96", seqlens_k=[97, 1, 1])
