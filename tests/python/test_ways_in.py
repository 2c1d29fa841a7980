# SPDX-License-Identifier: Apache-2.0
"""What holds for each way into heddle from PyTorch: no copy of a tensor, no waiting for a GPU, no graph break; and that
bench/ways_in.py times what it says."""

from __future__ import annotations

import runpy
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import devices
from torch.profiler import ProfilerActivity, profile

import heddle
import heddle.hf

B, H, S, D = 2, 4, 33, 16
COPIES = {"aten::copy_", "aten::clone", "aten::contiguous", "aten::_to_copy", "Memcpy DtoD (Device -> Device)"}


class Layer(torch.nn.Module):
    """What transformers hands on beside the tensors."""

    is_causal, config = True, None


def rows(x):
    """[b, s, h * d] as [b, h, s, d], as layers of transformers make it."""
    return x.view(B, S, H, D).transpose(1, 2)


def flexed():
    from torch.nn.attention.flex_attention import create_block_mask

    made = {}

    def attend(q, k, v):
        if q.device not in made:
            made[q.device] = create_block_mask(lambda b, h, i, j: i >= j, None, None, S, S, device=q.device)
        return heddle.flex_attention(q, k, v, None, made[q.device])

    return attend


def patched(q, k, v):
    with heddle.patch():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


FLEXED, LAYER = flexed(), Layer()
WAYS = {
    "attention": lambda q, k, v: heddle.attention(rows(q), rows(k), rows(v), causal=True),
    "scaled_dot_product_attention": lambda q, k, v: heddle.scaled_dot_product_attention(
        rows(q), rows(k), rows(v), is_causal=True
    ),
    "patch": lambda q, k, v: patched(rows(q), rows(k), rows(v)),
    "switch": lambda q, k, v: F.scaled_dot_product_attention(rows(q), rows(k), rows(v), is_causal=True),
    "flex_attention": lambda q, k, v: FLEXED(rows(q), rows(k), rows(v)),
    "flash_attn_func": lambda q, k, v: heddle.flash_attn_func(*(t.view(B, S, H, D) for t in (q, k, v)), causal=True),
    "transformers": lambda q, k, v: heddle.hf.attention_forward(LAYER, rows(q), rows(k), rows(v), None)[0],
    "packed": lambda q, k, v: heddle.flash_attn_varlen_func(
        *(t.view(B * S, H, D) for t in (q, k, v)), *(ENDS[q.device.type],) * 2, S, S, causal=True
    ),
}
ENDS = {device: torch.arange(B + 1, dtype=torch.int32, device=device) * S for device in devices()}


@pytest.fixture
def way(request):
    if request.param == "switch":
        flash = pytest.importorskip("torch.nn.attention")
        if not hasattr(flash, "activate_flash_attention_impl"):
            pytest.skip("torch has no switch")
        flash.activate_flash_attention_impl("heddle")
    yield WAYS[request.param]
    if request.param == "switch":
        flash.restore_flash_attention_impl()


def tensors(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return [torch.randn(B, S, H * D, device=device, dtype=dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_nothing_is_copied_and_nothing_waits(way, device):
    q, k, v = tensors(device)
    dout = torch.randn_like(way(q, k, v))  # the first call finds out
    cuda = [ProfilerActivity.CUDA] if device == "cuda" else []
    if cuda:
        torch.cuda.set_sync_debug_mode("error")
    try:
        with profile(activities=[ProfilerActivity.CPU, *cuda]) as profiled:
            torch.autograd.grad(way(q, k, v), (q, k, v), dout)
    finally:
        if cuda:
            torch.cuda.set_sync_debug_mode("default")
    names = {event.key for event in profiled.key_averages()}
    assert names and not names & COPIES, names & COPIES
    assert not [
        name for name in names if "Synchronize" in name and "cudaDeviceSynchronize" not in name
    ]  # the profiler's


@pytest.mark.parametrize("way", [name for name in WAYS if name != "patch"], indirect=True)
def test_no_graph_breaks(way):
    """patch() is around a graph."""
    q, k, v = tensors("cpu")
    torch._dynamo.reset()
    compiled = torch.compile(way, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(q, k, v), way(q, k, v), atol=1e-6)


# ------------------------------------------------------------------------------------------------------- the bench


BENCH = Path(__file__).resolve().parents[2] / "bench" / "ways_in.py"


GROUPS = ("function_rows", "flex_rows", "module_rows", "transformers_rows", "switch_rows", "parallel_rows")


@pytest.mark.skipif(not BENCH.exists(), reason="not in the source tree")
@pytest.mark.parametrize("group", GROUPS)
def test_what_is_timed_gives_what_the_direct_call_gives(group, monkeypatch):
    """bench/ways_in.py compares calls that compute the same."""
    pytest.importorskip(
        {"transformers_rows": "transformers", "switch_rows": "torch.nn.attention.varlen"}.get(group, "torch")
    )
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.manual_seed(0)
    rows = 1 if group == "transformers_rows" else 5  # it doubles them, and its mask is of two
    q, k, v = (torch.randn(1, 2, rows, 8) for _ in range(3))
    try:
        rows = runpy.run_path(str(BENCH))[group](q, k, v, "cpu")
        for name, (way, direct, *_) in rows.items():
            for _ in range(2):  # found out, and known
                made, truth = (result[0] if isinstance(result, tuple) else result for result in (way(), direct()))
                error = (made.float() - truth.float()).abs().max().item()
                assert made.shape == truth.shape and error < 1e-5 < truth.abs().max(), f"{name}: {error}"
    finally:
        if group == "switch_rows":
            torch.nn.attention.restore_flash_attention_impl()
        elif group == "parallel_rows":
            torch.distributed.destroy_process_group()
    if group == "flex_rows":
        assert sum(name.startswith("compiled") for name in rows) == 3
