"""The library face without its processes: arguments, callbacks, events, names of handlers, what is put back."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from spooled_supervisor import SpooledClient, SpooledWorker, forkserver, hosting, kernel, run_workers, worker
from spooled_supervisor import events as ev
from spooled_supervisor import workerevents as we
from spooled_supervisor.childlink import Run
from spooled_supervisor.errors import ConfigError
from spooled_supervisor.events import Events
from spooled_supervisor.family import MARKER, Kin
from spooled_supervisor.forkclient import NoCopyLeft
from spooled_supervisor.job import Failed, Succeeded
from spooled_supervisor.processes import Stat, read_stat
from spooled_supervisor.telemetry.logs import StandardLog
from spooled_supervisor.telling import Callbacks, Teller
from spooled_supervisor.worker import WorkerError, importable_name
from tests.support.fakes import make_job, make_run


def make(**options: Any) -> SpooledWorker:
    return SpooledWorker(SpooledClient("sp_test_0123456789", "http://127.0.0.1:9"), **{"queue_name": "q", **options})


def top_level(ctx: Any) -> None: ...


class Callable_:
    def __call__(self, ctx: Any) -> None: ...

    def method(self, ctx: Any) -> None: ...

    @staticmethod
    def static(ctx: Any) -> None: ...


# --- arguments --------------------------------------------------------------------------------------------------------


def test_everything_that_is_wrong_is_told_at_once_by_the_name_of_its_argument() -> None:
    with pytest.raises(ConfigError) as caught:
        make(
            queue_name="two words",
            concurrency=0,
            poll_interval=0,
            lease_duration=1,
            heartbeat_fraction=1.5,
            worker_id="ä",
            version="",
            metadata={"": "x"},
            job_timeout=-1,
            child_nice=True,
        )
    names = {problem.split(":")[0] for problem in caught.value.problems}
    assert names == {
        "queue_name",
        "concurrency",
        "poll_interval",
        "lease_duration",
        "heartbeat_fraction",
        "worker_id",
        "version",
        "metadata",
        "job_timeout",
        "child_nice",
    }


@pytest.mark.parametrize("metadata", [{"a=b": "c"}, {"a": None}, {"a": 1}, {1: "a"}])
def test_metadata_that_the_daemon_could_not_be_given_is_refused(metadata: dict[Any, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        make(metadata=metadata)
    assert caught.value.problems == [f"metadata: {metadata!r} must be K=V"]
    make(metadata={"a": "b=c"})


def test_auto_is_no_number_of_children() -> None:
    with pytest.raises(ConfigError) as caught:
        make(concurrency="auto", child_nice=True)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["procs", "child_nice"]


def test_nothing_is_taken_from_the_environment_but_the_clients_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("SPOOLED_PROCS", "77")
    monkeypatch.setenv("STATE_DIRECTORY", "/nowhere")
    config = make(concurrency=3, version="my/1", metadata={"env": "test"})._configuration(tmp_path)
    assert config.pool.procs == 3
    assert config.state_dir == tmp_path
    assert config.http_listen is None
    assert config.worker.version == "my/1"
    assert config.worker.metadata == {"env": "test"}
    assert config.api.key.reveal() == "sp_test_0123456789"


def test_a_new_worker_is_idle_and_shows_no_key() -> None:
    new = make()
    assert (new.state, new.worker_id, new.active_job_count, new.error) == ("idle", None, 0, None)
    assert repr(new) == "<SpooledWorker of 'q', idle>"
    assert "sp_test" not in repr(vars(new))
    assert new.join(0)


# --- handlers ---------------------------------------------------------------------------------------------------------


def test_process_gives_back_what_it_was_given() -> None:
    first, second, third = make(), make(), make()
    assert first.process(top_level) is top_level
    assert second.process(on_abort="raise")(top_level) is top_level
    assert second._app.handlers["q"].on_abort == "raise"
    with pytest.raises(ValueError, match="has a handler already"):
        first.process(top_level)
    with pytest.raises(TypeError):
        third.process(7)  # type: ignore[call-overload] # that is the point


def test_a_worker_without_a_handler_does_not_start() -> None:
    new = make()
    errors: list[we.WorkerErrored] = []
    new.on("error", errors.append)
    with pytest.raises(WorkerError, match="has no handler: give it one with process"):
        new.start()
    assert new.state == "error"
    assert isinstance(new.error, WorkerError)
    assert [type(event.error) for event in errors] == [WorkerError]


def test_no_worker_starts_in_a_child_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "is_fork_server", True)
    new = SpooledWorker(SpooledClient(), "q", auto_start=True)  # importing the module that makes it is fine
    new.process(top_level)
    assert new.state == "idle"
    with pytest.raises(WorkerError, match="no worker can be started in a child"):
        new.start()


def test_functions_of_modules_are_found_by_name() -> None:
    assert importable_name(top_level) == f"{__name__}:top_level"
    assert importable_name(Callable_.static) == f"{__name__}:Callable_.static"


@pytest.mark.parametrize(
    ("handler", "why"),
    [
        (lambda ctx: None, "it is a lambda"),
        (Callable_(), "it is an object without a name"),
        (Callable_().method, "is something else"),
        (functools.partial(top_level), "it is an object without a name"),
    ],
)
def test_others_are_refused_with_the_reason_and_both_ways_out(handler: Callable[..., Any], why: str) -> None:
    with pytest.raises(WorkerError) as caught:
        importable_name(handler)
    assert why in str(caught.value)
    assert "Either start the worker before" in str(caught.value)
    assert "or put the handler at the top level" in str(caught.value)


def test_a_closure_and_the_main_file_are_named_as_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    def closure(ctx: Any) -> None: ...

    with pytest.raises(WorkerError, match="it is defined inside a function"):
        importable_name(closure)
    monkeypatch.setattr(top_level, "__module__", "__main__")
    with pytest.raises(WorkerError, match="it is defined in the program's main file"):
        importable_name(top_level)


# --- starting and stopping --------------------------------------------------------------------------------------------


def test_a_stop_before_the_start_is_not_forgotten_and_counts_once() -> None:
    new = make()
    new.process(lambda ctx: None)
    new.stop()
    new.stop()
    new.start()
    assert new.state == "stopped"
    new.stop()  # of one that has stopped: nothing
    assert not new._stop_asked


def test_run_workers_of_nobody_returns() -> None:
    run_workers()


def test_a_thread_with_an_event_loop_is_not_blocked() -> None:
    new = make()
    new.process(top_level)

    async def start() -> None:
        new.start()

    with pytest.raises(WorkerError, match=r"await asyncio.to_thread\(worker.start\)"):
        asyncio.run(start())
    assert new.state == "error"
    assert new.join(0)


# --- callbacks --------------------------------------------------------------------------------------------------------


def test_unknown_events_are_refused_with_those_that_there_are() -> None:
    for method in (make().on, make().off):
        with pytest.raises(
            ValueError, match=r"no event 'job:done'; the events are: started, stopped, error, job:claimed"
        ):
            method("job:done", print)


def test_unsubscribe_ends_one_subscription_and_off_too() -> None:
    new = make()
    heard: list[object] = []

    def callback(event: object) -> None:
        heard.append(event)

    first = new.on("started", callback)
    new.on("started", callback)
    first()
    first()
    new._callbacks.tell("started", 1)
    assert heard == [1]
    new.off("started", callback)
    new.off("started", callback)
    new._callbacks.tell("started", 2)
    assert heard == [1]


def test_a_callback_that_raises_is_logged_and_the_next_one_is_called(caplog: pytest.LogCaptureFixture) -> None:
    callbacks = Callbacks()
    heard: list[object] = []

    def bad(event: object) -> None:
        callbacks.remove("stopped", bad)  # while they are being called
        raise SystemExit(3)

    callbacks.add("stopped", bad)
    callbacks.add("stopped", heard.append)
    callbacks.tell("stopped", 1)
    assert heard == [1]
    assert "a callback of 'stopped' failed" in caplog.text


# --- from our events to theirs ----------------------------------------------------------------------------------------


class Told:
    def __init__(self) -> None:
        self.events = Events()
        callbacks = Callbacks()
        self.heard: list[Any] = []
        for name in we.NAMES:
            callbacks.add(name, self.heard.append)
        self.teller = Teller(self.events, callbacks)

    def claim(self, job_id: str = "j") -> None:
        self.events.emit(ev.JobClaimed(job_id, "q", 0))
        self.heard.clear()

    def settle(self, status: str) -> None:
        self.events.emit(ev.OutcomeSettled("j", "q", status, False, 1))


def run_in_slot(slot: int) -> Run:
    run = make_run(job=make_job("j"))
    run.slot = slot
    return run


def test_a_success_is_told_when_the_service_knows_it_with_its_result() -> None:
    told = Told()
    told.claim()
    told.events.emit(ev.JobStarted("j", "q", 0, 4711, 0.5))
    told.events.emit(ev.JobProgressed("j", "q", 0, 50.0, "half"))
    assert told.teller.running == {("j", 0)}
    told.teller.on_over(run_in_slot(0), Succeeded(b'{"n":1}'))
    assert told.teller.running == set()
    told.events.emit(ev.JobCompleted("j", "q", 0, 1.5, 7))
    assert told.heard == [we.JobStarted("j", "q", 4711, 0.5), we.JobProgress("j", "q", 50.0, "half")]
    told.settle("completed")
    assert told.heard[2:] == [we.JobCompleted("j", "q", {"n": 1}, 1.5)]
    told.settle("completed")
    assert len(told.heard) == 3


def test_a_job_that_runs_twice_for_a_moment_counts_until_its_second_run_is_over() -> None:
    """Its lease was lost, and it was claimed again before the first run was seen dead."""
    told = Told()
    for slot in (0, 1):
        told.claim()
        told.events.emit(ev.JobStarted("j", "q", slot, 4711 + slot, 0.5))
    assert len(told.teller.running) == 2
    told.teller.on_over(run_in_slot(0), None)
    assert told.teller.running == {("j", 1)}
    told.teller.on_over(run_in_slot(1), Succeeded(b"1"))
    assert told.teller.running == set()


def test_a_failure_is_told_when_the_service_knows_it() -> None:
    told = Told()
    told.claim()
    told.teller.on_over(make_run(job=make_job("j")), Failed("no"))
    told.events.emit(ev.JobFailed("j", "q", 0, "failed", "no", True, 1.0))
    assert told.heard == []
    told.settle("failed")
    assert told.heard == [we.JobFailed("j", "q", "no", True, "failed", 1.0)]


def test_a_result_that_the_service_refuses_is_a_failure() -> None:
    told = Told()
    told.claim()
    told.teller.on_over(make_run(job=make_job("j")), Succeeded(b"1"))
    told.events.emit(ev.JobCompleted("j", "q", 0, 1.0, 1))
    told.settle("failed")
    assert [type(event) for event in told.heard] == [we.JobFailed]


@pytest.mark.parametrize(
    "event", [ev.JobLeaseLost("j", "q", "taken"), ev.OutcomeDropped("j", "q", "completed", "taken")]
)
def test_a_lost_lease_is_told_once_and_is_the_end(event: ev.Event) -> None:
    told = Told()
    told.claim()
    told.events.emit(event)
    told.events.emit(event)
    told.settle("completed")
    assert told.heard == [we.JobLeaseLost("j", "q", "taken")]


def test_outcomes_of_an_earlier_life_are_nobodys_events() -> None:
    told = Told()
    told.settle("completed")
    assert told.heard == []


def test_every_name_has_a_frozen_event_and_every_event_is_told() -> None:
    assert list(we.NAMES) == list(Callbacks()._by_name)
    for kind in we.NAMES.values():
        assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined] # a dataclass has it
        assert f"`{kind.__name__}`" in (we.__doc__ or "")


# --- log --------------------------------------------------------------------------------------------------------------


def test_events_become_records_of_the_programs_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spooled_supervisor")
    events = Events()
    log = StandardLog(events, ["sp_test_0123456789"])
    log.keep_secret("sp_test_rotated")
    events.emit(ev.JobFailed("j", "q", 0, "failed", "no sp_test_0123456789\nor sp_test_rotated", True, 1.0))
    events.emit(ev.JobLogged("j", "q", 0, 1, "warn", "careful", "log"))
    events.emit(ev.ApiRequestFinished("claim", "200", 0.1))
    log.write(logging.DEBUG, "below")
    first, second = caplog.records
    assert (first.name, first.levelname) == ("spooled_supervisor", "WARNING")
    assert first.getMessage().startswith("job_failed job_id=j queue_name=q slot=0 kind=failed error=")
    assert "sp_test" not in first.getMessage()
    assert first.event == "job_failed"  # type: ignore[attr-defined] # an extra of the record
    assert first.fields["error"] == "no ***\nor ***"  # type: ignore[attr-defined] # formatters print extras
    assert second.levelname == "WARNING"
    assert "message=careful" in second.getMessage()


# --- what is ours, and what is put back -------------------------------------------------------------------------------


def stat_of(pid: int, session: int) -> Stat:
    mine = read_stat(os.getpid())
    assert mine is not None
    return mine._replace(pid=pid, session=session, start=pid)


def test_only_sessions_of_our_children_and_what_was_ours_once_are_ours() -> None:
    kin = Kin("nobody has this marker")
    kin.born(50)
    assert kin.is_ours(stat_of(51, session=50))
    assert not kin.is_ours(stat_of(52, session=60))
    kin.died(50)
    assert kin.is_ours(stat_of(53, session=50))
    kin.settle()
    assert not kin.is_ours(stat_of(54, session=50)), "the number may be somebody else's session now"
    kin.born(70)
    kin.died(70)
    kin.born(70)
    kin.settle()
    assert kin.is_ours(stat_of(71, session=70))


def test_who_was_ours_once_is_ours_when_dead() -> None:
    kin = Kin("nobody has this marker")
    kin.born(50)
    met = stat_of(51, session=50)
    assert kin.is_ours(met)
    assert kin.is_ours(met._replace(session=51))
    kin.died(50)
    kin.settle()
    assert not kin.is_ours(met._replace(session=51))
    assert MARKER


def test_a_process_is_a_subreaper_as_long_as_anybody_needs_it() -> None:
    assert not kernel.is_child_subreaper()
    with hosting.subreaper():
        with hosting.subreaper():
            assert kernel.is_child_subreaper()
        assert kernel.is_child_subreaper()
    assert not kernel.is_child_subreaper()


def test_a_program_that_is_a_subreaper_stays_one() -> None:
    kernel.set_child_subreaper(True)
    try:
        with hosting.subreaper():
            pass
        assert kernel.is_child_subreaper()
    finally:
        kernel.set_child_subreaper(False)


def test_an_ignored_sigchld_is_ignored_again_and_a_handler_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGCHLD)
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        with hosting.waitable_children():
            assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN

        def own(*_: object) -> None: ...

        signal.signal(signal.SIGCHLD, own)
        with hosting.waitable_children():
            assert signal.getsignal(signal.SIGCHLD) is own
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_stop_signals_reach_the_loop_and_the_handlers_come_back() -> None:
    before = {number: signal.getsignal(number) for number in hosting.STOP_SIGNALS}
    loop = asyncio.new_event_loop()
    got: list[signal.Signals] = []
    both = asyncio.Event()

    def note(number: signal.Signals) -> None:
        got.append(number)
        if len(got) == 2:
            both.set()

    async def be_signalled() -> None:
        for number in hosting.STOP_SIGNALS:
            os.kill(os.getpid(), number)
        await both.wait()

    try:
        with hosting.stop_signals(loop, note):
            loop.run_until_complete(asyncio.wait_for(be_signalled(), 5))
    finally:
        loop.close()
    assert sorted(got) == sorted(hosting.STOP_SIGNALS)
    assert {number: signal.getsignal(number) for number in hosting.STOP_SIGNALS} == before


def test_what_a_signal_handler_raises_is_handed_over_and_the_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    told: list[BaseException] = []

    def own(number: int, _frame: object) -> None:
        raise ValueError(number)

    def other(*_: object) -> None: ...

    try:
        signal.signal(signal.SIGUSR1, own)
        signal.signal(signal.SIGUSR2, own)
        with hosting.handing_over(told.append) as raised:
            for number in (signal.SIGUSR1, signal.SIGUSR2):
                os.kill(os.getpid(), number)
            signal.signal(signal.SIGUSR2, other)
        assert [error.args for error in raised] == [(signal.SIGUSR1,), (signal.SIGUSR2,)]
        assert told == raised[:1]
        assert signal.getsignal(signal.SIGUSR1) is own
        assert signal.getsignal(signal.SIGUSR2) is other
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_a_fork_of_the_programs_own_raises_what_its_signal_handler_raises() -> None:
    before = signal.getsignal(signal.SIGUSR1)

    def own(*_: object) -> None:
        raise ValueError

    try:
        signal.signal(signal.SIGUSR1, own)
        with hosting.handing_over(lambda error: None) as raised:
            pid = os.fork()
            if pid == 0:
                try:
                    os.kill(os.getpid(), signal.SIGUSR1)
                except ValueError:
                    os._exit(7)
                finally:
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert raised == []
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_in_another_thread_signals_are_left_alone() -> None:
    loop = asyncio.new_event_loop()
    before = signal.getsignal(signal.SIGTERM)
    seen: list[Any] = []

    def look() -> None:
        with (
            hosting.handing_over(lambda error: None),
            hosting.stop_signals(loop, lambda number: None),
            hosting.waitable_children(),
        ):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    loop.close()
    assert seen == [before]


def test_threads_are_counted_as_the_kernel_counts_them() -> None:
    leave = threading.Event()
    count = hosting.thread_count()
    thread = threading.Thread(target=leave.wait)
    thread.start()
    assert hosting.thread_count() == count + 1
    assert not hosting.has_one_thread()
    leave.set()
    thread.join()


def test_the_error_of_a_spent_worker_says_what_happened() -> None:
    assert worker.WorkerError.exit_code == NoCopyLeft.exit_code == 1
