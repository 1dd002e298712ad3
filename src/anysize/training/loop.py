"""The steps of an epoch: load, step, say and save."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anysize.data.batch import Batch
from anysize.data.batching import epoch_steps
from anysize.data.loader import LoadedStep, load_steps
from anysize.data.transforms import Draw, draw
from anysize.device import (
    peak_memory_bytes,
    synchronise,
)
from anysize.errors import AnysizeError, DataError
from anysize.geometry import Canvas
from anysize.models.net import Net
from anysize.planning.packing import Step
from anysize.training.events import EventLog
from anysize.training.job import Job
from anysize.training.messages import (
    console_line,
    say_first_visits,
    say_skipped,
    say_smaller_passes,
)
from anysize.training.optim import learning_rate, set_learning_rate
from anysize.training.pace import Pace, time_left
from anysize.training.run_folder import save
from anysize.training.step import StepResult
from anysize.wording import say


@dataclass(slots=True)
class Place:
    """Where a run is.

    Attributes:
        step: Steps done.
        saved_step: Of the last checkpoint.
        first_step: Steps done when this process began.
        in_step: Whether a step is under way: what it leaves, if it is broken off, is half done.
        seen: Canvases that were computed already.
        pace: What steps take.
    """

    step: int
    saved_step: int
    first_step: int = 0
    in_step: bool = False
    seen: set[Canvas] = field(default_factory=set[Canvas])
    pace: Pace = field(default_factory=Pace)


def run_steps(
    job: Job,
    epoch: int,
    steps: Sequence[Step],
    draws: Sequence[Draw],
    place: Place,
    log: EventLog,
) -> Generator[str, None, None]:
    """The steps of an epoch that are still to do; yields loss and time left in words."""
    config, ranks = job.config.train, job.ranks
    window, words = _Window(), ""
    due = steps[place.step - epoch * job.steps_per_epoch :]
    loaded_steps = load_steps(
        job.train_samples,
        map(job.of_this_rank, due),
        draws,
        classes=job.classes,
        geometry=job.model.geometry,
        loss_at=job.config.loss_at,
        pixels=job.pixels,
        num_threads=config.loader_threads,
        prefetch_steps=config.prefetch_steps,
        skip_broken=job.config.data.skip_broken,
        keep_empty=job.lockstep is not None,
        stage=job.stage,
        joint_maps=job.joint_maps,
    )
    with contextlib.closing(loaded_steps):
        for planned in due:
            planned_pixels = job.tally.max_pass_pixels
            with ranks.alike():
                loaded = next(loaded_steps)
            _one_step(job, place, _shared(job, planned, loaded), window, log)
            if job.tally.bad_steps:
                ranks.on_first(lambda: job.tally.require_good_steps(config.max_bad_steps, job.run))
            step = place.step
            if window.losses and (step % config.log_every == 0 or step % job.steps_per_epoch == 0):
                with job.stage("logging"):
                    event = window.event(job, place, epoch)
                    log.write(event)
                    say(job.console, console_line(event, job.num_steps))
                window = _Window()
                words = f"loss {event['loss']:.4f}  {time_left(event)}"
            # Also when passes became smaller: a resumed run must not try the large ones again.
            is_lower = job.tally.max_pass_pixels != planned_pixels
            if step % config.checkpoint_every == 0 or is_lower:
                with job.stage("checkpoint"):
                    _require_finite(job, step, window)
                    save(job, step)
                place.saved_step = step
            yield words


@dataclass(slots=True)
class _Due:
    """A step that is ready.

    Attributes:
        batches: Of this rank.
        wait_s: What this rank waited for it.
        broken: Images left out, with what is wrong, of all ranks; as all that follows.
        stems: Of the images.
        count: What the loss is divided by.
        valid_pixels: Of the images.
        computed_pixels: Of the canvases.
    """

    batches: Sequence[Batch]
    wait_s: float
    broken: Mapping[str, str]
    stems: list[str]
    count: int
    valid_pixels: int
    computed_pixels: int


def _shared(job: Job, planned: Step, loaded: LoadedStep) -> _Due:
    """What all ranks must know of a step before any of them takes it."""
    ranks, batches = job.ranks, loaded.batches
    count, valid, computed, num_broken, *images = ranks.sum_numbers(
        sum(job.loss.count(b) for b in batches),
        sum(b.layout.valid_pixels for b in batches),
        sum(b.layout.canvas.pixels for b in batches),
        len(loaded.broken),
        *(len(b.stems) for b in batches if job.lockstep is not None),
    )
    broken = dict(loaded.broken)
    if num_broken and ranks.size > 1:
        broken = {stem: fault for told in ranks.gather(broken) for stem, fault in told.items()}
    if job.lockstep is not None:  # A pass of which no image is left has no statistics.
        batches = tuple(b for b, number in zip(batches, images, strict=True) if number)
    stems = [job.train_samples[i].stem for p in planned.passes for i in p.images]
    return _Due(
        batches=batches,
        wait_s=loaded.wait_s,
        broken=broken,
        stems=[stem for stem in stems if stem not in broken],
        count=count,
        valid_pixels=valid,
        computed_pixels=computed,
    )


def _one_step(job: Job, place: Place, due: _Due, window: _Window, log: EventLog) -> None:
    """Takes a step, or skips it, and says what was new or wrong about it."""
    step = place.step
    for stem, fault in due.broken.items():
        job.tally.broken[stem] = fault
        say(job.console, f"step {step + 1}: left out an image. {fault}")
        log.write({"event": "broken", "step": step + 1, "image": stem, "fault": fault})
    set_learning_rate(job.optimizer, learning_rate(job.config.optim, step, job.num_steps))
    planned_pixels = job.tally.max_pass_pixels
    start = time.monotonic()
    if not due.stems and all(s.stem in job.tally.broken for s in job.train_samples):
        raise DataError(
            f"No training image in {job.config.data.root} can be read. Look at the first message."
        )
    new: list[Canvas] = []
    _seed_dropout(job.config.train.seed, step)
    if due.stems:
        place.in_step = True
        try:
            result = job.take_step(due.batches, count=due.count)
        except AnysizeError:
            place.in_step = False  # Raised before the update, so that what was learned is whole.
            raise
        new = [canvas for canvas in dict.fromkeys(result.canvases) if canvas not in place.seen]
        window.add(due, result)
        if result.skipped:
            say_skipped(job, step, due.stems, log)
        else:
            job.tally.bad_steps.clear()
    place.in_step = False
    place.step += 1
    if new:
        synchronise(job.device)
    place.pace.add(time.monotonic() - start + due.wait_s, len(new))
    if new:
        say_first_visits(job, step, new, time.monotonic() - start, log)
        place.seen.update(new)
    if job.tally.max_pass_pixels != planned_pixels:
        say_smaller_passes(job, step, log)


def _seed_dropout(seed: int, step: int) -> None:
    """Nets draw dropout from PyTorch's own generator: the same in a step, resumed or not."""
    drawn = np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)
    torch.manual_seed(int(drawn[0]))  # noqa: TID251


