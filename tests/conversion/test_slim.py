import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from anysize.config import UNITS, load_config
from anysize.conversion.slim import from_checkpoint, read_slim
from anysize.conversion.tf_checkpoint import TfCheckpoint
from anysize.errors import WeightsError
from anysize.models.build import build_model
from anysize.models.ops import conv_transpose_same
from anysize.models.weights_file import load_tensors
from anysize.training.optim import build_optimizer

GOLDEN = Path(__file__).parent.parent / "golden"
TINY = (1, 2, 1, 1)
NORM = ("gamma", "beta", "moving_mean", "moving_variance")


def convolution(rng, scope, *shape):
    norm = {f"{scope}/BatchNorm/{n}": rng.random(shape[3]) for n in NORM}
    return {f"{scope}/weights": rng.normal(size=shape), **norm}


def net(units=TINY, base_depth=1, scope="resnet_v1_50/"):
    """The variables of tf_slim's resnet_v1, without a head."""
    rng = np.random.default_rng(0)
    tensors = convolution(rng, f"{scope}conv1", 7, 7, 3, base_depth)
    num_in = base_depth
    for block, num_units in enumerate(units, start=1):
        depth = base_depth * 2 ** (block - 1)
        for unit in range(1, num_units + 1):
            at = f"{scope}block{block}/unit_{unit}/bottleneck_v1"
            if unit == 1:
                tensors |= convolution(rng, f"{at}/shortcut", 1, 1, num_in, 4 * depth)
            tensors |= convolution(rng, f"{at}/conv1", 1, 1, num_in, depth)
            tensors |= convolution(rng, f"{at}/conv2", 3, 3, depth, depth)
            tensors |= convolution(rng, f"{at}/conv3", 1, 1, depth, 4 * depth)
            num_in = 4 * depth
    return {n: t.astype(np.float32) for n, t in tensors.items()}


def head(scope, num_classes, num_in=32, size=3):
    rng = np.random.default_rng(num_classes)
    return {
        f"{scope}/weights": rng.normal(size=(size, size, num_classes, num_in)).astype(np.float32),
        f"{scope}/biases": rng.normal(size=num_classes).astype(np.float32),
    }


def read(tensors, name="", undecoded=(), prefix="", joints=False):
    checkpoint = TfCheckpoint(
        path=Path("x.ckpt"),
        version="V2",
        tensors=tensors,
        undecoded=dict.fromkeys(undecoded, "string"),
    )
    foreign = from_checkpoint(checkpoint, head=name, prefix=prefix, joints=joints)
    accounted = [*foreign.taken, *foreign.left_out, *foreign.beside, *foreign.unknown]
    assert sorted(accounted) == sorted([*tensors, *undecoded])
    return foreign


def pose_heads(joints=3):
    heads = {
        "part_pred": joints,
        "locref_pred": 2 * joints,
        "pairwise_pred": 2 * joints * (joints - 1),
    }
    tensors = net(scope="resnet_v1_101/")
    for name, num in heads.items():
        tensors |= head(f"pose/{name}/block4", num)
    return tensors | head("pose/intermediate_supervision/block4", joints, num_in=16)


@pytest.mark.parametrize("name", ["tf_v1_fcn.ckpt", "tf_v2_fcn"])
def test_a_checkpoint_that_tensorflow_wrote_becomes_our_net(name):
    foreign = read_slim(GOLDEN / name)
    name = name.removesuffix(".ckpt")
    with np.load(GOLDEN / f"{name}_expected.npz") as file:
        index, data = json.loads(str(file["index"])), file["values"].tobytes()
    at, values = 0, {}
    for key, (dtype, shape) in index.items():
        values[key] = np.frombuffer(data, dtype, math.prod(shape), at).reshape(shape)
        at += values[key].nbytes
    assert set(foreign.taken) | set(foreign.left_out) == set(values)
    assert foreign.unknown == ()
    assert foreign.config.units == (2, 1, 1, 1)
    assert foreign.config.base_depth == 1
    assert set(foreign.left_out.values()) == {
        "bookkeeping of the training",
        "moving average; the value itself is taken",
        "optimiser's slot",
        "the classifier of whole images",
    }
    model = build_model(foreign.config, 2)
    load_tensors(model, {n: torch.from_numpy(t) for n, t in foreign.tensors.items()}, name)
    for theirs, ours in foreign.taken.items():
        value = values[theirs]
        if value.ndim == 4:
            value = np.einsum("hwio->oihw", value)
        assert np.array_equal(model.state_dict()[ours].numpy(), value)
    unit = "block1/unit_2/bottleneck_v1/conv3/BatchNorm/moving_variance"
    scope = "resnet_v1_50" if name == "tf_v1_fcn" else "fcn/resnet_v1_50"
    assert foreign.taken[f"{scope}/{unit}"] == "body.units.block1_unit2.conv3.moving_variance"
    assert foreign.taken["upconv/weights"] == "head.weights"


