"""The proof for every net that `[model]` can name: on canvases as alone, through `Net` only.

`test_exact_canvases.py` compares our ResNets with an independent net; here nothing is known of a
net but its contract, so that a new one is held to it by one line in `NETS`.
"""

import dataclasses

import pytest
import torch

from anysize.config import ModelConfig
from anysize.data.batch import cut_out
from anysize.errors import ShapeError
from anysize.geometry import (
    NO_ROOM,
    Canvas,
    Layout,
    NetGeometry,
    Rect,
    Size,
    check_layout,
    logits_rects,
    padded_batch,
    place,
    round_up,
    single,
    target_canvas,
)
from anysize.models.build import build_model, geometry_of
from anysize.models.ops import upsample

TINY = {"units": (1, 2, 1, 2), "base_depth": 4}
TORCHVISION = {"stride_position": "first_3x3", "pool_padding": "torchvision"}
NETS = {
    f"{name} at stride {stride}": ModelConfig(**TINY, **rules, output_stride=stride, norm=norm)
    for stride in (8, 16, 32)
    for norm in ("frozen", "trained")
    for name, rules in {
        f"TF-Slim, {norm}": {},
        f"torchvision, {norm}": {**TORCHVISION, "dilation_rule": "previous"},
        f"Caffe, {norm}": {"stride_position": "first_1x1", "pool_padding": "caffe"},
        f"with a ReLU, {norm}": {"head_relu": True},
        f"recomputed, {norm}": {"activation_checkpointing": True},
        f"basic units, {norm}": {
            **TORCHVISION,
            "dilation_rule": "previous",
            "basic_units": True,
            "activation_checkpointing": norm == "frozen",
        },
    }.items()
} | {
    # Blocks of one unit never reach their own dilation under torchvision's rule: half the gutter.
    "a short reach": ModelConfig(
        units=(1, 1, 1, 1),
        base_depth=4,
        output_stride=8,
        dilation_rule="previous",
        **TORCHVISION,
    )
}
OTHERS = {
    "a U-Net of another package": ModelConfig(
        net="tests.models.small_nets:SmallUnet", arguments={"width": 4}
    ),
    "a net with pooling to 2x2": ModelConfig(net="tests.models.small_nets:Pyramid"),
}
"""Nets that `model.net` names; those of the libraries are proven by `make prove-peers`."""

ELSEWHERE = {
    "depth": "units, by a name",
    "num_channels": "of the first convolution only",
    "norm_decay": "of the moving statistics only",
    "loss_at": "of the loss; see test_losses.py",
    "part_maps": "of the loss",
    "intermediate": "a second head; see test_joints.py",
}
"""Keys of `[model]` that do not change what is compared here."""

SIZES = [Size(33, 47), Size(70, 21), Size(16, 30), Size(25, 90)]


def net_of(config):
    net = build_model(config, 3, generator=torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            if name.endswith(("beta", "biases", "moving_mean")):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) - 0.3)
    return net.double().train()


def mosaic(geometry):
    placements, cell = [], 0
    for size in SIZES:
        placements.append(place(size, geometry, slot=0, cell_top=0, cell_left=cell))
        cell += geometry.step(size.width) // geometry.output_stride
    height = max(geometry.canvas_extent(size.height) for size in SIZES)
    width = round_up(cell * geometry.output_stride, geometry.canvas_multiple)
    return Layout(Canvas(1, height, width), tuple(placements))


