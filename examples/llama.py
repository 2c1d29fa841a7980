#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A small Llama of heddle's blocks learns to say again what it has heard eight tokens before.

python examples/llama.py
"""

from __future__ import annotations

import torch
from torch import nn

from heddle.nn import LlamaBlock, NormLinear

torch.manual_seed(0)
# RMSNorm with q, k and v in one, rotary positions, two heads of keys for four, RMSNorm with gate and up in one.
blocks = [LlamaBlock(64, 4, 2, causal=True) for _ in range(2)]
model = nn.Sequential(nn.Embedding(16, 64), *blocks, NormLinear(64, 16, bias=False, norm="rms"))
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
losses = []
for _ in range(60):
    tokens = torch.randint(16, (16, 8)).repeat(1, 3)
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits[:, 8:].flatten(0, 1), tokens[:, 9:].flatten())
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    losses.append(loss.item())
print(f"loss {losses[0]:.2f}, after {len(losses)} steps {losses[-1]:.2f}")
assert losses[-1] < 0.5 * losses[0]
