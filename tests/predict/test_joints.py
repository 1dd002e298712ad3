"""Joints from maps, and their metrics by hand."""

import math

import numpy as np
import pytest
import torch
from tests.predict.nets import tiny_model

from anysize.config import PixelConvention
from anysize.data.classes import Classes, JointLinks
from anysize.data.joints import joint_targets
from anysize.geometry import NetGeometry, Size
from anysize.predict.joints import (
    JointScores,
    add_joints,
    all_joints,
    best_joints,
    joint_metrics,
    joints_table,
)
from anysize.predict.tiles import predict_cells

GEOMETRY = NetGeometry(16)
SIZE = Size(160, 200)
CLASSES = Classes(names=("a", "b"), colours=((1, 2, 3), (4, 5, 6)), links=JointLinks(head=(0, 1)))


def perfect(joints, maps="discs"):
    """The logits of a net that gives exactly what is wanted."""
    joints = np.array(joints, float)
    cells = joint_targets(joints, SIZE, GEOMETRY, maps=maps, radius=17, ignore_index=0)
    if maps == "discs":  # Nearer cells are surer, else the first of equals would do.
        near = joint_targets(joints, SIZE, GEOMETRY, maps="gaussians", radius=17, ignore_index=0)
        cells[: joints.shape[1]] = 20 * near[: joints.shape[1]] - 10
    return cells


@pytest.mark.parametrize("maps", ["discs", "gaussians"])
def test_a_joint_is_where_the_targets_say(maps):
    truth = [[(33.25, 71.5), (150.0, 9.75)]]
    found = best_joints(perfect(truth, maps), 8, maps)
    np.testing.assert_allclose(found[:, :2], truth[0], atol=1e-4)
    assert (found[:, 2] > 0.7).all()


def test_confidence_is_the_sigmoid_or_the_clipped_score():
    cells = np.zeros((3, 2, 2), np.float32)
    cells[0, 1, 1] = math.log(3)
    assert best_joints(cells, 8, "discs")[0] == pytest.approx([12, 12, 0.75])
    assert best_joints(cells, 8, "gaussians")[0, 2] == 1.0


def test_several_people_are_peaks_that_are_apart():
    truth = [[(30, 30), (30, 130)], [(100, 40), (math.nan, math.nan)]]
    first, second = all_joints(perfect(truth), 8, "discs")
    assert sorted(map(tuple, np.round(first[:, :2], 3).tolist())) == [(30, 30), (100, 40)]
    np.testing.assert_allclose(second[:, :2], [(30, 130)], atol=1e-4)
    near = [[(30, 30), (30, 130)], [(60, 40), (30, 130)]]  # Less than five cells.
    assert len(all_joints(perfect(near), 8, "discs")[0]) == 1


def scored(truth, found):
    scores = JointScores()
    for of_image, there in zip(truth, found, strict=True):
        add_joints(scores, np.array(of_image, float), perfect(there), CLASSES, 8, "discs")
    return joint_metrics(scores, CLASSES.names)


def test_metrics_by_hand():
    # The box's longer side and the head are 100 pixels; joint b is off by 4, 10.5 and 60.
    truth = [[[(20, 20), (120, 20)]]] * 3
    found = [[[(20, 20), (124, 20)]], [[(20, 20), (120, 30.5)]], [[(20, 26), (180, 20)]]]
    result = scored(truth, found)
    assert result["pck_at"]["0.05"] == pytest.approx({"a": 2 / 3, "b": 1 / 3, "mean": 0.5})
    assert result["pck"] == pytest.approx({"a": 1.0, "b": 1 / 3})
    assert result["mean_pck"] == pytest.approx(2 / 3)
    assert result["pck_at"]["0.2"]["b"] == pytest.approx(2 / 3)
    assert result["pckh"] == pytest.approx({"a": 1.0, "b": 2 / 3, "mean": 5 / 6})
    assert result["error_pixels"] == pytest.approx({"a": 2.0, "b": 74.5 / 3, "mean": 80.5 / 6})
    assert "66.7" in joints_table(result)


def test_a_joint_that_is_never_labelled_counts_nowhere():
    result = scored([[[(20, 20), (math.nan, math.nan)]]], [[[(20, 20), (120, 20)]]])
    assert result["pck"] == {"a": 1.0, "b": None}
    assert result["mean_pck"] == 1.0
    assert result["pckh"] is None
    assert result["num_joints"] == 1


def test_of_several_people_each_gets_the_nearest_peak_and_the_rest_are_missed():
    truth = [[[(20, 20), (20, 120)], [(150, 20), (150, 120)]]]
    found = [[[(150, 21), (20, 120)]]]
    result = scored(truth, found)
    assert result["pck"] == {"a": 0.5, "b": 0.5}
    assert result["error_pixels"]["a"] == pytest.approx(1.0, abs=1e-3)


def test_cells_in_tiles_are_those_of_the_whole_inside():
    net = tiny_model()[0]
    image = np.random.default_rng(2).integers(0, 256, (250, 430, 3), dtype=np.uint8)
    whole = predict_cells(net, image, PixelConvention())
    tiled = predict_cells(net, image, PixelConvention(), max_pixels=60_000)
    assert whole.shape == tiled.shape == (3, 32, 54)
    off = (whole - tiled).abs().amax(0) / whole.abs().max()
    assert float(off.median()) < 1e-5
    assert float(off[:4, :4].max()) < 1e-5
    assert float(off[-4:, -4:].max()) < 1e-5
    assert torch.isfinite(tiled).all()
