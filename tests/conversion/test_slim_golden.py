"""TF-Slim nets against what the real tf_slim gave; see `tests/golden/make_slim_golden.py`."""

import contextlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from parity.ours import (
    alone,
    difference,
    output_padding,
    rebuild,
    run,
    together,
    with_one_kernel_transposed,
)

from anysize.conversion.asked import Asked
from anysize.conversion.convert import convert
from anysize.geometry import Size, single
from anysize.models.weights_file import load_weights, write_weights_file

GOLDEN = Path(__file__).parent.parent / "golden"
NETS = ("slim_v1", "slim_v2")
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4}
STRIDES = (8, 16, 32)


def target_of(height, width, num_classes):
    rows, columns, classes = np.ogrid[:height, :width, :num_classes]
    return ((5 * rows + 3 * columns + 2 * classes) % 7 < 3).astype(np.uint8)


class Golden:
    """What tf_slim gave at one output stride."""

    def __init__(self, net, output_stride, num_classes):
        with np.load(GOLDEN / f"{net}.npz") as file:
            self.sizes = [Size(*map(int, s)) for s in file["sizes"]]
            self.images = [file["picture"][: s.height, : s.width] for s in self.sizes]
            flat = file[f"logits{output_stride}"]
            self.losses = file[f"losses{output_stride}"].tolist()
        with np.load(GOLDEN / f"{net}_gradients.npz") as file:
            self.conv1 = file[f"conv1_{output_stride}"]
            self.upconv = file[f"upconv_{output_stride}"]
        shapes = [(*(2 * math.ceil(n / output_stride) for n in s), num_classes) for s in self.sizes]
        ends = np.cumsum([math.prod(s) for s in shapes])
        self.logits = [a.reshape(s) for a, s in zip(np.split(flat, ends[:-1]), shapes, strict=True)]
        self.targets = [target_of(*s) for s in shapes]


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Both nets, read with our own reader and written as a weights file."""
    found = {}
    for net in NETS:
        path = tmp_path_factory.mktemp("weights") / f"{net}.safetensors"
        file, foreign = convert(GOLDEN / f"{net}.ckpt", Asked(loss="sigmoid"))
        write_weights_file(path, file)
        found[net] = load_weights(path, torch.device("cpu")), foreign
    return found


def compare(weights, model, golden, *, placed="alone", images=None):
    """Largest differences over all images; gradients are those of the sum of all losses."""
    images = golden.images if images is None else images
    geometry = model.geometry
    if placed == "together":
        layout = together(golden.sizes, geometry)
        ours = run(model, weights.pixels, layout, images, golden.targets)
    else:
        runs = [
            run(model, weights.pixels, layout, [image], [target])
            for layout, image, target in zip(
                alone(golden.sizes, geometry), images, golden.targets, strict=True
            )
        ]
        ours = runs[0]._replace(
            ends=[],
            logits=[r.logits[0] for r in runs],
            losses=[r.losses[0] for r in runs],
            conv1=sum(r.conv1 for r in runs),
            upconv=sum(r.upconv for r in runs),
        )
    theirs = ours._replace(
        logits=golden.logits, losses=golden.losses, conv1=golden.conv1, upconv=golden.upconv
    )
    return difference(ours, theirs)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("output_stride", STRIDES)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("placed", ["alone", "together"])
def test_all_size_classes_are_those_of_tf_slim(converted, net, output_stride, dtype, placed):
    weights, _ = converted[net]
    golden = Golden(net, output_stride, len(weights.classes.names))
    assert {(s.height % 4, s.width % 4) for s in golden.sizes} == {
        (h, w) for h in range(4) for w in range(4)
    }
    model = rebuild(weights, dtype, output_stride=output_stride)
    assert compare(weights, model, golden, placed=placed).largest < BOUNDS[dtype]


def test_the_files_are_what_they_are_said_to_be(converted):
    v1, v2 = (converted[net][1] for net in NETS)
    assert "V1" in v1.source
    assert "V2" in v2.source
    assert v1.config.units == (2, 2, 2, 1)
    assert (v1.config.base_depth, v2.config.base_depth) == (1, 2)
    beside = {"global_step", "resnet_v1/conv1/BatchNorm/gamma/Momentum", "upconv/biases/Momentum"}
    assert set(v2.left_out) == beside
    assert set(v1.left_out) == beside | {"resnet_v1/logits/weights", "resnet_v1/logits/biases"}


@pytest.mark.parametrize("net", NETS)
def test_every_tensor_has_a_say(converted, net):
    """A channel that is always off would hide what is read wrongly behind it."""
    weights, _ = converted[net]
    golden = Golden(net, 16, len(weights.classes.names))
    model = rebuild(weights, torch.float64, output_stride=16)
    largest = golden.sizes[13]
    layout = single(largest, model.geometry)
    given = weights.pixels, layout, [golden.images[13]], [golden.targets[13]]
    before = run(model, *given).logits[0]
    for name, tensor in model.state_dict().items():
        tensor.mul_(1.01)
        change = np.abs(run(model, *given).logits[0] - before).max()
        tensor.div_(1.01)
        assert change > 1e-6, name


# Controls: each takes one fact wrongly, and the proof above must see it, by float32's bound too.


def seen(converted, net, output_stride, *, wrongly=None, change=None, exchanged=False, **rules):
    weights, _ = converted[net]
    golden = Golden(net, output_stride, len(weights.classes.names))
    model = rebuild(weights, torch.float64, output_stride=output_stride, **rules)
    model = change(model) if change else model
    images = [i[..., ::-1] for i in golden.images] if exchanged else None
    with wrongly() if wrongly else contextlib.nullcontext():
        return compare(weights, model, golden, images=images)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("output_stride", STRIDES)
@pytest.mark.parametrize(
    "fact",
    [
        pytest.param({"change": with_one_kernel_transposed}, id="one kernel transposed"),
        pytest.param({"exchanged": True}, id="red and blue not exchanged"),
        pytest.param({"stride_position": "first_3x3"}, id="stride in the first unit's 3x3"),
        pytest.param({"pool_padding": "torchvision"}, id="pooling starts at -1"),
        pytest.param({"wrongly": output_padding}, id="output_padding=1"),
    ],
)
def test_control_a_fact_taken_wrongly_is_seen(converted, net, output_stride, fact):
    found = seen(converted, net, output_stride, **fact)
    assert found.logits > 10 * BOUNDS[torch.float32]
    assert found.gradients > 10 * BOUNDS[torch.float32]


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("output_stride", [8, 16])
def test_control_the_dilation_rule_of_torchvision_is_seen(converted, net, output_stride):
    """Caffe's place of the stride is the same function as Slim's, so the rule alone is wrong."""
    caffe = {"stride_position": "first_1x1"}
    assert seen(converted, net, output_stride, **caffe).largest < BOUNDS[torch.float64]
    found = seen(converted, net, output_stride, **caffe, dilation_rule="previous")
    assert found.logits > 10 * BOUNDS[torch.float32]
    assert found.gradients > 10 * BOUNDS[torch.float32]
