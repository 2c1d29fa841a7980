# SPDX-License-Identifier: Apache-2.0
"""An oracle that shares nothing with src/ref: the formulas of include/heddle.h in PyTorch's float64, with autograd.

Random problems with several options at once go through the C API itself. Every tensor lies against a page that nobody
may touch (on a GPU: between margins of poison), its gaps hold NaN, and what may not be written is compared afterwards.

HEDDLE_ORACLE_CASES=n takes n problems of each operation (HEDDLE_LONG=1: 4000), HEDDLE_SEED=n begins at another one; a
failure names its seed, and HEDDLE_SEED=that with HEDDLE_ORACLE_CASES=1 repeats it.
"""

from __future__ import annotations

import ctypes
import math
import os
import random
import sys
from collections import Counter

import pytest
import torch
from conftest import devices
from oracle import (
    BF16,
    BOTTOM_RIGHT,
    CPU,
    CUDA,
    DTYPES,
    F16,
    F32,
    F64,
    FEATURE,
    NONE,
    REF,
    TOP_LEFT,
    Attention,
    AttentionData,
    Memory,
    NormLinear,
    NormLinearData,
    Placed,
    all_of_attention,
    any_strides,
    as_strides,
    assert_right,
    call,
    contiguous,
    norm_linear_by_formula,
    terms_of_attention,
    terms_of_norm_linear,
)

LONG = os.environ.get("HEDDLE_LONG", "0") not in ("", "0")
CASES = int(os.environ.get("HEDDLE_ORACLE_CASES", 4000 if LONG else 240))
SEED = int(os.environ.get("HEDDLE_SEED", 1))
CHUNKS = min(CASES, 12)

# -------------------------------------------------------------------------------------------------- random problems

OPTIONS = [
    "mask",
    "window",
    "scale",
    "softcap",
    "alibi",
    "bias",
    "bool_mask",
    "sinks",
    "dropout",
    "varlen",
    "seqlens",
    "weights",
    "dlse",
    "dweights",
    "layout",
    "part",
]
PLACES = ("q_offset", "k_offset", "h_offset", "whole_sq", "whole_sk", "whole_h")


def random_case(seed, device):
    """Sizes and numbers of a problem: two to five options at once."""
    rng = random.Random(seed)
    chosen = set(rng.sample(OPTIONS, rng.randint(2, 5)))
    chosen -= {"seqlens"} if "varlen" in chosen else set()
    hk, group = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 4, 5))
    longest = 150 if rng.random() < 0.15 else 40

    def length():
        return 0 if rng.random() < 0.03 else rng.choice((1, 1, 2, rng.randint(1, longest), rng.randint(1, longest)))

    case = {
        "dtype": rng.choice((F32, F32, BF16, F16) + ((F64,) if device == "cpu" else ())),
        "b": rng.randint(1, 3),
        "h": hk * group,
        "hk": hk,
        "sq": length(),
        "sk": length(),
        "d": rng.choice((1, 3, 8, 16, 32, 40, 64, rng.randint(1, 130))),
    }
    case["dv"] = case["d"] if rng.random() < 0.7 else rng.randint(1, 100)
    case["mask"] = rng.choice((TOP_LEFT, BOTTOM_RIGHT)) if "mask" in chosen else NONE
    case["window"] = (rng.randint(-1, 20), rng.randint(-1, 20)) if "window" in chosen else None
    case["scale"] = rng.choice((0.05, 0.5, -0.3, 1.0)) if "scale" in chosen else 0.0
    case["scale_used"] = case["scale"] or 1 / math.sqrt(case["d"])
    case["softcap"] = rng.choice((0.5, 3.0, 30.0)) if "softcap" in chosen else 0.0
    case["dropout"] = rng.choice((0.1, 0.5, 0.9)) if "dropout" in chosen else 0.0
    case["seed"], case["offset"] = rng.getrandbits(64), rng.getrandbits(64)
    case["rng_state"] = "dropout" in chosen and rng.random() < 0.5
    case["cu_q"] = case["cu_k"] = case["seqlens_q"] = case["seqlens_k"] = None
    if "varlen" in chosen:
        for name, limit in (("cu_q", case["sq"]), ("cu_k", case["sk"])):
            cu = [rng.choice((0, 0, 2))]
            for _ in range(case["b"]):
                cu.append(cu[-1] + rng.randint(0, limit))
            case[name], case["total" + name[2:]] = cu, cu[-1] + rng.choice((0, 0, 3))
    if "seqlens" in chosen:
        which = rng.choice((("q",), ("k",), ("q", "k")))
        for name in which:
            case[f"seqlens_{name}"] = [rng.randint(0, case[f"s{name}"]) for _ in range(case["b"])]
    case |= dict.fromkeys(PLACES, 0)
    if "part" in chosen and device == "cpu":
        case["q_offset"], case["k_offset"] = rng.randint(0, 60), rng.randint(0, 60)
        if not chosen & {"varlen", "seqlens"}:
            for name in "qk":
                end = case[f"{name}_offset"] + case[f"s{name}"]
                case[f"whole_s{name}"] = rng.choice((0, end, end + rng.randint(1, 50)))
        if rng.random() < 0.5:
            case["h_offset"], case["whole_h"] = rng.randint(0, 9), case["h"] + rng.randint(0, 3)
    case["wants"] = {
        name for name in chosen if name in ("weights", "dlse", "dweights", "alibi", "bias", "bool_mask", "sinks")
    }
    case["layout"] = "layout" in chosen
    case["no_dout"] = "dlse" in chosen and rng.random() < 0.1
    case["amplitude"] = rng.choice((0.3, 1.0, 1.0, 3.0))
    return case, rng


