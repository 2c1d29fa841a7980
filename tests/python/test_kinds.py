# SPDX-License-Identifier: Apache-2.0
"""Tensors that are not what their storage says: right, or refused with an error that names the class. And patch(),
which leaves to PyTorch what heddle does not take."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, devices, exact, natural_size
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import heddle

OTHERS = F.scaled_dot_product_attention


def qkv(sq=4, sk=6, h=2, hk=2, device="cpu", **options):
    torch.manual_seed(0)
    shapes = ((1, h, sq, 8), (1, hk, sk, 8), (1, hk, sk, 8))
    return tuple(torch.randn(shape, device=device, **options) for shape in shapes)


# ------------------------------------------------------------------------------------------------------ CausalBias


def tril(bias):
    """What a CausalBias stands for."""
    sq, sk = bias.seq_len_q, bias.seq_len_kv
    return torch.ones(sq, sk, dtype=torch.bool).tril(sk - sq if bias.variant.name == "LOWER_RIGHT" else 0)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("make", [causal_lower_right, causal_upper_left])
@pytest.mark.parametrize("sq,sk,h,hk", [(4, 6, 2, 2), (6, 4, 2, 2), (5, 5, 4, 2), (1, 7, 4, 1)])
def test_causal_bias(make, sq, sk, h, hk, patched, device):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows that see no key
        bias = make(sq, sk)
    leaves = [t.requires_grad_() for t in qkv(sq, sk, h, hk, device)]
    with heddle.patch():
        sdpa = F.scaled_dot_product_attention if patched else heddle.scaled_dot_product_attention
        out = sdpa(*leaves, attn_mask=bias, enable_gqa=h != hk)
    dout = torch.randn_like(out)
    assert type(out) is torch.Tensor
    grads = torch.autograd.grad(out, leaves, dout)
    seen = tril(bias)

    def pytorchs(given):
        want = OTHERS(*given, attn_mask=seen.to(given[0].device), enable_gqa=h != hk)
        return (want, *torch.autograd.grad(want, given, dout.to(want)))

    truth, plain = pytorchs([exact(t) for t in leaves]), pytorchs([t.detach().requires_grad_() for t in leaves])
    for name, got, a, b in zip(("out", "dq", "dk", "dv"), (out, *grads), truth, plain, strict=True):
        assert_close(name, got, a, b, natural_size(dout, *leaves))


def test_causal_bias_compiled():
    torch._dynamo.reset()
    q, k, v = qkv()
    compiled = torch.compile(heddle.scaled_dot_product_attention, fullgraph=True, backend="eager")
    for make in (causal_lower_right, causal_upper_left):
        assert torch.allclose(compiled(q, k, v, make(4, 6)), OTHERS(q, k, v, tril(make(4, 6))), atol=1e-6)


def test_compiled_without_the_table_of_modules():
    """Dynamo goes through all of sys.modules at a look at it, and fails when something is imported meanwhile."""
    torch._dynamo.reset()
    q, k, v = qkv()
    own = torch.randn(1, 2, 4, 8).as_subclass(type("Own", (torch.Tensor,), {}))
    for call in (
        lambda: heddle.scaled_dot_product_attention(q, k, v, causal_lower_right(4, 6)),
        lambda: heddle.attention(own, k, v),
    ):
        found = torch._dynamo.explain(call)()
        assert found.out_guards and not [guard.name for guard in found.out_guards if "modules" in guard.name]


def test_causal_bias_of_other_sizes():
    with pytest.raises(ValueError, match=r"CausalBias of \[3, 6\], but query and key have \[4, 6\]"):
        heddle.scaled_dot_product_attention(*qkv(), causal_lower_right(3, 6))
    with pytest.raises(ValueError, match="together"):
        heddle.scaled_dot_product_attention(*qkv(), causal_lower_right(4, 6), is_causal=True)


# ---------------------------------------------------------------------------------- kinds, through every entry


def entries(t):
    """Every public function, with the tensor t of [1, 2, 4, 8] in each of its places."""
    usual = torch.randn(1, 2, 4, 8)
    cu = torch.tensor([0, 4], dtype=torch.int32)

    def packed(x):
        return x[0].transpose(0, 1) if type(x) is torch.Tensor else x

    yield "q", lambda: heddle.attention(t, t, t)
    yield "k", lambda: heddle.attention(usual, t, usual)
    yield "v", lambda: heddle.attention(usual, usual, t, softcap=2.0)
    yield "bias", lambda: heddle.attention(usual, usual, usual, bias=t)
    yield "mask", lambda: heddle.attention(usual, usual, usual, mask=t)
    yield "sinks", lambda: heddle.attention(usual, usual, usual, sinks=t)
    yield "alibi_slopes", lambda: heddle.attention(usual, usual, usual, alibi_slopes=t)
    yield "rng_state", lambda: heddle.attention(usual, usual, usual, dropout=0.5, rng_state=t)
    yield "seqlens_k", lambda: heddle.attention(usual, usual, usual, seqlens_k=t)
    yield "x", lambda: heddle.norm_linear(t, torch.randn(5, 8))
    yield "weight", lambda: heddle.norm_linear(usual, t)
    yield "gamma", lambda: heddle.norm_linear(usual, torch.randn(5, 8), gamma=t)
    yield "query", lambda: heddle.scaled_dot_product_attention(t, t, t)
    yield "value", lambda: heddle.scaled_dot_product_attention(usual, usual, t)
    yield "flash k", lambda: heddle.flash_attn_func(usual, t, t)
    yield "flash kv", lambda: heddle.flash_attn_kvpacked_func(usual, t)
    yield "flash qkv", lambda: heddle.flash_attn_qkvpacked_func(t)
    yield "flash varlen", lambda: heddle.flash_attn_varlen_func(t, packed(usual), packed(usual), cu, cu, 4, 4)
    yield "flash cache", lambda: heddle.flash_attn_with_kvcache(usual, t, t)
    yield "nn", lambda: heddle.nn.SelfAttention(8, 2)(t)
    yield "NormLinear", lambda: heddle.nn.NormLinear(8, 5)(t)
    yield "compat", lambda: heddle.compat.gpu_kernels.self_attention(t, torch.empty(4, 8), 8)


def nested():
    parts = [torch.randn(4, 16), torch.randn(6, 16)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged).unflatten(-1, [2, 8]).transpose(1, 2)


def dtensor():
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return DTensor.from_local(torch.randn(1, 1, 4, 8), init_device_mesh("cpu", (2,)), [Shard(1)])


def masked():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a prototype
        return torch.masked.masked_tensor(torch.randn(1, 2, 4, 8), torch.rand(1, 2, 4, 8) > 0.5)


def quantised():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it will go
        return torch.quantize_per_tensor(torch.randn(1, 2, 4, 8), 0.1, 0, torch.quint8)


REFUSED = {
    "nested, jagged": (nested, "nested|Nested"),
    "nested, strided": (
        lambda: torch.nested.nested_tensor([torch.randn(2, 4, 8), torch.randn(2, 6, 8)]),
        "nested|Nested",
    ),
    "masked": (masked, "MaskedTensor"),
    "quantised": (quantised, "quint8|QUInt8"),
    "sparse": (lambda: torch.randn(1, 2, 4, 8).to_sparse(), "sparse|Sparse"),
    "mkldnn": (lambda: torch.randn(1, 2, 4, 8).to_mkldnn(), "mkldnn|Mkldnn"),
    "DTensor": (dtensor, "DTensor"),
    "CausalBias": (lambda: causal_upper_left(4, 4), "CausalBias"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    make, text = REFUSED[name]
    strange = make()
    try:
        for place, call in entries(strange):
            # Where a place wants another dtype or rank, that may be told first.
            texts = f"{text}|must be integers|must be torch.bool|must have 5 dim|have 4: |but must have (2|.b, s, 8)"
            with pytest.raises((TypeError, RuntimeError), match=texts) as caught:
                result = call()
                pytest.fail(f"{place}: gave a {type(result).__name__}")
            assert "Internal error" not in str(caught.value), place
    finally:
        if name == "DTensor":
            torch.distributed.destroy_process_group()


class Harmless(torch.Tensor):
    pass


class Counting(torch.Tensor):
    """Asked about every function, and answers as PyTorch would."""

    asked = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.asked += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Answers(torch.Tensor):
    """Its numbers are not in its storage: it knows PyTorch's function by the place that it is found in."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return "its own"
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(
    "kind",
    [
        lambda t: t.as_subclass(Harmless),
        lambda t: t.as_subclass(Counting),
        torch.nn.Parameter,
        torch.nn.Buffer,
        lambda t: torch._neg_view(-t),
        lambda t: torch.complex(torch.zeros_like(t), -t).conj().imag,
    ],
    ids=["subclass", "counting subclass", "Parameter", "Buffer", "negated view", "imaginary part"],
)
def test_harmless(kind):
    q, k, v = qkv()
    strange = kind(k)
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    pairs = [
        (lambda k: heddle.attention(q, k, v), k, strange),
        (lambda k: heddle.attention(q, k, v, softcap=2.0), k, strange),
        (lambda b: heddle.attention(q, k, v, bias=b), torch.ones(4, 6), kind(torch.ones(4, 6))),
        (lambda w: heddle.norm_linear(x, w), weight, kind(weight)),
    ]
    for call, usual, strange in pairs:
        got = call(strange)
        assert torch.allclose(got.detach().as_subclass(torch.Tensor), call(usual), atol=1e-6)


