#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT on text with heddle, and the same one with plain PyTorch, and draws both loss curves.

    python examples/train_gpt.py [--text FILE ...] [--steps 300] [--compile] [--device cuda] [--plot loss.png]

Every attention and every LayerNorm + Linear of it is heddle's. The text is by default this repository's own
sources. Needs torch, and tqdm and matplotlib where they are installed.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import heddle.nn

try:
    from tqdm import trange  # type: ignore[import-untyped]
except ImportError:

    def trange(steps: int, **_: Any) -> Any:
        """Without tqdm there is no bar."""
        return range(steps)


class PlainBlock(nn.Module):
    """The block of heddle.nn.TransformerBlock in plain PyTorch, with the same parameters."""

    def __init__(self, block: heddle.nn.TransformerBlock) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, dim] to [b, s, dim]."""
        attention = self.block.attention
        b, s, dim = x.shape

        def norm_linear(module: heddle.nn.NormLinear, x: Tensor) -> Tensor:
            z = F.layer_norm(x, (dim,), module.gamma, module.beta, module.eps)
            return F.linear(z, module.weight, module.bias)

        qkv = norm_linear(attention.qkv, x).view(b, s, 3, attention.heads, -1)  # type: ignore[arg-type]
        q, k, v = qkv.transpose(1, 3).unbind(2)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attention.out(o.transpose(1, 2).reshape(b, s, dim))
        result: Tensor = x + self.block.down(F.gelu(norm_linear(self.block.up, x)))
        return result


class GPT(nn.Module):
    """Token and position embeddings, blocks, and a head that is a norm-linear itself."""

    def __init__(self, vocabulary: int, length: int, dim: int, heads: int, layers: int, plain: bool) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        blocks = [heddle.nn.TransformerBlock(dim, heads, causal="top_left") for _ in range(layers)]
        self.blocks = nn.Sequential(*(PlainBlock(block) for block in blocks) if plain else blocks)
        self.head = heddle.nn.NormLinear(dim, vocabulary, bias=False)
        self.plain = plain
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = 0.02 / math.sqrt(2 * layers) if "down" in name or "out" in name else 0.02
                nn.init.normal_(parameter, std=scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """[b, s] tokens to [b, s, vocabulary] logits."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.blocks(x)
        if self.plain:
            x = F.layer_norm(x, x.shape[-1:], self.head.gamma, self.head.beta, self.head.eps)
            return F.linear(x, self.head.weight)
        logits: Tensor = self.head(x)
        return logits


def read_text(files: list[str]) -> bytes:
    """The text to learn: the given files, or this repository's sources."""
    paths: Iterable[Path] = map(Path, files)
    if not files:
        root = Path(__file__).resolve().parent.parent
        paths = sorted(p for p in root.rglob("*.[ch]") if "build" not in p.parts)
    text = b"\n".join(path.read_bytes() for path in paths)
    if len(text) < 10_000:
        raise SystemExit(f"train_gpt: {len(text)} bytes of text are too few, give 10,000 or more with --text")
    return text


def batch(data: Tensor, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random pieces of the text, and the same one token later."""
    starts = torch.randint(len(data) - length - 1, (size,), generator=generator)
    pieces = torch.stack([data[s : s + length + 1] for s in starts.tolist()])
    return pieces[:, :-1], pieces[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def train(
    name: str, arguments: argparse.Namespace, data: Tensor, vocabulary: int
) -> tuple[list[float], float, nn.Module]:
    """Trains one model; its losses, its loss on text that it has not seen, and itself."""
    torch.manual_seed(1)
    a = arguments
    model = GPT(vocabulary, a.length, a.dim, a.heads, a.layers, plain=name == "torch").to(a.device)
    step: Any = torch.compile(loss_of, fullgraph=True) if a.compile else loss_of
    cut = len(data) * 9 // 10
    generator = torch.Generator().manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=a.rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, a.rate, total_steps=a.steps, pct_start=0.1)
    losses, start = [], time.perf_counter()
    bar = trange(a.steps, desc=name, unit="step")
    for _ in bar:
        tokens, targets = (t.to(a.device) for t in batch(data[:cut], a.batch, a.length, generator))
        loss = step(model, tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if hasattr(bar, "set_postfix"):
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        unseen = [batch(data[cut:], a.batch, a.length, generator) for _ in range(8)]
        held_out = sum(loss_of(model, x.to(a.device), y.to(a.device)).item() for x, y in unseen) / len(unseen)
    speed = a.steps * a.batch * a.length / seconds
    print(f"{name:>7}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, on unseen text {held_out:.3f}; {speed:,.0f} tokens/s")
    return losses, held_out, model


@torch.no_grad()
def sample(model: nn.Module, alphabet: list[int], length: int, count: int, device: str) -> str:
    """What the model writes."""
    tokens = torch.zeros(1, 1, dtype=torch.int64, device=device)
    for _ in range(count):
        logits = model(tokens[:, -length:])[0, -1] / 0.8
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)[None]], 1)
    return bytes(alphabet[t] for t in tokens[0].tolist()).decode("utf-8", "replace")


def draw(curves: dict[str, list[float]], path: str) -> None:
    """Both loss curves in one plot."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    styles: dict[str, dict[str, Any]] = {"torch": {"linewidth": 3, "alpha": 0.4}, "heddle": {"linewidth": 1}}
    for name, losses in curves.items():
        axes.plot(range(1, len(losses) + 1), losses, label=name, **styles[name])
    axes.set(xlabel="step", ylabel="loss, nats per byte", title="a small GPT, the same seed and text")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"loss curves: {path}")


def main() -> int:
    """Trains, compares, draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="*", default=[], help="files to learn (default: this repository's C sources)")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--compile", action="store_true", help="with torch.compile(fullgraph=True)")
    parser.add_argument("--plot", default="loss.png", help="where the loss curves go (default: loss.png)")
    parser.add_argument("--only", choices=("heddle", "torch"), help="train one of the two")
    for name, value in (("steps", 300), ("batch", 8), ("length", 128), ("dim", 128), ("heads", 4), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--rate", type=float, default=3e-3, help="default 0.003")
    arguments = parser.parse_args()
    text = read_text(arguments.text)
    alphabet = sorted(set(text))
    index = {byte: at for at, byte in enumerate(alphabet)}
    data = torch.tensor([index[byte] for byte in text])
    print(
        f"{len(text):,} bytes of text, {len(alphabet)} different: ln = {math.log(len(alphabet)):.3f} nats to begin with"
    )
    curves, models = {}, {}
    for name in ("heddle", "torch"):
        if arguments.only in (None, name):
            curves[name], _, models[name] = train(name, arguments, data, len(alphabet))
    if len(curves) == 2:
        apart = max(abs(a - b) for a, b in zip(*(c[: max(len(c) // 10, 1)] for c in curves.values()), strict=True))
        print(f"the curves are {apart:.1e} apart at most in the first tenth of the steps")
    draw(curves, arguments.plot)
    model = next(iter(models.values())).eval()
    print("it writes:\n" + sample(model, alphabet, arguments.length, 200, arguments.device))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
