"""What a run says while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anysize.data.loader import LoadedStep
from anysize.errors import first_names
from anysize.geometry import Canvas
from anysize.training.events import EventLog
from anysize.training.job import Job


def console_line(event: dict[str, Any], num_steps: int) -> str:
    """The line of the console for a "train" event."""
    skipped = f"  skipped {event['skipped']}" if event["skipped"] else ""
    left_out = f"  left out {event['left_out']}" if event["left_out"] else ""
    return (
        f"step {event['step']:>6}/{num_steps}  loss {event['loss']:.4f}  lr {event['lr']:.2e}  "
        f"{event['images_per_s']:.2f} images/s  {event['valid_megapixels_per_s']:.3f} valid MP/s  "
        f"wait {event['wait_share']:.1%}  waste {event['waste']:.1%}{skipped}{left_out}"
    )


def say_first_visits(
    job: Job, step: int, canvases: Sequence[Canvas], seconds: float, log: EventLog
) -> None:
    """Says what the first visit of a canvas took."""
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


def say_skipped(job: Job, step: int, loaded: LoadedStep, log: EventLog) -> None:
    """Counts a step that was skipped, and names its images."""
    images = [stem for batch in loaded.batches for stem in batch.stems]
    job.tally.skip(step + 1, images)
    in_a_row = len(job.tally.bad_steps)
    job.console.print(
        f"step {step + 1} skipped: its loss or gradient is not finite; {in_a_row} in a row. "
        f"Images: {first_names(images)}",
        highlight=False,
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
    job.console.print(
        f"Memory ran out in step {step + 1}. It was taken in smaller passes, and so are all from "
        f"here on: at most {limit:,} canvas pixels at once, or one image; {exact}.",
        highlight=False,
    )
    log.write({"event": "memory", "step": step + 1, "max_pass_pixels": limit})


def say_mishaps(job: Job) -> None:
    """Says at the end of a run which steps and images were left out."""
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
