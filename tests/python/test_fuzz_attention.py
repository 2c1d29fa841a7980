# SPDX-License-Identifier: Apache-2.0
"""Random calls of scaled_dot_product_attention and heddle.attention, with gradients, against float64."""

from __future__ import annotations

import contextlib
import math
from collections import Counter

import torch
import torch.nn.functional as F
from fuzz_help import (
    BF16,
    F16,
    F32,
    F64,
    REFUSALS,
    added,
    compare,
    laid_out,
    leaf,
    masking,
    plain_attention,
    rarely,
    sweep,
    weighed,
)

import heddle
from heddle._errors import HeddleValueError
from heddle._tangents import kept

# ------------------------------------------------------------------------------- in place of PyTorch's own function


def plain_sdpa(leaves, dtype, is_causal=False, scale=None, enable_gqa=False):
    q, k, v, mask = leaves["query"], leaves["key"], leaves["value"], leaves.get("attn_mask")
    if enable_gqa and k.dim() > 2:
        heads = q.shape[-3]
        k, v = (t.repeat_interleave(heads // t.shape[-3], -3) if t.shape[-3] else t for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (scale if scale is not None else q.shape[-1] ** -0.5 if q.shape[-1] else 1.0)
    seen = torch.ones(scores.shape, dtype=torch.bool)
    seen = seen.tril() if is_causal else seen
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        scores, shown = added(scores, mask, dtype)
        seen = seen & shown
    return (weighed(scores, seen)[0] @ v,)


def sdpa_case(rng, told, differ):
    dtype, dims = rng.choice((F32, F32, BF16, F16, F64)), rng.choice((2, 3, 4, 4, 4, 4, 5))
    batch = [rng.choice((1, 2, 3)) for _ in range(max(dims - 3, 0))]
    h, sq = rng.choice((1, 2, 4, 6)), rng.choice((1, 2, 3, 7, 17, 33, 70))
    sk, d = sq if rarely(rng, 0.3) else rng.choice((1, 2, 5, 16, 40, 130)), rng.choice((1, 3, 8, 16, 24, 64))
    dv, gqa = d if rarely(rng, 0.7) else rng.choice((1, 5, 16, 64)), dims > 2 and rarely(rng, 0.2)
    hk = rng.choice([n for n in (1, 2, 3, h) if h % n == 0]) if gqa else h
    hv = hk
    if rarely(rng, 0.05):
        sq, sk, d, dv, h, hk = rng.choice(((0, sk, d, dv, h, hk), (sq, 0, d, dv, h, hk), (sq, sk, 0, dv, h, hk)))
    if dims > 2 and not gqa and rarely(rng, 0.05):
        hk, hv = rng.choice(((1, 1), (1, h), (h, 1)))
    heads = [[n] if dims > 2 else [] for n in (h, hk, hv)]
    mine = [1 if rarely(rng, 0.2) else n for n in batch] if rarely(rng) else batch
    shapes = [*batch, *heads[0], sq, d], [*mine, *heads[1], sk, d], [*mine, *heads[2], sk, dv]
    leaves = {
        name: leaf(rng, told, name, shape, dtype, size=rng.choice((1, 1, 1, 4)))
        for name, shape in zip(("query", "key", "value"), shapes, strict=True)
    }
    options = {"is_causal": True} if rarely(rng, 0.2) else {}
    if not options and rarely(rng, 0.5):
        kind = rng.choice((torch.bool, torch.bool, dtype, dtype, F32, BF16, F16, F64))
        leaves["attn_mask"] = masking(rng, told, "attn_mask", [*batch, *heads[0], sq, sk], kind)
    options |= {"scale": rng.choice((0.3, 1, -0.5, 2.0, 0.0))} if rarely(rng, 0.3) else {}
    options |= {"enable_gqa": True} if gqa or rarely(rng, 0.05) else {}
    amp = rng.choice((BF16, F16)) if rarely(rng, 0.1) else None
    patched = rarely(rng, 0.4) and dtype != F64  # which is PyTorch's own then
    told += [options, f"autocast={amp}" if amp else "", "patched" if patched else ""]

    def run(function, leaves):
        with torch.autocast("cpu", amp) if amp else contextlib.nullcontext():
            return (function(**leaves, **options),)

    def ours(leaves):
        with heddle.patch() if patched else contextlib.nullcontext():
            return run(F.scaled_dot_product_attention if patched else heddle.scaled_dot_product_attention, leaves)

    low = amp if amp and dtype != F64 else dtype
    try:
        theirs = run(F.scaled_dot_product_attention, leaves)
    except Exception as error:
        theirs, why = None, error  # heddle may take more
    try:
        found = ours(leaves)
    except REFUSALS as error:
        if theirs is not None:
            differ[str(error)[:60]] += 1
        raise
    except Exception as error:  # PyTorch's own, within patch()
        if patched and theirs is None and str(error) == str(why):
            raise HeddleValueError(f"PyTorch: {error}") from error
        raise
    if theirs is not None:
        for a, b in zip(found, theirs, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype) and a.requires_grad >= b.requires_grad, (
                a.dtype,
                b.dtype,
                a.requires_grad,
                b.requires_grad,
            )
    compare(rng, ours, lambda leaves: plain_sdpa(leaves, low, **options), leaves, low)


def test_scaled_dot_product_attention():
    differ = Counter()
    sweep(300, lambda rng, told: sdpa_case(rng, told, differ), 0.8)
    print(differ)


# ---------------------------------------------------------------------------------------------------- heddle.attention


def attention_case(rng, told):
    dtype = rng.choice((F32, F32, F32, BF16, F16, F64))
    b, hk, group = rng.choice((1, 2, 3)), rng.choice((1, 2)), rng.choice((1, 1, 2, 3))
    h, sq, sk = hk * group, rng.choice((1, 2, 5, 17, 33, 70)), rng.choice((1, 2, 5, 17, 40, 130, 260))
    sk = sq if rarely(rng, 0.25) else sk
    d, dv = rng.choice((1, 3, 8, 16, 24, 64)), rng.choice((1, 5, 16, 64))
    d = dv if rarely(rng, 0.5) else d
    packed, options, p = rarely(rng, 0.25), {}, {"sizes": (b, h, sq, sk), "dtype": dtype}
    if packed:
        most = {"q": sq, "k": sk}
        counts = {name: [rng.randrange(n + 1) for _ in range(b)] for name, n in most.items()}
        if rarely(rng, 0.3):
            counts["k"] = counts["q"] = [min(n, sk) for n in counts["q"]]
        first = {name: rng.choice((0, 0, 3)) for name in most}
        cu = {x: torch.tensor([first[x] + sum(counts[x][:n]) for n in range(b + 1)]).int() for x in most}
        total = {x: int(cu[x][-1]) + rng.choice((0, 0, 4)) for x in most}
        options |= {"cu_seqlens_q": cu["q"], "cu_seqlens_k": cu["k"], "max_seqlen_q": sq, "max_seqlen_k": sk}
        p |= {"cu_q": 1, "rows": [[(int(cu[x][n]), counts[x][n]) for x in "qk"] for n in range(b)]}
        shapes = [(total["q"], h, d), (total["k"], hk, d), (total["k"], hk, dv)]
    else:
        lengths = [rng.choice((n, n, rng.randrange(n + 1))) for n in [sq] * b + [sk] * b]
        lengths = lengths if rarely(rng, 0.25) else [sq] * b + [sk] * b
        for name, its, n in (("seqlens_q", lengths[:b], sq), ("seqlens_k", lengths[b:], sk)):
            if set(its) != {n}:
                options[name] = torch.tensor(its, dtype=rng.choice((torch.int32, torch.int64)))
        p["rows"] = [[(0, lengths[n]), (0, lengths[b + n])] for n in range(b)]
        shapes = [(b, h, sq, d), (b, hk, sk, d), (b, hk, sk, dv)]
    causal = rng.choice((None, None, False, "top_left", "bottom_right", *([True] if sq == sk and not packed else ())))
    numbers = {"causal": causal}
    numbers |= {"scale": rng.choice((0.3, 1, -0.5, 2.0))} if rarely(rng, 0.3) else {}
    numbers |= {"softcap": rng.choice((0.7, 3.0, 30.0))} if rarely(rng, 0.2) else {}
    numbers |= (
        {"window": rng.choice([(3, 2), (None, 4), (0, None), (5, -1), (20, 0), (0, 0)])} if rarely(rng, 0.2) else {}
    )
    if rarely(rng, 0.1) and not packed and "seqlens_q" not in options and "seqlens_k" not in options:
        numbers |= {"q_offset": rng.randrange(9), "k_offset": rng.randrange(9)}
        numbers |= (
            {"whole_sq": numbers["q_offset"] + sq + 3, "whole_sk": numbers["k_offset"] + sk + 5}
            if rarely(rng, 0.5)
            else {}
        )
    options, p = options | numbers, p | numbers
    told += [
        (b, h, hk, sq, sk, d, dv),
        {n: t.tolist() if isinstance(t, torch.Tensor) else t for n, t in options.items()},
    ]
    leaves = {
        name: leaf(rng, told, name, shape, dtype, last=False, size=rng.choice((1, 1, 1, 4)))
        for name, shape in zip("qkv", shapes, strict=True)
    }
    full = [b, h, sq, sk]
    if rarely(rng, 0.25):
        leaves["bias"] = masking(rng, told, "bias", full, rng.choice((dtype, dtype, F32, BF16, F16, F64)), 0.6)
    if rarely(rng, 0.25):
        p["mask"] = options["mask"] = masking(rng, told, "mask", full, torch.bool)
    if rarely(rng, 0.15):
        leaves["sinks"] = leaf(rng, told, "sinks", (h,), F64 if dtype == F64 else F32, last=False)
    if rarely(rng, 0.15):
        slopes = torch.rand((b, h) if rarely(rng, 0.4) else (h,), dtype=F64 if dtype == F64 else F32)
        p["alibi_slopes"] = options["alibi_slopes"] = laid_out(rng, slopes, told, "alibi_slopes", False)
    if rarely(rng, 0.15):
        sizes = [shapes[0][:1], shapes[1][:1]] if packed else [(b, sq), (b, sk)]
        ids = [torch.randint(0, 3, n).sort(-1)[0] if rarely(rng, 0.5) else torch.randint(0, 3, n) for n in sizes]
        p["segments"], kind = ids, rng.choice((torch.int32, torch.int32, torch.uint8))
        options |= {"q_segments": ids[0].to(kind), "k_segments": ids[1].to(kind)}
        told.append("segments")
    if rarely(rng, 0.1):
        size = rng.choice((64, 128)), rng.choice((64, 128))
        lists = [-(-n // s) for n, s in zip((sq, sk), size, strict=True)]
        p["shown"] = torch.rand(rng.choice((1, b)), rng.choice((1, h)), *lists) < 0.6
        options |= dict(zip(("block_rows", "block_columns"), heddle.block_lists(p["shown"]), strict=True))
        p["block_size"] = options["block_size"] = size
        told.append(f"blocks of {size}: {p['shown'].tolist()}")
    if rarely(rng, 0.1):
        state, options["dropout"] = (
            torch.tensor([rng.randrange(1 << 40), rng.randrange(1 << 40)]),
            rng.choice((0.1, 0.5)),
        )
        options["rng_state"] = state
        heads = torch.arange(b * h).reshape(b, h)
        qo, ko = numbers.get("q_offset", 0), numbers.get("k_offset", 0)
        stays = kept(state, options["dropout"], heads, range(qo, qo + sq), range(ko, ko + sk)) > 0
        p["kept"] = stays.double() * (65536 / (65536 - math.floor(65536 * options["dropout"] + 0.5)))
        told.append(f"dropout {options['dropout']}")
    fewer = 0
    if not packed and rarely(rng, 0.1) and b == 1 and not any(leaves[x].shape[0] > 1 for x in "qkv"):
        fewer = 1
    wants = {"return_lse": rarely(rng, 0.4), "return_weights": rarely(rng, 0.2)}
    told += [wants, "3-D" if fewer else ""]

    def ours(leaves):
        q, k, v = (leaves[x][0] if fewer else leaves[x] for x in "qkv")
        made = heddle.attention(q, k, v, **{x: leaves[x] for x in ("bias", "sinks") if x in leaves}, **options, **wants)
        made = made if isinstance(made, tuple) else (made,)
        return [t.unsqueeze(0) for t in made] if fewer else made

    asked = (True, *wants.values())

    def plain(leaves):
        return [t for t, ask in zip(plain_attention(leaves, p), asked, strict=True) if ask]

    compare(rng, ours, plain, leaves)


def test_attention():
    print(sweep(300, attention_case, 0.8))
