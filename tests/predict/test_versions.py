"""Test-time augmentation: the mean over versions, each as if it ran alone."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from tests.predict.test_evaluate import CLASSES, PIXELS, make_run, make_samples, run, tiny_model

from anysize.data.loader import normalise
from anysize.data.masks import decode_mask
from anysize.errors import ConfigError
from anysize.geometry import Size, check_layout, single
from anysize.images.decode import decode_image
from anysize.predict.files import NetLabeller
from anysize.predict.tiles import canvas_logits
from anysize.predict.versions import ITSELF, Versions, _together, averaged_probabilities

VERSIONS = Versions(scales=(0.5, 1.0, 1.3), mirror=True)


def alone(model, image):
    """Probabilities of an image on a canvas of its own."""
    layout = single(Size(*image.shape[-2:]), model.geometry)
    pixels = image.new_zeros((1, len(image), *layout.canvas[1:]))
    layout.crop(pixels, 0).copy_(image)
    return canvas_logits(model, pixels, layout)[0].softmax(0)


def expected(model, image, versions):
    height, width = image.shape[-2:]
    found = []
    for scale in versions.scales:
        size = (round(height * scale), round(width * scale))
        scaled = F.interpolate(image[None], size, mode="bilinear", antialias=True)[0]
        for mirror in (False, True)[: 1 + versions.mirror]:
            own = alone(model, scaled.flip(-1) if mirror else scaled)
            own = own.flip(-1) if mirror else own
            found.append(
                F.interpolate(own[None], (height, width), mode="bilinear", antialias=True)[0]
            )
    return sum(found) / len(found)


def an_image(height=51, width=70):
    return torch.randn(3, height, width, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("max_pixels", [10_000_000, 1], ids=["one canvas", "one by one"])
@pytest.mark.parametrize(
    "versions",
    [VERSIONS, Versions(mirror=True), Versions(scales=(0.7, 1.6))],
    ids=["all", "mirrored", "scaled"],
)
def test_versions_are_averaged_as_if_each_ran_alone(versions, max_pixels):
    model, image = tiny_model(), an_image()
    found = averaged_probabilities(
        model, image, kind="multiclass", versions=versions, max_pixels=max_pixels
    )
    torch.testing.assert_close(found, expected(model, image, versions), rtol=0, atol=1e-5)
    control = alone(model, image)
    assert float((found - control).abs().max()) > 1e-3, "the versions would not matter"


@pytest.mark.parametrize("size", [(16, 16), (33, 90), (1, 5)])
def test_versions_on_one_canvas_keep_the_rules_of_exact_padding(size):
    geometry = tiny_model().geometry
    sizes = [Size(*size), Size(2 * size[0], 2 * size[1]), Size(size[0], 3 * size[1])]
    layout = _together(sizes, 2, geometry)
    check_layout(layout, geometry)
    assert len(layout.placements) == 6


@pytest.mark.parametrize("kind", ["multiclass", "multilabel"])
def test_evaluation_over_versions(tmp_path, kind):
    model, samples = tiny_model(), make_samples(tmp_path, kind)
    result = run(model, samples, kind, versions=VERSIONS)
    assert result["num_images"] == len(samples)
    scores = []
    for sample in samples:
        image = torch.from_numpy(normalise(decode_image(sample.image), PIXELS)).permute(2, 0, 1)
        probabilities = averaged_probabilities(model, image, kind=kind, versions=VERSIONS)
        target = decode_mask(sample, CLASSES)
        if kind == "multiclass":
            labels, valid = probabilities.argmax(0).numpy(), target != 255
            scores.append(((labels == target) & valid).sum())
    if kind == "multiclass":
        assert result["pixel_accuracy"] == pytest.approx(
            sum(scores) / result["num_pixels"], abs=1e-3
        )
    assert result != run(model, samples, kind)


def test_prediction_over_versions_also_in_tiles(tmp_path):
    _, weights, held_out = make_run(tmp_path, tiny_model())
    image = np.asarray(Image.open(held_out[0].image).convert("RGB").resize((260, 230)))
    labeller = NetLabeller(weights=weights, versions=VERSIONS)
    whole = labeller.predict(image, max_pixels=10**6, keep_probabilities=True)
    values = torch.from_numpy(normalise(image, weights.pixels)).permute(2, 0, 1)
    wanted = expected(weights.model, values, VERSIONS)
    np.testing.assert_allclose(whole.probabilities, wanted.numpy(), atol=2e-3)
    tiled = labeller.predict(image, max_pixels=70_000, keep_probabilities=False)
    assert tiled.num_tiles > 1
    assert tiled.labels.shape == (230, 260)


def test_nothing_but_the_image_itself_is_the_default():
    assert NetLabeller.__dataclass_fields__["versions"].default == ITSELF
    model, image = tiny_model(), an_image()
    found = averaged_probabilities(model, image, kind="multiclass", versions=ITSELF)
    torch.testing.assert_close(found, alone(model, image))


@pytest.mark.parametrize("scales", [(), (0.0,), (1.0, 1.0), (float("nan"),), (99.0,)])
def test_scales_that_make_no_sense_are_refused(scales):
    with pytest.raises(ConfigError, match="scales"):
        Versions(scales=scales)
