# SPDX-License-Identifier: Apache-2.0
"""Keys and values of 8 bits: what they and their scales stand for, by every way in, or an error that names them."""

import sys

import numpy as np
import pytest
import torch
from conftest import devices

import heddle

EIGHT = torch.float8_e4m3fn
B, H, HK, SQ, SK, D = 3, 4, 2, 3, 48, 16
each_device = pytest.mark.parametrize("device", devices())


def problem(device="cpu", dtype=torch.float32):
    """q, k and v of 8 bits, their scales, and what k and v stand for."""
    torch.manual_seed(0)
    q = torch.randn(B, H, SQ, D, device=device).to(dtype)
    k, v = (torch.randn(B, HK, SK, D, device=device).to(EIGHT) for _ in range(2))
    scales = {name: torch.rand(B, HK, device=device) + 0.5 for name in ("k_scale", "v_scale")}
    wide = [x.float() * scale[..., None, None] for x, scale in zip((k, v), scales.values(), strict=True)]
    return q, k, v, scales, wide


def close(ours, theirs, tol=1e-5):
    torch.testing.assert_close(ours, theirs, rtol=tol, atol=tol, check_dtype=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_like_what_they_stand_for(dtype):
    q, k, v, scales, wide = problem(dtype=dtype)
    tol = 2e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-5
    for options in (
        {},
        {"causal": "bottom_right"},
        {"window": (9, 3), "softcap": 5.0, "return_lse": True},
        {"seqlens_k": [SK, 7, 0], "causal": "bottom_right"},
        {"mask": torch.rand(B, 1, 1, SK) > 0.3},
    ):
        expected = heddle.attention(q.to(torch.float64), *(x.double() for x in wide), **options)
        close(heddle.attention(q, k, v, **scales, **options), expected, tol)
    one, other = (heddle.attention(q, k, v, **{name: scale}) for name, scale in scales.items())
    close(one, heddle.attention(q.double(), wide[0].double(), v.double()), tol)
    close(other, heddle.attention(q.double(), k.double(), wide[1].double()), tol)
    close(heddle.attention(q, k, v), heddle.attention(q.double(), k.double(), v.double()), tol)
    layer = torch.rand(HK).expand(B, -1)  # one for each head, whose rows repeat
    close(heddle.attention(q, k, v, v_scale=layer), heddle.attention(q, k, v, v_scale=layer.contiguous()))


@pytest.mark.parametrize("sk,d,dv", [(1, 1, 3), (37, 33, 17), (130, 65, 100)])
def test_packed_and_odd_sizes(sk, d, dv):
    torch.manual_seed(1)
    q, cu = torch.randn(7, H, d), torch.tensor([0, 2, 2, 7], dtype=torch.int32)
    k, v = (torch.randn(3 * sk, HK, last).to(EIGHT) for last in (d, dv))
    k_scale, v_scale = torch.rand(3, HK) + 0.5, torch.rand(3, HK) + 0.5
    wide = [x.double() * s.double().repeat_interleave(sk, 0)[..., None] for x, s in ((k, k_scale), (v, v_scale))]
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": torch.arange(4, dtype=torch.int32) * sk, "causal": "bottom_right"}
    options |= {"max_seqlen_q": 5, "max_seqlen_k": sk}
    ours = heddle.attention(q, k, v, k_scale=k_scale, v_scale=v_scale, **options)
    close(ours, heddle.attention(q.double(), *wide, **options))


@each_device
def test_decoding(device):
    """What a GPU takes, too: a query of each sequence, in pages and without."""
    q, k, v, scales, wide = problem(device, torch.bfloat16)
    q = q[:, :, :1]
    lengths = torch.tensor([SK, 20, 33], dtype=torch.int32, device=device)
    expected = heddle.attention(q.float(), *wide, seqlens_k=lengths)
    close(heddle.attention(q, k, v, seqlens_k=lengths, **scales), expected, 2e-2)
    table = torch.arange(B * SK // 16, dtype=torch.int32, device=device).reshape(B, -1).flip(0).contiguous()
    pages = []
    for x in (k, v):
        of = x.view(torch.uint8).reshape(B, HK, -1, 16, D).transpose(1, 2).flip(0).reshape(-1, HK, 16, D)
        pages.append(of.contiguous().view(EIGHT))
    close(heddle.attention(q, *pages, block_table=table, seqlens_k=lengths, **scales), expected, 2e-2)
    options = {"cache_seqlens": lengths, "k_descale": scales["k_scale"], "v_descale": scales["v_scale"]}
    rows = [x.transpose(1, 2) for x in (q, k, v, *pages)]
    ours = heddle.flash_attn_with_kvcache(rows[0], *rows[3:], block_table=table, **options)
    close(ours.transpose(1, 2), expected, 2e-2)
    index = torch.tensor([2, 0, 1], device=device)
    moved = [x.view(torch.uint8)[[1, 2, 0]].view(EIGHT) for x in rows[1:3]]
    ours = heddle.flash_attn_with_kvcache(rows[0], *moved, cache_batch_idx=index, **options)
    close(ours.transpose(1, 2), expected, 2e-2)


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_prompts(device, dtype):
    """More queries than decoding has, in pages and without, options, and weights."""
    torch.manual_seed(2)
    q = torch.randn(2, H, 90, 40, device=device).to(dtype)
    k, v = (torch.randn(2, HK, 160, 40, device=device).to(EIGHT) for _ in range(2))
    scales = {name: torch.rand(2, HK, device=device) + 0.5 for name in ("k_scale", "v_scale")}
    wide = [x.double() * s[..., None, None] for x, s in zip((k, v), scales.values(), strict=True)]
    table = torch.randperm(20, device=device).int().reshape(2, -1)
    pages = []
    for x in (k, v):
        of = torch.empty(20, HK, 16, 40, dtype=torch.uint8, device=device)
        of[table.flatten().long()] = x.view(torch.uint8).reshape(2, HK, -1, 16, 40).transpose(1, 2).flatten(0, 1)
        pages.append(of.view(EIGHT))
    lengths = torch.tensor([160, 101], dtype=torch.int32, device=device)
    for options in ({"causal": "bottom_right"}, {"softcap": 3.0, "window": (40, 9)}, {"return_weights": True}):
        options["seqlens_k"] = lengths
        on_cpu = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        expected = heddle.attention(q.cpu().double(), *(x.cpu() for x in wide), **on_cpu)
        for keys, more in (((k, v), {}), (pages, {"block_table": table})):
            ours = heddle.attention(q, *keys, **scales, **options, **more)
            for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (ours, expected)), strict=True):
                close(a.cpu(), b, 2e-5 if dtype == torch.float32 else 2e-2)


