"""A function of someone's own, or of a library such as albumentations, as an augmentation.

`function(image, mask, rng)` takes `[h, w, c]` uint8 or uint16, `[h, w]` or `[h, w, k]` uint8 and a
numpy generator, and returns image and mask. It must depend on nothing else, so that a resumed run
is the same run. Calls never overlap, since such functions often keep a state.

Images are put on canvases before they are read, so the size of a result must be known by then: the
function is first called with the same generator on a black image of the same size.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anysize.errors import ConfigError, DataError
from anysize.geometry import Size
from anysize.images.decode import Pixels

_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDraw:
    """A call of the function.

    Attributes:
        name: `package.module:function`.
        seed: Of its generator.
        size: That its result has.
    """

    name: str
    seed: tuple[int, ...]
    size: Size

    def apply(self, image: Pixels, mask: NDArray[np.uint8]) -> tuple[Pixels, NDArray[np.uint8]]:
        """Calls the function on an image `[h, w, c]` and a mask `[h, w]` or `[k, h, w]`.

        Raises:
            ConfigError: It fails, returns something else, or its result has another size than on a
                black image, so that the image does not fit in its place.
        """
        last = np.ascontiguousarray(np.moveaxis(mask, 0, -1)) if mask.ndim == 3 else mask.copy()
        found, labels = _call(self.name, image.copy(), last, self.seed)
        if Size(*found.shape[:2]) != self.size:
            raise ConfigError(
                f"`augment.module` {self.name} makes {Size(*found.shape[:2])} of an image of "
                f"{Size(*image.shape[:2])}, but {self.size} of a black one. Sizes must depend on "
                "the size and the generator alone."
            )
        return found, np.moveaxis(labels, -1, 0) if mask.ndim == 3 else labels


def draw_own(name: str, size: Size, num_channels: int, seed: tuple[int, ...]) -> OwnDraw:
    """Finds what the function makes of an image of a size.

    Raises:
        ConfigError: As `OwnDraw.apply`; or it cannot be imported.
    """
    black = np.zeros((*size, num_channels), np.uint8)
    found, _ = _call(name, black, np.zeros(size, np.uint8), seed)
    return OwnDraw(name=name, seed=seed, size=Size(*found.shape[:2]))


def _call(
    name: str, image: Pixels, mask: NDArray[np.uint8], seed: tuple[int, ...]
) -> tuple[Pixels, NDArray[np.uint8]]:
    function = _imported(name)
    try:
        with _LOCK:
            found, labels = function(image, mask, np.random.default_rng(seed))
        found, labels = np.asarray(found), np.asarray(labels)
    except DataError:
        raise
    except Exception as error:  # it is someone's own code
        raise ConfigError(
            f"`augment.module` {name} fails on an image {image.shape}: "
            f"{type(error).__name__}: {error}"
        ) from error
    is_image = found.dtype == image.dtype and found.shape[2:] == image.shape[2:] and found.size
    is_mask = labels.dtype == mask.dtype and labels.shape == (*found.shape[:2], *mask.shape[2:])
    if not (is_image and is_mask):
        raise ConfigError(
            f"`augment.module` {name} makes an image {found.dtype} {found.shape} and a mask "
            f"{labels.dtype} {labels.shape} of {image.dtype} {image.shape} and {mask.dtype} "
            f"{mask.shape}. Types, channels and classes must stay, and both have one size."
        )
    return found, labels


@functools.cache
def _imported(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # it is someone's own code
        raise ConfigError(
            f"`augment.module` {name} cannot be imported: {type(error).__name__}: {error}. Write "
            "package.module:function, and run from the folder that holds it."
        ) from error
    if not callable(found):
        raise ConfigError(f"`augment.module` {name} is {type(found).__name__}, not a function.")
    return found
