# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's functions: layouts, defaults, extra results, the cache."""

from __future__ import annotations

import pytest
import torch
from conftest import devices, plain_attention

import heddle

B, SQ, SK, H, HK, D = 2, 6, 9, 4, 2, 8


def qkv(device="cpu"):
    torch.manual_seed(0)
    return [torch.randn(B, s, h, D, device=device, requires_grad=True) for s, h in ((SQ, H), (SK, HK), (SK, HK))]


def plain(q, k, v, **options):
    out, lse, weights = plain_attention(*(t.transpose(1, 2) for t in (q, k, v)), **options)
    return out.transpose(1, 2), lse, weights


OPTIONS = [
    ({}, {}),
    ({"causal": True}, {"causal": "bottom_right"}),
    ({"window_size": (2, 1)}, {"window": (2, 1)}),
    ({"causal": True, "window_size": (3, 0)}, {"causal": "bottom_right", "window": (3, 0)}),
    ({"softcap": 2.0, "softmax_scale": 0.5}, {"softcap": 2.0, "scale": 0.5}),
    ({"alibi_slopes": torch.rand(H), "causal": True}, {"alibi_slopes": "same", "causal": "bottom_right"}),
    ({"deterministic": True}, {}),
]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("given,same", OPTIONS)
def test_func(given, same, device):
    given = {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    same = {n: given[n] if isinstance(t, str) and t == "same" else t for n, t in same.items()}
    q, k, v = qkv(device)
    out, lse, probs = heddle.flash_attn_func(q, k, v, return_attn_probs=True, **given)
    want, want_lse, _ = plain(q, k, v, **same)
    assert probs is None and out.is_contiguous() and lse.dtype == torch.float32
    assert torch.allclose(out, want, atol=1e-5) and torch.allclose(lse, want_lse, atol=1e-5)
    assert torch.equal(heddle.flash_attn_func(q, k, v, **given), out)
    dout = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(want, (q, k, v), dout), strict=True):
        assert torch.allclose(a, b, atol=1e-4)
    packed = heddle.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **given)
    assert torch.equal(packed, out)


def test_qkvpacked():
    qkv_packed = torch.randn(B, SQ, 3, H, D, requires_grad=True)
    out = heddle.flash_attn_qkvpacked_func(qkv_packed, causal=True)
    want, _, _ = plain(*qkv_packed.unbind(2), causal="bottom_right")
    assert torch.allclose(out, want, atol=1e-5)
    got, expected = (torch.autograd.grad(t.square().sum(), qkv_packed)[0] for t in (out, want))
    assert torch.allclose(got, expected, atol=1e-4)


def test_dropout_shows_in_probs():
    q, k, v = qkv()
    out, lse, probs = heddle.flash_attn_func(q, k, v, dropout_p=0.4, return_attn_probs=True)
    _, want_lse, weights = plain(q, k, v)
    assert torch.allclose(probs.abs(), weights, atol=1e-6) and torch.allclose(lse, want_lse, atol=1e-6)
    keep = probs >= 0
    assert 0.4 < keep.float().mean() < 0.8
    want = (weights * keep / 0.6) @ v.transpose(1, 2).repeat_interleave(2, 1)
    assert torch.allclose(out.transpose(1, 2), want, atol=1e-5)


@pytest.mark.parametrize("device", devices())
def test_varlen(device):
    torch.manual_seed(0)
    lengths = [4, 0, 7]
    total, longest = sum(lengths), max(lengths)
    cu = torch.tensor([0, 4, 4, 11], dtype=torch.int32, device=device)
    packed = torch.randn(total, 3, H, D, device=device, requires_grad=True)
    q, k, v = packed.unbind(1)
    out, lse, probs = heddle.flash_attn_varlen_func(
        q, k, v, cu, cu, longest, longest, causal=True, return_attn_probs=True
    )
    assert lse.shape == (H, total) and probs is None
    at = 0
    for length in lengths:
        part = slice(at, at + length)
        want, want_lse, _ = plain(*(t[None, part] for t in (q, k, v)), causal="bottom_right")
        assert torch.allclose(out[None, part], want, atol=1e-5)
        assert torch.allclose(lse[None, :, part], want_lse, atol=1e-5)
        at += length
    assert torch.equal(heddle.flash_attn_varlen_qkvpacked_func(packed, cu, longest, causal=True), out)
    kv = torch.stack([k, v], 1)
    assert torch.equal(heddle.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, longest, longest, causal=True), out)
    with pytest.raises(NotImplementedError, match="block_table"):
        heddle.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, block_table=cu)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("indexed", [False, True])
