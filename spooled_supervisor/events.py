"""Everything that can happen, as frozen dataclasses, and the bus that tells of it.

`emit` is the only way anything is reported: log lines, metrics, the status page and tests all listen here. The class
name in snake case is the event's name in the log. Field names are public: seconds end in `_s`, and nothing carries a
payload, a result or a secret. Subscribers run at once, in the emitter's task, and must not block; one that raises is
logged and changes nothing.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    import asyncio

DEBUG, INFO, WARNING, ERROR = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events; `level` is the log level of its line."""

    level: ClassVar[int] = INFO
    name: ClassVar[str] = "event"

    # object's own hook and not super(): slots=True makes the class anew, which leaves the zero-argument form behind.
    def __init_subclass__(cls) -> None:
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


# --- the supervisor -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SupervisorStarted(Event):
    """The first child is ready; the worker id is known, the service need not be reachable yet."""

    pid: int
    version: str
    worker_id: str
    queues: tuple[str, ...]
    procs: int
    api_url: str


@dataclass(frozen=True, slots=True)
class PhaseChanged(Event):
    """BOOTING, RUNNING, DRAINING, STOPPING, STOPPED; it only grows."""

    phase: str
    reason: str


@dataclass(frozen=True, slots=True)
class Quieted(Event):
    """Nothing more is claimed until `Resumed`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """Claiming goes on."""

    reason: str


@dataclass(frozen=True, slots=True)
class PressureRose(Event):
    """Load or memory pressure is above its limit: nothing more is claimed for now."""

    level: ClassVar[int] = WARNING
    reason: str


@dataclass(frozen=True, slots=True)
class PressureFell(Event):
    """Claims go on."""


@dataclass(frozen=True, slots=True)
class CgroupDelegated(Event):
    """Every child gets a cgroup of its own in this directory. `memory`: its memory can be limited there."""

    directory: str
    memory: bool


@dataclass(frozen=True, slots=True)
class CgroupFailed(Event):
    """A delegated cgroup cannot be used, or not for all; children go on without. Everything that fails is told once."""

    level: ClassVar[int] = WARNING
    reason: str


@dataclass(frozen=True, slots=True)
class SupervisorStopped(Event):
    """The last event. `unsettled` jobs are left to their lease."""

    exit_code: int
    unsettled: int
    uptime_s: float


@dataclass(frozen=True, slots=True)
class LoopLagged(Event):
    """The loop woke this much later than asked: the machine slept, was stopped or is starved."""

    level: ClassVar[int] = WARNING
    lag_s: float


# --- fork server and children ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForkServerStarted(Event):
    """A fresh interpreter begins to import the app."""

    generation: int
    pid: int


@dataclass(frozen=True, slots=True)
class ForkServerReady(Event):
    """The app is imported; children can be forked."""

    generation: int
    pid: int
    preload_s: float
    queues: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ForkServerThreaded(Event):
    """The app started threads while it was imported; a fork copies their locks but not them (fork(2))."""

    level: ClassVar[int] = WARNING
    generation: int
    threads: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ForkServerExited(Event):
    """It is gone; running children go on, and a new one is started unless the supervisor is stopping."""

    level: ClassVar[int] = WARNING
    generation: int
    pid: int
    cause: str


@dataclass(frozen=True, slots=True)
class ForkServerFailed(Event):
    """A new one could not be started or cannot import the app; it is tried again."""

    level: ClassVar[int] = ERROR
    generation: int
    error: str


@dataclass(frozen=True, slots=True)
class ForkServerPrinted(Event):
    """A line that the app printed while it was imported."""

    generation: int
    message: str


@dataclass(frozen=True, slots=True)
class ChildStarted(Event):
    """Forked and adopted, not yet ready."""

    level: ClassVar[int] = DEBUG
    slot: int
    generation: int
    pid: int


@dataclass(frozen=True, slots=True)
class ChildReady(Event):
    """It said hello: `on_child_start` hooks have run and it can take a job."""

    level: ClassVar[int] = DEBUG
    slot: int
    generation: int
    pid: int
    boot_s: float


@dataclass(frozen=True, slots=True)
class ChildFailedToBoot(Event):
    """It ended, or had to be killed, before it was ready."""

    level: ClassVar[int] = ERROR
    slot: int
    generation: int
    pid: int
    cause: str
    output: str
    retry_in_s: float


@dataclass(frozen=True, slots=True)
class ForkFailed(Event):
    """The fork server could not fork (fork(2): EAGAIN, ENOMEM)."""

    level: ClassVar[int] = ERROR
    slot: int
    cause: str
    retry_in_s: float


@dataclass(frozen=True, slots=True)
class ChildKilled(Event):
    """SIGKILL went to its whole family, `descendants` of them below it.

    `reason`: timeout, lease_lost, shutdown, operator, boot, protocol, unresponsive, exit, memory.
    """

    level: ClassVar[int] = WARNING
    slot: int
    generation: int
    pid: int
    reason: str
    job_id: str | None
    descendants: int


@dataclass(frozen=True, slots=True)
class ChildExited(Event):
    """Reaped. `reason` tells why it left: crash, recycle, reload, scale, shutdown, terminated, boot, memory, ..."""

    slot: int
    generation: int
    pid: int
    reason: str
    cause: str
    signal: str | None
    exit_code: int | None
    uptime_s: float
    cpu_s: float
    max_rss_bytes: int
    jobs: int


@dataclass(frozen=True, slots=True)
class OrphansKilled(Event):
    """Processes that jobs left behind were killed or reaped."""

    count: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LeftoversFound(Event):
    """A job has ended and these processes of it were still there: killed, or kept, as `leftovers` says."""

    level: ClassVar[int] = WARNING
    job_id: str
    slot: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Scaled(Event):
    """There are so many slots now."""

    before: int
    procs: int


@dataclass(frozen=True, slots=True)
class Reloaded(Event):
    """The app was imported anew; so many children are being replaced."""

    generation: int
    children: int


@dataclass(frozen=True, slots=True)
class ReloadFailed(Event):
    """The new app cannot be used; the old generation goes on."""

    level: ClassVar[int] = ERROR
    generation: int
    error: str


@dataclass(frozen=True, slots=True)
class StackDumped(Event):
    """Where a busy child stands, as somebody asked."""

    job_id: str
    queue_name: str
    slot: int
    pid: int
    stack: str


# --- jobs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobClaimed(Event):
    """Its lease is ours."""

    level: ClassVar[int] = DEBUG
    job_id: str
    queue_name: str
    retry_count: int


@dataclass(frozen=True, slots=True)
class JobStarted(Event):
    """A child runs it. `wait_s`: from the claim's answer to the handler's start."""

    level: ClassVar[int] = DEBUG
    job_id: str
    queue_name: str
    slot: int
    pid: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class JobProgressed(Event):
    """The handler called `ctx.progress`."""

    level: ClassVar[int] = DEBUG
    job_id: str
    queue_name: str
    slot: int
    percent: float
    message: str | None


@dataclass(frozen=True, slots=True)
class JobLogged(Event):
    """A line of the handler: `ctx.log`, the standard `logging`, or what it printed (`source`: log, logging, output)."""

    job_id: str | None
    queue_name: str | None
    slot: int
    pid: int
    severity: str
    message: str
    source: str
    meta: str | None = None


@dataclass(frozen=True, slots=True)
class JobOutputDropped(Event):
    """A child said more than its rate allows; this many lines were not logged."""

    level: ClassVar[int] = WARNING
    job_id: str | None
    slot: int
    lines: int


@dataclass(frozen=True, slots=True)
class JobAborting(Event):
    """The handler was told to stop. `reason`: timeout, lease_lost, shutdown, operator."""

    level: ClassVar[int] = WARNING
    job_id: str
    queue_name: str
    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class JobCompleted(Event):
    """The outcome is success; the report to the service follows."""

    job_id: str
    queue_name: str
    slot: int
    duration_s: float
    result_bytes: int


@dataclass(frozen=True, slots=True)
class JobFailed(Event):
    """The outcome is a failure. `kind`: failed, timed_out, crashed, released."""

    level: ClassVar[int] = WARNING
    job_id: str
    queue_name: str
    slot: int | None
    kind: str
    error: str
    will_retry: bool
    duration_s: float | None


@dataclass(frozen=True, slots=True)
class JobLeaseLost(Event):
    """The job is not ours any more; it is stopped and nothing is reported."""

    level: ClassVar[int] = WARNING
    job_id: str
    queue_name: str
    reason: str


@dataclass(frozen=True, slots=True)
class OutcomeSettled(Event):
    """The service has the outcome (`status`: completed, failed; `already` if an earlier try had landed)."""

    level: ClassVar[int] = DEBUG
    job_id: str
    queue_name: str
    status: str
    already: bool
    tries: int


@dataclass(frozen=True, slots=True)
class OutcomeDropped(Event):
    """The outcome could not be reported and never will be; the service decides by lease expiry."""

    level: ClassVar[int] = ERROR
    job_id: str
    queue_name: str
    status: str
    reason: str


@dataclass(frozen=True, slots=True)
class SurvivorsKilled(Event):
    """Processes of an earlier life of this supervisor were still running."""

    level: ClassVar[int] = WARNING
    count: int


@dataclass(frozen=True, slots=True)
class LeftoverReported(Event):
    """A lease of an earlier life: its outcome is reported now (`finished`), or its job is failed, as nobody runs it."""

    level: ClassVar[int] = WARNING
    job_id: str
    queue_name: str
    status: str
    finished: bool


@dataclass(frozen=True, slots=True)
class LeftoverExpired(Event):
    """A lease of an earlier life has ended: the service has given the job to somebody else, or will."""

    level: ClassVar[int] = WARNING
    job_id: str
    queue_name: str
    finished: bool


@dataclass(frozen=True, slots=True)
class LeftoverKept(Event):
    """A lease of an earlier life belongs to another service than the one configured now; it stays in the outbox."""

    level: ClassVar[int] = WARNING
    job_id: str
    queue_name: str
    api_url: str


@dataclass(frozen=True, slots=True)
class OutboxTroubled(Event):
    """Nothing is kept on disk for now: a crash would lose what is finished and not reported."""

    level: ClassVar[int] = ERROR
    reason: str


@dataclass(frozen=True, slots=True)
class OutboxRecovered(Event):
    """Outcomes are kept on disk again."""


# --- the service ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ApiRequestFinished(Event):
    """One request. `status`: the HTTP status (of gRPC the nearest), `error` or `timeout`. Counted, not logged."""

    level: ClassVar[int] = 0
    operation: str
    status: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class ApiTroubled(Event):
    """An operation began to fail; its repetitions are not logged one by one."""

    level: ClassVar[int] = WARNING
    operation: str
    reason: str
    retry_in_s: float | None


@dataclass(frozen=True, slots=True)
class ApiRecovered(Event):
    """The operation works again."""

    operation: str
    failures: int


@dataclass(frozen=True, slots=True)
class ClaimAnswered(Event):
    """One claim: `asked` places, `got` jobs."""

    level: ClassVar[int] = 0
    queue_name: str
    asked: int
    got: int


@dataclass(frozen=True, slots=True)
class LeaseRenewed(Event):
    """One renewal. `result`: ok, lost, unavailable; `late_s` after it was due."""

    level: ClassVar[int] = 0
    job_id: str
    result: str
    late_s: float


@dataclass(frozen=True, slots=True)
class WorkerRegistered(Event):
    """The service knows us."""

    worker_id: str
    queue_name: str
    heartbeat_interval_s: float


@dataclass(frozen=True, slots=True)
class WorkerDeregistered(Event):
    """The service was told that we leave."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class HeartbeatSent(Event):
    """The service took our state."""

    level: ClassVar[int] = DEBUG
    status: str
    current_jobs: int
    cpu_percent: float
    memory_percent: float


