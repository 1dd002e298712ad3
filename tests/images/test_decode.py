"""Every format, drawn here with Pillow or by hand, and read back to the exact value."""

import struct

import numpy as np
import pytest
from PIL import Image, ImageCms, PngImagePlugin
from tests.data.files import finish_tiff, write_png16, write_tiff

from anysize.config import PixelConvention
from anysize.data.loader import normalise
from anysize.errors import DataError
from anysize.faults import FaultError
from anysize.geometry import Size
from anysize.images import decode
from anysize.images import headers as fingerprint
from anysize.images.decode import decode_image, image_rows, viewable
from anysize.images.headers import read_frame, read_size

RNG = np.random.default_rng(0)


def values(channels, dtype=np.uint16, size=(5, 7)):
    return RNG.integers(0, np.iinfo(dtype).max + 1, (*size, channels), dtype=dtype)


# 16 bits


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_a_16_bit_png_keeps_all_bits(tmp_path, channels):
    array = values(channels)
    write_png16(tmp_path / "a.png", array)
    image = decode_image(tmp_path / "a.png")
    assert image.dtype == np.uint16
    expected = np.repeat(array[..., :1], 3, -1) if channels < 3 else array[..., :3]
    np.testing.assert_array_equal(image, expected)
    np.testing.assert_array_equal(decode_image(tmp_path / "a.png", channels), array)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_16_bit_png_stands_upright(tmp_path, channels, orientation):
    array = values(channels)
    write_png16(tmp_path / "a.png", array, orientation)
    eight = Image.fromarray(np.arange(35, dtype=np.uint8).reshape(5, 7))
    exif = Image.Exif()
    exif[0x0112] = orientation
    eight.save(tmp_path / "b.png", exif=exif)
    order = decode_image(tmp_path / "b.png")[..., 0]  # where Pillow itself puts each pixel
    np.testing.assert_array_equal(
        decode_image(tmp_path / "a.png", channels), array.reshape(35, -1)[order]
    )
    assert read_size(tmp_path / "a.png") == order.shape


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I"])
def test_a_16_bit_grey_tiff_keeps_all_bits(tmp_path, mode):
    array = values(1)[..., 0]
    picture = Image.fromarray(array.astype(np.int32) if mode == "I" else array)
    if mode == "I;16B":
        write_tiff(tmp_path / "a.tif", array[..., None], order=">")
    else:
        picture.save(tmp_path / "a.tif")
    with Image.open(tmp_path / "a.tif") as image:
        assert image.mode == mode
    np.testing.assert_array_equal(
        decode_image(tmp_path / "a.tif"), np.repeat(array[..., None], 3, -1)
    )


def test_numbers_that_16_bits_do_not_hold_are_refused(tmp_path):
    Image.fromarray(np.array([[0, 65536]], np.int32)).save(tmp_path / "a.tif")
    with pytest.raises(FaultError, match="whole numbers from 0 to 65536") as caught:
        decode_image(tmp_path / "a.tif")
    assert caught.value.fault.kind == "encoding"
    assert caught.value.fault.path == tmp_path / "a.tif"


def test_white_that_is_zero_is_turned(tmp_path):
    array = values(1)
    write_tiff(tmp_path / "a.tif", array, photometric=0)
    np.testing.assert_array_equal(decode_image(tmp_path / "a.tif", 1), 65535 - array)


def test_16_bits_are_the_same_to_the_net_as_8(tmp_path):
    eight = values(3, np.uint8)
    write_png16(tmp_path / "a.png", eight.astype(np.uint16) * 257)
    Image.fromarray(eight).save(tmp_path / "b.png")
    sixteen, plain = decode_image(tmp_path / "a.png"), decode_image(tmp_path / "b.png")
    for pixels in (PixelConvention(), PixelConvention(max_value=1.0, mean=(0.5,) * 3)):
        np.testing.assert_allclose(
            normalise(sixteen, pixels), normalise(plain, pixels), rtol=1e-5, atol=1e-5
        )
    np.testing.assert_array_equal(viewable(sixteen, PixelConvention()), eight)


