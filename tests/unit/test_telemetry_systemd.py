"""Messages to the service manager, received by a real datagram socket; and everything that may be wrong with it."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spooled_supervisor.telemetry.systemd import MAX_DUE, MAX_STATUS_CHARS, Notifier


class Manager:
    """The receiving end."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.setblocking(False)
        self.env = {"NOTIFY_SOCKET": address}

    def received(self) -> list[str]:
        return self.socket.recv(8192).decode().split("\n")


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    address = str(tmp_path / "notify") if request.param == "path" else f"@spooled-test-{os.getpid()}-{tmp_path.name}"
    end = Manager(address)
    yield end
    end.socket.close()


@pytest.fixture
def notifier(manager: Manager) -> Iterator[Notifier]:
    made = Notifier(manager.env)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("speak", "lines"),
    [
        (lambda n: n.ready("4 children"), ["READY=1", "STATUS=4 children"]),
        (lambda n: n.ready(), ["READY=1"]),
        (lambda n: n.status("service unreachable"), ["STATUS=service unreachable"]),
        (lambda n: n.stopping("draining, 3 jobs"), ["STOPPING=1", "STATUS=draining, 3 jobs"]),
        (lambda n: n.watchdog(), ["WATCHDOG=1"]),
        (lambda n: n.extend_timeout(6), ["EXTEND_TIMEOUT_USEC=6000000"]),
        (lambda n: n.extend_timeout(0.25), ["EXTEND_TIMEOUT_USEC=250000"]),
        (lambda n: n.extend_timeout(-1), ["EXTEND_TIMEOUT_USEC=0"]),
    ],
)
def test_a_verb_is_one_message(
    manager: Manager, notifier: Notifier, speak: Callable[[Notifier], bool], lines: list[str]
) -> None:
    assert notifier.is_connected
    assert speak(notifier) is True
    assert manager.received() == lines


def test_a_reload_tells_when_it_began_on_the_managers_clock(manager: Manager, notifier: Notifier) -> None:
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    assert notifier.reloading()
    after = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    first, second = manager.received()
    assert first == "RELOADING=1"
    assert before <= int(re.fullmatch(r"MONOTONIC_USEC=(\d+)", second)[1]) <= after  # type: ignore[index]


@pytest.mark.parametrize("text", ["ok\nMAINPID=1", "ok\r\x00\x1b[31m", "ok\ud800\u2028", "x" * 10_000])
def test_a_status_stays_one_bounded_line(manager: Manager, notifier: Notifier, text: str) -> None:
    assert notifier.status(text)
    (line,) = manager.received()
    assert line.isprintable()
    assert len(line) <= len("STATUS=") + MAX_STATUS_CHARS


def test_an_empty_status_is_no_message(manager: Manager, notifier: Notifier) -> None:
    assert not notifier.status(" \n")
    with pytest.raises(BlockingIOError):
        manager.received()


def test_a_manager_that_does_not_read_is_not_waited_for(manager: Manager, notifier: Notifier) -> None:
    while notifier.watchdog():
        pass
    assert not notifier.ready()
    manager.received()
    assert notifier.ready()


def test_what_a_busy_manager_did_not_take_is_told_later_in_its_order_and_once(
    manager: Manager, notifier: Notifier
) -> None:
    filled = fill(notifier)
    assert not notifier.ready("4 children")
    assert not notifier.ready("3 children")
    assert not notifier.status("busy")
    assert not notifier.stopping()
    assert not notifier.repeat()
    for _ in range(filled):
        assert manager.received() == ["WATCHDOG=1"]
    assert notifier.repeat()
    assert manager.received() == ["READY=1", "STATUS=3 children"]
    assert manager.received() == ["STOPPING=1"]
    assert notifier.repeat()
    with pytest.raises(BlockingIOError):
        manager.received()


def test_of_what_a_manager_never_takes_the_latest_is_kept(manager: Manager, notifier: Notifier) -> None:
    filled = fill(notifier)
    for _ in range(100):
        assert not notifier.reloading()
        assert not notifier.ready()
    assert not notifier.stopping()
    for _ in range(filled):
        manager.received()
    assert notifier.repeat()
    assert [manager.received()[0] for _ in range(MAX_DUE)] == ["RELOADING=1", "READY=1", "STOPPING=1"]


def fill(notifier: Notifier) -> int:
    """Until the manager's queue is full; how many messages that took."""
    filled = 0
    while notifier.watchdog():
        filled += 1
    return filled


def test_a_manager_that_went_away_is_no_error(manager: Manager, notifier: Notifier) -> None:
    manager.socket.close()
    assert not notifier.watchdog()


@pytest.mark.parametrize(
    "address",
    ["", "relative/path", "vsock:2:1234", "/nonexistent/socket", "/" + "x" * 200, "@" + "x" * 200, "/a\0b", "/\udcff"],
)
def test_without_a_usable_socket_verbs_do_nothing(address: str) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": address})
    assert not notifier.ready("up")
    assert not notifier.watchdog()
    assert not notifier.reloading()
    notifier.repeat()
    notifier.close()
    notifier.close()


def test_outside_systemd_nothing_is_opened_and_no_watchdog_runs() -> None:
    before = os.listdir("/proc/self/fd")
    notifier = Notifier({"WATCHDOG_USEC": "1000000"})
    assert not notifier.is_connected
    assert notifier.watchdog_interval_s is None
    assert os.listdir("/proc/self/fd") == before


def test_a_closed_notifier_says_nothing(manager: Manager, notifier: Notifier) -> None:
    notifier.close()
    assert not notifier.ready()
    with pytest.raises(BlockingIOError):
        manager.received()


@pytest.mark.parametrize(
    ("variables", "interval_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 10.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 10.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "me"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "-5"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": ""}, None),
    ],
)
def test_the_watchdog_is_due_three_times_per_limit_if_it_is_ours(
    variables: dict[str, str], interval_s: float | None
) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": "@nobody", **variables})
    assert notifier.watchdog_interval_s == interval_s
    notifier.close()


def test_take_leaves_nothing_for_descendants_and_touches_nothing_else(manager: Manager) -> None:
    environ = {
        **manager.env,
        "WATCHDOG_USEC": "3000000",
        "WATCHDOG_PID": str(os.getpid()),
        "LISTEN_FDS": "1",
        "LISTEN_PID": "1",
        "LISTEN_FDNAMES": "x",
        "CREDENTIALS_DIRECTORY": "/run/credentials",
        "PATH": "/bin",
    }
    notifier = Notifier.take(environ)
    assert environ == {"CREDENTIALS_DIRECTORY": "/run/credentials", "PATH": "/bin"}
    assert notifier.watchdog_interval_s == 1.0
    assert notifier.ready()
    assert manager.received() == ["READY=1"]
    notifier.close()


def test_a_program_that_is_started_does_not_inherit_the_socket(manager: Manager) -> None:
    before = open_sockets()
    notifier = Notifier(manager.env)
    ours = open_sockets() - before
    assert ours
    assert not any(os.get_inheritable(fd) for fd in ours)
    notifier.close()
    assert open_sockets() == before


def open_sockets() -> set[int]:
    return {int(fd) for fd in os.listdir("/proc/self/fd") if is_socket(f"/proc/self/fd/{fd}")}


def is_socket(link: str) -> bool:
    try:
        return os.readlink(link).startswith("socket:")
    except FileNotFoundError:
        return False
