"""What the verbs print, and files that they are asked to write."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from anysize.errors import ConfigError

if TYPE_CHECKING:
    pass


def say(message: str) -> None:
    """A message on standard error."""
    print(f"anysize: {message}", file=sys.stderr)  # noqa: T201


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
                console.print(f"{what}: {done} of {total} images", highlight=False)

        yield count


def print_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table at a terminal, plain lines elsewhere."""
    if console.is_terminal:
        from rich.table import Table

        table = Table(*columns)
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    console.print("\n" + "; ".join(columns), highlight=False, markup=False)
    for row in rows:
        console.print("; ".join(row), highlight=False, markup=False)


def require_writable(out: Path) -> None:
    """Before long work: a file that could not be written would be its loss."""
    import tempfile

    require_folder(out)
    if out.is_dir():
        raise ConfigError(f"{out} is a folder. Name a file.")
    with tempfile.TemporaryFile(dir=out.absolute().parent):
        pass


def require_folder(out: Path) -> None:
    """Refuses a file whose folder does not exist."""
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"{out}: its folder does not exist; create it first.")
