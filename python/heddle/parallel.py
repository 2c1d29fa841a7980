# SPDX-License-Identifier: Apache-2.0
"""Attention over sequences that are divided among processes: context parallelism on torch.distributed.

``ContextParallel`` knows who holds what, divides tensors (``shard``), joins them (``unshard``) and computes
``attention`` of what lies divided, forward and backward. docs/parallel.md tells how it works.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from heddle import _C
from heddle._errors import HeddleTypeError, HeddleValueError
from heddle._kinds import need_tensors
from heddle._options import causal_of, scale_of, window_of
from heddle._plain import new_rng_state

Causal = Literal[False, True, "top_left", "bottom_right"] | None
Seen = Literal["none", "some", "all"]

_FORWARD, _BACKWARD = 0, 1
_CPU, _REF, _CUDA = 0, 1, 2
_BROADCAST = -(2**63)
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_BITS = _C.features()
# What all processes must have been given alike, as whole numbers; but for a seed and an offset that were drawn.
_AGREED: tuple[str, ...] = (
    "b",
    "h",
    "the rows of q",
    "d",
    "hk",
    "the rows of k",
    "dv",
    "the dtype",
    "causal",
    "the window's left",
)
_AGREED += ("the window's right", "scale", "softcap", "dropout", "whether alibi_slopes are given")
_AGREED += ("whether sinks are given", "zigzag", "rng_state", "seed", "offset")
_KEYS_TAG, _GRADIENTS_TAG = 1000, 2000  # of messages; those of one step follow


def _real(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _bytes(tensor: Tensor) -> Tensor:
    """Its memory: not every backend of torch.distributed sends every dtype."""
    return tensor.view(torch.uint8)


def _strides(tensor: Tensor) -> tuple[int, int, int]:
    b, h, s = tensor.stride()[:3]
    return (b, h, s) if b or h or s else (_BROADCAST,) * 3


# ------------------------------------------------------------------------------------------------ all-to-all of heads


def _all_to_all(pieces: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[processes, ...]: piece x goes to process x; what comes from process x is piece x of the result."""
    made = torch.empty_like(pieces)
    dist.all_to_all_single(_bytes(made.flatten(1)), _bytes(pieces.flatten(1)), group=group)
    return made


