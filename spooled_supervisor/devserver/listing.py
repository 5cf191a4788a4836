"""Reading many jobs: lists with filters, counts, statuses, histories.

Owns the filters of GET /api/v1/jobs and /jobs/dlq; changes nothing. Filters that make no sense are ignored, as the
service does, and limits are brought into their range. Lists are newest first and ask for one row more than the page, to
know whether another follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spooled_supervisor.devserver.database import Database, Row
from spooled_supervisor.devserver.errors import not_found
from spooled_supervisor.devserver.validation import parse_instant

STATUSES = ("pending", "scheduled", "processing", "completed", "failed", "deadletter", "cancelled")

DEFAULT_PAGE = 50
MAX_PAGE = 100
DEFAULT_HISTORY_PAGE = 100
MAX_HISTORY_PAGE = 500

_ORDERS = {"created_at", "updated_at", "scheduled_at", "priority", "status", "queue_name"}
_SEARCH = "(substr(id, 1, length(?)) = ? OR instr(lower(queue_name), ?) OR instr(lower(job_type), ?))"
_HAS_TAG = """EXISTS (SELECT 1 FROM json_each(CAST(tags AS TEXT))
    WHERE ? = CASE json_type(CAST(tags AS TEXT)) WHEN 'array' THEN value ELSE key END)"""


class Listing:
    def __init__(self, db: Database) -> None:
        self._db = db

    def page(self, query: Mapping[str, str], statuses: list[str]) -> tuple[list[Row], bool]:
        """The rows of one page, and whether another follows. No statuses means all of them."""
        conditions, values = _conditions(query, statuses)
        where = f"WHERE {' AND '.join(conditions)} " if conditions else ""
        limit, offset = _page(query, DEFAULT_PAGE, MAX_PAGE)
        order = f"ORDER BY {_order(query)} LIMIT ? OFFSET ?"
        rows = self._db.all(f"SELECT * FROM jobs {where}{order}", (*values, limit + 1, offset))
        return rows[:limit], len(rows) > limit

    def counts(self, queue_name: str | None) -> dict[str, int]:
        """GET /api/v1/jobs/stats → jobs by status, and `total`."""
        rows = self._db.all(
            "SELECT status, count(*) FROM jobs WHERE :queue IS NULL OR queue_name = :queue GROUP BY status",
            {"queue": queue_name},
        )
        counts = dict.fromkeys(STATUSES, 0) | {row[0]: row[1] for row in rows}
        return {**counts, "total": sum(counts.values())}

    def statuses(self, job_ids: list[str]) -> list[Row]:
        """Unknown ids are left out."""
        marks = ", ".join("?" * len(job_ids))
        return self._db.all(f"SELECT * FROM jobs WHERE id IN ({marks})", job_ids)

    def history(self, job_id: str, query: Mapping[str, str]) -> tuple[list[Row], bool]:
        """One page of what happened to a job, oldest first unless `order_dir=desc`, and whether another follows."""
        seq = self._db.value("SELECT seq FROM jobs WHERE id = ?", (job_id,))
        if seq is None:
            raise not_found()
        limit, offset = _page(query, DEFAULT_HISTORY_PAGE, MAX_HISTORY_PAGE)
        direction = "DESC" if query.get("order_dir") == "desc" else "ASC"
        rows = self._db.all(
            f"SELECT * FROM history WHERE seq = ? ORDER BY id {direction} LIMIT ? OFFSET ?", (seq, limit + 1, offset)
        )
        return rows[:limit], len(rows) > limit


def known_statuses(query: Mapping[str, str]) -> list[str]:
    """The statuses in a comma list that exist."""
    return [name for part in query.get("status", "").split(",") if (name := part.strip()) in STATUSES]


def _conditions(query: Mapping[str, str], statuses: list[str]) -> tuple[list[str], list[Any]]:
    conditions: list[str] = []
    values: list[Any] = []

    def add(condition: str, *parameters: Any) -> None:
        conditions.append(condition)
        values.extend(parameters)

    if queue_name := query.get("queue_name") or query.get("queue"):
        add("queue_name = ?", queue_name)
    if statuses:
        add(f"status IN ({', '.join('?' * len(statuses))})", *statuses)
    if text := query.get("q", "").lower():
        add(_SEARCH, text, text, text, text)
    if job_type := query.get("job_type"):
        add("job_type = ?", job_type)
    if (after := parse_instant(query.get("created_after", ""))) is not None:
        add("created_at >= ?", after)
    if (before := parse_instant(query.get("created_before", ""))) is not None:
        add("created_at < ?", before)
    if tag := query.get("tag"):
        add(_HAS_TAG, tag)
    return conditions, values


def _order(query: Mapping[str, str]) -> str:
    column = query.get("order_by", "")
    column = column if column in _ORDERS else "created_at"
    direction = "ASC" if query.get("order_dir") == "asc" else "DESC"
    return f"{column} {direction}, seq {direction}"


def _page(query: Mapping[str, str], default: int, most: int) -> tuple[int, int]:
    """Limit and offset, brought into range."""
    limit = _number(query.get("limit"), default)
    return max(1, min(limit, most)), max(0, _number(query.get("offset"), 0))


def _number(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isdecimal() and len(text) < 10 else default
