"""All that a handler author imports: `App`, `JobContext`, the abort signal.

An `App` is a table from queue names to handlers, and the hooks of a child's life. It runs nothing by itself; `child.py`
gives every job a `JobContext`. Cheap to import on purpose: no msgspec, no asyncio, no logging.
"""

from __future__ import annotations

import inspect
import os
import select
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from spooled_supervisor.errors import JobAborted, NonRetryableError
from spooled_supervisor.highfd import move_high

__all__ = ["AbortSignal", "App", "Handler", "JobAborted", "JobContext", "NonRetryableError", "Reporter"]

F = TypeVar("F", bound=Callable[..., Any])
LogLevel = Literal["debug", "info", "warn", "error"]
OnAbort = Literal["signal", "raise"]
LOG_LEVELS = ("debug", "info", "warn", "error")
MAX_QUEUE_NAME = 100
MAX_WAIT_S = 2_000_000.0
"""What poll(2) can count, in milliseconds; no job runs for so long."""


def queue_name_problem(name: object) -> str | None:
    """Why the service would refuse this queue name, or None (POST /api/v1/jobs/claim: 1-100, letters, digits, -_.)."""
    if not isinstance(name, str):
        return f"queue name {name!r}: it must be a string, not {type(name).__name__}"
    if not 1 <= len(name) <= MAX_QUEUE_NAME:
        return f"queue name {name[:40]!r}: it has {len(name)} characters, 1 to {MAX_QUEUE_NAME} are allowed"
    if name[0] in ".-" or not all(c.isalnum() or c in "-_." for c in name):
        return f"queue name {name!r}: only letters, digits, '-', '_' and '.' are allowed, and no '.' or '-' in front"
    return None


@dataclass(frozen=True, slots=True)
class Handler:
    """One queue's handler; `on_abort` says what an abort does to it beyond setting the flag."""

    queue_name: str
    function: Callable[[JobContext], Any]
    on_abort: OnAbort = "signal"
    is_async: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_async", is_async(self.function))


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a handler is declared as async. A coroutine that any other returns is not awaited: it is no result."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 # an object whose __call__ is async
    )


class App:
    """Handlers by queue, and hooks.

    Hooks run in this order: `on_preload` once in the fork server after the import; `on_child_start` and
    `on_child_stop` in every child, before its first job and after its last (not when it is killed).
    """

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}
        self.preload_hooks: list[Callable[[], Any]] = []
        self.child_start_hooks: list[Callable[[], Any]] = []
        self.child_stop_hooks: list[Callable[[], Any]] = []

    def handler(self, queue_name: str, *, on_abort: OnAbort = "signal") -> Callable[[F], F]:
        """Serve a queue with the decorated function, sync or async; it takes a `JobContext`, returns any JSON value.

        `on_abort="raise"` raises `JobAborted` inside a running sync handler (an async one is cancelled); the default
        only sets `ctx.signal`. Raises ValueError for a queue name that the service would refuse, a second handler for
        one queue or another `on_abort`, TypeError for what cannot be called.
        """
        if problem := queue_name_problem(queue_name):
            raise ValueError(problem)
        if on_abort not in ("signal", "raise"):
            raise ValueError(f"on_abort={on_abort!r} for queue {queue_name!r}: it must be 'signal' or 'raise'")
        if queue_name in self.handlers:
            raise ValueError(f"queue {queue_name!r} has a handler already: {self.handlers[queue_name].function!r}")

        def register(function: F) -> F:
            if not callable(function):
                raise TypeError(f"the handler for queue {queue_name!r} must be callable, not {function!r}")
            self.handlers[queue_name] = Handler(queue_name, function, on_abort)
            return function

        return register

    def on_preload(self, hook: F) -> F:
        """Run once, in the fork server, after the app is imported: load here what all children shall share."""
        self.preload_hooks.append(hook)
        return hook

    def on_child_start(self, hook: F) -> F:
        """Run in every child before its first job (may be async): open here what must not be shared."""
        self.child_start_hooks.append(hook)
        return hook

    def on_child_stop(self, hook: F) -> F:
        """Run in a child that leaves in peace (may be async)."""
        self.child_stop_hooks.append(hook)
        return hook


