# SPDX-License-Identifier: Apache-2.0
"""A block with heddle's operators, compiled ahead of time by AOTInductor for any length of sequences:

python examples/export_model.py MODEL.pt2

examples/run_exported.cpp runs it without Python."""

import sys

import torch

import heddle

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
block = heddle.nn.TransformerBlock(64, 4, 2, causal="top_left", device=device).eval()
x = torch.linspace(-1, 1, 100 * 64, device=device).reshape(1, 100, 64)
with torch.no_grad():
    length = torch.export.Dim("length", min=2, max=4096)
    exported = torch.export.export(block, (x,), dynamic_shapes={"x": {1: length}})
    torch._inductor.aoti_compile_and_package(exported, package_path=sys.argv[1])
    for tokens in (100, 37):
        x = torch.linspace(-1, 1, tokens * 64, device=device).reshape(1, tokens, 64)
        print(f"{tokens} tokens on {device}: sum of squares {block(x).double().square().sum().item():.4f}")
