"""LabelMe, COCO and Ultralytics: the pixels of each shape, order, names, and faulty text."""

import base64
import importlib.util
import io
import json
import time

import numpy as np
import pytest
from PIL import Image

from anysize.data.annotations import _unpack, coco_bitmap
from anysize.data.classes import named_classes
from anysize.data.masks import Encoding, Sample, decode_mask
from anysize.faults import FaultError
from anysize.geometry import Size

SIZE = Size(12, 16)
CLASSES = named_classes(("_background_", "cat", "dog"), "a test")
NO_BACKGROUND = named_classes(("cat", "dog"), "a test")


def shape(label, points, form="polygon", **more):
    return {"label": label, "points": points, "shape_type": form, **more}


def box(top, left, bottom, right):
    return [[left, top], [right, top], [right, bottom], [left, bottom]]


def labelme(path, shapes, kind="softmax", **more):
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


def fault_of(sample, classes=CLASSES):
    with pytest.raises(FaultError) as caught:
        decode_mask(sample, classes)
    return caught.value.fault


def filled(*rects, start=0):
    """Labels with rectangles (top, left, bottom, right, value), bounds inside."""
    labels = np.full(SIZE, start, np.uint8)
    for top, left, bottom, right, value in rects:
        labels[top : bottom + 1, left : right + 1] = value
    return labels


# LabelMe


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
    mask = decode_mask(labelme(tmp_path / "a.json", shapes, "sigmoid"), NO_BACKGROUND)
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
    mask = decode_mask(labelme(path, shapes, "sigmoid"), NO_BACKGROUND)
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
        (None, "no list of objects"),
        ([1], "no list of objects"),
        ([shape("cat", [[1, 1], [2, 2]])], "a polygon has 2 points"),
        ([shape("cat", [[1, 1]], "rectangle")], "a rectangle has 1 points"),
        ([shape("cat", [[1, 1], [2, 2]], "line")], "'line', which has no area"),
        ([shape("cat", [[1, 1]], "point")], "'point', which has no area"),
        ([shape("cat", [])], "has no points"),
        ([shape("cat", None)], "has no points"),
        ([shape("cat", [[1, 2, 3]])], "no pairs"),
        ([shape("cat", [["x", "y"]] * 3)], "could not convert"),
        ([shape("cat", [[1, 2], [3]])], "inhomogeneous"),
        ([shape("cat", [[0, 0], [1e999, 0], [1, 1]])], "not finite"),
        ([shape("cat", [[0, 0], [1e9, 0], [1, 1]])], "far outside"),
        ([shape("cat", [[i % 2 * 15, i % 12] for i in range(200_000)])], "200000 points, too many"),
        ([shape("cat", [[0, 0], [99, 0]], "circle")], "far outside"),
        ([shape("cat", [[0, 0], [1, 1]], "mask")], "needs two corners and an image"),
        ([shape("cat", [[0, 0], [1, 1]], "mask", mask="?")], "cannot be read"),
        ([shape("cat", [[0, 0], [1, 1]], "mask", mask="AAAA")], "cannot identify"),
        ([shape("cat", [[0, 0], [16, 1]], "mask", mask="AAAA")], "outside the image"),
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


# COCO

draws_polygons = pytest.mark.skipif(
    importlib.util.find_spec("pycocotools") is None, reason="needs the extra coco"
)


def coco(entries, tmp_path, kind="softmax", categories=None):
    return Sample(
        stem="a",
        image=tmp_path / "a.jpg",
        masks=(),
        size=SIZE,
        encoding=Encoding(
            kind="coco",
            labels=kind,
            file=tmp_path / "all.json",
            categories=categories or {7: "cat", 9: "dog"},
        ),
        annotations=tuple(entries),
    )


def entry(category, segmentation, **more):
    return {"id": 1, "category_id": category, "segmentation": segmentation, **more}


def flat(top, left, bottom, right):
    """A polygon of the pixels up to, but without, `bottom` and `right`."""
    return [left, top, right, top, right, bottom, left, bottom]


def run_lengths(labels):
    column = labels.T.ravel() != 0
    counts, last = [0], False
    for value in column:
        if value != last:
            counts.append(0)
            last = value
        counts[-1] += 1
    return {"size": list(labels.shape), "counts": counts}


@draws_polygons
def test_a_coco_polygon_covers_its_pixels(tmp_path):
    mask = decode_mask(coco([entry(7, [flat(1, 2, 5, 9)])], tmp_path), CLASSES)
    np.testing.assert_array_equal(mask, filled((1, 2, 4, 8, 1)))


@draws_polygons
@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of the reference
def test_polygons_in_their_rectangle_are_those_of_the_whole_image():
    from pycocotools import mask as reference

    rng = np.random.default_rng(0)
    for _ in range(200):
        num = int(rng.integers(1, 3))
        rings = [(rng.uniform(-4, 20, 2 * int(rng.integers(3, 7)))).tolist() for _ in range(num)]
        top, left, inside = coco_bitmap(rings, SIZE)
        mine = np.zeros(SIZE, bool)
        mine[top : top + inside.shape[0], left : left + inside.shape[1]] = inside
        whole = reference.decode(reference.merge(reference.frPyObjects(rings, *SIZE)))
        np.testing.assert_array_equal(mine, whole.astype(bool))


