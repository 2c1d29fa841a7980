# SPDX-License-Identifier: Apache-2.0
"""A norm and the Linear behind it as one, of a module tree that may change afterwards.

The norm does not compute: it hands `Unnormed` on, which is x and whose norm is yet to be taken. The Linear behind it
takes both in one call; for everybody else it is norm(x), which is then computed. A norm does so only while the forward
is running that has been seen to call the two, and only where both stand in their places in that module and nobody looks
at what goes in and comes out. That is looked at in each call, and nothing refers to anything but by names: so a norm
that is called otherwise, by a slice of a Sequential for one, is a norm, and a Linear is a Linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from threading import get_ident
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heddle._errors import HeddleValueError
from heddle._kinds import autocast_dtype, is_usual
from heddle._nn_linear import lies, norm_fits, watched
from heddle._nn_multihead import own
from heddle._ops import quick_linear
from heddle._torch import long_linear

Pair = tuple[str, str]  # of a norm and its Linear, the names within the module whose forward calls both
_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_goes_long = torch.compiler.is_dynamo_compiling
_autograd: Any = torch._C._autograd


def takes(device: str, dtype: Any) -> bool:
    """Whether heddle has kernels for it."""
    return dtype in _TYPES and (device == "cpu" or (device == "cuda" and dtype is not torch.float64))


def modes(device: str) -> tuple[bool, bool, Any]:
    """What decides how a call computes, beside its arguments: grad and inference mode, and autocast's dtype."""
    inference = not _goes_long() and torch.is_inference_mode_enabled()  # which a graph has none of
    return torch.is_grad_enabled(), inference, autocast_dtype(device)


@contextmanager
def in_modes(device: str, then: tuple[bool, bool, Any]) -> Iterator[None]:
    """With the modes of another time."""
    grad, inference, cast = then
    autocast = torch.autocast(device, cast or torch.get_autocast_dtype(device), enabled=cast is not None)
    with torch.inference_mode(inference), torch.set_grad_enabled(grad), autocast:
        yield


# ------------------------------------------------------------------------------------------- what goes between the two


class Unnormed:
    """norm(x), yet to be computed. A Linear may do it in one with itself; all else that is asked of it computes it."""

    _OF_X = frozenset(("shape", "ndim", "device", "size", "dim", "numel", "layout"))

    def __init__(self, norm: Any, x: Tensor, vectors: Sequence[Tensor | None], device_type: str) -> None:
        self.norm, self.x, self.device_type, self.modes = norm, x, device_type, modes(device_type)
        self.vectors = vectors  # the norm's, read once: a parametrised one is computed at every look
        self.made: Tensor | None = None
        # Of inference tensors nobody counts, nor can a graph ask.
        self.version = None if _goes_long() or x.is_inference() else x._version

    def fits(self) -> bool:
        """Whether a Linear may compute it, here and now, as it would have been where the norm was called."""
        self.need_x()
        # Whoever has asked for it may have changed it.
        return self.made is None and modes(self.device_type) == self.modes

    def need_x(self) -> None:
        if self.version is not None and not _goes_long() and self.x._version != self.version:
            raise HeddleValueError(
                f"what {type(self.norm).__name__} was given has been changed in place before the Linear behind it "
                "took it: heddle.replace cannot join the norms of a model that does so"
            )

    def tensor(self) -> Tensor:
        """norm(x) of PyTorch, as it would have been made at once."""
        if self.made is None:
            self.need_x()
            with in_modes(self.device_type, self.modes):
                self.made = self.norm.computed(self.x, *self.vectors)
        return self.made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*real(args), **real(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.x if name in self._OF_X else self.tensor(), name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        made: Any = self.tensor()
        return made.__reduce_ex__(protocol)


def _operator(name: str) -> Callable[..., Any]:
    def method(self: Unnormed, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*real(args))

    return method


def _attribute(name: str) -> property:
    """One that can be set, as requires_grad can."""
    return property(
        lambda self: getattr(self.tensor(), name), lambda self, value: setattr(self.tensor(), name, real(value))
    )


_OPERATORS = {f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge", "repr", "format")}  # that any object has
for _name in {*dir(Tensor)} - ({*dir(Unnormed)} - _OPERATORS) - Unnormed._OF_X:
    _of_python, _called = _name.startswith("__"), callable(getattr(Tensor, _name))
    if _called and _of_python and not _name.startswith("__torch"):
        setattr(Unnormed, _name, _operator(_name))
    elif not (_called or _of_python):
        setattr(Unnormed, _name, _attribute(_name))


def real(value: Any) -> Any:
    """With tensors for what was yet to be computed, in tuples, lists and dicts, too."""
    kind = type(value)
    if kind is Unnormed:
        return value.tensor()
    if kind is tuple or kind is list:
        return kind([real(each) for each in value])
    return {key: real(each) for key, each in value.items()} if kind is dict else value


# ------------------------------------------------------------------------------------------------------------ modules


class Passed(nn.Module):
    """A norm whose Linear may do its work."""

    # The threads in which a forward runs that calls both, and where: a checkpoint within it runs its part again later.
    passing: dict[int, Any] | None = None
    vectors: tuple[str, ...] = ("weight",)

    def alone(self, x: Any) -> Any:
        """What the norm's own class computes."""
        return super().forward(x)

    def computed(self, x: Tensor, *vectors: Tensor | None) -> Tensor:
        """The same, of vectors that have been read."""
        raise NotImplementedError

    def passed(self, given: Any) -> Any:
        """What the norm's class gives; within the forward that calls both what stands for it."""
        x = real(given)
        if self.passing and is_usual(x) and self.passing.get(_thread(), False) == saved_how():
            device = x.device.type
            # Whether norm_linear takes it; what is wrong with it PyTorch's own norm says.
            if takes(device, x.dtype) and x.dim() != 0:
                vectors = own(self, *self.vectors)
                if norm_fits(self, x, vectors):
                    return Unnormed(self, x, vectors, device)
                return self.computed(x, *vectors)
        return self.alone(x)


class PassedLayerNorm(Passed, nn.LayerNorm):
    """A LayerNorm that the Linear behind it does in one with itself. Its parameters are still here."""

    vectors = ("weight", "bias")

    def computed(self, x: Tensor, *vectors: Tensor | None) -> Tensor:
        """As torch.nn.LayerNorm's forward."""
        weight, bias = vectors
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)

    def forward(self, input: Any) -> Any:
        """As torch.nn.LayerNorm's."""
        return self.passed(input)


class PassedRMSNorm(Passed, nn.RMSNorm):
    """A RMSNorm that the Linear behind it does in one with itself. Its parameters are still here."""

    def computed(self, x: Tensor, *vectors: Tensor | None) -> Tensor:
        """As torch.nn.RMSNorm's forward."""
        (weight,) = vectors
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)

    def forward(self, x: Any) -> Any:
        """As torch.nn.RMSNorm's, whose argument has another name."""
        return self.passed(x)


