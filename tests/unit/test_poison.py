"""What is known against jobs that kill their children, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spooled_supervisor import outbox, poison
from spooled_supervisor.outbox import Outbox
from spooled_supervisor.poison import DEATHS_TO_REFUSE, KEPT_S, MAX_EVIDENCE, PoisonList
from tests.support.clock import FakeClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    made = FakeClock(1e9)
    monkeypatch.setattr(poison, "wall", made)
    monkeypatch.setattr(outbox, "wall", made)
    return made


@pytest.fixture
def box(tmp_path: Path, clock: FakeClock) -> Iterator[Outbox]:
    with Outbox(tmp_path, api_url="http://api", worker_id="w") as made:
        yield made


@pytest.fixture
def jobs(box: Outbox) -> PoisonList:
    return PoisonList(box)


def test_nothing_is_known_against_a_job_that_is_new(jobs: PoisonList) -> None:
    assert jobs.deaths("a") is None
    jobs.answered("a")
    assert len(jobs) == 0


def test_deaths_are_counted_with_the_last_evidence(jobs: PoisonList) -> None:
    for cause in ("killed by SIGSEGV", "killed by SIGKILL; the memory limit was hit"):
        jobs.died("a", cause)
    deaths = jobs.deaths("a")
    assert deaths is not None
    assert deaths.count == 2 == DEATHS_TO_REFUSE
    assert deaths.evidence == "killed by SIGKILL; the memory limit was hit"
    assert jobs.deaths("b") is None


def test_an_answer_forgives_everything(jobs: PoisonList, box: Outbox) -> None:
    jobs.died("a", "killed by SIGSEGV")
    jobs.answered("a")
    assert jobs.deaths("a") is None
    assert PoisonList(box).deaths("a") is None


def test_a_restart_forgives_nothing(jobs: PoisonList, box: Outbox) -> None:
    jobs.died("a", "killed by SIGSEGV")
    jobs.died("a", "killed by SIGABRT")
    assert PoisonList(box).deaths("a") == jobs.deaths("a")


def test_after_a_day_it_is_forgotten_here_and_on_disk(jobs: PoisonList, box: Outbox, clock: FakeClock) -> None:
    jobs.died("a", "killed by SIGSEGV")
    clock.advance(KEPT_S - 1)
    assert jobs.deaths("a") is not None
    assert PoisonList(box).deaths("a") is not None
    clock.advance(2)
    assert jobs.deaths("a") is None
    assert PoisonList(box).deaths("a") is None


def test_so_many_are_kept_and_the_oldest_goes_first(
    jobs: PoisonList, box: Outbox, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poison, "MAX_JOBS", 3)
    for job_id in ("a", "b", "c", "a", "d"):
        clock.advance(1.0)
        jobs.died(job_id, "killed by SIGSEGV")
    for known in (jobs, PoisonList(box)):
        assert len(known) == 3
        assert known.deaths("b") is None
        assert known.deaths("a") is not None


def test_evidence_is_bounded(jobs: PoisonList) -> None:
    jobs.died("a", "x" * 10_000)
    deaths = jobs.deaths("a")
    assert deaths is not None
    assert len(deaths.evidence) == MAX_EVIDENCE


def test_a_disk_that_fails_changes_nothing_for_this_life(tmp_path: Path, clock: FakeClock) -> None:
    with Outbox(tmp_path / "nowhere", api_url="http://api", worker_id="w") as box:
        jobs = PoisonList(box)
        jobs.died("a", "killed by SIGSEGV")
        assert jobs.deaths("a") is not None
