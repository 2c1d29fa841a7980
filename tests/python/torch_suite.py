# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own tests of attention, with and without heddle.patch().

    python tests/python/torch_suite.py pytorch/test/test_transformers.py [options of pytest, such as -k AttnBias]

The file is PyTorch's, of the release at hand; the wheel has it not, and neither has this tree. It is run twice, within
heddle.patch() and without it; where the test compares fused kernels with PyTorch's MATH kernel, what asks for that one
gets it: else heddle would be compared with itself. A test whose outcome is not the same in both is a difference:
docs/compatibility.md lists those that there are, with the reasons, and any other makes this program fail. It wants
pytest, expecttest and psutil.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

PATCHED, REPORT = "HEDDLE_TORCH_SUITE_PATCHED", "HEDDLE_TORCH_SUITE_REPORT"

# What differs, by a regular expression of its test's name, and why. docs/compatibility.md has the same for people.
KNOWN = {
    r"::test_scaled_dot_product_attention_.*_dropout_p_0_[25]_": "dropout draws other weights from the same seed",
    r"::test_transformerencoderlayer_subclass_": "dropout, likewise: against what torch.jit.script compiles",
}

_calls = 0  # of heddle by the test that is running
_against_math = False  # that test compares fused kernels, such as heddle's here, with PyTorch's MATH kernel

if os.environ.get(PATCHED):
    import torch

    from heddle import _sdpa

    def _math_is_wanted():
        if torch.compiler.is_compiling() or not _against_math:
            return False
        flags = torch.backends.cuda
        fused = flags.flash_sdp_enabled(), flags.mem_efficient_sdp_enabled(), flags.cudnn_sdp_enabled()
        return flags.math_sdp_enabled() and not any(fused)

    def _counted(inner):
        def count(*args, **options):
            global _calls
            if inner in (_quick, _quick_options) and _math_is_wanted():
                return NotImplemented
            out = inner(*args, **options)
            if not torch.compiler.is_compiling():
                _calls += out is not NotImplemented and type(out) is not tuple
            return out

        return count

    _quick, _quick_options, _others = _sdpa.quick, _sdpa.quick_options, _sdpa._is_pytorchs
    _sdpa.quick, _sdpa.quick_options = _counted(_quick), _counted(_quick_options)
    _sdpa.attention = _counted(_sdpa.attention)
    _sdpa._is_pytorchs = lambda *args: _math_is_wanted() or _others(*args)
    # For good, and before the file is imported: it takes the function by its name.
    _patch = _sdpa.patch()
    _patch.__enter__()


def pytest_runtest_setup(item) -> None:
    global _calls, _against_math
    _calls, _against_math = 0, "_vs_math" in item.name


def pytest_runtest_logreport(report) -> None:
    """As a plugin of pytest: one line for each test that has run."""
    if REPORT in os.environ and (report.when == "call" or report.outcome != "passed"):
        why = report.longrepr[2] if report.outcome == "skipped" and isinstance(report.longrepr, tuple) else ""
        line = {"name": report.nodeid, "outcome": report.outcome, "calls": _calls, "why": why}
        with open(os.environ[REPORT], "a") as file:
            print(json.dumps(line), file=file)


def run(path: Path, patched: bool, options: list[str]) -> dict[str, dict]:
    """What the plugin has told of each test, by name."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report"
        report.touch()
        paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), REPORT: str(report)}
        environment[PATCHED] = "1" if patched else ""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "torch_suite", "-p", "no:cacheprovider", "--tb=short"]
        subprocess.run([*command, path.name, *options], env=environment, cwd=path.parent, check=False)
        return {line["name"]: line for line in map(json.loads, report.read_text().splitlines())}


def counts(tests: dict[str, dict]) -> str:
    outcomes = Counter(test["outcome"] for test in tests.values())
    return ", ".join(f"{outcomes[word]} {word}" for word in ("passed", "failed", "skipped"))


def compare(with_heddle: dict[str, dict], without: dict[str, dict]) -> int:
    """Prints what differs; the exit status."""
    new = differ = 0
    for name in sorted(with_heddle | without):
        ours, theirs = (tests.get(name, {"outcome": "missing"})["outcome"] for tests in (with_heddle, without))
        if ours == theirs:
            continue
        reasons = [reason for pattern, reason in KNOWN.items() if re.search(pattern, name)]
        print(f"differs: {name}: {ours}, without heddle {theirs}: {[*reasons, 'NOT KNOWN'][0]}")
        differ += 1
        new += not reasons
    for why, count in Counter(test["why"] for test in with_heddle.values() if test["why"]).most_common():
        print(f"{count} skipped: {why}")
    reached = sum(test["calls"] > 0 for test in with_heddle.values())
    print(f"with heddle: {counts(with_heddle)}; {reached} called heddle")
    print(f"without: {counts(without)}")
    print(f"{differ} differences, {new} of them not known")
    return 1 if new or not reached else 0


def main(arguments: list[str]) -> int:
    if not arguments or not Path(arguments[0]).is_file():
        print(__doc__)
        return 2
    path = Path(arguments[0]).resolve()
    return compare(run(path, True, arguments[1:]), run(path, False, arguments[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
