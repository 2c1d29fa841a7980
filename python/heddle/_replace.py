# SPDX-License-Identifier: Apache-2.0
"""``heddle.replace(model)``: norms with the Linear behind them, Linears with what is behind them, and attentions, of a
module tree that is there already.

Modules change their class and nothing else: parameters, hooks, names and state dicts stay. A norm and a Linear are
joined where the norm's result goes to that Linear alone: side by side in a torch.nn.Sequential, or in all graphs that
torch.fx traces of a module that holds both. Whether they still are what they were then, each call looks
(`_replace_pairs`).
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import torch
from torch import fx, nn

import heddle
from heddle import _replace_fuse, _replace_pairs
from heddle._errors import HeddleTypeError
from heddle._nn_linear import eps_fits, hooked
from heddle._nn_multihead import MultiheadAttention, TransformerEncoderLayer
from heddle._replace_pairs import NormedLinear, Pair, PassedLayerNorm, PassedRMSNorm

Norms = (nn.LayerNorm, nn.RMSNorm)
_JOINABLE_NORMS, _JOINABLE_LINEARS = (*Norms, PassedLayerNorm, PassedRMSNorm), (nn.Linear, NormedLinear)
_WIDEST = 512  # features of a head that heddle.attention takes


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


def _other_norm(norm: Any, features: int) -> str | None:
    """Why a norm is none that heddle.norm_linear takes, in front of a Linear of so many features; or None."""
    shape = norm.normalized_shape
    if shape != (features,):
        return f"it normalises {[*shape] if isinstance(shape, tuple) else shape}, but its Linear takes {features}"
    return None if eps_fits(norm) else f"its eps is {norm.eps}"


def _named_modules(module: nn.Module, path: str = "", within: tuple[nn.Module, ...] = ()) -> Iterator[Any]:
    """All names of all modules, but no module within itself: parts may hold what holds them."""
    yield path, module
    within = (*within, module)
    for name, part in module._modules.items():
        if part is not None and not any(part is each for each in within):
            yield from _named_modules(part, f"{path}.{name}" if path else name, within)


# ----------------------------------------------------------------------------------------------------------- tracing

_DEVICES = ("cpu", "cuda")


class _Tracer(fx.Tracer):
    """Follows every module but those of torch.nn. Functions of heddle are nodes, like those of torch.

    A node's meta has what a graph knows nothing of: the modes in which it is called, and the modules whose forward runs
    then, but for those that have begun a checkpoint (or the like) since."""

    def __init__(self) -> None:
        super().__init__(autowrap_modules=cast(Any, (math, heddle)))
        self.running: list[tuple[nn.Module, Any]] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(
            m, (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, *Norms, nn.Linear)
        ):
            return True
        return super().is_leaf_module(m, module_qualified_name)

    def trace(self, root: Any, *args: Any, **options: Any) -> fx.Graph:
        self.running = [(root, _replace_pairs.saved_how())]
        return super().trace(root, *args, **options)

    def call_module(self, m: nn.Module, *args: Any) -> Any:
        self.running.append((m, _replace_pairs.saved_how()))
        try:
            return super().call_module(m, *args)
        finally:
            self.running.pop()

    def create_node(self, *args: Any, **options: Any) -> fx.Node:
        node = super().create_node(*args, **options)
        now = _replace_pairs.saved_how()
        node.meta["modes"] = [*map(_replace_pairs.modes, _DEVICES)]
        node.meta["running"] = [module for module, hooks in self.running if hooks == now]
        return node


@contextmanager
def _around(other: bool) -> Iterator[None]:
    """The modes of a call: gradients recorded and no autocast, or just the other way, so that each shows what enters
    its opposite."""
    before = [(each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in _DEVICES]
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(not other):
            for each in _DEVICES:  # not torch.autocast, which warns where there is no GPU
                torch.set_autocast_enabled(each, other)
                torch.set_autocast_dtype(each, torch.float16)
            yield
    finally:
        for each, enabled, dtype in before:
            torch.set_autocast_enabled(each, enabled)
            torch.set_autocast_dtype(each, dtype)
        torch.clear_autocast_cache()


def _traces(module: nn.Module) -> list[fx.Graph] | None:
    """All ways through a module: in training and not, with the arguments that need not be given and without them, and
    in two modes."""
    before = [
        (each, dict(each.__dict__), {k: dict(v) for k, v in each.__dict__.items() if isinstance(v, dict)})
        for each in module.modules()
    ]
    trained = [each.training for each, _, _ in before]
    graphs = []
    try:
        optional = {
            name: parameter.default
            for name, parameter in inspect.signature(module.forward).parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }
        for _, attributes, tables in before:  # forward may count in its buffers
            for name, buffer in tables.get("_buffers", {}).items():
                if buffer is not None and not nn.parameter.is_lazy(buffer):
                    attributes["_buffers"][name] = buffer.clone()
        for training in (False, True):
            for each, _, _ in before:
                each.training = training
            for concrete in ({}, optional) if optional else ({},):
                for other in (False, True):
                    with _around(other):
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
        for (each, _, _), training in zip(before, trained, strict=True):
            if each.training != training:  # scripted ones keep it elsewhere
                each.training = training
    return graphs


def _asks_for_shape(node: fx.Node) -> bool:
    """What a norm does not change."""
    if node.op == "call_method":
        return node.target in ("size", "dim")
    return node.op == "call_function" and node.target is getattr and node.args[1] in ("shape", "ndim", "device")


def _runs_between(node: fx.Node, user: fx.Node) -> fx.Node | None:
    """What may change a norm's argument before the Linear takes it: all but questions of shapes, and their answers."""
    answers: set[fx.Node] = set()
    while (node := node.next) is not user:
        of_answers = node.op == "call_function" and node.all_input_nodes and answers.issuperset(node.all_input_nodes)
        if _asks_for_shape(node) or of_answers:
            answers.add(node)
        elif node.op != "get_attr":
            return node
    return None


