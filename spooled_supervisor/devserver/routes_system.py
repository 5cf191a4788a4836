"""Health and the event stream.

Owns the filters of GET /api/v1/events and the health paths, which are outside the prefix and open to everybody.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from spooled_supervisor.devserver.errors import broken_rule
from spooled_supervisor.devserver.hub import EventFilter, Subscription
from spooled_supervisor.devserver.services import Services
from spooled_supervisor.devserver.shapes import json_response
from spooled_supervisor.devserver.validation import QUEUE_NAME


class SystemRoutes:
    def __init__(self, services: Services) -> None:
        self._clock = services.clock
        self._db = services.db
        self._hub = services.hub

    def event_routes(self) -> list[Route]:
        return [Route("/events", self.events, methods=["GET"])]

    def health_routes(self) -> list[Route]:
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/health/live", self.live, methods=["GET"]),
            Route("/health/ready", self.ready, methods=["GET"]),
        ]

    async def events(self, request: Request) -> Response:
        """→ 200 text/event-stream, until the listener leaves, the server stops or the stream is too old."""
        wanted = _event_filter(request.query_params)
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        if request.method == "HEAD":
            return Response(headers=headers, media_type="text/event-stream")
        subscription = self._hub.subscribe(wanted)
        return StreamingResponse(self._frames(subscription), headers=headers, media_type="text/event-stream")

    async def health(self, _request: Request) -> Response:
        is_usable = self._db.is_usable()
        body = {"status": "healthy" if is_usable else "unhealthy", "database": is_usable, "cache": True}
        return json_response(body, 200 if is_usable else 503)

    async def live(self, _request: Request) -> Response:
        return Response()

    async def ready(self, _request: Request) -> Response:
        return Response(status_code=200 if self._db.is_usable() else 503)

    async def _frames(self, subscription: Subscription) -> AsyncIterator[bytes]:
        try:
            async for frame in self._hub.stream(subscription, self._clock()):
                yield frame
        finally:
            self._hub.unsubscribe(subscription)


def _event_filter(query: Mapping[str, str]) -> EventFilter:
    queue_name = query.get("queue") or None
    if queue_name is not None and not QUEUE_NAME.fullmatch(queue_name):
        raise broken_rule("queue", "queue contains characters that are not allowed", "invalid_characters")
    names = [name.strip() for name in query.get("events", "").split(",") if name.strip()]
    return EventFilter(queue_name, query.get("job_id") or None, frozenset(names) if names else None)
