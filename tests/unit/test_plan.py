"""What the pool must do next: slots, children, waiting runs and an instant in, actions out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spooled_supervisor.childlink import ChildLink, Run
from spooled_supervisor.lifecycle import CHILD, ChildState
from spooled_supervisor.plan import (
    ISOLATION,
    RENEWED_AT_ONCE,
    Action,
    Give,
    Kill,
    Retire,
    Slot,
    Start,
    TimeOut,
    next_deadline,
    plan,
)
from tests.support.fakes import make_child, make_job, make_run

INF = float("inf")


def slots_of(*children: ChildLink | None) -> list[Slot]:
    return [Slot(index, child) for index, child in enumerate(children)]


def runs_of(*queues: str) -> list[Run]:
    jobs = (make_job(id=f"job-{n}", queue_name=queue, lease_duration_s=3600.0) for n, queue in enumerate(queues, 1))
    return [make_run(n, job) for n, job in enumerate(jobs, 1)]


def planned(
    at: float = 100.0,
    *,
    slots: Sequence[Slot] = (),
    children: Sequence[ChildLink] | None = None,
    waiting: Sequence[Run] = (),
    caps: Mapping[str, int] | None = None,
    may_start: bool = False,
) -> list[Action]:
    if children is None:
        children = [slot.child for slot in slots if slot.child is not None]
    return plan(at, slots=slots, children=children, waiting=waiting, caps=caps or {}, may_start=may_start)


def a_busy(
    slot: int = 0, *, queue: str = "emails", started_at: float | None = 50.0, deadline: float = INF
) -> ChildLink:
    run = make_run(9, make_job(id="running", queue_name=queue))
    run.started_at = started_at
    return make_child(slot, ChildState.BUSY, run=run, deadline=deadline)


# --- giving -----------------------------------------------------------------------------------------------------------


def test_nothing_to_do_is_nothing_done() -> None:
    assert planned() == []
    assert planned(slots=slots_of(make_child(), a_busy(1))) == []


def test_runs_are_given_to_idle_children_in_order() -> None:
    first, second, third = runs_of("a", "b", "c")
    one, two = make_child(0), make_child(2)
    slots = slots_of(one, a_busy(1), two)
    assert planned(slots=slots, waiting=[first, second, third]) == [Give(one, first), Give(two, second)]


@pytest.mark.parametrize("state", [state for state in ChildState if state is not ChildState.IDLE])
def test_only_an_idle_child_is_given_a_run(state: ChildState) -> None:
    child = make_child(0, state, run=make_run())
    assert planned(slots=slots_of(child), waiting=runs_of("a")) == []


def test_an_idle_child_that_has_left_its_slot_gets_nothing() -> None:
    assert planned(slots=slots_of(None), children=[make_child()], waiting=runs_of("a")) == []


def test_a_queue_at_its_cap_waits_and_the_next_one_goes_first() -> None:
    first, second, third = runs_of("capped", "capped", "free")
    one, two, three = make_child(0), make_child(1), make_child(2)
    slots = slots_of(one, two, three)
    given = planned(slots=slots, waiting=[first, second, third], caps={"capped": 1})
    assert given == [Give(one, first), Give(two, third)]


def test_running_jobs_count_for_the_cap() -> None:
    (run,) = runs_of("capped")
    slots = slots_of(a_busy(0, queue="capped"), make_child(1))
    assert planned(slots=slots, waiting=[run], caps={"capped": 1}) == []
    assert planned(slots=slots, waiting=[run], caps={"capped": 2}) == [Give(slots[1].child, run)]  # type: ignore[arg-type]


def test_a_cap_of_another_queue_does_not_matter() -> None:
    (run,) = runs_of("free")
    slots = slots_of(a_busy(0, queue="capped"), make_child(1))
    assert planned(slots=slots, waiting=[run], caps={"capped": 1}) == [Give(slots[1].child, run)]  # type: ignore[arg-type]


@given(
    st.lists(st.sampled_from([ChildState.IDLE, ChildState.BUSY, ChildState.STARTING, None]), max_size=8),
    st.lists(st.sampled_from("abc"), max_size=12),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 3)),
)
def test_no_plan_gives_twice_breaks_a_cap_or_leaves_work_undone(
    states: list[ChildState | None], queues: list[str], caps: dict[str, int]
) -> None:
    children = [
        None if s is None else a_busy(i, queue="a") if s is ChildState.BUSY else make_child(i, s)
        for i, s in enumerate(states)
    ]
    slots, waiting = slots_of(*children), runs_of(*queues)
    gifts = [action for action in planned(slots=slots, waiting=waiting, caps=caps) if isinstance(action, Give)]
    assert len({id(gift.child) for gift in gifts}) == len(gifts)
    assert len({gift.run.number for gift in gifts}) == len(gifts)
    assert all(gift.child.state is ChildState.IDLE for gift in gifts)
    running: dict[str, int] = {"a": states.count(ChildState.BUSY)}
    for gift in gifts:
        queue = gift.run.job.queue_name
        running[queue] = running.get(queue, 0) + 1
        assert running[queue] <= caps.get(queue, INF)
    left = [run for run in waiting if run not in [gift.run for gift in gifts]]
    if len(gifts) < states.count(ChildState.IDLE):
        assert all(running.get(run.job.queue_name, 0) >= caps.get(run.job.queue_name, INF) for run in left)
    of_one_queue = [gift.run.number for gift in gifts if gift.run.job.queue_name == "b"]
    assert of_one_queue == sorted(of_one_queue)


# --- a job that has to be alone ---------------------------------------------------------------------------------------


def used(child: ChildLink, jobs_done: int) -> ChildLink:
    child.jobs_done = jobs_done
    return child


def test_an_isolated_run_takes_a_fresh_child_even_if_it_is_not_the_first() -> None:
    (run,) = runs_of("a")
    run.is_isolated = True
    old, fresh = used(make_child(0), 3), used(make_child(1), 0)
    assert planned(slots=slots_of(old, fresh), waiting=[run]) == [Give(fresh, run)]


def test_a_run_whose_lease_is_over_is_not_begun_and_the_next_one_is() -> None:
    """The machine may have slept; whoever looks after the leases takes it back."""
    late, good = runs_of("a", "a")
    child = make_child(0)
    late.lease.count_from(90.0 - 3600.0)
    assert planned(slots=slots_of(child), waiting=[late, good]) == [Give(child, good)]
    late.lease.count_from(90.0)
    assert planned(slots=slots_of(child), waiting=[late, good]) == [Give(child, late)]


def test_without_a_fresh_child_an_old_one_makes_room_and_the_others_work_on() -> None:
    alone, other = runs_of("a", "b")
    alone.is_isolated = True
    one, two = used(make_child(0), 3), used(make_child(1), 1)
    slots = slots_of(one, two)
    assert planned(slots=slots, waiting=[alone, other], may_start=True) == [Retire(one, ISOLATION), Give(two, other)]
    assert planned(slots=slots, waiting=[alone, other]) == [Give(one, other)], "nobody would take its place"


def test_one_isolated_run_costs_one_child_and_not_one_in_each_turn() -> None:
    """The fresh one takes its time to start."""
    alone, too = runs_of("a", "b")
    alone.is_isolated = too.is_isolated = True
    old = used(make_child(0), 3)
    for coming in (
        Slot(1, None, not_before=INF),
        Slot(1, None, is_forking=True),
        Slot(1, make_child(1, state=ChildState.STARTING)),
        Slot(1, used(make_child(1), 3), successor=make_child(2, state=ChildState.STARTING)),
    ):
        slots = [Slot(0, old), coming]
        assert planned(slots=slots, waiting=[alone], may_start=True) == []
        assert planned(slots=slots, waiting=[alone, too], may_start=True) == [Retire(old, ISOLATION)]


# --- starting ---------------------------------------------------------------------------------------------------------


def test_an_empty_slot_is_filled() -> None:
    slots = slots_of(None, make_child(1), None)
    assert planned(slots=slots, may_start=True) == [Start(slots[0]), Start(slots[2])]


def test_nothing_is_started_while_that_is_not_allowed() -> None:
    assert planned(slots=slots_of(None), may_start=False) == []


def test_a_slot_whose_fork_is_open_is_not_filled_again() -> None:
    slot = Slot(0, is_forking=True)
    assert planned(slots=[slot], may_start=True) == []


def test_a_slot_in_back_off_is_filled_when_its_time_has_come() -> None:
    slot = Slot(0, not_before=100.5)
    assert planned(100.0, slots=[slot], may_start=True) == []
    assert planned(100.5, slots=[slot], may_start=True) == [Start(slot)]


def test_a_slot_backs_off_from_a_tenth_of_a_second_to_half_a_minute() -> None:
    slot = Slot(0)
    delays = [slot.backoff.next_delay() for _ in range(20)]
    assert 0.05 <= delays[0] <= 0.1
    assert 15.0 <= delays[-1] <= 30.0


def test_a_slot_has_an_idle_child_only_while_that_child_is_idle() -> None:
    child = make_child(0)
    assert Slot(0, child).idle_child is child
    assert Slot(0, a_busy()).idle_child is None
    assert Slot(0).idle_child is None


# --- successors -------------------------------------------------------------------------------------------------------


def renewed(*slots: Slot) -> list[Slot]:
    """All of these are to have a successor."""
    for slot in slots:
        slot.renew_reason = "reload"
    return list(slots)


def test_an_idle_child_that_is_to_be_replaced_gets_a_successor_beside_it() -> None:
    (slot,) = renewed(*slots_of(make_child(0)))
    assert planned(slots=[slot], may_start=True) == [Start(slot)]
    assert slot.idle_child is not None, "which serves until the other is ready"


def test_a_child_that_nobody_wants_to_replace_gets_none() -> None:
    assert planned(slots=slots_of(make_child(0)), may_start=True) == []


@pytest.mark.parametrize("state", [ChildState.STARTING, ChildState.BUSY, ChildState.ABORTING])
def test_a_child_that_could_not_leave_gets_none_yet(state: ChildState) -> None:
    slots = renewed(*slots_of(make_child(0, state, run=make_run())))
    assert planned(slots=slots, may_start=True) == []


def test_a_busy_one_does_not_keep_the_idle_ones_from_theirs() -> None:
    slots = renewed(*slots_of(a_busy(0), make_child(1)))
    assert planned(slots=slots, may_start=True) == [Start(slots[1])]


@pytest.mark.parametrize(("procs", "at_once"), [(1, 1), (2, 1), (3, 1), (4, 1), (7, 1), (8, 2), (16, 4), (19, 4)])
def test_a_few_are_renewed_at_a_time(procs: int, at_once: int) -> None:
    slots = renewed(*slots_of(*[make_child(n) for n in range(procs)]))
    assert planned(slots=slots, may_start=True) == [Start(slot) for slot in slots[:at_once]]


@pytest.mark.parametrize("boots", [False, True], ids=["being forked", "booting"])
def test_the_next_one_waits_for_a_successor_that_is_on_its_way(boots: bool) -> None:
    slots = renewed(*slots_of(make_child(0), make_child(1)))
    if boots:
        slots[0].successor = make_child(0, ChildState.STARTING)
    else:
        slots[0].is_forking = True
    assert planned(slots=slots, may_start=True) == []
    slots[0] = Slot(0, make_child(0))
    assert planned(slots=slots, may_start=True) == [Start(slots[1])]


def test_an_empty_slot_is_filled_however_many_successors_are_on_their_way() -> None:
    one, two, *_ = slots = [*renewed(*slots_of(make_child(0), make_child(1))), Slot(2), Slot(3, make_child(3))]
    one.successor = make_child(0, ChildState.STARTING)
    assert planned(slots=slots, may_start=True) == [Start(slots[2])]
    assert two.renew_reason, "it is still to be replaced"


def test_a_slot_whose_child_died_is_not_filled_beside_its_successor() -> None:
    slot = Slot(0, successor=make_child(0, ChildState.STARTING), renew_reason="reload")
    assert planned(slots=[slot], may_start=True) == []


def test_a_successor_that_failed_is_tried_again_after_the_back_off_and_the_old_child_serves_on() -> None:
    (slot,) = renewed(*slots_of(make_child(0)))
    slot.not_before = 105.0
    (run,) = runs_of("a")
    assert planned(100.0, slots=[slot], waiting=[run], may_start=True) == [Give(slot.child, run)]  # type: ignore[arg-type]
    assert planned(105.0, slots=[slot], may_start=True) == [Start(slot)]
    assert next_deadline(100.0, slots=[slot], children=[], may_start=True) == 105.0


def test_a_slot_whose_successor_is_put_off_does_not_hold_up_the_others() -> None:
    slots = renewed(*slots_of(make_child(0), make_child(1)))
    slots[0].not_before = 105.0
    assert planned(100.0, slots=slots, may_start=True) == [Start(slots[1])]


def test_no_successor_is_started_while_nothing_may_be() -> None:
    assert planned(slots=renewed(*slots_of(make_child(0))), may_start=False) == []


def test_a_child_with_a_successor_on_its_way_is_still_given_work() -> None:
    (slot,) = renewed(*slots_of(make_child(0)))
    slot.successor = make_child(0, ChildState.IDLE)
    (run,) = runs_of("a")
    assert planned(slots=[slot], waiting=[run], may_start=True) == [Give(slot.child, run)]  # type: ignore[arg-type]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([ChildState.IDLE, ChildState.BUSY, ChildState.STARTING, None]),
            st.booleans(),
            st.sampled_from(["", "forking", "booting"]),
            st.sampled_from([0.0, 200.0]),
        ),
        max_size=20,
    )
)
def test_whatever_is_renewed_there_are_never_more_starts_than_places_and_a_few(
    drawn: list[tuple[ChildState | None, bool, str, float]],
) -> None:
    slots = []
    for index, (state, is_renewed, successor, not_before) in enumerate(drawn):
        child = None if state is None else make_child(index, state, run=make_run())
        slot = Slot(index, child, not_before=not_before, renew_reason="reload" if is_renewed else None)
        slot.is_forking = successor == "forking"
        if successor == "booting" and is_renewed:
            slot.successor = make_child(index, ChildState.STARTING)
        slots.append(slot)
    started = [action.slot for action in planned(slots=slots, may_start=True) if isinstance(action, Start)]
    assert len({slot.index for slot in started}) == len(started)
    for slot in started:
        assert not slot.is_forking
        assert slot.successor is None
        assert slot.not_before <= 100.0
        assert slot.child is None or slot.renew_reason
    empty = [s for s in slots if s.child is None and not s.successor and not s.is_forking and not s.not_before]
    assert [slot for slot in started if slot.child is None] == empty, "every empty place is filled"
    on_their_way = sum(bool(s.renew_reason and (s.is_forking or s.successor)) for s in slots)
    succeeded = sum(slot.child is not None for slot in started)
    assert succeeded == 0 or succeeded + on_their_way <= max(1, len(slots) // RENEWED_AT_ONCE)


# --- deadlines --------------------------------------------------------------------------------------------------------


def overdue(state: ChildState, **run: Any) -> list[Action]:
    """What is planned for a child in this state whose deadline has passed."""
    its_run = None
    if state in (ChildState.BUSY, ChildState.ABORTING):
        its_run = make_run()
        for name, value in run.items():
            setattr(its_run, name, value)
    child = make_child(0, state, run=its_run, deadline=100.0)
    assert planned(99.9, slots=[], children=[child]) == []
    found = planned(100.0, slots=[], children=[child])
    assert all(isinstance(action, TimeOut | Kill) and action.child is child for action in found)
    return found


def reason_of(actions: list[Action]) -> str:
    (action,) = actions
    assert isinstance(action, Kill)
    return action.reason


def test_a_child_that_does_not_get_ready_is_killed() -> None:
    assert reason_of(overdue(ChildState.STARTING)) == "boot"


def test_a_running_job_that_is_over_its_limit_is_told_to_stop() -> None:
    assert [type(action) for action in overdue(ChildState.BUSY, started_at=40.0)] == [TimeOut]


def test_a_child_that_never_takes_its_job_is_killed() -> None:
    assert reason_of(overdue(ChildState.BUSY, started_at=None)) == "unresponsive"


@pytest.mark.parametrize(
    ("abort_reason", "kill_reason"),
    [
        ("timeout", "timeout"),
        ("lease_lost", "lease_lost"),
        ("operator", "operator"),
        ("shutdown", "timeout"),  # the drain only asked; what has passed is the job's own limit
        (None, "timeout"),
    ],
)
def test_a_job_that_does_not_stop_is_killed_for_what_it_was_told(abort_reason: str | None, kill_reason: str) -> None:
    assert reason_of(overdue(ChildState.ABORTING, started_at=40.0, abort_reason=abort_reason)) == kill_reason


@pytest.mark.parametrize(
    ("abort_reason", "kill_reason"), [("shutdown", "unresponsive"), (None, "unresponsive"), ("operator", "operator")]
)
def test_a_job_that_was_never_begun_has_not_run_out_of_time(abort_reason: str | None, kill_reason: str) -> None:
    """A drain has told its child to stop, which did not even hear that it has a job."""
    assert reason_of(overdue(ChildState.ABORTING, started_at=None, abort_reason=abort_reason)) == kill_reason


def test_a_child_that_does_not_leave_is_killed() -> None:
    assert reason_of(overdue(ChildState.STOPPING)) == "exit"


@pytest.mark.parametrize("state", [state for state in CHILD if state is not ChildState.GONE])
def test_a_child_without_a_deadline_is_never_overdue(state: ChildState) -> None:
    assert planned(1e9, children=[make_child(0, state, run=make_run())]) == []


def test_the_overdue_come_before_starts_and_gifts() -> None:
    late, (run,) = a_busy(0, deadline=90.0), runs_of("a")
    idle = make_child(2)
    slots = [Slot(0, late), Slot(1), Slot(2, idle)]
    assert planned(slots=slots, waiting=[run], may_start=True) == [TimeOut(late), Start(slots[1]), Give(idle, run)]


def test_the_next_deadline_is_the_earliest_of_children_and_empty_slots() -> None:
    children = [make_child(0), make_child(1, ChildState.STARTING, deadline=30.0), a_busy(2, deadline=20.0)]
    slots = [Slot(0, children[0]), Slot(3, not_before=10.0), Slot(4, not_before=5.0, is_forking=True)]
    assert next_deadline(0.0, slots=slots, children=children, may_start=True) == 5.0
    assert next_deadline(7.0, slots=slots, children=children, may_start=True) == 10.0
    assert next_deadline(0.0, slots=slots, children=children, may_start=False) == 20.0
    assert next_deadline(0.0, slots=[Slot(0, children[0])], children=children[:1], may_start=True) == INF
