"""Labels image files: masks and overlays of the images' own size.

What labels images is a `Labeller`: a net of ours (`NetLabeller`), or an ONNX file
(`anysize.onnx.file`). Tiling and the files written are the same for both.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2
from torch import Tensor

from anysize.atomic_files import remove_unfinished, write_atomic
from anysize.config import LabelKind, PixelConvention
from anysize.data.classes import Classes
from anysize.data.files import files_below
from anysize.data.loader import normalise
from anysize.data.pairing import passed_over
from anysize.device import Precision, is_out_of_memory
from anysize.errors import DataError, DeviceError, ShapeError
from anysize.geometry import NetGeometry, Size
from anysize.images.decode import Rows, image_rows, viewable
from anysize.images.formats import IMAGE_SUFFIXES
from anysize.images.headers import read_tiff_header
from anysize.images.opening import readable
from anysize.images.tiff import GEO_TAGS, geo_tags
from anysize.models.weights_file import Weights
from anysize.predict.tiles import (
    DEFAULT_MAX_PIXELS,
    Prediction,
    check_max_pixels,
    predict_image,
    predict_tiled,
)
from anysize.predict.versions import ITSELF, Versions, averaged_probabilities
from anysize.ranks import ALONE, Ranks
from anysize.wording import count_of

OVERLAY_PIXELS = 1 << 26
"""Most pixels of an overlay; one of a larger image has every second, third, ... pixel of it."""

_OVERLAY_ROWS = 1024


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
        self, image: np.ndarray | Rows, *, max_pixels: int, keep_probabilities: bool
    ) -> Prediction:
        """Labels one image, uint8 RGB `[h, w, 3]` or its rows; arguments of `predict_image`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NetLabeller:
    """A net of ours as a `Labeller`.

    Attributes:
        weights: The net, its classes and its pixel convention.
        precision: See `canvas_logits`.
        versions: Test-time augmentation.
    """

    weights: Weights
    precision: Precision = "float32"
    versions: Versions = ITSELF

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
        self, image: np.ndarray | Rows, *, max_pixels: int, keep_probabilities: bool
    ) -> Prediction:
        """See `predict_image`."""
        if self.versions != ITSELF:
            return predict_tiled(
                self._averaged,
                image,
                self.geometry,
                kind=self.kind,
                max_pixels=self.versions.tile_pixels(max_pixels),
                keep_probabilities=keep_probabilities,
            )
        return predict_image(
            self.weights.model,
            image,
            self.pixels,
            kind=self.kind,
            max_pixels=max_pixels,
            precision=self.precision,
            keep_probabilities=keep_probabilities,
        )

    def _averaged(self, tile: np.ndarray) -> Tensor:
        return averaged_probabilities(
            self.weights.model,
            torch.from_numpy(normalise(tile, self.pixels)).permute(2, 0, 1),
            kind=self.kind,
            versions=self.versions,
            precision=self.precision,
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
            inside = files_below(path, IMAGE_SUFFIXES, deep=False)
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


def not_read(paths: Sequence[Path]) -> list[str]:
    """What is passed over in the folders among `paths`, since it is not read; a sentence each."""
    return [
        note
        for path in paths
        if path.is_dir()
        for note in passed_over(path, IMAGE_SUFFIXES, deep=False)
    ]


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
    ranks: Ranks = ALONE,
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
        ranks: That share the images; the first writes, and it alone is given what was written.

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
    folders: set[Path] = set()
    for image in images:
        for target in _targets(labeller, image, out, probabilities=probabilities):
            folders.add(target.parent)
            if target.resolve() == image.resolve():
                raise DataError(
                    f"{image} would be overwritten by its own prediction. Predict into another "
                    f"folder than {out}."
                )
    if ranks.is_first:
        for folder in folders:
            remove_unfinished(folder)
    return _predict_each(labeller, images, out, max_pixels, probabilities, ranks)


def _predict_each(
    labeller: Labeller,
    images: list[Path],
    out: Path,
    max_pixels: int,
    probabilities: bool,
    ranks: Ranks,
) -> Iterator[FilePrediction]:
    """One image of each rank at a time, so that they are written in their own order."""
    faults: list[str] = []
    for first in range(0, len(images), ranks.size):
        made: _Made | str | None = None
        with ranks.alike():
            if first + ranks.rank < len(images):
                path = images[first + ranks.rank]
                made = _predict_one(labeller, path, out, max_pixels, probabilities)
        for found in ranks.gather(made):
            if isinstance(found, str):
                faults.append(found)
            elif found is not None and ranks.is_first:
                _write(found)
                yield found.prediction
    if faults:
        raise DataError(
            f"{len(faults)} of {count_of(len(images), 'image')} could not be "
            "predicted:\n" + "\n".join(faults)
        )


@dataclass(frozen=True, slots=True)
class _Made:
    """What is to be written for an image, and the contents of its files."""

    prediction: FilePrediction
    contents: dict[Path, bytes]


def _predict_one(
    labeller: Labeller, path: Path, out: Path, max_pixels: int, probabilities: bool
) -> _Made | str:
    """The files of an image, or what is wrong with it."""
    try:
        pixels = labeller.pixels
        image = _rows_in_memory(path, pixels)
        prediction = labeller.predict(
            image, max_pixels=max_pixels, keep_probabilities=probabilities
        )
    except DataError as error:
        return str(error) if str(path) in str(error) else f"{path}: {error}"
    except ShapeError as error:
        return f"{path}: {error}"
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceError(
            f"The device's memory does not suffice for {path} with `max_pixels` {max_pixels}. "
            "Use a smaller one, and the image runs in tiles."
        ) from error
    return _files_of(labeller, path, image, prediction, out)


def _rows_in_memory(path: Path, pixels: PixelConvention) -> Rows:
    try:
        return image_rows(path, len(pixels.mean), pixels.float_range)
    except MemoryError as error:
        raise DataError(
            f"Memory does not suffice to decode {path}. Free memory, or save it as a TIFF, which "
            "is read in parts."
        ) from error


def _files_of(
    labeller: Labeller, path: Path, image: Rows, prediction: Prediction, out: Path
) -> _Made:
    colours = labeller.classes.colours
    geo = _geo_tags(path)
    if prediction.present is None:
        masks = [_index_mask(prediction.labels, colours, geo)]
    else:
        masks = [
            _index_mask(mask, ((0, 0, 0), colour), geo)
            for mask, colour in zip(prediction.present, colours, strict=True)
        ]
    picture = _overlay_of_rows(image, prediction.labels, labeller)
    contents = [*masks, _encoded(Image.fromarray(picture), "PNG")]
    if prediction.probabilities is not None:
        file = io.BytesIO()
        np.save(file, prediction.probabilities)
        contents.append(file.getvalue())
    targets = _targets(labeller, path, out, probabilities=prediction.probabilities is not None)
    written = FilePrediction(
        image=path,
        size=image.size,
        masks=tuple(targets[: len(masks)]),
        overlay=targets[len(masks)],
        probabilities=None if prediction.probabilities is None else targets[-1],
        num_tiles=prediction.num_tiles,
    )
    return _Made(written, dict(zip(targets, contents, strict=True)))


def _write(made: _Made) -> None:
    for target, content in made.contents.items():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(target, content)
        except OSError as error:
            raise DataError(
                f"{target} cannot be written: {error.strerror}. Make room, or predict into another "
                "folder."
            ) from error


def _overlay_of_rows(image: Rows, labels: np.ndarray, labeller: Labeller) -> np.ndarray:
    """The overlay of an image, made a few rows at a time; thinned out where it is very large."""
    step = max(1, math.ceil(math.sqrt(image.size.pixels / OVERLAY_PIXELS)))
    parts: list[np.ndarray] = []
    for top in range(0, image.size.height, step * _OVERLAY_ROWS):
        bottom = min(top + step * _OVERLAY_ROWS, image.size.height)
        rows = viewable(image.read(top, bottom)[::step, ::step], labeller.pixels)
        parts.append(overlay(rows, labels[top:bottom:step, ::step], labeller.classes.colours))
    return np.concatenate(parts)


def overlay(
    image: np.ndarray, labels: np.ndarray, colours: Sequence[tuple[int, int, int]]
) -> np.ndarray:
    """An image half covered by the colours of its labels, uint8 `[h, w, 3]`.

    Args:
        image: uint8 RGB `[h, w, 3]`.
        labels: uint8 `[h, w]`; where a label is no class, the image shows uncovered.
        colours: RGB of the classes; a black one covers nothing, since it would only darken.
    """
    palette = np.zeros((256, 3), np.uint16)
    palette[: len(colours)] = colours
    covered = (image + palette[labels] + 1) // 2
    shown = np.asarray(palette.sum(axis=1))[labels] > 0
    return np.where(shown[..., None], covered, image).astype(np.uint8)


def _targets(labeller: Labeller, image: Path, out: Path, *, probabilities: bool) -> list[Path]:
    png = f"{image.stem}.png"
    mask = f"{image.stem}.tif" if _geo_tags(image) else png
    if labeller.kind == "multiclass":
        targets = [out / "masks" / mask]
    else:
        targets = [out / "masks" / name / mask for name in labeller.classes.names]
    targets.append(out / "overlays" / png)
    if probabilities:
        targets.append(out / "probabilities" / f"{image.stem}.npy")
    return targets


def _geo_tags(image: Path) -> Mapping[int, Any]:
    """What ties an image to the ground; empty where nothing does, or it cannot be read."""
    try:
        with readable(image):
            tags = read_tiff_header(image)
    except DataError:
        return {}
    return geo_tags(tags) if tags is not None else {}


def _check_folder_names(labeller: Labeller) -> None:
    if labeller.kind == "multiclass":
        return
    for name in labeller.classes.names:
        if name in ("", ".", "..") or Path(name).name != name:
            raise DataError(
                f"The net has a class {name!r}, and its masks go into a folder of that name, "
                "which cannot be. Rename the class."
            )


def _index_mask(
    labels: np.ndarray, colours: Sequence[tuple[int, int, int]], geo: Mapping[int, Any]
) -> bytes:
    """A PNG, or a TIFF with the tags of a georeferenced image."""
    image = Image.fromarray(labels)
    image.putpalette([value for colour in colours for value in colour])
    if not geo:
        return _encoded(image, "PNG")
    tags = ImageFileDirectory_v2()
    for tag, value in geo.items():
        tags.tagtype[tag] = GEO_TAGS[tag]
        tags[tag] = value
    return _encoded(image, "TIFF", compression="tiff_adobe_deflate", tiffinfo=tags)


def _encoded(image: Image.Image, image_format: str, **options: Any) -> bytes:  # noqa: ANN401
    file = io.BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()
