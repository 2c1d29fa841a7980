# SPDX-License-Identifier: Apache-2.0
"""The derivatives of ``attention`` and its backward pass along a direction, in torch's own operations.

No kernel forms these; ``_tangents_norm_linear`` has norm-linear's. One function serves forward mode and double backward
alike. With L = <dy, f(x)> for a function f, its gradient g = dL/dx and a direction u of x,

    forward mode        of f is f' = (df/dx)·u, and of its backward pass g' = d/de g(x + e·u, dy + e·dy'),
    double backward     the gradients of <u, g(x, dy)> are f' (of dy) and g' with dy' = 0 (of x), as second derivatives
                        are symmetric.

For attention, with the letters of heddle.h, ' for what changes along the direction, and p = exp(sink - lse):

    T' = scale·(q'·kᵀ + q·k'ᵀ)         S' = T'∘(1 - tanh²) + bias'        lse' = sum_j P∘S' + p·sink'
    P' = P∘(S' - lse')                 p' = p·(sink' - lse')              o' = (P'∘Z)·v + (P∘Z)·v'
    dP' = Z∘(dout'·vᵀ + dout·v'ᵀ) + dweights'                             D' = sum_j (P'∘dP + P∘dP') - dlse'
    dS' = P'∘(dP - D) + P∘(dP' - D')   dT' = dS'∘(1 - tanh²) + dS∘(1 - tanh²)'
    dq' = scale·(dT'·k + dT·k')        dk' = scale·(dT'ᵀ·q + dTᵀ·q')      dv' = (Z∘P')ᵀ·dout + (Z∘P)ᵀ·dout'
    dbias' = dS'                       dsink' = -sum_i (p'·D + p·D')

Queries are taken in blocks whose rows are whole, so that the memory is a block's and the weights of a row sum to 1 by
themselves: the results of forward and its lse are not needed. Sums are in float32, or in float64 for float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

Maybe = Tensor | None

BLOCK = 2**21  # elements of the scores that are looked at together
FEWEST = 16  # rows
HIDDEN = -(2.0**24)  # a bias under this masks
WHOLE = ("whole_sq", "whole_sk")
_transforms = torch._C._are_functorch_transforms_active


def sum_of(*terms: Maybe) -> Maybe:
    there = [term for term in terms if term is not None]
    return reduce(torch.add, there) if there else None


def times(a: Maybe, b: Maybe) -> Maybe:
    return None if a is None or b is None else a * b


def _given(*tensors: Maybe) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


# ----------------------------------------------------------------------------------------------- packed sequences


def _unpacked(t: Maybe, cu: Tensor, longest: int) -> Maybe:
    """[total, h, ...] as [b, h, longest, ...]; zeros behind the end of a sequence."""
    if t is None:
        return None
    at = cu[:-1, None].long() + torch.arange(longest, device=t.device)
    at = torch.where(at < cu[1:, None], at, t.shape[0])
    return torch.cat((t, torch.zeros_like(t[:1]) if len(t) else t.new_zeros((1, *t.shape[1:]))))[at].movedim(1, 2)


def _packed(t: Maybe, cu: Tensor, total: int) -> Maybe:
    """[b, h, longest, ...] as [total, h, ...]; zeros in rows of no sequence."""
    if t is None:
        return None
    if t.shape[0] == 0 or t.shape[2] == 0:
        return t.new_zeros((total, t.shape[1], *t.shape[3:]))
    row = torch.arange(total, device=t.device, dtype=cu.dtype)
    n = torch.searchsorted(cu[1:].contiguous(), row, right=True).clamp(max=t.shape[0] - 1)
    i = (row - cu[n]).long()
    inside = (i >= 0) & (row < cu[n + 1])
    rows = t.movedim(2, 1)[n, i.clamp(0, t.shape[2] - 1)]
    return torch.where(inside.reshape(-1, *[1] * (rows.dim() - 1)), rows, rows.new_zeros(()))


# ------------------------------------------------------------------------------------------------------- dropout


def kept(rng_state: Tensor, dropout: float, heads: Tensor, rows: range, keys: range) -> Tensor:
    """Z of heddle.h for some rows and keys of the heads [b, h]: Philox4x32-7 in 64-bit integers, whose products wrap as
    they have to."""
    low, device = 0xFFFFFFFF, rng_state.device
    seed, offset = rng_state[0], rng_state[1]
    first, last = keys.start // 8, -(-keys.stop // 8)

    def index(of: range, dim: int) -> Tensor:
        return torch.arange(of.start, of.stop, device=device).reshape([-1 if x == dim else 1 for x in range(3)])

    k0, k1 = seed & low, (seed >> 32) & low
    c0, c1 = index(range(first, last), 2), heads.reshape(-1, 1, 1)
    c2, c3 = index(rows, 1) ^ ((offset >> 32) & low), offset & low
    for _ in range(7):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((p1 >> 32) & low) ^ c1 ^ k0, p1 & low, ((p0 >> 32) & low) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    words = torch.stack([c.expand(heads.numel(), len(rows), last - first) for c in (c0, c1, c2, c3)], -1)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1).flatten(-3)
    dropped = math.floor(65536 * dropout + 0.5)
    stays = halves[..., keys.start - 8 * first : keys.stop - 8 * first] >= dropped
    return stays.reshape(*heads.shape, len(rows), len(keys)) * (65536 / (65536 - dropped))


# -------------------------------------------------------------------------------------------------------- a block

# What a block works with, each tensor with its dimension of queries and that of keys (None: the block takes all of it).
_PLACES: dict[str, tuple[int | None, int | None]] = {
    **dict.fromkeys(("q", "q'", "dout", "dout'", "dlse", "dlse'", "bad_q", "bad_dlse"), (2, None)),
    **dict.fromkeys(("k", "k'", "v", "v'", "bad_k"), (None, 2)),
    **dict.fromkeys(("bias", "bias'", "dweights", "dweights'", "mask"), (2, 3)),
    **dict.fromkeys(("sinks", "sinks'", "blocks"), (None, None)),
}
_RESULTS = ("out", "lse", "weights", "q", "k", "v", "bias", "sinks", "poisoned_k")


@dataclass
class _Block:
    """What holds for all blocks, and what one of them computes."""

    sizes: tuple[int, int, int, int, int]  # b, h, hk, sq, sk
    lengths: tuple[Maybe, Maybe]
    numbers: Mapping[str, Any]
    slopes: Maybe
    rng_state: Maybe
    wanted: frozenset[str]

    def keys_of(self, rows: range) -> range:
        """Those that the masks can let through; at least one."""
        *_, sq, sk = self.sizes
        if self.lengths != (None, None):
            return range(sk)
        causal, left, right = (self.numbers[name] for name in ("causal", "window_left", "window_right"))
        off = self.diagonal(sq, sk)
        right = 0 if causal else right
        first = max(0, rows.start + off - left) if left >= 0 else 0
        last = min(sk, rows.stop + off + right) if right >= 0 else sk
        return range(first, last) if first < last else range(1)

    def diagonal(self, nq: Any, nk: Any) -> Any:
        """off of heddle.h."""
        q_offset, k_offset, whole_sq, whole_sk = (self.numbers[name] for name in ("q_offset", "k_offset", *WHOLE))
        corner = 0 if self.numbers["causal"] == 1 else (whole_sk or k_offset + nk) - (whole_sq or q_offset + nq)
        return q_offset - k_offset + corner

    def _seen(self, t: Mapping[str, Tensor], rows: range, keys: range) -> tuple[Maybe, Maybe, Tensor]:
        """What the masks let through, which rows count, and i + off - j."""
        *_, sq, sk = self.sizes
        device = t["q"].device
        i = torch.arange(rows.start, rows.stop, device=device)[:, None]
        j = torch.arange(keys.start, keys.stop, device=device)
        full: tuple[Any, Any] = (sq, sk)
        nq, nk = (n if x is None else x.long().reshape(-1, 1, 1, 1) for x, n in zip(self.lengths, full, strict=True))
        causal, left, right = (self.numbers[name] for name in ("causal", "window_left", "window_right"))
        away = i + self.diagonal(nq, nk) - j
        rules = [None if self.lengths[0] is None else i < nq, None if self.lengths[1] is None else j < nk]
        rules += [away >= 0 if causal else None, away <= left if left >= 0 else None]
        if "blocks" in t:
            rows_of, keys_of = (x // self.numbers[name] for x, name in ((i[:, 0], "block_q"), (j, "block_k")))
            rules.append(t["blocks"][:, :, rows_of][..., keys_of])
        rules += [-away <= right if right >= 0 else None, t.get("mask"), ~(t["bias"] < HIDDEN) if "bias" in t else None]
        there = _given(*rules)
        return reduce(torch.logical_and, there) if there else None, rules[0], away

    def __call__(self, t: Mapping[str, Tensor], rows: range, keys: range) -> dict[str, Tensor]:
        b, h, hk, _, _ = self.sizes
        r, n, group = len(rows), len(keys), h // hk
        scale, cap, dropout = (self.numbers[name] for name in ("scale", "softcap", "dropout"))
        q, k, v, qt, kt, vt = (t.get(name) for name in ("q", "k", "v", "q'", "k'", "v'"))
        dout, doutt, dlse, dlset = (t.get(name) for name in ("dout", "dout'", "dlse", "dlse'"))

        # The query heads of a group beside each other: no key is repeated.
        def inner(x: Maybe, y: Maybe) -> Maybe:
            if x is None or y is None:
                return None
            return (x.reshape(b, hk, group * r, x.shape[-1]) @ y.mT).reshape(b, h, r, n)

        def by_keys(x: Maybe, y: Maybe) -> Maybe:
            if x is None or y is None:
                return None
            return (x.reshape(b, hk, group * r, n) @ y).reshape(b, h, r, y.shape[-1])

        def by_rows(x: Maybe, y: Maybe) -> Maybe:
            if x is None or y is None:
                return None
            return x.reshape(b, hk, group * r, n).mT @ y.reshape(b, hk, group * r, y.shape[-1])

        def rowsum_of(x: Maybe) -> Maybe:
            return None if x is None else x.sum(-1, keepdim=True)

        def less(x: Maybe, y: Maybe) -> Maybe:
            return x if y is None else -y if x is None else x - y

        def shown(x: Maybe) -> Maybe:
            return x if x is None or seen is None else torch.where(seen, x, x.new_zeros(()))

        seen, counts, away = self._seen(t, rows, keys)
        scores = inner(q, k)
        assert scores is not None
        scores = scores * scale
        slope = bend = None
        if cap:
            th = torch.tanh(scores / cap)
            scores, slope = cap * th, 1 - th * th
            bend = -2 / cap * th * slope
        if self.slopes is not None:
            scores = scores - self.slopes.reshape(-1, h, 1, 1) * away.abs()
        if "bias" in t:
            scores = scores + t["bias"]
        if seen is not None:
            scores = torch.where(seen, scores, scores.new_full((), -math.inf))
        sink = t.get("sinks")
        if sink is not None:
            sink = sink.reshape(1, h, 1, 1).expand(b, h, r, 1)
            sink = sink if counts is None else torch.where(counts, sink, sink.new_full((), -math.inf))
        with torch.no_grad():
            largest = scores.amax(-1, keepdim=True)
            largest = largest if sink is None else torch.maximum(largest, sink)
            largest = torch.where(largest == -math.inf, 0.0, largest)
        p = torch.exp(scores - largest)
        total = p.sum(-1, keepdim=True)
        p_sink = None
        if sink is not None:
            p_sink = torch.exp(sink - largest)
            total = total + p_sink
        total = torch.where(total == 0, 1.0, total)
        p, p_sink = p / total, None if p_sink is None else p_sink / total

        tt = sum_of(inner(qt, k), inner(q, kt))
        tt = None if tt is None else tt * scale
        st = shown(sum_of(tt if slope is None else times(tt, slope), t.get("bias'")))
        sinkt = None if "sinks'" not in t else t["sinks'"].reshape(1, h, 1, 1)
        lset = sum_of(rowsum_of(times(p, st)), times(p_sink, sinkt))
        pt = times(p, less(st, lset))
        p_sinkt = times(p_sink, less(sinkt, lset))
        z = None
        if dropout:
            assert self.rng_state is not None
            numbers = torch.arange(h, device=scores.device) + self.numbers["h_offset"]
            numbers = numbers + (self.numbers["whole_h"] or h) * torch.arange(b, device=scores.device)[:, None]
            i, j = self.numbers["q_offset"], self.numbers["k_offset"]
            places = range(rows.start + i, rows.stop + i), range(keys.start + j, keys.stop + j)
            z = kept(self.rng_state, dropout, numbers, *places).to(p.dtype)
        z_p, z_pt = (p, pt) if z is None else (p * z, times(pt, z))
        results: dict[str, Maybe] = {}
        if "out" in self.wanted:
            results["out"] = sum_of(by_keys(z_pt, v), by_keys(z_p, vt))
        results["lse"], results["weights"] = lset, pt

        if self.wanted & {"q", "k", "v", "bias", "sinks"}:
            dp, dpt = inner(dout, v), sum_of(inner(doutt, v), inner(dout, vt))
            if z is not None:
                dp, dpt = times(dp, z), times(dpt, z)
            dp, dpt = sum_of(dp, shown(t.get("dweights"))), sum_of(dpt, shown(t.get("dweights'")))
            d = less(rowsum_of(times(p, dp)), dlse)
            dt_ = less(rowsum_of(sum_of(times(pt, dp), times(p, dpt))), dlset)
            ds = times(p, less(dp, d))
            dst = sum_of(times(pt, less(dp, d)), times(p, less(dpt, dt_)))
            dtt, dt = dst, ds
            if slope is not None and bend is not None:
                dtt, dt = sum_of(times(dst, slope), times(times(ds, bend), tt)), times(ds, slope)
            dq, dk = sum_of(by_keys(dtt, k), by_keys(dt, kt)), sum_of(by_rows(dtt, q), by_rows(dt, qt))
            results["q"], results["k"] = (None if x is None else x * scale for x in (dq, dk))
            results["v"] = sum_of(by_rows(z_pt, dout), by_rows(z_p, doutt))
            results["bias"] = dst
            dsinkt = sum_of(times(p_sinkt, d), times(p_sink, dt_))
            results["sinks"] = None if dsinkt is None else -dsinkt
        made = {name: x for name, x in results.items() if x is not None and name in self.wanted}
        return self._poisoned(made, t, seen, counts, sink is not None)

    def _poisoned(
        self, made: dict[str, Tensor], t: Mapping[str, Tensor], seen: Maybe, counts: Maybe, sink: bool
    ) -> dict[str, Tensor]:
        """NaN where a NaN or an infinity that is not masked out takes part; it was replaced by 0 in all products."""
        b, h, hk, _, _ = self.sizes
        r = t["q"].shape[2]
        n = t["bad_k"].shape[-1]
        bad = t["bad_k"].repeat_interleave(h // hk, 1)[:, :, None, :] | t["bad_q"][..., None]
        rows = (bad if seen is None else seen & bad).any(-1, keepdim=True)
        if "bad_dlse" in t:  # the sink has a gradient where no key is seen
            used = counts if sink else None if seen is None else seen.any(-1, keepdim=True)
            rows = rows | (t["bad_dlse"][..., None] if used is None else t["bad_dlse"][..., None] & used)
        pairs = rows.expand(*rows.shape[:-1], n) if seen is None else rows & seen
        for name in ("out", "lse", "weights", "q", "bias", "sinks"):
            if name in made:
                where = pairs if name in ("weights", "bias") else rows
                made[name] = made[name].masked_fill(where, math.nan)
        if made.keys() & {"k", "v"}:
            made["poisoned_k"] = pairs.reshape(b, hk, h // hk * r, n).any(2)
        return made


class _Again(torch.autograd.Function):
    """A block whose derivatives are wanted in turn: it keeps its inputs, and runs again when they are formed."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return run(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Maybe) -> tuple[Maybe, ...]:
        again = torch.is_grad_enabled()
        needs = ctx.needs_input_grad[1:]
        with torch.enable_grad():
            inputs = [
                t if not need else t.view_as(t) if again else t.detach().requires_grad_()
                for t, need in zip(ctx.saved_tensors, needs, strict=True)
            ]
            pairs = zip(ctx.run(*inputs), grads, strict=True)
            outs = [(out, grad) for out, grad in pairs if grad is not None and out.requires_grad]
            leaves = [t for t, need in zip(inputs, needs, strict=True) if need]
            made = iter(
                torch.autograd.grad(
                    [out for out, _ in outs], leaves, [g for _, g in outs], create_graph=again, allow_unused=True
                )
                if outs
                else [None] * len(leaves)
            )
        return None, *(next(made) if need else None for need in needs)


