"""The calls of a running worker: claim, complete, fail, renew, report progress.

Owns field names, limits and answers of these paths in both dialects; what is allowed is decided by `leases`. Completing
and failing publish events, claiming and renewing do not. Source: POST /api/v1/jobs/claim and /api/v1/jobs/{id}/...
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spooled_supervisor.devserver import shapes
from spooled_supervisor.devserver.config import MAX_LEASE_S
from spooled_supervisor.devserver.hub import EventKind
from spooled_supervisor.devserver.leases import Holder
from spooled_supervisor.devserver.services import Services
from spooled_supervisor.devserver.shapes import json_response
from spooled_supervisor.devserver.validation import (
    MAX_BODY_BYTES,
    MAX_QUEUE_NAME,
    QUEUE_NAME,
    Fields,
    read_fields,
)

DEFAULT_LEASE_S = 30
MAX_CLAIM = 100
MAX_ERROR = 2048


class LeaseRoutes:
    def __init__(self, services: Services) -> None:
        self._config = services.config
        self._clock = services.clock
        self._leases = services.leases
        self._hub = services.hub

    def routes(self) -> list[Route]:
        return [
            Route("/jobs/claim", self.claim, methods=["POST"]),
            Route("/jobs/{job_id}/complete", self.complete, methods=["POST"]),
            Route("/jobs/{job_id}/fail", self.fail, methods=["POST"]),
            Route("/jobs/{job_id}/heartbeat", self.renew, methods=["POST"]),
            Route("/jobs/{job_id}/renew-lease", self.renew, methods=["POST"]),
            Route("/jobs/{job_id}/progress", self.report_progress, methods=["POST"]),
        ]

    async def claim(self, request: Request) -> Response:
        """→ 200 `{"jobs": [...]}`, empty if there is nothing to do; never waits."""
        fields = await read_fields(request)
        queue_name = fields.text("queue_name", high=MAX_QUEUE_NAME, pattern=QUEUE_NAME, required=True)
        worker_id = fields.text("worker_id", required=True)
        limit = fields.whole("limit", low=1, high=MAX_CLAIM) or 1
        duration_s = self._duration_s(fields)
        fields.check()
        leases = self._leases.claim(str(queue_name), str(worker_id), limit, duration_s, self._clock())
        jobs = [shapes.claimed_job(lease.row, lease.lease_id, lease.expires_at) for lease in leases]
        return json_response({"jobs": jobs})

    async def complete(self, request: Request) -> Response:
        """→ 200 `{"success": true}`."""
        fields = await read_fields(request)
        holder = self._holder(fields)
        result = fields.json("result", limit=MAX_BODY_BYTES)
        fields.check()
        now = self._clock()
        job = self._leases.complete(request.path_params["job_id"], holder, result, now)
        self._hub.publish(
            EventKind.JOB_COMPLETED,
            now,
            job_id=job["id"],
            queue_name=job["queue_name"],
            duration_ms=int((now - job["started_at"]) * 1000),
            result=shapes.raw(result),
        )
        return json_response({"success": True})

    async def fail(self, request: Request) -> Response:
        """→ 200 `{"success": true, "will_retry": ...}`."""
        fields = await read_fields(request)
        holder = self._holder(fields)
        names = ("error",) if self._config.strict else ("error", "reason")
        error = str(fields.text(*names, high=MAX_ERROR, required=True))
        is_final = fields.flag("no_retry") is True or fields.flag("retry") is False
        fields.check()
        may_retry = not (self._config.honour_no_retry and is_final)
        job_id, now = request.path_params["job_id"], self._clock()
        failure = self._leases.fail(job_id, holder, error, may_retry, now)
        about = {"job_id": job_id, "queue_name": failure.queue_name}
        self._hub.publish(EventKind.JOB_STATUS, now, **about, old_status="processing", new_status=failure.status)
        self._hub.publish(EventKind.JOB_FAILED, now, **about, error=error, retry_count=failure.retry_count)
        return json_response({"success": True, "will_retry": failure.will_retry})

    async def renew(self, request: Request) -> Response:
        """→ 200 `{"success": true, "lease_expires_at": ...}`; the older path and field name mean the same."""
        fields = await read_fields(request)
        holder = self._holder(fields)
        duration_s = self._duration_s(fields)
        fields.check()
        expires_at = self._leases.renew(request.path_params["job_id"], holder, duration_s, self._clock())
        return json_response({"success": True, "lease_expires_at": shapes.rfc3339(expires_at)})

    async def report_progress(self, request: Request) -> Response:
        """→ 200 `{"success": true}`. The service has no such path yet; SDKs that call it accept any 2xx."""
        fields = await read_fields(request)
        holder = Holder(fields.text("worker_id"), fields.text("lease_id"))
        percent = fields.number("progress", low=0, high=100, required=True)
        message = fields.text("message", low=0, high=MAX_ERROR)
        fields.check()
        self._leases.report_progress(request.path_params["job_id"], holder, percent or 0.0, message, self._clock())
        return json_response({"success": True})

    def _holder(self, fields: Fields) -> Holder:
        is_strict = self._config.strict
        return Holder(fields.text("worker_id", required=is_strict), fields.text("lease_id", required=is_strict))

    def _duration_s(self, fields: Fields) -> int:
        low = self._config.min_lease_s
        asked = fields.whole("lease_duration_secs", "extension_seconds", low=low, high=MAX_LEASE_S)
        return DEFAULT_LEASE_S if asked is None else asked
