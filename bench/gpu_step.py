#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whole training steps on a GPU: models of heddle.nn's blocks beside PyTorch's own operations, the same parameters.

    ./dev bench --gpu step [--filter TEXT] [--layers N] [--rounds N] [--no-compile] [--kernels N] [--json FILE]

A step: embedding, blocks, norm and head, cross entropy, backward, AdamW (fused), in bfloat16, back to back, as in training.
Four ways take turns: PyTorch's functions (layer_norm or rms_norm, linear, scaled_dot_product_attention) and heddle.nn's
blocks, each as it is (eager) and through torch.compile. A row has milliseconds a step and PyTorch's over heddle's.
--kernels: of a step of each way the kernels that take longest, with their milliseconds.
--device cpu: the same steps by the clock on the wall, where there is no GPU; a step takes minutes there.
"""
import argparse
import copy
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import heddle
from heddle.nn import LlamaBlock, NormLinear, TransformerBlock

VOCABULARY = 50304
# name: (block, dim, heads, heads of keys, layers, sequences, length)
MODELS = {
    "gpt2 124M 1k": ("gpt", 768, 12, 12, 12, 16, 1024),
    "gpt2 124M 8k": ("gpt", 768, 12, 12, 12, 2, 8192),
    "llama 2048 4k": ("llama", 2048, 16, 4, 8, 4, 4096),
    "head dim 256 4k": ("gpt", 2048, 8, 8, 8, 4, 4096),
}


class Model(nn.Module):
    def __init__(self, kind, dim, heads, kv_heads, layers):
        super().__init__()
        make = TransformerBlock if kind == "gpt" else LlamaBlock
        self.token = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(make(dim, heads, kv_heads, causal="top_left") for _ in range(layers))
        self.head = NormLinear(dim, VOCABULARY, False, norm="layer" if kind == "gpt" else "rms")
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if "down" in name or ".out" in name else 0.02)

    def blocks_of(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def forward(self, tokens, targets):
        return F.cross_entropy(self.blocks_of(self.token(tokens)).flatten(0, 1), targets.flatten())


def normed(module, x):
    if module.norm == "layer":
        z = F.layer_norm(x, x.shape[-1:], module.gamma, module.beta, module.eps)
    else:
        z = F.rms_norm(x, x.shape[-1:], module.gamma, module.eps)
    return F.linear(z, module.weight, module.bias)


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class Plain(Model):
    """The same in PyTorch's operations."""

    def blocks_of(self, x):
        llama = isinstance(self.blocks[0], LlamaBlock)
        turn = None
        if llama:  # once for all blocks, as models have it
            cos, sin = self.blocks[0].rotation(torch.arange(x.shape[1], device=x.device))
            turn = [torch.cat((t, t), -1).to(x.dtype) for t in (cos, sin)]
        for block in self.blocks:
            x = self.llama(block, x, *turn) if llama else self.gpt(block, x)
        return normed(self.head, x)

    @staticmethod
    def gpt(block, x):
        a = block.attention
        parts = normed(a.qkv, x).unflatten(-1, (3 * a.heads, -1)).chunk(3, 2)
        x = x + F.linear(attend(*(t.transpose(1, 2) for t in parts)).transpose(1, 2).flatten(2), a.out.weight, a.out.bias)
        return x + F.linear(F.gelu(normed(block.up, x)), block.down.weight, block.down.bias)

    @staticmethod
    def llama(block, x, cos, sin):
        counts = (block.heads, block.kv_heads, block.kv_heads)
        parts = normed(block.qkv, x).unflatten(-1, (sum(counts), -1)).split(counts, 2)
        q, k, v = (t.transpose(1, 2) for t in parts)

        def turned(t):
            one, other = t.chunk(2, -1)
            return t * cos + torch.cat((-other, one), -1) * sin

        o = attend(turned(q), turned(k), v).transpose(1, 2).flatten(2)
        x = x + F.linear(o, block.out.weight)
        gate, up = normed(block.up, x).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, block.down.weight)


