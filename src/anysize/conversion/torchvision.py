"""The ResNets of torchvision and timm, by the names in their state dicts.

`conv1.weight`, `bn1.*`, `layer1.0.conv1.weight`, `layer1.0.downsample.0.weight`, ..., `fc.*`: both
systems use the same names and compute the same function, so a file does not say which one wrote it,
nor which training recipe made it. Input strides are in the first unit's 3x3, the first unit of a
dilated block keeps the rate of the block before, the pooling pads one cell on both sides, and
pixels are RGB / 255, less a mean, over a standard deviation.

In the basic units of ResNet-18 and 34 it is the first 3x3 that has the stride and keeps the rate.
torchvision has no dilation for them; the rule is timm's.

A state dict does not say everything. timm's `resnetblur50` and `resnetaa50` have all names and
shapes of `resnet50`, and so have nets of other collections that keep Caffe's stride position or its
pixels: who converts one of these gets another function than it was trained for.

Source: torchvision 0.29.1 `models/resnet.py`; timm 1.0.31 `models/resnet.py`, whose settings for
resnet50, resnet101 and resnet152 all have the ImageNet mean and standard deviation.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anysize.config import PixelConvention
from anysize.conversion.foreign import A_NUMBER, Foreign, depth_of, model_config
from anysize.errors import WeightsError, first_names

__all__ = ["foreign_from_torchvision"]

PIXELS = PixelConvention(
    channel_order="RGB", max_value=1.0, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
)

_NORM = {
    "weight": "gamma",
    "bias": "beta",
    "running_mean": "moving_mean",
    "running_var": "moving_variance",
}
_LAYERS = {
    "conv1": ("conv1", "bn1"),
    "conv2": ("conv2", "bn2"),
    "conv3": ("conv3", "bn3"),
    "shortcut": ("downsample.0", "downsample.1"),
}
_UNIT = re.compile(r"layer(\d+)\.(\d+)\.")
_FIRST_OF_UNIT = r"layer\d+\.\d+\.conv1\.weight"
_OF_THE_BODY = re.compile(r"(conv1|bn1|layer\d+)\.")
_SEGMENTATION = ("classifier.", "aux_classifier.")
_SEGMENTATION_HEAD = "head of a segmentation net"
_LOOKALIKES = (
    "timm's resnetblur18, resnetblur50 and resnetaa50 have all names and shapes of plain ResNets, "
    "but blur before their strides: of these, the results will be wrong."
)
_AT_STRIDE_8 = (
    "torchvision trains the bodies of its segmentation nets at output stride 8: set "
    "model.output_stride = 8 in a run.toml to go on at it."
)

_GIVEN_AWAY_BY_NAME = (
    (r"conv1\.\d", "a stem of several 3x3 convolutions (ResNet-C, -D or -S)"),
    (r"layer\d+\.\d+\.downsample\.[2-9]", "pooling in its shortcuts (ResNet-D)"),
    (r"maxpool\.", "a convolution in place of the pooling"),
    (r"layer\d+\.\d+\.(se|se_module|eca|attn)\.", "channel attention (SE, ECA or the like)"),
    (r".*\.filt$", "blurring before its strides (anti-aliased)"),
    (r"layer\d+\.\d+\.(convs|bns|conv\d)\.\D*\d*\.", "units of split convolutions"),
    (r"(stem|stages|embedder)\.", "the layout of ResNet v2, or of another net"),
)


def foreign_from_torchvision(
    tensors: Mapping[str, NDArray[Any]],
    path: Path,
    *,
    prefix: str = "",
    others: Iterable[str] = (),
) -> Foreign:
    """Finds a ResNet in a state dict, below any prefix; depth and width are found too.

    Of torchvision's segmentation nets, whose body is `backbone.*`, the body is taken. Weights
    averaged over steps are taken where there are no others, or where `prefix` names them.

    Args:
        tensors: By the names in the file.
        path: Named in messages.
        prefix: Of several nets, what the names of the one to take begin with.
        others: Names of what the file holds besides tensors.

    Raises:
        WeightsError: It is another net, and what gave it away; or it is not clear which is meant.
    """
    nets = _prefixes(tensors)
    chosen = _choose(tensors, nets, prefix, path)
    outside, inside = _outside(tensors, chosen, [p for p in nets if p != chosen])
    left_out = dict.fromkeys(others, "not weights") | outside
    shapes = {n: tuple(tensors[o].shape) for n, o in inside.items()}
    units, base_depth, basic = _read_shape(shapes, path)
    ours = _our_names(units, basic=basic)
    unknown: list[str] = []
    beside: list[str] = []
    for name, outer in inside.items():
        if name in ours:
            continue
        if name in ("fc.weight", "fc.bias"):
            left_out[outer] = "classifier of whole images"
        elif name.endswith(".num_batches_tracked"):
            left_out[outer] = "a counter of training steps"
        elif name.rpartition(".")[2] in ("total_ops", "total_params"):
            left_out[outer] = "a profiler's counts"
        elif _OF_THE_BODY.match(name):
            unknown.append(outer)
        elif not shapes[name]:
            left_out[outer] = A_NUMBER
        else:
            beside.append(outer)
    taken = {outer: ours[name] for name, outer in inside.items() if name in ours}
    segments = _SEGMENTATION_HEAD in outside.values()
    config = model_config(
        units,
        base_depth,
        basic=basic,
        pool_padding="torchvision",
        stride_position="first_3x3",
        dilation_rule="previous",
    )
    return Foreign(
        source=f"torchvision or timm {_title(units, base_depth, basic=basic)}"
        + (", weights averaged over steps" if _is_averaged(chosen, tensors) else "")
        + (", the body of a segmentation net" if segments else ""),
        config=dataclasses.replace(config, output_stride=8) if segments else config,
        pixels=PIXELS,
        tensors={own: np.asarray(tensors[outer], np.float32) for outer, own in taken.items()},
        taken=taken,
        left_out=left_out,
        unknown=tuple(unknown),
        beside=tuple(beside),
        notes=(_LOOKALIKES, *((_AT_STRIDE_8,) if segments else ())),
    )


def _prefixes(names: Iterable[str]) -> list[str]:
    """What stands before the names of each net in the file; "" where nothing does."""
    found = set(names)
    stems = [n.removesuffix("conv1.weight") for n in found if re.search(r"(^|\.)conv1\.weight$", n)]
    return sorted(p for p in stems if f"{p}layer1.0.conv1.weight" in found)


def _choose(names: Iterable[str], nets: Sequence[str], asked: str, path: Path) -> str:
    """The prefix of the net to take."""
    listed = first_names((p or "." for p in nets), 8)
    if asked == "." and "" in nets:
        return ""
    if asked:
        wanted = asked.rstrip(".") + "."
        found = [p for p in nets if p == wanted] or [p for p in nets if p.startswith(wanted)]
        if len(found) == 1:
            return found[0]
        trouble = "several ResNets" if found else "no ResNet"
        raise WeightsError(
            f"{path} holds {trouble} below {asked!r}. Those that it holds: {listed}."
        )
    if not nets:  # It is another net, and its layers say which.
        alike = {n[: m.start(1)] for n in names if (m := re.search(r"(?:^|\.)(layer1\.0\.)", n))}
        return min(alike, key=len, default=_shared_prefix(names))
    plain = [p for p in nets if not _is_averaged(p, names)]
    if len(nets) > 1 and len(plain) != 1:
        raise WeightsError(
            f"{path} holds {len(nets)} ResNets, whose names begin with {listed}. Name the one to "
            f"take, such as --prefix {max(plain or nets)}"
        )
    return (plain or nets)[0]


def _outside(
    tensors: Mapping[str, NDArray[Any]], chosen: str, rivals: Sequence[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """What is not of the chosen net, with the reason; and of the rest, inner name to full name."""
    outside: dict[str, str] = {}
    inside: dict[str, str] = {}
    heads = tuple(chosen.removesuffix("backbone.") + head for head in _SEGMENTATION)
    segments = chosen.endswith("backbone.") and any(
        n.startswith(heads) and t.ndim == 4 for n, t in tensors.items()
    )
    for name in tensors:
        rival = max((p for p in rivals if name.startswith(p)), key=len, default=None)
        if rival is not None and not (len(chosen) > len(rival) and name.startswith(chosen)):
            averaged = _is_averaged(rival, tensors)
            what = "weights averaged over steps" if averaged else "another net"
            outside[name] = f"{what}; --prefix {rival or '.'} takes them"
        elif name.endswith("n_averaged"):
            outside[name] = "a counter of averaged steps"
        elif name.startswith(chosen):
            inside[name.removeprefix(chosen)] = name
        elif segments and name.startswith(heads):
            outside[name] = _SEGMENTATION_HEAD
        else:
            outside[name] = f"outside the net, whose names begin with {chosen}"
    return outside, inside


def _shared_prefix(names: Iterable[str]) -> str:
    """What wrappers (data parallel, averaging, compilation) put before every name."""
    counted = [n for n in names if not n.endswith("n_averaged")]
    prefix = ""
    while counted:
        first, dot, _ = counted[0][len(prefix) :].partition(".")
        longer = prefix + first + dot
        if not dot or not all(n.startswith(longer) for n in counted):
            break
        prefix = longer
    return prefix


def _is_averaged(prefix: str, names: Iterable[str]) -> bool:
    """Whether the names below a prefix are those of weights that were averaged over steps."""
    parts = re.split(r"[._]", prefix)
    outer = prefix.removesuffix("module.")
    return bool({"ema", "averaged", "swa"} & set(parts)) or f"{outer}n_averaged" in set(names)


def _read_shape(
    shapes: Mapping[str, tuple[int, ...]], path: Path
) -> tuple[tuple[int, ...], int, bool]:
    """Units in each block, channels of the stem, and whether units are basic; or it is refused."""
    for pattern, what in _GIVEN_AWAY_BY_NAME:
        for name in shapes:
            if re.match(pattern, name):
                raise _other_net(path, f"{name} is of a net with {what}")
    stem = shapes.get("conv1.weight")
    if stem is None or not any(_UNIT.match(n) for n in shapes):
        some = ", ".join(list(shapes)[:4])
        raise _other_net(path, f"it has no conv1.weight or no layer1.0, but {some}")
    if stem[1:] != (3, 7, 7):
        raise _other_net(path, f"conv1.weight is {stem}, not 7x7 over 3 channels")
    if "bn1.running_mean" not in shapes:
        raise _other_net(path, "bn1 has no running_mean, so its norm is not a batch norm")
    units = _count_units(shapes, path)
    for block, num_units in enumerate(units, 1):
        for unit in range(num_units):
            _check_unit(shapes, f"layer{block}.{unit}", stem[0] << (block - 1), path)
    basic = [s[2:] == (3, 3) for n, s in shapes.items() if re.fullmatch(_FIRST_OF_UNIT, n)]
    if len(set(basic)) > 1:
        raise _other_net(path, "some of its units begin with a 3x3 convolution, others with a 1x1")
    return units, stem[0], basic[0]


def _count_units(shapes: Mapping[str, tuple[int, ...]], path: Path) -> tuple[int, ...]:
    matches = [m for m in map(_UNIT.match, shapes) if m]
    found = {(int(m[1]), int(m[2])) for m in matches}
    units = tuple(sum(block == b for b, _ in found) for block in range(1, 5))
    expected = {(block, u) for block, n in enumerate(units, 1) for u in range(n)}
    if 0 in units or found != expected:
        raise _other_net(
            path,
            f"its layers have {list(units)} units"
            + (", with gaps in their numbers or a fifth layer" if found != expected else ""),
        )
    return units


def _check_unit(shapes: Mapping[str, tuple[int, ...]], name: str, depth: int, path: Path) -> None:
    first, second = shapes.get(f"{name}.conv1.weight"), shapes.get(f"{name}.conv2.weight")
    if first is None or second is None or len(first) != 4 or len(second) != 4:
        raise _other_net(path, f"{name} has no conv1 and conv2")
    if (first[2:] == (3, 3)) == (f"{name}.conv3.weight" in shapes):
        raise _other_net(path, f"{name} has neither the convolutions 1x1, 3x3, 1x1 nor 3x3, 3x3")
    if second[1] != second[0]:
        groups = second[0] // max(second[1], 1)
        raise _other_net(path, f"{name}.conv2 has {groups} groups (ResNeXt)")
    if second[0] != depth:
        raise _other_net(
            path, f"{name}.conv2 has {second[0]} channels, not {depth} (a wide ResNet or pruned)"
        )


def _other_net(path: Path, what: str) -> WeightsError:
    return WeightsError(
        f"{path} is a state dict of another net: {what}. Anysize takes ResNet v1, as torchvision "
        "and timm build resnet18, 34, 50, 101 and 152."
    )


def _our_names(units: Sequence[int], *, basic: bool) -> dict[str, str]:
    """Every name that such a net has there, and ours."""
    layers = {("conv1", "bn1"): "body.conv1"}
    for block, num_units in enumerate(units, 1):
        for unit in range(num_units):
            for own, (conv, norm) in _LAYERS.items():
                if own == "conv3" and basic:
                    continue
                there = f"layer{block}.{unit}."
                here = f"body.units.block{block}_unit{unit + 1}.{own}"
                layers[there + conv, there + norm] = here
    names: dict[str, str] = {}
    for (conv, norm), own in layers.items():
        names[f"{conv}.weight"] = f"{own}.weights"
        names.update({f"{norm}.{n}": f"{own}.{ours}" for n, ours in _NORM.items()})
    return names


def _title(units: tuple[int, ...], base_depth: int, *, basic: bool) -> str:
    depth = depth_of(units, basic=basic)
    if depth and base_depth == 64:
        return f"ResNet-{depth}"
    kind = "basic units" if basic else "bottlenecks"
    return f"ResNet of {list(units)} {kind}, {base_depth} channels in the stem"
