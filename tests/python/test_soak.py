# SPDX-License-Identifier: Apache-2.0
"""The memory of a process that calls PyTorch's operators stays flat (soak.py), and what grows is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("soak.py")
pytestmark = [
    pytest.mark.skipif(not os.environ.get("HEDDLE_LONG"), reason="only in long runs"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
]


def soak(*options):
    done = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_memory_is_flat():
    code, text = soak(os.environ.get("HEDDLE_SOAK_SECONDS", "100"))
    assert code == 0 and "rounds of" in text, text


def test_a_leak_is_found():
    code, text = soak("20", "--leak")
    assert code == 1 and "rounds of" in text, text
