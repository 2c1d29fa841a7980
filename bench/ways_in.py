#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What each way into heddle costs the host over the direct call, heddle.attention or heddle.norm_linear of the same
tensors with the same options, for problems with nothing to compute.

    ./dev bench --cpu ways-in          # builds the package first; python bench/ways_in.py where it is installed
        [--device cpu|cuda] [--rounds N] [--only TEXT] [--json FILE] [--check]

Each way and its direct call run in turn, in bursts of 100; microseconds of the processor a call (on a GPU of the clock),
with gradients recorded where the name says so. "over" is the difference of their lower quartiles,
"theirs" what PyTorch's or JAX's own takes for the same. --check ends with 1
where a way that can takes more than 2 over its direct call. Ways whose module is not installed are named as left out.
"""
import argparse
import importlib
import importlib.util
import json
import statistics
import time

import torch
import torch.nn.functional as F

import heddle

BURST = 100
ALLOWED = 2.0  # microseconds over the direct call

# Ways that do more than to call heddle; docs/python-cost.md says what. They are measured and not held to ALLOWED.
MORE = {
    "PyTorch's switch, varlen_attn": "PyTorch's own custom operator around its flash attention",
    "compiled flex_attention": "what Dynamo guards, and the lists of a BlockMask, which are compared at each call",
    "nn.MultiheadAttention": "a module and its checks",
    "nn.SelfAttention": "a module and its checks",
    "jax": "JAX's own dispatch; the direct call is a program that adds 1",
}


def flex_rows(q, k, v, device):
    from torch.nn.attention.flex_attention import and_masks, create_block_mask

    n = q.shape[2]
    slopes, table = torch.full((q.shape[1],), 0.5, device=device), torch.randn(n, n, device=device)
    learned = table.clone().requires_grad_()
    documents = torch.zeros(n, dtype=torch.long, device=device)

    def causal(b, h, i, j):
        return i >= j

    def capped(s, b, h, i, j):
        return 30 * torch.tanh(s / 30)

    def alibi(s, b, h, i, j):
        return s + slopes[h] * (j - i)

    def added(s, b, h, i, j):
        return s + table[i, j]

    def taught(s, b, h, i, j):
        return s + learned[i, j]

    of_documents = and_masks(causal, lambda b, h, i, j: documents[i] == documents[j])
    made = {mod: create_block_mask(mod, None, None, n, n, device=device) for mod in (causal, of_documents)}
    at = torch.arange(n, device=device)[:, None], torch.arange(n, device=device)
    bias, mask = table[None, None].to(q.dtype), torch.ones(1, 1, n, n, dtype=torch.bool, device=device)

    def attend(score_mod, mask_mod=None):
        block_mask = mask_mod and made[mask_mod]
        return lambda: heddle.flex_attention(q, k, v, score_mod, block_mask)

    def direct(**options):
        return lambda: heddle.attention(q, k, v, **options)

    def compiled(call):
        return torch.compile(call, fullgraph=True)

    corner = {"causal": "top_left"}
    return {
        "compiled flex_attention, softcap": (compiled(attend(capped)), compiled(direct(softcap=30.0))),
        "compiled flex_attention, a function made for each call": (
            compiled(lambda: heddle.flex_attention(q, k, v, lambda s, b, h, i, j: s + slopes[h] * (i - j).abs())),
            compiled(direct(alibi_slopes=-slopes)),
        ),
        "compiled flex_attention, causal": (compiled(attend(None, causal)), compiled(direct(**corner))),
        "flex_attention, causal": (attend(None, causal), direct(**corner)),
        "flex_attention, softcap": (attend(capped), direct(softcap=30.0)),
        "flex_attention, softcap and causal": (attend(capped, causal), direct(softcap=30.0, **corner)),
        "flex_attention, ALiBi and causal": (attend(alibi, causal), direct(alibi_slopes=slopes, **corner)),
        "flex_attention, bias": (attend(added), direct(bias=bias)),
        "flex_attention, documents": (attend(None, of_documents), direct(mask=mask, **corner)),
        "flex_attention, a function made for each call": (
            lambda: heddle.flex_attention(q, k, v, lambda s, b, h, i, j: s + slopes[h] * (j - i), made[causal]),
            direct(alibi_slopes=slopes, **corner),
        ),
        "flex_attention, learned bias": (attend(taught), lambda: heddle.attention(q, k, v, bias=learned[at][None, None].to(q.dtype))),
    }


def function_rows(q, k, v, device):
    wanted = [t.clone().requires_grad_() for t in (q, k, v)]
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=device)
    flat = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    direct = {"plain": lambda: heddle.attention(q, k, v), "causal": lambda: heddle.attention(q, k, v, causal="top_left")}
    direct["lse"] = lambda: heddle.attention(q, k, v, return_lse=True)
    direct["mask"] = lambda: heddle.attention(q, k, v, mask=mask)
    direct["recording"] = lambda: heddle.attention(*wanted, causal="top_left")
    sdpa = heddle.scaled_dot_product_attention
    with heddle.patch():
        patched = F.scaled_dot_product_attention
    return {
        "torch.ops.heddle.attention": (lambda: torch.ops.heddle.attention(q, k, v), direct["lse"]),
        "scaled_dot_product_attention": (lambda: sdpa(q, k, v), direct["plain"]),
        "scaled_dot_product_attention, causal": (lambda: sdpa(q, k, v, is_causal=True), direct["causal"]),
        "scaled_dot_product_attention, mask": (lambda: sdpa(q, k, v, mask), direct["mask"]),
        "patch(), causal": (lambda: patched(q, k, v, is_causal=True), direct["causal"]),
        "patch(), mask": (lambda: patched(q, k, v, mask), direct["mask"]),
        "patch(), causal, recording": (lambda: patched(*wanted, is_causal=True), direct["recording"]),
        "flash_attn_func": (
            lambda: heddle.flash_attn_func(*flat, causal=True),
            lambda: heddle.attention(*(t.transpose(1, 2) for t in flat), causal="bottom_right").transpose(1, 2),
        ),
    }


def switch_rows(q, k, v, device):
    """PyTorch's own switch; it is on from here to the end, and what is called directly does not know of it."""
    from torch.nn.attention import activate_flash_attention_impl
    from torch.nn.attention.varlen import varlen_attn

    activate_flash_attention_impl("heddle")
    wanted = [t.clone().requires_grad_() for t in (q, k, v)]
    b, h, s, d = q.shape
    packed = [t.transpose(1, 2).reshape(b * s, h, d).to(torch.bfloat16) for t in (q, k, v)]
    ends = torch.arange(b + 1, dtype=torch.int32, device=device) * s
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": s, "max_seqlen_k": s}
    return {
        "PyTorch's switch, causal": (
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            lambda: heddle.attention(q, k, v, causal="top_left"),
        ),
        "PyTorch's switch, causal, recording": (
            lambda: F.scaled_dot_product_attention(*wanted, is_causal=True),
            lambda: heddle.attention(*wanted, causal="top_left"),
        ),
        "PyTorch's switch, varlen_attn": (
            lambda: varlen_attn(*packed, ends, ends, s, s),
            lambda: heddle.attention(*packed, **lengths),
        ),
    }


