# SPDX-License-Identifier: Apache-2.0
"""`./dev code COMMIT` in a copy of the tree, with the nvcc of fake_cuda.py: what it compiles, and the table of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKE = Path(__file__).with_name("fake_cuda.py")
TOUCHED = "src/cuda/norm_linear/z.cu"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This tree as one commit."""
    tmp_path = tmp_path_factory.mktemp("code")
    if not all(shutil.which(program) for program in ("git", "cmake", "ninja", "cc")):
        pytest.skip("no git, cmake, ninja or C compiler")
    listed = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=False)
    if files.returncode:
        pytest.skip("not a clone")
    for name in filter(None, files.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "tree" / name)
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
    for command in (["init", "-q"], ["add", "-A"], [*who, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *command], cwd=tmp_path / "tree", check=True)
    for program in ("nvcc", "fatbinary"):
        (tmp_path / program).write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" {program} "$@"\n')
        (tmp_path / program).chmod(0o755)
    return tmp_path / "tree"


def code(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    beside = tree.parent
    environment = {**os.environ, "HEDDLE_BUILD_DIR": "build", "FAKE_CUDA_LOG": str(beside / "log")}
    options = [f"-DHEDDLE_NVCC={beside / 'nvcc'}", f"-DHEDDLE_FATBINARY={beside / 'fatbinary'}"]
    command = ["./dev", "code", *arguments, *options]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


def test_changes(tree: Path) -> None:
    """A changed module is compiled twice, another once, and the table has a row for each kernel that is another; for a
    changed comment nothing is compiled again."""
    with open(tree / TOUCHED, "a", encoding="utf-8") as source:
        source.write('static_assert(1, "another");\n')
    done = code(tree, "HEAD", "norm_linear_z", "attention_merge")
    assert done.returncode == 1, done.stdout + done.stderr
    assert sorted((tree.parent / "log").read_text().split()) == ["attention_merge", *["norm_linear_z"] * 2]
    rows = [line for line in done.stdout.splitlines() if line.endswith("| NO")]
    assert rows and all("norm_linear_z" in row for row in rows)
    assert f" {len(rows)} different, 0 new, 0 gone" in done.stdout.splitlines()[-1]
    subprocess.run(["git", "checkout", "-q", TOUCHED], cwd=tree, check=True)
    done = code(tree, "HEAD", "--all", "norm_linear_z", "attention_merge")
    assert done.returncode == 0 and " 0 different, 0 new, 0 gone" in done.stdout.splitlines()[-1], done.stderr
    rows = [line for line in done.stdout.splitlines() if line.endswith("| yes")]
    assert {"attention_merge" in row for row in rows} == {True, False}
    with open(tree / TOUCHED, "a", encoding="utf-8") as source:
        source.write("/* another */\n")
    done = code(tree, "HEAD", "norm_linear_z")
    assert done.returncode == 0 and " 0 different, 0 new, 0 gone" in done.stdout.splitlines()[-1], done.stderr
    assert len((tree.parent / "log").read_text().split()) == 3


def test_refusals(tree: Path) -> None:
    for given, said in (
        ((), "code takes a commit"),
        (("nothing",), "there is no commit nothing"),
        (("HEAD", "attention"), "has no module attention, now or at"),
    ):
        done = code(tree, *given)
        assert done.returncode == 1 and said in done.stderr
