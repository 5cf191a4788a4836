"""Queues for operators: list, inspect, configure, pause, resume, delete.

Owns field names, limits and answers of /api/v1/queues. Pausing takes an optional body and, like the service, refuses an
empty one that claims to be JSON; resuming takes none and does not look.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spooled_supervisor.devserver import shapes
from spooled_supervisor.devserver.errors import broken_rule
from spooled_supervisor.devserver.routes_job import MAX_RETRIES, MAX_TIMEOUT_S
from spooled_supervisor.devserver.services import Services
from spooled_supervisor.devserver.shapes import json_response
from spooled_supervisor.devserver.validation import (
    MAX_QUEUE_NAME,
    QUEUE_NAME,
    Fields,
    read_fields,
    read_optional_fields,
)

MAX_REASON = 1000
MAX_RATE = 1_000_000


class QueueRoutes:
    def __init__(self, services: Services) -> None:
        self._clock = services.clock
        self._queues = services.queues

    def routes(self) -> list[Route]:
        return [
            Route("/queues", self.list_all, methods=["GET"]),
            Route("/queues/{name}", self.get, methods=["GET"]),
            Route("/queues/{name}", self.delete, methods=["DELETE"]),
            Route("/queues/{name}/config", self.configure, methods=["PUT"]),
            Route("/queues/{name}/stats", self.stats, methods=["GET"]),
            Route("/queues/{name}/pause", self.pause, methods=["POST"]),
            Route("/queues/{name}/resume", self.resume, methods=["POST"]),
        ]

    async def list_all(self, _request: Request) -> Response:
        return json_response([shapes.queue_summary(row) for row in self._queues.all()])

    async def get(self, request: Request) -> Response:
        return json_response(shapes.queue(self._queues.get(request.path_params["name"])))

    async def configure(self, request: Request) -> Response:
        """→ 200 with the queue; what is left out stays as it is."""
        name = request.path_params["name"]
        if not (len(name) <= MAX_QUEUE_NAME and QUEUE_NAME.fullmatch(name)):
            raise broken_rule("queue_name", "queue_name contains characters that are not allowed", "invalid_characters")
        fields = await read_fields(request)
        changes, settings = _changes(fields)
        return json_response(shapes.queue(self._queues.configure(name, changes, settings, self._clock())))

    async def stats(self, request: Request) -> Response:
        return json_response(self._queues.stats(request.path_params["name"], self._clock()))

    async def pause(self, request: Request) -> Response:
        """→ 200 `{"queue_name", "paused": true, "paused_at", "reason"}`; nothing is claimed until it is resumed."""
        fields = await read_optional_fields(request, empty_json_allowed=False)
        reason = fields.text("reason", low=0, high=MAX_REASON)
        fields.check()
        row = self._queues.pause(request.path_params["name"], self._clock())
        paused_at = shapes.rfc3339(row["paused_at"])
        return json_response(
            {"queue_name": row["queue_name"], "paused": True, "paused_at": paused_at, "reason": reason}
        )

    async def resume(self, request: Request) -> Response:
        name = request.path_params["name"]
        paused_s = self._queues.resume(name, self._clock())
        return json_response({"queue_name": name, "resumed": True, "paused_duration_secs": int(paused_s)})

    async def delete(self, request: Request) -> Response:
        """→ 204; 409 while jobs wait or run, unless `delete_jobs=true`."""
        delete_jobs = request.query_params.get("delete_jobs", "").lower() == "true"
        self._queues.delete(request.path_params["name"], delete_jobs=delete_jobs)
        return Response(status_code=204)


def _changes(fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    given = {
        "max_retries": fields.whole("max_retries", low=0, high=MAX_RETRIES),
        "default_timeout": fields.whole("default_timeout", low=1, high=MAX_TIMEOUT_S),
        "rate_limit": fields.whole("rate_limit", low=1, high=MAX_RATE),
        "enabled": fields.flag("enabled"),
    }
    settings = fields.value("settings")
    fields.check()
    if settings is not None and not isinstance(settings, dict):
        raise broken_rule("settings", "settings must be an object", "invalid_value")
    return {name: value for name, value in given.items() if value is not None}, settings or {}
