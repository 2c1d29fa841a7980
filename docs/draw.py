#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of docs/algorithm.md into docs/img, with the numbers that two of the examples print, and the
tables of docs/measuring.md, from bench/results.

    docs/draw.py [--check] [BUILD]

BUILD is the build directory with examples/online_softmax and examples/derivation (default: build). --check changes
nothing and ends with 1 if a picture or a table is not as it would be drawn.
"""

import json
import pathlib
import re
import subprocess
import sys

from pages import ROOT, arguments_of, finish, replaced

STYLE = """
text { font: 14px sans-serif; fill: #1f2328; }
.small { font-size: 12px; }
.faint { fill: #59636e; }
.number { font-family: monospace; }
.title { font-weight: bold; }
.paper { fill: #ffffff; }
.box { fill: #f6f8fa; stroke: #818b98; }
.here { fill: #ddf4ff; stroke: #0969da; }
.kept { fill: #dafbe1; stroke: #1a7f37; }
.gone { fill: none; stroke: #818b98; stroke-dasharray: 4 3; }
.line { fill: none; stroke: #59636e; stroke-width: 1.5; }
.head { fill: #59636e; }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc; }
.faint { fill: #9198a1; }
.paper { fill: #0d1117; }
.box { fill: #151b23; stroke: #656c76; }
.here { fill: #121d2f; stroke: #4493f8; }
.kept { fill: #12261e; stroke: #3fb950; }
.gone { stroke: #656c76; }
.line { stroke: #9198a1; }
.head { fill: #9198a1; }
}
"""


def escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


class Picture:
    """An SVG that is written piece by piece."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img">',
            "<!-- drawn by docs/draw.py -->",
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="paper" width="{width}" height="{height}"/>',
        ]

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>')

    def middle(self, x: float, y: float, text: str, kind: str = "") -> None:
        self.text(x, y, text, kind, "middle")

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box", round_: int = 4) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{round_}" class="{kind}"/>'
        )

    def arrow(self, *points: tuple[float, float]) -> None:
        """Along axes, with its head at the last point."""
        (x0, y0), (x, y) = points[-2:]
        across, down = (x > x0) - (x < x0), (y > y0) - (y < y0)
        way = " ".join(f"{px:g},{py:g}" for px, py in [*points[:-1], (x - 6 * across, y - 6 * down)])
        self.parts.append(f'<polyline points="{way}" class="line"/>')
        left = (x - 9 * across + 4 * down, y - 9 * down - 4 * across)
        right = (x - 9 * across - 4 * down, y - 9 * down + 4 * across)
        head = f"{x:g},{y:g} {left[0]:g},{left[1]:g} {right[0]:g},{right[1]:g}"
        self.parts.append(f'<polygon points="{head}" class="head"/>')

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


NUMBER = r"-?\d+\.\d+"


class Numbers:
    """What the programs print: matrices, steps, and single numbers by their names."""

    def __init__(self, build: pathlib.Path) -> None:
        steps = self.run(build / "examples/online_softmax")
        self.s = self.matrix(steps, "S")
        self.p = self.matrix(steps, "P")
        self.lse = self.find(steps, r"    lse +(" + NUMBER + ")")
        pattern = r"query (\d), keys (\d) and \d:  m (N)  c (N)  L (N)  O (N)  O/L (N)  heddle (N)".replace("N", NUMBER)
        self.steps = {
            (int(q), int(k)): dict(zip(["m", "c", "L", "O", "O/L", "heddle"], values, strict=True))
            for q, k, *values in re.findall(pattern, steps)
        }
        pattern = r"key (\d) for query 0:  P (N)  dP (N)  D (N)  dS (N)".replace("N", NUMBER)
        self.back = [dict(zip(["j", "P", "dP", "D", "dS"], found, strict=True)) for found in re.findall(pattern, steps)]
        derived = self.run(build / "examples/derivation")
        section = derived[derived.index("\nN2  ") : derived.index("\nN3  ")]
        names = {"product": "x Wg[1,0], the product", "mean": "mean[1]", "s": "s[0]", "rstd": "rstd[1]", "t": "t[0]"}
        self.norm = {key: self.find(section, re.escape(name) + f" +({NUMBER})") for key, name in names.items()}
        self.norm["y"] = self.find(section, rf"y\[1,0\].*heddle +({NUMBER})")

    @staticmethod
    def run(program: pathlib.Path) -> str:
        return subprocess.run([program], check=True, capture_output=True, text=True).stdout

    @staticmethod
    def find(text: str, pattern: str) -> str:
        found = re.search(pattern, text)
        if not found:
            sys.exit(f"draw.py: nothing printed is like {pattern}")
        return found[1]

    @staticmethod
    def matrix(text: str, name: str) -> list[list[str]]:
        found = re.search(rf"^    {name} +((?:{NUMBER}\s+){{16}})", text, re.MULTILINE)
        if not found:
            sys.exit(f"draw.py: no matrix {name} is printed")
        numbers = found[1].split()
        return [numbers[i : i + 4] for i in range(0, 16, 4)]


def short(number: str, digits: int = 4) -> str:
    return f"{float(number):.{digits}f}".replace("-", "\N{MINUS SIGN}")


def tiling(n: Numbers) -> Picture:
    """The matrix of scores in four tiles, of which one exists."""
    p = Picture(760, 460, "The scores of four queries and four keys in tiles of two by two")
    left, top, cell = 210, 130, 78
    for half in range(2):
        name = f"keys {2 * half}, {2 * half + 1}"
        x = left + 2 * cell * half
        p.box(x + 4, top - 84, 2 * cell - 8, 30, "here" if half == 1 else "box")
        p.middle(x + cell, top - 64, f"K, {name}")
        p.box(x + 4, top - 46, 2 * cell - 8, 30, "here" if half == 1 else "box")
        p.middle(x + cell, top - 26, f"V, {name}")
        y = top + 2 * cell * half
        p.box(left - 150, y + 4, 126, 2 * cell - 8, "here" if half == 1 else "box")
        p.middle(left - 87, y + cell + 5, f"Q, queries {2 * half}, {2 * half + 1}")
        p.box(left + 4 * cell + 24, y + 4, 126, 2 * cell - 8, "here" if half == 1 else "kept")
        p.middle(left + 4 * cell + 87, y + cell - 6, "o and lse of")
        p.middle(left + 4 * cell + 87, y + cell + 14, f"queries {2 * half}, {2 * half + 1}")
    for i in range(2):
        for j in range(2):
            here = i == 1 and j == 1
            p.box(
                left + 2 * cell * j + 4, top + 2 * cell * i + 4, 2 * cell - 8, 2 * cell - 8, "here" if here else "gone"
            )
    for i in range(4):
        for j in range(4):
            x, y = left + cell * (j + 0.5), top + cell * (i + 0.5)
            here = i > 1 and j > 1
            p.middle(x, y + 5, short(n.s[i][j], 1) if here else "", "number")
            if not here:
                p.middle(x, y + 5, "\N{MIDDLE DOT}", "faint")
    p.middle(
        left + 2 * cell, 24, "one tile of scores S exists at a time; the others are gone or still to come", "title"
    )
    return p


def online_softmax(n: Numbers) -> Picture:
    """Two queries, step by step."""
    p = Picture(860, 452, "Online softmax of two queries, two keys at a time")
    for row, query in enumerate((0, 2)):
        y = 40 + row * 210
        p.text(20, y - 14, f"query {query}", "title")
        p.text(
            100,
            y - 14,
            "the maximum is in the first tile" if query == 0 else "the maximum is in the second tile",
            "faint",
        )
        p.box(20, y, 130, 150)
        for at, text in enumerate(["at the start", "", "m = \N{MINUS SIGN}\N{INFINITY}", "L = 0", "O = 0"]):
            p.text(34, y + 26 + 22 * at, text, "number" if at else "faint")
        x = 230
        for first in (0, 2):
            step = n.steps[query, first]
            scores = ", ".join(short(s, 0) for s in n.s[query][first : first + 2])
            p.arrow((x - 80, y + 75), (x, y + 75))
            c = short(step["c"]) if first else "0"
            p.middle(x - 42, y + 66, f"c = {c}" if first else "c = 0", "small number")
            p.box(x, y, 190, 150, "here")
            p.text(x + 14, y + 26, f"keys {first}, {first + 1}: scores {scores}")
            p.text(x + 14, y + 70, f"m = {short(step['m'], 0)}", "number")
            p.text(x + 14, y + 92, f"L = {short(step['L'])}", "number")
            p.text(x + 14, y + 114, f"O = {short(step['O'])}", "number")
            p.text(x + 14, y + 138, f"O/L = {short(step['O/L'])}", "number faint")
            x += 270
        last = n.steps[query, 2]
        p.arrow((x - 80, y + 75), (x - 50, y + 75))
        p.box(x - 50, y + 40, 120, 70, "kept")
        p.middle(x + 10, y + 68, "o = O/L", "number")
        p.middle(x + 10, y + 92, short(last["heddle"], 6), "number")
    p.text(20, 440, "c = exp(m before \N{MINUS SIGN} m now): L and O of the tiles before are multiplied by it", "faint")
    return p


def recomputation(n: Numbers) -> Picture:
    """One tile of the backward pass, with the numbers of query 0 and keys 0 and 1."""
    p = Picture(860, 400, "The backward pass of one tile: weights from lse, then five products")

    def both(key: str) -> str:
        return ", ".join(short(each[key]) for each in n.back)

    def item(x: float, y: float, width: float, kind: str, name: str, value: str = "") -> None:
        p.box(x, y, width, 56 if value else 34, kind)
        p.middle(x + width / 2, y + 22, name)
        if value:
            p.middle(x + width / 2, y + 44, value, "number small")

    item(20, 30, 100, "kept", "q, k")
    item(20, 100, 100, "kept", "lse", short(n.lse))
    item(20, 196, 100, "kept", "do, v")
    item(20, 266, 100, "kept", "do, o")
    item(190, 19, 170, "here", "S = scale\N{MIDDLE DOT}q\N{MIDDLE DOT}k\u1d40", ", ".join(short(s) for s in n.s[0][:2]))
    item(430, 62, 170, "here", "P = exp(S \N{MINUS SIGN} lse)", both("P"))
    item(190, 185, 170, "here", "dP = do\N{MIDDLE DOT}v\u1d40", both("dP"))
    item(190, 266, 170, "kept", "D = \N{GREEK CAPITAL LETTER SIGMA} do\N{RING OPERATOR}o", short(n.back[0]["D"]))
    item(430, 196, 170, "here", "dS = P\N{RING OPERATOR}(dP \N{MINUS SIGN} D)", both("dS"))
    item(680, 73, 160, "kept", "dv += P\u1d40\N{MIDDLE DOT}do")
    item(680, 176, 160, "kept", "dk += scale\N{MIDDLE DOT}dS\u1d40\N{MIDDLE DOT}q")
    item(680, 238, 160, "kept", "dq += scale\N{MIDDLE DOT}dS\N{MIDDLE DOT}k")
    p.arrow((120, 47), (190, 47))
    p.arrow((120, 128), (400, 128), (400, 100), (430, 100))
    p.arrow((360, 47), (400, 47), (400, 80), (430, 80))
    p.arrow((120, 213), (190, 213))
    p.arrow((120, 294), (190, 294))
    p.arrow((360, 213), (430, 213))
    p.arrow((360, 294), (400, 294), (400, 240), (430, 240))
    p.arrow((515, 118), (515, 196))
    p.arrow((600, 90), (680, 90))
    p.arrow((600, 214), (640, 214), (640, 193), (680, 193))
    p.arrow((600, 234), (640, 234), (640, 255), (680, 255))
    p.text(
        20,
        350,
        "query 0 and keys 0, 1. Green: in memory for the whole pass. Blue: of this tile alone, and gone after it.",
    )
    p.text(
        20,
        374,
        "Five products: S, dP, dv, dk, dq. What forward kept of the scores is one number a query: lse.",
        "faint",
    )
    return p


def norm_for_free(n: Numbers) -> Picture:
    """LayerNorm and Linear as two operations, and as one."""
    p = Picture(860, 330, "LayerNorm and Linear as they are written, and folded into one product")

    def item(x: float, y: float, width: float, kind: str, *lines: str) -> None:
        p.box(x, y, width, 20 + 20 * len(lines), kind)
        for at, text in enumerate(lines):
            p.middle(x + width / 2, y + 24 + 20 * at, text, "number small" if at else "")

    p.text(20, 28, "as it is written: z goes to memory and comes back", "title")
    item(20, 46, 90, "kept", "x")
    item(160, 46, 130, "here", "mean, rstd")
    item(340, 46, 200, "gone", "z = (x\N{MINUS SIGN}mean)\N{MIDDLE DOT}rstd\N{RING OPERATOR}\u03b3 + \u03b2")
    item(590, 46, 130, "here", "z\N{MIDDLE DOT}W\u1d40 + c")
    item(770, 46, 70, "kept", "y")
    for x, to in ((110, 160), (290, 340), (540, 590), (720, 770)):
        p.arrow((x, 66), (to, 66))
    p.text(20, 132, "folded: the raw x goes through the product, and the norm is done to its result", "title")
    v = {key: short(value) for key, value in n.norm.items()}
    item(20, 160, 90, "kept", "x")
    item(160, 150, 170, "here", "a = x\N{MIDDLE DOT}Wg\u1d40", v["product"])
    item(
        400,
        150,
        260,
        "here",
        "y = rstd\N{MIDDLE DOT}(a \N{MINUS SIGN} mean\N{MIDDLE DOT}s) + t",
        "in registers, before y is stored",
    )
    item(740, 150, 100, "kept", "y", v["y"])
    for x, to in ((110, 160), (330, 400), (660, 740)):
        p.arrow((x, 180), (to, 180))
    item(160, 250, 170, "here", "of the row: mean, rstd", f"{v['mean']}, {v['rstd']}")
    item(400, 250, 260, "box", "of the weights: s, t", f"{v['s']}, {v['t']}")
    p.arrow((65, 200), (65, 280), (160, 280))
    p.arrow((330, 280), (366, 280), (366, 200), (400, 200))
    p.arrow((530, 250), (530, 210))
    return p


def warps(_: Numbers) -> Picture:
    """A block of sm80's forward, its warps, and the accumulators of one product of 16 x 8."""
    p = Picture(860, 420, "Which warp owns which rows of a tile of scores, and which lane which of its elements")
    rows = (ROOT / "src/cuda/attention/attention.def").read_text()
    found = re.search(r"^H\(fwd, 128, lean, sm80, (\d+), (\d+), (\d+),", rows, re.MULTILINE)
    if not found:
        sys.exit("draw.py: attention.def has no forward of sm80 for d 128")
    count, own, block = map(int, found.groups())
    p.text(20, 28, f"a block: {own} queries, {block} keys a step", "title")
    for warp in range(count):
        y = 46 + 84 * warp
        first = own // count * warp
        p.box(20, y, 120, 76, "kept")
        p.middle(80, y + 34, f"warp {warp}", "title")
        p.middle(80, y + 56, f"queries {first} to {first + own // count - 1}", "small")
        p.box(150, y, 190, 76, "here" if warp == 0 else "gone")
        p.middle(
            245, y + 42, f"{own // count} x {block} scores" if warp == 0 else "the same", "" if warp == 0 else "faint"
        )
    p.text(400, 28, "16 x 8 scores of one mma: the lane of each", "title")
    left, top, width, height = 400, 46, 52, 20.5
    for row in range(16):
        for column in range(8):
            lane = row % 8 * 4 + column // 2
            four = row == 0
            x, y = left + width * column, top + height * row
            p.box(x, y, width, height, "here" if four else "box", 0)
            p.middle(x + width / 2, y + 15, str(lane), "small number")
    p.arrow((340, 84), (400, 84))
    p.text(400, 396, "A row is in four lanes: a maximum or a sum takes two shuffles,", "faint")
    p.text(400, 413, "and no other warp has to be asked.", "faint")
    return p


# ------------------------------------------------------------------------------------------------------ the roofline

BEGIN, END = "<!-- drawn by docs/draw.py: {} -->", "<!-- end of the table -->"


def latest(rows: list[dict], **wanted: object) -> dict:
    found = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
    if not found:
        sys.exit(f"draw.py: bench/results has no row of {wanted}")
    return found[-1]


def plain(x: float) -> str:
    """Three digits, without an exponent."""
    return f"{x:.0f}" if x >= 100 else f"{float(f'{x:.3g}'):g}"


def bars(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def attention_work(case: str) -> tuple[float, float, float]:
    """Operations of forward, and bytes that it and backward move at least, of "B4H16/16S4096D128f-bfloat16"."""
    found = re.fullmatch(r"B(\d+)H(\d+)/(\d+)S(\d+)(?:x(\d+))?D(\d+)([cf])-(\w+)( softcap| bias)?", case)
    if not found:
        sys.exit(f"draw.py: {case} is no case")
    b, h, hk, sq, sk, d = (int(x or found[4]) for x in found.groups()[:6])
    size = 4 if found[8] == "float32" else 2
    queries, keys, lse = b * h * sq * d * size, b * hk * sk * d * size, b * h * sq * 4
    operations = 4.0 * b * h * sq * sk * d / (2 if found[7] == "c" else 1)
    bias = b * h * sq * sk * size if found[9] == " bias" else 0
    return operations, 2 * queries + 2 * keys + lse + bias, 4 * queries + 4 * keys + lse + bias


def norm_work(case: str) -> tuple[float, float, float]:
    """The same of "m16384 k1024 n4096 bfloat16"."""
    m, k, n = (int(x) for x in re.findall(r"[mkn](\d+)", case))
    size = 4 if "float32" in case else 2
    forward = (m * k + n * k + m * n) * size
    return 2.0 * m * k * n, forward, forward + (m * k + n * k) * size


def gpu_peaks() -> tuple[float, float]:
    """What one H200 does at most: operations a second of bfloat16, at rest, and bytes that are read."""
    rows = [json.loads(line) for line in (ROOT / "bench/results/h200.jsonl").read_text().splitlines()]
    peaks = latest(rows, table="peaks")
    return peaks["product_tflops"]["rest"] * 1e12, peaks["read_tbs"] * 1e12


def gpu_table() -> str:
    """Cases of the H200: operations a byte, the roof over them, and what has been reached."""
    tensor, memory = gpu_peaks()
    wanted = [
        ("sm90, d 64", "B4H32/32S4096D64f-bfloat16"),
        ("sm90, d 128", "B4H16/16S4096D128f-bfloat16"),
        ("sm90, d 128", "B4H16/16S4096D128c-bfloat16"),
        ("sm90, d 129 to 256", "B4H10/10S4096D192c-bfloat16"),
        ("sm90, d 129 to 256", "B4H8/8S4096D256f-bfloat16"),
        ("sm90, d over 256", "B4H4/4S4096D512c-bfloat16"),
        ("sm90, options", "B4H16/16S4096D128c-bfloat16 softcap"),
        ("sm90, options", "B4H16/16S4096D128f-bfloat16 bias"),
        ("sm90, float32", "B4H16/16S4096x4096D128f-float32"),
        ("sm80", "B4H16/16S4096D128f-bfloat16"),
        ("sm80, d 256", "B4H8/8S4096D256f-bfloat16"),
        ("few queries", "B32H32/8S1x8192D128f-bfloat16"),
        ("sm90, short", "B256H16/16S128D128c-bfloat16"),
        ("small", "B1H1/1S128x128D32f-float32"),
        ("norm-linear", "m16384 k1024 n4096 bfloat16"),
        ("norm-linear", "m2048 k768 n3072 bfloat16"),
    ]
    lines = [
        bars(
            "kernel",
            "case",
            "pass",
            "GFLOP",
            "MB at least",
            "FLOP a byte",
            "roof, TFLOP/s",
            "reached",
            "of the roof",
            "commit",
        ),
        "|" + "---|" * 10,
    ]
    for kernel, case in wanted:
        name = "h200-sm80" if kernel.startswith("sm80") else "h200"
        rows = [json.loads(line) for line in (ROOT / f"bench/results/{name}.jsonl").read_text().splitlines()]
        row = latest([row for row in rows if "fwd_rest" in row or "fwd_ms" in row], case=case)
        is_attention = kernel != "norm-linear"
        forward, bytes_forward, bytes_backward = (attention_work if is_attention else norm_work)(case)
        for name, key, times, moved in (
            ("forward", "fwd", 1.0, bytes_forward),
            ("backward", "bwd", 2.5 if is_attention else 2.0, bytes_backward),
        ):
            work = times * forward
            rest = row.get(f"{key}_rest", {})
            if "rate" in rest:
                rate = rest["rate"]["heddle"] * 1e12
            elif "us" in rest:
                rate = work / (rest["us"] * 1e-6)
            elif row.get(f"{key}_ms"):
                rate = work / (row[f"{key}_ms"] * 1e-3)
            else:
                continue
            # float32 is three products of float16 parts
            roof = min(tensor / (3 if "float32" in case else 1), memory * work / moved)
            lines.append(
                bars(
                    kernel,
                    case,
                    name,
                    plain(work / 1e9),
                    plain(moved / 1e6),
                    plain(work / moved),
                    plain(roof / 1e12),
                    plain(rate / 1e12),
                    f"{rate / roof:.2f}" if rate > 0.01 * roof else f"{rate / roof:.1g}",
                    row["commit"],
                )
            )
    return "\n".join(lines)


def cpu_table() -> str:
    """Cases of one thread of the processor that was recorded: rate, and fraction of the peak measured beside it."""
    text = (ROOT / "bench/results/amd-epyc-family26-model2-2cores.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    wanted = [
        ("attention f32", "b1 h2 s4096 d64 forward"),
        ("attention f32", "b1 h2 s4096 d64 forward + backward"),
        ("attention f32", "b1 h2 s4096 d128 forward"),
        ("attention 16-bit", "bf16 b1 h8 s1024 d128 forward"),
        ("attention s197", "b8 h12 s197 d64 forward"),
        ("off the table", "b64 h8 s17 d64 forward"),
        ("off the table", "b1 h8 sq4096 sk8 d64 forward"),
        ("norm-linear", "f32 forward"),
        ("norm-linear", "bf16 forward"),
    ]
    lines = [bars("case", "GFLOP/s", "of the peak of float32", "commit"), "|" + "---|" * 4]
    for section, name in wanted:
        row = latest(rows, section=section, name=name, threads=1)
        commit = row["commit"][:7]
        lines.append(bars(f"{section.split()[0]} {name}", f"{row['gflops']:.0f}", f"{row['fraction']:.2f}", commit))
    return "\n".join(lines).replace("| off ", "| attention ")


def with_tables(page: str) -> str:
    for name, table in (("gpu", gpu_table()), ("cpu", cpu_table())):
        page = replaced(page, BEGIN.format(name), END, table, "docs/measuring.md")
    return page


def main() -> int:
    parser = arguments_of(__doc__)
    parser.add_argument("build", nargs="?", type=pathlib.Path, default=ROOT / "build")
    arguments = parser.parse_args()
    numbers = Numbers(arguments.build)
    pictures = {
        "tiling": tiling,
        "online-softmax": online_softmax,
        "recomputation": recomputation,
        "warps": warps,
        "norm-for-free": norm_for_free,
    }
    made = {f"docs/img/{name}.svg": draw(numbers).svg() for name, draw in pictures.items()}
    made["docs/measuring.md"] = with_tables((ROOT / "docs/measuring.md").read_text())
    return finish(made, arguments.check, "docs/draw.py")


if __name__ == "__main__":
    sys.exit(main())
