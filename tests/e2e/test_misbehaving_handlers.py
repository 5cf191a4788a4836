"""Handlers that do anything at all: one clear outcome per job, the slot back, nothing else disturbed or left running.

All on one daemon; what the `bench` fixture checks after each of these tests is half of what they say.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Bench
from tests.support.daemon import is_alive, state_of, wait_until
from tests.support.transports import REST


def processes_told(bench: Bench, job_id: str) -> dict[str, int]:
    """What the handler started: pid by name."""
    return {entry["name"]: entry["process"] for entry in bench.daemon.ledger.entries("process", job=job_id)}


def assert_gone(pids: dict[str, int], timeout_s: float = 5.0) -> None:
    wait_until(lambda: not any(map(is_alive, pids.values())), f"death of {pids}", timeout_s)


# --- what is raised ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("own", r"modes\.Own: mine"),
        ("own-base", r"modes\.OwnBase: mine"),
        ("keyboard-interrupt", r"KeyboardInterrupt"),
        ("generator-exit", r"GeneratorExit"),
        ("cancelled", r"CancelledError"),
        ("stop-iteration", r"StopIteration"),
        ("str-raises", r"modes\.StrRaises: "),
        ("str-exits", r"modes\.StrExits: "),
        ("str-is-none", r"modes\.StrIsNone: "),
        ("huge", r"ValueError: xxx"),
        ("nul", r"ValueError: a\\x00b"),
        ("surrogate", r"ValueError: a\\ud800b"),
        ("surrogate-name", r"named oddly"),
        ("empty", r"Exception"),
        ("lock", r"Exception: <unlocked _thread\.lock"),
        ("two-arguments", r"modes\.TwoArguments: 1"),
        ("group", r"ExceptionGroup: several"),
        ("memory", r"MemoryError"),
        ("non-retryable", r"NonRetryableError: never again"),
        ("forged-abort", r"abort"),
    ],
)
def test_anything_raised_is_one_failure_with_its_name(bench: Bench, what: str, text: str) -> None:
    error = bench.error("raise_odd", what=what)
    assert re.search(text, error), error
    if what != "forged-abort":
        assert "modes.py" in error, "the failure says where it happened"


def test_ordinary_exception_names_the_place(bench: Bench) -> None:
    error = bench.error("raise", text="page 7 is torn")
    assert error.startswith("ValueError: page 7 is torn")
    assert re.search(r"modes\.py:\d+ in raise_", error)


@pytest.mark.parametrize(
    ("argument", "text"),
    [(None, "SystemExit"), (0, "SystemExit"), (3, "SystemExit: 3"), ("no space", "SystemExit: no space")],
)
def test_sys_exit_is_a_failure_and_never_success(bench: Bench, argument: object, text: str) -> None:
    assert bench.error("sys_exit", argument=argument).startswith(text)


def test_endless_recursion_is_reported(bench: Bench) -> None:
    assert bench.error("recursion").startswith("RecursionError")


def test_endless_cause_chain_is_reported(bench: Bench) -> None:
    assert bench.error("chain").startswith("ValueError: 9999")


def test_out_of_memory_under_a_limit_is_reported(bench: Bench) -> None:
    assert bench.error("out_of_memory").startswith("MemoryError")


def test_failing_job_is_retried_by_the_service(bench: Bench) -> None:
    job = bench.end(bench.add("raise", max_retries=2))
    assert job["status"] == "deadletter"
    assert bench.events(job["id"]).count("failed") == 3
    assert bench.daemon.ledger.runs(job["id"]) == 3
    assert [e["retry_count"] for e in bench.daemon.ledger.entries("start", job=job["id"])] == [0, 1, 2]


# --- what ends the process -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [0, 3, 255])
def test_os_exit_is_one_crash(bench: Bench, status: int) -> None:
    error = bench.error("os_exit", status=status)
    assert f"exited with status {status} without an outcome" in error


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGPIPE, signal.SIGALRM])
def test_death_by_signal_is_named_with_the_last_output(bench: Bench, number: signal.Signals) -> None:
    if number in (signal.SIGPIPE,):
        pytest.skip("Python ignores it; a handler cannot die of it by itself")
    error = bench.error("kill_self", signal=number)
    assert f"killed by {number.name}" in error
    assert "last words" in error


def test_segmentation_fault_is_named(bench: Bench) -> None:
    assert "killed by SIGSEGV" in bench.error("segv")


def test_abort_is_named(bench: Bench) -> None:
    assert "killed by SIGABRT" in bench.error("abort")


def test_stack_overflow_in_c_is_named(bench: Bench) -> None:
    assert "killed by SIGSEGV" in bench.error("stack_overflow")


def test_crash_is_reported_at_once(bench: Bench) -> None:
    bench.error("kill_self")
    (killed,) = [e for e in bench.daemon.events("child_exited") if e["signal"] == "SIGKILL"][-1:]
    (failed,) = bench.daemon.events("job_failed", kind="crashed")[-1:]
    assert failed["seen_at"] - killed["seen_at"] < 1.0


def test_handler_stops_itself_and_is_killed_at_its_timeout(bench: Bench) -> None:
    error = bench.error("stop_self", fields={"timeout_seconds": 1})
    assert error.startswith("timed out: the job ran longer than its limit of 1 s")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT])
def test_handler_signals_itself_and_goes_on(bench: Bench, number: signal.Signals) -> None:
    """Signals that reach every process of a unit end no job."""
    job_id = bench.add("spin", seconds=0.6)
    (start,) = bench.daemon.ledger.wait_for("start", job=job_id)
    os.kill(start["pid"], number)
    assert bench.end(job_id)["status"] == "completed"


# --- what is returned ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("none", None),
        ("text", "ünïcode \U0001f600"),
        ("nul", "a\0b"),
        ("tuple", [1, [2, 3]]),
        ("big-int-that-fits", 9007199254740993),
        ("large", "x" * 1_000_000),
        ("list-of-many", list(range(100_000))),
    ],
)
def test_json_result_arrives_unchanged(bench: Bench, what: str, value: Any) -> None:
    assert bench.result("result", what=what) == value


def test_result_of_90_levels_arrives(bench: Bench) -> None:
    assert json.dumps(bench.result("result", what="deep-enough")) == "[" * 91 + "]" * 91


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("nan", r"result\.a\[0\] is nan"),
        ("infinity", r"result\[0\] is inf"),
        ("bytes", r"result\.a is of type bytes"),
        ("set", r"type set"),
        ("date", r"type datetime"),
        ("decimal", r"type Decimal"),
        ("object", r"type object"),
        ("generator", r"type generator"),
        ("coroutine", r"type coroutine"),
        ("array", r"type array"),
        ("circular", r"deeper than 100"),
        ("int-keys", r"key 1 of type int"),
        ("tuple-keys", r"type tuple"),
        ("nan-keys", r"type float"),
        ("bad-dict", r"no items for you"),
        ("deep", r"deeper than 100"),
        ("big-int", r"4300 digits"),
        ("surrogate", r"lone surrogate"),
        ("too-large", r"too large: 1048578 bytes, 1048576 are allowed"),
        ("huge", r"too large: 50000002 bytes"),
    ],
)
def test_result_that_is_no_json_is_one_failure_with_place_and_type(bench: Bench, what: str, text: str) -> None:
    error = bench.error("result", what=what)
    assert re.search(text, error), error


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        "",
        0,
        -1.5e300,
        True,
        {"a": {"b": [1, 2.5, None, "ü\u2028\0"]}},
        9007199254740993,
        "x" * 900_000,
        [[[[[[[[[[[[]]]]]]]]]]]],
    ],
    ids=lambda value: repr(value)[:20],
)
def test_payload_reaches_the_handler_and_comes_back_unchanged(bench: Bench, value: Any) -> None:
    if value == 2**53 + 1 and bench.transport != REST:
        value = 2**53  # numbers of gRPC payloads are doubles
    assert bench.result("echo", value=value) == value


# --- time limits ---------------------------------------------------------------------------------------------------


def test_spinning_job_is_killed_at_its_timeout_and_the_failure_shows_its_stack(bench: Bench) -> None:
    began = time.monotonic()
    error = bench.error("spin", fields={"timeout_seconds": 1})
    took = time.monotonic() - began
    assert error.startswith("timed out: the job ran longer than its limit of 1 s")
    assert "spin_for" in error
    assert "modes.py" in error
    assert 1.9 < took < 4.0, "limit and grace, and little more"


def test_job_that_ignores_all_signals_is_killed_at_its_timeout(bench: Bench) -> None:
    error = bench.error("ignore_signals", fields={"timeout_seconds": 1})
    assert error.startswith("timed out")
    assert "SIGKILL" not in error, "the reason is the limit"


def test_c_call_that_never_returns_is_killed_and_its_stack_is_known(bench: Bench) -> None:
    error = bench.error("c_call", long=True, fields={"timeout_seconds": 1})
    assert error.startswith("timed out")
    assert "c_call" in error


def test_sleeping_job_is_killed_at_its_timeout(bench: Bench) -> None:
    assert bench.error("sleep", fields={"timeout_seconds": 1}).startswith("timed out")


def test_cooperative_job_learns_the_reason_and_keeps_its_child_but_not_its_value(bench: Bench) -> None:
    job_id = bench.add("cooperative", fields={"timeout_seconds": 1})
    assert bench.end(job_id)["last_error"].startswith("timed out")
    (told,) = bench.daemon.ledger.entries("told", job=job_id)
    assert told["reason"] == "timeout"
    assert is_alive(told["pid"])


def test_raise_if_aborted_ends_a_job_at_its_timeout(bench: Bench) -> None:
    assert bench.error("raise_if_aborted", fields={"timeout_seconds": 1}).startswith("timed out")


def test_listener_is_called_at_the_timeout(bench: Bench) -> None:
    assert bench.error("listener", fields={"timeout_seconds": 1}).startswith("timed out")


def test_on_abort_raise_interrupts_a_spinning_handler_within_the_grace(bench: Bench) -> None:
    job_id = bench.add("spin", queue="q-raise", fields={"timeout_seconds": 1})
    (start,) = bench.daemon.ledger.wait_for("start", job=job_id)
    assert bench.end(job_id)["last_error"].startswith("timed out")
    assert not bench.daemon.events("child_killed", job_id=job_id), "it ended by itself"
    exited = bench.daemon.wait_for_event("child_exited", pid=start["pid"])
    assert exited["reason"] == "aborted", "a child in which JobAborted was raised is replaced"


def test_on_abort_raise_interrupts_sleep(bench: Bench) -> None:
    job_id = bench.add("sleep", queue="q-raise", fields={"timeout_seconds": 1})
    assert bench.end(job_id)["last_error"].startswith("timed out")
    assert not bench.daemon.events("child_killed", job_id=job_id)


def test_on_abort_raise_comes_once_and_not_into_calls_of_ours(bench: Bench) -> None:
    job_id = bench.add("abort_in_context_call", queue="q-raise", fields={"timeout_seconds": 1})
    assert bench.end(job_id)["last_error"].startswith("timed out")
    assert not bench.daemon.events("child_killed", job_id=job_id)


def test_job_aborted_that_is_swallowed_is_not_raised_again(bench: Bench) -> None:
    job_id = bench.add("swallow_everything", queue="q-raise", fields={"timeout_seconds": 1})
    assert bench.end(job_id)["last_error"].startswith("timed out")
    swallowed = bench.daemon.ledger.entries("swallowed", job=job_id)
    assert [entry["error"] for entry in swallowed] == ["JobAborted"]


# --- processes that are left behind --------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["return", "raise", "exit", "kill", "time out"])
def test_family_of_a_job_does_not_outlive_it(bench: Bench, then: str) -> None:
    job_id = bench.add("family", then=then, fields={"timeout_seconds": 2 if then == "time out" else 60})
    job = bench.end(job_id)
    assert (job["status"] == "completed") == (then == "return")
    family = processes_told(bench, job_id)
    assert len(family) == 6
    assert_gone(family)


@pytest.mark.parametrize("then", ["return", "exit"])
def test_fork_that_holds_the_pipes_delays_nothing(bench: Bench, then: str) -> None:
    began = time.monotonic()
    job_id = bench.add("fork_holds_pipes", then=then)
    job = bench.end(job_id)
    assert time.monotonic() - began < 5.0
    assert job["status"] == ("completed" if then == "return" else "deadletter")
    assert_gone(processes_told(bench, job_id))


def test_fork_that_returns_from_the_handler_answers_nothing(bench: Bench) -> None:
    assert bench.result("fork_returns") == "from the child"


def test_fork_that_raises_out_of_the_handler_answers_nothing(bench: Bench) -> None:
    assert bench.result("fork_raises") == "from the child"


def test_multiprocessing_pool_works_in_a_handler(bench: Bench) -> None:
    assert bench.result("pool") == [1, 2]


def test_process_that_a_handler_forks_can_be_terminated(bench: Bench) -> None:
    assert bench.result("terminate_process", patience_s=10) == -signal.SIGTERM, "and not by a handler of the child's"


def test_multiprocessing_pool_dies_with_its_job(bench: Bench) -> None:
    job_id = bench.add("pool", then="spin", fields={"timeout_seconds": 2})
    assert bench.end(job_id)["last_error"].startswith("timed out")
    (entry,) = bench.daemon.ledger.entries("pool", job=job_id)
    assert_gone({str(pid): pid for pid in entry["processes"]})


def test_orphans_are_reaped(bench: Bench) -> None:
    assert bench.result("many_orphans", count=50) == "done"

    def zombies() -> list[int]:
        parents = {bench.daemon.pid, bench.daemon.fork_server, *bench.daemon.children()}
        lists = [Path(f"/proc/{pid}/task/{pid}/children").read_text().split() for pid in parents]
        return [pid for pids in lists for pid in map(int, pids) if state_of(pid) == "Z"]

    wait_until(lambda: not zombies(), "an end of all zombies", 5.0)


def test_program_gets_no_descriptor_of_ours(bench: Bench) -> None:
    fds = bench.result("inheriting_program")["fds"]
    assert set(fds) <= {"0", "1", "2"}, fds


# --- threads and hooks ---------------------------------------------------------------------------------------------


def test_thread_that_is_left_behind_does_not_hold_the_job(bench: Bench) -> None:
    assert bench.result("thread_left") == "left a thread"


def test_thread_that_reports_after_its_job_harms_no_other(bench: Bench) -> None:
    assert bench.result("thread_reports") == "left a reporter"
    for _ in range(5):
        assert bench.run("ok")["status"] == "completed"


def test_many_threads_report_at_once(bench: Bench) -> None:
    assert bench.result("many_threads_report") == "reported"


# --- output --------------------------------------------------------------------------------------------------------


def test_flood_of_lines_is_bounded_and_the_job_completes(bench: Bench) -> None:
    mark = bench.daemon.mark()
    job_id = bench.add("flood", lines=50_000)
    assert bench.end(job_id)["status"] == "completed"
    dropped = bench.daemon.wait_for_event("job_output_dropped", after=mark)
    assert dropped["lines"] > 0
    assert len(bench.daemon.events("job_logged", after=mark)) < 5000


def test_flood_of_log_calls_is_bounded_and_the_job_completes(bench: Bench) -> None:
    mark = bench.daemon.mark()
    assert bench.result("log_flood", lines=20_000) == "flooded"
    assert len(bench.daemon.events("job_logged", after=mark)) < 5000


def test_flood_without_end_is_killed_at_its_timeout_and_shows_a_tail(bench: Bench) -> None:
    assert bench.error("flood_for_ever", fields={"timeout_seconds": 1}).startswith("timed out")


def test_binary_output_and_standard_input_do_no_harm(bench: Bench) -> None:
    assert bench.result("binary") == ""


def test_a_line_of_a_megabyte_does_no_harm(bench: Bench) -> None:
    assert bench.result("long_line") == "printed"


def test_partial_lines_are_logged_once_each(bench: Bench) -> None:
    mark = bench.daemon.mark()
    jobs = [bench.add("partial_line", n=n) for n in range(20)]
    for job_id in jobs:
        bench.end(job_id)
    lines = [e["message"] for e in bench.daemon.events("job_logged", after=mark)]
    assert sorted(lines) == sorted(f"part {n}" for n in range(20))


def test_all_that_a_handler_says_is_logged_with_its_job(bench: Bench) -> None:
    mark = bench.daemon.mark()
    job_id = bench.add("log")
    bench.end(job_id)
    said = {e["message"]: e for e in bench.daemon.events("job_logged", after=mark)}
    assert set(said) == {
        "said by ctx.log",
        "said by logging: yes",
        "said by print",
        "and by stderr",
        "by os.write",
        "by a subprocess",
    }
    assert {e["job_id"] for e in said.values()} == {job_id}
    assert {e["queue_name"] for e in said.values()} == {bench.prefix + "q"}
    assert said["said by ctx.log"]["level"] == "warn"
    assert json.loads(said["said by ctx.log"]["meta"])["pages"] == 3
    assert [said[text]["source"] for text in ("said by ctx.log", "said by logging: yes", "by os.write")] == [
        "log",
        "logging",
        "output",
    ]


# --- damage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["len", "json", "streams", "closed-streams", "low-fds", "time"])
def test_damaged_interpreter_costs_no_other_job(bench: Bench, what: str) -> None:
    """The job itself may fail or not: once."""
    job_id = bench.add("damage", what=what)
    job = bench.end(job_id)
    assert len(bench.events(job_id)) == 3
    if what in ("streams", "closed-streams", "low-fds"):
        assert job["status"] == "completed", job["last_error"]
    for _ in range(4):
        assert bench.run("ok")["status"] == "completed"


def test_all_descriptors_closed_is_one_failure(bench: Bench) -> None:
    assert "without an outcome" in bench.error("damage", what="fds")


def test_garbage_in_the_report_pipe_is_one_failure(bench: Bench) -> None:
    assert bench.error("damage", what="reports")


def test_handler_that_empties_its_own_pipes_harms_no_other(bench: Bench) -> None:
    assert bench.result("read_all_fds") == "read"


def test_surroundings_are_as_before_after_a_vandal(bench: Bench) -> None:
    before = bench.result("surroundings")
    assert bench.result("vandal") == "done"
    for _ in range(4):
        assert bench.result("surroundings") == before


# --- async handlers ------------------------------------------------------------------------------------------------


def test_async_handler_completes_on_one_loop_per_child(bench: Bench) -> None:
    results = [bench.result("ok", queue="q-async", n=n) for n in range(6)]
    assert [r["n"] for r in results] == list(range(6))
    assert len({r["loop"] for r in results}) <= 2


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("cancel_self", "CancelledError"),
        ("raise_cancelled", "CancelledError: by hand"),
        ("exit", "SystemExit: from a coroutine"),
    ],
)
def test_async_ends_of_all_kinds_are_one_failure(bench: Bench, mode: str, text: str) -> None:
    error = bench.error(mode, queue="q-async")
    assert text in error


def test_async_handler_is_cancelled_at_its_timeout(bench: Bench) -> None:
    job_id = bench.add("sleep", queue="q-async-raise", fields={"timeout_seconds": 1})
    assert bench.end(job_id)["last_error"].startswith("timed out")
    assert not bench.daemon.events("child_killed", job_id=job_id), "cancelled, not killed"


def test_async_handler_that_swallows_its_cancellation_has_no_say(bench: Bench) -> None:
    job_id = bench.add("swallow", queue="q-async-raise", fields={"timeout_seconds": 1})
    assert bench.end(job_id)["last_error"].startswith("timed out")


def test_async_cooperative_handler_learns_of_the_timeout(bench: Bench) -> None:
    job_id = bench.add("cooperative", queue="q-async", fields={"timeout_seconds": 1})
    assert bench.end(job_id)["last_error"].startswith("timed out")
    assert not bench.daemon.events("child_killed", job_id=job_id)


def test_async_handler_that_blocks_its_loop_is_killed_at_its_timeout(bench: Bench) -> None:
    assert bench.error("block", queue="q-async", fields={"timeout_seconds": 1}).startswith("timed out")


def test_async_handler_in_a_thread_is_ended_at_its_timeout(bench: Bench) -> None:
    assert bench.error("to_thread", queue="q-async-raise", fields={"timeout_seconds": 1}).startswith("timed out")


def test_tasks_that_an_async_handler_leaves_are_cancelled(bench: Bench) -> None:
    job_id = bench.add("leave_tasks", queue="q-async")
    assert bench.end(job_id)["result"] == "left a task"
    assert bench.daemon.ledger.entries("task cancelled", job=job_id)


def test_task_that_cannot_be_cancelled_does_not_hold_the_slot_for_ever(bench: Bench) -> None:
    job_id = bench.add("stubborn_task", queue="q-async", fields={"timeout_seconds": 2})
    bench.end(job_id)
    assert len(bench.events(job_id)) == 3


def test_handler_that_stops_its_loop_is_one_failure(bench: Bench) -> None:
    job_id = bench.add("loop_stop", queue="q-async", fields={"timeout_seconds": 2})
    assert bench.end(job_id)["status"] == "deadletter"
    for _ in range(3):
        assert bench.run("ok", queue="q-async")["status"] == "completed"
