"""Prediction: an image of any size in, labels of exactly that size out, whole or in blended tiles.

An image of at most `max_pixels` runs whole, at its own size. A larger one runs in tiles that
overlap, and whose probabilities are blended:

- All tiles of an image have one size, congruent to the image's modulo the output stride, and start
  at multiples of it. So every tile's cells and pooling windows fall where the whole image's do.
- A tile's outermost quarter of the overlap has no weight, since what the net says there is
  distorted by the border that the tile has and the image has not. Then the weight rises as a cosine
  over half of the overlap. The weights of all tiles at a pixel add up to 1.
- Probabilities are blended rather than logits: a mean of distributions is a distribution, and one
  tile's extreme logit cannot outvote the others.

Where the net sees no further than a quarter of the overlap, tiles give what the whole image gives.
ResNets see further, so there it is an approximation.

What labels images is a `Labeller`: a net of ours (`NetLabeller`), or an ONNX file
(`anysize.onnx.file`). Tiling and the files written are the same for both.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from anysize.atomic_files import write_atomic
from anysize.checkpoint import Weights
from anysize.config import LabelKind, PixelConvention
from anysize.data.loader import normalise
from anysize.data.samples import Classes
from anysize.device import Precision, computing, is_out_of_memory
from anysize.errors import ConfigError, DataError, DeviceError, ShapeError, WeightsError
from anysize.geometry import (
    Layout,
    NetGeometry,
    Placement,
    Size,
    ceil_div,
    round_up,
    single,
    target_rect,
)
from anysize.images.decode import decode_image, viewable
from anysize.images.formats import IMAGE_SUFFIXES
from anysize.models.net import Net
from anysize.models.ops import upsample

DEFAULT_MAX_PIXELS = 4_194_304
"""2048 x 2048: ResNet-50 at output stride 16 with 21 classes takes 1.0 GB for it on a CPU."""

OVERLAP = 128
"""Pixels by which neighbouring tiles overlap at least."""

NO_CLASS = 255
"""Label of a pixel at which no class of a sigmoid net reaches a probability of one half."""


@dataclass(frozen=True, slots=True)
class TileAxis:
    """The tiles along one axis of an image.

    Attributes:
        extent: Of every tile.
        starts: First pixel of each tile, rising.
    """

    extent: int
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a net says about one image.

    Attributes:
        labels: uint8 `[h, w]`, the most probable class; for sigmoid `NO_CLASS` where none reaches a
            probability of one half.
        present: uint8 `[k, h, w]`, for sigmoid only: 1 where a class reaches one half.
        probabilities: float16 `[k, h, w]` if they were asked for.
        num_tiles: 1 for an image that ran whole.
    """

    labels: np.ndarray
    present: np.ndarray | None
    probabilities: np.ndarray | None
    num_tiles: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePrediction:
    """What was written for one image.

    Attributes:
        image: The image's file.
        size: Of the image, and of everything written.
        masks: One index mask for softmax; one a class, in class order, for sigmoid.
        overlay: The image with the classes' colours over it.
        probabilities: The array of probabilities if it was asked for.
        num_tiles: 1 for an image that ran whole.
    """

    image: Path
    size: Size
    masks: tuple[Path, ...]
    overlay: Path
    probabilities: Path | None
    num_tiles: int


