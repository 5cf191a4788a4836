"""The bytes between supervisor, fork server and child: golden, by property, and bounded."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spooled_supervisor import frames
from spooled_supervisor.errors import ProtocolError
from spooled_supervisor.frames import Decoder, FromChild, FromForkServer, ToChild, ToForkServer
from spooled_supervisor.job import MAX_RESULT_BYTES

GOLDEN: list[tuple[ToChild | FromChild, str]] = [
    (frames.Adopted(4711), "0700000093 01 cd1267 c400"),
    (frames.Adopted(4711, b"/a\xff"), "0a00000093 01 cd1267 c4032f61ff"),
    (
        frames.RunJob(7, "job-1", "emails", b'{"a":1}', 2, 3, 60.0),
        "2400000098 02 07 a56a6f622d31 a6656d61696c73 c4077b2261223a317d 02 03 cb404e000000000000",
    ),
    (frames.Abort(7, "timeout"), "0b00000093 03 07 a774696d656f7574"),
    (frames.Leave(), "0200000091 04"),
    (frames.Hello(3, 2, 4711), "0800000095 01 03 02 cd1267 a0"),
    (frames.Hello(3, 2, 4711, "no"), "0a00000095 01 03 02 cd1267 a26e6f"),
    (frames.BootFailed("no database"), "0e00000092 02 ab6e6f206461746162617365"),
    (frames.Started(7, 12.5), "0c00000093 03 07 cb4029000000000000"),
    (frames.Progress(7, 12.5, None), "0d00000094 04 07 cb4029000000000000 c0"),
    (frames.Progress(7, 100.0, "é"), "0f00000094 04 07 cb4059000000000000 a2c3a9"),
    (
        frames.Log(7, "info", "rendered", '{"n":3}', "log"),
        "1d00000096 05 07 a4696e666f a872656e6465726564 a77b226e223a337d a36c6f67",
    ),
    (frames.LogsDropped(7, 1000), "0600000093 06 07 cd03e8"),
    (
        frames.Answer(7, result=b"null", cpu_s=0.5),
        "1700000099 07 07 c4046e756c6c c0 c3 c0 c0 cb3fe0000000000000 90",
    ),
    (
        frames.Answer(7, error="E: x", retryable=False, aborted="timeout", leaving="aborted", left_behind=["sh"]),
        "2700000099 07 07 c0 a4453a2078 c2 a774696d656f7574 a761626f72746564 cb0000000000000000 91a27368",
    ),
    (frames.Metrics(b"{}"), "06000000 92 08 c402 7b7d"),
    (frames.Leaving(), "02000000 91 09"),
]
GOLDEN_PACKETS: list[tuple[ToForkServer | FromForkServer, str]] = [
    (
        frames.Preload(1, "app:app", ["emails"], False, 5, True, False, "info"),
        "9c 01 01 a76170703a617070 91a6656d61696c73 c2 05 c3 c2 a4696e666f a67369676e616c 90 a0",
    ),
    (frames.Fork(9, 3), "93 02 09 03"),
    (frames.Forget(4711), "92 03 cd1267"),
    (frames.Retire(), "91 04"),
    (frames.Preloaded(["emails"], ["pool-1"]), "93 01 91a6656d61696c73 91a6706f6f6c2d31"),
    (frames.PreloadFailed("no app"), "92 02 a66e6f20617070"),
    (frames.Forked(9, 4711), "93 03 09 cd1267"),
    (frames.ForkFailed(9, "ENOMEM"), "93 04 09 a6454e4f4d454d"),
]
TO_CHILD = [message for message, _ in GOLDEN if isinstance(message, ToChild)]
FROM_CHILD = [message for message, _ in GOLDEN if isinstance(message, FromChild)]
DECODERS: dict[str, Callable[[], Decoder[Any]]] = {
    "of_child": frames.decoder_of_child,
    "of_jobs": frames.decoder_of_jobs,
    "of_fork_server": frames.decoder_of_fork_server,
    "of_requests": frames.decoder_of_requests,
}

text = st.text(st.characters(codec="utf-8"), max_size=60)
number = st.integers(0, 2**63 - 1)
instant = st.floats(allow_nan=False)
reports = st.one_of(
    st.builds(frames.Hello, number, number, number),
    st.builds(frames.BootFailed, text),
    st.builds(frames.Started, number, instant),
    st.builds(frames.Progress, number, instant, st.none() | text),
    st.builds(frames.Log, number, st.sampled_from(["debug", "error"]), text, st.none() | text, st.just("log")),
    st.builds(frames.LogsDropped, number, number),
    st.builds(frames.Answer, number, result=st.binary(max_size=100), cpu_s=instant),
    st.builds(frames.Answer, number, error=text, retryable=st.booleans()),
)


def in_pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


# --- golden bytes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("message", "golden"), GOLDEN, ids=lambda value: type(value).__name__)
def test_the_bytes_of_a_frame_are_the_golden_ones(message: ToChild | FromChild, golden: str) -> None:
    data = bytes.fromhex(golden)
    assert frames.encode_frame(message) == data
    decoder: Decoder[ToChild] | Decoder[FromChild]
    decoder = frames.decoder_of_jobs() if isinstance(message, ToChild) else frames.decoder_of_child()
    assert list(decoder.feed(data)) == [message]


@pytest.mark.parametrize(("message", "golden"), GOLDEN_PACKETS, ids=lambda value: type(value).__name__)
def test_the_bytes_of_a_packet_are_the_golden_ones(message: ToForkServer | FromForkServer, golden: str) -> None:
    data = bytes.fromhex(golden)
    assert frames.encode_packet(message) == data
    decoder: Decoder[ToForkServer] | Decoder[FromForkServer]
    is_request = isinstance(message, ToForkServer)
    decoder = frames.decoder_of_requests() if is_request else frames.decoder_of_fork_server()
    assert decoder.decode(data) == message


def test_every_message_has_golden_bytes() -> None:
    known = {type(message) for message, _ in GOLDEN} | {type(message) for message, _ in GOLDEN_PACKETS}
    every = {
        kind
        for kind in vars(frames).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == frames.__name__
    }
    assert every - known == {frames._Message}


# --- by property ------------------------------------------------------------------------------------------------------


@given(st.lists(reports, max_size=6), st.lists(st.integers(0, 10_000), max_size=12))
def test_any_split_of_the_bytes_gives_the_same_messages(messages: list[FromChild], cuts: list[int]) -> None:
    data = b"".join(map(frames.encode_frame, messages))
    decoder = frames.decoder_of_child()
    found = [message for piece in in_pieces(data, cuts) for message in decoder.feed(piece)]
    assert found == messages
    assert decoder.pending == 0


def test_a_byte_at_a_time_gives_the_same_messages() -> None:
    decoder = frames.decoder_of_child()
    data = b"".join(map(frames.encode_frame, FROM_CHILD))
    found = [message for byte in data for message in decoder.feed(bytes([byte]))]
    assert found == FROM_CHILD


@pytest.mark.parametrize("name", DECODERS)
@given(data=st.lists(st.binary(max_size=80), max_size=5))
@example(data=[b"\xff\xff\xff\xff"])
@example(data=[b"\x00\x00\x00\x00"])
@example(data=[b"\x01\x00\x00\x00\xc1"])
@example(data=[b"\x06\x00\x00\x00\x92\x01\xdd\xff\xff\xff\xff"])
@example(data=[b"\x0a\x00\x00\x00\x98\x01\x01\xa0\xdd\xff\xff\xff\xff\xc2"])
def test_any_bytes_give_messages_or_one_protocol_error(name: str, data: list[bytes]) -> None:
    decoder = DECODERS[name]()
    fed = 0
    with contextlib.suppress(ProtocolError):
        for piece in data:
            fed += len(piece)
            list(decoder.feed(piece))
            assert decoder.pending <= fed


@pytest.mark.parametrize("name", DECODERS)
@given(body=st.binary(max_size=60))
@example(body=b"\x91" * 60)
@example(body=b"\x93\x01\xdd\xff\xff\xff\xff")
@example(body=b"\x92\x02\xdb\xff\xff\xff\xff")
@example(body=b"\x92\x02\xa2\xed\xb0")
def test_any_body_is_a_message_or_a_protocol_error(name: str, body: bytes) -> None:
    decoder = DECODERS[name]()
    try:
        message = decoder.decode(body)
    except ProtocolError:
        return
    assert isinstance(message, frames._Message)


@given(st.sampled_from(FROM_CHILD), st.data())
def test_one_wrong_byte_gives_a_message_or_a_protocol_error(message: FromChild, data: st.DataObject) -> None:
    wrong = bytearray(frames.encode_frame(message))
    at = data.draw(st.integers(0, len(wrong) - 1))
    wrong[at] = data.draw(st.integers(0, 255))
    decoder = frames.decoder_of_child()
    try:
        found = list(decoder.feed(bytes(wrong)))
    except ProtocolError:
        return
    assert len(found) <= 1


# --- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("of_child", MAX_RESULT_BYTES + 64 * 1024),
        ("of_jobs", 128 << 20),
        ("of_fork_server", 128 * 1024),
        ("of_requests", 128 * 1024),
    ],
)
def test_a_length_above_the_limit_is_refused_before_anything_is_kept(name: str, limit: int) -> None:
    decoder = DECODERS[name]()
    assert list(decoder.feed(limit.to_bytes(4, "little"))) == []
    decoder = DECODERS[name]()
    with pytest.raises(ProtocolError, match=f"a frame of {limit + 1} bytes, {limit} are allowed"):
        list(decoder.feed((limit + 1).to_bytes(4, "little")))


def test_a_result_at_its_limit_fits_into_a_report() -> None:
    answer = frames.Answer(
        2**63 - 1,
        result=b"1" * MAX_RESULT_BYTES,
        aborted="x" * 32,
        leaving="x" * 64,
        left_behind=["x" * 32] * 32,
    )
    assert list(frames.decoder_of_child().feed(frames.encode_frame(answer))) == [answer]


def test_the_longest_text_passes_and_a_longer_one_does_not() -> None:
    for text_of in (frames.BootFailed, lambda t: frames.Progress(1, 0.0, t), lambda t: frames.Answer(1, error=t)):
        longest = text_of("é" * frames.MAX_TEXT)
        assert list(frames.decoder_of_child().feed(frames.encode_frame(longest))) == [longest]
        with pytest.raises(ProtocolError):
            list(frames.decoder_of_child().feed(frames.encode_frame(text_of("x" * (frames.MAX_TEXT + 1)))))


@pytest.mark.parametrize(
    "message",
    [
        frames.Started(-1, 0.0),
        frames.Log(-1, "info", "", None, "log"),
        frames.Log(1, "x" * 17, "", None, "log"),
        frames.Log(1, "info", "", None, "x" * 17),
        frames.LogsDropped(1, -1),
        frames.Answer(1, error="", aborted="x" * 33),
        frames.Answer(1, error="", leaving="x" * 65),
        frames.Answer(1, error="", left_behind=["x"] * 33),
        frames.Answer(1, error="", left_behind=["x" * 33]),
    ],
    ids=repr,
)
def test_fields_out_of_bounds_are_no_message(message: FromChild) -> None:
    with pytest.raises(ProtocolError):
        list(frames.decoder_of_child().feed(frames.encode_frame(message)))


def test_a_frame_for_a_child_is_no_report() -> None:
    with pytest.raises(ProtocolError):
        list(frames.decoder_of_child().feed(frames.encode_frame(frames.RunJob(1, "j", "q", b"{}", 0, 0, 1.0))))


def test_messages_before_a_broken_frame_are_given_first() -> None:
    feed = frames.decoder_of_child().feed(frames.encode_frame(frames.Started(1, 0.5)) + b"\x01\x00\x00\x00\xc1")
    assert next(feed) == frames.Started(1, 0.5)
    with pytest.raises(ProtocolError):
        next(feed)


def test_what_is_kept_is_one_unfinished_frame() -> None:
    decoder = frames.decoder_of_child()
    whole = frames.encode_frame(frames.BootFailed("x" * 1000))
    for _ in range(20):
        assert list(decoder.feed(whole[:500])) == []
        assert decoder.pending == 500
        assert len(list(decoder.feed(whole[500:]))) == 1
        assert decoder.pending == 0
