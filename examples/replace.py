#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A model of PyTorch's modules on heddle: nothing but a call more, and the very same parameters.

python examples/replace.py
"""

from __future__ import annotations

import torch
from torch import nn

import heddle

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
model = nn.Sequential(
    nn.Linear(8, 64),
    nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
    nn.LayerNorm(64),
    nn.Linear(64, 8),
)
x = torch.randn(4, 32, 8)
before = model(x)
print(heddle.replace(model))
difference = (model(x) - before).abs().max().item()
print(f"the results differ by {difference:.1e}")
assert difference < 1e-4
