"""One outcome on its way to the service: what is sent, how often, and what becomes of the lease."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from spooled_supervisor import settling
from spooled_supervisor.api.gate import RateGate
from spooled_supervisor.api.rest import RestApi
from spooled_supervisor.api.values import Settled
from spooled_supervisor.errors import ApiRefused, ApiUnavailable, CredentialsRefused, LeaseLost, ProtocolError
from spooled_supervisor.events import Events, JobLeaseLost, OutcomeDropped, OutcomeSettled
from spooled_supervisor.job import Crashed, Failed, Outcome, Released, Succeeded, TimedOut
from spooled_supervisor.leases import Lease, LeaseBook
from spooled_supervisor.lifecycle import LeaseState
from spooled_supervisor.settling import (
    LARGE_AT_ONCE,
    LARGE_BYTES,
    REFUSED_RETRY_S,
    RETRY_CAP_S,
    TRY_TIMEOUT_S,
    Settler,
)
from spooled_supervisor.troubles import Troubles
from tests.support.clock import FakeClock, fake_time, run_in_fake_time
from tests.support.fakes import FakeApi, Recorded, make_job

TAKEN = Settled(already=False)
DOWN = ApiUnavailable("connection refused")
TOO_LARGE = ApiRefused(413, "PAYLOAD_TOO_LARGE", "too large")
BAD_TEXT = ApiRefused(422, "VALIDATION_ERROR", "a character that cannot be stored")
KEY_REVOKED = CredentialsRefused(401, "UNAUTHORIZED", "revoked")
RESULT = Succeeded(b'{"n":1}')


class Desk:
    """A settler, and all that it touches."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.api = FakeApi(clock)
        self.book = LeaseBook(fraction=0.5, abort_grace_s=5.0)
        self.gate = RateGate()
        self.refusals: list[CredentialsRefused] = []
        events = Events()
        self.recorded = Recorded(events)
        self.troubles = Troubles(events)
        self.settler = Settler(
            self.book, events=events, troubles=self.troubles, gate=self.gate, on_refused=self.refusals.append
        )

    def decided(self, **job: Any) -> Lease:
        """A lease of 30 s whose outcome is known."""
        lease = self.book.hold(make_job(requested_at=self.clock(), **job))
        assert lease is not None
        self.book.decided(lease, self.clock())
        return lease

    def settle(self, outcome: Outcome, lease: Lease | None = None) -> bool:
        self.lease = lease or self.decided()
        return run_in_fake_time(self.clock, self.settling(outcome))

    def settling(self, outcome: Outcome) -> Coroutine[Any, Any, bool]:
        return self.settler.settle(self.lease, outcome, cast(RestApi, self.api))


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(fake_time(monkeypatch, settling))


# --- taken ------------------------------------------------------------------------------------------------------------


def test_a_success_is_completed_once_and_its_lease_is_settled(desk: Desk) -> None:
    desk.api.script("complete", TAKEN)
    assert desk.settle(RESULT)
    (call,) = desk.api.calls
    assert call.args == (desk.lease.job, b'{"n":1}')
    assert call.kwargs == {"tries_before": 0, "deadline": pytest.approx(call.at + TRY_TIMEOUT_S, abs=0.001)}
    assert desk.lease.state is LeaseState.SETTLED
    assert len(desk.book) == 0
    assert desk.recorded.all == [OutcomeSettled("job-1", "emails", "completed", False, 1)]


@pytest.mark.parametrize(
    ("outcome", "text", "retryable"),
    [
        (Failed("ValueError: x"), "ValueError: x", True),
        (Failed("ValueError: x", retryable=False), "ValueError: x", False),
        (TimedOut(60.0), "timed out: the job ran longer than its limit of 60 s and was stopped", True),
        (Crashed("the child was killed by SIGSEGV"), "the child was killed by SIGSEGV", True),
        (Released("not started: the worker is shutting down"), "not started: the worker is shutting down", True),
        (Failed(""), "the job failed without a message", True),
    ],
)
def test_anything_else_is_failed_with_its_words(desk: Desk, outcome: Outcome, text: str, retryable: bool) -> None:
    desk.api.script("fail", TAKEN)
    assert desk.settle(outcome)
    (call,) = desk.api.calls
    assert call.args == (desk.lease.job, text)
    assert call.kwargs["retryable"] is retryable
    assert desk.recorded.of(OutcomeSettled) == [OutcomeSettled("job-1", "emails", "failed", False, 1)]


