"""HTTP/1.1 over asyncio, as little of it as one service needs: the fast way to send a request.

    one request at a time per connection, kept alive up to MAX_IDLE and KEEPALIVE_S (RFC 9112, 9.3)
    answers with Content-Length, chunked, or up to the end of the connection; bounded; 1xx are skipped (RFC 9110, 15.2)
    no redirects, no cookies, no proxies, no content coding: `httpx_wire.py` is there for proxies

What it buys: 0.1 ms of CPU per request, where httpx's own transport takes 0.7 ms and its client 1.4 ms; two requests
per job make that the largest part of the supervisor's work. Everything from the peer is bounded and checked, and what
makes no sense is a WireError. TLS is asyncio's own, verified by the context that the caller brings.
"""

from __future__ import annotations

import asyncio
import ipaddress
import select
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from spooled_supervisor import timing

KEEPALIVE_S = 15.0
"""How long an idle connection is kept: longer than polls and worker heartbeats are apart, shorter than the minute after
which common proxies and load balancers close theirs."""
MAX_IDLE = 32
READ_BYTES = 64 * 1024
MAX_HEAD_BYTES = 64 * 1024
MAX_CHUNK_LINE = 1024
MAX_DIGITS = 18
HEX_DIGITS = b"0123456789abcdefABCDEF"
HAPPY_EYEBALLS_S = 0.25
"""RFC 8305: the next address is tried after this, where the first does not answer."""

P = TypeVar("P", bound=asyncio.BaseProtocol)


class WireError(Exception):
    """No usable HTTP answer; `status` if it got so far.

    `is_stale`: a kept connection turned out to be closed before anything of an answer came.
    """

    def __init__(self, reason: str, *, is_stale: bool = False, status: int | None = None) -> None:
        self.is_stale = is_stale
        self.status = status
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer; header names in lower case, of several with one name the last."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Wire(Protocol):
    """A way to one service. Cancelling `send` closes its connection and leaves the wire usable."""

    async def send(self, target: str, headers: bytes, body: bytes, most_bytes: int) -> Reply:
        """`POST target` with these header lines (each with its CR LF, Content-Length included). Raises WireError."""

    async def aclose(self) -> None:
        """Close all connections."""


