"""What a run of a handler gives, and what is the same for every way to run one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spooled_supervisor.app import App, Handler, OnAbort
from spooled_supervisor.worker import WorkerError


@dataclass(frozen=True, slots=True)
class LogLine:
    """`source`: log (`ctx.log`), logging (the standard library's), output (what was printed)."""

    level: str
    message: str
    meta: dict[str, Any]
    source: str


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """`percent` is 0 to 100."""

    percent: float
    message: str | None


@dataclass(frozen=True, slots=True)
class HandlerRun:
    """How a job ended. `outcome`: succeeded, failed, aborted; of a child also timed_out, crashed.

    `result` is what the service would store (None unless succeeded), `error` the text that it would be given.
    `retryable` False: the service would be asked not to try again.
    """

    outcome: str
    result: Any = None
    error: str | None = None
    retryable: bool = True
    logs: tuple[LogLine, ...] = ()
    progress: tuple[ProgressReport, ...] = ()


def app_of(target: App | Callable[..., Any], queue_name: str | None, on_abort: OnAbort) -> tuple[App, Handler]:
    """An app that has the handler, and the handler. Raises ValueError where there is a choice, or none."""
    if not isinstance(target, App):
        app = App()
        app.handler(queue_name or "test", on_abort=on_abort)(target)
        return app, app.handlers[queue_name or "test"]
    names = [queue_name] if queue_name is not None else list(target.handlers)
    if len(names) != 1 or names[0] not in target.handlers:
        raise ValueError(
            f"queue_name={queue_name!r}: the app has handlers for {', '.join(target.handlers) or 'no queue'}"
        )
    return target, target.handlers[names[0]]


def refuse_event_loop(function: str, why: str) -> None:
    """Raises WorkerError in a thread that runs an event loop: a second one cannot run there."""
    if asyncio._get_running_loop() is not None:
        raise WorkerError(f"here runs an event loop, and {why}: say `await asyncio.to_thread({function}, ...)`")
