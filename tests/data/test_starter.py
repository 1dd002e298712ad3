"""`anysize init`: what it writes is read back as what the masks hold."""

import json

import numpy as np
import pytest
from PIL import Image
from tests.cli.command import anysize

from anysize.config import load_config
from anysize.data.classes import read_classes
from anysize.data.colours import distinct_colours, least_difference
from anysize.data.samples import decode_mask, read_folder
from anysize.data.starter import write_starter
from anysize.errors import ConfigError, DataError

COLOURS = np.array([(90, 10, 20), (200, 80, 60), (60, 80, 200)], np.uint8)


@pytest.fixture
def root(tmp_path):
    """Four images, and a function that writes a mask of each."""
    root = tmp_path / "my data"
    rng = np.random.default_rng(0)
    (root / "images").mkdir(parents=True)
    (root / "masks").mkdir()
    for i in range(4):
        pixels = rng.integers(0, 255, (12, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / f"images/s{i}.png")
    return root


def labels(seed, num=3):
    return np.random.default_rng(seed).integers(0, num, (12, 16)).astype(np.uint8)


def started(root):
    said = write_starter(root, root.parent / "run.toml")
    config = load_config(root.parent / "run.toml")
    return said, read_folder(root, config.data, config.loss.labels)


def write_ids(root, name, values):
    Image.fromarray(values).save(root / f"masks/{name}.png")


def test_ids_0_1_2(root):
    for i in range(4):
        write_ids(root, f"s{i}", np.where(labels(9, 5) == 4, 255, labels(i)).astype(np.uint8))
    said, folder = started(root)
    assert folder.classes.names == ("class 0", "class 1", "class 2")
    assert folder.classes.colours == tuple(distinct_colours(3))
    assert "the values 0, 1, 2, 255" in said[0]
    for sample in folder.samples:
        stored = np.array(Image.open(sample.masks[0]))
        np.testing.assert_array_equal(decode_mask(sample, folder.classes), stored)


def test_other_values_get_data_ids_and_names_of_a_list(root):
    values = np.array([0, 7, 11, 255], np.uint8)
    for i in range(4):
        write_ids(root, f"s{i}_mask", values[labels(i, 4)])
    (root / "labels.txt").write_text("\n".join(f"name{i}" for i in range(12)))
    _, folder = started(root)
    assert folder.classes.names == ("name0", "name7", "name11")
    for i, sample in enumerate(folder.samples):
        expected = np.array([0, 1, 2, 255])[labels(i, 4)]
        np.testing.assert_array_equal(decode_mask(sample, folder.classes), expected)
    assert load_config(root.parent / "run.toml").data.mask_pattern == "{stem}_mask"


@pytest.mark.parametrize("how", ["rgb", "palette"])
def test_colours_are_those_of_the_masks(root, how):
    for i in range(4):
        picture = Image.fromarray(COLOURS[labels(i)])
        if how == "palette":
            picture = Image.fromarray(labels(i))
            picture.putpalette(COLOURS.ravel().tolist())
        picture.save(root / f"masks/s{i}.png")
    _, folder = started(root)
    assert set(folder.classes.colours) == set(map(tuple, COLOURS.tolist()))
    for i, sample in enumerate(folder.samples):
        painted = np.array(folder.classes.colours)[decode_mask(sample, folder.classes)]
        np.testing.assert_array_equal(painted, COLOURS[labels(i)])


def test_0_and_255_stay_a_question(root):
    for i in range(4):
        write_ids(root, f"s{i}", labels(i, 2) * 255)
    with pytest.raises(DataError, match='"binary" or to "index"'):
        started(root)
    text = (root.parent / "run.toml").read_text()
    assert '# masks = "binary"' in text
    assert read_classes(root / "classes.toml").names == ("background", "foreground")


def test_one_folder_per_class(root):
    for name in ("boat", "person"):
        (root / "masks" / name).mkdir()
        for i in range(4):
            Image.fromarray(labels(i, 2)).save(root / f"masks/{name}/s{i}.png")
    _, folder = started(root)
    assert folder.classes.names == ("boat", "person")
    assert folder.kind == "multilabel"


def test_names_of_labelme_files(root):
    for i, name in enumerate(("road", "car", "__ignore__", "background")):
        shape = {"label": name, "points": [[1, 1], [5, 1], [5, 5]], "shape_type": "polygon"}
        table = {"shapes": [shape], "imageHeight": 12, "imageWidth": 16}
        (root / f"images/s{i}.json").write_text(json.dumps(table))
    _, folder = started(root)
    assert folder.classes.names == ("background", "car", "road")


def test_nothing_is_overwritten(root):
    for i in range(4):
        write_ids(root, f"s{i}", labels(i))
    run_toml = root.parent / "run.toml"
    run_toml.write_text("mine")
    said = write_starter(root, run_toml)
    assert run_toml.read_text() == "mine"
    assert any("already exists" in line for line in said)
    (root / "classes.toml").write_text("mine too")
    with pytest.raises(ConfigError, match="already exist"):
        write_starter(root, run_toml)
    run_toml.unlink()
    write_starter(root, run_toml)
    assert (root / "classes.toml").read_text() == "mine too"


def test_photographs_among_the_masks_are_refused(root):
    for i in range(4):
        noise = np.random.default_rng(i).integers(0, 255, (12, 16, 3), dtype=np.uint8)
        Image.fromarray(noise).save(root / f"masks/s{i}.png")
    with pytest.raises(DataError, match="more than 254 classes"):
        write_starter(root, root.parent / "run.toml")
    assert not (root / "classes.toml").exists()


def test_init_and_check_as_commands(root):
    for i in range(4):
        write_ids(root, f"s{i}_mask", labels(i))
    anysize("init", root, cwd=root.parent)
    anysize("check", "run.toml", cwd=root.parent)
    assert "never overwrites" in anysize("init", root, cwd=root.parent, code=2)


@pytest.mark.parametrize(("num", "least"), [(8, 16), (20, 16), (40, 12)])
def test_colours_are_told_apart_also_without_red_or_green_cones(num, least):
    colours = distinct_colours(num)
    assert len(set(colours)) == num
    assert least_difference(colours) > least
    # The control: red and green of the same lightness.
    assert least_difference([(178, 90, 40), (110, 120, 40)]) < 10


def test_as_many_colours_as_a_mask_can_hold():
    assert len(set(distinct_colours(254))) == 254
