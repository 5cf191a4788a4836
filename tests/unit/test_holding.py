"""From a claim to a settled outcome, with a real lease book and settler between a scripted service and a pool on paper.

The lease of most tests is of 30 s with a grace of 5 s: renewed from 15 s on, aborted at 23.5 s, killed at 28.5 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from spooled_supervisor import holding, progress, settling
from spooled_supervisor.api.gate import RateGate
from spooled_supervisor.api.rest import RestApi
from spooled_supervisor.api.values import Claim, Settled, UnreadableJob
from spooled_supervisor.breaker import QueueBreaker
from spooled_supervisor.childlink import Run
from spooled_supervisor.errors import ApiRefused, ApiUnavailable, CredentialsRefused, LeaseLost
from spooled_supervisor.events import (
    Events,
    JobClaimed,
    JobCompleted,
    JobFailed,
    JobLeaseLost,
    LeaseLapsed,
    LeaseRenewed,
    LeftoverExpired,
    LeftoverKept,
    LeftoverReported,
    LoopLagged,
    OutboxRecovered,
    OutboxTroubled,
    OutcomeDropped,
    OutcomeSettled,
)
from spooled_supervisor.holding import LOST_GRACE_S, WAIT_FOR_CHILD_S, Holder
from spooled_supervisor.job import Crashed, Failed, Job, Outcome, Released, Succeeded, TimedOut
from spooled_supervisor.leases import SETTLING_AT_LEAST_S, LeaseBook
from spooled_supervisor.outbox import Leftover, Outbox
from spooled_supervisor.poison import PoisonList
from spooled_supervisor.pool import Pool
from spooled_supervisor.progress import ProgressSender
from spooled_supervisor.settling import Settler
from spooled_supervisor.timing import TICK_S
from spooled_supervisor.troubles import Troubles
from tests.support.clock import FakeClock, fake_time, run_in_fake_time
from tests.support.fakes import FakeApi, FakePool, Recorded, Spawned, make_job

TAKEN = Settled(already=False)
DOWN = ApiUnavailable("connection refused")
GONE = LeaseLost("job-1", "HTTP 404 NOT_FOUND")
KEY_REVOKED = CredentialsRefused(401, "UNAUTHORIZED", "revoked")


class FakeOutbox:
    """Which jobs are in it, and what was decided."""

    def __init__(self) -> None:
        self.jobs: dict[tuple[str, str | None], Outcome | None] = {}
        self.decided: dict[tuple[str, str | None], Outcome] = {}  # and is not kept yet
        self.worker_ids: dict[str, str | None] = {}  # of what was decided, by job
        self.renewals: list[float] = []
        self.problem: str | None = None
        self.replaced: str | None = None
        self.ticks = 0

    def hold(self, jobs: Sequence[Job]) -> None:
        self.jobs.update({job.key: None for job in jobs})

    def renewed(self, job: Job, started_at: float) -> None:
        self.renewals.append(started_at)

    def decide(self, job: Job, outcome: Outcome, *, started_at: float, worker_id: str | None = None) -> None:
        self.decided[job.key] = outcome
        self.worker_ids[job.id] = worker_id

    async def keep(self, job: Job) -> None:
        if job.key in self.decided:
            self.jobs[job.key] = self.decided.pop(job.key)

    def forget(self, job: Job) -> None:
        self.jobs.pop(job.key, None)

    def tick(self, at: float) -> None:
        self.ticks += 1

    def poison(self, oldest_wall: float) -> list[Any]:
        return []

    def poisoned(self, *_: object) -> None:
        return

    def cured(self, job_id: str) -> None:
        return


class House:
    """A holder, and all that it joins."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.api = FakeApi(clock)
        self.pool = FakePool(idle=4)
        self.book = LeaseBook(fraction=0.5, abort_grace_s=5.0)
        self.gate = RateGate()
        self.outbox = FakeOutbox()
        self.breaker = QueueBreaker()
        self.is_draining = False
        self.refusals: list[CredentialsRefused] = []
        self.ticks: list[float] = []
        self.spawned = Spawned()
        events = Events()
        self.recorded = Recorded(events)
        api, pool = cast(RestApi, self.api), cast(Pool, self.pool)
        self.poison = PoisonList(cast(Outbox, self.outbox))
        self.holder = Holder(
            api,
            pool,
            self.book,
            Settler(
                self.book, events=events, troubles=Troubles(events), gate=self.gate, on_refused=self.refusals.append
            ),
            events=events,
            gate=self.gate,
            progress=ProgressSender(api, pool, self.gate, self.spawned),
            outbox=cast(Outbox, self.outbox),
            poison=self.poison,
            breakers={"emails": self.breaker},
            abort_grace_s=5.0,
            limit_of=lambda job: min(job.timeout_s, 45.0),
            is_draining=lambda: self.is_draining,
            on_refused=self.refusals.append,
            on_tick=self.ticks.append,
            spawn=self.spawned,
        )
        self.api.script("complete", TAKEN)
        self.api.script("fail", TAKEN)
        self.api.script("renew", lambda *_, **__: clock())

    def claim(self, *ids: str, asked: int | None = None, **job: Any) -> tuple[Job, ...]:
        """A claim was answered just now with these jobs."""
        job.setdefault("requested_at", self.clock())
        jobs = tuple(make_job(**{"id": id, "lease_id": f"lease-of-{id}", **job}) for id in ids)
        self.holder.take(Claim(jobs), len(jobs) if asked is None else asked)
        return jobs

    def running(self, id: str, **job: Any) -> Run:
        """A claim has brought this job, and a child runs it."""
        self.claim(id, **job)
        return self.start(id)

    def start(self, id: str) -> Run:
        """A child takes the job from its pipe."""
        run = self.pool.start(id)
        run.started_at = self.clock()
        run.slot = 2
        return run

    def end(self, run: Run, outcome: Outcome | None) -> None:
        """The run is over, as the pool tells it."""
        del self.pool.running[run.job.key]
        self.holder.on_over(run, None if run.is_lost else outcome)

    def play(self, seconds: float, story: Callable[[], object], *later: tuple[float, Callable[[], object]]) -> None:
        """Tell the story, then keep the leases for so long; `later`: what else happens, and after how many seconds."""

        async def main() -> None:
            loop = asyncio.get_running_loop()
            story()
            for delay, happens in later:
                loop.call_later(delay, happens)
            keeping = loop.create_task(self.holder.keep_leases())
            await asyncio.sleep(seconds)
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await self.spawned.stop()

        self.begun = self.clock()
        run_in_fake_time(self.clock, main())

    def at(self, operation: str) -> list[float]:
        """When this operation was asked for, in seconds from the start of `play`."""
        return [call.at - self.begun for call in self.api.of(operation)]

    def told(self, what: str) -> list[tuple[Any, ...]]:
        return [told for told in self.pool.told if told[0] == what]


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> House:
    return House(fake_time(monkeypatch, holding, settling, progress))


