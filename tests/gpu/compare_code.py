# SPDX-License-Identifier: Apache-2.0
"""Is the machine code of every kernel what it was? compare_code.py [--all] OLD NEW: two folders of *.fatbin.

Prints a table of the kernels whose code differs or that are in one folder alone, with --all of every kernel, and a
line of sums. The exit status is 1 when a kernel differs or is gone. In which module a kernel lies does not matter.
Needs libzstd for compressed images, which those of build/cuda are."""

import argparse
import ctypes
import ctypes.util
import hashlib
import pathlib
import struct
import sys
from collections.abc import Iterator

FATBIN, ELF, CUBIN = 0xBA55ED50, b"\x7fELF", 2


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
    """The cubins of a fatbin, with their architectures."""
    at = 0
    while at + 16 <= len(data) and struct.unpack_from("<I", data, at)[0] == FATBIN:
        header, size = struct.unpack_from("<HQ", data, at + 6)
        entry, end = at + header, at + header + size
        while entry < end:
            kind, _, head, body = struct.unpack_from("<HHIQ", data, entry)
            compressed, arch = struct.unpack_from("<I8xI", data, entry + 16)
            whole = struct.unpack_from("<Q", data, entry + 56)[0] if head >= 64 else 0
            payload = data[entry + head : entry + head + (compressed or body)]
            if kind == CUBIN:
                yield f"sm_{arch}", payload if payload[:4] == ELF else decompress(payload, whole)
            entry += head + body
        at = end


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


def code_of(folder: pathlib.Path) -> dict[tuple[str, str], bytes]:
    files = sorted(folder.glob("*.fatbin"))
    if not files:
        sys.exit(f"compare_code.py: no *.fatbin in {folder}")
    return {
        (name, arch): text
        for file in files
        for arch, cubin in images(file.read_bytes())
        for name, text in kernels(cubin)
    }


def describe(code: bytes | None) -> str:
    return f"{len(code):7} {hashlib.sha256(code).hexdigest()[:8]}" if code else "      -        -"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true", help="also the kernels that are equal")
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path)
    options = parser.parse_args()
    old, new = code_of(options.old), code_of(options.new)
    width = max(len(name) for name, _ in old | new)
    print(f"{'kernel':{width}} | arch  | bytes and hash before | after            | equal")
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        word = "new" if before is None else "gone" if after is None else "yes" if before == after else "NO"
        if options.all or word != "yes":
            print(f"{key[0]:{width}} | {key[1]:5} | {describe(before):21} | {describe(after)} | {word}")
    equal = sum(old.get(key) == code for key, code in new.items())
    gone, added = len(old.keys() - new.keys()), len(new.keys() - old.keys())
    different = len(new) - added - equal
    print(f"{len(new)} kernels: {equal} equal, {different} different, {added} new, {gone} gone")
    return 1 if different or gone else 0


if __name__ == "__main__":
    sys.exit(main())