def fill(placed, generator, dtype, amplitude=1.0):
    """Random numbers of a tensor; they are made on the CPU."""
    view = placed.tensor
    if view.numel():
        view = view[tuple(slice(0, None if stride else 1) for stride in view.stride())]  # once where it repeats
        values = (torch.randn(view.shape, generator=generator, dtype=torch.float64) * amplitude).to(dtype)
        view.copy_(values)
    return placed


class Problem:
    """A case with its tensors in guarded memory."""

    def __init__(self, case, rng, device):
        self.case, self.rng, self.device = case, rng, device
        self.memory = Memory(rng, device)
        self.generator = torch.Generator().manual_seed(rng.getrandbits(62))
        self.dtype = DTYPES[case["dtype"]]
        self.real = torch.float64 if case["dtype"] == F64 else torch.float32
        self.packed = case["cu_q"] is not None
        self.placed, self.data = {}, AttentionData(size=ctypes.sizeof(AttentionData))
        where = REF if case["dtype"] == F64 else CUDA if device == "cuda" else CPU
        self.desc = Attention(size=ctypes.sizeof(Attention), dtype=case["dtype"], device=where)
        for name in ("b", "h", "hk", "sq", "sk", "d", "dv", "mask", "scale", "softcap", "dropout", *PLACES):
            setattr(self.desc, name, case[name])
        self.features = 0
        self._lengths()
        self._inputs()
        self._options()

    def put(self, name, shape, dtype, strides=None, fill_with=None):
        placed = Placed(*self.memory.tensor(shape, strides or contiguous(shape), dtype))
        self.placed[name] = placed
        if fill_with is not None:
            placed.tensor.copy_(
                torch.as_tensor(fill_with).to(dtype).reshape(shape) if placed.tensor.numel() else placed.tensor
            )
        setattr(self.data, name, placed.room.pointer())
        return placed

    def any_strides(self, shape, repeats=False):
        return any_strides(self.rng, shape, repeats) if self.case["layout"] else contiguous(shape)

    def shape(self, heads, rows, total, last):
        return [total, heads, last] if self.packed else [self.case["b"], heads, rows, last]

    def large(self, name, desc_name, shape, filled, repeats=False, amplitude=1.0):
        """One of the tensors that have strides in the description."""
        strides = self.any_strides(shape, repeats)
        placed = self.put(name, shape, self.dtype, strides)
        setattr(self.desc, f"{desc_name}_stride", as_strides(strides, self.packed and len(shape) == 3))
        return fill(placed, self.generator, self.dtype, amplitude) if filled else placed

    def _lengths(self):
        case = self.case
        if self.packed:
            self.features |= FEATURE["VARLEN"]
            self.desc.total_q, self.desc.total_k = case["total_q"], case["total_k"]
            for name in ("q", "k"):
                self.put(f"cu_seqlens_{name}", [case["b"] + 1], torch.int32, None, case[f"cu_{name}"])
        for name in ("seqlens_q", "seqlens_k"):
            if case[name] is not None:
                self.features |= FEATURE["SEQLENS"]
                self.put(name, [case["b"]], torch.int32, None, case[name])

    def _inputs(self):
        case = self.case
        self.shapes = {
            "q": self.shape(case["h"], case["sq"], case.get("total_q"), case["d"]),
            "k": self.shape(case["hk"], case["sk"], case.get("total_k"), case["d"]),
            "v": self.shape(case["hk"], case["sk"], case.get("total_k"), case["dv"]),
            "o": self.shape(case["h"], case["sq"], case.get("total_q"), case["dv"]),
            "square": [case["b"], case["h"], case["sq"], case["sk"]],
            "rows": [case["h"], case["total_q"]] if self.packed else [case["b"], case["h"], case["sq"]],
        }
        for name in ("q", "k", "v"):
            self.large(name, name, self.shapes[name], True, True, case["amplitude"])
        self._spoil_rows_that_do_not_count()

    def _spoil_rows_that_do_not_count(self):
        """NaN where no formula looks: rows behind a sequence's end."""
        case = self.case
        for name, cu, some in (("q", "cu_q", "seqlens_q"), ("k", "cu_k", "seqlens_k"), ("v", "cu_k", "seqlens_k")):
            view = self.placed[name].tensor
            if 0 in view.stride():
                continue
            if self.packed:
                view[: case[cu][0]] = math.nan
                view[case[cu][-1] :] = math.nan
            elif case[some] is not None:
                for n, rows in enumerate(case[some]):
                    view[n, :, rows:] = math.nan

    def _square(self, name, dtype, values):
        """bias or bool_mask: [b or 1, h or 1, sq or 1, sk], with strides of 0 where it repeats."""
        shape = [n if x == 3 or self.rng.random() < 0.6 else 1 for x, n in enumerate(self.shapes["square"])]
        strides = self.any_strides(shape)
        placed = self.put(name, shape, dtype, strides)
        if placed.tensor.numel():
            placed.tensor.copy_(values(shape).to(dtype))
        used = [0 if n == 1 else stride for n, stride in zip(shape, strides, strict=True)]
        setattr(self.desc, f"{name}_stride", as_strides(used))
        self.case[name] = placed.tensor.cpu().clone().expand(self.shapes["square"])
        return shape

    def _options(self):
        case, wants = self.case, self.case["wants"]
        case["bias"] = case["bool_mask"] = case["slopes"] = case["sinks"] = None
        if case["window"]:
            self.features |= FEATURE["WINDOW"]
            self.desc.window_left, self.desc.window_right = case["window"]
        if "bias" in wants:
            self.features |= FEATURE["BIAS"]

            def values(shape):
                made = torch.randn(shape, generator=self.generator)
                drawn = torch.rand(shape, generator=self.generator)
                return made.masked_fill(drawn < 0.1, -math.inf).masked_fill(drawn > 0.95, -100.0)

            self.bias_shape = self._square("bias", self.dtype, values)
        if "bool_mask" in wants:
            self.features |= FEATURE["BOOL_MASK"]
            self._square("bool_mask", torch.bool, lambda shape: torch.rand(shape, generator=self.generator) < 0.7)
        if "alibi" in wants:
            self.features |= FEATURE["ALIBI"]
            shape = self.rng.choice(([case["h"]], [case["b"], case["h"]]))
            self.put("alibi_slopes", shape, self.real, None, torch.rand(shape, generator=self.generator) / 4)
            self.desc.alibi_stride_b = case["h"] if len(shape) == 2 else 0
            case["slopes"] = self.placed["alibi_slopes"].tensor.cpu().clone()
        if "sinks" in wants:
            self.features |= FEATURE["SINKS"]
            self.put("sinks", [case["h"]], self.real, None, torch.randn(case["h"], generator=self.generator))
            case["sinks"] = self.placed["sinks"].tensor.cpu().clone()
        if "weights" in wants or "dweights" in wants:
            self.features |= FEATURE["WEIGHTS"]
        if case["rng_state"]:
            self.features |= FEATURE["RNG_STATE"]
            signed = [x - 2**64 if x >= 2**63 else x for x in (case["seed"], case["offset"])]
            self.put("rng_state", [2], torch.int64, None, signed)
        else:
            self.desc.seed, self.desc.offset = case["seed"], case["offset"]
        if self.rng.random() < 0.2:
            self.features |= FEATURE["DETERMINISTIC"]
        if self.device == "cpu" and self.rng.random() < 0.1:
            self.features |= FEATURE["TF32"]
        self.desc.features = self.features

    def stream(self):
        return torch.cuda.current_stream().cuda_stream if self.device == "cuda" else None

    def forward(self):
        self.large("o", "o", self.shapes["o"], False)
        self.put("lse", self.shapes["rows"], self.real)
        if self.features & FEATURE["WEIGHTS"]:
            self.large("weights", "weights", self.shapes["square"], False)
        call("attention", 0, self.desc, self.data, self.memory, self.stream())
        return ["o", "lse"] + (["weights"] if self.features & FEATURE["WEIGHTS"] else [])

    def backward(self):
        wants, square = self.case["wants"], self.shapes["square"]
        if not self.case["no_dout"]:
            self.large("dout", "do", self.shapes["o"], True, True)
        if "dlse" in wants:
            fill(self.put("dlse", self.shapes["rows"], self.real), self.generator, self.real)
        if "dweights" in wants:
            self.large("dweights", "dweights", square, True, True)
        made = [name for name in ("dq", "dk", "dv") if self.rng.random() < 0.9]
        for name in made:
            self.large(name, name, self.shapes[name[1:]], False)
        if "bias" in wants and self.rng.random() < 0.9:
            shape = self.bias_shape if self.rng.random() < 0.6 else square
            strides = self.any_strides(shape)
            self.put("dbias", shape, self.dtype, strides)
            self.desc.dbias_stride = as_strides([0 if n == 1 else s for n, s in zip(shape, strides, strict=True)])
            made.append("dbias")
        if "sinks" in wants and self.rng.random() < 0.9:
            self.put("dsinks", [self.case["h"]], self.real)
            made.append("dsinks")
        if made:
            call("attention", 1, self.desc, self.data, self.memory, self.stream())
        return made

    def given(self):
        """What the formulas are given: the values as they lie, on the CPU."""
        names = ("q", "k", "v", "sinks", "dout", "dlse", "dweights")
        given = {name: self.placed[name].tensor.cpu().clone() for name in names if name in self.placed}
        return given | {"bias": self.case["bias"], "slopes": self.case["slopes"]}


