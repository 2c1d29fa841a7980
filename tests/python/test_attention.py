# SPDX-License-Identifier: Apache-2.0
"""heddle.attention for torch tensors: every option forward and backward, against the formulas in float64."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_close, devices, exact, natural_size, plain_attention

import heddle
import heddle.nn

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
B, H, HK, SQ, SK, D, DV = 2, 4, 2, 13, 17, 24, 16


def inputs(dtype, device, layout="bhsd", sq=SQ, sk=SK):
    torch.manual_seed(0)
    made = []
    for heads, rows, last in ((H, sq, D), (HK, sk, D), (HK, sk, DV)):
        if layout == "bshd":
            tensor = torch.randn(B, rows, heads, last, device=device).to(dtype).transpose(1, 2)
        else:
            tensor = torch.randn(B, heads, rows, last, device=device).to(dtype)
        made.append(tensor.requires_grad_())
    return made


def check(q, k, v, grads=("q", "k", "v"), **options):
    """Compares out, lse, weights and all gradients with float64; the plain computation sets the measure."""
    torch.manual_seed(1)
    leaves = {"q": q, "k": k, "v": v, **{n: t for n, t in options.items() if isinstance(t, torch.Tensor)}}
    leaves = {name: t for name, t in leaves.items() if t.requires_grad}
    out, lse, weights = heddle.attention(q, k, v, return_lse=True, return_weights=True, **options)
    assert out.stride() == torch.empty_like(q[..., :1]).expand(out.shape).contiguous().stride() or (
        q.stride(1) < q.stride(2) and out.transpose(1, 2).is_contiguous()
    )
    seeds = [torch.randn_like(t) for t in (out, lse, weights)]

    def gradients(results, inputs, cast):
        finite = [torch.where(torch.isfinite(r), r, torch.zeros_like(r)) for r in results]
        loss = sum((r * cast(s)).sum() for r, s in zip(finite, seeds, strict=True))
        return torch.autograd.grad(loss, inputs, allow_unused=False)

    got = gradients((out, lse, weights), list(leaves.values()), lambda s: s)
    everything = {"q": q, "k": k, "v": v, **options}
    plain = plain_attention(
        **{
            n: t.to(q.dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t
            for n, t in everything.items()
        }
    )
    truth_inputs = {name: exact(value) for name, value in everything.items()}
    truth = plain_attention(**truth_inputs)
    truth_grads = gradients(truth, [truth_inputs[name] for name in leaves], exact)
    plain_grads = gradients(plain, list(leaves.values()), lambda s: s.to(q.dtype))
    for name, a, b, c in zip(("out", "lse", "weights"), (out, lse, weights), truth, plain, strict=True):
        assert_close(name, a, b, c)
    for name, a, b, c in zip(leaves, got, truth_grads, plain_grads, strict=True):
        assert a.dtype == leaves[name].dtype
        assert_close("d" + name, a, b, c, natural_size(seeds[0], q, k, v))


OPTIONS = {
    "plain": lambda dev, dt: {},
    "top_left": lambda dev, dt: {"causal": "top_left"},
    "bottom_right": lambda dev, dt: {"causal": "bottom_right"},
    "window": lambda dev, dt: {"window": (3, 2)},
    "causal window": lambda dev, dt: {"causal": "bottom_right", "window": (4, None)},
    "scale": lambda dev, dt: {"scale": 0.3},
    "softcap": lambda dev, dt: {"softcap": 1.5},
    "bias": lambda dev, dt: {"bias": torch.randn(B, H, SQ, SK, device=dev).to(dt).requires_grad_()},
    "bias of heads": lambda dev, dt: {"bias": torch.randn(H, 1, SK, device=dev).to(dt).requires_grad_()},
    "bias of one": lambda dev, dt: {"bias": torch.randn(SQ, 1, device=dev).to(dt).requires_grad_()},
    "mask": lambda dev, dt: {"mask": torch.rand(B, 1, SQ, SK, device=dev) > 0.4},
    "mask that hides rows": lambda dev, dt: {"mask": (torch.arange(SQ, device=dev) > 3)[:, None]},
    "alibi": lambda dev, dt: {"alibi_slopes": torch.rand(H, device=dev), "causal": "bottom_right"},
    "alibi of batches": lambda dev, dt: {"alibi_slopes": torch.rand(B, H, device=dev)},
    "sinks": lambda dev, dt: {"sinks": torch.randn(H, device=dev, requires_grad=True)},
    "seqlens": lambda dev, dt: {
        "seqlens_q": torch.tensor([SQ, 5], dtype=torch.int32, device=dev),
        "seqlens_k": torch.tensor([0, 9], dtype=torch.int32, device=dev),
        "causal": "bottom_right",
    },
    "all": lambda dev, dt: {
        "causal": "bottom_right",
        "window": (9, None),
        "softcap": 3.0,
        "scale": 0.4,
        "bias": torch.randn(1, H, SQ, SK, device=dev).to(dt).requires_grad_(),
        "mask": torch.rand(B, 1, 1, SK, device=dev) > 0.3,
        "alibi_slopes": torch.rand(H, device=dev),
        "sinks": torch.randn(H, device=dev, requires_grad=True),
    },
}


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_option(name, dtype, device):
    torch.manual_seed(2)
    options = OPTIONS[name](device, dtype)
    check(*inputs(dtype, device), **options)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("name", ["plain", "all"])
def test_rows_outside_heads(name, device):
    """[b, s, h, d] in memory: the result lies so too."""
    q, k, v = inputs(torch.float32, device, "bshd")
    check(q, k, v, **OPTIONS[name](device, torch.float32))
    assert heddle.attention(q, k, v).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("device", devices())
def test_float64_runs_on_the_reference_and_only_on_the_cpu(device):
    q, k, v = (t.detach().double() for t in inputs(torch.float32, device))
    if device == "cuda":
        with pytest.raises(NotImplementedError, match="float64"):
            heddle.attention(q, k, v)
        return
    truth = plain_attention(q, k, v)[0]
    assert (heddle.attention(q, k, v) - truth).abs().max() < 1e-14


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": "bottom_right", "softcap": 2.0},
        {"bias": (2, 1, 3, 4)},
        {"bias": (4, 1, 4), "sinks": True, "weights": True},
        {"seqlens_k": torch.tensor([4, 2], dtype=torch.int32)},
        {"dropout": 0.4, "rng_state": torch.tensor([7, 9])},
    ],
    ids=str,
)
def test_gradcheck(options):
    torch.manual_seed(0)
    options = dict(options)
    q = torch.randn(2, 4, 3, 5, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 2, 4, 5, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, 2, 4, 2, dtype=torch.float64, requires_grad=True)
    leaves, names = [q, k, v], []
    if "bias" in options:
        leaves.append(torch.randn(options.pop("bias"), dtype=torch.float64, requires_grad=True))
        names.append("bias")
    if options.pop("sinks", False):
        leaves.append(torch.randn(4, dtype=torch.float64, requires_grad=True))
        names.append("sinks")
    weights = options.pop("weights", False)

    def run(*given):
        extra = dict(zip(names, given[3:], strict=True))
        return heddle.attention(*given[:3], **extra, **options, return_lse=True, return_weights=weights)

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("causal", [None, "bottom_right", "top_left"])
def test_packed_sequences(device, causal):
    torch.manual_seed(0)
    lengths_q, lengths_k = [3, 0, 7, 1], [5, 2, 7, 0]
    loose = 2  # rows of no sequence, at the end
    q = torch.randn(sum(lengths_q) + loose, H, D, device=device, requires_grad=True)
    k = torch.randn(sum(lengths_k) + loose, HK, D, device=device, requires_grad=True)
    v = torch.randn(sum(lengths_k) + loose, HK, DV, device=device, requires_grad=True)
    cu_q, cu_k = (
        torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32) for lengths in (lengths_q, lengths_k)
    )
    out, lse = heddle.attention(
        q,
        k,
        v,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=max(lengths_q),
        max_seqlen_k=max(lengths_k),
        causal=causal,
        return_lse=True,
    )
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    assert out.shape == (q.shape[0], H, DV) and lse.shape == (H, q.shape[0])
    assert not out[-loose:].any() and not grads[0][-loose:].any() and not grads[1][-loose:].any()
    for n in range(len(lengths_q)):
        rows = [slice(int(cu[n]), int(cu[n + 1])) for cu in (cu_q, cu_k, cu_k)]
        own = [t[r].transpose(0, 1)[None].detach().requires_grad_() for t, r in zip((q, k, v), rows, strict=True)]
        expected, expected_lse = heddle.attention(*own, causal=causal, return_lse=True)
        assert torch.allclose(out[rows[0]].transpose(0, 1)[None], expected, atol=1e-6)
        assert torch.allclose(lse[:, rows[0]][None], expected_lse, atol=1e-6)
        if not lengths_q[n]:
            continue
        expected_grads = torch.autograd.grad(expected, own, dout[rows[0]].transpose(0, 1)[None])
        for got, row, want in zip(grads, rows, expected_grads, strict=True):
            assert torch.allclose(got[row].transpose(0, 1)[None], want, atol=1e-5)


@pytest.mark.parametrize("device", devices())
def test_packed_with_a_limit_far_above(device):
    """An upper limit may be anything: time and memory do not grow with it."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, H, D, device=device, requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 3, 9], dtype=torch.int32, device=device)
    results = []
    for limit in (6, 2**40):
        out = heddle.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=limit, max_seqlen_k=limit)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("device", devices())
