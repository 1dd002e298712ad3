"""The formats of image files: how each is told, and what images and labels may be stored in it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Format(NamedTuple):
    """A format of image files.

    Attributes:
        name: As Pillow calls it.
        suffixes: Endings of its files, lower case.
        magic: What its files begin with, from byte `offset` on.
        offset: See `magic`.
        has_orientation: Whether it has room for an EXIF orientation.
        no_image: Why it is not read as an image, and what to do; empty where it is read.
        no_labels: Why labels are not read from it; empty where they are.
    """

    name: str
    suffixes: tuple[str, ...]
    magic: tuple[bytes, ...]
    offset: int = 0
    has_orientation: bool = True
    no_image: str = ""
    no_labels: str = ""


_CONVERT = "Convert it to PNG or JPEG."

FORMATS = (
    Format(
        "JPEG",
        (".jpg", ".jpeg"),
        (b"\xff\xd8\xff",),
        no_labels="JPEG changes values along every edge. Export the mask as PNG from where it was "
        "made; converting the JPEG does not bring the values back.",
    ),
    Format("PNG", (".png",), (b"\x89PNG\r\n\x1a\n",)),
    Format("BMP", (".bmp",), (b"BM",), has_orientation=False),
    Format("TIFF", (".tif", ".tiff"), (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")),
    Format(
        "WEBP",
        (".webp",),
        (b"WEBP",),
        offset=8,
        no_labels="WebP may change values. Save the mask as PNG.",
    ),
    Format(
        "GIF",
        (".gif",),
        (b"GIF8",),
        no_image=f"GIF holds at most 256 colours, often as an animation. {_CONVERT}",
        no_labels="GIF may order its colours anew in each file. Save the mask as PNG.",
    ),
    Format(
        "HEIC",
        (".heic", ".heif", ".hif"),
        (b"ftyphei", b"ftyphev", b"ftypmif1", b"ftypmsf1"),
        offset=4,
        no_image=f"HEIC is not read. {_CONVERT}",
        no_labels="HEIC may change values. Save the mask as PNG.",
    ),
    Format(
        "AVIF",
        (".avif",),
        (b"ftypavif", b"ftypavis"),
        offset=4,
        no_image=f"AVIF is not read. {_CONVERT}",
        no_labels="AVIF may change values. Save the mask as PNG.",
    ),
    Format(
        "JPEG2000",
        (".jp2", ".j2k"),
        (b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51"),
        no_image="JPEG 2000 is not read. Convert it to TIFF or PNG.",
        no_labels="JPEG 2000 may change values. Save the mask as PNG.",
    ),
)

IMAGE_FORMATS = tuple(f.name for f in FORMATS if not f.no_image)
"""What Pillow may decode, by a file's content; each further decoder is one more way to fail."""

IMAGE_SUFFIXES = tuple(suffix for f in FORMATS if not f.no_image for suffix in f.suffixes)
"""Files that count as images, in lower or upper case; other files are passed over."""

LABEL_FORMATS = tuple(f.name for f in FORMATS if not f.no_labels)
LABEL_SUFFIXES = tuple(suffix for f in FORMATS if not f.no_labels for suffix in f.suffixes)
"""Masks that are read."""

PICTURE_SUFFIXES = tuple(suffix for f in FORMATS for suffix in f.suffixes)
"""All of the table: files that their maker takes for pictures, whether they are read or not."""

_OF_SYSTEMS = {"thumbs.db", "ehthumbs.db", "desktop.ini", "__macosx", "@eadir"}
"""What Windows, macOS and Synology leave in folders, lower case."""


def is_hidden(path: Path) -> bool:
    """Whether a file or folder is one that people do not see: `._a.jpg`, `.DS_Store`, Thumbs.db."""
    return path.name.startswith(".") or path.name.lower() in _OF_SYSTEMS


def format_by_suffix(path: Path) -> Format | None:
    """The format that a file's name claims."""
    suffix = path.suffix.lower()
    return next((f for f in FORMATS if suffix in f.suffixes), None)


def format_of(path: Path) -> Format | None:
    """The format that a file's first bytes show; None where they show none of the table.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(16)
    return next((f for f in FORMATS if head[f.offset :].startswith(f.magic)), None)
