"""Jobs as producers see them: made, changed, cancelled, retried, deleted.

Owns the SQL behind those; does not know leases, HTTP or field rules. Every method is one transaction; `now` is epoch
seconds. A job waits for its time (`due_at`) or its parent (`dependencies_met`); else it is `ready` at once.
Sources: POST /api/v1/jobs, /jobs/bulk, /jobs/{id}/retry, /jobs/dlq/*; PUT /jobs/{id}/priority; DELETE /jobs/{id}.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from spooled_supervisor.devserver import history
from spooled_supervisor.devserver.database import Database, Row
from spooled_supervisor.devserver.errors import already, broken_rule, conflict, not_found
from spooled_supervisor.devserver.queues import Queues

_INSERT_JOB = """
INSERT INTO jobs (id, queue_name, status, ready, due_at, priority, job_type, max_retries, timeout_seconds, created_at,
    updated_at, scheduled_at, expires_at, tags, idempotency_key, parent_job_id, dependencies_met, completion_webhook)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_REVIVE = """
UPDATE jobs SET status = 'pending', ready = 1, due_at = NULL, dependencies_met = 1, retry_count = 0, last_error = NULL,
    scheduled_at = NULL, started_at = NULL, completed_at = NULL, worker_id = NULL, lease_id = NULL,
    lease_expires_at = NULL, progress = NULL, progress_message = NULL, updated_at = ?
WHERE seq = ?
"""
_FULL_JOB = """
SELECT jobs.*, payload, result FROM jobs JOIN payloads USING (seq) LEFT JOIN results USING (seq) WHERE jobs.id = ?
"""
_DEAD = "FROM jobs WHERE status = 'deadletter' AND (:queue IS NULL OR queue_name = :queue)"


@dataclass(frozen=True)
class NewJob:
    """A job to be made, checked already. `payload` and `tags` are JSON text; None means the queue's default."""

    queue_name: str
    payload: bytes = field(repr=False)
    job_type: str = ""
    priority: int = 0
    max_retries: int | None = None
    timeout_seconds: int | None = None
    scheduled_at: float | None = None
    expires_at: float | None = None
    idempotency_key: str | None = None
    tags: bytes | None = None
    parent_job_id: str | None = None
    completion_webhook: str | None = None


class Jobs:
    def __init__(self, db: Database, queues: Queues) -> None:
        self._db = db
        self._queues = queues

    def create(self, new: NewJob, now: float) -> tuple[str, bool]:
        """The id, and whether the job is new; a known idempotency key gives the old id and changes nothing."""
        with self._db.transaction():
            return self._create(new, now)

    def create_all(self, jobs: list[NewJob], now: float) -> list[tuple[str, bool]]:
        """One transaction for all. Equal idempotency keys among them give one job."""
        with self._db.transaction():
            return [self._create(new, now) for new in jobs]

    def get(self, job_id: str) -> Row:
        row = self._db.first(_FULL_JOB, (job_id,))
        if row is None:
            raise not_found()
        return row

    def cancel(self, job_id: str, now: float) -> Row:
        """Cancel a job that does not run yet; returns it as it was. A running one cannot be cancelled (409)."""
        row = self.get(job_id)
        if row["status"] not in ("pending", "scheduled"):
            raise conflict(f"Cannot cancel a job that is {row['status']}")
        with self._db.transaction():
            self._db.execute(
                "UPDATE jobs SET status = 'cancelled', ready = 0, due_at = NULL, updated_at = ? WHERE seq = ?",
                (now, row["seq"]),
            )
            history.record(self._db, row["seq"], history.CANCELLED, now)
        return row

    def retry(self, job_id: str, now: float) -> Row:
        """Give a failed or dead job all its attempts back, now; returns it as it was."""
        row = self.get(job_id)
        if row["status"] not in ("failed", "deadletter"):
            raise already(row["status"])
        with self._db.transaction():
            self._revive(row["seq"], now)
        return row

    def set_priority(self, job_id: str, priority: int, now: float) -> int:
        """Returns the old one. 404 unless the job still waits."""
        row = self._db.first("SELECT seq, status, priority FROM jobs WHERE id = ?", (job_id,))
        if row is None or row["status"] not in ("pending", "scheduled"):
            raise not_found()
        self._db.execute("UPDATE jobs SET priority = ?, updated_at = ? WHERE seq = ?", (priority, now, row["seq"]))
        return int(row["priority"])

    def retry_dead(self, job_ids: list[str] | None, queue_name: str | None, limit: int, now: float) -> list[str]:
        """Revive dead jobs, the oldest first; returns their ids. Ids that name no dead job are passed over."""
        rows = self._db.all(f"SELECT seq, id {_DEAD} ORDER BY updated_at, seq", {"queue": queue_name})
        wanted = [row for row in rows if job_ids is None or row["id"] in job_ids][:limit]
        with self._db.transaction():
            for row in wanted:
                self._revive(row["seq"], now)
        return [row["id"] for row in wanted]

    def purge_dead(self, queue_name: str | None, older_than: float | None, limit: int) -> int:
        """Delete dead jobs, the oldest first; returns how many."""
        return self._db.execute(
            f"DELETE FROM jobs WHERE seq IN (SELECT seq {_DEAD} AND (:before IS NULL OR updated_at < :before) "
            "ORDER BY updated_at, seq LIMIT :limit)",
            {"queue": queue_name, "before": older_than, "limit": limit},
        ).rowcount

    def _create(self, new: NewJob, now: float) -> tuple[str, bool]:
        known = new.idempotency_key and self._db.value(
            "SELECT id FROM jobs WHERE idempotency_key = ?", (new.idempotency_key,)
        )
        if known:
            return str(known), False
        return self._insert(new, self._parent_is_done(new), now), True

    def _insert(self, new: NewJob, dependencies_met: bool, now: float) -> str:
        job_id = str(uuid.uuid4())
        is_due = new.scheduled_at is None or new.scheduled_at <= now
        default_retries, default_timeout_s = self._queues.defaults(new.queue_name)
        cursor = self._db.execute(
            _INSERT_JOB,
            (
                job_id,
                new.queue_name,
                "pending" if is_due else "scheduled",
                is_due and dependencies_met,
                None if is_due or not dependencies_met else new.scheduled_at,
                new.priority,
                new.job_type,
                default_retries if new.max_retries is None else new.max_retries,
                default_timeout_s if new.timeout_seconds is None else new.timeout_seconds,
                now,
                now,
                new.scheduled_at,
                new.expires_at,
                new.tags,
                new.idempotency_key,
                new.parent_job_id,
                dependencies_met,
                new.completion_webhook,
            ),
        )
        self._db.execute("INSERT INTO payloads (seq, payload) VALUES (?, ?)", (cursor.lastrowid, new.payload))
        history.record(self._db, cursor.lastrowid or 0, history.CREATED, now)
        return job_id

    def _parent_is_done(self, new: NewJob) -> bool:
        if new.parent_job_id is None:
            return True
        row = self._db.first("SELECT queue_name, status FROM jobs WHERE id = ?", (new.parent_job_id,))
        if row is None or row["queue_name"] != new.queue_name:
            raise broken_rule("parent_job_id", "parent_job_id must name a job of the same queue", "invalid_value")
        return bool(row["status"] == "completed")

    def _revive(self, seq: int, now: float) -> None:
        self._db.execute(_REVIVE, (now, seq))
        history.record(self._db, seq, history.RETRIED, now)
