"""`anysize export`, and `anysize predict` with what it wrote, as processes."""

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from tests.cli.command import anysize

from anysize.config import ModelConfig, PixelConvention
from anysize.data.samples import Classes
from anysize.models.build import build_model
from anysize.models.weights_file import Weights, WeightsFile, save_weights, write_weights_file

CLASSES = Classes(names=("ground", "disc"), colours=((90, 120, 90), (200, 80, 60)))


def write_run(folder, kind="multiclass", source="", bias=0.0):
    config = ModelConfig(units=(1, 1, 1, 1), base_depth=4)
    model = build_model(config, 2, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        model.head.biases[0] = bias
    folder.mkdir()
    path = folder / "weights.safetensors"
    settings = {"config": config, "classes": CLASSES, "pixels": PixelConvention(), "kind": kind}
    if source:
        tensors = model.state_dict()
        write_weights_file(path, WeightsFile(tensors=tensors, source=source, **settings))
    else:
        save_weights(path, Weights(model=model, **settings))


@pytest.fixture
def folder(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "photos").mkdir()
    rng = np.random.default_rng(0)
    for i, size in enumerate([(37, 51), (1, 1), (300, 210)]):
        image = rng.integers(0, 256, (*size, 3), np.uint8)
        Image.fromarray(image).save(tmp_path / "photos" / f"{i}.png")
    return tmp_path


def test_export_and_predict_with_it(folder):
    said = anysize("export", "run", "-o", "model.onnx", cwd=folder)
    assert said.startswith("Wrote model.onnx: largest difference ")
    assert "of the range of the logits on 8 images from 1x1 to 129x122.\n" in said
    assert len(said.splitlines()) == 1, "nothing of onnx, onnxruntime or torch on the console"
    limit = ("--max-pixels", 30_000)
    theirs = anysize("predict", "model.onnx", "photos", "-o", "theirs", *limit, cwd=folder)
    ours = anysize("predict", "run", "photos", "-o", "ours", *limit, cwd=folder)
    assert theirs == ours.replace("ours", "theirs")
    assert "2.png (300x210) in 15 overlapping tiles -> theirs/masks/2.png" in theirs
    for stem in "012":
        masks = [
            np.asarray(Image.open(folder / out / f"masks/{stem}.png")) for out in ("ours", "theirs")
        ]
        assert (masks[0] == masks[1]).mean() > 0.999
    anysize("predict", "model.onnx", "photos", "-o", "p", "--probabilities", cwd=folder)
    assert np.load(folder / "p/probabilities/0.npy").shape == (2, 37, 51)


def test_labels_of_a_sigmoid_net(folder):
    write_run(folder / "multi", "multilabel")
    said = anysize("export", "multi", "-o", "m.onnx", "--output", "labels", cwd=folder)
    assert "Wrote m.onnx: 0 of " in said
    assert "certain labels differ on 8 images" in said
    anysize("predict", "m.onnx", "photos/0.png", "-o", "out", cwd=folder)
    with Image.open(folder / "out/masks/disc/0.png") as mask:
        assert mask.size == (51, 37)
    arguments = ("predict", "m.onnx", "photos", "-o", "out", "--max-pixels", 30_000)
    said = anysize(*arguments, cwd=folder, code=2)
    assert "photos/2.png: The image of 300x210 has more than 30000 pixels" in said
    assert "--output logits" in said
    arguments = ("predict", "m.onnx", "photos", "-o", "out", "--probabilities")
    assert "gives labels, and probabilities were asked for" in anysize(
        *arguments, cwd=folder, code=2
    )


def test_the_source_of_converted_weights_is_kept(folder):
    write_run(folder / "converted", source="TF-Slim resnet_v1_50")
    anysize("export", "converted/weights.safetensors", "-o", "m.onnx", cwd=folder)
    metadata = {p.key: p.value for p in onnx.load(folder / "m.onnx").metadata_props}
    assert metadata["source"] == "TF-Slim resnet_v1_50"
    anysize("export", "run", "-o", "m.onnx", cwd=folder)
    assert "source" not in {p.key for p in onnx.load(folder / "m.onnx").metadata_props}


def test_weights_that_have_diverged_leave_no_file(folder):
    write_run(folder / "bad", bias=float("nan"))
    said = anysize("export", "bad", "-o", "m.onnx", cwd=folder, code=2)
    assert "not finite" in said
    assert sorted(p.name for p in folder.iterdir()) == ["bad", "photos", "run"]


def test_a_missing_extra_says_what_to_install(folder):
    (folder / "hidden/onnx").mkdir(parents=True)
    (folder / "hidden/onnx/__init__.py").write_text(
        "raise ModuleNotFoundError('No module named onnx', name='onnx')"
    )
    environment = {"PYTHONPATH": str(folder / "hidden")}
    said = anysize("export", "run", "-o", "m.onnx", cwd=folder, code=2, env=environment)
    assert 'pip install "anysize[export]"' in said
    assert not (folder / "m.onnx").exists()
    anysize("predict", "run", "photos", "-o", "out", cwd=folder, env=environment)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("export", "nowhere", "-o", "m.onnx"), "nowhere"),
        (("export", "run", "-o", "m.bin"), "m.bin does not end with .onnx"),
        (("export", "run", "-o", "gone/m.onnx"), "gone/m.onnx: its folder does not exist"),
        (("export", "photos/0.png", "-o", "m.onnx"), "photos/0.png is damaged"),
        (("predict", "gone.onnx", "photos", "-o", "out"), "No such file: gone.onnx"),
        (("predict", "broken.onnx", "photos", "-o", "out"), "broken.onnx is damaged"),
        (
            ("predict", "broken.onnx", "photos", "-o", "out", "--device", "cuda"),
            "broken.onnx runs on the CPU",
        ),
    ],
)
def test_wrong_arguments_are_one_line(folder, arguments, message):
    (folder / "broken.onnx").write_bytes(b"\x08\x08\x3a\xff\x01")
    said = anysize(*arguments, cwd=folder, code=2)
    assert message in said
    assert len(said.strip().splitlines()) == 1
    assert not (folder / "m.onnx").exists()
    assert not (folder / "out").exists()


def test_help_shows_an_example(tmp_path):
    said = anysize("export", "--help", cwd=tmp_path)
    assert "example:\n  anysize export run -o model.onnx" in said
    assert "anysize export" in anysize("--help", cwd=tmp_path)
