"""HTTP/1.1 as the service may speak it, well or badly: framing, kept connections, bounds, cancellation, TLS."""

# ruff: noqa: ASYNC110 # a turn of the loop is all that is waited for

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spooled_supervisor import timing
from spooled_supervisor.api.wire import (
    KEEPALIVE_S,
    MAX_CHUNK_LINE,
    MAX_HEAD_BYTES,
    MAX_IDLE,
    DirectWire,
    Reply,
    WireError,
    _Parser,
)
from tests.support import certificates

T = TypeVar("T")
LIMIT_S = 20.0
MOST = 1000
BODY = b'{"jobs": []}'


def chunked(*parts: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + (
        b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + end
    )


def sized(body: bytes = BODY, head: bytes = b"HTTP/1.1 200 OK", *headers: bytes) -> bytes:
    return b"\r\n".join([head, *headers, b"Content-Length: %d" % len(body), b"", body])


# --- taking answers apart ---------------------------------------------------------------------------------------------


def parsed(*pieces: bytes, ends: bool = False) -> tuple[Reply | None, bool]:
    """The answer in these pieces, and whether the connection may be kept."""
    parser = _Parser(MOST)
    reply = None
    for piece in pieces:
        assert reply is None, "it was whole before"
        reply = parser.feed(piece)
    if reply is None and ends:
        reply = parser.end()
    return reply, parser.keeps_alive


WHOLE: dict[str, tuple[bytes, int, bytes]] = {
    "length": (sized(), 200, BODY),
    "length of nothing": (sized(b""), 200, b""),
    "length with leading zeros": (b"HTTP/1.1 200 OK\r\nContent-Length: 0003\r\n\r\nabc", 200, b"abc"),
    "no reason phrase": (sized(head=b"HTTP/1.1 200"), 200, BODY),
    "an error": (sized(b"no", b"HTTP/1.1 503 Service Unavailable"), 503, b"no"),
    "one chunk": (chunked(BODY), 200, BODY),
    "no chunk": (chunked(), 200, b""),
    "many chunks": (chunked(b"a", b"\r\n", b"0\r\n\r\n", b"b" * 300), 200, b"a\r\n0\r\n\r\n" + b"b" * 300),
    "chunk extensions": (chunked(end=b'5;name="v";x\r\nhello\r\n0;last\r\n\r\n'), 200, b"hello"),
    "chunk sizes in capitals": (chunked(end=b"A\r\n0123456789\r\n000\r\n\r\n"), 200, b"0123456789"),
    "trailers": (chunked(BODY, end=b"0\r\nExpires: never\r\nX: y\r\n\r\n"), 200, BODY),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
    "no content, whatever it says of its length": (b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n", 204, b""),
    "not modified": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", 304, b""),
    "interim answers before": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\nContent-Length: 9\r\n\r\n" + sized(),
        200,
        BODY,
    ),
    "a coding and a length": (
        chunked(BODY).replace(b"\r\n\r\n", b"\r\nContent-Length: 3\r\n\r\n", 1),
        200,
        BODY,
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_an_answer_in_one_piece(name: str) -> None:
    data, status, body = WHOLE[name]
    reply, keeps_alive = parsed(data)
    assert reply is not None
    assert (reply.status, reply.body) == (status, body)
    assert keeps_alive


@given(st.sampled_from(sorted(WHOLE)), st.lists(st.integers(0, 1000), max_size=8))
def test_any_split_of_the_bytes_gives_the_same_answer(name: str, cuts: list[int]) -> None:
    data, _, _ = WHOLE[name]
    places = sorted({cut % len(data) for cut in cuts})
    pieces = [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]
    assert parsed(*pieces) == parsed(data)


@pytest.mark.parametrize("name", WHOLE)
def test_byte_by_byte_nothing_is_taken_for_an_end_too_early(name: str) -> None:
    data, status, body = WHOLE[name]
    reply, _ = parsed(*[data[n : n + 1] for n in range(len(data))])
    assert reply is not None
    assert (reply.status, reply.body) == (status, body)


@given(st.lists(st.binary(max_size=60), max_size=10), st.lists(st.integers(0, 2000), max_size=8))
def test_any_chunks_in_any_pieces_are_the_body(parts: list[bytes], cuts: list[int]) -> None:
    data = chunked(*[part for part in parts if part])
    places = sorted({cut % len(data) for cut in cuts})
    pieces = [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]
    reply, keeps_alive = parsed(*pieces)
    assert reply is not None
    assert reply.body == b"".join(parts)
    assert keeps_alive


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n\r\n"])
def test_without_a_length_the_answer_is_all_up_to_the_end(head: bytes) -> None:
    assert parsed(head + b"ab", b"cd") == (None, False)
    reply, keeps_alive = parsed(head + b"ab", b"cd", ends=True)
    assert reply is not None
    assert reply.body == b"abcd"
    assert not keeps_alive


@pytest.mark.parametrize("name", WHOLE)
def test_an_answer_that_ends_too_early_is_none(name: str) -> None:
    data, _, _ = WHOLE[name]
    for length in range(len(data)):
        assert parsed(data[:length], ends=True)[0] is None


def test_header_names_are_in_lower_case_and_of_several_the_last_counts() -> None:
    reply, _ = parsed(sized(b"", b"HTTP/1.1 200 OK", b"Retry-After:  7 ", b"X-A: 1", b"x-a: 2", b"X-Colon: a:b", b"E:"))
    assert reply is not None
    assert dict(reply.headers) == {"retry-after": "7", "x-a": "2", "x-colon": "a:b", "e": "", "content-length": "0"}


@pytest.mark.parametrize(
    ("head", "connection", "keeps_alive"),
    [
        (b"HTTP/1.1 200 OK", None, True),
        (b"HTTP/1.1 200 OK", b"keep-alive", True),
        (b"HTTP/1.1 200 OK", b"close", False),
        (b"HTTP/1.1 200 OK", b"Close", False),
        (b"HTTP/1.1 200 OK", b"Upgrade, close", False),
        (b"HTTP/1.0 200 OK", None, False),
        (b"HTTP/1.0 200 OK", b"Keep-Alive", True),
    ],
)
def test_which_connections_are_kept(head: bytes, connection: bytes | None, keeps_alive: bool) -> None:
    headers = [] if connection is None else [b"Connection: " + connection]
    assert parsed(sized(BODY, head, *headers))[1] is keeps_alive


@pytest.mark.parametrize("data", [sized(), chunked(BODY), b"HTTP/1.1 204 No Content\r\n\r\n"])
def test_bytes_after_the_answer_are_not_read_and_the_connection_is_not_kept(data: bytes) -> None:
    reply, keeps_alive = parsed(data + b"HTTP/1.1 200 OK\r\n\r\n")
    assert reply is not None
    assert reply.body in (BODY, b"")
    assert not keeps_alive


HUGE_NUMBER = b"9" * 5000
SENSELESS: dict[str, tuple[bytes, str]] = {
    "a web page": (b"<!DOCTYPE html>\r\n\r\n", "not HTTP: '<!DOCTYPE html>'"),
    "another protocol": (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "not HTTP: 'SSH-2.0-OpenSSH_9.6'"),
    "HTTP/2": (b"HTTP/2 200\r\n\r\n", "not HTTP: 'HTTP/2 200'"),
    "nothing but an end": (b"\r\n\r\n", "not HTTP: ''"),
    "a status without a number": (b"HTTP/1.1 OK\r\n\r\n", "not HTTP: 'HTTP/1.1 OK'"),
    "a status in other digits": ("HTTP/1.1 ²00 OK\r\n\r\n".encode("latin-1"), "not HTTP: 'HTTP/1.1 ²00 OK'"),
    "a header without a colon": (b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n", "a header that is none: 'nonsense'"),
    "a folded header": (b"HTTP/1.1 200 OK\r\nA: b\r\n c: d\r\n\r\n", "a header that is none: ' c: d'"),
    "a header without a name": (b"HTTP/1.1 200 OK\r\n: x\r\n\r\n", "a header that is none: ': x'"),
    "a length that is none": (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", "Content-Length is no number"),
    "a negative length": (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "Content-Length is no number"),
    "a signed length": (b"HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\n", "Content-Length is no number"),
    "two lengths in one": (b"HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\n", "Content-Length is no number"),
    "a length beyond all numbers": (
        b"HTTP/1.1 200 OK\r\nContent-Length: " + HUGE_NUMBER + b"\r\n\r\n",
        "more than 1000",
    ),
    "another coding": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "was not asked for"),
    "a chunk without a size": (chunked(end=b"\r\n"), "size is no number"),
    "a chunk with a size in words": (chunked(end=b"five\r\nhello\r\n"), "size is no number"),
    "a chunk with a negative size": (chunked(end=b"-5\r\nhello\r\n"), "size is no number"),
    "a chunk with a prefixed size": (chunked(end=b"0x5\r\nhello\r\n"), "size is no number"),
    "a chunk with an underscored size": (chunked(end=b"1_0\r\nhello\r\n"), "size is no number"),
    "a chunk that is longer than it said": (chunked(end=b"5\r\nhello, world\r\n"), "does not end where it said"),
    "a chunk line without an end": (chunked(end=b"5;" + b"x" * MAX_CHUNK_LINE), "a chunk line without an end"),
    "a trailer without an end": (chunked(end=b"0\r\n" + b"x" * (MAX_CHUNK_LINE + 1)), "a chunk line without an end"),
}


@pytest.mark.parametrize("name", SENSELESS)
def test_what_makes_no_sense_is_said_in_words(name: str) -> None:
    data, text = SENSELESS[name]
    with pytest.raises(WireError) as caught:
        parsed(data)
    assert text in str(caught.value)
    assert len(str(caught.value)) < 200


@given(st.binary(max_size=400))
def test_no_bytes_break_it(data: bytes) -> None:
    for answer in (data, b"HTTP/1.1 200 OK\r\n" + data, chunked(end=data)):
        with contextlib.suppress(WireError):
            parsed(answer, ends=True)


def test_a_head_is_bounded() -> None:
    fits = b"HTTP/1.1 200 OK\r\nX: " + b"y" * (MAX_HEAD_BYTES - 100)
    assert parsed(fits, b"\r\nContent-Length: 0\r\n\r\n")[0] is not None
    with pytest.raises(WireError, match="whose head is longer than 65536 bytes"):
        parsed(fits, b"z" * 200)


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 500 Oops\r\nContent-Length: 1001\r\n\r\n"],
        [b"HTTP/1.1 500 Oops\r\n\r\n", b"x" * 600, b"x" * 600],
        [b"HTTP/1.1 500 Oops\r\nTransfer-Encoding: chunked\r\n\r\n", b"3e9\r\n"],
        [b"HTTP/1.1 500 Oops\r\nTransfer-Encoding: chunked\r\n\r\n1f4\r\n" + b"x" * 500 + b"\r\n", b"1f5\r\n"],
        [b"HTTP/1.1 500 Oops\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 900 + b"\r\n"],
    ],
    ids=["by length", "up to the end", "in a chunk", "in two chunks", "in an endless chunk"],
)
def test_a_body_is_bounded_before_it_is_read(pieces: list[bytes]) -> None:
    with pytest.raises(WireError, match="an answer of more than 1000 bytes"):
        parsed(*pieces)


def test_a_body_as_long_as_is_allowed_is_read() -> None:
    for data in (sized(b"x" * MOST), chunked(b"x" * 500, b"x" * 500)):
        reply, _ = parsed(data)
        assert reply is not None
        assert len(reply.body) == MOST


# --- over a real connection -------------------------------------------------------------------------------------------


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """On the loop of production, in debug mode; nothing of a failed request may surface anywhere else."""
    complaints: list[str] = []

    def complain(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        message = context["message"]
        if "incoming connection" not in message and "StreamReaderProtocol" not in message:  # the service's own trouble
            complaints.append(str(context))

    async def checked() -> T:
        asyncio.get_running_loop().set_exception_handler(complain)
        async with asyncio.timeout(LIMIT_S):
            result = await main()
            while asyncio.all_tasks() != {asyncio.current_task()}:
                await asyncio.sleep(0)
        return result

    with asyncio.Runner(loop_factory=timing.new_event_loop, debug=True) as runner:
        result = runner.run(checked())
    assert complaints == []
    return result


Serve = Callable[["Line"], Awaitable[None]]


class Line:
    """The service's end of one connection."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.reader = reader
        self.writer = writer
        self.left = asyncio.Event()
        """The other end has gone, and nothing is served any more."""

    async def request(self) -> bytes:
        """The body of the next request."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        (length,) = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-l")]
        return await self.reader.readexactly(length)

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        """RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def until_left(self) -> None:
        with contextlib.suppress(ConnectionError):
            assert await self.reader.read() == b""


class Service:
    """Counts connections; each is `serve`d and then closed."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._tasks: set[asyncio.Task[None]] = set()
        self.lines: list[Line] = []
        self.port = 0

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        line = Line(len(self.lines), reader, writer)
        self.lines.append(line)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._serve(line)
        finally:
            writer.close()
            with contextlib.suppress(Exception):
                await writer.wait_closed()
            self._tasks.discard(task)
            line.left.set()

    async def finish(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def service(
    serve: Serve, *, tls: ssl.SSLContext | None = None, trust: ssl.SSLContext | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[tuple[Service, DirectWire]]:
    """A service and a wire to it."""
    it = Service(serve)
    server = await asyncio.start_server(it.accept, "127.0.0.1", 0, ssl=tls)
    it.port = server.sockets[0].getsockname()[1]
    direct = DirectWire(host, it.port, trust)
    try:
        yield it, direct
    finally:
        await direct.aclose()
        server.close()
        await it.finish()


def send(direct: DirectWire, body: bytes = b"{}", most: int = 1 << 20) -> Coroutine[Any, Any, Reply]:
    return direct.send("/api/v1/x", b"Content-Length: %d\r\n" % len(body), body, most)


async def well_behaved(line: Line) -> None:
    while True:
        await line.say(sized(await line.request()))


def answering(*answers: bytes) -> Serve:
    """Each request on each connection gets the next of these; then the connection is closed."""

    async def serve(line: Line) -> None:
        for answer in answers:
            await line.request()
            await line.say(answer)

    return serve


def test_a_request_is_what_it_was_told_to_be() -> None:
    seen = []

    async def serve(line: Line) -> None:
        seen.append(await line.reader.readuntil(b"\r\n\r\n"))
        seen.append(await line.reader.readexactly(2))
        await line.say(sized())

    async def main() -> None:
        async with service(serve) as (_, direct):
            reply = await direct.send("/api/v1/x", b"Host: h\r\nContent-Length: 2\r\n", b"{}", MOST)
            assert reply.body == BODY

    run(main)
    assert seen == [b"POST /api/v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n", b"{}"]


def test_a_connection_is_kept_for_the_next_request() -> None:
    async def main() -> None:
        async with service(well_behaved) as (it, direct):
            for n in range(20):
                assert (await send(direct, b"%d" % n)).body == b"%d" % n
            assert len(it.lines) == 1

    run(main)


@pytest.mark.parametrize(
    "answer",
    [
        sized(BODY, b"HTTP/1.1 200 OK", b"Connection: close"),
        sized(BODY, b"HTTP/1.0 200 OK"),
        sized() + b"surplus",
        chunked(BODY) + b"\r\n",
    ],
    ids=["says close", "HTTP/1.0", "bytes after it", "a line after it"],
)
def test_a_connection_that_cannot_be_trusted_any_more_is_closed(answer: bytes) -> None:
    async def serve(line: Line) -> None:
        await line.request()
        await line.say(answer)
        await line.until_left()

    async def main() -> None:
        async with service(serve) as (it, direct):
            for _ in range(3):
                assert (await send(direct)).body == BODY
            assert len(it.lines) == 3

    run(main)


def test_an_answer_up_to_the_end_of_the_connection_is_read() -> None:
    async def serve(line: Line) -> None:
        await line.request()
        for part in (b"HTTP/1.1 200 OK\r\n\r\n", b"one ", b"two"):
            await line.say(part)

    async def main() -> None:
        async with service(serve) as (it, direct):
            for _ in range(2):
                assert (await send(direct)).body == b"one two"
            assert len(it.lines) == 2

    run(main)


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_kept_connection_that_the_service_has_ended_meanwhile_is_not_used(how: str) -> None:
    async def main() -> None:
        ended = asyncio.Event()

        async def serve(line: Line) -> None:
            await line.say(sized(await line.request()))
            if line.number == 0:
                if how == "reset":
                    line.reset()
                else:
                    line.writer.close()
                ended.set()
            else:
                await line.until_left()

        async with service(serve) as (it, direct):
            await send(direct)
            await ended.wait()
            assert (await send(direct, b"again")).body == b"again"
            assert len(it.lines) == 2

    run(main)


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("first", [True, False], ids=["the first request", "a later one"])
def test_a_connection_that_ends_instead_of_an_answer_is_stale_only_if_it_was_kept(how: str, first: bool) -> None:
    async def serve(line: Line) -> None:
        if not first:
            await line.say(sized(await line.request()))
        await line.request()
        if how == "reset":
            line.reset()

    async def main() -> None:
        async with service(serve) as (_, direct):
            if not first:
                await send(direct)
            with pytest.raises(WireError) as caught:
                await send(direct)
            assert caught.value.is_stale is not first

    run(main)


def test_an_answer_that_is_cut_off_is_never_stale() -> None:
    async def serve(line: Line) -> None:
        await line.say(sized(await line.request()))
        await line.request()
        await line.say(sized()[:20])

    async def main() -> None:
        async with service(serve) as (_, direct):
            await send(direct)
            with pytest.raises(WireError) as caught:
                await send(direct)
            assert not caught.value.is_stale

    run(main)


def test_what_the_service_says_unasked_ends_the_connection() -> None:
    async def main() -> None:
        said = asyncio.Event()

        async def serve(line: Line) -> None:
            await line.say(sized(await line.request()))
            if line.number == 0:
                await line.say(sized(b"for nobody"))
                said.set()
                await line.until_left()
                return
            await line.until_left()

        async with service(serve) as (it, direct):
            await send(direct)
            await said.wait()
            assert (await send(direct, b"mine")).body == b"mine"
            assert len(it.lines) == 2

    run(main)


@pytest.mark.parametrize("name", SENSELESS)
def test_garbage_is_a_wire_error_and_the_next_request_works(name: str) -> None:
    async def serve(line: Line) -> None:
        await line.request()
        await line.say(SENSELESS[name][0] if line.number == 0 else sized())
        await line.until_left()

    async def main() -> None:
        async with service(serve) as (_, direct):
            with pytest.raises(WireError):
                await send(direct, most=MOST)
            assert (await send(direct)).body == BODY

    run(main)


def test_an_answer_that_is_too_large_names_its_status_and_closes() -> None:
    async def main() -> None:
        async with service(answering(sized(b"x" * 5000, b"HTTP/1.1 502 Bad Gateway"))) as (it, direct):
            with pytest.raises(WireError, match="HTTP 502 with an answer of more than 1000 bytes") as caught:
                await send(direct, most=MOST)
            assert caught.value.status == 502
            await it.lines[0].left.wait()

    run(main)


def test_an_early_answer_to_a_large_request_is_taken() -> None:
    """A service that does not want the body says so before it has read it."""

    async def serve(line: Line) -> None:
        await line.reader.readuntil(b"\r\n\r\n")
        await line.say(sized(b"too large", b"HTTP/1.1 413 Content Too Large", b"Connection: close"))
        with contextlib.suppress(ConnectionError):
            while await line.reader.read(1 << 16):
                pass

    async def main() -> None:
        async with service(serve) as (_, direct):
            reply = await send(direct, b"x" * (8 << 20))
            assert (reply.status, reply.body) == (413, b"too large")

    run(main)


def test_a_large_request_and_a_large_answer_go_through() -> None:
    async def main() -> None:
        body = bytes(range(256)) * 8192
        async with service(well_behaved) as (_, direct):
            assert (await send(direct, body, most=1 << 22)).body == body

    run(main)


def test_nobody_who_listens_is_a_wire_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]

        async def main() -> None:
            for host in ("127.0.0.1", "localhost"):
                with pytest.raises(WireError, match="no connection: ") as caught:
                    await send(DirectWire(host, port, None))
                assert not caught.value.is_stale

        run(main)


@pytest.mark.parametrize("host", ["nowhere.invalid", "api..example.com", "a" * 64 + ".example.com"])
def test_a_name_that_nobody_knows_is_a_wire_error(host: str) -> None:
    async def main() -> None:
        with pytest.raises(WireError, match="no connection: "):
            await send(DirectWire(host, 80, None))
        await asyncio.get_running_loop().shutdown_default_executor()

    run(main)


# --- many at once, and none for long ----------------------------------------------------------------------------------


def test_a_hundred_calls_at_once_get_their_own_answers_and_few_connections_stay() -> None:
    async def main() -> None:
        async with service(well_behaved) as (it, direct):
            for _ in range(3):
                bodies = [b"call %d" % n for n in range(100)]
                replies = await asyncio.gather(*[send(direct, body) for body in bodies])
                assert [reply.body for reply in replies] == bodies
                assert len(direct._idle) == MAX_IDLE
                assert direct._busy == set()
            assert len(it.lines) <= 100 + 2 * (100 - MAX_IDLE)

    run(main)


def test_a_connection_that_was_idle_for_too_long_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    at = [100.0]

    async def main() -> None:
        monkeypatch.setattr(timing, "now", lambda: at[0])
        async with service(well_behaved) as (it, direct):
            await send(direct)
            at[0] += KEEPALIVE_S
            await send(direct)
            assert len(it.lines) == 1
            at[0] += KEEPALIVE_S + 0.1
            await send(direct)
            assert len(it.lines) == 2
            await it.lines[0].left.wait()
        monkeypatch.undo()

    run(main)


def test_the_connection_that_was_used_last_is_used_first_and_the_others_age(monkeypatch: pytest.MonkeyPatch) -> None:
    at = [100.0]

    async def main() -> None:
        monkeypatch.setattr(timing, "now", lambda: at[0])
        async with service(well_behaved) as (it, direct):
            await asyncio.gather(*[send(direct) for _ in range(3)])
            for _ in range(4):
                at[0] += KEEPALIVE_S / 2
                await send(direct)
            assert len(it.lines) == 3
            assert len(direct._idle) == 1
        monkeypatch.undo()

    run(main)


def test_closing_ends_idle_connections_and_calls_in_flight() -> None:
    async def serve(line: Line) -> None:
        await line.say(sized(await line.request()))
        await line.request()
        await line.until_left()

    async def main() -> None:
        async with service(serve) as (it, direct):
            await asyncio.gather(*[send(direct) for _ in range(2)])
            hanging = asyncio.ensure_future(send(direct))
            while not direct._busy:
                await asyncio.sleep(0)
            await direct.aclose()
            with pytest.raises(WireError):
                await hanging
            for line in it.lines:
                await line.left.wait()

    run(main)


# --- cancellation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(12))
def test_a_call_that_is_cancelled_at_any_moment_leaves_the_wire_usable(steps: int) -> None:
    async def main() -> None:
        async with service(well_behaved) as (it, direct):
            if steps % 2:
                await send(direct, b"before")
            call = asyncio.ensure_future(send(direct, b"cancelled"))
            for _ in range(steps):
                await asyncio.sleep(0)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                assert (await call).body == b"cancelled"
            assert direct._busy == set()
            for n in range(3):
                assert (await send(direct, b"after %d" % n)).body == b"after %d" % n
            await direct.aclose()
            for line in it.lines:
                await line.left.wait()

    run(main)


@pytest.mark.parametrize(
    "said", [b"", b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\nhal", chunked(BODY)[:-3]]
)
def test_a_call_that_is_cancelled_in_its_answer_closes_its_connection(said: bytes) -> None:
    async def main() -> None:
        reached = asyncio.Event()

        async def serve(line: Line) -> None:
            await line.request()
            if line.number == 0:
                await line.say(said)
                reached.set()
                await line.until_left()
            else:
                await line.say(sized())

        async with service(serve) as (it, direct):
            call = asyncio.ensure_future(send(direct))
            await reached.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await it.lines[0].left.wait()
            assert (await send(direct)).body == BODY
            assert len(it.lines) == 2

    run(main)


def test_cancelled_calls_among_many_do_not_mix_up_the_answers_of_the_others() -> None:
    async def main() -> None:
        async with service(well_behaved) as (_, direct):
            for turn in range(10):
                calls = [asyncio.ensure_future(send(direct, b"%d %d" % (turn, n))) for n in range(20)]
                for n in range(turn % 5):
                    await asyncio.sleep(0.0003 * n)
                for call in calls[::3]:
                    call.cancel()
                replies: Sequence[Any] = await asyncio.gather(*calls, return_exceptions=True)
                for n, reply in enumerate(replies):
                    if n % 3 or not isinstance(reply, asyncio.CancelledError):
                        assert reply.body == b"%d %d" % (turn, n)

    run(main)


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for localhost and 127.0.0.1, and its key."""
    return certificates.certificate(tmp_path_factory.mktemp("tls"), "IP:127.0.0.1", "DNS:localhost")


def serving(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    return context


def trusting(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate[0]))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_over_tls_connections_are_kept_too(certificate: tuple[Path, Path], host: str) -> None:
    async def main() -> None:
        options = {"tls": serving(certificate), "trust": trusting(certificate), "host": host}
        async with service(well_behaved, **options) as (it, direct):  # type: ignore[arg-type]
            for n in range(10):
                body = b"%d" % n * 1000
                assert (await send(direct, body)).body == body
            assert len(it.lines) <= 2, "a session ticket may cost one"
        await asyncio.get_running_loop().shutdown_default_executor()

    run(main)


def test_over_tls_a_hundred_calls_at_once_get_their_own_answers(certificate: tuple[Path, Path]) -> None:
    async def main() -> None:
        async with service(well_behaved, tls=serving(certificate), trust=trusting(certificate)) as (_, direct):
            bodies = [b"%d" % n for n in range(100)]
            replies = await asyncio.gather(*[send(direct, body) for body in bodies])
            assert [reply.body for reply in replies] == bodies

    run(main)


def test_over_tls_answers_of_many_records_are_whole(certificate: tuple[Path, Path]) -> None:
    """asyncio's TLS writes what it has decrypted record by record into slices of our buffer."""

    async def main() -> None:
        bodies = [(b"%d," % n) * 20_000 for n in range(3)]

        async def serve(line: Line) -> None:
            for body in bodies:
                await line.request()
                head, _, rest = sized(body).partition(b"\r\n\r\n")
                for record in (head + b"\r\n\r\n", rest[:100], rest[100:]):
                    await line.say(record)

        async with service(serve, tls=serving(certificate), trust=trusting(certificate)) as (_, direct):
            for body in bodies:
                assert (await send(direct)).body == body

    run(main)


def test_over_tls_an_answer_up_to_the_end_of_the_connection_is_read(certificate: tuple[Path, Path]) -> None:
    async def main() -> None:
        serve = answering(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        async with service(serve, tls=serving(certificate), trust=trusting(certificate)) as (_, direct):
            assert (await send(direct)).body == b"all of it"

    run(main)


def test_a_certificate_that_nobody_vouches_for_is_refused(
    certificate: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        async with service(well_behaved, tls=serving(certificate), trust=trust) as (it, direct):
            with pytest.raises(WireError, match=r"no connection: .*certificate verify failed"):
                await send(direct)
            assert it.lines == []

    with caplog.at_level(logging.CRITICAL):
        run(main)


@pytest.mark.parametrize("steps", range(0, 30, 3))
def test_over_tls_a_cancelled_call_leaves_no_connection(certificate: tuple[Path, Path], steps: int) -> None:
    async def main() -> None:
        async with service(well_behaved, tls=serving(certificate), trust=trusting(certificate)) as (it, direct):
            call = asyncio.ensure_future(send(direct))
            for _ in range(steps):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            assert (await send(direct, b"next")).body == b"next"
            await direct.aclose()
            for line in it.lines:
                await line.left.wait()

    run(main)
