# SPDX-License-Identifier: Apache-2.0
"""``heddle.norm_linear`` and its backward for arrays that speak DLPack."""

from __future__ import annotations

import math
from typing import Any

from heddle import _C
from heddle._arrays import BACKWARD, FORWARD, PREPARE, TF32, run, write_prepared
from heddle._errors import HeddleValueError
from heddle._options import EPS, activation_of, eps_of, features_out, flag_of, multiprocessors_of, norm_of
from heddle._views import DTYPES, Maker, View, check, device_of


class Rows:
    """One norm-linear problem, as Problem is for attention."""

    view: type[View] = View

    def __init__(
        self,
        x: Any,
        weight: Any,
        gamma: Any,
        beta: Any,
        eps: float,
        norm: str,
        features: int,
        bias: Any = None,
        activation: str | None = None,
        residual: Any = None,
    ) -> None:
        self.x, self.weight = self.view(x, "x"), self.view(weight, "weight")
        device = device_of(self.x, "x")
        if not self.x.shape:
            raise HeddleValueError("x has 0 dimensions, but must have 1 or more")
        if len(self.weight.shape) != 2 or self.weight.shape[1] != self.x.shape[-1]:
            raise HeddleValueError(f"x has {self.x.shape[-1]} features, but weight is {self.weight.shape}")
        check(self.x, "x", self.x.dtype, self.x)
        check(self.weight, "weight", self.x.dtype, self.x)
        rows, k = self.weight.shape
        n = features_out(rows, activation_of(activation))
        if isinstance(eps, (int, float)) and not eps >= 0:
            raise HeddleValueError(f"eps = {eps} is not >= 0")
        self.description: dict[str, Any] = {
            "dtype": DTYPES[self.x.dtype],
            "device": device,
            "norm": norm_of(norm),
            "features": features | (_C.features()["activation"] if activation is not None else 0),
            "activation": activation_of(activation),
            "m": math.prod(self.x.shape[:-1]),
            "k": k,
            "n": n,
            "eps": eps_of(eps, norm),
            "x_stride": self.row_stride(self.x, "x"),
            "w_stride": self.row_stride(self.weight, "weight"),
        }
        self.addresses: dict[str, int] = {"x": self.x.address, "w": self.weight.address}
        self.kept = []
        for name, value, size in (("gamma", gamma, k), ("beta", beta, k), ("bias", bias, rows)):
            if value is not None:
                if name != "bias" and norm == "none":
                    raise HeddleValueError(f"{name} is given, but norm is HEDDLE_NO_NORM")
                view = check(self.view(value, name), name, self.x.dtype, self.x, [size])
                self.kept.append(view)
                self.addresses[name] = view.address
        if residual is not None:
            view = check(self.view(residual, "residual"), "residual", self.x.dtype, self.x, [*self.x.shape[:-1], n])
            self.kept.append(view)
            self.description["features"] |= _C.features()["residual"]
            self.description["residual_stride"] = self.row_stride(view, "residual")
            self.addresses["residual"] = view.address

    @staticmethod
    def row_stride(view: View, name: str) -> int:
        stride, rows = view.shape[-1], 1
        for size, step in zip(reversed(view.shape[:-1]), reversed(view.strides[:-1]), strict=True):
            if size == 0:
                return view.shape[-1]
            if size == 1:
                continue
            if rows > 1 and step != stride * rows:
                raise HeddleValueError(f"the rows of {name} do not lie at one distance (strides {view.strides})")
            if rows == 1:
                stride = step
            rows *= size
        if stride == 0 and rows > 1:
            raise HeddleValueError(f"the rows of {name} lie on top of each other (strides {view.strides})")
        return stride


