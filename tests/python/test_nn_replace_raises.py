# SPDX-License-Identifier: Apache-2.0
"""heddle.replace of what it cannot rewrite, derive from or trace: it says so, raises nothing and leaves a model that
computes what it did."""

from __future__ import annotations

import collections.abc
import copy
import typing

import pytest
import torch
import torch.nn.functional as F
from test_nn_replace import E, S, shake
from torch import nn

import heddle
from heddle import _replace
from heddle._replace_pairs import NormedLinear, PassedLayerNorm

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.n, self.l, self.m = nn.LayerNorm(E), nn.Linear(E, E), nn.Linear(E, E)
        self.a, self.d = nn.GELU(), nn.Dropout(0.0)


def with_forward(forward, base=Parts):
    """A model of a new class, and the same as it was."""
    model = shake(type("Own", (base,), {"forward": forward})())
    return model, copy.deepcopy(model)


def agree(made, want):
    a, b = map(torch.utils._pytree.tree_leaves, (made, want))
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x is y or torch.allclose(x, y, atol=1e-5)
    assert [x is a[0] for x in a] == [y is b[0] for y in b]


def classes(model):
    return [type(module) for module in model.modules()]


# ------------------------------------------------------------------------------------------------------------ forwards


def same_twice(self, x):
    y = self.l(self.n(x))
    return y + y


def same_twice_dropped(self, x):
    y = self.d(self.l(x))
    return y + y


def same_twice_by_function(self, x):
    y = self.l(x)
    return torch.add(y, y)


def same_twice_by_method(self, x):
    y = self.l(x)
    return y.add(y)


def same_twice_weighted(self, x):
    y = self.l(x)
    return torch.add(y, y, alpha=2)


def sum_twice(self, x):
    y = self.l(x) + x
    return y + y


def sum_and_part(self, x):
    y = self.l(x)
    return (y + x) + y


def dropped_and_not(self, x):
    y = self.l(x)
    return self.d(y) + y


def tuple_of_one(self, x):
    y = self.l(x) + x
    return y, (y, x)


def tuple_of_both(self, x):
    y = self.l(x)
    return y, y + x


def tuple_of_activation(self, x):
    y = F.gelu(self.l(x))
    return y, y


def in_place(self, x):
    y = self.l(x)
    y += x
    return y


def out_of(self, x):
    y = self.l(x).float()
    return self.m(y).add(self.l(y)).add(1)


FORWARDS = {
    same_twice: ["LayerNorm"],
    same_twice_dropped: [],
    same_twice_by_function: [],
    same_twice_by_method: [],
    same_twice_weighted: [],
    sum_twice: ["a sum with l"],
    sum_and_part: [],
    dropped_and_not: [],
    tuple_of_one: ["a sum with l"],
    tuple_of_both: [],
    tuple_of_activation: ["gelu with l"],
    in_place: [],
    out_of: ["a sum with l"],
    lambda self, x: self.l(x) + self.l(x): ["a sum with l"],
    lambda self, x: self.l(self.l(x)) + x: ["a sum with l"],
    lambda self, x: self.d(self.d(self.l(x))) + x: ["a sum with l"],
    lambda self, x: self.a(self.a(self.l(x))) + x: ["gelu with l"],
    lambda self, x: self.l(x) + 1.5: [],
    lambda self, x: 2 + self.l(x): [],
    lambda self, x: torch.add(self.l(x), 1): [],
    lambda self, x: torch.add(x, self.l(x), alpha=3): [],
    lambda self, x: self.l(x).add(x.shape[0]): [],
    lambda self, x: self.l(x).add_(x): [],
    lambda self, x: self.l(input=x) + x: [],
    lambda self, x: x[0] + self.l(x): ["a sum with l"],
    lambda self, x: x + x: [],
}


@pytest.mark.parametrize("forward", FORWARDS)
def test_sums(forward):
    """Of one thing with itself, of what has other takers, and with numbers: in one where that is the same."""
    model, was = with_forward(forward)
    done = heddle.replace(model)
    assert [what.split(" with the")[0].split(" (")[0] for what in done.swapped.values()] == FORWARDS[forward], done
    for training in (True, False):
        model.train(training), was.train(training)
        x = torch.randn(S, E)
        agree(model(x), was(x))


