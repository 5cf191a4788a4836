"""Jobs for producers and operators: create, list, inspect, cancel, retry, the dead-letter queue.

Owns field names, limits and answers of these paths, and which of them publish an event: creating, cancelling and a
manual retry do, bulk retries of dead jobs do not. Source: /api/v1/jobs and below, except what workers call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spooled_supervisor.devserver import shapes
from spooled_supervisor.devserver.database import Row
from spooled_supervisor.devserver.errors import ApiError, broken_rule
from spooled_supervisor.devserver.hub import EventKind
from spooled_supervisor.devserver.jobs import NewJob
from spooled_supervisor.devserver.listing import MAX_PAGE, known_statuses
from spooled_supervisor.devserver.services import Services
from spooled_supervisor.devserver.shapes import json_response
from spooled_supervisor.devserver.validation import (
    MAX_METADATA_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_QUEUE_NAME,
    QUEUE_NAME,
    Fields,
    read_fields,
)

MAX_BULK = 100
MAX_PRIORITY = 100
MAX_RETRIES = 100
MAX_TIMEOUT_S = 86400
MAX_WEBHOOK = 2048
MAX_PURGE = 10000


class JobRoutes:
    def __init__(self, services: Services) -> None:
        self._clock = services.clock
        self._jobs = services.jobs
        self._listing = services.listing
        self._hub = services.hub

    def routes(self) -> list[Route]:
        return [
            Route("/jobs", self.create, methods=["POST"]),
            Route("/jobs", self.list_all, methods=["GET"]),
            Route("/jobs/bulk", self.create_all, methods=["POST"]),
            Route("/jobs/stats", self.stats, methods=["GET"]),
            Route("/jobs/status", self.statuses, methods=["GET"]),
            Route("/jobs/dlq", self.list_dead, methods=["GET"]),
            Route("/jobs/dlq/retry", self.retry_dead, methods=["POST"]),
            Route("/jobs/dlq/purge", self.purge_dead, methods=["POST"]),
            Route("/jobs/{job_id}", self.get, methods=["GET"]),
            Route("/jobs/{job_id}", self.cancel, methods=["DELETE"]),
            Route("/jobs/{job_id}/retry", self.retry, methods=["POST"]),
            Route("/jobs/{job_id}/priority", self.set_priority, methods=["PUT"]),
            Route("/jobs/{job_id}/history", self.history, methods=["GET"]),
        ]

    async def create(self, request: Request) -> Response:
        """→ 201 `{"id", "created": true}`, or 200 with the old id for a known idempotency key."""
        new = _new_job(await read_fields(request))
        now = self._clock()
        job_id, is_new = self._jobs.create(new, now)
        self._publish_created(new, job_id, is_new, now)
        return json_response({"id": job_id, "created": is_new}, 201 if is_new else 200)

    async def create_all(self, request: Request) -> Response:
        """→ 200 `{"succeeded", "failed", "total", ...}`; an item that breaks a rule fails alone."""
        items = _bulk_items(await read_fields(request))
        good = [(index, item) for index, item in enumerate(items) if isinstance(item, NewJob)]
        failed = [{"index": index, "error": item} for index, item in enumerate(items) if isinstance(item, str)]
        now = self._clock()
        succeeded = []
        made = self._jobs.create_all([new for _, new in good], now)
        for (index, new), (job_id, is_new) in zip(good, made, strict=True):
            self._publish_created(new, job_id, is_new, now)
            succeeded.append({"index": index, "job_id": job_id, "created": is_new})
        return json_response(
            {
                "succeeded": succeeded,
                "failed": failed,
                "total": len(items),
                "success_count": len(succeeded),
                "failure_count": len(failed),
            }
        )

    async def list_all(self, request: Request) -> Response:
        return self._page(request.query_params, known_statuses(request.query_params))

    async def list_dead(self, request: Request) -> Response:
        return self._page(request.query_params, ["deadletter"])

    async def stats(self, request: Request) -> Response:
        return json_response(self._listing.counts(request.query_params.get("queue_name")))

    async def statuses(self, request: Request) -> Response:
        """→ 200 array; ids that are unknown are left out."""
        job_ids = [part for part in request.query_params.get("ids", "").split(",") if part]
        if len(job_ids) > MAX_PAGE:
            raise broken_rule("ids", f"ids must name at most {MAX_PAGE} jobs", "length")
        return json_response([shapes.job_status(row) for row in self._listing.statuses(job_ids)])

    async def get(self, request: Request) -> Response:
        return json_response(shapes.job(self._jobs.get(request.path_params["job_id"])))

    async def cancel(self, request: Request) -> Response:
        """→ 204; 409 for a job that is not waiting."""
        now = self._clock()
        old = self._jobs.cancel(request.path_params["job_id"], now)
        self._publish_status(old, "cancelled", now)
        return Response(status_code=204)

    async def retry(self, request: Request) -> Response:
        """→ 200 with the job, pending again; 409 for a job that has not failed. The body does not matter."""
        job_id, now = request.path_params["job_id"], self._clock()
        old = self._jobs.retry(job_id, now)
        self._publish_status(old, "pending", now)
        return json_response(shapes.job(self._jobs.get(job_id)))

    async def set_priority(self, request: Request) -> Response:
        fields = await read_fields(request)
        priority = fields.whole("priority", low=-MAX_PRIORITY, high=MAX_PRIORITY, required=True)
        fields.check()
        job_id = request.path_params["job_id"]
        old = self._jobs.set_priority(job_id, priority or 0, self._clock())
        return json_response({"job_id": job_id, "old_priority": old, "new_priority": priority})

    async def history(self, request: Request) -> Response:
        job_id = request.path_params["job_id"]
        rows, has_more = self._listing.history(job_id, request.query_params)
        return _paged([shapes.history_event(row, job_id) for row in rows], has_more)

    async def retry_dead(self, request: Request) -> Response:
        """→ 200 `{"retried_count", "retried_jobs", "skipped_jobs"}`."""
        fields = await read_fields(request)
        limit = fields.whole("limit", low=1, high=MAX_PAGE) or MAX_PAGE
        job_ids = fields.texts("job_ids", high=limit)
        queue_name = fields.text("queue_name", high=MAX_QUEUE_NAME)
        fields.check()
        retried = self._jobs.retry_dead(job_ids, queue_name, limit, self._clock())
        return json_response({"retried_count": len(retried), "retried_jobs": retried, "skipped_jobs": []})

    async def purge_dead(self, request: Request) -> Response:
        """→ 200 `{"purged_count"}`; 400 unless `confirm` is true."""
        fields = await read_fields(request)
        confirm = fields.flag("confirm")
        queue_name = fields.text("queue_name", high=MAX_QUEUE_NAME)
        older_than = fields.instant("older_than")
        limit = fields.whole("limit", low=1, high=MAX_PURGE) or MAX_PURGE
        fields.check()
        if confirm is not True:
            raise broken_rule("confirm", "confirm must be true", "required")
        return json_response({"purged_count": self._jobs.purge_dead(queue_name, older_than, limit)})

    def _page(self, query: Mapping[str, str], statuses: list[str]) -> Response:
        rows, has_more = self._listing.page(query, statuses)
        return _paged([shapes.job_summary(row) for row in rows], has_more)

    def _publish_created(self, new: NewJob, job_id: str, is_new: bool, now: float) -> None:
        if is_new:
            self._hub.publish(
                EventKind.JOB_CREATED, now, job_id=job_id, queue_name=new.queue_name, priority=new.priority
            )

    def _publish_status(self, old: Row, status: str, now: float) -> None:
        self._hub.publish(
            EventKind.JOB_STATUS,
            now,
            job_id=old["id"],
            queue_name=old["queue_name"],
            old_status=old["status"],
            new_status=status,
        )


def _paged(items: list[dict[str, Any]], has_more: bool) -> Response:
    return json_response(items, headers={"X-Has-More": "true" if has_more else "false"})


def _new_job(fields: Fields) -> NewJob:
    queue_name = fields.text("queue_name", high=MAX_QUEUE_NAME, pattern=QUEUE_NAME, required=True)
    payload = fields.json("payload", limit=MAX_PAYLOAD_BYTES, required=True)
    new = NewJob(
        queue_name=str(queue_name),
        payload=payload or b"null",
        job_type=_job_type(fields),
        priority=fields.whole("priority", low=-MAX_PRIORITY, high=MAX_PRIORITY) or 0,
        max_retries=fields.whole("max_retries", low=0, high=MAX_RETRIES),
        timeout_seconds=fields.whole("timeout_seconds", low=1, high=MAX_TIMEOUT_S),
        scheduled_at=fields.instant("scheduled_at"),
        expires_at=fields.instant("expires_at"),
        idempotency_key=fields.text("idempotency_key"),
        tags=fields.json("tags", limit=MAX_METADATA_BYTES, containers_only=True),
        parent_job_id=fields.text("parent_job_id"),
        completion_webhook=fields.text("completion_webhook", high=MAX_WEBHOOK),
    )
    fields.text("completion_webhook_secret")  # checked, then dropped: nothing here calls a webhook
    fields.check()
    return new


def _bulk_items(fields: Fields) -> list[NewJob | str]:
    """Each item as a job, or as the text of what is wrong with it. Shapes that are wrong refuse the whole request."""
    queue_name = str(fields.text("queue_name", high=MAX_QUEUE_NAME, pattern=QUEUE_NAME, required=True))
    priority = fields.whole("default_priority", low=-MAX_PRIORITY, high=MAX_PRIORITY) or 0
    max_retries = fields.whole("default_max_retries", low=0, high=MAX_RETRIES)
    timeout_s = fields.whole("default_timeout_seconds", low=1, high=MAX_TIMEOUT_S)
    items = fields.items("jobs", low=1, high=MAX_BULK)
    fields.check()
    return [_bulk_item(item, queue_name, priority, max_retries, timeout_s) for item in items]


def _bulk_item(
    fields: Fields, queue_name: str, priority: int, max_retries: int | None, timeout_s: int | None
) -> NewJob | str:
    payload = fields.json("payload", limit=MAX_PAYLOAD_BYTES, required=True)
    own_priority = fields.whole("priority", low=-MAX_PRIORITY, high=MAX_PRIORITY)
    new = NewJob(
        queue_name=queue_name,
        payload=payload or b"null",
        job_type=_job_type(fields),
        priority=priority if own_priority is None else own_priority,
        max_retries=max_retries,
        timeout_seconds=timeout_s,
        scheduled_at=fields.instant("scheduled_at"),
        idempotency_key=fields.text("idempotency_key"),
    )
    try:
        fields.check()
    except ApiError as error:
        if error.status == 400:
            return error.message
        raise
    return new


def _job_type(fields: Fields) -> str:
    """`payload.job_type`, by which lists can be filtered; empty if there is none."""
    payload = fields.value("payload")
    job_type = payload.get("job_type") if isinstance(payload, dict) else None
    return job_type if isinstance(job_type, str) else ""