# ----------------------------------------------------------------------------------------------------------- patch()


@pytest.mark.parametrize("at", range(4))
def test_a_class_with_its_own_function(at):
    given = [*qkv(), torch.zeros(4, 6)]
    given[at] = given[at].as_subclass(Answers)
    with pytest.raises(TypeError, match="Answers, whose __torch_function__"):
        heddle.scaled_dot_product_attention(*given)
    with heddle.patch():
        ours = F.scaled_dot_product_attention
        assert F.scaled_dot_product_attention(*given) == "its own"
        assert F.scaled_dot_product_attention is ours


def unpatched_and_patched(call):
    want = call()
    with heddle.patch():
        got = call()
    return want, got


def test_pytorch_computes_what_heddle_does_not_take():
    q, k, v = qkv()
    wide = torch.randn(1, 1, 3, 600)
    many = nested()
    one = torch.nn.attention.bias.causal_lower_right(4, 6)
    cases = [
        lambda: F.scaled_dot_product_attention(many, many, many).values(),
        lambda: F.scaled_dot_product_attention(wide, wide, wide),
        lambda: torch.func.grad(lambda q: F.scaled_dot_product_attention(q, k, v).sum())(q),
        lambda: torch.vmap(torch.func.grad(lambda q: F.scaled_dot_product_attention(q, k, v).sum()))(q[None]),
        lambda: F.scaled_dot_product_attention(q.to("meta"), k.to("meta"), v.to("meta")).shape,
        lambda: F.scaled_dot_product_attention(q.as_subclass(Counting), k, v, one),
    ]
    for call in cases:
        want, got = unpatched_and_patched(call)
        assert type(want) is type(got)
        if isinstance(want, torch.Tensor):
            assert torch.equal(want, got)


