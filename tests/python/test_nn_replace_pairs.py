# SPDX-License-Identifier: Apache-2.0
"""A norm and its Linear that heddle.replace has joined: what changes afterwards is seen by the next call, and what
computes in another mode is left alone. Everything is compared with the model as it was, to which the same was done."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
import torch.utils.checkpoint
from test_nn_replace import E, S, shake
from torch import nn

import heddle
from heddle._replace_pairs import NormedLinear, PassedLayerNorm, Unnormed
from heddle.nn import TransformerEncoderLayer

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


class Block(nn.Module):
    """A pair over two modules, with what a flag changes in it."""

    flag = None

    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.norm, self.inner, self.other = norm(E), nn.Sequential(nn.Linear(E, E), nn.Tanh()), nn.Linear(E, E)

    def forward(self, x):
        y = self.norm(x)
        return self.inner(y) if self.flag is None else self.flag(self, x, y)


def pair():
    return nn.Sequential(nn.LayerNorm(E), nn.Linear(E, E))


def both_of(make, **options):
    """A model that is on heddle, and the same as it was."""
    model = shake(make(**options))
    was = copy.deepcopy(model)
    done = heddle.replace(model)
    assert "LayerNorm with the Linear" in str(done), done
    assert is_one(model)
    return model, was


def is_one(model):
    """Whether its norm runs in its Linear."""
    with torch.profiler.profile() as profile:
        model(torch.randn(2, E))
    used = {event.key for event in profile.key_averages()}
    return "heddle::norm_linear" in used and not used & {"aten::native_layer_norm", "aten::linear"}


# ----------------------------------------------------------------------------------------------------------- its modes


class Mode(nn.Module):
    """A norm in a mode of its own, or everything in it."""

    def __init__(self, mode, all_of_it=False):
        super().__init__()
        self.norm, self.lin = nn.LayerNorm(E), nn.Linear(E, E)
        self.mode, self.all_of_it = mode, all_of_it

    def forward(self, x):
        with self.mode():
            y = self.norm(x)
            if self.all_of_it:
                return self.lin(y)
        return self.lin(y)


class Leaves(Mode):
    """Without a context."""

    def forward(self, x):
        y = self.norm(x)
        torch.set_grad_enabled(False)
        made = self.lin(y)
        torch.set_grad_enabled(True)
        return made


MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "enable_grad": torch.enable_grad,
    "inference_mode(False)": lambda: torch.inference_mode(False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast of another dtype": lambda: torch.autocast("cpu", torch.float16),
    "autocast(enabled=False)": lambda: torch.autocast("cpu", enabled=False),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_norm_in_a_mode_of_its_own(mode):
    """Whatever mode replace() is called in."""
    for around in (torch.enable_grad, torch.no_grad, MODES["autocast"], MODES["autocast of another dtype"]):
        model = shake(Mode(MODES[mode]))
        with around():
            done = heddle.replace(model)
        assert done.left == {"norm": "lin, which takes its result, runs in another mode (torch.no_grad(), autocast)"}
        assert type(model.norm) is nn.LayerNorm and type(model) is Mode
    model = shake(Mode(MODES[mode], all_of_it=True))  # and there both may be one
    assert heddle.replace(model).swapped.keys() == {"norm"}


def test_a_mode_without_a_context():
    assert "another mode" in heddle.replace(shake(Leaves(None))).left["norm"]


def test_no_gradient_where_there_was_none():
    model = shake(Mode(torch.no_grad))
    heddle.replace(model)
    x = torch.randn(S, E, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is None and model.norm.weight.grad is None and model.lin.weight.grad is not None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("around", ["no_grad", "enable_grad", "autocast", "autocast of another dtype"])
def test_a_mode_that_is_entered_later(mode, around):
    """The trace has seen none; the call does, and computes the norm in it."""
    model, was = both_of(Block)

    def frozen(self, x, y):
        with MODES[mode]():
            y = self.norm(x)
        return self.inner(y.float() if y.is_inference() is torch.is_inference_mode_enabled() else y.clone().float())

    model.flag = was.flag = frozen
    x = torch.randn(S, E, requires_grad=True)
    with MODES[around]():
        made, want = model(x), was(x)
    assert made.dtype == want.dtype and made.requires_grad == want.requires_grad
    assert torch.allclose(made, want, atol=0.1 if "autocast" in mode + around else 1e-5)
    if made.requires_grad and "autocast" not in mode + around:
        grads = ([t.grad for t in (x, *m.parameters())] for m in (model, was) if m(x).sum().backward() is None)
        for a, b in zip(*grads, strict=True):
            assert (a is None) == (b is None) and (a is None or torch.allclose(a, b, atol=1e-4))


# -------------------------------------------------------------------------------------------------------- what changes


def hook_norm(m):
    m.seen = []
    m[0].register_forward_hook(lambda module, given, made: m.seen.append((given[0] + 0, made + 0)))


def hook_linear(m):
    m.seen = []
    m[1].register_forward_pre_hook(lambda module, given: m.seen.append((given[0] + 0,)))


def own_forward(at):
    def change(m):
        forward = m[at].forward
        m[at].forward = lambda x: 2 * forward(x)

    return change


def swap(m):
    m[0], m[1] = m[1], m[0]


def in_a_module(m):
    m[1] = nn.Sequential(nn.Tanh(), m[1])


def taken_twice(m):
    m.append(m[0])


def compiled_alone(m):
    m[0].compile(backend="eager")


torch.manual_seed(1)
NEW = shake(nn.ModuleList((nn.Linear(E, 3), nn.LayerNorm(E), nn.RMSNorm(E), nn.LayerNorm(E, eps=0.5))))
CHANGES = {
    "another head": lambda m: m.__setitem__(1, NEW[0]),
    "another norm": lambda m: m.__setitem__(0, NEW[1]),
    "a RMSNorm": lambda m: m.__setitem__(0, NEW[2]),
    "no norm": lambda m: m.__setitem__(0, nn.Identity()),
    "one between": lambda m: m.insert(1, nn.Tanh()),
    "one in front": lambda m: m.insert(0, nn.Tanh()),
    "one behind": lambda m: m.append(nn.Tanh()),
    "without the norm": lambda m: m.__delitem__(0),
    "without the Linear": lambda m: m.__delitem__(1),
    "the norm alone": lambda m: m[:1],
    "the Linear alone": lambda m: m[1:],
    "another way round": swap,
    "the Linear in a module": in_a_module,
    "the norm again": taken_twice,
    "parts of another": lambda m: nn.Sequential(m[0], nn.Tanh(), m[1]),
    "one by one": lambda m: lambda x: m[1](torch.tanh(m[0](x))),
    "a hook of the norm": hook_norm,
    "a hook of the Linear": hook_linear,
    "a forward of the norm": own_forward(0),
    "a forward of the Linear": own_forward(1),
    "a copy of the norm": lambda m: copy.deepcopy(m[0]),
    "a pickle of the norm": lambda m: pickle.loads(pickle.dumps(m[0])),
    "a copy of the Linear": lambda m: copy.deepcopy(m[1]),
    "the norm compiled": compiled_alone,
    "a parametrised weight": lambda m: torch.nn.utils.parametrizations.weight_norm(m[1]) and None,
    "another weight": lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(E))),
    "another eps": lambda m: setattr(m[0], "eps", 0.5),
    "a frozen norm": lambda m: m[0].requires_grad_(False) and None,
    "double": lambda m: m.double() and None,
}
PICKLES = {name for name in CHANGES if not name.startswith(("a ", "one by"))} - {"the norm compiled"}
STAYS_ONE = {"one behind", "another eps", "another weight", "a frozen norm", "double"}


def agree(got, want):
    """Lists of tensors, and of None where nothing depends on one."""
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a is b is None or (a.dtype == b.dtype and torch.allclose(a, b, atol=1e-4))


def leaves_of(made):
    return [each for each in torch.utils._pytree.tree_leaves(made) if isinstance(each, (torch.Tensor, Unnormed))]


def gradients(model, made, x):
    """Of x, and of all parameters that want one."""
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    loss = sum(each.sin().sum() for each in made)
    return torch.autograd.grad(loss, [x, *(p for p in parameters if p.requires_grad)], allow_unused=True)


def same(model, was, x, run=None):
    made, want = leaves_of((model if run is None else run)(x)), leaves_of(was(x))
    assert {type(each) for each in made} == {torch.Tensor}
    agree(made, want)
    agree(gradients(model, made, x), gradients(was, want, x))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("tail", [(), (nn.GELU(),)], ids=["", "with GELU"])
def test_what_changes_afterwards(change, tail):
    model, was = both_of(lambda: pair().extend(tail))
    x = 3 * torch.randn(S, E, dtype=torch.float64 if change == "double" else torch.float32, requires_grad=True)
    made, want = (CHANGES[change](m) or m for m in (model, was))
    for training in (True, False):
        same(made, want, x)
        model.train(training), was.train(training)
    if isinstance(made, nn.Module) and not (hasattr(model, "seen") or change.startswith("a forward")):
        for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)) if change in PICKLES else made):
            same(other, want, x)
    if hasattr(model, "seen"):
        assert len(model.seen) == len(was.seen) > 0
        for a, b in zip(model.seen, was.seen, strict=True):
            assert all(torch.allclose(*each, atol=1e-5) for each in zip(a, b, strict=True))
    if change in STAYS_ONE and change != "double":
        assert is_one(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "norm", NEW[3]),
        lambda m: setattr(m.inner, "0", NEW[0]),
        lambda m: setattr(m, "inner", nn.Sequential(m.inner[0], nn.ReLU())),
        lambda m: setattr(m, "inner", nn.Sequential(nn.Tanh(), m.inner)),
        lambda m: m.inner.insert(0, nn.Tanh()),
        lambda m: setattr(m, "inner", m.other),
        lambda m: m.norm.register_forward_hook(lambda module, given, made: 2 * made),
        lambda m: m.inner.register_forward_pre_hook(lambda module, given: 2 * given[0]),
        lambda m: m.inner[0].register_forward_pre_hook(lambda module, given: (2 * given[0],)),
        lambda m: m.norm.register_forward_pre_hook(lambda module, given: (given[0].tanh(),)),
    ],
)
def test_what_changes_in_a_block(change):
    for compiled in (False, True):
        model, was = both_of(Block)
        change(model), change(was)
        x = torch.randn(S, E, requires_grad=True)
        torch._dynamo.reset()
        y = (torch.compile(model, backend="aot_eager") if compiled else model)(x)
        assert torch.allclose(y, was(x), atol=1e-5)
    for other in (copy.deepcopy(model), model):
        same(other, was, x)


def test_a_norm_of_two_blocks():
    """Called by another module, too, whose own forward knows nothing of the pair."""
    model, was = both_of(Block)
    around, before = (nn.Sequential(m, m.norm, NEW[0]) for m in (model, was))
    same(around, before, torch.randn(S, E, requires_grad=True))


def kept(self, x, y):
    self.kept = y
    return self.inner(y)


def in_place_of_y(self, x, y):
    y.mul_(2)
    return self.inner(y)


FLAGS = {
    "returned": lambda self, x, y: y,
    "returned, too": lambda self, x, y: [self.inner(y), {"y": (y, 1)}],
    "to another Linear": lambda self, x, y: self.other(y),
    "to two": lambda self, x, y: self.inner(y) + self.other(y),
    "to a function": lambda self, x, y: self.inner(torch.tanh(y)),
    "in a list": lambda self, x, y: self.inner(torch.cat([y, x])),
    "a method": lambda self, x, y: self.inner(y.tanh()),
    "a dtype": lambda self, x, y: self.inner(y.to(x.dtype) if y.dtype is torch.float32 else None),
    "an operator": lambda self, x, y: self.inner(1 + y * x - y[..., :1] / 2),
    "a comparison": lambda self, x, y: self.inner(torch.where(y > 0, y, -y)),
    "in place": in_place_of_y,
    "an operator in place": lambda self, x, y: self.inner(y.__iadd__(x)),
    "an item": lambda self, x, y: (y.__setitem__(0, 1.0), self.inner(y))[1],
    "through a norm": lambda self, x, y: self.inner(self.norm(y)),
    "a residual": lambda self, x, y: y + self.inner(y),
    "its shape": lambda self, x, y: self.inner(y).view(y.shape[0], y.size(1), *([1] * y.ndim)),
    "a loop": lambda self, x, y: torch.stack([self.inner(row) for row in y]),
    "kept": kept,
    "another order": lambda self, x, y: (self.other(x), self.inner(y))[1],
}


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("compiled", [False, True])
def test_the_norms_result_goes_elsewhere_later(flag, compiled):
    model, was = both_of(Block)
    model.flag = was.flag = FLAGS[flag]
    x = torch.randn(S, E, requires_grad=True)
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager") if compiled else model
    same(model, was, x, run)
    if flag == "kept":
        assert torch.allclose(model.kept + 0, was.kept, atol=1e-5)
        with pytest.raises(RuntimeError, match="deepcopy"):  # as of any tensor that is no leaf
            copy.deepcopy(model.kept)
        assert torch.equal(pickle.loads(pickle.dumps(model.kept.detach())), model.kept.detach())


def test_attributes_are_those_of_the_norms_result():
    model, was = both_of(Block)

    def leaf(self, x, y):
        with torch.no_grad():
            y = self.norm(x)
        y.requires_grad = True
        self.kept = y
        return self.inner(y)

    model.flag = was.flag = leaf
    grads = []
    for m in (model, was):
        m(torch.ones(S, E) + torch.arange(E)).sum().backward()
        grads.append(m.kept.grad)
    assert torch.allclose(*grads, atol=1e-5) and grads[1].abs().max() > 0


def test_an_argument_that_is_written_before_the_linear_takes_it():
    model, _ = both_of(Block)
    model.flag = lambda self, x, y: (x.mul_(2), self.inner(y))[1]
    with pytest.raises(ValueError, match="PassedLayerNorm was given has been changed in place"):
        model(torch.randn(S, E))


class Written(Block):
    def forward(self, x):
        y = self.norm(x)
        x.mul_(2)
        return self.inner(y)


class Spoken(Block):
    """Questions of shapes, and what is made of the answers."""

    def forward(self, x):
        y = self.norm(x)
        b, e = y.size()
        n = x.shape[0] * e // y.shape[1]
        return self.inner(y).view(b, n // b, e)


def test_what_runs_between():
    done = heddle.replace(shake(Written()))
    assert done.left == {"norm": "mul_ runs between it and inner.0, which takes its result"}
    model = shake(Spoken())
    was = copy.deepcopy(model)
    assert "norm" in heddle.replace(model).swapped
    same(model, was, torch.randn(S, E, requires_grad=True))


# --------------------------------------------------------------------------------------------------- around the forward


def test_names_copies_and_classes():
    model, was = both_of(Block)
    assert type(model).__name__ == "Block" and isinstance(model, Block) and type(model.norm) is PassedLayerNorm
    assert repr(model).splitlines()[0] == "Block(" and type(model.inner[0]) is NormedLinear
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        assert type(other) is type(model) and is_one(other)
    heddle._replace_fuse._classes.clear()  # as in a process that has made none
    other = pickle.loads(pickle.dumps(model))
    assert type(other).__name__ == "Block" and is_one(other)
    same(other, was, torch.randn(S, E, requires_grad=True))


def test_another_forward_of_the_class(monkeypatch):
    model, was = both_of(Block)
    monkeypatch.setattr(Block, "forward", lambda self, x: self.inner(self.norm(x) + x))
    same(model, was, torch.randn(S, E, requires_grad=True))


def test_joined_again():
    """What was changed may be joined anew."""
    model, was = both_of(pair)
    model[1] = was[1] = shake(nn.Linear(E, E))
    model.append(nn.GELU()), was.append(nn.GELU())
    assert not is_one(model)
    done = heddle.replace(model)
    assert done.swapped == {"0": "LayerNorm with the Linear 1 (by torch.fx)"} and is_one(model)
    same(model, was, torch.randn(S, E, requires_grad=True))
    assert not heddle.replace(model).swapped


def test_who_copies_itself():
    model = torch.fx.symbolic_trace(shake(Block()))
    done = heddle.replace(model)
    assert done.left["norm"] == "the model, whose forward calls it: its class copies itself"
    model = shake(Block())
    model.forward = lambda x: Block.forward(model, x)
    assert "its forward was replaced" in heddle.replace(model).left["norm"]


class Checkpointed(Block):
    """A part of its forward, which runs again in backward, when the forward does not."""

    def forward(self, x):
        return x + torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


def test_checkpoints():
    done = heddle.replace(shake(Checkpointed()))
    assert done.left["norm"] == "a checkpoint is begun around it and inner.0 in a forward"
    model, was = both_of(Block)
    x = torch.randn(S, E, requires_grad=True)
    same(model, was, x, lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False))
    inner = lambda self, x, y: torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=False)  # noqa: E731
    for m in (model, was):
        m.part = lambda x, of=m: of.inner(of.norm(x))
        m.flag = inner
    same(model, was, x)


def test_threads():
    """Each has its own calls: a norm that one calls by itself is a norm while another runs the model."""
    model, was = both_of(Block)
    inside, go_on = threading.Event(), threading.Event()

    def waits(self, x, y):
        inside.set()
        assert go_on.wait(60)
        return self.inner(y)

    model.flag, made = waits, []
    x = torch.randn(S, E)
    runs = threading.Thread(target=lambda: made.append(model(x)))
    runs.start()
    assert inside.wait(60)
    alone = model.norm(x)
    go_on.set()
    runs.join()
    assert type(alone) is torch.Tensor
    agree([alone, made[0]], [was.norm(x), was(x)])
    with pytest.raises(ZeroDivisionError):
        model.flag = lambda self, x, y: 1 / 0
        model(x)
    assert type(model.norm(x)) is torch.Tensor


@pytest.mark.parametrize("strict", [False, True])
def test_exported_and_compiled(strict):
    model, was = both_of(Block)
    model.eval()
    x = torch.randn(S, E)
    exported = torch.export.export(model, (x,), strict=strict)
    targets = [str(node.target) for node in exported.graph.nodes]
    assert "heddle.norm_linear.default" in targets and not any("layer_norm" in each for each in targets)
    assert torch.allclose(exported.module()(x), was(x), atol=1e-5)
    if strict:
        torch._dynamo.reset()
        for run in (torch.compile(model, fullgraph=True, backend="aot_eager"), model):
            assert torch.allclose(run(x), was(x), atol=1e-5) and type(model.norm(x)) is torch.Tensor
        torch._dynamo.reset()
        model.inner.compile(fullgraph=True, backend="aot_eager")  # a part, which gets what goes between the two
        assert torch.allclose(model(x), was(x), atol=1e-5)


def test_transformations_of_torch_func():
    model, was = both_of(Block)
    x = torch.randn(S, E)

    def loss(m):
        parameters = dict(m.named_parameters())
        return torch.func.grad(lambda p: torch.func.functional_call(m, p, (x,)).sin().sum())(parameters)

    got, want = loss(model), loss(was)
    used = {name for name in want if not name.startswith("other")}
    assert used and all(torch.allclose(got[name], want[name], atol=1e-4) for name in used)
    assert torch.allclose(torch.vmap(model)(x[None].expand(3, S, E)), was(x), atol=1e-5)


# ------------------------------------------------------------------------------------------------- a layer of PyTorch's


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "norm1", nn.RMSNorm(E)),
        lambda m: setattr(m, "norm2", nn.Identity()),
        lambda m: setattr(m, "linear1", shake(Doubled(E, 24))),
        lambda m: m.norm1.register_forward_hook(lambda module, given, made: 2 * made),
        lambda m: m.norm2.register_forward_pre_hook(lambda module, given: (2 * given[0].tanh(),)),
        lambda m: m.linear1.register_forward_hook(lambda module, given, made: 2 * made),
        lambda m: m.self_attn.register_forward_hook(lambda module, given, made: (2 * made[0], None)),
        lambda m: setattr(m.self_attn, "forward", lambda q, k, v, **masks: (q.tanh(), None)),
    ],
)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_parts_of_an_encoder_layer_that_change(change, norm_first, batch_first):
    model = shake(nn.TransformerEncoderLayer(E, 4, 24, 0.0, batch_first=batch_first, norm_first=norm_first))
    was = copy.deepcopy(model)
    heddle.replace(model)
    assert type(model) is TransformerEncoderLayer
    change(model), change(was)
    mask = torch.full((S, S), -torch.inf).triu(1)
    for x in (torch.randn(S, S, E), torch.randn(S, E)):
        assert torch.allclose(model(x, src_mask=mask), was(x, src_mask=mask), atol=1e-4)
    same(model, was, x.requires_grad_())


# --------------------------------------------------------------------------------------- what random trees came upon


class Named(nn.Module):
    """A RMSNorm whose argument is named, as its class names it."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(E), nn.Linear(E, E)

    def forward(self, x):
        return self.linear(self.norm(x=x))


