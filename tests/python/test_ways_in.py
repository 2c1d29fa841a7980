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
import heddle.nn

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


def replaced():
    """A block and an encoder layer of PyTorch's, on heddle."""
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(H * D), nn.Linear(H * D, 24), nn.Linear(24, H * D)

        def forward(self, x):
            return x + self.down(F.gelu(self.up(self.norm(x))))

    layer = nn.TransformerEncoderLayer(H * D, H, 24, 0.0, batch_first=True, norm_first=True)
    made = nn.Sequential(Block(), layer, nn.Sequential(nn.RMSNorm(H * D), nn.Linear(H * D, H * D), nn.SiLU()))
    done = heddle.replace(made)
    assert {"0", "0.norm", "1", "2", "2.0"} <= done.swapped.keys(), done
    return made


# Their Linears without a bias where PyTorch multiplies, which copies one into its result on the CPU.
MODULES = {
    "nn.NormLinear": lambda: heddle.nn.NormLinear(H * D, 24, activation="swiglu"),
    "nn.SelfAttention": lambda: heddle.nn.SelfAttention(H * D, H, bias=False, causal=True),
    "nn.SelfAttention, a norm and fewer keys": lambda: heddle.nn.SelfAttention(H * D, H, 2, norm="rms", bias=False),
    "nn.TransformerBlock": lambda: heddle.nn.TransformerBlock(H * D, H, hidden=24, causal=True),
    "nn.MultiheadAttention": lambda: heddle.nn.MultiheadAttention(H * D, H, bias=False, batch_first=True),
    "nn.TransformerEncoderLayer": lambda: heddle.nn.TransformerEncoderLayer(
        H * D, H, 24, 0.0, "gelu", batch_first=True, norm_first=True
    ),
    "nn.LlamaBlock": lambda: heddle.nn.LlamaBlock(H * D, H, 2, hidden=24),
    "replace": replaced,
}


def through(name):
    """A module, of which there is one for each device, and its call."""
    made = {device: MODULES[name]().to(device, TYPES[device]) for device in devices()}
    if name == "nn.MultiheadAttention":
        return lambda q, k, v: made[q.device.type](*[q + k + v] * 3, need_weights=False)[0]
    return lambda q, k, v: made[q.device.type](q + k + v)


def varlen(q, k, v):
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(*(t.view(B * S, H, D) for t in (q, k, v)), *(ENDS[q.device.type],) * 2, S, S)


FLEXED, LAYER = flexed(), Layer()
TYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
ENDS = {device: torch.arange(B + 1, dtype=torch.int32, device=device) * S for device in devices()}
BY_THE_SWITCH = ("switch", "varlen_attn")
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
    "varlen_attn": varlen,
    "norm_linear": lambda q, k, v: heddle.norm_linear(q + v, k.view(B * S, H * D), activation="gelu"),
    **{name: through(name) for name in MODULES},
}


@pytest.fixture
def way(request):
    switched = request.param in BY_THE_SWITCH
    if switched:
        flash = pytest.importorskip("torch.nn.attention")
        if not hasattr(flash, "activate_flash_attention_impl"):
            pytest.skip("torch has no switch")
        flash.activate_flash_attention_impl("heddle")
    if request.param == "varlen_attn":
        pytest.importorskip("torch.nn.attention.varlen")
    yield WAYS[request.param]
    if switched:
        flash.restore_flash_attention_impl()


def tensors(device):
    return [torch.randn(B, S, H * D, device=device, dtype=TYPES[device]).requires_grad_() for _ in range(3)]


# LlamaBlock makes float32 of its positions and its own dtype of their angles: s numbers, and s * head_dim / 2.
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("way", [name for name in WAYS if name != "nn.LlamaBlock"], indirect=True)
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
