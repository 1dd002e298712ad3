"""TF-Slim nets with a labelling head, and their random weights. Runs in the TensorFlow venv.

The nets are those of `tf_slim.nets.resnet_v1`; nothing of them is written again here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf
import tf_slim as slim
from parity.decisions import decisions
from tensorflow.python.training import saver as saver_module
from tf_slim.nets import resnet_v1

if TYPE_CHECKING:
    from pathlib import Path

MEAN_RGB = (123.68, 116.779, 103.939)
WEIGHT_DECAY = 1e-4
NUM_IMAGENET_CLASSES = 1000


class NetSpec(NamedTuple):
    """A net of tf_slim.

    Attributes:
        scope: Its name in checkpoints.
        units: In each block; empty for the whole net that `scope` names.
        base_depth: Channels of the stem, 64 in a whole net.
        num_classes: Of the head.
    """

    scope: str
    units: tuple[int, ...]
    base_depth: int
    num_classes: int


class Outputs(NamedTuple):
    """What a net gives for one image.

    Attributes:
        ends: Of the four blocks, `[h, w, c]`.
        logits: `[h, w, k]`.
        loss: Mean sigmoid cross-entropy over the logits' grid and the classes.
        conv1: Gradient of the stem's weights, `[7, 7, 3, c]`.
        upconv: Gradient of the head's weights, `[3, 3, k, c]`.
        decisions: See `parity.decisions`.
    """

    ends: list[np.ndarray]
    logits: np.ndarray
    loss: float
    conv1: np.ndarray
    upconv: np.ndarray
    decisions: np.ndarray


class Net:
    """A graph with its session, for images of any size, one at a time."""

    def __init__(self, spec: NetSpec, output_stride: int, dtype: str = "float32") -> None:
        self.spec = spec
        self.dtype = np.dtype(dtype)
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.image = tf.compat.v1.placeholder(self.dtype, [1, None, None, 3])
            self.target = tf.compat.v1.placeholder(self.dtype, [1, None, None, spec.num_classes])
            body, points = make_body(spec, self.image, output_stride, fused=dtype == "float32")
            self.ends = [points[f"{spec.scope}/block{b}"] for b in (1, 2, 3, 4)]
            self.activations = _after_relu(points, spec.scope)
            self.logits = slim.conv2d_transpose(
                body,
                spec.num_classes,
                [3, 3],
                stride=2,
                activation_fn=None,
                weights_regularizer=slim.l2_regularizer(WEIGHT_DECAY),
                scope="upconv",
            )
            self.loss = tf.reduce_mean(
                tf.nn.sigmoid_cross_entropy_with_logits(labels=self.target, logits=self.logits)
            )
            self.variables = tf.compat.v1.global_variables()
            self.session = tf.compat.v1.Session()

    def variable(self, name: str) -> Any:  # noqa: ANN401
        """A variable of the graph, by the name that a checkpoint has for it."""
        return next(v for v in self.graph.get_collection("variables") if v.op.name == name)

    def first_and_last(self) -> list[Any]:
        """The weights of the first and of the last convolution."""
        return [self.variable(f"{self.spec.scope}/conv1/weights"), self.variable("upconv/weights")]

    def load(self, values: dict[str, np.ndarray]) -> None:
        """Sets all variables, by name."""
        initial = {v.initializer.inputs[1]: values[v.op.name] for v in self.variables}
        # One call for all of them: each call prunes the whole graph anew.
        self.session.run([v.initializer for v in self.variables], initial)

    def load_checkpoint(self, path: Path) -> None:
        """Sets all variables from a checkpoint, with TensorFlow's own reader."""
        reader = tf.compat.v1.train.NewCheckpointReader(str(path))
        self.load({v.op.name: reader.get_tensor(v.op.name) for v in self.variables})

    def feed(self, image: np.ndarray, target: np.ndarray) -> dict[Any, np.ndarray]:
        """What a session needs for a uint8 RGB image and a 0/1 target `[h, w, k]`."""
        pixels = image.astype(self.dtype) - np.array(MEAN_RGB, self.dtype)
        return {self.image: pixels[None], self.target: target[None].astype(self.dtype)}

    def gradients(self) -> list[Any]:
        """Adds the gradients of the first and the last convolution to the graph."""
        with self.graph.as_default():
            return tf.gradients(self.loss, self.first_and_last())

    def run(self, gradients: list[Any], image: np.ndarray, target: np.ndarray) -> Outputs:
        """Runs the net forwards and backwards on one image."""
        fetched = self.session.run(
            [self.ends, self.logits, self.loss, gradients, self.activations],
            self.feed(image, target),
        )
        ends, logits, loss, (conv1, upconv), activations = fetched
        decided = decisions([a[0] for a in activations])
        return Outputs([e[0] for e in ends], logits[0], float(loss), conv1, upconv, decided)


def make_body(spec: NetSpec, image: Any, output_stride: int, *, fused: bool) -> Any:  # noqa: ANN401
    """The body of tf_slim, and its end points."""
    settings: dict[str, Any] = {
        "num_classes": None,
        "global_pool": False,
        "is_training": False,
        "output_stride": output_stride,
        "scope": spec.scope,
    }
    # TensorFlow's fused norm knows no float64.
    with (
        slim.arg_scope(resnet_v1.resnet_arg_scope(weight_decay=WEIGHT_DECAY)),
        slim.arg_scope([slim.batch_norm], fused=fused),
    ):
        if not spec.units:
            whole = {
                "resnet_v1_50": resnet_v1.resnet_v1_50,
                "resnet_v1_101": resnet_v1.resnet_v1_101,
            }
            return whole[spec.scope](image, **settings)
        blocks = [
            resnet_v1.resnet_v1_block(
                f"block{b + 1}",
                base_depth=spec.base_depth << b,
                num_units=num_units,
                stride=1 if b == 3 else 2,
            )
            for b, num_units in enumerate(spec.units)
        ]
        with _stem_of(spec.base_depth):
            return resnet_v1.resnet_v1(image, blocks, **settings)


