# SPDX-License-Identifier: Apache-2.0
"""heddle.parallel with 2, 3 and 4 gloo processes, and with two GPUs by NCCL, against one process: results, gradients,
bits of dropout."""

from __future__ import annotations

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
