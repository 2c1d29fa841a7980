# SPDX-License-Identifier: Apache-2.0
"""Second derivatives and forward mode: finite differences in float64, the formulas in float64 for what is float32, and
the transforms of torch.func against those of the formulas."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from conftest import devices, exact, plain_attention, plain_norm_linear
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import heddle
import heddle.nn
from heddle import _tangents

func = torch.func
everywhere = pytest.mark.parametrize("device", devices())
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
B, H, HK, SQ, SK, D, DV = 2, 4, 2, 6, 7, 3, 2


def tensors(dtype=torch.float64, device="cpu", sizes=(B, H, HK, SQ, SK, D, DV)):
    """q, k, v, bias and sinks."""
    b, h, hk, sq, sk, d, dv = sizes
    rng = torch.Generator().manual_seed(0)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    shapes = ((b, h, sq, d), (b, hk, sk, d), (b, hk, sk, dv), (1, h, sq, sk), (h,))
    made = [torch.randn(shape, generator=rng) for shape in shapes]
    return [t.to(device, real if t.dim() == 1 else dtype).requires_grad_() for t in made]


def int32(*numbers, device="cpu"):
    return torch.tensor(numbers, dtype=torch.int32, device=device)


MASK = torch.arange(B * SQ * SK).reshape(B, 1, SQ, SK) % 5 != 1
MASK[1, :, 2] = False  # a query that sees nothing
SLOPES = torch.tensor([0.1, 0.2, 0.0, 0.3], dtype=torch.float64)
LENGTHS = {"seqlens_q": int32(5, 6), "seqlens_k": int32(0, 6)}
OPTIONS = {
    "plain": {},
    "top left": {"causal": "top_left", "scale": 0.7},
    "lse": {"causal": "bottom_right", "return_lse": True},
    "band": {"window": (1, 0), "return_lse": True, "softcap": 1.5},
    "weights": {"return_weights": True, "mask": MASK},
    "lengths": {**LENGTHS, "causal": "bottom_right", "return_lse": True},
    "dropout": {"dropout": 0.3, "rng_state": torch.tensor([5, 3 << 33 | 7]), "causal": "top_left"},
    "part": {
        "q_offset": 9,
        "k_offset": 3,
        "h_offset": 2,
        "whole_sq": 19,
        "whole_sk": 15,
        "whole_h": 7,
        "causal": "bottom_right",
        "window": (4, None),
        "alibi_slopes": SLOPES,
        "dropout": 0.3,
        "rng_state": torch.tensor([5, 6]),
    },
    "everything": {
        "mask": MASK,
        "softcap": 1.5,
        "alibi_slopes": SLOPES,
        "window": (3, 1),
        "return_lse": True,
        "dropout": 0.4,
        "rng_state": torch.tensor([1, 2]),
    },
}


def check(function, inputs, forward=True):
    if forward:
        gradcheck(
            function,
            inputs,
            fast_mode=True,
            check_forward_ad=True,
            check_backward_ad=False,
            check_batched_forward_grad=True,
        )
    gradgradcheck(function, inputs, fast_mode=True, check_fwd_over_rev=True)


def finite(results):
    """Without the lse of queries that see nothing."""
    results = results if isinstance(results, tuple) else (results,)
    return tuple(torch.where(t == -math.inf, 0.0, t) for t in results)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_attention_by_differences(name, blocks, monkeypatch):
    if blocks > 1:
        monkeypatch.setattr(_tangents, "BLOCK", 1)
        monkeypatch.setattr(_tangents, "FEWEST", SQ // blocks)
    q, k, v, bias, sinks = tensors()
    options = OPTIONS[name]
    if name not in ("everything", "lengths"):
        check(lambda *t: finite(heddle.attention(*t, **options)), (q, k, v), forward=blocks == 1)
    elif blocks > 1:
        run = lambda q, k, v, bias, sinks: finite(heddle.attention(q, k, v, bias=bias, sinks=sinks, **options))  # noqa: E731
        check(run, (q, k, v, bias, sinks))
        with torch.no_grad():
            bias = bias[:, :1, :1].clone()
        if name == "lengths":
            gradgradcheck(run, (q, k, v, bias.requires_grad_(), sinks), fast_mode=True)


@pytest.mark.parametrize("square", [False, True])
def test_packed_by_differences(square):
    cu_q, cu_k = int32(0, 3, 3, 7), int32(1, 4, 5, 8)
    q, k, v = (
        torch.randn(n, h, d, dtype=torch.float64, requires_grad=True) for n, h, d in ((8, 4, 3), (9, 2, 3), (9, 2, 2))
    )
    bias = torch.randn(3, 1, 4, 6, dtype=torch.float64, requires_grad=True) if square else None

    def run(q, k, v, bias=None):
        places = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 4, "max_seqlen_k": 6 if square else 40}
        return finite(heddle.attention(q, k, v, bias=bias, causal="top_left", return_lse=True, **places))

    check(run, (q, k, v, bias) if square else (q, k, v))


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("given", [5, 2])
def test_norm_linear_by_differences(norm, given):
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 5), (4, 5), (4,), (5,), (5,))]
    check(lambda *t: heddle.norm_linear(*t, norm=norm), inputs[:given])


def second(run, leaves, seed=1):
    """All second derivatives along a direction, and those by what comes in."""
    rng = torch.Generator().manual_seed(seed)
    results = run(*leaves)
    results = results if isinstance(results, tuple) else (results,)

    def like(t):
        return torch.randn(t.shape, generator=rng).to(t.device, t.dtype)

    grads = [like(t).requires_grad_() for t in results]
    first = torch.autograd.grad(results, leaves, grads, create_graph=True)
    return torch.autograd.grad(first, [*leaves, *grads], [like(t) for t in first], allow_unused=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["plain", "everything", "lengths", "band", "a flat bias"])
@everywhere
def test_attention_against_float64(name, dtype, device, monkeypatch):
    """Relative to the largest of each tensor; bfloat16's results are rounded once."""
    monkeypatch.setattr(_tangents, "BLOCK", 2**9)
    sizes = (2, 4, 2, 48, 40, 16, 8)
    q, k, v, bias, sinks = tensors(dtype, device, sizes)
    options = {k: v for k, v in OPTIONS.get(name, {}).items() if k not in ("mask", "dropout", "rng_state")}
    if name == "a flat bias":  # what is saved for backward must not be a view that nobody can differentiate
        bias = bias.detach()[0, 0].requires_grad_()
    if name == "lengths":
        options |= {"seqlens_q": int32(35, 48, device=device), "seqlens_k": int32(0, 40, device=device)}
    if name == "everything":
        options["alibi_slopes"] = SLOPES.float().to(device)
        options["mask"] = (torch.arange(48 * 40, device=device).reshape(48, 40) % 7) != 3
    plain = {name: exact(value) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    plain.pop("return_lse", None)
    ours = second(
        lambda q, k, v, bias, sinks: finite(heddle.attention(q, k, v, bias=bias, sinks=sinks, **options)),
        (q, k, v, bias, sinks),
    )
    which = slice(0, 2 if options.get("return_lse") else 1)
    truth = second(
        lambda q, k, v, bias, sinks: finite(plain_attention(q, k, v, bias=bias, sinks=sinks, **plain)[which]),
        [exact(t) for t in (q, k, v, bias, sinks)],
    )
    for got, want in zip(ours, truth, strict=True):
        assert want.abs().max() > 0
        error = (got.detach().double().cpu() - want).abs().max() / want.abs().max()
        # The gradients that come in are the same numbers in float64 only where they were not rounded to bfloat16.
        assert error < (1e-5 if dtype == torch.float32 else 3e-2), error


@pytest.mark.parametrize("norm", ["layer", "rms"])
@everywhere
def test_norm_linear_against_float64(norm, device):
    shapes = ((40, 64), (48, 64), (48,), (64,), (64,))
    leaves = [(torch.randn(s) + 3 * (len(s) == 2)).to(device).requires_grad_() for s in shapes]
    ours = second(lambda *t: heddle.norm_linear(*t, norm=norm), leaves)
    truth = second(lambda *t: plain_norm_linear(*t, norm=norm), [exact(t) for t in leaves])
    for at, (got, want) in enumerate(zip(ours, truth, strict=True)):
        if at == 2:  # y is linear in the bias
            assert got is None and want is None
            continue
        assert (got.double().cpu() - want).abs().max() < 2e-5 * want.abs().max()


def along(x):
    return torch.cos(torch.arange(x.numel(), dtype=x.dtype)).reshape(x.shape)


def twice(x):
    return torch.stack([x, 2 * x])


TRANSFORMS = {
    "grad": lambda f, x: func.grad(f)(x),
    "jvp": lambda f, x: func.jvp(f, (x,), (along(x),)),
    "jvp of grad": lambda f, x: func.jvp(func.grad(f), (x,), (along(x),)),
    "grad of jvp": lambda f, x: func.grad(lambda y: func.jvp(f, (y,), (along(x),))[1])(x),
    "jvp of jvp": lambda f, x: func.jvp(lambda y: func.jvp(f, (y,), (along(x),))[1], (x,), (along(x),)),
    "grad of grad": lambda f, x: func.grad(lambda y: (func.grad(f)(y) * along(x)).sum())(x),
    "hessian": lambda f, x: func.hessian(f)(x),
    "jacrev of jacrev": lambda f, x: func.jacrev(func.jacrev(f))(x),
    "vmap of grad": lambda f, x: torch.vmap(func.grad(f))(twice(x)),
    "vmap of jvp": lambda f, x: torch.vmap(lambda y: func.jvp(f, (y,), (along(x),))[1])(twice(x)),
    "vmap of hessian": lambda f, x: torch.vmap(func.hessian(f))(twice(x)),
    "grad of vmap": lambda f, x: func.grad(lambda y: torch.vmap(f)(y).sum())(twice(x)),
    "autograd's hessian": lambda f, x: torch.autograd.functional.hessian(f, x),
    "the same by vmap": lambda f, x: torch.autograd.functional.hessian(
        f, x, vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    "third": lambda f, x: func.grad(
        lambda z: (func.grad(lambda y: (func.grad(f)(y) * along(x)).sum())(z) * along(x)).sum()
    )(x),
}
SMALL = [t.detach() for t in tensors(sizes=(2, 4, 2, 3, 4, 3, 2))]
LINEAR = [torch.randn(s, dtype=torch.float64) for s in ((2, 5), (4, 5), (4,), (5,), (5,))]


def attention_of_query(attention):
    _, k, v, bias, sinks = SMALL
    return lambda q: attention(q, k, v, bias=bias, sinks=sinks, softcap=2.0).sin().sum()


def attention_of_key(attention):
    q, _, v, _, _ = SMALL
    return lambda k: attention(q, k, v, causal="top_left").sin().sum()


FUNCTIONS = {
    "query": (attention_of_query, heddle.attention, lambda *t, **o: plain_attention(*t, **o)[0], SMALL[0]),
    "key": (attention_of_key, heddle.attention, lambda *t, **o: plain_attention(*t, **o)[0], SMALL[1]),
    "layer": (lambda f: lambda x: f(x, *LINEAR[1:]).sin().sum(), heddle.norm_linear, plain_norm_linear, LINEAR[0]),
    "gamma": (
        lambda f: lambda g: f(*LINEAR[:3], g, norm="rms").sin().sum(),
        heddle.norm_linear,
        plain_norm_linear,
        LINEAR[3],
    ),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(transform, function):
    make, ours, plain, x = FUNCTIONS[function]
    if transform.startswith(("vmap of", "grad of vmap")) and function == "gamma":
        with pytest.raises(NotImplementedError, match="vmap over gamma"):
            TRANSFORMS[transform](make(ours), x)
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "There is a performance drop")
        got = TRANSFORMS[transform](make(ours), x)
    want = TRANSFORMS[transform](make(plain), x)
    for a, b in zip(*((t,) if torch.is_tensor(t) else t for t in (got, want)), strict=True):
        assert torch.allclose(a, b, atol=1e-10) and b.abs().max() > 1e-3


@pytest.mark.parametrize("name", ["plain", "bias of one", "sinks", "lengths", "packed"])
def test_vmap_of_backward(name):
    """Each sample's gradients are its own, also where the backward operator sums over the batch."""
    q, k, v, bias, sinks = SMALL
    options = {"lengths": {"seqlens_k": int32(2, 4)}, "packed": {"cu_seqlens_q": int32(0, 1, 3)}}.get(name, {})
    more = (bias,) if name == "bias of one" else (sinks,) if name == "sinks" else ()
    if name == "packed":
        options |= {"cu_seqlens_k": int32(0, 2, 4), "max_seqlen_q": 3, "max_seqlen_k": 4}
        q, k, v = q[0].movedim(0, 1), k[0].movedim(0, 1), v[0].movedim(0, 1)
    leaves = [t.clone().requires_grad_() for t in (q, k, v, *more)]
    key = {"bias of one": "bias", "sinks": "sinks"}.get(name)
    out = heddle.attention(*leaves[:3], **options, **({key: leaves[3]} if key else {}))
    grads = torch.randn(3, *out.shape, dtype=out.dtype)
    got = torch.vmap(lambda g: torch.autograd.grad(out, leaves, g, retain_graph=True))(grads)
    want = [torch.autograd.grad(out, leaves, g, retain_graph=True) for g in grads]
    for a, b in zip(got, zip(*want, strict=True), strict=True):
        assert torch.allclose(a, torch.stack(b), atol=1e-12)


def test_what_is_hidden_may_be_nan():
    """And what is not is told of."""
    q, k, v, bias, sinks = tensors()
    mask = torch.ones(B, 1, SQ, SK, dtype=torch.bool)
    mask[:, :, :, 4] = mask[:, :, 3] = False

    def run(*leaves):
        q, k, v, bias, sinks = leaves
        return heddle.attention(q, k, v, bias=bias, sinks=sinks, mask=mask, causal="top_left", return_lse=True)

    want = second(run, (q, k, v, bias, sinks))
    for hidden in (math.nan, math.inf):
        with torch.no_grad():
            for t in (k, v):
                t[:, :, 4] = hidden
            q[:, :, 3] = hidden
            bias[..., 4] = hidden
        for got, was in zip(second(run, (q, k, v, bias, sinks)), want, strict=True):
            assert torch.equal(got, was)
    alone = torch.ones(4, dtype=torch.float64, requires_grad=True)
    for sinks_given, seen in ((None, False), (alone, True)):  # a gradient of lse that nobody but a sink looks at
        out, lse = heddle.attention(q, k, v, mask=mask, sinks=sinks_given, return_lse=True)
        dlse = torch.ones_like(lse).index_fill(2, torch.tensor(3), math.nan).requires_grad_()
        (dv,) = torch.autograd.grad((out.sin(), lse), v, (torch.ones_like(out), dlse), create_graph=True)
        assert not torch.autograd.grad(dv.sum(), q)[0][:, :, :3].isnan().any()
        if seen:
            out, lse = heddle.attention(q, k, v, mask=mask, sinks=sinks_given, return_lse=True)
            dsinks = torch.autograd.grad((out.sin(), lse), alone, (torch.ones_like(out), dlse), create_graph=True)[0]
            assert torch.autograd.grad(dsinks.sum(), alone)[0].isnan().all()
    with torch.no_grad():
        v[1, 1, 5, 0] = math.nan  # seen by the last query alone
    dq, dk, *_ = second(run, (q, k, v, bias, sinks))
    assert dq[1, 2:, 5].isnan().all() and not dq[1, :2].isnan().any() and not dq[1, :, :5].isnan().any()
    assert dk[1, 1, :4].isnan().all() and not dk[1, 0].isnan().any() and not dk[0].isnan().any()


class Largest(TorchDispatchMode):
    """The most elements that a tensor has."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for t in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(t, torch.Tensor):
                self.most = max(self.most, t.untyped_storage().nbytes() // t.element_size())
        return made


def test_memory_is_linear(monkeypatch):
    """No tensor of all scores; and what a derivative of third order keeps is linear, too."""
    monkeypatch.setattr(_tangents, "BLOCK", 1)
    monkeypatch.setattr(_tangents, "FEWEST", 32)
    s = 256
    q, k, v = (torch.randn(1, 1, s, 8, requires_grad=True) for _ in range(3))
    kept = []
    with Largest() as seen:
        second(lambda *t: heddle.attention(*t, causal=True), (q, k, v))
        func.jvp(lambda t: heddle.attention(t, k, v), (q,), (q,))
        func.jvp(func.grad(lambda t: heddle.attention(t, k, v).sin().sum()), (q,), (q,))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            first = torch.autograd.grad(heddle.attention(q, k, v).sin().sum(), (q, k, v), create_graph=True)
            again = torch.autograd.grad([t.sin().sum() for t in first], (q, k, v), create_graph=True)
        third = torch.autograd.grad([t.sin().sum() for t in again], (q, k, v))
    assert s * 8 <= seen.most < s * s / 4 and sum(kept) < 3 * s * s
    with monkeypatch.context() as whole:
        whole.setattr(_tangents, "BLOCK", s * s)
        first = torch.autograd.grad(heddle.attention(q, k, v).sin().sum(), (q, k, v), create_graph=True)
        again = torch.autograd.grad([t.sin().sum() for t in first], (q, k, v), create_graph=True)
        want = torch.autograd.grad([t.sin().sum() for t in again], (q, k, v))
    for a, b in zip(third, want, strict=True):
        assert (a - b).abs().max() < 1e-4 * b.abs().max()


def test_fourth_order(monkeypatch):
    monkeypatch.setattr(_tangents, "BLOCK", 1)
    monkeypatch.setattr(_tangents, "FEWEST", 2)
    q, k, v = (t.clone().requires_grad_() for t in SMALL[:3])

    def fourth(attention):
        made = attention(q, k, v).sin().sum()
        for _ in range(3):
            made = torch.autograd.grad(made, q, create_graph=True)[0].sin().sum()
        return torch.autograd.grad(made, (q, k, v))

    for a, b in zip(fourth(heddle.attention), fourth(lambda *t: plain_attention(*t)[0]), strict=True):
        assert torch.allclose(a, b, atol=1e-10)


def test_forward_mode_of_what_was_recorded_before():
    """The gradient that comes in has a tangent, the call had none."""
    q, k, v = (t.clone().requires_grad_() for t in SMALL[:3])
    for options in ({}, {"softcap": 2.0}):
        out = heddle.attention(q, k, v, **options)
        dout, change = torch.randn(2, *out.shape, dtype=out.dtype)
        with forward_ad.dual_level():
            (dq,) = torch.autograd.grad(out, q, forward_ad.make_dual(dout, change), retain_graph=True)
            tangent = forward_ad.unpack_dual(dq).tangent
        (want,) = torch.autograd.grad(out, q, change)
        assert torch.allclose(tangent, want, atol=1e-12)


def test_nothing_to_look_at():
    """No queries, no keys, no batch."""
    for sizes in ((2, 4, 2, 0, 4, 3, 2), (2, 4, 2, 3, 0, 3, 2), (0, 4, 2, 3, 4, 3, 2)):
        q, k, v, bias, sinks = tensors(sizes=sizes)
        made = second(
            lambda q, k, v, bias, sinks: heddle.attention(q, k, v, bias=bias, sinks=sinks, return_lse=True),
            (q, k, v, bias, sinks),
        )
        assert all(t is None or torch.isfinite(t).all() for t in made)
    assert torch.equal(heddle.attention(q, k, v), q.new_zeros(0, 4, 3, 2))


def test_what_has_no_derivative():
    q, k, v, *_ = SMALL
    slopes = torch.rand(4, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="alibi_slopes has a tangent"):
        func.jvp(lambda s: heddle.attention(q, k, v, alibi_slopes=s), (slopes,), (slopes,))
    with pytest.raises(NotImplementedError, match="alibi_slopes requires a gradient"):
        func.grad(lambda s: heddle.attention(q, k, v, alibi_slopes=s).sum())(slopes)


def test_compiled(transform="jvp"):
    """Where forward_ad.py does not know that forward mode is on."""
    torch._dynamo.reset()
    q, k, v = (t[:1].float() for t in SMALL[:3])

    def run(t):
        return TRANSFORMS[transform](lambda t: heddle.attention(t, k, v, causal="top_left").sin().sum(), t)

    for a, b in zip(torch.compile(run, fullgraph=True, backend="aot_eager")(q), run(q), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_hessian_of_a_small_model():
    """The Hessian of a block's loss by its parameters, by two ways, against the formulas'."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    given = {"w": torch.randn(12, 4), "gamma": torch.rand(4), "o": torch.randn(2, 4)}
    given = {name: t.double() for name, t in given.items()}

    def loss(norm_linear, attention):
        def of(p):
            heads = norm_linear(x, p["w"], None, p["gamma"], norm="rms").unflatten(-1, (6, 2)).transpose(1, 2)
            o = attention(*heads.split(2, 1), causal="top_left").transpose(1, 2).flatten(2)
            return (o @ p["o"].T).square().mean()

        return of

    want = func.hessian(loss(plain_norm_linear, lambda *t, **options: plain_attention(*t, **options)[0]))(given)
    ours = loss(heddle.norm_linear, heddle.attention)
    for got in (func.hessian(ours)(given), func.jacrev(func.jacrev(ours))(given)):
        for a in given:
            for b in given:
                assert torch.allclose(got[a][b], want[a][b], atol=1e-10) and want[a][b].abs().max() > 1e-4


# ------------------------------------------------------------------------------------- through what is built on top


def modules():
    """Of heddle.nn, small, in float64 and without dropout."""
    made = {
        "NormLinear": heddle.nn.NormLinear(6, 4, activation="gelu"),
        "SelfAttention": heddle.nn.SelfAttention(6, 2, norm="rms", causal=True),
        "TransformerBlock": heddle.nn.TransformerBlock(6, 2, hidden=8),
        "LlamaBlock": heddle.nn.LlamaBlock(8, 2, 1, hidden=8),
        "MultiheadAttention": heddle.nn.MultiheadAttention(6, 2, batch_first=True),
        "TransformerEncoderLayer": heddle.nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True, norm_first=True),
    }
    return {name: module.double() for name, module in made.items()}


@pytest.mark.parametrize("name", modules())
def test_second_derivatives_of_modules(name):
    """By the input and by every parameter."""
    torch.manual_seed(0)
    module = modules()[name]
    x = torch.randn(2, 3, 8 if name == "LlamaBlock" else 6, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*module.named_parameters(), strict=True)

    def run(x, *values):
        given = (x, x, x) if name == "MultiheadAttention" else (x,)
        made = func.functional_call(module, dict(zip(names, values, strict=True)), given)
        return made[0] if isinstance(made, tuple) else made

    gradgradcheck(run, (x, *parameters), fast_mode=True)


@pytest.mark.parametrize("mapped", ["queries", "tables"])
def test_vmap_of_flex_attention(mapped):
    """Also of the gradient by what was captured."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 5, 8), torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    tables = torch.randn(3, 4, 5)
    given = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 5, 5, device="cpu")

    def attend(q, table):
        return heddle.flex_attention(q, k, v, lambda s, b, h, i, j: s + table[h, j], given)

    if mapped == "queries":
        for _ in range(2):  # found out, and kept
            made = torch.vmap(lambda q: attend(q, tables[0]))(q)
            assert torch.allclose(made, torch.stack([attend(each, tables[0]) for each in q]), atol=1e-6)
        return

    def loss(q, table):
        return attend(q, table).square().sum()

    made = torch.vmap(func.grad(loss, 1))(q, tables)
    truth = torch.stack([func.grad(loss, 1)(each, table) for each, table in zip(q, tables, strict=True)])
    assert torch.allclose(made, truth, atol=1e-5) and truth.abs().max() > 0.01


def test_vmap_of_the_switch():
    attention = pytest.importorskip("torch.nn.attention")
    if not hasattr(attention, "activate_flash_attention_impl"):
        pytest.skip("torch has no switch")
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, 4, 5, 8) for _ in range(3))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    truth = sdpa(*(t.double() for t in (q, k, v)), is_causal=True)
    attention.activate_flash_attention_impl("heddle")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch has no rule of its own for its flash operator
            made = torch.vmap(lambda q, k, v: sdpa(q, k, v, is_causal=True))(q, k, v)
    finally:
        attention.restore_flash_attention_impl()
    assert torch.allclose(made.double(), truth, atol=1e-5)
