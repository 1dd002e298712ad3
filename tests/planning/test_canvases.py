import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anysize.errors import ConfigError, ShapeError
from anysize.geometry import Canvas, NetGeometry, Size, check_layout
from anysize.planning.canvases import (
    Plan,
    describe_plan,
    plan_canvases,
    plan_summary,
    worthwhile_canvases,
)
from anysize.planning.packing import pack

NET = NetGeometry(16)

sizes_of_images = st.lists(
    st.builds(Size, st.integers(1, 420), st.integers(1, 420)), min_size=1, max_size=23
)
nets = st.builds(
    NetGeometry,
    output_stride=st.sampled_from([8, 16, 32]),
    pool_padding=st.sampled_from(["same", "torchvision"]),
)


def make(sizes, **changes):
    settings = {
        "geometry": NET,
        "images_per_step": 4,
        "max_pixels_per_step": 1_048_576,
        "max_canvases": 8,
    }
    return plan_canvases(sizes, **{**settings, **changes})


def assert_packed(steps, sizes, plan):
    placed = [i for s in steps for p in s.passes for i in p.images]
    assert sorted(placed) == list(range(len(sizes)))
    assert [s.num_images for s in steps[:-1]] == [plan.images_per_step] * (len(steps) - 1)
    for step in steps:
        for p in step.passes:
            assert p.layout.canvas in plan.canvases
            assert p.layout.canvas.pixels <= plan.max_pixels_per_step
            check_layout(p.layout, plan.geometry)
            for i, placement in zip(p.images, p.layout.placements, strict=True):
                assert placement.size == sizes[i]


@settings(max_examples=12, deadline=None)
@given(sizes_of_images, nets, st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 8))
def test_any_images_are_planned_and_packed_once_each(sizes, net, images_per_step, max_canvases):
    plan = make(sizes, geometry=net, images_per_step=images_per_step, max_canvases=max_canvases)
    assert 1 <= len(plan.canvases) <= max_canvases
    assert all(type(extent) is int for canvas in plan.canvases for extent in canvas)
    assert_packed(pack(sizes, range(len(sizes))[::-1], plan), sizes, plan)


@settings(max_examples=60, deadline=None)
@given(
    sizes_of_images,
    st.sampled_from([1, 2, 3, 4, 8]),
    st.lists(
        st.builds(
            Canvas,
            st.integers(1, 4),
            st.integers(1, 100).map(lambda n: 4 * n),
            st.integers(1, 100).map(lambda n: 4 * n),
        ),
        max_size=4,
    ),
)
def test_any_plan_packs_what_fits(sizes, images_per_step, canvases):
    """Also a plan that a person wrote."""
    plan = Plan(
        geometry=NET,
        images_per_step=images_per_step,
        max_pixels_per_step=10**6,
        canvases=(*canvases, Canvas(1, 424, 424)),
    )
    assert_packed(pack(sizes, range(len(sizes)), plan), sizes, plan)


def test_the_same_images_give_the_same_plan_and_packing():
    sizes = [Size(180 + 2 * i, 390 - 2 * i) for i in range(80)]
    assert make(sizes) == make(sizes)
    plan = make(sizes)
    order = list(range(80))
    assert pack(sizes, order, plan) == pack(sizes, order, plan)
    groups = [
        {frozenset(i for p in s.passes for i in p.images) for s in pack(sizes, o, plan)}
        for o in (order, order[::-1])
    ]
    assert groups[0] != groups[1]


def test_one_size_wastes_next_to_nothing():
    sizes = [Size(375, 500)] * 40
    summary = plan_summary(make(sizes), sizes)
    assert summary["distinct_sizes"] == 1
    assert summary["passes_per_step"] == 1
    # 375 rounds up to 376; no gutters, since a slot an image is free.
    assert summary["waste"] == pytest.approx(1 - 375 / 376, abs=1e-4)


def test_a_giant_among_tiny_images_has_its_own_canvas():
    sizes = [Size(40 + i, 50) for i in range(40)] + [Size(900, 900)]
    plan = make(sizes)
    assert any(c.height >= 900 and c.width >= 900 for c in plan.canvases)
    assert plan_summary(plan, sizes[:40])["waste"] < 0.4


def test_steps_above_the_budget_are_computed_in_parts():
    sizes = [Size(300 + i, 320) for i in range(16)]
    plan = make(sizes, max_pixels_per_step=220_000)
    steps = pack(sizes, range(16), plan)
    assert_packed(steps, sizes, plan)
    assert all(len(s.passes) >= 2 for s in steps)


