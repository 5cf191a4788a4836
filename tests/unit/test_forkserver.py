"""What the fork server takes for an app, and its packets. Forking itself is left to tests with processes."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from spooled_supervisor import forkserver, frames
from spooled_supervisor.errors import EX_CONFIG, AppError, ProtocolError
from spooled_supervisor.forkserver import CHILD_FDS, load_app, receive_packet, send_packet

SOURCE = """
import sys

from spooled_supervisor import App

seen_argv = sys.argv
app = App()
empty = App()
number = 7


@app.handler("emails")
def send(ctx):
    return "sent"


@app.handler("images")
def draw(ctx):
    return "drawn"


class Box:
    inner = app


def plain(ctx):
    return "plain"
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module in the current directory, which is not on the path yet."""
    name = f"an_app_of_{os.getpid()}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    (tmp_path / f"{name}_broken.py").write_text("def f():\n    raise KeyError('DATABASE_URL')\nf()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    yield name
    for loaded in [key for key in sys.modules if key.startswith(name)]:
        del sys.modules[loaded]


# --- the app ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ":app", ":Box.inner"])
def test_an_app_is_found_by_module_and_attribute(module: str, suffix: str) -> None:
    app = load_app(module + suffix, ["emails"])
    assert sorted(app.handlers) == ["emails", "images"]


def test_the_current_directory_is_importable_and_our_arguments_are_hidden(module: str) -> None:
    load_app(module, [])
    assert sys.path[0] == os.getcwd()
    assert sys.modules[module].seen_argv == [module]


def test_a_plain_callable_serves_the_one_queue_it_is_given(module: str) -> None:
    app = load_app(f"{module}:plain", ["emails"])
    assert list(app.handlers) == ["emails"]
    assert app.handlers["emails"].function is sys.modules[module].plain


@pytest.mark.parametrize(
    ("suffix", "queues", "message"),
    [
        (":nothing", [], "has no attribute 'nothing'"),
        (":Box.nothing", [], "has no attribute 'Box.nothing'"),
        (":number", ["q"], "is a int; it must be an App or a callable"),
        (":empty", [], "has no handlers: decorate a function with @app.handler"),
        (":plain", [], "say with exactly one --queue which queue it serves"),
        (":plain", ["a", "b"], "say with exactly one --queue which queue it serves"),
        (":app", ["emails", "faxes"], "has no handler for queue 'faxes'; it has: emails, images"),
    ],
)
def test_what_is_no_app_for_these_queues_is_said_in_words(
    module: str, suffix: str, queues: list[str], message: str
) -> None:
    with pytest.raises(AppError) as caught:
        load_app(module + suffix, queues)
    assert message in str(caught.value)
    assert repr(module + suffix) in str(caught.value)
    assert caught.value.exit_code == EX_CONFIG


def test_an_app_whose_table_was_filled_by_hand_is_checked(module: str) -> None:
    load_app(module, [])
    app = sys.modules[module].app
    app.handlers["two words"] = app.handlers["emails"]
    with pytest.raises(AppError, match="'two words': only letters"):
        load_app(module, [])


def test_a_failed_import_is_described_by_its_own_lines(module: str) -> None:
    with pytest.raises(KeyError) as caught:
        load_app(f"{module}_broken", [])
    text = forkserver._app_error_text(f"{module}_broken", caught.value)
    assert text.startswith(f"app '{module}_broken' cannot be imported:\n")
    assert text.endswith("KeyError: 'DATABASE_URL'")
    assert "in f\n" in text
    assert "<frozen" not in text
    assert "spooled_supervisor/forkserver.py" not in text


def test_a_huge_import_error_is_cut_to_its_end() -> None:
    text = forkserver._app_error_text("app", ValueError("x" * 100_000 + " the end"))
    assert len(text) < 4100
    assert text.endswith("the end")


def test_a_module_that_does_not_exist_is_an_import_error(module: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        load_app("no_such_module_anywhere", [])


def test_threads_are_named() -> None:
    before = forkserver._foreign_threads()
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait, name="pool-1")
    thread.start()
    try:
        assert [name for name in forkserver._foreign_threads() if name not in before] == ["pool-1"]
    finally:
        leave.set()
        thread.join()


# --- packets ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        yield here, there


def close_all(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def test_packets_keep_their_borders_and_bring_descriptors_that_no_program_inherits(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    here, there = pair
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    send_packet(here, b"one")
    send_packet(here, b"two", [writer])
    os.close(writer)
    assert receive_packet(there) == (b"one", [])
    packet, (received,) = receive_packet(there)
    assert packet == b"two"
    assert not os.get_inheritable(received)
    os.write(received, b"x")
    assert os.read(reader, 1) == b"x"
    close_all([reader, received])


def test_as_many_descriptors_as_a_child_needs_come_along(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(CHILD_FDS)]
    send_packet(here, b"fork", fds)
    packet, received = receive_packet(there)
    assert (packet, len(received)) == (b"fork", CHILD_FDS)
    close_all([*fds, *received])


def test_more_descriptors_than_expected_are_refused_and_none_stays_open(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    here, there = pair
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(CHILD_FDS + 2)]
    send_packet(here, b"fork", fds)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ProtocolError, match="a packet was cut"):
        receive_packet(there)
    assert len(os.listdir("/proc/self/fd")) == before
    close_all(fds)


def test_a_packet_whose_descriptors_find_no_place_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(CHILD_FDS)]
    send_packet(here, b"fork", fds)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(fds) + 1, hard))
    try:
        with pytest.raises(ProtocolError, match="RLIMIT_NOFILE"):
            receive_packet(there)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        close_all(fds)


def test_a_packet_that_is_too_long_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    send_packet(here, b"x" * frames.MAX_PACKET)
    assert len(receive_packet(there)[0]) == frames.MAX_PACKET
    send_packet(here, b"x" * (frames.MAX_PACKET + 1))
    with pytest.raises(ProtocolError):
        receive_packet(there)


def test_the_end_is_an_empty_packet_and_a_send_to_nobody_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    here.close()
    assert receive_packet(there) == (b"", [])
    with pytest.raises(BrokenPipeError):
        send_packet(there, b"x")
