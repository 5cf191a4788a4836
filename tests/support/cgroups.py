"""A control group of version 2 that a test makes below its own, and moves processes to that it has started itself."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spooled_supervisor import cgroups

GONE_LIMIT_S = 10.0
_numbers = itertools.count(1)


@contextlib.contextmanager
def own_cgroup(*, is_delegated: bool = False) -> Iterator[Path]:
    """Its directory; `is_delegated`: marked as systemd marks it. Whoever is in it at the end is killed."""
    home = next(iter(cgroups.unified_cgroup()), None)
    if home is None:
        pytest.skip("no cgroup2 is mounted")
    cgroup = home / f"test-{os.getpid()}-{next(_numbers)}"
    try:
        cgroup.mkdir()
    except OSError as e:
        pytest.skip(f"no cgroup is delegated to us: {e}")
    try:
        if is_delegated:
            mark(cgroup)
        yield cgroup
    finally:
        remove(cgroup)


def mark(cgroup: Path) -> None:
    """As systemd does where it delegates."""
    try:
        os.setxattr(cgroup, cgroups.MARKS[0], b"1")
    except OSError as e:
        pytest.skip(f"this kernel's cgroups take no attributes: {e}")


def inside(cgroup: Path) -> tuple[str, ...]:
    """Words before a command line that is to begin in this cgroup."""
    return ("sh", "-c", f'echo $$ >"{cgroup}/cgroup.procs" && exec "$@"', "sh")


def has_memory(cgroup: Path) -> bool:
    """Whether memory could be limited below it."""
    return "memory" in (cgroup / "cgroup.controllers").read_text().split()


def place_of(pid: int) -> str:
    """The path of its cgroup, as /proc has it."""
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return next(line.removeprefix("0::") for line in lines if line.startswith("0::"))


def below(cgroup: Path) -> list[str]:
    """Names of the cgroups in it."""
    return sorted(path.name for path in cgroup.iterdir() if path.is_dir())


@contextlib.contextmanager
def stranger_in(cgroup: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that nobody but its cgroup knows of: it is below no child."""
    with subprocess.Popen([*inside(cgroup), "sleep", "100"]) as process:
        try:
            while place_of(process.pid).rpartition("/")[2] != cgroup.name:
                time.sleep(0.001)
            yield process
        finally:
            process.kill()


def remove(cgroup: Path) -> None:
    """Kill all in it, and remove it with what is below."""
    deadline = time.monotonic() + GONE_LIMIT_S
    while cgroup.exists():
        with contextlib.suppress(OSError):
            (cgroup / "cgroup.kill").write_text("1")
        for directory, _, _ in os.walk(cgroup, topdown=False):
            with contextlib.suppress(OSError):  # somebody is on his way out of it
                os.rmdir(directory)
        assert time.monotonic() < deadline, f"{cgroup} cannot be removed: {below(cgroup)}"
        time.sleep(0.005)
