import pytest

from anysize.data.classes import (
    background_id,
    named_classes,
    read_classes,
    read_names,
    with_background,
)
from anysize.data.formats.cityscapes import CITYSCAPES, cityscapes_classes
from anysize.data.formats.voc import voc_classes
from anysize.errors import DataError


def test_the_classes_of_pascal_voc():
    classes = voc_classes()
    assert len(classes.names) == 21
    assert dict(zip(classes.names, classes.colours, strict=True))["person"] == (192, 128, 128)
    assert (classes.names[20], classes.colours[20]) == ("tvmonitor", (0, 64, 128))
    assert classes.ignore_colours == ((224, 224, 192),)


def test_the_classes_of_cityscapes():
    classes = cityscapes_classes()
    assert len(classes.names) == 19
    assert classes.names.index("car") == 13
    assert (CITYSCAPES["car"][0], CITYSCAPES["bicycle"][0]) == (26, 33)


def test_a_list_of_names(tmp_path):
    path = tmp_path / "labels.txt"
    path.write_text("\ufeff__ignore__\r\n_background_\r\n\r\n cat \r\n", encoding="utf-8")
    assert read_names(path).names == ("_background_", "cat")
    path.write_text("cat\ncat\n")
    with pytest.raises(DataError, match=f"{path} names classes twice: cat"):
        read_names(path)
    path.write_text("\n".join(map(str, range(255))))
    with pytest.raises(DataError, match="names 255 classes"):
        read_names(path)
    with pytest.raises(DataError, match=r"none\.txt cannot be read"):
        read_names(tmp_path / "none.txt")


def test_the_background_is_put_first_unless_it_is_there():
    assert with_background(named_classes(["cat"], "")).names == ("background", "cat")
    there = named_classes(["cat", "__background__"], "")
    assert with_background(there) is there
    assert background_id(there) == 1
    assert background_id(named_classes(["cat"], "")) is None


def test_ignored_colours_are_read(tmp_path):
    path = tmp_path / "classes.toml"
    text = 'ignore_colours = [[255, 255, 255]]\n[[class]]\nname = "a"\ncolour = [0, 0, 0]\n'
    path.write_text(text)
    assert read_classes(path).ignore_colours == ((255, 255, 255),)
    for old, new, says in (
        ("[[255, 255, 255]]", "[[0, 0, 0]]", "same colour"),
        ("[[255, 255, 255]]", "[[0, 0]]", "`ignore_colours.0.` is .0, 0.; it must be a list of 3"),
        ("[[255, 255, 255]]", "1", "`ignore_colours` is 1; it must be a list"),
    ):
        path.write_text(text.replace(old, new))
        with pytest.raises(DataError, match=says):
            read_classes(path)
