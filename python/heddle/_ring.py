# SPDX-License-Identifier: Apache-2.0
"""What travels among the processes of ``heddle.parallel``: all-to-all over heads, and the ring of keys and values,
forward and backward. Who holds what, and what all must agree on, is in ``parallel``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from heddle import _C
from heddle._parallel_lists import BlockLists
from heddle._peers import Copy, Peers, aligned

Seen = Literal["none", "some", "all"]

FORWARD, BACKWARD = 0, 1
BITS = _C.features()
_BROADCAST = -(2**63)
_DENSE = (
    "lse",
    "dlse",
    "alibi_slopes",
    "q_segments",
    "k_segments",
    "block_rows",
    "block_columns",
)  # without strides in the description
_KEYS_TAG, _GRADIENTS_TAG = 1000, 2000  # of messages; those of one step follow


def real_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def bytes_of(tensor: Tensor) -> Tensor:
    """Its memory: not every backend of torch.distributed sends every dtype."""
    return tensor.resolve_conj().resolve_neg().view(torch.uint8)  # what these bits say is not in the memory


def _strides(tensor: Tensor) -> tuple[int, int, int]:
    b, h, s = tensor.stride()[:3]
    return (b, h, s) if b or h or s else (_BROADCAST,) * 3


# ------------------------------------------------------------------------------------------------ all-to-all of heads


def _all_to_all(pieces: Tensor, group: dist.ProcessGroup, peers: Peers | None) -> Tensor:
    """[processes, ...]: piece x goes to process x; what comes from process x is piece x of the result."""
    made = torch.empty(pieces.shape, dtype=pieces.dtype, device=pieces.device)
    if peers is None:
        dist.all_to_all_single(bytes_of(made.flatten(1)), bytes_of(pieces.contiguous().flatten(1)), group=group)
        return made
    rank, size = dist.get_rank(group), made[0].numel() * made.element_size()
    peers.arrive(size * len(made))
    peers.part(rank, 0, made).view(made.shape).copy_(pieces)
    peers.meet()
    flat = made.flatten(1)
    for copy in [peers.copy(flat[x], peers.part(x, rank * size, flat[x])) for x in range(len(flat))]:
        copy.wait()
    peers.leave()
    return made


def _to_heads(x: Tensor, group: dist.ProcessGroup, runs: int, peers: Peers | None) -> Tensor:
    """[b, h, s, d] of all heads and a piece of each run of rows -> [b, h / n, s * n, d], whole runs of some heads."""
    n = dist.get_world_size(group)
    b, h, s, d = x.shape
    got = _all_to_all(x.reshape(b, n, h // n, s, d).transpose(0, 1), group, peers)
    return got.view(n, b, h // n, runs, s // runs, d).permute(1, 2, 3, 0, 4, 5).reshape(b, h // n, s * n, d)


def _to_rows(x: Tensor, group: dist.ProcessGroup, runs: int, peers: Peers | None) -> Tensor:
    """The way back of _to_heads."""
    n = dist.get_world_size(group)
    b, h, s, d = x.shape
    pieces = x.reshape(b, h, runs, n, s // runs // n, d).permute(3, 0, 1, 2, 4, 5)
    got = _all_to_all(pieces, group, peers)
    return got.reshape(n, b, h, s // n, d).transpose(0, 1).reshape(b, h * n, s // n, d)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, runs: int, to_heads: bool, peers: Peers | None
    ) -> Tensor:
        ctx.given, ctx.to_heads = (group, runs, peers), to_heads
        return (_to_heads if to_heads else _to_rows)(x, *ctx.given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        # By the same Function, so that it has a gradient, too.
        return exchange(grads[0], ctx.given[0], ctx.given[1], not ctx.to_heads, ctx.given[2]), None, None, None, None


# --------------------------------------------------------------------------------------------------------------- ring


@dataclass(frozen=True)
class _Call:
    """Runs y0 .. y1-1 of this process's queries against runs x0 .. x1-1 of those that it got."""

    y0: int
    y1: int
    x0: int
    x1: int
    kind: Literal["placed", "full", "causal"]  # each by its place in the whole; all seen; the diagonal from corner on


