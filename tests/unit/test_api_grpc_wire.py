"""One gRPC call over HTTP/2 as servers may speak it, well or badly: frames, headers, flow control, bounds, ends, TLS.

What the client says is judged by h2, an implementation of others that refuses what RFC 9113 does not allow.
"""

# ruff: noqa: ASYNC110 # a turn of the loop is all that is waited for

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import hpack
import pytest
from h2.settings import SettingCodes
from hypothesis import given
from hypothesis import strategies as st

from spooled_supervisor import timing
from spooled_supervisor.api import grpc_wire, wire
from spooled_supervisor.api.grpc_wire import (
    FIRST_WINDOW_BYTES,
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    MAX_UNSENT_BYTES,
    MAX_WINDOW_BYTES,
    OUR_WINDOW_BYTES,
    CallEnd,
    DirectCall,
    Target,
)
from tests.support import certificates

T = TypeVar("T")
LIMIT_S = 20.0
MOST = 8 << 20
PATH = "/spooled.v1.QueueService/ProcessJobs"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
ACK = END_STREAM = 1
END_HEADERS, PADDED, WITH_PRIORITY = 4, 8, 32
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR = 0, 1, 3, 6
CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 8, 9, 11
HIGH_WATER_BYTES = 64 << 10
"""Of asyncio's transports: when more than this is unsent they ask to wait."""

Pairs = Sequence[tuple[str, str]]
Frame = tuple[int, int, int, bytes]
ANSWERED: Pairs = ((":status", "200"), ("content-type", "application/grpc"))
DONE: Pairs = (("grpc-status", "0"),)


# --- what servers say -------------------------------------------------------------------------------------------------


def frame(kind: int, flags: int = 0, stream: int = 1, payload: bytes = b"") -> bytes:
    return struct.pack(">L", len(payload))[1:] + struct.pack(">BBL", kind, flags, stream) + payload


def number(value: int) -> bytes:
    return struct.pack(">L", value)


def settings(*pairs: tuple[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HL", *pair) for pair in pairs))


def room(more: int, stream: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, number(more))


def ping(payload: bytes = b"whoisit?") -> bytes:
    return frame(PING, 0, 0, payload)


def goaway(last: int, error: int = NO_ERROR, said: bytes = b"") -> bytes:
    return frame(GOAWAY, 0, 0, number(last) + number(error) + said)


def block(pairs: Pairs) -> bytes:
    """Without the dynamic table: may be repeated and left out."""
    return hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(*pair) for pair in pairs])


def headers(pairs: Pairs = ANSWERED, flags: int = END_HEADERS) -> bytes:
    return frame(HEADERS, flags, 1, block(pairs))


def trailers(pairs: Pairs = DONE) -> bytes:
    return headers(pairs, END_HEADERS | END_STREAM)


def packed(*messages: bytes) -> bytes:
    """As gRPC puts them into DATA."""
    return b"".join(struct.pack(">BL", 0, len(message)) + message for message in messages)


def data(*messages: bytes) -> bytes:
    return frame(DATA, 0, 1, packed(*messages))


