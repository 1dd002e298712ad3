"""Masks of colours, of 0 and 255, with looked-up ids, and stacks: exact values and exact faults."""

import dataclasses

import numpy as np
import pytest
from PIL import Image

from anysize.data.classes import Classes
from anysize.data.masks import decode_mask
from anysize.data.reading import Encoding, Sample
from anysize.faults import FaultError
from anysize.geometry import Size

CLASSES = Classes(
    names=("sea", "land", "lake"),
    colours=((0, 0, 255), (0, 200, 0), (0, 255, 255)),
    ignore_colours=((255, 255, 255), (9, 9, 9)),
)
LABELS = np.array([[0, 1, 2, 255], [2, 2, 0, 255]], np.uint8)


def sample(path, kind, labels="multiclass", size=(2, 4), **more):
    return Sample(
        stem="a",
        image=path.with_name("image.png"),
        masks=(path,),
        size=Size(*size),
        encoding=Encoding(kind=kind, labels=labels, **more),
    )


def fault_of(it, classes=CLASSES):
    with pytest.raises(FaultError) as caught:
        decode_mask(it, classes)
    assert str(it.masks[0]) in str(caught.value)
    return caught.value.fault


def painted(labels=LABELS):
    table = np.zeros((256, 3), np.uint8)
    table[:3] = CLASSES.colours
    table[255] = CLASSES.ignore_colours[0]
    return table[labels]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_colours_become_ids(tmp_path, mode):
    path = tmp_path / "a.png"
    picture = Image.fromarray(painted())
    picture = picture.quantize(8) if mode == "P" else picture.convert(mode)
    picture.save(path)
    with Image.open(path) as saved:
        assert saved.mode == mode
    np.testing.assert_array_equal(decode_mask(sample(path, "colours"), CLASSES), LABELS)


def test_every_ignored_colour_is_ignored(tmp_path):
    colours = painted()
    colours[0, 0] = 9
    Image.fromarray(colours).save(tmp_path / "a.png")
    mask = decode_mask(sample(tmp_path / "a.png", "colours"), CLASSES)
    assert mask[0, 0] == 255
    np.testing.assert_array_equal(mask[1], LABELS[1])


def test_unknown_colours_are_listed_with_counts_and_the_nearest_class(tmp_path):
    colours = painted()
    colours[0, 0], colours[1, 1:3] = (0, 10, 250), (0, 199, 0)
    Image.fromarray(colours).save(tmp_path / "a.png")
    fault = fault_of(sample(tmp_path / "a.png", "colours"))
    assert fault.kind == "colours"
    assert "[0, 199, 0] (2 pixels; nearest: land [0, 200, 0])" in fault.message
    assert "[0, 10, 250] (1 pixel; nearest: sea [0, 0, 255])" in fault.message
    assert sorted(fault.found) == [("[0, 10, 250]", 1), ("[0, 199, 0]", 2)]


def test_many_unknown_colours_are_cut_and_counted(tmp_path):
    colours = np.zeros((4, 4, 3), np.uint8)
    colours[..., 0] = np.arange(1, 17).reshape(4, 4)
    Image.fromarray(colours).save(tmp_path / "a.png")
    fault = fault_of(sample(tmp_path / "a.png", "colours", size=(4, 4)))
    assert "and 6 more" in fault.message
    assert len(fault.found) == 16


