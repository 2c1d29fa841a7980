# SPDX-License-Identifier: Apache-2.0
"""The derivatives of ``norm_linear`` and its backward pass along a direction; ``_tangents`` says what for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from heddle._options import NO_NORM, OF_GATE, features_out, is_gated
from heddle._tangents import Maybe, sum_of, times


def _activation(activation: int, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """act(u) of a heddle_activation, its first and its second derivative."""
    if activation == 1:
        share = 0.5 * torch.erfc(-u / math.sqrt(2))
        normal = torch.exp(-0.5 * u * u) / math.sqrt(2 * math.pi)
        return u * share, share + u * normal, normal * (2 - u * u)
    linear, cubic = (1.0, 0.0) if activation == 3 else (math.sqrt(8 / math.pi), 0.044715 * math.sqrt(8 / math.pi))
    within = u * (linear + cubic * u * u)
    share, rest = torch.sigmoid(within), torch.sigmoid(-within)  # 1 - share would cancel
    inner, bent = linear + 3 * cubic * u * u, 6 * cubic * u
    slope = share * rest
    second = slope * (bent + inner * inner * (rest - share))
    return u * share, share + u * slope * inner, 2 * slope * inner + u * second


def _activated(activation: int, u: Tensor, ut: Maybe, dy: Maybe, dyt: Maybe) -> tuple[Maybe, Maybe, Maybe]:
    """y', du and du' of u and dy, and of what they change by."""
    if not is_gated(activation):
        _, first, second = _activation(activation, u)
        return times(first, ut), times(dy, first), sum_of(times(dyt, first), times(times(dy, second), ut))
    gate, up = u.chunk(2, -1)
    gatet, upt = (None, None) if ut is None else ut.chunk(2, -1)
    act, first, second = _activation(activation - OF_GATE, gate)

    def both(of_gate: Maybe, of_up: Maybe) -> Maybe:
        halves = [torch.zeros_like(gate) if half is None else half for half in (of_gate, of_up)]
        return None if of_gate is None and of_up is None else torch.cat(halves, -1)

    actt = times(first, gatet)
    dup, dupt = times(dy, up), sum_of(times(dyt, up), times(dy, upt))  # by act(gate)
    return (
        sum_of(times(actt, up), times(act, upt)),
        both(times(dup, first), times(dy, act)),
        both(sum_of(times(dupt, first), times(times(dup, second), gatet)), sum_of(times(dyt, act), times(dy, actt))),
    )


def norm_linear(
    given: Mapping[str, Any],
    direction: Mapping[str, Maybe],
    wanted: frozenset[str],
    grads: Mapping[str, Maybe],
) -> dict[str, Tensor]:
    """What changes along `direction` of x, weight, bias, gamma, beta and residual, and of dy and dz.

    given: the arguments of torch.ops.heddle.norm_linear, by name. wanted: y and z, and x, weight, bias, gamma, beta for
    the gradients, of which grads has dy and dz. What is not in the result is zero. With h = dy·W + dz, g = h∘gamma,
    z = xhat∘gamma + beta and means over k:

        xhat' = rstd·(x' - mean(x') - xhat·mean(xhat∘x'))        rstd' = -rstd²·mean(xhat∘x')
        dx' = rstd'/rstd·dx + rstd·(g' - mean(g') - xhat'·mean(g∘xhat) - xhat·mean(g'∘xhat + g∘xhat'))

    and the rule of products for the rest; RMS: without mean(x') and mean(g'); no norm: xhat = x and dx' = g'. With an
    activation, u = z·Wᵀ + bias:

        y' = act'(u)∘u'        du = dy∘act'(u) in place of dy        du' = dy'∘act'(u) + dy∘act''(u)∘u'

    and of two halves, u = [gate, up], the same of act(gate)∘up."""
    dtype = given["x"].dtype
    real = torch.float64 if dtype == torch.float64 else torch.float32
    n = features_out(given["weight"].shape[0], given["activation"])

    def taken(x: Maybe, rows: bool = False) -> Maybe:
        return None if x is None else x.to(real).reshape(-1, x.shape[-1]) if rows else x.to(real)

    x, xt = taken(given["x"], True), taken(direction.get("x"), True)
    dy, dyt = taken(grads.get("dy"), True), taken(direction.get("dy"), True)
    more, moret = taken(grads.get("dz"), True), taken(direction.get("dz"), True)
    w, gamma, beta = (taken(given[name]) for name in ("weight", "gamma", "beta"))
    assert x is not None and w is not None
    wt, biast, gammat, betat = (taken(direction.get(name)) for name in ("weight", "bias", "gamma", "beta"))
    layer, plain = given["norm"] == 0, given["norm"] == NO_NORM

    def mean(t: Maybe) -> Maybe:
        return None if t is None else t.mean(-1, keepdim=True)

    def centred(t: Maybe) -> Maybe:
        return t if t is None or not layer else t - t.mean(-1, keepdim=True)

    def product(a: Maybe, b: Maybe) -> Maybe:
        return None if a is None or b is None else a @ b

    def turned(a: Maybe) -> Maybe:
        return None if a is None else a.mT

    def minus(a: Maybe) -> Maybe:
        return None if a is None else -a

    def over_rows(a: Maybe) -> Maybe:
        return None if a is None else a.sum(0)

    def scaled(t: Maybe, by: Maybe) -> Maybe:
        return t if by is None else times(t, by)

    with torch.autocast(x.device.type, enabled=False):
        shifted = centred(x)
        assert shifted is not None
        rstd = torch.rsqrt((shifted * shifted).mean(-1, keepdim=True) + (given["eps"] or 1e-5))
        xhat = x if plain else shifted * rstd
        along = mean(times(xhat, xt))
        xhatt = xt if plain else times(rstd, sum_of(centred(xt), minus(times(xhat, along))))
        z = scaled(xhat, gamma) if beta is None else sum_of(scaled(xhat, gamma), beta)
        zt = sum_of(scaled(xhatt, gamma), times(xhat, gammat), None if betat is None else betat.expand_as(x))
        results: dict[str, Maybe] = {}
        activation = given["activation"]
        if "y" in wanted or activation:
            results["y"] = sum_of(product(zt, turned(w)), product(z, turned(wt)))
            if biast is not None:
                results["y"] = biast.expand(len(x), len(w)) if results["y"] is None else results["y"] + biast
        if activation:
            ut, u, bias = results["y"], product(z, turned(w)), taken(given["bias"])
            assert u is not None
            results["y"], dy, dyt = _activated(activation, u if bias is None else u + bias, ut, dy, dyt)
        if "y" in wanted:
            results["y"] = sum_of(results["y"], taken(direction.get("residual"), True))
        results["z"] = zt
        dz = sum_of(product(dy, w), more)
        dzt = sum_of(product(dyt, w), product(dy, wt), moret)
        if "x" in wanted:
            g, gt = scaled(dz, gamma), sum_of(scaled(dzt, gamma), times(dz, gammat))
            dots = mean(times(g, xhat))
            dotst = mean(sum_of(times(gt, xhat), times(g, xhatt)))
            own = sum_of(centred(g), minus(times(xhat, dots)))
            change = sum_of(centred(gt), minus(times(xhatt, dots)), minus(times(xhat, dotst)))
            results["x"] = sum_of(times(rstd, change), minus(times(times(rstd * rstd, along), own)))
            if plain:
                results["x"] = gt
        results["weight"] = sum_of(product(turned(dyt), z), product(turned(dy), zt))
        results["bias"], results["beta"] = over_rows(dyt), over_rows(dzt)
        results["gamma"] = over_rows(sum_of(times(dzt, xhat), times(dz, xhatt)))
    shapes = {"y": (*given["x"].shape[:-1], n), "x": given["x"].shape, "z": given["x"].shape}
    made = {name: t.to(dtype) for name, t in results.items() if t is not None and name in wanted}
    return {name: t.reshape(shapes.get(name, t.shape)) for name, t in made.items()}
