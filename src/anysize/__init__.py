"""Anysize: pixel labelling on images of any size, at native resolution, on exact canvases."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anysize.api import Labeller, convert, evaluate, load, plan, train
    from anysize.data.canvas_batches import CanvasBatches
    from anysize.errors import AnysizeError
    from anysize.models.on_canvas import geometry_of_net, on_canvas
    from anysize.models.prove import prove

__version__ = "0.1.0"

__all__ = [
    "AnysizeError",
    "CanvasBatches",
    "Labeller",
    "convert",
    "evaluate",
    "geometry_of_net",
    "load",
    "on_canvas",
    "plan",
    "prove",
    "train",
]

_HOMES = {
    "AnysizeError": "anysize.errors",
    "CanvasBatches": "anysize.data.canvas_batches",
    "geometry_of_net": "anysize.models.on_canvas",
    "on_canvas": "anysize.models.on_canvas",
    "prove": "anysize.models.prove",
}
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
