import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from anysize.checkpoint import Weights
from anysize.config import ModelConfig, PixelConvention
from anysize.data.samples import Classes
from anysize.errors import ConfigError, DataError, DeviceError, WeightsError
from anysize.geometry import NetGeometry, Size
from anysize.models.build import build_model
from anysize.predict import files as predict

COLOURS = ((10, 20, 30), (200, 0, 0), (0, 180, 90))
CLASSES = Classes(names=("sea", "land", "lake"), colours=COLOURS, ignore_index=255)


def tiny_model(**settings):
    """A net whose logits are a few units large, so that probabilities are not all 0 and 1."""
    config = ModelConfig(units=(1, 1, 1, 1), base_depth=8, **settings)
    model = build_model(config, 3, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        model.head.weights.mul_(0.02)
    return model, config


def tiny_weights(kind="multiclass"):
    model, config = tiny_model()
    return Weights(model=model, config=config, classes=CLASSES, pixels=PixelConvention(), kind=kind)


def image_of(height, width, seed=0):
    """Smooth blobs, so that neighbouring labels agree and classes differ."""
    rng = np.random.default_rng(seed)
    coarse = torch.from_numpy(rng.uniform(0, 255, (1, 3, height // 9 + 2, width // 9 + 2)))
    image = F.interpolate(coarse, (height, width), mode="bilinear", align_corners=False)
    return image[0].permute(1, 2, 0).numpy().astype(np.uint8)


def save(path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)
    return path


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


def test_files_of_softmax(tmp_path):
    weights = tiny_weights()
    one = save(tmp_path / "in" / "one.png", image_of(41, 30))
    save(tmp_path / "in" / "two.JPG", image_of(25, 62))
    (tmp_path / "in" / "notes.txt").write_text("no image")
    out = tmp_path / "new" / "out"
    results = list(predict.predict_files(weights, [tmp_path / "in"], out, probabilities=True))
    assert [r.image.name for r in results] == ["one.png", "two.JPG"]
    assert [r.size for r in results] == [(41, 30), (25, 62)]
    assert results[0].masks == (out / "masks" / "one.png",)
    assert results[0].num_tiles == 1
    expected = predict.predict_image(
        weights.model, np.asarray(Image.open(one)), weights.pixels, kind="multiclass"
    ).labels
    with Image.open(results[0].masks[0]) as mask:
        assert mask.mode == "P"
        assert (np.asarray(mask) == expected).all()
        assert (np.asarray(mask.convert("RGB")) == np.array(COLOURS)[expected]).all()
    with Image.open(results[0].overlay) as overlay:
        half = (np.asarray(Image.open(one)).astype(float) + np.array(COLOURS)[expected]) / 2
        assert np.abs(np.asarray(overlay) - half).max() <= 0.5
    array = np.load(results[0].probabilities)
    assert array.dtype == np.float16
    assert (array.argmax(0) == expected).mean() > 0.999
    written = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    assert written == {
        f"{folder}/{stem}.{suffix}"
        for folder, suffix in (("masks", "png"), ("overlays", "png"), ("probabilities", "npy"))
        for stem in ("one", "two")
    }


def test_files_of_sigmoid(tmp_path):
    weights = tiny_weights("multilabel")
    image = image_of(41, 30)
    path = save(tmp_path / "one.png", image)
    (result,) = predict.predict_files(weights, [path], tmp_path / "out")
    expected = predict.predict_image(weights.model, image, weights.pixels, kind="multilabel")
    assert result.probabilities is None
    assert not (tmp_path / "out" / "probabilities").exists()
    for c, name in enumerate(CLASSES.names):
        with Image.open(tmp_path / "out" / "masks" / name / "one.png") as mask:
            assert (np.asarray(mask) == expected.present[c]).all()
    with Image.open(result.overlay) as overlay:
        free = expected.labels == predict.NO_CLASS
        assert free.any()
        assert not free.all()
        assert (np.asarray(overlay)[free] == image[free]).all()
        assert (np.asarray(overlay)[~free] != image[~free]).any()


def test_mask_has_the_size_of_the_upright_image(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(image_of(20, 50)).save(tmp_path / "turned.jpg", exif=exif)
    (result,) = predict.predict_files(tiny_weights(), [tmp_path / "turned.jpg"], tmp_path / "out")
    assert result.size == (50, 20)
    with Image.open(result.masks[0]) as mask:
        assert mask.size == (20, 50)


def test_large_files_run_in_tiles_and_say_so(tmp_path):
    path = save(tmp_path / "large.png", image_of(180, 190))
    (result,) = predict.predict_files(tiny_weights(), [path], tmp_path / "out", max_pixels=26_000)
    assert result.num_tiles > 1
    with Image.open(result.masks[0]) as mask:
        assert mask.size == (190, 180)


def test_equal_stems_are_refused_before_anything_is_written(tmp_path):
    first = save(tmp_path / "a" / "x.png", image_of(9, 9))
    second = save(tmp_path / "b" / "x.jpg", image_of(9, 9))
    with pytest.raises(DataError, match=r"x\.png and .*x\.jpg have the same stem"):
        predict.predict_files(tiny_weights(), [first, second], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_image_given_twice_is_predicted_once(tmp_path):
    path = save(tmp_path / "a" / "x.png", image_of(9, 9))
    assert predict.find_images([path, tmp_path / "a", tmp_path / "a" / ".." / "a"]) == [path]


def test_missing_and_empty_inputs_are_named(tmp_path):
    with pytest.raises(DataError, match=r"No such file or folder: .*gone\.png"):
        predict.find_images([tmp_path / "gone.png"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"No image in the folder .*empty"):
        predict.find_images([tmp_path / "empty"])
    with pytest.raises(DataError, match="No image was given"):
        predict.find_images([])


def test_unreadable_images_are_passed_over_and_named_at_the_end(tmp_path):
    save(tmp_path / "in" / "a.png", image_of(9, 9))
    (tmp_path / "in" / "b.png").write_bytes(b"not an image")
    whole = save(tmp_path / "in" / "c.png", image_of(90, 90)).read_bytes()
    (tmp_path / "in" / "c.png").write_bytes(whole[: len(whole) // 2])
    save(tmp_path / "in" / "d.png", image_of(9, 9))
    results = predict.predict_files(tiny_weights(), [tmp_path / "in"], tmp_path / "out")
    stems = [next(results).image.stem, next(results).image.stem]
    with pytest.raises(DataError, match=r"(?s)2 of 4 images .*b\.png.*c\.png"):
        next(results)
    assert stems == ["a", "d"]
    assert sorted(p.name for p in (tmp_path / "out" / "masks").iterdir()) == ["a.png", "d.png"]


def test_predictions_never_overwrite_masks_or_inputs(tmp_path):
    image = save(tmp_path / "images" / "x.png", image_of(9, 9))
    truth = save(tmp_path / "masks" / "x.png", np.zeros((9, 9), np.uint8))
    before = truth.read_bytes()
    (tmp_path / "classes.toml").write_text("")
    with pytest.raises(DataError, match="is a data folder"):
        predict.predict_files(tiny_weights(), [image], tmp_path)
    (tmp_path / "classes.toml").unlink()
    with pytest.raises(DataError, match="overwritten by its own prediction"):
        predict.predict_files(tiny_weights(), [truth], tmp_path)
    assert truth.read_bytes() == before


def test_a_class_name_cannot_lead_out_of_the_folder(tmp_path):
    model, config = tiny_model()
    for name in ("../sea", "a/b", "..", ""):
        weights = Weights(
            model=model,
            config=config,
            classes=Classes(names=("x", name, "z"), colours=COLOURS, ignore_index=255),
            pixels=PixelConvention(),
            kind="multilabel",
        )
        path = save(tmp_path / "x.png", image_of(9, 9))
        with pytest.raises(DataError, match="Rename the class"):
            predict.predict_files(weights, [path], tmp_path / "out")


def test_a_result_that_cannot_be_written_is_named(tmp_path):
    path = save(tmp_path / "x.png", image_of(9, 9))
    (tmp_path / "out").write_text("a file, not a folder")
    with pytest.raises(DataError, match=r"masks.x\.png cannot be written: .*another folder"):
        list(predict.predict_files(tiny_weights(), [path], tmp_path / "out"))


def test_a_limit_too_small_for_tiles_is_refused_before_anything_is_written(tmp_path):
    path = save(tmp_path / "x.png", image_of(9, 9))
    with pytest.raises(ConfigError, match="`max_pixels` is 1000"):
        predict.predict_files(tiny_weights(), [path], tmp_path / "out", max_pixels=1000)


def test_out_of_memory_names_the_image_and_the_way_out(tmp_path, monkeypatch):
    def no_memory(*_, **__):
        raise torch.OutOfMemoryError

    weights = tiny_weights()
    monkeypatch.setattr(predict, "predict_image", no_memory)
    path = save(tmp_path / "x.png", image_of(9, 9))
    with pytest.raises(DeviceError, match=r"x\.png with `max_pixels` 50000"):
        list(predict.predict_files(weights, [path], tmp_path / "out", max_pixels=50_000))


def test_overlay_leaves_unlabelled_pixels_alone():
    image = np.array([[[100, 100, 100], [255, 255, 255], [7, 8, 9]]], np.uint8)
    labels = np.array([[0, 1, 255]], np.uint8)
    covered = predict.overlay(image, labels, [(0, 0, 0), (255, 255, 255)])
    assert covered.tolist() == [[[50, 50, 50], [255, 255, 255], [7, 8, 9]]]
