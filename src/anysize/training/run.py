"""The training loop: from `run.toml` to a run folder.

`train` is the story of a run; `anysize.training.step.train_step` is what it does over and over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from anysize.atomic_files import only_process_in, remove_unfinished
from anysize.config import RunConfig, Settings, base_of, load_config
from anysize.ranks import join
from anysize.tables import to_toml
from anysize.training.evaluation import evaluate_if_due, stops_early
from anysize.training.events import EventLog
from anysize.training.job import Job, prepare
from anysize.training.loop import Place, is_finite, packed_epochs, run_steps
from anysize.training.memory import memory_as_a_message
from anysize.training.messages import say_left_out, say_norms_that_cannot_learn
from anysize.training.run_folder import begin, require_run_folder, save
from anysize.training.settings import config_as_begun, load_run_config, with_whole_paths
from anysize.training.stop import stop_requests
from anysize.training.tensorboard import require_tensorboard, tensorboard


def train(
    settings: Settings,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    agrees: Callable[[str], bool] | None = None,
    console: Console,
    tell: Callable[[Mapping[str, Any]], object] | None = None,
) -> Path:
    """Runs or resumes what a `run.toml` describes.

    Args:
        settings: A `run.toml`, or its sections.
        overrides: `section.key=value`, applied over the file.
        resume: Go on from the last checkpoint of the run folder; with as many threads and ranks,
            the result is bit for bit that of a run that was never interrupted.
        agrees: Asks whether to go on with the images that the run began with, where the data folder
            has others by now; None refuses.
        console: Where progress goes.
        tell: Given each event as it is logged; see docs/reference.md.

    Returns:
        The run folder.

    Raises:
        AnysizeError: Bad settings or data; what was done is checkpointed.
        StoppedByUserError: Ctrl-C or SIGTERM, after a checkpoint.
    """
    with join() as ranks:
        console = ranks.console(console)
        config, run = ranks.on_first(lambda: _config_and_folder(settings, overrides, resume))
        job = prepare(config, run, resume=resume, agrees=agrees, console=console, ranks=ranks)
        with contextlib.ExitStack() as held:
            ranks.on_first(lambda: _hold(run, resume, held))
            first_step = begin(job, resume=resume)
            log = held.enter_context(EventLog(run / "events.jsonl" if ranks.is_first else None))
            if tell is not None and ranks.is_first:
                log.listeners.append(tell)
            if resume:
                log.write({"event": "resume", "step": first_step})
            if ranks.is_first:
                held.enter_context(tensorboard(job, first_step, log))
            with memory_as_a_message():
                _run_epochs(job, first_step, log)
        say_left_out(job)
        return run


def _config_and_folder(
    settings: Settings, overrides: Sequence[str], resume: bool
) -> tuple[RunConfig, Path]:
    """The settings of a run, with whole paths, and its folder."""
    base = base_of(settings)
    if resume:
        run = require_run_folder(base / load_config(settings, overrides).train.run, resume=True)
        config = config_as_begun(settings, overrides, run / "run.toml")
    else:
        config = load_run_config(settings, overrides)
        run = require_run_folder(base / config.train.run, resume=False)
    config = with_whole_paths(config, base)
    require_tensorboard(config.train)
    to_toml(config)  # Refuses now what the run's copy of it could not hold.
    return config, run


def _hold(run: Path, resume: bool, held: contextlib.ExitStack) -> None:
    """Takes the folder of a run for this process alone, and tidies it."""
    run.mkdir(parents=True, exist_ok=True)
    held.enter_context(only_process_in(run))
    require_run_folder(run, resume=resume)  # Again: another process may have been faster.
    remove_unfinished(run)
    remove_unfinished(run / "checkpoints")


def _run_epochs(job: Job, first_step: int, log: EventLog) -> None:
    console = job.console
    place = Place(first_step, first_step, first_step=first_step)
    with (
        stop_requests(job.ranks) as stop,
        contextlib.closing(packed_epochs(job, first_step // job.steps_per_epoch)) as epochs,
        Progress(
            TextColumn("[bold]train[/]"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            console=console,
            disable=not console.is_terminal,
        ) as progress,
    ):
        bar = progress.add_task("", total=job.num_steps, completed=first_step)
        try:
            if first_step and first_step % job.steps_per_epoch == 0:
                evaluate_if_due(job, first_step, log, stop, unless_logged=True)
            while not job.ranks.on_first(lambda: stops_early(job, place.step, log)):
                with stop.at_once():
                    packed = next(epochs, None)
                if packed is None:
                    break
                epoch, steps, draws = packed
                if epoch * job.steps_per_epoch == first_step == 0:
                    say_norms_that_cannot_learn(job, steps)
                with contextlib.closing(run_steps(job, epoch, steps, draws, place, log)) as done:
                    for words in done:
                        progress.update(bar, completed=place.step, description=words)
                        stop.raise_if_requested()
                evaluate_if_due(job, place.step, log, stop)
        finally:
            # Also after an error in the data: what was learned so far is not lost. An update that
            # was broken off half-way is not saved: nothing could resume from it.
            if place.step > place.saved_step and not place.in_step and is_finite(job.model):
                save(job, place.step)