def test_no_try_lasts_longer_than_the_lease(desk: Desk) -> None:
    desk.api.script("complete", TAKEN)
    lease = desk.decided(lease_duration_s=4.0)
    assert desk.settle(RESULT, lease)
    assert desk.api.calls[0].kwargs["deadline"] == lease.end


def test_large_results_have_more_time_and_go_a_few_at_once(desk: Desk) -> None:
    """All together they would share a slow line until each has had its time, and begin again."""
    large, small = Succeeded(b"1" * 320_000), Succeeded(b"1" * LARGE_BYTES)
    desk.api.script("complete", TAKEN)
    desk.api.latency_s = 3.0
    begun = desk.clock()

    async def main() -> None:
        await asyncio.gather(
            *(
                desk.settler.settle(desk.decided(id=f"job-{n}"), outcome, cast(RestApi, desk.api))
                for n, outcome in enumerate([large] * (LARGE_AT_ONCE + 1) + [small])
            )
        )

    run_in_fake_time(desk.clock, main())
    begins = {call.args[0].id: call.at - begun for call in desk.api.calls}
    assert begins == {**{f"job-{n}": 0.0 for n in (0, 1, 2, 3, 5)}, "job-4": 3.0}
    deadlines = {call.args[0].id: call.kwargs["deadline"] - call.at for call in desk.api.calls}
    assert deadlines["job-0"] == pytest.approx(TRY_TIMEOUT_S + 10.0)
    assert deadlines["job-5"] == pytest.approx(TRY_TIMEOUT_S + 2.048)


def test_a_report_that_had_landed_already_is_settled(desk: Desk) -> None:
    desk.api.script("complete", DOWN, Settled(already=True))
    assert desk.settle(RESULT)
    assert desk.recorded.of(OutcomeSettled) == [OutcomeSettled("job-1", "emails", "completed", True, 2)]


# --- tried again ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [RESULT, Failed("ValueError: x")], ids=["success", "failure"])
@pytest.mark.parametrize(
    "refused",
    [
        ApiRefused(403, "ACCESS_DENIED", "not with this key"),
        ApiRefused(429, "QUOTA_EXCEEDED", "daily limit reached"),
        ApiRefused(0, "PERMISSION_DENIED", "not with this key"),
        ApiRefused(0, "QUOTA_EXCEEDED", "daily limit reached"),
    ],
    ids=str,
)
def test_what_the_key_may_not_do_is_no_word_about_the_outcome(
    desk: Desk, outcome: Outcome, refused: ApiRefused
) -> None:
    """The right to report may come back before the lease ends; a result that is replaced by a failure never does."""
    operation = "complete" if outcome is RESULT else "fail"
    desk.api.script(operation, refused, refused, TAKEN)
    assert desk.settle(outcome)
    first, second, third = desk.api.calls
    assert first.args == second.args == third.args
    assert third.at - second.at == second.at - first.at == REFUSED_RETRY_S
    assert desk.recorded.of(OutcomeDropped) == []


def test_the_same_report_is_repeated_until_it_is_taken_and_says_that_it_is_a_repetition(desk: Desk) -> None:
    desk.api.script("complete", DOWN, DOWN, DOWN, TAKEN)
    assert desk.settle(RESULT)
    assert [call.kwargs["tries_before"] for call in desk.api.calls] == [0, 1, 2, 3]
    assert {call.args for call in desk.api.calls} == {(desk.lease.job, b'{"n":1}')}
    assert desk.recorded.names == ["api_troubled", "api_recovered", "outcome_settled"]


