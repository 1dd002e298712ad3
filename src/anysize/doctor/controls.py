"""One step by turns: as it is set, and with one thing changed."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from anysize.data.batch import Batch
from anysize.data.joints import num_logits
from anysize.data.loader import LoadedStep, load_steps
from anysize.data.transforms import Draw
from anysize.device import (
    is_out_of_memory,
    peak_memory_bytes,
    release_memory,
    synchronise,
)
from anysize.doctor.loop import FEWEST_TURNS, MOST_TURNS
from anysize.geometry import Canvas, Size, padded_batch, target_canvas
from anysize.limits import count_flops
from anysize.planning.packing import Step
from anysize.training.job import Job
from anysize_why.cores import num_cores

__all__ = ["ONE_SIZE", "Controls", "fewer_threads", "keep_steps", "one_size_step"]


MOST_KEPT = 3
"""Steps whose batches are kept for the controls."""


ONE_SIZE, CHANNELS_LAST, THREADS = "one size", "channels_last", "fewer threads"


RECOMPUTE = "activation_checkpointing off"


def keep_steps(job: Job, steps: Sequence[Step], draws: Sequence[Draw]) -> list[LoadedStep]:
    """A few steps with their batches: that with the largest canvas, and the first ones."""
    largest = max(steps, key=lambda s: max(p.layout.canvas.pixels for p in s.passes))
    chosen = [largest, *(s for s in steps if s is not largest)][:MOST_KEPT]
    loaded = load_steps(
        job.train_samples,
        chosen,
        draws,
        classes=job.classes,
        geometry=job.model.geometry,
        loss_at=job.config.loss_at,
        pixels=job.pixels,
        num_threads=job.config.train.loader_threads,
        prefetch_steps=MOST_KEPT,
        skip_broken=job.config.data.skip_broken,
        joint_maps=job.joint_maps,
    )
    with contextlib.closing(loaded):
        return [step for step in loaded if step.batches]


class Controls:
    """One step by turns: as it is set, and with one thing changed."""

    def __init__(self, job: Job, kept: list[LoadedStep], one_size: LoadedStep) -> None:
        self._job = job
        self._kept = kept
        self._one_size = one_size
        self.memory_share = 0.0

    def turns(self, seconds: float) -> dict[str, list[float]]:
        """Of each control and turn, the time with the change over the time without."""
        deadline = time.perf_counter() + seconds
        found: dict[str, list[float]] = {name: [] for name in self._names()}
        # One canvas, the smallest, where all of them would take too long.
        kept = self._kept
        if self._time("", kept) > seconds / 20:
            kept = [min(map(_smallest_pass, kept), key=lambda loaded: _valid_pixels([loaded]))]
        for name in list(found):
            if not self._is_possible(name, kept):
                del found[name]
        for turn in range(MOST_TURNS):
            if turn >= FEWEST_TURNS and time.perf_counter() >= deadline:
                break
            as_set = self._time("", kept)
            for name, ratios in found.items():
                if name == ONE_SIZE:
                    valid = self._one_size.batches[0].layout.valid_pixels
                    took = self._time("", [self._one_size]) / valid
                    ratios.append(took / (as_set / _valid_pixels(kept)))
                else:
                    ratios.append(self._time(name, kept) / as_set)
        return found

    def flops_a_pixel(self) -> float:
        """Multiplications and additions of a training step, a canvas pixel; without recomputing."""
        with _changed(self._job, RECOMPUTE):
            flops = count_flops(lambda: self._job.take_step(self._one_size.batches))
        return flops / self._one_size.batches[0].layout.canvas.pixels

    def _names(self) -> list[str]:
        config = self._job.config
        names = [
            ONE_SIZE,
            "precision float32" if config.train.precision == "bf16" else "precision bf16",
        ]
        if not config.train.channels_last:
            names.append(CHANNELS_LAST)
        if torch.get_num_threads() > 1 and self._job.device.type == "cpu":
            names.append(THREADS)
        if config.model.activation_checkpointing:
            names.append(RECOMPUTE)
        return names

    def _is_possible(self, name: str, kept: Sequence[LoadedStep]) -> bool:
        """Takes the first visits; a change that does not fit in memory is dropped."""
        try:
            if name == ONE_SIZE:
                self._time("", [self._one_size])
            else:
                self._time(name, kept)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._job.optimizer.zero_grad(set_to_none=True)
            release_memory(self._job.device)
            return False
        if name == RECOMPUTE:
            self.memory_share = peak_memory_bytes(self._job.device) / _memory_bytes(
                self._job.device
            )
        return True

    def _time(self, change: str, kept: Sequence[LoadedStep]) -> float:
        device = self._job.device
        precision = self._job.config.train.precision
        if change.startswith("precision"):
            precision = "float32" if precision == "bf16" else "bf16"
        with _changed(self._job, change):
            synchronise(device)
            began = time.perf_counter()
            for loaded in kept:
                self._job.take_step(loaded.batches, precision)
            synchronise(device)
            return time.perf_counter() - began


@contextlib.contextmanager
def _changed(job: Job, change: str) -> Iterator[None]:
    """Changes one thing, and puts it back."""
    num_threads, recomputes = torch.get_num_threads(), job.model.recomputes
    try:
        if change == CHANNELS_LAST:
            _set_memory_format(job, torch.channels_last)
        elif change == THREADS:
            torch.set_num_threads(fewer_threads())
        elif change == RECOMPUTE:
            job.model.recomputes = False
        yield
    finally:
        if change == CHANNELS_LAST:
            _set_memory_format(job, torch.contiguous_format)
        torch.set_num_threads(num_threads)
        job.model.recomputes = recomputes


def _set_memory_format(job: Job, memory_format: torch.memory_format) -> None:
    """Of the net and of what the optimiser keeps, which must lie alike."""
    job.model.to(memory_format=memory_format)  # pyright: ignore[reportCallIssue]
    for state in job.optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() == 4:
                state[key] = value.contiguous(memory_format=memory_format)


def one_size_step(job: Job, sizes: Sequence[Size]) -> LoadedStep:
    """A step of made-up images that all have the mean size, in a batch without waste."""
    size = Size(
        round(statistics.fmean(s.height for s in sizes)),
        round(statistics.fmean(s.width for s in sizes)),
    )
    geometry, model = job.model.geometry, job.config.model
    height, width = (geometry.canvas_extent(extent) for extent in size)
    slots = min(job.plan.images_per_step, job.plan.max_pixels_per_step // (height * width))
    canvas = Canvas(max(slots, 1), height, width)
    labels = target_canvas(canvas, geometry, job.config.loss_at)
    shape = (labels.slots, labels.height, labels.width)
    kind = job.config.loss.labels
    if kind != "multiclass":
        num_planes = num_logits(kind, len(job.classes.names))
        shape = (labels.slots, num_planes, labels.height, labels.width)
    pixels = torch.zeros(canvas.slots, model.num_channels, height, width)
    layout = padded_batch([size] * canvas.slots, canvas, geometry)
    for p in layout.placements:
        pixels[p.slot, :, p.top : p.top + p.height, p.left : p.left + p.width] = 1.0
    batch = Batch(
        pixels=pixels.contiguous(memory_format=torch.channels_last),
        target=torch.zeros(shape, dtype=torch.uint8),
        layout=layout,
        stems=("made up",) * canvas.slots,
        geometry=geometry,
        loss_at=job.config.loss_at,
    )
    return LoadedStep(batches=(batch,), wait_s=0.0)


def _smallest_pass(loaded: LoadedStep) -> LoadedStep:
    batch = min(loaded.batches, key=lambda b: b.layout.canvas.pixels)
    return LoadedStep(batches=(batch,), wait_s=0.0)


def _valid_pixels(kept: Sequence[LoadedStep]) -> int:
    return sum(batch.layout.valid_pixels for loaded in kept for batch in loaded.batches)


def fewer_threads() -> int:
    """One a core, or half of them: other programs may have the rest of the cores."""
    threads, cores = torch.get_num_threads(), num_cores()
    return cores if threads > cores else max(threads // 2, 1)


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
