"""What TensorBoard shows of a run, as it comes: the numbers of its events, and examples."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from PIL import Image

from anysize.config import TrainConfig
from anysize.errors import ConfigError
from anysize.predict.examples import draw, evenly_spread
from anysize.predict.metrics import SCORES
from anysize.training.events import EventLog
from anysize.training.job import Job

FOLDER = "tensorboard"
NUM_EXAMPLES = 4
"""Evaluation images that are drawn after each evaluation."""

SCALARS = ("loss", "lr", "images_per_s", "valid_megapixels_per_s", "wait_share", "waste")


def require_tensorboard(config: TrainConfig) -> None:
    """Refuses a run that asks for TensorBoard where that is not installed.

    Raises:
        ConfigError: It is not.
    """
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "`train.tensorboard` needs TensorBoard, which is not installed. Run "
            '`pip install "anysize[tensorboard]"`, or leave it out.'
        )


@contextlib.contextmanager
def tensorboard(job: Job, first_step: int, log: EventLog) -> Iterator[None]:
    """Writes the events of a run for TensorBoard, if `train.tensorboard` asks for it.

    Args:
        job: The run.
        first_step: Steps done; what a killed process wrote beyond them is hidden.
        log: Whose events are written.
    """
    if not job.config.train.tensorboard:
        yield
        return
    from torch.utils.tensorboard import SummaryWriter

    def tell(event: Mapping[str, Any]) -> None:
        step = event["step"]
        if event["event"] == "train":
            for key in SCALARS:
                writer.add_scalar(f"train/{key}", event[key], step)
        elif event["event"] == "evaluate":
            by_class, mean = SCORES[event["kind"]]
            scores = {
                mean: event[mean],
                **{f"{by_class}/{k}": v for k, v in event[by_class].items()},
            }
            for name, value in scores.items():
                if value is not None:
                    writer.add_scalar(f"evaluate/{name}", value, step)
            shown = evenly_spread(job.val_samples, NUM_EXAMPLES)
            pngs = draw(shown, job.weights, job.classes)
            for sample, png in zip(shown, pngs, strict=True):
                picture = np.asarray(Image.open(io.BytesIO(png)))
                writer.add_image(f"evaluate/{sample.stem}", picture, step, dataformats="HWC")
        writer.flush()

    writer = SummaryWriter(str(job.run / FOLDER), purge_step=first_step + 1)
    log.listeners.append(tell)
    try:
        yield
    finally:
        writer.close()