def test_dropout(device):
    q, k, v = inputs(torch.float32, device)
    torch.manual_seed(5)
    first = heddle.attention(q, k, v, dropout=0.5)
    second = heddle.attention(q, k, v, dropout=0.5)
    torch.manual_seed(5)
    again = heddle.attention(q, k, v, dropout=0.5)
    assert torch.equal(first, again) and not torch.equal(first, second)
    state = torch.tensor([3, 4], device=device)
    eye = torch.eye(SK, device=device).expand(B, HK, SK, SK)
    keep = heddle.attention(q, k, eye.contiguous(), dropout=0.3, rng_state=state) > 0
    assert 0.55 < keep.float().mean() < 0.85
    for t in (q, k, v):
        t.grad = None
    check_dropout = {"dropout": 0.3}
    out = heddle.attention(q, k, v, rng_state=state, **check_dropout)
    truth_inputs = [exact(t) for t in (q, k, v)]
    truth = plain_attention(*truth_inputs, keep=keep.double().cpu(), **check_dropout)[0]
    plain = plain_attention(q, k, v, keep=keep, **check_dropout)[0]
    assert_close("out", out, truth, plain)
    dout = torch.randn_like(out)
    for name, got, want, measure in zip(
        "qkv",
        torch.autograd.grad(out, (q, k, v), dout),
        torch.autograd.grad(truth, truth_inputs, exact(dout)),
        torch.autograd.grad(plain, (q, k, v), dout),
        strict=True,
    ):
        assert_close("d" + name, got, want, measure)


