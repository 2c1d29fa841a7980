# SPDX-License-Identifier: Apache-2.0
"""heddle: exact attention and fused LayerNorm+Linear, forward and backward, on the CPU and on NVIDIA GPUs.

``attention`` and ``norm_linear`` take torch tensors (with autograd, torch.compile, autocast) and whatever speaks DLPack
(NumPy, CuPy, JAX; without copies). Importing heddle imports neither torch nor NumPy. Further parts:

* ``torch.ops.heddle``, registered when heddle is imported after torch, or when ``heddle.ops`` or any part for torch is
  first used
* ``heddle.scaled_dot_product_attention`` and ``heddle.patch`` in place of PyTorch's; ``heddle`` is also the name of a
  flash attention for PyTorch's own switch, ``torch.nn.attention.activate_flash_attention_impl``
* ``heddle.flash_attn_func`` and its siblings, with FlashAttention's signatures
* ``heddle.parallel``: sequences divided among processes
* ``heddle.flex_attention``, with the signature of PyTorch's, for its common forms
* ``heddle.replace(model)`` for a model of PyTorch's modules
* ``heddle.nn`` modules, ``heddle.hf`` for transformers, ``heddle.compat.gpu_kernels``
* ``heddle.jax``: both operations within JAX's transformations
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any, Literal

from heddle import _C, _registry
from heddle._errors import HeddleTypeError
from heddle._options import Activation, Causal

__version__: str = _C.version()


_LAZY = {
    "scaled_dot_product_attention": "_sdpa",
    "flex_attention": "_flex",
    "patch": "_sdpa",
    "ops": "_ops",
    "replace": "_replace",
    "attention_append": "_append",
    "flash_attn_func": "_flash",
    "flash_attn_kvpacked_func": "_flash",
    "flash_attn_qkvpacked_func": "_flash",
    "flash_attn_varlen_func": "_flash",
    "flash_attn_varlen_kvpacked_func": "_flash",
    "flash_attn_varlen_qkvpacked_func": "_flash",
    "flash_attn_with_kvcache": "_flash",
    "nn": "nn",
    "hf": "hf",
    "compat": "compat",
    "parallel": "parallel",
    "jax": "jax",  # not in __all__: `from heddle import *` would hide JAX's own name
}

if TYPE_CHECKING:
    from heddle import compat, hf, nn, parallel
    from heddle import jax as jax
    from heddle._append import attention_append
    from heddle._flash import (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
        flash_attn_with_kvcache,
    )
    from heddle._flex import flex_attention
    from heddle._ops import ops
    from heddle._replace import replace
    from heddle._sdpa import patch, scaled_dot_product_attention

__all__ = [
    "attention",
    "attention_append",
    "attention_backward",
    "block_lists",
    "compat",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flex_attention",
    "hf",
    "info",
    "nn",
    "norm_linear",
    "norm_linear_backward",
    "norm_linear_prepare",
    "ops",
    "parallel",
    "patch",
    "replace",
    "scaled_dot_product_attention",
]


def __getattr__(name: str) -> Any:
    """Loads what needs torch or JAX when it is first asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module 'heddle' has no attribute {name!r}")
    module = importlib.import_module(f"heddle.{_LAZY[name]}")
    value = module if _LAZY[name] == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def info() -> str:
    """What this heddle is and can use, in a few lines: version, devices, instruction sets, torch. Needs no torch.

    Returns:
        Text for people. A device that is not there is named with the reason.
    """
    lines = [f"heddle {_C.version()} for Python {sys.version.split()[0]}"]
    for number, name in ((0, "cpu"), (2, "cuda"), (1, "ref")):
        there, text = _C.device(number)
        lines.append(f"{name}: {text}" if there else f"{name}: absent, {text}")
    there_isas, in_use = _C.isas()
    lines.append(f"instruction sets: {', '.join(there_isas)} (in use: {in_use}; HEDDLE_CPU chooses)")
    torch = sys.modules.get("torch")
    if torch is None:
        lines.append("torch: not imported")
    else:
        import heddle._ops  # noqa: F401  an ImportError here says what is wrong with this torch

        lines.append(f"torch: {torch.__version__}, operators registered as torch.ops.heddle")
    return "\n".join(lines)


