# SPDX-License-Identifier: Apache-2.0
"""FlexAttention's functions, computed by heddle: Gemma's capped scores, a learned bias by distance, and documents."""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import heddle

torch.manual_seed(0)
query, key, value = (torch.randn(1, 4, 100, 32, requires_grad=True) for _ in range(3))
by_distance = torch.zeros(4, 100, requires_grad=True)
document = torch.arange(100) // 30


def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return 20 * torch.tanh(score / 20) + by_distance[h, (q_idx - kv_idx).abs()]


def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx) & (document[q_idx] == document[kv_idx])


block_mask = create_block_mask(mask_mod, None, None, 100, 100, device="cpu")
out = heddle.flex_attention(query, key, value, score_mod, block_mask)
out.square().sum().backward()
print(f"out {list(out.shape)}, gradient of the bias: {by_distance.grad.norm():.3g}")  # type: ignore[union-attr]
