# SPDX-License-Identifier: Apache-2.0
"""Puts heddle's name into PyTorch's list of flash attentions, without importing torch.

Where torch is there already its registry is told at once, else as soon as somebody imports it. What the name means is
in heddle._switch, which is imported when the switch is turned on. A torch before 2.11 has no such list.
"""

from __future__ import annotations

import contextlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

REGISTRY = "torch.nn.attention._registry"


def _activate() -> Any:
    from heddle._switch import activate

    return activate()


def _enter(registry: Any) -> None:
    registry.register_flash_attention_impl("heddle", register_fn=_activate)


class _Waiting:
    """On sys.meta_path until PyTorch's registry is imported; leaves everything else to the others there."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != REGISTRY:
            return None
        with contextlib.suppress(ValueError):  # another thread was first
            sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        loader: Any = spec.loader if spec else None
        if loader is None:
            return None
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            _enter(module)

        loader.exec_module = exec_module
        return spec


def enter() -> None:
    """Enters the name now, or when torch is imported."""
    registry = sys.modules.get(REGISTRY)
    if registry is not None:
        _enter(registry)
    elif "torch" not in sys.modules:
        sys.meta_path.insert(0, _Waiting())
