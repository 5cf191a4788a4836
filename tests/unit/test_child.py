"""What runs in a child, without the process: frames through real pipes, signals by calling their handlers.

Becoming a child (session, streams, priority, adoption by a real supervisor) is left to tests with processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spooled_supervisor import child as child_module
from spooled_supervisor import frames, kernel, rates, timing, wording
from spooled_supervisor.app import AbortSignal, App, JobContext
from spooled_supervisor.child import (
    ABORT_SIGNAL,
    EXIT_BOOT_FAILED,
    EXIT_LEFT,
    EXIT_SUPERVISOR_GONE,
    Child,
)
from spooled_supervisor.errors import JobAborted, NonRetryableError
from spooled_supervisor.job import MAX_ERROR_CHARS, MAX_RESULT_BYTES
from spooled_supervisor.wording import clip_text, describe_error, safe_text


class Supervisor:
    """The other ends of a child's pipes."""

    def __init__(self, app: App) -> None:
        jobs_fd, self.jobs_fd = os.pipe()
        self.reports_fd, reports_fd = os.pipe()
        os.set_blocking(self.reports_fd, False)
        settings = frames.Preload(
            generation=2,
            app="",
            queue_names=[],
            strict=False,
            child_nice=0,
            kills_leftovers=True,
            pins_cpus=False,
            log_level="info",
        )
        self.child = Child(app, settings)  # it stays a part of this process: `live` is not called
        self.child._take_pipes(3, jobs_fd, reports_fd, os.memfd_create("stack"))
        nothing_left: Any = SimpleNamespace(
            take=lambda **_: None, clear_leftovers=lambda: SimpleNamespace(names=()), restore=lambda: None
        )  # tidying up this process is not wanted
        os.close(self.child._baseline._home_fd)
        self.child._baseline = nothing_left
        self._decoder = frames.decoder_of_child()
        self._next_run = 1

    def tell(self, *messages: frames.ToChild) -> None:
        os.write(self.jobs_fd, b"".join(map(frames.encode_frame, messages)))

    def heard(self) -> list[frames.FromChild]:
        """All that the child has said since this was asked last."""
        try:
            data = os.read(self.reports_fd, 1 << 22)
        except BlockingIOError:
            return []
        found = list(self._decoder.feed(data))
        assert self._decoder.pending == 0, "half a frame"
        return found

    def run(self, payload: bytes = b"{}", *, queue_name: str = "q", also: tuple[frames.ToChild, ...] = ()) -> Any:
        """Give a job (and what else is in the pipe by then) and let the child run it; its answer."""
        given_at = timing.now()
        self.tell(frames.RunJob(self._next_run, "job-1", queue_name, payload, 1, 3, 60.0), *also)
        self._next_run += 1
        job = self.child._next_job()
        assert job is not None
        self.child._run_job(job)
        started, *self.said, answer = self.heard()
        assert isinstance(started, frames.Started)
        assert started.run == job.run
        assert given_at <= started.at <= timing.now()
        assert isinstance(answer, frames.Answer)
        assert answer.run == job.run
        return answer

    @property
    def run_number(self) -> int:
        return self._next_run - 1

    def abort(self, reason: str = "timeout", *, at: FrameType | None = None) -> None:
        """Tell the running job to stop, the signal arriving in the frame `at` (None: the caller's)."""
        self.tell(frames.Abort(self.run_number, reason))
        self.child._on_abort_signal(ABORT_SIGNAL, at or sys._getframe(1))

    def close(self) -> None:
        child = self.child
        if child._loop is not None:
            child._loop._runner.close()
        child._signal.close()
        of_child = (child._jobs_fd, child._reports_fd, child._stack_fd, child._wake_fd, child._null)
        for fd in (self.jobs_fd, self.reports_fd, *of_child):
            with contextlib.suppress(OSError):  # the test has closed it
                os.close(fd)


