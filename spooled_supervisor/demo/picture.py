"""Pixels: where tiles lie in the picture and in the complex plane, what colours mean, how a PNG file is written.

Pure but for `write_png`. A picture is RGB, three bytes a pixel, top row first. Tiles cover it exactly, without overlap.
Source: Portable Network Graphics (PNG) Specification, third edition: 5.3 chunks, 9.2 filter types, 11.2.1 IHDR.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Colour = tuple[int, int, int]

SIGNATURE = b"\x89PNG\r\n\x1a\n"
INSIDE = bytes(3)
CENTRE = complex(-0.72, 0.0)
WIDTH, HEIGHT = 3.45, 2.3
"""The part of the plane that is always in the picture; one with other proportions shows more of it."""
TURNS = 500
"""At most so many steps of the orbit for each point. More sharpens the border, which few pixels are on."""

# --- colours ----------------------------------------------------------------------------------------------------------

_STOPS: Sequence[tuple[float, Colour]] = (
    (0.00, (4, 8, 36)),
    (0.14, (10, 38, 104)),
    (0.30, (50, 138, 210)),
    (0.42, (222, 244, 250)),
    (0.52, (255, 216, 112)),
    (0.66, (230, 110, 26)),
    (0.80, (112, 20, 50)),
    (0.92, (30, 6, 60)),
    (1.00, (4, 8, 36)),
)
_SHADES = 1024


def _between(place: float) -> bytes:
    """The colour at a place from 0 to 1, on the straight line between its neighbouring stops."""
    index = next(n for n, (end, _) in enumerate(_STOPS[1:]) if place <= end)
    (start, low), (end, high) = _STOPS[index], _STOPS[index + 1]
    share = (place - start) / (end - start)
    return bytes(round(a + (b - a) * share) for a, b in zip(low, high, strict=True))


_PALETTE = [_between(shade / _SHADES) for shade in range(_SHADES)]


def colour(turns: float) -> bytes:
    """A point's colour by the turns that it took to escape. Logarithmic: near the border they grow without end."""
    return _PALETTE[int(_SHADES * (0.25 * math.log(max(turns, 0.0) + 1.6) - 0.14)) % _SHADES]


# --- tiles ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tile:
    """A rectangle of pixels. `number` counts from 1, in the order in which tiles are to be drawn."""

    number: int
    left: int
    top: int
    width: int
    height: int
    mishap: str | None = None


def cut(width: int, height: int, count: int) -> list[Tile]:
    """About `count` tiles of about square shape that cover the picture.

    The middle comes first, as there is most to do: what is drawn last should be short, or all but one child wait for
    it. Two cheap tiles are brought forward to have their mishaps early.
    """
    across = max(1, min(width, count, round(math.sqrt(count * width / height))))
    down = max(1, min(height, round(count / across)))
    columns, rows = _edges(width, across), _edges(height, down)
    places = [(left, top, right, low) for top, low in rows for left, right in columns]
    places.sort(key=lambda place: math.hypot(place[0] + place[2] - width, place[1] + place[3] - height))
    mishaps: dict[int, str] = {}
    if len(places) > 1:
        for index, mishap in ((len(places) // 32, "crash"), (len(places) // 16 + 1, "hang")):
            places.insert(index, places.pop())
            mishaps[index] = mishap
    return [
        Tile(index + 1, left, top, right - left, low - top, mishaps.get(index))
        for index, (left, top, right, low) in enumerate(places)
    ]


def _edges(length: int, parts: int) -> list[tuple[int, int]]:
    return [(length * n // parts, length * (n + 1) // parts) for n in range(parts)]


def payload(tile: Tile, width: int, height: int) -> dict[str, Any]:
    """The job of drawing this tile of a picture of this size, as `mandelbrot.draw_tile` takes it."""
    step = max(WIDTH / width, HEIGHT / height)
    return {
        "left": CENTRE.real + (tile.left - width / 2) * step,
        "top": CENTRE.imag + (height / 2 - tile.top) * step,
        "step": step,
        "width": tile.width,
        "height": tile.height,
        "limit": TURNS,
        "mishap": tile.mishap,
    }


class Picture:
    """The pixels that have come so far; the others are black."""

    def __init__(self, width: int, height: int) -> None:
        self.width = width
        self.height = height
        self.pixels = bytearray(3 * width * height)

    def paste(self, tile: Tile, pixels: bytes) -> None:
        """Put a tile where it belongs. Raises ValueError for a wrong number of bytes."""
        row_bytes = 3 * tile.width
        if len(pixels) != row_bytes * tile.height:
            raise ValueError(f"{len(pixels)} bytes are no tile of {tile.width} x {tile.height} pixels")
        for row in range(tile.height):
            start = 3 * ((tile.top + row) * self.width + tile.left)
            self.pixels[start : start + row_bytes] = pixels[row * row_bytes : (row + 1) * row_bytes]

    def mean(self, left: int, top: int, right: int, low: int) -> Colour:
        """The average colour of a rectangle, looked at in a few places only: it is for a thumbnail."""
        spots = [
            3 * (y * self.width + x)
            for y in range(top, low, max(1, (low - top) // 4))
            for x in range(left, right, max(1, (right - left) // 4))
        ]
        red, green, blue = (sum(self.pixels[spot + n] for spot in spots) // len(spots) for n in range(3))
        return red, green, blue


# --- PNG --------------------------------------------------------------------------------------------------------------


def png(picture: Picture) -> bytes:
    """The picture as a file: eight bits a channel, no interlace, no filter (with so few colours they gain nothing)."""
    header = struct.pack(">IIBBBBB", picture.width, picture.height, 8, 2, 0, 0, 0)
    row_bytes = 3 * picture.width
    squeeze = zlib.compressobj()
    starts = range(0, len(picture.pixels), row_bytes)
    data = [squeeze.compress(b"\0" + picture.pixels[start : start + row_bytes]) for start in starts]
    data.append(squeeze.flush())
    return SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", b"".join(data)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def output_problem(path: Path) -> str | None:
    """Why a picture cannot or should not be written there, or None. A PNG may be replaced, nothing else."""
    try:
        if path.exists():
            if not path.is_file():
                return "is no regular file"
            with path.open("rb") as file:
                start = file.read(len(SIGNATURE))
            if start and start != SIGNATURE:
                return "exists and is no PNG file, so it is left alone"
        if not path.parent.is_dir():
            return f"there is no directory {path.parent}"
        if not os.access(path.parent, os.W_OK | os.X_OK):
            return f"{path.parent} is not writable"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def write_png(path: Path, data: bytes) -> None:
    """Write beside and rename, so that there is never half a picture. Raises OSError."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):  # renamed: the usual end
            part.unlink()
