#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Serves a small GPT to many requests at once: keys in pages, continuous batching, prompts in chunks.

    python examples/serve.py [--requests 24] [--train 200] [--check] [--device cuda] [--plot serve.svg]

Each step of the server has room for so many tokens. Whoever is generating has one of them; what is left goes to
prompts, in chunks, so that a long one holds nobody up. Requests come and go at any step. The keys and values of all of
them lie in one pool of pages: a sequence takes a page when it has filled its last one and gives all back at its end,
prompts that begin alike share pages, and when the pool is empty the youngest sequence gives way and starts anew later.

The weights are random, or those of --train STEPS on this repository's sources (examples/train_gpt.py). --check compares
every token with what the model says of the whole sequence at once, without pages.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from train_gpt import GPT, read_text, train

import heddle

NOBODY = -1  # in the table behind a sequence's pages


class Pages:
    """The pool: which pages are free, how many sequences hold each of the others, and what full ones begin with."""

    def __init__(self, count: int, size: int) -> None:
        self.size, self.count = size, count
        self.free = list(range(count))[::-1]
        self.holders = [0] * count
        self.of_tokens: dict[tuple[int, tuple[int, ...]], int] = {}  # (the page before, its tokens) -> page
        self.key_of: dict[int, tuple[int, tuple[int, ...]]] = {}

    def take(self) -> int | None:
        """A page for somebody alone; None: there is none."""
        if not self.free:
            return None
        page = self.free.pop()
        self.holders[page] = 1
        return page

    def release(self, page: int) -> None:
        """One holder fewer; the last gives it back."""
        self.holders[page] -= 1
        if not self.holders[page]:
            key = self.key_of.pop(page, None)
            if key is not None:
                del self.of_tokens[key]
            self.free.append(page)

    def share(self, tokens: list[int]) -> list[int]:
        """The pages that others have filled with what these tokens begin with, now held by one more."""
        pages: list[int] = []
        for start in range(0, len(tokens) - self.size + 1, self.size):
            key = (pages[-1] if pages else NOBODY, tuple(tokens[start : start + self.size]))
            page = self.of_tokens.get(key)
            if page is None:
                break
            self.holders[page] += 1
            pages.append(page)
        return pages

    def publish(self, before: int, page: int, tokens: list[int]) -> None:
        """A full page, for whoever begins alike; the first that has filled it is kept."""
        key = (before, tuple(tokens))
        if key not in self.of_tokens and page not in self.key_of:
            self.of_tokens[key] = page
            self.key_of[page] = key


@dataclass
class Sequence:
    """A request: its tokens so far, how many of them have their keys in pages, and these pages."""

    name: int
    prompt: list[int]
    wanted: int
    made: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    done: int = 0
    arrived: float = 0.0
    first: float = 0.0

    @property
    def tokens(self) -> list[int]:
        """The prompt, and what was made of it."""
        return self.prompt + self.made


