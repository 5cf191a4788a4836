"""Whose memory is looked at next: those that have worked, and the others now and then. What is shown of a lease."""

from __future__ import annotations

import pytest

from spooled_supervisor import observer
from spooled_supervisor.leases import LeaseBook
from spooled_supervisor.observer import RESAMPLE_S, Sample, to_be_measured
from tests.support.fakes import make_job

A, B, C = 11, 12, 13


def measured(at: float, jobs_done: int = 0) -> Sample:
    return Sample(1000, 100, jobs_done, at)


def test_who_was_never_measured_comes_first_also_soon_after_the_boot() -> None:
    assert to_be_measured({A: measured(1.0)}, {A: 1, B: 0}, {A}, 5.0) == B


def test_those_that_have_worked_since_or_are_working_take_turns() -> None:
    samples = {A: measured(30.0, jobs_done=4), B: measured(20.0, jobs_done=7), C: measured(10.0)}
    assert to_be_measured(samples, {A: 5, B: 7, C: 0}, {B}, 40.0) == B
    samples[B] = measured(40.0, jobs_done=7)
    assert to_be_measured(samples, {A: 5, B: 7, C: 0}, {B}, 41.0) == A


@pytest.mark.parametrize(("after_s", "expected"), [(RESAMPLE_S - 1.0, None), (RESAMPLE_S, A)])
def test_who_only_rests_is_measured_again_much_later(after_s: float, expected: int | None) -> None:
    assert to_be_measured({A: measured(100.0, 3)}, {A: 3}, set(), 100.0 + after_s) == expected


def test_one_that_cannot_be_read_does_not_keep_the_others_waiting() -> None:
    samples = {A: Sample(None, None, 0, 10.0), B: measured(5.0)}
    assert to_be_measured(samples, {A: 0, B: 1}, {A, B}, 11.0) == B


def test_when_a_lease_is_renewed_is_shown_unless_it_never_is_again() -> None:
    book = LeaseBook(fraction=0.5, abort_grace_s=5.0)
    lease = book.hold(make_job(lease_duration_s=30.0))
    assert lease is not None
    shown = observer._lease(lease, 10.0)
    assert (shown.state, shown.ends_in_s, shown.renew_in_s) == ("held", 20.0, 5.0)
    book.decided(lease, 10.0)
    book.renewed(lease, 400.0)
    assert observer._lease(lease, 415.5).renew_in_s == 0.0
    assert book.due(416.0).lapsed == [lease]
    shown = observer._lease(lease, 416.0)
    assert (shown.state, shown.ends_in_s, shown.renew_in_s) == ("settling", 14.0, None)
