# SPDX-License-Identifier: Apache-2.0
"""The short ways (python/src/shortcut.c), of plain calls and with options: who goes them, and that nothing but the cost
tells."""

from __future__ import annotations

import gc
import sys
import warnings
import weakref

import pytest
import torch
from conftest import devices
from torch.nn.attention.bias import causal_upper_left
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import heddle
from heddle import _schema

ops = torch.ops.heddle
long_way = ops.attention.default  # the overload has no short way
everywhere = pytest.mark.parametrize("device", devices())
CORNERS = {0: None, 1: "top_left", 2: "bottom_right"}


def tensors(device="cpu", dtype=torch.float32, needs=(True, True, True), rows_first=False):
    torch.manual_seed(0)
    made = [torch.randn(shape, device=device).to(dtype) for shape in ((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 3))]
    if rows_first:
        made = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in made]
    return [t.requires_grad_(bool(need)) for t, need in zip(made, needs, strict=True)]


def ways(call, *args, **options):
    """Which operators a call comes to."""
    with warnings.catch_warnings(), torch.profiler.profile() as profile:
        warnings.simplefilter("ignore")
        call(*args, **options)
    return {event.key for event in profile.key_averages() if event.key.startswith("heddle::")}


def test_who_goes_the_short_way():
    q, k, v = (t.detach() for t in tensors())
    leaf = q.clone().requires_grad_()
    short, long = {"heddle::attention_plain"}, {"heddle::attention"}
    assert ways(lambda: ops.attention(q, k, v)) == short
    assert ways(lambda: ops.attention(leaf, k, v, causal=2, scale=0.5)) == short
    assert ways(lambda: heddle.attention(leaf, k, v, causal="top_left", scale=0.5)) == short
    assert ways(lambda: heddle.attention(q, k[:, :, :5], v[:, :, :5], causal=True)) == short
    assert ways(lambda: heddle.attention(torch.nn.Parameter(q), k, v)) == short
    assert ways(lambda: heddle.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)) == short
    assert ways(lambda: heddle.flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=True)) == short
    assert ways(lambda: ops.attention(q, k, v, window_left=3)) == long
    assert ways(lambda: ops.attention(q, k, v, causal=True)) == long  # bool where the schema says int
    assert ways(lambda: ops.attention(q, k, v, None)) == long
    assert ways(lambda: heddle.attention(q, k, v, return_weights=True)) == long
    with torch.autocast("cpu", torch.bfloat16):
        assert "heddle::attention" in ways(lambda: heddle.attention(q, k, v))
    o, lse, weights = ops.attention(leaf, k, v)
    assert weights.shape == (0,) and not weights.requires_grad
    assert ways(lambda: torch.autograd.grad(o.sum(), leaf, retain_graph=True)) == {"heddle::attention_backward_plain"}
    assert ways(lambda: torch.autograd.grad(lse.sum(), leaf)) == {"heddle::attention_backward"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize("causal", CORNERS)
@everywhere
def test_the_same_bits(dtype, rows_first, causal, device):
    def same(a, b):  # a GPU adds gradients in any order
        atol = 2e-2 if dtype == torch.bfloat16 else 1e-5
        return torch.equal(a, b) if device == "cpu" else torch.allclose(a, b, atol=atol, rtol=atol)

    given = tensors(device, dtype, rows_first=rows_first)
    want, its_lse, its_weights = long_way(*given, causal=causal, scale=0.3)
    got, lse, weights = ops.attention(*given, causal=causal, scale=0.3)
    assert torch.equal(got, want) and torch.equal(lse, its_lse) and torch.equal(weights, its_weights)
    assert (weights.shape, weights.dtype, weights.device) == ((0,), its_weights.dtype, its_weights.device)
    assert got.stride() == want.stride() and lse.stride() == its_lse.stride()
    dout, dlse = torch.randn_like(want), torch.randn_like(lse)
    for grads in ([dout, dlse], [dout, None], [None, dlse], [dout.transpose(2, 3).contiguous().transpose(2, 3), None]):
        outs = [(a, b, g) for a, b, g in zip((got, lse), (want, its_lse), grads, strict=True) if g is not None]
        a = torch.autograd.grad([a for a, _, _ in outs], given, [g for *_, g in outs], retain_graph=True)
        b = torch.autograd.grad([b for _, b, _ in outs], given, [g for *_, g in outs], retain_graph=True)
        for x, y in zip(a, b, strict=True):
            assert x.stride() == y.stride() and same(x, y)
    out = heddle.attention(*given, causal=CORNERS[causal], scale=0.3)
    assert torch.equal(out, want)
    a = torch.autograd.grad(out, given, dout)
    b = torch.autograd.grad(want, given, dout)
    assert all(same(x, y) for x, y in zip(a, b, strict=True))
    with torch.no_grad():
        assert torch.equal(heddle.attention(*given, causal=CORNERS[causal], scale=0.3), want)
        assert torch.equal(ops.attention(*given, causal=causal, scale=0.3)[1], its_lse)


@everywhere
def test_autocast(device):
    given = tensors(device)
    low = [t.detach().to(torch.bfloat16).requires_grad_() for t in given]
    want = long_way(*low)[0]
    grads = torch.autograd.grad(want.float().sum(), low)
    for call in (lambda *t: ops.attention(*t)[0], heddle.attention):
        with torch.autocast(device, torch.bfloat16):
            out = call(*given)
            with torch.no_grad():
                assert torch.equal(call(*given), want)
        assert torch.equal(out, want)
        got = torch.autograd.grad(out.float().sum(), given)
        assert all(torch.allclose(a, b.float(), atol=1e-2) for a, b in zip(got, grads, strict=True))


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1)])
@everywhere
def test_some_gradients(needs, device):
    given = tensors(device, needs=needs)
    leaves = [t for t, need in zip(given, needs, strict=True) if need]
    want = torch.autograd.grad(long_way(*given)[0].sin().sum(), leaves)
    for out in (ops.attention(*given)[0], heddle.attention(*given)):
        got = torch.autograd.grad(out.sin().sum(), leaves)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, want, strict=True))