class Server:
    """A GPT, the pages of its keys and values, and the requests that it works on."""

    def __init__(self, model: GPT, pages: int, page: int, budget: int, most: int) -> None:
        self.model, self.pages, self.budget, self.most = model, Pages(pages, page), budget, most
        self.blocks: list[Any] = list(model.blocks)  # heddle.nn.TransformerBlock
        like, attention = model.token.weight, self.blocks[0].attention
        shape = (len(self.blocks), 2, pages, page, attention.kv_heads, attention.head_dim)
        self.cache = torch.zeros(shape, dtype=like.dtype, device=like.device)  # rows of a page side by side
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # the oldest first
        self.finished: list[Sequence] = []
        self.history: list[tuple[int, int, int]] = []  # of each step: pages held, pages if none were shared, sequences
        self.restarts = self.shared = 0

    def submit(self, sequence: Sequence) -> None:
        """A request; one that the pool could not hold even alone is refused."""
        length = len(sequence.prompt) + sequence.wanted
        most = min(self.model.position.num_embeddings, self.pages.count * self.pages.size)
        if not sequence.prompt or length > most:
            raise ValueError(f"request {sequence.name}: {length} tokens do not fit")
        sequence.arrived = time.perf_counter()
        self.waiting.append(sequence)

    # ---------------------------------------------------------------------------------------------- scheduling

    def room_for(self, sequence: Sequence, length: int) -> bool:
        """Pages for its first `length` tokens, as far as there are any."""
        while len(sequence.pages) * self.pages.size < length:
            page = self.pages.take()
            if page is None:
                return False
            sequence.pages.append(page)
        return True

    def give_back(self, sequence: Sequence) -> None:
        """All its pages."""
        for page in sequence.pages:
            self.pages.release(page)
        sequence.pages, sequence.done = [], 0

    def admit(self) -> None:
        """Whoever waits longest begins, as long as there are pages for all of the prompt."""
        while self.waiting and len(self.running) < self.most:
            sequence = self.waiting[0]
            tokens = sequence.tokens
            sequence.pages = self.pages.share(tokens[:-1])  # the last token is computed: what follows it is asked for
            sequence.done = len(sequence.pages) * self.pages.size
            self.shared += sequence.done
            if not self.room_for(sequence, len(tokens)):
                self.shared -= sequence.done
                self.give_back(sequence)
                return
            self.running.append(self.waiting.popleft())

    def plan(self) -> list[tuple[Sequence, int]]:
        """Who has how many tokens in this step: one each for those that generate, and chunks of prompts."""
        for sequence in list(self.running):
            while sequence in self.running and not self.room_for(sequence, len(sequence.tokens)):
                youngest = self.running.pop()
                self.give_back(youngest)
                self.waiting.appendleft(youngest)
                self.restarts += 1
        self.admit()
        left = [(s, len(s.tokens) - s.done) for s in self.running]
        work = [(s, 1) for s, count in left if count == 1]
        budget = self.budget - len(work)
        for sequence, count in left:
            if count > 1 and budget > 0:
                work.append((sequence, min(count, budget)))
                budget -= work[-1][1]
        return sorted(work, key=lambda item: item[1] > 1)  # single tokens first, be they a chunk's

    # ---------------------------------------------------------------------------------------------------- a step

    @torch.no_grad()
    def step(self) -> int:
        """One pass of the model over what plan() says; how many tokens that were."""
        work = self.plan()
        if not work:
            return 0
        tokens = [s.tokens[s.done : s.done + count] for s, count in work]
        logits = self.forward(work, [t for some in tokens for t in some])
        for (sequence, count), row in zip(work, logits.argmax(-1).tolist(), strict=True):
            before, sequence.done = sequence.done, sequence.done + count
            self.publish(sequence, before)
            if sequence.done == len(sequence.tokens):
                sequence.first = sequence.first or time.perf_counter()
                sequence.made.append(row)
        self.note()
        for sequence in [s for s in self.running if len(s.made) == s.wanted]:
            self.running.remove(sequence)
            self.give_back(sequence)
            self.finished.append(sequence)
        return sum(count for _, count in work)

    def publish(self, sequence: Sequence, before: int) -> None:
        """The pages that this step has filled may be shared from now on."""
        size, tokens = self.pages.size, sequence.tokens
        for n in range(before // size, sequence.done // size):
            previous = sequence.pages[n - 1] if n else NOBODY
            self.pages.publish(previous, sequence.pages[n], tokens[n * size : (n + 1) * size])

    def forward(self, work: list[tuple[Sequence, int]], tokens: list[int]) -> Tensor:
        """The logits behind the last token of each; the keys and values of all go to their pages."""
        model, device = self.model, self.cache.device
        ends = torch.tensor([s.done + count for s, count in work], dtype=torch.int32, device=device)
        widest = max(len(s.pages) for s, _ in work)
        table = torch.tensor(
            [s.pages + [NOBODY] * (widest - len(s.pages)) for s, _ in work], dtype=torch.int32, device=device
        )
        position = torch.tensor([j for s, count in work for j in range(s.done, s.done + count)], device=device)
        before = torch.tensor([s.done for s, _ in work], dtype=torch.int32, device=device)
        firsts = torch.tensor([0, *accumulate(count for _, count in work)], dtype=torch.int32, device=device)
        most = max(count for _, count in work)
        singles = sum(count == 1 for _, count in work)  # which plan() has in front
        starts = [0]
        for _, count in work[singles:]:
            starts.append(starts[-1] + count)
        starts_q = torch.tensor(starts, dtype=torch.int32, device=device)
        longest = max((count for _, count in work[singles:]), default=0)
        x = model.token(torch.tensor(tokens, device=device)) + model.position(position)
        for layer, block in enumerate(self.blocks):
            attention = block.attention
            heads, hk = attention.heads, attention.kv_heads
            q, k, v = attention.qkv(x).view(len(tokens), -1, attention.head_dim).split((heads, hk, hk), 1)
            keys, values = (cache.transpose(1, 2) for cache in self.cache[layer])  # [pages, hk, page, d], not copied
            heddle.attention_append(keys, values, k, v, before, block_table=table, cu_seqlens=firsts, max_seqlen=most)
            parts = []
            if singles:
                one = q[:singles].unsqueeze(2)  # [n, h, 1, d]
                o = heddle.attention(one, keys, values, block_table=table[:singles], seqlens_k=ends[:singles])
                parts.append(o.flatten(1))
            if longest:
                o = heddle.attention(
                    q[singles:],
                    keys,
                    values,
                    block_table=table[singles:],
                    seqlens_k=ends[singles:],
                    cu_seqlens_q=starts_q,
                    max_seqlen_q=longest,
                    causal="bottom_right",
                )
                parts.append(o.flatten(1))
            x = x + attention.out(torch.cat(parts))
            x = x + block.down(block.up(x))
        last = [singles + end - 1 for end in starts[1:]]
        logits: Tensor = model.head(x[list(range(singles)) + last])
        return logits

    def note(self) -> None:
        """What the picture is made of."""
        held = self.pages.count - len(self.pages.free)
        self.history.append((held, sum(len(s.pages) for s in self.running), len(self.running)))


# ------------------------------------------------------------------------------------------------ requests, checks


def make_requests(count: int, vocabulary: int, length: int, seed: int) -> list[tuple[int, Sequence]]:
    """Requests and the steps at which they come. Half of them begin with the same text, as of a system prompt."""
    numbers = random.Random(seed)
    common = [numbers.randrange(vocabulary) for _ in range(length // 4)]
    requests, step = [], 0
    for name in range(count):
        prompt = [numbers.randrange(vocabulary) for _ in range(numbers.randint(4, length // 4))]
        prompt = (common if name % 2 else []) + prompt
        requests.append((step, Sequence(name, prompt, numbers.randint(4, length // 3))))
        step += numbers.randrange(4)
    return requests


def check(model: GPT, sequences: list[Sequence], tolerance: float) -> float:
    """By how much a token was not the likeliest at most, in logits, as the model sees the whole sequence at once."""
    worst = 0.0
    with torch.no_grad():
        for s in sequences:
            tokens = torch.tensor([s.tokens[:-1]], device=model.token.weight.device)
            logits = model(tokens)[0, len(s.prompt) - 1 :].float()
            made = torch.tensor(s.made, device=logits.device)
            short = logits.amax(1) - logits.gather(1, made[:, None])[:, 0]
            worst = max(worst, short.max().item())
    if worst > tolerance:
        raise SystemExit(f"serve: a token is {worst:.2e} behind the likeliest one, with {tolerance:.0e} allowed")
    return worst


# ------------------------------------------------------------------------------------------------------ the picture

STYLE = """text { font: 13px sans-serif; fill: #1f2328; }
.paper { fill: #ffffff; }
.line { stroke: #59636e; fill: none; }
.held { fill: #54aeff; fill-opacity: 0.5; stroke: #0969da; }
.unshared { stroke: #1a7f37; fill: none; stroke-width: 2; }
.longest { stroke: #cf222e; fill: none; stroke-dasharray: 5 3; }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc; }
.paper { fill: #0d1117; }
.line { stroke: #9198a1; }
}"""


def draw(server: Server, longest: int) -> str:
    """Pages step by step as SVG: those held, those if none were shared, and those if each had room for the longest."""
    width, height, left, top = 860, 360, 60, 60
    each = -(-longest // server.pages.size)
    rows = [(held, own, count * each) for held, own, count in server.history]
    most = max(max(row) for row in rows)
    right, bottom = width - 20, height - 50

    def curve(which: int) -> str:
        points: list[str] = []
        for step, row in enumerate([*rows, rows[-1]]):
            x = left + (right - left) * step / len(rows)
            y = bottom - (bottom - top) * row[which] / most
            points += [f"{x:.1f},{points[-1].split(',')[1]}"] if points else []
            points.append(f"{x:.1f},{y:.1f}")
        return " ".join(points)

    bytes_of_page = server.cache[:, :, 0].numel() * server.cache.element_size()
    legend = [("held", "pages held"), ("unshared", "if nobody shared"), ("longest", "if each had room for the longest")]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'role="img">\n<!-- drawn by examples/serve.py -->',
        f"<title>Pages in use while {len(server.finished)} requests are served</title>\n<style>\n{STYLE}\n</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
        f'<text x="20" y="24">pages of {server.pages.size} keys ({bytes_of_page // 1024} KiB), step by step</text>',
        f'<polygon class="held" points="{left},{bottom} {curve(0)} {right},{bottom}"/>',
        f'<polyline class="unshared" points="{curve(1)}"/>\n<polyline class="longest" points="{curve(2)}"/>',
        f'<path class="line" d="M{left} {top}V{bottom}H{right}"/>',
    ]
    for n, (name, text) in enumerate(legend):
        at = left + 250 * n
        parts.append(f'<rect class="{name}" x="{at}" y="36" width="18" height="10"/>')
        parts.append(f'<text x="{at + 24}" y="46">{text}</text>')
    for n in range(5):
        y, x = bottom - (bottom - top) * n / 4, left + (right - left) * n / 4
        parts.append(f'<text x="{left - 8}" y="{y + 4:.0f}" text-anchor="end">{most * n / 4:.0f}</text>')
        parts.append(f'<text x="{x:.0f}" y="{bottom + 18}" text-anchor="middle">{len(rows) * n / 4:.0f}</text>')
    parts.append(f'<text x="{(left + right) / 2:.0f}" y="{height - 10}" text-anchor="middle">step</text>\n</svg>')
    return "\n".join(parts) + "\n"


def main() -> int:
    """Serves, checks, draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="float32, on CUDA bfloat16")
    parser.add_argument("--train", type=int, default=0, metavar="STEPS", help="train for so many steps first")
    parser.add_argument("--check", action="store_true", help="compare with the model on whole sequences")
    parser.add_argument("--plot", default="serve.svg", help="where the picture goes (default: serve.svg)")
    for name, value, meaning in (
        ("requests", 24, "how many come"),
        ("length", 256, "the most tokens of a sequence"),
        ("page", 16, "keys of a page: 16, 32, 64, 128 or 256"),
        ("pages", 96, "in the pool"),
        ("budget", 64, "tokens of a step"),
        ("most", 16, "sequences at a time"),
        ("dim", 128, "of the model"),
        ("heads", 4, "of the model"),
        ("layers", 2, "of the model"),
        ("seed", 1, "of the requests and of random weights"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{meaning} (default {value})")
    a = parser.parse_args()
    torch.manual_seed(a.seed)
    vocabulary = 256
    if a.train:
        text = read_text([])
        options = argparse.Namespace(**vars(a), compile=False, batch=8, rate=3e-3, steps=a.train)
        model = train("heddle", options, torch.tensor(list(text)), vocabulary)[2]
    else:
        model = GPT(vocabulary, a.length, a.dim, a.heads, a.layers, plain=False)
    dtype = getattr(torch, a.dtype or ("bfloat16" if a.device == "cuda" else "float32"))
    model = model.to(a.device, dtype).eval()
    assert isinstance(model, GPT)
    server = Server(model, a.pages, a.page, a.budget, a.most)
    requests = make_requests(a.requests, vocabulary, a.length, a.seed)
    longest = max(len(s.prompt) + s.wanted for _, s in requests)
    tokens = step = 0
    start = time.perf_counter()
    while requests or server.waiting or server.running:
        while requests and requests[0][0] <= step:
            server.submit(requests.pop(0)[1])
        tokens += server.step()
        step += 1
    seconds = time.perf_counter() - start
    made = sum(len(s.made) for s in server.finished)
    waited = sorted(s.first - s.arrived for s in server.finished)
    print(
        f"{len(server.finished)} requests in {step} steps, {seconds:.2f} s: {made} tokens made, "
        f"{made / seconds:,.0f} a second; {tokens} computed, {tokens / seconds:,.0f} a second; "
        f"first token after {waited[len(waited) // 2] * 1e3:.0f} ms (median)"
    )
    peak = max(held for held, _, _ in server.history)
    print(
        f"at most {peak} of {a.pages} pages held; {server.shared} tokens of prompts found in pages of others; "
        f"{server.restarts} restarts"
    )
    if len(server.pages.free) != a.pages or server.pages.of_tokens:
        raise SystemExit("serve: pages are held by nobody")
    if a.check:
        worst = check(model, server.finished, 1e-4 if dtype == torch.float32 else 0.1)
        print(f"every token is the likeliest of the whole sequence's, or {worst:.1e} behind it")
    Path(a.plot).write_text(draw(server, longest))
    print(f"pages step by step: {a.plot}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
