# SPDX-License-Identifier: Apache-2.0
"""Images of kernels without CUDA: their files, and as a program what nvcc and fatbinary do in cmake/HeddleFatbin.cmake.

fake_cuda.py nvcc|fatbinary OPTIONS. The machine code of a kernel is a hash of its module's source and of its row; each
call to make PTX adds the module's name to $FAKE_CUDA_LOG.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import sys
from pathlib import Path

NOP = bytes.fromhex("18790000000000000000000000c00f00")


def cubin(kernels: dict[str, bytes]) -> bytes:
    """An ELF file that has a section for each kernel, and one for their names."""
    texts = list(kernels.values())
    names = b"\0" + b"".join(b".text." + name.encode() + b"\0" for name in kernels)
    header, at, body, sections, place = 64, 64, b"", [struct.pack("<IIQQQQ24x", *[0] * 6)], 1
    for name, text in zip(kernels, texts, strict=True):
        sections.append(struct.pack("<IIQQQQ24x", place, 1, 0, 0, at, len(text)))
        place += len(name) + 7
        body += text
        at += len(text)
    sections.append(struct.pack("<IIQQQQ24x", 0, 3, 0, 0, at, len(names)))
    body += names
    start = bytearray(header)
    start[:4] = b"\x7fELF"
    struct.pack_into("<Q10xHHH", start, 40, header + len(body), 64, len(sections), len(sections) - 1)
    return bytes(start) + body + b"".join(sections)


def fatbin(images: dict[int, bytes]) -> bytes:
    """Of machine code by its architecture, not compressed."""
    entries = b"".join(
        struct.pack("<HHIQ", 2, 0, 64, len(payload)) + struct.pack("<I8xI", 0, arch) + bytes(32) + payload
        for arch, payload in images.items()
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def report(kernels: list[str], registers: int, arch: str) -> str:
    """What ptxas says of them."""
    return "".join(
        f"ptxas info    : Compiling entry function '{name}' for '{arch}'\n"
        "    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 1 barriers\n"
        for name in kernels
    )


def build(folder: Path, kernels: dict[str, bytes], registers: int) -> Path:
    """A build folder with an image of these kernels."""
    (folder / "cuda").mkdir(parents=True)
    (folder / "cuda/all.fatbin").write_bytes(fatbin({90: cubin(kernels)}))
    (folder / "cuda/all.ptxas").write_text(report(list(kernels), registers, "sm_90a"))
    return folder


def after(option: str, arguments: list[str]) -> Path:
    return Path(arguments[arguments.index(option) + 1])


def make_ptx(arguments: list[str]) -> None:
    """An .entry with the hash for each row of the module, and its dependencies: the one source that it includes."""
    module, ptx = Path(arguments[-1]), after("-o", arguments)
    text = module.read_text()
    *_, src = (arguments[n + 1] for n, x in enumerate(arguments) if x == "-I")
    source = Path(src) / re.findall(r'#include "(.*)"', text)[0]
    (dependencies,) = (x for x in arguments if "-MF," in x)
    target, file = re.findall(r"-M[TF],([^,]+)", dependencies)
    Path(file).write_text(f"{target}: {module} {source}\n")
    lines = [".target none"]
    for row in re.findall(r"^K\((.*)\)$", text, re.MULTILINE):
        sum_ = hashlib.sha256(source.read_bytes() + row.encode()).hexdigest()
        lines.append(".entry " + re.sub(r"\W+", "_", row) + f" {sum_}\ngriddepcontrol.wait;")
    ptx.write_text("\n".join(lines) + "\n")
    with open(os.environ["FAKE_CUDA_LOG"], "a", encoding="utf-8") as log:
        log.write(f"{module.stem}\n")


def make_cubin(arguments: list[str]) -> None:
    found = re.findall(r"^\.entry (\w+) (\w+)$", Path(arguments[-1]).read_text(), re.MULTILINE)
    (arch,) = (x.removeprefix("-arch=") for x in arguments if x.startswith("-arch="))
    after("-o", arguments).write_bytes(cubin({name: bytes.fromhex(sum_) for name, sum_ in found}))
    sys.stderr.write(report([name for name, _ in found], 40, arch))


def make_fatbin(arguments: list[str]) -> None:
    (output,) = (x.removeprefix("--create=") for x in arguments if x.startswith("--create="))
    given = re.findall(r"kind=elf,sm=(\d+)a?,file=(\S+)", " ".join(arguments))
    Path(output).write_bytes(fatbin({int(arch): Path(file).read_bytes() for arch, file in given}))


def main(program: str, *arguments: str) -> None:
    given = list(arguments)
    if program == "fatbinary":
        make_fatbin(given)
    elif "--dryrun" in given:
        sys.stderr.write("#$ _HERE_=/nowhere\n")
    elif "--version" in given:
        print("Cuda compilation tools, release 1.0, V1.0.0")
    elif "--help" in given:
        print("none")
    elif "--ptx" in given:
        make_ptx(given)
    else:
        make_cubin(given)


if __name__ == "__main__":
    main(*sys.argv[1:])
