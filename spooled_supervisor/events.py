"""Everything that can happen, as frozen structs, and the bus that tells of it.

`emit` is the only way anything is reported: log lines, metrics, the status page and tests all listen here. The class
name in snake case is the event's name in the log. Field names are public: seconds end in `_s`, and nothing carries a
payload, a result or a secret. Subscribers run at once, in the emitter's task, and must not block; one that raises is
logged and changes nothing.

Structs: to define so many frozen dataclasses takes 35 ms of the start, and to make one 0.5 us instead of 0.1.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec

if TYPE_CHECKING:
    import asyncio

DEBUG, INFO, WARNING, ERROR = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR


class Event(msgspec.Struct, frozen=True):
    """Base of all events; `level` is the log level of its line."""

    level: ClassVar[int] = INFO
    name: ClassVar[str] = "event"

    def __init_subclass__(cls, **config: Any) -> None:
        super().__init_subclass__(**config)
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


# --- the supervisor -------------------------------------------------------------------------------------------------


class SupervisorStarted(Event, frozen=True):
    """The first child is ready; the worker id is known, the service need not be reachable yet."""

    pid: int
    version: str
    worker_id: str
    queues: tuple[str, ...]
    procs: int
    api_url: str


class PhaseChanged(Event, frozen=True):
    """BOOTING, RUNNING, DRAINING, STOPPING, STOPPED; it only grows."""

    phase: str
    reason: str


class Quieted(Event, frozen=True):
    """Nothing more is claimed until `Resumed`."""

    reason: str


class Resumed(Event, frozen=True):
    """Claiming goes on."""

    reason: str


class PressureRose(Event, frozen=True):
    """Load or memory pressure is above its limit: nothing more is claimed for now."""

    level: ClassVar[int] = WARNING
    reason: str


class PressureFell(Event, frozen=True):
    """Claims go on."""


class CgroupDelegated(Event, frozen=True):
    """Every child gets a cgroup of its own in this directory. `memory`: its memory can be limited there."""

    directory: str
    memory: bool


class CgroupFailed(Event, frozen=True):
    """A delegated cgroup cannot be used, or not for all; children go on without. Everything that fails is told once."""

    level: ClassVar[int] = WARNING
    reason: str


class SupervisorStopped(Event, frozen=True):
    """The last event. `unsettled` jobs are left to their lease."""

    exit_code: int
    unsettled: int
    uptime_s: float


class LoopLagged(Event, frozen=True):
    """The loop woke this much later than asked: the machine slept, was stopped or is starved."""

    level: ClassVar[int] = WARNING
    lag_s: float


# --- fork server and children ---------------------------------------------------------------------------------------


class ForkServerStarted(Event, frozen=True):
    """A fresh interpreter begins to import the app."""

    generation: int
    pid: int


class ForkServerReady(Event, frozen=True):
    """The app is imported; children can be forked."""

    generation: int
    pid: int
    preload_s: float
    queues: tuple[str, ...]


class ForkServerThreaded(Event, frozen=True):
    """The app started threads while it was imported; a fork copies their locks but not them (fork(2))."""

    level: ClassVar[int] = WARNING
    generation: int
    threads: tuple[str, ...]


class ForkServerExited(Event, frozen=True):
    """It is gone; running children go on, and a new one is started unless the supervisor is stopping."""

    level: ClassVar[int] = WARNING
    generation: int
    pid: int
    cause: str


class ForkServerFailed(Event, frozen=True):
    """A new one could not be started or cannot import the app; it is tried again."""

    level: ClassVar[int] = ERROR
    generation: int
    error: str


class ForkServerPrinted(Event, frozen=True):
    """A line that the app printed while it was imported."""

    generation: int
    message: str


class ChildStarted(Event, frozen=True):
    """Forked and adopted, not yet ready."""

    level: ClassVar[int] = DEBUG
    slot: int
    generation: int
    pid: int


class ChildReady(Event, frozen=True):
    """It said hello: `on_child_start` hooks have run and it can take a job."""

    level: ClassVar[int] = DEBUG
    slot: int
    generation: int
    pid: int
    boot_s: float


class ChildFailedToBoot(Event, frozen=True):
    """It ended, or had to be killed, before it was ready."""

    level: ClassVar[int] = ERROR
    slot: int
    generation: int
    pid: int
    cause: str
    output: str
    retry_in_s: float


class ForkFailed(Event, frozen=True):
    """The fork server could not fork (fork(2): EAGAIN, ENOMEM)."""

    level: ClassVar[int] = ERROR
    slot: int
    cause: str
    retry_in_s: float


class ChildKilled(Event, frozen=True):
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


class ChildExited(Event, frozen=True):
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


class OrphansKilled(Event, frozen=True):
    """Processes that jobs left behind were killed or reaped."""

    count: int
    names: tuple[str, ...]


class LeftoversFound(Event, frozen=True):
    """A job has ended and these processes of it were still there: killed, or kept, as `leftovers` says."""

    level: ClassVar[int] = WARNING
    job_id: str
    slot: int
    names: tuple[str, ...]


class Scaled(Event, frozen=True):
    """There are so many slots now."""

    before: int
    procs: int


class Reloaded(Event, frozen=True):
    """The app was imported anew; so many children are being replaced."""

    generation: int
    children: int


class ReloadFailed(Event, frozen=True):
    """The new app cannot be used; the old generation goes on."""

    level: ClassVar[int] = ERROR
    generation: int
    error: str


class StackDumped(Event, frozen=True):
    """Where a busy child stands, as somebody asked."""

    job_id: str
    queue_name: str
    slot: int
    pid: int
    stack: str


# --- jobs -----------------------------------------------------------------------------------------------------------


class JobClaimed(Event, frozen=True):
    """Its lease is ours."""

    level: ClassVar[int] = DEBUG
    job_id: str
    queue_name: str
    retry_count: int


class JobStarted(Event, frozen=True):
    """A child runs it. `wait_s`: from the claim's answer to the handler's start."""

    level: ClassVar[int] = DEBUG
    job_id: str
    queue_name: str
    slot: int
    pid: int
    wait_s: float


class JobProgressed(Event, frozen=True):
    """The handler called `ctx.progress`."""

    level: ClassVar[int] = DEBUG
    job_id: str
    queue_name: str
    slot: int
    percent: float
    message: str | None


class JobLogged(Event, frozen=True):
    """A line of the handler: `ctx.log`, the standard `logging`, or what it printed (`source`: log, logging, output)."""

    job_id: str | None
    queue_name: str | None
    slot: int
    pid: int
    severity: str
    message: str
    source: str
    meta: str | None = None


class JobOutputDropped(Event, frozen=True):
    """A child said more than its rate allows; this many lines were not logged."""

    level: ClassVar[int] = WARNING
    job_id: str | None
    slot: int
    lines: int


class JobAborting(Event, frozen=True):
    """The handler was told to stop. `reason`: timeout, lease_lost, shutdown, operator."""

    level: ClassVar[int] = WARNING
    job_id: str
    queue_name: str
    slot: int
    reason: str


class JobCompleted(Event, frozen=True):
    """The outcome is success; the report to the service follows."""

    job_id: str
    queue_name: str
    slot: int
    duration_s: float
    result_bytes: int


class JobFailed(Event, frozen=True):
    """The outcome is a failure. `kind`: failed, timed_out, crashed, released."""

    level: ClassVar[int] = WARNING
    job_id: str
    queue_name: str
    slot: int | None
    kind: str
    error: str
    will_retry: bool
    duration_s: float | None


class JobLeaseLost(Event, frozen=True):
    """The job is not ours any more; it is stopped and nothing is reported."""

    level: ClassVar[int] = WARNING
    job_id: str
    queue_name: str
    reason: str


class LeaseLapsed(Event, frozen=True):
    """The service renews the lease, and has not taken the outcome for `settling_s`: it is not renewed any more, and the
    outcome is tried until it ends."""

    level: ClassVar[int] = WARNING
    job_id: str
    queue_name: str
    settling_s: float
    ends_in_s: float


class OutcomeSettled(Event, frozen=True):
    """The service has the outcome (`status`: completed, failed; `already` if an earlier try had landed)."""

    level: ClassVar[int] = DEBUG
    job_id: str
    queue_name: str
    status: str
    already: bool
    tries: int


class OutcomeDropped(Event, frozen=True):
    """The outcome could not be reported and never will be; the service decides by lease expiry."""

    level: ClassVar[int] = ERROR
    job_id: str
    queue_name: str
    status: str
    reason: str


class SurvivorsKilled(Event, frozen=True):
    """Processes of an earlier life of this supervisor were still running."""

    level: ClassVar[int] = WARNING
    count: int


class LeftoverReported(Event, frozen=True):
    """A lease of an earlier life: its outcome is reported now (`finished`), or its job is failed, as nobody runs it."""

    level: ClassVar[int] = WARNING
    job_id: str
    queue_name: str
    status: str
    finished: bool


class LeftoverExpired(Event, frozen=True):
    """A lease of an earlier life has ended: the service has given the job to somebody else, or will."""

    level: ClassVar[int] = WARNING
    job_id: str
    queue_name: str
    finished: bool


class LeftoverKept(Event, frozen=True):
    """A lease of an earlier life belongs to another service than the one configured now; it stays in the outbox."""

    level: ClassVar[int] = WARNING
    job_id: str
    queue_name: str
    api_url: str


class OutboxTroubled(Event, frozen=True):
    """Nothing is kept on disk for now: a crash would lose what is finished and not reported."""

    level: ClassVar[int] = ERROR
    reason: str


class OutboxRecovered(Event, frozen=True):
    """Outcomes are kept on disk again."""


# --- the service ----------------------------------------------------------------------------------------------------


class ApiRequestFinished(Event, frozen=True):
    """One request. `status`: the HTTP status (of gRPC the nearest), `error` or `timeout`. Counted, not logged."""

    level: ClassVar[int] = 0
    operation: str
    status: str
    duration_s: float


class ApiTroubled(Event, frozen=True):
    """An operation began to fail; its repetitions are not logged one by one."""

    level: ClassVar[int] = WARNING
    operation: str
    reason: str
    retry_in_s: float | None


class ApiRecovered(Event, frozen=True):
    """The operation works again."""

    operation: str
    failures: int


class ClaimAnswered(Event, frozen=True):
    """One claim: `asked` places, `got` jobs."""

    level: ClassVar[int] = 0
    queue_name: str
    asked: int
    got: int


class LeaseRenewed(Event, frozen=True):
    """One renewal, `late_s` after it was due. `result`: ok, lost (before its job had an outcome), unavailable."""

    level: ClassVar[int] = 0
    job_id: str
    result: str
    late_s: float


class WorkerRegistered(Event, frozen=True):
    """The service knows us."""

    worker_id: str
    queue_name: str
    heartbeat_interval_s: float


class WorkerDeregistered(Event, frozen=True):
    """The service was told that we leave."""

    worker_id: str


class HeartbeatSent(Event, frozen=True):
    """The service took our state."""

    level: ClassVar[int] = DEBUG
    status: str
    current_jobs: int
    cpu_percent: float
    memory_percent: float


class CommandReceived(Event, frozen=True):
    """The service, a signal or the control socket asked for something; `obeyed` tells whether we do it."""

    source: str
    command: str
    obeyed: bool


class CommandRefused(Event, frozen=True):
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