@dataclass(frozen=True, slots=True)
class CommandReceived(Event):
    """The service, a signal or the control socket asked for something; `obeyed` tells whether we do it."""

    source: str
    command: str
    obeyed: bool


@dataclass(frozen=True, slots=True)
class CommandRefused(Event):
    """A command that came by signal could not be carried out."""

    level: ClassVar[int] = WARNING
    reason: str


# --- the bus --------------------------------------------------------------------------------------------------------

E = TypeVar("E", bound=Event)
Subscriber = Callable[[Any], None]


class Events:
    """Emit, subscribe, wait. One per supervisor; used from the loop's thread only."""

    def __init__(self) -> None:
        self._by_type: dict[type[Event], list[Subscriber]] = {}
        self._all: list[Subscriber] = []

    def emit(self, event: Event) -> None:
        """Tell all subscribers, those of every event first; what one raises is logged and goes no further."""
        for subscriber in (*self._all, *self._by_type.get(type(event), ())):
            try:
                subscriber(event)
            except Exception:
                logging.getLogger(__name__).exception("a subscriber of %s failed", event.name)

    def subscribe(self, subscriber: Subscriber, *types: type[Event]) -> Callable[[], None]:
        """Call `subscriber` for events of these types (all if none is given); returns the unsubscribe function."""
        lists = [self._by_type.setdefault(t, []) for t in types] if types else [self._all]
        for subscribers in lists:
            subscribers.append(subscriber)

        def unsubscribe() -> None:
            for subscribers in lists:
                if subscriber in subscribers:
                    subscribers.remove(subscriber)

        return unsubscribe

    async def wait_for(self, event_type: type[E], *, timeout_s: float = 10.0, **fields: object) -> E:
        """The next event of this type whose fields have these values. Raises TimeoutError; cancel-safe."""
        import asyncio

        found: asyncio.Future[E] = asyncio.get_running_loop().create_future()

        def look(event: E) -> None:
            if not found.done() and all(getattr(event, key) == value for key, value in fields.items()):
                found.set_result(event)

        unsubscribe = self.subscribe(look, event_type)
        try:
            return await asyncio.wait_for(found, timeout_s)
        finally:
            unsubscribe()
