# SPDX-License-Identifier: Apache-2.0
"""heddle's C interface on torch's CPU tensors, by ctypes: for measuring the library itself, without the Python package.

Outputs and workspaces are allocated once, before anything is timed, as a caller in C would.
"""
import ctypes
import os
import pathlib
import shutil
import tempfile

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CAUSAL_TOP_LEFT = 1
VARLEN = 1 << 5
FORWARD, BACKWARD = 0, 1
I64, F64, U64, PTR = ctypes.c_int64, ctypes.c_double, ctypes.c_uint64, ctypes.c_void_p


class Strides(ctypes.Structure):
    _fields_ = [("b", I64), ("h", I64), ("s", I64)]


class Attention(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("dtype", ctypes.c_int), ("device", ctypes.c_int), ("b", I64), ("h", I64),
                ("hk", I64), ("sq", I64), ("sk", I64), ("d", I64), ("dv", I64), ("mask", ctypes.c_int),
                ("reserved0", ctypes.c_int32), ("features", U64), ("window_left", I64), ("window_right", I64),
                ("scale", F64), ("softcap", F64), ("dropout", F64), ("seed", U64), ("offset", U64), ("total_q", I64),
                ("total_k", I64)] + [(s + "_stride", Strides) for s in (
                    "q", "k", "v", "o", "do", "dq", "dk", "dv", "bias", "bool_mask", "dbias", "weights", "dweights")
                ] + [("alibi_stride_b", I64)]


class AttentionData(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t)] + [(p, PTR) for p in (
        "q", "k", "v", "alibi_slopes", "bias", "bool_mask", "sinks", "cu_seqlens_q", "cu_seqlens_k", "seqlens_q",
        "seqlens_k", "rng_state", "o", "lse", "weights", "dout", "dlse", "dweights", "dq", "dk", "dv", "dbias",
        "dsinks")]


class NormLinear(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("dtype", ctypes.c_int), ("device", ctypes.c_int), ("norm", ctypes.c_int),
                ("reserved0", ctypes.c_int32), ("features", U64), ("m", I64), ("k", I64), ("n", I64), ("eps", F64)
                ] + [(s + "_stride", I64) for s in ("x", "w", "y", "dy", "dx", "dw")]


class NormLinearData(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t)] + [(p, PTR) for p in (
        "x", "gamma", "beta", "w", "bias", "y", "mean", "rstd", "dy", "dx", "dgamma", "dbeta", "dw", "dbias")]


class Job:
    """A forward and a backward call, ready to be made any number of times, and the tensors they write."""

    def __init__(self, library, op, desc, data, tensors, passes):
        self.tensors = tensors
        self.library, self.desc, self.data = library, desc, data
        self.kernels = []
        calls = []
        for which in passes:
            size = ctypes.c_size_t()
            library.check(getattr(library.c, f"heddle_{op}_workspace")(ctypes.byref(desc), which, ctypes.byref(size)))
            space = torch.empty(size.value + 64, dtype=torch.uint8)
            base = (space.data_ptr() + 63) // 64 * 64
            run = getattr(library.c, f"heddle_{op}_{'backward' if which else 'forward'}")
            tensors[f"workspace{which}"] = space
            arguments = (ctypes.byref(desc), ctypes.byref(data), PTR(base), size, None)
            calls.append(self.call(run, arguments))
            name = ctypes.create_string_buffer(128)
            library.check(getattr(library.c, f"heddle_{op}_kernel")(ctypes.byref(desc), which, name, 128))
            self.kernels.append(name.value.decode())
        self.forward = calls[0]
        self.backward = calls[1] if len(calls) > 1 else None

    def call(self, run, arguments):
        check = self.library.check

        def it():
            status = run(*arguments)
            if status:
                check(status)
        return it


