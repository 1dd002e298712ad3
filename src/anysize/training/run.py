"""The training loop: from `run.toml` to a run folder.

`train` is the story of a run; `anysize.training.step.train_step` is what it does over and over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import platform
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from anysize.atomic_files import LOCK_NAME, only_process_in, remove_unfinished, write_atomic
from anysize.check.budget import require_fit, require_labels
from anysize.checkpoint import (
    Weights,
    config_as_begun,
    load_latest_state,
    load_run_config,
    save_state,
    save_weights,
    start_from,
)
from anysize.config import PixelConvention, RunConfig, load_config, to_toml
from anysize.data.batch import Batch
from anysize.data.batching import epoch_steps
from anysize.data.loader import LoadedStep, load_steps
from anysize.data.record import (
    RECORD_FILE,
    compare_with_record,
    describe_changes,
    write_record,
)
from anysize.data.samples import Classes, Sample, read_folder, split_samples
from anysize.data.transforms import Draw, draw, largest_size
from anysize.device import (
    Precision,
    is_out_of_memory,
    peak_memory_bytes,
    prepare_process,
    release_memory,
    select_device,
    synchronise,
)
from anysize.errors import AnysizeError, ConfigError, DataError, first_names
from anysize.geometry import Canvas, Size
from anysize.models.build import build_model, geometry_of
from anysize.models.fcn import FCN
from anysize.planning.canvases import (
    Plan,
    check_plan,
    plan_canvases,
    read_plan,
    worthwhile_canvases,
    write_plan,
)
from anysize.planning.packing import Step
from anysize.predict.evaluate import evaluate
from anysize.predict.metrics import SCORES
from anysize.timing import Stage, untimed
from anysize.training.events import EventLog, forget_events_after, read_events
from anysize.training.losses import Loss, build_loss
from anysize.training.memory import PassLimit, Tally, memory_as_a_message
from anysize.training.optim import build_optimizer, learning_rate, set_learning_rate
from anysize.training.step import StepResult, train_step
from anysize.training.stop import Stop, stop_requests

PLANNED_EPOCHS = 3
"""Epochs of drawn sizes that a plan is made from, where images are rescaled at random."""

WRITTEN_AT_START = {"checkpoints", "events.jsonl", "plan.json", "versions.json", RECORD_FILE}
"""What a run writes before `run.toml`: a folder with no more than this was killed so early."""

MAY_CHANGE = {
    "data.root",
    "data.skip_broken",
    "model.activation_checkpointing",
    "train.run",
    "train.weights",
    "train.epochs",
    "train.device",
    "train.log_every",
    "train.checkpoint_every",
    "train.evaluate_every",
    "train.loader_threads",
    "train.prefetch_steps",
    "train.max_bad_steps",
}
"""Keys that a resumed run may have changed: they do not alter the steps already done, and what the
data are is held by their fingerprint."""


def train(
    config_path: Path,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    agrees: Callable[[str], bool] | None = None,
    console: Console,
) -> Path:
    """Runs or resumes what a `run.toml` describes.

    Args:
        config_path: The TOML file; paths in it are relative to its folder.
        overrides: `section.key=value`, applied over the file.
        resume: Go on from the last checkpoint of the run folder; the result is bit for bit that of
            a run that was never interrupted.
        agrees: Asks whether to go on with the images that the run began with, where the data folder
            has others by now; None refuses.
        console: Where progress goes.

    Returns:
        The run folder.

    Raises:
        AnysizeError: Bad settings or data; what was done is checkpointed.
        StoppedByUserError: Ctrl-C or SIGTERM, after a checkpoint.
    """
    base = config_path.resolve().parent
    if resume:
        run = _run_folder(base / load_config(config_path, overrides).train.run, resume=True)
        config = config_as_begun(config_path, overrides, run / "run.toml")
    else:
        config = load_run_config(config_path, overrides)
        run = _run_folder(base / config.train.run, resume=False)
    config = with_whole_paths(config, base)
    job = prepare(config, run, resume=resume, agrees=agrees, console=console)
    run.mkdir(parents=True, exist_ok=True)
    with only_process_in(run):
        _run_folder(run, resume=resume)  # Again: another process may have been faster.
        remove_unfinished(run)
        remove_unfinished(run / "checkpoints")
        first_step = _restore(job) if resume else _start(job)
        with EventLog(run / "events.jsonl") as log:
            if resume:
                log.write({"event": "resume", "step": first_step})
            with memory_as_a_message():
                _run_epochs(job, first_step, log)
    _say_mishaps(job)
    return run


def prepare(
    config: RunConfig,
    run: Path,
    *,
    resume: bool,
    agrees: Callable[[str], bool] | None,
    console: Console,
) -> Job:
    """Readies the process, reads data and plan, and builds the net; writes nothing.

    Args:
        config: The settings, with whole paths.
        run: Folder of the run; read where it is resumed.
        resume: See `train`.
        agrees: See `train`.
        console: Where what was found is said.

    Raises:
        AnysizeError: Bad settings or data.
    """
    prepare_process()
    device = select_device(config.train.device)
    root = Path(config.data.root)
    folder = read_folder(root, config.data, config.loss.labels)
    classes, samples = folder.classes, folder.samples
    for line in (folder.description, *folder.notes):
        console.print(line, highlight=False)
    train_samples, val_samples = split_samples(
        samples, config.data, root, seed=config.train.seed, listed=folder.listed
    )
    if resume:
        train_samples, val_samples = _samples_as_before(
            run, samples, train_samples, val_samples, agrees, console
        )
    else:
        require_fit(train_samples, config, root)
        require_labels(train_samples, classes, "training")
        require_labels(val_samples, classes, "evaluation")
    plan = _plan(config, run if resume else None, [s.size for s in train_samples])
    _check_class_weights(config, classes)

    generator = torch.Generator().manual_seed(config.train.seed)
    model = build_model(config.model, len(classes.names), generator=generator)
    pixels = config.pixels
    if config.train.weights and not resume:
        pixels, taken = start_from(model, Path(config.train.weights), config.model, classes)
        console.print(taken)
        # These are the camera's, not the net's.
        pixels = dataclasses.replace(
            pixels, white=config.pixels.white, float_range=config.pixels.float_range
        )
        if config.pixels != pixels:
            raise ConfigError(
                f"[pixels] is {config.pixels}, but the weights in {config.train.weights} were "
                f"trained with {pixels}. Leave [pixels] out, except for `white` and "
                "`float_range`."
            )
    model = model.to(device).train()
    if config.train.channels_last:
        model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    optimizer = build_optimizer(model, config.optim)
    tally = Tally()
    return Job(
        config=config,
        run=run,
        classes=classes,
        train_samples=train_samples,
        val_samples=val_samples,
        plan=plan,
        pixels=pixels,
        model=model,
        optimizer=optimizer,
        loss=build_loss(config.loss, classes.ignore_index),
        device=device,
        console=console,
        tally=tally,
        pass_limit=PassLimit(tally=tally, ignore_index=classes.ignore_index),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that a run works with; nothing in it is replaced while it runs."""

    config: RunConfig
    run: Path
    classes: Classes
    train_samples: list[Sample]
    val_samples: list[Sample]
    plan: Plan
    pixels: PixelConvention
    model: FCN
    optimizer: torch.optim.Optimizer
    loss: Loss
    device: torch.device
    console: Console
    tally: Tally
    pass_limit: PassLimit
    stage: Stage = untimed

    @property
    def weights(self) -> Weights:
        """The net as it is now, and what is needed to use it."""
        return Weights(
            model=self.model,
            config=self.config.model,
            classes=self.classes,
            kind=self.config.loss.labels,
            pixels=self.pixels,
        )

    def take_step(self, batches: Sequence[Batch], precision: Precision | None = None) -> StepResult:
        """One optimiser step of the run; a diagnosis may take it in another precision."""
        return train_step(
            self.model,
            self.loss,
            batches,
            self.optimizer,
            precision=precision or self.config.train.precision,
            pass_limit=self.pass_limit,
            stage=self.stage,
        )

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps an epoch."""
        return math.ceil(len(self.train_samples) / self.plan.images_per_step)

    @property
    def num_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.steps_per_epoch * self.config.train.epochs


@dataclass(slots=True)
class Place:
    """Where a run is.

    Attributes:
        step: Steps done.
        saved_step: Of the last checkpoint.
        in_step: Whether a step is under way: what it leaves, if it is broken off, is half done.
        seen: Canvases that were computed already.
    """

    step: int
    saved_step: int
    in_step: bool = False
    seen: set[Canvas] = field(default_factory=set[Canvas])


def _run_epochs(job: Job, first_step: int, log: EventLog) -> None:
    console = job.console
    place = Place(first_step, first_step)
    with (
        stop_requests() as stop,
        Progress(
            TextColumn("[bold]train[/]"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        ) as progress,
    ):
        bar = progress.add_task("", total=job.num_steps, completed=first_step)
        try:
            if first_step and first_step % job.steps_per_epoch == 0:
                _evaluate_if_due(job, first_step, log, stop, unless_logged=True)
            for epoch in range(first_step // job.steps_per_epoch, job.config.train.epochs):
                with stop.at_once():
                    steps, draws = drawn_epoch(job, epoch)
                with contextlib.closing(run_steps(job, epoch, steps, draws, place, log)) as done:
                    for loss in done:
                        progress.update(bar, completed=place.step, description=loss)
                        stop.heed()
                _evaluate_if_due(job, place.step, log, stop)
        finally:
            # Also after an error in the data: what was learned so far is not lost. An update that
            # was broken off half-way is not saved: nothing could resume from it.
            if place.step > place.saved_step and not place.in_step and _is_finite(job.model):
                _save(job, place.step)


def run_steps(
    job: Job,
    epoch: int,
    steps: Sequence[Step],
    draws: Sequence[Draw],
    place: Place,
    log: EventLog,
) -> Generator[str, None, None]:
    """The steps of an epoch that are still to do; yields the last loss, in words, after each."""
    config = job.config.train
    window, loss = _Window(), ""
    loaded_steps = load_steps(
        job.train_samples,
        steps,
        draws,
        classes=job.classes,
        geometry=job.model.geometry,
        loss_at=job.config.model.loss_at,
        pixels=job.pixels,
        num_threads=config.loader_threads,
        prefetch_steps=config.prefetch_steps,
        start=place.step - epoch * job.steps_per_epoch,
        skip_broken=job.config.data.skip_broken,
        stage=job.stage,
    )
    with contextlib.closing(loaded_steps):
        for loaded in loaded_steps:
            planned_pixels = job.tally.max_pass_pixels
            _one_step(job, place, loaded, window, log)
            job.tally.require_good_steps(config.max_bad_steps, job.run)
            step = place.step
            if window.losses and (step % config.log_every == 0 or step % job.steps_per_epoch == 0):
                with job.stage("logging"):
                    event = window.event(job, step, epoch)
                    log.write(event)
                    job.console.print(console_line(event, job.num_steps), highlight=False)
                window, loss = _Window(), f"loss {event['loss']:.4f}"
            # Also when passes became smaller: a resumed run must not try the large ones again.
            is_lower = job.tally.max_pass_pixels != planned_pixels
            if step % config.checkpoint_every == 0 or is_lower:
                with job.stage("checkpoint"):
                    _require_finite(job, step, window)
                    _save(job, step)
                place.saved_step = step
            yield loss


def _one_step(job: Job, place: Place, loaded: LoadedStep, window: _Window, log: EventLog) -> None:
    """Takes a step, or skips it, and says what was new or wrong about it."""
    step = place.step
    for stem, fault in loaded.broken.items():
        job.tally.broken[stem] = fault
        job.console.print(f"step {step + 1}: left out an image. {fault}", highlight=False)
        log.write({"event": "broken", "step": step + 1, "image": stem, "fault": fault})
    set_learning_rate(job.optimizer, learning_rate(job.config.optim, step, job.num_steps))
    planned_pixels = job.tally.max_pass_pixels
    start = time.monotonic()
    if not loaded.batches and all(s.stem in job.tally.broken for s in job.train_samples):
        raise DataError(
            f"No training image in {job.config.data.root} can be read. Look at the first message."
        )
    new: list[Canvas] = []
    if loaded.batches:
        place.in_step = True
        try:
            result = job.take_step(loaded.batches)
        except AnysizeError:
            place.in_step = False  # Raised before the update, so that what was learned is whole.
            raise
        new = [canvas for canvas in dict.fromkeys(result.canvases) if canvas not in place.seen]
        window.add(loaded, result)
        if result.skipped:
            _say_skipped(job, step, loaded, log)
        else:
            job.tally.bad_steps.clear()
    place.in_step = False
    place.step += 1
    if new:
        synchronise(job.device)
        _say_first_visits(job, step, new, time.monotonic() - start, log)
        place.seen.update(new)
    if job.tally.max_pass_pixels != planned_pixels:
        _say_smaller_passes(job, step, log)


def _say_first_visits(
    job: Job, step: int, canvases: Sequence[Canvas], seconds: float, log: EventLog
) -> None:
    for canvas in canvases:
        job.console.print(f"first visit of canvas {canvas}: {seconds:.2f} s", highlight=False)
        log.write(
            {
                "event": "canvas",
                "step": step + 1,
                "canvas": list(canvas),
                "first_visit_s": seconds,
            }
        )


def _say_skipped(job: Job, step: int, loaded: LoadedStep, log: EventLog) -> None:
    images = [stem for batch in loaded.batches for stem in batch.stems]
    job.tally.skip(step + 1, images)
    in_a_row = len(job.tally.bad_steps)
    job.console.print(
        f"step {step + 1} skipped: its loss or gradient is not finite; {in_a_row} in a row. "
        f"Images: {first_names(images)}",
        highlight=False,
    )
    log.write({"event": "skip", "step": step + 1, "images": images, "in_a_row": in_a_row})


def _say_smaller_passes(job: Job, step: int, log: EventLog) -> None:
    limit = job.tally.max_pass_pixels
    exact = (
        "the result is the same"
        if job.config.model.norm == "frozen"
        else "the trained norms' statistics are now of smaller passes"
    )
    job.console.print(
        f"Memory ran out in step {step + 1}. It was taken in smaller passes, and so are all from "
        f"here on: at most {limit:,} canvas pixels at once, or one image; {exact}.",
        highlight=False,
    )
    log.write({"event": "memory", "step": step + 1, "max_pass_pixels": limit})


def _say_mishaps(job: Job) -> None:
    tally = job.tally
    if tally.num_skipped:
        job.console.print(
            f"Steps skipped since their loss or gradient was not finite: {tally.num_skipped} of "
            f"{job.num_steps}; {job.run / 'events.jsonl'} names their images.",
            highlight=False,
        )
    if tally.broken:
        job.console.print(
            f"Images left out since they cannot be read: {len(tally.broken)} "
            f"({first_names(list(tally.broken))}).",
            highlight=False,
        )


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

    def add(self, loaded: LoadedStep, result: StepResult) -> None:
        if not result.skipped:
            self.losses.append(result.loss)
        self.wait_s += loaded.wait_s
        for batch in loaded.batches:
            self.stems.extend(batch.stems)
            self.images += len(batch.stems)
            self.valid_pixels += batch.layout.valid_pixels
            self.computed_pixels += batch.layout.canvas.pixels

    def event(self, job: Job, step: int, epoch: int) -> dict[str, Any]:
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
            "peak_memory_bytes": peak_memory_bytes(job.device),
            "skipped": job.tally.num_skipped,
            "left_out": len(job.tally.broken),
        }


def _is_finite(model: FCN) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in model.state_dict().values())


def _require_finite(job: Job, step: int, window: _Window) -> None:
    if not _is_finite(job.model):
        raise DataError(
            f"The net is not finite after step {step}: an update of the steps since the last "
            f"checkpoint was too large. Their images are {', '.join(window.stems[-20:])}. Lower "
            "optim.lr and start anew; the checkpoints are from before."
        )


def console_line(event: dict[str, Any], num_steps: int) -> str:
    """The line of the console for a "train" event."""
    skipped = f"  skipped {event['skipped']}" if event["skipped"] else ""
    left_out = f"  left out {event['left_out']}" if event["left_out"] else ""
    return (
        f"step {event['step']:>6}/{num_steps}  loss {event['loss']:.4f}  lr {event['lr']:.2e}  "
        f"{event['images_per_s']:.2f} images/s  {event['valid_megapixels_per_s']:.3f} valid MP/s  "
        f"wait {event['wait_share']:.1%}  waste {event['waste']:.1%}{skipped}{left_out}"
    )


def drawn_epoch(job: Job, epoch: int) -> tuple[list[Step], list[Draw]]:
    """Order, places and augmentation of an epoch: a pure function of the seed and the epoch."""
    seed = job.config.train.seed
    draws = [
        draw(job.config.augment, s.size, seed=seed, epoch=epoch, index=i)
        for i, s in enumerate(job.train_samples)
    ]
    steps = epoch_steps(job.plan, [d.out_size for d in draws], seed=seed, epoch=epoch)
    assert len(steps) == job.steps_per_epoch
    return steps, draws


def _evaluate_if_due(
    job: Job, step: int, log: EventLog, stop: Stop, *, unless_logged: bool = False
) -> None:
    every = job.config.train.evaluate_every
    epoch = step // job.steps_per_epoch
    last = step == job.num_steps
    if not last and (every == 0 or epoch % every != 0):
        return
    earlier = [e for e in read_events(job.run / "events.jsonl") if e["event"] == "evaluate"]
    if unless_logged and any(e["step"] == step for e in earlier):
        return
    start = time.monotonic()
    result = _evaluate(job, step, log, stop)
    _, metric = SCORES[job.config.loss.labels]
    best = max((e[metric] or 0.0 for e in earlier), default=-1.0)
    value = result[metric] or 0.0
    if value > best:
        save_weights(job.run / "weights.safetensors", job.weights)
        metrics = json.dumps({"step": step, **result}, indent=2)
        write_atomic(job.run / "metrics.json", metrics.encode())
    log.write(
        {
            "event": "evaluate",
            "step": step,
            "epoch": epoch,
            "seconds": time.monotonic() - start,
            "best": value > best,
            **result,
        }
    )
    job.console.print(
        f"evaluate after epoch {epoch}: {metric} {value:.2%}"
        f"{' (best so far, saved)' if value > best else ''}",
        highlight=False,
    )


def _evaluate(job: Job, step: int, log: EventLog, stop: Stop) -> dict[str, Any]:
    """Evaluates on the plan's canvases, or on the smaller ones of them that memory holds."""
    canvases = job.plan.canvases
    while True:
        limit = job.tally.max_pass_pixels or job.plan.max_pixels_per_step
        canvases = tuple(c for c in canvases if c.pixels <= limit)
        broken: dict[str, str] | None = {} if job.config.data.skip_broken else None
        try:
            result = evaluate(
                job.model,
                job.val_samples,
                plan=dataclasses.replace(job.plan, canvases=canvases),
                classes=job.classes,
                kind=job.config.loss.labels,
                pixels=job.pixels,
                precision=job.config.train.precision,
                num_threads=job.config.train.loader_threads,
                progress=stop.heed,
                broken=broken,
            )
        except (RuntimeError, MemoryError) as error:
            if not (canvases and is_out_of_memory(error)):
                raise
            largest = max(c.pixels for c in canvases)
        else:
            break
        release_memory(job.device)
        canvases = tuple(c for c in canvases if c.pixels < largest)
        job.console.print(
            f"Memory ran out in the evaluation: it runs on canvases below {largest:,} pixels.",
            highlight=False,
        )
    if broken and len(broken) == len(job.val_samples):
        raise DataError(f"No image of the evaluation can be read: {next(iter(broken.values()))}")
    for stem, fault in (broken or {}).items():
        job.tally.broken[stem] = fault
        job.console.print(f"evaluation: left out an image. {fault}", highlight=False)
        log.write({"event": "broken", "step": step, "image": stem, "fault": fault})
    return result