def _run(block: _Block, t: Mapping[str, Tensor], rows: range, keys: range, alone: bool) -> dict[str, Tensor]:
    """One block. Alone, or where no derivative of it is wanted (or a transform wants it), it is run as it is."""
    plain = alone or not torch.is_grad_enabled() or _transforms() or forward_ad._current_level >= 0
    if plain or not any(x.requires_grad for x in t.values()):
        return block(t, rows, keys)
    names, made = tuple(t), list[str]()
    apply: Any = _Again.apply

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        results = block(dict(zip(names, inputs, strict=True)), rows, keys)
        made[:] = results
        return tuple(results.values())

    results = apply(run, *t.values())
    return dict(zip(made, results, strict=True))


# ------------------------------------------------------------------------------------------------------ attention

ROWS = ("q", "dout")
KEYS = ("k", "v")


def _clean(t: dict[str, Tensor], names: Sequence[str], bad_name: str, size: Sequence[int]) -> None:
    """Rows with a NaN or an infinity become 0, and are noted."""
    bad = t["q"].new_zeros(tuple(size), dtype=torch.bool)
    for name in names:
        if name in t:
            bad = bad | ~torch.isfinite(t[name]).all(-1)
    for name in names:
        if name in t:
            t[name] = torch.where(bad[..., None], t[name].new_zeros(()), t[name])
    t[bad_name] = bad


