"""torchvision's nets: outputs of the real one, and what other nets give away."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from parity.compare_torchvision import (
    SEEN,
    Converted,
    build,
    differences,
    layouts_of,
    net_input,
    one_pixel_off,
    run,
)

from anysize.config import UNITS
from anysize.conversion.torch_file import read_torch_file
from anysize.conversion.torchvision import foreign_from_torchvision
from anysize.errors import WeightsError
from anysize.geometry import Size
from anysize.models.build import build_model
from anysize.models.ops import conv_transpose_same

GOLDEN = Path(__file__).parent.parent / "golden"
STATE_DICT = GOLDEN / "torchvision_resnet.pth"


@pytest.fixture(scope="module")
def tensors():
    return read_torch_file(STATE_DICT).tensors


@pytest.fixture(scope="module")
def converted(tensors):
    return as_converted(foreign_from_torchvision(tensors, STATE_DICT))


def as_converted(foreign):
    tensors = {n: torch.tensor(a) for n, a in foreign.tensors.items()}
    return Converted(foreign.config, foreign.pixels, tensors)


def compare(
    converted,
    output_stride,
    arrangement="alone",
    upsampling=conv_transpose_same,
    name="torchvision",
):
    """The largest differences from the system's own values, as shares of their range."""
    stored = dict(np.load(GOLDEN / f"{name}_inputs.npz"))
    live = dict(np.load(GOLDEN / f"{name}_stride{output_stride}.npz"))
    images = [stored[n] for n in sorted(stored) if n.startswith("image")]
    net = build(converted, stored, output_stride).double()
    inputs = [net_input(i, converted.pixels, torch.float64) for i in images]
    layouts = layouts_of([Size(*i.shape[:2]) for i in images], net.geometry)[arrangement]
    return differences(run(net, layouts, inputs, live, upsampling), live)


def resnet(units=UNITS[50], base=64, *, basic=False):
    """Names and shapes of a torchvision ResNet, written down from its constructor."""
    shapes = {"conv1.weight": (base, 3, 7, 7), "fc.weight": (10, 32 * base), "fc.bias": (10,)}
    norms = {"bn1": base}
    num_in = base
    for block, n in enumerate(units):
        depth = base << block
        for unit in range(n):
            name = f"layer{block + 1}.{unit}"
            norms |= {f"{name}.bn1": depth, f"{name}.bn2": depth}
            shapes[f"{name}.conv2.weight"] = (depth, depth, 3, 3)
            if basic:
                shapes[f"{name}.conv1.weight"] = (depth, num_in, 3, 3)
            else:
                shapes[f"{name}.conv1.weight"] = (depth, num_in, 1, 1)
                shapes[f"{name}.conv3.weight"] = (4 * depth, depth, 1, 1)
                norms[f"{name}.bn3"] = 4 * depth
            num_out = depth if basic else 4 * depth
            if num_in != num_out:
                shapes[f"{name}.downsample.0.weight"] = (num_out, num_in, 1, 1)
                norms[f"{name}.downsample.1"] = num_out
            num_in = num_out
    tensors = {n: np.zeros(s, np.float32) for n, s in shapes.items()}
    for name, depth in norms.items():
        for leaf in ("weight", "bias", "running_mean", "running_var"):
            tensors[f"{name}.{leaf}"] = np.ones(depth, np.float32)
        tensors[f"{name}.num_batches_tracked"] = np.array(7)
    return tensors


SMALL = resnet((1, 1, 1, 1), 64)


def without(tensors, *parts):
    return {n: a for n, a in tensors.items() if not any(p in n for p in parts)}


def read(tensors, prefix=""):
    foreign = foreign_from_torchvision(tensors, Path("net.pth"), prefix=prefix)
    accounted = [*foreign.taken, *foreign.left_out, *foreign.beside, *foreign.unknown]
    assert sorted(accounted) == sorted(tensors)
    return foreign


def below(prefix, tensors):
    return {prefix + n: a for n, a in tensors.items()}


@pytest.mark.parametrize("arrangement", ["alone", "canvas"])
@pytest.mark.parametrize("output_stride", [8, 16, 32])
def test_outputs_loss_and_gradients_are_torchvisions_own(converted, output_stride, arrangement):
    found = compare(converted, output_stride, arrangement)
    assert {"block1", "block4", "logits", "loss", "grad/conv1", "grad/head"} <= set(found)
    assert np.max(list(found.values())) < 1e-9


@pytest.fixture(scope="module")
def basic():
    path = GOLDEN / "timm_basic_resnet.pth"
    return as_converted(foreign_from_torchvision(read_torch_file(path).tensors, path))