@pytest.mark.parametrize("shape", [(SQ, D), (H, SQ, D)], ids=str)
def test_fewer_dimensions(shape):
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    out, lse, weights = heddle.attention(q, k, v, causal=True, return_lse=True, return_weights=True)
    assert out.shape == shape and lse.shape == shape[:-1] and weights.shape == (*shape[:-1], SQ)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.allclose(out, expected, atol=1e-6)


@pytest.mark.parametrize("sq,sk,b", [(0, 5, 1), (5, 0, 1), (3, 3, 0), (1, 1, 1)])
def test_empty(sq, sk, b):
    q = torch.randn(b, 2, sq, 8, requires_grad=True)
    k, v = (torch.randn(b, 2, sk, 8, requires_grad=True) for _ in range(2))
    out, lse = heddle.attention(q, k, v, return_lse=True)
    assert out.shape == q.shape
    if not sk:
        assert not out.any() and (lse == -torch.inf).all()
    out.sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in (q, k, v))


def test_expanded_and_overlapping_inputs():
    """Stride 0 in inputs, also in all dimensions but the last."""
    row = torch.randn(8, requires_grad=True)
    q, k, v = (row.expand(2, 4, 5, 8) for _ in range(3))
    out = heddle.attention(q, k, v)
    assert torch.allclose(out, row.expand(out.shape), atol=1e-6)
    (grad,) = torch.autograd.grad(out, row, torch.ones_like(out))
    assert torch.allclose(grad, torch.full_like(grad, 40.0), atol=1e-4)


