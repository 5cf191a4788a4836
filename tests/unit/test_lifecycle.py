"""The transition tables, exhaustively, and the diagrams that are printed from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

import pytest

from spooled_supervisor import lifecycle
from spooled_supervisor.errors import IllegalTransition
from spooled_supervisor.lifecycle import (
    CHILD,
    LEASE,
    ChildEvent,
    ChildState,
    LeaseEvent,
    LeaseState,
    Phase,
    advance,
    diagram,
)

Table = Mapping[Any, Mapping[Any, Any]]
TABLES: list[tuple[Table, type[Enum], type[Enum]]] = [
    (CHILD, ChildState, ChildEvent),
    (LEASE, LeaseState, LeaseEvent),
]
PAIRS = [(table, state, event) for table, states, events in TABLES for state in states for event in events]


def name_of(value: object) -> str:
    return value.name if isinstance(value, Enum) else ""


@pytest.mark.parametrize(("table", "states", "events"), TABLES)
def test_every_state_has_a_row_and_every_entry_is_of_the_right_kind(
    table: Table, states: type[Enum], events: type[Enum]
) -> None:
    assert list(table) == list(states)
    for row in table.values():
        assert all(isinstance(event, events) and isinstance(state, states) for event, state in row.items())


@pytest.mark.parametrize(("table", "states", "events"), TABLES)
def test_every_state_can_be_reached_and_every_event_can_happen(
    table: Table, states: type[Enum], events: type[Enum]
) -> None:
    reached, open_ = set(), [next(iter(states))]
    while open_:
        state = open_.pop()
        if state not in reached:
            reached.add(state)
            open_.extend(table[state].values())
    assert reached == set(states)
    assert {event for row in table.values() for event in row} == set(events)


@pytest.mark.parametrize(("table", "state", "event"), PAIRS, ids=name_of)
def test_each_pair_is_in_the_table_or_raises(table: Table, state: Enum, event: Enum) -> None:
    before = {key: dict(row) for key, row in table.items()}
    if event in table[state]:
        assert advance(table, state, event) is table[state][event]
    else:
        with pytest.raises(IllegalTransition) as caught:
            advance(table, state, event)
        assert str(caught.value) == f"{type(state).__name__}: {event.name} cannot happen in {state.name}"
    assert {key: dict(row) for key, row in table.items()} == before


def test_a_living_child_may_end_at_any_time_and_a_gone_one_never_again() -> None:
    for state in ChildState:
        assert CHILD[state].get(ChildEvent.EXITED) is (None if state is ChildState.GONE else ChildState.GONE)
    assert CHILD[ChildState.GONE] == {}


def test_a_living_child_may_be_killed_at_any_time_and_then_only_ends() -> None:
    for state in set(ChildState) - {ChildState.GONE}:
        assert CHILD[state][ChildEvent.WAS_KILLED] is ChildState.KILLED
    assert set(CHILD[ChildState.KILLED]) == {ChildEvent.WAS_KILLED, ChildEvent.EXITED}


def test_only_an_idle_child_is_given_a_job() -> None:
    assert [state for state in ChildState if ChildEvent.WAS_GIVEN_JOB in CHILD[state]] == [ChildState.IDLE]


def test_a_lease_ends_settled_or_lost_and_stays_so() -> None:
    assert [state for state in LeaseState if not LEASE[state]] == [LeaseState.SETTLED, LeaseState.LOST]
    for state in (LeaseState.HELD, LeaseState.SETTLING):
        for event in (LeaseEvent.RAN_OUT_OF_TIME, LeaseEvent.WAS_REFUSED, LeaseEvent.WAS_DROPPED):
            assert LEASE[state][event] is LeaseState.LOST


def test_an_outcome_is_taken_only_after_it_was_decided() -> None:
    assert LeaseEvent.WAS_TAKEN not in LEASE[LeaseState.HELD]
    assert LeaseEvent.WAS_DECIDED not in LEASE[LeaseState.SETTLING]


def test_phases_grow_in_the_order_of_a_life() -> None:
    assert [phase.name for phase in sorted(Phase)] == ["BOOTING", "RUNNING", "DRAINING", "STOPPING", "STOPPED"]


@pytest.mark.parametrize(("title", "table"), [("Child", CHILD), ("Lease", LEASE)])
def test_the_diagram_in_the_docstring_is_the_one_that_the_table_prints(title: str, table: Table) -> None:
    assert lifecycle.__doc__
    section = re.search(rf"^{title}:\n((?:    .*\n?)+)", lifecycle.__doc__, re.MULTILINE)
    assert section
    lines = re.sub(r"\n {8,}", " ", section[1].rstrip("\n")).splitlines()  # a row that was wrapped is one line
    assert [line.removeprefix("    ") for line in lines] == diagram(table).splitlines()
