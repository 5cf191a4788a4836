"""Lines to descriptors that are slow, full, shared, broken or closed: taken whole or refused, and never waited for."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spooled_supervisor.telemetry.stream import LineStream

LINE = b"x" * 199 + b"\n"


@contextmanager
def stream_to(fd: int) -> Iterator[LineStream]:
    stream = LineStream(fd)
    try:
        yield stream
    finally:
        stream.close()


@contextmanager
def a_pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


def fill(stream: LineStream, line: bytes = LINE) -> int:
    """Write until the stream refuses; how many lines it took."""
    taken = 0
    while stream.write(line):
        taken += 1
    return taken


def drain(reader: int) -> bytes:
    received = b""
    while select.select([reader], [], [], 0)[0]:
        part = os.read(reader, 1 << 16)
        if not part:
            break
        received += part
    return received


def test_a_full_pipe_refuses_at_once_and_takes_lines_again_after_it_was_read() -> None:
    with a_pipe() as (reader, writer), stream_to(writer) as stream:
        assert fill(stream) > 100
        assert not stream.write(LINE)
        drain(reader)
        assert stream.write(LINE)


@pytest.mark.parametrize("size", [10, 200, 4096, 5000, 8192])
def test_a_line_that_a_pipe_took_half_is_finished_before_the_next(size: int) -> None:
    line = b"y" * (size - 1) + b"\n"
    with a_pipe() as (reader, writer), stream_to(writer) as stream:
        taken, received = 0, b""
        for _ in range(5):
            taken += fill(stream, line)
            received += drain(reader)
        taken += stream.write(line)
        received += drain(reader)
        assert received == line * taken


def test_the_descriptor_that_others_share_stays_blocking() -> None:
    with a_pipe() as (_, writer), stream_to(writer) as stream:
        fill(stream)
        assert os.get_blocking(writer)


def test_a_socket_takes_whole_lines_and_stays_blocking() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, stream_to(ours.fileno()) as stream:
        taken = fill(stream, LINE * 40)
        assert ours.getblocking()
        received = drain(theirs.fileno())
        taken += fill(stream, LINE * 40)
        received += drain(theirs.fileno())
        assert stream.write(b"") is False  # nothing to send is nothing sent
        received += drain(theirs.fileno())
        assert received == LINE * 40 * taken


def test_a_terminal_that_nobody_reads_refuses() -> None:
    leader, follower = pty.openpty()
    try:
        with stream_to(follower) as stream:
            assert fill(stream) >= 1
            assert os.get_blocking(follower)
    finally:
        os.close(leader)
        os.close(follower)


def test_a_reader_that_is_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    with stream_to(writer) as stream:
        assert stream.write(LINE)
        os.close(reader)
        assert not stream.write(LINE)
    with stream_to(writer) as late:
        assert not late.write(LINE)
    os.close(writer)


def test_a_closed_descriptor_refuses_and_its_number_is_not_written_to_later(tmp_path: Path) -> None:
    with (tmp_path / "database").open("wb") as database:
        number = fcntl.fcntl(database, fcntl.F_DUPFD_CLOEXEC, 300)
        os.close(number)
        with stream_to(number) as stream:
            os.dup2(database.fileno(), number)
            assert not stream.write(LINE)
            os.close(number)
    assert (tmp_path / "database").read_bytes() == b""


def test_a_number_that_is_reused_later_does_not_get_our_lines(tmp_path: Path) -> None:
    with a_pipe() as (reader, writer), stream_to(writer) as stream:
        database = os.open(tmp_path / "database", os.O_RDWR | os.O_CREAT)
        os.dup2(database, writer)
        assert stream.write(LINE)
        assert drain(reader) == LINE
        assert (tmp_path / "database").read_bytes() == b""
        os.close(database)


def test_a_full_disk_refuses() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with stream_to(full) as stream:
        assert not stream.write(LINE)
    os.close(full)


def test_a_file_is_appended_to_where_its_owner_is(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        file.write(b"before\n")
        file.flush()
        with stream_to(file.fileno()) as stream:
            assert stream.write(b"ours\n")
        file.write(b"after\n")
    assert (tmp_path / "log").read_bytes() == b"before\nours\nafter\n"


def test_close_gives_every_descriptor_back_and_may_come_twice() -> None:
    before = os.listdir("/proc/self/fd")
    ours, theirs = socket.socketpair()
    with ours, theirs, a_pipe() as (_, writer):
        for fd in (ours.fileno(), writer, 99999):
            stream = LineStream(fd)
            stream.close()
            stream.close()
            assert not stream.write(LINE)
    assert os.listdir("/proc/self/fd") == before


def test_our_own_descriptor_is_closed_in_programs_that_are_started() -> None:
    with a_pipe() as (_, writer), stream_to(writer):
        pipe = os.readlink(f"/proc/self/fd/{writer}")
        same = [fd for fd in range(100) if fd != writer and is_link_to(fd, pipe)]
        assert len(same) == 2  # the reader's end and ours
        assert all(not os.get_inheritable(fd) for fd in same)


def is_link_to(fd: int, target: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == target
    except FileNotFoundError:
        return False


FOREIGN_PIPE = """
import os
from spooled_supervisor.telemetry.stream import LineStream
os.setuid(65534)
stream = LineStream(2)
while stream.write(b"z" * 7999 + b"\\n"):
    pass
print("refused", flush=True)
input()
print(stream.write(b"again\\n"), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become a user who cannot open root's pipe anew")
def test_a_pipe_of_another_user_which_cannot_be_opened_anew_does_not_block_either() -> None:
    with a_pipe() as (reader, writer):
        child = subprocess.Popen(
            [sys.executable, "-c", FOREIGN_PIPE],
            stderr=writer,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "refused\n"
            received = drain(reader)
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "True\n"
            received += drain(reader)
        finally:
            child.send_signal(signal.SIGKILL)
            child.stdin.close()
            child.stdout.close()
            child.wait()
        *whole, last, nothing = received.split(b"\n")
        assert set(whole) == {b"z" * 7999}
        assert (last, nothing) == (b"again", b"")
