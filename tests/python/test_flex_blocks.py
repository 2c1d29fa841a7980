# SPDX-License-Identifier: Apache-2.0
"""heddle.flex_attention with the lists of a BlockMask: what heddle is told, what is computed of a mask_mod, results."""

from __future__ import annotations

import pytest
import torch
from flex_help import eager, flex, passed  # noqa: F401

import heddle
from heddle import _flex, _flex_masks

B, H, S, D = 2, 4, 300, 16
torch.manual_seed(0)
DOCUMENTS, ALLOWED, HEADS = torch.arange(S) // 110, torch.rand(S, S) > 0.4, torch.rand(H, 5, 5) > 0.5
MODS = {
    "blocks": lambda b, h, q, k: (q // 64 + k // 64) % 2 == 0,
    "documents": lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k],
    "documents, causal": lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) & (q >= k),
    "documents, window": lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) & (q >= k) & (q - k < 90),
    "documents, before": lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) & (k < q),
    "table": lambda b, h, q, k: ALLOWED[q, k] & (q // 64 != 2) & (b + k // 64 != 1),
    "heads": lambda b, h, q, k: HEADS[h, q // 64, k // 64],
    "not to be traced": lambda b, h, q, k: (torch.stack((q, k)).sum(0) // 64) % 3 == 0,
}
SIZES = (64, 128, 192, (64, 128), 16)


def problem():
    return [torch.randn(B, h, S, D).requires_grad_() for h in (H, 2, 2)]


def made(name, size=64):
    return flex.create_block_mask(
        MODS[name], B if name == "table" else None, H if name == "heads" else None, S, S, device="cpu", BLOCK_SIZE=size
    )


def gradients(out, leaves):
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MODS)
def test_as_pytorch(name, size):
    leaves, given = problem(), made(name, size)
    first, again = (gradients(heddle.flex_attention(*leaves, None, given, enable_gqa=True), leaves) for _ in range(2))
    theirs = flex.flex_attention(*(t.detach() for t in leaves), None, given, enable_gqa=True)
    torch.testing.assert_close(first[0], theirs, rtol=1e-4, atol=1e-5)
    mask = flex.create_mask(MODS[name], B, H, S, S, device="cpu")
    expected = gradients(heddle.attention(*leaves, mask=mask), leaves)
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))  # by what is kept


TOLD = {
    "blocks": {"block_size"},
    "heads": {"block_size"},
    "documents": {"block_size", "mask"},
    "documents, causal": {"block_size", "mask", "causal"},
    "documents, window": {"block_size", "mask", "causal", "window"},
    "documents, before": {"block_size", "mask"},
    "not to be traced": {"block_size", "mask"},
}


@pytest.mark.parametrize("name", TOLD)
def test_what_heddle_is_told(name, passed):  # noqa: F811
    heddle.flex_attention(*problem(), None, made(name), enable_gqa=True)
    expected = TOLD[name] | {"block_rows", "block_columns"}
    assert passed[0].keys() - {"return_lse"} == expected and passed[0]["block_size"] == (64, 64)


def test_full_tiles_alone(passed):  # noqa: F811
    """Lists without a mask_mod, as BlockMask.from_kv_blocks has them."""
    q, k, v = problem()
    shown = torch.rand(1, 1, 5, 5) > 0.5
    empty = flex._dense_to_ordered(torch.zeros_like(shown, dtype=torch.int8))
    full = flex._dense_to_ordered(shown.to(torch.int8))
    given = flex.BlockMask.from_kv_blocks(*empty, *full, BLOCK_SIZE=64, seq_lengths=(S, S))
    out = heddle.flex_attention(q, k, v, None, given, enable_gqa=True)
    mask = shown.repeat_interleave(64, 2).repeat_interleave(64, 3)[..., :S, :S]
    torch.testing.assert_close(out, heddle.attention(q, k, v, mask=mask), rtol=1e-5, atol=1e-5)
    assert "block_rows" in passed[0] and "mask" not in passed[0]
    given.full_kv_num_blocks.zero_()  # what was kept of the lists is of no use now
    assert not heddle.flex_attention(q, k, v, None, given, enable_gqa=True).any()


