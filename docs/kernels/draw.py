#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws a step of each family of kernels into its page: drawings.txt, with the numbers of the code.

    docs/kernels/draw.py [--check]

In drawings.txt {C expression} stands for its value, {expression:FORMAT} for that in a format of Python's, {bytes:bar}
for a # for every 4 KiB; a tab goes to column 50. The expressions may use what the contract headers of src/cuda and the
headers of src/cpu define (for 16 lanes, as AVX-512 has them), and ROW(pass, dtype, dim, variant, family), the row of a
kernel of attention.def. {DIMS pass variant family} lists the head dims of its rows in bfloat16, or has a dash where
there is none. A drawing replaces what stands between the marks of its page; --check tells instead whether
that would change anything.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from pages import ROOT, arguments_of, finish, replaced  # noqa: E402

BEGIN, END = "<!-- drawn by docs/kernels/draw.py -->", "<!-- end of the drawing -->"

CUDA = """
#include "cuda/attention/family.h"
#include "cuda/attention/plain/contract.h"
#include "cuda/attention/sm80/contract.h"
#include "cuda/attention/sm90/contract.h"
#include "cuda/attention/sm90_f32/contract.h"
#include "cuda/attention/small/contract.h"
#include "cuda/host/device.h"
#include "cuda/norm_linear/family.h"
#include "cuda/norm_linear/small/contract.h"
#define ROW(pass, dtype, dim, variant, family) \\
    heddle__cuda_attention_kernels[ATTENTION_##pass##_##dtype##_d##dim##_##variant##_##family]
#define BYTES(...) heddle__cuda_shared_bytes(&ROW(__VA_ARGS__))
size_t heddle_dtype_size(heddle_dtype dtype) { /* src/api.c would bring the whole library */
    return dtype == HEDDLE_F32 ? 4 : 2;
}
"""
CPU = """
#define VL 16
#include "cpu/attention_forward.h"
#include "cpu/norm_linear_panels.h"
#include "cpu/norm_linear_strips.h"
"""
SOURCES = [str(ROOT / "src/cuda/attention/kernels.c"), str(ROOT / "src/cuda/kernels.c")]
COMMAND = [os.environ.get("CC", "cc"), "-std=gnu11", "-w", "-I", str(ROOT / "src"), "-I", str(ROOT / "include")]


def expand(expressions: list[str]) -> list[str]:
    """What the preprocessor makes of them: of src/cpu they name macros alone, and the rest takes long to compile."""
    lines = CPU + "".join(f"\n@ {each}\n" for each in expressions)
    done = subprocess.run([*COMMAND, "-E", "-P", "-"], input=lines, check=True, capture_output=True, text=True)
    return [line[2:] for line in done.stdout.splitlines() if line.startswith("@ ")]


def evaluate(expressions: list[str], backend: str) -> dict[str, float]:
    """The values of C expressions."""
    cuda = backend == "cuda"
    plain = expressions if cuda else expand(expressions)
    lines = "".join(f'    printf("%.17g\\n", (double)({each}));\n' for each in plain)
    with tempfile.TemporaryDirectory() as folder:
        source, program = pathlib.Path(folder) / "numbers.c", pathlib.Path(folder) / "numbers"
        source.write_text(f"{CUDA if cuda else ''}#include <stdio.h>\nint main(void) {{\n{lines}    return 0;\n}}\n")
        subprocess.run([*COMMAND, str(source), *(SOURCES if cuda else []), "-o", str(program), "-lm"], check=True)
        done = subprocess.run([program], check=True, capture_output=True, text=True)
    return dict(zip(expressions, map(float, done.stdout.split()), strict=True))


def shown(value: float, form: str) -> str:
    if form == "bar":
        return "#" * round(value / 4096)
    if form and form[-1] in "fg":
        return format(value, form)
    if value != int(value):
        sys.exit(f"draw.py: {value} is no whole number, and has no format")
    return format(int(value), form)


ROWS = re.compile(r"^(?:H\((\w+)|K\((\w+), bf16), (\d+), (\w+), (\w+),", re.MULTILINE)


def list_dims(text: str) -> str:
    """A drawing with its lists of head dims."""
    rows = ROWS.findall((ROOT / "src/cuda/attention/attention.def").read_text())

    def dims(place: re.Match[str]) -> str:
        found = (int(dim) for both, bf16, dim, *of in rows if [both or bf16, *of] == place[1].split())
        return ", ".join(map(str, sorted(found))) or "-"

    return re.sub(r"\{DIMS ([^{}]*)\}", dims, text)


PLACE = re.compile(r"\{([^{}]+?)(?::([^{}:]*))?\}")


def fill(text: str, values: dict[str, float]) -> str:
    """A drawing with its numbers."""
    filled = PLACE.sub(lambda place: shown(values[place[1]], place[2] or ""), text)
    return "\n".join(line.expandtabs(50).rstrip() for line in filled.strip("\n").splitlines())


def main() -> int:
    check = arguments_of(__doc__).parse_args().check
    drawings = re.split(r"^=== (\S+)\n", list_dims((HERE / "drawings.txt").read_text()), flags=re.MULTILINE)[1:]
    drawn = list(zip(drawings[::2], drawings[1::2], strict=True))
    values = {}
    for backend in ("cuda", "cpu"):
        texts = "".join(text for name, text in drawn if name.startswith(backend))
        values[backend] = evaluate(sorted({place[0] for place in PLACE.findall(texts)}), backend)
    made = {}
    for name, text in drawn:
        page = f"docs/kernels/{name}"
        made[page] = replaced((ROOT / page).read_text(), BEGIN, END, fill(text, values[name.split("-")[0]]), page)
    return finish(made, check, "docs/kernels/draw.py")


if __name__ == "__main__":
    sys.exit(main())