class DirectWire:
    """Straight to host and port. From one event loop, by any number of tasks."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._idle: list[_Connection] = []  # the longest idle first
        self._busy: set[_Connection] = set()
        self._buffer = memoryview(bytearray(READ_BYTES))

    async def send(self, target: str, headers: bytes, body: bytes, most_bytes: int) -> Reply:
        connection = self._take_idle()
        is_reused = connection is not None
        if connection is None:
            connection = await self._connect()
        self._busy.add(connection)
        try:
            reply = await connection.ask(target, headers, body, most_bytes, is_reused=is_reused)
        finally:
            self._busy.discard(connection)
            if connection.is_reusable:
                self._keep(connection)
            else:
                connection.close()
        return reply

    async def aclose(self) -> None:
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()

    def _take_idle(self) -> _Connection | None:
        """The one that was used last, as it is the least likely to be closed by the peer."""
        oldest = timing.now() - KEEPALIVE_S
        while self._idle and self._idle[0].idle_since < oldest:
            self._idle.pop(0).close()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable and not connection.has_news():
                return connection
            connection.close()
        return None

    def _keep(self, connection: _Connection) -> None:
        connection.idle_since = timing.now()
        self._idle.append(connection)
        if len(self._idle) > MAX_IDLE:
            self._idle.pop(0).close()

    async def _connect(self) -> _Connection:
        return await connect(lambda: _Connection(self._buffer), self._host, self._port, self._tls)


class _Connection(asyncio.BufferedProtocol):
    """One connection. `ask` sends a request and waits; the answer is taken apart as its bytes arrive.

    All connections receive into one `buffer`, as nothing stays in it: asyncio's own, which it makes anew for every
    read, is so large that it is mapped and given back each time. That took 12 of the 130 us of a request. It is a view:
    asyncio's TLS writes record after record into slices of it, and a slice of a bytearray would be a copy.
    """

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Reply] | None = None
        self._parser: _Parser | None = None
        self._is_open = False
        self._is_stale = False
        self.idle_since = 0.0

    @property
    def is_reusable(self) -> bool:
        """Whether another request may be sent: it is open, and the last answer ended where it should."""
        return self._is_open and self._answer is None

    def has_news(self) -> bool:
        """Whether something has come that the loop has not read yet: after an answer that can only be the end."""
        assert self._transport is not None
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket"), select.POLLIN)
        return bool(poll.poll(0))

    async def ask(self, target: str, headers: bytes, body: bytes, most_bytes: int, *, is_reused: bool) -> Reply:
        assert self._transport is not None
        self._is_stale = is_reused  # until the first byte of an answer
        self._parser = _Parser(most_bytes)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._answer = answer
        self._transport.write(b"POST %b HTTP/1.1\r\n%b\r\n%b" % (target.encode("ascii"), headers, body))
        return await answer  # cancelled: `_answer` stays set, so nobody uses this connection again

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio.BufferedProtocol --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._is_open = True

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._is_stale = False
        if self._parser is None:
            self.close()  # nobody has asked: what it says now could be taken for the answer to the next request
            self._is_open = False
            return
        try:
            reply = self._parser.feed(bytes(self._buffer[:nbytes]))
        except WireError as error:
            self._fail(error)
        else:
            if reply is not None:
                self._finish(reply)

    def eof_received(self) -> None:
        if self._parser is not None:
            reply = self._parser.end()
            if reply is not None:
                self._finish(reply)

    def connection_lost(self, error: Exception | None) -> None:
        self._is_open = False
        why = f"the connection was lost: {error}" if error else "the server closed the connection without an answer"
        self._fail(WireError(why, is_stale=self._is_stale))

    def _finish(self, reply: Reply) -> None:
        assert self._parser is not None
        self._is_open = self._is_open and self._parser.keeps_alive
        self._parser = None
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_result(reply)

    def _fail(self, error: WireError) -> None:
        self._is_open = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


class _Parser:
    """Bytes of one answer in, a Reply out when it is whole. Raises WireError for what is no HTTP/1.1 answer."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._buffer = bytearray()
        self._status = 0
        self._headers: dict[str, str] = {}
        self._length: int | None = None  # None: up to the end of the connection
        self._chunks: _Chunks | None = None
        self._has_head = False
        self.keeps_alive = True

    def feed(self, data: bytes | bytearray) -> Reply | None:
        self._buffer += data
        while not self._has_head:
            if not self._read_head():
                return None
        return self._read_body()

    def end(self) -> Reply | None:
        """The peer will send no more."""
        if not self._has_head or self._chunks is not None or self._length is not None:
            return None
        return Reply(self._status, self._headers, bytes(self._buffer))

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise WireError(f"an answer whose head is longer than {MAX_HEAD_BYTES} bytes")
            return False
        lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        self._status = _status_of(lines[0])
        if 100 <= self._status < 200:
            return True  # an interim answer: the real one follows, so look for its head
        self._headers = dict(map(_header_of, lines[1:]))
        self._has_head = True
        self._frame(lines[0])
        return True

    def _frame(self, status_line: str) -> None:
        """How the body ends, and whether the connection outlives it (RFC 9112, 6.3 and 9.3)."""
        said = self._headers.get("connection", "").lower()
        self.keeps_alive = "close" not in said and (not status_line.startswith("HTTP/1.0") or "keep-alive" in said)
        if self._status in (204, 304):
            self._length = 0
        elif "transfer-encoding" in self._headers:
            if self._headers["transfer-encoding"].strip().lower() != "chunked":
                raise WireError("an answer with a transfer coding that was not asked for")
            self._chunks = _Chunks(self._most_bytes)
        elif "content-length" in self._headers:
            text = self._headers["content-length"].strip()
            if not (text.isascii() and text.isdigit()):
                raise WireError("an answer whose Content-Length is no number")
            digits = text.lstrip("0") or "0"
            self._length = int(digits[:MAX_DIGITS])  # more of them are too many in any case, and int() has a limit
            self._check_size(self._length)
        else:
            self.keeps_alive = False

    def _read_body(self) -> Reply | None:
        if self._chunks is not None:
            if not self._chunks.take(self._buffer):
                return None
            body = bytes(self._chunks.body)
        elif self._length is None:
            self._check_size(len(self._buffer))
            return None
        elif len(self._buffer) < self._length:
            return None
        else:
            body = bytes(self._buffer[: self._length])
            del self._buffer[: self._length]
        if self._buffer:
            self.keeps_alive = False  # it said more than its answer: nothing that follows can be trusted
        return Reply(self._status, self._headers, body)

    def _check_size(self, size: int) -> None:
        if size > self._most_bytes:
            text = f"HTTP {self._status} with an answer of more than {self._most_bytes} bytes"
            raise WireError(text, status=self._status)


