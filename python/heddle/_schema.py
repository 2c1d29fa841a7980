# SPDX-License-Identifier: Apache-2.0
"""What the schemas of torch.ops.heddle.* say: positions and defaults of arguments, which C alone writes down."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from heddle import _C


def _schema(operator: str) -> Any:
    ops: Any = torch.ops
    return getattr(ops.heddle, operator).default._schema


@cache
def names(operator: str) -> tuple[str, ...]:
    """Of the arguments, in their order."""
    return tuple(argument.name for argument in _schema(operator).arguments)


@cache
def defaults(operator: str) -> dict[str, Any]:
    """By name, of the arguments that have one, in their order."""
    return {a.name: a.default_value for a in _schema(operator).arguments if a.has_default_value()}


@cache
def tensors(operator: str) -> int:
    """How many tensors lead, optional ones too."""
    kinds = [str(argument.type) for argument in _schema(operator).arguments]
    return next((at for at, kind in enumerate(kinds) if kind not in ("Tensor", "Optional[Tensor]")), len(kinds))


@cache
def numbers(forward: str) -> tuple[str, ...]:
    """The arguments of floating point: they could require a gradient, whether or not there is one."""
    fields = _C.fields(forward)
    return tuple(name for name in names(forward) if name in fields and fields[name][0] in ("dtype", "float"))


def is_made(result: Any) -> bool:
    """Of a forward operator: False for the empty tensor in the place of what nobody asked for, weights or u."""
    return bool(result.shape != (0,))


@cache
def differentiable(forward: str, operator: str) -> tuple[int, ...]:
    """Where `operator` has the arguments of which the backward of `forward` gives gradients, in their order."""
    gradients = [result.name.removeprefix("d") for result in _schema(f"{forward}_backward").returns]
    return tuple(names(operator).index(name) for name in gradients if name in names(operator))
