# SPDX-License-Identifier: Apache-2.0
"""heddle.replace of modules whose sizes, weights or eps heddle does not take: PyTorch computes them, now and later."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from test_nn_replace import E, S, shake
from test_nn_replace_pairs import is_one
from torch import nn

import heddle
from heddle.nn import TransformerEncoderLayer

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors", "ignore:Sparse CSR tensor support")


class Sum(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.body = nn.Sequential(*parts)

    def forward(self, x):
        return x + self.body(x)


class SumOfLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(E), nn.Linear(E, E)

    def forward(self, x):
        return self.linear(self.norm(x)) + x


def layer(norm_first, feedforward=24, eps=1e-5, **options):
    options = {"activation": "gelu", "norm_first": norm_first, "layer_norm_eps": eps, "batch_first": True, **options}
    return nn.TransformerEncoderLayer(E, 4, feedforward, 0.0, **options)


def replaced(model):
    was = copy.deepcopy(shake(model))
    return model, was, heddle.replace(model)


def agree(model, was, x, tolerance=1e-5):
    """Results, with gradients and without; or both refuse."""
    for grad in (False, True):
        given = [x.clone().requires_grad_(grad) for _ in range(2)]
        with torch.set_grad_enabled(grad):
            try:
                want = was(given[1])
            except (RuntimeError, TypeError):
                with pytest.raises((RuntimeError, TypeError, ValueError)):
                    model(given[0])
                return
            made = model(given[0])
        assert made.dtype == want.dtype and made.shape == want.shape and type(made) is type(want)
        assert torch.allclose(made, want, atol=tolerance, equal_nan=True)
    leaves = [[x, *(p for p in m.parameters() if p.requires_grad)] for m, x in zip((model, was), given, strict=True)]
    a, b = (torch.autograd.grad(y.sum(), of, allow_unused=True) for y, of in zip((made, want), leaves, strict=True))
    for got, true in zip(a, b, strict=True):
        assert got is true or torch.allclose(got, true, atol=10 * tolerance, equal_nan=True)


# ---------------------------------------------------------------------------------------------------------- no features

EMPTY = {
    "none in": (lambda: nn.Sequential(nn.Linear(0, 5), nn.GELU()), 0),
    "none out": (lambda: nn.Sequential(nn.LayerNorm(E), nn.Linear(E, 0)), E),
    "none out of GELU": (lambda: nn.Sequential(nn.RMSNorm(E), nn.Linear(E, 0), nn.GELU()), E),
    "none inside": (lambda: Sum(nn.LayerNorm(E), nn.Linear(E, 0), nn.SiLU(), nn.Linear(0, E)), E),
    "a sum with none": (lambda: Sum(nn.Linear(0, 0)), 0),
    "a layer": (lambda: layer(False, 0), E),
    "a pre-norm layer": (lambda: layer(True, 0), E),
}


@pytest.mark.parametrize("name", EMPTY)
def test_no_features(name):
    make, features = EMPTY[name]
    model, was, done = replaced(make())
    for lead in ((2, 3), (0, 3)):
        agree(model, was, torch.randn(*lead, features))
    assert "with the Linear" not in str(done)


def test_a_linear_of_no_features_is_told():
    _, _, done = replaced(nn.Sequential(nn.LayerNorm(E), nn.Linear(E, 0)))
    assert done.left == {"0": f"its Linear is from {E} features to 0"}


# ------------------------------------------------------------------------------------------------------------------ eps


@pytest.mark.parametrize(
    "eps", [-1e-3, -1, float("nan"), float("inf"), -float("inf"), True, 0, 1, np.float64(0.1), 1e60]
)
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("tail", [(), (nn.GELU(),)], ids=["", "with GELU"])
def test_eps(norm, later, eps, tail):
    """Where it is none for heddle, the norm is left alone; set later, it runs as PyTorch's."""
    model = nn.Sequential(norm(E), nn.Linear(E, E), *tail)
    if not later:
        model[0].eps = eps
    model, was, done = replaced(model)
    model[0].eps = was[0].eps = eps
    agree(model, was, torch.randn(S, E))
    taken = not isinstance(eps, bool) and 0 <= eps < float("inf")
    assert ("0" in done.swapped) == (taken or later)
    if not (taken or later):
        assert done.left["0"] == f"its eps is {eps}" and type(model[0]) is norm
    if not tail:
        assert is_one(model) == taken


@pytest.mark.parametrize("eps", [torch.tensor(0.1), np.float32(0.1), None, "0.1"])
def test_eps_that_is_no_number(eps):
    model, was, _ = replaced(nn.Sequential(nn.LayerNorm(E), nn.Linear(E, E)))
    model[0].eps = was[0].eps = eps
    agree(model, was, torch.randn(S, E))


# --------------------------------------------------------------------------------------------- weights that come later


