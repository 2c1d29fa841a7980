# SPDX-License-Identifier: Apache-2.0
"""Modules for torch.nn: NormLinear, SelfAttention, TransformerBlock, LlamaBlock; MultiheadAttention and
TransformerEncoderLayer in place of PyTorch's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import Dropout, Linear, Module, Parameter, init

from heddle import _nn_prepared, attention
from heddle._errors import HeddleValueError
from heddle._heads import attention_of_heads, parts_of
from heddle._kinds import need_tensors
from heddle._nn_linear import added, idle, untouched
from heddle._nn_multihead import MultiheadAttention, TransformerEncoderLayer, own
from heddle._ops import quick, quick_linear
from heddle._options import Activation, Causal, activation_of, causal_of, eps_of, is_gated, norm_of
from heddle._torch import long_linear

__all__ = [
    "LlamaBlock",
    "MultiheadAttention",
    "NormLinear",
    "SelfAttention",
    "TransformerBlock",
    "TransformerEncoderLayer",
]

Norm = Literal["layer", "rms", "none"]
_goes_long, is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled

if TYPE_CHECKING:  # not every torch has torch.distributed
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from heddle.parallel import ContextParallel

Processes: TypeAlias = "ProcessGroup | DeviceMesh | ContextParallel"


def _processes(given: Processes | None) -> ContextParallel | None:
    if given is None:
        return None
    from heddle.parallel import ContextParallel

    return given if isinstance(given, ContextParallel) else ContextParallel(given)


class NormLinear(Module):
    """act(norm(x)·weightᵀ + bias): LayerNorm (or RMSNorm), Linear and activation in one, forward and backward.

    Args:
        in_features, out_features: k and n.
        bias: whether the Linear has a bias.
        norm: "layer", "rms" or "none"; "rms" has no beta, and "none", a Linear alone, neither gamma nor eps.
        eps: added to the variance.
        affine: whether the norm has gamma (and beta).
        activation: "gelu", "gelu_tanh", "silu" or None; "geglu", "geglu_tanh" or "swiglu": of two halves, with 2n rows
            in weight and bias, the gate's first.
        return_norm: give (y, norm(x)), with gamma and beta, as blocks need that add the norm's result; not with "none".
        device, dtype: of the parameters.

    Shapes:
        [..., k] to [..., n], with return_norm and [..., k]. weight [n, k], bias [n], gamma [k], beta [k]. float32,
        bfloat16 or float16 on CPU or CUDA, float64 on the CPU.

    Raises:
        ValueError: sizes that are not positive, an unknown norm or activation; then as heddle.norm_linear.

    With ``keep_prepared`` set to True on a module (or the class), in eval mode, on the CPU, without gradients and with
    more than 8 rows, the weight's panels, which forward else makes in every call, are kept (4 bytes an element; results
    have the same bits) until the weight is another one. It is off unless asked for: a change of a few elements past the
    version counter, through ``.data`` or memory shared with NumPy, may not be seen.

    Source: see heddle.norm_linear. Initial values as torch.nn.LayerNorm and torch.nn.Linear.
    """

    keep_prepared = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        norm: Norm = "layer",
        eps: float = 1e-5,
        affine: bool = True,
        activation: Activation = None,
        return_norm: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if in_features < 1 or out_features < 1:
            raise HeddleValueError(f"in_features = {in_features} and out_features = {out_features} must be positive")
        norm_of(norm)
        eps_of(eps, norm)
        rows = out_features * (2 if is_gated(activation_of(activation)) else 1)
        if return_norm and norm == "none":
            raise HeddleValueError("return_norm is given, but with norm = 'none' z is x")
        self.activation, self.return_norm = activation, return_norm
        self.in_features, self.out_features, self.norm, self.eps = in_features, out_features, norm, eps

        def vector(size: int, wanted: bool) -> Parameter | None:
            return Parameter(torch.empty(size, device=device, dtype=dtype)) if wanted else None

        self.weight = Parameter(torch.empty(rows, in_features, device=device, dtype=dtype))
        self.bias = vector(rows, bias)
        self.gamma = vector(in_features, affine and norm != "none")
        self.beta = vector(in_features, affine and norm == "layer")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As torch.nn.Linear and torch.nn.LayerNorm do."""
        init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            init.uniform_(self.bias, -bound, bound)
        if self.gamma is not None:
            init.ones_(self.gamma)
        if self.beta is not None:
            init.zeros_(self.beta)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """[..., in_features] to [..., out_features], and residual added to it; with return_norm a tuple of that and
        norm(x), like x. Errors as heddle.norm_linear."""
        its: dict[str, Any] = {} if _goes_long() else self.__dict__  # attributes of a module take longer
        try:
            own_ones = its["_parameters"]
            weight, bias, gamma, beta = own_ones["weight"], own_ones["bias"], own_ones["gamma"], own_ones["beta"]
            eps, norm, activation, return_norm = its["eps"], its["norm"], its["activation"], its["return_norm"]
        except KeyError:  # also where some are parametrised
            weight, bias, gamma, beta = own(self, "weight", "bias", "gamma", "beta")
            eps, norm, activation, return_norm = self.eps, self.norm, self.activation, self.return_norm
        if not self.training and self.keep_prepared and not (_goes_long() or return_norm or is_grad_enabled()):
            y = _nn_prepared.forward(self, x, (weight, bias, gamma, beta), eps, residual)
            if y is not NotImplemented:
                return y
        # What norm_linear does, one call less.
        if not return_norm:
            y = quick_linear(x, weight, bias, gamma, beta, eps, norm, activation, residual)
            if y is not NotImplemented:
                return y
        return long_linear(x, weight, bias, gamma, beta, eps, norm, activation, residual, return_norm)

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, norm={self.norm!r}, "
            f"eps={self.eps}, affine={self.gamma is not None}"
            + (f", activation={self.activation!r}" if self.activation else "")
            + (", return_norm=True" if self.return_norm else "")
        )


