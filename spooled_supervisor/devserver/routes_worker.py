"""Worker registrations: register, heartbeat, deregister, list, get.

Owns field names, limits and answers of /api/v1/workers in both dialects: `queue_name` or `queue_names`, `worker_id` or
`id`, `max_concurrency` or `max_concurrent_jobs`. Answers carry both spellings.
"""

from __future__ import annotations

import uuid

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spooled_supervisor.devserver import shapes
from spooled_supervisor.devserver.errors import broken_rule
from spooled_supervisor.devserver.routes_lease import DEFAULT_LEASE_S
from spooled_supervisor.devserver.services import Services
from spooled_supervisor.devserver.shapes import json_response
from spooled_supervisor.devserver.validation import (
    HOSTNAME,
    MAX_METADATA_BYTES,
    MAX_QUEUE_NAME,
    REGISTERED_QUEUE_NAME,
    WORKER_ID,
    Fields,
    read_fields,
)
from spooled_supervisor.devserver.workers import STATUSES, Registration

MAX_WORKER_ID = 128
MAX_LABEL = 50
MAX_QUEUES = 100
MAX_CONCURRENCY = 100
DEFAULT_CONCURRENCY = 5
DEFAULT_HOSTNAME = "unknown"
MAX_CURRENT_JOBS = 1000


class WorkerRoutes:
    def __init__(self, services: Services) -> None:
        self._config = services.config
        self._clock = services.clock
        self._workers = services.workers

    def routes(self) -> list[Route]:
        return [
            Route("/workers/register", self.register, methods=["POST"]),
            Route("/workers/{worker_id}/heartbeat", self.heartbeat, methods=["POST"]),
            Route("/workers/{worker_id}/deregister", self.deregister, methods=["POST"]),
            Route("/workers/{worker_id}", self.get, methods=["GET"]),
            Route("/workers", self.list_all, methods=["GET"]),
        ]

    async def register(self, request: Request) -> Response:
        """→ 201 with the interval for heartbeats; the same id again overwrites."""
        fields = await read_fields(request)
        new = self._registration(fields)
        row = self._workers.register(new, self._clock())
        interval_s = self._config.heartbeat_interval_s
        body = {
            "id": row["id"],
            "worker_id": row["id"],
            "queue_name": row["queue_name"],
            "queue_names": new.queue_names,
            "status": row["status"],
            "registered_at": shapes.rfc3339(row["registered_at"]),
            "lease_duration_secs": DEFAULT_LEASE_S,
            "heartbeat_interval_secs": interval_s,
            "heartbeat_interval_seconds": interval_s,
        }
        return json_response(body, 201)

    async def heartbeat(self, request: Request) -> Response:
        """→ 200; the newer service sends an empty body, the older one this."""
        fields = await read_fields(request)
        current_jobs = fields.whole("current_jobs", low=0, high=MAX_CURRENT_JOBS, required=True)
        status = fields.text("status", choices=STATUSES) or "healthy"
        metadata = fields.json("metadata", limit=MAX_METADATA_BYTES)
        fields.check()
        worker_id = request.path_params["worker_id"]
        self._workers.heartbeat(worker_id, status, current_jobs or 0, metadata, self._clock())
        interval_s = self._config.heartbeat_interval_s
        return json_response({"acknowledged": True, "next_heartbeat_seconds": interval_s, "commands": []})

    async def deregister(self, request: Request) -> Response:
        """→ 204, whatever the body."""
        self._workers.deregister(request.path_params["worker_id"], self._clock())
        return Response(status_code=204)

    async def list_all(self, _request: Request) -> Response:
        return json_response([shapes.worker_summary(row) for row in self._workers.all()])

    async def get(self, request: Request) -> Response:
        return json_response(shapes.worker(self._workers.get(request.path_params["worker_id"])))

    def _registration(self, fields: Fields) -> Registration:
        is_strict = self._config.strict
        worker_id = fields.text("worker_id", "id", "workerId", high=MAX_WORKER_ID, pattern=WORKER_ID)
        several = fields.texts("queue_names", low=1, high=MAX_QUEUES)
        queue_name = fields.text(
            "queue_name",
            high=MAX_QUEUE_NAME,
            pattern=REGISTERED_QUEUE_NAME,
            required=is_strict or fields.value("queue_names") is None,
        )
        hostname = fields.text("hostname", pattern=HOSTNAME, required=is_strict)
        concurrency = fields.whole("max_concurrency", "max_concurrent_jobs", low=1, high=MAX_CONCURRENCY)
        worker_type = fields.text("worker_type", low=0, high=MAX_LABEL)
        version = fields.text("version", low=0, high=MAX_LABEL)
        metadata = fields.json("metadata", limit=MAX_METADATA_BYTES)
        fields.check()
        return Registration(
            worker_id=worker_id or str(uuid.uuid4()),
            queue_names=_queue_names(queue_name, several),
            hostname=hostname or DEFAULT_HOSTNAME,
            worker_type=worker_type,
            version=version,
            max_concurrency=concurrency or DEFAULT_CONCURRENCY,
            metadata=metadata,
        )


def _queue_names(first: str | None, several: list[str] | None) -> list[str]:
    """The one queue of the newer dialect, or it and the others of the older one, each once."""
    names = list(dict.fromkeys(([] if first is None else [first]) + (several or [])))
    for name in names:
        if not (len(name) <= MAX_QUEUE_NAME and REGISTERED_QUEUE_NAME.fullmatch(name)):
            raise broken_rule("queue_names", "queue_names contains a name that is not allowed", "invalid_characters")
    return names
