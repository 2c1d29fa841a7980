#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's names: two documents in one row, in one call, as each by itself.

python examples/flash_names.py
"""

from __future__ import annotations

import torch

from heddle import flash_attn_func, flash_attn_varlen_func  # in the place of: from flash_attn import ...

torch.manual_seed(0)
lengths = [100, 156]
q, k, v = (torch.randn(sum(lengths), 8, 64, dtype=torch.bfloat16) for _ in range(3))  # [total, h, d]
begins = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
packed = flash_attn_varlen_func(q, k, v, begins, begins, max(lengths), max(lengths), causal=True)

parts = [torch.split(x, lengths) for x in (q, k, v)]
alone = [flash_attn_func(*(x[None] for x in part), causal=True)[0] for part in zip(*parts, strict=True)]  # [b, s, h, d]
difference = (packed - torch.cat(alone)).abs().max().item()
print(f"two documents packed, and each alone: results differ by {difference:.0e}")
assert packed.shape == q.shape and difference < 1e-2