def test_kvcache(indexed, device):
    torch.manual_seed(0)
    with torch.no_grad():
        q, new_k, new_v = (torch.randn(B, 2, h, D, device=device) for h in (H, HK, HK))
        caches = [torch.randn(3 if indexed else B, 12, HK, D, device=device) for _ in range(2)]
        before = [cache.clone() for cache in caches]
        lengths = torch.tensor([5, 0], dtype=torch.int32, device=device)
        rows = torch.tensor([2, 0], device=device) if indexed else torch.arange(B, device=device)
        out, lse = heddle.flash_attn_with_kvcache(
            q,
            *caches,
            new_k,
            new_v,
            cache_seqlens=lengths,
            cache_batch_idx=rows if indexed else None,
            causal=True,
            return_softmax_lse=True,
        )
        for n, (length, row) in enumerate(zip(lengths.tolist(), rows.tolist(), strict=True)):
            keys, values = (
                torch.cat([old[row, :length], new[n]])[None] for old, new in zip(before, (new_k, new_v), strict=True)
            )
            want, want_lse, _ = plain(q[n : n + 1], keys, values, causal="bottom_right")
            assert torch.allclose(out[n : n + 1], want, atol=1e-5) and torch.allclose(
                lse[n : n + 1], want_lse, atol=1e-5
            )
            assert torch.equal(caches[0][row, length : length + 2], new_k[n])
            assert torch.equal(caches[0][row, :length], before[0][row, :length])
            assert torch.equal(caches[1][row, length + 2 :], before[1][row, length + 2 :])
        all_of_it = heddle.flash_attn_with_kvcache(q, caches[0][:B], caches[1][:B])
        assert torch.allclose(all_of_it, plain(q, caches[0][:B], caches[1][:B])[0], atol=1e-5)
        by_int = heddle.flash_attn_with_kvcache(q, caches[0][:B], caches[1][:B], cache_seqlens=7)
        assert torch.allclose(by_int, plain(q, caches[0][:B, :7], caches[1][:B, :7])[0], atol=1e-5)


@pytest.mark.parametrize("device", devices())
def test_kvcache_in_pages(device):
    torch.manual_seed(0)
    with torch.no_grad():
        q, new_k, new_v = (torch.randn(B, 3, h, D, device=device) for h in (H, HK, HK))
        caches = [torch.randn(7, 16, HK, D, device=device) for _ in range(2)]
        table = torch.tensor([[5, 0, 3], [2, 6, -1]], dtype=torch.int32, device=device)
        lengths = torch.tensor([31, 14], dtype=torch.int32, device=device)
        whole = [cache[table.long()].flatten(1, 2) for cache in caches]
        want = heddle.flash_attn_with_kvcache(q, *whole, new_k, new_v, cache_seqlens=lengths, causal=True)
        got = heddle.flash_attn_with_kvcache(
            q, *caches, new_k, new_v, cache_seqlens=lengths, block_table=table, causal=True
        )
        assert torch.allclose(got, want, atol=1e-6)
        for cache, new in zip(caches, (new_k, new_v), strict=True):
            assert torch.equal(cache[0, 15], new[0, 0]) and torch.equal(cache[3, :2], new[0, 1:])
            assert torch.equal(cache[2, 14:], new[1, :2]) and torch.equal(cache[6, 0], new[1, 2])
        call = heddle.flash_attn_with_kvcache
        with pytest.raises(TypeError, match="block_table is torch"):
            call(q, *caches, block_table=table.long())
        with pytest.raises(ValueError, match=r"block_table has shape \[1, 3\]"):
            call(q, *caches, block_table=table[:1])
        with pytest.raises(ValueError, match="cache_batch_idx is given with"):
            call(q, *caches, block_table=table, cache_batch_idx=lengths)
        if device == "cpu":
            before = caches[0].clone()
            with pytest.raises(ValueError, match="no page for k and v: -1 to 3 of 7"):
                call(q, *caches, new_k, new_v, cache_seqlens=32, block_table=table)
            with pytest.raises(ValueError, match="48 rows: too few for 46 and 3"):
                call(q, *caches, new_k, new_v, cache_seqlens=46, block_table=table)
            assert torch.equal(caches[0], before)


