"""A service that misbehaves on request: a real TCP server with a switch for every way an answer can go wrong.

    with stub_api() as stub:                                  # a thread with a loop of its own; any client may connect
        stub.add_job(payload={"n": 1})
        stub.on("complete", Reply(reset="after commit"))      # for the next one; then as usual again
        stub.on("renew", Reply.error(503), times=None)        # until `stub.clear("renew")`
        ...
        stub.wait_for("complete", 2)
        assert stub.completed == {"job-1": b'{"ok":true}'}

Left alone it is a small, well-behaved service: it hands out `jobs` with leases, fences reports by `lease_id`, answers a
repeated complete as the real one does (409 CONFLICT "already completed"), and keeps every request with the instant at
which it was read. It does not time leases out, does not check the API key unless `api_key` is set, and does not retry.
With `tls` (a server's ssl.SSLContext) it speaks HTTPS.
Requests are counted before a reply is chosen; "commit" is when the small service carries one out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import ssl
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

OPERATIONS: dict[str, str] = {
    r"/api/v1/workers/register": "register",
    r"/api/v1/workers/([^/]+)/heartbeat": "heartbeat",
    r"/api/v1/workers/([^/]+)/deregister": "deregister",
    r"/api/v1/jobs/claim": "claim",
    r"/api/v1/jobs/([^/]+)/complete": "complete",
    r"/api/v1/jobs/([^/]+)/fail": "fail",
    r"/api/v1/jobs/([^/]+)/(?:heartbeat|renew-lease)": "renew",
    r"/api/v1/jobs/([^/]+)/progress": "progress",
}

CODES = {
    400: "VALIDATION_ERROR",
    401: "UNAUTHORIZED",
    403: "ACCESS_DENIED",
    404: "NOT_FOUND",
    408: "REQUEST_TIMEOUT",
    409: "LEASE_EXPIRED",
    413: "PAYLOAD_TOO_LARGE",
    422: "VALIDATION_ERROR",
    429: "RATE_LIMIT_EXCEEDED",
    500: "INTERNAL_ERROR",
    503: "SERVICE_UNAVAILABLE",
}


@dataclass(frozen=True)
class Reply:
    """How one request is answered. Without fields: as a well-behaved service does.

    A `status` or `body` of one's own means that nothing is carried out, unless `commit` says so.
    """

    status: int | None = None
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    delay_s: float = 0.0  # before anything is carried out or answered
    hang: Literal["", "before commit", "after commit"] = ""  # never answers, keeps the connection
    reset: Literal["", "before commit", "after commit", "in the answer"] = ""  # RST instead of an answer
    close: Literal["", "before commit", "after commit", "after the answer"] = ""  # FIN, without having said so
    trickle_s: float = 0.0  # this long between any two bytes
    raw: bytes | None = None  # instead of a whole HTTP answer
    commit: bool | None = None
    only_reused: bool = False  # only on a connection that has answered before; else as usual

    @classmethod
    def error(cls, status: int, code: str | None = None, message: str = "no", **headers: str) -> Reply:
        """A refusal in the service's words; `retry_after="3"` is a header."""
        body = json.dumps({"code": code or CODES.get(status, "ERROR"), "message": message}).encode()
        return cls(status, body, tuple((name.replace("_", "-"), value) for name, value in headers.items()))

    @classmethod
    def html(cls, status: int = 200) -> Reply:
        """What a proxy or a login page says."""
        return cls(status, b"<!DOCTYPE html><title>Sign in</title>", (("content-type", "text/html"),))

    @classmethod
    def json(cls, value: Any, status: int = 200) -> Reply:
        """Any JSON value as the whole answer."""
        return cls(status, json.dumps(value).encode())


@dataclass(frozen=True)
class Request:
    """A request as it was read. `at` is time.monotonic(); `number` counts the requests of its connection from 1."""

    at: float
    operation: str
    path: str
    headers: dict[str, str] = field(repr=False)
    body: bytes
    connection: int
    number: int

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def job_id(self) -> str:
        return self.path.split("/")[4]


@contextlib.contextmanager
def stub_api(**options: Any) -> Iterator[StubApi]:
    """A running stub; options are those of StubApi."""
    stub = StubApi(**options)
    stub.start()
    try:
        yield stub
    finally:
        stub.stop()