class Step:
    def __init__(self, model, tokens, compiled):
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.loss_of, self.tokens = torch.compile(model) if compiled else model, tokens
        self.times, self.losses = [], []

    def __call__(self):
        loss = self.loss_of(self.tokens[:, :-1], self.tokens[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach())

    def timed(self, steps):
        if self.tokens.device.type == "cpu":
            start = time.perf_counter()
            for _ in range(steps):
                self()
            self.times.append((time.perf_counter() - start) / steps * 1e3)
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(steps):
            self()
        end.record()
        end.synchronize()
        self.times.append(begin.elapsed_time(end) / steps)


def kernels(step, count):
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows)
    for row in rows[:count]:
        print(f"    {row.self_device_time_total * 1e-3:8.3f} ms {row.self_device_time_total / total:4.0%} x{row.count:<4d}"
              f" {row.key[:100]}")
    print(f"    {total * 1e-3:8.3f} ms in all")


def measure(name, a):
    kind, dim, heads, kv_heads, layers, b, s = MODELS[name]
    layers = min(layers, a.layers or layers)
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (b, s + 1), device=a.device)
    ours = Model(kind, dim, heads, kv_heads, layers).to(a.device, torch.bfloat16)
    theirs = copy.deepcopy(ours)
    theirs.__class__ = Plain
    ways = {"pytorch eager": Step(theirs, tokens, False), "heddle eager": Step(ours, tokens, False)}
    if not a.no_compile:
        ways["pytorch compiled"] = Step(copy.deepcopy(theirs), tokens, True)
        ways["heddle compiled"] = Step(copy.deepcopy(ours), tokens, True)
    for step in ways.values():
        for _ in range(3):
            step()
    for _ in range(a.rounds):
        for step in ways.values():
            step.timed(4)
    row = {"case": f"{name} layers {layers} b{b}", "torch": torch.__version__,
           "gpu": torch.cuda.get_device_name() if a.device == "cuda" else "none"}
    row["ms"] = {way: statistics.median(step.times) for way, step in ways.items()}
    row["losses"] = {way: [step.losses[0].item(), step.losses[-1].item()] for way, step in ways.items()}
    row["over"] = {mode: row["ms"][f"pytorch {mode}"] / row["ms"][f"heddle {mode}"]
                   for mode in ("eager", "compiled") if f"heddle {mode}" in ways}
    print(f"{row['case']:32s} " + ", ".join(f"{way} {ms:.2f} ms" for way, ms in row["ms"].items()) + " | " +
          ", ".join(f"{mode} {ratio:.3f}" for mode, ratio in row["over"].items()) + " | losses " +
          " ".join(f"{first:.4f}->{last:.4f}" for first, last in row["losses"].values()), flush=True)
    for way, step in ways.items() if a.kernels else ():
        print(f"  {way}")
        kernels(step, a.kernels)
    return row


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filter", action="append", default=[], help="only models whose name holds one of these")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, help="at most so many")
    parser.add_argument("--rounds", type=int, default=7, help="of four steps each, the ways in turn")
    parser.add_argument("--no-compile", action="store_true", help="the eager ways alone")
    parser.add_argument("--kernels", type=int, default=0, help="how many kernels to tell of")
    parser.add_argument("--json", help="append the results to this file, a line each")
    a = parser.parse_args(arguments)
    names = [name for name in MODELS if not a.filter or any(x in name for x in a.filter)]
    if not names:
        parser.error(f"--filter: no model's name holds {' or '.join(a.filter)}; there are {', '.join(MODELS)}")
    if a.rounds < 1 or (a.layers is not None and a.layers < 1):
        parser.error("--rounds and --layers are 1 or more")
    if a.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"gpu_step.py: torch {torch.__version__} sees no GPU; --device cpu measures without one")
    if a.device == "cpu" and a.kernels:
        parser.error("--kernels: those of a GPU")
    print(heddle.info())
    for name in names:
        row = measure(name, a)
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        if a.json:
            with open(a.json, "a", encoding="utf-8") as file:
                file.write(json.dumps({"table": "step", **row}) + "\n")


if __name__ == "__main__":
    main()
