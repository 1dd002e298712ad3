"""The kinds of file that `fuzz.py` damages: how a whole one is made, and what reads it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.data.files import write_png16, write_tiff

from anysize.config import DataConfig, ModelConfig, OptimConfig, PixelConvention
from anysize.conversion.asked import Asked
from anysize.conversion.convert import convert
from anysize.data.samples import (
    Classes,
    Sample,
    decode_image,
    decode_mask,
    read_classes,
    read_folder,
)
from anysize.geometry import Canvas, NetGeometry, Size
from anysize.images.headers import read_size
from anysize.models.build import build_model
from anysize.models.fcn import FCN
from anysize.models.weights_file import Weights, load_weights, save_weights
from anysize.onnx.export import export
from anysize.onnx.file import open_onnx
from anysize.planning.canvases import read_plan, write_plan
from anysize.planning.packing import Plan
from anysize.report import write_report
from anysize.training.events import read_events
from anysize.training.optim import build_optimizer
from anysize.training.settings import load_run_config
from anysize.training.state import load_latest_state, save_state

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
SIZE = Size(23, 31)
CLASSES = Classes(names=("ground", "disc", "stripe"), colours=((9, 9, 9), (200, 0, 0), (0, 0, 200)))
CONFIG = ModelConfig(units=(1, 1, 1, 1), base_depth=4)
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file.

    Attributes:
        name: Of the kind, and of the folder that it is made in.
        make: Writes whole files into a folder, and returns the one to read.
        read: Reads the file as the program would.
        pattern: Files of the folder that are mutated.
        named: What a refusal may name instead of the file: a folder, say.
    """

    name: str
    make: Callable[[Path], Path]
    read: Callable[[Path], object]
    pattern: str = "*"
    named: str = "\0"

    def targets(self, folder: Path) -> list[Path]:
        """The files that are mutated."""
        return sorted(p for p in folder.rglob(self.pattern) if p.is_file())


def _rng() -> np.random.Generator:
    return np.random.default_rng(7)


def _image(name: str, mode: str = "RGB", **options: object) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        ramp = np.add.outer(np.arange(SIZE.height), np.arange(SIZE.width)) * 4
        noise = _rng().integers(0, 40, (*SIZE, 3))
        array = (ramp[..., None] + noise).clip(0, 255).astype(np.uint8)
        image = Image.fromarray(array).convert(mode) if mode != "I;16" else _grey_16(array)
        path = folder / name
        exif = Image.Exif()
        exif[0x0112] = 6
        if name.endswith((".jpg", ".png", ".webp")):
            options["exif"] = exif
        image.save(path, **options)
        return path

    return make


def _grey_16(array: np.ndarray) -> Image.Image:
    return Image.fromarray(array[..., 0].astype(np.uint16) * 257)


def _read_image(path: Path) -> object:
    size = read_size(path)
    return size, decode_image(path)


def _mask(name: str, *, palette: bool) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        labels = _rng().integers(0, 3, SIZE).astype(np.uint8)
        image = Image.fromarray(labels)
        if palette:
            image.putpalette([c for colour in CLASSES.colours for c in colour])
        image.save(folder / name)
        return folder / name

    return make


def _read_mask(path: Path) -> object:
    sample = Sample(stem=path.stem, image=path, masks=(path,), size=SIZE)
    return decode_mask(sample, CLASSES)


def _tiny() -> FCN:
    return build_model(CONFIG, 3, generator=torch.Generator().manual_seed(0))


def _weights(folder: Path) -> Path:
    path = folder / "weights.safetensors"
    save_weights(
        path,
        Weights(
            model=_tiny(),
            config=CONFIG,
            classes=CLASSES,
            kind="multiclass",
            pixels=PixelConvention(),
        ),
    )
    return path


def _state(folder: Path) -> Path:
    model = _tiny()
    return save_state(
        folder,
        step=3,
        made_of={"images": "d"},
        model=model,
        optimizer=build_optimizer(model, OptimConfig()),
    )


def _read_state(path: Path) -> object:
    state = load_latest_state(path.parent)
    assert state is not None
    model = _tiny()
    state.restore(model, build_optimizer(model, OptimConfig()))
    return state


def _plan(folder: Path) -> Path:
    plan = Plan(
        geometry=NetGeometry(output_stride=16, pool_padding="same"),
        images_per_step=4,
        max_pixels_per_step=1 << 20,
        canvases=(Canvas(1, 240, 320), Canvas(4, 240, 320)),
    )
    write_plan(plan, folder / "plan.json", sizes=[Size(200, 300), Size(230, 310)])
    return folder / "plan.json"


