"""Takes over a checkpoint of another system: recognises it, accounts for it, makes it ours.

Source of the discipline: big_vision, where every tensor is accounted for or the load fails.
"""

from __future__ import annotations

import colorsys
import dataclasses
import functools
from pathlib import Path
from typing import Literal

import torch

from anysize.config import UNITS, LabelKind
from anysize.conversion.caffe import read_caffe
from anysize.conversion.caffemodel import is_caffemodel
from anysize.conversion.foreign import NO_HEAD, Foreign
from anysize.conversion.slim import read_slim
from anysize.conversion.tf_checkpoint import is_tf_checkpoint
from anysize.conversion.torch_file import is_torch_file, read_torch_file
from anysize.conversion.torchvision import foreign_from_torchvision
from anysize.data.samples import Classes
from anysize.errors import WeightsError, first_names
from anysize.models.weights_file import WeightsFile, expected_tensors, is_ours

_listed = functools.partial(first_names, most=8)

MOST_CLASSES = 255
"""Values of a uint8 mask, less the one to ignore."""


def convert(
    path: Path,
    *,
    head: str = "",
    kind: LabelKind | None = None,
    classes: Classes | None = None,
    head_relu: bool = False,
    output_stride: Literal[8, 16, 32] | None = None,
    mean: Path | None = None,
) -> tuple[WeightsFile, Foreign]:
    """Reads a checkpoint of TF-Slim, Caffe, torchvision or timm; the format is found by content.

    Args:
        path: A TF-Slim checkpoint (V1 file, or prefix or any file of a V2 one), a `.caffemodel`,
            a PyTorch state dict, or safetensors.
        head: Of several heads, the one to take; "none" takes the body only.
        kind: How the head's logits are meant; must be given where a head is taken.
        classes: Of the head; where not given, they are numbered.
        head_relu: The head ends with a ReLU.
        output_stride: That the head was trained at; None is that of the file where it says one
            (Caffe's do), else 16.
        mean: Caffe's mean image, `.binaryproto`.

    Returns:
        What to write, and the account of where it came from.

    Raises:
        WeightsError: Not a file of these systems, damaged, of another net, a tensor is left over or
            missing, a value is not finite, or head and `kind` or `classes` do not go together.
    """
    if not path.exists() and not is_tf_checkpoint(path):
        raise WeightsError(f"No such file: {path}.")
    foreign = _read(path, head, mean)
    if foreign.unknown:
        raise WeightsError(
            f"{path} was taken for {foreign.source}, but holds tensors that nothing is known of: "
            f"{_listed(foreign.unknown)}. Taken were {_listed(foreign.taken)}. Nothing "
            "was written. Is it a checkpoint of another net, or of a changed one?"
        )
    if head == NO_HEAD:
        foreign = _without_head(foreign)
    head_weights = foreign.tensors.get("head.weights")
    if head_weights is not None:
        kind, classes = _meaning(path, head_weights.shape[1], kind, classes)
    elif kind or classes or head_relu or output_stride:
        raise WeightsError(
            f"No head is taken from {path} ({foreign.source}), so there is nothing for "
            "--loss, --classes, --head-relu and --output-stride to say. Leave them out."
        )
    file = WeightsFile(
        config=dataclasses.replace(
            foreign.config,
            head_relu=head_relu,
            output_stride=output_stride or foreign.config.output_stride,
        ),
        pixels=foreign.pixels,
        classes=classes,
        kind=kind,
        tensors={n: torch.tensor(a) for n, a in foreign.tensors.items()},
        source=f"{foreign.source}, {path.name}",
    )
    _check_names(path, file, foreign)
    _check_values(path, file)
    return file, foreign


def describe(foreign: Foreign) -> str:
    """What was found in a checkpoint and what became of it, for people."""
    net = foreign.config
    pixels = foreign.pixels
    lines = [
        f"Found {foreign.source}.",
        f"Net: units {net.units or UNITS[net.depth]}, base depth {net.base_depth}, pool padding "
        f"{net.pool_padding}, stride in {net.stride_position}, dilation rule {net.dilation_rule}.",
        f"Pixels: {pixels.channel_order}, white is {pixels.max_value:g}, mean "
        f"{list(pixels.mean)}, std {list(pixels.std)}.",
        f"Taken: {len(foreign.taken)} tensors of the file, into {len(foreign.tensors)} of ours.",
    ]
    by_reason: dict[str, list[str]] = {}
    for name, reason in foreign.left_out.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        lines.append(f"Left out, {reason}: {len(names)} ({first_names(names, 2)}).")
    return "\n".join(lines)


