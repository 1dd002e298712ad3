"""The evaluation after an epoch, and the weights that it finds the best."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

from anysize.atomic_files import write_atomic
from anysize.device import (
    is_out_of_memory,
    release_memory,
)
from anysize.errors import DataError
from anysize.models.weights_file import save_weights
from anysize.predict.evaluate import evaluate
from anysize.predict.metrics import SCORES
from anysize.training.events import EventLog, read_events, read_metrics
from anysize.training.job import Job
from anysize.training.stop import Stop
from anysize.wording import say

LONG = ("images", "confusion", "at_half")
"""What of a result `metrics.json` has, and events have not."""

LAST_WEIGHTS = "weights_last.safetensors"
"""The net at the last evaluation, beside the best in `weights.safetensors`."""


def evaluate_if_due(
    job: Job, step: int, log: EventLog, stop: Stop, *, unless_logged: bool = False
) -> None:
    """Evaluates where an epoch or the run ends, logs it, and saves weights that are the best.

    Args:
        job: The run.
        step: Steps done; at the end of an epoch.
        log: Takes the result.
        stop: Asked between images.
        unless_logged: Not again if the log has an evaluation of this step.
    """
    every = job.config.train.evaluate_every
    epoch = step // job.steps_per_epoch
    last = step == job.num_steps
    if not last and (every == 0 or epoch % every != 0):
        return
    ranks = job.ranks
    events = ranks.on_first(lambda: read_events(job.run / "events.jsonl"))
    earlier = [e for e in events if e["event"] == "evaluate"]
    if unless_logged and any(e["step"] == step for e in earlier):
        return
    start = time.monotonic()
    result = _evaluate(job, step, log, stop)
    if not ranks.is_first:
        return
    _, metric = SCORES[job.config.loss.labels]
    value = result[metric]
    scored = read_metrics(job.run)
    # It outlives a log that was lost; an evaluation that is done again is not earlier.
    if scored is not None and scored["step"] < step and metric in scored:
        earlier.append(scored)
    earlier_values = [e[metric] for e in earlier if e[metric] is not None]
    # Where no score is defined, the last net is as good as any.
    is_best = not earlier_values if value is None else value > max(earlier_values, default=-1.0)
    save_weights(job.run / LAST_WEIGHTS, job.weights)
    if is_best:
        save_weights(job.run / "weights.safetensors", job.weights)
        metrics = json.dumps({"step": step, **result}, indent=2)
        write_atomic(job.run / "metrics.json", metrics.encode())
    log.write(
        {
            "event": "evaluate",
            "step": step,
            "epoch": epoch,
            "seconds": time.monotonic() - start,
            "best": is_best,
            **{k: v for k, v in result.items() if k not in LONG},
        }
    )
    score = "is not defined: no label counts" if value is None else f"{value:.2%}"
    say(
        job.console,
        f"evaluate after epoch {epoch}: {metric} {score}"
        f"{' (best so far, saved)' if is_best else ''}",
    )


def stops_early(job: Job, step: int, log: EventLog) -> bool:
    """Whether `train.patience` epochs brought no better score; says so, and logs it once."""
    events = read_events(job.run / "events.jsonl")
    scored = [e for e in events if e["event"] == "evaluate"]
    best = [e for e in scored if e["best"]]
    patience = job.config.train.patience
    if not (patience and best and scored[-1]["epoch"] - best[-1]["epoch"] >= patience):
        return False
    epoch, (_, metric) = best[-1]["epoch"], SCORES[job.config.loss.labels]
    score = "undefined" if best[-1][metric] is None else f"{best[-1][metric]:.2%}"
    say(
        job.console,
        f"Stopped early after epoch {scored[-1]['epoch']}: {metric} has not been better than "
        f"{score}, after epoch {epoch}, for {patience} epochs (train.patience).",
    )
    if not any(e["event"] == "early_stop" and e["step"] == step for e in events):
        log.write({"event": "early_stop", "step": step, "best_epoch": epoch, "best_score": score})
    return True


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
                part_maps=job.config.model.part_maps,
                precision=job.config.train.precision,
                num_threads=job.config.train.loader_threads,
                progress=stop.raise_if_requested,
                broken=broken,
                ranks=job.ranks,
            )
        except (RuntimeError, MemoryError) as error:
            if not (canvases and is_out_of_memory(error)):
                raise
            largest = max(c.pixels for c in canvases)
        else:
            break
        release_memory(job.device)
        canvases = tuple(c for c in canvases if c.pixels < largest)
        say(
            job.console,
            f"Memory ran out in the evaluation: it runs on canvases below {largest:,} pixels.",
        )
    if broken and len(broken) == len(job.val_samples):
        raise DataError(f"No image of the evaluation can be read: {next(iter(broken.values()))}")
    for stem, fault in (broken or {}).items():
        job.tally.broken[stem] = fault
        say(job.console, f"evaluation: left out an image. {fault}")
        log.write({"event": "broken", "step": step, "image": stem, "fault": fault})
    return result