Make = Callable[..., Supervisor]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make children; for one with a single handler, give the function."""
    monkeypatch.setattr(kernel, "set_title", lambda title: None)
    made: list[Supervisor] = []

    def make(
        handler: Callable[[JobContext], Any] | None = None, *, app: App | None = None, **options: Any
    ) -> Supervisor:
        app = app or App()
        if handler is not None:
            app.handler("q", **options)(handler)
        made.append(Supervisor(app))
        return made[-1]

    yield make
    for supervisor in made:
        supervisor.close()


# --- one job ----------------------------------------------------------------------------------------------------------


def test_a_handler_gets_its_job_and_its_result_is_the_answer(make: Make) -> None:
    seen: list[JobContext] = []

    def handler(ctx: JobContext) -> Any:
        seen.append(ctx)
        return {"n": ctx.payload["n"] + 1}

    answer = make(handler).run(b'{"n": 41}')
    assert (answer.result, answer.error, answer.leaving) == (b'{"n":42}', None, None)
    assert answer.cpu_s >= 0.0
    (ctx,) = seen
    assert (ctx.job_id, ctx.queue_name, ctx.retry_count, ctx.max_retries, ctx.timeout_s) == ("job-1", "q", 1, 3, 60.0)


def test_one_child_runs_many_jobs(make: Make) -> None:
    supervisor = make(lambda ctx: ctx.payload)
    assert [supervisor.run(str(n).encode()).result for n in range(20)] == [str(n).encode() for n in range(20)]


def test_a_queue_without_a_handler_is_a_failure_that_may_be_retried(make: Make) -> None:
    answer = make(lambda ctx: None).run(queue_name="other")
    assert answer.error == "this app has no handler for queue 'other'"
    assert answer.retryable


@pytest.mark.parametrize("payload", [b"", b"{", b"\xff", b"[" * 100_000])
def test_a_payload_that_is_no_json_fails_for_good(make: Make, payload: bytes) -> None:
    answer = make(lambda ctx: None).run(payload[:30_000])
    assert answer.error.startswith("the payload cannot be decoded: ")
    assert not answer.retryable


def test_a_result_that_is_no_json_is_a_failure_with_its_path(make: Make) -> None:
    answer = make(lambda ctx: {"pages": [set()]}).run()
    assert answer.error == "the result is not JSON: result.pages[0] is of type set"
    assert answer.result is None


def test_a_result_may_be_as_large_as_the_service_takes_and_no_larger(make: Make) -> None:
    supervisor = make(lambda ctx: "x" * ctx.payload)
    answer = supervisor.child._success(1, "x" * (MAX_RESULT_BYTES - 2))
    assert answer.result is not None
    assert len(answer.result) == MAX_RESULT_BYTES
    assert supervisor.run(str(MAX_RESULT_BYTES - 1).encode()).error == (
        f"the result is too large: {MAX_RESULT_BYTES + 1} bytes, {MAX_RESULT_BYTES} are allowed"
    )


def test_a_sync_handler_that_returns_a_coroutine_is_told_so(make: Make) -> None:
    async def inner() -> None: ...

    assert make(lambda ctx: inner()).run().error == "the result is not JSON: result is of type coroutine"


class Failing:
    """A handler that raises what it was made with."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, ctx: JobContext) -> None:
        raise self.error


class Hopeless(Exception):
    @property
    def retryable(self) -> bool:
        raise RuntimeError("nobody knows")


class Stubborn(Exception):
    retryable = 0  # not False: only that very value counts


