"""What the status page is told of the past: totals, rate, chart and failures, on a clock of the test's."""

from __future__ import annotations

import itertools
import time
import tracemalloc

import pytest

from spooled_supervisor.events import Events, JobCompleted, JobFailed
from spooled_supervisor.job import Crashed, Failed, error_text
from spooled_supervisor.telemetry.history import BUCKET_S, BUCKETS, MAX_FAILURES, MAX_QUEUES, History


class Past:
    """A history, and a clock that stands still until it is told otherwise."""

    def __init__(self, at: float = 1000.0) -> None:
        self.at = at
        self.events = Events()
        self.history = History(self.events, lambda: self.at, mask=str)

    def done(self, queue: str = "q", count: int = 1) -> None:
        for _ in range(count):
            self.events.emit(JobCompleted("j", queue, 0, 0.5, 2))

    def fails(self, queue: str = "q", *, job_id: str = "j", kind: str = "failed", error: str = "E: x") -> None:
        self.events.emit(JobFailed(job_id, queue, 1, kind, error, True, 0.5))

    def chart(self) -> list[tuple[int, int]]:
        return [(done, failed) for _, done, failed in self.history.throughput()]


@pytest.fixture
def past() -> Past:
    return Past()


def test_before_anything_has_happened_all_is_zero(past: Past) -> None:
    assert past.history.tally("q") == (0, 0, 0.0)
    assert past.chart() == [(0, 0)] * BUCKETS
    assert past.history.failures == ()


def test_jobs_are_counted_by_queue(past: Past) -> None:
    past.done("a", 3)
    past.fails("a")
    past.done("b")
    assert past.history.tally("a")[:2] == (3, 1)
    assert past.history.tally("b")[:2] == (1, 0)
    assert past.history.tally("c")[:2] == (0, 0)


def test_the_chart_moves_on_with_time_and_forgets_what_is_older(past: Past) -> None:
    past.done(count=2)
    past.at += BUCKET_S
    past.fails()
    assert past.chart()[-3:] == [(0, 0), (2, 0), (0, 1)]
    past.at += BUCKET_S * (BUCKETS - 2)
    assert past.chart()[:2] == [(2, 0), (0, 1)]
    past.at += BUCKET_S
    assert past.chart()[:2] == [(0, 1), (0, 0)]
    past.at += BUCKET_S
    assert past.chart() == [(0, 0)] * BUCKETS


def test_the_charts_times_are_wall_times_a_bucket_apart_and_the_last_has_begun(past: Past) -> None:
    past.at += 2
    times = [at for at, _, _ in past.history.throughput()]
    assert {later - earlier for earlier, later in itertools.pairwise(times)} == {BUCKET_S}
    assert 0 <= time.time() - times[-1] <= BUCKET_S + 1


@pytest.mark.parametrize("slept_s", [BUCKET_S * BUCKETS, 1e6, 1e12])
def test_a_long_sleep_leaves_an_empty_chart_and_keeps_the_totals(past: Past, slept_s: float) -> None:
    past.done(count=5)
    past.at += slept_s
    assert past.chart() == [(0, 0)] * BUCKETS
    assert past.history.tally("q") == (5, 0, 0.0)


def test_an_event_right_after_a_sleep_falls_into_the_new_bucket(past: Past) -> None:
    past.done()
    past.at += 1e6
    past.done()
    assert past.chart() == [(0, 0)] * (BUCKETS - 1) + [(1, 0)]


def test_a_clock_that_stands_or_steps_back_a_little_changes_nothing(past: Past) -> None:
    past.done()
    past.at -= BUCKET_S
    past.done()
    assert past.chart()[-1] == (2, 0)


def test_the_rate_is_that_of_the_last_minute(past: Past) -> None:
    past.at += 3600
    past.done(count=20)
    past.fails()
    assert past.history.tally("q")[2] == 21
    past.at += 60
    assert past.history.tally("q")[2] == pytest.approx(21, rel=0.1)
    past.at += BUCKET_S
    assert past.history.tally("q")[2] == 0


def test_a_young_supervisors_rate_is_over_the_time_that_it_has_lived(past: Past) -> None:
    past.at += 10
    past.done(count=10)
    assert past.history.tally("q")[2] == 60


def test_the_first_job_of_all_does_not_make_a_rate_of_thousands(past: Past) -> None:
    past.at += 0.001
    past.done()
    assert past.history.tally("q")[2] == 12


def test_the_last_failures_are_kept_the_newest_first(past: Past) -> None:
    for n in range(MAX_FAILURES + 5):
        past.fails(job_id=f"j{n}")
    found = [failure.job_id for failure in past.history.failures]
    assert found == [f"j{n}" for n in range(MAX_FAILURES + 4, 4, -1)]


def test_a_failure_says_what_the_event_said() -> None:
    past = Past()
    past.events.emit(JobFailed("j1", "q", 3, "timed_out", "timed out", False, 12.5))
    (failure,) = past.history.failures
    assert (failure.job_id, failure.queue, failure.slot, failure.kind) == ("j1", "q", 3, "timed_out")
    assert (failure.error, failure.output, failure.will_retry, failure.duration_s) == ("timed out", "", False, 12.5)
    assert abs(failure.failed_at - time.time()) < 5


def test_a_dead_childs_output_is_told_apart_from_the_cause(past: Past) -> None:
    past.fails(kind="crashed", error=error_text(Crashed("killed by SIGSEGV", "one\ntwo")))
    past.fails(kind="crashed", error=error_text(Crashed("exited with status 3")))
    silent, talking = past.history.failures
    assert (talking.error, talking.output) == ("killed by SIGSEGV", "one\ntwo")
    assert (silent.error, silent.output) == ("exited with status 3", "")


def test_an_output_so_long_that_it_was_cut_is_still_told_apart(past: Past) -> None:
    past.fails(kind="crashed", error=error_text(Crashed("killed by SIGSEGV", "x" * 5000)))
    (failure,) = past.history.failures
    assert failure.error == "killed by SIGSEGV"
    assert failure.output.startswith("xxx")


def test_a_handlers_error_that_looks_like_output_is_left_alone(past: Past) -> None:
    text = error_text(Failed("ValueError: x\nlast output:\nnone"))
    past.fails(error=text)
    (failure,) = past.history.failures
    assert (failure.error, failure.output) == (text, "")


def test_memory_is_bounded_whatever_arrives() -> None:
    past = Past()

    def flood(first: int) -> None:
        for n in range(first, first + 2 * MAX_QUEUES):
            past.at += 1
            past.done(f"q{n}")
            past.fails(f"q{n}", error="x" * 2048)

    flood(0)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    flood(10 * MAX_QUEUES)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 500_000
    assert past.history.tally(f"q{3 * MAX_QUEUES}") == (0, 0, 0.0)
    assert sum(done for done, _ in past.chart()) == BUCKET_S * BUCKETS - int(BUCKET_S - past.at % BUCKET_S) + 1


def test_an_event_costs_microseconds() -> None:
    history = History(Events(), mask=str)
    event = JobCompleted("j", "q", 0, 0.5, 2)
    best = min(_seconds(history, event) for _ in range(5))
    assert best / 10_000 < 10e-6  # 0.6 us on an idle machine; the limit is for a loaded one


def _seconds(history: History, event: JobCompleted) -> float:
    start = time.perf_counter()
    for _ in range(10_000):
        history._take(event)
    return time.perf_counter() - start
