# SPDX-License-Identifier: Apache-2.0
"""Which models of transformers call the attention that is registered, and what becomes of those that do not."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import re
import sys
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from heddle import _hf_batches, _hf_written_out

_names: set[str] = set()  # that heddle is registered under
_heed = True  # transformers' masks heed config.is_causal; known when a name is registered
_masking: Any = None  # transformers.masking_utils; likewise, as torch.compile traces no import
_asking = 0  # calls of models that are under way and want attention's weights
_lock = threading.Lock()
_as_eager: set[type] = set()  # classes of configurations; filled when models are made, since torch.compile reads it


@dataclass(frozen=True)
class _File:
    """What the source of a model's file says."""

    own: bool  # attention of its own, which no registry reaches
    table: bool  # tables of classes by implementation, with one for sdpa in each
    asks: bool  # whether the implementation is called sdpa, which takes heddle for one that always has masks
    adds: bool  # something of its own to the mask, which therefore has to be there (Doge)


@functools.cache
def _file(name: str) -> _File:
    module = sys.modules.get(name)
    try:
        source = inspect.getsource(module) if module is not None else ""
    except (OSError, TypeError):
        source = ""
    layers = re.search(r"^class \w*(Attention|Attn)\w*\((nn|torch\.nn)\.Module\b", source, re.MULTILINE)
    tables = list(_tables(module))
    short = any("sdpa" not in table for table in tables)
    return _File(
        own=short or ((layers is not None or not source) and "ALL_ATTENTION_FUNCTIONS" not in source),
        table=bool(tables) and not short,
        asks='_attn_implementation == "sdpa"' in source,
        adds="def prepare_dynamic_mask(" in source,
    )


def _tables(module: Any) -> Any:
    """The dictionaries of a module that have a class of layers by the name of the implementation."""
    for name, value in list(vars(module).items()) if module is not None else ():
        if name.endswith("ATTENTION_CLASSES") and isinstance(value, dict) and isinstance(value.get("eager"), type):
            yield value


def _files(kind: type) -> list[str]:
    """The modules that a model's class and its bases are of, transformers' common ones left out."""
    from transformers import PreTrainedModel

    mine = [c for c in kind.__mro__ if issubclass(c, PreTrainedModel) and c is not PreTrainedModel]
    return [c.__module__ for c in mine]


# Wrong in transformers itself.
_BROKEN_BEFORE_5 = {
    "transformers.models.moshi.": "without an attention_mask its eager layers see the future, and past its sliding "
    "window the model cuts the masks of a dynamic cache at the wrong end",
}


def _written_out(kind: type) -> set[str]:
    """The names of a model's layers that write their attention out and that heddle knows how to follow."""
    own = [sys.modules[file] for file in _files(kind) if _file(file).own]
    return {name for name in _hf_written_out.LAYERS if any(hasattr(module, name) for module in own)}


def _layers(model: Any) -> Any:
    """(layer, its own class) for those of a model."""
    names = _written_out(type(model))
    for layer in model.modules() if names else ():
        own = getattr(type(layer), "_heddle_of", type(layer))
        if own.__name__ in names:
            yield layer, own


def _follow(model: Any, follow: bool = True) -> None:
    """Gives such layers classes that heddle computes for, or their own again."""
    for layer, own in list(_layers(model)):
        layer.__class__ = _hf_written_out.of(own) if follow else own


def _refusal(kind: type) -> str | None:
    """Why a class of models cannot use heddle, or None."""
    import transformers

    for file, why in _BROKEN_BEFORE_5.items():
        if int(transformers.__version__.split(".")[0]) < 5 and any(f.startswith(file) for f in _files(kind)):
            return (
                f"transformers {transformers.__version__} has {kind.__name__} wrong, so that heddle cannot serve it: "
                f"{why}. Use transformers 5"
            )
    if _written_out(kind):
        return None
    if getattr(kind, "_supports_attention_backend", False):
        return None
    if not any(_file(name).own and not _file(name).table for name in _files(kind)):
        return None
    return (
        f"{kind.__name__} computes its attention itself and calls no implementation that is registered, so "
        "heddle cannot serve it: load it with attn_implementation='eager' (a part of a larger model: with a dict that "
        "has the names of sub-configs, such as {'text_config': 'heddle', 'vision_config': 'eager'})"
    )