class AbortSignal:
    """Tells a running job to stop. Set once, never cleared; may be read and waited for from any thread.

    It is set from a Unix signal handler in the main thread, so it must not take a lock that the interrupted code may
    hold: `wait` sleeps on an eventfd(2) and not on a `threading.Event`.
    """

    def __init__(self, on_return: Callable[[], None] = lambda: None) -> None:
        """`on_return` is called at the end of `wait`: what could not be raised in the middle of it is raised there."""
        self._on_return = on_return
        self._reason: str | None = None
        self._listeners: list[Callable[[], object]] = []
        self._eventfd: int | None = None

    @property
    def aborted(self) -> bool:
        """Whether the job was told to stop."""
        return self._reason is not None

    @property
    def reason(self) -> str | None:
        """`"shutdown"`, `"timeout"`, `"lease_lost"`, `"operator"`, or None while not aborted."""
        return self._reason

    def wait(self, timeout_s: float | None = None) -> bool:
        """Sleep until aborted, at most `timeout_s` seconds (None: for ever); whether it is aborted.

        With `on_abort="raise"` it raises JobAborted instead of returning True, in the main thread.
        """
        if self._eventfd is None:
            made = move_high(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
            if self._eventfd is None:
                self._eventfd = made
            else:  # another thread was faster, and may sleep on that one already
                os.close(made)
        if not self.aborted:  # asked after the eventfd exists: an abort in between has not been missed
            poll = select.poll()
            poll.register(self._eventfd, select.POLLIN)
            poll.poll(None if timeout_s is None or timeout_s > MAX_WAIT_S else max(0.0, timeout_s * 1000))
        self._on_return()
        return self.aborted

    def add_listener(self, listener: Callable[[], object]) -> None:
        """Call `listener` when the job is told to stop; at once if it already is.

        It runs in the main thread, between two bytecodes of the handler: keep it short, take no locks in it. What it
        raises is printed to the job's output and changes nothing.
        """
        self._listeners.append(listener)
        if self.aborted:
            self._tell_listeners()

    def raise_if_aborted(self) -> None:
        """Raise `JobAborted` if the job was told to stop."""
        if self._reason is not None:
            raise JobAborted(self._reason)

    def abort(self, reason: str) -> None:
        """Set it; only the first call counts. The runner calls this, and tests of handlers may."""
        if self._reason is not None:
            return
        self._reason = reason
        if self._eventfd is not None:
            os.eventfd_write(self._eventfd, 1)
        self._tell_listeners()

    def close(self) -> None:
        """Give the eventfd back; the runner calls this when the job is over."""
        if self._eventfd is not None:
            fd, self._eventfd = self._eventfd, None
            os.close(fd)

    def _tell_listeners(self) -> None:
        while True:
            try:
                listener = self._listeners.pop(0)  # before it is told, so that an abort in between cannot tell it twice
            except IndexError:
                return
            try:
                listener()
            except BaseException as error:  # JobAborted, too: it would come up in the middle of a frame of ours
                sys.excepthook(type(error), error, error.__traceback__)


class Reporter(Protocol):
    """Where `JobContext` sends what the handler says; the child's pipe, or a list in a test."""

    def progress(self, percent: float, message: str | None) -> None: ...
    def log(self, level: str, message: str, meta: dict[str, Any]) -> None: ...


class JobContext:
    """What a handler is given: the job, its abort signal, and two ways to say how it goes.

    `payload` is the decoded JSON; `retry_count` is 0 on the first run; `timeout_s` is the limit after which the job is
    told to stop and then killed, in seconds from its start.
    """

    __slots__ = (
        "_reporter",
        "job_id",
        "max_retries",
        "payload",
        "queue_name",
        "retry_count",
        "signal",
        "timeout_s",
    )

    def __init__(
        self,
        *,
        job_id: str,
        queue_name: str,
        payload: Any,
        retry_count: int,
        max_retries: int,
        timeout_s: float,
        signal: AbortSignal,
        reporter: Reporter,
    ) -> None:
        self.job_id = job_id
        self.queue_name = queue_name
        self.payload = payload
        self.retry_count = retry_count
        self.max_retries = max_retries
        self.timeout_s = timeout_s
        self.signal = signal
        self._reporter = reporter

    def progress(self, percent: float, message: str | None = None) -> None:
        """Say how far the job is, 0 to 100 (what lies outside is clipped). Best effort: the newest one wins."""
        number = float(percent)
        number = min(100.0, max(0.0, number)) if number == number else 0.0  # NaN is not equal to itself
        self._reporter.progress(number, None if message is None else str(message))

    def log(self, level: LogLevel, message: str, **meta: Any) -> None:
        """Write a line to the supervisor's log, with the job's id. `level`: debug, info, warn, error."""
        if level not in LOG_LEVELS:
            raise ValueError(f"log level {level!r}: it must be one of {', '.join(LOG_LEVELS)}")
        self._reporter.log(level, str(message), meta)

    def __repr__(self) -> str:
        return f"<JobContext {self.job_id} of {self.queue_name!r}, try {self.retry_count}>"
