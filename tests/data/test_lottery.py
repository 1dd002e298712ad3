"""Folders drawn by lot: each is right to the pixel in training, evaluation and prediction, or
refused by the name of a file or of the key that decides; none is silently wrong."""

import contextlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.data.lottery import COLOURS, NAMES, PAINT, draw_folder

from anysize.check.folder import check_data
from anysize.config import PixelConvention, RunConfig
from anysize.data.batching import epoch_steps
from anysize.data.classes import Classes
from anysize.data.loader import load_steps
from anysize.data.samples import read_folder
from anysize.data.transforms import no_augmentation
from anysize.errors import AnysizeError
from anysize.geometry import NetGeometry
from anysize.planning.canvases import plan_canvases
from anysize.predict.evaluate import evaluation_steps
from anysize.predict.files import label_files
from anysize.predict.tiles import Prediction, as_rows

# pycocotools 2.0.11 under numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")

PIXELS = PixelConvention(mean=(0.0, 0.0, 0.0))


def nearest(pixels):
    """The label that each pixel was painted for."""
    off = (pixels[..., None, :].astype(np.int32) - PAINT.astype(np.int32)) ** 2
    return off.sum(-1).argmin(-1).astype(np.uint8)


class Painter:
    """Labels images by the colours that they were painted in."""

    classes = Classes(names=NAMES, colours=tuple(map(tuple, COLOURS.tolist())))
    kind = "multiclass"
    geometry = NetGeometry()
    pixels = PIXELS

    def predict(self, image, **_):
        rows = as_rows(image)
        labels = nearest(rows.read(0, rows.size.height))
        return Prediction(labels=labels, present=None, probabilities=None, num_tiles=1)


def wrong_in_batches(folder, drawn):
    """What a net is given in training and in evaluation, against the labels: stems that differ."""
    samples = folder.samples
    sizes = [sample.size for sample in samples]
    plan = plan_canvases(
        sizes,
        geometry=NetGeometry(),
        images_per_step=2,
        max_pixels_per_step=100_000,
        max_canvases=2,
    )
    wrong, seen = set(), Counter()
    of_image = {path: drawn.truth[stem] for stem, path in drawn.images.items()}
    truth = {sample.stem: of_image[sample.image] for sample in samples}
    for steps in (
        epoch_steps(plan, sizes, seed=0, epoch=0),
        evaluation_steps(sizes, plan),
    ):
        loaded = load_steps(
            samples,
            steps,
            [no_augmentation(size) for size in sizes],
            classes=folder.classes,
            geometry=plan.geometry,
            loss_at="full",
            pixels=PIXELS,
            num_threads=1,
            prefetch_steps=1,
        )
        with contextlib.closing(loaded):
            for batch in (b for step in loaded for b in step.batches):
                for stem, place in zip(batch.stems, batch.layout.placements, strict=True):
                    rows = slice(place.top, place.top + place.height)
                    columns = slice(place.left, place.left + place.width)
                    target = batch.target[place.slot, rows, columns].numpy()
                    pixels = batch.pixels[place.slot, :, rows, columns].permute(1, 2, 0).numpy()
                    painted = nearest(pixels)
                    known = truth[stem] != 255
                    seen[stem] += 1
                    if not np.array_equal(target, truth[stem]) or (painted != target)[known].any():
                        wrong.add(stem)
    assert set(seen) == set(truth)
    assert min(seen.values()) == 2
    return wrong


def wrong_predictions(drawn, out):
    wrong = set()
    for done in label_files(Painter(), list(drawn.images.values()), out):
        (stem,) = [s for s, path in drawn.images.items() if path == done.image]
        with Image.open(done.masks[0]) as mask:
            if not np.array_equal(np.array(mask), drawn.painted[stem]):
                wrong.add(stem)
    return wrong


def names_something(message, drawn):
    """Whether a refusal names a file of the folder, or a key to set."""
    files = [p.name for p in Path(drawn.root).rglob("*") if p.is_file()]
    return any(name in message for name in files) or "data." in message


def play(tmp_path, seed):
    """Draws a folder; returns "right" or "refused", or fails."""
    drawn = draw_folder(tmp_path / f"d{seed}", seed)
    must = [reason for reason in drawn.may_refuse if reason.startswith("must")]
    config = RunConfig(data=drawn.data, pixels=PIXELS)
    try:
        folder = read_folder(drawn.root, drawn.data, "multiclass")
        wrong = wrong_in_batches(folder, drawn)
    except AnysizeError as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert names_something(refused, drawn), (seed, drawn.what, refused)
        assert drawn.may_refuse, (seed, drawn.what, refused)
        with contextlib.suppress(AnysizeError):
            assert not check_data(config, drawn.root, "multiclass", num_threads=1).passed
        return "refused"
    assert not wrong, (seed, drawn.what, wrong)
    assert not must, (seed, drawn.what)
    report = check_data(config, drawn.root, "multiclass", num_threads=1)
    assert report.passed, (seed, drawn.what, [f.message for f in report.findings])
    assert not wrong_predictions(drawn, tmp_path / f"o{seed}"), (seed, drawn.what)
    return "right"


def test_forty_drawn_folders(tmp_path):
    played = Counter(play(tmp_path, seed) for seed in range(40))
    assert played["right"] >= 20
    assert played["refused"] >= 5


@pytest.mark.slow
def test_three_hundred_drawn_folders(tmp_path):
    played = Counter(play(tmp_path, seed) for seed in range(40, 340))
    assert played["right"] >= 150
    assert played["refused"] >= 40
