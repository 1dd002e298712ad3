"""Makes batches ready ahead of the step: decodes, augments, normalises and places images.

Threads do it, since decoding and resizing leave Python's lock alone. Each image is one piece of
work that writes into its own rectangle of the batch, so the result does not depend on how many
threads there are or which of them is first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from anysize.config import PixelConvention
from anysize.data.batch import Batch
from anysize.data.formats.joints import joints_of
from anysize.data.joints import ORIGINAL_MAPS, JointMaps, joint_targets, num_logits
from anysize.data.samples import Classes, Sample, decode_mask, label_kind
from anysize.data.transforms import Draw, apply_draw, draw_image, draw_joints
from anysize.errors import DataError, DeviceError
from anysize.geometry import (
    Layout,
    LossAt,
    NetGeometry,
    Placement,
    Size,
    grid_centres,
    target_canvas,
    target_rect,
)
from anysize.images.decode import Pixels, decode_image
from anysize.planning.packing import Pass, Step
from anysize.timing import Stage, untimed


def load_steps(
    samples: Sequence[Sample],
    steps: Iterable[Step],
    draws: Sequence[Draw],
    *,
    classes: Classes,
    geometry: NetGeometry,
    loss_at: LossAt,
    pixels: PixelConvention,
    num_threads: int,
    prefetch_steps: int,
    start: int = 0,
    skip_broken: bool = False,
    keep_empty: bool = False,
    stage: Stage = untimed,
    joint_maps: JointMaps = ORIGINAL_MAPS,
) -> Generator[LoadedStep, None, None]:
    """Yields the steps in order, each made ready while those before it run.

    Threads end when the iterator is closed, also by an exception inside it such as Ctrl-C. Hold it
    in `contextlib.closing` so that an exception outside it closes it too.

    Args:
        samples: `Pass.images` are indices into it.
        steps: Of one epoch.
        draws: What is done to each sample, by the same index.
        classes: Of the samples.
        geometry: Of the net.
        loss_at: Where labels are placed; see `anysize.geometry.target_rect`. Joints are at "cells".
        pixels: How the net takes its pixels.
        num_threads: Images that are worked on at once.
        prefetch_steps: Steps made ready ahead of the one that was last yielded; bounds the memory.
        start: Steps to leave out at the front, for a run that resumes.
        skip_broken: Leave images out that cannot be decoded or are invalid; `LoadedStep.broken`
            names them.
        keep_empty: Also give batches without images, which are otherwise left out.
        stage: What the parts of the work run in, in several threads, for one who times them.
        joint_maps: What joints become.

    Raises:
        DataError: An image or mask cannot be decoded or is invalid; raised in the caller's
            thread when its step is due. Not with `skip_broken`.
    """
    recipe = _Recipe(
        samples=samples,
        draws=draws,
        classes=classes,
        geometry=geometry,
        loss_at=loss_at,
        pixels=pixels,
        stage=stage,
        joint_maps=joint_maps,
    )
    remaining = islice(steps, start, None)
    ahead: deque[list[_Filling]] = deque()
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="anysize-loader")
    try:
        while True:
            with stage("wait for data"):
                for step in islice(remaining, prefetch_steps + 1 - len(ahead)):
                    ahead.append([_start(p, recipe, pool) for p in step.passes])
                if not ahead:
                    return
                due = ahead.popleft()
                began = time.perf_counter()
                late = [f for filling in due for f in filling.work_left if not f.done()]
                broken: dict[str, str] = {}
                finished = [_finish(filling, broken if skip_broken else None) for filling in due]
            batches = tuple(batch for batch in finished if batch.stems or keep_empty)
            yield LoadedStep(
                batches=batches,
                broken=broken,
                wait_s=time.perf_counter() - began if late else 0.0,
            )
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def normalise(image: Pixels, pixels: PixelConvention) -> NDArray[np.float32]:
    """Turns an image into the net's input, `[h, w, c]`, with channels in `pixels.channel_order`."""
    ordered = image[..., ::-1] if pixels.channel_order == "BGR" else image
    white = 255 if image.dtype == np.uint8 else pixels.white
    values = ordered.astype(np.float32)
    values *= np.float32(pixels.max_value / white)
    values -= np.asarray(pixels.mean, np.float32)
    values /= np.asarray(pixels.std, np.float32)
    return values


def _start(work: Pass, recipe: _Recipe, pool: ThreadPoolExecutor) -> _Filling:
    """Makes an empty batch and hands its images to the threads."""
    classes = recipe.classes
    canvas = work.layout.canvas
    labels = target_canvas(canvas, recipe.geometry, recipe.loss_at)
    # Channels last: the tensor that the net gets is this array with its axes renamed.
    num_channels = len(recipe.pixels.mean)
    pixels = np.zeros((canvas.slots, canvas.height, canvas.width, num_channels), np.float32)
    shape: tuple[int, ...] = (labels.slots, labels.height, labels.width)
    kind = label_kind(recipe.samples[0], classes)
    if kind != "multiclass":
        num_planes = num_logits(kind, len(classes.names))
        shape = (labels.slots, num_planes, labels.height, labels.width)
    dtype = np.float32 if kind == "joints" else np.uint8
    target = np.full(shape, classes.ignore_index, dtype)
    work_left = tuple(
        pool.submit(_fill, index, placement, recipe, pixels, target)
        for index, placement in zip(work.images, work.layout.placements, strict=True)
    )
    return _Filling(work=work, recipe=recipe, pixels=pixels, target=target, work_left=work_left)