def test_tries_come_slower_and_slower_until_the_lease_ends_and_then_the_outcome_is_dropped(desk: Desk) -> None:
    desk.api.script("complete", DOWN)
    begun = desk.clock()
    assert not desk.settle(RESULT)
    times = [call.at - begun for call in desk.api.calls]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert gaps[0] <= 0.2
    assert max(gaps) <= RETRY_CAP_S
    assert 6 <= len(times) <= 20
    assert times[-1] < 30.0
    assert desk.clock() - begun == pytest.approx(30.0)
    (dropped,) = desk.recorded.of(OutcomeDropped)
    assert dropped == OutcomeDropped("job-1", "emails", "completed", "the lease ended before the service took it")


def test_a_renewal_in_between_gives_more_time(desk: Desk) -> None:
    def down(*_: Any, **__: Any) -> None:
        desk.lease.count_from(desk.clock())
        raise DOWN

    desk.api.script("complete", *[down] * 20, TAKEN)
    begun = desk.clock()
    assert desk.settle(RESULT)
    assert desk.clock() - begun > 31.0


def test_a_rate_limit_closes_the_gate_for_claims_and_its_hint_is_obeyed_within_reason(desk: Desk) -> None:
    desk.api.script("complete", ApiUnavailable("429", retry_after_s=3.0, rate_limited=True), TAKEN)
    begun = desk.clock()
    assert desk.settle(RESULT)
    assert desk.api.calls[1].at - begun == pytest.approx(3.0)
    assert desk.gate.claims_blocked_until >= begun + 3.0


def test_a_hint_longer_than_the_lease_still_leaves_tries(desk: Desk) -> None:
    desk.api.script("complete", ApiUnavailable("503", retry_after_s=300.0))
    assert not desk.settle(RESULT)
    assert len(desk.api.calls) >= 4
    assert desk.gate.claims_blocked_until == float("-inf")


def test_a_refused_key_is_told_and_tried_again_slowly_until_the_lease_ends(desk: Desk) -> None:
    desk.api.script("fail", KEY_REVOKED)
    begun = desk.clock()
    assert not desk.settle(Failed("x"))
    assert [call.at - begun for call in desk.api.calls] == pytest.approx([n * REFUSED_RETRY_S for n in range(6)])
    assert desk.refusals == [KEY_REVOKED] * 6


def test_a_key_that_is_rotated_in_time_saves_the_outcome(desk: Desk) -> None:
    desk.api.script("complete", KEY_REVOKED, TAKEN)
    assert desk.settle(RESULT)


def test_nothing_is_sent_for_a_lease_that_is_over(desk: Desk) -> None:
    lease = desk.decided()
    desk.clock.advance(31.0)
    assert not desk.settle(RESULT, lease)
    assert desk.api.calls == []
    assert desk.recorded.names == ["outcome_dropped"]


def test_nothing_more_is_sent_once_the_lease_was_given_up_by_others(desk: Desk) -> None:
    def give_up(*_: Any, **__: Any) -> None:
        desk.book.dropped(desk.lease)
        raise DOWN

    desk.api.script("complete", give_up)
    assert not desk.settle(RESULT)
    assert len(desk.api.calls) == 1


def test_an_answer_that_comes_after_the_lease_was_given_up_is_still_told(desk: Desk) -> None:
    def give_up(*_: Any, **__: Any) -> Settled:
        desk.book.dropped(desk.lease)
        return TAKEN

    desk.api.script("complete", give_up)
    assert desk.settle(RESULT)
    assert desk.recorded.names == ["outcome_settled"]
    assert desk.lease.state is LeaseState.LOST


# --- refused ----------------------------------------------------------------------------------------------------------


def test_a_lost_lease_ends_it_and_nothing_else_is_reported(desk: Desk) -> None:
    desk.api.script("complete", LeaseLost("job-1", "HTTP 409 LEASE_EXPIRED"))
    desk.settle(RESULT)
    assert len(desk.api.calls) == 1
    assert desk.lease.state is LeaseState.LOST
    assert desk.recorded.all == [JobLeaseLost("job-1", "emails", "HTTP 409 LEASE_EXPIRED")]


