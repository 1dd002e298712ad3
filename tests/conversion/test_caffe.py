"""Converted nets compute what Caffe's layers compute, by the independent `caffe_net.py`."""

import dataclasses
import hashlib
import shutil

import numpy as np
import pytest
import torch
from tests.conversion import caffe_net
from tests.parity.reference import Reference
from tests.parity.test_exact_canvases import mosaic

from anysize.config import PixelConvention
from anysize.conversion.asked import Asked
from anysize.conversion.caffe import MEAN_PIXEL, convert_layers, read_caffe
from anysize.conversion.caffemodel import read_caffemodel
from anysize.conversion.convert import convert
from anysize.conversion.foreign import model_config
from anysize.data.loader import normalise
from anysize.errors import WeightsError
from anysize.geometry import Size, coarse_rect, single
from anysize.models.build import build_model

NUM_CLASSES = 3
# All 16 classes of (H mod 4, W mod 4), and the smallest that Caffe's pooling leaves something of.
SIZES = [Size(37 + i, 46 + j) for i in range(4) for j in range(4)] + [Size(3, 61)]
PIXELS = PixelConvention(channel_order="BGR", mean=MEAN_PIXEL)


def save(tmp_path, layers, layout="new", name="net.caffemodel"):
    path = tmp_path / name
    path.write_bytes(caffe_net.encode_net(layers, layout))
    return path


def draw_images(sizes=SIZES, seed=5):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (*s, 3), np.uint8) for s in sizes]


def as_caffe_takes_it(image, *, flip=True, mean=MEAN_PIXEL):
    """uint8 RGB `[h, w, 3]` to float64 `[3, h, w]`, B, G, R, less the mean."""
    planes = image.astype(np.float64).transpose(2, 0, 1)
    return (planes[::-1] if flip else planes) - np.array(mean)[:, None, None]


def read_exactly(path, output_stride=32, **changes):
    """The converted net in float64, with the tensors that the folding gives before rounding."""
    foreign = read_caffe(path)
    tensors, _, _ = convert_layers(read_caffemodel(path)[1], str(path))
    for name, tensor in foreign.tensors.items():
        assert np.array_equal(tensor, tensors[name].astype(np.float32))
    config = dataclasses.replace(foreign.config, output_stride=output_stride, **changes)
    return config, {n: torch.from_numpy(t.astype(np.float64)) for n, t in tensors.items()}


def build(config, tensors, dtype=torch.float64):
    model = build_model(config, tensors["head.weights"].shape[1])
    assert set(model.state_dict()) == set(tensors)
    model = model.to(dtype).eval()
    model.load_state_dict({n: t.to(dtype) for n, t in tensors.items()})
    return model


def alone(model, pixels, size):
    """Logits of one image, on the smallest canvas that holds it."""
    return on_canvas(model, [pixels], [size], single(size, model.geometry))[0]


def on_canvas(model, pixels, sizes, layout):
    dtype = next(model.parameters()).dtype
    x = torch.zeros(layout.canvas.slots, 3, *layout.canvas[1:], dtype=dtype)
    for p, image in zip(layout.placements, pixels, strict=True):
        x[p.slot, :, p.top : p.top + p.height, p.left : p.left + p.width] = torch.as_tensor(
            np.ascontiguousarray(image)
        )
    out = model(x, layout)
    results = []
    for p in layout.placements:
        r = coarse_rect(p, model.geometry)
        rows = slice(2 * r.top, 2 * (r.top + r.height))
        results.append(out[r.slot, :, rows, 2 * r.left : 2 * (r.left + r.width)])
    return results


def largest_difference(ours, theirs):
    scale = max(np.abs(t).max() for t in theirs)
    assert all(tuple(o.shape) == t.shape for o, t in zip(ours, theirs, strict=True))
    return max(
        np.abs(o.detach().numpy() - t).max() / scale for o, t in zip(ours, theirs, strict=True)
    )


