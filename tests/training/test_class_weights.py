"""Class weights from masks: by hand, and in a run that may be resumed."""

import numpy as np
import pytest
from PIL import Image
from tests.flow.runs import run

from anysize.config import LossConfig, load_config
from anysize.data.samples import find_samples, read_classes
from anysize.errors import ConfigError
from anysize.training.class_weights import median_frequency_weights
from anysize.training.losses import build_loss


def test_median_frequencies_by_hand(workspace):
    root = workspace / "data"
    classes = read_classes(root / "classes.toml")
    for path in (root / "images").iterdir():
        if path.stem > "s01":
            path.unlink()
            (root / "masks" / path.name).unlink()
    for stem, top in (("s00", [0, 1]), ("s01", [0, 255])):
        mask = np.full((37 if stem == "s00" else 40, 81 if stem == "s00" else 77), top[0], np.uint8)
        mask[:10] = top[1]
        Image.fromarray(mask).save(root / "masks" / f"{stem}.png")
    # 37 x 81 and 40 x 77 pixels. Class 1 is in the first image only, class 2 in none.
    first, second = 27 * 81, 30 * 77
    frequencies = [(first + second) / (37 * 81 + second), 10 / 37]
    median = sum(frequencies) / 2
    samples = find_samples(root, classes, "multiclass")
    found = median_frequency_weights(samples, classes, num_threads=2)
    assert found == pytest.approx([median / frequencies[0], median / frequencies[1], 1], rel=1e-3)


def test_a_run_with_weights_from_its_masks_writes_them_down_and_resumes(workspace):
    folder = run(workspace, "loss.class_weights=auto", "train.epochs=1")
    weights = load_config(folder / "run.toml").loss.class_weights
    assert len(weights) == 3
    assert weights[2] > weights[0], "stripes are rarer than ground"
    again = run(workspace, "loss.class_weights=auto", "train.epochs=2", resume=True)
    assert load_config(again / "run.toml").loss.class_weights == weights


@pytest.mark.parametrize("value", ["often", "3", "[1.0, -1.0]"])
def test_what_is_neither_weights_nor_auto_is_refused(workspace, value):
    with pytest.raises(ConfigError, match=r"loss\.class_weights"):
        run(workspace, f"loss.class_weights={value}")


@pytest.mark.parametrize("settings", [{"focal_gamma": 2.0}, {"dice_share": 0.5}])
def test_losses_of_pixels_are_refused_for_joints(settings):
    with pytest.raises(ConfigError, match=r'`loss\.kind` is "pose"'):
        build_loss(LossConfig(kind="pose", **settings), 255)


def test_focal_beside_nothing_but_dice_is_refused(workspace):
    with pytest.raises(ConfigError, match=r"loss\.focal_gamma"):
        run(workspace, "loss.focal_gamma=2", "loss.dice_share=1")