class SelfAttention(Module):
    """Multi-head self-attention with its projections; with `norm`, a norm in front, fused with the first.

    Args:
        dim: features in and out.
        heads: query heads; divides dim.
        kv_heads: key and value heads; divides heads. Default: heads.
        norm: None, "layer" or "rms".
        bias: whether the projections have a bias.
        causal, window, softcap: as heddle.attention.
        dropout: probability that a weight is dropped, in training.
        eps: of the norm.
        context_parallel: the processes that sequences are divided among: a heddle.parallel.ContextParallel, or a
            ProcessGroup or DeviceMesh to make one of. x is then this process's part of them (its `shard`).
        device, dtype: of the parameters.

    Shapes:
        x [b, s, dim] to [b, s, dim]; bias and mask of forward broadcast to [b, heads, s, s], residual is [b, s, dim],
        segments are int32 [s] or [b, s]; block_rows, block_columns and block_size are heddle.attention's.

    Raises:
        ValueError: heads that do not divide; then as heddle.attention.
        NotImplementedError: with context_parallel, bias or mask, which are of whole sequences.

    Source: Vaswani et al., "Attention is all you need", 2017; Ainslie et al., "GQA", 2023.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        norm: Norm | None = None,
        bias: bool = True,
        causal: Causal = None,
        window: tuple[int | None, int | None] | None = None,
        softcap: float = 0.0,
        dropout: float = 0.0,
        eps: float = 1e-5,
        context_parallel: Processes | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if dim < 1:
            raise HeddleValueError(f"dim = {dim} must be positive")
        if heads < 1 or dim % heads:
            raise HeddleValueError(f"heads = {heads} does not divide dim = {dim}")
        if kv_heads < 1 or heads % kv_heads:
            raise HeddleValueError(f"kv_heads = {kv_heads} does not divide heads = {heads}")
        if not 0 <= dropout < 1:
            raise HeddleValueError(f"dropout = {dropout} is not in [0, 1)")
        causal_of(causal, 1, 1)
        self.dim, self.heads, self.kv_heads, self.head_dim = dim, heads, kv_heads, dim // heads
        self.causal, self.window, self.softcap, self.dropout = causal, window, softcap, dropout
        features = (heads + 2 * kv_heads) * self.head_dim
        self.qkv: Module
        if norm is None:
            self.qkv = Linear(dim, features, bias, device=device, dtype=dtype)
        else:
            self.qkv = NormLinear(dim, features, bias, norm=norm, eps=eps, device=device, dtype=dtype)
        self.out = Linear(dim, dim, bias, device=device, dtype=dtype)
        self.processes = _processes(context_parallel)

    def forward(
        self,
        x: Tensor,
        *,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        residual: Tensor | None = None,
        segments: Tensor | None = None,
        block_rows: Tensor | None = None,
        block_columns: Tensor | None = None,
        block_size: int | tuple[int, int] | None = None,
    ) -> Tensor:
        """[b, s, dim] to [b, s, dim], and residual added to it; errors as heddle.attention."""
        if type(x) is not Tensor or x.layout is not torch.strided or x.is_nested:
            need_tensors(x=x)
        if x.dim() != 3 or x.shape[2] != self.dim:
            raise HeddleValueError(f"x has shape {list(x.shape)}, but must have [b, s, {self.dim}]")
        b, s, dim = x.shape
        if _goes_long():
            qkv, out = self.qkv, self.out
        else:  # attributes of a module take up to 2 µs
            modules: Any = self._modules
            qkv, out = modules["qkv"], modules["out"]
        heads = qkv(x).view(b, s, self.heads + 2 * self.kv_heads, self.head_dim)
        o: Any = NotImplemented
        dropout = self.dropout if self.training else 0.0
        alone = bias is None and mask is None and self.window is None and self.processes is None
        alone = alone and segments is block_rows is block_columns is None and block_size is None
        alone = alone and not (self.softcap or dropout)
        if alone:
            o = attention_of_heads(heads, self.heads, self.kv_heads, self.causal)
        if o is NotImplemented:
            q, k, v = parts_of(heads, self.heads, self.kv_heads)
            if alone and not _goes_long():
                o = quick(q, k, v, self.causal, None)
        if o is NotImplemented:
            lists = {"block_rows": block_rows, "block_columns": block_columns, "block_size": block_size}
            o = self._attend(q, k, v, {"bias": bias, "mask": mask}, lists | {"q_segments": segments}, dropout)
        return added(out, o.transpose(1, 2).reshape(b, s, dim), residual)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, of_whole: dict[str, Any], given: dict[str, Any], dropout: float
    ) -> Tensor:
        """of_whole: options that are of whole sequences."""
        options: dict[str, Any] = {"causal": self.causal, "window": self.window, "softcap": self.softcap}
        o: Tensor
        options |= {"dropout": dropout, **given}
        if self.processes is None:
            o = attention(q, k, v, **options, **of_whole)
        elif any(value is not None for value in of_whole.values()):
            raise NotImplementedError("bias and mask are of whole sequences, which context_parallel divides")
        else:
            o = self.processes.attention(q, k, v, **options)
        return o

    def extra_repr(self) -> str:
        return f"{self.dim}, heads={self.heads}, kv_heads={self.kv_heads}, causal={self.causal!r}"


class TransformerBlock(Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): a pre-norm block. Both norms are one with the Linear behind them,
    GELU with the one in front, and where nothing is dropped the sums with the Linear that makes what is added.

    Args:
        dim, heads, kv_heads, norm, causal, window, softcap: as SelfAttention; norm is "layer" or "rms".
        hidden: features inside the MLP. Default: 4·dim.
        dropout: of attention's weights and of what each half adds, in training.
        bias, eps, context_parallel, device, dtype: as SelfAttention.

    Shapes:
        [b, s, dim] to [b, s, dim].

    Raises:
        ValueError: as SelfAttention.

    Source: Vaswani et al., 2017; Xiong et al., "On layer normalization in the transformer architecture", 2020.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        hidden: int | None = None,
        norm: Norm = "layer",
        bias: bool = True,
        causal: Causal = None,
        window: tuple[int | None, int | None] | None = None,
        softcap: float = 0.0,
        dropout: float = 0.0,
        eps: float = 1e-5,
        context_parallel: Processes | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden = 4 * dim if hidden is None else hidden
        self.attention = SelfAttention(
            dim,
            heads,
            kv_heads,
            norm=norm,
            bias=bias,
            causal=causal,
            window=window,
            softcap=softcap,
            dropout=dropout,
            eps=eps,
            context_parallel=context_parallel,
            device=device,
            dtype=dtype,
        )
        self.up = NormLinear(dim, hidden, bias, norm=norm, eps=eps, activation="gelu", device=device, dtype=dtype)
        self.down = Linear(hidden, dim, bias, device=device, dtype=dtype)
        self.drop = Dropout(dropout)

    def forward(self, x: Tensor, *, bias: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """[b, s, dim] to [b, s, dim]; bias and mask as SelfAttention's."""
        attention, up, down, drop = own(self, "attention", "up", "down", "drop")
        if not idle(drop):
            x = x + drop(attention(x, bias=bias, mask=mask))
            result: Tensor = x + drop(down(up(x)))
            return result
        if untouched(attention, SelfAttention):
            x = attention(x, bias=bias, mask=mask, residual=x)
        else:
            x = x + attention(x, bias=bias, mask=mask)
        return added(down, up(x), x)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first half of the head dim with the second as pairs, each turned by its angle."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class LlamaBlock(Module):
    """A block as Llama has it: x + attention(RMSNorm(x)) with rotary positions, then x + SwiGLU(RMSNorm(x)); both norms
    are fused with the Linear behind them, which is one for q, k and v, and one for gate and up, with SwiGLU, and the
    sums with the Linear that makes what is added.

    Args:
        dim: features in and out.
        heads, kv_heads: as SelfAttention.
        hidden: features inside the MLP. Default: 8/3·dim, rounded up to a multiple of 64.
        head_dim: even. Default: dim/heads.
        rope_theta: base of the rotary angles: pair i of position p turns by p·rope_theta^(-2i/head_dim).
        bias: whether q, k, v, gate and up have a bias (Qwen2: q, k and v alone; set the others' to zero).
        causal, window, eps, device, dtype: as SelfAttention; causal is "bottom_right" if not told otherwise.

    Shapes:
        [b, s, dim] to [b, s, dim]; positions [s] or [b, s], default 0 to s - 1. float32, bfloat16, float16 on CPU or
        CUDA. qkv.weight is [(heads + 2·kv_heads)·head_dim, dim], q's rows first; up.weight [2·hidden, dim], gate first.

    Raises:
        ValueError: as SelfAttention; an odd head_dim.

    Source: Touvron et al., "LLaMA", 2023; Su et al., "RoFormer", 2021; Shazeer, "GLU variants improve transformer",
    2020.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        hidden: int | None = None,
        head_dim: int | None = None,
        rope_theta: float = 10000.0,
        bias: bool = False,
        causal: Causal = "bottom_right",
        window: tuple[int | None, int | None] | None = None,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if dim < 1 or heads < 1 or (head_dim is None and dim % heads):
            raise HeddleValueError(f"heads = {heads} does not divide dim = {dim}")
        if kv_heads < 1 or heads % kv_heads:
            raise HeddleValueError(f"kv_heads = {kv_heads} does not divide heads = {heads}")
        head_dim = dim // heads if head_dim is None else head_dim
        if head_dim < 2 or head_dim % 2:
            raise HeddleValueError(f"head_dim = {head_dim} is not even and positive")
        causal_of(causal, 1, 1)
        hidden = -(-8 * dim // 192) * 64 if hidden is None else hidden
        self.dim, self.heads, self.kv_heads, self.head_dim = dim, heads, kv_heads, head_dim
        self.rope_theta, self.causal, self.window = rope_theta, causal, window
        self.qkv = NormLinear(
            dim, (heads + 2 * kv_heads) * head_dim, bias, norm="rms", eps=eps, device=device, dtype=dtype
        )
        self.out = Linear(heads * head_dim, dim, False, device=device, dtype=dtype)
        self.up = NormLinear(dim, hidden, bias, norm="rms", eps=eps, activation="swiglu", device=device, dtype=dtype)
        self.down = Linear(hidden, dim, False, device=device, dtype=dtype)

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles, float32 [..., s, head_dim/2]."""
        pairs = torch.arange(0, self.head_dim, 2, device=positions.device, dtype=torch.float32)
        angles = positions[..., None].float() * self.rope_theta ** (-pairs / self.head_dim)
        return angles.cos(), angles.sin()

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        seqlens: Tensor | None = None,
    ) -> Tensor:
        """[b, s, dim] to [b, s, dim]; mask as heddle.attention's, seqlens as its seqlens_q and seqlens_k."""
        need_tensors(x=x)
        if x.dim() != 3 or x.shape[2] != self.dim:
            raise HeddleValueError(f"x has shape {list(x.shape)}, but must have [b, s, {self.dim}]")
        positions = torch.arange(x.shape[1], device=x.device) if positions is None else positions
        cos, sin = self.rotation(positions)
        heads = self.qkv(x).unflatten(-1, (self.heads + 2 * self.kv_heads, self.head_dim))
        # Not by slices, whose gradients are filled and added.
        turned, v = torch.split(heads, [self.heads + self.kv_heads, self.kv_heads], 2)
        # Rounded as the model is, as in the usual code.
        turned = _rotated(turned, cos.unsqueeze(-2).to(turned.dtype), sin.unsqueeze(-2).to(turned.dtype))
        q, k = torch.split(turned, [self.heads, self.kv_heads], 2)
        o: Tensor = attention(
            *(t.transpose(1, 2) for t in (q, k, v)),
            causal=self.causal,
            window=self.window,
            mask=mask,
            seqlens_q=seqlens,
            seqlens_k=seqlens,
        )
        x = added(self.out, o.transpose(1, 2).flatten(2), x)
        return added(self.down, self.up(x), x)

    def extra_repr(self) -> str:
        return f"{self.dim}, heads={self.heads}, kv_heads={self.kv_heads}, rope_theta={self.rope_theta}"
