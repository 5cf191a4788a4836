"""One gRPC call with messages both ways, on a connection of its own: HTTP/2 over asyncio, as little as that needs.

    connection    one for each call, which is stream 1: it begins with the call and ends with it (RFC 9113)
    messages      asked of the owner when there is room for them, so that what nobody waits for any more is never sent;
                  as many as are ready go in one write (gRPC over HTTP/2: length-prefixed messages, no compression)
    flow control  both ways; what arrives is handed over at once, so its room is given back as it comes
    the end       the status of the trailers, or in its stead UNAVAILABLE or INTERNAL with a reason: `on_end`, once
    not there     proxies, push, priorities: where a proxy is named, grpcio does all (`grpc_library.py`)

What it buys: a request and its answer take some 0.05 ms of CPU, where grpcio takes 0.25 ms, half of it to carry each
message between its threads and ours; two of them per job were most of the supervisor's work.

Everything from the peer is bounded and checked: frames of MAX_FRAME_BYTES, messages of `most_bytes`, headers of
MAX_HEADER_BYTES; what makes no sense ends the call. Headers are read by hpack. TLS is asyncio's own, verified by the
context that the caller brings.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote_to_bytes

import hpack

from spooled_supervisor.api import wire

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEAD = struct.Struct(">HBBBL")  # length (16 and 8 bits), type, flags, stream (RFC 9113, 4.1)
MESSAGE_HEAD = struct.Struct(">BL")  # compressed, length
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, HAS_PRIORITY = 0x4, 0x8, 0x20
SET_ENABLE_PUSH, SET_INITIAL_WINDOW, SET_MAX_FRAME, SET_MAX_HEADER_LIST = 2, 4, 5, 6
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR = 0, 1, 3, 6
REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM, INADEQUATE_SECURITY = 7, 8, 9, 11, 12
STREAM = 1

FIRST_WINDOW_BYTES = 65_535
MAX_WINDOW_BYTES = 2**31 - 1
OUR_WINDOW_BYTES = 1 << 20
MAX_FRAME_BYTES = 16_384
"""What every peer may send, and we may send to each that does not say more (RFC 9113, 4.2)."""
MAX_HEADER_BYTES = 64 << 10
FLUSH_BYTES = 64 << 10
TOO_MUCH_ROOM = "more room than there can be"
MAX_UNSENT_BYTES = 1 << 20
"""A peer that asks (PING, SETTINGS) and does not read the answers is not worth more."""
PROBE_IDLE_S, PROBE_EVERY_S, PROBES = 30, 5, 2
UNANSWERED_MS = 20_000
"""How a dead connection is noticed (tcp(7)): TCP_KEEPIDLE and its like while nothing is sent, else TCP_USER_TIMEOUT."""

CODES = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
]
"""By number (google.rpc.Code)."""
OF_HTTP = {
    **{"400": "INTERNAL", "401": "UNAUTHENTICATED", "403": "PERMISSION_DENIED", "404": "UNIMPLEMENTED"},
    **dict.fromkeys(("429", "502", "503", "504"), "UNAVAILABLE"),
}
"""What an HTTP status without a gRPC one means (gRPC: http-grpc-status-mapping)."""
OF_RESET = {
    **{NO_ERROR: "UNAVAILABLE", REFUSED_STREAM: "UNAVAILABLE", CANCEL: "CANCELLED"},
    **{ENHANCE_YOUR_CALM: "RESOURCE_EXHAUSTED", INADEQUATE_SECURITY: "PERMISSION_DENIED"},
}
"""What the code of RST_STREAM means (gRPC over HTTP/2: errors); all else is INTERNAL."""


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The name of a status, what was said with it, and the server's hint when to try again."""

    code: str
    details: str = ""
    retry_after: str | None = None


class CallOwner(Protocol):
    """Whose messages they are. Called from the event loop; nothing is called once the call is over."""

    def next_message(self) -> bytes | None:
        """The next one to be sent, if there is one."""

    def on_message(self, raw: bytes) -> None:
        """One has come."""

    def on_leaving(self) -> None:
        """The server will end the call before long: nothing new should be asked of it. May be said again."""

    def on_end(self, end: CallEnd) -> None:
        """The call has ended, and not by `close`."""


