# SPDX-License-Identifier: Apache-2.0
"""The tables of options of bench/cpu.py: what each costs, as a fraction of the plain rate with the same tiles visible, and
beside PyTorch's function with the same mask where it has the option; and those problems of `heddle bench` that PyTorch's
function has, for the page of ./dev report."""
import torch
import torch.nn.functional as F
from cpu_measure import BF16, F32, SHORT, attention_flops, fraction_of, median, normal, ratio, same
from heddle_c import Library


class Problem:
    """Tensors of one size, and what the options of it are made of."""

    def __init__(self, library, b, h, s, d, dtype, sk=None):
        self.library, self.b, self.h, self.s, self.sk, self.d, self.dtype = library, b, h, s, sk or s, d, dtype
        self.q, self.k, self.v = (normal(b, h, n, d, dtype=dtype) for n in (s, self.sk, self.sk))
        self.dout = normal(b, h, s, d, dtype=dtype)

    def job(self, **options):
        return self.library.attention(self.q, self.k, self.v, self.dout, **options)

    def flops(self, causal=False):
        return attention_flops(self.b, self.h, self.s, self.sk, self.d, causal)

    def torchs(self, **options):
        """PyTorch's forward, and its forward and backward."""
        leaves = [x.clone().requires_grad_() for x in (self.q, self.k, self.v)]
        mask = options.get("attn_mask")
        wanted = leaves + ([mask] if mask is not None and mask.requires_grad else [])

        def forward():
            with torch.no_grad():
                return F.scaled_dot_product_attention(self.q, self.k, self.v, **options)

        def both():
            o = F.scaled_dot_product_attention(*leaves, **options)
            return (o,) + torch.autograd.grad(o, wanted, self.dout)

        return forward, both


def causal_mask(s):
    return torch.ones(1, 1, s, s, dtype=torch.bool).tril()


