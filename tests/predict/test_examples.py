import io
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from tests.predict.test_evaluate import CLASSES, make_run, tiny_model

from anysize.data.masks import decode_mask
from anysize.errors import ConfigError, DataError
from anysize.predict.examples import GAP, draw_examples
from anysize.predict.files import overlay
from anysize.predict.tiles import predict_image


def panels(png, width):
    picture = np.asarray(Image.open(io.BytesIO(png)))
    return [picture[:, i * (width + GAP) : i * (width + GAP) + width] for i in range(3)]


def test_examples_are_held_out_images_with_labels_and_predictions(tmp_path):
    folder, weights, held_out = make_run(tmp_path, tiny_model())
    found = list(draw_examples(folder, weights, 2))
    chosen = [held_out[0], held_out[len(held_out) // 2]]
    assert [name for name, _ in found] == [s.stem for s in chosen]
    for (_, png), sample in zip(found, chosen, strict=True):
        image, truth, said = panels(png, sample.size.width)
        pixels = np.asarray(Image.open(sample.image).convert("RGB"))
        np.testing.assert_array_equal(image, pixels)
        labels = decode_mask(sample, CLASSES)
        np.testing.assert_array_equal(truth, overlay(pixels, labels, CLASSES.colours))
        labels = predict_image(weights.model, pixels, weights.pixels, kind="multiclass").labels
        np.testing.assert_array_equal(said, overlay(pixels, labels, CLASSES.colours))
    assert len(list(draw_examples(folder, weights, 99))) == len(held_out)


def test_the_worst_and_the_best_by_the_scores_of_the_run(tmp_path):
    folder, weights, held_out = make_run(tmp_path, tiny_model())
    stems = [s.stem for s in held_out]
    scores = {stem: 0.25 * i for i, stem in enumerate(stems)}
    (folder / "metrics.json").write_text(json.dumps({"images": scores}))
    found = [caption for caption, _ in draw_examples(folder, weights, 1)]
    best = f"best 1: {stems[-1]}, IoU {scores[stems[-1]]:.1%}"
    assert found == [f"worst 1: {stems[0]}, IoU 0.0%", best]
    every = [caption for caption, _ in draw_examples(folder, weights, 99)]
    assert len(every) == len(stems), "none twice"
    (folder / "metrics.json").write_text(json.dumps({"images": {**scores, stems[0]: None}}))
    (worst, *_) = (caption for caption, _ in draw_examples(folder, weights, 1))
    assert worst.startswith(f"worst 1: {stems[1]}")


def test_large_examples_are_scaled_down(tmp_path):
    folder, weights, held_out = make_run(tmp_path, tiny_model())
    sample = held_out[0]
    for path in (sample.image, *sample.masks):
        Image.open(path).resize((900, 450), Image.Resampling.NEAREST).save(path)
    with torch.no_grad():
        ((_, png), *_) = draw_examples(folder, weights, 1)
    assert Image.open(io.BytesIO(png)).size == (3 * 420 + 2 * GAP, 210)


def test_what_is_missing_is_named(tmp_path):
    folder, weights, _ = make_run(tmp_path, tiny_model())
    with pytest.raises(ConfigError, match=r"no run\.toml"):
        list(draw_examples(tmp_path, weights, 1))
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(DataError):
        list(draw_examples(folder, weights, 1))
