# SPDX-License-Identifier: Apache-2.0
"""Which of an Expression's forms heddle has options for: a band of keys, a slope over the distance."""

from __future__ import annotations

import math
from typing import Any

from heddle._flex_apply import Expression, Leaf, number_of
from heddle._flex_calls import REAL


def linear(value: Any, exact: bool = False) -> tuple[float, float, float] | None:
    """(x, y, z), where value is x·q_idx + y·kv_idx + z. `exact`: None where PyTorch's own numbers may be others, since
    it rounds to float32 on the way or goes past the end of int64."""
    number = number_of(value)
    if number is not None:
        return 0.0, 0.0, number
    if not isinstance(value, Expression):
        return None
    if isinstance(value, Leaf):
        places = {"q_idx": (1.0, 0.0, 0.0), "kv_idx": (0.0, 1.0, 0.0)}
        return places.get(value.name)
    parts = [linear(arg, exact) for arg in value.args]
    if value.kwargs or None in parts:
        return None
    form = _combined(value, parts)
    return form if form is None or not exact or _is_exact(form, value.kind) else None


def _is_exact(form: tuple[float, float, float], kind: int) -> bool:
    """For a million rows and more: of int64, or of so few digits that float32 has them."""
    most, last = (2.0, 2.0**20) if kind == REAL else (2.0**20, 2.0**52)
    small = abs(form[0]) <= most and abs(form[1]) <= most and abs(form[2]) <= last  # not so where it is NaN
    return small and all((8 * part).is_integer() for part in form)


def _combined(value: Expression, known: list[Any]) -> tuple[float, float, float] | None:
    """`linear` of an operation on what has these forms."""
    if value.name in ("add", "sub"):
        sign = 1.0 if value.name == "add" else -1.0
        x, y, z = (a + sign * b for a, b in zip(*known, strict=True))
        return x, y, z
    if value.name == "neg":
        x, y, z = (-a for a in known[0])
        return x, y, z
    if value.name == "mul" and any(part[:2] == (0.0, 0.0) for part in known):
        factor, form = known if known[0][:2] == (0.0, 0.0) else known[::-1]
        x, y, z = (a * factor[2] for a in form)
        return x, y, z
    return None


_TURNED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq"}


def band(condition: Any) -> tuple[float, float] | None:
    """(low, high), where the condition is low <= kv_idx - q_idx <= high; None if it is something else."""
    if not isinstance(condition, Expression) or condition.name not in _TURNED or condition.kwargs:
        return None
    left, right = condition.args
    name = condition.name
    for inner, bound, turned in ((left, right, name), (right, left, _TURNED[name])):
        limit = number_of(bound)
        distance = linear(inner.args[0], True) if isinstance(inner, Expression) and inner.name == "abs" else None
        if distance is not None and limit is not None and distance in ((1.0, -1.0, 0.0), (-1.0, 1.0, 0.0)):
            if math.isnan(limit):
                return None
            limit = _up(limit) - 1 if turned == "lt" else _down(limit)
            return (-limit, limit) if turned in ("lt", "le") and limit >= 0 else None
    forms = linear(left, True), linear(right, True)
    if forms[0] is None or forms[1] is None:
        return None
    x, y, z = (a - b for a, b in zip(*forms, strict=True))  # type: ignore[arg-type]
    if abs(x) != 1.0 or x + y != 0.0:
        return None
    if x == 1.0:  # q - kv + z against 0: kv - q - z the other way round
        name, z = _TURNED[name], -z
    if math.isnan(z) or (name == "eq" and not z.is_integer()):
        return None
    # kv - q against -z, where both are whole
    limits = {
        "le": (-math.inf, _down(-z)),
        "lt": (-math.inf, _up(-z) - 1),
        "ge": (_up(-z), math.inf),
        "gt": (_down(-z) + 1, math.inf),
        "eq": (-z, -z),
    }
    return limits[name]


_FAR = 2.0**52  # no two places are as far apart


def _down(number: float) -> float:
    return math.floor(number) if abs(number) < _FAR else math.copysign(math.inf, number)


def _up(number: float) -> float:
    return math.ceil(number) if abs(number) < _FAR else math.copysign(math.inf, number)


def slope(term: Any) -> tuple[Any, bool] | None:
    """(s, distance), where term is s·|q_idx - kv_idx| (distance), or s·(kv_idx - q_idx), and s is of b and h alone."""
    if not isinstance(term, Expression) or term.kwargs:
        return None
    if term.name == "abs":
        return (1.0, True) if linear(term.args[0]) in ((1.0, -1.0, 0.0), (-1.0, 1.0, 0.0)) else None
    form = linear(term)
    if form is not None and form[0] == -form[1] and form[2] == 0:
        return form[1], False
    if term.name == "neg":
        inner = slope(term.args[0])
        return inner and (-inner[0], inner[1])
    if term.name == "mul":
        for factor, other in (term.args, term.args[::-1]):
            inner = slope(other)
            if inner and (not isinstance(factor, Expression) or factor.uses <= {"b", "h"}):
                return inner[0] * factor, inner[1]
    if term.name == "truediv" and (not isinstance(term.args[1], Expression) or term.args[1].uses <= {"b", "h"}):
        inner = slope(term.args[0])
        return inner and (inner[0] / term.args[1], inner[1])
    return None