def in_bytes(x, scale):
    return (x.float() / scale).clamp(-448, 448).to(EIGHT)


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_append(device, dtype):
    """What is written is what PyTorch makes of it; and then attended to, in one call and by two."""
    torch.manual_seed(3)
    k, v = (torch.randn(B, HK, 5, D, device=device).to(dtype) for _ in range(2))
    scales = {name: torch.rand(B, HK, device=device) * 0.01 + 0.001 for name in ("k_scale", "v_scale")}
    lengths = torch.tensor([0, 9, SK - 5], dtype=torch.int32, device=device)
    caches = [torch.zeros(B, HK, SK, D, dtype=torch.uint8, device=device).view(EIGHT) for _ in range(2)]
    _, after = heddle.attention_append(*caches, k, v, lengths, **scales)
    assert torch.equal(after, lengths + 5)
    for new, cache, scale in zip((k, v), caches, scales.values(), strict=True):
        right = in_bytes(new, scale[..., None, None]).view(torch.uint8)
        for n, first in enumerate(lengths.tolist()):
            held = cache.view(torch.uint8)[n]
            assert torch.equal(held[:, first : first + 5], right[n])
            assert not held[:, :first].any() and not held[:, first + 5 :].any()
    assert (caches[0].float().abs() == 448).any()  # some are too large
    one = [torch.zeros_like(x.view(torch.uint8)).view(EIGHT) for x in caches]
    heddle.attention_append(*one, k, v, lengths)
    assert torch.equal(one[0][1, :, 9:14].float(), in_bytes(k[1], 1).float())
    q = torch.randn(B, H, 5, D, device=device).to(dtype)
    cos, sin = (
        f(torch.arange(SK, device=device)[:, None] * torch.rand(D // 2, device=device)) for f in (torch.cos, torch.sin)
    )
    rows = [x.transpose(1, 2) for x in (q, *caches, k, v)]
    options = {"cache_seqlens": lengths, "k_descale": scales["k_scale"], "v_descale": scales["v_scale"], "causal": True}
    out = heddle.flash_attn_with_kvcache(*rows, rotary_cos=cos, rotary_sin=sin, **options)
    wide = [x.float() * s[..., None, None] for x, s in zip(caches, scales.values(), strict=True)]
    turned, _ = heddle.attention_append(
        *(x.to(dtype).clone() for x in wide),
        k,
        v,
        lengths,
        q=q,
        rotary_cos=cos,
        rotary_sin=sin,
        rotary_interleaved=True,
    )
    expected = heddle.attention(turned.float(), *wide, seqlens_k=after, causal="bottom_right")
    close(out.transpose(1, 2), expected, 1e-4 if dtype == torch.float32 else 3e-2)


def test_append_refusals():
    k, v = torch.zeros(B, HK, 1, D), torch.zeros(B, HK, 1, D)
    caches = [torch.zeros(B, HK, SK, D) for _ in range(2)]
    lengths, one = torch.zeros(B, dtype=torch.int32), torch.ones(B, HK)
    with pytest.raises(ValueError, match=r"k_scale is given, but k_cache and v_cache are not float8_e4m3fn"):
        heddle.attention_append(*caches, k, v, lengths, k_scale=one)
    eight = [x.to(EIGHT) for x in caches]
    with pytest.raises(TypeError, match=r"v_cache is .*float32"):
        heddle.attention_append(eight[0], caches[1], k, v, lengths)
    with pytest.raises(ValueError, match=r"v_scale has shape|v_scale must"):
        heddle.attention_append(*eight, k, v, lengths, v_scale=one[:1])
    with pytest.raises(NotImplementedError, match="no gradient"):
        heddle.attention_append(*eight, k, v, lengths, v_scale=one.requires_grad_())
    meta = [x.to("meta") for x in (*eight, k, v, lengths)]
    rotated, after = torch.ops.heddle.attention_append(*meta, k_scale=one.detach().to("meta"))
    assert after.shape == (B,) and rotated.dtype == torch.float32
    with pytest.raises((RuntimeError, ValueError), match="k_scale is given"):
        torch.ops.heddle.attention_append(
            *(x.to("meta") for x in (*caches, k, v, lengths)), k_scale=one.detach().to("meta")
        )


def test_subnormals_where_floats_have_none():
    """A thread that takes subnormal floats for zeros, as XLA's do, takes none of 8 bits for one."""
    bits = torch.arange(256, dtype=torch.uint8)
    v = bits[(bits & 127) != 127].view(EIGHT)[:, None, None, None].expand(-1, 1, 1, D).contiguous()
    q, k = torch.zeros(v.shape), torch.zeros(v.shape).to(EIGHT)
    expected = v.double()
    flushes = torch.set_flush_denormal(True)
    try:
        ours = heddle.attention(q, k, v), heddle.attention(q[:1], k[:1], v[3:4])
    finally:
        torch.set_flush_denormal(False)
    assert flushes or sys.platform != "linux"
    assert torch.equal(ours[0].double(), expected) and torch.equal(ours[1].double(), expected[3:4])


def test_ways_of_torch():
    q, k, v, scales, wide = problem()
    expected, plain = heddle.attention(q, *wide), heddle.attention(q, k.float(), v.float())
    run = torch.compile(lambda *t: heddle.attention(*t[:3], k_scale=t[3], v_scale=t[4]), backend="aot_eager")
    close(run(q, k, v, *scales.values()), expected)
    tests = ("test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")  # test_schema multiplies k
    torch.library.opcheck(torch.ops.heddle.attention.default, (q, k, v), scales, test_utils=tests)
    meta = torch.ops.heddle.attention(*(x.to("meta") for x in (q, k, v)))
    assert meta[0].shape == q.shape and meta[0].dtype == q.dtype
    with torch.autocast("cpu", torch.bfloat16):
        ours = heddle.attention(q, k, v, **scales)
    assert ours.dtype == torch.bfloat16
    close(ours, expected, 2e-2)
    close(heddle.scaled_dot_product_attention(q, k, v, enable_gqa=True), plain)
    close(heddle.flex_attention(q, k, v, enable_gqa=True), plain)
    swapped = heddle.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)))
    close(swapped.transpose(1, 2), plain)
    close(torch.func.vmap(lambda x: heddle.attention(x, k, v, **scales))(torch.stack((q, q)))[1], expected)
    by_scale = torch.func.vmap(lambda x: heddle.attention(q, k, v, k_scale=x, v_scale=scales["v_scale"]))
    close(by_scale(torch.stack((2 * scales["k_scale"], scales["k_scale"])))[1], expected)
    with torch.no_grad():
        close(heddle.attention(q.clone().requires_grad_(), k, v, **scales), expected)
    none = heddle.attention(q[:, :0], k[:, :0], v[:, :0], k_scale=scales["k_scale"][:, :0])
    assert none.shape == (B, 0, SQ, D)


