"""Rows as the JSON that clients read: jobs, claimed jobs, summaries, workers, queues, history, events' times.

Owns names and nesting of response bodies; does not know where rows come from. Answers are supersets where dialects
differ, since clients ignore what they do not know. Stored JSON goes out as the text it came in.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.responses import Response

from spooled_supervisor.devserver.database import Row

ORGANIZATION_ID = "00000000-0000-4000-8000-000000000001"

_encode = msgspec.json.Encoder().encode


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_encode(value), status, headers, media_type="application/json")


def rfc3339(at: float | None) -> str | None:
    """Epoch seconds as the service writes times."""
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds")


def raw(text: bytes | None) -> msgspec.Raw | None:
    return None if text is None else msgspec.Raw(text)


def claimed_job(row: Row, lease_id: str, lease_expires_at: float) -> dict[str, Any]:
    """An element of `jobs` in POST /api/v1/jobs/claim."""
    return {
        "id": row["id"],
        "queue_name": row["queue_name"],
        "payload": msgspec.Raw(row["payload"]),
        "retry_count": row["retry_count"],
        "max_retries": row["max_retries"],
        "timeout_seconds": row["timeout_seconds"],
        "lease_id": lease_id,
        "lease_expires_at": rfc3339(lease_expires_at),
    }


def job(row: Row) -> dict[str, Any]:
    """GET /api/v1/jobs/{id}. `progress` and `progress_message` are additions of this server."""
    return {
        "id": row["id"],
        "organization_id": ORGANIZATION_ID,
        "queue_name": row["queue_name"],
        "status": row["status"],
        "payload": msgspec.Raw(row["payload"]),
        "result": raw(row["result"]),
        "retry_count": row["retry_count"],
        "max_retries": row["max_retries"],
        "last_error": row["last_error"],
        "created_at": rfc3339(row["created_at"]),
        "scheduled_at": rfc3339(row["scheduled_at"]),
        "started_at": rfc3339(row["started_at"]),
        "completed_at": rfc3339(row["completed_at"]),
        "expires_at": rfc3339(row["expires_at"]),
        "updated_at": rfc3339(row["updated_at"]),
        "priority": row["priority"],
        "tags": raw(row["tags"]),
        "timeout_seconds": row["timeout_seconds"],
        "parent_job_id": row["parent_job_id"],
        "completion_webhook": row["completion_webhook"],
        "assigned_worker_id": row["worker_id"],
        "lease_id": row["lease_id"],
        "lease_expires_at": rfc3339(row["lease_expires_at"]),
        "idempotency_key": row["idempotency_key"],
        "workflow_id": None,
        "dependency_mode": None,
        "dependencies_met": bool(row["dependencies_met"]),
        "progress": row["progress"],
        "progress_message": row["progress_message"],
    }


def job_summary(row: Row) -> dict[str, Any]:
    """An element of GET /api/v1/jobs and /jobs/dlq; SDKs disagree whether the count is `attempt` or `retry_count`."""
    return {
        "id": row["id"],
        "queue_name": row["queue_name"],
        "status": row["status"],
        "priority": row["priority"],
        "attempt": row["retry_count"],
        "retry_count": row["retry_count"],
        "max_retries": row["max_retries"],
        "job_type": row["job_type"],
        "last_error": row["last_error"],
        "created_at": rfc3339(row["created_at"]),
        "scheduled_at": rfc3339(row["scheduled_at"]),
        "started_at": rfc3339(row["started_at"]),
        "completed_at": rfc3339(row["completed_at"]),
    }


def job_status(row: Row) -> dict[str, Any]:
    """An element of GET /api/v1/jobs/status."""
    return {
        "id": row["id"],
        "status": row["status"],
        "queue_name": row["queue_name"],
        "retry_count": row["retry_count"],
        "created_at": rfc3339(row["created_at"]),
        "completed_at": rfc3339(row["completed_at"]),
    }


def history_event(row: Row, job_id: str) -> dict[str, Any]:
    """An element of GET /api/v1/jobs/{id}/history."""
    return {
        "id": str(row["id"]),
        "job_id": job_id,
        "event_type": row["event_type"],
        "worker_id": row["worker_id"],
        "details": raw(row["details"]),
        "created_at": rfc3339(row["created_at"]),
    }


def worker_summary(row: Row) -> dict[str, Any]:
    """An element of GET /api/v1/workers."""
    return {
        "id": row["id"],
        "queue_name": row["queue_name"],
        "hostname": row["hostname"],
        "status": row["status"],
        "current_jobs": row["current_jobs"],
        "max_concurrency": row["max_concurrency"],
        "last_heartbeat": rfc3339(row["last_heartbeat"]),
        "jobs_processed": row["jobs_processed"],
        "jobs_failed": row["jobs_failed"],
    }


def worker(row: Row) -> dict[str, Any]:
    """GET /api/v1/workers/{id}."""
    return {
        **worker_summary(row),
        "organization_id": ORGANIZATION_ID,
        "queue_names": msgspec.Raw(row["queue_names"]),
        "worker_type": row["worker_type"],
        "version": row["version"],
        "metadata": raw(row["metadata"]),
        "registered_at": rfc3339(row["registered_at"]),
        "updated_at": rfc3339(row["updated_at"]),
    }


def queue_summary(row: Row) -> dict[str, Any]:
    """An element of GET /api/v1/queues."""
    return {
        "queue_name": row["queue_name"],
        "max_retries": row["max_retries"],
        "default_timeout": row["default_timeout"],
        "rate_limit": row["rate_limit"],
        "enabled": bool(row["enabled"]),
    }


def queue(row: Row) -> dict[str, Any]:
    """GET /api/v1/queues/{name}."""
    return {
        **queue_summary(row),
        "id": row["id"],
        "organization_id": ORGANIZATION_ID,
        "settings": msgspec.Raw(row["settings"]),
        "created_at": rfc3339(row["created_at"]),
        "updated_at": rfc3339(row["updated_at"]),
    }
