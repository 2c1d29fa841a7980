#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A model of Hugging Face transformers on heddle: a name more when it is made. Nothing is downloaded.

python examples/transformers_gpt2.py
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, GPT2Config

import heddle.hf

heddle.hf.register()
config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100, bos_token_id=0, eos_token_id=0)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, attn_implementation="heddle")
model.eval()
tokens = torch.randint(100, (2, 40))
padding = torch.ones_like(tokens)
padding[0, :7] = 0  # the first text is shorter, and padded on the left

ours = model(tokens, attention_mask=padding).logits
model.set_attn_implementation("eager")
theirs = model(tokens, attention_mask=padding).logits
difference = (ours - theirs)[padding.bool()].abs().max().item()
print(f"logits by heddle and by transformers' own code differ by {difference:.0e}")
assert 0 < difference < 1e-4
