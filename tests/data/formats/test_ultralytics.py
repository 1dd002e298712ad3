"""Ultralytics: the pixels of lines of polygons, and faulty lines."""

import numpy as np
import pytest
from tests.data.formats.drawn import CLASSES, NO_BACKGROUND, SIZE, box, fault_of, filled

from anysize.data.masks import decode_mask
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
        ("\n0 0.5 0.5 0.1\n", "shapes", "line 2 is no class and three or more corners"),
        ("x 0 0 1 0 1 1\n", "shapes", "invalid literal"),
        ("0 0 0 1 0 1 y\n", "shapes", "could not convert"),
        ("0 0 0 inf 0 1 1\n", "shapes", "not finite"),
        ("0 0 0 99 0 1 1\n", "shapes", "far outside"),
        ("5 0 0 1 0 1 1\n", "labels", "'class 5' (1 shapes)"),
    ],
)
def test_lines_that_do_not_hold(tmp_path, text, kind, says):
    fault = fault_of(polygons(tmp_path / "a.txt", text))
    assert fault.kind == kind
    assert says in fault.message
