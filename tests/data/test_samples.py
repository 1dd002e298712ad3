import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from anysize.config import DataConfig
from anysize.data.samples import (
    Classes,
    Sample,
    decode_image,
    decode_mask,
    find_samples,
    label_kind,
    read_classes,
    split_samples,
)
from anysize.errors import DataError
from anysize.geometry import Size

CLASSES_TOML = """
ignore_index = 200

[[class]]
name = "sea"
colour = [0, 0, 255]

[[class]]
name = "land"
colour = [0, 200, 0]
"""


def sample_of(root: Path, size: Size, stem: str = "s0") -> Sample:
    masks = (root / "masks" / f"{stem}.png",)
    return Sample(stem=stem, image=root / "images" / f"{stem}.png", masks=masks, size=size)


def fake_samples(num: int) -> list[Sample]:
    return [
        Sample(stem=f"s{i:02}", image=Path(f"s{i:02}.png"), masks=(Path("m.png"),), size=Size(1, 1))
        for i in range(num)
    ]


def write_raw_png(path: Path, rows: list[bytes], width: int, depth: int, colour_type: int) -> None:
    """A PNG of any bit depth, which Pillow cannot write for grey."""

    def chunk(name: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + check

    header = struct.pack(">IIBBBBB", width, len(rows), depth, colour_type, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


# classes.toml


def test_classes_are_read(tmp_path):
    path = tmp_path / "classes.toml"
    path.write_text(CLASSES_TOML)
    assert read_classes(path) == Classes(
        names=("sea", "land"), colours=((0, 0, 255), (0, 200, 0)), ignore_index=200
    )
    path.write_text(CLASSES_TOML.replace("ignore_index = 200", ""))
    assert read_classes(path).ignore_index == 255


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('name = "land"', 'name = "sea"', "same name to several classes: sea"),
        ("[0, 200, 0]", "[0, 0, 255]", r"same colour to several classes: \(0, 0, 255\)"),
        ("ignore_index", "ignore", "Unknown key `ignore`"),
        ("colour = [0, 200, 0]", "color = [0, 200, 0]", "Unknown key `class.1..color`"),
        ("colour = [0, 200, 0]", "", "`class.1..colour` is missing"),
        ("[0, 200, 0]", "[0, 256, 0]", "`class.1..colour"),
        ("[0, 200, 0]", "[0, true, 0]", "`class.1..colour"),
        ("[0, 200, 0]", "[0, 200]", "`class.1..colour"),
        ('name = "land"', "name = 3", "`class.1..name` is 3"),
        ('name = "land"', 'name = " "', "has a class without a name"),
        ("ignore_index = 200", "ignore_index = 1", "from 2 to 255.*data.ids"),
        ("ignore_index = 200", "ignore_index = 256", "from 2 to 255"),
        ("ignore_index = 200", "ignore_index = true", "`ignore_index` is True"),
        ("ignore_index = 200", "ignore_index = [", "cannot be read as TOML"),
        pytest.param(CLASSES_TOML, "x = " + "[" * 100_000, "as TOML", id="nested without end"),
        pytest.param(CLASSES_TOML, "x = " + "1" * 5000, "as TOML", id="a long number"),
        (CLASSES_TOML, "", "names no classes"),
        (CLASSES_TOML, "class = [1]", "`class.0.` must be a section"),
    ],
)
def test_faults_in_classes_toml_name_the_file(tmp_path, old, new, says):
    path = tmp_path / "classes.toml"
    assert old in CLASSES_TOML
    path.write_text(CLASSES_TOML.replace(old, new))
    with pytest.raises(DataError, match=says) as caught:
        read_classes(path)
    assert str(path) in str(caught.value)


def test_missing_classes_toml_is_named(tmp_path):
    with pytest.raises(DataError, match=r"No such file: .*nowhere\.toml"):
        read_classes(tmp_path / "nowhere.toml")


# Finding pairs


def test_softmax_samples_are_found_in_the_order_of_their_stems(make_folder, classes):
    root = make_folder([(5, 7), (8, 3)])
    samples = find_samples(root, classes, "multiclass")
    assert samples == [
        Sample(
            stem=f"s{i}",
            image=root / "images" / f"s{i}.png",
            masks=(root / "masks" / f"s{i}.png",),
            size=size,
        )
        for i, size in enumerate([Size(5, 7), Size(8, 3)])
    ]
    assert label_kind(samples[0], classes) == "multiclass"