def compare(path, layers, *, output_stride=32, dtype=torch.float64, change=None, sizes=SIZES, **r):
    """Largest difference of the converted net's logits from those of the layers, of their range."""
    config, tensors = read_exactly(path, output_stride, **r.pop("config", {}))
    if change:
        change(tensors)
    model = build(config, tensors, dtype)
    flip = r.pop("flip", True)
    images = draw_images(sizes)
    with torch.no_grad():
        ours = [
            alone(model, as_caffe_takes_it(i, flip=flip), s)
            for i, s in zip(images, sizes, strict=True)
        ]
    theirs = [caffe_net.logits(layers, as_caffe_takes_it(i), **r) for i in images]
    return largest_difference(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("output_stride", [32, 16, 8])
def test_logits_of_every_class_of_size_are_those_of_caffe(tmp_path, output_stride, dtype):
    layers = caffe_net.resnet(output_stride=output_stride)
    path = save(tmp_path, layers)
    bound = 1e-9 if dtype == torch.float64 else 1e-4
    assert compare(path, layers, output_stride=output_stride, dtype=dtype) < bound


@pytest.mark.parametrize("output_stride", [16, 8])
def test_a_net_saved_at_stride_32_runs_dilated_as_caffe_would(tmp_path, output_stride):
    path = save(tmp_path, caffe_net.resnet())
    dilated = caffe_net.resnet(output_stride=output_stride)
    assert compare(path, dilated, output_stride=output_stride) < 1e-9


@pytest.mark.parametrize("output_stride", [32, 16, 8])
def test_on_a_canvas_with_neighbours_nothing_changes(tmp_path, output_stride):
    layers = caffe_net.resnet(output_stride=output_stride)
    model = build(*read_exactly(save(tmp_path, layers), output_stride))
    pixels = [as_caffe_takes_it(i) for i in draw_images()]
    layout = mosaic(SIZES, model.geometry, model.geometry.gutter_cells)
    with torch.no_grad():
        ours = on_canvas(model, pixels, SIZES, layout)
        close = mosaic(SIZES, model.geometry, model.geometry.gutter_cells - 1)
        too_close = on_canvas(model, pixels, SIZES, close)
    theirs = [caffe_net.logits(layers, p) for p in pixels]
    assert largest_difference(ours, theirs) < 1e-9
    assert largest_difference(too_close, theirs) > 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {"conv1_bias": False},
        {"eps": 1e-3},
        {"eps": 2e-7},
        {"stride_in": "2b"},
        {"stride_in": "2b", "output_stride": 16, "dilate_first": False},
        {"output_stride": 8, "dilate_first": False},
        {"merged": True},
        {"units": (1, 2, 3, 2), "numbered": (True, False, False, True), "base_depth": 3},
    ],
    ids=str,
)
def test_variants_of_the_net_are_taken_exactly(tmp_path, options):
    layers = caffe_net.resnet(**options)
    stride = options.get("output_stride", 32)
    path = save(tmp_path, layers)
    assert compare(path, layers, output_stride=stride, sizes=SIZES[:6]) < 1e-9
    foreign = read_caffe(path)
    assert foreign.config.pool_padding == "caffe"
    first = "first_3x3" if options.get("stride_in") == "2b" else "first_1x1"
    assert foreign.config.stride_position == first
    rule = "new" if options.get("dilate_first", True) else "previous"
    assert foreign.config.dilation_rule == rule


def test_what_the_file_states_cannot_be_given_otherwise(tmp_path):
    path = save(tmp_path, caffe_net.resnet(output_stride=16))
    assert read_caffe(path).stated == {
        "pool_padding", "stride_position", "dilation_rule", "output_stride"
    }  # fmt: skip
    file, _ = convert(path, Asked(head="none", stride_position="first_1x1"))
    assert file.config.stride_position == "first_1x1"
    with pytest.raises(WeightsError, match=r"--stride-position is first_3x3, but .* says first_1"):
        convert(path, Asked(head="none", stride_position="first_3x3"))
    path = save(tmp_path, caffe_net.resnet())
    assert "dilation_rule" not in read_caffe(path).stated
    file, foreign = convert(path, Asked(head="none", dilation_rule="previous"))
    assert file.config.dilation_rule == "previous"
    assert "--channel-order BGR" in foreign.notes[0]


def test_a_v1_file_with_merged_norms_is_taken_exactly(tmp_path):
    layers = caffe_net.resnet(merged=True)
    path = save(tmp_path, layers, "V1")
    assert compare(path, layers, sizes=SIZES[:6]) < 1e-9
    assert "V1 layers" in read_caffe(path).source