def _piece(t: Mapping[str, Tensor], rows: range, keys: range) -> dict[str, Tensor]:
    piece = {}
    for name, x in t.items():
        row, key = _PLACES[name]
        if row is not None and x.shape[row] != 1:
            x = x.narrow(row, rows.start, len(rows))
        if key is not None:
            x = x.narrow(key, keys.start, len(keys))
        piece[name] = x
    return piece


def _spread(x: Tensor, dim: int, keys: range, sk: int) -> Tensor:
    """Zeros for the keys that a block did not look at."""
    pad = [0, 0] * (x.dim() - 1 - dim) + [keys.start, sk - keys.stop]
    return x if len(keys) == sk else F.pad(x, pad)


def _without_segments(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same with a mask in place of segments."""
    own, other, cu_q, cu_k = (given[name] for name in ("q_segments", "k_segments", "cu_seqlens_q", "cu_seqlens_k"))
    if own is None:
        return given
    if cu_q is not None:
        longest = given["max_seqlen_q"], given["max_seqlen_k"]
        rows = _unpacked(own[:, None], cu_q, longest[0]), _unpacked(other[:, None], cu_k, longest[1])
        own, other = (x[:, 0] for x in rows if x is not None)
    alike = own[:, None, :, None] == other[:, None, None, :]
    mask = alike if given["mask"] is None else alike & given["mask"]
    return {**given, "mask": mask, "q_segments": None, "k_segments": None}


def _named_blocks(given: Mapping[str, Any], sk: int) -> Tensor:
    """Which blocks of keys the lists name, bool [b or 1, h or 1, lists, blocks]."""
    rows, columns = given["block_rows"].long(), given["block_columns"]
    blocks = max(1, -(-sk // given["block_k"]))
    named = rows[-1:, -1:, -1:].clamp(0, columns.shape[0])
    ends = torch.minimum(rows.clamp(min=0), named)
    first, last = ends[..., :-1], ends[..., 1:]
    if first.numel() == 0:
        return first.new_zeros((*first.shape, blocks), dtype=torch.bool)
    found = []
    at_once = max(1, BLOCK // max(columns.shape[0], first.numel()))
    for start in range(0, blocks, at_once):
        these = torch.arange(start, min(start + at_once, blocks), device=rows.device, dtype=columns.dtype)
        # How many there are in front of each place: a list names what it has more of at its end.
        before = F.pad((columns == these[:, None]).cumsum(1), (1, 0))
        found.append((before[:, last] > before[:, first]).movedim(0, -1))
    return torch.cat(found, -1)


def attention(
    given: Mapping[str, Any], direction: Mapping[str, Maybe], wanted: frozenset[str], grads: Mapping[str, Maybe] = {}
) -> dict[str, Tensor]:
    """What changes along `direction` of q, k, v, bias and sinks (and of dout, dlse and dweights, with a prime).

    given: all arguments of torch.ops.heddle.attention, by name. grads: dout, dlse, dweights.
    wanted: out, lse, weights, and q, k, v, bias, sinks for the gradients. What is not in the result is zero."""
    if given["block_table"] is not None:
        raise NotImplementedError("keys in pages (block_table) have no derivative")
    if given["k"].dtype == torch.float8_e4m3fn:
        raise NotImplementedError("keys of 8 bits (torch.float8_e4m3fn) have no derivative")
    dtype = given["q"].dtype
    real = torch.float64 if dtype == torch.float64 else torch.float32
    given = _without_segments(given)
    t = {name: given[name] for name in ("q", "k", "v", "bias", "mask", "sinks") if given[name] is not None}
    if given["block_rows"] is not None:
        longest_k = given["k"].shape[2] if given["cu_seqlens_q"] is None else given["max_seqlen_k"]
        t["blocks"] = _named_blocks(given, longest_k)
    t |= {name: x for name, x in grads.items() if x is not None}
    t |= {f"{name}'": x for name, x in direction.items() if x is not None}
    t = {name: x if x.dtype == torch.bool else x.to(real) for name, x in t.items()}
    lengths = given["seqlens_q"], given["seqlens_k"]
    cu_q, cu_k = given["cu_seqlens_q"], given["cu_seqlens_k"]
    if cu_q is not None:
        lengths = cu_q.diff(), cu_k.diff()
        longest = [given["max_seqlen_q"], given["max_seqlen_k"]]
        if not {"bias", "mask", "weights"} & (t.keys() | wanted) and not {"dweights", "dweights'"} & t.keys():
            longest = [min(longest[0], given["q"].shape[0]), min(longest[1], given["k"].shape[0])]
        for name in ("q", "q'", "dout", "dout'", "k", "k'", "v", "v'", "dlse", "dlse'"):
            if name in t:
                cu, size = (cu_k, longest[1]) if name[0] in "kv" else (cu_q, longest[0])
                t[name] = _unpacked(t[name].mT if "lse" in name else t[name], cu, size)
    results = _attention(given, t, lengths, wanted)
    for name in results:
        if cu_q is not None and name in ("out", "q", "k", "v", "lse"):
            cu, total = (cu_k, given["k"].shape[0]) if name in ("k", "v") else (cu_q, given["q"].shape[0])
            packed = _packed(results[name], cu, total)
            assert packed is not None
            results[name] = packed.mT if name == "lse" else packed
        if name not in ("lse", "sinks"):
            results[name] = results[name].to(dtype)
    return results


def _attention(
    given: Mapping[str, Any], t: dict[str, Tensor], lengths: tuple[Maybe, Maybe], wanted: frozenset[str]
) -> dict[str, Tensor]:
    (b, h, sq, d), (hk, sk) = t["q"].shape, t["k"].shape[1:3]
    if sk == 0:  # one key that nobody sees
        for name in t:
            if _PLACES[name][1] == 2:
                t[name] = F.pad(t[name], (0, 0, 0, 1))
        t = {name: x for name, x in t.items() if _PLACES[name][1] != 3}
        nq = t["q"].new_full((b,), sq, dtype=torch.int32) if lengths[0] is None else lengths[0]
        lengths = nq, t["q"].new_zeros((b,), dtype=torch.int32)
    for name in ("dlse", "dlse'"):
        if name in t:
            t[name] = t[name][..., None]
    _clean(t, ("q", "q'", "dout", "dout'"), "bad_q", (b, h, sq))
    if "dlse" in t or "dlse'" in t:
        _clean(t, ("dlse", "dlse'"), "bad_dlse", (b, h, sq))
    _clean(t, ("k", "k'", "v", "v'"), "bad_k", (b, hk, t["k"].shape[2]))
    numbers = {name: value for name, value in given.items() if isinstance(value, (int, float))}
    numbers["scale"] = numbers["scale"] or 1 / math.sqrt(d)
    block = _Block((b, h, hk, sq, t["k"].shape[2]), lengths, numbers, given["alibi_slopes"], given["rng_state"], wanted)
    device = t["q"].device.type
    with torch.autocast(device, enabled=False):
        return _shaped(_blocks(block, t), sk)


def _blocks(block: _Block, t: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All blocks: rows behind each other, sums over rows added up."""
    b, h, _, sq, sk = block.sizes
    at_once = max(FEWEST, BLOCK // max(1, b * h * sk))
    bias = t.get("bias")
    rows_of: dict[str, list[Tensor]] = {}
    sums: dict[str, Tensor] = {}
    for first in range(0, max(sq, 1), at_once):
        rows = range(first, min(sq, first + at_once))
        keys = block.keys_of(rows)
        made = _run(block, _piece(t, rows, keys), rows, keys, at_once >= sq)
        for name, x in made.items():
            if name in ("weights", "bias"):
                x = _spread(x, 3, keys, sk)
            elif name in ("k", "v", "poisoned_k"):
                x = _spread(x, 2, keys, sk)
            if name == "sinks":
                x = x.sum((0, 2, 3))
            elif name == "bias" and bias is not None:
                over = [dim for dim in range(3) if bias.shape[dim] == 1]
                x = x.sum(over, keepdim=True) if over else x
            if name in ("out", "lse", "weights", "q") or (name == "bias" and bias is not None and bias.shape[2] != 1):
                rows_of.setdefault(name, []).append(x)
            elif name == "poisoned_k":
                sums[name] = sums[name] | x if name in sums else x
            else:
                sums[name] = sums[name] + x if name in sums else x
    return {name: pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2) for name, pieces in rows_of.items()} | sums


def _shaped(made: dict[str, Tensor], sk: int) -> dict[str, Tensor]:
    poisoned = made.pop("poisoned_k", None)
    for name in ("k", "v"):
        if name in made and poisoned is not None:
            made[name] = made[name].masked_fill(poisoned[..., None], math.nan)
    if sk == 0:  # see above
        made = {name: x for name, x in made.items() if name not in ("k", "v", "weights", "bias")}
    if "lse" in made:
        made["lse"] = made["lse"].squeeze(-1)
    return made