class Call(Protocol):
    """A call that has been begun."""

    def wake(self) -> None:
        """`next_message` has something."""

    def close(self) -> None:
        """Cancel it. May be called again, and by the owner's own methods."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where calls go; `tls` must offer `h2` by ALPN."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    most_bytes: int
    """Of one message."""


class _Broken(Exception):
    """The peer did what it must not: the code for GOAWAY, and the status for the owner."""

    def __init__(self, error: int, reason: str, *, code: str = "INTERNAL") -> None:
        self.error = error
        self.code = code
        super().__init__(reason)


class DirectCall(asyncio.BufferedProtocol):
    """A `Call`. Begins to connect when it is made, in the running loop."""

    def __init__(self, target: Target, path: str, metadata: Sequence[tuple[str, str]], owner: CallOwner) -> None:
        self._target = target
        self._owner = owner
        self._headers = self._request_headers(path, metadata)
        self._buffer = memoryview(bytearray(wire.READ_BYTES))
        self._transport: asyncio.Transport | None = None
        self._is_over = False
        self._frames = _Frames()
        self._messages = _Messages(target.most_bytes)
        self._answers = _Headers()
        self._unreturned = 0  # bytes that came, and whose room was not given back yet
        self._is_flush_due = self._is_full = False
        self._is_short_of_room = False  # in the windows; servers give room back with every message, wanted or not
        self._outgoing = bytearray()
        self._room = self._stream_room = FIRST_WINDOW_BYTES
        self._first_room = FIRST_WINDOW_BYTES
        self._replies = bytearray()  # to what has come with this read
        self._connecting = asyncio.create_task(self._connect(), name="connect a stream")

    def wake(self) -> None:
        if not self._is_flush_due and self._transport is not None:
            self._is_flush_due = True  # in a moment: what others have for it then goes along
            asyncio.get_running_loop().call_soon(self._flush)

    def close(self) -> None:
        self._leave(CANCEL)

    async def _connect(self) -> None:
        try:
            await wire.connect(lambda: self, self._target.host, self._target.port, self._target.tls)
        except wire.WireError as error:
            self._end(CallEnd("UNAVAILABLE", str(error)))

    # --- asyncio.BufferedProtocol -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if self._is_over:
            transport.abort()
            return
        if self._target.tls is not None and _protocol_of(transport) != "h2":
            transport.abort()
            self._end(CallEnd("UNAVAILABLE", "the server does not offer HTTP/2 (ALPN)"))
            return
        self._transport = transport
        with contextlib.suppress(OSError):  # gone already: the loop will tell
            _watch(transport.get_extra_info("socket"))
        settings = (
            (SET_ENABLE_PUSH, 0),
            (SET_INITIAL_WINDOW, OUR_WINDOW_BYTES),
            (SET_MAX_HEADER_LIST, MAX_HEADER_BYTES),
        )
        begin = b"".join(struct.pack(">HL", *setting) for setting in settings)
        room = struct.pack(">L", OUR_WINDOW_BYTES - FIRST_WINDOW_BYTES)
        transport.write(
            PREFACE
            + _frame(SETTINGS, 0, 0, begin)
            + _frame(WINDOW_UPDATE, 0, 0, room)
            + _frame(HEADERS, END_HEADERS, STREAM, self._headers)
        )
        self.wake()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for kind, flags, stream, payload in self._frames.feed(bytes(self._buffer[:nbytes])):
                self._on_frame(kind, flags, stream, payload)
                if self._is_over:
                    return
            if self._replies:
                self._reply()
        except _Broken as broken:
            self._end(CallEnd(broken.code, str(broken)), broken.error)

    def eof_received(self) -> None:
        return None  # nothing more can come: the transport closes

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._end(CallEnd("UNAVAILABLE", f"the connection was lost: {error or 'the server has closed it'}"))

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self.wake()

    # --- what we send -------------------------------------------------------------------------------------------------

    def _request_headers(self, path: str, metadata: Sequence[tuple[str, str]]) -> bytes:
        target = self._target
        host = f"[{target.host}]" if ":" in target.host else target.host
        pairs = [
            (":method", "POST"),
            (":scheme", "http" if target.tls is None else "https"),
            (":path", path),
            (":authority", f"{host}:{target.port}"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *metadata,
        ]
        return b"".join(b"\x10" + _literal(name) + _literal(value) for name, value in pairs)

    def _flush(self) -> None:
        """One write of about FLUSH_BYTES at most; for more, the loop has a turn in between."""
        self._is_flush_due = False
        if self._transport is None or self._is_full:
            return
        frames, outgoing = bytearray(), self._outgoing
        while len(frames) < FLUSH_BYTES:
            most = min(self._room, self._stream_room, MAX_FRAME_BYTES)
            self._is_short_of_room = most <= 0
            if self._is_short_of_room:
                break
            while len(outgoing) < most and not self._is_over and (message := self._owner.next_message()) is not None:
                outgoing += MESSAGE_HEAD.pack(0, len(message)) + message
            if self._is_over:
                return
            if not outgoing:
                break
            part = bytes(outgoing[:most])
            del outgoing[:most]
            self._room -= len(part)
            self._stream_room -= len(part)
            frames += _frame(DATA, 0, STREAM, part)
        if frames:
            self._transport.write(bytes(frames))
        if len(frames) >= FLUSH_BYTES:
            self.wake()

    def _reply(self) -> None:
        assert self._transport is not None
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            raise _Broken(ENHANCE_YOUR_CALM, "the server asks and does not read what it is answered")
        self._transport.write(bytes(self._replies))
        self._replies.clear()

    # --- what we hear -------------------------------------------------------------------------------------------------

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        _must(kind == CONTINUATION or not self._answers.is_open, "something between the parts of a header block")
        if kind == DATA:
            self._on_data(flags, stream, payload)
        elif kind in (HEADERS, CONTINUATION):
            _must(stream == STREAM, "headers of another stream")
            if (end := self._answers.feed(kind, flags, payload)) is not None:
                self._end(end)
        elif kind == WINDOW_UPDATE:
            self._on_room(stream, payload)
        elif kind == PING:
            _must(len(payload) == 8 and stream == 0, "a ping that is none", FRAME_SIZE_ERROR)
            if not flags & ACK:
                self._replies += _frame(PING, ACK, 0, payload)
        elif kind == SETTINGS:
            _must(stream == 0, "settings of a stream")
            _must(len(payload) % 6 == 0 and not (flags & ACK and payload), "settings of no size", FRAME_SIZE_ERROR)
            if not flags & ACK:
                self._on_settings(payload)
        elif kind == RST_STREAM:
            _must(len(payload) == 4 and stream == STREAM, "a reset that is none", FRAME_SIZE_ERROR)
            error = int.from_bytes(payload)
            self._end(
                CallEnd(OF_RESET.get(error, "INTERNAL"), f"the server has reset the stream (HTTP/2 code {error})")
            )
        elif kind == GOAWAY:
            self._on_goaway(payload)
        elif kind == PUSH_PROMISE:
            raise _Broken(PROTOCOL_ERROR, "the server pushes what was not asked for")

    def _on_data(self, flags: int, stream: int, payload: bytes) -> None:
        _must(stream == STREAM and self._answers.is_answered, "data that was not asked for")
        self._unreturned += len(payload)
        if self._unreturned >= OUR_WINDOW_BYTES // 2:
            room, self._unreturned = struct.pack(">L", self._unreturned), 0
            self._replies += _frame(WINDOW_UPDATE, 0, 0, room) + _frame(WINDOW_UPDATE, 0, STREAM, room)
        for message in self._messages.feed(_unpadded(flags, payload) if flags & PADDED else payload):
            self._owner.on_message(message)
            if self._is_over:
                return
        if flags & END_STREAM:
            raise _Broken(PROTOCOL_ERROR, "the call has ended without a status")

    def _on_room(self, stream: int, payload: bytes) -> None:
        _must(len(payload) == 4, "room of no size", FRAME_SIZE_ERROR)
        more = int.from_bytes(payload) & MAX_WINDOW_BYTES
        _must(more > 0, "no more room")
        _must(stream in (0, STREAM), "room for another stream")
        if stream == 0:
            self._room += more
        else:
            self._stream_room += more
        _must(max(self._room, self._stream_room) <= MAX_WINDOW_BYTES, TOO_MUCH_ROOM, FLOW_CONTROL_ERROR)
        if self._is_short_of_room:
            self.wake()

    def _on_settings(self, payload: bytes) -> None:
        for name, value in struct.iter_unpack(">HL", payload):
            if name == SET_INITIAL_WINDOW:
                self._stream_room += value - self._first_room  # below zero, it may be (RFC 9113, 6.9.2)
                self._first_room = value
                _must(max(value, self._stream_room) <= MAX_WINDOW_BYTES, TOO_MUCH_ROOM, FLOW_CONTROL_ERROR)
            elif name == SET_MAX_FRAME:
                _must(MAX_FRAME_BYTES <= value < 1 << 24, "frames of no size")  # ours have the least that it can be
        self._replies += _frame(SETTINGS, ACK, 0, b"")
        self.wake()

    def _on_goaway(self, payload: bytes) -> None:
        _must(len(payload) >= 8, "a goodbye of no size", FRAME_SIZE_ERROR)
        last, error = struct.unpack_from(">LL", payload)
        if error == NO_ERROR and last & MAX_WINDOW_BYTES >= STREAM:
            self._owner.on_leaving()
            return
        code = "RESOURCE_EXHAUSTED" if error == ENHANCE_YOUR_CALM else "UNAVAILABLE"
        said = payload[8:].decode("utf-8", "replace")
        self._end(CallEnd(code, f"the server has gone away (HTTP/2 code {error}): {said}".rstrip(": ")))

    # --- the end ------------------------------------------------------------------------------------------------------

    def _end(self, end: CallEnd, error: int = NO_ERROR) -> None:
        if not self._is_over:
            self._leave(error)
            self._owner.on_end(end)

    def _leave(self, error: int) -> None:
        self._is_over = True
        if self._connecting is not asyncio.current_task():
            self._connecting.cancel()
        transport, self._transport = self._transport, None
        if transport is not None:
            # Best effort: a peer that does not read shall not keep the connection.
            reset = _frame(RST_STREAM, 0, STREAM, struct.pack(">L", error or CANCEL))
            transport.write(reset + _frame(GOAWAY, 0, 0, struct.pack(">LL", 0, NO_ERROR if error == CANCEL else error)))
            transport.abort()


class _Frames:
    """Bytes in, whole frames out: type, flags, stream, payload. Raises _Broken for what is not HTTP/2."""

    def __init__(self) -> None:
        self._rest = b""
        self._has_begun = False

    def feed(self, data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
        data = self._rest + data if self._rest else data
        at, there = 0, len(data)
        while there - at >= FRAME_HEAD.size:
            high, low, kind, flags, stream = FRAME_HEAD.unpack_from(data, at)
            size = high << 8 | low
            if not self._has_begun and (kind != SETTINGS or size > MAX_FRAME_BYTES):
                raise _Broken(PROTOCOL_ERROR, f"not HTTP/2: {data[:60]!r}", code="UNAVAILABLE")
            _must(size <= MAX_FRAME_BYTES, "a frame that is longer than was agreed", FRAME_SIZE_ERROR)
            end = at + FRAME_HEAD.size + size
            if end > there:
                break
            self._has_begun = True
            yield kind, flags, stream & MAX_WINDOW_BYTES, data[end - size : end]
            at = end
        self._rest = data[at:]


class _Messages:
    """The payload of DATA in, whole messages out."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._rest += data  # amortized: a large message is not copied with every part of it
        at, there = 0, len(self._rest)
        while there - at >= MESSAGE_HEAD.size:
            is_compressed, size = MESSAGE_HEAD.unpack_from(self._rest, at)
            if is_compressed:
                raise _Broken(CANCEL, "a message is compressed, which was not offered")
            if size > self._most_bytes:
                reason = f"Received message larger than max ({size} vs. {self._most_bytes})"
                raise _Broken(CANCEL, reason, code="RESOURCE_EXHAUSTED")
            end = at + MESSAGE_HEAD.size + size
            if end > there:
                break
            yield bytes(self._rest[end - size : end])
            at = end
        del self._rest[:at]


