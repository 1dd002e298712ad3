"""All that a run works with: settings, images, plan and net, made ready before its first step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from rich.console import Console

from anysize.check.budget import require_fit, require_labels, require_pairs
from anysize.config import PixelConvention, RunConfig
from anysize.data.batch import Batch
from anysize.data.joints import JointMaps, num_logits
from anysize.data.record import (
    RECORD_FILE,
    compare_with_record,
    describe_changes,
)
from anysize.data.samples import Classes, Sample, read_folder, split_samples
from anysize.device import (
    Precision,
    prepare_process,
    require_precision,
    select_device,
    set_tf32,
)
from anysize.errors import ConfigError, DataError, first_names
from anysize.models.build import build_model
from anysize.models.net import Net
from anysize.models.ops import set_lockstep
from anysize.models.weights_file import Weights
from anysize.planning.canvases import (
    Plan,
)
from anysize.planning.dealing import deal, deal_in_lockstep
from anysize.planning.packing import Step
from anysize.ranks import ALONE, Lockstep, Ranks
from anysize.timing import Stage, untimed
from anysize.training.class_weights import median_frequency_weights
from anysize.training.fine_tuning import start_from
from anysize.training.losses import Loss, build_loss
from anysize.training.memory import PassLimit, Tally
from anysize.training.optim import build_optimizer
from anysize.training.plans import plan_for
from anysize.training.step import StepResult, train_step
from anysize.wording import say


def prepare(
    config: RunConfig,
    run: Path,
    *,
    resume: bool,
    agrees: Callable[[str], bool] | None,
    console: Console,
    ranks: Ranks = ALONE,
) -> Job:
    """Readies the process, reads data and plan, and builds the net; writes nothing.

    Args:
        config: The settings, with whole paths.
        run: Folder of the run; read where it is resumed.
        resume: See `train`.
        agrees: See `train`.
        console: Where what was found is said.
        ranks: Of which the first reads data and plan for all.

    Raises:
        AnysizeError: Bad settings or data.
    """
    prepare_process()
    found = ranks.on_first(lambda: _read(config, run, resume, agrees, console))
    with ranks.alike():
        return _build(run, resume, console, ranks, found)


_Found: TypeAlias = tuple[RunConfig, Classes, list[Sample], list[Sample], Plan]


def _read(
    config: RunConfig,
    run: Path,
    resume: bool,
    agrees: Callable[[str], bool] | None,
    console: Console,
) -> _Found:
    """Settings with class weights, classes, samples to train and to evaluate on, and the plan."""
    root = Path(config.data.root)
    folder = read_folder(root, config.data, config.loss.labels)
    classes, samples = folder.classes, folder.samples
    for line in (folder.description, *folder.notes):
        say(console, line)
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
        require_pairs(config, classes, root)
    with console.status("planning canvases") as status:
        plan = plan_for(
            config,
            run if resume else None,
            [s.size for s in train_samples],
            progress=lambda done, of: status.update(f"planning canvases: stage {done} of {of}"),
        )
    config = _with_class_weights(config, classes, train_samples, console)
    return config, classes, train_samples, val_samples, plan


def _build(
    run: Path,
    resume: bool,
    console: Console,
    ranks: Ranks,
    found: _Found,
) -> Job:
    """The net on its device, and all that goes with it."""
    config, classes, train_samples, val_samples, plan = found
    device = select_device(config.train.device)
    require_precision(device, config.train.precision)
    set_tf32(config.train.tf32)
    generator = torch.Generator().manual_seed(config.train.seed)
    num_channels = num_logits(config.loss.labels, len(classes.names))
    model = build_model(config.model, num_channels, generator=generator)
    pixels = config.pixels
    if config.train.weights and not resume:
        theirs, taken = start_from(
            model, Path(config.train.weights), config.model, classes, config.loss.labels
        )
        say(console, taken)
        pixels = theirs or pixels
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
        loss=build_loss(config.loss, classes.ignore_index, config.model.part_maps),
        device=device,
        console=console,
        tally=tally,
        pass_limit=PassLimit(tally=tally, ignore_index=classes.ignore_index),
        ranks=ranks,
        lockstep=set_lockstep(model, ranks),
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
    model: Net
    optimizer: torch.optim.Optimizer
    loss: Loss
    device: torch.device
    console: Console
    tally: Tally
    pass_limit: PassLimit
    ranks: Ranks = ALONE
    lockstep: Lockstep | None = None
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

    def of_this_rank(self, step: Step) -> Step:
        """What this rank computes of a step."""
        dealing = deal if self.lockstep is None else deal_in_lockstep
        return dealing(step, self.ranks.size, self.plan.geometry)[self.ranks.rank]

    def take_step(
        self,
        batches: Sequence[Batch],
        precision: Precision | None = None,
        count: int | None = None,
    ) -> StepResult:
        """One optimiser step of the run; a diagnosis may take it in another precision."""
        return train_step(
            self.model,
            self.loss,
            batches,
            self.optimizer,
            precision=precision or self.config.train.precision,
            count=count,
            pass_limit=self.pass_limit,
            ranks=self.ranks,
            lockstep=self.lockstep,
            stage=self.stage,
        )

    @property
    def joint_maps(self) -> JointMaps:
        """What joints become."""
        return JointMaps(self.config.model.part_maps, self.config.loss.radius)

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps an epoch."""
        return math.ceil(len(self.train_samples) / self.plan.images_per_step)

    @property
    def num_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.steps_per_epoch * self.config.train.epochs


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
        say(
            console,
            f"Files changed since the run began: {first_names(found.changed)}. Going on with them "
            "as they are now.",
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
        say(console, f"{news} Going on with those that it began with.")
    return found.train, found.val


def _with_class_weights(
    config: RunConfig, classes: Classes, samples: Sequence[Sample], console: Console
) -> RunConfig:
    weights = config.loss.class_weights
    if config.augment.module and config.loss.labels == "joints":
        raise ConfigError("`augment.module` is for masks, but the labels are joints. Leave it out.")
    if weights == "auto":
        if config.loss.labels == "joints":
            raise ConfigError(
                '`loss.class_weights` "auto" counts pixels, but `loss.kind` is "pose". Give one '
                "weight per joint, or none."
            )
        weights = median_frequency_weights(samples, classes, config.train.loader_threads)
        named = zip(classes.names, weights, strict=True)
        say(
            console,
            f"loss.class_weights from {len(samples)} training masks: "
            f"{', '.join(f'{name} {weight:g}' for name, weight in named)}",
        )
        return dataclasses.replace(
            config, loss=dataclasses.replace(config.loss, class_weights=weights)
        )
    if len(weights) not in (0, len(classes.names)):
        raise ConfigError(
            f"`loss.class_weights` has {len(weights)} numbers, but there are {len(classes.names)} "
            f"classes: {', '.join(classes.names)}. Give one per class, none, or "
            '"auto".'
        )
    return config
