"""What the pool does with slots and waiting runs around its children, which are not there: no process is started."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spooled_supervisor.childcgroups import ChildCgroups
from spooled_supervisor.childlink import Run
from spooled_supervisor.config import PoolConfig
from spooled_supervisor.events import Events
from spooled_supervisor.forkclient import ForkServerKeeper
from spooled_supervisor.job import Outcome
from spooled_supervisor.lifecycle import ChildState
from spooled_supervisor.pool import Pool
from tests.support.fakes import Spawned, make_child, make_job, make_lease


class FakeKeeper:
    """A fork server that is asked and never answers."""

    def __init__(self) -> None:
        self.is_ready = True
        self.open_requests = 0
        self.pids: list[int] = []
        self.forks: list[int] = []

    async def fork(self, slot: int) -> None:
        self.forks.append(slot)
        await asyncio.get_running_loop().create_future()


class Yard:
    """A pool of two slots, and who hears of it."""

    def __init__(self) -> None:
        self.keeper = FakeKeeper()
        self.spawned = Spawned()
        self.changes = 0
        self.over: list[tuple[Run, Outcome | None]] = []
        self.pool = Pool(
            PoolConfig(procs=2),
            cast(ForkServerKeeper, self.keeper),
            events=Events(),
            caps={},
            on_over=lambda run, outcome: self.over.append((run, outcome)),
            on_change=self._on_change,
            spawn=self.spawned,
            cgroups=cast(ChildCgroups, SimpleNamespace(leftovers=lambda: [])),
        )

    def _on_change(self) -> None:
        self.changes += 1

    def submit(self, id: str = "a", **job: Any) -> Run:
        self.pool.submit(
            make_lease(make_job(id=id, requested_at=asyncio.get_running_loop().time(), **job)), timeout_s=9
        )
        return self.pool.waiting[-1]

    def dies_with(self, run: Run) -> None:
        """The child that has been given this run is dead, and has never begun it."""
        self.pool._waiting.remove(run)
        run.times_given += 1
        self.pool._bury(run, "killed by SIGKILL", "")


def play(story: Callable[[Yard], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        yard = Yard()
        try:
            await story(yard)
        finally:
            await yard.spawned.stop()

    asyncio.run(main())


async def a_moment() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


# --- a drain ----------------------------------------------------------------------------------------------------------


def test_a_last_attempt_whose_child_dies_before_it_began_gets_another_one_even_in_a_drain() -> None:
    async def story(yard: Yard) -> None:
        run = yard.submit(retry_count=3, max_retries=3)
        yard.pool.stop_replacing()
        yard.pool.turn()
        await a_moment()
        assert yard.keeper.forks == []
        run.abort_reason = "shutdown"
        yard.dies_with(run)
        await a_moment()
        assert yard.pool.waiting == (run,)
        assert yard.keeper.forks == [0, 1]

    play(story)


def test_when_all_are_killed_nobody_is_started_for_a_run_that_no_child_has_begun() -> None:
    async def story(yard: Yard) -> None:
        run = yard.submit()
        yard.pool.kill_all("shutdown")
        yard.dies_with(run)
        await a_moment()
        assert yard.keeper.forks == []

    play(story)


@pytest.mark.parametrize("is_there", [True, False])
def test_who_waits_for_the_pool_hears_that_a_waiting_run_was_taken_back(is_there: bool) -> None:
    async def story(yard: Yard) -> None:
        run = yard.submit()
        key = run.job.key if is_there else ("another", "lease")
        assert (yard.pool.withdraw(key) is run) is is_there
        assert yard.changes == 0, "not while the caller is about to settle it"
        await a_moment()
        assert yard.changes == is_there

    play(story)


# --- children that fail -----------------------------------------------------------------------------------------------


def test_a_slot_is_backed_off_until_a_child_of_it_is_ready_again() -> None:
    async def story(yard: Yard) -> None:
        first, second = yard.pool.slots
        assert yard.pool.backed_off == 0
        first.backoff.next_delay()
        assert yard.pool.backed_off == 1
        first.child, second.child = make_child(0, ChildState.STARTING), make_child(1, ChildState.STARTING)
        first.child.ready_at = second.child.ready_at = None
        assert yard.pool.backed_off == 1, "it tries again, and that is all; the other has never failed"
        first.child.ready_at = 5.0
        assert yard.pool.backed_off == 0
        first.child = None
        first.backoff.reset()
        assert yard.pool.backed_off == 0

    play(story)