def test_white_of_a_camera_of_12_bits(tmp_path):
    write_png16(tmp_path / "a.png", np.full((2, 2, 3), 4095, np.uint16))
    image = decode_image(tmp_path / "a.png")
    pixels = PixelConvention(white=4095, mean=(0.0, 0.0, 0.0))
    np.testing.assert_allclose(normalise(image, pixels), 255.0, rtol=1e-6)
    assert (viewable(image, pixels) == 255).all()
    eight = np.full((2, 2, 3), 255, np.uint8)
    assert (normalise(eight, pixels) == 255).all()  # of 8 bits, white stays 255


# Bands


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("planar", [1, 2])
@pytest.mark.parametrize(("compression", "predictor"), [(1, 1), (8, 1), (8, 2)])
@pytest.mark.parametrize("tile", [None, 16])
def test_a_tiff_of_five_bands(tmp_path, dtype, order, planar, compression, predictor, tile):
    array = values(5, dtype, size=(21, 35))
    path = tmp_path / "a.tif"
    write_tiff(
        path,
        array,
        order=order,
        planar=planar,
        compression=compression,
        predictor=predictor,
        tile=tile,
    )
    image = decode_image(path, 5)
    assert image.dtype == dtype
    np.testing.assert_array_equal(image, array)
    assert read_size(path) == Size(21, 35)


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate", "packbits", "raw"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_bands_stand_upright_whatever_their_compression(tmp_path, compression, orientation):
    """libtiff's own codecs: what Pillow wrote as grey is called bands of a narrower image."""
    array = values(5, size=(6, 8))
    wide = Image.fromarray(array.reshape(6, 40))
    wide.save(tmp_path / "wide.tif", compression=compression)
    data = (tmp_path / "wide.tif").read_bytes()
    with Image.open(tmp_path / "wide.tif") as image:
        tags = {tag: np.atleast_1d(image.tag_v2[tag]) for tag in (257, 259, 273, 278, 279)}
    tags |= {256: [8], 258: [16] * 5, 262: [1], 277: [5], 274: [orientation]}
    path = tmp_path / "a.tif"
    finish_tiff(path, data, tags, "<" if data[:1] == b"I" else ">")
    exif = Image.Exif()
    exif[0x0112] = orientation
    places = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(6, 8))
    places.save(tmp_path / "b.png", exif=exif)
    expected = array.reshape(48, 5)[decode_image(tmp_path / "b.png")[..., 0]]
    np.testing.assert_array_equal(decode_image(path, 5), expected)
    assert read_size(path) == expected.shape[:2]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize(
    ("extra", "is_alpha"), [((0,), False), ((1,), True), ((2,), True), (None, True)]
)
def test_a_fourth_band_is_alpha_unless_it_is_called_data(tmp_path, dtype, extra, is_alpha):
    array = values(4, dtype)
    path = tmp_path / "a.tif"
    write_tiff(path, array, photometric=2, **({"extra": extra} if extra else {}))
    np.testing.assert_array_equal(decode_image(path, 4), array)
    if is_alpha and extra != (1,):  # Colours are divided by this alpha, see below.
        np.testing.assert_array_equal(decode_image(path, 3), array[..., :3])
    elif not is_alpha:
        with pytest.raises(FaultError, match=r"has 4 channels, but model\.num_channels is 3"):
            decode_image(path, 3)


def test_grey_becomes_rgb_or_stays_one_channel(tmp_path):
    array = values(1, np.uint8)
    for name in ("a.png", "a.tif", "a.bmp"):
        Image.fromarray(array[..., 0]).save(tmp_path / name)
        np.testing.assert_array_equal(decode_image(tmp_path / name, 1), array)
        np.testing.assert_array_equal(decode_image(tmp_path / name), np.repeat(array, 3, -1))


def test_one_bit_is_black_and_white(tmp_path):
    bits = RNG.integers(0, 2, (5, 7)).astype(bool)
    Image.fromarray(bits).save(tmp_path / "a.png")
    np.testing.assert_array_equal(decode_image(tmp_path / "a.png", 1)[..., 0], bits * 255)


@pytest.mark.parametrize(
    ("mode", "num_channels", "says"),
    [
        ("RGB", 1, "3 channels, but model.num_channels is 1"),
        ("RGBA", 5, "3 channels and alpha"),
        ("L", 4, "1 channel, but"),
        ("P", 1, "3 channels"),
    ],
)
def test_another_number_of_channels_is_refused(tmp_path, mode, num_channels, says):
    Image.new(mode, (3, 2)).save(tmp_path / "a.png")
    with pytest.raises(FaultError, match=says) as caught:
        decode_image(tmp_path / "a.png", num_channels)
    assert caught.value.fault.kind == "encoding"


