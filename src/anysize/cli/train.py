"""Verbs that make a run: demo, train and report."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from anysize.cli.output import prepare_outputs
from anysize.cli.parsing import verb
from anysize.cli.run_folder import load_weights_of
from anysize.errors import AnysizeError, ConfigError
from anysize.wording import printable, say

if TYPE_CHECKING:
    pass


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds this group to the parser."""
    demo = verb(verbs, "demo", _demo, "the whole job on real images", "anysize demo -o demo")
    demo.add_argument("-o", "--out", type=Path, default=Path("demo"), help="folder to write to")
    demo.add_argument("--seed", type=int, default=0, help="of the crops and the training")

    train = verb(
        verbs,
        "train",
        _train,
        "train what a run.toml describes",
        "anysize train run.toml --set train.epochs=20 --set optim.lr=0.01",
    )
    train.add_argument("config", type=Path, metavar="run.toml")
    train.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of run.toml; may be repeated",
    )
    spoken = train.add_mutually_exclusive_group()
    spoken.add_argument("--quiet", action="store_true", help="print nothing but errors")
    spoken.add_argument(
        "--progress",
        action="store_true",
        help="print each event as a line of JSON, with num_steps and eta_s, instead of text",
    )
    train.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    train.add_argument(
        "--as-before",
        action="store_true",
        help="with --resume: with the images that the run began with, whatever was added since",
    )

    report = verb(
        verbs,
        "report",
        _report,
        "draw a run: one HTML page, readable while it trains",
        "anysize report run",
    )
    report.add_argument("weights", type=Path, metavar="RUN", help="run folder")
    report.add_argument(
        "--examples",
        type=int,
        default=10,
        metavar="N",
        help="evaluation images that are shown: the N worst and the N best (default 10)",
    )


def _demo(parsed: argparse.Namespace, console: Console) -> None:
    from anysize.demo import run_demo

    run_demo(parsed.out, console, seed=parsed.seed)


def _train(parsed: argparse.Namespace, console: Console) -> None:
    from anysize.ranks import join
    from anysize.training.run import train

    if parsed.as_before and not parsed.resume:
        raise ConfigError("--as-before goes with --resume.")
    if parsed.quiet or parsed.progress:
        console = Console(quiet=True)
    with join() as ranks:
        run = train(
            parsed.config,
            parsed.overrides,
            resume=parsed.resume,
            agrees=_agrees(parsed, console),
            console=console,
            tell=_print_event if parsed.progress else None,
        )
        say(ranks.console(console), f"Done. The run is in {run}.")


def _print_event(event: Mapping[str, Any]) -> None:
    print(json.dumps(event), flush=True)  # noqa: T201


def _agrees(parsed: argparse.Namespace, console: Console) -> Callable[[str], bool] | None:
    """How a question of a resumed run is answered: by an option, or by a person at a terminal."""
    if parsed.as_before:
        return lambda question: True
    if not sys.stdin.isatty() or console.quiet:
        return None

    def ask(question: str) -> bool:
        from rich.prompt import Confirm
        from rich.text import Text

        try:
            return Confirm.ask(Text(printable(question)), console=console, default=True)
        except EOFError:
            return False

    return ask


def _report(parsed: argparse.Namespace, console: Console) -> None:
    from anysize.report import write_report

    run, examples = parsed.weights, []
    prepare_outputs(run / "report.html")
    if parsed.examples < 0:
        raise ConfigError(f"--examples is {parsed.examples}; it must not be negative.")
    if parsed.examples and (run / "weights.safetensors").is_file():
        from anysize.predict.examples import draw_examples

        try:
            weights = load_weights_of(run, "auto")
            examples = list(draw_examples(run, weights, parsed.examples))
        except AnysizeError as error:
            say(console, f"The report has no predictions: {error}")
    say(console, f"Wrote {write_report(run, examples)}.")