def _read(path: Path, head: str, mean: Path | None) -> Foreign:
    if is_ours(path):
        raise WeightsError(f"{path} is a weights file of Anysize already. Use it as it is.")
    if is_tf_checkpoint(path):
        foreign = read_slim(path, head=head)
    elif not path.is_file():
        raise WeightsError(
            f"{path} is not a file, nor the prefix of a TensorFlow checkpoint. Name the checkpoint "
            "itself."
        )
    elif is_torch_file(path):
        foreign = foreign_from_torchvision(read_torch_file(path), path)
        if head not in ("", NO_HEAD):
            raise WeightsError(
                f"{path} is {foreign.source}, which has no head that Anysize has, so there is no "
                f"head {head!r} to take. Leave --head out."
            )
    elif is_caffemodel(path):
        return read_caffe(path, mean=mean, head="" if head == NO_HEAD else head)
    else:
        raise WeightsError(
            f"{path} is of no format that Anysize knows. It takes TF-Slim checkpoints (V1 files, "
            "V2 prefixes), .caffemodel files, and state dicts of torchvision and timm (.pth, "
            ".safetensors). Was it downloaded whole?"
        )
    if mean is not None:
        raise WeightsError(
            f"--mean goes with a .caffemodel, and {path} is {foreign.source}, whose pixel "
            "convention is known. Leave it out."
        )
    return foreign


def _without_head(foreign: Foreign) -> Foreign:
    of_head = {n: "a head, left out as asked" for n, o in foreign.taken.items() if "head." in o}
    return dataclasses.replace(
        foreign,
        tensors={n: t for n, t in foreign.tensors.items() if not n.startswith("head.")},
        taken={n: o for n, o in foreign.taken.items() if n not in of_head},
        left_out={**foreign.left_out, **of_head},
    )


def _meaning(
    path: Path, num_classes: int, kind: LabelKind | None, classes: Classes | None
) -> tuple[LabelKind, Classes]:
    """What the channels of a head are, which no checkpoint says."""
    if kind is None:
        raise WeightsError(
            f"{path} holds a head of {num_classes} channels, and does not say how they are meant. "
            "Add --loss sigmoid (any number of classes a pixel) or --loss softmax (one class a "
            "pixel), or --head none to take the body only."
        )
    if classes is None:
        return kind, _numbered_classes(path, num_classes)
    if len(classes.names) != num_classes:
        raise WeightsError(
            f"{path} holds a head of {num_classes} channels, but --classes names "
            f"{len(classes.names)}: {_listed(classes.names)}. Give one a channel, in their "
            "order, or --head none to take the body only."
        )
    return kind, classes


def _numbered_classes(path: Path, num_classes: int) -> Classes:
    if num_classes > MOST_CLASSES:
        raise WeightsError(
            f"{path} holds a head of {num_classes} channels; a mask has room for {MOST_CLASSES} "
            "classes. Take the body only, with --head none."
        )
    colours = [
        colorsys.hsv_to_rgb(i / num_classes, 1.0 - 0.5 * (i % 2), 1.0 - 0.25 * (i % 3))
        for i in range(num_classes)
    ]
    return Classes(
        names=tuple(f"class_{i}" for i in range(num_classes)),
        colours=tuple((round(255 * r), round(255 * g), round(255 * b)) for r, g, b in colours),
    )


def _check_names(path: Path, file: WeightsFile, foreign: Foreign) -> None:
    own = expected_tensors(file, str(path))
    missing = [n for n in own if n not in file.tensors]
    surplus = [
        f"{n} (as {t})" for n, t in foreign.taken.items() if not set(t.split(" ")) & set(own)
    ]
    differing = [
        f"{n}: {tuple(file.tensors[n].shape)} in the file, {tuple(shape)} in the net"
        for n, shape in own.items()
        if n in file.tensors and tuple(file.tensors[n].shape) != tuple(shape)
    ]
    if missing or surplus or differing:
        raise WeightsError(
            f"{path} was taken for {foreign.source}, but its tensors do not add up. Only in the "
            f"net: {_listed(missing)}. Only in the file: {_listed(surplus)}. Of another shape: "
            f"{_listed(differing)}. Nothing was written. Is it a checkpoint of another net, or of "
            "a changed one?"
        )


def _check_values(path: Path, file: WeightsFile) -> None:
    for name, tensor in file.tensors.items():
        if not torch.isfinite(tensor).all():
            raise WeightsError(
                f"{path} holds values in {name} that are not finite: the training that wrote it "
                "had diverged, or it is damaged. Take an earlier checkpoint."
            )
        if name.endswith(".moving_variance") and bool((tensor < 0).any()):
            raise WeightsError(
                f"{path} holds negative variances in {name}, so it is damaged. Take another file."
            )
