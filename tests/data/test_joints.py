"""Targets of joints by the golden values of pose-tensorflow, and against its loops as written."""

import math

import numpy as np
import pytest

from anysize.data.joints import LOCATION_STDEV, joint_targets
from anysize.geometry import NetGeometry, Size

GEOMETRY = NetGeometry(16)


def targets(joints, size=(32, 32), maps="discs", radius=17.0):
    joints = np.array(joints, float).reshape(-1, *np.shape(joints)[-2:])
    return joint_targets(joints, Size(*size), GEOMETRY, maps=maps, radius=radius, ignore_index=255)


@pytest.mark.parametrize(
    ("joint", "cells", "first"),
    [
        ((10, 10), [(r, c) for r in range(3) for c in range(3)], 0.8242),
        ((0, 0), [(0, 0), (0, 1), (1, 0), (1, 1)], -0.5494),
        ((31, 5), [(0, 2), (0, 3), (1, 2), (1, 3), (2, 3)], None),
    ],
)
def test_golden_values(joint, cells, first):
    score, x, y = targets([[joint]])
    assert [tuple(map(int, cell)) for cell in np.argwhere(score)] == cells
    assert ((x != 255) == (score == 1)).all()
    assert ((y != 255) == (score == 1)).all()
    if first:
        assert x[0, 0] == pytest.approx(first, abs=5e-5)


def test_the_map_covers_whole_cells_of_the_body():
    assert targets([[(3, 3)]], (33, 49)).shape == (3, 6, 8)  # 2 * ceil(extent / 16)


def as_the_original_loops(people, size, radius):
    """`compute_target_part_scoremap` of pose-tensorflow, with its two compared distances."""
    height, width = (2 * math.ceil(extent / 16) for extent in size)
    num_joints = people.shape[1]
    scores = np.zeros((height, width, num_joints))
    located = np.zeros((height, width, 2 * num_joints))
    for person in people:
        for j, (x, y) in enumerate(person):
            if math.isnan(x):
                continue
            for r in range(height):
                for c in range(width):
                    dx, dy = x - (8 * c + 4), y - (8 * r + 4)
                    squared = dx**2 + dy**2
                    if squared > radius**2:
                        continue
                    before = (located[r, c, 2 * j : 2 * j + 2] ** 2).sum()
                    if scores[r, c, j] == 0 or before > squared / LOCATION_STDEV**2:
                        located[r, c, 2 * j : 2 * j + 2] = dx / LOCATION_STDEV, dy / LOCATION_STDEV
                    scores[r, c, j] = 1
    return scores.transpose(2, 0, 1), located.transpose(2, 0, 1)


def test_several_people_and_scales_are_as_in_the_original():
    rng = np.random.default_rng(4)
    size = Size(75, 131)
    people = rng.uniform(-10, 140, (4, 5, 2))
    people[1, 2] = people[3] = math.nan
    radius = 17 * 0.87
    found = targets(people, size, radius=radius)
    scores, located = as_the_original_loops(people, size, radius)
    np.testing.assert_array_equal(found[:5], scores)
    near = np.repeat(scores == 1, 2, axis=0)
    np.testing.assert_allclose(found[5:][near], located[near], rtol=1e-6)
    assert (found[5:][~near] == 255).all()
    assert 0 < near.sum() < near.size


def test_gaussians_are_those_of_deeplabcut():
    people = [[(20.0, 30.0)], [(90.0, 10.0)]]
    score, x, _ = targets(people, (64, 96), maps="gaussians")
    grid = np.mgrid[:8, :12].transpose(1, 2, 0) * 8 + 4.0
    expected = np.zeros((8, 12))
    for ((px, py),) in people:
        squared = ((grid - (py, px)) ** 2).sum(2)
        expected = np.maximum(expected, np.exp(-squared / (2 * (2 * 17 / 3) ** 2)))
    np.testing.assert_allclose(score, expected, rtol=1e-6)
    assert ((x != 255) == (targets(people, (64, 96))[0] == 1)).all()


def test_no_person_is_a_target_of_zeros():
    score, *located = targets(np.zeros((0, 1, 2)))
    assert not score.any()
    assert (np.array(located) == 255).all()
