"""Folders of every layout and encoding: what is found, how it is told, and when it is asked."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from anysize.config import DataConfig
from anysize.data.pairing import find_patterns
from anysize.data.samples import (
    decode_image,
    decode_mask,
    images_of,
    read_folder,
    scan_folder,
    split_samples,
)
from anysize.errors import DataError
from anysize.geometry import Size

NAMES = ("sea", "land", "lake")
COLOURS = ((0, 0, 255), (0, 200, 0), (0, 255, 255))
RNG = np.random.default_rng(0)


def write(path: Path, picture: Image.Image, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, **options)
    return path


def image(path: Path, size=(6, 8)) -> Path:
    return write(path, Image.fromarray(RNG.integers(0, 255, (*size, 3), dtype=np.uint8)))


def ids(path: Path, labels) -> Path:
    return write(path, Image.fromarray(np.asarray(labels, np.uint8)))


def classes_toml(root: Path, names=NAMES, colours=COLOURS, more="") -> None:
    root.mkdir(parents=True, exist_ok=True)
    tables = [
        f'[[class]]\nname = "{n}"\ncolour = {list(c)}\n'
        for n, c in zip(names, colours, strict=False)
    ]
    (root / "classes.toml").write_text(more + "\n" + "\n".join(tables))


def config(**settings) -> DataConfig:
    return DataConfig(root="", **settings)


def labels_of(folder):
    return {sample.stem: decode_mask(sample, folder.classes) for sample in folder.samples}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three images in `images/` and `classes.toml`; no labels yet."""
    for i in range(3):
        image(tmp_path / "data" / "images" / f"s{i}.png")
    classes_toml(tmp_path / "data")
    return tmp_path / "data"


def grids(count=3, values=3):
    return [RNG.integers(0, values, (6, 8)).astype(np.uint8) for _ in range(count)]


# Our own folder


def test_ids_in_grey_pngs(root):
    labels = grids()
    for i, grid in enumerate(labels):
        ids(root / "masks" / f"s{i}.png", grid)
    folder = read_folder(root, config(), "multiclass")
    assert folder.masks == "index"
    assert (folder.layout, folder.listed, folder.notes) == ("anysize", None, ())
    for i, grid in enumerate(labels):
        np.testing.assert_array_equal(labels_of(folder)[f"s{i}"], grid)
    assert folder.description == (
        f"{root}: 3 images (images/); masks: ids (grey, detected from the headers of 3 files); "
        "3 classes (classes.toml). Set data.masks to say otherwise."
    )
    told = read_folder(root, config(masks="index"), "multiclass")
    assert "(as data.masks says)" in told.description
    assert told.samples == folder.samples


def test_a_few_files_spread_over_all_are_looked_at(root):
    for i in range(40):
        image(root / "images" / f"t{i:02}.png")
        ids(root / "masks" / f"t{i:02}.png", grids(1)[0])
    for i in range(3):
        ids(root / "masks" / f"s{i}.png", grids(1)[0])
    assert "detected from the headers of" in read_folder(root, config(), "multiclass").description


def test_palette_indices_are_kept(root):
    labels = grids()
    for i, grid in enumerate(labels):
        picture = Image.fromarray(grid)
        picture.putpalette([v for k in range(256) for v in (k, 255 - k, 3)])
        write(root / "masks" / f"s{i}.png", picture)
    folder = read_folder(root, config(), "multiclass")
    assert "palette, detected from the headers of 3 files" in folder.description
    np.testing.assert_array_equal(labels_of(folder)["s1"], labels[1])


def test_colours_of_classes_toml(root):
    labels = grids()
    for i, grid in enumerate(labels):
        write(root / "masks" / f"s{i}.png", Image.fromarray(np.array(COLOURS, np.uint8)[grid]))
    folder = read_folder(root, config(), "multiclass")
    assert folder.masks == "colours"
    assert "RGB, detected from the headers of 3 files" in folder.description
    np.testing.assert_array_equal(labels_of(folder)["s2"], labels[2])
    with pytest.raises(DataError, match=r"loss\.kind is sigmoid"):
        read_folder(root, config(masks="colours"), "multilabel")


def test_the_file_that_is_stored_otherwise_than_most_is_named(root):
    labels = grids(4)
    image(root / "images" / "s3.png")
    for i, grid in enumerate(labels):
        ids(root / "masks" / f"s{i}.png", grid)
    write(root / "masks" / "s2.png", Image.fromarray(np.array(COLOURS, np.uint8)[labels[2]]))
    for settings in (config(), config(masks="index")):
        folder = scan_folder(root, settings, "multiclass")
        assert folder.masks == "index"
        if settings.masks == "auto":
            assert [(f.kind, f.path.name) for f in folder.faults] == [("encoding", "s2.png")]
        with pytest.raises(DataError, match=r"s2\.png is stored as RGB.*channels differ"):
            decode_mask(folder.samples[2], folder.classes)
    for i in (0, 1):
        picture = Image.fromarray(np.array(COLOURS, np.uint8)[labels[i]])
        write(root / "masks" / f"s{i}.png", picture)
    folder = scan_folder(root, config(), "multiclass")
    assert folder.masks == "colours"
    assert [(f.kind, f.path.name) for f in folder.faults] == [("encoding", "s3.png")]
    with pytest.raises(DataError, match=r"s3\.png holds ids \(grey\) among masks of colours"):
        read_folder(root, config(), "multiclass")
    ids(root / "masks" / "s0.png", labels[0])
    with pytest.raises(DataError, match='set data.masks to "index" or to "colours"'):
        read_folder(root, config(), "multiclass")


