# SPDX-License-Identifier: Apache-2.0
"""Every architecture of the transformers that is installed, with heddle against eager: right, or refused by name.

    python tests/python/compatibility.py [--only llama,t5] [--batches] [--jobs 2] [--json FILE] [--write [FOLDER]]

--write puts the table of this version into docs/architectures.md, with --batches into docs/compatibility.md; or into
the pages of that name in another folder.
Each architecture is run in a process of its own.
--batches: continuous batching (generate_batch) in place of all else, of a few architectures."""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import json
import os
import re
import select
import signal
import sys
import textwrap
import time
import traceback
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import small_models as small
import torch
import transformers

import heddle.hf

PAGES = Path(__file__).resolve().parents[2] / "docs"
SECONDS = 60
calls = []
blind = set()  # rows of the batch that have had a query of one token that sees no key


class Wrong(Exception):
    """heddle's result is not eager's."""


def count_calls():
    def note(q, mask):
        calls.append(1)
        if mask is not None and mask.dim() == 4 and q.shape[2] == 1:
            blind.update((~mask.any(-1)).flatten(1).any(1).nonzero().flatten().tolist())

    def counted(inner):
        def count(*args, **options):
            note(args[0] if args else options["query"], options.get("mask"))
            return inner(*args, **options)

        return count

    def counted_short(inner, mask=None):
        """Of the short ways, which may say that they are not gone; `mask`: which argument is the mask."""

        def count(*args):
            result = inner(*args)
            if result is not NotImplemented:
                note(args[0], None if mask is None else args[mask])
            return result

        return count

    heddle.hf.quick = counted_short(heddle.hf.quick)
    heddle.hf.quick_options = counted_short(heddle.hf.quick_options, 8)

    for place in (heddle.hf, heddle.hf._hf_models._hf_written_out):
        place.attention = counted(place.attention)
    heddle.scaled_dot_product_attention = counted(heddle.scaled_dot_product_attention)


def results(output):
    """{name: tensor} of the floating point results of a model."""
    found = {}
    for name in ("logits", "last_hidden_state", "encoder_last_hidden_state", "pooler_output", "text_embeds",
                 "image_embeds", "prediction_logits", "hidden_states"):  # fmt: skip
        value = getattr(output, name, None)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            found[name] = value
    return found or {k: v for k, v in output.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}


def compare(what, truth, eager, got):
    """The rule: no further from the truth than eager in the same type, four times, and a few roundings."""
    if got.shape != truth.shape:
        raise Wrong(f"{what}: shape {list(got.shape)}, not {list(truth.shape)}")
    truth, eager, got = (t.detach().double() for t in (truth, eager, got))
    size = truth.abs().max().item() if truth.numel() else 0.0
    error, usual = ((t - truth).abs().max().item() if t.numel() else 0.0 for t in (got, eager))
    if not error <= 4 * usual + 3e-5 * size:
        raise Wrong(f"{what}: off by {error / size if size else error:.2g} of the largest, eager by {usual / size:.1g}")


def forward(model, given):
    torch.manual_seed(3)
    return model(**given, return_dict=True)


def run(model, given, weights):
    """(results, gradients) of one call and the sum of its results, weighted."""
    dtype = next(model.parameters()).dtype
    given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in given.items()}
    model.zero_grad(set_to_none=True)
    found = results(forward(model, given))
    total = 0.0
    for name, value in found.items():
        seen = small.valid(name, value, given)
        found[name] = value.masked_fill(~seen, 0.0)
        if name not in weights:
            weights[name] = torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name)))
        total = total + (found[name] * weights[name].to(value.dtype)).sum()
    grads = {}
    if isinstance(total, torch.Tensor) and total.requires_grad:
        total.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found, grads


def exactly(exact, given, weights):
    """The results and gradients in float64, or None where the model has float32 in it."""
    try:
        truth, grads = run(exact, given, weights)
    except Exception:
        return None, None
    # float64's least number is -inf to a softmax in float32.
    return (truth, grads) if all(torch.isfinite(t).all() for t in [*truth.values(), *grads.values()]) else (None, None)


