"""Handlers write here what they really do: one line per fact, appended in one write, so that no two lines mix.

The instants are CLOCK_MONOTONIC, which all processes of a machine share. `tests/support/daemon.py` reads the file.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from spooled_supervisor import JobContext

_runs = 0
_dumps, _monotonic = json.dumps, time.monotonic  # kept, as some handlers break these modules


def note(what: str, **fields: Any) -> None:
    """One line."""
    if path := os.environ.get("LEDGER"):
        line = _dumps({"at": _monotonic(), "what": what, "pid": os.getpid(), **fields})
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, line.encode() + b"\n")
        finally:
            os.close(fd)


class Run:
    """One execution: `start` when it is made, `tick` while it works, `end` when it is done."""

    def __init__(self, ctx: JobContext) -> None:
        global _runs
        _runs += 1
        self.id = os.getpid() * 100_000 + _runs
        self._fields = {"job": ctx.job_id, "run": self.id, "retry_count": ctx.retry_count}
        self._ticked_at = 0.0
        self.note("start")

    def note(self, what: str, **fields: Any) -> None:
        note(what, **self._fields, **fields)

    def tick(self) -> None:
        """At most every 50 ms."""
        if _monotonic() - self._ticked_at > 0.05:
            self._ticked_at = _monotonic()
            self.note("tick")

    def end(self) -> None:
        self.note("end")