def test_rgb_with_equal_channels_is_ids(root):
    labels = grids()
    for i, grid in enumerate(labels):
        write(root / "masks" / f"s{i}.png", Image.fromarray(np.stack([grid] * 3, -1)))
    for settings in (config(), config(masks="index")):
        folder = read_folder(root, settings, "multiclass")
        assert folder.masks == "index"
        for i, grid in enumerate(labels):
            np.testing.assert_array_equal(labels_of(folder)[f"s{i}"], grid)
    # Shades that are the classes' colours, and no ids.
    classes_toml(root, colours=((0, 0, 0), (127, 127, 127), (255, 255, 255)))
    for i, grid in enumerate(labels):
        shades = np.array([0, 127, 255], np.uint8)[grid]
        write(root / "masks" / f"s{i}.png", Image.fromarray(np.stack([shades] * 3, -1)))
    folder = read_folder(root, config(), "multiclass")
    assert folder.masks == "colours"
    np.testing.assert_array_equal(labels_of(folder)["s1"], labels[1])


def test_black_and_white_in_rgb_are_colours_where_they_are_those_of_classes(root):
    """As ids they would be class 0 and pixels to ignore, so that nothing else was ever labelled."""
    classes_toml(root, colours=((255, 255, 255), (0, 0, 0), (9, 0, 0)))
    labels = grids(3, 2)
    for i, grid in enumerate(labels):
        shades = np.array([255, 0], np.uint8)[grid]
        write(root / "masks" / f"s{i}.png", Image.fromarray(np.stack([shades] * 3, -1)))
    folder = read_folder(root, config(), "multiclass")
    assert folder.masks == "colours"
    np.testing.assert_array_equal(labels_of(folder)["s1"], labels[1])


@pytest.mark.parametrize("suffix", ["png", "tif", "bmp"])
def test_palettes_in_another_order_are_seen_in_every_container(root, suffix):
    labels = grids()
    for i, grid in enumerate(labels):
        order = [1, 2, 0] if i == 1 else [0, 1, 2]
        picture = Image.fromarray(np.argsort(order).astype(np.uint8)[grid])
        picture.putpalette([v for k in order for v in COLOURS[k]])
        write(root / "masks" / f"s{i}.{suffix}", picture)
    folder = read_folder(root, config(), "multiclass")
    assert f"s1.{suffix}" in folder.notes[0]
    for i, grid in enumerate(labels):
        np.testing.assert_array_equal(labels_of(folder)[f"s{i}"], grid)


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize("orientation", range(2, 9))
def test_an_orientation_that_was_left_behind_may_be_ignored(root, suffix, orientation):
    labels = grids()
    exif = Image.Exif()
    exif[0x0112] = orientation
    for i, grid in enumerate(labels):
        write(root / "masks" / f"s{i}.{suffix}", Image.fromarray(grid), exif=exif)
    with pytest.raises(DataError, match=r"s0.*data\.mask_orientation"):
        read_folder(root, config(), "multiclass")
    folder = read_folder(root, config(mask_orientation="ignore"), "multiclass")
    for i, grid in enumerate(labels):
        np.testing.assert_array_equal(labels_of(folder)[f"s{i}"], grid)


def test_palettes_in_another_order_are_read_by_their_colours_or_named(root):
    """Only one of twenty differs, at a place where a few files spread over all would not look."""
    labels = grids(20)
    for i, grid in enumerate(labels):
        image(root / "images" / f"t{i:02}.png")
        order = [1, 2, 0] if i == 3 else [0, 1, 2]
        picture = Image.fromarray(np.argsort(order).astype(np.uint8)[grid])
        picture.putpalette([v for k in order for v in COLOURS[k]])
        write(root / "masks" / f"t{i:02}.png", picture)
    for i in range(3):
        (root / "images" / f"s{i}.png").unlink()
    folder = read_folder(root, config(), "multiclass")
    assert folder.masks == "colours"
    assert "t03.png" in folder.notes[0]
    assert "t04.png" not in folder.notes[0]
    for i, grid in enumerate(labels):
        np.testing.assert_array_equal(labels_of(folder)[f"t{i:02}"], grid)
    # Without the colours in classes.toml nothing tells which of the orders is that of the ids.
    classes_toml(root, colours=((1, 1, 1), (2, 2, 2), (3, 3, 3)))
    folder = scan_folder(root, config(), "multiclass")
    assert [f.path.name for f in folder.faults] == ["t03.png"]
    assert "the palette of" in folder.faults[0].message
    assert scan_folder(root, config(masks="index"), "multiclass").faults == ()


def test_a_grey_mask_of_ids_among_palettes_of_colours_is_named(root):
    labels = grids()
    palette = np.zeros((16, 3), np.uint8)
    palette[[7, 9, 12]] = COLOURS
    for i, grid in enumerate(labels):
        picture = Image.fromarray(np.array([7, 9, 12], np.uint8)[grid])
        picture.putpalette(palette.ravel().tolist())
        write(root / "masks" / f"s{i}.png", picture)
    ids(root / "masks" / "s1.png", labels[1])
    folder = scan_folder(root, config(), "multiclass")
    assert folder.masks == "colours"
    for i in (0, 2):
        np.testing.assert_array_equal(decode_mask(folder.samples[i], folder.classes), labels[i])
    with pytest.raises(DataError, match=r"s1\.png holds colours of no class"):
        decode_mask(folder.samples[1], folder.classes)


def test_a_folder_called_like_a_class_and_like_a_part_of_the_images_is_such_a_part(root):
    classes_toml(root, ("sea", "train", "val"))
    for split in ("train", "val"):
        image(root / "images" / split / "a.png")
        ids(root / "masks" / split / "a.png", grids(1)[0])
    for i in range(3):
        (root / "images" / f"s{i}.png").unlink()
    assert len(read_folder(root, config(), "multiclass").samples) == 2


