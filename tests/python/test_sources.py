# SPDX-License-Identifier: Apache-2.0
"""Files and functions of src/cuda are as short as docs/design.md says, and only those of ptx*.cuh have instructions."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [x for x in sorted((ROOT / "src/cuda").rglob("*")) if x.suffix in {".c", ".h", ".cu", ".cuh", ".def"}]
FILE, MEDIAN, HOST_FUNCTION, KERNEL_BODY = 500, 200, 40, 150


def functions(text: str) -> list[tuple[str, int]]:
    """Last line of its head, and number of lines from there to the } that ends it, of each that is not one line."""
    found, begin, head = [], 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if not begin and re.search(r"\) \{$", line):
            begin, head = number, line.strip()
        elif begin and line.startswith("}"):
            found.append((head, number - begin + 1))
            begin = 0
    return found


def test_length_of_files():
    lengths = {str(x.relative_to(ROOT)): len(x.read_text().splitlines()) for x in SOURCES}
    assert len(lengths) > 100
    assert statistics.median(lengths.values()) < MEDIAN
    assert {name: n for name, n in lengths.items() if n > FILE} == {}


def test_length_of_functions():
    count, long = 0, []
    for source in SOURCES:
        most = HOST_FUNCTION if source.suffix in {".c", ".h"} else KERNEL_BODY
        for head, lines in functions(source.read_text()):
            count += 1
            if lines > most:
                long.append((str(source.relative_to(ROOT)), head, lines))
    assert count > 700
    assert long == []


def test_instructions():
    asm = [str(x.relative_to(ROOT)) for x in SOURCES if re.search(r"\basm\b", x.read_text())]
    assert asm == ["src/cuda/ptx.cuh", "src/cuda/ptx90.cuh"]
