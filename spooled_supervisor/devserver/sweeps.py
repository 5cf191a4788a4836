"""What the server does by itself as time passes.

Owns the periodic work and its intervals; each sweep is a plain method that takes `now`, the loops only call them.
Jobs are taken back without a back-off and without an event, as by the service's scheduler. A job taken back after its
last attempt is dead and keeps the worker's name, so that a late outcome hears "already deadletter" instead of 404.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from spooled_supervisor.devserver import history
from spooled_supervisor.devserver.config import ServerConfig
from spooled_supervisor.devserver.database import Database, DatabaseFault, Row
from spooled_supervisor.devserver.leases import Leases

_LOG = logging.getLogger(__name__)

_REQUEUE = """
UPDATE jobs SET status = 'pending', ready = 1, retry_count = retry_count + 1, last_error = ?, scheduled_at = NULL,
    worker_id = NULL, lease_id = NULL, lease_expires_at = NULL, updated_at = ?
WHERE seq = ?
"""
_BURY = """
UPDATE jobs SET status = 'deadletter', last_error = ?, lease_id = NULL, lease_expires_at = NULL, updated_at = ?
WHERE seq = ?
"""
_RELEASE_CHILDREN = """
UPDATE jobs SET dependencies_met = 1, ready = coalesce(scheduled_at, 0) <= :now,
    status = CASE WHEN scheduled_at > :now THEN 'scheduled' ELSE 'pending' END,
    due_at = CASE WHEN scheduled_at > :now THEN scheduled_at END, updated_at = :now
WHERE dependencies_met = 0 AND status IN ('pending', 'scheduled')
    AND parent_job_id IN (SELECT id FROM jobs WHERE status = 'completed')
"""
_ORPHANS = """
SELECT seq FROM jobs WHERE dependencies_met = 0 AND status IN ('pending', 'scheduled') AND parent_job_id NOT IN
    (SELECT id FROM jobs WHERE status NOT IN ('failed', 'deadletter', 'cancelled'))
"""


class Sweeps:
    def __init__(self, db: Database, leases: Leases, config: ServerConfig, clock: Callable[[], float]) -> None:
        self._db = db
        self._leases = leases
        self._config = config
        self._clock = clock

    async def run(self) -> None:
        """Sweep until cancelled. Cancel-safe: a sweep does not await."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._every(self._config.lease_recovery_interval_s, self.recover))
            tasks.create_task(self._every(self._config.scheduled_activation_s, self._leases.promote_due))
            tasks.create_task(self._every(self._config.cleanup_interval_s, self.clean_up))

    def recover(self, now: float) -> None:
        """Everything that is due on the lease-recovery interval."""
        self.take_back_expired_leases(now)
        self.retire_silent_workers(now)
        self.settle_dependencies(now)

    def take_back_expired_leases(self, now: float) -> None:
        rows = self._db.all("SELECT * FROM jobs WHERE status = 'processing' AND lease_expires_at <= ?", (now,))
        self._take_back(rows, "Lease expired", history.LEASE_EXPIRED, now)

    def retire_silent_workers(self, now: float) -> None:
        """Silent workers turn degraded, then offline; an offline one loses its jobs even if their leases live.

        The jobs come first: a worker that is offline is not looked at again, should taking them back fail.
        """
        self._db.execute(
            "UPDATE workers SET status = 'degraded', updated_at = ? WHERE status = 'healthy' AND last_heartbeat <= ?",
            (now, now - self._config.worker_degraded_s),
        )
        silent_since = now - self._config.worker_offline_s
        silent = self._db.all(
            "SELECT id FROM workers WHERE status != 'offline' AND last_heartbeat <= ?", (silent_since,)
        )
        for worker in silent:
            jobs = self._db.all("SELECT * FROM jobs WHERE status = 'processing' AND worker_id = ?", (worker["id"],))
            self._take_back(jobs, "Worker went offline", history.WORKER_LOST, now)
            self._db.execute("UPDATE workers SET status = 'offline', updated_at = ? WHERE id = ?", (now, worker["id"]))

    def settle_dependencies(self, now: float) -> None:
        """Release the children of completed jobs, cancel those of jobs that will never complete."""
        if not self._db.value(
            "SELECT 1 FROM jobs WHERE dependencies_met = 0 AND status IN ('pending', 'scheduled') LIMIT 1"
        ):
            return
        with self._db.transaction():
            self._db.execute(_RELEASE_CHILDREN, {"now": now})
            for row in self._db.all(_ORPHANS):
                self._db.execute(
                    "UPDATE jobs SET status = 'cancelled', updated_at = ? WHERE seq = ?", (now, row["seq"])
                )
                history.record(self._db, row["seq"], history.CANCELLED, now, reason="parent failed")

    def clean_up(self, now: float) -> None:
        """Delete jobs whose `expires_at` has passed before they ran, and revoked tokens that nobody could use."""
        self._db.execute(
            "DELETE FROM jobs WHERE expires_at <= ? AND status IN ('pending', 'scheduled', 'failed', 'deadletter')",
            (now,),
        )
        self._db.execute("DELETE FROM revoked_tokens WHERE expires_at <= ?", (now,))

    def _take_back(self, rows: list[Row], error: str, event_type: str, now: float) -> None:
        if not rows:
            return
        with self._db.transaction():
            for row in rows:
                statement = _REQUEUE if row["retry_count"] < row["max_retries"] else _BURY
                self._db.execute(statement, (error, now, row["seq"]))
                history.record(self._db, row["seq"], event_type, now, row["worker_id"])

    async def _every(self, interval_s: float, sweep: Callable[[float], None]) -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                sweep(self._clock())
            except DatabaseFault:
                _LOG.exception("%s failed; it will be tried again", sweep.__name__)
