"""What handler authors meet: decorators, the abort signal, the context."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spooled_supervisor import JobAborted
from spooled_supervisor.app import LOG_LEVELS, AbortSignal, App, JobContext, queue_name_problem


class Notes:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.progressed: list[tuple[float, str | None]] = []
        self.logged: list[tuple[str, str, dict[str, Any]]] = []

    def progress(self, percent: float, message: str | None) -> None:
        self.progressed.append((percent, message))

    def log(self, level: str, message: str, meta: dict[str, Any]) -> None:
        self.logged.append((level, message, meta))


def a_context(notes: Notes | None = None) -> JobContext:
    return JobContext(
        job_id="job-1",
        queue_name="emails",
        payload={"to": "a"},
        retry_count=1,
        max_retries=3,
        timeout_s=60.0,
        signal=AbortSignal(),
        reporter=notes or Notes(),
    )


# --- App --------------------------------------------------------------------------------------------------------------


def test_a_handler_is_registered_and_stays_what_it_was() -> None:
    handlers = App()

    @handlers.handler("emails", on_abort="raise")
    def send(ctx: JobContext) -> str:
        return "sent"

    assert send(a_context()) == "sent"
    found = handlers.handlers["emails"]
    assert (found.queue_name, found.function, found.on_abort) == ("emails", send, "raise")


def test_one_function_may_serve_several_queues() -> None:
    handlers = App()

    @handlers.handler("a")
    @handlers.handler("b")
    def work(ctx: JobContext) -> None: ...

    assert sorted(handlers.handlers) == ["a", "b"]
    assert handlers.handlers["a"].on_abort == "signal"


@pytest.mark.parametrize("name", ["a", "emails", "e-mails_2.high", "Ümlaut", "_x", "7", "a" * 100])
def test_names_that_the_service_takes_are_taken(name: str) -> None:
    assert queue_name_problem(name) is None


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("", "it has 0 characters, 1 to 100 are allowed"),
        ("a" * 101, "it has 101 characters"),
        ("two words", "only letters, digits"),
        ("a/b", "only letters, digits"),
        (".hidden", "no '.' or '-' in front"),
        ("-x", "no '.' or '-' in front"),
        ("a\n", "only letters, digits"),
        (7, "it must be a string, not int"),
        (None, "it must be a string, not NoneType"),
    ],
)
def test_a_queue_name_that_the_service_would_refuse_is_refused_with_the_rule(name: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        App().handler(name)


def test_a_second_handler_for_a_queue_is_refused_and_names_the_first() -> None:
    handlers = App()

    @handlers.handler("emails")
    def first(ctx: JobContext) -> None: ...

    with pytest.raises(ValueError, match=r"'emails' has a handler already: <function .*first"):
        handlers.handler("emails")


def test_an_unknown_on_abort_is_refused() -> None:
    wrong: Any = "explode"
    with pytest.raises(ValueError, match="on_abort='explode' for queue 'emails': it must be 'signal' or 'raise'"):
        App().handler("emails", on_abort=wrong)


def test_what_cannot_be_called_is_no_handler() -> None:
    handlers = App()
    wrong: Any = "send"
    with pytest.raises(TypeError, match="the handler for queue 'emails' must be callable, not 'send'"):
        handlers.handler("emails")(wrong)
    assert handlers.handlers == {}


def test_hooks_are_kept_in_order_and_stay_what_they_were() -> None:
    handlers = App()

    @handlers.on_preload
    def load() -> int:
        return 1

    @handlers.on_child_start
    async def connect() -> None: ...

    @handlers.on_child_start
    def warm() -> None: ...

    @handlers.on_child_stop
    def close() -> None: ...

    assert load() == 1
    assert handlers.preload_hooks == [load]
    assert handlers.child_start_hooks == [connect, warm]
    assert handlers.child_stop_hooks == [close]


# --- AbortSignal ------------------------------------------------------------------------------------------------------


def test_a_signal_is_set_once_and_keeps_its_first_reason() -> None:
    signal = AbortSignal()
    assert (signal.aborted, signal.reason) == (False, None)
    signal.raise_if_aborted()
    signal.abort("timeout")
    signal.abort("shutdown")
    assert (signal.aborted, signal.reason) == (True, "timeout")
    with pytest.raises(JobAborted) as caught:
        signal.raise_if_aborted()
    assert caught.value.reason == "timeout"


def test_waiting_ends_at_the_timeout_or_at_once_when_it_is_set() -> None:
    signal = AbortSignal()
    try:
        assert signal.wait(0.0) is False
        assert signal.wait(-1.0) is False
        assert signal.wait(0.001) is False
        signal.abort("shutdown")
        assert signal.wait() is True
        assert signal.wait(60.0) is True
    finally:
        signal.close()


def test_an_abort_wakes_all_threads_that_wait() -> None:
    signal = AbortSignal()
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.append(signal.wait(30.0))) for _ in range(3)]
    for thread in threads:
        thread.start()
    signal.abort("shutdown")
    for thread in threads:
        thread.join(10.0)
    assert answers == [True, True, True]
    signal.close()


def test_two_threads_that_begin_to_wait_at_the_same_moment_are_both_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    signal = AbortSignal()
    make, both_made = os.eventfd, threading.Barrier(2)

    def make_slowly(initial: int, flags: int) -> int:
        fd = make(initial, flags)
        both_made.wait(10.0)  # neither has stored its own yet
        return fd

    monkeypatch.setattr(os, "eventfd", make_slowly)
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.append(signal.wait(30.0))) for _ in range(2)]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    while both_made.n_waiting or signal._eventfd is None:
        time.sleep(0)
    signal.abort("shutdown")
    for thread in threads:
        thread.join(40.0)
    signal.close()
    assert answers == [True, True]
    assert time.monotonic() - begun < 20.0


def test_an_abort_that_comes_while_the_wait_is_set_up_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    signal = AbortSignal()
    make = os.eventfd

    def make_and_abort(initial: int, flags: int) -> int:
        signal.abort("timeout")
        return make(initial, flags)

    monkeypatch.setattr(os, "eventfd", make_and_abort)
    assert signal.wait() is True
    signal.close()


def test_closing_gives_the_descriptor_back_and_may_be_done_twice() -> None:
    signal = AbortSignal()
    signal.close()
    signal.wait(0.0)
    fd = signal._eventfd
    assert fd is not None
    assert not os.get_inheritable(fd)
    signal.close()
    signal.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_listeners_are_told_once_in_order() -> None:
    signal, told = AbortSignal(), list[str]()
    signal.add_listener(lambda: told.append("a"))
    signal.add_listener(lambda: told.append("b"))
    assert told == []
    signal.abort("shutdown")
    signal.abort("timeout")
    assert told == ["a", "b"]


def test_a_late_listener_is_told_at_once_and_the_earlier_ones_are_not_told_again() -> None:
    signal, told = AbortSignal(), list[str]()
    signal.add_listener(lambda: told.append("early"))
    signal.abort("shutdown")
    signal.add_listener(lambda: told.append("late"))
    assert told == ["early", "late"]


def test_a_listener_that_is_added_while_the_abort_comes_in_is_told_once() -> None:
    signal, told = AbortSignal(), list[str]()

    class Interrupted(list[Callable[[], object]]):
        def append(self, listener: Callable[[], object]) -> None:
            super().append(listener)
            signal.abort("timeout")  # the Unix signal arrives here

    signal._listeners = Interrupted()
    signal.add_listener(lambda: told.append("x"))
    assert told == ["x"]


@pytest.mark.parametrize("error", [ValueError("x"), JobAborted("timeout"), SystemExit(3), KeyboardInterrupt()])
def test_what_a_listener_raises_is_printed_and_changes_nothing(
    error: BaseException, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    signal, told = AbortSignal(), list[str]()

    def fails() -> None:
        raise error

    signal.add_listener(fails)
    signal.add_listener(lambda: told.append("b"))
    signal.abort("shutdown")
    signal.add_listener(fails)
    assert told == ["b"]
    assert signal.aborted
    assert capsys.readouterr().err.count("Traceback") == 2


def test_a_listener_may_add_another_one() -> None:
    signal, told = AbortSignal(), list[str]()
    signal.add_listener(lambda: signal.add_listener(lambda: told.append("inner")))
    signal.abort("shutdown")
    assert told == ["inner"]


# --- JobContext -------------------------------------------------------------------------------------------------------


@given(st.floats())
def test_progress_is_always_between_0_and_100(percent: float) -> None:
    notes = Notes()
    a_context(notes).progress(percent)
    ((found, message),) = notes.progressed
    assert 0.0 <= found <= 100.0
    assert message is None
    if 0.0 <= percent <= 100.0:
        assert found == percent


@pytest.mark.parametrize(("percent", "kept"), [(-1, 0.0), (0, 0.0), (True, 1.0), (250, 100.0), (float("nan"), 0.0)])
def test_numbers_of_other_kinds_are_progress_too(percent: Any, kept: float) -> None:
    notes = Notes()
    a_context(notes).progress(percent, "going on")
    assert notes.progressed == [(kept, "going on")]


def test_a_progress_that_is_no_number_is_the_handlers_mistake() -> None:
    wrong: Any = "half"
    with pytest.raises(ValueError, match="half"):
        a_context().progress(wrong)


@pytest.mark.parametrize("level", LOG_LEVELS)
def test_log_lines_carry_level_message_and_meta(level: Any) -> None:
    notes = Notes()
    a_context(notes).log(level, "rendered", pages=3)
    assert notes.logged == [(level, "rendered", {"pages": 3})]


def test_other_objects_are_messages_by_their_text() -> None:
    notes = Notes()
    not_text: Any = ValueError("x")
    a_context(notes).log("info", not_text)
    a_context(notes).progress(1, not_text)
    assert notes.logged == [("info", "x", {})]
    assert notes.progressed == [(1.0, "x")]


def test_an_unknown_level_is_refused_with_the_known_ones() -> None:
    wrong: Any = "loud"
    with pytest.raises(ValueError, match="log level 'loud': it must be one of debug, info, warn, error"):
        a_context().log(wrong, "x")


def test_a_context_shows_itself_without_its_payload() -> None:
    assert repr(a_context()) == "<JobContext job-1 of 'emails', try 1>"
