# SPDX-License-Identifier: Apache-2.0
"""heddle.scaled_dot_product_attention against PyTorch's, in float64 and in the dtype itself."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, devices, exact, natural_size
from torch.nn.attention import SDPBackend, sdpa_kernel

import heddle

CASES = {
    "plain": ((2, 4, 7, 8), (2, 4, 9, 8), (2, 4, 9, 5), {}),
    "causal, sq < sk": ((2, 4, 7, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"is_causal": True}),
    "causal, sq > sk": ((2, 4, 9, 8), (2, 4, 5, 8), (2, 4, 5, 8), {"is_causal": True}),
    "scale": ((2, 4, 7, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"scale": 0.7}),
    "two dimensions": ((7, 8), (9, 8), (9, 5), {"is_causal": True}),
    "three dimensions": ((4, 7, 8), (4, 9, 8), (4, 9, 5), {}),
    "five dimensions": ((2, 3, 4, 7, 8), (2, 3, 4, 9, 8), (2, 3, 4, 9, 8), {}),
    "broadcast batch": ((2, 4, 7, 8), (1, 4, 9, 8), (1, 4, 9, 8), {}),
    "one head of k": ((2, 4, 7, 8), (2, 1, 9, 8), (2, 1, 9, 8), {}),
    "gqa": ((2, 4, 7, 8), (2, 2, 9, 8), (2, 2, 9, 8), {"enable_gqa": True}),
    "bool mask": ((2, 4, 7, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"attn_mask": ("bool", (7, 9))}),
    "bool mask of batches": ((2, 4, 7, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"attn_mask": ("bool", (2, 1, 1, 9))}),
    "bias": ((2, 4, 7, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"attn_mask": ("bias", (2, 4, 7, 9))}),
    "bias of heads": ((2, 4, 7, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"attn_mask": ("bias", (4, 7, 9))}),
    "bias of columns": ((2, 4, 7, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"attn_mask": ("bias", (1, 9))}),
    "mask, five dimensions": ((2, 3, 4, 7, 8), (2, 3, 4, 9, 8), (2, 3, 4, 9, 8), {"attn_mask": ("bias", (3, 1, 7, 9))}),
    "mask, three dimensions": ((4, 7, 8), (4, 9, 8), (4, 9, 5), {"attn_mask": ("bool", (4, 7, 9))}),
}


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_as_pytorch(name, dtype, device):
    torch.manual_seed(0)
    *shapes, options = CASES[name]
    options = dict(options)
    leaves = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]
    if "attn_mask" in options:
        kind, shape = options["attn_mask"]
        mask = torch.randn(shape, device=device)
        mask = mask > -0.8 if kind == "bool" else mask.to(dtype).requires_grad_()
        options["attn_mask"] = mask
        if kind == "bias":
            leaves.append(mask)
    out = heddle.scaled_dot_product_attention(*leaves[:3], **options)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    plain = F.scaled_dot_product_attention(*leaves[:3], **options)
    plain_grads = torch.autograd.grad(plain, leaves, dout)
    truth_leaves = [exact(t) for t in leaves]
    truth_options = options | ({"attn_mask": truth_leaves[3]} if len(leaves) == 4 else {})
    if len(leaves) == 3 and "attn_mask" in options:
        truth_options["attn_mask"] = options["attn_mask"].cpu()
    truth = F.scaled_dot_product_attention(*truth_leaves[:3], **truth_options)
    truth_grads = torch.autograd.grad(truth, truth_leaves, exact(dout))
    assert out.shape == plain.shape and out.dtype == dtype
    assert_close("out", out, truth, plain)
    for x, (a, b, c) in enumerate(zip(grads, truth_grads, plain_grads, strict=True)):
        assert a.shape == leaves[x].shape
        assert_close(f"gradient {x}", a, b, c, natural_size(dout, *leaves[:3]))


def test_what_lies_anyhow_is_taken():
    q, k, v = torch.randn(2, 4, 8, 7).mT, torch.randn(2, 4, 9, 16)[..., ::2], torch.randn(8).expand(2, 4, 9, 8)
    assert torch.allclose(
        heddle.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v), atol=1e-6
    )


def test_dropout():
    q, k = torch.randn(2, 4, 64, 8), torch.randn(2, 4, 64, 8)
    ones = torch.ones(2, 4, 64, 8)
    kept = heddle.scaled_dot_product_attention(q, k, ones, dropout_p=0.25)
    assert abs(kept.mean() - 1) < 0.05 and kept.std() > 0.01


def test_fully_masked_rows_are_zero():
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    mask = torch.tensor([[True, True, True], [False, False, False], [True, False, False]])
    out = heddle.scaled_dot_product_attention(q, q, q, mask)
    out.sum().backward()
    assert not out[0, 0, 1].any() and torch.isfinite(q.grad).all()


@pytest.mark.parametrize(
    "changed,kind,text",
    [
        ({"is_causal": True, "attn_mask": torch.ones(7, 9, dtype=torch.bool)}, ValueError, "together"),
        ({"key": torch.randn(2, 2, 9, 8), "value": torch.randn(2, 2, 9, 8)}, ValueError, "enable_gqa=True"),
        ({"key": torch.randn(8)}, ValueError, "1 dimensions"),
        ({"key": None}, TypeError, "key must be"),
        ({"attn_mask": torch.zeros(7, 9, dtype=torch.int32)}, TypeError, "int32"),
        ({"attn_mask": torch.zeros(7, 8)}, ValueError, "bias has shape"),
        ({"dropout_p": 2.0}, ValueError, "dropout = 2"),
    ],
)
def test_errors(changed, kind, text):
    given = {"query": torch.randn(2, 4, 7, 8), "key": torch.randn(2, 4, 9, 8), "value": torch.randn(2, 4, 9, 8)}
    with pytest.raises(kind, match=text):
        heddle.scaled_dot_product_attention(**(given | changed))


@pytest.mark.parametrize("name", ["is_causal", "enable_gqa"])
@pytest.mark.parametrize("value", ["no", "", torch.tensor(True), [1]], ids=str)
def test_text_is_no_flag(name, value):
    q = torch.randn(1, 2, 5, 8)
    for given in ((q, q, q), (q, q, q, torch.ones(5, 5, dtype=torch.bool)), (q[0], q[0], q[0])):
        with pytest.raises(TypeError, match=f"{name} = .* is neither True nor False"):
            heddle.scaled_dot_product_attention(*given, **{name: value})
    with heddle.patch(), pytest.raises(TypeError, match=f"'{name}' .*must be bool"):
        F.scaled_dot_product_attention(q, q, q, **{name: value})


def test_numbers_are_flags():
    numpy = pytest.importorskip("numpy")
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    plain, causal = (heddle.scaled_dot_product_attention(q, q, q, is_causal=flag) for flag in (False, True))
    for flag in (1, numpy.True_):
        assert torch.equal(heddle.scaled_dot_product_attention(q, q, q, is_causal=flag), causal)
        assert heddle.scaled_dot_product_attention(q, k, k, enable_gqa=flag).shape == q.shape
    for flag in (0, None, numpy.False_):
        assert torch.equal(heddle.scaled_dot_product_attention(q, q, q, is_causal=flag), plain)


@pytest.mark.parametrize("value", ["", None, [], "0.5"], ids=str)
def test_dropout_is_a_number(value):
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(TypeError, match=r"dropout = .* is not a number"):
        heddle.scaled_dot_product_attention(q, q, q, dropout_p=value)


NOTHING = {
    "d = 0": ((1, 2, 3, 0), (1, 2, 4, 0), (1, 2, 4, 5)),
    "dv = 0": ((1, 2, 3, 8), (1, 2, 4, 8), (1, 2, 4, 0)),
    "h = 0": ((1, 0, 3, 8), (1, 0, 4, 8), (1, 0, 4, 5)),
    "h = d = dv = 0": ((1, 0, 3, 0), (1, 0, 4, 0), (1, 0, 4, 0)),
    "d = 0, two dimensions": ((3, 0), (4, 0), (4, 5)),
    "h = 0, three dimensions": ((0, 3, 5), (0, 4, 5), (0, 4, 6)),
}


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.5}, {"attn_mask": "bool"}], ids=str)
@pytest.mark.parametrize("name", NOTHING)
def test_no_heads_and_no_head_dim(name, options, dtype, device):
    torch.manual_seed(0)
    shapes = NOTHING[name]
    if "attn_mask" in options:
        options = {"attn_mask": torch.rand((*shapes[0][:-1], shapes[1][-2]), device=device) < 0.8}
    leaves = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]
    found = []
    for sdpa in (heddle.scaled_dot_product_attention, F.scaled_dot_product_attention):
        with sdpa_kernel(SDPBackend.MATH):  # others of PyTorch's divide by nothing, up to 2.12
            out = sdpa(*leaves, **options)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
    for got, want in zip(*found, strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        assert torch.allclose(got.float(), want.float(), atol=1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NOTHING)
def test_no_heads_and_no_head_dim_under_autocast(name, cast, dtype, device):
    leaves = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in NOTHING[name]]
    found = []
    for sdpa in (heddle.scaled_dot_product_attention, F.scaled_dot_product_attention):
        with torch.autocast(device, cast), sdpa_kernel(SDPBackend.MATH):
            out = sdpa(*leaves)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
    assert found[0][0].dtype == cast
    for got, want in zip(*found, strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        assert torch.allclose(got.float(), want.float(), atol=2e-2, rtol=2e-2)


def test_no_heads_with_all_options():
    """The shapes of every result, and gradients of what has them."""
    q, k, v = torch.randn(2, 0, 3, 8), torch.randn(2, 0, 4, 8), torch.randn(2, 0, 4, 5)
    bias, sinks = torch.randn(2, 0, 3, 4, requires_grad=True), torch.randn(0, requires_grad=True)
    slopes = torch.randn(0)
    given = {"bias": bias, "sinks": sinks, "alibi_slopes": slopes, "return_lse": True, "return_weights": True}
    out, lse, weights = heddle.attention(q, k, v, **given)
    assert [list(t.shape) for t in (out, lse, weights)] == [[2, 0, 3, 5], [2, 0, 3], [2, 0, 3, 4]]
    grads = torch.autograd.grad(out.sum() + lse.sum() + weights.sum(), (bias, sinks))
    assert [grad.shape for grad in grads] == [bias.shape, sinks.shape]
    cu = torch.tensor([0, 3], dtype=torch.int32)
    packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 3, "max_seqlen_k": 3, "return_lse": True}
    none, some = torch.randn(3, 2, 0), torch.randn(3, 2, 5)
    out, lse = heddle.attention(none, none, some, **packed)
    assert torch.allclose(out, some.mean(0, keepdim=True).expand(3, -1, -1), atol=1e-6)
    assert torch.allclose(lse, torch.full((2, 3), 3.0).log())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("kind", ["bool", "bias"])
@pytest.mark.parametrize("device", devices())
def test_huge_where_nobody_looks(dtype, d, kind, device):
    """What a mask leaves out may be so large that products with it overflow: no zero weight may meet them."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 2, 200, d, dtype=dtype, device=device) for _ in range(4))
    seen = torch.rand(1, 1, 200, 200, device=device) < 0.9
    seen[..., [5, 140]] = False
    mask = seen if kind == "bool" else torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, -math.inf)

    def run(there):
        keys, values = k.clone(), v.clone()
        keys[:, :, 5], values[:, :, 5], values[:, :, 140] = there, there, -there
        inputs = [x.detach().clone().requires_grad_() for x in (q, keys, values)]
        o = heddle.scaled_dot_product_attention(*inputs, attn_mask=mask)
        o.backward(100 * do)
        return [o.detach()] + [x.grad for x in inputs]

    for got, wanted in zip(run(torch.finfo(dtype).max), run(0), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-3 * wanted.abs().max().item())
