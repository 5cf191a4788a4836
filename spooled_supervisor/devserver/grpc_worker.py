"""`spooled.v1.WorkerService`: registrations over gRPC, in the same table as those over REST.

Owns what differs from REST: an unknown worker is an answer and no error, and `draining` stays until the next
registration, whatever the heartbeats say. A heartbeat that names no status ends what silence has brought, and leaves a
`degraded` that the worker itself reported.
"""

from __future__ import annotations

import uuid

import msgspec

from spooled_supervisor.devserver import grpc_values as values
from spooled_supervisor.devserver.errors import ApiError
from spooled_supervisor.devserver.routes_worker import MAX_CONCURRENCY, MAX_CURRENT_JOBS, MAX_LABEL, MAX_WORKER_ID
from spooled_supervisor.devserver.services import Services
from spooled_supervisor.devserver.validation import HOSTNAME, MAX_METADATA_BYTES, REGISTERED_QUEUE_NAME, WORKER_ID
from spooled_supervisor.devserver.workers import STATUSES, Registration
from spooled_supervisor.proto import spooled_pb2 as pb

DEFAULT_CONCURRENCY = 5


class WorkerService:
    """The calls without their connections."""

    def __init__(self, services: Services) -> None:
        self._config = services.config
        self._clock = services.clock
        self._workers = services.workers

    def register(self, request: pb.RegisterWorkerRequest) -> pb.RegisterWorkerResponse:
        queue_name = values.matching(values.name(request.queue_name, "queue_name"), "queue_name", REGISTERED_QUEUE_NAME)
        hostname = values.matching(values.name(request.hostname, "hostname"), "hostname", HOSTNAME)
        worker_id = request.worker_id or str(uuid.uuid4())
        values.matching(values.name(worker_id, "worker_id", MAX_WORKER_ID), "worker_id", WORKER_ID)
        if max(len(request.worker_type), len(request.version)) > MAX_LABEL:
            raise values.refused(f"worker_type and version must have at most {MAX_LABEL} characters")
        new = Registration(
            worker_id=worker_id,
            queue_names=[queue_name],
            hostname=hostname,
            worker_type=request.worker_type or None,
            version=request.version or None,
            max_concurrency=min(request.max_concurrency, MAX_CONCURRENCY)
            if request.max_concurrency > 0
            else DEFAULT_CONCURRENCY,
            metadata=_metadata(dict(request.metadata)),
        )
        self._workers.register(new, self._clock())
        return pb.RegisterWorkerResponse(
            worker_id=worker_id,
            lease_duration_secs=values.DEFAULT_LEASE_S,
            heartbeat_interval_secs=self._config.heartbeat_interval_s,
        )

    def heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        values.name(request.worker_id, "worker_id")
        if request.status and request.status not in STATUSES:
            raise values.refused(f"status must be one of {', '.join(sorted(STATUSES))}")
        if not 0 <= request.current_jobs <= MAX_CURRENT_JOBS:
            raise values.refused(f"current_jobs must be between 0 and {MAX_CURRENT_JOBS}")
        now = self._clock()
        try:
            worker = self._workers.get(request.worker_id)
        except ApiError:
            return pb.HeartbeatResponse(acknowledged=False)
        old = worker["status"]
        was_silent = now - worker["last_heartbeat"] >= self._config.worker_degraded_s
        is_back = old == "offline" or (old == "degraded" and was_silent)
        status = request.status or ("healthy" if is_back else old)
        if old == "draining":
            status = old
        metadata = _metadata(dict(request.metadata))
        self._workers.heartbeat(request.worker_id, status, request.current_jobs, metadata, now)
        return pb.HeartbeatResponse(acknowledged=True, should_drain=status == "draining")

    def deregister(self, request: pb.DeregisterRequest) -> pb.DeregisterResponse:
        values.name(request.worker_id, "worker_id")
        try:
            self._workers.deregister(request.worker_id, self._clock())
        except ApiError:
            return pb.DeregisterResponse(success=False)
        return pb.DeregisterResponse(success=True)


def _metadata(metadata: dict[str, str]) -> bytes | None:
    """JSON text; None keeps what is there."""
    if not metadata:
        return None
    text = msgspec.json.encode(metadata)
    if len(text) > MAX_METADATA_BYTES:
        raise values.refused(f"metadata must be at most {MAX_METADATA_BYTES} bytes of JSON")
    return text
