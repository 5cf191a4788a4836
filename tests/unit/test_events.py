"""The bus, and what every event promises."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest

from spooled_supervisor import events as happened
from spooled_supervisor.events import ApiRecovered, ClaimAnswered, Event, Events, PhaseChanged, Quieted
from tests.support.clock import fake_time, run_in_fake_time

KINDS = [kind for kind in vars(happened).values() if isinstance(kind, type) and issubclass(kind, Event)]
KINDS.remove(Event)
LEVELS = {0, logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR}


# --- the contract -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_event_is_a_frozen_record_with_a_snake_case_name_a_level_and_a_docstring(kind: type[Event]) -> None:
    assert kind.__struct_config__.frozen
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", kind.name)
    assert kind.level in LEVELS
    assert kind.__doc__


def test_names_are_those_of_the_classes_and_unique() -> None:
    assert PhaseChanged.name == "phase_changed"
    assert len({kind.name for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_durations_say_their_unit_and_nothing_carries_a_payload_or_a_key(kind: type[Event]) -> None:
    for name in kind.__struct_fields__:
        assert not re.search(r"payload|api_key|secret|token|(duration|elapsed|timeout|delay)$", name), name


# --- the bus ----------------------------------------------------------------------------------------------------------


def test_subscribers_are_told_in_the_order_of_subscription() -> None:
    events, told = Events(), list[str]()
    events.subscribe(lambda _: told.append("first"), Quieted)
    events.subscribe(lambda _: told.append("second"), Quieted)
    events.emit(Quieted("because"))
    assert told == ["first", "second"]


def test_who_listens_to_everything_is_told_first() -> None:
    events, told = Events(), list[str]()
    events.subscribe(lambda _: told.append("one kind"), Quieted)
    events.subscribe(lambda _: told.append("all"))
    events.emit(Quieted("because"))
    assert told == ["all", "one kind"]


def test_a_subscriber_is_told_only_of_its_types() -> None:
    events, told = Events(), list[Event]()
    events.subscribe(told.append, Quieted, ApiRecovered)
    for event in (Quieted("a"), PhaseChanged("running", "b"), ApiRecovered("c", 1)):
        events.emit(event)
    assert told == [Quieted("a"), ApiRecovered("c", 1)]


def test_after_unsubscribing_nothing_is_told_and_doing_it_twice_is_fine() -> None:
    events, told = Events(), list[Event]()
    unsubscribe = events.subscribe(told.append, Quieted, PhaseChanged)
    unsubscribe()
    unsubscribe()
    events.emit(Quieted("a"))
    assert told == []


def test_a_subscriber_that_raises_is_logged_and_the_others_are_told(caplog: pytest.LogCaptureFixture) -> None:
    events, told = Events(), list[Event]()

    def fails(_event: Event) -> None:
        raise RuntimeError("broken subscriber")

    events.subscribe(fails)
    events.subscribe(told.append)
    events.emit(Quieted("a"))
    assert told == [Quieted("a")]
    assert "quieted" in caplog.text
    assert "broken subscriber" in caplog.text


def test_who_unsubscribes_while_being_told_does_not_cost_others_their_event() -> None:
    events, told = Events(), list[str]()

    def once(_event: Event) -> None:
        told.append("once")
        unsubscribe()

    unsubscribe = events.subscribe(once)
    events.subscribe(lambda _: told.append("always"))
    events.emit(Quieted("a"))
    events.emit(Quieted("b"))
    assert told == ["once", "always", "always"]


def test_waiting_finds_the_next_event_with_these_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> ClaimAnswered:
        events = Events()
        loop = asyncio.get_running_loop()
        for delay, event in enumerate(
            [Quieted("x"), ClaimAnswered("a", 1, 0), ClaimAnswered("b", 1, 0), ClaimAnswered("b", 1, 1)]
        ):
            loop.call_later(delay, events.emit, event)
        return await events.wait_for(ClaimAnswered, queue_name="b")

    assert run_in_fake_time(fake_time(monkeypatch), main()) == ClaimAnswered("b", 1, 0)


def test_waiting_for_what_never_happens_times_out_and_leaves_no_subscriber(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = fake_time(monkeypatch)

    async def main() -> Events:
        events = Events()
        with pytest.raises(TimeoutError):
            await events.wait_for(Quieted, timeout_s=3.0)
        return events

    begun = clock()
    events = run_in_fake_time(clock, main())
    assert clock() == pytest.approx(begun + 3.0)
    assert events._by_type == {Quieted: []}
