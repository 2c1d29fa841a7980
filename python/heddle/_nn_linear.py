# SPDX-License-Identifier: Apache-2.0
"""A Linear of PyTorch's and what stands around it, a norm, an activation or a residual, as one call of heddle's.

Modules whose parameters are read here are not called themselves. So that nobody is passed over, that is done only with
those that are PyTorch's own, with nobody who looks at what goes in and comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heddle._kinds import autocast_dtype, is_usual
from heddle._options import LARGEST
from heddle._torch import norm_linear

_goes_long = torch.compiler.is_dynamo_compiling
_watched: Any = torch.nn.modules.module._has_any_global_hook
_PLAIN = (nn.Parameter, Tensor)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


_TRANSFORMERS = {"NewGELUActivation": "gelu_tanh", "SiLUActivation": "silu"}  # modules without attributes


def hooked(module: Any) -> bool:
    """Whether somebody looks at what goes in or comes out."""
    return any(getattr(module, kind, None) for kind in _HOOKS)


def watched() -> bool:
    """Whether somebody looks at what goes into and comes out of every module there is."""
    return not _goes_long() and _watched()


def untouched(module: Any, kind: type) -> bool:
    """Whether calling it does what its class does, and nothing else."""
    return type(module) is kind and "forward" not in vars(module) and not (hooked(module) or watched())


def _is_plain(tensor: Any) -> bool:
    """is_usual(), which takes longer."""
    return (type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested) or is_usual(tensor)


def _are_of(size: int, vectors: Sequence[Tensor | None]) -> bool:
    for vector in vectors:
        if vector is not None and not (_is_plain(vector) and vector.shape == (size,) and vector.is_contiguous()):
            return False
    return True


def lies(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether heddle.norm_linear takes a Linear's weight and bias: by what they are, their sizes and how they lie in
    memory. PyTorch takes no features, a bias of one number, a sparse weight and what else may be put there later."""
    if not _is_plain(weight) or weight.dim() != 2:
        return False
    rows, features = weight.shape
    if rows == 0 or features == 0 or not (weight.is_contiguous() or (weight.stride(1) == 1 and weight.stride(0) != 0)):
        return False
    return _are_of(rows, (bias,))


def eps_fits(norm: Any) -> bool:
    """Whether heddle takes its eps: PyTorch takes what is negative or no number, too, and a RMSNorm None."""
    eps = norm.eps
    if isinstance(eps, (float, int)) and not isinstance(eps, bool):
        return 0 <= eps <= LARGEST
    return eps is None and isinstance(norm, nn.RMSNorm)


def norm_fits(norm: Any, x: Tensor, vectors: Sequence[Tensor | None]) -> bool:
    """Whether heddle.norm_linear computes the norm of x, of weight and bias that have been read."""
    size = x.shape[-1]
    if norm.normalized_shape != (size,) or not (eps_fits(norm) and _are_of(size, vectors)):
        return False
    same = all(vector is None or vector.dtype is x.dtype for vector in vectors)
    return same or torch.is_autocast_enabled(x.device.type)


def idle(dropout: Any) -> bool:
    """Whether a Dropout gives what it is given."""
    return untouched(dropout, nn.Dropout) and not (dropout.training and dropout.p)


def activation_name(activation: Any) -> str | None:
    """What heddle.norm_linear calls it, if that knows it."""
    if activation is F.gelu:
        return "gelu"
    if activation is F.silu or untouched(activation, nn.SiLU):
        return "silu"
    if untouched(activation, nn.GELU):
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(activation.approximate)
    if not isinstance(activation, nn.Module):  # of a function's type torch 2.11 cannot compile the question
        return None
    kind = type(activation)
    if kind.__module__ == "transformers.activations" and untouched(activation, kind):
        inner = getattr(activation, "act", None)  # or GELU in Python
        if kind.__name__ == "GELUActivation":
            return "gelu" if inner is F.gelu else None
        return _TRANSFORMERS.get(kind.__name__)
    return None


def stays(x: Tensor, weight: Tensor, residual: Tensor) -> bool:
    """Whether a sum of residual and a Linear of x has residual's shape and dtype, also with autocast, which leaves sums
    alone: nothing is repeated, and nothing cast."""
    if x.dtype != residual.dtype or residual.shape != (*x.shape[:-1], weight.shape[0]):
        return False
    return autocast_dtype(residual.device.type) in (None, residual.dtype)


def activated(linear: Any, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """activation(linear(x))"""
    name = activation_name(activation)
    if name is not None and untouched(linear, nn.Linear):
        weight, bias = linear.weight, linear.bias
        if lies(weight, bias):
            fused: Tensor = norm_linear(x, weight, bias, norm="none", activation=name)
            return fused
    return activation(linear(x))


def added(linear: Any, x: Tensor, residual: Tensor | None) -> Tensor:
    """residual + linear(x)"""
    made: Tensor
    if residual is not None and untouched(linear, nn.Linear):
        weight, bias = linear.weight, linear.bias
        if lies(weight, bias) and stays(x, weight, residual):
            made = norm_linear(x, weight, bias, norm="none", residual=residual)
            return made
    made = linear(x)
    return made if residual is None else residual + made