# --- from the claim ---------------------------------------------------------------------------------------------------


def test_claimed_jobs_are_held_kept_on_disk_and_given_to_the_pool(house: House) -> None:
    house.play(0.1, lambda: house.claim("a", "b"))
    assert house.told("submit") == [("submit", "a", 45.0), ("submit", "b", 45.0)]
    assert house.holder.held == 2
    assert len(house.outbox.jobs) == 2
    assert house.recorded.of(JobClaimed) == [JobClaimed("a", "emails", 0), JobClaimed("b", "emails", 0)]


def test_a_job_runs_and_its_result_is_reported(house: House) -> None:
    house.play(
        5.0,
        lambda: house.claim("a"),
        (1.0, lambda: house.start("a")),
        (3.0, lambda: house.end(next(iter(house.pool.running.values())), Succeeded(b"[1]"))),
    )
    assert house.at("complete") == pytest.approx([3.0])
    assert house.holder.held == 0
    assert house.outbox.jobs == {}
    assert house.recorded.of(JobCompleted) == [JobCompleted("a", "emails", 2, 2.0, 3)]
    assert house.holder.given_up == 0


def test_jobs_beyond_what_was_asked_for_go_back_unstarted(house: House) -> None:
    house.play(1.0, lambda: house.claim("a", "b", "c", asked=1))
    assert [told[1] for told in house.told("submit")] == ["a"]
    assert [(call.args[0].id, call.args[1]) for call in house.api.of("fail")] == [
        ("b", "not started: the service gave more jobs than were asked for"),
        ("c", "not started: the service gave more jobs than were asked for"),
    ]
    assert all(call.kwargs["retryable"] for call in house.api.of("fail"))