def scaled(leaf, factor):
    def change(tensors):
        for name in tensors:
            if name.endswith(leaf):
                tensors[name] = tensors[name] * factor

    return change


def without_conv1_bias(tensors):
    bias = caffe_net.resnet()[0].blobs[1]
    tensors["body.conv1.moving_mean"] += torch.from_numpy(bias.astype(np.float64))


def with_head_swapped(tensors):
    w = tensors["head.weights"]
    tensors["head.weights"] = w.reshape(w.shape[1], w.shape[0], 3, 3).transpose(0, 1).contiguous()


@pytest.mark.parametrize(
    "control",
    [
        {"flip": False},
        {"change": scaled("moving_mean", 700.0)},
        {"change": scaled("moving_variance", 700.0)},
        {"change": without_conv1_bias},
        {"change": with_head_swapped},
        {"round_down": True, "sizes": [Size(40, 49)]},
        {"config": {"stride_position": "first_3x3"}},
        {"config": {"pool_padding": "same"}, "sizes": [Size(40, 45)]},
    ],
    ids=lambda c: "-".join(f"{k}" for k in c),
)
def test_control_each_rule_left_out_is_seen(tmp_path, control):
    layers = caffe_net.resnet()
    path = save(tmp_path, layers)
    if "round_down" in control or "pool_padding" in control.get("config", {}):
        with pytest.raises(AssertionError):
            assert compare(path, layers, **control) < 1e-4
    else:
        assert compare(path, layers, **control) > 1e-4


def test_control_the_dilation_rule_of_torchvision_is_seen(tmp_path):
    path = save(tmp_path, caffe_net.resnet())
    dilated = caffe_net.resnet(output_stride=8)
    previous = {"dilation_rule": "previous"}
    assert compare(path, dilated, output_stride=8, config=previous) > 1e-4


@pytest.mark.parametrize("output_stride", [32, 8])
def test_gradients_are_those_of_an_independent_net_and_of_differences(tmp_path, output_stride):
    layers = caffe_net.resnet(output_stride=output_stride)
    config, tensors = read_exactly(save(tmp_path, layers), output_stride)
    size, image = Size(39, 45), draw_images([Size(39, 45)])[0]
    pixels = as_caffe_takes_it(image)
    direction = np.random.default_rng(1).normal(size=caffe_net.logits(layers, pixels).shape)

    model = build(config, tensors)
    (alone(model, pixels, size) * torch.from_numpy(direction)).sum().backward()
    ours = {n: p.grad for n, p in model.named_parameters()}

    params = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    net = Reference(params, config.units, output_stride, system="caffe")
    (reference,) = net.logits([torch.from_numpy(pixels.copy())[None]])
    theirs = caffe_net.logits(layers, pixels)
    assert largest_difference([reference[0]], [theirs]) < 1e-9
    (reference[0] * torch.from_numpy(direction)).sum().backward()
    for name, gradient in ours.items():
        expected = params[name].grad
        assert (gradient - expected).abs().max() < 1e-9 * expected.abs().max() + 1e-12, name

    first, last = layers[0], next(la for la in layers if la.name == "res5a_branch2c")
    for layer, name in ((first, "body.conv1"), (last, "body.units.block4_unit1.conv3")):
        gradient = ours[name + ".weights"].numpy()
        for index in np.random.default_rng(2).integers(0, gradient.size, 5):
            where = np.unravel_index(index, gradient.shape)
            slope = central_difference(layers, layer, where, pixels, direction)
            assert slope == pytest.approx(gradient[where], rel=1e-5, abs=1e-6)


def central_difference(layers, layer, where, pixels, direction):
    kept, sums = layer.blobs[0], []
    for step in (1e-6, -1e-6):
        moved = kept.astype(np.float64)
        moved[where] += step
        layer.blobs[0] = moved
        sums.append((caffe_net.logits(layers, pixels) * direction).sum())
    layer.blobs[0] = kept
    return (sums[0] - sums[1]) / 2e-6


def test_the_pixel_convention_is_bgr_less_the_mean_pixel(tmp_path):
    foreign = read_caffe(save(tmp_path, caffe_net.resnet()))
    assert foreign.pixels == PIXELS
    image = draw_images([Size(4, 5)])[0]
    ours = normalise(image, foreign.pixels).transpose(2, 0, 1)
    assert np.allclose(ours, as_caffe_takes_it(image), atol=1e-4)


