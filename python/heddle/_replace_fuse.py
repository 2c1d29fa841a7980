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

from heddle._kinds import is_usual
from heddle._nn_linear import activation_name, hooked, idle, lies, stays, untouched, watched
from heddle._replace_pairs import NormedLinear, Pair, Unnormed, normed, paired, takes
from heddle._torch import norm_linear

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


def _fits(linear: Any, x: Any) -> bool:
    """Whether heddle can do what calling it does."""
    kind = type(linear)
    if kind not in (nn.Linear, NormedLinear) or not untouched(linear, kind):
        return False
    if type(x) is Unnormed:
        if not x.fits():
            return False
        x = x.x
    weight = linear.weight
    if not is_usual(x) or not lies(weight, linear.bias) or not takes(x.device.type, weight.dtype):
        return False
    return x.dtype is weight.dtype or torch.is_autocast_enabled(x.device.type)


def _run(linear: Any, x: Any, activation: Any = None, residual: Tensor | None = None) -> Any:
    if type(x) is Unnormed:
        return normed(linear, x, activation, residual)
    return norm_linear(x, linear.weight, linear.bias, norm="none", activation=activation, residual=residual)


def activated(linear: Any, x: Any, activation: Any) -> Any:
    """activation(linear(x)); the activation is a module, or the name that norm_linear has for it."""
    name = activation if isinstance(activation, str) else activation_name(activation)
    if name is not None and _fits(linear, x):
        return _run(linear, x, name)
    made = linear(x)
    return _FUNCTIONS[activation](made) if isinstance(activation, str) else activation(made)


def _takes(linear: Any, x: Any, residual: Any) -> bool:
    """Whether residual + linear(x) is one call: no dtype changes in it, and nothing is repeated."""
    if not _fits(linear, x) or not is_usual(residual):
        return False
    given = x.x if type(x) is Unnormed else x
    return stays(given, linear.weight, residual)


def added(module: Any, dropouts: Sequence[Any], x: Any, residual: Any) -> Any:
    """residual + dropouts(module(x)), where the module is a Linear or a Sequential."""
    still = all(map(idle, dropouts))
    if still and _takes(module, x, residual):
        return _run(module, x, None, residual)
    if still and is_plain_sequential(module):
        return getattr(type(module), "heddle_added", sequential)(module, x, residual)
    made = module(x)
    for dropout in dropouts:
        made = dropout(made)
    return residual + made


