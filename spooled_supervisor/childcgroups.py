"""A control group for each child, below the directory that was delegated to us; nothing at all where none was.

    DELEGATED             was ours at the start; `memory` is in its cgroup.subtree_control, if it is to be had
      supervisor          the supervisor and its fork servers
      child-SLOT-PID      one child with all that it starts

A family in a cgroup of its own is killed by one write that no fork escapes, dies together when it runs out of memory,
and has its own count of that. Delegation is the only switch, and nothing here may stop the daemon: what cannot be had
is told once, and the child goes on as it would without.

The directory is made by the supervisor, and the child joins it by itself, as the first thing after its adoption and so
before its hooks and jobs. The supervisor could move it, but moving waits for all processors (`cgroups.join`), and that
time would be the loop's instead of the child's. To be forked into a cgroup (clone(2), CLONE_INTO_CGROUP) costs nothing,
but only `os.fork` makes a process that Python's interpreter knows how to live in.

Only one supervisor uses a directory: it is locked (flock(2)), which ends with the process however that ends. What is
there at the start was left by one that was killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from spooled_supervisor import events as ev
from spooled_supervisor.cgroups import LEAF, delegated, join, read_fields, read_number
from spooled_supervisor.events import Events
from spooled_supervisor.family import kill_cgroup
from spooled_supervisor.processes import write_file
from spooled_supervisor.timing import now

NAME = re.compile(r"child-\d+-\d+")
HELD = ("anon", "shmem", "kernel")
"""Lines of memory.stat: what is not given back when somebody else needs it. File cache is."""
CLOSE_LIMIT_S = 0.5


@dataclass(frozen=True, slots=True)
class ChildCgroup:
    """The cgroup of one child. `path` is its directory; with `has_memory` its memory is counted and can be limited."""

    path: Path
    has_memory: bool

    def oom_kills(self) -> int:
        """How many of its processes the kernel's out-of-memory killer has struck, whoever was short of memory."""
        return read_fields(self.path / "memory.events").get("oom_kill", 0)

    def was_killed_by_its_limit(self) -> bool:
        """Whether its own limit was the reason; where it is one further up, `oom` counts there (mm/memcontrol.c)."""
        counts = read_fields(self.path / "memory.events")
        return counts.get("oom", 0) > 0 and counts.get("oom_kill", 0) > 0

    def remove(self) -> bool:
        """Remove it. False while somebody is in it: to be tried again; what can never be removed is left."""
        if _remove(self.path):
            return True
        is_gone = False
        for directory, _, _ in os.walk(self.path, topdown=False):  # a handler may have made others below
            is_gone = _remove(directory)
        return is_gone


class ChildCgroups:
    """One per daemon: `open` first, `close` last. Before `open`, and without delegation, children get none."""

    def __init__(self, events: Events, *, memory_limit_bytes: int | None = None) -> None:
        """`memory_limit_bytes`: how much more than before a child may hold during one job."""
        self._events = events
        self._memory_limit_bytes = memory_limit_bytes
        self._directory: Path | None = None
        self._has_memory = False
        self._lock = -1
        self._told: set[str] = set()  # what has failed

    # --- the directory -----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Take the delegated directory, if there is one, and move to the leaf below it."""
        directory = delegated()
        if directory is None:
            return
        try:
            self._lock = _lock(directory)
            leaf = directory / LEAF
            leaf.mkdir(exist_ok=True)
            join(leaf)
        except OSError as error:
            self._unlock()
            self.failed(f"{directory} cannot be used", error.strerror)
            return
        self._directory = directory
        self._has_memory = self._enable_memory(directory)
        self._events.emit(ev.CgroupDelegated(str(directory), self._has_memory))

    def _enable_memory(self, directory: Path) -> bool:
        try:
            if "memory" not in (directory / "cgroup.controllers").read_text().split():
                return False
            write_file(str(directory / "cgroup.subtree_control"), "+memory")
        except OSError as error:  # EBUSY: others than we are in it
            self.failed("memory cannot be limited", error.strerror)
            return False
        return True

    def leftovers(self) -> list[ChildCgroup]:
        """Of children: at the start those of an earlier life."""
        if self._directory is None:
            return []
        with contextlib.suppress(OSError):  # it is gone
            names = sorted(filter(NAME.fullmatch, os.listdir(self._directory)))
            return [ChildCgroup(self._directory / name, self._has_memory) for name in names]
        return []

    def close(self) -> None:
        """Kill whoever is left, within CLOSE_LIMIT_S, and leave the directory as it was found."""
        if self._directory is None:
            return
        give_up_at = now() + CLOSE_LIMIT_S
        while (left := self.leftovers()) and now() < give_up_at:
            for cgroup in left:
                if not cgroup.remove():
                    kill_cgroup(cgroup.path)
            time.sleep(0.001)
        with contextlib.suppress(OSError):  # somebody is still there, or the directory is not
            if self._has_memory:
                write_file(str(self._directory / "cgroup.subtree_control"), "-memory")
            join(self._directory)
            os.rmdir(self._directory / LEAF)
        self._directory = None
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # --- children ----------------------------------------------------------------------------------------------------

    def make(self, slot: int, pid: int) -> ChildCgroup | None:
        """A new one, which the child has to join; None if it gets none."""
        if self._directory is None:
            return None
        made = ChildCgroup(self._directory / f"child-{slot}-{pid}", self._has_memory)
        try:
            made.path.mkdir()
            self._set_up_memory(made.path)
        except OSError as error:
            made.remove()
            self.failed("no cgroup can be made for a child", error.strerror)
            return None
        return made

    def _set_up_memory(self, path: Path) -> None:
        """A family dies together, as half of one is of no use. Swap would only put off what a limit is for."""
        if self._has_memory:
            write_file(str(path / "memory.oom.group"), "1")
            if self._memory_limit_bytes is not None and (path / "memory.swap.max").exists():
                write_file(str(path / "memory.swap.max"), "0")

    def begin_job(self, cgroup: ChildCgroup) -> None:
        """Let it hold as much more as one job may, from now on.

        Never less than it has, file cache included: the kernel would make room at once, in the time of whoever writes.
        """
        if self._memory_limit_bytes is None or not cgroup.has_memory:
            return
        try:
            stat = read_fields(cgroup.path / "memory.stat")
            held = sum(stat.get(name, 0) for name in HELD)
            current = read_number(cgroup.path / "memory.current") or 0
            limit = max(held + self._memory_limit_bytes, current)
            write_file(str(cgroup.path / "memory.max"), str(limit))
        except OSError as error:
            self.failed("the memory of a child cannot be limited", error.strerror)

    def failed(self, what: str, why: str | None) -> None:
        """Tell it, each `what` once: what fails for one child fails for all, for ever and again."""
        if what not in self._told:
            self._told.add(what)
            self._events.emit(ev.CgroupFailed(f"{what}: {why}"))


def _lock(directory: Path) -> int:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        is_taken = isinstance(error, BlockingIOError)
        raise OSError(error.errno, "another supervisor uses it" if is_taken else error.strerror) from error
    return fd


def _remove(directory: str | os.PathLike[str]) -> bool:
    """Whether there is no more to be done about it."""
    try:
        os.rmdir(directory)
    except OSError as error:
        return error.errno not in (errno.EBUSY, errno.ENOTEMPTY)
    return True
