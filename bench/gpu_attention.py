#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attention on one GPU, heddle and PyTorch's kernels in turn in one process: device time alone (bench/gpu_timing.py).

    python3 bench/gpu_attention.py [--library build/libheddle.so] [--table NAME ...] [--filter TEXT] [--regime rest|power]
                                   [--flex] [--json FILE]

Tables: plain (the rows of every comparison), shapes (short, odd and other head dims), options (every option beside the plain
row of its size), float32, decode, deterministic. A row: TFLOP/s forward and backward of heddle and of each peer that can
compute it (decode: TB/s of K and V), and heddle over the best of them. Operations: 4·b·h·d for each query and key that
see each other, backward 2.5 times as many; under causal masks half of all pairs. An option is also told as a fraction of
the plain row with the same mask and the same tiles visible: how many tiles of 128 queries and 128 keys of which anything
is seen it computes in a second, over how many plain does in turn. Inputs are normal numbers in layout [b, s, h, d]. Peers:
cudnn, fa2 (FlashAttention-2) and efficient of PyTorch's scaled_dot_product_attention, flex (FlexAttention compiled, with
--flex: it compiles for ten seconds a row). Each result is compared with the first peer's: a difference over 3e-2 is told.
"""
import argparse
import dataclasses
import json
import math

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from gpu_options import BETWEEN, FLOAT32_OPTIONS, OPTIONS
from gpu_timing import POWER, REST, Clock, need_gpu
from heddle_c import Library

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION}
TILE = 128
TOLERANCE = 3e-2  # only to see that all compute the same thing; the tests judge accuracy


@dataclasses.dataclass
class Case:
    """One problem, and what makes it more than a plain one."""
    b: int
    h: int
    hk: int
    sq: int
    sk: int
    d: int
    causal: bool
    dtype: torch.dtype = BF16
    dv: int = 0
    option: str = "plain"  # several are joined by +
    backward: bool = True

    def __post_init__(self):
        self.dv = self.dv or self.d

    def options(self):
        """Each of its options as a case of its own."""
        return [dataclasses.replace(self, option=option) for option in self.option.split("+")]

    def kinds(self):
        return [option.split()[0] for option in self.option.split("+")]

    def window(self):
        """Keys that a window shows to the left of the diagonal; None: it has none."""
        return next((int(each.option.split()[1]) for each in self.options() if each.option.startswith("window")), None)

    def is_padded(self):
        return bool({"padding", "lengths"} & {*self.option.split("+")})

    def name(self):
        heads = f"H{self.h}/{self.hk}"
        rows = f"S{self.sq}" if self.sq == self.sk else f"S{self.sq}x{self.sk}"
        dims = f"D{self.d}" if self.d == self.dv else f"D{self.d}/{self.dv}"
        option = "" if self.option == "plain" else " " + self.option
        return f"B{self.b}{heads}{rows}{dims}{'c' if self.causal else 'f'}-{str(self.dtype)[6:]}{option}"

    def pairs(self):
        """Queries and keys that see each other, of one head of one sequence, on average."""
        s = self.sk
        if self.window():
            left = min(s, self.window())
            return s * left - left * left / 2
        if self.is_padded():
            return sum(n * n / 2 if self.causal else self.sq * n for n in padded_lengths(self)) / self.b
        if self.option == "documents":
            return sum(n * n for n in document_lengths(self)) / self.b * 0.5
        if self.option == "blocks":
            return self.sq * s * 0.25
        return self.sq * s * (0.5 if self.causal else 1)

    def tiles(self):
        """Tiles of which anything is seen, of one head of one sequence, on average."""
        up = lambda n: -(-n // TILE)  # noqa: E731
        below = lambda n: up(n) * (up(n) + 1) // 2  # noqa: E731
        s = up(self.sk)
        if self.window():
            left = up(self.window())
            return sum(min(left, t) + 1 for t in range(s))
        if self.is_padded():
            ends = lambda n: [n - self.sq + TILE * (t + 1) if self.causal else n for t in range(up(self.sq))]  # noqa: E731
            return sum(up(max(0, end)) for n in padded_lengths(self) for end in ends(n)) / self.b
        if self.option == "documents":
            return sum(below(n) for n in document_lengths(self)) / self.b
        if self.option == "blocks":
            return up(self.sq) * s * 0.25
        return below(self.sk) if self.causal else up(self.sq) * s

    def flops(self):
        return 2.0 * self.b * self.h * self.pairs() * (self.d + self.dv)


def padded_lengths(c):
    return [c.sk - c.sk // 2 * n // max(1, c.b - 1) for n in range(c.b)]  # from all down to half


def document_lengths(c):
    """Of all sequences together, in packed form: uneven, about 500 on average."""
    generator = torch.Generator().manual_seed(1)
    total, lengths = c.b * c.sq, []
    while total:
        lengths.append(min(total, int(torch.randint(100, 901, (1,), generator=generator))))
        total -= lengths[-1]
    return lengths


def tensors(c, generator):
    make = lambda heads, rows, d: torch.randn(c.b, rows, heads, d, device="cuda", generator=generator).to(c.dtype).transpose(1, 2)
    return make(c.h, c.sq, c.d), make(c.hk, c.sk, c.d), make(c.hk, c.sk, c.dv), make(c.h, c.sq, c.dv)


# ------------------------------------------------------------------------------------------------------- the options

def option_inputs(c):
    """What heddle is called with, beside the plain tensors."""
    if "+" in c.option:
        return {name: x for each in c.options() for name, x in option_inputs(each).items()}
    device = dict(device="cuda")
    rows = torch.arange(c.sk, **device)
    kind = c.option.split()[0]
    if kind in ("plain", "documents"):
        return {}
    if kind == "softcap":
        return {"softcap": 30.0}
    if kind == "alibi":
        return {"alibi_slopes": 2.0 ** (-8.0 / c.h * torch.arange(1, c.h + 1, **device))}
    if kind == "window":
        return {"window": (c.window(), -1)}
    if kind == "sinks":
        return {"sinks": torch.randn(c.h, **device)}
    if kind == "lse":
        return {"dlse": torch.randn(c.b, c.h, c.sq, **device)}
    if kind == "lengths":
        return {"seqlens_k": torch.tensor(padded_lengths(c), dtype=torch.int32, **device)}
    if kind == "padding":
        lengths = torch.tensor(padded_lengths(c), **device)
        mask = (rows < lengths[:, None])[:, None, None, :].to(torch.uint8)
        return {"bool_mask": mask.expand(c.b, c.h, c.sq, c.sk)}
    if kind == "dense":  # [b, 1, sq, sk] without empty tiles: one key in ten is not seen
        mask = (torch.rand(c.b, 1, c.sq, c.sk, **device) > 0.1).to(torch.uint8)
        return {"bool_mask": mask.expand(c.b, c.h, c.sq, c.sk)}
    if kind == "blocks":  # a quarter of the tiles of 128
        tiles = (torch.arange(c.sq, **device)[:, None] // 128 * 7 + rows // 128 * 5) % 4 == 0
        return {"bool_mask": tiles[None, None].to(torch.uint8).expand(c.b, c.h, c.sq, c.sk)}
    if c.option == "bias padding":  # as many write it: the least number where nothing is to be seen
        lengths = torch.tensor(padded_lengths(c), **device)
        bias = torch.zeros(c.b, c.sk, dtype=c.dtype, **device)
        bias.masked_fill_(rows >= lengths[:, None], torch.finfo(c.dtype).min)
        return {"bias": bias[:, None, None].expand(c.b, c.h, c.sq, c.sk)}
    if kind in ("bias", "dbias"):
        heads = 1 if "shared" in c.option else c.b
        bias = torch.randn(heads, c.h, c.sq, c.sk, **device).to(c.dtype)
        more = {"dbias": torch.empty_like(bias).expand(c.b, c.h, c.sq, c.sk)} if kind == "dbias" else {}
        return {"bias": bias.expand(c.b, c.h, c.sq, c.sk), **more}
    if kind == "dropout":
        return {"dropout": 0.1}
    if kind == "weights":
        return {"weights": True}
    if kind == "deterministic":
        return {"deterministic": True}
    raise ValueError(f"no option is called {c.option}")


def ours(lib, c, q, k, v, dout, inputs):
    if c.option != "documents":
        return lib.attention(q, k, v, dout if c.backward else None, "bottom right" if c.causal else False, **inputs)
    pack = lambda x: x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])
    return lib.attention_varlen(pack(q), pack(k), pack(v), pack(dout), document_lengths(c), "bottom right")


def sdpa_arguments(c, inputs):
    """What PyTorch's scaled_dot_product_attention is to be called with; None: it has no such option."""
    if "+" in c.option:
        of_each = [sdpa_arguments(each, inputs) for each in c.options()]
        return None if None in of_each else {name: x for each in of_each for name, x in each.items()}
    arguments = {"is_causal": c.causal, "enable_gqa": c.h != c.hk}
    kind = c.option.split()[0]
    if kind in ("plain", "deterministic"):
        return arguments
    if kind == "dropout":
        return {**arguments, "dropout_p": 0.1}
    if kind in ("padding", "lengths", "dense", "blocks") and not c.causal:
        mask = inputs.get("bool_mask")
        if mask is None:
            mask = torch.arange(c.sk, device="cuda") < inputs["seqlens_k"][:, None, None, None]
            return {**arguments, "attn_mask": mask}
        return {**arguments, "attn_mask": mask.narrow(1, 0, 1).bool()}
    if kind in ("bias", "dbias") and not c.causal:
        bias = inputs["bias"].detach()
        bias = bias.narrow(0, 0, 1) if "shared" in c.option else bias
        return {**arguments, "attn_mask": bias.clone().requires_grad_() if kind == "dbias" else bias}
    return None


