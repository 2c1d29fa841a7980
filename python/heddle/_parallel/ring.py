# SPDX-License-Identifier: Apache-2.0
"""The ring of ``heddle.parallel``: a process's queries against the keys of one process after the other, forward and
backward, in calls of the library that add to what is there. Who holds what, and what all must agree on, is in
``parallel``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from heddle import _C
from heddle._kinds import stream_of
from heddle._parallel.lists import BlockLists
from heddle._parallel.peers import Peers
from heddle._parallel.places import Meeting, Places
from heddle._parallel.travel import Gradients, Keys, real_of

FORWARD, BACKWARD = 0, 1
BITS = _C.features()
_BROADCAST = -(2**63)
_STRIDES = {
    name: f"{'do' if name == 'dout' else name}_stride" for name in ("q", "k", "v", "o", "dout", "dq", "dk", "dv")
}


def on(device: torch.device) -> Any:
    """Within it, its GPU is the current one."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


class _Rows(NamedTuple):
    """[b, h, rows, columns] as the library is told of it: some of its rows are no tensor of their own, which would take
    the host time."""

    address: int
    b: int
    h: int
    s: int
    size: int  # bytes of a number

    def after(self, rows: int) -> _Rows:
        return self._replace(address=self.address + rows * self.s * self.size)

    @property
    def strides(self) -> tuple[int, int, int]:
        return (self.b, self.h, self.s) if self.b or self.h or self.s else (_BROADCAST,) * 3


def _rows_of(**tensors: Tensor) -> dict[str, _Rows]:
    found = {}
    for name, t in tensors.items():
        b, h, s, _ = t.stride()
        found[name] = _Rows(t.data_ptr(), b, h, s, t.element_size())
    return found


