# SPDX-License-Identifier: Apache-2.0
"""The masks of heddle.flex_attention: conditions on the indices, as options of the kernels where they are one, and as
tensors; and what the lists of a BlockMask say of its tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heddle._errors import HeddleTypeError, HeddleValueError
from heddle._flex_apply import Expression, every
from heddle._flex_forms import band
from heddle._torch import block_lists

_STRIP = 1 << 22  # elements of a mask that are computed at a time


class Problem(NamedTuple):
    b: int
    h: int
    sq: int
    sk: int
    device: torch.device
    real: torch.dtype  # of what has more digits than 16 bits

    def indices(self, first: int = 0, last: int | None = None) -> dict[str, Tensor]:
        """b, h, q_idx and kv_idx so that they broadcast to [b, h, sq, sk]; of the rows first to last."""
        last = self.sq if last is None else last
        starts = ((0, self.b), (0, self.h), (first, last), (0, self.sk))
        shapes = ((-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,))
        return {
            name: torch.arange(*start, device=self.device).view(shape)
            for name, start, shape in zip(("b", "h", "q_idx", "kv_idx"), starts, shapes, strict=True)
        }

    def shape(self, uses: frozenset[str]) -> tuple[int, int, int, int]:
        """Of what depends on `uses` alone."""
        return (
            self.b if "b" in uses else 1,
            self.h if "h" in uses else 1,
            self.sq if "q_idx" in uses else 1,
            self.sk if "kv_idx" in uses else 1,
        )


class Masks:
    """The conditions on scores: a band where they are one, which the kernels skip, and the rest."""

    def __init__(self, conditions: list[Any]) -> None:
        self.low, self.high = -math.inf, math.inf
        self.rest: list[Any] = []
        for condition in conditions:
            limits = band(condition)
            if limits is None:
                self.rest.append(condition)
            else:
                self.low, self.high = max(self.low, limits[0]), min(self.high, limits[1])

    def options(self, sq: int, sk: int) -> tuple[dict[str, Any], int, list[Any]]:
        """heddle's causal and window, the diagonal from which it counts, and the conditions that these leave out."""
        left, right, causal = None, None, None
        rest = list(self.rest)
        if self.high <= 0:
            causal, off = "top_left", 0
        elif self.high == sk - sq:
            causal, off = "bottom_right", sk - sq
        else:
            off = sk - sq
            if self.high >= off and self.high != math.inf:
                right = int(self.high) - off
        if self.low <= off and self.low != -math.inf:
            left = off - int(self.low)
        if (self.high < 0 and causal) or (self.high < off and not causal):
            rest.append(_Side(self.high, 1))
        if self.low > off:
            rest.append(_Side(self.low, -1))
        window = None if left is right is None else (left, right)
        return {"causal": causal, "window": window}, off, rest


class _Side(NamedTuple):
    """kv_idx - q_idx at most (sign 1) or at least (-1) a limit: a band's side that no option of the kernels says."""

    limit: float
    sign: int

    @property
    def uses(self) -> frozenset[str]:
        return frozenset(("q_idx", "kv_idx"))

    def values(self, indices: dict[str, Tensor]) -> Tensor:
        return self.sign * (indices["kv_idx"] - indices["q_idx"]) <= self.sign * self.limit

    def key(self) -> tuple[Any, ...]:
        return tuple(self)


class Evaluated:
    """A mask_mod that nobody could trace, but that PyTorch can call with numbers. What it reads is not known, so that
    nothing that is made of it is kept."""

    uses = frozenset(("b", "h", "q_idx", "kv_idx"))

    def __init__(self, function: Any) -> None:
        self.function = function

    def values(self, indices: dict[str, Tensor]) -> Tensor:
        places = torch.broadcast_tensors(*(indices[name] for name in ("b", "h", "q_idx", "kv_idx")))  # type: ignore[no-untyped-call]
        own = (place.clone(memory_format=torch.contiguous_format).view(-1) for place in places)  # it may write into
        found: Tensor = torch.vmap(self.function)(*own)
        return found.reshape(places[0].shape)

    def key(self) -> tuple[Any, ...]:
        return (object(),)

    def can_be(self, p: Problem) -> bool:
        """Whether it answers at all."""
        try:
            return bool(
                self.values(dict.fromkeys(self.uses, torch.zeros(1, dtype=torch.int64, device=p.device))).numel()
            )
        except Exception:  # whatever somebody else's function raises where it is given no plain numbers
            return False


