"""What a worker changes in the program that runs it, and puts back: subreaper, signal handlers; and its exit.

Process-wide things, shared by all workers of the program. Signal handling can only be changed in the main thread
(signal(7), Python's `signal`); a worker in another thread leaves it alone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401 # registers its hook for the exit, and so before we register ours
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from spooled_supervisor import kernel
from spooled_supervisor.timing import now

THREAD_ENDS_S = 0.05
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_lock = threading.Lock()
_adopting = 0  # how many need the program to be a subreaper
_was_subreaper = False
_serving: set[threading.Event] = set()
"""What the end of the program waits for; each is set when a worker has ended."""


def thread_count() -> int:
    """Threads of this process, those of C libraries too."""
    return len(os.listdir("/proc/self/task"))


def has_one_thread() -> bool:
    """Whether it may be forked. A thread that was joined exists for a moment longer: that is waited for."""
    give_up_at = now() + THREAD_ENDS_S
    while (count := thread_count()) > threading.active_count() == 1 and now() < give_up_at:
        time.sleep(0.001)
    return count == 1


@contextlib.contextmanager
def exit_waits() -> Iterator[None]:
    """The end of the program waits until this is over. It may begin in one thread and end in another.

    Python waits for threads at its end anyway, but before that it closes all executors, and a loop that turns on can
    neither resolve a name nor write a file any more.
    """
    over = threading.Event()
    _serving.add(over)
    try:
        yield
    finally:
        _serving.discard(over)
        over.set()


def _wait_for_workers() -> None:
    """In the main thread, when that has nothing else to do; signal handlers of the program run meanwhile.

    It does not join their threads: one of an executor ends only when that is closed, which comes after us.
    """
    while _serving:
        for over in tuple(_serving):
            over.wait()


# Not public, but the only way to come before the hook of concurrent.futures (the last one registered is the first one
# called); anyio takes it, too. `atexit` is later than both: https://bugs.python.org/issue39812.
threading._register_atexit(_wait_for_workers)  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=_serving.clear)  # a fork has none of the threads, and would wait for ever


@contextlib.contextmanager
def subreaper() -> Iterator[None]:
    """Children of our fork server become children of this process. For any number of workers at once."""
    global _adopting, _was_subreaper
    with _lock:
        if _adopting == 0:
            _was_subreaper = kernel.is_child_subreaper()
            kernel.set_child_subreaper(True)
        _adopting += 1
    try:
        yield
    finally:
        with _lock:
            _adopting -= 1
            if _adopting == 0:
                kernel.set_child_subreaper(_was_subreaper)


@contextlib.contextmanager
def waitable_children() -> Iterator[None]:
    """An ignored SIGCHLD makes the kernel throw statuses away (wait(2)). A handler of the program's stays in place:
    what it takes from us counts as unknown."""
    is_ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    if not is_ignored or not is_main_thread():
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


@contextlib.contextmanager
def stop_signals(loop: asyncio.AbstractEventLoop, on_signal: Callable[[signal.Signals], None]) -> Iterator[None]:
    """In the main thread TERM and INT call back in the loop, until the previous handlers are put back."""
    if not is_main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    wakeup_fd = signal.set_wakeup_fd(-1)  # the loop takes it for itself
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not Python's
        signal.set_wakeup_fd(wakeup_fd)


@contextlib.contextmanager
def handing_over(on_first: Callable[[BaseException], None]) -> Iterator[list[BaseException]]:
    """In the main thread: what the program's signal handlers raise is collected, and the first of it told at once.

    An exception would come up wherever the loop is at that moment. Inside a callback asyncio logs and forgets it
    (unless it is KeyboardInterrupt or SystemExit), and inside a task group it comes out in a group.
    """
    raised: list[BaseException] = []
    if not is_main_thread():
        yield raised
        return
    pid = os.getpid()

    def guarding(handler: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], None]:
        def guard(number: int, frame: FrameType | None) -> None:
            try:
                handler(number, frame)
            except BaseException as error:
                if os.getpid() != pid:  # a fork of the program's own
                    raise
                raised.append(error)
                if len(raised) == 1:
                    on_first(error)

        return guard

    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    guards = {number: guarding(handler) for number, handler in handlers.items() if callable(handler)}
    for number, guard in guards.items():
        signal.signal(number, guard)
    try:
        yield raised
    finally:
        for number, guard in guards.items():
            if signal.getsignal(number) is guard:  # the program may have changed its mind
                signal.signal(number, handlers[number])


def unwind(loop: asyncio.AbstractEventLoop, main: asyncio.Task[Any]) -> None:
    """Cancel this task, which sees its children dead, and then what is left (as asyncio.Runner does)."""
    tasks: set[asyncio.Task[Any]] = {main}
    while tasks:
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        tasks = asyncio.all_tasks(loop)


def is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def is_waited_for() -> bool:
    """Whether the program waits at its end for this thread, which is not the main one."""
    return not is_main_thread() and not threading.current_thread().daemon
