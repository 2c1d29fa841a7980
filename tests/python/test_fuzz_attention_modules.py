# SPDX-License-Identifier: Apache-2.0
"""Random calls of heddle.flex_attention, heddle.nn.MultiheadAttention and heddle.jax.attention against float64."""

from __future__ import annotations

import functools

import pytest
import torch
from fuzz_help import (
    BF16,
    F16,
    F32,
    F64,
    INF,
    compare,
    exactly,
    laid_out,
    leaf,
    masking,
    plain_attention,
    rarely,
    sweep,
    weighed,
)

import heddle

# ------------------------------------------------------------------------------------------------ heddle.flex_attention


def condition(rng, c, told, deep=0):
    """A condition on the indices, for functions that are called with numbers, symbols and tensors that broadcast."""
    if deep < 2 and rarely(rng, 0.4):
        one, two = condition(rng, c, told, deep + 1), condition(rng, c, told, deep + 1)
        told.append(how := rng.choice("&|~"))
        both = {
            "&": lambda b, h, q, k: one(b, h, q, k) & two(b, h, q, k),
            "|": lambda b, h, q, k: one(b, h, q, k) | two(b, h, q, k),
            "~": lambda b, h, q, k: ~one(b, h, q, k),
        }
        return both[how]
    n, m = rng.randrange(-9, 20), rng.randrange(1, 4)
    atoms = {
        "causal": lambda b, h, q, k: q >= k,
        f"q + {n} >= k": lambda b, h, q, k: q + n >= k,
        f"q - k < {n}": lambda b, h, q, k: q - k < n,
        f"{n} < q - k <= {n + 9}": lambda b, h, q, k: (q - k > n) & (q - k <= n + 9),
        f"|q - k| <= {m}": lambda b, h, q, k: (q - k).abs() <= m,
        f"(q + k) % {m} == 0": lambda b, h, q, k: (q + k) % m == 0,
        f"h != {m}": lambda b, h, q, k: h != m,
        f"b < {m}": lambda b, h, q, k: b < m,
        f"q // {m} == k // {m}": lambda b, h, q, k: q // m == k // m,
        "lengths": lambda b, h, q, k: k < c["lengths"][b],
        "documents": lambda b, h, q, k: c["documents"][q] == c["documents"][k],
        "allowed": lambda b, h, q, k: c["allowed"][q, k],
        "number": lambda b, h, q, k: k < q + c["number"],
    }
    told.append(name := rng.choice(list(atoms)))
    return atoms[name]


def scoring(rng, c, told, sk):
    """A score_mod of a factor, a softcap, terms and a condition, mostly in that order."""
    x, steps = rng.choice((0.5, -1.5, 3.0)), []
    caps = {f"cap {abs(x)}": lambda s, *i: torch.tanh(s / abs(x)) * abs(x), f"times {x}": lambda s, *i: x * s}
    terms = {
        "per head": lambda s, b, h, q, k: s + c["per_head"][h],
        "square": lambda s, b, h, q, k: s - c["square"][h, q, k] * x,
        "batched": lambda s, b, h, q, k: c["batched"][b, h, k] + s,
        "relative": lambda s, b, h, q, k: s + c["relative"][q - k + sk - 1],
        "alibi": lambda s, b, h, q, k: s - c["slopes"][h] * (q - k).abs(),
        "one-sided alibi": lambda s, b, h, q, k: s + c["slopes"][h] * (k - q),
        "learnt alibi": lambda s, b, h, q, k: s - c["per_head"][h] * (q - k).abs(),
        "number": lambda s, b, h, q, k: s + c["number"] * 0.1 * k,
        "index": lambda s, b, h, q, k: s - (q * 0.01 + h) / 2,
    }
    for kinds, most in ((caps, 2), (terms, 2)):
        for _ in range(rng.randrange(most + 1)):
            steps.append(rng.choice(list(kinds.items())))
    if rarely(rng, 0.3):
        told.append("score:")
        hides, kind, other = condition(rng, c, told), rng.randrange(3), rng.choice(list(terms.items()))
        hide = {
            0: lambda s, *i: torch.where(hides(*i), s, -INF),
            1: lambda s, *i: s.masked_fill(hides(*i), -INF),
            2: lambda s, *i: torch.where(hides(*i), s, other[1](s, *i)),
        }[kind]
        steps.append((f"hides {kind} {other[0] if kind == 2 else ''}", hide))
    if rarely(rng, 0.1):
        rng.shuffle(steps)
    told.append([name for name, _ in steps])
    return lambda s, b, h, q, k: functools.reduce(lambda s, step: step[1](s, b, h, q, k), steps, s)


