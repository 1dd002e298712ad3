import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anysize.errors import ShapeError
from anysize.geometry import Canvas, Layout, NetGeometry, Size, check_layout, place
from anysize.planning.blocks import (
    PASS_OVERHEAD,
    STRICT,
    content_of,
    extents_of,
    one_above_other,
    side_by_side,
    slot_cost,
    take,
)

nets = st.builds(
    NetGeometry,
    output_stride=st.sampled_from([8, 16, 32]),
    pool_padding=st.sampled_from(["same", "torchvision", "caffe"]),
)
sizes = st.builds(Size, st.integers(33, 300), st.integers(33, 300))


def rounded_up(extent):
    return -(-int(extent) // 4) * 4


@given(nets, sizes, sizes)
def test_two_in_a_row_fit_where_their_extents_say_and_no_closer(net, a, b):
    extents = extents_of([a, b], net)
    _, end_h, step_w, end_w = side_by_side(
        take(extents, np.array([0])), take(extents, np.array([1]))
    )
    orders = []
    for left, right in ((a, b), (b, a)):
        cell = int(extents[2][0 if left is a else 1]) // net.output_stride
        placed = (
            place(left, net, slot=0, cell_top=0, cell_left=0),
            place(right, net, slot=0, cell_top=0, cell_left=cell),
        )
        canvas = Canvas(1, rounded_up(end_h[0]), rounded_up(max(p.left + p.width for p in placed)))
        check_layout(Layout(canvas, placed), net)
        orders.append(max(p.left + p.width for p in placed))
        closer = (placed[0], place(right, net, slot=0, cell_top=0, cell_left=cell - 1))
        with pytest.raises(ShapeError, match="closer than"):
            check_layout(Layout(canvas, closer), net)
    assert end_w[0] == min(orders)
    assert step_w[0] == extents[2].sum()


@given(nets, sizes, sizes)
def test_a_column_is_a_row_turned(net, a, b):
    turned = extents_of([Size(s.width, s.height) for s in (a, b)], net)
    straight = extents_of([a, b], net)
    zero, one = np.array([0]), np.array([1])
    row = side_by_side(take(turned, zero), take(turned, one))
    column = one_above_other(take(straight, zero), take(straight, one))
    assert [int(x[0]) for x in column] == [int(row[i][0]) for i in (2, 3, 0, 1)]


def test_overflow_costs_its_share_times_the_slope():
    canvas = Canvas(2, 100, 200)
    extents = extents_of([Size(100, 200), Size(110, 200), Size(100, 240)], NetGeometry(16, "caffe"))
    full = canvas.pixels + PASS_OVERHEAD
    assert slot_cost([extents], canvas, 5.0) == pytest.approx([full, 1.5 * full, 2 * full])
    strict = slot_cost([extents], canvas, STRICT)
    assert strict[0] == full
    assert strict[1] > 1000 * full


@pytest.mark.parametrize(
    ("slots", "num_images", "content"), [(4, 4, 1), (2, 4, 2), (1, 4, 4), (3, 4, 2), (1, 3, 4)]
)
def test_images_a_slot_are_a_power_of_two(slots, num_images, content):
    assert content_of(Canvas(slots, 8, 8), num_images) == content
