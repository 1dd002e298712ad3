"""Writes the TensorFlow checkpoints of this folder, with TensorFlow's own savers, and their values.

Run where TensorFlow 2.12 and tf_slim 1.1.0 are (Python 3.11): `python make_tf_checkpoints.py`.
Layers, names, slots and moving averages are those that tf_slim and the optimisers make. All values
are random, as fresh gammas of 1 and moving means of 0 would hide an exchange of the two.

- `tf_v1_fcn.ckpt`: V1, body and head `upconv`, Momentum slots, moving averages, global step.
- `tf_v2_fcn.index`, `.data-...`: V2, the same net under the scope `fcn/resnet_v1_50`, Adam.
- `tf_v1_types.ckpt`, `tf_v2_types.*`: every type that is read, and some that are not; variables cut
  into parts on either axis, in V2 over two data files.
- `tf_*_expected.npz`: all values as one row of bytes, and their names, types and shapes as JSON.
"""

import functools
import json
from pathlib import Path

import numpy as np
import tensorflow as tf
import tf_slim as slim
from tf_slim.nets import resnet_utils, resnet_v1

v1 = tf.compat.v1
HERE = Path(__file__).parent
UNITS = (2, 1, 1, 1)
BASE_DEPTH = 1
NUM_CLASSES = 2


def narrow_net(images, scope, num_classes):
    """`resnet_v1` of tf_slim with 1 channel in its stem (there it is fixed at 64), and a head."""
    with (
        slim.arg_scope(resnet_v1.resnet_arg_scope()),
        v1.variable_scope(scope),
        slim.arg_scope([slim.batch_norm], is_training=False),
    ):
        net = resnet_utils.conv2d_same(images, BASE_DEPTH, 7, stride=2, scope="conv1")
        net = slim.max_pool2d(net, [3, 3], stride=2, scope="pool1")
        blocks = [
            resnet_v1.resnet_v1_block(
                f"block{i + 1}", base_depth=BASE_DEPTH << i, num_units=n, stride=1 if i == 3 else 2
            )
            for i, n in enumerate(UNITS)
        ]
        net = resnet_utils.stack_blocks_dense(net, blocks)
        logits = slim.conv2d(net, 3, [1, 1], activation_fn=None, normalizer_fn=None, scope="logits")
    head = slim.conv2d_transpose(
        net, num_classes, [3, 3], stride=2, activation_fn=None, scope="upconv"
    )
    return head, logits


def save_net(name, version, scope, optimizer):
    with v1.Graph().as_default(), v1.Session() as session:
        step = v1.train.get_or_create_global_step()
        v1.get_variable(f"{scope}/mean_rgb", [3], trainable=False)
        head, logits = narrow_net(tf.zeros([1, 33, 33, 3]), scope, NUM_CLASSES)
        loss = tf.reduce_mean(head**2) + tf.reduce_mean(logits**2)
        few = [v for v in v1.trainable_variables() if "block1/unit_1" in v.op.name]
        few += v1.trainable_variables("upconv")  # all would make the files too large
        train = optimizer.minimize(loss, global_step=step, var_list=few)
        average = v1.train.ExponentialMovingAverage(0.99)
        with tf.control_dependencies([train]):
            average.apply(few)
        write(session, name, version, v1.train.Saver)


def save_types(name, version):
    config = v1.ConfigProto(device_count={"CPU": 2})
    with v1.Graph().as_default(), v1.Session(config=config) as session:
        cut = v1.fixed_size_partitioner
        with tf.device("/cpu:0"):
            v1.get_variable("rows", [300, 2], partitioner=cut(3))
            v1.get_variable("columns", [2, 200, 3], partitioner=cut(4, axis=1))
            v1.get_variable("scalar", [])
            v1.get_variable("empty", [0, 3])
            v1.get_variable("int64", [2, 3], tf.int64, initializer=v1.zeros_initializer())
        with tf.device("/cpu:1"):
            v1.get_variable("int32", [5], tf.int32, initializer=v1.zeros_initializer())
            v1.get_variable("half", [4], tf.float16)
            v1.get_variable("double", [3, 1], tf.float64)
            v1.get_variable("flags", [2], tf.bool, initializer=v1.zeros_initializer())
            v1.get_variable("bytes", [2], tf.uint8, initializer=v1.zeros_initializer())
            if version == v1.train.SaverDef.V2:
                v1.get_variable("bfloat16", [6], tf.bfloat16)
                v1.get_variable("long", [1, 12500], tf.bfloat16, partitioner=cut(3, axis=1))
                v1.get_variable("strings", [], tf.string, initializer=v1.constant_initializer("ab"))
        session.run(v1.global_variables_initializer())
        sharded = version == v1.train.SaverDef.V2
        write(session, name, version, functools.partial(v1.train.Saver, sharded=sharded))


def write(session, name, version, saver_class):
    rng = np.random.default_rng(len(name))
    values = {}
    for variable in v1.global_variables():
        shape, kind = variable.shape.as_list(), variable.dtype.base_dtype
        if kind in (tf.string, tf.bool, tf.uint8):
            continue
        if kind.is_integer:
            info = np.iinfo(kind.as_numpy_dtype)
            value = rng.integers(info.min, info.max, shape) >> rng.integers(0, 60, shape)
        else:
            value = rng.normal(size=shape) * 0.3
            value = abs(value) + 0.5 if variable.op.name.endswith("variance") else value
        value = np.asarray(value, kind.as_numpy_dtype)
        variable.load(value, session)
        if kind == tf.bfloat16:
            value = value.astype(np.float32)
        part = variable._get_save_slice_info()
        if part is None:
            values[variable.op.name] = value
        else:
            whole = values.setdefault(part.full_name, np.zeros(part.full_shape, value.dtype))
            where = zip(part.var_offset, part.var_shape, strict=True)
            whole[tuple(slice(start, start + size) for start, size in where)] = value
    saver_class(write_version=version).save(
        session, str(HERE / name), write_meta_graph=False, write_state=False
    )
    shapes = {n: (str(v.dtype), v.shape) for n, v in values.items()}
    flat = np.frombuffer(b"".join(v.tobytes() for v in values.values()), np.uint8)
    np.savez_compressed(
        HERE / f"{name.removesuffix('.ckpt')}_expected.npz", index=json.dumps(shapes), values=flat
    )


if __name__ == "__main__":
    v1.disable_eager_execution()
    v1.disable_resource_variables()
    V1, V2 = v1.train.SaverDef.V1, v1.train.SaverDef.V2
    save_net("tf_v1_fcn.ckpt", V1, "resnet_v1_50", v1.train.MomentumOptimizer(0.1, 0.9))
    save_net("tf_v2_fcn", V2, "fcn/resnet_v1_50", v1.train.AdamOptimizer(0.1))
    save_types("tf_v1_types.ckpt", V1)
    save_types("tf_v2_types", V2)
