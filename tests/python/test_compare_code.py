# SPDX-License-Identifier: Apache-2.0
"""tests/gpu/compare_code.py sees a kernel that differs, is new or is gone; on images made here."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path
from types import ModuleType

import pytest

NOP = bytes.fromhex("18790000000000000000000000c00f00")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "gpu/compare_code.py"
    spec = importlib.util.spec_from_file_location("compare_code", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def build(folder: Path, kernels: dict[str, bytes], registers: int) -> Path:
    payload = cubin(kernels)
    entry = struct.pack("<HHIQ", 2, 0, 64, len(payload)) + struct.pack("<I8xI", 0, 90) + bytes(32)
    (folder / "cuda").mkdir(parents=True)
    (folder / "cuda/all.fatbin").write_bytes(
        struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry) + len(payload)) + entry + payload
    )
    report = "".join(
        f"ptxas info    : Compiling entry function '{name}' for 'sm_90a'\n"
        "    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 1 barriers\n"
        for name in kernels
    )
    (folder / "cuda/all.ptxas").write_text(report)
    return folder


def test_every_kernel_is_compared(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same, other, another = (bytes([x]) * 32 for x in range(1, 4))
    old = build(tmp_path / "old", {"a": same, "b": other, "c": same}, 40)
    assert tool.main([str(old), str(build(tmp_path / "copy", {"a": same, "b": other, "c": same}, 40))]) == 0
    assert "3 kernels: 3 equal, 0 different, 0 new, 0 gone; 6 instructions before, 6 after" in capsys.readouterr().out
    new = build(tmp_path / "new", {"a": same, "b": another + another + NOP, "d": same}, 50)
    assert tool.main([str(old), str(new)]) == 1
    table = capsys.readouterr().out
    rows = {line.split()[0]: line.replace("|", " ").split()[1:] for line in table.splitlines()}
    assert rows["b"] == ["sm_90", "40", "16", "2", "50", "16", "4", "NO"]
    assert rows["c"] == ["sm_90", "40", "16", "2", "-", "-", "-", "gone"]
    assert rows["d"] == ["sm_90", "-", "-", "-", "50", "16", "2", "new"]
    assert "a" not in rows
    assert "3 kernels: 1 equal, 1 different, 1 new, 1 gone; 6 instructions before, 8 after" in table
    for build_folder in (old, new):  # as they lie in a library
        image = (build_folder / "cuda/all.fatbin").read_bytes()
        (build_folder / "library").write_bytes(
            b"text" + image[:4] + bytes(56) + image + bytes(8) + image[:4] + bytes(60)
        )
    assert tool.main([str(old / "library"), str(new / "library")]) == 1
    assert " sm_90 |      -      -      2 |      -      -      4 | NO" in capsys.readouterr().out
    assert tool.main(["--all", str(old), str(new)]) == 1
    assert "sm_90 |     40     16      2 |     50     16      2 | yes" in capsys.readouterr().out
