# SPDX-License-Identifier: Apache-2.0
"""``heddle.replace(model)``: norms with the Linear behind them, Linears with what is behind them, and attentions, of a
module tree that is there already.

Modules change their class and nothing else: parameters, hooks, names and state dicts stay. A norm and a Linear become
one only where it is proven that the norm's result goes to that Linear alone: side by side in a torch.nn.Sequential, or
in all graphs that torch.fx traces of a module that holds both.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx, nn

import heddle
from heddle import _replace_fuse
from heddle._errors import HeddleTypeError
from heddle._nn_linear import hooked
from heddle._nn_multihead import MultiheadAttention, TransformerEncoderLayer
from heddle._torch import norm_linear

Norms = (nn.LayerNorm, nn.RMSNorm)


class _Passed:
    """A norm whose Linear does its work."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class PassedLayerNorm(_Passed, nn.LayerNorm):
    """A LayerNorm that the Linear behind it does in one with itself. Its parameters are still here."""


class PassedRMSNorm(_Passed, nn.RMSNorm):
    """A RMSNorm that the Linear behind it does in one with itself. Its parameters are still here."""


class NormedLinear(_replace_fuse.FusedLinear):
    """A Linear with the norm in front of it, whose parameters stay where they were."""

    norm_in_front: nn.LayerNorm | nn.RMSNorm

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]; errors as heddle.norm_linear."""
        return self.run(input)

    def run(self, x: Tensor, activation: Any = None, residual: Tensor | None = None) -> Tensor:
        """act(forward(x)) + residual"""
        norm, eps = self.norm_in_front, self.norm_in_front.eps
        beta = norm.bias if isinstance(norm, nn.LayerNorm) else None
        kind: Literal["layer", "rms"] = "layer" if isinstance(norm, nn.LayerNorm) else "rms"
        if eps is None:  # as torch.nn.RMSNorm has it, whose sums are in float32
            eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
        options: dict[str, Any] = {"norm": kind, "activation": activation, "residual": residual}
        made: Tensor = norm_linear(x, self.weight, self.bias, norm.weight, beta, eps, **options)
        return made

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, norm={type(self.norm_in_front).__name__}"


@dataclass
class Replaced:
    """What heddle.replace did, by the modules' names.

    swapped: what became heddle's. left: what did not, and why. str() tells both, a line each."""

    swapped: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"swapped {name or 'the model'}: {what}" for name, what in self.swapped.items()]
        return "\n".join(lines + [f"left    {name or 'the model'}: {why}" for name, why in self.left.items()])


def _own_forward(module: nn.Module) -> str | None:
    if "forward" in module.__dict__:
        return "its forward was replaced"
    return "it has hooks" if hooked(module) else None


# ----------------------------------------------------------------------------------------------------------- tracing


class _Tracer(fx.Tracer):
    """Follows every module but those of torch.nn. Functions of heddle are nodes, like those of torch."""

    def __init__(self) -> None:
        super().__init__(autowrap_modules=cast(Any, (math, heddle)))

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(
            m, (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, *Norms, nn.Linear)
        ):
            return True
        return super().is_leaf_module(m, module_qualified_name)