def test_deterministic_is_honoured():
    q, k, v = tensors()
    seen = []

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((str(func), args))
            return func(*args, **(kwargs or {}))

    for wanted in (False, True):
        torch.use_deterministic_algorithms(wanted)
        try:
            out = heddle.attention(q, k, v)
        finally:
            torch.use_deterministic_algorithms(False)
        with Dispatched():
            torch.autograd.grad(out.sum(), q)
        backward = [args for name, args in seen if name == "heddle.attention_backward.default"]
        assert backward[-1][_schema.names("attention_backward").index("deterministic")] is wanted


REFUSED = {
    "heads": lambda q, k, v: (q, k, v[:, :1]),
    "rank": lambda q, k, v: (q, k[0], v[0]),
    "dtype": lambda q, k, v: (q, k.double(), v),
    "integers": lambda q, k, v: (q.detach().int(), k.detach().int(), v.detach().int()),
    "stride": lambda q, k, v: (q.transpose(2, 3).contiguous().transpose(2, 3), k, v),
    "sparse": lambda q, k, v: (q.detach().to_sparse(), k, v),
    "type": lambda q, k, v: (q, k, None),
}


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("wrong", REFUSED)
def test_the_same_errors(wrong, recording):
    given = REFUSED[wrong](*tensors(needs=(recording,) * 3))
    errors = []
    for call in (long_way, ops.attention):
        with pytest.raises(Exception) as caught:
            call(*given)
        errors.append((caught.type, str(caught.value).split("\nException raised")[0].split("\n")[0]))
    assert errors[0] == errors[1] and "plain" not in errors[1][1]
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
        heddle.attention(*given)
    assert "plain" not in str(caught.value)
    with pytest.raises(RuntimeError, match="causal = 7"):
        ops.attention(*tensors(), causal=7)
    with pytest.raises(RuntimeError, match="nonsense"):
        ops.attention(*tensors(), nonsense=7)


