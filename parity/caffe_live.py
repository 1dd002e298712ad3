"""What Caffe itself computes, and the .caffemodel that it writes.

Run by `compare_caffe.py` in a side venv of Python 3.8 or 3.9, in which Kendryte's build of Caffe
1.0.0 installs; knows nothing of Anysize:

    python parity/caffe_live.py FOLDER

FOLDER holds `weights.npz` (layer/blob), `data.npz` (images uint8 RGB and targets, mean pixel) and a
`<output stride>.prototxt` for each stride; this writes `written.caffemodel` with Caffe's own saver,
and `live.npz` with block ends, logits, loss and gradients, and which values passed
every ReLU.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

# pycaffe imports scikit-image for resizing only, which is not done here.
for module in ("skimage", "skimage.io", "skimage.transform"):
    sys.modules[module] = types.ModuleType(module)
sys.modules["skimage"].io = sys.modules["skimage.io"]
sys.modules["skimage.transform"].resize = None

import caffe  # noqa: E402


def load(prototxt: Path, weights: Any) -> Any:  # noqa: ANN401
    """A net with every parameter set from an archive."""
    net = caffe.Net(str(prototxt), caffe.TEST)
    keys = {f"{name}/{i}" for name, blobs in net.params.items() for i in range(len(blobs))}
    assert keys == set(weights.files), keys ^ set(weights.files)
    for name, blobs in net.params.items():
        for i, blob in enumerate(blobs):
            assert blob.data.shape == weights[f"{name}/{i}"].shape, name
            blob.data[...] = weights[f"{name}/{i}"]
    return net


def run(
    net: Any,  # noqa: ANN401
    images: list[np.ndarray],
    targets: list[np.ndarray],
    data: Any,  # noqa: ANN401
) -> dict[str, np.ndarray]:
    """Every image by itself, with the gradients of its mean loss."""
    out = {}
    last = [name for name in net.params if name[:3] == "res" and name.endswith("2c")][-1]
    mean = data["mean"][:, None, None]
    for i, (image, target) in enumerate(zip(images, targets)):  # noqa: B905
        # The order of Caffe's own Transformer: channels first, then swapped, then the mean.
        values = image.astype(np.float32).transpose(2, 0, 1)[::-1] - mean
        net.blobs["data"].reshape(1, *values.shape)
        net.blobs["label"].reshape(1, *target.shape)
        net.reshape()
        net.blobs["data"].data[0] = values
        net.blobs["label"].data[0] = target
        for name in ("conv1", last, "up"):
            net.params[name][0].diff[...] = 0
        net.forward()
        found = {"loss": net.blobs["loss"].data / target.size, "logits": net.blobs["logits"].data}
        for block, end in enumerate(data["ends"]):
            found[f"end{block}"] = net.blobs[str(end)].data
        active = [net.blobs[str(name)].data.ravel() > 0 for name in data["relus"]]
        found["active"] = np.packbits(np.concatenate(active))
        found["stem"] = net.blobs["conv1"].data
        net.backward()
        for key, name in (("conv1", "conv1"), ("conv3", last), ("upconv", "up")):
            found["gradient_" + key] = net.params[name][0].diff / target.size
        out.update({f"{i}/{key}": np.array(value) for key, value in found.items()})
    return out


def main(folder: Path) -> None:
    """Runs all prototxts of a folder."""
    weights, data = np.load(folder / "weights.npz"), np.load(folder / "data.npz")
    count = int(data["count"])
    images = [data[f"image{i}"] for i in range(count)]
    live = {}
    for prototxt in sorted(folder.glob("*.prototxt")):
        stride = prototxt.stem
        net = load(prototxt, weights)
        targets = [data[f"target{stride}_{i}"] for i in range(count)]
        outputs = run(net, images, targets, data)
        live.update({f"{stride}/{k}": v for k, v in outputs.items()})
        if stride == "32":
            net.save(str(folder / "written.caffemodel"))
    np.savez(folder / "live.npz", version=caffe.__version__, **live)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
