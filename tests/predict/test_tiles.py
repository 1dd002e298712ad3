import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.predict.nets import image_of, tiny_model

from anysize.config import PixelConvention
from anysize.errors import ConfigError, WeightsError
from anysize.geometry import NetGeometry, Size
from anysize.predict import tiles as predict


@pytest.mark.parametrize("size", [(1, 1), (3, 200), (37, 54), (64, 64)])
def test_logits_have_the_size_of_the_image(size):
    model, _ = tiny_model()
    logits = predict.predict_logits(model, image_of(*size), PixelConvention())
    assert logits.shape == (3, *size)
    assert logits.dtype == torch.float32


def test_logits_are_those_of_the_net_upsampled():
    """At even multiples of the stride the canvas is the image, so plain PyTorch must agree."""
    model, _ = tiny_model()
    image = image_of(48, 64)
    logits = predict.predict_logits(model, image, PixelConvention())
    pixels = torch.from_numpy(image.astype(np.float32) - (123.68, 116.779, 103.939)).float()
    layout = predict.single(Size(48, 64), model.geometry)
    assert layout.canvas == (1, 48, 64)
    with torch.no_grad():
        head = model.eval()(pixels.permute(2, 0, 1)[None], layout)
    expected = F.interpolate(head, scale_factor=8, mode="bilinear", align_corners=False)
    torch.testing.assert_close(logits, expected[0], rtol=1e-4, atol=1e-4)
    assert logits.abs().max() > 1


def test_modes_and_statistics_of_the_net_stay_as_they_were():
    model, _ = tiny_model(norm="trained")
    model.train()
    model.body.conv1.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    image = image_of(40, 40)
    first = predict.predict_logits(model, image, PixelConvention())
    assert model.training
    assert not model.body.conv1.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.eval()
    assert torch.equal(predict.predict_logits(model, image, PixelConvention()), first)


def test_bf16_is_computed_in_bf16_and_returned_in_float32():
    model, _ = tiny_model()
    image = image_of(40, 40)
    exact = predict.predict_logits(model, image, PixelConvention())
    rounded = predict.predict_logits(model, image, PixelConvention(), precision="bf16")
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).abs().max() < 0.05 * exact.abs().max()


def test_probabilities_of_both_kinds():
    model, _ = tiny_model()
    image = image_of(20, 33)
    logits = predict.predict_logits(model, image, PixelConvention())
    softmax = predict.predict_probabilities(model, image, PixelConvention(), kind="multiclass")
    sigmoid = predict.predict_probabilities(model, image, PixelConvention(), kind="multilabel")
    torch.testing.assert_close(softmax, logits.exp() / logits.exp().sum(0))
    torch.testing.assert_close(sigmoid, 1 / (1 + (-logits).exp()))


def test_labels_are_the_most_probable_class():
    model, _ = tiny_model()
    image = image_of(50, 70)
    logits = predict.predict_logits(model, image, PixelConvention()).numpy()
    softmax = predict.predict_image(model, image, PixelConvention(), kind="multiclass")
    assert softmax.num_tiles == 1
    assert softmax.labels.dtype == np.uint8
    assert (softmax.labels == logits.argmax(0)).all()
    assert len(np.unique(softmax.labels)) > 1, "a constant prediction would prove little"
    sigmoid = predict.predict_image(model, image, PixelConvention(), kind="multilabel")
    assert (sigmoid.present == (logits >= 0)).all()
    none = (logits < 0).all(0)
    assert none.any()
    assert (sigmoid.labels == np.where(none, predict.NO_CLASS, logits.argmax(0))).all()


def test_logits_that_are_not_finite_are_an_error():
    model, _ = tiny_model()
    with torch.no_grad():
        model.head.biases[1] = float("nan")
    with pytest.raises(WeightsError, match="not finite on an image of 20x33, in float32"):
        predict.predict_logits(model, image_of(20, 33), PixelConvention())


extents = st.integers(1, 3000)


