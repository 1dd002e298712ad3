"""LabelMe: the pixels of each shape, order, names, and faulty text."""

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image
from tests.data.formats.drawn import CLASSES, NO_BACKGROUND, SIZE, box, fault_of, filled

from anysize.config import DataConfig
from anysize.data.classes import named_classes
from anysize.data.masks import decode_labels, decode_mask
from anysize.data.reading import Encoding, Sample
from anysize.data.samples import read_folder
from anysize.errors import DataError


def shape(label, points, form="polygon", **more):
    return {"label": label, "points": points, "shape_type": form, **more}


def labelme(path, shapes, kind="multiclass", **more):
    height, width = SIZE
    table = {"shapes": shapes, "imageHeight": height, "imageWidth": width, "imageData": None}
    path.write_text(json.dumps(table | more))
    return Sample(
        stem="a",
        image=path.with_suffix(".jpg"),
        masks=(path,),
        size=SIZE,
        encoding=Encoding(kind="labelme", labels=kind),
    )


def test_the_later_of_two_polygons_is_seen(tmp_path):
    shapes = [shape("cat", box(1, 1, 6, 8)), shape("dog", box(4, 5, 9, 12))]
    expected = filled((1, 1, 6, 8, 1), (4, 5, 9, 12, 2))
    mask = decode_mask(labelme(tmp_path / "a.json", shapes), CLASSES)
    np.testing.assert_array_equal(mask, expected)
    turned = decode_mask(labelme(tmp_path / "a.json", shapes[::-1]), CLASSES)
    np.testing.assert_array_equal(turned, filled((4, 5, 9, 12, 2), (1, 1, 6, 8, 1)))
    assert (mask != turned).sum() == 3 * 4


def test_overlaps_are_kept_for_sigmoid(tmp_path):
    shapes = [shape("cat", box(1, 1, 6, 8)), shape("dog", box(4, 5, 9, 12))]
    mask = decode_mask(labelme(tmp_path / "a.json", shapes, "multilabel"), NO_BACKGROUND)
    np.testing.assert_array_equal(mask, [filled((1, 1, 6, 8, 1)), filled((4, 5, 9, 12, 1))])


def test_every_form_that_has_an_area(tmp_path):
    picture = io.BytesIO()
    bits = np.array([[1, 0, 1], [0, 1, 0]], np.uint8)
    Image.fromarray(bits * 255).save(picture, "PNG")
    text = base64.b64encode(picture.getvalue()).decode()
    shapes = [
        shape("cat", [[3.0, 2.0], [1.0, 1.0]], "rectangle"),
        shape("dog", [[10.0, 6.0], [10.0, 8.0]], "circle"),
        shape("cat", [[13, 0], [15, 1]], "mask", mask=text),
        shape("dog", box(9, 0, 11, 2), "oriented_rectangle"),
        shape("cat", box(5, 0, 6, 1), None),
    ]
    mask = decode_mask(labelme(tmp_path / "a.json", shapes), CLASSES)
    expected = filled((1, 1, 2, 3, 1), (9, 0, 11, 2, 2), (5, 0, 6, 1, 1))
    expected[:2, 13:16][bits == 1] = 1
    rows, columns = np.mgrid[:12, :16]
    disc = (rows - 6) ** 2 + (columns - 10) ** 2 <= 5  # of radius 2, as Pillow rounds its edge
    np.testing.assert_array_equal(mask == expected, ~disc | (expected == 2))
    assert (mask[disc] == 2).all()


def test_what_is_to_be_ignored(tmp_path):
    shapes = [shape("cat", box(1, 1, 6, 8)), shape("__ignore__", box(4, 5, 9, 12))]
    path = tmp_path / "a.json"
    mask = decode_mask(labelme(path, shapes), CLASSES)
    np.testing.assert_array_equal(mask, filled((1, 1, 6, 8, 1), (4, 5, 9, 12, 255)))
    mask = decode_mask(labelme(path, shapes, "multilabel"), NO_BACKGROUND)
    ignored = filled((4, 5, 9, 12, 255))
    np.testing.assert_array_equal(mask, [filled((4, 5, 9, 12, 255), (1, 1, 6, 8, 1)), ignored])


