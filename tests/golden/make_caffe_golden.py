"""Makes `caffe_narrow.caffemodel` and `caffe_narrow.npz`: Caffe's own saver, and its own logits.

    python tests/golden/make_caffe_golden.py [--python PYTHON3.9]

Needs the side venv of `parity/compare_caffe.py`, which it makes if it is not there. The net is
random and narrow; images are drawn by `tests/weights/test_caffe.py` from seeds, so that the archive
holds logits only, of six classes of (H mod 4, W mod 4) at three output strides.
"""

import argparse
import hashlib
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "parity")]

import compare_caffe  # noqa: E402
from tests.conversion import caffe_net  # noqa: E402
from tests.conversion.test_caffe import draw_images  # noqa: E402

from anysize.geometry import Size  # noqa: E402

SIZES = [Size(41, 52), Size(42, 33), Size(43, 54), Size(44, 35), Size(46, 37), Size(5, 34)]


def net(output_stride):
    """Of base depth 2, since the file may have 50 KB."""
    rules = {"output_stride": output_stride, "num_classes": 2, "seed": 11}
    return caffe_net.resnet((1, 1, 1, 1), 2, **rules)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default="")
    python = parser.parse_args().python or compare_caffe.find_python()
    inside = compare_caffe.install(python)
    images = [draw_images([size], seed=size.height)[0] for size in SIZES]
    with tempfile.TemporaryDirectory() as folder:
        live, _ = compare_caffe.run_live(inside, net, Path(folder), images)
        model = (Path(folder) / "written.caffemodel").read_bytes()
    (HERE / "caffe_narrow.caffemodel").write_bytes(model)
    logits = {
        f"logits_{stride}_{size.height}x{size.width}": live[f"{stride}/{i}/logits"][0]
        for stride in (32, 16, 8)
        for i, size in enumerate(SIZES)
    }
    np.savez_compressed(
        HERE / "caffe_narrow.npz", sha256=hashlib.sha256(model).hexdigest(), **logits
    )


if __name__ == "__main__":
    main()