def norm_linear(
    x: Any,
    weight: Any,
    bias: Any,
    gamma: Any,
    beta: Any,
    eps: float,
    *,
    norm: str,
    activation: str | None,
    residual: Any,
    return_norm: bool,
    tf32: bool,
    prepared: Any,
    multiprocessors: int,
) -> Any:
    """See heddle.norm_linear, which this is for arrays."""
    p = Rows(x, weight, gamma, beta, eps, norm, TF32 if flag_of("tf32", tf32) else 0, bias, activation, residual)
    p.description["multiprocessors"] = multiprocessors_of(multiprocessors)
    if prepared is not None:
        kept = check(View(prepared, "prepared"), "prepared", "uint8", p.x)
        if len(kept.shape) != 1:
            raise HeddleValueError(f"prepared has {len(kept.shape)} dimensions, but must have 1 ([bytes])")
        p.description["features"] |= _C.features()["prepared"]
        p.description["prepared_bytes"] = kept.shape[0]
        p.addresses["prepared"] = kept.address if kept.shape[0] else 0
    maker = Maker(x, p.x)
    y, p.addresses["y"] = maker.empty([*p.x.shape[:-1], p.description["n"]], p.x.dtype)
    if not flag_of("return_norm", return_norm):
        run("norm_linear", FORWARD, p.description, p.addresses, maker)
        return maker.finish(y)
    p.description["features"] |= _C.features()["z"]
    z, p.addresses["z"] = maker.empty(p.x.shape, p.x.dtype)
    run("norm_linear", FORWARD, p.description, p.addresses, maker)
    return maker.finish(y), maker.finish(z)


def norm_linear_prepare(
    weight: Any,
    bias: Any,
    gamma: Any,
    beta: Any,
    *,
    norm: str,
    activation: str | None,
    return_norm: bool,
    tf32: bool,
) -> Any:
    """See heddle.norm_linear_prepare, which this is for arrays."""
    view = View(weight, "weight")
    device_of(view, "weight")
    if len(view.shape) != 2:
        raise HeddleValueError(f"weight has {len(view.shape)} dimensions, but must have 2 ([n, k])")
    check(view, "weight", view.dtype, view)
    # Any x will do: it is not looked at.
    p = Rows(weight, weight, gamma, beta, EPS, norm, TF32 if flag_of("tf32", tf32) else 0, bias, activation)
    p.description["features"] |= _C.features()["z"] if flag_of("return_norm", return_norm) else 0
    maker = Maker(weight, p.weight)
    size = _C.workspace("norm_linear", PREPARE, p.description)
    prepared, address = maker.empty([size], "uint8")
    if size:
        write_prepared(p.description, p.addresses, address, size, maker)
    return maker.finish(prepared)


def norm_linear_backward(
    dy: Any,
    x: Any,
    weight: Any,
    gamma: Any,
    beta: Any,
    eps: float,
    *,
    norm: str,
    activation: str | None,
    bias: Any,
    dz: Any,
) -> dict[str, Any]:
    """See heddle.norm_linear_backward, which this is for arrays."""
    p = Rows(x, weight, gamma, beta, eps, norm, 0, None if activation is None else bias, activation)
    maker = Maker(x, p.x)
    rows, k = p.weight.shape
    gradient = check(View(dy, "dy"), "dy", p.x.dtype, p.x, [*p.x.shape[:-1], p.description["n"]])
    p.description["dy_stride"] = p.row_stride(gradient, "dy")
    p.addresses["dy"] = gradient.address
    if activation is not None:
        _y, p.addresses["y"] = maker.empty(gradient.shape, p.x.dtype)
        _u, p.addresses["u"] = maker.empty([*p.x.shape[:-1], rows], p.x.dtype)
        run("norm_linear", FORWARD, p.description, {k: v for k, v in p.addresses.items() if k != "dy"}, maker)
    if dz is not None:
        of_z = check(View(dz, "dz"), "dz", p.x.dtype, p.x, p.x.shape)
        p.description["features"] |= _C.features()["z"]
        p.description["dz_stride"] = p.row_stride(of_z, "dz")
        p.addresses["dz"] = of_z.address
    made = {}
    of_norm = () if norm == "none" else (("dgamma", "dgamma", [k]), ("dbeta", "dbeta", [k]))
    for name, field, shape in (
        ("dx", "dx", p.x.shape),
        ("dweight", "dw", [rows, k]),
        ("dbias", "dbias", [rows]),
        *of_norm,
    ):
        made[name], p.addresses[field] = maker.empty(shape, p.x.dtype)
    run("norm_linear", BACKWARD, p.description, p.addresses, maker)
    return {name: maker.finish(value) for name, value in made.items()}