def test_0_and_255_where_three_classes_are_named(root):
    for i in range(3):
        ids(root / "masks" / f"s{i}.png", grids(1, 2)[0] * 255)
    with pytest.raises(DataError, match="nothing but 0 and 255.*3 classes are named"):
        read_folder(root, config(), "multiclass")
    # One mask of a class among many, which a few files spread over all would miss.
    for i in range(20):
        image(root / "images" / f"t{i:02}.png")
        ids(root / "masks" / f"t{i:02}.png", grids(1, 2)[0] * 255)
    ids(root / "masks" / "t04.png", grids(1, 3)[0])
    assert read_folder(root, config(), "multiclass").masks == "index"


@pytest.mark.parametrize(
    ("suffix", "dtype"),
    [
        ("tif", np.uint8),
        ("bmp", np.uint8),
        ("png", np.uint16),
        ("tif", np.uint16),
        ("tif", np.int32),
    ],
)
def test_ids_in_other_containers(root, suffix, dtype):
    labels = grids()
    for i, grid in enumerate(labels):
        write(root / "masks" / f"s{i}.{suffix}", Image.fromarray(grid.astype(dtype)))
    folder = read_folder(root, config(), "multiclass")
    assert folder.masks == "index"
    for i, grid in enumerate(labels):
        np.testing.assert_array_equal(labels_of(folder)[f"s{i}"], grid)
    if dtype != np.uint8:
        big = labels[0].astype(dtype)
        big[0, 0] = 300
        write(root / "masks" / f"s0.{suffix}", Image.fromarray(big))
        with pytest.raises(DataError, match=r"not labels: 300 \(1 pixel\)"):
            labels_of(folder)


def test_values_that_mean_other_classes(root):
    table = {0: "ignore", 7: "sea", 9: "land", 300: "sea"}
    raw = RNG.choice(list(table), (6, 8)).astype(np.uint16)
    expected = np.select([raw == 0, raw == 9], [255, 1], 0)
    for i in range(3):
        write(root / "masks" / f"s{i}.png", Image.fromarray(raw))
    names = {str(value): name for value, name in table.items()}
    folder = read_folder(root, config(ids=names), "multiclass")
    np.testing.assert_array_equal(labels_of(folder)["s1"], expected)
    with pytest.raises(DataError, match=r"set data\.ids"):
        labels_of(scan_folder(root, config(), "multiclass"))
    raw[0, 0] = 8
    write(root / "masks" / "s1.png", Image.fromarray(raw))
    with pytest.raises(DataError, match=r"8 \(1 pixel\)\. Labels are 0, 7, 9 and 300"):
        labels_of(read_folder(root, config(ids=names), "multiclass"))
    for wrong, says in (
        ({"x": "sea"}, "whole number"),
        ({"1": "seas"}, "'seas', which is no class"),
    ):
        with pytest.raises(DataError, match=says):
            read_folder(root, config(ids=wrong), "multiclass")


def test_zero_may_be_ignored(root):
    classes_toml(root, more="ignore_index = 0")
    labels = grids(3, 4)
    for i, grid in enumerate(labels):
        ids(root / "masks" / f"s{i}.png", grid)
    folder = read_folder(root, config(), "multiclass")
    for i, grid in enumerate(labels):
        np.testing.assert_array_equal(labels_of(folder)[f"s{i}"], np.array([255, 0, 1, 2])[grid])
    with pytest.raises(DataError, match="`ignore_index` is 0"):
        read_folder(root, config(masks="folders"), "multilabel") if folder_a_class(
            root, 1
        ) else None


# Names


def test_masks_named_with_an_ending(root):
    labels = grids()
    for i, grid in enumerate(labels):
        ids(root / "masks" / f"s{i}_mask.png", grid)
    with pytest.raises(
        DataError, match=r'"_mask" after the name. Set data.mask_pattern = "{stem}_m'
    ):
        read_folder(root, config(), "multiclass")
    write(root / "masks" / "s0_colour.png", Image.new("RGB", (8, 6)))
    folder = read_folder(root, config(mask_pattern="{stem}_mask"), "multiclass")
    np.testing.assert_array_equal(labels_of(folder)["s1"], labels[1])
    assert "1 file in" in folder.notes[0]
    assert "not named {stem}_mask" in folder.notes[0]


@pytest.mark.parametrize(
    ("images", "masks", "patterns"),
    [
        (["1", "10"], ["1_m", "10_m"], ["{stem}_m"]),
        (["1", "10"], ["10", "100"], ["{stem}0"]),
        (["a", "b"], ["m-a-x", "m-b-x"], ["m-{stem}-x"]),
        (["t/a", "v/b"], ["t/a_m", "v/b_m"], ["{stem}_m"]),
        (["a", "b"], ["a_ids", "b_ids", "a_rgb", "b_rgb"], ["{stem}_ids", "{stem}_rgb"]),
        (["a", "b"], ["c", "d"], []),
        (["a", "b"], ["a_1", "b_2"], []),
    ],
)
def test_patterns_that_pair_everything_are_found(images, masks, patterns):
    assert find_patterns(images, masks) == patterns


def test_nested_folders(root):
    labels = grids()
    for split in ("train", "val"):
        for i, grid in enumerate(labels):
            image(root / "images" / split / f"s{i}.png")
            ids(root / "masks" / split / f"s{i}.png", grid)
    for i in range(3):
        (root / "images" / f"s{i}.png").unlink()
    folder = read_folder(root, config(), "multiclass")
    assert [s.stem for s in folder.samples] == [
        f"{p}/s{i}" for p in ("train", "val") for i in range(3)
    ]
    assert folder.listed == ([f"train/s{i}" for i in range(3)], [f"val/s{i}" for i in range(3)])
    np.testing.assert_array_equal(labels_of(folder)["val/s1"], labels[1])
    assert len(images_of(root, config())) == 6


