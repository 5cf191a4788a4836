"""What the demo shows while it runs: a small live view on a terminal, plain lines everywhere else.

A frame is made by a pure function (`frame`): lines of spans, each a text and how it is to look. Only `Live` knows
sequences that move the cursor; it writes whole frames, so that nothing flickers, and gives the cursor back at the end.
Colours follow https://no-color.org and COLORTERM; without 256 of them the thumbnail is made of letters.
Source of the sequences: ECMA-48, and XTerm Control Sequences for DECTCEM (`?25`).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Protocol, TextIO

from spooled_supervisor.demo.picture import Colour, Picture, Tile
from spooled_supervisor.demo.progress import Child, Progress, TileState

REDRAW_S = 0.1
NOTES_SHOWN = 5
PLAIN_LINES = 12
"""Without a terminal: about so many lines on the way, and one for everything that goes wrong."""
MIN_COLUMNS_WITH_THUMBNAIL = 64
MAX_THUMBNAIL_COLUMNS = 72
CHILD_COLUMNS = 38

_STYLES = {"bold": "1", "dim": "2", "good": "32", "bad": "1;31", "busy": "36"}
_RAMP = " .:=+*#%@"
_PENDING: Mapping[TileState, Colour] = {
    TileState.WAITING: (44, 46, 52),
    TileState.RUNNING: (92, 96, 108),
    TileState.OVERDUE: (190, 40, 40),
    TileState.LOST: (90, 20, 20),
}
_PENDING_LETTERS = {TileState.WAITING: "-", TileState.RUNNING: "o", TileState.OVERDUE: "!", TileState.LOST: "X"}

Span = tuple[str, str]
"""A text, and a name of _STYLES or the parameters of an SGR sequence; an empty one for a plain text."""
Line = list[Span]


class Display(Protocol):
    def update(self, progress: Progress, at_s: float) -> None:
        """Show how it stands, if it is time to."""

    def close(self) -> None:
        """Leave the terminal as it was found, below what was shown. May be called twice."""


# --- what a terminal can do -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ink:
    """How a terminal is written to. `colours`: 0, 16, 256 or 2**24; `has_blocks`: it shows more than ASCII."""

    colours: int
    has_blocks: bool

    @classmethod
    def of(cls, env: Mapping[str, str], encoding: str | None) -> Ink:
        has_blocks = "utf" in (encoding or "").lower()
        if env.get("NO_COLOR"):
            return cls(0, has_blocks)
        if env.get("COLORTERM") in ("truecolor", "24bit"):
            return cls(2**24, has_blocks)
        return cls(256 if "256" in env.get("TERM", "") else 16, has_blocks)

    @property
    def has_thumbnail_colours(self) -> bool:
        return self.colours >= 256 and self.has_blocks

    def bar(self, share: float, columns: int) -> tuple[str, str]:
        """A bar's done and open part."""
        full = max(0, min(columns, int(share * columns)))
        done, rest = ("━", "╌") if self.has_blocks else ("#", ".")
        return done * full, rest * (columns - full)

    def two_dots(self, upper: Colour, lower: Colour) -> Span:
        """One character, whose upper and lower half have colours of their own."""
        return "▀", f"38;{self._colour(upper)};48;{self._colour(lower)}"

    def _colour(self, colour: Colour) -> str:
        if self.colours > 256:
            return "2;{};{};{}".format(*colour)
        if max(colour) - min(colour) < 16:
            return f"5;{232 + min(23, sum(colour) // 32)}"
        # The colour cube's levels are 0, 95, 135, 175, 215 and 255.
        red, green, blue = (0 if channel < 48 else max(1, (channel - 35) // 40) for channel in colour)
        return f"5;{16 + 36 * red + 6 * green + blue}"

    def render(self, line: Line, columns: int) -> str:
        """The line as it goes to the terminal, cut to its width."""
        parts, left, last = [], columns, ""
        for text, style in line:
            if left <= 0:
                break
            code = _STYLES.get(style, style) if self.colours else ""
            if code != last:
                parts.append(f"\x1b[{'0;' if last and code else ''}{code or '0'}m")
                last = code
            parts.append(text[:left])
            left -= len(text)
        return "".join(parts) + ("\x1b[0m" if last else "")


# --- the picture, small -----------------------------------------------------------------------------------------------


class Thumbnail:
    """The picture in so many characters. Dots are computed once, when their tile comes."""

    def __init__(
        self, picture: Picture, tiles: tuple[Tile, ...], columns: int, rows: int, *, dots_per_row: int
    ) -> None:
        self.columns = columns
        self.rows = rows
        self._picture = picture
        self._down = rows * dots_per_row
        self._owner: list[list[Tile]] = [
            [_tile_at(tiles, *self._middle(x, y)) for x in range(columns)] for y in range(self._down)
        ]
        self._dots: dict[tuple[int, int], Colour] = {}

    def _box(self, x: int, y: int) -> tuple[int, int, int, int]:
        width, height = self._picture.width, self._picture.height
        left, top = x * width // self.columns, y * height // self._down
        return left, top, max(left + 1, (x + 1) * width // self.columns), max(top + 1, (y + 1) * height // self._down)

    def _middle(self, x: int, y: int) -> tuple[int, int]:
        left, top, right, low = self._box(x, y)
        return (left + right) // 2, (top + low) // 2

    def dot(self, x: int, y: int, states: Mapping[int, TileState]) -> Colour | TileState:
        """A dot's colour, or the state of its tile while that is not here."""
        tile = self._owner[y][x]
        state = states[tile.number]
        if state is not TileState.DONE:
            return state
        known = self._dots.get((x, y))
        if known is None:
            left, top, right, low = self._box(x, y)
            right, low = min(right, tile.left + tile.width), min(low, tile.top + tile.height)
            known = self._dots[x, y] = self._picture.mean(max(left, tile.left), max(top, tile.top), right, low)
        return known

    def line(self, row: int, states: Mapping[int, TileState], ink: Ink) -> Line:
        if not ink.has_thumbnail_colours:
            return [("".join(_letter(self.dot(x, row, states)) for x in range(self.columns)), "")]
        pairs = ((self.dot(x, 2 * row, states), self.dot(x, 2 * row + 1, states)) for x in range(self.columns))
        return [ink.two_dots(_shown(upper), _shown(lower)) for upper, lower in pairs]


def _tile_at(tiles: tuple[Tile, ...], x: int, y: int) -> Tile:
    return next(t for t in tiles if t.left <= x < t.left + t.width and t.top <= y < t.top + t.height)


def _shown(dot: Colour | TileState) -> Colour:
    return _PENDING[dot] if isinstance(dot, TileState) else dot


def _letter(dot: Colour | TileState) -> str:
    if isinstance(dot, TileState):
        return _PENDING_LETTERS[dot]
    brightness = (2 * dot[0] + 5 * dot[1] + dot[2]) // 8
    return _RAMP[brightness * len(_RAMP) // 256]


# --- one frame --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layout:
    """How a terminal of some size is shared out. `panel_rows` hold children and, beside them, the thumbnail."""

    columns: int
    panel_rows: int
    thumbnail_columns: int  # 0: there is no room for one

    @classmethod
    def of(cls, columns: int, lines: int, procs: int, proportion: float) -> Layout:
        """`proportion` is the picture's width by its height; a character is about twice as high as wide."""
        fixed = 7 + NOTES_SHOWN  # title, bar, counts, blank lines, and the last line, where the cursor rests
        room = max(1, lines - fixed)
        wide = min(MAX_THUMBNAIL_COLUMNS, columns - CHILD_COLUMNS - 4, int(2 * room * proportion))
        rows = round(wide / proportion / 2)
        if columns < MIN_COLUMNS_WITH_THUMBNAIL or wide < 12 or rows < 4:
            return cls(columns, min(procs, room), 0)
        return cls(columns, rows, wide)


def frame(
    progress: Progress, thumbnail: Thumbnail | None, layout: Layout, ink: Ink, at_s: float, title: str
) -> list[Line]:
    """The view as lines, the title first."""
    lines: list[Line] = [[(title, "bold")], []]
    children = _children(progress, layout.panel_rows, at_s, ink)
    for row in range(layout.panel_rows):
        line: Line = [*thumbnail.line(row, progress.states, ink), ("   ", "")] if thumbnail else []
        lines.append(line + (children[row] if row < len(children) else []))
    lines += [[], _total(progress, layout.columns, ink, at_s), _counts(progress), []]
    for note in progress.notes[-NOTES_SHOWN:]:
        lines.append([(f"{note.at_s:5.1f} s  ", "dim"), (note.text, "bad" if note.is_bad else "good")])
    return lines


def _children(progress: Progress, rows: int, at_s: float, ink: Ink) -> list[Line]:
    children = progress.children
    if len(children) <= rows:
        return [_child(child, progress, at_s, ink) for child in children]
    rest = children[rows - 1 :]
    busy = sum(child.tile is not None for child in rest)
    shown = [_child(child, progress, at_s, ink) for child in children[: rows - 1]]
    return [*shown, [(f"and {len(rest)} more, {busy} of them busy", "dim")]]


def _child(child: Child, progress: Progress, at_s: float, ink: Ink) -> Line:
    name = (f"child {child.slot:<3}", "dim")
    if child.tile is None:
        return [name, ("idle" if child.is_ready else "starting", "dim")]
    number = (f"tile {child.tile.number:<4} ", "")
    if progress.states[child.tile.number] is TileState.OVERDUE:
        return [name, number, (f"over its time: {at_s - child.since_s:.1f} s", "bad")]
    done, rest = ink.bar(child.percent / 100, 12)
    return [name, number, (done, "busy"), (rest, "dim"), (f" {child.percent:3.0f} %", "")]


def _total(progress: Progress, columns: int, ink: Ink, at_s: float) -> Line:
    text = f"  {progress.done} of {progress.total} tiles  {at_s:.1f} s"
    done, rest = ink.bar(progress.done / progress.total, max(4, min(78, columns - 1) - len(text)))
    return [(done, "good"), (rest, "dim"), (text, "bold")]


def _counts(progress: Progress) -> Line:
    running = sum(child.tile is not None for child in progress.children)
    line: Line = [(f"{running} running, {progress.count(TileState.WAITING)} waiting", "")]
    counts = (("killed", progress.killed), ("crashed", progress.crashed), ("failed", progress.failed))
    line += [(f"   {len(runs)} {word}", "bad") for word, runs in counts if runs]
    return [*line, (f"   {len(progress.retried)} retried", "good")] if progress.retried else line


# --- the two displays -------------------------------------------------------------------------------------------------


class Live:
    """A view that is drawn over itself. `size` gives columns and lines; `write` takes what goes to the terminal."""

    def __init__(
        self,
        picture: Picture,
        tiles: tuple[Tile, ...],
        title: str,
        ink: Ink,
        *,
        size: Callable[[], tuple[int, int]],
        write: Callable[[str], None],
    ) -> None:
        self._picture = picture
        self._tiles = tiles
        self._title = title
        self._ink = ink
        self._size = size
        self._write = write
        self._thumbnail: Thumbnail | None = None
        self._drawn_size = (0, 0)
        self._drawn_lines = 0
        self._drawn_at_s = -REDRAW_S
        self._last: tuple[Progress, float] | None = None
        self._is_open = True
        self._write("\x1b[?25l")
        self._earlier = signal.signal(signal.SIGTSTP, self._on_suspend)

    def update(self, progress: Progress, at_s: float) -> None:
        self._last = (progress, at_s)
        if at_s - self._drawn_at_s >= REDRAW_S:
            self._draw(progress, at_s)

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        signal.signal(signal.SIGTSTP, self._earlier)
        try:
            if self._last is not None:
                self._draw(*self._last)
        finally:
            self._write("\x1b[?25h")

    def _draw(self, progress: Progress, at_s: float) -> None:
        self._drawn_at_s = at_s
        size = columns, lines = self._size()
        layout = Layout.of(columns, lines, progress.procs, self._picture.width / self._picture.height)
        if size != self._drawn_size:
            # The terminal has wrapped our old lines anew, nobody knows how: begin on a clean screen.
            start = "\x1b[2J\x1b[H" if self._drawn_lines else ""
            self._drawn_size = size
            self._thumbnail = self._make_thumbnail(layout)
        else:
            start = f"\x1b[{self._drawn_lines}A\r" if self._drawn_lines else ""
        shown = frame(progress, self._thumbnail, layout, self._ink, at_s, self._title)[: max(1, lines - 1)]
        body = "".join(f"{self._ink.render(line, columns - 1)}\x1b[K\n" for line in shown)
        self._write(f"{start}{body}\x1b[J")
        self._drawn_lines = len(shown)

    def _make_thumbnail(self, layout: Layout) -> Thumbnail | None:
        if not layout.thumbnail_columns:
            return None
        dots_per_row = 2 if self._ink.has_thumbnail_colours else 1
        columns, rows = layout.thumbnail_columns, layout.panel_rows
        return Thumbnail(self._picture, self._tiles, columns, rows, dots_per_row=dots_per_row)

    def _on_suspend(self, number: int, _frame: FrameType | None) -> None:
        """Ctrl-Z: the shell gets its cursor back, and the view is drawn below what happened there."""
        self._write("\x1b[?25h")
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        # Continued.
        signal.signal(signal.SIGTSTP, self._on_suspend)
        self._drawn_lines = 0
        self._write("\x1b[?25l")


class Plain:
    """Lines for a file, a pipe or a simple terminal: what goes wrong at once, the count now and then."""

    def __init__(self, title: str, *, write: Callable[[str], None]) -> None:
        self._write = write
        self._told_notes = 0
        self._told_done = 0
        write(f"{title}\n")

    def update(self, progress: Progress, at_s: float) -> None:
        for note in progress.notes[self._told_notes :]:
            self._write(f"{note.at_s:6.1f} s  {note.text}\n")
        self._told_notes = len(progress.notes)
        step = max(1, progress.total // PLAIN_LINES)
        is_end = progress.done == progress.total
        if progress.done // step > self._told_done // step or (is_end and self._told_done < progress.done):
            self._told_done = progress.done
            self._write(f"{at_s:6.1f} s  {progress.done} of {progress.total} tiles\n")

    def close(self) -> None:
        pass


def make_display(
    stream: TextIO, env: Mapping[str, str], picture: Picture, tiles: tuple[Tile, ...], title: str
) -> Display:
    """The live view if the stream is a terminal that can move its cursor, else plain lines."""
    if not stream.isatty() or env.get("TERM", "dumb") in ("dumb", ""):
        return Plain(title, write=lambda text: print(text, end="", file=stream, flush=True))
    stream.flush()
    fd = stream.fileno()

    def size() -> tuple[int, int]:
        with contextlib.suppress(OSError):  # a terminal that does not know
            columns, lines = os.get_terminal_size(fd)
            if columns > 0 and lines > 0:
                return columns, lines
        return 80, 24

    return Live(picture, tiles, title, Ink.of(env, stream.encoding), size=size, write=lambda text: _write_all(fd, text))


def _write_all(fd: int, text: str) -> None:
    """Past Python's buffer: a signal handler writes too, and a buffered writer must not be entered twice."""
    data = text.encode("utf-8", "replace")
    while data:
        data = data[os.write(fd, data) :]
