"""A foreign checkpoint's way: converted, trained from, evaluated, predicted, exported."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.cli.command import anysize

from anysize.models.weights_file import read_weights_file

GOLDEN = Path(__file__).parents[1] / "golden"

RUN = """
[data]
root = "data"

[plan]
max_canvases = 2

[train]
weights = "body.safetensors"
epochs = 1
precision = "float32"
"""


@pytest.mark.parametrize(
    ("checkpoint", "options", "pool", "order"),
    [
        pytest.param("torchvision_resnet.pth", (), "torchvision", "RGB", marks=pytest.mark.slow),
        pytest.param("slim_v1.ckpt", ("--head", "none"), "same", "RGB", marks=pytest.mark.slow),
        ("caffe_narrow.caffemodel", ("--head", "none"), "caffe", "BGR"),
    ],
)
def test_training_obeys_what_was_converted(workspace, checkpoint, options, pool, order):
    said = anysize(
        "convert", GOLDEN / checkpoint, "-o", "body.safetensors", *options, cwd=workspace
    )
    assert "Wrote body.safetensors: a body" in said
    body = read_weights_file(workspace / "body.safetensors")
    (workspace / "run.toml").write_text(RUN)
    assert "Started from" in anysize("train", "run.toml", cwd=workspace)
    trained = read_weights_file(workspace / "run" / "weights.safetensors")
    assert trained.config.pool_padding == pool
    assert trained.config.stride_position == body.config.stride_position
    assert trained.config.dilation_rule == body.config.dilation_rule
    assert trained.config.units == body.config.units
    assert trained.pixels == body.pixels
    assert trained.pixels.channel_order == order
    assert f'pool_padding = "{pool}"' in (workspace / "run" / "run.toml").read_text()
    assert json.loads((workspace / "run" / "plan.json").read_text())["geometry"] == {
        "output_stride": 16,
        "pool_padding": pool,
    }


def test_the_way_from_a_checkpoint_to_masks(workspace):
    anysize(
        *("convert", GOLDEN / "torchvision_resnet.pth", "-o", "body.safetensors"), cwd=workspace
    )
    (workspace / "run.toml").write_text(RUN)
    anysize("train", "run.toml", cwd=workspace)
    anysize("evaluate", "run", cwd=workspace)
    anysize("predict", "run", "data/images/s03.png", "-o", "out", cwd=workspace)
    image = np.asarray(Image.open(workspace / "data" / "images" / "s03.png"))
    mask = np.asarray(Image.open(workspace / "out" / "masks" / "s03.png"))
    assert mask.shape == image.shape[:2]
    # What the run resolved is what it goes on with; the weights need not be there any more.
    (workspace / "body.safetensors").unlink()
    anysize("train", "run.toml", "--resume", "--set", "train.epochs=2", cwd=workspace)


def test_a_head_of_slim_predicts_at_once(workspace):
    (workspace / "parts.toml").write_text(
        "".join(f'[[class]]\nname = "p{i}"\ncolour = [{i}, 9, 9]\n' for i in range(3))
    )
    anysize(
        *("convert", GOLDEN / "slim_v1.ckpt", "-o", "fcn.safetensors"),
        *("--loss", "sigmoid", "--classes", "parts.toml"),
        cwd=workspace,
    )
    anysize("predict", "fcn.safetensors", "data/images/s01.png", "-o", "out", cwd=workspace)
    masks = [
        np.asarray(Image.open(workspace / "out/masks" / f"p{i}" / "s01.png")) for i in range(3)
    ]
    assert all(set(np.unique(mask)) <= {0, 1} for mask in masks)
    said = anysize("convert", GOLDEN / "slim_v1.ckpt", "-o", "x.safetensors", cwd=workspace, code=2)
    assert "--loss sigmoid" in said
    assert not (workspace / "x.safetensors").exists()
    said = anysize("predict", "fcn.safetensors", "gone.png", "-o", "out", cwd=workspace, code=2)
    assert "gone.png" in said


def convert(checkpoint, out, *options, cwd, code=0):
    return anysize("convert", GOLDEN / checkpoint, "-o", out, *options, cwd=cwd, code=code)


def test_a_head_keeps_the_output_stride_that_it_was_trained_at(workspace):
    softmax = ("--loss", "softmax")
    for name, checkpoint, options, stride in (
        ("caffe", "caffe_narrow.caffemodel", (), 32),  # saved without dilation
        ("slim", "slim_v1.ckpt", (), 16),  # says nothing of it
        ("slim8", "slim_v1.ckpt", ("--output-stride", 8), 8),
    ):
        out = f"{name}.safetensors"
        said = convert(checkpoint, out, *softmax, *options, cwd=workspace)
        assert f"output stride {stride}." in said
        assert read_weights_file(workspace / out).config.output_stride == stride
    said = convert(
        *("torchvision_resnet.pth", "x.safetensors", "--output-stride", 8), cwd=workspace
    )
    assert "set model.output_stride = 8 in a run.toml" in said  # A body has none of its own.


def test_a_head_that_is_not_there_and_a_folder_that_is_not_there_are_named(workspace):
    body = "torchvision_resnet.pth"
    said = convert(body, "x.safetensors", "--head", "upconv", cwd=workspace, code=2)
    assert "no head 'upconv'" in said
    assert not (workspace / "x.safetensors").exists()
    said = convert(body, "gone/x.safetensors", cwd=workspace, code=2)
    assert "gone/x.safetensors: its folder does not exist" in said
    assert not (workspace / "gone").exists()


def test_white_may_be_set_beside_weights_since_it_is_the_camera_s(workspace):
    convert("torchvision_resnet.pth", "body.safetensors", cwd=workspace)
    (workspace / "run.toml").write_text(RUN)
    anysize("train", "run.toml", "--set", "pixels.white=4095", cwd=workspace)
    trained = read_weights_file(workspace / "run" / "weights.safetensors").pixels
    assert (trained.white, trained.max_value) == (4095, 1.0)
    order = ("--set", 'pixels.channel_order="BGR"', "--set", "train.run=run2")
    assert "except for `white`" in anysize("train", "run.toml", *order, cwd=workspace, code=2)