class StubApi:
    """The stub. All methods may be called from any thread; what the server's thread writes is guarded by one lock."""

    def __init__(
        self,
        *,
        api_key: str | None = None,
        renew_routes: tuple[str, ...] = ("heartbeat",),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.api_key = api_key
        self.tls = tls
        self.renew_routes = renew_routes
        self.requests: list[Request] = []
        self.jobs: deque[dict[str, Any]] = deque()
        self.leases: dict[str, str] = {}
        self.completed: dict[str, bytes] = {}
        self.failed: dict[str, str] = {}
        self.commits: list[tuple[str, str]] = []
        self.heartbeat_s = 10
        self.options: Sequence[str] = ()  # by which a daemon gets here, besides the URL
        self.port = 0
        self._changed = threading.Condition()
        self._replies: dict[str, deque[tuple[Reply, int | None]]] = defaultdict(deque)
        self._made = 0
        self._connections = 0
        self._open: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="stub-api")

    # --- for the test -------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    def add_job(self, job_id: str | None = None, *, queue_name: str = "q", payload: Any = None, **fields: Any) -> str:
        """A job to be claimed; `fields` overrides anything of its record. Returns its id."""
        with self._changed:
            self._made += 1
            name = job_id or f"job-{self._made}"
            record = {
                "id": name,
                "queue_name": queue_name,
                "payload": payload,
                "retry_count": 0,
                "max_retries": 3,
                "timeout_seconds": 300,
                "lease_expires_at": "2026-01-01T00:00:00Z",
                "lease_id": f"lease-{self._made}",
            }
            self.jobs.append(record | fields)
            return name

    def on(self, operation: str, *replies: Reply, times: int | None = 1) -> None:
        """Answer the next requests of `operation` so, each reply `times` times (None: for good)."""
        with self._changed:
            self._replies[operation].extend((reply, times) for reply in replies)

    def clear(self, operation: str | None = None) -> None:
        """As usual again."""
        with self._changed:
            if operation is None:
                self._replies.clear()
            else:
                self._replies.pop(operation, None)

    def is_leased(self, job_id: str, lease_id: str) -> bool:
        """Whether the job is out under this lease."""
        with self._changed:
            return self.leases.get(job_id) == lease_id

    def of(self, operation: str) -> list[Request]:
        """The requests of one kind so far."""
        with self._changed:
            return [request for request in self.requests if request.operation == operation]

    def wait_for(self, operation: str, count: int = 1, *, timeout_s: float = 10.0) -> list[Request]:
        """Block until that many requests of this kind have been read; for tests that are no coroutines."""
        with self._changed:
            there = self._changed.wait_for(lambda: self._count(operation) >= count, timeout_s)
            assert there, f"{self._count(operation)} requests of {operation} instead of {count}: {self.requests}"
            return [request for request in self.requests if request.operation == operation]

    def down(self) -> None:
        """Refuse connections and reset those that are open; the port stays ours."""
        self._call(self._down())

    def up(self) -> None:
        """Listen again, on the same port."""
        self._call(self._up())

    def drop_idle(self) -> None:
        """Reset all open connections, as a restart does; go on listening."""
        self._call(self._drop())

    def start(self) -> None:
        self._thread.start()
        self._call(self._up())

    def stop(self) -> None:
        self._call(self._down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # --- the server's thread ------------------------------------------------------------------------------------------

    def _call(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10.0)

    def _count(self, operation: str) -> int:
        return sum(request.operation == operation for request in self.requests)

    async def _up(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        self._server = await asyncio.start_server(self._serve, sock=listener, limit=1 << 20, ssl=self.tls)

    async def _down(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._drop()

    async def _drop(self) -> None:
        tasks = list(self._open)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._talk(reader, writer, self._connections)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, LookupError):
            writer.close()  # gone, or no HTTP that we read
        except asyncio.CancelledError:
            _reset(writer)
        finally:
            self._open.discard(task)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int) -> None:
        number = 0
        while True:
            number += 1
            request = await _read_request(reader, connection, number)
            with self._changed:
                self.requests.append(request)
                reply = self._choose(request)
                self._changed.notify_all()
            await asyncio.sleep(reply.delay_s)
            if await self._cut(reply, "before commit", writer):
                return
            status, headers, body = self._answer(request, reply)
            if await self._cut(reply, "after commit", writer):
                return
            await _write(writer, _encoded(status, headers, body) if reply.raw is None else reply.raw, reply)
            if reply.raw is not None or reply.close or reply.reset:
                writer.close()
                return

    def _choose(self, request: Request) -> Reply:
        planned = self._replies[request.operation]
        if not planned or (planned[0][0].only_reused and request.number == 1):
            return Reply()
        reply, times = planned[0]
        if times is not None:
            planned.popleft()
            if times > 1:
                planned.appendleft((reply, times - 1))
        return reply

    async def _cut(self, reply: Reply, moment: str, writer: asyncio.StreamWriter) -> bool:
        if reply.hang == moment:
            await asyncio.Event().wait()
        if reply.reset == moment:
            _reset(writer)
            return True
        if reply.close == moment:
            writer.close()
            return True
        return False

    def _answer(self, request: Request, reply: Reply) -> tuple[int, tuple[tuple[str, str], ...], bytes]:
        own = reply.status is not None or reply.body is not None or reply.raw is not None
        status, body = 200, b""
        if reply.commit if reply.commit is not None else not own:
            with self._changed:
                status, value = self._carry_out(request)
                body = b"" if value is None else json.dumps(value).encode()
                self._changed.notify_all()
        return reply.status or status, reply.headers, body if reply.body is None else reply.body

    def _carry_out(self, request: Request) -> tuple[int, Any]:
        if self.api_key is not None and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return 401, {"code": "UNAUTHORIZED", "message": "Invalid API key"}
        match request.operation:
            case "register":
                worker_id = request.json["worker_id"]
                return 201, {
                    "id": worker_id,
                    "queue_name": request.json["queue_name"],
                    "heartbeat_interval_secs": self.heartbeat_s,
                }
            case "heartbeat":
                return 200, {"acknowledged": True, "next_heartbeat_seconds": self.heartbeat_s, "commands": []}
            case "deregister":
                return 204, None
            case "claim":
                return 200, {"jobs": self._claim(request.json)}
            case "renew" if request.path.rpartition("/")[2] in self.renew_routes:
                return self._fenced(request) or (200, {"success": True})
            case "complete" | "fail":
                return self._settle(request)
            case _:
                return 404, {"code": "NOT_FOUND", "message": f"No route matches POST {request.path}"}

    def _claim(self, asked: dict[str, Any]) -> list[dict[str, Any]]:
        wanted = [job for job in self.jobs if job["queue_name"] == asked["queue_name"]][: asked["limit"]]
        for job in wanted:
            self.jobs.remove(job)
            self.leases[job["id"]] = job["lease_id"]
        return wanted

    def _fenced(self, request: Request) -> tuple[int, Any] | None:
        if request.job_id in self.completed:
            return 409, {"code": "CONFLICT", "message": "Job is already completed"}
        if request.job_id not in self.leases:
            return 404, {"code": "NOT_FOUND", "message": "Resource not found"}
        if request.json.get("lease_id") != self.leases[request.job_id]:
            return 409, {"code": "LEASE_EXPIRED", "message": "it does not match the job's current lease"}
        return None

    def _settle(self, request: Request) -> tuple[int, Any]:
        refusal = self._fenced(request)
        if refusal is not None:
            return refusal
        self.commits.append((request.operation, request.job_id))
        del self.leases[request.job_id]
        if request.operation == "complete":
            result = re.search(rb'"result":(.*)\}$', request.body, re.DOTALL)
            self.completed[request.job_id] = result[1] if result else b""
            return 200, {"success": True}
        self.failed[request.job_id] = request.json["error"]
        return 200, {"success": True, "will_retry": True}


# --- bytes ------------------------------------------------------------------------------------------------------------


async def _read_request(reader: asyncio.StreamReader, connection: int, number: int) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    path = head[0].split(" ")[1]
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    operation = next((name for pattern, name in OPERATIONS.items() if re.fullmatch(pattern, path)), "unknown")
    return Request(time.monotonic(), operation, path, headers, body, connection, number)


def _encoded(status: int, headers: tuple[tuple[str, str], ...], body: bytes) -> bytes:
    lines = [f"HTTP/1.1 {status} Status", *(f"{name}: {value}" for name, value in headers)]
    if status != 204:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (b"" if status == 204 else body)


async def _write(writer: asyncio.StreamWriter, answer: bytes, reply: Reply) -> None:
    if reply.reset == "in the answer":
        writer.write(answer[: len(answer) // 2])
        await writer.drain()
        _reset(writer)
    elif reply.trickle_s:
        for n in range(len(answer)):
            writer.write(answer[n : n + 1])
            await writer.drain()
            await asyncio.sleep(reply.trickle_s)
    else:
        writer.write(answer)
        await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with RST: closing with a linger time of zero throws away what was not sent (socket(7))."""
    with contextlib.suppress(OSError):  # it may be gone already
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
