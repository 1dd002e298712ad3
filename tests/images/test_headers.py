import pytest
from PIL import Image, ImageOps

from anysize.errors import DataError
from anysize.geometry import Size
from anysize.images.headers import fingerprint, read_size


def test_sizes_come_in_the_order_of_the_files(tmp_path):
    paths = []
    for i, (width, height) in enumerate([(7, 5), (1, 9), (30, 4)]):
        paths.append(tmp_path / f"{i}.png")
        Image.new("RGB", (width, height)).save(paths[-1])
    assert fingerprint(paths) == [Size(5, 7), Size(9, 1), Size(4, 30)]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(tmp_path, orientation):
    path = tmp_path / "a.jpg"
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (7, 5)).save(path, exif=exif)
    assert read_size(path) == (Size(7, 5) if orientation >= 5 else Size(5, 7))


def test_only_the_header_is_read(tmp_path):
    path = tmp_path / "a.png"
    Image.effect_noise((400, 300), 50).save(path)
    path.write_bytes(path.read_bytes()[:500])
    assert read_size(path) == Size(300, 400)


def test_all_unreadable_files_are_counted_and_ten_named(tmp_path):
    good = tmp_path / "good.png"
    Image.new("RGB", (7, 5)).save(good)
    bad = [tmp_path / f"bad{i:02}.png" for i in range(12)]
    for path in bad:
        path.write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"12 of 13 images cannot be read") as caught:
        fingerprint([good, *bad])
    assert "bad09.png" in str(caught.value)
    assert "bad10.png" not in str(caught.value)
    assert "and 2 more" in str(caught.value)


def test_a_missing_file_and_a_foreign_format_are_named(tmp_path):
    with pytest.raises(DataError, match=r"No such image: .*none\.png"):
        read_size(tmp_path / "none.png")
    gif = tmp_path / "a.png"
    Image.new("P", (7, 5)).save(gif, format="GIF")
    with pytest.raises(DataError, match=r"a\.png cannot be read as an image"):
        read_size(gif)


def test_orientation_after_the_pixels_of_a_png_counts(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "a.png"
    Image.new("RGB", (7, 5)).save(path, exif=exif)
    data = path.read_bytes()
    start = data.index(b"eXIf") - 4
    stop = start + 12 + int.from_bytes(data[start : start + 4], "big")
    end = data.index(b"IEND") - 4
    path.write_bytes(data[:start] + data[stop:end] + data[start:stop] + data[end:])
    assert path.read_bytes().index(b"eXIf") > path.read_bytes().index(b"IDAT")
    with Image.open(path) as image:
        assert ImageOps.exif_transpose(image).size == (5, 7)
    assert read_size(path) == Size(7, 5)


def test_tiff_is_turned_once(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "a.tiff"
    Image.new("RGB", (7, 5)).save(path, exif=exif)
    with Image.open(path) as image:
        assert ImageOps.exif_transpose(image).size == (5, 7)
    assert read_size(path) == Size(7, 5)
