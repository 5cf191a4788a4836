"""Jobs from streams (StreamJobs): one stream for each place that is free, instead of polls.

The server pushes a job when it likes, so an open stream is a claim that waits: no more are opened than there are
places, and none is left open while nothing may be claimed. Each goes round:

    OPEN    waits for a job; its place is reserved
    TAKEN   a job came, leased some time ago: it is renewed at once, and counts from the start of that renewal
    HELD    the job is in the lease book; the next one is not taken before this one is settled, and is not sent either
            by a server that paces its streams so

Closing. The protocol has no "no more, please", only a cancellation, which crosses what the server sends. So a stream is
closed only when it must be, and what becomes of a job depends on how far it had come:

    the stream's job runs           the server sends nothing until that is settled: closed at once, nothing is lost
    none, but asked for just now    in a backlog the next job is near: waited for, and handed over like any other
    has arrived, is not taken yet   the same: the read outlives the call (`api.grpc.JobStream`)
    is leased, and still on its way when the cancellation is sent   lost to us

The last one is a round trip wide and cannot be closed: the service keeps such a job leased until the lease ends, and
that costs an attempt; a job on its last one is then dead without having run. Hence the short PUSHED_LEASE_S: the
renewal on receipt makes it a full one. To search for it, all jobs of the queue that are processed by anybody would have
to be read one by one, as lists do not say who holds them: no.

After a lease that was lost, and when an outcome cannot be delivered for a while, the stream is opened anew: for the
server its job is still out. So is one that has been silent for STALE_S: an empty queue looks no different from a stream
whose far end has died behind a proxy, and that one would keep its place without work for ever.

An older server leases jobs ahead of what is taken, and closing loses those. Once such a job is over when it is taken,
the queue is asked by Dequeue. So are several queues, always: a stream waits at one queue, and its place would stand
empty while others have jobs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Awaitable
from enum import Enum, auto
from typing import Any, Protocol, TypeVar

from spooled_supervisor.api.values import Claim, UnreadableJob
from spooled_supervisor.claiming import ClaimedQueue, Claimer
from spooled_supervisor.errors import ApiRefused, ApiUnavailable, CredentialsRefused, LeaseLost
from spooled_supervisor.events import ClaimAnswered, Event, JobLeaseLost, OutcomeDropped, OutcomeSettled
from spooled_supervisor.job import Job
from spooled_supervisor.leases import Key, LeaseBook
from spooled_supervisor.lifecycle import LeaseState
from spooled_supervisor.timing import Backoff, now

LOOK_S = 0.5
"""How often it is looked whether streams may be open: not all that forbids it rings a bell, such as a full outbox."""
STEADY_S = 1.0
"""A stream that has been open for so long, on a channel that is connected, works."""
LINGER_S = 1.0
"""So long a job may be on its way after it was asked for, on a slow line from a busy server."""
BACKLOG = 2
"""After so many jobs in a row that came within LINGER_S the next one probably does, too."""
SETTLING_PATIENCE_S = 1.0
PUSHED_LEASE_S = 10
"""What streams ask for: enough for a job to reach us and to be renewed, and soon over if it never does."""
STALE_S = 600.0
"""Seldom enough that no job is likely to be on its way just then."""
SURPLUS_S = 5.0
"""A place that is gone for a moment (its child is being replaced) keeps its stream; a job that comes waits for it."""
RENEW_TIMEOUT_S = 10.0
RENEW_RETRY_FIRST_S, RENEW_RETRY_CAP_S = 0.25, 5.0
AHEAD = "a job was over before it could be taken: the server leases jobs ahead, so they are asked for instead"

T = TypeVar("T")


class Source(Protocol):
    """A stream that has been opened (`api.grpc.JobStream`)."""

    async def next(self) -> Job | UnreadableJob:
        """The next job. Raises ApiUnavailable or ApiRefused when the stream ends. Cancel-safe."""

    def stop(self) -> None:
        """Cancel it; `next` raises ApiUnavailable then."""

    async def close(self) -> Job | UnreadableJob | None:
        """Stop it; the job that had arrived and was not taken."""

    @property
    def has_job(self) -> bool:
        """Whether a job has arrived that was not taken."""


class Streams(Protocol):
    """Where streams come from (`api.grpc.GrpcApi`)."""

    def stream(self, queue_name: str, *, lease_duration_s: int) -> Source:
        """Open one. Raises ApiUnavailable."""

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to the service now."""


class Stage(Enum):
    OPEN = auto()
    TAKEN = auto()
    HELD = auto()


@dataclasses.dataclass(slots=True, eq=False)
class Stream:
    """One stream; changed by its own task."""

    queue: ClaimedQueue
    opened_at: float
    asked_at: float  # since then the server may send a job
    patience_s: float = dataclasses.field(default_factory=lambda: STALE_S * random.uniform(0.5, 1.0))
    stage: Stage = Stage.OPEN
    key: Key | None = None  # of the job that is held
    closes_at: float | None = None  # set once, by the streamer: then it ends, unless it has a job in hand
    limit: asyncio.Timeout | None = None  # of what it waits for now, to be told of that
    source: Source | None = None
    stirred: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)  # some outcome was settled


