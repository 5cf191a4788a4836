"""Our row in the service's list of workers: made, kept alive, taken away."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, cast

import pytest

from spooled_supervisor import registration
from spooled_supervisor.api.rest import RestApi
from spooled_supervisor.api.values import HeartbeatAnswer
from spooled_supervisor.api.values import Registration as Registered
from spooled_supervisor.config import WorkerConfig
from spooled_supervisor.errors import ApiRefused, ApiUnavailable, CredentialsRefused
from spooled_supervisor.events import (
    ApiRecovered,
    ApiTroubled,
    Events,
    HeartbeatSent,
    WorkerDeregistered,
    WorkerRegistered,
)
from spooled_supervisor.registration import (
    INTERVAL_S,
    RETRY_CAP_S,
    SILENT_S,
    WOKEN_GAP_S,
    WOKEN_SPREAD_S,
    Registration,
    Vitals,
)
from spooled_supervisor.troubles import Troubles
from tests.support.clock import FakeClock, fake_time, run_in_fake_time
from tests.support.fakes import FakeApi, Recorded

DOWN = ApiUnavailable("connection refused")
FULL = ApiRefused(429, "QUOTA_EXCEEDED", "your plan has 3 workers")
KEY_REVOKED = CredentialsRefused(401, "UNAUTHORIZED", "revoked")
KNOWN = HeartbeatAnswer(known=True)


class Worker:
    """A registration, and what it is told and tells."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.api = FakeApi(clock)
        self.api.script("register", Registered("worker-1", 10.0))
        self.api.script("heartbeat", KNOWN)
        self.api.script("deregister", None)
        self.vitals = Vitals("healthy", 2, 50.0, 25.0, {"host_cpu": 70.0})
        self.commands: list[str] = []
        self.refusals: list[CredentialsRefused] = []
        events = self.events = Events()
        self.recorded = Recorded(events)
        self.troubles = Troubles(events)
        self.registration = Registration(
            cast(RestApi, self.api),
            WorkerConfig(None, "host-1", "python", "1.2.3", {"team": "a"}),
            worker_id="worker-1",
            queue_names=("emails", "images"),
            max_concurrency=8,
            events=events,
            troubles=self.troubles,
            vitals=lambda: self.vitals,
            on_command=self.commands.append,
            on_refused=self.refusals.append,
        )

    def run(self, seconds: float, *story: tuple[float, Callable[[], object]]) -> None:
        async def main() -> None:
            loop = asyncio.get_running_loop()
            for delay, happens in story:
                loop.call_later(delay, happens)
            task = loop.create_task(self.registration.run())
            await asyncio.sleep(seconds)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self.begun = self.clock()
        run_in_fake_time(self.clock, main())

    def recovers(self, operation: str = "claim emails") -> None:
        """Something else works again."""
        self.events.emit(ApiRecovered(operation, 9))

    def answers(
        self, operation: str, is_good: Callable[[float], bool], answer: object, error: Exception = DOWN
    ) -> None:
        """The service gives this answer at the good times, in seconds from the begin, else this error."""

        def by_time(**_: object) -> object:
            if is_good(self.clock() - self.begun):
                return answer
            raise error

        self.api.script(operation, by_time)

    def at(self, operation: str) -> list[float]:
        return [call.at - self.begun for call in self.api.of(operation)]

    def deregister(self) -> bool:
        return run_in_fake_time(self.clock, self.registration.deregister(3.0))


