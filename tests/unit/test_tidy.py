"""The baseline of a child puts back what a handler has changed. What only a process of its own can show is in
`tests/e2e/test_clean_child.py`; here is what this process can stand."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spooled_supervisor import tidy
from spooled_supervisor.tidy import MAX_NEW_FDS, Baseline


class Signals:
    """How often our own handling had to be installed again."""

    def __init__(self) -> None:
        self.installed = 0

    def __call__(self) -> None:
        self.installed += 1


@pytest.fixture
def signals() -> Signals:
    return Signals()


@contextlib.contextmanager
def a_baseline(signals: Signals) -> Iterator[Baseline]:
    made = Baseline(on_signals_lost=signals, kill_leftovers=True)
    made.take(hooks_have_run=True)
    yield made
    for fd in (made._home_fd, *made._std.values()):
        os.close(fd)


@pytest.fixture
def baseline(signals: Signals) -> Iterator[Baseline]:
    with a_baseline(signals) as made:
        yield made


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[io.TextIOWrapper, io.TextIOWrapper]]:
    """Standard output and error as a child has them, which pytest has not; a test asks for them before `baseline`."""
    with contextlib.ExitStack() as stack, monkeypatch.context() as patch:
        made = []
        for name in ("stdout", "stderr"):
            fd = os.open(os.devnull, os.O_WRONLY)
            stream = os.fdopen(fd, "w", 1, encoding="utf-8", errors="backslashreplace")
            made.append(stack.enter_context(stream))
            patch.setattr(sys, name, stream)
        yield made[0], made[1]


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def change_directory() -> None:
    os.chdir("/")


def clear_environment() -> None:
    os.environ.clear()
    os.environ["NEW"] = "yes"


def replace_streams() -> None:
    sys.stdin, sys.stdout, sys.stderr = io.StringIO(), io.StringIO(), None


def lower_a_soft_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))


def allow_no_descriptor() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def lower_locked_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, hard))


def live_in_tokyo() -> None:
    os.environ["TZ"] = "Asia/Tokyo"
    time.tzset()


def block_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGRTMIN + 3})


LOOKS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "cwd": (change_directory, os.getcwd),
    "umask": (lambda: os.umask(0o777), umask),
    "environ": (clear_environment, environ),
    "streams": (replace_streams, lambda: (sys.stdin, sys.stdout, sys.stderr)),
    "timer": (lambda: signal.setitimer(signal.ITIMER_REAL, 600), lambda: signal.getitimer(signal.ITIMER_REAL)),
    "handler": (lambda: signal.signal(signal.SIGUSR1, print), lambda: signal.getsignal(signal.SIGUSR1)),
    "mask": (block_signals, lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "limit": (lower_a_soft_limit, lambda: resource.getrlimit(resource.RLIMIT_NOFILE)),
    "no descriptor": (allow_no_descriptor, lambda: resource.getrlimit(resource.RLIMIT_NOFILE)),
    "locked memory": (lower_locked_memory, lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)),
    "time zone": (live_in_tokyo, lambda: time.localtime(0).tm_hour),
    "policy": (
        lambda: os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)),
        lambda: os.sched_getscheduler(0),
    ),
    "blocking": (lambda: os.set_blocking(1, False), lambda: os.get_blocking(1)),
    "recursion": (lambda: sys.setrecursionlimit(5000), sys.getrecursionlimit),
    "gc": (gc.disable, gc.isenabled),
    "logging": (lambda: logging.disable(50), lambda: logging.root.manager.disable),
    "socket": (lambda: socket.setdefaulttimeout(0.1), socket.getdefaulttimeout),
    "profile": (lambda: sys.setprofile(lambda *_: None), sys.getprofile),
}


@pytest.mark.parametrize("what", LOOKS)
def test_it_is_put_back(baseline: Baseline, what: str) -> None:
    change, look = LOOKS[what]
    before = look()
    change()
    changed = look()
    unfit = baseline.restore()
    after = look()
    assert changed != before
    assert after == before
    assert unfit is None


@pytest.mark.parametrize("which", [0, 1], ids=["stdout", "stderr"])
@pytest.mark.parametrize(
    "change",
    [
        {"encoding": "latin-1"},
        {"encoding": "utf-8"},  # with it the errors become strict
        {"errors": "ignore"},
        {"line_buffering": False},
        {"write_through": True},
        {"encoding": "utf-16", "errors": "replace", "line_buffering": False, "write_through": True},
    ],
    ids=str,
)
def test_a_stream_that_was_reconfigured_is_as_it_was(
    streams: tuple[io.TextIOWrapper, io.TextIOWrapper], baseline: Baseline, which: int, change: dict[str, Any]
) -> None:
    def look() -> list[tuple[object, ...]]:
        return [(s, s.encoding, s.errors, s.line_buffering, s.write_through) for s in streams]

    before = look()
    streams[which].reconfigure(**change)
    assert look() != before
    assert baseline.restore() is None
    assert look() == before
    assert before[which][1:] == ("utf-8", "backslashreplace", True, False)


def test_a_stream_of_another_kind_is_left_alone(monkeypatch: pytest.MonkeyPatch, signals: Signals) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.StringIO())
        patch.setattr(sys, "stderr", None)
        with a_baseline(signals) as baseline:
            assert baseline.restore() is None


def test_where_nothing_has_changed_nothing_is_done(baseline: Baseline, signals: Signals) -> None:
    assert baseline.restore() is None
    assert signals.installed == 0


def test_a_replaced_signal_handler_has_ours_installed_again(baseline: Baseline, signals: Signals) -> None:
    signal.signal(signal.SIGRTMIN + 3, signal.SIG_IGN)
    assert baseline.restore() is None
    assert signals.installed == 1


class EqualToAll:
    """A signal handler that compares equal to any other."""

    def __call__(self, *_: object) -> None:
        return

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def test_a_handler_that_is_equal_to_all_is_replaced_nevertheless(baseline: Baseline, signals: Signals) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, EqualToAll())
    assert baseline.restore() is None
    assert signal.getsignal(signal.SIGUSR1) is before
    assert signals.installed == 1


class Ours(Signals):
    """Our own handling, a bound method: a new object each time."""

    def __call__(self) -> None:
        super().__call__()
        signal.signal(signal.SIGUSR2, self.on_signal)

    def on_signal(self, *_: object) -> None:
        return


def test_what_was_installed_again_is_no_change_after_the_next_job() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    ours = Ours()
    ours()
    try:
        with a_baseline(ours) as baseline:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            for _ in range(3):
                assert baseline.restore() is None
                assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_IGN
                assert signal.getsignal(signal.SIGUSR2) == ours.on_signal
            assert ours.installed == 2
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_removed_directory_is_left(baseline: Baseline, tmp_path: Path) -> None:
    before = os.getcwd()
    folder = tmp_path / "gone"
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()
    assert baseline.restore() is None
    assert os.getcwd() == before


def test_a_thread_that_lives_on_makes_the_child_unfit(baseline: Baseline) -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    assert baseline.restore() == "thread"
    end.set()
    thread.join()
    assert baseline.restore() is None


def test_threads_of_the_shared_event_loop_are_the_childs_own(baseline: Baseline) -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name=f"{tidy.LOOP_THREADS}0")
    thread.start()
    unfit = baseline.restore()
    end.set()
    thread.join()
    assert unfit is None


@pytest.mark.parametrize(("count", "unfit"), [(5, None), (2 * MAX_NEW_FDS, "descriptors")])
def test_a_few_open_descriptors_are_fine_and_many_are_not(baseline: Baseline, count: int, unfit: str | None) -> None:
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]
    found = baseline.restore()
    for fd in fds:
        os.close(fd)
    assert found == unfit


def test_what_cannot_even_be_looked_at_makes_the_child_unfit(
    baseline: Baseline, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fchdir", None)
        unfit = baseline.restore()
    assert unfit == "restore_surroundings failed: TypeError"


def test_without_children_nothing_is_cleared() -> None:
    """In a process of its own, as others' children may belong to this one."""
    lines = (
        "from spooled_supervisor import tidy",
        "baseline = tidy.Baseline(on_signals_lost=lambda: None, kill_leftovers=True)",
        "assert baseline.clear_leftovers() is tidy.NOTHING_LEFT",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


def test_what_ends_by_itself_while_we_look_is_reaped() -> None:
    """It was alive at the first reaping and is in no list of what was killed."""
    lines = (
        "import os",
        "from spooled_supervisor import tidy",
        "go, gone = os.pipe()",
        "if (pid := os.fork()) == 0:",
        "    os.close(gone)",
        "    os.read(go, 1)",
        "    os._exit(0)",
        "def look(*args, **options):",
        "    os.close(gone)",
        "    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)",
        "    return tidy.family.Swept()",
        "tidy.family.kill_descendants = look",
        "baseline = tidy.Baseline(on_signals_lost=lambda: None, kill_leftovers=True)",
        "baseline.clear_leftovers()",
        "assert not tidy.kernel.has_children()",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
