"""A run is over when its child is dead and no orphan is left, or after a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from spooled_supervisor import family, graveyard
from spooled_supervisor.childcgroups import ChildCgroup
from spooled_supervisor.childlink import Run
from spooled_supervisor.events import Events, OrphansKilled
from spooled_supervisor.family import Swept
from spooled_supervisor.graveyard import LOOK_AGAIN_S, WAIT_LIMIT_S, Graveyard
from tests.support.clock import FakeClock, fake_time, run_in_fake_time
from tests.support.fakes import Recorded, make_run

CLEAN = Swept(0, 0, 0, 0, ())
DYING = Swept(0, 1, 0, 1, ())
"""One was killed and is not dead yet."""
KILLED = Swept(1, 1, 1, 0, ("sleep",))


class Yard:
    """A graveyard with a script of what sweeps find; the last one is repeated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> None:
        self.clock = clock
        self.script = [CLEAN]
        self.sweeps: list[tuple[float, frozenset[int]]] = []
        self.known = [11, 12]
        self.forking = False
        self.over: list[tuple[float, list[int]]] = []
        self.begun = clock()
        monkeypatch.setattr(family, "strangers", lambda known: [7])
        monkeypatch.setattr(family, "sweep", self.sweep)
        events = Events()
        self.recorded = Recorded(events)
        self.freed: list[float] = []
        self.graveyard = Graveyard(
            events=events,
            known=lambda: self.known,
            is_fork_open=lambda: self.forking,
            on_over=self.take,
            on_free=lambda: self.freed.append(round(self.clock() - self.begun, 6)),
        )

    def sweep(self, known: frozenset[int], *, kill: bool, ours: object) -> Swept:
        assert kill
        self.sweeps.append((round(self.clock() - self.begun, 6), frozenset(known)))
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]

    def take(self, runs: list[Run]) -> None:
        self.over.append((round(self.clock() - self.begun, 6), [run.number for run in runs]))

    def die(self, *numbers: int) -> None:
        """Children have died with these runs."""
        for number in numbers:
            self.graveyard.bury(make_run(number))
        self.graveyard.sweep_soon()

    @property
    def times(self) -> list[float]:
        return [at for at, _ in self.sweeps]


