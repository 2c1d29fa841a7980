# SPDX-License-Identifier: Apache-2.0
"""bench/gpu_step.py as far as it goes without a GPU: its steps on the CPU, its options, and how ./dev reaches it."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script with models that a CPU can step through, one of each kind of block."""
    spec = importlib.util.spec_from_file_location("gpu_step", ROOT / "bench/gpu_step.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VOCABULARY", 97)
    models = {"gpt": ("gpt", 64, 2, 2, 2, 2, 48), "llama": ("llama", 64, 4, 2, 2, 2, 48)}
    monkeypatch.setattr(module, "MODELS", models)
    return module


def test_steps(bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both ways train the same model: they begin with the same loss and lower it alike."""
    file = tmp_path / "rows.jsonl"
    bench.main(["--device", "cpu", "--no-compile", "--rounds", "1", "--layers", "1", "--json", str(file)])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["case"] for row in rows] == ["gpt layers 1 b2", "llama layers 1 b2"]
    out = capsys.readouterr().out
    for row in rows:
        assert row["case"] in out and row["table"] == "step" and row["gpu"] == "none"
        assert row["over"]["eager"] == row["ms"]["pytorch eager"] / row["ms"]["heddle eager"]
        (plain_first, plain_last), (first, last) = (row["losses"][f"{way} eager"] for way in ("pytorch", "heddle"))
        assert first == pytest.approx(math.log(97), abs=0.1) and first == pytest.approx(plain_first, abs=0.02)
        assert last == pytest.approx(plain_last, abs=0.02) and last < first


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_the_same_model(bench: ModuleType, name: str) -> None:
    """Loss and gradients of both ways, with weights large enough for every operation to show."""
    kind, dim, heads, kv_heads, layers, batch, length = bench.MODELS[name]
    torch.manual_seed(1)
    ours = bench.Model(kind, dim, heads, kv_heads, layers)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    theirs = copy.deepcopy(ours)
    theirs.__class__ = bench.Plain
    tokens = torch.randint(97, (batch, length + 1))
    losses = [model(tokens[:, :-1], tokens[:, 1:]) for model in (ours, theirs)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    for loss in losses:
        loss.backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--filter", "bert"], "--filter: no model's name holds bert; there are gpt, llama"),
        (["--rounds", "0"], "--rounds and --layers are 1 or more"),
        (["--device", "cpu", "--kernels", "3"], "--kernels: those of a GPU"),
        pytest.param([], "sees no GPU; --device cpu measures without one", marks=without_gpu),
    ],
)
def test_refusals(bench: ModuleType, given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        bench.main(given)
    assert error.value.code and said in capsys.readouterr().err + str(error.value.code)


def dev(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["./dev", "bench", "--gpu", *arguments]
    environment = {**os.environ, "HEDDLE_BENCH_PYTHON": sys.executable}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_help() -> None:
    """A part tells of itself where there is no GPU."""
    done = dev("step", "--help")
    assert done.returncode == 0 and "--no-compile" in done.stdout, done.stderr


@without_gpu
def test_without_gpu() -> None:
    done = dev("step", "--layers", "1")
    assert done.returncode == 1 and "bench --gpu needs a GPU" in done.stderr


def test_unknown_part() -> None:
    done = dev("stride")
    assert done.returncode == 1 and "attention, norm_linear, overhead or step" in done.stderr