def test_argument_by_name():
    model = shake(Named())
    was, x = copy.deepcopy(model), torch.randn(2, E)
    assert "norm" in heddle.replace(model).swapped and is_one(model)
    assert torch.allclose(model(x), was(x), atol=1e-5)


def test_norm_behind_a_norm():
    model = shake(nn.Sequential(nn.LayerNorm(E), nn.RMSNorm(E), nn.Linear(E, E)))
    was, x = copy.deepcopy(model), torch.randn(2, E)
    done = heddle.replace(model)
    assert done.left["0"] == "what takes its result is of class RMSNorm" and "1" in done.swapped
    assert torch.allclose(model(x), was(x), atol=1e-5)


def behind():
    """With an activation and a sum behind Linears."""
    linear = nn.Linear(E, E)
    return nn.Sequential(nn.LayerNorm(E), linear, nn.GELU(), nn.TransformerEncoderLayer(E, 4, 24, 0.0, norm_first=True))


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_hooks_of_all_modules(kind):
    model, was = both_of(behind)
    hooks = {
        "forward": lambda module, given, made: 2 * made if isinstance(made, torch.Tensor) else None,
        "forward_pre": lambda module, given: (given[0] + 1, *given[1:]) if len(given) == 1 else None,
        "full_backward": lambda module, taken, come: tuple(None if t is None else 2 * t for t in taken),
    }
    x = torch.randn(2, 3, E, requires_grad=True)
    before = model(x)
    handle = getattr(nn.modules.module, f"register_module_{kind}_hook")(hooks[kind])
    try:
        made = [(each(x), torch.autograd.grad(each(x).sum(), x)[0]) for each in (model, was)]
    finally:
        handle.remove()
    for a, b in zip(*made, strict=True):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max()
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("of_norm", [False, True])
def test_parameters_that_lie_otherwise(of_norm):
    """PyTorch takes any layout; what heddle does not take is PyTorch's then."""
    model, was = both_of(behind)
    for each in (model, was):
        torch.manual_seed(1)
        for m in each.modules():
            if of_norm and isinstance(m, nn.LayerNorm):
                m.weight = nn.Parameter(torch.randn(1).expand(E))
            elif not of_norm and isinstance(m, nn.Linear):
                m.weight = nn.Parameter(torch.randn(m.in_features, m.out_features).T / 4)
    x = torch.randn(2, 3, E, requires_grad=True)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            a, b = model(x), was(x)
        assert torch.allclose(a, b, atol=1e-4)
    a, b = (torch.autograd.grad(each(x).square().sum(), [x, *each.parameters()]) for each in (model, was))
    assert all(torch.allclose(g, w, atol=1e-2, rtol=1e-3) for g, w in zip(a, b, strict=True))


def test_traced_by_fx():
    """The rewritten forward of a Sequential has the arguments that it had."""
    model = shake(nn.Sequential(nn.Linear(E, E), nn.GELU(), nn.Linear(E, E)))
    x = torch.randn(2, E)
    assert heddle.replace(model).swapped
    assert torch.allclose(torch.fx.symbolic_trace(model)(x), model(x), atol=1e-5)
