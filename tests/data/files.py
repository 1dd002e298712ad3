"""Writes PNGs and TIFFs that Pillow does not: 16-bit colour, and bands in strips or tiles."""

import struct
import zlib
from itertools import pairwise

import numpy as np


def png_chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def write_png16(path, array, orientation=1, before=b""):
    """A 16-bit PNG of 1 to 4 channels, which Pillow does not write; its rows are filtered."""
    height, width, channels = array.shape
    raw = array.astype(">u2").view(np.uint8).reshape(height, -1)
    step = 2 * channels
    rows = [b"\0" + raw[0].tobytes()]
    for i, (above, row) in enumerate(pairwise(raw)):
        left = np.concatenate([np.zeros(step, np.uint8), row[:-step]])
        which = 1 + i % 2  # 1: difference to the left, 2: to above
        rows.append(bytes([which]) + (row - (left if which == 1 else above)).tobytes())
    colour_type = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    header = struct.pack(">IIBBBBB", width, height, 16, colour_type, 0, 0, 0)
    exif = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0" + bytes([orientation]) + bytes(6)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + before
        + (png_chunk(b"eXIf", exif) if orientation != 1 else b"")
        + png_chunk(b"IDAT", zlib.compress(b"".join(rows)))
        + png_chunk(b"IEND", b"")
    )


def write_tiff(path, array, *, order="<", planar=1, compression=1, predictor=1, tile=None, **tags):
    """A TIFF of any bands, strips or tiles, which Pillow does not write."""
    height, width, bands = array.shape
    bits = array.dtype.itemsize * 8
    planes = [array[..., i : i + 1] for i in range(bands)] if planar == 2 else [array]
    pieces = []
    for plane in planes:
        if tile:
            for top in range(0, height, tile):
                for left in range(0, width, tile):
                    block = np.zeros((tile, tile, plane.shape[-1]), array.dtype)
                    part = plane[top : top + tile, left : left + tile]
                    block[: part.shape[0], : part.shape[1]] = part
                    pieces.append(block)
        else:
            pieces += [plane[i : i + 2] for i in range(0, height, 2)]
    if predictor == 2:
        pieces = [
            np.concatenate([p[:, :1], np.diff(p, axis=1)], axis=1, dtype=array.dtype)
            for p in pieces
        ]
    data = [p.astype(array.dtype.newbyteorder(order)).tobytes() for p in pieces]
    if compression == 8:
        data = [zlib.compress(d) for d in data]
    ends = np.cumsum([8, *map(len, data)]).tolist()
    ifd = {256: [width], 257: [height], 258: [bits] * bands, 259: [compression]}
    ifd |= {262: [tags.get("photometric", 1)], 277: [bands], 284: [planar], 317: [predictor]}
    ifd |= {322: [tile], 323: [tile]} if tile else {278: [2]}
    ifd |= dict(zip((324, 325) if tile else (273, 279), (ends[:-1], map(len, data)), strict=True))
    if "extra" in tags:
        ifd[338] = tags["extra"]
    if "sample_format" in tags:
        ifd[339] = [tags["sample_format"]] * bands
    finish_tiff(path, b"".join([bytes(8), *data]), ifd, order)


def finish_tiff(path, body, tags, order):
    """Writes bytes whose first eight are the header's, and tags of 32-bit numbers behind them."""
    body += bytes(len(body) % 2)
    entries, arrays, behind = b"", b"", len(body) + 2 + 12 * len(tags) + 4
    for tag, numbers in sorted((tag, list(numbers)) for tag, numbers in tags.items()):
        packed = struct.pack(f"{order}{len(numbers)}I", *numbers)
        inline = packed if len(numbers) == 1 else struct.pack(f"{order}I", behind + len(arrays))
        arrays += b"" if len(numbers) == 1 else packed
        entries += struct.pack(f"{order}HHI", tag, 4, len(numbers)) + inline
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", len(body))
    directory = struct.pack(f"{order}H", len(tags)) + entries + bytes(4) + arrays
    path.write_bytes(head + body[8:] + directory)
