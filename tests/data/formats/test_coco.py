"""COCO: the pixels of polygons and run-length codes, order, names, and faulty text."""

import importlib.util
import json
import time

import numpy as np
import pytest
from PIL import Image
from tests.data.formats.drawn import CLASSES, NO_BACKGROUND, SIZE, fault_of, filled

from anysize.config import DataConfig
from anysize.data.formats.coco import _outline, _unpack
from anysize.data.masks import decode_labels, decode_mask
from anysize.data.reading import Encoding, Sample
from anysize.data.samples import scan_folder
from anysize.faults import FaultError
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
        drawn = _outline(rings).draw("it", SIZE, [])
        if drawn is None:
            continue
        top, left, inside, _ = drawn
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
            drawn = _outline(form).draw("it", Size(120, 90), [])
            if drawn is None:
                assert not labels.any()
                continue
            top, left, inside, _ = drawn
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
        (None, "has no outline"),
        ([], "has no outline"),
        ([[1, 2, 3, 4]], "has 2 points, fewer than 3"),
        ([[1, 2, 3, 4, 5, 6, 7]], "no pairs of numbers"),
        ([["a"] * 6], "no pairs of numbers"),
        ([[0, 0, 1e300, 0, 1, 1]], "far outside"),
        ([[0, 0, float("nan"), 0, 1, 1]], "not finite"),
        ([[0, 0, 15, 11] * 40_000], "80000 points, too many"),
        ({"size": [12, 17], "counts": [204]}, "size 12x17 in an image of 12x16"),
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


# Objects that are cut or left out


@draws_polygons
def test_one_bad_ring_does_not_cost_the_image(tmp_path):
    good = flat(1, 2, 5, 9)
    entries = [
        entry(7, [good, [1, 1, 5, 5]]),
        entry(9, []) | {"id": 2},
        entry(9, [flat(40, 40, 50, 50)]) | {"id": 3},
        entry(9, [[2, 2, 6, 6, 4, 4]]) | {"id": 4},
        entry(9, [flat(8, 12, 20, 20)]) | {"id": 5},
        entry(9, {"size": [12, 16], "counts": [192]}) | {"id": 6},
    ]
    labels, objects = decode_labels(coco(entries, tmp_path), CLASSES)
    np.testing.assert_array_equal(labels, filled((1, 2, 4, 8, 1), (8, 12, 11, 15, 2)))
    assert (objects.drawn, objects.cut) == (2, 1)
    assert sorted(f"{which} {why}" for which, why, _ in objects.left_out) == [
        "a ring of annotation 1 has 2 points, fewer than 3",
        "annotation 2 has no outline",
        "annotation 3 lies outside the image of 12x16",
        "annotation 4 covers nothing",
        "annotation 6 covers no pixel",
    ]


@draws_polygons
@pytest.mark.parametrize("value", [True, 1, 1.0, "1", "true", "True"])
def test_crowds_however_they_are_written(tmp_path, value):
    mask = decode_mask(coco([entry(7, [flat(1, 2, 5, 9)], iscrowd=value)], tmp_path), CLASSES)
    np.testing.assert_array_equal(mask, filled((1, 2, 4, 8, 255)))


@draws_polygons
@pytest.mark.parametrize("value", [False, 0, 0.0, "0", "false", "", None, "missing"])
def test_objects_that_are_no_crowds_however_that_is_written(tmp_path, value):
    more = {} if value == "missing" else {"iscrowd": value}
    mask = decode_mask(coco([entry(7, [flat(1, 2, 5, 9)], **more)], tmp_path), CLASSES)
    np.testing.assert_array_equal(mask, filled((1, 2, 4, 8, 1)))


@pytest.mark.parametrize("value", ["maybe", 2, [], {}])
def test_crowds_that_are_neither_are_named(tmp_path, value):
    fault = fault_of(coco([entry(7, [flat(1, 2, 5, 9)], iscrowd=value)], tmp_path))
    assert "`iscrowd` of annotation 1" in fault.message
    assert "neither 0 nor 1" in fault.message


# A folder with a COCO file


def folder(root, names, *, images=None, orientation=1, stored=(6, 8), **more):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.new("RGB", stored[::-1]).save(path, exif=exif)
    table = {
        "images": images or [{"id": i, "file_name": n} for i, n in enumerate(names)],
        "annotations": [],
        "categories": [{"id": 1, "name": "cat"}],
    }
    (root / "coco.json").write_text(json.dumps(table | more))
    return scan_folder(root, DataConfig(root=""), "multiclass")


def drawn(found):
    return {s.stem: decode_mask(s, found.classes) for s in found.samples}


