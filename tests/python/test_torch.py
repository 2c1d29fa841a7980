# SPDX-License-Identifier: Apache-2.0
"""How the operators fit into PyTorch: opcheck, compile, export, checkpointing, autocast, vmap, threads, cost."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from conftest import devices
from forked import Forks
from torch.utils.checkpoint import checkpoint

import heddle
import heddle._ops

ops = torch.ops.heddle
HERE = Path(__file__).parent

everywhere = pytest.mark.parametrize("device", devices())


def tensors(*shapes, dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]


QKV = ((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 3))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": 2, "softcap": 3.0, "window_left": 3, "scale": 0.3},
        {"return_weights": True},
        {"bias": (1, 4, 1, 6), "sinks": (4,)},
        {"bias": (2, 4, 5, 6), "mask": (2, 1, 1, 6)},
        {"alibi_slopes": (4,), "seqlens_k": [3, 6]},
        {"dropout": 0.5, "rng_state": [1, 2]},
    ],
    ids=str,
)
@pytest.mark.parametrize("rows_first", [False, True])
@everywhere
def test_opcheck_attention(options, rows_first, device):
    q, k, v = tensors(*QKV, device=device)
    if rows_first:
        q, k, v = (t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in (q, k, v))
    made = {}
    for name, value in options.items():
        if name == "mask":
            made[name] = torch.rand(value, device=device) > 0.3
        elif name == "seqlens_k":
            made[name] = torch.tensor(value, dtype=torch.int32, device=device)
        elif name == "rng_state":
            made[name] = torch.tensor(value, device=device)
        elif isinstance(value, tuple):
            made[name] = torch.rand(value, device=device, requires_grad=name != "alibi_slopes")
        else:
            made[name] = value
    torch.library.opcheck(ops.attention.default, (q, k, v), made)
    with torch.no_grad():
        out, lse, weights = ops.attention(q, k, v, **made)
    dweights = torch.randn_like(weights) if options.get("return_weights") else None
    plain = [t.detach() for t in (q, k, v)]
    made = {name: t.detach() if isinstance(t, torch.Tensor) else t for name, t in made.items()}
    torch.library.opcheck(
        ops.attention_backward.default, (torch.randn_like(out), torch.randn_like(lse), dweights, out, lse, *plain), made
    )


def test_every_operator_has_an_opcheck():
    """In whichever of the tests, in one place or, for those of the short ways, by the table of test_plain.py."""
    names = {each.name.removeprefix("heddle::") for each in torch._C._jit_get_all_schemas() if "heddle::" in each.name}
    sources = "".join(path.read_text() for path in HERE.glob("test_*.py"))
    for name in names:
        assert re.search(rf'opcheck\(\s*(?:torch\.ops\.heddle|ops)\.{name}\.default|"{name}": \(', sources), name
    assert {"attention", "attention_backward", "norm_linear", "norm_linear_backward"} < names


@everywhere
def test_opcheck_packed(device):
    q, k, v = tensors((9, 4, 8), (11, 2, 8), (11, 2, 8), device=device)
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=device) for cu in ([0, 4, 4, 9], [0, 2, 8, 11]))
    options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 5, "max_seqlen_k": 6, "causal": 2}
    torch.library.opcheck(ops.attention.default, (q, k, v), options)


@pytest.mark.parametrize("norm", [0, 1])
@pytest.mark.parametrize("full", [False, True])
@everywhere
def test_opcheck_norm_linear(norm, full, device):
    x, weight, bias, gamma, beta = tensors((2, 3, 8), (5, 8), (5,), (8,), (8,), device=device)
    vectors = (bias, gamma, beta) if full else (None, None, None)
    torch.library.opcheck(ops.norm_linear.default, (x, weight, *vectors), {"norm": norm})
    with torch.no_grad():
        y, mean, rstd, *_ = ops.norm_linear(x, weight, *vectors, norm=norm)
    given = (torch.randn_like(y), mean, rstd, x.detach(), weight.detach())
    torch.library.opcheck(ops.norm_linear_backward.default, given, {"norm": norm})


def block_loss(q, k, v, x, weight):
    out, lse = heddle.attention(q, k, v, causal="bottom_right", return_lse=True)
    return out.sin().sum() + lse.sum() + heddle.norm_linear(x, weight).cos().sum()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@everywhere
def test_compile_without_graph_breaks(backend, device):
    given = tensors(*QKV, (2, 3, 8), (5, 8), device=device)
    torch._dynamo.reset()
    compiled = torch.compile(block_loss, fullgraph=True, backend=backend)
    got = torch.autograd.grad(compiled(*given), given)
    want = torch.autograd.grad(block_loss(*given), given)
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


FIRST_USES = {
    "torch, heddle": ["heddle.attention(q, q, q)"],
    "heddle, torch": [
        "heddle.attention(q, q, q)",
        "heddle.norm_linear(q, q[0, 0])",
        "heddle.scaled_dot_product_attention(q, q, q)",
    ],
}


@pytest.mark.parametrize("order", FIRST_USES)
def test_first_use_within_compile(order, forks):
    """Nothing of heddle for torch has been used before, nor, in one order, been loaded."""
    modules = [*order.split(", "), "torch._dynamo"]
    with contextlib.nullcontext(forks) if order.startswith("torch") else Forks(*modules) as fork:
        for use in FIRST_USES[order]:
            program = (
                f"import {order}; q = torch.randn(1, 2, 3, 8); run = lambda q: {use}; "
                "compiled = torch.compile(run, fullgraph=True, backend='eager'); first = compiled(q); "
                "again = compiled(2 * q); print(torch.allclose(first, run(q)), torch.allclose(again, run(2 * q)))"
            )
            done = fork.run("-c", program)
            assert done.stdout == "True True\n", f"{use}: {done.stderr}"


@everywhere
def test_compile_with_dynamic_shapes(device):
    torch._dynamo.reset()
    count = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(
        lambda q: heddle.attention(q, q, q, causal=True), fullgraph=True, dynamic=True, backend=count
    )
    for s in (5, 8, 11):
        q = torch.randn(2, 3, s, 8, device=device)
        assert torch.allclose(compiled(q), heddle.attention(q, q, q, causal=True))
    assert count.frame_count == 1


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@everywhere
def test_activation_checkpointing(dropout, device):
    q, k, v = tensors(*QKV, device=device)

    def run(*given):
        return heddle.attention(*given, dropout=dropout)

    torch.manual_seed(3)
    want = torch.autograd.grad(run(q, k, v).square().sum(), (q, k, v))
    torch.manual_seed(3)
    got = torch.autograd.grad(checkpoint(run, q, k, v, use_reentrant=False).square().sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@everywhere
def test_autocast(dtype, device):
    q, k, v = tensors(*QKV, device=device)
    sinks = torch.randn(4, device=device, requires_grad=True)
    with torch.autocast(device, dtype):
        out, lse = heddle.attention(q, k, v, sinks=sinks, return_lse=True)
        y = heddle.norm_linear(*tensors((3, 8), (5, 8), (5,), (8,), (8,), device=device))
        assert ops.attention(q, k, v)[0].dtype == dtype
    assert out.dtype == dtype and lse.dtype == torch.float32 and y.dtype == dtype
    expected = heddle.attention(q.to(dtype), k.to(dtype), v.to(dtype), sinks=sinks)
    assert torch.equal(out, expected)
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32 and sinks.grad.dtype == torch.float32
    if device == "cuda":
        return  # no float64 there
    with torch.autocast(device, dtype):
        double = [t.double() for t in (q, k, v)]
        assert heddle.attention(*double).dtype == torch.float64


@everywhere
def test_vmap(device):
    q, k, v = (t.detach() for t in tensors((7, *QKV[0]), *QKV[1:], device=device))
    bias = torch.randn(7, 4, 1, 6, device=device)
    got = torch.vmap(lambda a, b: heddle.attention(a, k, v, bias=b, return_lse=True))(q, bias)
    for n in range(7):
        want = heddle.attention(q[n], k, v, bias=bias[n], return_lse=True)
        assert torch.allclose(got[0][n], want[0], atol=1e-6) and torch.allclose(got[1][n], want[1], atol=1e-6)
    weight = torch.randn(5, 8, device=device)
    x = torch.randn(3, 7, 8, device=device)
    got = torch.vmap(lambda each: ops.norm_linear(each, weight)[0], in_dims=1)(x)
    assert torch.allclose(got, ops.norm_linear(x.transpose(0, 1).contiguous(), weight)[0], atol=1e-6)
    with pytest.raises(NotImplementedError, match="weight"):
        torch.vmap(lambda w: ops.norm_linear(x, w)[0])(weight[None])


@everywhere
def test_gradients_through_vmap(device):
    """A tensor within vmap does not say that it is made of one that requires a gradient."""
    q, k, v, x, weight = tensors((3, *QKV[0]), *QKV[1:], (3, 7, 8), (5, 8), device=device)
    for run, mapped, others in ((heddle.attention, q, (k, v)), (heddle.norm_linear, x, (weight,))):
        for leaves in ((mapped,), others, (mapped, *others)):
            given = [t if any(t is leaf for leaf in leaves) else t.detach() for t in (mapped, *others)]
            got = torch.vmap(run, (0, *[None] * len(others)))(*given).square().sum()
            want = sum(run(each, *given[1:]).square().sum() for each in given[0])
            for a, b in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), strict=True):
                assert torch.allclose(a, b, atol=1e-4), (a - b).abs().max()


def test_vmap_over_the_last_dimension():
    q, k, v = (t.detach() for t in tensors((3, 1, 4, 5, 8), (1, 2, 6, 8), (1, 2, 6, 3)))
    got = torch.vmap(lambda a: heddle.attention(a, k, v), in_dims=4)(q.movedim(0, 4).contiguous())
    assert torch.allclose(got, torch.stack([heddle.attention(a, k, v) for a in q]), atol=1e-6)


def test_vmap_with_slopes_of_each_batch():
    q, k, v = (t.detach() for t in tensors((3, *QKV[0]), *QKV[1:]))
    slopes = torch.rand(2, 4)
    got = torch.vmap(lambda a: heddle.attention(a, k, v, alibi_slopes=slopes))(q)
    assert torch.allclose(got, torch.stack([heddle.attention(a, k, v, alibi_slopes=slopes) for a in q]), atol=1e-6)


def test_meta_tensors():
    q = torch.empty(2, 4, 5, 8, device="meta")
    assert heddle.attention(q, q, q).shape == q.shape
    assert heddle.norm_linear(q, torch.empty(3, 8, device="meta")).shape == (2, 4, 5, 3)


def test_what_is_not_asked_for():
    q, k, v = (t.detach() for t in tensors(*QKV))
    out, lse, weights = ops.attention(q, k, v)
    assert weights.shape == (0,) and ops.attention(q, k, v, return_weights=True)[2].shape == (2, 4, 5, 6)
    grads = ops.attention_backward(out, None, None, out, lse, q, k, v, needs=2)
    assert [grad is None for grad in grads] == [True, False, True, True, True]
    x, weight = q.detach(), torch.randn(3, 8)
    y, mean, rstd, u, _ = ops.norm_linear(x, weight)
    assert u.shape == (0,)
    grads = ops.norm_linear_backward(y, mean, rstd, x, weight, needs=1)
    assert [grad is None for grad in grads] == [False, True, True, True, True]


def test_who_records_a_gradient():
    q, k, v = (t.detach() for t in tensors(*QKV))
    leaf = q.clone().requires_grad_()
    assert not heddle.attention(leaf.detach(), k, v).requires_grad
    assert heddle.attention(leaf, k, v).requires_grad
    assert heddle.attention(q, k, v, bias=torch.zeros(6, requires_grad=True)).requires_grad
    assert heddle.attention(q, k, v, sinks=torch.zeros(4, requires_grad=True)).requires_grad
    with torch.no_grad():
        assert not heddle.attention(leaf, k, v).requires_grad


def test_workspace_follows_the_number_of_threads():
    """The operators keep the size of the last workspace; more threads may need more."""
    q, k, v = (t.detach() for t in tensors((1, 2, 300, 16), (1, 2, 300, 16), (1, 2, 300, 16)))
    before = torch.get_num_threads()
    try:
        for threads in (1, 4, 2, 8, 1):
            torch.set_num_threads(threads)
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]
            out = heddle.attention(*leaves)
            torch.autograd.grad(out.sum(), leaves)
            heddle.attention(q[:, :, :1], k, v)
    finally:
        torch.set_num_threads(before)


def test_inference_mode_and_views():
    q, k, v = tensors(*QKV)
    with torch.inference_mode():
        out = heddle.attention(q, k, v)
    assert torch.equal(out, heddle.attention(q, k, v).detach())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_graph():
    torch.cuda.synchronize()
    q, k, v = (t.detach().cuda().requires_grad_() for t in tensors(*QKV))
    dout = torch.randn(2, 4, 5, 3, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(heddle.attention(q, k, v), (q, k, v), dout)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = heddle.attention(q, k, v)
        grads = torch.autograd.grad(out, (q, k, v), dout)
    with torch.no_grad():
        q.copy_(torch.randn_like(q))
    graph.replay()
    expected = heddle.attention(q, k, v)
    assert torch.allclose(out, expected, atol=1e-6)
    for a, b in zip(grads, torch.autograd.grad(expected, (q, k, v), dout), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_graph_of_norm_linear():
    leaves = tensors((9, 8), (5, 8), (5,), (8,), (8,), device="cuda")
    dy = torch.randn(9, 5, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.autograd.grad(heddle.norm_linear(*leaves), leaves, dy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = heddle.norm_linear(*leaves)
        grads = torch.autograd.grad(y, leaves, dy)
    with torch.no_grad():
        leaves[0].copy_(torch.randn_like(leaves[0]))
    graph.replay()
    expected = heddle.norm_linear(*leaves)
    assert torch.allclose(y, expected, atol=1e-6)
    for a, b in zip(grads, torch.autograd.grad(expected, leaves, dy), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_current_stream():
    """The work goes behind what PyTorch's current stream has to do, and nothing waits for it."""
    q = torch.zeros(1, 2, 64, 64, device="cuda")
    heddle.attention(q, q, q)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        q.fill_(2.0)
        out = heddle.attention(q, q, q)
        assert not side.query()  # still asleep
    side.synchronize()
    assert torch.equal(out, q)


def test_memory_is_given_back():
    """A thousand calls, failing ones too, leave the process as large as a hundred."""
    import resource

    q, k, v = tensors((1, 4, 64, 64), (1, 4, 64, 64), (1, 4, 64, 64))
    sinks = torch.randn(4, requires_grad=True)

    def rounds(n):
        for _ in range(n):
            torch.autograd.grad(heddle.attention(q, k, v, sinks=sinks).sum(), (q, sinks))
            with pytest.raises(ValueError):
                heddle.attention(q, k[:, :3], v[:, :3], sinks=sinks)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    first = rounds(100)
    assert rounds(1000) - first < 8 * 1024  # kilobytes; one lost tensor a call would be 64 MB


def test_patch():
    before = F.scaled_dot_product_attention
    attention = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 5, 16)
    want = attention(x, x, x, need_weights=False)[0]
    with heddle.patch():
        ours = F.scaled_dot_product_attention
        assert ours is not before
        with heddle.patch():
            got = attention(x, x, x, need_weights=False)[0]
        assert F.scaled_dot_product_attention is ours
    assert F.scaled_dot_product_attention is before
    assert torch.allclose(got, want, atol=1e-6)
    with pytest.raises(ZeroDivisionError), heddle.patch():
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is before
