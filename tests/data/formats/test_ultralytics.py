"""Ultralytics: the pixels of lines of polygons, and faulty lines."""

import numpy as np
import pytest
from tests.data.formats.drawn import CLASSES, NO_BACKGROUND, SIZE, box, fault_of, filled

from anysize.data.masks import decode_labels, decode_mask
from anysize.data.reading import Encoding, Sample


def polygons(path, text, kind="multiclass"):
    path.write_text(text)
    return Sample(
        stem="a",
        image=path.with_suffix(".jpg"),
        masks=(path,),
        size=SIZE,
        encoding=Encoding(kind="polygons", labels=kind, categories={0: "cat", 1: "dog"}),
    )


def line(number, top, left, bottom, right):
    corners = [(x / SIZE.width, y / SIZE.height) for x, y in box(top, left, bottom, right)]
    return " ".join([str(number), *(f"{v}" for corner in corners for v in corner)]) + "\n"


def test_lines_of_polygons(tmp_path):
    text = line(1, 4, 5, 8, 9) + "\n" + line(0, 0, 0, 10, 14)
    mask = decode_mask(polygons(tmp_path / "a.txt", text), CLASSES)
    np.testing.assert_array_equal(mask, filled((0, 0, 10, 14, 1), (4, 5, 8, 9, 2)))
    mask = decode_mask(polygons(tmp_path / "a.txt", text, "multilabel"), NO_BACKGROUND)
    np.testing.assert_array_equal(mask, [filled((0, 0, 10, 14, 1)), filled((4, 5, 8, 9, 1))])


def test_an_empty_file_is_all_background(tmp_path):
    assert not decode_mask(polygons(tmp_path / "a.txt", "\n"), CLASSES).any()


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("0 0.5 0.5 0.1 0.1\n", "shapes", "line 1 is a box"),
        ("\n0 0.5 0.5 0.1\n", "shapes", "line 2 is not a class and three or more corners"),
        ("x 0 0 1 0 1 1\n", "shapes", "not a whole number"),
        ("0 0 0 1 0 1 y\n", "shapes", "no numbers"),
        ("0 0 0 inf 0 1 1\n", "shapes", "not finite"),
        ("0 0 0 9 0 1 1\n", "shapes", "far outside"),
        ("5 0 0 1 0 1 1\n", "labels", "'class 5' (1 shape)"),
    ],
)
def test_lines_that_do_not_hold(tmp_path, text, kind, says):
    fault = fault_of(polygons(tmp_path / "a.txt", text))
    assert fault.kind == kind
    assert says in fault.message


def test_lines_that_cannot_be_drawn_are_left_out(tmp_path):
    text = line("0", 4, 5, 8, 9) + "0 0.5 0.5 0.1 0.1\n" + line("1.0", 40, 5, 50, 9)
    text += line("1.0", 10, 14, 14, 20)
    labels, objects = decode_labels(polygons(tmp_path / "a.txt", text), CLASSES)
    np.testing.assert_array_equal(labels, filled((4, 5, 8, 9, 1), (10, 14, 11, 15, 2)))
    assert (objects.drawn, objects.cut) == (2, 1)
    assert [f"{which} {why}" for which, why, _ in objects.left_out] == [
        "line 2 is a box, and not a polygon",
        "line 3 lies outside the image of 12x16",
    ]


def test_corners_in_pixels_are_named(tmp_path):
    fault = fault_of(polygons(tmp_path / "a.txt", "0 100 100 90 100 90 90\n"))
    assert "must be shares of width and height" in fault.message
