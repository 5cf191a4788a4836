"""The HTTP listener: metrics, health and status, read-only, on the supervisor's own loop.

    /metrics      Prometheus, text format or OpenMetrics by the Accept header
    /health       200 when healthy, else 503: status, worker_id, current_jobs, uptime_seconds and what is behind them
    /livez        200 while the loop turns; it knows nothing of the service, as a restart would not bring that back
    /readyz       200 when a job would be taken now, else 503 with the reasons
    /status.json  the whole snapshot
    /             a page for people that shows it and refreshes itself

It runs on the loop that it reports about, so that a dead loop cannot look alive. It answers from a snapshot without
awaiting anything, keeps no state between requests and logs none of them. Who opens connections and leaves them is
bounded in number and time.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable
from ipaddress import ip_address
from types import TracebackType

from spooled_supervisor.errors import ConfigError
from spooled_supervisor.telemetry.exchange import (
    BadRequest,
    Request,
    Response,
    failure,
    is_local_name,
    json_response,
    read_request,
)
from spooled_supervisor.telemetry.logs import EventLog, StandardLog
from spooled_supervisor.telemetry.metrics import Metrics
from spooled_supervisor.telemetry.page import status_page
from spooled_supervisor.telemetry.snapshot import STARTING, Snapshot

MAX_CONNECTIONS = 64
READ_TIMEOUT_S = 5.0
"""From the connection to the end of the request's head, however many bytes come in between."""
WRITE_TIMEOUT_S = 5.0
"""From the answer until the client has it and has closed its side."""

Route = Callable[[Request], Response]