def test_modes_and_subclasses_see_the_operator():
    seen = []

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Called(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Wrapped(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append("wrapped")
            return super().__torch_function__(func, types, args, kwargs or {})

    for recording in (False, True):
        q, k, v = tensors(needs=(recording,) * 3)
        for call in (lambda *t: ops.attention(*t)[0], heddle.attention, heddle.scaled_dot_product_attention):
            k4, v4 = (t.repeat_interleave(2, 1) for t in (k, v))
            with Dispatched():
                out = call(q, k4, v4)
            assert "heddle.attention.default" in seen and "heddle.attention_plain.default" not in seen
            if recording:
                with Dispatched():
                    torch.autograd.grad(out.sum(), q)
                assert "heddle.attention_backward.default" in seen
            seen.clear()
            with Called():
                call(q, k4, v4)
            assert "heddle.attention" in seen and "heddle.attention_plain" not in seen
            seen.clear()
            if call is heddle.scaled_dot_product_attention:  # PyTorch's function may be what the class answers for
                with pytest.raises(TypeError, match="whose __torch_function__ answers for PyTorch's function"):
                    call(q.as_subclass(Wrapped), k4, v4)
                continue
            assert isinstance(call(q.as_subclass(Wrapped), k4, v4), Wrapped) and "wrapped" in seen


def test_transforms():
    q, k, v = (t.detach() for t in tensors())
    for call in (lambda *t: ops.attention(*t)[0], heddle.attention):
        got = torch.vmap(call, (0, None, None))(torch.stack([q, 2 * q]), k, v)
        assert torch.allclose(got[1], call(2 * q, k, v), atol=1e-6)
        leaf = q.clone().requires_grad_()
        out = call(leaf, k, v)
        (dq,) = torch.autograd.grad(out.sum(), leaf, retain_graph=True)  # never a zero
        assert torch.allclose(torch.func.grad(lambda t, call=call: call(t, k, v).sum())(q), dq, atol=1e-6)
        change = torch.func.jvp(lambda t, call=call: call(t, k, v).sum(), (q,), (q,))[1]
        assert torch.allclose(change, (dq * q).sum(), atol=1e-5)
        grads = torch.randn(3, *out.shape)
        want = [torch.autograd.grad(out, leaf, g, retain_graph=True)[0] for g in grads]
        got = torch.autograd.grad(out, leaf, grads, is_grads_batched=True, retain_graph=True)[0]
        assert torch.allclose(got, torch.stack(want), atol=1e-6)
        got = torch.vmap(lambda g, out=out, leaf=leaf: torch.autograd.grad(out, leaf, g, retain_graph=True)[0])(grads)
        assert torch.allclose(got, torch.stack(want), atol=1e-6)
        again = torch.autograd.grad(out.sum(), leaf, create_graph=True)[0]
        want = torch.func.jvp(torch.func.grad(lambda t, call=call: call(t, k, v).sum()), (q,), (torch.ones_like(q),))[1]
        assert torch.allclose(torch.autograd.grad(again.sum(), leaf)[0], want, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_torchscript():
    """What torch.jit makes has heddle::attention in it, which records gradients."""
    given = tensors()
    for needs in (False, True):
        example = tuple(t.detach().requires_grad_(needs) for t in given)
        for call in (lambda q, k, v: torch.ops.heddle.attention(q, k, v)[0], heddle.attention):
            traced = torch.jit.trace(call, example)
            assert "heddle::attention(" in str(traced.graph)
            assert traced(*given).requires_grad

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        return torch.ops.heddle.attention(q, k, v)[0]

    assert torch.equal(torch.jit.script(function)(*given), function(*given))


def test_saved_tensors():
    """Hooks, checkpoints and the check for changes in place see what is saved."""
    q, k, v = tensors()
    packed = []
    for call in (lambda *t: ops.attention(*t)[0], heddle.attention):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
            out = call(q, k, v)
        assert sorted(packed) == sorted([q.shape, k.shape, v.shape, out.shape, out.shape[:3]])
        packed.clear()
        want = torch.autograd.grad(out.sum(), (q, k, v))
        again = checkpoint(call, q, k, v, use_reentrant=False)
        assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(again.sum(), (q, k, v)), want, strict=True))
        changed = q * 1
        out = call(changed, k, v)
        changed.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_compiled_autograd():
    given = tensors()
    want = torch.autograd.grad(heddle.attention(*given).sin().sum(), given)
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        heddle.attention(*given).sin().sum().backward()
    assert all(torch.allclose(t.grad, w, atol=1e-6) for t, w in zip(given, want, strict=True))


def test_meta_tensors():
    given = [t.detach().to("meta").requires_grad_() for t in tensors()]
    out, lse, _ = ops.attention(*given)
    assert out.shape == (2, 4, 5, 3) and lse.shape == (2, 4, 5) and lse.dtype == torch.float32
    grads = torch.autograd.grad(out, given, torch.empty_like(out))
    assert [g.shape for g in grads] == [t.shape for t in given]
    assert heddle.attention(*(t.detach() for t in given)).shape == out.shape


# ---------------------------------------------------------------------------------------------------- with options

LONG = heddle._torch.attention  # what the short way is a short way to


def some(device, dtype, **more):
    """A call with these options; those of tensors by name."""
    torch.manual_seed(1)
    made = {
        "mask": lambda: torch.rand(2, 1, 5, 6, device=device) < 0.7,
        "mask of 2": lambda: torch.rand(5, 6, device=device) < 0.7,
        "mask of 3": lambda: torch.rand(4, 1, 6, device=device) < 0.7,
        "bias": lambda: torch.randn(1, 4, 5, 6, device=device).to(dtype),
        "bias of 2": lambda: torch.randn(5, 6, device=device).to(dtype),
        "bias of 3": lambda: torch.randn(4, 1, 6, device=device).to(dtype),
        "alibi_slopes": lambda: torch.rand(4, device=device),
        "sinks": lambda: torch.randn(4, device=device),
        "seqlens_q": lambda: torch.tensor([5, 2], device=device, dtype=torch.int32),
        "seqlens_k": lambda: torch.tensor([6, 3], device=device, dtype=torch.int32),
        "rng_state": lambda: torch.tensor([5, 7], device=device),
    }
    return {name.split()[0]: made[name]() if value is True and name in made else value for name, value in more.items()}


OPTIONS = [
    {"mask": True},
    {"mask of 2": True, "softcap": 2},
    {"mask of 3": True, "scale": 0.3},
    {"bias": True},
    {"bias of 2": True, "window": (2, None)},
    {"bias of 3": True, "mask": True},
    {"softcap": 3.0, "causal": "bottom_right"},
    {"alibi_slopes": True, "causal": "top_left"},
    {"sinks": True, "return_lse": True},
    {"window": (1, 2)},
    {"seqlens_q": True, "seqlens_k": True},
    {"dropout": 0.3},
    {"dropout": 0.5, "rng_state": True, "bias": True, "sinks": True},
    {"return_lse": True},
    {"deterministic": True},
    {"tf32": True},
]


def run(call, given, options, recording):
    """Results and gradients."""
    leaves = [*given, *(options[name].requires_grad_() for name in ("bias", "sinks") if recording and name in options)]
    torch.manual_seed(2)
    out = call(*given, **options)
    pair = out if isinstance(out, tuple) else (out,)
    torch.manual_seed(3)
    return pair, torch.autograd.grad(pair, leaves, [torch.randn_like(t) for t in pair]) if recording else ()


@pytest.mark.parametrize("options", OPTIONS, ids=", ".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@everywhere
def test_options_go_short_and_compute_the_same(options, dtype, device):
    for recording in (False, True):
        given, made = tensors(device, dtype, needs=(recording,) * 3), some(device, dtype, **options)
        want, its_gradients = run(LONG, given, made, recording)
        got, gradients = run(heddle.attention, given, made, recording)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride() and a.requires_grad == b.requires_grad
        for a, b in zip(gradients, its_gradients, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            atol = 3e-2 if dtype == torch.bfloat16 else 1e-5
            assert torch.equal(a, b) if device == "cpu" else torch.allclose(a, b, atol=atol, rtol=atol)
        backward = {"heddle::attention_backward"} if recording else set()
        short = {"heddle::attention_options"} | backward
        assert ways(run, heddle.attention, given, made, recording) == short


def test_sdpa_goes_short_with_masks_and_dropout():
    q, k, v = tensors(needs=(False,) * 3)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    short = {"heddle::attention_options"}
    call, names = heddle.scaled_dot_product_attention, ("attn_mask", "dropout_p", "is_causal", "scale")
    for given in (
        (torch.rand(5, 6) < 0.6, 0.0, False, None),
        (torch.randn(4, 5, 6), 0.0, False, None),
        (None, 0.2, True, None),
        (torch.rand(2, 1, 1, 6) < 0.9, 0.2, False, 0.5),
    ):
        options = dict(zip(names, given, strict=True))
        assert ways(call, q, k, v, **options) == short
        with heddle.patch():
            assert ways(torch.nn.functional.scaled_dot_product_attention, q, k, v, **options) == short
        torch.manual_seed(4)
        got = call(q, k, v, **options)
        torch.manual_seed(4)
        assert torch.equal(got, heddle._sdpa._at_length(q, k, v, *given, False, None))


TAKEN_AT_LENGTH = {  # what has to be converted, or to be asked of somebody
    "a bias of another dtype": {"bias": torch.zeros(5, 6, dtype=torch.float64)},
    "a mask of one key": {"mask": torch.ones(5, 1, dtype=torch.bool)},
    "a mask whose last dimension is not contiguous": {"mask": torch.ones(6, 5, dtype=torch.bool).t()},
    "a mask of one dimension": {"mask": torch.ones(6, dtype=torch.bool)},
    "lengths of 64 bits": {"seqlens_k": torch.tensor([6, 3])},
    "lengths in a list": {"seqlens_k": [6, 3]},
    "a window in a list": {"window": [1, 2]},
    "weights": {"return_weights": True},
}


@pytest.mark.parametrize("what", TAKEN_AT_LENGTH)
def test_what_is_taken_at_length(what):
    given, options = tensors(), TAKEN_AT_LENGTH[what]
    for more in ({}, {"dropout": 0.4}):
        torch.manual_seed(5)
        want = LONG(*given, **options, **more)
        after = torch.rand(1)
        torch.manual_seed(5)
        got = heddle.attention(*given, **options, **more)
        assert torch.equal(torch.rand(1), after)  # one seed is drawn, whoever refused
        pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
        assert all(torch.equal(a, b) for a, b in pairs)


WRONG = {
    "shape": {"mask": torch.ones(4, 6, dtype=torch.bool)},
    "no bools": {"mask": torch.ones(5, 6)},
    "a subclass": {"mask": causal_upper_left(5, 6)},
    "sparse": {"bias": torch.eye(5, 6).to_sparse()},
    "slopes with a gradient": {"alibi_slopes": torch.ones(4, requires_grad=True)},
    "sinks": {"sinks": torch.ones(3)},
    "dropout": {"dropout": 1.5},
    "softcap": {"softcap": -1.0},
    "lengths": {"seqlens_k": torch.tensor([7, 3], dtype=torch.int32)},
    "window": {"window": (1, 2.5)},
    "rng_state": {"dropout": 0.5, "rng_state": torch.ones(2)},
    "causal": {"causal": True, "softcap": 1.0},
}


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("wrong", WRONG)
def test_the_same_errors_with_options(wrong, recording):
    given, errors = tensors(needs=(recording,) * 3), []
    for call in (LONG, heddle.attention):
        with pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
            call(*given, **WRONG[wrong])
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


def test_options_and_who_stands_between():
    """Modes, transforms, autocast and second derivatives see heddle::attention."""
    q, k, v = tensors()
    options = {"mask": torch.rand(5, 6) < 0.8, "softcap": 2.0}
    seen = []

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Dispatched():
        out = heddle.attention(q, k, v, **options)
        torch.autograd.grad(out.sum(), q)
    assert {"heddle.attention.default", "heddle.attention_backward.default"} <= set(seen)
    assert "heddle.attention_options.default" not in seen
    out = heddle.attention(q, k, v, **options)
    assert torch.equal(torch.vmap(lambda t: heddle.attention(t, k, v, **options))(q[None])[0], out)
    with torch.autocast("cpu", torch.bfloat16):
        assert "heddle::attention" in ways(lambda: heddle.attention(q, k, v, **options))
        low = heddle.attention(q, k, v, **options)
        with torch.no_grad():  # the operator itself, too
            pair = ops.attention_options(q, k, v, None, options["mask"], softcap=2.0, lse=False)
        assert low.dtype == torch.bfloat16 and torch.equal(pair[0], low) and pair[1] is None
    weigh = torch.rand(out.shape)
    second = []
    for it in (out, heddle.attention(q, k, v, return_weights=True, **options)[0]):
        again = torch.autograd.grad((it * weigh).sum(), q, create_graph=True)[0]
        second.append(torch.autograd.grad((again * q.detach()).sum(), (q, k, v), retain_graph=True))
    for short, long in zip(*second, strict=True):
        assert short.abs().max() > 1e-3 and torch.allclose(short, long, atol=1e-6)
    want = [torch.autograd.grad(out, q, g, retain_graph=True)[0] for g in (out.detach(), 2 * out.detach())]
    got = torch.autograd.grad(out, q, torch.stack([out, 2 * out]).detach(), is_grads_batched=True, retain_graph=True)[0]
    assert torch.allclose(got, torch.stack(want), atol=1e-6)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: heddle.attention(*t, **options), backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(q, k, v), out)


def test_options_saved_tensors():
    """Hooks, checkpoints and the check for changes in place see what is saved; a dropped weight is dropped again."""
    q, k, v = tensors()
    mask = torch.rand(5, 6) < 0.8
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
        out = heddle.attention(q, k, v, mask=mask)
    assert sorted(packed) == sorted([q.shape, k.shape, v.shape, out.shape, out.shape[:3], (1, 1, 5, 6)])
    out = heddle.attention(q, k, v, mask=mask)
    mask.logical_not_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    torch.manual_seed(6)
    want = torch.autograd.grad(heddle.attention(q, k, v, dropout=0.5).sum(), (q, k, v))
    torch.manual_seed(6)
    again = checkpoint(lambda *t: heddle.attention(*t, dropout=0.5), q, k, v, use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(again.sum(), (q, k, v)), want, strict=True))


def test_nothing_is_kept_of_options():
    mask, bias = torch.rand(5, 6) < 0.8, torch.randn(5, 6)
    for needs in (False, True):
        given = (*tensors(needs=(needs,) * 3), mask, bias.requires_grad_(needs))
        before = [sys.getrefcount(x) for x in given]
        for _ in range(10):
            out = heddle.attention(*given[:3], mask=mask, bias=bias, dropout=0.5, window=(1, 2))
            with pytest.raises(ValueError, match="mask has shape"):
                heddle.attention(*given[:3], mask=mask[:3])
            with pytest.raises(ValueError, match="v has 1"):
                heddle.attention(given[0], given[1], given[2][:, :1], mask=mask, dropout=0.5)
        if needs:
            torch.autograd.grad(out.sum(), given[:3])
        del out
        gc.collect()
        assert [sys.getrefcount(x) for x in given] == before


@pytest.mark.parametrize(
    "name", ["attention_plain", "attention_options", "attention_backward_plain", "attention_backward_heads"]
)
@everywhere
def test_opcheck(name, device):
    """They are operators like others, but for autograd, which they are below."""
    q, k, v = (t.detach() for t in tensors(device))
    out, lse, _ = long_way(q, k, v)
    same, sums, _ = long_way(q, q, q)
    given = {
        "attention_backward_heads": (same, same, sums, q, q, q, 2, 0.5, False),
        "attention_plain": (q, k, v, 2, 0.5, True),
        "attention_options": (q, k, v, torch.ones(5, 6, device=device), torch.ones(1, 6, device=device) > 0),
        "attention_backward_plain": (out, out, lse, q, k, v, 2, 0.5, False, 5),
    }[name]
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(ops, name).default, given, test_utils=checks)


def test_nothing_is_kept():
    """Neither good calls nor refused ones keep a reference."""
    calls = (lambda *t: ops.attention(*t)[0], heddle.attention)
    for call in calls:
        for needs in (False, True):
            given = tensors(needs=(needs,) * 3)
            before = [sys.getrefcount(x) for x in given]
            for _ in range(10):
                out = call(*given)
                with pytest.raises((RuntimeError, ValueError)):
                    call(given[0], given[1], given[2][:, :1])
            if needs:
                torch.autograd.grad(out.sum(), given)
            dead = weakref.ref(out)
            del out
            gc.collect()
            assert dead() is None
            assert [sys.getrefcount(x) for x in given] == before
