import numpy as np
import pytest
import torch
from PIL import Image, TiffImagePlugin
from tests.predict.nets import CLASSES, COLOURS, image_of, save, tiny_model, tiny_weights

from anysize.config import PixelConvention
from anysize.data.samples import Classes
from anysize.errors import ConfigError, DataError, DeviceError
from anysize.geometry import Size
from anysize.images import decode
from anysize.models.weights_file import Weights
from anysize.predict import files as predict
from anysize.predict.tiles import NO_CLASS


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
        free = expected.labels == NO_CLASS
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
    with pytest.raises(DataError, match=r"The folder .*empty holds no \.jpg"):
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
    # A black class would only darken.
    covered = predict.overlay(image, labels, [(0, 0, 0), (255, 255, 255)])
    assert covered.tolist() == [[[100, 100, 100], [255, 255, 255], [7, 8, 9]]]


def test_hidden_files_are_passed_over_and_others_that_are_not_read_are_named(tmp_path):
    photo = save(tmp_path / "photos/a.png", image_of(9, 9))
    for name in ("._a.png", ".DS_Store", "Thumbs.db", "notes.txt", "b.HEIC", "c.gif"):
        (tmp_path / "photos" / name).write_bytes(b"x")
    assert predict.find_images([tmp_path / "photos"]) == [photo]
    said = predict.not_read([tmp_path / "photos"])
    assert [("b.HEIC" in s, "c.gif" in s) for s in said] == [(True, False), (False, True)]
    photo.unlink()
    with pytest.raises(DataError, match=r"1 of HEIC: b\.HEIC.*Convert it to PNG"):
        predict.find_images([tmp_path / "photos"])


def large(path, monkeypatch):
    """A file above what counts as harmless, which is read in parts; and the same as a small one."""
    image = image_of(430, 70)
    Image.fromarray(image).save(path, compression="tiff_lzw")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 430 * 70 - 1)
    return image


def test_an_image_above_pillows_limit_is_read_in_parts(tmp_path, monkeypatch):
    image = large(tmp_path / "a.tif", monkeypatch)
    weights = tiny_weights()
    expected = predict.predict_image(
        weights.model, image, weights.pixels, kind=weights.kind, max_pixels=26_000
    )
    assert expected.num_tiles > 1
    heights = []
    real = decode.decode_bands

    def counted(*args, rows=None, **options):
        heights.append(rows[1] - rows[0])
        return real(*args, rows=rows, **options)

    monkeypatch.setattr(decode, "decode_bands", counted)
    (done,) = predict.predict_files(weights, [tmp_path], tmp_path / "out", max_pixels=26_000)
    assert max(heights[:-1]) < 430
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert np.array_equal(np.array(Image.open(done.masks[0])), expected.labels)
    overlay = np.array(Image.open(done.overlay))
    assert np.array_equal(overlay, predict.overlay(image, expected.labels, weights.classes.colours))
    monkeypatch.setattr(predict, "_OVERLAY_ROWS", 100)
    (done,) = predict.predict_files(weights, [tmp_path], tmp_path / "out", max_pixels=26_000)
    assert np.array_equal(np.array(Image.open(done.overlay)), overlay)
    monkeypatch.setattr(predict, "OVERLAY_PIXELS", 10_000)
    (done,) = predict.predict_files(weights, [tmp_path], tmp_path / "out", max_pixels=26_000)
    assert np.array_equal(np.array(Image.open(done.overlay)), overlay[::2, ::2])


def test_a_png_above_pillows_limit_is_read_too(tmp_path, monkeypatch):
    path = save(tmp_path / "a.png", image_of(60, 50))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    (done,) = predict.predict_files(tiny_weights(), [path], tmp_path / "out")
    assert done.size == Size(60, 50)


def test_masks_of_a_geotiff_lie_where_it_lies(tmp_path):
    geo = {
        33550: (10.0, 10.0, 0.0),
        33922: (0.0, 0.0, 0.0, 500000.0, 4649776.22, 0.0),
        34735: (1, 1, 0, 1, 3072, 0, 1, 32633),
        34737: "WGS 84 / UTM zone 33N|",
    }
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    for tag, value in geo.items():
        tags.tagtype[tag] = {34735: 3, 34737: 2}.get(tag, 12)
        tags[tag] = value
    image = image_of(40, 50)
    Image.fromarray(image).save(tmp_path / "a.tif", tiffinfo=tags)
    weights = tiny_weights()
    (done,) = predict.predict_files(weights, [tmp_path / "a.tif"], tmp_path / "out")
    assert done.masks == (tmp_path / "out/masks/a.tif",)
    expected = predict.predict_image(weights.model, image, weights.pixels, kind=weights.kind)
    with Image.open(done.masks[0]) as mask:
        assert {tag: mask.tag_v2[tag] for tag in geo} == geo
        assert mask.getpalette()[:9] == [c for colour in COLOURS for c in colour]
        assert np.array_equal(np.array(mask), expected.labels)
    # Turned to stand upright, a mask lies elsewhere than its stored image.
    tags[0x0112] = 6
    Image.fromarray(image).save(tmp_path / "a.tif", tiffinfo=tags)
    (done,) = predict.predict_files(weights, [tmp_path / "a.tif"], tmp_path / "out")
    assert done.masks == (tmp_path / "out/masks/a.png",)
