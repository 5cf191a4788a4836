"""Run a handler once in a real child: by the fork server, pool and child of the daemon, without a service.

Whatever it does to its process happens to the child: it may crash, exit, leak and hang. Its limit is enforced as in the
daemon: told to stop, killed with all that it started, reported with its stack.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from spooled_supervisor import events as ev
from spooled_supervisor import hosting, timing
from spooled_supervisor.app import App, Handler, OnAbort
from spooled_supervisor.config import PoolConfig
from spooled_supervisor.copies import Copies
from spooled_supervisor.events import Events
from spooled_supervisor.family import Kin, kill_marked
from spooled_supervisor.forkclient import ForkServerKeeper, Spawn, child_environment, spawn_interpreter
from spooled_supervisor.frames import Preload
from spooled_supervisor.job import Crashed, Failed, Job, Outcome, Released, Succeeded, TimedOut, error_text
from spooled_supervisor.leases import Lease
from spooled_supervisor.pool import Pool
from spooled_supervisor.results import encode_result
from spooled_supervisor.testing.values import HandlerRun, LogLine, ProgressReport, app_of, refuse_event_loop
from spooled_supervisor.worker import WorkerError, importable_name


def run_in_child(
    app_or_function: App | Callable[..., Any],
    payload: Any,
    *,
    queue_name: str | None = None,
    retry_count: int = 0,
    max_retries: int = 3,
    timeout_s: float = 10.0,
    abort_grace_s: float = 1.0,
    on_abort: OnAbort = "signal",
    job_id: str = "test-job",
) -> HandlerRun:
    """Run the handler in a forked child, at most `timeout_s` and `abort_grace_s` seconds, and see its family dead.

    A test process with one thread is forked, and anything can be a handler. Where it has threads (a test runner's
    timer is one), a fresh interpreter imports the handler, or the app, by its name. `on_abort` is for a function; an
    app's handlers have their own. Raises WorkerError where neither is possible or an event loop runs, AppError if the
    import fails, and what a signal handler raises meanwhile (Ctrl-C, a test runner's time limit): the child is killed
    then.
    """
    refuse_event_loop("run_in_child", "it blocks")
    app, handler = app_of(app_or_function, queue_name, on_abort)
    job = Job(
        id=job_id,
        queue_name=handler.queue_name,
        lease_id="test-lease",
        payload=encode_result(payload),
        retry_count=retry_count,
        max_retries=max_retries,
        timeout_s=timeout_s,
        lease_duration_s=timeout_s + abort_grace_s + 3600.0,  # it outlives the run
        requested_at=timing.now(),
    )
    marker = f"test {os.getpid()} {secrets.token_hex(8)}"
    env = child_environment(os.environ, marker=marker, threads=1)
    kin = Kin(marker)
    main: asyncio.Task[HandlerRun] | None = None

    def break_off(_error: BaseException) -> None:
        if main is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                main.get_loop().call_soon_threadsafe(main.cancel)

    with hosting.handing_over(break_off) as raised, contextlib.ExitStack() as stack:
        stack.callback(kill_marked, marker)
        spec = "the app"
        spawn: Spawn = spawn_interpreter
        if hosting.has_one_thread():
            copies = Copies(app, env, 1)
            stack.callback(copies.close)
            spawn = copies.spawn
        else:
            spec = _name_of(app_or_function, handler)
        bench = _Bench(
            lambda generation: Preload(
                generation,
                spec,
                [handler.queue_name],
                False,
                0,
                True,
                False,
                "info",
                handler.on_abort,
                [os.path.abspath(entry) for entry in sys.path],
                kin.name,
            ),
            env,
            spawn,
            kin,
        )
        stack.enter_context(hosting.subreaper())
        loop = timing.new_event_loop()
        stack.callback(loop.close)
        main = loop.create_task(bench.run(job, timeout_s=timeout_s, abort_grace_s=abort_grace_s))
        if raised:  # before there was a task
            main.cancel()
        try:
            run = loop.run_until_complete(main)
        except BaseException:
            hosting.unwind(loop, main)
            if not raised:
                raise
    if raised:
        raise raised[0]
    return run


def _name_of(target: App | Callable[..., Any], handler: Handler) -> str:
    """`module:name` of a function, or of the variable that holds an app. Raises WorkerError.

    An app that no module holds is served by its handler alone, if it has no hooks that would be missed.
    """
    if not isinstance(target, App):
        return importable_name(handler.function)
    hooks = [*target.preload_hooks, *target.child_start_hooks, *target.child_stop_hooks]
    # The modules of its functions, and then the last one whose import began: a module of tests began before the app's.
    likely = [getattr(function, "__module__", None) for function in (handler.function, *hooks)]
    main = sys.modules["__main__"]
    for home in (*likely, *reversed(tuple(sys.modules))):
        module = sys.modules.get(home or "")
        if module is None or module is main:
            continue
        for name, value in tuple(getattr(module, "__dict__", {}).items()):
            if value is target:
                return f"{home}:{name}"
    if hooks:
        raise WorkerError(
            "the app cannot be run in a child: this process has threads and cannot be forked, and a fresh interpreter "
            "cannot import the app with its hooks, as it is no variable of a module (other than the main file). Put it "
            "at the top level of one"
        )
    return importable_name(handler.function)


class _Bench:
    """A pool with one child and no service."""

    def __init__(self, preload: Callable[[int], Preload], env: dict[str, str], spawn: Spawn, kin: Kin) -> None:
        self._preload = preload
        self._env = env
        self._spawn = spawn
        self._kin = kin
        self._events = Events()
        self._logs: list[LogLine] = []
        self._reports: list[ProgressReport] = []

    async def run(self, job: Job, *, timeout_s: float, abort_grace_s: float) -> HandlerRun:
        over: asyncio.Future[Outcome | None] = asyncio.get_running_loop().create_future()
        self._listen(over)
        keeper = ForkServerKeeper(
            self._preload, self._env, boot_timeout_s=60.0, events=self._events, on_ready=lambda: None, spawn=self._spawn
        )
        await keeper.start()
        try:
            async with asyncio.TaskGroup() as tasks:

                def spawn(coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
                    return tasks.create_task(coroutine, name=name)

                pool = Pool(
                    PoolConfig(procs=1, abort_grace_s=abort_grace_s, child_nice=0),
                    keeper,
                    events=self._events,
                    caps={},
                    on_over=lambda _run, outcome: self._over(over, outcome),
                    on_change=lambda: None,
                    spawn=spawn,
                    kin=self._kin,
                )
                try:
                    lease = Lease(job, 0.5, abort_grace_s)
                    lease.count_from(job.requested_at)
                    pool.submit(lease, timeout_s=timeout_s)
                    pool.turn()
                    outcome = await over
                finally:
                    await pool.close()
        finally:
            await keeper.close()
        return self._result(outcome)

    def _over(self, over: asyncio.Future[Outcome | None], outcome: Outcome | None) -> None:
        if not over.done():
            over.set_result(outcome)

    def _listen(self, over: asyncio.Future[Outcome | None]) -> None:
        subscribe, kin = self._events.subscribe, self._kin
        subscribe(lambda event: kin.born(event.pid), ev.ChildStarted, ev.ForkServerStarted)
        subscribe(lambda event: kin.died(event.pid), ev.ChildExited, ev.ForkServerExited)
        subscribe(self._on_log, ev.JobLogged)
        subscribe(lambda e: self._reports.append(ProgressReport(e.percent, e.message)), ev.JobProgressed)

        def on_no_child(event: ev.ChildFailedToBoot | ev.ForkFailed) -> None:
            output = event.output if isinstance(event, ev.ChildFailedToBoot) else ""
            self._over(over, Crashed(f"the child did not get ready: {event.cause}", output))

        subscribe(on_no_child, ev.ChildFailedToBoot, ev.ForkFailed)

    def _on_log(self, event: ev.JobLogged) -> None:
        meta: Any = None
        with contextlib.suppress(ValueError):  # cut, as it was too long
            meta = json.loads(event.meta or "{}")
        self._logs.append(LogLine(event.severity, event.message, meta or {}, event.source))

    def _result(self, outcome: Outcome | None) -> HandlerRun:
        logs, reports = tuple(self._logs), tuple(self._reports)
        match outcome:
            case Succeeded(result=result):
                return HandlerRun("succeeded", json.loads(result), None, True, logs, reports)
            case Failed(retryable=retryable):
                text = error_text(outcome)
                word = "aborted" if text.startswith("aborted") else "failed"
                return HandlerRun(word, None, text, retryable, logs, reports)
            case TimedOut():
                return HandlerRun("timed_out", None, error_text(outcome), True, logs, reports)
            case Crashed() | Released():
                return HandlerRun("crashed", None, error_text(outcome), True, logs, reports)
            case None:
                raise AssertionError("a run without an outcome")
