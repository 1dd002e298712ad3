"""The Python surface: what it is, that it is quiet and lazy, and that its page runs."""

import contextlib
import inspect
import io
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import anysize
from anysize.config import ModelConfig, PixelConvention
from anysize.data.classes import Classes
from anysize.errors import AnysizeError, ConfigError, DataError, WeightsError
from anysize.geometry import NetGeometry
from anysize.models.build import build_model
from anysize.models.weights_file import Weights, save_weights
from anysize.predict.tiles import predict_image

SURFACE = {
    "load": "(path, *, device, precision, trust_net)",
    "train": "(config, overrides, *, resume, console)",
    "evaluate": "(run, *, data, device, precision, console)",
    "plan": "(sizes, *, geometry, images_per_step, max_pixels_per_step, max_canvases, epochs)",
    "convert": "(path, out, *, head, prefix, loss, classes, head_relu, output_stride, "
    "stride_position, dilation_rule, pool_padding, channel_order, pixel_mean, pixel_std, "
    "max_value, mean, channels, new_channels, console)",
    "Labeller.predict": "(self, image, *, white, max_pixels)",
    "Labeller.probabilities": "(self, image, *, white, max_pixels)",
}


def arguments_of(function):
    parameters = [
        p.replace(annotation=inspect.Parameter.empty, default=inspect.Parameter.empty)
        for p in inspect.signature(function).parameters.values()
    ]
    return str(inspect.Signature(parameters))