# heddle._torch replaces these five when it is imported: an import statement in every call would cost half a µs.
# Functions, not None: where torch.compile traces the first call, its guards can take one function for another only.


def _goes_long() -> bool:
    """torch.compiler.is_dynamo_compiling, once heddle._torch is there."""
    return True


def _attention_of_torch(*args: Any, **options: Any) -> Any:
    from heddle._torch import attention as run

    return run(*args, **options)


def _norm_linear_of_torch(*args: Any, **options: Any) -> Any:
    from heddle._torch import norm_linear as run

    return run(*args, **options)


def _norm_linear_prepare_of_torch(*args: Any, **options: Any) -> Any:
    from heddle._torch import norm_linear_prepare as run

    return run(*args, **options)


# attention of plain tensors of torch, see heddle._plain; read only where _goes_long() is false
_quick: Any = None
_quick_options: Any = None


# Numbers of a plain call of attention; what else is given, text too, is looked at where the long way is gone. Python
# has one object for equal numbers of a file, so that these are the defaults themselves.
_ZERO, _NOWHERE = 0.0, 0
_NUMBERS = (float, int)


def _is_torch(value: Any) -> bool:
    if type(value).__module__.partition(".")[0] == "torch":
        return True
    return any(kind.__module__ == "torch" and kind.__name__ == "Tensor" for kind in type(value).__mro__)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Causal = None,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout: float = 0.0,
    rng_state: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqlens_q: Any = None,
    seqlens_k: Any = None,
    return_lse: bool = False,
    return_weights: bool = False,
    deterministic: bool | None = None,
    tf32: bool = False,
    q_offset: int = 0,
    k_offset: int = 0,
    h_offset: int = 0,
    whole_sq: int = 0,
    whole_sk: int = 0,
    whole_h: int = 0,
    block_table: Any = None,
    q_segments: Any = None,
    k_segments: Any = None,
    block_rows: Any = None,
    block_columns: Any = None,
    block_size: int | tuple[int, int] | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    multiprocessors: int = 0,
) -> Any:
    """softmax(scale·q·kᵀ + bias, masked)·v, exactly, with memory that grows with the lengths, not their product.

    Args:
        q: [b, h, sq, d], or [h, sq, d], or [sq, d]; packed sequences: [total_q, h, d]. float32, bfloat16 or float16 on
            CPU or CUDA; float64 on the CPU runs on the reference. Any strides with a contiguous last dimension.
        k: [b, hk, sk, d] likewise; hk divides h (grouped-query attention). d from 1 to 512.
        v: [b, hk, sk, dv] likewise; dv from 1 to 512.
        causal: None or False; "top_left" (query 0 sees key 0: PyTorch); "bottom_right" (the last query sees the last
            key: FlashAttention, decoding). True is allowed where the two are the same, sq = sk.
        window: (left, right): query i sees keys i + off - left to i + off + right, where off is 0 with "top_left" and
            sk - sq otherwise. None or a negative number: no limit.
        scale: default 1/sqrt(d).
        softcap: c > 0 replaces a score t by c·tanh(t/c), before bias and masks.
        bias: broadcasts to [b, h, sq, sk]; added to the scores. Has a gradient. Cast to q's dtype, where what is finite
            stays finite. -inf masks; any other is a number.
        mask: bool, broadcasts to [b, h, sq, sk]; False masks out.
        alibi_slopes: float32 [h] or [b, h]; adds -slope·|i + off - j|. Has no gradient.
        sinks: float32 [h]; a logit per head that takes part in the softmax without a value. Has a gradient.
        dropout: probability in [0, 1) that a weight is dropped, rounded to a multiple t/65536 (one that rounds to 1 is
            refused, with one that rounds to 0 none is); the others grow by 65536/(65536 - t).
        rng_state: int64 [2], {seed, offset} of dropout. Default: drawn from the generator of torch, or of NumPy.
        cu_seqlens_q, cu_seqlens_k: int32 [b + 1]; rows cu[n] to cu[n+1]-1 are sequence n. With max_seqlen_q and
            max_seqlen_k, the upper limits of one sequence. Rows of no sequence come out as zeros.
        seqlens_q, seqlens_k: int32 [b]; only that many rows of each batch count, the others come out as zeros.
        return_lse: also return the log-sum-exp, float32 [b, h, sq] (packed: [h, total_q]). Has a gradient.
        return_weights: also return the weights, [b, h, sq, sk], before dropout. Have a gradient.
        deterministic: gradients with the same bits every time. Default: torch.use_deterministic_algorithms' setting.
        tf32: allow float32 products to be rounded to TF32 (GPU).
        q_offset, k_offset, h_offset: this is a part of a larger problem, behind so many of its queries, keys and heads;
            causal, window, alibi_slopes and dropout then go by the place in the whole. All tensors are the part's own.
        whole_sq, whole_sk, whole_h: how many queries, keys and heads the whole has. 0: it ends with the part. Of use to
            what counts from the last key ("bottom_right"; window and alibi_slopes without "top_left"), and h_offset.
        block_table: int32 [b, n]: k and v lie in pages of 16, 32, 64, 128 or 256 keys, k [pages, hk, page, d] and v
            [pages, hk, page, dv] (of [pages, page, hk, d] give the transpose). Key j of sequence n is key j % page of
            page block_table[n, j // page]; a number that is no page hides its keys. seqlens_k has the lengths,
            max_seqlen_k may limit them; packed queries have cu_seqlens_q and max_seqlen_q alone. No gradients.
        q_segments, k_segments: int32 [b, sq] and [b, sk], or [sq] and [sk], one for all batches, and no k_segments
            where they are q_segments; packed rows: [total_q] and [total_k]. A query sees keys of its own number alone,
            such as those of its document. On CUDA the workspace has b·sq·sk bits for them, or bytes.
        block_rows, block_columns: int32 lists of the blocks of keys that each block of queries sees, of which no others
            cost anything, as CSR has its rows: block r of the queries sees the blocks block_columns[block_rows[r]] to
            block_columns[block_rows[r + 1] - 1] of the keys, in any order. [lists + 1], or [b or 1, h or 1, lists + 1]
            whose numbers all count in the one block_columns; ``block_lists`` makes both. Packed rows: lists of
            max_seqlen_q rows, from the first of each sequence on. On the CPU numbers out of order or range are errors;
            on CUDA they are clamped, and a column that is no block names nothing.
        block_size: 64 or 128, or two of these, (queries, keys); default 128.
        k_scale, v_scale: float32 [b, hk], for k and v of float8_e4m3fn alone, which q is not: what the k and v of each
            head of each sequence are multiplied with. None: ones. Such k and v have no gradient, and neither has q.
        multiprocessors: of a GPU take no more than these, so that others, such as NCCL, have the rest; of backward,
            too. It holds for kernels whose blocks stay, Hopper's in 16 bits; others make room with every tile. 0: all.

    Returns:
        out, [b, h, sq, dv] of q's dtype, in q's layout; with return_lse or return_weights a tuple (out, lse, weights)
        of those asked for. For arrays: the kind of array that q is. A query that sees no key gets zeros.

    Raises:
        TypeError: wrong or mixed dtypes; not a tensor.
        ValueError: wrong or mixed shapes, devices, strides or numbers; the message has them.
        NotImplementedError: what has no kernel or no gradient (alibi_slopes).
        RuntimeError: no such device, or an error of the GPU.

    Source: Dao, "FlashAttention-2", 2023; the formulas are in include/heddle.h.
    """
    if (
        not _goes_long()
        and cu_seqlens_q is cu_seqlens_k is max_seqlen_q is max_seqlen_k is None
        and block_table is q_segments is k_segments is block_rows is block_columns is block_size is None
        and k_scale is v_scale is None
        and return_weights is False
        and q_offset is k_offset is h_offset is whole_sq is whole_sk is whole_h is multiprocessors is _NOWHERE
    ):
        if (
            window is bias is mask is alibi_slopes is sinks is rng_state is seqlens_q is seqlens_k is None
            and deterministic is None
            and return_lse is tf32 is False
            and (
                softcap is dropout is _ZERO
                or (type(softcap) in _NUMBERS and type(dropout) in _NUMBERS and not (softcap or dropout))
            )
        ):
            out = _quick(q, k, v, causal, scale)
        else:
            out = _quick_options(
                q,
                k,
                v,
                causal,
                window,
                scale,
                softcap,
                bias,
                mask,
                alibi_slopes,
                sinks,
                dropout,
                rng_state,
                seqlens_q,
                seqlens_k,
                return_lse,
                deterministic,
                tf32,
                False,
            )
            if type(out) is tuple and len(out) == 1:
                rng_state, out = out[0], NotImplemented  # the state that was drawn before the kernel refused
        if out is not NotImplemented:
            return out
    if _is_torch(q):
        run = _attention_of_torch
    else:
        from heddle._arrays import attention as run
    return run(
        q,
        k,
        v,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        bias=bias,
        mask=mask,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout=dropout,
        rng_state=rng_state,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqlens_q=seqlens_q,
        seqlens_k=seqlens_k,
        return_lse=return_lse,
        return_weights=return_weights,
        deterministic=deterministic,
        tf32=tf32,
        q_offset=q_offset,
        k_offset=k_offset,
        h_offset=h_offset,
        whole_sq=whole_sq,
        whole_sk=whole_sk,
        whole_h=whole_h,
        block_table=block_table,
        q_segments=q_segments,
        k_segments=k_segments,
        block_rows=block_rows,
        block_columns=block_columns,
        block_size=block_size,
        k_scale=k_scale,
        v_scale=v_scale,
        multiprocessors=multiprocessors,
    )


