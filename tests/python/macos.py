#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Python package for macOS on Apple's processors, which nothing here can run: that its three files are what they
should be, and that every symbol that they ask for is one that somebody there has.

macos.py BUILD: BUILD is a build by cmake/arm64-macos.cmake with -DHEDDLE_PYTHON=ON. With --wheel FILE, PyTorch's wheel
for macOS, its libtorch_cpu.dylib is asked for the operators' symbols."""

from __future__ import annotations

import argparse
import struct
import tempfile
import zipfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "python" / "src"
MAGIC, ARM64 = 0xFEEDFACF, 0x0100000C
SYMTAB, LOAD_DYLIB, LOAD_WEAK_DYLIB, ID_DYLIB = 0x2, 0xC, 0x80000018, 0xD
EXTERNAL, TYPE = 0x01, 0x0E


def commands(data: bytes) -> list[tuple[int, int]]:
    """(kind, where) of the load commands of a Mach-O file."""
    magic, kind, _, _, count = struct.unpack_from("<5I", data)
    assert (magic, kind) == (MAGIC, ARM64), f"no Mach-O file for arm64: {magic:x} {kind:x}"
    at, found = 32, []
    for _ in range(count):
        kind, size = struct.unpack_from("<2I", data, at)
        found.append((kind, at))
        at += size
    return found


def text_at(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def libraries(data: bytes) -> set[str]:
    kinds = (LOAD_DYLIB, LOAD_WEAK_DYLIB)
    return {
        text_at(data, at + struct.unpack_from("<I", data, at + 8)[0]) for kind, at in commands(data) if kind in kinds
    }


def symbols(data: bytes) -> tuple[set[str], set[str]]:
    """The external symbols that a file has, and those that it asks for."""
    here, asked = set(), set()
    for kind, at in commands(data):
        if kind == SYMTAB:
            first, count, strings = struct.unpack_from("<3I", data, at + 8)
            for x in range(count):
                name, bits = struct.unpack_from("<IB", data, first + 16 * x)
                if bits & EXTERNAL:
                    (here if bits & TYPE else asked).add(text_at(data, strings + name))
    return here, asked


def names_of(definition: str) -> set[str]:
    return {"_" + line.split()[0] for line in (SOURCE / definition).read_text().partition("EXPORTS\n")[2].splitlines()}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("build", type=Path)
    arguments.add_argument("--wheel")
    given = arguments.parse_args()
    files = {name: (given.build / name).read_bytes() for name in ("libheddle.dylib", "python/heddle/_C.abi3.so")}
    files["operators"] = (given.build / "python/heddle/_torch_ops.so").read_bytes()
    library, module, operators = (symbols(data) for data in files.values())
    optional = {
        "_torch_delete_stable_ivalue",
        "_torch_exception_get_what_without_backtrace",
        "__ZN2at13globalContextEv",
    }
    optional |= {"__ZNK2at7Context23deterministicAlgorithmsEv"}
    python, torch = names_of("python3.def"), names_of("torch_cpu.def") | optional
    system = {name for name in module[1] | operators[1] if name.startswith("_heddle_") and name in library[0]}
    left = {name for name in module[1] - python - system if name.startswith(("_Py", "__Py", "_heddle"))}
    assert not left, f"heddle._C asks for {left}"
    left = {
        name for name in operators[1] - torch - system if name.startswith(("_aoti", "_torch", "_heddle", "__ZN2at"))
    }
    assert not left, f"the operators ask for {left}"
    loads = libraries(files["operators"])
    assert {"@rpath/libtorch_cpu.dylib", "@rpath/libheddle.0.dylib"} <= loads, loads
    asked = len(module[1] & python), len(operators[1] & torch)
    print(f"heddle._C asks for {asked[0]} of Python's symbols, the operators for {asked[1]} of PyTorch's")
    if given.wheel:
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(given.wheel) as wheel:
            theirs = Path(wheel.extract("torch/lib/libtorch_cpu.dylib", folder)).read_bytes()
        missing = (operators[1] & torch) - symbols(theirs)[0]
        assert not missing, f"not in PyTorch's wheel: {missing}"
        own = [
            text_at(theirs, at + struct.unpack_from("<I", theirs, at + 8)[0])
            for kind, at in commands(theirs)
            if kind == ID_DYLIB
        ]
        assert own == ["@rpath/libtorch_cpu.dylib"], own
        print("all of them are in PyTorch's wheel")


if __name__ == "__main__":
    main()