def test_names_that_are_spelt_with_combining_marks_pair(root):
    composed, packed = "Mu\u0308ller", "M\u00fcller"
    image(root / "images" / f"{composed}.png")
    for name in ("s0", "s1", "s2", packed):
        ids(root / "masks" / f"{name}.png", grids(1)[0])
    (root / "train.txt").write_text(f"{composed}\ns0\n")
    (root / "val.txt").write_text("s1\n")
    folder = read_folder(root, config(), "multiclass")
    assert packed in {s.stem for s in folder.samples}
    lists = config(train="train.txt", val="val.txt")
    train, _ = split_samples(folder.samples, lists, root, seed=0)
    assert [s.stem for s in train] == [packed, "s0"]


def test_formats_that_are_not_read_are_named(root):
    for i in range(3):
        ids(root / "masks" / f"s{i}.png", grids(1)[0])
    (root / "images" / "a.heic").write_bytes(b"\0\0\0\x18ftypheic")
    for name in ("._s0.png", ".DS_Store", "Thumbs.db", "desktop.ini"):
        (root / "images" / name).write_bytes(b"x")
        (root / "masks" / name).write_bytes(b"x")
    folder = read_folder(root, config(), "multiclass")
    assert [note for note in folder.notes if "a.heic" in note and "Convert" in note]
    assert len(folder.notes) == 1
    (root / "masks" / "s1.png").unlink()
    Image.fromarray(grids(1)[0] * 90).save(root / "masks" / "s1.jpg")
    with pytest.raises(DataError, match=r"s1\.jpg is JPEG\. JPEG changes values"):
        read_folder(root, config(), "multiclass")
    (root / "masks" / "s1.jpg").rename(root / "masks" / "s1.png")
    with pytest.raises(DataError, match=r"s1\.png is JPEG, which is no format for masks"):
        read_folder(root, config(), "multiclass")


def test_folders_of_classes_ask_for_sigmoid(root):
    folder_a_class(root, 1)
    with pytest.raises(DataError, match=r'Set loss.kind to "sigmoid"'):
        read_folder(root, config(), "multiclass")


def palette_masks(root, order):
    for i in range(3):
        picture = Image.fromarray(np.array([[0, 1, 2]] * 6, np.uint8).repeat(3, 1)[:, :8])
        picture.putpalette([v for k in order for v in COLOURS[k]])
        write(root / "masks" / f"s{i}.png", picture)


def test_a_palette_that_says_something_else_than_its_indices_is_asked_about(root):
    palette_masks(root, (0, 1, 2))
    assert read_folder(root, config(), "multiclass").masks == "index"
    palette_masks(root, (1, 0, 2))
    with pytest.raises(DataError, match='"index" or to "colours"'):
        read_folder(root, config(), "multiclass")
    folder = read_folder(root, config(masks="colours"), "multiclass")
    assert labels_of(folder)["s0"][0, :4].tolist() == [1, 1, 1, 0]


def test_a_palette_whose_indices_are_no_ids_is_one_of_colours(root):
    for i in range(3):
        picture = Image.fromarray(np.array([[7, 9]] * 6, np.uint8).repeat(4, 1))
        palette = np.zeros((16, 3), np.uint8)
        palette[7], palette[9] = COLOURS[2], COLOURS[1]
        picture.putpalette(palette.ravel().tolist())
        write(root / "masks" / f"s{i}.png", picture)
    folder = read_folder(root, config(), "multiclass")
    assert folder.masks == "colours"
    assert labels_of(folder)["s0"][0].tolist() == [2] * 4 + [1] * 4


def test_0_and_255_are_asked_about(root):
    classes_toml(root, NAMES[:2])
    for i in range(3):
        ids(root / "masks" / f"s{i}.png", grids(1, 2)[0] * 255)
    with pytest.raises(DataError, match='set data.masks to "binary" or to "index"') as caught:
        read_folder(root, config(), "multiclass")
    assert "255 is the class, or 255 is ignored" in str(caught.value)
    folder = read_folder(root, config(masks="binary"), "multiclass")
    assert set(np.unique(labels_of(folder)["s0"])) == {0, 1}
    classes_toml(root, NAMES[:2], more="ignore_index = 200")
    assert read_folder(root, config(), "multiclass").masks == "binary"
    classes_toml(root)
    with pytest.raises(DataError, match="has 3"):
        read_folder(root, config(masks="binary"), "multiclass")


def folder_a_class(root, white):
    labels = [(RNG.random((3, 6, 8)) < 0.5).astype(np.uint8) for _ in range(3)]
    for i, planes in enumerate(labels):
        for name, plane in zip(NAMES, planes, strict=True):
            ids(root / "masks" / name / f"s{i}.png", plane * white)
    return labels


def test_a_folder_a_class(root):
    labels = folder_a_class(root, 1)
    folder = read_folder(root, config(), "multilabel")
    assert folder.masks == "folders"
    np.testing.assert_array_equal(labels_of(folder)["s1"], labels[1])
    with pytest.raises(DataError, match=r'Set loss.kind to "sigmoid"'):
        read_folder(root, config(masks="folders"), "multiclass")


def test_a_folder_a_class_of_0_and_255(root):
    labels = folder_a_class(root, 255)
    with pytest.raises(DataError, match='"binary" or to "folders"'):
        read_folder(root, config(), "multilabel")
    folder = read_folder(root, config(masks="binary"), "multilabel")
    np.testing.assert_array_equal(labels_of(folder)["s1"], labels[1])