def flex_case(rng, told):
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    dtype, b, hk = rng.choice((F32, F32, BF16, F16, F64)), rng.choice((1, 2, 3)), rng.choice((1, 2))
    h, sq, sk, d = hk * rng.choice((1, 2)), rng.choice((1, 5, 17, 33)), rng.choice((1, 5, 17, 40)), rng.choice((8, 16))
    sk = sq if rarely(rng, 0.4) else sk
    c = {"allowed": torch.rand(sq, sk) < 0.7, "documents": torch.arange(max(sq, sk)) // rng.randrange(1, 9)}
    c |= {"lengths": torch.randint(0, sk + 1, (b,)), "number": rng.randrange(5)}
    real = rng.choice((dtype, dtype, F32)) if dtype != F64 else dtype
    shapes = {"per_head": (h,), "square": (h, sq, sk), "batched": (b, h, sk), "relative": (sq + sk,)}
    learnt = {x: torch.randn(n, dtype=F64).to(real).requires_grad_(rarely(rng, 0.5)) for x, n in shapes.items()}
    c |= learnt | {"slopes": torch.rand(h).to(real)}
    told.append((b, h, hk, sq, sk, d, real, [x for x in learnt if learnt[x].requires_grad]))
    score = scoring(rng, c, told, sk) if rarely(rng, 0.7) else None
    told.append("mask:")
    mask = condition(rng, c, told) if rarely(rng, 0.6) else None
    options = {"enable_gqa": True} if h != hk or rarely(rng, 0.3) else {}
    options |= {"scale": rng.choice((0.3, 1, 2.0))} if rarely(rng, 0.3) else {}
    size, of_all = rng.choice((16, 128, (128, 64))), rarely(rng, 0.5)
    told += [options, size if mask else "no mask"]

    index = [torch.arange(n).view([-1 if x == at else 1 for x in range(4)]) for at, n in enumerate((b, h, sq, sk))]

    def block_mask():
        if mask is None:
            return None
        of = mask(*index).broadcast_to((b, h, sq, sk)) if of_all else mask(*index)
        sizes = [n if of.dim() == 4 and of.shape[x] > 1 else None for x, n in enumerate((b, h))]
        return flex.create_block_mask(mask, *sizes, sq, sk, device="cpu", BLOCK_SIZE=size)

    def plain(leaves):
        c.update({x: leaves[x] for x in learnt})
        before, c["slopes"] = (
            c["slopes"],
            c["slopes"].to(leaves["q"].dtype if real == dtype else leaves["relative"].dtype),
        )
        q, k, v = (leaves[x].repeat_interleave(h // leaves[x].shape[1], 1) for x in "qkv")
        scores = q @ k.mT * options.get("scale", d**-0.5)
        scores = score(scores, *index).expand(b, h, sq, sk) if score else scores
        seen = scores != -INF
        seen = seen & mask(*index) if mask else seen
        weights, lse = weighed(scores, seen)
        c["slopes"] = before
        return weights.to(v.dtype) @ v, lse

    def ours(leaves):
        c.update({x: leaves[x] for x in learnt})
        return heddle.flex_attention(*(leaves[x] for x in "qkv"), score, given, return_lse=True, **options)

    given = block_mask()
    for again in range(rng.choice((1, 1, 2, 3))):
        q, k, v = ((b, n, s, d) for n, s in ((h, sq), (hk, sk), (hk, sk)))
        leaves = {x: leaf(rng, told, x, n, dtype) for x, n in zip("qkv", (q, k, v), strict=True)}
        low = F32 if dtype == F64 else dtype  # indices times a number are float32
        compare(rng, ours, plain, leaves | {x: c[x] for x in learnt}, low)
        if not again:
            exact = exactly(leaves | {x: c[x] for x in learnt})
            exact = {x: t.detach() for x, t in exact.items()}
            its = plain(exact)
            c["slopes"], before = c["slopes"].double(), c["slopes"]
            with torch.no_grad():
                q, k, v = (exact[x] for x in "qkv")
                made = flex.flex_attention(q, k, v, score, given, return_lse=True, **options)
            c["slopes"] = before
            fine = torch.isfinite(its[1])  # PyTorch's formula and ours are one
            assert not fine.any() or (its[0] - made[0])[fine].abs().max() < 1e-5 * (1 + its[0].abs().max())
            c.update({x: leaves[x] for x in learnt if x in leaves} | {x: learnt[x] for x in learnt})
        change = rng.choice(("nothing", "in place", "another", "number", "table"))
        told.append(f"then {change}:")
        with torch.no_grad():
            for x in learnt:
                c[x] = learnt[x]
                if change == "in place":
                    c[x].mul_(-0.5)
                elif change == "another":
                    learnt[x] = c[x] = torch.randn_like(c[x]).requires_grad_(c[x].requires_grad)
            if change == "in place":
                c["slopes"].mul_(0.5)
            elif change == "number":
                c["number"] += 3
                given = block_mask()
            elif change == "table":
                c["allowed"].logical_not_()
                c["lengths"].fill_(sk // 2)
                given = block_mask()


def test_flex_attention(monkeypatch):
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    print(sweep(80, flex_case, 0.7))


# -------------------------------------------------------------------------------------- heddle.nn.MultiheadAttention


def multihead_case(rng, told):
    dtype = rng.choice((F32, F32, BF16, F16, F64))
    h, b, sq, sk = rng.choice((1, 2, 4)), rng.choice((1, 2, 3)), rng.choice((1, 2, 5, 17)), rng.choice((1, 2, 7, 33))
    e, self_attention, batched = h * rng.choice((4, 8, 16)), rarely(rng, 0.4), not rarely(rng, 0.15)
    sk = sq if self_attention else sk
    widths = {"kdim": rng.choice((None, e, 8)), "vdim": rng.choice((None, e, 12))} if rarely(rng, 0.3) else {}
    if self_attention:
        widths = {}
    made = {x: rarely(rng, share) for x, share in (("add_bias_kv", 0.2), ("add_zero_attn", 0.2), ("batch_first", 0.5))}
    made |= {"bias": not rarely(rng, 0.2)} | widths
    told.append((e, h, b if batched else "unbatched", sq, sk, made))
    theirs = torch.nn.MultiheadAttention(e, h, **made, dtype=F64)
    for t in theirs.parameters():
        torch.nn.init.normal_(t, std=t.shape[-1] ** -0.5)
    ours = heddle.nn.MultiheadAttention(e, h, **made, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    training = rarely(rng, 0.6)
    for module in (theirs, ours):
        module.train(training)
    for t in ours.parameters():
        t.requires_grad_(not rarely(rng, 0.1))
    masks = {}
    if rarely(rng, 0.4):
        hidden = torch.rand((b, sk) if batched else (sk,)) < 0.3
        masks["key_padding_mask"] = hidden
    if rarely(rng, 0.4):
        masks["attn_mask"] = torch.rand((sq, sk) if rarely(rng, 0.5) else ((b if batched else 1) * h, sq, sk)) < 0.3
    options = {"need_weights": rarely(rng, 0.5), "average_attn_weights": rarely(rng, 0.5)}
    if rarely(rng, 0.1) and not (made["add_bias_kv"] or made["add_zero_attn"]):  # which PyTorch's hint hides
        masks["attn_mask"], options["is_causal"] = torch.ones(sq, sk, dtype=torch.bool).triu(1), True
    floats = rng.choice(("both", "attn_mask", "key_padding_mask", ""))
    for name, hidden in masks.items():
        if not rarely(rng, 0.1):
            hidden[..., 0] = False  # PyTorch's rows without keys are NaN
        if floats in (name, "both"):
            numbers = 0.0 if "is_causal" in options else torch.randn(hidden.shape, dtype=F64)
            masks[name] = (torch.zeros(hidden.shape, dtype=F64) + numbers).to(dtype).masked_fill(hidden, -INF)
        masks[name] = laid_out(rng, masks[name], told, name) if "is_causal" not in options else masks[name]
    wants = rng.choice((0.0, 0.5, 1.0))
    n, first = (b,), made["batch_first"]
    sizes = [(*n, s) if first else (s, *n) for s in (sq, sk, sk)] if batched else [(s,) for s in (sq, sk, sk)]
    features = e, widths.get("kdim") or e, widths.get("vdim") or e
    names = ("query",) if self_attention else ("query", "key", "value")
    leaves = {
        name: leaf(rng, told, name, (*size, width), dtype, wants=wants)
        for name, size, width in zip(names, sizes, features, strict=False)
    }
    for name, mask in masks.items():
        if mask.is_floating_point() and "is_causal" not in options:
            leaves[name] = mask.detach().requires_grad_(rarely(rng, 0.4))
    told += [options, {x: t.dtype for x, t in masks.items()}, "train" if training else "eval"]

    def run(module, leaves):
        parameters = {x: t for x, t in leaves.items() if x.startswith("module.")}
        given = [leaves["query"]] * 3 if self_attention else [leaves[x] for x in names]
        dt = given[0].dtype
        all_of_them = {x: leaves.get(x, t.to(dt) if t.is_floating_point() else t) for x, t in masks.items()} | options
        if module is ours:
            return [t for t in ours(*given, **all_of_them) if t is not None]
        parameters = {x[len("module.") :]: t for x, t in parameters.items()}
        return [t for t in torch.func.functional_call(theirs, parameters, tuple(given), all_of_them) if t is not None]

    for _ in range(rng.choice((1, 1, 2))):
        everything = leaves | {f"module.{x}": t for x, t in ours.named_parameters()}
        compare(rng, lambda leaves: run(ours, leaves), lambda leaves: run(theirs, leaves), everything)
        told.append("again, moved:")
        with torch.no_grad():
            for t in ours.parameters():
                t.mul_(-0.7)


def test_multihead_attention():
    print(sweep(120, multihead_case, 0.95))


# ------------------------------------------------------------------------------------------------------ heddle.jax


def jax_case(rng, told):
    jax = pytest.importorskip("jax")
    dtype, b, hk = rng.choice((F32, BF16, F16)), rng.choice((1, 2)), rng.choice((1, 2))
    h, sq, sk, d = hk * rng.choice((1, 2)), rng.choice((1, 5)), rng.choice((1, 7, 40)), rng.choice((4, 8))
    options = {"causal": rng.choice((None, "top_left", "bottom_right"))}
    options |= {"softcap": 3.0} if rarely(rng, 0.3) else {}
    options |= {"window": rng.choice(((3, 2), (0, None), (-1, 1)))} if rarely(rng, 0.3) else {}
    options |= {"scale": rng.choice((0.3, 2.0))} if rarely(rng, 0.3) else {}
    p = {"sizes": (b, h, sq, sk), "dtype": dtype, "rows": [((0, sq), (0, sk))] * b, **options}
    told += [(b, h, hk, sq, sk, d), options]
    shapes = {"q": (b, h, sq, d), "k": (b, hk, sk, d), "v": (b, hk, sk, d)}
    leaves = {x: torch.randn(n).to(dtype).requires_grad_() for x, n in shapes.items()}
    if rarely(rng, 0.4):
        leaves["bias"] = masking(rng, told, "bias", [b, h, sq, sk], rng.choice((dtype, F32, BF16)), 1.0)
    if rarely(rng, 0.3):
        p["mask"] = masking(rng, told, "mask", [b, h, sq, sk], torch.bool)
    if rarely(rng, 0.3):
        leaves["sinks"] = torch.randn(h, requires_grad=True)

    def of_jax(t):
        return jax.numpy.asarray(t.detach().float().numpy() if t.dtype != torch.bool else t.numpy()).astype(
            str(t.dtype)[6:]
        )

    def of_torch(a, like):
        return torch.tensor(a.astype("float32").tolist(), dtype=like).reshape(a.shape)

    class Way(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *values):
            given = dict(zip(leaves, map(of_jax, values), strict=True))
            more = options | ({"mask": of_jax(p["mask"])} if "mask" in p else {})
            run = lambda given: heddle.jax.attention(**given, **more, return_lse=True)  # noqa: E731
            (out, lse), ctx.back = jax.vjp(jax.jit(run) if ctx_jit else run, given)
            ctx.kinds = [t.dtype for t in values]
            return of_torch(out, dtype), of_torch(lse, F32)

        @staticmethod
        def backward(ctx, dout, dlse):
            (made,) = ctx.back((of_jax(dout), of_jax(dlse)))
            return tuple(of_torch(made[x], kind) for x, kind in zip(leaves, ctx.kinds, strict=True))

    ctx_jit = rarely(rng, 0.2)
    compare(rng, lambda leaves: Way.apply(*leaves.values()), lambda leaves: plain_attention(leaves, p)[:2], leaves)


def test_jax_attention():
    print(sweep(15, jax_case, 0.9))
