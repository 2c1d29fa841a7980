# SPDX-License-Identifier: Apache-2.0
"""What the tests share: the formulas of heddle.h in plain torch, and the rule for errors (design.md §4)."""

from __future__ import annotations

import gc
import math
import os

import pytest
from forked import Forks

os.environ.setdefault("OMP_NUM_THREADS", "2")
# Threads that wait sleep: the processes of pytest-xdist have more of them than there are cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Each process of Inductor's own pool imports torch, to compile what these tests have one or two of.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Of JAX, before anything starts it: two devices on one CPU, and on a GPU no more memory than is used.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():  # what LLVM makes of JAX's own formulas is half of their time, and used once
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"

try:
    from hypothesis import settings

    # Derandomised, so that a failure in CI is one here too.
    settings.register_profile("heddle", deadline=None, derandomize=True, database=None, max_examples=40)
    settings.load_profile("heddle")
except ImportError:
    collect_ignore_glob = ["test_sweep.py"]


@pytest.fixture(scope="session")
def forks():
    with Forks("torch", "torch._dynamo") as made:
        yield made


# Of the longest tests, which have processes of their own: they come first, so that the end waits for none of them.
LONGEST = ("test_parallel.py", "test_export.py", "test_compatibility.py", "test_failures.py", "test_torch_suite.py")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONGEST and "mypy" not in item.name)


def pytest_collection_finish():
    """What was imported stays: else every collection of garbage looks through all of it."""
    gc.collect()
    gc.freeze()


