# SPDX-License-Identifier: Apache-2.0
"""What the fuzzing of every way in to attention shares: seeds, layouts, the formulas in float64, and how an error is
judged: by that of the plain computation in the same type, and by what a result changes where the inputs change by a
rounding. Each case is made of its seed alone, which is in the message of a failure with the call: HEDDLE_SEED=n begins
there, and HEDDLE_CASES=1 takes no more. HEDDLE_LONG takes 50 times as many."""

from __future__ import annotations

import math
import os
import random
from collections import Counter

import torch
import torch.nn.functional as F
from conftest import ROUNDING

from heddle._errors import HeddleTypeError, HeddleValueError

FIRST, TIMES = int(os.environ.get("HEDDLE_SEED", "0")), 50 if os.environ.get("HEDDLE_LONG") else 1
REFUSALS = (HeddleValueError, HeddleTypeError, NotImplementedError)
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
INF = math.inf


def sweep(count, case, least):
    """Runs cases; `least`: the share of them that must not be refused. Returns what was refused, counted."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the calls are small
    try:
        return _sweep(count, case, least)
    finally:
        torch.set_num_threads(threads)


def _sweep(count, case, least):
    refused, seeds = Counter(), range(FIRST, FIRST + int(os.environ.get("HEDDLE_CASES", count * TIMES)))
    for seed in seeds:
        torch.manual_seed(seed)
        rng, told = random.Random(seed), []
        try:
            case(rng, told)
        except AssertionError as error:
            raise AssertionError(f"HEDDLE_SEED={seed}: {error}\n{' '.join(map(str, told))}") from error
        except REFUSALS as error:
            refused[str(error)[:60]] += 1
        except Exception as error:
            error.add_note(f"HEDDLE_SEED={seed}: {' '.join(map(str, told))}")
            raise
    assert sum(refused.values()) <= (1 - least) * len(seeds) + 2, refused
    return refused


def rarely(rng, share=0.15):
    return rng.random() < share


def laid_out(rng, t, told=None, name="", last=True):
    """The same numbers in another layout (of those that are expanded, one row's); `last`: not contiguous is allowed."""
    kind = rng.choice(("padded", "turned", "strided", "expanded", "flat", "", "", "")) if t.dim() else ""
    dims = list(range(t.dim() if last else t.dim() - 1))
    if kind == "padded":
        wide = torch.full([n + rng.randrange(3) for n in t.shape], 1, dtype=t.dtype)
        wide = wide if t.dtype == torch.bool or not t.is_floating_point() else wide.fill_(math.nan)
        first = [rng.randrange(w - n + 1) for w, n in zip(wide.shape, t.shape, strict=True)]
        for dim, (at, n) in enumerate(zip(first, t.shape, strict=True)):
            wide = wide.narrow(dim, at, n)
        t = wide.copy_(t)
    elif kind == "turned" and len(dims) > 1:
        order = rng.sample(dims, len(dims)) + list(range(len(dims), t.dim()))
        t = t.permute(order).contiguous().permute([order.index(x) for x in range(t.dim())])
    elif kind == "strided" and dims:
        dim = rng.choice(dims)
        t = torch.stack((t, torch.ones_like(t)), dim + 1).flatten(dim, dim + 1)
        t = t[(slice(None),) * dim + (slice(None, None, 2),)]
    elif kind == "expanded" and dims and all(t.shape):
        dim = rng.choice(dims)
        t = t.narrow(dim, 0, 1).expand(t.shape)
    elif kind == "flat" and dims and t.shape[dims[0]] == 1:  # a stride that means nothing
        t = t.as_strided(t.shape, (7 if t.numel() else 0, *t.stride()[1:])) if dims[0] < t.dim() - 1 else t
    if told is not None:
        told.append(f"{name}={str(t.dtype)[6:]}{list(t.shape)}{kind and f'/{kind}{list(t.stride())}'}")
    return t


def leaf(rng, told, name, shape, dtype, *, last=True, wants=0.7, size=1.0):
    t = laid_out(rng, (torch.randn(shape, dtype=F64) * size).to(dtype), None, "", last)
    t = t.detach().requires_grad_(rng.random() < wants)
    told.append(f"{name}={str(dtype)[6:]}{list(shape)}{list(t.stride())}{'' if t.requires_grad else '(no gradient)'}")
    return t


def exactly(leaves, rounding=0.0, dtype=F64):
    """The leaves in another type, moved by a rounding; huge numbers stay where they are."""
    made = {}
    for name, t in leaves.items():
        if isinstance(t, torch.Tensor) and t.is_floating_point():
            x = t.detach().double()
            x = torch.where(x.abs() < 1e3, x * (1 + rounding * (2 * torch.rand_like(x) - 1)), x)
            t = x.to(dtype).requires_grad_(t.requires_grad)
        made[name] = t
    return made


def graded(run, leaves, douts=None, rng=None):
    """Results and then gradients by name; of autograd's None, None. Makes douts for the others where there are none."""
    outs = run(leaves)
    if douts is None:
        used = [rng.random() < 0.8 for _ in outs]
        used[rng.randrange(len(outs))] = True
        douts = [laid_out(rng, torch.randn_like(out)) if use else None for out, use in zip(outs, used, strict=True)]
    wanted = {f"d{name}": t for name, t in leaves.items() if isinstance(t, torch.Tensor) and t.requires_grad}
    flow = [(out, d.to(out.dtype)) for out, d in zip(outs, douts, strict=True) if d is not None and out.requires_grad]
    grads = [None] * len(wanted)
    if flow and wanted:
        grads = torch.autograd.grad(
            [o for o, _ in flow], list(wanted.values()), [d for _, d in flow], allow_unused=True
        )
    found = {f"result {x}": out.detach() for x, out in enumerate(outs)}
    return found | dict(zip(wanted, grads, strict=True)), douts


def compare(rng, ours, plain, leaves, low=None, *, theirs=None):
    """Each result and gradient of `ours` against `plain` in float64; theirs: the plain computation in the same type."""
    kinds = [t.dtype for t in leaves.values() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    rounding = ROUNDING[low or kinds[0]]
    got, douts = graded(ours, leaves, rng=rng)
    truth, _ = graded(plain, exactly(leaves), douts)
    moved, _ = graded(plain, exactly(leaves, rounding), douts)
    try:
        near, _ = graded(theirs or plain, leaves if theirs else exactly(leaves, dtype=low or kinds[0]), douts)
    except RuntimeError:
        near = moved
    numbers = sum(t.numel() for name, t in truth.items() if name.startswith("result"))
    for name, true in truth.items():
        of = leaves.get(name[1:])  # gradients are sums, whose terms may cancel
        terms = 1.0 if of is None else 1 + (numbers / max(of.numel(), 1)) ** 0.5
        judge(name, got[name], true, near[name], moved[name], rounding, of, terms)


def judge(name, got, true, near, moved, rounding, of, terms):
    if true is None or got is None:
        there = true if got is None else got
        assert there is None or not there.any(), f"{name}: {'no gradient' if got is None else 'a gradient of nothing'}"
        return
    assert got.shape == true.shape, f"{name}: {list(got.shape)}, not {list(true.shape)}"
    assert of is None or got.dtype == of.dtype, f"{name}: {got.dtype}"
    fine, rounding = torch.isfinite(true), max(rounding, ROUNDING[got.dtype])
    got, near, moved = (t.detach().double() if t is not None else true for t in (got, near, moved))
    assert torch.isfinite(got[fine & (true.abs() < 6e4)]).all(), f"{name}: not finite"
    assert not (got[~fine] - true[~fine]).nan_to_num().any(), f"{name}: other infinities"
    if fine.any():
        off, lost, shift = ((t - true)[fine].abs().nan_to_num(0.0, 0.0, 0.0).max().item() for t in (got, near, moved))
        factor = 24.0 if rounding < 1e-6 else 12.0  # of few rows the largest errors are luck
        allowed = factor * max(
            lost, shift, (rounding if rounding > 1e-9 else 1e-11) * (terms + true[fine].abs().max().item())
        )
        assert off <= allowed, f"{name} is off by {off:g} of {true[fine].abs().max():g}, allowed {allowed:g}"


# ------------------------------------------------------------------------------------------------------ the formula


def weighed(scores, seen, sink=None):
    """(weights, lse) of scores [..., sq, sk], zeros and -inf where nothing is seen."""
    scores = scores.masked_fill(~seen, -INF)
    all_of_them = scores if sink is None else torch.cat((scores, sink.expand(*scores.shape[:-1], 1)), -1)
    empty = (all_of_them == -INF).all(-1, keepdim=True)
    filled = all_of_them.masked_fill(empty, 0.0)
    weights = torch.softmax(filled, -1).masked_fill(empty, 0.0)[..., : scores.shape[-1]]
    most = filled.detach().amax(-1, keepdim=True) if filled.shape[-1] else 0.0
    lse = most + torch.logsumexp(filled - most, -1, keepdim=True)
    return weights, lse.masked_fill(empty, -INF).squeeze(-1)


def masking(rng, told, name, shape, dtype, wants=0.4, last=True):
    """A mask or a bias that broadcasts to shape: bool or of some type, with -inf and the least number."""
    dims = rng.randrange(len(shape) + 1) if rarely(rng) else rng.randint(2, len(shape))
    shape = [1 if rarely(rng, 0.3) else n for n in shape[len(shape) - dims :]]
    hidden = torch.rand(shape) < rng.choice((0.0, 0.3, 0.9))
    if rarely(rng, 0.2) and dims > 1:
        hidden = hidden | (torch.rand([*shape[:-1], 1]) < 0.3)
    if dtype == torch.bool:
        return laid_out(rng, ~hidden, told, name, last)
    t = torch.randn(shape, dtype=F64).masked_fill(hidden, rng.choice((-INF, -INF, -1e4, torch.finfo(dtype).min)))
    t = laid_out(rng, t.to(dtype), told, name, last).detach().requires_grad_(rng.random() < wants)
    told.append("with a gradient" if t.requires_grad else "")
    return t


def added(scores, bias, dtype):
    """scores + bias, and what it shows. A bias is cast to q's dtype, in which what is finite stays so."""
    shown = bias != -INF
    bias = bias.masked_fill(~shown, 0.0)
    value = bias.detach().clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    return scores + (bias - bias.detach() + value).to(scores.dtype), shown


def plain_attention(leaves, p):
    """(out, lse, weights), sequence by sequence; the rows of no sequence are zeros."""
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    packed, (b, h, sq, sk) = "cu_q" in p, p["sizes"]
    parts, zero = [], sum(t.sum() * 0 for t in (q, k, v))
    rows = q.shape[0] if packed else b * sq
    out, lse, weights = [zero + q.new_zeros(s) for s in ((rows, h, v.shape[-1]), (rows, h), (b, h, sq, sk))]
    lse = lse if packed else lse - INF
    for n in range(b):
        (q0, nq), (k0, nk) = p["rows"][n]
        at = q0 if packed else n * sq
        x = q[q0 : q0 + nq].movedim(0, 1) if packed else q[n, :, :nq]
        y, z = (t[k0 : k0 + nk].movedim(0, 1) if packed else t[n, :, :nk] for t in (k, v))
        y, z = (t.repeat_interleave(h // t.shape[0], 0) for t in (y, z))
        s = x @ y.mT * (q.shape[-1] ** -0.5 if p.get("scale") is None else p["scale"])
        s = p["softcap"] * torch.tanh(s / p["softcap"]) if p.get("softcap") else s
        i, j = torch.arange(nq)[:, None], torch.arange(nk)
        qo, ko = p.get("q_offset", 0), p.get("k_offset", 0)
        off = qo - ko
        if p.get("causal") not in ("top_left", True):
            off += (p.get("whole_sk") or ko + nk) - (p.get("whole_sq") or qo + nq)
        seen = torch.ones(h, nq, nk, dtype=torch.bool)
        left, right = (INF if w is None or w < 0 else w for w in p.get("window") or (None, None))
        right = min(right, 0) if p.get("causal") else right
        seen &= (j <= i + off + right) & (j >= i + off - left)
        if "alibi_slopes" in p:
            slopes = p["alibi_slopes"].double().expand(b, h)[n].to(s.dtype)
            s = s - slopes[:, None, None] * (i + off - j).abs()
        if "bias" in leaves:
            bias = leaves["bias"].expand(b, h, sq, sk)[n, :, :nq, :nk]
            s, shown = added(s, bias, p["dtype"])
            seen = seen & shown
        if "mask" in p:
            seen = seen & p["mask"].expand(b, h, sq, sk)[n, :, :nq, :nk]
        if "segments" in p:
            of_q, of_k = p["segments"]
            a, c = (of_q[q0 : q0 + nq], of_k[k0 : k0 + nk]) if packed else (of_q[n, :nq], of_k[n, :nk])
            seen = seen & (a[:, None] == c)
        if "shown" in p:
            shown, (bq, bk) = p["shown"].expand(b, h, -1, -1)[n], p["block_size"]
            seen = seen & shown.repeat_interleave(bq, 1).repeat_interleave(bk, 2)[:, :nq, :nk]
        sink = leaves["sinks"].to(s.dtype)[:, None, None] if "sinks" in leaves else None
        w, its = weighed(s, seen, sink)
        used = w if "kept" not in p else w * p["kept"][n, :, :nq, :nk].to(w.dtype)
        parts.append((at, nq))
        index = torch.arange(at, at + nq)
        out = out.index_put((index,), (used @ z).movedim(1, 0))
        lse = lse.index_put((index,), its.mT)
        weights = weights.index_put((torch.tensor(n),), F.pad(w, (0, sk - nk, 0, sq - nq)))
    if packed:
        return out, lse.mT, weights
    return out.unflatten(0, (b, sq)).transpose(1, 2), lse.unflatten(0, (b, sq)).transpose(1, 2), weights
