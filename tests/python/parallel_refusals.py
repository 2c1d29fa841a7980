# SPDX-License-Identifier: Apache-2.0
"""What heddle.parallel refuses, on all processes: a part of parallel_cases.py."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import heddle
from heddle.parallel import ContextParallel

DEVICE = os.environ.get("HEDDLE_PARALLEL_DEVICE", "cpu")
RNG = torch.tensor([77, 2**33 + 1])


def named(lists) -> dict:
    return {"block_rows": lists[0], "block_columns": lists[1], "block_size": 64}


def refuses(part: str, call, kind=(ValueError, TypeError, NotImplementedError)) -> None:
    try:
        call()
    except kind as error:
        assert part in str(error), f"{part!r} is not in {error!r}"
    else:
        raise AssertionError(f"nothing was refused: {part}")


def check_refusals(parallel: ContextParallel, rank: int) -> None:
    q = torch.randn(1, 12, 12, 8, device=DEVICE)
    # With two groups, who is in neither of the other's hears of it from one that is.
    one = parallel.ring_group is None or parallel.heads_group is None
    refuses("the rows of q" if one else "agree", lambda: parallel.attention(q[:, :, : 12 - 6 * (rank == 1)], q, q))
    refuses("dropout" if one else "agree", lambda: parallel.attention(q, q, q, dropout=0.1 * rank, rng_state=RNG))
    refuses("seed" if one else "agree", lambda: parallel.attention(q, q, q, dropout=0.1, rng_state=RNG + rank))
    refuses("have shapes" if rank == 1 else "has refused", lambda: parallel.attention(q, q[..., rank == 1 :], q))
    refuses("dimensions", lambda: parallel.attention(q[0], q[0], q[0]))
    ids = torch.zeros(1, 12, dtype=torch.int32, device=DEVICE)
    given = {"q_segments": ids} if rank == 1 else {}
    refuses("segments" if one else "agree", lambda: parallel.attention(q, q, q, **given))
    refuses("without q_segments", lambda: parallel.attention(q, q, q, k_segments=ids))
    refuses("q_segments has shape [1, 11]", lambda: parallel.attention(q, q, q, q_segments=ids[:, 1:]))
    check_list_refusals(parallel, rank, one)
    refuses("q_segments is torch.int64", lambda: parallel.attention(q, q, q, q_segments=ids.long()))
    refuses("float", lambda: parallel.attention(q.int(), q.int(), q.int()))
    for state, part in (
        (RNG.double(), "rng_state is torch.float64"),
        (torch.ones(3).long(), "rng_state has shape [3]"),
        (RNG.tolist(), "rng_state must be a torch.Tensor, not list"),
    ):
        for p in (0.0, 0.5):
            refuses(part, lambda state=state, p=p: parallel.attention(q, q, q, dropout=p, rng_state=state))
    for name in ("sinks", "alibi_slopes"):
        refuses(f"{name} must be a torch.Tensor", lambda name=name: parallel.attention(q, q, q, **{name: [0.0] * 12}))
        for dtype in (torch.complex64, torch.int32, torch.bool):
            given = {name: torch.ones(12, dtype=dtype)}
            refuses(f"{name} is {dtype}", lambda given=given: parallel.attention(q, q, q, **given))
    refuses("return_lse" if one else "agree", lambda: parallel.attention(q, q, q, return_lse=rank == 1))
    refuses("softcap", lambda: parallel.attention(q, q, q, softcap=-1.0))
    refuses("no gradient", lambda: parallel.unshard(q.requires_grad_()))
    q = q.detach()
    for transform in (torch.vmap, torch.func.grad):
        refuses("no transformation of torch.func", lambda f=transform: f(lambda x: parallel.attention(x, x, x))(q))
    fewer = q[:, :, : 12 - 6 * (rank == 1)]
    refuses("the number of rows" if one else "agree", lambda: parallel.unshard(fewer, 2))
    refuses("the other sizes" if one else "agree", lambda: parallel.unshard(fewer, 1))
    refuses("the dtype of the tensor" if one else "agree", lambda: parallel.unshard(q.int() if rank == 1 else q, 2))
    refuses("dim is not" if one else "agree", lambda: parallel.unshard(q, 2 - (rank == 1)))
    refuses("dim = 4, but" if rank == 1 else "has refused", lambda: parallel.unshard(q, 2 + 2 * (rank == 1)))
    refuses("dim = -5, but", lambda: parallel.shard(q, -5))
    assert torch.equal(parallel.shard(parallel.unshard(q, -2), 2), q)
    if parallel.heads > 1:
        x = q[:, :1]
        refuses("cannot divide the 1 heads", lambda: parallel.attention(q, x, x))
    # A state that is drawn is the first process's.
    torch.manual_seed(rank)
    out = parallel.attention(q, q, torch.ones_like(q), dropout=0.5, return_lse=True)[0]
    assert bool((out != 1).any())


def check_unlike(rank: int) -> None:
    """What would end in the group's timeout: other ways to travel, or gradients that travel on some processes alone."""
    q, one = torch.randn(1, 12, 12, 8, device=DEVICE), rank == 1
    group = dist.group.WORLD
    for name, more in (
        ("method", {"method": "heads" if one else "ring", "zigzag": False}),
        ("zigzag", {"zigzag": one}),
        ("compare", {"compare": "once" if one else "always"}),
        ("transport", {"transport": "messages" if one else "auto"}),
    ):
        parallel = ContextParallel(group, **more)
        refuses(f"{name} is not the same", lambda parallel=parallel: parallel.attention(q, q, q))
    for method in ("ring", "heads"):
        attend = ContextParallel(group, method=method).attention
        for at in range(4):  # of q, k, v and sinks
            leaves = [q.clone(), q.clone(), q.clone(), torch.zeros(12)]
            leaves[at].requires_grad_(one)
            refuses("require a gradient", lambda x=leaves, attend=attend: attend(*x[:3], sinks=x[3]))
        leaf = q.clone().requires_grad_()
        with torch.set_grad_enabled(one):
            refuses("require a gradient", lambda leaf=leaf, attend=attend: attend(leaf, q, q))


def check_list_refusals(parallel: ContextParallel, rank: int, one: bool) -> None:
    s = 64 * parallel.pieces
    q = torch.randn(1, 12, s // parallel.ring // parallel.heads, 8, device=DEVICE)
    rows, columns = heddle.block_lists(torch.ones(s // 64, s // 64, dtype=torch.bool))
    attend = parallel.attention
    other = {"block_rows": rows, "block_columns": columns.flip(0) if rank == 1 else columns, "block_size": 64}
    refuses("the lists of blocks" if one else "agree", lambda: attend(q, q, q, **other))
    refuses("come together", lambda: attend(q, q, q, block_rows=rows))
    refuses("block_size = 32", lambda: attend(q, q, q, block_rows=rows, block_columns=columns, block_size=32))
    refuses("block_rows has shape", lambda: attend(q, q, q, **named((rows[..., 1:], columns))))
    refuses("none of the", lambda: attend(q, q, q, **named((rows, columns + 1))))
    refuses("must not fall", lambda: attend(q, q, q, **named((rows.flip(-1), columns))))
    refuses("exceed", lambda: attend(q, q, q, **named((rows, columns[1:]))))