def written_rows(problem, name, value):
    """Packed rows of no sequence are not written: they have to be poison still, and the truth says 0 there."""
    if not problem.packed or name not in ("o", "lse", "dq", "dk", "dv"):
        return value
    cu = problem.case["cu_q" if name in ("o", "lse", "dq") else "cu_k"]
    rows = value.transpose(0, 1) if name == "lse" else value
    rows = rows.cpu().clone()
    for part in (rows[: cu[0]], rows[cu[-1] :]):
        assert torch.isnan(part).all(), f"{name}: rows of no sequence were written to"
        part.zero_()
    return rows.transpose(0, 1) if name == "lse" else rows


def check_attention(seed, device):
    case, rng = random_case(seed, device)
    problem = Problem(case, rng, device)
    try:
        made = problem.forward() + problem.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        given = problem.given()
        kinds = [(torch.float64, None)] + [(problem.dtype, x) for x in (None, 1, 2)]
        found = []
        for kind, order in kinds:
            real = torch.float64 if kind == torch.float64 else problem.real
            generator = torch.Generator().manual_seed(order) if order else None
            found.append(all_of_attention(case, given, kind, real, generator))
        truth = found[0]
        terms = terms_of_attention(case, given, truth)
        for name in made:
            placed = problem.placed[name]
            assert placed.gaps_are_whole(), f"{name}: something between its rows was written to"
            got = written_rows(problem, name, placed.tensor)
            wants = []
            for each in found:
                want = each.get(name, torch.zeros(got.shape, dtype=torch.float64))
                if name == "lse" and problem.packed:
                    want = want.clone()
                    cu = case["cu_q"]
                    want[:, : cu[0]] = 0.0
                    want[:, cu[-1] :] = 0.0
                for x in range(4 if name == "dbias" else 0):
                    if placed.tensor.shape[x] == 1:
                        want = want.sum(x, keepdim=True)
                wants.append(want)
            its_terms = terms[name]
            if name == "dbias":
                for x in range(4):
                    if placed.tensor.shape[x] == 1:
                        its_terms = its_terms.sum(x + 1, keepdim=True)
                its_terms = its_terms.reshape(2, -1).amax(-1).tolist() if its_terms.numel() else [0.0, 0.0]
            assert_right(name, got, wants[0], wants[1:], its_terms)
        problem.memory.check()
    finally:
        problem.memory.close()


