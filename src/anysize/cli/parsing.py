"""How a verb is described to argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import get_args

from rich.console import Console

from anysize.config import DeviceName


def verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace, Console], int | None],
    summary: str,
    *examples: str,
) -> argparse.ArgumentParser:
    """Adds a verb with its summary and examples."""
    parser = verbs.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog(*examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def epilog(*examples: str) -> str:
    """Examples, as they stand at the end of a help text."""
    title = "example:" if len(examples) == 1 else "examples:"
    return "\n  ".join((title, *examples))


def computing_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--device` and `--precision`."""
    parser.add_argument(
        "--device",
        choices=get_args(DeviceName),
        default="auto",
        help="where to compute; auto takes a GPU where there is one",
    )
    parser.add_argument(
        "--precision",
        choices=("float32", "bf16"),
        default="float32",
        help="bf16 is faster where the hardware has it, and less exact",
    )
