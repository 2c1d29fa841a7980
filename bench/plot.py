#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws what `./dev bench --cpu` recorded, and writes its tables into docs/kernels/cpu-measured.md.

    ./dev bench --plot [RESULTS.jsonl ...]

The plot (docs/img/cpu-attention.png): float32 attention's fraction of this machine's peak by length, heddle and
PyTorch, one thread, of the first file. The tables come between the two marks in docs/kernels/cpu-measured.md, one set for each
file.
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
            "norm-linear", "decode", "two cores", "plain loops", "off the table"]
HEDDLE, TORCH = "#b3331f", "#4a6a8a"


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def machine(row):
    name = f"{row['cores']} cores of {row['cpu']}"
    if "family" in row:
        name += f" (family {row['family']}, model {row['model']})"
    return name


def draw(rows, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for r in rows if r["section"] == "attention f32" and r["threads"] == 1]
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), sharex=True, sharey=True)
    for (i, direction), (j, d) in ((a, b) for a in enumerate(("forward", "forward + backward"))
                                   for b in enumerate((64, 128))):
        axis = axes[i][j]
        for causal, line in ((False, "-"), (True, "--")):
            points = sorted((r for r in rows if (r["direction"], r["d"], r["causal"]) == (direction, d, causal)),
                            key=lambda r: r["s"])
            for key, color, name in (("fraction", HEDDLE, "heddle"), ("torch_fraction", TORCH, "PyTorch")):
                axis.plot([r["s"] for r in points], [100 * r[key] for r in points], line, color=color, marker="o",
                          markersize=4, label=f"{name}{', causal' if causal else ''}")
        axis.set_title(f"{direction}, d {d}", fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({r["s"] for r in rows}))
        axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:.0f}k")
        axis.set_ylim(0, 100)
        axis.grid(color="#dddddd", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        if j == 0:
            axis.set_ylabel("% of the FMA peak")
        if i == 1:
            axis.set_xlabel("sequence length")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(f"float32 attention on one core: {rows[0]['cpu']}, {rows[0]['isa']}, "
                    f"PyTorch {rows[0]['torch'].split('+')[0]}", fontsize=11)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"drawn: {path.relative_to(ROOT)}")


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
                                     description=__doc__.split("\n\n", 2)[0] + "\n\n" + __doc__.split("\n\n", 2)[2])
    parser.add_argument("results", nargs="*", type=pathlib.Path, help="default: bench/results/*.jsonl with CPU rows")
    options = parser.parse_args()
    files = options.results or sorted((ROOT / "bench" / "results").glob("*.jsonl"))
    recorded = [rows for rows in map(read, files) if any("section" in r for r in rows)]
    drawn = [rows for rows in recorded if any(r.get("section") == "attention f32" for r in rows)]
    if not drawn:
        parser.error("nothing is recorded yet; ./dev bench --cpu does it")
    draw(drawn[0], ROOT / "docs" / "img" / "cpu-attention.png")
    page = ROOT / "docs" / "kernels" / "cpu-measured.md"
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(before + BEGIN + "".join(map(tables, recorded)) + END + after)
    print(f"written: the tables of {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