def test_pixels_in_no_shape(tmp_path):
    sample = labelme(tmp_path / "a.json", [shape("cat", box(1, 1, 6, 8))])
    named = named_classes(("cat", "background"), "a test")
    np.testing.assert_array_equal(decode_mask(sample, named), filled((1, 1, 6, 8, 0), start=1))
    without = decode_mask(sample, NO_BACKGROUND)
    np.testing.assert_array_equal(without, filled((1, 1, 6, 8, 0), start=255))


def test_the_background_may_be_drawn_by_any_of_its_names(tmp_path):
    shapes = [shape("cat", box(1, 1, 9, 9)), shape("background", box(3, 3, 5, 5))]
    mask = decode_mask(labelme(tmp_path / "a.json", shapes), CLASSES)
    np.testing.assert_array_equal(mask, filled((1, 1, 9, 9, 1), (3, 3, 5, 5, 0)))


def test_names_that_are_no_classes_are_listed(tmp_path):
    shapes = [shape("kat", box(1, 1, 6, 8)), shape("kat", box(2, 2, 3, 3)), shape("dog", [])]
    fault = fault_of(labelme(tmp_path / "a.json", shapes[:2]))
    assert fault.kind == "labels"
    assert fault.found == (("kat", 2),)
    assert "'kat' (2 shapes). Classes are _background_, cat, dog" in fault.message


def test_a_file_of_another_image_size(tmp_path):
    fault = fault_of(labelme(tmp_path / "a.json", [], imageHeight=16, imageWidth=12))
    assert fault.kind == "size"
    assert f"16x12, but image {tmp_path / 'a.jpg'} is 12x16" in fault.message


def test_a_file_that_does_not_tell_the_size(tmp_path):
    sample = labelme(tmp_path / "a.json", [shape("cat", box(1, 1, 6, 8))], imageHeight=None)
    assert (decode_mask(sample, CLASSES) == 1).sum() == 48


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        (None, "is not a list of objects"),
        ([1], "is not a list of objects"),
        ([shape("cat", [[1, 1], [2, 2]])], "is a polygon of 2 points"),
        ([shape("cat", [[1, 1]], "rectangle")], "is a rectangle of 1 points"),
        ([shape("cat", [])], "has no points"),
        ([shape("cat", None)], "has no points"),
        ([shape("cat", [[1, 2, 3]])], "no pairs"),
        ([shape("cat", [["x", "y"]] * 3)], "no pairs of numbers"),
        ([shape("cat", [[1, 2], [3]])], "no pairs of numbers"),
        ([shape("cat", [[0, 0], [1e999, 0], [1, 1]])], "not finite"),
        ([shape("cat", [[0, 0], [1e9, 0], [1, 1]])], "far outside"),
        ([shape("cat", [[i % 2 * 15, i % 12] for i in range(200_000)])], "200000 points, too many"),
        ([shape("cat", [[0, 0], [99, 0]], "circle")], "far outside"),
        ([shape("cat", [[0, 0], [1, 1]], "mask")], "without two corners and an image"),
        ([shape("cat", [[0, 0], [1, 1]], "mask", mask="?")], "cannot be read"),
        ([shape("cat", [[0, 0], [1, 1]], "mask", mask="AAAA")], "cannot identify"),
        ([shape("cat", [[0, 0], [1 << 30, 1]], "mask", mask="AAAA")], "without two corners"),
    ],
)
def test_shapes_that_do_not_hold(tmp_path, shapes, says):
    fault = fault_of(labelme(tmp_path / "a.json", shapes))
    assert fault.kind == "shapes"
    assert says in fault.message
    assert str(tmp_path / "a.json") in fault.message


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 100_000, "\xff", '{"a": ' + "9" * 5000 + "}"]
)
def test_text_that_is_no_json_object(tmp_path, text):
    sample = labelme(tmp_path / "a.json", [])
    sample.masks[0].write_text(text, encoding="latin-1")
    assert fault_of(sample).kind == "unreadable"