def fails(error, text, *given, **options):
    with pytest.raises(error, match=text):
        heddle.attention(*given, **options)


@each_device
def test_errors(device):
    q, k, v, scales, wide = problem(device, torch.bfloat16)
    q, wide = q[:, :, :1], [x.bfloat16() for x in wide]
    one = scales["k_scale"]
    fails(ValueError, "k_scale is given, but k and v are not float8_e4m3fn", q, *wide, k_scale=one)
    fails(TypeError, "v is bfloat16, but must be torch.float8_e4m3fn", q, k, wide[1])
    fails(TypeError, "k is bfloat16, but must be torch.float8_e4m3fn", q, wide[0], v)
    fails(TypeError, "q is torch.float8_e4m3fn, but must be float32", q.to(EIGHT), k, v)
    other = [x.float().to(torch.float8_e5m2) for x in (k, v)]
    fails(TypeError, "k is torch.float8_e5m2, but must be", q, *other)
    fails(ValueError, "k_scale", q, k, v, k_scale=one[:, :1])
    fails(ValueError, "v_scale", q, k, v, v_scale=one[:1])
    fails(TypeError, "v_scale is torch.int64", q, k, v, v_scale=one.long())
    fails(TypeError, "k_scale must be a torch.Tensor", q, k, v, k_scale=2.0)
    wanting = q.clone().requires_grad_()
    for options in ({}, {"softcap": 5.0}, scales):
        fails(NotImplementedError, "8 bits .*float8_e4m3fn.* have no gradient", wanting, k, v, **options)
    fails(NotImplementedError, "k_scale requires a gradient", q, k, v, k_scale=one.clone().requires_grad_())
    with pytest.raises(NotImplementedError, match=r"8 bits"):
        torch.func.jvp(lambda x: heddle.attention(x, k, v), (q,), (q,))
    with pytest.raises(NotImplementedError, match=r"8 bits"):
        torch.func.grad(lambda x: heddle.attention(x, k, v).sum())(q)
    with pytest.raises(NotImplementedError, match=r"8 bits"):
        heddle.scaled_dot_product_attention(wanting, k, v, enable_gqa=True)
    meta = [x.to("meta") for x in (q, k, v, *wide, one)]
    for given, text in (((meta[0], meta[1], meta[4]), "v is"), ((meta[0], meta[3], meta[4]), "k_scale is given")):
        with pytest.raises((RuntimeError, ValueError, TypeError), match=text):
            torch.ops.heddle.attention(*given, k_scale=meta[5])
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    with pytest.raises(TypeError, match=r"k is .*float8_e4m3fn"):
        heddle.flash_attn_with_kvcache(*rows, rows[1][:, :1], rows[2][:, :1], cache_seqlens=3)
    with pytest.raises(TypeError, match=r"v_cache is torch.bfloat16, but must be torch\.float8_e4m3fn"):
        heddle.flash_attn_with_kvcache(*rows[:2], wide[1].transpose(1, 2))
    lengths = torch.zeros(B, dtype=torch.int32, device=device)
    with pytest.raises(TypeError, match=r"k is torch.float8_e4m3fn, but must be float32"):
        heddle.attention_append(k, v, k[:, :, :1].clone(), v[:, :, :1].clone(), lengths)


