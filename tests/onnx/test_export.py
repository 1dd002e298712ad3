import dataclasses
import itertools
import json
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from anysize.config import ModelConfig, PixelConvention
from anysize.data.samples import Classes
from anysize.errors import ConfigError, WeightsError
from anysize.models.build import build_model
from anysize.models.ops import ConvNorm
from anysize.models.weights_file import Weights
from anysize.onnx import export as export_onnx
from anysize.onnx import file as onnx_file
from anysize.predict.tiles import NO_CLASS, predict_logits

CLASSES = Classes(
    names=("sea", "land", "lake"),
    colours=((10, 20, 30), (200, 0, 0), (0, 180, 90)),
    ignore_index=254,
)
TORCHVISION_PIXELS = PixelConvention(
    max_value=1.0, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
)
BGR = PixelConvention(channel_order="BGR", mean=(103.939, 116.779, 123.68))
TINY = [(1, 1), (1, 7), (2, 2), (3, 5), (4, 1)]
EVERY_CLASS = [(33 + i, 70 + j) for i, j in itertools.product(range(4), range(4))]


def random_weights(kind="multiclass", pixels=PixelConvention(), **settings):  # noqa: B008
    """A net in which every tensor, moving statistics too, is random, and no label is constant."""
    config = ModelConfig(**{"units": (1, 2, 2, 2), "base_depth": 4, **settings})
    generator = torch.Generator().manual_seed(7)
    model = build_model(config, 3, generator=generator)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, ConvNorm):
                module.gamma.uniform_(0.5, 1.5, generator=generator)
                module.beta.normal_(0, 0.3, generator=generator)
                module.moving_mean.normal_(0, 0.3, generator=generator)
                module.moving_variance.uniform_(0.5, 2, generator=generator)
        model.head.biases.normal_(0, 0.3, generator=generator)
    return Weights(model=model, config=config, classes=CLASSES, pixels=pixels, kind=kind)


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def described(weights, output="logits"):
    return onnx_file.OnnxDescription(
        output=output,
        classes=weights.classes,
        kind=weights.kind,
        geometry=weights.model.geometry,
        pixels=weights.pixels,
    )


def bare_session(weights, output="logits"):
    """onnxruntime as anybody would use it: nothing of ours between the file and its outputs."""
    data = export_onnx.build(weights.model, described(weights, output), "x.onnx")
    return onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])


def off(session, weights, sizes):
    """The largest difference from our own logits, as a share of their range."""
    worst, values = 0.0, []
    for height, width in sizes:
        ours = predict_logits(weights.model, noise(height, width), weights.pixels).numpy()
        (theirs,) = session.run(["logits"], {"image": noise(height, width)})
        assert theirs.shape == (3, height, width)
        assert theirs.dtype == np.float32
        worst = max(worst, float(np.abs(theirs - ours).max()))
        values += [ours.min(), ours.max()]
    return worst / np.ptp(values)


def possible(sizes, pool_padding):
    return [s for s in sizes if pool_padding != "caffe" or min(s) >= 3]


@pytest.mark.parametrize("output_stride", [8, 16, 32])
@pytest.mark.parametrize("pool_padding", ["same", "caffe", "torchvision"])
def test_logits_are_ours_at_every_class_of_sizes(pool_padding, output_stride):
    weights = random_weights(pool_padding=pool_padding, output_stride=output_stride)
    session = bare_session(weights)
    assert off(session, weights, possible(TINY + EVERY_CLASS, pool_padding)) < 1e-5


@pytest.mark.parametrize(
    "settings",
    [
        {"stride_position": "first_3x3", "dilation_rule": "previous"},
        {"stride_position": "first_3x3", "dilation_rule": "new"},
        {"stride_position": "first_1x1", "dilation_rule": "new"},
        {"stride_position": "first_1x1", "dilation_rule": "previous"},
        {"norm": "trained"},
        {"head_relu": True},
        {"units": (2, 1, 1, 1), "base_depth": 8},
        {"basic_units": True, "stride_position": "first_3x3", "dilation_rule": "previous"},
        {"basic_units": True},
    ],
)
def test_logits_are_ours_under_every_rule(settings):
    weights = random_weights(output_stride=8, **settings)
    weights.model.train(settings.get("norm") == "trained")
    assert off(bare_session(weights), weights, [(3, 5), (45, 62), (64, 39)]) < 1e-5