def test_kvcache_errors():
    q = torch.randn(B, 2, H, D)
    cache = torch.randn(B, 12, HK, D)
    new = torch.randn(B, 2, HK, D)
    call = heddle.flash_attn_with_kvcache
    with pytest.raises(NotImplementedError, match="cache_leftpad"):
        call(q, cache, cache, cache_leftpad=q)
    with pytest.raises(ValueError, match="only one"):
        call(q, cache, cache, k=new)
    with pytest.raises(ValueError, match="cache_seqlens does not say"):
        call(q, cache, cache, k=new, v=new)
    with pytest.raises(ValueError, match="12 rows: too few for 11 and 2"):
        call(q, cache.clone(), cache.clone(), k=new, v=new, cache_seqlens=11)
    with pytest.raises(ValueError, match="batch size 2, the cache 1"):
        call(q, cache[:1], cache[:1])
    with pytest.raises(NotImplementedError, match="gradient"):
        call(q.requires_grad_(), cache, cache)
    with pytest.raises(ValueError, match="3 dimensions"):
        heddle.flash_attn_func(q[0], cache, cache)
    q = q.detach()
    for length in (-1, 13, 2**40):
        with pytest.raises(ValueError, match=f"cache_seqlens = {length} must not be negative, nor exceed"):
            call(q, cache, cache, cache_seqlens=length)
    for length in (13, 2**32 + 3):
        with pytest.raises(ValueError, match="is outside 0 to 12"):
            call(q, cache, cache, cache_seqlens=torch.tensor([1, length]))
    for rows in ([-2, -1], [0, 2]):
        for more in ({}, {"k": new, "v": new}):
            with pytest.raises(ValueError, match=rf"cache_batch_idx = \[{rows[0]}, {rows[1]}\] is not all from 0 to 1"):
                call(q, cache, cache, **more, cache_seqlens=3, cache_batch_idx=torch.tensor(rows))
    table = torch.ones(12, 0)
    with pytest.raises(ValueError, match=r"rotary_cos has shape \[12, 0\], but must have \[positions, rotary / 2\]"):
        call(q, cache, cache, k=new, v=new, rotary_cos=table, rotary_sin=table, cache_seqlens=3)


def test_causal_is_a_bool():
    """heddle.attention's corners have names; a name is no bool, and 'top_left' is not bottom right."""
    x, cu = torch.randn(2, 5, 2, 8), torch.tensor([0, 5], dtype=torch.int32)
    for call in (
        lambda c: heddle.flash_attn_func(x, x, x, causal=c),
        lambda c: heddle.flash_attn_func(x, x, x, causal=c, dropout_p=0.5),
        lambda c: heddle.flash_attn_qkvpacked_func(torch.stack((x, x, x), 2), causal=c),
        lambda c: heddle.flash_attn_kvpacked_func(x, torch.stack((x, x), 2), causal=c),
        lambda c: heddle.flash_attn_varlen_func(x[0], x[0], x[0], cu, cu, 5, 5, causal=c),
        lambda c: heddle.flash_attn_with_kvcache(x, x, x, causal=c),
    ):
        call(True)
        with pytest.raises(TypeError, match="causal = 'top_left' is neither True nor False"):
            call("top_left")
    before, new = x.clone(), torch.randn(2, 1, 2, 8)
    for wrong in ({"causal": "top_left"}, {"window_size": (1, 2, 3)}):
        with pytest.raises((TypeError, ValueError), match=r"causal =|window ="):
            heddle.flash_attn_with_kvcache(new, x, x.clone(), new, new, cache_seqlens=3, **wrong)
        assert torch.equal(x, before)


@pytest.mark.parametrize("value", ["no", "", torch.tensor(True)], ids=str)
@pytest.mark.parametrize("name", ["return_attn_probs", "deterministic", "return_softmax_lse"])
def test_text_is_no_flag(name, value):
    x, cu = torch.randn(2, 5, 2, 8), torch.tensor([0, 5, 10], dtype=torch.int32)
    flat, three, two = x.flatten(0, 1), torch.stack((x, x, x), 2), torch.stack((x, x), 2)
    calls = [
        lambda **flags: heddle.flash_attn_func(x, x, x, **flags),
        lambda **flags: heddle.flash_attn_func(x, x, x, dropout_p=0.5, **flags),
        lambda **flags: heddle.flash_attn_qkvpacked_func(three, **flags),
        lambda **flags: heddle.flash_attn_qkvpacked_func(three.clone().requires_grad_(), **flags),
        lambda **flags: heddle.flash_attn_kvpacked_func(x, two, **flags),
        lambda **flags: heddle.flash_attn_varlen_func(flat, flat, flat, cu, cu, 5, 5, **flags),
        lambda **flags: heddle.flash_attn_varlen_qkvpacked_func(three.flatten(0, 1), cu, 5, **flags),
        lambda **flags: heddle.flash_attn_varlen_kvpacked_func(flat, two.flatten(0, 1), cu, cu, 5, 5, **flags),
    ]
    if name == "return_softmax_lse":
        calls = [lambda **flags: heddle.flash_attn_with_kvcache(x, x, x, **flags)]
    for call in calls:
        call(**{name: False})
        call(**{name: True})
        with pytest.raises(TypeError, match=f"{name} = .* is neither True nor False"):
            call(**{name: value})


