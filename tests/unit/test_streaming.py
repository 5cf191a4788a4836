"""How many streams are open, and what becomes of what they bring: a scripted server, a pool of places, fake time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from spooled_supervisor import claiming, streaming
from spooled_supervisor.api.gate import RateGate
from spooled_supervisor.api.rest import RestApi
from spooled_supervisor.api.values import Claim, UnreadableJob
from spooled_supervisor.config import ClaimConfig, QueueConfig
from spooled_supervisor.errors import ApiRefused, ApiUnavailable, CredentialsRefused, LeaseLost
from spooled_supervisor.events import ApiTroubled, Events, JobLeaseLost, OutcomeSettled
from spooled_supervisor.job import Job
from spooled_supervisor.leases import LeaseBook
from spooled_supervisor.pool import Pool
from spooled_supervisor.streaming import Streamer
from spooled_supervisor.troubles import Troubles
from tests.support.clock import FakeClock, fake_time, run_in_fake_time
from tests.support.fakes import FakeApi, FakePool, Recorded, Spawned, make_job, make_run

DOWN = ApiUnavailable("gRPC UNAVAILABLE: connection refused")


class Source:
    """One stream of the server: a job waits in `coming` until it is taken."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.coming: asyncio.Future[Job | UnreadableJob] = asyncio.get_running_loop().create_future()

    async def next(self) -> Job | UnreadableJob:
        await asyncio.wait({self.coming})
        job = self.coming.result()
        self.coming = asyncio.get_running_loop().create_future()
        return job

    def stop(self) -> None:
        if not self.coming.done():
            self.coming.set_exception(ApiUnavailable("the stream was cancelled on its way"))

    async def close(self) -> Job | UnreadableJob | None:
        self.stop()
        self._server.streams.remove(self)
        return self.coming.result() if self.has_job else None

    @property
    def has_job(self) -> bool:
        return self.coming.done() and self.coming.exception() is None