def test_sigmoid_samples_have_a_mask_a_class_in_class_order(make_folder, classes):
    root = make_folder([(5, 7)], kind="multilabel")
    (sample,) = find_samples(root, classes, "multilabel")
    assert sample.masks == tuple(root / "masks" / name / "s0.png" for name in classes.names)
    assert label_kind(sample, classes) == "multilabel"


def test_other_and_hidden_files_are_passed_over(make_folder, classes):
    root = make_folder([(5, 7)])
    for name in ("images/notes.txt", "images/._s0.png", "masks/.hidden.png", "masks/Thumbs.db"):
        (root / name).write_bytes(b"no image")
    (root / "images" / "folder.png").mkdir()
    assert [s.stem for s in find_samples(root, classes, "multiclass")] == ["s0"]


def test_suffixes_may_be_upper_case(make_folder, classes):
    root = make_folder([(5, 7)])
    (root / "images" / "s0.png").rename(root / "images" / "s0.PNG")
    (root / "masks" / "s0.png").rename(root / "masks" / "s0.PNG")
    assert [s.stem for s in find_samples(root, classes, "multiclass")] == ["s0"]


def test_all_that_does_not_pair_up_is_in_one_message(make_folder, classes):
    root = make_folder([(5, 7)] * 3)
    (root / "masks" / "s0.png").unlink()
    (root / "images" / "s1.png").unlink()
    Image.new("RGB", (7, 5)).save(root / "images" / "s2.bmp")
    with pytest.raises(DataError) as caught:
        find_samples(root, classes, "multiclass")
    message = str(caught.value)
    assert "3 faults" in message
    assert f"image {root / 'images' / 's0.png'} has no mask {root / 'masks' / 's0'}.*" in message
    assert f"mask {root / 'masks' / 's1.png'} has no image" in message
    assert f"{root / 'images' / 's2.bmp'} and {root / 'images' / 's2.png'} have the same" in message


def test_a_long_list_of_faults_is_cut_and_counted(make_folder, classes):
    root = make_folder([(2, 2)] * 14)
    for i in range(12):
        (root / "masks" / f"s{i}.png").unlink()
    with pytest.raises(DataError) as caught:
        find_samples(root, classes, "multiclass")
    message = str(caught.value)
    assert "12 faults" in message
    assert message.count("has no mask") == 10
    assert "and 2 more" in message


@pytest.mark.parametrize("folder", ["images", "masks"])
def test_a_missing_or_empty_folder_is_named(make_folder, classes, folder):
    root = make_folder([(5, 7)])
    (root / folder / "s0.png").unlink()
    with pytest.raises(DataError, match=rf"{root / folder} holds no .*\.png"):
        find_samples(root, classes, "multiclass")
    (root / folder).rmdir()
    with pytest.raises(DataError, match=f"{root / folder} cannot be read"):
        find_samples(root, classes, "multiclass")


def test_a_folder_that_is_no_class_is_named(make_folder, classes):
    root = make_folder([(5, 7)], kind="multilabel")
    write = root / "masks" / "lakes"
    write.mkdir()
    with pytest.raises(DataError, match=f"folder {write} is not a class"):
        find_samples(root, classes, "multilabel")


def test_softmax_over_one_class_is_refused(make_folder):
    root = make_folder([(5, 7)])
    one = Classes(names=("lake",), colours=((0, 0, 0),))
    with pytest.raises(DataError, match=r"classes\.toml names 1 class"):
        find_samples(root, one, "multiclass")


@pytest.mark.parametrize("name", ["a/b", "a\\b", ".."])
def test_a_class_that_is_no_folder_name_is_refused_for_sigmoid(make_folder, name):
    root = make_folder([(5, 7)])
    with pytest.raises(DataError, match=r"cannot name a folder.*classes\.toml"):
        find_samples(root, Classes(names=(name,), colours=((0, 0, 0),)), "multilabel")


def test_masks_of_another_size_are_found_by_their_headers(make_folder, classes):
    root = make_folder([(5, 7), (6, 6)])
    Image.new("L", (5, 7)).save(root / "masks" / "s0.png")
    with pytest.raises(DataError) as caught:
        find_samples(root, classes, "multiclass")
    message = str(caught.value)
    assert f"mask {root / 'masks' / 's0.png'} is 7x5" in message
    assert f"image {root / 'images' / 's0.png'} is 5x7" in message
    assert "s1.png" not in message