def devices():
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def plain_attention(
    q,
    k,
    v,
    *,
    causal=None,
    window=None,
    scale=None,
    softcap=0.0,
    bias=None,
    mask=None,
    alibi_slopes=None,
    sinks=None,
    seqlens_q=None,
    seqlens_k=None,
    keep=None,
    dropout=0.0,
):
    """(out, lse, weights) of [b, h, s, d] tensors, in their dtype, as the formulas read. keep: of dropout."""
    b, h, sq, d = q.shape
    hk, sk = k.shape[1], k.shape[2]
    k, v = k.repeat_interleave(h // hk, 1), v.repeat_interleave(h // hk, 1)
    t = q @ k.transpose(-1, -2) * (1 / math.sqrt(d) if scale is None else scale)
    if softcap:
        t = softcap * torch.tanh(t / softcap)
    nq = torch.full((b,), sq) if seqlens_q is None else seqlens_q.long().cpu()
    nk = torch.full((b,), sk) if seqlens_k is None else seqlens_k.long().cpu()
    off = torch.zeros_like(nk) if causal == "top_left" else nk - nq
    i = torch.arange(sq)[None, :, None] + off[:, None, None]
    j = torch.arange(sk)[None, None, :]
    seen = (j < nk[:, None, None]) & (torch.arange(sq)[None, :, None] < nq[:, None, None])
    if causal:
        seen = seen & (j <= i)
    left, right = window or (None, None)
    if left is not None and left >= 0:
        seen = seen & (j >= i - left)
    if right is not None and right >= 0:
        seen = seen & (j <= i + right)
    seen = seen[:, None].to(q.device)
    if alibi_slopes is not None:
        slopes = alibi_slopes.reshape(-1, h, 1, 1).to(t.dtype)
        t = t - slopes * (i - j).abs()[:, None].to(device=q.device, dtype=t.dtype)
    if bias is not None:
        t = t + bias
        seen = seen & (bias != -math.inf)
    if mask is not None:
        seen = seen & mask
    t = t.masked_fill(~seen, -math.inf)
    sink = None if sinks is None else sinks.reshape(1, h, 1, 1).expand(b, h, sq, 1).to(t.dtype)
    sink = (
        None
        if sink is None
        else sink.masked_fill(~(torch.arange(sq)[None, :] < nq[:, None])[:, None, :, None].to(q.device), -math.inf)
    )
    scores = t if sink is None else torch.cat([t, sink], -1)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    lse = torch.logsumexp(scores.masked_fill(empty, 0.0), -1, keepdim=True).masked_fill(empty, -math.inf)
    weights = torch.exp(t - lse.masked_fill(empty, 0.0))
    used = weights if keep is None else weights * keep * (65536 / (65536 - math.floor(65536 * dropout + 0.5)))
    return used @ v, lse.squeeze(-1), weights


def plain_norm_linear(x, weight, bias=None, gamma=None, beta=None, eps=1e-5, norm="layer"):
    mean = x.mean(-1, keepdim=True) if norm == "layer" else 0
    z = x if norm == "none" else (x - mean) * torch.rsqrt(((x - mean) ** 2).mean(-1, keepdim=True) + eps)
    z = z if gamma is None else z * gamma
    z = z if beta is None else z + beta
    y = z @ weight.T
    return y if bias is None else y + bias


def exact(value):
    """A tensor in float64 on the CPU, with the same need for a gradient; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().double().cpu().requires_grad_(value.requires_grad)
    return value.cpu() if isinstance(value, torch.Tensor) else value


ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float64: 2**-53}


def finite_of(name, got, truth):
    """Where the truth is finite; got has its shape, and is infinite where and as that is."""
    assert got.shape == truth.shape, f"{name}: {tuple(got.shape)}, not {tuple(truth.shape)}"
    finite = torch.isfinite(truth)
    assert torch.equal(torch.isfinite(got), finite), f"{name}: not finite elsewhere than the truth"
    assert torch.equal(got[~finite], truth[~finite]), f"{name}: other infinities"
    return finite


def assert_close(name, got, truth, plain, natural=0.0, tally=None):
    """The error is at most twice that of the plain computation in the same dtype: the rule of tests/common.c.

    A few roundings, of a result and of the float32 lse that the weights are made from, are never held against it;
    natural is the size that the result would have if its terms did not cancel. tally collects for assert_average."""
    rounding = ROUNDING[got.dtype]
    roundings = 2 if got.dtype in (torch.bfloat16, torch.float16) else 16
    got, plain, truth = (t.detach().double().cpu() for t in (got, plain, truth))
    finite = finite_of(name, got, truth)
    if not finite.any():
        return
    largest = truth[finite].abs().max().item()
    error = (got - truth)[finite].abs().max().item()
    lost = (plain - truth)[finite].abs().nan_to_num(0.0).max().item()
    # D = rowsum(dout∘out) takes out as it was rounded, in 16 bits or float32.
    floor = max(roundings * rounding * largest, max(rounding, 4 * 2**-24) * natural, 4 * 2**-24 * largest)
    assert error <= max(2 * lost, floor), f"{name}: error {error:g} of {largest:g}, allowed {2 * lost:g} and {floor:g}"
    least = rounding / 2 * max(largest, natural)
    if tally is not None and least > 0:
        tally.setdefault(name, []).append(math.log(max(error, least) / max(lost, least)))


def assert_average(tally):
    """What one comparison may be off by luck, many may not: the mean of log(error / the plain computation's)."""
    for name, logs in tally.items():
        ratio = math.exp(sum(logs) / len(logs))
        assert len(logs) < 30 or ratio < 1.5, f"{name}: {ratio:g} times the plain error on average of {len(logs)}"


def natural_lse(q, k, scale=None, bias=None):
    """The largest sum of magnitudes in a score, and 1 for the sum of weights: scores are as exact as their terms."""
    q, k = (t.detach().double().cpu().abs() for t in (q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)))
    scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    if bias is not None:
        scores = scores + exact(bias).detach().abs().nan_to_num(posinf=0.0)
    return 1 + (scores.max().item() if scores.numel() else 0.0)


def natural_out(weights, v):
    """Of out: the largest sum of magnitudes (tests/plain_attention.c has the same)."""
    v = v.detach().double().cpu().repeat_interleave(weights.shape[1] // v.shape[1], 1)
    sums = weights.detach().double().cpu() @ v.abs()
    return sums.max().item() if sums.numel() else 0.0


def natural_sizes(dy, x, weight, bias=None, gamma=None, beta=None, eps=1e-5, norm="layer"):
    """Of norm-linear's results (tests/plain_norm_linear.c has the same): the largest sums of the magnitudes of their
    terms. The terms of x̂ are x and the mean, which float32 holds with the error of a rounding."""
    dy, x, w = (exact(t).detach() for t in (dy, x, weight))
    scale = torch.ones(x.shape[-1], dtype=x.dtype) if gamma is None else exact(gamma).detach().abs()
    shift = torch.zeros_like(scale) if beta is None else exact(beta).detach().abs()
    mean = x.mean(-1, keepdim=True) if norm == "layer" else x.new_zeros(*x.shape[:-1], 1)
    rstd = torch.rsqrt(((x - mean) ** 2).mean(-1, keepdim=True) + eps)
    xhat, size = (x - mean).abs() * rstd, (x.abs() + mean.abs()) * rstd
    z, dz = size * scale + shift, dy.abs() @ w.abs()
    g = dz * scale
    dx = g + size * (g * xhat).mean(-1, keepdim=True) + xhat * (g * size).mean(-1, keepdim=True)
    dx = dx + g.mean(-1, keepdim=True) if norm == "layer" else dx
    sizes = {
        "y": z @ w.abs().T + (0.0 if bias is None else exact(bias).detach().abs()),
        "dx": rstd * dx,
        "dweight": dy.abs().T @ z,
        "dbias": dy.abs().sum(0),
        "dgamma": (dz * size).sum(0),
        "dbeta": dz.sum(0),
    }
    return {name: t.max().item() if t.numel() else 0.0 for name, t in sizes.items()}


def natural_size(dout, q, k, v, scale=None):
    """Of attention's gradients, were there no cancellation."""
    rows = dout.detach().abs().sum(-1)  # dP and D are sums over them
    largest = [t.detach().abs().max().item() if t.numel() else 0.0 for t in (rows, q, k, v)]
    scale = scale or q.shape[-1] ** -0.5
    return largest[0] * largest[3] * max(1.0, scale * largest[1], scale * largest[2])
