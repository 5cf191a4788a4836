"""Clocks, back-off, restart budget and the alarm."""

from __future__ import annotations

import asyncio
import random
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spooled_supervisor import timing
from spooled_supervisor.timing import Alarm, Backoff, RestartBudget, jittered
from tests.support.clock import FakeClock, fake_time, run_in_fake_time

seconds = st.floats(0.001, 1000.0)


# --- clocks -----------------------------------------------------------------------------------------------------------


def test_instants_are_of_the_clock_that_goes_on_in_a_suspend() -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= timing.now() <= time.clock_gettime(time.CLOCK_BOOTTIME)


def test_the_loop_counts_the_same_clock() -> None:
    loop = timing.new_event_loop()
    try:
        before = time.clock_gettime(time.CLOCK_BOOTTIME)
        assert before <= loop.time() <= time.clock_gettime(time.CLOCK_BOOTTIME)
    finally:
        loop.close()


def test_the_loop_follows_a_clock_that_has_jumped(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = fake_time(monkeypatch)

    async def main() -> list[str]:
        woken: list[str] = []
        loop = asyncio.get_running_loop()
        loop.call_later(3600.0, woken.append, "an hour later")
        clock.advance(7200.0)  # the machine slept
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return woken

    assert run_in_fake_time(clock, main()) == ["an hour later"]


def test_a_timestamp_is_rfc_3339_in_utc_with_milliseconds() -> None:
    assert timing.timestamp(0.0) == "1970-01-01T00:00:00.000Z"
    assert timing.timestamp(1_700_000_000.1239) == "2023-11-14T22:13:20.123Z"
    assert timing.timestamp(1_700_000_000.9999) == "2023-11-14T22:13:20.999Z"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", timing.timestamp())


# --- back-off ---------------------------------------------------------------------------------------------------------


@given(seconds, seconds, st.floats(1.0, 10.0), st.integers(1, 80), st.randoms())
def test_every_delay_lies_between_half_and_the_whole_of_its_step(
    first_s: float, cap_s: float, factor: float, failures: int, rng: random.Random
) -> None:
    backoff = Backoff(first_s, cap_s, factor=factor, rng=rng)
    for failure in range(failures):
        step = min(cap_s, first_s * factor ** min(failure, 64))
        assert step / 2 <= backoff.next_delay() <= step
    assert backoff.failures == failures


def test_an_outage_of_days_does_not_overflow() -> None:
    backoff = Backoff(1.0, 30.0, factor=10.0)
    backoff.failures = 100_000
    assert 15.0 <= backoff.next_delay() <= 30.0


def test_delays_begin_anew_after_a_success() -> None:
    backoff = Backoff(1.0, 64.0)
    for _ in range(6):
        backoff.next_delay()
    backoff.reset()
    assert backoff.failures == 0
    assert 0.5 <= backoff.next_delay() <= 1.0


def test_two_workers_do_not_wait_in_step() -> None:
    delays = {round(Backoff(1.0, 30.0).next_delay(), 6) for _ in range(20)}
    assert len(delays) > 10


@given(seconds, st.floats(0.0, 1.0), st.randoms())
def test_a_jittered_interval_stays_within_its_share(interval_s: float, share: float, rng: random.Random) -> None:
    value = jittered(interval_s, share, rng=rng)
    assert interval_s * (1 - share) - 1e-9 <= value <= interval_s * (1 + share) + 1e-9


# --- restart budget ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.floats(0.5, 20.0), st.lists(st.floats(0.0, 10.0), max_size=30))
def test_the_budget_counts_the_restarts_of_its_window(restarts: int, window_s: float, gaps: list[float]) -> None:
    budget = RestartBudget(restarts, window_s)
    at, spent = 0.0, []
    for gap in gaps:
        at += gap
        spent.append(at)
        in_window = sum(at - earlier <= window_s for earlier in spent)
        assert budget.spend(at) is (in_window <= restarts)


# --- alarm ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return fake_time(monkeypatch)


def test_an_alarm_wakes_at_its_instant(clock: FakeClock) -> None:
    async def main() -> float:
        await Alarm().wait_until(clock() + 5.0)
        return clock()

    begun = clock()
    assert run_in_fake_time(clock, main()) == pytest.approx(begun + 5.0)


def test_an_alarm_that_is_rung_wakes_at_once(clock: FakeClock) -> None:
    async def main() -> float:
        alarm = Alarm()
        asyncio.get_running_loop().call_later(1.0, alarm.ring)
        await alarm.wait_until(float("inf"))
        return clock()

    begun = clock()
    assert run_in_fake_time(clock, main()) == pytest.approx(begun + 1.0)


def test_a_ring_before_the_wait_is_not_missed_and_counts_once(clock: FakeClock) -> None:
    async def main() -> tuple[float, float]:
        alarm = Alarm()
        alarm.ring()
        alarm.ring()
        await alarm.wait_until(clock() + 5.0)
        first = clock()
        await alarm.wait_until(clock() + 5.0)
        return first, clock()

    begun = clock()
    first, second = run_in_fake_time(clock, main())
    assert first == begun
    assert second == pytest.approx(begun + 5.0)


def test_an_instant_that_has_passed_is_no_wait(clock: FakeClock) -> None:
    async def main() -> None:
        await Alarm().wait_until(clock() - 100.0)

    begun = clock()
    run_in_fake_time(clock, main())
    assert clock() == pytest.approx(begun)


def test_an_alarm_shows_what_it_waits_for(clock: FakeClock) -> None:
    async def main() -> list[float]:
        alarm = Alarm()
        shown = [alarm.when]
        waiter = asyncio.ensure_future(alarm.wait_until(clock() + 7.0))
        await asyncio.sleep(0)
        shown.append(alarm.when - clock())
        alarm.ring()
        await waiter
        return [*shown, alarm.when]

    assert run_in_fake_time(clock, main()) == [float("inf"), 7.0, float("inf")]


def test_a_cancelled_wait_leaves_no_timer_and_no_ring_behind(clock: FakeClock) -> None:
    async def main() -> float:
        alarm = Alarm()
        waiter = asyncio.ensure_future(alarm.wait_until(clock() + 5.0))
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        await alarm.wait_until(clock() + 20.0)
        return clock()

    begun = clock()
    assert run_in_fake_time(clock, main()) == pytest.approx(begun + 20.0)


def test_a_ring_that_a_cancelled_waiter_never_heard_wakes_the_next_one(clock: FakeClock) -> None:
    async def main() -> float:
        alarm = Alarm()
        waiter = asyncio.ensure_future(alarm.wait_until(clock() + 50.0))
        await asyncio.sleep(0)
        alarm.ring()
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        await alarm.wait_until(clock() + 50.0)
        return clock()

    begun = clock()
    assert run_in_fake_time(clock, main()) == begun
