"""Whether the machine has room for more work: load and memory pressure against the limits that were set.

Above a limit nothing more is claimed; what runs goes on. Read at most once a second, whoever asks. Memory pressure is
the kernel's own figure (PSI, "some avg10": the share of the last ten seconds in which somebody waited for memory), of
our own cgroup where it has one, else of the machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from spooled_supervisor.cgroups import memory_cgroup

LOOK_INTERVAL_S = 1.0


class Pressure:
    """Asked before the first claim and with every tick; None as a limit means that it is not looked at."""

    def __init__(
        self,
        *,
        max_load: float | None,
        max_memory_pressure: float | None,
        root: Path = Path("/"),
        read_load: Callable[[], float] = lambda: os.getloadavg()[0],
    ) -> None:
        self._max_load = max_load
        self._max_memory = max_memory_pressure
        self._read_load = read_load
        self._files = [directory / "memory.pressure" for directory in memory_cgroup(root)[:1]]
        self._files.append(root / "proc/pressure/memory")
        self._looked_at = float("-inf")
        self._reason: str | None = None

    def reason(self, at: float) -> str | None:
        """Why nothing should be claimed at instant `at` (`timing.now`), if so."""
        if at - self._looked_at >= LOOK_INTERVAL_S:
            self._looked_at = at
            self._reason = self._look()
        return self._reason

    def _look(self) -> str | None:
        if self._max_load is not None and (load := self._load()) is not None and load > self._max_load:
            return f"the load is {load:.2f}, above --max-load {self._max_load:g}"
        if self._max_memory is not None and (pressure := self._memory()) is not None and pressure > self._max_memory:
            return f"the memory pressure is {pressure:.1f} %, above --max-memory-pressure {self._max_memory:g}"
        return None

    def _load(self) -> float | None:
        """None where /proc shows nothing of the machine (systemd.exec(5), ProcSubset=pid)."""
        try:
            return self._read_load()
        except OSError:
            return None

    def _memory(self) -> float | None:
        """ "some avg10=1.23 avg60=..." (cgroups(7), PSI); None where the kernel keeps no such figures."""
        for file in self._files:
            try:
                words = file.read_text().split()
                return float(words[1].removeprefix("avg10="))
            except (OSError, ValueError, IndexError):
                continue
        return None
