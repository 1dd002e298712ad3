"""What holds for every system; the systems' own names and layouts have tests of their own."""

import dataclasses
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import anysize
from anysize.config import ModelConfig, PixelConvention
from anysize.conversion import convert as module
from anysize.conversion.asked import Asked
from anysize.conversion.convert import convert, describe
from anysize.conversion.foreign import Foreign
from anysize.data.samples import Classes
from anysize.errors import AnysizeError, WeightsError
from anysize.geometry import Size, single
from anysize.models.build import build_model
from anysize.models.weights_file import (
    load_tensors,
    load_weights,
    read_weights_file,
    write_weights_file,
)

CONFIG = ModelConfig(units=(1, 1, 2, 1), base_depth=4, pool_padding="torchvision")
PARTS = {
    "gamma": "weight", "beta": "bias", "moving_mean": "running_mean",
    "moving_variance": "running_var",
}  # fmt: skip


def body(seed=0):
    model = build_model(CONFIG, 3, generator=torch.Generator().manual_seed(seed))
    return {n: t for n, t in model.state_dict().items() if n.startswith("body.")}


def torchvision_state():
    """The same tensors by torchvision's names, with its classifier."""
    state = {"fc.weight": torch.zeros(10, 128), "fc.bias": torch.zeros(10)}
    for name, tensor in body().items():
        *place, part = name.removeprefix("body.").split(".")
        layer = place[-1]
        conv, norm = {"shortcut": ("downsample.0", "downsample.1")}.get(
            layer, (layer, "bn" + layer[-1])
        )
        prefix = ""
        if place[0] == "units":
            block, unit = place[1].removeprefix("block").split("_unit")
            prefix = f"layer{block}.{int(unit) - 1}."
        leaf = f"{conv}.weight" if part == "weights" else f"{norm}.{PARTS[part]}"
        state[prefix + leaf] = tensor.clone()
    return state


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "resnet.safetensors"
    save_file(torchvision_state(), path)
    return path


def command(*arguments):
    return subprocess.run(
        [Path(sys.executable).with_name("anysize"), "convert", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def with_head(path, num_classes=3, **changes):
    """A reader's result with a head, for rules that no system's reader decides."""
    found = convert(path)[1]
    head = {
        "head.weights": np.ones((128, num_classes, 3, 3), np.float32),
        "head.biases": np.zeros(num_classes, np.float32),
    }
    values = {name: getattr(found, name) for name in Foreign.__slots__}
    values["tensors"] = {**found.tensors, **head}
    values["taken"] = {**found.taken, "up/w": "head.weights", "up/b": "head.biases"}
    return Foreign(**{**values, **changes})


def test_a_body_is_taken_with_its_rules_pixels_and_source(checkpoint):
    file, found = convert(checkpoint)
    assert file.classes is None
    assert file.kind is None
    assert (file.config.units, file.config.base_depth) == ((1, 1, 2, 1), 4)
    assert file.config.stride_position == "first_3x3"
    assert file.config.dilation_rule == "previous"
    assert file.pixels.max_value == 1.0
    assert "torchvision" in file.source
    assert "resnet.safetensors" in file.source
    assert set(file.tensors) == set(body())
    for name, tensor in body().items():
        assert torch.equal(file.tensors[name], tensor)
    text = describe(found)
    assert "units (1, 1, 2, 1), base depth 4" in text
    assert "fc.weight" in text


def test_the_command_says_what_it_found_and_writes_what_a_run_can_start_from(checkpoint, tmp_path):
    out = tmp_path / "w.safetensors"
    done = command(checkpoint, "-o", out)
    assert done.returncode == 0, done.stderr
    assert "Found torchvision or timm" in done.stdout
    assert "a body; a head is trained by `train.weights`" in done.stdout
    assert read_weights_file(out).config.pool_padding == "torchvision"
    assert command(checkpoint, "-o", out).returncode == 2
    assert command(checkpoint, "-o", tmp_path / "w.pth").returncode == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("layer3.1.bn2.bias"), "block3_unit2.conv2.beta"),
        (lambda s: s.update({"neck.weight": torch.zeros(3)}), "neck.weight"),
        (lambda s: s.update({"layer1.0.bn1.bias": torch.zeros(7)}), "block1_unit1.conv1.beta"),
        (lambda s: s["bn1.weight"].fill_(torch.nan), "not finite"),
        (lambda s: s["bn1.running_var"].fill_(-1), "negative variances"),
    ],
)
def test_nothing_is_written_unless_every_tensor_is_accounted_for(tmp_path, change, message):
    state = torchvision_state()
    change(state)
    path = tmp_path / "resnet.safetensors"
    save_file(state, path)
    out = tmp_path / "w.safetensors"
    done = command(path, "-o", out)
    assert done.returncode == 2
    assert message in done.stderr
    assert "resnet.safetensors" in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()


