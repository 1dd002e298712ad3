"""Drawn folders with one fault each: it is named, and nothing else is."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from anysize.check.budget import require_fit, require_labels
from anysize.check.findings import FIXES
from anysize.check.folder import check_data, folder_config
from anysize.check.report import describe_report, report_json
from anysize.check.turned import compare_edges
from anysize.config import PlanConfig
from anysize.data.samples import decode_image, decode_mask
from anysize.errors import DataError
from anysize.images.opening import stand_upright

# pycocotools 2.0.11 under numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")

NAMES = ("background", "disc", "stripe")
COLOURS = ((90, 120, 90), (200, 80, 60), (60, 80, 200))
ORIENTATION = 0x0112
# How an upright picture is stored, so that a reader who heeds the tag sees it upright.
STORED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def draw(seed, height, width):
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:height, :width]
    labels = np.zeros((height, width), np.uint8)
    y, x = rng.uniform(0.2, 0.4) * height, rng.uniform(0.2, 0.4) * width
    labels[(rows - y) ** 2 + (columns - x) ** 2 < (min(height, width) / 4) ** 2] = 1
    left = int(rng.uniform(0.6, 0.8) * width)
    labels[height // 5 :, left : left + 6] = 2
    image = np.array(COLOURS)[labels] + rng.normal(0, 8, (height, width, 3))
    return image.clip(0, 255).astype(np.uint8), labels


def save_image(path, pixels, orientation=1):
    image, exif = Image.fromarray(pixels), Image.Exif()
    if orientation != 1:
        image = image.transpose(STORED[orientation])
        exif[ORIENTATION] = orientation
    image.save(path, exif=exif, **({"quality": 95} if path.suffix == ".jpg" else {}))


def save_mask(path, labels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(labels.astype(np.uint8)).save(path)


def read(path):
    return np.array(Image.open(path))


def write_classes(root, names=NAMES, ignore_index=255):
    tables = [
        f'[[class]]\nname = "{name}"\ncolour = {list(colour)}\n'
        for name, colour in zip(names, COLOURS, strict=False)
    ]
    (root / "classes.toml").write_text(f"ignore_index = {ignore_index}\n" + "\n".join(tables))


SIZES = [(60, 84), (61, 80), (72, 72), (90, 64), (64, 90), (80, 80), (66, 70), (75, 62)]
ORIENTATIONS = [1, 6, 8, 3, 5, 6, 1, 2]


def write_images(folder):
    """Images of which most have an EXIF orientation; labels lie over what one sees."""
    folder.mkdir(parents=True)
    drawn = {}
    for i, (size, orientation) in enumerate(zip(SIZES, ORIENTATIONS, strict=True)):
        image, labels = draw(i, *size)
        suffix = "jpg" if orientation != 1 else "png"
        save_image(folder / f"s{i}.{suffix}", image, orientation)
        drawn[f"s{i}"] = labels
    return drawn


def index_folder(root):
    for stem, labels in write_images(root / "images").items():
        labels[0, :2] = 255
        save_mask(root / f"masks/{stem}.png", labels)
    write_classes(root)


def palette_folder(root):
    for stem, labels in write_images(root / "images").items():
        image = Image.fromarray(labels)
        image.putpalette([c for colour in COLOURS for c in colour])
        (root / "masks").mkdir(exist_ok=True)
        image.save(root / f"masks/{stem}.png")
    write_classes(root)


def colour_folder(root):
    for stem, labels in write_images(root / "images").items():
        save_mask(root / f"masks/{stem}.png", np.array(COLOURS)[labels])
    write_classes(root)


def binary_folder(root):
    for stem, labels in write_images(root / "images").items():
        save_mask(root / f"masks/{stem}.png", (labels == 1) * 255)
    write_classes(root, NAMES[:2], ignore_index=200)


def class_folders(root):
    for stem, labels in write_images(root / "images").items():
        for i, name in enumerate(NAMES):
            save_mask(root / f"masks/{name}/{stem}.png", labels == i)
    write_classes(root)


def stack_folder(root):
    for stem, labels in write_images(root / "images").items():
        (root / "masks").mkdir(exist_ok=True)
        np.save(root / f"masks/{stem}.npy", np.stack([labels == i for i in range(3)]))
    write_classes(root)


def outlines(labels):
    """The disc as a polygon, and the stripe."""
    rows, columns = np.nonzero(labels == 1)
    (y0, y1), (x0, x1) = (rows.min(), rows.max()), (columns.min(), columns.max())
    turns = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    x = (x0 + x1) / 2 + (x1 - x0) / 2 * np.cos(turns)
    y = (y0 + y1) / 2 + (y1 - y0) / 2 * np.sin(turns)
    yield 1, np.stack([x, y], axis=1).tolist()
    rows, columns = (v.tolist() for v in np.nonzero(labels == 2))
    (y0, y1), (x0, x1) = (min(rows), max(rows)), (min(columns), max(columns))
    yield 2, [[x0, y0], [x1, y0], [x1, y1], [x0, y1]]


def labelme_folder(root):
    for stem, labels in write_images(root / "images").items():
        shapes = [{"label": NAMES[i], "points": points} for i, points in outlines(labels)]
        (root / "masks").mkdir(exist_ok=True)
        (root / f"masks/{stem}.json").write_text(
            json.dumps({"shapes": shapes, "imageHeight": None, "imageWidth": None})
        )
    write_classes(root)


def coco_folder(root):
    drawn = write_images(root / "images")
    images, annotations = [], []
    for number, (stem, labels) in enumerate(drawn.items()):
        (path,) = (root / "images").glob(f"{stem}.*")
        height, width = labels.shape
        images.append({"id": number, "file_name": path.name, "height": height, "width": width})
        for i, points in outlines(labels):
            outline = [v for point in points for v in point]
            annotations.append(
                {
                    "id": len(annotations),
                    "image_id": number,
                    "category_id": i,
                    "segmentation": [outline],
                    "iscrowd": 0,
                }
            )
    categories = [{"id": i, "name": NAMES[i]} for i in (1, 2)]
    (root / "instances.json").write_text(
        json.dumps({"images": images, "annotations": annotations, "categories": categories})
    )


def ultralytics_folder(root):
    drawn = write_images(root / "images")
    (root / "labels").mkdir()
    for stem, labels in drawn.items():
        height, width = labels.shape
        lines = []
        for i, outline in outlines(labels):
            points = [v for x, y in outline for v in (x / width, y / height)]
            lines.append(" ".join(map(str, [i - 1, *points])))
        (root / f"labels/{stem}.txt").write_text("\n".join(lines))
    write_classes(root)


def voc_folder(root):
    drawn = write_images(root / "JPEGImages")
    for stem, labels in drawn.items():
        save_mask(root / f"SegmentationClass/{stem}.png", labels)
    lists = root / "ImageSets/Segmentation"
    lists.mkdir(parents=True)
    stems = list(drawn)
    (lists / "train.txt").write_text("\n".join(stems[:5]))
    (lists / "val.txt").write_text("\n".join(stems[5:]))
    write_classes(root)


FOLDERS = [
    index_folder,
    palette_folder,
    colour_folder,
    binary_folder,
    class_folders,
    stack_folder,
    labelme_folder,
    coco_folder,
    ultralytics_folder,
    voc_folder,
]


def made(tmp_path, make, name="data"):
    root = tmp_path / name
    root.mkdir()
    make(root)
    return root


def checked(root, num_threads=2, masks="auto", mask_orientation="auto", **plan):
    config = folder_config(root)
    data = replace(config.data, masks=masks, mask_orientation=mask_orientation)
    config = replace(config, data=data, plan=PlanConfig(**plan))
    return check_data(config, root, None, num_threads=num_threads)


def found(report):
    return {(f.kind, f.severity, f.path) for f in report.findings}


@pytest.mark.parametrize("make", FOLDERS)
def test_a_clean_folder_has_no_findings(tmp_path, make):
    report = checked(made(tmp_path, make))
    assert report.findings == ()
    assert report.passed
    assert len(report.sizes) == len(SIZES)
    pixels = sum(table.labels.sum() for table in report.class_pixels.values())
    planes = 3 if make in {class_folders, stack_folder} else 1
    if planes == 1:
        assert pixels == sum(h * w for h, w in SIZES)


# One fault each. Every function spoils a folder and tells kind, severity, file and words.


def cut_image(root):
    path = root / "images/s1.jpg"
    path.write_bytes(path.read_bytes()[:-400])
    return "truncated", "fault", path, ("truncated",)


def garbage_image(root):
    path = root / "images/s1.jpg"
    path.write_bytes(b"no image")
    return "unreadable", "fault", path, ("s1.jpg",)


def cut_mask(root):
    path = root / "masks/s2.png"
    path.write_bytes(path.read_bytes()[:60])
    return "truncated", "fault", path, ()


def garbage_mask(root):
    path = root / "masks/s2.png"
    path.write_bytes(b"no image")
    return "encoding", "fault", path, ("not a PNG",)


def no_mask(root):
    (root / "masks/s3.png").unlink()
    return "unpaired", "fault", root / "images/s3.jpg", ("no mask",)


def no_image(root):
    (root / "images/s3.jpg").unlink()
    return "unpaired", "fault", root / "masks/s3.png", ("no image",)


def same_stem(root):
    shutil.copy(root / "images/s0.png", root / "images/s0.bmp")
    return "same_stem", "fault", root / "images/s0.png", ("s0.bmp",)


def few_pixels(root):
    path = root / "masks/s0.png"
    save_mask(path, read(path)[:-2, :-1])
    return "size", "fault", path, ("2 rows missing, 1 column missing", "58x83", "60x84")


def more_pixels(root):
    path = root / "masks/s0.png"
    save_mask(path, np.pad(read(path), ((0, 1), (0, 0))))
    return "size", "fault", path, ("1 row too many",)


def rotated(root):
    # The mask as it lies over the stored pixels of an image whose tag says 6.
    path = root / "masks/s1.png"
    save_mask(path, read(path).T[::-1])
    return "rotated", "fault", path, ("EXIF orientation 6", "Turn the mask")


def rotated_square(root):
    path = root / "masks/s2.png"
    Image.open(path).transpose(STORED[8]).save(path)
    return "rotated", "fault", path, ("EXIF orientation 8", "agreement")


def upside_down(root):
    path = root / "masks/s3.png"
    Image.open(path).transpose(STORED[3]).save(path)
    return "rotated", "fault", path, ("EXIF orientation 3",)


def mirrored(root):
    path = root / "masks/s7.png"
    Image.open(path).transpose(STORED[2]).save(path)
    return "rotated", "fault", path, ("EXIF orientation 2",)


def tagged_mask(root):
    # A square image that was stored upright, whose mask kept the tag.
    path = root / "masks/s2.png"
    image, _ = draw(2, *SIZES[2])
    save_image(root / "images/s2.jpg", image)
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    Image.open(path).transpose(STORED[6]).save(path, exif=exif)
    return "rotated", "fault", path, ("EXIF orientation of its own, 6", "data.mask_orientation")


def wrong_ids(root):
    path = root / "masks/s4.png"
    labels = read(path)
    labels[3, :5], labels[4, :2] = 77, 9
    save_mask(path, labels)
    return "values", "fault", path, ("77 (5 pixels)", "9 (2 pixels)")


def never(root):
    for path in (root / "masks").iterdir():
        labels = read(path)
        labels[labels == 2] = 0
        save_mask(path, labels)
    return "never", "warning", root, ("'stripe'", "any mask")


def never_in_training(root):
    write_lists(root)
    for stem in ("s0", "s1", "s2", "s3", "s4", "s5"):
        labels = read(root / f"masks/{stem}.png")
        labels[labels == 2] = 0
        save_mask(root / f"masks/{stem}.png", labels)
    return "never", "warning", root, ("'stripe'", "the masks for training")


def write_lists(root):
    (root / "train.txt").write_text("s0\ns1\ns2\ns3\ns4\ns5\n")
    (root / "val.txt").write_text("s6\ns7\n")


def duplicate(root):
    # The same pixels in another format, so another file.
    write_lists(root)
    (root / "images/s6.png").unlink()
    Image.fromarray(decode_image(root / "images/s0.png")).save(root / "images/s6.bmp")
    shutil.copy(root / "masks/s0.png", root / "masks/s6.png")
    return "duplicate", "fault", root / "images/s0.png", ("s6.bmp (evaluation)",)


def duplicate_in_training(root):
    write_lists(root)
    for folder in ("images", "masks"):
        shutil.copy(
            root / f"{folder}/s1.{'jpg' if folder == 'images' else 'png'}",
            root / f"{folder}/s5.{'jpg' if folder == 'images' else 'png'}",
        )
    return "duplicate", "warning", root / "images/s5.jpg", ("s1.jpg", "the same split")


def all_ignored(root):
    path = root / "masks/s5.png"
    save_mask(path, np.full(SIZES[5], 255))
    return "all_ignored", "warning", path, ("nothing but pixels to ignore",)


def one_class(root):
    path = root / "masks/s5.png"
    save_mask(path, np.zeros(SIZES[5]))
    return "one_class", "warning", path, ("'background' in every pixel",)


def broken_lists(root):
    write_lists(root)
    (root / "val.txt").write_text("s6\ns7\ns99\n")
    return "split", "fault", root, ("s99",)


def garbage_in_a_list(root):
    write_lists(root)
    return garbage_image(root)


def no_mask_in_a_list(root):
    write_lists(root)
    return no_mask(root)


ONE_FAULT = [
    garbage_in_a_list,
    no_mask_in_a_list,
    cut_image,
    garbage_image,
    cut_mask,
    garbage_mask,
    no_mask,
    no_image,
    same_stem,
    few_pixels,
    more_pixels,
    rotated,
    rotated_square,
    upside_down,
    mirrored,
    tagged_mask,
    wrong_ids,
    never,
    never_in_training,
    duplicate,
    duplicate_in_training,
    all_ignored,
    one_class,
    broken_lists,
]


@pytest.mark.parametrize("spoil", ONE_FAULT)
def test_the_file_is_named_and_no_other(tmp_path, spoil):
    root = made(tmp_path, index_folder)
    kind, severity, path, words = spoil(root)
    report = checked(root)
    assert found(report) == {(kind, severity, path)}
    (finding,) = report.findings
    for word in words:
        assert word in finding.message
    assert report.passed == (severity == "warning")
    said = describe_report(report)
    assert path.name in said
    assert FIXES[kind] in said


def test_a_mask_of_colours_among_ids_is_named(tmp_path):
    root = made(tmp_path, index_folder)
    path = root / "masks/s5.png"
    save_mask(path, np.array(COLOURS)[read(path) % 3])
    for masks in ("auto", "index"):
        report = checked(root, masks=masks)
        assert found(report) == {("encoding", "fault", path)}
        assert "three channels differ" in report.findings[0].message


# Faults of other encodings


def test_colours_of_no_class_are_named_with_the_nearest(tmp_path):
    root = made(tmp_path, colour_folder)
    path = root / "masks/s5.png"
    colours = read(path)
    colours[:2, :3] = (201, 80, 60)
    save_mask(path, colours)
    report = checked(root)
    assert found(report) == {("colours", "fault", path)}
    assert "[201, 80, 60] (6 pixels; nearest: disc [200, 80, 60])" in report.findings[0].message
    assert report.findings[0].found == (("[201, 80, 60]", 6),)


def two_classes(root, ignore_index=255):
    for stem, labels in write_images(root / "images").items():
        save_mask(root / f"masks/{stem}.png", labels == 1)
    write_classes(root, NAMES[:2], ignore_index)


def test_masks_of_0_and_255_are_named_where_255_is_no_label(tmp_path):
    root = made(tmp_path, lambda r: two_classes(r, ignore_index=200))
    path = root / "masks/s5.png"
    save_mask(path, read(path) * 255)
    report = checked(root)
    assert found(report) == {("binary", "fault", path)}
    assert report.findings[0].found[0][0] == "255"


def test_masks_of_0_and_255_are_named_where_255_is_ignored(tmp_path):
    root = made(tmp_path, two_classes)
    path = root / "masks/s5.png"
    save_mask(path, read(path) * 255)
    report = checked(root)
    # One of many may say that nothing is known there.
    assert found(report) == {("binary", "warning", path)}
    for other in (root / "masks").iterdir():
        save_mask(other, (read(other) > 0) * 255)
    report = checked(root)
    assert {(f.kind, f.severity) for f in report.findings} == {("binary", "fault")}
    assert {f.path.name for f in report.findings if f.kind == "binary"} == {
        f"s{i}.png" for i in range(8)
    }
    assert 'to "binary" if 255 is the class, or to "index"' in report.findings[0].message
    # Whoever has said so is warned, and not refused.
    report = checked(root, masks="index")
    assert {f.severity for f in report.findings if f.kind == "binary"} == {"warning"}
    assert checked(root, masks="binary").passed


def test_a_mask_of_0_and_255_among_ids_of_several_classes_is_named(tmp_path):
    root = made(tmp_path, index_folder)
    for path in (root / "masks").iterdir():
        labels = read(path)
        labels[labels == 255] = 0
        save_mask(path, labels)
    assert checked(root).findings == ()
    path = root / "masks/s5.png"
    save_mask(path, (read(path) > 0) * 255)
    assert found(checked(root)) == {("binary", "warning", path)}


def test_pixels_to_ignore_are_no_sign_of_0_and_255_where_other_masks_have_them_too(tmp_path):
    root = made(tmp_path, two_classes)
    for stem in ("s1", "s2"):
        labels = read(root / f"masks/{stem}.png")
        labels[0] = 255
        save_mask(root / f"masks/{stem}.png", labels if stem == "s1" else labels // 255 * 255)
    assert checked(root).findings == ()


def test_each_plane_of_a_sample_is_named(tmp_path):
    root = made(tmp_path, class_folders)
    ids, cut = root / "masks/disc/s4.png", root / "masks/stripe/s4.png"
    save_mask(ids, read(ids) * 7)
    cut.write_bytes(cut.read_bytes()[:60])
    binary = {root / f"masks/stripe/s{i}.png" for i in range(8) if i != 4}
    for path in binary:
        save_mask(path, read(path) * 255)
    report = checked(root)
    expected = {("values", "fault", ids), ("truncated", "fault", cut)}
    expected |= {("binary", "fault", path) for path in binary}
    assert found(report) == expected


def test_a_folder_of_no_class_is_named(tmp_path):
    root = made(tmp_path, class_folders)
    (root / "masks/dics").mkdir()
    assert found(checked(root)) == {("stray", "fault", root / "masks/dics")}


@pytest.mark.parametrize("stem", ["s1", "s2"])
@pytest.mark.parametrize("make", [labelme_folder, coco_folder, ultralytics_folder])
def test_shapes_that_were_drawn_over_the_stored_image_are_named(tmp_path, make, stem):
    def upright(folder):
        # Shapes are drawn as if nothing were turned ...
        make(folder)

    root = made(tmp_path, upright)
    orientation = ORIENTATIONS[int(stem[1])]
    path = root / f"images/{stem}.jpg"
    # ... and then the image's tag says that it is stored turned.
    image, _ = draw(int(stem[1]), *SIZES[int(stem[1])])
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    Image.fromarray(image).save(path, exif=exif, quality=95)
    named = {labelme_folder: root / f"masks/{stem}.json", coco_folder: path}
    report = checked(root)
    labels = named.get(make, root / f"labels/{stem}.txt")
    assert found(report) == {("rotated", "fault", labels)}


def test_labels_that_are_no_classes_are_named(tmp_path):
    root = made(tmp_path, labelme_folder)
    path = root / "masks/s3.json"
    path.write_text(path.read_text().replace("stripe", "strip"))
    report = checked(root)
    assert found(report) == {("labels", "fault", path)}
    assert "strip" in report.findings[0].message


# Turned masks


@pytest.mark.parametrize("orientation", range(1, 9))
def test_labels_stand_upright_as_pillow_has_it(orientation):
    labels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    stored = Image.fromarray(labels)
    if orientation != 1:
        stored = stored.transpose(STORED[orientation])
    assert (stand_upright(np.array(stored), orientation) == labels).all()
    planes = stand_upright(np.stack([np.array(stored)] * 2), orientation)
    assert (planes == labels).all()


def test_edges_tell_which_way_a_mask_lies():
    image, labels = draw(5, 80, 80)
    turned = np.ascontiguousarray(labels[::-1])
    assert compare_edges(image, turned, labels).turned > 0.9
    assert compare_edges(image, labels, turned).turned < 0.1
    noise = np.random.default_rng(0).integers(0, 256, image.shape, dtype=np.uint8)
    assert compare_edges(noise, labels, turned).turned == pytest.approx(0.5, abs=0.1)
    assert compare_edges(image, labels, labels) is None
    assert compare_edges(image, labels, labels[:, :40]) is None


def faint(root, number, *, right, share=0.75):
    """An image with much noise, and its mask as it should be or made of the stored pixels."""
    image, labels = draw(number, *SIZES[number])
    noise = np.random.default_rng(0).integers(0, 256, image.shape)
    orientation = ORIENTATIONS[number]
    noisy = (share * image + (1 - share) * noise).astype(np.uint8)
    save_image(root / f"images/s{number}.jpg", noisy, orientation)
    mask = Image.fromarray(labels)
    path = root / f"masks/s{number}.png"
    (mask if right else mask.transpose(STORED[orientation])).save(path)
    return path


def test_a_faint_sign_is_a_warning(tmp_path):
    root = made(tmp_path, index_folder)
    faint(root, 2, right=True)
    assert checked(root).findings == ()
    path = faint(root, 2, right=False)
    report = checked(root)
    assert found(report) == {("rotated", "warning", path)}
    assert report.passed
    assert "Look at it" in report.findings[0].message


def test_faint_signs_bear_each_other_out(tmp_path):
    root = made(tmp_path, index_folder)
    # Of the four that are square, mirrored or upside down, three.
    paths = {faint(root, number, right=False, share=0.85) for number in (2, 3, 7)}
    report = checked(root)
    assert found(report) == {("rotated", "fault", path) for path in paths}
    assert "most of the images with an orientation" in report.findings[0].message


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_masks_own_orientation_is_applied_where_its_size_shows_it_and_else_asked_about(
    tmp_path, number
):
    root = made(tmp_path, index_folder)
    path, orientation = root / f"masks/s{number}.png", ORIENTATIONS[number]
    labels = read(path)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    Image.fromarray(labels).transpose(STORED[orientation]).save(path, exif=exif)
    report = checked(root)
    if number == 1:  # A quarter turn of a mask that is not square.
        assert found(report) == set()
    else:
        assert found(report) == {("rotated", "fault", path)}
        assert "data.mask_orientation" in report.findings[0].message
    report = checked(root, mask_orientation="apply")
    assert found(report) == set()
    (sample,) = [s for s in report.folder.samples if s.stem == f"s{number}"]
    assert (decode_mask(sample, report.folder.classes) == labels).all()
    if number == 1:
        report = checked(root, mask_orientation="ignore")
        assert found(report) == {("rotated", "fault", path)}
    # The tag was left behind: labels fit as they are stored.
    Image.fromarray(labels).save(path, exif=exif)
    assert found(checked(root)) == {("rotated", "fault", path)}
    report = checked(root, mask_orientation="ignore")
    assert found(report) == set()
    (sample,) = [s for s in report.folder.samples if s.stem == f"s{number}"]
    assert (decode_mask(sample, report.folder.classes) == labels).all()


# Budget


def test_images_above_the_budget_are_named_with_what_to_do(tmp_path):
    root = made(tmp_path, index_folder)
    write_lists(root)
    report = checked(root, max_pixels_per_step=5000)
    assert {f.kind for f in report.findings} == {"budget"}
    train = [f for f in report.findings if f.severity == "fault"]
    assert train
    for finding in train:
        for word in ("plan.max_pixels_per_step", "rescale", "augment.crop", "5000"):
            assert word in finding.message
    fits = set((root / "images").iterdir()) - {f.path for f in report.findings}
    assert fits
    need = max(int(f.message.split("Raise it to ")[1].split()[0]) for f in report.findings)
    assert checked(root, max_pixels_per_step=need).findings == ()
    with pytest.raises(DataError) as error:
        require_fit(report.folder.samples, report.config, root)
    for finding in train:
        assert finding.message in str(error.value)


# Over the whole


def spoilt(tmp_path, name="data"):
    """A folder with many faults at once."""
    root = made(tmp_path, index_folder, name)
    # Two more pairs, so that enough is left.
    for i in (8, 9, 10, 11):
        image, labels = draw(i, 64 + i, 70)
        save_image(root / f"images/s{i}.png", image)
        save_mask(root / f"masks/s{i}.png", labels)
    (root / "train.txt").write_text("".join(f"s{i}\n" for i in (*range(6), 8, 10, 11)))
    (root / "val.txt").write_text("s6\ns7\ns9\n")
    duplicate_of = read(root / "images/s9.png")
    Image.fromarray(duplicate_of).save(root / "images/s10.png", compress_level=1)
    shutil.copy(root / "masks/s9.png", root / "masks/s10.png")
    expected = []
    for spoil in (cut_image, few_pixels, rotated_square, upside_down, wrong_ids, one_class):
        expected.append(spoil(root))
    shutil.copy(root / "images/s6.png", root / "images/alone.png")
    return root, {(k, s, p) for k, s, p, _ in expected} | {
        ("unpaired", "fault", root / "images/alone.png"),
        ("duplicate", "fault", root / "images/s10.png"),
    }


def test_many_faults_at_once_are_all_named(tmp_path):
    root, expected = spoilt(tmp_path)
    report = checked(root)
    assert found(report) == expected
    said = describe_report(report)
    order = [said.index(f"\n{kind}: ") for kind in FIXES if f"\n{kind}: " in said]
    assert order == sorted(order)
    assert "7 faults in 7 files, 1 warning." in said


def test_images_that_differ_in_one_pixel_are_no_duplicates(tmp_path):
    root = made(tmp_path, index_folder)
    write_lists(root)
    pixels = read(root / "images/s0.png")
    pixels[1, 0, 0] ^= 1
    Image.fromarray(pixels).save(root / "images/s6.png")
    shutil.copy(root / "masks/s0.png", root / "masks/s6.png")
    assert checked(root).findings == ()


@pytest.mark.parametrize("num_threads", [1, 5])
def test_the_report_does_not_depend_on_the_threads(tmp_path, num_threads):
    root, _ = spoilt(tmp_path)
    assert report_json(checked(root, num_threads)) == report_json(checked(root, 2))


def test_json_holds_everything(tmp_path):
    root, expected = spoilt(tmp_path)
    table = json.loads(json.dumps(report_json(checked(root))))
    assert {(f["kind"], f["severity"], Path(f["file"])) for f in table["findings"]} == expected
    assert set(table) == {
        "format",
        "data",
        "layout",
        "description",
        "passed",
        "num_images",
        "num_faults",
        "num_warnings",
        "counts",
        "findings",
        "fixes",
        "brightest_of_16_bits",
        "objects",
        "classes",
        "splits",
        "sizes",
    }
    assert table["passed"] is False
    assert table["num_faults"] == sum(table["counts"]["fault"].values()) == 7
    assert set(table["fixes"]) == {kind for kind, _, _ in expected}
    (values,) = [f for f in table["findings"] if f["kind"] == "values"]
    assert values["found"] == [["9", 2], ["77", 5]]
    train = table["splits"]["train"]
    assert train["num_images"] == 9
    assert set(train["class_pixels"]) == set(NAMES)


def test_class_pixels_are_those_of_the_masks(tmp_path):
    root = made(tmp_path, index_folder)
    write_lists(root)
    for stem, label in (("s0", 2), ("s3", 2), ("s6", 1)):
        labels = read(root / f"masks/{stem}.png")
        labels[labels == label] = 0
        save_mask(root / f"masks/{stem}.png", labels)
    table = report_json(checked(root))
    for where in ("train", "val"):
        stems = (root / f"{where}.txt").read_text().split()
        labels = np.concatenate([read(root / f"masks/{s}.png").ravel() for s in stems])
        split = table["splits"][where]
        assert list(split["class_pixels"].values()) == [int((labels == i).sum()) for i in range(3)]
        assert split["ignored_pixels"] == int((labels == 255).sum())
        masks = [read(root / f"masks/{s}.png") for s in stems]
        images = [sum(bool((m == i).any()) for m in masks) for i in range(3)]
        assert list(split["class_images"].values()) == images


def test_shares_of_multilabel_folders_are_of_pixels(tmp_path):
    root = made(tmp_path, class_folders)
    report = checked(root)
    where = next(iter(report.class_pixels))
    stems = [stem for stem, part in report.split.items() if part == where]
    disc = np.concatenate([read(root / f"masks/disc/{s}.png").ravel() for s in stems])
    said = describe_report(report)
    line = next(t for t in said.splitlines() if t.split()[:1] == ["disc"])
    assert line.split() == ["disc", f"{disc.mean():.1%}", str(len(stems)), "of", str(len(stems))]


@pytest.mark.parametrize(
    ("brightest", "severity"), [(255, "fault"), (4095, "warning"), (40000, None)]
)
def test_16_bit_images_that_use_almost_none_of_white_are_named(tmp_path, brightest, severity):
    root = made(tmp_path, index_folder)
    for stem, labels in {f"s{i}": read(root / f"masks/s{i}.png") for i in range(8)}.items():
        (path,) = (root / "images").glob(f"{stem}.*")
        path.unlink()
        grey = np.random.default_rng(len(stem) + labels.size).integers(0, brightest, labels.shape)
        grey[0, 0] = brightest
        Image.fromarray(grey.astype(np.uint16)).save(root / f"images/{stem}.png")
    report = checked(root)
    assert found(report) == ({("dark", severity, root)} if severity else set())
    assert f"the brightest pixel is {brightest}, {brightest / 65535:.1%}" in describe_report(report)
    if severity:
        assert f"Set pixels.white, to {brightest} " in report.findings[0].message


def test_a_split_of_which_all_is_ignored_is_a_fault(tmp_path):
    root = made(tmp_path, index_folder)
    write_lists(root)
    for stem in ("s6", "s7"):
        save_mask(root / f"masks/{stem}.png", np.full(SIZES[int(stem[1])], 255))
    report = checked(root)
    assert ("all_ignored", "fault", root) in found(report)
    assert "2 images for evaluation are ignored" in describe_report(report)
    val = [s for s in report.folder.samples if s.stem in {"s6", "s7"}]
    with pytest.raises(DataError, match="nothing to score"):
        require_labels(val, report.folder.classes, "evaluation")
    train = [s for s in report.folder.samples if s.stem not in {"s6", "s7"}]
    require_labels([*val, *train], report.folder.classes, "training")


def test_ten_thousand_findings_do_not_flood(tmp_path):
    root = tmp_path / "data"
    (root / "images").mkdir(parents=True)
    image, labels = draw(0, 8, 8)
    save_image(root / "images/s0.png", image)
    save_mask(root / "masks/s0.png", labels)
    save_image(root / "images/s1.png", image[:, ::-1])
    save_mask(root / "masks/s1.png", labels)
    write_classes(root)
    for i in range(10_000):
        (root / f"images/x{i}.png").touch()
    report = checked(root)
    assert len([f for f in report.findings if f.kind == "unpaired"]) == 10_000
    said = describe_report(report)
    assert len(said.splitlines()) < 60
    assert "and 9990 more; --json F writes all of them" in said
