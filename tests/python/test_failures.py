# SPDX-License-Identifier: Apache-2.0
"""Each allocation that the extension module asks for, itself or by Python's API, fails once: a MemoryError, never a
crash, a wrong result or another error, and the next call is right."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import ctypes, os
import numpy as np
import heddle
from heddle import _C

count = ctypes.c_long.in_dll(ctypes.CDLL(None), "heddle_allocations")
q, k, v = (np.random.default_rng(seed).standard_normal((2, 5, 8)).astype("f4") for seed in range(3))
w, slopes = q[0] * 2, np.array([0.5, 0.25], "f4")
o, lse = heddle.attention(q, k, v, return_lse=True)
calls = {
    "attention": lambda: heddle.attention(q, k, v, causal=True, alibi_slopes=slopes),
    "attention_backward": lambda: heddle.attention_backward(o, q, k, v, o, lse)["dq"],
    "norm_linear": lambda: heddle.norm_linear(q, w),
    "norm_linear_backward": lambda: heddle.norm_linear_backward(q[..., :5], q, w)["dweight"],
    "info": heddle.info,
    "view": lambda: _C.view(q.__dlpack__()),
}
for name, call in calls.items():
    right, n = call(), 0
    while True:
        n += 1
        before = count.value
        os.environ["HEDDLE_FAIL_AT"] = str(before + n)
        try:
            result = call()
        except MemoryError:
            result = None
        finally:
            del os.environ["HEDDLE_FAIL_AT"]
        assert result is None or name == "view" or np.all(result == right), (name, n)
        if count.value - before < n:
            assert result is not None
            break
    assert np.all(call() == right) or name == "view", name
    print(name, n - 1)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="preloads a library")
def test_each_allocation(tmp_path):
    heddle = pytest.importorskip("heddle")
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path / "fail.so"
    source = ROOT / "tests/preload/fail.c"
    built = subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], capture_output=True)
    if built.returncode:
        pytest.skip("no C library with __libc_malloc")
    env = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "PYTHONMALLOC": "malloc",
        "HEDDLE_FAIL_IN": Path(heddle._C.__file__).name,
        "OMP_NUM_THREADS": "1",
    }
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(heddle.__file__).parents[1]), env.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {name: int(n) for name, n in map(str.split, done.stdout.splitlines())}
    assert len(counts) == 6 and min(counts.values()) > 0 and sum(counts.values()) >= 20, counts
