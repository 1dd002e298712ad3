import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anysize.config import AugmentConfig
from anysize.data.transforms import (
    Draw,
    apply_draw,
    draw,
    draw_image,
    draw_joints,
    largest_size,
    no_augmentation,
)
from anysize.geometry import Rect, Size

ALL = AugmentConfig(
    min_scale=0.5,
    max_scale=2.0,
    brightness=0.2,
    contrast=0.3,
    saturation=0.4,
    crop=(20, 30),
)


def noise(size: Size, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
    return image, rng.integers(0, 3, size, dtype=np.uint8)


def geometric(scaled: Size, *, crop: Rect | None = None, mirror: bool = False) -> Draw:
    return dataclasses.replace(no_augmentation(scaled), crop=crop, mirror=mirror)


sizes = st.builds(Size, st.integers(1, 60), st.integers(1, 60))


@given(size=sizes, seed=st.integers(0, 99), epoch=st.integers(0, 9), index=st.integers(0, 99))
def test_a_draw_holds_to_its_settings(size, seed, epoch, index):
    drawn = draw(ALL, size, seed=seed, epoch=epoch, index=index)
    for extent, scaled in zip(size, drawn.scaled, strict=True):
        assert max(1, round(0.5 * extent)) <= scaled <= round(2 * extent)
    if drawn.crop is None:
        assert drawn.out_size == drawn.scaled
        assert drawn.scaled.height <= 20
        assert drawn.scaled.width <= 30
    else:
        assert drawn.out_size == Size(min(drawn.scaled.height, 20), min(drawn.scaled.width, 30))
        assert 0 <= drawn.crop.top <= drawn.scaled.height - drawn.crop.height
        assert 0 <= drawn.crop.left <= drawn.scaled.width - drawn.crop.width
    assert 0.8 <= drawn.brightness <= 1.2
    assert 0.7 <= drawn.contrast <= 1.3
    assert 0.6 <= drawn.saturation <= 1.4


def test_a_draw_is_a_pure_function_of_seed_epoch_and_index():
    def drawn(seed, epoch, index):
        return draw(ALL, Size(40, 50), seed=seed, epoch=epoch, index=index)

    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    assert len({drawn(*key) for key in keys}) == 4
    assert [drawn(*key) for key in keys] == [drawn(*key) for key in keys]


def test_one_setting_does_not_change_another():
    plain = dataclasses.replace(ALL, mirror=False, brightness=0.0, crop=())
    for index in range(20):
        a = draw(ALL, Size(40, 50), seed=0, epoch=0, index=index)
        b = draw(plain, Size(40, 50), seed=0, epoch=0, index=index)
        assert (a.scaled, a.contrast, a.saturation) == (b.scaled, b.contrast, b.saturation)
        assert (b.mirror, b.brightness, b.crop) == (False, 1.0, None)


def test_draws_do_not_follow_the_random_numbers_of_the_order():
    # numpy fills a short seed up with zeros, so image 0 would draw what shuffles the epoch.
    config = AugmentConfig(min_scale=1.0, max_scale=2.0)
    scaled = draw(config, Size(10**6, 1), seed=5, epoch=3, index=0).scaled
    order = np.random.default_rng((5, 3)).random()
    assert abs(np.log2(scaled.height / 10**6) - order) > 0.01


def test_scale_is_log_uniform_and_half_are_mirrored():
    drawn = [draw(ALL, Size(1000, 1000), seed=0, epoch=0, index=i) for i in range(400)]
    below = sum(d.scaled.height < 1000 for d in drawn) / 400
    assert 0.42 < below < 0.58  # uniform factors would give 0.33
    assert 0.42 < sum(d.mirror for d in drawn) / 400 < 0.58
    assert len({d.crop.top for d in drawn if d.crop}) > 200


def test_everything_off_leaves_image_and_mask_alone():
    off = AugmentConfig(mirror=False)
    size = Size(7, 9)
    assert draw(off, size, seed=0, epoch=0, index=0) == no_augmentation(size)
    image, mask = noise(size)
    out_image, out_mask = apply_draw(no_augmentation(size), image, mask)
    np.testing.assert_array_equal(out_image, image)
    np.testing.assert_array_equal(out_mask, mask)


@given(size=sizes, index=st.integers(0, 99), crop=st.sampled_from([(), (20, 30)]))
def test_no_draw_exceeds_the_largest_size(size, index, crop):
    config = AugmentConfig(min_scale=1.1, max_scale=1.1, crop=crop)
    largest = largest_size(config, size)
    # With equal bounds every draw is the largest.
    assert draw(config, size, seed=0, epoch=0, index=index).out_size == largest
    config = dataclasses.replace(config, min_scale=0.4)
    out = draw(config, size, seed=0, epoch=0, index=index).out_size
    assert out.height <= largest.height
    assert out.width <= largest.width


def test_rounding_of_the_logarithm_does_not_move_the_bounds():
    # exp(log(2.95)) is below 2.95, which would make 29 of 29.5 instead of 30.
    config = AugmentConfig(min_scale=2.95, max_scale=2.95)
    size = Size(10, 10)
    assert draw(config, size, seed=0, epoch=0, index=0).scaled == largest_size(config, size)


@given(size=sizes, mirror=st.booleans(), data=st.data())
def test_crop_and_mirror_take_the_same_pixels_of_image_and_mask(size, mirror, data):
    height = data.draw(st.integers(1, size.height))
    width = data.draw(st.integers(1, size.width))
    top = data.draw(st.integers(0, size.height - height))
    left = data.draw(st.integers(0, size.width - width))
    drawn = geometric(size, crop=Rect(0, top, left, height, width), mirror=mirror)
    _, mask = noise(size)
    image, out = apply_draw(drawn, np.repeat(mask[..., None], 3, axis=2), mask)
    assert out.shape == drawn.out_size
    np.testing.assert_array_equal(image[..., 1], out)
    step = -1 if mirror else 1
    np.testing.assert_array_equal(out, mask[top : top + height, left : left + width][:, ::step])


@given(
    extent=st.integers(20, 60),
    scaled=st.integers(10, 120),
    edge=st.integers(8, 12),
    axis=st.sampled_from([0, 1]),
    mirror=st.booleans(),
)
def test_an_edge_stays_at_the_same_place_in_image_and_mask_when_scaled(
    extent, scaled, edge, axis, mirror
):
    line = (np.arange(extent) >= edge).astype(np.uint8)
    mask = np.tile(line, (5, 1)) if axis else np.tile(line[:, None], (1, 5))
    image = np.repeat(mask[..., None] * 255, 3, axis=2)
    target = Size(5, scaled) if axis else Size(scaled, 5)
    image, mask = apply_draw(geometric(target, mirror=mirror), image, mask)
    grey = image[..., 0].astype(int)
    # A pixel whose centre lies on the edge itself is half of each, and may go either way.
    decided = abs(grey - 127.5) > 4
    assert decided.mean() > 0.8
    np.testing.assert_array_equal((grey > 127)[decided], mask[decided] == 1)


def test_a_multi_label_mask_moves_as_a_whole_and_keeps_its_order():
    image, mask = noise(Size(12, 10))
    planes = np.stack([mask == i for i in range(3)]).astype(np.uint8)
    drawn = geometric(Size(18, 17), crop=Rect(0, 2, 3, 9, 8), mirror=True)
    _, out = apply_draw(drawn, image, mask)
    _, out_planes = apply_draw(drawn, image, planes)
    np.testing.assert_array_equal(out_planes, np.stack([out == i for i in range(3)]))


def test_shrinking_antialiases_the_image_and_invents_no_label():
    stripes = np.tile(np.array([0, 2], np.uint8), (8, 32))
    image = np.repeat(stripes[..., None] * 100, 3, axis=2)
    out, mask = apply_draw(geometric(Size(8, 16)), image, stripes)
    assert abs(out[:, 2:-2].astype(int) - 100).max() < 15
    assert set(np.unique(mask)) <= {0, 2}


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_colour_changes_the_image_only(name):
    image, mask = noise(Size(20, 20))
    drawn = dataclasses.replace(no_augmentation(Size(20, 20)), **{name: 0.5})
    out, out_mask = apply_draw(drawn, image, mask)
    np.testing.assert_array_equal(out_mask, mask)
    before, after = image.astype(float), out.astype(float)
    if name == "brightness":
        assert abs(after.mean() / before.mean() - 0.5) < 0.01
    elif name == "contrast":
        assert abs(after.mean() - before.mean()) < 2
        assert abs(after.std() / before.std() - 0.5) < 0.01
    else:
        assert abs(np.ptp(after, axis=2).mean() / np.ptp(before, axis=2).mean() - 0.5) < 0.01


# Images that Pillow has no mode for


DRAWN = draw(
    AugmentConfig(
        min_scale=0.6, max_scale=1.6, brightness=0.4, contrast=0.4, saturation=0.4, crop=(20, 30)
    ),
    Size(24, 36),
    seed=5,
    epoch=0,
    index=1,
)


@pytest.mark.parametrize("change", ["none", "all"])
def test_16_bits_are_drawn_like_8(change):
    image, mask = noise(Size(24, 36))
    drawn = DRAWN if change == "all" else no_augmentation(Size(24, 36))
    eight, labels = apply_draw(drawn, image, mask)
    sixteen, same = apply_draw(drawn, image.astype(np.uint16) * 257, mask)
    assert sixteen.dtype == np.uint16
    assert sixteen.max() > 255
    np.testing.assert_array_equal(labels, same)
    # Pillow rounds 8 bits after each of four changes.
    assert np.abs(sixteen / 257 - eight).max() < (4 if change == "all" else 1e-9)
    assert eight.shape == (*drawn.out_size, 3)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_each_of_many_bands_moves_like_the_mask(dtype):
    rng = np.random.default_rng(0)
    bands = rng.integers(0, 200, (24, 36, 5)).astype(dtype)
    drawn = geometric(Size(24, 36), crop=Rect(0, 3, 5, 10, 20), mirror=True)
    image, mask = apply_draw(drawn, bands, bands[..., 0].astype(np.uint8))
    np.testing.assert_array_equal(image, bands[3:13, 5:25][:, ::-1])
    np.testing.assert_array_equal(image[..., 0], mask)


def test_colour_of_many_bands():
    """Contrast is about the mean of all bands; saturation has no meaning and is left alone."""
    bands = np.random.default_rng(0).integers(1000, 3000, (8, 9, 5)).astype(np.uint16)
    plain = no_augmentation(Size(8, 9))
    mask = np.zeros((8, 9), np.uint8)
    image, _ = apply_draw(dataclasses.replace(plain, brightness=1.5), bands, mask)
    np.testing.assert_array_equal(image, np.rint(bands * 1.5))
    image, _ = apply_draw(dataclasses.replace(plain, contrast=0.5), bands, mask)
    np.testing.assert_allclose(image, bands.mean() + (bands - bands.mean()) / 2, atol=1)
    image, _ = apply_draw(dataclasses.replace(plain, saturation=0.0), bands, mask)
    np.testing.assert_array_equal(image, bands)
    image, _ = apply_draw(dataclasses.replace(plain, brightness=100.0), bands, mask)
    assert image.max() == 65535


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("crop", [None, Rect(0, 3, 5, 20, 31)])
def test_joints_stay_on_their_pixels_and_pairs_swap(crop, mirror):
    """A bright pixel for each joint, which is there after the same was done to the image."""
    size = Size(30, 41)
    joints = np.array([[(8.0, 7.0), (30.0, 11.0), (20.0, 5.0)]])
    drawn = geometric(size, crop=crop, mirror=mirror)
    image = np.zeros((*size, 3), np.uint8)
    for j, (x, y) in enumerate(joints[0]):
        image[int(y), int(x)] = 50 * (j + 1)
    moved = draw_joints(drawn, joints, size, pairs=((0, 1),))[0]
    after = draw_image(drawn, image)
    values = [int(after[int(y), int(x), 0]) for x, y in moved]
    assert values == ([100, 50, 150] if mirror else [50, 100, 150])
    assert joints[0, 0].tolist() == [8.0, 7.0]  # The samples' own are left alone.


def test_scaled_joints_are_those_of_pose_tensorflow():
    size, joints = Size(101, 83), np.array([[(10.0, 20.0), (np.nan, np.nan)]])
    config = AugmentConfig(min_scale=0.87, max_scale=0.87)
    drawn = draw(config, size, seed=0, epoch=0, index=0)
    plain = dataclasses.replace(drawn, mirror=False)
    found = draw_joints(plain, joints, size, ())
    np.testing.assert_allclose(found[0, 0], (8.7, 17.4))
    assert np.isnan(found[0, 1]).all()
    found = draw_joints(dataclasses.replace(drawn, mirror=True), joints, size, ())
    np.testing.assert_allclose(found[0, 0], (0.87 * (83 - 10 - 1), 17.4))
