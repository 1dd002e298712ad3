"""Anysize: pixel labelling on images of any size, at native resolution, on exact canvases."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anysize.api import Labeller, convert, evaluate, load, plan, train
    from anysize.errors import AnysizeError

__version__ = "0.1.0"

__all__ = ["AnysizeError", "Labeller", "convert", "evaluate", "load", "plan", "train"]

_HOMES = {"AnysizeError": "anysize.errors"}
"""Modules of public names, other than `anysize.api`."""


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Loads a public name when it is first used: they need PyTorch, `import anysize` does not."""
    if name not in __all__:
        raise AttributeError(f"module 'anysize' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES.get(name, "anysize.api")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
