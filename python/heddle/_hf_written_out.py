# SPDX-License-Identifier: Apache-2.0
"""Layers of transformers that write their attention out: a product, masks, a softmax, dropout, and another product.

Within their forward the first product is not formed. What the layer does to it is noted, and the second product is
heddle's attention with all of that. What is not known here is refused, so nothing is ever left out of a result.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from heddle import attention

# The layers that come out right so, by tests/python/compatibility.py. Others are refused when their model is made.
LAYERS = frozenset("""
    AltRobertaSelfAttention BertGenerationSelfAttention BlipAttention BlipTextSelfAttention BrosSelfAttention
    CanineSelfAttention CodeGenAttention ConvBertSelfAttention Data2VecTextSelfAttention ElectraSelfAttention
    ErnieSelfAttention FlavaSelfAttention GLPNEfficientSelfAttention GPTJAttention GPTNeoSelfAttention
    LongT5Attention MPNetSelfAttention MT5Attention MegatronBertSelfAttention MobileBertSelfAttention
    MobileViTSelfAttention MptAttention Pop2PianoAttention PvtEfficientSelfAttention PvtV2SelfAttention
    RemBertSelfAttention RoCBertSelfAttention RoFormerSelfAttention RobertaPreLayerNormSelfAttention
    SegformerEfficientSelfAttention SwitchTransformersAttention T5Attention TapasSelfAttention UMT5Attention
    ViltSelfAttention VisualBertSelfAttention Wav2Vec2BertSelfAttention
