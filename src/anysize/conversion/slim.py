"""Takes over TF-Slim's resnet_v1: body, and a transposed-convolution head where there is one.

A checkpoint holds variables by name, nothing of the graph. The names tell the depth, the shapes the
widths. Not in the file, and so taken as `resnet_v1` has them: stride in the last unit of a block,
SAME padding, 3x3 heads of stride 2, RGB from 0 to 255 minus the mean of VGG. No torch here.

Sources: tf_slim 1.1.0 `nets/resnet_v1.py`, `nets/resnet_utils.py`; pose-tensorflow for the heads of
pose estimation, `pose/{part_pred,locref_pred,pairwise_pred,intermediate_supervision}/block4`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anysize.config import INTERMEDIATE_UNIT, PixelConvention
from anysize.conversion.foreign import A_NUMBER, NO_HEAD, Foreign, model_config
from anysize.conversion.tf_checkpoint import TfCheckpoint, read_tf_checkpoint
from anysize.errors import WeightsError, first_names
from anysize.models.levels import num_out

__all__ = ["from_checkpoint", "read_slim"]

Shape = tuple[int, ...]

_first = functools.partial(first_names, most=3)

_UNIT = re.compile(r"^(?:(?P<scope>.+)/)?block(?P<block>\d+)/unit_(?P<unit>\d+)/bottleneck_v1/")
_NORM = {  # name in the file to ours
    "BatchNorm/gamma": "gamma",
    "BatchNorm/beta": "beta",
    "BatchNorm/moving_mean": "moving_mean",
    "BatchNorm/moving_variance": "moving_variance",
}
_BOOKKEEPING = re.compile(
    r"(^|/)(global_step|learning_rate|beta[12]_power(_\d+)?|mean_rgb|_CHECKPOINTABLE_OBJECT_GRAPH)$"
)
_ZERO_DEBIAS = re.compile(r"/BatchNorm/moving_(mean|variance)/(biased|local_step)$")
_JOINT_HEADS = ("part_pred", "locref_pred")
_PAIRWISE = "ways between joints, which Anysize does not predict"
_OF_BLOCK_3 = "its input is block 3, and a head of Anysize takes block 4"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """A tensor of the net: its shape in the file, and our name."""

    name: str
    shape: Shape


def read_slim(path: Path, *, head: str = "", prefix: str = "", joints: bool = False) -> Foreign:
    """Reads a TF-Slim checkpoint of resnet_v1, V1 or V2.

    Args:
        path: As `read_tf_checkpoint` takes it.
        head: Scope of the head to take (`pose/part_pred/block4`), or its last part (`part_pred`).
            Empty takes the only one, or `part_pred` among those of pose estimation. "none" takes
            the body alone.
        prefix: Of several nets, the scope of the one to take.
        joints: Take the heads of pose estimation together, as a net of joints has them.

    Raises:
        WeightsError: The file is damaged or of another net, the net differs from resnet_v1 in what
            Anysize cannot do, or it is not clear which head is meant.
    """
    checkpoint = read_tf_checkpoint(path)
    return from_checkpoint(checkpoint, head=head, prefix=prefix, joints=joints)


def from_checkpoint(
    checkpoint: TfCheckpoint, *, head: str = "", prefix: str = "", joints: bool = False
) -> Foreign:
    """`read_slim` for a checkpoint that is already read."""
    path, tensors = checkpoint.path, checkpoint.tensors
    scopes = _scopes(checkpoint)
    scope = _choose_scope(scopes, prefix, path)
    units = _units(tensors, scope, path)
    base_depth = _base_depth(tensors, scope, path)
    wanted = _body(scope, units, base_depth)
    channels = num_out(base_depth, block=3)
    _check_norms(wanted, tensors, path)

    heads = _heads(tensors, wanted, channels)
    if joints:
        modules = _choose_joints(heads, tensors, units, path)
        chosen = modules["head"][0]
        heads |= {s: _PAIRWISE for s in heads if _short(s) == "pairwise_pred"}
    else:
        chosen = _choose(heads, head, path)
        modules = {"head": [chosen]} if chosen else {}
    left_out = _left_out(checkpoint, scope, wanted, heads, chosen, channels)
    for name in sorted(tensors.keys() - wanted.keys()):
        rival = next((s for s in scopes if s != scope and name.startswith(s)), "")
        if rival and not name.startswith(scope or " "):
            left_out[name] = f"another net; --prefix {rival} takes it"
    for module, taken in modules.items():
        for name in (f"{s}/{kind}" for s in taken for kind in ("weights", "biases")):
            left_out.pop(name, None)
            if name in tensors:
                kind = name.rpartition("/")[2]
                wanted[name] = _Tensor(name=f"{module}.{kind}", shape=tensors[name].shape)

    _check_shapes(wanted, tensors, path)
    ours: dict[str, NDArray[np.float32]] = {}
    for name, t in wanted.items():
        tensor = _in_our_layout(tensors[name], name, path)
        if t.name in ours:  # Heads side by side, by their output channels.
            tensor = np.concatenate([ours[t.name], tensor], axis=min(tensor.ndim - 1, 1))
        ours[t.name] = tensor
    if chosen and "head.biases" not in ours:
        ours["head.biases"] = np.zeros(ours["head.weights"].shape[1], np.float32)
    config = model_config(
        units,
        base_depth,
        pool_padding="same",
        stride_position="last_3x3",
        dilation_rule="new",
    )
    if "intermediate" in modules:
        config = dataclasses.replace(config, intermediate=True)
    net = f"units {units}" if config.units else f"resnet_v1_{config.depth}"
    with_head = "".join(f", head {scope}" for taken in modules.values() for scope in taken)
    rest = sorted({*tensors, *checkpoint.undecoded} - set(wanted) - set(left_out))
    return Foreign(
        source=f"TF-Slim {net}{with_head}, {checkpoint.version} checkpoint",
        config=config,
        pixels=PixelConvention(),
        tensors=ours,
        taken={n: t.name for n, t in wanted.items()},
        left_out=left_out,
        unknown=tuple(n for n in rest if _is_within(scope, n)),
        beside=tuple(n for n in rest if not _is_within(scope, n)),
    )


# ---- the body ----


def _scopes(checkpoint: TfCheckpoint) -> list[str]:
    """What stands before `conv1/weights` of each net, with its slash; "" where nothing does."""
    path, names = checkpoint.path, checkpoint.tensors
    found = sorted(
        {
            name.removesuffix("block1/unit_1/bottleneck_v1/conv1/weights")
            for name in names
            if re.search(r"(^|/)block1/unit_1/bottleneck_v1/conv1/weights$", name)
        }
    )
    if found:
        return found
    everything = sorted({*names, *checkpoint.undecoded})
    if any(n.endswith("/.ATTRIBUTES/VARIABLE_VALUE") for n in everything):
        raise WeightsError(
            f"{path} was written by the object-based saver of TensorFlow 2 or Keras, whose names "
            f"are those of Python attributes ({_first(everything)}). Anysize reads the name-based "
            "checkpoints of tf.compat.v1.train.Saver."
        )
    if any(re.search(r"/bottleneck_v2/|/preact/|/postnorm/", n) for n in everything):
        raise WeightsError(
            f"{path} is of another net: resnet_v2, which norms before its convolutions "
            f"({_first(everything)}). Anysize takes resnet_v1."
        )
    raise WeightsError(
        f"{path} is of another net. Anysize takes resnet_v1 of TF-Slim, with variables such as "
        "resnet_v1_50/block1/unit_1/bottleneck_v1/conv1/weights; this one has "
        f"{_first(everything)}."
    )


def _choose_scope(scopes: Sequence[str], asked: str, path: Path) -> str:
    wanted = "" if asked == "." else asked.rstrip("/") + "/"
    found = [s for s in scopes if not asked or s == wanted]
    if len(found) != 1:
        listed = first_names((s or "." for s in scopes), 8)
        raise WeightsError(
            f"{path} holds {len(scopes)} nets: {listed}. Name the one to take with --prefix, or "
            "save a checkpoint of it alone."
        )
    return found[0]


def _is_within(scope: str, name: str) -> bool:
    """Whether a name is of the body, which only a changed net can have more of."""
    inner = name.removeprefix(scope)
    return name.startswith(scope) and re.match(r"(conv1|block\d+)/", inner) is not None


def _units(names: Iterable[str], scope: str, path: Path) -> tuple[int, ...]:
    found: dict[int, set[int]] = defaultdict(set)
    for name in names:
        match = _UNIT.match(name)
        if match and (match["scope"] or "") == scope.removesuffix("/"):
            found[int(match["block"])].add(int(match["unit"]))
    for block, units in sorted(found.items()):
        if units != set(range(1, len(units) + 1)):
            raise WeightsError(
                f"{path} has units {', '.join(map(str, sorted(units)[:8]))} in block {block}; some "
                "are missing. Save a checkpoint of the whole net."
            )
    if set(found) != {1, 2, 3, 4}:
        raise WeightsError(
            f"{path} has blocks {', '.join(map(str, sorted(found)[:8]))}; a resnet_v1 has 1 to 4. "
            "Save a checkpoint of the whole net."
        )
    return tuple(len(found[b]) for b in (1, 2, 3, 4))


def _base_depth(tensors: Mapping[str, NDArray[Any]], scope: str, path: Path) -> int:
    name = f"{scope}conv1/weights"
    if name not in tensors:
        raise WeightsError(f"{path} lacks {name}. Save a checkpoint of the whole net.")
    shape = tensors[name].shape
    if len(shape) != 4 or shape[:3] != (7, 7, 3) or not shape[3]:
        raise WeightsError(
            f"{name} has shape {shape}, not (7, 7, 3, channels) ({path}). Anysize takes resnet_v1 "
            "with its root block on colour images."
        )
    return shape[3]


def _body(scope: str, units: tuple[int, ...], base_depth: int) -> dict[str, _Tensor]:
    """All tensors of the body, by their names in the file."""
    wanted: dict[str, _Tensor] = {}

    def add(theirs: str, ours: str, shape: Shape) -> None:
        wanted[f"{theirs}/weights"] = _Tensor(name=f"{ours}.weights", shape=shape)
        for norm, name in _NORM.items():
            wanted[f"{theirs}/{norm}"] = _Tensor(name=f"{ours}.{name}", shape=shape[3:])

    add(f"{scope}conv1", "body.conv1", (7, 7, 3, base_depth))
    num_in = base_depth
    for block, num_units in enumerate(units, start=1):
        depth, deep = base_depth << (block - 1), num_out(base_depth, block - 1)
        for unit in range(1, num_units + 1):
            theirs = f"{scope}block{block}/unit_{unit}/bottleneck_v1"
            ours = f"body.units.block{block}_unit{unit}"
            if num_in != deep:
                add(f"{theirs}/shortcut", f"{ours}.shortcut", (1, 1, num_in, deep))
            add(f"{theirs}/conv1", f"{ours}.conv1", (1, 1, num_in, depth))
            add(f"{theirs}/conv2", f"{ours}.conv2", (3, 3, depth, depth))
            add(f"{theirs}/conv3", f"{ours}.conv3", (1, 1, depth, deep))
            num_in = deep
    return wanted


def _check_norms(
    wanted: Mapping[str, _Tensor], tensors: Mapping[str, NDArray[Any]], path: Path
) -> None:
    """Says what is the matter where the net was built with other settings of its norms."""
    missing = [n for n in wanted if n not in tensors]
    gammas = [n for n in missing if n.endswith("/gamma") and n[: -len("gamma")] + "beta" in tensors]
    if gammas:
        raise WeightsError(
            f"{path} has norms without gamma ({_first(gammas)}): the net was built with "
            "batch_norm_scale=False. Anysize takes resnet_v1 with its own arg scope, which has it."
        )
    biases = [n for n in (f"{w.removesuffix('/weights')}/biases" for w in wanted) if n in tensors]
    if biases:
        raise WeightsError(
            f"{path} has convolutions of the body with biases ({_first(biases)}): the net was "
            "built without resnet_arg_scope. Anysize takes convolutions with a norm and no biases."
        )
    if missing:
        raise WeightsError(
            f"{path} lacks {len(missing)} tensors of the body: {_first(missing)}. Save a "
            "checkpoint of all model variables."
        )


def _check_shapes(
    wanted: Mapping[str, _Tensor], tensors: Mapping[str, NDArray[Any]], path: Path
) -> None:
    for name, tensor in wanted.items():
        if tensors[name].shape != tensor.shape:
            raise WeightsError(
                f"{name} has shape {tensors[name].shape}, where resnet_v1 of this width has "
                f"{tensor.shape} ({path}). Anysize takes resnet_v1 with its own widths."
            )


def _in_our_layout(tensor: NDArray[Any], name: str, path: Path) -> NDArray[np.float32]:
    if tensor.dtype.kind != "f":
        raise WeightsError(f"{name} holds {tensor.dtype}, not floats ({path}). Take another file.")
    # Convolutions [kh, kw, in, out] to [out, in, kh, kw]; transposed ones [kh, kw, out, in] to
    # [in, out, kh, kw]: the same exchange, and no flip.
    turned = tensor.transpose(3, 2, 0, 1) if tensor.ndim == 4 else tensor
    return np.array(turned, np.float32, order="C")  # a copy: what was read stays as it is


# ---- heads, and the rest ----


def _heads(
    tensors: Mapping[str, NDArray[Any]], body: Mapping[str, _Tensor], num_out: int
) -> dict[str, str]:
    """Scopes of transposed convolutions outside the body; why each cannot be taken, "" if it can.

    Their weights are [kh, kw, classes, in], and biases a class tell them from convolutions.
    """
    heads: dict[str, str] = {}
    for name, tensor in tensors.items():
        scope, _, last = name.rpartition("/")
        if last != "weights" or name in body or tensor.ndim != 4:
            continue
        if f"{scope}/BatchNorm/beta" in tensors:  # a convolution of a decoder, say
            continue
        height, width, num_classes, num_in = tensor.shape
        biases = tensors.get(f"{scope}/biases")
        if min(height, width) < 2 or (biases is not None and biases.shape != (num_classes,)):
            continue
        if num_in == num_out // 2:
            heads[scope] = _OF_BLOCK_3
        elif num_in == num_out and num_classes:
            ours = (height, width) == (3, 3)
            heads[scope] = (
                "" if ours else f"its kernel is {height}x{width}, and a head of Anysize is 3x3"
            )
    return heads


def _short(scope: str) -> str:
    """`pose/part_pred/block4` is called `part_pred`."""
    return scope.removesuffix("/block4").rpartition("/")[2]


def _choose(heads: Mapping[str, str], asked: str, path: Path) -> str:
    """The scope of the head to take; empty for none."""
    fitting = [s for s, reason in heads.items() if not reason]
    if asked == NO_HEAD:
        return ""
    if asked:
        found = [s for s in heads if asked in (s, s.removesuffix("/block4"), _short(s))]
        if len(found) != 1:
            trouble = "is not in" if not found else "names several heads of"
            raise WeightsError(
                f"The head {asked!r} {trouble} {path}. It has {first_names(heads, 20)}. Name one "
                f"of them, or {NO_HEAD!r}."
            )
        if heads[found[0]]:
            raise WeightsError(
                f"The head {found[0]} of {path} cannot be taken: {heads[found[0]]}. Those that "
                f"can: {first_names(fitting, 20)}."
            )
        return found[0]
    if len(fitting) > 1:
        pose = [s for s in fitting if _short(s) == "part_pred"]
        if len(pose) == 1:
            return pose[0]
        raise WeightsError(
            f"{path} has {len(fitting)} heads: {first_names(sorted(fitting), 20)}. Name the one to "
            f"take with --head NAME, or none of them with --head {NO_HEAD}."
        )
    odd = [s for s, reason in heads.items() if reason and reason != _OF_BLOCK_3]
    if odd and not fitting:
        raise WeightsError(
            f"The head {odd[0]} of {path} cannot be taken: {heads[odd[0]]}. Take the body alone "
            f"with --head {NO_HEAD}."
        )
    return fitting[0] if fitting else ""


def _choose_joints(
    heads: Mapping[str, str],
    tensors: Mapping[str, NDArray[Any]],
    units: tuple[int, ...],
    path: Path,
) -> dict[str, list[str]]:
    """The scopes that our modules of a net of joints are made of.

    Source: pose-tensorflow `nnet/pose_net.py`.
    """
    found = {_short(s): s for s, reason in heads.items() if reason in ("", _OF_BLOCK_3)}
    missing = [name for name in _JOINT_HEADS if name not in found]
    if missing:
        raise WeightsError(
            f"{path} lacks the head {missing[0]} of a net of joints. It has "
            f"{first_names(heads, 20)}. Take part maps alone with --loss sigmoid."
        )
    parts, locations = (found[name] for name in _JOINT_HEADS)
    num = [tensors[f"{scope}/weights"].shape[2] for scope in (parts, locations)]
    if num[1] != 2 * num[0] or any(f"{s}/biases" not in tensors for s in (parts, locations)):
        raise WeightsError(
            f"{path} has {num[0]} part maps and {num[1]} locations; each joint has one and two, "
            "with biases. Take another file."
        )
    modules = {"head": [parts, locations]}
    middle = found.get("intermediate_supervision")
    if middle and units[2] >= INTERMEDIATE_UNIT:
        modules["intermediate"] = [middle]
    return modules


def _left_out(
    checkpoint: TfCheckpoint,
    scope: str,
    body: Mapping[str, _Tensor],
    heads: Mapping[str, str],
    chosen: str,
    num_out: int,
) -> dict[str, str]:
    """What a conversion needs not take, and why."""
    tensors = checkpoint.tensors
    left_out: dict[str, str] = {}
    for name in (*tensors, *checkpoint.undecoded):
        parent, _, last = name.rpartition("/")
        if name in body:
            continue
        beside = not _is_within(scope, name)
        if last in ("weights", "biases") and parent in heads:
            free = f"another head; take it with --head {_short(parent)}"
            reason = heads[parent] or (free if chosen else "a head, left out as asked")
        elif last in ("weights", "biases") and _is_classifier(tensors, parent, scope, num_out):
            reason = "the classifier of whole images"
        elif _BOOKKEEPING.search(name):
            reason = "bookkeeping of the training"
        elif _ZERO_DEBIAS.search(name):
            reason = "bookkeeping of the norm's moving average"
        elif _is_of_a_variable(tensors, name):
            average = last.startswith("ExponentialMovingAverage")
            reason = "moving average; the value itself is taken" if average else "optimiser's slot"
        elif beside and name in checkpoint.undecoded:
            reason = f"of type {checkpoint.undecoded[name]}, which no weights of the net have"
        elif beside and not tensors[name].shape and not (chosen and name.startswith(f"{chosen}/")):
            reason = A_NUMBER
        else:
            continue
        left_out[name] = reason
    return left_out


def _is_classifier(
    tensors: Mapping[str, NDArray[Any]], parent: str, scope: str, num_out: int
) -> bool:
    weights = tensors.get(f"{parent}/weights")
    return (
        parent == f"{scope}logits"
        and weights is not None
        and weights.shape[:-1] in ((1, 1, num_out), (num_out,))
    )


def _is_of_a_variable(tensors: Mapping[str, NDArray[Any]], name: str) -> bool:
    """Slots and averages are called after their variable: its name, a slash and their own.

    An optimiser that was made inside a scope puts the scope in front of it all.
    """
    parent = name.rpartition("/")[0]
    while name in tensors and parent:
        if parent in tensors and tensors[parent].shape == tensors[name].shape:
            return True
        parent = parent.partition("/")[2]
    return False