@draws_polygons
def test_run_length_codes_are_those_of_pycocotools():
    from pycocotools import mask as reference

    rng = np.random.default_rng(0)
    for share in (0.0, 0.02, 0.5, 0.98, 1.0):
        labels = (rng.random((120, 90)) < share).astype(np.uint8)
        code = reference.encode(np.asfortranarray(labels))
        plain = run_lengths(labels)
        text = {"size": [120, 90], "counts": code["counts"].decode()}
        assert _unpack(text["counts"]) == plain["counts"]
        for form in (plain, text):
            top, left, inside = coco_bitmap(form, Size(120, 90))
            mine = np.zeros((120, 90), np.uint8)
            mine[top : top + inside.shape[0], left : left + inside.shape[1]] = inside
            np.testing.assert_array_equal(mine, labels)


@draws_polygons
def test_a_small_object_is_seen_before_a_large_one(tmp_path):
    large, small = entry(7, [flat(0, 0, 10, 14)]), entry(9, [flat(4, 5, 8, 9)])
    expected = filled((0, 0, 9, 13, 1), (4, 5, 7, 8, 2))
    for entries in ([large, small], [small, large]):
        np.testing.assert_array_equal(decode_mask(coco(entries, tmp_path), CLASSES), expected)
    code = run_lengths(filled((4, 5, 7, 8, 1)))
    mask = decode_mask(coco([entry(9, code), large], tmp_path), CLASSES)
    np.testing.assert_array_equal(mask, expected)


@draws_polygons
def test_a_crowd_is_ignored_where_no_object_is(tmp_path):
    crowd = entry(7, run_lengths(filled((2, 2, 6, 6, 1))), iscrowd=1)
    dog = entry(9, [flat(0, 0, 10, 5)])
    mask = decode_mask(coco([dog, crowd], tmp_path), CLASSES)
    np.testing.assert_array_equal(mask, filled((2, 2, 6, 6, 255), (0, 0, 9, 4, 2)))
    both = decode_mask(coco([dog, crowd], tmp_path, "sigmoid"), NO_BACKGROUND)
    expected = [filled((2, 2, 6, 6, 255)), filled((0, 0, 9, 4, 1))]
    np.testing.assert_array_equal(both, expected)


def test_an_image_without_annotations_is_background(tmp_path):
    assert not decode_mask(coco([], tmp_path), CLASSES).any()


@draws_polygons
def test_categories_that_are_no_classes_are_listed(tmp_path):
    entries = [entry(7, [flat(0, 0, 2, 2)]), entry(8, []), entry(3, [])]
    fault = fault_of(coco(entries, tmp_path, categories={7: "cat", 8: "cow"}))
    assert fault.kind == "labels"
    assert fault.found == (("cow", 1), ("category 3", 1))


@pytest.mark.parametrize(
    ("segmentation", "says"),
    [
        (None, "no segmentation"),
        ([], "no segmentation"),
        ([[1, 2, 3, 4]], "at least three pairs"),
        ([[1, 2, 3, 4, 5, 6, 7]], "at least three pairs"),
        ([["a"] * 6], "could not convert"),
        ([[0, 0, 1e300, 0, 1, 1]], "far outside"),
        ([[0, 0, float("nan"), 0, 1, 1]], "not finite"),
        ([[0, 0, 15, 11] * 40_000], "80000 points, too many"),
        ({"size": [12, 17], "counts": [204]}, "size [12, 17] in an image of 12x16"),
        ({"size": [1 << 40, 1 << 40], "counts": [1 << 80]}, "in an image of 12x16"),
        ({"size": [12, 16], "counts": [1 << 62]}, "of 4611686018427387904 pixels"),
        ({"size": [12, 16], "counts": [193, -1]}, "run-length code of 192 pixels"),
        ({"size": [12, 16], "counts": [191]}, "run-length code of 191 pixels"),
        ({"size": [12, 16], "counts": [True] * 192}, "no list of whole numbers"),
        ({"size": [12, 16], "counts": None}, "no list of whole numbers"),
        ({"size": [12, 16], "counts": "o"}, "is cut off"),
        ({"size": [12, 16], "counts": "oooooooooo0"}, "is damaged"),
        ({"size": [12, 16], "counts": "\u20ac"}, "is damaged"),
        ({}, "size None"),
    ],
)
def test_segmentations_that_do_not_hold(tmp_path, segmentation, says):
    start = time.monotonic()
    fault = fault_of(coco([entry(7, segmentation)], tmp_path))
    assert fault.kind == "shapes"
    assert says in fault.message
    assert "annotation 1" in fault.message
    assert time.monotonic() - start < 60  # not a measurement: forged sizes would never end


def test_many_full_bitmaps_are_refused_before_memory_is(tmp_path):
    full = {"size": list(SIZE), "counts": [0, SIZE.pixels]}
    fault = fault_of(coco([entry(7, full)] * 6000, tmp_path))
    assert "too many for an image of 12x16" in fault.message


def test_without_pycocotools_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pycocotools", None)
    sample = coco([entry(7, [flat(0, 0, 2, 2)])], tmp_path)
    with pytest.raises(Exception, match=r"anysize\[coco\]"):
        decode_mask(sample, CLASSES)


# Ultralytics


def polygons(path, text, kind="softmax"):
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
    mask = decode_mask(polygons(tmp_path / "a.txt", text, "sigmoid"), NO_BACKGROUND)
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