@pytest.mark.parametrize("arrangement", ["alone", "canvas"])
@pytest.mark.parametrize("output_stride", [8, 16, 32])
def test_basic_units_are_timms_own(basic, output_stride, arrangement):
    assert basic.config.basic_units
    found = compare(basic, output_stride, arrangement, name="timm_basic")
    assert {"block1", "block4", "logits", "loss", "grad/conv1", "grad/head"} <= set(found)
    assert np.max(list(found.values())) < 1e-9


@pytest.mark.parametrize(
    "rule",
    [{"dilation_rule": "new"}, {"pool_padding": "same"}, {"stride_position": "last_3x3"}],
    ids=lambda rule: next(iter(rule)),
)
def test_another_rule_for_basic_units_is_seen(basic, rule):
    config = dataclasses.replace(basic.config, **rule)
    changed = dataclasses.replace(basic, config=config)
    assert compare(changed, 8, name="timm_basic")["logits"] > SEEN


def test_values_that_are_no_numbers_are_never_within_a_bound():
    live = {f"{i}/logits": np.arange(3.0) for i in range(3)}
    ours = {**live, "1/logits": np.array([0.0, np.nan, 2.0])}
    assert not differences(ours, live)["logits"] <= 1e-9
    assert differences(live, live)["logits"] == 0


@pytest.mark.parametrize(
    "rule",
    [{"dilation_rule": "new"}, {"pool_padding": "same"}, {"stride_position": "last_3x3"}],
    ids=lambda rule: next(iter(rule)),
)
def test_a_rule_of_tf_slim_in_place_of_torchvisions_is_seen(converted, rule):
    config = dataclasses.replace(converted.config, **rule)
    assert compare(dataclasses.replace(converted, config=config), 8)["logits"] > SEEN


def test_flipped_channels_and_a_shifted_head_are_seen(converted):
    pixels = dataclasses.replace(converted.pixels, channel_order="BGR")
    assert compare(dataclasses.replace(converted, pixels=pixels), 8)["logits"] > SEEN
    assert compare(converted, 8, upsampling=one_pixel_off)["logits"] > SEEN


def test_two_swapped_norms_are_seen(converted):
    unit = "body.units.block4_unit2"
    swapped = dict(converted.tensors)
    for leaf in ("gamma", "beta", "moving_mean", "moving_variance"):
        a, b = f"{unit}.conv1.{leaf}", f"{unit}.conv2.{leaf}"
        swapped[a], swapped[b] = swapped[b], swapped[a]
    assert compare(dataclasses.replace(converted, tensors=swapped), 32)["logits"] > SEEN


def test_every_tensor_is_accounted_for(tensors):
    foreign = foreign_from_torchvision(tensors, STATE_DICT)
    assert set(foreign.taken) | set(foreign.left_out) == set(tensors)
    assert not set(foreign.taken) & set(foreign.left_out)
    assert foreign.unknown == ()
    own = build_model(foreign.config, 2).state_dict()
    assert set(foreign.tensors) == {n for n in own if n.startswith("body.")}
    assert all(foreign.tensors[n].shape == own[n].shape for n in foreign.tensors)
    assert set(foreign.left_out.values()) == {
        "classifier of whole images",
        "a counter of training steps",
    }
    assert foreign.pixels.mean == (0.485, 0.456, 0.406)
    assert foreign.pixels.max_value == 1.0


@pytest.mark.parametrize("depth", [50, 101, 152])
def test_the_depth_is_found(depth):
    foreign = read(resnet(UNITS[depth], base=64 if depth == 50 else 4))
    assert (foreign.config.units or UNITS[foreign.config.depth]) == UNITS[depth]
    assert foreign.config.depth == depth
    assert foreign.unknown == ()
    expected = "ResNet-50" if depth == 50 else f"ResNet of {list(UNITS[depth])} bottlenecks, 4"
    assert expected in foreign.source


@pytest.mark.parametrize("depth", [18, 34])
def test_nets_of_basic_units_are_found(depth):
    foreign = read(resnet(UNITS[depth], basic=True))
    assert (foreign.config.depth, foreign.config.units) == (depth, ())
    assert f"ResNet-{depth}" in foreign.source
    assert (foreign.unknown, foreign.beside) == ((), ())
    own = build_model(foreign.config, 2).state_dict()
    assert {n: t.shape for n, t in foreign.tensors.items()} == {
        n: t.shape for n, t in own.items() if n.startswith("body.")
    }
    narrow = read(resnet((1, 2, 1, 1), 4, basic=True))
    assert (narrow.config.units, narrow.config.basic_units) == ((1, 2, 1, 1), True)


def test_a_narrow_net_of_another_depth_is_taken():
    foreign = read(resnet((1, 2, 1, 3), base=4))
    assert foreign.config.units == (1, 2, 1, 3)
    assert foreign.config.base_depth == 4


