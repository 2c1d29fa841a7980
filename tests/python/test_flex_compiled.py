# SPDX-License-Identifier: Apache-2.0
"""heddle.flex_attention within torch.compile(fullgraph=True): what comes out, and what the graph has of it."""

from __future__ import annotations

import math
import os

import pytest
import torch
from conftest import devices
from flex_help import MASKS, SCORES, SK, SQ, H, block_mask, captured, eager, flex, lists, problem  # noqa: F401

import heddle

long = pytest.mark.skipif(not os.environ.get("HEDDLE_LONG"), reason="for --long")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def on(device, *tensors):
    return [t.detach().to(device).requires_grad_(t.requires_grad) for t in tensors]


def compiled(function, graphs=None, **options):
    """function as one graph; the calls of heddle's operator in it go to `graphs`."""

    def backend(graph, _):
        for node in graph.graph.nodes:
            if node.op == "call_function" and "heddle.attention" in str(node.target):
                names = [argument.name for argument in torch.ops.heddle.attention.default._schema.arguments]
                graphs.append(dict(zip(names, node.args, strict=False)) | dict(node.kwargs))
        return graph.forward

    return torch.compile(function, fullgraph=True, **({"backend": backend} if graphs is not None else options))


def compare(score, mask, device, **options):
    """Results and gradients, those of captured tensors too, are the ones outside of torch.compile."""
    leaves = on(device, *problem(torch.float32))
    used = dict(zip(captured(), on(device, *captured(torch.float32).values()), strict=True))
    score_mod = SCORES[score](used) if score else None
    given = mask and flex.create_block_mask(MASKS[mask](used), 2, H, SQ, SK, device=device, BLOCK_SIZE=16)
    learned = [t for t in used.values() if t.requires_grad]

    def attend(q, k, v):
        return heddle.flex_attention(q * 1, k, v, score_mod, given, enable_gqa=True, return_lse=True)

    results = []
    for run in (attend, compiled(attend, **options)):
        out, lse = run(*leaves)
        loss = out.square().sum() + lse.masked_fill(lse == -math.inf, 0).sum()
        results.append([out, lse, *torch.autograd.grad(loss, [*leaves, *learned], allow_unused=True)])
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (torch.allclose(a, b, rtol=1e-4, atol=1e-5) and b.abs().max() > 0)


FORMS = [("t5", None), ("alibi with a gradient", "window"), ("either of two", "documents"), ("masked_fill", "prefix")]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("score,mask", FORMS)
def test_forms(score, mask, device):
    compare(score, mask, device, backend="eager")


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=long)])
def test_both_passes_as_graphs(dynamic, device):
    """What is added is part of the graph, with its gradient."""
    compare("all of them", "window", device, backend="aot_eager", dynamic=dynamic)


@long
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("score", SCORES)
def test_all_scores(score, device):
    compare(score, "window", device, backend="inductor")


# ------------------------------------------------------------------------------------------- what the graph has

TOLD = {
    "causal": ("softcap", "causal", {"causal": 1, "softcap": 3.0}),
    "documents": (None, "documents", {"causal": 1, "mask": ...}),
    "bottom right": (None, "bottom right", {"causal": 2}),
    "alibi": ("alibi", "causal", {"causal": 1, "alibi_slopes": ...}),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_heddle_is_told(name):
    """As outside: no mask where the kernels have an option."""
    score, mask, expected = TOLD[name]
    used, graphs = captured(torch.float32), []
    given = block_mask(MASKS[mask](used))
    score_mod = score and SCORES[score](used)
    leaves = [t.detach() for t in problem(torch.float32)]

    def attend(q, k, v):
        return heddle.flex_attention(q, k, v, score_mod, given, enable_gqa=True)

    assert torch.equal(compiled(attend, graphs)(*leaves), attend(*leaves))
    (told,) = graphs
    told = {k: v for k, v in told.items() if k not in ("q", "k", "v", "scale") and v not in (None, False, 0, -1)}
    assert {k: ... if k in ("mask", "bias", "alibi_slopes") else v for k, v in told.items()} == expected


def test_it_comes_again_where_a_function_changed():
    q, k, v = (t.detach() for t in problem(torch.float32, sk=SQ, hk=H))
    slopes, graphs, few = torch.rand(H), [], [0.5]
    width = 3  # the second time torch.compile takes such a number for a dynamic one

    def score_mod(s, b, h, i, j):
        return torch.where(~(i - j > width) & (h != width - 2), few[0] * s + slopes[h] * (i - j).abs(), -math.inf)

    def attend(q):
        return heddle.flex_attention(q, k, v, score_mod)

    run = compiled(attend, graphs)
    for _ in range(2):
        assert torch.allclose(run(q), attend(q), atol=1e-6)
    slopes.mul_(3)
    assert torch.allclose(run(q), attend(q), atol=1e-6) and len(graphs) == 1  # other numbers are no other graph
    width = 5
    assert torch.allclose(run(q), attend(q), atol=1e-6) and len(graphs) == 2
    few[0] = 0.25
    assert torch.allclose(run(q), attend(q), atol=1e-6) and len(graphs) == 3


def test_a_function_made_in_the_graph():
    """Around a tensor of the graph, whose gradient goes on."""
    q, k, v = problem(torch.float32, hk=H)
    weight = torch.randn(H, requires_grad=True)

    def attend(q, k, v):
        table = torch.outer(weight.exp(), torch.arange(SK, dtype=torch.float32) / SK)
        return heddle.flex_attention(q, k, v, lambda s, b, h, i, j: s + table[h, j])

    grads = [
        torch.autograd.grad(run(q, k, v).square().sum(), (q, weight))
        for run in (attend, compiled(attend, backend="eager"))
    ]
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, atol=1e-5) and a.abs().max() > 0.01


