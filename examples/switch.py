# SPDX-License-Identifier: Apache-2.0
"""A model of PyTorch's own modules on heddle, by PyTorch's own switch: no line of the model changes."""

import torch
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

import heddle  # enters its name into PyTorch's list of flash attentions

torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
x = torch.randn(2, 100, 64)
causal = torch.nn.Transformer.generate_square_subsequent_mask(100)


def step() -> torch.Tensor:
    model.zero_grad()
    model(x, mask=causal, is_causal=True).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


theirs = step()
activate_flash_attention_impl("heddle")
ours = step()
restore_flash_attention_impl()
print(heddle.info().splitlines()[0])
print(f"largest gradient {theirs.abs().max():.3g}, largest difference {(ours - theirs).abs().max():.1g}")
assert not torch.equal(ours, theirs) and torch.equal(step(), theirs)