def test_a_head_must_be_given_a_meaning(checkpoint, monkeypatch):
    found = with_head(checkpoint)
    monkeypatch.setattr(module, "_read", lambda *_: found)
    with pytest.raises(WeightsError, match=r"a head of 3 channels.*--loss sigmoid"):
        convert(checkpoint)
    file, _ = convert(checkpoint, Asked(loss="sigmoid", head_relu=True))
    assert file.classes.names == ("class_0", "class_1", "class_2")
    assert len(set(file.classes.colours)) == 3
    assert file.config.head_relu
    two = Classes(names=("a", "b"), colours=((0, 0, 0), (1, 1, 1)))
    with pytest.raises(WeightsError, match="3 channels, but --classes names 2: a, b"):
        convert(checkpoint, Asked(loss="softmax", classes=two))


def test_a_head_can_be_left_out(checkpoint, monkeypatch):
    found = with_head(checkpoint)
    monkeypatch.setattr(module, "_read", lambda *_: found)
    file, found = convert(checkpoint, Asked(head="none"))
    assert file.classes is None
    assert not any(n.startswith("head.") for n in file.tensors)
    assert found.left_out["up/w"] == "a head, left out as asked"


def test_a_body_beside_a_foreign_head_is_taken_where_it_alone_is_asked_for(tmp_path):
    path, out = tmp_path / "moco.safetensors", tmp_path / "w.safetensors"
    head = {"fc.0.weight": torch.zeros(4, 4), "fc.2.bias": torch.zeros(4)}
    head |= {f"decode_head.convs.{i}.weight": torch.zeros(3, 3) for i in range(20)}
    save_file(torchvision_state() | head, path)
    done = command(path, "-o", out)
    assert done.returncode == 2
    assert "add --head none" in done.stderr
    assert not out.exists()
    done = command(path, "-o", out, "--head", "none")
    assert done.returncode == 0, done.stderr
    assert "left out as asked: 22 (decode_head.*, fc.*)" in done.stdout
    assert set(read_weights_file(out).tensors) == set(body())
    changed = {"layer1.0.se.weight": torch.zeros(3), "conv1.bias": torch.zeros(4)}
    for name, tensor in changed.items():
        save_file(torchvision_state() | {name: tensor}, path)
        with pytest.raises(WeightsError, match=name):
            convert(path, Asked(head="none"))


def test_the_command_takes_the_net_that_the_prefix_names(tmp_path):
    path, out = tmp_path / "mean.pth", tmp_path / "w.safetensors"
    averaged = {n: t + 1 if n == "conv1.weight" else t for n, t in torchvision_state().items()}
    content = {"state_dict": torchvision_state(), "state_dict_ema": averaged, "epoch": 3}
    torch.save({**content, "best": np.float64(0.5)}, path)
    done = command(path, "-o", out)
    assert "state_dict_ema. takes them" in done.stdout
    assert "not weights: 2 (epoch, best)" in done.stdout
    stem = body()["body.conv1.weights"]
    assert torch.equal(read_weights_file(out).tensors["body.conv1.weights"], stem)
    out.unlink()
    assert command(path, "-o", out, "--prefix", "state_dict_ema").returncode == 0
    assert torch.equal(read_weights_file(out).tensors["body.conv1.weights"], stem + 1)


