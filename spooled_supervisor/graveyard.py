"""What happens after a child is dead: its orphans are killed and reaped, and only then is its run over.

Where the child had a cgroup of its own, whoever is left in it is killed there, and it is removed when it is empty.

A process that became ours and that nobody knows is a job's orphan, unless a fork is open: then it may be the child that
the fork server is about to name, and looking waits. So that it does not wait for ever where forks follow one another,
no other is begun meanwhile (`is_held_up`). SIGCHLD is only a hint; whoever is still dying is looked at again.
Never `waitpid(-1)`: known children are reaped by their owner, strangers by number.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable

from spooled_supervisor import events as ev
from spooled_supervisor import family
from spooled_supervisor.childcgroups import ChildCgroup
from spooled_supervisor.childlink import Run
from spooled_supervisor.events import Events
from spooled_supervisor.timing import now

LOOK_AGAIN_S = 0.01
WAIT_LIMIT_S = 1.0
"""Runs wait this long for orphans to die; one that cannot be killed must not hold an outcome for ever."""


class Graveyard:
    """One per pool."""

    def __init__(
        self,
        *,
        events: Events,
        known: Callable[[], Iterable[int]],
        is_fork_open: Callable[[], bool],
        on_over: Callable[[list[Run]], None],
        on_free: Callable[[], None],
        kin: family.Kin | None = None,
    ) -> None:
        """`on_free`: it is held up no more. `kin` tells orphans from the children of a program that we are a guest in;
        without it all are ours."""
        self._kin = kin
        self._ours = None if kin is None else kin.is_ours
        self._events = events
        self._known = known
        self._is_fork_open = is_fork_open
        self._on_over = on_over
        self._on_free = on_free
        self._foreign = frozenset(family.strangers(()))  # our children from before: a container's entry script's, say
        self._buried: list[tuple[float, Run]] = []  # with the instant until which it waits for orphans to die
        self._cgroups: list[ChildCgroup] = []
        self._timer: asyncio.TimerHandle | None = None
        self.is_held_up = False  # runs wait for a fork to end
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        """Runs whose children are dead and whose orphans may not be."""
        return len(self._buried)

    def bury(self, run: Run) -> None:
        """Its child is dead: it is over as soon as no orphan is left."""
        self._buried.append((now() + WAIT_LIMIT_S, run))

    def clear(self, cgroup: ChildCgroup) -> None:
        """Its child is dead, or not in it: nobody may live there, and it is removed."""
        self._cgroups.append(cgroup)
        self.hint()

    def sweep_soon(self) -> None:
        """A child has died."""
        self._loop.call_soon(self.sweep)

    def hint(self) -> None:
        """SIGCHLD: somebody has died."""
        if self._timer is None:
            self._timer = self._loop.call_later(LOOK_AGAIN_S, self.sweep)

    def sweep(self) -> None:
        """Look for orphans now, unless a fork is open; who opened it calls again when it is not."""
        self._cancel_timer()
        self._clear_cgroups()
        was_held_up, self.is_held_up = self.is_held_up, self._is_fork_open() and bool(self._buried)
        if self._is_fork_open():
            self._hand_on(now())
            if self._buried:  # one that hangs does not hold them up for long
                self._timer = self._loop.call_later(WAIT_LIMIT_S, self.sweep)
            return
        if was_held_up:
            self._loop.call_soon(self._on_free)
        swept = family.sweep(self._foreign.union(self._known()), kill=True, ours=self._ours)
        self._tell(swept)
        if swept.left or self._cgroups:
            self._timer = self._loop.call_later(LOOK_AGAIN_S, self.sweep)
            self._hand_on(now())
            return
        if self._kin is not None:
            self._kin.settle()
        self._hand_on(math.inf)

    def _hand_on(self, at: float) -> None:
        """Those that need not wait any longer, or have waited long enough at this instant."""
        over = [run for until, run in self._buried if until <= at]
        self._buried = [(until, run) for until, run in self._buried if until > at]
        if over:
            self._on_over(over)

    def _clear_cgroups(self) -> None:
        self._cgroups = [cgroup for cgroup in self._cgroups if not cgroup.remove()]
        for cgroup in self._cgroups:
            self._tell(family.kill_cgroup(cgroup.path))

    def _tell(self, swept: family.Swept) -> None:
        if swept.found:
            self._events.emit(ev.OrphansKilled(swept.found, swept.names))

    def close(self) -> None:
        """Kill and reap what is there, for the last time."""
        self._cancel_timer()
        self._clear_cgroups()
        give_up_at = now() + (0.0 if self._kin is None else WAIT_LIMIT_S)  # a program that goes on must keep no zombies
        while family.sweep(self._foreign, kill=True, ours=self._ours).left and now() < give_up_at:
            time.sleep(LOOK_AGAIN_S / 10)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
