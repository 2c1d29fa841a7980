# SPDX-License-Identifier: Apache-2.0
"""heddle.jax where calls of the same shapes want gradients of other arguments: JAX traces what they share once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from jax_help import arrays_of, formulas, jax, jnp, on_the_cpu  # noqa: F401

import heddle.jax


def attention(q, k, v, bias, sinks):
    return heddle.jax.attention(q, k, v, bias=bias, sinks=sinks, return_lse=True)


def plain_attention(q, k, v, bias, sinks):
    return formulas(q, k, v, bias=bias, sinks=sinks)


def norm_linear(x, w, bias, gamma, beta, residual):
    return heddle.jax.norm_linear(x, w, bias, gamma, beta, residual=residual, activation="gelu", return_norm=True)


def plain_norm_linear(x, w, bias, gamma, beta, residual):
    mean = x.mean(-1, keepdims=True)
    z = (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * gamma + beta
    return jax.nn.gelu(z @ w.T + bias, approximate=False) + residual, z


OPERATIONS = {
    "attention": (attention, plain_attention, [(2, 4, 5, 16), (2, 2, 7, 16), (2, 2, 7, 16), (4, 5, 7), (4,)]),
    "norm_linear": (norm_linear, plain_norm_linear, [(6, 16), (9, 16), (9,), (16,), (16,), (6, 9)]),
}


def agree(made, right):
    for x, y in zip(jax.tree.leaves(made), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4 * float(jnp.abs(y).max()))


@pytest.mark.parametrize("name", OPERATIONS)
def test_subsets(name):
    """Each subset of the arguments after each other, the largest in between."""
    run, plain, shapes = OPERATIONS[name]
    args = arrays_of(*shapes)
    come = arrays_of(*(x.shape for x in plain(*args)), seed=1)
    every = tuple(range(len(args)))

    def loss(function):
        return lambda *args: sum((x * y).sum() for x, y in zip(function(*args), come, strict=True))

    right = jax.jit(jax.grad(loss(plain), every))(*args)
    for n in every[1:]:
        for wanted in itertools.islice(itertools.combinations(every, n), n - 1, None, 4):
            agree(jax.grad(loss(run), wanted)(*args), [right[x] for x in wanted])
            agree(jax.grad(loss(run), every)(*args), right)


LAYERS = {
    "eager": lambda layer: layer,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
}


@pytest.mark.parametrize("way", LAYERS)
@pytest.mark.parametrize("frozen", range(3))
def test_frozen_layers(way, frozen):
    """One layer of three like ones is not trained."""
    x, *ws = arrays_of((4, 16), (16, 16), (16, 16), (16, 16))
    ours = LAYERS[way](lambda x, w: heddle.jax.norm_linear(x, w, activation="gelu"))

    def plain(x, w):
        mean = x.mean(-1, keepdims=True)
        z = (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
        return jax.nn.gelu(z @ w.T, approximate=False)

    def loss(layer):
        def of(trained):
            y = x
            for w in [*trained[:frozen], ws[frozen], *trained[frozen:]]:
                y = layer(y, w)
            return (y**2).sum()

        return jax.grad(of)(ws[:frozen] + ws[frozen + 1 :])

    right = loss(plain)
    agree(loss(ours), right)
    agree(loss(ours), right)


@pytest.mark.parametrize("way", LAYERS)
def test_constant_memory(way):
    """Attention to itself, and then to constant keys of the same shape."""
    x, memory, w = arrays_of((1, 2, 8, 16), (1, 2, 8, 16), (16, 16))
    ours = LAYERS[way](heddle.jax.attention)

    def plain(q, k, v):
        return formulas(q, k, v)[0]

    def loss(attend):
        return jax.grad(lambda w: (attend(attend(x @ w, x @ w, x @ w), memory, memory) ** 2).sum())(w)

    right = loss(plain)
    agree(loss(ours), right)
    agree(loss(ours), right)
