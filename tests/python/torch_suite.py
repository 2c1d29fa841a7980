# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own tests of attention, with and without heddle.patch().

    python tests/python/torch_suite.py pytorch/test/test_transformers.py [options of pytest, such as -k AttnBias]

The file is PyTorch's, of the release at hand; the wheel has it not, and neither has this tree. It is run within
heddle.patch(); what fails is run once more without it. What fails only with heddle is a difference:
docs/compatibility.md lists those that there are, with the reasons, and any other makes this program fail.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PATCHED, REPORT = "HEDDLE_TORCH_SUITE_PATCHED", "HEDDLE_TORCH_SUITE_REPORT"

# What differs, by a regular expression of its test's name, and why. docs/compatibility.md has the same for people.
KNOWN = {
    r"::test_scaled_dot_product_attention_.*_dropout_p_0_[25]_": "dropout draws other weights from the same seed",
}

if os.environ.get(PATCHED):
    import heddle

    # For good, and before the file is imported: it takes the function by its name.
    _patch = heddle.patch()
    _patch.__enter__()


def pytest_runtest_logreport(report) -> None:
    """As a plugin of pytest: one line for each test that has run."""
    if REPORT in os.environ and (report.when == "call" or report.outcome != "passed"):
        with open(os.environ[REPORT], "a") as file:
            print(json.dumps({"name": report.nodeid, "outcome": report.outcome}), file=file)


def run(path: Path, patched: bool, options: list[str]) -> dict[str, str]:
    """Outcomes by name."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report"
        report.touch()
        paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), REPORT: str(report)}
        environment[PATCHED] = "1" if patched else ""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "torch_suite", "-p", "no:cacheprovider", *options]
        subprocess.run(command, env=environment, cwd=path.parent, check=False)
        return {line["name"]: line["outcome"] for line in map(json.loads, report.read_text().splitlines())}


def main(arguments: list[str]) -> int:
    if not arguments or not Path(arguments[0]).is_file():
        print(__doc__)
        return 2
    path = Path(arguments[0]).resolve()
    with_heddle = run(path, True, [path.name, *arguments[1:]])
    failed = [name for name, outcome in with_heddle.items() if outcome == "failed"]
    without = run(path, False, ["--tb=no", *failed]) if failed else {}
    differ = [name for name in failed if without.get(name) != "failed"]
    new = [name for name in differ if not any(re.search(pattern, name) for pattern in KNOWN)]
    for name in differ:
        reasons = [reason for pattern, reason in KNOWN.items() if re.search(pattern, name)]
        print(f"differs: {name}: {reasons[0] if reasons else 'NOT KNOWN'}")
    passed = sum(outcome == "passed" for outcome in with_heddle.values())
    print(f"{passed} passed with heddle, {len(failed)} failed, {len(failed) - len(differ)} of them without it, too")
    print(f"{len(differ) - len(new)} known differences, {len(new)} new ones")
    return 1 if new or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
