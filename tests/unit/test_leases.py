"""Leases as histories: what happened and when, and what was due because of it.

A lease of 40 s with a grace of 5 s, as most of these tests hold one: renewed from 20 s on, aborted at 33 s, killed at
38 s, over at 40 s after the start of the request that won it.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spooled_supervisor.config import abort_after_s
from spooled_supervisor.errors import IllegalTransition
from spooled_supervisor.leases import Due, Lease, LeaseBook
from spooled_supervisor.lifecycle import LeaseState
from spooled_supervisor.timing import Backoff
from tests.support.fakes import make_job

INF = float("inf")


def a_book(*, fraction: float = 0.5, grace_s: float = 5.0) -> LeaseBook:
    return LeaseBook(fraction=fraction, abort_grace_s=grace_s)


def held(book: LeaseBook, at: float = 0.0, duration_s: float = 40.0, **job: Any) -> Lease:
    lease = book.hold(make_job(requested_at=at, lease_duration_s=duration_s, **job))
    assert lease is not None
    return lease


def told(due: Due) -> dict[str, list[str]]:
    """What is due, by name; only what is not empty."""
    lists = {"renew": due.renew, "lapsed": due.lapsed, "abort": due.abort, "kill": due.kill, "ended": due.ended}
    return {name: [lease.job.id for lease in leases] for name, leases in lists.items() if leases}


def history(book: LeaseBook, *instants: float) -> list[tuple[float, dict[str, list[str]]]]:
    """What the book says at these instants; the silent ones are left out."""
    return [(at, what) for at in instants if (what := told(book.due(at)))]


# --- the instants -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("duration_s", "grace_s", "abort_at", "kill_at"),
    [
        (40.0, 5.0, 33.0, 38.0),  # 5 % before the end, then the whole grace
        (30.0, 5.0, 23.5, 28.5),
        (30.0, 60.0, 21.0, 28.5),  # a grace of a quarter of the lease at most
        (10.0, 5.0, 7.0, 9.5),
        (5.0, 5.0, 3.25, 4.5),  # half a second before the end at least
        (3600.0, 5.0, 3415.0, 3420.0),
        (30.0, 0.0, 28.5, 28.5),
    ],
)
def test_the_instants_follow_from_the_start_of_the_request(
    duration_s: float, grace_s: float, abort_at: float, kill_at: float
) -> None:
    lease = held(a_book(grace_s=grace_s), 1000.0, duration_s)
    assert lease.abort_at == pytest.approx(1000.0 + abort_at)
    assert lease.kill_at == pytest.approx(1000.0 + kill_at)
    assert lease.end == 1000.0 + duration_s
    assert lease.renew_at == 1000.0 + duration_s / 2


@given(st.floats(5.0, 3600.0), st.floats(0.0, 600.0))
def test_the_configuration_counts_the_abort_by_the_same_formula(duration_s: float, grace_s: float) -> None:
    lease = held(a_book(grace_s=grace_s), 0.0, duration_s)
    assert lease.abort_at == pytest.approx(abort_after_s(duration_s, grace_s))
    assert 0.0 < lease.abort_at <= lease.kill_at < lease.end


def test_the_fraction_moves_the_first_renewal_only() -> None:
    lease = held(a_book(fraction=0.25))
    assert (lease.renew_at, lease.abort_at, lease.kill_at, lease.end) == (10.0, 33.0, 38.0, 40.0)


# --- histories --------------------------------------------------------------------------------------------------------


def test_a_lease_that_is_never_renewed_fences_itself() -> None:
    book = a_book()
    lease = held(book)
    assert history(book, 0.0, 19.9, 20.0, 25.0, 32.9, 33.0, 35.0, 37.9, 38.0, 39.0, 39.9, 40.0, 41.0) == [
        (20.0, {"renew": ["job-1"]}),
        (33.0, {"abort": ["job-1"]}),
        (38.0, {"kill": ["job-1"]}),
        (40.0, {"ended": ["job-1"]}),
    ]
    assert lease.state is LeaseState.LOST
    assert len(book) == 0


def test_a_renewal_counts_from_its_own_start_and_not_from_its_answer() -> None:
    book = a_book()
    lease = held(book)
    assert history(book, 20.0) == [(20.0, {"renew": ["job-1"]})]
    book.renewed(lease, 20.0)  # answered at 29, say
    assert (lease.renew_at, lease.abort_at, lease.end) == (40.0, 53.0, 60.0)
    assert history(book, 29.0, 33.0, 38.0, 39.9, 40.0) == [(40.0, {"renew": ["job-1"]})]


def test_a_failed_renewal_is_tried_again_until_the_abort() -> None:
    book = a_book()
    lease = held(book)
    at, tries = 0.0, 0
    while not (what := book.due(at)).abort:
        if what.renew:
            tries += 1
            book.renewal_failed(lease, at)
        at = book.next_due()
    assert at == 33.0
    assert tries > 3
    assert told(book.due(37.0)) == {}, "nothing is renewed between abort and kill"


def test_a_failed_renewal_waits_longer_each_time_and_a_success_forgets_it() -> None:
    book = a_book()
    lease = held(book, duration_s=3600.0)
    lease.backoff = Backoff(0.25, 5.0, rng=random.Random(3))
    waits = [book.renewal_failed(lease, 1800.0) - 1800.0 for _ in range(8)]
    assert all(wait <= 5.0 for wait in waits)
    assert waits[0] <= 0.25 < 2.5 <= waits[-1]
    book.renewed(lease, 1801.0)
    assert book.renewal_failed(lease, 1802.0) - 1802.0 <= 0.25


@pytest.mark.parametrize("hint_s", [7.0, 60.0, 3600.0])
def test_a_hint_that_is_longer_than_the_lease_still_leaves_time_for_another_try(hint_s: float) -> None:
    book = a_book()
    lease = held(book)
    book.due(20.0)
    assert book.renewal_failed(lease, 20.0, retry_after_s=hint_s) == pytest.approx(26.5)  # half of what is left


def test_a_short_hint_is_obeyed() -> None:
    book = a_book()
    lease = held(book)
    book.due(20.0)
    assert book.renewal_failed(lease, 20.0, retry_after_s=3.0) == 23.0


def test_hints_without_end_lead_to_many_tries_and_not_to_none() -> None:
    book = a_book()
    lease = held(book)
    at, tries = 0.0, 0
    while not (what := book.due(at)).abort:
        if what.renew:
            tries += 1
            book.renewal_failed(lease, at, retry_after_s=300.0)
        at = book.next_due()
    assert tries >= 4


def test_one_renewal_at_a_time() -> None:
    book = a_book()
    held(book)
    assert history(book, 20.0, 21.0, 25.0, 32.0) == [(20.0, {"renew": ["job-1"]})]


def test_a_renewal_that_is_answered_after_the_abort_changes_nothing() -> None:
    book = a_book()
    lease = held(book)
    book.due(20.0)
    assert told(book.due(33.0)) == {"abort": ["job-1"]}
    book.renewed(lease, 20.0)
    assert lease.end == 40.0
    assert history(book, 34.0, 38.0, 40.0) == [(38.0, {"kill": ["job-1"]}), (40.0, {"ended": ["job-1"]})]


def test_a_renewal_that_overtook_a_later_one_does_not_shorten_the_lease() -> None:
    book = a_book()
    lease = held(book, 100.0)
    book.renewed(lease, 90.0)
    assert lease.started_at == 100.0


def test_while_settling_it_is_renewed_to_the_end_and_nobody_is_aborted_or_killed() -> None:
    book = a_book()
    lease = held(book)
    book.decided(lease, 0.0)
    at, tries = 0.0, 0
    while not (what := book.due(at)).ended:
        assert set(told(what)) <= {"renew"}
        if what.renew:
            tries += 1
            book.renewal_failed(lease, at)
        at = book.next_due()
    assert at == 40.0
    assert tries > 3


def test_a_renewal_while_settling_keeps_the_lease() -> None:
    book = a_book()
    lease = held(book)
    book.decided(lease, 0.0)
    assert history(book, 20.0) == [(20.0, {"renew": ["job-1"]})]
    book.renewed(lease, 20.0)
    assert history(book, 40.0, 59.9) == [(40.0, {"renew": ["job-1"]})]
    book.settled(lease)
    assert lease.state is LeaseState.SETTLED
    assert len(book) == 0
    assert history(book, 1000.0) == []


@pytest.mark.parametrize(
    ("duration_s", "last_renewal_at", "lapsed_at"),
    [
        (10.0, 300.0, 305.0),  # ten durations are no reason yet
        (30.0, 300.0, 315.0),
        (40.0, 400.0, 420.0),
        (3600.0, 36000.0, 37800.0),
    ],
)
def test_a_lease_whose_outcome_is_never_taken_is_renewed_for_a_while_and_then_left_to_its_end(
    duration_s: float, last_renewal_at: float, lapsed_at: float
) -> None:
    book = a_book()
    lease = held(book, duration_s=duration_s)
    book.decided(lease, 1.0)
    told_at: dict[str, list[float]] = {}
    looks = 0
    while lease.is_live:
        at = book.next_due()
        due = book.due(at)
        looks += 1
        for name in told(due):
            told_at.setdefault(name, []).append(at)
        if due.renew:
            book.renewed(lease, at)
    assert told_at["renew"][-1] == last_renewal_at
    assert told_at["lapsed"] == [lapsed_at]
    assert told_at["ended"] == [last_renewal_at + duration_s]
    assert looks == len(told_at["renew"]) + 2
    assert lease.has_lapsed
    assert book.next_due() == INF


def test_a_renewal_that_is_under_way_when_the_lease_would_lapse_still_counts() -> None:
    book = a_book()
    lease = held(book)
    book.decided(lease, 0.0)
    book.renewed(lease, 379.0)
    assert history(book, 399.0) == [(399.0, {"renew": ["job-1"]})]
    assert history(book, 401.0) == []
    book.renewed(lease, 399.0)
    assert history(book, 418.9, 419.0, 420.0, 438.9, 439.0) == [
        (419.0, {"lapsed": ["job-1"]}),
        (439.0, {"ended": ["job-1"]}),
    ]


def test_an_outcome_that_is_taken_after_its_lease_has_lapsed_is_settled() -> None:
    book = a_book()
    lease = held(book)
    book.decided(lease, 0.0)
    book.renewed(lease, 390.0)
    assert history(book, 410.0) == [(410.0, {"lapsed": ["job-1"]})]
    book.settled(lease)
    assert lease.state is LeaseState.SETTLED
    assert history(book, 430.0, 1000.0) == []


def test_how_long_a_job_runs_is_no_reason_to_leave_its_lease() -> None:
    book = a_book()
    lease = held(book)
    for at in range(20, 10_000, 20):
        assert history(book, float(at)) == [(float(at), {"renew": ["job-1"]})]
        book.renewed(lease, float(at))


def test_a_lease_that_was_aborted_and_decided_after_all_is_renewed_at_once() -> None:
    book = a_book()
    lease = held(book)
    book.due(20.0)
    book.renewal_failed(lease, 20.0)
    book.due(33.0)
    book.decided(lease, 33.0)
    assert book.next_due() <= 33.0
    assert history(book, 33.0) == [(33.0, {"renew": ["job-1"]})]


# --- time jumps -------------------------------------------------------------------------------------------------------


def test_a_sleep_past_the_end_tells_the_end_and_nothing_else() -> None:
    book = a_book()
    held(book)
    assert history(book, 10.0, 5000.0, 5001.0) == [(5000.0, {"ended": ["job-1"]})]


def test_a_sleep_past_the_kill_tells_abort_and_kill_together() -> None:
    book = a_book()
    held(book)
    assert history(book, 10.0, 39.0, 39.5, 40.0) == [
        (39.0, {"abort": ["job-1"], "kill": ["job-1"]}),
        (40.0, {"ended": ["job-1"]}),
    ]


def test_a_sleep_past_the_abort_sends_no_renewal() -> None:
    book = a_book()
    held(book)
    assert history(book, 10.0, 34.0, 34.0, 38.0) == [(34.0, {"abort": ["job-1"]}), (38.0, {"kill": ["job-1"]})]


def test_a_sleep_within_the_lease_renews_at_once() -> None:
    book = a_book()
    held(book)
    assert history(book, 10.0, 30.0) == [(30.0, {"renew": ["job-1"]})]


def test_a_renewal_answered_after_a_sleep_does_not_bring_back_a_lease_that_is_over() -> None:
    book = a_book()
    lease = held(book)
    book.due(20.0)
    book.renewed(lease, 20.0)  # its answer is read at 5000, before the book is looked at
    assert history(book, 5000.0) == [(5000.0, {"ended": ["job-1"]})]


# --- the book ---------------------------------------------------------------------------------------------------------


def test_two_leases_of_one_job_live_side_by_side() -> None:
    book = a_book()
    old = held(book, 0.0, lease_id="old")
    new = held(book, 30.0, lease_id="new")
    assert len(book) == 2
    assert book.get(("job-1", "old")) is old
    assert book.get(("job-1", "new")) is new
    assert book.due(40.0).ended == [old]
    assert [lease.job.lease_id for lease in book] == ["new"]
    assert new.is_live
    book.refused(new)
    assert len(book) == 0


def test_an_answer_that_came_twice_is_held_once() -> None:
    book = a_book()
    held(book)
    assert book.hold(make_job(requested_at=5.0)) is None
    assert len(book) == 1


def test_a_job_without_a_lease_id_has_a_place_too() -> None:
    book = a_book()
    lease = held(book, lease_id=None)
    assert ("job-1", None) in book
    book.dropped(lease)
    assert ("job-1", None) not in book


@pytest.mark.parametrize("leave", ["settled", "refused", "dropped"])
def test_a_lease_that_has_left_the_book_cannot_leave_it_again(leave: str) -> None:
    book = a_book()
    lease = held(book)
    book.decided(lease, 0.0)
    getattr(book, leave)(lease)
    assert not lease.is_live
    for again in (book.settled, book.refused, book.dropped):
        with pytest.raises(IllegalTransition):
            again(lease)
    with pytest.raises(IllegalTransition):
        book.decided(lease, 0.0)


def test_what_was_not_decided_cannot_be_settled() -> None:
    book = a_book()
    lease = held(book)
    with pytest.raises(IllegalTransition):
        book.settled(lease)
    assert lease.state is LeaseState.HELD
    assert len(book) == 1


def test_answers_for_a_lease_that_has_left_change_nothing() -> None:
    book = a_book()
    lease = held(book)
    book.due(20.0)
    book.refused(lease)
    book.renewed(lease, 20.0)
    book.renewal_failed(lease, 21.0)
    assert lease.state is LeaseState.LOST
    assert history(book, 50.0, 1000.0) == []


def test_an_empty_book_waits_for_nothing() -> None:
    book = a_book()
    assert book.next_due() == INF
    lease = held(book)
    assert book.next_due() == 20.0
    book.refused(lease)
    book.due(20.0)
    assert book.next_due() == INF


def test_looking_does_not_change_a_book_in_which_nothing_is_due() -> None:
    book = a_book()
    held(book)
    for at in (0.0, 5.0, 5.0, 19.0):
        assert told(book.due(at)) == {}
    assert book.next_due() == 20.0


def test_leases_that_were_claimed_together_are_not_renewed_together_and_none_later_than_it_must_be() -> None:
    book = a_book()
    leases = [held(book, 0.0, id=f"job-{n}") for n in range(1000)]
    assert leases[0].renew_at == 20.0
    for _ in range(3):
        instants = [lease.renew_at for lease in leases]
        assert max(sum(at <= other < at + 0.01 for other in instants) for at in instants) <= 11
        assert all(16.0 <= lease.renew_at - lease.started_at <= 20.0 for lease in leases)
        for lease in leases:
            book.renewed(lease, lease.renew_at)


def test_a_short_lease_is_renewed_after_four_fifths_of_its_time_at_the_earliest() -> None:
    book = a_book()
    leases = [held(book, 0.0, 5.0, id=f"job-{n}") for n in range(1000)]
    assert min(lease.renew_at for lease in leases) >= 0.8 * 2.5


def test_what_has_left_is_not_remembered() -> None:
    book = a_book()
    stays = held(book, 0.0, id="stays")
    for n in range(10_000):
        book.refused(held(book, 0.001 * n, id=f"job-{n}"))
    assert len(book._looks) < 100
    assert book.due(20.0).renew == [stays]


# --- by property ------------------------------------------------------------------------------------------------------

steps = st.lists(
    st.tuples(
        st.sampled_from(["hold", "look", "renewed", "failed", "hinted", "decide", "settle", "refuse", "drop"]),
        st.integers(0, 2),
        st.one_of(st.floats(0.0, 3.0), st.floats(0.0, 60.0), st.just(400.0)),
    ),
    max_size=40,
)


def due_now(lease: Lease, at: float) -> bool:
    """Whether a look at this instant has something to say of this lease; written down anew, from the promises."""
    if at >= lease.end:
        return True
    if lease.state is LeaseState.SETTLING:
        return at >= lease.renew_at and not lease.renewing
    if at >= lease.kill_at:
        return not lease.killed
    if at >= lease.abort_at:
        return not lease.aborted
    return at >= lease.renew_at and not lease.renewing and not lease.aborted


@given(steps, st.floats(0.05, 0.5), st.floats(0.0, 10.0))
def test_the_book_is_never_looked_at_too_late_and_tells_everything_once(
    steps: list[tuple[str, int, float]], fraction: float, grace_s: float
) -> None:
    book = a_book(fraction=fraction, grace_s=grace_s)
    leases: list[Lease] = []
    seen: dict[int, list[str]] = {}
    at = 0.0
    for what, which, wait_s in steps:
        # The loop's promise: nothing is due before the instant that the book has named.
        next_due = book.next_due()
        for instant in (at, at + wait_s / 2, at + wait_s):
            if instant < next_due:
                assert not any(due_now(lease, instant) for lease in book), (instant, next_due)
        at += wait_s
        lease = leases[which] if which < len(leases) else None
        is_live = lease is not None and lease.is_live
        if what == "hold":
            if lease is None:
                leases.append(held(book, at, 20.0 + 10.0 * len(leases), id=f"job-{len(leases)}"))
        elif what == "look":
            due = book.due(at)
            for name, found in (
                ("renew", due.renew),
                ("lapsed", due.lapsed),
                ("abort", due.abort),
                ("kill", due.kill),
                ("end", due.ended),
            ):
                for one in found:
                    seen.setdefault(id(one), []).append(name)
            assert not any(due_now(one, at) for one in book)
        elif lease is None:
            continue
        elif what == "renewed":
            book.renewed(lease, max(lease.started_at, at - 1.0))
        elif what == "failed":
            book.renewal_failed(lease, at)
        elif what == "hinted":
            limit = max(lease.abort_at, at + 5.0)
            assert at < book.renewal_failed(lease, at, retry_after_s=wait_s * 10) <= limit
        elif what == "decide" and lease.state is LeaseState.HELD:
            book.decided(lease, at)
        elif what == "settle" and lease.state is LeaseState.SETTLING:
            book.settled(lease)
        elif what in ("refuse", "drop") and is_live:
            (book.refused if what == "refuse" else book.dropped)(lease)
    for names in seen.values():
        for name in ("lapsed", "abort", "kill", "end"):
            assert names.count(name) <= 1
        assert "end" not in names[:-1]
        assert "lapsed" not in names or names[names.index("lapsed") + 1 :] in ([], ["end"])
        rest = names[names.index("abort") :] if "abort" in names else []
        assert [n for n in rest if n in ("abort", "kill", "end")] == [n for n in ("abort", "kill", "end") if n in rest]
    assert {lease.job.key for lease in book} == {lease.job.key for lease in leases if lease.is_live}
