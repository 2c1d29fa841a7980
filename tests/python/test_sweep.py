# SPDX-License-Identifier: Apache-2.0
"""Random problems by hypothesis: options together, odd sizes, layouts; forward and backward."""

from __future__ import annotations

import pytest
import torch
from conftest import (
    assert_average,
    assert_close,
    devices,
    exact,
    natural_lse,
    natural_out,
    natural_size,
    natural_sizes,
    plain_attention,
    plain_norm_linear,
)
from hypothesis import given
from hypothesis import strategies as st

import heddle
from heddle._options import CAUSAL

sizes = st.integers(0, 40)


@st.composite
def problems(draw):
    h, group = draw(st.sampled_from([(1, 1), (4, 1), (4, 2), (6, 3), (2, 2)]))
    b, sq, sk = draw(st.integers(1, 3)), draw(sizes), draw(sizes)
    d, dv = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    torch.manual_seed(draw(st.integers(0, 10**6)))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]))

    def tensor(heads, rows, last):
        if draw(st.booleans()):
            made = torch.randn(b, rows, heads, last).to(dtype).transpose(1, 2)
        else:
            made = torch.randn(b, heads, rows, last + 3).to(dtype)[..., :last]
        return made.requires_grad_()

    options = {"causal": draw(st.sampled_from([causal for causal in CAUSAL if causal is not False]))}
    if draw(st.booleans()):
        options["window"] = (draw(st.integers(-1, 20)), draw(st.integers(-1, 20)))
    if draw(st.booleans()):
        options["softcap"] = draw(st.floats(0.5, 30))
    if draw(st.booleans()):
        options["scale"] = draw(st.floats(0.01, 1))
    shape = [n if draw(st.booleans()) else 1 for n in (b, h, sq)]
    if draw(st.booleans()):
        options["bias"] = torch.randn(*shape, sk).to(dtype).requires_grad_()
    if draw(st.booleans()):
        options["mask"] = torch.rand(*shape, sk) > draw(st.floats(0, 1))
    if draw(st.booleans()):
        options["alibi_slopes"] = torch.rand(h) / 4
    if draw(st.booleans()):
        options["sinks"] = torch.randn(h, requires_grad=True)
    if draw(st.booleans()):
        options["seqlens_k"] = torch.randint(0, sk + 1, (b,), dtype=torch.int32)
    return tensor(h, sq, d), tensor(h // group, sk, d), tensor(h // group, sk, dv), options


def on(device, value):
    """The same tensor there, with the same strides and the same need for a gradient."""
    if not isinstance(value, torch.Tensor) or device == "cpu":
        return value
    there = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return there.copy_(value.detach()).requires_grad_(value.requires_grad)


def check_attention(device, problem, tally):
    q, k, v, options = problem
    everything = {n: on(device, t) for n, t in {"q": q, "k": k, "v": v, **options}.items()}
    q, k, v, options = (*list(everything.values())[:3], dict(list(everything.items())[3:]))
    leaves = {n: t for n, t in everything.items() if isinstance(t, torch.Tensor) and t.requires_grad}
    out, lse = heddle.attention(q, k, v, return_lse=True, **options)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    exacts = {n: exact(t) for n, t in everything.items()}
    truth = plain_attention(**exacts)
    truth_grads = torch.autograd.grad(truth[0], [exacts[n] for n in leaves], exact(dout))
    plain = plain_attention(
        **{
            n: t.to(q.dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t
            for n, t in everything.items()
        }
    )
    plain_grads = torch.autograd.grad(plain[0], list(leaves.values()), dout)
    scores = natural_lse(q, k, options.get("scale"), options.get("bias"))
    assert_close("out", out, truth[0], plain[0], natural_out(truth[2], v), tally)
    assert_close("lse", lse, truth[1], plain[1], scores, tally)
    for name, a, b, c in zip(leaves, grads, truth_grads, plain_grads, strict=True):
        assert_close("d" + name, a, b, c, natural_size(dout, q, k, v, options.get("scale")), tally)


def check_norm_linear(device, m, k, n, norm, given_vectors, shift, tally):
    torch.manual_seed(m + 100 * k + 10000 * n)
    leaves = {"x": (torch.randn(m, k) + shift).requires_grad_(), "weight": torch.randn(n, k, requires_grad=True)}
    for name, size, wanted in zip(("bias", "gamma", "beta"), (n, k, k), given_vectors, strict=True):
        if wanted:
            leaves[name] = torch.randn(size, requires_grad=True)
    leaves = {name: on(device, t) for name, t in leaves.items()}
    y = heddle.norm_linear(**leaves, norm=norm)
    dy = torch.randn_like(y)
    grads = torch.autograd.grad(y, list(leaves.values()), dy)
    exacts = {name: exact(t) for name, t in leaves.items()}
    truth, plain = plain_norm_linear(**exacts, norm=norm), plain_norm_linear(**leaves, norm=norm)
    truth_grads = torch.autograd.grad(truth, list(exacts.values()), exact(dy))
    plain_grads = torch.autograd.grad(plain, list(leaves.values()), dy)
    natural = natural_sizes(dy, **leaves, norm=norm)
    assert_close("y", y, truth, plain, natural["y"], tally)
    for name, a, b, c in zip(leaves, grads, truth_grads, plain_grads, strict=True):
        assert_close("d" + name, a, b, c, natural["d" + name], tally)


# Which examples hypothesis takes, derandomised too, depends on the modules that the process has imported (it looks for
# constants in them): the bounds have to hold for all, not for the examples of one run.
@pytest.mark.parametrize("device", devices())
def test_attention(device):
    tally = {}
    given(problem=problems())(lambda problem: check_attention(device, problem, tally))()
    assert_average(tally)


@pytest.mark.parametrize("device", devices())
def test_norm_linear(device):
    tally = {}
    given(
        m=st.integers(0, 30),
        k=st.integers(1, 60),
        n=st.integers(1, 60),
        norm=st.sampled_from(["layer", "rms"]),
        given_vectors=st.lists(st.booleans(), min_size=3, max_size=3),
        shift=st.floats(-50, 50),
    )(lambda **problem: check_norm_linear(device, **problem, tally=tally))()
    assert_average(tally)
