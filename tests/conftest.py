"""For all tests: whoever leaves a process, a descriptor, a thread or an asyncio task behind fails.

What was there before the test began may stay: a server or a daemon of the module or the session, and what these have
open.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import transports

os.environ["PYTHONWARNINGS"] = "error"
"""Warnings are errors in what tests start, too; in the tests' own process pytest sees to it (pyproject.toml)."""

# Under nohup(1) a hang-up is ignored, and so it would be by all programs that the tests start and then hang up on.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

GRACE_S = 2.0
"""A thread that was told to end, or a process that was killed, may need a moment for it."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    transports.parametrize(metafunc)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What runs in one process when several run side by side: a file, or its tests of one transport."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        item.add_marker(pytest.mark.xdist_group("-".join((item.path.stem, *filter(None, [params.get("transport")])))))


@pytest.fixture(scope="module")
def transport(request: pytest.FixtureRequest) -> str:
    """How the daemons of this test talk to the service."""
    return str(getattr(request, "param", transports.CHOSEN or transports.REST))


Leak = tuple[object, str]
"""What identifies it, and how a person knows it."""


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Compare what there is after a test with what there was before it."""
    before = {kind: {key for key, _ in look()} for kind, look in KINDS.items()}
    yield
    deadline = time.monotonic() + GRACE_S
    while left := _left(before):
        if time.monotonic() > deadline:
            pytest.fail("the test left behind:\n  " + "\n  ".join(left))
        gc.collect()  # what is only waiting to be collected is closed
        time.sleep(0.02)


def _left(before: dict[str, set[object]]) -> list[str]:
    return [f"{kind} {text}" for kind, look in KINDS.items() for key, text in look() if key not in before[kind]]


def _processes() -> Iterable[Leak]:
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread has ended
            for pid in Path(f"/proc/self/task/{task}/children").read_text().split():
                with contextlib.suppress(OSError):  # so has the process
                    stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
                    state = stat.rpartition(")")[2].split()[0]
                    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    # The start time goes into the key: numbers are used again.
                    yield (pid, stat.split()[-31]), f"{pid} (state {state}): {line.strip() or stat.split(' ')[1]}"


def _descriptors() -> Iterable[Leak]:
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one with which the directory was read
            target = os.readlink(f"/proc/self/fd/{fd}")
            yield (fd, target), f"{fd}: {target}"


def _threads() -> Iterable[Leak]:
    for thread in threading.enumerate():
        yield thread, repr(thread)


def _tasks() -> Iterable[Leak]:
    for task in _all_tasks():
        if not task.done():
            yield task, repr(task)


def _all_tasks() -> list[asyncio.Task[Any]]:
    """Of all loops, the closed ones too: `asyncio.all_tasks` wants to know one."""
    known = getattr(asyncio.tasks, "_scheduled_tasks", getattr(asyncio.tasks, "_all_tasks", None))
    if known is None or sys.version_info >= (3, 14):  # the interpreter keeps them where nobody can look
        return [thing for thing in gc.get_objects() if isinstance(thing, asyncio.Task)]
    return list(known)


KINDS: dict[str, Callable[[], Iterable[Leak]]] = {
    "process": _processes,
    "descriptor": _descriptors,
    "thread": _threads,
    "task": _tasks,
}
