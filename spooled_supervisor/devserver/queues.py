"""Queues: their settings, their pause, their figures.

Owns the table `queues`. A queue is *explicit* with a row here, *implicit* while it only has jobs; an implicit one has
the default settings and becomes explicit when something is set or it is paused. Paused is `enabled` false: nothing is
claimed, what runs may renew and settle. Sources: /api/v1/queues and below.
"""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from spooled_supervisor.devserver.database import Database, Row
from spooled_supervisor.devserver.errors import conflict, not_found

DEFAULT_MAX_RETRIES = 3
DEFAULT_TIMEOUT_S = 300
DAY_S = 86400

_IMPLICIT = f"""
SELECT 'implicit:' || queue_name AS id, queue_name, {DEFAULT_MAX_RETRIES} AS max_retries,
    {DEFAULT_TIMEOUT_S} AS default_timeout, NULL AS rate_limit, 1 AS enabled, CAST('{{}}' AS BLOB) AS settings,
    NULL AS paused_at, min(created_at) AS created_at, max(updated_at) AS updated_at
FROM jobs WHERE queue_name NOT IN (SELECT queue_name FROM queues)
"""
_COLUMNS = (
    "id, queue_name, max_retries, default_timeout, rate_limit, enabled, settings, paused_at, created_at, updated_at"
)
_UPSERT = f"""
INSERT INTO queues ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (queue_name) DO UPDATE SET max_retries = excluded.max_retries, default_timeout = excluded.default_timeout,
    rate_limit = excluded.rate_limit, enabled = excluded.enabled, settings = excluded.settings,
    paused_at = excluded.paused_at, updated_at = excluded.updated_at
"""
_STATS = """
SELECT
    (SELECT count(*) FROM jobs WHERE queue_name = :queue AND status IN ('pending', 'scheduled')) AS pending_jobs,
    (SELECT count(*) FROM jobs WHERE queue_name = :queue AND status = 'processing') AS processing_jobs,
    (SELECT count(*) FROM jobs WHERE queue_name = :queue AND status = 'completed' AND completed_at > :since)
        AS completed_jobs_24h,
    (SELECT count(*) FROM jobs WHERE queue_name = :queue AND status IN ('failed', 'deadletter') AND updated_at > :since)
        AS failed_jobs_24h,
    (SELECT avg(completed_at - started_at) * 1000 FROM jobs
        WHERE queue_name = :queue AND status = 'completed' AND completed_at > :since) AS avg_processing_time_ms,
    (SELECT CAST(:now - min(created_at) AS INTEGER) FROM jobs WHERE queue_name = :queue AND status = 'pending')
        AS max_job_age_seconds,
    (SELECT count(*) FROM workers WHERE status IN ('healthy', 'degraded') AND :queue IN
        (SELECT value FROM json_each(CAST(queue_names AS TEXT)))) AS active_workers
"""


class Queues:
    def __init__(self, db: Database) -> None:
        self._db = db

    def is_paused(self, queue_name: str) -> bool:
        enabled: int | None = self._db.value("SELECT enabled FROM queues WHERE queue_name = ?", (queue_name,))
        return enabled == 0

    def defaults(self, queue_name: str) -> tuple[int, int]:
        """Retries and timeout (s) for a job that names none."""
        row = self._db.first("SELECT max_retries, default_timeout FROM queues WHERE queue_name = ?", (queue_name,))
        return (DEFAULT_MAX_RETRIES, DEFAULT_TIMEOUT_S) if row is None else (row[0], row[1])

    def all(self) -> list[Row]:
        implicit = f"{_IMPLICIT} GROUP BY queue_name"
        return self._db.all(f"SELECT {_COLUMNS} FROM queues UNION ALL SELECT * FROM ({implicit}) ORDER BY queue_name")

    def get(self, queue_name: str) -> Row:
        row = self._explicit(queue_name) or self._implicit(queue_name)
        if row is None:
            raise not_found()
        return row

    def configure(self, queue_name: str, changes: dict[str, Any], settings: dict[str, Any], now: float) -> Row:
        """Set what is given, keep the rest, merge `settings` key by key; makes the queue if need be."""
        old = self._explicit(queue_name)
        values = {
            "max_retries": DEFAULT_MAX_RETRIES,
            "default_timeout": DEFAULT_TIMEOUT_S,
            "rate_limit": None,
            "enabled": True,
            "paused_at": None,
            **({} if old is None else {key: old[key] for key in _SETTABLE}),
            **changes,
        }
        merged = {**({} if old is None else msgspec.json.decode(old["settings"])), **settings}
        self._db.execute(
            _UPSERT,
            (
                str(uuid.uuid4()) if old is None else old["id"],
                queue_name,
                values["max_retries"],
                values["default_timeout"],
                values["rate_limit"],
                values["enabled"],
                msgspec.json.encode(merged),
                values["paused_at"],
                now if old is None else old["created_at"],
                now,
            ),
        )
        return self.get(queue_name)

    def pause(self, queue_name: str, now: float) -> Row:
        self.get(queue_name)  # 404 for a queue that has neither a row nor jobs
        return self.configure(queue_name, {"enabled": False, "paused_at": now}, {}, now)

    def resume(self, queue_name: str, now: float) -> float:
        """Returns how long (s) the queue was paused; 404 without a row."""
        row = self._explicit(queue_name)
        if row is None:
            raise not_found()
        self.configure(queue_name, {"enabled": True, "paused_at": None}, {}, now)
        return 0.0 if row["paused_at"] is None else now - float(row["paused_at"])

    def delete(self, queue_name: str, *, delete_jobs: bool) -> None:
        """Forget the settings, and with `delete_jobs` the jobs, running ones included (their outcome then gets 404)."""
        row = self.get(queue_name)
        if not delete_jobs and self._is_busy(queue_name):
            raise conflict("The queue has jobs that are waiting or running")
        if not delete_jobs and row["id"].startswith("implicit:"):
            raise conflict("The queue exists only through its jobs")
        with self._db.transaction():
            self._db.execute("DELETE FROM queues WHERE queue_name = ?", (queue_name,))
            if delete_jobs:
                self._db.execute("DELETE FROM jobs WHERE queue_name = ?", (queue_name,))

    def stats(self, queue_name: str, now: float) -> dict[str, Any]:
        """GET /api/v1/queues/{name}/stats; zeros for a queue that nobody has used."""
        row = self._db.first(_STATS, {"queue": queue_name, "since": now - DAY_S, "now": now})
        assert row is not None
        return {"queue_name": queue_name, **dict(row)}

    def _is_busy(self, queue_name: str) -> bool:
        sql = "SELECT 1 FROM jobs WHERE queue_name = ? AND status IN ('pending', 'scheduled', 'processing') LIMIT 1"
        return self._db.value(sql, (queue_name,)) is not None

    def _explicit(self, queue_name: str) -> Row | None:
        return self._db.first(f"SELECT {_COLUMNS} FROM queues WHERE queue_name = ?", (queue_name,))

    def _implicit(self, queue_name: str) -> Row | None:
        return self._db.first(f"{_IMPLICIT} AND queue_name = ? GROUP BY queue_name", (queue_name,))


_SETTABLE = ("max_retries", "default_timeout", "rate_limit", "enabled", "paused_at")
