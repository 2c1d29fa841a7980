# SPDX-License-Identifier: Apache-2.0
"""``heddle.attention`` and its backward for arrays that speak DLPack: NumPy, CuPy, JAX.

Inputs are read where they lie. Results are made by the library that q (or x) comes from."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

import heddle
from heddle import _C
from heddle._block_lists import library_of
from heddle._errors import HeddleTypeError, HeddleValueError
from heddle._options import (
    PLACES,
    block_of,
    causal_of,
    flag_of,
    limit_of,
    multiprocessors_of,
    number_of,
    places_of,
    scale_of,
    state_of,
    window_of,
)
from heddle._views import CPU, CUDA, DTYPES, E4M3, Maker, View, check, contiguous, cupy_stream, device_of, real_of

BROADCAST = -(2**63)
FORWARD, BACKWARD, PREPARE = 0, 1, 2  # the last of norm-linear, whose workspace is what is prepared
_BITS = _C.features()
WINDOW, BIAS, SINKS, VARLEN = _BITS["window"], _BITS["bias"], _BITS["sinks"], _BITS["varlen"]
SEQLENS, WEIGHTS, DETERMINISTIC, TF32 = (_BITS[name] for name in ("seqlens", "weights", "deterministic", "tf32"))
PAGES, BLOCKS = _BITS["pages"], _BITS["blocks"]
# What an input of the library is called here, where it is not the same.
_OPTION_OF = {"bool_mask": "mask"}
# Where an extent is in the description, by the letter of a shape, where it is not the same.
_EXTENT_OF = {"g": "hk", "q": "sq", "k": "sk", "v": "dv"}
# The inputs of all options but the lengths, pages, lists of blocks and dropout, by their names in the library.
_OPTIONAL = {
    name: (element, shape, feature, stride)
    for name, (element, role, shape, feature, stride) in _C.fields().items()
    if role == "input" and feature not in (0, VARLEN, SEQLENS, PAGES, _BITS["rng_state"], BLOCKS)
}


def run(operation: str, which: int, description: dict[str, Any], addresses: dict[str, Any], maker: Maker) -> None:
    if description["device"] != CUDA:
        _C.run(operation, which, description, addresses)
        return
    if maker.kind != "cupy":
        _run_for_strangers(operation, which, description, addresses, maker.device_id)
        return
    cupy = sys.modules["cupy"]
    size = _C.workspace(operation, which, description)
    space = cupy.empty(size + 64, dtype="uint8")
    address = int(space.data.ptr)
    _C.run(operation, which, description, addresses, address + -address % 64, size, cupy_stream())


def write_prepared(
    description: dict[str, Any], addresses: dict[str, Any], target: int, size: int, maker: Maker
) -> None:
    """What norm-linear's forward makes of the weight, on the streams of run()."""
    what = ("norm_linear", PREPARE, description, addresses, target, size)
    if description["device"] != CUDA:
        _C.run(*what)
        return
    _C.cuda_enter(maker.device_id)
    try:
        _C.run(*what, cupy_stream())
        if maker.kind != "cupy":
            _C.cuda_wait(cupy_stream())
    finally:
        _C.cuda_leave()


def _run_for_strangers(
    operation: str, which: int, description: dict[str, Any], addresses: dict[str, Any], device_id: int
) -> None:
    """On arrays of a library whose streams we do not know (JAX): waits for the end, since their memory may be used
    again as soon as they are let go of."""
    _C.cuda_enter(device_id)
    try:
        size = _C.workspace(operation, which, description)
        space = _C.cuda_memory(device_id, size)
        _C.run(operation, which, description, addresses, _C.cuda_address(space), size, cupy_stream())
        _C.cuda_wait(cupy_stream())
    finally:
        _C.cuda_leave()


# ------------------------------------------------------------------------------------------------------- attention


def _strides(view: View, packed: bool) -> tuple[int, int, int]:
    b, h, s = (0, view.strides[1], view.strides[0]) if packed else view.strides[:3]
    return (b, h, s) if b or h or s else (BROADCAST,) * 3


