"""Killing families: a child with all that it started, what a job left behind, orphans, survivors of an earlier life.

A child leads its own session and is a subreaper, so whatever its handler starts stays below it in the tree of parents,
also what forks twice or calls setsid(2); killpg(2) alone would miss those. So the child is stopped, everything below it
is killed (`hunt.py`), and the child comes last: as long as it exists it holds the tree together. Where a cgroup is
delegated the kernel does all that in one write (cgroups(7), cgroup.kill).

Functions are short and never wait for a death: who is left is counted, and found again by the next call. Deaths that
everybody may have caused are counted by one: whoever is dying already was counted by the one who killed him.
"""

from __future__ import annotations

import contextlib
import os
import signal
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from spooled_supervisor.exits import is_over
from spooled_supervisor.hunt import BUDGET_S, HIDDEN_NAME, Hunt, send
from spooled_supervisor.processes import (
    Stat,
    all_pids,
    descendants,
    has_environment,
    look_around,
    read_file,
    read_stat,
    write_file,
)
from spooled_supervisor.timing import now

MARKER = "SPOOLED_SUPERVISOR_STATE"
"""The environment variable that children and what they start carry: which state directory they belong to."""

STOP_WAIT_S = 0.005
"""How long a child may take to stop before the last look around it; one inside vfork(2) stops late."""

MAX_NAMES = 10

OOM_SCORE_RAISE = 300
"""Of 1000: a child is the kernel's first choice, long before the supervisor (proc_pid_oom_score_adj(5))."""


@dataclass(frozen=True, slots=True)
class Swept:
    """`found` counts everybody once over any number of calls: killed now, or reaped without having been killed.

    `left`: who still exists, as he is dying, not ours to kill (EPERM), to be kept, or because the time was up; one more
    where it could not be seen who does. Unless it is 0, call again at the next tick; nobody promises another SIGCHLD.
    `names`: MAX_NAMES of the found.
    """

    found: int = 0
    killed: int = 0
    reaped: int = 0
    left: int = 0
    names: tuple[str, ...] = ()


# --- a child and its family ------------------------------------------------------------------------------------------


def kill_family(pid: int, pidfd: int, *, cgroup: Path | None = None) -> int:
    """SIGKILL a child and all below it; the number of living descendants that were killed.

    The child is reaped by its owner when its pidfd says so; its dead descendants become ours then, and `sweep` reaps
    them. Of a child that is dead already nobody is below it any more: `sweep` finds, kills and counts its family.
    `cgroup`: the child's own cgroup directory (v2), if it has one.
    """
    if is_over(pidfd):
        return 0
    send(pidfd, signal.SIGSTOP)
    struck = _strike_cgroup(cgroup) if cgroup is not None else None
    if struck is not None and any(stat.pid == pid for stat in struck):
        killed = len(struck) - 1
    else:  # no cgroup, or it cannot be killed, or the child is not in it
        hunt = Hunt(pid)
        stop_by = now() + STOP_WAIT_S
        hunt.run(lambda: _is_halted(pid) or now() > stop_by)
        killed = hunt.killed
    # If the budget ran out, most of a bomb is in the child's own group. Asked by pidfd first: a living child's number
    # cannot be anybody else's.
    if not is_over(pidfd):
        with contextlib.suppress(OSError):  # it leads no group yet
            os.killpg(pid, signal.SIGKILL)
    send(pidfd, signal.SIGKILL)
    return killed


def kill_descendants(pid: int, *, spare: Collection[tuple[int, int]] = (), kill: bool = True) -> Swept:
    """SIGKILL what a job left below a child that lives on, or only count and name it. The child has to reap the dead.

    `spare`: identities (`processes.descendants`, taken when the child was ready) of helpers that its hooks started;
    what is below them is spared too.
    """
    spared = {number for number, start in spare if (stat := read_stat(number)) is not None and stat.start == start}
    hunt = Hunt(pid, spare=spared, kill=kill)
    hunt.run()
    return Swept(len(hunt.found), hunt.killed, 0, hunt.remaining, _some(hunt.found))


