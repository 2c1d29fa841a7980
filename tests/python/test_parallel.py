# SPDX-License-Identifier: Apache-2.0
"""heddle.parallel with 2, 3 and 4 gloo processes, and with two GPUs by NCCL, against one process: results, gradients,
bits of dropout."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import heddle.parallel
from heddle._parallel.peers import regular, runs_of

ROOT = Path(__file__).resolve().parent
WORLDS = (2, 3, 4)

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch.distributed with gloo is not there", allow_module_level=True)


def run_cases(worlds, device):
    """Of each process of each group: torch is imported once for all of them."""
    command = [sys.executable, str(ROOT / "parallel_cases.py"), *map(str, worlds)]
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    paths["HEDDLE_PARALLEL_DEVICE"] = device
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=paths, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == sum(worlds), done.stdout + done.stderr
    return lines, done.stdout


@pytest.fixture(scope="module")
def reports():
    return run_cases(WORLDS, "cpu")


@pytest.mark.parametrize("world", WORLDS)
def test_as_one_process(reports, world):
    for report in (r for r in reports[0] if r["world"] == world):
        assert not report["error"], f"process {report['rank']} of {world}:\n{report['error']}"
        assert len(report["done"]) >= 13


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus():
    for report in run_cases((2,), "cuda")[0]:
        assert not report["error"], f"process {report['rank']} of 2:\n{report['error']}"
        assert len(report["done"]) >= 13


def test_a_process_that_leaves_is_an_error(reports):
    """parallel_cases.py's last step; one that hung would keep this test from its end."""
    assert not any(r["error"] for r in reports[0])


def test_training_example(reports):
    """examples/train_long.py of two processes: the loss falls, and its curve is one process's."""
    assert "example: [0, 0]" in reports[1]
    losses = re.findall(r"(divided|one process): loss ([\d.]+) -> ([\d.]+)", reports[1])
    assert len(losses) == 2 and all(float(last) < float(first) - 0.1 for _, first, last in losses)
    assert float(re.search(r"the curves are (\S+) apart", reports[1])[1]) < 1e-4


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("h", [1, 3])
def test_what_copy_engines_are_told(b, h):
    """The rectangles of bytes hold each piece once, and nothing else, however it lies."""
    generator = torch.Generator().manual_seed(b * 10 + h)
    numbers = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    whole = numbers(b, h, 12, 5)
    by_rows = numbers(b, 12, h, 5).transpose(1, 2)
    pieces = {
        "as it is": whole,
        "runs": whole[:, :, 4:8],
        "the first heads": numbers(b, h + 2, 12, 5)[:, :h],
        "heads and runs": numbers(b, h + 2, 12, 5)[:, 1 : h + 1, 3:9],
        "rows before heads": by_rows,
        "negative": torch.complex(numbers(b, h, 12, 5), whole).conj().imag,
        "one head for all": numbers(b, 1, 12, 5).expand(b, h, 12, 5),
        "one sequence for all": numbers(1, h, 12, 5).expand(b, h, 12, 5),
        "heads before sequences": numbers(h, b, 12, 5).transpose(0, 1),
        "flat": numbers(b * h * 60),
        "bfloat16": whole.bfloat16()[:, :, 4:8],
    }
    for name, source in pieces.items():
        laid = source if source.dim() == 1 else regular(source)
        places = [torch.full_like(laid, -1, memory_format=torch.contiguous_format)]
        if source.dim() == 4:
            wide = torch.full((b, h + 1, 2, *laid.shape[2:]), -1, dtype=laid.dtype)
            places.append(wide[:, 1:, 1])
        for place in places:
            told = runs_of(place, laid)
            assert len(told) <= (1 if b == 1 or (place is places[0] and laid.is_contiguous()) else b), name
            for to, to_step, at, step, size, count in told:
                assert to_step >= size <= step
                for x in range(count):
                    ctypes.memmove(to + x * to_step, at + x * step, size)
            assert torch.equal(place, source), name
        if source.dim() == 4:
            assert (wide[:, 0] == -1).all() and (wide[:, :, 0] == -1).all(), name