@dataclass
class Ring:
    """One call: the problem as heddle.h describes it, and which rows of it every process of the ring has."""

    group: dist.ProcessGroup | None
    size: int
    rank: int
    runs: int
    rows: dict[str, int]  # of q and of k, in a run
    description: dict[str, Any]
    low: float
    high: float
    peers: Peers | None  # None: what travels are messages
    limit: int = 0  # multiprocessors that attention takes while messages are on their way; 0: all
    q_segments: Tensor | None = None  # [b, rows of this process]
    k_segments: tuple[Tensor, ...] = ()  # [b, rows] of each process
    lists: BlockLists | None = None
    shown: list[list[bool]] | None = None  # by the lists, of pieces: [of queries][of keys]

    def starts(self, rank: int, of: str) -> list[int]:
        """Where in the whole the runs of a process begin."""
        places = (rank, 2 * self.size - 1 - rank)[: self.runs]
        return [place * self.rows[of] for place in places]

    def sees(self, q0: int, k0: int) -> Seen:
        """What the rows of the run of queries at q0 see of the keys of the run at k0."""
        last_q, last_k = q0 + self.rows["q"] - 1, k0 + self.rows["k"] - 1
        if k0 > last_q + self.high or last_k < q0 + self.low:
            return "none"
        if self.shown is not None and not self.shown[q0 // self.rows["q"]][k0 // self.rows["k"]]:
            return "none"
        return "all" if last_k <= q0 + self.high and k0 >= last_q + self.low else "some"

    def needs(self, of: int, holder: int) -> list[int]:
        """The runs of keys of `holder` that `of` has queries for."""
        queries = self.starts(of, "q")
        return [
            x for x, k0 in enumerate(self.starts(holder, "k")) if any(self.sees(q0, k0) != "none" for q0 in queries)
        ]

    def at(self, step: int) -> tuple[int, int]:
        """Whom this process serves in a step, and who serves it."""
        return (self.rank + step) % self.size, (self.rank - step) % self.size

    def calls(self, holder: int) -> list[_Call]:
        """How this process's queries meet the runs of `holder` that they need, in few calls where no place counts."""
        places = self.starts(holder, "k")
        q0s, k0s = self.starts(self.rank, "q"), [places[x] for x in self.needs(self.rank, holder)]
        seen = [[self.sees(q0, k0) for k0 in k0s] for q0 in q0s]
        placed = bool(self.description["features"] & BITS["alibi"]) or self.description["dropout"] > 0
        if not placed and self._is_diagonal(q0s, k0s, seen):
            return [_Call(0, len(q0s), 0, len(k0s), "causal")]
        found: list[_Call] = []
        for y, row in enumerate(seen):
            xs = [x for x, what in enumerate(row) if what != "none"]
            if not placed and xs and all(row[x] == "all" for x in xs) and xs[-1] - xs[0] + 1 == len(xs):
                last = found[-1] if found else None
                if last and (last.y1, last.x0, last.x1, last.kind) == (y, xs[0], xs[-1] + 1, "full"):
                    found[-1] = _Call(last.y0, y + 1, last.x0, last.x1, "full")
                else:
                    found.append(_Call(y, y + 1, xs[0], xs[-1] + 1, "full"))
            else:
                found += [_Call(y, y + 1, x, x + 1, "placed") for x in xs]
        return found

    def local_calls(self) -> tuple[list[_Call], list[_Call]]:
        """Those of the process's own keys: the first of them, and what is left for while gradients are on their way."""
        calls = self.calls(self.rank)
        if self.size == 1 or self.runs == 1 or calls != [_Call(0, 2, 0, 2, "causal")]:
            return calls, []
        return [_Call(1, 2, 0, 1, "full")], [_Call(y, y + 1, y, y + 1, "causal") for y in range(2)]

    def _is_diagonal(self, q0s: list[int], k0s: list[int], seen: list[list[Seen]]) -> bool:
        """Do the runs, side by side, see each other as under a causal mask from their first corner on?"""
        if self.rows["q"] != self.rows["k"] or len(q0s) != len(k0s) or self.low != -math.inf:
            return False
        return all(
            q0s[y] + self.high == k0s[x] if x == y else what == ("all" if x < y else "none")
            for y, row in enumerate(seen)
            for x, what in enumerate(row)
        )

    def _segments(self, c: _Call, holder: int) -> dict[str, Tensor]:
        """The ids of the rows that meet in a call."""
        if self.q_segments is None:
            return {}
        rows, rows_k, first = self.rows["q"], self.rows["k"], self.needs(self.rank, holder)[0]
        ids = {
            "q_segments": self.q_segments[:, c.y0 * rows : c.y1 * rows],
            "k_segments": self.k_segments[holder][:, (first + c.x0) * rows_k : (first + c.x1) * rows_k],
        }
        return {name: t.contiguous() for name, t in ids.items()}

    def _lists(self, c: _Call, holder: int, device: torch.device) -> dict[str, Tensor]:
        """The lists of the blocks that meet in a call."""
        if self.lists is None:
            return {}
        places = self.starts(holder, "k")
        of_k = [places[x] for x in self.needs(self.rank, holder)][c.x0 : c.x1]
        rows, columns = self.lists.part(self.starts(self.rank, "q")[c.y0 : c.y1], of_k, self.rows)
        return {"block_rows": rows.to(device), "block_columns": columns.to(device)}

    def call(self, which: int, c: _Call, holder: int, tensors: dict[str, Tensor], busy: bool) -> None:
        """One pass, which adds to what is there. busy: messages are on their way beside it."""
        tensors = tensors | self._segments(c, holder) | self._lists(c, holder, tensors["q"].device)
        strided = {name: t for name, t in tensors.items() if name not in _DENSE}
        description = self.description | {f"s{of}": tensors[of].shape[2] for of in ("q", "k")}
        description["multiprocessors"] = self.limit if busy else 0
        if c.kind == "placed":
            k0s = [self.starts(holder, "k")[x] for x in self.needs(self.rank, holder)]
            description |= {"q_offset": self.starts(self.rank, "q")[c.y0], "k_offset": k0s[c.x0]}
        else:
            description |= {"mask": 1 if c.kind == "causal" else 0, "whole_sq": 0, "whole_sk": 0}
            description |= {"window_left": 0, "window_right": 0}
            description["features"] &= ~BITS["window"]
        description |= {f"{'do' if name == 'dout' else name}_stride": _strides(t) for name, t in strided.items()}
        addresses: dict[str, int | None] = {name: t.data_ptr() for name, t in tensors.items()}
        device = tensors["q"].device
        if device.type != "cuda":
            _C.run("attention", which, description, addresses)
            return
        with torch.cuda.device(device):
            space = torch.empty(_C.workspace("attention", which, description), dtype=torch.uint8, device=device)
            stream = torch.cuda.current_stream().cuda_stream
            _C.run("attention", which, description, addresses, space.data_ptr(), space.numel(), stream)


class _Post:
    """Messages on their way, and the memory that they are in. With NCCL they are on a stream of its own: `wait` makes
    the current stream wait for them, not the host."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.operations: list[Any] = []
        self.works: list[Any] = []

    def send(self, what: Tensor, to: int, tag: int) -> None:
        self.operations.append(dist.P2POp(dist.isend, bytes_of(what), group=self.ring.group, tag=tag, group_peer=to))

    def receive(self, where: Tensor, source: int, tag: int) -> Tensor:
        self.operations.append(
            dist.P2POp(dist.irecv, bytes_of(where), group=self.ring.group, tag=tag, group_peer=source)
        )
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

    def __init__(self, ring: Ring, keys: _Keys) -> None:
        self.ring, self.keys = ring, keys
        self.packed: dict[tuple[int, ...], Tensor] = {}  # own runs that others have asked for

    def ask(self, step: int) -> tuple[Tensor | None, _Post]:
        ring, post = self.ring, _Post(self.ring)
        served, server = ring.at(step)
        if sent := tuple(ring.needs(served, ring.rank)):
            if sent not in self.packed:
                self.packed[sent] = torch.cat([t.reshape(-1) for t in self.keys.own(list(sent))])
            post.send(self.packed[sent], served, _KEYS_TAG + step)
        needed = ring.needs(ring.rank, server)
        got = post.receive(self.keys.new(len(needed)), server, _KEYS_TAG + step) if needed else None
        return got, post.begin()

    def give(self, step: int, sums: Tensor | None) -> tuple[Tensor | None, _Post]:
        ring, post = self.ring, _Post(self.ring)
        served, server = ring.at(step)
        if sums is not None:
            post.send(sums, server, _GRADIENTS_TAG + step)
        asked = ring.needs(served, ring.rank)
        got = self.keys.new(len(asked), real_of(self.keys.k.dtype)) if asked else None
        if got is not None:
            post.receive(got, served, _GRADIENTS_TAG + step)
        return got, post.begin()

    def end(self) -> None:
        """The memory is the messages' own."""


class _Shared:
    """The same through memory that all processes reach: first each one's own keys, once for each choice of runs that
    somebody asks for, then two boxes for gradients from others, of one step and of the next."""

    def __init__(self, ring: Ring, keys: _Keys, peers: Peers, backward: bool) -> None:
        self.ring, self.keys, self.peers = ring, keys, peers
        self.places = [self._choices(holder) for holder in range(ring.size)]
        real = real_of(keys.k.dtype)
        self.boxes = max(end for _, end in self.places)
        self.box = aligned(keys.size(ring.runs) * real.itemsize) if backward else 0
        peers.arrive(self.boxes + 2 * self.box)
        for runs, first in self.places[ring.rank][0].items():
            for t in keys.own(list(runs)):
                peers.part(ring.rank, first, t).view(t.shape).copy_(t)
                first += t.numel() * t.element_size()
        peers.meet()

    def _choices(self, holder: int) -> tuple[dict[tuple[int, ...], int], int]:
        """Where each choice of a process's runs begins, and the end."""
        ring, end = self.ring, 0
        found: dict[tuple[int, ...], int] = {}
        for of in range(ring.size):
            runs = tuple(ring.needs(of, holder))
            if of != holder and runs and runs not in found:
                found[runs] = end
                end += aligned(self.keys.size(len(runs)) * self.keys.k.element_size())
        return found, end

    def ask(self, step: int) -> tuple[Tensor | None, Copy]:
        server = self.ring.at(step)[1]
        needed = tuple(self.ring.needs(self.ring.rank, server))
        if not needed:
            return None, self.peers.nothing()
        got = self.keys.new(len(needed))
        return got, self.peers.copy(got, self.peers.part(server, self.places[server][0][needed], got))

    def give(self, step: int, sums: Tensor | None) -> tuple[Tensor | None, Copy]:
        """Nobody writes into a box before its owner has added what is in it: between the two lie a meeting of the step
        after that one."""
        ring, peers = self.ring, self.peers
        served, server = ring.at(step)
        box = self.boxes + step % 2 * self.box
        copy = peers.nothing() if sums is None else peers.copy(peers.part(server, box, sums), sums)
        copy.meets = True
        asked = ring.needs(served, ring.rank)
        real = real_of(self.keys.k.dtype)
        size = self.keys.size(len(asked)) * real.itemsize
        return peers.memory[ring.rank][box : box + size].view(real) if asked else None, copy

    def end(self) -> None:
        self.peers.leave()


class _Keys:
    """K and V of all processes, as a process comes to need them: the next step's are on their way during this one's."""

    def __init__(self, ring: Ring, k: Tensor, v: Tensor, backward: bool = False) -> None:
        self.ring, self.k, self.v = ring, k, v
        self.way: _Messages | _Shared
        peers = ring.peers
        self.way = _Messages(ring, self) if peers is None else _Shared(ring, self, peers, backward)
        self.asked: tuple[Tensor | None, _Post | Copy] | None = self.way.ask(1) if ring.size > 1 else None

    def runs(self, tensor: Tensor, runs: list[int]) -> Tensor:
        """Runs that lie side by side."""
        rows = self.ring.rows["k"]
        return tensor[:, :, runs[0] * rows : (runs[-1] + 1) * rows] if runs else tensor[:, :, :0]

    def own(self, runs: list[int]) -> tuple[Tensor, Tensor]:
        return self.runs(self.k, runs), self.runs(self.v, runs)

    def unpack(self, flat: Tensor, runs: int) -> tuple[Tensor, Tensor]:
        b, hk, _, d = self.k.shape
        k, v = ((b, hk, runs * self.ring.rows["k"], width) for width in (d, self.v.shape[-1]))
        cut = math.prod(k)
        return flat[:cut].view(k), flat[cut:].view(v)

    def size(self, runs: int) -> int:
        """Numbers of K and V in so many runs."""
        b, hk, _, d = self.k.shape
        return int(b * hk * runs * self.ring.rows["k"] * (d + self.v.shape[-1]))

    def new(self, runs: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.k.new_empty(self.size(runs), dtype=dtype)

    @property
    def busy(self) -> bool:
        """Are messages with keys on their way?"""
        return self.asked is not None and self.asked[1].busy

    def take(self, step: int) -> tuple[Tensor, Tensor]:
        """Of the process that serves this one in a step: what it needs of its runs; and asks for the next."""
        needed = self.ring.needs(self.ring.rank, self.ring.at(step)[1])
        if step == 0:
            return self.own(needed)
        assert self.asked is not None
        got, post = self.asked
        if step + 1 < self.ring.size:
            self.asked = self.way.ask(step + 1)
        post.wait()
        return self.own([]) if got is None else self.unpack(got, len(needed))


def _part(tensor: Tensor, rows: int, first: int, end: int) -> Tensor:
    return tensor[:, :, first * rows : end * rows]


class _Once(torch.autograd.Function):
    """Gradients as they are, by what they depend on and themselves: an error where their own are asked for."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tensors[count:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            "heddle.parallel has no second derivative of a ring: divide the heads "
            "(ContextParallel(..., method='heads')), or give whole sequences to heddle.attention"
        )


class _RingAttention(torch.autograd.Function):
    """[b, h, runs · rows, d] of each process to its rows of the result. Sums are float32, rounded once, at the end."""

    @staticmethod
    def forward(
        ctx: Any, ring: Ring, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        real = real_of(q.dtype)
        b, h, s, _ = q.shape
        rows, rows_k = ring.rows["q"], ring.rows["k"]
        met = {y for step in range(ring.size) for c in ring.calls(ring.at(step)[1]) for y in range(c.y0, c.y1)}
        # Where lse is -inf the first call writes o without reading it.
        made = torch.empty if sinks is None and len(met) == ring.runs else torch.zeros
        o = made(b, h, s, v.shape[-1], dtype=real, device=q.device)
        lse = torch.full((b, h, s), -math.inf, dtype=real, device=q.device)
        if sinks is not None:  # a sink is a key whose value is 0: with it as what is there, it counts once
            lse.copy_(sinks[:, None].expand(b, h, s))
        more = {} if slopes is None else {"alibi_slopes": slopes}
        keys = _Keys(ring, k, v)
        for step in range(ring.size):
            holder = ring.at(step)[1]
            its_k, its_v = keys.take(step)
            for c in ring.calls(holder):
                part = {"q": _part(q, rows, c.y0, c.y1), "o": _part(o, rows, c.y0, c.y1)}
                part |= {"k": _part(its_k, rows_k, c.x0, c.x1), "v": _part(its_v, rows_k, c.x0, c.x1)}
                there = _part(lse, rows, c.y0, c.y1)
                part_lse = there.contiguous()
                ring.call(FORWARD, c, holder, part | {"lse": part_lse} | more, keys.busy)
                if part_lse is not there:
                    there.copy_(part_lse)
        keys.way.end()
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, slopes, sinks, o, lse)
        ctx.set_materialize_grads(False)
        return o.to(q.dtype, copy=True), lse.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        with torch.no_grad():
            made = _RingAttention.gradients(ctx, *grads)
        if torch.is_grad_enabled():  # create_graph
            q, k, v, _, sinks, _, _ = ctx.saved_tensors
            its = (q, k, v, sinks, *grads)
            made = _once(len(its), *its, *made)
        dq, dk, dv, dsinks = made
        return None, dq, dk, dv, None, dsinks

    @staticmethod
    def gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        ring: Ring = ctx.ring
        q, k, v, slopes, sinks, o, lse = ctx.saved_tensors
        dout = torch.zeros_like(o, dtype=q.dtype) if dout is None else dout.resolve_neg().contiguous()
        dlse = None if dlse is None else dlse.resolve_neg()
        real, rows, rows_k = o.dtype, ring.rows["q"], ring.rows["k"]
        dq, dk, dv = (torch.zeros(t.shape, dtype=real, device=t.device) for t in (q, k, v))
        more = {} if slopes is None else {"alibi_slopes": slopes}
        keys = _Keys(ring, k, v, backward=True)
        back: tuple[Tensor | None, _Post | Copy, list[int]] | None = None

        def run(calls: list[_Call], holder: int, theirs: dict[str, Tensor]) -> None:
            for c in calls:
                mine = {"q": q, "o": o, "dout": dout, "dq": dq}
                part = {name: _part(t, rows, c.y0, c.y1) for name, t in mine.items()}
                part |= {name: _part(t, rows_k, c.x0, c.x1) for name, t in theirs.items()}
                part["lse"] = _part(lse, rows, c.y0, c.y1).contiguous()
                if dlse is not None:
                    part["dlse"] = _part(dlse, rows, c.y0, c.y1).contiguous()
                ring.call(BACKWARD, c, holder, part | more, keys.busy or (back is not None and back[1].busy))

        first, rest = ring.local_calls()
        needed = ring.needs(ring.rank, ring.rank)
        own = {"k": k, "v": v, "dk": dk, "dv": dv}
        own = {name: keys.runs(t, needed) for name, t in own.items()}
        run(first, ring.rank, own)
        for step in range(1, ring.size):
            served, server = ring.at(step)
            needed = ring.needs(ring.rank, server)
            its_k, its_v = keys.take(step)
            sums = None
            if needed:
                sums = keys.new(len(needed), real).zero_()
                its_dk, its_dv = keys.unpack(sums, len(needed))
                run(ring.calls(server), server, {"k": its_k, "v": its_v, "dk": its_dk, "dv": its_dv})
            _add(keys, back, dk, dv)  # those of the step before, in the same order every time
            back = (*keys.way.give(step, sums), ring.needs(served, ring.rank))
        run(rest, ring.rank, own)
        _add(keys, back, dk, dv)
        keys.way.end()
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[5]:
            d = (dout.to(real) * o).sum(-1) - (0 if dlse is None else dlse)
            share = torch.where(lse == -math.inf, 0, (sinks[:, None] - lse).exp())
            dsinks = -(share * d).sum((0, 2))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks


def gather(tensor: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """That of each process of the group."""
    if group is None:
        return [tensor]
    tensor = tensor.contiguous()
    got = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather([bytes_of(x.flatten()) for x in got], bytes_of(tensor.flatten()), group=group)
    return got


exchange: Any = _Exchange.apply
_once: Any = _Once.apply
ring_attention: Any = _RingAttention.apply


def _add(keys: _Keys, back: tuple[Tensor | None, _Post | Copy, list[int]] | None, dk: Tensor, dv: Tensor) -> None:
    """What another process has found of this one's gradients, once it is here."""
    if back is None:
        return
    got, post, own = back
    post.wait()
    if got is not None:
        its_dk, its_dv = keys.unpack(got, len(own))
        keys.runs(dk, own).add_(its_dk)
        keys.runs(dv, own).add_(its_dv)