def test_lists_that_say_something_else(passed):  # noqa: F811
    """Full tiles behind the diagonal of a causal mask_mod count, as in PyTorch's kernels."""
    q, k, v = problem()
    kinds = torch.randint(0, 3, (1, 1, 5, 5))
    kinds[0, 0, 0, 4] = 2
    pairs = [x for kind in (1, 2) for x in flex._dense_to_ordered((kinds == kind).to(torch.int8))]
    mods = (lambda b, h, q, k: q >= k, lambda b, h, q, k: (q >= k) & (DOCUMENTS[q] == DOCUMENTS[k]))
    for mod in mods:
        given = flex.BlockMask.from_kv_blocks(*pairs, BLOCK_SIZE=64, mask_mod=mod, seq_lengths=(S, S))
        tiles = kinds.repeat_interleave(64, 2).repeat_interleave(64, 3)[..., :S, :S]
        inside = mod(0, 0, torch.arange(S)[:, None], torch.arange(S))
        out = heddle.flex_attention(q, k, v, None, given, enable_gqa=True)
        expected = heddle.attention(q, k, v, mask=(tiles == 2) | ((tiles == 1) & inside))
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        assert "block_rows" in passed[-1] and "causal" not in passed[-1]


@pytest.mark.parametrize("name", ["documents", "documents, causal", "not to be traced"])
def test_empty_tiles_are_not_computed(name, monkeypatch):
    given, elements = made(name), []
    value = _flex_masks._value

    def counted(*args):
        elements.append(value(*args))
        return elements[-1]

    monkeypatch.setattr(_flex_masks, "_value", counted)
    heddle.flex_attention(*problem(), None, given, enable_gqa=True)
    cut = int(given.kv_num_blocks.sum()) * 64 * 64
    heads = B * H if name == "not to be traced" else 1  # on which it may depend
    assert 0 < sum(x.numel() for x in elements) <= 2 * cut * heads
    assert max(x.shape[-1] for x in elements if x.dim()) <= 64


