# SPDX-License-Identifier: Apache-2.0
"""heddle.replace of random trees of modules, to which things are done before and after, against the same as they were
(fuzz_linear_help has the rules)."""

from __future__ import annotations

import contextlib
import copy
import types

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
import torch.utils.checkpoint
from conftest import ROUNDING
from fuzz_linear_help import BF16, F32, F64, judge, laid_out, sweep
from torch import nn

import heddle

D = 8
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def plain_layers():
    """PyTorch's own fast path takes every GELU for that by erf, gives other types under autocast, and refuses more."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


class Add(nn.Module):
    """x + body(x), as it is often written."""

    def __init__(self, body, norm, drop):
        super().__init__()
        self.norm, self.body, self.drop = norm, body, drop

    def forward(self, x):
        return x + self.drop(self.body(self.norm(x)))


class AddAfter(Add):
    def forward(self, x):
        return self.norm(self.drop(self.body(x)) + x)


class AddInPlace(Add):
    def forward(self, x):
        y = self.norm(x)
        y = self.body(y)
        y += x
        return y


class AddArgument(Add):
    def forward(self, x, scale=None):
        y = self.norm(x=x) if isinstance(self.norm, nn.RMSNorm) else self.norm(input=x)
        y = self.body(input=y) if isinstance(self.body, OwnLinear) else self.body(y)
        return torch.add(y, x) if scale is None else y * scale


class AddOfKind(Add):
    def forward(self, x):
        y = self.norm(x)
        if isinstance(self.body, nn.Linear) and self.training:
            return F.linear(y, self.body.weight, self.body.bias) + x
        return self.body(y).add(x)


class Checkpointed(Add):
    def forward(self, x):
        if not x.requires_grad:
            return self.body(self.norm(x))
        return x + torch.utils.checkpoint.checkpoint(lambda t: self.body(self.norm(t)), x, use_reentrant=False)


class CheckpointedBody(Add):
    def forward(self, x):
        y = self.norm(x)
        return torch.utils.checkpoint.checkpoint(self.body, y, use_reentrant=False)


class Mlp(nn.Module):
    def __init__(self, norm, one, act, two):
        super().__init__()
        self.norm, self.fc1, self.act, self.fc2 = norm, one, act, two

    def forward(self, x):
        h = self.norm(x)
        h = self.fc1(h)
        h = self.act(h)
        return x + self.fc2(h)


class MlpFunctional(Mlp):
    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(self.norm(x)), approximate="tanh")) + x


class MlpGated(Mlp):
    """One norm, two Linears."""

    def forward(self, x):
        y = self.norm(x)
        return F.silu(self.fc1(y)) * self.fc2(F.silu(self.fc1(y)))[..., :1]


class MlpTwice(Mlp):
    def forward(self, x):
        return self.fc2(self.act(self.fc1(self.norm(x)))) + self.norm(x)


class MlpKept(Mlp):
    """What somebody keeps is no result of its own."""

    def forward(self, x):
        self.kept = self.norm(x)
        return self.fc2(self.act(self.fc1(self.kept))) + self.kept.mean()


class MlpReturns(Mlp):
    def forward(self, x):
        y = self.norm(x)
        z = self.fc1(y)
        a, b = (self.act(z), y) if self.training else (self.act(z), x)
        return self.fc2(a) + b


class Listed(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


class OwnLinear(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


class OwnNorm(nn.LayerNorm):
    def forward(self, input):
        return super().forward(input) + input.mean()


class Scaled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def random_norm(rng, size=D):
    return rng.choice(
        (
            lambda: nn.LayerNorm(size),
            lambda: nn.LayerNorm(size),
            lambda: nn.RMSNorm(size),
            lambda: nn.RMSNorm(size, eps=1e-3),
            lambda: nn.LayerNorm(size, eps=1e-2, bias=False),
            lambda: nn.LayerNorm(size, elementwise_affine=False),
            lambda: OwnNorm(size) if rng.random() < 0.3 else nn.LayerNorm(size),
            lambda: nn.RMSNorm(size, elementwise_affine=False),
            lambda: nn.Identity() if rng.random() < 0.3 else nn.RMSNorm(size),
        )
    )()


def random_linear(rng, k=D, n=D):
    return (OwnLinear if rng.random() < 0.05 else nn.Linear)(k, n, bias=rng.random() < 0.7)


def random_act(rng):
    return rng.choice((nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.SiLU(inplace=True), nn.Tanh(), nn.ELU(inplace=True)))


def random_drop(rng):
    return rng.choice((nn.Dropout(0.0), nn.Identity(), nn.Dropout(0.0, inplace=True)))


def random_part(rng, made, depth=2):
    """A module from D features to D; some are there already."""
    if made and rng.random() < 0.08:
        return rng.choice(made)
    kind = rng.random()
    if kind < 0.3 or depth == 0:
        parts, size = [], D
        for _ in range(rng.randint(1, 4)):
            other = rng.choice((D, 2 * D, 5))
            parts += [random_norm(rng, size)] * (rng.random() < 0.7) + [random_linear(rng, size, other)]
            parts += [random_act(rng)] * (rng.random() < 0.5) + [random_drop(rng)] * (rng.random() < 0.3)
            size = other
        part = nn.Sequential(*parts, *([] if size == D else [random_linear(rng, size, D)]))
    elif kind < 0.6:
        kinds = (Add, Add, AddAfter, AddInPlace, AddArgument, AddOfKind, Checkpointed, CheckpointedBody)
        body = random_linear(rng) if rng.random() < 0.5 else random_part(rng, made, depth - 1)
        part = rng.choice(kinds)(body, random_norm(rng), random_drop(rng))
    elif kind < 0.85:
        kinds = (Mlp, Mlp, MlpFunctional, MlpGated, MlpTwice, MlpKept, MlpReturns)
        size = D if (kinds := rng.choice(kinds)) in (MlpGated, MlpReturns) else 2 * D
        part = kinds(random_norm(rng), random_linear(rng, D, size), random_act(rng), random_linear(rng, size, D))
    elif kind < 0.92:
        first = rng.random() < 0.6
        act = rng.choice((F.gelu, F.elu, F.silu))
        part = nn.TransformerEncoderLayer(D, 2, 12, 0.0, act, batch_first=rng.random() < 0.5, norm_first=first)
    else:
        part = rng.choice((Listed, nn.Sequential))(
            *(random_part(rng, made, depth - 1) for _ in range(rng.randint(1, 3)))
        )
    made.append(part)
    return part


def doubled(module, given, result):
    return 2 * result if isinstance(result, torch.Tensor) else result


def added_before(module, given):
    return (given[0] + 1, *given[1:])


def turned_gradient(module, given, taken):
    return tuple(None if t is None else 3 * t for t in given)


def one_more(module, *args, **options):
    return type(module).forward(module, *args, **options) + 1


def random_change(rng, told):
    """Something that is done to a model, as a function of it."""
    kinds = """hook|pre hook|backward hook|weight_norm|old weight_norm|parametrized|frozen|unfrozen|tied|eval|copy|state
        |linear|norm|dtype|prune|requires|other eps|forward|set|data"""
    kind = rng.choice(kinds.split("|")).strip()
    where, number = rng.random(), rng.randrange(1000)

    def change(model, best=False):
        modules = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.LayerNorm, nn.RMSNorm))]
        linears = [m for m in modules if isinstance(m, nn.Linear)]
        module, linear = modules[int(where * len(modules))], linears[int(where * len(linears))]
        if kind == "hook":
            module.register_forward_hook(doubled)
        elif kind == "pre hook":
            module.register_forward_pre_hook(added_before)
        elif kind == "backward hook":
            module.register_full_backward_hook(turned_gradient)
        elif kind == "weight_norm" and "weight" in linear._parameters:
            nn.utils.parametrizations.weight_norm(linear)
        elif kind == "old weight_norm" and "weight" in linear._parameters:
            with torch.no_grad():
                nn.utils.weight_norm(linear)
        elif kind == "parametrized" and isinstance(module._parameters.get("weight"), torch.Tensor):
            nn.utils.parametrize.register_parametrization(module, "weight", Scaled())
        elif kind in ("frozen", "unfrozen"):
            for p in module.parameters():
                p.requires_grad_(kind == "unfrozen")
        elif kind == "tied":
            for other in linears:
                if other is not linear and all(
                    "weight" in m._parameters and m.weight.shape == linear.weight.shape for m in (linear, other)
                ):
                    linear.weight = other.weight
                    break
        elif kind == "eval":
            model.eval()
        elif kind == "copy":
            with contextlib.suppress(RuntimeError):  # of what old weight_norm leaves, and forwards that keep
                return copy.deepcopy(model)
        elif kind == "state":
            generator = torch.Generator().manual_seed(number)
            state = {n: t + torch.rand(t.shape, generator=generator).to(t) for n, t in model.state_dict().items()}
            model.load_state_dict(state, assign=where < 0.5)
        elif kind in ("linear", "norm"):
            torch.manual_seed(number)
            for m in model.modules():
                for name, part in m.named_children():
                    if kind == "linear" and part is linear and not isinstance(m, nn.MultiheadAttention):
                        setattr(
                            m, name, nn.Linear(part.in_features, part.out_features).to(next(model.parameters()).dtype)
                        )
                        return model
                    if kind == "norm" and part is module and not isinstance(part, nn.Linear):
                        setattr(m, name, nn.Tanh())
                        return model
        elif kind == "dtype":
            return model if best else model.double() if number % 2 else model.float()
        elif kind == "prune" and "weight" in linear._parameters:
            with torch.no_grad():
                nn.utils.prune.l1_unstructured(linear, "weight", 0.3)
        elif kind == "requires":
            model.requires_grad_(number % 3 != 0)
        elif kind == "other eps" and hasattr(module, "eps"):
            module.eps = 0.1
        elif kind == "forward":
            module.forward = types.MethodType(one_more, module)
        elif kind == "set" and "bias" in module._parameters:
            module.bias = None
        elif kind == "data":
            module.weight.data.mul_(2) if isinstance(module._parameters.get("weight"), torch.Tensor) else None
        return model

    told.append(f"{kind} at {where:.3f}")
    return change


def ran(model, x, dy_seed, guard, cast, options):
    """A model's result and all gradients by name; or the exception."""
    x = x.detach().clone().as_strided(x.shape, x.stride()) if x.is_contiguous() else x.detach()
    x = x.requires_grad_(options["input"])
    given = x.clone() if options["clone"] else x
    try:
        with guard(), torch.autocast("cpu", cast or BF16, enabled=cast is not None):
            y = model(given)
        if not y.requires_grad:
            return [y]
        torch.manual_seed(dy_seed)
        dy = torch.randn(y.shape, dtype=F64).to(y.dtype)
        leaves = [p for p in model.parameters() if p.requires_grad] + ([x] if options["input"] else [])
        return [y, *torch.autograd.grad(y, leaves, dy, allow_unused=True)]
    except Exception as error:
        return error


