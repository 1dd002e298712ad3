"""The verb that proves a net of one's own exact on canvases."""

from __future__ import annotations

import argparse

from rich.console import Console

from anysize.cli.parsing import verb
from anysize.config import ModelConfig
from anysize.errors import ConfigError
from anysize.geometry import Size
from anysize.wording import say


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds this group to the parser."""
    parser = verb(
        verbs,
        "prove",
        _prove,
        "compare a net on canvases with the net on each image alone; exit 1 where not exact",
        "anysize prove my_project.nets:build",
        "anysize prove my_project.nets:build --sizes 64x96 33x128",
    )
    parser.add_argument(
        "net",
        metavar="PACKAGE.MODULE:BUILD",
        help="a function that returns the net; or smp:Unet and the like",
    )
    parser.add_argument(
        "--sizes", nargs="+", type=_size, metavar="HxW", help="of images (96x64 64x128 70x51)"
    )
    parser.add_argument("--channels", type=int, default=3, help="of the pixels (default 3)")
    parser.add_argument("--output", help="the entry of a dict, or the place in a list, of logits")


def _size(text: str) -> Size:
    height, x, width = text.partition("x")
    if not (x and height.isdigit() and width.isdigit() and int(height) and int(width)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write height x width: 64x96")
    return Size(int(height), int(width))


def _prove(parsed: argparse.Namespace, console: Console) -> int:
    from torch import nn

    from anysize.models.any_net import LIBRARIES, built_net, called, import_net
    from anysize.models.prove import SIZES, prove

    library, colon, name = parsed.net.partition(":")
    if not (library and colon and name):
        raise ConfigError(f"{parsed.net!r} is not PACKAGE.MODULE:BUILD, such as nets:build.")
    if library in LIBRARIES:
        net = built_net(ModelConfig(net=parsed.net, num_channels=parsed.channels), 2)
    else:
        build = import_net(parsed.net)
        net = build if isinstance(build, nn.Module) else called(parsed.net, build, {})
    if not isinstance(net, nn.Module):
        raise ConfigError(f"{parsed.net} returns {type(net).__name__}, not a torch.nn.Module.")
    output = parsed.output
    if output is not None and output.lstrip("-").isdigit():
        output = int(output)
    proof = prove(net, parsed.sizes or SIZES, num_channels=parsed.channels, output=output)
    for one in (*proof.comparisons, proof.control):
        first = f"  first in {one.first_different}" if one.first_different else ""
        say(
            console,
            f"{one.name:<24} outputs {one.outputs:.1e}  gradients {one.gradients:.1e}{first}",
        )
    if not proof.exact:
        worst = next((c for c in proof.comparisons if not c.exact), proof.comparisons[0])
        for module_name, apart in worst.modules.items():
            say(console, f"  {apart:.1e}  {module_name}")
    say(console, proof.summary)
    return 0 if proof.exact else 1