Play = Callable[[Callable[[Yard], Coroutine[Any, Any, None]]], Yard]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Run a scene; the yard, for what has come of it."""

    def run(scene: Callable[[Yard], Coroutine[Any, Any, None]]) -> Yard:
        clock = fake_time(monkeypatch, graveyard)

        async def main() -> Yard:
            yard = Yard(monkeypatch, clock)
            await scene(yard)
            return yard

        return run_in_fake_time(clock, main())

    return run


def test_without_an_orphan_a_run_is_over_in_the_same_turn(play: Play) -> None:
    async def scene(yard: Yard) -> None:
        yard.die(1)
        assert len(yard.graveyard) == 1
        await asyncio.sleep(0)
        assert len(yard.graveyard) == 0

    yard = play(scene)
    assert yard.over == [(0.0, [1])]
    assert yard.recorded.all == []


def test_known_children_and_those_from_before_are_spared(play: Play) -> None:
    async def scene(yard: Yard) -> None:
        yard.known.append(13)
        yard.graveyard.sweep()

    assert play(scene).sweeps == [(0.0, frozenset({7, 11, 12, 13}))]


def test_an_orphan_that_dies_slowly_holds_the_run_until_it_is_dead(play: Play) -> None:
    async def scene(yard: Yard) -> None:
        yard.script = [DYING, DYING, KILLED, CLEAN]
        yard.die(1)
        await asyncio.sleep(1.0)

    yard = play(scene)
    assert yard.over == [(2 * LOOK_AGAIN_S, [1])]
    assert yard.recorded.all == [OrphansKilled(1, ("sleep",))]
    assert len(yard.sweeps) == 3, "then nobody looks any more"


def test_an_orphan_that_cannot_die_holds_no_outcome_for_ever(play: Play) -> None:
    async def scene(yard: Yard) -> None:
        yard.script = [DYING]
        yard.die(1)
        await asyncio.sleep(3.0)

    yard = play(scene)
    ((at, runs),) = yard.over
    assert runs == [1]
    assert WAIT_LIMIT_S <= at <= WAIT_LIMIT_S + 2 * LOOK_AGAIN_S
    assert yard.times[-1] > 2.9, "it is still looked after"


def test_a_second_death_waits_its_own_time(play: Play) -> None:
    async def scene(yard: Yard) -> None:
        yard.script = [DYING]
        yard.die(1)
        await asyncio.sleep(0.5)
        yard.die(2)
        await asyncio.sleep(3.0)

    first, second = play(scene).over
    assert (first[1], second[1]) == ([1], [2])
    assert WAIT_LIMIT_S <= first[0] <= WAIT_LIMIT_S + 2 * LOOK_AGAIN_S
    assert 0.5 + WAIT_LIMIT_S <= second[0] <= 0.5 + WAIT_LIMIT_S + 2 * LOOK_AGAIN_S


def test_runs_that_die_together_are_over_together(play: Play) -> None:
    async def scene(yard: Yard) -> None:
        yard.die(1)
        yard.die(2, 3)
        await asyncio.sleep(0)

    assert play(scene).over == [(0.0, [1, 2, 3])]


def test_while_a_fork_is_open_nobody_is_looked_at_and_then_at_once(play: Play) -> None:
    async def scene(yard: Yard) -> None:
        yard.forking = True
        yard.die(1)
        yard.graveyard.hint()
        await asyncio.sleep(0.5)
        assert yard.sweeps == []
        assert len(yard.graveyard) == 1
        yard.forking = False
        yard.graveyard.sweep()

    assert play(scene).over == [(0.5, [1])]


def test_many_hints_are_one_look(play: Play) -> None:
    async def scene(yard: Yard) -> None:
        for _ in range(100):
            yard.graveyard.hint()
        await asyncio.sleep(1.0)
        yard.graveyard.hint()
        await asyncio.sleep(1.0)

    assert play(scene).times == pytest.approx([LOOK_AGAIN_S, 1.0 + LOOK_AGAIN_S])


def test_a_look_that_comes_sooner_replaces_the_hinted_one(play: Play) -> None:
    async def scene(yard: Yard) -> None:
        yard.graveyard.hint()
        yard.graveyard.sweep()
        await asyncio.sleep(1.0)

    assert play(scene).times == [0.0]


class Cgroup:
    """Of a dead child: so many times somebody is still in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, killed: list[Swept]) -> None:
        self.path = Path("/cgroup")
        self.killed = killed
        self.tries = 0
        monkeypatch.setattr(family, "kill_cgroup", self.kill)

    def remove(self) -> bool:
        self.tries += 1
        return self.tries > len(self.killed)

    def kill(self, path: Path) -> Swept:
        assert path == self.path
        return self.killed[self.tries - 1]


def bury_with(yard: Yard, cgroup: Cgroup) -> None:
    yard.graveyard.clear(cast(ChildCgroup, cgroup))
    yard.die(1)


