#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes what `./dev bench --cpu` recorded: a table for each machine into docs/kernels/cpu-measured.md, every row of every
part into docs/cpu-rows.md, and what is slow of the options, on the machines with AMX and with AVX2 alone that were recorded
last, into docs/limits.md.

    ./dev bench --plot [--check] [RESULTS.jsonl ...]

The tables come between the two marks, one set for each file. What the README shows is docs/figures.py's business.
"""
import argparse
import collections
import itertools
import json
import math
import pathlib
import re
import statistics

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- tables of bench/plot.py -->\n", "<!-- end of the tables -->\n"
SECTIONS = ["attention f32", "attention 16-bit", "attention s197", "attention AVX2", "attention dropout", "attention options",
            "options of the report", "norm-linear", "norm-linear small", "norm-linear prepared", "decode", "two cores",
            "plain loops", "off the table"]


LEAST = 0.85  # of the plain rate; below it an option is named in docs/limits.md
WHY = {"window": "tiles of 48 or 64 queries meet keys that their band hides",
       "bias": "its bytes, which float32's backward reads twice",
       "bias and its gradient": "the same, and the bytes of the gradient",
       "softcap": "tanh; float32's backward forms the scores twice",
       "sinks": "float32's backward forms the scores twice", "ALiBi": "float32's backward forms the scores twice",
       "causal as a mask": "the mask's bytes", "dense mask": "the mask's bytes, and a comparison for each score",
       "mask of keys": "the mask's bytes", "segments": "tiles at the ends of documents",
       "large scores": "float32's backward forms the scores up to three times", "dropout": "Philox"}


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


def heading(rows, marks, more=""):
    first = rows[-1]
    return [f"\n{marks} {machine(first)}\n", f"{first['compiler']}, torch {first['torch']}, {rows[0]['isa']}.{more}\n"]


def parts(rows):
    groups = collections.defaultdict(list)
    for r in rows:
        groups[r["threads"], SECTIONS.index(r["section"]), r["section"]].append(r)
    return sorted(groups.items())


def passes_of(group):
    return list(dict.fromkeys(r["name"][len(stem(r)):].strip() for r in group if r.get("direction")))


def summary(rows):
    """A line for each part: how its rows stand beside PyTorch and beside the machine's peak."""
    out = heading(rows, "###") + [
        "| part | threads | rows | of peak, median | over PyTorch, geometric mean | least | which row that is | commit |",
        "|---|---|---|---|---|---|---|---|"]
    for (threads, _, section), group in parts(rows):
        by_pass = [[r for r in group if r["name"][len(stem(r)):].strip() == p] for p in passes_of(group)] or [group]
        peer = [[r for r in some if r.get("over_torch")] for some in by_pass]
        least = [min(some, key=lambda r: r["over_torch"]) for some in peer if some]
        peak = [[r["fraction"] for r in some if r.get("fraction") is not None] for some in by_pass]
        cells = [section, str(threads), str(len({stem(r) for r in group})),
                 " / ".join(f"{100 * statistics.median(some):.0f}%" for some in peak if some),
                 " / ".join(f"{math.exp(statistics.fmean(math.log(r['over_torch']) for r in some)):.2f}"
                            for some in peer if some),
                 " / ".join(f"{r['over_torch']:.2f}" for r in least), " / ".join(dict.fromkeys(map(stem, least))),
                 group[0]["commit"][:7]]
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out) + "\n"


def tables(rows):
    """A line for both passes: their cells stand beside each other."""
    percent, times = (lambda x: f"{100 * x:.0f}%"), (lambda x: f"{x:.2f}×" if x < 20 else f"{x:.0f}×")
    out = heading(rows, "##", " Goals are in brackets.")
    for (threads, _, section), group in parts(rows):
        last = {"attention 16-bit": "over heddle's float32", "norm-linear": "over heddle's float32",
                "norm-linear prepared": "over unprepared",
                "attention dropout": "of plain", "attention options": "of plain",
                "two cores": "over one thread", "plain loops": "over plain loops",
                "off the table": "of the neighbour"}.get(section)
        passes = passes_of(group)
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


def options_of(rows):
    """The rows of options by the instruction set that the machine takes by itself."""
    return [r for r in rows if r["section"] == "attention options" and not r["name"].startswith("avx2 ")]


def last_of(recorded, isa):
    """Of the machines that take this instruction set, the one that was recorded last."""
    mine = [rows for rows in recorded if any(r["isa"] == isa for r in options_of(rows))]
    return max(mine, key=lambda rows: max(r["date"] for r in options_of(rows)), default=None)


def slow(rows):
    """Of each option with a row below LEAST: the least fraction of the plain rate over the sizes, forward / backward."""
    of = collections.defaultdict(lambda: collections.defaultdict(list))
    mine = options_of(rows)
    for r in mine:
        if r.get("over_other") is not None:
            of[r["option"]][r["dtype"], r["direction"]].append(r["over_other"])
    kinds = [(dtype, direction) for dtype in ("f32", "bf16") for direction in ("forward", "backward")]
    least = {option: [min(found[kind]) for kind in kinds] for option, found in of.items()}
    out = [f"\n{machine(mine[0])}, one thread, {mine[0]['commit'][:7]}:\n",
           "| of the plain rate, forward / backward | float32 | bfloat16 | what it is |", "|---|---|---|---|"]
    for option, (a, b, c, d) in least.items():
        if min(a, b, c, d) < LEAST:
            out.append(f"| {option} | {a:.2f} / {b:.2f} | {c:.2f} / {d:.2f} | {WHY.get(option, '')} |")
    return "\n".join(out) + "\n\n"


def main():
    parser = argparse.ArgumentParser(prog="./dev bench --plot", formatter_class=argparse.RawDescriptionHelpFormatter,
                                     description=__doc__.split("\n\n")[0])
    parser.add_argument("results", nargs="*", type=pathlib.Path, help="default: bench/results/*.jsonl with CPU rows")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where a page is not so")
    options = parser.parse_args()
    files = options.results or sorted((ROOT / "bench" / "results").glob("*.jsonl"))
    recorded = [rows for rows in map(read, files) if any("section" in r for r in rows)]
    if not recorded:
        parser.error("nothing is recorded yet; ./dev bench --cpu does it")
    last = [rows for rows in (last_of(recorded, isa) for isa in ("amx", "avx2")) if rows]
    for name, form, some in (("kernels/cpu-measured.md", summary, recorded), ("cpu-rows.md", tables, recorded),
                             ("limits.md", slow, last)):
        page = ROOT / "docs" / name
        before, _, rest = page.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        text = before + BEGIN + "".join(map(form, some)) + END + after
        if options.check and text != page.read_text():
            parser.exit(1, f"{page.relative_to(ROOT)} has not what was recorded: ./dev bench --plot\n")
        if not options.check:
            page.write_text(text)
            print(f"written: the tables of {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