def frames_of(written: bytes) -> list[Frame]:
    """What the client has written, without the preface."""
    written = written.removeprefix(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    found = []
    while written:
        size = int.from_bytes(written[:3])
        kind, flags, stream = struct.unpack_from(">BBL", written, 3)
        assert len(written) >= 9 + size, "whole frames only"
        found.append((kind, flags, stream, written[9 : 9 + size]))
        written = written[9 + size :]
    return found


def cut(whole: bytes, places: list[int]) -> list[bytes]:
    at = sorted({place % (len(whole) + 1) for place in places})
    return [whole[a:b] for a, b in zip([0, *at], [*at, len(whole)], strict=True)]


# --- who owns a call, and calls without a network ---------------------------------------------------------------------


class Owner:
    """Notes what it is told, and what it is told too late."""

    def __init__(self, *unsent: bytes) -> None:
        self.unsent = deque(unsent)
        self.asked = 0
        self.messages: list[bytes] = []
        self.leavings = 0
        self.ends: list[CallEnd] = []
        self.late: list[str] = []
        self.call: DirectCall | None = None
        self.is_over = False
        self.at_message: Callable[[bytes], None] = lambda _raw: None
        self.at_ask: Callable[[], None] = lambda: None
        self._news = asyncio.Event()

    def next_message(self) -> bytes | None:
        self._note("next_message")
        self.asked += 1
        self.at_ask()
        return self.unsent.popleft() if self.unsent else None

    def on_message(self, raw: bytes) -> None:
        self._note("on_message")
        assert type(raw) is bytes
        self.messages.append(raw)
        self.at_message(raw)

    def on_leaving(self) -> None:
        self._note("on_leaving")
        self.leavings += 1

    def on_end(self, end: CallEnd) -> None:
        self._note("on_end")
        self.ends.append(end)
        self.is_over = True

    def say(self, *messages: bytes) -> None:
        assert self.call is not None
        self.unsent += messages
        self.call.wake()

    def close(self) -> None:
        assert self.call is not None
        self.is_over = True
        self.call.close()

    @property
    def end(self) -> CallEnd:
        """The one and only."""
        assert self.late == []
        (end,) = self.ends
        return end

    async def until(self, holds: Callable[[], object]) -> None:
        while not holds():
            assert not self.ends
            self._news.clear()
            await self._news.wait()

    async def until_end(self) -> CallEnd:
        await self.until(lambda: self.ends)
        return self.end

    def _note(self, name: str) -> None:
        self._news.set()
        if self.is_over:
            self.late.append(name)


class Pipe(asyncio.Transport):
    """A transport without a network. If `stalled`, nothing leaves it, and it asks to wait as asyncio's do."""

    def __init__(self, call: DirectCall, *, stalled: bool = False) -> None:
        super().__init__(extra={"socket": self})
        self._call = call
        self._stalled = stalled
        self._asks_to_wait = False
        self.writes: list[bytes] = []
        self.unsent = 0
        self.is_aborted = False
        self.is_lost = False

    def setsockopt(self, *_: int) -> None:
        """As a socket."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.is_closing()
        self.writes.append(bytes(data))
        if self._stalled:
            self.unsent += len(data)
            if self.unsent > HIGH_WATER_BYTES and not self._asks_to_wait:
                self._asks_to_wait = True
                self._call.pause_writing()

    def abort(self) -> None:
        assert not self.is_aborted
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted or self.is_lost

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def lose(self) -> None:
        """As the loop says it, once."""
        if not self.is_lost:
            self.is_lost = True
            self._call.connection_lost(None)

    def frames(self, *kinds: int) -> list[Frame]:
        return [one for one in frames_of(b"".join(self.writes)) if not kinds or one[0] in kinds]

    def sent(self) -> bytes:
        """The payload of all DATA."""
        return b"".join(payload for _, _, _, payload in self.frames(DATA))

    def hear(self, heard: bytes) -> None:
        """The server says this, in reads as large as they can be."""
        while heard and not self.is_aborted:
            buffer = self._call.get_buffer(-1)
            size = min(len(heard), len(buffer))
            buffer[:size] = heard[:size]
            heard = heard[size:]
            self._call.buffer_updated(size)


def begin(
    owner: Owner, *, most: int = MOST, metadata: Pairs = (), host: str = "127.0.0.1", port: int = 1
) -> DirectCall:
    owner.call = DirectCall(Target(host, port, None, most), PATH, metadata, owner)
    return owner.call


@contextlib.contextmanager
def piped(owner: Owner, *, most: int = MOST, stalled: bool = False) -> Iterator[Pipe]:
    """A call on a Pipe; nothing must be waited for, or `nobody_connects` be used."""
    call = begin(owner, most=most)
    pipe = Pipe(call, stalled=stalled)
    call.connection_made(pipe)
    try:
        yield pipe
    finally:
        if not (pipe.is_aborted or pipe.is_lost):
            owner.close()
            assert pipe.is_aborted
        pipe.lose()
        assert owner.late == []
        assert len(owner.ends) <= 1


@pytest.fixture
def nobody_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(*_: object) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(wire, "connect", connect)


def run(main: Callable[[], Coroutine[Any, Any, T]], *, debug: bool = True) -> T:
    """On the loop of production; nothing of a call may surface anywhere else."""
    complaints: list[str] = []

    def complain(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "incoming connection" not in context["message"]:  # the server's own trouble
            complaints.append(str(context))

    async def checked() -> T:
        asyncio.get_running_loop().set_exception_handler(complain)
        async with asyncio.timeout(LIMIT_S):
            result = await main()
            while asyncio.all_tasks() != {asyncio.current_task()}:
                await asyncio.sleep(0)
        return result

    with asyncio.Runner(loop_factory=timing.new_event_loop, debug=debug) as runner:
        result = runner.run(checked())
        if debug:
            gc.collect(1)
    assert complaints == []
    return result


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@dataclass(frozen=True)
class Heard:
    """What came of what a server said."""

    messages: list[bytes]
    ends: list[CallEnd]
    leavings: int
    frames: list[Frame]

    @property
    def end(self) -> CallEnd:
        (end,) = self.ends
        return end


def hear(*pieces: bytes, most: int = MOST, ends: bool = False) -> Heard:
    async def main() -> Heard:
        owner = Owner()
        with piped(owner, most=most) as pipe:
            for piece in pieces:
                pipe.hear(piece)
            if ends and not pipe.is_aborted and owner.call is not None:
                owner.call.eof_received()
                pipe.lose()
        return Heard(owner.messages, owner.ends, owner.leavings, pipe.frames())

    return run(main, debug=False)  # which would take most of the time, and here nothing goes through the loop


# --- taking frames apart ----------------------------------------------------------------------------------------------


@dataclass
class Said:
    """A valid stream of a server's, and what is to be understood."""

    data: bytes = b""
    messages: list[bytes] = field(default_factory=list)
    end: CallEnd | None = None
    answers: list[Frame] = field(default_factory=list)
    last: bytes = b""
    """The trailers; `data` is what comes before them."""

    @property
    def whole(self) -> bytes:
        return self.data + self.last


@st.composite
def valid_streams(draw: st.DrawFn) -> Said:
    """With all that RFC 9113 allows: padding, priorities, blocks in pieces, frames of unknown types amid the others."""
    said = Said(settings((3, 100), (0xF000, 7)), draw(st.lists(st.binary(max_size=60), max_size=6)))
    said.answers.append((SETTINGS, ACK, 0, b""))
    encoder = hpack.Encoder()
    places = st.lists(st.integers(0, 1000), max_size=3)

    def padded(payload: bytes, flags: int) -> tuple[bytes, int]:
        padding = draw(st.none() | st.integers(0, 255))
        if padding is None:
            return payload, flags
        return bytes([padding]) + payload + bytes(padding), flags | PADDED

    def amid() -> None:
        for kind in draw(st.lists(st.sampled_from(["ping", "pong", "room", "priority", "other", "settings", "ack"]))):
            if kind == "ping":
                payload = draw(st.binary(min_size=8, max_size=8))
                said.data += ping(payload)
                said.answers.append((PING, ACK, 0, payload))
            elif kind == "pong":
                said.data += frame(PING, ACK, 0, bytes(8))
            elif kind == "room":
                said.data += room(
                    draw(st.integers(1, 1000)) | draw(st.sampled_from([0, 1 << 31])), draw(st.integers(0, 1))
                )
            elif kind == "priority":
                said.data += frame(PRIORITY, 0, draw(st.integers(1, 9)), bytes(5))
            elif kind == "other":
                said.data += frame(
                    draw(st.integers(10, 255)),
                    draw(st.integers(0, 255)),
                    draw(st.integers(0, 2**32 - 1)),
                    draw(st.binary(max_size=20)),
                )
            elif kind == "settings":
                said.data += settings((4, draw(st.integers(0, 100_000))), (5, 20_000))
                said.answers.append((SETTINGS, ACK, 0, b""))
            else:
                said.data += frame(SETTINGS, ACK, 0)

    def framed(pairs: Pairs, flags: int) -> bytes:
        first, *rest = cut(encoder.encode(pairs, huffman=draw(st.booleans())), draw(places))
        if draw(st.booleans()):
            first, flags = bytes(5) + first, flags | WITH_PRIORITY
        first, flags = padded(first, flags)
        frames = frame(HEADERS, flags | (0 if rest else END_HEADERS), 1, first)
        for n, piece in enumerate(rest, 1):
            frames += frame(CONTINUATION, END_HEADERS if n == len(rest) else 0, 1, piece)
        return frames

    amid()
    for _ in range(draw(st.integers(0, 2))):
        said.data += framed([(":status", "103"), ("link", "</a>")], 0)
        amid()
    said.data += framed([*ANSWERED, ("server", "x" * draw(st.integers(0, 300)))], 0)
    amid()
    for piece in cut(packed(*said.messages), draw(places) + draw(places)):
        payload, flags = padded(piece, 0)
        said.data += frame(DATA, flags, 1, payload)
        amid()
    index = draw(st.integers(0, 16))
    said.end = CallEnd(grpc_wire.CODES[index], "why %", draw(st.sampled_from([None, "7"])))
    hint = [] if said.end.retry_after is None else [("retry-after", said.end.retry_after)]
    said.last = framed([("grpc-status", str(index)), ("grpc-message", "why %25"), *hint], END_STREAM)
    return said


@given(valid_streams(), st.lists(st.integers(0, 10_000), max_size=8), st.lists(st.integers(0, 100), max_size=2))
def test_any_split_of_the_bytes_gives_the_same_messages_answers_and_end(
    said: Said, places: list[int], last_places: list[int]
) -> None:
    heard = hear(*cut(said.data, places), *cut(said.last, last_places))
    assert heard.messages == said.messages
    assert heard.end == said.end
    assert [one for one in heard.frames if one[0] in (PING, SETTINGS)][1:] == said.answers


@given(valid_streams())
def test_byte_by_byte_it_is_the_same_as_in_one_piece(said: Said) -> None:
    one, many = hear(said.whole), hear(*[said.whole[n : n + 1] for n in range(len(said.whole))])
    assert (one.messages, one.end) == (many.messages, many.end) == (said.messages, said.end)


@given(valid_streams(), st.lists(st.tuples(st.integers(0, 100_000), st.integers(0, 255)), min_size=1, max_size=5))
def test_no_change_of_bytes_breaks_it(said: Said, changes: list[tuple[int, int]]) -> None:
    changed = bytearray(said.whole)
    for place, value in changes:
        changed[place % len(changed)] = value
    assert len(hear(bytes(changed), most=1000, ends=True).ends) == 1


@given(st.binary(max_size=300))
def test_no_bytes_break_it(noise: bytes) -> None:
    before = settings()
    for said in (
        noise,
        before + noise,
        before + frame(HEADERS, END_HEADERS, 1, noise),
        before + headers() + frame(DATA, 0, 1, noise),
        before + headers() + frame(HEADERS, END_HEADERS | END_STREAM, 1, noise),
        before + headers() + noise,
    ):
        assert len(hear(said, most=1000, ends=True).ends) == 1


BIG = bytes(range(256)) * 200
TALKS: dict[str, tuple[bytes, list[bytes]]] = {
    "no messages": (headers(), []),
    "one message": (headers() + data(b"one"), [b"one"]),
    "several messages in one frame": (headers() + data(b"one", b"", b"three"), [b"one", b"", b"three"]),
    "only empty messages": (headers() + data(b"", b"") + data(b""), [b"", b"", b""]),
    "empty frames": (headers() + data() + data(b"one") + data(), [b"one"]),
    "one message over many frames": (
        headers()
        + b"".join(frame(DATA, 0, 1, piece) for piece in cut(packed(BIG), [1, 5, 6, *range(100, 51_000, 997)])),
        [BIG],
    ),
    "a message in frames as large as they may be": (
        headers()
        + frame(DATA, 0, 1, packed(BIG)[:MAX_FRAME_BYTES])
        + frame(DATA, 0, 1, packed(BIG)[MAX_FRAME_BYTES:32_768])
        + frame(DATA, 0, 1, packed(BIG)[32_768:49_152])
        + frame(DATA, 0, 1, packed(BIG)[49_152:]),
        [BIG],
    ),
    "padding": (
        frame(HEADERS, END_HEADERS | PADDED, 1, b"\x05" + block(ANSWERED) + bytes(5))
        + frame(DATA, PADDED, 1, b"\xff" + packed(b"one") + bytes(255))
        + frame(DATA, PADDED, 1, b"\x00" + packed(b"two"))
        + frame(DATA, PADDED, 1, b"\x02" + bytes(2)),
        [b"one", b"two"],
    ),
    "padding and a priority": (
        frame(HEADERS, END_HEADERS | PADDED | WITH_PRIORITY, 1, b"\x01" + bytes(5) + block(ANSWERED) + bytes(1))
        + data(b"one"),
        [b"one"],
    ),
    "a priority": (
        frame(HEADERS, END_HEADERS | WITH_PRIORITY, 1, b"\x80\0\0\0\xff" + block(ANSWERED)) + data(b"1"),
        [b"1"],
    ),
    "headers in pieces": (
        frame(HEADERS, 0, 1, block(ANSWERED)[:1])
        + frame(CONTINUATION, 0, 1, block(ANSWERED)[1:3])
        + frame(CONTINUATION, 0, 1)
        + frame(CONTINUATION, END_HEADERS, 1, block(ANSWERED)[3:])
        + data(b"one"),
        [b"one"],
    ),
    "interim answers": (
        headers(((":status", "100"),)) + headers(((":status", "103"), ("link", "</a>"))) + headers() + data(b"one"),
        [b"one"],
    ),
    "frames of unknown types": (
        frame(0xA, 0, 0, b"altsvc") + headers() + frame(0xFF, 0xFF, 77, b"?") + data(b"one") + frame(0x10, 0, 1),
        [b"one"],
    ),
    "PRIORITY frames": (
        frame(PRIORITY, 0, 1, bytes(5)) + headers() + frame(PRIORITY, 0, 9, bytes(5)) + data(b"1"),
        [b"1"],
    ),
    "the reserved bit of streams": (
        frame(HEADERS, END_HEADERS, 1 | 1 << 31, block(ANSWERED)) + frame(DATA, 0, 1 | 1 << 31, packed(b"one")),
        [b"one"],
    ),
    "flags that mean nothing": (
        frame(SETTINGS, 0xFE, 0) + frame(PING, 0xFE, 0, bytes(8)) + headers() + data(b"1"),
        [b"1"],
    ),
    "application/grpc+proto": (
        headers(((":status", "200"), ("content-type", "application/grpc+proto"))) + data(b"1"),
        [b"1"],
    ),
    "grpc-status too early": (headers((*ANSWERED, ("grpc-status", "5"))) + data(b"one"), [b"one"]),
}


@pytest.mark.parametrize("name", TALKS)
def test_what_servers_may_say_is_understood(name: str) -> None:
    said, messages = TALKS[name]
    heard = hear(settings() + said + trailers() + data(b"after the end"))
    assert heard.messages == messages
    assert heard.end == CallEnd("OK")


def test_a_large_message_in_small_frames_takes_no_more_than_its_share_of_time() -> None:
    """Its beginning must not be copied with every frame: one that came in frames of a byte would hold up the loop."""

    async def main() -> None:
        owner = Owner()
        large = bytes(8 << 20)
        body = packed(large)
        frames = b"".join(frame(DATA, 0, 1, body[at : at + 2048]) for at in range(0, len(body), 2048))
        with piped(owner, most=len(large)) as pipe:
            pipe.hear(settings() + headers())
            before = time.thread_time()
            pipe.hear(frames)
            assert owner.messages == [large]
            assert time.thread_time() - before < 1.5

    run(main)


# --- how calls end ----------------------------------------------------------------------------------------------------


def http(status: str, *more: tuple[str, str]) -> Pairs:
    return (":status", status), ("content-type", "text/html"), *more


ENDS: dict[str, tuple[bytes, CallEnd]] = {
    "OK": (headers() + trailers(), CallEnd("OK")),
    "OK as the only headers": (trailers((*ANSWERED, *DONE)), CallEnd("OK")),
    "a status with words": (
        headers() + trailers((("grpc-status", "9"), ("grpc-message", "not now"))),
        CallEnd("FAILED_PRECONDITION", "not now"),
    ),
    "an error as the only headers": (
        trailers((*ANSWERED, ("grpc-status", "16"), ("grpc-message", "who are you?"))),
        CallEnd("UNAUTHENTICATED", "who are you?"),
    ),
    "an error as the only headers, after interim ones": (
        headers(((":status", "103"),)) + trailers((*ANSWERED, ("grpc-status", "7"))),
        CallEnd("PERMISSION_DENIED"),
    ),
    "words in percent": (
        headers() + trailers((("grpc-status", "2"), ("grpc-message", "50%25 %C3%BC%E2%82%AC%0A!"))),
        CallEnd("UNKNOWN", "50% ü€\n!"),
    ),
    "words in percent that are no UTF-8": (
        headers() + trailers((("grpc-status", "2"), ("grpc-message", "%ff%C3 %zz %4 %"))),
        CallEnd("UNKNOWN", "�� %zz %4 %"),
    ),
    "words in plain UTF-8": (
        headers() + trailers((("grpc-status", "2"), ("grpc-message", "ü%C3%BC"))),
        CallEnd("UNKNOWN", "üü"),
    ),
    "when to try again": (
        headers() + trailers((("grpc-status", "8"), ("grpc-message", "slow down"), ("retry-after", "17"))),
        CallEnd("RESOURCE_EXHAUSTED", "slow down", "17"),
    ),
    "when to try again, as the only headers": (
        trailers((*ANSWERED, ("grpc-status", "14"), ("retry-after", "soon"))),
        CallEnd("UNAVAILABLE", "", "soon"),
    ),
    "trailers in pieces": (
        headers()
        + frame(HEADERS, END_STREAM, 1, block(DONE)[:4])
        + frame(CONTINUATION, END_HEADERS, 1, block(DONE)[4:]),
        CallEnd("OK"),
    ),
    "trailers without a status": (headers() + trailers((("x", "y"),)), CallEnd("UNKNOWN")),
    "no trailers at all": (headers() + trailers(()), CallEnd("UNKNOWN")),
    "another content": (headers(http("200")), CallEnd("UNKNOWN", "Received http2 header with status: 200")),
    "no content type": (headers(((":status", "200"),)), CallEnd("UNKNOWN", "Received http2 header with status: 200")),
    "a gRPC status with an HTTP error": (
        trailers(http("503", ("grpc-status", "8"), ("grpc-message", "full"))),
        CallEnd("RESOURCE_EXHAUSTED", "full"),
    ),
    "an HTTP error and when to try again": (
        headers(http("503", ("retry-after", "120"))),
        CallEnd("UNAVAILABLE", "Received http2 header with status: 503", "120"),
    ),
    "an HTTP error with nothing": (
        trailers(((":status", "502"),)),
        CallEnd("UNAVAILABLE", "Received http2 header with status: 502"),
    ),
    "an HTTP error whose type is gRPC": (
        headers(((":status", "404"), ("content-type", "application/grpc"))),
        CallEnd("UNIMPLEMENTED", "Received http2 header with status: 404"),
    ),
    "an interim answer that is the last": (
        trailers(((":status", "103"),)),
        CallEnd("UNKNOWN", "Received http2 header with status: 103"),
    ),
    "no HTTP status": (
        headers((("content-type", "application/grpc"),)),
        CallEnd("UNKNOWN", "Received http2 header with status: "),
    ),
    "an HTTP status beyond all numbers": (
        headers(http("9" * 5000)),
        CallEnd("UNKNOWN", "Received http2 header with status: 9999999999"),
    ),
    "an HTTP status in other digits": (
        frame(HEADERS, END_HEADERS, 1, hpack.Encoder().encode([(b":status", b"\xb2\xb2\xb2")])),
        CallEnd("UNKNOWN", "Received http2 header with status: ²²²"),
    ),
}
ENDS |= {
    f"gRPC status {status!r}": (
        headers() + trailers((("grpc-status", status), ("grpc-message", "why"))),
        CallEnd(code, "why"),
    )
    for status, code in {
        **{str(n): code for n, code in enumerate(grpc_wire.CODES)},
        **dict.fromkeys(["17", "99", "-1", "+1", "1.0", "100", "9" * 5000, "", "OK", " 0", "²"], "UNKNOWN"),
    }.items()
}
ENDS |= {
    f"HTTP status {status}": (headers(http(status)), CallEnd(code, f"Received http2 header with status: {status}"))
    for status, code in {
        "204": "UNKNOWN",
        "302": "UNKNOWN",
        "400": "INTERNAL",
        "401": "UNAUTHENTICATED",
        "403": "PERMISSION_DENIED",
        "404": "UNIMPLEMENTED",
        "405": "UNKNOWN",
        "415": "UNKNOWN",
        "429": "UNAVAILABLE",
        "500": "UNKNOWN",
        "502": "UNAVAILABLE",
        "503": "UNAVAILABLE",
        "504": "UNAVAILABLE",
        "505": "UNKNOWN",
    }.items()
}


@pytest.mark.parametrize("name", ENDS)
def test_the_status_of_the_end(name: str) -> None:
    said, end = ENDS[name]
    heard = hear(settings() + said + data(b"after the end") + trailers())
    assert heard.messages == []
    assert heard.end == end
    assert heard.frames[-2:] == [(RST_STREAM, 0, 1, number(CANCEL)), (GOAWAY, 0, 0, bytes(8))]


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", "HTTP/1.1 400 Bad Request"),
        (b"HTTP/1.0 505 HTTP Version Not Supported\r\n\r\n<html>" + bytes(1000), "HTTP/1.0 505"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "SSH-2.0"),
        (ping(), "not HTTP/2"),
        (headers() + trailers(), "not HTTP/2"),
        (frame(SETTINGS, 0, 0, bytes(6 * 4000)), "not HTTP/2"),
    ],
    ids=["HTTP/1.1", "HTTP/1.0", "SSH", "a ping first", "headers first", "settings that are too long"],
)
def test_what_is_not_http_2_is_unavailable_in_words(said: bytes, text: str) -> None:
    end = hear(said).end
    assert end.code == "UNAVAILABLE"
    assert text in end.details
    assert len(end.details) < 400


