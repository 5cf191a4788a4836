"""Stands between the daemon and the server and does to the traffic what networks, proxies and bad days do to it.

    with FaultProxy(server.port) as proxy:
        proxy.set("reset_after", {"complete"})       # from now on, for these operations; None: for all
        ...
        proxy.clear()

It reads whole requests, as some faults need to know what is asked for and whether it was carried out: `reset_before`
never passes the request on, `reset_after` does and drops the answer. Every request is kept with its instant
(CLOCK_MONOTONIC), its operation and what was done to it. It runs on a loop in a thread of its own. `Faults` is what is
wrong at the moment, for this proxy of HTTP and for the one of gRPC (`grpc_proxy`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from tests.support.relay import reset

FAULTS = (
    "down",  # the connection is reset as soon as it is made
    "slow",  # the answer takes SLOW_S
    "reset_before",  # reset without passing the request on
    "reset_after",  # passed on and carried out; reset instead of the answer
    "error_500",
    "error_503",  # with a proxy's page instead of JSON
    "limited",  # 429 with Retry-After
    "garbage",  # bytes that are no HTTP
    "not_json",  # 200, and a page
    "trickle",  # the true answer, a byte at a time
    "hang",  # never answers
)
NEVER_ASKED = ("down", "reset_before", "error_500", "error_503", "limited", "garbage", "not_json", "hang")
"""With these the server never sees the request."""
SLOW_S = 0.7
TRICKLE_S = 0.02
HANG_S = 60.0

OPERATIONS = (
    (re.compile(r"/workers/register$"), "register"),
    (re.compile(r"/workers/[^/]+/heartbeat$"), "heartbeat"),
    (re.compile(r"/workers/[^/]+/deregister$"), "deregister"),
    (re.compile(r"/jobs/claim$"), "claim"),
    (re.compile(r"/jobs/[^/]+/complete$"), "complete"),
    (re.compile(r"/jobs/[^/]+/fail$"), "fail"),
    (re.compile(r"/jobs/[^/]+/(heartbeat|renew-lease)$"), "renew"),
    (re.compile(r"/jobs/[^/]+/progress$"), "progress"),
)


def operation_of(path: str) -> str:
    """What a request asks for; `other` for what a worker does not need."""
    return next((name for pattern, name in OPERATIONS if pattern.search(path)), "other")


@dataclass(frozen=True)
class Passed:
    """A request as it came by. `status` is the server's answer, None if it never saw the request."""

    at: float
    operation: str
    path: str
    body: bytes = field(repr=False)
    fault: str
    status: int | None

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def job_id(self) -> str:
        return self.path.split("/")[4]


class Faults:
    """What happens to requests now, and what has come by. May be used from any thread."""

    def __init__(self) -> None:
        self._fault: tuple[str, frozenset[str] | None] = ("", None)
        self._left: int | None = None
        self._lock = threading.Lock()
        self.passed: list[Passed] = []
        self.on_change: Callable[[], None] = lambda: None

    def set(self, fault: str, operations: Collection[str] | None = None, *, times: int | None = None) -> None:
        """Do this to the requests that come from now on, `times` of them; `operations` None: to all."""
        assert fault in FAULTS, fault
        with self._lock:
            self._fault, self._left = (fault, None if operations is None else frozenset(operations)), times
        self.on_change()

    def clear(self) -> None:
        """Pass everything on."""
        with self._lock:
            self._fault, self._left = ("", None), None
        self.on_change()

    def of(self, operation: str) -> list[Passed]:
        """What has come by of one operation."""
        return [passed for passed in tuple(self.passed) if passed.operation == operation]

    def choose(self, operation: str) -> str:
        """What is to be done to a request that has come now."""
        with self._lock:
            fault, operations = self._fault
            if not fault or self._left == 0 or not (operations is None or operation in operations):
                return ""
            if self._left is not None:
                self._left -= 1
            return fault

    @property
    def is_down(self) -> bool:
        """Whether nobody gets through at all."""
        with self._lock:
            return self._fault == ("down", None)

    @property
    def is_any(self) -> bool:
        """Whether anything is wrong at all."""
        with self._lock:
            return bool(self._fault[0]) and self._left != 0

    def note(self, operation: str, path: str, body: bytes, fault: str, status: int | None) -> None:
        self.passed.append(Passed(time.monotonic(), operation, path, body, fault, status))


class FaultProxy(Faults):
    """One proxy for one server on this machine."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._server_port = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="fault proxy")
        self._ready = threading.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        assert self._ready.wait(10.0), "the proxy did not start"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # --- its loop -----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in self._connections:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._connections, return_exceptions=True))
        self._loop.run_until_complete(asyncio.sleep(0))  # the transports close themselves in the next turn
        self._loop.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        try:
            while not self.is_down and await self._exchange(reader, writer):
                pass
            if self.is_down:
                reset(writer)
        except (OSError, EOFError, asyncio.CancelledError, ValueError):
            writer.transport.abort()
        finally:
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; whether the connection goes on."""
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(_length(head))
        path = head.split(b" ", 2)[1].decode()
        operation = operation_of(path)
        fault = "down" if self.is_down else self.choose(operation)
        answer, status = b"", None
        if fault not in NEVER_ASKED:
            answer = await self._ask_server(head + body)
            status = int(answer.split(b" ", 2)[1])
        self.note(operation, path, body, fault, status)
        return await self._answer(writer, fault, answer)

    async def _ask_server(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            return head + await reader.readexactly(_length(head))
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, writer: asyncio.StreamWriter, fault: str, answer: bytes) -> bool:
        match fault:
            case "down" | "reset_before" | "reset_after":
                reset(writer)
                return False
            case "slow":
                await asyncio.sleep(SLOW_S)
            case "error_500":
                answer = _made(500, b'{"code": "INTERNAL_ERROR", "message": "no"}')
            case "error_503":
                answer = _made(503, b"<html>bad gateway</html>", "text/html")
            case "limited":
                answer = _made(429, b'{"code": "RATE_LIMIT_EXCEEDED", "message": "no"}', retry_after="1")
            case "garbage":
                writer.write(random.Random(len(self.passed)).randbytes(200))
                await writer.drain()
                return False
            case "not_json":
                answer = _made(200, b"<html>Sign in</html>", "text/html")
            case "hang":
                await asyncio.sleep(HANG_S)
                return False
            case "trickle":
                for n in range(len(answer)):
                    writer.write(answer[n : n + 1])
                    await writer.drain()
                    await asyncio.sleep(TRICKLE_S)
                return True
        writer.write(answer)
        await writer.drain()
        return True


def _length(head: bytes) -> int:
    match = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return int(match.group(1)) if match else 0


def _made(status: int, body: bytes, kind: str = "application/json", *, retry_after: str | None = None) -> bytes:
    hint = f"retry-after: {retry_after}\r\n" if retry_after is not None else ""
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{hint}\r\n"
    return head.encode() + body
