"""Nets of other packages by the name that `[model]` gives."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.small_nets import SmallUnet

from anysize.config import ModelConfig, PixelConvention, load_config
from anysize.data.samples import Classes
from anysize.errors import (
    AnysizeError,
    ConfigError,
    ShapeError,
    UnsupportedNetError,
    WeightsError,
)
from anysize.geometry import Canvas, Layout, Placement
from anysize.models.any_net import package_of
from anysize.models.build import build_model, geometry_of
from anysize.models.weights_file import Weights, load_weights, save_weights
from anysize.training.fine_tuning import start_from

HERE = "tests.models.small_nets"
UNET = ModelConfig(net=f"{HERE}:SmallUnet", arguments={"width": 16}, norm="trained")
CPU = torch.device("cpu")


def classes_of(*names):
    return Classes(names=names, colours=((0, 0, 0),) * len(names), ignore_index=255)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def weights_of(config=UNET, names=("a", "b", "c"), seed=0):
    return Weights(
        model=build_model(config, len(names), generator=seeded(seed)),
        config=config,
        classes=classes_of(*names),
        kind="multiclass",
        pixels=PixelConvention(max_value=1.0),
    )


def test_a_net_has_its_own_names_geometry_and_initial_weights():
    before = torch.get_rng_state()
    net = build_model(UNET, 3, generator=seeded(4))
    assert torch.equal(before, torch.get_rng_state())
    again, other = (build_model(UNET, 3, generator=seeded(s)) for s in (4, 5))
    assert net.state_dict().keys() == SmallUnet(3).state_dict().keys()
    assert torch.equal(net.state_dict()["head.weight"], again.state_dict()["head.weight"])
    assert not torch.equal(net.state_dict()["head.weight"], other.state_dict()["head.weight"])
    assert net.geometry == geometry_of(UNET)
    assert (net.geometry.output_stride, net.geometry.size_multiple) == (4, 4)


def test_frozen_norms_keep_their_statistics_and_train_their_scale():
    for norm, moves in (("frozen", False), ("trained", True)):
        net = build_model(dataclasses.replace(UNET, norm=norm), 3).eval().train()
        modes = {type(m).__name__: m.training for m in net.modules()}
        assert modes["BatchNorm2d"] is moves
        assert modes["Conv2d"]
        assert all(p.requires_grad for p in net.parameters())


def test_a_norm_behind_global_pooling_takes_moving_statistics_for_one_image():
    net = build_model(ModelConfig(net=f"{HERE}:Pooler", norm="trained"), 3).double().train()
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=seeded(0))
    x[1, :, 10:] = 0  # Of the second image, 10x16.
    two = Layout(Canvas(2, 16, 16), (Placement(0, 0, 0, 16, 16), Placement(1, 0, 0, 10, 16)))
    net(x, two)
    assert net.net.branch[2].num_batches_tracked == 1
    alone = Layout(Canvas(1, 16, 16), two.placements[:1])
    found = net(x[:1], alone)
    assert all(m.training for m in net.modules())
    assert net.net.branch[2].num_batches_tracked == 1
    assert net.net.norm.num_batches_tracked == 2
    plain = net.net
    plain.branch[2].eval()
    assert torch.allclose(found, plain(x[:1]), atol=1e-12)
    plain.branch[2].train()
    one_pixel = Layout(Canvas(1, 1, 1), (Placement(0, 0, 0, 1, 1),))
    with pytest.raises(ShapeError, match="one value per channel for images of 1x1"):
        net(x[:1, :, :1, :1], one_pixel)


@pytest.mark.parametrize(
    ("net", "arguments", "error", "message"),
    [
        ("nowhere.nets:build", {}, ConfigError, "No module named 'nowhere'"),
        (f"{HERE}:nothing", {}, ConfigError, "no attribute 'nothing'"),
        (f"{HERE}:SmallUnet", {"widht": 3}, ConfigError, "unexpected keyword argument 'widht'"),
        (f"{HERE}:SmallUnet", {"num_classes": 4}, ConfigError, r"gives \(1, 4, 256, 256\)"),
        (f"{HERE}:two_classes", {}, ConfigError, "but there are 3 classes"),
        (f"{HERE}:broken", {}, ConfigError, r"no such layer \(small_nets.py, line \d+\)"),
        (f"{HERE}:number", {}, ConfigError, "returns int, not a net"),
        (f"{HERE}:a_net", {}, ConfigError, "is a net, not a function"),
        (f"{HERE}:F", {}, ConfigError, "is module, not a function"),
        (f"{HERE}:Lister", {}, UnsupportedNetError, "returns 1 values"),
        (f"{HERE}:Classifier", {}, ConfigError, r"gives \(1, 3\)"),
        ("torch.nn:Identity", {}, ConfigError, "nothing to train"),
        ("torch.nn:Linear", {"in_features": 3, "out_features": 3}, AnysizeError, "linear"),
    ],
)
def test_what_is_no_net_for_a_run_is_refused_by_name(net, arguments, error, message):
    with pytest.raises(error, match=message):
        build_model(ModelConfig(net=net, arguments=arguments), 3)


def test_settings_of_the_resnets_and_strange_names_are_refused():
    root = {"root": "d"}
    for model, message in (
        ({"net": "a:b", "depth": 101}, r"`model\.depth` is a setting of the ResNets"),
        ({"net": "a:b", "norm_decay": 0.5}, r"`model\.norm_decay` is a setting of the ResNets"),
        ({"arguments": {"a": 1}}, r"`model\.net`, which is empty"),
        ({"net": "unet"}, "like package.module:build"),
        ({"net": "a:b()"}, "like package.module:build"),
        ({"net": "a:b", "arguments": {"x": [1, None]}}, r"`model\.arguments\.x\[1\]` is None"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config({"data": root, "model": model})


def test_a_missing_library_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "segmentation_models_pytorch", None)
    with pytest.raises(ConfigError, match="pip install segmentation-models-pytorch"):
        geometry_of(ModelConfig(net="smp:Unet"))


def test_weights_hold_the_net_and_need_consent_to_call_it(tmp_path):
    path = tmp_path / "weights.safetensors"
    saved = weights_of()
    save_weights(path, saved)
    with pytest.raises(WeightsError, match=r"small_nets:SmallUnet\(width=16\).*--trust-net"):
        load_weights(path, CPU)
    run = tmp_path / "run.toml"
    for width, trusted in ((15, False), (16, True)):
        run.write_text(
            f'[data]\nroot = "d"\n[model]\nnet = "{UNET.net}"\n[model.arguments]\nwidth = {width}'
        )
        if trusted:
            load_weights(path, CPU)
        else:
            with pytest.raises(WeightsError, match="--trust-net"):
                load_weights(path, CPU)
    run.unlink()
    loaded = load_weights(path, CPU, trust_net=True)
    assert loaded.config == UNET
    assert not loaded.note
    for name, tensor in saved.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name


def test_another_version_is_said(tmp_path, monkeypatch):
    path = tmp_path / "weights.safetensors"
    config = ModelConfig(net="torch.nn:Conv2d", arguments=CONV)
    save_weights(path, weights_of(config))
    assert package_of(config.net) == f"torch {torch.__version__}"
    monkeypatch.setattr("anysize.models.weights_file.package_of", lambda net: "torch 1.0")
    note = load_weights(path, CPU, trust_net=True).note
    assert f"made with torch {torch.__version__}; here is torch 1.0" in note


CONV = {"in_channels": 3, "out_channels": 3, "kernel_size": 3, "padding": 1}


def start(model, path, names, config=UNET):
    return start_from(model, path, config, classes_of(*names), "multiclass")


def test_a_run_starts_from_a_state_dict_of_its_net(tmp_path):
    theirs = SmallUnet(5).state_dict()
    torch.save({"state_dict": {f"module.{n}": t for n, t in theirs.items()}}, tmp_path / "net.pth")
    model = build_model(UNET, 3, generator=seeded(1))
    head = model.state_dict()["head.weight"].clone()
    pixels, said = start(model, tmp_path / "net.pth", "abc")
    assert pixels is None
    assert "30 of 32 tensors; starting afresh: head.weight, head.bias" in said
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, head if name == "head.weight" else tensor)
        if "head" not in name:
            assert torch.equal(tensor, theirs[name]), name
    same = build_model(UNET, 5)
    assert "32 of 32 tensors" in start(same, tmp_path / "net.pth", "abcde")[1]
    assert torch.equal(same.state_dict()["head.weight"], theirs["head.weight"])


def test_a_run_starts_from_a_part_of_its_net(tmp_path):
    part = {"0.weight": torch.ones(32, 16, 3, 3), "fc.weight": torch.ones(10, 32)}
    part |= {f"1.{n}": torch.ones(32) for n in ("weight", "bias", "running_mean", "running_var")}
    save_file(part, tmp_path / "part.safetensors")
    model = build_model(UNET, 3)
    _, said = start(model, tmp_path / "part.safetensors", "abc")
    assert "5 of 32 tensors as down2; starting afresh: " in said
    assert "left out: fc.weight" in said
    assert (model.state_dict()["down2.0.weight"] == 1).all()
    assert not (model.state_dict()["down1.0.weight"] == 1).any()


def test_a_run_takes_classes_by_name_from_a_run_of_the_same_net(tmp_path):
    theirs = weights_of(names=("sky", "road", "tree"), seed=1)
    save_weights(tmp_path / "w.safetensors", theirs)
    model = build_model(UNET, 4, generator=seeded(2))
    new = model.state_dict()["head.bias"].clone()
    pixels, said = start(model, tmp_path / "w.safetensors", ("tree", "lake", "sky", "car"))
    assert pixels == theirs.pixels
    assert "2 of 4 classes by name; starting afresh: lake, car; left out: road" in said
    found, source = (m.state_dict()["head.bias"] for m in (model, theirs.model))
    assert torch.equal(found, torch.stack([source[2], new[1], source[0], new[3]]))


def test_files_that_do_not_fit_are_refused(tmp_path):
    theirs = SmallUnet(3).state_dict()
    cases = {
        "cut": ({n: t for n, t in theirs.items() if n != "up1.0.weight"}, "up1.0.weight"),
        "other": (
            {n: t.repeat(2, *[1] * (t.ndim - 1)) if t.ndim else t for n, t in theirs.items()}
            | {"down1.0.weight": theirs["down1.0.weight"]},
            "another shape",
        ),
        "none": ({"x": torch.ones(3)}, "Only in the net"),
        "text": ({"epoch": 3}, "holds no state dict"),
    }
    for name, (table, message) in cases.items():
        torch.save(table, tmp_path / name)
        with pytest.raises(WeightsError, match=message):
            start(build_model(UNET, 3), tmp_path / name, "abc")
    torch.save(SmallUnet(3), tmp_path / "module")
    (tmp_path / "damaged").write_bytes(b"PK123")
    for name in ("module", "damaged"):
        with pytest.raises(WeightsError, match="cannot be read: .* Save the state_dict alone"):
            start(build_model(UNET, 3), tmp_path / name, "abc")


def test_the_metadata_say_all_that_is_needed(tmp_path):
    path = tmp_path / "w.safetensors"
    save_weights(path, weights_of())
    size = int.from_bytes(path.read_bytes()[:8], "little")
    metadata = json.loads(path.read_bytes()[8 : 8 + size])["__metadata__"]
    model = json.loads(metadata["model"])
    assert (model["net"], model["arguments"]) == (UNET.net, {"width": 16})
    assert "package" in metadata
    assert load_file(path).keys() == SmallUnet(3).state_dict().keys()
