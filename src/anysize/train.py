"""The training loop: from `run.toml` to a run folder.

`train` reads as the story of a run; `train_step` is the one thing that it does over and over, and
what a benchmark or a diagnosis times.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import platform
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from anysize.checkpoint import (
    Weights,
    load_latest_state,
    save_state,
    save_weights,
    start_from,
)
from anysize.config import PixelConvention, RunConfig, load_config, to_toml
from anysize.data.batching import epoch_steps
from anysize.data.loader import Batch, LoadedStep, load_steps
from anysize.data.samples import Classes, Sample, find_samples, read_classes, split_samples
from anysize.data.transforms import Draw, draw, largest_size
from anysize.errors import ConfigError, DataError, StoppedByUserError
from anysize.evaluate import evaluate
from anysize.files import write_atomic
from anysize.geometry import Canvas, LossAt, Size
from anysize.losses import loss_sum
from anysize.models.fcn import FCN, build_model, upsample
from anysize.models.ops import update_moving_statistics
from anysize.optim import build_optimizer, learning_rate, set_learning_rate
from anysize.plan.canvases import Plan, check_plan, plan_canvases, read_plan, write_plan
from anysize.plan.packing import Step
from anysize.runlog import EventLog, forget_events_after, read_events
from anysize.world import Precision, computing, peak_memory_bytes, select_device, synchronise

PLANNED_EPOCHS = 3
"""Epochs of drawn sizes that a plan is made from, where images are rescaled at random."""

MAY_CHANGE = {
    "data.root",
    "train.run",
    "train.weights",
    "train.epochs",
    "train.device",
    "train.log_every",
    "train.checkpoint_every",
    "train.evaluate_every",
    "train.loader_threads",
    "train.prefetch_steps",
}
"""Keys that a resumed run may have changed: they do not alter the steps already done, and what the
data are is held by their fingerprint."""


def train_step(
    model: FCN,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    num_valid: int,
    loss_at: LossAt,
    kind: Literal["softmax", "sigmoid"],
    ignore_index: int,
    class_weights: Tensor | None,
    device: torch.device,
    precision: Precision,
) -> Tensor:
    """One optimiser step over one or more canvases.

    Each canvas adds the gradient of its loss sum divided by `num_valid`, the one count of the step,
    so that the result does not depend on how the images were shared out among canvases.

    Args:
        model: In training mode.
        optimizer: Of the model's parameters; its gradients are cleared afterwards.
        batches: The canvases of the step.
        num_valid: Valid target entries over all of them; 0 leaves the loss at zero.
        loss_at: "grid" or "full", as the targets are.
        kind: Of the loss.
        ignore_index: Value of target entries that do not count.
        class_weights: `[k]` on the device.
        device: Where to compute.
        precision: "bf16" computes under autocast.

    Returns:
        The loss, a scalar on the device.
    """
    total = torch.zeros((), device=device)
    for batch in batches:
        pixels = batch.pixels.to(device, non_blocking=True)
        target = batch.target.to(device, non_blocking=True)
        with computing(device, precision):
            logits = model(pixels, batch.layout)
        if loss_at == "full":
            logits = upsample(logits, batch.layout, model.geometry)
        loss = loss_sum(
            kind, logits, target, ignore_index=ignore_index, class_weights=class_weights
        ) / max(num_valid, 1)
        loss.backward()
        update_moving_statistics(model)
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def train(
    config_path: Path,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    console: Console,
) -> Path:
    """Runs or resumes what a `run.toml` describes.

    Args:
        config_path: The TOML file; paths in it are relative to its folder.
        overrides: `section.key=value`, applied over the file.
        resume: Go on from the last checkpoint of the run folder; the result is bit for bit that of
            a run that was never interrupted.
        console: Where progress goes.

    Returns:
        The run folder.

    Raises:
        AnysizeError: Bad settings or data; what was done is checkpointed.
        StoppedByUserError: Ctrl-C or SIGTERM, after a checkpoint.
    """
    config = _with_whole_paths(load_config(config_path, overrides), config_path.resolve().parent)
    device = select_device(config.train.device)
    run = _run_folder(Path(config.train.run), resume=resume)

    root = Path(config.data.root)
    classes = read_classes(root / "classes.toml")
    samples = find_samples(root, classes, config.loss.kind)
    train_samples, val_samples = split_samples(samples, config.data, root, seed=config.train.seed)
    plan = _plan(config, run if resume else None, [s.size for s in train_samples])
    _check_class_weights(config, classes)

    generator = torch.Generator().manual_seed(config.train.seed)
    model = build_model(config.model, len(classes.names), generator=generator)
    pixels = config.pixels
    if config.train.weights:
        pixels, taken = start_from(model, Path(config.train.weights), config.model, classes)
        console.print(taken)
        if config.pixels not in (pixels, PixelConvention()):
            raise ConfigError(
                f"[pixels] is {config.pixels}, but the weights in {config.train.weights} were "
                f"trained with {pixels}. Leave [pixels] out."
            )
    model = model.to(device).train()
    if config.train.channels_last:
        model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    optimizer = build_optimizer(model, config.optim)
    job = _Job(
        config=config,
        run=run,
        classes=classes,
        train_samples=train_samples,
        val_samples=val_samples,
        plan=plan,
        pixels=pixels,
        model=model,
        optimizer=optimizer,
        device=device,
        console=console,
    )
    first_step = _restore(job) if resume else _start(job)
    with EventLog(run / "events.jsonl") as log:
        if resume:
            log.write({"event": "resume", "step": first_step})
        _run_epochs(job, first_step, log)
    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
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
    device: torch.device
    console: Console

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self.train_samples) / self.plan.images_per_step)

    @property
    def num_steps(self) -> int:
        return self.steps_per_epoch * self.config.train.epochs


def _run_epochs(job: _Job, first_step: int, log: EventLog) -> None:
    config, console = job.config.train, job.console
    seen: set[Canvas] = set()
    with (
        _stop_requests() as stop,
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
        saved_step = first_step
        step = first_step
        in_step = False
        try:
            if first_step and first_step % job.steps_per_epoch == 0:
                _evaluate_if_due(job, first_step, log, stop, unless_logged=True)
            for epoch in range(first_step // job.steps_per_epoch, config.epochs):
                steps, draws = _epoch(job, epoch)
                window = _Window()
                loaded_steps = load_steps(
                    job.train_samples,
                    steps,
                    draws,
                    classes=job.classes,
                    geometry=job.config.model.geometry,
                    loss_at=job.config.model.loss_at,
                    pixels=job.pixels,
                    num_threads=config.loader_threads,
                    prefetch_steps=config.prefetch_steps,
                    start=step - epoch * job.steps_per_epoch,
                )
                with contextlib.closing(loaded_steps):
                    for loaded in loaded_steps:
                        in_step = True
                        _one_step(job, step, loaded, window, seen, log)
                        in_step = False
                        step += 1
                        progress.advance(bar)
                        if step % config.log_every == 0 or step % job.steps_per_epoch == 0:
                            event = window.event(job, step, epoch)
                            log.write(event)
                            progress.update(bar, description=f"loss {event['loss']:.4f}")
                            console.print(console_line(event, job.num_steps), highlight=False)
                            window = _Window()
                        if step % config.checkpoint_every == 0:
                            _require_finite(job, step, window)
                            _save(job, step)
                            saved_step = step
                        stop.heed()
                _evaluate_if_due(job, step, log, stop)
        finally:
            # Also after an error in the data: what was learned so far is not lost. An update that
            # was broken off half-way is not saved: nothing could resume from it.
            if step > saved_step and not in_step and _is_finite(job.model):
                _save(job, step)


def _one_step(
    job: _Job, step: int, loaded: LoadedStep, window: _Window, seen: set[Canvas], log: EventLog
) -> None:
    new = [b.layout.canvas for b in loaded.batches if b.layout.canvas not in seen]
    set_learning_rate(job.optimizer, learning_rate(job.config.optim, step, job.num_steps))
    weights = job.config.loss.class_weights
    start = time.monotonic()
    loss = train_step(
        job.model,
        job.optimizer,
        loaded.batches,
        num_valid=loaded.num_valid,
        loss_at=job.config.model.loss_at,
        kind=job.config.loss.kind,
        ignore_index=job.classes.ignore_index,
        class_weights=torch.tensor(weights, device=job.device) if weights else None,
        device=job.device,
        precision=job.config.train.precision,
    )
    if new:
        synchronise(job.device)
        seconds = time.monotonic() - start
        for canvas in dict.fromkeys(new):
            seen.add(canvas)
            job.console.print(f"first visit of canvas {canvas}: {seconds:.2f} s", highlight=False)
            log.write(
                {
                    "event": "canvas",
                    "step": step + 1,
                    "canvas": list(canvas),
                    "first_visit_s": seconds,
                }
            )
    window.add(loaded, loss)


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

    def add(self, loaded: LoadedStep, loss: Tensor) -> None:
        self.losses.append(loss)
        self.wait_s += loaded.wait_s
        for batch in loaded.batches:
            self.stems.extend(batch.stems)
            self.images += len(batch.stems)
            self.valid_pixels += batch.layout.valid_pixels
            self.computed_pixels += batch.layout.canvas.pixels

    def event(self, job: _Job, step: int, epoch: int) -> dict[str, Any]:
        losses = torch.stack(self.losses)
        loss = float(losses.mean())  # Waits for the device, so that the clock is true.
        elapsed = time.monotonic() - self.start
        if not math.isfinite(loss):
            raise _not_finite("loss", step, self)
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
        }


def _not_finite(what: str, step: int, window: _Window) -> DataError:
    return DataError(
        f"The {what} is not finite in the steps up to {step}; their images are "
        f"{', '.join(window.stems[-20:])}. Lower optim.lr, look at these images and masks, or set "
        "train.precision to float32; the checkpoints are from before."
    )


def _is_finite(model: FCN) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in model.state_dict().values())


def _require_finite(job: _Job, step: int, window: _Window) -> None:
    if not _is_finite(job.model):
        raise _not_finite("net", step, window)


def console_line(event: dict[str, Any], num_steps: int) -> str:
    """The line of the console for a "train" event."""
    return (
        f"step {event['step']:>6}/{num_steps}  loss {event['loss']:.4f}  lr {event['lr']:.2e}  "
        f"{event['images_per_s']:.2f} images/s  {event['valid_megapixels_per_s']:.3f} valid MP/s  "
        f"wait {event['wait_share']:.1%}  waste {event['waste']:.1%}"
    )


def _epoch(job: _Job, epoch: int) -> tuple[list[Step], list[Draw]]:
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
    job: _Job, step: int, log: EventLog, stop: _Stop, *, unless_logged: bool = False
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
    result = evaluate(
        job.model,
        job.val_samples,
        plan=job.plan,
        classes=job.classes,
        kind=job.config.loss.kind,
        pixels=job.pixels,
        precision=job.config.train.precision,
        num_threads=job.config.train.loader_threads,
        progress=stop.heed,
    )
    metric = "miou" if job.config.loss.kind == "softmax" else "map"
    best = max((e[metric] or 0.0 for e in earlier), default=-1.0)
    value = result[metric] or 0.0
    if value > best:
        save_weights(
            job.run / "weights.safetensors",
            Weights(
                model=job.model,
                config=job.config.model,
                classes=job.classes,
                kind=job.config.loss.kind,
                pixels=job.pixels,
            ),
        )
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


def _with_whole_paths(config: RunConfig, base: Path) -> RunConfig:
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
        check_plan(plan, largest, geometry=config.model.geometry, source=str(path))
        return plan
    return plan_canvases(
        _drawn_sizes(config, sizes),
        geometry=config.model.geometry,
        images_per_step=config.plan.images_per_step,
        max_pixels_per_step=config.plan.max_pixels_per_step,
        max_canvases=config.plan.max_canvases,
        must_fit=largest,
    )


def training_sizes(config: RunConfig, base: Path) -> tuple[list[Size], list[Size]]:
    """The sizes that training a `run.toml` will meet, and the largest of each image.

    Args:
        config: The settings.
        base: Folder of the TOML file.

    Raises:
        DataError: The data folder does not hold.
    """
    root = base / config.data.root
    samples = find_samples(root, read_classes(root / "classes.toml"), config.loss.kind)
    own = [s.size for s in split_samples(samples, config.data, root, seed=config.train.seed)[0]]
    return _drawn_sizes(config, own), [largest_size(config.augment, s) for s in own]


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
    if run.is_dir() and any(run.iterdir()):
        raise ConfigError(
            f"The run folder {run} is not empty. Go on with --resume, or set train.run to another."
        )
    return run


def _start(job: _Job) -> int:
    """Writes what describes the run, before its first step."""
    run = job.run
    run.mkdir(parents=True, exist_ok=True)
    (run / "checkpoints").mkdir(exist_ok=True)
    write_atomic(run / "run.toml", to_toml(job.config).encode())
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
    return 0


def _restore(job: _Job) -> int:
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
            f"The training images in {job.config.data.root} are not those that the run in "
            f"{job.run} was trained on: files were added, removed or resized. Put them back, or "
            "start a new run, with train.weights set to this run's weights.safetensors."
        )
    state.restore(job.model, job.optimizer)
    forget_events_after(job.run / "events.jsonl", state.step)
    job.console.print(f"Resuming after step {state.step} of {job.num_steps} ({state.path}).")
    return state.step


def _check_same_settings(job: _Job) -> None:
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


def _save(job: _Job, step: int) -> None:
    save_state(
        job.run / "checkpoints",
        step=step,
        data_fingerprint=_data_fingerprint(job.train_samples),
        model=job.model,
        optimizer=job.optimizer,
    )


class _Stop:
    """Whether the user asked to stop."""

    requested = False

    def heed(self, *_: int) -> None:
        """Called between steps, and between the images of an evaluation."""
        if self.requested:
            raise StoppedByUserError("Stopped; a checkpoint was written. Go on with --resume.")


@contextlib.contextmanager
def _stop_requests() -> Iterator[_Stop]:
    """Turns the first Ctrl-C or SIGTERM into a request that the loop heeds between two steps.

    A second one interrupts at once.
    """
    stop = _Stop()
    before: dict[int, Any] = {}

    def request(number: int, frame: FrameType | None) -> None:
        stop.requested = True
        for n, handler in before.items():
            signal.signal(n, handler)

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, request)
    except ValueError:  # Not in the main thread: signals are the caller's business.
        before.clear()
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