def _uses(conditions: list[Any]) -> frozenset[str]:
    return frozenset().union(*(c.uses for c in conditions if isinstance(c, _COMPUTED)))


def _value(condition: Any, indices: dict[str, Tensor], device: torch.device) -> Tensor:
    value = condition.values(indices) if isinstance(condition, _COMPUTED) else condition
    value = value if isinstance(value, Tensor) else torch.tensor(value, device=device)
    return value if value.dtype == torch.bool else value != 0


_COMPUTED = (Expression, _Side, Evaluated)


def is_square(conditions: list[Any]) -> bool:
    """Whether what they are together depends on the query and on the key."""
    return _uses(conditions) >= {"q_idx", "kv_idx"}


def key_of(conditions: list[Any], p: Problem) -> tuple[Any, ...]:
    """Equal for conditions that are computed in the same way from the same numbers."""
    return p, *(c.key() if isinstance(c, _COMPUTED) else (id(c), getattr(c, "_version", 0)) for c in conditions)


def _part(conditions: list[Any], tiles: Tiles | None, p: Problem, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Of some rows: where all conditions hold, and the same as the BlockMask's own tiles have it."""
    indices = p.indices(first, last)
    values = [_value(condition, indices, p.device) for condition in conditions]
    seen = every(tuple(values)) if values else torch.ones((), dtype=torch.bool, device=p.device)
    if tiles is None:
        return seen, seen
    kinds = tiles.rows(first, last, p.sk)
    return seen, (kinds == 2) | ((kinds == 1) & seen)


def _strips(conditions: list[Any], tiles: Tiles | None, p: Problem) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Of some rows at a time what _part says."""
    b, h, sq, sk = p.shape(_uses(conditions) | {"kv_idx"})
    if tiles is not None:
        b, h, sq = max(b, tiles.kinds.shape[0]), max(h, tiles.kinds.shape[1]), p.sq
    rows = max(1, _STRIP // max(1, b * h * sk))
    for first in range(0, sq, rows):
        last = min(first + rows, sq)
        yield slice(first, last), *_part(conditions, tiles, p, first, last)


def dense(conditions: list[Any], tiles: Tiles | None, p: Problem) -> Tensor:
    """All conditions as a mask, with the BlockMask's own tiles if these are given."""
    if torch.compiler.is_compiling():  # the compiler makes one loop of it
        return _part(conditions, tiles, p, 0, p.shape(_uses(conditions))[2] if tiles is None else p.sq)[1]
    size = p.shape(_uses(conditions) | {"kv_idx"})
    if tiles is not None:
        size = (max(size[0], tiles.kinds.shape[0]), max(size[1], tiles.kinds.shape[1]), p.sq, p.sk)
    mask = torch.empty(size, dtype=torch.bool, device=p.device)
    with torch.no_grad():
        for rows, _, listed in _strips(conditions, tiles, p):
            mask[:, :, rows] = listed
    return mask


def _cut_tiles(
    conditions: list[Any], kinds: Tensor, tiles: Tiles, p: Problem
) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
    """Of some cut tiles at a time their places in a mask [b, h, sq, sk], and where all conditions hold."""
    rows, keys = (torch.arange(n, device=p.device) for n in (tiles.q_size, tiles.k_size))
    cut: Any = (kinds == 1).nonzero()
    for at in cut.split(max(1, _STRIP // (tiles.q_size * tiles.k_size))):
        b, h, row, column = (x.reshape(-1, 1, 1) for x in at.unbind(1))
        # What a last tile has beyond the end is its last row or key again.
        i = (row * tiles.q_size + rows[:, None]).clamp(max=p.sq - 1)
        j = (column * tiles.k_size + keys).clamp(max=p.sk - 1)
        indices = {"b": b, "h": h, "q_idx": i, "kv_idx": j}
        seen = every(tuple(_value(condition, indices, p.device) for condition in conditions))
        yield (b, h, i, j), seen.expand(len(at), tiles.q_size, tiles.k_size)


def of_cut_tiles(conditions: list[Any], tiles: Tiles, p: Problem) -> Tensor | None:
    """What cut tiles hide, beside lists of blocks that leave the empty ones out: computed of the cut tiles alone. None
    where that is nothing: they are cut by the end of the rows, or by what the kernels go by."""
    if not conditions:
        return None
    size = p.shape(_uses(conditions))
    b, h = (max(tiles.kinds.shape[x], size[x]) for x in range(2))
    kinds = tiles.kinds.expand(b, h, -1, -1)
    with torch.no_grad():
        if all(bool(seen.all()) for _, seen in _cut_tiles(conditions, kinds, tiles, p)):
            return None
        full = (kinds == 2).repeat_interleave(tiles.k_size, -1)[..., : p.sk]
        mask = torch.zeros((b, h, p.sq, p.sk), dtype=torch.bool, device=p.device)
        for row in range(kinds.shape[2]):
            mask[:, :, row * tiles.q_size : (row + 1) * tiles.q_size] = full[:, :, row, None]
        for place, seen in _cut_tiles(conditions, kinds, tiles, p):
            mask[place] = seen
    return mask


def check_block_mask(mask: Any) -> None:
    """What nobody has to look at the lists for."""
    sizes = mask.BLOCK_SIZE
    if not isinstance(sizes, (tuple, list)) or len(sizes) != 2 or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise HeddleValueError(f"block_mask.BLOCK_SIZE is {sizes!r}, but must be two numbers of rows and of keys")
    if not callable(mask.mask_mod):
        raise HeddleTypeError(f"block_mask.mask_mod must be a function, not {type(mask.mask_mod).__name__}")


def _named_lists(mask: Any) -> Iterator[tuple[str, Any, Any]]:
    """Their name, counts and indices."""
    yield "kv", mask.kv_num_blocks, mask.kv_indices
    if mask.full_kv_num_blocks is not None or mask.full_kv_indices is not None:
        yield "full_kv", mask.full_kv_num_blocks, mask.full_kv_indices


def check_lists(mask: Any, p: Problem) -> None:
    """That the lists of a BlockMask are as long as its tiles are many: nothing of them may be repeated unasked."""
    rows = -(-p.sq // mask.BLOCK_SIZE[0])
    for name, counts, indices in _named_lists(mask):
        for what, each in ((f"{name}_num_blocks", counts), (f"{name}_indices", indices)):
            if not isinstance(each, Tensor):
                raise HeddleTypeError(f"block_mask.{what} must be a torch.Tensor, not {type(each).__name__}")
            if each.dtype not in (torch.int32, torch.int64):
                raise HeddleTypeError(f"block_mask.{what} is {each.dtype}, but must be torch.int32")
            if each.device != mask.kv_num_blocks.device:
                raise HeddleValueError(f"block_mask.{what} is on {each.device}, kv_num_blocks elsewhere")
        if indices.dim() != 4 or counts.shape != indices.shape[:3]:
            raise HeddleValueError(
                f"block_mask.{name}_num_blocks and {name}_indices have shapes {list(counts.shape)} and "
                f"{list(indices.shape)}, but must have [b, h, rows] and [b, h, rows, columns]"
            )
        if indices.shape[2] < rows:
            raise HeddleValueError(
                f"block_mask.{name}_indices has {indices.shape[2]} rows of tiles, but {p.sq} queries have {rows}"
            )
        if any(n not in (1, want) for n, want in zip(indices.shape[:2], mask.kv_indices.shape[:2], strict=True)):
            raise HeddleValueError(
                f"block_mask.{name}_indices has shape {list(indices.shape)}, kv_indices {list(mask.kv_indices.shape)}"
            )
        if indices.shape[2] != mask.kv_indices.shape[2]:
            raise HeddleValueError(
                f"block_mask.{name}_indices has {indices.shape[2]} rows of tiles, kv_indices {mask.kv_indices.shape[2]}"
            )


def _check_numbers(mask: Any, columns: int) -> None:
    """On the CPU, where nobody waits for them."""
    for name, counts, indices in _named_lists(mask):
        if counts.device.type != "cpu" or not counts.numel():
            continue
        if int(counts.min()) < 0 or int(counts.max()) > indices.shape[-1]:
            low, high = int(counts.min()), int(counts.max())
            raise HeddleValueError(
                f"block_mask.{name}_num_blocks is from {low} to {high}, but a row has 0 to {indices.shape[-1]} tiles"
            )
        named = indices[torch.arange(indices.shape[-1]) < counts[..., None]]
        if named.numel() and (int(named.min()) < 0 or int(named.max()) >= columns):
            low, high = int(named.min()), int(named.max())
            raise HeddleValueError(
                f"block_mask.{name}_indices names tiles from {low} to {high}, but a row has tiles 0 to {columns - 1}"
            )


class Tiles:
    """What a BlockMask's lists say of its tiles: 0 empty, 1 cut, 2 full."""

    def __init__(self, mask: Any, p: Problem) -> None:
        self.q_size, self.k_size = mask.BLOCK_SIZE
        self.p = p
        self.found: dict[Any, Any] = {}
        columns = -(-p.sk // self.k_size)
        if not torch.compiler.is_compiling():
            _check_numbers(mask, columns)
        self.kinds = _listed(mask.kv_num_blocks, mask.kv_indices, columns, 1)
        if mask.full_kv_num_blocks is not None:
            full = _listed(mask.full_kv_num_blocks, mask.full_kv_indices, columns, 2)
            self.kinds = torch.maximum(self.kinds, full)

    def rows(self, first: int, last: int, sk: int) -> Tensor:
        at = torch.arange(first, last, device=self.kinds.device) // self.q_size
        return self.kinds[:, :, at].repeat_interleave(self.k_size, -1)[..., :sk]

    def lists(self) -> dict[str, Any] | None:
        """heddle's lists of blocks, if its blocks make up the tiles and some are empty. Waits for a GPU, once."""
        if "lists" not in self.found:
            self.found["lists"] = None
            whole = self.q_size % 64 == self.k_size % 64 == 0
            if whole and self.kinds.device.type in ("cpu", "cuda") and not bool(self.kinds.all()):
                sizes = [128 if size % 128 == 0 else 64 for size in (self.q_size, self.k_size)]
                shown = self.kinds != 0
                for dim, size in ((2, self.q_size // sizes[0]), (3, self.k_size // sizes[1])):
                    shown = shown.repeat_interleave(size, dim)
                rows, columns = block_lists(shown[:, :, : -(-self.p.sq // sizes[0]), : -(-self.p.sk // sizes[1])])
                columns = columns[: int(rows[-1, -1, -1])] if rows.numel() else columns
                self.found["lists"] = {"block_rows": rows, "block_columns": columns, "block_size": tuple(sizes)}
        lists: dict[str, Any] | None = self.found["lists"]
        return lists

    def within(self, low: float, high: float, p: Problem) -> bool:
        """Whether the keys of a full tile are all of a band."""
        if (low, high) not in self.found:
            self.found[low, high] = not bool(self.apart(low, high, p)[1].any())
        return bool(self.found[low, high])

    def agree(self, conditions: list[Any], p: Problem) -> bool:
        """Whether the lists say nothing that mask_mod does not, as create_block_mask's never do. Waits for a GPU."""
        masks = Masks(conditions)
        if not masks.rest:
            missing, beyond = self.apart(masks.low, masks.high, p)
            return not bool((missing | beyond).any())
        with torch.no_grad():
            return not any(bool((seen != listed).any()) for _, seen, listed in _strips(conditions, self, p))

    def apart(self, low: float, high: float, p: Problem) -> tuple[Tensor, Tensor]:
        """Tiles with keys of a band that are listed as empty, and those that are listed as full and are not."""
        rows, columns = self.kinds.shape[2:]
        q = torch.arange(rows, device=p.device)[:, None] * self.q_size
        k = torch.arange(columns, device=p.device)[None, :] * self.k_size
        q_end, k_end = (q + self.q_size).clamp(max=p.sq) - 1, (k + self.k_size).clamp(max=p.sk) - 1
        there = (q < p.sq) & (k < p.sk)
        some = (k - q_end <= high) & (k_end - q >= low) & there
        whole = (k_end - q <= high) & (k - q_end >= low)
        return some & (self.kinds == 0), ~whole & (self.kinds == 2) & there


def _listed(counts: Tensor, indices: Tensor, columns: int, kind: int) -> Tensor:
    there = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    at = torch.where(there, indices, columns).long()
    made = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.int8, device=indices.device)
    return made.scatter_(-1, at.clamp(max=columns), kind)[..., :columns]
