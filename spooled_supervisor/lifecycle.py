"""The transition tables of the three things that live long: a child, a lease, the supervisor.

The tables say what is legal; what to do about it is decided in `pool.py`, `leases.py` and `supervisor.py`. Events are
facts in the past tense, and time is one of them: a state has at most one deadline, and passing it is RAN_OUT_OF_TIME.
`advance` is the only way from state to state. The diagrams are printed from the tables (`diagram`), a test compares.

Child:
    STARTING    EXITED -> GONE, RAN_OUT_OF_TIME -> KILLED, SAID_HELLO -> IDLE, WAS_ASKED_TO_LEAVE -> STOPPING,
                WAS_KILLED -> KILLED
    IDLE        EXITED -> GONE, WAS_ASKED_TO_LEAVE -> STOPPING, WAS_GIVEN_JOB -> BUSY, WAS_KILLED -> KILLED
    BUSY        ANSWERED -> IDLE, EXITED -> GONE, RAN_OUT_OF_TIME -> ABORTING, WAS_ASKED_TO_ABORT -> ABORTING,
                WAS_KILLED -> KILLED
    ABORTING    ANSWERED -> IDLE, EXITED -> GONE, RAN_OUT_OF_TIME -> KILLED, WAS_ASKED_TO_ABORT -> ABORTING,
                WAS_KILLED -> KILLED
    STOPPING    EXITED -> GONE, RAN_OUT_OF_TIME -> KILLED, SAID_HELLO -> STOPPING, WAS_KILLED -> KILLED
    KILLED      EXITED -> GONE, WAS_KILLED -> KILLED
    GONE        -

Lease:
    HELD        RAN_OUT_OF_TIME -> LOST, WAS_DECIDED -> SETTLING, WAS_DROPPED -> LOST, WAS_REFUSED -> LOST
    SETTLING    RAN_OUT_OF_TIME -> LOST, WAS_DROPPED -> LOST, WAS_REFUSED -> LOST, WAS_TAKEN -> SETTLED
    SETTLED     -
    LOST        -
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum, auto
from typing import TypeVar

from spooled_supervisor.errors import IllegalTransition


class ChildState(Enum):
    """Where a child is; the comment says what is true while it is there."""

    STARTING = auto()  # forked and adopted, has not said hello; its boot deadline runs
    IDLE = auto()  # said hello, holds no job; no deadline
    BUSY = auto()  # holds exactly one job; the job's deadline runs
    ABORTING = auto()  # its job was told to stop; the grace runs
    STOPPING = auto()  # asked to leave, holds no job; its leave deadline runs
    KILLED = auto()  # SIGKILL sent to its family; only the kernel can answer now
    GONE = auto()  # reaped; nothing may happen any more


class ChildEvent(Enum):
    """What can happen to a child."""

    SAID_HELLO = auto()
    WAS_GIVEN_JOB = auto()
    WAS_ASKED_TO_ABORT = auto()
    ANSWERED = auto()
    WAS_ASKED_TO_LEAVE = auto()
    RAN_OUT_OF_TIME = auto()
    WAS_KILLED = auto()
    EXITED = auto()


_C, _E = ChildState, ChildEvent
CHILD: Mapping[ChildState, Mapping[ChildEvent, ChildState]] = {
    _C.STARTING: {
        _E.SAID_HELLO: _C.IDLE,
        _E.WAS_ASKED_TO_LEAVE: _C.STOPPING,
        _E.RAN_OUT_OF_TIME: _C.KILLED,
        _E.WAS_KILLED: _C.KILLED,
        _E.EXITED: _C.GONE,
    },
    _C.IDLE: {
        _E.WAS_GIVEN_JOB: _C.BUSY,
        _E.WAS_ASKED_TO_LEAVE: _C.STOPPING,
        _E.WAS_KILLED: _C.KILLED,
        _E.EXITED: _C.GONE,
    },
    _C.BUSY: {
        _E.ANSWERED: _C.IDLE,
        _E.WAS_ASKED_TO_ABORT: _C.ABORTING,
        _E.RAN_OUT_OF_TIME: _C.ABORTING,
        _E.WAS_KILLED: _C.KILLED,
        _E.EXITED: _C.GONE,
    },
    _C.ABORTING: {
        _E.ANSWERED: _C.IDLE,
        _E.WAS_ASKED_TO_ABORT: _C.ABORTING,  # a second reason: the tighter deadline of the two holds
        _E.RAN_OUT_OF_TIME: _C.KILLED,
        _E.WAS_KILLED: _C.KILLED,
        _E.EXITED: _C.GONE,
    },
    _C.STOPPING: {
        _E.SAID_HELLO: _C.STOPPING,  # its hello was on the way when it was asked
        _E.RAN_OUT_OF_TIME: _C.KILLED,
        _E.WAS_KILLED: _C.KILLED,
        _E.EXITED: _C.GONE,
    },
    _C.KILLED: {
        _E.WAS_KILLED: _C.KILLED,  # again: a family that was forking while it was killed
        _E.EXITED: _C.GONE,
    },
    _C.GONE: {},
}


class LeaseState(Enum):
    """Where a lease is."""

    HELD = auto()  # the job waits or runs; we renew
    SETTLING = auto()  # the outcome is known and on its way; we still renew, for a while
    SETTLED = auto()  # the service has the outcome
    LOST = auto()  # not ours any more; nothing may be reported


class LeaseEvent(Enum):
    """What can happen to a lease."""

    WAS_DECIDED = auto()
    WAS_TAKEN = auto()
    WAS_REFUSED = auto()
    WAS_DROPPED = auto()
    RAN_OUT_OF_TIME = auto()


_L, _V = LeaseState, LeaseEvent
LEASE: Mapping[LeaseState, Mapping[LeaseEvent, LeaseState]] = {
    _L.HELD: {
        _V.WAS_DECIDED: _L.SETTLING,
        _V.WAS_REFUSED: _L.LOST,
        _V.WAS_DROPPED: _L.LOST,
        _V.RAN_OUT_OF_TIME: _L.LOST,
    },
    _L.SETTLING: {
        _V.WAS_TAKEN: _L.SETTLED,
        _V.WAS_REFUSED: _L.LOST,
        _V.WAS_DROPPED: _L.LOST,
        _V.RAN_OUT_OF_TIME: _L.LOST,
    },
    _L.SETTLED: {},
    _L.LOST: {},
}


class Phase(IntEnum):
    """Where the supervisor is; it only grows, so no late event can undo a stop."""

    BOOTING = auto()  # no child has been ready yet
    RUNNING = auto()  # claims, runs, settles
    DRAINING = auto()  # claims nothing; what is held is finished and settled
    STOPPING = auto()  # children are killed; what is held is failed and settled
    STOPPED = auto()  # nothing is held, nothing runs


State = TypeVar("State", bound=Enum)
Fact = TypeVar("Fact", bound=Enum)


def advance(table: Mapping[State, Mapping[Fact, State]], state: State, event: Fact) -> State:
    """The state after `event`. Raises IllegalTransition where the table has no row; nothing has changed then."""
    try:
        return table[state][event]
    except KeyError:
        raise IllegalTransition(type(state).__name__, state.name, event.name) from None


def diagram(table: Mapping[State, Mapping[Fact, State]]) -> str:
    """The table as text, a line a state."""
    return "\n".join(
        f"{state.name:<12}" + (", ".join(sorted(f"{event.name} -> {to.name}" for event, to in row.items())) or "-")
        for state, row in table.items()
    )
