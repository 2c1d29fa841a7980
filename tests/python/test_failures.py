# SPDX-License-Identifier: Apache-2.0
"""Each allocation that the extension modules ask for, themselves or by Python's API or PyTorch, fails once: an error
that tells of it, never a crash, a wrong result or another error, and the next call is right."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Each of `calls` with each of its allocations failing in turn; `errors` are those that may come of it.
LOOP = """
count = ctypes.c_long.in_dll(ctypes.CDLL(None), "heddle_allocations")
for name, call in calls.items():
    right, n = call(), 0
    while True:
        n += 1
        before = count.value
        os.environ["HEDDLE_FAIL_AT"] = str(before + n)
        try:
            result = call()
        except errors as error:
            result = None
            told = any(word in str(error) for word in ("alloc", "no memory"))
            assert isinstance(error, MemoryError) or told, (name, n, error)
        finally:
            del os.environ["HEDDLE_FAIL_AT"]
        assert result is None or name == "view" or bool((result == right).all()), (name, n)
        if count.value - before < n:
            assert result is not None
            break
    assert name == "view" or bool((call() == right).all()), name
    print(name, n - 1)
"""

ARRAYS = """
import ctypes, os
import numpy as np
import heddle
from heddle import _C

q, k, v = (np.random.default_rng(seed).standard_normal((2, 5, 8)).astype("f4") for seed in range(3))
w, slopes = q[0] * 2, np.array([0.5, 0.25], "f4")
o, lse = heddle.attention(q, k, v, return_lse=True)
prepared = heddle.norm_linear_prepare(w)
calls = {
    "attention": lambda: heddle.attention(q, k, v, causal=True, alibi_slopes=slopes),
    "attention_backward": lambda: heddle.attention_backward(o, q, k, v, o, lse)["dq"],
    "norm_linear": lambda: heddle.norm_linear(q, w),
    "norm_linear_prepare": lambda: heddle.norm_linear_prepare(w),
    "norm_linear_prepared": lambda: heddle.norm_linear(q, w, prepared=prepared),
    "norm_linear_backward": lambda: heddle.norm_linear_backward(q[..., :5], q, w)["dweight"],
    "info": lambda: np.array(heddle.info()),
    "view": lambda: _C.view(q.__dlpack__()),
}
errors = MemoryError
"""

TORCH = """
import ctypes, os
import torch
import heddle

torch.manual_seed(0)
q, k, v = (torch.randn(2, 2, 5, 8) for _ in range(3))
x, w, cache, lengths = torch.randn(5, 8), torch.randn(6, 8), torch.zeros(2, 2, 16, 8), torch.tensor([3, 5]).int()
leaf, row = q.clone().requires_grad_(), x.clone().requires_grad_()
prepared = heddle.norm_linear_prepare(w)
table, keys, values = torch.tensor([[1], [0]]).int(), *(torch.randn(2, 2, 16, 8) for _ in range(2))
slopes, scale = torch.tensor([0.5, 0.25]), torch.full((2, 2), 0.5)
eight = [pages.to(torch.float8_e4m3fn) for pages in (keys, values)]

def append():
    keys, values = cache.clone(), cache.clone()
    heddle.attention_append(keys, values, k[:, :, :1], v[:, :, :1], lengths)
    return torch.cat([keys, values])

calls = {
    "attention": lambda: heddle.attention(q, k, v, causal=True, bias=x[:, :5]),
    "attention_backward": lambda: torch.autograd.grad(heddle.attention(leaf, k, v, causal=True).sum(), leaf)[0],
    "attention_append": append,
    "pages": lambda: heddle.attention(q, keys, values, block_table=table, seqlens_k=lengths),
    "e4m3": lambda: heddle.attention(q, *eight, k_scale=scale, v_scale=scale, seqlens_k=lengths),
    "flex_attention": lambda: heddle.flex_attention(q, k, v, lambda score, b, h, i, j: score + slopes[h] * (i - j)),
    "norm_linear": lambda: heddle.norm_linear(x, w),
    "norm_linear_prepare": lambda: heddle.norm_linear_prepare(w),
    "norm_linear_prepared": lambda: heddle.norm_linear(x, w, prepared=prepared),
    "norm_linear_backward": lambda: torch.autograd.grad(heddle.norm_linear(row, w).sum(), row)[0],
}
errors = (MemoryError, RuntimeError)
"""

JAX = """
import ctypes, os
import jax
import numpy as np
import heddle.jax

q, k, v = (np.random.default_rng(seed).standard_normal((2, 2, 5, 8)).astype("f4") for seed in range(3))
x, w = q[0, 0], k[0, 0]

def of(call):
    return lambda: np.asarray(call())

def anew():
    jax.clear_caches()
    return heddle.jax.attention(q, k, v, causal=True)

calls = {
    "attention_anew": of(anew),
    "attention": of(lambda: heddle.jax.attention(q, k, v, causal=True)),
    "attention_compiled": of(lambda compiled=jax.jit(heddle.jax.attention): compiled(q, k, v)),
    "attention_backward": of(lambda: jax.grad(lambda leaf: heddle.jax.attention(leaf, k, v).sum())(q)),
    "norm_linear": of(lambda: heddle.jax.norm_linear(x, w)),
}
errors = (MemoryError, RuntimeError, ValueError)  # the last is jit's own of a handler that says so
"""

# How many calls there are, and the fewest allocations of all of them: XLA's are not the module's.
CASES = [("_C", ARRAYS, 8, 20), ("_torch_ops", TORCH, 10, 100), ("_C", JAX, 5, 8)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="preloads a library")
@pytest.mark.parametrize("module, program, calls, least", CASES)
def test_each_allocation(tmp_path, module, program, calls, least):
    heddle = pytest.importorskip("heddle")
    if module == "_torch_ops":
        pytest.importorskip("torch")
    if program == JAX:
        pytest.importorskip("jax")
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path / "fail.so"
    source = ROOT / "tests/preload/fail.c"
    built = subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], capture_output=True)
    if built.returncode:
        pytest.skip("no C library with __libc_malloc")
    (name,) = [p.name for p in Path(heddle.__file__).parent.glob(f"{module}.*so")]
    env = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "PYTHONMALLOC": "malloc",
        "HEDDLE_FAIL_IN": name,
        "OMP_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",  # XLA's allocator of a GPU's memory, which a handler asks, ends the program
    }
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(heddle.__file__).parents[1]), env.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, "-c", program + LOOP], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {name: int(n) for name, n in map(str.split, done.stdout.splitlines())}
    assert len(counts) == calls and min(counts.values()) > 0 and sum(counts.values()) >= least, counts