def gaps(times: list[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise(times)]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    return Worker(fake_time(monkeypatch, registration))


# --- register ---------------------------------------------------------------------------------------------------------


def test_a_worker_registers_once_and_then_beats(worker: Worker) -> None:
    worker.run(35.0)
    (call,) = worker.api.of("register")
    assert call.kwargs == {
        "queue_names": ("emails", "images"),
        "hostname": "host-1",
        "worker_type": "python",
        "version": "1.2.3",
        "max_concurrency": 8,
        "metadata": {"team": "a"},
        "timeout_s": registration.TIMEOUT_S,
    }
    assert worker.at("register")[0] <= 0.1
    assert worker.registration.is_registered
    assert worker.recorded.of(WorkerRegistered) == [WorkerRegistered("worker-1", "emails", 10.0)]
    assert 3 <= len(worker.at("heartbeat")) <= 5
    assert worker.at("heartbeat")[0] == pytest.approx(worker.at("register")[0])
    assert all(9.5 - 1e-6 <= gap <= 10.5 + 1e-6 for gap in gaps(worker.at("heartbeat")))


def test_what_changes_while_a_registration_is_on_its_way_is_told_by_another_one(worker: Worker) -> None:
    def changed_meanwhile(**_: object) -> Registered:
        worker.registration.describe(max_concurrency=9)
        return Registered("worker-1", 10.0)

    worker.api.script("register", changed_meanwhile, Registered("worker-1", 10.0))
    worker.run(5.0)
    assert [call.kwargs["max_concurrency"] for call in worker.api.of("register")] == [8, 9]
    assert worker.registration.is_registered


def test_a_fleet_that_starts_together_does_not_register_together(monkeypatch: pytest.MonkeyPatch) -> None:
    first = set()
    for _ in range(10):
        with monkeypatch.context() as patch:
            worker = Worker(fake_time(patch, registration))
            worker.run(1.0)
            first.add(round(worker.at("register")[0], 6))
    assert len(first) > 5


@pytest.mark.parametrize("error", [DOWN, FULL, KEY_REVOKED])
def test_a_worker_that_cannot_register_goes_on_asking_slowly(worker: Worker, error: Exception) -> None:
    worker.api.script("register", error)
    worker.run(600.0)
    assert worker.api.of("heartbeat") == []
    assert 10 <= len(worker.at("register")) <= 30
    assert gaps(worker.at("register"))[0] <= 1.0 + 1e-6
    assert max(gaps(worker.at("register"))) <= RETRY_CAP_S + 1e-6
    assert not worker.registration.is_registered
    assert worker.recorded.names == ["api_troubled"]
    assert (worker.refusals != []) is (error is KEY_REVOKED)


def test_a_place_that_becomes_free_is_taken(worker: Worker) -> None:
    worker.api.script("register", FULL, FULL, Registered("worker-1", 10.0))
    worker.run(30.0)
    assert worker.registration.is_registered
    assert worker.recorded.names[:3] == ["api_troubled", "api_recovered", "worker_registered"]


def test_a_hint_is_obeyed_up_to_a_minute(worker: Worker) -> None:
    worker.api.script(
        "register",
        ApiUnavailable("503", retry_after_s=20.0),
        ApiUnavailable("503", retry_after_s=5000.0),
        Registered("worker-1", 10.0),
    )
    worker.run(120.0)
    assert gaps(worker.at("register")) == pytest.approx([20.0, RETRY_CAP_S])


# --- heartbeats -------------------------------------------------------------------------------------------------------


def test_a_heartbeat_says_how_we_are(worker: Worker) -> None:
    worker.run(1.0)
    (call,) = worker.api.of("heartbeat")
    assert call.kwargs == {
        "status": "healthy",
        "current_jobs": 2,
        "cpu_percent": 50.0,
        "memory_percent": 25.0,
        "metadata": {"team": "a", "host_cpu": 70.0},
        "timeout_s": registration.TIMEOUT_S,
    }
    assert worker.recorded.of(HeartbeatSent) == [HeartbeatSent("healthy", 2, 50.0, 25.0)]
    assert worker.registration.last_beat_at == call.at


def test_a_changed_status_is_told_at_once(worker: Worker) -> None:
    worker.run(6.0, (5.0, worker.registration.beat_now))
    assert worker.at("heartbeat")[1] == pytest.approx(5.0)


def test_before_it_is_registered_there_is_nobody_to_tell(worker: Worker) -> None:
    worker.api.script("register", DOWN)
    worker.run(0.5, *[(0.1 * n, worker.registration.beat_now) for n in range(2, 5)])
    assert len(worker.at("register")) == 1


@pytest.mark.parametrize(("wanted_s", "got_s"), [(20.0, 20.0), (0.01, 1.0), (0.0, 1.0), (-5.0, 1.0), (3600.0, 60.0)])
@pytest.mark.parametrize("said_by", ["register", "heartbeat"])
def test_the_services_interval_is_taken_within_bounds(
    worker: Worker, said_by: str, wanted_s: float, got_s: float
) -> None:
    if said_by == "register":
        worker.api.script("register", Registered("worker-1", wanted_s))
    else:
        worker.api.script("heartbeat", HeartbeatAnswer(True, next_heartbeat_s=wanted_s), KNOWN)
    worker.run(3.5 * got_s)
    assert all(0.95 * got_s - 1e-6 <= gap <= 1.05 * got_s + 1e-6 for gap in gaps(worker.at("heartbeat")))
    assert len(worker.at("heartbeat")) >= 3


def test_a_worker_that_was_forgotten_registers_again_with_the_same_id(worker: Worker) -> None:
    worker.api.script("heartbeat", KNOWN, HeartbeatAnswer(known=False), KNOWN)
    worker.run(40.0)
    assert len(worker.at("register")) == 2
    assert worker.at("register")[1] - worker.at("heartbeat")[1] <= 1.5 + 1e-6
    assert len(worker.recorded.of(WorkerRegistered)) == 2
    assert len(worker.recorded.of(HeartbeatSent)) == len(worker.at("heartbeat")) - 1


def test_a_service_that_always_forgets_is_not_flooded(worker: Worker) -> None:
    worker.api.script("heartbeat", HeartbeatAnswer(known=False))
    worker.run(60.0)
    assert len(worker.api.calls) <= 260


def test_heartbeats_that_fail_are_tried_again_within_the_interval(worker: Worker) -> None:
    worker.api.script("heartbeat", DOWN)
    worker.run(120.0)
    assert max(gaps(worker.at("heartbeat"))) <= INTERVAL_S + 1e-6
    assert worker.registration.is_registered
    assert worker.registration.last_beat_at is None
    assert worker.troubles.reasons == ["heartbeat: connection refused"]


def test_a_heartbeat_that_fails_tells_when_it_is_tried_again(worker: Worker) -> None:
    worker.api.script("heartbeat", ApiUnavailable("503", retry_after_s=50.0))
    worker.run(15.0)
    assert [event.retry_in_s for event in worker.recorded.of(ApiTroubled)] == [INTERVAL_S]
    assert gaps(worker.at("heartbeat")) == pytest.approx([INTERVAL_S])


@pytest.mark.parametrize("interval_s", [10.0, 60.0])
def test_a_worker_that_beats_as_it_was_told_is_never_silent(worker: Worker, interval_s: float) -> None:
    worker.api.script("register", Registered("worker-1", interval_s))
    looked: list[float | None] = []
    worker.run(600.0, *[(float(at), lambda: looked.append(worker.registration.silent_for_s)) for at in range(600)])
    assert looked == [None] * 600


@pytest.mark.parametrize(("interval_s", "limit_s"), [(10.0, SILENT_S), (60.0, 120.0)])
def test_a_worker_whose_heartbeats_are_not_accepted_is_silent_after_a_while(
    worker: Worker, interval_s: float, limit_s: float
) -> None:
    assert worker.registration.silent_for_s is None
    worker.api.script("register", Registered("worker-1", interval_s))
    worker.api.script("heartbeat", KNOWN, DOWN)
    worker.run(1.5)
    assert worker.registration.last_beat_at is not None
    worker.clock.at = worker.registration.last_beat_at + limit_s
    assert worker.registration.silent_for_s is None
    worker.clock.advance(0.5)
    assert worker.registration.silent_for_s == pytest.approx(limit_s + 0.5)


def test_a_refused_key_is_told_with_every_heartbeat(worker: Worker) -> None:
    worker.api.script("heartbeat", KEY_REVOKED, KNOWN)
    worker.run(15.0)
    assert worker.refusals == [KEY_REVOKED]


@pytest.mark.parametrize(
    ("answer", "commands"),
    [
        (HeartbeatAnswer(True), []),
        (HeartbeatAnswer(True, commands=("pause", "dance")), ["pause", "dance"]),
        (HeartbeatAnswer(True, should_drain=True), ["drain"]),
        (HeartbeatAnswer(False, commands=("stop",), should_drain=True), []),
    ],
)
def test_commands_are_handed_on_as_they_came(worker: Worker, answer: HeartbeatAnswer, commands: list[str]) -> None:
    worker.api.script("heartbeat", answer, KNOWN)
    worker.run(0.9)
    assert worker.commands == commands


# --- when the service answers again -----------------------------------------------------------------------------------


def test_when_the_service_answers_again_no_registration_waits_out_its_back_off(worker: Worker) -> None:
    worker.answers("register", lambda at: at >= 170.0, Registered("worker-1", 10.0))
    worker.run(180.0, (170.0, worker.recovers))
    assert worker.registration.is_registered
    assert 170.0 <= worker.at("register")[-1] <= 170.0 + WOKEN_SPREAD_S + 1e-6


def test_a_fleet_that_sees_the_end_of_an_outage_does_not_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    last = set()
    for _ in range(10):
        with monkeypatch.context() as patch:
            worker = Worker(fake_time(patch, registration))
            worker.answers("register", lambda at: at >= 170.0, Registered("worker-1", 10.0))
            worker.run(180.0, (170.0, worker.recovers))
            last.add(round(worker.at("register")[-1], 6))
    assert len(last) > 5


def test_on_a_link_that_comes_and_goes_heartbeats_use_the_good_times(worker: Worker) -> None:
    """One second in twenty, and claims find it."""
    worker.answers("heartbeat", lambda at: at % 20.0 < 1.0, KNOWN)
    worker.run(601.0, *[(20.0 * n, worker.recovers) for n in range(1, 31)])
    accepted = {at // 20.0 for at in worker.at("heartbeat") if at % 20.0 < 1.0}
    assert accepted == set(range(31))
    assert worker.registration.silent_for_s is None


def test_a_try_that_was_on_its_way_when_the_service_began_to_answer_is_not_the_last_for_long(worker: Worker) -> None:
    worker.api.latency_s = 5.0
    worker.api.script("register", DOWN)
    worker.run(300.0)  # the back-off is long by now
    worker.api.calls.clear()
    worker.api.script("register", DOWN, Registered("worker-1", 10.0))
    worker.run(8.0, (2.0, worker.recovers))
    first, second = worker.at("register")
    assert 5.0 <= second - first <= 5.0 + WOKEN_SPREAD_S + 1e-6


@pytest.mark.parametrize("operation", ["register", "heartbeat"])
def test_what_works_again_and_again_does_not_make_us_ask_in_a_loop(worker: Worker, operation: str) -> None:
    worker.api.script(operation, DOWN)
    worker.run(600.0, *[(0.1 * n, lambda: worker.recovers("settle")) for n in range(6000)])
    usual = 20 if operation == "register" else 70  # with the cap, and a few at the begin
    assert len(worker.at(operation)) <= 600.0 / WOKEN_GAP_S + usual


@pytest.mark.parametrize(
    ("error", "recovered"),
    [
        (DOWN, "events"),
        (FULL, "claim emails"),
        (KEY_REVOKED, "claim emails"),
        (ApiUnavailable("503", retry_after_s=60.0), "claim emails"),
        (ApiUnavailable("429", rate_limited=True), "claim emails"),
    ],
    ids=["the event stream alone", "no place", "no key", "put off by the service", "rate limited"],
)
def test_who_waits_for_something_else_is_not_woken(worker: Worker, error: Exception, recovered: str) -> None:
    worker.api.script("register", error)
    worker.run(400.0, *[(float(at), lambda: worker.recovers(recovered)) for at in range(100, 400)])
    assert min(gaps([at for at in worker.at("register") if at > 100.0])) >= RETRY_CAP_S / 2 - 1e-6


def test_a_heartbeat_that_works_again_is_followed_by_the_next_one_in_time(worker: Worker) -> None:
    worker.api.latency_s = 0.2
    worker.api.script("heartbeat", DOWN, DOWN, DOWN, KNOWN)
    worker.run(60.0, *[(0.1 * n, worker.recovers) for n in range(600)])
    assert min(gaps(worker.at("heartbeat"))[3:]) >= 0.95 * INTERVAL_S


def test_a_change_is_told_soon_after_an_outage(worker: Worker) -> None:
    def goes_away_and_changes() -> None:
        worker.answers("register", lambda at: at >= 300.0, Registered("worker-1", 10.0))
        worker.answers("heartbeat", lambda at: at >= 300.0, KNOWN)
        worker.registration.describe(max_concurrency=9)

    worker.run(310.0, (5.0, goes_away_and_changes), (300.0, worker.recovers))
    assert 300.0 <= worker.at("register")[-1] <= 300.0 + WOKEN_SPREAD_S + 1e-6
    assert worker.api.of("register")[-1].kwargs["max_concurrency"] == 9


# --- a change ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [DOWN, FULL])
def test_a_change_that_the_service_does_not_take_stops_no_heartbeat(worker: Worker, error: Exception) -> None:
    def change() -> None:
        worker.api.script("register", error)
        worker.registration.describe(max_concurrency=9)

    worker.run(600.0, (5.0, change))
    assert max(gaps(worker.at("heartbeat"))) <= 1.05 * INTERVAL_S + 1e-6
    assert worker.registration.is_registered
    refused = worker.at("register")[1:]
    assert refused[0] == pytest.approx(5.0)
    assert 8 <= len(refused) <= 20
    assert gaps(refused)[-1] >= RETRY_CAP_S / 2, "heartbeats that are accepted do not make it ask more often"
    assert worker.deregister(), "the row is still ours to take off"
    assert len(worker.api.of("deregister")) == 1


def test_a_change_is_told_when_the_service_takes_it_again(worker: Worker) -> None:
    def change() -> None:
        worker.api.script("register", DOWN, DOWN, Registered("worker-1", 10.0))
        worker.registration.describe(queue_names=("faxes",))

    worker.run(60.0, (5.0, change))
    assert [call.kwargs["queue_names"] for call in worker.api.of("register")[1:]] == [("faxes",)] * 3


# --- deregister -------------------------------------------------------------------------------------------------------


def test_who_leaves_is_taken_off_the_list_once(worker: Worker) -> None:
    worker.run(1.0)
    assert worker.deregister()
    assert worker.deregister()
    (call,) = worker.api.of("deregister")
    assert call.kwargs == {"timeout_s": 3.0}
    assert worker.recorded.of(WorkerDeregistered) == [WorkerDeregistered("worker-1")]
    assert not worker.registration.is_registered


def test_who_was_never_registered_has_nothing_to_leave(worker: Worker) -> None:
    assert worker.deregister()
    assert worker.api.calls == []


@pytest.mark.parametrize("error", [DOWN, FULL, KEY_REVOKED])
def test_a_leave_that_fails_is_told_and_raises_nothing(worker: Worker, error: Any) -> None:
    worker.run(1.0)
    worker.api.script("deregister", error)
    assert not worker.deregister()
    assert worker.registration.is_registered
    assert worker.recorded.names[-1] == "api_troubled"