# ------------------------------------------------------------------------------------------------- block masks


@pytest.mark.parametrize("mask_mod", [None, lambda b, h, q, k: q >= k, lambda b, h, q, k: (q + k) % 2 == 0])
def test_lists_that_say_something_else_than_mask_mod(mask_mod):
    q, k, v = (t.detach() for t in problem(torch.float32))
    given = lists(3, mask_mod)

    def attend(q):
        return heddle.flex_attention(q, k, v, None, given, enable_gqa=True)

    assert torch.equal(compiled(attend, backend="eager")(q), attend(q))


def test_lists_that_say_something_else_later():
    """The graph goes by the first ones; what it could not serve is an error, not a wrong result."""
    q, k, v = (t.detach() for t in problem(torch.float32))

    def attend(given):
        return heddle.flex_attention(q, k, v, None, given, enable_gqa=True)

    def causal(b, h, i, j):
        return i >= j

    run, agreeing = compiled(attend, backend="eager"), block_mask(causal)
    assert torch.equal(run(agreeing), attend(agreeing))
    other = block_mask(causal)
    other.kv_num_blocks.sub_(1)  # a tile is left out
    with pytest.raises(RuntimeError, match="something else than its mask_mod"):
        run(other)


def test_a_block_mask_made_in_the_graph():
    q, k, v = (t.detach() for t in problem(torch.float32))
    graphs, documents = [], torch.arange(SK) // 9

    def attend(q):
        given = flex.create_block_mask(
            lambda b, h, i, j: (i >= j) & (documents[i] == documents[j]),
            None,
            None,
            SQ,
            SK,
            device="cpu",
            BLOCK_SIZE=16,
        )
        return heddle.flex_attention(q, k, v, None, given, enable_gqa=True)

    assert torch.equal(compiled(attend, graphs)(q), attend(q)) and graphs[0]["causal"] == 1


class Learned(torch.nn.Module):
    def __init__(self, given):
        super().__init__()
        self.given, self.table = given, torch.nn.Parameter(torch.randn(H, SK))

    def forward(self, q, k, v):
        return heddle.flex_attention(q, k, v, lambda s, b, h, i, j: s + self.table[h, j], self.given, enable_gqa=True)


def test_export():
    """What is added is computed of the program's parameter, and causal is the kernels' own."""
    q, k, v = (t.detach() for t in problem(torch.float32))
    given = block_mask(lambda b, h, i, j: i >= j)
    module = Learned(given)
    program = torch.export.export(module, (q, k, v))
    assert torch.allclose(program.module()(q, k, v), module(q, k, v), atol=1e-6)
    changed = program.module()
    with torch.no_grad():
        changed.table.mul_(2)
        module.table.mul_(2)
    assert torch.allclose(changed(q, k, v), module(q, k, v), atol=1e-6)
    (call,) = [node for node in program.graph.nodes if "heddle.attention" in str(node.target)]
    assert call.args[4] is None and 1 in call.args  # no mask, but the corner


# ---------------------------------------------------------------------------------------------------- refusals

TABLE = torch.randn(H, SQ, SK)


@pytest.mark.parametrize(
    "text,score_mod",
    [
        ("the operation sigmoid of a score", lambda s, b, h, q, k: torch.sigmoid(s)),
        ("shape .* that has no index", lambda s, b, h, q, k: s + TABLE),
        ("the operation abs of a score", lambda s, b, h, q, k: s + abs(s)),  # Dynamo's own abs
    ],
)
def test_what_is_not_understood_is_named(text, score_mod):
    q, k, v = (t.detach() for t in problem(torch.float32))

    def attend(q):
        return heddle.flex_attention(q, k, v, score_mod, enable_gqa=True)

    with pytest.raises(Exception, match=f"does not understand .*{text}"):
        compiled(attend, backend="eager")(q)
    torch._dynamo.reset()
    with pytest.raises(NotImplementedError, match=f"does not understand .*{text}"):  # where the graph may break
        torch.compile(attend, backend="eager")(q)