def replace_case(rng, told):
    made = []
    model = nn.Sequential(*(random_part(rng, made) for _ in range(rng.randint(1, 3))))
    if rng.random() < 0.3:
        model = model[0]
    if not [m for m in model.modules() if isinstance(m, nn.Linear)]:
        return
    dtype = rng.choice((F64, F64, F32, BF16))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * (0.3 if p.dim() > 1 else 0.2) + (p.dim() == 1) * 0.5)
    model.to(dtype)
    told.append(f"{model} {dtype}")
    for _ in range(rng.choice((0, 0, 1, 2))):
        model = random_change(rng, told)(model)
    was, best = copy.deepcopy(model), copy.deepcopy(model).double()
    done = heddle.replace(model)
    told.append(f"replaced {done}")
    was_names = [name for name, m in was.named_modules() if isinstance(m, (nn.LayerNorm, nn.RMSNorm))]
    for name in was_names:
        assert name in done.swapped or name in done.left, f"nothing is said of {name}"
    for round_ in range(rng.randint(1, 3)):
        if round_:
            change = random_change(rng, told)
            model, was, best = change(model), change(was), change(best, True)
            if rng.random() < 0.2:
                told.append("replaced again")
                heddle.replace(model)
        kinds = {p.dtype for p in model.parameters()}
        dtype = kinds.pop() if len(kinds) == 1 else dtype
        cast = BF16 if rng.random() < 0.1 and dtype == F32 else None
        guard = rng.choice(
            (torch.enable_grad, torch.enable_grad, torch.enable_grad, torch.no_grad, torch.inference_mode)
        )
        encoders = any(isinstance(m, nn.TransformerEncoderLayer) for m in model.modules())
        lead = (2, 3) if encoders else [rng.choice((1, 2, 3)) for _ in range(rng.randint(0, 3))]
        x = laid_out(rng, torch.randn(*lead, D, dtype=F64).to(dtype))
        options = {"input": rng.random() < 0.7, "clone": rng.random() < 0.7}
        told.append(f"{guard.__name__} autocast={cast} {lead} {options} training={model.training}")
        ours, theirs = (ran(m, x, round_, guard, cast, options) for m in (model, was))
        if isinstance(theirs, Exception):
            assert isinstance(ours, Exception), f"PyTorch: {theirs}"
            told.append(f"raised {str(theirs)[:60]}")
            continue
        if isinstance(ours, Exception):
            raise AssertionError(f"raised {ours!r}") from ours
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in was.named_parameters()], "names"
        assert len(ours) == len(theirs), "requires_grad"
        compute = cast or dtype
        truth = theirs if compute == F64 else ran(best, x.double(), round_, guard, None, options)
        if isinstance(truth, Exception):  # what has other dtypes inside
            continue
        names = ["y", *(n for n, p in model.named_parameters() if p.requires_grad), "x"][: len(ours)]
        judge(names, ours, truth, theirs, truth, ROUNDING[compute], 64 if cast else 32, 1e-9)


def test_replace():
    sweep(100, replace_case, 0.9)