@settings(deadline=None)
@given(
    size=st.builds(Size, extents, extents),
    stride=st.sampled_from([8, 16, 32]),
    overlap=st.integers(1, 200),
    spare=st.integers(0, 200_000),
)
def test_tiles_cover_the_image_within_the_limit(size, stride, overlap, spare):
    geometry = NetGeometry(output_stride=stride)
    overlap_in_cells = -(-overlap // stride) * stride
    max_pixels = (overlap_in_cells + 2 * stride) ** 2 + spare
    rows, columns = predict.plan_tiles(size, geometry, max_pixels=max_pixels, overlap=overlap)
    assert rows.extent * columns.extent <= max_pixels
    if size.pixels <= max_pixels:
        assert (rows.starts, columns.starts) == ((0,), (0,))
    for axis, extent in ((rows, size.height), (columns, size.width)):
        assert axis.starts[0] == 0
        assert axis.starts[-1] + axis.extent == extent
        assert all(start % stride == 0 for start in axis.starts)
        assert geometry.shift(axis.extent) == geometry.shift(extent)
        steps = np.diff(axis.starts)
        assert (steps > 0).all()
        assert (axis.extent - steps >= overlap_in_cells).all()
        total = np.zeros(extent)
        for start, weights in zip(
            axis.starts, predict._axis_weights(axis, extent, overlap), strict=True
        ):
            assert (weights >= 0).all()
            total[start : start + axis.extent] += weights.numpy()
        np.testing.assert_allclose(total, 1, atol=1e-6)


def test_few_tiles_are_used():
    geometry = NetGeometry()
    rows, columns = predict.plan_tiles(Size(2000, 2000), geometry, max_pixels=1_100_000)
    assert (len(rows.starts), len(columns.starts)) == (2, 3)


def test_a_row_of_tiles_of_a_very_wide_image_is_low():
    rows, columns = predict.plan_tiles(
        Size(3000, 100_000), NetGeometry(), max_pixels=predict.DEFAULT_MAX_PIXELS
    )
    assert rows.extent * 100_000 <= predict.BAND_PIXELS
    assert rows.starts[-1] + rows.extent == 3000
    assert columns.starts[-1] + columns.extent == 100_000
    # Where no row is so low, tiles are chosen all the same.
    rows, _ = predict.plan_tiles(
        Size(3000, 1_000_000), NetGeometry(), max_pixels=predict.DEFAULT_MAX_PIXELS
    )
    assert rows.starts[-1] + rows.extent == 3000


def test_too_small_a_limit_names_the_least_that_works():
    with pytest.raises(ConfigError, match=r"`max_pixels` is 1000; .* at least 25600\."):
        predict.plan_tiles(Size(100, 100), NetGeometry(), max_pixels=1000)
    predict.plan_tiles(Size(5000, 100), NetGeometry(), max_pixels=25600)


# At output stride 8 the tiny net sees about 80 pixels in each direction: a quarter of 352 is more.
FAR = {"max_pixels": 140_000, "overlap": 352}


@pytest.mark.parametrize(("height", "width"), [(701, 250), (403, 402)])
def test_tiles_give_what_the_whole_image_gives_where_the_net_sees_no_further(height, width):
    model, _ = tiny_model(output_stride=8)
    image = image_of(height, width)

    def probabilities(**limits):
        return predict.predict_image(
            model, image, PixelConvention(), kind="multiclass", keep_probabilities=True, **limits
        )

    whole, tiled, near = (
        probabilities(),
        probabilities(**FAR),
        probabilities(max_pixels=140_000, overlap=16),
    )
    assert whole.num_tiles == 1
    assert tiled.num_tiles > 1
    assert tiled.probabilities.dtype == np.float16
    np.testing.assert_allclose(tiled.probabilities, whole.probabilities, atol=5e-4)
    assert (tiled.labels != whole.labels).mean() < 1e-4
    off = np.abs(near.probabilities.astype(float) - whole.probabilities).max()
    assert off > 5e-3, "control: with little overlap the tiles' borders must show"


def test_tiles_off_the_grid_of_cells_differ(monkeypatch):
    """The control of the test above: tiles must start at whole cells."""
    model, _ = tiny_model(output_stride=8)
    image = image_of(701, 250)
    arguments = {"kind": "multiclass", "keep_probabilities": True}
    whole = predict.predict_image(model, image, PixelConvention(), **arguments)
    rows, columns = predict.plan_tiles(Size(701, 250), model.geometry, **FAR)
    moved = predict.TileAxis(rows.extent + 4, (*rows.starts[:-1], rows.starts[-1] - 4))
    monkeypatch.setattr(predict, "plan_tiles", lambda *_, **__: (moved, columns))
    tiled = predict.predict_image(model, image, PixelConvention(), overlap=352, **arguments)
    assert np.abs(tiled.probabilities.astype(float) - whole.probabilities).max() > 5e-3


def test_anything_that_gives_probabilities_can_be_tiled():
    """A net that sees one pixel: tiles must give exactly what it says of each pixel."""
    seen = []

    def run(tile):
        seen.append(tile.shape[:2])
        return torch.from_numpy(tile / np.float32(255)).permute(2, 0, 1)

    image = image_of(300, 210)
    tiled = predict.predict_tiled(
        run, image, NetGeometry(), kind="multilabel", max_pixels=30_000, keep_probabilities=True
    )
    assert tiled.num_tiles == len(seen) > 1
    assert max(height * width for height, width in seen) <= 30_000
    expected = (image / np.float32(255)).transpose(2, 0, 1)
    np.testing.assert_allclose(tiled.probabilities, expected, atol=1e-3)
    assert (tiled.present != (image >= 128).transpose(2, 0, 1)).mean() < 1e-4
