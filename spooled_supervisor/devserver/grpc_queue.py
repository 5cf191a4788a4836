"""`spooled.v1.QueueService`: jobs over gRPC, out of the same store as REST.

Owns the rules that differ from REST: zero and empty fields, a lease of 300 s unless one is asked for, `retry` of a
failure, and no events. StreamJobs hands out one job at a time and the next when that one is settled, given back or
taken back; with `eager_streams` it pushes EAGER_DEPTH jobs ahead of what is read, as older servers do. ProcessJobs
answers each request in its turn, and refuses in band.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec

from spooled_supervisor.devserver import grpc_values as values
from spooled_supervisor.devserver.database import DatabaseFault
from spooled_supervisor.devserver.errors import ApiError
from spooled_supervisor.devserver.jobs import NewJob
from spooled_supervisor.devserver.leases import Holder, Lease, backoff_s
from spooled_supervisor.devserver.routes_job import MAX_RETRIES, MAX_TIMEOUT_S
from spooled_supervisor.devserver.services import Services
from spooled_supervisor.devserver.validation import MAX_METADATA_BYTES, MAX_TEXT
from spooled_supervisor.proto import spooled_pb2 as pb

EAGER_DEPTH = 16
MAX_STREAMS = 100
MAX_BATCH = 100
HEAD_BYTES = 8
"""More than the field number and the length before each job of a response."""
MAX_PRIORITY = 100
MAX_ERROR_BYTES = 4096
CUT_MARK = b"..."


class QueueService:
    """The calls without their connections: each takes a request and returns a response, or raises ApiError."""

    def __init__(self, services: Services) -> None:
        self._config = services.config
        self._clock = services.clock
        self._db = services.db
        self._jobs = services.jobs
        self._leases = services.leases
        self._listing = services.listing
        self._queues = services.queues
        self._bell = services.bell
        self._streams = 0

    def enqueue(self, request: pb.EnqueueRequest) -> pb.EnqueueResponse:
        if not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
            raise values.refused(f"priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}")
        if not 0 <= request.max_retries <= MAX_RETRIES:
            raise values.refused(f"max_retries must be between 0 and {MAX_RETRIES}")
        if not 0 <= request.timeout_seconds <= MAX_TIMEOUT_S:
            raise values.refused(f"timeout_seconds must be between 0 and {MAX_TIMEOUT_S}")
        if len(request.idempotency_key) > MAX_TEXT:
            raise values.refused(f"idempotency_key must have at most {MAX_TEXT} characters")
        tags = msgspec.json.encode(dict(request.tags)) if request.tags else None
        if tags is not None and len(tags) > MAX_METADATA_BYTES:
            raise values.refused(f"tags must be at most {MAX_METADATA_BYTES} bytes of JSON")
        payload = values.json_of(request.payload, "payload")
        job_type = request.payload.fields["job_type"].string_value if "job_type" in request.payload.fields else ""
        new = NewJob(
            queue_name=values.queue_name(request.queue_name),
            payload=payload,
            job_type=job_type,
            priority=request.priority,
            max_retries=request.max_retries or None,
            timeout_seconds=request.timeout_seconds or None,
            scheduled_at=values.instant(request.scheduled_at, "scheduled_at"),
            idempotency_key=request.idempotency_key or None,
            tags=tags,
        )
        job_id, is_new = self._jobs.create(new, self._clock())
        return pb.EnqueueResponse(job_id=job_id, created=is_new)

    def dequeue(self, request: pb.DequeueRequest) -> pb.DequeueResponse:
        """As many jobs as were asked for and one message holds; the others wait for the next call."""
        response = pb.DequeueResponse()
        room = values.MAX_MESSAGE_BYTES

        def put(lease: Lease) -> bool:
            nonlocal room
            job = response.jobs.add()
            values.fill_leased(job, lease, request.worker_id)
            room -= job.ByteSize() + HEAD_BYTES
            if room < 0:
                del response.jobs[-1]
            return room >= 0

        batch = min(max(request.batch_size, 1), MAX_BATCH)
        self._claim(request.queue_name, request.worker_id, request.lease_duration_secs, batch, put)
        return response

    def complete(self, request: pb.CompleteRequest) -> pb.CompleteResponse:
        result = values.json_of(request.result, "result") if request.HasField("result") else b"null"
        self._leases.complete(request.job_id, _holder(request), result, self._clock())
        return pb.CompleteResponse(success=True)

    def fail(self, request: pb.FailRequest) -> pb.FailResponse:
        may_retry = request.retry if request.HasField("retry") else True
        failure = self._leases.fail(request.job_id, _holder(request), _cut(request.error), may_retry, self._clock())
        delay_s = backoff_s(failure.retry_count - 1, self._config.retry_base_s) if failure.will_retry else 0.0
        return pb.FailResponse(success=True, will_retry=failure.will_retry, next_retry_delay_secs=int(delay_s))

    def renew(self, request: pb.RenewLeaseRequest) -> pb.RenewLeaseResponse:
        duration_s = values.lease_s(request.extension_secs, self._config.min_lease_s)
        expires_at = self._leases.renew(request.job_id, _holder(request), duration_s, self._clock())
        return pb.RenewLeaseResponse(success=True, new_expires_at=values.stamp(expires_at))

    def get_job(self, request: pb.GetJobRequest) -> pb.GetJobResponse:
        response = pb.GetJobResponse()
        values.fill_job(response.job, self._jobs.get(values.name(request.job_id, "job_id")))
        return response

    def get_stats(self, request: pb.GetQueueStatsRequest) -> pb.GetQueueStatsResponse:
        queue_name = values.queue_name(request.queue_name)
        counts = self._listing.counts(queue_name)
        age_s = self._queues.stats(queue_name, self._clock())["max_job_age_seconds"]
        names = ("pending", "scheduled", "processing", "completed", "failed", "deadletter", "total")
        return pb.GetQueueStatsResponse(
            queue_name=queue_name, max_age_ms=1000 * (age_s or 0), **{name: counts[name] for name in names}
        )

    # --- streams ------------------------------------------------------------------------------------------------------

    async def stream(self, request: pb.StreamJobsRequest) -> AsyncIterator[pb.Job]:
        """Jobs for as long as somebody listens. A job that is leased but not delivered stays leased."""
        values.queue_name(request.queue_name)
        values.name(request.worker_id, "worker_id")
        if self._streams >= MAX_STREAMS:
            raise ApiError(429, f"More than {MAX_STREAMS} job streams: limit reached")
        self._streams += 1
        try:
            async for job in self._pushed(request) if self._config.eager_streams else self._paced(request):
                yield job
        finally:
            self._streams -= 1

    async def process(self, requests: AsyncIterator[pb.ProcessRequest]) -> AsyncIterator[pb.ProcessResponse]:
        """One response for each request, in order."""
        async for request in requests:
            yield self._answer(request)

    async def _paced(self, request: pb.StreamJobsRequest) -> AsyncIterator[pb.Job]:
        while True:
            lease = await self._next(request)
            yield self._job(lease, request.worker_id)
            while self._is_out(lease):
                await self._bell.wait(self._config.stream_poll_s)

    async def _pushed(self, request: pb.StreamJobsRequest) -> AsyncIterator[pb.Job]:
        ahead: asyncio.Queue[pb.Job | Exception] = asyncio.Queue(EAGER_DEPTH)

        async def pump() -> None:
            try:
                while True:
                    lease = await self._next(request)
                    await ahead.put(self._job(lease, request.worker_id))
            except Exception as error:  # told by who reads the stream: nobody awaits this task
                await ahead.put(error)

        pumping = asyncio.ensure_future(pump())
        try:
            while not isinstance(job := await ahead.get(), Exception):
                yield job
            raise job
        finally:
            pumping.cancel()

    async def _next(self, request: pb.StreamJobsRequest) -> Lease:
        while True:
            leases = self._claim(request.queue_name, request.worker_id, request.lease_duration_secs, 1)
            if leases:
                return leases[0]
            await self._bell.wait(self._config.stream_poll_s)

    def _is_out(self, lease: Lease) -> bool:
        """Whether the job is still processed under this lease."""
        sql = "SELECT 1 FROM jobs WHERE id = ? AND status = 'processing' AND lease_id = ?"
        return self._db.value(sql, (lease.row["id"], lease.lease_id)) is not None

    def _answer(self, request: pb.ProcessRequest) -> pb.ProcessResponse:
        try:
            match request.WhichOneof("request"):
                case "dequeue":
                    asked = request.dequeue
                    leases = self._claim(asked.queue_name, asked.worker_id, asked.lease_duration_secs, 1)
                    if leases:
                        response = pb.ProcessResponse()
                        values.fill_leased(response.job, leases[0], asked.worker_id)
                        return response
                    error = pb.ErrorResponse(code="NO_JOBS", message="No jobs available")
                case "complete":
                    return pb.ProcessResponse(complete=self.complete(request.complete))
                case "fail":
                    return pb.ProcessResponse(fail=self.fail(request.fail))
                case "renew_lease":
                    return pb.ProcessResponse(renew_lease=self.renew(request.renew_lease))
                case _:
                    error = pb.ErrorResponse(code="INVALID_REQUEST", message="The request is empty")
        except ApiError as refusal:
            error = values.in_band(refusal)
        except DatabaseFault:
            error = pb.ErrorResponse(code="INTERNAL", message="An internal error occurred")
        return pb.ProcessResponse(error=error)

    # --- shared -------------------------------------------------------------------------------------------------------

    def _claim(
        self, queue_name: str, worker_id: str, asked_s: int, batch: int, fits: Callable[[Lease], bool] = lambda _: True
    ) -> list[Lease]:
        values.queue_name(queue_name)
        values.name(worker_id, "worker_id")
        duration_s = values.lease_s(asked_s, self._config.min_lease_s)
        return self._leases.claim(queue_name, worker_id, batch, duration_s, self._clock(), fits=fits)

    def _job(self, lease: Lease, worker_id: str) -> pb.Job:
        job = pb.Job()
        values.fill_leased(job, lease, worker_id)
        return job


def _holder(request: pb.CompleteRequest | pb.FailRequest | pb.RenewLeaseRequest) -> Holder:
    """Unlike over REST, all three must be there."""
    values.name(request.job_id, "job_id")
    return Holder(values.name(request.worker_id, "worker_id"), values.name(request.lease_id, "lease_id"))


def _cut(error: str) -> str:
    text = error.encode()
    if len(text) <= MAX_ERROR_BYTES:
        return error
    return (text[: MAX_ERROR_BYTES - len(CUT_MARK)] + CUT_MARK).decode(errors="ignore")