def is_plain_sequential(module: Any) -> bool:
    return (
        isinstance(module, nn.Sequential)
        and (type(module).forward is nn.Sequential.forward or getattr(module, "heddle_made", (None,))[-1] is alone)
        and "forward" not in vars(module)
        and not (hooked(module) or watched())
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

_classes: dict[tuple[type, str | None, tuple[Pair, ...]], type] = {}
SEQUENTIAL = ""  # in the place of a source


def alone(self: Any, input: Any) -> Any:
    """The forward of a Sequential, with the arguments that it had."""
    return sequential(self, input)


def _again(original: type, source: str | None, pairs: tuple[Pair, ...] = ()) -> Any:
    """An instance without attributes: of the class made of `original`; where its source is not known in this process,
    of one without it, which does the same."""
    if source and (original, source, pairs) not in _classes:
        source = None
    kind: Any = original if source is None and not pairs else class_of(original, source, pairs)
    return kind.__new__(kind)


def class_of(original: type, source: str | None, pairs: tuple[Pair, ...] = (), forward: Any = None) -> type:
    """`original` with another forward, whose source this is (None: with its own), and with pairs in that. Copies and
    pickles know it by these. It has the name of the original, since some know a module by its class's name."""
    kind = _classes.get((original, source, pairs))
    if kind is None:
        forward = alone if source == SEQUENTIAL else forward if source else None
        more = {}
        if source == SEQUENTIAL:
            more["heddle_added"] = paired(original, sequential, pairs) if pairs else sequential

        def reduce(self: Any, protocol: Any) -> Any:
            made = super(kind, self).__reduce_ex__(protocol)  # type: ignore[arg-type]
            return (_again, (original, source, pairs), *made[2:])

        names = {
            "forward": paired(original, forward, pairs) if pairs else forward,
            "__reduce_ex__": reduce,
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "heddle_made": (original, source, pairs, forward),
            **more,
        }
        kind = type(original.__name__, (original,), names)
        _classes[original, source, pairs] = kind
    return kind


def made_of(kind: type) -> tuple[type, str | None, tuple[Pair, ...], Any] | None:
    """What class_of made it of; the forward is None where it is that of the original."""
    made: tuple[type, str | None, tuple[Pair, ...], Any] | None = vars(kind).get("heddle_made")
    return made


def cannot_be_made(module: Any) -> str | None:
    """Why its class can have no other forward, or None."""
    kind = type(module)
    if "forward" in vars(module):
        return "its forward was replaced"
    # What pickles or copies by itself makes no more than instances of the class that it knows.
    ways: Any = (kind.__reduce_ex__, kind.__reduce__)
    own = ways == (object.__reduce_ex__, object.__reduce__) and not hasattr(kind, "__deepcopy__")
    return None if own or made_of(kind) else "its class copies itself"


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


def _untold(module: Any, forward: Any) -> str | None:
    """Why its forward may do something else another time, or None."""
    if not isinstance(forward, FunctionType) or forward.__closure__ or hasattr(forward, "__wrapped__"):
        return "its forward is wrapped"
    code = forward.__code__
    if forward.__defaults__ or forward.__kwdefaults__ or code.co_kwonlyargcount or code.co_flags & 0xC:
        return "its forward has optional arguments"
    if "self" in code.co_varnames[1 : code.co_argcount]:  # which the rewritten one calls its module
        return "its forward calls an argument self"
    own = {name for name, each in (*module._modules.items(), *module._parameters.items()) if each is not None}
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
        if node.args[0] is not node.args[1] and not self.adds(node, *node.args):
            self.adds(node, *reversed(node.args))

    def adds(self, node: fx.Node, made: Any, residual: Any) -> bool:
        chain = [node]
        while isinstance(self.part(made), nn.Dropout) and _alone(made, chain[0]):
            chain.insert(0, made)
            made = made.args[0]
        part = self.part(made)
        if not isinstance(residual, fx.Node) or not (isinstance(part, nn.Linear) or is_plain_sequential(part)):
            return False
        if not _alone(made, chain[0]):
            return False
        x = made.args[0]
        self.put((made, *chain), added, lambda one, *drops: (one, drops, x, residual))
        self.done.append(f"a sum with {made.target}")
        return True


def _other_way(module: nn.Module, graph: fx.Graph) -> str | None:
    """Why its forward may come to another part some day than to the one whose name a graph has, or None: by another
    name of that part, or by its place in a list, of which the graph knows what was there."""
    paths = [*module.named_modules(remove_duplicate=False), *module.named_parameters(remove_duplicate=False)]
    known = dict[str, Any](paths)
    for node in graph.nodes:
        if node.op not in ("call_module", "get_attr"):
            continue
        target = str(node.target)
        if "." in target or target not in known:
            return f"its forward looks into a part ({target})"
        names = [name for name, each in paths if each is known[target]]
        if len(names) > 1:
            return f"its forward uses what is in it {len(names)} times ({', '.join(names)})"
    return None


def rewrite(module: nn.Module, forward: Any) -> tuple[str, Any, str] | str:
    """The source of its forward with activations and sums in one with Linears, that forward, and what was found; or
    why there is none, empty where there is nothing to find."""
    why = _untold(module, forward)
    if why is not None:
        return why
    try:
        graph = _OneDeep().trace(module)
    except Exception:  # what a model's own code may raise
        return "torch.fx cannot trace its forward"
    try:
        return _rewritten(module, graph, forward)
    except Exception as error:  # what torch.fx cannot write; the module is as it was
        return f"torch.fx cannot rewrite its forward ({type(error).__name__}: {error})"


def _rewritten(module: nn.Module, graph: fx.Graph, forward: Any) -> tuple[str, Any, str] | str:
    rewriting = _Rewriting(module, graph)
    for step in (rewriting.activation, rewriting.sum):
        for node in list(graph.nodes):
            step(node)
    if not rewriting.done:
        return ""
    why = _other_way(module, graph)
    if why is not None:
        return why
    for node in graph.nodes:
        node.type = None  # annotations, of which torch.fx cannot write all
    graph.lint()
    code = graph.python_code("self")
    space = dict(code.globals)
    exec(compile(code.src, f"<heddle.replace of {type(module).__name__}>", "exec"), space)
    made = space["forward"]
    made.__annotations__, made.__doc__ = dict(forward.__annotations__), forward.__doc__
    return code.src, made, ", ".join(rewriting.done)


def wants(module: nn.Module, forward: Any) -> bool:
    """Whether there may be something to fuse: a Linear and an activation, or a sum, in its own forward."""
    if not any(isinstance(part, (nn.Linear, nn.Sequential)) for part in module.children()):
        return False
    if not isinstance(forward, FunctionType) or str(forward.__module__).partition(".")[0] in ("torch", "heddle"):
        return False
    code = forward.__code__
    adds = any(each.argrepr in ("+", "+=") or each.opname == "BINARY_ADD" for each in dis.get_instructions(code))
    acts = {"gelu", "silu"} & {*code.co_names} or any(activation_name(part) for part in module.children())
    return adds or bool(acts)