class Doubled(torch.Tensor):
    """Whose products are not those of its numbers."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        made = super().__torch_function__(function, types, args, kwargs)
        return 2 * made if function is nn.functional.linear else made


torch.manual_seed(3)
NUMBERS = torch.randn(E, E)
WEIGHTS = {
    "one row": {"weight": NUMBERS[:1], "bias": torch.ones(1)},
    "one row without a bias": {"weight": NUMBERS[:1], "bias": None},
    "fewer rows": {"weight": NUMBERS[:5], "bias": torch.ones(5)},
    "no rows": {"weight": NUMBERS[:0], "bias": None},
    "a vector": {"weight": NUMBERS[0], "bias": None},
    "sparse": {"weight": torch.Tensor.to_sparse_csr},
    "of a class of its own": {"weight": NUMBERS.as_subclass(Doubled)},
    "none": {"weight": None},
    "a bias of one number": {"bias": torch.ones(1)},
    "a bias without a size": {"bias": torch.tensor(0.5)},
    "a bias of two sizes": {"bias": torch.ones(1, E)},
    "a bias for each row": {"bias": torch.arange(S * E).reshape(S, E) / 10},
    "a bias of too many": {"bias": torch.ones(E + 1)},
}
MODELS = {
    "pair": lambda: nn.Sequential(nn.LayerNorm(E), nn.Linear(E, E)),
    "pair with GELU": lambda: nn.Sequential(nn.RMSNorm(E), nn.Linear(E, E), nn.GELU()),
    "Linear with SiLU": lambda: nn.Sequential(nn.Linear(E, E), nn.SiLU()),
    "sum with a pair": lambda: Sum(nn.LayerNorm(E), nn.Linear(E, E)),
    "pair in a sum": SumOfLinear,
}


def put(module, tensors):
    for name, value in tensors.items():
        if callable(value):
            value = nn.Parameter(value(NUMBERS), requires_grad=False)
        elif value is not None:
            value = nn.Parameter(value.clone())
        setattr(module, name, value)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", MODELS)
def test_weights_that_come_later(kind, weights):
    model, was, done = replaced(MODELS[kind]())
    assert done.swapped
    for each in (model, was):
        put(next(module for module in each.modules() if isinstance(module, nn.Linear)), WEIGHTS[weights])
    agree(model, was, torch.randn(S, E))


@pytest.mark.parametrize("weights", ["a bias of one number", "one row", "a vector"])
@pytest.mark.parametrize("kind", ["pair with GELU", "pair in a sum"])
def test_compiled(kind, weights):
    model, was, _ = replaced(MODELS[kind]())
    torch._dynamo.reset()
    compiled, x = torch.compile(model, fullgraph=True, backend="aot_eager"), torch.randn(S, E)
    agree(compiled, was, x)
    for each in (model, was):
        put(next(module for module in each.modules() if isinstance(module, nn.Linear)), WEIGHTS[weights])
    if (kind, weights) != ("pair in a sum", "a vector"):
        agree(compiled, was, x)


@pytest.mark.parametrize("vector", [torch.ones(1), torch.ones(E).as_subclass(Doubled), torch.ones(1, E), None])
def test_vectors_of_a_norm_that_come_later(vector):
    model, was, _ = replaced(nn.Sequential(nn.LayerNorm(E), nn.Linear(E, E)))
    put(model[0], {"weight": vector}), put(was[0], {"weight": vector})
    agree(model, was, torch.randn(S, E))


# ------------------------------------------------------------------------------------------------ PyTorch's own modules


def bias_of_one(m):
    put(m.linear1, {"bias": torch.ones(1)}), put(m.self_attn, {"in_proj_bias": torch.ones(1)})


def out_of_one_row(m):
    put(m.self_attn.out_proj, WEIGHTS["one row"])


def down_of_one_row(m):
    put(m.linear2, {"weight": torch.ones(1, 24), "bias": None})


def norm_of_rows(m):
    m.norm1 = nn.LayerNorm((S, E))


def norm_of_rows_without_weights(m):
    m.norm2 = nn.LayerNorm((S, E), elementwise_affine=False)


def negative_eps(m):
    m.norm1.eps = m.norm2.eps = -1e-3


def norms_in_float32(m):
    m.bfloat16(), m.norm1.float(), m.norm2.float()


CHANGES = [
    bias_of_one,
    out_of_one_row,
    down_of_one_row,
    norm_of_rows,
    norm_of_rows_without_weights,
    negative_eps,
    norms_in_float32,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("norm_first", [False, True])
def test_layers_that_change(norm_first, change):
    model, was, _ = replaced(layer(norm_first))
    assert type(model) is TransformerEncoderLayer
    change(model), change(was)
    x = torch.randn(2, S, E)
    if change is norms_in_float32:
        with torch.no_grad():
            assert (model(x.bfloat16()) - was(x.bfloat16())).abs().max() < 0.2
    else:
        agree(model, was, x)


@pytest.mark.parametrize("change", [norm_of_rows, norm_of_rows_without_weights, negative_eps])
def test_layers_that_are_left(change):
    model = layer(True)
    change(model)
    model, was, done = replaced(model)
    assert type(model) is nn.TransformerEncoderLayer and done.swapped.keys() == {"self_attn"}
    assert ("normalises [6, 16]" in done.left[""]) == (change is not negative_eps)
    assert ("eps is -0.001" in done.left[""]) == (change is negative_eps)
    agree(model, was, torch.randn(2, S, E))


@pytest.mark.parametrize("norm_first", [False, True])
def test_heads_that_are_too_wide(norm_first):
    """heddle.attention takes 512 features; what has more stays PyTorch's."""
    for width in (512, 514):
        wide = nn.ModuleList([nn.MultiheadAttention(width, 1, batch_first=True)])
        wide.append(nn.TransformerEncoderLayer(width, 1, 8, 0.0, norm_first=norm_first, batch_first=True))
        model, was, done = replaced(wide)
        assert ("0" in done.swapped) == ("1" in done.swapped) == (width == 512)
        x = torch.randn(2, 3, width)
        for a, b in ((model[0](x, x, x)[0], was[0](x, x, x)[0]), (model[1](x), was[1](x))):
            assert (a - b).abs().max() < 1e-4 * b.abs().max()
        if width > 512:
            assert done.left["0"] == "its heads have 514 features, more than 512"
            assert done.left["1"] == "1.self_attn: its heads have 514 features, more than 512"
