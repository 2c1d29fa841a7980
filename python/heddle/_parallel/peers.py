# SPDX-License-Identifier: Apache-2.0
"""The GPUs of one host as ``heddle.parallel`` uses them: each process lays what the others need into memory that all of
them reach, and copy engines move it, so that no message takes a multiprocessor from the attention kernels. The memory
is PyTorch's (torch.distributed._symmetric_memory)."""

from __future__ import annotations

import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from heddle import _C

_ALIGN = 256  # bytes: where a part of the memory may begin
_SECONDS = 600.0  # NCCL's own limit, for a group that names none


def regular(tensor: Tensor) -> Tensor:
    """[b, h, s, d] whose heads lie each in one piece, apart from each other, as they are copied: by their memory."""
    tensor = tensor.resolve_neg()
    head = tensor[0, 0]
    apart = all(n == 1 or x >= head.numel() for n, x in zip(tensor.shape[:2], tensor.stride()[:2], strict=True))
    return tensor if apart and head.is_contiguous() else tensor.contiguous()


def runs_of(to: Tensor, source: Tensor) -> list[tuple[int, int, int, int, int, int]]:
    """Where runs of bytes go and come from, in as few rectangles as their distances allow: the address and the distance
    of either, the bytes, how many."""
    size = source.element_size()
    if source.dim() != 4 or (to.is_contiguous() and source.is_contiguous()):
        count = source.numel() * size
        return [(to.data_ptr(), count, source.data_ptr(), count, count, 1)]
    b, h = source.shape[:2]
    run = source[0, 0].numel() * size
    if h == 1 or all(t.stride(0) == h * t.stride(1) for t in (to, source)):
        b, h = 1, b * h
    steps = [size * t.stride(0 if source.shape[1] == 1 else 1) if h > 1 else run for t in (to, source)]
    at = [[t.data_ptr() + x * t.stride(0) * size for x in range(b)] for t in (to, source)]
    return [(there, steps[0], here, steps[1], run, h) for there, here in zip(*at, strict=True)]


def aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


class Copy:
    """A copy on its way, with what it reads and writes. `wait` makes the current stream wait for it, not the host; then
    all processes meet if that was asked for."""

    busy = False  # it takes no multiprocessor

    def __init__(self, peers: Peers, done: Any, tensors: tuple[Tensor, ...]) -> None:
        self.peers, self.done, self.tensors = peers, done, tensors
        self.meets = False

    def wait(self) -> None:
        if self.done is not None:
            torch.cuda.current_stream(self.peers.device).wait_event(self.done)
        if self.meets:
            self.peers.meet()
        self.tensors = ()


class Peers:
    """The memory of the processes of a group. One pass after the other uses it: `arrive`, then the pass with its
    copies and meetings, then `leave`."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device, self.rank = group, device, dist.get_rank(group)
        self.size = 0
        self.memory: list[Tensor] = []  # bytes, of each process
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.left: Any = None  # the end of the pass before, whose stream may have been another
        self._handle: Any = None
        options = getattr(group._get_backend(device), "options", None)
        limit = getattr(options, "_timeout", None)
        self._milliseconds = int(1000 * (_SECONDS if limit is None else limit.total_seconds()))

    @classmethod
    def join(cls, group: dist.ProcessGroup, talk: dist.ProcessGroup, device: torch.device) -> Peers | str:
        """Of all processes of the group alike; or why there are none. talk: the same processes, by their hosts."""
        hosts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(hosts, socket.gethostname(), group=talk)
        if len(set(hosts)) > 1:
            return f"the processes are on {len(set(hosts))} hosts"
        made, why = None, ""
        try:
            made = cls(group, device)
            made.need(_ALIGN)
        except (ImportError, AttributeError, RuntimeError) as error:
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        whys: list[Any] = [None] * len(hosts)
        dist.all_gather_object(whys, why, group=talk)
        found = [(rank, other) for rank, other in enumerate(whys) if other]
        if found or made is None:
            return f"process {found[0][0]} of the group: {found[0][1]}"
        return made

    def need(self, size: int) -> None:
        """So many bytes at least, of every process; all ask for the same."""
        if size <= self.size:
            return
        import torch.distributed._symmetric_memory as symmetric

        torch.cuda.synchronize(self.device)  # nobody reads what is there now
        memory = symmetric.empty(size, dtype=torch.uint8, device=self.device)
        self._handle = symmetric.rendezvous(memory, self.group)
        self.memory = [self._handle.get_buffer(x, (size,), torch.uint8) for x in range(dist.get_world_size(self.group))]
        self.memory[self.rank] = memory
        self.size = size

    def part(self, rank: int, first: int, count: int, dtype: torch.dtype) -> Tensor:
        """So many numbers of a process's memory, from the byte `first` on."""
        return self.memory[rank][first : first + count * dtype.itemsize].view(dtype)

    def arrive(self, size: int) -> None:
        """All have left the pass before: what is in the memory may be overwritten."""
        self.need(size)
        if self.left is not None:
            torch.cuda.current_stream(self.device).wait_event(self.left)
        self.meet()

    def meet(self) -> None:
        """On the current streams of all processes: what each has queued before is done, and seen by the others."""
        self._handle.barrier(channel=0, timeout_ms=self._milliseconds)

    def copy(self, *pairs: tuple[Tensor, Tensor]) -> Copy:
        """Each (to, source) of the same type and shape, flat or [b, h, s, d] that is `regular`. Beside what is queued
        from now on; `source` is there, and `to` is free, when what was queued before is done."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device):
            for to, source in pairs:
                for runs in runs_of(to, source):
                    _C.cuda_copy(*runs, self.stream.cuda_stream)
        return Copy(self, self.stream.record_event(), tuple(t for pair in pairs for t in pair))

    def nothing(self) -> Copy:
        return Copy(self, None, ())

    def leave(self) -> None:
        self.left = torch.cuda.current_stream(self.device).record_event()
