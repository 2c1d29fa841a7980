# SPDX-License-Identifier: Apache-2.0
"""Random calls of norm_linear and of heddle.nn's modules against PyTorch in float64
(fuzz_linear_help has the rules)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import ROUNDING
from fuzz_linear_help import BF16, F16, F32, F64, judge, laid_out, moved_by, sweep
from torch import nn

import heddle


@pytest.fixture(autouse=True)
def plain_layers():
    """PyTorch's own fast path takes every GELU for that by erf, gives other types under autocast, and refuses more."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


# ----------------------------------------------------------------------------------------------------- norm_linear

ACTS = {"gelu": F.gelu, "gelu_tanh": lambda u: F.gelu(u, approximate="tanh"), "silu": F.silu}
GATED = {"geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}


def plain_call(x, weight, bias=None, gamma=None, beta=None, residual=None, *, eps, norm, activation):
    shape = x.shape[-1:]
    z = x if norm == "none" else F.layer_norm(x, shape, eps=eps) if norm == "layer" else F.rms_norm(x, shape, eps=eps)
    z = z if gamma is None else z * gamma.to(z.dtype)
    z = z if beta is None else z + beta.to(z.dtype)
    y = F.linear(z, weight, bias)
    if activation in GATED:
        gate, up = y.chunk(2, -1)
        y = ACTS[GATED[activation]](gate) * up
    elif activation:
        y = ACTS[activation](y)
    return (y if residual is None else y + residual.to(y.dtype)), z


def drawn_call(rng, told, dtypes=(F32, F32, F32, BF16, F16, F64), small=False):
    """The tensors of a call by name, none of which requires a gradient yet, and its options."""
    dtype = rng.choice(dtypes)
    k = rng.choice((1, 2, 3, 8, 16, 33, 64, rng.randint(1, 100), 128 if small else 300))
    n = rng.choice((1, 2, 8, 17, 32, rng.randint(1, 90)))
    lead = [rng.choice((1, 2, 3, 5)) for _ in range(rng.randint(0, 4))]
    if rng.random() < 0.3 and not small:
        lead = [rng.choice((7, 8, 9, 40, 130))]
    if rng.random() < 0.05 and lead:
        lead[rng.randrange(len(lead))] = 0
    norm = rng.choice(("layer", "rms", "none"))
    activation = rng.choice((None, None, *ACTS, *GATED))
    rows = 2 * n if activation in GATED else n
    options = {"norm": norm, "activation": activation}
    if norm != "none" and rng.random() < 0.5:
        options["eps"] = rng.choice((1e-3, 1e-12, 0.5, 1e-6))
    shapes = {"x": (*lead, k), "weight": (rows, k)}
    shapes |= {name: shape for name, shape in (("bias", (rows,)), ("residual", (*lead, n))) if rng.random() < 0.5}
    if norm != "none":
        shapes |= {name: (k,) for name in ("gamma", "beta") if rng.random() < 0.5}
    tensors = {}
    spread, mean = rng.choice((1, 1, 0.1, 5)), rng.choice((0, 0, 2, 10))
    for name, shape in shapes.items():
        t = torch.randn(shape, dtype=F64)
        t = t * spread + mean if name == "x" else t / k**0.5 if name == "weight" else t + (name == "gamma")
        tensors[name] = t.to(dtype)
    if rng.random() < 0.1 and tensors["x"].numel():  # a row of no deviation
        tensors["x"].view(-1, k)[rng.randrange(tensors["x"].numel() // k)] = rng.choice((0.0, 1.5))
    elif options.get("eps") == 1e-12 and k > 4 and rng.random() < 0.5:
        options["eps"] = 0
    told.append(f"{dtype} {shapes} {options}, x {spread}, {mean}")
    return tensors, options


def derivatives(results, leaves, directions):
    """Of the results that have a direction, where anything has a gradient."""
    pairs = [(r, d) for r, d in zip(results, directions, strict=True) if d is not None and r.requires_grad]
    if not pairs or not leaves:
        return [None] * len(leaves)
    made, along = zip(*pairs, strict=True)
    along = [d.to(r.dtype) for r, d in pairs]
    return torch.autograd.grad(made, leaves, along, allow_unused=True, retain_graph=True)


def norm_linear_case(rng, told):
    tensors, options = drawn_call(rng, told)
    dtype = compute = tensors["x"].dtype
    if rng.random() < 0.05:  # of another type
        tensors[rng.choice(sorted(tensors))] = tensors["weight"].to(rng.choice((F32, BF16, F16, F64)))
    tensors = {
        name: laid_out(rng, t, told, name, *((0.5, ["over"]) if name in ("x", "residual") else (0.1,)))
        for name, t in tensors.items()
    }
    mode = rng.choice(("grad", "grad", "grad", "no_grad", "inference"))
    autocast = rng.choice((BF16, F16)) if rng.random() < 0.15 else None
    if autocast and dtype != F64:
        compute = autocast
    wanted = [name for name in tensors if mode == "grad" and rng.random() < 0.6]
    both = options["norm"] != "none" and rng.random() < 0.3
    prepares = rng.random() < 0.15 and not autocast
    told.append(f"{mode} autocast={autocast} gradients={wanted} return_norm={both} prepared={prepares}")
    leaves = {name: t.detach().requires_grad_(name in wanted) for name, t in tensors.items()}
    given = dict(options, return_norm=both)
    if prepares:
        of_weight = {name: leaves.get(name) for name in ("weight", "bias", "gamma", "beta")}
        given["prepared"] = heddle.norm_linear_prepare(
            **of_weight, norm=options["norm"], activation=options["activation"], return_norm=both
        )
    guard = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    cast = torch.autocast("cpu", autocast or BF16, enabled=autocast is not None)
    with guard(), cast:
        made = heddle.norm_linear(**leaves, **given)
        made = made if both else (made,)
        assert all(t.is_contiguous() for t in made)
    options = {"eps": 1e-5, **options}
    with guard():  # autocast casts all that norm_linear is given
        plain = plain_call(**{name: t.to(compute) for name, t in leaves.items()}, **options)[: 1 + both]
    exact = {name: t.detach().to(compute).double().requires_grad_(name in wanted) for name, t in tensors.items()}
    near = {name: moved_by(t.detach(), ROUNDING[compute]).requires_grad_(name in wanted) for name, t in exact.items()}
    with guard():
        truth, moved = (plain_call(**of, **options)[: 1 + both] for of in (exact, near))
    directions = [laid_out(rng, torch.randn(t.shape, dtype=F64).to(m.dtype)) for t, m in zip(truth, made, strict=True)]
    if both and rng.random() < 0.4:
        directions[rng.randrange(2)] = None
    names = ["y", "z"][: 1 + both] + [f"d{name}" for name in wanted]
    everything = [
        [*results, *derivatives(results, [of[name] for name in wanted], directions)]
        for results, of in ((made, leaves), (truth, exact), (plain, leaves), (moved, near))
    ]
    judge(names, *everything, ROUNDING[compute])
    assert made[0].requires_grad == plain[0].requires_grad, "requires_grad"


def transformed(kind, call, tensors, ways, samples, weights):
    """Second derivatives, forward mode or vmap of a call, by what has a way to go in."""
    names = list(ways)

    def of(given):
        made = call(**{**tensors, **given})
        return made if isinstance(made, tuple) else (made,)

    def weighed(given):
        return sum((r.flatten() * w[: r.numel()].to(r.dtype)).sum() for r, w in zip(of(given), weights, strict=False))

    given = {name: tensors[name] for name in names}
    if kind == "jvp":
        made, change = torch.func.jvp(of, (given,), (ways,))
        return [*made, *change]
    if kind == "jvp of grad":
        return [*torch.func.jvp(torch.func.grad(weighed), (given,), (ways,))[1].values()]
    if kind == "vmap":
        return [*torch.func.vmap(lambda mapped: of(mapped))(samples)]
    if kind == "vmap of grad":
        return [*torch.func.vmap(lambda mapped: torch.func.grad(weighed)({**given, **mapped}))(samples).values()]
    given = {name: t.clone().requires_grad_() for name, t in given.items()}
    first = torch.autograd.grad(weighed(given), [*given.values()], create_graph=True)
    total = sum((t * way).sum() for t, way in zip(first, ways.values(), strict=True))
    if not total.requires_grad:
        return [*first, *map(torch.zeros_like, first)]
    return [*first, *torch.autograd.grad(total, [*given.values()], allow_unused=True, materialize_grads=True)]


def transforms_case(rng, told):
    tensors, options = drawn_call(rng, told, (F64, F32), small=True)
    if not tensors["x"].numel() or (tensors["x"].shape[-1] < 3 and options["norm"] == "layer"):
        return
    dtype, both = tensors["x"].dtype, options["norm"] != "none" and rng.random() < 0.3
    kind = rng.choice(("double", "jvp", "vmap", "vmap of grad", "jvp of grad"))
    wanted = [name for name in tensors if rng.random() < 0.6] or ["x"]
    told.append(f"{kind} by {wanted} return_norm={both}")
    ways = {name: torch.randn_like(tensors[name]) for name in wanted}
    mapped = [name for name in ("x", "residual") if name in tensors and rng.random() < 0.7] or ["x"]
    samples = {name: torch.stack([tensors[name], torch.randn_like(tensors[name])]) for name in mapped}
    weights, full = torch.randn(2, 100000, dtype=dtype), {"eps": 1e-5, **options}

    def ours(**given):
        return heddle.norm_linear(**given, **options, return_norm=both)

    def theirs(**given):
        return plain_call(**given, **full)[: 1 + both]

    def near(t):
        return moved_by(t.double(), ROUNDING[dtype])

    made = [
        transformed(kind, call, *({name: to(t) for name, t in of.items()} for of in (tensors, ways, samples)), weights)
        for call, to in ((ours, torch.clone), (theirs, torch.Tensor.double), (theirs, torch.clone), (theirs, near))
    ]
    judge([f"{kind} {at}" for at in range(len(made[0]))], *made, ROUNDING[dtype], 32)


def test_norm_linear():
    sweep(400, norm_linear_case, 0.8)


def test_transforms():
    sweep(100, transforms_case, 0.8)


# ------------------------------------------------------------------------------------------------------- heddle.nn


def heads_of(x, count):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def normed(part, x):
    if isinstance(part, nn.Linear):
        return part(x)
    options = {"eps": part.eps, "norm": part.norm, "activation": part.activation}
    return plain_call(x, part.weight, part.bias, part.gamma, part.beta, **options)[0]


def plain_attention_of(a, x, mask, turn=lambda t: t):
    qkv = heads_of(normed(a.qkv, x), a.heads + 2 * a.kv_heads)
    q, k, v = qkv.split((a.heads, a.kv_heads, a.kv_heads), 1)
    shown = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
    shown = shown.tril() if a.causal else shown
    if a.window:
        shown = shown & ~shown.new_ones(shown.shape).tril(-1 - a.window[0])
    shown = shown if mask is None else shown & mask
    o = F.scaled_dot_product_attention(turn(q), turn(k), v, attn_mask=shown, enable_gqa=True)
    return a.out(o.transpose(1, 2).flatten(2))


def plain_block(block, x, mask=None):
    x = x + plain_attention_of(block.attention, x, mask)
    return x + block.down(normed(block.up, x))


def plain_llama(block, x, mask=None):
    cos, sin = (torch.cat((t, t), -1).to(x.dtype) for t in block.rotation(torch.arange(x.shape[1])))

    def turn(t):
        first, second = t.chunk(2, -1)
        return t * cos + torch.cat((-second, first), -1) * sin

    x = x + plain_attention_of(block, x, mask, turn)
    return x + block.down(normed(block.up, x))


def drawn_block(rng):
    """A module of heddle, and another of PyTorch's or a formula that takes heddle's."""
    kv, bias, norm = rng.choice((4, 2, 1)), rng.random() < 0.5, rng.choice(("layer", "rms"))
    kind = rng.choice(("NormLinear", "SelfAttention", "TransformerBlock", "LlamaBlock", "encoder", "multihead"))
    causal, window = rng.choice((None, "top_left", "bottom_right")), rng.choice((None, None, (2, None)))
    options = {"bias": bias, "causal": causal, "window": window}
    if kind == "NormLinear":
        norm = rng.choice(("layer", "rms", "none"))
        more = {"activation": rng.choice((None, *ACTS, *GATED)), "affine": rng.random() < 0.7}
        return heddle.nn.NormLinear(16, 12, bias, norm=norm, **more), normed
    if kind == "SelfAttention":
        made = heddle.nn.SelfAttention(16, 4, kv, norm=rng.choice((None, norm)), **options)
        return made, plain_attention_of
    if kind == "TransformerBlock":
        return heddle.nn.TransformerBlock(16, 4, kv, norm=norm, **options), plain_block
    if kind == "LlamaBlock":
        return heddle.nn.LlamaBlock(16, 4, kv, hidden=24, **options), plain_llama
    options = {"batch_first": rng.random() < 0.6, "bias": bias}
    if kind == "multihead":
        more = {"add_bias_kv": rng.random() < 0.2, "add_zero_attn": rng.random() < 0.2}
        return tuple(each(16, 4, **options, **more) for each in (heddle.nn.MultiheadAttention, nn.MultiheadAttention))
    options |= {
        "norm_first": rng.random() < 0.5,
        "activation": rng.choice((F.gelu, F.silu, torch.tanh, nn.GELU("tanh"))),
    }
    kinds = heddle.nn.TransformerEncoderLayer, nn.TransformerEncoderLayer
    return tuple(each(16, 4, 24, 0.0, **options) for each in kinds)


def with_masks(rng, told, module, x):
    """How a module is called: with masks that leave every query a key."""
    dtype, first = x.dtype, not getattr(getattr(module, "self_attn", module), "batch_first", True)
    b, s = (x.shape[1], x.shape[0]) if first else x.shape[:2]
    options = {}
    if isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer)):
        prefix = "" if isinstance(module, nn.MultiheadAttention) else "src_"
        hidden = torch.arange(s) >= torch.randint(1, s + 1, (b, 1))
        if rng.random() < 0.5:
            options[f"{prefix}key_padding_mask"] = hidden
        if rng.random() < 0.5:
            seen = torch.ones(s, s, dtype=torch.bool).tril() if rng.random() < 0.5 else torch.rand(s, s) < 0.7
            seen[:, 0] = True
            bias = torch.randn(s, s).masked_fill(~seen, float("-inf"))
            options[f"{prefix}mask" if prefix else "attn_mask"] = (
                ~seen if options or rng.random() < 0.5 else bias.to(dtype)
            )
        if not prefix:
            options["need_weights"] = rng.random() < 0.5
            if options["need_weights"]:
                options["average_attn_weights"] = rng.random() < 0.5
    elif not isinstance(module, heddle.nn.NormLinear) and rng.random() < 0.5:
        options["mask"] = torch.rand(s, s) < 0.7
        options["mask"] |= torch.eye(s, dtype=torch.bool)
    told.append(f"masks {[*options]}")
    return options


def modules_case(rng, told):
    ours, theirs = drawn_block(rng)
    dtype = rng.choice((F32, F32, F64, BF16, F16))
    with torch.no_grad():
        for p in ours.parameters():
            p.copy_(torch.randn(p.shape) * 0.3 + (p.dim() == 1) * 0.4)
    ours.to(dtype).train(rng.random() < 0.5)
    told.append(f"{ours} {dtype} training={ours.training}")
    is_formula = not isinstance(theirs, nn.Module)
    plain, best, near = (copy.deepcopy(ours if is_formula else theirs) for _ in range(3))
    for each in (plain, best, near):
        each.load_state_dict(ours.state_dict())
        each.to(dtype).train(ours.training)
    best.double(), near.double()
    cast = BF16 if dtype == F32 and rng.random() < 0.15 else None
    compute = cast or dtype
    x = torch.randn(rng.choice((1, 2, 3)), rng.choice((1, 2, 5, 9)), 16, dtype=F64).to(dtype)
    options = with_masks(rng, told, ours, x)
    x = laid_out(rng, x, told, "x")
    mode = rng.choice(("grad", "grad", "no_grad", "inference"))
    guard = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    keeps = isinstance(ours, heddle.nn.NormLinear)
    if keeps:
        ours.keep_prepared = rng.random() < 0.5
    told.append(f"{mode} autocast={cast} {tuple(x.shape)}")
    for turn in range(2 if keeps else 1):
        with torch.no_grad():
            for p, *others in zip(*(m.parameters() for m in (ours, plain, best, near)), strict=True):
                change = torch.randn(p.shape).to(p) * (0.1 if turn and rng.random() < 0.5 else 0)
                p += change
                for other in others:
                    other.copy_(p)
            for p in near.parameters():
                p.copy_(moved_by(p, ROUNDING[compute]))
        everything = []
        for module, own in ((ours, True), (best, False), (plain, False), (near, False)):
            to = F64 if module in (best, near) else dtype
            given = (moved_by(x.double(), ROUNDING[compute]) if module is near else x.to(to)).detach().requires_grad_()
            masks = {
                n: m.to(to) if isinstance(m, torch.Tensor) and m.is_floating_point() else m for n, m in options.items()
            }
            autocast = torch.autocast("cpu", cast or BF16, enabled=cast is not None and to != F64)
            with guard(), autocast:
                if is_formula and not own:
                    mask = {"mask": masks.get("mask")} if theirs is not normed else {}
                    made = theirs(module, given, **mask)
                else:
                    args = (given,) * 3 if isinstance(module, nn.MultiheadAttention) else (given,)
                    made = module(*args, **masks)
            made = [t for t in (made if isinstance(made, tuple) else (made,)) if t is not None]
            torch.manual_seed(turn)
            directions = [torch.randn(t.shape, dtype=F64) for t in made]
            leaves = [given, *module.parameters()] if mode == "grad" else []
            everything.append([*made, *derivatives(made, leaves, directions)])
        names = [f"result {at}" for at in range(len(made))] + ["dx", *(n for n, _ in ours.named_parameters())]
        judge(names[: len(everything[0])], *everything, ROUNDING[compute], 32, 1e-10)


def test_modules():
    sweep(150, modules_case, 0.9)
