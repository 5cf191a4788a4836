"""What the pool must do next, decided without doing it. Pure: slots, children, waiting runs and an instant in, actions
out; `pool.py` performs them.

A slot is a place for one child and outlives it. A child that is being killed, or that leaves, has left its slot
already, so that its replacement starts beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from spooled_supervisor.childlink import ChildLink, Run
from spooled_supervisor.lifecycle import ChildState
from spooled_supervisor.timing import Backoff

BACKOFF_FIRST_S = 0.1
BACKOFF_CAP_S = 30.0
RENEWED_AT_ONCE = 4
"""One in so many slots gets a successor at a time: each is a child more than there are places, for a moment."""
ISOLATION = "isolation"
"""Why a child leaves that is in the way of a job which must run alone in a fresh one, or has run such a job."""


@dataclass(slots=True, eq=False)
class Slot:
    """A place for one child; `not_before` is when the next one may be started, after failures."""

    index: int
    child: ChildLink | None = None
    successor: ChildLink | None = None  # boots while `child` still serves; takes its place when it is ready
    renew_reason: str | None = None  # why `child` is to have a successor: reload, recycle
    is_forking: bool = False
    not_before: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(BACKOFF_FIRST_S, BACKOFF_CAP_S))

    @property
    def idle_child(self) -> ChildLink | None:
        """Its child, if that could take a job now."""
        return self.child if self.child is not None and self.child.state is ChildState.IDLE else None


@dataclass(frozen=True, slots=True)
class Start:
    """Fork a child for this slot."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class Give:
    """Send this run to this idle child."""

    child: ChildLink
    run: Run


@dataclass(frozen=True, slots=True)
class TimeOut:
    """The running job's deadline passed: tell it to stop."""

    child: ChildLink


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL to the family."""

    child: ChildLink
    reason: str


@dataclass(frozen=True, slots=True)
class Retire:
    """Ask this idle child to leave, so that a fresh one takes its place."""

    child: ChildLink
    reason: str


Action: TypeAlias = Start | Give | TimeOut | Kill | Retire


def plan(
    at: float,
    *,
    slots: Sequence[Slot],
    children: Iterable[ChildLink],
    waiting: Iterable[Run],
    caps: Mapping[str, int],
    may_start: bool,
) -> list[Action]:
    """What must be done at instant `at`. Each child, slot and run is named at most once.

    `caps`: how many children may work for a queue at once, for the queues that have a limit. `may_start`: children
    that are missing are started.
    """
    overdue = [_end(child) for child in children if child.deadline is not None and at >= child.deadline]
    starts = list(_starts(at, slots)) if may_start else []
    return [*overdue, *starts, *_gifts(at, slots, waiting, caps, may_start)]


def _starts(at: float, slots: Sequence[Slot]) -> Iterator[Start]:
    """Children that are missing, and successors: a few at a time, and only for children that could leave at once."""
    renewing = sum(slot.renew_reason is not None and (slot.is_forking or slot.successor is not None) for slot in slots)
    for slot in slots:
        if slot.is_forking or at < slot.not_before:
            continue
        if slot.child is None and slot.successor is None:
            yield Start(slot)
        elif slot.renew_reason is not None and slot.successor is None and slot.idle_child is not None:
            if renewing >= max(1, len(slots) // RENEWED_AT_ONCE):
                continue  # an empty slot further on does not wait for this
            renewing += 1
            yield Start(slot)


def next_deadline(at: float, *, slots: Sequence[Slot], children: Iterable[ChildLink], may_start: bool) -> float:
    """When `plan` will have something to say because of time alone; inf if never."""
    starts = (slot.not_before for slot in slots if may_start and slot.not_before > at)
    deadlines = (child.deadline for child in children if child.deadline is not None)
    return min(min(starts, default=math.inf), min(deadlines, default=math.inf))


def _end(child: ChildLink) -> Action:
    """What the end of its state's time means for this child."""
    run = child.run
    match child.state:
        case ChildState.BUSY if run is not None and run.started_at is not None:
            return TimeOut(child)
        case ChildState.ABORTING if run is not None and run.abort_reason not in (None, "shutdown"):
            return Kill(child, run.abort_reason)
        case ChildState.ABORTING if run is not None and run.started_at is not None:
            # A drain only asks: what ends a job that goes on is then its own limit, or the supervisor itself.
            return Kill(child, "timeout")
        case ChildState.BUSY | ChildState.ABORTING:
            return Kill(child, "unresponsive")  # it has never taken the job from its pipe
        case ChildState.STARTING:
            return Kill(child, "boot")
        case _:
            return Kill(child, "exit")


def _gifts(
    at: float, slots: Sequence[Slot], waiting: Iterable[Run], caps: Mapping[str, int], may_start: bool
) -> Iterator[Give | Retire]:
    fresh_soon = sum(map(_gets_fresh_child, slots))
    idle = [child for slot in slots if (child := slot.idle_child) is not None]
    busy: dict[str, int] = {}
    if caps:
        for slot in slots:
            if slot.child is not None and slot.child.run is not None:
                queue = slot.child.run.job.queue_name
                busy[queue] = busy.get(queue, 0) + 1
    for run in waiting:
        if not idle:
            return
        if at >= run.lease.abort_at:
            continue  # after a sleep of the machine, say: somebody else may hold it by now, and it is taken back
        queue = run.job.queue_name
        if busy.get(queue, 0) >= caps.get(queue, math.inf):
            continue
        child = idle[0] if not run.is_isolated else next((child for child in idle if not child.jobs_done), None)
        if child is None:  # it must not share a child with other jobs, and none is fresh
            if fresh_soon:
                fresh_soon -= 1
            elif may_start:
                yield Retire(idle.pop(0), ISOLATION)
            continue
        idle.remove(child)
        busy[queue] = busy.get(queue, 0) + 1
        yield Give(child, run)


def _gets_fresh_child(slot: Slot) -> bool:
    """Whether a child that has run no job is on its way to this slot."""
    return (
        slot.is_forking or slot.successor is not None or slot.child is None or slot.child.state is ChildState.STARTING
    )