def _after_relu(points: dict[str, Any], scope: str) -> list[Any]:
    """What every ReLU gives, from the stem on, in the order of computation."""
    found = [points[f"{scope}/conv1"]]
    for name in points:
        if name.endswith("/bottleneck_v1"):
            found += [points[f"{name}/conv1"], points[f"{name}/conv2"], points[name]]
    return found


@contextlib.contextmanager
def _stem_of(num_channels: int) -> Iterator[None]:
    """Narrows the stem, whose 64 channels are fixed in tf_slim; all else is the real code."""
    original = resnet_v1.resnet_utils.conv2d_same

    def narrowed(inputs: Any, num_outputs: int, size: int, stride: int, **rest: Any) -> Any:  # noqa: ANN401
        return original(inputs, num_channels if size == 7 else num_outputs, size, stride, **rest)

    resnet_v1.resnet_utils.conv2d_same = narrowed
    try:
        yield
    finally:
        resnet_v1.resnet_utils.conv2d_same = original


def draw_values(net: Net, seed: int) -> dict[str, np.ndarray]:
    """Random values for every variable: the moving statistics, gamma and beta are not the defaults.

    Weights are drawn so that activations stay of order 1: the stem's take pixels of up to 255, and
    the last norm of each unit has a small gamma and beta, or 33 units would add up. Beta keeps away
    from zero, so that few values lie next to a ReLU's edge (see `parity.decisions`).
    """
    rng = np.random.default_rng(seed)
    return {
        v.op.name: _draw(v.op.name, v.shape.as_list(), rng).astype(np.float32)
        for v in sorted(net.variables, key=lambda v: v.op.name)
    }


def _draw(name: str, shape: list[int], rng: np.random.Generator) -> np.ndarray:
    last = 0.25 if "/conv3/" in name else 1.0
    match name.rsplit("/", 1)[1]:
        case "gamma":
            return rng.uniform(0.3, 1.0, shape) * last
        case "beta":
            return rng.uniform(0.8, 2.0, shape) * rng.choice([-1.0, 1.0], shape) * last
        case "moving_variance":
            return rng.uniform(0.5, 2.0, shape)
        case "moving_mean" | "biases":
            return rng.normal(0.0, 0.3, shape)
    if name == "upconv/weights":
        return rng.normal(0.0, 0.4 / np.sqrt(shape[3]), shape)
    fan_in = shape[0] * shape[1] * shape[2]
    scale = 1 / 64 if shape[0] == 7 else 1.0
    return rng.normal(0.0, scale * np.sqrt(2 / fan_in), shape)


def write_checkpoint(
    net: Net,
    path: Path,
    *,
    version: str,
    seed: int,
    slots_of: tuple[str, ...] | None = None,
    num_logits: int = 0,
) -> None:
    """Writes the net's variables with TensorFlow's Saver, among what training leaves beside them.

    Args:
        net: With its values loaded.
        path: Prefix of the files.
        version: "V1", one file, as the released ones; or "V2", an index and data.
        seed: Of the values that are not the net's.
        slots_of: Trained variables that get a Momentum slot; `None` gives one to all.
        num_logits: Outputs of a class layer, as the released checkpoints have; 0 for none.
    """
    rng = np.random.default_rng(seed)
    with net.graph.as_default():
        step = tf.compat.v1.train.get_or_create_global_step()
        trained = [
            v
            for v in tf.compat.v1.trainable_variables()
            if slots_of is None or v.op.name in slots_of
        ]
        # The slots are what is wanted here, so any gradient does.
        tf.compat.v1.train.MomentumOptimizer(0.1, 0.9).apply_gradients(
            [(tf.zeros_like(v), v) for v in trained], global_step=step
        )
        if num_logits:
            with tf.compat.v1.variable_scope(net.spec.scope):
                slim.conv2d(net.ends[3], num_logits, [1, 1], scope="logits")
        known = {v.op.name for v in net.variables}
        beside = [v for v in tf.compat.v1.global_variables() if v.op.name not in known]
        initial = {
            v.initializer.inputs[1]: rng.normal(0.0, 0.1, v.shape.as_list())
            for v in beside
            if v is not step
        }
        net.session.run(
            [v.initializer for v in beside], {**initial, step.initializer.inputs[1]: 1234}
        )
        formats = {
            "V1": saver_module.saver_pb2.SaverDef.V1,
            "V2": saver_module.saver_pb2.SaverDef.V2,
        }
        saver = tf.compat.v1.train.Saver(write_version=formats[version])
        saver.save(net.session, str(path), write_meta_graph=False, write_state=False)


def draw_picture(height: int, width: int, seed: int) -> np.ndarray:
    """A uint8 RGB picture: waves in each channel under noise."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:height, :width]
    waves = [
        np.sin(rows / a + columns / b + c)
        for a, b, c in rng.uniform((3, 3, 0), (15, 15, 6), (3, 3))
    ]
    picture = 120 + 80 * np.stack(waves, axis=2) + rng.normal(0, 20, (height, width, 3))
    return picture.clip(0, 255).astype(np.uint8)


def grid_shape(height: int, width: int, output_stride: int) -> tuple[int, int]:
    """The logits' grid of an image."""
    return 2 * -(-height // output_stride), 2 * -(-width // output_stride)
