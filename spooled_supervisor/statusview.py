"""`spooled-supervisor status`: the snapshot as a table for people, once, or again every second until Ctrl-C.

`render` is pure. What it shows was written by jobs, by the service and by configuration, so nothing of it reaches the
terminal as it is: control characters, escape sequences and what reorders text are spelled out (Unicode TR 36, 3.3),
and no cell is wider than its column. `show` owns the terminal while it redraws and gives it back however it ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, TextIO

from spooled_supervisor.errors import EX_FAILURE, EX_OK

REDRAW_S = 1.0
LOOK_S = 0.1
PLAIN_WIDTH = 160
"""Where there is no terminal: wide enough for whole job ids, narrow enough for a mail."""
MIN_WIDTH = 40
GAP = "  "
MAX_FAILURES = 5
MAX_LEASES = 5
BAR_CHARS = 10
MAX_TEXT_CHARS = 2000
"""Of one text; what comes after could not be seen anyway."""

Status = Mapping[str, Any]

ENTER_SCREEN, LEAVE_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
SGR = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "36"}
RESET = "\x1b[0m"

STATE_COLOURS = {"busy": "blue", "starting": "yellow", "stopping": "yellow", "aborting": "red", "killed": "red"}
KINDS = {"timed_out": "timed out", "released": "given back"}


# --- showing --------------------------------------------------------------------------------------------------------


def show(fetch: Callable[[], dict[str, Any]], *, watch: bool, as_json: bool, stream: TextIO) -> int:
    """Print what `fetch` gives, or keep printing it; the exit code.

    `fetch` raises OSError or ValueError where there is no daemon. Whoever watches is told so and sees it come back.
    """
    try:
        if watch:
            return _watch(fetch, as_json=as_json, stream=stream)
        return _show_once(fetch, as_json=as_json, stream=stream)
    except KeyboardInterrupt:
        return EX_OK
    except _NobodyReads:
        return EX_FAILURE


class _NobodyReads(Exception):
    """The stream is closed (`| head`)."""


def _show_once(fetch: Callable[[], dict[str, Any]], *, as_json: bool, stream: TextIO) -> int:
    try:
        status = fetch()
    except (OSError, ValueError) as error:
        return _complain(error)
    if as_json:
        _write(stream, json.dumps(status, indent=2) + "\n")
    else:
        _write(stream, render(status, width=_size(stream)[0], colour=_has_colour(stream)))
    return EX_OK


def _watch(fetch: Callable[[], dict[str, Any]], *, as_json: bool, stream: TextIO) -> int:
    if as_json or not stream.isatty() or os.environ.get("TERM", "dumb") in ("", "dumb"):
        return _follow(fetch, as_json=as_json, stream=stream)
    try:
        status = fetch()
    except (OSError, ValueError) as error:
        return _complain(error)
    lost = ""
    with _Screen(stream) as screen:
        screen.enter()
        while True:
            width, height = _size(stream)
            screen.draw(render(status, width=width, colour=_has_colour(stream), lost=lost).splitlines(), height)
            screen.wait(REDRAW_S)
            try:
                status, lost = fetch(), ""
            except (OSError, ValueError) as error:
                lost = lost or f"{_why(error)}; since {_clock(time.time())}, trying again"


def _follow(fetch: Callable[[], dict[str, Any]], *, as_json: bool, stream: TextIO) -> int:
    """For pipes and files: one table, or one line of JSON, after the other."""
    is_first = True
    while True:
        try:
            status = fetch()
        except (OSError, ValueError) as error:
            code = _complain(error)
            if is_first:
                return code
        else:
            if as_json:
                _write(stream, json.dumps(status, separators=(",", ":")) + "\n")
            else:
                _write(stream, ("" if is_first else "\n") + render(status, width=_size(stream)[0], colour=False))
            is_first = False
        time.sleep(REDRAW_S)


class _Screen:
    """The terminal's other screen, without a cursor. Given back however we end, and while we are stopped (Ctrl-Z)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._handlers: dict[int, Any] = {}
        self._is_stopping = False  # SIGTSTP has come
        self._is_leaving = False

    def __enter__(self) -> _Screen:
        ends = dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), self._on_end)
        for number, handler in {**ends, signal.SIGTSTP: self._on_stop}.items():
            self._handlers[number] = signal.signal(number, handler)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_leaving = True  # a second Ctrl-C must not come between
        if kind is not _NobodyReads:
            _write(self._stream, LEAVE_SCREEN)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def enter(self) -> None:
        """Go to the other screen. Not in `__enter__`: what ends us there would leave us on it."""
        _write(self._stream, ENTER_SCREEN)

    def draw(self, lines: Sequence[str], height: int) -> None:
        """One frame; what does not fit is left out and counted."""
        if len(lines) > height:
            hidden = len(lines) - height + 1
            lines = [*lines[: height - 1], f"... {hidden} more lines"]
        _write(self._stream, HOME + f"{CLEAR_LINE}\r\n".join(lines) + CLEAR_LINE + CLEAR_BELOW)

    def wait(self, seconds: float) -> None:
        """Sleep. A stop that was asked for meanwhile is done here, where nobody is in the middle of a line."""
        ends_at = time.monotonic() + seconds
        while not self._is_stopping and (left := ends_at - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_S))
        if self._is_stopping:
            self._is_stopping = False
            _write(self._stream, LEAVE_SCREEN)
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTSTP)  # until SIGCONT; the kernel ignores it where no shell could send that
            signal.signal(signal.SIGTSTP, self._on_stop)
            self.enter()

    def _on_end(self, number: int, frame: FrameType | None) -> None:
        if not self._is_leaving:
            raise KeyboardInterrupt

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self._is_stopping = True