def _taker(node: fx.Node) -> tuple[fx.Node | None, str]:
    """The call of a module that alone takes a norm's result, and takes it at once, or why there is none."""
    users = [user for user in node.users if not _asks_for_shape(user)]
    user = users[0] if len(users) == 1 else node
    if user.op != "call_module" or user.args != (node,) or user.kwargs:
        return None, "its result goes to something else than one Linear"
    if user.meta["modes"] != node.meta["modes"]:
        return None, f"{user.target}, which takes its result, runs in another mode (torch.no_grad(), autocast)"
    between = _runs_between(node, user)
    if between is not None:
        return None, f"{between} runs between it and {user.target}, which takes its result"
    return user, ""


# ------------------------------------------------------------------------------------------------------------ pairs


class _Work:
    def __init__(self, model: nn.Module) -> None:
        self.model, self.done = model, Replaced()
        self.names: dict[nn.Module, list[str]] = {}
        self.others: set[nn.Module | None] = set()  # norms of layers and of pairs that were heddle's before
        self.pairs: dict[nn.Module, list[tuple[Pair, Any, Any]]] = {}  # by the module whose forward calls both
        self.followed: set[nn.Module] = set()
        for name, module in _named_modules(model):
            self.names.setdefault(module, []).append(name)

    def name(self, module: nn.Module) -> str:
        return self.names[module][0]

    def why_not(self, norm: Any, linear: Any) -> str | None:
        """What is in the way of one for both."""
        both = ((norm, "the norm", _JOINABLE_NORMS), (linear, "what takes its result", _JOINABLE_LINEARS))
        for module, kind, joinable in both:
            if type(module) not in joinable:
                return f"{kind} is of class {type(module).__name__}"
            if len(self.names[module]) > 1:
                return f"{kind} is in the model {len(self.names[module])} times: {', '.join(self.names[module])}"
            trouble = _own_forward(module)
            if trouble:
                return f"{kind}: {trouble}"
        kinds = {(p.dtype, p.device) for module in (norm, linear) for p in module.parameters()}
        if len(kinds) > 1:
            return f"its parameters and its Linear's are of {' and '.join(sorted(str(kind[0]) for kind in kinds))}"
        if min(linear.in_features, linear.out_features) < 1:
            return f"its Linear is from {linear.in_features} features to {linear.out_features}"
        return _other_norm(norm, linear.in_features)

    def join(self, norm: Any, linear: Any, around: nn.Module, proof: str) -> None:
        """Plans it. around: the module whose forward calls both."""
        name, other = self.name(norm), self.name(linear)
        trouble = self.why_not(norm, linear)
        of_around = _replace_fuse.cannot_be_made(around)
        if not trouble and of_around:
            trouble = f"{self.name(around) or 'the model'}, whose forward calls it: {of_around}"
        if trouble:
            self.done.left[name] = trouble
            return
        inside = {module: path for path, module in around.named_modules()}
        self.pairs.setdefault(around, []).append(((inside[norm], inside[linear]), norm, linear))
        kind = "LayerNorm" if isinstance(norm, nn.LayerNorm) else "RMSNorm"
        self.done.swapped[name] = f"{kind} with the Linear {other} ({proof})"

    def joined(self) -> None:
        """The norms of pairs that stand."""
        for module in self.model.modules():
            _, _, pairs, _ = _replace_fuse.made_of(type(module)) or (None, None, (), None)
            self.others |= {*_replace_pairs.standing(module, _replace_pairs.paths_of(pairs))}

    def norms(self, module: nn.Module) -> list[nn.Module]:
        """Those of which nothing is known yet."""
        known = self.done.swapped.keys() | self.done.left.keys()
        there = (each for each in module.modules() if isinstance(each, Norms))
        return [each for each in there if each not in self.others and self.name(each) not in known]

    def trace(self, module: nn.Module) -> None:
        """A module's norms by its graphs; where it has none, by those of its parts."""
        if module in self.followed or not self.norms(module) or isinstance(module, Norms):
            return
        self.followed.add(module)
        opaque = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.ModuleList, nn.ModuleDict)
        graphs = None if isinstance(module, opaque) else _traces(module)
        if graphs is None:
            for part in module.children():
                self.trace(part)
            if isinstance(module, nn.Sequential) and _replace_fuse.is_plain_sequential(module):
                for one, other in pairwise(module.children()):
                    if isinstance(other, nn.Linear) and one in self.norms(module):
                        self.join(one, other, module, "side by side")
            return
        for norm in self.norms(module):
            inside = self.name(norm).removeprefix(self.name(module)).removeprefix(".")
            linear, why = self.follow(graphs, inside)
            if linear is None:
                self.done.left[self.name(norm)] = why
                continue
            taker = module.get_submodule(linear)
            around = self.around(graphs, (inside, linear), {norm, taker})
            if around is None:
                self.done.left[self.name(norm)] = f"a checkpoint is begun around it and {linear} in a forward"
            else:
                self.join(norm, taker, around, "by torch.fx")

    def follow(self, graphs: list[fx.Graph], name: str) -> tuple[str | None, str]:
        """The Linear that alone takes a norm's result in all graphs, or why there is none."""
        found = set()
        for graph in graphs:
            called = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
            if called[name] == 0:
                return None, "no trace of the model comes to it"
            if called[name] > 1:
                return None, f"it is called {called[name]} times"
            (node,) = (node for node in graph.nodes if node.op == "call_module" and node.target == name)
            user, why = _taker(node)
            if user is None:
                return None, why
            taker = str(user.target)
            if called[taker] > 1:
                return None, f"{taker}, which takes its result, is called {called[taker]} times"
            found.add(taker)
        return (found.pop(), "") if len(found) == 1 else (None, "its result goes to different modules")

    def around(self, graphs: list[fx.Graph], names: tuple[str, str], both: set[nn.Module]) -> nn.Module | None:
        """The innermost module that holds both and whose forward runs when the one is called and when the other is."""
        ways: list[list[nn.Module]] = [
            node.meta["running"] for graph in graphs for node in graph.nodes if str(node.target) in names
        ]
        inner = (each for each in reversed(ways[0]) if all(each in way for way in ways) and both <= {*each.modules()})
        return next((each for each in inner if each not in both), None)

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
        """The forwards that pairs are called in; and what stands behind a Linear, in Sequentials and in forwards that
        can be followed."""
        for module in list(self.model.modules()):
            name = self.name(module)
            try:
                found = self.fuse(module)
            except Exception as error:  # what a model's own classes may raise, which theirs is derived from
                why = f"its class cannot have another forward ({type(error).__name__}: {error})"
                self.done.left[name] = why
                for _, norm, _ in self.pairs.get(module, ()):
                    del self.done.swapped[self.name(norm)]
                    self.done.left[self.name(norm)] = f"{name or 'the model'}, whose forward calls it: {why}"
            else:
                for _, norm, linear in self.pairs.get(module, ()):
                    _replace_pairs.join(norm, linear)
                if found:
                    self.done.swapped[name] = found

    def fuse(self, module: nn.Module) -> str:
        """Gives it a class with another forward, where that is of use; returns what stands behind Linears."""
        made = _replace_fuse
        original, source, known, forward = made.made_of(type(module)) or (type(module), None, (), None)
        found, pairs = "", tuple(sorted({*known, *(pair for pair, _, _ in self.pairs.get(module, ()))}))
        if source is None and not made.cannot_be_made(module):
            forward = getattr(original, "forward", None)
            if isinstance(module, nn.Sequential) and forward is nn.Sequential.forward:
                found = made.in_sequential(module)
                source = made.SEQUENTIAL if found or pairs else None
            elif made.wants(module, forward):
                again = made.rewrite(module, forward)
                if not isinstance(again, str):
                    source, forward, what = again
                    found = f"{what} (its forward, by torch.fx)"
                elif again:
                    self.done.left[self.name(module)] = f"activations and sums: {again}"
        if source is not None or pairs:
            module.__class__ = made.class_of(original, source, pairs, forward)
        return found

    # ------------------------------------------------------------------------------------------------- attentions

    def attentions(self) -> None:
        for module in list(self.model.modules()):
            name = self.name(module)
            if isinstance(module, TransformerEncoderLayer):
                self.others |= {module._modules.get("norm1"), module._modules.get("norm2")}
            elif isinstance(module, MultiheadAttention):
                continue
            elif isinstance(module, nn.TransformerEncoderLayer):
                self.encoder_layer(module)
            elif isinstance(module, nn.MultiheadAttention):
                trouble = _own_class(module, nn.MultiheadAttention) or _wide_heads(module)
                if trouble:
                    self.done.left[name] = trouble
                else:
                    module.__class__ = MultiheadAttention
                    self.done.swapped[name] = "MultiheadAttention"
        for module in self.model.modules():
            if isinstance(module, nn.TransformerEncoder) and any(
                isinstance(layer, TransformerEncoderLayer) for layer in module.modules()
            ):
                module.use_nested_tensor = False  # PyTorch's own fast path, which would hand them nested tensors

    def encoder_layer(self, module: nn.TransformerEncoderLayer) -> None:
        name = self.name(module)
        trouble = _own_class(module, nn.TransformerEncoderLayer)
        norms = {"norm1": nn.LayerNorm, "norm2": nn.LayerNorm}
        kinds = {"self_attn": nn.MultiheadAttention, **norms, "linear1": nn.Linear, "linear2": nn.Linear}
        parts: dict[str, Any] = {part: module._modules.get(part) for part in kinds}
        for part, kind in kinds.items():
            # Post-norm calls every part but the attention as it is; pre-norm reads the parameters of norms and linear1.
            if trouble or not (module.norm_first or part == "self_attn"):
                continue
            trouble = _own_class(parts[part], kind)
            if not trouble and part == "self_attn":
                trouble = _wide_heads(parts[part])
            elif not trouble and part in norms:
                trouble = _other_norm(parts[part], parts["self_attn"].embed_dim)
            trouble = trouble and f"{name}.{part}: {trouble}".removeprefix(".")
        if trouble:
            self.done.left[name] = trouble
            return
        module.__dict__.pop("activation_relu_or_gelu", None)
        module.__class__, module.self_attn.__class__ = TransformerEncoderLayer, MultiheadAttention
        self.done.swapped[name] = f"TransformerEncoderLayer, {'both norms fused' if module.norm_first else 'post-norm'}"
        for part in (each for each in map(parts.get, norms) if each in self.names):
            if module.norm_first:
                self.done.swapped[self.name(part)] = f"with the layer {name or 'itself'}"
            else:
                self.done.left[self.name(part)] = "post-norm: a sum stands between it and the next Linear"


def _own_class(module: Any, kind: Any) -> str | None:
    return f"it is of class {type(module).__name__}" if type(module) is not kind else _own_forward(module)


def _wide_heads(module: nn.MultiheadAttention) -> str | None:
    return f"its heads have {module.head_dim} features, more than {_WIDEST}" if module.head_dim > _WIDEST else None


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

    Where the whole model cannot be traced, its parts are, each on its own. What changes afterwards (another part, a
    slice, a hook) is seen by the next call, which computes a norm by itself where it and its Linear stand together no
    more.

    Source: as heddle.norm_linear and heddle.attention.
    """
    if not isinstance(model, nn.Module):
        raise HeddleTypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    work = _Work(model)
    before = [(module, type(module), dict(module.__dict__)) for module in work.names]
    try:
        work.attentions()
        work.joined()
        work.trace(model)
        for norm in work.norms(model):
            work.done.left[work.name(norm)] = "torch.fx cannot trace what calls it"
        work.transposed()
        work.fusions()
    except BaseException:  # nothing stays half done
        for module, kind, attributes in before:
            if type(module) is not kind:
                module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(attributes)
        raise
    return work.done
