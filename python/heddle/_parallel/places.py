# SPDX-License-Identifier: Apache-2.0
"""Which rows of a sequence every process of a ring of ``heddle.parallel`` has, who needs whose keys, and in which calls
of the library queries and keys meet. It depends on sizes and masks alone, and is found once for all calls with the
same."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Seen = Literal["none", "some", "all"]


@dataclass(frozen=True)
class Meeting:
    """Runs y0 .. y1-1 of this process's queries against runs x0 .. x1-1 of those that it got: one call."""

    y0: int
    y1: int
    x0: int
    x1: int
    # Each by its place in the whole; all seen; the diagonal from corner on; each run by itself from corner on.
    kind: Literal["placed", "full", "causal", "diagonals"]


class Places:
    """Of a ring of `size` processes, as the one of `rank` sees them; each has `runs` pieces of the same length.

    ring: size, rank and runs; rows: of q and of k, in a run; band: from how many rows before its own to how many behind
    a query sees keys; placed: whether more than a mask counts by the place in the whole (ALiBi, dropout); shown: by
    lists of blocks, whether pieces see each other, [of queries][of keys].
    """

    def __init__(
        self,
        ring: tuple[int, int, int],
        rows: dict[str, int],
        band: tuple[float, float],
        placed: bool,
        shown: list[list[bool]] | None = None,
    ) -> None:
        self.size, self.rank, self.runs = ring
        self.rows, self.placed, self.shown = rows, placed, shown
        self.low, self.high = band
        self._needs: dict[tuple[int, int], tuple[int, ...]] = {}
        self._meetings: dict[int, tuple[Meeting, ...]] = {}

    def starts(self, rank: int, of: str) -> list[int]:
        """Where in the whole the runs of a process begin."""
        places = (rank, 2 * self.size - 1 - rank)[: self.runs]
        return [place * self.rows[of] for place in places]

    def at(self, step: int) -> tuple[int, int]:
        """Whom this process serves in a step, and who serves it."""
        return (self.rank + step) % self.size, (self.rank - step) % self.size

    def sees(self, q0: int, k0: int) -> Seen:
        """What the rows of the run of queries at q0 see of the keys of the run at k0."""
        last_q, last_k = q0 + self.rows["q"] - 1, k0 + self.rows["k"] - 1
        if k0 > last_q + self.high or last_k < q0 + self.low:
            return "none"
        if self.shown is not None and not self.shown[q0 // self.rows["q"]][k0 // self.rows["k"]]:
            return "none"
        return "all" if last_k <= q0 + self.high and k0 >= last_q + self.low else "some"

    def needs(self, of: int, holder: int) -> tuple[int, ...]:
        """The runs of keys of `holder` that `of` has queries for."""
        if (of, holder) not in self._needs:
            queries = self.starts(of, "q")
            self._needs[of, holder] = tuple(
                x for x, k0 in enumerate(self.starts(holder, "k")) if any(self.sees(q0, k0) != "none" for q0 in queries)
            )
        return self._needs[of, holder]

    @cached_property
    def are_all_met(self) -> bool:
        """Does each run of this process's queries see a key?"""
        met = {y for holder in range(self.size) for c in self.meetings(holder) for y in range(c.y0, c.y1)}
        return len(met) == self.runs

    def meetings(self, holder: int) -> tuple[Meeting, ...]:
        """How this process's queries meet the runs of `holder` that they need, in few calls where no place counts."""
        if holder not in self._meetings:
            self._meetings[holder] = tuple(self._find(holder))
        return self._meetings[holder]

    def _find(self, holder: int) -> list[Meeting]:
        places = self.starts(holder, "k")
        q0s, k0s = self.starts(self.rank, "q"), [places[x] for x in self.needs(self.rank, holder)]
        seen = [[self.sees(q0, k0) for k0 in k0s] for q0 in q0s]
        if not self.placed and self._is_diagonal(q0s, k0s, seen):
            return [Meeting(0, len(q0s), 0, len(k0s), "causal")]
        found: list[Meeting] = []
        for y, row in enumerate(seen):
            xs = [x for x, what in enumerate(row) if what != "none"]
            if not self.placed and xs and all(row[x] == "all" for x in xs) and xs[-1] - xs[0] + 1 == len(xs):
                last = found[-1] if found else None
                if last and (last.y1, last.x0, last.x1, last.kind) == (y, xs[0], xs[-1] + 1, "full"):
                    found[-1] = Meeting(last.y0, y + 1, last.x0, last.x1, "full")
                else:
                    found.append(Meeting(y, y + 1, xs[0], xs[-1] + 1, "full"))
            else:
                found += [Meeting(y, y + 1, x, x + 1, "placed") for x in xs]
        return found

    def local_meetings(self, beside: bool) -> tuple[tuple[Meeting, ...], tuple[Meeting, ...]]:
        """Those of the process's own keys: the first of them, and what is left for while gradients are on their way.
        beside: runs may be taken as sequences beside each other."""
        calls = self.meetings(self.rank)
        if self.size == 1 or self.runs == 1 or calls != (Meeting(0, 2, 0, 2, "causal"),):
            return calls, ()
        rest = (
            (Meeting(0, 2, 0, 2, "diagonals"),)
            if beside
            else tuple(Meeting(y, y + 1, y, y + 1, "causal") for y in range(2))
        )
        return (Meeting(1, 2, 0, 1, "full"),), rest

    def _is_diagonal(self, q0s: list[int], k0s: list[int], seen: list[list[Seen]]) -> bool:
        """Do the runs, side by side, see each other as under a causal mask from their first corner on?"""
        if self.rows["q"] != self.rows["k"] or len(q0s) != len(k0s) or self.low != -math.inf:
            return False
        return all(
            q0s[y] + self.high == k0s[x] if x == y else what == ("all" if x < y else "none")
            for y, row in enumerate(seen)
            for x, what in enumerate(row)
        )
