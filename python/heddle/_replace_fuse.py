# SPDX-License-Identifier: Apache-2.0
"""``heddle.replace`` beyond norms: a Linear with the activation behind it, and with the sum that takes its result.

A forward is written anew only where nothing in it can differ from one call to the next: it is straight-line code of
the module's own parts and of a few functions of PyTorch, so that the one graph that torch.fx traces, with every part a
node, is all that it does. What the parts are is looked at in each call: a Linear with hooks, a Dropout that drops, a
sum whose sides differ in shape run as they stand there.
"""

from __future__ import annotations

import dis
import operator
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from heddle._nn_linear import activation_name, hooked, idle, stays, untouched
from heddle._torch import norm_linear

_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class FusedLinear(nn.Linear):
    """A Linear that takes what stands around it: the parent of NormedLinear."""

    def run(self, x: Tensor, activation: Any = None, residual: Tensor | None = None) -> Tensor:
        """act(forward(x)) + residual"""
        raise NotImplementedError


def _fits(linear: Any, x: Any) -> bool:
    """Whether heddle can do what calling it does."""
    kind = type(linear)
    if type(x) is not Tensor or not (kind is nn.Linear or issubclass(kind, FusedLinear)) or not untouched(linear, kind):
        return False
    device, dtype = x.device.type, linear.weight.dtype
    if device not in ("cpu", "cuda") or dtype not in _TYPES or (device == "cuda" and dtype is torch.float64):
        return False
    return x.dtype is dtype or torch.is_autocast_enabled(device)


def _run(linear: Any, x: Tensor, activation: Any = None, residual: Tensor | None = None) -> Tensor:
    if isinstance(linear, FusedLinear):
        return linear.run(x, activation, residual)
    made: Tensor = norm_linear(x, linear.weight, linear.bias, norm="none", activation=activation, residual=residual)
    return made


def activated(linear: Any, x: Any, activation: Any) -> Any:
    """activation(linear(x)); the activation is a module, or the name that norm_linear has for it."""
    name = activation if isinstance(activation, str) else activation_name(activation)
    if name is not None and _fits(linear, x):
        return _run(linear, x, name)
    made = linear(x)
    return _FUNCTIONS[activation](made) if isinstance(activation, str) else activation(made)


def _takes(linear: Any, x: Any, residual: Any) -> bool:
    """Whether residual + linear(x) is one call: no dtype changes in it, and nothing is repeated."""
    return (
        _fits(linear, x)
        and type(residual) is Tensor
        and stays(x, residual)
        and residual.shape == (*x.shape[:-1], linear.out_features)
    )


def added(module: Any, dropouts: Sequence[Any], x: Any, residual: Any) -> Any:
    """residual + dropouts(module(x)), where the module is a Linear or a Sequential."""
    still = all(map(idle, dropouts))
    if still and _takes(module, x, residual):
        return _run(module, x, None, residual)
    if still and _is_plain_sequential(module):
        return sequential(module, x, residual)
    made = module(x)
    for dropout in dropouts:
        made = dropout(made)
    return residual + made


def _is_plain_sequential(module: Any) -> bool:
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward in (nn.Sequential.forward, sequential)
        and "forward" not in vars(module)
        and not hooked(module)
    )


def sequential(self: Any, input: Any, residual: Any = None) -> Any:
    """The forward of a Sequential, and residual added to its result."""
    parts = list(self._modules.values())
    at = 0
    while at < len(parts):
        part, behind = parts[at], parts[at + 1 :]
        if behind and isinstance(part, nn.Linear) and activation_name(behind[0]) is not None:
            input = activated(part, input, behind[0])
            at += 2
        elif residual is not None and isinstance(part, nn.Linear) and all(map(idle, behind)):
            return added(part, behind, input, residual)
        else:
            input = part(input)
            at += 1
    return input if residual is None else residual + input


def in_sequential(module: nn.Sequential) -> str:
    """What of it would be one; empty: nothing."""
    parts = list(module.named_children())
    pairs = [
        f"{activation_name(other)} with {name}"
        for (name, one), (_, other) in pairwise(parts)
        if isinstance(one, nn.Linear) and activation_name(other) is not None
    ]
    return ", ".join(pairs)


# ---------------------------------------------------------------------------------------------- a class with a forward

