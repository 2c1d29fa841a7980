# SPDX-License-Identifier: Apache-2.0
"""What the tests of heddle.jax share: JAX on the CPU where nothing else is said, arrays, the formulas in jnp."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy


@pytest.fixture(autouse=True)
def on_the_cpu():
    """Where nothing else is said: what is made without a device is not put on a GPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def x64():
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


def formulas(q, k, v, *, bias=None, mask=None, sinks=None, softcap=0.0, causal=False, slopes=None):
    """(out, lse) in jnp, with jnp's own derivatives."""
    group = q.shape[1] // k.shape[1]
    k, v = jnp.repeat(k, group, 1), jnp.repeat(v, group, 1)
    t = jnp.einsum("bhid,bhjd->bhij", q, k) / q.shape[-1] ** 0.5
    t = softcap * jnp.tanh(t / softcap) if softcap else t
    i, j = jnp.arange(q.shape[2])[:, None], jnp.arange(k.shape[2])[None]
    off = k.shape[2] - q.shape[2]
    t = t if slopes is None else t - slopes[:, None, None] * jnp.abs(i + off - j)
    t = t if bias is None else t + bias
    t = t if mask is None else jnp.where(mask, t, -jnp.inf)
    t = jnp.where(j <= i + off, t, -jnp.inf) if causal else t
    if sinks is not None:
        t = jnp.concatenate([t, jnp.broadcast_to(sinks[:, None, None], (*t.shape[:3], 1))], -1)
    lse = jax.nn.logsumexp(t, -1)
    return jnp.exp(t - lse[..., None])[..., : k.shape[2]] @ v, lse


def arrays_of(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape).astype(np.float32)) for shape in shapes]