@pytest.mark.parametrize("masks", ["auto", "binary"])
def test_one_class_needs_no_folder_of_its_own(root, masks):
    classes_toml(root, NAMES[:1])
    labels = grids(3, 2)
    for i, grid in enumerate(labels):
        ids(root / "masks" / f"s{i}.png", grid * (255 if masks == "binary" else 1))
    folder = read_folder(root, config(masks=masks), "multilabel")
    np.testing.assert_array_equal(labels_of(folder)["s1"], labels[1][None])
    with pytest.raises(DataError, match="names 1 class"):
        read_folder(root, config(masks=masks), "multiclass")


@pytest.mark.parametrize("suffix", ["tif", "npy"])
def test_a_stack_an_image(root, suffix):
    labels = [(RNG.random((3, 6, 8)) < 0.5).astype(np.uint8) for _ in range(3)]
    (root / "masks").mkdir()
    for i, planes in enumerate(labels):
        path = root / "masks" / f"s{i}.{suffix}"
        if suffix == "npy":
            np.save(path, planes)
        else:
            pages = [Image.fromarray(p) for p in planes]
            pages[0].save(path, save_all=True, append_images=pages[1:])
    for settings in (config(), config(masks="stack")):
        folder = read_folder(root, settings, "multilabel")
        assert folder.masks == "stack"
        np.testing.assert_array_equal(labels_of(folder)["s2"], labels[2])
    with pytest.raises(DataError, match=r'Set loss.kind to "sigmoid"'):
        read_folder(root, config(), "multiclass")
    if suffix == "tif":
        write(root / "masks" / "s0.tif", Image.new("L", (9, 6)))
        with pytest.raises(DataError, match=r"s0\.tif is 6x9"):
            read_folder(root, config(), "multilabel")


def test_labels_of_two_kinds_are_asked_about(root):
    for i in range(3):
        ids(root / "masks" / f"s{i}.png", grids(1)[0])
        np.save(root / "masks" / f"s{i}.npy", np.zeros((3, 6, 8), bool))
    with pytest.raises(DataError, match='set data.masks to "index" or to "stack"'):
        read_folder(root, config(), "multiclass")
    assert len(read_folder(root, config(masks="index"), "multiclass").samples) == 3


def test_other_folders_for_images_and_labels(root):
    (root / "images").rename(root / "photos")
    for i in range(3):
        ids(root / "truth" / f"s{i}.png", grids(1)[0])
    folder = read_folder(root, config(images="photos", labels="truth"), "multiclass")
    assert len(folder.samples) == 3
    assert "(photos/)" in folder.description


def test_all_faults_of_all_stages_are_collected(root):
    for i in range(3):
        ids(root / "masks" / f"s{i}.png", grids(1)[0])
    for name in ("t0", "t1"):
        image(root / "images" / f"{name}.png")
        ids(root / "masks" / f"{name}.png", grids(1)[0])
    (root / "masks" / "s0.png").unlink()
    (root / "images" / "s1.png").write_bytes(b"no image")
    ids(root / "masks" / "s2.png", np.zeros((5, 8)))
    folder = scan_folder(root, config(), "multiclass")
    assert sorted((f.kind, f.path.name) for f in folder.faults) == [
        ("size", "s2.png"),
        ("unpaired", "s0.png"),
        ("unreadable", "s1.png"),
    ]
    assert [s.stem for s in folder.samples] == ["t0", "t1"]
    assert [s.stem for s in folder.refused] == ["s2"]
    with pytest.raises(DataError, match="does not pair up; 1 fault"):
        read_folder(root, config(), "multiclass")


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="No such data folder"):
        read_folder(tmp_path / "none", config(), "multiclass")


# LabelMe


def labelme_file(path: Path, label: str, left: int, **more) -> None:
    corners = [[left, 1], [left + 2, 1], [left + 2, 4], [left, 4]]
    entry = {"label": label, "points": corners, "shape_type": "polygon"}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"shapes": [entry], "imageHeight": 6, "imageWidth": 8, **more}))


@pytest.mark.parametrize("place", ["images", "masks", "."])
def test_labelme_files_beside_the_images_or_apart(root, place):
    if place == ".":
        for path in list((root / "images").iterdir()):
            path.rename(root / path.name)
        (root / "images").rmdir()
    for i in range(3):
        labelme_file(root / place / f"s{i}.json", "lake", i)
    folder = read_folder(root, config(), "multiclass")
    assert folder.masks == "labelme"
    mask = labels_of(folder)["s1"]
    assert (mask[1:5, 1:4] == 2).all()
    assert (mask == 2).sum() == 12
    assert (mask == 255).sum() == 36  # no class is called background
    assert folder.notes == ("Pixels in no shape are ignored, since no class is called background.",)
    sigmoid = labels_of(read_folder(root, config(), "multilabel"))["s1"]
    assert (sigmoid.shape, sigmoid[2].sum(), sigmoid.sum()) == ((3, 6, 8), 12, 12)


@pytest.mark.parametrize("where", ["data", "."])
def test_labelmes_own_list_of_classes(root, where):
    (root / "classes.toml").unlink()
    for i in range(3):
        labelme_file(root / "images" / f"s{i}.json", ("cat", "dog", "__ignore__")[i], 1)
    with pytest.raises(DataError) as caught:
        read_folder(root, config(), "multiclass")
    assert "cat (1 shape), dog (1 shape)" in str(caught.value)
    assert str(caught.value).endswith("\n_background_\ncat\ndog")
    text = "__ignore__\n" + str(caught.value).split("ids:\n")[1]
    (root.parent / where / "labels.txt").write_text(text)
    folder = read_folder(root, config(), "multiclass")
    assert folder.classes.names == ("_background_", "cat", "dog")
    assert [labels_of(folder)[f"s{i}"][2, 2] for i in range(3)] == [1, 2, 255]
    assert labels_of(folder)["s0"][0, 0] == 0