def in_chunks(check, chunk, device):
    for seed in range(SEED + chunk, SEED + CASES, CHUNKS):
        try:
            check(seed, device)
        except AssertionError as error:
            raise AssertionError(f"HEDDLE_SEED={seed} HEDDLE_ORACLE_CASES=1: {error}") from error


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_attention(chunk, device):
    in_chunks(check_attention, chunk, device)


# ------------------------------------------------------------------------------------------------------- norm-linear


class NormProblem:
    """A norm-linear problem in guarded memory."""

    def __init__(self, seed, device):
        rng = self.rng = random.Random(seed)
        self.device, self.memory = device, Memory(rng, device)
        self.generator = torch.Generator().manual_seed(seed)
        kind = rng.choice((F32, F32, BF16, F16) + ((F64,) if device == "cpu" else ()))
        self.case = {
            "m": rng.choice((1, 2, 7, rng.randint(1, 100), rng.randint(1, 300))),
            "k": rng.choice((1, 2, 16, 64, rng.randint(1, 300))),
            "n": rng.choice((1, 8, 64, rng.randint(1, 200))),
            "norm": rng.choice((0, 0, 1, 1, 2)),
            "eps": rng.choice((0.0, 1e-6, 0.1)),
            "shift": rng.choice((0.0, 0.0, 3.0)),
        }
        self.plain = self.case["norm"] == 2
        self.case["eps"] *= not self.plain
        self.case["eps_used"] = self.case["eps"] or 1e-5
        self.dtype, self.real = DTYPES[kind], torch.float64 if kind == F64 else torch.float32
        self.data = NormLinearData(size=ctypes.sizeof(NormLinearData))
        where = REF if kind == F64 else CUDA if device == "cuda" else CPU
        self.desc = NormLinear(size=ctypes.sizeof(NormLinear), dtype=kind, device=where)
        for name in ("m", "k", "n", "norm", "eps"):
            setattr(self.desc, name, self.case[name])
        self.desc.features = FEATURE["DETERMINISTIC"] if rng.random() < 0.2 else 0
        self.placed, self.given = {}, {}

    def put(self, name, dtype=None):
        """A tensor by the letters of its shape; matrices have gaps behind their rows."""
        shapes = {"x": "mk", "dx": "mk", "w": "nk", "dw": "nk", "y": "mn", "dy": "mn", "mean": "m", "rstd": "m"}
        letters = shapes.get(name, "n" if name.endswith("bias") else "k")
        shape = [self.case[letter] for letter in letters]
        strides = contiguous(shape)
        if len(shape) == 2:
            strides[0] += self.rng.choice((0, 0, 1, 8))
            setattr(self.desc, f"{name}_stride", strides[0])
        self.placed[name] = Placed(*self.memory.tensor(shape, strides, dtype or self.dtype))
        setattr(self.data, name, self.placed[name].room.pointer())
        return self.placed[name]

    def take(self, name, default):
        """An input: there, or (what may be left out) not."""
        if default is not None and (self.rng.random() < 0.4 or (self.plain and name != "bias")):
            count = self.case["n" if name == "bias" else "k"]
            self.given[name] = torch.full((count,), default, dtype=torch.float64)
            return
        self.given[name] = fill(self.put(name), self.generator, self.dtype).tensor.cpu().clone()
        if name == "x":
            self.placed[name].tensor.add_(self.case["shift"])
            self.given[name] = self.placed[name].tensor.cpu().clone()

    def run(self):
        stream = torch.cuda.current_stream().cuda_stream if self.device == "cuda" else None
        for name, default in (("x", None), ("w", None), ("gamma", 1.0), ("beta", 0.0), ("bias", 0.0)):
            self.take(name, default)
        made = ["y"]
        self.put("y")
        if self.rng.random() < 0.7 and not self.plain:
            made += ["mean", "rstd"]
            for name in ("mean", "rstd"):
                self.put(name, self.real)
        call("norm_linear", 0, self.desc, self.data, self.memory, stream)
        self.take("dy", None)
        of_norm = () if self.plain else ("dgamma", "dbeta")
        grads = [name for name in ("dx", "dw", *of_norm, "dbias") if self.rng.random() < 0.85]
        for name in grads:
            self.put(name)
        if grads:
            call("norm_linear", 1, self.desc, self.data, self.memory, stream)
        return made + grads


