# SPDX-License-Identifier: Apache-2.0
"""heddle's C interface on torch's tensors, on the CPU or a GPU, by ctypes: for measuring the library itself, without the
Python package.

Outputs and workspaces are allocated once, before anything is timed, as a caller in C would.
"""
import ctypes
import os
import pathlib
import shutil
import tempfile

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
DEVICES = {"cpu": 0, "cuda": 2}
MASKS = {False: 0, True: 1, "top left": 1, "bottom right": 2}
LAYER_NORM, RMS_NORM, NO_NORM = range(3)
FEATURES = {name: 1 << bit for bit, name in enumerate((
    "window", "alibi", "bias", "bool_mask", "sinks", "varlen", "seqlens", "weights", "rng_state", "deterministic", "tf32",
    "accumulate", "pages", "segments", "blocks"))}
BROADCAST = -1 << 63
ACTIVATIONS = {None: 0, "gelu": 1, "gelu_tanh": 2, "silu": 3, "geglu": 4, "geglu_tanh": 5, "swiglu": 6}
FORWARD, BACKWARD = 0, 1
I64, F64, U64, PTR = ctypes.c_int64, ctypes.c_double, ctypes.c_uint64, ctypes.c_void_p


class Strides(ctypes.Structure):
    _fields_ = [("b", I64), ("h", I64), ("s", I64)]


class Attention(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("dtype", ctypes.c_int), ("device", ctypes.c_int), ("b", I64), ("h", I64),
                ("hk", I64), ("sq", I64), ("sk", I64), ("d", I64), ("dv", I64), ("mask", ctypes.c_int),
                ("block_q", ctypes.c_uint8), ("block_k", ctypes.c_uint8), ("blocks_of_b", ctypes.c_uint8),
                ("blocks_of_h", ctypes.c_uint8), ("features", U64), ("window_left", I64), ("window_right", I64),
                ("scale", F64), ("softcap", F64), ("dropout", F64), ("seed", U64), ("offset", U64), ("total_q", I64),
                ("total_k", I64)] + [(s + "_stride", Strides) for s in (
                    "q", "k", "v", "o", "do", "dq", "dk", "dv", "bias", "bool_mask", "dbias", "weights", "dweights")
                ] + [(number, I64) for number in (
                    "alibi_stride_b", "q_offset", "k_offset", "h_offset", "whole_sq", "whole_sk", "whole_h", "page",
                    "pages", "table")]


class AttentionData(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t)] + [(p, PTR) for p in (
        "q", "k", "v", "alibi_slopes", "bias", "bool_mask", "sinks", "cu_seqlens_q", "cu_seqlens_k", "seqlens_q",
        "seqlens_k", "rng_state", "o", "lse", "weights", "dout", "dlse", "dweights", "dq", "dk", "dv", "dbias",
        "dsinks", "block_table", "q_segments", "k_segments", "block_rows", "block_columns")]


def data_size(t):
    """A library that is older than segments and blocks takes what ends in front of them, and so does this one."""
    newer = "q_segments" in t or "block_rows" in t
    return ctypes.sizeof(AttentionData) if newer else AttentionData.q_segments.offset


class NormLinear(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("dtype", ctypes.c_int), ("device", ctypes.c_int), ("norm", ctypes.c_int),
                ("reserved0", ctypes.c_int32), ("features", U64), ("m", I64), ("k", I64), ("n", I64), ("eps", F64)
                ] + [(s + "_stride", I64) for s in ("x", "w", "y", "dy", "dx", "dw")] + [
                    ("activation", ctypes.c_int), ("reserved1", ctypes.c_int32), ("u_stride", I64), ("residual_stride", I64),
                    ("z_stride", I64), ("dz_stride", I64), ("prepared_bytes", I64)]


class NormLinearData(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t)] + [(p, PTR) for p in (
        "x", "gamma", "beta", "w", "bias", "y", "mean", "rstd", "dy", "dx", "dgamma", "dbeta", "dw", "dbias", "u",
        "residual", "z", "dz", "prepared")]