def test_a_record_that_cannot_be_used_is_failed_by_name_and_for_good(house: House) -> None:
    bad = UnreadableJob(make_job(id="bad", requested_at=house.clock()), "payload is not JSON")
    house.play(1.0, lambda: house.holder.take(Claim((), (bad,)), 1))
    (fail,) = house.api.of("fail")
    assert fail.args == (bad.job, "the job's record cannot be used: payload is not JSON")
    assert fail.kwargs["retryable"] is False
    assert house.told("submit") == []


def test_the_same_lease_given_twice_is_run_once(house: House) -> None:
    house.play(1.0, lambda: (house.claim("a"), house.claim("a")))
    assert len(house.told("submit")) == 1
    assert house.holder.held == 1


def test_a_job_that_has_killed_its_child_runs_alone_and_after_a_second_death_not_at_all(house: House) -> None:
    house.poison.died("a", "killed by SIGSEGV")
    house.play(1.0, lambda: house.claim("a", "b"))
    assert [run.is_isolated for run in house.pool.waiting] == [True, False]
    house.poison.died("c", "killed by SIGSEGV")
    house.poison.died("c", "killed by SIGBUS")
    house.play(1.0, lambda: house.claim("c"))
    (fail,) = house.api.of("fail")
    assert fail.args[1] == "not run: this job has killed its child 2 times; the last time: killed by SIGBUS"
    assert fail.kwargs["retryable"] is True


# --- the drain --------------------------------------------------------------------------------------------------------


def test_what_arrives_during_the_drain_goes_back_but_for_a_last_attempt_that_can_run_now(house: House) -> None:
    house.is_draining = True
    house.play(1.0, lambda: (house.claim("a"), house.claim("last", retry_count=3, max_retries=3)))
    assert [told[1] for told in house.told("submit")] == ["last"]
    assert [call.args[1] for call in house.api.of("fail")] == ["not started: the worker is shutting down"]


def test_a_last_attempt_without_an_idle_child_goes_back_too(house: House) -> None:
    house.is_draining, house.pool.idle = True, 0
    house.play(1.0, lambda: house.claim("last", retry_count=3, max_retries=3))
    assert house.told("submit") == []
    assert len(house.api.of("fail")) == 1


def test_waiting_jobs_go_back_when_the_drain_begins_and_last_attempts_when_it_ends(house: House) -> None:
    house.play(
        4.0,
        lambda: (house.claim("a", "b"), house.claim("last", retry_count=5, max_retries=3)),
        (1.0, lambda: house.start("b")),
        (2.0, house.holder.return_waiting),
        (3.0, house.holder.return_all_waiting),
    )
    assert [(call.args[0].id, round(call.at - house.begun)) for call in house.api.of("fail")] == [("a", 2), ("last", 3)]
    assert house.pool.waiting == ()
    assert house.holder.held == 1


def test_waiting_until_all_is_settled_ends_when_it_is(house: House) -> None:
    house.api.latency_s = 2.0

    async def main() -> bool:
        house.claim("a")
        run = house.start("a")
        asyncio.get_running_loop().call_later(3.0, house.end, run, Succeeded(b"1"))
        return await house.holder.wait_until_settled(house.clock() + 100.0)

    begun = house.clock()
    assert run_in_fake_time(house.clock, main())
    assert house.clock() - begun == pytest.approx(5.0)