@pytest.mark.parametrize(
    ("said", "code", "text"),
    [
        (goaway(0), "UNAVAILABLE", "the server has gone away (HTTP/2 code 0)"),
        (goaway(1 << 31), "UNAVAILABLE", "the server has gone away (HTTP/2 code 0)"),
        (goaway(1, 2), "UNAVAILABLE", "the server has gone away (HTTP/2 code 2)"),
        (
            goaway(1, 11, b"too_many_pings"),
            "RESOURCE_EXHAUSTED",
            "the server has gone away (HTTP/2 code 11): too_many_pings",
        ),
        (goaway(0, 2, b"\xff"), "UNAVAILABLE", "the server has gone away (HTTP/2 code 2): �"),
    ],
    ids=["before our call", "before our call, with the reserved bit", "with an error", "for too much", "in no words"],
)
def test_a_server_that_goes_away_at_once(said: bytes, code: str, text: str) -> None:
    heard = hear(settings() + headers() + said + data(b"after the end"))
    assert heard.end == CallEnd(code, text)
    assert (heard.messages, heard.leavings) == ([], 0)


def test_a_server_that_goes_away_in_peace_is_heard_to_the_end() -> None:
    soon = goaway(MAX_WINDOW_BYTES) + goaway(1)
    heard = hear(settings() + headers() + data(b"one") + soon + data(b"two") + trailers())
    assert heard.messages == [b"one", b"two"]
    assert heard.leavings >= 1
    assert heard.end == CallEnd("OK")


def test_a_stream_that_breaks_off_anywhere_is_unavailable() -> None:
    whole = settings() + headers() + data(b"one", b"two") + data(b"three") + ping() + trailers()
    for length in range(len(whole)):
        heard = hear(whole[:length], ends=True)
        assert heard.messages == [b"one", b"two", b"three"][: len(heard.messages)]
        assert heard.end == CallEnd("UNAVAILABLE", "the connection was lost: the server has closed it")


@dataclass(frozen=True)
class Violation:
    """What a server must not say, what becomes of it, and the code for the server (None: one or the other)."""

    said: bytes
    text: str
    error: int | None = PROTOCOL_ERROR
    code: str = "INTERNAL"
    messages: Sequence[bytes] = ()