class Job:
    """A forward and a backward call, ready to be made any number of times, and the tensors they write."""

    def __init__(self, library, op, desc, data, tensors, passes):
        self.tensors = tensors
        self.library, self.desc, self.data = library, desc, data
        self.kernels, self.workspaces = [], []
        device = next(iter(tensors.values())).device
        calls = []
        for which in passes:
            size = ctypes.c_size_t()
            library.check(getattr(library.c, f"heddle_{op}_workspace")(ctypes.byref(desc), which, ctypes.byref(size)))
            space = torch.empty(size.value + 64, dtype=torch.uint8, device=device)
            base = (space.data_ptr() + 63) // 64 * 64
            run = getattr(library.c, f"heddle_{op}_{'backward' if which else 'forward'}")
            tensors[f"workspace{which}"] = space
            self.workspaces.append(size.value)
            calls.append(self.call(run, (ctypes.byref(desc), ctypes.byref(data), PTR(base), size), device))
            name = ctypes.create_string_buffer(128)
            library.check(getattr(library.c, f"heddle_{op}_kernel")(ctypes.byref(desc), which, name, 128))
            self.kernels.append(name.value.decode())
        self.forward = calls[0]
        self.backward = calls[1] if len(calls) > 1 else None

    def call(self, run, arguments, device):
        check = self.library.check
        current = torch.cuda.current_stream if device.type == "cuda" else None

        def it():
            status = run(*arguments, PTR(current().cuda_stream) if current else None)
            if status:
                check(status)
        return it