def test_an_image_without_its_labelme_file(root):
    for i in range(2):
        labelme_file(root / "images" / f"s{i}.json", "lake", i)
    with pytest.raises(DataError, match=r"s2\.png has no mask .*s2\.json"):
        read_folder(root, config(), "multiclass")


# COCO

BOX = [1, 1, 4, 1, 4, 5, 1, 5]


def coco_file(path: Path, names, category=5, **more) -> Path:
    images = [
        {"id": 10 + i, "file_name": name, "height": 6, "width": 8} for i, name in enumerate(names)
    ]
    annotations = [
        {"id": i, "image_id": 10 + i, "category_id": category, "segmentation": [BOX], "iscrowd": 0}
        for i in range(len(names))
    ]
    table = {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": 5, "name": "lake"}],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table | more))
    return path


def test_a_coco_file(root):
    pytest.importorskip("pycocotools")
    (root / "classes.toml").unlink()
    coco_file(root / "annotations" / "all.json", [f"s{i}.png" for i in range(3)])
    folder = read_folder(root, config(), "multiclass")
    assert (folder.masks, folder.classes.names) == ("coco", ("background", "lake"))
    mask = labels_of(folder)["s1"]
    assert (mask[1:5, 1:4] == 1).all()
    assert mask.sum() == 12
    assert "a COCO file (detected by its content); 2 classes (all.json)" in folder.description
    sigmoid = read_folder(root, config(labels="annotations/all.json"), "multilabel")
    assert labels_of(sigmoid)["s1"].shape == (1, 6, 8)
    assert labels_of(sigmoid)["s1"].sum() == 12


def test_two_coco_files_are_training_and_evaluation(root):
    (root / "images").rename(root / "train2017")
    image(root / "val2017" / "v.png")
    coco_file(root / "annotations" / "instances_train2017.json", ["s0.png", "s1.png"])
    coco_file(root / "annotations" / "instances_val2017.json", ["v.png"])
    coco_file(root / "annotations" / "captions_val2017.json", ["v.png"])
    for settings in (
        config(),
        config(
            masks="coco",
            train="annotations/instances_train2017.json",
            val="annotations/instances_val2017.json",
        ),
    ):
        folder = read_folder(root, settings, "multiclass")
        assert folder.listed == (["s0", "s1"], ["v"])
        train, val = split_samples(folder.samples, settings, root, seed=0, listed=folder.listed)
        assert ([s.stem for s in train], [s.stem for s in val]) == (["s0", "s1"], ["v"])
        assert val[0].encoding.file == root / "annotations" / "instances_val2017.json"


def test_coco_files_that_are_not_one_are_asked_about(root):
    for name in ("a", "b", "c"):
        coco_file(root / f"{name}.json", ["s0.png"])
    with pytest.raises(DataError, match=r"it holds a\.json, b\.json, c\.json\. Set data\.labels"):
        read_folder(root, config(), "multiclass")
    assert len(read_folder(root, config(labels="b.json"), "multiclass").samples) == 1


def test_images_of_a_coco_file_that_do_not_hold(root):
    (root / "images" / "s1.png").unlink()
    image(root / "images" / "s2.png", (8, 6))
    coco_file(root / "all.json", [f"s{i}.png" for i in range(3)])
    folder = scan_folder(root, config(), "multiclass")
    assert [(f.kind, f.path.name) for f in folder.faults] == [
        ("unpaired", "s1.png"),
        ("size", "s2.png"),
    ]
    assert [s.stem for s in folder.samples] == ["s0"]


def test_annotations_of_no_image_are_counted(root):
    names = [f"s{i}.png" for i in range(3)]
    path = coco_file(root / "all.json", names)
    before = scan_folder(root, config(), "multiclass").notes
    stray = {"id": 9, "image_id": 99, "category_id": 5, "segmentation": [BOX]}
    table = json.loads(path.read_text())
    coco_file(path, names, annotations=[*table["annotations"], stray, stray])
    said = f"{path} has 2 annotations of images that it does not list; they are passed over."
    assert said not in before
    assert scan_folder(root, config(), "multiclass").notes == (said, *before)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"images": 3}, "`images` is not a list"),
        ({"images": [{"id": 1}]}, "`file_name` is missing"),
        ({"images": [{"id": 10, "file_name": "/etc/passwd"}]}, "there is no image /etc/passwd"),
        ({"images": [{"id": 10, "file_name": "../a.png"}]}, "there is no image .*/../a.png"),
        (
            {"images": [{"id": [], "file_name": "s0.png"}]},
            "is .., which is neither a number",
        ),
        ({"images": [{"id": 1, "file_name": "x" * 5000}]}, "'x+' is none"),
        ({"images": [{"id": 1, "file_name": "."}]}, "'.' is none"),
        ({"images": [{"id": 1, "file_name": "a\0.png"}]}, r"is none"),
        ({"annotations": [{"id": 1}]}, "`image_id` is missing"),
        ({"annotations": [{"image_id": []}]}, "`image_id` of an annotation is"),
        ({"categories": [{"id": None, "name": "b"}]}, "`id` of a category is None"),
        ({"images": []}, "lists no images"),
        ({"images": [{"id": 1, "file_name": "s0.png"}]}, "none of its 1 annotations is of an im"),
        (
            {"images": [{"id": 10, "file_name": "a", "width": "x", "height": 6}]},
            "whole number",
        ),
        ({"images": [{"id": 10, "file_name": "s0.png", "width": 0, "height": 6}]}, "its width 0"),
        (
            {"images": [{"id": 1, "file_name": f"s{i}.png"} for i in range(2)]},
            "several images have the id 1",
        ),
        (
            {"categories": [{"id": 5, "name": name} for name in ("lake", "sea")]},
            "several categories have the id 5",
        ),
    ],
)
def test_coco_files_that_do_not_hold(root, more, says):
    path = coco_file(root / "all.json", ["s0.png"], **more)
    with pytest.raises(DataError, match=says) as caught:
        read_folder(root, config(), "multiclass")
    assert str(path) in str(caught.value)


