"""Jobs from streams (StreamJobs): one stream for each place that is free, instead of polls.

The server pushes a job when it likes, so an open stream is a claim that waits: no more are opened than there are
places, and none is left open while nothing may be claimed. Each goes round:

    OPEN    waits for a job; its place is reserved
    TAKEN   a job came, leased some time ago: it is renewed at once, and counts from the start of that renewal
    HELD    the job is in the lease book; the next one is not read before this one is settled, and is not sent either by
            a server that paces its streams so

Closing a stream may lose a job that is just on its way: it stays leased until its lease ends, as the service has no
way to take it back. Therefore a stream is closed only when it must be. An older server leases jobs ahead of what is
read. One that is over when it is read has told so, and from then on the queue is asked by Dequeue. So are several
queues, always: a stream waits at one queue, and its place would stand empty while others have jobs.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing
from enum import Enum, auto
from typing import Any, Protocol

from spooled_supervisor.api.values import Claim
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
SURPLUS_S = 5.0
"""A place that is gone for a moment (its child is being replaced) keeps its stream; a job that comes waits for it."""
RENEW_TIMEOUT_S = 10.0
RENEW_RETRY_FIRST_S, RENEW_RETRY_CAP_S = 0.25, 5.0
AHEAD = "a job was over before it could be read: the server leases jobs ahead, so they are asked for instead"


class Streams(Protocol):
    """Where streams come from (`api.grpc.GrpcApi`)."""

    def stream(self, queue_name: str, *, lease_duration_s: int) -> AsyncGenerator[Job, None]:
        """Jobs as they are pushed. Raises ApiUnavailable or ApiRefused when it ends."""

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
    stage: Stage = Stage.OPEN
    key: Key | None = None  # of the job that is held
    stirred: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)  # some outcome was settled


class Streamer(Claimer):
    """A Claimer that is pushed to. Of its own it needs the streams, and the leases to see what is settled."""

    def __init__(self, streams: Streams, leases: LeaseBook, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._streams = streams
        self._leases = leases
        self._tasks: dict[Stream, asyncio.Task[None]] = {}
        self._is_leased_ahead = False
        self._is_finishing = False
        self._surplus_since = float("inf")  # there have been more streams than places since then
        self._events.subscribe(self._on_settled, OutcomeSettled, OutcomeDropped, JobLeaseLost)

    def wake(self) -> None:
        """Also when claiming is over for now: an open stream is a claim, so it ends at once."""
        if not self._may_claim():
            self._close(*self._tasks)
        super().wake()

    async def finish(self) -> None:
        """Close all streams, but for those whose job is being renewed: that is handed over first."""
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
        missing = self._wanted(queue, self._pool.places(self._config.prefetch), at) - sum(
            map(self._reserves, self._tasks)
        )
        self._surplus_since = min(self._surplus_since, at) if missing < 0 else float("inf")
        if missing < 0:
            if queue.breaker.is_open or at - self._surplus_since >= SURPLUS_S:
                self._close(*[stream for stream in self._tasks if stream.stage is Stage.OPEN][missing:])
        elif at >= queue.next_at and self._gate.wait_for_claim(at) == 0:
            for _ in range(missing):
                self._open(queue, at)

    def _next_at(self, at: float) -> float:
        return super()._next_at(at) if self._streamed() is None else at + LOOK_S

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
        stream = Stream(queue, at)
        task = self._tasks[stream] = self._spawn(self._serve(stream), f"stream {queue.name}")

        def gone(_: object) -> None:
            del self._tasks[stream]
            self._alarm.ring()

        task.add_done_callback(gone)

    def _close(self, *streams: Stream) -> None:
        """A job that is held is no matter of its stream any more; one that is being renewed still is."""
        for stream in streams:
            if stream.stage is not Stage.TAKEN:
                self._tasks[stream].cancel()

    async def _serve(self, stream: Stream) -> None:
        queue = stream.queue
        lease_s = int(self._config.lease_duration_s)
        try:
            async with aclosing(self._streams.stream(queue.name, lease_duration_s=lease_s)) as jobs:
                async for job in jobs:
                    stream.stage = Stage.TAKEN
                    self._worked(queue)
                    if not await self._take(stream, job) or self._is_finishing:
                        return
                    stream.stage, stream.key = Stage.OPEN, None
        except (ApiRefused, ApiUnavailable) as error:
            self._failed(queue, f"stream {queue.name}", error)

    async def _take(self, stream: Stream, job: Job) -> bool:
        """Make sure that the job is ours, hand it over, and wait until it is settled; whether to read on then."""
        queue = stream.queue
        renewed = await self._renewed(queue, job)
        if renewed is None:
            return not self._is_leased_ahead
        stream.stage, stream.key = Stage.HELD, renewed.key
        stream.stirred.clear()
        self._events.emit(ClaimAnswered(queue.name, 1, 1))
        if not self._on_claim(Claim((renewed,)), 1):
            # What we cannot use goes back, and the next would come at once: the stream ends before that is settled.
            queue.next_at = now() + self._pause(queue, 0)
            return False
        while renewed.key in self._leases and not self._is_finishing:
            try:
                async with asyncio.timeout(LOOK_S):
                    await stream.stirred.wait()
            except TimeoutError:
                pass  # an outcome that was given up has perhaps been told too early
            stream.stirred.clear()
        return True

    async def _renewed(self, queue: ClaimedQueue, job: Job) -> Job | None:
        """The job, counted from the start of a renewal; None if it is not ours, or if that cannot be found out."""
        backoff = Backoff(RENEW_RETRY_FIRST_S, RENEW_RETRY_CAP_S)
        over_at = now() + job.lease_duration_s
        while True:
            try:
                started_at = await self._api.renew(job, deadline=min(now() + RENEW_TIMEOUT_S, over_at))
            except LeaseLost as lost:
                self._is_leased_ahead = True
                self._troubles.failed(f"stream {queue.name}", AHEAD, None)
                self._events.emit(JobLeaseLost(job.id, job.queue_name, lost.reason))
                return None
            except (ApiRefused, ApiUnavailable) as error:
                if isinstance(error, CredentialsRefused):
                    self._on_refused(error)
                delay = backoff.next_delay()
                if now() + delay >= over_at or not self._may_claim():
                    self._troubles.failed(f"stream {queue.name}", str(error), None)
                    return None
                await asyncio.sleep(delay)
            else:
                return dataclasses.replace(job, requested_at=started_at)

    def _on_settled(self, _event: Event) -> None:
        for stream in self._tasks:
            stream.stirred.set()
