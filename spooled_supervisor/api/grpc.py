"""The worker's calls over gRPC: the same calls and values as `rest.RestApi`, and the streams that only gRPC has.

The only module that knows grpcio; it is imported when a gRPC address is used, and never by fork server or children.

address       TLS always, except for the machine itself (PLAINTEXT_HOSTS). The key goes as `x-api-key`, asked anew for
              every call.
deadline      a total one for each unary call, on our clock; streams have none.
replay        none by us or by the library: a claim must not be sent twice, and reports are repeated by who sends them.
zero values   proto3 leaves them out: `retry` of a failure is always said, durations and ids are never zero.
Struct        a result that is no object, that doubles cannot hold, or that is too large as a message, cannot be sent:
              `NotCarried`, nothing was sent.
"""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
import msgspec

from spooled_supervisor import __version__, timing
from spooled_supervisor.api import answers, grpc_answers, messages
from spooled_supervisor.api.answers import Answer, Reading
from spooled_supervisor.api.claims import DEFAULT_TIMEOUT_S, MAX_TIMEOUT_S
from spooled_supervisor.api.grpc_library import end_of
from spooled_supervisor.api.grpc_wire import CallEnd
from spooled_supervisor.api.values import Claim, HeartbeatAnswer, NotCarried, Registration, Settled, UnreadableJob
from spooled_supervisor.errors import ApiUnavailable, ConfigError, LeaseLost, ProtocolError
from spooled_supervisor.events import ApiRequestFinished, Events
from spooled_supervisor.job import Job, clip_error
from spooled_supervisor.proto import spooled_pb2 as pb
from spooled_supervisor.proto.salvage import Undecodable, decoder
from spooled_supervisor.proto.structs import carries, fill, plain

USER_AGENT = f"spooled-supervisor/{__version__}"
PLAINTEXT_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
MAX_MESSAGE_BYTES = 16 << 20
MAX_REQUEST_BYTES = (4 << 20) - 1024
"""What the service takes, with room for the rest of a stream's request; a larger one ends a stream with all on it."""
STRUCT_GROWTH = 12
"""A Struct has 11 bytes for a number of one digit and its comma, at the worst."""
KEEPALIVE_MS = 30_000
"""Only while a call is open: a stream's dead connection is noticed, and an idle one may be cut by whom it pleases."""
KEEPALIVE_TIMEOUT_MS = 10_000
RECONNECT_FIRST_MS, RECONNECT_CAP_MS = 250, 5_000
"""The library's own back-off; ours comes on top, so its one must stay the smaller."""
CONNECT_MS = 10_000
"""What an attempt to connect may take, TLS and the first SETTINGS included: several round trips. The option's name says
something else, and without it that would be 20 s (grpc: doc/connection-backoff.md, MIN_CONNECT_TIMEOUT)."""
STREAM_WINDOW_BYTES = 64 * 1024
"""What a server may push ahead of our reading: an older one would lease us as many jobs as fit in."""
NO_MESSAGE = "the answer is no message of its type"

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.initial_reconnect_backoff_ms", RECONNECT_FIRST_MS),
    ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_CAP_MS),
    ("grpc.http2.lookahead_bytes", STREAM_WINDOW_BYTES),
    ("grpc.http2.bdp_probe", 0),
)

Request = TypeVar("Request")
Response = TypeVar("Response")


@dataclass(frozen=True, slots=True)
class Received:
    """The response, or the facts of a status that is not OK; `started_at` is when the request was started."""

    message: Any
    failure: Answer | None
    started_at: float


