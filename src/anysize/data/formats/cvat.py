"""CVAT's `labelmap.txt`, beside the folders of Pascal VOC in its export "Segmentation mask"."""

from __future__ import annotations

from pathlib import Path

from anysize.data.classes import Classes, named_classes
from anysize.data.files import read_lines
from anysize.errors import DataError

LABELMAP = "labelmap.txt"


def read_labelmap(path: Path) -> Classes:
    """Reads names and colours: a line per class, `name:red,green,blue:parts:actions`.

    A class without a colour has Pascal VOC's for its place in the list.

    Raises:
        DataError: A line is invalid, or a name or colour is given twice.

    Source: Datumaro's `VocPath.LABELMAP_FILE`, which CVAT writes by.
    """
    names: list[str] = []
    colours: list[tuple[int, int, int] | None] = []
    for line in read_lines(path):
        if line.startswith("#"):
            continue
        # Names may hold colons; the three fields behind them do not.
        fields = line.rsplit(":", 3)
        if len(fields) != 4:
            raise DataError(
                f"The line {line!r} of {path} must be name:red,green,blue:parts:actions. Correct "
                f"it, or write classes.toml."
            )
        names.append(fields[0].strip())
        colours.append(_colour(fields[1], line, path))
    named = named_classes(names, str(path))
    chosen = tuple(own or other for own, other in zip(colours, named.colours, strict=True))
    if len(set(chosen)) < len(chosen):
        raise DataError(
            f"{path} gives several classes the same colour. Correct it, or write classes.toml."
        )
    return Classes(names=named.names, colours=chosen)


def _colour(text: str, line: str, path: Path) -> tuple[int, int, int] | None:
    if not text.strip():
        return None
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 3 or not all(p.isascii() and p.isdigit() and int(p) < 256 for p in parts):
        raise DataError(
            f"The colour {text!r} in the line {line!r} of {path} must be three whole numbers from "
            f"0 to 255. Correct it, or write classes.toml."
        )
    red, green, blue = (int(part) for part in parts)
    return red, green, blue
