"""What happened to a job, one row per fact, as GET /api/v1/jobs/{id}/history tells it.

Owns the names of the facts. Written inside the transaction of the change it tells about, so the two cannot disagree.
"""

from __future__ import annotations

from typing import Any

import msgspec

from spooled_supervisor.devserver.database import Database

CREATED = "created"
CLAIMED = "claimed"
COMPLETED = "completed"
FAILED = "failed"
LEASE_EXPIRED = "lease_expired"
WORKER_LOST = "worker_lost"
RETRIED = "retried"
CANCELLED = "cancelled"

INSERT = "INSERT INTO history (seq, event_type, worker_id, details, created_at) VALUES (?, ?, ?, ?, ?)"


def record(db: Database, seq: int, event_type: str, now: float, worker_id: str | None = None, **details: Any) -> None:
    db.execute(INSERT, (seq, event_type, worker_id, msgspec.json.encode(details) if details else None, now))