def test_arrays():
    q, k, v, scales, wide = problem()
    scales = {name: scale.numpy() for name, scale in scales.items()}
    expected = heddle.attention(q, *wide).numpy()
    np.testing.assert_allclose(heddle.attention(q.numpy(), k, v, **scales), expected, rtol=1e-5, atol=1e-5)
    wide = [x.numpy() for x in wide]
    fails(ValueError, "k_scale is given, but k and v are float32", q.numpy(), *wide, **scales)
    fails(TypeError, "v is float32, but must be float8_e4m3fn", q.numpy(), k, wide[1])
    fails(ValueError, "v_scale has shape", q.numpy(), k, v, v_scale=scales["v_scale"][:1])
    with pytest.raises(NotImplementedError, match=r"8 bits .* have no gradient"):
        heddle.attention_backward(expected, q.numpy(), k, v, expected, expected[..., 0])
    types = pytest.importorskip("ml_dtypes")
    k, v = (x.view(torch.uint8).numpy().view(types.float8_e4m3fn) for x in (k, v))
    np.testing.assert_allclose(heddle.attention(q.numpy(), k, v, **scales), expected, rtol=1e-5, atol=1e-5)
    k, v = (x.view(types.float8_e5m2) for x in (k, v))
    fails(TypeError, "k", q.numpy(), k, v)


