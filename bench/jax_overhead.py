# SPDX-License-Identifier: Apache-2.0
"""What a jitted call of heddle.jax costs the host beside jax.nn.dot_product_attention, for tensors with next to nothing
to compute, and what JAX itself takes for a program that does nothing, and for one that calls a handler that does nothing (where there
is a C compiler, `cc` or CC). In turn, in one process; the least and the median
of many bursts.

python bench/jax_overhead.py            # with heddle and JAX importable; OMP_NUM_THREADS=1 leaves the threads out"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import heddle.jax


def nothing_of_a_handler(q: Any) -> dict[str, Callable[[], Any]]:
    """A jitted call of XLA to an empty handler, of heddle's operands and result."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        print("left out without a C compiler: a handler that does nothing")
        return {}
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "nothing.so"
        source = Path(__file__).with_name("jax_nothing.c")
        include = ["-I", jax.ffi.include_dir()]
        subprocess.run([compiler, "-shared", "-fPIC", "-O2", *include, str(source), "-o", str(library)], check=True)
        handler = jax.ffi.pycapsule(ctypes.CDLL(str(library)).nothing)
    platform = "CUDA" if q.device.platform == "gpu" else "cpu"
    jax.ffi.register_ffi_target("nothing", handler, platform=platform)
    run = jax.jit(lambda q, k, v: jax.ffi.ffi_call("nothing", jax.ShapeDtypeStruct(q.shape, q.dtype))(q, k, v))
    return {"a handler that does nothing, in jax.jit": lambda: run(q, q, q)}


def ways(q: Any) -> dict[str, Callable[[], Any]]:
    def gradients(attend: Callable[..., Any]) -> Callable[[], Any]:
        run = jax.jit(jax.grad(lambda q, k, v: attend(q, k, v).sum(), (0, 1, 2)))
        return lambda: run(q, q, q)[0]

    def forward(attend: Callable[..., Any]) -> Callable[[], Any]:
        run = jax.jit(attend)
        return lambda: run(q, q, q)

    def ours(q: Any, k: Any, v: Any) -> Any:
        return heddle.jax.attention(q, k, v, layout="bshd")

    nothing = jax.jit(lambda q: q + 1)
    return {
        "a program that adds 1": lambda: nothing(q),
        **nothing_of_a_handler(q),
        "heddle.jax.attention, in jax.jit": forward(ours),
        "jax.nn.dot_product_attention, in jax.jit": forward(jax.nn.dot_product_attention),
        "heddle.jax.attention, forward and backward in jax.jit": gradients(ours),
        "jax.nn.dot_product_attention, forward and backward in jax.jit": gradients(jax.nn.dot_product_attention),
        "heddle.jax.attention, not in jax.jit": lambda: ours(q, q, q),
        "jax.nn.dot_product_attention, not in jax.jit": lambda: jax.nn.dot_product_attention(q, q, q),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bursts", type=int, default=100)
    parser.add_argument("--calls", type=int, default=100, help="in a burst")
    parser.add_argument("--length", type=int, default=4)
    options = parser.parse_args()
    q = jnp.ones((1, options.length, 2, 16), jnp.float32)
    calls = ways(q)
    took: dict[str, list[float]] = {name: [] for name in calls}
    for burst in range(options.bursts + 3):  # the first ones compile
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(options.calls):
                made = call()
            made.block_until_ready()
            if burst >= 3:
                took[name].append((time.perf_counter() - start) / options.calls * 1e6)
    print(f"JAX {jax.__version__} on {jax.devices()[0]}, {q.shape}, microseconds a call")
    for name, numbers in took.items():
        print(f"{min(numbers):8.1f} least {statistics.median(numbers):8.1f} median   {name}")


if __name__ == "__main__":
    main()