def with_whole_paths(config: RunConfig, base: Path) -> RunConfig:
    """Paths relative to `run.toml` made whole, so that the run's own copy of it holds anywhere."""

    def whole(path: str) -> str:
        return str(base / path) if path else ""

    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, root=whole(config.data.root)),
        plan=dataclasses.replace(config.plan, file=whole(config.plan.file)),
        train=dataclasses.replace(
            config.train, run=whole(config.train.run), weights=whole(config.train.weights)
        ),
    )


def _plan(config: RunConfig, resumed_run: Path | None, sizes: Sequence[Size]) -> Plan:
    """Reads the run's or the named plan, or makes one for the sizes that training will meet."""
    largest = [largest_size(config.augment, s) for s in sizes]
    if resumed_run or config.plan.file:
        path = resumed_run / "plan.json" if resumed_run else Path(config.plan.file)
        plan = read_plan(path)
        check_plan(plan, largest, geometry=geometry_of(config.model), source=str(path))
        return plan
    drawn = _drawn_sizes(config, sizes)
    return plan_canvases(
        drawn,
        geometry=geometry_of(config.model),
        images_per_step=config.plan.images_per_step,
        max_pixels_per_step=config.plan.max_pixels_per_step,
        max_canvases=most_canvases(config, drawn, num_images=len(sizes)),
        must_fit=largest,
    )


