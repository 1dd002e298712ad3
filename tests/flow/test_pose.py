"""Joints from the command line: check, train, evaluate, predict, report, and train on."""

import csv
import io
import json

import numpy as np
import pytest
from PIL import Image, ImageDraw
from rich.console import Console
from tests.cli.command import anysize

import anysize as package
from anysize.check.folder import check_data
from anysize.config import DataConfig, RunConfig
from anysize.errors import ConfigError
from anysize.models.weights_file import load_weights
from anysize.onnx.export import export
from anysize.predict.files import NetLabeller
from anysize.predict.joint_files import joint_files

NAMES = ("head", "left", "right")
COLOURS = ((250, 60, 60), (60, 250, 60), (60, 60, 250))
TOML = """names = ["head", "left", "right"]
pairs = [["left", "right"]]
skeleton = [["head", "left"], ["head", "right"]]
head = ["left", "right"]
"""
RUN = """
[data]
root = "data"
[model]
units = [1, 1, 1, 1]
base_depth = 8
[loss]
kind = "pose"
[augment]
mirror = false
[plan]
images_per_step = 8
max_canvases = 1
[optim]
kind = "adamw"
lr = 0.01
[train]
run = "run"
epochs = 12
precision = "float32"
evaluate_every = 0
"""


def draw(root, num=32):
    """Dots of three colours, whose middles are the joints."""
    rng = np.random.default_rng(1)
    (root / "images").mkdir(parents=True)
    (root / "joints.toml").write_text(TOML)
    rows = ["image,person,joint,x,y"]
    for i in range(num):
        size = [int(n) for n in rng.integers(60, 80, 2)]
        image = Image.new("RGB", size, (90, 90, 90))
        places = rng.permutation([(17, 17), (44, 17), (30, 44)]) + rng.uniform(-5, 5, (3, 2))
        for name, colour, (x, y) in zip(NAMES, COLOURS, places, strict=True):
            ImageDraw.Draw(image).ellipse((x - 6, y - 6, x + 6, y + 6), fill=colour)
            rows.append(f"p{i}.png,1,{name},{x:.2f},{y:.2f}")
        image.save(root / "images" / f"p{i}.png")
    (root / "joints.csv").write_text("\n".join(rows) + "\n")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pose")
    draw(folder / "data")
    (folder / "run.toml").write_text(RUN)
    package.train(folder / "run.toml")
    return folder


def test_a_run_learns_where_joints_are(trained):
    said = anysize("evaluate", "run", "--json", "scores.json", cwd=trained)
    scores = json.loads((trained / "scores.json").read_text())
    assert scores["num_joints"] == 3 * scores["num_images"] == 18
    assert scores["error_pixels"]["mean"] < 9
    assert scores["mean_pck"] == json.loads((trained / "run/metrics.json").read_text())["mean_pck"]
    assert "PCKh@0.5" in said