def _run_toml(folder: Path) -> Path:
    path = folder / "run.toml"
    path.write_text(
        '[data]\nroot = "data"\n[model]\ndepth = 50\n[augment]\ncrop = [480, 480]\n'
        "[optim]\nlr = 0.01\nmilestones = [10, 20]\n[train]\nepochs = 3\nseed = 1\n"
    )
    return path


def _classes_toml(folder: Path) -> Path:
    path = folder / "classes.toml"
    path.write_text(
        'ignore_index = 255\n[[class]]\nname = "a"\ncolour = [0, 1, 2]\n'
        '[[class]]\nname = "b"\ncolour = [9, 1, 2]\n'
    )
    return path


def _run_folder(folder: Path) -> Path:
    train = {
        "event": "train", "step": 10, "epoch": 0, "loss": 0.5, "lr": 0.1, "images_per_s": 2.0,
        "valid_megapixels_per_s": 0.1, "wait_s": 0.0, "wait_share": 0.0, "waste": 0.1,
        "elapsed_s": 1.0, "peak_memory_bytes": 1000,
    }  # fmt: skip
    (folder / "events.jsonl").write_text("".join(json.dumps(train) + "\n" for _ in range(4)))
    _plan(folder)
    _run_toml(folder)
    return folder / "events.jsonl"


def _read_run_folder(path: Path) -> object:
    return read_events(path.parent / "events.jsonl"), write_report(path.parent)


def _golden(*names: str) -> Callable[[Path], Path]:
    """Files that TensorFlow, Caffe and torchvision wrote."""

    def make(folder: Path) -> Path:
        for name in names:
            shutil.copy(GOLDEN / name, folder / name)
        return folder / names[0]

    return make


def _foreign_safetensors(folder: Path) -> Path:
    tensors = torch.load(GOLDEN / "torchvision_resnet.pth", weights_only=True)
    save_file(tensors, folder / "resnet.safetensors")
    return folder / "resnet.safetensors"


def _convert(path: Path) -> object:
    file, _ = convert(path)
    return file


def _convert_head(path: Path) -> object:
    file, _ = convert(path, Asked(loss="sigmoid"))
    return file


def _onnx(folder: Path) -> Path:
    weights = load_weights(_weights(folder), CPU)
    (folder / "weights.safetensors").unlink()
    export(weights, folder / "model.onnx")
    return folder / "model.onnx"


def _png_16(folder: Path) -> Path:
    write_png16(folder / "photo.png", _rng().integers(0, 65536, (*SIZE, 3), np.uint16))
    return folder / "photo.png"


def _tiff_16(folder: Path) -> Path:
    array = _rng().integers(0, 65536, (*SIZE, 3), np.uint16)
    write_tiff(folder / "photo.tif", array, photometric=2, compression=8)
    return folder / "photo.tif"


def _data_folder(folder: Path) -> tuple[Path, list[Path]]:
    """Three images and classes; labels are the caller's."""
    (folder / "images").mkdir()
    images = [folder / "images" / f"{stem}.png" for stem in "abc"]
    for image in images:
        Image.fromarray(_rng().integers(0, 256, (*SIZE, 3), np.uint8)).save(image)
    tables = [
        f'[[class]]\nname = "{name}"\ncolour = {list(colour)}\n'
        for name, colour in zip(CLASSES.names, CLASSES.colours, strict=True)
    ]
    (folder / "classes.toml").write_text("\n".join(tables))
    return folder, images


def _coloured(folder: Path) -> Path:
    root, images = _data_folder(folder)
    (root / "masks").mkdir()
    palette = np.array(CLASSES.colours, np.uint8)
    for image in images:
        Image.fromarray(palette[_rng().integers(0, 3, SIZE)]).save(root / "masks" / image.name)
    return root / "masks" / "a.png"