def block_lists(shown: Any) -> tuple[Any, Any]:
    """block_rows and block_columns of ``attention``, of a boolean tensor of blocks.

    Args:
        shown: bool [lists, blocks], whether each block of queries sees each block of keys, or
            [h or 1, lists, blocks] or [b or 1, h or 1, lists, blocks]; of torch, NumPy, CuPy or JAX (also within jit).

    Returns:
        block_rows, int32 [b or 1, h or 1, lists + 1], and block_columns, int32, of shown's library and device. There
        are as many columns as blocks; those behind the last number of block_rows count for nothing.

    Raises:
        TypeError: shown is not bool, or has another number of dimensions.

    Source: the lists are the rows of CSR, as include/heddle.h has them.
    """
    if _is_torch(shown):
        from heddle._torch import block_lists as make
    else:
        from heddle._block_lists import block_lists as make
    return make(shown)


def attention_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, **options: Any) -> dict[str, Any]:
    """The gradients of ``attention`` for arrays (NumPy, CuPy, JAX); torch tensors have autograd.

    Args:
        dout: gradient of out, [b, h, sq, dv] of its dtype and device, like out.
        q, k, v: as given to ``attention``.
        out, lse: what ``attention(..., return_lse=True)`` returned for them.
        options: those of ``attention``, and dlse (like lse) and dweights (like weights), gradients of those results.

    Returns:
        A dict with dq, dk, dv, and with dbias and dsinks where bias and sinks were given, each like its original.

    Raises:
        As ``attention``; TypeError for torch tensors.

    Source: Dao, "FlashAttention-2", 2023, section 3.
    """
    if _is_torch(q):
        raise HeddleTypeError(
            "attention_backward is for arrays; for torch tensors call backward() on attention's result"
        )
    from heddle._arrays import attention_backward as run

    return run(dout, q, k, v, out, lse, **options)


