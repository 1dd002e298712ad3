"""Makes the golden files of TF-Slim, with the real tf_slim.

    make parity                     # builds the venv that has it
    .parity/tf/bin/python -m tests.golden.make_slim_golden

Two narrow nets, since 64 channels do not fit into 50 KB: `slim_v1.ckpt`, of V1 like the released
checkpoints, with a class layer left in it, and `slim_v2.ckpt`, of V2, with some Momentum slots. The
stem's number of channels is changed on the way; all else is tf_slim's own code. What the nets give
is computed in float64 from the float32 values of the checkpoints.

`slim_v*.npz`: `picture`, whose upper left corners of `sizes` are the images; for each output stride
`logits<stride>` of all images one after the other, and `losses<stride>`.
`slim_v*_gradients.npz`: `conv1_<stride>` and `upconv_<stride>` of the sum of the losses.
"""

from pathlib import Path

import numpy as np
import tensorflow as tf
from parity.slim_net import Net, NetSpec, draw_picture, draw_values, grid_shape, write_checkpoint

FOLDER = Path(__file__).parent
MOST_BYTES = 50_000

SIZES = [(h, w) for h in (17, 22, 27, 32) for w in (33, 38, 19, 24)] + [(1, 1), (3, 40)]


def target_of(height, width, num_classes):
    """A pattern of 0 and 1; the tests draw the same."""
    rows, columns, classes = np.ogrid[:height, :width, :num_classes]
    return ((5 * rows + 3 * columns + 2 * classes) % 7 < 3).astype(np.uint8)


def make(name, spec, seed, **checkpoint):
    path = FOLDER / f"{name}.ckpt"
    net = Net(spec, 16)
    # Of so few channels hardly any may be always off: the seeds were chosen so, too.
    values = draw_values(net, seed)
    net.load({n: 0.5 * abs(v) if n.endswith("/beta") else v for n, v in values.items()})
    write_checkpoint(net, path, seed=seed, **checkpoint)

    picture = draw_picture(max(h for h, _ in SIZES), max(w for _, w in SIZES), seed)
    found = {"picture": picture, "sizes": np.array(SIZES, np.int16)}
    sums = {}
    for output_stride in (8, 16, 32):
        net = Net(spec, output_stride, "float64")
        net.load_checkpoint(path)
        gradients = net.gradients()
        outputs = []
        for h, w in SIZES:
            target = target_of(*grid_shape(h, w, output_stride), spec.num_classes)
            outputs.append(net.run(gradients, picture[:h, :w], target))
        found[f"logits{output_stride}"] = np.concatenate([o.logits.ravel() for o in outputs])
        found[f"losses{output_stride}"] = np.array([o.loss for o in outputs])
        sums[f"conv1_{output_stride}"] = sum(o.conv1 for o in outputs)
        sums[f"upconv_{output_stride}"] = sum(o.upconv for o in outputs)
    np.savez(FOLDER / f"{name}.npz", **found)
    np.savez(FOLDER / f"{name}_gradients.npz", **sums)


def main():
    tf.compat.v1.disable_eager_execution()
    slots = ("resnet_v1/conv1/BatchNorm/gamma", "upconv/biases")
    v1 = {"version": "V1", "num_logits": 5, "slots_of": slots}
    make("slim_v1", NetSpec("resnet_v1", (2, 2, 2, 1), 1, 3), 24, **v1)
    make("slim_v2", NetSpec("resnet_v1", (1, 2, 2, 1), 2, 2), 33, version="V2", slots_of=slots)
    for path in sorted(FOLDER.glob("slim_*")):
        size = path.stat().st_size
        print(f"{path.name}: {size} bytes")
        assert size <= MOST_BYTES, f"{path.name} is too large to keep"


if __name__ == "__main__":
    main()