def sdpa_peer(c, backend, q, k, v, dout, arguments):
    """Forward and backward of one of PyTorch's kernels; None where it does not take the problem."""
    leaves = [x.detach().requires_grad_(c.backward) for x in (q, k, v)]
    mask = arguments.get("attn_mask")
    wanted = leaves + ([mask] if mask is not None and mask.requires_grad else [])

    def forward():
        with sdpa_kernel(backend):
            return sdpa(*leaves, **arguments)

    try:
        o = forward()
        if c.backward:
            gradients = torch.autograd.grad(o, wanted, dout, retain_graph=True)
    except RuntimeError:
        return None
    backward = (lambda: torch.autograd.grad(o, wanted, dout, retain_graph=True)) if c.backward else None
    return forward, backward, (o, *gradients[:3]) if c.backward else (o,)


def flex_peer(c, q, k, v, dout, inputs):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    kinds, score, block = c.kinds(), None, None
    if not {*kinds} <= {"plain", "softcap", "alibi", "documents", "padding", "window", "bias", "dbias"}:
        return None
    if "softcap" in kinds:
        score = lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0)
    elif "alibi" in kinds:
        slopes = inputs["alibi_slopes"]
        score = lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()
    if "documents" in kinds:
        ids = torch.repeat_interleave(torch.tensor(document_lengths(c), device="cuda")).view(-1)
        of = torch.arange(c.b, device="cuda")[:, None] * c.sq + torch.arange(c.sq, device="cuda")
        ids = ids[of]
    elif "padding" in kinds:
        lengths = torch.tensor(padded_lengths(c), device="cuda")
    if "bias" in kinds or "dbias" in kinds:
        bias = inputs["bias"]
        score = lambda s, b, h, i, j: s + bias[b, h, i, j]
    rules = {"window": lambda b, h, i, j: (j <= i) & (j >= i - c.window()),
             "documents": lambda b, h, i, j: (j <= i) & (ids[b, i] == ids[b, j]),
             "padding": lambda b, h, i, j: j < lengths[b]}
    rule = next((rules[kind] for kind in kinds if kind in rules), (lambda b, h, i, j: j <= i) if c.causal else None)
    if rule is not None:
        block = create_block_mask(rule, c.b, None, c.sq, c.sk, device="cuda")
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    run = torch.compile(flex_attention, dynamic=False)
    forward = lambda: run(*leaves, score_mod=score, block_mask=block, enable_gqa=c.h != c.hk)
    try:
        o = forward()
        gradients = torch.autograd.grad(o, leaves, dout, retain_graph=True)
    except Exception as e:  # its compiler has many ways to say no
        print(f"    flex: {type(e).__name__}: {str(e).splitlines()[0][:90]}")
        return None
    return forward, lambda: torch.autograd.grad(o, leaves, dout, retain_graph=True), (o, *gradients)