def test_prediction_writes_joints_as_csv_coco_and_pictures(trained):
    out = trained / "out"
    anysize("predict", "run", "data/images/p0.png", "data/images/p1.png", "-o", "out", cwd=trained)
    with (out / "joints.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["joint"] for row in rows] == [*NAMES] * 2
    coco = json.loads((out / "joints.json").read_text())
    assert coco["categories"][0]["skeleton"] == [[1, 2], [1, 3]]
    assert [float(rows[0]["x"]), float(rows[0]["y"]), 2] == coco["annotations"][0]["keypoints"][:3]
    drawn = np.array(Image.open(out / "overlays" / "p0.png"))
    image = np.array(Image.open(trained / "data/images/p0.png"))
    assert drawn.shape == image.shape
    assert (drawn != image).any()


def test_all_peaks_are_written_where_they_are_asked_for(trained):
    labeller = NetLabeller(weights=load_weights(trained / "run/weights.safetensors", "cpu"))
    images = [trained / "data/images/p0.png", trained / "data/images/p1.png"]
    first, _ = joint_files(labeller, images, trained / "several", several=True)
    with (trained / "several/joints.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["image"] == "p0.png"]
    assert len(rows) == sum(len(places) for places in first.found) > 0
    assert all(float(row["confidence"]) >= 0.2 for row in rows)
    assert not (trained / "several/joints.json").exists()


def test_the_same_joints_from_python(trained):
    net = package.load(trained / "run")
    image = np.array(Image.open(trained / "data/images/p3.png"))
    found = net.joints(image)
    assert list(found) == [*NAMES]
    assert found["head"].shape == (1, 3)
    with pytest.raises(ConfigError, match="Use joints instead of predict"):
        net.predict(image)
    weights = load_weights(trained / "run/weights.safetensors", "cpu")
    with pytest.raises(ConfigError, match="A net of joints is not exported"):
        export(weights, trained / "net.onnx")


def test_the_report_shows_joints(trained):
    anysize("report", "run", "--examples", "1", cwd=trained)
    page = (trained / "run" / "report.html").read_text()
    assert "PCK@0.1 of the box (%)" in page
    assert "Evaluation images" in page


def test_a_run_goes_on_from_weights_by_the_names_of_joints(trained):
    """Joints in another order, and one more: the rows of each go with its name."""
    toml = trained / "data" / "joints.toml"
    toml.write_text(TOML.replace('"head", "left", "right"]', '"tail", "right", "left", "head"]'))
    console = Console(record=True, width=500, quiet=False, file=io.StringIO())
    settings = ["train.run=again", "train.epochs=1", "optim.lr=0", "model.norm=frozen"]
    package.train(
        trained / "run.toml",
        [*settings, "train.weights=run/weights.safetensors"],
        console=console,
    )
    toml.write_text(TOML)
    assert "3 of 4 classes by name" in console.export_text()
    image = np.array(Image.open(trained / "data/images/p3.png"))
    before, after = (package.load(trained / run).joints(image) for run in ("run", "again"))
    for name in NAMES:
        np.testing.assert_allclose(before[name], after[name], rtol=1e-4)


def test_init_says_what_a_folder_of_joints_needs(trained):
    said = anysize("init", "data", cwd=trained, code=2)
    assert 'data holds joints. A run.toml for them needs data.root and loss.kind = "pose"' in said


def test_mirroring_needs_pairs(trained):
    images = trained / "mice/labeled-data/video"
    images.mkdir(parents=True)
    Image.new("RGB", (60, 60)).save(images / "a.png")
    (images / "CollectedData_A.csv").write_text(
        "scorer,A,A\nbodyparts,nose,nose\ncoords,x,y\nlabeled-data/video/a.png,5,6\n"
    )
    said = anysize("check", "mice", cwd=trained, code=1)
    assert "augment.mirror is on, but which joints" in said


def test_check_names_joints_outside_images_without_joints_and_faulty_lines(trained, tmp_path):
    draw(tmp_path / "data", num=4)
    path = tmp_path / "data" / "joints.csv"
    assert check_data(
        RunConfig(data=DataConfig(root="")), tmp_path / "data", None, num_threads=1
    ).passed
    Image.new("RGB", (60, 60)).save(tmp_path / "data/images/bare.png")
    text = path.read_text().splitlines()
    text[1] = "p0.png,1,head,500,5"
    path.write_text("\n".join([*text, "p1.png,1,head,3,3", "p1.png,1,nose,3,3"]) + "\n")
    said = anysize("check", "data", "--json", "check.json", cwd=tmp_path, code=1)
    found = json.loads((tmp_path / "check.json").read_text())
    assert found["counts"]["fault"] == {"labels": 1, "joints": 1, "outside": 1}
    assert found["counts"]["warning"]["unlabelled"] == 1
    assert "'head' of person '1' at (500, 5), outside image" in said
    assert "bare.png has no labelled joint" in said
    assert "share of their people, images with the joint" in said