def _finish(filling: _Filling, broken: dict[str, str] | None) -> Batch:
    """Waits for the images of a batch; takes those away that are broken if they may be."""
    layout, recipe = filling.work.layout, filling.recipe
    kept: list[tuple[str, Placement]] = []
    for i, placement, future in zip(
        filling.work.images, layout.placements, filling.work_left, strict=True
    ):
        stem = recipe.samples[i].stem
        try:
            future.result()
        except DataError as error:
            if broken is None:
                raise
            # Nothing was put into its rectangle yet: zeros and `ignore_index`, as outside.
            broken[stem] = str(error)
        else:
            kept.append((stem, placement))
    return Batch(
        pixels=torch.from_numpy(filling.pixels).permute(0, 3, 1, 2),
        target=torch.from_numpy(filling.target),
        layout=Layout(layout.canvas, tuple(placement for _, placement in kept)),
        stems=tuple(stem for stem, _ in kept),
        geometry=recipe.geometry,
        loss_at=recipe.loss_at,
    )


def _fill(
    index: int,
    placement: Placement,
    recipe: _Recipe,
    pixels: NDArray[np.float32],
    target: NDArray[np.generic],
) -> None:
    """Puts one image and its labels into a batch."""
    sample, draw = recipe.samples[index], recipe.draws[index]
    assert placement.size == draw.out_size, (
        f"{sample.stem} is placed as {placement.size}, but drawn as {draw.out_size}"
    )
    try:
        with recipe.stage("decode"):
            decoded = _decode(sample, recipe.pixels)
            is_joints = sample.encoding.kind == "joints"
            labels = None if is_joints else decode_mask(sample, recipe.classes)
        with recipe.stage("transform"):
            if labels is None:
                image, mask = draw_image(draw, decoded), _joint_maps(sample, draw, recipe)
            else:
                image, mask = apply_draw(draw, decoded, labels)
    except MemoryError as error:
        raise DeviceError(
            f"Memory ran out while loading {sample.image} ({sample.size}). Free memory, or lower "
            "train.prefetch_steps or train.loader_threads; a run goes on with --resume."
        ) from error
    except Exception as error:
        error.add_note(f"while loading {sample.image}")
        raise
    with recipe.stage("place"):
        pixels[
            placement.slot,
            placement.top : placement.top + placement.height,
            placement.left : placement.left + placement.width,
        ] = normalise(image, recipe.pixels)
        if recipe.loss_at == "grid":
            rows = np.array(grid_centres(placement.height, recipe.geometry))
            columns = np.array(grid_centres(placement.width, recipe.geometry))
            mask = mask[..., rows[:, None], columns]
        rect = target_rect(placement, recipe.geometry, recipe.loss_at)
        target[
            rect.slot, ..., rect.top : rect.top + rect.height, rect.left : rect.left + rect.width
        ] = mask


def _joint_maps(sample: Sample, draw: Draw, recipe: _Recipe) -> NDArray[np.float32]:
    joints = joints_of(sample, len(recipe.classes.names))
    return joint_targets(
        draw_joints(draw, joints, sample.size, recipe.classes.links.pairs),
        draw.out_size,
        recipe.geometry,
        maps=recipe.joint_maps.maps,
        radius=recipe.joint_maps.radius * draw.factor,
        ignore_index=recipe.classes.ignore_index,
    )


def _decode(sample: Sample, pixels: PixelConvention) -> Pixels:
    image = decode_image(sample.image, len(pixels.mean), pixels.float_range)
    size = Size(*image.shape[:2])
    if size != sample.size:
        raise DataError(
            f"{sample.image} is {size}, but was {sample.size} when the data folder was read. "
            f"Leave the folder alone while it is in use; start again."
        )
    return image


@dataclass(slots=True)
class LoadedStep:
    """The batches of one optimiser step.

    Attributes:
        batches: One a pass; a pass without images is left out, unless `keep_empty`.
        wait_s: Seconds that the caller was held up since some image of this step was not ready.
        broken: Images that were left out, by stem, and what was wrong with them.
    """

    batches: tuple[Batch, ...]
    wait_s: float
    broken: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """All that turns a sample's index into pixels and labels; see `load_steps`."""

    samples: Sequence[Sample]
    draws: Sequence[Draw]
    classes: Classes
    geometry: NetGeometry
    loss_at: LossAt
    pixels: PixelConvention
    stage: Stage
    joint_maps: JointMaps


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filling:
    """A batch that threads are at work on: its arrays, and what they still do to them."""

    work: Pass
    recipe: _Recipe
    pixels: NDArray[np.float32]
    target: NDArray[np.generic]
    work_left: tuple[Future[None], ...]