class Server:
    """What is pushed goes to the stream that waits longest. An error ends all that are open, or comes at once."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.is_connected = True
        self.error: Exception | None = None
        self.streams: list[Source] = []
        self.opened: list[float] = []
        self.asked_leases: set[int] = set()

    def stream(self, queue_name: str, *, lease_duration_s: int) -> Source:
        self.opened.append(self._clock())
        self.asked_leases.add(lease_duration_s)
        if self.error is not None:
            raise self.error
        self.streams.append(Source(self))
        return self.streams[-1]

    @property
    def open(self) -> int:
        return len(self.streams)

    def push(self, *jobs: Job | UnreadableJob) -> None:
        for job in jobs:
            next(source for source in self.streams if not source.coming.done()).coming.set_result(job)

    def fail(self, error: Exception) -> None:
        self.error = error
        for source in self.streams:
            if not source.coming.done():
                source.coming.set_exception(error)


class Desk:
    """A streamer with all that is around it."""

    def __init__(self, clock: FakeClock, *queues: QueueConfig, idle: int = 2) -> None:
        self.clock = clock
        self.server = Server(clock)
        self.api = FakeApi(clock)
        self.api.script("renew", lambda job, deadline: clock())
        self.api.script("claim", Claim())
        self.pool = FakePool(idle=idle)
        self.leases = LeaseBook(fraction=0.5, abort_grace_s=5.0)
        self.may_claim = True
        self.is_of_no_use = False  # what comes goes back at once
        self.claims: list[Claim] = []
        self.taken: list[tuple[float, Job]] = []
        self.refusals: list[CredentialsRefused] = []
        self.spawned = Spawned()
        self.events = Events()
        self.recorded = Recorded(self.events)
        self.troubles = Troubles(self.events)
        self.streamer = Streamer(
            self.server,
            self.leases,
            cast(RestApi, self.api),
            cast(Pool, self.pool),
            queues or (QueueConfig("emails"),),
            ClaimConfig(),
            events=self.events,
            troubles=self.troubles,
            gate=RateGate(),
            spawn=self.spawned,
            may_claim=lambda: self.may_claim,
            on_claim=self.take,
            on_refused=self.refusals.append,
        )

    def take(self, claim: Claim, asked: int) -> int:
        self.claims.append(claim)
        if self.is_of_no_use:
            return 0
        for job in claim.jobs:
            self.taken.append((self.clock(), job))
            assert self.leases.hold(job) is not None
            self.pool.idle -= 1
            self.pool.running[job.key] = make_run(1, job)
        return len(claim.jobs)

    def over(self, job_id: str) -> None:
        """The run is over, its outcome on its way."""
        key = next(key for key in self.pool.running if key[0] == job_id)
        del self.pool.running[key]
        self.pool.idle += 1
        lease = self.leases.get(key)
        assert lease is not None
        self.leases.decided(lease, self.clock())
        self.streamer.wake()

    def settled(self, job_id: str) -> None:
        """The service has it."""
        lease = next(lease for lease in self.leases if lease.job.id == job_id)
        self.leases.settled(lease)
        self.events.emit(OutcomeSettled(job_id, "emails", "completed", False, 1))

    def run(self, seconds: float, *story: tuple[float, Callable[[], object]]) -> None:
        async def main() -> None:
            loop = asyncio.get_running_loop()
            for delay, happens in story:
                loop.call_later(delay, happens)
            running = loop.create_task(self.streamer.run())
            await asyncio.sleep(seconds)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await self.streamer.finish()
            await self.spawned.stop()

        run_in_fake_time(self.clock, main())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return fake_time(monkeypatch, claiming, streaming)


def looked(desk: Desk, seen: list[int]) -> Callable[[], None]:
    return lambda: seen.append(desk.server.open)


def job(n: int, **fields: Any) -> Job:
    return make_job(id=f"j{n}", lease_id=f"l{n}", **fields)


def test_there_is_a_stream_for_each_place(clock: FakeClock) -> None:
    desk, seen = Desk(clock, idle=3), list[int]()
    desk.run(5.0, (1.0, looked(desk, seen)), (4.0, looked(desk, seen)))
    assert seen == [3, 3]
    assert len(desk.server.opened) == 3
    assert desk.server.open == 0, "all are closed in the end"


def test_a_stream_that_was_silent_for_long_is_opened_anew(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = iter((0.5, 1.0, 1.0))
    monkeypatch.setattr("random.uniform", lambda low, high: next(parts))
    desk, seen = Desk(clock, idle=2), list[int]()
    begun, half_s = clock(), streaming.STALE_S / 2
    desk.run(2 * half_s - 1.0, (half_s - 1.0, looked(desk, seen)), (half_s + 1.0, looked(desk, seen)))
    assert [at - begun for at in desk.server.opened] == [0.0, 0.0, half_s], "one of two: not all at the same time"
    assert seen == [2, 2]
    assert not desk.recorded.of(ApiTroubled)


def test_a_stream_whose_job_takes_long_is_not_stale(clock: FakeClock) -> None:
    desk = Desk(clock, idle=1)
    desk.run(2 * streaming.STALE_S, (1.0, lambda: desk.server.push(job(1))))
    assert len(desk.server.opened) == 1


def test_a_cap_bounds_the_streams(clock: FakeClock) -> None:
    desk, seen = Desk(clock, QueueConfig("emails", max_procs=1), idle=3), list[int]()
    desk.run(2.0, (1.0, looked(desk, seen)))
    assert seen == [1]


def test_a_job_is_renewed_before_it_is_handed_over_and_counts_from_there(clock: FakeClock) -> None:
    desk = Desk(clock, idle=1)
    desk.api.latency_s = 0.5
    begun = clock()
    desk.api.script("renew", lambda job, deadline: begun + 1.0)
    desk.run(5.0, (1.0, lambda: desk.server.push(job(1, requested_at=begun + 1.0))))
    ((at, taken),) = desk.taken
    assert (at, taken.requested_at) == (begun + 1.5, begun + 1.0)
    assert len(desk.api.of("renew")) == 1


def test_the_next_job_is_taken_when_the_last_one_is_settled(clock: FakeClock) -> None:
    desk = Desk(clock, idle=1)
    begun = clock()
    desk.run(
        8.0,
        (1.0, lambda: desk.server.push(job(1))),
        (2.0, lambda: desk.server.push(job(2))),
        (3.0, lambda: desk.over("j1")),
        (4.0, lambda: desk.settled("j1")),
    )
    assert [(taken.id, at - begun) for at, taken in desk.taken] == [("j1", 1.0), ("j2", 4.0)]
    assert len(desk.server.opened) == 1, "the stream stays, and its place is not given to another"


def test_streams_ask_for_a_short_lease_that_the_first_renewal_makes_a_full_one(clock: FakeClock) -> None:
    desk = Desk(clock, idle=1)
    desk.run(5.0, (1.0, lambda: desk.server.push(job(1, lease_duration_s=10.0))))
    assert desk.server.asked_leases == {streaming.PUSHED_LEASE_S}
    (renewal,) = desk.api.of("renew")
    assert renewal.args[0].lease_duration_s == ClaimConfig().lease_duration_s
    assert desk.taken[0][1].lease_duration_s == ClaimConfig().lease_duration_s


# --- closing ----------------------------------------------------------------------------------------------------------


def set_quiet(desk: Desk, is_quiet: bool = True) -> Callable[[], None]:
    def change() -> None:
        desk.may_claim = not is_quiet
        desk.streamer.wake()

    return change


def test_nothing_is_open_while_nothing_may_be_claimed(clock: FakeClock) -> None:
    desk, seen = Desk(clock, idle=2), list[int]()
    desk.run(
        9.0,
        (1.0, lambda: desk.server.push(job(1))),
        (2.0, set_quiet(desk)),
        (2.01, looked(desk, seen)),
        (4.0, set_quiet(desk, False)),
        (5.0, looked(desk, seen)),
    )
    assert seen == [0, 1], "at once, also the one whose job runs; then one place is taken by that job"


def test_a_job_that_cannot_be_decoded_is_handed_over_to_be_failed_by_name(clock: FakeClock) -> None:
    desk = Desk(clock, idle=1)
    unreadable = UnreadableJob(job(1), "too deep")
    desk.run(5.0, (1.0, lambda: desk.server.push(unreadable)))
    assert desk.claims == [Claim((), (unreadable,))]
    assert not desk.api.of("renew")


Story = list[tuple[float, Callable[[], object]]]


def two_jobs_at_once(desk: Desk) -> Story:
    """What tells of a backlog; over after half a second."""
    story: Story = []
    for at, name in ((0.1, "a"), (0.3, "b")):
        story += [
            (at, lambda name=name: desk.server.push(make_job(id=name, lease_id=f"lease of {name}"))),  # type: ignore[misc]
            (at + 0.1, lambda name=name: desk.over(name)),  # type: ignore[misc]
            (at + 0.15, lambda name=name: desk.settled(name)),  # type: ignore[misc]
        ]
    return story


@pytest.mark.parametrize("settled_at", [2.9, 3.1], ids=["settled", "not yet settled"])
def test_in_a_backlog_the_job_is_waited_for_that_follows_on_a_settled_one(clock: FakeClock, settled_at: float) -> None:
    desk, seen = Desk(clock, idle=1), list[int]()
    desk.run(
        9.0,
        *two_jobs_at_once(desk),
        (1.0, lambda: desk.server.push(job(1))),
        (2.8, lambda: desk.over("j1")),
        (settled_at, lambda: desk.settled("j1")),
        (3.0, set_quiet(desk)),
        (3.6, lambda: desk.server.push(job(2))),
        (3.61, looked(desk, seen)),
    )
    assert [taken.id for _, taken in desk.taken] == ["a", "b", "j1", "j2"]
    assert seen == [0], "when it has come, nothing more is waited for"


def test_no_stream_lingers_longer_when_the_next_job_does_not_come(clock: FakeClock) -> None:
    desk, seen = Desk(clock, idle=2), list[int]()
    desk.run(
        9.0,
        *two_jobs_at_once(desk),  # the second stream was asked for nothing for as long
        (0.6, set_quiet(desk)),
        (0.7, set_quiet(desk)),  # to be told so again changes nothing
        (0.9, looked(desk, seen)),
        (1.1, looked(desk, seen)),
        (0.45 + streaming.LINGER_S + 0.1, looked(desk, seen)),
    )
    assert seen == [2, 1, 0]


def test_without_a_backlog_no_stream_lingers(clock: FakeClock) -> None:
    desk, seen = Desk(clock, idle=2), list[int]()
    desk.run(
        9.0,
        (0.1, lambda: desk.server.push(job(1))),
        (0.2, lambda: desk.over("j1")),
        (0.3, lambda: desk.settled("j1")),
        (0.4, set_quiet(desk)),
        (0.41, looked(desk, seen)),
    )
    assert seen == [0]


def test_a_job_that_has_arrived_is_handed_over_although_its_stream_is_closed(clock: FakeClock) -> None:
    desk = Desk(clock, idle=1)

    def both_at_once() -> None:
        desk.server.push(job(1))
        set_quiet(desk)()

    desk.run(5.0, (2.0, both_at_once))
    assert [taken.id for _, taken in desk.taken] == ["j1"]
    assert desk.server.open == 0


def test_a_stream_is_opened_anew_when_the_outcome_of_its_job_cannot_be_delivered(clock: FakeClock) -> None:
    desk = Desk(clock, idle=1)
    desk.run(
        9.0,
        (1.0, lambda: desk.server.push(job(1))),
        (2.0, lambda: desk.over("j1")),
        (4.0, lambda: desk.server.push(job(2))),
    )
    assert [taken.id for _, taken in desk.taken] == ["j1", "j2"]
    assert len(desk.server.opened) == 2, "the server sends nothing on the first one, for which its job is out"


def test_without_a_child_that_starts_no_stream_is_open(clock: FakeClock) -> None:
    desk, seen = Desk(clock, idle=2), list[int]()

    def all_fail() -> None:
        desk.pool.idle, desk.pool.backed_off = 0, 2
        desk.streamer.wake()

    desk.run(5.0, (2.0, all_fail), (2.01, looked(desk, seen)))
    assert seen == [0]


def test_a_slot_that_waits_before_it_tries_again_keeps_its_stream_for_a_while(clock: FakeClock) -> None:
    """What is closed at once may lose a job, and most children start at the second try."""
    desk, seen = Desk(clock, idle=2), list[int]()

    def one_fails() -> None:
        desk.pool.idle, desk.pool.backed_off = 1, 1
        desk.streamer.wake()

    desk.run(12.0, (2.0, one_fails), (4.0, looked(desk, seen)), (10.0, looked(desk, seen)))
    assert seen == [2, 1]


def test_with_fewer_slots_those_streams_are_closed_whose_job_runs(clock: FakeClock) -> None:
    desk, seen = Desk(clock, idle=3), list[int]()

    def scale_down() -> None:
        desk.pool.slots = (0,)
        desk.streamer.wake()

    desk.run(
        9.0,
        (1.0, lambda: desk.server.push(job(1), job(2), job(3))),
        (2.0, scale_down),
        (2.01, looked(desk, seen)),
        (3.0, lambda: desk.settled("j3")),
        (3.1, lambda: desk.server.push(job(4))),
    )
    assert seen == [1]
    assert [taken.id for _, taken in desk.taken] == ["j1", "j2", "j3", "j4"], "the one that is left goes on"


def test_a_place_that_is_gone_closes_a_stream(clock: FakeClock) -> None:
    desk, seen = Desk(clock, idle=3), list[int]()

    def lose_two() -> None:
        desk.pool.idle = 1
        desk.streamer.wake()

    desk.run(9.0, (1.0, lose_two), (3.0, looked(desk, seen)), (8.0, looked(desk, seen)))
    assert seen == [3, 1], "not at once: a child that is replaced is soon back"


def test_a_place_that_is_soon_back_costs_no_stream(clock: FakeClock) -> None:
    desk = Desk(clock, idle=2)

    def set_idle(idle: int) -> None:
        desk.pool.idle = idle
        desk.streamer.wake()

    gone_and_back = [(second + part, idle) for second in range(1, 12) for part, idle in ((0.0, 1), (0.4, 2))]
    desk.run(14.0, *[(at, lambda idle=idle: set_idle(idle)) for at, idle in gone_and_back])
    assert len(desk.server.opened) == 2


@pytest.mark.parametrize("places", [1, 8])
def test_broken_streams_are_opened_again_after_a_back_off_that_is_the_same_for_many(
    clock: FakeClock, places: int
) -> None:
    desk = Desk(clock, idle=places)

    def mend() -> None:
        desk.server.error = None

    begun = clock()
    desk.run(60.0, (10.0, lambda: desk.server.fail(DOWN)), (20.0, mend))
    later = sorted({at - begun for at in desk.server.opened if at > begun + 10.0})
    assert 10.5 <= later[0] <= 11.0
    assert later[-1] >= 20.0
    assert 3 <= len(later) <= 6
    assert [event.operation for event in desk.recorded.of(ApiTroubled)] == ["stream emails"]
    assert not desk.troubles.reasons, "a stream that stays open shows that it works"


def test_two_of_a_fleet_do_not_come_back_at_the_same_time(clock: FakeClock) -> None:
    def delay() -> float:
        desk = Desk(clock, idle=2)
        begun = clock()
        desk.server.fail(DOWN)
        desk.run(1.5)
        return desk.server.opened[2] - begun

    delays = {delay() for _ in range(5)}
    assert len(delays) == 5
    assert all(0.5 <= delay <= 1.0 for delay in delays)


def test_a_refused_key_is_told(clock: FakeClock) -> None:
    desk = Desk(clock, idle=1)
    desk.server.error = CredentialsRefused(0, "UNAUTHENTICATED", "no")
    desk.run(5.0)
    assert len(desk.refusals) == 1
    assert len(desk.server.opened) == 1


def test_a_job_whose_lease_is_over_is_dropped_and_its_stream_opened_anew(clock: FakeClock) -> None:
    desk = Desk(clock, idle=1)
    desk.api.script("renew", LeaseLost("j1", "expired"), lambda job, deadline: clock())
    desk.run(5.0, (1.0, lambda: desk.server.push(job(1))), (2.0, lambda: desk.server.push(job(2))))
    assert [taken.id for _, taken in desk.taken] == ["j2"]
    assert [event.job_id for event in desk.recorded.of(JobLeaseLost)] == ["j1"]
    assert len(desk.server.opened) == 2, "the server may believe for a while that the first one has its job"
    assert not desk.recorded.of(ApiTroubled), "it may be our own fault, as after a suspend"


def test_after_a_lease_that_was_lost_the_stream_is_opened_anew(clock: FakeClock) -> None:
    desk = Desk(clock, idle=1)

    def lose() -> None:
        (lease,) = desk.leases
        desk.leases.refused(lease)
        desk.pool.idle += 1
        desk.events.emit(JobLeaseLost("j1", "emails", "expired"))

    desk.run(5.0, (1.0, lambda: desk.server.push(job(1))), (2.0, lose), (3.0, lambda: desk.server.push(job(2))))
    assert [taken.id for _, taken in desk.taken] == ["j1", "j2"]
    assert len(desk.server.opened) == 2


def test_jobs_are_asked_for_when_one_was_sent_ahead_and_is_over(clock: FakeClock) -> None:
    desk, seen = Desk(clock, idle=1), list[int]()
    desk.api.script("renew", lambda job, deadline: clock(), LeaseLost("j2", "expired"))
    desk.run(
        9.0,
        (1.0, lambda: desk.server.push(job(1))),
        (2.0, lambda: desk.server.push(job(2))),
        (3.0, lambda: desk.over("j1")),
        (3.0, lambda: desk.settled("j1")),
        (6.0, looked(desk, seen)),
    )
    assert [taken.id for _, taken in desk.taken] == ["j1"]
    assert seen == [0]
    assert len(desk.api.of("claim")) > 1
    assert [event.reason for event in desk.recorded.of(ApiTroubled)] == [streaming.AHEAD]


def test_a_renewal_without_an_answer_is_tried_again(clock: FakeClock) -> None:
    desk = Desk(clock, idle=1)
    desk.api.script("renew", DOWN, DOWN, lambda job, deadline: clock())
    desk.run(9.0, (1.0, lambda: desk.server.push(job(1))))
    assert [taken.id for _, taken in desk.taken] == ["j1"]


def test_a_job_that_cannot_be_renewed_is_never_started(clock: FakeClock) -> None:
    desk = Desk(clock, idle=1)
    desk.api.script("renew", DOWN)
    desk.run(60.0, (1.0, lambda: desk.server.push(job(1, lease_duration_s=10.0))))
    assert desk.taken == []
    assert len(desk.api.of("renew")) > 3


def test_a_refused_renewal_is_no_end_of_the_stream(clock: FakeClock) -> None:
    desk = Desk(clock, idle=1)
    desk.api.script("renew", ApiRefused(0, "PERMISSION_DENIED", "no"), lambda job, deadline: clock())
    desk.run(9.0, (1.0, lambda: desk.server.push(job(1))))
    assert len(desk.taken) == 1


def test_jobs_that_cannot_be_run_do_not_come_in_a_loop(clock: FakeClock) -> None:
    desk = Desk(clock, idle=1)
    desk.is_of_no_use = True
    begun = clock()
    desk.run(5.0, (1.0, lambda: desk.server.push(job(1))))
    assert 0.8 <= desk.server.opened[1] - begun - 1.0 <= 1.7, "a poll interval, and a look"


def test_several_queues_are_asked_in_turn(clock: FakeClock) -> None:
    desk = Desk(clock, QueueConfig("a"), QueueConfig("b"), idle=2)
    desk.run(5.0)
    assert desk.server.opened == []
    assert {call.args[0] for call in desk.api.of("claim")} == {"a", "b"}


def test_a_reload_may_change_what_is_streamed(clock: FakeClock) -> None:
    desk, seen = Desk(clock, idle=2), list[int]()
    desk.run(
        9.0,
        (1.0, lambda: desk.streamer.set_queues([QueueConfig("a"), QueueConfig("b")])),
        (2.0, looked(desk, seen)),
        (3.0, lambda: desk.streamer.set_queues([QueueConfig("b")])),
        (6.0, looked(desk, seen)),
    )
    assert seen == [0, 2]


def test_finish_hands_over_what_is_being_renewed(clock: FakeClock) -> None:
    desk = Desk(clock, idle=1)
    desk.api.latency_s = 2.0
    desk.run(2.0, (1.0, lambda: desk.server.push(job(1))))
    assert [taken.id for _, taken in desk.taken] == ["j1"]
    assert desk.server.open == 0


def test_a_renewal_is_tried_again_in_a_drain_too(clock: FakeClock) -> None:
    desk = Desk(clock, idle=1)
    desk.api.script("renew", DOWN, DOWN, lambda job, deadline: clock())
    desk.run(2.0, (1.9, lambda: desk.server.push(job(1))), (1.95, set_quiet(desk)))
    assert [taken.id for _, taken in desk.taken] == ["j1"]


def test_an_open_breaker_lets_one_stream_through_at_a_time(clock: FakeClock) -> None:
    desk, seen = Desk(clock, idle=3), list[int]()
    breaker = desk.streamer.queues["emails"].breaker

    def crash() -> None:
        for _ in range(20):
            breaker.crashed(clock())

    desk.run(40.0, (1.0, crash), (2.0, looked(desk, seen)), (39.0, looked(desk, seen)))
    assert seen == [0, 1]
