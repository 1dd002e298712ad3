"""Pascal VOC as others fill it: lists of two paths, masks of SBD, labelmap.txt of CVAT."""

import numpy as np
import pytest
from PIL import Image

from anysize.config import DataConfig
from anysize.data.masks import decode_mask
from anysize.data.samples import read_folder
from anysize.errors import DataError

AUTO = DataConfig(root="")
IDS = np.arange(48).reshape(6, 8) % 3
GREY = IDS.astype(np.uint8)


def folder(root, masks=("SegmentationClass",), pixels=GREY):
    for i in range(4):
        (root / "JPEGImages").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 6), (i, i, i)).save(root / f"JPEGImages/{i}.jpg")
        for name in masks:
            (root / name).mkdir(exist_ok=True)
            Image.fromarray(pixels).save(root / f"{name}/{i}.png")
    (root / "ImageSets/Segmentation").mkdir(parents=True, exist_ok=True)
    return root


def lists(root, line, train="train"):
    for name, stems in ((train, "102"), ("val", "3")):
        text = "".join(line.format(s=s) + "\n" for s in stems)
        (root / f"ImageSets/Segmentation/{name}.txt").write_text(text)


@pytest.mark.parametrize("masks", ["SegmentationClass", "SegmentationClassAug"])
@pytest.mark.parametrize(
    "line",
    [
        "{s}",
        "{s}.jpg",
        "/JPEGImages/{s}.jpg /MASKS/{s}.png",
        "VOC/JPEGImages/{s}.jpg VOC/MASKS/{s}.png",
    ],
)
def test_lists_of_stems_and_of_paths(tmp_path, masks, line):
    lists(folder(tmp_path, [masks]), line.replace("MASKS", masks))
    found = read_folder(tmp_path, AUTO, "multiclass")
    assert found.listed == (["1", "0", "2"], ["3"])
    assert found.samples[0].masks == (tmp_path / masks / "0.png",)
    np.testing.assert_array_equal(decode_mask(found.samples[0], found.classes), IDS)


def test_two_folders_of_masks_are_decided_by_the_lists_or_asked_about(tmp_path):
    root = folder(tmp_path, ["SegmentationClass", "SegmentationClassAug"])
    lists(root, "{s}")
    with pytest.raises(DataError, match="SegmentationClass and in SegmentationClassAug. Set"):
        read_folder(root, AUTO, "multiclass")
    told = read_folder(root, DataConfig(root="", labels="SegmentationClassAug"), "multiclass")
    assert told.samples[0].masks[0].parent.name == "SegmentationClassAug"
    lists(root, "/JPEGImages/{s}.jpg /SegmentationClassAug/{s}.png")
    told = read_folder(root, AUTO, "multiclass")
    assert told.samples[0].masks[0].parent.name == "SegmentationClassAug"
    (root / "ImageSets/Segmentation/val.txt").write_text("/a/3.jpg /SegmentationClass/3.png\n")
    with pytest.raises(DataError, match="in several folders: SegmentationClass, Seg"):
        read_folder(root, AUTO, "multiclass")


def test_the_list_that_belongs_to_the_added_masks(tmp_path):
    root = folder(tmp_path, ["SegmentationClassAug"])
    lists(root, "{s}", train="trainaug")
    (root / "ImageSets/Segmentation/train.txt").write_text("1\n")
    assert read_folder(root, AUTO, "multiclass").listed == (["1", "0", "2"], ["3"])


LABELMAP = """# label:color_rgb:parts:actions
background:0,0,0::
road:128,64,128::
car: two doors::wheel,door:drive
"""


def test_cvats_labelmap_names_classes_and_colours(tmp_path):
    colours = np.array([[0, 0, 0], [128, 64, 128], [0, 128, 0]], np.uint8)
    root = folder(tmp_path, pixels=colours[IDS])
    (root / "labelmap.txt").write_text("\ufeff" + LABELMAP, encoding="utf-8")
    found = read_folder(root, AUTO, "multiclass")
    assert found.classes.names == ("background", "road", "car: two doors")
    assert found.classes.colours[1] == (128, 64, 128)
    assert found.classes.colours[2] == (0, 128, 0)  # Pascal VOC's third, as the line has none
    assert "CVAT's labelmap.txt" in found.description
    for sample in found.samples:
        np.testing.assert_array_equal(decode_mask(sample, found.classes), IDS)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("road", "'road' of .*labelmap.txt must be name:red,green,blue"),
        ("road:1,2::", "colour '1,2' in the line 'road:1,2::'"),
        ("road:1,2,256::", "from 0 to 255"),
        ("road:1,2,²::", "from 0 to 255"),
        ("a:1,2,3::\nb:1,2,3::", "the same colour"),
        ("a:1,2,3::\na:1,2,4::", "names classes twice: a"),
        ("# nothing", "names 0 classes"),
    ],
)
def test_labelmaps_that_are_invalid(tmp_path, line, says):
    root = folder(tmp_path)
    (root / "labelmap.txt").write_text(line + "\n")
    with pytest.raises(DataError, match=says):
        read_folder(root, AUTO, "multiclass")
