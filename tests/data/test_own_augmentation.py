"""Augmentations from elsewhere: arrays in and out, the same in every run, and refused by name."""

import numpy as np
import pytest
from tests.flow.runs import assert_same_results, run

from anysize.config import AugmentConfig
from anysize.data.transforms import apply_draw, draw
from anysize.errors import ConfigError
from anysize.geometry import Size

SIZE = Size(20, 30)

MODULE = """
import numpy as np

def turned(image, mask, rng):
    if rng.random() < 0.5:
        image, mask = np.rot90(image), np.rot90(mask)
    return image, mask

def by_content(image, mask, rng):
    keep = 10 if image.any() else 12
    return image[:keep], mask[:keep]

def only_image(image, mask, rng):
    return image[:5], mask

def other_type(image, mask, rng):
    return image.astype(float), mask

def broken(image, mask, rng):
    raise KeyError("p")

number = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "own_module_for_tests.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def drawn(function, index=0, **options):
    config = AugmentConfig(mirror=False, module=f"own_module_for_tests:{function}")
    return draw(config, SIZE, seed=1, epoch=0, index=index, **options)


@pytest.mark.parametrize("classes", [0, 4], ids=["one label", "several labels"])
@pytest.mark.parametrize("channels", [3, 5])
def test_a_function_changes_image_and_mask_and_the_size_is_known_before(classes, channels):
    rng = np.random.default_rng(0)
    image = rng.integers(256, size=(*SIZE, channels), dtype=np.uint8)
    shape = (classes, *SIZE) if classes else SIZE
    mask = rng.integers(2, size=shape, dtype=np.uint8)
    sizes = set()
    for index in range(12):
        what = drawn("turned", index, num_channels=channels)
        found, labels = apply_draw(what, image, mask)
        assert found.shape == (*what.out_size, channels)
        turned = what.out_size == Size(30, 20)
        expected = np.rot90(image) if turned else image
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(labels, np.rot90(mask, axes=(-2, -1)) if turned else mask)
        sizes.add(what.out_size)
    assert sizes == {SIZE, Size(30, 20)}


def test_a_size_that_depends_on_the_pixels_is_refused():
    image = np.full((*SIZE, 3), 9, np.uint8)
    with pytest.raises(ConfigError, match="10x30 of an image of 20x30, but 12x30 of a black one"):
        apply_draw(drawn("by_content"), image, np.zeros(SIZE, np.uint8))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("only_image", "both have one size"),
        ("other_type", "Types, channels and classes must stay"),
        ("broken", "fails on an image .*KeyError"),
        ("number", "is int, not a function"),
        ("nothing", "cannot be imported"),
    ],
)
def test_what_is_no_augmentation_is_named(function, message):
    with pytest.raises(ConfigError, match=message):
        drawn(function)


def test_a_run_with_a_function_resumes_bit_for_bit(workspace):
    settings = ("augment.module=own_module_for_tests:turned", "plan.file=", "plan.max_canvases=3")
    begun = run(workspace, *settings, "optim.schedule=constant", "train.run=a")
    again = run(workspace, *settings, "train.epochs=1", "optim.schedule=constant", "train.run=b")
    resumed = run(workspace, *settings, "optim.schedule=constant", "train.run=b", resume=True)
    assert again == resumed
    assert_same_results(begun, resumed)