class Labeller(Protocol):
    """What labels images, and what is needed to read its labels."""

    @property
    def classes(self) -> Classes:
        """Names and colours, by class id."""
        ...

    @property
    def kind(self) -> LabelKind:
        """How logits become labels."""
        ...

    @property
    def geometry(self) -> NetGeometry:
        """Of the net, by which tiles are placed."""
        ...

    @property
    def pixels(self) -> PixelConvention:
        """What the net takes."""
        ...

    def predict(
        self, image: np.ndarray, *, max_pixels: int, keep_probabilities: bool
    ) -> Prediction:
        """Labels one image, uint8 RGB `[h, w, 3]`; arguments of `predict_image`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NetLabeller:
    """A net of ours as a `Labeller`.

    Attributes:
        weights: The net, its classes and its pixel convention.
        precision: See `canvas_logits`.
    """

    weights: Weights
    precision: Precision = "float32"

    @property
    def classes(self) -> Classes:
        """See `Labeller`."""
        return self.weights.classes

    @property
    def kind(self) -> LabelKind:
        """See `Labeller`."""
        return self.weights.kind

    @property
    def geometry(self) -> NetGeometry:
        """See `Labeller`."""
        return self.weights.model.geometry

    @property
    def pixels(self) -> PixelConvention:
        """See `Labeller`."""
        return self.weights.pixels

    def predict(
        self, image: np.ndarray, *, max_pixels: int, keep_probabilities: bool
    ) -> Prediction:
        """See `predict_image`."""
        return predict_image(
            self.weights.model,
            image,
            self.pixels,
            kind=self.kind,
            max_pixels=max_pixels,
            precision=self.precision,
            keep_probabilities=keep_probabilities,
        )


def canvas_logits(
    model: Net, pixels: Tensor, layout: Layout, *, precision: Precision = "float32"
) -> list[Tensor]:
    """Runs the net on a canvas, in eval mode, and cuts out each image at full resolution.

    Args:
        model: Its mode is afterwards as it was before.
        pixels: `[n, 3, h, w]`, normalised, zero outside the images, on any device.
        layout: Of the images on the canvas.
        precision: "bf16" computes the net under autocast; upsampling is in float32 in any case.

    Returns:
        float32 `[k, h, w]` for each image of the layout, on the model's device.

    Raises:
        WeightsError: A logit is not finite.
    """
    device = next(model.parameters()).device
    pixels = pixels.to(device, memory_format=torch.channels_last)
    with _evaluating(model), torch.inference_mode(), computing(device, precision):
        logits = model(pixels, layout).float()
    with torch.inference_mode():
        full = upsample(logits, layout, model.geometry)
        images = [_cut_out(full, p, model.geometry) for p in layout.placements]
        for image in images:
            if not torch.isfinite(image).all():
                raise WeightsError(
                    "The net gives logits that are not finite on an image of "
                    f"{image.shape[1]}x{image.shape[2]}, in {precision}. Its weights have "
                    "diverged: use those of an earlier step."
                )
    return images


def predict_logits(
    model: Net, image: np.ndarray, pixels: PixelConvention, *, precision: Precision = "float32"
) -> Tensor:
    """The logits of one image, whole, at its own size.

    Args:
        model: The net.
        image: uint8 RGB `[h, w, 3]`.
        pixels: What the net takes.
        precision: See `canvas_logits`.

    Returns:
        float32 `[k, h, w]` on the model's device.
    """
    layout = single(Size(image.shape[0], image.shape[1]), model.geometry)
    canvas, (place,) = layout.canvas, layout.placements
    array = np.zeros((1, canvas.height, canvas.width, image.shape[2]), np.float32)
    inside = array[0, place.top : place.top + place.height, place.left : place.left + place.width]
    inside[:] = normalise(image, pixels)
    return canvas_logits(
        model, torch.from_numpy(array).permute(0, 3, 1, 2), layout, precision=precision
    )[0]


def predict_probabilities(
    model: Net,
    image: np.ndarray,
    pixels: PixelConvention,
    *,
    kind: LabelKind,
    precision: Precision = "float32",
) -> Tensor:
    """The probabilities of one image, whole: float32 `[k, h, w]`; arguments of `predict_logits`.

    They add up to 1 over the classes for softmax, and are each class's own for sigmoid.
    """
    return to_probabilities(predict_logits(model, image, pixels, precision=precision), kind)


def to_probabilities(logits: Tensor, kind: LabelKind) -> Tensor:
    """Logits `[k, h, w]` as probabilities of the same shape."""
    return logits.softmax(0) if kind == "multiclass" else logits.sigmoid()


def predict_image(
    model: Net,
    image: np.ndarray,
    pixels: PixelConvention,
    *,
    kind: LabelKind,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    overlap: int = OVERLAP,
    precision: Precision = "float32",
    keep_probabilities: bool = False,
) -> Prediction:
    """Labels one image, in tiles if it has more than `max_pixels`.

    Args:
        model: The net.
        image: uint8 RGB `[h, w, 3]`.
        pixels: What the net takes.
        kind: How the net's logits are meant.
        max_pixels: Most pixels that run at once.
        overlap: Pixels, above 0, by which neighbouring tiles overlap at least; rounded up to whole
            cells.
        precision: See `canvas_logits`.
        keep_probabilities: Also return them. Without, memory holds those of one row of tiles only.

    Raises:
        ConfigError: `max_pixels` is too small for tiles that overlap.
        WeightsError: A logit is not finite.
    """
    return predict_tiled(
        lambda tile: predict_probabilities(model, tile, pixels, kind=kind, precision=precision),
        image,
        model.geometry,
        kind=kind,
        max_pixels=max_pixels,
        overlap=overlap,
        keep_probabilities=keep_probabilities,
    )


def predict_tiled(
    run: Callable[[np.ndarray], Tensor],
    image: np.ndarray,
    geometry: NetGeometry,
    *,
    kind: LabelKind,
    max_pixels: int,
    overlap: int = OVERLAP,
    keep_probabilities: bool = False,
) -> Prediction:
    """Labels one image by anything that gives the probabilities of a tile; see `predict_image`.

    Args:
        run: From a tile, uint8 RGB `[h, w, 3]`, to its probabilities, float32 `[k, h, w]`.
        image: uint8 RGB `[h, w, 3]`.
        geometry: Of the net behind `run`.
        kind: What the probabilities are.
        max_pixels: Most pixels of a tile.
        overlap: As in `predict_image`.
        keep_probabilities: As in `predict_image`.

    Raises:
        ConfigError: `max_pixels` is too small for tiles that overlap.
    """
    size = Size(image.shape[0], image.shape[1])
    rows, columns = plan_tiles(size, geometry, max_pixels=max_pixels, overlap=overlap)
    labels: list[Tensor] = []
    present: list[Tensor] = []
    kept: list[Tensor] = []
    row_weights = _axis_weights(rows, size.height, overlap)
    column_weights = _axis_weights(columns, size.width, overlap)
    unfinished: Tensor | None = None
    for i, top in enumerate(rows.starts):
        band: Tensor | None = None
        for j, left in enumerate(columns.starts):
            tile = image[top : top + rows.extent, left : left + columns.extent]
            blended = run(tile).cpu() * (row_weights[i][:, None] * column_weights[j])
            if band is None:
                band = torch.zeros(len(blended), rows.extent, size.width)
            band[:, :, left : left + columns.extent] += blended
        assert band is not None
        if unfinished is not None:
            band[:, : unfinished.shape[1]] += unfinished
        end = rows.starts[i + 1] - top if i + 1 < len(rows.starts) else rows.extent
        finished, unfinished = band[:, :end], band[:, end:]
        labels.append(_most_probable(finished, kind))
        if kind == "multilabel":
            present.append((finished >= 0.5).to(torch.uint8))
        if keep_probabilities:
            kept.append(finished.half())
    return Prediction(
        labels=torch.cat(labels).numpy(),
        present=torch.cat(present, 1).numpy() if present else None,
        probabilities=torch.cat(kept, 1).numpy() if kept else None,
        num_tiles=len(rows.starts) * len(columns.starts),
    )


def plan_tiles(
    size: Size, geometry: NetGeometry, *, max_pixels: int, overlap: int = OVERLAP
) -> tuple[TileAxis, TileAxis]:
    """Chooses the tiles, along rows and columns, that compute the fewest pixels in all.

    An extent of `q` strides and a rest is covered by `n` tiles of `t` strides and the same rest, at
    least `o` strides over one another, if `q + o (n - 1) <= t n`.

    Raises:
        ConfigError: `max_pixels` is too small for tiles that overlap.
    """
    if size.pixels <= max_pixels:
        return TileAxis(size.height, (0,)), TileAxis(size.width, (0,))
    check_max_pixels(max_pixels, geometry, overlap)
    stride = geometry.output_stride
    overlap = round_up(overlap, stride)
    choices: list[tuple[int, TileAxis, TileAxis]] = []
    for num_rows in range(1, max(size.height // stride - overlap // stride, 1) + 1):
        rows = _spread(size.height, num_rows, stride, overlap)
        num_columns = _fewest(size.width, max_pixels // rows.extent, stride, overlap)
        if num_columns:
            columns = _spread(size.width, num_columns, stride, overlap)
            computed = num_rows * rows.extent * num_columns * columns.extent
            choices.append((computed, rows, columns))
    _, rows, columns = min(choices, key=lambda choice: choice[0])
    return rows, columns


def check_max_pixels(max_pixels: int, geometry: NetGeometry, overlap: int = OVERLAP) -> None:
    """Makes sure that an image of any size can be tiled within `max_pixels`.

    Raises:
        ConfigError: Tiles of so few pixels cannot overlap.
    """
    # The smallest tile has the overlap, a stride of its own, and the image's rest below a stride.
    least = (round_up(overlap, geometry.output_stride) + 2 * geometry.output_stride) ** 2
    if max_pixels < least:
        raise ConfigError(
            f"`max_pixels` is {max_pixels}; tiles that overlap by {overlap} pixels need at least "
            f"{least}."
        )


def find_images(paths: Sequence[Path]) -> list[Path]:
    """The images that a list of files and folders stands for, each once.

    Args:
        paths: Files are taken as they are. Of a folder, the files in it whose ending is that of an
            image, sorted by name; folders in it are not entered.

    Raises:
        DataError: A path does not exist, a folder holds no image, or two images have the same stem,
            so that the prediction of one would overwrite that of the other.
    """
    images: dict[tuple[Path, str], Path] = {}
    for path in paths:
        if path.is_dir():
            inside = [
                file
                for file in sorted(path.iterdir())
                if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file()
            ]
            if not inside:
                raise DataError(
                    f"No image in the folder {path}. Images end with {', '.join(IMAGE_SUFFIXES)}."
                )
        elif path.exists():
            inside = [path]
        else:
            raise DataError(f"No such file or folder: {path}. Check the path.")
        for file in inside:
            images.setdefault((file.parent.resolve(), file.name), file)
    if not images:
        raise DataError("No image was given. Name image files, or a folder that holds them.")
    by_stem: dict[str, Path] = {}
    for image in images.values():
        other = by_stem.setdefault(image.stem, image)
        if other is not image:
            raise DataError(
                f"{other} and {image} have the same stem, and the prediction of one would "
                "overwrite that of the other. Rename one, or predict them into different folders."
            )
    return list(images.values())


def predict_files(
    weights: Weights,
    paths: Sequence[Path],
    out: Path,
    *,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    probabilities: bool = False,
    precision: Precision = "float32",
) -> Iterator[FilePrediction]:
    """Labels files and folders with a net of ours; see `label_files`."""
    labeller = NetLabeller(weights=weights, precision=precision)
    return label_files(labeller, paths, out, max_pixels=max_pixels, probabilities=probabilities)


def label_files(
    labeller: Labeller,
    paths: Sequence[Path],
    out: Path,
    *,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    probabilities: bool = False,
) -> Iterator[FilePrediction]:
    """Labels files and folders, and writes masks and overlays; one image an iteration.

    Writes, each file whole or not at all:
        out/masks/STEM.png: Class ids, with the classes' colours as palette (softmax).
        out/masks/CLASS/STEM.png: 1 where the class is, else 0 (sigmoid).
        out/overlays/STEM.png: The image, half covered by the colour of its most probable class.
        out/probabilities/STEM.npy: float16 `[k, h, w]`, if `probabilities`.

    Images that cannot be read are passed over, and named in one error at the end.

    Args:
        labeller: What labels the images.
        paths: Files and folders; see `find_images`.
        out: Folder to write to; made if need be.
        max_pixels: Larger images run in tiles.
        probabilities: Write them as well.

    Raises:
        DataError: At once, before anything is written: what `find_images` raises, or `out` is a
            data folder, or holds an input where a result would be written. Later: a result cannot
            be written. After the last image: some images could not be read.
        ConfigError: At once: `max_pixels` is too small for tiles. At the first image: the labeller
            gives no probabilities, and they were asked for.
        WeightsError: The weights have diverged.
        DeviceError: The device's memory does not suffice for `max_pixels`.
    """
    images = find_images(paths)
    check_max_pixels(max_pixels, labeller.geometry)
    _check_folder_names(labeller)
    if (out / "classes.toml").exists():
        raise DataError(
            f"{out} holds classes.toml, so it is a data folder, and predictions would overwrite "
            "its masks. Predict into another folder."
        )
    for image in images:
        for target in _targets(labeller, image, out, probabilities=probabilities):
            if target.resolve() == image.resolve():
                raise DataError(
                    f"{image} would be overwritten by its own prediction. Predict into another "
                    f"folder than {out}."
                )
    return _predict_each(labeller, images, out, max_pixels, probabilities)


def _predict_each(
    labeller: Labeller, images: list[Path], out: Path, max_pixels: int, probabilities: bool
) -> Iterator[FilePrediction]:
    faults: list[str] = []
    for path in images:
        try:
            image = decode_image(path, len(labeller.pixels.mean))
            prediction = labeller.predict(
                image, max_pixels=max_pixels, keep_probabilities=probabilities
            )
        except DataError as error:
            faults.append(str(error))
            continue
        except ShapeError as error:
            faults.append(f"{path}: {error}")
            continue
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise DeviceError(
                f"The device's memory does not suffice for {path} with `max_pixels` {max_pixels}. "
                "Use a smaller one, and the image runs in tiles."
            ) from error
        yield _write(labeller, path, image, prediction, out)
    if faults:
        raise DataError(
            f"{len(faults)} of {len(images)} images could not be predicted:\n" + "\n".join(faults)
        )


def _write(
    labeller: Labeller, path: Path, image: np.ndarray, prediction: Prediction, out: Path
) -> FilePrediction:
    colours = labeller.classes.colours
    if prediction.present is None:
        pngs = [_index_png(prediction.labels, colours)]
    else:
        pngs = [
            _index_png(mask, ((0, 0, 0), colour))
            for mask, colour in zip(prediction.present, colours, strict=True)
        ]
    picture = overlay(viewable(image, labeller.pixels), prediction.labels, colours)
    contents = [*pngs, _png(Image.fromarray(picture))]
    if prediction.probabilities is not None:
        file = io.BytesIO()
        np.save(file, prediction.probabilities)
        contents.append(file.getvalue())
    targets = _targets(labeller, path, out, probabilities=prediction.probabilities is not None)
    for target, content in zip(targets, contents, strict=True):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(target, content)
        except OSError as error:
            raise DataError(
                f"{target} cannot be written: {error.strerror}. Make room, or predict into another "
                "folder."
            ) from error
    return FilePrediction(
        image=path,
        size=Size(image.shape[0], image.shape[1]),
        masks=tuple(targets[: len(pngs)]),
        overlay=targets[len(pngs)],
        probabilities=None if prediction.probabilities is None else targets[-1],
        num_tiles=prediction.num_tiles,
    )


def overlay(
    image: np.ndarray, labels: np.ndarray, colours: Sequence[tuple[int, int, int]]
) -> np.ndarray:
    """An image half covered by the colours of its labels, uint8 `[h, w, 3]`.

    Args:
        image: uint8 RGB `[h, w, 3]`.
        labels: uint8 `[h, w]`; where a label is no class, the image shows uncovered.
        colours: RGB of the classes.
    """
    palette = np.zeros((256, 3), np.uint16)
    palette[: len(colours)] = colours
    covered = (image + palette[labels] + 1) // 2
    return np.where(labels[..., None] < len(colours), covered, image).astype(np.uint8)


def _targets(labeller: Labeller, image: Path, out: Path, *, probabilities: bool) -> list[Path]:
    png = f"{image.stem}.png"
    if labeller.kind == "multiclass":
        targets = [out / "masks" / png]
    else:
        targets = [out / "masks" / name / png for name in labeller.classes.names]
    targets.append(out / "overlays" / png)
    if probabilities:
        targets.append(out / "probabilities" / f"{image.stem}.npy")
    return targets


def _check_folder_names(labeller: Labeller) -> None:
    if labeller.kind == "multiclass":
        return
    for name in labeller.classes.names:
        if name in ("", ".", "..") or Path(name).name != name:
            raise DataError(
                f"The net has a class {name!r}, and its masks go into a folder of that name, "
                "which cannot be. Rename the class."
            )


def _index_png(labels: np.ndarray, colours: Sequence[tuple[int, int, int]]) -> bytes:
    image = Image.fromarray(labels)
    image.putpalette([value for colour in colours for value in colour])
    return _png(image)


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _cut_out(full: Tensor, placement: Placement, geometry: NetGeometry) -> Tensor:
    r = target_rect(placement, geometry, "full")
    return full[r.slot, :, r.top : r.top + r.height, r.left : r.left + r.width]


def _most_probable(probabilities: Tensor, kind: LabelKind) -> Tensor:
    best, labels = probabilities.max(0)
    labels = labels.to(torch.uint8)
    return labels if kind == "multiclass" else labels.masked_fill_(best < 0.5, NO_CLASS)


def _spread(extent: int, num: int, stride: int, overlap: int) -> TileAxis:
    strides, rest = divmod(extent, stride)
    tile = ceil_div(strides + overlap // stride * (num - 1), num)
    starts = tuple(i * (strides - tile) // max(num - 1, 1) * stride for i in range(num))
    return TileAxis(tile * stride + rest, starts)


def _fewest(extent: int, longest: int, stride: int, overlap: int) -> int | None:
    """The fewest tiles of at most `longest` pixels along an extent; None where there are none."""
    if extent <= longest:
        return 1
    strides, rest = divmod(extent, stride)
    advance = (longest - rest) // stride - overlap // stride
    return ceil_div(strides - overlap // stride, advance) if advance > 0 else None


def _axis_weights(axis: TileAxis, extent: int, overlap: int) -> list[Tensor]:
    """The share of each tile at each of its pixels; those of all tiles add up to 1."""
    margin = overlap / 4
    inside = torch.arange(axis.extent, dtype=torch.float64) + 0.5
    total = torch.zeros(extent, dtype=torch.float64)
    weights: list[Tensor] = []
    for start in axis.starts:
        weight = torch.ones(axis.extent, dtype=torch.float64)
        if start > 0:
            weight *= _ramp((inside - margin) / (2 * margin))
        if start + axis.extent < extent:
            weight *= _ramp((axis.extent - inside - margin) / (2 * margin))
        total[start : start + axis.extent] += weight
        weights.append(weight)
    return [
        (weight / total[start : start + axis.extent]).float()
        for start, weight in zip(axis.starts, weights, strict=True)
    ]


def _ramp(x: Tensor) -> Tensor:
    return (1 - torch.cos(math.pi * x.clamp(0, 1))) / 2