@pytest.mark.parametrize(
    "prefix", ["module.", "backbone.", "encoder.", "_orig_mod.", "module.model."]
)
def test_a_prefix_of_all_names_is_ignored(prefix):
    foreign = read({prefix + n: a for n, a in resnet((1, 1, 1, 1), 4).items()})
    assert foreign.unknown == ()
    assert foreign.taken[f"{prefix}conv1.weight"] == "body.conv1.weights"
    assert f"{prefix}fc.weight" in foreign.left_out


def test_a_prefix_of_some_names_only_is_not_ignored():
    tensors = resnet((1, 1, 1, 1), 4)
    mixed = {n if n.startswith("layer") else f"stem_of.{n}": a for n, a in tensors.items()}
    with pytest.raises(WeightsError, match=r"no conv1.weight or no layer1.0"):
        read(mixed)


@pytest.mark.parametrize(
    ("prefix", "outside"),
    [
        ("backbone.", "head.mlp.0.weight"),
        ("module.encoder.", "module.queue"),
        ("model.", "criterion.weight"),
        ("state_dict.module.", "optimizer.momentum"),
        ("", "decoder.layer1.0.weight"),
    ],
)
def test_a_net_below_a_prefix_is_found_and_what_is_outside_is_named(prefix, outside):
    foreign = read(below(prefix, SMALL) | {outside: np.zeros((2, 2), np.float32)})
    assert foreign.taken[f"{prefix}conv1.weight"] == "body.conv1.weights"
    assert foreign.unknown == ()
    if prefix:
        assert foreign.left_out[outside] == f"outside the net, whose names begin with {prefix}"
    else:
        assert foreign.beside == (outside,)


def test_of_several_nets_one_is_chosen_by_its_prefix_never_by_guessing():
    two = below("module.encoder_q.", SMALL) | below("module.encoder_k.", SMALL)
    first = "module.encoder_q.conv1.weight"
    two[first] = two[first] + 1
    with pytest.raises(WeightsError, match=r"2 ResNets.* module\.encoder_k\., module\.encoder_q\."):
        read(two)
    for asked in ("module.encoder_q.", "module.encoder_q"):
        foreign = read(two, asked)
        assert np.array_equal(foreign.tensors["body.conv1.weights"], two[first])
        reason = foreign.left_out["module.encoder_k.conv1.weight"]
        assert reason == "another net; --prefix module.encoder_k. takes them"
    with pytest.raises(WeightsError, match="several ResNets below 'module'"):
        read(two, "module")
    with pytest.raises(WeightsError, match=r"no ResNet below 'encoder'.*module\.encoder_k"):
        read(two, "encoder")
    nested = SMALL | below("backbone.", SMALL)
    with pytest.raises(WeightsError, match=r"2 ResNets.* \., backbone\."):
        read(nested)
    assert read(nested, ".").taken["conv1.weight"] == "body.conv1.weights"
    assert read(nested, "backbone").taken["backbone.conv1.weight"] == "body.conv1.weights"


def test_averaged_weights_are_said_to_be_averaged():
    averaged = below("model_ema.module.", SMALL)
    foreign = read({"model_ema.n_averaged": np.array(4), **averaged})
    assert "averaged over steps" in foreign.source
    assert foreign.left_out["model_ema.n_averaged"] == "a counter of averaged steps"
    assert foreign.unknown == ()
    assert "averaged" in read(below("state_dict_ema.", SMALL)).source
    assert "averaged" in read({"n_averaged": np.array(4), **below("module.", SMALL)}).source
    assert "averaged" not in read(below("module.", SMALL)).source
    assert "averaged" not in read(SMALL).source


@pytest.mark.parametrize(
    ("plain", "averaged"),
    [("state_dict.", "state_dict_ema."), ("model.", "model_ema.module."), ("", "ema.")],
)
def test_beside_plain_weights_averaged_ones_are_named_and_can_be_chosen(plain, averaged):
    first = f"{averaged}conv1.weight"
    tensors = below(plain, SMALL) | below(averaged, SMALL) | {first: SMALL["conv1.weight"] + 1}
    foreign = read(tensors)
    assert np.array_equal(foreign.tensors["body.conv1.weights"], SMALL["conv1.weight"])
    assert "averaged" not in foreign.source
    assert foreign.left_out[first] == f"weights averaged over steps; --prefix {averaged} takes them"
    foreign = read(tensors, averaged.partition(".")[0])
    assert np.array_equal(foreign.tensors["body.conv1.weights"], tensors[first])
    assert "averaged over steps" in foreign.source


