import json
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper
from PIL import Image

from anysize.config import ModelConfig, PixelConvention
from anysize.data.samples import Classes
from anysize.errors import (
    AnysizeError,
    ConfigError,
    DataError,
    DeviceError,
    ShapeError,
    WeightsError,
)
from anysize.models.build import build_model
from anysize.models.weights_file import Weights
from anysize.onnx import export as export_onnx
from anysize.onnx import file as onnx_file
from anysize.predict.files import label_files, predict_files
from anysize.predict.tiles import predict_image

CLASSES = Classes(names=("sea", "land", "lake"), colours=((10, 20, 30), (200, 0, 0), (0, 180, 90)))


def tiny_weights(kind="multiclass", **settings):
    config = ModelConfig(units=(1, 1, 1, 1), base_depth=8, **settings)
    model = build_model(config, 3, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        model.head.weights.mul_(0.02)
    return Weights(model=model, config=config, classes=CLASSES, pixels=PixelConvention(), kind=kind)


def exported(folder, weights, output="logits"):
    path = folder / f"{output}.onnx"
    export_onnx.export(weights, path, output=output)
    return path


def image_of(height, width, seed=0):
    """Smooth blobs, so that neighbouring labels agree and classes differ."""
    rng = np.random.default_rng(seed)
    coarse = torch.from_numpy(rng.uniform(0, 255, (1, 3, height // 9 + 2, width // 9 + 2)))
    image = F.interpolate(coarse, (height, width), mode="bilinear", align_corners=False)
    return image[0].permute(1, 2, 0).numpy().astype(np.uint8)


@pytest.fixture
def path(tmp_path):
    return exported(tmp_path, tiny_weights())


@pytest.mark.parametrize("kind", ["multiclass", "multilabel"])
@pytest.mark.parametrize(("height", "width"), [(3, 5), (64, 39), (301, 243)])
def test_prediction_is_that_of_the_net_whole_and_in_tiles(tmp_path, kind, height, width):
    weights = tiny_weights(kind, output_stride=8)
    labeller = onnx_file.open_onnx(exported(tmp_path, weights))
    image = image_of(height, width)
    ours = predict_image(
        weights.model,
        image,
        weights.pixels,
        kind=kind,
        max_pixels=30_000,
        keep_probabilities=True,
    )
    theirs = labeller.predict(image, max_pixels=30_000, keep_probabilities=True)
    assert theirs.num_tiles == ours.num_tiles
    assert (ours.num_tiles > 1) == (height > 300)
    assert theirs.probabilities.dtype == np.float16
    np.testing.assert_allclose(theirs.probabilities, ours.probabilities, atol=2e-3)
    assert theirs.labels.dtype == np.uint8
    assert (theirs.labels != ours.labels).mean() < 1e-4
    assert len(np.unique(ours.labels)) > (1 if height > 30 else 0)
    if kind == "multiclass":
        assert theirs.present is None
    else:
        assert (theirs.present != ours.present).mean() < 1e-4
    other = labeller.predict(image[:, ::-1], max_pixels=30_000, keep_probabilities=True)
    off = np.abs(other.probabilities.astype(float) - ours.probabilities).max()
    assert off > 2e-2, "control: another image must show"


@pytest.mark.parametrize("kind", ["multiclass", "multilabel"])
def test_files_are_those_of_the_net(tmp_path, kind):
    weights = tiny_weights(kind)
    labeller = onnx_file.open_onnx(exported(tmp_path, weights))
    (tmp_path / "in").mkdir()
    for i, size in enumerate([(41, 30), (1, 1), (210, 190)]):
        Image.fromarray(image_of(*size, seed=i)).save(tmp_path / "in" / f"{i}.png")
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    said = list(label_files(labeller, [tmp_path / "in"], theirs, max_pixels=30_000))
    assert [s.num_tiles > 1 for s in said] == [False, False, True]
    list(predict_files(weights, [tmp_path / "in"], ours, max_pixels=30_000))
    names = sorted(p.relative_to(ours) for p in ours.rglob("*.png"))
    assert names == sorted(p.relative_to(theirs) for p in theirs.rglob("*.png"))
    assert len(names) == (6 if kind == "multiclass" else 12)
    for name in names:
        with Image.open(ours / name) as a, Image.open(theirs / name) as b:
            assert a.mode == b.mode
            assert a.getpalette() == b.getpalette()
            assert (np.asarray(a) != np.asarray(b)).mean() < 1e-3


@pytest.mark.parametrize("kind", ["multiclass", "multilabel"])
def test_a_file_that_gives_labels_labels_what_needs_no_tiles(tmp_path, kind):
    weights = tiny_weights(kind)
    labeller = onnx_file.open_onnx(exported(tmp_path, weights, "labels"))
    image = image_of(64, 39)
    ours = predict_image(weights.model, image, weights.pixels, kind=kind)
    limits = {"max_pixels": 64 * 39, "keep_probabilities": False}
    theirs = labeller.predict(image, **limits)
    assert (theirs.labels != ours.labels).mean() < 1e-3
    assert (theirs.present is None) == (kind == "multiclass")
    if kind == "multilabel":
        assert (theirs.present != ours.present).mean() < 1e-3
    with pytest.raises(ShapeError, match=r"64x40 has more than 2496 pixels.*--output logits"):
        labeller.predict(image_of(64, 40), **limits)
    with pytest.raises(ConfigError, match="probabilities were asked for.*--output logits"):
        labeller.predict(image, max_pixels=10_000, keep_probabilities=True)


def test_a_large_image_is_passed_over_by_a_file_that_gives_labels(tmp_path):
    labeller = onnx_file.open_onnx(exported(tmp_path, tiny_weights(), "labels"))
    (tmp_path / "in").mkdir()
    for name, size in (("a", (200, 200)), ("b", (20, 30))):
        Image.fromarray(image_of(*size)).save(tmp_path / "in" / f"{name}.png")
    results = label_files(labeller, [tmp_path / "in"], tmp_path / "out", max_pixels=30_000)
    assert next(results).image.stem == "b"
    with pytest.raises(DataError, match=r"1 of 2 images .*\n.*a\.png: The image of 200x200"):
        next(results)


def test_an_image_that_is_too_small_is_named(tmp_path):
    labeller = onnx_file.open_onnx(exported(tmp_path, tiny_weights(pool_padding="caffe")))
    assert labeller.run(image_of(3, 3))[0].shape == (3, 3, 3)
    with pytest.raises(ShapeError, match="An image extent of 2 pixels is too small for caffe"):
        labeller.run(image_of(3, 2))


def test_images_of_other_depths_are_refused(path):
    labeller = onnx_file.open_onnx(path)
    with pytest.raises(DataError, match="3 channels of 8 bits, not of 3 channels of 16 bits"):
        labeller.run(image_of(9, 9).astype(np.uint16))
    with pytest.raises(DataError, match="3 channels of 8 bits, not of 4 channels of 8 bits"):
        labeller.run(np.zeros((9, 9, 4), np.uint8))


def rewritten(path, change):
    proto = onnx.load(path, load_external_data=False)
    change(proto)
    path.write_bytes(proto.SerializeToString())


def no_metadata(proto):
    del proto.metadata_props[:]


def set_metadata(**values):
    def change(proto):
        metadata = {p.key: p.value for p in proto.metadata_props}
        helper.set_model_props(proto, metadata | values)

    return change


def other_input(proto):
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT
    proto.graph.node[0].op_type = "Identity"
    del proto.graph.node[0].attribute[:]


def renamed_output(proto):
    proto.graph.node[-1].output[0] = proto.graph.output[0].name = "scores"


def external_data(proto):
    tensor = proto.graph.initializer[5]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../../etc/passwd")


def external_data_in_a_node(proto):
    tensor = TensorProto(name="hidden", data_location=TensorProto.EXTERNAL, dims=[1], data_type=1)
    tensor.external_data.add(key="location", value="secret.bin")
    proto.graph.node.append(helper.make_node("Constant", [], ["c"], value=tensor))


def external_data_in_a_subgraph(proto):
    branch = helper.make_graph([], "branch", [], [])
    proto.graph.node.append(
        helper.make_node("If", ["x"], ["y"], name="choice", then_branch=branch, else_branch=branch)
    )


def custom_operation(proto):
    proto.graph.node[2].domain = "com.example"
    proto.opset_import.append(helper.make_opsetid("com.example", 1))


def function(proto):
    proto.functions.append(
        helper.make_function("", "Relu", ["x"], ["y"], [], [helper.make_opsetid("", 18)])
    )


def unknown_operation(proto):
    proto.graph.node[2].op_type = "Sparkle"


CLASSES_OF_TWO = json.dumps({"names": ["a", "b"], "colours": [[1, 2, 3], [4, 5, 6]]})
NO_COLOURS = json.dumps({"names": ["a", "b", "c"], "colours": []})
LOUD = json.dumps({"names": ["a"], "colours": [[1, 2, 256]]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (no_metadata, "of format None, not 'anysize-onnx-1'"),
        (set_metadata(format="anysize-onnx-9"), "of format 'anysize-onnx-9'"),
        (set_metadata(kind="hinge"), "metadata .* is invalid: 'hinge' is none of multiclass"),
        (set_metadata(output="probabilities"), "'probabilities' is none of logits, labels"),
        (set_metadata(pixels="{"), "metadata .* is invalid"),
        (set_metadata(pixels="[" * 100_000), "metadata .* is invalid"),
        (set_metadata(classes='{"names": 3}'), "metadata .* is invalid"),
        (set_metadata(classes=NO_COLOURS), "3 classes with 0 colours"),
        (set_metadata(classes=LOUD), "256; it must be at most 255"),
        (
            set_metadata(geometry='{"output_stride": 0}'),
            "is 0; it must be at least 1",
        ),
        (set_metadata(output="labels"), "which is not what its metadata says"),
        (other_input, "which is not what its metadata says"),
        (renamed_output, "which is not what its metadata says"),
        (external_data, "keeps the tensor 'body.conv1.biases' in another file"),
        (external_data_in_a_node, "keeps the tensor 'hidden' in another file"),
        (external_data_in_a_subgraph, "has a graph within its node 'choice'"),
        (custom_operation, r"operations of its own \(com\.example\)"),
        (function, r"operations of its own \(functions\)"),
        (unknown_operation, "is not a net that onnxruntime can run: .*Sparkle"),
    ],
)
def test_what_is_not_ours_is_refused(path, change, message, capfd):
    rewritten(path, change)
    with pytest.raises(WeightsError, match=message) as caught:
        onnx_file.open_onnx(path)
    assert "logits.onnx" in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_file_with_other_files_is_refused_before_it_is_run(path, monkeypatch):
    def never(*_, **__):
        raise AssertionError("onnxruntime saw the file")

    monkeypatch.setattr(onnxruntime, "InferenceSession", never)
    whole = path.read_bytes()
    for change in (external_data, external_data_in_a_node, custom_operation, function):
        path.write_bytes(whole)
        rewritten(path, change)
        with pytest.raises(WeightsError):
            onnx_file.open_onnx(path)


def test_classes_that_do_not_fit_the_graph_are_seen_when_it_runs(path):
    rewritten(path, set_metadata(classes=CLASSES_OF_TWO))
    labeller = onnx_file.open_onnx(path)
    with pytest.raises(WeightsError, match=r"shape \(3, 9, 9\) for an image of 9x9; .*\(2, 9, 9\)"):
        labeller.run(image_of(9, 9))


@pytest.mark.parametrize("share", [0, 0.001, 0.3, 0.9, 0.9999])
def test_a_truncated_file_is_named(path, share):
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(WeightsError, match=r"logits\.onnx (is damaged|is of format None)"):
        onnx_file.open_onnx(path)


def test_another_kind_of_file_is_named(tmp_path):
    for content in (b"\x89PNG\r\n\x1a\n", bytes(1000), b"\xff" * 1000, "Grüße".encode()):
        (tmp_path / "x.onnx").write_bytes(content)
        with pytest.raises(WeightsError, match=r"x\.onnx is"):
            onnx_file.open_onnx(tmp_path / "x.onnx")
    with pytest.raises(WeightsError, match=r"No such file: .*gone\.onnx"):
        onnx_file.open_onnx(tmp_path / "gone.onnx")


def test_changed_bytes_give_a_message_or_a_prediction(path, capfd):
    """Bytes of nodes and metadata, where a change has consequences; nothing else may come out."""
    whole = path.read_bytes()
    num_node_bytes = sum(n.ByteSize() for n in onnx.load_model_from_string(whole).graph.node)
    rng = np.random.default_rng(3)
    places = [*rng.integers(0, num_node_bytes, 150), *rng.integers(-1000, 0, 150)]
    messages = []
    for place in places:
        changed = bytearray(whole)
        changed[place] = rng.integers(0, 256)
        try:
            labeller = onnx_file.load_onnx(bytes(changed), "x.onnx")
            labeller.predict(image_of(9, 11), max_pixels=1000, keep_probabilities=False)
        except AnysizeError as error:
            messages.append(str(error))
    assert 50 < len(messages) < 300
    assert all("x.onnx" in message for message in messages)
    assert capfd.readouterr() == ("", "")


def test_a_file_of_more_than_two_gigabytes_is_not_read(tmp_path):
    with (tmp_path / "x.onnx").open("wb") as file:
        file.truncate(2**31)
    with pytest.raises(WeightsError, match="more than 2 GB"):
        onnx_file.open_onnx(tmp_path / "x.onnx")


def test_logits_that_are_not_finite_are_an_error(path):
    def spoil(proto):
        for tensor in proto.graph.initializer:
            if tensor.name == "head.biases":
                tensor.raw_data = np.array([0, np.nan, 0], np.float32).tobytes()

    rewritten(path, spoil)
    labeller = onnx_file.open_onnx(path)
    with pytest.raises(WeightsError, match=r"logits\.onnx gives logits that are not finite .*9x9"):
        labeller.predict(image_of(9, 9), max_pixels=1000, keep_probabilities=False)


def failing(path, message):
    class Session:
        def run(self, *_):
            raise RuntimeError(message)

    labeller = onnx_file.open_onnx(path)
    return onnx_file.OnnxLabeller(
        name="x.onnx", description=labeller.description, session=Session()
    )


def test_memory_that_does_not_suffice_names_the_way_out(path):
    labeller = failing(path, "[E:onnxruntime] : 6 : Failed to allocate memory for 8000 bytes\nmore")
    with pytest.raises(DeviceError, match=r"x\.onnx on 9x9 pixels.*--max-pixels"):
        labeller.run(image_of(9, 9))
    labeller = failing(path, "[E:onnxruntime] : 1 : Resize went wrong\nmore")
    with pytest.raises(WeightsError, match=r"x\.onnx does not run on .* 9x9: Resize went wrong\."):
        labeller.run(image_of(9, 9))


def test_threads_are_those_of_torch(path):
    threads = torch.get_num_threads()
    options = onnx_file.open_onnx(path).session.get_session_options()
    assert options.intra_op_num_threads == threads
    assert options.inter_op_num_threads == 1


def test_a_missing_extra_is_named(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r'onnxruntime, .*pip install "anysize\[export\]"'):
        onnx_file.open_onnx(path)


def test_predicting_with_a_net_of_ours_does_not_load_onnx():
    loaded = "{'onnx', 'onnxruntime'} & set(sys.modules)"
    code = f"import sys, anysize.predict.files; sys.exit(bool({loaded}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
