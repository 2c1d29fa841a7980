# SPDX-License-Identifier: Apache-2.0
"""The all-to-all of ``heddle.parallel``: rows of all heads to all rows of some heads, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from heddle._parallel.peers import Peers, aligned, regular
from heddle._parallel.travel import bytes_of


def _all_to_all(pieces: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[processes, ...]: piece x goes to process x; what comes from process x is piece x of the result."""
    made = torch.empty(pieces.shape, dtype=pieces.dtype, device=pieces.device)
    dist.all_to_all_single(bytes_of(made.flatten(1)), bytes_of(pieces.contiguous().flatten(1)), group=group)
    return made


def _to_heads(x: Tensor, group: dist.ProcessGroup, runs: int) -> Tensor:
    """[b, h, s, d] of all heads and a piece of each run of rows -> [b, h / n, s * n, d], whole runs of some heads."""
    n = dist.get_world_size(group)
    b, h, s, d = x.shape
    got = _all_to_all(x.reshape(b, n, h // n, s, d).transpose(0, 1), group)
    return got.view(n, b, h // n, runs, s // runs, d).permute(1, 2, 3, 0, 4, 5).reshape(b, h // n, s * n, d)


def _to_rows(x: Tensor, group: dist.ProcessGroup, runs: int) -> Tensor:
    """The way back of _to_heads."""
    n = dist.get_world_size(group)
    b, h, s, d = x.shape
    pieces = x.reshape(b, h, runs, n, s // runs // n, d).permute(3, 0, 1, 2, 4, 5)
    got = _all_to_all(pieces, group)
    return got.reshape(n, b, h, s // n, d).transpose(0, 1).reshape(b, h * n, s // n, d)


def _lay_out(xs: Sequence[Tensor], n: int, runs: int, to_heads: bool, peers: Peers) -> list[Tensor]:
    """Both through memory that all of n processes reach: each lays its parts where they belong."""
    rank, made, pairs, first = peers.rank, [], [], 0
    peers.arrive(sum(aligned(x.numel() * x.element_size()) for x in xs))
    for x in map(regular, xs):
        b, h, s, d = x.shape
        heads, rows = (h // n, s // runs) if to_heads else (h, s // runs // n)  # of a process
        by_heads, by_rows = (b, n, heads, runs, rows, d), (b, heads, runs, n, rows, d)
        # Which process it is of stands at `of` of what one has, and at `axis` of what all bring together.
        had, of, kind, axis = (by_heads, 1, by_rows, 3) if to_heads else (by_rows, 3, by_heads, 1)
        parts = x.view(had).unbind(of)
        for step in range(1, n):  # so that not all begin with the same
            to = (rank + step) % n
            there = peers.part(to, first, x.numel(), x.dtype).view(kind).select(axis, rank)
            pairs += [(there[:, :, run], parts[to][:, :, run]) for run in range(runs)]
        mine = x.new_empty(kind)
        made.append((mine, peers.part(rank, first, x.numel(), x.dtype).view(kind), axis, parts[rank]))
        first += aligned(x.numel() * x.element_size())
    copy = peers.copy(*pairs)
    copy.meets = True
    for mine, _, axis, own in made:
        mine.select(axis, rank).copy_(own)
    copy.wait()
    for mine, got, axis, _ in made:
        for begin, end in ((0, rank), (rank + 1, n)):
            if begin < end:
                mine.narrow(axis, begin, end - begin).copy_(got.narrow(axis, begin, end - begin))
    peers.leave()
    if to_heads:
        return [mine.flatten(2, 4) for mine, *_ in made]
    return [mine.flatten(3, 4).flatten(1, 2) for mine, *_ in made]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, runs: int, to_heads: bool, peers: Peers | None, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.given, ctx.to_heads = (group, runs, peers), to_heads
        if peers is not None:
            return tuple(_lay_out(xs, dist.get_world_size(group), runs, to_heads, peers))
        return tuple((_to_heads if to_heads else _to_rows)(x, group, runs) for x in xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        # By the same Function, so that it has a gradient, too. What is wanted all processes have agreed on.
        group, runs, peers = ctx.given
        wanted = ctx.needs_input_grad[4:]
        some = iter(
            exchange(group, runs, not ctx.to_heads, peers, *(g for g, w in zip(grads, wanted, strict=True) if w))
        )
        return None, None, None, None, *(next(some) if w else None for w in wanted)


exchange: Any = _Exchange.apply
