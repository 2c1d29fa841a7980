# SPDX-License-Identifier: Apache-2.0
"""Segments: the same results as of a boolean mask, from torch, NumPy and JAX, and errors that say what is wrong."""

import numpy as np
import pytest
import torch
from conftest import devices

import heddle

each_device = pytest.mark.parametrize("device", devices())

torch.manual_seed(0)
B, H, HK, SQ, SK, D = 2, 4, 2, 90, 130, 16


def problem(device="cpu", dtype=torch.float32):
    q = torch.randn(B, H, SQ, D, device=device, dtype=dtype)
    k, v = (torch.randn(B, HK, SK, D, device=device, dtype=dtype) for _ in range(2))
    ids = [torch.arange(n, device=device, dtype=torch.int32) // 37 - 1 for n in (SQ, SK)]
    own, other = (torch.stack((x, x.flip(0))) for x in ids)
    return q, k, v, own, other, own[:, None, :, None] == other[:, None, None, :]


OPTIONS = (
    {},
    {"causal": "bottom_right", "sinks": torch.randn(H)},
    {"window": (20, 3), "softcap": 5.0},
    {"alibi_slopes": torch.rand(H), "causal": "top_left"},
    {"seqlens_k": [SK, 7], "return_lse": True},
    {"mask": torch.rand(B, 1, SQ, SK) < 0.8},
    {"dropout": 0.3, "rng_state": torch.tensor([3, 4])},
)


@each_device
@pytest.mark.parametrize("at", range(len(OPTIONS)))
def test_like_a_mask(at, device):
    q, k, v, own, other, mask = problem(device)
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in OPTIONS[at].items()}
    both = mask & options["mask"] if "mask" in options else mask
    leaves = [[x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2)]
    ours = heddle.attention(*leaves[0], q_segments=own, k_segments=other, **options)
    theirs = heddle.attention(*leaves[1], **{**options, "mask": both})
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    first = [x[0] if isinstance(x, tuple) else x for x in (ours, theirs)]
    grads = [torch.autograd.grad(x.square().sum(), leaf) for x, leaf in zip(first, leaves, strict=True)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@each_device
def test_one_for_all(device):
    q, k, v, own, other, _ = problem(device)
    expected = heddle.attention(q, k, v, q_segments=own[:1].expand(B, -1), k_segments=other[:1].expand(B, -1))
    for pick in (lambda x: x[0], lambda x: x[:1], lambda x: x[0].to(torch.int16)):
        torch.testing.assert_close(heddle.attention(q, k, v, q_segments=pick(own), k_segments=pick(other)), expected)
    alone = heddle.attention(q[0, 0], q[0, 1], q[0, 2], q_segments=own[0])
    mask = own[0][:, None] == own[0]
    torch.testing.assert_close(alone, heddle.attention(q[0, 0], q[0, 1], q[0, 2], mask=mask), rtol=1e-5, atol=1e-5)


@each_device
def test_packed(device):
    q, k, v, own, other, mask = problem(device)
    cu = [torch.arange(B + 1, dtype=torch.int32, device=device) * n for n in (SQ, SK)]
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    packed = {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1], "max_seqlen_q": SQ, "max_seqlen_k": SK}
    ids = {"q_segments": own.flatten(), "k_segments": other.flatten()}
    ours = heddle.attention(*rows, **packed, **ids)
    expected = heddle.attention(q, k, v, mask=mask)
    torch.testing.assert_close(ours.unflatten(0, (B, SQ)).transpose(1, 2), expected, rtol=1e-5, atol=1e-5)
    tangents = [torch.randn_like(x) for x in rows]  # through heddle._tangents, which makes a mask of them
    _, moved = torch.func.jvp(lambda *x: heddle.attention(*x, **packed, **ids), tuple(rows), tuple(tangents))
    leaves = [x.clone().requires_grad_() for x in rows]
    out = heddle.attention(*leaves, **packed, **ids)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    expected = sum((g * t).sum() for g, t in zip(grads, tangents, strict=True))
    torch.testing.assert_close((moved * dout).sum(), expected, rtol=1e-3, atol=1e-3)


@each_device
def test_compile_export_vmap_opcheck(device):
    q, k, v, own, other, mask = problem(device)
    expected = heddle.attention(q, k, v, mask=mask)

    def run(q, k, v, own, other):
        return heddle.attention(q, k, v, q_segments=own, k_segments=other)

    given = (q, k, v, own, other)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), expected, rtol=1e-5, atol=1e-5)
    each = torch.func.vmap(run, in_dims=(0, 0, 0, 0, None))(*(torch.stack((x, x)) for x in given[:4]), other)
    torch.testing.assert_close(each[1], expected, rtol=1e-5, atol=1e-5)

    def loss(q):
        return run(q, *given[1:]).square().sum()

    several = torch.func.vmap(torch.func.grad(loss))(torch.stack((q, 2 * q)))
    torch.testing.assert_close(several[1], torch.func.grad(loss)(2 * q), rtol=1e-5, atol=1e-5)
    if device == "cpu":
        torch.library.opcheck(torch.ops.heddle.attention.default, given[:3], {"q_segments": own, "k_segments": other})

        class Module(torch.nn.Module):
            def forward(self, *x):
                return run(*x)

        exported = torch.export.export(Module(), given).module()
        torch.testing.assert_close(exported(*given), expected, rtol=1e-5, atol=1e-5)


def test_second_derivative():
    q, k, v, own, other, _ = (x[:, :, :9] if x.dim() == 4 else x[:, :9] for x in problem(dtype=torch.float64))
    ids = {"q_segments": own.contiguous(), "k_segments": other.contiguous()}
    leaves = [x.contiguous().requires_grad_() for x in (q[:1, :2, :, :3], k[:1, :1, :, :3], v[:1, :1, :, :3])]
    assert torch.autograd.gradgradcheck(
        lambda *x: heddle.attention(*x, **{name: value[:1] for name, value in ids.items()}), leaves
    )


