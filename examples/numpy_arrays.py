#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""heddle without PyTorch: NumPy's arrays, read where they lie by DLPack, and gradients by a call of one's own.

python examples/numpy_arrays.py
"""

from __future__ import annotations

import numpy as np

import heddle

rng = np.random.default_rng(0)
# [s, h, d] in memory; heddle is given [h, s, d], which is a view: nothing is copied. float64 is the reference's.
q, k, v, dout = (rng.standard_normal((50, 2, 16)).transpose(1, 0, 2) for _ in range(4))


def loss() -> float:
    return float((heddle.attention(q, k, v, causal=True) * dout).sum())


o, lse = heddle.attention(q, k, v, causal=True, return_lse=True)
dq = heddle.attention_backward(dout, q, k, v, o, lse, causal=True)["dq"]
here, sides = q[1, 30, 5], []
for step in (1e-5, -1e-5):
    q[1, 30, 5] = here + step
    sides.append(loss())
differences = (sides[0] - sides[1]) / 2e-5
print(f"{type(o).__name__} {o.shape}; dq[1,30,5] {dq[1, 30, 5]:.7f}, by differences {differences:.7f}")
assert abs(dq[1, 30, 5] - differences) < 1e-7