def _write(stream: TextIO, text: str) -> None:
    """At once. Raises _NobodyReads, so that it is not taken for a daemon that does not answer."""
    try:
        encoding = stream.encoding or "utf-8"
        stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()
    except BrokenPipeError as error:
        raise _NobodyReads from error


def _complain(error: Exception) -> int:
    if sys.stderr is not None:
        sys.stderr.write(f"spooled-supervisor: {_why(error)}\n")
    return EX_FAILURE


def _why(error: Exception) -> str:
    text = printable(getattr(error, "strerror", None) or str(error) or type(error).__name__)
    return f"the daemon is not reachable: {text}"


def _size(stream: TextIO) -> tuple[int, int]:
    """Columns and lines."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        columns = os.environ.get("COLUMNS", "")
        return (int(columns) if columns.isdecimal() and int(columns) else PLAIN_WIDTH), 1 << 30
    return size.columns or 80, size.lines or 24


def _has_colour(stream: TextIO) -> bool:
    """no-color.org: not where it is unwanted, and never into a file."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


# --- rendering ------------------------------------------------------------------------------------------------------


def render(status: Status, *, width: int, colour: bool, lost: str = "") -> str:
    """The table, with a newline at its end; no line is wider than `width` (but at least MIN_WIDTH)."""
    paint = Paint(max(width, MIN_WIDTH), colour)
    lines = [
        *_head(status, paint, lost),
        "",
        *_children(status, paint),
        "",
        *_queues(status, paint),
        *_failures(status, paint),
        *_leases(status, paint),
    ]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Paint:
    """How wide a line may be, and whether it has colours."""

    width: int
    colour: bool

    def __call__(self, text: str, colour: str = "") -> str:
        return f"\x1b[{SGR[colour]}m{text}{RESET}" if colour and self.colour else text

    def line(self, text: str, colour: str = "") -> str:
        """One line, cut to the width."""
        return self(fit(text, self.width), colour)

    def wrapped(self, text: str, colour: str = "", indent: str = "") -> list[str]:
        """As many lines as it takes."""
        return [self(indent + part, colour) for part in _wrap(text, self.width - len(indent))]


@dataclass(frozen=True, slots=True)
class Column:
    """`least`: it may become as narrow as that. `drop`: it may be left out, the highest number first."""

    title: str
    least: int = 0
    is_number: bool = False
    drop: int = 0


Row = Sequence[tuple[str, str]]
"""Cells: text and colour."""


def table(paint: Paint, columns: Sequence[Column], rows: Sequence[Row]) -> Iterator[str]:
    """Lines. Columns are as wide as their texts; where that is too much, some are left out and others give way."""
    widths = [
        max(cell_width(text) for text in (column.title, *(row[n][0] for row in rows)))
        for n, column in enumerate(columns)
    ]
    kept = _kept(columns, widths, paint.width)
    _narrow(columns, widths, kept, paint.width)
    for row in ([(column.title, "dim") for column in columns], *rows):
        cells = []
        left = paint.width
        for n in kept:
            if left <= 0:
                break
            width = min(widths[n], left)
            text, colour = row[n]
            shown = fit(text, width)
            pad = " " * (width - cell_width(shown))
            cells.append(pad + paint(shown, colour) if columns[n].is_number else paint(shown, colour) + pad)
            left -= width + len(GAP)
        yield GAP.join(cells).rstrip()


