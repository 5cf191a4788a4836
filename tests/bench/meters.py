"""What the kernel and the daemon's own counters tell of a running process. Reads only; raises OSError if it is gone."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from spooled_supervisor.kernel import set_parent_death_signal

LOOK_S = 0.5

_libc = ctypes.CDLL(None)


def cpu_s(pid: int) -> float:
    """CPU time of a process, all threads, user and system, in seconds; not that of its children."""
    clock = ctypes.c_int()
    number = _libc.clock_getcpuclockid(pid, ctypes.byref(clock))  # it returns the error, errno is not set
    if number != 0:
        raise ProcessLookupError(number, f"no process {pid}")
    return time.clock_gettime(clock.value)


def total_cpu_s(pids: Iterable[int]) -> float:
    return sum(cpu_s(pid) for pid in pids)


def private_bytes(pid: int) -> int:
    """Bytes that belong to this process alone (proc_pid_smaps(5): Private_Clean + Private_Dirty)."""
    return _kilobytes(pid, "Private_Clean") + _kilobytes(pid, "Private_Dirty")


def resident_bytes(pid: int) -> int:
    return _kilobytes(pid, "Rss")


def _kilobytes(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def samples(page: str) -> dict[str, float]:
    """A metrics page as numbers: every sample by its name, summed over its labels."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def buckets(page: str, name: str) -> dict[float, float]:
    """A histogram's cumulative counts by their bounds; `name` ends in `_bucket`."""
    counts: dict[float, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == name:
                bound = float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0.0) + sample.value
    return counts


class Disturbance:
    """How many cores others used: what the machine was busy with, less what we and all that we have reaped used."""

    def __init__(self) -> None:
        self._begin = self._reading()

    def cores(self) -> float:
        """Since it was made. All that was started since then must have been waited for."""
        at, busy, own = (now - then for now, then in zip(self._reading(), self._begin, strict=True))
        return max(0.0, (busy - own) / at)

    @staticmethod
    def _reading() -> tuple[float, float, float]:
        """Seconds: the clock, busy CPUs since the boot (proc_stat(5): all but idle and iowait), our own CPU time."""
        user, nice, system, _idle, _iowait, irq, softirq, steal = _cpu_ticks()
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy, sum(os.times()[:4])


def wait_for_quiet(cores: float, deadline: float) -> None:
    """Until others use no more than so many cores, or it is too late (CLOCK_MONOTONIC)."""
    while time.monotonic() < deadline:
        disturbance = Disturbance()
        time.sleep(LOOK_S)
        if disturbance.cores() <= cores:
            return


def _cpu_ticks() -> list[int]:
    first = Path("/proc/stat").read_text().partition("\n")[0]
    return [int(field) for field in first.split()[1:9]]


def die_with_parent() -> None:
    """For `preexec_fn`: what the benchmark starts ends with it, however it ends."""
    set_parent_death_signal(signal.SIGKILL)


def context() -> dict[str, object]:
    """Under which circumstances this was measured."""
    uname = os.uname()
    return {
        "python": platform.python_version(),
        "system": f"{uname.sysname} {uname.release} {uname.machine}",
        "cpus": len(os.sched_getaffinity(0)),
        "load_1m": round(os.getloadavg()[0], 2),
    }
