# SPDX-License-Identifier: Apache-2.0
"""In the place of torch.nn.attention.flex_attention.flex_attention: its common forms, by heddle's kernels.

What score_mod and mask_mod compute is found by tracing them (heddle._flex_trace). What that told is kept as long as
everything it depends on is the same.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from heddle import attention
from heddle._errors import HeddleTypeError, HeddleValueError
from heddle._flex_apply import Expression, Score, conjuncts, sum_of, varies
from heddle._flex_calls import refuse
from heddle._flex_forms import band, slope
from heddle._flex_kept import Recipe, Shelf, are_lists_of, capturing, functions, latest, lists_of, recaller
from heddle._flex_masks import (
    Evaluated,
    Masks,
    Problem,
    Tiles,
    check_block_mask,
    check_lists,
    dense,
    is_square,
    key_of,
    of_cut_tiles,
)
from heddle._flex_trace import is_known, trace
from heddle._kinds import bias_of, need_tensors, stream_of
from heddle._ops import prepare, short

_broadcast_shapes: Any = torch.broadcast_shapes
_UNBOUNDED = 1 << 30  # BLOCK_SIZE of a BlockMask that masks nothing
_compiling = torch.compiler.is_dynamo_compiling


def _real(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


class _Known:
    """What was found out about a BlockMask: its tiles, whether they agree with its mask_mod, and its mask.

    The last two with the key and the conditions they belong to: an id in a key is nobody else's while these live."""

    def __init__(self, mask: Any) -> None:
        self.lists = lists_of(mask)
        self.shelf = Shelf()
        self.tiles: dict[Problem, Tiles] = {}
        self.agreed: tuple[Any, list[Any], bool] | None = None
        self.mask: tuple[Any, list[Any], Tensor | None] | None = None


_known: dict[int, _Known] = {}


def _forget(mask: int) -> None:
    _known.pop(mask, None)
    latest.pop(mask, None)


def _knowledge(mask: Any) -> _Known:
    known = _known.get(id(mask))
    if known is None or not are_lists_of(known.lists, mask):
        known = _known[id(mask)] = _Known(mask)
        weakref.finalize(mask, _forget, id(mask))
    return known


