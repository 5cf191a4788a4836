"""An outage is two lines in the log, and a reason while it lasts."""

from __future__ import annotations

from spooled_supervisor.events import ApiRecovered, ApiTroubled, Events
from spooled_supervisor.troubles import PERSISTENT_FAILURES, Troubles
from tests.support.fakes import Recorded


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


def test_another_reason_is_told_too() -> None:
    events = Events()
    recorded, troubles = Recorded(events), Troubles(events)
    troubles.failed("settle", "connection refused", None)
    troubles.failed("settle", "HTTP 503", 2.0)
    assert [event.reason for event in recorded.of(ApiTroubled)] == ["connection refused", "HTTP 503"]
    assert [event.retry_in_s for event in recorded.of(ApiTroubled)] == [None, 2.0]


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