class _Headers:
    """Blocks of headers in, the end of the call out, if they are its trailers."""

    def __init__(self) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=MAX_HEADER_BYTES)
        self._block = bytearray()
        self._is_end = False
        self.is_open = False
        """Whether a block has begun and not ended: only CONTINUATION may come."""
        self.is_answered = False
        """Whether the server has said that there will be messages."""

    def feed(self, kind: int, flags: int, payload: bytes) -> CallEnd | None:
        if kind == HEADERS:
            payload = _unpadded(flags, payload) if flags & PADDED else payload
            if flags & HAS_PRIORITY:
                _must(len(payload) >= 5, "no room for a priority", FRAME_SIZE_ERROR)
                payload = payload[5:]
            self._is_end = bool(flags & END_STREAM)
        else:
            _must(self.is_open, "the rest of headers that have not begun")
        self._block += payload
        _must(len(self._block) <= MAX_HEADER_BYTES, "more headers than there may be", ENHANCE_YOUR_CALM)
        self.is_open = not flags & END_HEADERS
        if self.is_open:
            return None
        block = bytes(self._block)
        self._block.clear()
        try:
            pairs = self._decoder.decode(block, raw=True)
        except hpack.HPACKError as error:
            raise _Broken(COMPRESSION_ERROR, f"headers that cannot be read: {error}") from error
        return self._read({_text(name): _text(value) for name, value in pairs})

    def _read(self, headers: Mapping[str, str]) -> CallEnd | None:
        if self.is_answered:
            _must(self._is_end, "headers amid the messages")
            return _end_of(headers)
        status = headers.get(":status", "")
        if status.startswith("1") and not self._is_end:
            return None  # an interim answer (RFC 9113, 8.1)
        if "grpc-status" in headers and self._is_end:
            return _end_of(headers)
        if status != "200" or not headers.get("content-type", "").startswith("application/grpc"):
            # By a proxy, say; in grpcio's words, which `grpc_answers` knows.
            code = OF_HTTP.get(status, "UNKNOWN")
            return CallEnd(code, f"Received http2 header with status: {status[:10]}", headers.get("retry-after"))
        _must(not self._is_end, "the call has ended without a status")
        self.is_answered = True
        return None


