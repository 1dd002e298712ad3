"""Verbs that carry nets in and out: convert and export."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from pathlib import Path

from rich.console import Console

from anysize.cli.output import prepare_outputs
from anysize.cli.parsing import verb
from anysize.cli.run_folder import load_weights_of, trust_option
from anysize.config import LossKind
from anysize.wording import say


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds this group to the parser."""
    convert = verb(
        verbs,
        "convert",
        _convert,
        "take over a checkpoint of TF-Slim, Caffe, torchvision or timm",
        "anysize convert resnet_v1_101.ckpt -o resnet_v1_101.safetensors",
        "anysize convert fcn.ckpt-20000 -o fcn.safetensors --loss sigmoid --classes classes.toml",
        "anysize convert ResNet-50-model.caffemodel -o W.safetensors --mean mean.binaryproto",
        "anysize convert resnet50.pth -o rgb_and_infrared.safetensors --channels 4",
    )
    convert.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    convert.add_argument("-o", "--out", type=Path, required=True, help="weights file to write")
    convert.add_argument(
        "--head", default="", metavar="NAME", help="which head to take; none takes the body only"
    )
    convert.add_argument(
        "--prefix",
        default="",
        metavar="NAME",
        help="of several nets in the file, what the names of the one to take begin with",
    )
    convert.add_argument(
        "--loss", choices=typing.get_args(LossKind), help="how the head's logits are meant"
    )
    convert.add_argument(
        "--classes",
        type=Path,
        metavar="F",
        help="classes.toml, or joints.toml, of the head's channels",
    )
    convert.add_argument(
        "--head-relu", action="store_true", help="the head ends with a ReLU, as TF-Slim's default"
    )
    convert.add_argument(
        "--output-stride",
        type=int,
        choices=(8, 16, 32),
        help="that the net was trained at (default: the file's where it says one, else 16)",
    )
    convert.add_argument(
        "--stride-position",
        choices=("last_3x3", "first_3x3", "first_1x1"),
        help="where the stride of a block is: TF-Slim's, torchvision's and Caffe's place",
    )
    convert.add_argument(
        "--dilation-rule",
        choices=("new", "previous"),
        help="rate of the first unit of a dilated block: the block's, or that of the block before",
    )
    convert.add_argument(
        "--pool-padding",
        choices=("same", "torchvision", "caffe"),
        help="padding of the first pooling",
    )
    convert.add_argument(
        "--channel-order", choices=("RGB", "BGR"), help="of the pixels that the net was trained on"
    )
    convert.add_argument(
        "--pixel-mean", type=numbers, metavar="A,B,C", help="subtracted from them, by channel"
    )
    convert.add_argument(
        "--pixel-std", type=numbers, metavar="A,B,C", help="what they are then divided by"
    )
    convert.add_argument("--max-value", type=float, help="value of white in them: 255, or 1")
    convert.add_argument(
        "--mean", type=Path, metavar="F", help="mean image of a .caffemodel (.binaryproto)"
    )
    convert.add_argument(
        "--channels", type=int, metavar="N", help="make the first convolution one for N channels"
    )
    convert.add_argument(
        "--new-channels",
        choices=("zeros", "mean"),
        default="zeros",
        help="what it starts with for channels after the third; mean: of the weights of the three",
    )

    export = verb(
        verbs,
        "export",
        _export,
        "write a net as one ONNX file, and hold it against our own prediction",
        "anysize export run -o model.onnx",
    )
    export.add_argument("weights", type=Path, metavar="RUN", help="run folder or weights file")
    export.add_argument("-o", "--out", type=Path, required=True, help="file to write; ends .onnx")
    export.add_argument(
        "--output",
        choices=("logits", "labels"),
        default="logits",
        help="what the file gives; logits (the default) can be tiled",
    )
    trust_option(export)


def numbers(text: str) -> tuple[float, ...]:
    """`103.9,116.8,123.7`, one for each channel."""
    return tuple(float(part) for part in text.split(","))


def _convert(parsed: argparse.Namespace, console: Console) -> None:
    from anysize.conversion.asked import Asked
    from anysize.conversion.convert import convert_file

    prepare_outputs(parsed.out)
    asked = Asked(**{f.name: getattr(parsed, f.name) for f in dataclasses.fields(Asked)})
    convert_file(parsed.checkpoint, parsed.out, asked, console)


def _export(parsed: argparse.Namespace, console: Console) -> None:
    from anysize.models.weights_file import read_weights_file, weights_path
    from anysize.onnx.export import describe, export

    prepare_outputs(parsed.out)
    source = read_weights_file(weights_path(parsed.weights)).source
    weights = load_weights_of(parsed.weights, "cpu", trust_net=parsed.trust_net)
    check = export(weights, parsed.out, output=parsed.output, source=source)
    say(console, f"Wrote {parsed.out}: {describe(check)}.")
