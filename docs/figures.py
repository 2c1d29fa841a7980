#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes numbers of README.md and tables of pages in docs/, and draws pictures of speed and of a step on Hopper, from
bench/results.

    docs/figures.py [--check]

A table stands between the marks <!-- docs/figures.py: NAME --> and <!-- end --> of its page. --check changes nothing
and ends with 1 if a table or a picture is not as it would be.
"""

import json
import math
import re
import sys
import textwrap
from itertools import pairwise
from statistics import median

from draw import Picture, bars
from pages import ROOT, arguments_of, finish, replaced

sys.path.insert(0, str(ROOT / "bench"))

from gpu_options import FLOAT32_OPTIONS, OPTIONS

RESULTS = ROOT / "bench/results"
CPU = "amd-epyc-family26-model2-2cores"
PASSES = ("fwd", "bwd")
NONE = "\N{EN DASH}"
NAMES = {"heddle": "heddle", "cudnn": "cuDNN", "fa2": "FlashAttention-2", "fa3": "FlashAttention-3"}
COLORS = """
.c0 { fill: #b3331f; } .c1 { fill: #4a6a8a; } .c2 { fill: #9aa5b1; } .c3 { fill: #c9a227; }
@media (prefers-color-scheme: dark) {
.c0 { fill: #f0694f; } .c1 { fill: #6f9fd0; } .c2 { fill: #7d8590; } .c3 { fill: #d4b44a; }
}
"""

Row = dict  # as a line of bench/results has it


def read(name: str) -> list[Row]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def latest(rows: list[Row], *keys: str, **wanted: object) -> Row:
    """The last row with these values and a rate of each of these at rest."""
    found = [
        row
        for row in rows
        if all(row.get(key) == value for key, value in wanted.items()) and all(rate(row, "fwd", key) for key in keys)
    ]
    if not found:
        sys.exit(f"figures.py: bench/results has no row of {wanted} with {keys}")
    return found[-1]


def rate(row: Row, which: str, name: str, regime: str = "rest") -> float | None:
    return row.get(f"{which}_{regime}", {}).get("rate", {}).get(name)


def pair(row: Row, name: str) -> str:
    """Forward / backward."""
    return " / ".join(f"{x:.0f}" if (x := rate(row, which, name)) else NONE for which in PASSES)


def mean(factors: list[float]) -> float:
    return math.exp(sum(map(math.log, factors)) / len(factors))


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 118, break_long_words=False, break_on_hyphens=False)


# ------------------------------------------------------------------------------------------------------- the README

H200 = [  # what a row is called, and its case
    ("4k, d 64", "B4H32/32S4096D64f-bfloat16"),
    ("4k, d 128", "B4H16/16S4096D128f-bfloat16"),
    ("4k, d 256", "B4H8/8S4096D256f-bfloat16"),
    ("4k, causal, d 128", "B4H16/16S4096D128c-bfloat16"),
    ("512, causal, d 128", "B32H16/16S512D128c-bfloat16"),
]


def h200_rows() -> list[tuple[str, Row, Row | None, Row]]:
    """Of each case the latest beside cuDNN, the latest beside FlashAttention-2, and that beside FlashAttention-3."""
    rows, third = read("h200"), read("h200-flash-attention-3")
    out = []
    for name, case in H200:
        second = [row for row in rows if row.get("case") == case and rate(row, "fwd", "fa2")]
        out.append((name, latest(rows, "cudnn", case=case), second[-1] if second else None, latest(third, case=case)))
    return out


def h200_table() -> str:
    lines = [
        bars(
            "TFLOP/s, forward / backward", "heddle", "cuDNN", "FlashAttention-2", "FlashAttention-3 (heddle beside it)"
        ),
        "|" + "---|" * 5,
    ]
    for name, row, second, third in h200_rows():
        lines.append(
            bars(
                name,
                pair(row, "heddle"),
                pair(row, "cudnn"),
                pair(second, "fa2") if second else NONE,
                f"{pair(third, 'fa3')} ({pair(third, 'heddle')})",
            )
        )
    commits = ", ".join(dict.fromkeys(row["commit"] for _, row, *_ in h200_rows()))
    beside = ", ".join(dict.fromkeys(third["commit"] for *_, third in h200_rows()))
    text = (
        f"heddle and cuDNN were measured at {commits}, FlashAttention-3 (August 2026) beside heddle at {beside}; "
        "heddle's own rates have changed since (first column)."
    )
    return "\n".join([*lines, "", *wrapped(text)])


def h200_words() -> str:
    """What the picture comes to: factors of what two did in one run."""
    rows, all_rows = h200_rows(), read("h200-flash-attention-3")
    commit = ", ".join(dict.fromkeys(row["commit"] for row in all_rows))

    def factor(row: Row, which: str, peer: str) -> float:
        return rate(row, which, "heddle") / rate(row, which, peer)

    def shown(which: str, peer: str, at: int) -> str:
        """The least and the most of the rows in the picture."""
        factors = [factor(row[at], which, peer) for row in rows]
        return f"{min(factors):.2f} to {max(factors):.2f}"

    def means(peer: str) -> str:
        return " and ".join(f"{mean([factor(row, which, peer) for row in all_rows]):.2f}" for which in PASSES)

    text = (
        f"In these rows heddle has {shown('fwd', 'cudnn', 1)} of cuDNN's rate forward and "
        f"{shown('bwd', 'cudnn', 1)} backward. Beside FlashAttention-3, in a run at {commit}, it had "
        f"{shown('fwd', 'fa3', 3)} forward and {shown('bwd', 'fa3', 3)} backward. Over all {len(all_rows)} rows of "
        f"that run, lengths 512 to 32k, the geometric means are {means('cudnn')} of cuDNN, {means('fa3')} of "
        "FlashAttention-3."
    )
    return "\n".join(wrapped(text))


CPU_ROWS = [
    ("attention f32", "b1 h2 s4096 d64 {}", "float32, 4k, d 64"),
    ("attention f32", "b1 h2 s4096 d128 causal {}", "float32, 4k, causal, d 128"),
    ("attention 16-bit", "bf16 b1 h8 s1024 d128 {}", "bfloat16, 1k, d 128"),
    ("attention s197", "b8 h12 s197 d64 {}", "float32, 197 tokens, d 64"),
    ("norm-linear", "f32 {}", "norm-linear, float32"),
    ("norm-linear", "bf16 {}", "norm-linear, bfloat16"),
]


def cpu_rows() -> list[tuple[str, list[Row]]]:
    rows = read(CPU)
    return [
        (
            text,
            [
                [r for r in rows if (r["section"], r["name"], r["threads"]) == (section, name.format(which), 1)][-1]
                for which in ("forward", "forward + backward")
            ],
        )
        for section, name, text in CPU_ROWS
    ]


class Chart(Picture):
    """Groups of bars, one below the other, forward on the left and backward on the right."""

    def __init__(
        self, title: str, note: str, names: list[str], groups: list, heads: tuple[str, str], form: str
    ) -> None:
        count = len(names)
        each = 16 * count + 14
        super().__init__(860, 84 + each * len(groups) + 24, title)
        self.parts.append(f"<style>{COLORS}</style>")
        self.text(20, 26, title, "title")
        x = 20.0
        for at, name in enumerate(names):
            self.parts.append(f'<rect x="{x:g}" y="38" width="12" height="12" class="c{at}"/>')
            self.text(x + 17, 49, name, "small")
            x += 17 + 7.2 * len(name) + 22
        most = max(v for _, sides in groups for side in sides for v in side if v)
        for side, head in enumerate(heads):
            left = 220 + 330 * side
            self.text(left, 74, head, "small faint")
            for group, (_, sides) in enumerate(groups):
                for at, value in enumerate(sides[side]):
                    if not value:
                        continue
                    y, width = 84 + each * group + 16 * at, 250 * value / most
                    self.parts.append(
                        f'<rect x="{left}" y="{y}" width="{width:.1f}" height="13" class="c{at}">'
                        f"<title>{names[at]}: {form.format(value)}</title></rect>"
                    )
                    self.text(left + width + 5, y + 11, form.format(value), "small number")
        for group, (name, _) in enumerate(groups):
            self.text(208, 84 + each * group + 8 * count + 4, name, "", "end")
        self.text(20, 84 + each * len(groups) + 12, note, "small faint")


def h200_picture() -> str:
    groups = []
    for name, row, second, third in h200_rows():
        sides = [
            [
                rate(row, w, "heddle"),
                rate(row, w, "cudnn"),
                rate(second, w, "fa2") if second else None,
                rate(third, w, "fa3"),
            ]
            for w in PASSES
        ]
        groups.append((name, sides))
    note = "FlashAttention-3 is of another run than the others, see docs/measuring.md. "
    note += "Device time, medians, cold cache."
    title = "Attention on one H200, bfloat16, TFLOP/s"
    return Chart(title, note, list(NAMES.values()), groups, ("forward", "backward"), "{:.0f}").svg()


def cpu_picture() -> str:
    groups = [
        (text, [[100 * row["fraction"], 100 * row["torch_fraction"]] for row in rows]) for text, rows in cpu_rows()
    ]
    first = cpu_rows()[0][1][0]
    torch = first["torch"].split("+")[0]
    title = f"One core of an {first['cpu']} (family {first['family']}), % of its peak of float32 multiply-adds"
    note = "The peak is measured beside each call; bfloat16 by pairs has twice that peak on this processor."
    return Chart(
        title, note, ["heddle", f"PyTorch {torch}"], groups, ("forward", "forward + backward"), "{:.0f}%"
    ).svg()


# ------------------------------------------------------------------------------------------------------- the limits

WORDS = {
    "alibi": "ALiBi",
    "lse": "gradient of lse",
    "lengths": "lengths of keys",
    "documents": "packed documents of 500",
    "padding": "padding, as a boolean mask",
    "dense": "boolean mask, a tenth hidden",
    "blocks": "boolean mask, a quarter of the tiles seen",
    "bias": "bias of [b, h, s, s]",
    "bias padding": "padding, as a bias of [b, 1, 1, s]",
    "bias shared": "bias of [h, s, s]",
    "dbias": "bias of [b, h, s, s] with its gradient",
    "dbias shared": "bias of [h, s, s] with its gradient",
    "window 512": "window of 512",
    "window 512+softcap": "window of 512 and softcap",
    "softcap+padding": "softcap and padding",
    "dropout+padding": "dropout and padding",
    "dropout+dense": "dropout and a boolean mask, a tenth hidden",
    "bias shared+padding": "bias of [h, s, s] and padding",
    "dropout+bias shared": "dropout and a bias of [h, s, s]",
    "dbias shared+padding": "bias of [h, s, s] with its gradient, and padding",
}
MASKS = {"c": "causal", "f": "full"}


def options_table(base: str) -> str:
    """Rates of options, beside the plain row of their run as bench/gpu_attention.py has it; the fastest other of the
    last run with any."""
    rows = [row for row in read("h200") if row.get("table") == "options"]
    lines = [
        bars("", "mask", "TFLOP/s", "of plain", "commit", "the fastest other, beside which commit"),
        "|" + "---|" * 6,
    ]
    for mask, options in OPTIONS.items():
        for option in ("plain", *options):
            case = f"{base}{mask}-bfloat16" + ("" if option == "plain" else " " + option)
            if not (found := [row for row in rows if row["case"] == case]):
                continue
            row = found[-1]
            beside = [row for row in found if len(row["fwd_rest"]["rate"]) > 1]
            best = ""
            if beside:
                others = beside[-1]["fwd_rest"]["rate"].keys() - {"heddle"}
                name = max(sorted(others), key=lambda name: rate(beside[-1], PASSES[0], name))
                best = f"{NAMES.get(name, name)} {pair(beside[-1], name)}, {beside[-1]['commit']}"
            part = "" if option == "plain" else " / ".join(f"{row[f'{w}_rest']['of_plain']:.2f}" for w in PASSES)
            lines.append(
                bars(
                    WORDS.get(option, option),
                    MASKS[mask],
                    pair(row, "heddle"),
                    part,
                    row["commit"],
                    best,
                )
            )
    return "\n".join(lines)


def sm80_table() -> str:
    """The family for older GPUs on the H200: a plain row beside FlashAttention-2, options beside the plain row."""
    rows = read("h200-sm80")
    lines = [bars("", "mask", "TFLOP/s", "of plain", "FlashAttention-2"), "|" + "---|" * 5]
    for d, base in ((64, "B4H32/32S4096D64"), (128, "B4H16/16S4096D128"), (256, "B4H8/8S4096D256")):
        for mask in MASKS:
            row = latest(rows, "fa2", case=f"{base}{mask}-bfloat16")
            lines.append(bars(f"plain, d {d}", MASKS[mask], pair(row, "heddle"), "", pair(row, "fa2")))
    for mask, options in OPTIONS.items():
        for option in options:
            case = f"B4H16/16S4096D128{mask}-bfloat16 {option}"
            if all(row["case"] != case for row in rows):
                continue
            row = latest(rows, case=case)
            part = " / ".join(f"{row[f'{w}_rest']['of_plain']:.2f}" for w in PASSES)
            lines.append(bars(f"{WORDS.get(option, option)}, d 128", MASKS[mask], pair(row, "heddle"), part, ""))
    return "\n".join(lines)


def float32_options_table() -> str:
    """Options in float32 at head dim 128, beside PyTorch's memory-efficient kernel where it has them."""
    rows = read("h200")
    lines = [bars("", "mask", "TFLOP/s", "of plain", "efficient", "commit"), "|" + "---|" * 6]
    for mask, options in FLOAT32_OPTIONS.items():
        for option in ("plain", *options):
            case = f"B2H16/16S4096D128{mask}-float32" + ("" if option == "plain" else " " + option)
            row = latest(rows, case=case)
            part = "" if option == "plain" else " / ".join(f"{row[f'{w}_rest']['of_plain']:.2f}" for w in PASSES)
            peer = pair(row, "efficient") if "efficient" in row["fwd_rest"]["rate"] else ""
            lines.append(bars(WORDS.get(option, option), MASKS[mask], pair(row, "heddle"), part, peer, row["commit"]))
    return "\n".join(lines)


PAGED = {  # the rows of bench/gpu_pages.py by what they are called
    "decode B64H32/8S1x8192D128": "decoding, b 64, h 32/8, 8k keys, d 128",
    "decode B8H32/8S1x8192D128": "decoding, b 8, h 32/8, 8k keys, d 128",
    "decode B1H32/8S1x131072D128": "decoding, b 1, h 32/8, 128k keys, d 128",
    "decode B1H32/8S1x8192D128": "decoding, b 1, h 32/8, 8k keys, d 128",
    "decode B64H32/8S1x8192D64": "decoding, b 64, h 32/8, 8k keys, d 64",
    "decode B64H32/8S1x8192D256": "decoding, b 64, h 32/8, 8k keys, d 256",
    "chunk B8H32/8S512x8192D64": "512 queries at the end of 8k keys, b 8, h 32/8, d 64",
    "chunk B8H32/8S512x8192D128": "512 queries at the end of 8k keys, b 8, h 32/8, d 128",
    "chunk B8H32/8S512x8192D256": "512 queries at the end of 8k keys, b 8, h 32/8, d 256",
}


def pages_table() -> str:
    """How fast keys in pages are beside the same keys without, and how far off the other order of a page is."""
    rows = [row for row in read("h200") if row.get("table") == "pages"]
    lines = [bars("", "without pages", "pages of 16", "of 64", "of 256", "commit"), "|" + "---|" * 6]
    apart = 0.0
    for case, words in PAGED.items():
        row = [row for row in rows if row["case"] == case][-1]
        apart = max(apart, *(abs(row[f"{page} rows"] - row[f"{page} heads"]) for page in (16, 64, 256)))
        whole = f"{row['tbs']:.2f} TB/s" if case.startswith("decode") else f"{row['us'] * 1e-3:.2f} ms"
        lines.append(bars(words, whole, *(f"{row[f'{page} rows']:.2f}" for page in (16, 64, 256)), row["commit"]))
    lines += ["", f"Rows of a page lie side by side; head by head the figures differ by up to {apart:.2f}."]
    return "\n".join(lines)


def parallel_table() -> str:
    """Two GPUs by every way, as they were measured last, beside one alone and PyTorch."""
    rows = [row for row in read("h200") if row.get("table") == "parallel"]
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"]]
    ways = ["ring, once, auto", "heads, once, auto", "ring, once, messages", "heads, once, messages"]
    lines = [
        bars("tokens a GPU", "one alone", "ring", "of one", "heads", "of one", "ring, messages", "heads, messages", "PyTorch"),
        "|" + "---|" * 9,
    ]
    for tokens in sorted({row["tokens"] for row in rows}):
        of = {row["case"]: row["rate"] for row in rows if row["tokens"] == tokens}
        alone, pytorch = of["one GPU alone"], of["PyTorch cuDNN"]
        each = [of[f"heddle {way}"] for way in ways]
        shown = [" / ".join(f"{x:.0f}" for x in rate) for rate in (alone, *each, pytorch)]
        parts = [" / ".join(f"{x / y:.2f}" for x, y in zip(rate, alone, strict=True)) for rate in each[:2]]
        lines.append(bars(f"{tokens // 1024}k", *shown[:2], parts[0], shown[2], parts[1], *shown[3:]))
    return "\n".join([*lines, "", f"Measured at {rows[0]['commit']}, torch {rows[0]['torch'].split('+')[0]}, {rows[0]['date']}."])


def dims_table() -> str:
    found: dict[tuple[int, int], Row] = {}
    for row in read("h200"):
        case = re.fullmatch(r"B4H(\d+)/\1S4096D(\d+)(?:/(\d+))?c-bfloat16", row.get("case", ""))
        if case and rate(row, "fwd", "heddle"):
            found[int(case[2]), int(case[3] or case[2])] = row
    lines = [bars("head dim", "heddle", "cuDNN", "FlashAttention-2", "efficient", "commit"), "|" + "---|" * 6]
    for (d, dv), row in sorted(found.items()):
        name = f"{d}" if d == dv else f"{d}, dv {dv}"
        peers = [pair(row, p) if rate(row, "fwd", p) else "" for p in ("cudnn", "fa2", "efficient")]
        lines.append(bars(name, pair(row, "heddle"), *peers, row["commit"]))
    return "\n".join(lines)


def linear_table() -> str:
    """Device time over that of the product alone, of every shape and type, and of each option with two shapes."""
    rows = [row for row in read("h200") if row.get("table") == "norm-linear" and "fwd_rest" in row]
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"]]
    shown = ("m16384 k1024 n4096 ", "m8192 k4096 n12288 ")
    lines = [bars("", "heddle, µs", "over `F.linear`", "PyTorch over it"), "|" + "---|" * 4]
    for row in rows:
        option = row["case"].split(" ", 4)[4:]
        if not option or option == ["tf32"] or row["case"].startswith(shown):
            each = [row[f"{p}_rest"] for p in ("fwd", "bwd") if f"{p}_rest" in row]
            forms = (("us", ".1f"), ("over_linear", ".2f"), ("eager_over_linear", ".2f"))
            lines.append(bars(row["case"], *(" / ".join(f"{x[key]:{form}}" for x in each) for key, form in forms)))
    return "\n".join([*lines, "", f"Measured at {rows[0]['commit']}, torch {rows[0]['torch'].split('+')[0]}."])


CHUNKS = {  # options, and what they are called
    "pages": "pages",
    "pages window 512": "pages, a window of 512",
    "pages sinks": "pages, sinks",
    "pages softcap": "pages, softcap",
    "pages alibi": "pages, ALiBi",
    "pages e4m3": "keys of 8 bits, in pages (collected)",
    "e4m3": "keys of 8 bits (collected)",
    "pages padding": "pages, a mask of keys (collected)",
    "pages bias shared": "pages, a bias (collected)",
    "pages dropout": "pages, dropout (collected)",
}


def chunks_table() -> str:
    """Milliseconds of many queries to keys in pages or of 8 bits, by head dim."""
    rows = [row for row in read("h200") if row.get("table") == "chunks"]
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"]]
    found = {(row["option"], row["d"]): f"{row['ms']:.2f}" for row in rows}
    lines = [bars("ms", "d 64", "d 128", "d 256"), "|" + "---|" * 4]
    lines += [bars(name, *(found.get((option, d), "") for d in (64, 128, 256))) for option, name in CHUNKS.items()]
    return "\n".join([*lines, "", f"Measured at {rows[0]['commit']}."])


def steps_table() -> str:
    """Milliseconds of whole training steps, eager and compiled."""
    found: dict[str, dict[str, tuple[float, str]]] = {}
    for row in read("h200"):
        if row.get("table") == "step":
            found.setdefault(row["case"], {}).update({way: (ms, row["commit"]) for way, ms in row["ms"].items()})
    ways = [f"{who} {how}" for how in ("eager", "compiled") for who in ("pytorch", "heddle")]
    lines = [bars("ms", *(way.replace("pytorch", "PyTorch") for way in ways), "commits"), "|" + "---|" * 6]
    for case, by in found.items():
        commits = ", ".join(dict.fromkeys(by[way][1] for way in ways if way in by))
        lines.append(bars(case, *(f"{by[way][0]:.1f}" if way in by else "" for way in ways), commits))
    return "\n".join(lines)


def calls_table(op: str, form: str) -> str:
    """Calls from Python, with the launches in them, and PyTorch's beside."""
    rows = [row for row in read("h200") if row.get("op") == op and re.search(form, row["case"])]
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"]]
    lines = [bars("", "heddle, ms", "PyTorch, ms", "over PyTorch", "commit"), "|" + "---|" * 5]
    for row in rows:
        torch = [row.get(f"{w}_peer_ms") or row.get(f"torch_{w}_ms") for w in PASSES]
        times = [[row.get(f"{w}_ms") for w in PASSES], torch]
        cells = [" / ".join(f"{x:.3g}" if x else NONE for x in each) for each in times]
        ratio = " / ".join(f"{t / x:.2f}" if t and x else NONE for x, t in zip(*times, strict=True))
        lines.append(bars(row["case"], *cells, ratio, row["commit"]))
    return "\n".join(lines)


DECODED = {  # cases, and what they are called
    "B1H32/8S1x8192D128": "b 1, 8k keys",
    "B1H32/8S1x131072D128": "b 1, 128k keys",
    "B32H32/8S1x8192D128": "b 32, 8k keys",
    "B64H32/8S1x4096D128": "b 64, 4k keys",
}


def decode_table() -> str:
    """One query against many keys: the rate of K and V, and what time PyTorch's kernels take, over heddle's in turn."""
    rows = [row for row in read("h200") if row.get("op") == "attention" and "peer" in row]
    lines = [bars("h 32/8, d 128", "TB/s", "cuDNN over it", "FlashAttention-2 over it", "commit"), "|" + "---|" * 5]
    for case, words in DECODED.items():
        of = {row["peer"]: row for row in rows if row["case"] == f"{case}f-bfloat16"}  # the last of each
        b, sk = (int(x) for x in re.fullmatch(r"B(\d+)H.*x(\d+)D.*", case).groups())
        second, cudnn = of["flash_attention"], of["cudnn_attention"]
        tbs = 2 * b * 8 * sk * 128 * 2 / min(second["fwd_ms"], cudnn["fwd_ms"]) * 1e-9
        ratios = (f"{row['fwd_ratio']:.2f}" for row in (cudnn, second))
        lines.append(bars(words, f"{tbs:.2f}", *ratios, cudnn["commit"]))
    return "\n".join(lines)


def overhead_rows() -> dict[str, Row]:
    """What the last run of bench/gpu_overhead.py has, by what was measured, without the goals."""
    rows = [row for row in read("h200") if row.get("bench") == "overhead"]
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"]]
    return {re.sub(r" \(goal .*\)$", "", row["what"]): row for row in rows}


def small_table() -> str:
    """The least problem of all, by itself and behind others."""
    rows = overhead_rows()
    lines = [bars("b 1, h 1, s 128, d 32, float32; µs", "one call", "each of 50", "commit"), "|---|---|---|---|"]
    for which in ("forward", "backward"):
        one, many = (rows[f"b1 h1 s128 d32 float32 {which}, graph of {n}"] for n in (1, 50))
        lines.append(bars(which, f"{one['us']:.1f}", f"{many['us']:.1f}", one["commit"]))
    return "\n".join(lines)


OVERHEAD = {  # what is called, and how
    "torch.ops.heddle.attention": (
        "no gradient",
        "no_grad",
        "inference_mode",
        "recording a gradient",
        "forward and backward",
    ),
    "heddle.attention": ("no gradient", "recording a gradient", "forward and backward"),
    "heddle.scaled_dot_product_attention": ("no gradient",),
    "torch.ops.heddle.norm_linear": ("no gradient",),
}


def overhead_table() -> str:
    """The host's part of a call from Python, least and median, beside PyTorch's."""
    rows = overhead_rows()
    lines = [bars("", "", "heddle", "PyTorch", "commit"), "|" + "---|" * 5]
    for name, ways in OVERHEAD.items():
        peer = "PyTorch's layer_norm + linear" if name.endswith("norm_linear") else "PyTorch's SDPA (flash)"
        for way in ways:
            both = [rows[f"{who}, {way}"] for who in (name, peer)]
            cells = (f"{row['us']:.1f} / {row['median_us']:.1f}" for row in both)
            lines.append(bars(f"`{name}`", way, *cells, both[0]["commit"]))
    return "\n".join(lines)


# --------------------------------------------------------------------------------------- a step of Hopper's forward

CLOCK_PARTS = {  # bench/gpu_clocks.py's, with their colours and what a reader is told
    "waits for K": ("gone", "the barrier of K, which is there already: what asking takes"),
    "waits for its turn": ("gone", "the other warpgroup has passed it on by then: what asking takes"),
    "issues products": ("c1", "S of the next tile and P·V of this one, as fast as the tensor cores accept them"),
    "waits for S": ("gone", "what is left of that product"),
    "softmax": ("c0", "of the next tile, while P·V of this one is added up, and then the other's products"),
    "waits for P·V": ("gone", "done by then"),
    "rescales, packs P": ("c3", "o where a maximum grew; P to 16 bits, the operand of the next step"),
}
CLOCK_TILES = 32  # of 128 keys each: a tile of queries goes through them all
CLOCK_PRODUCTS = 4 * 64 * 128 * 128 // 2048  # S and P·V of two warpgroups, at 2048 multiply-adds a cycle


def clocks_row() -> Row:
    return read("clocks-h200")[-1]


def clocks_table() -> str:
    row = clocks_row()
    groups = row["line"][:2]
    lines = [bars("part of a step; cycles", "warpgroup 0", "warpgroup 1", "what it is"), "|" + "---|" * 4]
    for at, (name, (_, words)) in enumerate(CLOCK_PARTS.items()):
        parts = (f"{median(step[at + 1] - step[at] for step in steps):.0f}" for steps in groups)
        lines.append(bars(name, *parts, words))
    whole = (f"{(steps[-1][0] - steps[0][0]) / (len(steps) - 1):.0f}" for steps in groups)
    lines.append(bars("a step of 128 keys", *whole, f"the products of both warpgroups alone take {CLOCK_PRODUCTS}"))
    text = (
        f"Medians of {len(groups[0])} steps of each warpgroup in one call on an H200 at {row['commit']} "
        "(`bench/gpu_clocks.py` on a build with `-DHEDDLE_CLOCKS=ON`; d 128, bfloat16, 4096 keys, full). The time "
        "between the last part and the next step is in no row. With the notes a call takes "
        f"{row['cost']:.2f} times as long."
    )
    return "\n".join([*lines, "", *wrapped(text)])


def clocks_picture() -> str:
    """Two steps of both warpgroups, and what is sent for meanwhile; tiles of keys by their numbers."""
    row = clocks_row()
    line, first = row["line"], row["first"] % CLOCK_TILES
    until = line[0][2][3]
    picture = Picture(860, 262, "Two steps of Hopper's forward, by the multiprocessor's clock")
    picture.parts.append(f"<style>{COLORS}</style>")
    picture.text(20, 26, "Two steps of Hopper's forward (d 128, bfloat16), by the multiprocessor's clock", "title")

    def at(cycles: float) -> float:
        return 130 + 700 * cycles / until

    for y, name in ((62, "a thread issues"), (102, "warpgroup 0"), (154, "warpgroup 1")):
        picture.text(20, y, name, "small")
    for n, sent in enumerate(line[2]):
        for x, name in ((sent[1], f"K {first + n}"), (sent[2], f"V {first + n - 1}")):
            if 0 <= x <= until:
                picture.parts.append(f'<path d="M{at(x):.1f} 48 V72" class="line"/>')
                picture.text(round(at(x) + 4, 1), 62, name, "small")
    for group, y in ((0, 84), (1, 136)):
        for n, step in enumerate(line[group], first):
            for (name, (kind, _)), (x, end) in zip(CLOCK_PARTS.items(), pairwise(step), strict=True):
                left, right = max(x, 0), min(end, until)
                if right <= left:
                    continue
                picture.parts.append(
                    f'<rect x="{at(left):.1f}" y="{y}" width="{at(right) - at(left):.1f}" height="26" class="{kind}">'
                    f"<title>{name}: {end - x} cycles</title></rect>"
                )
                if kind == "c1":
                    picture.text(round(at(left), 1), y + 39, f"S {n + 1}, P·V {n}", "small")
                if kind == "c0" and right == end:
                    picture.text(round(at(left), 1), y + 39, f"P {n + 1}", "small")
    for cycles in range(0, until, 1000):
        picture.parts.append(f'<path d="M{at(cycles):.1f} 186 V192" class="line"/>')
        picture.middle(round(at(cycles), 1), 206, str(cycles), "small faint")
    picture.text(20, 206, "cycles", "small faint")
    for left, kind, words in (
        (130, "c1", "issues products"),
        (290, "c0", "softmax"),
        (400, "c3", "rescales, packs P"),
        (570, "gone", "waits"),
    ):
        picture.parts.append(f'<rect x="{left}" y="218" width="12" height="12" class="{kind}"/>')
        picture.text(left + 17, 229, words, "small")
    picture.text(20, 252, f"One call of {row['kernel']} on an H200, block 0, at {row['commit']}.", "small faint")
    return picture.svg()


def ways_table() -> str:
    """Each way in beside the direct call, on a GPU's host."""
    rows = [row for row in read("h200") if row.get("bench") == "ways in"]
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"]]
    lines = [bars("way; µs", "it", "direct", "over it", "commit"), "|" + "---|" * 5]
    for row in rows:
        what = row["what"].split(" (")[0]
        lines.append(bars(what, f"{row['us']:.1f}", f"{row['direct_us']:.1f}", f"{row['over_us']:.1f}", row["commit"]))
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------- the pages

TABLES = {
    "README.md": {"h200": h200_words},
    "docs/measuring.md": {"h200": h200_table},
    "docs/algorithm.md": {"clocks": clocks_table},
    "docs/serving.md": {"pages": pages_table},
    "docs/parallel.md": {"parallel": parallel_table},
    "docs/python-cost.md": {"overhead": overhead_table, "ways in": ways_table},
    "docs/kernels/cuda-attention-decode.md": {"decode": decode_table},
    "docs/kernels/cuda-attention-small.md": {"small": small_table},
    "docs/limits.md": {
        "options of d 128": lambda: options_table("B4H16/16S4096D128"),
        "options of d 64": lambda: options_table("B4H32/32S4096D64"),
        "options of d 192": lambda: options_table("B4H10/10S4096D192"),
        "options of d 256": lambda: options_table("B4H8/8S4096D256"),
        "sm80": sm80_table,
        "head dims": dims_table,
        "float32": lambda: calls_table("attention", "S4096x4096.*float32"),
        "float32 options": float32_options_table,
        "norm-linear": linear_table,
        "chunks": chunks_table,
        "steps": steps_table,
    },
}
PICTURES = {
    "docs/img/speed-h200.svg": h200_picture,
    "docs/img/speed-cpu.svg": cpu_picture,
    "docs/img/hopper-step.svg": clocks_picture,
}


def written(page: str, text: str) -> str:
    marks = re.findall(r"<!-- docs/figures\.py: (.*?) -->", text)
    if sorted(marks) != sorted(TABLES[page]):
        sys.exit(f"figures.py: {page} has the places {marks}, and should have {list(TABLES[page])}")
    for name, table in TABLES[page].items():
        text = replaced(text, f"<!-- docs/figures.py: {name} -->", "<!-- end -->", table(), page)
    return text


def main() -> int:
    check = arguments_of(__doc__).parse_args().check
    made = {page: written(page, (ROOT / page).read_text()) for page in TABLES}
    made |= {path: draw() for path, draw in PICTURES.items()}
    return finish(made, check, "docs/figures.py")


if __name__ == "__main__":
    sys.exit(main())
