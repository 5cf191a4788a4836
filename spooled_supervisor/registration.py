"""Our row in the service's list of workers: register, heartbeats, deregister.

It never stops the work: a service that has no place for another worker (429, plan quota), knows us no more (404) or
does not answer is asked again for ever, slowly, while jobs are claimed all the same (claims need no registration).
Heartbeats go on during a drain, as the service takes the jobs of silent workers away.

Who only waits because the service did not answer waits no longer when another operation works again: claims are tried
more often, so they find out first. Else a worker is listed a minute after an outage, and on a link that comes and goes
every heartbeat may fall into a gap, until the service takes its jobs away. The event stream is no such sign, as it may
work while nothing else is answered. The back-off is not reset, only cut short, and by a link that flaps once in
WOKEN_GAP_S at most.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spooled_supervisor.api.events import OPERATION as STREAM_OPERATION
from spooled_supervisor.api.service import Service
from spooled_supervisor.api.values import HeartbeatAnswer
from spooled_supervisor.config import WorkerConfig
from spooled_supervisor.errors import ApiRefused, ApiUnavailable, CredentialsRefused
from spooled_supervisor.events import ApiRecovered, Events, HeartbeatSent, WorkerDeregistered, WorkerRegistered
from spooled_supervisor.timing import Alarm, Backoff, jittered, now
from spooled_supervisor.troubles import Troubles

TIMEOUT_S = 5.0
RETRY_FIRST_S = 1.0
RETRY_CAP_S = 60.0
WOKEN_SPREAD_S = 0.5
"""A fleet sees the end of an outage at once and does not come at once; the good times of a bad link may be short."""
WOKEN_GAP_S = 5.0
"""Between two tries of this kind: half the usual interval, as what works again and again may be all but us."""
INTERVAL_S = 10.0
INTERVAL_BOUNDS_S = (1.0, 60.0)
"""What the service may ask for: above it, it would take us for dead (two minutes of silence)."""
SILENT_S = 60.0
"""Without a heartbeat that was accepted for so long, or for two intervals, something is wrong."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """What a heartbeat says of us."""

    status: str  # healthy, degraded, draining
    current_jobs: int
    cpu_percent: float
    memory_percent: float
    host: dict[str, Any]


class Registration:
    """Registers, and beats until it is cancelled."""

    def __init__(
        self,
        api: Service,
        worker: WorkerConfig,
        *,
        worker_id: str,
        queue_names: tuple[str, ...],
        max_concurrency: int,
        events: Events,
        troubles: Troubles,
        vitals: Callable[[], Vitals],
        on_command: Callable[[str], None],
        on_refused: Callable[[CredentialsRefused], None],
    ) -> None:
        self._api = api
        self._worker = worker
        self._worker_id = worker_id
        self._queue_names = queue_names
        self._max_concurrency = max_concurrency
        self._events = events
        self._troubles = troubles
        self._vitals = vitals
        self._on_command = on_command
        self._on_refused = on_refused
        self._alarm = Alarm()
        self._backoffs = {name: Backoff(RETRY_FIRST_S, RETRY_CAP_S) for name in ("register", "heartbeat")}
        self._interval_s = INTERVAL_S
        self._turn = asyncio.Lock()  # one request about our row at a time
        self._is_leaving = False
        self._is_outdated = False  # our row says what we were before
        self._register_at = 0.0  # an outdated row is not told anew before
        self._next_at = float("inf")  # when there is something to do
        self._tried_at = 0.0
        self._woken_at = float("-inf")  # the last try, or the next, because something else works again
        self._answers_since = float("-inf")  # when another operation worked again
        self._unanswered: set[str] = set()  # what is put off by our own back-off: the service has not said for how long
        self.is_registered = False
        self.last_beat_at: float | None = None
        events.subscribe(self._on_recovered, ApiRecovered)

    @property
    def silent_for_s(self) -> float | None:
        """How long no heartbeat was accepted, if that is too long (and one ever was); else None."""
        if self.last_beat_at is None:
            return None
        silent_s = now() - self.last_beat_at
        return silent_s if silent_s > max(SILENT_S, 2 * self._interval_s) else None

    def describe(self, *, queue_names: tuple[str, ...] | None = None, max_concurrency: int | None = None) -> None:
        """We serve other queues, or more jobs at once, from now on: register again, under the same id.

        Until that is accepted our row stays, and heartbeats go on.
        """
        self._queue_names = queue_names or self._queue_names
        self._max_concurrency = max_concurrency or self._max_concurrency
        self._is_outdated, self._register_at = True, 0.0
        self._wake(0.0)

    def beat_now(self) -> None:
        """Tell the service at once (the status has changed)."""
        if self.is_registered:
            self._wake(0.0)

    async def run(self) -> None:
        """Register, then beat every interval, for ever."""
        self._wake(now() + jittered(0.05, 1.0))  # a fleet that starts together does not ask together
        await self._wait()
        while not self._is_leaving:
            async with self._turn:
                self._next_at = float("inf")
                self._tried_at = now()
                must_register = not self.is_registered or (self._is_outdated and self._tried_at >= self._register_at)
                self._unanswered.discard("register" if must_register else "heartbeat")
                delay = await (self._register() if must_register else self._beat())
                self._next_at = min(self._next_at, now() + delay)  # what has come meanwhile may be sooner
            await self._wait()

    def _wake(self, at: float) -> None:
        """There is something to do at this instant, if not before."""
        self._next_at = min(self._next_at, at)
        self._alarm.ring()

    async def _wait(self) -> None:
        while now() < self._next_at:  # which may change meanwhile
            await self._alarm.wait_until(self._next_at)

    async def deregister(self, timeout_s: float) -> bool:
        """Leave the list; whether that worked (or there was nothing to leave). Never raises."""
        self._is_leaving = True
        try:
            async with asyncio.timeout(timeout_s), self._turn:  # a heartbeat that arrived later would list us again
                if not self.is_registered:
                    return True
                await self._api.deregister(timeout_s=timeout_s)
        except (ApiUnavailable, ApiRefused, TimeoutError) as error:
            self._troubles.failed("deregister", str(error) or "no answer", None)
            return False
        self.is_registered = False
        self._events.emit(WorkerDeregistered(self._worker_id))
        return True

    async def _register(self) -> float:
        """One try; seconds until the next thing to do."""
        worker, told = self._worker, (self._queue_names, self._max_concurrency)
        try:
            registration = await self._api.register(
                queue_names=self._queue_names,
                hostname=worker.hostname,
                worker_type=worker.worker_type,
                version=worker.version,
                max_concurrency=self._max_concurrency,
                metadata=worker.metadata,
                timeout_s=TIMEOUT_S,
            )
        except (ApiUnavailable, ApiRefused) as error:
            delay = self._failed("register", error)
            self._register_at = now() + delay
            return 0.0 if self.is_registered else delay  # a row that is out of date is kept alive
        self._worked("register")
        self.is_registered = True
        self._is_outdated = told != (self._queue_names, self._max_concurrency)  # we are others by now
        self._adopt_interval(registration.heartbeat_interval_s)
        self._events.emit(WorkerRegistered(registration.worker_id, self._queue_names[0], self._interval_s))
        return 0.0

    async def _beat(self) -> float:
        """One heartbeat; seconds until the next thing to do."""
        vitals = self._vitals()
        try:
            answer = await self._api.heartbeat(
                status=vitals.status,
                current_jobs=vitals.current_jobs,
                cpu_percent=vitals.cpu_percent,
                memory_percent=vitals.memory_percent,
                metadata={**self._worker.metadata, **vitals.host},
                timeout_s=TIMEOUT_S,
            )
        except (ApiUnavailable, ApiRefused) as error:
            return self._failed("heartbeat", error, self._interval_s)
        self._worked("heartbeat")
        return self._take(answer, vitals)

    def _take(self, answer: HeartbeatAnswer, vitals: Vitals) -> float:
        if not answer.known:  # forgotten: register again with the same id
            self.is_registered = False
            return jittered(RETRY_FIRST_S, 0.5)
        self.last_beat_at = now()
        self._events.emit(HeartbeatSent(vitals.status, vitals.current_jobs, vitals.cpu_percent, vitals.memory_percent))
        if answer.next_heartbeat_s is not None:
            self._adopt_interval(answer.next_heartbeat_s)
        for command in answer.commands:
            self._on_command(command)
        if answer.should_drain:
            self._on_command("drain")
        return jittered(self._interval_s, 0.05)

    def _adopt_interval(self, interval_s: float) -> None:
        low, high = INTERVAL_BOUNDS_S
        self._interval_s = min(high, max(low, interval_s))

    def _on_recovered(self, recovered: ApiRecovered) -> None:
        """The service answers again, if it is not the event stream alone."""
        if recovered.operation == STREAM_OPERATION:
            return
        if recovered.operation not in self._backoffs:
            self._answers_since = now()
        if waiting := self._unanswered - {recovered.operation}:
            at = self._soon()
            if "register" in waiting:
                self._register_at = min(self._register_at, at)
            self._wake(at)

    def _soon(self) -> float:
        """When what was not answered is tried again, now that something else was."""
        if self._woken_at <= now():
            self._woken_at = max(now() + random.uniform(0.0, WOKEN_SPREAD_S), self._woken_at + WOKEN_GAP_S)
        return self._woken_at

    def _failed(self, operation: str, error: ApiUnavailable | ApiRefused, cap_s: float = RETRY_CAP_S) -> float:
        """Seconds until the next try, which is what is told."""
        hint = error.retry_after_s if isinstance(error, ApiUnavailable) else None
        delay = min(max(self._backoffs[operation].next_delay(), hint or 0.0), cap_s)
        if isinstance(error, ApiUnavailable) and not hint and not error.rate_limited:
            self._unanswered.add(operation)
            if self._answers_since >= self._tried_at:  # it was on its way when the service began to answer
                delay = min(delay, self._soon() - now())
        self._troubles.failed(operation, str(error), delay)
        if isinstance(error, CredentialsRefused):
            self._on_refused(error)
        return delay

    def _worked(self, operation: str) -> None:
        self._backoffs[operation].reset()
        self._troubles.worked(operation)