def _is_halted(pid: int) -> bool:
    """Whether a stopped process has come to rest: from here on none of its threads forks."""
    stat = read_stat(pid)
    return stat is None or stat.is_zombie or stat.state in "Tt"


def kill_cgroup(cgroup: Path) -> Swept:
    """SIGKILL whoever is in this cgroup (v2) or below it. Nobody if the kernel (before 5.14) or its owner says no."""
    struck = _strike_cgroup(cgroup) or []
    return Swept(len(struck), len(struck), 0, len(struck), _some([stat.name for stat in struck]))


def _strike_cgroup(cgroup: Path) -> list[Stat] | None:
    """Who was alive in it; None if it cannot be killed."""
    members: set[int] = set()
    try:
        for procs in cgroup.rglob("cgroup.procs"):
            members.update(map(int, read_file(str(procs)).split()))
        stats = [read_stat(member) for member in members]
        write_file(str(cgroup / "cgroup.kill"), "1")
    except OSError:
        return None
    return [stat for stat in stats if stat is not None and not stat.is_dying]


# --- orphans ---------------------------------------------------------------------------------------------------------


def strangers(known: Collection[int]) -> list[int]:
    """Processes whose parent we are and that are not among the known ones, zombies included."""
    return [pid for pid in look_around()(os.getpid()).pids if pid not in known]


def sweep(known: Collection[int], *, kill: bool, ours: Callable[[Stat], bool] | None = None) -> Swept:
    """SIGKILL orphans with all below them, and reap the dead ones, each by number. It works inside a child, too.

    `known`: every unreaped child that has an owner, the fork server too: they are not touched, nor is anybody below
    them. Not to be called while a fork request is open, as its child may be ours before its number is known.
    `kill=False` only reaps. `ours` tells orphans from the other children of a host program; without it all are ours.
    """
    hunt = Hunt(os.getpid(), spare=known, ours=ours, kill=kill)
    if kill:
        hunt.run()
    found = list(hunt.found)
    children = look_around()(os.getpid())
    reaped, left = 0, int(not children.complete)  # whom we could not see may be there (no descriptor is free, say)
    for pid in children.pids:
        if pid in known:
            continue
        stat = read_stat(pid)
        if ours is not None and (stat is None or not ours(stat)):
            continue
        status = _reap(pid)
        if status is None:
            left += 1
            continue
        reaped += 1
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            found.append(stat.name if stat is not None else HIDDEN_NAME)
    return Swept(len(found), hunt.killed, reaped, left, _some(found))


class Kin:
    """Who is of our family in a process that has children of its own: what our children are told apart by.

    A living process is ours if it began with our marker or is in the session of one of our children. A dead one shows
    no environment any more, so whoever was ours once is remembered, and who is below a child when its family is killed.
    A child that nobody has heard of yet still has the fork server's `name`.
    """

    def __init__(self, marker: str) -> None:
        self.name = f"spooled-{zlib.crc32(marker.encode()) & 0xFFFFFFF:07x}"
        self.sessions: set[int] = set()
        self._dead: set[int] = set()  # sessions whose leader is gone
        self._struck: set[tuple[int, int]] = set()
        self._belongs = belonging_to(marker, self.sessions)

    def born(self, pid: int) -> None:
        """A child of ours, which leads a session of its own."""
        self.sessions.add(pid)
        self._dead.discard(pid)

    def died(self, pid: int) -> None:
        """It is reaped; members of its session may still be there."""
        self._dead.add(pid)

    def strike(self, pid: int) -> None:
        """The family of this child is about to be killed."""
        self._struck.update(stat.identity for stat in descendants(pid))

    def is_ours(self, stat: Stat) -> bool:
        is_ours = stat.identity in self._struck or stat.name == self.name or self._belongs(stat)
        if is_ours:
            self._struck.add(stat.identity)
        return is_ours

    def settle(self) -> None:
        """A sweep has left nobody: the numbers of dead sessions may pass on to others from now on."""
        self.sessions -= self._dead
        self._dead.clear()
        self._struck.clear()


