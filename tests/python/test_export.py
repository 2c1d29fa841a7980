# SPDX-License-Identifier: Apache-2.0
"""What torch.export and AOTInductor make of heddle's operators."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import devices

import heddle

ROOT = Path(__file__).parents[2]
everywhere = pytest.mark.parametrize("device", devices())


def calls(exported, operator):
    return [node for node in exported.graph.nodes if node.target is getattr(torch.ops.heddle, operator).default]


@everywhere
def test_export(device):
    block = heddle.nn.TransformerBlock(16, 4, 2, causal="top_left", device=device).eval()
    x = torch.randn(2, 7, 16, device=device)
    exported = torch.export.export(block, (x,), dynamic_shapes={"x": {1: torch.export.Dim("s", min=2, max=64)}})
    for s in (7, 12):
        x = torch.randn(2, s, 16, device=device)
        assert torch.allclose(exported.module()(x), block(x), atol=1e-6)
    assert len(calls(exported, "attention")) == 1 and len(calls(exported, "norm_linear")) == 4
    for node in (*calls(exported, "attention"), *calls(exported, "norm_linear")):
        # AOTInductor takes no None.
        assert all(isinstance(result, torch.Tensor) for result in node.meta["val"])


def compile_runner(program):
    """examples/run_exported.cpp, as its first lines say; the compiler that has begun with it."""
    from torch.utils import cpp_extension

    gpu = torch.cuda.is_available()
    include = [f"-I{path}" for path in cpp_extension.include_paths()]
    libraries = [part for path in cpp_extension.library_paths() for part in (f"-L{path}", f"-Wl,-rpath,{path}")]
    names = ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", *(["-ltorch_cuda"] if gpu else []), "-lc10"]
    source = ROOT / "examples/run_exported.cpp"
    compiler = os.environ.get("CXX", "c++")
    return subprocess.Popen([compiler, "-std=c++20", *include, source, "-o", program, *libraries, *names, "-ldl"])


def told(output):
    """What both programs print: the words, and the sums at the ends of the lines, which a GPU rounds in two ways."""
    lines = [line.rpartition(" ") for line in output.splitlines()]
    return [line[0] for line in lines], [float(line[2]) for line in lines]


def cuda_headers():
    """Where AOTInductor takes CUDA's headers from; without them it compiles nothing for a GPU."""
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    return home and Path(home, "include/cuda_runtime_api.h").exists()


@pytest.mark.skipif(torch.cuda.is_available() and not cuda_headers(), reason="CUDA's headers are not here")
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler")
def test_an_exported_model_runs_without_python(tmp_path, forks):
    package, program = tmp_path / "model.pt2", tmp_path / "run_exported"
    compiler = compile_runner(program)
    made = forks.run(ROOT / "examples/export_model.py", package)
    assert made.returncode == 0, made.stderr
    assert compiler.wait(timeout=600) == 0
    operators = Path(heddle.__file__).with_name("_torch_ops.so")
    ran = subprocess.run([program, package, operators], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    (words, sums), (their_words, their_sums) = told(ran.stdout), told(made.stdout)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert words == their_words and ran.stdout.count(f"tokens on {device}: sum of squares") == 2
    assert sums == pytest.approx(their_sums, rel=1e-5) and min(sums) > 1
    assert subprocess.run([program, package], capture_output=True, timeout=60).returncode == 2