def strides_of(x):
    """Of a [b, h, s, last] tensor, with 0 where it is expanded."""
    b, h, rows = x.stride()[:3]
    return Strides(b, h, rows) if b or h or rows else Strides(BROADCAST, 0, 0)


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

    def attention(self, q, k, v, dout=None, causal=False, strides=None, out=None, window=None, scale=0.0, softcap=0.0,
                  dropout=0.0, dbias=None, weights=False, deterministic=False, tf32=False, block=None, **inputs):
        """q [b, h, sq, d], k and v [b, hk, sk, d], as they lie (or as `strides` says, a Strides for each that does not lie
        as it is). inputs: alibi_slopes, bias, bool_mask, sinks, seqlens_q, seqlens_k, dlse; dbias: the tensor to write, of
        bias's broadcast shape. With block_table k and v are pages, [pages, hk, page, ...]."""
        b, h, sq, d = q.shape
        sk, dv = k.shape[2], v.shape[3]
        if "block_table" in inputs:
            sk *= inputs["block_table"].shape[1]
        like_q = out if out is not None else torch.empty(b, h, sq, dv, dtype=q.dtype, device=q.device)
        t = {"q": q, "k": k, "v": v, "o": like_q, "lse": torch.empty(b, h, sq, device=q.device), **inputs}
        if dout is not None:
            t["dout"] = dout
            t.update({"d" + n: torch.empty_strided(t[n].shape, t[n].stride(), dtype=q.dtype, device=q.device) for n in "qkv"})
            if dbias is not None:
                t["dbias"] = dbias
            if "sinks" in t:
                t["dsinks"] = torch.empty_like(t["sinks"])
        if weights:
            t["weights"] = torch.empty(b, h, sq, sk, dtype=q.dtype, device=q.device)
            t["dweights"] = torch.randn_like(t["weights"])
        flags = {"window": window, "alibi": "alibi_slopes" in t, "bias": "bias" in t, "bool_mask": "bool_mask" in t,
                 "sinks": "sinks" in t, "seqlens": "seqlens_q" in t or "seqlens_k" in t, "weights": weights,
                 "deterministic": deterministic, "tf32": tf32, "pages": "block_table" in t,
                 "segments": "q_segments" in t, "blocks": "block_rows" in t}
        desc = Attention(size=ctypes.sizeof(Attention), dtype=DTYPES[q.dtype], device=DEVICES[q.device.type], b=b, h=h,
                         hk=k.shape[1], sq=sq, sk=sk, d=d, dv=dv, mask=MASKS[causal], scale=scale, softcap=softcap,
                         dropout=dropout, seed=1, features=sum(FEATURES[n] for n, on in flags.items() if on))
        if "block_rows" in t:
            desc.block_q, desc.block_k = block
            desc.blocks_of_b, desc.blocks_of_h = (n > 1 for n in t["block_rows"].shape[:2])
        if window:
            desc.window_left, desc.window_right = window
        if "block_table" in t:
            desc.pages, desc.page, desc.table = k.shape[0], k.shape[2], t["block_table"].shape[1]
        if flags["alibi"] and t["alibi_slopes"].dim() == 2:
            desc.alibi_stride_b = h
        lying = {n: strides_of(x) for n, x in t.items() if x.dim() == 4}
        lying["do"] = lying.pop("dout", Strides())
        for field, stride in {**lying, **(strides or {})}.items():
            setattr(desc, field + "_stride", stride)
        data = AttentionData(size=data_size(t), **{n: x.data_ptr() for n, x in t.items()})
        return Job(self, "attention", desc, data, t, (FORWARD, BACKWARD) if dout is not None else (FORWARD,))

    def attention_varlen(self, q, k, v, dout, lengths, causal=False):
        """q, k, v, dout [total, h, d]: packed sequences of these lengths."""
        total, h, d = q.shape
        starts = torch.tensor([0] + lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(q.device)
        t = {"q": q, "k": k, "v": v, "dout": dout, "o": torch.empty_like(q), "lse": torch.empty(h, total, device=q.device),
             "cu_seqlens_q": starts, "cu_seqlens_k": starts}
        t.update({"d" + n: torch.empty_like(t[n]) for n in "qkv"})
        desc = Attention(size=ctypes.sizeof(Attention), dtype=DTYPES[q.dtype], device=DEVICES[q.device.type],
                         b=len(lengths), h=h, hk=k.shape[1], sq=max(lengths), sk=max(lengths), d=d, total_q=total,
                         total_k=total, mask=MASKS[causal], features=FEATURES["varlen"])
        data = AttentionData(size=data_size(t), **{n: x.data_ptr() for n, x in t.items()})
        return Job(self, "attention", desc, data, t, (FORWARD, BACKWARD))

    def norm_linear(self, x, gamma, beta, w, bias, dy=None, tf32=False, activation=None, norm=LAYER_NORM,
                    residual=None, dz=None, prepared=False):
        m, k = x.shape
        n = w.shape[0] // (2 if ACTIVATIONS[activation] >= ACTIVATIONS["geglu"] else 1)
        numbers = dict(dtype=torch.float32, device=x.device)
        t = {"x": x, "w": w, "bias": bias, "y": x.new_empty(m, n)}
        if residual is not None:
            t["residual"] = residual
        if dz is not None:
            t.update(z=torch.empty_like(x), dz=dz)
        if norm != NO_NORM:
            t.update(gamma=gamma, beta=beta, mean=torch.empty(m, **numbers), rstd=torch.empty(m, **numbers))
        if dy is not None:
            t["dy"] = dy
            t.update({"d" + n: torch.empty_like(t[n]) for n in ("x", "gamma", "beta", "w", "bias") if n in t})
            if activation:
                t["u"] = x.new_empty(m, w.shape[0])
        # A library that is older than residuals, z or what is prepared takes what ends in front of them, and so does this one.
        sizes = [(NormLinear.residual_stride.offset, NormLinearData.residual.offset),
                 (NormLinear.z_stride.offset, NormLinearData.z.offset),
                 (NormLinear.prepared_bytes.offset, NormLinearData.prepared.offset),
                 (ctypes.sizeof(NormLinear), ctypes.sizeof(NormLinearData))][
                     3 if prepared else 2 if dz is not None else residual is not None]
        desc = NormLinear(size=sizes[0], dtype=DTYPES[x.dtype], device=DEVICES[x.device.type], norm=norm,
                          m=m, k=k, n=n, activation=ACTIVATIONS[activation],
                          features=(FEATURES["tf32"] if tf32 else 0) | (1 << 32 if activation else 0) |
                          (1 << 33 if residual is not None else 0) | (1 << 34 if dz is not None else 0))
        data = NormLinearData(size=sizes[1], **{n: x.data_ptr() for n, x in t.items()})
        if prepared:
            self.prepare(desc, data, t)
        return Job(self, "norm_linear", desc, data, t, (FORWARD, BACKWARD) if dy is not None else (FORWARD,))

    def prepare(self, desc, data, t):
        """What forward makes of the weight, once; from now on it is there."""
        size, device = ctypes.c_size_t(), t["w"].device
        self.check(self.c.heddle_norm_linear_prepared_size(ctypes.byref(desc), ctypes.byref(size)))
        t["prepared"] = torch.empty(size.value + 64, dtype=torch.uint8, device=device)
        base = (t["prepared"].data_ptr() + 63) // 64 * 64
        stream = PTR(torch.cuda.current_stream().cuda_stream) if device.type == "cuda" else None
        self.check(self.c.heddle_norm_linear_prepare(ctypes.byref(desc), ctypes.byref(data), PTR(base), size, stream))
        desc.features |= 1 << 35
        desc.prepared_bytes, data.prepared = size.value, base if size.value else None
