"""Lines for people: one thing or several, and nothing in them that a terminal would obey."""

from __future__ import annotations

import re

from rich.console import Console
from rich.text import Text

_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and line feed, changes of direction, and bytes that are not UTF-8."""


def printable(text: str) -> str:
    """Text of any origin as a terminal may show it; control characters are written as escapes."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(console: Console, line: str) -> None:
    """Prints a line as it is: brackets in names are no markup, and control characters are shown."""
    console.print(Text(printable(line)), soft_wrap=True)


def count_of(number: int, what: str, plural: str = "") -> str:
    """A number of things in words: "1 image", "1,200 images"."""
    return f"{number:,} {what if number == 1 else plural or what + 's'}"