def test_an_image_above_the_budget_is_named_with_what_to_do():
    with pytest.raises(ShapeError, match=r"1 image \(900x800; height x width\) need canvases"):
        make([Size(100, 100), Size(900, 800)], max_pixels_per_step=500_000)


def test_must_fit_makes_room_for_larger_ones():
    plan = make([Size(100, 100)] * 8, must_fit=[Size(150, 90), Size(90, 170)])
    for size in (Size(150, 90), Size(90, 170)):
        assert any(c.height >= size.height and c.width >= size.width for c in plan.canvases)


@pytest.mark.parametrize("key", ["images_per_step", "max_pixels_per_step", "max_canvases"])
def test_limits_must_be_positive(key):
    with pytest.raises(ConfigError, match=f"plan.{key}"):
        make([Size(10, 10)], **{key: 0})


def test_no_images_is_an_error():
    with pytest.raises(ConfigError, match="no images"):
        make([])


def test_images_that_fit_no_canvas_are_named():
    plan = Plan(
        geometry=NET, images_per_step=2, max_pixels_per_step=10**6, canvases=(Canvas(1, 64, 64),)
    )
    with pytest.raises(ShapeError, match=r"1 image \(65x10; height x width\) fit on no canvas"):
        pack([Size(10, 10), Size(65, 10)], [0, 1], plan)


def test_the_description_has_the_numbers():
    sizes = [Size(375, 500)] * 20 + [Size(500, 375)] * 20
    said = describe_plan(make(sizes), sizes)
    assert said.startswith("40 images of 2 sizes -> 2 canvases, 0.3% waste, 1.00 passes a step")
    assert "MP" in said


def test_fewer_images_than_a_step_are_not_planned_for_empty_slots():
    sizes = [Size(100, 200), Size(90, 210)]
    plan = make(sizes)
    assert plan.images_per_step == 4
    assert plan_summary(plan, sizes)["waste"] < 0.2


@pytest.mark.parametrize(
    ("epochs", "on_gpu", "number"),
    [
        (1, False, 8),  # 0.01 * 10 MP / 20,000 pixels a visit is 5: never below 8.
        (4, False, 20),
        (10, False, 50),
        (100, False, 64),
        (100, True, 8),
        (5_000, True, 64),
        (500, True, 20),
    ],
)
def test_first_visits_may_take_a_hundredth_of_the_run(epochs, on_gpu, number):
    sizes = [Size(1000, 1000)] * 10
    assert worthwhile_canvases(sizes, epochs=epochs, on_gpu=on_gpu) == number


@pytest.mark.parametrize("mosaic", [True, False])
def test_a_plan_for_another_net_keeps_to_its_geometry(mosaic):
    net = NetGeometry(
        32, "none", 64, mosaic=mosaic, canvas_multiple=32, size_multiple=32, logits_per_cell=32
    )
    rng = np.random.default_rng(0)
    sizes = [Size(*map(int, rng.integers(30, 300, 2))) for _ in range(24)]
    plan = plan_canvases(
        sizes, geometry=net, images_per_step=4, max_pixels_per_step=500_000, max_canvases=4
    )
    assert all(c.height % 32 == c.width % 32 == 0 for c in plan.canvases)
    steps = pack(sizes, range(24), plan)
    layouts = [p.layout for step in steps for p in step.passes]
    assert sum(len(layout.placements) for layout in layouts) == 24
    for layout in layouts:
        check_layout(layout, net)
    shared = any(len({p.slot for p in x.placements}) < len(x.placements) for x in layouts)
    assert shared == mosaic


def test_every_canvas_meets_an_image():
    # Large images of few sizes: canvases for small ones are of no use, and 60 are far too many.
    rng = np.random.default_rng(3)
    sizes = [Size(*rng.integers((192, 282), (260, 400)).tolist()) for _ in range(48)]
    plan = make(sizes, max_canvases=60)
    shares = plan_summary(plan, sizes)["canvas_shares"]
    assert len(shares) == len(plan.canvases)
    assert min(shares) > 0


def test_a_canvas_that_only_the_largest_drawn_images_need_stays():
    plan = make([Size(60, 60)] * 16, must_fit=[Size(300, 310)])
    assert any(c.height >= 300 and c.width >= 310 for c in plan.canvases)


def test_progress_counts_every_stage_once():
    told = []
    make([Size(80 + i, 90) for i in range(12)], progress=lambda done, of: told.append((done, of)))
    assert [done for done, _ in told] == list(range(1, told[-1][1] + 1))