def _kept(columns: Sequence[Column], widths: Sequence[int], width: int) -> list[int]:
    """The columns that there is room for, at their narrowest."""
    kept = [n for n, size in enumerate(widths) if size > 0]
    narrowest = [min(size, column.least or size) for size, column in zip(widths, columns, strict=True)]
    while sum(narrowest[n] for n in kept) + len(GAP) * (len(kept) - 1) > width:
        first = max(kept, key=lambda n: columns[n].drop)
        if not columns[first].drop:
            break
        kept.remove(first)
    return kept


def _narrow(columns: Sequence[Column], widths: list[int], kept: Sequence[int], width: int) -> None:
    """Take from the widest column that may give way, until all fit."""
    while (excess := sum(widths[n] for n in kept) + len(GAP) * (len(kept) - 1) - width) > 0:
        loose = [n for n in kept if columns[n].least and widths[n] > columns[n].least]
        if not loose:
            return
        widest = max(loose, key=lambda n: widths[n])
        widths[widest] -= max(1, min(excess, widths[widest] - columns[widest].least, widths[widest] // 4))


def _head(status: Status, paint: Paint, lost: str) -> Iterator[str]:
    word, colour = standing(status)
    if lost:
        yield from paint.wrapped(lost, "red")
    who = f"{_text(status, 'worker_id') or 'not registered'} on {_text(status, 'hostname') or 'this machine'}"
    lead = f"{word}  "
    yield paint(word, colour) + "  " + fit(f"{who}, up {span(_number(status, 'uptime_s'))}", paint.width - len(lead))
    for reason in _all_reasons(status):
        yield from _hanging(paint, reason, colour)
    beat = _number(status, "heartbeat_age_s")
    yield from paint.wrapped(
        "; ".join(
            part
            for part in (
                f"pid {status.get('pid')}, version {_text(status, 'version') or '?'}",
                f"service {_text(status, 'api_url')}" if status.get("api_url") else "",
                "no heartbeat yet" if beat is None else f"heartbeat {span(beat)} ago",
                _load(status),
            )
            if part
        ),
        "dim",
    )
    yield from paint.wrapped(_outbox(status), "red" if not status.get("outbox_on_disk", True) else "dim")


def _hanging(paint: Paint, text: str, colour: str) -> Iterator[str]:
    for n, part in enumerate(_wrap(printable(text), paint.width - 4)):
        yield paint(("  - " if n == 0 else "    ") + part, colour)


def standing(status: Status) -> tuple[str, str]:
    """One word for all, and its colour; the same words as on the status page."""
    phase = _text(status, "phase") or "unknown"
    if phase in ("draining", "stopping", "stopped"):
        return phase, "yellow"
    if phase == "booting":
        return "starting", "yellow"
    if status.get("unhealthy"):
        return "not healthy", "red"
    if status.get("quiet"):
        return "quiet", "yellow"
    return ("not ready", "yellow") if status.get("reasons") else (phase, "green")


def _all_reasons(status: Status) -> Iterable[str]:
    return dict.fromkeys(str(reason) for reason in (*status.get("unhealthy", ()), *status.get("reasons", ())))


def _load(status: Status) -> str:
    parts = []
    if (cpu := _number(status, "cpu_percent")) is not None:
        parts.append(f"CPU {cpu:.0f} %")
    if (memory := _number(status, "memory_percent")) is not None:
        parts.append(f"memory {memory:.0f} %")
    if load := status.get("load_average"):
        parts.append(f"load {float(load[0]):.1f}")
    return ", ".join(parts)


def _outbox(status: Status) -> str:
    depth = status.get("outbox_depth", 0)
    text = f"outbox: {depth} waiting" + (f", the oldest {span(_number(status, 'outbox_age_s'))}" if depth else "")
    if problem := status.get("outbox_problem"):
        text += f"; in memory only: {printable(str(problem))}"
    elif not status.get("outbox_on_disk", True):
        text += "; in memory only"
    return text + ("; full, nothing is claimed" if status.get("outbox_full") else "")


def _children(status: Status, paint: Paint) -> Iterator[str]:
    children = sorted(status.get("children", ()), key=lambda child: (child["slot"], child["generation"]))
    busy = sum(child["job_id"] is not None for child in children)
    text = f"{busy} of {status.get('procs')} busy, generation {status.get('generation')}"
    if backed_off := status.get("slots_backed_off"):
        text += f", {backed_off} {'slot' if backed_off == 1 else 'slots'} whose children fail"
    yield paint("Children", "bold") + "  " + fit(text, paint.width - 10)
    if children:
        yield from table(paint, CHILD_COLUMNS, [_child_row(child) for child in children])


CHILD_COLUMNS = (
    Column("SLOT", is_number=True),
    Column("PID", is_number=True),
    Column("GEN", is_number=True, drop=5),
    Column("STATE"),
    Column("QUEUE", least=8),
    Column("JOB", least=9),
    Column("ELAPSED", is_number=True),
    Column("DEADLINE", is_number=True, drop=1),
    Column("%", is_number=True),
    Column("PROGRESS", drop=7),
    Column("MEMORY", is_number=True, drop=4),
    Column("CPU", is_number=True, drop=6),
    Column("MESSAGE", least=10, drop=3),
)


def _child_row(child: Status) -> list[tuple[str, str]]:
    deadline, percent = _number(child, "deadline_in_s"), _number(child, "percent")
    late = "red" if deadline is not None and deadline < 5 else ""
    state = _text(child, "state")
    return [
        (str(child["slot"]), ""),
        (_or_dash(child.get("pid")), ""),
        (str(child["generation"]), ""),
        (state, STATE_COLOURS.get(state, "dim")),
        (_text(child, "queue") or "-", ""),
        (_text(child, "job_id") or "-", ""),
        (span(_number(child, "elapsed_s")), ""),
        ("over" if deadline is not None and deadline < 0 else span(deadline), late),
        ("" if percent is None else f"{percent:.0f}%", ""),
        ("" if percent is None else bar(percent), "blue"),
        (size(_number(child, "pss_bytes")), ""),
        (span(_number(child, "cpu_s")), ""),
        (_text(child, "message"), "dim"),
    ]


QUEUE_COLUMNS = (
    Column("QUEUE", least=8),
    Column("WEIGHT", is_number=True),
    Column("BUSY", is_number=True),
    Column("WAITING", is_number=True),
    Column("DONE", is_number=True),
    Column("FAILED", is_number=True),
    Column("PER MIN", is_number=True),
    Column("BREAKER"),
)
BREAKER_COLOURS = {"closed": "dim", "half_open": "yellow"}


def _queues(status: Status, paint: Paint) -> Iterator[str]:
    queues = status.get("queues", ())
    yield paint("Queues", "bold") + ("" if queues else "  none yet")
    if queues:
        yield from table(paint, QUEUE_COLUMNS, [_queue_row(queue) for queue in queues])


def _queue_row(queue: Status) -> list[tuple[str, str]]:
    most = queue.get("max_procs")
    breaker = _text(queue, "breaker") or "-"
    return [
        (_text(queue, "name"), ""),
        (f"{queue['weight']:g}", ""),
        (f"{queue['in_progress']}" + (f"/{most}" if most is not None else ""), ""),
        (str(queue["waiting"]), ""),
        (_or_dash(queue.get("done")), ""),
        (_or_dash(queue.get("failed")), ""),
        (f"{queue.get('rate_per_min', 0.0):.1f}", ""),
        (breaker.replace("_", " "), BREAKER_COLOURS.get(breaker, "red")),
    ]


def _failures(status: Status, paint: Paint) -> Iterator[str]:
    failures = status.get("failures", ())
    if not failures:
        return
    yield ""
    yield paint("Last failures", "bold") + ("" if len(failures) <= MAX_FAILURES else f"  {MAX_FAILURES} of them")
    columns = (
        Column("WHEN"),
        Column("KIND"),
        Column("QUEUE", least=8),
        Column("JOB", least=9),
        Column("THEN", drop=1),
        Column("ERROR", least=30),
    )
    yield from table(paint, columns, [_failure_row(failure) for failure in failures[:MAX_FAILURES]])


def _failure_row(failure: Status) -> list[tuple[str, str]]:
    kind = _text(failure, "kind")
    lines = str(failure.get("error") or "").splitlines() or [""]
    return [
        (_clock(failure.get("failed_at")), "dim"),
        (KINDS.get(kind, kind), "red"),
        (_text(failure, "queue"), ""),
        (_text(failure, "job_id"), ""),
        ("retried" if failure.get("will_retry") else "final", ""),
        (printable(lines[0]), ""),
    ]


def _leases(status: Status, paint: Paint) -> Iterator[str]:
    leases = status.get("leases", ())
    if not leases:
        return
    held = status.get("leases_held", len(leases))
    yield ""
    yield paint("Leases", "bold") + f"  {held} held" + (", those that end first" if held > MAX_LEASES else "")
    columns = (
        Column("JOB", least=9),
        Column("QUEUE", least=8),
        Column("STATE"),
        Column("RENEWAL IN", is_number=True),
        Column("ENDS IN", is_number=True),
    )
    rows = [
        [
            (_text(lease, "job_id"), ""),
            (_text(lease, "queue"), ""),
            (_text(lease, "state"), ""),
            (span(_number(lease, "renew_in_s")), ""),
            (span(_number(lease, "ends_in_s")), "red" if (_number(lease, "ends_in_s") or 0.0) < 5 else ""),
        ]
        for lease in leases[:MAX_LEASES]
    ]
    yield from table(paint, columns, rows)


# --- texts ----------------------------------------------------------------------------------------------------------


def printable(text: str) -> str:
    r"""`text` on one line, without anything that a terminal would obey or a reader would not see.

    >>> printable("a\x1b[31m\u202e\nb")
    'a\\x1b[31m\\u202e b'
    """
    return _spelled_out(" ".join(text[:MAX_TEXT_CHARS].split()))


def printable_lines(text: str) -> str:
    r"""All of `text`, as harmless as `printable` makes it; its lines and their indentation stay.

    >>> print(printable_lines("Traceback:\n\tat a\x1b]0;b\rc"))
    Traceback:
            at a\x1b]0;b\rc
    """
    return "\n".join(_spelled_out(line.expandtabs()) for line in text.split("\n"))


def _spelled_out(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def cell_width(text: str) -> int:
    """Columns that a terminal gives it (Unicode TR 11).

    >>> cell_width("abc"), cell_width("日本"), cell_width("e\u0301")
    (3, 4, 1)
    """
    if text.isascii():
        return len(text)
    return sum(_char_width(char) for char in text)


def _char_width(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def fit(text: str, width: int) -> str:
    """At most `width` columns of it, an ellipsis at the end where something is missing.

    >>> fit("abcdef", 4), fit("abcd", 4), fit("日本語", 5), fit("abc", 0)
    ('abc…', 'abcd', '日本…', '')
    """
    if cell_width(text) <= width:
        return text
    kept, used = [], 0
    for char in text:
        used += _char_width(char)
        if used > width - 1:
            break
        kept.append(char)
    return "".join(kept) + "…" if width > 0 else ""


def _wrap(text: str, width: int) -> list[str]:
    """Lines of whole words where that is possible."""
    lines, line = [], ""
    for word in text.split():
        if line and cell_width(line) + 1 + cell_width(word) > width:
            lines.append(line)
            line = ""
        line = f"{line} {word}" if line else word
        while cell_width(line) > width:
            part = fit(line, width + 1)[:-1] if width > 0 else line
            lines.append(part)
            line = line[len(part) :]
    return [*lines, line] if line else lines or [""]


def span(seconds: float | None) -> str:
    """A duration for people.

    >>> [span(s) for s in (None, 0.04, 9.96, 59.9, 61, 7322, 90000)]
    ['-', '0.0s', '10s', '59s', '1m01s', '2h02m', '1d01h']
    """
    if seconds is None:
        return "-"
    if seconds < 0:
        return "-" + span(-seconds)
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    if seconds < 60:
        return f"{min(59, round(seconds))}s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 24 else f"{hours // 24}d{hours % 24:02d}h"


def size(n_bytes: float | None) -> str:
    """A size for people.

    >>> [size(n) for n in (None, 0, 5 << 20, 3 << 30)]
    ['-', '0M', '5M', '3.0G']
    """
    if n_bytes is None:
        return "-"
    mib = n_bytes / (1 << 20)
    return f"{mib:.0f}M" if mib < 1024 else f"{mib / 1024:.1f}G"


def bar(percent: float) -> str:
    """Progress as a bar.

    >>> bar(0.0), bar(55.0), bar(200.0)
    ('----------', '######----', '##########')
    """
    full = round(min(100.0, max(0.0, percent)) / 100 * BAR_CHARS + 0.001)
    return "#" * full + "-" * (BAR_CHARS - full)


def _clock(at_wall: Any) -> str:
    if not isinstance(at_wall, (int, float)):
        return "-"
    at = time.localtime(at_wall)
    is_today = at[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M", at)


def _text(values: Status, name: str) -> str:
    value = values.get(name)
    return "" if value is None else printable(str(value))


def _number(values: Status, name: str) -> float | None:
    value = values.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)