def _traces(module: nn.Module) -> list[fx.Graph] | None:
    """All ways through a module: in training and not, with the arguments that need not be given, and without them."""
    optional = {
        name: parameter.default
        for name, parameter in inspect.signature(module.forward).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    before = [
        (each, dict(each.__dict__), {k: dict(v) for k, v in each.__dict__.items() if isinstance(v, dict)})
        for each in module.modules()
    ]
    graphs = []
    try:
        for training in (False, True):
            for each, _, _ in before:
                each.training = training
            for concrete in ({}, optional) if optional else ({},):
                graphs.append(_Tracer().trace(module, concrete_args=concrete or None))
    except (
        Exception
    ):  # what a model's own code may raise, and what no trace can follow: the parts are looked at instead
        return None
    finally:
        for each, attributes, tables in before:  # forward may have kept what it was given
            each.__dict__.clear()
            each.__dict__.update(attributes)
            for name, table in tables.items():
                each.__dict__[name].clear()
                each.__dict__[name].update(table)
    return graphs


def _asks_for_shape(node: fx.Node) -> bool:
    """What a norm does not change."""
    if node.op == "call_method":
        return node.target in ("size", "dim")
    return node.op == "call_function" and node.target is getattr and node.args[1] in ("shape", "ndim", "device")


def _pairs_of(graph: fx.Graph) -> tuple[dict[str, str], Counter[str]]:
    """By the name of a module: the one that alone takes its result; and how often each is called."""
    called = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    pairs = {}
    for node in graph.nodes:
        users = [user for user in node.users if not _asks_for_shape(user)]
        if node.op == "call_module" and len(users) == 1:
            (user,) = users
            if user.op == "call_module" and user.args == (node,) and not user.kwargs:
                pairs[str(node.target)] = str(user.target)
    return pairs, called


# ------------------------------------------------------------------------------------------------------------ pairs


class _Work:
    def __init__(self, model: nn.Module) -> None:
        self.model, self.done = model, Replaced()
        self.names: dict[nn.Module, list[str]] = {}
        self.others: set[nn.Module] = set()  # norms of layers that were heddle's before
        for name, module in model.named_modules(remove_duplicate=False):
            self.names.setdefault(module, []).append(name)

    def name(self, module: nn.Module) -> str:
        return self.names[module][0]

    def why_not(self, norm: Any, linear: Any) -> str | None:
        """What is in the way of one for both."""
        for module, kind in ((norm, "the norm"), (linear, "what takes its result")):
            if type(module) not in (*Norms, nn.Linear):
                return f"{kind} is of class {type(module).__name__}"
            if len(self.names[module]) > 1:
                return f"{kind} is in the model {len(self.names[module])} times: {', '.join(self.names[module])}"
            trouble = _own_forward(module)
            if trouble:
                return f"{kind}: {trouble}"
        kinds = {(p.dtype, p.device) for module in (norm, linear) for p in module.parameters()}
        if len(kinds) > 1:
            return f"its parameters and its Linear's are of {' and '.join(sorted(str(kind[0]) for kind in kinds))}"
        if tuple(norm.normalized_shape) != (linear.in_features,):
            return f"it normalises {list(norm.normalized_shape)}, but its Linear takes {linear.in_features}"
        return None

    def join(self, norm: Any, linear: Any, proof: str) -> None:
        name, other = self.name(norm), self.name(linear)
        trouble = self.why_not(norm, linear)
        if trouble:
            self.done.left[name] = trouble
            return
        kind = type(norm).__name__
        norm.__class__ = PassedLayerNorm if kind == "LayerNorm" else PassedRMSNorm
        linear.__class__ = NormedLinear
        object.__setattr__(linear, "norm_in_front", norm)  # no submodule: its parameters stay in one place
        self.done.swapped[name] = f"{kind} with the Linear {other} ({proof})"

    def norms(self, module: nn.Module) -> list[nn.Module]:
        """Those of which nothing is known yet."""
        known = self.done.swapped.keys() | self.done.left.keys()
        there = (each for each in module.modules() if isinstance(each, Norms) and not isinstance(each, _Passed))
        return [each for each in there if each not in self.others and self.name(each) not in known]

    def trace(self, module: nn.Module) -> None:
        """A module's norms by its graphs; where it has none, by those of its parts."""
        if not self.norms(module) or isinstance(module, Norms):
            return
        opaque = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.ModuleList, nn.ModuleDict)
        graphs = None if isinstance(module, opaque) else _traces(module)
        if graphs is None:
            for part in module.children():
                self.trace(part)
            if type(module) is nn.Sequential and not _own_forward(module):
                for one, other in pairwise(module.children()):
                    if isinstance(other, nn.Linear) and one in self.norms(module):
                        self.join(one, other, "side by side")
            return
        for norm in self.norms(module):
            inside = self.name(norm).removeprefix(self.name(module)).removeprefix(".")
            linear, why = self.follow(graphs, inside)
            if linear is None:
                self.done.left[self.name(norm)] = why
            else:
                self.join(norm, module.get_submodule(linear), "by torch.fx")

    def follow(self, graphs: list[fx.Graph], name: str) -> tuple[str | None, str]:
        """The Linear that alone takes a norm's result in all graphs, or why there is none."""
        found = set()
        for graph in graphs:
            pairs, called = _pairs_of(graph)
            if called[name] == 0:
                return None, "no trace of the model comes to it"
            if called[name] > 1:
                return None, f"it is called {called[name]} times"
            user = pairs.get(name)
            if user is None:
                return None, "its result goes to something else than one Linear"
            if called[user] > 1:
                return None, f"{user}, which takes its result, is called {called[user]} times"
            found.add(user)
        return (found.pop(), "") if len(found) == 1 else (None, "its result goes to different modules")

    # -------------------------------------------------------------------------------------- activations and sums

    def transposed(self) -> None:
        """What transformers has in the place of Linears in GPT-2 and its like."""
        for module in self.model.modules():
            kind = type(module)
            if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
                self.done.left[self.name(module)] = (
                    "its weight is [in, out], and heddle reads rows of [out, in]: Conv1D would be copied in each call"
                )

    def fusions(self) -> None:
        """What stands behind a Linear, in Sequentials and in forwards that can be followed."""
        for module in list(self.model.modules()):
            kind, made = type(module), _replace_fuse
            if made.is_made(module) or "forward" in vars(module):
                continue
            if isinstance(module, nn.Sequential) and kind.forward is nn.Sequential.forward:
                found = made.in_sequential(module)
                if found:
                    module.__class__ = made.class_of(kind, made.SEQUENTIAL, made.sequential)
                    self.done.swapped[self.name(module)] = found
            elif made.wants(module):
                other, found = made.rewrite(module)
                if other is not None:
                    module.__class__ = other
                    self.done.swapped[self.name(module)] = f"{found} (its forward, by torch.fx)"
                elif found:
                    self.done.left[self.name(module)] = f"activations and sums: {found}"

    # ------------------------------------------------------------------------------------------------- attentions

    def attentions(self) -> None:
        for module in list(self.model.modules()):
            name = self.name(module)
            if isinstance(module, TransformerEncoderLayer):
                self.others |= {module.norm1, module.norm2}
            elif isinstance(module, MultiheadAttention):
                continue
            elif isinstance(module, nn.TransformerEncoderLayer):
                self.encoder_layer(module)
            elif isinstance(module, nn.MultiheadAttention):
                trouble = _own_class(module, nn.MultiheadAttention)
                if trouble:
                    self.done.left[name] = trouble
                else:
                    module.__class__ = MultiheadAttention
                    self.done.swapped[name] = "MultiheadAttention"
        for module in self.model.modules():
            layers = getattr(module, "layers", None)
            if isinstance(module, nn.TransformerEncoder) and any(
                isinstance(layer, TransformerEncoderLayer) for layer in layers or ()
            ):
                module.use_nested_tensor = False  # PyTorch's own fast path, which would hand them nested tensors

    def encoder_layer(self, module: nn.TransformerEncoderLayer) -> None:
        name = self.name(module)
        trouble = _own_class(module, nn.TransformerEncoderLayer)
        parts = (module.norm1, module.norm2, module.linear1, module.linear2, module.self_attn)
        kinds = (nn.LayerNorm, nn.LayerNorm, nn.Linear, nn.Linear, nn.MultiheadAttention)
        for part, kind in zip(parts, kinds, strict=True):
            # Post-norm calls every part but the attention as it is; pre-norm reads the parameters of norms and linear1.
            matters = module.norm_first or part is module.self_attn
            if not trouble and matters and (type(part) is not kind or _own_forward(part)):
                trouble = f"{self.name(part)}: {_own_forward(part) or f'it is of class {type(part).__name__}'}"
        if trouble:
            self.done.left[name] = trouble
            return
        module.__dict__.pop("activation_relu_or_gelu", None)
        module.__class__, module.self_attn.__class__ = TransformerEncoderLayer, MultiheadAttention
        self.done.swapped[name] = f"TransformerEncoderLayer, {'both norms fused' if module.norm_first else 'post-norm'}"
        for part in (module.norm1, module.norm2):
            if module.norm_first:
                self.done.swapped[self.name(part)] = f"with the layer {name or 'itself'}"
            else:
                self.done.left[self.name(part)] = "post-norm: a sum stands between it and the next Linear"