class Streamer(Claimer):
    """A Claimer that is pushed to. Of its own it needs the streams, and the leases to see what is settled."""

    def __init__(self, streams: Streams, leases: LeaseBook, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._streams = streams
        self._leases = leases
        self._tasks: dict[Stream, asyncio.Task[None]] = {}
        self._sends_ahead = False  # a job came while the one before it was held
        self._is_leased_ahead = False
        self._is_finishing = False
        self._came_at_once = 0  # jobs in a row
        self._broke_at = float("-inf")
        self._surplus_since = float("inf")  # there have been more streams than places since then
        self._events.subscribe(self._on_settled, OutcomeSettled, OutcomeDropped, JobLeaseLost)

    def wake(self) -> None:
        """Also when claiming is over for now: an open stream is a claim, so it ends."""
        if not self._may_claim():
            self._close(*self._tasks)
        super().wake()

    async def finish(self) -> None:
        """Close all streams, and wait until what has arrived is handed over: PUSHED_LEASE_S at most."""
        self._is_finishing = True
        self._close(*self._tasks)
        while self._tasks:
            await asyncio.wait(set(self._tasks.values()))
        await super().finish()

    # --- how many -----------------------------------------------------------------------------------------------------

    def _turn(self, at: float) -> None:
        queue = self._streamed()
        self._close(*(stream for stream in self._tasks if stream.queue is not queue))
        if queue is None:
            super()._turn(at)
            return
        if not self._may_claim() or self._is_finishing:
            self._close(*self._tasks)
            return
        self._note_success(queue, at)
        self._close(*(stream for stream in self._tasks if _is_stale(stream, at)))
        self._close_spare()
        missing = self._wanted(queue, self._pool.places(self._config.prefetch), at) - sum(
            map(self._reserves, self._tasks)
        )
        self._surplus_since = min(self._surplus_since, at) if missing < 0 else float("inf")
        if missing < 0:
            is_sick = queue.breaker.is_open or self._pool.backed_off >= len(self._pool.slots)
            if is_sick or at - self._surplus_since >= SURPLUS_S:
                self._close(*[stream for stream in self._tasks if stream.stage is Stage.OPEN][missing:])
        elif at >= queue.next_at and self._gate.wait_for_claim(at) == 0:
            for _ in range(missing):
                self._open(queue, at)

    def _close_spare(self) -> None:
        """There are fewer slots now: close streams whose job runs, which is without risk, before they ask again."""
        spare = len(self._tasks) - len(self._pool.slots) * (1 + self._config.prefetch)
        if spare > 0:
            self._close(*[stream for stream in self._tasks if not self._reserves(stream)][:spare])

    def _next_at(self, at: float) -> float:
        queue = self._streamed()
        if queue is None:
            return super()._next_at(at)
        return queue.next_at if at < queue.next_at < at + LOOK_S else at + LOOK_S

    def _streamed(self) -> ClaimedQueue | None:
        """The queue that is streamed; None if queues have to be asked."""
        return next(iter(self.queues.values())) if len(self.queues) == 1 and not self._is_leased_ahead else None

    def _reserves(self, stream: Stream) -> bool:
        """Whether it keeps a place: one whose job is over is about to get the next."""
        if stream.stage is not Stage.HELD or stream.key is None:
            return True
        lease = self._leases.get(stream.key)
        return lease is None or lease.state is LeaseState.SETTLING

    def _note_success(self, queue: ClaimedQueue, at: float) -> None:
        """Nothing is said by a stream without jobs, so it is asked how long it has been there."""
        alive = (stream for stream, task in self._tasks.items() if not task.done())
        if self._streams.is_connected and any(at - stream.opened_at >= STEADY_S for stream in alive):
            self._worked(queue)

    def _worked(self, queue: ClaimedQueue) -> None:
        self._troubles.worked(f"stream {queue.name}")
        queue.backoff.reset()
        self.last_answer_at = now()

    # --- one stream ---------------------------------------------------------------------------------------------------

    def _open(self, queue: ClaimedQueue, at: float) -> None:
        stream = Stream(queue, at, at)
        task = self._tasks[stream] = self._spawn(self._serve(stream), f"stream {queue.name}")

        def gone(_: object) -> None:
            del self._tasks[stream]
            self._alarm.ring()

        task.add_done_callback(gone)

    def _close(self, *streams: Stream) -> None:
        at = now()
        for stream in streams:
            if stream.closes_at is None:
                stream.closes_at = max(at, self._may_come_until(stream, at))
                if stream.closes_at == at and stream.source is not None:
                    stream.source.stop()  # now: an outcome that is sent later must find the stream closed
                if stream.limit is not None:
                    stream.limit.reschedule(stream.closes_at)

    def _may_come_until(self, stream: Stream, at: float) -> float:
        """Until when the next job is worth waiting for."""
        if self._came_at_once < BACKLOG:
            return at
        match stream.stage:
            case Stage.OPEN:
                return stream.asked_at + LINGER_S
            case Stage.TAKEN:
                return at
            case Stage.HELD:
                return at + LINGER_S if self._reserves(stream) else at

    async def _serve(self, stream: Stream) -> None:
        queue, arrived = stream.queue, None
        lease_s = min(int(self._config.lease_duration_s), PUSHED_LEASE_S)
        try:
            source = stream.source = self._streams.stream(queue.name, lease_duration_s=lease_s)
            try:
                while await self._go_round(stream, source):
                    pass
            finally:
                arrived = await source.close()
        except (ApiRefused, ApiUnavailable) as error:
            # Several that break together are one failure, and one that we have stopped is none.
            if stream.closes_at is None and stream.opened_at > self._broke_at:
                self._broke_at = now()
                self._failed(queue, f"stream {queue.name}", error)
        if arrived is not None:
            await self._take(stream, arrived)

    async def _go_round(self, stream: Stream, source: Source) -> bool:
        """A job, from its coming until it is settled; whether there may be another one."""
        job = await self._within(stream, source.next())
        if job is None:
            return False
        self._came_at_once = self._came_at_once + 1 if now() - stream.asked_at < LINGER_S else 0
        if not await self._take(stream, job) or stream.closes_at is not None:
            return False
        if not await self._within(stream, self._settled(stream, source)):
            return False
        stream.stage, stream.key, stream.asked_at = Stage.OPEN, None, now()
        return True

    async def _within(self, stream: Stream, waiting: Awaitable[T]) -> T | None:
        """What this gives; None if the stream is to be closed before that."""
        try:
            async with asyncio.timeout_at(stream.closes_at) as stream.limit:
                return await waiting
        except TimeoutError:
            return None
        finally:
            stream.limit = None

    async def _take(self, stream: Stream, found: Job | UnreadableJob) -> bool:
        """Make sure that the job is ours and hand it over; whether to go on with the stream."""
        queue = stream.queue
        stream.stage = Stage.TAKEN
        self._worked(queue)
        if isinstance(found, UnreadableJob):
            claim = Claim((), (found,))
        elif (renewed := await self._renewed(queue, found)) is not None:
            claim, stream.key = Claim((renewed,)), renewed.key
        else:
            return False
        stream.stage = Stage.HELD
        stream.stirred.clear()
        self._events.emit(ClaimAnswered(queue.name, 1, 1))
        if self._on_claim(claim, 1):
            return True
        # What we cannot use goes back, and the next would come at once: the stream ends before that is settled.
        queue.next_at = now() + self._pause(queue, 0)
        return False

    async def _settled(self, stream: Stream, source: Source) -> bool:
        """Wait until the job is not held any more; whether it was settled, and not lost or put off."""
        assert stream.key is not None
        lease = self._leases.get(stream.key)
        while lease is not None and lease.is_live:
            if lease.state is LeaseState.HELD:
                self._sends_ahead = self._sends_ahead or source.has_job
            elif now() - lease.settling_since >= SETTLING_PATIENCE_S:
                return False
            try:
                async with asyncio.timeout(LOOK_S):
                    await stream.stirred.wait()
            except TimeoutError:
                pass  # an outcome that was given up has perhaps been told too early
            stream.stirred.clear()
        return lease is None or lease.state is LeaseState.SETTLED

    async def _renewed(self, queue: ClaimedQueue, job: Job) -> Job | None:
        """The job, counted from the start of a renewal; None if it is not ours, or if that cannot be found out."""
        operation = f"stream {queue.name}"
        backoff = Backoff(RENEW_RETRY_FIRST_S, RENEW_RETRY_CAP_S)
        over_at = now() + job.lease_duration_s
        full = dataclasses.replace(job, lease_duration_s=float(int(self._config.lease_duration_s)))
        while True:
            try:
                started_at = await self._api.renew(full, deadline=min(now() + RENEW_TIMEOUT_S, over_at))
            except LeaseLost as lost:
                if self._sends_ahead and not self._is_leased_ahead:  # else it is our own fault, as after a suspend
                    self._is_leased_ahead = True
                    self._troubles.failed(operation, AHEAD, None, is_optional=True)
                self._events.emit(JobLeaseLost(job.id, job.queue_name, lost.reason))
                return None
            except (ApiRefused, ApiUnavailable) as error:
                if isinstance(error, CredentialsRefused):
                    self._on_refused(error)
                delay = backoff.next_delay()
                if now() + delay >= over_at:
                    self._failed(queue, operation, error)
                    return None
                await asyncio.sleep(delay)
            else:
                return dataclasses.replace(full, requested_at=started_at)

    def _on_settled(self, _event: Event) -> None:
        for stream in self._tasks:
            stream.stirred.set()


def _is_stale(stream: Stream, at: float) -> bool:
    return stream.stage is Stage.OPEN and at - stream.asked_at >= stream.patience_s