def norm_linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    gamma: Any = None,
    beta: Any = None,
    eps: float = 1e-5,
    *,
    norm: Literal["layer", "rms", "none"] = "layer",
    activation: Activation = None,
    residual: Any = None,
    return_norm: bool = False,
    tf32: bool = False,
    prepared: Any = None,
    multiprocessors: int = 0,
) -> Any:
    """act(norm(x)·weightᵀ + bias) + residual in one, without writing the normalised x to memory unless it is wanted.

    Args:
        x: [..., k], float32, bfloat16 or float16 on CPU or CUDA; float64 on the CPU runs on the reference.
        weight: [n, k], x's dtype and device, contiguous last dimension.
        bias: [n] or None.
        gamma, beta: [k] or None: scale and shift after the normalisation.
        eps: added to the variance.
        norm: "layer", (x - mean)/sqrt(var + eps), "rms", x/sqrt(mean(x²) + eps), or "none": x itself, a Linear alone,
            without gamma, beta and eps.
        activation: "gelu", "gelu_tanh" (GELU by tanh) or "silu", as in torch.nn.functional, of the sum; None: none.
            "geglu", "geglu_tanh" or "swiglu": that of the sum's first half, times the second, with weight [2n, k] and
            bias [2n], the gate's rows first.
        residual: [..., n], x's dtype, or None: added to y behind the activation.
        return_norm: also return z = norm(x), with gamma and beta; not with "none".
        tf32: allow float32 products to be rounded to TF32 (GPU).
        prepared: what ``norm_linear_prepare`` made of this weight, bias, gamma and beta, with this norm, activation,
            return_norm and tf32; results have the same bits without it. Prepare anew when any of them changes.
        multiprocessors: as in ``attention``; 1 means 2.

    Returns:
        y, [..., n] of x's dtype, contiguous; with return_norm a tuple (y, z), z like x. With torch all six tensors have
        gradients, of both results.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as ``attention``.

    Source: Ba et al., "Layer normalization", 2016; Zhang and Sennrich, "Root mean square layer normalization", 2019.
    """
    if _is_torch(x):
        run = _norm_linear_of_torch
    else:
        from heddle._arrays_norm_linear import norm_linear as run
    return run(
        x,
        weight,
        bias,
        gamma,
        beta,
        eps,
        norm=norm,
        activation=activation,
        residual=residual,
        return_norm=return_norm,
        tf32=tf32,
        prepared=prepared,
        multiprocessors=multiprocessors,
    )