def rows_of(library, h, s, d, dtype):
    """name, problem, job, its FLOPs, the plain job with the same tiles visible, its FLOPs, PyTorch's options or None,
    the fraction of plain that is the goal."""
    full = Problem(library, 1, h, s, d, dtype)
    plain, causal = full.job(), full.job(causal=True)
    seen, half = full.flops(), full.flops(True)
    slopes = 2.0 ** -torch.arange(1, h + 1).float()
    distance = (torch.arange(s)[:, None] - torch.arange(s)[None]).abs()
    yield "causal", full, causal, half, causal, half, {"is_causal": True}, None

    away = (-slopes[:, None, None] * distance).to(dtype)[None]
    yield "ALiBi", full, full.job(alibi_slopes=slopes), seen, plain, seen, {"attn_mask": away}, .85
    left = s // 4
    inside = causal_mask(s) & (distance <= left)
    band = 4.0 * h * d * int(inside.sum())
    yield "window", full, full.job(causal=True, window=(left, 0)), band, causal, half, {"attn_mask": inside}, .85

    two, short = (Problem(library, 2, h // 2, n, d, dtype) for n in (s, s // 2))
    lengths = torch.tensor([s // 2] * 2, dtype=torch.int32)
    yield ("lengths", two, two.job(seqlens_q=lengths, seqlens_k=lengths), short.flops(), short.job(), short.flops(), None,
           .85)
    rows = [x.transpose(1, 2).reshape(s, h // 2, d) for x in (short.q, short.k, short.v, short.dout)]
    packed = library.attention_varlen(*rows, [s // 2] * 2)
    yield "packed", short, packed, short.flops(), short.job(), short.flops(), None, .85

    ids = torch.arange(s, dtype=torch.int32)[None] // (s // 2)
    alike = (ids[0][:, None] == ids[0])[None, None]
    segments = full.job(q_segments=ids, k_segments=ids)
    pairs = Problem(library, 2, h, s // 2, d, dtype)
    yield "segments", full, segments, pairs.flops(), pairs.job(), pairs.flops(), {"attn_mask": alike}, .9

    large = Problem(library, 1, h, s, d, dtype)
    large.q = large.q * 20
    yield "large scores", large, large.job(), seen, plain, seen, {}, .85
    sinks = torch.randn(h)
    yield "sinks", full, full.job(sinks=sinks), seen, plain, seen, None, .85
    yield "lse gradient", full, full.job(dlse=torch.randn(1, h, s)), seen, plain, seen, None, .85
    yield "softcap", full, full.job(softcap=30.0), seen, plain, seen, None, .85

    keys = torch.arange(s) < 3 * s // 4
    fewer = Problem(library, 1, h, s, d, dtype, sk=3 * s // 4)
    everywhere = keys[None, None, None].expand(1, h, s, s)
    yield ("mask of keys", full, full.job(bool_mask=everywhere), fewer.flops(), fewer.job(), fewer.flops(),
           {"attn_mask": keys[None, None, None]}, .85)
    square = causal_mask(s)
    yield ("causal as a mask", full, full.job(bool_mask=square.expand(1, h, s, s)), half, causal, half,
           {"attn_mask": square}, .85)
    dense = torch.rand(1, 1, s, s) < 0.9
    yield "dense mask", full, full.job(bool_mask=dense.expand(1, h, s, s)), seen, plain, seen, {"attn_mask": dense}, .85

    bias = normal(1, h, s, s, dtype=dtype)
    yield "bias", full, full.job(bias=bias), seen, plain, seen, {"attn_mask": bias}, .8
    yield ("bias and its gradient", full, full.job(bias=bias, dbias=torch.empty_like(bias)), seen, plain, seen,
           {"attn_mask": bias.clone().requires_grad_()}, .8)
    yield "dropout", full, full.job(dropout=0.1), seen, plain, seen, {"dropout_p": 0.1}, .6


def compare(problem, job, both, dtype, what):
    job.forward()
    job.backward()
    names = ("o", "dq", "dk", "dv", *(("dbias",) if "dbias" in job.tensors else ()))
    same([job.tensors[n] for n in names], both(), dtype, what)


def attention_options(m, report, quick, only=None):
    report.section("attention, options", "(x other: the rate over that of the plain call with the same tiles visible)")
    for isa in (None, "avx2") if "avx2" in m.heddle.isas() and m.heddle.isa != "avx2" else (None,):
        library = Library(m.build / "libheddle.so", isa) if isa else m.heddle
        for dtype in (F32,) if quick or isa else (F32, BF16):
            longer = () if isa else ((64, 2048),)
            for d, s in ((64, 512),) if quick else ((64, 512), (128, 512), *longer):
                for row in rows_of(library, 4096 // s, s, d, dtype):
                    if not only or row[0] in only:
                        measure(m, report, isa, row)


def measure(m, report, isa, row):
    name, problem, job, flops, plain, plain_flops, options, goal = row
    what = f"{isa + ' ' if isa else ''}{SHORT[problem.dtype]} s{problem.s} d{problem.d} {name}"
    calls = {"hf": job.forward, "hb": job.backward}
    plain.forward()
    job.forward()
    if plain is not job:
        calls.update(of=plain.forward, ob=plain.backward)
    if options is not None:
        calls["tf"], calls["tb"] = problem.torchs(**options)
        if "dropout_p" not in options:
            compare(problem, job, calls["tb"], problem.dtype, what)
    t, p = m.time(calls, peak=(lambda: m.peak("avx2")) if isa else None)
    both = [a + b for a, b in zip(t["hf"], t["hb"])]
    for label, factor, key, ours in (("forward", 1, "f", t["hf"]), ("backward", 2.5, "b", both)):
        mine = t["h" + key]
        of_plain = ratio(t["o" + key], mine) * flops / plain_flops if plain is not job else None
        over_torch = ratio(t["t" + key], ours) if options is not None else None
        report.add("attention options", f"{what} {label}", ms=1e3 * median(mine),
                   gflops=1e-9 * factor * flops / median(mine), fraction=fraction_of(factor * flops, mine, p["h" + key]),
                   over_torch=over_torch, over_other=of_plain,
                   goals=(None, 1.5 if options is not None and goal else None, goal),
                   b=problem.b, h=problem.h, s=problem.s, d=problem.d, causal=name in ("causal", "window"),
                   dtype=SHORT[problem.dtype], isa=isa or m.heddle.isa, direction=label, option=name)


def reported(library):
    """name, as `heddle bench` has it, problem, job, its FLOPs, PyTorch's options."""
    h, s = 8, 1024
    p = Problem(library, 1, h, s, 64, F32)
    name, causal = f"b1 h{h} s{s} d64", causal_mask(s)
    slopes = 2.0 ** (-8 * torch.arange(1, h + 1) / h)
    distance = (torch.arange(s)[:, None] - torch.arange(s)[None]).abs()
    away = (-slopes[:, None, None] * distance)[None].masked_fill(~causal, -torch.inf)
    yield f"{name} causal alibi", p, p.job(causal=True, alibi_slopes=slopes), p.flops(True), {"attn_mask": away}
    inside = causal & (distance <= 512)
    yield (f"{name} causal window 512", p, p.job(causal=True, window=(512, 0)), 4.0 * h * 64 * int(inside.sum()),
           {"attn_mask": inside})
    yield (f"{name} causal dropout", p, p.job(causal=True, dropout=0.1), p.flops(True),
           {"is_causal": True, "dropout_p": 0.1})
    dense = torch.rand(1, 1, s, s) < 0.9
    yield f"{name} dense", p, p.job(bool_mask=dense.expand(1, h, s, s)), p.flops(), {"attn_mask": dense}
    bias = normal(1, h, s, s)
    yield f"{name} bias shared", p, p.job(bias=bias), p.flops(), {"attn_mask": bias}
    yield (f"{name} dbias shared", p, p.job(bias=bias, dbias=torch.empty_like(bias)), p.flops(),
           {"attn_mask": bias.clone().requires_grad_()})
    h, s = 4, 4096
    p, ids = Problem(library, 1, h, s, 64, F32), torch.arange(s, dtype=torch.int32)[None] // 500
    alike = (ids[0][:, None] == ids[0])[None, None]
    yield (f"b1 h{h} s{s} d64 segments", p, p.job(q_segments=ids, k_segments=ids), 4.0 * h * 64 * int(alike.sum()),
           {"attn_mask": alike})


def report_options(m, report, quick):
    report.section("attention, options of ./dev report")
    for name, problem, job, flops, options in list(reported(m.heddle))[:2 if quick else None]:
        forward, both = problem.torchs(**options)
        job.forward()
        job.backward()
        if "dropout_p" not in options:
            compare(problem, job, both, problem.dtype, name)
        t, p = m.time({"hf": job.forward, "tf": forward, "hb": job.backward, "tb": both})
        t["hfb"] = [a + b for a, b in zip(t["hf"], t["hb"])]
        for label, ours, theirs, factor in (("forward", "hf", "tf", 1), ("forward + backward", "hfb", "tb", 3.5)):
            report.add("options of the report", f"{name} {label}", ms=1e3 * median(t[ours]),
                       torch_ms=1e3 * median(t[theirs]), gflops=1e-9 * factor * flops / median(t[ours]),
                       fraction=fraction_of(factor * flops, t[ours], p["hf"]), over_torch=ratio(t[theirs], t[ours]),
                       direction=label, b=problem.b, h=problem.h, s=problem.s, d=problem.d, dtype="f32")