def _wants_eager_masks(kind: Any) -> bool:
    """Models whose layers need not say whether they are causal, or that read masks themselves, as eager's."""
    flash = getattr(kind, "_supports_flash_attn", False) or getattr(kind, "_supports_flash_attn_2", False)
    relied_on = kind._supports_sdpa or (flash and getattr(kind, "_supports_attention_backend", False))
    read = any(_file(name).asks or _file(name).adds for name in _files(kind))
    return not relied_on or read or bool(_written_out(kind))


def has_eager_masks(layer: Any) -> bool:
    """Whether all masks of a layer come as additive ones, made as for eager."""
    return type(getattr(layer, "config", None)) in _as_eager


def _note_masks(model: Any) -> None:
    if not _wants_eager_masks(type(model)):
        return
    _as_eager.add(type(model.config))
    for name in getattr(model.config, "sub_configs", ()):
        part = type(getattr(model.config, name, None))
        if part.__module__ == type(model.config).__module__:  # not a model of its own
            _as_eager.add(part)


def weights_are_asked_for() -> bool:
    """Whether a model was called with output_attentions=True, which many do not hand on to their layers."""
    return _asking > 0


def _count(change: int) -> None:
    global _asking
    if torch.compiler.is_compiling():
        _asking += change
        return
    with _lock:
        _asking += change


def _asks(model: Any, kwargs: Any) -> bool:
    asked = kwargs.get("output_attentions")
    return bool(getattr(model.config, "output_attentions", False) if asked is None else asked)


def _before(model: Any, args: Any, kwargs: Any) -> None:
    if _asks(model, kwargs):
        _count(1)


def _after(model: Any, args: Any, kwargs: Any, output: Any) -> None:
    if _asks(model, kwargs):
        _count(-1)


def _listen(model: Any) -> None:
    if not hasattr(model, "_heddle_listens"):
        model._heddle_listens = True
        model.register_forward_pre_hook(_before, with_kwargs=True)
        model.register_forward_hook(_after, with_kwargs=True, always_call=True)


class _Sdpa(TorchFunctionMode):
    """PyTorch's scaled_dot_product_attention is heddle's, in this thread and these calls alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        if weights_are_asked_for():
            raise NotImplementedError(
                "output_attentions=True: this model's layers for sdpa give no weights; load it with "
                "attn_implementation='eager'"
            )
        from heddle import scaled_dot_product_attention

        mask, q = kwargs.get("attn_mask"), args[0] if args else kwargs["query"]
        if mask is not None and mask.dim() == 2 and q.dim() == 4:
            # DistilBERT gives its layers the padding as it came, [b, sk], unless the implementation is called sdpa.
            kwargs = {**kwargs, "attn_mask": mask.bool()[:, None, None, :]}
        return scaled_dot_product_attention(*args, **kwargs)


def _drops_head_mask(kind: Any) -> int | None:
    """At which place a layer's class takes a head_mask that it then forgets (Albert's of transformers 4); or None."""
    try:
        source = inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return None
    names = list(inspect.signature(kind.forward).parameters)[1:]
    return names.index("head_mask") if "head_mask" in names and len(re.findall(r"\bhead_mask\b", source)) == 1 else None


@functools.cache
def _through_sdpa(kind: Any) -> Any:
    """A layer's class for sdpa, with heddle in the place of PyTorch's function."""
    dropped = _drops_head_mask(kind)

    class Layer(kind):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            own = copy.copy(config)
            own._attn_implementation_internal = "sdpa"  # some ask for their name once more
            super().__init__(own, *args, **kwargs)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if dropped is not None and (args[dropped] if len(args) > dropped else kwargs.get("head_mask")) is not None:
                raise NotImplementedError(
                    f"{kind.__name__} is given a head_mask, which it forgets; load this model with "
                    "attn_implementation='eager', or call it without"
                )
            with _Sdpa():
                return super().forward(*args, **kwargs)

    Layer.__name__ = Layer.__qualname__ = f"Heddle{kind.__name__}"
    return Layer


def _admit(kind: type, name: str) -> None:
    """Raises, or puts a class for the name into the tables that the model chooses from."""
    why = _refusal(kind)
    if why is not None:
        raise ValueError(why)
    for file in _files(kind):
        for table in _tables(sys.modules.get(file)):
            table.setdefault(name, _through_sdpa(table["sdpa"]) if "sdpa" in table else table["eager"])


def _refusal_of_batches(model: Any) -> str | None:
    """Why a model that uses heddle cannot be batched continuously, or None."""
    kind = type(model)
    if not _written_out(kind) and not any(_file(name).table for name in _files(kind)):
        return None
    return (
        f"{kind.__name__} calls no implementation that is registered, so its layers cannot read the cache of "
        "continuous batching (generate_batch), neither with heddle nor without: use generate"
    )


def _requests(model: Any, requested: Any) -> Any:
    """(model, implementation) for a model and its parts, of set_attn_implementation's argument."""
    from transformers import PreTrainedModel

    by_config: dict[int, Any] = {}

    def enter(config: Any, wanted: Any) -> None:
        own = wanted.get("", None) if isinstance(wanted, dict) else wanted
        by_config[id(config)] = own
        for key in getattr(config, "sub_configs", ()):
            part = getattr(config, key, None)
            if part is not None:
                enter(part, wanted.get(key) if isinstance(wanted, dict) else wanted)

    enter(model.config, requested)
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            yield part, by_config.get(id(part.config), by_config[id(model.config)])