def tf_convolution(image, weights):
    """TensorFlow's definition, VALID: image [h, w, i], weights [kh, kw, i, o]."""
    size = weights.shape[0]
    height, width = (n - size + 1 for n in image.shape[:2])
    out = np.zeros((height, width, weights.shape[3]))
    for y in range(height):
        for x in range(width):
            patch = image[y : y + size, x : x + size]
            out[y, x] = np.einsum("hwi,hwio->o", patch, weights)
    return out


def tf_transposed(cells, weights):
    """conv2d_transpose 3x3, stride 2, SAME: the gradient of the convolution that has `weights`."""
    height, width = cells.shape[:2]
    out = np.zeros((2 * height + 1, 2 * width + 1, weights.shape[2]))
    for y in range(height):
        for x in range(width):
            out[2 * y : 2 * y + 3, 2 * x : 2 * x + 3] += np.einsum(
                "i,hwoi->hwo", cells[y, x], weights
            )
    return out[: 2 * height, : 2 * width]


def to_torch(array):
    return torch.from_numpy(array.transpose(2, 0, 1).astype(np.float64))[None]


def to_numpy(tensor):
    return tensor[0].numpy().transpose(1, 2, 0)


@pytest.mark.parametrize(
    ("order", "right"), [((0, 1, 2, 3), True), ((1, 0, 2, 3), False), ((0, 1, 3, 2), False)]
)
def test_the_layouts_mean_the_same_and_an_exchange_of_axes_is_seen(order, right):
    rng = np.random.default_rng(0)
    at = "resnet_v1_50/block4/unit_1/bottleneck_v1/conv2/weights"
    tensors = net() | head("upconv", 32)
    image, cells = rng.normal(size=(6, 7, 8)), rng.normal(size=(4, 5, 32))
    ours = read(tensors).tensors

    def turned(name):
        weights = torch.from_numpy(ours[name]).double()
        return weights.permute(*np.argsort([3, 2, 0, 1])).permute(order).permute(3, 2, 0, 1)

    body = F.conv2d(to_torch(image), turned("body.units.block4_unit1.conv2.weights"))
    assert np.allclose(to_numpy(body), tf_convolution(image, tensors[at]), 0, 1e-12) == right
    logits = conv_transpose_same(
        to_torch(cells), turned("head.weights"), torch.from_numpy(ours["head.biases"]).double()
    )
    expected = tf_transposed(cells, tensors["upconv/weights"]) + tensors["upconv/biases"]
    assert np.allclose(to_numpy(logits), expected, 0, 1e-12) == right


@pytest.mark.parametrize("depth", [50, 101, 152])
def test_the_depth_is_recognised_and_every_tensor_of_the_net_is_there(depth):
    foreign = read(net(UNITS[depth]))
    assert (foreign.config.depth, foreign.config.units) == (depth, ())
    assert foreign.source == f"TF-Slim resnet_v1_{depth}, V2 checkpoint"
    own = build_model(foreign.config, 2).state_dict()
    body = {n: tuple(t.shape) for n, t in own.items() if n.startswith("body.")}
    assert {n: t.shape for n, t in foreign.tensors.items()} == body
    assert all(t.dtype == np.float32 for t in foreign.tensors.values())
    assert foreign.pixels.mean == (123.68, 116.779, 103.939)
    assert (foreign.config.pool_padding, foreign.config.dilation_rule) == ("same", "new")


@pytest.mark.parametrize("scope", ["", "resnet_v1_101/", "a/b/anything/"])
def test_any_scope_is_found(scope):
    foreign = read(net(scope=scope, base_depth=2) | head("upconv", 2, num_in=64))
    assert foreign.config.base_depth == 2
    assert foreign.unknown == ()
    assert foreign.taken[f"{scope}conv1/weights"] == "body.conv1.weights"


