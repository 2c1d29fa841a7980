# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own switch: what its operators compute, while it is on, is heddle's to the bit, and lies as promised."""

from __future__ import annotations

import itertools
import os
import resource
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import devices
from torch._subclasses.fake_tensor import FakeTensorMode

import heddle

if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
    pytest.skip("torch before 2.11 has no such switch", allow_module_level=True)

import torch.nn.attention as attentions

aten = torch.ops.aten
INPLACE = hasattr(aten, "_flash_attention_forward_no_dropout_inplace")  # not in torch 2.11, nor are some arguments
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def switched():
    attentions.activate_flash_attention_impl("heddle")
    yield
    attentions.restore_flash_attention_impl(_raise_warn=False)


def own(function, *args, **options):
    """The same by PyTorch's own kernels."""
    attentions.restore_flash_attention_impl(_raise_warn=False)
    try:
        return function(*args, **options)
    finally:
        attentions.activate_flash_attention_impl("heddle")


def assert_same(got, expected):
    for x, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype, (x, a.shape, b.shape)
        if a.is_cuda:  # where gradients are sums in any order, and another layout may have another kernel
            torch.testing.assert_close(a, b)
        else:
            assert torch.equal(a, b), f"{x}: {(a.double() - b.double()).abs().max()}"


def plain(b, h, s, d):
    return torch.randn(b, h, s, d)


def rows_first(b, h, s, d):
    return torch.randn(b, s, h, d).transpose(1, 2)


def sequence_first(b, h, s, d):
    """As nn.MultiheadAttention has it."""
    return torch.randn(s, b * h, d).transpose(0, 1).view(b, h, s, d)


def of_three(b, h, s, d):
    """As one projection to query, key and value leaves it."""
    return torch.randn(b, s, 3, h, d)[:, :, 1].transpose(1, 2)


def repeated(b, h, s, d):
    return torch.randn(b, 1, s, d).expand(b, h, s, d)


LAYOUTS = [plain, rows_first, sequence_first, of_three, repeated]

# ------------------------------------------------------------------------------------------- the operator for CPUs

CASES = {
    "plain": ((2, 4, 7, 8), (2, 4, 9, 8), {}),
    "odd head dim": ((2, 3, 7, 5), (2, 3, 9, 5), {}),
    "one head, one query": ((2, 1, 1, 8), (2, 1, 9, 8), {}),
    "causal": ((2, 4, 9, 8), (2, 4, 9, 8), {"is_causal": True}),
    "causal, sq < sk": ((2, 4, 7, 8), (2, 4, 9, 8), {"is_causal": True}),
    "causal, sq > sk": ((2, 4, 9, 8), (2, 4, 5, 8), {"is_causal": True}),
    "scale": ((2, 4, 7, 8), (2, 4, 9, 8), {"scale": 0.7}),
    "scale 0": ((2, 4, 7, 8), (2, 4, 9, 8), {"scale": 0.0}),
    "gqa": ((2, 4, 7, 8), (2, 2, 9, 8), {"enable_gqa": True}),
    "bool mask": ((2, 4, 7, 8), (2, 4, 9, 8), {"attn_mask": lambda: torch.rand(7, 9) > 0.3}),
    "bool mask with an empty row": (
        (2, 4, 3, 8),
        (2, 4, 3, 8),
        {"attn_mask": lambda: torch.tensor([[True, False, True], [False] * 3, [True] * 3])},
    ),
    "bias": ((2, 4, 7, 8), (2, 4, 9, 8), {"attn_mask": lambda: torch.randn(2, 4, 7, 9)}),
    "bias of batches": ((2, 4, 7, 8), (2, 4, 9, 8), {"attn_mask": lambda: torch.randn(2, 1, 1, 9)}),
    "bias of rows": ((2, 4, 7, 8), (2, 4, 9, 8), {"attn_mask": lambda: torch.randn(7, 1)}),
    "bias the other way round": ((2, 4, 7, 8), (2, 4, 9, 8), {"attn_mask": lambda: torch.randn(2, 4, 9, 7).mT}),
}


