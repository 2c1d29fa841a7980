# SPDX-License-Identifier: Apache-2.0
"""Which tensors hold their numbers where a kernel looks for them.

A tensor of a class of its own may mean something else than its storage says. The dispatcher asks classes with
``__torch_dispatch__`` (DTensor, FakeTensor, MaskedTensor); what it does not ask is found here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from heddle._errors import HeddleTypeError

USUAL = frozenset((Tensor, torch.nn.Parameter, type(None)))
_c: Any = torch._C
_NOT_ASKED = (_c._disabled_torch_function_impl, Tensor.__torch_function__.__func__)  # type: ignore[attr-defined]


def stream_of(device: torch.device | None) -> int:
    """PyTorch's current stream on a GPU; 0 elsewhere."""
    if device is None or device.type != "cuda":
        return 0
    return int(_c._cuda_getCurrentRawStream(device.index))


def bias_of(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """A bias in `dtype`, where what is finite stays finite: many mask with float32's least number, and a row of nothing
    else is the mean of all values. The derivative is that of a cast."""
    most = torch.finfo(dtype).max
    if most >= torch.finfo(bias.dtype).max:
        return bias.to(dtype)
    if torch.finfo(bias.dtype).eps > torch.finfo(dtype).eps:  # bfloat16 rounds float16's largest number to infinity
        bias = bias.float()
    given = bias.detach()
    finite = given.clamp(-most, most)
    if bias.requires_grad or forward_ad._current_level >= 0:  # a clamp's derivative would be 0 there
        return torch.where(given.isinf(), bias, finite + (bias - given)).to(dtype)
    # The largest number times this is 4, which nothing in `dtype` shows: it changes an infinite one alone.
    return finite.add(given, alpha=torch.finfo(bias.dtype).tiny).to(dtype)


# Asked for once: the Dynamo of torch 2.11 cannot trace the question.
_AUTOCAST = frozenset(
    each for each in ("cpu", "cuda", "xpu", "hpu", "xla", "mps", "mtia") if torch.amp.is_autocast_available(each)
)


def autocast_dtype(device: str) -> torch.dtype | None:
    """Autocast's dtype on a kind of device; None where it is off, or knows no such device ("meta")."""
    if device in _AUTOCAST and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def _is_class(kind: type, module: str, name: str) -> bool:
    """Is it the class of that name in a module that nobody need have imported? Not asked of sys.modules: Dynamo goes
    through all of that, and fails when something is imported meanwhile."""
    return kind.__module__ == module and kind.__name__ == name


def is_causal_bias(tensor: Any) -> bool:
    """A torch.nn.attention.bias.CausalBias, whose storage nobody has filled."""
    if type(tensor) in USUAL:
        return False
    return any(_is_class(kind, "torch.nn.attention.bias", "CausalBias") for kind in type(tensor).__mro__)


def overrides_functions(tensor: Any) -> bool:
    """Its class answers PyTorch's functions itself, scaled_dot_product_attention too."""
    if type(tensor) in USUAL:
        return False
    function = type(tensor).__torch_function__
    return getattr(function, "__func__", function) not in _NOT_ASKED


def stranger(name: str, tensor: Tensor) -> str | None:
    """What is wrong with a tensor's kind; None where nothing is."""
    if tensor.is_nested:
        return f"{name} is a nested tensor ({type(tensor).__name__}): give packed sequences, its values and cu_seqlens"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = tensor.dtype if tensor.is_quantized else tensor.layout
        return f"{name} is {kind}, but must be a dense tensor ({type(tensor).__name__})"
    if is_causal_bias(tensor):
        return (
            f"{name} is a CausalBias, which holds no numbers: say causal='top_left' or 'bottom_right', or give it to "
            "heddle.scaled_dot_product_attention"
        )
    return None


def need_tensors(**values: Any) -> None:
    """An error for what is not a tensor, and for a kind of tensor that heddle does not take."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise HeddleTypeError(f"{name} must be a torch.Tensor, not {type(value).__name__}")
        wrong = stranger(name, value)
        if wrong:
            raise HeddleTypeError(wrong)


def _dispatches(tensor: Any) -> bool:
    """The dispatcher asks its class (DTensor) before any kernel."""
    return isinstance(tensor, Tensor) and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def that_dispatch(values: Any) -> str:
    """The names of such classes among the arguments of an operator."""
    return ", ".join(sorted({type(value).__qualname__ for value in values if _dispatches(value)}))


def answers(tensor: Any) -> bool:
    """Its class has a __torch_dispatch__ of its own, and is none of those by which PyTorch itself traces."""
    if not _dispatches(tensor):
        return False
    kind = type(tensor)
    return not (
        _is_class(kind, "torch._subclasses.fake_tensor", "FakeTensor")
        or _is_class(kind, "torch._subclasses.functional_tensor", "FunctionalTensor")
    )


def is_usual(tensor: Any) -> bool:
    """PyTorch's own strided Tensor, or one by which PyTorch traces it."""
    if type(tensor) is not Tensor and (
        not isinstance(tensor, Tensor) or overrides_functions(tensor) or answers(tensor) or is_causal_bias(tensor)
    ):
        return False
    return tensor.layout is torch.strided and not tensor.is_nested


def others_take_part(dropout: bool) -> bool:
    """A function mode that is no default device, a transform of torch.func but vmap, or forward mode."""
    if forward_ad._current_level >= 0:
        return True
    if _c._is_torch_function_mode_enabled():
        stack = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if any(not isinstance(mode, DeviceContext) for mode in stack):
            return True
    if not _c._are_functorch_transforms_active():
        return False
    vmap = _c._functorch.TransformType.Vmap
    return dropout or any(level.key() != vmap for level in _c._functorch.get_interpreter_stack() or ())
