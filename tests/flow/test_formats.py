"""Runs on images of other channels and bits, from training to prediction."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from tests.data.files import write_png16, write_tiff

from anysize.device import select_device
from anysize.models.weights_file import load_weights
from anysize.predict.evaluate import evaluate_run
from anysize.predict.files import predict_files
from anysize.training.run import train

QUIET = Console(quiet=True)
ONE_EPOCH = ["train.epochs=1", "train.log_every=1"]


def losses(run: Path) -> list[float]:
    lines = (run / "events.jsonl").read_text().splitlines()
    return [e["loss"] for e in map(json.loads, lines) if e["event"] == "train"]


def rewrite(workspace, write, suffix):
    for path in sorted((workspace / "data" / "images").iterdir()):
        with Image.open(path) as image:
            array = np.array(image)
        path.unlink()
        write(path.with_suffix(suffix), array)


@pytest.mark.parametrize(("channels", "dtype"), [(1, np.uint8), (1, np.uint16), (5, np.uint16)])
def test_a_net_of_other_channels(workspace, channels, dtype):
    def write(path, array):
        bands = array.mean(-1, keepdims=True).repeat(channels, -1).astype(dtype)
        write_tiff(path, bands * (257 if dtype == np.uint16 else 1), compression=8)

    rewrite(workspace, write, ".tif")
    mean = f"[{', '.join(['110.0'] * channels)}]"
    std = f"[{', '.join(['58.0'] * channels)}]"
    overrides = [
        *ONE_EPOCH,
        f"model.num_channels={channels}",
        f"pixels.mean={mean}",
        f"pixels.std={std}",
    ]
    run = train(workspace / "run.toml", overrides, console=QUIET)
    weights = load_weights(run / "weights.safetensors", select_device("cpu"))
    assert weights.config.num_channels == channels
    assert weights.model.body.conv1.weights.shape[1] == channels
    assert evaluate_run(run, weights)["num_images"] == 3
    images = sorted((workspace / "data" / "images").iterdir())[:2]
    results = list(predict_files(weights, images, workspace / "out"))
    with Image.open(results[0].overlay) as overlay:
        assert overlay.mode == "RGB"
        # Uncovered, it would be the grey image itself; half of each pixel is its class's colour.
        assert np.asarray(overlay).std() > 5


def test_16_bits_train_like_8(workspace):
    # Without scale and brightness, which round to 8 bits in the one and to 16 in the other.
    plain = [*ONE_EPOCH, "augment.brightness=0.0", "augment.min_scale=1.0", "augment.max_scale=1.0"]

    def losses_of(name, *more):
        return losses(
            train(workspace / "run.toml", [*plain, f"train.run={name}", *more], console=QUIET)
        )

    eight = losses_of("eight")
    rewrite(workspace, lambda path, a: write_png16(path, a.astype(np.uint16) * 257), ".png")
    np.testing.assert_allclose(losses_of("sixteen"), eight, rtol=1e-3)
    dark = losses_of("dark", "pixels.white=4095")
    assert np.abs(np.subtract(dark, eight)).max() > 0.02  # the control: another white
