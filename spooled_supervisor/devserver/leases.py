"""Leases: who may run a job until when, and what each answer to a claim, an outcome or a renewal is.

Owns the step from `ready` to `processing` and out of it; does not know HTTP, nor the sweep that takes back what has
expired. Each claim makes a new lease id; a job is settled or renewed only by who can show worker id and lease id of its
live lease. A lease is live while its end is after now; at that instant it is over.

    the job                                          complete, fail, renew
    is unknown, or not assigned to this worker       404 NOT_FOUND
    is assigned to it and not processing             409 CONFLICT "already ..."
    has another lease id, or its lease is over       409 LEASE_EXPIRED
    else                                             200

Failing clears the assignment, completing keeps it: so a repeated complete hears "already completed", a repeated fail
404. Sources: POST /api/v1/jobs/claim, /jobs/{id}/complete, /fail, /heartbeat, /renew-lease, /progress.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from spooled_supervisor.devserver import history
from spooled_supervisor.devserver.database import Database, Row
from spooled_supervisor.devserver.errors import ApiError, already, lease_expired, not_found
from spooled_supervisor.devserver.queues import Queues

MAX_BACKOFF_EXPONENT = 6
MAX_BACKOFF_FACTOR = 60

_READY = """
SELECT jobs.seq, id, queue_name, retry_count, max_retries, timeout_seconds, payload
FROM jobs INDEXED BY jobs_to_claim JOIN payloads USING (seq)
WHERE queue_name = ? AND ready = 1 AND (expires_at IS NULL OR expires_at > ?)
ORDER BY priority DESC, created_at, jobs.seq LIMIT ?
"""
_CLAIM = """
UPDATE jobs SET status = 'processing', ready = 0, worker_id = ?, lease_id = ?, lease_expires_at = ?, started_at = ?,
    updated_at = ?, progress = NULL, progress_message = NULL
WHERE seq = ?
"""
_COMPLETE = """
UPDATE jobs SET status = 'completed', completed_at = :now, updated_at = :now WHERE seq = :seq
"""
_HELD = """
SELECT seq, id, queue_name, status, retry_count, max_retries, started_at, worker_id, lease_id, lease_expires_at
FROM jobs WHERE id = ?
"""
_FAIL = """
UPDATE jobs SET status = ?, retry_count = ?, due_at = ?, scheduled_at = ?, last_error = ?, worker_id = NULL,
    lease_id = NULL, lease_expires_at = NULL, updated_at = ?
