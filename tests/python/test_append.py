# SPDX-License-Identifier: Apache-2.0
"""heddle.attention_append, and flash_attn_with_kvcache with rotary embedding, against a composition in PyTorch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from conftest import devices  # noqa: E402

import heddle  # noqa: E402

B, H, HK, D = 3, 4, 2, 16


def angles(positions, rotary, dtype=torch.float32, device="cpu"):
    at = torch.arange(positions, dtype=torch.float64)[:, None]
    at = at * 10000.0 ** -(torch.arange(rotary // 2, dtype=torch.float64) * 2 / rotary)
    return at.cos().to(device, dtype), at.sin().to(device, dtype)


def rotate(x, cos, sin, interleaved):
    """x [..., d] whose rows are at the positions of cos and sin, [..., rotary / 2]; in float64."""
    half, wide = cos.shape[-1], x.double()
    y, z = (
        (wide[..., 0 : 2 * half : 2], wide[..., 1 : 2 * half : 2])
        if interleaved
        else (wide[..., :half], wide[..., half : 2 * half])
    )
    cos, sin = cos.double(), sin.double()
    y, z = y * cos - z * sin, y * sin + z * cos
    turned = torch.stack([y, z], -1).flatten(-2) if interleaved else torch.cat([y, z], -1)
    return torch.cat([turned, wide[..., 2 * half :]], -1)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_packed(dtype, interleaved, paged, device):
    torch.manual_seed(0)
    cu = torch.tensor([0, 2, 2, 7], dtype=torch.int32, device=device)
    lengths = torch.tensor([15, 3, 30], dtype=torch.int32, device=device)
    k, v, q = (torch.randn(7, heads, D, device=device, dtype=dtype) for heads in (HK, HK, H))
    shape = (8, HK, 16, D) if paged else (B, HK, 48, D)
    caches = [torch.randn(shape, device=device, dtype=dtype) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    table = torch.tensor([[0, 1, -1], [2, 3, 4], [5, 6, 7]], dtype=torch.int32, device=device) if paged else None
    cos, sin = angles(48, 8, dtype if interleaved else torch.float32, device)
    rotated, after = heddle.attention_append(
        *caches,
        k,
        v,
        lengths,
        q=q,
        rotary_cos=cos,
        rotary_sin=sin,
        rotary_interleaved=interleaved,
        block_table=table,
        cu_seqlens=cu,
    )
    assert after.tolist() == [17, 3, 35]
    place = torch.tensor([15, 16, 30, 31, 32, 33, 34])
    of = torch.tensor([0, 0, 2, 2, 2, 2, 2])
    want = [rotate(x, cos[place, None], sin[place, None], interleaved) for x in (k, q)]
    unit = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    assert torch.allclose(rotated.double(), want[1], rtol=unit, atol=unit)
    part = table.cpu()[of, place // 16].long() if paged else of
    row = place % 16 if paged else place
    assert torch.allclose(caches[0][part, :, row].double(), want[0], rtol=unit, atol=unit)
    assert torch.equal(caches[1][part, :, row], v)
    for cache, old in zip(caches, before, strict=True):
        cache[part, :, row] = old[part, :, row]
        assert torch.equal(cache, old)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("where", ["rows", "indexed", "pages"])
@pytest.mark.parametrize("causal, window", [(True, (-1, -1)), (False, (-1, -1)), (False, (5, 2))])
def test_kvcache_rotated(causal, window, where, interleaved, device):
    torch.manual_seed(1)
    with torch.no_grad():
        q, k, v = (torch.randn(B, 3, heads, D, device=device) for heads in (H, HK, HK))
        shape = (10, 16, HK, D) if where == "pages" else (5 if where == "indexed" else B, 32, HK, D)
        caches = [torch.randn(shape, device=device) for _ in range(2)]
        table = torch.tensor([[5, 0], [3, 9], [2, 7]], dtype=torch.int32, device=device)
        index = torch.tensor([4, 0, 2], device=device)
        lengths = torch.tensor([14, 0, 29], dtype=torch.int32, device=device)
        cos, sin = angles(32, 8, device=device)
        places = {"pages": {"block_table": table}, "indexed": {"cache_batch_idx": index}, "rows": {}}[where]
        keys, values = (
            cache[table.long()].flatten(1, 2).clone()
            if where == "pages"
            else cache[index if "i" in where else slice(B)].clone()
            for cache in caches
        )
        got = heddle.flash_attn_with_kvcache(
            q,
            *caches,
            k,
            v,
            rotary_cos=cos,
            rotary_sin=sin,
            cache_seqlens=lengths,
            causal=causal,
            window_size=window,
            rotary_interleaved=interleaved,
            **places,
        )
        at = lengths.long()[:, None] + torch.arange(3, device=device)
        n = torch.arange(B, device=device)[:, None]
        keys[n, at] = rotate(k, cos[at, None], sin[at, None], interleaved).float()
        values[n, at] = v
        own = at if causal or window != (-1, -1) else lengths.long()[:, None].expand(-1, 3)
        turned = rotate(q, cos[own, None], sin[own, None], interleaved).float()
        want = heddle.flash_attn_with_kvcache(
            turned, keys, values, cache_seqlens=lengths + 3, causal=causal, window_size=window
        )
        assert torch.allclose(got, want, atol=2e-6)
        if where == "pages":
            assert torch.allclose(caches[0][table.long()].flatten(1, 2)[n, at], keys[n, at], atol=1e-6)


def test_refusals():
    cache, new = torch.zeros(2, HK, 8, D), torch.zeros(2, HK, 1, D)
    lengths, cos = torch.zeros(2, dtype=torch.int32), torch.zeros(8, 4)
    call = heddle.attention_append
    with pytest.raises(ValueError, match=r"k has shape \[2, 2, 1, 16\], but must have \[3, 2, 1, 16\]"):
        call(cache, cache.clone(), new, new, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(TypeError, match="seqlens_k is int64"):
        call(cache, cache.clone(), new, new, lengths.long())
    with pytest.raises(TypeError, match="k is float16"):
        call(cache, cache.clone(), new.half(), new, lengths)
    with pytest.raises(ValueError, match="rotary_cos and rotary_sin come together"):
        call(cache, cache.clone(), new, new, lengths, rotary_cos=cos)
    with pytest.raises(ValueError, match="positions = 7 is outside 8"):
        call(cache, cache.clone(), new, new, lengths, rotary_cos=cos[:7], rotary_sin=cos[:7])
    with pytest.raises(TypeError, match="cos is bfloat16"):
        call(cache, cache.clone(), new, new, lengths, rotary_cos=cos.bfloat16(), rotary_sin=cos.bfloat16())
    with pytest.raises(ValueError, match="block_table must have 2"):
        call(cache, cache.clone(), new, new, lengths, block_table=lengths)
    with pytest.raises(ValueError, match="page = 8 is not 16"):
        call(cache, cache.clone(), new, new, lengths, block_table=lengths[:, None])
    with pytest.raises(ValueError, match="caches = 2, but with HEDDLE_PAGES"):
        pages = torch.zeros(2, HK, 16, D)
        call(pages, pages.clone(), new, new, lengths, block_table=lengths[:, None], cache_index=lengths)
    with pytest.raises(ValueError, match="max_seqlen = 3 is given without"):
        call(cache, cache.clone(), new, new, lengths, max_seqlen=3)
    with pytest.raises(ValueError, match="stride"):
        call(cache.transpose(2, 3).contiguous().transpose(2, 3), cache.clone(), new, new, lengths)
    with pytest.raises(ValueError, match="overlaps itself"):
        call(cache[:1].expand(2, -1, -1, -1), cache.clone(), new, new, lengths)
    with pytest.raises(NotImplementedError, match="no gradient"):
        call(cache, cache.clone(), new.clone().requires_grad_(), new, lengths)
    flash = heddle.flash_attn_with_kvcache
    q, rows = torch.zeros(2, 1, H, D), cache.transpose(1, 2)
    with pytest.raises(ValueError, match="without k and v"):
        flash(q, rows, rows.clone(), rotary_cos=cos, rotary_sin=cos)
    with pytest.raises(ValueError, match="only one is given"):
        flash(q, rows, rows.clone(), new.transpose(1, 2), new.transpose(1, 2), rotary_cos=cos, cache_seqlens=0)
    with pytest.raises(ValueError, match="as the cache has rows, 8"):
        args = new.transpose(1, 2), new.transpose(1, 2), cos[:7], cos[:7]
        flash(q, rows, rows.clone(), *args, cache_seqlens=0)
    assert not cache.any()


def plain(**changed):
    torch.manual_seed(3)
    given = {name: torch.zeros(2, HK, 16, D) for name in ("k_cache", "v_cache")}
    given |= {name: torch.randn(2, HK, 3, D) for name in ("k", "v")}
    return given | {"seqlens_k": torch.tensor([0, 5], dtype=torch.int32)} | changed


@pytest.mark.parametrize(
    "changed,kind,text",
    [
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k = -1 is outside 0 to"),
        ({"max_seqlen_k": 2**40 + 1}, ValueError, "max_seqlen_k = 1099511627777 is outside 0 to"),
        *(({"max_seqlen_k": x}, TypeError, "max_seqlen_k = .* is not an integer") for x in (True, 2.5, "2", [2])),
        *(
            ({name: value} | tables, TypeError, f"{name} = .* is neither True nor False")
            for name in ("rotary_interleaved", "rotary_together")
            for value in (2, None, "no", "", torch.tensor(True))
            for tables in ({}, {"rotary_cos": torch.ones(16, 4), "rotary_sin": torch.ones(16, 4)})
        ),
        ({"rotary_interleaved": True}, ValueError, "rotary_interleaved is given without rotary_cos and rotary_sin"),
        ({"rotary_together": True}, ValueError, "rotary_together is given without rotary_cos and rotary_sin"),
        (
            {"rotary_together": True, "rotary_cos": torch.ones(16, 4), "rotary_sin": torch.ones(16, 4)},
            ValueError,
            "rotary_together is given without q",
        ),
        ({"seqlens_k": None}, TypeError, "seqlens_k must be a torch.Tensor"),
    ],
    ids=lambda value: None,
)
def test_refused_by_name(changed, kind, text):
    given = plain(**changed)
    with pytest.raises(kind, match=text):
        heddle.attention_append(**given)
    assert not given["k_cache"].any() and not given["v_cache"].any()


def test_max_seqlen():
    given = plain(cu_seqlens=torch.tensor([0, 1, 3], dtype=torch.int32))
    given |= {name: given[name][0].transpose(0, 1) for name in ("k", "v")}
    for value, kind, text in ((-1, ValueError, "max_seqlen = -1 is outside"), (True, TypeError, "max_seqlen = True")):
        with pytest.raises(kind, match=text):
            heddle.attention_append(**given, max_seqlen=value)
    assert heddle.attention_append(**given, max_seqlen=2)[1].tolist() == [1, 7]


@pytest.mark.parametrize("where", ["rows", "indexed", "pages", "packed"])
def test_no_keys_at_most(where):
    """As in heddle.attention: 0 is no keys, so that nothing has a place."""
    cos, sin = angles(16, 8)
    given = plain(q=torch.randn(2, H, 3, D), rotary_cos=cos, rotary_sin=sin)
    if where == "pages":
        given["block_table"] = torch.tensor([[1], [0]], dtype=torch.int32)
    if where == "indexed":
        given["cache_index"] = torch.tensor([1, 0], dtype=torch.int32)
    if where == "packed":
        given |= {name: given[name][0].transpose(0, 1).contiguous() for name in ("k", "v", "q")}
        given["cu_seqlens"] = torch.tensor([0, 2, 3], dtype=torch.int32)
    rotated, after = heddle.attention_append(**given, max_seqlen_k=0)
    assert after.tolist() == [0, 0] and not given["k_cache"].any() and not given["v_cache"].any()
    first = given | {"seqlens_k": torch.zeros(2, dtype=torch.int32)}
    assert torch.equal(rotated, heddle.attention_append(**first)[0])
    with pytest.raises(ValueError, match="seqlens_k has shape"):
        heddle.attention_append(**plain(k_cache=torch.zeros(3, HK, 16, D)), max_seqlen_k=0)


def test_shared_memory():
    """Keys would be overwritten by values, and rows by rows that are yet to be read."""
    given = plain()
    cache, k = given["k_cache"], given["k"]
    both = "k_cache and v_cache (are one tensor|share memory)"
    packed = torch.zeros(2, 16, HK, 2 * D).transpose(1, 2)
    for changed, text in (
        ({"v_cache": cache}, both),
        ({"v_cache": cache.view(cache.shape)}, both),
        ({"v_cache": torch.from_numpy(cache.numpy())}, both),
        ({"k_cache": packed[..., :D], "v_cache": packed[..., D - 1 : -1]}, both),
        ({"k": cache[:, :, 3:6]}, "k shares memory with k_cache"),
        ({"v": cache[:, :, 3:6]}, "v shares memory with k_cache"),
        ({"v": given["v_cache"][:, :, 3:6]}, "v shares memory with v_cache"),
        ({"q": cache[:, :, :1]}, "q shares memory with k_cache"),
        ({"k_cache": torch.nn.Parameter(cache, False), "v_cache": cache}, both),
    ):
        with pytest.raises(ValueError, match=text):
            heddle.attention_append(**given | changed)
        assert not cache.any()
    with pytest.raises(Exception, match="one tensor"):
        run = torch.compile(heddle.attention_append, backend="eager", fullgraph=True)
        run(cache, cache, k, k, given["seqlens_k"])


def test_one_storage_is_none_shared():
    """Caches side by side, in one tensor; new rows beside them."""
    want = plain()
    heddle.attention_append(**want)
    for caches in (
        torch.zeros(2, 2, HK, 16, D).unbind(),
        torch.zeros(2, HK, 16, 2, D).unbind(3),
        torch.zeros(2, 16, 2, HK, D).transpose(1, 3).unbind(2),
        [each.transpose(1, 2) for each in torch.zeros(2, 16, HK, 2 * D).split(D, -1)],
        [each[:, :, 1:17] for each in torch.zeros(2, 2, HK, 19, D)],
    ):
        given = plain(k_cache=caches[0], v_cache=caches[1])
        heddle.attention_append(**given)
        assert all(torch.equal(given[name], want[name]) for name in ("k_cache", "v_cache"))
    room = torch.zeros(2, HK, 19, D)
    room[:, :, 16:] = want["k"]
    given = plain(k_cache=room[:, :, :16], k=room[:, :, 16:])
    heddle.attention_append(**given)
    assert torch.equal(given["k_cache"], want["k_cache"])
    meta = {name: value.to("meta") for name, value in plain().items()}
    assert heddle.attention_append(**meta)[1].shape == (2,)


def meets(one, other, room):
    """_meet() of two views (shape, strides, offset), by marking bytes."""
    marks = []
    for shape, strides, at in (one, other):
        mark = torch.zeros(room, dtype=torch.bool)
        mark.as_strided(shape, strides, at).fill_(True)
        marks.append(mark)
    return bool((marks[0] & marks[1]).any())


def test_whether_elements_meet():
    from heddle._append import _meet

    draw = torch.Generator().manual_seed(5)
    found = [0, 0]
    for _ in range(2000):
        views = []
        for _ in range(2):
            numbers = torch.randint(0, 7, (7,), generator=draw).tolist()
            views.append(([1 + n % 4 for n in numbers[:3]], numbers[3:6], numbers[6]))
        size = int(torch.randint(1, 5, (1,), generator=draw))
        bytes_ = [([*shape, size], [size * s for s in strides] + [1], size * at) for shape, strides, at in views]
        want = meets(*bytes_, 4 * 7 * 10 * 4)
        (s, t, a), (x, y, b) = views
        assert _meet((size, tuple(s), tuple(t)), (size, tuple(x), tuple(y)), size * (b - a)) == want, views
        found[want] += 1
    assert min(found) > 100
    sparse = (1, (2, 1000, 1000), (10**9, 1009, 997)), (1, (1000, 1000), (1013, 991))
    assert _meet(*sparse, 3) is True  # too many ways


def test_forward_mode():
    given = plain(q=torch.randn(2, H, 3, D))
    for name in ("k", "v", "q", "k_cache"):

        def run(value, name=name):
            with pytest.raises(NotImplementedError, match=f"{name} has a tangent, but attention_append"):
                heddle.attention_append(**given | {name: value})
            return value

        torch.func.jvp(run, (given[name],), (torch.ones_like(given[name]),))
    assert not given["k_cache"].any()


def arguments(device):
    torch.manual_seed(2)
    caches = [torch.randn(B, HK, 8, D, device=device) for _ in range(2)]
    k, v, q = (torch.randn(B, heads, 2, D, device=device) for heads in (HK, HK, H))
    lengths = torch.tensor([0, 5, 7], dtype=torch.int32, device=device)
    return *caches, k, v, lengths, q, *angles(9, 8, device=device)


@pytest.mark.parametrize("device", devices())
def test_opcheck(device):
    torch.library.opcheck(torch.ops.heddle.attention_append.default, arguments(device))
    torch.library.opcheck(torch.ops.heddle.attention_append.default, arguments(device)[:5])


@pytest.mark.parametrize("device", devices())
def test_compile_and_versions(device):
    def step(k_cache, v_cache, k, v, lengths, q, cos, sin):
        rotated, after = heddle.attention_append(
            k_cache, v_cache, k, v, lengths, q=q * 2, rotary_cos=cos, rotary_sin=sin
        )
        return heddle.attention(rotated, k_cache, v_cache, seqlens_k=after, causal="bottom_right")

    given, again = arguments(device), arguments(device)
    versions = [given[0]._version, given[1]._version]
    with torch.no_grad():
        want = step(*given)
        got = torch.compile(step, fullgraph=True, backend="aot_eager")(*again)
    assert [given[0]._version, given[1]._version] == [x + 1 for x in versions]
    assert torch.allclose(got, want, atol=1e-6)
    assert all(torch.equal(x, y) for x, y in zip(given[:2], again[:2], strict=True))
