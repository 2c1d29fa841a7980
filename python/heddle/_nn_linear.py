# SPDX-License-Identifier: Apache-2.0
"""A Linear of PyTorch's and what stands around it, a norm, an activation or a residual, as one call of heddle's.

Modules whose parameters are read here are not called themselves. So that nobody is passed over, that is done only with
those that are PyTorch's own, with nobody who looks at what goes in and comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heddle._kinds import autocast_dtype
from heddle._torch import norm_linear

_goes_long = torch.compiler.is_dynamo_compiling
_watched: Any = torch.nn.modules.module._has_any_global_hook
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


def lies(weight: Tensor, *vectors: Tensor | None) -> bool:
    """Whether heddle.norm_linear takes a Linear's weight, and vectors, as they lie in memory: PyTorch takes all."""
    if not weight.is_contiguous() and (weight.stride(-1) != 1 or weight.stride(0) == 0):
        return False
    return all(vector is None or vector.is_contiguous() for vector in vectors)


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


def stays(x: Tensor, residual: Tensor) -> bool:
    """Whether a sum of residual and a Linear of x has residual's dtype, also with autocast, which leaves sums alone."""
    return x.dtype == residual.dtype and autocast_dtype(residual.device.type) in (None, residual.dtype)


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
    if residual is not None and untouched(linear, nn.Linear) and stays(x, residual):
        weight, bias = linear.weight, linear.bias
        if lies(weight, bias):
            made = norm_linear(x, weight, bias, norm="none", residual=residual)
            return made
    made = linear(x)
    return made if residual is None else residual + made