def _literal(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int]:
    b, h, s = (0 if shape[x] == 1 else strides[x] for x in range(3))
    return (b, h, s) if b or h or s else (BROADCAST,) * 3


class Problem:
    """One attention problem: heddle_attention as a dict, and the addresses of its inputs."""

    view: type[View] = View

    def __init__(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> None:
        self.options = options
        self.q, self.k, self.v = self.view(q, "q"), self.view(k, "k"), self.view(v, "v")
        self.kept: list[View] = []
        self.packed = options["cu_seqlens_q"] is not None or options["cu_seqlens_k"] is not None
        self.rank = len(self.q.shape)
        self.description: dict[str, Any] = {"dtype": 0, "device": device_of(self.q, "q"), "features": 0}
        self.addresses: dict[str, int] = {"q": self.q.address, "k": self.k.address, "v": self.v.address}
        self._sizes()
        self._lengths()
        self._masks()
        self._blocks()
        self._numbers()

    def _sizes(self) -> None:
        views = {"q": self.q, "k": self.k, "v": self.v}
        paged = self.options["block_table"] is not None
        if paged and (self.rank != (3 if self.packed else 4) or {len(self.k.shape), len(self.v.shape)} != {4}):
            ranks = [len(view.shape) for view in views.values()]
            raise HeddleValueError(
                f"q, k and v have {ranks} dimensions: with block_table q must be [b, h, sq, d] or [total, h, d], and "
                "k and v [pages, hk, page, d]"
            )
        if not self.packed and not paged:
            if not 2 <= self.rank <= 4 or any(len(view.shape) != self.rank for view in views.values()):
                ranks = [len(view.shape) for view in views.values()]
                raise HeddleValueError(f"q, k and v have {ranks} dimensions: must be the same, 2 to 4")
            for view in views.values():
                view.lead(4)
        if E4M3 in (self.k.dtype, self.v.dtype):
            self.description["features"] |= _BITS["e4m3"]
        for name in ("k_scale", "v_scale"):
            if self.options[name] is not None and E4M3 not in (self.k.dtype, self.v.dtype):
                raise HeddleValueError(f"{name} is given, but k and v are {self.k.dtype}, not {E4M3}")
        for name, view in views.items():
            if self.packed and len(view.shape) != 3 and not (paged and name != "q"):
                raise HeddleValueError(f"{name} has {len(view.shape)} dimensions, but must have 3 ([total, h, d])")
            eight = name != "q" and self.description["features"] & _BITS["e4m3"]
            check(view, name, E4M3 if eight else self.q.dtype, self.q)
        q, k, v = self.q.shape, self.k.shape, self.v.shape
        if q[-1] != k[-1]:
            raise HeddleValueError(f"q has head dim {q[-1]}, but k has {k[-1]}")
        if k[:-1] != v[:-1] or (not self.packed and not paged and q[0] != k[0]):
            raise HeddleValueError(f"q, k and v have shapes {q}, {k}, {v}: batch sizes, or k's and v's rows, differ")
        if not k[1] or not v[-1]:
            raise HeddleValueError(f"k and v have shapes {k} and {v}: no heads, or a head dim of 0")
        d = self.description
        d |= {"dtype": DTYPES[self.q.dtype], "h": q[1], "hk": k[1], "d": q[-1], "dv": v[-1]}
        d |= {
            f"{name}_stride": _strides(view, self.packed and not (paged and name != "q"))
            for name, view in views.items()
        }
        if not self.packed:
            d |= {"b": q[0], "sq": q[2], "sk": k[2]}
        if paged:
            d |= {"pages": k[0], "page": k[2]}

    def _take(self, name: str, dtype: str, shape: Sequence[int] | None = None, field: str = "") -> View | None:
        value = self.options[name]
        if value is None:
            return None
        view = check(self.view(value, name), name, dtype, self.q, shape)
        self.kept.append(view)
        self.addresses[field or name] = view.address
        return view

    def _lengths(self) -> None:
        d, options = self.description, self.options
        if options["block_table"] is not None:
            self._pages()
        elif self.packed:
            cu_q, cu_k = self._take("cu_seqlens_q", "int32"), self._take("cu_seqlens_k", "int32")
            if cu_q is None or cu_k is None or len(cu_q.shape) != 1 or cu_q.shape != cu_k.shape or cu_q.shape[0] < 1:
                raise HeddleValueError("cu_seqlens_q and cu_seqlens_k come together, both of shape [b + 1]")
            if options["max_seqlen_q"] is None or options["max_seqlen_k"] is None:
                raise HeddleValueError(
                    "packed sequences need max_seqlen_q and max_seqlen_k, the upper limits of one sequence"
                )
            sq, sk = (limit_of(name, options[name]) for name in ("max_seqlen_q", "max_seqlen_k"))
            d |= {"b": cu_q.shape[0] - 1, "sq": sq, "sk": sk}
            d |= {"total_q": self.q.shape[0], "total_k": self.k.shape[0], "features": d["features"] | VARLEN}
            self._check_packing("cu_seqlens_q", d["total_q"], d["sq"])
            self._check_packing("cu_seqlens_k", d["total_k"], d["sk"])
            square = (
                "block_rows",
                *(_OPTION_OF.get(name, name) for name, field in _OPTIONAL.items() if field[1] == "bhqk"),
                "dweights",
            )
            if not options["return_weights"] and all(options[name] is None for name in square):
                # No sequence is longer than all rows together, and the kernels' work grows with the limit.
                d |= {"sq": min(d["sq"], d["total_q"]), "sk": min(d["sk"], d["total_k"])}
        elif options["max_seqlen_q"] is not None or options["max_seqlen_k"] is not None:
            raise HeddleValueError("max_seqlen_q and max_seqlen_k are given without cu_seqlens_q and cu_seqlens_k")
        for name, most in (("seqlens_q", d["sq"]), ("seqlens_k", d["sk"])):
            if self._take(name, "int32", [d["b"]]) is None:
                continue
            d["features"] |= SEQLENS
            if self.q.device == CPU and self.view.readable:
                lengths = [int(n) for n in options[name]]
                if any(not 0 <= n <= most for n in lengths):
                    raise HeddleValueError(f"{name} = {lengths} is not all from 0 to {most}")

    def _pages(self) -> None:
        """Lengths and table of keys in pages."""
        d, options = self.description, self.options
        if options["cu_seqlens_k"] is not None:
            raise HeddleValueError("cu_seqlens_k is given with block_table: keys in pages are not packed")
        if self.packed:
            cu_q = self._take("cu_seqlens_q", "int32")
            if cu_q is None or len(cu_q.shape) != 1 or cu_q.shape[0] < 1 or options["max_seqlen_q"] is None:
                raise HeddleValueError("packed queries need cu_seqlens_q of shape [b + 1], and max_seqlen_q")
            d |= {"b": cu_q.shape[0] - 1, "sq": limit_of("max_seqlen_q", options["max_seqlen_q"])}
            d |= {"total_q": self.q.shape[0], "features": d["features"] | VARLEN}
            self._check_packing("cu_seqlens_q", d["total_q"], d["sq"])
        elif options["max_seqlen_q"] is not None:
            raise HeddleValueError("max_seqlen_q is given without cu_seqlens_q")
        table = self._take("block_table", "int32")
        if table is None or len(table.shape) != 2 or table.shape[0] != d["b"]:
            shape = None if table is None else table.shape
            raise HeddleValueError(f"block_table has shape {shape}, but must have [{d['b']}, pages of a sequence]")
        step = table.strides[0] if table.shape[0] > 1 else table.shape[1]
        if step < table.shape[1]:
            raise HeddleValueError(f"block_table has stride {step} between rows of {table.shape[1]}: they overlap")
        d |= {"features": d["features"] | PAGES, "table": step, "sk": table.shape[1] * d["page"]}
        most = limit_of("max_seqlen_k", options["max_seqlen_k"])
        if most is not None:
            d["sk"] = min(most, d["sk"])

    def _check_packing(self, name: str, total: int, longest: int) -> None:
        if self.q.device != CPU or not self.view.readable:
            return  # on a GPU they are clamped
        cu = [int(n) for n in self.options[name]]
        steps = [b - a for a, b in zip([0, *cu], cu, strict=False)]
        if min(steps) < 0 or cu[-1] > total or max(steps[1:], default=0) > longest:
            raise HeddleValueError(
                f"{name} = {cu} must not fall, exceed the {total} rows, or have a sequence over {longest}"
            )

    def _masks(self) -> None:
        d = self.description
        full = [d["b"], d["h"], d["sq"], d["sk"]]
        dtypes = {"dtype": self.q.dtype, "float": real_of(self.q), "bool": "bool", "int32": "int32"}
        for field, (element, letters, feature, stride) in _OPTIONAL.items():
            if letters != "bhqk":
                continue
            name = _OPTION_OF.get(field, field)
            view = self._take(name, dtypes[element], field=field)
            if view is None:
                continue
            shape = list(view.shape)
            view.lead(4)
            if (
                len(view.shape) != 4
                or view.shape[3] != full[3]
                or any(have not in (1, need) for have, need in zip(view.shape, full, strict=True))
            ):
                raise HeddleValueError(
                    f"{name} has shape {shape}, but must broadcast to {full} with all of the last dimension"
                )
            d["features"] |= feature
            d[f"{stride}_stride"] = _literal(view.shape, view.strides)
        slopes = self._take("alibi_slopes", real_of(self.q))
        if slopes is not None:
            if slopes.shape not in ([d["h"]], [d["b"], d["h"]]):
                raise HeddleValueError(
                    f"alibi_slopes has shape {slopes.shape}, but must have {[d['h']]} or {[d['b'], d['h']]}"
                )
            d["features"] |= _BITS["alibi"]
            d["alibi_stride_b"] = slopes.strides[0] if len(slopes.shape) == 2 else 0
        for field, (element, letters, feature, _) in _OPTIONAL.items():
            if field == "alibi_slopes" or letters == "bhqk":
                continue
            paged = self.options["block_table"] is not None
            shape = [d[_EXTENT_OF.get(letter, letter)] for letter in letters]
            if field.endswith("_segments"):
                rows = self.packed and not (paged and field[0] == "k")
                shape = [d[f"total_{field[0]}"]] if rows else shape
                self.options[field] = self._ids(field, None if rows else shape)
            view = self._take(_OPTION_OF.get(field, field), dtypes[element], shape, field)
            if view is not None:
                if len(shape) == 2 and shape[0] > 1 and view.strides[0] != shape[1]:
                    raise HeddleValueError(f"{field} has strides {view.strides}, but must be contiguous")
                d["features"] |= feature

    def _ids(self, name: str, shape: list[int] | None) -> Any:
        """Segments as the library has them. Where `shape` is given, one for all batches is repeated."""
        ids = self.options[name]
        if name == "k_segments" and ids is None:
            ids = self.options["q_segments"]
        if name == "q_segments" and ids is None and self.options["k_segments"] is not None:
            raise HeddleValueError("k_segments is given without q_segments")
        if ids is None or not self.view.readable:
            return ids
        view = View(ids, name)
        if view.dtype not in ("int32", "int16", "int8", "uint8"):
            raise HeddleTypeError(f"{name} is {view.dtype}, but must be int32 (or of fewer bits)")
        if shape is not None and len(view.shape) == 1:
            ids = library_of(ids).stack([ids] * shape[0]) if shape[0] else ids.reshape(0, *view.shape)
        elif shape is not None and len(view.shape) == 2 and view.shape[0] == 1 < shape[0]:
            ids = library_of(ids).concatenate([ids] * shape[0])
        return ids if view.dtype == "int32" else ids.astype("int32")

    def _blocks(self) -> None:
        """Lists of blocks. On the CPU a wrong number is an error; on a GPU none may lead behind the last column."""
        d, options = self.description, self.options
        rows, columns = options["block_rows"], options["block_columns"]
        sizes = block_of(options["block_size"], not rows is columns is None)
        if rows is columns is None:
            return
        if rows is None or columns is None:
            raise HeddleValueError("block_rows and block_columns come together, but only one is given")
        named = self._take("block_columns", "int32")
        assert named is not None
        if self.q.device == CUDA:
            options["block_rows"] = rows.clip(0, named.shape[0])
        lists = self._take("block_rows", "int32")
        assert lists is not None
        shape = list(lists.shape)
        lists.lead(3)
        need = [d["b"], d["h"], -(-d["sq"] // sizes[0]) + 1]
        fits = len(lists.shape) == 3 and lists.shape[2] == need[2]
        if not fits or any(have not in (1, full) for have, full in zip(lists.shape, need[:2], strict=False)):
            raise HeddleValueError(f"block_rows has shape {shape}, but must broadcast to {need} with all of the last")
        if len(named.shape) != 1:
            raise HeddleValueError(f"block_columns has {len(named.shape)} dimensions, but must have 1")
        steps = contiguous(lists.shape)
        if any(n > 1 and have != step for n, have, step in zip(lists.shape, lists.strides, steps, strict=True)):
            raise HeddleValueError(f"block_rows has strides {lists.strides}, but must be contiguous")
        d |= {"features": d["features"] | BLOCKS, "block_q": sizes[0], "block_k": sizes[1]}
        d |= {"blocks_of_b": int(lists.shape[0] != 1), "blocks_of_h": int(lists.shape[1] != 1)}
        if self.q.device == CPU and self.view.readable:
            wrong = _C.wrong_list(d, lists.address, named.address, named.shape[0])
            if wrong:
                raise HeddleValueError(wrong)

    def _numbers(self) -> None:
        d, options = self.description, self.options
        d |= dict(zip(PLACES, places_of(*(options[name] for name in PLACES)), strict=True))
        sq, sk = (d[f"whole_s{x}"] or d[f"{x}_offset"] + d[f"s{x}"] for x in "qk")
        d["mask"] = causal_of(options["causal"], sq, sk)
        left, right = window_of(options["window"])
        if left >= 0 or right >= 0:
            d |= {"features": d["features"] | WINDOW, "window_left": left, "window_right": right}
        d["scale"] = scale_of(options["scale"])
        d |= {name: number_of(name, options[name]) for name in ("softcap", "dropout")}
        d["multiprocessors"] = multiprocessors_of(options["multiprocessors"])
        if options["return_weights"] or options["dweights"] is not None:
            d["features"] |= WEIGHTS
        d["features"] |= (DETERMINISTIC if options["deterministic"] else 0) | (TF32 if options["tf32"] else 0)
        if options["rng_state"] is not None:
            # Two numbers from the caller; on the CPU they go into the description.
            d["seed"], d["offset"] = state_of(options["rng_state"])
        elif d["dropout"]:
            import numpy

            d["seed"], d["offset"] = (int(n) for n in numpy.random.randint(0, 2**62, 2, dtype=numpy.int64))

    def rows(self) -> list[int]:
        """Shape of lse."""
        d = self.description
        return [d["h"], d["total_q"]] if self.packed else [d["b"], d["h"], d["sq"]]

    def result(self, maker: Maker, which: str, like: View, last: int) -> tuple[Any, int]:
        """A contiguous result of like's shape but for the last dimension; sets its strides."""
        shape = [*like.shape[:-1], last]
        self.description[f"{which}_stride"] = _literal_result(shape, self.packed)
        return maker.empty(shape, self.q.dtype)

    def own_shape(self, maker: Maker, made: Any) -> Any:
        """Takes off the dimensions that were put in front."""
        if not self.packed:
            made = made.reshape(made.shape[4 - self.rank :])
        return maker.finish(made)


def _literal_result(shape: list[int], packed: bool) -> tuple[int, int, int]:
    strides = contiguous(shape)
    return (0, strides[1], strides[0]) if packed else (strides[0], strides[1], strides[2])


# What they are where nothing is said heddle.attention tells; the gradients of its other results are backward's own.
_NO_OPTIONS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(heddle.attention).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
} | {"dlse": None, "dweights": None}


_FLAGS = ("return_lse", "return_weights", "deterministic", "tf32")


def _options(given: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(given.keys() - _NO_OPTIONS.keys())
    if unknown:
        raise HeddleTypeError(f"attention has no option {', '.join(unknown)}")
    options = _NO_OPTIONS | given
    return options | {name: flag_of(name, options[name]) for name in _FLAGS}


def attention(q: Any, k: Any, v: Any, **given: Any) -> Any:
    """See heddle.attention, which this is for arrays."""
    options = _options(given)
    p = Problem(q, k, v, options)
    maker = Maker(q, p.q)
    d = p.description
    out, p.addresses["o"] = p.result(maker, "o", p.q, d["dv"])
    lse, p.addresses["lse"] = maker.empty(p.rows(), real_of(p.q))
    if p.packed:
        maker.clear(out, lse)  # rows of no sequence are written by nobody
    weights = None
    if d["features"] & WEIGHTS:
        weights, p.addresses["weights"] = maker.empty([d["b"], d["h"], d["sq"], d["sk"]], p.q.dtype)
    run("attention", FORWARD, d, p.addresses, maker)
    out = p.own_shape(maker, out)
    if not p.packed:
        lse = lse.reshape(lse.shape[4 - p.rank :])
    results = [out]
    if options["return_lse"]:
        results.append(maker.finish(lse))
    if weights is not None:
        results.append(p.own_shape(maker, weights))
    return results[0] if len(results) == 1 else tuple(results)


def attention_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, **given: Any) -> dict[str, Any]:
    """See heddle.attention_backward, which this is for arrays."""
    options = _options(given)
    if number_of("dropout", options["dropout"]) and options["rng_state"] is None:
        raise HeddleValueError("dropout's backward needs the rng_state of its forward")
    if options["block_table"] is not None:
        raise NotImplementedError("keys in pages (block_table) have no gradient")
    p = Problem(q, k, v, options)
    if p.description["features"] & _BITS["e4m3"]:
        raise NotImplementedError(f"keys of 8 bits ({E4M3}) have no gradient")
    maker = Maker(q, p.q)
    d, rank = p.description, 3 if p.packed else 4
    shape = [*p.q.shape[:-1], d["dv"]]
    square = [d["b"], d["h"], d["sq"], d["sk"]]
    for name, value, field, must in (("out", out, "o", shape), ("dout", dout, "do", shape)):
        view = View(value, name)
        view.lead(rank)
        p.kept.append(check(view, name, p.q.dtype, p.q, must))
        d[f"{field}_stride"] = _strides(view, p.packed)
        p.addresses["o" if name == "out" else "dout"] = view.address
    for name, value in (("lse", lse), ("dlse", options["dlse"])):
        if value is None:
            continue
        view = View(value, name)
        view.lead(rank - 1)
        check(view, name, real_of(p.q), p.q, p.rows())
        if any(
            n > 1 and have != need
            for n, have, need in zip(view.shape, view.strides, contiguous(view.shape), strict=True)
        ):
            raise HeddleValueError(f"{name} must be contiguous, but has strides {view.strides}")
        p.kept.append(view)
        p.addresses[name] = view.address
    if options["dweights"] is not None:
        view = View(options["dweights"], "dweights")
        view.lead(4)
        p.kept.append(check(view, "dweights", p.q.dtype, p.q, square))
        d["dweights_stride"] = _strides(view, False)
        p.addresses["dweights"] = view.address
    made = {}
    for name, like in (("dq", p.q), ("dk", p.k), ("dv", p.v)):
        made[name], p.addresses[name] = p.result(maker, name, like, like.shape[-1])
        if p.packed:
            maker.clear(made[name])
    if d["features"] & BIAS:
        own = View(options["bias"], "bias").shape
        made["dbias"], p.addresses["dbias"] = maker.empty(own, p.q.dtype)
        full = [*([1] * (4 - len(own))), *own]
        d["dbias_stride"] = _literal(full, contiguous(full))
    if d["features"] & SINKS:
        made["dsinks"], p.addresses["dsinks"] = maker.empty([d["h"]], real_of(p.q))
    run("attention", BACKWARD, d, p.addresses, maker)
    return {
        name: maker.finish(value) if name in ("dbias", "dsinks") else p.own_shape(maker, value)
        for name, value in made.items()
    }
