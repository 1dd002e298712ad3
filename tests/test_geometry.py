import pytest
from hypothesis import given
from hypothesis import strategies as st

from anysize.errors import ShapeError
from anysize.geometry import (
    Canvas,
    Layout,
    NetGeometry,
    Placement,
    Rect,
    Size,
    ceil_div,
    check_layout,
    grid_centres,
    level_canvas,
    level_rects,
    logits_rects,
    outside,
    padded_batch,
    round_up,
    single,
    target_canvas,
    target_rect,
)

extents = st.integers(1, 700)
nets = st.builds(
    NetGeometry,
    output_stride=st.sampled_from([8, 16, 32]),
    pool_padding=st.sampled_from(["same", "torchvision"]),
)


@pytest.mark.parametrize(
    ("extent", "same", "caffe", "torchvision"),
    [(224, 0, 0, 2), (223, 0, 0, 2), (222, 2, 0, 2), (221, 2, 0, 2), (1, 2, 0, 2)],
)
def test_shift_by_class_of_extent(extent, same, caffe, torchvision):
    assert NetGeometry(16, "same").shift(extent) == same
    assert NetGeometry(16, "caffe").shift(extent) == caffe
    assert NetGeometry(16, "torchvision").shift(extent) == torchvision


def test_extents_round_up_but_for_caffes_pooling():
    assert NetGeometry(16).extents(321) == (321, 161, 81, 41, 21)
    assert NetGeometry(32).extents(1) == (1, 1, 1, 1, 1, 1)
    # Caffe gives 80 cells for 161: half of 158 rounded up, and one.
    assert NetGeometry(16, "caffe").extents(321) == (321, 161, 80, 40, 20)


def test_caffes_pooling_leaves_nothing_of_two_pixels():
    with pytest.raises(ShapeError, match="2 pixels is too small for caffe"):
        NetGeometry(16, "caffe").extents(2)


@given(nets, extents, extents)
def test_an_image_fits_its_canvas_at_every_level(net, height, width):
    layout = single(Size(height, width), net)
    check_layout(layout, net)
    for level in range(net.num_levels):
        (rect,) = level_rects(layout, net, level)
        canvas = level_canvas(layout, level)
        assert rect.top + rect.height <= canvas.height
        assert rect.left + rect.width <= canvas.width


@given(nets, extents, st.sampled_from(["grid", "full"]))
def test_targets_fit_their_canvas(net, extent, loss_at):
    layout = single(Size(extent, extent), net)
    rect = target_rect(layout.placements[0], net, loss_at)
    canvas = target_canvas(layout.canvas, net, loss_at)
    assert rect.top == rect.left == 0
    assert rect.height <= canvas.height
    centres = grid_centres(extent, net)
    assert min(centres) >= 0
    assert max(centres) < extent
    assert sorted(set(centres)) == centres


def test_grid_centres_are_those_of_the_stride_8_grid():
    assert grid_centres(30, NetGeometry(16)) == [4, 12, 20, 28]
    assert grid_centres(33, NetGeometry(16)) == [4, 12, 20, 28, 32]
    assert grid_centres(1, NetGeometry(16)) == [0]


rects = st.lists(
    st.builds(
        Rect,
        slot=st.integers(0, 1),
        top=st.integers(0, 12),
        left=st.integers(0, 12),
        height=st.integers(1, 8),
        width=st.integers(1, 8),
    ),
    max_size=5,
)


@given(rects)
def test_outside_covers_every_cell_once(inside):
    canvas = Canvas(2, 20, 20)
    counts = {}
    for r in outside(canvas, inside):
        for y in range(r.top, r.top + r.height):
            for x in range(r.left, r.left + r.width):
                counts[r.slot, y, x] = counts.get((r.slot, y, x), 0) + 1
    for slot in range(2):
        for y in range(20):
            for x in range(20):
                covered = any(
                    r.slot == slot
                    and r.top <= y < r.top + r.height
                    and r.left <= x < r.left + r.width
                    for r in inside
                )
                assert counts.get((slot, y, x), 0) == (0 if covered else 1)