def test_waiting_until_all_is_settled_ends_at_its_deadline(house: House) -> None:
    async def main() -> bool:
        house.claim("a")
        return await house.holder.wait_until_settled(house.clock() + 7.0)

    begun = house.clock()
    assert not run_in_fake_time(house.clock, main())
    assert house.clock() - begun == pytest.approx(7.0)


# --- outcomes ---------------------------------------------------------------------------------------------------------


def ending(house: House, outcome: Outcome | None, id: str = "a", **job: Any) -> None:
    """A job that ends like this after a second."""
    house.play(2.0, lambda: house.running(id, **job), (1.0, lambda: house.end(the_run(house), outcome)))


def the_run(house: House) -> Run:
    (run,) = house.pool.running.values()
    return run


@pytest.mark.parametrize(
    ("outcome", "kind", "text", "will_retry"),
    [
        (Failed("ValueError: x"), "failed", "ValueError: x", True),
        (Failed("ValueError: x", retryable=False), "failed", "ValueError: x", False),
        (TimedOut(45.0), "timed_out", "timed out: the job ran longer than its limit of 45 s and was stopped", True),
        (Crashed("killed by SIGSEGV"), "crashed", "killed by SIGSEGV", True),
        (Released("aborted by worker shutdown"), "released", "aborted by worker shutdown", True),
    ],
)
def test_a_failure_is_told_with_its_kind_and_whether_it_comes_back(
    house: House, outcome: Outcome, kind: str, text: str, will_retry: bool
) -> None:
    ending(house, outcome)
    assert house.recorded.of(JobFailed) == [JobFailed("a", "emails", 2, kind, text, will_retry, 1.0)]
    assert house.api.of("fail")[0].args[1] == text


def test_a_last_attempt_does_not_come_back(house: House) -> None:
    ending(house, Failed("x"), retry_count=3, max_retries=3)
    assert [event.will_retry for event in house.recorded.of(JobFailed)] == [False]


@pytest.mark.parametrize(
    ("outcomes", "is_open"),
    [
        ([Crashed("x")] * 4, False),
        ([Crashed("x")] * 5, True),
        ([Crashed("x")] * 4 + [Failed("y"), Crashed("x")], False),
        ([Crashed("x")] * 4 + [Released("y"), Crashed("x")], True),
        ([TimedOut(1.0)] * 9, False),
    ],
)
def test_the_queues_breaker_hears_of_deaths_and_answers(house: House, outcomes: list[Outcome], is_open: bool) -> None:
    for number, outcome in enumerate(outcomes):
        ending(house, outcome, f"job-{number}")
    assert house.breaker.is_open is is_open


def test_a_death_is_held_against_the_job_until_it_answers(house: House) -> None:
    ending(house, Crashed("killed by SIGSEGV"))
    deaths = house.poison.deaths("a")
    assert deaths is not None
    assert (deaths.count, deaths.evidence) == (1, "killed by SIGSEGV")
    ending(house, Released("x"))
    assert house.poison.deaths("a") is not None
    ending(house, Succeeded(b"1"))
    assert house.poison.deaths("a") is None


def test_an_outcome_that_cannot_be_brought_to_the_service_is_counted(house: House) -> None:
    house.api.script("complete", DOWN)
    house.api.script("renew", DOWN)
    house.play(40.0, lambda: house.running("a"), (1.0, lambda: house.end(the_run(house), Succeeded(b"1"))))
    assert house.holder.given_up == 1
    assert house.holder.held == 0
    assert house.outbox.jobs == {}
    assert len(house.recorded.of(OutcomeDropped)) == 1


# --- renewals ---------------------------------------------------------------------------------------------------------