# ------------------------------------------------------------------------------------------------------- measurement

def difference(x, y):
    x, y = x.double(), y.double()
    return ((x - y).norm() / y.norm()).item()


def peers_of(c, wanted, q, k, v, dout, inputs):
    peers, arguments = {}, sdpa_arguments(c, inputs)
    for name in wanted:
        if name == "flex":
            peer = flex_peer(c, q, k, v, dout, inputs) if c.backward else None
        else:
            peer = sdpa_peer(c, BACKENDS[name], q, k, v, dout, arguments) if arguments else None
        if peer:
            peers[name] = peer
    return peers


def ready(lib, c):
    """heddle's job of a case, and what it has as tensors and as inputs of the option."""
    generator = torch.Generator("cuda").manual_seed(1)
    torch.manual_seed(1)
    of = tensors(c, generator)
    inputs = option_inputs(c)
    job = ours(lib, c, *of, inputs)
    job.forward()
    if job.backward:
        job.backward()
    return job, of, inputs


def measure(lib, clock, c, wanted, regimes, plain):
    """plain: the case without the option, which takes turns with it; None where the case is one."""
    job, (q, k, v, dout), inputs = ready(lib, c)
    beside = ready(lib, plain)[0] if plain else None
    peers = peers_of(c, wanted, q, k, v, dout, inputs)
    row = {"case": c.name(), "kernels": job.kernels, "workspace": job.workspaces}
    if peers and not {"dropout", "documents"} & {*c.kinds()}:
        theirs = next(iter(peers.values()))[2]
        row["differences"] = [difference(job.tensors[n], y) for n, y in zip(("o", "dq", "dk", "dv"), theirs)]
        if not max(row["differences"]) < TOLERANCE:
            print(f"    DIFFERENT from {next(iter(peers))}: {row['differences']}")
    work = 2.0 * c.b * c.hk * c.sk * (c.d + c.dv) / 2 * q.element_size() if c.sq == 1 else c.flops()
    for regime in regimes:
        for label, index, factor in (("fwd", 0, 1.0), ("bwd", 1, 2.5)):
            calls = {"heddle": (job.forward, job.backward)[index],
                     **{name: peer[index] for name, peer in peers.items()}}
            if calls["heddle"] is None:
                continue
            if beside:
                calls["plain"] = (beside.forward, beside.backward)[index]
            seconds = dict(zip(calls, clock.measure(regime, list(calls.values()))))
            without = seconds.pop("plain", None)
            rates = {name: factor * work / s * 1e-12 for name, s in seconds.items()}
            others = [r for name, r in rates.items() if name != "heddle"]
            row[f"{label}_{regime}"] = {
                "us": {name: s * 1e6 for name, s in seconds.items()}, "rate": rates,
                "over_best": rates["heddle"] / max(others) if others else None,
                "of_plain": c.tiles() / seconds["heddle"] * without / plain.tiles() if without else None}
    return row


