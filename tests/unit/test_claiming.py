"""When which queue is asked for how many jobs: a scripted service, a pool that only says how many places it has."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spooled_supervisor import claiming
from spooled_supervisor.api.gate import RateGate
from spooled_supervisor.api.rest import RestApi
from spooled_supervisor.api.values import Claim, UnreadableJob
from spooled_supervisor.claiming import (
    BACKOFF_CAP_S,
    BACKOFF_FIRST_S,
    CLAIM_TIMEOUT_S,
    HINT_SPREAD_S,
    IDLE_CAP_S,
    REFUSED_PAUSE_S,
    ClaimedQueue,
    Claimer,
)
from spooled_supervisor.config import ClaimConfig, QueueConfig
from spooled_supervisor.errors import ApiRefused, ApiUnavailable, CredentialsRefused
from spooled_supervisor.events import ApiRecovered, ClaimAnswered, Events, JobFailed
from spooled_supervisor.pool import Pool
from spooled_supervisor.troubles import PERSISTENT_FAILURES, Troubles
from tests.support.clock import FakeClock, fake_time, run_in_fake_time
from tests.support.fakes import FakeApi, FakePool, Recorded, Spawned, make_job, make_run

NONE = Claim()
DOWN = ApiUnavailable("connection refused")
LIMITED = ApiUnavailable("HTTP 429", retry_after_s=7.0, rate_limited=True)
FORBIDDEN = ApiRefused(403, "FORBIDDEN", "not this queue")
KEY_REVOKED = CredentialsRefused(401, "UNAUTHORIZED", "revoked")


def jobs(count: int, queue_name: str = "emails") -> Claim:
    return Claim(tuple(make_job(id=f"{queue_name}-{n}", queue_name=queue_name) for n in range(count)))


class Desk:
    """A claimer at its desk: pool, service, gate and all that it tells."""

    def __init__(
        self,
        clock: FakeClock,
        *queues: QueueConfig,
        idle: int = 4,
        prefetch: int = 0,
        lease_duration_s: int = 30,
        poll_interval_s: float = 1.0,
    ) -> None:
        self.clock = clock
        self.api = FakeApi(clock)
        self.pool = FakePool(idle=idle)
        self.gate = RateGate()
        self.may_claim = True
        self.claimed: list[tuple[float, Claim, int]] = []
        self.refusals: list[CredentialsRefused] = []
        self.spawned = Spawned()
        events = self.events = Events()
        self.recorded = Recorded(events)
        self.troubles = Troubles(events)
        self.claimer = Claimer(
            cast(RestApi, self.api),
            cast(Pool, self.pool),
            queues or (QueueConfig("emails"),),
            ClaimConfig(poll_interval_s=poll_interval_s, lease_duration_s=lease_duration_s, prefetch=prefetch),
            events=events,
            troubles=self.troubles,
            gate=self.gate,
            spawn=self.spawned,
            may_claim=lambda: self.may_claim,
            on_claim=self.take,
            on_refused=self.refusals.append,
        )
        self.api.script("claim", NONE)

    def now_has(self, idle: int) -> None:
        """So many children are idle now."""
        self.pool.idle = idle
        self.claimer.wake()

    def resume(self) -> None:
        """Claiming is allowed again."""
        self.may_claim = True
        self.claimer.wake()

    def take(self, claim: Claim, asked: int) -> int:
        """What the holder does, as far as places are concerned: each job takes an idle child."""
        self.claimed.append((self.clock(), claim, asked))
        self.pool.idle -= len(claim.jobs)
        for job in claim.jobs:
            self.pool.running[job.key] = make_run(1, job)
        return len(claim.jobs)

    def run(self, seconds: float, *story: tuple[float, Callable[[], object]]) -> None:
        """Let it claim for so long; `story`: what happens meanwhile, and after how many seconds."""

        async def main() -> None:
            loop = asyncio.get_running_loop()
            for delay, happens in story:
                loop.call_later(delay, happens)
            claiming_ = loop.create_task(self.claimer.run())
            await asyncio.sleep(seconds)
            claiming_.cancel()
            await asyncio.gather(claiming_, return_exceptions=True)
            await self.spawned.stop()

        self.begun = self.clock()
        run_in_fake_time(self.clock, main())

    @property
    def times(self) -> list[float]:
        """When claims were sent, in seconds from the start of `run`."""
        return [call.at - self.begun for call in self.api.calls]

    @property
    def names(self) -> set[str]:
        """Of all queues that were asked."""
        return {name for name, _ in self.asked}

    @property
    def asked(self) -> list[tuple[str, int]]:
        return [(call.args[0], call.kwargs["limit"]) for call in self.api.calls]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return fake_time(monkeypatch, claiming)


# --- polling ----------------------------------------------------------------------------------------------------------


def test_all_places_are_asked_for_at_once(clock: FakeClock) -> None:
    desk = Desk(clock, idle=4)
    desk.run(0.5)
    (call,) = desk.api.calls
    assert call.args == ("emails",)
    assert call.kwargs == {"limit": 4, "lease_duration_s": 30, "timeout_s": CLAIM_TIMEOUT_S}
    assert desk.recorded.of(ClaimAnswered) == [ClaimAnswered("emails", 4, 0)]


def test_a_claim_never_takes_longer_than_half_the_lease(clock: FakeClock) -> None:
    desk = Desk(clock, lease_duration_s=6)
    desk.run(0.5)
    assert desk.api.calls[0].kwargs["timeout_s"] == 3.0


def test_an_empty_queue_is_asked_again_after_the_poll_interval(clock: FakeClock) -> None:
    desk = Desk(clock)
    desk.run(20.0)
    gaps = [b - a for a, b in zip(desk.times, desk.times[1:], strict=False)]
    assert 17 <= len(gaps) <= 22
    assert all(0.9 - 1e-6 <= gap <= 1.1 + 1e-6 for gap in gaps)
    assert len({round(gap, 6) for gap in gaps}) > 5, "they are not in step"


def test_a_queue_that_gave_all_is_asked_at_once_for_what_is_left(clock: FakeClock) -> None:
    desk = Desk(clock, idle=4)
    desk.api.script("claim", jobs(4), NONE)
    desk.run(0.5, (0.25, partial(desk.now_has, 1)))
    assert desk.times == pytest.approx([0.0, 0.25])
    assert desk.asked == [("emails", 4), ("emails", 1)]


def test_a_queue_that_gave_less_is_asked_after_the_poll_interval(clock: FakeClock) -> None:
    desk = Desk(clock, idle=4)
    desk.api.script("claim", jobs(1), NONE)
    desk.run(1.5)
    assert desk.asked[:2] == [("emails", 4), ("emails", 3)]
    assert 0.9 <= desk.times[1] <= 1.1 + 1e-6


def test_an_answer_whose_jobs_cannot_all_run_is_not_full(clock: FakeClock) -> None:
    desk = Desk(clock, idle=2)
    desk.api.script("claim", Claim(jobs(1).jobs, (UnreadableJob(make_job(id="bad"), "no payload"),)), NONE)
    desk.run(0.5)
    assert desk.asked == [("emails", 2)]
    desk.run(1.5)
    assert desk.asked[1:2] == [("emails", 1)]


def test_without_a_place_nobody_is_asked_until_there_is_one(clock: FakeClock) -> None:
    desk = Desk(clock, idle=0)
    desk.run(60.0, (30.0, partial(desk.now_has, 1)))
    assert desk.times[0] == pytest.approx(30.0)


def test_prefetched_jobs_are_asked_for_too(clock: FakeClock) -> None:
    desk = Desk(clock, idle=2, prefetch=3)
    desk.run(0.5)
    assert desk.asked == [("emails", 5)]


def test_no_claim_is_larger_than_the_service_allows(clock: FakeClock) -> None:
    desk = Desk(clock, idle=250)
    desk.run(0.5)
    assert desk.asked == [("emails", 100)]


def test_while_it_may_not_claim_nobody_is_asked(clock: FakeClock) -> None:
    desk = Desk(clock)
    desk.may_claim = False
    desk.run(60.0, (30.0, desk.resume))
    assert desk.times[0] == pytest.approx(30.0)


def test_what_a_claim_has_brought_is_handed_on_with_what_was_asked_for(clock: FakeClock) -> None:
    desk = Desk(clock, idle=3)
    desk.api.script("claim", jobs(5), NONE)
    desk.run(0.5)
    ((_, claim, asked),) = desk.claimed
    assert (len(claim.jobs), asked) == (5, 3)


# --- places -----------------------------------------------------------------------------------------------------------


def test_one_claim_at_a_time_for_a_queue(clock: FakeClock) -> None:
    desk = Desk(clock, idle=2)
    desk.api.latency_s = 5.0
    desk.run(4.0, *[(0.5 * n, desk.claimer.wake) for n in range(1, 8)], (1.0, lambda: setattr(desk.pool, "idle", 4)))
    assert desk.asked == [("emails", 2)]


def test_a_claim_in_flight_has_its_places_reserved(clock: FakeClock) -> None:
    desk = Desk(clock, QueueConfig("a"), QueueConfig("b"), idle=2)
    desk.api.latency_s = 5.0
    desk.run(
        4.0,
        (1.0, desk.claimer.wake),
        (2.0, partial(desk.now_has, 3)),
    )
    assert desk.asked == [("a", 2), ("b", 1)]


def test_a_cap_counts_running_and_waiting_jobs(clock: FakeClock) -> None:
    desk = Desk(clock, QueueConfig("a", max_procs=3), idle=8)
    running, waiting = make_job(id="x", queue_name="a"), make_job(id="y", queue_name="a")
    desk.pool.running[running.key] = make_run(1, running)
    desk.pool._waiting.append(make_run(2, waiting))
    desk.run(0.5)
    assert desk.asked == [("a", 1)]


def test_a_queue_at_its_cap_is_not_asked_and_the_others_are(clock: FakeClock) -> None:
    desk = Desk(clock, QueueConfig("a", max_procs=1), QueueConfig("b"), idle=4)
    job = make_job(queue_name="a")
    desk.pool.running[job.key] = make_run(1, job)
    desk.run(0.5)
    assert desk.asked == [("b", 4)]


@given(
    st.dictionaries(st.sampled_from("abc"), st.tuples(st.integers(1, 3), st.none() | st.integers(1, 3)), min_size=1),
    st.lists(st.tuples(st.floats(0.01, 2.0), st.integers(0, 6)), max_size=15),
    st.lists(st.integers(0, 9), max_size=20),
    st.floats(0.0, 3.0),
)
def test_places_and_caps_are_never_exceeded_whatever_comes_back(
    tuned: dict[str, tuple[int, int | None]], ends: list[tuple[float, int]], gives: list[int], latency_s: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock = fake_time(patch, claiming)
        desk = Desk(clock, *(QueueConfig(name, float(weight), cap) for name, (weight, cap) in tuned.items()), idle=3)
        desk.api.latency_s = latency_s
        given = iter(gives)

        def answer(queue_name: str, *, limit: int, **_: Any) -> Claim:
            return jobs(min(limit, next(given, 0)), queue_name)

        desk.api.script("claim", answer)
        choose = desk.claimer._choose

        def watched(at: float) -> Iterator[tuple[ClaimedQueue, int]]:
            for queue, limit in choose(at):
                reserved = sum(other.asked for other in desk.claimer.queues.values())
                assert queue.asked == 0, "it has a claim in flight"
                assert 1 <= limit <= desk.pool.places(0) - reserved
                cap = tuned[queue.name][1]
                assert cap is None or desk.pool.in_progress(queue.name) + limit <= cap
                yield queue, limit

        desk.claimer._choose = watched  # type: ignore[method-assign]

        def end(count: int) -> None:
            for key in list(desk.pool.running)[:count]:
                del desk.pool.running[key]
                desk.pool.idle += 1
            desk.claimer.wake()

        instants = itertools.accumulate(delay for delay, _ in ends)
        desk.run(20.0, *[(at, partial(end, count)) for at, (_, count) in zip(instants, ends, strict=True)])
        assert desk.api.calls
        assert desk.pool.idle >= 0


def test_over_time_each_queue_gets_its_share_by_weight(clock: FakeClock) -> None:
    desk = Desk(clock, QueueConfig("a", 5.0), QueueConfig("b", 3.0), QueueConfig("c", 1.0), idle=1)

    def one(queue_name: str, **_: Any) -> Claim:
        return jobs(1, queue_name)

    def free() -> None:
        desk.pool.running.clear()
        desk.pool.idle = 1
        desk.claimer.wake()

    desk.api.script("claim", one)
    desk.run(91.0, *[(float(n), free) for n in range(1, 90)])
    order = [name for name, _ in desk.asked]
    assert Counter(order) == {"a": 50, "b": 30, "c": 10}
    assert "aaaa" not in "".join(order), "nobody waits for a long run of another queue's"


def test_an_empty_queue_does_not_save_up_turns(clock: FakeClock) -> None:
    desk = Desk(clock, QueueConfig("full"), QueueConfig("empty"), idle=1)
    answers = {"full": jobs(1, "full"), "empty": NONE}
    desk.api.script("claim", lambda queue_name, **_: answers[queue_name])

    def free() -> None:
        desk.pool.running.clear()
        desk.pool.idle = 1
        desk.claimer.wake()

    desk.run(60.0, *[(n / 4, free) for n in range(1, 200)])
    order = Counter(name for name, _ in desk.asked)
    assert order["full"] > 100
    assert order["empty"] > 20


# --- trouble ----------------------------------------------------------------------------------------------------------


def test_a_service_that_is_down_is_asked_slower_and_slower_up_to_a_cap(clock: FakeClock) -> None:
    desk = Desk(clock)
    desk.api.script("claim", DOWN)
    desk.run(400.0)
    gaps = [b - a for a, b in zip(desk.times, desk.times[1:], strict=False)]
    assert BACKOFF_FIRST_S / 2 <= gaps[0] <= BACKOFF_FIRST_S + 1e-6
    assert all(gap <= BACKOFF_CAP_S + 1e-6 for gap in gaps)
    assert gaps[-1] >= BACKOFF_CAP_S / 2 - 1e-6
    assert desk.troubles.reasons == ["claim emails: connection refused"]
    assert desk.recorded.names == ["api_troubled"]


def test_after_a_success_the_back_off_is_forgotten(clock: FakeClock) -> None:
    desk = Desk(clock)
    desk.api.script("claim", *[DOWN] * 5, NONE, DOWN)
    desk.run(100.0)
    assert desk.times[7] - desk.times[6] <= BACKOFF_FIRST_S + 1e-6
    assert desk.recorded.names[:3] == ["api_troubled", "api_recovered", "claim_answered"]


def test_one_failing_queue_does_not_slow_the_others_down(clock: FakeClock) -> None:
    desk = Desk(clock, QueueConfig("bad"), QueueConfig("good"))

    def answer(queue_name: str, **_: Any) -> Claim:
        if queue_name == "bad":
            raise DOWN
        return NONE

    desk.api.script("claim", answer)
    desk.run(60.0)
    asked = Counter(name for name, _ in desk.asked)
    assert asked["bad"] <= 8
    assert asked["good"] >= 50


def test_a_retry_after_is_obeyed(clock: FakeClock) -> None:
    desk = Desk(clock)
    desk.api.script("claim", ApiUnavailable("503", retry_after_s=20.0), NONE)
    desk.run(25.0)
    assert desk.times[1] >= 20.0


def test_a_rate_limit_closes_the_gate_for_all_queues(clock: FakeClock) -> None:
    desk = Desk(clock, QueueConfig("a"), QueueConfig("b"), idle=1)
    desk.api.script("claim", LIMITED, NONE)
    desk.run(9.0)
    assert desk.times[0] == 0.0
    assert 7.0 <= desk.times[1] <= 7.7 + 1e-6


def test_a_gate_that_somebody_else_has_closed_is_waited_for_and_no_longer(clock: FakeClock) -> None:
    desk = Desk(clock)
    desk.run(20.0, (0.5, lambda: desk.gate.note(5.0, clock())))
    first, second, *_ = desk.times
    assert first == 0.0
    assert 5.5 <= second <= 6.0 + 1e-6


@pytest.mark.parametrize("noted_at", [0.0, 0.5])
def test_a_gate_that_closes_while_a_queue_is_due_does_not_stop_the_claims_for_good(
    clock: FakeClock, noted_at: float
) -> None:
    desk = Desk(clock, idle=0)

    def close_and_free() -> None:
        desk.gate.note(3.0, clock())  # a renewal was answered 429
        desk.pool.idle = 1
        desk.claimer.wake()

    desk.run(20.0, (noted_at, close_and_free))
    assert 3.0 <= desk.times[0] - noted_at <= 3.3 + 1e-6


def test_a_forbidden_queue_is_left_alone_for_long_and_the_others_are_not(clock: FakeClock) -> None:
    desk = Desk(clock, QueueConfig("mine"), QueueConfig("theirs"))

    def answer(queue_name: str, **_: Any) -> Claim:
        if queue_name == "theirs":
            raise FORBIDDEN
        return NONE

    desk.api.script("claim", answer)
    desk.run(REFUSED_PAUSE_S * 1.5)
    asked = Counter(name for name, _ in desk.asked)
    assert asked["theirs"] == 2
    assert asked["mine"] > 50
    assert desk.refusals == []


def test_a_refused_key_is_told(clock: FakeClock) -> None:
    desk = Desk(clock)
    desk.api.script("claim", KEY_REVOKED)
    desk.run(30.0)
    assert desk.refusals == [KEY_REVOKED]
    assert len(desk.api.calls) == 1


def test_a_claim_whose_answer_is_lost_gives_its_places_back(clock: FakeClock) -> None:
    desk = Desk(clock, QueueConfig("a"), idle=2)
    desk.api.script("claim", DOWN, jobs(2, "a"))
    desk.run(3.0)
    assert desk.asked == [("a", 2), ("a", 2)]


# --- hints ------------------------------------------------------------------------------------------------------------


def test_a_hint_makes_the_next_poll_come_at_once(clock: FakeClock) -> None:
    desk = Desk(clock)
    desk.run(0.8, (0.5, lambda: desk.claimer.hint("emails")))
    assert len(desk.times) == 2
    assert 0.5 <= desk.times[1] <= 0.5 + HINT_SPREAD_S + 1e-6


def test_a_hint_for_later_is_a_poll_for_later(clock: FakeClock) -> None:
    desk = Desk(clock)
    desk.run(0.8, (0.1, lambda: desk.claimer.hint("emails", 0.5)))
    assert 0.6 <= desk.times[1] <= 0.6 + HINT_SPREAD_S + 1e-6


def test_a_hint_for_later_than_the_poll_changes_nothing(clock: FakeClock) -> None:
    desk = Desk(clock)
    desk.run(1.5, (0.1, lambda: desk.claimer.hint("emails", 30.0)))
    assert 0.9 - 1e-6 <= desk.times[1] <= 1.1 + 1e-6


def test_hints_of_other_queues_mean_nothing(clock: FakeClock) -> None:
    desk = Desk(clock, QueueConfig("a"), QueueConfig("b"))
    desk.run(0.8, (0.3, lambda: desk.claimer.hint("c")), (0.5, lambda: desk.claimer.hint("b")))
    assert [name for name, _ in desk.asked] == ["a", "b", "b"]


def test_a_crowd_of_hints_is_one_poll(clock: FakeClock) -> None:
    desk = Desk(clock)
    desk.run(0.8, *[(0.5, lambda: desk.claimer.hint("emails")) for _ in range(1000)])
    assert len(desk.times) == 2


def test_hints_of_many_daemons_do_not_fall_on_one_instant(clock: FakeClock) -> None:
    def answered_at() -> float:
        desk = Desk(clock)
        desk.run(0.8, (0.5, lambda: desk.claimer.hint("emails")))
        return desk.times[1]

    assert len({round(answered_at() * 1e5) for _ in range(20)}) > 10


def test_a_hint_during_a_claim_is_not_lost_when_its_answer_is_empty(clock: FakeClock) -> None:
    """The job may have come after the service had looked: only another claim can tell."""
    desk = Desk(clock)
    desk.api.latency_s = 0.2
    desk.run(0.8, (0.1, lambda: desk.claimer.hint("emails")))
    assert desk.times == pytest.approx([0.0, 0.2], abs=0.01)


def test_many_hints_during_a_claim_are_one_more_claim(clock: FakeClock) -> None:
    desk = Desk(clock)
    desk.api.latency_s = 0.2
    desk.run(0.8, *[(n / 1000, lambda: desk.claimer.hint("emails")) for n in range(1, 190)])
    assert len(desk.times) == 2


def test_a_hint_while_all_are_busy_counts_when_one_is_idle(clock: FakeClock) -> None:
    desk = Desk(clock, idle=1)
    desk.run(
        0.8,
        (0.1, lambda: setattr(desk.pool, "idle", 0)),
        (0.2, lambda: desk.claimer.hint("emails")),
        (0.5, partial(desk.now_has, 1)),
    )
    assert desk.times == pytest.approx([0.0, 0.5])


@pytest.mark.parametrize("failure", [DOWN, LIMITED, FORBIDDEN, KEY_REVOKED], ids=["down", "limited", "403", "401"])
def test_a_hint_never_shortens_the_pause_after_a_failure(clock: FakeClock, failure: Exception) -> None:
    desk = Desk(clock)
    desk.api.script("claim", failure)
    desk.run(0.45, *[(n / 100, lambda: desk.claimer.hint("emails")) for n in range(1, 45)])
    assert len(desk.times) == 1


def test_a_hint_during_a_claim_that_fails_does_not_shorten_its_pause(clock: FakeClock) -> None:
    desk = Desk(clock)
    desk.api.latency_s = 0.2
    desk.api.script("claim", FORBIDDEN)
    desk.run(10.0, (0.1, lambda: desk.claimer.hint("emails")))
    assert len(desk.times) == 1


def test_after_a_success_hints_count_again(clock: FakeClock) -> None:
    desk = Desk(clock)
    desk.api.script("claim", DOWN, NONE)
    desk.run(1.7, (1.2, lambda: desk.claimer.hint("emails")))
    assert len(desk.times) >= 3
    assert any(1.2 <= at <= 1.21 for at in desk.times)


def claims_around_a_recovery(
    clock: FakeClock, failure: ApiUnavailable, operation: str = "heartbeat"
) -> tuple[float, float]:
    """The last claim that failed and the next one, when something else works again 100 s after the begin."""
    desk = Desk(clock)

    def answer(*_: object, **__: object) -> Claim:
        if clock() - desk.begun < 100.0:
            raise failure
        return NONE

    desk.api.script("claim", answer)
    desk.run(140.0, (100.0, lambda: desk.events.emit(ApiRecovered(operation, 9))))
    return max(at for at in desk.times if at < 100.0), min(at for at in desk.times if at >= 100.0)


def test_when_the_service_answers_again_no_claim_waits_out_its_back_off(clock: FakeClock) -> None:
    _, after = claims_around_a_recovery(clock, DOWN)
    assert after <= 100.0 + BACKOFF_FIRST_S + 1e-6


def test_the_event_stream_alone_is_no_sign_that_claims_are_answered_again(clock: FakeClock) -> None:
    before, after = claims_around_a_recovery(clock, DOWN, "events")
    assert after - before >= BACKOFF_CAP_S / 2 - 1e-6


def test_what_the_service_has_asked_for_is_waited_for_all_the_same(clock: FakeClock) -> None:
    before, after = claims_around_a_recovery(clock, ApiUnavailable("HTTP 503", retry_after_s=30.0))
    assert after >= before + 30.0 - 1e-6


def test_a_hint_does_not_open_a_closed_gate(clock: FakeClock) -> None:
    desk = Desk(clock)
    desk.run(4.0, (0.1, lambda: desk.gate.note(3.0, clock())), (0.5, lambda: desk.claimer.hint("emails")))
    assert desk.times[1] >= 3.1


# --- while the event stream is up -------------------------------------------------------------------------------------


def gaps_of(desk: Desk) -> list[float]:
    return [b - a for a, b in zip(desk.times, desk.times[1:], strict=False)]


def test_the_longer_a_queue_is_empty_the_less_often_it_is_asked_while_the_stream_is_up(clock: FakeClock) -> None:
    desk = Desk(clock)
    desk.claimer.on_stream(True)
    desk.run(400.0)
    for at, gap in zip(desk.times, gaps_of(desk), strict=False):
        expected = min(max(at, 1.0), IDLE_CAP_S)
        # The first hint is spread, too, and the queue counts as empty from then on.
        assert (expected - HINT_SPREAD_S) * 0.9 - 1e-6 <= gap <= expected * 1.1 + HINT_SPREAD_S + 1e-6
    assert len([at for at in desk.times if at < 60.0]) <= 8
    assert len([at for at in desk.times if at >= 100.0]) <= 9, "three a two minutes"


def test_without_the_stream_it_is_polled_as_ever(clock: FakeClock) -> None:
    desk = Desk(clock)
    desk.run(400.0)
    assert all(gap <= 1.1 + 1e-6 for gap in gaps_of(desk))


def test_a_poll_interval_above_the_cap_is_never_shortened(clock: FakeClock) -> None:
    desk = Desk(clock, poll_interval_s=45.0)
    desk.claimer.on_stream(True)
    desk.run(600.0)
    assert all(gap >= 45.0 * 0.9 * 0.9 - 1e-6 for gap in gaps_of(desk)[1:])


def test_a_hint_ends_the_long_pauses(clock: FakeClock) -> None:
    desk = Desk(clock)
    desk.claimer.on_stream(True)
    desk.run(330.0, (300.0, lambda: desk.claimer.hint("emails")))
    after = [at for at in desk.times if at >= 300.0]
    assert after[0] <= 300.0 + HINT_SPREAD_S + 1e-6
    assert after[1] - after[0] <= 1.1 + 1e-6


@pytest.mark.parametrize("will_retry", [True, False])
def test_a_failed_job_that_comes_again_ends_the_long_pauses(clock: FakeClock, will_retry: bool) -> None:
    desk = Desk(clock)
    desk.claimer.on_stream(True)
    failed = JobFailed("job-1", "emails", 0, "failed", "no", will_retry, 1.0)
    desk.run(330.0, (300.0, lambda: desk.events.emit(failed)))
    after = [at for at in desk.times if at >= 300.0]
    if will_retry:
        assert after[0] <= 301.0 + HINT_SPREAD_S + 1e-6
        assert after[1] - after[0] <= 1.1 + 1e-6
    else:
        assert len(after) <= 1


def test_a_job_ends_the_long_pauses(clock: FakeClock) -> None:
    desk = Desk(clock)
    desk.claimer.on_stream(True)
    found: list[float] = []

    def answer(queue_name: str, **_: Any) -> Claim:
        if clock() - desk.begun > 300.0 and not found:
            found.append(clock() - desk.begun)
            return jobs(1)
        return NONE

    desk.api.script("claim", answer)
    desk.run(400.0)
    after = [at for at in desk.times if at >= found[0]]
    assert after[1] - after[0] <= 1.1 + 1e-6


def test_a_stream_that_breaks_is_followed_by_a_poll_at_once_and_the_usual_pauses(clock: FakeClock) -> None:
    desk = Desk(clock)
    desk.claimer.on_stream(True)
    desk.run(330.0, (300.0, lambda: desk.claimer.on_stream(False)))
    after = [at for at in desk.times if at >= 300.0]
    assert after[0] <= 300.0 + HINT_SPREAD_S + 1e-6
    assert all(b - a <= 1.1 + 1e-6 for a, b in itertools.pairwise(after))


def test_a_stream_that_comes_up_is_followed_by_one_poll_at_once(clock: FakeClock) -> None:
    """A job that arrived between the last poll and the stream gave no event that was heard."""
    desk = Desk(clock, poll_interval_s=20.0)
    desk.run(15.0, (10.0, lambda: desk.claimer.on_stream(True)), (12.0, lambda: desk.claimer.on_stream(True)))
    assert desk.times == pytest.approx([0.0, 10.0], abs=0.01)


# --- queues that come and go ------------------------------------------------------------------------------------------


def test_new_queues_are_asked_at_once_and_old_ones_no_more(clock: FakeClock) -> None:
    desk = Desk(clock, QueueConfig("old"), QueueConfig("kept"))
    desk.run(5.0, (2.5, lambda: desk.claimer.set_queues([QueueConfig("kept"), QueueConfig("new")])))
    by_name = {
        name: [at for at, (n, _) in zip(desk.times, desk.asked, strict=True) if n == name] for name in desk.names
    }
    assert by_name["new"][0] == pytest.approx(2.5)
    assert max(by_name["old"]) < 2.5
    assert max(by_name["kept"]) > 2.5


def test_a_queue_that_is_gone_is_no_trouble_any_more(clock: FakeClock) -> None:
    desk = Desk(clock, QueueConfig("kept"), QueueConfig("old"))
    for operation in ("claim kept", "claim old", "stream old"):
        for _ in range(PERSISTENT_FAILURES):
            desk.troubles.failed(operation, "HTTP 404", 1.0)
    desk.claimer.set_queues([QueueConfig("kept")])
    assert desk.troubles.reasons == ["claim kept: HTTP 404"]


def test_what_is_known_of_a_queue_that_stays_is_kept(clock: FakeClock) -> None:
    desk = Desk(clock, QueueConfig("kept"), QueueConfig("old"))
    kept = desk.claimer.queues["kept"]
    desk.claimer.set_queues([QueueConfig("new"), QueueConfig("kept")])
    assert desk.claimer.queues["kept"] is kept
    assert list(desk.claimer.queues) == ["new", "kept"]


def test_a_pause_of_a_queue_that_stays_goes_on(clock: FakeClock) -> None:
    desk = Desk(clock, QueueConfig("kept"))
    desk.api.script("claim", FORBIDDEN)
    desk.run(5.0, (1.0, lambda: desk.claimer.set_queues([QueueConfig("kept")])))
    assert len(desk.times) == 1


def test_a_claim_in_flight_for_a_queue_that_is_gone_is_still_handed_on(clock: FakeClock) -> None:
    desk = Desk(clock, QueueConfig("old"), idle=2)
    desk.api.latency_s = 0.5
    desk.api.script("claim", jobs(1, "old"), NONE)
    desk.run(2.0, (0.1, lambda: desk.claimer.set_queues([QueueConfig("new")])))
    assert len(desk.claimed[0][1].jobs) == 1


def test_places_of_a_claim_in_flight_stay_reserved_when_its_queue_goes(clock: FakeClock) -> None:
    desk = Desk(clock, QueueConfig("old"), idle=2)
    desk.api.latency_s = 0.5
    desk.run(0.4, (0.1, lambda: desk.claimer.set_queues([QueueConfig("new")])))
    assert desk.asked == [("old", 2)], "both places may be taken by its answer"


# --- the breaker ------------------------------------------------------------------------------------------------------


def crash(desk: Desk, name: str) -> None:
    for _ in range(5):
        desk.claimer.queues[name].breaker.crashed(desk.clock())


def test_a_queue_whose_breaker_is_open_is_probed_with_one_job_after_its_pause(clock: FakeClock) -> None:
    desk = Desk(clock, QueueConfig("bad"), idle=4)
    crash(desk, "bad")
    desk.api.script("claim", jobs(1, "bad"), NONE)
    desk.run(30.0)
    assert desk.asked == [("bad", 1)]
    assert 2.5 <= desk.times[0] <= 5.0 + 1e-6


def test_a_probe_that_ended_well_opens_the_queue_again(clock: FakeClock) -> None:
    desk = Desk(clock, QueueConfig("bad"), idle=4)
    crash(desk, "bad")
    desk.api.script("claim", jobs(1, "bad"), NONE)

    def ends_well() -> None:
        desk.pool.running.clear()
        desk.pool.idle = 4
        desk.claimer.queues["bad"].breaker.answered()
        desk.claimer.wake()

    desk.run(10.5, (10.0, ends_well))
    assert desk.asked == [("bad", 1), ("bad", 4)]


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_claim_in_flight_is_awaited_when_claiming_ends(clock: FakeClock) -> None:
    desk = Desk(clock, idle=1)
    desk.api.latency_s = 4.0
    desk.api.script("claim", jobs(1))

    async def main() -> None:
        task = asyncio.ensure_future(desk.claimer.run())
        await asyncio.sleep(1.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await desk.claimer.finish()
        await desk.claimer.finish()

    run_in_fake_time(clock, main())
    assert len(desk.claimed) == 1


def test_the_last_answer_is_remembered_for_health(clock: FakeClock) -> None:
    desk = Desk(clock)
    desk.api.script("claim", DOWN)
    desk.run(10.0)
    assert desk.claimer.last_answer_at == pytest.approx(desk.begun + desk.times[-1])