class _Window:
    """What happened since the last line of the console."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.losses: list[Tensor] = []
        self.stems: list[str] = []
        self.images = 0
        self.valid_pixels = 0
        self.computed_pixels = 0
        self.wait_s = 0.0

    def add(self, due: _Due, result: StepResult) -> None:
        if not result.skipped:
            self.losses.append(result.loss)
        self.wait_s += due.wait_s
        self.stems.extend(due.stems)
        self.images += len(due.stems)
        self.valid_pixels += due.valid_pixels
        self.computed_pixels += due.computed_pixels

    def event(self, job: Job, place: Place, epoch: int) -> dict[str, Any]:
        step = place.step
        # What the process's first epoch did not meet may never come.
        in_first_epoch = place.first_step + job.steps_per_epoch > step
        unseen = len(job.plan.canvases) - len(place.seen) if in_first_epoch else 0
        losses = torch.stack(self.losses)
        loss = float(losses.mean())  # Waits for the device, so that the clock is true.
        elapsed = time.monotonic() - self.start
        return {
            "event": "train",
            "step": step,
            "epoch": epoch,
            "loss": loss,
            "lr": learning_rate(job.config.optim, step - 1, job.num_steps),
            "images_per_s": self.images / elapsed,
            "valid_megapixels_per_s": self.valid_pixels / elapsed / 1e6,
            "wait_s": self.wait_s,
            "wait_share": self.wait_s / elapsed,
            "waste": 1 - self.valid_pixels / self.computed_pixels,
            "elapsed_s": elapsed,
            "num_steps": job.num_steps,
            "eta_s": place.pace.seconds_left(job.num_steps - step, max(unseen, 0)),
            "first_visits": [len(place.seen), len(place.seen) + max(unseen, 0)],
            "peak_memory_bytes": peak_memory_bytes(job.device),
            "skipped": job.tally.num_skipped,
            "left_out": len(job.tally.broken),
        }


def packed_epochs(
    job: Job, first: int
) -> Generator[tuple[int, list[Step], list[Draw]], None, None]:
    """The epochs of a run from `first` on, each packed while the one before it runs.

    The first rank packs, and tells the others.
    """
    epochs = range(first, job.config.train.epochs)
    packer = ThreadPoolExecutor(1, thread_name_prefix="anysize-packer")
    packing: Future[tuple[list[Step], list[Draw]]] | None = None

    def ahead(epoch: int) -> tuple[list[Step], list[Draw]]:
        nonlocal packing
        packed = drawn_epoch(job, epoch) if packing is None else packing.result()
        packing = packer.submit(drawn_epoch, job, epoch + 1) if epoch + 1 in epochs else None
        return packed

    try:
        for epoch in epochs:
            yield epoch, *job.ranks.on_first(functools.partial(ahead, epoch))
    finally:
        packer.shutdown(wait=False, cancel_futures=True)


def drawn_epoch(job: Job, epoch: int) -> tuple[list[Step], list[Draw]]:
    """Order, places and augmentation of an epoch: a pure function of the seed and the epoch."""
    seed, channels = job.config.train.seed, job.config.model.num_channels
    draws = [
        draw(job.config.augment, s.size, seed=seed, epoch=epoch, index=i, num_channels=channels)
        for i, s in enumerate(job.train_samples)
    ]
    steps = epoch_steps(job.plan, [d.out_size for d in draws], seed=seed, epoch=epoch)
    assert len(steps) == job.steps_per_epoch
    return steps, draws


def is_finite(model: Net) -> bool:
    """Whether all weights and statistics of a net are finite."""
    return all(bool(torch.isfinite(t).all()) for t in model.state_dict().values())


def _require_finite(job: Job, step: int, window: _Window) -> None:
    if not is_finite(job.model):
        raise DataError(
            f"The net is not finite after step {step}: an update of the steps since the last "
            f"checkpoint was too large. Their images are {', '.join(window.stems[-20:])}. Lower "
            "optim.lr and start anew; the checkpoints are from before."
        )
