# SPDX-License-Identifier: Apache-2.0
"""multiprocessors=: results are right with any limit, backward hears of it, and what is none is refused."""

from __future__ import annotations

import numpy
import pytest
import torch
from conftest import devices
from torch.utils._python_dispatch import TorchDispatchMode

import heddle

LIMITS = (1, 7, 2**31 - 1)


class Limits(TorchDispatchMode):
    """What the operators of heddle are given."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        names = [argument.name for argument in func._schema.arguments]
        if func.namespace == "heddle":
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            self.seen.append((func._schema.name.removeprefix("heddle::"), given.get("multiprocessors", 0)))
        return func(*args, **(kwargs or {}))


def inputs(device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, h, 130, 64, generator=generator).to(device, dtype) for h in (4, 2, 2)]


def linear(device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(4)
    x, w = (torch.randn(shape, generator=generator) for shape in ((300, 64), (72, 64)))
    return [x.to(device, dtype), (0.1 * w).to(device, dtype)]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results(device, dtype, limit):
    """On the CPU to the bit, as there it has no meaning."""
    for run, tensors in ((heddle.attention, inputs(device, dtype)), (heddle.norm_linear, linear(device, dtype))):
        leaves = [[t.clone().requires_grad_() for t in tensors] for _ in range(2)]
        made = [run(*leaves[0]), run(*leaves[1], multiprocessors=limit)]
        grads = [torch.autograd.grad(y.square().sum(), x) for y, x in zip(made, leaves, strict=True)]
        for a, b in zip((made[0], *grads[0]), (made[1], *grads[1]), strict=True):
            if device == "cpu":
                assert torch.equal(a, b)
            else:
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(a.abs().max()))


@pytest.mark.parametrize("device", devices())
def test_backward_hears_of_it(device):
    for run, tensors in ((heddle.attention, inputs(device)), (heddle.norm_linear, linear(device))):
        leaves = [t.requires_grad_() for t in tensors]
        with Limits() as mode:
            torch.autograd.grad(run(*leaves, multiprocessors=5).sum(), leaves)
        name = run.__name__
        assert mode.seen == [(name, 5), (f"{name}_backward", 5)]
    x, w = leaves
    with Limits() as mode:
        y, z = heddle.norm_linear(x, w, return_norm=True, multiprocessors=6)
        torch.autograd.grad(y.sum() + z.sum(), leaves)
    assert mode.seen == [("norm_linear", 6), ("norm_linear_backward", 6)]


def test_arrays():
    q, k, v = (t.numpy() for t in inputs("cpu"))
    assert numpy.array_equal(heddle.attention(q, k, v, multiprocessors=3), heddle.attention(q, k, v))
    x, w = (t.numpy() for t in linear("cpu"))
    assert numpy.array_equal(heddle.norm_linear(x, w, multiprocessors=3), heddle.norm_linear(x, w))


@pytest.fixture
def jax_on_the_cpu():
    jax = pytest.importorskip("jax")
    with jax.default_device(jax.devices("cpu")[0]):
        yield jax


def test_jax(jax_on_the_cpu):
    """On the CPU, where it has no meaning."""
    jax = jax_on_the_cpu
    import heddle.jax

    q, k, v = (jax.numpy.asarray(t.numpy()) for t in inputs("cpu"))
    x, w = (jax.numpy.asarray(t.numpy()) for t in linear("cpu"))

    def loss(run, *arrays, **options):
        return (run(*arrays, **options) ** 2).sum()

    for run, arrays in ((heddle.jax.attention, (q, k, v)), (heddle.jax.norm_linear, (x, w))):
        made = [jax.grad(lambda *t, n=n, run=run: loss(run, *t, multiprocessors=n), (0, 1))(*arrays) for n in (0, 3)]
        assert all(numpy.array_equal(a, b) for a, b in zip(*made, strict=True))
        with pytest.raises(ValueError, match="multiprocessors = -1 is no integer"):
            run(*arrays, multiprocessors=-1)


@pytest.mark.parametrize("wrong", [-1, 2**31, 1.5, "3", None])
def test_refused(wrong):
    q, k, v = inputs("cpu")
    x, w = linear("cpu")
    for give in (lambda t: t, lambda t: t.numpy()):
        with pytest.raises(ValueError, match=r"multiprocessors = .* is no integer from 0 to 2147483647"):
            heddle.attention(give(q), give(k), give(v), multiprocessors=wrong)
        with pytest.raises(ValueError, match=r"multiprocessors = .* is no integer from 0 to 2147483647"):
            heddle.norm_linear(give(x), give(w), multiprocessors=wrong)