class Library:
    """libheddle; with `isa` a copy of its own that is forced to that instruction set, so that both fit in a process."""

    def __init__(self, path, isa=None):
        path = pathlib.Path(path).resolve()
        before = os.environ.get("HEDDLE_CPU")
        if isa:
            self.directory = tempfile.TemporaryDirectory()
            path = shutil.copy(path, pathlib.Path(self.directory.name) / f"libheddle-{isa}.so")
            os.environ["HEDDLE_CPU"] = isa
        self.c = ctypes.CDLL(str(path))
        for name in ("last_message", "cpu_isa", "version_string", "cpu_isa_available"):
            getattr(self.c, "heddle_" + name).restype = ctypes.c_char_p
        self.isa = self.c.heddle_cpu_isa().decode()
        if isa:
            if before is None:
                del os.environ["HEDDLE_CPU"]
            else:
                os.environ["HEDDLE_CPU"] = before

    def isas(self):
        names, i = [], 0
        while (name := self.c.heddle_cpu_isa_available(i)):
            names.append(name.decode())
            i += 1
        return names

    def check(self, status):
        if status:
            raise RuntimeError(f"heddle: status {status}: {self.c.heddle_last_message().decode()}")

    def attention(self, q, k, v, dout=None, causal=False, strides=None, out=None):
        """q [b, h, sq, d], k and v [b, hk, sk, d]: contiguous, or as `strides` says, a Strides for each that is not."""
        b, h, sq, d = q.shape
        like_q = out if out is not None else torch.empty(b, h, sq, v.shape[-1], dtype=q.dtype)
        t = {"q": q, "k": k, "v": v, "o": like_q, "lse": torch.empty(b, h, sq)}
        if dout is not None:
            t["dout"] = dout
            t.update({"d" + n: torch.empty_strided(t[n].shape, t[n].stride(), dtype=q.dtype) for n in "qkv"})
        desc = Attention(size=ctypes.sizeof(Attention), dtype=DTYPES[q.dtype], b=b, h=h, hk=k.shape[1], sq=sq,
                         sk=k.shape[2], d=d, dv=v.shape[-1], mask=CAUSAL_TOP_LEFT if causal else 0)
        for field, stride in (strides or {}).items():
            setattr(desc, field + "_stride", stride)
        data = AttentionData(size=ctypes.sizeof(AttentionData), **{n: x.data_ptr() for n, x in t.items()})
        return Job(self, "attention", desc, data, t, (FORWARD, BACKWARD) if dout is not None else (FORWARD,))

    def attention_varlen(self, q, k, v, dout, lengths):
        """q, k, v, dout [total, h, d]: packed sequences of these lengths."""
        total, h, d = q.shape
        starts = torch.tensor([0] + lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        t = {"q": q, "k": k, "v": v, "dout": dout, "o": torch.empty_like(q), "lse": torch.empty(h, total),
             "cu_seqlens_q": starts, "cu_seqlens_k": starts}
        t.update({"d" + n: torch.empty_like(q) for n in "qkv"})
        desc = Attention(size=ctypes.sizeof(Attention), dtype=DTYPES[q.dtype], b=len(lengths), h=h, hk=h,
                         sq=max(lengths), sk=max(lengths), d=d, total_q=total, total_k=total, features=VARLEN)
        data = AttentionData(size=ctypes.sizeof(AttentionData), **{n: x.data_ptr() for n, x in t.items()})
        return Job(self, "attention", desc, data, t, (FORWARD, BACKWARD))

    def norm_linear(self, x, gamma, beta, w, bias, dy=None):
        m, k = x.shape
        t = {"x": x, "gamma": gamma, "beta": beta, "w": w, "bias": bias, "y": x.new_empty(m, w.shape[0]),
             "mean": torch.empty(m), "rstd": torch.empty(m)}
        if dy is not None:
            t["dy"] = dy
            t.update({"d" + n: torch.empty_like(t[n]) for n in ("x", "gamma", "beta", "w", "bias")})
        desc = NormLinear(size=ctypes.sizeof(NormLinear), dtype=DTYPES[x.dtype], m=m, k=k, n=w.shape[0])
        data = NormLinearData(size=ctypes.sizeof(NormLinearData), **{n: x.data_ptr() for n, x in t.items()})
        return Job(self, "norm_linear", desc, data, t, (FORWARD, BACKWARD) if dy is not None else (FORWARD,))