def test_a_lease_is_renewed_for_as_long_as_its_job_runs(house: House) -> None:
    house.play(100.0, lambda: house.running("a"))
    assert house.at("renew") == pytest.approx([15.0 * n for n in range(1, 7)])
    assert house.recorded.of(LeaseRenewed) == [LeaseRenewed("a", "ok", 0.0)] * 6
    assert house.outbox.renewals == pytest.approx([house.begun + 15.0 * n for n in range(1, 7)])
    assert house.told("abort") == house.told("kill") == []


def test_a_waiting_job_is_renewed_too(house: House) -> None:
    house.play(40.0, lambda: house.claim("a"))
    assert house.at("renew") == pytest.approx([15.0, 30.0])


def test_a_renewal_has_until_the_abort_and_at_most_ten_seconds(house: House) -> None:
    house.play(16.0, lambda: house.running("a"))
    house.play(16.0, lambda: house.running("long", lease_duration_s=300.0))
    assert house.api.of("renew")[0].kwargs["deadline"] == pytest.approx(house.api.of("renew")[0].at + 8.5)


def test_an_outage_shorter_than_the_lease_costs_nothing(house: House) -> None:
    house.api.script("renew", DOWN, DOWN, DOWN, lambda *_, **__: house.clock())
    house.play(28.0, lambda: house.running("a"))
    assert house.told("abort") == []
    assert [event.result for event in house.recorded.of(LeaseRenewed)][:4] == ["unavailable"] * 3 + ["ok"]


def test_a_lease_that_cannot_be_renewed_is_aborted_then_killed_and_nothing_is_reported(house: House) -> None:
    house.api.script("renew", DOWN)
    house.play(
        60.0,
        lambda: house.running("a"),
        (28.6, lambda: house.end(the_run(house), Crashed("killed by SIGKILL"))),
    )
    ((_, _, reason, kill_after_s),) = house.told("abort")
    assert (reason, kill_after_s) == ("lease_lost", pytest.approx(5.0))
    assert house.told("kill") == [("kill", "a", "lease_lost")]
    assert max(house.at("renew")) < 23.5
    assert house.api.of("complete") == house.api.of("fail") == []
    assert [event.reason for event in house.recorded.of(JobLeaseLost)] == ["it could not be renewed in time"]
    assert house.holder.held == 0
    assert house.outbox.jobs == {}
    assert not house.breaker.is_open
    assert house.poison.deaths("a") is None


def test_a_job_that_nobody_has_started_is_dropped_at_the_abort(house: House) -> None:
    house.api.script("renew", DOWN)
    house.play(60.0, lambda: house.claim("a"))
    assert house.pool.waiting == ()
    assert house.holder.held == 0
    assert house.outbox.jobs == {}
    assert len(house.recorded.of(JobLeaseLost)) == 1


def test_a_family_that_does_not_die_is_told_lost_only_once(house: House) -> None:
    house.api.script("renew", DOWN)
    house.play(60.0, lambda: house.running("a"))
    assert [told[0] for told in house.pool.told] == ["submit", "abort", "kill", "kill"]
    assert len(house.recorded.of(JobLeaseLost)) == 1


def test_a_refused_renewal_loses_the_lease_at_once_with_a_short_grace(house: House) -> None:
    house.api.script("renew", GONE)
    house.play(20.0, lambda: house.running("a"), (16.5, lambda: house.end(the_run(house), Crashed("x"))))
    assert house.told("abort") == [("abort", "a", "lease_lost", LOST_GRACE_S)]
    assert house.recorded.of(JobLeaseLost) == [JobLeaseLost("a", "emails", "HTTP 404 NOT_FOUND")]
    assert house.recorded.of(LeaseRenewed) == [LeaseRenewed("a", "lost", 0.0)]
    assert len(house.at("renew")) == 1
    assert house.api.of("fail") == []
    assert house.holder.held == 0
    assert house.outbox.jobs == {}


def test_a_refused_renewal_of_a_waiting_job_forgets_it(house: House) -> None:
    house.api.script("renew", GONE)
    house.play(20.0, lambda: house.claim("a"))
    assert house.pool.waiting == ()
    assert house.outbox.jobs == {}


