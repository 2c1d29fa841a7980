#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""heddle on the CPU beside PyTorch, this machine's own limits and plain loops, in one process.

    ./dev bench --cpu [--quick] [--only SECTION] [--out FILE]

How it is measured
  * The peak is the rate of float32 multiply-adds in registers, of the same vectors, on as many threads, measured again
    before every call that is timed; a fraction is the median of call over neighbouring peak.
  * heddle and PyTorch run in turn (the order changes every round) on the same inputs and threads; a ratio is the median
    of the rounds' ratios: PyTorch's time over heddle's.
  * One thread: the thread's own processor time, so that other programs disturb less. More: the wall clock; a sample in
    which our threads had to wait for a core (the kernel's schedstat), or shared one (right after it the peak of all
    threads is below 0.9 of as many times one's), is taken again, and a row is marked with a question mark, and not
    recorded, if that did not help for more than half of some call's samples.
  * heddle writes into outputs that its caller has allocated; PyTorch is called as its users call it and allocates its
    own: F.scaled_dot_product_attention, F.linear(F.layer_norm(...)), torch.autograd.grad.
  * Both results are compared before anything is timed.
  * FLOPs: 2·(d + dv) a score, half if causal, backward 2.5 times forward; norm-linear 2·m·n·k, backward twice.
"""
import argparse
import ctypes
import os
import pathlib
import sys
import time

import torch
import torch.nn.functional as F
from cpu_measure import (BF16, F16, F32, ROOT, SHORT, Machine, Report, attention_flops, fraction_of, header_of, median,
                         normal, ratio, record, results_path, same)
from cpu_options import attention_options, report_options
from heddle_c import Library, Strides


# ------------------------------------------------------------------------------------------------------- attention

class AttentionPair:
    """heddle and PyTorch on the same problem."""

    def __init__(self, m, b, h, sq, d, causal=False, dtype=F32, sk=None, hk=None, backward=True, library=None):
        sk, hk = sk or sq, hk or h
        self.m, self.dtype = m, dtype
        q, k, v = normal(b, h, sq, d, dtype=dtype), normal(b, hk, sk, d, dtype=dtype), normal(b, hk, sk, d, dtype=dtype)
        dout = normal(b, h, sq, d, dtype=dtype) if backward else None
        self.q, self.k, self.v = q, k, v
        self.job = (library or m.heddle).attention(q, k, v, dout, causal)
        self.flops = attention_flops(b, h, sq, sk, d, causal)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        options = dict(is_causal=causal, enable_gqa=hk != h)

        def forward():
            with torch.no_grad():
                return F.scaled_dot_product_attention(q, k, v, **options)

        def both():
            o = F.scaled_dot_product_attention(*leaves, **options)
            return (o,) + torch.autograd.grad(o, leaves, dout)

        self.torch_forward, self.torch_both = forward, both

    def heddle_both(self):
        self.job.forward()
        self.job.backward()

    def check(self, what):
        t = self.job.tensors
        if self.job.backward:
            self.heddle_both()
            same([t[n] for n in ("o", "dq", "dk", "dv")], self.torch_both(), self.dtype, what)
        else:
            self.job.forward()
            same([t["o"]], [self.torch_forward()], self.dtype, what)

    def measure(self, what, peak=None):
        """heddle forward, backward, both; PyTorch forward, both: {name: (seconds, peaks)}"""
        self.check(what)
        calls = {"hf": self.job.forward, "tf": self.torch_forward, "hb": self.job.backward, "tb": self.torch_both}
        times, peaks = self.m.time(calls, peak)
        times["hfb"] = [a + b for a, b in zip(times["hf"], times["hb"])]
        peaks["hfb"] = [(a + b) / 2 for a, b in zip(peaks["hf"], peaks["hb"])]
        return times, peaks


def add_pair(report, section, name, flops, times, peaks, goals, goals_both, only_both=False, **more):
    """The forward row and the forward + backward row of a pair."""
    for label, ours, theirs, factor, goal in (("forward", "hf", "tf", 1, goals),
                                              ("forward + backward", "hfb", "tb", 3.5, goals_both)):
        if only_both and label == "forward":
            goal = (None, None, None)
        work = flops * factor
        report.add(section, f"{name} {label}", ms=1e3 * median(times[ours]), gflops=1e-9 * work / median(times[ours]),
                   fraction=fraction_of(work, times[ours], peaks[ours]), torch_ms=1e3 * median(times[theirs]),
                   over_torch=ratio(times[theirs], times[ours]), direction=label, goals=goal,
                   torch_fraction=fraction_of(work, times[theirs], peaks[theirs]), **more)


def attention_f32(m, report, quick):
    report.section("attention, float32")
    goals = {(64, False): ((.82, 1.15, None), (.85, 1.3, None)), (128, False): ((.87, 1.10, None), (.85, 1.2, None)),
             (64, True): ((.76, 1.7, None), (.78, 1.8, None)), (128, True): ((.80, 1.7, None), (.80, 1.8, None))}
    for d in (64, 128):
        for causal in (False, True):
            for s in (1024, 2048, 4096, 8192)[:1 if quick else 4]:
                h = max(8192 // s, m.threads)  # as many heads as keep a row quick, and each thread at least one
                name = f"b1 h{h} s{s} d{d}{' causal' if causal else ''}"
                times, peaks = AttentionPair(m, 1, h, s, d, causal).measure(name)
                add_pair(report, "attention f32", name, attention_flops(1, h, s, s, d, causal), times, peaks,
                         *goals[d, causal], b=1, h=h, s=s, d=d, causal=causal, dtype="f32")


def attention_vit(m, report, quick):
    report.section("attention, a vision transformer's shape, float32")
    times, peaks = AttentionPair(m, 8, 12, 197, 64).measure("s197")
    add_pair(report, "attention s197", "b8 h12 s197 d64", attention_flops(8, 12, 197, 197, 64, False), times, peaks,
             None, (.72, 1.5, None), only_both=True, b=8, h=12, s=197, d=64, causal=False, dtype="f32")


def attention_16(m, report, quick):
    report.section("attention, 16-bit types", "(x other: over heddle's own float32)")
    for dtype in (BF16, F16):
        for d in (64, 128):
            for causal in ((False,) if quick else (False, True)):
                pair, own = AttentionPair(m, 1, 8, 1024, d, causal, dtype), AttentionPair(m, 1, 8, 1024, d, causal)
                name = f"{SHORT[dtype]} b1 h8 s1024 d{d}{' causal' if causal else ''}"
                pair.check(name)
                calls = {"hf": pair.job.forward, "of": own.job.forward, "tf": pair.torch_forward,
                         "hb": pair.job.backward, "ob": own.job.backward, "tb": pair.torch_both,
                         "uf": own.torch_forward, "ub": own.torch_both}
                t, p = m.time(calls)
                for label, factor, ours, theirs, plain, slow in (
                        ("forward", 1, t["hf"], t["tf"], t["of"], ratio(t["tf"], t["uf"])),
                        ("forward + backward", 3.5, [a + b for a, b in zip(t["hf"], t["hb"])], t["tb"],
                         [a + b for a, b in zip(t["of"], t["ob"])], ratio(t["tb"], t["ub"]))):
                    # PyTorch has no fast path where its 16-bit is several times slower than its own float32
                    goal = 20 if slow > 4 else 1.15
                    report.add("attention 16-bit", f"{name} {label}", ms=1e3 * median(ours),
                               torch_ms=1e3 * median(theirs), gflops=1e-9 * factor * pair.flops / median(ours),
                               fraction=fraction_of(factor * pair.flops, ours, p["hf"]),
                               torch_fraction=fraction_of(factor * pair.flops, theirs, p["tf"]), direction=label,
                               over_torch=ratio(theirs, ours), over_other=ratio(plain, ours), goals=(None, goal, 1.0),
                               b=1, h=8, s=1024, d=d, causal=causal, dtype=SHORT[dtype])


def attention_avx2(m, report, quick):
    if "avx2" not in m.heddle.isas():
        return
    report.section("attention, the AVX2 build, float32", "(of AVX2's peak; PyTorch beside it uses what it likes)")
    library = Library(m.build / "libheddle.so", "avx2")
    for d in (64, 128):
        for causal in (False, True):
            pair = AttentionPair(m, 1, 8, 1024, d, causal, library=library)
            pair.check("avx2")
            times, peaks = m.time({"forward": pair.job.forward, "backward": pair.job.backward},
                                  peak=lambda: m.peak("avx2"))
            for label, factor, goal in (("forward", 1, .82), ("backward", 2.5, .90)):
                work, t = pair.flops * factor, times[label]
                report.add("attention AVX2", f"b1 h8 s1024 d{d}{' causal' if causal else ''} {label}",
                           ms=1e3 * median(t), gflops=1e-9 * work / median(t),
                           fraction=fraction_of(work, t, peaks[label]),
                           goals=(None if causal else goal, None, None), b=1, h=8, s=1024, d=d, causal=causal,
                           dtype="f32", isa="avx2", direction=label)


def attention_dropout(m, report, quick):
    """The bits differ from PyTorch's: each is timed, neither compared."""
    report.section("attention, dropout 0.1", "(x other: the rate over that without dropout)")
    for isa in (None, "avx2") if "avx2" in m.heddle.isas() else (None,):
        library = Library(m.build / "libheddle.so", isa) if isa else m.heddle
        for dtype in (F32,) if quick or isa else (F32, BF16):
            for d in (64, 128):
                pair = AttentionPair(m, 1, 8, 1024, d, dtype=dtype, library=library)
                job = library.attention(pair.q, pair.k, pair.v, pair.job.tensors["dout"], dropout=0.1)
                leaves = [x.clone().requires_grad_() for x in (pair.q, pair.k, pair.v)]

                def torch_forward(pair=pair):
                    with torch.no_grad():
                        return F.scaled_dot_product_attention(pair.q, pair.k, pair.v, dropout_p=0.1)

                def torch_both(leaves=leaves, job=job):
                    o = F.scaled_dot_product_attention(*leaves, dropout_p=0.1)
                    return torch.autograd.grad(o, leaves, job.tensors["dout"])

                pair.job.forward()
                job.forward()
                t, p = m.time({"hf": job.forward, "of": pair.job.forward, "tf": torch_forward,
                               "hb": job.backward, "ob": pair.job.backward, "tb": torch_both},
                              peak=(lambda: m.peak("avx2")) if isa else None)
                both = [a + b for a, b in zip(t["hf"], t["hb"])]
                for label, factor, key, theirs in (("forward", 1, "f", ratio(t["tf"], t["hf"])),
                                                   ("backward", 2.5, "b", ratio(t["tb"], both))):
                    work, ours = pair.flops * factor, t["h" + key]
                    report.add("attention dropout", f"{isa + ' ' if isa else ''}{SHORT[dtype]} b1 h8 s1024 d{d} {label}",
                               ms=1e3 * median(ours), gflops=1e-9 * work / median(ours),
                               fraction=fraction_of(work, ours, p["h" + key]), over_torch=theirs,
                               over_other=ratio(t["o" + key], ours), goals=(None, 1.5, .6), b=1, h=8, s=1024, d=d,
                               causal=False, dtype=SHORT[dtype], isa=isa, direction=label, option="dropout")


# ----------------------------------------------------------------------------------------------------- norm-linear

class NormLinearPair:
    def __init__(self, m, rows, k, n, dtype, backward=True):
        x, gamma, beta = normal(rows, k, dtype=dtype), 1 + 0.1 * normal(k, dtype=dtype), 0.1 * normal(k, dtype=dtype)
        w, bias, dy = normal(n, k, dtype=dtype) / k ** 0.5, normal(n, dtype=dtype), normal(rows, n, dtype=dtype)
        self.m, self.dtype, self.flops = m, dtype, 2.0 * rows * k * n
        self.given = x, gamma, beta, w, bias
        self.job = m.heddle.norm_linear(*self.given, dy if backward else None)
        leaves = [a.clone().requires_grad_() for a in (x, gamma, beta, w, bias)]

        def forward():
            with torch.no_grad():
                return F.linear(F.layer_norm(x, (k,), gamma, beta), w, bias)

        def both(leaves=leaves, dy=dy):
            lx, lg, lb, lw, lc = leaves
            y = F.linear(F.layer_norm(lx, (k,), lg, lb), lw, lc)
            return (y,) + torch.autograd.grad(y, leaves, dy)

        self.torch_forward, self.torch_both, self.dy, self.leaves = forward, both, dy, leaves

    def check(self):
        """With PyTorch's float32: its own 16-bit dgamma and dbeta are off by several percent."""
        self.job.forward()
        self.job.backward()
        t = self.job.tensors
        plain = self.torch_both([x.detach().float().requires_grad_() for x in self.leaves], self.dy.float())
        same([t[n] for n in ("y", "dx", "dgamma", "dbeta", "dw", "dbias")], plain, self.dtype, "norm-linear")


def norm_linear(m, report, quick):
    report.section("norm-linear [2048,768] -> 3072", "(x other: over heddle's own float32)")
    own = NormLinearPair(m, 2048, 768, 3072, F32)
    for dtype in (F32, BF16) if quick else (F32, BF16, F16):
        pair = own if dtype is F32 else NormLinearPair(m, 2048, 768, 3072, dtype)
        pair.check()
        calls = {"hf": pair.job.forward, "tf": pair.torch_forward, "hb": pair.job.backward, "tb": pair.torch_both}
        if dtype is not F32:
            calls.update(of=own.job.forward, ob=own.job.backward)
        t, p = m.time(calls)
        goals = {F32: ((.93, 1.0, None), (.91, 1.1, None)), BF16: ((None, 1.5, 1.0),) * 2,
                 F16: ((None, None, 1.0),) * 2}
        for label, factor, ours, theirs, plain, goal in (
                ("forward", 1, t["hf"], t["tf"], t.get("of"), goals[dtype][0]),
                ("forward + backward", 3, [a + b for a, b in zip(t["hf"], t["hb"])], t["tb"],
                 [a + b for a, b in zip(t["of"], t["ob"])] if "of" in t else None, goals[dtype][1])):
            work = pair.flops * factor
            report.add("norm-linear", f"{SHORT[dtype]} {label}", ms=1e3 * median(ours), torch_ms=1e3 * median(theirs),
                       gflops=1e-9 * work / median(ours), fraction=fraction_of(work, ours, p["hf"]),
                       torch_fraction=fraction_of(work, theirs, p["tf"]), over_torch=ratio(theirs, ours),
                       over_other=ratio(plain, ours) if plain else None, goals=goal, m=2048, k=768, n=3072,
                       dtype=SHORT[dtype], direction=label)


def prepared(m, report, quick):
    """A forward that finds what it makes of the weight, beside the one that does not; results have the same bits."""
    report.section("norm-linear, the weight prepared", "(x other: over the plain call)")
    few = [(rows, 4096, n) for n in (4096, 12288) for rows in (1, 4, 16, 64)]
    for dtype in (F32, BF16):
        for rows, k, n in [(16, 1024, 4096)] if quick else [*few, (1024, 1024, 4096), (2048, 768, 3072)]:
            pair = NormLinearPair(m, rows, k, n, dtype, backward=False)
            kept = m.heddle.norm_linear(*pair.given, prepared=True)
            name = f"{SHORT[dtype]} m{rows} k{k} n{n} forward"
            pair.job.forward()
            kept.forward()
            if not torch.equal(kept.tensors["y"], pair.job.tensors["y"]):
                sys.exit(f"cpu.py: prepared {name}: not the bits of the plain call")
            same([kept.tensors["y"]], [pair.torch_forward()], dtype, f"prepared {name}")
            t, p = m.time({"h": kept.forward, "o": pair.job.forward, "t": pair.torch_forward})
            report.add("norm-linear prepared", name, ms=1e3 * median(t["h"]), gflops=1e-9 * pair.flops / median(t["h"]),
                       fraction=fraction_of(pair.flops, t["h"], p["h"]), torch_ms=1e3 * median(t["t"]),
                       over_torch=ratio(t["t"], t["h"]), torch_fraction=fraction_of(pair.flops, t["t"], p["t"]),
                       over_other=ratio(t["o"], t["h"]), goals=(None, None, None), m=rows, k=k, n=n,
                       dtype=SHORT[dtype], direction="forward", other_ms=1e3 * median(t["o"]))


def small_batches(m, report, quick):
    """Few rows beside a large weight: whoever packs the weight first, for as few uses of it, loses."""
    report.section("norm-linear, small batches", "(forward, and forward + backward of all gradients)")
    for dtype in (F32, BF16, F16):
        for rows in (16, 64) if quick else (8, 12, 16, 32, 64, 128, 256):
            pair = NormLinearPair(m, rows, 4096, 4096, dtype)
            pair.check()
            t, p = m.time({"hf": pair.job.forward, "tf": pair.torch_forward, "hb": pair.job.backward, "tb": pair.torch_both})
            for label, factor, ours, theirs in (
                    ("forward", 1, t["hf"], t["tf"]),
                    ("forward + backward", 3, [a + b for a, b in zip(t["hf"], t["hb"])], t["tb"])):
                report.add("norm-linear small", f"{SHORT[dtype]} m{rows} k4096 n4096 {label}", ms=1e3 * median(ours),
                           torch_ms=1e3 * median(theirs), gflops=1e-9 * pair.flops * factor / median(ours),
                           fraction=fraction_of(pair.flops * factor, ours, p["hf"]),
                           torch_fraction=fraction_of(pair.flops * factor, theirs, p["tf"]),
                           over_torch=ratio(theirs, ours), goals=(None, None, None), m=rows, k=4096, n=4096,
                           dtype=SHORT[dtype], direction=label)


# ---------------------------------------------------------------------------------------------------------- decode

def decode(m, report, quick):
    report.section("decoding, sq 1, sk 8192, h 32, hk 8, d 128", "(of the measured rate of reading k and v)")
    for dtype in (F32,) if quick else (F32, BF16, F16):
        pair = AttentionPair(m, 1, 32, 1, 128, dtype=dtype, sk=8192, hk=8, backward=False)
        pair.check("decode")
        bytes_read = pair.k.nbytes + pair.v.nbytes
        t, p = m.time({"h": pair.job.forward, "t": pair.torch_forward}, peak=lambda: m.read(pair.k, pair.v))
        report.add("decode", f"{SHORT[dtype]} forward", other=f"{1e-9 * bytes_read / median(t['h']):.1f} of "
                   f"{1e-9 * median(p['h']):.1f} GB/s", ms=1e3 * median(t["h"]), torch_ms=1e3 * median(t["t"]),
                   fraction=fraction_of(bytes_read, t["h"], p["h"]), over_torch=ratio(t["t"], t["h"]),
                   torch_fraction=fraction_of(bytes_read, t["t"], p["t"]), goals=(.80, 1.2, None), dtype=SHORT[dtype],
                   gbytes=1e-9 * bytes_read / median(t["h"]), read_gbytes=1e-9 * median(p["h"]))


# ------------------------------------------------------------------------------------------------------- two cores

def two_cores(m, report, quick):
    if m.threads < 2:
        return
    report.section(f"{m.threads} threads over one", "(x other: heddle's own time on one thread, wall clock)")
    cases = [(1, 1, 64, 64, False), (4096, 1, 64, 64, False), (1, 8, 1024, 64, False), (1, 8, 1024, 64, True),
             (1, 1, 1024, 64, False), (1, 1, 4096, 64, False), (1, 1, 4096, 64, True), (1, 3, 1024, 128, True)]
    jobs = [(f"b{b} h{h} s{s} d{d}{' causal' if c else ''}", AttentionPair(m, b, h, s, d, c).job)
            for b, h, s, d, c in (cases[2:6] if quick else cases)]
    jobs.append(("norm-linear [2048,768] -> 3072", NormLinearPair(m, 2048, 768, 3072, F32).job))
    threads = m.threads
    jobs.append(("the peak loop", None))
    for name, job in jobs:
        for label in ("forward", "backward") if job else ("",):
            call = (job.forward if label == "forward" else job.backward) if job else None
            if job:
                job.forward()

            def on(n, call=call):
                def it():
                    m.openmp.omp_set_num_threads(n)
                    call()
                return it

            if job:
                t, _ = m.time({"one": on(1), "all": on(threads)}, peak=lambda: 0.0, rounds=31, least=7)
                value, ms = ratio(t["one"], t["all"]), 1e3 * median(t["all"])
            else:
                m.disturbed = False
                value = median([m.peak() / m.peers.peak_flops(m.heddle.isa.encode(), 1, 3e-3) for _ in range(9)])
                ms = 1.5
            goal = None if name.startswith("b1 h1 s64 ") or not job else 1.95
            report.add("two cores", f"{name} {label}".strip(), ms=ms, over_other=value, goals=(None, None, goal),
                       direction=label or None)
    m.openmp.omp_set_num_threads(threads)


# ----------------------------------------------------------------------------------------------------- plain loops

def plain_loops(m, report, quick):
    report.section("llm.c's shape, b4 h12 s1024 d64 causal, over plain loops (bench/naive_attention.c)",
                   "(its backward is serial)")
    b, h, s, d = 4, 12, 256 if quick else 1024, 64
    c = h * d
    qkv, dout = normal(b, s, 3 * c), normal(b, s, c)
    out, pre, att = torch.empty(b, s, c), torch.empty(b, h, s, s), torch.empty(b, h, s, s)
    dqkv, dpre, datt = torch.zeros_like(qkv), torch.zeros_like(att), torch.zeros_like(att)
    split = [x.view(b, s, h, d).transpose(1, 2) for x in qkv.split(c, dim=2)]
    o, do = torch.empty(b, s, c), dout.view(b, s, h, d).transpose(1, 2)
    packed, rows = Strides(s * 3 * c, d, 3 * c), Strides(s * c, d, c)
    job = m.heddle.attention(*split, do, True, {n: packed for n in ("q", "k", "v")} | {
        n: packed for n in ("dq", "dk", "dv")} | {"o": rows, "do": rows}, o.view(b, s, h, d).transpose(1, 2))
    gradients = torch.zeros_like(qkv)  # heddle reads and writes the loops' own layout
    for i, n in enumerate(("dq", "dk", "dv")):
        setattr(job.data, n, gradients.data_ptr() + 4 * c * i)

    def pointers(*tensors):
        return [ctypes.c_void_p(x.data_ptr()) for x in tensors]

    sizes = [ctypes.c_int64(x) for x in (b, s, c, h)]

    def naive_forward():
        m.peers.naive_forward(*pointers(out, pre, att, qkv), *sizes)

    def naive_backward(linear):
        for x in (dqkv, dpre, datt):
            x.zero_()
        start = m.clock()
        m.peers.naive_backward(*pointers(dqkv, dpre, datt, dout, qkv, att), *sizes, ctypes.c_int(linear))
        return m.clock() - start

    job.forward()
    naive_forward()
    job.backward()
    linear = [naive_backward(1) for _ in range(2)]
    same([o, gradients], [out, dqkv], F32, "plain loops")
    cubic = [naive_backward(0)]
    same([gradients], [dqkv], BF16, "plain loops")
    t, p = m.time({"h": job.forward, "n": naive_forward}, least=3)
    tb, pb = m.time({"h": job.backward})
    flops = attention_flops(b, h, s, s, d, True)
    name = f"b{b} h{h} s{s} d{d} causal"
    report.add("plain loops", f"{name} forward", ms=1e3 * median(t["h"]), gflops=1e-9 * flops / median(t["h"]),
               fraction=fraction_of(flops, t["h"], p["h"]), over_other=ratio(t["n"], t["h"]),
               other=f"loops {1e3 * median(t['n']):.0f} ms", goals=(None, None, 12 if s == 1024 else None))
    for label, times, goal in (("softmax's Jacobian in full", cubic, 100), ("softmax in closed form", linear, None)):
        report.add("plain loops", f"{name} backward", ms=1e3 * median(tb["h"]), gflops=2.5e-9 * flops / median(tb["h"]),
                   fraction=fraction_of(2.5 * flops, tb["h"], pb["h"]), over_other=median(times) / median(tb["h"]),
                   other=f"loops {1e3 * median(times):.0f} ms, {label}",
                   goals=(None, None, goal if s == 1024 else None))


# ---------------------------------------------------------------------------------------------------------- cliffs

def cliffs(m, report, quick):
    report.section("shapes off the table, float32", "(x other: fraction of peak over that of the aligned neighbour)")
    cached = torch.zeros(1 << 21)  # as large as these problems: what the caches can deliver
    read = max(m.read(cached) for _ in range(5))

    def plain(b, h, sq, d, sk=None, causal=False):
        sk = sk or sq
        pair = AttentionPair(m, b, h, sq, d, causal, sk=sk)
        rows = f"s{sq}" if sk == sq else f"sq{sq} sk{sk}"
        return f"b{b} h{h} {rows} d{d}{' causal' if causal else ''}", pair.job, pair.flops, pair

    def varlen(count, longest, h, d):
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
        total = sum(lengths)
        job = m.heddle.attention_varlen(*(normal(total, h, d) for _ in range(4)), lengths)
        return f"{count} sequences of 1..{longest} h{h} d{d}", job, 4.0 * h * d * sum(n * n for n in lengths), None

    by_d = [((1, 8, 512, d), (1, 8, 512, near)) for d, near in (
        (8, 16), (40, 48), (72, 80), (96, 128), (100, 112), (160, 128), (256, 128), (512, 256))]
    by_s = [((b, 8, s, 64), (b, 8, near, 64)) for b, s, near in (
        (64, 17, 16), (16, 63, 64), (16, 65, 64), (8, 127, 128), (8, 129, 128), (4, 197, 192), (1, 1000, 1024))]
    causal = [((16, 8, 65, 64, None, True), (16, 8, 64, 64, None, True)),
              ((1, 8, 1000, 100, None, True), (1, 8, 1024, 112, None, True))]
    flat = [((1, 8, 4096, 64, 64), (1, 8, 512, 64)), ((1, 8, 64, 64, 4096), (1, 8, 512, 64)),
            ((1, 32, 8, 64, 4096), (1, 8, 512, 64)), ((1, 8, 4096, 64, 8), (1, 8, 512, 64))]
    cases = [(plain(*a), plain(*b)) for a, b in by_d + by_s + causal + flat]
    cases += [(varlen(256, 64, 8, 64), plain(256, 8, 32, 64)), (varlen(64, 256, 8, 64), plain(64, 8, 128, 64))]
    for (name, job, flops, pair), (near_name, near_job, near_flops, _) in cases[:4] if quick else cases:
        job.forward()
        near_job.forward()
        calls = {"f": job.forward, "nf": near_job.forward, "b": job.backward, "nb": near_job.backward}
        if pair:
            pair.check(name)
            calls.update(tf=pair.torch_forward, tb=pair.torch_both)
        keep, m.seconds = m.seconds, m.seconds / 3
        t, p = m.time(calls)
        m.seconds = keep
        for label, a, near, factor in (("forward", "f", "nf", 1), ("backward", "b", "nb", 2.5)):
            ours = fraction_of(factor * flops, t[a], p[a])
            neighbour = fraction_of(factor * near_flops, t[near], p[near])
            over_torch = None
            if pair:
                over_torch = ratio(t["tf"], t["f"]) if label == "forward" else median(
                    [x / (y + z) for x, y, z in zip(t["tb"], t["f"], t["b"])])
            # Each tensor moves once, and what is written is read before.
            tensors = job.tensors
            moved = sum(tensors[n].nbytes for n in (("q", "k", "v") if factor == 1 else ("q", "k", "v", "o", "dout")))
            moved += 2 * sum(tensors[n].nbytes for n in (("o",) if factor == 1 else ("dq", "dk", "dv")))
            memory = factor * flops / moved * read / median(p[a])
            cliff = ours < 0.75 * min(neighbour, memory)
            limit = f", memory allows {100 * memory:.0f}%" if memory < 1 else ""
            report.add("off the table", f"{name} {label}", ms=1e3 * median(t[a]), fraction=ours, over_torch=over_torch,
                       gflops=1e-9 * factor * flops / median(t[a]), over_other=ours / neighbour, direction=label,
                       memory_allows=memory, cliff=cliff or None,
                       other=f"{near_name}: {100 * neighbour:.0f}%{limit}{'  <- a cliff' if cliff else ''}")


SECTIONS = {"attention": attention_f32, "vit": attention_vit, "16-bit": attention_16, "avx2": attention_avx2,
            "dropout": attention_dropout, "options": attention_options, "report": report_options,
            "norm-linear": norm_linear, "small-batches": small_batches, "prepared": prepared, "decode": decode,
            "two-cores": two_cores, "plain-loops": plain_loops, "cliffs": cliffs}
ONE_THREAD_ONLY = {"avx2", "cliffs", "options"}


# ------------------------------------------------------------------------------------------------------------ main

def main():
    parser = argparse.ArgumentParser(prog="./dev bench --cpu", formatter_class=argparse.RawDescriptionHelpFormatter,
                                     description=__doc__.split("\n\n", 2)[0] + "\n\n" + __doc__.split("\n\n", 2)[2])
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="a few rows of each section, none recorded")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="only this section (may be repeated)")
    parser.add_argument("--threads", type=int, action="append", help="default: 1, then all cores")
    parser.add_argument("--seconds", type=float, help="time for a row; default 2, of --quick 0.4")
    parser.add_argument("--out", type=pathlib.Path, help="the JSON lines; default, unless --quick: "
                        "bench/results/<cpu>.jsonl")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.seconds is None:
        options.seconds = 0.4 if options.quick else 2.0
    machine = Machine(options.build, options.seconds)
    header = header_of(machine)
    report = Report(machine, header)
    print(f"heddle {machine.heddle.c.heddle_version_string().decode()} ({header['commit']}, {header['compiler']}) and "
          f"torch {header['torch']} ({header['torch_cpu']}), {header['cores']} cores of {header['cpu']} "
          f"(family {header['family']}, model {header['model']}: {header['flags']})")
    print(f"peak {1e-9 * machine.peak():.0f} GFLOP/s a core ({header['isa']}); load before: {header['load']}; "
          f"{'one OpenMP for both:' if len(machine.openmps) == 1 else 'several OpenMPs:'} {', '.join(machine.openmps)}")
    out = options.out or (None if options.quick else results_path(header))
    start = time.monotonic()
    for threads in options.threads or sorted({1, os.cpu_count()}):
        machine.set_threads(threads)
        if threads > 1 and os.getloadavg()[0] > threads / 2 + 1:
            print("\nOther programs are at work: what several threads reach will hardly be seen.")
        print(f"\n==== {threads} thread{'s' if threads > 1 else ''}, "
              f"{'processor time of the thread' if threads == 1 else 'wall clock'} ====")
        for name, section in SECTIONS.items():
            if (options.only and name not in options.only) or (threads > 1 and name in ONE_THREAD_ONLY):
                continue
            section(machine, report, options.quick)
            if out:
                record(out, report.rows)
    verdicts = [r["verdict"] for r in report.rows]
    doubtful = sum("?" in v for v in verdicts)
    print(f"\n{verdicts.count('pass')} rows reach their goals, {verdicts.count('miss')} do not yet"
          f"{f', {doubtful} were disturbed by other programs' if doubtful else ''} "
          f"({time.monotonic() - start:.0f} s; load now {os.getloadavg()[0]:.2f})")
    if out:
        print(f"recorded, but for what was disturbed, in {os.path.relpath(out)}")


if __name__ == "__main__":
    main()