@draws_polygons
@pytest.mark.parametrize("ids", [(0, 1), ("0", "1"), (0.0, 1.0), ("00", "01")])
@pytest.mark.parametrize("category", [1, "1", 1.0])
def test_ids_are_the_same_in_any_form(tmp_path, ids, category):
    outline = [[0, 0, 4, 0, 4, 3, 0, 3]]
    annotations = [
        {"id": i, "image_id": key, "category_id": category, "segmentation": outline}
        for i, key in enumerate(ids)
    ]
    labels = drawn(folder(tmp_path, ["images/a.png", "images/b.png"], annotations=annotations))
    assert [int(mask.sum()) for mask in labels.values()] == [12, 12]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("images\\\\a.png", 0),
        ("images/a.png", 0),
        ("a.png", 0),
        ("C:\\\\data\\\\a.png", 1),
        ("/data/upload/1/a.png", 1),
        ("../x/a.png", 1),
        ("other/a.png", 1),
    ],
)
def test_names_with_folders_of_another_system(tmp_path, name, said):
    found = folder(tmp_path, ["images/a.png"], images=[{"id": 1, "file_name": name}])
    assert [s.image for s in found.samples] == [tmp_path / "images/a.png"]
    assert len([note for note in found.notes if "found by their names" in note]) == said


def test_a_name_that_several_images_have_is_not_guessed(tmp_path):
    names = ["images/x/a.png", "images/y/a.png"]
    found = folder(tmp_path, names, images=[{"id": 1, "file_name": "z/a.png"}])
    assert [f.kind for f in found.faults] == ["unpaired"]
    found = folder(tmp_path, names, images=[{"id": 1, "file_name": "z/y/a.png"}])
    assert [s.image for s in found.samples] == [tmp_path / "images/y/a.png"]


@pytest.mark.parametrize("text", ['{"images": [{"id": 0, "fi', "", "[1"])
def test_a_damaged_file_is_called_damaged(tmp_path, text):
    folder(tmp_path, ["images/a.png"])
    name = "coco.json" if "images" in text else "instances_train.json"
    (tmp_path / name).write_text(text)
    with pytest.raises(FaultError, match=f"{name} cannot be read as JSON"):
        scan_folder(tmp_path, DataConfig(root=""), "multiclass")


# Photographs whose pixels are stored on their side: 6x8 stored, 8x6 as one sees them


def photo(root, claimed, outline, setting="auto", orientation=6):
    height, width = claimed
    images = [{"id": 0, "file_name": "a.jpg", "height": height, "width": width}]
    annotations = [{"id": 1, "image_id": 0, "category_id": 1, "segmentation": [outline]}]
    folder(root, ["a.jpg"], images=images, annotations=annotations, orientation=orientation)
    return scan_folder(root, DataConfig(root="", mask_orientation=setting), "multiclass")


TALL, WIDE, SMALL = flat(0, 0, 8, 2), flat(0, 0, 2, 8), flat(0, 0, 2, 4)


def rectangle(height, width):
    mask = np.zeros((8, 6), np.uint8)
    mask[:height, :width] = 1
    return mask


TURNED_WIDE = np.zeros((8, 6), np.uint8)
TURNED_WIDE[:, 4:] = 1  # the stored top is the right-hand side of what one sees


@draws_polygons
@pytest.mark.parametrize(
    ("claimed", "outline", "setting", "expected"),
    [
        ((8, 6), TALL, "auto", rectangle(8, 2)),
        (("8", 6.0), SMALL, "auto", rectangle(2, 4)),
        ((6, 8), TALL, "auto", rectangle(8, 2)),  # the size of the file, the shapes of the picture
        ((6, 8), WIDE, "auto", TURNED_WIDE),
        ((None, None), WIDE, "apply", TURNED_WIDE),
        ((6, 8), TALL, "ignore", rectangle(8, 2)),
        ((6, 8), SMALL, "ignore", rectangle(2, 4)),
    ],
)
def test_where_shapes_fit_tells_what_they_were_drawn_over(
    tmp_path, claimed, outline, setting, expected
):
    found = photo(tmp_path, claimed, outline, setting)
    assert not found.faults
    np.testing.assert_array_equal(drawn(found)["a"], expected)


@draws_polygons
@pytest.mark.parametrize(
    ("claimed", "outline", "orientation", "kind", "says"),
    [
        ((6, 8), SMALL, 6, "rotated", "fit both. Set data.mask_orientation"),
        ((8, 6), WIDE, 6, "rotated", "fit it only as it is stored. Set data.mask_orientation"),
        ((None, None), WIDE, 6, "rotated", "is of no size"),
        ((7, 8), SMALL, 6, "size", "2 columns too many"),
        ((8, 6), SMALL, 1, "size", "height and width are exchanged"),
    ],
)
def test_shapes_that_may_have_been_drawn_over_either_are_asked_about(
    tmp_path, claimed, outline, orientation, kind, says
):
    found = photo(tmp_path, claimed, outline, orientation=orientation)
    faults = list(found.faults)
    if not faults:
        with pytest.raises(FaultError) as caught:
            drawn(found)
        faults = [caught.value.fault]
    assert [fault.kind for fault in faults] == [kind]
    assert says in faults[0].message