def most_canvases(config: RunConfig, drawn: Sequence[Size], *, num_images: int) -> int:
    """`plan.max_canvases`, or what pays in a run that meets the drawn sizes of so many images."""
    if config.plan.max_canvases:
        return config.plan.max_canvases
    return worthwhile_canvases(
        drawn,
        epochs=config.train.epochs * num_images / max(len(drawn), 1),
        on_gpu=select_device(config.train.device).type == "cuda",
    )


def training_sizes(config: RunConfig, base: Path) -> tuple[list[Size], list[Size], tuple[str, ...]]:
    """The sizes that a `run.toml` will meet, the largest of each image, and what was found.

    Args:
        config: The settings.
        base: Folder of the TOML file.

    Raises:
        DataError: The data folder does not hold.
    """
    root = base / config.data.root
    folder = read_folder(root, config.data, config.loss.labels)
    train, _ = split_samples(
        folder.samples, config.data, root, seed=config.train.seed, listed=folder.listed
    )
    own = [s.size for s in train]
    largest = [largest_size(config.augment, s) for s in own]
    return _drawn_sizes(config, own), largest, (folder.description, *folder.notes)


def _drawn_sizes(config: RunConfig, sizes: Sequence[Size]) -> list[Size]:
    """The images' own sizes, or those of a few epochs of augmentation."""
    augment = config.augment
    if augment.min_scale == augment.max_scale == 1 and not augment.crop:
        return list(sizes)
    return [
        draw(augment, size, seed=config.train.seed, epoch=epoch, index=i).out_size
        for epoch in range(PLANNED_EPOCHS)
        for i, size in enumerate(sizes)
    ]


