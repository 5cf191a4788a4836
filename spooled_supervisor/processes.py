"""What /proc tells of single processes: who is whose child, who is still who, and who is dying.

Everything here is read by hand, as children and the fork server import it and as it runs inside the event loop (some
20 us per process). Any process may vanish between two lines; answers then are None or incomplete, never an exception.
A number alone is nobody's identity: it is the pair of number and start time that is never given twice in one boot.
Source: proc(5), proc_pid_stat(5), proc_tid_children(5).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

_PF_EXITING = 0x4  # include/linux/sched.h
_PF_SIGNALED = 0x400
_SIGKILL_BIT = 1 << 8
_NAME_CHARS = 15  # TASK_COMM_LEN without the NUL; kernel threads alone have longer ones


class Stat(NamedTuple):
    """One line of /proc/PID/stat. `start` is in clock ticks since boot, `cpu_ticks` includes waited-for children."""

    pid: int
    name: str
    state: str
    ppid: int
    pgrp: int
    session: int
    start: int
    cpu_ticks: int
    is_zombie: bool
    is_dying: bool

    @property
    def identity(self) -> tuple[int, int]:
        """What no other process of this boot has."""
        return (self.pid, self.start)


class Children(NamedTuple):
    """`complete` is False when somebody vanished while the list was read, so that it may lack a child."""

    pids: list[int]
    complete: bool


def read_stat(pid: int) -> Stat | None:
    """The state of a process; None if there is none, or none that we may see (proc(5), hidepid)."""
    try:
        return parse_stat(read_file(f"/proc/{pid}/stat"))
    except (OSError, ValueError, IndexError):  # IndexError, ValueError: a process in the middle of its end reads empty
        return None


def parse_stat(line: bytes) -> Stat:
    """Take a line apart. A name may hold blanks and parentheses, so the fields are counted from the last one."""
    end = line.rindex(b")")
    begin = line.index(b"(")
    f = line[end + 2 :].split()  # f[0] is field 3, the state
    flags, threads, pending = int(f[6]), int(f[17]), int(f[28])
    # The main thread may have left while others go on (pthread_exit(3)): state Z, exiting, and yet alive.
    alone = threads <= 1
    is_zombie = f[0] in (b"Z", b"X", b"x") and alone
    return Stat(
        pid=int(line[: begin - 1]),
        name=printable(line[begin + 1 : end]),
        state=f[0].decode(),
        ppid=int(f[1]),
        pgrp=int(f[2]),
        session=int(f[3]),
        start=int(f[19]),
        cpu_ticks=int(f[11]) + int(f[12]) + int(f[13]) + int(f[14]),
        is_zombie=is_zombie,
        is_dying=is_zombie
        or bool(pending & _SIGKILL_BIT)
        or bool(flags & _PF_SIGNALED)
        or bool(flags & _PF_EXITING and alone),
    )


def printable(name: bytes) -> str:
    """A process name for logs: anybody may put control characters into his own (prctl(2), PR_SET_NAME)."""
    text = name[:_NAME_CHARS].decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in text)


def start_time(pid: int) -> int | None:
    """When the process began, in clock ticks since boot; None if there is no such process."""
    stat = read_stat(pid)
    return stat.start if stat is not None else None


def boot_id() -> str:
    """Differs from boot to boot; empty where /proc/sys is hidden (systemd.exec(5), ProcSubset=pid)."""
    try:
        return read_file("/proc/sys/kernel/random/boot_id").decode("ascii").strip()
    except OSError:
        return ""


def is_same_process(pid: int, start_time: int, boot: str) -> bool:
    """Whether a process noted earlier, perhaps before a reboot, still exists. In doubt it does not."""
    if not boot or boot != boot_id():
        return False
    stat = read_stat(pid)
    return stat is not None and stat.start == start_time


def has_environment(pid: int, entry: bytes) -> bool:
    """Whether the process began with `entry` (NAME=value) in its environment; False if we may not know.

    A process that has ended has none; one that was forked and never exec'd has that of its ancestor.
    """
    try:
        environ = read_file(f"/proc/{pid}/environ")
    except OSError:
        return False
    return (b"\0" + environ).find(b"\0" + entry + b"\0") >= 0


def all_pids() -> list[int]:
    """Every process that we can see."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def children_of(pid: int) -> Children:
    """The children of a process, zombies included, from the lists of its threads.

    Only complete if nobody among them ended meanwhile: proc_tid_children(5) counts places, not people.
    """
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return Children(found, False)
    complete = True
    for thread in threads:
        try:
            found += map(int, read_file(f"/proc/{pid}/task/{thread}/children").split())
        except OSError:  # the thread is gone, its children are with another one that we may have read already
            complete = False
    return Children(found, complete)


def look_around() -> Callable[[int], Children]:
    """How to ask for children during one pass: the kernel's lists, else one look at all processes."""
    if _kernel_lists_children():
        return children_of
    by_parent: dict[int, list[int]] = {}
    for pid in all_pids():
        stat = read_stat(pid)
        if stat is not None:
            by_parent.setdefault(stat.ppid, []).append(pid)
    return lambda pid: Children(by_parent.get(pid, []), True)


def descendants(pid: int) -> list[Stat]:
    """All below a process now, zombies included, without promise that nobody was missed."""
    ask = look_around()
    found: dict[int, Stat] = {}
    queue = [pid]
    for parent in queue:
        for child in ask(parent).pids:
            stat = read_stat(child)
            # The parent is compared, as the number may have passed to a stranger since it was listed.
            if stat is not None and child not in found and (stat.ppid == pid or stat.ppid in found):
                found[child] = stat
                queue.append(child)
    return list(found.values())


@cache
def _kernel_lists_children() -> bool:
    return os.path.exists("/proc/thread-self/children")  # CONFIG_PROC_CHILDREN


def read_file(path: str) -> bytes:
    """A whole file, without the layers of `open`, which cost more than the reading. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        whole = os.read(fd, 1 << 14)
        # A short read is no end in /proc: lists of children come a page at a time.
        while more := os.read(fd, 1 << 16) if whole else b"":
            whole += more
        return whole
    finally:
        os.close(fd)


def write_file(path: str, text: str) -> None:
    """Write to a file that is there, in one call, as the kernel's own files want it. Raises OSError.

    `open` may meet the error only in a destructor, where it is lost.
    """
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