class GrpcApi:
    """Used from one event loop, by any number of tasks, as an async context manager; made while that loop runs."""

    def __init__(
        self,
        *,
        address: str,
        api_key: Callable[[], str],
        worker_id: str,
        events: Events,
        ca_file: Path | None = None,
        user_agent: str = USER_AGENT,
    ) -> None:
        """`address` is HOST:PORT. `ca_file` replaces the library's authorities. Raises ConfigError."""
        self.base_url = address
        self._api_key = api_key
        self._worker_id = worker_id
        self._known_as = worker_id  # an old service names us itself; claims and reports go on under our own name
        self._events = events
        self._secret = ""
        self._channel = _open_channel(address, ca_file, user_agent)
        self._calls: dict[str, Any] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        """Close the channel; calls and streams that are still out fail."""
        await self._channel.close()

    def acting_as(self, worker_id: str) -> GrpcApi:
        """The same client, reporting under another id: what an earlier life has claimed under that id."""
        twin = copy.copy(self)
        twin._worker_id = worker_id
        return twin

    # --- the worker ---------------------------------------------------------------------------------------------------

    async def register(
        self,
        *,
        queue_names: Sequence[str],
        hostname: str,
        worker_type: str,
        version: str,
        max_concurrency: int,
        metadata: Mapping[str, str],
        timeout_s: float,
    ) -> Registration:
        """`WorkerService/Register`. The service knows one queue per worker; jobs may be taken from any."""
        request = pb.RegisterWorkerRequest(
            queue_name=queue_names[0],
            hostname=messages.clean_hostname(hostname),
            worker_type=answers.printable(worker_type, messages.MAX_WORD_CHARS),
            version=answers.printable(version, messages.MAX_WORD_CHARS),
            max_concurrency=min(max(max_concurrency, 1), messages.MAX_CONCURRENCY),
            metadata=_words(metadata),
            worker_id=self._worker_id,
        )
        deadline = timing.now() + timeout_s
        answer = self.read_done("register", await self._call("register", "WorkerService/Register", request, deadline))
        self._known_as = answer.worker_id or self._worker_id
        interval_s = answer.heartbeat_interval_secs or messages.DEFAULT_HEARTBEAT_S
        return Registration(
            self._known_as, float(min(max(interval_s, messages.MIN_HEARTBEAT_S), messages.MAX_HEARTBEAT_S))
        )

    async def heartbeat(
        self,
        *,
        status: str,
        current_jobs: int,
        cpu_percent: float,
        memory_percent: float,
        metadata: Mapping[str, Any] | None,
        timeout_s: float,
    ) -> HeartbeatAnswer:
        """`WorkerService/Heartbeat`. It has no fields for load, so that goes into the metadata."""
        load = {"cpu_percent": round(cpu_percent, 1), "memory_percent": round(memory_percent, 1)}
        request = pb.HeartbeatRequest(
            worker_id=self._known_as,
            current_jobs=min(max(current_jobs, 0), messages.MAX_CURRENT_JOBS),
            status=status,
            metadata=_words({**(metadata or {}), **load}),
        )
        deadline = timing.now() + timeout_s
        answer = self.read_done(
            "heartbeat", await self._call("heartbeat", "WorkerService/Heartbeat", request, deadline)
        )
        return HeartbeatAnswer(known=answer.acknowledged, should_drain=answer.should_drain)

    async def deregister(self, *, timeout_s: float) -> None:
        """`WorkerService/Deregister`; an unknown worker is an answer there."""
        request = pb.DeregisterRequest(worker_id=self._known_as)
        deadline = timing.now() + timeout_s
        self.read_done("deregister", await self._call("deregister", "WorkerService/Deregister", request, deadline))

    # --- jobs ---------------------------------------------------------------------------------------------------------

    async def claim(self, queue_name: str, *, limit: int, lease_duration_s: int, timeout_s: float) -> Claim:
        """`QueueService/Dequeue`. Never replayed; see `RestApi.claim`."""
        request = self.dequeue_request(queue_name, lease_duration_s, min(max(limit, 1), messages.MAX_CLAIM))
        received = await self._call("claim", "QueueService/Dequeue", request, timing.now() + timeout_s)
        answer = self.read_done("claim", received)
        read = JobReader(queue_name, float(request.lease_duration_secs))
        return claim_of(read(message, received.started_at) for message in _jobs_of(answer))

    async def complete(self, job: Job, result: bytes, *, tries_before: int, deadline: float) -> Settled:
        """`QueueService/Complete`. Raises NotCarried, and ProtocolError if `result` is not one JSON value."""
        request = self.complete_request(job, result)
        received = await self._call("complete", "QueueService/Complete", request, deadline)
        return self.read_settled("complete", job, received, tries_before)

    async def fail(self, job: Job, error: str, *, retryable: bool, tries_before: int, deadline: float) -> Settled:
        """`QueueService/Fail`. With `retryable=False` the service ends the job: here that is more than a hint."""
        received = await self._call("fail", "QueueService/Fail", self.fail_request(job, error, retryable), deadline)
        return self.read_settled("fail", job, received, tries_before)

    async def renew(self, job: Job, *, deadline: float) -> float:
        """`QueueService/RenewLease`: when the request was started."""
        request = pb.RenewLeaseRequest(
            job_id=job.id,
            worker_id=self._worker_id,
            extension_secs=messages.lease_seconds(job.lease_duration_s),
            lease_id=job.lease_id or "",
        )
        received = await self._call("renew", "QueueService/RenewLease", request, deadline)
        answer = self.read_done("renew", received, job_id=job.id)
        if not answer.success:  # an older service's word for a lease that it does not find
            raise LeaseLost(job.id, "the service did not renew it")
        return received.started_at

    async def progress(self, job: Job, percent: float, message: str | None, *, timeout_s: float) -> bool:
        """gRPC has no such call."""
        return False

    # --- streams ------------------------------------------------------------------------------------------------------

    def stream(self, queue_name: str, *, lease_duration_s: int) -> JobStream:
        """`QueueService/StreamJobs`: jobs as the server pushes them, until the stream is closed."""
        request = pb.StreamJobsRequest(
            queue_name=queue_name,
            worker_id=self._worker_id,
            lease_duration_secs=messages.lease_seconds(lease_duration_s),
        )
        method = self._method(self._channel.unary_stream, "QueueService/StreamJobs", pb.StreamJobsRequest, pb.Job)
        return JobStream(
            lambda: method(request, metadata=self._metadata()),
            JobReader(queue_name, float(request.lease_duration_secs)),
            lambda end: self.stream_error("stream", end),
        )

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection now."""
        return bool(self._channel.get_state() is grpc.ChannelConnectivity.READY)

    # --- requests and answers, also for ProcessJobs -------------------------------------------------------------------

    def dequeue_request(self, queue_name: str, lease_duration_s: int, batch: int) -> pb.DequeueRequest:
        return pb.DequeueRequest(
            queue_name=queue_name,
            worker_id=self._worker_id,
            lease_duration_secs=messages.lease_seconds(lease_duration_s),
            batch_size=batch,
        )

    def complete_request(self, job: Job, result: bytes) -> pb.CompleteRequest:
        try:
            value = msgspec.json.decode(result)
        except answers.MALFORMED as error:
            raise ProtocolError(f"a result is no JSON value: {error}") from error
        if not carries(value):
            raise NotCarried("gRPC carries only objects with numbers that doubles can hold")
        request = pb.CompleteRequest(job_id=job.id, worker_id=self._worker_id, lease_id=job.lease_id or "")
        fill(request.result, value)
        if len(result) > MAX_REQUEST_BYTES // STRUCT_GROWTH and request.ByteSize() > MAX_REQUEST_BYTES:
            raise NotCarried("as a message the result is larger than the service takes")
        return request

    def fail_request(self, job: Job, error: str, retryable: bool) -> pb.FailRequest:
        return pb.FailRequest(
            job_id=job.id,
            worker_id=self._worker_id,
            error=clip_error(error),
            retry=retryable,
            lease_id=job.lease_id or "",
        )

    def read_settled(self, operation: str, job: Job, received: Received, tries_before: int) -> Settled:
        failure = received.failure
        if failure is not None and _read(operation, failure, tries_before > 0) is Reading.ALREADY:
            return Settled(already=True)
        answer = self.read_done(operation, received, job_id=job.id, replay=tries_before > 0)
        if not answer.success:
            raise ApiUnavailable(f"the answer to {operation} says neither that it was done nor why not")
        return Settled(already=False, will_retry=answer.will_retry if operation == "fail" else None)

    def read_done(self, operation: str, received: Received, *, job_id: str = "", replay: bool = False) -> Any:
        """The message of a success; raises what the table says of anything else."""
        if received.failure is None:
            return received.message
        reading = _read(operation, received.failure, replay)
        raise grpc_answers.error_for(reading, received.failure, job_id=job_id)

    # --- the channel --------------------------------------------------------------------------------------------------

    async def _call(self, operation: str, method: str, request: Any, deadline: float) -> Received:
        """One unary call. Raises ApiUnavailable where there is no status of the server's or the library's."""
        started_at = timing.now()
        if started_at >= deadline:
            raise ApiUnavailable("no time was left to send the request")
        call = self._unary(method, type(request), _ANSWERS[method])
        status = "error"
        try:
            async with asyncio.timeout(deadline - started_at):
                message = await call(request, metadata=self._metadata())
            if isinstance(message, Undecodable) and not message.jobs():
                raise ApiUnavailable(NO_MESSAGE)
            status = "200"
            return Received(message, None, started_at)
        except TimeoutError as error:
            status = "timeout"
            raise ApiUnavailable("no answer in time") from error
        except grpc.aio.AioRpcError as error:
            failure = self._facts(end_of(error))
            status = str(failure.status)
            return Received(None, failure, started_at)
        except grpc.aio.UsageError as error:  # the channel is closed
            raise ApiUnavailable(str(error)) from error
        except asyncio.CancelledError:
            status = ""
            raise
        finally:
            if status:
                self._events.emit(ApiRequestFinished(operation, status, timing.now() - started_at))

    def _unary(self, method: str, request: type[Any], response: type[Any]) -> Any:
        return self._method(self._channel.unary_unary, method, request, response)

    def _method(self, kind: Callable[..., Any], method: str, request: type[Any], response: type[Any]) -> Any:
        if method not in self._calls:
            self._calls[method] = kind(
                f"/spooled.v1.{method}",
                request_serializer=request.SerializeToString,
                response_deserializer=decoder(response),
            )
        return self._calls[method]

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        try:
            key = self._api_key().strip()
        except OSError as error:
            raise ApiUnavailable(f"the API key cannot be read: {error}") from error
        if not (key.isascii() and key.isprintable() and key):
            raise ApiUnavailable("the API key is empty, or has characters that no header can carry")
        self._secret = key
        return (("x-api-key", key),)

    def _facts(self, end: CallEnd) -> Answer:
        return grpc_answers.facts(end.code, end.details, retry_after=end.retry_after, secret=self._secret)

    def stream_error(self, operation: str, end: CallEnd) -> Exception:
        """What a stream ends with; each that ends in time is counted as a request."""
        failure = self._facts(end)
        self._events.emit(ApiRequestFinished(operation, str(failure.status), 0.0))
        return grpc_answers.error_for(_read(operation, failure, False), failure)


class JobStream:
    """One call of StreamJobs, begun at once. A read is always on its way, so that what arrives is not in the library.

    Thus what has arrived can be had when the call is ended, of which the library would make nothing. A job's lease has
    begun at some time before its receipt, which is `requested_at`.
    """

    def __init__(
        self,
        open_call: Callable[[], Any],
        read_job: JobReader,
        explain: Callable[[CallEnd], Exception],
    ) -> None:
        """Raises ApiUnavailable if it cannot even be begun."""
        self._read_job = read_job
        self._explain = explain
        try:
            self._call = open_call()
        except grpc.aio.UsageError as error:  # the channel is closed
            raise ApiUnavailable(str(error)) from error
        self._reading = asyncio.create_task(self._read(), name="read a job")

    async def next(self) -> Job | UnreadableJob:
        """The next job. Raises ApiUnavailable or ApiRefused when the stream ends. Cancel-safe: the read goes on."""
        await asyncio.wait({self._reading})
        if self._reading.cancelled():  # what the library makes of a status CANCELLED, also of somebody else's
            raise ApiUnavailable("the stream was cancelled on its way")
        job = self._reading.result()
        self._reading = asyncio.create_task(self._read(), name="read a job")
        return job

    def stop(self) -> None:
        """Cancel the call; nothing that is sent later gets to the server before that."""
        self._call.cancel()

    async def close(self) -> Job | UnreadableJob | None:
        """Stop; the job that had arrived before and was not taken, if there is one."""
        self.stop()
        await asyncio.wait({self._reading})
        return self._reading.result() if self.has_job else None

    @property
    def has_job(self) -> bool:
        """Whether a job has arrived that was not taken."""
        reading = self._reading
        return reading.done() and not reading.cancelled() and reading.exception() is None

    async def _read(self) -> Job | UnreadableJob:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                if (job := self._read_job(message, timing.now())) is not None:
                    return job
                if isinstance(message, Undecodable):
                    raise ApiUnavailable(NO_MESSAGE)
        except grpc.aio.AioRpcError as error:
            raise self._explain(end_of(error)) from error
        except grpc.aio.UsageError as error:  # the channel is closed
            raise ApiUnavailable(str(error)) from error
        raise ApiUnavailable("the server has ended the stream")


class JobReader:
    """Messages as jobs of one queue. A message without an id is nothing that could be named: None.

    One that cannot be decoded is a job to be failed by name.
    """

    def __init__(self, queue_name: str, lease_duration_s: float) -> None:
        self._queue_name = queue_name
        self._lease_duration_s = lease_duration_s

    def __call__(self, message: pb.Job | Undecodable, requested_at: float) -> Job | UnreadableJob | None:
        if not isinstance(message, Undecodable):
            return self._job(message, requested_at)
        job = self._job(message.head(), requested_at)
        return None if job is None else UnreadableJob(job, "gRPC cannot carry it; a payload may be nested too deeply")

    def _job(self, message: pb.Job, requested_at: float) -> Job | None:
        if not message.id:
            return None
        timeout_s = float(message.timeout_seconds) if message.timeout_seconds > 0 else DEFAULT_TIMEOUT_S
        return Job(
            id=message.id,
            queue_name=message.queue_name or self._queue_name,
            lease_id=message.lease_id or None,
            payload=msgspec.json.encode(plain(message.payload)),
            retry_count=max(message.retry_count, 0),
            max_retries=max(message.max_retries, 0),
            timeout_s=min(timeout_s, MAX_TIMEOUT_S),
            lease_duration_s=self._lease_duration_s,
            requested_at=requested_at,
        )


def claim_of(found: Iterable[Job | UnreadableJob | None], *, asked: int | None = None) -> Claim:
    """Each job once."""
    known = {(one.job if isinstance(one, UnreadableJob) else one).id: one for one in found if one is not None}
    jobs = tuple(one for one in known.values() if isinstance(one, Job))
    return Claim(jobs, tuple(one for one in known.values() if isinstance(one, UnreadableJob)), asked)


def _jobs_of(answer: pb.DequeueResponse | Undecodable) -> Iterable[pb.Job | Undecodable]:
    return answer.jobs() if isinstance(answer, Undecodable) else answer.jobs


_ANSWERS: dict[str, type[Any]] = {
    "WorkerService/Register": pb.RegisterWorkerResponse,
    "WorkerService/Heartbeat": pb.HeartbeatResponse,
    "WorkerService/Deregister": pb.DeregisterResponse,
    "QueueService/Dequeue": pb.DequeueResponse,
    "QueueService/Complete": pb.CompleteResponse,
    "QueueService/Fail": pb.FailResponse,
    "QueueService/RenewLease": pb.RenewLeaseResponse,
}


def _read(operation: str, failure: Answer, replay: bool) -> Reading:
    return answers.read(operation, failure, replay=replay)


def _words(values: Mapping[str, Any]) -> dict[str, str]:
    """Metadata is text only here; what is none is written as JSON, and what is too much is left out."""
    words = {
        key: value if isinstance(value, str) else msgspec.json.encode(value).decode() for key, value in values.items()
    }
    return words if len(msgspec.json.encode(words)) <= messages.MAX_METADATA_BYTES else {}


def host_of(address: str) -> str:
    """`[::1]:443` is at `::1`."""
    return address.rpartition(":")[0].strip("[]").lower()


def is_plain(address: str) -> bool:
    """Whether the way there needs no TLS."""
    return host_of(address) in PLAINTEXT_HOSTS


def _open_channel(address: str, ca_file: Path | None, user_agent: str) -> grpc.aio.Channel:
    options = (*OPTIONS, ("grpc.primary_user_agent", user_agent))
    if is_plain(address):
        return grpc.aio.insecure_channel(address, options=(*options, ("grpc.enable_http_proxy", 0)))
    named = str(ca_file) if ca_file is not None else os.environ.get("SSL_CERT_FILE")
    try:
        roots = Path(named).read_bytes() if named else None
    except OSError as error:
        raise ConfigError(f"CA file {named!r}: {error.strerror}") from error
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(roots), options=options)