def test_a_mean_image_gives_its_mean_pixel(tmp_path):
    image = np.random.default_rng(0).uniform(90, 130, (3, 8, 9)).astype(np.float32)
    mean = tmp_path / "mean.binaryproto"
    for shaped, layout in ((image, "V1"), (image[None], "new"), (image, "new")):
        mean.write_bytes(caffe_net.encode_blob(shaped, layout))
        foreign = read_caffe(save(tmp_path, caffe_net.resnet()), mean=mean)
        assert foreign.pixels.mean == pytest.approx(image.mean((1, 2), np.float64), rel=1e-12)
    for wrong in (image[:2], image - 100, image * np.float32(np.nan), image[:, :0]):
        mean.write_bytes(caffe_net.encode_blob(wrong))
        with pytest.raises(WeightsError, match="mean image"):
            read_caffe(tmp_path / "net.caffemodel", mean=mean)
    mean.write_bytes(b"not protobuf")
    with pytest.raises(WeightsError, match=r"mean\.binaryproto is damaged"):
        read_caffe(tmp_path / "net.caffemodel", mean=mean)
    with pytest.raises(WeightsError, match=r"absent\.binaryproto cannot be read"):
        read_caffe(tmp_path / "net.caffemodel", mean=tmp_path / "absent.binaryproto")


@pytest.mark.parametrize("depth", [50, 101, 152])
def test_depth_is_found_from_the_names(tmp_path, depth):
    units, numbered = caffe_net.KAIMING[depth]
    layers = caffe_net.resnet(units, 1, numbered=numbered, conv1_bias=depth == 50, num_classes=1)
    foreign = read_caffe(save(tmp_path, layers))
    rules = model_config(
        units, 1, pool_padding="caffe", stride_position="first_1x1", dilation_rule="new"
    )
    assert foreign.config == dataclasses.replace(rules, output_stride=32)
    assert foreign.config.depth == depth
    assert foreign.source == f"Caffe ResNet-{depth} of base depth 1 (new layers)"
    assert foreign.unknown == ()


def test_every_blob_is_accounted_for_once(tmp_path):
    layers = caffe_net.resnet()
    fc = [np.zeros((1000, 128), np.float32), np.zeros(1000, np.float32)]
    score = [np.zeros((5, 64, 1, 1), np.float32)]
    wide = [np.zeros((5, 128, 3, 3), np.float32), np.zeros(5, np.float32)]
    bilinear = [np.zeros((3, 1, 16, 16), np.float32)]
    layers += [
        caffe_net.L("fc1000", "InnerProduct", ["pool5"], ["fc1000"], fc),
        caffe_net.L("score4", "Convolution", ["res4a"], ["score4"], score, kernel=1),
        caffe_net.L("fc1", "Convolution", ["res5a"], ["fc1"], wide, kernel=3, pad=1),
        caffe_net.L(
            "up16", "Deconvolution", ["up"], ["up16"], bilinear, kernel=16, stride=8, group=3
        ),
        caffe_net.L("odd", "PReLU", ["up"], ["odd"], [np.zeros(3, np.float32)]),
    ]
    foreign = read_caffe(save(tmp_path, layers))
    names = [f"{la.name}[{i}]" for la in layers for i in range(len(la.blobs))]
    accounts = [*foreign.taken, *foreign.left_out, *foreign.beside, *foreign.unknown]
    assert sorted(accounts) == sorted(names)
    assert (foreign.beside, foreign.unknown) == (("odd[0]",), ())
    assert "whole image" in foreign.left_out["fc1000[1]"]
    assert "1x1" in foreign.left_out["score4[0]"]
    assert "on the body's output" in foreign.left_out["fc1[0]"]
    assert "16x16 upsampling, each class alone" in foreign.left_out["up16[0]"]
    assert foreign.taken["bn2a_branch2b[2]"].split(" ") == [
        "body.units.block1_unit1.conv2.moving_mean",
        "body.units.block1_unit1.conv2.moving_variance",
    ]
    assert {t for o in foreign.taken.values() for t in o.split(" ")} == set(foreign.tensors)