def test_while_the_outcome_is_on_its_way_a_refused_renewal_decides_nothing(house: House) -> None:
    house.api.script("renew", GONE)
    house.api.script("complete", *[DOWN] * 8, TAKEN)
    house.play(29.5, lambda: house.running("a"), (1.0, lambda: house.end(the_run(house), Succeeded(b"1"))))
    assert house.recorded.of(JobLeaseLost) == []
    assert len(house.recorded.of(OutcomeSettled)) == 1
    assert house.told("abort") == []
    assert house.recorded.of(LeaseRenewed) == [], "nothing was lost"


def test_a_renewal_that_crosses_its_jobs_completion_is_not_counted_as_lost(house: House) -> None:
    """Renewed at 15 s; the outcome is taken while that is under way, and the service knows the lease no more."""
    house.api.latency_s = 1.0
    house.api.script("renew", GONE)
    house.play(20.0, lambda: house.running("a"), (14.5, lambda: house.end(the_run(house), Succeeded(b"1"))))
    assert len(house.at("renew")) == len(house.recorded.of(OutcomeSettled)) == 1
    assert house.recorded.of(LeaseRenewed) == []
    assert house.recorded.of(JobLeaseLost) == []


def test_leases_are_renewed_while_their_outcome_is_on_its_way(house: House) -> None:
    house.api.script("complete", *[DOWN] * 20, TAKEN)
    house.play(120.0, lambda: house.running("a"), (1.0, lambda: house.end(the_run(house), Succeeded(b"1"))))
    assert len(house.at("renew")) >= 2
    assert len(house.recorded.of(OutcomeSettled)) == 1
    assert house.holder.given_up == 0


def test_an_outcome_that_is_never_taken_does_not_keep_its_job_for_ever(house: House) -> None:
    house.api.script("complete", DOWN)
    house.play(600.0, lambda: house.running("a"), (1.0, lambda: house.end(the_run(house), Succeeded(b"1"))))
    last_renewal_at = house.at("renew")[-1]
    assert SETTLING_AT_LEAST_S - 15.0 < last_renewal_at <= 1.0 + SETTLING_AT_LEAST_S
    assert house.recorded.of(LeaseLapsed) == [LeaseLapsed("a", "emails", last_renewal_at + 15.0 - 1.0, 15.0)]
    assert last_renewal_at + 20.0 < house.at("complete")[-1] < last_renewal_at + 30.0, "it was tried until the end"
    assert [event.reason for event in house.recorded.of(JobLeaseLost)] == ["it ended before its outcome was taken"]
    assert len(house.recorded.of(OutcomeDropped)) == 1
    assert house.holder.given_up == 1
    assert house.holder.held == 0
    assert house.outbox.jobs == {}


def test_a_rate_limited_renewal_makes_claims_wait_and_is_tried_again_in_time(house: House) -> None:
    house.api.script(
        "renew",
        ApiUnavailable("HTTP 429", retry_after_s=60.0, rate_limited=True),
        lambda *_, **__: house.clock(),
    )
    house.play(30.0, lambda: house.running("a"))
    assert house.at("renew")[:2] == pytest.approx([15.0, 19.25])
    assert house.gate.claims_blocked_until > house.begun + 15.0
    assert house.told("abort") == []


def test_a_refused_key_is_told_and_the_renewal_tried_again(house: House) -> None:
    house.api.script("renew", KEY_REVOKED, lambda *_, **__: house.clock())
    house.play(30.0, lambda: house.running("a"))
    assert house.refusals == [KEY_REVOKED]
    assert house.told("abort") == []


def test_a_forbidden_renewal_is_tried_again_until_the_abort(house: House) -> None:
    house.api.script("renew", ApiRefused(403, "FORBIDDEN", "x"))
    house.play(24.0, lambda: house.running("a"))
    assert len(house.at("renew")) > 3
    assert len(house.told("abort")) == 1
    assert house.refusals == []