@pytest.mark.parametrize(
    ("canvas", "placement", "message"),
    [
        (Canvas(1, 62, 64), Placement(0, 0, 0, 60, 64), "multiple of 4"),
        (Canvas(1, 0, 64), Placement(0, 0, 0, 60, 64), "empty"),
        (Canvas(1, 64, 64), Placement(0, 0, 16, 60, 64), "leaves the canvas"),
        (Canvas(1, 64, 64), Placement(1, 0, 0, 60, 64), "leaves the canvas"),
        (Canvas(1, 64, 64), Placement(0, 2, 0, 60, 64), "must start at a multiple of 16 plus 0"),
        (Canvas(1, 64, 64), Placement(0, 0, 0, 60, 61), "must start at a multiple of 16 plus 2"),
        (Canvas(1, 64, 64), Placement(0, 8, 0, 48, 48), "must start at"),
    ],
)
def test_a_layout_that_breaks_a_rule_is_refused(canvas, placement, message):
    with pytest.raises(ShapeError, match=message):
        check_layout(Layout(canvas, (placement,)), NetGeometry(16))


def test_gutters_are_measured_between_coarse_cells():
    net = NetGeometry(16)
    # 33 pixels take 3 cells; the next image may start at cell 5, pixel 80, and not at cell 4.
    near = Layout(Canvas(1, 64, 128), (Placement(0, 2, 2, 33, 33), Placement(0, 2, 66, 33, 33)))
    far = Layout(Canvas(1, 64, 128), (Placement(0, 2, 2, 33, 33), Placement(0, 2, 82, 33, 33)))
    with pytest.raises(ShapeError, match="closer than 2 cells of 16 pixels"):
        check_layout(near, net)
    check_layout(far, net)


def test_a_padded_batch_has_an_image_a_slot():
    net = NetGeometry(16)
    layout = padded_batch([Size(60, 64), Size(61, 30)], Canvas(2, 64, 64), net)
    assert layout.placements == (Placement(0, 0, 0, 60, 64), Placement(1, 2, 2, 61, 30))
    assert layout.valid_pixels == 60 * 64 + 61 * 30
    with pytest.raises(ShapeError, match="leaves the canvas"):
        padded_batch([Size(60, 65)], Canvas(1, 64, 64), net)


WHOLE = NetGeometry(
    32, "none", mosaic=False, canvas_multiple=32, size_multiple=32, logits_per_cell=32
)
"""As a U-Net with logits at full resolution, whose images are padded to multiples of 32."""

QUARTER = NetGeometry(32, "none", 64, canvas_multiple=32, logits_per_cell=8, logits_cover=4)
"""As a feature pyramid: logits at stride 4, of as many cells as an image has begun."""


@given(st.sampled_from([WHOLE, QUARTER]), extents, extents)
def test_other_nets_describe_themselves_too(net, height, width):
    layout = single(Size(height, width), net)
    check_layout(layout, net)
    (p,), canvas = layout.placements, layout.canvas
    assert canvas.height % 32 == canvas.width % 32 == 0
    for loss_at in ("grid", "full"):
        labels = target_canvas(canvas, net, loss_at)
        stride = net.head_stride if loss_at == "grid" else 1
        assert labels == Canvas(1, canvas.height // stride, canvas.width // stride)
        rect = target_rect(p, net, loss_at)
        assert rect == Rect(0, 0, 0, ceil_div(height, stride), ceil_div(width, stride))
    (rect,) = logits_rects(layout, net)
    if net is QUARTER:
        assert rect == target_rect(p, net, "grid")
    else:
        assert rect == Rect(0, 0, 0, round_up(height, 32), round_up(width, 32))


def test_a_net_for_one_image_per_slot_refuses_a_mosaic():
    two = Layout(Canvas(1, 32, 256), (Placement(0, 0, 0, 32, 32), Placement(0, 0, 192, 32, 32)))
    with pytest.raises(ShapeError, match="takes one image per slot"):
        check_layout(two, WHOLE)
    check_layout(two, QUARTER)