def outcome(net, layouts, *, at_full_resolution):
    """Logits of each image, and gradients of a sum over all of them that weighs each cell."""
    net.zero_grad()
    generator = torch.Generator().manual_seed(5)
    images = [torch.randn(3, *s, generator=generator, dtype=torch.float64) for s in SIZES]
    found = []
    for layout, which in layouts:
        check_layout(layout, net.geometry)
        pixels = torch.zeros(layout.canvas.slots, 3, *layout.canvas[1:], dtype=torch.float64)
        for p, i in zip(layout.placements, which, strict=True):
            cut_out(pixels, Rect(*p)).copy_(images[i])
        logits = net(pixels, layout)
        assert logits.shape[2:] == target_canvas(layout.canvas, net.geometry, "grid")[1:]
        rects = logits_rects(layout, net.geometry)
        if at_full_resolution:
            logits = upsample(logits, layout, net.geometry)
            stride = net.geometry.output_stride
            rects = [
                Rect(p.slot, p.top // stride * stride, p.left // stride * stride, *p.size)
                for p in layout.placements
            ]
        own = [cut_out(logits, rect) for rect in rects]
        sum((x.sin() * torch.arange(x.shape[2])).sum() for x in own).backward()
        found += [x.detach().flatten() for x in own]
    return torch.cat(found), torch.cat([p.grad.flatten() for p in net.parameters()])


def differences(net, layouts, **options):
    """Largest differences of logits and gradients from those of each image alone, relative."""
    alone = [(single(size, net.geometry), [i]) for i, size in enumerate(SIZES)]
    if any(getattr(m, "norm", "") == "trained" for m in net.modules()):
        # Its statistics are those of a canvas: what is compared is all images on one of their own.
        alone = [padded(net.geometry, Canvas(4, 72, 92))]
    ours, theirs = outcome(net, layouts, **options), outcome(net, alone, **options)
    return max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True)
    )


def padded(geometry, canvas):
    height = max(geometry.canvas_extent(s.height) for s in SIZES)
    width = max(geometry.canvas_extent(s.width) for s in SIZES)
    canvas = Canvas(canvas.slots, max(canvas.height, height), max(canvas.width, width))
    return padded_batch(SIZES, canvas, geometry), [0, 1, 2, 3]


@pytest.mark.parametrize("at_full_resolution", [False, True])
@pytest.mark.parametrize("name", NETS | OTHERS)
def test_every_net_is_exact(name, at_full_resolution):
    config = (NETS | OTHERS)[name]
    net = net_of(config)
    assert net.geometry == geometry_of(config)
    layouts = [padded(net.geometry, Canvas(4, 128, 128))]
    assert differences(net, layouts, at_full_resolution=at_full_resolution) < 1e-12
    if net.geometry.mosaic:
        layouts = [(mosaic(net.geometry), [0, 1, 2, 3])]
        assert differences(net, layouts, at_full_resolution=at_full_resolution) < 1e-12


@pytest.mark.parametrize("name", NETS)
def test_control_a_gutter_one_cell_short(name, monkeypatch):
    """What the net says of its reach is no more than it needs, at the coarsest level."""
    net = net_of(NETS[name])
    geometry = net.geometry
    reach = geometry.gutter
    monkeypatch.setattr("tests.parity.test_every_net.check_layout", lambda *_: None)
    short = NetGeometry(
        geometry.output_stride, geometry.pool_padding, reach - geometry.output_stride
    )
    layouts = [(mosaic(short), [0, 1, 2, 3])]
    assert differences(net, layouts, at_full_resolution=False) > 1e-6


def test_every_key_of_a_net_is_varied_here_or_said_to_change_nothing():
    varied = {
        field.name
        for config in (NETS | OTHERS).values()
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default
    }
    keys = {field.name for field in dataclasses.fields(ModelConfig)}
    assert keys - varied - {"arguments"} == set(ELSEWHERE)


def test_control_another_package_net_with_a_gutter_one_cell_short_is_refused():
    net = net_of(OTHERS["a U-Net of another package"])
    geometry = dataclasses.replace(net.geometry, gutter=0)
    layouts = [(mosaic(geometry), [0, 1, 2, 3])]
    with pytest.raises(ShapeError):
        differences(net, layouts, at_full_resolution=False)


def test_reach_follows_from_the_units():
    assert geometry_of(ModelConfig()).gutter == 32
    assert geometry_of(ModelConfig(output_stride=8)).gutter == 32
    assert geometry_of(NETS["a short reach"]).gutter == 16


def test_a_net_without_mosaics_leaves_no_room_beside_an_image():
    geometry = NetGeometry(32, "none", mosaic=False, canvas_multiple=32, logits_per_cell=32)
    assert geometry.step(40) == NO_ROOM