def test_jax():
    jax = pytest.importorskip("jax")
    with jax.default_device(jax.devices("cpu")[0]):  # a GPU has no kernel for it in float32
        check_jax(jax)


def check_jax(jax):
    jnp = jax.numpy
    q, k, v, scales, wide = problem()
    expected = heddle.attention(q, *wide).numpy()
    q = jnp.asarray(q.numpy())
    k, v = (jax.lax.bitcast_convert_type(x.view(torch.uint8).numpy(), jnp.float8_e4m3fn) for x in (k, v))
    scales = {name: jnp.asarray(scale.numpy()) for name, scale in scales.items()}
    wide = [jnp.asarray(x.numpy()) for x in wide]

    def same(ours):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)

    same(heddle.jax.attention(q, k, v, **scales))
    same(jax.jit(heddle.jax.attention)(q, k, v, **scales))
    rows = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    same(heddle.jax.attention(*rows, layout="bshd", **scales).transpose(0, 2, 1, 3))
    many = {name: jnp.stack((2 * scale, scale)) for name, scale in scales.items()}
    same(jax.vmap(lambda s: heddle.jax.attention(q, k, v, **s))(many)[1])
    same(jax.vmap(lambda x: heddle.jax.attention(x, k, v, **scales))(jnp.stack((2 * q, q)))[1])
    with pytest.raises(NotImplementedError, match=r"no gradient of keys of 8 bits"):
        jax.grad(lambda x: heddle.jax.attention(x, k, v).sum())(q)
    with pytest.raises(NotImplementedError, match=r"no gradient of keys of 8 bits"):
        jax.grad(lambda x: heddle.jax.attention(q, k, v, k_scale=x).sum())(scales["k_scale"])
    with pytest.raises(ValueError, match=r"k_scale is given, but k and v are float32"):
        heddle.jax.attention(q, *wide, **scales)
    with pytest.raises(TypeError, match=r"v is float32, but must be float8_e4m3fn"):
        heddle.jax.attention(q, k, wide[1])
    with pytest.raises(ValueError, match=r"v_scale has shape"):
        heddle.jax.attention(q, k, v, v_scale=scales["v_scale"][:1])


def test_parallel_refuses():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        q, k, v, _, _ = problem()
        parallel = heddle.parallel.ContextParallel(torch.distributed.group.WORLD)
        with pytest.raises(TypeError, match=r"k is torch\.float8_e4m3fn"):
            parallel.attention(q, k, v)
    finally:
        torch.distributed.destroy_process_group()