def test_scores_go_with_lists():
    leaves, slopes = problem(), torch.rand(H)
    bias = torch.randn(S, S).requires_grad_()

    def score(s, b, h, q, k):
        return 5 * torch.tanh(s / 5) + bias[q, k] - slopes[h] * (q - k).abs()

    given = made("documents, causal")
    out = heddle.flex_attention(*leaves, score, given, enable_gqa=True)
    theirs = flex.flex_attention(*(t.detach() for t in leaves), score, given, enable_gqa=True)
    torch.testing.assert_close(out, theirs, rtol=1e-4, atol=1e-5)
    mask = flex.create_mask(MODS["documents, causal"], B, H, S, S, device="cpu")
    expected = heddle.attention(
        *leaves, softcap=5.0, bias=bias, alibi_slopes=slopes, mask=mask, causal="top_left", scale=D**-0.5
    )
    ours, expected = (gradients(x, [*leaves, bias]) for x in (out, expected))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_traced_is_asked_anew():
    """Nobody knows what such a function reads."""
    q, k, v = (x.detach() for x in problem())
    state = {"by": 64}

    def mod(b, h, q, k):
        return (torch.stack((q, k)).sum(0) // state["by"]) % 3 == 0

    given = flex.create_block_mask(mod, None, None, S, S, device="cpu", BLOCK_SIZE=64)
    for by in (64, 50):
        state["by"] = by
        given = flex.create_block_mask(mod, None, None, S, S, device="cpu", BLOCK_SIZE=64) if by == 64 else given
        lists = _flex._knowledge(given)
        out = heddle.flex_attention(q, k, v, None, given, enable_gqa=True)
        (tiles,) = lists.tiles.values()
        kinds = tiles.kinds.repeat_interleave(64, 2).repeat_interleave(64, 3)[..., :S, :S]
        inside = (torch.arange(S)[:, None] + torch.arange(S)) // by % 3 == 0
        expected = heddle.attention(q, k, v, mask=(kinds == 2) | ((kinds == 1) & inside))
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    branch = flex.BlockMask.from_kv_blocks(
        given.kv_num_blocks, given.kv_indices, BLOCK_SIZE=64, seq_lengths=(S, S), mask_mod=lambda b, h, q, k: q and k
    )
    with pytest.raises(NotImplementedError, match="branch of Python"):
        heddle.flex_attention(q, k, v, None, branch, enable_gqa=True)


COUNTS = torch.full((1, 1, 3), 2, dtype=torch.int32)
TILES = torch.arange(2, dtype=torch.int32).expand(1, 1, 3, 2).contiguous()


@pytest.mark.parametrize(
    "changed,kind,text",
    [
        ({"kv_indices": TILES - 1}, ValueError, "kv_indices names tiles from -1 to 0, but a row has tiles 0 to 2"),
        ({"kv_indices": TILES + 2}, ValueError, "kv_indices names tiles from 2 to 3, but a row has tiles 0 to 2"),
        ({"full_kv_indices": TILES + 3}, ValueError, "full_kv_indices names tiles from 3 to 3"),
        ({"kv_num_blocks": COUNTS + 1}, ValueError, "kv_num_blocks is from 3 to 3, but a row has 0 to 2 tiles"),
        ({"kv_num_blocks": COUNTS - 3}, ValueError, "kv_num_blocks is from -1 to -1"),
        ({"kv_num_blocks": COUNTS[..., :1]}, ValueError, r"have shapes \[1, 1, 1\] and \[1, 1, 3, 2\]"),
        ({"kv_num_blocks": COUNTS[0], "kv_indices": TILES[0]}, ValueError, r"must have \[b, h, rows\]"),
        ({"kv_num_blocks": COUNTS[..., :2], "kv_indices": TILES[:, :, :2]}, ValueError, "2 rows .* 300 queries have 3"),
        ({"full_kv_num_blocks": COUNTS[..., :1], "full_kv_indices": TILES[:, :, :1]}, ValueError, "1 rows of tiles"),
        (
            {"full_kv_num_blocks": COUNTS.repeat(2, 1, 1), "full_kv_indices": TILES.repeat(2, 1, 1, 1)},
            ValueError,
            "full",
        ),
        ({"full_kv_num_blocks": None}, TypeError, "full_kv_num_blocks must be a torch.Tensor, not NoneType"),
        ({"kv_indices": None}, TypeError, "kv_indices must be a torch.Tensor, not NoneType"),
        ({"kv_indices": TILES.float()}, TypeError, "kv_indices is torch.float32"),
        ({"BLOCK_SIZE": 128}, ValueError, "BLOCK_SIZE is 128"),
        ({"BLOCK_SIZE": (128, 0)}, ValueError, r"BLOCK_SIZE is \(128, 0\)"),
        ({"mask_mod": None}, TypeError, "mask_mod must be a function, not NoneType"),
    ],
)
def test_lists_that_cannot_be(changed, kind, text):
    """Nothing that a list says is left out, or said of other rows than it is of."""
    q, k, v = problem()
    lists = COUNTS, TILES, COUNTS - 1, TILES
    given, right = (
        flex.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=128, mask_mod=MODS["blocks"], seq_lengths=(S, S))
        for _ in range(2)
    )
    assert heddle.flex_attention(q, k, v, None, right, enable_gqa=True).isfinite().all()
    for name, value in changed.items():
        setattr(given, name, value)
    for _ in range(2):
        with pytest.raises(kind, match=f"^block_mask.*{text}"):
            heddle.flex_attention(q, k, v, None, given, enable_gqa=True)


def test_what_lies_behind_a_list_is_not_read():
    given = flex.BlockMask.from_kv_blocks(COUNTS, TILES, BLOCK_SIZE=128, mask_mod=MODS["blocks"], seq_lengths=(S, S))
    q, k, v = problem()
    want = heddle.flex_attention(q, k, v, None, given, enable_gqa=True)
    behind = torch.cat((TILES, torch.full((1, 1, 3, 2), -7, dtype=torch.int32)), -1)
    given.kv_indices = behind
    assert torch.equal(heddle.flex_attention(q, k, v, None, given, enable_gqa=True), want)
