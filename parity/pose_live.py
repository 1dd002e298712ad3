"""Runs a net of joints under the real tf_slim: `python -m parity.pose_live FOLDER`.

Runs in the TensorFlow venv and knows nothing of Anysize. The body and the heads are made by tf_slim
as pose-tensorflow's `nnet/pose_net.py` makes them, its losses likewise; targets follow its
`compute_target_part_scoremap`. Writes a checkpoint, and an .npz with images, joints, logits and the
losses of some steps, which `parity.compare_pose` reads.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tf_slim as slim
from parity.slim_net import MEAN_RGB, NetSpec, draw_picture, make_body

SPEC = NetSpec("resnet_v1_101", (1, 1, 12, 1), 8, 0)
NUM_JOINTS = 5
STDEV, RADIUS = 7.2801, 17.0
SIZES = [(65, 80), (97, 66), (72, 91)]
STEPS, LEARNING_RATE, MOMENTUM = 3, 0.005, 0.9
HEADS = {
    "part_pred": NUM_JOINTS,
    "locref_pred": 2 * NUM_JOINTS,
    "pairwise_pred": 2 * NUM_JOINTS * (NUM_JOINTS - 1),
}


def main() -> None:
    """Writes everything into the folder that the command line names."""
    tf.compat.v1.disable_eager_execution()
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    image = tf.compat.v1.placeholder(tf.float64, [1, None, None, 3])
    body, points = make_body(SPEC, image, 16, fused=False)
    middle = points[f"{SPEC.scope}/block3/unit_12/bottleneck_v1"]
    with tf.compat.v1.variable_scope("pose"):
        maps = {name: head(body, num, name) for name, num in HEADS.items()}
        maps["interm"] = head(middle, NUM_JOINTS, "intermediate_supervision")
    wanted = [tf.compat.v1.placeholder(tf.float64, [1, None, None, n]) for n in (5, 10, 10)]
    loss = total_loss(maps, *wanted)
    optimizer = tf.compat.v1.train.MomentumOptimizer(LEARNING_RATE, MOMENTUM)
    variables = tf.compat.v1.global_variables()
    step = optimizer.minimize(loss)
    rng = np.random.default_rng(3)
    found: dict[str, Any] = {"learning_rate": LEARNING_RATE, "momentum": MOMENTUM}
    with tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        for v in sorted(variables, key=lambda v: v.op.name):
            v.load(draw(v.op.name, v.shape.as_list(), rng).astype(np.float32), session)
        saver = tf.compat.v1.train.Saver(variables)
        saver.save(session, str(folder / "pose.ckpt"), write_meta_graph=False)
        feeds = []
        for i, size in enumerate(SIZES):
            picture = draw_picture(*size, seed=i)
            joints = rng.uniform(-5, np.array(size[::-1]) + 5, (2, NUM_JOINTS, 2))
            joints[1, ::2] = np.nan
            pixels = (picture - np.array(MEAN_RGB))[None]
            feeds.append({image: pixels, **dict(zip(wanted, targets(joints, size), strict=True))})
            found |= {f"{i}/image": picture, f"{i}/joints": joints}
            logits = session.run([maps["part_pred"], maps["locref_pred"]], feeds[i])
            found[f"{i}/logits"] = np.concatenate(logits, axis=3)[0]
        found["losses"] = [session.run([loss, step], feeds[i])[0] for i in range(STEPS)]
        for i in range(len(SIZES)):
            logits = session.run([maps["part_pred"], maps["locref_pred"]], feeds[i])
            found[f"{i}/after"] = np.concatenate(logits, axis=3)[0]
    np.savez(folder / "pose.npz", **found)


def head(inputs: Any, num: int, name: str) -> Any:  # noqa: ANN401
    """`prediction_layer` of pose_net.py."""
    with tf.compat.v1.variable_scope(name):
        return slim.conv2d_transpose(
            inputs, num, kernel_size=[3, 3], stride=2, activation_fn=None, scope="block4"
        )


def total_loss(maps: dict[str, Any], scores: Any, ways: Any, near: Any) -> Any:  # noqa: ANN401
    """`train` of pose_net.py, without the pairwise head, and `huber_loss` of losses.py."""
    crossed = [
        tf.compat.v1.losses.sigmoid_cross_entropy(scores, maps[name], 1.0)
        for name in ("part_pred", "interm")
    ]
    off = tf.abs(maps["locref_pred"] - ways)
    huber = tf.where(off < 1, 0.5 * tf.square(off), off - 0.5)
    located = tf.compat.v1.losses.compute_weighted_loss(huber, near)
    return crossed[0] + crossed[1] + 0.05 * located


def targets(joints: np.ndarray, size: tuple[int, int]) -> list[np.ndarray]:
    """Scores, ways and where these count, of an image at scale 1."""
    height, width = (2 * -(-extent // 16) for extent in size)
    scores = np.zeros((height, width, NUM_JOINTS))
    ways, near = (
        np.zeros((height, width, 2 * NUM_JOINTS)),
        np.zeros((height, width, 2 * NUM_JOINTS)),
    )
    for person in joints:
        for j, (x, y) in enumerate(person):
            for r, c in np.ndindex(height, width):
                dx, dy = x - (8 * c + 4), y - (8 * r + 4)
                at = (r, c, slice(2 * j, 2 * j + 2))
                if not dx**2 + dy**2 <= RADIUS**2:
                    continue
                if not scores[r, c, j] or (ways[at] ** 2).sum() > (dx**2 + dy**2) / STDEV**2:
                    ways[at], near[at] = (dx / STDEV, dy / STDEV), 1
                scores[r, c, j] = 1
    return [a[None] for a in (scores, ways, near)]


def draw(name: str, shape: list[int], rng: np.random.Generator) -> np.ndarray:
    """Random values that keep activations of order 1."""
    match name.rsplit("/", 1)[1]:
        case "gamma":
            return rng.uniform(0.3, 1.0, shape) * (0.25 if "/conv3/" in name else 1)
        case "beta":
            return rng.normal(0, 0.3, shape)
        case "moving_variance":
            return rng.uniform(0.5, 2, shape)
        case "moving_mean" | "biases":
            return rng.normal(0, 0.3, shape)
    fan_in = shape[3] if name.startswith("pose/") else shape[0] * shape[1] * shape[2]
    return rng.normal(0, (1 / 64 if shape[0] == 7 else 0.5) * np.sqrt(2 / fan_in), shape)


if __name__ == "__main__":
    main()