# Pascal VOC


@pytest.fixture
def voc(tmp_path: Path) -> Path:
    root = tmp_path / "VOC2012"
    for i in range(5):
        image(root / "JPEGImages" / f"2007_{i:06}.jpg")
    for i in range(4):
        grid = grids(1, 21)[0]
        grid[0, 0] = 255
        picture = Image.fromarray(grid)
        picture.putpalette([v for k in range(256) for v in (k, k, 9)])
        write(root / "SegmentationClass" / f"2007_{i:06}.png", picture)
    lists = root / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("2007_000003\n2007_000000\n")
    (lists / "val.txt").write_text("2007_000001\n")
    return root


def test_pascal_voc_as_it_is(voc):
    folder = read_folder(voc, config(), "multiclass")
    assert (folder.layout, folder.masks, len(folder.classes.names)) == ("voc", "index", 21)
    assert folder.notes == ("Passed over: 1 image without a mask.",)
    train, val = split_samples(folder.samples, config(), voc, seed=0, listed=folder.listed)
    assert [s.stem for s in train] == ["2007_000003", "2007_000000"]
    assert [s.stem for s in val] == ["2007_000001"]
    assert labels_of(folder)["2007_000000"][0, 0] == 255
    assert len(images_of(voc, config())) == 5
    assert "(Pascal VOC)" in folder.description


def test_pascal_voc_in_colours(voc):
    for path in (voc / "SegmentationClass").iterdir():
        colours = np.zeros((6, 8, 3), np.uint8)
        colours[0], colours[1] = (192, 128, 128), (224, 224, 192)
        Image.fromarray(colours).save(path)
    folder = read_folder(voc, config(), "multiclass")
    assert labels_of(folder)["2007_000000"][:3, 0].tolist() == [15, 255, 0]


def test_other_classes_in_pascal_vocs_folders(voc):
    (voc / "class_names.txt").write_text("\n".join(["_background_", *map(str, range(1, 21))]))
    assert read_folder(voc, config(), "multiclass").classes.names[1] == "1"
    classes_toml(voc)
    assert read_folder(voc, config(), "multiclass").classes.names == NAMES


def test_a_list_of_pascal_voc_that_names_too_much(voc):
    (voc / "ImageSets" / "Segmentation" / "val.txt").write_text("2007_000004\nnowhere\n")
    with pytest.raises(DataError, match=r"2 faults") as caught:
        read_folder(voc, config(), "multiclass")
    assert f"2007_000004 is in a list of {voc}/ImageSets/Segmentation" in str(caught.value)


def test_pascal_voc_without_lists_is_drawn(voc):
    (voc / "ImageSets" / "Segmentation" / "val.txt").unlink()
    folder = read_folder(voc, config(), "multiclass")
    assert folder.listed is None
    assert [len(p) for p in split_samples(folder.samples, config(), voc, seed=0)] == [3, 1]


# Cityscapes


@pytest.fixture
def cityscapes(tmp_path: Path) -> Path:
    root = tmp_path / "cityscapes"
    for split, city in (("train", "aachen"), ("train", "bonn"), ("val", "ulm"), ("test", "berlin")):
        stem = f"{city}_000000_000019"
        image(root / "leftImg8bit" / split / city / f"{stem}_leftImg8bit.png")
        folder = root / "gtFine" / split / city
        grid = np.zeros((6, 8), np.uint8)
        grid[0], grid[1], grid[2] = 7, 26, 33
        ids(folder / f"{stem}_gtFine_labelIds.png", grid)
        ids(folder / f"{stem}_gtFine_instanceIds.png", grid)
        write(folder / f"{stem}_gtFine_color.png", Image.new("RGBA", (8, 6)))
        (folder / f"{stem}_gtFine_polygons.json").write_text("{}")
    return root


def test_cityscapes_as_it_is(cityscapes):
    folder = read_folder(cityscapes, config(), "multiclass")
    assert (folder.layout, len(folder.classes.names)) == ("cityscapes", 19)
    assert folder.listed == (
        ["aachen_000000_000019", "bonn_000000_000019"],
        ["ulm_000000_000019"],
    )
    mask = labels_of(folder)["ulm_000000_000019"]
    assert mask[:4, 0].tolist() == [0, 13, 18, 255]
    assert "*_labelIds.png" in folder.description
    assert len(images_of(cityscapes, config())) == 4


def test_train_ids_of_cityscapes_are_taken_as_they_are(cityscapes):
    for path in cityscapes.glob("gtFine/*/*/*_labelIds.png"):
        ids(path.with_name(path.name.replace("labelIds", "labelTrainIds")), np.full((6, 8), 13))
    mask = labels_of(read_folder(cityscapes, config(), "multiclass"))["ulm_000000_000019"]
    assert (mask == 13).all()


def test_cityscapes_with_classes_of_ones_own(cityscapes):
    classes_toml(cityscapes, [str(i) for i in range(34)], [(i, 0, 0) for i in range(34)])
    folder = read_folder(cityscapes, config(), "multiclass")
    assert labels_of(folder)["ulm_000000_000019"][:4, 0].tolist() == [7, 26, 33, 0]


def test_a_mask_of_cityscapes_that_is_missing(cityscapes):
    next(cityscapes.glob("gtFine/train/bonn/*_labelIds.png")).unlink()
    with pytest.raises(DataError, match="bonn_000000_000019_leftImg8bit.png has no mask"):
        read_folder(cityscapes, config(), "multiclass")


# Ultralytics


