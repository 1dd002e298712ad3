"""What the verbs print, and files that they are asked to write."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from anysize.atomic_files import remove_unfinished, write_atomic
from anysize.errors import ConfigError
from anysize.wording import count_of, printable, say

STDOUT = Path("-")


class Output(Console):
    """Standard output; where its reader has gone, a verb goes on without one.

    What a verb prints is not its work: training under `| head -1` trains to its end.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(soft_wrap=True, quiet=quiet)

    def on_broken_pipe(self) -> None:
        """See the class."""
        self.quiet = True
        drop_output()
        complain("Nobody reads standard output any more; going on without it.")


def drop_output() -> None:
    """Lets standard output lead nowhere, so that its reader's end is met only once."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def complain(message: str) -> None:
    """A message on standard error, if anyone reads it."""
    with contextlib.suppress(OSError):
        print(f"anysize: {printable(message)}", file=sys.stderr)  # noqa: T201


def open_standard_streams() -> None:
    """Opens the standard streams that a shell closed, such as `<&-`, to lead nowhere.

    Otherwise the next file opened becomes one of them, and what libraries print goes into it. Names
    that the terminal's encoding does not have are printed as escapes.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # Takes the lowest free number: this one.
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w" if number else "r"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def progress_bar(console: Console) -> Progress:
    """A bar at a terminal, nothing elsewhere."""
    return Progress(
        TextColumn("[bold]{task.description}[/]"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


@contextlib.contextmanager
def counted(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """What is called with the numbers done and of all: a bar, or ten lines where no one watches."""
    with progress_bar(console) as progress:
        bar = progress.add_task(what)

        def count(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)
            if not console.is_terminal and total >= 200 and done % (total // 10) == 0:
                say(console, f"{what}: {done} of {count_of(total, 'image')}")

        yield count


def print_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table at a terminal, plain lines elsewhere."""
    if console.is_terminal:
        from rich.table import Table

        table = Table(*columns)
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        console.print(table)
        return
    say(console, "\n" + "; ".join(columns))
    for row in rows:
        say(console, "; ".join(row))


def prepare_outputs(*outs: Path | None) -> None:
    """Before long work: refuses what could not be written, and removes what a killed command left.

    Args:
        outs: Files to be written; None and `-` need nothing, nor do devices and FIFOs.
    """
    for out in outs:
        if out is None or out == STDOUT or (out.exists() and not (out.is_file() or out.is_dir())):
            continue
        if out.is_dir():
            raise ConfigError(f"{out} is a folder. Name a file.")
        target = out.resolve()
        if not target.parent.is_dir():
            raise ConfigError(f"{out}: its folder does not exist; create it first.")
        try:
            with tempfile.TemporaryFile(dir=target.parent):
                pass
        except OSError as error:
            raise ConfigError(
                f"{out} cannot be written: {error.strerror}. Choose another folder."
            ) from None
        remove_unfinished(target.parent, target.name)


def write_output(console: Console, out: Path | None, data: bytes) -> None:
    """Writes a file that an option asks for, `-` to standard output, and says so."""
    if out == STDOUT:
        sys.stdout.write(data.decode())
    elif out is not None:
        write_atomic(out, data)
        say(console, f"Wrote {out}.")


@contextlib.contextmanager
def output_to_stderr(is_asked: bool) -> Iterator[None]:
    """Lets what processes started inside print go to standard error, where that is asked for."""
    if not is_asked:
        yield
        return
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def add_json_option(parser: argparse.ArgumentParser, what: str, **options: Any) -> None:  # noqa: ANN401
    """Adds `--json`; with `-`, nothing else is printed to standard output (`main`)."""
    parser.add_argument(
        "--json",
        type=Path,
        metavar="F",
        help=f"also write {what} as JSON; - writes it to standard output, and nothing else there",
        **options,
    )