def test_arrays():
    q, k, v, own, other, mask = (x.numpy() for x in problem())
    for ids in ({"q_segments": own, "k_segments": other},):
        out, lse = heddle.attention(q, k, v, return_lse=True, **ids)
        np.testing.assert_allclose(out, heddle.attention(q, k, v, mask=mask), rtol=1e-5, atol=1e-5)
        ours = heddle.attention_backward(out, q, k, v, out, lse, **ids)
        theirs = heddle.attention_backward(out, q, k, v, out, lse, mask=mask)
        for name, made in ours.items():
            np.testing.assert_allclose(made, theirs[name], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="q_segments has shape"):
        heddle.attention(q, k, v, q_segments=own[:, :5], k_segments=other)
    with pytest.raises(TypeError, match="q_segments is int64"):
        heddle.attention(q, k, v, q_segments=own.astype(np.int64), k_segments=other)
    with pytest.raises(ValueError, match="k_segments has shape"):
        heddle.attention(q, k, v, q_segments=own)
    with pytest.raises(ValueError, match="k_segments is given without q_segments"):
        heddle.attention(q, k, v, k_segments=other)


def test_jax():
    jax = pytest.importorskip("jax")
    heddle_jax = pytest.importorskip("heddle.jax")
    q, k, v, own, other, mask = (jax.numpy.asarray(x.numpy()) for x in problem())

    def loss(q, k, v, **options):
        return (heddle_jax.attention(q, k, v, **options) ** 2).sum()

    grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    for ours, theirs in zip(grad(q, k, v, q_segments=own, k_segments=other), grad(q, k, v, mask=mask), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    one = heddle_jax.attention(q, q, q, q_segments=own[0])
    alike = own[0][:, None] == own[0]
    np.testing.assert_allclose(one, heddle_jax.attention(q, q, q, mask=alike), rtol=1e-5, atol=1e-5)
    each = jax.vmap(lambda q, own: heddle_jax.attention(q, q, q, q_segments=own))(
        jax.numpy.stack((q, q)), jax.numpy.stack((own, own[::-1]))
    )
    np.testing.assert_allclose(each[0], heddle_jax.attention(q, q, q, q_segments=own), rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="q_segments is float32"):
        heddle_jax.attention(q, k, v, q_segments=q[0, 0, :, 0], k_segments=other)


def test_errors():
    q, k, v, own, other, _ = problem()

    def fails(kind, match, **options):
        with pytest.raises(kind, match=match):
            heddle.attention(q, k, v, **({"q_segments": own, "k_segments": other} | options))

    fails(ValueError, "k_segments is given without q_segments", q_segments=None)
    fails(ValueError, r"k_segments has shape \[2, 90\], but must have \[2, 130\]", k_segments=None)
    fails(ValueError, r"q_segments has shape \[2, 3\]", q_segments=own[:, :3])
    fails(ValueError, r"q_segments has shape \[2, 4, 90\]", q_segments=own[:, None].expand(-1, H, -1))
    fails(TypeError, "q_segments is torch.int64", q_segments=own.long())
    fails(TypeError, "k_segments is torch.float32", k_segments=other.float())
    with pytest.raises(RuntimeError, match="q_segments and k_segments come together"):
        torch.ops.heddle.attention(q, k, v, q_segments=own)
    with pytest.raises(RuntimeError, match="q_segments must be contiguous"):
        torch.ops.heddle.attention(q, k, v, q_segments=own[:1].expand(B, -1), k_segments=other)


@each_device
def test_unseen_is_not_read(device):
    q, k, v, own, other, _ = problem(device)
    other = other.clone()
    other[:, 40:60] = 99  # of nobody
    k[:, :, 40:60] = float("nan")
    v[:, :, 40:60] = float("inf")
    assert heddle.attention(q, k, v, q_segments=own, k_segments=other).isfinite().all()


def test_arrays_as_tensors():
    """NumPy's segments are taken in the forms that torch's are."""
    q, k, v, own, other, _ = (x.numpy() for x in problem())
    expected = heddle.attention(q, k, v, q_segments=own[:1].repeat(B, 0), k_segments=other[:1].repeat(B, 0))
    for pick in (lambda x: x[0], lambda x: x[:1], lambda x: x[0].astype(np.int16)):
        made = heddle.attention(q, k, v, q_segments=pick(own), k_segments=pick(other))
        np.testing.assert_array_equal(made, expected)
    np.testing.assert_array_equal(
        heddle.attention(q, q, q, q_segments=own), heddle.attention(q, q, q, q_segments=own, k_segments=own)
    )
    out, lse = heddle.attention(q, q, q, q_segments=own, return_lse=True)
    ours = heddle.attention_backward(out, q, q, q, out, lse, q_segments=own)
    theirs = heddle.attention_backward(out, q, q, q, out, lse, q_segments=own, k_segments=own)
    np.testing.assert_array_equal(ours["dk"], theirs["dk"])
    cu = np.arange(B + 1, dtype=np.int32) * SQ
    rows, packed = q.swapaxes(1, 2).reshape(B * SQ, H, D), {"max_seqlen_q": SQ, "max_seqlen_k": SQ}
    made = heddle.attention(rows, rows, rows, cu_seqlens_q=cu, cu_seqlens_k=cu, q_segments=own.reshape(-1), **packed)
    alone = heddle.attention(q, q, q, q_segments=own).swapaxes(1, 2).reshape(rows.shape)
    np.testing.assert_allclose(made, alone, rtol=1e-5, atol=1e-5)
