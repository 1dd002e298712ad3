"""What a run does about steps that went wrong, and what it remembers of them.

A step whose loss or gradient is not finite is skipped; one that does not fit in memory is computed
in smaller passes, and so are all later ones; an image that cannot be read may be left out. All of
it is counted in a `Tally`, which every checkpoint holds, so that a resumed run goes on in the same
way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anysize.atomic_files import write_atomic
from anysize.data.batch import Batch
from anysize.data.splitting import smaller_batches, split_to_fit
from anysize.device import is_out_of_memory
from anysize.errors import DataError, DeviceError, WeightsError
from anysize.wording import count_of

BAD_STEPS_FILE = "bad-steps.json"


@contextlib.contextmanager
def memory_as_a_message() -> Iterator[None]:
    """For memory that runs out where nothing can be split: the loader, the first update."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceError(
            f"Memory ran out outside of a training pass: {str(error).splitlines()[0]} Free "
            "memory, or lower train.prefetch_steps or train.loader_threads, and go on with "
            "--resume."
        ) from error


@dataclass(slots=True, kw_only=True)
class Tally:
    """What went wrong in a run so far.

    Attributes:
        num_skipped: Steps skipped since their loss or gradient was not finite.
        bad_steps: Those of them that came last in a row: step and stems of the images.
        broken: Images that could not be read, by stem, and what was wrong.
        max_pass_pixels: Most canvas pixels computed at once since memory ran out; None as planned.
    """

    num_skipped: int = 0
    bad_steps: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    broken: dict[str, str] = field(default_factory=dict[str, str])
    max_pass_pixels: int | None = None

    def skip(self, step: int, stems: Sequence[str]) -> None:
        """Counts a step that was skipped."""
        self.num_skipped += 1
        self.bad_steps.append({"step": step, "images": list(stems)})

    def require_good_steps(self, max_bad_steps: int, run: Path) -> None:
        """Stops a run that only skips; the names of the images go to a file of the run.

        Raises:
            DataError: The last `max_bad_steps` steps were all skipped.
        """
        if len(self.bad_steps) < max_bad_steps:
            return
        path = run / BAD_STEPS_FILE
        write_atomic(path, json.dumps(self.bad_steps, indent=2).encode())
        images = [name for bad in self.bad_steps for name in bad["images"]]
        raise DataError(
            f"The loss or its gradient was not finite in {count_of(len(self.bad_steps), 'step')} "
            "in a row, up "
            f"to step {self.bad_steps[-1]['step']}; nothing was learned from them. Their images "
            f"are {', '.join(images[:10])}{' ...' if len(images) > 10 else ''}: all are in {path}. "
            "Look at these images and masks. If all steps fail, start anew with a lower optim.lr, "
            "or with train.precision float32."
        )

    def to_json(self) -> dict[str, Any]:
        """As `restore` takes it."""
        return dataclasses.asdict(self)

    def restore(self, table: Mapping[str, Any], source: str) -> None:
        """Takes over what `to_json` gave to a checkpoint.

        Raises:
            WeightsError: It is not what `to_json` gives; names `source`.
        """
        limit = table.get("max_pass_pixels")
        holds = (
            set(table) == {f.name for f in dataclasses.fields(self)}
            and type(table["num_skipped"]) is int
            and isinstance(table["bad_steps"], list)
            and all(
                isinstance(b, dict) and set(b) == {"step", "images"} for b in table["bad_steps"]
            )
            and isinstance(table["broken"], dict)
            and (limit is None or (type(limit) is int and limit > 0))
        )
        if not holds:
            raise WeightsError(
                f"{source} has a tally that Anysize did not write. Remove the file; the checkpoint "
                "before it is then taken."
            )
        for name, value in table.items():
            setattr(self, name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLimit:
    """Keeps passes within what memory holds, and lowers that when some runs out.

    Attributes:
        tally: Whose `max_pass_pixels` it reads and lowers.
        ignore_index: What the targets of smaller canvases hold outside the images.
        is_fixed: Memory that runs out is an error; the limit stays as it is.
    """

    tally: Tally
    ignore_index: int
    is_fixed: bool = False

    def fitting(self, batches: Sequence[Batch]) -> list[Batch]:
        """The batches, in smaller ones where they are above the limit."""
        limit = self.tally.max_pass_pixels
        if limit is None:
            return list(batches)
        return split_to_fit(batches, limit, self.ignore_index)

    def lower(self, too_large: Batch) -> None:
        """Lowers the limit to half of a batch that memory did not hold.

        Raises:
            DeviceError: The batch is one image alone, which cannot be split.
        """
        if not smaller_batches(too_large, self.ignore_index):
            (placement,) = too_large.layout.placements
            raise DeviceError(
                f"Memory ran out on image {too_large.stems[0]} ({placement.size}) alone on a "
                f"canvas, so the step cannot be split further. Free memory or set "
                "model.activation_checkpointing to true, and go on with --resume: the result "
                "stays the same. Or start a new run with augment.crop or smaller images."
            )
        self.tally.max_pass_pixels = too_large.layout.canvas.pixels // 2
