"""Run a handler once in this process: quick, with its debugger, coverage and monkey patches. Nothing stops it."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Coroutine
from typing import Any

from spooled_supervisor.app import AbortSignal, App, JobContext, is_async
from spooled_supervisor.errors import JobAborted
from spooled_supervisor.job import MAX_RESULT_BYTES, clip_error
from spooled_supervisor.results import NotJson, encode_result
from spooled_supervisor.testing.values import HandlerRun, LogLine, ProgressReport, app_of, refuse_event_loop
from spooled_supervisor.wording import describe_error
from spooled_supervisor.worker import WorkerError

ASYNC = "what is async needs one of its own"


def run_handler(
    app_or_function: App | Callable[..., Any],
    payload: Any,
    *,
    queue_name: str | None = None,
    retry_count: int = 0,
    max_retries: int = 3,
    timeout_s: float = 300,
    job_id: str = "test-job",
    signal: AbortSignal | None = None,
) -> HandlerRun:
    """Call the handler with this payload, as a child would: JSON on both ways, the app's child hooks around it.

    `queue_name` says which handler of an app, if it has several. `timeout_s` is only what `ctx.timeout_s` says. An
    `AbortSignal` of yours can be aborted before or meanwhile. Standard `logging` and output go where they always go.
    KeyboardInterrupt and what a hook raises are passed on. Raises WorkerError where an event loop runs and the handler
    or a hook is async.
    """
    app, handler = app_of(app_or_function, queue_name, "signal")
    called: list[Callable[..., Any]] = [handler.function, *app.child_start_hooks, *app.child_stop_hooks]
    if any(map(is_async, called)):
        refuse_event_loop("run_handler", ASYNC)
    reporter = _Recorder()
    context = JobContext(
        job_id=job_id,
        queue_name=handler.queue_name,
        payload=json.loads(encode_result(payload)),
        retry_count=retry_count,
        max_retries=max_retries,
        timeout_s=timeout_s,
        signal=signal or AbortSignal(),
        reporter=reporter,
    )
    with _Caller() as caller:
        for hook in app.child_start_hooks:
            caller.call(hook)
        try:
            outcome = _succeeded(caller.call_handler(handler.function, context))
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            outcome = _failed(error)
        for hook in app.child_stop_hooks:
            caller.call(hook)
    context.signal.close()
    return HandlerRun(*outcome, logs=tuple(reporter.logs), progress=tuple(reporter.reports))


Ending = tuple[str, Any, str | None, bool]
"""outcome, result, error, retryable"""


def _succeeded(value: Any) -> Ending:
    try:
        result = encode_result(value)
    except NotJson as problem:
        if inspect.iscoroutine(value):
            value.close()  # it was never awaited, and nobody will
        return "failed", None, clip_error(f"the result is not JSON: {problem}"), True
    if len(result) > MAX_RESULT_BYTES:
        return "failed", None, f"the result is too large: {len(result)} bytes, {MAX_RESULT_BYTES} are allowed", True
    return "succeeded", json.loads(result), None, True


def _failed(error: BaseException) -> Ending:
    if isinstance(error, JobAborted):
        text = "aborted by worker shutdown" if error.reason == "shutdown" else f"aborted: {error.reason}"
        return "aborted", None, clip_error(text), True
    return "failed", None, clip_error(describe_error(error)), getattr(error, "retryable", True) is not False


class _Recorder:
    """`app.Reporter` of a test."""

    def __init__(self) -> None:
        self.logs: list[LogLine] = []
        self.reports: list[ProgressReport] = []

    def progress(self, percent: float, message: str | None) -> None:
        self.reports.append(ProgressReport(percent, message))

    def log(self, level: str, message: str, meta: dict[str, Any]) -> None:
        self.logs.append(LogLine(level, message, meta, "log"))


class _Caller:
    """Calls what may be async, all of it in one event loop, which is made only if there is something async."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def __enter__(self) -> _Caller:
        return self

    def __exit__(self, *_: object) -> None:
        if self._runner is not None:
            self._runner.close()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        result = function(*arguments)
        return self._run(result) if inspect.iscoroutine(result) else result

    def call_handler(self, function: Callable[..., Any], context: JobContext) -> Any:
        """As a child does: only what is declared as async is awaited."""
        result = function(context)
        return self._run(result) if is_async(function) else result

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        try:
            refuse_event_loop("run_handler", ASYNC)  # a hook that did not look async
        except WorkerError:
            coroutine.close()
            raise
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(coroutine)
