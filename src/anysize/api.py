"""Anysize from Python: the verbs as functions, as `import anysize` offers them.

They raise `AnysizeError`s, and print nothing unless they are given a console of rich.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from anysize.config import (
    DeviceName,
    LabelKind,
    LossKind,
    ModelConfig,
    PlanConfig,
    Settings,
    TrainConfig,
)
from anysize.conversion.asked import Asked
from anysize.conversion.convert import convert_file
from anysize.data.classes import Classes
from anysize.device import Precision, select_device
from anysize.errors import ConfigError, DataError
from anysize.geometry import NetGeometry, PoolPadding, Size
from anysize.models.build import geometry_of
from anysize.models.levels import DilationRule, StridePosition
from anysize.models.weights_file import load_weights, weights_path
from anysize.onnx.file import open_onnx
from anysize.planning.canvases import plan_canvases, worthwhile_canvases
from anysize.planning.packing import Plan
from anysize.predict import files
from anysize.predict.evaluate import evaluate_run
from anysize.predict.joint_files import find_joints
from anysize.predict.tiles import DEFAULT_MAX_PIXELS, Prediction, predict_probabilities
from anysize.ranks import join
from anysize.training.run import train as train_run
from anysize.wording import count_of, say

__all__ = ["Labeller", "convert", "evaluate", "load", "plan", "train"]


class Labeller:
    """A trained net that labels arrays; from `load`.

    Attributes:
        classes: Names and colours, by class id.
        kind: "multiclass" (one class per pixel), "multilabel" (any number of them), or "joints".
        num_channels: That images must have.
    """

    def __init__(self, labeller: files.Labeller) -> None:
        self._labeller = labeller
        self.classes = labeller.classes
        self.kind: LabelKind = labeller.kind
        self.num_channels = len(labeller.pixels.mean)

    def predict(
        self,
        image: NDArray[Any],
        *,
        white: float | None = None,
        max_pixels: int = DEFAULT_MAX_PIXELS,
    ) -> NDArray[np.uint8]:
        """Labels an image of any size.

        Args:
            image: `[h, w, c]`, or `[h, w]` where it is grey; RGB, whatever the net was trained
                with. Grey images become RGB for a net of three channels.
            white: Value of white. uint8 has 255 and uint16 that of the net's `pixels.white` unless
                it is given; other types have none that could be known.
            max_pixels: Larger images run in overlapping tiles.

        Returns:
            Multiclass: uint8 `[h, w]`, class ids. Multilabel: uint8 `[k, h, w]`, 1 where a class
            reaches a probability of one half.

        Raises:
            ConfigError: It is a net of joints.
            DataError: The array is no image for this net.
            WeightsError: The net has diverged.
        """
        self._require("labels")
        found = self._predict(self._input(image, white), max_pixels, keep_probabilities=False)
        return found.labels if found.present is None else found.present

    def probabilities(
        self,
        image: NDArray[Any],
        *,
        white: float | None = None,
        max_pixels: int = DEFAULT_MAX_PIXELS,
    ) -> NDArray[np.float32]:
        """The probability of every class at every pixel; arguments and errors of `predict`.

        Returns:
            float32 `[k, h, w]`: over the classes they add up to 1 (multiclass), or each is its
            class's own (multilabel). Of images that run in tiles, rounded to float16.
        """
        self._require("labels")
        pixels = self._input(image, white)
        labeller = self._labeller
        if (
            isinstance(labeller, files.NetLabeller)
            and pixels.shape[0] * pixels.shape[1] <= max_pixels
        ):
            net, precision = labeller.weights.model, labeller.precision
            whole = predict_probabilities(
                net, pixels, labeller.pixels, kind=self.kind, precision=precision
            )
            return whole.cpu().numpy()
        found = self._predict(pixels, max_pixels, keep_probabilities=True)
        assert found.probabilities is not None
        return found.probabilities.astype(np.float32)

    def joints(
        self,
        image: NDArray[Any],
        *,
        several: bool = False,
        white: float | None = None,
        max_pixels: int = DEFAULT_MAX_PIXELS,
    ) -> dict[str, NDArray[np.float64]]:
        """Finds the joints in an image, with a net of joints.

        Args:
            image: As in `predict`.
            white: As in `predict`.
            max_pixels: As in `predict`.
            several: All peaks of each joint with a confidence of at least 0.2, of however many
                people, instead of the best one.

        Returns:
            By the joint's name, `[n, 3]` of x, y in pixels and confidence; n is 1, or as many as
            there are peaks.
        """
        self._require("joints")
        labeller = self._labeller
        assert isinstance(labeller, files.NetLabeller)
        pixels = self._input(image, white)
        found = find_joints(labeller, pixels, max_pixels=max_pixels, several=several)
        return dict(zip(self.classes.names, found, strict=True))

    def _require(self, what: str) -> None:
        if (what == "joints") != (self.kind == "joints"):
            use = ("predict", "joints") if what == "joints" else ("joints", "predict")
            raise ConfigError(
                f"The net gives {self.kind} labels. Use {use[0]} instead of {use[1]}."
            )

    def _predict(
        self, pixels: NDArray[Any], max_pixels: int, *, keep_probabilities: bool
    ) -> Prediction:
        return self._labeller.predict(
            pixels, max_pixels=max_pixels, keep_probabilities=keep_probabilities
        )

    def _input(self, image: NDArray[Any], white: float | None) -> NDArray[Any]:
        """The image as `normalise` takes it: uint8, uint16, or float on the scale of 16 bits."""
        array = np.asarray(image)
        if array.ndim == 2:
            array = array[..., None]
        wanted = self.num_channels
        if array.ndim != 3 or 0 in array.shape or array.dtype.kind not in "uif":
            raise DataError(
                f"An array of {array.dtype} {tuple(np.shape(image))} is no image. Give numbers "
                f"[height, width, {wanted}], or [height, width] for a grey one."
            )
        if array.shape[2] == 1 and wanted == 3:
            array = np.repeat(array, 3, axis=2)
        if array.shape[2] != wanted:
            raise DataError(
                f"The image has {count_of(array.shape[2], 'channel')}, but the net takes {wanted}. "
                "Give "
                f"[height, width, {wanted}]."
            )
        if white is None and array.dtype in (np.uint8, np.uint16):
            return array
        if white is None or not white > 0:
            raise DataError(
                f"An image of {array.dtype} may have any value for white. Say which with white, "
                f"such as white=1.0 (given: {white})."
            )
        if not np.isfinite(array).all():
            raise DataError("The image has values that are not finite. Replace them.")
        return array.astype(np.float32) * np.float32(self._labeller.pixels.white / white)


def load(
    path: Path | str,
    *,
    device: DeviceName = "auto",
    precision: Precision = "float32",
    trust_net: bool = False,
) -> Labeller:
    """A trained net, ready to label arrays.

    Args:
        path: A run folder, a weights file, or an ONNX file that `anysize export` wrote.
        device: "auto" takes a GPU where there is one. ONNX files run on the CPU.
        precision: "bf16" computes under autocast.
        trust_net: Import and call the net that a weights file names as `package.module:build`,
            though no `run.toml` beside the file names it.

    Raises:
        WeightsError: No such file, damaged, a body without a head, or of a net that is not trusted.
        DeviceError: There is no GPU.
    """
    path = Path(path)
    if path.suffix == ".onnx" and not path.is_dir():
        return Labeller(open_onnx(path))
    weights = load_weights(weights_path(path), select_device(device), trust_net=trust_net)
    if weights.note:
        warnings.warn(weights.note, stacklevel=2)
    return Labeller(files.NetLabeller(weights=weights, precision=precision))


def train(
    config: Path | str | Settings,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    console: Console | None = None,
) -> Path:
    """Trains a net, or goes on with a run.

    Args:
        config: A `run.toml`, or its sections: `{"data": {"root": "data"}, "train": {...}}`, whose
            paths are relative to the working folder.
        overrides: `section.key=value`, applied over it.
        resume: Go on from the last checkpoint of the run.
        console: Where progress goes.

    Returns:
        The run folder, for `load` and `evaluate`.

    Raises:
        AnysizeError: Bad settings or data; what was done is checkpointed.
    """
    settings = Path(config) if isinstance(config, str) else config
    return train_run(settings, overrides, resume=resume, console=_or_quiet(console))


def evaluate(
    run: Path | str,
    *,
    data: Path | str | None = None,
    device: DeviceName = "auto",
    precision: Precision = "float32",
    console: Console | None = None,
) -> dict[str, Any]:
    """Scores a run on the images that it held out, or on another labelled folder.

    Args:
        run: A run folder, or a weights file in one.
        data: Another labelled folder.
        device: See `load`.
        precision: See `load`.
        console: Told which images are scored.

    Returns:
        The metrics as plain numbers; docs/metrics.md has them.

    Raises:
        AnysizeError: No run, or its data cannot be read.
    """
    path = Path(run)
    with join() as ranks:
        told = ranks.console(_or_quiet(console))
        return evaluate_run(
            path if path.is_dir() else path.parent,
            load_weights(weights_path(path), select_device(device)),
            data=None if data is None else Path(data),
            precision=precision,
            say=functools.partial(say, told),
            ranks=ranks,
        )


def plan(
    sizes: Iterable[tuple[int, int]],
    *,
    geometry: NetGeometry | None = None,
    images_per_step: int = PlanConfig().images_per_step,
    max_pixels_per_step: int = PlanConfig().max_pixels_per_step,
    max_canvases: int = PlanConfig().max_canvases,
    epochs: int = TrainConfig().epochs,
) -> Plan:
    """Chooses the canvases for images of these sizes.

    Args:
        sizes: (height, width) of each image.
        geometry: Of the net, as `net.geometry` has it; None is that of a default ResNet.
        images_per_step: Images per optimiser step.
        max_pixels_per_step: Most canvas pixels computed at once.
        max_canvases: Most canvas shapes; 0 chooses the number automatically, for `epochs` epochs.
        epochs: That the images are computed.

    Raises:
        AnysizeError: A limit is out of range, or an image needs a canvas above it.
    """
    images = [Size(int(height), int(width)) for height, width in sizes]
    if any(min(size) < 1 for size in images):
        raise DataError("An image has an extent below 1. Sizes are (height, width) in pixels.")
    return plan_canvases(
        images,
        geometry=geometry or geometry_of(ModelConfig()),
        images_per_step=images_per_step,
        max_pixels_per_step=max_pixels_per_step,
        max_canvases=max_canvases or worthwhile_canvases(images, epochs=epochs, on_gpu=False),
    )


def convert(
    path: Path | str,
    out: Path | str | None = None,
    *,
    head: str = "",
    prefix: str = "",
    loss: LossKind | None = None,
    classes: Classes | Path | str | None = None,
    head_relu: bool = False,
    output_stride: Literal[8, 16, 32] | None = None,
    stride_position: StridePosition | None = None,
    dilation_rule: DilationRule | None = None,
    pool_padding: PoolPadding | None = None,
    channel_order: Literal["RGB", "BGR"] | None = None,
    pixel_mean: Sequence[float] | None = None,
    pixel_std: Sequence[float] | None = None,
    max_value: float | None = None,
    mean: Path | str | None = None,
    channels: int | None = None,
    new_channels: Literal["zeros", "mean"] = "zeros",
    console: Console | None = None,
) -> Path:
    """Takes over a checkpoint of TF-Slim, Caffe, torchvision or timm.

    Args:
        path: The checkpoint; its format is found by content.
        out: The weights file to write; None is `path` with the ending `.safetensors`.
        head: Of several heads, the one to take; "none" takes the body only.
        prefix: Of several nets, what the names of the one to take begin with.
        loss: How the head's logits are meant; must be given where a head is taken.
        classes: Of the head, or a classes.toml; None numbers them.
        head_relu: The head ends with a ReLU.
        output_stride: That the net was trained at.
        stride_position: As in `[model]`, where the file does not say it; None is its system's.
        dilation_rule: Likewise.
        pool_padding: Likewise.
        channel_order: As in `[pixels]`, of the net's training; None is its system's.
        pixel_mean: Likewise, a number for each channel.
        pixel_std: Likewise.
        max_value: Likewise.
        mean: Caffe's mean image, `.binaryproto`.
        channels: More channels for the first convolution than the file's 3.
        new_channels: What it starts with for them: "zeros", or the "mean" of the other weights.
        console: Told what was found and taken.

    Returns:
        The weights file, for `train.weights` or `load`.

    Raises:
        AnysizeError: Not a checkpoint of these systems, or `out` exists.
    """
    asked = Asked(
        head=head,
        prefix=prefix,
        loss=loss,
        classes=classes,
        head_relu=head_relu,
        output_stride=output_stride,
        stride_position=stride_position,
        dilation_rule=dilation_rule,
        pool_padding=pool_padding,
        channel_order=channel_order,
        pixel_mean=None if pixel_mean is None else tuple(pixel_mean),
        pixel_std=None if pixel_std is None else tuple(pixel_std),
        max_value=max_value,
        mean=mean,
        channels=channels,
        new_channels=new_channels,
    )
    target = None if out is None else Path(out)
    return convert_file(Path(path), target, asked, _or_quiet(console))


def _or_quiet(console: Console | None) -> Console:
    return Console(quiet=True) if console is None else console
