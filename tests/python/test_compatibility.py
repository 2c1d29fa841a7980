# SPDX-License-Identifier: Apache-2.0
"""Architectures of transformers, right or refused by name (compatibility.py): a sample, and all with HEDDLE_LONG."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

SCRIPT = Path(__file__).with_name("compatibility.py")
# Position biases, a model that is refused, one whose layers do not say that they are causal, keys by index, sinks,
# softcap, windows, a table of classes (4.57), text with pictures, sound, layers that write their attention out, and one
# that adds to its mask.
SAMPLE = "llama t5 bloom bigbird_pegasus gpt_oss gemma2 mistral bert bart clip qwen2_vl wav2vec2-conformer "
RIGHT = "gptj gpt_neo mpt electra codegen doge"

MARKS = {
    page: tuple(f"<!-- {edge} of {of} -->" for edge in ("begin", "end"))
    for page, of in (
        ("architectures.md", f"transformers {transformers.__version__}"),
        ("compatibility.md", "continuous batching"),
    )
}


def run(*options, env=None):
    done = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_of(page, folder):
    """What stands in front of the table of this version, and behind it; the table is taken out."""
    text = (SCRIPT.parents[2] / "docs" / page).read_text()
    first, last = MARKS[page]
    before, rest = text.split(first) if first in text else (text.rstrip() + "\n\n", f"{last}\n")
    rest = rest.split(last)[1]
    (folder / page).write_text(f"{before}{first}\n{last}{rest}")
    return before + first, last + rest


def written(page, folder, around):
    """The table that has been put there, and nothing else is another."""
    text = (folder / page).read_text()
    assert text.startswith(around[0]) and text.endswith(around[1])
    return text[len(around[0]) : -len(around[1])]


def test_sample(tmp_path):
    around = copy_of("architectures.md", tmp_path)
    text = run("--only", (SAMPLE + RIGHT).replace(" ", ","), "--write", str(tmp_path))
    table = written("architectures.md", tmp_path, around)
    assert all(f"| {name} |" in table for name in RIGHT.split()), table
    for name in SAMPLE.split():
        assert f"{name}: right" in text or f"{name}: refused" in text, text
    for name in RIGHT.split():
        assert f"{name}: right" in text, text
    assert "llama: right" in text and "bloom: refused" in text


@pytest.mark.skipif(not os.environ.get("HEDDLE_LONG"), reason="./dev test --long")
def test_every_architecture():
    run()


@pytest.mark.skipif(not os.environ.get("HEDDLE_LONG"), reason="./dev test --long")
def test_continuous_batching(tmp_path):
    around = copy_of("compatibility.md", tmp_path)
    text = run("--batches", "--write", str(tmp_path))
    assert "| gemma2 |" in written("compatibility.md", tmp_path, around)
    assert "gemma2: right" in text and re.search(r"gptj: (right|refused by name)", text)  # from 5.24 on: right


@pytest.mark.skipif(not os.environ.get("HEDDLE_LONG"), reason="./dev test --long")
@pytest.mark.parametrize("version", ["4.57.6", "5.23.0"])
def test_another_version(version, tmp_path):
    """All that is known of transformers in another version than the one that is installed: each architecture, and the
    tests of the adapter."""
    installed = [sys.executable, "-m", "pip", "install", "-q", "--target", str(tmp_path), f"transformers=={version}"]
    done = subprocess.run(installed, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"transformers {version} is not to be had: {done.stderr.strip().splitlines()[-1:]}")
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    text = run(env=env)
    assert text.splitlines()[-1].startswith(version) and "llama: right" in text
    files = sorted(map(str, SCRIPT.parent.glob("test_hf*.py")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=SCRIPT.parent)
    assert done.returncode == 0, done.stdout
