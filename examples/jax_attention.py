#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""heddle in JAX: attention and a norm with its Linear under jit and grad, beside JAX's own functions.

python examples/jax_attention.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import heddle.jax

keys = jax.random.split(jax.random.key(0), 4)
q, k, v = (jax.random.normal(key, (2, 128, 4, 32)) for key in keys[:3])  # [b, s, h, d], as in jax.nn
w = jax.random.normal(keys[3], (64, 128)) / 8


def ours(q: jax.Array, k: jax.Array, v: jax.Array, w: jax.Array) -> jax.Array:
    o = heddle.jax.attention(q, k, v, layout="bshd", causal=True)
    return (heddle.jax.norm_linear(o.reshape(2, 128, 128), w, norm="rms") ** 2).mean()


def theirs(q: jax.Array, k: jax.Array, v: jax.Array, w: jax.Array) -> jax.Array:
    x = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(2, 128, 128)
    return ((x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) @ w.T) ** 2).mean()


left, right = (jax.jit(jax.grad(loss, (0, 1, 2, 3)))(q, k, v, w) for loss in (ours, theirs))
differences = [float(abs(x - y).max() / abs(y).max()) for x, y in zip(left, right, strict=True)]
print("gradients of q, k, v and w, largest difference over largest element:", *(f"{x:.0e}" for x in differences))
assert jnp.isfinite(left[0]).all() and max(differences) < 1e-3