RULES = ("--stride-position", "first_1x1", "--dilation-rule", "new", "--pool-padding", "caffe")
PIXELS = ("--channel-order", "BGR", "--pixel-mean", "3,2,1", "--pixel-std", "1,1,2")


def test_what_a_file_cannot_tell_is_assumed_and_said_or_given_by_options(checkpoint, tmp_path):
    out = tmp_path / "w.safetensors"
    done = command(checkpoint, "-o", out)
    assert (
        "assumed: --stride-position first_3x3, --dilation-rule previous, --pool-padding "
        "torchvision, --channel-order RGB, --pixel-mean 0.485,0.456,0.406, --pixel-std "
        "0.229,0.224,0.225, --max-value 1.0."
    ) in done.stdout
    assert "resnetblur50" in done.stdout
    out.unlink()
    done = command(checkpoint, "-o", out, *RULES, *PIXELS, "--max-value", 255)
    assert done.returncode == 0, done.stderr
    assert "assumed" not in done.stdout
    file = read_weights_file(out)
    rules = (file.config.stride_position, file.config.dilation_rule, file.config.pool_padding)
    assert rules == ("first_1x1", "new", "caffe")
    pixels = {"mean": (3.0, 2.0, 1.0), "std": (1.0, 1.0, 2.0), "max_value": 255.0}
    assert file.pixels == PixelConvention(channel_order="BGR", **pixels)
    for name, tensor in body().items():
        assert torch.equal(file.tensors[name], tensor)


def test_rules_change_what_the_net_computes_and_the_api_takes_them_too(checkpoint, tmp_path):
    image = torch.rand(1, 3, 64, 64, dtype=torch.float64)

    def features(name, **options):
        file = read_weights_file(anysize.convert(checkpoint, tmp_path / name, **options))
        model = build_model(dataclasses.replace(file.config, output_stride=8), 1).double().eval()
        net = model.body
        load_tensors(net, {n.removeprefix("body."): t for n, t in file.tensors.items()}, name)
        with torch.no_grad():
            return net(image, single(Size(64, 64), model.geometry))

    plain = features("a.safetensors")
    assert torch.equal(plain, features("b.safetensors", stride_position="first_3x3"))
    for i, (key, value) in enumerate(
        {"stride_position": "first_1x1", "dilation_rule": "new", "pool_padding": "same"}.items()
    ):
        assert not torch.allclose(plain, features(f"{i}.safetensors", **{key: value}))


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        (Asked(pixel_mean=(1.0, 2.0)), "must be three numbers"),
        (Asked(pixel_std=(1.0, 0.0, 1.0)), "must be above 0"),
        (Asked(max_value=float("nan")), "must be above 0"),
        (Asked(stride_position="last_3x3"), "first_3x3"),
        (Asked(channels=3), "must be 4 to 64"),
        (Asked(channels=5, pixel_mean=(1.0,) * 4), "must be three numbers"),
        (Asked(mean="m", pixel_mean=(1.0, 1.0, 1.0)), "--mean"),
    ],
)
def test_rules_and_pixels_that_make_no_sense_are_refused(checkpoint, asked, what):
    with pytest.raises(AnysizeError, match=what):
        convert(checkpoint, asked)


@pytest.mark.parametrize("order", ["RGB", "BGR"])
def test_a_first_convolution_for_more_channels_starts_as_that_of_three(checkpoint, order):
    channels = Asked(channels=5, channel_order=order, pixel_mean=(0.1, 0.2, 0.3))
    three, _ = convert(checkpoint, dataclasses.replace(channels, channels=None))
    five, found = convert(checkpoint, channels)
    assert (five.config.num_channels, five.pixels.channel_order) == (5, "RGB")
    assert "5 channels" in describe(found)
    assert "start with zeros" in describe(found)
    rgb, more = torch.rand(1, 3, 9, 9), torch.rand(1, 2, 9, 9)

    def stem(file, pixels):
        mean, std = (torch.tensor(v)[:, None, None] for v in (file.pixels.mean, file.pixels.std))
        return F.conv2d((pixels - mean) / std, file.tensors["body.conv1.weights"])

    expected = stem(three, rgb.flip(1) if order == "BGR" else rgb)
    assert torch.allclose(stem(five, torch.cat([rgb, more], 1)), expected, atol=1e-5)
    averaged, _ = convert(checkpoint, dataclasses.replace(channels, new_channels="mean"))
    weights = averaged.tensors["body.conv1.weights"]
    assert torch.allclose(weights[:, 3:], weights[:, :3].mean(1, keepdim=True).expand(-1, 2, 7, 7))
    assert not torch.allclose(stem(averaged, torch.cat([rgb, more], 1)), expected, atol=1e-2)
    four, _ = convert(checkpoint, Asked(channels=4, pixel_mean=(1.0, 2.0, 3.0, 4.0)))
    assert four.pixels.mean == (1.0, 2.0, 3.0, 4.0)


