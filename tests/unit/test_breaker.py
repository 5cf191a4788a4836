"""A queue whose handler kills its children is left alone for a while."""

from __future__ import annotations

from spooled_supervisor.breaker import CRASHES_TO_OPEN, PAUSE_CAP_S, PAUSE_FIRST_S, QueueBreaker


def an_open_one(at: float = 0.0) -> QueueBreaker:
    breaker = QueueBreaker()
    for _ in range(CRASHES_TO_OPEN):
        breaker.crashed(at)
    return breaker


def test_a_closed_breaker_allows_everything() -> None:
    breaker = QueueBreaker()
    assert not breaker.is_open
    assert breaker.allowed(7, 0.0) == 7


def test_it_opens_with_the_last_of_several_deaths_in_a_row() -> None:
    breaker = QueueBreaker()
    for _ in range(CRASHES_TO_OPEN - 1):
        breaker.crashed(0.0)
        assert not breaker.is_open
    breaker.crashed(0.0)
    assert breaker.is_open
    assert breaker.allowed(7, 0.0) == 0


def test_an_answer_in_between_starts_the_count_anew() -> None:
    breaker = QueueBreaker()
    for _ in range(3):
        for _ in range(CRASHES_TO_OPEN - 1):
            breaker.crashed(0.0)
        breaker.answered()
    assert not breaker.is_open


def test_after_the_pause_one_job_is_allowed() -> None:
    breaker = an_open_one(at=100.0)
    half_open_at = breaker.half_open_at
    assert 100.0 + PAUSE_FIRST_S / 2 <= half_open_at <= 100.0 + PAUSE_FIRST_S
    assert breaker.allowed(7, half_open_at - 0.001) == 0
    assert breaker.allowed(7, half_open_at) == 1
    assert breaker.allowed(0, half_open_at) == 0
    assert breaker.is_open


def test_a_probe_that_ends_well_closes_it() -> None:
    breaker = an_open_one()
    breaker.answered()
    assert not breaker.is_open
    assert breaker.allowed(7, 0.0) == 7


def test_probes_that_die_make_the_pause_longer_up_to_a_cap() -> None:
    breaker, at, pauses = an_open_one(), 0.0, []
    for _ in range(12):
        at = breaker.half_open_at
        breaker.crashed(at)
        pauses.append(breaker.half_open_at - at)
    assert pauses[0] <= 2 * PAUSE_FIRST_S
    assert max(pauses) <= PAUSE_CAP_S
    assert pauses[-1] >= PAUSE_CAP_S / 2


def test_after_a_success_the_next_pause_is_a_short_one_again() -> None:
    breaker = an_open_one()
    for _ in range(10):
        breaker.crashed(0.0)
    breaker.answered()
    for _ in range(CRASHES_TO_OPEN):
        breaker.crashed(1000.0)
    assert breaker.half_open_at <= 1000.0 + PAUSE_FIRST_S


def test_jobs_that_ran_already_when_it_opened_do_not_make_the_pause_longer() -> None:
    breaker = an_open_one(at=100.0)
    half_open_at = breaker.half_open_at
    for _ in range(20):
        breaker.crashed(100.1)
    assert breaker.half_open_at == half_open_at