def _stack(suffix: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        root, images = _data_folder(folder)
        (root / "masks").mkdir()
        for image in images:
            planes = _rng().integers(0, 2, (3, *SIZE), np.uint8)
            path = root / "masks" / f"{image.stem}{suffix}"
            if suffix == ".npy":
                np.save(path, planes)
            else:
                first, *others = [Image.fromarray(plane) for plane in planes]
                first.save(path, save_all=True, append_images=others)
        return root / "masks" / f"a{suffix}"

    return make


def _labelme(folder: Path) -> Path:
    root, images = _data_folder(folder)
    (root / "masks").mkdir()
    for image in images:
        shapes = [
            {"label": "disc", "shape_type": "circle", "points": [[9, 9], [14, 9]]},
            {"label": "stripe", "shape_type": "polygon", "points": [[0, 0], [5.5, 0], [5, 20]]},
            {"label": "ground", "shape_type": "rectangle", "points": [[1, 1], [30, 20]]},
        ]
        table = {
            "version": "5.0.1", "flags": {}, "shapes": shapes, "imagePath": image.name,
            "imageData": None, "imageHeight": SIZE.height, "imageWidth": SIZE.width,
        }  # fmt: skip
        (root / "masks" / f"{image.stem}.json").write_text(json.dumps(table))
    return root / "masks" / "a.json"


def _coco(folder: Path) -> Path:
    root, images = _data_folder(folder)
    half = SIZE.pixels // 2
    annotations = [
        {"segmentation": [[1, 1, 20, 1, 20, 15]], "iscrowd": 0},
        {"segmentation": {"counts": [half, SIZE.pixels - half], "size": list(SIZE)}, "iscrowd": 1},
        {"segmentation": {"counts": "0c0c0c0", "size": list(SIZE)}, "iscrowd": 0},
    ]
    table = {
        "images": [
            {"id": i, "file_name": path.name, "height": SIZE.height, "width": SIZE.width}
            for i, path in enumerate(images)
        ],
        "categories": [{"id": i, "name": name} for i, name in enumerate(CLASSES.names)],
        "annotations": [
            {"id": i, "image_id": i % 2, "category_id": i, "area": 9, "bbox": [0, 0, 9, 9], **more}
            for i, more in enumerate(annotations[:2])
        ],
    }
    (root / "annotations.json").write_text(json.dumps(table))
    return root / "annotations.json"


def _ultralytics(folder: Path) -> Path:
    for split in ("train", "val"):
        (folder / "images" / split).mkdir(parents=True)
        (folder / "labels" / split).mkdir(parents=True)
        image = folder / "images" / split / f"{split}1.png"
        Image.fromarray(_rng().integers(0, 256, (*SIZE, 3), np.uint8)).save(image)
        (folder / "labels" / split / f"{split}1.txt").write_text(
            "0 0.1 0.1 0.9 0.1 0.5 0.8\n1 0.2 0.2 0.3 0.2 0.3 0.35 0.2 0.3\n"
        )
    (folder / "data.yaml").write_text(
        "path: .\ntrain: images/train\nval: images/val\nnames:\n  0: disc\n  1: stripe\n"
    )
    return folder / "data.yaml"


def _read_data(path: Path) -> object:
    """As training does: the whole folder that the file is in."""
    root = next(p for p in path.parents if (p / "images").is_dir())
    kind = (
        "multilabel"
        if path.suffix in (".npy", ".tif") or root.name == "ultralytics"
        else "multiclass"
    )
    folder = read_folder(root, DataConfig(root=str(root)), kind)
    return [
        (decode_image(sample.image), decode_mask(sample, folder.classes))
        for sample in folder.samples
    ]


KINDS = (
    Kind("jpeg", _image("photo.jpg"), _read_image),
    Kind("png", _image("photo.png"), _read_image),
    Kind("png-palette", _image("photo.png", "P"), _read_image),
    Kind("tiff", _image("photo.tif"), _read_image),
    Kind("tiff-lzw", _image("photo.tif", compression="tiff_lzw"), _read_image),
    Kind("webp", _image("photo.webp"), _read_image),
    Kind("bmp", _image("photo.bmp"), _read_image),
    Kind("mask", _mask("mask.png", palette=False), _read_mask),
    Kind("mask-palette", _mask("mask.png", palette=True), _read_mask),
    Kind("png-16", _png_16, _read_image),
    Kind("tiff-16", _tiff_16, _read_image),
    Kind("colours", _coloured, _read_data, named="colours"),
    Kind("stack-tiff", _stack(".tif"), _read_data, named="stack-tiff"),
    Kind("stack-npy", _stack(".npy"), _read_data, named="stack-npy"),
    Kind("labelme", _labelme, _read_data, named="labelme"),
    Kind("coco", _coco, _read_data, named="coco"),
    Kind("ultralytics", _ultralytics, _read_data, named="ultralytics"),
    Kind("weights", _weights, lambda path: load_weights(path, CPU)),
    Kind("tf-v1", _golden("tf_v1_fcn.ckpt"), _convert_head),
    Kind(
        "tf-v2",
        _golden("tf_v2_fcn.index", "tf_v2_fcn.data-00000-of-00001"),
        _convert_head,
        named="tf_v2_fcn",
    ),
    Kind("caffemodel", _golden("caffe_narrow.caffemodel"), _convert_head),
    Kind("pth", _golden("torchvision_resnet.pth"), _convert),
    Kind("foreign-st", _foreign_safetensors, _convert),
    Kind("onnx", _onnx, open_onnx),
    Kind("state", _state, _read_state),
    Kind("plan", _plan, read_plan),
    Kind("run-toml", _run_toml, load_run_config),
    Kind("classes-toml", _classes_toml, read_classes),
    Kind("run-folder", _run_folder, _read_run_folder, named="run-folder"),
)
