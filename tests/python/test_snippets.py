# SPDX-License-Identifier: Apache-2.0
"""Every program in Python that a page shows runs, as it stands there; what a page takes as given is made here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SNIPPETS = [
    (page.name, number, text)
    for page in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    if page.name != "python-api.md"  # signatures, from docstrings
    for number, text in enumerate(BLOCK.findall(page.read_text()))
]

torch = pytest.importorskip("torch")
heddle = pytest.importorskip("heddle")


def pages():
    """Two sequences in nine pages of 16 keys; as many heads as queries, so that q has both layouts."""
    k, v = torch.randn(9, 2, 16, 8), torch.randn(9, 2, 16, 8)
    return {
        "heddle": heddle,
        "q": torch.randn(2, 2, 2, 8),
        "k": torch.randn(2, 2, 2, 8),
        "v": torch.randn(2, 2, 2, 8),
        "k_pages": k,
        "v_pages": v,
        "k_cache": k.transpose(1, 2).contiguous(),
        "v_cache": v.transpose(1, 2).contiguous(),
        "table": torch.tensor([[5, 0, 3], [6, 2, 1]], dtype=torch.int32),
        "lengths": torch.tensor([37, 20], dtype=torch.int32),
        "cos": torch.rand(48, 4),
        "sin": torch.rand(48, 4),
    }


def divided():
    """For a group of one process."""
    q, k, v = (torch.randn(1, 2, 64, 8) for _ in range(3))
    return {"s": 64, "tokens": torch.arange(64)[None], "q": q, "k": k, "v": v}


def checkpoint():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=16
    )
    transformers.LlamaForCausalLM(config).save_pretrained("gpt2")  # the folder goes before the hub's model
    return {}


def given_to(page: str, text: str) -> dict:
    if "from_pretrained" in text:
        return checkpoint()
    if page == "start.md" and "import" not in text:  # goes on from the program before it
        return {"torch": torch, "heddle": heddle}
    return {"parallel.md": divided, "serving.md": pages}.get(page, dict)()


@pytest.fixture
def leaves_nothing(monkeypatch, tmp_path):
    """A folder of its own, what torchrun would set, and the end of what a page begins."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", 0)):
        monkeypatch.setenv(name, str(value))
    yield
    import torch.distributed as dist
    import torch.nn.attention as attention

    if dist.is_initialized():
        dist.destroy_process_group()
    if hasattr(attention, "restore_flash_attention_impl"):
        attention.restore_flash_attention_impl()


@pytest.mark.parametrize(("page", "number", "text"), SNIPPETS, ids=[f"{page}-{n}" for page, n, _ in SNIPPETS])
def test_runs(page, number, text, leaves_nothing):
    if 'device="cuda"' in text and not torch.cuda.is_available():
        pytest.skip("no GPU")
    if "import jax" in text:
        pytest.importorskip("jax")
    if "activate_flash" in text and not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        pytest.skip("from torch 2.11 on")
    exec(compile(text, f"{page}, program {number}", "exec"), given_to(page, text))


def test_all_pages():
    assert {page for page, _, _ in SNIPPETS} >= {"README.md", "start.md", "python.md", "parallel.md", "serving.md"}