""".split())  # fmt: skip  # noqa: SIM905

_MASKED = -1e4  # a number to fill scores with that leaves nothing of them, in float16, too


def _refuse(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"this layer writes its attention out and {what}, which heddle does not know; load the model with "
        "attn_implementation='eager'"
    )


def _number(value: Any, what: str) -> float:
    """A factor, or what is filled in: a number, or a tensor of one that nobody has to wait for."""
    if isinstance(value, Tensor) and (value.dim() or value.device.type != "cpu" or value.requires_grad):
        raise _refuse(f"{what} by a tensor of shape {list(value.shape)} on {value.device.type}")
    return float(value)


class Scores:
    """In the place of a layer's scores, and after its softmax of its weights."""

    def __init__(self, query: Tensor, key: Tensor) -> None:
        self.query, self.key = query, key
        self.dtype, self.device = query.dtype, query.device
        self.shape = torch.Size((*query.shape[:-1], key.shape[-2]))
        self.scale, self.p = 1.0, 0.0
        self.bias: Tensor | None = None
        self.mask: Tensor | None = None  # True takes part
        self.are_weights = False
        self.found: list[Tensor] = []  # the weights, where somebody asks for them; one list for all copies

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise _refuse(f"asks its scores for .{name}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = _KNOWN.get(func.__name__)
        if known is None:
            raise _refuse(f"gives its scores to {func.__name__}")
        return known(*args, **(kwargs or {}))

    def _with(self, **changes: Any) -> Scores:
        other = Scores(self.query, self.key)  # no copy.copy, which torch.compile of torch 2.11 does not trace
        for name in ("dtype", "device", "shape", "scale", "p", "bias", "mask", "are_weights", "found"):
            setattr(other, name, changes.get(name, getattr(self, name)))
        return other

    def _before_softmax(self, what: str) -> None:
        if self.are_weights:
            raise _refuse(f"{what} its weights (head_mask, say)")

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def to(self, *args: Any, **kwargs: Any) -> Scores:
        return self  # attention rounds at its end alone

    def add(self, other: Any) -> Scores:
        self._before_softmax("adds to")
        if not isinstance(other, Tensor):
            raise _refuse(f"adds a {type(other).__name__}")
        more = other[(None,) * (self.dim() - other.dim())]
        return self._with(bias=more if self.bias is None else self.bias + more)

    def mul(self, factor: Any) -> Scores:
        self._before_softmax("multiplies")
        by = _number(factor, "multiplies")
        if by <= 0:
            raise _refuse(f"multiplies its scores by {by}")
        return self._with(scale=self.scale * by, bias=None if self.bias is None else self.bias * by)

    def div(self, divisor: Any) -> Scores:
        return self.mul(1.0 / _number(divisor, "divides"))

    def masked_fill(self, hidden: Tensor, value: Any) -> Scores:
        self._before_softmax("masks")
        if hidden.dtype != torch.bool or _number(value, "fills") > _MASKED:
            raise _refuse(f"fills scores with {value} by a mask of {hidden.dtype}")
        sees = ~hidden[(None,) * (self.dim() - hidden.dim())]
        return self._with(mask=sees if self.mask is None else self.mask & sees)

    def softmax(self, dim: Any = None, **options: Any) -> Scores:
        self._before_softmax("takes the softmax of")
        if dim not in (-1, self.dim() - 1):
            raise _refuse(f"takes a softmax over dimension {dim}")
        return self._with(are_weights=True)

    def dropout(self, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Scores:
        if not self.are_weights or (self.p and p and training):
            raise _refuse("drops scores, or weights twice")
        return self._with(p=p) if training and p else self

    def matmul(self, value: Any) -> Tensor:
        from heddle._hf_models import weights_are_asked_for

        if not self.are_weights or not isinstance(value, Tensor):
            raise _refuse("multiplies scores without a softmax")
        # Some widen query and key for the product. A wider bias of each head (ALiBi) says more than 16 bits hold.
        wide = self.bias is not None and self.bias.dtype == torch.float32 and self.bias.shape[1] > 1
        dtype = torch.promote_types(value.dtype, torch.float32) if wide else value.dtype
        q, k, v = (t.to(dtype) for t in (self.query, self.key, value))
        q, k, v = (t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in (q, k, v))
        asked = weights_are_asked_for()
        options: dict[str, Any] = {"bias": self.bias, "mask": self.mask, "dropout": self.p, "return_weights": asked}
        with torch.autocast(v.device.type, enabled=False) if wide else contextlib.nullcontext():
            found = attention(q, k, v, scale=self.scale, **options)
        if asked:
            self.found[:] = [found[1].to(value.dtype)]
        out: Tensor = found[0] if asked else found
        return out.to(value.dtype)

    float = type_as = to
    __add__ = __radd__ = add
    __mul__ = __rmul__ = mul
    __truediv__ = div
    __matmul__ = matmul


def _where(condition: Tensor, scores: Any, other: Any) -> Scores:
    if not isinstance(scores, Scores):
        raise _refuse("chooses between other numbers and its scores")
    return scores.masked_fill(~condition, other)


def _either(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose other operand may be the first."""
    return lambda a, b: method(a, b) if isinstance(a, Scores) else method(b, a)


_KNOWN: dict[str, Callable[..., Any]] = {
    "add": _either(Scores.add),
    "mul": _either(Scores.mul),
    "masked_fill": Scores.masked_fill,
    "softmax": Scores.softmax,
    "dropout": Scores.dropout,
    "matmul": Scores.matmul,
    "where": _where,
}
_KNOWN |= {f"__{name}__": _KNOWN[name] for name in ("add", "mul", "matmul")}
_KNOWN |= {f"__r{name}__": _KNOWN[name] for name in ("add", "mul")}


class _Noting(TorchFunctionMode):
    """In this thread and these calls alone, the product of query and key is not formed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = func in (torch.matmul, Tensor.matmul, Tensor.__matmul__)
        if first and not kwargs and all(isinstance(t, Tensor) and t.dim() == 4 for t in args):
            return Scores(args[0], args[1].transpose(-1, -2))
        return func(*args, **(kwargs or {}))


def _settled(value: Any) -> Any:
    """A layer's results, with its weights in the place of what was noted."""
    if isinstance(value, Scores):
        return value.found[0] if value.found else None
    return type(value)(map(_settled, value)) if type(value) in (tuple, list) else value


def _has_static_cache(given: list[Any]) -> bool:
    from transformers import StaticCache

    return any(isinstance(each, StaticCache) for each in given)


@functools.cache
def of(kind: Any) -> Any:
    """A layer's class whose attention is heddle's."""

    class Layer(kind):  # type: ignore[misc]
        _heddle_of = kind

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if kind.__name__ == "GPTNeoSelfAttention" and _has_static_cache([*args, *kwargs.values()]):
                raise NotImplementedError(
                    "GPTNeoSelfAttention takes the rows of its window from the end of a static cache, where its "
                    "queries are not (with attn_implementation='eager', too): use a dynamic cache"
                )
            with _Noting():
                return _settled(super().forward(*args, **kwargs))

    Layer.__name__ = Layer.__qualname__ = f"Heddle{kind.__name__}"
    return Layer