def test_padding_that_is_nan_does_not_leak():
    q, k, v = inputs(torch.float32, "cpu")
    lengths = torch.tensor([4, SK], dtype=torch.int32)
    with torch.no_grad():
        k[0, :, 4:] = torch.nan
        v[0, :, 4:] = torch.nan
    out = heddle.attention(q, k, v, seqlens_k=lengths)
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(torch.isfinite(t).all() for t in (out, dq, dk, dv))


def test_scale_zero_is_uniform():
    q, k, v = inputs(torch.float32, "cpu")
    out = heddle.attention(q, k, v, scale=0.0)
    assert torch.allclose(out, v.mean(2, keepdim=True).repeat_interleave(2, 1).expand(out.shape), atol=1e-6)


def test_deterministic_and_threads():
    q, k, v = (torch.randn(1, 2, 200, 32, requires_grad=True) for _ in range(3))
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            out = heddle.attention(q, k, v, causal=True)
            results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("number", [-torch.finfo(torch.float32).max, -5e37, -1.2345e30, -1e20, -3.3e15, -1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows,keys", [(1, 5), (3, 40), (70, 300)])
@pytest.mark.parametrize("device", devices())
def test_bias_of_a_large_finite_number(rows, keys, dtype, number, device):
    """As in PyTorch a row of nothing else is the mean of all values."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, s, 16, device=device).to(dtype).requires_grad_() for s in (rows, keys, keys))
    number = max(number, torch.finfo(dtype).min)
    bias = torch.zeros(1, 1, rows, keys, device=device, dtype=dtype)
    bias[:, :, 0] = number
    bias[:, :, 1:, : keys // 2] = number
    bias.requires_grad_()
    out = heddle.attention(q, k, v, bias=bias)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v, bias), dout)
    weights = torch.softmax((q @ k.transpose(-1, -2) / 4).float() + bias.float(), -1).to(dtype)
    atol = 1e-5 if dtype == torch.float32 else 5e-2
    for got, want in zip(grads, torch.autograd.grad(weights @ v, (q, k, v, bias), dout), strict=True):
        assert torch.allclose(got, want, atol=atol, rtol=atol)
    assert torch.allclose(out, weights @ v, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [2, 40, 300])
@pytest.mark.parametrize("device", devices())
def test_large_biases_are_compared(keys, dtype, device):
    """To the end of float32's range the largest has all of the weight, and two that are alike have a half each."""
    q, v = torch.zeros(1, 1, 6, 16, device=device), torch.randn(1, 1, keys, 16, device=device)
    bias = torch.full((6, keys), -3.3e38, device=device)
    for row, (first, last) in enumerate(
        [(-1e38, -2e38), (-3.3e38, -1e38), (-1e38, -1e38), (-3e38, -2.9e38), (3e38, 2e38)]
    ):
        bias[row, 0], bias[row, -1] = first, last
    q, v, bias = (t.to(dtype).requires_grad_() for t in (q, v, bias))
    out = heddle.attention(q, torch.zeros_like(v), v, bias=bias)
    dv, dbias = torch.autograd.grad(out.sum(), (v, bias))
    weights = torch.softmax(bias.detach().double(), -1)
    atol = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out[0, 0].double(), weights @ v[0, 0].double(), atol=atol, rtol=atol)
    torch.testing.assert_close(dv[0, 0].double(), weights.sum(0)[:, None].expand(keys, 16), atol=6 * atol, rtol=atol)
    assert dbias.isfinite().all()


@pytest.mark.parametrize("number", [-torch.finfo(torch.float32).max, -1e9, -131008.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("device", devices())
def test_float32_bias_beside_16_bits(dtype, number, autocast, device):
    """What 16 bits have no room for becomes their least number, and not -inf, which masks."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, s, 8, device=device).to(dtype).requires_grad_() for s in (4, 5, 5))
    bias = torch.zeros(4, 5, device=device)
    bias[1], bias[2, 1], bias[3, 0] = number, number, -torch.inf
    bias.requires_grad_()
    given = (t.float() if autocast else t for t in (q, k, v))
    with torch.autocast(torch.device(device).type, dtype, enabled=autocast):
        out = heddle.attention(*given, bias=bias)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v, bias), dout)
    assert out.dtype == dtype and grads[-1].dtype == torch.float32
    kept = torch.where(bias.isinf(), bias, bias.detach().clamp(torch.finfo(dtype).min) + (bias - bias.detach()))
    wanted = torch.softmax((q.float() @ k.float().transpose(-1, -2)) / 8**0.5 + kept, -1) @ v.float()
    assert torch.allclose(out.float(), wanted, atol=2e-2)
    for got, want in zip(grads, torch.autograd.grad(wanted, (q, k, v, bias), dout.float()), strict=True):
        assert torch.allclose(got.float(), want.float(), atol=5e-2, rtol=2e-2)
    assert grads[-1][1].abs().max() > 0.05


@pytest.mark.parametrize("device", devices())
def test_bfloat16_bias_beside_float16(device):
    """Which has no room for most of its numbers: float16's largest, rounded to bfloat16, is none of float16's."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, s, 8, device=device).half().requires_grad_() for s in (4, 5, 5))
    bias = torch.zeros(4, 5, device=device, dtype=torch.bfloat16)
    bias[1], bias[2, 1], bias[3, 0] = torch.finfo(torch.bfloat16).min, -1e5, -torch.inf
    found = []
    for given in (bias.clone().requires_grad_(), bias.float().requires_grad_()):
        for run in (heddle.attention, heddle.scaled_dot_product_attention):
            out = run(q, k, v, **{"bias" if run is heddle.attention else "attn_mask": given})
            found.append((out, *torch.autograd.grad(out.float().square().sum(), (q, given))))
        with torch.no_grad():
            assert torch.equal(heddle.attention(q, k, v, bias=given), out)
    assert out[0, :, 1].abs().max() > 0.05
    for out, dq, dbias in found:
        assert torch.equal(out, found[-1][0]) and torch.equal(dq, found[-1][1])
        assert torch.allclose(dbias.float(), found[-1][2], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", devices())
def test_float32_bias_by_every_way(dtype, device):
    """The signatures that take one of another dtype than q's agree on what becomes of it."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, s, 8, device=device).to(dtype) for s in (4, 5, 5))
    bias = torch.randn(4, 5, device=device).to(dtype).float()
    bias[1], bias[2, 1], bias[3, 0] = torch.finfo(torch.float32).min, torch.finfo(torch.float32).min, -torch.inf
    narrow = torch.where(bias.isinf(), bias, bias.clamp(torch.finfo(dtype).min)).to(dtype)
    wanted = heddle.attention(q, k, v, bias=narrow)
    assert wanted[0, :, 1].abs().max() > 0.05
    for _ in range(2):  # the second call of flex_attention takes what the first has kept
        flex = heddle.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[i, j])
        assert torch.equal(flex, wanted)
    assert torch.equal(heddle.scaled_dot_product_attention(q, k, v, attn_mask=bias), wanted)
    attention = heddle.nn.MultiheadAttention(16, 2, batch_first=True, device=device, dtype=dtype).eval()
    x = torch.randn(1, 5, 16, device=device).to(dtype)
    results = [attention(x[:, :4], x, x, attn_mask=mask, need_weights=False)[0] for mask in (bias, narrow)]
    assert torch.equal(*results)