def test_masks_of_other_modes_are_found_by_their_headers(make_folder, classes):
    root = make_folder([(5, 7)])
    path = root / "masks" / "s0.png"
    write_raw_png(path, [bytes(42)] * 5, 7, 16, 2)
    with pytest.raises(DataError, match=f"{path} has a PNG of colour type 2 with 16 bits"):
        find_samples(root, classes, "multiclass")
    for mode, options, says in (
        ("F", {}, "floating point"),
        ("CMYK", {}, "CMYK"),
        ("L", {"tiffinfo": {262: 0}}, "0 is white"),
    ):
        Image.new(mode, (7, 5)).save(path, "TIFF", **options)
        with pytest.raises(DataError, match=f"{path} has .*{says}"):
            find_samples(root, classes, "multiclass")


def test_transparent_pixels_are_refused_unless_they_are_black(make_folder, classes):
    root = make_folder([(2, 3)])
    sample = sample_of(root, Size(2, 3))
    Image.new("LA", (3, 2), (1, 255)).save(sample.masks[0])
    assert (decode_mask(sample, classes) == 1).all()
    Image.new("LA", (3, 2), (0, 0)).save(sample.masks[0])
    assert (decode_mask(sample, classes) == 0).all()
    for value, alpha in ((1, 128), (0, 128), (1, 0)):
        Image.new("LA", (3, 2), (value, alpha)).save(sample.masks[0])
        with pytest.raises(DataError, match="6 pixels that are transparent"):
            decode_mask(sample, classes)


def test_a_mask_that_is_no_png_is_named(make_folder, classes):
    root = make_folder([(5, 7)])
    (root / "masks" / "s0.png").write_bytes(b"not a PNG at all, just some text")
    with pytest.raises(DataError, match=f"{root / 'masks' / 's0.png'} is not a PNG, BMP or TIFF"):
        find_samples(root, classes, "multiclass")


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_sizes_are_those_of_the_upright_image(make_folder, classes, suffix, orientation):
    root = make_folder([(5, 7)])
    (root / "images" / "s0.png").unlink()
    size = (5, 7) if orientation < 5 else (7, 5)
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.new("RGB", (size[1], size[0]))
    image.save(root / "images" / f"s0.{suffix}", exif=exif)
    (sample,) = find_samples(root, classes, "multiclass")
    assert sample.size == Size(5, 7)
    assert decode_image(sample.image).shape == (5, 7, 3)


# Splits


def test_a_drawn_split_depends_on_seed_and_stems_only(tmp_path):
    samples = fake_samples(20)
    config = DataConfig(root="", val_fraction=0.25)
    train, val = split_samples(samples, config, tmp_path, seed=3)
    assert (len(train), len(val)) == (15, 5)
    assert sorted(s.stem for s in train + val) == [s.stem for s in samples]
    assert split_samples(samples[::-1], config, tmp_path, seed=3) == (train, val)
    assert split_samples(samples, config, tmp_path, seed=4) != (train, val)


@pytest.mark.parametrize(("fraction", "num_val"), [(0.01, 1), (0.99, 2)])
def test_no_side_of_a_drawn_split_is_empty(tmp_path, fraction, num_val):
    config = DataConfig(root="", val_fraction=fraction)
    train, val = split_samples(fake_samples(3), config, tmp_path, seed=0)
    assert (len(train), len(val)) == (3 - num_val, num_val)


def test_one_sample_cannot_be_split(tmp_path):
    with pytest.raises(DataError, match=f"{tmp_path} holds 1 sample"):
        split_samples(fake_samples(1), DataConfig(root=""), tmp_path, seed=0)


def test_lists_are_followed_in_their_order(tmp_path):
    (tmp_path / "train.txt").write_text("\ufeffs02\r\n\r\n  s00 \r\n", encoding="utf-8")
    (tmp_path / "val.txt").write_text("s03\n")
    config = DataConfig(root="", train="train.txt", val="val.txt")
    train, val = split_samples(fake_samples(5), config, tmp_path, seed=0)
    assert [s.stem for s in train] == ["s02", "s00"]
    assert [s.stem for s in val] == ["s03"]


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ("", "is empty"),
        ("s00\ns00\n", "repeats stems; 1 fault:\n  s00"),
        ("s00.png\n", "no image has; 1 fault:\n  s00.png"),
        ("\n".join(f"x{i}" for i in range(12)), "and 2 more"),
        ("s00\ns01\n", "share stems; 1 fault:\n  s01"),
    ],
)
def test_faults_in_a_list_name_the_file(tmp_path, train, says):
    (tmp_path / "train.txt").write_text(train)
    (tmp_path / "val.txt").write_text("s01\n")
    config = DataConfig(root="", train="train.txt", val="val.txt")
    with pytest.raises(DataError) as caught:
        split_samples(fake_samples(3), config, tmp_path, seed=0)
    assert says in str(caught.value)
    assert str(tmp_path / "train.txt") in str(caught.value)


