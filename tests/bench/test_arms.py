"""What a step of each policy is."""

import itertools

import pytest

from anysize.bench.arms import ON_CANVASES, Arm, WorkPlan, arms_of, shapes_of
from anysize.bench.sizes import SizeSets, draw_sizes, folder_sizes, size_sets
from anysize.errors import ConfigError, DataError
from anysize.geometry import NetGeometry, Size, check_layout

SIZES = draw_sizes(23, (0.001, 0.004), seed=3)
NATIVE = ("plain", "plain batch 1", "plain tuned", "compile dynamic", "tf_slim")


@pytest.fixture(scope="module")
def plan():
    return WorkPlan(size_sets(SIZES), NetGeometry(), 4, full=True, on_gpu=False)


def images_of(turn):
    return sorted(p.size for step in turn for layout in step for p in layout.placements)


def test_sizes_are_distinct_and_within_their_range():
    sizes = draw_sizes(200, (0.03, 0.3))
    assert len(set(sizes)) == 200
    assert all(30_000 <= s.pixels <= 300_000 for s in sizes)
    assert all(1 / 2 <= s.height / s.width <= 2 for s in sizes)
    assert sizes == draw_sizes(200, (0.03, 0.3))
    # Uniform areas, and as many upright as wide ones.
    assert 0.15 < sum(s.pixels for s in sizes) / 200 / 1e6 < 0.18
    assert 80 < sum(s.height > s.width for s in sizes) < 120


def test_rounding_to_whole_pixels_keeps_the_range():
    sizes = draw_sizes(50, (0.0002, 0.0003))
    assert all(200 <= s.pixels <= 300 for s in sizes)
    assert all(1 / 2 <= s.height / s.width <= 2 for s in sizes)


def test_more_sizes_than_there_are_is_a_message():
    with pytest.raises(ConfigError, match="hardly 50 different sizes"):
        draw_sizes(50, (0.000_01, 0.000_02))


def test_the_three_sets_have_about_the_same_pixels():
    sets = size_sets(draw_sizes(200, (0.03, 0.3)))
    mean = sum(s.pixels for s in sets.all) / 200
    assert sets.one.pixels == pytest.approx(mean, rel=0.05)
    assert sets.one.height % 16 == sets.one.width % 16 == 0
    assert len(set(sets.ten)) == 10
    assert sum(s.pixels for s in sets.ten) / 10 == pytest.approx(mean, rel=0.05)


def test_fewer_than_ten_sizes_are_as_many_as_there_are():
    assert size_sets([Size(40, 40)] * 8).ten == (Size(40, 40),)
    assert size_sets([Size(3, 2)]) == SizeSets(Size(16, 16), (Size(3, 2),), (Size(3, 2),))


def test_sizes_come_from_a_folder_of_images(write_images):
    sizes = [Size(30, 50), Size(41, 33), Size(52, 26)]
    folder = write_images(sizes)
    assert folder_sizes(folder, 10) == sizes
    assert len(folder_sizes(folder, 2)) == 2


def test_a_folder_without_images_is_named(tmp_path):
    with pytest.raises(DataError, match=str(tmp_path)):
        folder_sizes(tmp_path, 10)


@pytest.mark.parametrize("arm", arms_of("bf16", full=True, tuning=True, peers=True), ids=str)
def test_every_arm_has_turns_of_four_images(plan, arm):
    work = plan.work(arm.policy, arm.sizes)
    assert len(work.turns) == 5
    assert all(len(images_of(turn)) == 4 for turn in work.turns)


@pytest.mark.parametrize("sizes", ["ten", "all"])
def test_the_arms_share_the_images_of_a_turn(plan, sizes):
    of_mosaic = [images_of(t) for t in plan.work("mosaic", sizes).turns]
    for policy in ("plain", "plain batch 1", "exact canvas", "mosaic without masks", "tf_slim"):
        assert [images_of(t) for t in plan.work(policy, sizes).turns] == of_mosaic
    padded = [images_of(t) for t in plan.work("pad to batch maximum", sizes).turns]
    assert padded != of_mosaic
    assert set(itertools.chain(*padded)) <= set(plan.images[sizes])


@pytest.mark.parametrize("policy", NATIVE)
def test_plain_policies_take_images_at_their_own_size(plan, policy):
    for turn in plan.work(policy, "all").turns:
        for layout in itertools.chain(*turn):
            assert layout.canvas == (1, *layout.placements[0].size)


def test_steps_are_of_one_image_or_of_four(plan):
    assert [len(turn) for turn in plan.work("plain batch 1", "all").turns] == [4] * 5
    assert [len(turn) for turn in plan.work("plain", "all").turns] == [1] * 5
    (step,) = plan.work("plain", "one").turns[0]
    (layout,) = step
    assert layout.canvas == (4, *plan.sets.one)
    assert layout.valid_pixels == layout.canvas.pixels


def test_padding_goes_to_the_largest_of_the_batch_and_not_further(plan):
    for ((layout,),) in plan.work("pad to batch maximum", "all").turns:
        assert layout.canvas.slots == 4
        assert layout.canvas.height == max(p.height for p in layout.placements)
        assert layout.canvas.width == max(p.width for p in layout.placements)


@pytest.mark.parametrize("policy", ON_CANVASES)
@pytest.mark.parametrize("sizes", ["one", "ten", "all"])
def test_layouts_of_the_product_keep_the_rules_of_exact_padding(plan, policy, sizes):
    work = plan.work(policy, sizes)
    for layout in (layout for turn in (*work.visits, *work.turns) for s in turn for layout in s):
        check_layout(layout, plan.geometry)


def test_exact_canvases_hold_one_image_each(plan):
    layouts = [lay for t in plan.work("exact canvas", "all").turns for s in t for lay in s]
    assert all(len(layout.placements) == layout.canvas.slots == 1 for layout in layouts)
    assert len({layout.canvas for layout in layouts}) < len({lay.placements for lay in layouts})


@pytest.mark.parametrize("arm", arms_of("bf16", full=True, tuning=False, peers=True), ids=str)
def test_shapes_that_come_again_are_visited_before_the_rounds(plan, arm):
    work = plan.work(arm.policy, arm.sizes)
    visited = set().union(*map(shapes_of, work.visits))
    of_turns = set().union(*map(shapes_of, work.turns))
    if arm.policy in ON_CANVASES or (arm.sizes != "all" and arm.policy != "pad to batch maximum"):
        assert of_turns <= visited
    else:
        assert not of_turns & visited


def test_an_arm_is_named_by_what_it_is():
    names = [a.name for a in arms_of("bf16", full=False, tuning=False, peers=True)]
    assert len(set(names)) == len(names)
    assert Arm("mosaic", "all", "float32", is_twin=True).name == "mosaic float32, all sizes"
    assert "mosaic float32, all sizes" not in [
        a.name for a in arms_of("float32", full=False, tuning=False, peers=True)
    ]
    assert not any("tuned" in name or "slim" in name for name in names[:10])