def _own_class(module: nn.Module, kind: type) -> str | None:
    return f"it is of class {type(module).__name__}" if type(module) is not kind else _own_forward(module)


def replace(model: nn.Module) -> Replaced:
    """Lets a model of PyTorch's modules run on heddle, in place, with the very parameters that it has.

    nn.MultiheadAttention and nn.TransformerEncoderLayer become heddle.nn's. A LayerNorm or RMSNorm and the nn.Linear
    behind it run as one, where torch.fx or a torch.nn.Sequential proves that the norm's result goes to that Linear
    alone. GELU or SiLU behind a Linear, and a sum with a Linear's result, run with it: in a torch.nn.Sequential, and in
    a forward that is straight-line code of its module's parts and of PyTorch's functions, where nothing but they can
    make a difference. Names and state dicts stay, and so do hooks; copies and torch.compile work as before.

    Args:
        model: a torch.nn.Module; it is changed. Parameters of any dtype and device that heddle.attention takes.

    Returns:
        heddle's record: `.swapped` and `.left` by the modules' names, with what was done and why not; print it.

    Shapes:
        What the model takes and gives, [b, s, dim] or any other, is as before.

    Raises:
        TypeError: not a torch.nn.Module.

    A trace sees what a module's own forward does, not what others do with its parts behind its back: where the whole
    model cannot be traced, its parts are, each on its own.

    Source: as heddle.norm_linear and heddle.attention.
    """
    if not isinstance(model, nn.Module):
        raise HeddleTypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    work = _Work(model)
    work.attentions()
    work.trace(model)
    for norm in work.norms(model):
        work.done.left[work.name(norm)] = "torch.fx cannot trace what calls it"
    work.transposed()
    work.fusions()
    return work.done
