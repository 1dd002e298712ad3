"""ONNX of a net that `model.net` names: traced, and compared with our own prediction."""

import numpy as np
import onnx
import pytest
import torch

from anysize.config import ModelConfig, PixelConvention
from anysize.data.samples import Classes
from anysize.errors import WeightsError
from anysize.models.build import build_model
from anysize.models.weights_file import Weights
from anysize.onnx.export import export
from anysize.onnx.file import open_onnx
from anysize.predict.tiles import predict_image, predict_logits

CLASSES = Classes(names=("a", "b", "c"), colours=((0, 0, 0),) * 3, ignore_index=255)
BGR = PixelConvention(channel_order="BGR", max_value=1.0, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))


def weights_of(net, kind="multiclass", **arguments):
    config = ModelConfig(net=f"tests.models.small_nets:{net}", arguments=arguments)
    model = build_model(config, 3, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(0, 0.3, generator=torch.Generator().manual_seed(2))
    return Weights(model=model, config=config, classes=CLASSES, kind=kind, pixels=BGR)


@pytest.mark.parametrize("kind", ["multiclass", "multilabel"])
def test_a_file_gives_what_the_net_gives_at_any_size(tmp_path, kind):
    weights = weights_of("SmallUnet", kind, width=4)
    checks = {o: export(weights, tmp_path / f"{o}.onnx", output=o) for o in ("logits", "labels")}
    assert checks["logits"].difference < 1e-5
    assert checks["labels"].num_differing == 0
    logits, labels = (open_onnx(tmp_path / f"{o}.onnx") for o in ("logits", "labels"))
    for size in ((41, 58), (200, 33)):
        image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
        ours = predict_logits(weights.model, image, BGR).numpy()
        np.testing.assert_allclose(logits.run(image)[0], ours, atol=1e-5)
        told = predict_image(weights.model, image, BGR, kind=kind)
        found = labels.predict(image, max_pixels=1 << 20, keep_probabilities=False)
        assert (found.labels != told.labels).mean() < 1e-3
        if kind == "multilabel":
            assert (found.present != told.present).mean() < 1e-3
    proto = onnx.load(tmp_path / "logits.onnx")
    assert {entry.domain for entry in proto.opset_import} == {""}
    assert not any(str(tmp_path.anchor + "tmp") in n.doc_string for n in proto.graph.node)


@pytest.mark.parametrize(
    ("net", "message"),
    [("Resizer", "wrong for images of other sizes"), ("Pyramid", "cannot write this net: .*adapt")],
)
def test_a_net_that_the_exporter_cannot_write_is_refused(tmp_path, net, message):
    with pytest.raises(WeightsError, match=message):
        export(weights_of(net), tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())