@pytest.fixture
def ultralytics(tmp_path: Path) -> Path:
    pytest.importorskip("yaml")
    root = tmp_path / "coco8-seg"
    for split, names in (("train", "ab"), ("val", "a")):
        (root / "labels" / split).mkdir(parents=True)
        for name in names:
            image(root / "images" / split / f"{name}.jpg")
    (root / "labels" / "train" / "a.txt").write_text("1 0.0 0.0 0.5 0.0 0.5 0.5 0.0 0.5\n")
    (root / "labels" / "val" / "a.txt").write_text("0 0.0 0.0 0.5 0.0 0.5 0.5 0.0 0.5\n")
    (root / "data.yaml").write_text(
        "path: coco8-seg # root\ntrain: images/train\nval: images/val\nnames:\n  0: cat\n  1: dog\n"
    )
    return root


def test_ultralytics_as_it_is(ultralytics):
    folder = read_folder(ultralytics, config(), "multiclass")
    assert (folder.layout, folder.masks) == ("ultralytics", "polygons")
    assert folder.classes.names == ("background", "cat", "dog")
    assert folder.listed == (["train/a", "train/b"], ["val/a"])
    assert folder.notes == ("All background: 1 image without a text file.",)
    labels = labels_of(folder)
    expected = np.zeros((6, 8), np.uint8)
    expected[:4, :5] = 1  # the outline belongs to the shape, as Pillow draws it
    np.testing.assert_array_equal(labels["val/a"], expected)
    np.testing.assert_array_equal(labels["train/a"], 2 * expected)
    assert not labels["train/b"].any()
    assert read_folder(ultralytics, config(), "multilabel").classes.names == ("cat", "dog")
    assert len(images_of(ultralytics, config())) == 3


def test_a_list_of_names_and_a_folder_without_splits(ultralytics):
    for kind in ("images", "labels"):
        for path in list((ultralytics / kind / "train").iterdir()):
            path.rename(ultralytics / kind / path.name)
        for split in ("train", "val"):
            for path in (ultralytics / kind / split).iterdir():
                path.unlink()
            (ultralytics / kind / split).rmdir()
    (ultralytics / "data.yaml").write_text("names: [cat, dog]\n")
    folder = read_folder(ultralytics, config(), "multiclass")
    assert ([s.stem for s in folder.samples], folder.listed) == (["a", "b"], None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("names: {0: cat, 2: dog}", "not numbered 0 to 1"),
        ("names: 3", "no list of `names`"),
        ("- a", "no list of `names`"),
        ("names: [", "cannot be read as YAML"),
        ("names: [cat, cat]", "names classes twice"),
        ("!!python/object/apply:os.getcwd []", "cannot be read as YAML"),
        ("a: " + "x" * (1 << 19), "more than 65536 bytes"),
    ],
)
def test_yaml_that_does_not_hold(ultralytics, text, says):
    (ultralytics / "data.yaml").write_text(text)
    with pytest.raises(DataError, match=says) as caught:
        read_folder(ultralytics, config(), "multiclass")
    assert str(ultralytics / "data.yaml") in str(caught.value)


def test_classes_toml_stands_in_for_yaml(ultralytics):
    (ultralytics / "data.yaml").unlink()
    with pytest.raises(DataError, match=r"has no data\.yaml"):
        read_folder(ultralytics, config(), "multiclass")
    classes_toml(ultralytics, ("cat", "background", "dog"))
    folder = read_folder(ultralytics, config(), "multiclass")
    assert {int(v) for v in np.unique(labels_of(folder)["train/a"])} == {1, 2}


def test_without_pyyaml_the_extra_is_named(ultralytics, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(DataError, match=r"anysize\[ultralytics\]"):
        read_folder(ultralytics, config(), "multiclass")


# Layouts


def test_folders_of_two_layouts_are_asked_about(root, voc):
    (voc / "images").mkdir()
    (voc / "masks").mkdir()
    with pytest.raises(DataError, match='data.layout to "anysize" or "voc"'):
        read_folder(voc, config(), "multiclass")
    assert read_folder(voc, config(layout="voc"), "multiclass").layout == "voc"


def test_masks_decide_the_layout_or_must_go_with_it(voc, ultralytics):
    with pytest.raises(DataError, match='is read as data.layout "voc", whose masks are index or c'):
        read_folder(voc, config(layout="voc", masks="stack"), "multilabel")
    with pytest.raises(DataError, match='"polygons", but .* is read as data.layout "anysize"'):
        read_folder(ultralytics, config(layout="anysize", masks="polygons"), "multiclass")
    assert read_folder(ultralytics, config(masks="polygons"), "multiclass").layout == "ultralytics"
    coco_file(ultralytics / "all.json", ["train/a.jpg"])
    folder = read_folder(ultralytics, config(masks="coco"), "multiclass")
    assert (folder.layout, [s.stem for s in folder.samples]) == ("anysize", ["a"])
    said = read_folder(ultralytics, config(), "multiclass").description
    assert said.endswith("Set data.layout to say otherwise.")


def test_a_folder_of_images_alone(root):
    assert len(images_of(root / "images", config())) == 3


@pytest.mark.parametrize("orientation", [1, 6])
def test_labels_go_with_the_upright_image(root, orientation):
    """A photograph of a phone, whose stored pixels lie on their side."""
    size = (8, 6) if orientation == 6 else (6, 8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    for i in range(3):
        write(root / "images" / f"s{i}.png", Image.new("RGB", size[::-1]), exif=exif)
        labelme_file(root / "images" / f"s{i}.json", "lake", i)
    folder = read_folder(root, config(), "multiclass")
    for sample in folder.samples:
        assert sample.size == Size(6, 8)
        assert decode_image(sample.image).shape[:2] == decode_mask(sample, folder.classes).shape
