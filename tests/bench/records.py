"""What the benchmark's handlers write down of their runs: one fixed-size record per job, in one file for all children.

    pid | offered_at | started_at | ended_at      little endian, u32 and three f64: seconds on CLOCK_MONOTONIC

A record is far smaller than a page and written by one write(2) in append mode, so that children do not mix theirs.
Imported by the app, so it imports nothing of the benchmark.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "SPOOLED_BENCH_RECORDS"
"""The environment variable that names the file; without it nothing is written down."""

_FORM = struct.Struct("<Iddd")


@dataclass(frozen=True, slots=True)
class Record:
    pid: int
    offered_at: float
    started_at: float
    ended_at: float


class Writer:
    """A child's end of the file. `open` it after the fork."""

    def __init__(self) -> None:
        self._fd = -1
        self._pid = 0

    def open(self) -> None:
        path = os.environ.get(VARIABLE)
        if path:
            self._pid = os.getpid()
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

    def write(self, offered_at: float, started_at: float, ended_at: float) -> None:
        if self._fd >= 0:
            os.write(self._fd, _FORM.pack(self._pid, offered_at, started_at, ended_at))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read(path: Path) -> list[Record]:
    """All records, by their start."""
    data = path.read_bytes()
    found = [Record(*fields) for fields in _FORM.iter_unpack(data[: len(data) // _FORM.size * _FORM.size])]
    return sorted(found, key=lambda record: record.started_at)