def test_alpha_is_a_channel_if_it_is_asked_for(tmp_path):
    array = values(4, np.uint8)
    Image.fromarray(array).save(tmp_path / "a.png")
    np.testing.assert_array_equal(decode_image(tmp_path / "a.png", 4), array)
    np.testing.assert_array_equal(decode_image(tmp_path / "a.png", 3), array[..., :3])


# 8 bits


@pytest.mark.parametrize(
    ("suffix", "options"),
    [("png", {}), ("bmp", {}), ("tif", {}), ("webp", {"lossless": True, "exact": True})],
)
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
def test_lossless_formats_are_read_to_the_value(tmp_path, suffix, options, mode):
    array = values(3, np.uint8)
    picture = Image.fromarray(array)
    if mode == "RGBA":
        picture.putalpha(Image.fromarray(values(1, np.uint8)[..., 0]))
    elif mode != "RGB":
        picture = picture.convert(mode)
        array = np.asarray(picture.convert("RGB"))
    picture.save(tmp_path / f"a.{suffix}", **options)
    np.testing.assert_array_equal(decode_image(tmp_path / f"a.{suffix}"), array)


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_all_eight_orientations(tmp_path, suffix, orientation):
    """Each corner of the upright image has its own colour; the file holds it turned."""
    corners = np.zeros((32, 48, 3), np.uint8)
    corners[:16, :24], corners[:16, 24:] = (250, 10, 10), (10, 250, 10)
    corners[16:, :24], corners[16:, 24:] = (10, 10, 250), (250, 250, 250)
    back = {  # what makes the stored image of the upright one. Source: TIFF 6.0, tag 274
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.swapaxes(0, 1),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
        8: lambda a: np.rot90(a, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(np.ascontiguousarray(back(corners))).save(path, exif=exif, quality=95)
    image = decode_image(path).astype(int)
    assert image.shape == corners.shape
    assert np.abs(image - corners)[8:-8, 8:-8].mean() < 8
    assert read_size(path) == Size(32, 48)
    assert read_frame(path).orientation == orientation


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "I;16"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_plain_tiff_of_any_mode_stands_upright(tmp_path, mode, orientation):
    """The modes that Pillow would map into memory where a TIFF is stored without compression."""
    picture = Image.fromarray(values(1)[..., 0])
    if mode != "I;16":
        picture = Image.fromarray(values(3, np.uint8)).convert(mode)
    for name, tags in (("plain", {}), ("turned", {0x0112: orientation})):
        picture.save(tmp_path / f"{name}.tif", tiffinfo=tags)
    stored = decode_image(tmp_path / "plain.tif")
    upright = {  # Source: TIFF 6.0, tag 274
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.swapaxes(0, 1),
        6: np.rot90(stored, -1),
        7: stored[::-1, ::-1].swapaxes(0, 1),
        8: np.rot90(stored),
    }[orientation]
    np.testing.assert_array_equal(decode_image(tmp_path / "turned.tif"), upright)


def test_cmyk_with_and_without_adobes_mark(tmp_path):
    """Adobe stores ink inverted and says so in a mark; without it, ink is ink."""
    ink = np.zeros((16, 16, 4), np.uint8)
    ink[..., 1:3] = 255  # magenta and yellow: red
    path = tmp_path / "a.jpg"
    Image.fromarray(ink, "CMYK").save(path, quality=100, subsampling=0)
    data = path.read_bytes()
    at = data.index(b"\xff\xee")
    assert data[at + 4 : at + 9] == b"Adobe"
    assert np.abs(decode_image(path).astype(int) - (255, 0, 0)).max() < 8
    length = struct.unpack(">H", data[at + 2 : at + 4])[0]
    path.write_bytes(data[:at] + data[at + 2 + length :])
    # Without the mark, the same bytes say the opposite: no magenta, no yellow, but cyan and black.
    assert np.abs(decode_image(path).astype(int) - (0, 0, 0)).max() < 8
    Image.fromarray(255 - ink, "CMYK").save(path, quality=100, subsampling=0)
    data = path.read_bytes()
    path.write_bytes(data[:at] + data[at + 2 + length :])
    assert np.abs(decode_image(path).astype(int) - (255, 0, 0)).max() < 8


def test_a_cmyk_tiff(tmp_path):
    Image.new("CMYK", (3, 2), (0, 255, 255, 0)).save(tmp_path / "a.tif")
    assert (decode_image(tmp_path / "a.tif") == (255, 0, 0)).all()


def test_colour_profiles_are_not_applied(tmp_path):
    array = values(3, np.uint8)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    Image.fromarray(array).save(tmp_path / "a.png", icc_profile=profile)
    np.testing.assert_array_equal(decode_image(tmp_path / "a.png"), array)


@pytest.mark.parametrize("suffix", ["tif", "webp", "png"])
def test_of_several_frames_the_first_is_taken(tmp_path, suffix):
    frames = [Image.new("RGB", (8, 8), (i, 2 * i, 3 * i)) for i in (10, 60, 80)]
    path = tmp_path / f"a.{suffix}"
    options = {"lossless": True} if suffix == "webp" else {}
    frames[0].save(path, save_all=True, append_images=frames[1:], **options)
    assert (decode_image(path) == (10, 20, 30)).all()


def test_an_orientation_anywhere_in_the_file_counts_for_header_and_pixels(tmp_path):
    """Behind the pixels of a PNG, behind 16 KiB of a JPEG, and in XMP data."""
    stored = np.arange(40 * 24 * 3, dtype=np.uint8).reshape(40, 24, 3) // 16 * 16
    exif = Image.Exif()
    exif[0x0112] = 6
    late = tmp_path / "late.png"
    Image.fromarray(stored).save(late, exif=exif)
    data = late.read_bytes()
    start = data.index(b"eXIf") - 4
    stop = start + 12 + int.from_bytes(data[start : start + 4], "big")
    end = data.index(b"IEND") - 4
    late.write_bytes(data[:start] + data[stop:end] + data[start:stop] + data[end:])
    xmp = tmp_path / "xmp.png"
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", '<rdf:Description tiff:Orientation="6"/>')
    Image.fromarray(stored).save(xmp, pnginfo=info)
    jpeg = tmp_path / "late.jpg"
    Image.fromarray(stored).save(jpeg, exif=exif, quality=95)
    data = jpeg.read_bytes()
    at = data.index(b"Exif\0") - 4
    filler = b"\xff\xe9" + struct.pack(">H", 20_002) + bytes(20_000)
    jpeg.write_bytes(data[:at] + filler + data[at:])
    assert jpeg.read_bytes().index(b"Exif\0") > 16_384
    for path in (late, xmp, jpeg):
        assert read_frame(path) == (Size(40, 24), 6)
        assert read_size(path) == Size(24, 40)
        image = decode_image(path).astype(int)
        assert np.abs(image - np.rot90(stored, -1)).mean() < (12 if path == jpeg else 1e-9)


def test_alpha_that_colours_were_multiplied_by_is_divided_out_at_16_bits_as_at_8(tmp_path):
    straight = values(3, np.uint8) // 4 * 4
    alpha = values(1, np.uint8) // 2 + 100
    for scale, dtype in ((1, np.uint8), (257, np.uint16)):
        most = np.iinfo(dtype).max
        colours, opacity = straight.astype(float) * scale, alpha.astype(float) * scale
        stored = np.concatenate([np.rint(colours * opacity / most), opacity], -1).astype(dtype)
        path = tmp_path / "a.tif"
        write_tiff(path, stored, photometric=2, extra=[1])
        image = decode_image(path).astype(float) / scale
        assert np.abs(image - straight).max() <= 2
        write_tiff(path, stored, photometric=2, extra=[2])  # the control: alpha is only beside it
        np.testing.assert_array_equal(decode_image(path), stored[..., :3])


def test_floats_need_a_range(tmp_path):
    path = tmp_path / "a.tif"
    array = np.random.default_rng(0).uniform(-1, 3, (5, 7)).astype(np.float32)
    Image.fromarray(array).save(path)
    with pytest.raises(FaultError, match=r"Set pixels\.float_range"):
        decode_image(path)
    expected = np.rint((array.astype(float) - 0.5).clip(0, 2) / 2 * 65535)
    for image in (decode_image(path, 1, (0.5, 2.5)), decode_image(path, 3, (0.5, 2.5))[..., :1]):
        assert image.dtype == np.uint16
        np.testing.assert_array_equal(image[..., 0], expected)
    write_tiff(path, np.stack([array] * 5, -1), sample_format=3)
    np.testing.assert_array_equal(decode_image(path, 5, (0.5, 2.5))[..., 4], expected)
    array[0, 0] = np.nan
    Image.fromarray(array).save(path)
    with pytest.raises(FaultError, match="1 values that are not finite"):
        decode_image(path, 1, (0.5, 2.5))


@pytest.mark.parametrize("bands", [1, 3, 5])
@pytest.mark.parametrize(
    "how",
    [{}, {"tile": 16}, {"planar": 2}, {"compression": 8, "predictor": 2}, {"order": ">"}],
    ids=str,
)
def test_rows_of_a_large_tiff_are_those_of_the_whole(tmp_path, monkeypatch, bands, how):
    if bands == 1 and "planar" in how:
        pytest.skip("one band has no planes")
    array = values(bands, size=(45, 37))
    path = tmp_path / "a.tif"
    write_tiff(path, array, photometric=2 if bands == 3 else 1, **how)
    small = image_rows(path, bands)
    monkeypatch.setattr(fingerprint.Image, "MAX_IMAGE_PIXELS", 45 * 37 - 1)
    large = image_rows(path, bands)
    for rows in (small, large):
        assert rows.size == Size(45, 37)
        for top, bottom in ((0, 45), (0, 1), (44, 45), (13, 37), (16, 32)):
            np.testing.assert_array_equal(rows.read(top, bottom), array[top:bottom])


def test_only_the_strips_that_rows_lie_in_are_read(tmp_path, monkeypatch):
    """The others may even be missing; the control is the whole file, which then is refused."""
    array = values(3, size=(64, 16))
    path = tmp_path / "a.tif"
    write_tiff(path, array, photometric=2)
    data = bytearray(path.read_bytes())
    at = data.rindex(struct.pack("<HHI", 273, 4, 32)) + 8
    (where,) = struct.unpack("<I", data[at : at + 4])
    data[where + 4 * 30 : where + 4 * 32] = struct.pack("<II", 1 << 30, 1 << 30)
    path.write_bytes(data)
    monkeypatch.setattr(fingerprint.Image, "MAX_IMAGE_PIXELS", 1000)
    rows = image_rows(path)
    np.testing.assert_array_equal(rows.read(10, 60), array[10:60])
    with pytest.raises(FaultError, match="ends before its strips do"):
        rows.read(10, 64)


def test_a_bigtiff_is_read(tmp_path, monkeypatch):
    array = values(3, np.uint8, size=(45, 37))
    path = tmp_path / "a.tif"
    Image.fromarray(array).save(path, big_tiff=True)
    assert path.read_bytes()[:4] == b"II+\0"
    np.testing.assert_array_equal(decode_image(path), array)
    monkeypatch.setattr(fingerprint.Image, "MAX_IMAGE_PIXELS", 1000)
    np.testing.assert_array_equal(image_rows(path).read(7, 31), array[7:31])


def test_what_is_too_large_in_any_case_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "LARGEST_WHOLE", 1000)
    monkeypatch.setattr(fingerprint.Image, "MAX_IMAGE_PIXELS", 100)
    Image.new("RGB", (30, 30)).save(tmp_path / "a.png")
    assert image_rows(tmp_path / "a.png").size == Size(30, 30)
    Image.new("RGB", (30, 40)).save(tmp_path / "b.png")
    with pytest.raises(FaultError, match=r"b\.png is 40x30, more than the 1000 pixels"):
        image_rows(tmp_path / "b.png")


@pytest.mark.parametrize(
    ("name", "start"), [("a.heic", b"\0\0\0\x18ftypheic"), ("a.gif", b"GIF89a")]
)
def test_formats_that_are_not_read_are_named(tmp_path, name, start):
    for path in (tmp_path / name, tmp_path / "a.jpg"):  # by content, whatever the name
        path.write_bytes(start + bytes(100))
        for read in (decode_image, read_size):
            with pytest.raises(DataError, match=f"{name[2:].upper()}.*Convert it to PNG"):
                read(path)


# Hostile files


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_bomb_is_refused_by_its_header(tmp_path, monkeypatch):
    """The budget counts bands as well: a header may claim many for few pixels."""
    monkeypatch.setattr(fingerprint.Image, "MAX_IMAGE_PIXELS", 100)
    write_tiff(tmp_path / "a.tif", values(5, size=(4, 6)))
    with pytest.raises(FaultError, match="120 pixels are more than the 100"):
        decode_image(tmp_path / "a.tif", 5)
    Image.new("RGB", (11, 10)).save(tmp_path / "a.png")
    write_tiff(tmp_path / "b.tif", values(1, size=(10, 11)))
    for read in (decode_image, read_size):
        for name in ("a.png", "b.tif"):
            with pytest.raises(DataError, match="110 pixels are more than the 100"):
                read(tmp_path / name)


def test_too_many_bands_and_tiles_of_any_size_are_refused(tmp_path):
    write_tiff(tmp_path / "a.tif", values(65, np.uint8))
    with pytest.raises(FaultError, match="a TIFF of 65 bands; at most 64"):
        decode_image(tmp_path / "a.tif", 65)
    write_tiff(tmp_path / "b.tif", values(5, np.uint8), tile=16)
    data = bytearray((tmp_path / "b.tif").read_bytes())
    at = data.rindex(struct.pack("<HHI", 322, 4, 1)) + 8
    data[at : at + 4] = struct.pack("<I", 1 << 30)
    (tmp_path / "b.tif").write_bytes(data)
    with pytest.raises(FaultError, match=r"tiles of \d+ in an image of 7 pixels"):
        decode_image(tmp_path / "b.tif", 5)


def test_strips_that_the_image_does_not_need_are_not_read(tmp_path):
    """A file of gigabytes, of which the first image is a few bytes; and strips that claim them."""
    path = tmp_path / "a.tif"
    array = values(5)
    write_tiff(path, array)
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # sparse
    np.testing.assert_array_equal(decode_image(path, 5), array)
    at = data.rindex(struct.pack("<HHI", 279, 4, 3)) + 8
    (where,) = struct.unpack("<I", data[at : at + 4])
    for claim, says in ((1 << 30, "strips of 10737"), (1 << 20, "ends before its strips do")):
        forged = data[:where] + struct.pack("<I", claim) + data[where + 4 :]
        path.write_bytes(forged)
        with path.open("r+b") as file:
            file.truncate(1 << 40 if claim == 1 << 30 else len(forged))
        with pytest.raises(FaultError, match=says):
            decode_image(path, 5)


def test_planes_of_unequal_numbers_of_strips_are_refused(tmp_path):
    path = tmp_path / "a.tif"
    write_tiff(path, values(5), planar=2)
    data = bytearray(path.read_bytes())
    for tag in (273, 279):
        at = data.rindex(struct.pack("<HHI", tag, 4, 15)) + 4
        data[at : at + 4] = struct.pack("<I", 14)
    path.write_bytes(data)
    with pytest.raises(FaultError, match="14 strips or tiles for 5 planes"):
        decode_image(path, 5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["png16", "tiff", "tiff tiles", "tiff deflate"])
def test_damaged_bytes_raise_nothing_but_faults(tmp_path, kind):
    path = tmp_path / ("a.png" if kind == "png16" else "a.tif")
    if kind == "png16":
        write_png16(path, values(3, size=(9, 11)))
    else:
        write_tiff(
            path,
            values(5, size=(21, 35)),
            tile=16 if "tiles" in kind else None,
            compression=8 if "deflate" in kind else 1,
            planar=2 if "tiles" in kind else 1,
        )
    whole = np.frombuffer(path.read_bytes(), np.uint8)
    rng = np.random.default_rng(3)
    num_refused = 0
    for _ in range(300):
        damaged = whole.copy()
        last = len(whole) if kind != "png16" else 120
        first = 0 if kind == "png16" else len(whole) - 250
        where = [*rng.integers(first, last, 3), *rng.integers(0, 8, rng.integers(0, 2))]
        damaged[where] = rng.integers(0, 256, len(where))
        path.write_bytes(damaged[: len(whole) if rng.random() < 0.8 else rng.integers(9, 400)])
        try:
            assert decode_image(path, 3 if kind == "png16" else 5).ndim == 3
        except FaultError:
            num_refused += 1
    assert num_refused > 50