def module_rows(q, k, v, device):
    """Beside the same operations written out on tensors that are at hand, and for SelfAttention, whose projections are
    modules of PyTorch's, on those."""
    width, heads = 8, 2
    x = torch.randn(1, 1, width, device=device, dtype=q.dtype)
    norm = heddle.nn.NormLinear(width, width, device=device, dtype=q.dtype).requires_grad_(False)
    own = heddle.nn.SelfAttention(width, heads, device=device, dtype=q.dtype).requires_grad_(False)
    many = heddle.nn.MultiheadAttention(width, heads, batch_first=True, device=device, dtype=q.dtype).requires_grad_(False)
    theirs = torch.nn.MultiheadAttention(width, heads, batch_first=True, device=device, dtype=q.dtype).requires_grad_(False)
    theirs.eval()  # its fast path
    of_norm = norm.weight, norm.bias, norm.gamma, norm.beta

    def written_out(first, last):
        def run():
            # Divided before they are turned, so that one copy puts their gradients together.
            q, k, v = first(x).view(1, 1, 3 * heads, width // heads).chunk(3, 2)
            o = heddle.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
            return last(o.transpose(1, 2).flatten(2))

        return run

    return {
        "nn.NormLinear": (lambda: norm(x), lambda: heddle.norm_linear(x, *of_norm)),
        "nn.SelfAttention": (lambda: own(x), written_out(own.qkv, own.out), lambda: theirs(x, x, x, need_weights=False)),
        "nn.MultiheadAttention": (
            lambda: many(x, x, x, need_weights=False),
            written_out(
                lambda x, w=many.in_proj_weight, c=many.in_proj_bias: F.linear(x, w, c),
                lambda x, w=many.out_proj.weight, c=many.out_proj.bias: F.linear(x, w, c),
            ),
            lambda: theirs(x, x, x, need_weights=False),
        ),
    }


def transformers_rows(q, k, v, device):
    import heddle.hf

    class Layer(torch.nn.Module):
        is_causal, config = True, None

    layer, two = Layer(), [t.repeat(1, 1, 2, 1) for t in (q, k, v)]
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool, device=device)

    def attend(mask=None):
        return lambda: heddle.hf.attention_forward(layer, *two, mask, scaling=0.5)

    def direct(**options):
        return lambda: heddle.attention(*two, scale=0.5, **options).transpose(1, 2).contiguous()

    return {
        "transformers, causal": (attend(), direct(causal="top_left")),
        "transformers, mask": (attend(mask), direct(mask=mask)),
    }