@dataclass
class Ring:
    """One call: the problem as heddle.h describes it, and how its rows lie divided."""

    group: dist.ProcessGroup | None
    places: Places
    description: dict[str, Any]
    device: torch.device
    peers: Peers | None  # None: what travels are messages
    limit: int = 0  # multiprocessors that attention takes while messages are on their way; 0: all
    q_segments: Tensor | None = None  # [b, rows of this process]
    k_segments: tuple[Tensor, ...] = ()  # [b, rows] of each process
    lists: BlockLists | None = None

    def _segments(self, c: Meeting, holder: int) -> dict[str, Tensor]:
        """The ids of the rows that meet in a call."""
        if self.q_segments is None:
            return {}
        rows, rows_k = (self.places.rows[of] for of in "qk")
        first = self.places.needs(self.places.rank, holder)[0]
        ids = {
            "q_segments": self.q_segments[:, c.y0 * rows : c.y1 * rows],
            "k_segments": self.k_segments[holder][:, (first + c.x0) * rows_k : (first + c.x1) * rows_k],
        }
        return {name: t.contiguous() for name, t in ids.items()}

    def _lists(self, c: Meeting, holder: int, device: torch.device) -> dict[str, Tensor]:
        """The lists of the blocks that meet in a call."""
        if self.lists is None:
            return {}
        starts = self.places.starts(holder, "k")
        of_k = [starts[x] for x in self.places.needs(self.places.rank, holder)][c.x0 : c.x1]
        rows, columns = self.lists.part(self.places.starts(self.places.rank, "q")[c.y0 : c.y1], of_k, self.places.rows)
        return {"block_rows": rows.to(device), "block_columns": columns.to(device)}

    def part(self, c: Meeting, numbers: Tensor) -> Tensor:
        """Those of a call's queries, of [b, h, rows of this process]."""
        if c.kind == "diagonals":
            _, h, s = numbers.shape
            return numbers.reshape(h, self.places.runs, s // self.places.runs).transpose(0, 1).contiguous()
        if (c.y0, c.y1) == (0, self.places.runs):
            return numbers.contiguous()
        return numbers[:, :, c.y0 * self.places.rows["q"] : c.y1 * self.places.rows["q"]].contiguous()

    def call(
        self,
        which: int,
        c: Meeting,
        holder: int,
        of_q: dict[str, _Rows],
        of_k: dict[str, _Rows],
        dense: dict[str, Tensor],
        busy: bool,
    ) -> None:
        """One pass, which adds to what is there. of_q: of all rows of this process; of_k: of the runs that it needs of
        the holder's; dense: of this call alone. busy: messages are on their way beside it."""
        rows, rows_k = (self.places.rows[of] for of in "qk")
        description = self.description | {"sq": (c.y1 - c.y0) * rows, "sk": (c.x1 - c.x0) * rows_k}
        description["multiprocessors"] = self.limit if busy else 0
        if c.kind == "placed":
            k0s = [self.places.starts(holder, "k")[x] for x in self.places.needs(self.places.rank, holder)]
            description |= {"q_offset": self.places.starts(self.places.rank, "q")[c.y0], "k_offset": k0s[c.x0]}
        else:
            description |= {"mask": 0 if c.kind == "full" else 1, "whole_sq": 0, "whole_sk": 0}
            description |= {"window_left": 0, "window_right": 0}
            description["features"] &= ~BITS["window"]
        addresses: dict[str, int | None] = {}
        if c.kind == "diagonals":  # runs side by side as sequences beside each other
            description |= {"b": self.places.runs, "sq": rows, "sk": rows_k}
            of_q, of_k = (
                {name: t._replace(b=run * t.s) for name, t in tensors.items()}
                for run, tensors in ((rows, of_q), (rows_k, of_k))
            )
        for first, tensors in ((c.y0 * rows, of_q), (c.x0 * rows_k, of_k)):
            for name, t in tensors.items():
                addresses[name] = t.after(first).address
                description[_STRIDES[name]] = t.strides
        if self.q_segments is not None or self.lists is not None:
            dense = dense | self._segments(c, holder) | self._lists(c, holder, self.device)
        for name, numbers in dense.items():
            addresses[name] = numbers.data_ptr()
        if self.device.type != "cuda":
            _C.run("attention", which, description, addresses)
            return
        space = torch.empty(_C.workspace("attention", which, description), dtype=torch.uint8, device=self.device)
        stream = stream_of(self.device)
        _C.run("attention", which, description, addresses, space.data_ptr(), space.numel(), stream)


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
        # Where lse is -inf the first call writes o without reading it.
        made = torch.empty if sinks is None and ring.places.are_all_met else torch.zeros
        o = made(b, h, s, v.shape[-1], dtype=real, device=q.device)
        lse = torch.full((b, h, s), -math.inf, dtype=real, device=q.device)
        if sinks is not None:  # a sink is a key whose value is 0: with it as what is there, it counts once
            lse.copy_(sinks[:, None].expand(b, h, s))
        more = {} if slopes is None else {"alibi_slopes": slopes}
        places = ring.places
        keys, of_q = Keys(places, ring.group, ring.peers, k, v), _rows_of(q=q, o=o)
        for step in range(places.size):
            holder = places.at(step)[1]
            its_k, its_v = keys.take(step)
            of_k = _rows_of(k=its_k, v=its_v)
            for c in places.meetings(holder):
                part_lse = ring.part(c, lse)
                ring.call(FORWARD, c, holder, of_q, of_k, more | {"lse": part_lse}, keys.busy)
                if part_lse is not lse:
                    lse[:, :, c.y0 * places.rows["q"] : c.y1 * places.rows["q"]] = part_lse
        keys.way.end()
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, slopes, sinks, o, lse)
        ctx.set_materialize_grads(False)
        return o.to(q.dtype, copy=True), lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        with torch.no_grad(), on(ctx.ring.device):
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
        real, places = o.dtype, ring.places
        dq = torch.zeros(q.shape, dtype=real, device=q.device)
        more = {} if slopes is None else {"alibi_slopes": slopes}
        keys = Keys(places, ring.group, ring.peers, k, v, backward=True)
        grads = Gradients(keys)
        of_q = _rows_of(q=q, o=o, dout=dout, dq=dq)

        def run(calls: tuple[Meeting, ...], holder: int, of_k: dict[str, _Rows]) -> None:
            for c in calls:
                dense = more | {"lse": ring.part(c, lse)}
                if dlse is not None:
                    dense["dlse"] = ring.part(c, dlse)
                ring.call(BACKWARD, c, holder, of_q, of_k, dense, keys.busy or grads.busy)

        first, rest = places.local_meetings(len(q) == 1 and ring.q_segments is None and ring.lists is None)
        needed = places.needs(places.rank, places.rank)
        own = _rows_of(k=keys.k, v=keys.v, dk=grads.dk, dv=grads.dv)
        own = {name: t.after(needed[0] * places.rows["k"]) for name, t in own.items()} if needed else {}
        run(first, places.rank, own)
        for step in range(1, places.size):
            server = places.at(step)[1]
            needed = places.needs(places.rank, server)
            its_k, its_v = keys.take(step)
            sums = None
            if needed:
                sums = keys.new(len(needed), real).zero_()
                its_dk, its_dv = keys.unpack(sums, len(needed))
                run(places.meetings(server), server, _rows_of(k=its_k, v=its_v, dk=its_dk, dv=its_dv))
            grads.give(step, sums)
        run(rest, places.rank, own)
        dk, dv = grads.rounded()
        keys.way.end()
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[5]:
            d = (dout.to(real) * o).sum(-1) - (0 if dlse is None else dlse)
            share = torch.where(lse == -math.inf, 0, (sinks[:, None] - lse).exp())
            dsinks = -(share * d).sum((0, 2))
        return dq.to(q.dtype), dk, dv, dsinks


_once: Any = _Once.apply
ring_attention: Any = _RingAttention.apply
