"""One round-up: everybody below a process is met, and killed unless he is spared.

A process that has SIGKILL pending cannot fork any more (fork(2)), and whoever was forked before is in the tree. So a
pass over the tree that meets nobody new is proof that all of it was struck; unless somebody vanished while the lists
were read, as the kernel counts places in them and not people (proc_tid_children(5)): then there is another pass.

Nobody is signalled by his number alone: a pidfd is opened first, then the process must still be where the number was
found, and the signal goes to the pidfd (pidfd_open(2)). If the number has passed on meanwhile, either the place is
wrong or the pidfd is that of a dead one. Nothing here waits for a death or raises OSError, and BUDGET_S is the limit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Callable, Collection
from enum import Enum, auto

from spooled_supervisor.exits import is_over
from spooled_supervisor.processes import Stat, children_of, look_around, read_stat
from spooled_supervisor.timing import now

BUDGET_S = 0.1
"""The longest that one hunt goes on, against fork bombs: well below the shortest margin of a lease."""

HIDDEN_NAME = "?"


class _Met(Enum):
    NEW = auto()  # struck just now, or not to be judged: another pass has to follow
    KNOWN = auto()  # struck before
    LEAF = auto()  # dead, or not ours: nobody to look for below him


class _Hidden(Enum):
    """What became of somebody whose /proc entry is kept from us."""

    STRUCK = auto()
    REFUSED = auto()  # not ours to kill
    DEAD = auto()


class Hunt:
    """Everybody below `trunk`, which itself is left alone, as is who is spared or not ours, and all below him.

    `ours` is asked about direct children of the trunk only: what is below one of ours is ours.
    """

    def __init__(
        self,
        trunk: int,
        *,
        spare: Collection[int] = (),
        ours: Callable[[Stat], bool] | None = None,
        kill: bool = True,
    ) -> None:
        self._trunk = trunk
        self._spare = spare
        self._ours = ours
        self._kill = kill
        self._met: dict[tuple[int, int], Stat] = {}
        self._hidden: dict[int, _Hidden] = {}
        self.found: list[str] = []  # names of those who lived and were killed, or would have been
        self.remaining = 0  # alive or dying at the last pass

    @property
    def killed(self) -> int:
        """How many were sent SIGKILL. Nobody counts twice, in any number of hunts: who is dying is not found again."""
        return len(self.found) if self._kill else 0

    def run(self, is_ready: Callable[[], bool] = lambda: True) -> None:
        """Go round until a pass meets nobody new and `is_ready` agrees, or the budget is spent."""
        give_up_at = now() + BUDGET_S
        while not (self._pass(give_up_at) and is_ready()):
            if now() > give_up_at:
                self._kill_groups()
                self.remaining = max(self.remaining, 1)  # there is no telling, so nobody may think that it is over
                return
            os.sched_yield()  # the dying need the processor more than we do

    def _pass(self, give_up_at: float) -> bool:
        """Whether there was nobody new."""
        ask = look_around()
        seen = {self._trunk}
        queue = [self._trunk]
        settled = True
        self.remaining = 0
        for parent in queue:
            children = ask(parent)
            if not children.complete:
                if parent == self._trunk and _is_gone(parent):
                    return True  # the tree has no trunk any more, and so it is no tree
                settled = False
            for pid in children.pids:
                if pid in seen or pid in self._spare or self._hidden.get(pid) is _Hidden.REFUSED:
                    continue
                seen.add(pid)
                met = self._meet(pid, parent, seen)
                settled = settled and met is not _Met.NEW
                if met is not _Met.LEAF:
                    queue.append(pid)
                if now() > give_up_at:
                    return False
        return settled

    def _meet(self, pid: int, parent: int, seen: set[int]) -> _Met:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # he is gone, and his children have moved; or no descriptor is free
            return _Met.NEW
        try:
            stat = read_stat(pid)
            if stat is None:
                return self._strike_hidden(pidfd, pid, parent)
            # Only now, after the pidfd was opened, does the place tell whom the pidfd means.
            if stat.ppid not in seen:
                return _Met.NEW
            if parent == self._trunk and self._ours is not None and not self._ours(stat):
                return _Met.LEAF
            return self._strike(pidfd, stat)
        finally:
            os.close(pidfd)

    def _strike(self, pidfd: int, stat: Stat) -> _Met:
        is_known = stat.identity in self._met
        self._met[stat.identity] = stat
        if stat.is_zombie:
            # If it died after the list above it was read, its children have moved there behind our back.
            return _Met.LEAF if is_known else _Met.NEW
        self.remaining += 1
        if is_known:
            return _Met.KNOWN
        # A dying one too: he may be writing his core for minutes, and only SIGKILL ends that (core(5)).
        if (not self._kill or send(pidfd, signal.SIGKILL)) and not stat.is_dying:
            self.found.append(stat.name)
        return _Met.NEW

    def _strike_hidden(self, pidfd: int, pid: int, parent: int) -> _Met:
        """Under hidepid (proc(5), systemd's ProtectProc=invisible) set-user-id and undumpable ones are not shown."""
        if is_over(pidfd):
            is_known = self._hidden.get(pid) is _Hidden.DEAD
            self._hidden[pid] = _Hidden.DEAD
            return _Met.LEAF if is_known else _Met.NEW  # as above
        # His place is the list in which he was found, if he is still in it.
        if not self._kill or pid not in children_of(parent).pids:
            return _Met.NEW
        if not send(pidfd, signal.SIGKILL):
            self._hidden[pid] = _Hidden.REFUSED
        elif pid not in self._hidden:
            self._hidden[pid] = _Hidden.STRUCK
            self.found.append(HIDDEN_NAME)
        return _Met.NEW  # who is below him shows when he is dead

    def _kill_groups(self) -> None:
        """The last resort against a bomb: whole process groups at once, which no fork escapes (kill(2)).

        Only groups that began in this family: their session did, or the trunk began it; never the trunk's own group, a
        spared one's, or any in the sessions around.
        """
        if not self._kill:
            return
        trunk = read_stat(self._trunk)
        sessions_around = {os.getsid(0), trunk.session if trunk is not None else 0, *self._spare} - {self._trunk}
        for stat in self._met.values():
            # Read again at the last moment, as this does go by number; numbers are not reused within microseconds.
            fresh = read_stat(stat.pid)
            if fresh is None or fresh.start != stat.start or fresh.session in sessions_around:
                continue
            if fresh.pgrp != self._trunk and fresh.pgrp not in self._spare:
                with contextlib.suppress(OSError):  # it has ended, or became another user's
                    os.killpg(fresh.pgrp, signal.SIGKILL)


def _is_gone(pid: int) -> bool:
    """Whether there is nobody of this number, or nobody we may see. Asked without a descriptor: none may be free."""
    try:
        os.stat(f"/proc/{pid}")
    except OSError as error:
        return pid != os.getpid() and error.errno in (errno.ENOENT, errno.ESRCH)
    return False


def send(pidfd: int, number: signal.Signals) -> bool:
    """Whether the signal could be sent: not to who is reaped (ESRCH), nor to another user (EPERM)."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except OSError:
        return False
    return True
