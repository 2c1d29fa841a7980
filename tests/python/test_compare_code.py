# SPDX-License-Identifier: Apache-2.0
"""tests/gpu/compare_code.py sees a kernel that differs, is new or is gone; on images made here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from fake_cuda import NOP, build


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "gpu/compare_code.py"
    spec = importlib.util.spec_from_file_location("compare_code", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_named_modules(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those alone; one that a build lacks has kernels that are new."""
    old, new = (build(tmp_path / name, {"a": bytes([1]) * 16}, 40) for name in ("old", "new"))
    image = build(tmp_path / "more", {"b": bytes([2]) * 16}, 40) / "cuda/all.fatbin"
    image.rename(new / "cuda/more.fatbin")
    assert tool.main([str(old), str(new), "more"]) == 0
    assert "1 kernels: 0 equal, 0 different, 1 new, 0 gone" in capsys.readouterr().out
    assert tool.main([str(old), str(new), "all"]) == 0
    assert "1 kernels: 1 equal, 0 different, 0 new, 0 gone" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="neither build has a kernel of none or other"):
        tool.main([str(old), str(new), "none", "other"])


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