LONG = frame(0x20, 0, 0, bytes(MAX_FRAME_BYTES + 1))
CONTINUED = frame(HEADERS, 0, 1, block(ANSWERED)[:3])
VIOLATIONS: dict[str, Violation] = {
    "a frame that is too long": Violation(LONG, "longer than was agreed", FRAME_SIZE_ERROR),
    "the beginning of a frame that is too long": Violation(LONG[:9], "longer than was agreed", FRAME_SIZE_ERROR),
    "DATA that is too long": Violation(
        headers() + frame(DATA, 0, 1, bytes(1 << 20))[:9], "longer than was agreed", FRAME_SIZE_ERROR
    ),
    "DATA of the connection": Violation(headers() + frame(DATA, 0, 0, packed(b"?")), "data that was not asked for"),
    "DATA of another stream": Violation(headers() + frame(DATA, 0, 3, packed(b"?")), "data that was not asked for"),
    "DATA before headers": Violation(data(b"?"), "data that was not asked for"),
    "DATA after interim headers": Violation(headers(((":status", "100"),)) + data(b"?"), "data that was not asked for"),
    "HEADERS of the connection": Violation(
        frame(HEADERS, END_HEADERS, 0, block(ANSWERED)), "headers of another stream"
    ),
    "HEADERS of another stream": Violation(
        frame(HEADERS, END_HEADERS, 2, block(ANSWERED)), "headers of another stream"
    ),
    "HEADERS amid messages": Violation(
        headers() + data(b"1") + headers(DONE), "headers amid the messages", messages=[b"1"]
    ),
    "interim headers amid messages": Violation(headers() + headers(((":status", "100"),)), "headers amid the messages"),
    "HEADERS that are all, without a status": Violation(trailers(ANSWERED), "ended without a status"),
    "HEADERS without room for their priority": Violation(
        frame(HEADERS, END_HEADERS | WITH_PRIORITY, 1, b"\x88"), "HTTP/2 as it must not be", FRAME_SIZE_ERROR
    ),
    "CONTINUATION of nothing": Violation(
        frame(CONTINUATION, END_HEADERS, 1, block(ANSWERED)), "the rest of headers that have not begun"
    ),
    "CONTINUATION of what is whole": Violation(
        headers() + frame(CONTINUATION, END_HEADERS, 1), "the rest of headers that have not begun"
    ),
    "CONTINUATION of another stream": Violation(
        CONTINUED + frame(CONTINUATION, END_HEADERS, 3, block(ANSWERED)[3:]), "headers of another stream"
    ),
    "a ping amid headers": Violation(CONTINUED + ping(), "between the parts of a header block"),
    "settings amid headers": Violation(CONTINUED + settings(), "between the parts of a header block"),
    "DATA amid headers": Violation(CONTINUED + data(b"?"), "between the parts of a header block"),
    "HEADERS amid headers": Violation(CONTINUED + headers(), "between the parts of a header block"),
    "an unknown frame amid headers": Violation(CONTINUED + frame(0x20), "between the parts of a header block"),
    "a huge block of headers": Violation(
        CONTINUED + frame(CONTINUATION, 0, 1, bytes(16_000)) * 4 + frame(CONTINUATION, END_HEADERS, 1, bytes(2000)),
        "more headers than there may be",
        ENHANCE_YOUR_CALM,
    ),
    "an endless block of headers": Violation(
        CONTINUED + frame(CONTINUATION, 0, 1, b"\0\1a\0" * 16) * 10_000,
        "more headers than there may be",
        ENHANCE_YOUR_CALM,
    ),
    "headers that grow": Violation(  # one entry of 4000 bytes in the table, named again and again
        frame(HEADERS, END_HEADERS, 1, hpack.Encoder().encode([("x", "y" * 3900)] * 17)), "headers that cannot be", 9
    ),
    "headers with an index that is none": Violation(
        frame(HEADERS, END_HEADERS, 1, b"\xfe"), "headers that cannot be read", COMPRESSION_ERROR
    ),
    "headers that are cut off": Violation(
        frame(HEADERS, END_HEADERS, 1, block(ANSWERED)[:-1]), "headers that cannot be read", COMPRESSION_ERROR
    ),
    "headers with a number that does not end": Violation(
        frame(HEADERS, END_HEADERS, 1, b"\xff" * 1000), "headers that cannot be read", COMPRESSION_ERROR
    ),
    "headers with a table that is too large": Violation(
        frame(HEADERS, END_HEADERS, 1, b"\x3f\xe2\x1f" + block(ANSWERED)),
        "headers that cannot be read",
        COMPRESSION_ERROR,
    ),
    "headers in no Huffman code": Violation(
        frame(HEADERS, END_HEADERS, 1, b"\x00\x84\xff\xff\xff\xff\x00"),
        "headers that cannot be read",
        COMPRESSION_ERROR,
    ),
    "trailers that cannot be read": Violation(
        headers() + frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\x80"),
        "headers that cannot be read",
        COMPRESSION_ERROR,
    ),
    "PUSH_PROMISE": Violation(
        headers() + frame(PUSH_PROMISE, END_HEADERS, 1, number(2) + block(ANSWERED)), "pushes what was not asked for"
    ),
    "a ping that is short": Violation(ping(bytes(7)), "a ping that is none", FRAME_SIZE_ERROR),
    "a ping that is long": Violation(ping(bytes(9)), "a ping that is none", FRAME_SIZE_ERROR),
    "an answer to a ping that is empty": Violation(frame(PING, ACK, 0), "a ping that is none", FRAME_SIZE_ERROR),
    "a ping of a stream": Violation(frame(PING, 0, 1, bytes(8)), "a ping that is none", None),
    "settings of no size": Violation(frame(SETTINGS, 0, 0, bytes(5)), "settings of no size", FRAME_SIZE_ERROR),
    "settings of a stream": Violation(frame(SETTINGS, 0, 1), "HTTP/2 as it must not be", None),
    "settings with a window that is too large": Violation(
        settings((4, 1 << 31)), "more room than there can be", FLOW_CONTROL_ERROR
    ),
    "settings with frames that are too small": Violation(settings((5, 16_383)), "frames of no size"),
    "settings with frames that are too large": Violation(settings((5, 1 << 24)), "frames of no size"),
    "settings that open a window too far": Violation(
        room(MAX_WINDOW_BYTES - FIRST_WINDOW_BYTES, 1) + settings((4, FIRST_WINDOW_BYTES + 1)),
        "more room than there can be",
        FLOW_CONTROL_ERROR,
    ),
    "thanks for settings, with more": Violation(
        frame(SETTINGS, ACK, 0, bytes(6)), "HTTP/2 as it must not be", FRAME_SIZE_ERROR
    ),
    "no room for the connection": Violation(room(0, 0), "no more room"),
    "no room for the stream": Violation(room(0, 1), "no more room"),
    "no room but the reserved bit": Violation(room(1 << 31, 0), "no more room"),
    "room for another stream": Violation(room(1, 3), "HTTP/2 as it must not be"),
    "too much room for the connection": Violation(
        room(MAX_WINDOW_BYTES - FIRST_WINDOW_BYTES + 1, 0), "more room than there can be", FLOW_CONTROL_ERROR
    ),
    "too much room for the stream": Violation(
        room(1, 1) + room(MAX_WINDOW_BYTES - FIRST_WINDOW_BYTES, 1), "more room than there can be", FLOW_CONTROL_ERROR
    ),
    "room of no size": Violation(frame(WINDOW_UPDATE, 0, 0, bytes(3)), "room of no size", FRAME_SIZE_ERROR),
    "a reset of no size": Violation(frame(RST_STREAM, 0, 1, bytes(5)), "a reset that is none", FRAME_SIZE_ERROR),
    "a reset of the connection": Violation(frame(RST_STREAM, 0, 0, bytes(4)), "a reset that is none", None),
    "a reset of another stream": Violation(frame(RST_STREAM, 0, 3, bytes(4)), "a reset that is none", None),
    "a goodbye of no size": Violation(frame(GOAWAY, 0, 0, bytes(7)), "a goodbye of no size", FRAME_SIZE_ERROR),
    "DATA with nothing but padding, of no length": Violation(
        headers() + frame(DATA, PADDED, 1), "more padding than there is"
    ),
    "DATA with more padding than there is": Violation(
        headers() + frame(DATA, PADDED, 1, b"\x03" + bytes(2)), "more padding than there is"
    ),
    "HEADERS with more padding than there is": Violation(
        frame(HEADERS, END_HEADERS | PADDED, 1, b"\xff" + block(ANSWERED)), "more padding than there is"
    ),
    "a compressed message": Violation(
        headers() + data(b"one") + frame(DATA, 0, 1, b"\1\0\0\0\1x"),
        "a message is compressed",
        CANCEL,
        messages=[b"one"],
    ),
    "a message that is too large": Violation(
        headers() + data(b"one") + frame(DATA, 0, 1, b"\0" + number(1001)),
        "Received message larger than max (1001 vs. 1000)",
        CANCEL,
        "RESOURCE_EXHAUSTED",
        [b"one"],
    ),
    "the largest of all messages": Violation(
        headers() + frame(DATA, 0, 1, b"\0\xff\xff\xff\xff"),
        "Received message larger than max (4294967295 vs. 1000)",
        CANCEL,
        "RESOURCE_EXHAUSTED",
    ),
    "an end without trailers": Violation(
        headers() + frame(DATA, END_STREAM, 1, packed(b"one")), "ended without a status", messages=[b"one"]
    ),
    "an end without anything": Violation(headers() + frame(DATA, END_STREAM, 1), "ended without a status"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_what_a_server_must_not_say_ends_the_call_once_with_a_reason(name: str) -> None:
    it = VIOLATIONS[name]
    heard = hear(settings() + it.said + headers() + data(b"after the end") + ping() + trailers(), most=1000)
    assert heard.end.code == it.code
    assert it.text in heard.end.details
    assert heard.messages == list(it.messages)
    last_frames = [kind for kind, _, _, _ in heard.frames[-2:]]
    assert last_frames == [RST_STREAM, GOAWAY]


@pytest.mark.parametrize("name", [name for name, it in VIOLATIONS.items() if it.error is not None])
def test_what_a_server_must_not_say_is_named_to_it(name: str) -> None:
    it = VIOLATIONS[name]
    assert it.error is not None
    reset, away = hear(settings() + it.said, most=1000).frames[-2:]
    assert reset == (RST_STREAM, 0, 1, number(it.error))
    assert away == (GOAWAY, 0, 0, number(0) + number(0 if it.error == CANCEL else it.error))


def test_a_message_as_large_as_is_allowed_is_taken() -> None:
    heard = hear(settings() + headers() + data(bytes(1000)) + trailers(), most=1000)
    assert heard.messages == [bytes(1000)]
    assert heard.end == CallEnd("OK")


def test_headers_as_large_as_is_allowed_are_taken() -> None:
    fits = block((*ANSWERED, *[(f"x{n}", "y" * 900) for n in range(60)]))
    pieces = [fits[at : at + 10_000] for at in range(0, len(fits), 10_000)]
    assert 40_000 < len(fits) < MAX_HEADER_BYTES
    said = frame(HEADERS, 0, 1, pieces[0]) + b"".join(frame(CONTINUATION, 0, 1, piece) for piece in pieces[1:])
    heard = hear(settings() + said + frame(CONTINUATION, END_HEADERS, 1) + data(b"one") + trailers())
    assert heard.messages == [b"one"]
    assert heard.end == CallEnd("OK")


# --- what we send -----------------------------------------------------------------------------------------------------


def test_the_beginning_of_a_call() -> None:
    async def main() -> None:
        with piped(Owner()) as pipe:
            assert pipe.writes[0].startswith(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            first, update, request = pipe.frames()
            assert first[:3] == (SETTINGS, 0, 0)
            assert dict(struct.iter_unpack(">HL", first[3])) == {2: 0, 4: OUR_WINDOW_BYTES, 6: MAX_HEADER_BYTES}
            assert update == (WINDOW_UPDATE, 0, 0, number(OUR_WINDOW_BYTES - FIRST_WINDOW_BYTES))
            assert request[:3] == (HEADERS, END_HEADERS, 1)

    run(main)


@pytest.mark.parametrize("length", [0, 1, 126, 127, 128, 254, 255, 256, 382, 383, 5000, 15_000])
def test_header_fields_of_any_length_are_read_and_never_indexed(length: int) -> None:
    async def main() -> None:
        owner = Owner()
        pairs = (("x-long", "v" * length), ("x" + "n" * min(length, 1000), "ü"))
        pipe = Pipe(begin(owner, metadata=pairs, host="::1", port=443))
        owner.call.connection_made(pipe)  # type: ignore[union-attr]
        ((_, _, _, said),) = pipe.frames(HEADERS)
        found = list(hpack.Decoder(max_header_list_size=1 << 20).decode(said, raw=True))
        assert [(name.decode(), value.decode()) for name, value in found] == [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", PATH),
            (":authority", "[::1]:443"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *pairs,
        ]
        assert not any(pair.indexable for pair in found[-2:])
        owner.close()

    run(main)


def test_the_key_is_not_told_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        owner = Owner()
        begin(owner, metadata=(("x-api-key", "sk_very_secret"),))
        owner.close()

    with caplog.at_level(logging.DEBUG):
        run(main)
    assert "sk_very_secret" not in caplog.text


@pytest.mark.usefixtures("nobody_connects")
def test_nothing_is_asked_for_before_there_is_a_connection() -> None:
    async def main() -> None:
        owner = Owner(b"one")
        call = begin(owner)
        call.wake()
        await turns()
        assert owner.asked == 0
        pipe = Pipe(call)
        call.connection_made(pipe)
        assert owner.asked == 0, "not in the middle of what the loop does"
        await turns()
        assert pipe.frames(DATA) == [(DATA, 0, 1, packed(b"one"))]
        owner.close()
        call.wake()
        await turns()
        assert owner.late == []

    run(main)


@pytest.mark.usefixtures("nobody_connects")
def test_what_is_ready_in_one_turn_goes_in_one_write() -> None:
    async def main() -> None:
        owner = Owner()
        with piped(owner) as pipe:
            await turns()
            before, asked = len(pipe.writes), owner.asked
            messages = [b"%d" % n for n in range(100)]
            for message in messages:
                owner.say(message)
            await turns()
            assert len(pipe.writes) == before + 1
            assert pipe.frames(DATA) == [(DATA, 0, 1, packed(*messages))]
            assert owner.asked <= asked + 102, "once for all who have woken it"

    run(main)


@pytest.mark.usefixtures("nobody_connects")
def test_what_others_say_while_messages_are_taken_goes_along() -> None:
    async def main() -> None:
        owner = Owner()
        with piped(owner) as pipe:
            await turns()
            owner.at_ask = lambda: owner.unsent.append(b"late") if owner.asked == before + 1 else None
            before, owner.asked = 0, 0
            owner.say(b"one")
            await turns()
            assert pipe.frames(DATA) == [(DATA, 0, 1, packed(b"one", b"late"))]

    run(main)


@pytest.mark.usefixtures("nobody_connects")
def test_answers_to_what_came_together_go_in_few_writes() -> None:
    """Each write is a system call, and where the server does not read a piece more in a list that is gone through."""

    async def main() -> None:
        with piped(Owner()) as pipe:
            before = len(pipe.writes)
            pipe.hear(settings() + ping() * 1000 + settings())
            await turns()
            assert len(pipe.writes) <= before + 3
            assert pipe.frames(PING) == [(PING, ACK, 0, b"whoisit?")] * 1000
            assert pipe.frames(SETTINGS)[1:] == [(SETTINGS, ACK, 0, b"")] * 2

    run(main)


@pytest.mark.usefixtures("nobody_connects")
def test_messages_go_in_frames_as_large_as_every_server_takes() -> None:
    async def main() -> None:
        owner = Owner(BIG, b"", b"small")
        with piped(owner) as pipe:
            await turns()
            sizes = [len(payload) for _, _, _, payload in pipe.frames(DATA)]
            assert sizes == [MAX_FRAME_BYTES] * 3 + [len(packed(BIG, b"", b"small")) - 3 * MAX_FRAME_BYTES]
            assert pipe.sent() == packed(BIG, b"", b"small")

    run(main)


@pytest.mark.usefixtures("nobody_connects")
def test_without_room_nothing_is_asked_for_nor_sent() -> None:
    async def main() -> None:
        owner = Owner(bytes(FIRST_WINDOW_BYTES - 5), b"two")
        with piped(owner) as pipe:
            await turns()
            assert len(pipe.sent()) == FIRST_WINDOW_BYTES
            asked = owner.asked
            pipe.hear(settings())
            for more in (b"", room(100, 1), settings((4, 100_000))):
                pipe.hear(more)
                owner.say(b"more")
                await turns()
            assert (owner.asked, len(pipe.sent())) == (asked, FIRST_WINDOW_BYTES), "none for the connection"
            pipe.hear(room(6, 0))
            await turns()
            assert pipe.sent()[FIRST_WINDOW_BYTES:] == packed(b"two")[:6]
            assert (owner.asked, len(owner.unsent)) == (asked + 1, 3)
            pipe.hear(room(100, 0))
            await turns()
            assert pipe.sent()[FIRST_WINDOW_BYTES:] == packed(b"two", b"more", b"more", b"more")

    run(main)


@pytest.mark.usefixtures("nobody_connects")
def test_a_window_may_be_closed_below_nothing() -> None:
    async def main() -> None:
        owner = Owner(bytes(995))
        with piped(owner) as pipe:
            await turns()
            pipe.hear(settings((4, 10), (4, 0)) + room(500, 1))
            owner.say(b"two")
            await turns()
            pipe.hear(room(500, 1))
            await turns()
            assert len(pipe.sent()) == 1000, "1000 used, as many given: none"
            pipe.hear(settings((4, 3)))
            await turns()
            assert len(pipe.sent()) == 1003
            pipe.hear(settings((4, FIRST_WINDOW_BYTES)))
            await turns()
            assert pipe.sent() == packed(bytes(995), b"two")

    run(main)


@pytest.mark.usefixtures("nobody_connects")
def test_while_the_transport_is_full_nothing_is_asked_for() -> None:
    async def main() -> None:
        owner = Owner()
        with piped(owner) as pipe:
            await turns()
            asked = owner.asked
            assert owner.call is not None
            owner.call.pause_writing()
            owner.say(b"one")
            pipe.hear(settings() + room(1, 1) + room(1, 0))
            await turns()
            assert (owner.asked, pipe.sent()) == (asked, b"")
            owner.call.resume_writing()
            await turns()
            assert pipe.sent() == packed(b"one")

    run(main)


@pytest.mark.usefixtures("nobody_connects")
@pytest.mark.parametrize("most_frame", [MAX_FRAME_BYTES, (1 << 24) - 1])
def test_of_a_server_that_does_not_read_little_is_taken_over(most_frame: int) -> None:
    """What is taken can not be taken back: nobody may wait for it any more when the server reads again."""

    async def main() -> None:
        owner = Owner()
        with piped(owner, stalled=True) as pipe:
            pipe.hear(settings((4, MAX_WINDOW_BYTES), (5, most_frame)) + room(MAX_WINDOW_BYTES - FIRST_WINDOW_BYTES, 0))
            await turns()
            owner.say(*[bytes(10_000)] * 1000)
            await turns()
            assert len(pipe.sent()) <= 4 * HIGH_WATER_BYTES
            assert 1000 - len(owner.unsent) <= 4 * HIGH_WATER_BYTES // 10_000

    run(main)


@pytest.mark.usefixtures("nobody_connects")
def test_much_at_once_goes_in_writes_of_some_size_with_turns_of_the_loop_between() -> None:
    async def main() -> None:
        owner = Owner()
        with piped(owner) as pipe:
            pipe.hear(settings((4, MAX_WINDOW_BYTES)) + room(MAX_WINDOW_BYTES - FIRST_WINDOW_BYTES, 0))
            await turns()
            before = len(pipe.writes)
            messages = [bytes(1 << 20), *[b"%d" % n * 100 for n in range(1000)]]
            owner.say(*messages)
            await asyncio.sleep(0)
            assert 0 < len(pipe.sent()) < 4 * HIGH_WATER_BYTES
            while owner.unsent:
                await asyncio.sleep(0)
            await turns()
            assert pipe.sent() == packed(*messages)
            writes = pipe.writes[before:]
            assert max(map(len, writes)) < 4 * HIGH_WATER_BYTES
            assert len(writes) <= len(pipe.sent()) // HIGH_WATER_BYTES + 1

    run(main)


@pytest.mark.usefixtures("nobody_connects")
def test_a_large_message_is_not_held_against_a_server_that_pings() -> None:
    async def main() -> None:
        owner = Owner()
        with piped(owner, stalled=True) as pipe:
            pipe.hear(
                settings((4, MAX_WINDOW_BYTES), (5, (1 << 24) - 1)) + room(MAX_WINDOW_BYTES - FIRST_WINDOW_BYTES, 0)
            )
            await turns()
            owner.say(bytes(3 << 20))
            await turns()
            assert owner.unsent == deque()
            pipe.hear(ping())
            assert owner.ends == []
            assert pipe.frames(PING) == [(PING, ACK, 0, b"whoisit?")]

    run(main)


@pytest.mark.parametrize("asks", [ping(), settings(), settings((4, 1), (4, 2))], ids=["ping", "settings", "windows"])
def test_a_server_that_asks_and_does_not_read_is_left(asks: bytes) -> None:
    async def main() -> int:
        owner = Owner()
        with piped(owner, stalled=True) as pipe:
            pipe.hear(settings() + headers())
            while not pipe.is_aborted:
                pipe.hear(asks * 1000)
            assert owner.end.code == "INTERNAL"
            assert "asks and does not read" in owner.end.details
        return pipe.unsent

    assert run(main) < MAX_UNSENT_BYTES + 2 * wire.READ_BYTES


def test_what_came_is_given_back_as_room_with_its_padding() -> None:
    async def main() -> None:
        owner = Owner()
        with piped(owner, most=100_000) as pipe:
            pipe.hear(settings() + headers())
            piece = frame(DATA, PADDED, 1, b"\xff" + packed(bytes(5000)) + bytes(255))
            count = 3 * OUR_WINDOW_BYTES // (len(piece) - 9)
            for n in range(count):
                pipe.hear(piece)
                given = [
                    sum(int.from_bytes(one[3]) for one in pipe.frames(WINDOW_UPDATE)[1:] if one[2] == s) for s in (0, 1)
                ]
                assert given[0] == given[1] <= (n + 1) * (len(piece) - 9)
                assert (n + 1) * (len(piece) - 9) - given[0] <= OUR_WINDOW_BYTES // 2, "a server must not have to wait"
            assert len(owner.messages) == count
            assert len(pipe.frames(WINDOW_UPDATE)) <= 2 * 6 + 1

    run(main)


# --- h2 as the server -------------------------------------------------------------------------------------------------


Serve = Callable[["Peer"], Awaitable[None]]


class Peer(asyncio.Protocol):
    """The server's end of one connection, by h2. What h2 finds wrong with the client is in `troubles`."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._news = asyncio.Event()
        self._received = bytearray()
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        self.transport: asyncio.Transport | None = None
        self.task: asyncio.Task[None] | None = None
        self.seen: list[h2.events.Event] = []
        self.messages: list[bytes] = []
        self.sizes: list[int] = []
        """Of the frames of DATA."""
        self.troubles: list[str] = []
        self.returns_room = True
        self.is_lost = False

    @property
    def received(self) -> int:
        """How many bytes of DATA."""
        return sum(self.sizes)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.h2.initiate_connection()
        self.flush()
        self.task = asyncio.create_task(self._run())

    def data_received(self, data: bytes) -> None:
        if self.troubles:
            return
        try:
            events = self.h2.receive_data(data)
        except h2.exceptions.ProtocolError as error:
            self.troubles.append(repr(error))
            events = []
        for event in events:
            self.seen.append(event)
            if isinstance(event, h2.events.DataReceived):
                self._take(event)
        self.flush()
        self._news.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._news.set()

    async def _run(self) -> None:
        try:
            await self._serve(self)
        except (ConnectionError, h2.exceptions.ProtocolError):
            if not (self.is_lost or self.count(h2.events.ConnectionTerminated)):
                raise
        finally:
            if self.transport is not None:
                self.transport.close()  # whoever waits for it shall not wait for ever

    def _take(self, event: h2.events.DataReceived) -> None:
        size = event.flow_controlled_length or 0
        self.sizes.append(size)
        self._received += event.data or b""
        if self.returns_room and size:
            self.give_room(size, size)
        while len(self._received) >= 5 and len(self._received) >= 5 + int.from_bytes(self._received[1:5]):
            assert self._received[0] == 0
            end = 5 + int.from_bytes(self._received[1:5])
            self.messages.append(bytes(self._received[5:end]))
            del self._received[:end]

    def flush(self) -> None:
        assert self.transport is not None
        if (said := self.h2.data_to_send()) and not self.transport.is_closing():
            self.transport.write(said)

    def raw(self, said: bytes) -> None:
        """Past h2."""
        assert self.transport is not None
        self.transport.write(said)

    def count(self, kind: type[h2.events.Event]) -> int:
        return sum(isinstance(event, kind) for event in self.seen)

    async def until(self, holds: Callable[[], object]) -> None:
        while not holds():
            if self.is_lost or self.troubles:
                raise ConnectionError("the client has gone")
            self._news.clear()
            await self._news.wait()

    async def until_lost(self) -> None:
        while not self.is_lost:
            self._news.clear()
            await self._news.wait()

    async def request(self) -> list[tuple[str, str]]:
        """When our settings are in force, too."""
        await self.until(lambda: self.count(h2.events.RequestReceived) and self.count(h2.events.SettingsAcknowledged))
        (request,) = [event for event in self.seen if isinstance(event, h2.events.RequestReceived)]
        return list(request.headers)  # type: ignore[arg-type]

    async def set(self, **changes: int) -> None:
        """Change settings, and wait until they are in force."""
        before = self.count(h2.events.SettingsAcknowledged)
        self.h2.update_settings({SettingCodes[name.upper()]: value for name, value in changes.items()})
        self.flush()
        await self.until(lambda: self.count(h2.events.SettingsAcknowledged) > before)

    def give_room(self, connection: int, stream: int) -> None:
        if connection:
            self.h2.increment_flow_control_window(connection)
        if stream:
            self.h2.increment_flow_control_window(stream, 1)
        self.flush()

    async def ping(self) -> None:
        """And what the client does about what came before is done, too."""
        for n in range(2):
            payload = b"%08d" % (self.count(h2.events.PingAckReceived) + n)
            before = self.count(h2.events.PingAckReceived)
            self.h2.ping(payload)
            self.flush()
            await self.until(lambda before=before: self.count(h2.events.PingAckReceived) > before)  # type: ignore[misc]
            assert [e.ping_data for e in self.seen if isinstance(e, h2.events.PingAckReceived)][-1] == payload

    def answer(self, pairs: Pairs = ANSWERED, *, ends: bool = False) -> None:
        self.h2.send_headers(1, pairs, end_stream=ends)
        self.flush()

    async def say(self, message: bytes, *, padding: int | None = None) -> None:
        left = packed(message)
        overhead = 0 if padding is None else padding + 1
        while left:
            await self.until(lambda: self.h2.local_flow_control_window(1) > overhead)
            size = min(self.h2.local_flow_control_window(1), self.h2.max_outbound_frame_size) - overhead
            self.h2.send_data(1, left[:size], pad_length=padding)
            left = left[size:]
            self.flush()

    async def message(self) -> bytes:
        """The next one."""
        await self.until(lambda: self.messages)
        return self.messages.pop(0)


class Service:
    """Where peers serve."""

    def __init__(self) -> None:
        self.peers: list[Peer] = []
        self.host = ""
        self.port = 0

    @property
    def peer(self) -> Peer:
        (peer,) = self.peers
        return peer


@contextlib.asynccontextmanager
async def service(
    serve: Serve, *, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[Service]:
    it = Service()

    def accept() -> Peer:
        it.peers.append(Peer(serve))
        return it.peers[-1]

    server = await asyncio.get_running_loop().create_server(accept, host, 0, ssl=tls)
    it.host, it.port = server.sockets[0].getsockname()[:2]
    try:
        yield it
    finally:
        server.close()
        tasks = [peer.task for peer in it.peers if peer.task is not None]
        for peer in it.peers:
            if peer.transport is not None:
                peer.transport.abort()
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [result for result in results if isinstance(result, Exception)] == []


@contextlib.contextmanager
def calling(
    it: Service,
    owner: Owner,
    *,
    host: str | None = None,
    trust: ssl.SSLContext | None = None,
    most: int = MOST,
    metadata: Pairs = (),
) -> Iterator[DirectCall]:
    owner.call = DirectCall(Target(host or it.host, it.port, trust, most), PATH, metadata, owner)
    try:
        yield owner.call
    finally:
        owner.close()
        assert owner.late == []
        assert len(owner.ends) <= 1


async def echo(peer: Peer) -> None:
    await peer.request()
    peer.answer()
    while True:
        await peer.say(await peer.message())


async def nothing(peer: Peer) -> None:
    await peer.until_lost()


METADATA: Pairs = (("user-agent", "spooled-supervisor/1"), ("x-api-key", "sk_secret"), ("x-empty", ""))


@pytest.mark.parametrize(("host", "name"), [("127.0.0.1", None), ("127.0.0.1", "localhost"), ("::1", None)])
def test_the_request_as_the_server_sees_it(host: str, name: str | None) -> None:
    async def main() -> None:
        try:
            async with service(echo, host=host) as it:
                owner = Owner(b"hello")
                with calling(it, owner, host=name, metadata=METADATA):
                    await owner.until(lambda: owner.messages)
                    pairs = await it.peer.request()
                    authority = f"[{host}]:{it.port}" if ":" in host else f"{name or host}:{it.port}"
                    assert pairs == [
                        (":method", "POST"),
                        (":scheme", "http"),
                        (":path", PATH),
                        (":authority", authority),
                        ("te", "trailers"),
                        ("content-type", "application/grpc"),
                        *METADATA,
                    ]
                    assert [pair.indexable for pair in pairs if pair[0] == "x-api-key"] == [False]  # type: ignore[attr-defined]
                assert it.peer.troubles == []
        except OSError:
            if host != "::1":
                raise
            pytest.skip("needs IPv6")

    run(main)


SMALL = [b"", b"x", b"", b"ab" * 40, b"c" * 200]
LARGE = [b"", b"x", BIG, b"", b"y" * MAX_FRAME_BYTES, bytes(range(256)) * (3 << 12), b"end"]


@pytest.mark.parametrize(
    ("window", "messages"),
    [(1, SMALL), (100, [*SMALL, b"d" * 5000]), (65_535, LARGE), (1 << 20, LARGE)],
    ids=["1", "100", "65535", "1 MiB"],
)
def test_messages_of_any_size_come_back_whatever_the_window(window: int, messages: list[bytes]) -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        await peer.set(initial_window_size=window)
        peer.answer()
        await peer.say(b"begin")
        while True:
            await peer.say(await peer.message())

    async def main() -> None:
        async with service(serve) as it:
            owner = Owner()
            with calling(it, owner):
                await owner.until(lambda: owner.messages)
                owner.say(*messages)
                await owner.until(lambda: len(owner.messages) > len(messages))
                assert owner.messages == [b"begin", *messages]
                assert max(it.peer.sizes) <= min(window, MAX_FRAME_BYTES)
            assert it.peer.troubles == []

    run(main)


def test_many_messages_both_ways_at_once_come_in_their_order() -> None:
    async def main() -> None:
        async with service(echo) as it:
            owner = Owner()
            messages = [b"%d" % n + bytes(n % 700) for n in range(3000)]
            with calling(it, owner):
                for n in range(0, 3000, 100):
                    owner.say(*messages[n : n + 100])
                    await asyncio.sleep(0)
                await owner.until(lambda: len(owner.messages) == 3000)
                assert owner.messages == messages
            assert it.peer.troubles == []

    run(main)


def test_a_window_that_is_closed_below_what_is_used_is_kept_to() -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.returns_room = False
        peer.answer()
        await peer.say(b"begin")
        assert await peer.message() == bytes(60_000)
        await peer.set(initial_window_size=100)  # leaves 100 - 60005, and 5530 for the connection
        await peer.say(b"go on")
        await peer.ping()
        assert peer.received == 60_005
        peer.give_room(0, 59_905)
        await peer.ping()
        assert peer.received == 60_005
        peer.give_room(0, 1)
        await peer.until(lambda: peer.received > 60_005)
        await peer.ping()
        assert peer.received == 60_006
        await peer.set(initial_window_size=600)  # 500 more
        await peer.ping()
        assert peer.received == 60_506
        peer.give_room(0, 10_000)
        assert await peer.message() == b"x" * 1000
        await peer.say(b"done")
        await peer.until_lost()

    async def main() -> None:
        async with service(serve) as it:
            owner = Owner()
            with calling(it, owner):
                await owner.until(lambda: owner.messages == [b"begin"])
                owner.say(bytes(60_000))
                await owner.until(lambda: owner.messages == [b"begin", b"go on"])
                owner.say(b"x" * 1000)
                await owner.until(lambda: owner.messages == [b"begin", b"go on", b"done"])
            assert it.peer.troubles == []

    run(main)


def test_a_window_of_the_connection_alone_holds_back_too() -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.returns_room = False
        await peer.set(initial_window_size=1 << 20)
        peer.answer()
        await peer.say(b"begin")
        await peer.until(lambda: peer.received == FIRST_WINDOW_BYTES)
        await peer.ping()
        assert peer.received == FIRST_WINDOW_BYTES
        peer.give_room(200_000, 0)
        assert await peer.message() == bytes(100_000)
        await peer.say(b"done")
        await peer.until_lost()

    async def main() -> None:
        async with service(serve) as it:
            owner = Owner()
            with calling(it, owner):
                await owner.until(lambda: owner.messages == [b"begin"])
                owner.say(bytes(100_000))
                await owner.until(lambda: owner.messages == [b"begin", b"done"])
            assert it.peer.troubles == []

    run(main)


@pytest.mark.parametrize("most_frame", [MAX_FRAME_BYTES, 30_000, (1 << 24) - 1])
def test_frames_are_not_larger_than_the_server_takes(most_frame: int) -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        await peer.set(max_frame_size=most_frame, initial_window_size=1 << 24)
        peer.give_room(1 << 24, 0)
        peer.answer()
        await peer.say(b"begin")
        while True:
            await peer.say(await peer.message())

    async def main() -> None:
        async with service(serve) as it:
            owner = Owner()
            with calling(it, owner):
                await owner.until(lambda: owner.messages)
                owner.say(*LARGE)
                await owner.until(lambda: len(owner.messages) > len(LARGE))
                assert owner.messages == [b"begin", *LARGE]
                assert MAX_FRAME_BYTES <= max(it.peer.sizes) <= most_frame
            assert it.peer.troubles == []

    run(main)


def test_a_server_may_send_more_than_its_window_again_and_again() -> None:
    messages = [b"%d" % n * 10_000 for n in range(10, 110)] + [bytes(3 << 20)]

    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.answer()
        for message in messages:
            await peer.say(message)
        peer.answer((("grpc-status", "0"),), ends=True)
        await peer.until_lost()

    async def main() -> None:
        async with service(serve) as it:
            owner = Owner()
            with calling(it, owner):
                assert await owner.until_end() == CallEnd("OK")
                assert owner.messages == messages
                assert sum(map(len, messages)) > 5 << 20
            assert it.peer.troubles == []

    run(main)


def test_padding_is_given_back_as_room_too() -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.answer()
        for _ in range(OUR_WINDOW_BYTES // 256 + 500):
            await peer.say(b"", padding=255)
        peer.answer((("grpc-status", "0"),), ends=True)
        await peer.until_lost()

    async def main() -> None:
        async with service(serve) as it:
            owner = Owner()
            with calling(it, owner):
                assert await owner.until_end() == CallEnd("OK")
                assert len(owner.messages) == OUR_WINDOW_BYTES // 256 + 500
            assert it.peer.troubles == []

    run(main)


def test_pings_and_settings_are_answered_while_messages_come_and_go() -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.answer()
        for n in range(20):
            await peer.ping()
            await peer.set(initial_window_size=50_000 + n * 1000)
            await peer.say(await peer.message())
        await peer.until_lost()

    async def main() -> None:
        async with service(serve) as it:
            owner = Owner(*[b"%d" % n for n in range(20)])
            with calling(it, owner):
                await owner.until(lambda: len(owner.messages) == 20)
                assert it.peer.count(h2.events.PingAckReceived) == 40
                assert it.peer.count(h2.events.SettingsAcknowledged) == 21
            assert it.peer.troubles == []

    run(main)


def test_a_server_that_leaves_in_peace_is_said_and_the_call_goes_on() -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.answer()
        await peer.say(await peer.message())
        peer.raw(goaway(1))
        await peer.ping()
        await peer.say(await peer.message())
        peer.answer((("grpc-status", "0"),), ends=True)
        await peer.until_lost()

    async def main() -> None:
        async with service(serve) as it:
            owner = Owner(b"one")
            with calling(it, owner):
                await owner.until(lambda: owner.leavings)
                assert owner.messages == [b"one"]
                owner.say(b"two")
                assert await owner.until_end() == CallEnd("OK")
                assert owner.messages == [b"one", b"two"]
                assert owner.leavings == 1
            assert it.peer.troubles == []

    run(main)


def test_a_server_that_leaves_before_our_call_is_unavailable() -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.h2.close_connection(last_stream_id=0, additional_data=b"restarting")
        peer.flush()
        await peer.until_lost()

    async def main() -> None:
        async with service(serve) as it:
            owner = Owner()
            with calling(it, owner):
                end = CallEnd("UNAVAILABLE", "the server has gone away (HTTP/2 code 0): restarting")
                assert await owner.until_end() == end
                assert owner.leavings == 0

    run(main)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (0, "UNAVAILABLE"),
        (1, "INTERNAL"),
        (2, "INTERNAL"),
        (3, "INTERNAL"),
        (5, "INTERNAL"),
        (7, "UNAVAILABLE"),
        (8, "CANCELLED"),
        (11, "RESOURCE_EXHAUSTED"),
        (13, "INTERNAL"),
        (4_000_000_000, "INTERNAL"),
    ],
)
@pytest.mark.parametrize("is_answered", [False, True], ids=["before an answer", "amid messages"])
def test_a_stream_that_the_server_resets(error: int, code: str, is_answered: bool) -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        if is_answered:
            peer.answer()
            await peer.say(b"one")
        peer.h2.reset_stream(1, error)
        peer.flush()
        await peer.until_lost()

    async def main() -> None:
        async with service(serve) as it:
            owner = Owner()
            with calling(it, owner):
                end = CallEnd(code, f"the server has reset the stream (HTTP/2 code {error})")
                assert await owner.until_end() == end
                assert owner.messages == [b"one"] * is_answered
            await it.peer.until_lost()

    run(main)


@pytest.mark.parametrize("how", ["close", "abort", "reset"])
@pytest.mark.parametrize("is_answered", [False, True], ids=["before an answer", "amid messages"])
def test_a_server_that_hangs_up(how: str, is_answered: bool) -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        assert peer.transport is not None
        if is_answered:
            peer.answer()
            await peer.say(await peer.message())
        if how == "reset":
            linger = struct.pack("ii", 1, 0)
            peer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        if how == "close":
            peer.transport.close()
        else:
            peer.transport.abort()

    async def main() -> None:
        async with service(serve) as it:
            owner = Owner(b"one")
            with calling(it, owner):
                end = await owner.until_end()
                assert end.code == "UNAVAILABLE"
                assert end.details.startswith("the connection was lost: ")
                assert owner.messages == [b"one"] * is_answered

    run(main)


def test_a_status_comes_as_the_server_says_it() -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.h2.send_headers(1, [(":status", "103"), ("link", "</a>")])
        peer.answer()
        peer.answer(
            (("grpc-status", "8"), ("grpc-message", "zu viel: 100%25 %E2%82%AC"), ("retry-after", "3")), ends=True
        )
        await peer.until_lost()

    async def main() -> None:
        async with service(serve) as it:
            owner = Owner()
            with calling(it, owner):
                assert await owner.until_end() == CallEnd("RESOURCE_EXHAUSTED", "zu viel: 100% €", "3")
            assert it.peer.troubles == []

    run(main)


def test_what_the_server_gets_of_a_call_that_is_closed() -> None:
    async def main() -> None:
        async with service(echo) as it:
            owner = Owner(b"one")
            with calling(it, owner):
                await owner.until(lambda: owner.messages)
            await it.peer.until_lost()
            (reset,) = [event for event in it.peer.seen if isinstance(event, h2.events.StreamReset)]
            assert (reset.stream_id, reset.error_code) == (1, CANCEL)
            (end,) = [event for event in it.peer.seen if isinstance(event, h2.events.ConnectionTerminated)]
            assert end.error_code == NO_ERROR

    run(main)


def test_a_server_of_http_1_is_unavailable_in_words() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async def main() -> None:
        async with speaking(serve) as it:
            owner = Owner()
            with calling(it, owner):
                end = await owner.until_end()
                assert end.code == "UNAVAILABLE"
                assert "HTTP/1.1 400 Bad Request" in end.details

    run(main)


# --- beginning and end ------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def speaking(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], *, receive_bytes: int | None = None
) -> AsyncIterator[Service]:
    """A server that speaks anything."""
    it = Service()
    tasks: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await serve(reader, writer)
        finally:
            tasks.discard(task)
            writer.transport.abort()

    listener = socket.socket()
    if receive_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    listener.bind(("127.0.0.1", 0))
    server = await asyncio.start_server(accept, sock=listener)
    it.host, it.port = listener.getsockname()
    try:
        yield it
    finally:
        server.close()
        waited = list(tasks)
        for task in waited:
            task.cancel()
        await asyncio.gather(*waited, return_exceptions=True)
        await turns()


@contextlib.contextmanager
def nobody_there() -> Iterator[Service]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        it = Service()
        it.host, it.port = taken.getsockname()
        yield it


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_connection_that_is_refused_is_unavailable_once(host: str) -> None:
    async def main() -> None:
        with nobody_there() as it:
            owner = Owner(b"one")
            with calling(it, owner, host=host) as call:
                call.wake()
                end = await owner.until_end()
                assert end.code == "UNAVAILABLE"
                assert end.details.startswith("no connection: ")
                call.wake()
                await turns()
            assert owner.asked == 0

    run(main)


@pytest.mark.parametrize("host", ["nowhere.invalid", "api..example.com", "a" * 64 + ".example.com"])
def test_a_name_that_nobody_knows_is_unavailable(host: str) -> None:
    async def main() -> None:
        owner = Owner()
        with calling(Service(), owner, host=host):
            end = await owner.until_end()
            assert end.code == "UNAVAILABLE"
            assert end.details.startswith("no connection: ")

    run(main)


def test_whatever_keeps_a_connection_from_being_made_ends_the_call() -> None:
    async def main() -> None:
        it = Service()
        it.host, it.port = "127.0.0.1", 70_000  # an OverflowError, and no OSError
        owner = Owner()
        with calling(it, owner) as call:
            await asyncio.wait({call._connecting})
            assert owner.end.code == "UNAVAILABLE"

    run(main)


@pytest.mark.parametrize("count", range(12))
def test_a_call_that_is_closed_at_any_moment_leaves_no_connection(count: int) -> None:
    async def main() -> None:
        async with service(echo) as it:
            owner = Owner(b"one")
            with calling(it, owner):
                await turns(count)
            assert owner.ends == []
            again = Owner(b"two")
            with calling(it, again):
                await again.until(lambda: again.messages)
            for peer in it.peers:
                await peer.until_lost()

    run(main)


def test_a_connection_that_comes_after_the_call_was_closed_is_not_used() -> None:
    async def main() -> None:
        owner = Owner(b"one")
        call = begin(owner)
        owner.close()
        pipe = Pipe(call)
        call.connection_made(pipe)
        assert pipe.is_aborted
        pipe.lose()
        await turns()
        assert (pipe.writes, owner.late, owner.ends) == ([], [], [])

    run(main)


def test_a_call_may_be_closed_twice_and_woken_after_it() -> None:
    async def main() -> None:
        async with service(echo) as it:
            owner = Owner(b"one")
            with calling(it, owner) as call:
                await owner.until(lambda: owner.messages)
                owner.say(b"two")
                owner.close()
                owner.close()
                call.wake()
                await it.peer.until_lost()
                owner.close()
                await turns()
            assert owner.messages == [b"one"]
            assert owner.ends == []

    run(main)


def test_a_call_that_is_closed_by_its_own_message_hears_no_more() -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.answer()
        peer.raw(data(b"one", b"two") + data(b"three") + ping() + trailers())
        await peer.until_lost()

    async def main() -> None:
        async with service(serve) as it:
            owner = Owner()
            owner.at_message = lambda _raw: owner.close()
            with calling(it, owner):
                await owner.until(lambda: owner.messages)
                await it.peer.until_lost()
            assert owner.messages == [b"one"]
            assert owner.ends == []

    run(main)


@pytest.mark.usefixtures("nobody_connects")
@pytest.mark.parametrize("gives", [True, False], ids=["and gives a message", "and gives none"])
def test_a_call_that_is_closed_while_it_asks_asks_no_more(gives: bool) -> None:
    async def main() -> None:
        owner = Owner(b"one", b"two")
        with piped(owner) as pipe:
            call = owner.call
            assert call is not None

            def close() -> None:
                if not gives:
                    owner.unsent.clear()
                owner.close()

            owner.at_ask = close
            await turns()
            assert owner.asked == 1
            assert pipe.sent() == b""

    run(main)


def test_a_call_may_be_closed_when_it_is_over_and_by_what_it_says_of_it() -> None:
    async def main() -> None:
        owner = Owner()
        with piped(owner) as pipe:
            owner.at_message = lambda _raw: None
            pipe.hear(settings() + trailers((*ANSWERED, *DONE)))
            owner.close()
            assert owner.end == CallEnd("OK")

    run(main)


def test_a_dead_connection_is_noticed_by_the_kernel() -> None:
    async def main() -> None:
        async with service(echo) as it:
            owner = Owner(b"one")
            with calling(it, owner) as call:
                await owner.until(lambda: owner.messages)
                assert call._transport is not None
                sock = call._transport.get_extra_info("socket")
                options = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT]
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert [sock.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [30, 5, 2, 20_000]
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0

    run(main)


def test_of_a_connection_that_is_gone_the_log_hears_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """What is written in vain asyncio tells of at the fifth time, and from then on each time."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as listener:
            listener.setblocking(False)
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            it = Service()
            it.host, it.port = listener.getsockname()
            owner = Owner()
            with calling(it, owner):
                peer, _ = await loop.sock_accept(listener)
                with peer:
                    said = settings((4, MAX_WINDOW_BYTES)) + room(1 << 30, 0) + headers() + data(b"begin")
                    await loop.sock_sendall(peer, said)
                    await owner.until(lambda: owner.messages)
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                owner.say(*[bytes(MAX_FRAME_BYTES)] * 100)
                assert (await owner.until_end()).code == "UNAVAILABLE"

    with caplog.at_level(logging.WARNING):
        run(main)
    assert [record.getMessage() for record in caplog.records if "send()" in record.getMessage()] == []


def test_a_server_that_floods_us_with_pings_and_does_not_read_is_left() -> None:
    left = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(settings())
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(ping() * 4000)
                await writer.drain()
        left.append(True)

    async def main() -> None:
        async with speaking(serve, receive_bytes=4096) as it:
            owner = Owner()
            with calling(it, owner):
                end = await owner.until_end()
                assert end.code == "INTERNAL"
                assert "asks and does not read" in end.details
            while not left:
                await asyncio.sleep(0)

    run(main)


def test_of_a_server_that_does_not_read_the_transport_asks_to_wait() -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        await peer.set(initial_window_size=1 << 27)
        peer.give_room(1 << 27, 0)
        peer.answer()
        await peer.say(b"begin")
        assert peer.transport is not None
        peer.transport.pause_reading()
        await stalled.wait()
        peer.transport.resume_reading()
        for n in range(400):
            assert await peer.message() == b"%d" % n + bytes(100_000)
        await peer.say(b"end")
        await peer.until_lost()

    async def main() -> None:
        async with service(serve) as it:
            owner = Owner()
            with calling(it, owner) as call:
                await owner.until(lambda: owner.messages == [b"begin"])
                owner.say(*[b"%d" % n + bytes(100_000) for n in range(400)])
                while not call._is_full:
                    await asyncio.sleep(0)
                stalled.set()
                await owner.until(lambda: owner.messages == [b"begin", b"end"])
            assert it.peer.troubles == []

    stalled = asyncio.Event()
    run(main)


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for localhost and 127.0.0.1, and its key."""
    return certificates.certificate(tmp_path_factory.mktemp("tls"), "IP:127.0.0.1", "DNS:localhost")


def serving(certificate: tuple[Path, Path], *protocols: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


def trusting(certificate: tuple[Path, Path] | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if certificate is not None:
        context.load_verify_locations(certificate[0])
    context.set_alpn_protocols(["h2"])
    return context


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_over_tls_messages_of_any_size_come_back(certificate: tuple[Path, Path], name: str) -> None:
    async def main() -> None:
        async with service(echo, tls=serving(certificate, "h2", "http/1.1")) as it:
            owner = Owner(*LARGE)
            with calling(it, owner, host=name, trust=trusting(certificate)):
                await owner.until(lambda: len(owner.messages) == len(LARGE))
                assert owner.messages == LARGE
                pairs = await it.peer.request()
                assert pairs[1] == (":scheme", "https")
                assert pairs[3] == (":authority", f"{name}:{it.port}")
            await it.peer.until_lost()
            assert it.peer.count(h2.events.StreamReset) == 1
            assert it.peer.troubles == []

    run(main)


@pytest.mark.parametrize("protocols", [(), ("http/1.1",)], ids=["none", "another"])
def test_over_tls_a_server_that_does_not_offer_http_2_is_unavailable(
    certificate: tuple[Path, Path], protocols: tuple[str, ...]
) -> None:
    async def main() -> None:
        async with service(nothing, tls=serving(certificate, *protocols)) as it:
            owner = Owner(b"one")
            with calling(it, owner, trust=trusting(certificate)):
                end = await owner.until_end()
                assert end.code == "UNAVAILABLE"
                assert "HTTP/2" in end.details or "ALPN" in end.details.upper()
                await turns()
            assert owner.asked == 0
            for peer in it.peers:
                if peer.transport is not None:
                    await peer.until_lost()
                assert peer.seen == []

    run(main)


def test_a_certificate_that_nobody_vouches_for_is_unavailable(certificate: tuple[Path, Path]) -> None:
    async def main() -> None:
        async with service(nothing, tls=serving(certificate, "h2")) as it:
            owner = Owner(b"one")
            with calling(it, owner, trust=trusting(None)):
                end = await owner.until_end()
                assert end.code == "UNAVAILABLE"
                assert "certificate verify failed" in end.details
            assert it.peers == [] or it.peer.transport is None

    run(main)


def test_the_certificate_of_another_is_unavailable(certificate: tuple[Path, Path]) -> None:
    async def main() -> None:
        async with service(nothing, tls=serving(certificate, "h2"), host="127.0.0.2") as it:
            owner = Owner(b"one")
            with calling(it, owner, trust=trusting(certificate)):
                end = await owner.until_end()
                assert end.code == "UNAVAILABLE"
                assert "not valid for '127.0.0.2'" in end.details
            assert it.peers == [] or it.peer.transport is None

    run(main)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["nothing", "no TLS"])
def test_a_server_that_does_not_speak_tls_is_unavailable(said: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(said)
        await reader.read(1000)
        writer.close()
        await writer.wait_closed()

    async def main() -> None:
        async with speaking(serve) as it:
            owner = Owner(b"one")
            with calling(it, owner, trust=trusting(None)):
                end = await owner.until_end()
                assert end.code == "UNAVAILABLE"
                assert end.details.startswith("no connection")

    run(main)


def test_a_call_may_be_closed_in_the_midst_of_the_handshake() -> None:
    async def main() -> None:
        greeted, left = asyncio.Event(), asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(5)
            greeted.set()
            with contextlib.suppress(ConnectionError):
                await reader.read()
            left.set()

        async with speaking(serve) as it:
            owner = Owner(b"one")
            with calling(it, owner, trust=trusting(None)):
                await greeted.wait()
            await left.wait()
            assert owner.ends == []
            assert owner.asked == 0

    run(main)


@pytest.mark.parametrize("count", range(0, 36, 3))
def test_over_tls_a_call_that_is_closed_at_any_moment_leaves_no_connection(
    certificate: tuple[Path, Path], count: int
) -> None:
    async def main() -> None:
        async with service(echo, tls=serving(certificate, "h2")) as it:
            owner = Owner(b"one")
            with calling(it, owner, trust=trusting(certificate)):
                await turns(count)
            assert owner.ends == []
            again = Owner(b"two")
            with calling(it, again, trust=trusting(certificate)):
                await again.until(lambda: again.messages)
            for peer in it.peers:
                if peer.transport is not None:
                    await peer.until_lost()

    run(main)


@pytest.mark.parametrize("how", ["close", "abort"])
def test_over_tls_a_server_that_hangs_up_is_unavailable(certificate: tuple[Path, Path], how: str) -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.answer()
        await peer.say(await peer.message())
        assert peer.transport is not None
        getattr(peer.transport, how)()

    async def main() -> None:
        async with service(serve, tls=serving(certificate, "h2")) as it:
            owner = Owner(b"one")
            with calling(it, owner, trust=trusting(certificate)):
                end = await owner.until_end()
                assert end.code == "UNAVAILABLE"
                assert end.details.startswith("the connection was lost: ")
                assert owner.messages == [b"one"]

    run(main)


def test_over_tls_a_call_that_is_closed_by_its_own_message_hears_no_more(certificate: tuple[Path, Path]) -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.answer()
        peer.raw(data(b"one", b"two") + data(b"three") + data(bytes(16_000)) * 20 + trailers())
        await peer.until_lost()

    async def main() -> None:
        async with service(serve, tls=serving(certificate, "h2")) as it:
            owner = Owner()
            owner.at_message = lambda _raw: owner.close()
            with calling(it, owner, trust=trusting(certificate)):
                await owner.until(lambda: owner.messages)
                await it.peer.until_lost()
            assert owner.messages == [b"one"]
            assert owner.ends == []

    run(main)
