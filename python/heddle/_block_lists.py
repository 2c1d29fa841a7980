# SPDX-License-Identifier: Apache-2.0
"""heddle.block_lists for arrays: NumPy, CuPy, JAX. That for torch tensors is in ``_torch``."""

from __future__ import annotations

import sys
from typing import Any

from heddle._errors import HeddleTypeError
from heddle._options import refuse_masked


def library_of(array: Any) -> Any:
    """The functions that make arrays of this kind: the module of NumPy or CuPy, or what the array says."""
    kind = type(array).__module__.partition(".")[0]
    if kind in ("numpy", "cupy"):
        return sys.modules[kind]
    return sys.modules["jax"].numpy if kind in ("jax", "jaxlib") else array.__array_namespace__()


def block_lists(shown: Any) -> tuple[Any, Any]:
    """See heddle.block_lists, which this is for arrays."""
    refuse_masked("shown", shown)
    if not hasattr(shown, "dtype") or str(shown.dtype) != "bool" or not 2 <= shown.ndim <= 4:
        kind = getattr(shown, "dtype", type(shown).__name__)
        raise HeddleTypeError(
            f"shown is {kind} with {getattr(shown, 'ndim', 0)} dimensions, but must be bool with 2 to 4"
        )
    xp = library_of(shown)
    shown = shown.reshape((1,) * (4 - shown.ndim) + shown.shape)
    counts = shown.sum(-1)
    ends = counts.reshape(-1).cumsum().reshape(counts.shape)
    first = ends[..., :1] - counts[..., :1] if shown.shape[2] else xp.zeros((*ends.shape[:2], 1), ends.dtype)
    # The places of those that are shown come first, in their order.
    hidden, place = ~shown.reshape(-1), xp.arange(shown.size)
    columns = xp.argsort(hidden * shown.size + place) % max(1, shown.shape[3])
    return xp.concatenate([first, ends], -1).astype("int32"), columns.astype("int32")
