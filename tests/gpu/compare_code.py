# SPDX-License-Identifier: Apache-2.0
"""Is the machine code of every kernel what it was? compare_code.py [--all] OLD NEW [MODULE...]: two builds with CUDA, or
their folders of *.fatbin (build/cuda), which lie beside what ptxas reported (*.ptxas); or two libraries, without that.
With modules' names those alone. `./dev code COMMIT` makes the two.

Prints a table of the kernels whose code differs or that are in one build alone, with --all of every kernel: registers,
bytes of spills and instructions before and after. A line of sums ends it, and the exit status is 1 when a kernel
differs or is gone. In which module a kernel lies does not matter. Needs libzstd for compressed images, which those of
build/cuda are."""

import argparse
import ctypes
import ctypes.util
import pathlib
import re
import struct
import sys
from collections.abc import Iterator
from typing import NamedTuple

FATBIN, ELF, CUBIN = b"\x50\xed\x55\xba", b"\x7fELF", 2


def decompress(data: bytes, size: int) -> bytes:
    """One frame of zstd, as `nvcc --compress-mode=size` writes it."""
    name = ctypes.util.find_library("zstd")
    if name is None:
        sys.exit("compare_code.py: the images are compressed, and there is no libzstd here")
    zstd = ctypes.CDLL(name)
    zstd.ZSTD_decompress.restype = ctypes.c_size_t
    zstd.ZSTD_decompress.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    out = ctypes.create_string_buffer(size)
    if zstd.ZSTD_decompress(out, size, data, len(data)) != size:
        sys.exit("compare_code.py: an image does not decompress")
    return out.raw


def images(data: bytes) -> Iterator[tuple[str, bytes]]:
    """The cubins of a fatbin, or of those that lie in a library, with their architectures."""
    at = data.find(FATBIN)
    while at >= 0:
        version, header, size = struct.unpack_from("<HHQ", data, at + 4)
        if (version, header) != (1, 16):
            at = data.find(FATBIN, at + 4)
            continue
        entry, end = at + header, at + header + size
        while entry < end:
            kind, _, head, body = struct.unpack_from("<HHIQ", data, entry)
            compressed, arch = struct.unpack_from("<I8xI", data, entry + 16)
            whole = struct.unpack_from("<Q", data, entry + 56)[0] if head >= 64 else 0
            payload = data[entry + head : entry + head + (compressed or body)]
            if kind == CUBIN:
                yield f"sm_{arch}", payload if payload[:4] == ELF else decompress(payload, whole)
            entry += head + body
        at = data.find(FATBIN, end)


def kernels(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """The section .text.<kernel> of each kernel."""
    offset, entry, count, names = struct.unpack_from("<Q10xHHH", cubin, 40)
    sections = [struct.unpack_from("<IIQQQQ", cubin, offset + x * entry) for x in range(count)]
    strings = sections[names][4]
    for name, _, _, _, at, size in sections:
        start = strings + name
        text = cubin[start : cubin.index(b"\0", start)].decode()
        if text.startswith(".text."):
            yield text.removeprefix(".text."), cubin[at : at + size]


class Kernel(NamedTuple):
    """Its code, and what ptxas reported of it: registers and bytes of spills; None where there is no report."""

    code: bytes
    registers: int | None
    spills: int | None

    def describe(self) -> str:
        numbers = [self.registers, self.spills, instructions(self.code)]
        return " ".join(f"{'-' if x is None else x:>6}" for x in numbers)


Name = tuple[str, str]  # of a kernel, and its architecture
NOP = bytes.fromhex("1879")


def instructions(code: bytes) -> int:
    """Of 16 bytes each, without what fills the last line."""
    count = len(code) // 16
    while count and code[16 * count - 16 : 16 * count - 14] == NOP:
        count -= 1
    return count


def reports(folder: pathlib.Path) -> dict[Name, tuple[int, int]]:
    found: dict[Name, tuple[int, int]] = {}
    for file in folder.glob("*.ptxas"):
        name, spills = ("", ""), 0
        for line in file.read_text().splitlines():
            if match := re.search(r"entry function '(\w+)' for '(\w+)'", line):
                name = (match[1], match[2].rstrip("af"))
            elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
                spills = int(match[1]) + int(match[2])
            elif match := re.search(r"Used (\d+) registers", line):
                found[name] = (int(match[1]), spills)
    return found


def kernels_of(build: pathlib.Path, modules: list[str]) -> dict[Name, Kernel]:
    """A module that one of two builds lacks has kernels that are new or gone, all of them: that is no error."""
    folder = build / "cuda" if (build / "cuda").is_dir() else build
    files = sorted(folder.glob("*.fatbin")) if folder.is_dir() else [build]
    if modules:
        files = [file for file in files if file.stem in modules]
    told = reports(folder)
    found = {
        (name, arch): Kernel(text, *told.get((name, arch), (None, None)))
        for file in files
        for arch, cubin in images(file.read_bytes())
        for name, text in kernels(cubin)
    }
    if not found and not modules:
        sys.exit(f"compare_code.py: {build} has no kernels")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true", help="also the kernels that are equal")
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path)
    parser.add_argument("modules", nargs="*", metavar="module", help="of src/cuda/modules.def; default: all")
    options = parser.parse_args(arguments)
    old, new = (kernels_of(build, options.modules) for build in (options.old, options.new))
    if not old and not new:
        sys.exit(f"compare_code.py: neither build has a kernel of {' or '.join(options.modules)}")
    width = max(len(name) for name, _ in old | new)
    names, nothing = "  regs spills instrs", " ".join(["     -"] * 3)
    print(f"{'':{width}} |       | {'before':20} | after")
    print(f"{'kernel':{width}} | arch  | {names} | {names} | equal")
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        word = "new" if before is None else "gone" if after is None else "yes" if before.code == after.code else "NO"
        if options.all or word != "yes":
            cells = [x.describe() if x else nothing for x in (before, after)]
            print(f"{key[0]:{width}} | {key[1]:5} | {cells[0]} | {cells[1]} | {word}")
    both = old.keys() & new.keys()
    different = sum(old[key].code != new[key].code for key in both)
    gone, added = len(old.keys() - new.keys()), len(new.keys() - old.keys())
    print(
        f"{len(new)} kernels: {len(both) - different} equal, {different} different, {added} new, {gone} gone; "
        f"{total(old)} instructions before, {total(new)} after"
    )
    return 1 if different or gone else 0


def total(all_kernels: dict[Name, Kernel]) -> int:
    return sum(instructions(kernel.code) for kernel in all_kernels.values())


if __name__ == "__main__":
    sys.exit(main())
