"""Draws data folders as people have them, with known labels: the same picture stored in many ways.

Every image is painted in one colour per label, in blocks of 8 pixels, so that what a net would be
given can be held against the labels, whatever was done to the files.
"""

import json
import unicodedata
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from anysize.config import DataConfig

NAMES = ("background", "road", "car")
COLOURS = np.array([(0, 0, 0), (128, 64, 128), (40, 200, 60)], np.uint8)
PAINT = np.array([(20, 20, 20), (230, 40, 40), (40, 60, 230)], np.uint8)
BLOCK = 8
EXIF = 0x0112
STORED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
STYLES = ("grey", "palette", "free palette", "rgb ids", "colours", "labelme", "coco", "yolo")
ODD = (
    "",
    "",
    "",
    "palette order",
    "grey",
    "rgb ids",
    "colours",
    "size",
    "transposed",
    "jpeg",
    "unnamed value",
)


@dataclass
class Drawn:
    """A folder, and what is right of it.

    Attributes:
        root: The folder.
        data: Its settings.
        truth: Labels by stem.
        painted: What images show by stem: the same, but that it is shown where labels are ignored.
        images: Image files by stem.
        may_refuse: What about it may be refused; none where it must be read.
        what: How it was drawn.
    """

    root: object
    data: DataConfig
    truth: dict
    painted: dict
    images: dict
    may_refuse: list = field(default_factory=list)
    what: dict = field(default_factory=dict)


