"""Joints from our CSV, COCO, DeepLabCut and a .mat list: the same people from each, and faults."""

import dataclasses
import json

import numpy as np
import pytest
from PIL import Image

from anysize.config import AugmentConfig, DataConfig, PixelConvention
from anysize.data.batch import cut_out
from anysize.data.formats.joints import joints_of, read_joint_names
from anysize.data.joints import JointMaps, joint_targets
from anysize.data.loader import load_steps
from anysize.data.samples import read_folder, scan_folder
from anysize.data.transforms import draw
from anysize.errors import DataError
from anysize.geometry import Canvas, NetGeometry, padded_batch
from anysize.images.decode import decode_image
from anysize.planning.packing import Pass, Step

NAMES = ("nose", "left_ear", "right_ear")
TOML = """
names = ["nose", "left_ear", "right_ear"]
pairs = [["left_ear", "right_ear"]]
skeleton = [["nose", "left_ear"], ["nose", "right_ear"]]
head = ["left_ear", "right_ear"]
"""
NAN = float("nan")
PEOPLE = {
    "a.png": [[(1.5, 2), (3, 4), (NAN, NAN)], [(10, 11), (NAN, NAN), (12, 13)]],
    "b.png": [[(NAN, NAN), (5, 6), (7, 8.25)]],
}
"""By image; c.png has no joints."""


@pytest.fixture
def root(tmp_path):
    (tmp_path / "images").mkdir()
    for i, name in enumerate(("a.png", "b.png", "c.png")):
        Image.new("RGB", (40 + i, 30)).save(tmp_path / "images" / name)
    return tmp_path


def as_csv(root, lines=()):
    (root / "joints.toml").write_text(TOML)
    rows = ["image,person,joint,x,y,visible"]
    for image, people in PEOPLE.items():
        for number, person in enumerate(people):
            for name, (x, y) in zip(NAMES, person, strict=True):
                rows.append(f"{image},{number},{name},{x},{y},2".replace("nan", ""))
    rows[4] = "a.png,1,nose,10,11,"
    (root / "joints.csv").write_text("\n".join([*rows, "c.png,0,nose,,,", *lines]) + "\n")


def as_coco(root):
    entries = []
    for i, people in enumerate(PEOPLE.values()):
        for person in people:
            points = [v for x, y in person for v in ((0, 0, 0) if x != x else (x, y, 2))]
            entries.append({"id": len(entries), "image_id": i, "category_id": 1})
            entries[-1] |= {"keypoints": points}
    table = {
        "images": [{"id": i, "file_name": n} for i, n in enumerate([*PEOPLE, "c.png"])],
        "annotations": [*entries, {"id": 9, "image_id": 0, "category_id": 1, "bbox": [0, 0, 1, 1]}],
        "categories": [
            {"id": 1, "name": "mouse", "keypoints": NAMES, "skeleton": [[1, 2], [1, 3]]}
        ],
    }
    (root / "person_keypoints_all.json").write_text(json.dumps(table))
    (root / "instances_all.json").write_text("not for joints")


def as_deeplabcut(root):
    """The labels of several animals; pandas writes the index in three columns."""
    folder = root / "labeled-data" / "video"
    folder.mkdir(parents=True)
    for name in ("a.png", "b.png", "c.png"):
        (root / "images" / name).rename(folder / name)
    heads = [["scorer", "", ""], ["individuals", "", ""], ["bodyparts", "", ""], ["coords", "", ""]]
    for animal in ("one", "two"):
        for name in NAMES:
            for axis in "xy":
                for head, cell in zip(heads, ("Ann", animal, name, axis), strict=True):
                    head.append(cell)
    rows = []
    for image in ("a.png", "b.png", "c.png"):
        people = [*PEOPLE.get(image, []), *[[(NAN, NAN)] * 3] * 2][:2]
        points = ["" if v != v else str(v) for person in people for xy in person for v in xy]
        rows.append(["labeled-data", "video", image, *points])
    text = "\n".join(",".join(row) for row in (*heads, *rows))
    (folder / "CollectedData_Ann.csv").write_text(text + "\n")


