# SPDX-License-Identifier: Apache-2.0
"""At the end of float32's range: where PyTorch's default attention is finite on the CPU, so is heddle's, and right."""

import math

import pytest
import torch
import torch.nn.functional as F

import heddle

SIZES = [(16, 5, 7), (64, 40, 300), (64, 1, 500), (128, 130, 1000), (256, 70, 129)]


def scaled(x: torch.Tensor, exponent: float) -> torch.Tensor:
    half = exponent / 2
    return x * 2.0**half * 2.0 ** (exponent - half)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_finite_where_pytorch_is(dtype: torch.dtype, causal: bool) -> None:
    torch.manual_seed(5)
    compared = 0
    for d, sq, sk in SIZES:
        most = 127 - math.ceil(math.log2(sk))
        for q_exponent, k_exponent, v_exponent in [
            (0, 0, most),
            (3, 0, most),
            (0, 40, most),
            (62, 62, 0),
            (61, 62, 100),
        ]:
            q, k = scaled(torch.randn(1, 2, sq, d), q_exponent), scaled(torch.randn(1, 2, sk, d), k_exponent)
            v = scaled(torch.rand(1, 2, sk, d) * 2 - 1, v_exponent)
            q, k, v = (x.to(dtype) for x in (q, k, v))
            o = heddle.scaled_dot_product_attention(q, k, v, is_causal=causal)
            theirs = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            right = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
            finite = theirs.isfinite()
            case = f"d {d}, {sq} x {sk}, exponents {q_exponent} {k_exponent} {v_exponent}"
            assert o[finite].isfinite().all(), case
            error = (o.double() - right)[finite].abs()
            tolerance = (2**-7 if dtype == torch.bfloat16 else 2**-16) * right.abs().max()
            assert (error <= tolerance).all(), f"{case}: off by {error.max():g} of {right.abs().max():g}"
            compared += int(finite.sum())
    assert compared > 200_000