def test_a_service_that_says_that_the_lease_is_lost_is_there_again(desk: Desk) -> None:
    desk.api.script("complete", DOWN, DOWN, DOWN, LeaseLost("job-1", "HTTP 409 LEASE_EXPIRED"))
    desk.settle(RESULT)
    assert desk.recorded.names == ["api_troubled", "api_recovered", "job_lease_lost"]
    assert desk.troubles.reasons == []


@pytest.mark.parametrize("refusal", [TOO_LARGE, BAD_TEXT, ProtocolError("not one JSON value")])
def test_a_refused_result_becomes_a_failure_with_the_reason(desk: Desk, refusal: Exception) -> None:
    desk.api.script("complete", refusal)
    desk.api.script("fail", TAKEN)
    begun = desk.clock()
    assert desk.settle(RESULT)
    assert [call.operation for call in desk.api.calls] == ["complete", "fail"]
    (fail,) = desk.api.of("fail")
    assert str(getattr(refusal, "message", refusal)) in fail.args[1]
    assert fail.kwargs["tries_before"] == 0, "no failure was ever sent before"
    assert fail.kwargs["retryable"] is True
    assert desk.clock() == begun
    assert desk.recorded.of(OutcomeSettled) == [OutcomeSettled("job-1", "emails", "failed", False, 1)]


def test_a_refused_failure_is_sent_once_more_in_plain_text(desk: Desk) -> None:
    desk.api.script("fail", BAD_TEXT, TAKEN)
    assert desk.settle(Failed("bad\u0007\nline \u202ecaf\u00e9", retryable=False))
    first, second = desk.api.calls
    assert first.args[1] == "bad\u0007\nline \u202ecaf\u00e9"
    assert second.args[1] == "bad  line  caf\u00e9"
    assert second.kwargs["retryable"] is False


def test_a_failure_that_is_refused_twice_is_dropped(desk: Desk) -> None:
    desk.api.script("fail", BAD_TEXT)
    assert not desk.settle(Failed("x"))
    assert len(desk.api.calls) == 2
    assert desk.lease.state is LeaseState.LOST
    assert desk.recorded.of(OutcomeDropped) == [OutcomeDropped("job-1", "emails", "failed", str(BAD_TEXT))]


def test_a_result_then_its_failure_then_its_plain_text_are_refused_and_then_it_ends(desk: Desk) -> None:
    desk.api.script("complete", TOO_LARGE)
    desk.api.script("fail", BAD_TEXT)
    assert not desk.settle(RESULT)
    assert [call.operation for call in desk.api.calls] == ["complete", "fail", "fail"]


def test_an_outage_after_a_refusal_does_not_bring_the_result_back(desk: Desk) -> None:
    desk.api.script("complete", DOWN, TOO_LARGE)
    desk.api.script("fail", DOWN, TAKEN)
    assert desk.settle(RESULT)
    assert [call.operation for call in desk.api.calls] == ["complete", "complete", "fail", "fail"]
    assert [call.kwargs["tries_before"] for call in desk.api.calls] == [0, 1, 0, 1]


# --- together ---------------------------------------------------------------------------------------------------------


def test_many_outcomes_settle_side_by_side(desk: Desk) -> None:
    desk.api.latency_s = 1.0
    desk.api.script("complete", TAKEN)
    leases = [desk.decided(id=f"job-{n}") for n in range(50)]

    async def main() -> list[bool]:
        settle: Callable[[Lease], Coroutine[Any, Any, bool]] = lambda lease: desk.settler.settle(  # noqa: E731
            lease, RESULT, cast(RestApi, desk.api)
        )
        return await asyncio.gather(*map(settle, leases))

    begun = desk.clock()
    assert all(run_in_fake_time(desk.clock, main()))
    assert desk.clock() - begun == pytest.approx(1.0)
    assert len(desk.book) == 0
