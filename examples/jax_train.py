# SPDX-License-Identifier: Apache-2.0
"""A small causal transformer in Flax whose attention and LayerNorm+Linear are heddle's: it learns to say a text again.

python examples/jax_train.py [--steps N]; on JAX's default device. Needs flax and optax."""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import heddle.jax

TEXT = "A heddle is the part of a loom that lifts the warp threads, so that the shuttle can pass between them. " * 4


class NormLinear(nn.Module):
    """LayerNorm and Dense in one."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        k = x.shape[-1]
        gamma, beta = self.param("gamma", nn.initializers.ones, k), self.param("beta", nn.initializers.zeros, k)
        weight = self.param("weight", nn.initializers.normal(k**-0.5), (self.features, k))
        return heddle.jax.norm_linear(x, weight, gamma=gamma, beta=beta)


class Model(nn.Module):
    heads: int = 4
    width: int = 32

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(128, self.width)(tokens)
        for _ in range(2):
            q, k, v = jnp.split(NormLinear(3 * self.width)(x).reshape(*tokens.shape, self.heads, -1), 3, -1)
            slopes = 2.0 ** -jnp.arange(1, self.heads + 1)
            out = heddle.jax.attention(q, k, v, layout="bshd", causal=True, alibi_slopes=slopes)
            x = x + nn.Dense(self.width)(out.reshape(x.shape))
            x = x + nn.Dense(self.width)(nn.gelu(NormLinear(4 * self.width)(x)))
        return NormLinear(128)(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    tokens = jnp.array([ord(letter) for letter in TEXT]).reshape(4, -1)
    model, optimizer = Model(), optax.adam(3e-3)
    weights = jax.jit(model.init)(jax.random.key(0), tokens)
    state = jax.jit(optimizer.init)(weights)

    @jax.jit
    def step(weights, state):  # type: ignore[no-untyped-def]
        def loss_of(weights):  # type: ignore[no-untyped-def]
            logits = model.apply(weights, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(weights, updates), state, loss

    for number in range(steps):
        weights, state, loss = step(weights, state)
        if number % 10 == 0 or number == steps - 1:
            print(f"step {number:3d}  loss {loss:.3f}")


if __name__ == "__main__":
    main()