def test_the_body_of_a_segmentation_net_is_taken_and_its_head_named():
    head = {"classifier.0.weight": (2, 64, 3, 3), "aux_classifier.4.bias": (2,)}
    heads = {n: np.zeros(s, np.float32) for n, s in head.items()}
    foreign = read(below("backbone.", without(SMALL, "fc.")) | heads)
    assert "the body of a segmentation net" in foreign.source
    assert {foreign.left_out[n] for n in heads} == {"head of a segmentation net"}
    assert foreign.unknown == ()
    assert foreign.taken["backbone.conv1.weight"] == "body.conv1.weights"
    assert foreign.config.output_stride == 8
    assert any("output stride 8" in note for note in foreign.notes)
    linear = {"classifier.weight": np.zeros((5, 64), np.float32)}
    foreign = read(below("backbone.", without(SMALL, "fc.")) | linear)
    assert "segmentation" not in foreign.source
    assert foreign.config.output_stride == 16


def test_names_that_nothing_is_known_of_are_listed():
    tensors = resnet((1, 1, 1, 1), 4)
    extra = {"conv1.bias": np.zeros(4), "rpn.weight": np.zeros(1), "fc.0.weight": np.zeros(1)}
    foreign = read(tensors | extra)
    assert foreign.unknown == ("conv1.bias",)
    assert set(foreign.beside) == {"rpn.weight", "fc.0.weight"}


def test_counts_and_single_numbers_are_left_out_unless_they_are_in_the_body():
    counts = {"total_ops": np.zeros(1), "layer1.0.conv1.total_params": np.zeros(1)}
    numbers = {"temperature": np.float32(1), "layer1.0.alpha": np.float32(1)}
    foreign = read(SMALL | counts | numbers)
    assert {foreign.left_out[n] for n in counts} == {"a profiler's counts"}
    assert foreign.left_out["temperature"] == "a single number beside the net"
    assert foreign.unknown == ("layer1.0.alpha",)
    assert foreign.beside == ()


def zeros(**shapes):
    return {n.replace("__", "."): np.zeros(s, np.float32) for n, s in shapes.items()}


@pytest.mark.parametrize(
    ("tensors", "what"),
    [
        (
            without(SMALL, "conv3", "bn3") | zeros(layer1__0__conv1__weight=(64, 64, 3, 3)),
            "layer2.0 has neither the convolutions",
        ),
        (without(SMALL, "layer2.0.conv3"), "layer2.0 has neither the convolutions 1x1, 3x3, 1x1"),
        (
            without(SMALL, "1.0.conv3", "1.0.bn3") | zeros(layer1__0__conv1__weight=(64, 64, 3, 3)),
            "some of its units begin with a 3x3",
        ),
        (SMALL | zeros(layer1__0__conv2__weight=(128, 4, 3, 3)), "32 groups"),
        (SMALL | zeros(layer1__0__conv2__weight=(128, 128, 3, 3)), "128 channels, not 64 .a wide"),
        (SMALL | zeros(conv1__0__weight=(32, 3, 3, 3)), "several 3x3 convolutions"),
        (SMALL | zeros(layer2__0__downsample__2__weight=(4,)), "pooling in its shortcuts"),
        (SMALL | zeros(layer1__0__se__conv__weight=(1, 1, 3)), "channel attention"),
        (SMALL | zeros(layer2__0__conv3__0__filt=(64, 1, 3, 3)), "anti-aliased"),
        (SMALL | zeros(maxpool__0__weight=(64, 64, 3, 3)), "in place of the pooling"),
        (SMALL | zeros(layer1__0__convs__0__weight=(16, 16, 3, 3)), "split convolutions"),
        (zeros(stem__conv__weight=(64, 3, 7, 7), head__fc__weight=(1,)), "ResNet v2"),
        (without(SMALL, "running_"), "not a batch norm"),
        (SMALL | zeros(conv1__weight=(64, 3, 3, 3)), "not 7x7 over 3 channels"),
        (SMALL | zeros(conv1__weight=(64, 1, 7, 7)), "not 7x7 over 3 channels"),
        (without(SMALL, "layer4"), r"\[1, 1, 1, 0\] units"),
        (SMALL | zeros(layer3__4__conv1__weight=(1, 1, 1, 1)), "gaps"),
        (without(SMALL, "layer3.0.conv2."), "layer3.0 has no conv1 and conv2"),
        (zeros(features__weight=(4, 4), other__bias=(4,)), "but features.weight, other.bias"),
        ({}, "no conv1.weight"),
    ],
)
def test_another_net_is_refused_with_what_gave_it_away(tensors, what):
    with pytest.raises(WeightsError, match=what) as caught:
        read(tensors)
    assert "net.pth is a state dict of another net" in str(caught.value)