def _run_folder(run: Path, *, resume: bool) -> Path:
    if resume:
        if not (run / "run.toml").is_file():
            raise ConfigError(f"There is no run to resume in {run}. Start it without --resume.")
        return run
    names = {p.name for p in run.iterdir()} if run.is_dir() else set[str]()
    was_killed_early = LOCK_NAME in names and all(
        n == LOCK_NAME or n in WRITTEN_AT_START or n.endswith(".part") for n in names
    )
    if names and not was_killed_early:
        raise ConfigError(
            f"The run folder {run} is not empty. Go on with --resume, or set train.run to another."
        )
    return run


def _start(job: Job) -> int:
    """Writes what describes the run, before its first step; `run.toml` last, which makes it one."""
    run = job.run
    _save(job, 0)
    write_record(run / RECORD_FILE, job.train_samples, job.val_samples)
    write_plan(job.plan, run / "plan.json", sizes=[s.size for s in job.train_samples])
    names = ("torch", "numpy", "pillow", "safetensors")
    versions = {
        "anysize": importlib.metadata.version("anysize"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(job.device),
        **{name: importlib.metadata.version(name) for name in names},
    }
    write_atomic(run / "versions.json", json.dumps(versions, indent=2).encode())
    write_atomic(run / "events.jsonl", b"")
    write_atomic(run / "run.toml", to_toml(job.config).encode())
    return 0


def _restore(job: Job) -> int:
    """Puts the net, the optimiser and the log back to the last checkpoint; returns its step."""
    _check_same_settings(job)
    state = load_latest_state(job.run / "checkpoints")
    if state is None:
        job.console.print("No checkpoint yet: starting from the first step.")
        return _start(job)
    for message in state.damaged:
        job.console.print(f"Passed over: {message}")
    if state.data_fingerprint != _data_fingerprint(job.train_samples):
        raise DataError(
            f"{state.path} is of other training images than {job.run / RECORD_FILE} lists. Put the "
            "list back, or start a new run, with train.weights set to this run's "
            "weights.safetensors."
        )
    state.restore(job.model, job.optimizer)
    job.tally.restore(state.tally, str(state.path))
    forget_events_after(job.run / "events.jsonl", state.step)
    job.console.print(f"Resuming after step {state.step} of {job.num_steps} ({state.path}).")
    return state.step


def _samples_as_before(
    run: Path,
    samples: Sequence[Sample],
    train: Sequence[Sample],
    val: Sequence[Sample],
    agrees: Callable[[str], bool] | None,
    console: Console,
) -> tuple[list[Sample], list[Sample]]:
    """The images that a run began with; says and asks if the data folder has others by now."""
    found = compare_with_record(run / RECORD_FILE, samples, train, val)
    if found.changed:
        console.print(
            f"Files changed since the run began: {first_names(found.changed)}. Going on with them "
            "as they are now.",
            highlight=False,
        )
    news = describe_changes(found)
    if news:
        if agrees is None:
            raise DataError(
                f"{news} To go on with those that it began with, bit for bit as if nothing had "
                "changed, add --as-before; or start a new run with all of them."
            )
        if not agrees(f"{news} Go on with those that it began with?"):
            raise DataError("Nothing was done. A new run takes the images as they are now.")
        console.print(f"{news} Going on with those that it began with.", highlight=False)
    return found.train, found.val


def _check_same_settings(job: Job) -> None:
    path = job.run / "run.toml"
    before, now = _flat(load_config(path)), _flat(job.config)
    changed = [
        f"{key} was {before[key]!r}, is {now[key]!r}"
        for key in now
        if before[key] != now[key] and key not in MAY_CHANGE
    ]
    if changed:
        raise ConfigError(
            f"The settings are not those of the run in {job.run}: {'; '.join(changed)}. "
            "Set them back, or start a new run."
        )


def _flat(config: RunConfig) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, table in dataclasses.asdict(config).items()
        for key, value in table.items()
    }


def _check_class_weights(config: RunConfig, classes: Classes) -> None:
    num_weights = len(config.loss.class_weights)
    if num_weights not in (0, len(classes.names)):
        raise ConfigError(
            f"`loss.class_weights` has {num_weights} numbers, but there are {len(classes.names)} "
            f"classes: {', '.join(classes.names)}. Give one a class, or none."
        )


def _data_fingerprint(samples: Sequence[Sample]) -> str:
    lines = "".join(f"{s.stem} {s.size}\n" for s in samples)
    return hashlib.sha256(lines.encode()).hexdigest()


def _save(job: Job, step: int) -> None:
    save_state(
        job.run / "checkpoints",
        step=step,
        data_fingerprint=_data_fingerprint(job.train_samples),
        model=job.model,
        optimizer=job.optimizer,
        tally=job.tally.to_json(),
    )
