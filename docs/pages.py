# SPDX-License-Identifier: Apache-2.0
"""What the programs share that make pages and pictures of docs: parts between marks, and the end, which writes them or
with --check tells which are not as they would be."""

import argparse
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


def arguments_of(doc: str | None) -> argparse.ArgumentParser:
    """The arguments of a program with this docstring, to which it may add."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if something is not as it would be")
    return parser


def replaced(text: str, begin: str, end: str, new: str, where: str) -> str:
    """A page with `new` between two marks, of which the first is there once."""
    if text.count(begin) != 1 or end not in text.split(begin)[1]:
        sys.exit(f"{where} has no place {begin}")
    before, after = text.split(begin)
    return f"{before}{begin}\n\n{new}\n\n{end}{after.split(end, 1)[1]}"


def finish(made: dict[str, str], check: bool, program: str) -> int:
    """Writes the files that are not as made, by their names in the tree, or tells which; the exit status."""
    stale = 0
    for name, text in made.items():
        path = ROOT / name
        if path.exists() and path.read_text() == text:
            continue
        stale += 1
        if not check:
            path.write_text(text)
        print(f"{name}: {f'not as {program} makes it, which has to be run' if check else 'written'}")
    return 1 if check and stale else 0