def parallel_rows(q, k, v, device):
    """One process that has all of the sequence: what ContextParallel asks and tells, with nobody to wait for."""
    import torch.distributed as dist

    from heddle.parallel import ContextParallel

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    once, always = (
        ContextParallel(dist.group.WORLD, compare=compare, transport="messages") for compare in ("once", "always")
    )
    wanted = [t.clone().requires_grad_() for t in (q, k, v)]
    direct = lambda: heddle.attention(q, k, v, causal="top_left")
    return {
        "parallel, one process": (lambda: once.attention(q, k, v, causal=True), direct),
        "parallel, one process, compared at each call": (lambda: always.attention(q, k, v, causal=True), direct),
        "parallel, one process, recording": (
            lambda: once.attention(*wanted, causal=True),
            lambda: heddle.attention(*wanted, causal="top_left"),
        ),
    }


def jax_rows(q, k, v, device):
    import jax

    import heddle.jax

    on = jax.devices("gpu" if device == "cuda" else "cpu")[0]
    x = jax.device_put(jax.numpy.ones(q.shape, jax.numpy.float32), on)
    attend, nothing = jax.jit(heddle.jax.attention), jax.jit(lambda q, k, v: q + 1)
    return {"jax, in jax.jit": (lambda: attend(x, x, x), lambda: nothing(x, x, x))}


GROUPS = {
    "torch": function_rows,
    "torch.nn.attention.flex_attention": flex_rows,
    "torch.nn": module_rows,
    "transformers": transformers_rows,
    "torch.distributed": parallel_rows,
    "jax": jax_rows,
    "torch.nn.attention.varlen": switch_rows,
}


def burst(call, clock):
    start = clock()
    for _ in range(BURST):
        call()
    return (clock() - start) / BURST * 1e6


def rows_of(device, only):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(1, 1, 1, 8, device=device, dtype=dtype) for _ in range(3))
    rows = {}
    for needs, make in GROUPS.items():
        if importlib.util.find_spec(needs.partition(".")[0]) is None:
            print(f"left out without {needs}: its ways")
            continue
        try:
            importlib.import_module(needs)
            rows |= {name: calls for name, calls in make(q, k, v, device).items() if only in name}
        except ImportError as error:
            print(f"left out: {needs}: {error}")
    return rows


def measure(rows, device, rounds):
    """Of each row the microseconds of its calls, round by round."""
    clock = time.thread_time if device == "cpu" else time.perf_counter
    took = {name: [[] for _ in calls] for name, calls in rows.items()}
    for round_ in range(rounds + 1):  # the first one traces and compiles
        for name, calls in rows.items():
            for call, times in zip(calls, took[name]):
                if device == "cuda":
                    torch.cuda.synchronize()
                us = burst(call, clock)
                if round_:
                    times.append(us)
    return took


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments.add_argument("--rounds", type=int, default=60)
    arguments.add_argument("--only", default="", help="the ways with this in their names")
    arguments.add_argument("--json", help="append a line for each way to this file")
    arguments.add_argument("--check", action="store_true")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    took = measure(rows_of(given.device, given.only), given.device, given.rounds)
    print(f"torch {torch.__version__}, {given.device}, microseconds a call\n{'over':>8} {'least':>8} {'direct':>8} {'theirs':>8}")
    too_much = []
    for name, (way, direct, *theirs) in took.items():
        over = statistics.quantiles(way)[0] - statistics.quantiles(direct)[0]
        why = next((why for start, why in MORE.items() if name.startswith(start)), None)
        too_much += [name] if over > ALLOWED and why is None else []
        its = f"{min(theirs[0]):8.2f}" if theirs else " " * 8
        print(f"{over:8.2f} {min(way):8.2f} {min(direct):8.2f} {its}  {name}" + (f" ({why})" if why else ""), flush=True)
        if given.json:
            row = {"bench": "ways in", "device": given.device, "what": name, "over_us": round(over, 2),
                   "us": round(min(way), 2), "direct_us": round(min(direct), 2), "torch": torch.__version__}
            row |= {"theirs_us": round(min(theirs[0]), 2)} if theirs else {}
            with open(given.json, "a") as file:
                file.write(json.dumps(row) + "\n")
    if given.check and too_much:
        raise SystemExit(f"more than {ALLOWED} microseconds over the direct call: {', '.join(too_much)}")


if __name__ == "__main__":
    main()
