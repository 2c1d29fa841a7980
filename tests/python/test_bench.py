# SPDX-License-Identifier: Apache-2.0
"""bench/gpu_step.py as far as it goes without a GPU: its steps on the CPU, its options, and how ./dev reaches it.
And the rows of all benches that time a prepared weight, and of gpu_attention.py."""

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
from typing import Any

import pytest
import torch

import heddle  # noqa: F401  (its library is measured)

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


SCRIPTS = {
    name: ["--library", "none"] if name in ("gpu_clocks", "gpu_pages") else []
    for name in ("gpu_attention", "gpu_clocks", "gpu_norm_linear", "gpu_overhead", "gpu_pages", "gpu_peaks")
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_by_themselves(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each tells of itself, and where there is nothing to measure says so before it makes anything."""
    bench = script(name, monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for given, status, said in (
        (["--help"], 0, "--json"),
        (SCRIPTS[name], 1, f"{name}.py: torch {torch.__version__} sees no GPU"),
    ):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *given])
        with pytest.raises(SystemExit) as end:
            bench.main()
        told = capsys.readouterr()
        assert end.value.code == status and said in told.out + told.err


def test_peaks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 2·8192³ operations in 1.6 and 2 ms, 4 GiB read and written in 2.2 ms, and read in 1 ms at best."""
    peaks = script("gpu_peaks", monkeypatch)
    reads = [2e-3] * len(peaks.BLOCKS)
    reads[3] = 1e-3
    found, block = peaks.rates(1.6e-3, 2e-3, 2.2e-3, reads)
    assert found == {"product_tflops": {"rest": 687, "power": 550}, "read_tbs": 4.29, "copy_tbs": 3.9}
    assert block == (2048, 8) == peaks.BLOCKS[3]


def test_unknown_part() -> None:
    done = dev("stride")
    assert done.returncode == 1 and "attention, norm_linear, overhead or step" in done.stderr


# ------------------------------------------------------------------------------------------------- prepared weights


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of bench/, which finds its neighbours as it does when it is run."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module(name)


def built_library(heddle_c: ModuleType, calls: list[tuple[bool, Any]]) -> Any:
    """The library that the package has loaded, which notes its norm-linear jobs and whether they are prepared."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    library = heddle_c.Library(next(line.split()[-1] for line in lines if "libheddle.so" in line))
    made = library.norm_linear

    def noted(*given: Any, **options: Any) -> Any:
        calls.append((bool(options.get("prepared")), made(*given, **options)))
        return calls[-1][1]

    library.norm_linear = noted
    return library


def assert_same_bits(calls: list[tuple[bool, Any]]) -> None:
    """Of a prepared job and a plain one, which have run."""
    of = dict(calls)
    assert len(calls) == 2 and of.keys() == {True, False}
    assert of[True].desc.prepared_bytes == of[True].tensors["prepared"].numel() - 64 > 0
    assert not of[False].desc.features and torch.equal(of[True].tensors["y"], of[False].tensors["y"])


def test_gpu_rows_of_prepared_weights(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of each shape there is one, and it times the prepared call in turn with the plain one."""
    bench, calls = script("gpu_norm_linear", monkeypatch), []
    prepared = {case[:5] for case in bench.cases() if case[5] == "prepared"}
    assert prepared >= {(*shape, torch.bfloat16, False) for shape in bench.SHAPES + bench.FEW_ROWS}
    assert prepared >= {(*shape, torch.float32, False) for shape in bench.FEW_ROWS}
    assert len(bench.cases()) == len(set(bench.cases()))

    class Clock:
        def measure(self, regime: str, timed: list[Any]) -> list[float]:
            for call in timed:
                call()
            return [2e-6, 5e-6, 1e-6, 3e-6]  # ours, eager, linear, unprepared

    monkeypatch.setattr(bench, "DEVICE", "cpu")
    library = built_library(sys.modules["heddle_c"], calls)
    row = bench.measure(library, Clock(), 16, 64, 96, torch.float32, False, "prepared", ["rest"])
    assert_same_bits(calls)
    assert row["case"] == "m16 k64 n96 float32 prepared" and "bwd_rest" not in row
    assert row["fwd_rest"]["unprepared_us"] == 3 and row["fwd_rest"]["gain"] == 1.5
    assert "unprepared 3.00), gain 1.500" in capsys.readouterr().out


@pytest.mark.parametrize("activation", ["gelu", "silu", "swiglu", "geglu"])
def test_gpu_rows_of_activations(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed beside PyTorch's operations computes what they do, both passes."""
    bench, calls, others = script("gpu_norm_linear", monkeypatch), [], []

    class Clock:
        def measure(self, regime: str, timed: list[Any]) -> list[float]:
            others.append([call() for call in timed])
            return [2e-6, 5e-6, 1e-6]

    monkeypatch.setattr(bench, "DEVICE", "cpu")
    torch.manual_seed(0)
    library = built_library(sys.modules["heddle_c"], calls)
    bench.measure(library, Clock(), 16, 64, 96, torch.float32, False, activation, ["rest"])
    (_, job), (_, (_, theirs, _)) = calls[0], others
    for name, wanted in zip(bench.NAMES[1:], theirs, strict=True):
        torch.testing.assert_close(job.tensors[name], wanted, rtol=1e-4, atol=1e-4)


def test_cpu_rows_of_prepared_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each type's call is timed in turn with the plain one, and the tables have a column for what it gains."""
    bench, plot = script("cpu", monkeypatch), script("plot", monkeypatch)
    rows: list[dict[str, Any]] = []

    class Machine:
        def time(self, timed: dict[str, Any]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
            for call in timed.values():
                call()
            return {"h": [2e-3], "o": [3e-3], "t": [4e-3]}, {key: [1e9] for key in timed}

    class Report:
        def section(self, *title: str) -> None:
            pass

        def add(self, section: str, name: str, **row: Any) -> None:
            assert_same_bits(calls)
            calls.clear()
            rows.append({"section": section, "name": name, **row})

    calls: list[tuple[bool, Any]] = []
    machine = Machine()
    machine.heddle = built_library(sys.modules["heddle_c"], calls)  # type: ignore[attr-defined]
    bench.SECTIONS["prepared"](machine, Report(), True)
    assert [row["name"] for row in rows] == [f"{short} m16 k1024 n4096 forward" for short in ("f32", "bf16")]
    assert all(row["over_other"] == 1.5 and row["over_torch"] == 2 for row in rows)
    words = dict.fromkeys(("cpu", "compiler", "torch", "isa", "date", "commit", "verdict"), "")
    page = plot.tables([{**row, **words, "cores": 1, "load": 0, "threads": 1} for row in rows])
    assert (
        "norm-linear prepared, 1 thread, forward" in page
        and "over unprepared" in page
        and " 1.50\N{MULTIPLICATION SIGN} " in page
    )


def test_rows_of_the_command() -> None:
    """heddle bench has forwards alone of them, and what is prepared has bytes."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    folder = Path(next(line.split()[-1] for line in lines if "libheddle.so" in line)).parent
    command = os.environ.get("HEDDLE_COMMAND") or folder / "heddle"
    if not Path(command).exists():
        pytest.skip("no command is built")
    bench = [command, "bench", "--op", "norm-linear", "--json", "--no-error", "--seconds", "0", "--filter"]

    def rows_of(text: str) -> list[Any]:
        done = subprocess.run([*bench, text], capture_output=True, text=True, check=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    kept = rows_of(" prepared")
    assert all(row["option"] == "prepared" and row["prepared_bytes"] > 768 * 3072 for row in kept)
    assert {row["prepared_bytes"] for row in rows_of("[1,768] -> 3072")} == {0}
    assert [(row["m"], row["dtype"], row["pass"]) for row in kept] == [
        (2048, "f32", "forward"),
        (16, "f32", "forward"),
        (16, "bf16", "forward"),
    ]


# ----------------------------------------------------------------------------------------------- rows of gpu_attention


def test_rows_of_gpu_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has a name of its own in its table and counts what it does; every option of limits.md is one of them."""
    bench = script("gpu_attention", monkeypatch)
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    figures = importlib.import_module("figures")
    for table, rows in bench.TABLES.items():
        cases = [case for case, _ in rows()]
        names = [case.name() for case in cases]
        assert len(set(names)) == len(names), table
        for case in cases:
            seen = case.tiles() * bench.TILE**2
            assert 0 < case.pairs() <= seen and case.flops() == 2 * case.b * case.h * case.pairs() * (case.d + case.dv)
    timed = {case.name() for case, _ in bench.TABLES["options"]()}
    for base in ("B4H16/16S4096D128", "B4H32/32S4096D64", "B4H8/8S4096D256"):
        for mask, options in figures.OPTIONS.items():
            assert {f"{base}{mask}-bfloat16 {option}" for option in options} <= timed