def test_other_types_of_floats_become_float32_and_integers_are_refused():
    half = {n: t.astype(np.float16) for n, t in net().items()}
    assert all(t.dtype == np.float32 for t in read(half).tensors.values())
    with pytest.raises(WeightsError, match="holds int64, not floats"):
        read({n: t.astype(np.int64) for n, t in net().items()})


def test_what_training_left_behind_is_left_out_by_reason():
    tensors = net() | head("upconv", 2)
    weights, at = tensors["upconv/weights"], "resnet_v1_50/conv1/weights"
    slots = {
        f"{at}/Momentum": tensors[at],
        f"train/{at}/Adam_1": tensors[at],
        f"{at}/my_own_optimiser": tensors[at],
        "upconv/weights/RMSProp": weights,
    }
    averages = {f"{at}/ExponentialMovingAverage": tensors[at]}
    scalars = ("global_step", "OptimizeLoss/learning_rate", "beta1_power", "beta2_power_1")
    bookkeeping = {n: np.float32(0) for n in scalars} | {
        "resnet_v1_50/mean_rgb": np.zeros(3, np.float32)
    }
    logits = {
        "resnet_v1_50/logits/weights": np.zeros((1, 1, 32, 10), np.float32),
        "resnet_v1_50/logits/biases": np.zeros(10, np.float32),
    }
    foreign = read(
        tensors | slots | averages | bookkeeping | logits,
        undecoded=["_CHECKPOINTABLE_OBJECT_GRAPH"],
    )
    assert foreign.unknown == ()
    assert {n for n, r in foreign.left_out.items() if r == "optimiser's slot"} == set(slots)
    assert "moving average" in foreign.left_out[f"{at}/ExponentialMovingAverage"]
    assert foreign.left_out["resnet_v1_50/logits/biases"] == "the classifier of whole images"
    assert np.array_equal(foreign.tensors["body.conv1.weights"][0, 0], tensors[at][:, :, 0, 0])


def test_a_tensor_that_nothing_is_known_of_stays_unknown():
    strange = {
        "aspp/weights": np.zeros((3, 3, 32, 5), np.float32),  # a convolution, not a transposed one
        "aspp/biases": np.zeros(5, np.float32),
        "refine/weights": np.zeros((3, 3, 8, 32), np.float32),  # its biases say convolution
        "refine/biases": np.zeros(32, np.float32),
        "decoder/weights": np.zeros((3, 3, 8, 32), np.float32),  # its norm says convolution
        "decoder/BatchNorm/beta": np.zeros(32, np.float32),
        "resnet_v1_50/conv1/weights/odd": np.zeros(5, np.float32),  # no slot: of another shape
        "resnet_v1_50/logits/weights": np.zeros((1, 1, 99, 5), np.float32),
        "resnet_v1_50/block1/unit_1/bottleneck_v1/gain": np.float32(0),  # it changes the net
        "upconv/temperature": np.float32(0),  # it changes the head
    }
    within = {"resnet_v1_50/conv1/weights/odd", "resnet_v1_50/block1/unit_1/bottleneck_v1/gain"}
    foreign = read(net() | head("upconv", 2) | strange)
    assert set(foreign.unknown) == within
    assert set(foreign.beside) == strange.keys() - within


def test_numbers_and_what_is_no_number_are_left_out_beside_the_net():
    names = ("Variable", "epoch", "Mean/ExponentialMovingAverage", "resnet_v1_50/scale")
    numbers = {n: np.float32(0) for n in names}
    foreign = read(net() | head("upconv", 2) | numbers, undecoded=["text"])
    assert {foreign.left_out[n] for n in numbers} == {"a single number beside the net"}
    assert foreign.left_out["text"] == "of type string, which no weights of the net have"
    assert (foreign.beside, foreign.unknown) == ((), ())