def test_the_surface_is_what_it_was():
    for name, arguments in SURFACE.items():
        found = anysize
        for part in name.split("."):
            found = getattr(found, part)
        assert arguments_of(found) == arguments, name
    assert {name.partition(".")[0] for name in SURFACE} | {"AnysizeError"} <= set(anysize.__all__)
    assert set(anysize.__all__) <= set(dir(anysize))
    for name in anysize.__all__:
        assert getattr(anysize, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'labeler'"):
        _ = anysize.labeler


def test_importing_loads_no_torch():
    code = "import sys, anysize; dir(anysize); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@contextlib.contextmanager
def silence():
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        yield
    assert not out.getvalue()


def test_a_run_from_a_table_is_that_of_the_file_and_quiet(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    with silence():
        run = anysize.train("run.toml", ["train.epochs=1", "plan.max_canvases=1"])
        scores = anysize.evaluate(run)
    assert run == workspace / "run"
    assert scores["num_images"] == 3
    table = {"data": {"root": Path("data")}, "train": {"run": "again", "epochs": 1}}
    with silence(), pytest.raises(ConfigError, match=r"`train.epochs` is 0.*the settings given"):
        anysize.train(table | {"train": {"epochs": 0}})
    table["model"] = {"units": (1, 1, 1, 1), "base_depth": 4}
    console = Console(file=io.StringIO())
    again = anysize.train(table, console=console)
    assert "evaluate after epoch 1" in console.file.getvalue()
    with silence():
        anysize.train(table, ["train.epochs=2"], resume=True)
        last = anysize.evaluate(again / "weights_last.safetensors", data=workspace / "data")
    assert last["num_images"] == 3


def test_a_converted_net_of_basic_units_trains_predicts_and_is_exported(workspace, tmp_path):
    golden = Path(__file__).parent / "golden" / "timm_basic_resnet.pth"
    table = {
        "data": {"root": workspace / "data"},
        "train": {
            "run": tmp_path / "run",
            "epochs": 1,
            "weights": anysize.convert(golden, tmp_path / "body.safetensors"),
        },
    }
    with silence():
        run = anysize.train(table, ["plan.max_canvases=1"])
        assert anysize.evaluate(run)["num_images"] == 3
    image = draw((45, 61, 3))
    labels = anysize.load(run).predict(image)
    done = subprocess.run(
        [Path(sys.executable).with_name("anysize"), "export", run, "-o", tmp_path / "m.onnx"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert np.mean(anysize.load(tmp_path / "m.onnx").predict(image) == labels) > 0.99


def labeller(tmp_path, kind="multiclass", **pixels):
    """A small net with random weights, loaded from its file; and the net."""
    convention = PixelConvention(**pixels)
    config = ModelConfig(units=(1, 1, 1, 1), base_depth=4, num_channels=len(convention.mean))
    model = build_model(config, 3, generator=torch.Generator().manual_seed(0)).eval()
    classes = Classes(names=("a", "b", "c"), colours=((0, 0, 0), (9, 9, 9), (90, 9, 9)))
    weights = Weights(model=model, config=config, classes=classes, kind=kind, pixels=convention)
    save_weights(tmp_path / "w.safetensors", weights)
    return anysize.load(tmp_path / "w.safetensors", device="cpu"), weights


def draw(shape, dtype=np.uint8, top=256):
    return np.random.default_rng(0).integers(0, top, shape).astype(dtype)


@pytest.mark.parametrize("kind", ["multiclass", "multilabel"])
def test_arrays_are_labelled_as_files_are(tmp_path, kind):
    net, weights = labeller(tmp_path, kind)
    image = draw((61, 47, 3))
    expected = predict_image(
        weights.model, image, weights.pixels, kind=kind, keep_probabilities=True
    )
    labels = expected.labels if kind == "multiclass" else expected.present
    assert len(np.unique(labels)) > 1
    with silence():
        np.testing.assert_array_equal(net.predict(image), labels)
        found = net.probabilities(image)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.probabilities.astype(np.float32), atol=1e-3)
    tiled = net.probabilities(draw((200, 230, 3)), max_pixels=40_000)
    assert (tiled.dtype, tiled.shape) == (np.float32, (3, 200, 230))


def test_any_type_with_its_white_is_the_same_image(tmp_path):
    net, _ = labeller(tmp_path)
    image = draw((33, 40, 3))
    expected = net.probabilities(image)
    for same in (
        net.probabilities(image.astype(np.uint16) * 257),
        net.probabilities(image / 255, white=1.0),
        net.probabilities((image / 255).astype(np.float16), white=1),
        net.probabilities(image.astype(np.int64), white=255),
        net.probabilities(image.astype(np.uint16), white=255),
    ):
        np.testing.assert_allclose(same, expected, atol=2e-2)
    assert not np.allclose(net.probabilities(image / 255, white=0.5), expected, atol=2e-2)


def test_channels_are_those_of_the_net(tmp_path):
    rgb, _ = labeller(tmp_path)
    grey = draw((20, 30))
    both = np.repeat(grey[..., None], 3, axis=2)
    np.testing.assert_array_equal(rgb.predict(grey), rgb.predict(both))
    five, _ = labeller(tmp_path, mean=(0.0,) * 5, std=(1.0,) * 5)
    assert five.num_channels == 5
    assert five.predict(draw((20, 30, 5))).shape == (20, 30)
    with pytest.raises(DataError, match="1 channel, but the net takes 5"):
        five.predict(grey)


@pytest.mark.parametrize(
    ("image", "options", "message"),
    [
        (np.zeros((9, 9, 4), np.uint8), {}, "4 channels, but the net takes 3"),
        (np.zeros((9, 9, 3)), {}, r"may have any value for white.*white=1\.0"),
        (np.zeros((9, 9, 3)), {"white": 0}, "given: 0"),
        (np.full((9, 9, 3), np.nan), {"white": 1}, "not finite"),
        (np.zeros((9, 9, 3), bool), {}, "array of bool"),
        (np.zeros((2, 9, 9, 3), np.uint8), {}, r"\(2, 9, 9, 3\) is no image"),
        (np.zeros((0, 9, 3), np.uint8), {}, "is no image"),
        (np.array("photo.jpg"), {}, "is no image"),
    ],
)
def test_what_is_no_image_is_named(tmp_path, image, options, message):
    net, _ = labeller(tmp_path)
    with pytest.raises(DataError, match=message):
        net.predict(image, **options)


def test_plans_and_conversions(tmp_path):
    with silence():
        plan = anysize.plan([(60, 80), (90, 50)] * 6, max_canvases=2)
    assert 1 <= len(plan.canvases) <= 2
    assert plan.geometry == NetGeometry()
    with pytest.raises(AnysizeError, match="no images"):
        anysize.plan([])
    with pytest.raises(DataError, match="below 1"):
        anysize.plan([(0, 5)])
    source = Path(__file__).parent / "golden/slim_v1.ckpt"
    with silence():
        written = anysize.convert(source, tmp_path / "body.safetensors", head="none")
    with pytest.raises(WeightsError, match="body without a head"):
        anysize.load(written)
    with pytest.raises(ConfigError, match="already exists"):
        anysize.convert(source, written)


def test_the_page_runs_as_it_stands(workspace, tmp_path):
    page = (Path(__file__).parents[1] / "docs/python.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    # In an empty terminal-less process, as a notebook's kernel is.
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=workspace,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "mean IoU 0." in done.stdout
    assert "No such file" in done.stdout
    for name in set(re.findall(r"anysize\.([a-z]\w+)\(", page)):
        assert name in anysize.__all__
