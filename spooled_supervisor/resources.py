"""Figures: CPU and memory of the whole family, their limits, and the host's, as the worker heartbeat shows them.

Limits come from our own control group, v2 or v1 (`cgroups.py`); so does the proof of an OOM kill.
What cannot be read is None and never an exception: under ProcSubset=pid (systemd.exec(5)) /proc has no host figures.
psutil is imported on first use only, as children import this package and must not pay for it. No clock is read here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from spooled_supervisor.cgroups import memory_cgroup, read_fields, read_number
from spooled_supervisor.processes import descendants, read_file, read_stat

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_V1_UNLIMITED = 1 << 60
"""v1 has no word for "no limit" but a number near 2**63; nothing real is above an exbibyte."""


# --- the control group -----------------------------------------------------------------------------------------------


def memory_limit(root: Path = Path("/")) -> int | None:
    """The bytes that the strictest cgroup above us allows, None if none does."""
    limits = [
        limit
        for directory in memory_cgroup(root)
        for name in ("memory.max", "memory.limit_in_bytes")
        if (limit := read_number(directory / name)) is not None and limit < _V1_UNLIMITED
    ]
    return min(limits, default=None)


class OomCounter:
    """How often the kernel's OOM killer has struck in our own cgroup; a difference between two readings is proof.

    v2 counts the cgroups below ours as well, v1 ours alone. The kernel counts before it kills, so that whoever sees
    the victim's death sees the count (mm/oom_kill.c).
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._own = memory_cgroup(root)[:1]

    def read(self) -> int | None:
        """The count; None where the kernel has none for us (before 4.13, or in the root cgroup of v2)."""
        for directory in self._own:
            for name in ("memory.events", "memory.oom_control"):
                count = read_fields(directory / name).get("oom_kill")
                if count is not None:
                    return count
        return None

    def words(self, before: int | None, after: int | None) -> str:
        """What to say of a death by SIGKILL between the two readings; empty if it was no OOM kill, or nobody knows."""
        if before is None or after is None or after <= before:
            return ""
        # The machine's own shortage is counted here as well, so without a limit it must have been that.
        is_limited = memory_limit(self._root) is not None
        cause = "the memory limit of the service was hit" if is_limited else "the machine ran out of memory"
        return f"{cause} (oom_kill {before} -> {after})"


# --- memory ----------------------------------------------------------------------------------------------------------


def pss_uss(pid: int) -> tuple[int, int] | None:
    """Bytes of a process: its fair share of shared pages, and its private ones; None if it is gone or not ours to see.

    The kernel walks all its pages for that (proc_pid_smaps(5)): milliseconds for a large process.
    """
    try:
        lines = read_file(f"/proc/{pid}/smaps_rollup").decode().splitlines()
    except OSError:
        return None
    sizes: dict[str, int] = {}
    for line in lines[1:]:
        name, _, size = line.partition(":")
        sizes[name] = int(size.split()[0]) * 1024
    if "Pss" not in sizes:  # it has ended, and only its entry is left
        return None
    return sizes["Pss"], sizes.get("Private_Clean", 0) + sizes.get("Private_Dirty", 0)


def own_memory() -> int:
    """Resident bytes of this process: dearer figures are not worth it, as we share no pages with our children."""
    try:
        return int(read_file("/proc/self/statm").split()[1]) * PAGE_BYTES
    except OSError:
        return 0


def total_memory() -> int:
    """Bytes of the machine; from sysinfo(2), as /proc/meminfo may be hidden."""
    return os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES


# --- the family ------------------------------------------------------------------------------------------------------


def family_cpu_seconds(living: Iterable[int]) -> float:
    """CPU time of us, of all that were reaped, and of `living` with all below them (times(2), proc_pid_stat(5))."""
    own = os.times()
    ticks = 0
    for pid in living:
        stat = read_stat(pid)
        if stat is not None:
            ticks += stat.cpu_ticks + sum(below.cpu_ticks for below in descendants(pid))
    return own.user + own.system + own.children_user + own.children_system + ticks / TICKS_PER_S


class FamilyUsage:
    """CPU and memory of the supervisor and everything below it, as a share of what it may use; one per supervisor."""

    def __init__(
        self, root: Path = Path("/"), read_cpu_s: Callable[[Iterable[int]], float] = family_cpu_seconds
    ) -> None:
        self._root = root
        self._read_cpu_s = read_cpu_s
        self._at: float | None = None
        self._cpu_s = 0.0
        self._percent = 0.0
        self._fell = False

    def cpu_percent(self, now: float, living: Iterable[int], cpus: float) -> float:
        """0 to 100 since the last call; 0 at the first. `now`: seconds on any clock that never goes back.

        `living`: children and fork server, until they are reaped: then their time is in ours.
        """
        cpu_s = self._read_cpu_s(living)
        if self._at is None:
            self._at, self._cpu_s = now, cpu_s
            return 0.0
        # Less than before: somebody has died and is neither in `living` nor reaped yet, so his time is nowhere. The
        # last figure stands and the next counts from the same point. Twice in a row means that the time is lost (a
        # process that nobody waited for), and counting begins anew.
        if cpu_s < self._cpu_s and not self._fell:
            self._fell = True
            return self._percent
        if now > self._at:
            share = (cpu_s - self._cpu_s) / ((now - self._at) * max(cpus, 0.01))
            self._percent = _percent(share)
            self._at, self._cpu_s, self._fell = now, cpu_s, False
        return self._percent

    def memory_limit(self) -> int:
        """Bytes that the family may use: the strictest cgroup, at most the machine. Read anew, it can be changed."""
        limit = memory_limit(self._root)
        return min(limit, total_memory()) if limit is not None else total_memory()

    def memory_percent(self, pss_by_pid: Mapping[int, int]) -> float:
        """0 to 100: `pss_by_pid` (bytes, sampled elsewhere) and our own memory, as a share of the limit."""
        own_pid = os.getpid()
        others = sum(pss for pid, pss in pss_by_pid.items() if pid != own_pid)
        limit = self.memory_limit()
        return _percent((others + pss_by_pid.get(own_pid, own_memory())) / limit) if limit > 0 else 0.0


# --- the host --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Host:
    """Figures of the whole machine, for people; None where they are hidden. CPU since the last reading."""

    cpu_percent: float | None
    memory_percent: float | None
    load_1m: float | None
    load_5m: float | None
    load_15m: float | None


def read_host() -> Host:
    """Look at the machine; the first call has no CPU figure worth showing (psutil.cpu_percent)."""
    import psutil  # here, because children import this module

    def ask(read: Callable[[], float]) -> float | None:
        try:
            return round(read(), 1)
        except (OSError, ValueError, psutil.Error):
            return None

    try:
        load: tuple[float | None, ...] = os.getloadavg()
    except OSError:
        load = (None, None, None)
    return Host(ask(lambda: psutil.cpu_percent(interval=None)), ask(lambda: psutil.virtual_memory().percent), *load)


def _percent(share: float) -> float:
    return round(min(100.0, max(0.0, share * 100.0)), 2)


def rss_private(pid: int) -> int:
    """Bytes of a process that no file and no shared memory backs (proc_pid_statm(5)): 10 us, so it may be asked after
    every job. For a forked process it counts the pages it still shares with its siblings; only its growth means much.
    """
    try:
        _, resident, shared, *_ = read_file(f"/proc/{pid}/statm").split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * PAGE_BYTES