def test_one_head_is_taken_and_a_head_without_biases_gets_zeros():
    tensors = net() | head("resnet_v1_50/upconv", 15)
    foreign = read(tensors)
    assert foreign.tensors["head.weights"].shape == (32, 15, 3, 3)
    assert foreign.taken["resnet_v1_50/upconv/biases"] == "head.biases"
    assert "head resnet_v1_50/upconv" in foreign.source
    del tensors["resnet_v1_50/upconv/biases"]
    foreign = read(tensors)
    assert np.array_equal(foreign.tensors["head.biases"], np.zeros(15))
    assert "head.biases" not in foreign.taken.values()


def test_pose_heads_are_taken_by_name():
    tensors = pose_heads()
    foreign = read(tensors)
    assert foreign.taken["pose/part_pred/block4/weights"] == "head.weights"
    assert foreign.unknown == ()
    assert foreign.left_out["pose/locref_pred/block4/biases"] == (
        "another head; take it with --head locref_pred"
    )
    assert (
        "its input is block 3" in foreign.left_out["pose/intermediate_supervision/block4/weights"]
    )
    for name in ("locref_pred", "pose/locref_pred", "pose/locref_pred/block4"):
        foreign = read(tensors, name)
        assert foreign.tensors["head.weights"].shape == (32, 6, 3, 3)
        assert foreign.taken["pose/locref_pred/block4/biases"] == "head.biases"
    with pytest.raises(
        WeightsError, match="cannot be taken: its input is block 3.* Those that can"
    ):
        read(tensors, "intermediate_supervision")
    with pytest.raises(WeightsError, match=r"'block4' is not in x\.ckpt. It has pose/part_pred"):
        read(tensors, "block4")


def test_the_heads_of_joints_are_taken_side_by_side():
    tensors = pose_heads() | net(units=(1, 1, 12, 1), scope="resnet_v1_101/")
    foreign = read(tensors, joints=True)
    part, location = (tensors[f"pose/{n}/block4/weights"] for n in ("part_pred", "locref_pred"))
    # [h, w, out, in] is [in, out, h, w] of ours.
    both = np.concatenate([part, location], axis=2).transpose(3, 2, 0, 1)
    np.testing.assert_array_equal(foreign.tensors["head.weights"], both)
    biases = [tensors[f"pose/{n}/block4/biases"] for n in ("part_pred", "locref_pred")]
    np.testing.assert_array_equal(foreign.tensors["head.biases"], np.concatenate(biases))
    middle = tensors["pose/intermediate_supervision/block4/weights"].transpose(3, 2, 0, 1)
    np.testing.assert_array_equal(foreign.tensors["intermediate.weights"], middle)
    assert foreign.config.intermediate
    assert set(foreign.left_out) == {
        "pose/pairwise_pred/block4/weights",
        "pose/pairwise_pred/block4/biases",
    }
    assert set(foreign.left_out.values()) == {"ways between joints, which Anysize does not predict"}
    model = build_model(foreign.config, 9)
    load_tensors(model, {n: torch.from_numpy(t) for n, t in foreign.tensors.items()}, "x")


def test_a_net_of_joints_without_the_middle_head_or_unit():
    tensors = pose_heads()
    assert not read(tensors, joints=True).config.intermediate
    without = {n: t for n, t in tensors.items() if "intermediate" not in n}
    assert "intermediate.weights" not in read(without, joints=True).tensors


def test_a_net_of_joints_needs_both_heads():
    tensors = {n: t for n, t in pose_heads().items() if "locref" not in n}
    with pytest.raises(WeightsError, match="lacks the head locref_pred of a net of joints"):
        read(tensors, joints=True)
    tensors = pose_heads() | head("pose/locref_pred/block4", 5)
    with pytest.raises(WeightsError, match="has 3 part maps and 5 locations"):
        read(tensors, joints=True)


def test_several_heads_must_be_told_apart():
    tensors = net() | head("a/upconv", 2) | head("b/upconv", 3)
    with pytest.raises(WeightsError, match="has 2 heads: a/upconv, b/upconv. Name the one to take"):
        read(tensors)
    with pytest.raises(WeightsError, match="'upconv' names several heads of"):
        read(tensors, "upconv")
    assert read(tensors, "b/upconv").tensors["head.weights"].shape[1] == 3
    body = read(tensors, "none")
    assert not any(n.startswith("head.") for n in body.tensors)
    assert list(body.left_out.values()) == ["a head, left out as asked"] * 4
    with pytest.raises(WeightsError, match="'up' is not in x.ckpt. It has nothing"):
        read(net(), "up")