def test_an_empty_cgroup_is_removed_at_once(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    cgroup = Cgroup(monkeypatch, [])

    async def scene(yard: Yard) -> None:
        bury_with(yard, cgroup)
        await asyncio.sleep(1.0)

    yard = play(scene)
    assert (yard.over, cgroup.tries) == ([(0.0, [1])], 1)


def test_whoever_is_left_in_a_cgroup_is_killed_and_holds_the_run_until_it_is_empty(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    cgroup = Cgroup(monkeypatch, [Swept(2, 2, 0, 2, ("a", "b")), CLEAN])

    async def scene(yard: Yard) -> None:
        bury_with(yard, cgroup)
        await asyncio.sleep(1.0)

    yard = play(scene)
    assert yard.over == [(2 * LOOK_AGAIN_S, [1])]
    assert yard.recorded.all == [OrphansKilled(2, ("a", "b"))]
    assert cgroup.tries == 3, "then nobody looks any more"


def test_a_cgroup_is_cleared_while_a_fork_is_open(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody in it can be the child that is about to be named."""
    cgroup = Cgroup(monkeypatch, [CLEAN])

    async def scene(yard: Yard) -> None:
        yard.forking = True
        bury_with(yard, cgroup)
        await asyncio.sleep(0)
        assert (cgroup.tries, yard.sweeps) == (1, [])
        yard.forking = False
        yard.graveyard.sweep()
        await asyncio.sleep(0)

    assert play(scene).over == [(0.0, [1])]


def test_a_cgroup_that_stays_populated_holds_no_outcome_for_ever(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    cgroup = Cgroup(monkeypatch, [CLEAN] * 10_000)

    async def scene(yard: Yard) -> None:
        bury_with(yard, cgroup)
        await asyncio.sleep(3.0)

    ((at, runs),) = play(scene).over
    assert runs == [1]
    assert WAIT_LIMIT_S <= at <= WAIT_LIMIT_S + 2 * LOOK_AGAIN_S


def test_a_cgroup_without_a_death_is_cleared_soon(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    cgroup = Cgroup(monkeypatch, [])

    async def scene(yard: Yard) -> None:
        yard.graveyard.clear(cast(ChildCgroup, cgroup))
        await asyncio.sleep(1.0)

    assert play(scene).times == [LOOK_AGAIN_S]
    assert cgroup.tries == 1


def test_closing_sweeps_for_the_last_time_and_leaves_no_timer(play: Play) -> None:
    async def scene(yard: Yard) -> None:
        yard.graveyard.hint()
        yard.graveyard.close()
        await asyncio.sleep(1.0)

    assert play(scene).sweeps == [(0.0, frozenset({7}))]


def test_a_guest_in_a_program_forgets_its_dead_when_none_is_left(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[float] = []

    class Kin:
        def is_ours(self, stat: object) -> bool:
            return True

        def settle(self) -> None:
            settled.append(1.0)

    async def scene(yard: Yard) -> None:
        guest = Graveyard(
            events=Events(),
            known=lambda: [],
            is_fork_open=lambda: False,
            on_over=yard.take,
            on_free=lambda: None,
            kin=Kin(),  # type: ignore[arg-type]
        )
        yard.script = [DYING, CLEAN]
        guest.sweep()
        assert settled == []
        await asyncio.sleep(1.0)

    play(scene)
    assert settled == [1.0]


def test_while_runs_wait_for_a_fork_no_other_is_to_be_begun(play: Play) -> None:
    """Where one fork follows another, there would be no moment for a look."""

    async def scene(yard: Yard) -> None:
        yard.forking = True
        yard.graveyard.sweep()
        assert not yard.graveyard.is_held_up, "nobody waits"
        yard.die(1)
        await asyncio.sleep(0.1)
        assert yard.graveyard.is_held_up
        assert (yard.over, yard.freed) == ([], [])
        yard.forking = False
        yard.graveyard.sweep()
        assert not yard.graveyard.is_held_up
        await asyncio.sleep(0)
        assert yard.over == [(0.1, [1])]
        assert yard.freed == [0.1]

    play(scene)


def test_a_fork_that_hangs_holds_no_run_for_longer_than_an_orphan_may(play: Play) -> None:
    async def scene(yard: Yard) -> None:
        yard.forking = True
        yard.die(1)
        await asyncio.sleep(WAIT_LIMIT_S * 3)

    yard = play(scene)
    ((at, numbers),) = yard.over
    assert numbers == [1]
    assert WAIT_LIMIT_S <= at <= WAIT_LIMIT_S * 1.1


def test_each_run_waits_for_as_long_as_it_may_whoever_dies_meanwhile(play: Play) -> None:
    async def scene(yard: Yard) -> None:
        yard.script = [DYING]
        yard.die(1)
        for _ in range(5):
            await asyncio.sleep(WAIT_LIMIT_S * 0.7)
            yard.graveyard.sweep_soon()

    yard = play(scene)
    assert yard.over[0][1] == [1]
    assert yard.over[0][0] <= WAIT_LIMIT_S * 1.1
