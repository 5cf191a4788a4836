"""What the service told us, in our words and units: the same for every transport. Nothing here does I/O."""

from __future__ import annotations

from dataclasses import dataclass

from spooled_supervisor.errors import ProtocolError
from spooled_supervisor.job import Job


class NotCarried(ProtocolError):
    """This transport cannot say such a result; another one can. Nothing was sent."""


@dataclass(frozen=True, slots=True)
class Registration:
    """The service knows us as `worker_id` and wants to hear from us every `heartbeat_interval_s`."""

    worker_id: str
    heartbeat_interval_s: float


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """`known` is False when we have to register again. `commands` are given as they came; most services send none."""

    known: bool
    next_heartbeat_s: float | None = None
    commands: tuple[str, ...] = ()
    should_drain: bool = False


@dataclass(frozen=True, slots=True)
class UnreadableJob:
    """A claimed job whose record cannot be used. `job` has its id and lease, so that it can be failed by name."""

    job: Job
    reason: str


@dataclass(frozen=True, slots=True)
class Claim:
    """All jobs that are ours now, which may be more than were asked for.

    `asked`: how many were asked for, where that is less than what was wanted; if so many came there may be more.
    """

    jobs: tuple[Job, ...] = ()
    unreadable: tuple[UnreadableJob, ...] = ()
    asked: int | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """The service has the outcome; `already` if an earlier try had landed. `will_retry`: its word, None if silent."""

    already: bool
    will_retry: bool | None = None
