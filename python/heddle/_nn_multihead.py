# SPDX-License-Identifier: Apache-2.0
"""PyTorch's MultiheadAttention and TransformerEncoderLayer on heddle: the same arguments, parameters and state dicts.

They are subclasses that compute differently, so that a module of PyTorch's class becomes one by its class alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heddle import attention
from heddle._errors import HeddleTypeError, HeddleValueError
from heddle._heads import attention_of_heads
from heddle._kinds import bias_of, need_tensors
from heddle._nn_linear import activated, activation_name, added, idle, lies, norm_fits, stays, untouched
from heddle._ops import quick
from heddle._plain import new_rng_state
from heddle._tangents import kept
from heddle._torch import norm_linear

Masks = dict[str, Any]


def _split(mask: Tensor | None, name: str) -> tuple[Tensor | None, Tensor | None]:
    """PyTorch's mask, of bools that hide or of numbers that are added, as heddle's two."""
    if mask is None:
        return None, None
    need_tensors(**{name: mask})
    if mask.dtype == torch.bool:
        return ~mask, None
    if not mask.is_floating_point():
        raise HeddleTypeError(f"{name} is {mask.dtype}, but must be bool or floating point")
    return None, mask


_goes_long = torch.compiler.is_dynamo_compiling
linear: Any = torch._C._nn.linear  # what F.linear is


def own(module: nn.Module, *names: str) -> list[Any]:
    """Its parameters and modules: what its attributes are, which PyTorch takes up to 2 µs each to look up."""
    if _goes_long():
        return [getattr(module, name) for name in names]
    parameters, modules = module._parameters, module._modules
    try:
        return [parameters[name] for name in names]
    except KeyError:  # others among them, or parametrised ones
        pass
    found: list[Any] = []
    for name in names:
        if name in parameters:
            found.append(parameters[name])
        else:
            found.append(modules[name] if name in modules else getattr(module, name))
    return found


def _both(a: Tensor | None, b: Tensor | None, how: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
    return b if a is None else a if b is None else how(a, b)


def _turned(heads: Tensor, batch_first: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of [b, s, 3·h, d], or [s, b, ...], as [b, h, s, d]. Divided first: so one copy puts their gradients
    together."""
    q, k, v = heads.chunk(3, 2)  # split() is in Python
    if batch_first:
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention, with the same arguments, parameters, masks and results, on heddle's attention.

    Args:
        As torch.nn.MultiheadAttention: embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim,
        batch_first, device, dtype.

    Shapes:
        As there: query [L, N, E], or [N, L, E] with batch_first, or [L, E]. Dtypes and devices as heddle.attention.

    Raises:
        TypeError, ValueError: as heddle.attention; masks that are neither bool nor floating point, or of wrong shapes;
        nested tensors. RuntimeError: is_causal without attn_mask, as there.

    Where a mask hides all keys from a query, its result is that of zeros (PyTorch's with need_weights is NaN), and its
    weights are zeros. With dropout other weights are dropped than PyTorch's generator drops, with the same probability.

    Source: Vaswani et al., "Attention is all you need", 2017.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(output, weights or None), as torch.nn.MultiheadAttention."""
        if (
            key is query
            and value is query
            and key_padding_mask is attn_mask is None
            and not (need_weights or is_causal)
        ):
            made = self._plain(query)
            if made is not None:
                return made, None
        need_tensors(query=query, key=key, value=value)
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            raise HeddleValueError(
                f"query, key and value have {query.dim()}, {key.dim()} and {value.dim()} dimensions: must be the same, "
                "2 or 3"
            )
        if query.shape[-1] != self.embed_dim:
            raise HeddleValueError(f"query has {query.shape[-1]} features, but embed_dim = {self.embed_dim}")
        batched, first = query.dim() == 3, self.batch_first
        alike = key is query and value is query
        if not batched:
            first, (query, key, value) = True, (t.unsqueeze(0) for t in (query, key, value))
        if alike and self._qkv_same_embed_dim:
            q, k, v = self._three(F.linear(query, *own(self, "in_proj_weight", "in_proj_bias")), first)
        else:
            q, k, v = (self._heads(t, self.num_heads, first) for t in self._projected(query, key, value))
        made, weights = self._attend(
            q, k, v, first, key_padding_mask, attn_mask, is_causal, batched, need_weights, average_attn_weights
        )
        return (made, weights) if batched else (made.squeeze(0), None if weights is None else weights.squeeze(0))

    def _plain(self, x: Tensor) -> Tensor | None:
        """Self-attention without masks and weights, step by step, since calls and look-ups are half of a small one.

        None for all that the way of many steps has to look at, also what it refuses."""
        if type(x) is not Tensor or x.is_nested or _goes_long() or x.dim() != 3 or x.layout is not torch.strided:
            return None
        parameters, out = self._parameters, self._modules["out_proj"]
        try:
            weight, bias = parameters["in_proj_weight"], parameters["in_proj_bias"]
            bias_k = parameters["bias_k"] if "bias_k" in parameters else self.__dict__["bias_k"]
            last: Any = out and (out._parameters["weight"], out._parameters["bias"])
        except KeyError:  # parametrised
            return None
        a, b, features = x.shape
        if weight is None or bias_k is not None or features != self.embed_dim or self.add_zero_attn:
            return None
        heads = linear(x, weight, bias).view(a, b, 3 * self.num_heads, self.head_dim)
        drops, made = self.training and self.dropout, NotImplemented
        if not drops:
            of_batches = heads if self.batch_first else heads.transpose(0, 1)
            made = attention_of_heads(of_batches, self.num_heads, self.num_heads, None)
        if made is NotImplemented:
            q, k, v = _turned(heads, self.batch_first)
            if drops:
                made = attention(q, k, v, dropout=self.dropout)
            else:
                made = quick(q, k, v, None, None)
                if made is NotImplemented:
                    made = attention(q, k, v)
        made = made.transpose(1, 2) if self.batch_first else made.permute(2, 0, 1, 3)
        projected: Tensor = linear(made.flatten(2), *last)
        return projected

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        if self._qkv_same_embed_dim:
            parts = self.in_proj_weight.chunk(3)
        else:
            parts = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(F.linear(*each) for each in zip((query, key, value), parts, biases, strict=True))

    def _heads(self, t: Tensor, h: int, first: bool) -> Tensor:
        """[b, s, h * head_dim], or [s, b, ...], as [b, h, s, head_dim]."""
        t = t.view(*t.shape[:2], h, self.head_dim)
        return t.transpose(1, 2) if first else t.permute(1, 2, 0, 3)

    def _three(self, qkv: Tensor, first: bool) -> tuple[Tensor, ...]:
        return _turned(qkv.view(*qkv.shape[:2], 3 * self.num_heads, self.head_dim), first)

    def _masks(
        self, padding: Tensor | None, attn: Tensor | None, b: int, sq: int, sk: int, batched: bool, dtype: torch.dtype
    ) -> Masks:
        """heddle's mask and bias, [b or 1, h or 1, sq or 1, sk]."""
        if attn is not None:
            shapes: tuple[tuple[int, ...], ...] = ((sq, sk), (b * self.num_heads, sq, sk))
            if tuple(attn.shape) not in shapes:
                raise HeddleValueError(f"attn_mask has shape {list(attn.shape)}, but must have one of {shapes}")
            attn = attn[None, None] if attn.dim() == 2 else attn.reshape(b, self.num_heads, sq, sk)
        if padding is not None:
            if tuple(padding.shape) != ((b, sk) if batched else (sk,)):
                raise HeddleValueError(
                    f"key_padding_mask has shape {list(padding.shape)}, but must have {[b, sk] if batched else [sk]}"
                )
            padding = padding.reshape(b, 1, 1, sk)
        (mask, bias), (hidden, more) = _split(attn, "attn_mask"), _split(padding, "key_padding_mask")
        mask, bias = _both(mask, hidden, torch.logical_and), _both(bias, more, torch.add)
        added = (self.bias_k is not None) + self.add_zero_attn
        if added:
            mask = None if mask is None else F.pad(mask, (0, added), value=True)
            bias = None if bias is None else F.pad(bias, (0, added))
        return {"mask": mask, "bias": None if bias is None else bias_of(bias, dtype)}

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        first: bool,
        padding: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        batched: bool = True,
        need_weights: bool = False,
        average: bool = True,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """What follows the projections, of [b, h, s, head_dim]; the output is [s, b, embed_dim] if not `first`, and
        residual is added to it."""
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        # The hint says what attn_mask is; with anything beside it the mask itself is used: what is added stands behind
        # the keys, where the corner would hide it (as PyTorch's own hint does, and its mask does not).
        bias_k, bias_v = own(self, "bias_k", "bias_v")
        causal = is_causal and padding is None and not need_weights and not (self.add_zero_attn or bias_k is not None)
        (b, h, sq, _), sk = q.shape, k.shape[2]
        masks = (
            {}
            if causal or padding is attn_mask is None
            else self._masks(padding, attn_mask, b, sq, sk, batched, q.dtype)
        )
        if bias_k is not None and bias_v is not None:
            k, v = (
                torch.cat((t, more.reshape(1, h, 1, self.head_dim).expand(b, -1, -1, -1).to(t.dtype)), 2)
                for t, more in ((k, bias_k), (v, bias_v))
            )
        if self.add_zero_attn:
            k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
        dropout = self.dropout if self.training else 0.0
        options = {"causal": "top_left" if causal else None, "dropout": dropout, **masks}
        weights = None
        if need_weights:
            state = new_rng_state(q.device) if dropout else None
            made, weights = attention(q, k, v, rng_state=state, return_weights=True, **options)
            if state is not None:  # PyTorch's are as they were used
                heads_of = torch.arange(b * h, device=q.device).reshape(b, h)
                z = kept(state, dropout, heads_of, range(sq), range(k.shape[2]))
                weights = weights * z.to(weights.dtype)
            weights = weights.mean(1) if average else weights
        else:
            made = attention(q, k, v, **options)
        made = (made.transpose(1, 2) if first else made.permute(2, 0, 1, 3)).flatten(2)
        (out,) = own(self, "out_proj")
        weight, bias = own(out, "weight", "bias")  # read, as PyTorch does: out_proj is not called
        if residual is not None and lies(weight, bias) and stays(made, weight, residual):
            return norm_linear(made, weight, bias, norm="none", residual=residual), weights
        made = F.linear(made, weight, bias)
        return made if residual is None else residual + made, weights


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """torch.nn.TransformerEncoderLayer, with the same arguments, parameters and results, on heddle's operations.

    With norm_first both norms are fused with the Linear behind them, GELU and SiLU with linear1, and where nothing is
    dropped the sums with the Linear that makes what is added; forward and backward.

    Args:
        As torch.nn.TransformerEncoderLayer: d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps,
        batch_first, norm_first, bias, device, dtype.

    Shapes:
        As there: src [S, N, E], or [N, S, E] with batch_first, or [S, E]. Dtypes and devices as heddle.attention.

    Raises:
        As MultiheadAttention. A nested tensor is a TypeError: torch.nn.TransformerEncoder makes none for these layers.

    Source: Vaswani et al., 2017; Xiong et al., "On layer normalization in the transformer architecture", 2020.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.self_attn.__class__ = MultiheadAttention

    @property
    def activation_relu_or_gelu(self) -> int:
        """0: torch.nn.TransformerEncoder takes it for a layer without PyTorch's own fast path, and nests nothing."""
        return 0

    @activation_relu_or_gelu.setter
    def activation_relu_or_gelu(self, value: int) -> None:
        pass

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """As torch.nn.TransformerEncoderLayer."""
        need_tensors(src=src)
        attn: Any = self.self_attn
        if src.dim() not in (2, 3) or src.shape[-1] != attn.embed_dim:
            raise HeddleValueError(
                f"src has shape {list(src.shape)}, but must have [..., {attn.embed_dim}], 2 or 3 sizes"
            )
        batched = src.dim() == 3
        x = src if batched else src.unsqueeze(0)
        first = attn.batch_first or not batched
        activation: Any = self.activation

        def attend(x: Tensor, norm: nn.LayerNorm | None) -> Tensor:
            """x + attention, of norm(x)"""
            if not untouched(attn, MultiheadAttention):  # another, or somebody looks at what goes in and comes out
                y = x if norm is None else norm(x)
                y = y if batched else y.squeeze(0)
                masks: Masks = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask, "is_causal": is_causal}
                y = attn(y, y, y, need_weights=False, **masks)[0]
                summed: Tensor = x + self.dropout1(y if batched else y.unsqueeze(0))
                return summed
            weights: tuple[Any, Any] = (attn.in_proj_weight, attn.in_proj_bias)
            qkv = _normed(x, *weights, norm)
            if qkv is None:
                qkv = F.linear(x if norm is None else norm(x), *weights)
            residual = x if idle(self.dropout1) else None
            heads = attn._three(qkv, first)
            made, _ = attn._attend(*heads, first, src_key_padding_mask, src_mask, is_causal, batched, residual=residual)
            result: Tensor = made if residual is not None else x + self.dropout1(made)
            return result

        def forward(x: Tensor, norm: nn.LayerNorm | None) -> Tensor:
            """x + MLP, of norm(x)"""
            one: Any = self.linear1
            name = activation_name(activation)
            made = _normed(x, one.weight, one.bias, norm, name) if untouched(one, nn.Linear) else None
            if made is None:
                made = activated(one, x if norm is None else norm(x), activation)
            elif name is None:
                made = activation(made)
            made = self.dropout(made)
            return added(self.linear2, made, x) if idle(self.dropout2) else x + self.dropout2(self.linear2(made))

        if self.norm_first:
            x = attend(x, self.norm1)
            x = forward(x, self.norm2)
        else:
            x = self.norm1(attend(x, None))
            x = self.norm2(forward(x, None))
        return x if batched else x.squeeze(0)


def _normed(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: nn.LayerNorm | None, activation: str | None = None
) -> Tensor | None:
    """act(linear(norm(x))) in one; None where that cannot be."""
    if norm is None or not (untouched(norm, nn.LayerNorm) and lies(weight, bias)):
        return None
    vectors = norm.weight, norm.bias
    if not norm_fits(norm, x, vectors):
        return None
    made: Tensor = norm_linear(x, weight, bias, *vectors, norm.eps, activation=activation)
    return made