def test_a_missing_list_is_named(tmp_path):
    config = DataConfig(root="", train="train.txt", val="val.txt")
    with pytest.raises(DataError, match=f"list {tmp_path / 'train.txt'} cannot be read"):
        split_samples(fake_samples(3), config, tmp_path, seed=0)


# Decoding images


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_modes_become_rgb(tmp_path, mode):
    path = tmp_path / "a.png"
    rgb = Image.new("RGB", (3, 2), (255, 255, 255))
    rgb.putpixel((0, 1), (0, 0, 0))
    rgb.convert(mode).save(path)
    np.testing.assert_array_equal(decode_image(path), np.asarray(rgb))


def test_colour_beneath_alpha_counts(tmp_path):
    Image.new("RGBA", (3, 2), (10, 20, 30, 0)).save(tmp_path / "a.png")
    assert (decode_image(tmp_path / "a.png") == (10, 20, 30)).all()


def test_a_palette_with_transparency_becomes_rgb(tmp_path):
    image = Image.new("P", (3, 2), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.save(tmp_path / "a.png", transparency=bytes([0, 128]))
    assert (decode_image(tmp_path / "a.png") == (10, 20, 30)).all()


def test_cmyk_becomes_rgb(tmp_path):
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "a.jpg", quality=100)
    assert np.abs(decode_image(tmp_path / "a.jpg").astype(int) - (255, 0, 0)).max() < 8


def test_exif_orientation_is_applied_to_pixels(tmp_path):
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise to stand upright
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    np.testing.assert_array_equal(decode_image(tmp_path / "a.png"), np.rot90(pixels, -1))


def test_a_format_off_the_list_is_refused(tmp_path):
    path = tmp_path / "a.png"
    Image.new("RGB", (3, 2)).save(path, format="GIF")
    with pytest.raises(DataError, match=f"{path} cannot be decoded"):
        decode_image(path)


def test_a_missing_image_is_named(tmp_path):
    with pytest.raises(DataError, match=str(tmp_path / "a.png")):
        decode_image(tmp_path / "a.png")