@pytest.mark.parametrize("masked", [False, True])
def test_float64_is_pytorchs_within_patch(masked, monkeypatch):
    """heddle has it of its reference alone, which is slow."""
    q, k, v = (t.double() for t in qkv())
    mask = torch.randn(4, 6, dtype=torch.float64) if masked else None
    want = F.scaled_dot_product_attention(q, k, v, mask)
    for name in ("quick", "quick_options", "attention"):
        monkeypatch.setattr(f"heddle._sdpa.{name}", lambda *_, **__: pytest.fail("heddle was called"))
    with heddle.patch():
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, mask), want)


@pytest.mark.parametrize("given", [{}, {"dropout_p": 0.25, "is_causal": True, "scale": 0.5, "enable_gqa": True}])
@pytest.mark.parametrize("masked", [False, True])
def test_float64_reaches_pytorchs_function_as_it_is(masked, given, monkeypatch):
    """The very arguments, its very result, and nobody of ours in its place meanwhile: there is nothing to compare."""
    q, k, v = (t.double() for t in qkv())
    mask = torch.randn(4, 6, dtype=torch.float64) if masked else None
    calls, result = [], object()

    def own(*args, **options):
        assert F.scaled_dot_product_attention is own
        calls.append((args, options))
        return result

    monkeypatch.setattr(F, "scaled_dot_product_attention", own)
    with heddle.patch():
        assert F.scaled_dot_product_attention is not own
        assert F.scaled_dot_product_attention(q, k, v, mask, **given) is result
    ((args, options),) = calls
    default = {"dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False} | given
    names = ("query", "key", "value", "attn_mask", *default)
    got = dict(zip(names, args, strict=False)) | options
    assert all(got.pop(name) is tensor for name, tensor in zip(names, (q, k, v, mask), strict=False))
    assert got == default


def test_a_function_mode_is_asked_of_pytorchs_function():
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return "the mode's" if func is OTHERS else func(*args, **(kwargs or {}))

    with heddle.patch():
        with Mode():
            assert F.scaled_dot_product_attention(*qkv()) == "the mode's"
        with torch.device("cpu"):  # a mode, too, but it answers for no function of ours
            calls = []
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr("heddle._sdpa._at_length", lambda *_, **__: calls.append(1))
                F.scaled_dot_product_attention(*qkv(), torch.zeros(4, 6))
            assert calls


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attend(torch.nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_script_under_patch():
    q, k, v = qkv()
    want = attend(q, k, v)
    with heddle.patch():
        assert torch.allclose(torch.jit.script(attend)(q, k, v), want, atol=1e-6)
        assert torch.allclose(torch.jit.script(Attend())(q), Attend()(q), atol=1e-6)


def test_threads_in_and_out_of_patch():
    """A call that is PyTorch's puts PyTorch's function back for its time only, whoever else is at it."""
    from concurrent.futures import ThreadPoolExecutor

    many, (q, k, v) = nested(), qkv()
    with heddle.patch():
        ours = F.scaled_dot_product_attention
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(ours, *((many,) * 3 if x % 2 else (q, k, v))) for x in range(64)]
            assert all(isinstance(call.result(), torch.Tensor) for call in calls)
        assert F.scaled_dot_product_attention is ours
    assert F.scaled_dot_product_attention is OTHERS


def test_what_is_refused_is_pytorchs_under_patch():
    q, k, v = qkv()
    both = q, k, v, torch.ones(4, 6, dtype=torch.bool)
    wanted = F.scaled_dot_product_attention(*both, is_causal=True)  # some of PyTorch's kernels take it, some do not
    with heddle.patch():
        assert torch.equal(F.scaled_dot_product_attention(*both, is_causal=True), wanted)
        with pytest.raises(RuntimeError, match="Expected query, key, and value to have the same dtype"):
            F.scaled_dot_product_attention(q, k.half(), v)
