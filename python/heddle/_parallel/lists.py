# SPDX-License-Identifier: Apache-2.0
"""Lists of blocks of whole sequences, as ``heddle.parallel`` divides them: who sees what, and what meets."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from heddle._errors import HeddleValueError


class BlockLists:
    """On the CPU, where they decide what travels.

    rows: int32 [b or 1, h or 1, lists + 1]; columns: int32, in which the numbers of rows count; sizes: (queries, keys).
    """

    def __init__(self, rows: Tensor, columns: Tensor, sizes: tuple[int, int]) -> None:
        self.rows, self.columns = (t.cpu().resolve_neg() for t in (rows, columns))
        self.sizes = sizes
        self.made: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Tensor, Tensor]] = {}

    def check(self, extents: tuple[int, int, int, int]) -> None:
        """That they are of b, h, sq and sk: whole sequences, all heads."""
        b, h, sq, sk = extents
        need = (b, h, -(-sq // self.sizes[0]) + 1)
        shape = tuple(self.rows.shape)
        if shape[2] != need[2] or any(have not in (1, full) for have, full in zip(shape, need[:2], strict=False)):
            raise HeddleValueError(
                f"block_rows has shape {list(shape)}, but of whole sequences must broadcast to {list(need)}"
            )
        blocks, named = -(-sk // self.sizes[1]), self.columns.shape[0]
        if self.rows.numel() and (self.rows.min() < 0 or self.rows.max() > named or (self.rows.diff(dim=-1) < 0).any()):
            raise HeddleValueError(f"block_rows must not fall within a head, nor exceed the {named} block_columns")
        if named and (self.columns.min() < 0 or self.columns.max() >= blocks):
            raise HeddleValueError(f"block_columns has a number that is none of the {blocks} blocks of keys")

    def fingerprint(self) -> int:
        """The same where the lists are the same."""
        found = zlib.crc32(bytes(repr((self.sizes, tuple(self.rows.shape))), "ascii"))
        for numbers in (self.rows, self.columns):
            found = zlib.crc32(numbers.contiguous().numpy().tobytes(), found)
        return found + 1

    def of_heads(self, mine: slice) -> BlockLists:
        """Those of some heads."""
        rows = self.rows if self.rows.shape[1] == 1 else self.rows[:, mine]
        return BlockLists(rows, self.columns, self.sizes)

    def _named(self, lists: Tensor) -> tuple[Tensor, Tensor]:
        """Of these lists, of all heads in a row: the columns that they name, and for each column the number of its list
        among all of these."""
        begin, end = (self.rows[..., at].flatten().long() for at in (lists, lists + 1))
        counts = end - begin
        of = torch.arange(counts.shape[0]).repeat_interleave(counts)
        first = counts.cumsum(0) - counts
        at = torch.arange(of.shape[0]) - first[of] + begin[of]
        return self.columns[at].long(), of

    def shown(self, pieces: int, rows: dict[str, int]) -> list[list[bool]]:
        """Whether some query of a piece sees some key of another, in some batch and head: [of queries][of keys]."""
        lists = torch.arange(self.rows.shape[2] - 1)
        columns, of = self._named(lists)
        heads = self.rows.shape[0] * self.rows.shape[1]
        of_queries = (lists * self.sizes[0] // rows["q"]).repeat(heads)[of]
        found = torch.zeros(pieces, pieces, dtype=torch.bool)
        found[of_queries, columns * self.sizes[1] // rows["k"]] = True
        shown: list[list[bool]] = found.tolist()
        return shown

    def _blocks(self, starts: list[int], rows: int, size: int) -> Tensor:
        """Those of runs of so many rows, side by side."""
        return torch.cat([torch.arange(start // size, -(-(start + rows) // size)) for start in starts])

    def part(self, of_q: list[int], of_k: list[int], rows: dict[str, int]) -> tuple[Tensor, Tensor]:
        """The lists of the runs of queries and of keys that begin there, each laid side by side."""
        key = tuple(of_q), tuple(of_k)
        if key not in self.made:
            lists = self._blocks(of_q, rows["q"], self.sizes[0])
            blocks = self._blocks(of_k, rows["k"], self.sizes[1])
            columns, of = self._named(lists)
            most = max(int(t.max()) for t in (self.columns, blocks) if t.numel())
            place = torch.full((most + 1,), -1, dtype=torch.long)
            place[blocks] = torch.arange(blocks.shape[0])
            kept = place[columns] >= 0
            heads = self.rows.shape[:2]
            counts = torch.bincount(of[kept], minlength=heads.numel() * lists.shape[0]).view(*heads, -1)
            ends = counts.flatten().cumsum(0).view(counts.shape)
            made = torch.cat((ends[..., :1] - counts[..., :1], ends), -1)
            self.made[key] = made.int().contiguous(), place[columns][kept].int()
        return self.made[key]
