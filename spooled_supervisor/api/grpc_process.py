"""Claims and reports over ProcessJobs streams; all else by unary calls, renewals above all.

The server answers each request of a stream in its turn and says nothing of which answer is whose: the order tells. So
what is written is remembered in that order, and a request whose caller has gone keeps its place. A slow reader or
server holds up a stream, which is why a renewal never goes through one. When a stream breaks, everything that waits on
it fails, as its requests may have been carried out, and the next request opens another one; when to try again is
decided above. One on which nothing comes any more is broken by us (STALLED_S), so is one with an answer that cannot be
meant for its request, as from there on nothing tells which is whose; one that the server is about to end gets nothing
new. One dequeue gives one job, whatever is asked for; a job that comes after its claim's time is in the next claim.

As the server works on the requests of a stream one after the other, another one is opened where many wait: one in each
WAITING_PER_STREAM, up to MAX_STREAMS. Each stream more costs some CPU, as less is read and written at once.

The streams are our own (`grpc_wire`), or grpcio's where the environment names a proxy (`grpc_library`).
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from spooled_supervisor import timing
from spooled_supervisor.api import grpc_answers, messages
from spooled_supervisor.api.grpc import (
    MAX_MESSAGE_BYTES,
    NO_MESSAGE,
    USER_AGENT,
    GrpcApi,
    JobReader,
    Received,
    claim_of,
    host_of,
    is_plain,
)
from spooled_supervisor.api.grpc_library import LibraryCall
from spooled_supervisor.api.grpc_wire import Call, CallEnd, CallOwner, DirectCall, Target
from spooled_supervisor.api.values import Claim, Settled, UnreadableJob
from spooled_supervisor.errors import ApiRefused, ApiUnavailable, ConfigError, CredentialsRefused, SupervisorError
from spooled_supervisor.events import ApiRequestFinished
from spooled_supervisor.job import Job
from spooled_supervisor.proto import spooled_pb2 as pb
from spooled_supervisor.proto.salvage import Undecodable, decoder

PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
PROCESS_JOBS = "/spooled.v1.QueueService/ProcessJobs"
NO_JOBS = "NO_JOBS"
UNAUTHENTICATED = "UNAUTHENTICATED"
CLOSED = "the stream to the service was closed"
STALLED_S = 2.0
"""A request that had so much time and got no answer tells of a stream that hangs, if nothing else was answered."""
MAX_STREAMS = 8
"""If the server takes 4 ms for a request, so many carry a thousand jobs a second."""
WAITING_PER_STREAM = 4

Response = pb.ProcessResponse | Undecodable
_decode = decoder(pb.ProcessResponse)
EXPECTED = {"claim": "job", "complete": "complete", "fail": "fail"}
"""Which kind of response answers an operation, if it is no error."""


@dataclass(slots=True, eq=False)
class Asked:
    """A request that is on its way, since `started_at` (`timing.now`); `on_late`: for an answer that nobody awaits."""

    operation: str
    request: pb.ProcessRequest
    started_at: float
    link: ProcessLink
    answered: asyncio.Future[Response]
    on_late: Callable[[Asked, Response], None] | None

    def fits(self, response: Response) -> bool:
        """Whether this may be the answer."""
        if isinstance(response, Undecodable):
            return True
        return response.WhichOneof("response") in (EXPECTED[self.operation], "error")


class ProcessLink:
    """One stream at a time, and its requests in their order (a `CallOwner`). For any number of tasks of one loop."""

    def __init__(self, open_call: Callable[[CallOwner], Call], explain: Callable[[CallEnd], Exception]) -> None:
        self._open_call = open_call
        self._explain = explain
        self._call: Call | None = None
        self._unsent: deque[Asked] = deque()
        self._waiting: deque[Asked] = deque()  # in the order of the stream
        self._heard_at = float("-inf")
        self.is_leaving = False
        """Whether the server will end the stream before long."""

    @property
    def waiting(self) -> int:
        """How many requests have no answer yet."""
        return len(self._waiting) + len(self._unsent)

    def ask(
        self,
        operation: str,
        request: pb.ProcessRequest,
        started_at: float,
        on_late: Callable[[Asked, Response], None] | None = None,
    ) -> Asked:
        """Its future will have the answer, or ApiUnavailable; when that is cancelled the request may be carried out."""
        if self._call is None:
            self._call = self._open_call(self)
        answered: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        asked = Asked(operation, request, started_at, self, answered, on_late)
        self._unsent.append(asked)
        self._call.wake()
        return asked

    def give_up(self, since: float) -> None:
        """A request that was made then had no answer in time: break the stream if there was no other answer, either."""
        if self._heard_at < since <= timing.now() - STALLED_S:
            self._break(ApiUnavailable("nothing comes on the stream any more"))

    def forget_key(self) -> None:
        """The key that the stream was opened with is refused: the next request opens one with the key of then."""
        if not self.waiting:  # else the last of those that wait will say the same
            self.close()

    def close(self) -> None:
        """End the stream; what waits fails."""
        self._break(ApiUnavailable(CLOSED))

    # --- CallOwner ----------------------------------------------------------------------------------------------------

    def next_message(self) -> bytes | None:
        while self._unsent:
            asked = self._unsent.popleft()
            if not asked.answered.done():  # else its caller has gone: a job that is not asked for is not lost
                self._waiting.append(asked)
                return asked.request.SerializeToString()
        return None

    def on_message(self, raw: bytes) -> None:
        if not self._waiting:
            self._break(ApiUnavailable("the server answers what was not asked"))
            return
        asked, response = self._waiting[0], _decode(raw)
        if not asked.fits(response):
            self._break(ApiUnavailable(f"the answer to {asked.operation} is one to something else"))
            return
        self._waiting.popleft()
        self._heard_at = timing.now()
        if not asked.answered.done():
            asked.answered.set_result(response)
        elif asked.on_late is not None:
            asked.on_late(asked, response)
        if self.is_leaving:
            self._leave_if_idle()

    def on_leaving(self) -> None:
        self.is_leaving = True
        self._leave_if_idle()

    def on_end(self, end: CallEnd) -> None:
        over = ApiUnavailable("the server has ended the stream")
        self._break(over if end.code == "OK" else _of_all(self._explain(end)))

    def _leave_if_idle(self) -> None:
        if not self.waiting:
            self.close()

    def _break(self, error: Exception) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        call.close()
        self.is_leaving = False
        for asked in (*self._waiting, *self._unsent):
            if not asked.answered.done():
                asked.answered.set_exception(error)
                asked.answered.exception()  # its caller may be gone: then nobody else looks
        self._waiting.clear()
        self._unsent.clear()


def _of_all(error: Exception) -> Exception:
    """What a stream's end means for each request that waits: it says nothing of any single one, as that of a job or of
    its result, unless it is the key that is refused."""
    is_of_one = isinstance(error, ApiRefused) and not isinstance(error, CredentialsRefused)
    return ApiUnavailable(str(error)) if is_of_one else error


def _job_in(response: Response) -> pb.Job | Undecodable | None:
    if isinstance(response, Undecodable):
        return next(iter(response.jobs()), None)
    return response.job if response.HasField("job") else None


def _expire(asked: Asked) -> None:
    if not asked.answered.done():
        asked.answered.set_exception(TimeoutError())


class GrpcProcessApi(GrpcApi):
    """`GrpcApi`, with claims, completions and failures through the stream."""

    def __init__(
        self, *, address: str, ca_file: Path | None = None, user_agent: str = USER_AGENT, **settings: Any
    ) -> None:
        super().__init__(address=address, ca_file=ca_file, user_agent=user_agent, **settings)
        self._user_agent = user_agent
        self._target = None if is_by_proxy(address) else target_of(address, ca_file)
        self._links: list[ProcessLink] = []
        self._in_a_row: dict[str, int] = {}  # by queue: jobs that came without a NO_JOBS between them
        self._late: dict[str, list[Job | UnreadableJob]] = {}  # by queue: jobs that came after their claim's time

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        for link in self._links:
            link.close()
        await super().__aexit__(exc_type, exc, traceback)

    def _link(self) -> ProcessLink:
        """The stream for the next request: the first that is not busy, else a new one, else the one that has least."""
        staying = [link for link in self._links if not link.is_leaving]
        for link in staying:
            if link.waiting < WAITING_PER_STREAM:
                return link
        if len(self._links) < MAX_STREAMS:
            self._links.append(ProcessLink(self._open, lambda end: self.stream_error("process", end)))
            return self._links[-1]
        return min(staying or self._links, key=lambda link: link.waiting)

    def _open(self, owner: CallOwner) -> Call:
        """`QueueService/ProcessJobs`, with the key of now. Raises ApiUnavailable."""
        if self._target is None:
            return LibraryCall(self._channel.stream_stream(PROCESS_JOBS)(metadata=self._metadata()), owner)
        return DirectCall(self._target, PROCESS_JOBS, (("user-agent", self._user_agent), *self._metadata()), owner)

    async def claim(self, queue_name: str, *, limit: int, lease_duration_s: int, timeout_s: float) -> Claim:
        """At first one dequeue, and after it as many at once as have given jobs in a row, up to what is wanted.

        So an empty queue costs one request, a job alone two, and a backlog soon one round trip for each claim. A job is
        handed over before the next one is asked for.
        """
        wanted = min(max(limit, 1), messages.MAX_CLAIM)
        if late := self._late.pop(queue_name, []):
            self._late[queue_name] = late[wanted:]
            return claim_of(late[:wanted], asked=len(late[:wanted]))
        request = pb.ProcessRequest(dequeue=self.dequeue_request(queue_name, lease_duration_s, 1))
        read = JobReader(queue_name, float(request.dequeue.lease_duration_secs))
        in_a_row = self._in_a_row.pop(queue_name, 0)
        count = min(wanted, max(1, in_a_row))
        found, failed = await self._dequeue(request, count, read, timing.now() + timeout_s)
        if not found and failed is not None:
            raise failed  # with jobs in hand it can wait: the next claim meets the same and says so
        if len(found) == count:
            self._in_a_row[queue_name] = min(in_a_row + count, messages.MAX_CLAIM)
        return claim_of(found, asked=count)

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
        self, request: pb.ProcessRequest, count: int, read: JobReader, deadline: float
    ) -> tuple[list[Job | UnreadableJob], SupervisorError | None]:
        """So many at once: what they gave, and the first error of those that went wrong."""
        asked: list[Asked] = []
        found: list[Job | UnreadableJob] = []
        failed: SupervisorError | None = None

        def job_of(message: Any, started_at: float) -> list[Job | UnreadableJob]:
            job = read(message, started_at)
            return [] if job is None else [job]

        def on_late(one: Asked, response: Response) -> None:
            message = _job_in(response)
            if message is not None:
                late = self._late.setdefault(request.dequeue.queue_name, [])
                late += job_of(message, one.started_at)

        try:
            try:
                while len(asked) < count:
                    asked.append(self._send("claim", request, deadline, on_late))
            except SupervisorError as error:
                failed = error
            for one in asked:
                try:
                    received = await self._receive(one, deadline)
                    if received.failure is None or received.failure.code != NO_JOBS:
                        found += job_of(self.read_done("claim", received), received.started_at)
                except SupervisorError as error:
                    failed = failed or error
        finally:
            for one in asked:
                one.answered.cancel()
        return found, failed

    async def _ask(self, operation: str, request: pb.ProcessRequest, deadline: float) -> Received:
        return await self._receive(self._send(operation, request, deadline), deadline)

    def _send(
        self,
        operation: str,
        request: pb.ProcessRequest,
        deadline: float,
        on_late: Callable[[Asked, Response], None] | None = None,
    ) -> Asked:
        started_at = timing.now()
        if started_at >= deadline:
            raise ApiUnavailable("no time was left to send the request")
        return self._link().ask(operation, request, started_at, on_late)

    async def _receive(self, asked: Asked, deadline: float) -> Received:
        """The answer. When this is cancelled, or the time is over before the request was written, it never is."""
        operation, started_at = asked.operation, asked.started_at
        status = "error"
        # A timer alone: asyncio.timeout takes 5 us more, of the 25 that all of a request takes here.
        timer = asyncio.get_running_loop().call_at(deadline, _expire, asked)
        try:
            response = await asked.answered
            if isinstance(response, Undecodable):
                if operation != "claim" or (job := _job_in(response)) is None:
                    raise ApiUnavailable(NO_MESSAGE)
                status = "200"
                return Received(job, None, started_at)
            if response.HasField("error"):
                failure = grpc_answers.facts(response.error.code, response.error.message, secret=self._secret)
                status = "200" if failure.code == NO_JOBS else str(failure.status)
                if failure.code == UNAUTHENTICATED:
                    asked.link.forget_key()
                return Received(None, failure, started_at)
            status = "200"
            return Received(getattr(response, EXPECTED[operation]), None, started_at)
        except TimeoutError as error:
            status = "timeout"
            asked.link.give_up(started_at)
            raise ApiUnavailable("no answer in time") from error
        except asyncio.CancelledError:
            status = ""
            raise
        finally:
            timer.cancel()
            if status:
                self._events.emit(ApiRequestFinished(operation, status, timing.now() - started_at))


def is_by_proxy(address: str) -> bool:
    """Whether the environment names a proxy, which grpcio goes through (grpc: doc/environment_variables.md)."""
    return not is_plain(address) and any(os.environ.get(name) for name in PROXY_VARIABLES)


def target_of(address: str, ca_file: Path | None) -> Target:
    """Where HOST:PORT is, and whom to trust there: as for REST. Raises ConfigError."""
    from spooled_supervisor.api import httpx_wire

    host, port = host_of(address), int(address.rpartition(":")[2])
    if is_plain(address):
        return Target(host, port, None, MAX_MESSAGE_BYTES)
    try:
        trust = httpx_wire.trust("https", ca_file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"CA file {str(ca_file)!r}: {error}") from error
    assert trust is not None
    trust.set_alpn_protocols(["h2"])
    return Target(host, port, trust, MAX_MESSAGE_BYTES)
