"""Finds joints in image files: one CSV and one COCO file of all, and an overlay of each."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from anysize.atomic_files import write_atomic
from anysize.data.classes import Classes
from anysize.errors import DataError
from anysize.geometry import Size
from anysize.images.decode import Rows, image_rows, viewable
from anysize.predict.files import OVERLAY_PIXELS, NetLabeller, find_images
from anysize.predict.joints import SURE, Found, all_joints, best_joints
from anysize.predict.tiles import DEFAULT_MAX_PIXELS, check_max_pixels, predict_cells

CSV, COCO = "joints.csv", "joints.json"
COLUMNS = ("image", "joint", "x", "y", "confidence")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileJoints:
    """What was found in one image.

    Attributes:
        image, size: Of the image.
        found: Of each joint, its places; see `Found`.
        overlay: The picture that shows them.
    """

    image: Path
    size: Size
    found: Sequence[Found]
    overlay: Path


def find_joints(
    labeller: NetLabeller, image: np.ndarray | Rows, *, max_pixels: int, several: bool = False
) -> list[Found]:
    """The places of each joint in an image, in the order of the joints; the best one, or all.

    Args:
        labeller: A net of joints.
        image: As `predict_image` takes it.
        max_pixels: Larger images run in tiles.
        several: All peaks of a joint's part map, of however many people, instead of the highest.
    """
    weights = labeller.weights
    cells = predict_cells(
        weights.model, image, weights.pixels, max_pixels=max_pixels, precision=labeller.precision
    ).numpy()
    stride, maps = weights.model.geometry.head_stride, weights.config.part_maps
    if several:
        return all_joints(cells, stride, maps)
    return list(best_joints(cells, stride, maps)[:, None])


def joint_files(
    labeller: NetLabeller,
    paths: Sequence[Path],
    out: Path,
    *,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    several: bool = False,
) -> Iterator[FileJoints]:
    """Finds joints in files and folders; one image an iteration.

    Writes, each file whole or not at all:
        out/joints.csv: A line for each joint of each image: its x, y in pixels and confidence.
        out/joints.json: The same as COCO's key points, one person an image; not with `several`.
        out/overlays/STEM.png: The image with its joints and skeleton, fainter where less sure.

    Images that cannot be read are passed over, and named in one error at the end.

    Raises:
        DataError: At once: no image, or `out` is a data folder. After the last image: some could
            not be read.
        ConfigError: At once: `max_pixels` is too small for tiles.
        WeightsError: The weights have diverged.
    """
    images = find_images(paths)
    check_max_pixels(max_pixels, labeller.geometry)
    inputs = {image.resolve() for image in images}
    if (out / "joints.toml").exists() or any(
        (out / "overlays" / f"{image.stem}.png").resolve() in inputs for image in images
    ):
        raise DataError(
            f"{out} holds images or joints that predictions would overwrite. Predict into another "
            "folder."
        )
    return _find_each(labeller, images, out, max_pixels, several)


def _find_each(
    labeller: NetLabeller, images: Sequence[Path], out: Path, max_pixels: int, several: bool
) -> Iterator[FileJoints]:
    done: list[FileJoints] = []
    faults: list[str] = []
    for path in images:
        try:
            pixels = labeller.pixels
            image = image_rows(path, len(pixels.mean), pixels.float_range)
            found = find_joints(labeller, image, max_pixels=max_pixels, several=several)
            step = max(1, math.ceil(math.sqrt(image.size.pixels / OVERLAY_PIXELS)))
            seen = viewable(image.read(0, image.size.height)[::step, ::step], pixels)
        except DataError as error:
            faults.append(str(error) if str(path) in str(error) else f"{path}: {error}")
            continue
        picture = draw_joints_on(seen, [f / (step, step, 1) for f in found], labeller.classes)
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "PNG")
        overlay = out / "overlays" / f"{path.stem}.png"
        _write(overlay, file.getvalue())
        done.append(FileJoints(image=path, size=image.size, found=found, overlay=overlay))
        yield done[-1]
    _write(out / CSV, _csv(done, labeller.classes).encode())
    if not several:
        _write(out / COCO, json.dumps(_coco(done, labeller.classes), indent=1).encode())
    if faults:
        raise DataError(
            f"{len(faults)} of {len(images)} images could not be predicted:\n" + "\n".join(faults)
        )


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror}. Make room, or predict into another "
            "folder."
        ) from error


def _csv(done: Sequence[FileJoints], classes: Classes) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for image in done:
        for name, places in zip(classes.names, image.found, strict=True):
            writer.writerows(
                (image.image.name, name, f"{x:.2f}", f"{y:.2f}", f"{confidence:.4f}")
                for x, y, confidence in places
            )
    return file.getvalue()


def _coco(done: Sequence[FileJoints], classes: Classes) -> dict[str, Any]:
    return {
        "images": [
            {"id": i, "file_name": d.image.name, "height": d.size.height, "width": d.size.width}
            for i, d in enumerate(done, 1)
        ],
        "categories": [
            {
                "id": 1,
                "name": "person",
                "keypoints": list(classes.names),
                "skeleton": [[a + 1, b + 1] for a, b in classes.links.skeleton],
            }
        ],
        "annotations": [
            {
                "id": i,
                "image_id": i,
                "category_id": 1,
                "num_keypoints": len(d.found),
                "keypoints": [v for ((x, y, _),) in d.found for v in (round(x, 2), round(y, 2), 2)],
                "confidences": [round(c, 4) for ((_, _, c),) in d.found],
                "score": float(np.mean([c for ((_, _, c),) in d.found])),
            }
            for i, d in enumerate(done, 1)
        ],
    }


def draw_joints_on(image: np.ndarray, found: Sequence[Found], classes: Classes) -> np.ndarray:
    """An image with joints in their colours, and the skeleton where each joint has one place.

    Args:
        image: uint8 RGB `[h, w, 3]`.
        found: Of each joint, its places; those below a confidence of `SURE` are not drawn.
        classes: Colours, and what the skeleton connects.
    """
    picture = Image.fromarray(image).convert("RGB")
    drawing = ImageDraw.Draw(picture, "RGBA")
    radius = max(2, round(math.hypot(*picture.size) / 150))
    sure = [places[places[:, 2] >= SURE] for places in found]
    for a, b in classes.links.skeleton:
        if len(found[a]) == len(found[b]) == len(sure[a]) == len(sure[b]) == 1:
            alpha = round(255 * min(sure[a][0, 2], sure[b][0, 2]))
            ends = [*sure[a][0, :2], *sure[b][0, :2]]
            drawing.line(ends, fill=(*classes.colours[b], alpha), width=max(2, radius // 2))
    for colour, places in zip(classes.colours, sure, strict=True):
        for x, y, confidence in places:
            box = (x - radius, y - radius, x + radius, y + radius)
            drawing.ellipse(box, fill=(*colour, round(255 * confidence)), outline="white")
    return np.asarray(picture)