@pytest.mark.parametrize("suffix", ["jpg", "png", "bmp", "tif", "webp"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_truncated_image_is_named(tmp_path, suffix, share):
    path = tmp_path / f"a.{suffix}"
    noise = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(DataError, match=f"{path} cannot be decoded"):
        decode_image(path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("suffix", ["jpg", "png", "bmp", "tif", "webp"])
def test_damaged_bytes_never_raise_anything_else(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    rng = np.random.default_rng(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    noise = rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path, exif=exif)
    whole = np.frombuffer(path.read_bytes(), np.uint8)
    num_refused = 0
    for _ in range(100):
        damaged = whole.copy()
        where = rng.integers(0, min(len(whole), 400), 8)
        damaged[where] = rng.integers(0, 256, 8)
        path.write_bytes(damaged.tobytes())
        try:
            assert decode_image(path).ndim == 3
        except DataError:
            num_refused += 1
    assert num_refused > 0


@pytest.mark.parametrize(
    "error", [OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, struct.error]
)
def test_what_a_decoder_raises_becomes_a_data_error(tmp_path, monkeypatch, error):
    path = tmp_path / "a.png"
    Image.new("RGB", (4, 3)).save(path)

    def fail(image, *, in_place):
        raise error("broken")

    monkeypatch.setattr(ImageOps, "exif_transpose", fail)
    with pytest.raises(DataError, match=f"{path} cannot be decoded: .*broken"):
        decode_image(path)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("limit", [5, 10])
def test_a_decompression_bomb_is_named(tmp_path, monkeypatch, limit):
    path = tmp_path / "a.png"
    Image.new("RGB", (4, 3)).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(DataError, match=f"{path} cannot be decoded"):
        decode_image(path)


# Decoding masks


def test_softmax_masks_keep_their_ids(make_folder, classes):
    root = make_folder([(2, 3)])
    values = np.array([[0, 1, 2], [255, 2, 0]], np.uint8)
    sample = sample_of(root, Size(2, 3))
    Image.fromarray(values).save(sample.masks[0])
    np.testing.assert_array_equal(decode_mask(sample, classes), values)


def test_palette_masks_keep_their_indices(make_folder, classes):
    root = make_folder([(2, 3)])
    values = np.array([[0, 1, 2], [255, 2, 0]], np.uint8)
    sample = sample_of(root, Size(2, 3))
    mask = Image.fromarray(values).convert("L")
    mask = Image.frombytes("P", mask.size, mask.tobytes())
    mask.putpalette([v for i in range(256) for v in (255 - i, i, 7)])
    mask.save(sample.masks[0], transparency=0)
    np.testing.assert_array_equal(decode_mask(sample, classes), values)


@pytest.mark.parametrize("colour_type", [0, 3])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_masks_of_few_bits_keep_their_ids(make_folder, classes, depth, colour_type):
    root = make_folder([(2, 8)])
    sample = sample_of(root, Size(2, 8))
    values = np.random.default_rng(0).integers(0, min(3, 2**depth), (2, 8))
    if colour_type == 3:
        # Pillow writes palettes of few bits itself; grey of few bits it does not.
        mask = Image.frombytes("P", (8, 2), values.astype(np.uint8).tobytes())
        mask.putpalette([9, 9, 9] * 2**depth)
        mask.save(sample.masks[0], bits=depth)
    else:
        bits = (values[..., None] >> np.arange(depth)[::-1]) & 1
        rows = [np.packbits(row).tobytes() for row in bits.reshape(2, -1).astype(np.uint8)]
        write_raw_png(sample.masks[0], rows, width=8, depth=depth, colour_type=0)
    assert sample.masks[0].read_bytes()[24:26] == bytes([depth, colour_type])
    np.testing.assert_array_equal(decode_mask(sample, classes), values)


def test_sigmoid_masks_are_stacked_in_class_order(make_folder, classes):
    root = make_folder([(2, 3)], kind="multilabel")
    (sample,) = find_samples(root, classes, "multilabel")
    for i, path in enumerate(sample.masks):
        Image.fromarray(np.full((2, 3), [0, 1, 255][i], np.uint8)).save(path)
    mask = decode_mask(sample, classes)
    assert mask.shape == (3, 2, 3)
    assert mask[:, 0, 0].tolist() == [0, 1, 255]


def test_one_class_is_sigmoid(make_folder):
    root = make_folder([(2, 3)])
    Image.new("1", (3, 2), 1).save(root / "masks" / "s0.png")
    one = Classes(names=("lake",), colours=((0, 0, 0),))
    np.testing.assert_array_equal(decode_mask(sample_of(root, Size(2, 3)), one), np.ones((1, 2, 3)))


def test_ids_outside_the_classes_are_listed_with_their_counts(make_folder, classes):
    root = make_folder([(2, 3)])
    sample = sample_of(root, Size(2, 3))
    Image.fromarray(np.array([[0, 1, 3], [255, 9, 3]], np.uint8)).save(sample.masks[0])
    with pytest.raises(DataError, match=r"3 \(2 pixels\), 9 \(1 pixel\)\. Labels are 0 to 2") as e:
        decode_mask(sample, classes)
    assert str(sample.masks[0]) in str(e.value)


def test_many_wrong_ids_are_cut_and_counted(make_folder, classes):
    root = make_folder([(1, 256)])
    sample = sample_of(root, Size(1, 256))
    Image.fromarray(np.arange(256, dtype=np.uint8)[None]).save(sample.masks[0])
    with pytest.raises(DataError, match=r"12 \(1 pixel\) and 242 more"):
        decode_mask(sample, classes)


def test_a_class_id_is_no_value_of_a_sigmoid_mask(make_folder, classes):
    root = make_folder([(2, 3)], kind="multilabel")
    (sample,) = find_samples(root, classes, "multilabel")
    Image.new("L", (3, 2), 2).save(sample.masks[1])
    with pytest.raises(DataError, match=rf"{sample.masks[1]} holds .* 2 \(6 pixels\)"):
        decode_mask(sample, classes)


def test_a_mask_of_another_size_names_both_files(make_folder, classes):
    root = make_folder([(2, 3)])
    sample = sample_of(root, Size(3, 2))
    with pytest.raises(DataError, match=f"{sample.masks[0]} is 2x3.*{sample.image} is 3x2"):
        decode_mask(sample, classes)


def test_a_truncated_mask_is_named(make_folder, classes):
    root = make_folder([(40, 50)])
    sample = sample_of(root, Size(40, 50))
    sample.masks[0].write_bytes(sample.masks[0].read_bytes()[:200])
    with pytest.raises(DataError, match=f"{sample.masks[0]} cannot be decoded"):
        decode_mask(sample, classes)