def expected_sdpa(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros(attn_mask.shape, dtype=q.dtype).masked_fill(~attn_mask, -torch.inf)
    return heddle.attention(q, k, v, causal="top_left" if is_causal else None, scale=scale, bias=attn_mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_sdpa(name, dtype, switched):
    torch.manual_seed(0)
    q_shape, k_shape, options = CASES[name]
    options = {key: value() if callable(value) else value for key, value in options.items()}
    if "attn_mask" in options and options["attn_mask"].dtype != torch.bool:
        options["attn_mask"] = options["attn_mask"].to(dtype)
    for make in LAYOUTS:
        leaves = [make(*shape).to(dtype).requires_grad_() for shape in (q_shape, k_shape, k_shape)]
        out = F.scaled_dot_product_attention(*leaves, **options)
        expected = expected_sdpa(*leaves, **options)
        dout = torch.randn_like(out)
        grads, expected_grads = (torch.autograd.grad(o, leaves, dout) for o in (out, expected))
        assert_same([out, *grads], [expected, *expected_grads])
        assert_same(torch.autograd.grad(F.scaled_dot_product_attention(*leaves, **options).sum(), leaves),
                    torch.autograd.grad(expected_sdpa(*leaves, **options).sum(), leaves))  # fmt: skip


def test_it_is_heddles_and_given_back(switched):
    q, k, v = (torch.randn(2, 4, 33, 16) for _ in range(3))
    ours, theirs = F.scaled_dot_product_attention(q, k, v), own(F.scaled_dot_product_attention, q, k, v)
    assert not torch.equal(ours, theirs) and torch.allclose(ours, theirs, atol=1e-6)
    assert attentions.current_flash_attention_impl() == "heddle"
    attentions.activate_flash_attention_impl("heddle")  # again: restores first
    assert_same([F.scaled_dot_product_attention(q, k, v)], [ours])
    attentions.restore_flash_attention_impl()
    assert attentions.current_flash_attention_impl() is None
    assert_same([F.scaled_dot_product_attention(q, k, v)], [theirs])


def test_a_mask_of_float32_beside_bfloat16(switched):
    q, k, v = (torch.randn(2, 4, 8, 16).bfloat16() for _ in range(3))
    mask = torch.randn(1, 1, 8, 8)
    out, _ = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask)
    assert_same([out], [heddle.attention(q, k, v, bias=mask)])


def test_lse_of_the_operator_for_cpus(switched):
    for shape in ((2, 3, 5, 8), (2, 1, 5, 8), (2, 3, 1, 8), (1, 2, 2, 8)):
        q, k, v = (plain(*shape) for _ in range(3))
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        assert_same([out, lse], heddle.attention(q, k, v, return_lse=True))
        theirs = own(aten._scaled_dot_product_flash_attention_for_cpu, q, k, v)
        assert torch.allclose(lse, theirs[1]) and lse.stride()[:2] == theirs[1].stride()[:2]
        # Its backward takes what others hand it, too.
        grads = [
            aten._scaled_dot_product_flash_attention_for_cpu_backward(out, q, k, v, out, each, 0.0, False)
            for each in (lse, lse.contiguous(), torch.cat([lse, lse], -1)[..., : shape[2]])
        ]
        assert_same(grads[1], grads[0])
        assert_same(grads[2], grads[0])


# ------------------------------------------------------------------------------------- the operators of both devices


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sq,sk,h,hk,d", [(7, 7, 4, 4, 8), (5, 9, 4, 2, 16), (9, 5, 2, 1, 24)])
def test_scaled_dot_product_flash_attention(sq, sk, h, hk, d, is_causal, device, switched):
    torch.manual_seed(0)
    for make in LAYOUTS:
        sizes = ((2, h, sq, d), (2, hk, sk, d), (2, hk, sk, d))
        leaves = [make(*size).to(device, torch.bfloat16).requires_grad_() for size in sizes]
        results = aten._scaled_dot_product_flash_attention(*leaves, 0.0, is_causal, scale=0.3)
        out, lse, cum_q, cum_k, max_q, max_k, seed, unused, debug = results
        corner = "bottom_right" if is_causal else None
        expected, expected_lse = heddle.attention(*leaves, causal=corner, scale=0.3, return_lse=True)
        assert_same([out, lse], [expected, expected_lse])
        assert cum_q is None and cum_k is None and (max_q, max_k) == (sq, sk)
        assert seed.dtype == unused.dtype == torch.uint64 and seed.shape == (2,) and unused.shape == ()
        assert debug.numel() == 0 and debug.dtype == torch.bfloat16
        dout = torch.randn_like(out)
        assert_same(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, leaves, dout))


