# SPDX-License-Identifier: Apache-2.0
"""How keys and values come to the processes of a ring of ``heddle.parallel`` that need them, and gradients back to
their owner: by messages of torch.distributed, or through memory that all reach."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from heddle._parallel.peers import Copy, Peers, aligned, regular
from heddle._parallel.places import Places

_KEYS_TAG, _GRADIENTS_TAG = 1000, 2000  # of messages; those of one step follow


def real_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def bytes_of(tensor: Tensor) -> Tensor:
    """Its memory: not every backend of torch.distributed sends every dtype."""
    return tensor.resolve_conj().resolve_neg().view(torch.uint8)  # what these bits say is not in the memory


class _Post:
    """Messages on their way, and the memory that they are in. With NCCL they are on a stream of its own: `wait` makes
    the current stream wait for them, not the host."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.operations: list[Any] = []
        self.works: list[Any] = []

    def send(self, what: Tensor, to: int, tag: int) -> None:
        self.operations.append(dist.P2POp(dist.isend, bytes_of(what), group=self.group, tag=tag, group_peer=to))

    def receive(self, where: Tensor, source: int, tag: int) -> Tensor:
        self.operations.append(dist.P2POp(dist.irecv, bytes_of(where), group=self.group, tag=tag, group_peer=source))
        return where

    def begin(self) -> _Post:
        if self.operations:
            self.works = dist.batch_isend_irecv(self.operations)
        return self

    @property
    def busy(self) -> bool:
        """Are they still waited for?"""
        return bool(self.works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []


class _Messages:
    """What travels in a step, by torch.distributed."""

    def __init__(self, keys: Keys, group: dist.ProcessGroup | None) -> None:
        self.keys, self.group = keys, group
        self.packed: dict[tuple[int, ...], Tensor] = {}  # own runs that others have asked for

    def ask(self, step: int) -> tuple[Tensor | None, _Post]:
        places, post = self.keys.places, _Post(self.group)
        served, server = places.at(step)
        if sent := places.needs(served, places.rank):
            if sent not in self.packed:
                self.packed[sent] = torch.cat([t.reshape(-1) for t in self.keys.own(sent)])
            post.send(self.packed[sent], served, _KEYS_TAG + step)
        needed = places.needs(places.rank, server)
        got = post.receive(self.keys.new(len(needed)), server, _KEYS_TAG + step) if needed else None
        return got, post.begin()

    def give(self, step: int, sums: Tensor | None) -> tuple[Tensor | None, _Post]:
        places, post = self.keys.places, _Post(self.group)
        served, server = places.at(step)
        if sums is not None:
            post.send(sums, server, _GRADIENTS_TAG + step)
        asked = places.needs(served, places.rank)
        got = self.keys.new(len(asked), real_of(self.keys.k.dtype)) if asked else None
        if got is not None:
            post.receive(got, served, _GRADIENTS_TAG + step)
        return got, post.begin()

    def end(self) -> None:
        """The memory is the messages' own."""


class _Shared:
    """The same through memory that all processes reach: boxes into which others lay their keys, and in backward
    gradients; two of either, for one step and for the next, where there are so many steps."""

    def __init__(self, keys: Keys, peers: Peers, backward: bool) -> None:
        self.keys, self.peers = keys, peers
        self.real = real_of(keys.k.dtype)
        keys.k, keys.v = (regular(t) for t in (keys.k, keys.v))  # once, not for each step
        size, boxes = keys.size(keys.places.runs), min(2, keys.places.size - 1)
        self.key_box = aligned(size * keys.k.element_size())
        self.sum_box = aligned(size * self.real.itemsize) if backward else 0
        self.sums = boxes * self.key_box
        peers.arrive(self.sums + boxes * self.sum_box)

    def ask(self, step: int) -> tuple[Tensor | None, Copy]:
        """Nobody lays keys into a box before its owner has computed with what is in it: between the two lies the
        meeting of the step before."""
        places, peers, keys = self.keys.places, self.peers, self.keys
        served, server = places.at(step)
        box = (step - 1) % 2 * self.key_box
        copy = peers.nothing()
        if sent := places.needs(served, places.rank):
            k, v = keys.own(sent)
            behind = box + k.numel() * k.element_size()
            there = (peers.part(served, at, t.numel(), t.dtype) for at, t in ((box, k), (behind, v)))
            copy = peers.copy(*((to.view(t.shape), t) for to, t in zip(there, (k, v), strict=True)))
        copy.meets = True
        needed = keys.size(len(places.needs(places.rank, server)))
        return peers.part(places.rank, box, needed, keys.k.dtype) if needed else None, copy

    def give(self, step: int, sums: Tensor | None) -> tuple[Tensor | None, Copy]:
        """Nobody writes into a box before its owner has added what is in it: between the two lies the meeting of the
        step after that one."""
        places, peers = self.keys.places, self.peers
        served, server = places.at(step)
        box = self.sums + (step - 1) % 2 * self.sum_box
        copy = peers.nothing() if sums is None else peers.copy((peers.part(server, box, len(sums), self.real), sums))
        copy.meets = True
        asked = self.keys.size(len(places.needs(served, places.rank)))
        return peers.part(places.rank, box, asked, self.real) if asked else None, copy

    def end(self) -> None:
        self.peers.leave()


class Keys:
    """K and V of all processes, as a process comes to need them: the next step's are on their way during this one's."""

    def __init__(
        self,
        places: Places,
        group: dist.ProcessGroup | None,
        peers: Peers | None,
        k: Tensor,
        v: Tensor,
        backward: bool = False,
    ) -> None:
        self.places, self.k, self.v = places, k, v
        self.way: _Messages | _Shared
        self.way = _Messages(self, group) if peers is None else _Shared(self, peers, backward)
        self.asked: tuple[Tensor | None, _Post | Copy] | None = self.way.ask(1) if places.size > 1 else None

    def runs(self, tensor: Tensor, runs: tuple[int, ...]) -> Tensor:
        """Runs that lie side by side."""
        rows = self.places.rows["k"]
        return tensor[:, :, runs[0] * rows : (runs[-1] + 1) * rows] if runs else tensor[:, :, :0]

    def own(self, runs: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        return self.runs(self.k, runs), self.runs(self.v, runs)

    def unpack(self, flat: Tensor, runs: int) -> tuple[Tensor, Tensor]:
        b, hk, _, d = self.k.shape
        k, v = ((b, hk, runs * self.places.rows["k"], width) for width in (d, self.v.shape[-1]))
        cut = math.prod(k)
        return flat[:cut].view(k), flat[cut:].view(v)

    def size(self, runs: int) -> int:
        """Numbers of K and V in so many runs."""
        b, hk, _, d = self.k.shape
        return int(b * hk * runs * self.places.rows["k"] * (d + self.v.shape[-1]))

    def new(self, runs: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.k.new_empty(self.size(runs), dtype=dtype)

    @property
    def busy(self) -> bool:
        """Are messages with keys on their way?"""
        return self.asked is not None and self.asked[1].busy

    def take(self, step: int) -> tuple[Tensor, Tensor]:
        """Of the process that serves this one in a step: what it needs of its runs; and asks for the next."""
        needed = self.places.needs(self.places.rank, self.places.at(step)[1])
        if step == 0:
            return self.own(needed)
        assert self.asked is not None
        got, post = self.asked
        post.wait()
        if step + 1 < self.places.size:
            self.asked = self.way.ask(step + 1)
        return self.own(()) if got is None else self.unpack(got, len(needed))


class Gradients:
    """Those of this process's keys and values, in float32. What other processes have found of them comes home step by
    step and is added in that order, whoever is first."""

    def __init__(self, keys: Keys) -> None:
        self.keys, real = keys, real_of(keys.k.dtype)
        self.dk, self.dv = (torch.zeros(t.shape, dtype=real, device=t.device) for t in (keys.k, keys.v))
        self._back: tuple[Tensor | None, _Post | Copy] | None = None  # where those of the last step will be
        self._own: tuple[int, ...] = ()  # of which runs they are

    @property
    def busy(self) -> bool:
        """Are messages with gradients on their way?"""
        return self._back is not None and self._back[1].busy

    def give(self, step: int, sums: Tensor | None) -> None:
        """To the owner of the keys of a step what has been found of their gradients."""
        self._add()
        places = self.keys.places
        self._back = self.keys.way.give(step, sums)
        self._own = places.needs(places.at(step)[0], places.rank)

    def rounded(self) -> tuple[Tensor, Tensor]:
        """All of them, in the keys' type."""
        dtype = self.keys.k.dtype
        if self.dk.dtype == dtype or len(self._own) < self.keys.places.runs:
            self._add()
            return self.dk.to(dtype), self.dv.to(dtype)
        made = torch.empty_like(self.dk, dtype=dtype), torch.empty_like(self.dv, dtype=dtype)
        for rounded, sums, its in zip(made, (self.dk, self.dv), self._take() or (), strict=True):
            torch.add(sums, its, out=rounded)  # the last to come home, and rounding, at once
        return made

    def _take(self) -> tuple[Tensor, Tensor] | None:
        if self._back is None:
            return None
        (got, post), self._back = self._back, None
        post.wait()
        return None if got is None else self.keys.unpack(got, len(self._own))

    def _add(self) -> None:
        for sums, its in zip((self.dk, self.dv), self._take() or (), strict=False):
            self.keys.runs(sums, self._own).add_(its)


def gather(tensor: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """That of each process of the group."""
    if group is None:
        return [tensor]
    tensor = tensor.contiguous()
    got = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather([bytes_of(x.flatten()) for x in got], bytes_of(tensor.flatten()), group=group)
    return got