def belonging_to(marker: str, sessions: Collection[int]) -> Callable[[Stat], bool]:
    """An `ours` for `sweep`: began with our marker, or is in the session of one of our children, dead ones included."""
    entry = os.fsencode(f"{MARKER}={marker}")
    return lambda stat: stat.session in sessions or has_environment(stat.pid, entry)


def _reap(pid: int) -> int | None:
    try:
        got, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # somebody else took it, and has counted it
        return int(signal.SIGKILL)
    return status if got else None


def _some(names: list[str]) -> tuple[str, ...]:
    return tuple(names[:MAX_NAMES])


# --- survivors of an earlier supervisor ------------------------------------------------------------------------------


def marked_processes(marker: str) -> list[int]:
    """Living processes of our user that began with `SPOOLED_SUPERVISOR_STATE=<marker>`; not we, nor who started us."""
    entry = os.fsencode(f"{MARKER}={marker}")
    line = _line_of_parents()
    return [pid for pid in all_pids() if pid not in line and _is_marked(pid, entry)]


def kill_marked(marker: str, *, spare: Collection[int] = ()) -> Swept:
    """SIGKILL them all; to be repeated until `left` is 0 where their death must be certain."""
    entry = os.fsencode(f"{MARKER}={marker}")
    struck: dict[tuple[int, int], Stat] = {}
    give_up_at = now() + BUDGET_S
    while True:
        before = len(struck)
        left = [pid for pid in marked_processes(marker) if pid not in spare]
        for pid in left:
            _strike_marked(pid, entry, struck)
        if len(struck) == before or now() > give_up_at:
            names = [stat.name for stat in struck.values() if not stat.is_dying]
            return Swept(len(names), len(names), 0, len(left), _some(names))


def _strike_marked(pid: int, entry: bytes, struck: dict[tuple[int, int], Stat]) -> None:
    with contextlib.suppress(OSError):  # he is gone; or not ours to kill, and then he stays in `left`
        pidfd = os.pidfd_open(pid)
        try:
            stat = read_stat(pid)
            # Asked again now that the pidfd is open, as in `hunt.py`: the number may have passed on since.
            if stat is not None and stat.identity not in struck and _is_marked(pid, entry):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                struck[stat.identity] = stat
        finally:
            os.close(pidfd)


def _is_marked(pid: int, entry: bytes) -> bool:
    try:
        is_our_user = os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except OSError:  # gone
        return False
    return is_our_user and has_environment(pid, entry)


def _line_of_parents() -> set[int]:
    line: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in line:
        line.add(pid)
        stat = read_stat(pid)
        pid = stat.ppid if stat is not None else 0
    return line


# --- a child's own rank ----------------------------------------------------------------------------------------------


def lower_priority(nice: int, oom_score: int) -> list[str]:
    """Let this process stand back behind its supervisor; what was refused, each with its reason.

    The nice value is relative to the inherited one. With a session of its own the process is also scheduled as a group
    of its own (sched(7), autogroup), whose nice value is another one; the kernel takes ten changes of it a second.
    `oom_score` is what `raised_oom_score` gave in the process that it was forked from.
    """
    refused = []
    try:
        os.nice(nice)
    except OSError as e:
        refused.append(f"nice: {e}")
    for path, value in (("/proc/self/autogroup", max(-20, min(19, nice))), ("/proc/self/oom_score_adj", oom_score)):
        try:
            write_file(path, str(value))
        except OSError as e:
            refused.append(f"{path}: {e}")
    return refused


def raised_oom_score() -> int:
    """What a child's oom_score_adj is to be, of 1000: the kernel's first choice, long before the supervisor."""
    try:
        return min(1000, int(read_file("/proc/self/oom_score_adj")) + OOM_SCORE_RAISE)
    except (OSError, ValueError):
        return OOM_SCORE_RAISE
