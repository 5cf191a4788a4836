"""Progress to the service: the newest wins, seldom, and never at the cost of anything else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from spooled_supervisor import progress
from spooled_supervisor.api.gate import RateGate
from spooled_supervisor.api.rest import RestApi
from spooled_supervisor.childlink import Run
from spooled_supervisor.errors import ApiRefused, ApiUnavailable, LeaseLost
from spooled_supervisor.pool import Pool
from spooled_supervisor.progress import INTERVAL_S, ProgressSender
from tests.support.clock import FakeClock, fake_time, run_in_fake_time
from tests.support.fakes import FakeApi, FakePool, Spawned, make_job, make_run


class Board:
    """A sender that is asked to look."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.api = FakeApi(clock)
        self.api.script("progress", True)
        self.pool = FakePool()
        self.gate = RateGate()
        self.spawned = Spawned()
        self.sender = ProgressSender(cast(RestApi, self.api), cast(Pool, self.pool), self.gate, self.spawned)

    def running(self, id: str = "job-1") -> Run:
        run = make_run(1, make_job(id=id))
        self.pool.children.append(SimpleNamespace(run=run))
        return run

    def tick(self) -> None:
        async def main() -> None:
            self.sender.tick(self.clock())
            await self.spawned.finish()

        run_in_fake_time(self.clock, main())

    @property
    def sent(self) -> list[tuple[object, ...]]:
        return [(call.args[0].id, *call.args[1:]) for call in self.api.calls]


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Board:
    return Board(fake_time(monkeypatch, progress))


def test_what_a_handler_says_is_sent(board: Board) -> None:
    run = board.running()
    run.percent, run.message = 40.0, "page 4"
    board.tick()
    assert board.sent == [("job-1", 40.0, "page 4")]


def test_a_job_that_has_said_nothing_and_a_child_without_a_job_are_passed_over(board: Board) -> None:
    board.running()
    board.pool.children.append(SimpleNamespace(run=None))
    board.tick()
    assert board.sent == []


def test_the_newest_is_sent_after_the_interval(board: Board) -> None:
    run = board.running()
    for percent in range(100):
        run.percent = float(percent)
        board.tick()
        board.clock.advance(0.5)
    assert len(board.sent) == pytest.approx(50.0 / INTERVAL_S, abs=1)
    assert [percent for _, percent, _ in board.sent][:3] == [0.0, 10.0, 20.0]


def test_what_has_not_changed_is_not_sent_again(board: Board) -> None:
    run = board.running()
    run.percent = 40.0
    for _ in range(10):
        board.tick()
        board.clock.advance(INTERVAL_S)
    run.message = "still there"
    board.tick()
    assert board.sent == [("job-1", 40.0, None), ("job-1", 40.0, "still there")]


def test_jobs_have_their_own_intervals(board: Board) -> None:
    for id in ("a", "b"):
        board.running(id).percent = 1.0
    board.tick()
    assert board.sent == [("a", 1.0, None), ("b", 1.0, None)]


def test_nothing_is_sent_while_the_service_limits_the_rate(board: Board) -> None:
    board.running().percent = 1.0
    board.gate.note(3.0, board.clock())
    board.tick()
    assert board.sent == []
    board.clock.advance(4.0)
    board.tick()
    assert len(board.sent) == 1


def test_a_rate_limited_report_closes_the_gate(board: Board) -> None:
    board.api.script("progress", ApiUnavailable("HTTP 429", retry_after_s=9.0, rate_limited=True))
    board.running().percent = 1.0
    board.tick()
    assert board.gate.wait_for_claim(board.clock()) >= 9.0


def test_a_service_without_the_route_is_not_asked_again(board: Board) -> None:
    board.api.script("progress", False)
    run = board.running()
    for percent in (1.0, 2.0, 3.0):
        run.percent = percent
        board.tick()
        board.clock.advance(INTERVAL_S)
    assert len(board.sent) == 1


@pytest.mark.parametrize("error", [ApiUnavailable("503"), ApiRefused(403, "FORBIDDEN", "x"), LeaseLost("job-1", "404")])
def test_a_report_that_fails_costs_nothing_and_the_next_one_is_sent(board: Board, error: Exception) -> None:
    board.api.script("progress", error, True)
    run = board.running()
    run.percent = 1.0
    board.tick()
    board.clock.advance(INTERVAL_S)
    run.percent = 2.0
    board.tick()
    assert len(board.sent) == 2
    assert board.gate.wait_for_claim(board.clock()) == 0.0
