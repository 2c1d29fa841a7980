# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own tests of attention within heddle.patch() (torch_suite.py), with HEDDLE_LONG and PyTorch's file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch_suite

SCRIPT = Path(__file__).with_name("torch_suite.py")
FILE = os.environ.get("HEDDLE_TORCH_SUITE")  # pytorch/test/test_transformers.py of the release at hand


def run(path, *options):
    done = subprocess.run([sys.executable, str(SCRIPT), str(path), *options], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


SMALL = """
import torch
import torch.nn.functional as F

def dropped():
    torch.manual_seed(0)
    q = torch.randn(1, 2, 8, 4)
    torch.manual_seed(1)
    got = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    torch.manual_seed(1)
    return got, F.dropout(torch.softmax(q @ q.mT / 2, -1), 0.5) @ q

def test_the_same():
    q = torch.randn(1, 2, 8, 4)
    assert torch.allclose(F.scaled_dot_product_attention(q, q, q), torch.softmax(q @ q.mT / 2, -1) @ q, atol=1e-6)

def test_fails_in_both():
    assert False

def test_scaled_dot_product_attention_of_this_with_dropout_p_0_5_():
    assert torch.allclose(*dropped(), atol=1e-6)

def test_another():
    assert torch.allclose(*dropped(), atol=1e-6)

def test_left_out():
    assert torch.allclose(*dropped(), atol=1e-6)
"""


def test_differences_are_found(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the plugins of others take longer than the tests
    path = tmp_path / "test_small.py"
    path.write_text(SMALL)
    code, text = run(path, "-k", "not left_out")
    assert code == 1 and "2 differences, 1 of them not known" in text, text
    assert "::test_another: failed, without heddle passed: NOT KNOWN" in text
    assert "with heddle: 1 passed, 3 failed, 0 skipped; 3 called heddle" in text


def test_known_differences_are_no_failure(capsys):
    def told(outcome, calls):
        return {"outcome": outcome, "calls": calls, "why": ""}

    dropout = "test_small.py::test_scaled_dot_product_attention_of_this_with_dropout_p_0_5_"
    ours = {"test_small.py::test_the_same": told("passed", 1), dropout: told("failed", 2)}
    theirs = {"test_small.py::test_the_same": told("passed", 0), dropout: told("passed", 0)}
    assert torch_suite.compare(ours, theirs) == 0
    text = capsys.readouterr().out
    assert f"differs: {dropout}: failed, without heddle passed: dropout draws other weights" in text
    assert "1 differences, 0 of them not known" in text
    del ours[dropout], theirs[dropout]
    assert torch_suite.compare(ours, theirs) == 0 and torch_suite.compare(theirs, theirs) == 1  # none called heddle


@pytest.mark.skipif(
    not os.environ.get("HEDDLE_LONG") or not FILE,
    reason="./dev test --long, with HEDDLE_TORCH_SUITE=pytorch/test/test_transformers.py",
)
def test_pytorchs_own():
    code, text = run(FILE)
    assert code == 0, text
