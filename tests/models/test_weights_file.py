import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from anysize.config import ModelConfig, PixelConvention
from anysize.data.samples import Classes
from anysize.errors import ConfigError, WeightsError
from anysize.geometry import Size, single
from anysize.models.build import build_model, geometry_of
from anysize.models.weights_file import (
    Weights,
    WeightsFile,
    load_weights,
    read_weights_file,
    save_weights,
    write_weights_file,
)
from anysize.training.fine_tuning import start_from
from anysize.training.settings import load_run_config

CPU = torch.device("cpu")
CONFIG = ModelConfig(units=(1, 1, 1, 1), base_depth=4)
CLASSES = Classes(names=("a", "b"), colours=((0, 0, 0), (9, 9, 9)), ignore_index=255)


def tiny(seed=0, config=CONFIG, num_classes=2):
    return build_model(config, num_classes, generator=torch.Generator().manual_seed(seed))


def weights_of(model, config=CONFIG, classes=CLASSES):
    pixels = PixelConvention(channel_order="BGR", mean=(1.0, 2.0, 3.0))
    return Weights(model=model, config=config, classes=classes, kind="multiclass", pixels=pixels)


def test_weights_come_back_with_all_that_is_needed_to_use_them(tmp_path):
    path = tmp_path / "w.safetensors"
    saved = weights_of(tiny())
    save_weights(path, saved)
    loaded = load_weights(path, CPU)
    assert loaded.config == CONFIG
    assert loaded.classes == CLASSES
    assert loaded.pixels == saved.pixels
    assert loaded.kind == "multiclass"
    layout = single(Size(33, 41), geometry_of(CONFIG))
    x = torch.randn(1, 3, *layout.canvas[1:])
    with torch.no_grad():
        assert torch.equal(loaded.model(x, layout), saved.model.eval()(x, layout))


def test_channels_last_weights_are_saved_right(tmp_path):
    path = tmp_path / "w.safetensors"
    model = tiny().to(memory_format=torch.channels_last)
    save_weights(path, weights_of(model))
    loaded = load_weights(path, CPU).model.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded[name], tensor)


def test_a_missing_damaged_or_foreign_file_is_refused_by_name(tmp_path):
    path = tmp_path / "w.safetensors"
    with pytest.raises(WeightsError, match="No such file"):
        load_weights(path, CPU)
    save_weights(path, weights_of(tiny()))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WeightsError, match=r"w\.safetensors is damaged"):
        load_weights(path, CPU)
    path.write_bytes(b"\x80\x04junk")
    with pytest.raises(WeightsError, match=r"w\.safetensors is damaged"):
        load_weights(path, CPU)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(WeightsError, match="taken over with `anysize convert`"):
        load_weights(path, CPU)