def as_mat(root):
    scipy = pytest.importorskip("scipy.io")
    (root / "joints.toml").write_text(TOML)
    dataset = np.zeros((1, 3), dtype=[("image", object), ("size", object), ("joints", object)])
    for i, name in enumerate(("a.png", "b.png", "c.png")):
        people = PEOPLE.get(name, [])
        cells = np.empty((1, len(people)), object)
        for k, person in enumerate(people):
            rows = [(j, x, y) for j, (x, y) in enumerate(person) if x == x]
            cells[0, k] = np.array(rows, float)
        dataset[0, i] = (f"/elsewhere/images/{name}", np.array([[3, 30, 40 + i]]), cells)
    scipy.savemat(root / "dataset.mat", {"dataset": dataset})


@pytest.mark.parametrize("write", [as_csv, as_coco, as_deeplabcut, as_mat])
def test_every_format_gives_the_same_people(root, write):
    write(root)
    folder = read_folder(root, DataConfig(root=str(root)), "joints")
    assert folder.classes.names == NAMES
    assert [s.image.name for s in folder.samples] == list(PEOPLE)
    for sample in folder.samples:
        np.testing.assert_allclose(joints_of(sample, 3), PEOPLE[sample.image.name])
    assert any("Left out: 1 image without a labelled joint: c.png" in n for n in folder.notes)


def test_what_belongs_together_is_read(root):
    as_csv(root)
    links = read_folder(root, DataConfig(root=str(root)), "joints").classes.links
    assert links.pairs == ((1, 2),)
    assert links.skeleton == ((0, 1), (0, 2))
    assert links.head == (1, 2)
    assert links.known


def test_coco_says_the_skeleton_and_names_say_the_pairs(root):
    as_coco(root)
    links = read_folder(root, DataConfig(root=str(root)), "joints").classes.links
    assert links.pairs == ((1, 2),)
    assert links.skeleton == ((0, 1), (0, 2))
    assert links.known


def test_deeplabcut_does_not_say_the_pairs(root):
    as_deeplabcut(root)
    assert not read_folder(root, DataConfig(root=str(root)), "joints").classes.links.known


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        ("a.png,0,nose,1,1,", "joints", "line 12 of {}: 'nose' is given twice"),
        ("b.png,0,noes,1,1,", "labels", "the joint 'noes' is not one of nose, left_ear"),
        ("b.png,0,nose,one,1,", "joints", "could not convert string to float: 'one'"),
        ("b.png,0,nose,inf,1,", "joints", "'nose' is at ('inf', '1'), which is no place"),
        ("b.png,0,nose,1,1,3", "joints", "`visible` in line 12 of {} is 3, not 0, 1 or 2"),
        ("b.png,0,nose,1", "joints", "line 12 of {} has 4 cells, not 6"),
        ("z.png,0,nose,1,1,", "unpaired", "{} names z.png, but there is no image"),
        (",0,nose,1,1,", "joints", "the file name '' is none"),
    ],
)
def test_a_faulty_line_is_named(root, line, kind, message):
    as_csv(root, [line])
    (fault,) = scan_folder(root, DataConfig(root=str(root)), "joints").faults
    assert fault.kind == kind
    assert message.format(root / "joints.csv") in fault.message


def test_hidden_joints_are_not_labelled_and_that_is_said(root):
    as_csv(root, ["b.png,0,nose,9,9,0"])
    folder = read_folder(root, DataConfig(root=str(root)), "joints")
    assert np.isnan(joints_of(folder.samples[1], 3)[0, 0]).all()
    assert any("1 joint of" in note and "visible 0" in note for note in folder.notes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('names = ["a"]', "`pairs` is missing"),
        ('names = ["a", "a"]\npairs = []', "names classes twice: a"),
        ('names = ["a"]\npairs = [["a", "b"]]', "`pairs` has b, which `names` lacks"),
        ('names = ["a", "b", "c"]\npairs = [["a", "b"], ["b", "c"]]', "has a joint twice"),
        ('names = ["a", "b"]\npairs = []\nhead = ["a"]', "`head` must be two joints"),
        ("names = [", "cannot be read as TOML"),
    ],
)
def test_faulty_names_are_refused(tmp_path, text, message):
    (tmp_path / "joints.toml").write_text(text)
    with pytest.raises(DataError, match=message):
        read_joint_names(tmp_path / "joints.toml")


