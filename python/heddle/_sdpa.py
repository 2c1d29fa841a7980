# SPDX-License-Identifier: Apache-2.0
"""In the place of PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional
from torch import Tensor

from heddle import _kinds, attention
from heddle._errors import HeddleTypeError, HeddleValueError
from heddle._ops import quick, quick_options
from heddle._options import Causal, flag_of

_broadcast_shapes: Any = torch.broadcast_shapes
_compiling = torch.compiler.is_dynamo_compiling
_BOOL = torch.bool


def _as_four(tensor: Tensor, batch: tuple[int, ...], heads: int) -> Tensor:
    """[..., h, s, e] or [s, e] as [b, h, s, e], with its leading dimensions broadcast."""
    if tensor.dim() == 2:
        tensor = tensor.unsqueeze(0)
    if tensor.shape[-3] != heads:
        tensor = tensor.expand(*tensor.shape[:-3], heads, *tensor.shape[-2:])
    if tensor.dim() != 4 or tensor.shape[:-3] != batch:
        tensor = tensor.expand(*batch, *tensor.shape[-3:]).reshape(math.prod(batch), *tensor.shape[-3:])
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _mask_as_four(mask: Tensor, batch: tuple[int, ...], q: Tensor, k: Tensor) -> Tensor:
    if mask.dim() > 4 or (mask.dim() == 4 and len(batch) != 1) or (mask.dim() == 3 and len(batch) > 1):
        full = (*batch, q.shape[1], q.shape[2], k.shape[2])
        try:
            mask = mask.expand(full).reshape(math.prod(batch), *full[-3:])
        except RuntimeError:
            raise HeddleValueError(
                f"attn_mask has shape {list(mask.shape)}, but must broadcast to {list(full)}"
            ) from None
    return mask


def _corner_of(bias: Any, sq: int, sk: int) -> Any:
    """The corner that a CausalBias means, which depends on its own sizes."""
    if (bias.seq_len_q, bias.seq_len_kv) != (sq, sk):
        raise HeddleValueError(
            f"attn_mask is a CausalBias of [{bias.seq_len_q}, {bias.seq_len_kv}], but query and key have [{sq}, {sk}]"
        )
    corners = {"UPPER_LEFT": "top_left", "LOWER_RIGHT": "bottom_right"}
    if bias.variant.name not in corners:
        raise HeddleValueError(f"attn_mask is a CausalBias of variant {bias.variant}, none of {list(corners)}")
    return corners[bias.variant.name]


def _need_usual(**tensors: Any) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise HeddleTypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
        wrong = _kinds.stranger(name, tensor)
        if not wrong and _kinds.overrides_functions(tensor):
            wrong = (
                f"{name} is of class {type(tensor).__qualname__}, whose __torch_function__ answers for PyTorch's "
                "function: call that one, or give tensor.as_subclass(torch.Tensor)"
            )
        if wrong:
            raise HeddleTypeError(wrong)


def _quickly(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any
) -> Any:
    """The result by a short way (heddle._plain), or NotImplemented; a tuple of the state of dropout that was drawn."""
    if (is_causal is not False and is_causal is not True) or (enable_gqa is not False and enable_gqa is not True):
        return NotImplemented  # text is no flag, and numbers are rare
    corner = "top_left" if is_causal else None
    if attn_mask is None and dropout_p == 0.0:
        return quick(query, key, value, corner, scale, not enable_gqa)
    bias, mask = None, None
    if attn_mask is not None:
        if is_causal or type(attn_mask) not in _kinds.USUAL:
            return NotImplemented
        if attn_mask.dtype is _BOOL:
            mask = attn_mask
        else:
            bias = attn_mask
    return quick_options(
        query,
        key,
        value,
        corner,
        None,
        scale,
        0.0,
        bias,
        mask,
        None,
        None,
        dropout_p,
        None,
        None,
        None,
        False,
        None,
        False,
        not enable_gqa,
    )


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, computed by heddle.

    Args:
        query: [..., h, sq, d] or [sq, d]; float32, bfloat16 or float16 on CPU or CUDA, float64 on the CPU.
        key, value: [..., hk, sk, d] and [..., hk, sk, dv]; leading dimensions broadcast.
        attn_mask: broadcasts to [..., h, sq, sk]. bool: True takes part. A float is added, and has a gradient. A
            torch.nn.attention.bias.CausalBias of [sq, sk] names a corner.
        dropout_p: probability that a weight is dropped, whatever the mode of the module.
        is_causal: query i sees keys 0 to i (top left). Not together with attn_mask.
        scale: default 1/sqrt(d).
        enable_gqa: let hk be a divisor of h.

    Returns:
        [..., h, sq, dv]. A query that sees no key gets zeros.

    Raises:
        TypeError, ValueError, NotImplementedError: as heddle.attention; TypeError for a class of tensor that overrides
        PyTorch's function.

    Source: the documentation of PyTorch's function.
    """
    rng_state = None
    if not _compiling():
        out: Any = _quickly(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if type(out) is tuple:
            rng_state = out[0]
        elif out is not NotImplemented:
            result: Tensor = out
            return result
    return _at_length(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, rng_state)


def _at_length(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    dropout_p: Any,
    is_causal: Any,
    scale: Any,
    enable_gqa: Any,
    rng_state: Tensor | None,
) -> Tensor:
    """The same for what goes no short way."""
    is_causal, enable_gqa = flag_of("is_causal", is_causal), flag_of("enable_gqa", enable_gqa)
    _need_usual(query=query, key=key, value=value)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise HeddleValueError(f"{name} has {tensor.dim()} dimensions, but must have 2 or more")
    if is_causal and attn_mask is not None:
        raise HeddleValueError("attn_mask and is_causal=True cannot be given together")
    corner: Causal = "top_left" if is_causal else None
    if _kinds.is_causal_bias(attn_mask):
        corner, attn_mask = _corner_of(attn_mask, query.shape[-2], key.shape[-2]), None
    q_heads, k_heads, v_heads = (1 if t.dim() == 2 else t.shape[-3] for t in (query, key, value))
    if not enable_gqa and not (q_heads == k_heads == v_heads or 1 in (k_heads, v_heads, q_heads)):
        raise HeddleValueError(
            f"query has {q_heads} heads, key {k_heads}, value {v_heads}: enable_gqa=True lets them differ"
        )
    batch = tuple(query.shape[:-3])
    try:
        if not batch == key.shape[:-3] == value.shape[:-3]:
            batch = tuple(_broadcast_shapes(batch, key.shape[:-3], value.shape[:-3]))
    except RuntimeError:
        shapes = [list(t.shape) for t in (query, key, value)]
        raise HeddleValueError(f"the leading dimensions of query, key and value do not broadcast: {shapes}") from None
    heads = max(k_heads, v_heads) if enable_gqa else max(q_heads, k_heads, v_heads)
    shape = (*batch, q_heads if enable_gqa else heads, query.shape[-2], value.shape[-1])
    q = _as_four(query, batch, shape[-3])
    k, v = _as_four(key, batch, heads), _as_four(value, batch, heads)
    bias, mask = None, None
    if attn_mask is not None:
        _need_usual(attn_mask=attn_mask)
        if attn_mask.dim() > max(len(batch) + 3, 4):
            raise HeddleValueError(
                f"attn_mask has shape {list(attn_mask.shape)}: more dimensions than query, key and value"
            )
        attn_mask = _mask_as_four(attn_mask, batch, q, k)
        if attn_mask.dtype == torch.bool:
            mask = attn_mask
        else:
            bias = attn_mask
    options = {"causal": corner, "scale": scale, "bias": bias, "mask": mask, "dropout": dropout_p}
    out: Tensor = attention(q, k, v, rng_state=rng_state, **options)
    if query.dim() == key.dim() == value.dim() == 4:
        return out
    return out.reshape(shape[-2:] if query.dim() == key.dim() == value.dim() == 2 else shape)


# ---------------------------------------------------------------------------------------------------------- patch()


def _is_pytorchs(dropout_p: float, *tensors: Any) -> bool:
    """Whether patch() leaves a call to PyTorch: what heddle would refuse for its kind, and what others answer for."""
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            continue
        if _kinds.is_causal_bias(tensor) and tensor is tensors[-1]:
            continue
        if _kinds.stranger("", tensor) or _kinds.overrides_functions(tensor) or _kinds.answers(tensor):
            return True
        if tensor.device.type not in ("cpu", "cuda", "meta"):
            return True
    query, _, value, _ = tensors
    if isinstance(query, Tensor) and isinstance(value, Tensor) and query.dim() and value.dim():
        if query.dtype not in _DTYPES:
            return True
        if max(query.shape[-1], value.shape[-1]) > _WIDEST:
            return True
    return not _compiling() and _kinds.others_take_part(dropout_p != 0)


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # float64 is the reference's alone, which is slow
_WIDEST = 512  # head dim


class _Place:
    """torch.nn.functional.scaled_dot_product_attention, and who is in it: PyTorch's own, or ours within patch()."""

    lock = threading.Lock()
    own: Any = None  # what was there before the outermost patch()
    depth = 0  # of patch()
    away = 0  # of calls that are PyTorch's: classes of tensors know the function by its place, too


def _move(depth: int, away: int) -> None:
    with _Place.lock:
        if _Place.depth == 0:
            _Place.own = torch.nn.functional.scaled_dot_product_attention
        _Place.depth += depth
        _Place.away += away
        ours = _Place.depth > 0 and _Place.away == 0
        torch.nn.functional.scaled_dot_product_attention = _patched if ours else _Place.own


def _patched(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention within heddle.patch(): heddle's, or PyTorch's own."""
    double = getattr(query, "dtype", None) is torch.float64
    rng_state = None
    if not double and not _compiling():
        out: Any = _quickly(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if type(out) is tuple:
            rng_state = out[0]
        elif out is not NotImplemented:
            result: Tensor = out
            return result
    if not _is_pytorchs(dropout_p, query, key, value, attn_mask):
        try:
            return _at_length(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, rng_state)
        except (HeddleValueError, HeddleTypeError):
            pass  # PyTorch takes it, or says in its own words what is wrong
    if _compiling():
        traced: Tensor = _Place.own(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return traced
    _move(0, 1)
    try:
        own: Tensor = _Place.own(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return own
    finally:
        _move(0, -1)


# torch.jit.script knows built-in functions by this table: what it compiles has PyTorch's own operator.
_builtins: Any = torch.jit._builtins
_builtins._register_builtin(_patched, "aten::scaled_dot_product_attention")


@contextlib.contextmanager
def patch() -> Iterator[None]:
    """Within a ``with heddle.patch():``, torch.nn.functional.scaled_dot_product_attention is heddle's.

    For every caller in the process that looks it up there, torch.nn.MultiheadAttention included; not for those that
    took the function itself before (``from torch.nn.functional import scaled_dot_product_attention``), nor for
    PyTorch's C++ fast path of TransformerEncoderLayer in evaluation. Nested use is fine.

    PyTorch's own function computes what heddle does not take: nested, sparse and quantised tensors, classes with a
    ``__torch_function__`` or ``__torch_dispatch__`` of their own (DTensor), float64 (which here is the slow
    reference's), other dtypes and devices, head dims over 512, calls within torch.func's gradients, forward mode, or a
    TorchFunctionMode, and what torch.jit.script compiles.
    Calls that heddle refuses are PyTorch's, too, which says in its own words what is wrong with them.

    Raises:
        Nothing itself; calls inside raise what PyTorch's function does.

    Source: none.
    """
    _move(1, 0)
    try:
        yield
    finally:
        _move(-1, 0)
