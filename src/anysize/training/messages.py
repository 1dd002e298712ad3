"""What a run says while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anysize.errors import first_names
from anysize.geometry import Canvas, num_cells
from anysize.planning.packing import Step
from anysize.training.events import EventLog
from anysize.training.job import Job
from anysize.training.pace import time_left
from anysize.wording import say


def console_line(event: dict[str, Any], num_steps: int) -> str:
    """The line of the console for a "train" event."""
    skipped = f"  skipped {event['skipped']}" if event["skipped"] else ""
    left_out = f"  left out {event['left_out']}" if event["left_out"] else ""
    return (
        f"step {event['step']:>6}/{num_steps}  loss {event['loss']:.4f}  lr {event['lr']:.2e}  "
        f"{event['images_per_s']:.2f} images/s  {event['valid_megapixels_per_s']:.3f} valid MP/s  "
        f"wait {event['wait_share']:.1%}  waste {event['waste']:.1%}{skipped}{left_out}  "
        f"{time_left(event)}"
    )


def say_norms_that_cannot_learn(job: Job, steps: Sequence[Step]) -> None:
    """Says before the first step where the norms of a run keep it from learning.

    Args:
        job: The run.
        steps: Of its first epoch.
    """
    config, geometry = job.config, job.model.geometry
    if config.model.norm == "frozen" and not config.train.weights:
        say(
            job.console,
            "model.norm is frozen, but train.weights is empty: the norms keep mean 0 and variance "
            "1, which are those of no image, so the net hardly learns or diverges. Set model.norm "
            'to "trained", or train.weights to a file to start from.',
        )
    if config.model.norm != "trained":
        return
    layouts = [p.layout for step in steps for p in step.passes]
    alone = [x.placements[0].size for x in layouts if num_cells(x, geometry) == 1]
    if alone:
        say(
            job.console,
            f"model.norm is trained, but in {len(alone)} of {len(layouts)} passes it sees one "
            f"value per channel: an image of {alone[0]} leaves a single cell of "
            f"{geometry.output_stride} pixels. Nothing is learned from such passes. Raise "
            "plan.images_per_step or plan.max_pixels_per_step, lower model.output_stride, use "
            'larger images, or set model.norm to "frozen" and start from train.weights.',
        )


def say_first_visits(
    job: Job, step: int, canvases: Sequence[Canvas], seconds: float, log: EventLog
) -> None:
    """Says what the first visit of a canvas took."""
    for canvas in canvases:
        say(job.console, f"first visit of canvas {canvas}: {seconds:.2f} s")
        log.write(
            {
                "event": "canvas",
                "step": step + 1,
                "canvas": list(canvas),
                "first_visit_s": seconds,
            }
        )


def say_skipped(job: Job, step: int, images: list[str], log: EventLog) -> None:
    """Counts a step that was skipped, and names its images."""
    job.tally.skip(step + 1, images)
    in_a_row = len(job.tally.bad_steps)
    say(
        job.console,
        f"step {step + 1} skipped: its loss or gradient is not finite; {in_a_row} in a row. "
        f"Images: {first_names(images)}",
    )
    log.write({"event": "skip", "step": step + 1, "images": images, "in_a_row": in_a_row})


def say_smaller_passes(job: Job, step: int, log: EventLog) -> None:
    """Says that memory ran out, and what follows from it."""
    limit = job.tally.max_pass_pixels
    exact = (
        "the result is the same"
        if job.config.model.norm == "frozen"
        else "the trained norms' statistics are now of smaller passes"
    )
    say(
        job.console,
        f"Memory ran out in step {step + 1}. It was taken in smaller passes, and so are all from "
        f"here on: at most {limit:,} canvas pixels at once, or one image; {exact}.",
    )
    log.write({"event": "memory", "step": step + 1, "max_pass_pixels": limit})


def say_left_out(job: Job) -> None:
    """Says at the end of a run which steps and images were left out."""
    tally = job.tally
    if tally.num_skipped:
        say(
            job.console,
            f"Steps skipped since their loss or gradient was not finite: {tally.num_skipped} of "
            f"{job.num_steps}; {job.run / 'events.jsonl'} names their images.",
        )
    if tally.broken:
        say(
            job.console,
            f"Images left out since they cannot be read: {len(tally.broken)} "
            f"({first_names(list(tally.broken))}).",
        )