def draw_folder(root, seed):
    """Draws a folder into `root`, which must not exist."""
    rng = np.random.default_rng((seed, 77))
    style = str(rng.choice(STYLES))
    masks_of_files = style not in {"labelme", "coco", "yolo"}
    what = {
        "style": style,
        "container": str(rng.choice(["png", "bmp", "tif"])) if masks_of_files else "json",
        "bits": int(rng.choice([8, 16, 32])),
        "image": str(rng.choice(["png", "jpg", "tif", "bmp", "webp"])),
        "image exif": int(rng.choice([1, 1, 2, 3, 5, 6, 8])),
        "late exif": bool(rng.random() < 0.3),
        "mask exif": str(rng.choice(["", "", "", "turned", "stale"])) if masks_of_files else "",
        "names": str(rng.choice(["plain", "plain", "suffix", "suffix told", "nested", "nfd"])),
        "ids": str(rng.choice(["", "", "", "told", "zero ignored"])) if masks_of_files else "",
        "odd": str(rng.choice(ODD)) if masks_of_files else "",
        "hidden": bool(rng.random() < 0.5),
    }
    _mend(what)
    drawn = Drawn(root, DataConfig(root=str(root)), {}, {}, {}, what=what)
    settings = {}
    if what["names"] == "suffix told":
        settings["mask_pattern"] = "{stem}_mask"
    if what["ids"] == "told":
        settings["ids"] = {"3": "background", "9": "road", "30": "car", "200": "ignore"}
    (root / "images").mkdir(parents=True)
    _write_classes(root, zero_ignored=what["ids"] == "zero ignored")
    odd = int(rng.integers(0, 4))
    shapes = []
    for i in range(4):
        height, width = (int(v) for v in rng.integers(4, 9, 2) * BLOCK)
        if i == odd and what["odd"] == "transposed":
            height, width = 64, 72
        labels = rng.integers(0, 3, (height // BLOCK, width // BLOCK)).astype(np.uint8)
        labels = labels.repeat(BLOCK, 0).repeat(BLOCK, 1)
        name = _name(i, what["names"])
        stem = unicodedata.normalize("NFC", name)
        drawn.truth[stem], drawn.painted[stem] = labels, labels.copy()
        drawn.images[stem] = _write_image(root, name, PAINT[labels], what)
        if masks_of_files:
            _write_mask(drawn, name, labels, rng, is_odd=i == odd)
        else:
            shapes.append((name, drawn.images[stem], labels))
    _write_shapes(root, shapes, what)
    if what["hidden"]:
        for name in ("._a.jpg", "._a.png", ".DS_Store", "Thumbs.db"):
            (root / "images" / name).write_bytes(b"\0\5\x16\7")
    drawn.data = DataConfig(root=str(root), **settings)
    _may_refuse(drawn)
    return drawn


def _mend(what):
    """Takes out what cannot be."""
    if what["style"] == "colours":
        what["ids"] = ""
        what["odd"] = what["odd"].replace("unnamed value", "")
    if what["container"] == "bmp" or (what["mask exif"], what["odd"]) == ("stale", "transposed"):
        what["mask exif"] = ""  # The latter would be a mirrored mask, which no file shows.
    if what["style"] == "yolo" and what["names"] == "nested":
        what["names"] = "plain"


def _may_refuse(drawn):
    """What a person would have to be asked about, or told."""
    what = drawn.what
    paired_by_name = what["style"] not in {"coco", "yolo"}
    if what["names"] == "suffix" and paired_by_name:
        drawn.may_refuse.append("names")
    if what["mask exif"]:
        drawn.may_refuse.append("mask exif")
    odd = what["odd"]
    told = odd == "unnamed value" and what["style"] == "palette"  # By its colour.
    if odd in {"size", "transposed", "jpeg", "unnamed value"} and not told:
        drawn.may_refuse.append(f"must: {odd}")
    elif odd:
        drawn.may_refuse.append(odd)
    if what["ids"] and what["style"] in {"palette", "free palette", "rgb ids"}:
        drawn.may_refuse.append("ids beside colours")


def _name(i, how):
    names = {"nested": f"sub{i % 2}/{i}", "nfd": f"Ku\u0308che {i}"}
    return names.get(how, str(10**i))  # "1" is a part of "10".


def _masked(name, how):
    if how == "nfd":
        return unicodedata.normalize("NFC", name)
    return f"{name}_mask" if how.startswith("suffix") else name


def _write_classes(root, *, zero_ignored):
    lines = ["ignore_index = 0"] if zero_ignored else []
    for name, colour in zip(NAMES, COLOURS.tolist(), strict=True):
        lines.append(f'[[class]]\nname = "{name}"\ncolour = {colour}')
    (root / "classes.toml").write_text("\n".join(lines))


def _write_image(root, name, pixels, what):
    path = root / "images" / f"{name}.{what['image']}"
    path.parent.mkdir(exist_ok=True)
    orientation = what["image exif"] if what["image"] != "bmp" else 1
    picture, exif = Image.fromarray(pixels), Image.Exif()
    if orientation != 1:
        picture = picture.transpose(STORED[orientation])
        exif[EXIF] = orientation
    options = {
        "jpg": {"quality": 95, "subsampling": 0},
        "webp": {"lossless": True},
        "tif": {"compression": "tiff_lzw"},
    }.get(what["image"], {})
    if what["image"] != "bmp":
        options["exif"] = exif
    picture.save(path, **options)
    if what["late exif"] and orientation != 1 and what["image"] == "png":
        data = path.read_bytes()
        start = data.index(b"eXIf") - 4
        stop = start + 12 + int.from_bytes(data[start : start + 4], "big")
        end = data.index(b"IEND") - 4
        path.write_bytes(data[:start] + data[stop:end] + data[start:stop] + data[end:])
    return path


def _write_mask(drawn, name, labels, rng, *, is_odd):
    what = drawn.what
    style, odd = what["style"], what["odd"] if is_odd else ""
    values = labels.astype(np.int32)
    colours_of = COLOURS
    if what["ids"] == "told":
        values = np.array([3, 9, 30])[labels]
        values[:BLOCK, :BLOCK] = 200
        labels[:BLOCK, :BLOCK] = 255
    elif what["ids"] == "zero ignored":
        values = labels.astype(np.int32) + 1
        values[:BLOCK, :BLOCK] = 0
        labels[:BLOCK, :BLOCK] = 255
    elif style != "colours" and rng.random() < 0.3:
        values[:BLOCK, :BLOCK] = labels[:BLOCK, :BLOCK] = 255
    if odd == "unnamed value":
        values[-1, -1] = 77
    if odd in {"grey", "rgb ids", "colours"}:
        style = odd
    picture = _picture(values, labels, style, what, colours_of, swapped=odd == "palette order")
    if odd == "size":
        picture = picture.crop((0, 0, picture.width - 1, picture.height))
    elif odd == "transposed":
        picture = picture.transpose(Image.Transpose.TRANSPOSE)
    path = drawn.root / "masks" / f"{_masked(name, what['names'])}.{what['container']}"
    path.parent.mkdir(parents=True, exist_ok=True)
    options = {}
    if what["mask exif"] and what["container"] != "bmp":
        options["exif"] = Image.Exif()
        options["exif"][EXIF] = 6
        if what["mask exif"] == "turned":
            picture = picture.transpose(STORED[6])
    if odd == "jpeg":
        picture.convert("RGB").save(path.with_suffix(".jpg"))
    else:
        picture.save(path, **options)


def _picture(values, labels, style, what, colours, *, swapped):
    """A mask as it is stored, before its format."""
    if style == "colours":
        table = np.zeros((256, 3), np.uint8)
        table[:3] = colours
        table[255] = (9, 9, 9)  # No class's.
        return Image.fromarray(table[labels])
    if style == "rgb ids":
        return Image.fromarray(np.stack([values.astype(np.uint8)] * 3, -1))
    if style == "grey":
        bits = what["bits"] if what["container"] != "bmp" else 8
        bits = 16 if bits == 32 and what["container"] == "png" else bits
        dtype = {8: np.uint8, 16: np.uint16, 32: np.int32}[bits]
        return Image.fromarray(values.astype(dtype))
    table = np.zeros((256, 3), np.uint8)
    if style == "palette":
        found, first = np.unique(values, return_index=True)
        for value, at in zip(found, first, strict=True):
            label = labels.ravel()[at]
            table[value] = colours[label] if label < 3 else (255, 255, 255)
    else:
        table[:] = np.stack([np.arange(256), 255 - np.arange(256), np.full(256, 7)], -1)
    if swapped:
        order = np.arange(256)
        order[[1, 2]] = 2, 1
        values, table = order[values], table[order]
    picture = Image.fromarray(values.astype(np.uint8))
    picture.putpalette(table.ravel().tolist())
    return picture


def _blocks(labels):
    for top in range(0, labels.shape[0], BLOCK):
        for left in range(0, labels.shape[1], BLOCK):
            if label := int(labels[top, left]):
                yield label, left, top


def _write_shapes(root, shapes, what):
    if what["style"] == "labelme":
        for name, path, labels in shapes:
            _write_labelme(root, _masked(name, what["names"]), path, labels)
    elif what["style"] == "coco":
        _write_coco(root, shapes)
    elif what["style"] == "yolo":
        _write_yolo(root, shapes)


def _write_labelme(root, name, image, labels):
    shapes = [
        {
            "label": NAMES[label],
            "shape_type": "rectangle",
            "points": [[left, top], [left + BLOCK - 1, top + BLOCK - 1]],
        }
        for label, left, top in _blocks(labels)
    ]
    height, width = labels.shape
    path = root / "masks" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {"shapes": shapes, "imageHeight": height, "imageWidth": width, "imagePath": image.name}
    path.write_text(json.dumps(table))


def _write_coco(root, shapes):
    images, annotations = [], []
    for number, (_, path, labels) in enumerate(shapes):
        height, width = labels.shape
        name = path.relative_to(root / "images").as_posix()
        images.append({"id": number, "file_name": name, "height": height, "width": width})
        for label in (1, 2):
            column_wise = (labels == label).T.ravel()
            edges = np.flatnonzero(np.diff(column_wise.astype(np.int8), prepend=0)).tolist()
            counts = np.diff([0, *edges, column_wise.size]).tolist()
            rle = {"size": [height, width], "counts": counts}
            entry = {"id": len(annotations), "image_id": number, "category_id": label}
            annotations.append({**entry, "segmentation": rle, "iscrowd": 0})
    categories = [{"id": i, "name": NAMES[i]} for i in (1, 2)]
    table = {"images": images, "annotations": annotations, "categories": categories}
    (root / "instances.json").write_text(json.dumps(table))


def _write_yolo(root, shapes):
    (root / "labels").mkdir()
    (root / "data.yaml").write_text("names: [road, car]\n")
    for name, _, labels in shapes:
        height, width = labels.shape
        lines = []
        for label, left, top in _blocks(labels):
            right, bottom = left + BLOCK - 1, top + BLOCK - 1
            corners = ((left, top), (right, top), (right, bottom), (left, bottom))
            shares = [f"{x / width} {y / height}" for x, y in corners]
            lines.append(f"{label - 1} {' '.join(shares)}")
        path = root / "labels" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines))
