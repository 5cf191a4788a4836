"""What a child prints: the supervisor's end of its output pipe. Lines for the log at a bounded rate, a tail per job.

The pipe carries fd 1 and 2 of the child and of all that it starts, so it may never end and may never stop: the end of
the child is told by its exit, never by the end of this pipe, and a flood is slowed down by reading it slowly. All of
this runs in the loop's thread and never blocks.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from enum import Enum, auto

from spooled_supervisor.rates import LineRate

READ_BYTES = 64 * 1024
MAX_LINE = 4096
TAIL_BYTES = 4096
FLOOD_BYTES = 1 << 20
"""Read at most this much per FLOOD_PAUSE_S; what prints faster than that waits in its pipe."""
FLOOD_PAUSE_S = 0.1


class Found(Enum):
    """What a read has found."""

    SOME = auto()
    NOTHING = auto()  # at the moment
    END = auto()  # everybody who could print has closed it


class OutputPipe:
    """Reads one output pipe until it is closed. `on_line` gets each line; `tail` is what came last."""

    def __init__(self, fd: int, on_line: Callable[[str], None], on_dropped: Callable[[int], None]) -> None:
        self._fd = fd
        self._on_line = on_line
        self._on_dropped = on_dropped
        self._partial = b""
        self._tail = b""
        self._rate = LineRate()
        self._read_since_pause = 0
        self._pause_ends: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._on_readable)

    @property
    def tail(self) -> str:
        """The last TAIL_BYTES that were printed since `begin`."""
        return (self._tail + self._partial)[-TAIL_BYTES:].decode("utf-8", "replace").strip()

    def begin(self) -> None:
        """A new job begins: what was printed before is not its output."""
        self.drain()
        self._tail = b""

    def drain(self) -> None:
        """Read what is there now, a flood's worth at the most, and end an unfinished line."""
        for _ in range(FLOOD_BYTES // READ_BYTES):
            if self._read() is not Found.SOME:
                break
        if self._partial:
            line, self._partial = self._partial, b""
            self._log(line)
        if dropped := self._rate.take_dropped():
            self._on_dropped(dropped)

    def close(self) -> None:
        """Read what is there and let the pipe go."""
        if self._fd < 0:
            return
        self.drain()
        if self._pause_ends is not None:
            self._pause_ends.cancel()
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._fd = -1

    def _on_readable(self) -> None:
        if self._read() is Found.END:
            self._loop.remove_reader(self._fd)
        elif self._read_since_pause >= FLOOD_BYTES:
            self._loop.remove_reader(self._fd)
            self._pause_ends = self._loop.call_later(FLOOD_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._pause_ends = None
        self._read_since_pause = 0
        if dropped := self._rate.take_dropped():
            self._on_dropped(dropped)
        self._loop.add_reader(self._fd, self._on_readable)

    def _read(self) -> Found:
        """One read. Nothing is there also when `drain` was quicker, after the loop had seen that there is something."""
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return Found.NOTHING
        if not data:
            return Found.END
        self._read_since_pause += len(data)
        self._take(data)
        return Found.SOME

    def _take(self, data: bytes) -> None:
        *lines, partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._log(self._cut(line))
        self._partial = self._cut(partial)

    def _cut(self, line: bytes) -> bytes:
        """Log a line that is too long piece by piece, whether its end has come or not; its last piece."""
        while len(line) > MAX_LINE:
            self._log(line[:MAX_LINE])
            line = line[MAX_LINE:]
        return line

    def _log(self, line: bytes) -> None:
        self._tail = (self._tail + line[-TAIL_BYTES:] + b"\n")[-TAIL_BYTES:]
        if line.strip() and self._rate.allows():
            self._on_line(line.decode("utf-8", "replace").rstrip("\r"))
