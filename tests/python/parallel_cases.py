# SPDX-License-Identifier: Apache-2.0
"""What test_parallel.py runs: groups of processes, forked from one that has imported torch, run every case and compare
with the whole in one process; by gloo on the CPU, or with HEDDLE_PARALLEL_DEVICE=cuda by NCCL, a GPU each. Prints a
line of JSON for each process."""

from __future__ import annotations

import datetime
import importlib
import json
import os
import random
import runpy
import socket
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from parallel_refusals import DEVICE, RNG, check_refusals, check_unlike, named, refuses
from torch.distributed.device_mesh import DeviceMesh

import heddle
import heddle.nn
from heddle._parallel import ring as _ring
from heddle._parallel.peers import Copy, Peers
from heddle.parallel import ContextParallel

LONG = os.environ.get("HEDDLE_LONG", "0") not in ("", "0")
H, HK, S = 24, 12, 48  # divided by 2, 3 and 4, and zigzag by twice as many
SLOPES = torch.linspace(0.02, 0.4, H)
# Documents in a row, then in any order; and some ids that no query has.
IDS = torch.stack((torch.arange(S) // 11, torch.arange(S) * 5 % 3)).int()
IDS_OF_KEYS = torch.stack((torch.arange(2 * S) // 19 + 1, torch.arange(2 * S) * 7 % 4)).int()

# Options, dtype, rows of keys.
CASES = {
    "plain": ({}, torch.float64, S),
    "causal": ({"causal": True}, torch.float64, S),
    "causal, float32": ({"causal": True}, torch.float32, S),
    "causal, bfloat16": ({"causal": "top_left"}, torch.bfloat16, S),
    "one sequence, causal, lse": ({"causal": True, "return_lse": True}, torch.float64, S),
    "one sequence, causal, bfloat16": ({"causal": True}, torch.bfloat16, S),
    "more keys, bottom right": ({"causal": "bottom_right"}, torch.float64, 2 * S),
    "fewer rows seen": ({"causal": "bottom_right", "return_lse": True}, torch.float64, S // 2),
    "window": ({"window": (5, 3)}, torch.float64, S),
    "causal, window, alibi": ({"causal": True, "window": (9, None), "alibi_slopes": SLOPES}, torch.float64, S),
    "softcap, sinks, lse": (
        {"causal": True, "softcap": 2.0, "sinks": torch.linspace(-2, 2, H), "return_lse": True},
        torch.float64,
        S,
    ),
    "sinks, no key in sight": ({"sinks": torch.linspace(-2, 2, H), "causal": "bottom_right"}, torch.float64, S // 2),
    "segments": ({"q_segments": IDS, "k_segments": IDS}, torch.float64, S),
    "segments, causal, one id": ({"q_segments": IDS[0], "causal": True, "return_lse": True}, torch.float32, S),
    "segments, more keys, sinks": (
        {"q_segments": IDS, "k_segments": IDS_OF_KEYS, "sinks": torch.linspace(-2, 2, H), "window": (30, 9)},
        torch.float64,
        2 * S,
    ),
    "dropout": ({"dropout": 0.3, "rng_state": RNG}, torch.float64, S),
    "dropout, causal, lse": ({"dropout": 0.5, "rng_state": RNG, "causal": True, "return_lse": True}, torch.float64, S),
}

# Those that more than two processes run, too; HEDDLE_LONG: all.
RICH = [name for name in CASES if "," in name and name not in ("causal, float32", "sinks, no key in sight")] + [
    "window"
]


def inputs(dtype: torch.dtype, sk: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = ((2, H, S, 8), (2, HK, sk, 8), (2, HK, sk, 6))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype) for shape in shapes]


def on(device, options):
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}


def loss_of(results, weights) -> torch.Tensor:
    return sum((r.double() * w).sum() for r, w in zip(results, weights, strict=True))


def weights_of(results, generator=None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.device) for r in results]


def with_sinks(options, leaves):
    """The options, and the leaves with those of the sinks, if there are any."""
    if "sinks" not in options:
        return options, leaves
    real = torch.float64 if leaves[0].dtype == torch.float64 else torch.float32
    sinks = options["sinks"].to(real).requires_grad_()
    return options | {"sinks": sinks}, [*leaves, sinks]


def whole(options, tensors):
    """Results and gradients of one process."""
    options = on(tensors[0].device, options)
    options, leaves = with_sinks(options, [t.clone().requires_grad_() for t in tensors])
    results = heddle.attention(*leaves[:3], **options)
    results = results if isinstance(results, tuple) else (results,)
    finite = [r.masked_fill(r == -torch.inf, 0) for r in results]
    grads = torch.autograd.grad(loss_of(finite, weights_of(results)), leaves)
    return [r.detach() for r in results], grads


_wholes = {}


def whole_and_exact(key, options, dtype: torch.dtype, tensors):
    """What one process gives, and the exact numbers: of each problem once, by the first process for all of them."""
    if key not in _wholes:
        made = [None]
        if dist.get_rank() == 0 or DEVICE == "cuda":  # a GPU each: NCCL's objects would come from another one
            its = whole(options, tensors)
            made[0] = its, its if dtype == torch.float64 else whole(options, [t.cpu().double() for t in tensors])
        if DEVICE == "cpu":
            dist.broadcast_object_list(made)
        _wholes[key] = made[0]
    return _wholes[key]


def divided(parallel: ContextParallel, options, tensors):
    """The same of this process's part, joined again."""
    options = on(DEVICE, options)
    ids = {name: parallel.shard(x, -1) for name, x in options.items() if name.endswith("_segments")}
    options, leaves = with_sinks(options | ids, [parallel.shard(t, 2).requires_grad_() for t in tensors])
    results = parallel.attention(*leaves[:3], **options)
    results = results if isinstance(results, tuple) else (results,)
    joined = [parallel.unshard(r.detach(), 2) for r in results]
    weights = [parallel.shard(w, 2) for w in weights_of(joined)]
    finite = [r.masked_fill(r == -torch.inf, 0) for r in results]
    grads = list(torch.autograd.grad(loss_of(finite, weights), leaves))
    if "sinks" in options:
        dist.all_reduce(grads[3])
    return joined, [parallel.unshard(g, 2) for g in grads[:3]] + grads[3:]


def error_of(x: torch.Tensor, right: torch.Tensor) -> float:
    x, right = x.cpu(), right.cpu()
    assert torch.equal(x == -torch.inf, right == -torch.inf)
    x, right = (t.detach().double().masked_fill(t == -torch.inf, 0) for t in (x, right))
    return float((x - right).abs().max() / (right.abs().max() or 1))


def check_case(parallel: ContextParallel, name: str) -> None:
    options, dtype, sk = CASES[name]
    if DEVICE == "cuda" and dtype == torch.float64:  # of which the CPU's reference is the judge
        dtype = torch.float32
    first = slice(1 if name.startswith("one sequence") else None)
    compare(parallel, name, options, dtype, [t[first] for t in inputs(dtype, sk)])


def shown_blocks(b: int, h: int, blocks: int) -> torch.Tensor:
    """[b, h, queries, keys]: a third of all, and some that nobody sees or that see nothing."""
    shown = torch.rand(b, h, blocks, blocks, generator=torch.Generator().manual_seed(8)) < 0.3
    shown[..., blocks // 2, :] = False
    shown[..., : blocks // 2, -1] = False
    return shown


def check_lists(parallel: ContextParallel) -> list[str]:
    """Of whole sequences; with a ring of runs of two blocks, which some lists do not need at all."""
    b, h, runs = 2, 12, parallel.ring * parallel.runs
    s = 128 * runs if parallel.ring > 1 else 150 * parallel.heads
    s += -s % parallel.pieces
    generator = torch.Generator().manual_seed(7)
    tensors = [torch.randn(b, h, s, 8, generator=generator).to(DEVICE) for _ in range(3)]
    blocks = -(-s // 64)
    kinds = {
        "alike": (shown_blocks(1, 1, blocks), {}),
        "each head, causal": (shown_blocks(1, h, blocks), {"causal": True, "return_lse": True}),
        "each batch, window, segments": (
            shown_blocks(b, 1, blocks),
            {"window": (200, 90), "q_segments": (torch.arange(s) // 150).int()},
        ),
        "nothing": (
            torch.zeros(1, 1, blocks, blocks, dtype=torch.bool),
            {"sinks": torch.linspace(-2, 2, h), "return_lse": True},
        ),
    }
    for name, (shown, more) in kinds.items():
        rows, columns = heddle.block_lists(shown)
        options = {"block_rows": rows, "block_columns": columns, "block_size": 64, **more}
        try:
            compare(parallel, (name, s), options, torch.float32, tensors)
        except Exception as error:
            raise AssertionError(f"{parallel}, lists of blocks, {name}: {error}") from error
    if parallel.ring > 1:
        q = torch.zeros(b, h, 72 * parallel.runs, 8, device=DEVICE)
        blocks = -(-q.shape[2] * parallel.ring * parallel.heads // 64)
        lists = heddle.block_lists(torch.ones(blocks, blocks, dtype=torch.bool))
        refuses("whole blocks of 64", lambda: parallel.attention(q, q, q, **named(lists)))
    return [f"lists of blocks, {name}" for name in kinds]


def compare(parallel: ContextParallel, key, options, dtype: torch.dtype, tensors) -> None:
    """With one process; the same key is the same problem."""
    mine = divided(parallel, options, tensors)
    its, right = whole_and_exact(key, options, dtype, tensors)
    names = ["out", "lse"][: len(its[0])], ["dq", "dk", "dv", "dsinks"]
    for kind, of in enumerate(names):
        for what, x, one, exact in zip(of, mine[kind], its[kind], right[kind], strict=False):
            assert x.dtype == one.dtype
            error = error_of(x, exact)
            # No more than twice one process's, which float64's is compared with itself.
            limit = 1e-12 if dtype == torch.float64 else 2 * error_of(one, exact) + 1e-6
            assert error <= limit, f"{what} is off by {error:.2e}, one process's by {limit:.2e}"


def check_layout(parallel: ContextParallel) -> None:
    x = torch.randn(3, S, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
    assert torch.equal(parallel.unshard(parallel.shard(x)), x)
    assert torch.equal(parallel.shard(x), x[:, parallel.positions(S)])
    assert torch.equal(parallel.unshard(parallel.positions(S, DEVICE), 0), torch.arange(S, device=DEVICE))
    for length, call in ((S + 1, parallel.shard), (S - 1, lambda x: parallel.shard(x, 1))):
        refuses(f"sequence of {length} cannot be divided", lambda length=length, call=call: call(torch.ones(1, length)))


def check_second(parallel: ContextParallel) -> None:
    """Second derivatives where only heads travel; with a ring an error, and what is first derivatives alone."""
    tensors = inputs(torch.float64 if DEVICE == "cpu" else torch.float32, S)
    near = {"rtol": 1e-7, "atol": 1e-7} if DEVICE == "cpu" else {"rtol": 1e-3, "atol": 1e-3}
    leaves = [t.clone().requires_grad_() for t in tensors]
    mine = [parallel.shard(t, 2).requires_grad_() for t in tensors]
    o, its = heddle.attention(*leaves, causal=True), parallel.attention(*mine, causal=True)
    for loss in (torch.sum, lambda x: x.square().sum()):
        grads = torch.autograd.grad(loss(o), leaves, create_graph=True)
        found = torch.autograd.grad(loss(its), mine, create_graph=True)
        for g, x in zip(grads, found, strict=True):
            torch.testing.assert_close(parallel.shard(g, 2), x, **near)
        if parallel.ring > 1:
            for g in found:
                second = partial(torch.autograd.grad, g.square().sum(), mine, retain_graph=True, allow_unused=True)
                refuses("no second derivative of a ring", second)
            continue
        right = torch.autograd.grad(sum(g.square().sum() for g in grads), leaves, retain_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in found), mine, retain_graph=True)
        for g, x in zip(right, second, strict=True):
            torch.testing.assert_close(parallel.shard(g, 2), x, **near)


def check_negative(parallel: ContextParallel) -> None:
    """What PyTorch's negative bit says of tensors' memory."""
    tensors = [parallel.shard(t, 2) for t in inputs(torch.float32, S)]
    ids = parallel.shard(IDS.to(DEVICE), -1)
    options = {"sinks": torch.linspace(-2, 2, H), "alibi_slopes": SLOPES, "q_segments": ids, "causal": True}
    options["deterministic"] = True
    dout = torch.randn((*tensors[0].shape[:-1], 6), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    found = []
    for kind in (lambda t: t, lambda t: torch._neg_view(-t)):
        given = {name: kind(t) if isinstance(t, torch.Tensor) else t for name, t in options.items()}
        leaves = [kind(t).detach().requires_grad_() for t in tensors]
        given["sinks"] = given["sinks"].detach().requires_grad_()
        leaves.append(given["sinks"])
        out, lse = parallel.attention(*leaves[:3], return_lse=True, **given)
        grads = torch.autograd.grad((out, lse), leaves, (kind(dout), kind(dout[..., 0])))
        found.append([out.detach(), lse.detach(), *grads, parallel.unshard(kind(tensors[0]), 2)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    pair = torch.complex(*tensors[:1] * 2).conj()
    assert torch.equal(parallel.unshard(pair, 2), parallel.unshard(pair.resolve_conj(), 2))


def check_expanded(parallel: ContextParallel) -> None:
    """Tensors whose rows, heads or sequences are one and the same in memory."""
    for b, axis in ((1, None), (1, 2), (2, 1), (2, 0)):
        shape = [b, H, S // parallel.pieces * parallel.runs, 8]
        one = [1, 1, 1, 8] if axis is None else [1 if at == axis else size for at, size in enumerate(shape)]
        leaves = [t.requires_grad_() for t in torch.randn(3, *one, device=DEVICE)]
        found = []
        for lay in (lambda t: t, torch.Tensor.contiguous):
            out = parallel.attention(*(lay(t.expand(shape)) for t in leaves), causal=True, deterministic=True)
            found.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
        for x, y in zip(*found, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def check_autocast(parallel: ContextParallel) -> None:
    """As heddle.attention, also of tensors that differ in type."""
    q, k, v = (parallel.shard(t, 2) for t in inputs(torch.float32, S))
    half = torch.bfloat16
    right = parallel.attention(q.to(half), k.to(half), v.to(half), causal=True)
    for given in ((q, k, v), (q, k.to(half), v)):
        with torch.autocast(DEVICE, half):
            assert heddle.attention(*given).dtype == half
            out = parallel.attention(*given, causal=True)
        assert torch.equal(out, right)
    with torch.autocast(DEVICE, half):
        refuses("alike", lambda: parallel.attention(q, k.double(), v))
        if DEVICE == "cpu":
            assert parallel.attention(q.double(), k.double(), v.double()).dtype == torch.float64
    refuses("alike", lambda: parallel.attention(q, k.to(half), v))


def check_module(mesh) -> None:
    torch.manual_seed(9)
    whole = heddle.nn.TransformerBlock(24, 12, causal=True).to(DEVICE)
    parallel = ContextParallel(mesh)
    mine = heddle.nn.TransformerBlock(24, 12, causal=True, context_parallel=parallel).to(DEVICE)
    mine.load_state_dict(whole.state_dict())
    x = torch.randn(2, S, 24, device=DEVICE)
    y = whole(x)
    torch.testing.assert_close(parallel.unshard(mine(parallel.shard(x)).detach()), y.detach(), rtol=1e-4, atol=1e-5)
    refuses("bias and mask", lambda: mine(parallel.shard(x), bias=torch.zeros(1)))
    ids = IDS.to(DEVICE)
    joined = parallel.unshard(mine.attention(parallel.shard(x), segments=parallel.shard(ids)).detach())
    torch.testing.assert_close(joined, whole.attention(x, segments=ids).detach(), rtol=1e-4, atol=1e-5)
    y.square().sum().backward()
    mine(parallel.shard(x)).square().sum().backward()
    for a, b in zip(whole.parameters(), mine.parameters(), strict=True):
        dist.all_reduce(b.grad)
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-3, atol=1e-4)


def check_travel(rank: int, world: int) -> None:
    """What travels is on its way before anything is computed, and no further than a window sees."""
    messages = {"transport": "messages"}
    parallel, log, limits = ContextParallel(dist.group.WORLD, zigzag=False, **messages), [], []
    post, run = dist.batch_isend_irecv, _ring._C.run

    def logged_post(operations):
        log.extend((op.op.__name__, op.group_peer) for op in operations)
        return post(operations)

    def logged_run(*args):
        log.append(("run", None))
        limits.append((args[1], args[2]["multiprocessors"]))
        return run(*args)

    q = torch.randn(1, 1, 12, 8, device=DEVICE)
    dist.batch_isend_irecv, dist_run = logged_post, _ring._C
    _ring._C = type("C", (), {"run": staticmethod(logged_run), "workspace": staticmethod(dist_run.workspace)})
    try:
        parallel.attention(q, q, q)
        assert log[0][0] != "run" and ("run", None) in log
        assert len([x for x in log if x[0] == "isend"]) == world - 1
        log.clear()
        parallel.attention(q, q, q, causal=True, window=(5, 0))
        sent, got = ([peer for name, peer in log if name == what] for what in ("isend", "irecv"))
        assert sent == ([rank + 1] if rank + 1 < world else [])
        assert got == ([rank - 1] if rank else [])
        log.clear()
        shown = torch.eye(world, dtype=torch.bool)
        shown[torch.arange(1, world), torch.arange(world - 1)] = True  # a process's own block, and that in front of it
        x = torch.randn(1, 1, 64, 8, device=DEVICE)
        parallel.attention(x, x, x, **named(heddle.block_lists(shown)))
        sent, got = ([peer for name, peer in log if name == what] for what in ("isend", "irecv"))
        assert sent == ([rank + 1] if rank + 1 < world else [])
        assert got == ([rank - 1] if rank else [])
        log.clear()
        ContextParallel(dist.group.WORLD, **messages).attention(q, q, q, causal=True)
        assert log.count(("run", None)) == world  # all that meets in a step at once
        check_limit(parallel, q, limits, world)
    finally:
        dist.batch_isend_irecv, _ring._C = post, dist_run


def check_limit(parallel: ContextParallel, q, limits, world: int) -> None:
    """What is computed beside messages leaves some multiprocessors to them: all but forward's last step and, where
    gradients have come back, backward's."""
    leaves = [q.clone().requires_grad_() for _ in range(3)]
    for limit in (0, 7):
        limits.clear()
        parallel._limit = lambda device, limit=limit: limit
        torch.autograd.grad(parallel.attention(*leaves).sum(), leaves)
        forward, backward = ([n for which, n in limits if which == x] for x in (_ring.FORWARD, _ring.BACKWARD))
        assert forward == [limit] * (world - 1) + [0], forward
        # The first step's keys, then keys or gradients; of two processes the last step has neither beside it.
        assert backward == [limit] + [limit] * (world - 2) + [limit if world > 2 else 0], backward


class LateCopy(Copy):
    """One that is made when somebody waits for it, or at once: so reading or overwriting too early shows."""

    def __init__(self, peers, *pairs) -> None:
        super().__init__(peers, None, ())
        self.pairs = pairs
        if random.random() < 0.5:
            self.make()

    def make(self) -> None:
        for to, source in self.pairs:
            to.copy_(source)
        self.pairs = ()

    def wait(self) -> None:
        self.make()
        super().wait()


class FilePeers(Peers):
    """What GPUs share, as a file that processes of one host have mapped: its orders are those of the real one."""

    def __init__(self, group, folder: Path) -> None:
        self.group, self.folder, self.size, self.memory, self.left = group, folder, 0, [], None
        self.rank = dist.get_rank(group)

    def need(self, size: int) -> None:
        if size <= self.size:
            return
        names = [self.folder / f"{rank}-{size}" for rank in range(dist.get_world_size(self.group))]
        mine = names[dist.get_rank(self.group)]
        mine.write_bytes(b"\xff" * size)
        dist.barrier(self.group)
        self.memory = [torch.from_file(str(name), shared=True, size=size, dtype=torch.uint8) for name in names]
        dist.barrier(self.group)
        self.size = size
        mine.unlink()

    def meet(self) -> None:
        dist.barrier(self.group)

    def arrive(self, size: int) -> None:
        self.need(size)
        self.meet()
        if not self.left:
            raise AssertionError("a pass has begun within another")
        self.left = False
        self.memory[dist.get_rank(self.group)].fill_(255)  # what nobody has laid down is NaN
        self.meet()

    def copy(self, *pairs) -> Copy:
        return LateCopy(self, *pairs)

    def nothing(self) -> Copy:
        return LateCopy(self)

    def leave(self) -> None:
        self.left = True


def share_files(parallel: ContextParallel, folder: str) -> ContextParallel:
    for name, group in (("ring", parallel.ring_group), ("heads", parallel.heads_group)):
        if group is not None:
            ranks = "-".join(map(str, dist.get_process_group_ranks(group)))
            place = Path(folder, f"{name}-{ranks}")
            place.mkdir(exist_ok=True)
            parallel._peers[group] = FilePeers(group, place)
            parallel._peers[group].left = True
    return parallel


def run_shared(meshes, rank: int, folder: str) -> list[str]:
    """Through memory that all reach, in place of messages."""
    random.seed(rank)
    done = []
    for kind, (mesh, more) in meshes.items():
        parallel = share_files(ContextParallel(mesh, **more), folder)
        for name in CASES if LONG else RICH[:5]:
            try:
                check_case(parallel, name)
            except Exception as error:
                raise AssertionError(f"{parallel}, shared memory, {name}: {error}") from error
            done.append(f"{kind}, shared memory: {name}")
    return done


def run_all(rank: int, world: int, folder: str) -> list[str]:
    done = []
    check_unlike(rank)
    meshes = {
        "ring": (dist.group.WORLD, {}),
        "ring, in order": (DeviceMesh(DEVICE, list(range(world))), {"zigzag": False}),
        "heads": (dist.group.WORLD, {"method": "heads"}),
    }
    if DEVICE == "cuda":
        meshes["ring, messages"] = (dist.group.WORLD, {"transport": "messages"})
    for kind in {2: (), 3: ("ring, in order",), 4: ("ring, in order", "heads")}[world] if not LONG else ():
        del meshes[kind]  # every method, and every number of processes, but not every pair
    if world == 4:
        meshes["both"] = (DeviceMesh(DEVICE, [[0, 1], [2, 3]]), {})
        refuses("3 dimensions", lambda: ContextParallel(DeviceMesh(DEVICE, [[[0, 1], [2, 3]]])))
    if world == 3:
        pair = DeviceMesh(DEVICE, [0, 1])
        if rank == 2:
            refuses("is not in the mesh", lambda: ContextParallel(pair))
    for kind, (mesh, more) in meshes.items():
        parallel = ContextParallel(mesh, **more)
        check_layout(parallel)
        check_refusals(parallel, rank)
        for name in CASES if LONG or world == 2 else RICH:
            try:
                check_case(parallel, name)
            except Exception as error:
                raise AssertionError(f"{parallel}, {name}: {error}") from error
            done.append(f"{kind}: {name}")
        done += check_lists(parallel)
        check_second(parallel)
        check_negative(parallel)
        check_expanded(parallel)
        check_autocast(parallel)
        if DEVICE == "cuda":
            done.append(f"{kind}: {parallel.routes}")
    done += run_shared(meshes, rank, folder) if DEVICE == "cpu" else []
    check_module(meshes["ring"][0])
    check_travel(rank, world)
    done.append("module and travel")
    return done


def lose_one(rank: int) -> None:
    """The last process leaves without a word: an error on the others, no deadlock."""
    if rank == dist.get_world_size() - 1:
        os._exit(0)
    q = torch.randn(1, 1, 12, 8)
    parallel = ContextParallel(dist.group.WORLD)
    refuses("", lambda: [parallel.attention(q, q, q) for _ in range(3)], RuntimeError)


def tell(report: dict) -> None:
    """A line at once: other processes write to the same pipe."""
    os.write(1, (json.dumps(report) + "\n").encode())


def child(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(
        backend, f"file://{store}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60)
    )
    report = {"world": world, "rank": rank, "done": [], "error": ""}
    try:
        report["done"] = run_all(rank, world, str(Path(store).parent))
        dist.barrier()
        tell(report)
        if DEVICE == "cpu":  # NCCL's watchdog would end the others, not tell them
            lose_one(rank)
    except BaseException:
        report["error"] = traceback.format_exc()
        tell(report)
    os._exit(0)


def run_example(rank: int, world: int, port: int) -> None:
    """What torchrun does for examples/train_long.py."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    sizes = ["--steps", "8", "--length", "48", "--dim", "16", "--layers", "1", "--heads", "2", "--rate", "0.01"]
    sys.argv = ["train_long.py", *sizes, "--check"]
    try:
        runpy.run_path(str(Path(__file__).parents[2] / "examples/train_long.py"), run_name="__main__")
    except SystemExit as end:
        sys.stdout.flush()
        os._exit(int(end.code or 0))
    finally:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def example(world: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            run_example(rank, world, port)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    print(f"example: {codes}", flush=True)


def main() -> None:
    if DEVICE == "cpu":
        for name in ("torch._dynamo", "torch.distributed.tensor"):  # by an optimizer and torch.testing, in each child
            importlib.import_module(name)
        example(2)
    for world in map(int, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as folder:
            children = []
            for rank in range(world):
                pid = os.fork()
                if pid == 0:
                    child(rank, world, f"{folder}/store")
                children.append(pid)
            for pid in children:
                os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