@pytest.mark.parametrize("pixels", [BGR, TORCHVISION_PIXELS])
def test_the_pixel_convention_is_in_the_graph(pixels):
    weights = random_weights(pixels=pixels)
    session = bare_session(weights)
    assert off(session, weights, [(5, 5), (45, 62)]) < 1e-5
    other = random_weights()
    assert off(session, other, [(45, 62)]) > 1e-2, "control: another convention must show"


def with_pooling_at(begin, end):
    def max_pool(graph, x, rule):
        pads = [begin, begin, end, end]
        attributes = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": pads}
        return graph.node("MaxPool", "pool1", [x], attributes)

    return max_pool


@pytest.mark.parametrize("begin", [0, 1])
def test_a_pooling_that_ignores_the_parity_is_seen_and_no_file_is_left(
    tmp_path, monkeypatch, begin
):
    """The control: the padding that is right for half of the sizes only."""
    monkeypatch.setattr(export_onnx, "_max_pool", with_pooling_at(begin, 2 - begin))
    weights = random_weights(output_stride=8)
    session = bare_session(weights)
    fitting = [s for s in EVERY_CLASS if {-(-e // 2) % 2 for e in s} == {begin}]
    others = [s for s in EVERY_CLASS if {-(-e // 2) % 2 for e in s} == {1 - begin}]
    assert len(fitting) == len(others) == 4
    assert off(session, weights, fitting) < 1e-5
    assert off(session, weights, others) > 1e-2
    (tmp_path / "old.onnx").write_bytes(b"old")
    for name in ("new.onnx", "old.onnx"):
        with pytest.raises(WeightsError, match=rf"{name} was not written: .* differs"):
            export_onnx.export(weights, tmp_path / name)
    with pytest.raises(WeightsError, match=r"not written: .*\([1-9]\d* of \d+ certain labels"):
        export_onnx.export(weights, tmp_path / "labels.onnx", output="labels")
    assert [p.name for p in tmp_path.iterdir()] == ["old.onnx"]
    assert (tmp_path / "old.onnx").read_bytes() == b"old"


def test_a_pooling_that_loses_a_cell_at_odd_extents_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(export_onnx, "_max_pool", with_pooling_at(0, 1))
    with pytest.raises(WeightsError, match=r"gives logits of shape \(3, \d+, \d+\) for an image"):
        export_onnx.export(random_weights(), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_the_tolerance_is_a_thousandth_of_the_range(tmp_path):
    """A head 0.2% off is refused, one 0.05% off is not."""
    weights = random_weights()
    for factor, differs in ((1.002, True), (1.0005, False)):
        other = random_weights()
        with torch.no_grad():
            other.model.head.weights.mul_(factor)
            other.model.head.biases.mul_(factor)
        data = export_onnx.build(other.model, described(other), "x.onnx")
        check = export_onnx.compare(onnx_file.load_onnx(data, "x.onnx"), weights)
        assert (check.difference > export_onnx.TOLERANCE) == differs


@pytest.mark.parametrize("pool_padding", ["same", "caffe"])
def test_the_check_meets_odd_even_and_tiny_sizes(tmp_path, pool_padding):
    weights = random_weights(pool_padding=pool_padding)
    check = export_onnx.export(weights, tmp_path / "m.onnx")
    assert len(check.sizes) >= 6
    for axis in (0, 1):
        assert {size[axis] % 4 for size in check.sizes} == {0, 1, 2, 3}
    assert min(check.sizes) == ((1, 1) if pool_padding == "same" else (3, 5))
    assert 0 < check.difference < 1e-5
    said = export_onnx.describe(check)
    assert said.startswith(f"largest difference {check.difference:.1e} of the range")


def test_labels_of_softmax():
    weights = random_weights()
    image = noise(45, 62)
    logits = predict_logits(weights.model, image, weights.pixels).numpy()
    session = bare_session(weights, "labels")
    assert [o.name for o in session.get_outputs()] == ["labels"]
    (labels,) = session.run(None, {"image": image})
    assert labels.dtype == np.uint8
    assert labels.shape == (45, 62)
    certain = np.diff(np.sort(logits, 0)[-2:], axis=0)[0] > 1e-4
    assert (labels == logits.argmax(0))[certain].all()
    assert certain.mean() > 0.99
    assert len(np.unique(labels)) > 1


def test_labels_of_sigmoid():
    weights = random_weights("multilabel")
    with torch.no_grad():
        image = noise(45, 62)
        raw = predict_logits(weights.model, image, weights.pixels)
        weights.model.head.biases.sub_(raw.flatten(1).max(0).values.max() - raw.std())
    logits = predict_logits(weights.model, image, weights.pixels).numpy()
    session = bare_session(weights, "labels")
    labels, present = session.run(["labels", "present"], {"image": image})
    assert labels.dtype == present.dtype == np.uint8
    assert present.shape == (3, 45, 62)
    assert (np.abs(logits) > 1e-4).all()
    assert (present == (logits >= 0)).all()
    none = (logits < 0).all(0)
    assert none.any()
    assert not none.all()
    assert (labels == np.where(none, NO_CLASS, logits.argmax(0))).all()


@pytest.mark.parametrize("kind", ["multiclass", "multilabel"])
def test_labels_are_compared_where_they_are_certain(tmp_path, kind):
    weights = random_weights(kind)
    check = export_onnx.export(weights, tmp_path / "m.onnx", output="labels")
    assert check.num_differing == 0
    num_maps = 1 if kind == "multiclass" else 4
    all_pixels = num_maps * sum(size.pixels for size in check.sizes)
    assert 0.98 * all_pixels < check.num_pixels <= all_pixels
    said = export_onnx.describe(check)
    assert said.startswith(f"0 of {check.num_pixels} certain labels differ on")


def test_metadata_say_what_is_needed_to_use_the_file(tmp_path):
    weights = random_weights("multilabel", pixels=BGR, pool_padding="caffe", output_stride=8)
    path = tmp_path / "m.onnx"
    export_onnx.export(weights, path, output="labels", source="Caffe ResNet-50")
    proto = onnx.load(path)
    assert {p.key: p.value for p in proto.metadata_props} == {
        "format": "anysize-onnx-1",
        "output": "labels",
        "kind": "multilabel",
        "classes": json.dumps(dataclasses.asdict(CLASSES)),
        "geometry": json.dumps({"output_stride": 8, "pool_padding": "caffe"}),
        "pixels": json.dumps(dataclasses.asdict(BGR)),
        "source": "Caffe ResNet-50",
    }
    description = onnx_file.open_onnx(path).description
    assert description.classes == CLASSES
    assert description.pixels == BGR
    assert description.source == "Caffe ResNet-50"


def test_the_file_is_whole_and_of_free_size(tmp_path):
    weights = random_weights()
    export_onnx.export(weights, tmp_path / "m.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
    proto = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    onnx.checker.check_model(proto, full_check=True)
    (image,), (logits,) = proto.graph.input, proto.graph.output
    dims = image.type.tensor_type.shape.dim
    assert [d.dim_param or d.dim_value for d in dims] == ["height", "width", 3]
    dims = logits.type.tensor_type.shape.dim
    assert [d.dim_param or d.dim_value for d in dims] == [3, "height", "width"]
    names = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    assert names["body.conv1.weights"].shape == (4, 3, 7, 7)
    assert {o.domain for o in proto.opset_import} == {""}


def test_the_file_names_no_folder_of_this_machine(tmp_path):
    export_onnx.export(random_weights(), tmp_path / "m.onnx")
    assert str(tmp_path).encode() not in (tmp_path / "m.onnx").read_bytes()


def test_a_net_that_gives_the_same_everywhere_has_no_range_and_is_exported(tmp_path):
    weights = random_weights()
    with torch.no_grad():
        weights.model.head.weights.zero_()
    assert export_onnx.export(weights, tmp_path / "a.onnx").difference < 1e-3
    with torch.no_grad():
        weights.model.head.biases.zero_()
    assert export_onnx.export(weights, tmp_path / "b.onnx").difference == 0


def test_diverged_weights_are_refused(tmp_path):
    weights = random_weights()
    with torch.no_grad():
        weights.model.head.biases[1] = float("nan")
    with pytest.raises(WeightsError, match="not finite"):
        export_onnx.export(weights, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_a_file_beyond_two_gigabytes_is_refused_before_it_is_built(tmp_path, monkeypatch):
    monkeypatch.setattr(export_onnx, "MAX_FILE_BYTES", 2**24 + 1000)
    with pytest.raises(WeightsError, match=r"m\.onnx would have 0\.0 GB.*base_depth"):
        export_onnx.export(random_weights(), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_another_ending_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"m\.bin does not end with \.onnx"):
        export_onnx.export(random_weights(), tmp_path / "m.bin")


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime"])
def test_a_missing_extra_is_named(tmp_path, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=rf'{missing}, .*pip install "anysize\[export\]"'):
        export_onnx.export(random_weights(), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())