class NormedLinear(nn.Linear):
    """A Linear that computes the norm in front of it, whose parameters stay where they were."""

    def forward(self, input: Any) -> Any:
        """[..., in_features] to [..., out_features]; errors as heddle.norm_linear."""
        if type(input) is Unnormed:
            if input.fits():
                weight, bias = own(self, "weight", "bias")
                if lies(weight, bias):
                    return _joined(weight, bias, input)
                return F.linear(input.tensor(), weight, bias)
            input = input.tensor()
        return super().forward(input)


def normed(linear: Any, given: Unnormed, activation: Any = None, residual: Tensor | None = None) -> Any:
    """act(linear(norm(x))) + residual"""
    weight, bias = own(linear, "weight", "bias")
    return _joined(weight, bias, given, activation, residual)


def _joined(
    weight: Tensor, bias: Tensor | None, given: Unnormed, activation: Any = None, residual: Tensor | None = None
) -> Any:
    norm, x = given.norm, given.x
    eps = norm.eps
    if eps is None:  # as torch.nn.RMSNorm has it, whose sums are in float32
        eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
    kind: Literal["layer", "rms"] = "layer" if isinstance(norm, nn.LayerNorm) else "rms"
    gamma, beta = given.vectors if kind == "layer" else (*given.vectors, None)
    # What norm_linear does, one call less.
    made = quick_linear(x, weight, bias, gamma, beta, eps, kind, activation, residual)
    if made is NotImplemented:
        made = long_linear(x, weight, bias, gamma, beta, eps, kind, activation, residual, False)
    return made


# --------------------------------------------------------------------------------------------- the forward around both


def _seen(module: Any) -> bool:
    """Whether somebody but its class has to do with a call: as `hooked` and `untouched` ask, but sooner."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    return "forward" in vars(module) or module._compiled_call_impl is not None


def saved_how() -> Any:
    """The innermost hooks of what autograd saves, or None: torch.utils.checkpoint is such."""
    return None if _goes_long() else _autograd._top_saved_tensors_default_hooks(False)


def standing(module: Any, paths: Sequence[tuple[Sequence[str], Sequence[str]]]) -> list[Any]:
    """The norms that stand with their Linears where the names say, of which each may do as it likes."""
    found: list[Any] = []
    if watched():
        return found
    for path, other in paths:
        norm = linear = module
        try:
            for name in path:
                norm = norm._modules[name]
            for name in other:
                linear = linear._modules[name]
        except (KeyError, AttributeError):  # they are there no more
            continue
        joined = isinstance(norm, Passed) and norm.passing is not None and isinstance(linear, NormedLinear)
        if joined and not (_seen(norm) or _seen(linear)):
            found.append(norm)
    return found


def paths_of(pairs: Sequence[Pair]) -> list[tuple[list[str], list[str]]]:
    return [(norm.split("."), linear.split(".")) for norm, linear in pairs]


def _thread() -> int:
    return 0 if _goes_long() else get_ident()  # which a graph cannot ask


def paired(original: Any, forward: Callable[..., Any] | None, pairs: Sequence[Pair]) -> Callable[..., Any]:
    """A forward, or that of a class, in which norms pass."""
    paths = paths_of(pairs)

    @wraps(forward or original.forward)
    def run(self: Any, *args: Any, **options: Any) -> Any:
        norms, thread = standing(self, paths), _thread()
        if norms:
            hooks = saved_how()
            for norm in norms:
                norm.passing[thread] = hooks
        try:
            made = (forward or original.forward)(self, *args, **options)
            return made if type(made) is Tensor else real(made)
        finally:
            for norm in norms:
                norm.passing.pop(thread, None)

    return run


def join(norm: Any, linear: Any) -> None:
    """Makes of a norm and a Linear what can be a pair; what they compute stays."""
    norm.__class__ = PassedLayerNorm if isinstance(norm, nn.LayerNorm) else PassedRMSNorm
    linear.__class__ = NormedLinear
    norm.passing = {}
