"""From the measurements of a run to findings. Pure: no clock, no net.

An epoch is estimated from the steps that were measured: what grows with the canvas by its pixels,
the rest by the number of steps. Every finding rests on a control or a trial: the same work measured
by turns as it is set and as it would be. A gain that not nearly all turns agree on is no finding.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anysize_why.findings import Finding, Verdict, format_verdict, verdict

__all__ = [
    "WAIT",
    "Control",
    "Diagnosis",
    "Epoch",
    "Measurements",
    "StepTimes",
    "Trial",
    "describe",
    "diagnose",
    "estimate_epoch",
]

WAIT, OPTIMISER = "wait for data", "optimiser"
BY_PIXELS = ("transfer", "forward", "backward")
"""Stages of a step that grow with its canvases."""

LEAST_SHARE = 0.05
"""Of an epoch: what costs or saves less is no finding."""

MUST_HELP = 0.1
"""Share of waits from which they are a finding though no setting was measured to help."""

MOST_EVALUATION, WANTED_EVALUATION = 0.15, 0.1
"""Share of an epoch from which evaluation is a finding, and what the change aims at. An evaluation
of a fifth of the images every epoch lies below."""

WANTED_CHECKPOINTS, WANTED_LOGGING = 0.02, 0.01
"""Shares of an epoch that the changes aim at."""

PLENTY = 0.7
"""Share of the memory that may be taken where activations are kept."""


def estimate_epoch(m: Measurements) -> Epoch:
    """What one epoch takes, stage by stage, from the steps that were measured."""
    repeats = [s for s in m.steps if not s.new_canvases] or list(m.steps)
    by_pixels = m.epoch_computed_pixels / sum(s.computed_pixels for s in repeats)
    by_steps = m.steps_per_epoch / len(repeats)
    waits = {
        first: [s.stages.get(WAIT, 0.0) for s in m.steps if s.first_of_epoch is first]
        for first in (True, False)
    }
    # An epoch starts with empty hands: its first wait is unlike the others.
    first_wait = statistics.fmean(waits[True] or waits[False])
    wait = first_wait + (m.steps_per_epoch - 1) * statistics.fmean(waits[False] or waits[True])
    stages = {
        WAIT: wait,
        **{n: by_pixels * sum(s.stages.get(n, 0.0) for s in repeats) for n in BY_PIXELS},
        OPTIMISER: by_steps * sum(s.stages.get(OPTIMISER, 0.0) for s in repeats),
        "packing": m.packing_s,
        "first visits": _first_visits(m, repeats) / m.epochs,
        "logging": m.logging_s * math.ceil(m.steps_per_epoch / m.settings["train.log_every"]),
        "checkpoint": m.checkpoint_s * m.steps_per_epoch / m.settings["train.checkpoint_every"],
        "evaluation": m.evaluation_s / (m.settings["train.evaluate_every"] or m.epochs),
    }
    rest = by_steps * sum(s.wall_s - sum(s.stages.values()) for s in repeats)
    return Epoch(wall_s=sum(stages.values()) + rest, stages=stages, unaccounted_s=rest)


def _first_visits(m: Measurements, repeats: Sequence[StepTimes]) -> float:
    """Seconds that the first visits of all canvases take more than repeats, once a run."""
    first = [s for s in m.steps if s.new_canvases]
    if not first or any(s.new_canvases for s in repeats):
        return 0.0
    rate = sum(s.computing_s for s in repeats) / sum(s.computed_pixels for s in repeats)
    more = sum(s.computing_s - rate * s.computed_pixels for s in first)
    return max(more, 0.0) / sum(s.new_canvases for s in first) * m.num_canvases


def diagnose(m: Measurements) -> Diagnosis:
    """Findings, most costly first, and what was found harmless."""
    epoch = estimate_epoch(m)
    looked: tuple[Callable[[Measurements, Epoch], _Found | str | None], ...] = (
        _waiting,
        _canvases,
        _evaluation,
        _checkpoints,
        _logging,
        _precision,
        _channels_last,
        _threads,
        _recomputing,
    )
    results = [look(m, epoch) for look in looked]
    found = [r for r in results if isinstance(r, _Found)]
    share = None
    if m.limit_flops_s:
        flops = m.flops_a_pixel * m.epoch_valid_pixels
        share = flops / (m.limit_flops_s * epoch.wall_s)
    expected = epoch.wall_s
    for each in found:
        if each.finding.settings:
            expected *= 1 - each.saved_s / epoch.wall_s
    return Diagnosis(
        verdict=verdict(
            epoch.wall_s,
            list(epoch.stages.items()),
            [each.finding for each in found],
            harmless=[r for r in results if isinstance(r, str)],
            limit_share=share,
            not_measured=m.not_measured,
        ),
        expected_s=expected,
    )


def describe(m: Measurements, diagnosis: Diagnosis) -> str:
    """What a person reads."""
    firsts = sum(1 for s in m.steps if s.new_canvases)
    loader = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in m.loader_s.items())
    lines = [
        f"An epoch of {m.steps_per_epoch} steps and {m.epoch_images} images on {m.device}, "
        f"estimated from {len(m.steps)} steps that were measured ({firsts} of them with a first "
        f"visit) and {m.evaluated_images} of {m.val_images} images of the evaluation.",
        format_verdict(diagnosis.verdict, over="epoch"),
        f"Beside the steps, in {m.settings['train.loader_threads']} loader thread(s): {loader} an "
        "epoch. They lie over the stages above; only the wait is wall clock.",
    ]
    share = diagnosis.verdict.limit_share
    if share is not None and not diagnosis.verdict.healthy:
        lines.append(f"It reaches {share:.1%} of the device's measured limit.")
    return "\n".join(lines)


def _waiting(m: Measurements, epoch: Epoch) -> _Found | str | None:
    wait = epoch.stages[WAIT]
    if wait < LEAST_SHARE * epoch.wall_s:
        return f"waiting for data: {wait:.2f} s an epoch, {wait / epoch.wall_s:.1%}."
    threads = m.settings["train.loader_threads"]
    working = sum(m.loader_s.values())
    parts = ", ".join(f"{n} {s / working:.0%}" for n, s in m.loader_s.items()) if working else "-"
    evidence = (
        f"steps wait {wait / epoch.wall_s:.0%} of the time; to load an epoch takes "
        f"{working:.2f} s in {threads} thread(s) ({parts})"
    )
    loading = [t for t in m.trials if all(k.startswith("train.") for k, _ in t.settings)]
    best = min(loading, key=lambda t: statistics.median(t.ratios), default=None)
    if best is not None and _is_confirmed(best.ratios):
        saved = min((1 - statistics.median(best.ratios)) * epoch.loop_s, wait)
        return _found(
            "waiting for data",
            cost_s=wait,
            evidence=evidence,
            change=_in_words(best.settings),
            saved_s=saved,
            known=f"measured by {len(best.ratios)} turns with and without",
            settings=best.settings,
        )
    if wait < MUST_HELP * epoch.wall_s:
        return f"waiting for data: {evidence}; other settings did not help."
    tried = "; ".join(_in_words(t.settings) for t in loading)
    per_pixel = m.decoded_pixels / max(m.loaded_pixels, 1)
    smaller = (
        f"store the images smaller: {per_pixel:.1f} pixels are decoded for each that is trained on"
        if per_pixel > 1.5
        else "store the images so that they decode faster (8 bits, JPEG or uncompressed, on a "
        "local disk), or augment less"
    )
    # No settings: what the files are like is no key of `run.toml`.
    return _found(
        "waiting for data",
        cost_s=wait,
        evidence=f"{evidence}; {f'{tried} did not help' if tried else 'no core is left for more'}",
        change=smaller,
        saved_s=wait,
        known="at most; a step that waits for nothing was measured",
    )


def _canvases(m: Measurements, epoch: Epoch) -> _Found | str | None:
    waste = 1 - m.epoch_valid_pixels / m.epoch_computed_pixels
    now = m.settings["plan.max_canvases"]
    evidence = (
        f"{waste:.0%} of the computed pixels belong to no image; {m.num_canvases} canvas(es), "
        f"whose first visits take {epoch.stages['first visits']:.2f} s an epoch"
    )
    if m.one_size_ratio:
        evidence += f"; as many pixels of one size take {m.one_size_ratio:.2f} times the time"
    plans = [t for t in m.trials if any(k == "plan.max_canvases" for k, _ in t.settings)]
    for trial in plans:
        visits = epoch.stages["first visits"] * (1 - trial.num_canvases / max(m.num_canvases, 1))
        saved = (1 - statistics.median(trial.ratios)) * epoch.loop_s + visits
        # Fewer canvases save first visits, which were measured, and not the pixels of a step.
        is_sure = trial.num_canvases < m.num_canvases or _is_confirmed(trial.ratios)
        if saved >= LEAST_SHARE * epoch.wall_s and is_sure:
            more = trial.num_canvases >= m.num_canvases
            cause = "pixels that belong to no image" if more else "first visits of many canvases"
            return _found(
                cause,
                cost_s=saved,
                evidence=evidence,
                change=f"{_in_words(trial.settings)} ({now} now): "
                f"{1 - m.epoch_valid_pixels / trial.epoch_computed_pixels:.0%} wasted",
                saved_s=saved,
                known=f"measured by {len(trial.ratios)} turns under both plans",
                settings=trial.settings,
            )
    return f"canvases: {evidence}."


def _evaluation(m: Measurements, epoch: Epoch) -> _Found | str | None:
    cost = epoch.stages["evaluation"]
    every = m.settings["train.evaluate_every"] or m.epochs
    some = f" (estimated from {m.evaluated_images})" if m.evaluated_images < m.val_images else ""
    said = (
        f"an evaluation of {m.val_images} images{some} takes {m.evaluation_s:.2f} s, and comes "
        f"every {every} epoch(s)"
    )
    if cost < MOST_EVALUATION * epoch.wall_s or every >= m.epochs:
        return f"evaluation: {said}: {cost / epoch.wall_s:.1%} of the time."
    rest = epoch.wall_s - cost
    share = WANTED_EVALUATION / (1 - WANTED_EVALUATION)
    wanted = min(math.ceil(m.evaluation_s / (share * rest)), m.epochs)
    return _counted("evaluation", "train.evaluate_every", wanted, every, cost, said)


def _checkpoints(m: Measurements, epoch: Epoch) -> _Found | str | None:
    cost, every = epoch.stages["checkpoint"], m.settings["train.checkpoint_every"]
    said = f"a checkpoint takes {m.checkpoint_s:.3f} s, and comes every {every} step(s)"
    if cost < LEAST_SHARE * epoch.wall_s:
        return f"checkpoints: {said}: {cost / epoch.wall_s:.1%} of the time."
    a_step = (epoch.wall_s - cost) / m.steps_per_epoch
    wanted = _round_number(m.checkpoint_s / (WANTED_CHECKPOINTS * a_step))
    return _counted("checkpoints", "train.checkpoint_every", wanted, every, cost, said)


def _logging(m: Measurements, epoch: Epoch) -> _Found | str | None:
    cost, every = epoch.stages["logging"], m.settings["train.log_every"]
    said = f"a line takes {1000 * m.logging_s:.1f} ms, and comes every {every} step(s)"
    if cost < LEAST_SHARE * epoch.wall_s:
        return f"logging: {said}: {cost / epoch.wall_s:.1%} of the time."
    a_step = (epoch.wall_s - cost) / m.steps_per_epoch
    # A line at the end of each epoch comes anyway.
    wanted = min(_round_number(m.logging_s / (WANTED_LOGGING * a_step)), m.steps_per_epoch)
    if wanted <= every:
        return f"logging: {said}, and one at each epoch's end: {cost / epoch.wall_s:.1%}."
    return _counted("logging", "train.log_every", wanted, every, cost, said)


def _counted(cause: str, key: str, wanted: int, every: int, cost: float, said: str) -> _Found:
    """Something that comes once in `every` steps or epochs, and should once in `wanted`."""
    saved = cost * (1 - every / wanted)
    return _found(
        cause,
        cost_s=cost,
        evidence=said,
        change=f"{key} = {wanted} ({every} now)",
        saved_s=saved,
        known="estimated: it happens less often",
        settings=((key, wanted),),
    )


def _precision(m: Measurements, epoch: Epoch) -> _Found | str | None:
    other = "float32" if m.settings["train.precision"] == "bf16" else "bf16"
    return _controlled(
        m,
        epoch,
        f"precision {other}",
        cause=f"slow precision: {m.settings['train.precision']}",
        change=f'train.precision = "{other}"; it rounds differently, so it is not applied: compare '
        "the scores",
    )


def _channels_last(m: Measurements, epoch: Epoch) -> _Found | str | None:
    return _controlled(
        m,
        epoch,
        "channels_last",
        cause="memory format of the net",
        change="train.channels_last = true (false now)",
        settings=(("train.channels_last", True),),
    )


def _threads(m: Measurements, epoch: Epoch) -> _Found | str | None:
    too_many = m.threads > m.cores
    return _controlled(
        m,
        epoch,
        "fewer threads",
        cause="more threads than cores" if too_many else "threads wait for one another",
        change=f"start with OMP_NUM_THREADS={m.fewer_threads} ({m.threads} threads on {m.cores} "
        f"cores now){'' if too_many else ': other programs, or the loader, take the cores'}",
    )


def _recomputing(m: Measurements, epoch: Epoch) -> _Found | str | None:
    control = _control(m, "activation_checkpointing off")
    if control is not None and m.memory_share > PLENTY:
        return (
            f"activation checkpointing: without it memory is {m.memory_share:.0%} full, so it is "
            "needed."
        )
    return _controlled(
        m,
        epoch,
        "activation_checkpointing off",
        cause="activations are computed twice",
        change="model.activation_checkpointing = false (true now); memory is then "
        f"{m.memory_share:.0%} full",
        settings=(("model.activation_checkpointing", False),),
    )


def _controlled(
    m: Measurements,
    epoch: Epoch,
    name: str,
    *,
    cause: str,
    change: str,
    settings: tuple[tuple[str, Any], ...] = (),
) -> _Found | str | None:
    """A finding of a control: the same step on the same batches, by turns."""
    control = _control(m, name)
    if control is None:
        return None
    ratio = statistics.median(control.ratios)
    evidence = (
        f"the same step takes {ratio:.2f} times as long with {name} (median of "
        f"{len(control.ratios)} turns, {min(control.ratios):.2f} to {max(control.ratios):.2f})"
    )
    saved = (1 - ratio) * epoch.computing_s
    if saved < LEAST_SHARE * epoch.wall_s or not _is_confirmed(control.ratios):
        return f"{name}: {evidence}."
    return _found(
        cause,
        cost_s=saved,
        evidence=evidence,
        change=change,
        saved_s=saved,
        known="measured by turns on the same batches",
        settings=settings,
    )


def _control(m: Measurements, name: str) -> Control | None:
    return next((c for c in m.controls if c.name == name and c.ratios), None)


def _is_confirmed(ratios: Sequence[float]) -> bool:
    """Whether turns agree that something is faster: by 5% in the middle, and three of four."""
    if len(ratios) < 2:
        return False
    upper = sorted(ratios)[math.ceil(0.75 * len(ratios)) - 1]
    return statistics.median(ratios) <= 1 - LEAST_SHARE and upper < 1


def _found(
    cause: str,
    *,
    cost_s: float,
    evidence: str,
    change: str,
    saved_s: float,
    known: str,
    settings: tuple[tuple[str, Any], ...] = (),
) -> _Found:
    return _Found(
        Finding(
            cause=cause,
            cost_s=cost_s,
            evidence=evidence,
            change=change,
            gain=f"{saved_s:.2f} s an epoch ({known})",
            settings=settings,
        ),
        saved_s,
    )


def _in_words(settings: Sequence[tuple[str, Any]]) -> str:
    """As it would stand in `run.toml`."""
    return ", ".join(f"{key} = {json.dumps(value)}" for key, value in settings)


def _round_number(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... that is at least this."""
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power >= least:
                return digit * power
        power *= 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One round of the real loop.

    Attributes:
        first_of_epoch: Whether the loader had nothing ready.
        new_canvases: Canvases that the net met for the first time.
        computed_pixels, valid_pixels: Of its canvases, and of the images on them.
        wall_s: From the end of the round before.
        stages: Seconds by stage; what is left of `wall_s` is unaccounted.
    """

    first_of_epoch: bool
    new_canvases: int
    computed_pixels: int
    valid_pixels: int
    wall_s: float
    stages: Mapping[str, float]

    @property
    def computing_s(self) -> float:
        """Without loader, logging and the rest."""
        return sum(self.stages.get(name, 0.0) for name in (*BY_PIXELS, OPTIMISER))


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The same step on the same batches with one thing changed.

    Attributes:
        name: What was changed.
        ratios: Of each turn, the time with the change over the time without.
    """

    name: str
    ratios: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The whole loop under other settings.

    Attributes:
        settings: The keys of `run.toml` that differ.
        ratios: Of each turn, seconds a valid pixel over those as it is set; first visits apart.
        epoch_computed_pixels: Under these settings.
        num_canvases: That an epoch meets under these settings.
    """

    settings: tuple[tuple[str, Any], ...]
    ratios: tuple[float, ...]
    epoch_computed_pixels: int
    num_canvases: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """What was measured of a run.

    Attributes:
        device: In words.
        cores, threads: That may be used, and that PyTorch uses.
        fewer_threads: That the control "fewer threads" had.
        settings: Keys of `run.toml` that a finding may name, with their values.
        epochs: Of the run.
        steps_per_epoch, epoch_images: Of an epoch.
        epoch_computed_pixels, epoch_valid_pixels: Of an epoch, counted.
        num_canvases: That an epoch meets.
        steps: Of the real loop, that were measured.
        loader_s: Seconds of an epoch in the loader's threads, by stage, added up over threads.
        decoded_pixels, loaded_pixels: Of the files that were decoded, and of what was left of them.
        packing_s: Of drawing and packing an epoch's steps.
        logging_s: Of one line.
        checkpoint_s: Of one checkpoint.
        evaluation_s: Of one evaluation of all images held out.
        evaluated_images, val_images: Measured, and held out.
        controls: One step with one thing changed.
        one_size_ratio: Seconds a pixel of images of one size over those of the run's images; None
            where memory did not hold it.
        trials: The loop under other settings, those first that promise most.
        memory_share: Of all memory, that was taken without activation checkpointing; 0 where that
            was not looked at.
        flops_a_pixel: Of one training step, forward and backward, a canvas pixel.
        limit_flops_s: What one good convolution of the net's width reaches; None where it could
            not be measured.
        not_measured: What there was no time for, in words; empty where there was time for all.
    """

    device: str
    cores: int
    threads: int
    fewer_threads: int
    settings: Mapping[str, Any]
    epochs: int
    steps_per_epoch: int
    epoch_images: int
    epoch_computed_pixels: int
    epoch_valid_pixels: int
    num_canvases: int
    steps: tuple[StepTimes, ...]
    loader_s: Mapping[str, float]
    decoded_pixels: int
    loaded_pixels: int
    packing_s: float
    logging_s: float
    checkpoint_s: float
    evaluation_s: float
    evaluated_images: int
    val_images: int
    controls: tuple[Control, ...] = ()
    one_size_ratio: float | None = None
    trials: tuple[Trial, ...] = ()
    memory_share: float = 0.0
    flops_a_pixel: float = 0.0
    limit_flops_s: float | None = None
    not_measured: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """An epoch, estimated.

    Attributes:
        wall_s: Of all of it; first visits are shared out over the epochs of the run.
        stages: Seconds by stage.
        unaccounted_s: What no stage accounts for.
    """

    wall_s: float
    stages: Mapping[str, float]
    unaccounted_s: float

    @property
    def computing_s(self) -> float:
        """Of the steps, without loader, logging and the rest."""
        return sum(self.stages[name] for name in (*BY_PIXELS, OPTIMISER))

    @property
    def loop_s(self) -> float:
        """Of the loop: steps and waits."""
        return self.computing_s + self.stages[WAIT] + self.unaccounted_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What is said of a run.

    Attributes:
        verdict: Findings about an epoch.
        expected_s: An epoch once the settings of all findings are applied.
    """

    verdict: Verdict
    expected_s: float


@dataclass(frozen=True, slots=True)
class _Found:
    """A finding, and what its change saves of an epoch."""

    finding: Finding
    saved_s: float
