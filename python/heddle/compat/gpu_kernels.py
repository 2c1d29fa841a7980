# SPDX-License-Identifier: Apache-2.0
"""The functions of the module ``gpu_kernels`` ("Day 19" and "Day 50" of a CUDA diary): float32, 2-D, in place."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from heddle import attention
from heddle._errors import HeddleTypeError, HeddleValueError
from heddle._kinds import need_tensors
from heddle._ops import long_backward

__all__ = ["self_attention", "self_attention_backward"]

WEIGHTS_TOLERANCE = 1e-3


def _check(first: Tensor | None = None, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        need_tensors(**{name: tensor})
        first = tensor if first is None else first
        if tensor.dtype != torch.float32:
            raise HeddleTypeError(f"{name} is {tensor.dtype}, but must be torch.float32")
        if tensor.dim() != 2:
            raise HeddleValueError(f"{name} has {tensor.dim()} dimensions, but must have 2")
        if tensor.device != first.device:
            raise HeddleValueError(f"{name} is on {tensor.device}, the first tensor on {first.device}")


def _same_shape(name: str, tensor: Tensor, shape: tuple[int, int]) -> None:
    if tuple(tensor.shape) != shape:
        raise HeddleValueError(f"{name} has shape {list(tensor.shape)}, but must have {list(shape)}")


def _scale(d: int) -> float:
    if not isinstance(d, int) or d < 1:
        raise HeddleValueError(f"d = {d!r} is no positive integer")
    return 1 / math.sqrt(d)


def self_attention(input: Tensor, output: Tensor, d: int) -> None:
    """output = softmax(input·inputᵀ/√d)·input, written in place.

    Args:
        input: float32 [rows, columns], CPU or CUDA; columns from 1 to 512.
        output: the same shape, written to; must not overlap input.
        d: what the scale 1/√d is made of, nothing else.

    Raises:
        TypeError: not float32 tensors. ValueError: other ranks, shapes or devices, d < 1.

    Source: gpu_kernels.self_attention, with its faults left out.
    """
    _check(input=input, output=output)
    _same_shape("output", output, (input.shape[0], input.shape[1]))
    with torch.no_grad(), torch.autocast(input.device.type, enabled=False):
        x = input if input.stride(-1) == 1 else input.contiguous()
        output.copy_(attention(x, x, x, scale=_scale(d)))


def self_attention_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_weights: Tensor,
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    d: int,
) -> None:
    """The gradients of softmax(query·keyᵀ/√d)·value, written in place to grad_query, grad_key and grad_value.

    Args:
        grad_output: float32 [rows, columns of value], CPU or CUDA.
        query: float32 [rows, columns].
        key: float32 [key rows, columns].
        value: float32 [key rows, value columns].
        attn_weights: float32 [rows, key rows], the forward's softmax. It is computed anew; what was given must agree.
        grad_query, grad_key, grad_value: like query, key and value; written to.
        d: what the scale 1/√d is made of.

    Raises:
        TypeError: not float32 tensors. ValueError: other ranks, shapes or devices, d < 1, or attn_weights that are off
        by more than 1e-3 from softmax(query·keyᵀ/√d).

    Source: gpu_kernels.self_attention_backward, with its faults left out.
    """
    _check(
        grad_output=grad_output,
        query=query,
        key=key,
        value=value,
        attn_weights=attn_weights,
        grad_query=grad_query,
        grad_key=grad_key,
        grad_value=grad_value,
    )
    (sq, columns), (sk, dv) = query.shape, value.shape
    _same_shape("key", key, (sk, columns))
    _same_shape("grad_output", grad_output, (sq, dv))
    _same_shape("attn_weights", attn_weights, (sq, sk))
    _same_shape("grad_query", grad_query, (sq, columns))
    _same_shape("grad_key", grad_key, (sk, columns))
    _same_shape("grad_value", grad_value, (sk, dv))
    # The operators themselves: within torch.inference_mode there is no autograd to ask.
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        q, k, v = (tensor.detach().contiguous() for tensor in (query, key, value))
        scale = _scale(d)
        out, lse, weights = attention(q, k, v, scale=scale, return_lse=True, return_weights=True)
        off = (weights - attn_weights).abs().max().item() if sq and sk else 0.0
        if not off <= WEIGHTS_TOLERANCE:
            raise HeddleValueError(f"attn_weights are not softmax(query·keyᵀ/√{d}): they are off by {off:g}")
        dout, out, q, k, v = (tensor.expand(1, 1, *tensor.shape) for tensor in (grad_output, out, q, k, v))
        deterministic = torch.are_deterministic_algorithms_enabled()
        grads = long_backward(dout, None, out, lse[None, None], q, k, v, 0, scale, deterministic, 7)
        for target, grad in zip((grad_query, grad_key, grad_value), grads, strict=True):
            assert grad is not None
            target.copy_(grad[0, 0])
