"""A small data folder, drawn and not downloaded: discs and stripes on textured ground."""

import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

# A shell starts jobs in the background with Ctrl-C ignored, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

NAMES = ("ground", "disc", "stripe")

RUN_TOML = """
[data]
root = "data"

[plan]
images_per_step = 4
max_canvases = 3

[model]
units = [1, 1, 1, 1]
base_depth = 8
norm = "trained"
norm_decay = 0.5
loss_at = "full"

[augment]
min_scale = 0.8
max_scale = 1.25
brightness = 0.2

[optim]
kind = "adamw"
lr = 0.003
schedule = "poly"

[train]
epochs = 3
precision = "float32"
log_every = 2
checkpoint_every = 1000
"""


def draw_sample(rng, height, width):
    mask = np.zeros((height, width), np.uint8)
    rows, columns = np.mgrid[:height, :width]
    y, x = rng.uniform(0, height), rng.uniform(0, width)
    mask[(rows - y) ** 2 + (columns - x) ** 2 < (min(height, width) / 3) ** 2] = 1
    left = int(rng.integers(0, max(width - 8, 1)))
    mask[:, left : left + 8] = 2
    colours = np.array([[90, 120, 90], [200, 80, 60], [60, 80, 200]])
    image = colours[mask] + rng.normal(0, 12, (height, width, 3))
    mask[rng.random((height, width)) < 0.02] = 255
    return image.clip(0, 255).astype(np.uint8), mask


def write_classes(root: Path) -> None:
    colours = [(90, 120, 90), (200, 80, 60), (60, 80, 200)]
    tables = [
        f'[[class]]\nname = "{name}"\ncolour = {list(colour)}\n'
        for name, colour in zip(NAMES, colours, strict=True)
    ]
    (root / "classes.toml").write_text("ignore_index = 255\n\n" + "\n".join(tables))


def draw_workspace(folder: Path) -> Path:
    """`run.toml` and `data/` with 14 images, all of different sizes."""
    root = folder / "data"
    (root / "images").mkdir(parents=True)
    (root / "masks").mkdir()
    rng = np.random.default_rng(1)
    for i in range(14):
        image, mask = draw_sample(rng, 37 + 3 * i, 81 - 4 * i)
        Image.fromarray(image).save(root / "images" / f"s{i:02}.png")
        Image.fromarray(mask).save(root / "masks" / f"s{i:02}.png")
    write_classes(root)
    (folder / "run.toml").write_text(RUN_TOML)
    return folder


@pytest.fixture
def workspace(tmp_path):
    """See `draw_workspace`."""
    return draw_workspace(tmp_path)


@pytest.fixture(scope="session")
def make_workspace():
    """`draw_workspace`, for fixtures of a module."""
    return draw_workspace
