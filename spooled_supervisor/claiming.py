"""When to ask which queue for how many jobs.

One queue per claim, one claim in flight per queue, never more places asked for than are free: a claim reserves its
places until it is answered. Queues take turns by weight (smooth weighted round robin: over time each gets its share,
and none has to wait for a run of another's). An empty queue is asked again after the poll interval, a queue that gave
all that was asked for as soon as there is a place, a failing one after a back-off. Every path waits for something.

What the answer brings is the caller's (`on_claim`, which says how many jobs of it will run). A claim whose answer is
lost is never replayed: the next poll is a new one. Cancelling `run` does not cancel claims in flight: `finish` awaits
them, as their jobs are ours already.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from spooled_supervisor.api.events import OPERATION as STREAM_OPERATION
from spooled_supervisor.api.gate import RateGate
from spooled_supervisor.api.service import Service
from spooled_supervisor.api.values import Claim
from spooled_supervisor.breaker import QueueBreaker
from spooled_supervisor.config import ClaimConfig, QueueConfig
from spooled_supervisor.errors import ApiRefused, ApiUnavailable, CredentialsRefused
from spooled_supervisor.events import ApiRecovered, ClaimAnswered, Events, JobFailed
from spooled_supervisor.pool import Pool
from spooled_supervisor.timing import Alarm, Backoff, jittered, now
from spooled_supervisor.troubles import Troubles

MAX_LIMIT = 100
"""The service's bound for one claim (POST /api/v1/jobs/claim)."""
CLAIM_TIMEOUT_S = 10.0
BACKOFF_FIRST_S = 1.0
BACKOFF_CAP_S = 30.0
HINT_SPREAD_S = 0.005
IDLE_CAP_S = 40.0
"""The longest pause of an empty queue while the event stream works: 1.5 claims a minute, beside 6 heartbeats."""
REFUSED_PAUSE_S = 60.0
"""Until a queue is asked again that we may not claim from (403), or whose claim is malformed to the service."""


@dataclass(slots=True, eq=False)
class ClaimedQueue:
    """A queue and how its claims go. Changed by the claimer; `breaker` also by who sees outcomes."""

    config: QueueConfig
    breaker: QueueBreaker = field(default_factory=QueueBreaker)
    backoff: Backoff = field(default_factory=lambda: Backoff(BACKOFF_FIRST_S, BACKOFF_CAP_S))
    next_at: float = 0.0
    put_off_until: float = 0.0  # a claim has failed: until then no hint counts
    is_put_off_by_guess: bool = False  # by our own back-off: the service has not said for how long
    hint_at: float | None = None  # said to have a job while a claim was in flight that may not have seen it
    active_at: float = 0.0  # when it last had a job, or was said to have one
    asked: int = 0  # places that the claim in flight has reserved; 0 if there is none
    credit: float = 0.0

    @property
    def name(self) -> str:
        return self.config.name


