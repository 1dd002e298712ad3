"""Augmentation of image and mask together: scale, crop, mirror and colour.

What is done to a sample is drawn first, from its size alone (`draw`), so that steps can be packed
before a file is opened; then it is applied to the decoded pixels (`apply_draw`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from anysize.config import AugmentConfig
from anysize.data.joints import Joints
from anysize.data.own_augmentation import OwnDraw, draw_own
from anysize.geometry import Rect, Size
from anysize.images.decode import Pixels


def draw(
    config: AugmentConfig,
    size: Size,
    *,
    seed: int,
    epoch: int,
    index: int,
    num_channels: int = 3,
) -> Draw:
    """Draws what is done to one image in one epoch.

    Args:
        config: `[augment]` of the run.
        size: The image's own size.
        seed: Of the run.
        epoch: From 0.
        index: The image's place among the training samples.
        num_channels: Of the image, for `augment.module`.

    Raises:
        ConfigError: See `anysize.data.own_augmentation`.
    """
    # The last word keeps this stream apart from that of the order (seed, epoch): numpy fills a
    # short seed up with zeros.
    rng = np.random.default_rng((seed, epoch, index, 1))
    # Every number is drawn whether it is used or not, so that one setting never changes another.
    log_factor = rng.uniform(math.log(config.min_scale), math.log(config.max_scale))
    mirrored = rng.random() < 0.5
    brightness, contrast, saturation = (
        float(rng.uniform(max(0.0, 1 - reach), 1 + reach))
        for reach in (config.brightness, config.contrast, config.saturation)
    )
    crop_top, crop_left = rng.random(2)

    # Clamped, since the logarithm's rounding may overstep the bounds by a hair.
    factor = min(max(math.exp(log_factor), config.min_scale), config.max_scale)
    scaled = _scaled(size, factor)
    kept = _cropped(scaled, config.crop)
    crop = None
    if kept != scaled:
        top = int(crop_top * (scaled.height - kept.height + 1))
        left = int(crop_left * (scaled.width - kept.width + 1))
        crop = Rect(0, top, left, kept.height, kept.width)
    return Draw(
        factor=factor,
        scaled=scaled,
        crop=crop,
        mirror=config.mirror and mirrored,
        brightness=brightness,
        contrast=contrast,
        saturation=saturation,
        own=draw_own(config.module, kept, num_channels, (seed, epoch, index, 2))
        if config.module
        else None,
    )


def largest_size(config: AugmentConfig, size: Size) -> Size:
    """The largest size that `draw` can make of an image, for a plan that must hold it."""
    return _cropped(_scaled(size, config.max_scale), config.crop)


def no_augmentation(size: Size) -> Draw:
    """Leaves an image as it is, for evaluation."""
    return Draw(
        factor=1.0,
        scaled=size,
        crop=None,
        mirror=False,
        brightness=1.0,
        contrast=1.0,
        saturation=1.0,
    )


def apply_draw(
    draw: Draw, image: Pixels, mask: NDArray[np.uint8]
) -> tuple[Pixels, NDArray[np.uint8]]:
    """Does the same to image and mask.

    The image is scaled bilinearly, with an antialiasing filter where it shrinks. Each mask pixel
    takes the label beneath its centre. Mirroring leaves the order of the classes alone.

    Args:
        draw: For an image of this size.
        image: `[h, w, c]`; 16 bits stay 16 bits.
        mask: `[h, w]` or `[k, h, w]`.

    Returns:
        Image and mask of `draw.out_size`.
    """
    height, width = image.shape[:2]
    rect = draw.kept
    rows = _nearest(draw.scaled.height, height)[rect.top : rect.top + rect.height]
    columns = _nearest(draw.scaled.width, width)[rect.left : rect.left + rect.width]
    if draw.mirror:
        columns = columns[::-1]
    image, mask = draw_image(draw, image), mask[..., rows[:, None], columns]
    return (image, mask) if draw.own is None else draw.own.apply(image, mask)


def draw_image(draw: Draw, image: Pixels) -> Pixels:
    """What `apply_draw` does to an image."""
    drawn = _drawn_rgb if image.dtype == np.uint8 and image.shape[-1] == 3 else _drawn_bands
    return drawn(draw, draw.kept, image)


def draw_joints(draw: Draw, joints: Joints, size: Size, pairs: Sequence[tuple[int, int]]) -> Joints:
    """Joints where the same puts them; mirroring swaps those that are pairs.

    Args:
        draw: For an image of this size.
        joints: `[people, joints, 2]`.
        size: Of the image before.
        pairs: Places of left and right joints.

    Source: pose-tensorflow mirrors x to width - 1 - x, and then scales coordinates by the factor.
    """
    drawn, rect = joints.copy(), draw.kept
    left = rect.left
    if draw.mirror:
        for a, b in pairs:
            drawn[:, [a, b]] = drawn[:, [b, a]]
        drawn[..., 0] = size.width - 1 - drawn[..., 0]
        left = draw.scaled.width - rect.left - rect.width
    return drawn * draw.factor - (left, rect.top)


def _drawn_rgb(draw: Draw, rect: Rect, image: Pixels) -> Pixels:
    picture = _resized(Image.fromarray(image), draw, rect)
    for enhance, factor in (
        (ImageEnhance.Brightness, draw.brightness),
        (ImageEnhance.Contrast, draw.contrast),
        (ImageEnhance.Color, draw.saturation),
    ):
        if factor != 1:
            picture = enhance(picture).enhance(factor)
    return np.array(picture)


def _drawn_bands(draw: Draw, rect: Rect, image: Pixels) -> Pixels:
    """The same for images that Pillow has no mode for: a band at a time, in floating point.

    Contrast is about the mean grey of the image, as Pillow's; grey is the luminance of RGB, and the
    mean of the bands of anything else, whose saturation is left alone.
    """
    bands = [
        np.asarray(_resized(Image.fromarray(image[..., i].astype(np.float32)), draw, rect))
        for i in range(image.shape[-1])
    ]
    values = np.stack(bands, axis=-1)
    white = np.iinfo(image.dtype).max
    if draw.brightness != 1:
        values = (values * np.float32(draw.brightness)).clip(0, white)
    if draw.contrast != 1:
        mean = _grey(values).mean()
        values = (mean + (values - mean) * np.float32(draw.contrast)).clip(0, white)
    if draw.saturation != 1 and image.shape[-1] == 3:
        grey = _grey(values)[..., None]
        values = (grey + (values - grey) * np.float32(draw.saturation)).clip(0, white)
    return np.rint(values).astype(image.dtype)


def _resized(picture: Image.Image, draw: Draw, rect: Rect) -> Image.Image:
    if draw.scaled != (picture.height, picture.width):
        picture = picture.resize((draw.scaled.width, draw.scaled.height), Image.Resampling.BILINEAR)
    if draw.crop:
        picture = picture.crop(
            (rect.left, rect.top, rect.left + rect.width, rect.top + rect.height)
        )
    if draw.mirror:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return picture


def _grey(values: NDArray[np.float32]) -> NDArray[np.float32]:
    if values.shape[-1] != 3:
        return values.mean(axis=-1)
    return values @ np.array([0.299, 0.587, 0.114], np.float32)  # Source: ITU-R BT.601.


def _scaled(size: Size, factor: float) -> Size:
    return Size(max(1, round(size.height * factor)), max(1, round(size.width * factor)))


def _cropped(size: Size, crop: tuple[int, ...]) -> Size:
    if not crop:
        return size
    return Size(min(size.height, crop[0]), min(size.width, crop[1]))


def _nearest(scaled: int, extent: int) -> NDArray[np.intp]:
    """The source pixel beneath the centre of each scaled pixel; integers, so no rounding."""
    return (2 * np.arange(scaled) + 1) * extent // (2 * scaled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What is done to one image: scaled, then cropped, then mirrored, then coloured.

    Attributes:
        factor: That it is rescaled by, but for the rounding of its size.
        scaled: The size that it is rescaled to.
        crop: What is kept of the rescaled image; None keeps all.
        mirror: Whether left and right are swapped.
        brightness, contrast, saturation: Factors, in this order; 1 changes nothing.
        own: What `augment.module` does then.
    """

    factor: float
    scaled: Size
    crop: Rect | None
    mirror: bool
    brightness: float
    contrast: float
    saturation: float
    own: OwnDraw | None = None

    @property
    def kept(self) -> Rect:
        """What is kept of the rescaled image."""
        return self.crop or Rect(0, 0, 0, *self.scaled)

    @property
    def out_size(self) -> Size:
        """The size that reaches the net."""
        if self.own is not None:
            return self.own.size
        return Size(self.kept.height, self.kept.width)
