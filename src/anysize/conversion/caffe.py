"""ResNets of Caffe, by the names of KaimingHe's nets, into our tensors.

`res3b_branch2a` is the first convolution of the second unit of the second block; its norm is a
BatchNorm `bn3b_branch2a` (mean * f, variance * f, f) and a Scale `scale3b_branch2a` (gamma, beta).
Units are a, b, c, ... or, in long blocks, a, b1, b2, ... Strides and dilations are in the file and
decide our rules. Everything is folded in float64 and rounded once.

Sources: KaimingHe/deep-residual-networks prototxts; BVLC/caffe `batch_norm_layer.cpp`,
`scale_layer.cpp`, `deconv_layer.cpp`, `pooling_layer.cpp`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from anysize.config import PixelConvention
from anysize.conversion.caffemodel import Layer, Window, read_caffemodel, read_mean
from anysize.conversion.foreign import Foreign, depth_of, model_config
from anysize.errors import WeightsError, first_names
from anysize.models.levels import num_out

__all__ = ["convert_layers", "read_caffe"]

Array64 = NDArray[np.float64]
Array = NDArray[np.float32] | Array64

MEAN_PIXEL = (103.939, 116.779, 123.68)
"""Of ImageNet, in the order B, G, R, for files that come without their mean image."""

_EPSILON = 1e-5
"""Of our norm."""

_CONVOLUTION = re.compile(r"res([2-5])([a-z]|b[1-9]\d{0,2})_branch(1|2a|2b|2c)")
_PARTS = {"1": "shortcut", "2a": "conv1", "2b": "conv2", "2c": "conv3"}


@dataclass(frozen=True, slots=True)
class _Body:
    """The convolutions of the body, by our names, and what they say about the net."""

    convolutions: Mapping[str, Layer]
    units: tuple[int, ...]
    base_depth: int
    last_unit: str
    """Names of the layers that end the body begin with it: "res5c"."""


def read_caffe(path: Path, *, mean: Path | None = None, head: str = "") -> Foreign:
    """Reads a `.caffemodel` of ResNet-50, 101, 152, or of other depths and widths by their names.

    Args:
        path: The file.
        mean: A mean image; its mean pixel is taken, since our images have any size.
        head: Name of the transposed convolution to take as our head; empty takes the only one that
            is one.

    Raises:
        WeightsError: As `read_caffemodel`; the net is another one, or has layers, strides or
            dilations that ours cannot have; or `head` is not our head.
    """
    layout, layers = read_caffemodel(path)
    pixels = PixelConvention(
        channel_order="BGR", mean=read_mean(mean) if mean is not None else MEAN_PIXEL
    )
    body = _find_body(layers, str(path))
    rules, output_stride, stated = _rules(body, layers, str(path))
    tensors, taken, left_out = convert_layers(layers, str(path), head=head)
    rest = [
        n for layer in layers for n in _blob_names(layer) if n not in taken and n not in left_out
    ]
    of_body = re.compile(r"(conv1|bn_conv1|scale_conv1|(res|bn|scale)[2-5]\w+)\[")
    known = depth_of(body.units)
    depth = f"-{known}" if known else ""
    width = "" if body.base_depth == 64 else f" of base depth {body.base_depth}"
    dilated = "" if output_stride == 32 else f", dilated to output stride {output_stride}"
    return Foreign(
        source=f"Caffe ResNet{depth}{width} ({layout} layers{dilated})",
        config=replace(
            model_config(body.units, body.base_depth, basic=False, **rules),
            output_stride=output_stride,
        ),
        pixels=pixels,
        tensors={n: a.astype(np.float32, copy=False) for n, a in tensors.items()},
        taken=taken,
        left_out=left_out,
        unknown=tuple(n for n in rest if of_body.match(n)),
        beside=tuple(n for n in rest if not of_body.match(n)),
        stated=stated,
    )


def convert_layers(
    layers: Sequence[Layer], source: str, *, head: str = ""
) -> tuple[dict[str, Array], dict[str, str], dict[str, str]]:
    """Folds the layers into our tensors, in float64; weights of convolutions are as in the file.

    Returns:
        Tensors by our names; what was taken and what was left out, as in `Foreign`.

    Raises:
        WeightsError: As `read_caffe`.
    """
    by_name = _by_name(layers, source)
    body = _find_body(layers, source)
    has_norms = any(layer.type == "BatchNorm" for layer in layers)
    tensors: dict[str, Array] = {}
    taken: dict[str, str] = {}
    for ours, convolution in body.convolutions.items():
        suffix = convolution.name.removeprefix("res") if ours != "body.conv1" else "_conv1"
        norms = (by_name.get("bn" + suffix), by_name.get("scale" + suffix)) if has_norms else None
        folded, sources = _fold(convolution, norms, suffix, source)
        tensors.update({f"{ours}.{leaf}": array for leaf, array in folded.items()})
        for blob, leaves in sources.items():
            taken[blob] = " ".join(f"{ours}.{leaf}" for leaf in leaves.split(" "))
    left_out: dict[str, str] = {}
    chosen = _find_head(layers, body, head, source, left_out)
    if chosen is not None:
        weights = chosen.blobs[0]
        tensors["head.weights"] = weights
        tensors["head.biases"] = np.zeros(weights.shape[1])
        taken[f"{chosen.name}[0]"] = "head.weights"
        if len(chosen.blobs) > 1:
            tensors["head.biases"] = _vector(chosen, 1, weights.shape[1], source)
            taken[f"{chosen.name}[1]"] = "head.biases"
    _leave_out_class_layers(layers, body, {*taken}, left_out)
    return tensors, taken, left_out


def _blob_names(layer: Layer) -> list[str]:
    return [f"{layer.name}[{i}]" for i in range(len(layer.blobs))]


def _by_name(layers: Sequence[Layer], source: str) -> dict[str, Layer]:
    """The layers with blobs, of which each must have a name of its own."""
    named: dict[str, Layer] = {}
    for layer in layers:
        if layer.blobs and named.setdefault(layer.name, layer) is not layer:
            raise WeightsError(f"{source} has two layers of the name {layer.name!r} with weights.")
    return named


def _find_body(layers: Sequence[Layer], source: str) -> _Body:
    named = _by_name(layers, source)
    found = _named_convolutions(named, source)
    stem = named.get("conv1")
    if stem is None or stem.type != "Convolution" or not found:
        raise WeightsError(_another_net(named, source))
    if not any(part == "2c" for _, _, part in found):
        raise WeightsError(
            f"{source} is a ResNet of basic units (ResNet-18 or 34: no res2a_branch2c). Of Caffe's "
            "nets, Anysize takes those of bottlenecks; take ResNet-18 or 34 from torchvision."
        )
    for layer in (stem, *found.values()):
        if (layer.window and layer.window.group != 1) or layer.blobs[0].ndim != 4:
            raise WeightsError(
                f"{source}: the convolution {layer.name} has groups, or is not two-dimensional. "
                "Anysize has no ResNeXt. Take a plain ResNet-50, 101 or 152."
            )
    units = tuple(max((u for b, u, _ in found if b == block), default=-1) + 1 for block in range(4))
    convolutions = {"body.conv1": stem}
    missing: list[str] = []
    for block, unit in ((b, u) for b in range(4) for u in range(max(units[b], 1))):
        for part, ours in _PARTS.items():
            layer = found.get((block, unit, part))
            if layer is not None:
                convolutions[f"body.units.block{block + 1}_unit{unit + 1}.{ours}"] = layer
            elif part != "1" or unit == 0:
                missing.append(f"branch{part} of unit {unit + 1} of res{block + 2}")
    if missing:
        raise WeightsError(
            f"{source} is not a whole ResNet: it lacks {first_names(missing, 4)}. Take the file "
            "that the training wrote."
        )
    _check_shapes(convolutions, len(stem.blobs[0]), source)
    last = convolutions[f"body.units.block4_unit{units[3]}.conv3"].name.split("_")[0]
    return _Body(convolutions, units, len(stem.blobs[0]), last)


def _named_convolutions(
    named: Mapping[str, Layer], source: str
) -> dict[tuple[int, int, str], Layer]:
    """The convolutions of the four blocks, by (block, unit, branch), counted from 0."""
    found: dict[tuple[int, int, str], Layer] = {}
    for name, layer in named.items():
        match = _CONVOLUTION.fullmatch(name)
        if match is None or layer.type != "Convolution":
            continue
        unit = match[2]
        index = int(unit[1:]) if len(unit) > 1 else ord(unit) - ord("a")
        other = found.setdefault((int(match[1]) - 2, index, match[3]), layer)
        if other is not layer:
            raise WeightsError(f"{source} names one convolution twice: {other.name} and {name}.")
    return found


def _check_shapes(convolutions: Mapping[str, Layer], base_depth: int, source: str) -> None:
    num_in = base_depth
    for ours, layer in convolutions.items():
        part = ours.rsplit(".", 1)[1]
        if part == "conv1" and ours == "body.conv1":
            expected = (base_depth, 3, 7, 7)
        else:
            block = int(ours.removeprefix("body.units.block")[0]) - 1
            depth, deep = base_depth << block, num_out(base_depth, block)
            expected = {
                "shortcut": (deep, num_in, 1, 1),
                "conv1": (depth, num_in, 1, 1),
                "conv2": (depth, depth, 3, 3),
                "conv3": (deep, depth, 1, 1),
            }[part]
            num_in = deep if part == "conv3" else num_in
        if layer.blobs[0].shape != expected or base_depth < 1:
            raise WeightsError(
                f"{source} is a net of another shape: {layer.name} has weights "
                f"{layer.blobs[0].shape}, where a ResNet of base depth {base_depth} has {expected}."
            )


def _another_net(named: Mapping[str, Layer], source: str) -> str:
    guesses = {
        "conv1_1": "VGG",
        "conv1/7x7_s2": "GoogLeNet",
        "conv1_1_3x3_s2": "PSPNet",
        "conv_stage0_block0_branch2a": "a ResNet of other names",
    }
    guess = next((net for name, net in guesses.items() if name in named), "another net")
    first = ", ".join(list(named)[:4]) or "none"
    return (
        f"{source} is {guess}: its layers with weights begin with {first}. Anysize takes ResNets "
        "with KaimingHe's names (conv1, res2a_branch2a, ...)."
    )


def _fold(
    convolution: Layer,
    norms: tuple[Layer | None, Layer | None] | None,
    suffix: str,
    source: str,
) -> tuple[dict[str, Array], dict[str, str]]:
    """A convolution, its bias and the two layers of its norm, as our convolution with one norm.

    Caffe: gamma * (w * x + b - mean) / sqrt(variance + eps) + beta. Ours has no b, and an epsilon
    of its own, so b goes into the mean and the difference of the epsilons into gamma.

    Args:
        convolution: With or without bias.
        norms: BatchNorm and Scale; `None` where the file has no norms at all, which were then
            merged into weights and biases.
        suffix: Of the norms' names, for the message.
        source: The file.

    Returns:
        Our tensors by leaf; and for each blob the leaves that it went into, divided by spaces.
    """
    name, weights = convolution.name, convolution.blobs[0]
    num = len(weights)
    sources = {f"{name}[0]": "weights"}
    bias = np.zeros(num)
    if len(convolution.blobs) > 1:
        bias = _vector(convolution, 1, num, source)
        sources[f"{name}[1]"] = "moving_mean" if norms else "beta"
    mean, variance, gamma, beta = np.zeros(num), np.ones(num), np.ones(num), np.zeros(num)
    epsilon = 0.0
    if norms is None:
        beta = bias
        if len(convolution.blobs) < 2:
            raise WeightsError(
                f"{source} has no BatchNorm layers, and {name} has no bias either, so its norm is "
                "lost. Take the file that the training wrote."
            )
    else:
        batch_norm, scale = norms
        if batch_norm is None or scale is None:
            raise WeightsError(
                f"{source} lacks {'bn' if batch_norm is None else 'scale'}{suffix}, the norm of "
                f"{name}, while other norms are there. Take the file that the training wrote."
            )
        mean, variance = _statistics(batch_norm, num, source)
        mean = mean - bias
        epsilon = batch_norm.eps
        gamma = _vector(scale, 0, num, source)
        beta = _vector(scale, 1, num, source) if len(scale.blobs) > 1 else beta
        sources |= {
            f"{batch_norm.name}[0]": "moving_mean",
            f"{batch_norm.name}[1]": "moving_variance",
            f"{batch_norm.name}[2]": "moving_mean moving_variance",
            f"{scale.name}[0]": "gamma",
        }
        if len(scale.blobs) > 1:
            sources[f"{scale.name}[1]"] = "beta"
    if not np.all(variance + epsilon > 0):
        raise WeightsError(
            f"{source}: the variances of bn{suffix} are negative, or not numbers, so the file is "
            "damaged or its training had diverged. Take another one."
        )
    if epsilon != _EPSILON:
        gamma = gamma * np.sqrt((variance + _EPSILON) / (variance + epsilon))
    folded: dict[str, Array] = {
        "weights": weights,
        "gamma": gamma,
        "beta": beta,
        "moving_mean": mean,
        "moving_variance": variance,
    }
    return folded, sources


def _statistics(layer: Layer, num: int, source: str) -> tuple[Array64, Array64]:
    """Mean and variance: the first two blobs, divided by the third; all zero where that is zero."""
    if len(layer.blobs) != 3:
        raise WeightsError(
            f"{source}: {layer.name} has {len(layer.blobs)} blobs, where Caffe's BatchNorm has 3 "
            "(mean, variance, factor). A fork of Caffe wrote it; Anysize cannot know its meaning."
        )
    factor = float(_vector(layer, 2, 1, source)[0])
    scale = 0.0 if factor == 0 else 1.0 / factor
    return _vector(layer, 0, num, source) * scale, _vector(layer, 1, num, source) * scale


def _vector(layer: Layer, index: int, num: int, source: str) -> Array64:
    """A blob as a vector; files of the V1 layout have it as 1 x 1 x 1 x n."""
    blob = layer.blobs[index]
    if blob.size != num or max(blob.shape, default=1) != num:
        raise WeightsError(
            f"{source}: {layer.name}[{index}] has shape {blob.shape}, where {num} values belong. "
            "It is damaged, or of another net."
        )
    return blob.reshape(num).astype(np.float64)


def _rules(
    body: _Body, layers: Sequence[Layer], source: str
) -> tuple[dict[str, str], int, frozenset[str]]:
    """The rules that strides, paddings and dilations of the file follow, and its output stride.

    Also returns which of them the file states; the others are those of its names.
    """
    stated_rules = {"pool_padding"} if _check_pool(layers, source) else set[str]()
    rules = {
        "pool_padding": "caffe",
        "stride_position": "first_1x1",
        "dilation_rule": "new",
    }
    windows = {n: layer.window for n, layer in body.convolutions.items()}
    if any(w is None or 0 in w.kernel for w in windows.values()):
        return rules, 32, frozenset(stated_rules)  # It states weights only.
    stated = {n: w for n, w in windows.items() if w is not None}
    strides = [_block_strides(body, stated, block, source) for block in range(4)]
    if strides[0] != (1, 1) or stated["body.conv1"].stride != (2, 2):
        raise WeightsError(f"{source}: conv1 must have a stride of 2, and res2 none.")
    positions = {
        "first_1x1" if first > 1 else "first_3x3"
        for first, second in strides[1:]
        if first * second > 1
    }
    if len(positions) > 1:
        raise WeightsError(
            f"{source} has the stride of some blocks in branch2a and of others in branch2b."
        )
    rules["stride_position"] = next(iter(positions), "first_1x1")
    totals = [first * second for first, second in strides]
    output_stride = 4 * int(np.prod(totals))
    if output_stride < 8 or totals[1:] != sorted(totals[1:], reverse=True):
        raise WeightsError(
            f"{source} has the strides {totals} in its blocks. Anysize takes strides out from the "
            "last block backwards, down to an output stride of 8."
        )
    rules["dilation_rule"] = _dilation_rule(body, stated, totals, source)
    stated_rules |= {"output_stride"}
    stated_rules |= {"stride_position"} if positions else set()
    stated_rules |= {"dilation_rule"} if output_stride < 32 else set()
    return rules, output_stride, frozenset(stated_rules)


def _block_strides(
    body: _Body, windows: Mapping[str, Window], block: int, source: str
) -> tuple[int, int]:
    """Strides of branch2a and branch2b of the first unit; everything else must go with them."""
    prefix = f"body.units.block{block + 1}_unit"
    for unit in range(1, body.units[block] + 1):
        name = f"{prefix}{unit}."
        parts = {p: windows[name + p] for p in _PARTS.values() if name + p in windows}
        first, second = parts["conv1"].stride, parts["conv2"].stride
        total = (first[0] * second[0], first[1] * second[1])
        if (
            total not in ((1, 1), (2, 2))
            or (total == (2, 2) and unit > 1)
            or parts["conv3"].stride != (1, 1)
            or ("shortcut" in parts and parts["shortcut"].stride != total)
        ):
            raise WeightsError(
                f"{source}: the strides of {body.convolutions[name + 'conv1'].name} and of the "
                "rest of its unit are not those of a ResNet: 2 in the first unit of a block, and "
                "1 elsewhere."
            )
    return windows[f"{prefix}1.conv1"].stride[0], windows[f"{prefix}1.conv2"].stride[0]


def _dilation_rule(
    body: _Body, windows: Mapping[str, Window], totals: Sequence[int], source: str
) -> str:
    """Which rule the dilations follow: of a block without its stride, from which unit on."""
    names = [n for n in windows if n.endswith(".conv2")]
    found = [windows[n].dilation for n in names]
    expected: dict[str, list[tuple[int, int]]] = {"new": [], "previous": []}
    rate = 1
    for block, total in enumerate(totals):
        previous, rate = rate, rate * (2 if block and total == 1 else 1)
        rest = [(rate, rate)] * (body.units[block] - 1)
        expected["new"] += [(rate, rate), *rest]
        expected["previous"] += [(previous, previous), *rest]
    rule = next((r for r, rates in expected.items() if rates == found), "")
    odd = next((i for i, rate in enumerate(found) if rate != expected["new"][i]), None)
    if not rule and odd is not None:
        raise WeightsError(
            f"{source}: {body.convolutions[names[odd]].name} has dilation {found[odd][0]}, where "
            f"the strides of the net call for {expected['new'][odd][0]}. Anysize doubles the "
            "dilation with every stride that is taken out, and cannot run this net exactly."
        )
    for name, window in windows.items():
        size = body.convolutions[name].blobs[0].shape[2]
        rate = window.dilation[0]
        if window.kernel != (size, size) or window.pad != (rate * (size // 2),) * 2:
            raise WeightsError(
                f"{source}: {body.convolutions[name].name} has kernel {window.kernel} and padding "
                f"{window.pad}; a ResNet pads its {size}x{size} by {rate * (size // 2)}."
            )
    return rule


def _check_pool(layers: Sequence[Layer], source: str) -> bool:
    """Whether the file states its pooling, which must then be Caffe's."""
    pool = next((layer for layer in layers if layer.name == "pool1"), None)
    if pool is None or pool.window is None:
        return False
    if pool.window != Window((3, 3), (2, 2), (0, 0), pool="max"):
        raise WeightsError(
            f"{source}: pool1 is {pool.window.pool} pooling of {pool.window.kernel}, stride "
            f"{pool.window.stride}, padding {pool.window.pad}; KaimingHe's nets have a maximum "
            "over 3x3, stride 2, no padding, and Anysize has no other one of Caffe's."
        )
    return True


