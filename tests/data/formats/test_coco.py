"""COCO: the pixels of polygons and run-length codes, order, names, and faulty text."""

import importlib.util
import time

import numpy as np
import pytest
from tests.data.formats.drawn import CLASSES, NO_BACKGROUND, SIZE, fault_of, filled

from anysize.data.formats.coco import _unpack, coco_bitmap
from anysize.data.masks import decode_mask
from anysize.data.reading import Encoding, Sample
from anysize.geometry import Size

draws_polygons = pytest.mark.skipif(
    importlib.util.find_spec("pycocotools") is None, reason="needs the extra coco"
)


def coco(entries, tmp_path, kind="multiclass", categories=None):
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
    both = decode_mask(coco([dog, crowd], tmp_path, "multilabel"), NO_BACKGROUND)
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
