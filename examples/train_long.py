#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT on text whose sequences are divided among processes, with heddle.parallel.

    torchrun --nproc-per-node 2 examples/train_long.py [--length 4096] [--heads-per 1] [--steps 60] [--check]

The processes are a mesh of data · ring · heads: --context of them share a sequence, --heads-per of these by an
all-to-all over heads, and what is left are copies with other sequences. --check trains the same model in one process
too, and compares the loss curves. Runs on CPUs with gloo. The text is by default this repository's own sources.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import heddle.nn
from heddle.parallel import ContextParallel

try:
    from tqdm import trange  # type: ignore[import-untyped]
except ImportError:

    def trange(steps: int, **_: Any) -> Any:
        """Without tqdm there is no bar."""
        return range(steps)


class GPT(nn.Module):
    """Token and position embeddings, blocks, and a head that is a norm-linear itself."""

    def __init__(self, vocabulary: int, a: argparse.Namespace, parallel: ContextParallel | None) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, a.dim), nn.Embedding(a.length, a.dim)
        blocks = [
            heddle.nn.TransformerBlock(a.dim, a.heads, causal=True, context_parallel=parallel) for _ in range(a.layers)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.head = heddle.nn.NormLinear(a.dim, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = 0.02 / math.sqrt(2 * a.layers) if "down" in name or "out" in name else 0.02
                nn.init.normal_(parameter, std=scale)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """[b, s] tokens and their places in the sequence, [s], to [b, s, vocabulary] logits."""
        logits: Tensor = self.head(self.blocks(self.token(tokens) + self.position(places)))
        return logits


def read_text(files: list[str]) -> bytes:
    """The text to learn: the given files, or this repository's sources."""
    paths: Iterable[Path] = map(Path, files)
    if not files:
        root = Path(__file__).resolve().parent.parent
        paths = sorted(p for p in root.rglob("*.[ch]") if "build" not in p.parts)
    return b"\n".join(path.read_bytes() for path in paths)


def batch(data: Tensor, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random pieces of the text, and the same one token later: labels are shifted before anything is divided."""
    starts = torch.randint(len(data) - length - 1, (size,), generator=generator)
    pieces = torch.stack([data[s : s + length + 1] for s in starts.tolist()])
    return pieces[:, :-1], pieces[:, 1:]


def train(
    a: argparse.Namespace, data: Tensor, vocabulary: int, parallel: ContextParallel | None, copies: int, copy: int
) -> tuple[list[float], float]:
    """The losses of all steps, over all sequences of the batch, and tokens per second."""
    torch.manual_seed(1)
    model = GPT(vocabulary, a, parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=a.rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, a.rate, total_steps=a.steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(2)
    places = torch.arange(a.length) if parallel is None else parallel.positions(a.length)
    losses, start = [], time.perf_counter()
    bar = trange(a.steps, desc="one process" if parallel is None else "divided", disable=dist.get_rank() > 0)
    for _ in bar:
        tokens, targets = (t[copy::copies] for t in batch(data, a.batch, a.length, generator))
        if parallel is not None:
            tokens, targets = parallel.shard(tokens), parallel.shard(targets)
        # The sum of these over all processes is the mean over the whole batch, and so are the sums of gradients.
        total = F.cross_entropy(model(tokens, places).flatten(0, 1), targets.flatten(), reduction="sum")
        loss = total / (a.batch * a.length)
        loss.backward()
        value = loss.detach()
        if parallel is not None:
            flat = torch.cat([value[None], *(p.grad.flatten() for p in model.parameters() if p.grad is not None)])
            dist.all_reduce(flat)
            value, at = flat[0], 1
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad = flat[at : at + parameter.numel()].view_as(parameter)
                    at += parameter.numel()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(value.item())
        if hasattr(bar, "set_postfix"):
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    return losses, a.steps * a.batch * a.length / (time.perf_counter() - start)


def main() -> int:
    """Trains, and with --check compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="*", default=[], help="files to learn (default: this repository's C sources)")
    parser.add_argument("--context", type=int, default=0, help="processes that share a sequence (default: all)")
    parser.add_argument("--heads-per", type=int, default=1, help="of these, by an all-to-all over heads (default: 1)")
    parser.add_argument("--check", action="store_true", help="train in one process, too, and compare the losses")
    for name, value in (("steps", 60), ("batch", 2), ("length", 1024), ("dim", 64), ("heads", 4), ("layers", 2)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--rate", type=float, default=3e-3, help="default 0.003")
    a = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 examples/train_long.py")
    text = read_text(a.text)
    if len(text) < 2 * a.length:
        parser.error(f"{len(text)} bytes of text are too few for sequences of {a.length}")
    alphabet = sorted(set(text))
    index = {byte: at for at, byte in enumerate(alphabet)}
    data = torch.tensor([index[byte] for byte in text])
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    context = a.context or world
    if world % context or context % a.heads_per or a.batch % (world // context):
        parser.error(
            f"{world} processes: --context {context} must divide them, --heads-per {a.heads_per} that, and "
            f"{world // context} copies the --batch {a.batch}"
        )
    sizes = (world // context, context // a.heads_per, a.heads_per)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "ring", "heads"))
    parallel = ContextParallel(mesh["ring", "heads"])
    losses, speed = train(a, data, len(alphabet), parallel, sizes[0], mesh.get_local_rank("data"))
    first = dist.get_rank() == 0
    if first:
        print(f"{sizes[0]} x {parallel}: {a.length // parallel.pieces * parallel.runs} of {a.length} tokens each")
        print(f"divided: loss {losses[0]:.4f} -> {losses[-1]:.4f}; {speed:,.0f} tokens/s")
    if a.check and first:
        alone, speed = train(a, data, len(alphabet), None, 1, 0)
        apart = max(abs(x - y) for x, y in zip(losses, alone, strict=True))
        print(f"one process: loss {alone[0]:.4f} -> {alone[-1]:.4f}; {speed:,.0f} tokens/s")
        print(f"the curves are {apart:.1e} apart at most")
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