def test_a_head_of_another_kernel_is_refused_and_can_be_left_out():
    tensors = net() | head("upscore", 2, size=4)
    with pytest.raises(WeightsError, match="upscore of x.ckpt cannot be taken: its kernel is 4x4"):
        read(tensors)
    assert "4x4" in read(tensors, "none").left_out["upscore/weights"]


def test_norms_and_biases_of_another_arg_scope_are_told():
    plain = net()
    without = {n: t for n, t in plain.items() if not n.endswith("/gamma")}
    with pytest.raises(WeightsError, match="norms without gamma .*batch_norm_scale=False"):
        read(without)
    with pytest.raises(WeightsError, match=r"with biases \(resnet_v1_50/conv1/biases\)"):
        read(plain | {"resnet_v1_50/conv1/biases": np.zeros(1, np.float32)})


def test_a_part_of_a_net_is_told_with_what_is_missing():
    for gone, message in (
        ("resnet_v1_50/conv1/weights", "lacks resnet_v1_50/conv1/weights"),
        ("resnet_v1_50/block2/unit_1/", "has units 2 in block 2; some are missing"),
        ("resnet_v1_50/block3/", "has blocks 1, 2, 4; a resnet_v1 has 1 to 4"),
        ("resnet_v1_50/block4/unit_1/bottleneck_v1/shortcut/", "lacks 5 tensors of the body"),
        ("resnet_v1_50/conv1/BatchNorm/moving_mean", "lacks 1 tensors of the body"),
    ):
        with pytest.raises(WeightsError, match=message):
            read({n: t for n, t in net().items() if not n.startswith(gone)})


def test_other_widths_are_told():
    at = "resnet_v1_50/block2/unit_1/bottleneck_v1/conv2/weights"
    with pytest.raises(
        WeightsError, match=rf"{at} has shape \(3, 3, 1, 2\), where .*\(3, 3, 2, 2\)"
    ):
        read(net() | {at: np.zeros((3, 3, 1, 2), np.float32)})
    at = "resnet_v1_50/conv1/weights"
    for shape in ((3, 3, 3, 1), (7, 7, 1, 1), (7, 7, 3, 0), (7,)):
        with pytest.raises(WeightsError, match=r"not \(7, 7, 3, channels\)"):
            read(net() | {at: np.zeros(shape, np.float32)})


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["resnet_v2_50/block1/unit_1/bottleneck_v2/preact/gamma"], "another net: resnet_v2"),
        (["vgg_16/conv1/conv1_1/weights"], "another net. .* this one has vgg_16/conv1/conv1_1"),
        (["layer-1/kernel/.ATTRIBUTES/VARIABLE_VALUE"], "object-based saver"),
        ([], "this one has nothing"),
    ],
)
def test_another_net_is_told(names, message):
    with pytest.raises(WeightsError, match=message):
        read({n: np.zeros(3, np.float32) for n in names})


def test_the_settings_that_the_docs_give_for_the_script_are_settings(tmp_path):
    text = (GOLDEN.parent.parent / "docs" / "from-tf-slim.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "run.toml").write_text(block, encoding="utf-8")
    config = load_config(tmp_path / "run.toml")
    assert (config.model.depth, config.model.norm, config.loss.kind) == (101, "frozen", "sigmoid")
    assert config.optim.momentum == 0
    build_optimizer(build_model(read(net()).config, 2), config.optim)


def test_of_two_nets_in_one_file_the_prefix_chooses():
    two = net(scope="a/") | net(scope="b/") | {"b/conv1/weights": np.ones((7, 7, 3, 1), np.float32)}
    with pytest.raises(WeightsError, match=r"holds 2 nets: a/, b/\. Name the one .* --prefix"):
        read(two)
    for asked in ("b", "b/"):
        foreign = read(two, prefix=asked)
        assert np.array_equal(foreign.tensors["body.conv1.weights"], np.ones((1, 3, 7, 7)))
        assert foreign.left_out["a/conv1/weights"] == "another net; --prefix a/ takes it"
        assert foreign.beside == ()
    with pytest.raises(WeightsError, match="holds 2 nets"):
        read(two, prefix="c")
    nested = net(scope="") | net(scope="b/")
    assert read(nested, prefix=".").taken["conv1/weights"] == "body.conv1.weights"