def check_norm_linear(seed, device):
    problem = NormProblem(seed, device)
    try:
        made = problem.run()
        if device == "cuda":
            torch.cuda.synchronize()
        found = [
            norm_linear_by_formula(problem.case, problem.given, kind, torch.Generator().manual_seed(x) if x else None)
            for kind, x in ((torch.float64, 0), (problem.dtype, 0), (problem.dtype, 1), (problem.dtype, 2))
        ]
        terms = terms_of_norm_linear(problem.case, problem.given, found[0])
        for name in made:
            assert problem.placed[name].gaps_are_whole(), f"{name}: something between its rows was written to"
            assert_right(
                name, problem.placed[name].tensor, found[0][name], [each[name] for each in found[1:]], terms[name]
            )
        problem.memory.check()
    finally:
        problem.memory.close()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_norm_linear(chunk, device):
    in_chunks(check_norm_linear, chunk, device)


# ---------------------------------------------------------------------------------------------------------- the rule


def test_zeros_are_refused(monkeypatch):
    """A bound that is larger than the tensor checks nothing: few may be, where a sum cancels or softmax is one-hot."""
    asked, refused, judge = Counter(), Counter(), assert_right

    def with_zeros(name, got, truth, plains, terms):
        if not truth.nan_to_num(0.0).any():
            return
        asked[name] += 1
        try:
            judge(name, torch.zeros_like(got), truth, plains, terms)
        except AssertionError:
            refused[name] += 1

    monkeypatch.setattr(sys.modules[__name__], "assert_right", with_zeros)
    for seed in range(1, 61):
        check_attention(seed, "cpu")
        check_norm_linear(seed, "cpu")
    passed = {name: f"{asked[name] - refused[name]} of {n}" for name, n in asked.items() if refused[name] < 0.8 * n}
    assert len(asked) == 15 and not passed, f"zeros pass for {passed}"