_classes: dict[tuple[type, str], type] = {}
SEQUENTIAL = ""  # in the place of a source


def _again(original: type, source: str) -> Any:
    """An instance without attributes: of the class made of `original` here, or of itself, which does the same."""
    known = class_of(original, SEQUENTIAL, sequential) if source == SEQUENTIAL else _classes.get((original, source))
    kind: Any = known or original
    return kind.__new__(kind)


def class_of(original: type, source: str, forward: Any) -> type:
    """`original` with another forward. Copies and pickles know it by both."""
    kind = _classes.get((original, source))
    if kind is None:

        def reduce(self: Any, protocol: Any) -> Any:
            made = super(kind, self).__reduce_ex__(protocol)  # type: ignore[arg-type]
            return (_again, (original, source), *made[2:])

        names = {"forward": forward, "__reduce_ex__": reduce, "__module__": original.__module__, "heddle_made": source}
        kind = type(f"Fused{original.__name__}", (original,), names)
        _classes[original, source] = kind
    return kind


def is_made(module: Any) -> bool:
    """Whether its forward is one of these."""
    return "heddle_made" in vars(type(module))


# ----------------------------------------------------------------------------------------------------- what is followed

# Instructions by which nothing branches, is kept or is hidden.
# fmt: off
_STRAIGHT = frozenset((
    "RESUME", "NOP", "CACHE", "NOT_TAKEN", "PUSH_NULL", "PRECALL", "KW_NAMES", "POP_TOP", "SWAP", "COPY", "DUP_TOP",
    "ROT_TWO", "ROT_THREE", "LOAD_CONST", "LOAD_SMALL_INT", "LOAD_FAST", "LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW",
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "STORE_FAST", "STORE_FAST_STORE_FAST",
    "STORE_FAST_LOAD_FAST", "LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD", "CALL", "CALL_KW", "CALL_FUNCTION",
    "CALL_FUNCTION_KW", "CALL_METHOD", "BINARY_OP", "BINARY_ADD", "BINARY_MULTIPLY", "BINARY_SUBTRACT",
    "BINARY_SUBSCR", "BINARY_SLICE", "BUILD_TUPLE", "BUILD_SLICE", "UNPACK_SEQUENCE", "RETURN_VALUE", "RETURN_CONST",
))
# fmt: on
_MODULES = (torch, nn, F)
# Of tensors and of those modules: what depends on its arguments alone and changes none of them.
# fmt: off
_NAMES = frozenset((
    "nn", "functional", "gelu", "silu", "relu", "tanh", "sigmoid", "add", "mul", "cat", "chunk", "split", "view",
    "reshape", "flatten", "unflatten", "transpose", "permute", "contiguous", "squeeze", "unsqueeze", "shape", "size",
    "softmax", "matmul", "float", "type_as",
))
# fmt: on


def _untold(module: Any) -> str | None:
    """Why its forward may do something else another time, or None."""
    forward: Any = type(module).forward
    if not isinstance(forward, FunctionType) or forward.__closure__ or hasattr(forward, "__wrapped__"):
        return "its forward is wrapped"
    code = forward.__code__
    if forward.__defaults__ or forward.__kwdefaults__ or code.co_kwonlyargcount or code.co_flags & 0xC:
        return "its forward has optional arguments"
    own = {**module._modules, **module._parameters}
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname not in _STRAIGHT:
            return f"its forward is no straight line ({instruction.opname})"
        if instruction.opname == "BINARY_OP" and instruction.argrepr.endswith("="):
            return "its forward works in place"
        if instruction.opname == "LOAD_GLOBAL" and not any(forward.__globals__.get(name) is each for each in _MODULES):
            return f"its forward uses {name}"
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and (name in _NAMES) == (name in own):
            return f"its forward reads {name}"
    return None


class _OneDeep(fx.Tracer):
    """Every part is a node."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _alone(node: fx.Node, user: fx.Node) -> bool:
    """Whether a part's result goes to the very next node alone."""
    return list(node.users) == [user] and node.next is user and len(node.args) == 1 and not node.kwargs