class Endpoints:
    """Listens while it is entered. `routes` maps paths to functions; add to it freely, they must not block."""

    def __init__(
        self, host: str, port: int, *, snapshot: Callable[[], Snapshot], metrics: Metrics, log: EventLog | StandardLog
    ) -> None:
        self.port = port  # the real one while entered, also where 0 was asked for
        self.routes: dict[str, Route] = {
            "/": lambda request: status_page(),
            "/metrics": self._metrics_page,
            "/health": self._health,
            "/livez": _livez,
            "/readyz": self._readyz,
            "/status.json": self._status,
        }
        self._host = host.strip("[]")
        self._snapshot = snapshot
        self._metrics = metrics
        self._log = log
        self._server: asyncio.Server | None = None
        self._connections: dict[_Connection, None] = {}  # the oldest first
        self._is_loopback = False
        self._failing: set[str] = set()  # paths whose page could not be made the last time

    async def __aenter__(self) -> Endpoints:
        """Bind and listen. Raises ConfigError where that is impossible."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: _Connection(self._answer, self._connections), self._host, self.port, reuse_address=True
            )
        except (OSError, OverflowError, UnicodeError) as error:
            raise ConfigError(_bind_problem(self._host, self.port, error)) from error
        addresses = [socket.getsockname() for socket in self._server.sockets]
        self.port = addresses[0][1]
        self._is_loopback = all(ip_address(address[0].partition("%")[0]).is_loopback for address in addresses)
        self._log.write(logging.INFO, "endpoints_listening", host=addresses[0][0], port=self.port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._connections):
            connection.abort()
        await self._server.wait_closed()
        await asyncio.sleep(0)  # until 3.12 wait_closed does not wait for the connections to be gone

    def _answer(self, request: Request) -> Response:
        if self._is_loopback and request.host is not None and not is_local_name(request.host):
            return failure(403, "this listener is on loopback; use localhost or an address as the Host")
        if request.method not in ("GET", "HEAD"):
            return failure(405, "only GET and HEAD are answered here", Allow="GET, HEAD")
        route = self.routes.get(request.path)
        if route is None:
            return json_response(404, {"error": "there is no such page", "pages": sorted(self.routes)})
        try:
            response = route(request)
        except Exception as error:  # a bug in a page must not end the supervisor
            if request.path not in self._failing:  # told of when it begins, not for each request
                self._failing.add(request.path)
                failed = f"{type(error).__name__}: {error}"
                self._log.write(logging.ERROR, "endpoint_failed", path=request.path, error=failed)
            return failure(500, "this page could not be made; the log says why")
        self._failing.discard(request.path)
        return response

    def _metrics_page(self, request: Request) -> Response:
        body, content_type = self._metrics.render(request.headers.get("accept", ""))
        return Response(200, body, content_type)

    def _health(self, request: Request) -> Response:
        now = self._snapshot()
        status = health_status(now)
        document = {
            "status": status,
            "worker_id": now.worker_id,
            "current_jobs": now.current_jobs,
            "uptime_seconds": round(now.uptime_s, 3),
            "state": now.phase,
            "queues": [{"name": q.name, "in_progress": q.in_progress, "waiting": q.waiting} for q in now.queues],
            "children": now.children_by_state(),
            "reasons": now.unhealthy,
        }
        return json_response(200 if status == "healthy" else 503, document)

    def _readyz(self, request: Request) -> Response:
        reasons = self._snapshot().reasons
        return json_response(503 if reasons else 200, {"ready": not reasons, "reasons": reasons})

    def _status(self, request: Request) -> Response:
        return json_response(200, self._snapshot())


def health_status(now: Snapshot) -> str:
    """`starting`, `healthy`, `unhealthy` or `draining`; being quiet or fully busy is healthy."""
    if now.phase in ("draining", "stopping", "stopped"):
        return "draining"
    if now.phase == "booting" and all(reason.startswith(STARTING) for reason in now.unhealthy):
        return "starting"
    return "unhealthy" if now.unhealthy else "healthy"


def _livez(request: Request) -> Response:
    return json_response(200, {"status": "alive"})


def _bind_problem(host: str, port: int, error: Exception) -> str:
    number = getattr(error, "errno", None)
    if isinstance(error, OSError) and number is None:  # asyncio's own words since 3.13 for this one
        number = errno.EADDRNOTAVAIL
    # asyncio wraps the text in one of its own; a name that cannot be looked up has a negative number and a good text.
    reason = os.strerror(number) if number and number > 0 else getattr(error, "strerror", None) or str(error)
    hint = "; give another --http-listen HOST:PORT, or off" if number == errno.EADDRINUSE else ""
    return f"--http-listen: cannot listen on {f'[{host}]' if ':' in host else host}:{port}: {reason}{hint}"


class _Connection(asyncio.Protocol):
    """Reads one request's head, answers, closes. All of it is callbacks: no task is left to be cancelled."""

    def __init__(self, answer: Route, others: dict[_Connection, None]) -> None:
        self._answer = answer
        self._others = others
        self._received = b""
        self._is_answered = False
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._others) >= MAX_CONNECTIONS:
            next(iter(self._others)).abort()  # the one that has had the most time; a scrape takes milliseconds
        self._others[self] = None
        self._abort_in(READ_TIMEOUT_S)

    def data_received(self, data: bytes) -> None:
        if self._is_answered:
            return  # read and forgotten: a close with unread bytes resets, and the client loses the answer
        # Empty lines before the request are not kept: a client that sends nothing else would fill our memory.
        self._received = (self._received + data).lstrip(b"\r\n")
        try:
            request = read_request(self._received)
        except BadRequest as bad:
            self._send(bad.response.encode())
            return
        if request is not None:
            self._send(self._answer(request).encode(with_body=request.method != "HEAD"))

    def connection_lost(self, error: Exception | None) -> None:
        self._others.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()

    def abort(self) -> None:
        """Close at once, whatever is unsent."""
        self._others.pop(self, None)
        if self._transport is not None:
            self._transport.abort()

    def _send(self, answer: bytes) -> None:
        self._is_answered = True
        self._received = b""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(answer)
            self._transport.write_eof()
            self._abort_in(WRITE_TIMEOUT_S)

    def _abort_in(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = asyncio.get_running_loop().call_later(seconds, self.abort)
