"""Runs the real tf_slim and writes what it gives: `python -m parity.slim_live FOLDER`.

Runs in the TensorFlow venv and knows nothing of Anysize. In FOLDER it writes checkpoints with
TensorFlow's Saver, and for each net, precision and output stride an .npz with images, targets and
outputs, which `parity.compare_slim` reads.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import tensorflow as tf
from parity.slim_net import Net, NetSpec, draw_picture, draw_values, grid_shape, write_checkpoint

NETS = {
    "resnet_v1_50": (NetSpec("resnet_v1_50", (), 64, 15), "V2", 0),
    "resnet_v1_101": (NetSpec("resnet_v1_101", (), 64, 15), "V1", 1000),
}
OUTPUT_STRIDES = (8, 16, 32)

# All 16 classes of (H mod 4, W mod 4), and tiny and long ones.
SIZES = [(h, w) for h in (61, 74, 67, 80) for w in (85, 70, 63, 76)] + [(1, 1), (6, 3), (11, 165)]

TRAINING_SIZES = [(65, 80), (97, 66), (72, 91), (83, 71), (90, 97)]
TRAINING_STEPS = 20
LEARNING_RATE = 0.001


def main() -> None:
    """Writes everything into the folder that the command line names."""
    tf.compat.v1.disable_eager_execution()
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, (spec, version, num_logits)) in enumerate(NETS.items()):
        start = time.monotonic()
        write_random(folder / f"{name}.ckpt", spec, version, num_logits, seed)
        say(f"{name}: {version} checkpoint with random weights", start)
        for dtype in ("float32", "float64"):
            for output_stride in OUTPUT_STRIDES:
                start = time.monotonic()
                record(folder, name, spec, output_stride, dtype)
                say(f"{name} {dtype}: {len(SIZES)} sizes at stride {output_stride}", start)
    start = time.monotonic()
    train(folder, NETS["resnet_v1_50"][0])
    say(f"resnet_v1_50: {2 * TRAINING_STEPS} training steps", start)


def say(what: str, start: float) -> None:
    """Prints a line of progress."""
    print(f"tf_slim  {what} ({time.monotonic() - start:.0f} s)", flush=True)


def write_random(path: Path, spec: NetSpec, version: str, num_logits: int, seed: int) -> None:
    """Writes a checkpoint of random values."""
    net = Net(spec, 16)
    net.load(draw_values(net, seed))
    write_checkpoint(net, path, version=version, seed=seed, num_logits=num_logits)


def record(folder: Path, name: str, spec: NetSpec, output_stride: int, dtype: str) -> None:
    """Runs a net, with the values of its checkpoint, on images of all sizes."""
    net = Net(spec, output_stride, dtype)
    gradients = net.gradients()
    net.load_checkpoint(folder / f"{name}.ckpt")
    rng = np.random.default_rng(7)
    found: dict[str, np.ndarray] = {}
    for i, (height, width) in enumerate(SIZES):
        image = draw_picture(height, width, seed=i)
        grid = grid_shape(height, width, output_stride)
        target = rng.integers(0, 2, (*grid, spec.num_classes), np.uint8)
        out = net.run(gradients, image, target)
        found |= {f"{i}/image": image, f"{i}/target": target, f"{i}/logits": out.logits}
        found |= {f"{i}/block{b}": end for b, end in enumerate(out.ends, 1)}
        found |= {f"{i}/loss": np.array(out.loss), f"{i}/conv1": out.conv1}
        found |= {f"{i}/upconv": out.upconv, f"{i}/decisions": out.decisions}
    np.savez(folder / f"{name}-{dtype}-{output_stride}.npz", **found)


def train(folder: Path, spec: NetSpec) -> None:
    """Trains for some steps, saves, and trains on: SGD without momentum, frozen statistics."""
    net = Net(spec, 16)
    with net.graph.as_default():
        total = net.loss + tf.compat.v1.losses.get_regularization_loss()
        step = tf.compat.v1.train.get_or_create_global_step()
        # Momentum 0 is plain SGD, and leaves its slots in the checkpoint all the same.
        optimizer = tf.compat.v1.train.MomentumOptimizer(LEARNING_RATE, 0.0)
        update = optimizer.minimize(total, global_step=step)
        saver = tf.compat.v1.train.Saver()
        net.session.run(tf.compat.v1.global_variables_initializer())
    net.load_checkpoint(folder / f"{spec.scope}.ckpt")
    rng = np.random.default_rng(11)
    found: dict[str, np.ndarray] = {"learning_rate": np.array(LEARNING_RATE)}
    samples = []
    for i, (height, width) in enumerate(TRAINING_SIZES):
        image = draw_picture(height, width, seed=100 + i)
        grid = grid_shape(height, width, 16)
        target = rng.integers(0, 2, (*grid, spec.num_classes), np.uint8)
        found |= {f"{i}/image": image, f"{i}/target": target}
        samples.append((image, target))
    losses = []
    for number in range(2 * TRAINING_STEPS):
        if number == TRAINING_STEPS:
            saver.save(net.session, str(folder / "trained.ckpt"), write_meta_graph=False)
        feed = net.feed(*samples[number % len(samples)])
        losses.append(net.session.run([net.loss, update], feed)[0])
    np.savez(folder / "trained.npz", losses=np.array(losses), **found)


if __name__ == "__main__":
    main()