def tell(row, regimes):
    for regime in regimes:
        cells = []
        for label in ("fwd", "bwd"):
            r = row.get(f"{label}_{regime}")
            if r:
                rates = " ".join(f"{name} {x:.4g}" for name, x in r["rate"].items())
                over = f" = {r['over_best']:.2f}" if r["over_best"] else ""
                part = f" ({r['of_plain']:.2f} of plain)" if r["of_plain"] else ""
                cells.append(f"{label} {rates}{over}{part}")
        print(f"{row['case']:36s} {regime:5s} {' | '.join(cells)}", flush=True)


# ----------------------------------------------------------------------------------------------------------- tables

def plain_rows():
    for d, h in ((64, 32), (128, 16), (256, 8)):
        for causal in (False, True):
            for s in (512, 1024, 2048, 4096, 8192, 16384):
                yield Case(16384 // s, h, h, s, s, d, causal), ["cudnn", "fa2"]
    yield Case(4, 32, 8, 4096, 4096, 128, True), ["cudnn", "fa2"]
    yield Case(1, 16, 16, 32768, 32768, 128, True), ["cudnn", "fa2"]


def shape_rows():
    for d, h in ((64, 32), (128, 16)):
        for s in (128, 256):
            yield Case(32768 // s, h, h, s, s, d, True), ["cudnn", "fa2"]
    for d, h in ((32, 64), (40, 32), (80, 24), (96, 20), (160, 12), (192, 10)):
        yield Case(4, h, h, 4096, 4096, d, True), ["cudnn", "fa2"]
    yield Case(4, 16, 16, 4096, 4096, 192, True, dv=128), ["cudnn"]
    for d in (320, 384, 512):
        yield Case(4, 4, 4, 4096, 4096, d, True), ["efficient"]
    yield Case(3, 5, 5, 1537, 1537, 128, True), ["cudnn", "fa2"]
    yield Case(3, 5, 5, 1537, 1537, 64, False), ["cudnn", "fa2"]
    yield Case(1, 1, 1, 16384, 16384, 128, True), ["cudnn", "fa2"]
    yield Case(2, 28, 4, 3000, 3000, 128, True), ["cudnn", "fa2"]
    yield Case(4, 16, 16, 4096, 4096, 128, True, F16), ["cudnn", "fa2"]


def option_rows():
    """A plain row in front of those whose fraction of it is told, and which take turns with it."""
    for d, h in ((128, 16), (64, 32), (256, 8)):
        for s in (4096, 512, 16384):
            b = 16384 // s
            for causal in (True, False):
                yield Case(b, h, h, s, s, d, causal), ["cudnn"]
                for option in OPTIONS["c" if causal else "f"]:
                    if s < 16384 or "bias" not in option:
                        yield Case(b, h, h, s, s, d, causal, option=option), ["cudnn", "efficient", "fa2", "flex"]
    for d, h in ((160, 12), (192, 10)):  # where forward has no kernel for several options at once
        for causal in (True, False):
            yield Case(4, h, h, 4096, 4096, d, causal), ["cudnn"]
            for option in OPTIONS["c" if causal else "f"]:
                if option in BETWEEN:
                    yield Case(4, h, h, 4096, 4096, d, causal, option=option), ["cudnn", "efficient", "fa2", "flex"]
    yield Case(1, 4, 4, 2048, 2048, 128, False), ["cudnn"]
    yield Case(1, 4, 4, 2048, 2048, 128, False, option="weights"), []


def float32_rows():
    for d, h in ((64, 32), (128, 16)):
        for causal in (True, False):
            for s in (4096, 512, 1024, 16384):
                yield Case(16384 // s, h, h, s, s, d, causal, F32), ["efficient"]
    for d in (128, 64, 256):
        for causal in (True, False):
            yield Case(2, 16, 16, 4096, 4096, d, causal, F32), ["efficient"]
            for option in FLOAT32_OPTIONS["c" if causal else "f"]:
                yield Case(2, 16, 16, 4096, 4096, d, causal, F32, option=option), ["efficient"]
    yield Case(1, 1, 1, 128, 128, 32, False, F32), ["efficient"]


def decode_rows():
    for d in (64, 128, 256):
        for b, sk in ((1, 8192), (1, 131072), (32, 8192), (64, 4096)):
            yield Case(b, 32, 8, 1, sk, d, False, backward=False), ["cudnn", "fa2"]
    yield Case(32, 32, 8, 16, 8192, 128, False, backward=False), ["cudnn", "fa2"]


def deterministic_rows():
    for d, h in ((64, 32), (128, 16), (256, 8)):
        for causal in (False, True):
            for s in (1024, 4096, 16384):
                yield Case(16384 // s, h, h, s, s, d, causal), []
                yield Case(16384 // s, h, h, s, s, d, causal, option="deterministic"), []


TABLES = {"plain": plain_rows, "shapes": shape_rows, "options": option_rows, "float32": float32_rows,
          "decode": decode_rows, "deterministic": deterministic_rows}


def means(rows, regimes):
    """Geometric means of heddle over the best peer."""
    for regime in regimes:
        for label in ("fwd", "bwd"):
            over = [r[f"{label}_{regime}"]["over_best"] for r in rows if r.get(f"{label}_{regime}", {}).get("over_best")]
            if over:
                print(f"geometric mean of {label}, {regime}: {math.exp(sum(map(math.log, over)) / len(over)):.3f} of the best "
                      f"peer in {len(over)} rows; least {min(over):.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="build/libheddle.so")
    parser.add_argument("--table", action="append", choices=list(TABLES), help="default: all")
    parser.add_argument("--filter", action="append", default=[], help="only cases whose name holds one of these")
    parser.add_argument("--regime", action="append", choices=[REST, POWER], help="default: both")
    parser.add_argument("--flex", action="store_true", help="FlexAttention too")
    parser.add_argument("--alone", action="store_true", help="heddle alone, no peers")
    parser.add_argument("--json", help="append a line per case to this file")
    a = parser.parse_args()
    need_gpu(parser)
    lib, clock, regimes = Library(a.library), Clock(), a.regime or [REST, POWER]
    flops, copy = clock.peaks()
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "library": lib.c.heddle_version_string().decode(),
               "peak_tflops": round(flops), "peak_tbs": round(copy, 2)}
    print(f"{machine['gpu']}, torch {torch.__version__}; a bfloat16 product of 8192³ {flops:.0f} TFLOP/s, a copy {copy:.2f} TB/s")
    for table in a.table or TABLES:
        print(f"-- {table}: TFLOP/s (decode: TB/s), = heddle over the best peer")
        rows, plain = [], None
        for case, wanted in TABLES[table]():
            if case.option == "plain":
                plain = case
            if a.filter and not any(x in case.name() for x in a.filter):
                continue
            wanted = [] if a.alone else [name for name in wanted if name != "flex" or a.flex]
            try:
                beside = plain if case.option != "plain" else None
                rows.append({"table": table, **machine, **measure(lib, clock, case, wanted, regimes, beside)})
            except (RuntimeError, torch.OutOfMemoryError) as e:
                print(f"{case.name():36s} {str(e).splitlines()[0][:110]}", flush=True)
                continue
            finally:
                torch.cuda.empty_cache()
            tell(rows[-1], regimes)
            if a.json:
                with open(a.json, "a", encoding="utf-8") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
        means(rows, regimes)


if __name__ == "__main__":
    main()