def test_a_failure_leaves_no_half():
    """The adversary's: what raised left others behind that had been swapped before."""
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(E, 4), "twice": with_forward(same_twice)[0]})
    done = heddle.replace(model)
    assert done.swapped.keys() == {"attention", "twice.n"}
    assert type(model["twice"].n) is PassedLayerNorm and type(model["twice"].l) is NormedLinear


def test_what_torch_fx_cannot_write(monkeypatch):
    def fails(self):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(torch.fx.Graph, "lint", fails)
    model, was = with_forward(lambda self, x: x + self.l(self.n(x)))
    done = heddle.replace(model)
    assert done.left == {
        "": "activations and sums: torch.fx cannot rewrite its forward (RuntimeError: no such luck)"
    } and done.swapped.keys() == {"n"}
    agree(model(torch.ones(2, E)), was(torch.ones(2, E)))


@pytest.mark.parametrize("when", ["attentions", "trace", "fusions"])
def test_an_interrupt_changes_nothing(monkeypatch, when):
    step = getattr(_replace._Work, when)

    def fails(self, *args):
        step(self, *args)
        raise KeyboardInterrupt

    model = nn.Sequential(Parts(), nn.LayerNorm(E), nn.Linear(E, E), nn.GELU(), nn.MultiheadAttention(E, 4))
    model.append(nn.TransformerEncoder(nn.TransformerEncoderLayer(E, 4, batch_first=True), 1))
    before = [(type(module), dict(vars(module))) for module in model.modules()]
    with monkeypatch.context() as patch:
        patch.setattr(_replace._Work, when, fails)
        with pytest.raises(KeyboardInterrupt):
            heddle.replace(model)
    assert [(type(module), dict(vars(module))) for module in model.modules()] == before
    assert heddle.replace(model).swapped.keys() == {"1", "", "4", "5.layers.0"}


def annotated(kind):
    def forward(self, x: kind) -> kind:
        """What it does."""
        return x + self.l(self.n(x))

    forward.__annotations__ = {"x": kind, "return": kind}
    return forward


@pytest.mark.parametrize(
    "kind", [typing.Callable[[int], int], collections.abc.Callable[[int], int], "a b !", test_sums, typing.Literal['"']]
)
def test_annotations(kind):
    """Of which torch.fx cannot write all; they stay."""
    model, was = with_forward(annotated(kind))
    assert heddle.replace(model).swapped.keys() == {"n", ""}
    assert model.forward.__annotations__ == {"x": kind, "return": kind} and model.forward.__doc__ == "What it does."
    agree(model(torch.ones(2, E)), was(torch.ones(2, E)))


def test_forward_of_no_module():
    space = {}
    exec("def forward(this, self): return self + this.l(this.n(self))", space)
    assert space["forward"].__module__ is None
    model, was = with_forward(space["forward"])
    done = heddle.replace(model)
    assert done.left == {"": "activations and sums: its forward calls an argument self"} and "n" in done.swapped
    agree(model(torch.ones(2, E)), was(torch.ones(2, E)))


@pytest.mark.parametrize("forward", [torch.relu, None, lambda: 1, staticmethod(torch.tanh)])
def test_forward_without_a_signature(forward):
    model, _ = with_forward(forward)
    kinds = classes(model)
    done = heddle.replace(model)
    assert not done.swapped and done.left["n"] == "torch.fx cannot trace what calls it" and classes(model) == kinds


# ----------------------------------------------------------------------------------------- classes and trees of modules


class Named(Parts):
    def __init_subclass__(cls, *, name, **options):
        super().__init_subclass__(**options)


class Once(Parts):
    names: typing.ClassVar = set()

    def __init_subclass__(cls, **options):
        if cls.__name__ in Once.names:
            raise ValueError(f"there is a {cls.__name__}")
        Once.names.add(cls.__name__)


