"""Workers: registrations and their heartbeats.

Owns the table `workers`. Registration is for watching only: a claim is never checked against it. A worker that stays
silent is retired by the sweeps, and comes back with its next heartbeat. Sources: /api/v1/workers and below.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from spooled_supervisor.devserver.database import Database, Row
from spooled_supervisor.devserver.errors import not_found

STATUSES = frozenset({"healthy", "degraded", "draining", "offline"})
LIST_LIMIT = 100

_REGISTER = """
INSERT INTO workers (id, queue_name, queue_names, hostname, worker_type, version, max_concurrency, status, metadata,
    registered_at, last_heartbeat, updated_at)
VALUES (?, ?, ?, ?, ?, ?, ?, 'healthy', ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET queue_name = excluded.queue_name, queue_names = excluded.queue_names,
    hostname = excluded.hostname, worker_type = excluded.worker_type, version = excluded.version,
    max_concurrency = excluded.max_concurrency, status = 'healthy', metadata = excluded.metadata,
    last_heartbeat = excluded.last_heartbeat, updated_at = excluded.updated_at
"""
_HEARTBEAT = """
UPDATE workers SET status = ?, current_jobs = ?, metadata = coalesce(?, metadata), last_heartbeat = ?,
    updated_at = ?
WHERE id = ?
"""


@dataclass(frozen=True)
class Registration:
    """A registration, checked already; `metadata` is JSON text."""

    worker_id: str
    queue_names: list[str]
    hostname: str
    worker_type: str | None
    version: str | None
    max_concurrency: int
    metadata: bytes | None


class Workers:
    def __init__(self, db: Database) -> None:
        self._db = db

    def register(self, new: Registration, now: float) -> Row:
        """Make or overwrite the worker; it is healthy then, and keeps the time of its first registration."""
        names = msgspec.json.encode(new.queue_names)
        values = (new.worker_id, new.queue_names[0], names, new.hostname, new.worker_type, new.version)
        self._db.execute(_REGISTER, (*values, new.max_concurrency, new.metadata, now, now, now))
        return self.get(new.worker_id)

    def heartbeat(self, worker_id: str, status: str, current_jobs: int, metadata: bytes | None, now: float) -> None:
        """Overwrites the status, `draining` too; metadata stays if none is sent."""
        if not self._db.execute(_HEARTBEAT, (status, current_jobs, metadata, now, now, worker_id)).rowcount:
            raise not_found()

    def deregister(self, worker_id: str, now: float) -> None:
        """The worker is offline; what it holds stays with it until the leases end. Twice is once."""
        sql = "UPDATE workers SET status = 'offline', current_jobs = 0, updated_at = ? WHERE id = ?"
        if not self._db.execute(sql, (now, worker_id)).rowcount:
            raise not_found()

    def get(self, worker_id: str) -> Row:
        row = self._db.first("SELECT * FROM workers WHERE id = ?", (worker_id,))
        if row is None:
            raise not_found()
        return row

    def all(self) -> list[Row]:
        """The latest heartbeat first."""
        return self._db.all("SELECT * FROM workers ORDER BY last_heartbeat DESC LIMIT ?", (LIST_LIMIT,))
