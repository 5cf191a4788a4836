"""An outage is two lines in the log, and a reason while it lasts."""

from __future__ import annotations

import pytest

from spooled_supervisor import troubles as troubles_module
from spooled_supervisor.events import ApiRecovered, ApiTroubled, Events
from spooled_supervisor.troubles import FRESH_S, PERSISTENT_FAILURES, RETOLD_S, Troubles
from tests.support.clock import FakeClock, fake_time
from tests.support.fakes import Recorded


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return fake_time(monkeypatch, troubles_module)


def test_the_beginning_and_the_end_are_told_and_nothing_in_between() -> None:
    events = Events()
    recorded, troubles = Recorded(events), Troubles(events)
    for _ in range(100):
        troubles.failed("claim emails", "connection refused", 1.23456)
    troubles.worked("claim emails")
    troubles.worked("claim emails")
    assert recorded.all == [
        ApiTroubled("claim emails", "connection refused", 1.235),
        ApiRecovered("claim emails", 100),
    ]


def test_another_reason_that_lasts_is_told_after_a_while(clock: FakeClock) -> None:
    events = Events()
    recorded, troubles = Recorded(events), Troubles(events)
    troubles.failed("settle", "connection refused", None)
    for _ in range(3):
        clock.advance(RETOLD_S / 2)
        troubles.failed("settle", "HTTP 503", 2.0)
    assert recorded.all == [ApiTroubled("settle", "connection refused", None), ApiTroubled("settle", "HTTP 503", 2.0)]
    assert troubles.reasons == ["settle: HTTP 503"]


def test_an_outage_with_two_reasons_by_turns_is_not_told_with_each_of_them(clock: FakeClock) -> None:
    """Our own wire and a library put the same outage in other words."""
    events = Events()
    recorded, troubles = Recorded(events), Troubles(events)
    for _ in range(3600):
        troubles.failed("settle", "no connection: Connect call failed", 0.5)
        clock.advance(0.5)
        troubles.failed("settle", "failed to connect to all addresses", 0.5)
        clock.advance(0.5)
    troubles.worked("settle")
    assert recorded.names == ["api_troubled", "api_troubled", "api_recovered"]


def test_the_reason_of_now_is_seen_before_it_is_told(clock: FakeClock) -> None:
    troubles = Troubles(Events())
    for reason in ("connection refused", "connection refused", "HTTP 503"):
        troubles.failed("register", reason, 1.0)
    assert troubles.reasons == ["register: HTTP 503"]


def test_reasons_that_are_never_the_same_are_told_once_a_minute(clock: FakeClock) -> None:
    events = Events()
    recorded, troubles = Recorded(events), Troubles(events)
    for n in range(3600):
        troubles.failed("settle", f"not HTTP/2: {n}", 1.0)
        clock.advance(1.0)
    assert len(recorded.of(ApiTroubled)) == 3600 / RETOLD_S


def test_another_reason_of_what_is_not_tried_again_is_told_at_once(clock: FakeClock) -> None:
    events = Events()
    recorded, troubles = Recorded(events), Troubles(events)
    troubles.failed("stream emails", "connection refused", 1.0)
    for _ in range(2):
        troubles.failed("stream emails", "jobs are pushed ahead", None, is_optional=True)
    assert [event.reason for event in recorded.of(ApiTroubled)] == ["connection refused", "jobs are pushed ahead"]


@pytest.mark.parametrize("ends", ["worked", "forget"])
def test_the_next_outage_is_told_at_once_whatever_its_reason(clock: FakeClock, ends: str) -> None:
    events = Events()
    recorded, troubles = Recorded(events), Troubles(events)
    for reason in ("connection refused", "connection refused", "HTTP 503"):
        troubles.failed("register", reason, 1.0)
        getattr(troubles, ends)("register")
    assert [event.reason for event in recorded.of(ApiTroubled)] == ["connection refused"] * 2 + ["HTTP 503"]


def test_operations_are_counted_apart() -> None:
    events = Events()
    recorded, troubles = Recorded(events), Troubles(events)
    troubles.failed("claim a", "x", 1.0)
    troubles.failed("claim b", "x", 1.0)
    troubles.worked("claim a")
    assert recorded.names == ["api_troubled", "api_troubled", "api_recovered"]
    assert recorded.of(ApiRecovered) == [ApiRecovered("claim a", 1)]


def test_a_success_without_a_failure_is_not_told() -> None:
    events = Events()
    recorded = Recorded(events)
    Troubles(events).worked("register")
    assert recorded.all == []


def test_what_fails_again_and_again_becomes_a_reason_until_it_works() -> None:
    troubles = Troubles(Events())
    for _ in range(PERSISTENT_FAILURES - 1):
        troubles.failed("register", "HTTP 500", 1.0)
    assert troubles.reasons == []
    troubles.failed("register", "HTTP 503", 1.0)
    assert troubles.reasons == ["register: HTTP 503"]
    troubles.worked("register")
    assert troubles.reasons == []


@pytest.mark.parametrize(("retry_in_s", "lasts_s"), [(None, FRESH_S), (5.0, FRESH_S), (300.0, 600.0)])
def test_what_is_not_tried_any_more_is_no_reason_for_ever(
    clock: FakeClock, retry_in_s: float | None, lasts_s: float
) -> None:
    """The lease of the only report has ended, say: nothing will ever show that it works again."""
    troubles = Troubles(Events())
    for _ in range(PERSISTENT_FAILURES):
        troubles.failed("settle", "HTTP 503", retry_in_s)
    clock.advance(lasts_s - 0.1)
    assert troubles.reasons == ["settle: HTTP 503"]
    clock.advance(0.1)
    assert troubles.reasons == []
    troubles.failed("settle", "HTTP 503", retry_in_s)
    assert troubles.reasons == ["settle: HTTP 503"], "it goes on after all"


def test_what_is_forgotten_is_no_reason_and_nobody_says_that_it_works() -> None:
    events = Events()
    recorded, troubles = Recorded(events), Troubles(events)
    for _ in range(PERSISTENT_FAILURES):
        troubles.failed("claim old", "HTTP 404", 1.0)
    troubles.forget("claim old")
    troubles.forget("claim never tried")
    troubles.worked("claim old")
    assert troubles.reasons == []
    assert recorded.names == ["api_troubled"]