def test_meshes_of_the_wrong_kind():
    with pytest.raises(TypeError, match="ProcessGroup or a DeviceMesh, not int"):
        heddle.parallel.ContextParallel(4)
    with pytest.raises(ValueError, match="method = 'rings'"):
        heddle.parallel.ContextParallel(None, method="rings")


@pytest.mark.parametrize(
    ("ring", "heads", "zigzag"), [(1, 1, True), (2, 1, True), (3, 2, True), (4, 3, False), (1, 4, True)]
)
def test_who_holds_what(ring, heads, zigzag):
    """Every piece has one holder; with zigzag every process of the ring has the same work under a causal mask."""
    parallel = object.__new__(heddle.parallel.ContextParallel)
    parallel.ring, parallel.heads, parallel.runs = ring, heads, 2 if zigzag and ring > 1 else 1
    held = [parallel.pieces_of(i, u) for i in range(ring) for u in range(heads)]
    assert sorted(piece for pieces in held for piece in pieces) == list(range(parallel.pieces))
    if zigzag:
        work = {sum(piece // heads for piece in pieces) for pieces in held}
        assert len(work) == 1
    assert torch.tensor(held).shape == (ring * heads, parallel.runs)


@pytest.fixture
def alone():
    """ContextParallel of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield heddle.parallel.ContextParallel(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


OPTIONS = {
    "plain": {},
    "causal, lse": {"causal": True, "return_lse": True},
    "bottom right, window": {"causal": "bottom_right", "window": (5, None)},
    "scale and softcap": {"scale": 0.3, "softcap": 4.0},
    "dropout": {"dropout": 0.4, "rng_state": torch.tensor([5, 7])},
    "slopes and sinks": {"alibi_slopes": torch.rand(4, dtype=torch.float64), "sinks": torch.randn(4)},
    "deterministic": {"deterministic": True, "causal": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_alone(alone, name, monkeypatch):
    """One process has nobody to ask, and gives heddle.attention's bits, and those of the way that many have."""
    options, made = OPTIONS[name], []
    whole = {key: t.float() if key in ("alibi_slopes", "sinks") else t for key, t in options.items()}
    tensors = [torch.randn(2, heads, 9, 8) for heads in (4, 2, 2)]
    for attend, given in ((alone.attention, options), (heddle.attention, whole), (alone.attention, options)):
        wanted = [t.clone().requires_grad_() for t in tensors]
        if len(made) < 2:  # the last one as many processes do
            monkeypatch.setattr(dist, "all_gather", lambda *_, **__: pytest.fail("there is nobody to ask"))
        else:
            monkeypatch.undo()
            alone._alone = False
        out = attend(*wanted, **given)
        results = out if isinstance(out, tuple) else (out,)
        results[0].square().sum().backward()
        made.append([*results, *(t.grad for t in wanted)])
    for way in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made[0], way, strict=True))


def test_alone_refuses(alone):
    q = torch.randn(2, 4, 9, 8)
    for options, kind, message in (
        ({"causal": "left"}, ValueError, "causal"),
        ({"sinks": torch.randn(3)}, ValueError, "sinks has shape"),
        ({"alibi_slopes": torch.rand(4, requires_grad=True)}, NotImplementedError, "requires a gradient"),
        ({"k_segments": torch.zeros(2, 9, dtype=torch.int32)}, ValueError, "without q_segments"),
        ({"block_size": 64}, ValueError, "block"),
        ({"sinks": [0.0] * 4}, TypeError, "sinks must be a torch.Tensor, not list"),
        ({"sinks": torch.ones(4, dtype=torch.complex64)}, TypeError, "sinks is torch.complex64"),
        ({"alibi_slopes": torch.ones(4, dtype=torch.int64)}, TypeError, "alibi_slopes is torch.int64"),
        ({"dropout": 0.5, "rng_state": [1, 2]}, TypeError, "rng_state must be a torch.Tensor, not list"),
        ({"dropout": 0.5, "rng_state": torch.ones(2)}, TypeError, "rng_state is torch.float32"),
        ({"dropout": 0.5, "rng_state": torch.ones(3).long()}, ValueError, r"rng_state has shape \[3\]"),
    ):
        with pytest.raises(kind, match=message):
            alone.attention(q, q, q, **options)