def test_options_for_a_head_are_refused_where_there_is_none(checkpoint):
    with pytest.raises(WeightsError, match="nothing for --loss, --classes and --head-relu"):
        convert(checkpoint, Asked(loss="softmax"))
    with pytest.raises(WeightsError, match="--mean goes with a .caffemodel"):
        convert(checkpoint, Asked(mean=checkpoint))


def test_a_head_of_too_many_classes_is_refused(checkpoint, monkeypatch):
    found = with_head(checkpoint, num_classes=300)
    monkeypatch.setattr(module, "_read", lambda *_: found)
    with pytest.raises(WeightsError, match="300 channels; a mask has room for 255"):
        convert(checkpoint, Asked(loss="softmax"))


def test_what_is_no_checkpoint_is_refused_by_name(tmp_path):
    with pytest.raises(WeightsError, match="No such file: .*gone.ckpt"):
        convert(tmp_path / "gone.ckpt")
    with pytest.raises(WeightsError, match="is not a file"):
        convert(tmp_path)
    photo = tmp_path / "photo.ckpt"
    for content in (b"", b"hello", b"\xff\xd8\xff\xe0" + bytes(500)):
        photo.write_bytes(content)
        with pytest.raises(WeightsError, match=r"photo\.ckpt is of no format that Anysize knows"):
            convert(photo)


def keras(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model.weights.h5", b"x")


def saved_model(path):
    path.mkdir()
    (path / "saved_model.pb").write_bytes(b"x")


@pytest.mark.parametrize(
    ("name", "make", "way_out"),
    [
        (
            "frozen.pb",
            lambda p: p.write_bytes(b"\x0a\x05hello"),
            "checkpoint that it was made from",
        ),
        ("net.h5", lambda p: p.write_bytes(b"\x89HDF\r\n\x1a\n"), "from TF-Slim, torchvision or"),
        ("net", lambda p: p.write_bytes(b"\x89HDF\r\n\x1a\n"), "snapshot_format: BINARYPROTO"),
        ("net.keras", keras, "a model of Keras.* from TF-Slim, torchvision or timm"),
        ("exported", saved_model, "a SavedModel.*exported/variables/variables"),
    ],
)
def test_files_of_tensorflow_that_cannot_be_taken_are_refused_by_name(
    tmp_path, name, make, way_out
):
    make(tmp_path / name)
    with pytest.raises(WeightsError, match=f"{name} is .*{way_out}"):
        convert(tmp_path / name)


def test_our_own_file_is_not_converted_again(tmp_path, checkpoint):
    file, _ = convert(checkpoint)
    path = tmp_path / "w.safetensors"
    write_weights_file(path, file)
    with pytest.raises(WeightsError, match="weights file of Anysize already"):
        convert(path)


def test_a_converted_head_labels(tmp_path, checkpoint, monkeypatch):
    found = with_head(checkpoint)
    monkeypatch.setattr(module, "_read", lambda *_: found)
    path = tmp_path / "w.safetensors"
    write_weights_file(path, convert(checkpoint, Asked(loss="softmax"))[0])
    weights = load_weights(path, torch.device("cpu"))
    assert weights.kind == "multiclass"
    assert weights.pixels == PixelConvention(
        max_value=1.0, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
    )
    assert json.dumps(weights.classes.names) == '["class_0", "class_1", "class_2"]'