def rounded(model):
    """The same model with every weight off by about half a unit of its last place."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1 + torch.randn(weight.shape, generator=generator) * 2**-24)
    return other


def check_pass(what, eager, exact, ours, given):
    weights = {}
    try:
        plain, plain_grads = run(eager, given, weights)
    except Exception as error:
        return f"not in eager ({type(error).__name__})"
    got, grads = run(ours, given, weights)
    truth, true_grads = exactly(exact, given, weights)
    if truth is None:
        # Hard-wired to float32: eager's own error is then what a rounding of its weights makes of its results.
        truth, true_grads = plain, plain_grads
        plain, plain_grads = run(rounded(eager), given, weights)
    if not all(torch.isfinite(t).all() for t in truth.values()):
        return "eager is not finite"
    for name in truth:
        compare(f"{what}, {name}", truth[name], plain[name], got[name])
    if set(grads) != set(plain_grads):
        odd = sorted(set(grads) ^ set(plain_grads))
        raise Wrong(f"{what}: gradients of {odd[:2]} in one of the two only")
    largest = max((g.abs().max().item() for g in true_grads.values() if g.numel()), default=0.0)
    for name, truth_of in true_grads.items():
        both = (truth_of, plain_grads[name], grads[name])
        if truth_of.numel() and truth_of.abs().max().item() > 1e-3 * largest:
            compare(f"{what}, gradient of {name}", *both)
    return "right"


def check_attentions(eager, ours, given):
    def weights_of(model):
        torch.manual_seed(3)  # some models draw what they see
        output = model(**given, output_attentions=True, return_dict=True)
        found = {}
        for name in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
            value = getattr(output, name, None)
            found[name] = [t for t in value or () if isinstance(t, torch.Tensor)]
        return found

    with torch.no_grad():
        try:
            plain = weights_of(eager)
        except Exception as error:
            told = "output_attentions" in str(error)
            return "eager gives none" if told else f"not in eager ({type(error).__name__})"
        if not any(plain.values()):
            return "eager gives none"
        got = weights_of(ours)
    outcome = "right"
    for name, tensors in plain.items():
        if len(got[name]) != len(tensors):
            raise Wrong(f"output_attentions: {len(got[name])} {name}, eager {len(tensors)}")
        for want, have in zip(tensors, got[name], strict=True):
            if any("sinks" in n for n, _ in ours.named_parameters()) and (want.sum(-1) - 1).abs().max() < 1e-5:
                have = have / have.sum(-1, keepdim=True)
                outcome = "eager's leave out what the sinks take"
            if not torch.isfinite(want).all():  # rows that see no key
                outcome = "eager's are not all finite"
                want, have = (t.masked_fill(~torch.isfinite(want), 0.0) for t in (want, have))
            compare(f"output_attentions, {name}", want, want, have)
    return outcome


def check_generation(what, eager, ours, given, **options):
    options |= {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "num_beams": 1, "disable_compile": True,
                "return_dict_in_generate": True, "output_logits": True, "use_cache": True}  # fmt: skip
    outputs = []
    blind.clear()
    for model in (eager, ours):
        with torch.no_grad():
            try:
                torch.manual_seed(3)
                outputs.append(model.generate(**given, **options))
            except Exception as error:
                if model is eager:
                    return f"not in eager ({type(error).__name__})"
                raise
    seeing = [row for row in range(len(outputs[0].logits[0])) if row not in blind]
    for step, (want, have) in enumerate(zip(outputs[0].logits, outputs[1].logits, strict=True)):
        # Of a mask that hides all (T5Gemma cuts a short cache's at the wrong end) eager makes the mean of all values.
        want, have = want[seeing], have[seeing]
        compare(f"{what}, step {step}", want, want, have)
        if not torch.equal(want.argmax(-1), have.argmax(-1)):
            break  # a tie: what follows is another text
    if blind:
        return "right where queries see keys" if seeing else "no query sees keys"
    return "right"


def batches(model_type):
    """{class: {"batches": outcome}}: the text that continuous batching makes with heddle, and eager by itself."""
    found, reasons = small_model(model_type)
    if not found:
        return {"-": {"batches": f"cannot: {reasons[0]}"[:200]}}
    small.tell_memory(setattr)
    table = {}
    for kind, config, eager, _, refused in found:
        if refused or not kind.can_generate():
            table[kind.__name__] = {"batches": "refused" if refused else "no text"}
            continue
        own = copy.deepcopy(config)
        own._attn_implementation = "heddle"
        ours = kind(own).float().eval()
        ours.load_state_dict(eager.state_dict())
        calls.clear()
        table[kind.__name__] = {"batches": batches_of(eager, ours)}
    return table


def batches_of(eager, ours):
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 17], [20]]
    try:
        got = small.generate_batch(ours, prompts)
    except ValueError as error:
        return "refused by name" if "generate_batch" in str(error) else f"error: {error}"[:200]
    heddles = len(calls)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    want = []
    for prompt in prompts:
        with torch.no_grad():
            text = eager.generate(torch.tensor([prompt]), **options)
        want.append(text[0, len(prompt) :].tolist())
    if got == want:
        return "right" if heddles else "error: heddle was not called"
    eager.config._attn_implementation = "eager" if hasattr(transformers, "ContinuousBatchingConfig") else "eager_paged"
    own = small.generate_batch(eager, prompts)
    if not any(own):
        return "not in eager"
    return "as eager's batches, not as its generate" if got == own else f"WRONG: {got}, eager {want}"[:200]


def small_model(model_type):
    """(class, configuration) pairs that can be made and run with eager; else the reasons why not."""
    reasons, found = [], []
    for config in small.configurations(model_type):
        if isinstance(config, Exception):
            reasons.append(f"configuration: {type(config).__name__}: {config}")
            continue
        for kind, extra in small.classes(model_type, config):
            own = copy.deepcopy(config)
            for name, value in extra.items():
                setattr(own, name, value)
            try:
                refused = copy.deepcopy(own)
                refused._attn_implementation = "heddle"
                with torch.device("meta"):
                    model = kind(refused)
            except ValueError as error:
                if "heddle cannot serve it" in str(error):
                    found.append((kind, own, None, None, str(error)))
                    continue
                reasons.append(f"{type(error).__name__}: {error}")
                continue
            except Exception as error:
                if "heddle" in str(error):
                    raise KeyError(f"heddle: {error}") from error  # neither made nor refused
                reasons.append(f"{type(error).__name__}: {error}")
                continue
            if sum(p.numel() for p in model.parameters()) > small.LARGEST_MODEL:
                reasons.append("too large here")
                continue
            own._attn_implementation = "eager"
            try:
                torch.manual_seed(0)
                eager = kind(own).float().eval()
                small.randomise(eager)
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}")
                continue
            for number, given in enumerate(small.inputs(eager)):
                try:
                    with torch.no_grad():
                        if results(forward(eager, given)):
                            found.append((kind, own, eager, number, None))
                            break
                        reasons.append("no result to compare")
                except Exception as error:
                    reasons.append(f"{type(error).__name__}: {error}")
        if found:
            return found, reasons
    return found, reasons


def steps_of(kind, eager, exact, ours, number):
    """{name: what to do} of one model; number: which of the candidates for its inputs fits."""

    def given(padding):
        return list(small.inputs(eager, padding))[number]

    steps = {}
    for padding in ("none", "left", "right"):
        if padding == "none" or "attention_mask" in given(padding):
            name = f"padding {padding}"
            steps[name] = functools.partial(check_pass, name, eager, exact, ours, given(padding))
    steps["attentions"] = functools.partial(check_attentions, eager, ours, given("none"))
    if kind.can_generate() and "input_ids" in given("none"):
        for padding, cache in (("none", None), ("left", None), ("left", "static")):
            prompt = given(padding)
            prompt.pop("decoder_input_ids", None)
            extra = {"cache_implementation": cache} if cache else {}
            name = f"generation, padding {padding}" + (f", {cache}" if cache else "")
            steps[name] = functools.partial(check_generation, name, eager, ours, prompt, **extra)
    return steps


def check(model_type):
    """{class: {check: outcome}} of one architecture."""
    table = {}
    try:
        found, reasons = small_model(model_type)
    except KeyError as error:
        if "heddle" in str(error):
            raise
        found, reasons = [], [f"KeyError: {error}"]
    except Exception as error:
        found, reasons = [], [f"{type(error).__name__}: {error}"]
    if not found:
        reason = reasons[0] if reasons else "no model of this type in the registry"
        return {"-": {"made": "cannot: " + " ".join(reason.split())[:160]}}
    for kind, config, eager, number, refused in found:
        rows = table[kind.__name__] = {}
        if refused:
            rows["made"] = "refused: its attention cannot be served"
            continue
        own = copy.deepcopy(config)
        own._attn_implementation = "heddle"
        try:
            torch.manual_seed(0)
            ours = kind(own).float().eval()
            ours.load_state_dict(eager.state_dict())
            for (_, a), (_, b) in zip(eager.named_buffers(), ours.named_buffers(), strict=True):
                b.copy_(a)
            exact = copy.deepcopy(eager).double()
        except Exception as error:
            rows["made"] = f"error: {type(error).__name__}: {error}"
            continue
        steps = steps_of(kind, eager, exact, ours, number)
        calls.clear()
        for name, step in steps.items():
            try:
                rows[name] = step()
            except Wrong as error:
                rows[name] = f"WRONG: {error}"
            except NotImplementedError as error:
                rows[name] = f"refused: {error}"
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                rows[name] = f"error: {type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
            rows[name] = " ".join(rows[name].split())[:300]
        rows["calls"] = str(len(calls))
    return table


def verdict(table):
    """One word for an architecture."""
    outcomes = [o for rows in table.values() for n, o in rows.items() if n != "calls"]
    if any(o.startswith("WRONG") for o in outcomes):
        return "wrong"
    if any(o.startswith("error") for o in outcomes):
        return "error"
    if any("no model of this type" in o for o in outcomes):
        return "part of others"
    if any(o.startswith("cannot") for o in outcomes):
        return "cannot"
    if all(o.startswith("refused: its attention") for o in outcomes):
        return "refused"
    if all(o.startswith(("refused", "eager gives none", "not in eager")) for o in outcomes):
        return "refused for an argument"
    if any(o.startswith("refused") for o in outcomes):
        return "right, part refused"
    if all(rows.get("calls", "1") == "0" for rows in table.values()):
        return "no attention"
    return "right"


def child(model_type, pipe, check):
    try:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of the processor, however busy the machine is
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        table = check(model_type)
    except BaseException as error:
        table = {"-": {"made": f"error: {type(error).__name__}: {error}"}}
    os.write(pipe, json.dumps(table).encode())
    os._exit(0)


def run_all(model_types, jobs, check=check):
    """Yields (model type, table); a process for each, `jobs` at a time."""
    waiting, running = list(model_types), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            out, into = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(out)
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 1)
                os.dup2(null, 2)
                child(name, into, check)
            os.close(into)
            running[out] = (name, pid, [], time.time())
        ready, _, _ = select.select(list(running), [], [], 1.0)
        for out in ready:
            name, pid, parts, began = running[out]
            part = os.read(out, 1 << 16)
            if part:
                parts.append(part)
                continue
            os.close(out)
            ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            del running[out]
            text = b"".join(parts)
            yield name, json.loads(text) if text else {"-": {"made": why_none(ended)}}, time.time() - began


def why_none(ended):
    """What a child that has told nothing counts as: one that crashed is an error."""
    if ended in (-signal.SIGPROF, -signal.SIGKILL):  # its time is over, or its memory
        return f"cannot: it takes more than {SECONDS} s, or too much memory"
    return f"error: it ended with {ended}, and told nothing"


SHORT = {"padding none": "plain", "padding left": "left", "padding right": "right", "attentions": "weights",
         "generation, padding none": "text", "generation, padding left": "text-left",
         "generation, padding left, static": "text-static"}  # fmt: skip


def told(table):
    """(class, what is right, the rest) for each model of an architecture."""
    for kind, rows in table.items():
        good = [SHORT[n] for n, o in rows.items() if o == "right"]
        rest = [f"{SHORT.get(n, n)}: {o}" for n, o in rows.items() if n != "calls" and o != "right"]
        yield (
            kind,
            "all seven" if len(good) == len(SHORT) else " ".join(good),
            "; ".join(r.replace("|", "/")[:60] for r in rest),
        )


def section(done, missing):
    """The part of the page for this version of transformers."""
    words = {name: verdict(table) for name, table in done.items()}
    counts = {word: list(words.values()).count(word) for word in sorted(set(words.values()))}
    lines = [f"### transformers {transformers.__version__}, torch {torch.__version__}", ""]
    lines += ["| result | architectures |", "|---|---|", *(f"| {word} | {count} |" for word, count in counts.items())]
    lines += [f"| not run yet | {len(missing)} |"] if missing else []
    lines += ["", "| architecture | class | right | otherwise |", "|---|---|---|---|"]
    for name in sorted(n for n, word in words.items() if word not in ("refused", "cannot", "part of others")):
        lines += [f"| {name} | {kind} | {good} | {rest} |" for kind, good, rest in told(done[name])]
    lines += ["", "Refused when they are made, by their class:", ""]
    refused = sorted(n for n, word in words.items() if word == "refused")
    lines += textwrap.wrap(", ".join(refused) + ".", 116, break_on_hyphens=False)
    lines += ["", "Cannot be made here, with random weights and from the configuration alone:", ""]
    lines += ["| architecture | why |", "|---|---|"]
    for name in sorted(n for n, word in words.items() if word == "cannot"):
        why = next(o for rows in done[name].values() for o in rows.values() if o.startswith("cannot"))
        lines.append(f"| {name} | {why.removeprefix('cannot: ').replace('|', '/')[:90]} |")
    if missing:
        lines += ["", "Not run yet:", "", *textwrap.wrap(", ".join(missing) + ".", 116, break_on_hyphens=False)]
    return "\n".join(lines)


def write(place, done, missing):
    """Puts the section between its two marks, which are added at the end of the page if they are not there."""
    first, last = (f"<!-- {edge} of transformers {transformers.__version__} -->" for edge in ("begin", "end"))
    place /= "architectures.md"
    page = place.read_text()
    if first not in page:
        page = f"{page.rstrip()}\n\n{first}\n{last}\n"
    before, rest = page.split(first)
    place.write_text(f"{before}{first}\n\n{section(done, missing)}\n\n{last}{rest.split(last)[1]}")


# Plain decoders, windows, softcap, sinks, and what calls no registered implementation.
BATCHED = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "cohere2",
    "gpt2",
    "gptj",
    "bloom",
]


def batches_section(done):
    lines = [f"With transformers {transformers.__version__}:", "", "| architecture | class | text |", "|---|---|---|"]
    for name, table in done.items():
        lines += [f"| {name} | {kind} | {rows['batches'].replace('|', '/')[:90]} |" for kind, rows in table.items()]
    return "\n".join(lines)


def write_batches(place, done):
    """Puts that table between its two marks."""
    place /= "compatibility.md"
    first, last = (f"<!-- {edge} of continuous batching -->" for edge in ("begin", "end"))
    before, rest = place.read_text().split(first)
    place.write_text(f"{before}{first}\n\n{batches_section(done)}\n\n{last}{rest.split(last)[1]}")


def run_batches(names, jobs, place):
    done = {}
    for name, table, seconds in run_all(names, jobs, batches):
        done[name] = table
        print(f"{name}: {', '.join(rows.get('batches', str(rows)) for rows in table.values())} ({seconds:.1f} s)")
    done = {name: done[name] for name in names}
    if place:
        write_batches(place, done)
    outcomes = [str(rows) for table in done.values() for rows in table.values()]
    sys.exit(any("WRONG" in o or "error" in o for o in outcomes))


def architectures():
    return sorted(small.auto.CONFIG_MAPPING_NAMES)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="architectures, with commas")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="keep the results in this file, and do not repeat what is in it")
    parser.add_argument("--no-run", action="store_true", help="only what is in the file of --json")
    parser.add_argument("--batches", action="store_true", help="continuous batching, of a few architectures")
    words = "put the table into its page, of docs/ or of this folder"
    parser.add_argument("--write", nargs="?", type=Path, const=PAGES, metavar="FOLDER", help=words)
    options = parser.parse_args()
    heddle.hf.register()
    count_calls()
    for name in ("llama", "bert", "bart", "clip", "whisper", "llava"):  # what many share is imported once, here
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    names = [n for n in options.only.split(",") if n]
    if options.batches:
        run_batches(names or BATCHED, options.jobs, options.write)
    names = names or architectures()
    done = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    for name, table, seconds in run_all([n for n in names if n not in done and not options.no_run], options.jobs):
        done[name] = table
        word = verdict(table)
        print(f"{name}: {word} ({seconds:.1f} s)", flush=True)
        if word in ("wrong", "error", "cannot", "right, part refused", "refused for an argument"):
            for kind, rows in table.items():
                for step, outcome in rows.items():
                    if not re.match(r"right|eager|not in|\d", outcome):
                        print(f"    {kind}, {step}: {outcome}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(done, indent=1))
    if options.write:
        write(options.write, done, sorted(set(names) - set(done)))
    words = [verdict(done[n]) for n in names if n in done]
    print(transformers.__version__, {w: words.count(w) for w in sorted(set(words))})
    sys.exit(any(w in ("wrong", "error") for w in words))


if __name__ == "__main__":
    main()
