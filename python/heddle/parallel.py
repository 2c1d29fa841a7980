# SPDX-License-Identifier: Apache-2.0
"""Attention over sequences that are divided among processes: context parallelism on torch.distributed.

``ContextParallel`` knows who holds what, divides tensors (``shard``), joins them (``unshard``) and computes
``attention`` of what lies divided, forward and backward. docs/parallel.md tells how it works.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from heddle import _C, attention
from heddle._errors import HeddleTypeError, HeddleValueError
from heddle._kinds import need_tensors
from heddle._options import Causal, causal_of, number_of, scale_of, window_of
from heddle._parallel.agreement import AGREED, UNSHARDED, bits_of, difference, sum_of
from heddle._parallel.all_to_all import exchange
from heddle._parallel.given import DTYPES, as_autocast, check, length_of, numbers_of, segments_of
from heddle._parallel.lists import BlockLists
from heddle._parallel.peers import Peers
from heddle._parallel.places import Places
from heddle._parallel.ring import BACKWARD, BITS, Ring, on, ring_attention
from heddle._parallel.travel import bytes_of, gather, real_of
from heddle._plain import new_rng_state
from heddle._torch import blocks_of

_are_transforms_active: Any = torch._C._are_functorch_transforms_active
_CPU, _REF, _CUDA = 0, 1, 2
_NOT_GIVEN = (None, None, None)
_MOST_PLACES = 64  # kept


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
        transport: "auto": GPUs of one host that reach each other's memory leave what travels to their copy engines,
            through memory that all processes of the group share (PyTorch's symmetric memory, kept for the next call: of
            two processes the bytes of one's k and v, with backward three times as many; of more processes twice that;
            where heads are divided those of q, k and v);
            elsewhere, and with "messages" everywhere, it is messages of torch.distributed. `routes` tells which after
            the first call.
        leave: how many multiprocessors of a GPU attention leaves to NCCL while a ring's messages are on their way
            (`multiprocessors` of heddle.attention is the rest). Copy engines need none.

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
        transport: Literal["auto", "messages"] = "auto",
        leave: int = 0,
    ) -> None:
        if method not in ("ring", "heads"):
            raise HeddleValueError(f"method = {method!r} is neither 'ring' nor 'heads'")
        if compare not in ("always", "once"):
            raise HeddleValueError(f"compare = {compare!r} is neither 'always' nor 'once'")
        if transport not in ("auto", "messages"):
            raise HeddleValueError(f"transport = {transport!r} is neither 'auto' nor 'messages'")
        if not isinstance(leave, int) or leave < 0:
            raise HeddleValueError(f"leave = {leave!r} is no number of multiprocessors")
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
        self._alone = self.ring * self.heads == 1  # nothing travels, and there is nobody to agree with
        # What the processes agree on is a matter of the hosts: no GPU is waited for.
        self._talk = {group: self._group_of_hosts(group) for group in groups}
        self._begun = False
        self._transport, self._leave = transport, leave
        self._peers: dict[dist.ProcessGroup, Peers | str] = {}
        self._compare = compare
        self._agreed: set[tuple[int, ...]] = set()
        self._places: dict[tuple[float, ...], Places] = {}

        # What the processes must have been made with alike.
        kinds = (self.ring_group is not None) + 2 * (self.heads_group is not None)
        self._ways = kinds, compare == "once", transport == "messages"

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
        length = length_of(tensor, dim)
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
            ValueError: a length that does not hold `runs` pieces; tensors of other sizes or dtypes on some processes.
            NotImplementedError: a tensor that requires a gradient: detach it.
        """
        numbers = dict.fromkeys(UNSHARDED, 0)
        trouble: Exception | None = None
        try:
            need_tensors(tensor=tensor)
            if tensor.requires_grad and torch.is_grad_enabled():
                raise NotImplementedError("unshard has no gradient: give it tensor.detach()")
            length = length_of(tensor, dim)
            if length % self.runs:
                raise HeddleValueError(f"{length} rows are not {self.runs} pieces of the same length")
            others = [size for at, size in enumerate(tensor.shape) if at != dim % tensor.dim()]
            found = tensor.dim(), length, sum_of(others), sum_of(tensor.dtype), dim % tensor.dim()
            numbers = dict(zip(UNSHARDED, found, strict=True))
        except Exception as error:  # the others are told, and wait for nobody
            trouble = error
        if trouble is not None or self._compare == "always" or tuple(numbers.values()) not in self._agreed:
            self._agree(numbers, trouble)
            self._agreed.add(tuple(numbers.values()))
        parts = tensor.movedim(dim, 0).contiguous()[None, None]
        for group, at in ((self.heads_group, 1), (self.ring_group, 0)):
            if group is not None:
                got = [torch.empty_like(parts) for _ in range(dist.get_world_size(group))]
                dist.all_gather([bytes_of(x.flatten()) for x in got], bytes_of(parts.flatten()), group=group)
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
        q_segments: Tensor | None = None,
        k_segments: Tensor | None = None,
        block_rows: Tensor | None = None,
        block_columns: Tensor | None = None,
        block_size: int | tuple[int, int] | None = None,
    ) -> Any:
        """heddle.attention of sequences that lie divided as `shard` does it: this process's rows of the result.

        Args:
            q, k, v: [b, h, s, d], [b, hk, s, d] and [b, hk, s, dv]: this process's rows of all heads, on the CPU or on
                its GPU (whose work is queued on the current stream).
            causal, window, scale, softcap, dropout, return_lse, deterministic: as heddle.attention, of whole sequences.
            alibi_slopes, sinks: as heddle.attention, of all heads, the same on all processes. The gradient of sinks is
                that of this process's rows: it is to be summed over the processes, as every parameter's.
            rng_state: as heddle.attention; the same on all processes. Default: drawn by the first of them.
            q_segments, k_segments: int32 [b, s], or [s], of this process's rows: what `shard` makes of the ids of whole
                sequences, such as those of documents. No k_segments: those of q.
            block_rows, block_columns, block_size: as heddle.attention, of whole sequences and all heads, the same on
                all processes; with a ring a process's runs are whole blocks. Keys that no list of a process's queries
                names do not travel to it. The host reads them: on the CPU they keep it from waiting for a GPU.

        Returns:
            out [b, h, s, dv], or (out, lse): to the bit of dropout what one process would have there.

        Raises:
            TypeError, ValueError: as heddle.attention; heads that the all-to-all cannot divide; rows that are not of
                the same number, or options that are not the same, on all processes. Nothing has been computed then.
            NotImplementedError: tensors of another kind of device; what the kernels cannot do; within torch.vmap and
                other transformations of torch.func; when gradients of a ring are differentiated (method="heads" has
                second derivatives).
            RuntimeError: what torch.distributed says where another process fails or is late.
        """
        listed = not (block_rows is block_columns is None and block_size is None)
        if self._alone and q_segments is k_segments is None and not listed:
            bare = alibi_slopes is sinks is rng_state is None and type(q) is type(k) is type(v) is Tensor
            if not (bare and q.dtype is k.dtype is v.dtype):  # what many processes refuse
                q, k, v = as_autocast(q, k, v)
                check(q, k, v, alibi_slopes, sinks, self.runs, self.heads)
                alibi_slopes, sinks = (
                    None if t is None else t.to(q.device, real_of(q.dtype)) for t in (alibi_slopes, sinks)
                )
                numbers_of(rng_state)
                rng_state = None if rng_state is None else rng_state.to(q.device)
            elif not (softcap or dropout or return_lse) and (window, scale, deterministic) == _NOT_GIVEN:
                return attention(q, k, v, causal=causal)
            return attention(
                *(q, k, v),
                causal=causal,
                window=window,
                scale=scale,
                softcap=softcap,
                alibi_slopes=alibi_slopes,
                sinks=sinks,
                dropout=dropout,
                rng_state=rng_state,
                return_lse=return_lse,
                deterministic=deterministic,
            )
        numbers = dict.fromkeys(AGREED, 0)
        trouble: Exception | None = None
        drawn, ids, lists = False, None, None
        try:
            if _are_transforms_active():
                raise NotImplementedError("heddle.parallel runs within no transformation of torch.func (vmap or grad)")
            q, k, v = as_autocast(q, k, v)
            check(q, k, v, alibi_slopes, sinks, self.runs, self.heads)
            ids = segments_of(q, k, q_segments, k_segments)
            left, right = window_of(window)
            whole = {name: t.shape[2] * self.ring * self.heads for name, t in (("q", q), ("k", k))}
            lists = self._lists((*q.shape[:2], whole["q"], whole["k"]), block_rows, block_columns, block_size)
            corner = causal_of(causal, whole["q"], whole["k"])
            drawn = bool(dropout) and rng_state is None
            seed, offset = numbers_of(rng_state)
            if drawn:
                seed, offset = new_rng_state(torch.device("cpu")).tolist()
            own = (*q.shape, *k.shape[1:3], v.shape[3], DTYPES[q.dtype], corner, left, right, bits_of(scale_of(scale)))
            own = (
                *own,
                bits_of(number_of("softcap", softcap)),
                bits_of(number_of("dropout", dropout)),
                alibi_slopes is not None,
                sinks is not None,
            )
            own = (*own, ids is not None, 0 if lists is None else lists.fingerprint(), self.runs, *self._ways)
            # Backward travels, too.
            grads = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (q, k, v, sinks)]
            own = (*own, bool(return_lse), sum(1 << x for x, wanted in enumerate(grads) if wanted))
            numbers = dict(zip(AGREED, map(int, (*own, drawn, seed, offset)), strict=True))
        except Exception as error:  # the others are told, and wait for nobody
            trouble = error
        given = tuple(numbers.values())
        if trouble is not None or drawn or self._compare == "always" or given not in self._agreed:
            alike = self._agree(numbers, trouble)
            seed, offset = alike["seed"], alike["offset"]
            self._agreed.add(given)
        self._begin(q.device)
        real = real_of(q.dtype)
        slopes = None if alibi_slopes is None else alibi_slopes.to(q.device, real).resolve_neg()
        sinks = None if sinks is None else sinks.to(q.device, real).resolve_neg()
        q, k, v = (t.resolve_neg() for t in (q, k, v))  # their memory is read
        h = q.shape[1]
        if self.heads > 1:
            q, k, v = self._exchange(True, q, k, v)
            mine = slice(self.heads_rank * h // self.heads, (self.heads_rank + 1) * h // self.heads)
            lists = None if lists is None else lists.of_heads(mine)
            slopes = None if slopes is None else slopes[..., mine]
            sinks = None if sinks is None else sinks[mine]
        q, k, v = (t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in (q, k, v))
        slopes = None if slopes is None else slopes.contiguous()
        segments = None if ids is None else (self._of_heads(ids[0]), self._of_heads(ids[1]))
        if self.ring == 1:  # whole sequences: nothing travels but heads
            named: tuple[Any, ...] = (None, None)
            if lists is not None:
                named = tuple(t.to(q.device) for t in lists.part([0], [0], whole))
            made = attention(
                *(q, k, v),
                causal=(None, "top_left", "bottom_right")[corner],
                window=window,
                scale=scale,
                softcap=softcap,
                alibi_slopes=slopes,
                sinks=sinks,
                dropout=dropout,
                rng_state=torch.tensor([seed, offset], device=q.device) if dropout else None,
                return_lse=return_lse,
                deterministic=deterministic,
                h_offset=self.heads_rank * q.shape[1],
                whole_h=h if self.heads > 1 else 0,
                q_segments=None if segments is None else segments[0],
                k_segments=None if segments is None else segments[1],
                block_rows=named[0],
                block_columns=named[1],
                block_size=None if lists is None else lists.sizes,
            )
            out, lse = made if return_lse else (made, None)
            return self._to_rows(out, lse)
        features = BITS["accumulate"] | (BITS["window"] if left >= 0 or right >= 0 else 0)
        features |= BITS["deterministic"] if deterministic else 0
        features |= 0 if slopes is None else BITS["alibi"]
        features |= 0 if ids is None else BITS["segments"]
        features |= 0 if lists is None else BITS["blocks"]
        sizes = (0, 0) if lists is None else lists.sizes
        description: dict[str, Any] = {
            "dtype": DTYPES[q.dtype],
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
            "window_left": left if features & BITS["window"] else 0,
            "window_right": right if features & BITS["window"] else 0,
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
            "block_q": sizes[0],
            "block_k": sizes[1],
            "blocks_of_b": int(lists is not None and lists.rows.shape[0] != 1),
            "blocks_of_h": int(lists is not None and lists.rows.shape[1] != 1),
        }
        with on(q.device):
            _C.workspace("attention", BACKWARD, description)  # what the library refuses it refuses here, on all alike
        off = 0 if corner == 1 else whole["k"] - whole["q"]
        low = off - left if left >= 0 else -math.inf
        high = min(off if corner else math.inf, off + right if right >= 0 else math.inf)
        rows = {"q": description["sq"], "k": description["sk"]}
        placed = slopes is not None or dropout > 0
        places = self._places_of(rows, (low, high), placed, lists)
        peers = self._shared(self.ring_group) if self.ring > 1 else None
        ring = Ring(self.ring_group, places, description, q.device, peers, self._limit(q.device), lists=lists)
        if segments is not None:
            ring.q_segments = segments[0]
            ring.k_segments = tuple(gather(segments[1], self.ring_group))
        with on(q.device):
            out, lse = ring_attention(ring, q, k, v, slopes, sinks)
        return self._to_rows(out, lse if return_lse else None)

    def _places_of(
        self, rows: dict[str, int], band: tuple[float, float], placed: bool, lists: BlockLists | None
    ) -> Places:
        """The same for calls with the same sizes and masks, but where lists of blocks say who sees whom."""
        at = self.ring, self.ring_rank, self.runs
        if lists is not None:
            return Places(at, rows, band, placed, lists.shown(self.ring * self.runs, rows))
        key = (*rows.values(), *band, placed)
        if key not in self._places:
            if len(self._places) >= _MOST_PLACES:
                self._places.clear()
            self._places[key] = Places(at, rows, band, placed)
        return self._places[key]

    def _to_rows(self, out: Tensor, lse: Tensor | None) -> Any:
        """Results of this process's heads as those of its rows."""
        if self.heads > 1:
            out, *more = self._exchange(False, out, *(() if lse is None else (lse[..., None],)))
            lse = more[0][..., 0] if more else None
        return out if lse is None else (out, lse)

    def _lists(
        self, extents: tuple[int, int, int, int], block_rows: Any, block_columns: Any, block_size: Any
    ) -> BlockLists | None:
        """Lists of blocks of whole sequences."""
        rows, columns, sizes = blocks_of(block_rows, block_columns, block_size)
        if rows is None or columns is None:
            return None
        lists = BlockLists(rows, columns, sizes)
        lists.check(extents)
        for name, whole, size in zip("qk", extents[2:], sizes, strict=True):
            run = whole // (self.ring * self.runs)
            if self.ring > 1 and run % size:
                raise HeddleValueError(
                    f"a process has runs of {run} rows of {name}, which are not whole blocks of {size}"
                )
        return lists

    def _of_heads(self, ids: Tensor) -> Tensor:
        """Ids of the rows that the all-to-all over heads brings, in their order."""
        got, (b, s) = gather(ids, self.heads_group), ids.shape
        return torch.stack(got).view(len(got), b, self.runs, s // self.runs).permute(1, 2, 0, 3).reshape(b, -1)

    def _begin(self, device: torch.device) -> None:
        """NCCL's first message of a group needs all its processes, and in a ring not everybody has one to send."""
        if self._begun or device.type != "cuda":
            return
        for group, talk in self._talk.items():
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            if self._transport == "auto":
                self._peers[group] = Peers.join(group, talk, device)
        self._begun = True

    def _limit(self, device: torch.device) -> int:
        """Multiprocessors that attention may take beside messages; 0: all."""
        if not self._leave or device.type != "cuda":
            return 0
        return max(1, int(torch.cuda.get_device_properties(device).multi_processor_count) - self._leave)

    def _shared(self, group: dist.ProcessGroup | None) -> Peers | None:
        found = None if group is None else self._peers.get(group)
        return found if isinstance(found, Peers) else None

    def _exchange(self, to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        peers = self._shared(self.heads_group)
        made: tuple[Tensor, ...] = exchange(self.heads_group, self.runs, to_heads, peers, *tensors)
        return made

    @property
    def routes(self) -> dict[str, str]:
        """How keys and values travel in the ring, and heads among the processes that divide them: "messages", with why
        their memory is not shared, or "shared memory". Known after the first call."""
        found: dict[str, str] = {}
        for name, group in (("ring", self.ring_group), ("heads", self.heads_group)):
            if group is not None:
                how = self._peers.get(group, "")
                why = "" if isinstance(how, Peers) or not how else f": {how}"
                found[name] = "shared memory" if isinstance(how, Peers) else f"messages{why}"
        return found

    def _agree(self, mine: dict[str, int], trouble: Exception | None) -> dict[str, int]:
        """Whether all processes have been given the same: that, with the seed and the offset of the first."""
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
                wrong = wrong or difference(tuple(mine), first, other.tolist(), kind, rank)
            seen = dict(zip(mine, first[1:], strict=True))
        if trouble is not None:
            raise trouble
        if wrong:
            raise HeddleValueError(f"the processes do not agree: {wrong}")
        return seen
