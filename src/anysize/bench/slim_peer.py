"""TF-Slim's own net, taking steps on demand: `PYTHON slim_peer.py JSON`, in a venv of TensorFlow's.

Knows nothing of Anysize, which that venv does not have. The argument describes the net; then each
line of standard input is a list of [height, width], one image a step, and each line of standard
output is the seconds that these steps took, and the most memory held so far.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
import tf_slim as slim  # pyright: ignore[reportMissingImports]
from tf_slim.nets import resnet_v1  # pyright: ignore[reportMissingImports]

WEIGHT_DECAY = 1e-4


def main() -> None:
    """Builds the net, then answers until the input ends."""
    net = json.loads(sys.argv[1])
    tf.compat.v1.disable_eager_execution()
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
    image = tf.compat.v1.placeholder(tf.float32, [1, None, None, 3])
    target = tf.compat.v1.placeholder(tf.int32, [1, None, None])
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=target, logits=_logits(image, net)
    )
    loss = tf.reduce_mean(losses)
    optimizer = tf.compat.v1.train.MomentumOptimizer(net["learning_rate"], net["momentum"])
    update = optimizer.minimize(loss)
    session = tf.compat.v1.Session()
    session.run(tf.compat.v1.global_variables_initializer())
    _say({"ready": True})
    rng = np.random.default_rng(0)
    for line in sys.stdin:
        seconds = []
        for height, width in json.loads(line):
            grid = [2 * -(-extent // net["output_stride"]) for extent in (height, width)]
            feed = {
                image: rng.standard_normal((1, height, width, 3), np.float32),
                target: rng.integers(0, net["num_classes"], (1, *grid), np.int32),
            }
            began = time.perf_counter()
            session.run([loss, update], feed)
            seconds.append(time.perf_counter() - began)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        _say({"seconds": seconds, "memory": peak if sys.platform == "darwin" else peak * 1024})


def _logits(image: Any, net: dict[str, Any]) -> Any:  # noqa: ANN401
    """The body with frozen statistics, and the upsampling head without its ReLU."""
    blocks = [
        resnet_v1.resnet_v1_block(
            f"block{b + 1}",
            base_depth=64 << b,
            num_units=num_units,
            stride=1 if b == 3 else 2,
        )
        for b, num_units in enumerate(net["units"])
    ]
    with slim.arg_scope(resnet_v1.resnet_arg_scope(weight_decay=WEIGHT_DECAY)):
        body, _ = resnet_v1.resnet_v1(
            image,
            blocks,
            num_classes=None,
            is_training=False,
            global_pool=False,
            output_stride=net["output_stride"],
        )
    return slim.conv2d_transpose(
        body, net["num_classes"], [3, 3], stride=2, activation_fn=None, scope="upconv"
    )


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