@pytest.mark.parametrize("name", ["softcap", "dropout_p"])
@pytest.mark.parametrize("value", ["", None, [], [0.5, 0.5]], ids=str)
def test_no_number(name, value):
    x = torch.randn(2, 5, 2, 8)
    for call in (
        lambda **numbers: heddle.flash_attn_func(x, x, x, **numbers),
        lambda **numbers: heddle.flash_attn_qkvpacked_func(torch.stack((x, x, x), 2).requires_grad_(), **numbers),
    ):
        with pytest.raises(TypeError, match=f"{name.removesuffix('_p')} = .* is not a number"):
            call(**{name: value})


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_kvcache_compiled(backend):
    """In one graph, which tells what is wrong when it runs; nothing is written then."""
    torch.manual_seed(0)
    call = heddle.flash_attn_with_kvcache
    run = torch.compile(call, backend=backend, fullgraph=True)
    q, new = torch.randn(B, 2, H, D), torch.randn(B, 1, HK, D)
    lengths = torch.tensor([5, 15], dtype=torch.int32)
    table = torch.tensor([[2, 1], [3, 0]], dtype=torch.int32)
    for more, wrong in (
        ({}, {"cache_seqlens": lengths + 1}),
        ({}, {"cache_seqlens": lengths - 6}),
        ({"block_table": table}, {"block_table": table + 3}),
        ({"block_table": table}, {"cache_seqlens": lengths + 30}),
        ({"cache_batch_idx": torch.tensor([2, 1])}, {"cache_batch_idx": torch.tensor([-1, 1])}),
    ):
        caches = [torch.randn(4 if more else B, 16, HK, D) for _ in range(2)]
        copies = [cache.clone() for cache in caches]
        given = {"k": new, "v": new, "cache_seqlens": lengths} | more
        assert torch.allclose(run(q, *caches, **given), call(q, *copies, **given), atol=1e-6)
        assert all(map(torch.equal, caches, copies))
        with pytest.raises(RuntimeError, match=f"^{next(iter(wrong))} "):
            run(q, *caches, **given | wrong)
        assert all(map(torch.equal, caches, copies))


@pytest.mark.parametrize(
    "make",
    [
        lambda left, right: (torch.tensor(left), torch.tensor(right)),
        lambda left, right: (torch.tensor([left]), right),
        lambda left, right: torch.tensor([left, right]),
        lambda left, right: [torch.tensor(left, dtype=torch.int32), torch.tensor([[right]])],
    ],
)
def test_a_window_of_tensors(make):
    """FlashAttention takes whatever Python takes for an integer."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 9, 2, 8) for _ in range(3))
    cu = torch.tensor([0, 9, 18], dtype=torch.int32)
    for sides in ((2, 1), (-1, 0), (-1, -1)):
        want = heddle.flash_attn_func(q, k, v, window_size=sides)
        assert torch.equal(heddle.flash_attn_func(q, k, v, window_size=make(*sides)), want)
        packed = [t.flatten(0, 1) for t in (q, k, v)]
        got = heddle.flash_attn_varlen_func(*packed, cu, cu, 9, 9, window_size=make(*sides))
        assert torch.allclose(got.unflatten(0, (2, 9)), want, atol=1e-6)


def test_no_window_is_two_integers():
    """What equals the default and is none is looked at as ever."""
    q = torch.randn(1, 5, 2, 8)
    plain = heddle.flash_attn_func(q, q, q, causal=True)
    for size in ((-1, -1), [-1, -1], (None, -1), torch.tensor([-1, -1])):
        assert torch.equal(heddle.flash_attn_func(q, q, q, causal=True, window_size=size), plain)
    for size, kind, text in (
        ((-1.0, -1.0), TypeError, "its sides must be integers or None"),
        ((-1, -1.0), TypeError, "its sides must be integers or None"),
        ((-1, -1, -1), ValueError, "is no pair"),
        (-1, ValueError, "is no pair"),
    ):
        with pytest.raises(kind, match=text):
            heddle.flash_attn_func(q, q, q, causal=True, window_size=size)
