# SPDX-License-Identifier: Apache-2.0
"""flash_attn_with_kvcache refuses before anything is written: what attention would refuse behind it, too."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import forward_ad

import heddle

B, H, HK, D = 2, 4, 2, 16
EIGHT = torch.float8_e4m3fn


def given(**changed):
    torch.manual_seed(0)
    cache = torch.zeros(2, B, 32, HK, D)
    new = torch.randn(2, B, 1, HK, D)
    made = {"q": torch.randn(B, 1, H, D), "k_cache": cache[0], "v_cache": cache[1], "k": new[0], "v": new[1]}
    return made | {"cache_seqlens": torch.tensor([4, 9], dtype=torch.int32)} | changed


def eight(**changed):
    made = given()
    return made | {name: made[name].to(EIGHT) for name in ("k_cache", "v_cache")} | changed


def paged(**changed):
    return given(block_table=torch.tensor([[0], [1]], dtype=torch.int32), **changed)


def rotary(**changed):
    cos = torch.randn(32, 4)
    return given(**{"rotary_cos": cos, "rotary_sin": cos} | changed)


def fails(kind, text, arguments):
    with pytest.raises(kind, match=text):
        heddle.flash_attn_with_kvcache(**arguments)
    assert not any(arguments[name].float().any() for name in ("k_cache", "v_cache") if arguments[name].dim() == 4)


def test_what_is_right_is_written():
    for make in (given, eight, paged, rotary):
        arguments = make()
        assert heddle.flash_attn_with_kvcache(**arguments).shape == (B, 1, H, D)
        assert arguments["k_cache"].float().any() and arguments["v_cache"].float().any()


NUMBERS = [
    ({"softcap": -1.0}, ValueError, "softcap = -1 is negative"),
    ({"softcap": math.inf}, ValueError, "softcap = inf is not a finite number"),
    ({"softcap": math.nan}, ValueError, "softcap = nan is not a finite number"),
    ({"softcap": 2.0**-101}, ValueError, r"softcap = .* is not from 2\^-100 to 2\^100"),
    ({"softcap": 2.0**101}, ValueError, r"softcap = .* is not from 2\^-100 to 2\^100"),
    ({"softcap": 2.0**-60, "softmax_scale": 2.0**60}, ValueError, "softmax_scale / softcap = "),
    ({"softcap": "1"}, TypeError, "softcap = '1' is not a number"),
    ({"softcap": ""}, TypeError, "softcap = '' is not a number"),
    ({"softcap": None}, TypeError, "softcap = None is not a number"),
    ({"softcap": torch.ones(2)}, TypeError, r"softcap = tensor\(.* is not a number"),
    ({"softmax_scale": math.nan}, ValueError, "softmax_scale = nan is not a finite number"),
    ({"softmax_scale": 10**400}, ValueError, "softmax_scale = 1000.* is not a finite number"),
    ({"softmax_scale": 2.0**-101}, ValueError, r"softmax_scale = .* is not from 2\^-100 to 2\^100"),
    ({"softmax_scale": -(2.0**101)}, ValueError, r"softmax_scale = .* is not from 2\^-100 to 2\^100"),
    ({"softmax_scale": "x"}, TypeError, "softmax_scale = 'x' is not a number"),
    ({"softmax_scale": torch.tensor(0.5)}, TypeError, "softmax_scale = tensor.* is not a number"),
    ({"causal": "no"}, TypeError, "causal = 'no' is neither True nor False"),
    ({"window_size": (1, 2, 3)}, ValueError, r"window = \(1, 2, 3\) is no pair"),
    ({"window_size": (1.5, 2)}, TypeError, "window = .*must be integers"),
    ({"window_size": ([1], 2)}, TypeError, "window = .*must be integers"),
    ({"num_splits": "x"}, TypeError, "num_splits = 'x' is not an integer"),
    ({"num_splits": 1.5}, TypeError, "num_splits = 1.5 is not an integer"),
    ({"return_softmax_lse": "no"}, TypeError, "return_softmax_lse = 'no' is neither True nor False"),
    ({"rotary_interleaved": "no"}, TypeError, "rotary_interleaved = 'no' is neither True nor False"),
    ({"rotary_interleaved": 2}, TypeError, "rotary_interleaved = 2 is neither True nor False"),
    ({"cache_leftpad": torch.zeros(B)}, NotImplementedError, "cache_leftpad is not supported"),
    ({"cache_seqlens": torch.tensor([4, 32])}, ValueError, "32 rows: too few for 32 and 1"),
    ({"cache_seqlens": "4"}, TypeError, "cache_seqlens must be an int or a tensor"),
]

TENSORS = [
    ({"q": torch.randn(B, 1, 3, D)}, ValueError, "hk = 2 heads, which does not divide h = 3"),
    ({"q": torch.randn(B, 1, 0, D)}, ValueError, "hk = 2 heads, which does not divide h = 0"),
    ({"q": torch.randn(B, 1, H, D).to_sparse()}, TypeError, "q is torch.sparse_coo"),
    ({"q": torch.randn(B, 1, H, D, requires_grad=True)}, NotImplementedError, "q requires a gradient"),
    ({"q": torch.randn(B, 1, H, D, device="meta")}, ValueError, "k_cache is on cpu, q on meta"),
    ({"k": torch.randn(B, 1, HK, D, device="meta")}, TypeError, "k is torch.float32 on meta"),
    ({"v": torch.randn(B, 1, HK, D, requires_grad=True)}, NotImplementedError, "v requires a gradient"),
    ({"v": torch.randn(B, 1, HK, D).to_sparse()}, TypeError, "v is torch.sparse_coo"),
    ({"alibi_slopes": torch.ones(3)}, ValueError, r"alibi_slopes has shape \[3\], but must have \[4\] or \[2, 4\]"),
    ({"alibi_slopes": torch.ones(1, 4)}, ValueError, "alibi_slopes has shape"),
    ({"alibi_slopes": torch.ones(4, requires_grad=True)}, NotImplementedError, "alibi_slopes requires a gradient"),
    ({"alibi_slopes": torch.ones(4, dtype=torch.int32)}, TypeError, "alibi_slopes is torch.int32"),
    ({"alibi_slopes": torch.ones(4, device="meta")}, ValueError, "alibi_slopes is on meta"),
    ({"alibi_slopes": [1.0] * 4}, TypeError, "alibi_slopes must be a torch.Tensor"),
    ({"alibi_slopes": torch.ones(4).to_sparse()}, TypeError, "alibi_slopes is torch.sparse_coo"),
    ({"k_descale": torch.ones(B, HK)}, ValueError, "k_descale is given, but k_cache and v_cache are torch.float32"),
    ({"v_descale": torch.ones(B, HK)}, ValueError, "v_descale is given, but k_cache and v_cache are torch.float32"),
    ({"cache_batch_idx": torch.tensor([0, 1], device="meta")}, ValueError, "cache_batch_idx is on meta"),
    ({"cache_seqlens": torch.tensor([4, 9], device="meta")}, ValueError, "cache_seqlens is on meta"),
]


@pytest.mark.parametrize("changed,kind,text", NUMBERS + TENSORS, ids=lambda value: None)
def test_refused_before_a_write(changed, kind, text):
    fails(kind, text, given(**changed))


@pytest.mark.parametrize(
    "changed,kind,text",
    [
        ({"q": torch.ones(B, 1, H, D, dtype=torch.int32)}, TypeError, "q is torch.int32, but must be one of"),
        ({"q": torch.randn(B, 1, H, D).half()}, TypeError, "k is torch.float32 on cpu, q torch.float16"),
        ({"v": torch.randn(B, 1, HK, D).half()}, TypeError, "v is torch.float16 on cpu, q torch.float32"),
        *(
            change
            for name in ("k_descale", "v_descale")
            for change in (
                ({name: torch.ones(HK)}, ValueError, rf"{name} has shape \[2\], but must have \[2, 2\]"),
                ({name: torch.ones(B, HK, dtype=torch.int32)}, TypeError, f"{name} is torch.int32"),
                ({name: torch.ones(B, HK, requires_grad=True)}, NotImplementedError, f"{name} requires a gradient"),
                ({name: torch.ones(B, HK, device="meta")}, ValueError, f"{name} is on meta"),
                ({name: 2.0}, TypeError, f"{name} must be a torch.Tensor"),
            )
        ),
    ],
    ids=lambda value: None,
)
def test_of_8_bits(changed, kind, text):
    fails(kind, text, eight(**changed))


@pytest.mark.parametrize(
    "changed,kind,text",
    [
        ({"block_table": torch.tensor([[0], [1]])}, TypeError, "block_table is torch.int64"),
        ({"block_table": torch.zeros(1, 1, dtype=torch.int32)}, ValueError, r"block_table has shape \[1, 1\]"),
        ({"block_table": torch.zeros(B, 1, dtype=torch.int32, device="meta")}, ValueError, "block_table is on meta"),
        ({"block_table": torch.full((B, 1), 2, dtype=torch.int32)}, ValueError, "block_table has no page for k and v"),
        ({"block_table": [[0], [1]]}, TypeError, "block_table must be a torch.Tensor"),
        ({"cache_batch_idx": torch.tensor([0, 1])}, ValueError, "cache_batch_idx is given with block_table"),
        ({name: torch.zeros(B, 24, HK, D) for name in ("k_cache", "v_cache")}, ValueError, "page = 24 is not 16"),
        ({"softcap": -1.0}, ValueError, "softcap = -1"),
    ],
    ids=lambda value: None,
)
def test_in_pages(changed, kind, text):
    fails(kind, text, paged() | changed)


@pytest.mark.parametrize(
    "changed,kind,text",
    [
        ({"rotary_sin": None}, ValueError, "rotary_cos and rotary_sin come together"),
        ({"rotary_cos": torch.randn(31, 4), "rotary_sin": torch.randn(31, 4)}, ValueError, r"has shape \[31, 4\]"),
        ({"rotary_sin": torch.randn(32, 3)}, ValueError, r"sin has shape \[32, 3\]"),
        ({"rotary_cos": torch.randn(32, 9), "rotary_sin": torch.randn(32, 9)}, ValueError, "rotary = 18"),
        ({"rotary_sin": torch.randn(32, 4).half()}, TypeError, "rotary_sin is float16"),
        ({"rotary_interleaved": None}, TypeError, "rotary_interleaved = None is neither True nor False"),
        ({"softmax_scale": math.inf}, ValueError, "softmax_scale = inf"),
    ],
    ids=lambda value: None,
)
def test_rotated(changed, kind, text):
    fails(kind, text, rotary(**changed))


def test_one_tensor_for_both():
    cache = torch.zeros(B, 32, HK, D)
    fails(ValueError, "k_cache and v_cache share memory", given(k_cache=cache, v_cache=cache))
    fails(ValueError, "k shares memory with k_cache", given(k_cache=cache, k=cache[:, 5:6]))


@pytest.mark.parametrize("changed", [{"q": torch.float64}, {"k_cache": torch.float64}, {"q": torch.int32}], ids=str)
def test_what_autocast_casts(changed):
    """Not float64, which it leaves alone, nor integers: attention would find two types."""
    made = given()
    arguments = made | {name: made[name].to(dtype) for name, dtype in changed.items()}
    with torch.autocast("cpu", torch.bfloat16):
        fails(TypeError, "is torch.", arguments)
        heddle.flash_attn_with_kvcache(**made | {"q": made["q"].bfloat16()})
    assert made["k_cache"].any()


@pytest.mark.parametrize("name", ["q", "k", "v", "k_cache", "v_cache", "alibi_slopes"])
@pytest.mark.parametrize("mode", ["jvp", "dual"])
def test_forward_mode(name, mode):
    """The cache is written below it: a tangent would be lost."""
    arguments = given(alibi_slopes=torch.ones(H))

    def run(value):
        with pytest.raises(NotImplementedError, match=f"{name} has a tangent"):
            heddle.flash_attn_with_kvcache(**arguments | {name: value})
        return value

    if mode == "jvp":
        torch.func.jvp(run, (arguments[name],), (torch.ones_like(arguments[name]),))
    else:
        with forward_ad.dual_level():
            run(forward_ad.make_dual(arguments[name], torch.ones_like(arguments[name])))
    assert not arguments["k_cache"].any() and not arguments["v_cache"].any()


@pytest.mark.parametrize("changed", [{"softcap": -1.0}, {"softmax_scale": math.nan}, {"alibi_slopes": torch.ones(3)}])
def test_compiled(changed):
    arguments = given(**changed)
    torch._dynamo.reset()
    run = torch.compile(lambda given: heddle.flash_attn_with_kvcache(**given), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=next(iter(changed))):
        run(arguments)
    assert not arguments["k_cache"].any()


def test_what_a_gpu_counts():
    """Limits of the kernels for CUDA, which append has not."""
    from torch._subclasses import FakeTensorMode

    def call(b, h, room, pages):
        q, new = torch.empty(b, 1, h, D, device="cuda"), torch.empty(b, 1, 1, D, device="cuda")
        cache = torch.empty(8, 256, 1, D, device="cuda") if pages else torch.empty(b, room, 1, D, device="cuda")
        table = torch.empty(b, room // 256, dtype=torch.int32, device="cuda") if pages else None
        lengths = torch.empty(b, dtype=torch.int32, device="cuda")
        other = torch.empty_like(cache)
        return heddle.flash_attn_with_kvcache(q, cache, other, new, new, cache_seqlens=lengths, block_table=table)

    with FakeTensorMode():
        assert call(64, 64, 2**19 - 256, True).shape == (64, 1, 64, D)
        for sizes in ((64, 64, 2**19, True), (1, 1, 2**30, False)):
            with pytest.raises(NotImplementedError, match=r"over 2\^30 rows or 2\^31 blocks on a GPU"):
                call(*sizes)


def test_what_lies_anyhow_is_taken():
    """Lengths, slopes and queries whose elements do not lie side by side."""
    arguments, again = given(alibi_slopes=torch.rand(H)), given()
    want = heddle.flash_attn_with_kvcache(**arguments)
    strided = {"alibi_slopes": torch.stack([arguments["alibi_slopes"]] * 2, 1)[:, 0]}
    strided["q"] = arguments["q"].transpose(2, 3).contiguous().transpose(2, 3)
    strided["cache_seqlens"] = torch.stack([arguments["cache_seqlens"]] * 2, 1)[:, 0]
    assert torch.equal(heddle.flash_attn_with_kvcache(**again | strided), want)
    read = {name: value for name, value in (again | strided).items() if name not in "kv"}
    read["cache_seqlens"] = read["cache_seqlens"] + 1
    assert torch.equal(heddle.flash_attn_with_kvcache(**read), want)


def test_lengths_are_told_by_their_name():
    made = given(k=None, v=None, cache_seqlens=torch.tensor([4, 2**32 + 3]))
    fails(ValueError, r"cache_seqlens\[1\] = 4294967299 is outside 0 to 32", made)