def _find_head(
    layers: Sequence[Layer], body: _Body, head: str, source: str, left_out: dict[str, str]
) -> Layer | None:
    """The transposed convolution that is our head; the others go to `left_out` with the reason."""
    reasons = {
        layer.name: _not_our_head(layer, layers, body)
        for layer in layers
        if layer.type == "Deconvolution" and layer.blobs
    }
    if head and reasons.get(head, "there is no such Deconvolution"):
        raise WeightsError(
            f"{source}: {head!r} is not a head that Anysize has: "
            f"{reasons.get(head, 'there is no such Deconvolution')}. "
            f"Deconvolutions in the file: {', '.join(reasons) or 'none'}."
        )
    ours = [name for name, reason in reasons.items() if not reason]
    if len(ours) > 1 and not head:
        reasons |= dict.fromkeys(ours, "one of several heads; name it with --head")
        ours = []
    chosen = head or (ours[0] if ours else "")
    for layer in layers:
        if layer.name in reasons and layer.name != chosen:
            reason = reasons[layer.name] or f"another head than {chosen}"
            left_out.update(dict.fromkeys(_blob_names(layer), reason))
    return next((la for la in layers if la.blobs and la.name == chosen), None)


def _not_our_head(layer: Layer, layers: Sequence[Layer], body: _Body) -> str:
    """Why a transposed convolution is not ours; empty if it is: 3x3, stride 2, no padding."""
    window, shape = layer.window, layer.blobs[0].shape
    if window is None or len(shape) != 4:
        return "not our head: its kernel and stride are not stated"
    if window.group != 1:
        return f"not our head: {window.kernel[0]}x{window.kernel[1]} upsampling, each class alone"
    if window != Window((3, 3), (2, 2), (0, 0)) or shape[2:] != (3, 3):
        return (
            f"not our head: kernel {window.kernel[0]}x{window.kernel[1]}, stride "
            f"{window.stride[0]}, pad {window.pad[0]}, where ours has 3x3, 2, 0"
        )
    if shape[1] < 1:
        return "not our head: it has no outputs"
    if shape[0] != 32 * body.base_depth:
        return f"not our head: it takes {shape[0]} channels, not the body's {32 * body.base_depth}"
    # Caffe saves a Split where a blob has several readers.
    splits = {
        t: la.bottoms[0] for la in layers if la.type == "Split" and la.bottoms for t in la.tops
    }
    ends = {t for la in layers if la.name == f"{body.last_unit}_relu" for t in la.tops}
    ends = ends or {t for la in layers if la.name == body.last_unit for t in la.tops}
    bottoms = {splits.get(b, b) for b in layer.bottoms}
    if ends and bottoms and not bottoms <= ends:
        return f"not our head: it takes {', '.join(sorted(bottoms))}, not {body.last_unit}"
    for la in layers:
        cropped = {splits.get(b, b) for b in la.bottoms[:1]}
        if la.type == "Crop" and any(la.offset) and cropped & set(layer.tops):
            return f"not our head: {la.name} crops it at {la.offset}, where ours begins at 0"
    return ""


def _leave_out_class_layers(
    layers: Sequence[Layer], body: _Body, taken: set[str], left_out: dict[str, str]
) -> None:
    """Class layers of other nets go; layers that nothing is known of stay, and are an error."""
    num_out = 32 * body.base_depth
    for layer in layers:
        if not layer.blobs or f"{layer.name}[0]" in taken or f"{layer.name}[0]" in left_out:
            continue
        shape = layer.blobs[0].shape
        if layer.type == "InnerProduct":
            reason = "class layer of a whole image"
        elif layer.type == "Convolution" and len(shape) == 4 and shape[2:] == (1, 1):
            reason = "class layer, 1x1; our head starts afresh"
        elif layer.type == "Convolution" and len(shape) == 4 and shape[1] == num_out:
            reason = "a layer of its own on the body's output; our head starts afresh"
        else:
            continue
        left_out.update(dict.fromkeys(_blob_names(layer), reason))
