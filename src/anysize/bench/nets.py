"""The nets of the arms, and one optimiser step of each. Pixels and labels are random."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anysize.bench.arms import (
    LEARNING_RATE,
    MOMENTUM,
    NUM_CLASSES,
    ON_CANVASES,
    Arm,
    OptimiserStep,
)
from anysize.bench.plain import PlainFCN
from anysize.config import ModelConfig, OptimConfig
from anysize.data.batch import Batch
from anysize.device import Precision, computing, prepare_process, synchronise
from anysize.geometry import Layout, NetGeometry, grid_centres, target_canvas, target_rect
from anysize.limits import count_flops
from anysize.models import resnet_v1
from anysize.models.any_net import AnyNet
from anysize.models.build import build_model, geometry_of
from anysize.models.on_canvas import chosen_output
from anysize.models.ops import LevelMask, level_masks
from anysize.training.losses import CrossEntropy
from anysize.training.optim import build_optimizer
from anysize.training.step import train_step

IGNORE = 255


class Net(Protocol):
    """What an arm computes with."""

    def step(self, layouts: OptimiserStep) -> float:
        """Seconds of one optimiser step."""
        ...


def build_net(arm: Arm, config: ModelConfig, device: torch.device) -> Net:
    """The net of an arm, on the device."""
    torch.backends.cudnn.benchmark = arm.policy == "plain tuned"
    if arm.policy in ON_CANVASES:
        prepare_process()  # As a run does; a script in plain PyTorch does not.
        return CanvasNet(arm, config, device)
    return PlainNet(arm, config, device)


class PlainNet:
    """Plain PyTorch, channels-last."""

    def __init__(self, arm: Arm, config: ModelConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.geometry = geometry_of(config)
        self.precision: Precision = arm.precision
        model = build_model(config, NUM_CLASSES) if config.net else PlainFCN(config, NUM_CLASSES)
        model = model.to(device, memory_format=torch.channels_last).train()  # pyright: ignore[reportCallIssue]
        self.model: nn.Module = model.net if isinstance(model, AnyNet) else model
        if arm.policy == "compile dynamic":
            # It warns of each recompilation; that they happen is what is measured.
            logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
            warnings.simplefilter("ignore")
            self.model = torch.compile(self.model, dynamic=True)  # pyright: ignore[reportAttributeAccessIssue]
        self.optimizer = torch.optim.SGD(
            model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, fused=True
        )

    def step(self, layouts: OptimiserStep) -> float:
        """Seconds of one optimiser step."""
        batches = [self._batch(layout) for layout in layouts]
        count = sum(int((target != IGNORE).sum()) for _, target in batches)

        def work() -> None:
            for pixels, target in batches:
                x, t = pixels.to(self.device), target.to(self.device)
                with computing(self.device, self.precision):
                    logits = chosen_output(self.model(x), None)
                summed = F.cross_entropy(logits.float(), t, ignore_index=IGNORE, reduction="sum")
                (summed / count).backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

        return _timed(work, self.device)

    def flops_a_pixel(self, layout: Layout) -> float:
        """Operations of a training step, a valid pixel."""
        return count_flops(lambda: self.step((layout,))) / layout.valid_pixels

    def _batch(self, layout: Layout) -> tuple[Tensor, Tensor]:
        canvas, geometry = layout.canvas, self.geometry
        extents = [geometry.padded(extent) for extent in canvas[1:]]
        pixels = torch.zeros(canvas.slots, *extents, self.config.num_channels)
        cells = [geometry.logits_extent(extent) for extent in canvas[1:]]
        target = torch.full((canvas.slots, *cells), IGNORE, dtype=torch.int64)
        for p in layout.placements:
            pixels[p.slot, : p.height, : p.width].normal_()
            height, width = (len(grid_centres(extent, geometry)) for extent in p.size)
            target[p.slot, :height, :width].random_(NUM_CLASSES)
        return pixels.permute(0, 3, 1, 2), target


class CanvasNet:
    """The product's net and its own train_step."""

    def __init__(self, arm: Arm, config: ModelConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.precision: Precision = arm.precision
        model = build_model(config, NUM_CLASSES)
        self.masks: Callable[[], AbstractContextManager[object]] = nullcontext
        if arm.policy == "mosaic without masks":
            self.masks = without_masks
            if isinstance(model, AnyNet):
                model = _Unmasked(model.net, model.geometry, norms_frozen=True)
        self.model = model.to(device, memory_format=torch.channels_last).train()  # pyright: ignore[reportCallIssue]
        settings = OptimConfig(lr=LEARNING_RATE, momentum=MOMENTUM)
        self.optimizer = build_optimizer(self.model, settings)

    def step(self, layouts: OptimiserStep) -> float:
        """Seconds of one optimiser step."""
        batches = [self._batch(layout) for layout in layouts]
        loss = CrossEntropy(ignore_index=IGNORE)

        def work() -> None:
            train_step(self.model, loss, batches, self.optimizer, precision=self.precision)

        with self.masks():
            return _timed(work, self.device)

    def _batch(self, layout: Layout) -> Batch:
        canvas, geometry = layout.canvas, self.model.geometry
        pixels = torch.zeros(canvas.slots, canvas.height, canvas.width, self.config.num_channels)
        shape = tuple(target_canvas(canvas, geometry, "grid"))
        target = torch.full(shape, IGNORE, dtype=torch.uint8)
        for p in layout.placements:
            pixels[p.slot, p.top : p.top + p.height, p.left : p.left + p.width].normal_()
            r = target_rect(p, geometry, "grid")
            target[r.slot, r.top : r.top + r.height, r.left : r.left + r.width].random_(NUM_CLASSES)
        return Batch(
            pixels=pixels.permute(0, 3, 1, 2),
            target=target,
            layout=layout,
            stems=(),
            geometry=geometry,
            loss_at="grid",
        )


@contextmanager
def without_masks() -> Iterator[None]:
    """Masks of our own nets cover nothing within it."""

    def empty(layout: Layout, geometry: NetGeometry) -> list[LevelMask]:
        masks = level_masks(layout, geometry)
        for mask in masks:
            mask.strips = ()
        return masks

    with patch.object(resnet_v1, "level_masks", empty):
        yield


class _Unmasked(AnyNet):
    """The net on a canvas as PyTorch runs it, without rules for images."""

    def forward(self, pixels: Tensor, layout: Layout) -> Tensor:
        del layout
        return chosen_output(self.net(pixels), None)


def _timed(work: Callable[[], None], device: torch.device) -> float:
    synchronise(device)
    began = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - began