@pytest.mark.parametrize("verb", ["export", "predict", "convert"])
def test_a_checkpoint_of_a_run_is_called_so_and_the_weights_are_named(tmp_path, verb):
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000004.safetensors"
    checkpoint.parent.mkdir(parents=True)
    save_file({"x": torch.zeros(1)}, checkpoint, {"format": "anysize-state-2"})
    image = tmp_path / "photo.png"
    Image.new("RGB", (8, 8)).save(image)
    arguments = {
        "export": [checkpoint, "-o", tmp_path / "m.onnx"],
        "predict": [checkpoint, image, "-o", tmp_path / "out"],
        "convert": [checkpoint, "-o", tmp_path / "w.safetensors"],
    }[verb]
    done = subprocess.run(
        [Path(sys.executable).with_name("anysize"), verb, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert "is a checkpoint of a run" in said
    assert str(tmp_path / "run" / "weights.safetensors") in said
    assert "taken over with" not in said


def test_every_tensor_is_accounted_for(tmp_path):
    path = tmp_path / "w.safetensors"
    larger = dataclasses.replace(CONFIG, units=(1, 1, 2, 1))
    save_weights(path, dataclasses.replace(weights_of(tiny()), config=larger))
    with pytest.raises(WeightsError, match="Only in the net: body.units.block3_unit2"):
        load_weights(path, CPU)
    smaller = dataclasses.replace(weights_of(tiny(config=larger)), config=CONFIG)
    save_weights(path, smaller)
    with pytest.raises(WeightsError, match="Only in the file: body.units.block3_unit2"):
        load_weights(path, CPU)
    wider = dataclasses.replace(CONFIG, base_depth=8)
    save_weights(path, dataclasses.replace(weights_of(tiny()), config=wider))
    with pytest.raises(WeightsError, match="Of another shape: body"):
        load_weights(path, CPU)


def test_fine_tuning_takes_the_head_whole_for_the_same_classes(tmp_path):
    path = tmp_path / "w.safetensors"
    given = tiny(seed=1)
    save_weights(path, weights_of(given))
    model = tiny(seed=2)
    pixels, said = start_from(model, path, CONFIG, CLASSES, "multiclass")
    assert pixels.channel_order == "BGR"
    assert "body and head" in said
    assert torch.equal(model.head.weights, given.head.weights)
    model = tiny(seed=2, num_classes=3)
    others = Classes(names=("c", "d", "e"), colours=((0, 0, 0),) * 3, ignore_index=255)
    head = model.head.weights.detach().clone()
    _, said = start_from(model, path, CONFIG, others, "multiclass")
    assert "the head starts afresh" in said
    assert torch.equal(model.head.weights, head)
    assert torch.equal(model.body.conv1.weights, given.body.conv1.weights)


def test_fine_tuning_takes_rows_of_the_head_by_class_name(tmp_path):
    """One class renamed, one moved, one more: nothing that was learned of the others is lost."""
    path, given = tmp_path / "w.safetensors", tiny(seed=1, num_classes=4)
    with torch.no_grad():
        given.head.biases.copy_(torch.arange(1.0, 5.0))
    theirs = Classes(names=("sea", "land", "ice", "cloud"), colours=((0, 0, 0),) * 4)
    save_weights(path, weights_of(given, classes=theirs))
    ours = Classes(names=("sea", "ground", "cloud", "ice", "smoke"), colours=((0, 0, 0),) * 5)
    model = tiny(seed=2, num_classes=5)
    fresh = model.head.weights.detach().clone()
    _, said = start_from(model, path, CONFIG, ours, "multiclass")
    assert "3 of 5 classes by name; starting afresh: ground, smoke; left out: land" in said
    for i, j in ((0, 0), (2, 3), (3, 2)):
        assert torch.equal(model.head.weights[:, i], given.head.weights[:, j])
    for i in (1, 4):
        assert torch.equal(model.head.weights[:, i], fresh[:, i])
    assert model.head.biases.tolist() == [1.0, 0.0, 4.0, 3.0, 0.0]


def test_fine_tuning_refuses_rules_of_another_system(tmp_path):
    path = tmp_path / "w.safetensors"
    caffe = dataclasses.replace(CONFIG, pool_padding="caffe", stride_position="first_1x1")
    save_weights(path, weights_of(tiny(config=caffe), config=caffe))
    with pytest.raises(WeightsError, match="Set `model.pool_padding` to 'caffe'"):
        start_from(tiny(), path, CONFIG, CLASSES, "multiclass")


def test_a_head_that_was_trained_with_a_relu_goes_on_with_one(tmp_path):
    path = tmp_path / "w.safetensors"
    relu = dataclasses.replace(CONFIG, head_relu=True)
    save_weights(path, weights_of(tiny(config=relu), config=relu))
    with pytest.raises(WeightsError, match="Set `model.head_relu` to True"):
        start_from(tiny(), path, CONFIG, CLASSES, "multiclass")
    layout = single(Size(33, 41), geometry_of(CONFIG))
    x = torch.randn(1, 3, *layout.canvas[1:])
    with torch.no_grad():
        plain = tiny().eval()(x, layout)
        assert plain.min() < 0
        assert torch.equal(load_weights(path, CPU).model(x, layout), plain.clamp(min=0))


def write_body(path, config):
    tensors = {n: t for n, t in tiny(1, config).state_dict().items() if n.startswith("body.")}
    pixels = PixelConvention(channel_order="BGR", max_value=1.0, mean=(1.0, 2.0, 3.0))
    write_weights_file(
        path,
        WeightsFile(
            config=config, pixels=pixels, classes=None, kind=None, tensors=tensors, source="Caffe"
        ),
    )
    return tensors


def test_a_body_starts_a_training_but_cannot_label(tmp_path):
    path = tmp_path / "body.safetensors"
    tensors = write_body(path, CONFIG)
    assert read_weights_file(path).source == "Caffe"
    with pytest.raises(WeightsError, match="a body without a head .Caffe.*train.weights"):
        load_weights(path, CPU)
    model = tiny(seed=2)
    head = model.head.weights.detach().clone()
    pixels, said = start_from(model, path, CONFIG, CLASSES, "multiclass")
    assert pixels.max_value == 1.0
    assert "(Caffe): body (the file has none, so the head starts afresh)" in said
    assert torch.equal(model.head.weights, head)
    assert torch.equal(model.body.conv1.weights, tensors["body.conv1.weights"])


def test_a_run_takes_from_its_weights_what_it_leaves_open(tmp_path):
    config = dataclasses.replace(
        CONFIG,
        pool_padding="torchvision",
        stride_position="first_3x3",
        dilation_rule="previous",
        output_stride=8,
        norm="trained",
    )
    write_body(tmp_path / "body.safetensors", config)
    toml = tmp_path / "run.toml"
    toml.write_text('[data]\nroot = "d"\n[train]\nweights = "body.safetensors"\n')
    run = load_run_config(toml)
    assert run.model.units == (1, 1, 1, 1)
    assert run.model.base_depth == 4
    assert run.model.pool_padding == "torchvision"
    assert run.model.stride_position == "first_3x3"
    assert run.model.dilation_rule == "previous"
    assert run.pixels == read_weights_file(tmp_path / "body.safetensors").pixels
    # These do not decide which function the weights are for.
    assert run.model.output_stride == 16
    assert run.model.norm == "frozen"


def test_what_a_run_says_of_its_net_stays(tmp_path):
    write_body(tmp_path / "body.safetensors", CONFIG)
    toml = tmp_path / "run.toml"
    toml.write_text('[data]\nroot = "d"\n[train]\nweights = "body.safetensors"\n')
    run = load_run_config(toml, ["model.depth=101", "model.pool_padding=caffe"])
    assert (run.model.depth, run.model.units) == (101, ())
    assert run.model.pool_padding == "caffe"
    toml.write_text('model = 3\n[data]\nroot = "d"\n[train]\nweights = "body.safetensors"\n')
    with pytest.raises(ConfigError, match="must be a section"):
        load_run_config(toml)


def test_weights_that_a_run_names_must_be_there(tmp_path):
    toml = tmp_path / "run.toml"
    toml.write_text('[data]\nroot = "d"\n[train]\nweights = "w.safetensors"\n')
    with pytest.raises(WeightsError, match="No such file"):
        load_run_config(toml)


def test_a_forged_net_is_refused_before_it_is_built(tmp_path):
    path = tmp_path / "w.safetensors"
    saved = weights_of(tiny())
    for forged in (
        dataclasses.replace(CONFIG, units=(10**9, 1, 1, 1)),
        dataclasses.replace(CONFIG, base_depth=10**6),
    ):
        save_weights(path, dataclasses.replace(saved, config=forged))
        with pytest.raises(WeightsError, match=r"w\.safetensors"):
            load_weights(path, CPU)
    save_weights(path, dataclasses.replace(saved, config=dataclasses.replace(CONFIG, units=(1,))))
    with pytest.raises(WeightsError, match="The metadata of .*`model.units` has 1 numbers"):
        load_weights(path, CPU)


@pytest.mark.parametrize("key", ["model", "pixels", "classes", "kind"])
def test_metadata_that_nest_without_end_are_refused_in_a_line(tmp_path, key):
    path = tmp_path / "w.safetensors"
    save_weights(path, weights_of(tiny()))
    with safe_open(path, "pt") as file:
        metadata = {**file.metadata(), key: "[" * 100_000}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, metadata)
    with pytest.raises(WeightsError, match=r"The metadata of .*w\.safetensors") as caught:
        load_weights(path, CPU)
    assert len(str(caught.value)) < 1000