@pytest.mark.parametrize(
    ("error", "retryable"),
    [
        (ValueError("x"), True),
        (NonRetryableError("x"), False),
        (Hopeless("x"), True),
        (Stubborn("x"), True),
        (SystemExit(3), True),
        (KeyboardInterrupt(), True),
        (GeneratorExit(), True),
        (asyncio.CancelledError(), True),
        (RecursionError("x"), True),
        (MemoryError(), True),
        (BaseExceptionGroup("many", [ValueError("a"), KeyboardInterrupt()]), True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_whatever_a_handler_raises_is_a_failure_and_the_child_lives_on(
    make: Make, error: BaseException, retryable: bool
) -> None:
    supervisor = make(Failing(error))
    answer = supervisor.run()
    assert answer.result is None
    assert type(error).__name__ in answer.error
    assert answer.retryable is retryable
    assert answer.aborted is None
    assert type(error).__name__ in supervisor.run().error


def test_the_error_names_the_handlers_own_frames(make: Make) -> None:
    def inner() -> None:
        raise ValueError("bad page")

    def handler(ctx: JobContext) -> None:
        inner()

    error = make(handler).run().error
    assert error.startswith("ValueError: bad page\n  at ")
    assert error.endswith("in inner")
    assert " in handler" in error
    assert "spooled_supervisor/child.py" not in error


@pytest.mark.parametrize("reason", ["because", "x" * 100_000, "\udc80", None, 7, "\x00"])
def test_a_handler_may_raise_an_abort_by_itself_with_any_reason(make: Make, reason: Any) -> None:
    answer = make(Failing(JobAborted(reason))).run()
    assert answer.error.startswith("aborted: ")
    assert len(answer.error) <= MAX_ERROR_CHARS
    assert answer.aborted == str(reason).encode("utf-8", "backslashreplace").decode()[:32]


# --- aborts -----------------------------------------------------------------------------------------------------------


def test_an_abort_sets_the_flag_and_the_handler_may_go_on(make: Make) -> None:
    def handler(ctx: JobContext) -> Any:
        supervisor.abort("shutdown")
        return [ctx.signal.aborted, ctx.signal.reason]

    supervisor = make(handler)
    answer = supervisor.run()
    assert (answer.result, answer.leaving) == (b'[true,"shutdown"]', None)
    assert supervisor.run().result == b'[true,"shutdown"]'


def test_an_abort_of_another_run_is_dropped(make: Make) -> None:
    def handler(ctx: JobContext) -> Any:
        supervisor.tell(frames.Abort(supervisor.run_number - 1, "timeout"))
        supervisor.child._on_abort_signal(ABORT_SIGNAL, sys._getframe())
        return ctx.signal.aborted

    supervisor = make(handler, on_abort="raise")
    assert supervisor.run().result == b"false"


def test_an_abort_signal_without_a_frame_changes_nothing(make: Make) -> None:
    def handler(ctx: JobContext) -> Any:
        supervisor.child._on_abort_signal(ABORT_SIGNAL, sys._getframe())
        return ctx.signal.aborted

    supervisor = make(handler, on_abort="raise")
    assert supervisor.run().result == b"false"


@pytest.mark.parametrize(
    ("reason", "text"), [("shutdown", "aborted by worker shutdown"), ("timeout", "aborted: timeout")]
)
def test_an_abort_is_raised_inside_a_handler_that_asked_for_it_and_its_child_is_replaced(
    make: Make, reason: str, text: str
) -> None:
    def work(n: int) -> None:
        supervisor.abort(reason)

    def handler(ctx: JobContext) -> None:
        try:
            list(map(work, [1]))
        except Exception:
            pytest.fail("an abort is no Exception")

    supervisor = make(handler, on_abort="raise")
    answer = supervisor.run()
    assert (answer.error, answer.aborted, answer.leaving) == (text, reason, "aborted")


def test_an_abort_is_raised_once(make: Make) -> None:
    def handler(ctx: JobContext) -> Any:
        try:
            supervisor.abort("timeout")
        except JobAborted:
            supervisor.abort("shutdown")
            ctx.progress(50)
        return "cleaned up"

    supervisor = make(handler, on_abort="raise")
    answer = supervisor.run()
    assert (answer.result, answer.leaving) == (b'"cleaned up"', "aborted")


class Interrupts:
    """Text that is interrupted by the abort while it is made, inside a call of the handler into us."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor

    def __str__(self) -> str:
        self.supervisor.abort("timeout")
        return "interrupted"


@pytest.mark.parametrize("call", ["log", "progress", "meta"])
def test_an_abort_inside_a_call_into_us_is_raised_when_the_call_is_over(make: Make, call: str) -> None:
    def handler(ctx: JobContext) -> None:
        text: Any = Interrupts(supervisor)
        if call == "log":
            ctx.log("info", text)
        elif call == "progress":
            ctx.progress(50, text)
        else:
            ctx.log("info", "with meta", thing=text)
        pytest.fail("not raised")

    supervisor = make(handler, on_abort="raise")
    answer = supervisor.run()
    assert (answer.aborted, answer.leaving) == ("timeout", "aborted")
    assert len(supervisor.said) == 1, "the message was sent, whole, before that"


def test_an_abort_inside_a_call_from_another_thread_is_not_raised_there(make: Make) -> None:
    def handler(ctx: JobContext) -> Any:
        supervisor.child.raise_later = True
        errors: list[BaseException] = []

        def report() -> None:
            try:
                ctx.progress(1)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=report)
        thread.start()
        thread.join()
        supervisor.child.raise_later = False
        return len(errors)

    supervisor = make(handler, on_abort="raise")
    assert supervisor.run().result == b"0"


@pytest.mark.parametrize("how", ["in the pipe with the job", "signal before the run is known"])
@pytest.mark.parametrize("on_abort", ["signal", "raise"])
def test_an_abort_that_comes_before_the_handler_is_not_lost(make: Make, how: str, on_abort: str) -> None:
    supervisor = make(lambda ctx: ctx.signal.reason, on_abort=on_abort)
    supervisor.child._abort_waits = how != "in the pipe with the job"
    answer = supervisor.run(also=(frames.Abort(1, "timeout"),))
    if on_abort == "signal":
        assert answer.result == b'"timeout"'
    else:
        assert (answer.aborted, answer.leaving) == ("timeout", "aborted")
    assert supervisor.run().aborted is None


def test_an_abort_after_the_handler_has_returned_costs_no_result(make: Make) -> None:
    class Result(dict[str, Any]):
        def items(self) -> Any:
            supervisor.abort("timeout")
            return super().items()

    supervisor = make(lambda ctx: Result(a=1), on_abort="raise")
    assert supervisor.run().result == b'{"a":1}'
    assert supervisor.run().result == b'{"a":1}'


def test_a_real_signal_interrupts_the_handler(make: Make) -> None:
    def handler(ctx: JobContext) -> None:
        supervisor.tell(frames.Abort(1, "operator"))
        signal.raise_signal(ABORT_SIGNAL)
        pytest.fail("not raised")

    supervisor = make(handler, on_abort="raise")
    before = signal.signal(ABORT_SIGNAL, supervisor.child._on_abort_signal)
    try:
        assert supervisor.run().aborted == "operator"
    finally:
        signal.signal(ABORT_SIGNAL, before)


# --- where an abort may be raised -------------------------------------------------------------------------------------


def test_only_the_handlers_own_call_counts_as_inside(make: Make) -> None:
    def look(*_: object) -> bool:
        return child_module._is_inside_handler(sys._getframe())

    class Asks:
        def __str__(self) -> str:
            found.append(look())
            return ""

    found: list[bool] = []

    def handler(ctx: JobContext) -> None:
        found.append(look())
        found.extend(map(look, [1]))
        found.append(json.loads("{}", object_hook=look))  # library code that the handler called
        text: Any = Asks()
        ctx.log("info", text)  # ours: a frame may be half written
        found.append(look())

    assert not look()
    assert not child_module._is_inside_handler(None)
    make(handler).run()
    assert found == [True, True, True, False, True]


# --- async handlers ---------------------------------------------------------------------------------------------------


def test_async_handlers_share_one_loop(make: Make) -> None:
    loops: set[int] = set()

    async def handler(ctx: JobContext) -> Any:
        loops.add(id(asyncio.get_running_loop()))
        await asyncio.sleep(0)
        return ctx.payload

    supervisor = make(handler)
    assert [supervisor.run(b"1").result, supervisor.run(b"2").result] == [b"1", b"2"]
    assert len(loops) == 1


def test_an_object_whose_call_is_async_is_an_async_handler(make: Make) -> None:
    class Handler:
        async def __call__(self, ctx: JobContext) -> str:
            return "async"

    assert make(Handler()).run().result == b'"async"'


def test_an_abort_cancels_an_async_handler_that_asked_for_it(make: Make) -> None:
    async def handler(ctx: JobContext) -> None:
        supervisor.abort("timeout")
        await asyncio.sleep(60)

    supervisor = make(handler, on_abort="raise")
    answer = supervisor.run()
    assert (answer.error, answer.aborted) == ("aborted: timeout", "timeout")


def test_an_abort_only_sets_the_flag_of_another_async_handler(make: Make) -> None:
    async def handler(ctx: JobContext) -> Any:
        supervisor.abort("timeout")
        await asyncio.sleep(0)
        return ctx.signal.reason

    supervisor = make(handler)
    assert supervisor.run().result == b'"timeout"'


def test_an_abort_that_comes_before_an_async_handler_is_raised_at_once(make: Make) -> None:
    ran: list[int] = []

    async def handler(ctx: JobContext) -> None:
        ran.append(1)

    supervisor = make(handler, on_abort="raise")
    assert supervisor.run(also=(frames.Abort(1, "shutdown"),)).aborted == "shutdown"
    assert ran == []


def test_a_cancellation_of_its_own_is_a_failure(make: Make) -> None:
    async def handler(ctx: JobContext) -> None:
        raise asyncio.CancelledError

    answer = make(handler).run()
    assert answer.aborted is None
    assert "CancelledError" in answer.error


def test_tasks_that_a_job_leaves_behind_are_cancelled(make: Make) -> None:
    ended: list[str] = []

    async def background() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("cancelled")

    async def handler(ctx: JobContext) -> None:
        tasks.append(asyncio.ensure_future(background()))
        await asyncio.sleep(0)

    tasks: list[asyncio.Future[None]] = []
    make(handler).run()
    assert ended == ["cancelled"]


# --- what a handler says ----------------------------------------------------------------------------------------------


def test_progress_and_log_lines_carry_the_run(make: Make) -> None:
    def handler(ctx: JobContext) -> None:
        ctx.progress(12.5, "page 1")
        ctx.log("warn", "slow", seconds=3, who={"a": object}, nan=float("nan"))
        ctx.log("info", "plain")

    supervisor = make(handler)
    supervisor.run()
    progress, warning, plain = supervisor.said
    assert progress == frames.Progress(1, 12.5, "page 1")
    assert isinstance(warning, frames.Log)
    assert (warning.run, warning.severity, warning.message, warning.source) == (1, "warn", "slow", "log")
    assert json.loads(warning.meta or "")["seconds"] == 3
    assert plain == frames.Log(1, "info", "plain", None, "log")


@pytest.mark.parametrize("text", ["x" * 1_000_000, "\udc80" * 100_000, "\U0001f600" * 100_000, "a\x00b"])
def test_a_text_of_any_size_and_kind_fits_into_a_frame(make: Make, text: str) -> None:
    def handler(ctx: JobContext) -> str:
        ctx.progress(1, text)
        ctx.log("info", text, text=text)
        return "fine"

    assert make(handler).run().result == b'"fine"'


def test_lines_beyond_the_rate_are_counted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "LINES_PER_S", 0)

    def handler(ctx: JobContext) -> None:
        rate = supervisor.child._log_rate = rates.LineRate()
        rate._left = 2.0
        for n in range(5):
            ctx.log("info", str(n))
        rate._left = 1.0
        ctx.log("info", "again")

    supervisor = make(handler)
    supervisor.run()
    assert [getattr(message, "message", message) for message in supervisor.said] == [
        "0",
        "1",
        frames.LogsDropped(1, 3),
        "again",
    ]


def test_standard_logging_reaches_the_supervisor_with_its_severity(make: Make) -> None:
    supervisor = make()
    handler = child_module._LogHandler()
    handler.child = supervisor.child
    for level in (5, logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL, 77):
        handler.handle(logging.LogRecord("app", level, "app.py", 1, "n=%d", (level,), None))
    heard = [(m.severity, m.message, m.source) for m in supervisor.heard() if isinstance(m, frames.Log)]
    assert [severity for severity, _, _ in heard] == ["debug", "debug", "info", "warn", "error", "error", "error"]
    assert heard[0] == ("debug", "n=5", "logging")


def test_a_log_record_that_cannot_be_formatted_is_dropped(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    supervisor = make()
    handler = child_module._LogHandler()
    handler.child = supervisor.child
    handler.handle(logging.LogRecord("app", 20, "app.py", 1, "%d", ("x",), None))
    assert supervisor.heard() == []


# --- send -------------------------------------------------------------------------------------------------------------

SENDING: tuple[CodeType, ...] = (Child.send.__code__, Child._write_all.__code__)


def send_interrupted(child: Child, message: frames.FromChild, *interruptions: tuple[int, frames.FromChild]) -> bool:
    """Send `message`, and each interruption just before so many bytecodes of it; whether there were that many."""
    wanted, count = dict(interruptions), 0

    def step(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal count
        if event == "opcode":
            if (other := wanted.pop(count, None)) is not None:
                child.send(other)  # what a signal handler does
            count += 1
        return step

    def enter(frame: FrameType, _event: str, _arg: object) -> Any:
        if frame.f_code not in SENDING:
            return None
        frame.f_trace = step  # first, as Python 3.13 does nothing for a frame without it
        frame.f_trace_opcodes = True
        return step

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 does nothing if no frame asks before `settrace`
    sys.settrace(enter)
    try:
        child.send(message)
    finally:
        sys.settrace(before)
    return not wanted


def test_an_interruption_between_any_two_bytecodes_of_send_breaks_no_frame_and_loses_none(make: Make) -> None:
    supervisor = make()
    a, b = frames.Started(1, 0.5), frames.Progress(1, 50.0, "interrupting")
    at = 0
    while send_interrupted(supervisor.child, a, (at, b)):
        assert sorted(map(repr, supervisor.heard())) == sorted(map(repr, [a, b])), f"interrupted at bytecode {at}"
        at += 1
    assert at > 50
    assert not supervisor.child._unsent


def test_a_signal_handler_of_the_jobs_that_raises_inside_a_send_does_not_mute_the_child(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = make()

    def interrupted(_data: bytes) -> None:
        raise TimeoutError("its alarm")

    with monkeypatch.context() as patched:
        patched.setattr(supervisor.child, "_write_all", interrupted)
        with pytest.raises(TimeoutError):
            supervisor.child.send(frames.Progress(1, 50.0, "lost"))
    supervisor.child.send(frames.Progress(1, 60.0, "b"))
    assert supervisor.heard() == [frames.Progress(1, 60.0, "b")]


def test_a_signal_handler_of_the_jobs_that_raises_while_an_abort_is_read_does_not_make_the_child_deaf(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = make()
    child = supervisor.child
    child._run, child._signal = 7, AbortSignal()
    supervisor.tell(frames.Abort(7, "timeout"))

    def interrupted() -> bool:
        raise TimeoutError("its alarm")

    with monkeypatch.context() as patched:
        patched.setattr(child, "_read_pipe", interrupted)
        with pytest.raises(TimeoutError):
            child._take_aborts()
    child._take_aborts()
    assert child._signal.reason == "timeout"


def test_two_interruptions_of_one_send_break_no_frame_and_lose_none(make: Make) -> None:
    supervisor = make()
    a, b, c = frames.Started(1, 0.5), frames.Progress(1, 50.0, "b"), frames.Progress(1, 60.0, "c")
    done = 0
    for first in range(0, 120, 3):
        for second in range(first + 1, 200, 11):
            is_done = send_interrupted(supervisor.child, a, (first, b), (second, c))
            heard = supervisor.heard()
            if is_done:
                assert sorted(map(repr, heard)) == sorted(map(repr, [a, b, c])), (first, second)
                done += 1
    assert done > 50
    assert not supervisor.child._unsent


def test_frames_of_several_threads_are_not_mixed(make: Make) -> None:
    supervisor = make()

    def say(run: int) -> None:
        for percent in range(50):
            supervisor.child.send(frames.Progress(run, float(percent), "x" * 50))

    threads = [threading.Thread(target=say, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    heard = [m for m in supervisor.heard() if isinstance(m, frames.Progress)]
    for n in range(4):
        assert [m.percent for m in heard if m.run == n] == [float(i) for i in range(50)]


class Exited(BaseException):
    """Stands for `os._exit`, which does not return either."""


def test_a_child_whose_supervisor_is_gone_leaves_when_it_speaks(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(status: int) -> None:
        raise Exited(status)

    supervisor = make()
    os.close(supervisor.reports_fd)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(Exited) as caught:
        supervisor.child.send(frames.Started(1, 0.5))
    assert caught.value.args == (EXIT_SUPERVISOR_GONE,)


# --- from birth to exit -----------------------------------------------------------------------------------------------


@pytest.fixture
def armed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Which parent death signals were asked for; none is set."""
    numbers: list[int] = []
    monkeypatch.setattr(kernel, "set_parent_death_signal", numbers.append)
    return numbers


def test_a_child_is_adopted_by_its_first_frame_and_arms_its_death_only_then(make: Make, armed: list[int]) -> None:
    supervisor = make()
    supervisor.tell(frames.Adopted(os.getppid()))
    assert supervisor.child._be_adopted()
    assert armed == [signal.SIGKILL]


def test_a_child_joins_its_cgroup_before_its_hooks(make: Make, armed: list[int], tmp_path: Path) -> None:
    app, procs = App(), tmp_path / "cgroup.procs"
    procs.touch()
    seen: list[str] = []
    app.on_child_start(lambda: seen.append(procs.read_text()))
    supervisor = make(app=app)
    supervisor.tell(frames.Adopted(os.getppid(), os.fsencode(tmp_path)), frames.Leave())
    assert supervisor.child._serve() == EXIT_LEFT
    assert seen == ["0"], "itself, whoever it is"
    assert supervisor.heard()[0] == frames.Hello(3, 2, os.getpid())


def test_a_child_that_cannot_join_its_cgroup_says_so_and_goes_on(make: Make, armed: list[int], tmp_path: Path) -> None:
    supervisor = make()
    supervisor.tell(frames.Adopted(os.getppid(), os.fsencode(tmp_path) + b"/\xff"), frames.Leave())
    assert supervisor.child._serve() == EXIT_LEFT
    assert supervisor.heard()[0] == frames.Hello(3, 2, os.getpid(), "No such file or directory")


def test_a_child_whose_supervisor_died_before_it_was_armed_leaves(make: Make, armed: list[int]) -> None:
    supervisor = make()
    supervisor.tell(frames.Adopted(os.getppid() + 1))
    assert supervisor.child._serve() == EXIT_SUPERVISOR_GONE
    assert supervisor.heard() == []


@pytest.mark.parametrize("first", [frames.Leave(), frames.Abort(1, "x"), None])
def test_neither_another_frame_nor_the_end_of_the_pipe_is_an_adoption(
    make: Make, armed: list[int], first: frames.ToChild | None
) -> None:
    supervisor = make()
    if first is not None:
        supervisor.tell(first)
    os.close(supervisor.jobs_fd)
    assert supervisor.child._serve() == EXIT_SUPERVISOR_GONE
    assert armed == []


def test_a_life_without_jobs(make: Make, armed: list[int]) -> None:
    app, hooks = App(), list[str]()

    @app.on_child_start
    async def connect() -> None:
        await asyncio.sleep(0)
        hooks.append("started")

    @app.on_child_stop
    def disconnect() -> None:
        hooks.append("stopped")

    supervisor = make(app=app)
    supervisor.tell(frames.Adopted(os.getppid()), frames.Leave())
    assert supervisor.child._serve() == EXIT_LEFT
    assert supervisor.heard() == [frames.Hello(3, 2, os.getpid()), frames.Leaving()]
    assert hooks == ["started", "stopped"]


@pytest.mark.parametrize("text", ["no database", "\udc80", "x" * 1_000_000])
def test_a_start_hook_that_raises_is_told_and_the_child_leaves(make: Make, armed: list[int], text: str) -> None:
    app = App()

    @app.on_child_start
    def connect() -> None:
        raise ConnectionError(text)

    supervisor = make(app=app)
    supervisor.tell(frames.Adopted(os.getppid()))
    assert supervisor.child._serve() == EXIT_BOOT_FAILED
    (failed,) = supervisor.heard()
    assert isinstance(failed, frames.BootFailed)
    assert failed.error.startswith("on_child_start failed: ConnectionError: ")


def test_a_child_leaves_after_its_job_when_it_was_terminated(make: Make) -> None:
    def handler(ctx: JobContext) -> str:
        supervisor.child._on_terminate(signal.SIGTERM, None)
        return "finished"

    supervisor = make(handler)
    answer = supervisor.run()
    assert (answer.result, answer.leaving) == (b'"finished"', "terminated")
    assert supervisor.child._next_job() is None


@pytest.mark.parametrize("how", ["leave", "terminated", "end of the pipe"])
def test_an_idle_child_leaves_when_it_is_told_to(make: Make, how: str) -> None:
    supervisor = make()
    if how == "leave":
        supervisor.tell(frames.Abort(7, "a run that is over"), frames.Leave())
    elif how == "terminated":
        supervisor.child._on_terminate(signal.SIGTERM, None)
    else:
        os.close(supervisor.jobs_fd)
    assert supervisor.child._next_job() is None


# --- words ------------------------------------------------------------------------------------------------------------


def an_error(text_of: Callable[[], Any]) -> Exception:
    class Odd(Exception):
        def __str__(self) -> Any:
            return text_of()

    return Odd()


def raising(error: BaseException) -> Callable[[], Any]:
    def text() -> Any:
        raise error

    return text


@pytest.mark.parametrize(
    "text_of",
    [
        raising(ValueError("x")),
        raising(SystemExit(1)),
        raising(KeyboardInterrupt()),
        raising(JobAborted("timeout")),
        raising(RecursionError()),
        lambda: None,
        lambda: 7,
    ],
)
def test_an_exception_whose_text_cannot_be_made_is_described_by_its_type(text_of: Callable[[], Any]) -> None:
    assert describe_error(an_error(text_of)).endswith("Odd: <Odd whose text cannot be made>")
    assert safe_text(an_error(text_of)) == "<Odd whose text cannot be made>"


def test_builtin_exceptions_go_by_their_bare_name_and_others_by_their_module() -> None:
    assert describe_error(ValueError("bad")) == "ValueError: bad"
    assert describe_error(ValueError()) == "ValueError"
    assert describe_error(json.JSONDecodeError("x", "", 0)).startswith("json.decoder.JSONDecodeError: x")


def test_a_description_is_bounded_however_large_the_text_or_deep_the_stack_is() -> None:
    def deep(n: int) -> None:
        if not n:
            raise ValueError("y" * 10_000_000)
        deep(n - 1)

    with pytest.raises(ValueError, match="y") as caught:
        deep(300)
    text = describe_error(caught.value)
    assert len(text) < 4000
    assert text.count("\n  at ") == wording.FRAMES_SHOWN


def test_notes_are_part_of_a_description() -> None:
    error = ValueError("x")
    for n in range(5):
        error.add_note(f"note {n}" + "z" * 1000)
    text = describe_error(error)
    assert "note 2" in text
    assert "note 3" not in text
    assert len(text) < 1000
    error.__notes__ = 7  # type: ignore[assignment]
    assert describe_error(error)


@given(st.text(st.characters(), max_size=200), st.integers(1, 300))
def test_a_clipped_text_always_fits_into_a_frame(part: str, times: int) -> None:
    text = clip_text(part * times)
    assert len(text) <= frames.MAX_TEXT
    text.encode("utf-8")
    short = part.encode("utf-8", "replace").decode()
    assert clip_text(short) == short
