"""What is asked of a conversion, and what of it the file cannot tell."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from anysize.config import LossKind, PixelConvention, check_model, check_pixels
from anysize.conversion.foreign import Foreign
from anysize.data.classes import Classes
from anysize.errors import WeightsError
from anysize.geometry import PoolPadding
from anysize.models.levels import DilationRule, StridePosition

_OPTIONS = "the options of convert"
STEM = "body.conv1.weights"
RULES = ("stride_position", "dilation_rule", "pool_padding", "output_stride")
PIXELS = {
    "channel_order": "channel_order",
    "pixel_mean": "mean",
    "pixel_std": "std",
    "max_value": "max_value",
}
"""Names of the options, and of `[pixels]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked of a conversion; the names are those of the command's options.

    None of the rules and of the pixels is what the file says, or else what its system has.

    Attributes:
        head: Of several heads, the one to take; "none" takes the body only.
        prefix: Of several nets, what the names of the one to take begin with.
        loss: How the head's logits are meant; must be given where a head is taken.
        classes: Of the head, or a classes.toml; None numbers them.
        head_relu: The head ends with a ReLU.
        output_stride: That the net was trained at.
        stride_position, dilation_rule, pool_padding: See `anysize.models.resnet_v1`.
        channel_order: Of the pixels that the net was trained on.
        pixel_mean, pixel_std: A number for each channel, in that order, on the scale of
            `max_value`.
        max_value: Value of white in the pixels that the net was trained on: 255, or 1.
        mean: Caffe's mean image, `.binaryproto`.
        channels: More channels for the first convolution than the file's 3.
        new_channels: What the first convolution starts with there: "zeros", so that the results
            are at first those of the three channels, or the "mean" of their weights.
    """

    head: str = ""
    prefix: str = ""
    loss: LossKind | None = None
    classes: Classes | Path | str | None = None
    head_relu: bool = False
    output_stride: Literal[8, 16, 32] | None = None
    stride_position: StridePosition | None = None
    dilation_rule: DilationRule | None = None
    pool_padding: PoolPadding | None = None
    channel_order: Literal["RGB", "BGR"] | None = None
    pixel_mean: tuple[float, ...] | None = None
    pixel_std: tuple[float, ...] | None = None
    max_value: float | None = None
    mean: Path | str | None = None
    channels: int | None = None
    new_channels: Literal["zeros", "mean"] = "zeros"


def as_asked(path: Path, foreign: Foreign, asked: Asked) -> Foreign:
    """The checkpoint with rules, pixels and channels as asked; what was assumed is in its notes.

    Raises:
        WeightsError: The file itself says otherwise.
        ConfigError: Rules or pixels do not go together.
    """
    for rule in RULES[:3]:
        said, found = getattr(asked, rule), getattr(foreign.config, rule)
        if rule in foreign.stated and said not in (None, found):
            raise WeightsError(
                f"--{rule.replace('_', '-')} is {said}, but {path} itself says {found}. "
                "Leave it out."
            )
    if asked.mean is not None and asked.pixel_mean is not None:
        raise WeightsError("--mean and --pixel-mean both give the mean. Leave one of them out.")
    rules = {rule: getattr(asked, rule) for rule in RULES if getattr(asked, rule) is not None}
    config = dataclasses.replace(foreign.config, **rules, head_relu=asked.head_relu)
    given = {key: getattr(asked, name) for name, key in PIXELS.items()}
    # Values for all of `channels` are for the pixels after the new ones were added.
    late = {k: v for k, v in given.items() if isinstance(v, tuple) and len(v) == asked.channels}
    early = {k: v for k, v in given.items() if v is not None and k not in late}
    pixels = dataclasses.replace(foreign.pixels, **early)
    check_model(config, _OPTIONS)
    check_pixels(pixels, 3, _OPTIONS)
    foreign = dataclasses.replace(foreign, config=config, pixels=pixels)
    notes = (*_assumed(foreign, asked), *foreign.notes)
    foreign = dataclasses.replace(_with_channels(foreign, asked), notes=notes)
    pixels = dataclasses.replace(foreign.pixels, **late)
    above_zero = [*pixels.std, pixels.max_value]
    if not all(0 < v < np.inf for v in above_zero) or not np.isfinite(pixels.mean).all():
        raise WeightsError("--pixel-std and --max-value must be above 0, and --pixel-mean finite.")
    if asked.channels is not None:
        notes = (_about_channels(pixels, asked), *notes)
    return dataclasses.replace(foreign, pixels=pixels, notes=notes)


def _assumed(foreign: Foreign, asked: Asked) -> list[str]:
    """Sentences about what the file does not say."""
    assumed: dict[str, Any] = {
        rule: getattr(foreign.config, rule)
        for rule in RULES
        if rule not in foreign.stated and getattr(asked, rule) is None
    }
    if "head.weights" not in foreign.tensors:
        assumed.pop("output_stride", None)
    for name, key in PIXELS.items():
        if getattr(asked, name) is None and not (key == "mean" and asked.mean is not None):
            value = getattr(foreign.pixels, key)
            assumed[name] = ",".join(map(str, value)) if isinstance(value, tuple) else value
    options = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in assumed.items())
    notes = [f"the file does not say these, so they are assumed: {options}."] if options else []
    if asked.output_stride and "head.weights" not in foreign.tensors:
        notes.append(
            f"to go on at the output stride of {asked.output_stride} that the body was trained at, "
            f"set model.output_stride = {asked.output_stride} in a run.toml."
        )
    return notes


def _with_channels(foreign: Foreign, asked: Asked) -> Foreign:
    """The net with a first convolution for more channels than three; RGB before the new ones."""
    if asked.channels is None:
        return foreign
    more = asked.channels - 3
    if not 1 <= more <= 61:
        raise WeightsError(
            f"--channels is {asked.channels}; it must be 4 to 64. A net of 3 channels takes grey "
            "images too."
        )
    stem, pixels = foreign.tensors[STEM], foreign.pixels
    if pixels.channel_order == "BGR":
        stem = stem[:, ::-1]
        pixels = dataclasses.replace(
            pixels, channel_order="RGB", mean=pixels.mean[::-1], std=pixels.std[::-1]
        )
    mean = stem.mean(axis=1, keepdims=True, dtype=np.float64).astype(np.float32)
    new = np.repeat(mean if asked.new_channels == "mean" else np.zeros_like(mean), more, axis=1)
    values = {
        key: (*getattr(pixels, key), *[round(sum(getattr(pixels, key)) / 3, 6)] * more)
        for key in ("mean", "std")
    }
    return dataclasses.replace(
        foreign,
        config=dataclasses.replace(foreign.config, num_channels=asked.channels),
        pixels=dataclasses.replace(pixels, **values),
        tensors={**foreign.tensors, STEM: np.concatenate([stem, new], axis=1)},
    )


def _about_channels(pixels: PixelConvention, asked: Asked) -> str:
    what = "zeros" if asked.new_channels == "zeros" else "the mean of the first three"
    return (
        f"the first convolution takes {asked.channels} channels, R, G and B first; those after "
        f"them start with {what}. Mean {list(pixels.mean)}, std {list(pixels.std)}: for others, "
        "give --pixel-mean and --pixel-std."
    )