def test_two_leases_of_one_job_are_not_mixed_up(house: House) -> None:
    def renew(job: Job, **_: Any) -> float:
        if job.lease_id == "old":
            raise GONE
        return house.clock()

    house.api.script("renew", renew)
    house.play(
        20.0,
        lambda: house.running("a", lease_id="old"),
        (5.0, lambda: house.claim("a")),
        (15.5, lambda: house.end(the_run(house), Crashed("x"))),
    )
    assert house.holder.held == 1
    assert [run.job.lease_id for run in house.pool.waiting] == ["lease-of-a"]
    assert house.outbox.jobs == {("a", "lease-of-a"): None}


# --- time -------------------------------------------------------------------------------------------------------------


def sleeping(house: House, seconds: float) -> Callable[[], object]:
    """The machine sleeps: the loop does nothing while the clock goes on."""
    return lambda: house.clock.advance(seconds)


def test_after_a_sleep_past_the_end_the_family_is_killed_before_anything_is_sent(house: House) -> None:
    house.play(
        5000.0,
        lambda: house.running("a"),
        (1.0, sleeping(house, 4000.0)),
        (4001.5, lambda: house.end(the_run(house), Succeeded(b"1"))),
    )
    assert house.told("kill") == [("kill", "a", "lease_lost")]
    assert house.api.calls == []
    assert [event.reason for event in house.recorded.of(JobLeaseLost)] == ["it ended before it could be renewed"]
    assert house.recorded.of(LoopLagged)[0].lag_s == pytest.approx(4000.0, abs=1.0)


def test_after_a_sleep_past_the_kill_the_loss_is_told_and_a_waiting_job_is_not_started_any_more(house: House) -> None:
    house.play(29.9, lambda: (house.claim("running", "waiting"), house.start("running")), (1.0, sleeping(house, 28.0)))
    assert ("kill", "running", "lease_lost") in house.told("kill")
    assert house.pool.waiting == ()
    assert {event.job_id for event in house.recorded.of(JobLeaseLost)} == {"running", "waiting"}
    assert len(house.recorded.of(JobLeaseLost)) == 2


def test_the_loop_ticks_at_least_twice_a_second_and_looks_after_its_neighbours(house: House) -> None:
    house.play(10.2, lambda: None)
    assert len(house.ticks) == 20
    assert house.outbox.ticks == 20
    assert house.ticks[0] - house.begun == pytest.approx(TICK_S)
    assert house.holder.last_tick_at == house.ticks[-1]
    assert house.recorded.of(LoopLagged) == []


def test_a_claim_with_a_short_lease_wakes_the_loop_in_time(house: House) -> None:
    house.play(3.0, lambda: None, (1.2, lambda: house.running("a", lease_duration_s=3.0)))
    assert house.at("renew") == pytest.approx([2.7])


def test_jobs_that_find_no_usable_child_for_long_go_back(house: House) -> None:
    house.pool.usable = 0
    house.play(WAIT_FOR_CHILD_S + 2.0, lambda: house.claim("a"))
    assert [call.args[1] for call in house.api.of("fail")] == ["not started: the worker has no usable child"]
    assert house.at("fail")[0] == pytest.approx(WAIT_FOR_CHILD_S, abs=2 * TICK_S)


def test_a_job_that_has_waited_long_stays_while_a_child_is_replaced(house: House) -> None:
    long_s, boot_s = WAIT_FOR_CHILD_S + 10.0, 5.0

    def usable(children: int) -> Callable[[], object]:
        return lambda: setattr(house.pool, "usable", children)

    house.play(2 * long_s, lambda: house.claim("a"), (long_s, usable(0)), (long_s + boot_s, usable(1)))
    assert house.api.of("fail") == []
    house.play(WAIT_FOR_CHILD_S + 2.0, usable(0))
    assert house.at("fail") == pytest.approx([WAIT_FOR_CHILD_S], abs=2 * TICK_S)