class Last(type):
    def __new__(cls, name, bases, attributes):
        if any(isinstance(base, Last) for base in bases):
            raise TypeError("the last of its kind")
        return super().__new__(cls, name, bases, attributes)


def sum_of_pair(self, x):
    return x + self.l(self.n(x))


def pair_alone(self, x, more=None):
    return self.l(self.n(x))


def sum_alone(self, x):
    return x + self.l(x)


@pytest.mark.parametrize("forward", [sum_of_pair, pair_alone, sum_alone])
@pytest.mark.parametrize("kind", ["Named", "Once", "Last"])
def test_classes_that_nothing_is_derived_from(kind, forward):
    Once.names.clear()
    own = {"forward": forward}
    made = {
        "Named": lambda: type("Own", (Named,), own, name="x"),
        "Once": lambda: type("Own", (Once,), own),
        "Last": lambda: Last("Own", (Parts,), own),
    }
    model = shake(nn.Sequential(nn.MultiheadAttention(E, 4), made[kind]()()))
    was = copy.deepcopy(model)
    kinds = classes(model)
    done = heddle.replace(model)
    assert done.swapped == {"0": "MultiheadAttention"} and classes(model)[2:] == kinds[2:]
    why = "its class cannot have another forward ("
    assert done.left["1"].startswith(why) and ("there is a Own" in done.left["1"]) == (kind == "Once")
    if forward is not sum_alone:
        assert done.left["1.n"].startswith("1, whose forward calls it: " + why)
    agree(model[1](torch.ones(2, E)), was[1](torch.ones(2, E)))


class Frozen(Parts):
    forward = sum_of_pair

    def __setattr__(self, name, value):
        if "d" in vars(self).get("_modules", ()):  # the last that is set
            raise AttributeError("nothing is set here")
        super().__setattr__(name, value)


def test_a_module_that_cannot_be_set():
    model = shake(nn.Sequential(Frozen()))
    was = copy.deepcopy(model)
    done = heddle.replace(model)
    assert not done.swapped and "nothing is set here" in done.left["0"]
    agree(model(torch.ones(2, E)), was(torch.ones(2, E)))


class Unready(Parts):
    """What it has is not a list of layers yet."""

    @property
    def layers(self):
        raise RuntimeError("not yet")

    forward = sum_of_pair


def test_attributes_that_raise():
    model = shake(Unready())
    assert heddle.replace(model).swapped.keys() == {"n", ""}


