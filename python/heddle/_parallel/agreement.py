# SPDX-License-Identifier: Apache-2.0
"""What the processes of ``heddle.parallel`` compare: names of numbers, and what is said where two of them differ."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

# What all processes must have been given alike, as whole numbers; but for a seed and an offset that were drawn.
AGREED: tuple[str, ...] = (
    *("b", "h", "the rows of q", "d", "hk", "the rows of k", "dv", "the dtype"),
    *("causal", "the window's left", "the window's right", "scale", "softcap", "dropout"),
    *(
        "whether alibi_slopes are given",
        "whether sinks are given",
        "whether segments are given",
        "the lists of blocks",
        "zigzag",
        "method",
        "compare",
        "transport",
        "return_lse",
        "which of q, k, v and sinks require a gradient",
        "rng_state",
        "seed",
        "offset",
    ),
)
# And in unshard.
UNSHARDED = ("the number of dimensions", "the number of rows", "the other sizes", "the dtype of the tensor", "dim")

# Of these the numbers tell nobody anything.
_UNSHOWN = ("scale", "softcap", "dropout", "method", "compare", "transport", *AGREED[-4:-3], *UNSHARDED[2:4])


def bits_of(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def sum_of(value: Any) -> int:
    return zlib.crc32(repr(value).encode())


def difference(names: tuple[str, ...], first: Sequence[int], other: Sequence[int], kind: str, rank: int) -> str:
    """What another process has otherwise than the first of its group."""
    if first[0] or other[0]:
        return f"process {rank if other[0] else 0} of the {kind} has refused what it was given, or met one that has"
    for name, a, b in zip(names, first[1:], other[1:], strict=True):
        if a != b and not (name in ("seed", "offset") and first[1 + names.index("rng_state")]):
            shown = "" if name in _UNSHOWN else f" ({a} and {b})"
            return f"{name} is not the same on processes 0 and {rank} of the {kind}{shown}"
    return ""