def test_lines_and_points_are_left_out_and_counted(tmp_path):
    shapes = [
        shape("cat", [[1, 1], [2, 2]], "line"),
        shape("cat", [[1, 1]], "point"),
        shape("dog", box(4, 5, 9, 12)),
        shape("dog", box(40, 50, 60, 60)),
        shape("cat", box(10, 14, 20, 20)),
        shape("cat", [[1, 1], [1, 1]], "rectangle"),
        shape("cat", [[1, 1], [2, 2]], "star"),
    ]
    labels, objects = decode_labels(labelme(tmp_path / "a.json", shapes), CLASSES)
    np.testing.assert_array_equal(labels, filled((4, 5, 9, 12, 2), (10, 14, 11, 15, 1)))
    assert (objects.drawn, objects.cut) == (2, 1)
    assert sorted(f"{which} {why}" for which, why, _ in objects.left_out) == [
        "shape 1 ('cat') is a line, which has no area",
        "shape 2 ('cat') is a point, which has no area",
        "shape 4 ('dog') lies outside the image of 12x16",
        "shape 6 ('cat') covers nothing",
        "shape 7 ('cat') is a 'star', which is not known",
    ]
    only = labelme(tmp_path / "a.json", shapes[:2])
    assert not decode_mask(only, CLASSES).any()
    assert "none of its objects" in fault_of(labelme(tmp_path / "a.json", shapes[3:4])).message


@pytest.mark.parametrize("extent", [(12.0, "16"), ("12", 16), (None, None)])
def test_extents_however_they_are_written(tmp_path, extent):
    more = {"imageHeight": extent[0], "imageWidth": extent[1]}
    sample = labelme(tmp_path / "a.json", [shape("cat", box(1, 1, 6, 8))], **more)
    np.testing.assert_array_equal(decode_mask(sample, CLASSES), filled((1, 1, 6, 8, 1)))


@pytest.mark.parametrize("extent", [(13.0, "16"), ("12", 17)])
def test_extents_of_another_image_however_they_are_written(tmp_path, extent):
    more = {"imageHeight": extent[0], "imageWidth": extent[1]}
    assert fault_of(labelme(tmp_path / "a.json", [], **more)).kind == "size"


def test_masks_partly_outside_are_cut(tmp_path):
    picture = io.BytesIO()
    Image.new("1", (4, 3), 1).save(picture, "PNG")
    text = base64.b64encode(picture.getvalue()).decode()
    shapes = [
        shape("cat", [[-2, -1], [1, 1]], "mask", mask=text),
        shape("dog", [[14, 10], [17, 12]], "mask", mask=text),
        shape("dog", [[30, 10], [33, 12]], "mask", mask=text),
    ]
    labels, objects = decode_labels(labelme(tmp_path / "a.json", shapes), CLASSES)
    np.testing.assert_array_equal(labels, filled((0, 0, 1, 1, 1), (10, 14, 11, 15, 2)))
    assert (objects.drawn, objects.cut, len(objects.left_out)) == (2, 2, 1)


def test_a_labelme_file_that_holds_its_image_says_so(tmp_path):
    (tmp_path / "images").mkdir()
    Image.new("L", (8, 6)).save(tmp_path / "images/a.png")
    for stem in "ab":
        (tmp_path / f"images/{stem}.json").write_text('{"shapes": [], "imageData": "iVBORw0="}')
    (tmp_path / "labels.txt").write_text("_background_\ncat\n")
    with pytest.raises(DataError, match=r"b\.json .* labelme_export_json .*b\.json writes it"):
        read_folder(tmp_path, DataConfig(root=""), "multiclass")
