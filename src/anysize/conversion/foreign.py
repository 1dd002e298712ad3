"""What a foreign checkpoint is once it has been read: our tensors, our settings, and an account.

Each system has a module that reads its files and gives a `Foreign`. Nothing here knows PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anysize.config import BASIC_DEPTHS, UNITS, ModelConfig, PixelConvention

__all__ = ["A_NUMBER", "NO_HEAD", "Foreign", "depth_of", "model_config"]

NO_HEAD = "none"
"""Name of a head that stands for: leave every head out."""

A_NUMBER = "a single number beside the net"
"""Why a tensor without axes is left out: no tensor of these nets is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A checkpoint of another system, in our names and layouts.

    Every tensor of the file is in exactly one of `taken`, `left_out`, `beside` and `unknown`.

    Attributes:
        source: What it was found to be, for people: "TF-Slim resnet_v1_101, V1 checkpoint".
        config: Units, base depth and rules of the net; the rest is at its default.
        pixels: What the net was trained to take.
        tensors: float32 by our names (`body.conv1.weights`, ..., `head.biases`); no `head.*` where
            the file has no head of ours.
        taken: Name in the file to our name that it went into; several may go into one.
        left_out: Name in the file to the reason, in a few words.
        unknown: Names in the file, within the body, that nothing is known of: it is another net, or
            a changed one. A conversion fails on them.
        beside: Names outside the body that nothing is known of, such as those of a foreign head;
            left out where the body alone is asked for, else a conversion fails on them.
        stated: Keys of `config` that the file itself decides; the others are its system's.
        notes: What people should know of such a file, a sentence each.
    """

    source: str
    config: ModelConfig
    pixels: PixelConvention
    tensors: Mapping[str, NDArray[np.float32]]
    taken: Mapping[str, str]
    left_out: Mapping[str, str]
    unknown: tuple[str, ...]
    beside: tuple[str, ...] = ()
    stated: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def depth_of(units: tuple[int, ...], *, basic: bool = False) -> int | None:
    """50 for (3, 4, 6, 3), 34 where these are basic units; None where no ResNet has so many."""
    return next((d for d, u in UNITS.items() if u == units and (d in BASIC_DEPTHS) == basic), None)


def model_config(
    units: tuple[int, ...], base_depth: int, *, basic: bool = False, **rules: str
) -> ModelConfig:
    """The settings of a net with so many units in each of its four blocks.

    Args:
        units: In each block.
        base_depth: Channels of the stem.
        basic: Units are basic ones, not bottlenecks.
        rules: `pool_padding`, `stride_position` and `dilation_rule`.
    """
    depth = depth_of(units, basic=basic)
    shape = {"depth": depth} if depth else {"units": units, "basic_units": basic}
    return ModelConfig(**shape, base_depth=base_depth, **rules)  # pyright: ignore[reportArgumentType]