WHERE seq = ?
"""


@dataclass(frozen=True)
class Holder:
    """Who asks, and the lease it shows. None where an older client sends neither: then that is not compared."""

    worker_id: str | None
    lease_id: str | None


@dataclass(frozen=True)
class Lease:
    """A job just claimed: its row with the payload, and the lease that was made for it."""

    row: Row
    lease_id: str
    expires_at: float


@dataclass(frozen=True)
class Failure:
    """What a failure led to: `pending` again after a back-off, or `deadletter`."""

    queue_name: str
    status: str
    retry_count: int

    @property
    def will_retry(self) -> bool:
        return self.status == "pending"


def refusal(row: Row | None, holder: Holder, now: float) -> ApiError | None:
    """Why this holder may not touch the job, by the table above; None if it may."""
    if row is None or row["worker_id"] is None or holder.worker_id not in (None, row["worker_id"]):
        return not_found()
    if row["status"] != "processing":
        return already(row["status"])
    if holder.lease_id not in (None, row["lease_id"]):
        return lease_expired("The lease_id does not match the job's current lease")
    if row["lease_expires_at"] <= now:
        return lease_expired("The job's lease expired")
    return None


def backoff_s(retry_count: int, base_s: float) -> float:
    """The wait after a failure; `retry_count` is that from before it."""
    return base_s * float(min(2 ** min(retry_count, MAX_BACKOFF_EXPONENT), MAX_BACKOFF_FACTOR))


class Leases:
    def __init__(self, db: Database, queues: Queues, retry_base_s: float) -> None:
        self._db = db
        self._queues = queues
        self._retry_base_s = retry_base_s

    def claim(
        self,
        queue_name: str,
        worker_id: str,
        limit: int,
        duration_s: int,
        now: float,
        *,
        fits: Callable[[Lease], bool] = lambda lease: True,
    ) -> list[Lease]:
        """Up to `limit` jobs by priority, then age. Empty for a queue that is paused, empty or unknown.

        `fits` is asked before a job is leased; the first that does not fit, and all after it, stay where they are.
        """
        if self._queues.is_paused(queue_name):
            return []
        self.promote_due(now)
        expires_at = now + duration_s
        ready = (Lease(row, str(uuid.uuid4()), expires_at) for row in self._db.all(_READY, (queue_name, now, limit)))
        leases = list(itertools.takewhile(fits, ready))
        if not leases:
            return []
        with self._db.transaction():
            self._db.execute_each(
                _CLAIM, [(worker_id, lease.lease_id, expires_at, now, now, lease.row["seq"]) for lease in leases]
            )
            self._db.execute_each(
                history.INSERT, [(lease.row["seq"], history.CLAIMED, worker_id, None, now) for lease in leases]
            )
        return leases

    def promote_due(self, now: float) -> None:
        """Make jobs ready whose time has come. The look before costs less than a write that changes nothing."""
        if self._db.value("SELECT 1 FROM jobs WHERE due_at <= ? LIMIT 1", (now,)):
            self._db.execute(
                "UPDATE jobs SET status = 'pending', ready = 1, due_at = NULL, updated_at = :now WHERE due_at <= :now",
                {"now": now},
            )

    def complete(self, job_id: str, holder: Holder, result: bytes | None, now: float) -> Row:
        """Returns what `_HELD` tells of the job, as it was while it ran."""
        row = self._held(job_id, holder, now)
        with self._db.transaction():
            self._db.execute(_COMPLETE, {"now": now, "seq": row["seq"]})
            if result is not None:
                self._db.execute("INSERT OR REPLACE INTO results (seq, result) VALUES (?, ?)", (row["seq"], result))
            self._count_for_worker("jobs_processed", row)
            history.record(self._db, row["seq"], history.COMPLETED, now, row["worker_id"])
        return row

    def fail(self, job_id: str, holder: Holder, error: str, may_retry: bool, now: float) -> Failure:
        row = self._held(job_id, holder, now)
        will_retry = may_retry and row["retry_count"] < row["max_retries"]
        status = "pending" if will_retry else "deadletter"
        retry_count = row["retry_count"] + will_retry
        due_at = now + backoff_s(row["retry_count"], self._retry_base_s) if will_retry else None
        with self._db.transaction():
            self._db.execute(_FAIL, (status, retry_count, due_at, due_at, error, now, row["seq"]))
            self._count_for_worker("jobs_failed", row)
            history.record(
                self._db, row["seq"], history.FAILED, now, row["worker_id"], error=error, will_retry=will_retry
            )
        return Failure(row["queue_name"], status, retry_count)

    def renew(self, job_id: str, holder: Holder, duration_s: int, now: float) -> float:
        """The new end: now plus the duration, whatever was left. The lease id stays."""
        row = self._held(job_id, holder, now)
        expires_at = now + duration_s
        self._db.execute("UPDATE jobs SET lease_expires_at = ? WHERE seq = ?", (expires_at, row["seq"]))
        return expires_at

    def report_progress(self, job_id: str, holder: Holder, percent: float, message: str | None, now: float) -> None:
        row = self._held(job_id, holder, now)
        self._db.execute(
            "UPDATE jobs SET progress = ?, progress_message = ? WHERE seq = ?", (percent, message, row["seq"])
        )

    def _held(self, job_id: str, holder: Holder, now: float) -> Row:
        row = self._db.first(_HELD, (job_id,))
        error = refusal(row, holder, now)
        if error is not None:
            raise error
        assert row is not None
        return row

    def _count_for_worker(self, counter: str, row: Row) -> None:
        self._db.execute(f"UPDATE workers SET {counter} = {counter} + 1 WHERE id = ?", (row["worker_id"],))