class Claimer:
    """Claims for one supervisor, while `may_claim()`."""

    def __init__(
        self,
        api: Service,
        pool: Pool,
        queues: Sequence[QueueConfig],
        config: ClaimConfig,
        *,
        events: Events,
        troubles: Troubles,
        gate: RateGate,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        may_claim: Callable[[], bool],
        on_claim: Callable[[Claim, int], int],
        on_refused: Callable[[CredentialsRefused], None],
    ) -> None:
        self._api = api
        self._pool = pool
        self._config = config
        self._events = events
        self._troubles = troubles
        self._may_claim = may_claim
        self._on_claim = on_claim
        self._on_refused = on_refused
        self._gate = gate
        self._spawn = spawn
        self._alarm = Alarm()
        self._in_flight: set[asyncio.Task[None]] = set()
        self.queues = {queue.name: ClaimedQueue(queue) for queue in queues}
        self._leaving: list[ClaimedQueue] = []  # not claimed from any more, but a claim is in flight
        self.last_answer_at = now()
        self.is_stream_up = False
        events.subscribe(self._on_failed, JobFailed)
        events.subscribe(self._on_recovered, ApiRecovered)

    def hint(self, queue_name: str, in_s: float = 0.0) -> None:
        """The queue may have a job in so many seconds: ask then. Spread a little, as a fleet hears it at once."""
        queue = self.queues.get(queue_name)
        if queue is not None:
            at = now() + in_s + random.uniform(0.0, HINT_SPREAD_S)
            queue.active_at = max(queue.active_at, at)
            if queue.asked:
                queue.hint_at = at if queue.hint_at is None else min(queue.hint_at, at)
            elif queue.put_off_until <= at < queue.next_at:
                queue.next_at = at
                self._alarm.ring()

    def set_queues(self, queues: Sequence[QueueConfig]) -> None:
        """Claim from these queues from now on; what is known of those that stay is kept."""
        known = self.queues
        self.queues = {queue.name: known.get(queue.name) or ClaimedQueue(queue) for queue in queues}
        gone = [queue for name, queue in known.items() if name not in self.queues]
        self._leaving = [queue for queue in (*self._leaving, *gone) if queue.asked]
        for queue in gone:
            self._troubles.forget(f"claim {queue.name}")
            self._troubles.forget(f"stream {queue.name}")
        self.wake()

    def wake(self) -> None:
        """Something changed: a place is free, or claiming is allowed again."""
        self._alarm.ring()

    def forget_pauses(self) -> None:
        """What every queue was put off for is over: the API key is accepted."""
        for queue in self.queues.values():
            queue.next_at = queue.put_off_until = 0.0
        self.wake()

    async def run(self) -> None:
        """Claim for ever."""
        while True:
            at = now()
            self._turn(at)
            await self._alarm.wait_until(self._next_at(at))

    async def finish(self) -> None:
        """Wait for the claims in flight; each has its own time limit."""
        while self._in_flight:
            await asyncio.wait(self._in_flight)

    def _turn(self, at: float) -> None:
        """Send the claims that are due."""
        for queue, limit in self._choose(at):
            queue.asked = limit
            task = self._spawn(self._claim(queue, limit), f"claim {queue.name}")
            self._in_flight.add(task)
            task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        self._alarm.ring()

    def _free_places(self) -> int:
        return self._pool.places(self._config.prefetch) - sum(
            queue.asked for queue in (*self.queues.values(), *self._leaving)
        )

    def _choose(self, at: float) -> Iterator[tuple[ClaimedQueue, int]]:
        """Which queues to ask now, and for how many; each choice counts as made before the next."""
        if not self._may_claim() or self._gate.wait_for_claim(at) > 0:
            return
        # Most turns find that all that is due is asked already; to count the places takes longer than to see that.
        while due := [q for q in self.queues.values() if not q.asked and at >= q.next_at]:
            if (free := self._free_places()) <= 0:
                return
            able = [(q, limit) for q in due if (limit := min(self._wanted(q, free, at), MAX_LIMIT)) > 0]
            if not able:
                return
            for queue, _ in able:
                queue.credit += queue.config.weight
            chosen, limit = max(able, key=lambda pair: pair[0].credit)
            chosen.credit -= sum(queue.config.weight for queue, _ in able)
            yield chosen, limit

    def _wanted(self, queue: ClaimedQueue, free: int, at: float) -> int:
        """How many more jobs of this queue there is room for, by its cap and its breaker."""
        cap = queue.config.max_procs
        held = self._held(queue) if cap is not None or queue.breaker.is_open else 0
        wanted = free if cap is None else min(free, cap - held)
        if queue.breaker.is_open:
            wanted = queue.breaker.allowed(wanted, at) if held == 0 else 0
        return wanted

    def _held(self, queue: ClaimedQueue) -> int:
        waiting = sum(run.job.queue_name == queue.name for run in self._pool.waiting)
        return waiting + self._pool.in_progress(queue.name)

    def _next_at(self, at: float) -> float:
        """The next instant at which time alone makes a claim possible; a change of places rings the alarm."""
        if not self._may_claim():
            return float("inf")
        gate_opens_at = self._gate.claims_blocked_until
        instants = (
            max(queue.next_at, gate_opens_at, queue.breaker.half_open_at if queue.breaker.is_open else 0.0)
            for queue in self.queues.values()
            if not queue.asked
        )
        when = min((i for i in instants if i > at), default=float("inf"))
        return when if when == float("inf") or self._free_places() > 0 else float("inf")

    async def _claim(self, queue: ClaimedQueue, limit: int) -> None:
        duration = int(self._config.lease_duration_s)
        operation = f"claim {queue.name}"
        try:
            claim = await self._api.claim(
                queue.name, limit=limit, lease_duration_s=duration, timeout_s=min(CLAIM_TIMEOUT_S, duration / 2)
            )
        except (ApiRefused, ApiUnavailable) as error:
            self._failed(queue, operation, error)
        else:
            queue.is_put_off_by_guess = False
            self._troubles.worked(operation)
            queue.backoff.reset()
            asked = limit if claim.asked is None else claim.asked
            self._events.emit(ClaimAnswered(queue.name, asked, len(claim.jobs) + len(claim.unreadable)))
            queue.asked = 0  # before the jobs are given out: they take the places now
            taken = self._on_claim(claim, limit)
            # Full is an answer whose jobs all run: a service that gives us what we cannot use is not asked in a loop.
            queue.next_at = now() + (0.0 if taken >= asked else self._pause(queue, taken))
            if queue.hint_at is not None:
                queue.next_at = min(queue.next_at, queue.hint_at)
        finally:
            queue.asked = 0
            queue.hint_at = None
            self.last_answer_at = now()

    def _failed(self, queue: ClaimedQueue, operation: str, error: ApiRefused | ApiUnavailable) -> None:
        """Leave the queue alone for a while."""
        if isinstance(error, ApiUnavailable):
            if error.rate_limited:
                self._gate.note(error.retry_after_s, now())
            self._put_off(queue, operation, str(error), max(queue.backoff.next_delay(), error.retry_after_s or 0.0))
            queue.is_put_off_by_guess = not error.retry_after_s
            return
        self._put_off(queue, operation, str(error), REFUSED_PAUSE_S)
        if isinstance(error, CredentialsRefused):
            self._on_refused(error)

    def _pause(self, queue: ClaimedQueue, got: int) -> float:
        """Until a queue that gave less than was asked for is asked again.

        While the event stream works, a job's arrival wakes us, and each poll only costs one of the plan's requests. So
        the pause grows with the time that the queue has been empty. A job that arrives without an event (scheduled, or
        to be tried again) is found late by as long as it was waited for, and by IDLE_CAP_S at most.
        """
        poll_s = self._config.poll_interval_s
        if got:
            queue.active_at = now()
        if not self.is_stream_up:
            return jittered(poll_s)
        empty_for_s = now() - queue.active_at
        return jittered(max(poll_s, min(empty_for_s, IDLE_CAP_S)))

    def _on_failed(self, failed: JobFailed) -> None:
        """A job of ours is to be tried again, which no event will tell: the pauses begin anew."""
        if failed.will_retry:
            self.hint(failed.queue_name, self._config.poll_interval_s)

    def _on_recovered(self, recovered: ApiRecovered) -> None:
        """The service answers again. Who only waits because it did not, waits no longer; spread, as for a fleet.

        Not so the event stream alone: it may come and go while no claim is answered.
        """
        if recovered.operation == STREAM_OPERATION:
            return
        for queue in self.queues.values():
            if queue.is_put_off_by_guess:
                queue.is_put_off_by_guess = False
                queue.put_off_until = 0.0
                queue.next_at = min(queue.next_at, now() + random.uniform(0.0, BACKOFF_FIRST_S))
                self._alarm.ring()

    def on_stream(self, is_up: bool) -> None:
        """The event stream works, or does not: then polling must do, and begins with one poll at once."""
        if is_up != self.is_stream_up:
            self.is_stream_up = is_up
            for name in self.queues:
                self.hint(name)

    def _put_off(self, queue: ClaimedQueue, operation: str, reason: str, delay_s: float) -> None:
        queue.next_at = queue.put_off_until = now() + delay_s
        self._troubles.failed(operation, reason, delay_s)
