# SPDX-License-Identifier: Apache-2.0
"""What test_oracle.py works with: the C API by ctypes, guarded memory, the formulas of include/heddle.h, the rule."""

from __future__ import annotations

import ctypes
import math
import mmap
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from typing import NamedTuple

import numpy
import torch
from conftest import ROUNDING, finite_of

import heddle

F32, BF16, F16, F64 = range(4)
CPU, REF, CUDA = range(3)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BITS = [
    "WINDOW",
    "ALIBI",
    "BIAS",
    "BOOL_MASK",
    "SINKS",
    "VARLEN",
    "SEQLENS",
    "WEIGHTS",
    "RNG_STATE",
    "DETERMINISTIC",
    "TF32",
]
FEATURE = {name: 1 << bit for bit, name in enumerate(BITS)}
NONE, TOP_LEFT, BOTTOM_RIGHT = range(3)
BROADCAST = -(2**63)

# --------------------------------------------------------------------------------------------------------- the C API


class Strides(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in "bhs"]


class Attention(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("dtype", c_int), ("device", c_int)]
    _fields_ += [(name, c_int64) for name in ("b", "h", "hk", "sq", "sk", "d", "dv")]
    _fields_ += [("mask", c_int), ("reserved0", c_int32), ("features", c_uint64)]
    _fields_ += [("window_left", c_int64), ("window_right", c_int64)]
    _fields_ += [(name, c_double) for name in ("scale", "softcap", "dropout")]
    _fields_ += [("seed", c_uint64), ("offset", c_uint64), ("total_q", c_int64), ("total_k", c_int64)]
    _fields_ += [
        (f"{name}_stride", Strides)
        for name in ("q", "k", "v", "o", "do", "dq", "dk", "dv", "bias", "bool_mask", "dbias", "weights", "dweights")
    ]
    _fields_ += [("alibi_stride_b", c_int64)]
    _fields_ += [(name, c_int64) for name in ("q_offset", "k_offset", "h_offset", "whole_sq", "whole_sk", "whole_h")]


ATTENTION_DATA = [
    "q",
    "k",
    "v",
    "alibi_slopes",
    "bias",
    "bool_mask",
    "sinks",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqlens_q",
    "seqlens_k",
    "rng_state",
    "o",
    "lse",
    "weights",
    "dout",
    "dlse",
    "dweights",
    "dq",
    "dk",
    "dv",
    "dbias",
    "dsinks",
]


class AttentionData(ctypes.Structure):
    _fields_ = [("size", c_size_t)] + [(name, c_void_p) for name in ATTENTION_DATA]


class NormLinear(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("dtype", c_int), ("device", c_int), ("norm", c_int), ("reserved0", c_int32)]
    _fields_ += [("features", c_uint64), ("m", c_int64), ("k", c_int64), ("n", c_int64), ("eps", c_double)]
    _fields_ += [(f"{name}_stride", c_int64) for name in ("x", "w", "y", "dy", "dx", "dw")]


class NormLinearData(ctypes.Structure):
    _fields_ = [("size", c_size_t)]
    _fields_ += [
        (name, c_void_p)
        for name in [
            "x",
            "gamma",
            "beta",
            "w",
            "bias",
            "y",
            "mean",
            "rstd",
            "dy",
            "dx",
            "dgamma",
            "dbeta",
            "dw",
            "dbias",
        ]
    ]


def _load():
    """The library that the package has loaded."""
    heddle.info()
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libheddle" in line}
    assert len(paths) == 1, paths
    library = ctypes.CDLL(paths.pop())
    library.heddle_last_message.restype = c_char_p
    for operation, desc, data in (("attention", Attention, AttentionData), ("norm_linear", NormLinear, NormLinearData)):
        workspace = getattr(library, f"heddle_{operation}_workspace")
        workspace.argtypes = [POINTER(desc), c_int, POINTER(c_size_t)]
        for way in ("forward", "backward"):
            run = getattr(library, f"heddle_{operation}_{way}")
            run.argtypes = [POINTER(desc), POINTER(data), c_void_p, c_size_t, c_void_p]
    return library


LIBRARY = _load()
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = c_void_p
LIBC.mmap.argtypes = [c_void_p, c_size_t, c_int, c_int, c_int, ctypes.c_long]
LIBC.munmap.argtypes = [c_void_p, c_size_t]
LIBC.mprotect.argtypes = [c_void_p, c_size_t, c_int]