def _to_heads(x: Tensor, group: dist.ProcessGroup, runs: int) -> Tensor:
    """[b, h, s, d] of all heads and a piece of each run of rows -> [b, h / n, s * n, d], whole runs of some heads."""
    n = dist.get_world_size(group)
    b, h, s, d = x.shape
    got = _all_to_all(x.reshape(b, n, h // n, s, d).transpose(0, 1).contiguous(), group)
    return got.view(n, b, h // n, runs, s // runs, d).permute(1, 2, 3, 0, 4, 5).reshape(b, h // n, s * n, d)


def _to_rows(x: Tensor, group: dist.ProcessGroup, runs: int) -> Tensor:
    """The way back of _to_heads."""
    n = dist.get_world_size(group)
    b, h, s, d = x.shape
    pieces = x.reshape(b, h, runs, n, s // runs // n, d).permute(3, 0, 1, 2, 4, 5).contiguous()
    got = _all_to_all(pieces.view(n, b, h, s // n, d), group)
    return got.transpose(0, 1).reshape(b, h * n, s // n, d)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, runs: int, to_heads: bool) -> Tensor:
        ctx.group, ctx.runs, ctx.to_heads = group, runs, to_heads
        return (_to_heads if to_heads else _to_rows)(x, group, runs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return (_to_rows if ctx.to_heads else _to_heads)(grads[0], ctx.group, ctx.runs), None, None, None


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
class _Ring:
    """One call: the problem as heddle.h describes it, and which rows of it every process of the ring has."""

    group: dist.ProcessGroup | None
    size: int
    rank: int
    runs: int
    rows: dict[str, int]  # of q and of k, in a run
    description: dict[str, Any]
    low: float
    high: float

    def starts(self, rank: int, of: str) -> list[int]:
        """Where in the whole the runs of a process begin."""
        places = (rank, 2 * self.size - 1 - rank)[: self.runs]
        return [place * self.rows[of] for place in places]

    def sees(self, q0: int, k0: int) -> Seen:
        """What the rows of the run of queries at q0 see of the keys of the run at k0."""
        last_q, last_k = q0 + self.rows["q"] - 1, k0 + self.rows["k"] - 1
        if k0 > last_q + self.high or last_k < q0 + self.low:
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
        placed = bool(self.description["features"] & _BITS["alibi"]) or self.description["dropout"] > 0
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

    def call(self, which: int, c: _Call, holder: int, tensors: dict[str, Tensor]) -> None:
        """One pass, which adds to what is there."""
        strided = {name: t for name, t in tensors.items() if name not in ("lse", "dlse", "alibi_slopes")}
        description = self.description | {f"s{of}": tensors[of].shape[2] for of in ("q", "k")}
        if c.kind == "placed":
            k0s = [self.starts(holder, "k")[x] for x in self.needs(self.rank, holder)]
            description |= {"q_offset": self.starts(self.rank, "q")[c.y0], "k_offset": k0s[c.x0]}
        else:
            description |= {"mask": 1 if c.kind == "causal" else 0, "whole_sq": 0, "whole_sk": 0}
            description |= {"window_left": 0, "window_right": 0}
            description["features"] &= ~_BITS["window"]
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

    def __init__(self, ring: _Ring) -> None:
        self.ring = ring
        self.operations: list[Any] = []
        self.works: list[Any] = []

    def send(self, what: Tensor, to: int, tag: int) -> None:
        self.operations.append(dist.P2POp(dist.isend, _bytes(what), group=self.ring.group, tag=tag, group_peer=to))

    def receive(self, where: Tensor, source: int, tag: int) -> Tensor:
        self.operations.append(dist.P2POp(dist.irecv, _bytes(where), group=self.ring.group, tag=tag, group_peer=source))
        return where

    def begin(self) -> _Post:
        if self.operations:
            self.works = dist.batch_isend_irecv(self.operations)
        return self

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []


class _Keys:
    """K and V of all processes, as a process comes to need them: the next step's are on their way during this one's."""

    def __init__(self, ring: _Ring, k: Tensor, v: Tensor) -> None:
        self.ring, self.k, self.v = ring, k, v
        self.packed: dict[tuple[int, ...], Tensor] = {}  # own runs that others have asked for
        self.post = _Post(ring)
        self.got = self._ask(1) if ring.size > 1 else None

    def runs(self, tensor: Tensor, runs: list[int]) -> Tensor:
        """Runs that lie side by side."""
        rows = self.ring.rows["k"]
        return tensor[:, :, runs[0] * rows : (runs[-1] + 1) * rows] if runs else tensor[:, :, :0]

    def unpack(self, flat: Tensor, runs: int) -> tuple[Tensor, Tensor]:
        b, hk, _, d = self.k.shape
        k, v = ((b, hk, runs * self.ring.rows["k"], width) for width in (d, self.v.shape[-1]))
        cut = math.prod(k)
        return flat[:cut].view(k), flat[cut:].view(v)

    def new(self, runs: int, dtype: torch.dtype) -> Tensor:
        b, hk, _, d = self.k.shape
        return self.k.new_empty(b * hk * runs * self.ring.rows["k"] * (d + self.v.shape[-1]), dtype=dtype)

    def _ask(self, step: int) -> Tensor | None:
        ring = self.ring
        served, server = ring.at(step)
        self.post = _Post(ring)
        if sent := ring.needs(served, ring.rank):
            if tuple(sent) not in self.packed:
                self.packed[tuple(sent)] = torch.cat([self.runs(t, sent).reshape(-1) for t in (self.k, self.v)])
            self.post.send(self.packed[tuple(sent)], served, _KEYS_TAG + step)
        needed = ring.needs(ring.rank, server)
        got = self.post.receive(self.new(len(needed), self.k.dtype), server, _KEYS_TAG + step) if needed else None
        self.post.begin()
        return got

    def take(self, step: int) -> tuple[Tensor, Tensor]:
        """Of the process that serves this one in a step: what it needs of its runs; and asks for the next."""
        ring = self.ring
        needed = ring.needs(ring.rank, ring.at(step)[1])
        if step == 0:
            return self.runs(self.k, needed), self.runs(self.v, needed)
        got, post = self.got, self.post
        if step + 1 < ring.size:
            self.got = self._ask(step + 1)
        post.wait()
        return (self.k[:, :, :0], self.v[:, :, :0]) if got is None else self.unpack(got, len(needed))


def _part(tensor: Tensor, rows: int, first: int, end: int) -> Tensor:
    return tensor[:, :, first * rows : end * rows]


class _RingAttention(torch.autograd.Function):
    """[b, h, runs · rows, d] of each process to its rows of the result. Sums are float32, rounded once, at the end."""

    @staticmethod
    def forward(
        ctx: Any, ring: _Ring, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        real = _real(q.dtype)
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
                ring.call(_FORWARD, c, holder, part | {"lse": part_lse} | more)
                if part_lse is not there:
                    there.copy_(part_lse)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, slopes, sinks, o, lse)
        ctx.set_materialize_grads(False)
        return o.to(q.dtype, copy=True), lse.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ring: _Ring = ctx.ring
        q, k, v, slopes, sinks, o, lse = ctx.saved_tensors
        dout, dlse = grads
        dout = torch.zeros_like(o, dtype=q.dtype) if dout is None else dout.contiguous()
        real, rows, rows_k = o.dtype, ring.rows["q"], ring.rows["k"]
        dq, dk, dv = (torch.zeros(t.shape, dtype=real, device=t.device) for t in (q, k, v))
        more = {} if slopes is None else {"alibi_slopes": slopes}
        keys = _Keys(ring, k, v)
        back: tuple[_Post, Tensor | None, list[int]] | None = None

        def run(calls: list[_Call], holder: int, theirs: dict[str, Tensor]) -> None:
            for c in calls:
                mine = {"q": q, "o": o, "dout": dout, "dq": dq}
                part = {name: _part(t, rows, c.y0, c.y1) for name, t in mine.items()}
                part |= {name: _part(t, rows_k, c.x0, c.x1) for name, t in theirs.items()}
                part["lse"] = _part(lse, rows, c.y0, c.y1).contiguous()
                if dlse is not None:
                    part["dlse"] = _part(dlse, rows, c.y0, c.y1).contiguous()
                ring.call(_BACKWARD, c, holder, part | more)

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
            post, asked = _Post(ring), ring.needs(served, ring.rank)
            if sums is not None:
                post.send(sums, server, _GRADIENTS_TAG + step)
            got = post.receive(keys.new(len(asked), real), served, _GRADIENTS_TAG + step) if asked else None
            back = (post.begin(), got, asked)
        run(rest, ring.rank, own)
        _add(keys, back, dk, dv)
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[5]:
            d = (dout.to(real) * o).sum(-1) - (0 if dlse is None else dlse)
            share = torch.where(lse == -math.inf, 0, (sinks[:, None] - lse).exp())
            dsinks = -(share * d).sum((0, 2))
        return None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, dsinks


_exchange: Any = _Exchange.apply
_ring_attention: Any = _RingAttention.apply


def _add(keys: _Keys, back: tuple[_Post, Tensor | None, list[int]] | None, dk: Tensor, dv: Tensor) -> None:
    if back is None:
        return
    post, got, own = back
    post.wait()
    if got is not None:
        its_dk, its_dv = keys.unpack(got, len(own))
        keys.runs(dk, own).add_(its_dk)
        keys.runs(dv, own).add_(its_dv)


# ---------------------------------------------------------------------------------------------------------- the whole


def _bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


class ContextParallel:
    """Who holds what of sequences that are divided among processes, and attention of them.

    Args:
        mesh: a ProcessGroup or a DeviceMesh of one dimension; or a DeviceMesh of two, (ring, heads), for both methods
            together. Every process in it makes the same ContextParallel.
        method: with one dimension, "ring" (keys and values travel, in step with the work) or "heads" (all-to-all:
            each process has some heads of the whole sequence; Ulysses).
        zigzag: with a ring, each process has a run from the front and one from the end of the sequence, so that all
            have the same work under a causal mask.
        compare: whether the processes tell each other at every call what they have been given ("always"), or at the
            first call with such sizes and options ("once"), which saves the hosts a message. With "once" a process
            that is given something else later becomes an error on the others at the end of the group's timeout.

    Raises:
        TypeError: mesh is neither.
        ValueError: a mesh of more dimensions, an unknown method, a process outside the mesh.

    Sources: Liu et al., "Ring attention with blockwise transformers", 2023; Brandon et al., "Striped attention", 2023
    (why to balance); Jacobs et al., "DeepSpeed Ulysses", 2023; Fang and Zhao, "USP", 2024 (both together).
    """

    def __init__(
        self,
        mesh: dist.ProcessGroup | DeviceMesh,
        *,
        method: Literal["ring", "heads"] = "ring",
        zigzag: bool = True,
        compare: Literal["always", "once"] = "always",
    ) -> None:
        if method not in ("ring", "heads"):
            raise HeddleValueError(f"method = {method!r} is neither 'ring' nor 'heads'")
        if compare not in ("always", "once"):
            raise HeddleValueError(f"compare = {compare!r} is neither 'always' nor 'once'")
        groups: list[dist.ProcessGroup]
        if isinstance(mesh, DeviceMesh):
            if mesh.ndim not in (1, 2):
                raise HeddleValueError(f"the mesh has {mesh.ndim} dimensions, but must have 1, or 2: (ring, heads)")
            if mesh.get_coordinate() is None:
                raise HeddleValueError(f"process {dist.get_rank()} is not in the mesh {mesh}")
            groups = [mesh.get_group(x) for x in range(mesh.ndim)]
        elif isinstance(mesh, dist.ProcessGroup):
            groups = [mesh]
        else:
            raise HeddleTypeError(f"mesh must be a ProcessGroup or a DeviceMesh, not {type(mesh).__name__}")
        if any(dist.get_rank(group) < 0 for group in groups):
            raise HeddleValueError(f"process {dist.get_rank()} is not in the process group")
        self.ring_group: dist.ProcessGroup | None
        self.heads_group: dist.ProcessGroup | None
        if len(groups) == 2:
            self.ring_group, self.heads_group = groups
        else:
            self.ring_group, self.heads_group = (groups[0], None) if method == "ring" else (None, groups[0])
        self.ring, self.ring_rank = self._place(self.ring_group)
        self.heads, self.heads_rank = self._place(self.heads_group)
        self.runs = 2 if zigzag and self.ring > 1 else 1
        # What the processes agree on is a matter of the hosts: no GPU is waited for.
        self._talk = {group: self._group_of_hosts(group) for group in groups}
        self._begun = False
        self._compare = compare
        self._agreed: set[tuple[int, ...]] = set()

    @staticmethod
    def _group_of_hosts(group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The same processes, by a backend that takes tensors of the CPU."""
        if dist.get_backend(group) != "nccl":
            return group
        ranks = dist.get_process_group_ranks(group)
        made: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return made

    @staticmethod
    def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
        return (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))

    def __repr__(self) -> str:
        return f"ContextParallel(ring={self.ring}, heads={self.heads}, runs={self.runs})"

    # ------------------------------------------------------------------------------------------------ who holds what

    @property
    def pieces(self) -> int:
        """Into how many pieces of the same length a sequence is divided; each process has `runs` of them."""
        return self.runs * self.ring * self.heads

    def pieces_of(self, ring_rank: int, heads_rank: int) -> list[int]:
        """The pieces of the process in that place, in the order of its rows."""
        runs = (ring_rank, 2 * self.ring - 1 - ring_rank)[: self.runs]
        return [run * self.heads + heads_rank for run in runs]

    def shard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """This process's part of a tensor of whole sequences, which lie along `dim`; has a gradient.

        Raises:
            ValueError: a length that `pieces` does not divide.
        """
        need_tensors(tensor=tensor)
        length = tensor.shape[dim]
        if length % self.pieces:
            raise HeddleValueError(
                f"a sequence of {length} cannot be divided into {self.pieces} pieces of the same length: pad it to a "
                f"multiple ({-(-length // self.pieces) * self.pieces})"
            )
        rows = length // self.pieces
        mine = self.pieces_of(self.ring_rank, self.heads_rank)
        return torch.cat([tensor.narrow(dim, piece * rows, rows) for piece in mine], dim)

    def positions(self, length: int, device: Any = None) -> Tensor:
        """The places of this process's rows in sequences of `length`: for rotary and position embeddings."""
        return self.shard(torch.arange(length, device=device), 0)

    def unshard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """The whole of what `shard` has divided, on every process. Has no gradient.

        Raises:
            ValueError: a length that does not hold `runs` pieces.
            NotImplementedError: a tensor that requires a gradient: detach it.
        """
        need_tensors(tensor=tensor)
        if tensor.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError("unshard has no gradient: give it tensor.detach()")
        if tensor.shape[dim] % self.runs:
            raise HeddleValueError(f"{tensor.shape[dim]} rows are not {self.runs} pieces of the same length")
        parts = tensor.movedim(dim, 0).contiguous()[None, None]
        for group, at in ((self.heads_group, 1), (self.ring_group, 0)):
            if group is not None:
                got = [torch.empty_like(parts) for _ in range(dist.get_world_size(group))]
                dist.all_gather([_bytes(x.flatten()) for x in got], _bytes(parts.flatten()), group=group)
                parts = torch.cat(got, at)
        rows = tensor.shape[dim] // self.runs
        by_piece: dict[int, Tensor] = {}
        for i in range(self.ring):
            for u in range(self.heads):
                runs = torch.split(parts[i, u], rows)
                by_piece |= dict(zip(self.pieces_of(i, u), runs, strict=True))
        return torch.cat([by_piece[x] for x in range(self.pieces)]).movedim(0, dim)

    # ----------------------------------------------------------------------------------------------------- attention

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: Causal = None,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        dropout: float = 0.0,
        rng_state: Tensor | None = None,
        return_lse: bool = False,
        deterministic: bool | None = None,
    ) -> Any:
        """heddle.attention of sequences that lie divided as `shard` does it: this process's rows of the result.

        Args:
            q, k, v: [b, h, s, d], [b, hk, s, d] and [b, hk, s, dv]: this process's rows of all heads, on the CPU or on
                its GPU (whose work is queued on the current stream).
            causal, window, scale, softcap, dropout, return_lse, deterministic: as heddle.attention, of whole sequences.
            alibi_slopes, sinks: as heddle.attention, of all heads, the same on all processes. The gradient of sinks is
                that of this process's rows: it is to be summed over the processes, as every parameter's.
            rng_state: as heddle.attention; the same on all processes. Default: drawn by the first of them.

        Returns:
            out [b, h, s, dv], or (out, lse): to the bit of dropout what one process would have there.

        Raises:
            TypeError, ValueError: as heddle.attention; heads that the all-to-all cannot divide; rows that are not of
                the same number, or options that are not the same, on all processes. Nothing has been computed then.
            NotImplementedError: tensors of another kind of device; what the kernels cannot do.
            RuntimeError: what torch.distributed says where another process fails or is late.
        """
        numbers = dict.fromkeys(_AGREED, 0)
        trouble: Exception | None = None
        drawn = False
        try:
            self._check(q, k, v, alibi_slopes, sinks)
            left, right = window_of(window)
            whole = {name: t.shape[2] * self.ring * self.heads for name, t in (("q", q), ("k", k))}
            corner = causal_of(causal, whole["q"], whole["k"])
            drawn = bool(dropout) and rng_state is None
            seed, offset = (0, 0) if rng_state is None else rng_state.tolist()
            if drawn:
                seed, offset = new_rng_state(torch.device("cpu")).tolist()
            own = (*q.shape, *k.shape[1:3], v.shape[3], _DTYPES[q.dtype], corner, left, right, _bits(scale_of(scale)))
            own = (*own, _bits(float(softcap)), _bits(float(dropout)), alibi_slopes is not None, sinks is not None)
            numbers = dict(zip(_AGREED, map(int, (*own, self.runs, drawn, seed, offset)), strict=True))
        except Exception as error:  # the others are told, and wait for nobody
            trouble = error
        given = tuple(numbers.values())
        if trouble is not None or drawn or self._compare == "always" or given not in self._agreed:
            seed, offset = self._agree(numbers, trouble)
            self._agreed.add(given)
        real = _real(q.dtype)
        slopes = None if alibi_slopes is None else alibi_slopes.to(q.device, real)
        sinks = None if sinks is None else sinks.to(q.device, real)
        h = q.shape[1]
        if self.heads_group is not None:
            q, k, v = (_exchange(t, self.heads_group, self.runs, True) for t in (q, k, v))
            mine = slice(self.heads_rank * h // self.heads, (self.heads_rank + 1) * h // self.heads)
            slopes = None if slopes is None else slopes[..., mine]
            sinks = None if sinks is None else sinks[mine]
        q, k, v = (t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in (q, k, v))
        slopes = None if slopes is None else slopes.contiguous()
        features = _BITS["accumulate"] | (_BITS["window"] if left >= 0 or right >= 0 else 0)
        features |= _BITS["deterministic"] if deterministic else 0
        features |= 0 if slopes is None else _BITS["alibi"]
        description: dict[str, Any] = {
            "dtype": _DTYPES[q.dtype],
            "device": _CUDA if q.device.type == "cuda" else _REF if q.dtype == torch.float64 else _CPU,
            "b": q.shape[0],
            "h": q.shape[1],
            "hk": k.shape[1],
            "sq": q.shape[2] // self.runs,
            "sk": k.shape[2] // self.runs,
            "d": q.shape[3],
            "dv": v.shape[3],
            "mask": corner,
            "features": features,
            "window_left": left if features & _BITS["window"] else 0,
            "window_right": right if features & _BITS["window"] else 0,
            "scale": scale_of(scale),
            "softcap": float(softcap),
            "dropout": float(dropout),
            "seed": seed % 2**64,
            "offset": offset % 2**64,
            "alibi_stride_b": slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
            "whole_sq": whole["q"],
            "whole_sk": whole["k"],
            "h_offset": self.heads_rank * q.shape[1],
            "whole_h": h,
        }
        with torch.cuda.device(q.device if q.device.type == "cuda" else -1):
            _C.workspace("attention", _BACKWARD, description)  # what the library refuses it refuses here, on all alike
        self._begin(q.device)
        off = 0 if corner == 1 else whole["k"] - whole["q"]
        low = off - left if left >= 0 else -math.inf
        high = min(off if corner else math.inf, off + right if right >= 0 else math.inf)
        rows = {"q": description["sq"], "k": description["sk"]}
        ring = _Ring(self.ring_group, self.ring, self.ring_rank, self.runs, rows, description, low, high)
        out, lse = _ring_attention(ring, q, k, v, slopes, sinks)
        if self.heads_group is not None:
            out = _exchange(out, self.heads_group, self.runs, False)
            if return_lse:
                lse = _exchange(lse[..., None], self.heads_group, self.runs, False)[..., 0]
        return (out, lse) if return_lse else out

    def _check(self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, sinks: Tensor | None) -> None:
        need_tensors(q=q, k=k, v=v)
        for name, t in (("q", q), ("k", k), ("v", v)):
            if t.device.type not in ("cpu", "cuda"):
                raise NotImplementedError(f"{name} is on {t.device}: heddle.parallel runs on CPUs and CUDA GPUs")
            if t.device != q.device:
                raise HeddleValueError(f"{name} is on {t.device}, but q on {q.device}")
            if t.dtype not in _DTYPES or t.dtype != q.dtype:
                raise HeddleTypeError(f"{name} is {t.dtype}; all must be float32, bfloat16, float16 or float64 alike")
            if t.dim() != 4:
                raise HeddleValueError(f"{name} has {t.dim()} dimensions, but must have 4 ([b, h, s, d])")
            if t.shape[2] % self.runs:
                raise HeddleValueError(f"{name} has {t.shape[2]} rows, which are not {self.runs} pieces as zigzag has")
            if 0 in t.shape:
                raise HeddleValueError(f"{name} has shape {list(t.shape)}: nothing to divide")
            if t.shape[1] % self.heads:
                raise HeddleValueError(f"{self.heads} processes cannot divide the {t.shape[1]} heads of {name}")
        if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
            raise HeddleValueError(f"q, k and v have shapes {list(q.shape)}, {list(k.shape)} and {list(v.shape)}")
        if q.shape[1] % k.shape[1]:
            raise HeddleValueError(f"hk = {k.shape[1]} does not divide h = {q.shape[1]}")
        h = q.shape[1]
        if slopes is not None and list(slopes.shape) not in ([h], [q.shape[0], h]):
            raise HeddleValueError(f"alibi_slopes has shape {list(slopes.shape)}, but must have {[h]} or {[len(q), h]}")
        if slopes is not None and slopes.requires_grad:
            raise NotImplementedError("alibi_slopes requires a gradient, but heddle computes none for it: detach it")
        if sinks is not None and list(sinks.shape) != [h]:
            raise HeddleValueError(f"sinks has shape {list(sinks.shape)}, but must have {[h]}")

    def _begin(self, device: torch.device) -> None:
        """NCCL's first message of a group needs all its processes, and in a ring not everybody has one to send."""
        if self._begun or device.type != "cuda":
            return
        for group in self._talk:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        self._begun = True

    def _agree(self, mine: dict[str, int], trouble: Exception | None) -> tuple[int, int]:
        """Whether all processes have been given the same; the seed and the offset of the first."""
        # Both groups are asked whatever the first says: so all processes come to the same end.
        seen, wrong = mine, "" if trouble is None else "this process refuses"
        for kind, group in (("ring", self.ring_group), ("heads", self.heads_group)):
            if group is None:
                continue
            numbers = torch.tensor([bool(wrong), *seen.values()])
            all_of_them = [torch.empty_like(numbers) for _ in range(dist.get_world_size(group))]
            dist.all_gather(all_of_them, numbers, group=self._talk[group])
            first = all_of_them[0].tolist()
            for rank, other in enumerate(all_of_them):
                wrong = wrong or _difference(first, other.tolist(), kind, rank)
            seen = dict(zip(_AGREED, first[1:], strict=True))
        if trouble is not None:
            raise trouble
        if wrong:
            raise HeddleValueError(f"the processes do not agree: {wrong}")
        return seen["seed"], seen["offset"]


def _difference(first: Sequence[int], other: Sequence[int], kind: str, rank: int) -> str:
    """What another process has otherwise than the first of its group."""
    if first[0] or other[0]:
        return f"process {rank if other[0] else 0} of the {kind} has refused what it was given, or met one that has"
    for name, a, b in zip(_AGREED, first[1:], other[1:], strict=True):
        if a != b and not (name in ("seed", "offset") and first[1 + _AGREED.index("rng_state")]):
            shown = "" if name in ("scale", "softcap", "dropout") else f" ({a} and {b})"
            return f"{name} is not the same on processes 0 and {rank} of the {kind}{shown}"
    return ""