def head_of(layers, **changes):
    layers[-1] = dataclasses.replace(layers[-1], **changes)
    return layers


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pad": 1}, "kernel 3x3, stride 2, pad 1"),
        ({"stride": 1}, "stride 1"),
        ({"dilation": 2}, "not our head"),
        ({"bottoms": ["res4a"]}, "it takes res4a, not res5a"),
        ({"blobs": [np.zeros((64, 3, 3, 3), np.float32)]}, "it takes 64 channels"),
        ({"blobs": [np.zeros((128, 3, 4, 4), np.float32)], "kernel": 4}, "kernel 4x4"),
        ({"kernel": 0}, "not stated"),
        ({"blobs": [np.zeros((128, 0, 3, 3), np.float32)]}, "no outputs"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_another_head_is_left_out_with_its_reason(tmp_path, changes, reason):
    path = save(tmp_path, head_of(caffe_net.resnet(), **changes))
    foreign = read_caffe(path)
    assert reason in foreign.left_out["up[0]"]
    assert "head.weights" not in foreign.tensors
    with pytest.raises(WeightsError, match="'up' is not a head"):
        read_caffe(path, head="up")


def test_a_head_that_is_cropped_elsewhere_is_left_out(tmp_path):
    layers = caffe_net.resnet()
    crop = caffe_net.L("crop", "Crop", ["up", "data"], ["c"], offset=(1,))
    path = save(tmp_path, [*layers, crop])
    assert "crops it at (1,)" in read_caffe(path).left_out["up[0]"]
    crop = dataclasses.replace(crop, offset=(0,))
    assert "head.weights" in read_caffe(save(tmp_path, [*layers, crop])).tensors


def test_a_head_behind_a_split_and_without_bias_is_taken(tmp_path):
    layers = caffe_net.resnet()
    split = caffe_net.L("s", "Split", ["res5a"], ["res5a_split_0", "res5a_split_1"])
    head = dataclasses.replace(layers[-1], bottoms=["res5a_split_1"], blobs=layers[-1].blobs[:1])
    foreign = read_caffe(save(tmp_path, [*layers[:-1], split, head]))
    assert np.array_equal(foreign.tensors["head.weights"], head.blobs[0])
    assert not foreign.tensors["head.biases"].any()


def test_of_several_heads_one_is_taken_by_name(tmp_path):
    layers = caffe_net.resnet()
    other = dataclasses.replace(layers[-1], name="up2", tops=["up2"])
    path = save(tmp_path, [*layers, other])
    assert "name it with --head" in read_caffe(path).left_out["up[0]"]
    foreign = read_caffe(path, head="up2")
    assert "up2[0]" in foreign.taken
    assert foreign.left_out["up[0]"] == "another head than up2"
    with pytest.raises(WeightsError, match=r"no such Deconvolution.*up, up2"):
        read_caffe(path, head="up3")


def of(layers, name):
    return next(la for la in layers if la.name == name)


def without(layers, *names):
    return [la for la in layers if la.name not in names]


def changed(name, **changes):
    def edit(layers):
        return [dataclasses.replace(la, **changes) if la.name == name else la for la in layers]

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda la: without(la, "bn2a_branch2b"), "lacks bn2a_branch2b"),
        (lambda la: without(la, "scale_conv1"), "lacks scale_conv1"),
        (lambda la: without(la, "res4b1_branch2b"), "branch2b of unit 2 of res4"),
        (lambda la: without(la, "res2a_branch1"), "branch1 of unit 1 of res2"),
        (lambda la: [x for x in la if not x.name.startswith("res5")], "branch2c of unit 1 of res5"),
        (lambda la: [x for x in la if "branch2c" not in x.name], "basic units"),
        (lambda la: [*la, of(la, "conv1")], "two layers of the name 'conv1'"),
        (
            lambda la: [*la, dataclasses.replace(of(la, "res4b1_branch2a"), name="res4b_branch2a")],
            "names one convolution twice",
        ),
        (changed("res3a_branch2b", group=2), "no ResNeXt"),
        (changed("res3a_branch2b", stride=2), "strides"),
        (changed("res3a_branch1", stride=1), "strides"),
        (changed("res2b_branch2a", stride=2), "strides"),
        (changed("conv1", stride=1), "conv1 must have a stride of 2"),
        (changed("conv1", pad=2), "padding"),
        (changed("conv1", kernel=5), r"has kernel \(5, 5\)"),
        (changed("res4b1_branch2b", dilation=2, pad=2), "has dilation 2"),
        (changed("pool1", kernel=2), "pool1 is"),
        (changed("bn2a_branch1", blobs=[np.ones(16, np.float32)] * 5), "has 5 blobs"),
        (
            changed(
                "bn2a_branch1",
                blobs=[np.ones(16, np.float32), -np.ones(16, np.float32), np.ones(1, np.float32)],
            ),
            "negative",
        ),
        (changed("scale2a_branch1", blobs=[np.ones(15, np.float32)]), "where 16 values belong"),
        (changed("conv1", blobs=[np.ones((0, 3, 7, 7), np.float32)]), "another shape"),
        (changed("res2a_branch2b", blobs=[np.ones((4, 4, 5, 5), np.float32)]), "another shape"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_net_that_ours_cannot_be_is_refused_by_name(tmp_path, edit, message):
    path = save(tmp_path, edit(caffe_net.resnet()))
    with pytest.raises(WeightsError, match=message) as caught:
        read_caffe(path)
    assert str(path) in str(caught.value)


def test_strides_that_do_not_fall_backwards_are_refused(tmp_path):
    layers = caffe_net.resnet(output_stride=16)
    names = ("res5a_branch1", "res5a_branch2a")
    layers = [dataclasses.replace(la, stride=2) if la.name in names else la for la in layers]
    names = ("res3a_branch1", "res3a_branch2a")
    layers = [dataclasses.replace(la, stride=1) if la.name in names else la for la in layers]
    with pytest.raises(WeightsError, match=r"strides \[1, 1, 2, 2\]"):
        read_caffe(save(tmp_path, layers))


def test_merged_norms_without_bias_are_refused(tmp_path):
    layers = [dataclasses.replace(la, blobs=la.blobs[:1]) for la in caffe_net.resnet(merged=True)]
    with pytest.raises(WeightsError, match="its norm is lost"):
        read_caffe(save(tmp_path, layers))


def test_a_factor_of_zero_gives_statistics_of_zero(tmp_path):
    layers = caffe_net.resnet()
    of(layers, "bn2a_branch2b").blobs[2] = np.zeros(1, np.float32)
    path = save(tmp_path, layers)
    assert compare(path, layers, sizes=SIZES[:2]) < 1e-9
    foreign = read_caffe(path)
    assert not foreign.tensors["body.units.block1_unit1.conv2.moving_variance"].any()


@pytest.mark.parametrize(
    ("first", "net"),
    [
        ("conv1_1", "VGG"),
        ("conv1/7x7_s2", "GoogLeNet"),
        ("conv_stage0_block0_branch2a", "a ResNet of other names"),
        ("elsewhere", "another net"),
    ],
)
def test_another_net_is_named(tmp_path, first, net):
    blobs = [np.zeros((4, 3, 3, 3), np.float32)]
    path = save(tmp_path, [caffe_net.L(first, "Convolution", ["data"], ["x"], blobs, kernel=3)])
    with pytest.raises(WeightsError, match=f"is {net}: .* begin with {first}"):
        read_caffe(path)


def test_the_golden_file_of_caffe_itself_gives_its_logits(golden, tmp_path):
    model, expected = golden / "caffe_narrow.caffemodel", np.load(golden / "caffe_narrow.npz")
    path = shutil.copy(model, tmp_path / "any.name")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == str(expected["sha256"])
    foreign = read_caffe(path)
    tensors = {n: torch.from_numpy(t.copy()) for n, t in foreign.tensors.items()}
    net = build(foreign.config, tensors, torch.float32)
    for stride in (32, 16, 8):
        config = dataclasses.replace(foreign.config, output_stride=stride)
        net = build(config, tensors, torch.float32)
        for key in (k for k in expected.files if k.startswith(f"logits_{stride}_")):
            size = Size(*map(int, key.split("_")[2].split("x")))
            pixels = as_caffe_takes_it(draw_images([size], seed=size.height)[0])
            with torch.no_grad():
                ours = alone(net, pixels.astype(np.float32), size)
            assert largest_difference([ours], [expected[key]]) < 1e-4


@pytest.fixture
def golden(request):
    return request.config.rootpath / "tests" / "golden"
