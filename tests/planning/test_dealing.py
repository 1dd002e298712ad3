"""A step dealt among ranks: every image once, in its place, and about the same work for each."""

import functools
import statistics

import numpy as np
import pytest

from anysize.geometry import Canvas, NetGeometry, Size, check_layout
from anysize.planning.dealing import deal, deal_in_lockstep
from anysize.planning.packing import Plan, Step, cost_of, pack

GEOMETRY = NetGeometry(16)
CANVASES = (
    Canvas(1, 512, 512),
    Canvas(2, 352, 512),
    Canvas(2, 512, 256),
    Canvas(4, 256, 384),
    Canvas(4, 352, 256),
    Canvas(4, 192, 192),
)
DEALING = {"frozen": deal, "trained": deal_in_lockstep}


@functools.cache
def sizes_and_steps(num_sizes=200, per_step=16):
    rng = np.random.default_rng(1)
    large, small = (
        rng.integers(300, 500, (num_sizes // 2, 2)),
        rng.integers(90, 190, (num_sizes, 2)),
    )
    sizes = [Size(*map(int, s)) for s in (*large, *small[: num_sizes - len(large)])] * 2
    plan = Plan(
        geometry=GEOMETRY,
        images_per_step=per_step,
        max_pixels_per_step=1 << 20,
        canvases=CANVASES,
    )
    return sizes, pack(sizes, rng.permutation(len(sizes)).tolist(), plan)


@pytest.mark.parametrize("norms", DEALING)
@pytest.mark.parametrize("num_ranks", [1, 3, 8, 40])
def test_every_image_is_computed_once_and_lies_as_the_net_demands(norms, num_ranks):
    sizes, steps = sizes_and_steps(60)
    for step in steps:
        dealt = DEALING[norms](step, num_ranks, GEOMETRY)
        assert len(dealt) == num_ranks
        found = [i for own in dealt for p in own.passes for i in p.images]
        assert sorted(found) == sorted(i for p in step.passes for i in p.images)
        for own in dealt:
            assert norms == "frozen" or len(own.passes) == len(step.passes)
            for number, p in enumerate(own.passes):
                check_layout(p.layout, GEOMETRY)
                assert [x.size for x in p.layout.placements] == [sizes[i] for i in p.images]
                if norms == "trained":  # Whose statistics are of the images of one pass.
                    assert set(p.images) <= set(step.passes[number].images)


def p90_to_median(dealt):
    ratios = []
    for step in dealt:
        work = [cost_of(own.passes) for own in step]
        ratios += [w / statistics.median(work) for w in work]
    return float(np.quantile(ratios, 0.9))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_have_about_the_same_work(num_ranks):
    _, steps = sizes_and_steps()
    assert p90_to_median([deal(s, num_ranks, GEOMETRY) for s in steps]) <= 1.10
    passes = [p for step in steps for p in step.passes]
    mixed = np.random.default_rng(0).permutation(len(passes)).tolist()
    in_turn = [
        [Step((passes[i],)) for i in mixed[first : first + num_ranks]]
        for first in range(0, len(mixed) - num_ranks, num_ranks)
    ]
    assert p90_to_median(in_turn) > 1.10  # Passes dealt as they come would be seen.