def norm_linear_prepare(
    weight: Any,
    bias: Any = None,
    gamma: Any = None,
    beta: Any = None,
    *,
    norm: Literal["layer", "rms", "none"] = "layer",
    activation: Activation = None,
    return_norm: bool = False,
    tf32: bool = False,
) -> Any:
    """What ``norm_linear`` makes of its weight in every call before it looks at x, to be kept by the caller.

    Args:
        weight, bias, gamma, beta, norm, activation, return_norm, tf32: as they will be given to ``norm_linear``.

    Returns:
        uint8 [bytes] of weight's kind on its device, which begins at a multiple of 64 and goes to ``norm_linear`` as
        ``prepared``; of no bytes where nothing is worth keeping. It has no gradient.

    Raises:
        As ``norm_linear``, which refuses what it can see: bytes of another number, type or device, and on the CPU those
        of another dtype, shape, number of halves, instruction set or library, or of a weight of which 64 elements, all
        over it, were others. On a GPU nobody sees that the weight is not the same.

    Source: as ``norm_linear``.
    """
    if _is_torch(weight):
        run = _norm_linear_prepare_of_torch
    else:
        from heddle._arrays_norm_linear import norm_linear_prepare as run
    return run(weight, bias, gamma, beta, norm=norm, activation=activation, return_norm=return_norm, tf32=tf32)


def norm_linear_backward(
    dy: Any,
    x: Any,
    weight: Any,
    gamma: Any = None,
    beta: Any = None,
    eps: float = 1e-5,
    *,
    norm: Literal["layer", "rms", "none"] = "layer",
    activation: Activation = None,
    bias: Any = None,
    dz: Any = None,
) -> dict[str, Any]:
    """The gradients of ``norm_linear`` for arrays (NumPy, CuPy, JAX); torch tensors have autograd.

    Args:
        dy: gradient of y, [..., n].
        x, weight, gamma, beta, eps, norm: as given to ``norm_linear``.
        activation, bias: the same; without an activation bias is not looked at. With one, forward runs once more.
        dz: gradient of z, like x, where ``norm_linear`` returned it.

    Returns:
        A dict with dx [..., k], dweight [n, k], dbias [n], and where there is a norm dgamma [k] and dbeta [k].

    Raises:
        As ``norm_linear``; TypeError for torch tensors.

    Source: as ``norm_linear``.
    """
    if _is_torch(x):
        raise HeddleTypeError(
            "norm_linear_backward is for arrays; for torch tensors call backward() on norm_linear's result"
        )
    from heddle._arrays_norm_linear import norm_linear_backward as run

    return run(dy, x, weight, gamma, beta, eps, norm=norm, activation=activation, bias=bias, dz=dz)


_registry.enter()
if hasattr(sys.modules.get("torch"), "library"):
    # A torch that is too old or broken is told of when it is used; for arrays heddle works all the same.
    with contextlib.suppress(ImportError, OSError):
        importlib.import_module("heddle._torch")