def _end_of(headers: Mapping[str, str]) -> CallEnd:
    number = headers.get("grpc-status", "")
    index = int(number) if number.isascii() and number.isdigit() and len(number) < 3 else len(CODES)
    code = CODES[index] if index < len(CODES) else "UNKNOWN"
    details = unquote_to_bytes(headers.get("grpc-message", "").encode("latin-1")).decode("utf-8", "replace")
    return CallEnd(code, details, headers.get("retry-after"))


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    size = len(payload)
    return FRAME_HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


def _literal(text: str) -> bytes:
    """Of HPACK, for fields that are "never indexed" (RFC 7541, 5.2 and 6.2.3): there is one block on a connection, and
    it holds a key. hpack's encoder would tell it to the log at level debug."""
    raw = text.encode("utf-8")
    left = len(raw) - 0x7F
    if left < 0:
        return bytes((len(raw),)) + raw
    length = [0x7F]
    while left > 0x7F:
        length.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes((*length, left)) + raw


def _unpadded(flags: int, payload: bytes) -> bytes:
    """`payload` without what its first byte says that was added (RFC 9113, 6.1)."""
    _must(bool(payload) and payload[0] < len(payload), "more padding than there is")
    return payload[1 : len(payload) - payload[0]]


def _must(is_so: bool, otherwise: str, error: int = PROTOCOL_ERROR) -> None:
    if not is_so:
        raise _Broken(error, f"HTTP/2 as it must not be: {otherwise}")


def _text(value: bytes | str) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _protocol_of(transport: asyncio.BaseTransport) -> str | None:
    tls = transport.get_extra_info("ssl_object")
    return None if tls is None else tls.selected_alpn_protocol()


def _watch(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_MS)
