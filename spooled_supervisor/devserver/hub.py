"""Event streams: who listens, and what each of them is sent.

Owns the subscriptions and the bytes of the stream; does not know who publishes. Publishing never waits: a listener that
does not keep up loses its oldest events, as there is no replay in this protocol anyway.

    frame     b": connected\\n\\n" first, then one per event or keep-alive
    event     b"event: <dotted name>\\ndata: {"type": <PascalCase>, "data": {...}}\\n\\n", the data on one line
    comment   b": ping\\n\\n" after a quiet interval

Source: GET /api/v1/events; HTML standard, server-sent events.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from spooled_supervisor.devserver.errors import ApiError
from spooled_supervisor.devserver.shapes import rfc3339

MAX_STREAMS = 100
MAX_BACKLOG = 1000
MAX_STREAM_AGE_S = 30 * 60

CONNECTED = b": connected\n\n"
PING = b": ping\n\n"


class EventKind(Enum):
    """Dotted name of the stream's `event:` line; the value's second half is the `type` in the data."""

    JOB_CREATED = ("job.created", "JobCreated")
    JOB_STATUS = ("job.status", "JobStatusChange")
    JOB_COMPLETED = ("job.completed", "JobCompleted")
    JOB_FAILED = ("job.failed", "JobFailed")
    SYSTEM_HEALTH = ("system.health", "SystemHealth")


@dataclass(frozen=True)
class EventFilter:
    """What a listener asked for; None is everything. Health is not about a queue or job, so only names silence it."""

    queue_name: str | None = None
    job_id: str | None = None
    names: frozenset[str] | None = None

    def wants(self, kind: EventKind, data: dict[str, Any]) -> bool:
        if self.names is not None and kind.value[0] not in self.names:
            return False
        if kind is EventKind.SYSTEM_HEALTH:
            return True
        return self.queue_name in (None, data.get("queue_name")) and self.job_id in (None, data.get("job_id"))


class Subscription:
    """One listener's backlog: written by `EventHub.publish`, read by its stream."""

    def __init__(self, wanted: EventFilter) -> None:
        self.wanted = wanted
        self.frames: deque[bytes] = deque(maxlen=MAX_BACKLOG)
        self.stirred = asyncio.Event()

    def put(self, frame: bytes) -> None:
        self.frames.append(frame)
        self.stirred.set()


class EventHub:
    """All subscriptions. After `close` every stream ends and new ones end at once."""

    def __init__(self, ping_s: float, health_s: float) -> None:
        self._ping_s = ping_s
        self._health_s = health_s
        self._subscriptions: set[Subscription] = set()
        self._is_closed = False

    def publish(self, kind: EventKind, now: float, **data: Any) -> None:
        if self._subscriptions:
            frame: bytes | None = None
            for subscription in self._subscriptions:
                if subscription.wanted.wants(kind, data):
                    frame = frame or encode_frame(kind, now, data)
                    subscription.put(frame)

    def subscribe(self, wanted: EventFilter) -> Subscription:
        if len(self._subscriptions) >= MAX_STREAMS:
            raise ApiError(429, f"More than {MAX_STREAMS} event streams")
        subscription = Subscription(wanted)
        self._subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)

    def close(self) -> None:
        self._is_closed = True
        for subscription in self._subscriptions:
            subscription.stirred.set()

    async def stream(self, subscription: Subscription, now_at_start: float) -> AsyncIterator[bytes]:
        """Frames until the hub closes or the stream is too old. Cancel-safe: the listener has gone."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        next_ping, next_health = started + self._ping_s, started + self._health_s
        yield CONNECTED
        while not self._is_closed and loop.time() - started < MAX_STREAM_AGE_S:
            if subscription.frames:
                yield subscription.frames.popleft()
                next_ping = loop.time() + self._ping_s
                continue
            subscription.stirred.clear()
            await _wait_until(subscription.stirred, min(next_ping, next_health))
            if loop.time() >= next_ping:
                yield PING
                next_ping = loop.time() + self._ping_s
            if loop.time() >= next_health:
                next_health += self._health_s
                self._put_health(subscription, now_at_start + loop.time() - started)

    def _put_health(self, subscription: Subscription, now: float) -> None:
        data = {"database": True, "redis": True}
        if subscription.wanted.wants(EventKind.SYSTEM_HEALTH, data):
            subscription.put(encode_frame(EventKind.SYSTEM_HEALTH, now, data))


def encode_frame(kind: EventKind, now: float, data: dict[str, Any]) -> bytes:
    name, type_name = kind.value
    body = msgspec.json.encode({"type": type_name, "data": {**data, "timestamp": rfc3339(now)}})
    # A stored result may have line breaks between its tokens; inside strings JSON has none, so spaces mean the same.
    one_line = body.replace(b"\r", b" ").replace(b"\n", b" ")
    return b"event: " + name.encode() + b"\ndata: " + one_line + b"\n\n"


async def _wait_until(event: asyncio.Event, deadline: float) -> None:
    try:
        async with asyncio.timeout_at(deadline):
            await event.wait()
    except TimeoutError:
        pass  # the deadline is one of the two things waited for