@pytest.mark.parametrize("part", ["norm1", "norm2", "linear1", "linear2", "self_attn"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_layers_without_a_part(part, norm_first, own):
    class Layer(nn.TransformerEncoderLayer):
        forward = sum_alone

    for kind, remove in ((nn.TransformerEncoderLayer, False), (nn.TransformerEncoderLayer, True), (Layer, True)):
        kind = heddle.nn.TransformerEncoderLayer if own and kind is not Layer else kind
        layer = kind(E, 4, 24, norm_first=norm_first)
        delattr(layer, part) if remove else setattr(layer, part, None)
        done = heddle.replace(nn.Sequential(layer))
        if not own and norm_first and kind is not Layer:
            assert done.left["0"] == f"0.{part}: it is of class NoneType"


def test_a_part_that_holds_what_holds_it():
    model = shake(nn.Sequential(nn.LayerNorm(E), nn.Linear(E, E)))
    was, x = copy.deepcopy(model), torch.randn(S, E)
    model[1].around = model
    done = heddle.replace(model)
    assert "0" in done.swapped or "0" in done.left
    agree(model(x), was(x))


# ------------------------------------------------------------------------------------------- what a trace leaves behind


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_scripted_parts(traced, training):
    part = nn.Sequential(nn.Linear(E, E), nn.Dropout(0.5)).train(training)
    part = torch.jit.trace(part, torch.ones(2, E), check_trace=False) if traced else torch.jit.script(part)
    model = nn.Sequential(nn.LayerNorm(E), nn.Linear(E, E), part).train(training)
    x = torch.randn(S, E)
    torch.manual_seed(1)
    want = model(x)
    assert heddle.replace(model).swapped.keys() == {"0"}
    assert all(module.training == training for module in model.modules())
    torch.manual_seed(1)
    agree(model(x), want)


class Counting(Parts):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return self.l(self.n(x)) * self.calls


def test_buffers_are_as_they_were():
    model = shake(Counting())
    calls = model.calls
    assert "n" in heddle.replace(model).swapped
    assert model.calls is calls and calls == 0
    model(torch.ones(2, E))
    assert model.calls == 1


# -------------------------------------------------------------------------------------- names that lead elsewhere later

torch.manual_seed(2)
NEW = shake(nn.Linear(E, E))


class Given(nn.Module):
    def forward(self, x, more):
        return x if more is None else x * more


class Places(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.list = nn.Linear(E, E), nn.Sequential(nn.Linear(E, E), nn.Linear(E, E))
        self.other, self.scale = self.one, nn.Parameter(torch.ones(E))
        self.scales, self.same = nn.ParameterList([nn.Parameter(torch.ones(E))]), self.scale
        self.register_parameter("none", None)
        self.body = Given()


LATER = {
    "another name": (lambda self, x: x + self.other(x), lambda m: setattr(m, "other", NEW), "2 times (one, other)"),
    "the last of a list": (lambda self, x: x + self.list[-1](x), lambda m: m.list.append(NEW), "a part (list.1)"),
    "a parameter": (
        lambda self, x: x * self.same + self.list(x),
        lambda m: setattr(m, "same", nn.Parameter(torch.full((E,), 3.0))),
        "2 times (scale, same)",
    ),
    "a parameter of a list": (
        lambda self, x: x * self.scales[-1] + self.list(x),
        lambda m: m.scales.append(nn.Parameter(torch.full((E,), 3.0))),
        "a part (scales.0)",
    ),
    "what was None": (
        lambda self, x: x + self.list(self.body(x, self.none)),
        lambda m: setattr(m, "none", nn.Parameter(torch.full((E,), 3.0))),
        "reads none",
    ),
}


@pytest.mark.parametrize("name", LATER)
def test_what_a_name_leads_to_later(name):
    """A graph knows a part by one name: a forward that comes to it by another is not written anew."""
    forward, change, why = LATER[name]
    model, was = with_forward(forward, Places)
    done = heddle.replace(model)
    x = torch.randn(S, E)
    before = was(x)
    agree(model(x), before)
    change(model), change(was)
    agree(model(x), was(x))
    assert not torch.allclose(was(x), before) and not done.swapped and why in done.left[""]


# --------------------------------------------------------------------------------- what docs/python.md says is not seen


@pytest.mark.parametrize("kind", [nn.Linear, nn.LayerNorm, None])
def test_a_forward_of_a_class_that_is_set_later(monkeypatch, kind):
    model, was = with_forward(sum_of_pair)
    assert heddle.replace(model).swapped.keys() == {"n", ""}
    kind = kind or type(was)
    forward, x = kind.forward, torch.randn(S, E)
    want = model(x)
    monkeypatch.setattr(kind, "forward", lambda self, x: 2 * forward(self, x))
    agree(model(x), want)
    assert not torch.allclose(was(x), want)


def test_quantisation_before_and_after():
    quantised = pytest.importorskip("torch.ao.quantization").quantize_dynamic
    if torch.backends.quantized.engine == "none":
        pytest.skip("this torch cannot quantise")
    model, was = with_forward(lambda self, x: x + self.m(self.a(self.l(self.n(x)))))
    first, x = quantised(was, {nn.Linear}), torch.randn(S, E)
    heddle.replace(model)
    later = quantised(model, {nn.Linear})
    assert type(later.l) is NormedLinear and type(later.m) is type(first.m) is type(first.l)
    now = copy.deepcopy(first)
    done = heddle.replace(now)
    assert done.left["n"] == "what takes its result is of class Linear"
    with torch.no_grad():
        agree(now(x), first(x))
        assert (later(x) - was(x)).abs().max() < 0.2


def test_scripted_afterwards():
    model, _ = with_forward(sum_of_pair)
    heddle.replace(model)
    with pytest.raises((RuntimeError, ValueError)):
        torch.jit.script(model)