# ------------------------------------------------------------------------------------------------------------ memory

PAGE = mmap.PAGESIZE
POISON = 0xFF  # NaN in every type
MARGIN = 4096


class Room:
    """Memory of a few bytes with something forbidden on both sides: `bytes` is a tensor of it."""

    def __init__(self, size, device, at_end):
        self.device, self.size, self.mapped = device, size, None
        if device == "cuda":
            self.all = torch.full((size + 2 * MARGIN,), POISON, dtype=torch.uint8, device=device)
            self.bytes = self.all[MARGIN : MARGIN + size]
            return
        inside = -(-max(size, 1) // PAGE) * PAGE
        self.length = inside + 2 * PAGE
        self.mapped = LIBC.mmap(None, self.length, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        assert self.mapped not in (None, 2**64 - 1)
        assert LIBC.mprotect(self.mapped + PAGE, inside, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        ctypes.memset(self.mapped + PAGE, POISON, inside)
        address = self.mapped + PAGE + (inside - size if at_end else 0)
        buffer = (ctypes.c_uint8 * max(size, 1)).from_address(address)
        self.bytes = torch.frombuffer(buffer, dtype=torch.uint8)[:size] if size else torch.empty(0, dtype=torch.uint8)
        self.address = address

    def pointer(self):
        # Not that of `bytes`, which is 0 where nothing is in it.
        return self.all.data_ptr() + MARGIN if self.device == "cuda" else self.address

    def margins_are_whole(self):
        if self.device != "cuda":
            return True  # else we had been killed
        return bool((self.all[:MARGIN] == POISON).all() and (self.all[MARGIN + self.size :] == POISON).all())

    def close(self):
        if self.mapped:
            LIBC.munmap(self.mapped, self.length)


class Memory:
    """All rooms of one problem."""

    def __init__(self, rng, device):
        self.rng, self.device, self.rooms = rng, device, []

    def room(self, size, at_end=None):
        self.rooms.append(Room(size, self.device, self.rng.random() < 0.5 if at_end is None else at_end))
        return self.rooms[-1]

    def tensor(self, shape, strides, dtype):
        """A tensor full of poison, and its address. Its room ends where its last element does."""
        span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
        room = self.room(span * dtype.itemsize)
        flat = room.bytes.view(dtype)
        return torch.as_strided(flat, shape, strides) if span else flat.reshape(shape), room

    def close(self):
        for room in self.rooms:
            room.close()

    def check(self):
        assert all(room.margins_are_whole() for room in self.rooms), "a margin was written to"


class Placed(NamedTuple):
    tensor: torch.Tensor
    room: Room

    def gaps_are_whole(self):
        """Whether nothing but the tensor's own elements was written."""
        touched = torch.zeros(self.room.size // self.tensor.element_size(), dtype=torch.bool)
        if self.tensor.numel():
            torch.as_strided(touched, self.tensor.shape, self.tensor.stride()).fill_(True)
        raw = self.room.bytes.cpu().reshape(-1, self.tensor.element_size())
        return bool((raw[~touched] == POISON).all())


def contiguous(shape):
    strides = [1] * len(shape)
    for x in range(len(shape) - 2, -1, -1):
        strides[x] = strides[x + 1] * max(shape[x + 1], 1)
    return strides


def any_strides(rng, shape, repeats=False):
    """Strides that let nothing overlap: some order of the leading dimensions, with gaps. repeats: or 0 for an input."""
    order = list(range(len(shape) - 1))
    rng.shuffle(order)
    strides, step = [1] * len(shape), shape[-1] + rng.choice((0, 0, 1, 5))
    for x in reversed(order):
        strides[x] = step
        step *= max(shape[x], 1)
        step += rng.choice((0, 0, 3))
    if repeats and rng.random() < 0.15 and order:
        strides[rng.choice(order)] = 0
    return strides


def as_strides(strides, packed=False):
    b, h, s = (0, strides[1], strides[0]) if packed else strides[:3]
    return Strides(b, h, s) if b or h or s else Strides(BROADCAST, BROADCAST, BROADCAST)


def call(operation, which, desc, data, memory, stream):
    size = c_size_t()
    run = getattr(LIBRARY, f"heddle_{operation}_workspace")
    status = run(ctypes.byref(desc), which, ctypes.byref(size))
    assert status == 0, LIBRARY.heddle_last_message()
    padded = -(-size.value // 64) * 64
    room = memory.room(padded, at_end=True)
    start = room.pointer() + (-room.pointer() % 64 if memory.device == "cuda" else 0)
    run = getattr(LIBRARY, f"heddle_{operation}_{('forward', 'backward')[which]}")
    status = run(ctypes.byref(desc), ctypes.byref(data), start if size.value else None, size.value, stream)
    assert status == 0, LIBRARY.heddle_last_message()


# ---------------------------------------------------------------------------------------------------------- formulas


def philox(counter, key):
    """Philox4x32-7 of arrays: Salmon et al., SC11. counter: four of uint64 that hold 32 bits, key: two numbers."""
    low = numpy.uint64(0xFFFFFFFF)
    k0, k1 = numpy.uint64(key & 0xFFFFFFFF), numpy.uint64(key >> 32)
    c0, c1, c2, c3 = counter
    for _ in range(7):
        p0, p1 = c0 * numpy.uint64(0xD2511F53), c2 * numpy.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & low, (p0 >> 32) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + numpy.uint64(0x9E3779B9)) & low, (k1 + numpy.uint64(0xBB67AE85)) & low
    return numpy.stack((c0, c1, c2, c3), -1)


def kept(case, n, sq, sk):
    """Z of one sequence, [h, sq, sk]."""
    x, i, j = numpy.meshgrid(*(numpy.arange(size, dtype=numpy.uint64) for size in (case["h"], sq, sk)), indexing="ij")
    low, high = numpy.uint64(case["offset"] & 0xFFFFFFFF), numpy.uint64(case["offset"] >> 32)
    x = x + numpy.uint64(n * (case["whole_h"] or case["h"]) + case["h_offset"])
    i, j = i + numpy.uint64(case["q_offset"]), j + numpy.uint64(case["k_offset"])
    words = philox((j // numpy.uint64(8), x, i ^ high, numpy.full_like(j, low)), case["seed"])
    word = numpy.take_along_axis(words, (j % numpy.uint64(8) // numpy.uint64(2)).astype(numpy.int64)[..., None], -1)
    number = word[..., 0] >> j % numpy.uint64(2) * numpy.uint64(16) & numpy.uint64(0xFFFF)
    dropped = math.floor(65536 * case["dropout"] + 0.5)
    return torch.from_numpy(number >= numpy.uint64(dropped)).double() * (65536 / (65536 - dropped))


def rows_of(case, n):
    """The rows of q and of k of sequence n: (first, count) each."""
    if case["cu_q"] is not None:
        return [(cu[n], cu[n + 1] - cu[n]) for cu in (case["cu_q"], case["cu_k"])]
    return [
        (0, full if some is None else some[n])
        for some, full in ((case["seqlens_q"], case["sq"]), (case["seqlens_k"], case["sk"]))
    ]


def seen_of(case, n, sq, sk):
    """[h, sq, sk]: what the masks let through, and i + off - j."""
    off = case["q_offset"] - case["k_offset"]
    if case["mask"] != TOP_LEFT:
        off += (case["whole_sk"] or case["k_offset"] + sk) - (case["whole_sq"] or case["q_offset"] + sq)
    i, j = torch.arange(sq)[:, None] + off, torch.arange(sk)[None, :]
    seen = (j <= i) if case["mask"] != NONE else torch.ones(sq, sk, dtype=torch.bool)
    if case["window"]:
        left, right = case["window"]
        seen = seen & (j >= i - left) if left >= 0 else seen
        seen = seen & (j <= i + right) if right >= 0 else seen
    seen = seen.expand(case["h"], sq, sk)
    if case["bool_mask"] is not None:
        seen = seen & case["bool_mask"][n, :, :sq, :sk]
    if case["bias"] is not None:
        seen = seen & ~case["bias"][n, :, :sq, :sk].isneginf()
    return seen, i - j


def orders(rng, sq, sk, d):
    """Another order of the sums over queries, keys and head dim; None: as they come."""
    return [torch.randperm(size, generator=rng) if rng else torch.arange(size) for size in (sq, sk, d)]


def attention_by_formula(case, leaves, dtype, rng=None):
    """(o, lse, weights) with autograd, in `dtype`, one sequence after the other."""
    h, group = case["h"], case["h"] // case["hk"]
    packed = case["cu_q"] is not None
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    o = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=dtype)
    lse = torch.full((h, q.shape[0]) if packed else q.shape[:3], -math.inf, dtype=dtype)
    weights = torch.zeros(case["b"], h, case["sq"], case["sk"], dtype=dtype)
    outs, lses, placed = [], [], []
    for n in range(case["b"]):
        (first_q, sq), (first_k, sk) = rows_of(case, n)
        if packed:
            part = [
                t[first : first + rows].transpose(0, 1)
                for t, first, rows in ((q, first_q, sq), (k, first_k, sk), (v, first_k, sk))
            ]
        else:
            part = [t[n, :, :rows] for t, rows in ((q, sq), (k, sk), (v, sk))]
        a, c, e = (t if x == 0 else t.repeat_interleave(group, 0) for x, t in enumerate(part))
        rows, keys, dims = orders(rng, sq, sk, a.shape[-1])
        back_rows, back_keys = rows.argsort(), keys.argsort()
        a, c, e = a[:, rows][..., dims], c[:, keys][..., dims], e[:, keys]
        t = case["scale_used"] * (a @ c.transpose(1, 2))
        s = case["softcap"] * torch.tanh(t / case["softcap"]) if case["softcap"] else t
        seen, distance = seen_of(case, n, sq, sk)
        seen, distance = seen[:, rows][..., keys], distance[rows][:, keys]
        if case["slopes"] is not None:
            slopes = case["slopes"][n if case["slopes"].dim() == 2 else slice(None)].reshape(h, 1, 1)
            s = s - slopes.to(dtype) * distance.abs().to(dtype)
        if case["bias"] is not None:
            s = s + leaves["bias"][n, :, :sq, :sk][:, rows][..., keys]
        s = s.masked_fill(~seen, -math.inf)
        whole = (
            s
            if leaves.get("sinks") is None
            else torch.cat((s, leaves["sinks"].to(dtype).reshape(h, 1, 1).expand(h, sq, 1)), -1)
        )
        none = (whole == -math.inf).all(-1) if whole.shape[-1] else torch.ones(h, sq, dtype=torch.bool)
        sums = torch.logsumexp(whole.masked_fill(none[..., None], 0.0), -1) if whole.shape[-1] else s.new_zeros(h, sq)
        p = torch.exp((s - sums[..., None]).masked_fill(~seen | none[..., None], -math.inf))
        z = kept(case, n, sq, sk).to(dtype)[:, rows][..., keys] if case["dropout"] else 1.0
        outs.append(((p * z) @ e)[:, back_rows])
        lses.append(sums.masked_fill(none, -math.inf)[:, back_rows])
        weights = weights.index_put(
            (torch.tensor(n), torch.arange(h)[:, None, None], torch.arange(sq)[:, None], torch.arange(sk)),
            p[:, back_rows][..., back_keys],
        )
        placed.append((n, first_q, sq))
    for (n, first, sq), out, sums in zip(placed, outs, lses, strict=True):
        if packed:
            o = torch.cat((o[:first], out.transpose(0, 1), o[first + sq :]))
            lse = torch.cat((lse[:, :first], sums, lse[:, first + sq :]), 1)
        else:
            o = torch.cat((o[:n], torch.cat((out, o[n, :, sq:]), 1)[None], o[n + 1 :]))
            lse = torch.cat((lse[:n], torch.cat((sums, lse[n, :, sq:]), 1)[None], lse[n + 1 :]))
    return o, lse, weights


def all_of_attention(case, given, dtype, real, rng=None):
    """Every result and gradient by name, computed in `dtype`."""
    leaves = {
        name: given[name].to(real if name == "sinks" else dtype).detach().requires_grad_()
        for name in ("q", "k", "v", "bias", "sinks")
        if given.get(name) is not None
    }
    o, lse, weights = attention_by_formula(case, leaves, dtype, rng)
    loss = o.new_zeros(())
    for result, name in ((o, "dout"), (lse, "dlse"), (weights, "dweights")):
        if given.get(name) is not None:
            there = torch.isfinite(result) & torch.isfinite(given[name].to(result.dtype))
            loss = (
                loss + (result.masked_fill(~there, 0.0) * given[name].to(result.dtype).masked_fill(~there, 0.0)).sum()
            )
    found = {"o": o, "lse": lse, "weights": weights}
    if loss.requires_grad:
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        found |= {
            f"d{name}": torch.zeros_like(leaf) if grad is None else grad
            for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
        }
    return {name: value.detach() for name, value in found.items()}


# ------------------------------------------------------------------------------------------------------------- rule


def assert_right(name, got, truth, plains, terms):
    """At most twice the largest error of the plain computation, over some orders of its sums, or a few roundings.

    terms: what roundings are relative to, of the dtype, and of the float32 (or float64) that sums are kept in."""
    rounding = ROUNDING[got.dtype]
    got, truth = got.detach().double().cpu(), truth.double()
    finite = finite_of(name, got, truth)
    if not finite.any():
        return
    error = (got - truth)[finite].abs().max().item()
    lost = max((plain.double() - truth)[finite].abs().nan_to_num(0.0).max().item() for plain in plains)
    sums = 4 * 2**-24 if rounding >= 2**-24 else 64 * rounding  # the reference sums one by one
    few = 2 * rounding * terms[0] + sums * terms[1]
    largest = truth[finite].abs().max().item()
    assert error <= max(2 * lost, few), f"{name}: error {error:g} of {largest:g}, allowed {2 * lost:g} and {few:g}"


def of_sequence(case, n, packed, tensors):
    """The rows of sequence n of tensors {name: (tensor, is it q's rows)}, as [heads, rows, last]."""
    (first_q, sq), (first_k, sk) = rows_of(case, n)
    found = {}
    for name, (tensor, of_q) in tensors.items():
        first, rows = (first_q, sq) if of_q else (first_k, sk)
        found[name] = tensor[first : first + rows].transpose(0, 1) if packed else tensor[n, :, :rows]
    return found


def terms_of_attention(case, given, truth):
    """For each tensor the sums of magnitudes of the terms of its elements: twice, the second with what an error of a
    score does to its weight. The largest of each is taken, but for dbias, which is summed as the caller sums."""
    h, group, packed = case["h"], case["h"] // case["hk"], case["cu_q"] is not None
    largest = {name: [0.0, 0.0] for name in ("o", "lse", "weights", "dq", "dk", "dv", "dsinks")}
    dbias = torch.zeros(2, *truth["weights"].shape, dtype=torch.float64)
    dsinks = torch.zeros(2, h, dtype=torch.float64)
    tensors = {"q": (given["q"], True), "k": (given["k"], False), "v": (given["v"], False)}
    if given.get("dout") is not None:
        tensors["dout"] = (given["dout"], True)
    for n in range(case["b"]):
        t = {name: value.double().abs() for name, value in of_sequence(case, n, packed, tensors).items()}
        sq, sk = t["q"].shape[1], t["k"].shape[1]
        k, v = t["k"].repeat_interleave(group, 0), t["v"].repeat_interleave(group, 0)
        seen, distance = seen_of(case, n, sq, sk)
        scores = abs(case["scale_used"]) * (t["q"] @ k.transpose(1, 2))
        if case["slopes"] is not None:
            slopes = case["slopes"][n if case["slopes"].dim() == 2 else slice(None)].double()
            scores = scores + slopes.reshape(h, 1, 1) * distance.abs()
        if case["bias"] is not None:
            scores = scores + case["bias"][n, :, :sq, :sk].double().abs().nan_to_num(0.0, 0.0, 0.0)
        scores = scores.masked_fill(~seen, 0.0)
        p, z = truth["weights"][n, :, :sq, :sk], 1.0
        if case["dropout"]:
            z = kept(case, n, sq, sk)
        dout = t.get("dout", torch.zeros(h, sq, v.shape[-1], dtype=torch.float64))
        dp = z * (dout @ v.transpose(1, 2))
        if given.get("dweights") is not None:
            dp = dp + given["dweights"][n, :, :sq, :sk].double().abs()
        first = rows_of(case, n)[0][0]
        own = slice(first, first + sq)
        through = p.new_zeros(h, sq)
        if given.get("dlse") is not None:
            dlse = given["dlse"].double().abs().nan_to_num(0.0)
            through = dlse[:, own] if packed else dlse[n, :, :sq]
        for tier in (0, 1):
            # Every weight of a row is off by as much as the sum that it is divided by.
            most = scores.amax(-1, keepdim=True) if sk else scores.new_zeros(h, sq, 1)
            weights = p * (1 + scores + most) if tier else p
            d = (weights * dp).sum(-1) + through * (1 + most[..., 0] if tier else 1)
            ds = (
                weights * dp + weights * d[..., None]
                if tier == 0
                else weights * dp + p * d[..., None] + weights * (p * dp).sum(-1, keepdim=True)
            )
            scale = abs(case["scale_used"])
            found = {
                "o": (z * weights) @ v,
                "lse": 1 + most,
                "weights": weights,
                "dq": scale * ds @ k,
                "dk": scale * (ds.transpose(1, 2) @ t["q"]).unflatten(0, (-1, group)).sum(1),
                "dv": ((z * weights).transpose(1, 2) @ dout).unflatten(0, (-1, group)).sum(1),
            }
            for name, terms in found.items():
                if terms.numel():
                    largest[name][tier] = max(largest[name][tier], terms.max().item())
            dbias[tier, n, :, :sq, :sk] = ds
            if given.get("sinks") is not None:
                sinks = given["sinks"].double()[:, None]
                its = torch.exp(sinks - (truth["lse"][:, own] if packed else truth["lse"][n, :, :sq]))
                dsinks[tier] += (its * d * (1 + most[..., 0] + sinks.abs() if tier else 1)).sum(-1)
    largest["dsinks"] = dsinks.amax(-1).tolist()
    return largest | {"dbias": dbias}


def norm_linear_by_formula(case, given, dtype, rng=None):
    """Every result and gradient by name, in `dtype`; the order of the sums over k by rng."""
    leaves = {name: given[name].to(dtype).detach().requires_grad_() for name in ("x", "w", "gamma", "beta", "bias")}
    order = torch.randperm(case["k"], generator=rng) if rng else torch.arange(case["k"])
    x, w, gamma, beta = (leaves[name][..., order] for name in ("x", "w", "gamma", "beta"))
    mean = x.mean(-1, keepdim=True) if case["norm"] == 0 else x.new_zeros(case["m"], 1)
    rstd = 1 / torch.sqrt(((x - mean) ** 2).mean(-1, keepdim=True) + case["eps_used"])
    if case["norm"] == 2:
        rstd = torch.ones_like(rstd)
    y = ((x - mean) * rstd * gamma + beta) @ w.T + leaves["bias"]
    grads = torch.autograd.grad((y * given["dy"].to(dtype)).sum(), list(leaves.values()))
    found = {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    found |= {"y": y, "mean": mean[:, 0], "rstd": rstd[:, 0]}
    return {name: value.detach() for name, value in found.items()}


def terms_of_norm_linear(case, given, truth):
    """As terms_of_attention: sums of magnitudes, and those that sums kept in float32 are relative to."""
    t = {name: value.double().abs() for name, value in given.items()}
    rstd, mean = truth["rstd"][:, None], truth["mean"][:, None]
    xhat = (given["x"].double() - mean).abs() * rstd
    size = (t["x"] + mean.abs()) * rstd  # the terms that x - mean is made of
    g = (t["dy"] @ t["w"]) * t["gamma"]

    def of(each, other):
        z, across = each * t["gamma"] + t["beta"], (g * other).mean(-1, keepdim=True)
        means = g.mean(-1, keepdim=True) if case["norm"] == 0 else 0.0
        of_dx = rstd * (g + means + each * across) + rstd * other * (g * each).mean(-1, keepdim=True)
        found = {
            "y": z @ t["w"].T + t["bias"],
            "mean": t["x"].mean(-1),
            "rstd": truth["rstd"] * (1 + size.max(-1).values ** 2 / case["k"]),
            "dx": g if case["norm"] == 2 else of_dx,
            "dw": t["dy"].T @ z,
            "dbias": t["dy"].sum(0),
            "dgamma": ((t["dy"] @ t["w"]) * each).sum(0),
            "dbeta": (t["dy"] @ t["w"]).sum(0),
        }
        return {name: terms.max().item() if terms.numel() else 0.0 for name, terms in found.items()}

    first, second = of(xhat, xhat), of(size, size)
    return {name: (first[name], second[name]) for name in first}