def test_jobs_that_wait_for_a_busy_child_stay(house: House) -> None:
    house.play(WAIT_FOR_CHILD_S * 3, lambda: house.claim("a"))
    assert house.api.of("fail") == []


# --- the outbox -------------------------------------------------------------------------------------------------------


def test_trouble_with_the_outbox_is_told_once_and_its_end_too(house: House) -> None:
    house.play(
        10.0,
        lambda: None,
        (1.0, lambda: setattr(house.outbox, "problem", "disk full")),
        (5.0, lambda: setattr(house.outbox, "problem", None)),
    )
    troubled = [e for e in house.recorded.all if isinstance(e, OutboxTroubled | OutboxRecovered)]
    assert troubled == [OutboxTroubled("disk full"), OutboxRecovered()]


def leftover(house: House, id: str, outcome: Succeeded | Failed | None, **other: Any) -> Leftover:
    job = make_job(id=id, requested_at=other.pop("requested_at", house.clock()))
    return Leftover(job, "worker-before", other.pop("api_url", "http://service"), outcome)


def test_what_an_earlier_life_has_left_is_reported_in_its_name(house: House) -> None:
    leftovers = [leftover(house, "done", Succeeded(b"1")), leftover(house, "running", None)]
    house.outbox.hold([one.job for one in leftovers])
    house.play(1.0, lambda: house.holder.restore(leftovers))
    assert house.api.of("complete")[0].args[0].id == "done"
    (fail,) = house.api.of("fail")
    assert fail.args[0].id == "running"
    assert "the supervisor ended while it held this job" in fail.args[1]
    assert house.api.acted_as == ["worker-before"] * 2
    assert house.outbox.worker_ids == {"done": "worker-before", "running": "worker-before"}, "for the next life, too"
    assert house.recorded.of(LeftoverReported) == [
        LeftoverReported("done", "emails", "completed", True),
        LeftoverReported("running", "emails", "failed", False),
    ]
    assert house.outbox.jobs == {}
    assert house.told("submit") == []


def test_what_is_too_old_is_forgotten_and_what_belongs_elsewhere_is_kept(house: House) -> None:
    old = leftover(house, "old", Succeeded(b"1"), requested_at=house.clock() - 31.0)
    other = leftover(house, "other", Succeeded(b"1"), api_url="http://elsewhere")
    house.outbox.hold([old.job, other.job])
    house.play(1.0, lambda: house.holder.restore([old, other]))
    assert house.api.calls == []
    assert list(house.outbox.jobs) == [other.job.key]
    assert house.recorded.of(LeftoverExpired) == [LeftoverExpired("old", "emails", True)]
    assert house.recorded.of(LeftoverKept) == [LeftoverKept("other", "emails", "http://elsewhere")]


def test_an_outbox_that_is_back_is_told_what_is_held(house: House) -> None:
    def story() -> None:
        house.api.script("complete", DOWN)
        house.claim("held", "decided")
        house.end(house.start("decided"), Succeeded(b"1"))
        house.outbox.jobs.clear()
        house.holder.hold_again([])

    house.play(0.0, story)
    assert ("held", "lease-of-held") in house.outbox.jobs


def test_what_could_not_be_read_at_the_start_is_reported_when_the_outbox_is_back(house: House) -> None:
    missed = [leftover(house, "done", Succeeded(b"1"))]
    house.play(1.0, lambda: house.holder.hold_again(missed))
    assert house.api.of("complete")[0].args[0].id == "done"
    assert house.api.acted_as == ["worker-before"]


def test_what_an_earlier_life_has_left_is_renewed_in_its_name(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker id may be another one now, and to that the service would say that it holds no such lease."""
    before = FakeApi(house.clock)
    monkeypatch.setattr(house.api, "acting_as", lambda worker_id: before)
    before.script("complete", *[DOWN] * 50)
    before.script("renew", lambda *_, **__: house.clock())
    house.play(20.0, lambda: house.holder.restore([leftover(house, "done", Succeeded(b"1"))]))
    assert len(before.of("renew")) == 1
    assert house.api.calls == []