def _conditions_of(mask: Any, like: Tensor, p: Problem) -> tuple[list[Any], bool]:
    """What a BlockMask's mask_mod says; whether it has lists that may say something else."""
    if mask is None:
        return [], False
    if not torch.compiler.is_compiling():
        check_block_mask(mask)
    if min(mask.BLOCK_SIZE) >= _UNBOUNDED:
        return trace(mask.mask_mod, like, False), False
    if tuple(mask.seq_lengths) != (p.sq, p.sk):
        raise HeddleValueError(
            f"block_mask was made for lengths {tuple(mask.seq_lengths)}, but query and key have {(p.sq, p.sk)}"
        )
    if getattr(mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise HeddleValueError("block_mask was sliced, and has no mask_mod any more: set it from the original")
    if not torch.compiler.is_compiling():
        check_lists(mask, p)
    if mask.kv_num_blocks.device != p.device:
        raise HeddleValueError(f"block_mask is on {mask.kv_num_blocks.device}, query on {p.device}")
    for x, (have, want) in enumerate(zip(mask.kv_num_blocks.shape[:2], (p.b, p.h), strict=True)):
        if have not in (1, want):
            raise HeddleValueError(f"block_mask has size {have} in dimension {x}, which must be 1 or {want}")
    if torch.compiler.is_compiling():
        return trace(mask.mask_mod, like, False), True
    try:
        return trace(mask.mask_mod, like, False), True
    except NotImplementedError:
        found = Evaluated(mask.mask_mod)
        if not found.can_be(p):
            raise
        return [found], True


def _agreed(known: _Known, tiles: Tiles, conditions: list[Any], p: Problem) -> bool:
    """Whether the tiles of a BlockMask say nothing that its mask_mod does not."""
    key = key_of(conditions, p)
    if known.agreed is None or known.agreed[0] != key:
        known.agreed = key, conditions, tiles.agree(conditions, p)
    return known.agreed[2]


def _bands(conditions: list[Any], tiles: Tiles, p: Problem) -> list[Any]:
    """The conditions that the kernels may go by beside the lists of a BlockMask: a band that has all full tiles."""
    bands = Masks([condition for condition in conditions if band(condition) is not None])
    options, _, rest = bands.options(p.sq, p.sk)
    if rest or not any(options.values()) or not tiles.within(bands.low, bands.high, p):
        return []
    return [condition for condition in conditions if band(condition) is not None]


def _listed(
    mask: Any, conditions: list[Any], p: Problem
) -> tuple[_Known, Tiles | None, dict[str, Any] | None, list[Any]]:
    """The tiles of a BlockMask, where what is computed goes by these; heddle's lists of their blocks, where it takes
    them; and the conditions that the kernels may go by. Else the conditions say it all."""
    known = _knowledge(mask)
    tiles = known.tiles.get(p)
    if tiles is None:
        tiles = known.tiles[p] = Tiles(mask, p)
    if is_square(Masks(conditions).options(p.sq, p.sk)[2]):
        lists = tiles.lists()
        if lists is not None:
            return known, tiles, lists, _bands(conditions, tiles, p)
    if _agreed(known, tiles, conditions, p):
        return known, None, None, conditions
    lists = tiles.lists()
    return known, tiles, lists, [] if lists is None else _bands(conditions, tiles, p)


def _refused(kept: Any, query: Tensor, key: Tensor, value: Tensor, bias: Any, return_lse: bool) -> Any:
    """By heddle.attention itself, which has more ways and says what is wrong."""
    options = kept.options if kept.recipe is None else kept.options | {"bias": bias}
    return attention(*map(_laid_out, (query, key, value)), return_lse=return_lse, **options)


def _laid_out(tensor: Tensor) -> Tensor:
    """PyTorch's function takes any strides."""
    if tensor.layout is not torch.strided or tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    return tensor.contiguous()


_recall = recaller(_known, functions, latest, short, _refused)

# ---------------------------------------------------------------------------------------------------------- scores


def _slopes(value: Any, p: Problem) -> Tensor | None:
    """[h] or [b, h]; None where a gradient or a tangent is wanted."""
    read = value.tensors() if isinstance(value, Expression) else [value] if isinstance(value, Tensor) else []
    if any((torch.is_grad_enabled() and t.requires_grad) or varies(t) for t in read):
        return None
    if isinstance(value, Expression):
        value = value.values(p.indices())
    if isinstance(value, complex) or (isinstance(value, Tensor) and value.is_complex()):
        return None
    if not isinstance(value, Tensor):
        return torch.full((p.h,), float(value), dtype=p.real, device=p.device)
    value = value.to(p.real)
    value = value.reshape(value.shape[:2]) if value.dim() == 4 else value.reshape(1, -1)
    slopes: Tensor = value.expand(-1, p.h).contiguous()
    return slopes[0] if slopes.shape[0] == 1 else slopes


def _added(score: Score, causal: bool, off: int, p: Problem) -> tuple[dict[str, Any], list[Any]]:
    """alibi_slopes and bias of what is added to a score, and the bias's terms. `causal`: no query sees keys behind."""
    slopes: Tensor | None = None
    terms, values = [], []
    for term in score.added:
        found = slope(term) if off == 0 else None
        made = None
        if found and (found[1] or causal):
            # heddle adds -slope·|q - kv|, and kv - q is -|q - kv| where that is causal.
            made = _slopes(-found[0] if found[1] else found[0], p)
        if made is not None:
            slopes = made if slopes is None else slopes + made
            continue
        terms.append(term)
        value = term.values(p.indices()) if isinstance(term, Expression) else term
        if isinstance(value, complex) or (isinstance(value, Tensor) and value.is_complex()):
            refuse("a complex number added to a score")
        if not isinstance(value, Tensor):
            value = torch.full((1, 1, 1, 1), float(value), dtype=p.real, device=p.device)
        values.append(value)
    bias = sum_of(p.real, *values) if values else None
    if bias is not None:
        bias = bias if bias.is_floating_point() else bias.to(p.real)
        bias = bias.expand(_broadcast_shapes(bias.shape, (1, 1, 1, p.sk)))
    return {"alibi_slopes": slopes, "bias": bias}, terms


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """torch.nn.attention.flex_attention.flex_attention, computed by heddle where score_mod and block_mask allow it.

    What the two functions compute is found out by calling them with symbols, whatever they are called: softcap, ALiBi,
    anything added that is computed of the indices and of captured tensors (with gradients to these), causal, window,
    any other condition on the indices, and their compositions in the order cap, add, mask. ALiBi's slopes, causal and
    window reach the kernels as such; what else is added or masked is formed as a tensor, of size 1 in the dimensions
    that it does not depend on.

    Args:
        query: [b, h, sq, d]; float32, bfloat16 or float16 on CPU or CUDA, float64 on the CPU.
        key, value: [b or 1, hk, sk, d] and [b or 1, hk, sk, dv].
        score_mod: score_mod(score, b, h, q_idx, kv_idx), or None.
        block_mask: a torch.nn.attention.flex_attention.BlockMask, or None.
        scale: default 1/sqrt(d).
        enable_gqa: let hk be a divisor of h.
        return_lse: also return the log-sum-exp, [b, h, sq].
        kernel_options: of PyTorch's kernels. They change no result, so nothing is done with them.
        return_aux: an AuxRequest; max_scores is refused.

    Returns:
        out, [b, h, sq, dv]; (out, lse) with return_lse; (out, AuxOutput) with return_aux. All have gradients.

    Raises:
        NotImplementedError: with the operation of score_mod or mask_mod that heddle does not understand.
        TypeError, ValueError: as heddle.attention.

    Source: the documentation of PyTorch's function; Dong et al., "Flex Attention", 2024.
    """
    if kernel_options is return_aux is None and not _compiling():
        out = _recall(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse)
        if out is not NotImplemented:
            return out
    need_tensors(query=query, key=key, value=value)
    if not query.dim() == key.dim() == value.dim() == 4:
        raise HeddleValueError(
            f"query, key and value have {query.dim()}, {key.dim()} and {value.dim()} dimensions: must be 4"
        )
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise HeddleValueError(
            f"query has {query.shape[1]} heads, key {key.shape[1]}: enable_gqa=True lets them differ"
        )
    if return_lse and return_aux is not None:
        raise HeddleValueError("return_lse and return_aux cannot be given together")
    if score_mod is not None and not callable(score_mod):
        raise HeddleTypeError(f"score_mod must be a function, not {type(score_mod).__name__}")
    if block_mask is not None and not hasattr(block_mask, "mask_mod"):
        raise HeddleTypeError(f"block_mask must be a BlockMask, not {type(block_mask).__name__}")
    if return_aux is not None and not hasattr(return_aux, "max_scores"):
        raise HeddleTypeError(f"return_aux must be an AuxRequest, not {type(return_aux).__name__}")
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError("heddle.flex_attention has no max_scores")
    if kernel_options is not None and not isinstance(kernel_options, dict):
        raise HeddleTypeError(f"kernel_options must be a dict, not {type(kernel_options).__name__}")
    query, key, value = map(_laid_out, (query, key, value))
    p = Problem(query.shape[0], query.shape[1], query.shape[2], key.shape[2], query.device, _real(query))
    if _compiling():
        options, _ = _options(query, score_mod, block_mask, scale, p)
    else:
        with _recording():
            options, learned = _options(query, score_mod, block_mask, scale, p)
    if key.shape[0] == value.shape[0] == 1 != p.b:
        key, value = (t.expand(p.b, *t.shape[1:]) for t in (key, value))
    elif not _compiling() and type(query) in (Tensor, torch.nn.Parameter) and type(scale) in (float, int, type(None)):
        _keep(query, key, score_mod, block_mask, scale, enable_gqa, options, learned, p)
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    results = attention(query, key, value, return_lse=wants_lse, **options)
    if return_aux is None:
        return results
    from torch.nn.attention.flex_attention import AuxOutput

    return (results[0], AuxOutput(lse=results[1])) if wants_lse else (results, AuxOutput())


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """In inference mode, too, tensors whose changes are counted, so that what is made of them can be kept."""
    if not torch.is_inference_mode_enabled():
        yield
    else:
        with torch.inference_mode(False), torch.no_grad():
            yield


def _options(
    query: Tensor, score_mod: Any, block_mask: Any, scale: float | None, p: Problem
) -> tuple[dict[str, Any], list[Any] | None]:
    """heddle.attention's options for the two functions; the terms of a bias, where it can be computed anew of them."""
    if score_mod is None is block_mask:
        return {"scale": scale}, None
    score = None
    if score_mod is not None:
        score = trace(score_mod, query, True)
        if score is None:
            refuse("a score_mod that returns None")
    options, learned = _found(score, block_mask, query, p)
    factor = 1.0 if score is None else score.factor
    if factor != 1.0:
        scale = factor * (query.shape[-1] ** -0.5 if scale is None else scale)
    return options | {"scale": scale}, learned


def _keep(
    query: Tensor,
    key: Tensor,
    score_mod: Any,
    block_mask: Any,
    scale: Any,
    enable_gqa: bool,
    options: dict[str, Any],
    learned: list[Any] | None,
    p: Problem,
) -> None:
    """So that the next such call finds its options, where nothing else has changed."""
    functions_given = [score_mod, None if block_mask is None else block_mask.mask_mod]
    if not all(function is None or is_known(function) for function in functions_given):
        return
    recipe = None
    if any(isinstance(value, Tensor) and value.requires_grad for value in options.values()):
        if learned is None:
            return
        recipe, options = partial(Recipe, learned, p, query.dtype), options | {"bias": None}
    elif options.get("bias") is not None:
        options = options | {"bias": bias_of(options["bias"], query.dtype)}
    known = None if block_mask is None else _knowledge(block_mask)
    code = getattr(score_mod, "__code__", None)
    place = code and id(code), query.shape, key.shape, query.dtype, query.device, scale, enable_gqa
    shelf = functions if known is None else known.shelf
    names = ("causal", "window", "scale", "softcap", "bias", "mask", "alibi_slopes")
    given = [options.get(name, 0.0 if name == "softcap" else None) for name in names]
    prepared = NotImplemented
    if "block_rows" not in options:
        prepared = prepare(query, key, key, *given, None, 0.0, None, None, None, False, None, False, False)
    own = known.mask[2] if known and known.mask else None
    shelf.keep(place, score_mod, block_mask, options, own, recipe, None if prepared is NotImplemented else prepared)


def _found(score: Any, block_mask: Any, query: Tensor, p: Problem) -> tuple[dict[str, Any], list[Any] | None]:
    """All options but the scale; the terms of a bias."""
    if score is not None and not isinstance(score, Score):
        what = "a tensor" if isinstance(score, Tensor) else repr(score)
        refuse(f"a score_mod that returns {what} whatever the score is")
    conditions, listed = _conditions_of(block_mask, query, p)
    known, tiles, lists = None, None, None
    own = conditions  # of the BlockMask, those that the kernels may go by
    if listed and torch.compiler.is_compiling():  # torch.export, too
        from heddle._flex_compiled import split  # imports the compiler

        own, tiles = split(block_mask, conditions, p)
    elif listed:
        known, tiles, lists, own = _listed(block_mask, conditions, p)
    of_score = [] if score is None else [part for condition in score.seen for part in conjuncts(condition)]
    masks = Masks([*of_score, *own])
    options, off, rest = masks.options(p.sq, p.sk)
    learned = None
    if score is not None:
        options |= {"softcap": score.cap}
        added, terms = _added(score, options["causal"] == "top_left", off, p)
        options |= added
        # Nothing else may be made of what learns, and the last dimension must be whole.
        read = [t for each in (*of_score, *conditions) if isinstance(each, Expression) for t in each.tensors()]
        if terms and not any(t.requires_grad for t in read) and _reaches(terms, p):
            learned = terms
    if lists is not None:
        options |= lists
        conditions = [condition for condition in conditions if not any(condition is each for each in own)]
    options["mask"] = _mask(rest, conditions, known, tiles, p, dense if lists is None else of_cut_tiles)
    return {name: value for name, value in options.items() if value is not None}, learned


def _reaches(terms: list[Any], p: Problem) -> bool:
    """Whether the sum of these is as long as a row."""
    return p.sk == 1 or any(isinstance(term, Expression) and "kv_idx" in term.uses for term in terms)


def _mask(
    rest: list[Any], conditions: list[Any], known: _Known | None, tiles: Any, p: Problem, of_tiles: Any
) -> Tensor | None:
    """What causal, window and lists of blocks leave out. A BlockMask's is kept as long as its tensors are the same."""
    if tiles is not None:
        whole = dense(rest, None, p) if rest else None
        mask = _kept(conditions, known, tiles, p, of_tiles)
        return mask if whole is None else whole if mask is None else mask & whole
    if not rest:
        return None
    return _kept(rest, known, None, p, dense)


def _kept(conditions: list[Any], known: _Known | None, tiles: Any, p: Problem, make: Any) -> Tensor | None:
    made: Tensor | None
    if known is None or capturing(p.device):  # a graph must not use what may be freed
        made = make(conditions, tiles, p)
        return made
    key = make, tiles is None, stream_of(p.device), *key_of(conditions, p)
    if known.mask is None or known.mask[0] != key:
        known.mask = key, conditions, make(conditions, tiles, p)
    return known.mask[2]
