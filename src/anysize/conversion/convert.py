"""Takes over a checkpoint of another system: recognises it, accounts for it, makes it ours.

Source of the discipline: big_vision, where every tensor is accounted for or the load fails.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from anysize.config import LABELS_OF, UNITS, LabelKind
from anysize.conversion.asked import Asked, as_asked
from anysize.conversion.caffe import read_caffe
from anysize.conversion.caffemodel import is_caffemodel
from anysize.conversion.foreign import NO_HEAD, Foreign
from anysize.conversion.refusals import refused_by_name
from anysize.conversion.slim import read_slim
from anysize.conversion.tf_checkpoint import is_tf_checkpoint
from anysize.conversion.torch_file import is_torch_file, read_torch_file
from anysize.conversion.torchvision import foreign_from_torchvision
from anysize.data.classes import Classes, read_classes, spread_colours
from anysize.data.formats.joints import read_joint_names
from anysize.errors import ConfigError, WeightsError, first_names
from anysize.models.levels import has_basic_units
from anysize.models.weights_file import (
    WEIGHTS_FORMAT,
    WeightsFile,
    expected_tensors,
    is_ours,
    read_metadata,
    write_weights_file,
)
from anysize.wording import count_of, say

_listed = functools.partial(first_names, most=8)

MOST_CLASSES = 255
"""Values of a uint8 mask, less the one to ignore."""


NOTHING = Asked()


def convert_file(path: Path, out: Path | None, asked: Asked, console: Console) -> Path:
    """Converts a checkpoint and writes the weights file, saying what was found and taken.

    Args:
        path: The checkpoint.
        out: The weights file to write; None is `path` with the ending `.safetensors`.
        asked: See `Asked`.
        console: Where the account goes.

    Raises:
        WeightsError: As `convert`.
        ConfigError: `out` exists, or has another ending.
    """
    out = path.with_suffix(".safetensors") if out is None else out
    if out.suffix != ".safetensors":
        raise ConfigError(f"The output is {out}; a weights file ends with .safetensors.")
    if out.exists():
        raise ConfigError(f"{out} already exists. Remove it, or write to another name.")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"{out.parent} is not a folder; create it first.")
    file, foreign = convert(path, asked)
    write_weights_file(out, file)
    what = "a body; a head is trained by `train.weights` in a run.toml"
    if file.classes is not None:
        what = (
            f"body and head, {count_of(len(file.classes.names), 'class', 'classes')}, {file.kind}, "
            f"output stride {file.config.output_stride}"
        )
    say(console, describe(foreign))
    say(console, f"Wrote {out}: {what}.")
    return out


def convert(path: Path, asked: Asked = NOTHING) -> tuple[WeightsFile, Foreign]:
    """Reads a checkpoint of TF-Slim, Caffe, torchvision or timm; the format is found by content.

    Args:
        path: A TF-Slim checkpoint (V1 file, or prefix or any file of a V2 one), a `.caffemodel`,
            a PyTorch state dict, or safetensors.
        asked: See `Asked`.

    Returns:
        What to write, and the account of where it came from.

    Raises:
        WeightsError: Not a file of these systems, damaged, of another net, a tensor is left over or
            missing, a value is not finite, or head and `loss` or `classes` do not go together.
    """
    if not path.exists() and not is_tf_checkpoint(path):
        raise WeightsError(f"No such file: {path}.")
    foreign = _read(path, asked)
    _require_known(path, foreign, asked)
    if asked.head == NO_HEAD:
        foreign = _without_head(foreign)
    head_weights = foreign.tensors.get("head.weights")
    kind, classes = None, None
    if head_weights is not None:
        kind, classes = _meaning(path, head_weights.shape[1], asked)
    elif asked.loss or asked.classes or asked.head_relu:
        raise WeightsError(
            f"No head is taken from {path} ({foreign.source}), so there is nothing for "
            "--loss, --classes and --head-relu to say. Leave them out."
        )
    foreign = as_asked(path, foreign, asked)
    file = WeightsFile(
        config=foreign.config,
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
    kind = "basic units" if has_basic_units(net) else "units"
    lines = [
        f"Found {foreign.source}.",
        f"Net: {kind} {net.units or UNITS[net.depth]}, base depth {net.base_depth}, pool padding "
        f"{net.pool_padding}, stride in {net.stride_position}, dilation rule {net.dilation_rule}.",
        f"Pixels: {pixels.channel_order}, white is {pixels.max_value:g}, mean "
        f"{list(pixels.mean)}, std {list(pixels.std)}.",
        f"Taken: {len(foreign.taken)} tensors of the file, into {len(foreign.tensors)} of ours.",
    ]
    by_reason: dict[str, list[str]] = {}
    for name, reason in foreign.left_out.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        lines.append(f"Left out, {reason}: {len(names)} ({first_names(_parts(names), 8)}).")
    return "\n".join([*lines, *(f"Note: {note}" for note in foreign.notes)])


def _parts(names: Sequence[str]) -> list[str]:
    """The names of a few, or else of the parts of a net that they belong to: `decode_head.*`."""
    if len(names) <= 3:
        return list(names)
    split = [re.split(r"([./])", name) for name in names]
    levels = zip(*(s[:-1] for s in split), strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda level: len(set(level)) == 1, levels))
    parts = dict.fromkeys("".join(s[: shared + 2]) for s in split)
    return [part + ("*" if part.endswith((".", "/")) else "") for part in parts]


def _read(path: Path, asked: Asked) -> Foreign:
    head = asked.head
    if is_ours(path):
        read_metadata(path, WEIGHTS_FORMAT)
        raise WeightsError(f"{path} is a weights file of Anysize already. Use it as it is.")
    if is_tf_checkpoint(path):
        joints = asked.loss == "pose" and head != NO_HEAD
        if joints and head:
            raise WeightsError(
                f"--loss pose takes the heads of joints together, so --head {head} says too much. "
                "Leave it out, or take this head alone with --loss sigmoid."
            )
        foreign = read_slim(path, head=head, prefix=asked.prefix, joints=joints)
    elif (refusal := refused_by_name(path)) or not path.is_file():
        raise WeightsError(
            refusal
            or f"{path} is not a file, nor the prefix of a TensorFlow checkpoint. Name the "
            "checkpoint itself."
        )
    elif is_torch_file(path):
        found = read_torch_file(path)
        foreign = foreign_from_torchvision(
            found.tensors, path, prefix=asked.prefix, others=found.others
        )
        if head not in ("", NO_HEAD):
            raise WeightsError(
                f"{path} is {foreign.source}, which has no head that Anysize has, so there is no "
                f"head {head!r} to take. Leave --head out."
            )
    elif is_caffemodel(path):
        if asked.prefix:
            raise WeightsError(f"--prefix is not for a .caffemodel such as {path}. Leave it out.")
        mean = None if asked.mean is None else Path(asked.mean)
        return read_caffe(path, mean=mean, head="" if head == NO_HEAD else head)
    else:
        raise WeightsError(
            f"{path} is of no format that Anysize knows. It takes TF-Slim checkpoints (V1 files, "
            "V2 prefixes), .caffemodel files, and state dicts of torchvision and timm (.pth, "
            ".safetensors). Was it downloaded whole?"
        )
    if asked.mean is not None:
        raise WeightsError(
            f"--mean goes with a .caffemodel, and {path} is {foreign.source}. Leave it out."
        )
    return foreign


def _require_known(path: Path, foreign: Foreign, asked: Asked) -> None:
    if foreign.unknown:
        raise WeightsError(
            f"{path} was taken for {foreign.source}, but its body has tensors that nothing is "
            f"known of: {_listed(foreign.unknown)}. Taken were {_listed(foreign.taken)}. Nothing "
            "was written. Is it a checkpoint of another net, or of a changed one?"
        )
    if foreign.beside and asked.head != NO_HEAD:
        raise WeightsError(
            f"{path} is {foreign.source}, but beside it are tensors that nothing is known of: "
            f"{_listed(_parts(foreign.beside))}. Nothing was written. To take the body alone, and "
            "leave all these out, add --head none."
        )


def _without_head(foreign: Foreign) -> Foreign:
    of_head = {n: "a head, left out as asked" for n, o in foreign.taken.items() if "head." in o}
    beside = dict.fromkeys(foreign.beside, "beside the body, left out as asked")
    return dataclasses.replace(
        foreign,
        tensors={n: t for n, t in foreign.tensors.items() if not n.startswith("head.")},
        taken={n: o for n, o in foreign.taken.items() if n not in of_head},
        left_out={**foreign.left_out, **of_head, **beside},
        beside=(),
    )


def _meaning(path: Path, num_classes: int, asked: Asked) -> tuple[LabelKind, Classes]:
    """What the channels of a head are, which no checkpoint says."""
    if asked.loss is None:
        raise WeightsError(
            f"{path} holds a head of {num_classes} channels, and does not say how they are meant. "
            "Add --loss sigmoid (any number of classes a pixel), --loss softmax (one class a "
            "pixel) or --loss pose (joints), or --head none to take the body only."
        )
    kind, classes = LABELS_OF[asked.loss], asked.classes
    if kind == "joints":
        if num_classes % 3:
            raise WeightsError(
                f"{path} holds a head of {num_classes} channels, but a joint has 3. --loss pose is "
                "for checkpoints of pose-tensorflow and DeepLabCut's TensorFlow version."
            )
        num_classes //= 3
    if classes is None:
        return kind, _numbered_classes(path, num_classes)
    if isinstance(classes, Path | str):
        read = read_joint_names if kind == "joints" else read_classes
        classes = read(Path(classes))
    if len(classes.names) != num_classes:
        raise WeightsError(
            f"{path} holds a head of {num_classes} channels, but --classes names "
            f"{len(classes.names)}: {_listed(classes.names)}. Name every channel, in their "
            "order, or add --head none to take the body only."
        )
    return kind, classes


def _numbered_classes(path: Path, num_classes: int) -> Classes:
    if num_classes > MOST_CLASSES:
        raise WeightsError(
            f"{path} holds a head of {num_classes} channels; a mask has room for {MOST_CLASSES} "
            "classes. Take the body only, with --head none."
        )
    names = tuple(f"class_{i}" for i in range(num_classes))
    return Classes(names=names, colours=spread_colours(num_classes))


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