def _and_follow(end: Any) -> Any:
    @functools.wraps(end)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = end(self, *args, **kwargs)
        if self.config._attn_implementation in _names:
            _follow(self)
        return result

    return method


def watch(name: str) -> None:
    """From now on every model is asked whether heddle can serve it, where its implementation is set to the name."""
    import transformers

    global _heed, _masking
    PreTrainedModel: Any = transformers.PreTrainedModel
    _names.add(name)
    try:
        _masking = importlib.import_module("transformers.masking_utils")
    except ImportError:  # before 4.53
        _masking = None
    _heed = _masking is not None and 'config, "is_causal"' in inspect.getsource(_masking)
    _hf_batches.watch(_names, _refusal_of_batches)
    if hasattr(PreTrainedModel, "_heddle_watches"):
        return
    PreTrainedModel._heddle_watches = True
    make, change = PreTrainedModel.__init__, getattr(PreTrainedModel, "set_attn_implementation", None)

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _note_masks(self)
        if self.config._attn_implementation in _names:  # its layers are made after this
            _admit(type(self), self.config._attn_implementation)
            _listen(self)

    PreTrainedModel.__init__ = __init__
    for name_of_end in ("post_init", "init_weights"):  # a model's constructor ends with one or the other
        setattr(PreTrainedModel, name_of_end, _and_follow(getattr(PreTrainedModel, name_of_end)))
    if change is None:
        return

    @functools.wraps(change)
    def set_attn_implementation(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        changing = []
        for part, wanted in _requests(self, attn_implementation):
            now = part.config._attn_implementation
            if wanted in _names and now != wanted:
                _admit(type(part), wanted)
                tables = any(_file(name).table for name in _files(type(part)))
                if tables if not _written_out(type(part)) else not any(_layers(part)):
                    raise ValueError(
                        f"{type(part).__name__} chose the classes of its layers when it was made: give it "
                        f"attn_implementation={wanted!r} to from_pretrained or from_config"
                    )
                changing.append((part, wanted))
            elif now in _names and wanted == "eager":
                changing.append((part, wanted))
        for part, wanted in changing:
            _follow(part, wanted in _names)
            if wanted in _names:
                _note_masks(part)
                _listen(part)
            if _written_out(type(part)):  # which transformers itself would not switch
                part.config._attn_implementation_internal = wanted
        return change(self, attn_implementation, *args, **kwargs)

    PreTrainedModel.set_attn_implementation = set_attn_implementation


def masks_heed_configurations() -> bool:
    """Whether transformers makes other masks where config.is_causal is False: to 4.57 nobody asks."""
    return _heed


def make_mask(*args: Any, config: Any = None, **options: Any) -> Any:
    """transformers' masks for sdpa (boolean, and None where causality alone says it all), for some its eager ones."""
    if getattr(config, "use_bidirectional_attention", None):
        options["allow_is_causal_skip"] = False  # PaliGemma's layers are not causal, and its masks may be
    make = _masking.eager_mask if type(config) in _as_eager else _masking.sdpa_mask
    return make(*args, config=config, **options)
