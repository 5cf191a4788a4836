"""One line per event to standard error, and the standard `logging` of others in the same form.

Knows which events become lines (all of level DEBUG and above that reach the threshold) and how loud each is; what a
line looks like is `lines`, how it gets out without ever making us wait is `stream`. What could not be written is
counted, and the count is the first line once writing works again. Lines carry `<N>` priorities where standard error is
the journal's own socket (systemd.exec(5), $JOURNAL_STREAM).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence

from spooled_supervisor.errors import ConfigError
from spooled_supervisor.events import Event, Events, JobLogged
from spooled_supervisor.telemetry.lines import Lines, level_name
from spooled_supervisor.telemetry.stream import LineStream

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
FORMATS = ("text", "json")

_SYSLOG_PRIORITIES = {"debug": b"<7>", "info": b"<6>", "warn": b"<4>", "error": b"<3>"}  # sd-daemon(3)

# httpx tells of every request at INFO; httpcore's DEBUG shows request headers, the API key among them.
_QUIETED_LOGGERS = ("httpx", "httpcore")


def setup(level: str, format: str, *, events: Events, stream_fd: int = 2, secrets: Sequence[str] = ()) -> EventLog:
    """Log `events` and the standard `logging` to `stream_fd` from now on, until `close`. Raises ConfigError."""
    problems = []
    if level not in LEVELS:
        problems.append(f"--log-level: {level!r} is none of {', '.join(LEVELS)}")
    if format not in FORMATS:
        problems.append(f"--log-format: {format!r} is none of {', '.join(FORMATS)}")
    if problems:
        raise ConfigError(problems)
    log = EventLog(LineStream(stream_fd), Lines(format, secrets), LEVELS[level])
    log.listen(events)
    return log


class EventLog:
    """Writes lines. May be used from any thread; the loop's thread never waits for more than another one's line."""

    def __init__(self, stream: LineStream, lines: Lines, threshold: int) -> None:
        self.threshold = threshold
        self.dropped = 0  # lines that could not be written since the start
        self._stream = stream
        self._lines = lines
        self._told = 0  # how many of `dropped` a line has told of
        self._has_priorities = os.environ.get("JOURNAL_STREAM") == stream.device_and_inode
        # Reentrant, as the garbage collector may run a destructor that logs (asyncio's tasks do) while we write.
        self._lock = threading.RLock()
        self._is_writing = False
        self._undo: list[tuple[logging.Logger, int]] = []
        self._bridge = _Bridge(self)
        self._unsubscribe = _nothing

    def listen(self, events: Events) -> None:
        """Write a line for each event from now on, and for each record of the standard `logging`."""
        self._unsubscribe = events.subscribe(self._on_event)
        root = logging.getLogger()
        self._set_level(root, self.threshold)
        for name in _QUIETED_LOGGERS:
            self._set_level(logging.getLogger(name), max(logging.WARNING, self.threshold))
        root.addHandler(self._bridge)

    def mask(self, text: str) -> str:
        """See `Lines`."""
        return self._lines.mask(text)

    def keep_secret(self, secret: str) -> None:
        """Mask this text, too, from now on."""
        self._lines.keep_secret(secret)

    def close(self) -> None:
        """Stop listening, give the descriptor back and leave `logging` as it was found."""
        self._unsubscribe()
        logging.getLogger().removeHandler(self._bridge)
        while self._undo:
            logger, level = self._undo.pop()
            logger.setLevel(level)
        self._stream.close()

    def write(self, level: int, name: str, /, **fields: object) -> None:
        """Write one line that stands for no event, unless its level is below the threshold."""
        if level >= self.threshold:
            self._put(level, name, fields)

    def _on_event(self, event: Event) -> None:
        level = LEVELS.get(event.severity, logging.INFO) if type(event) is JobLogged else event.level
        if level < self.threshold:  # events that are only counted have level 0
            return
        self._put(level, event.name, _fields(event))

    def _put(self, level: int, name: str, fields: dict[str, object]) -> None:
        with self._lock:
            if self._is_writing:  # a destructor's line inside of ours
                self.dropped += 1
                return
            self._is_writing = True
            try:
                if not (self._tell_of_dropped() and self._send(level, name, fields)):
                    self.dropped += 1
            finally:
                self._is_writing = False

    def _tell_of_dropped(self) -> bool:
        """Say how many lines are missing here, if any are; whether the stream is fit for the next line."""
        missing = self.dropped - self._told
        if not missing:
            return True
        if not self._send(logging.WARNING, "log_lines_dropped", {"count": missing}):
            return False
        self._told += missing
        return True

    def _send(self, level: int, name: str, fields: dict[str, object]) -> bool:
        line = self._lines.line(level, name, fields)
        priority = _SYSLOG_PRIORITIES[level_name(level)] if self._has_priorities else b""
        return self._stream.write(priority + line + b"\n")

    def _set_level(self, logger: logging.Logger, level: int) -> None:
        self._undo.append((logger, logger.level))
        logger.setLevel(level)


class StandardLog:
    """For a program that has a log of its own: events go to its standard `logging`, to the logger `spooled_supervisor`.

    The message is the line without time and level; the record has the attributes `event` and `fields`.
    """

    dropped = 0

    def __init__(self, events: Events, secrets: Sequence[str] = ()) -> None:
        self._logger = logging.getLogger("spooled_supervisor")
        self._lines = Lines("text", secrets)
        events.subscribe(self._on_event)

    def mask(self, text: str) -> str:
        """See `Lines`."""
        return self._lines.mask(text)

    def keep_secret(self, secret: str) -> None:
        """Mask this text, too, from now on."""
        self._lines.keep_secret(secret)

    def write(self, level: int, name: str, /, **fields: object) -> None:
        """Log one line that stands for no event."""
        if self._logger.isEnabledFor(level):
            line = self._lines.line(level, name, fields).decode()
            message = line.split(" ", 1)[1][len(_WIDEST_LEVEL) + 1 :]
            self._logger.log(level, "%s", message, extra={"event": name, "fields": self._lines.masked(fields)})

    def _on_event(self, event: Event) -> None:
        level = LEVELS.get(event.severity, logging.INFO) if isinstance(event, JobLogged) else event.level
        if level > 0 and self._logger.isEnabledFor(level):
            self.write(level, event.name, **_fields(event))


_WIDEST_LEVEL = "ERROR"


class _Bridge(logging.Handler):
    """Brings records of the standard `logging` to our lines: asyncio's, httpx's, and those of failing subscribers."""

    def __init__(self, log: EventLog) -> None:
        super().__init__(log.threshold)
        self._log = log
        self._formatter = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            fields: dict[str, object] = {"logger": record.name, "message": _message(record)}
            if record.exc_info:
                fields["exception"] = self._formatter.formatException(record.exc_info)
            self._log.write(record.levelno, "log_record", **fields)
        except Exception:  # a record that cannot be shown is one line less, and no reason to fail whoever logged it
            self._log.dropped += 1


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception as error:  # logging's own habit is a traceback in the middle of the stream
        return f"{record.msg!r} does not fit its arguments: {error!r}"


def _fields(event: Event) -> dict[str, object]:
    return {name: _tidy(getattr(event, name)) for name in event.__struct_fields__}


def _tidy(value: object) -> object:
    return round(value, 6) if type(value) is float else value


def _nothing() -> None:
    pass
