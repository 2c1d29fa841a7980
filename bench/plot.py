#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes what `./dev bench --cpu` recorded as tables into docs/kernels/cpu-measured.md.

    ./dev bench --plot [RESULTS.jsonl ...]

The tables come between the two marks, one set for each file. What the README shows is docs/figures.py's business.
"""
import argparse
import collections
import itertools
import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- tables of bench/plot.py -->\n", "<!-- end of the tables -->\n"
SECTIONS = ["attention f32", "attention 16-bit", "attention s197", "attention AVX2", "attention dropout", "attention options",
            "norm-linear", "norm-linear small", "norm-linear prepared", "decode", "two cores", "plain loops", "off the table"]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def machine(row):
    name = f"{row['cores']} cores of {row['cpu']}"
    if "family" in row:
        name += f" (family {row['family']}, model {row['model']})"
    return name


def cell(value, goal, form):
    if value is None:
        return ""
    text = form(value)
    return f"{text} ({form(goal)})" if goal is not None else text


def stem(row):
    return re.sub(r" ?(forward \+ backward|forward|backward)$", "", row["name"])


def tables(rows):
    """A line for both passes: their cells stand beside each other."""
    first = rows[-1]
    percent, times = (lambda x: f"{100 * x:.0f}%"), (lambda x: f"{x:.2f}×" if x < 20 else f"{x:.0f}×")
    out = [f"\n### {machine(first)}\n",
           f"{first['compiler']}, torch {first['torch']}, {rows[0]['isa']}. A goal stands in brackets.\n"]
    groups = collections.defaultdict(list)
    for r in rows:
        groups[r["threads"], SECTIONS.index(r["section"]), r["section"]].append(r)
    for (threads, _, section), group in sorted(groups.items()):
        last = {"attention 16-bit": "over heddle's float32", "norm-linear": "over heddle's float32",
                "norm-linear prepared": "over unprepared",
                "attention dropout": "of plain", "attention options": "of plain",
                "two cores": "over one thread", "plain loops": "over plain loops",
                "off the table": "of the neighbour"}.get(section)
        passes = list(dict.fromkeys(r["name"][len(stem(r)):].strip() for r in group if r.get("direction")))
        out += [f"\n{section}, {threads} thread{'s' if threads > 1 else ''}{', ' if passes else ''}"
                f"{' / '.join(passes)} ({group[0]['date']}, commit {group[0]['commit']}, load {group[0]['load']})\n",
                "| | ms | GFLOP/s | of peak | PyTorch's | over PyTorch |" + (f" {last} |" if last else "") + " |",
                "|---|---|---|---|---|---|" + ("---|" if last else "") + "---|"]
        for name, pair in itertools.groupby(group, stem):
            pair = list(pair)
            notes = "; ".join(dict.fromkeys(r["other"] for r in pair if r.get("other")))
            lines = []
            for r in pair:
                lines.append([f"{r['ms']:.3f}", f"{r['gflops']:.0f}" if "gflops" in r else "",
                              cell(r.get("fraction"), r.get("goal_fraction"), percent),
                              cell(r.get("torch_fraction"), None, percent),
                              cell(r.get("over_torch"), r.get("goal_over_torch"), times)])
                if last:
                    lines[-1].append(cell(r.get("over_other"), r.get("goal_over_other"), times))
                lines[-1].append(r["verdict"])
            cells = [" / ".join(v or "–" for v in x) if any(x) else "" for x in zip(*lines)]
            out.append("| " + " | ".join([name + (f" ({notes})" if notes else "")] + cells) + " |")
    return "\n".join(out) + "\n"


def main():
    parser = argparse.ArgumentParser(prog="./dev bench --plot", formatter_class=argparse.RawDescriptionHelpFormatter,
                                     description=__doc__.split("\n\n")[0])
    parser.add_argument("results", nargs="*", type=pathlib.Path, help="default: bench/results/*.jsonl with CPU rows")
    options = parser.parse_args()
    files = options.results or sorted((ROOT / "bench" / "results").glob("*.jsonl"))
    recorded = [rows for rows in map(read, files) if any("section" in r for r in rows)]
    if not recorded:
        parser.error("nothing is recorded yet; ./dev bench --cpu does it")
    page = ROOT / "docs" / "kernels" / "cpu-measured.md"
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(before + BEGIN + "".join(map(tables, recorded)) + END + after)
    print(f"written: the tables of {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