def _named(node: fx.Node) -> str | None:
    """The name of the activation that a call of PyTorch's function is."""
    if node.op != "call_function" or len(node.args) != 1:
        return None
    if node.target is F.silu and node.kwargs in ({}, {"inplace": False}):
        return "silu"
    if node.target is F.gelu and node.kwargs.keys() <= {"approximate"}:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(str(node.kwargs.get("approximate", "none")))
    return None


class _Rewriting:
    """One module's graph, with its activations and sums in one with the Linear in front of them."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        self.module, self.graph, self.done = module, graph, list[str]()

    def part(self, node: Any) -> Any:
        called = isinstance(node, fx.Node) and node.op == "call_module"
        return self.module.get_submodule(str(node.target)) if called else None

    def put(self, chain: Sequence[Any], function: Any, args: Callable[..., tuple[Any, ...]]) -> None:
        """function of the parts that the chain calls, in the place of all of it."""
        last = chain[-1]
        with self.graph.inserting_before(last):
            called = (node for node in chain if node.op == "call_module")
            parts = [self.graph.create_node("get_attr", str(node.target)) for node in called]
            made = self.graph.call_function(function, args(*parts))
        last.replace_all_uses_with(made)
        for node in reversed(chain):
            self.graph.erase_node(node)

    def activation(self, node: fx.Node) -> None:
        front: Any = node.args[0] if node.args else None
        if not isinstance(self.part(front), nn.Linear) or not _alone(front, node):
            return
        x, name, part = front.args[0], _named(node), self.part(node)
        if name is not None:
            self.put((front, node), activated, lambda linear: (linear, x, name))
        elif part is not None and activation_name(part) is not None and len(node.args) == 1 and not node.kwargs:
            self.put((front, node), activated, lambda linear, act: (linear, x, act))
        else:
            return
        self.done.append(f"{name or activation_name(part)} with {front.target}")

    def sum(self, node: fx.Node) -> None:
        is_sum = node.op == "call_function" and node.target in (operator.add, torch.add)
        if not (is_sum or (node.op == "call_method" and node.target == "add")) or len(node.args) != 2 or node.kwargs:
            return
        if node.args[0] is node.args[1] or not self.adds(node, *node.args):
            self.adds(node, *reversed(node.args))

    def adds(self, node: fx.Node, made: Any, residual: Any) -> bool:
        chain = [node]
        while isinstance(self.part(made), nn.Dropout) and _alone(made, chain[0]):
            chain.insert(0, made)
            made = made.args[0]
        part = self.part(made)
        if not isinstance(residual, fx.Node) or not (isinstance(part, nn.Linear) or _is_plain_sequential(part)):
            return False
        if not _alone(made, chain[0]):
            return False
        x = made.args[0]
        self.put((made, *chain), added, lambda one, *drops: (one, drops, x, residual))
        self.done.append(f"a sum with {made.target}")
        return True


def rewrite(module: nn.Module) -> tuple[type | None, str]:
    """Its class with activations and sums in one with Linears, and what was found; None and why not."""
    why = _untold(module)
    if why is not None:
        return None, why
    try:
        graph = _OneDeep().trace(module)
    except Exception:  # what a model's own code may raise
        return None, "torch.fx cannot trace its forward"
    rewriting = _Rewriting(module, graph)
    for step in (rewriting.activation, rewriting.sum):
        for node in list(graph.nodes):
            step(node)
    if not rewriting.done:
        return None, ""
    graph.lint()
    code = graph.python_code("self")
    space = dict(code.globals)
    exec(compile(code.src, f"<heddle.replace of {type(module).__name__}>", "exec"), space)
    return class_of(type(module), code.src, space["forward"]), ", ".join(rewriting.done)


def wants(module: nn.Module) -> bool:
    """Whether there may be something to fuse: a Linear and an activation, or a sum, in its own forward."""
    if not any(isinstance(part, (nn.Linear, nn.Sequential)) for part in module.children()):
        return False
    forward: Any = type(module).forward
    code = getattr(forward, "__code__", None)
    if code is None or forward.__module__.partition(".")[0] in ("torch", "heddle"):
        return False
    adds = any(each.argrepr in ("+", "+=") or each.opname == "BINARY_ADD" for each in dis.get_instructions(code))
    acts = {"gelu", "silu"} & {*code.co_names} or any(activation_name(part) for part in module.children())
    return adds or bool(acts)
