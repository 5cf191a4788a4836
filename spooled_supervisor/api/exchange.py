"""One HTTP request with one total deadline, over a wire; what is said and heard it does not know.

deadline      asyncio.timeout around everything: name lookup, connect, TLS, waiting, a body that trickles
replay        a request that fails on a reused connection before it was answered is sent once more at once, because
              servers and proxies close idle connections when they like; unless the caller forbids it.
connections   as many as there are calls: an acknowledgement or a renewal never waits behind a claim. The
              supervisor bounds them itself: one claim per queue, one report and one renewal per job.
cancellation  cancelling closes the connection (the server may have carried the request out or not) and leaves the
              exchange usable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spooled_supervisor import timing
from spooled_supervisor.api import answers
from spooled_supervisor.api.answers import Answer
from spooled_supervisor.api.wire import Reply, WireError
from spooled_supervisor.errors import ApiUnavailable
from spooled_supervisor.events import ApiRequestFinished, Events

if TYPE_CHECKING:
    from spooled_supervisor.api.httpx_wire import Transport

MAX_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Received:
    """An answer. `body` is None where it is content-encoded, which was not asked for; `replay` if it was sent twice.

    `started_at` (`timing.now`) is when the request that was answered was started.
    """

    answer: Answer
    body: bytes | None
    started_at: float
    replay: bool


class _Stale(ApiUnavailable):
    """A reused connection turned out to be closed."""


class Exchange:
    """Sends requests to one service with its API key, and emits ApiRequestFinished for each that was not cancelled."""

    def __init__(
        self,
        base_url: str,
        api_key: Callable[[], str],
        events: Events,
        *,
        ca_file: Path | None,
        user_agent: str,
        transport: Transport | None,
    ) -> None:
        from spooled_supervisor.api import httpx_wire

        origin, self._prefix, host = httpx_wire.split_url(base_url)
        if transport is None:
            self._wire = httpx_wire.make_wire(origin, ca_file)
        else:
            self._wire = httpx_wire.HttpxWire(origin, transport)
        self._api_key = api_key
        self._secret = ""  # the key of the latest request, to keep it out of messages
        self._events = events
        self._head = b"".join(
            b"%b: %b\r\n" % line
            for line in (
                (b"Host", host),
                (b"User-Agent", user_agent.encode("ascii", "replace")),
                (b"Accept", b"application/json"),
                (b"Accept-Encoding", b"identity"),
                (b"Content-Type", b"application/json"),
            )
        )

    async def aclose(self) -> None:
        """Close all connections; requests that are still out fail."""
        await self._wire.aclose()

    async def post(
        self,
        operation: str,
        path: str,
        body: bytes,
        deadline: float,
        *,
        may_replay: bool = True,
        most_bytes: int = MAX_ANSWER_BYTES,
    ) -> Received:
        """`POST {base}/api/v1{path}` once (see `replay` above). Raises ApiUnavailable where there is no HTTP answer."""
        try:
            return await self._send(operation, path, body, deadline, most_bytes, replay=False)
        except _Stale:
            if not may_replay:
                raise
        return await self._send(operation, path, body, deadline, most_bytes, replay=True)

    async def _send(
        self, operation: str, path: str, body: bytes, deadline: float, most_bytes: int, *, replay: bool
    ) -> Received:
        headers = b"%bAuthorization: %b\r\nContent-Length: %d\r\n" % (self._head, self._authorization(), len(body))
        started_at = timing.now()
        if started_at >= deadline:
            raise ApiUnavailable("no time was left to send the request")
        status = "error"
        try:
            async with asyncio.timeout(deadline - started_at):
                reply = await self._wire.send(self._prefix + path, headers, body, most_bytes)
            status = str(reply.status)
        except TimeoutError as error:
            status = "timeout"
            raise ApiUnavailable("no answer in time") from error  # without a number, so that an outage has one reason
        except WireError as error:
            status = status if error.status is None else str(error.status)
            raise (_Stale if error.is_stale else ApiUnavailable)(answers.masked(str(error), self._secret)) from error
        except asyncio.CancelledError:
            status = ""
            raise
        finally:
            if status:
                self._events.emit(ApiRequestFinished(operation, status, timing.now() - started_at))
        return self._received(reply, started_at, replay)

    def _authorization(self) -> bytes:
        try:
            key = self._api_key().strip()
        except OSError as error:
            raise ApiUnavailable(f"the API key cannot be read: {error}") from error
        if not (key.isascii() and key.isprintable() and key and " " not in key):
            raise ApiUnavailable("the API key is empty, or has characters that no HTTP header can carry")
        self._secret = key
        return b"Bearer " + key.encode("ascii")

    def _received(self, reply: Reply, started_at: float, replay: bool) -> Received:
        header, content = reply.headers.get, reply.body
        if not content.startswith(b"{"):  # not of the service: its beginning may end in a log
            content = content.replace(self._secret.encode(), b"***")
        body = content if header("content-encoding", "identity").strip().lower() == "identity" else None
        answer = answers.facts(
            reply.status,
            body,
            retry_after=header("retry-after"),
            date=header("date"),
            location=header("location"),
            secret=self._secret,
        )
        return Received(answer, body, started_at, replay)