@pytest.mark.parametrize("device", devices())
def test_dropout_draws_what_heddle_draws(device, switched):
    q, k, v = (torch.randn(2, 4, 40, 16, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    torch.manual_seed(5)
    out, *_, seed, _, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.25)
    torch.manual_seed(5)
    state = torch.randint(0, 2**62, (2,), device=device)
    expected = heddle.attention(q, k, v, dropout=0.25, rng_state=state)
    assert torch.equal(seed.view(torch.int64), state)
    assert_same([out], [expected])
    assert_same(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)))
    other, *_, its_seed, _, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.25)
    assert not torch.equal(seed, its_seed) and not torch.equal(other, out)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 3)])
def test_varlen_attn(window, device, switched):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if not hasattr(varlen, "varlen_attn_out"):
        pytest.skip("varlen_attn of torch 2.11 has other arguments")

    torch.manual_seed(0)
    cu_q, cu_k = (torch.tensor(c, dtype=torch.int32, device=device) for c in ([0, 3, 3, 10], [0, 4, 6, 11]))
    q = torch.randn(10, 4, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(11, 2, 8, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    given, options = (q, k, v, cu_q, cu_k, 7, 5), {"window_size": window, "scale": 0.4, "enable_gqa": True}
    out, lse = varlen.varlen_attn(*given, return_aux=varlen.AuxRequest(lse=True), **options)
    packed = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 7, "max_seqlen_k": 5}
    causal = "bottom_right" if window == (-1, 0) else None
    kept = None if causal else tuple(None if side < 0 else side for side in window)
    expected, expected_lse = heddle.attention(q, k, v, causal=causal, window=kept, scale=0.4, return_lse=True, **packed)
    assert_same([out, lse], [expected, expected_lse])
    dout = torch.randn_like(out)
    assert_same(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(expected, (q, k, v), dout))
    into = torch.full_like(q, 7.0).detach()
    with torch.no_grad():
        varlen.varlen_attn_out(into, *given, **options)
    assert_same([into], [out])


@pytest.mark.parametrize("device", devices())
def test_rows_of_no_sequence_and_keys_that_are_not_used(device, switched):
    cu_q, cu_k, used = (
        torch.tensor(c, dtype=torch.int32, device=device) for c in ([1, 3, 6], [0, 4, 8], [2, 4])
    )  # fmt: skip
    q = torch.randn(8, 4, 8, device=device, dtype=torch.float16)
    k, v = (torch.randn(8, 4, 8, device=device, dtype=torch.float16) for _ in range(2))
    k[2:4], v[2:4] = torch.nan, torch.nan  # keys of the first sequence that are not used
    given = (q, k, v, cu_q, cu_k, 3, 4, 0.0, False, False)
    results = [aten._flash_attention_forward(*given, seqused_k=used)[0]]
    if INPLACE:
        results.append(torch.full_like(q, 7.0))
        aten._flash_attention_forward_no_dropout_inplace(results[1], *given, seqused_k=used)
    packed = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 3, "max_seqlen_k": 4}
    expected = heddle.attention(q, k, v, seqlens_k=used, **packed)
    assert_same(results, [expected] * len(results))
    out = results[0]
    assert not out[0].any() and not out[6:].any() and torch.isfinite(out).all()