def test_colours_of_another_size_and_of_16_bits_are_refused(tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(painted()).save(path)
    assert fault_of(sample(path, "colours", size=(4, 2))).kind == "size"
    Image.new("I;16", (4, 2)).save(path)
    assert fault_of(sample(path, "colours")).kind == "colours"


def test_ids_are_looked_up(tmp_path):
    Image.fromarray(np.array([[7, 8], [0, 33]], np.uint8)).save(tmp_path / "a.png")
    lookup = [255] * 256
    lookup[7], lookup[8], lookup[33] = 0, 1, 2
    it = sample(tmp_path / "a.png", "index", size=(2, 2), lookup=tuple(lookup))
    assert decode_mask(it, CLASSES).tolist() == [[0, 1], [255, 2]]


# 0 and 255


def test_0_and_255_become_0_and_1(tmp_path):
    path = tmp_path / "a.png"
    two = dataclasses.replace(CLASSES, names=("no", "yes"), colours=((0, 0, 0), (1, 1, 1)))
    Image.fromarray(np.array([[0, 255], [255, 0]], np.uint8)).save(path)
    it = sample(path, "binary", size=(2, 2))
    assert decode_mask(it, two).tolist() == [[0, 1], [1, 0]]
    Image.fromarray(np.array([[False, True], [True, True]])).save(path)
    assert decode_mask(it, two).tolist() == [[0, 1], [1, 1]]


def test_0_and_255_a_class(tmp_path):
    paths = [tmp_path / f"{name}.png" for name in CLASSES.names]
    for i, path in enumerate(paths):
        Image.fromarray(np.where(i == LABELS, 255, 0).astype(np.uint8)).save(path)
    it = dataclasses.replace(sample(paths[0], "binary", "multilabel"), masks=tuple(paths))
    np.testing.assert_array_equal(
        decode_mask(it, CLASSES), [(i == LABELS).astype(np.uint8) for i in range(3)]
    )


def test_other_values_than_0_and_255_are_listed(tmp_path):
    Image.fromarray(np.array([[0, 255], [254, 7]], np.uint8)).save(tmp_path / "a.png")
    fault = fault_of(sample(tmp_path / "a.png", "binary", size=(2, 2)))
    assert fault.kind == "values"
    assert fault.found == (("7", 1), ("254", 1))


def test_0_and_255_where_0_and_1_are_meant(tmp_path):
    Image.fromarray(np.array([[0, 255, 0]], np.uint8)).save(tmp_path / "a.png")
    classes = dataclasses.replace(CLASSES, ignore_index=200)
    fault = fault_of(sample(tmp_path / "a.png", "index", size=(1, 3)), classes)
    assert fault.kind == "binary"
    assert "0 (2 pixels) and 255 (1 pixel)" in fault.message


# Stacks


@pytest.fixture
def planes():
    return np.random.default_rng(0).integers(0, 2, (3, 4, 5)).astype(np.uint8)


def save_pages(path, planes, mode="L"):
    pages = [Image.fromarray(p).convert(mode) for p in planes]
    pages[0].save(path, save_all=True, append_images=pages[1:])


@pytest.mark.parametrize("compression", [None, "tiff_lzw"])
def test_a_tiff_page_a_class(tmp_path, planes, compression):
    path = tmp_path / "a.tif"
    planes[1, 0, 0] = 255
    pages = [Image.fromarray(p) for p in planes]
    pages[0].save(path, save_all=True, append_images=pages[1:], compression=compression)
    np.testing.assert_array_equal(
        decode_mask(sample(path, "stack", "multilabel", (4, 5)), CLASSES), planes
    )


def test_one_bit_pages(tmp_path, planes):
    path = tmp_path / "a.tif"
    save_pages(path, planes * 255, "1")
    np.testing.assert_array_equal(
        decode_mask(sample(path, "stack", "multilabel", (4, 5)), CLASSES), planes
    )


@pytest.mark.parametrize("dtype", [bool, np.uint8])
def test_an_array_of_planes(tmp_path, planes, dtype):
    path = tmp_path / "a.npy"
    np.save(path, planes.astype(dtype))
    np.testing.assert_array_equal(
        decode_mask(sample(path, "stack", "multilabel", (4, 5)), CLASSES), planes
    )


@pytest.mark.parametrize("suffix", ["npy", "tif"])
def test_a_stack_of_0_and_255(tmp_path, planes, suffix):
    path = tmp_path / f"a.{suffix}"
    if suffix == "npy":
        np.save(path, planes * 255)
    else:
        save_pages(path, planes * 255)
    it = sample(path, "binary", "multilabel", (4, 5))
    np.testing.assert_array_equal(decode_mask(it, CLASSES), planes)
    # As 0 and 1, the same stack says that nothing is known where 255 is: the control.
    assert 1 not in decode_mask(sample(path, "stack", "multilabel", (4, 5)), CLASSES)


@pytest.mark.parametrize("orientation", [2, 3, 6])
def test_a_stack_whose_pages_say_that_they_lie_turned_is_refused(tmp_path, orientation):
    """Pillow would turn them on its own, and labels are never turned."""
    shape = (4, 5) if orientation < 5 else (5, 4)
    first, *others = [Image.fromarray(np.zeros(shape, np.uint8)) for _ in range(3)]
    path = tmp_path / "a.tif"
    first.save(path, save_all=True, append_images=others, tiffinfo={274: orientation})
    fault = fault_of(sample(path, "stack", "multilabel", (4, 5)))
    assert "orientation" in fault.message


@pytest.mark.parametrize(
    ("write", "kind"),
    [
        (lambda p: np.save(p, np.zeros((2, 4, 5), np.uint8)), "encoding"),
        (lambda p: np.save(p, np.zeros((4, 5, 3), np.uint8)), "encoding"),
        (lambda p: np.save(p, np.zeros((3, 4, 5), np.float32)), "encoding"),
        (lambda p: np.save(p, np.zeros((3, 5, 4), np.uint8)), "size"),
        (lambda p: np.save(p, np.full((3, 4, 5), 2, np.uint8)), "values"),
        (lambda p: np.save(p, np.array([{}], object), allow_pickle=True), "unreadable"),
        (lambda p: p.write_bytes(b"no array"), "unreadable"),
        (lambda p: savez(p), "unreadable"),
        (lambda p: p.write_bytes(forged(1 << 40)), "unreadable"),
        (lambda p: p.write_bytes(forged(1 << 80)), "unreadable"),
        (lambda p: None, "unreadable"),
    ],
)
def test_arrays_that_do_not_hold(tmp_path, write, kind):
    write(tmp_path / "a.npy")
    assert fault_of(sample(tmp_path / "a.npy", "stack", "multilabel", (4, 5))).kind == kind


def savez(path):
    with path.open("wb") as file:
        np.savez(file, a=np.zeros(3))


def forged(height):
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': (3, {height}, 5)}}".ljust(117)
    return b"\x93NUMPY\x01\x00" + bytes([118, 0]) + text.encode() + b"\n" + bytes(60)


@pytest.mark.parametrize(
    ("pages", "mode", "says"),
    [(2, "L", "2 pages"), (4, "L", "4 pages"), (3, "RGB", "mode 'RGB'"), (3, "I;16", "'I;16'")],
)
def test_pages_that_do_not_hold(tmp_path, pages, mode, says):
    images = [Image.new(mode, (5, 4)) for _ in range(pages)]
    images[0].save(tmp_path / "a.tif", save_all=True, append_images=images[1:])
    fault = fault_of(sample(tmp_path / "a.tif", "stack", "multilabel", (4, 5)))
    assert fault.kind == "encoding"
    assert says in fault.message


def test_a_page_of_another_size(tmp_path):
    images = [Image.new("L", size) for size in ((5, 4), (5, 3), (5, 4))]
    images[0].save(tmp_path / "a.tif", save_all=True, append_images=images[1:])
    assert fault_of(sample(tmp_path / "a.tif", "stack", "multilabel", (4, 5))).kind == "size"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("suffix", ["npy", "tif"])
def test_damaged_stacks_raise_nothing_but_faults(tmp_path, planes, suffix):
    path = tmp_path / f"a.{suffix}"
    if suffix == "npy":
        np.save(path, planes)
    else:
        save_pages(path, planes)
    whole = np.frombuffer(path.read_bytes(), np.uint8)
    rng = np.random.default_rng(0)
    num_refused = 0
    for _ in range(200):
        damaged = whole.copy()
        where = rng.integers(0, len(whole) - (60 if suffix == "npy" else 0), 3)
        damaged[where] = rng.integers(0, 256, 3)
        path.write_bytes(damaged[: rng.integers(5, len(whole) + 1)])
        try:
            decode_mask(sample(path, "stack", "multilabel", (4, 5)), CLASSES)
        except FaultError:
            num_refused += 1
    assert num_refused > 50