def test_joints_of_several_kinds_are_asked_about(root):
    as_csv(root)
    (root / "labeled-data").mkdir()
    with pytest.raises(
        DataError, match=r"several kinds: joints.csv, labeled-data. Set data.labels"
    ):
        scan_folder(root, DataConfig(root=str(root)), "joints")
    chosen = DataConfig(root=str(root), labels="joints.csv")
    assert len(read_folder(root, chosen, "joints").samples) == 2


def test_predictions_of_deeplabcut_are_no_labels(root):
    as_deeplabcut(root)
    (path,) = root.glob("labeled-data/video/*.csv")
    path.write_text(path.read_text().replace("y", "likelihood"))
    with pytest.raises(DataError, match="but it is predictions"):
        scan_folder(root, DataConfig(root=str(root)), "joints")


def test_a_csv_without_names_asks_for_them(root):
    as_csv(root)
    (root / "joints.toml").unlink()
    with pytest.raises(DataError, match=r"has no joints.toml, which names the joints"):
        scan_folder(root, DataConfig(root=str(root)), "joints")


@pytest.mark.parametrize("orientation", [1, 2, 3, 4, 5, 6, 7, 8])
def test_joints_of_a_turned_image_are_turned_where_the_settings_say_so(root, orientation):
    """A bright pixel is found where its joint says, in the image as one sees it."""
    pixels = np.zeros((30, 40, 3), np.uint8)
    pixels[5, 33] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(root / "images" / "a.png", exif=exif)
    as_csv(root)
    (root / "joints.csv").write_text("image,joint,x,y\na.png,nose,33,5\n")
    data = DataConfig(root=str(root), mask_orientation="apply")
    (sample,) = read_folder(root, data, "joints").samples
    (x, y) = joints_of(sample, 3)[0, 0]
    assert decode_image(sample.image, 3)[int(y), int(x), 0] == 255


def test_what_the_loader_gives_is_what_the_targets_of_the_drawn_joints_are(root):
    as_csv(root)
    folder = read_folder(root, DataConfig(root=str(root)), "joints")
    geometry, config = NetGeometry(16), AugmentConfig(min_scale=1.3, max_scale=1.3)
    draws = [
        dataclasses.replace(draw(config, s.size, seed=0, epoch=0, index=i), mirror=i == 0)
        for i, s in enumerate(folder.samples)
    ]
    layout = padded_batch([d.out_size for d in draws], Canvas(2, 64, 64), geometry)
    (loaded,) = load_steps(
        folder.samples,
        [Step((Pass(layout, (0, 1)),))],
        draws,
        classes=folder.classes,
        geometry=geometry,
        loss_at="cells",
        pixels=PixelConvention(),
        num_threads=1,
        prefetch_steps=1,
        joint_maps=JointMaps("gaussians", 9.0),
    )
    (batch,) = loaded.batches
    for i, (sample, drawn) in enumerate(zip(folder.samples, draws, strict=True)):
        joints = np.array(PEOPLE[sample.image.name]) * 1.3
        if i == 0:
            joints = joints[:, [0, 2, 1]]
            joints[..., 0] = 1.3 * (sample.size.width - 1) - joints[..., 0]
        wanted = joint_targets(
            joints, drawn.out_size, geometry, maps="gaussians", radius=1.3 * 9, ignore_index=255
        )
        found = cut_out(batch.target, batch.rects[i]).numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert (batch.target[:, 0, -1] == 255).all()