class _Chunks:
    """The chunked coding (RFC 9112, 7.1). Extensions and trailers are read over."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._left = 0  # of the chunk that is being read, its CR LF included
        self._is_last = False
        self.body = bytearray()

    def take(self, buffer: bytearray) -> bool:
        """Move what is whole from the buffer to the body; True at the end."""
        while True:
            if self._left > 2:
                part = buffer[: self._left - 2]
                self.body += part
                del buffer[: len(part)]
                self._left -= len(part)
                if self._left > 2:
                    return False
            if self._left:
                if len(buffer) < self._left:
                    return False
                if buffer[:2] != b"\r\n":
                    raise WireError("an answer whose chunk does not end where it said")
                del buffer[:2]
                self._left = 0
            line = self._line(buffer)
            if line is None:
                return False
            if self._is_last:
                if not line:
                    return True
                continue  # a trailer
            self._begin(line)

    def _begin(self, line: bytes) -> None:
        digits = line.split(b";")[0].strip()
        if not digits or digits.strip(HEX_DIGITS):
            raise WireError("an answer with a chunk whose size is no number")
        size = int(digits, 16)
        if len(self.body) + size > self._most_bytes:
            raise WireError(f"an answer of more than {self._most_bytes} bytes")
        self._is_last = size == 0
        self._left = size + 2 if size else 0

    def _line(self, buffer: bytearray) -> bytes | None:
        end = buffer.find(b"\r\n")
        if end < 0:
            if len(buffer) > MAX_CHUNK_LINE:
                raise WireError("an answer with a chunk line without an end")
            return None
        line = bytes(buffer[:end])
        del buffer[: end + 2]
        return line


async def connect(make: Callable[[], P], host: str, port: int, tls: ssl.SSLContext | None) -> P:
    """A connection for the protocol that `make` makes. Raises WireError."""
    # Only a name can have several addresses to try; and what asyncio's race of addresses leaves behind when it is
    # cancelled takes another turn of the loop to end.
    eyeballs_s = None if _is_address(host) else HAPPY_EYEBALLS_S
    try:
        _, protocol = await asyncio.get_running_loop().create_connection(
            make,
            host,
            port,
            ssl=tls,
            server_hostname=host if tls is not None else None,
            happy_eyeballs_delay=eyeballs_s,
        )
    except (OSError, ssl.CertificateError, UnicodeError, OverflowError) as error:  # ssl.SSLError is an OSError
        # UnicodeError: a name that is none, as with a label of more than 63 characters (RFC 1035, 2.3.4);
        # OverflowError: a port that is none.
        raise WireError(f"no connection: {getattr(error, 'strerror', None) or error}") from error
    return protocol


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _status_of(line: str) -> int:
    version, _, rest = line.partition(" ")
    code = rest[:3]
    if not version.startswith("HTTP/1.") or not (code.isascii() and code.isdigit()) or len(code) != 3:
        raise WireError(f"not HTTP: {line[:60]!r}")
    return int(code)


def _header_of(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not name or name != name.strip():
        raise WireError(f"an answer with a header that is none: {line[:60]!r}")
    return name.lower(), value.strip()
