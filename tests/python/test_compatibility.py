# SPDX-License-Identifier: Apache-2.0
"""Architectures of transformers, right or refused by name (compatibility.py): a sample, and all with HEDDLE_LONG."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

SCRIPT = Path(__file__).with_name("compatibility.py")
# Position biases, a model that is refused, one whose layers do not say that they are causal, keys by index, sinks,
# softcap, windows, a table of classes (4.57), text with pictures, sound, layers that write their attention out, and one
# that adds to its mask.
SAMPLE = "llama t5 bloom bigbird_pegasus gpt_oss gemma2 mistral bert bart clip qwen2_vl wav2vec2-conformer "
RIGHT = "gptj gpt_neo mpt electra codegen doge"


def run(*options):
    done = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_sample():
    text = run("--only", (SAMPLE + RIGHT).replace(" ", ","))
    for name in SAMPLE.split():
        assert f"{name}: right" in text or f"{name}: refused" in text, text
    for name in RIGHT.split():
        assert f"{name}: right" in text, text
    assert "llama: right" in text and "bloom: refused" in text


@pytest.mark.skipif(not os.environ.get("HEDDLE_LONG"), reason="./dev test --long")
def test_every_architecture():
    run()


@pytest.mark.skipif(not os.environ.get("HEDDLE_LONG"), reason="./dev test --long")
def test_continuous_batching():
    text = run("--batches")
    assert "gemma2: right" in text and re.search(r"gptj: (right|refused by name)", text)  # from 5.24 on: right
