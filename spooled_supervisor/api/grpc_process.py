"""Claims and reports over ProcessJobs streams; all else by unary calls, renewals above all.

The server answers each request of a stream in its turn and says nothing of which answer is whose: the order tells. So
what is written is remembered in that order, and a request whose caller has gone keeps its place. A slow reader or
server holds up a stream, which is why a renewal never goes through one. When a stream breaks, everything that waits on
it fails, as its requests may have been carried out, and the next request opens another one; when to try again is
decided above. One on which nothing comes any more is broken by us (STALLED_S). One dequeue gives one job, whatever is
asked for.

As the server works on the requests of a stream one after the other, another one is opened where many wait: one in each
WAITING_PER_STREAM, up to MAX_STREAMS. Each stream more costs some CPU, as less is read and written at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from spooled_supervisor import timing
from spooled_supervisor.api import grpc_answers, messages
from spooled_supervisor.api.grpc import NO_MESSAGE, GrpcApi, JobReader, Received, claim_of
from spooled_supervisor.api.values import Claim, Settled, UnreadableJob
from spooled_supervisor.errors import ApiRefused, ApiUnavailable, CredentialsRefused
from spooled_supervisor.events import ApiRequestFinished, Events
from spooled_supervisor.job import Job
from spooled_supervisor.proto import spooled_pb2 as pb
from spooled_supervisor.proto.salvage import Undecodable

NO_JOBS = "NO_JOBS"
UNAUTHENTICATED = "UNAUTHENTICATED"
CLOSED = "the stream to the service was closed"
STALLED_S = 2.0
"""A request that had so much time and got no answer tells of a stream that hangs, if nothing else was answered."""
MAX_STREAMS = 8
"""If the server takes 4 ms for a request, so many carry a thousand jobs a second."""
WAITING_PER_STREAM = 4

Answered = asyncio.Future[pb.ProcessResponse | Undecodable]


class ProcessLink:
    """One stream at a time. `ask` may be used by any number of tasks of one loop."""

    def __init__(self, open_call: Callable[[], Any], explain: Callable[[grpc.aio.AioRpcError], Exception]) -> None:
        self._open_call = open_call
        self._explain = explain
        self._call: Any = None
        self._outgoing: asyncio.Queue[tuple[pb.ProcessRequest, Answered]] = asyncio.Queue()
        self._waiting: deque[Answered] = deque()  # the writer appends, the reader takes: in the order of the stream
        self._tasks: list[asyncio.Task[None]] = []
        self._heard_at = float("-inf")

    @property
    def waiting(self) -> int:
        """How many requests have no answer yet."""
        return len(self._waiting) + self._outgoing.qsize()

    async def ask(self, request: pb.ProcessRequest) -> pb.ProcessResponse | Undecodable:
        """Raises ApiUnavailable. When cancelled the request may be carried out; its answer is then dropped."""
        self._ensure_open()
        answered: Answered = asyncio.get_running_loop().create_future()
        self._outgoing.put_nowait((request, answered))
        return await answered

    def give_up(self, since: float) -> None:
        """A request that was made then had no answer in time: break the stream if there was no other answer, either."""
        if self._heard_at < since <= timing.now() - STALLED_S:
            self._break(ApiUnavailable("nothing comes on the stream any more"))

    def forget_key(self) -> None:
        """The key that the stream was opened with is refused: the next request opens one with the key of then."""
        if not self.waiting:  # else the last of those that wait will say the same
            self._break(ApiUnavailable(CLOSED))

    async def close(self) -> None:
        """End the stream; what waits fails."""
        self._break(ApiUnavailable(CLOSED))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    def _ensure_open(self) -> None:
        if self._call is None:
            self._tasks = [task for task in self._tasks if not task.done()]
            call = self._call = self._open_call()
            self._outgoing = asyncio.Queue()
            self._waiting = deque()
            self._tasks += [
                asyncio.create_task(self._write(call, self._outgoing, self._waiting), name="write to the stream"),
                asyncio.create_task(self._read(call, self._waiting), name="read from the stream"),
            ]

    async def _write(
        self, call: Any, outgoing: asyncio.Queue[tuple[pb.ProcessRequest, Answered]], waiting: deque[Answered]
    ) -> None:
        """A writer of its own: a caller whose time is over must not break off a write, which would end the stream."""
        try:
            while True:
                request, answered = await outgoing.get()
                if not answered.done():
                    waiting.append(answered)
                    await call.write(request)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            return  # the reader hears of it too, and says why

    async def _read(self, call: Any, waiting: deque[Answered]) -> None:
        error: Exception = ApiUnavailable("the server has ended the stream")
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                if not waiting:
                    error = ApiUnavailable("the server answers what was not asked")
                    break
                self._heard_at = timing.now()
                answered = waiting.popleft()
                if not answered.done():
                    answered.set_result(response)
            else:
                if await call.code() is not grpc.StatusCode.OK:
                    error = self._explain(await _error_of(call))
        except grpc.aio.AioRpcError as broken:
            error = self._explain(broken)
        except (grpc.aio.UsageError, asyncio.InvalidStateError) as broken:
            error = ApiUnavailable(str(broken))
        finally:
            if self._call is call:
                self._break(_of_all(error))

    def _break(self, error: Exception) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        call.cancel()
        unsent = [self._outgoing.get_nowait()[1] for _ in range(self._outgoing.qsize())]
        for answered in (*self._waiting, *unsent):
            if not answered.done():
                answered.set_exception(error)
                answered.exception()  # its caller may be gone: then nobody else looks
        self._waiting.clear()
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()


def _of_all(error: Exception) -> Exception:
    """What a stream's end means for each request that waits: it says nothing of any single one, as that of a job or of
    its result, unless it is the key that is refused."""
    is_of_one = isinstance(error, ApiRefused) and not isinstance(error, CredentialsRefused)
    return ApiUnavailable(str(error)) if is_of_one else error


async def _error_of(call: Any) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), details=await call.details()
    )


class GrpcProcessApi(GrpcApi):
    """`GrpcApi`, with claims, completions and failures through the stream."""

    def __init__(self, *, events: Events, **settings: Any) -> None:
        super().__init__(events=events, **settings)
        self._links: list[ProcessLink] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            for link in self._links:
                await link.close()
        await super().__aexit__(exc_type, exc, traceback)

    def _link(self) -> ProcessLink:
        """The stream for the next request: the first that is not busy, else a new one, else the one that has least."""
        for link in self._links:
            if link.waiting < WAITING_PER_STREAM:
                return link
        if len(self._links) < MAX_STREAMS:
            self._links.append(ProcessLink(self.open_process, lambda error: self.stream_error("process", error)))
            return self._links[-1]
        return min(self._links, key=lambda link: link.waiting)

    async def claim(self, queue_name: str, *, limit: int, lease_duration_s: int, timeout_s: float) -> Claim:
        """One dequeue, and if that gave a job as many more at once as are wanted: an empty queue costs one request."""
        request = pb.ProcessRequest(dequeue=self.dequeue_request(queue_name, lease_duration_s, 1))
        read = JobReader(queue_name, float(request.dequeue.lease_duration_secs))
        deadline = timing.now() + timeout_s
        first = await self._dequeue(request, read, deadline)
        if first is None:
            return Claim()
        more = min(limit, messages.MAX_CLAIM) - 1
        answers = await asyncio.gather(
            *(self._dequeue(request, read, deadline) for _ in range(more)), return_exceptions=True
        )
        # What went wrong with one of these will go wrong again with the next claim, which then says so.
        return claim_of((first, *(one for one in answers if not isinstance(one, BaseException))))

    async def complete(self, job: Job, result: bytes, *, tries_before: int, deadline: float) -> Settled:
        """As `GrpcApi.complete`; a repetition is a unary call, as only a status tells that the first one had landed."""
        if tries_before:
            return await super().complete(job, result, tries_before=tries_before, deadline=deadline)
        request = pb.ProcessRequest(complete=self.complete_request(job, result))
        received = await self._ask("complete", request, deadline)
        return self.read_settled("complete", job, received, tries_before)

    async def fail(self, job: Job, error: str, *, retryable: bool, tries_before: int, deadline: float) -> Settled:
        """As `GrpcApi.fail`; repeated like a completion."""
        if tries_before:
            return await super().fail(job, error, retryable=retryable, tries_before=tries_before, deadline=deadline)
        request = pb.ProcessRequest(fail=self.fail_request(job, error, retryable))
        received = await self._ask("fail", request, deadline)
        return self.read_settled("fail", job, received, tries_before)

    async def _dequeue(
        self, request: pb.ProcessRequest, read: JobReader, deadline: float
    ) -> Job | UnreadableJob | None:
        received = await self._ask("claim", request, deadline)
        if received.failure is not None and received.failure.code == NO_JOBS:
            return None
        return read(self.read_done("claim", received), received.started_at)

    async def _ask(self, operation: str, request: pb.ProcessRequest, deadline: float) -> Received:
        started_at = timing.now()
        status = "error"
        link = self._link()
        try:
            async with asyncio.timeout(max(0.0, deadline - started_at)):
                response = await link.ask(request)
            if isinstance(response, Undecodable):
                if operation != "claim" or not (jobs := response.jobs()):
                    raise ApiUnavailable(NO_MESSAGE)
                status = "200"
                return Received(jobs[0], None, started_at)
            kind = response.WhichOneof("response")
            if kind == "error":
                failure = grpc_answers.facts(response.error.code, response.error.message, secret=self._secret)
                status = "200" if failure.code == NO_JOBS else str(failure.status)
                if failure.code == UNAUTHENTICATED:
                    link.forget_key()
                return Received(None, failure, started_at)
            if kind != _EXPECTED[operation]:
                raise ApiUnavailable(f"the answer to {operation} is one to something else")
            status = "200"
            return Received(getattr(response, kind), None, started_at)
        except TimeoutError as error:
            status = "timeout"
            link.give_up(started_at)
            raise ApiUnavailable("no answer in time") from error
        except asyncio.CancelledError:
            status = ""
            raise
        finally:
            if status:
                self._events.emit(ApiRequestFinished(operation, status, timing.now() - started_at))


_EXPECTED = {"claim": "job", "complete": "complete", "fail": "fail"}