@pytest.mark.parametrize("device", devices())
def test_dense_flash_attention_forward(device, switched):
    """[b, s, h, d], with windows: what FlashAttention has dense."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, s, 4, 8, device=device, dtype=torch.bfloat16, requires_grad=True) for s in (5, 9, 9))
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, None, None, 5, 9, 0.0, True, False, window_size_left=3, window_size_right=None
    )
    heads = [t.transpose(1, 2) for t in (q, k, v)]
    expected, expected_lse = heddle.attention(*heads, causal="bottom_right", window=(3, None), return_lse=True)
    assert_same([out, lse], [expected.transpose(1, 2), expected_lse])
    assert out.is_contiguous()
    dout = torch.randn_like(out)
    assert_same(
        torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(expected, (q, k, v), dout.transpose(1, 2))
    )
    if not INPLACE:
        return
    into = torch.empty_like(q).detach()
    aten._flash_attention_forward_no_dropout_inplace(
        into, *(t.detach() for t in (q, k, v)), None, None, 5, 9, 0.0, True, False, window_size_left=3
    )
    assert_same([into], [out])


# ------------------------------------------------------------------------------------- what compiled code counts on


def strides_of(results):
    return [
        [s for s, size in zip(t.stride(), t.shape, strict=True) if size > 1] if isinstance(t, torch.Tensor) else t
        for t in results
    ]


def as_fake(mode, values):
    return [mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in values]


@pytest.mark.parametrize("make", LAYOUTS, ids=lambda make: make.__name__)
def test_results_lie_where_fake_kernels_promise(make, switched):
    for b, h, s, d in ((2, 3, 5, 8), (1, 3, 5, 8), (2, 1, 5, 8), (2, 3, 1, 8), (2, 3, 5, 1)):
        q, k, v = (make(b, h, s, d) for _ in range(3))
        calls = []
        for name in ("_for_cpu", ""):
            forward = getattr(aten, f"_scaled_dot_product_flash_attention{name}").default
            backward = getattr(aten, f"_scaled_dot_product_flash_attention{name}_backward").default
            out, lse, *rest = forward(q, k, v)
            calls.append((forward, (q, k, v)))
            rest = (None, None, s, s, 0.0, False, *rest[4:6]) if rest else (0.0, False)
            calls.append((backward, (torch.randn_like(out), q, k, v, out, lse, *rest)))
        dense = [t.transpose(1, 2) for t in (q, k, v)]
        options = (None, None, s, s, 0.0, False)
        calls.append((aten._flash_attention_forward.default, (*dense, *options, False)))
        out, lse, seed, unused, _ = calls[-1][0](*calls[-1][1])
        calls.append((aten._flash_attention_backward.default, (out, *dense, out, lse, *options, seed, unused)))
        calls.append(
            (
                aten._flash_attention_forward.default,
                (*(t[0] for t in dense), *(torch.tensor([0, s], dtype=torch.int32),) * 2, s, s, 0.0, False, False),
            )
        )
        for operator, args in calls:
            with FakeTensorMode() as mode:
                promised = operator(*as_fake(mode, args))
            got = operator(*args)
            assert strides_of(got) == strides_of(promised), (operator, make.__name__, (b, h, s, d))


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.project(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k.contiguous(), v, is_causal=True).transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend, switched):
    if backend == "inductor" and not os.environ.get("HEDDLE_LONG"):
        pytest.skip("./dev test --long")
    torch.manual_seed(0)
    model, x = Small(), torch.randn(2, 7, 16)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    results = []
    for run in (model, compiled):
        model.zero_grad()
        out = run(x)
        out.square().sum().backward()
        results.append([out, model.project.weight.grad])
    if backend == "aot_eager":
        assert_same(*results)
    theirs = own(compiled, x)
    assert not torch.equal(theirs, results[1][0]) and torch.allclose(theirs, results[1][0], atol=1e-6)
    for ours, others in zip(*results, strict=True):
        assert torch.allclose(ours, others, atol=1e-5)


def test_export(switched):
    model, x = Small(), torch.randn(2, 7, 16)
    exported = own(torch.export.export, model, (x,))
    module = exported.module()
    assert_same([module(x)], [model(x)])
    assert not torch.equal(module(x), own(module, x))


# -------------------------------------------------------------------------------------------------------- modules


def test_modules(switched):
    torch.manual_seed(0)
    x = torch.randn(2, 7, 16)
    attention = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(7)
    padding = torch.tensor([[False] * 7, [False] * 5 + [True] * 2])
    for run in (
        lambda: attention(x, x, x, need_weights=False)[0],
        lambda: attention(x, x, x, need_weights=False, attn_mask=causal, is_causal=True)[0],
        lambda: encoder(x),
        lambda: encoder(x, src_key_padding_mask=padding),
    ):
        ours, theirs = run(), own(run)
        assert not torch.equal(ours, theirs) and torch.allclose(ours, theirs, atol=1e-5)
        with heddle.patch():
            patched = own(run)
        assert torch.allclose(ours, patched, atol=1e-6)


def ring(rank, port, results):
    import torch.distributed as dist
    from torch.distributed.tensor.experimental._context_parallel import _attention as parallel

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    attentions.activate_flash_attention_impl("heddle")
    mesh = dist.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    for dtype, is_causal in ((t, c) for t in (torch.float32, torch.float64) for c in (False, True)):
        q, k, v, dout = (torch.randn(2, 4, 16, 8, dtype=dtype) for _ in range(4))
        parallel._cp_options.enable_load_balance = False
        mine = [t.chunk(2, 2)[rank].contiguous() for t in (q, k, v, dout)]
        out, lse, *rest = parallel._scaled_dot_product_ring_flash_attention(mesh, *mine[:3], is_causal=is_causal)
        grads = parallel._scaled_dot_product_ring_flash_attention_backward(
            mesh, mine[3], *mine[:3], out, lse, *rest[:4], 0.0, is_causal, *rest[4:6]
        )
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        truth = heddle.attention(*leaves, causal=is_causal)
        truths = [truth, *torch.autograd.grad(truth, leaves, dout)]
        for got, true in zip((out, *grads[:3]), truths, strict=True):
            assert torch.allclose(got, true.chunk(2, 2)[rank], atol=1e-5), is_causal
    results.put(rank)
    dist.destroy_process_group()


def public_ring(rank, port, results):
    """PyTorch's context_parallel on two GPUs: heddle's kernels, and what one gives. Parts of few keys and of many."""
    import torch.distributed as dist
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard
    from torch.distributed.tensor.experimental._context_parallel import _attention as parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2)
    attentions.activate_flash_attention_impl("heddle")
    mesh = dist.init_device_mesh("cuda", (2,))
    torch.manual_seed(0)
    for keys, is_causal in itertools.product((128, 512, 2048), (True, False)):
        parallel._cp_options.enable_load_balance = is_causal  # PyTorch balances causal masks alone
        whole = [torch.randn(2, 4, keys, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        leaves = [t.clone().requires_grad_() for t in whole[:3]]
        truth = heddle.attention(*leaves, causal=is_causal)
        truths = [truth, *torch.autograd.grad(truth, leaves, whole[3])]
        parts = [t.clone() for t in whole]
        with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 4), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            own = [part.detach().clone().requires_grad_() for part in parts[:3]]
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                out = F.scaled_dot_product_attention(*own, is_causal=is_causal)
                out.backward(parts[3])
                torch.cuda.synchronize()
            names = {event.name for event in profile.events()}
            got = [t.detach().contiguous() for t in (out, *(t.grad for t in own))]
            got = context_parallel_unshard(mesh, got, [2] * 4)
        assert any("heddle_attention_fwd" in name for name in names), names
        assert any("heddle_attention" in name and "bwd" in name for name in names), names
        for one, true in zip(got, truths, strict=True):
            assert (one - true).abs().max() <= 0.02 * true.abs().max(), (keys, is_causal)
    results.put(rank)
    dist.destroy_process_group()


def run_two(target):
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # They are forks of one process that has imported torch; CUDA is not for such children.
    context = torch.multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    context.set_forkserver_preload(["torch.distributed.tensor.experimental._context_parallel", "heddle", "pytest"])
    results = context.Queue()
    processes = [context.Process(target=target, args=(rank, port, results)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0


def test_context_parallel():
    run_two(ring)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_context_parallel_on_gpus():
    run_two(public_ring)


# ------------------------------------------------------------------------------------------------------- refusals

Q = torch.randn(1, 2, 3, 8)
ROWS = torch.randn(3, 2, 8)
CU = torch.tensor([0, 3], dtype=torch.int32)
FORWARD = (ROWS, ROWS, ROWS, CU, CU, 3, 3, 0.0, False, False)


@pytest.mark.parametrize(
    "run,text",
    [
        (lambda: aten._scaled_dot_product_flash_attention(Q, Q, Q, 0.0, False, True), "NotImpl.*return_debug_mask"),
        (lambda: aten._scaled_dot_product_flash_attention_for_cpu(Q, Q, Q, 0.5), "NotImpl.*dropout_p = 0.5"),
        (lambda: aten._scaled_dot_product_flash_attention_for_cpu(Q, Q, Q, attn_mask=Q[0]), "attn_mask has 3 dim"),
        (lambda: aten._scaled_dot_product_flash_attention_for_cpu(Q, Q[0], Q), "k has 3 dimensions"),
        (lambda: aten._flash_attention_forward(*FORWARD, alibi_slopes=torch.ones(2)), "NotImpl.*alibi_slopes"),
        (lambda: aten._flash_attention_forward(*FORWARD, block_table=CU[None]), "NotImpl.*block_table"),
        (lambda: aten._flash_attention_forward(*FORWARD, num_splits=1), "NotImpl.*num_splits=1"),
        (lambda: aten._flash_attention_forward(*FORWARD[:3], CU.long(), *FORWARD[4:]), "TypeError.*_q is int64"),
        (lambda: aten._flash_attention_forward(*FORWARD[:4], None, *FORWARD[5:]), "ValueError.*come together"),
        (lambda: aten._flash_attention_forward(*FORWARD[:3], CU[:1], CU, *FORWARD[5:]), "ValueError.*cu_seqlens_k"),
        (lambda: aten._flash_attention_forward_no_dropout_inplace(ROWS[:2], *FORWARD), "ValueError: out has shape"),
        (lambda: aten._flash_attention_forward_no_dropout_inplace(ROWS.double(), *FORWARD), "TypeError: out is"),
        (lambda: F.scaled_dot_product_attention(*(torch.randn(1, 1, 2, 513),) * 3), "513"),
    ],
)  # fmt: skip
def test_refusals(run, text, switched):
    if not INPLACE and any(new in text for new in ("out has", "out is", "block_table", "num_splits")):
        pytest.skip("not in torch 2.11")
    with pytest.raises(RuntimeError, match=f"heddle .*{text}"):
        run()


def test_an_operator_that_has_changed(monkeypatch):
    from heddle import _switch

    monkeypatch.setitem(_switch.OPERATORS, "_flash_attention_backward", ["grad_out", "key"])
    with pytest.raises(ImportError, match="_flash_attention_backward the arguments"):
        attentions.activate_flash_attention_impl("heddle")
    assert attentions.current_flash_attention_impl() is None


def test_nothing_is_kept(switched):
    def once():
        q, k, v = (torch.randn(64, 4, 32, 64, requires_grad=True) for _ in range(3))
        mask = torch.randn(32, 1)
        F.scaled_dot_product_attention(q, k, v, mask).sum().backward()

    def refused():
        q = torch.randn(64, 4, 256, 64)
        with pytest.raises(RuntimeError, match="return_debug_mask"):
            aten._scaled_dot_product_flash_attention(q, q, q, 0.5, False, True)

    def calls(count):
        for x in range(count):
            once()
            if x % 10 == 0:
                refused()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = calls(10)
    grown = calls(60) - before
    assert grown < 60 * 1024, f"{grown} KiB more after 60 calls with tensors of 2 MiB, and 6 with 16"


HEDDLE_FIRST = """
import sys, heddle
assert "torch" not in sys.modules
import torch
assert not {"heddle._torch", "heddle._switch"} & set(sys.modules)
assert "heddle" in torch.nn.attention.list_flash_attention_impls()
assert not any(type(finder).__module__ == "heddle._registry" for finder in sys.meta_path)
torch.nn.attention.activate_flash_attention_impl("heddle")
assert torch.nn.attention.current_flash_attention_impl() == "heddle"
"""


def test_the_name_is_there_when_torch_comes_second():
    done = subprocess.run([sys.executable, "-c", HEDDLE_FIRST], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_example(capsys):
    runpy.run_path(str(EXAMPLES / "switch.py"))
    assert "largest difference" in capsys.readouterr().out
