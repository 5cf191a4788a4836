"""What operators can ask for: each command in each situation, what it does to the parts, and its answer."""

# ruff: noqa: ASYNC110 # a turn of the loop is all that is waited for

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spooled_supervisor import commands, descriptors, timing
from spooled_supervisor.commands import KILLED_TEXT, MAX_PROCS, Commands
from spooled_supervisor.control import Answer, Refused
from spooled_supervisor.errors import AppError
from spooled_supervisor.events import Events, Reloaded, ReloadFailed, Scaled, StackDumped
from spooled_supervisor.forkclient import ForkServerKeeper
from spooled_supervisor.holding import Holder
from spooled_supervisor.job import Failed
from spooled_supervisor.leases import Key
from spooled_supervisor.lifecycle import ChildState, Phase
from spooled_supervisor.observer import Observer, Standing
from spooled_supervisor.pool import Pool
from tests.support.fakes import Recorded, make_job, make_run

LIMIT_S = 5.0
GRACE_S = 3.0
JOB = make_job(id="job-7")


@dataclass
class Snapshot:
    phase: str = "running"


class Yard:
    """The pool, as far as commands use it."""

    def __init__(self) -> None:
        self.slots = [SimpleNamespace(index=index, child=object()) for index in range(3)]
        self.jobs_held = 2
        self.children: list[Any] = []
        self.running: dict[str, Key] = {}
        self.told: list[tuple[Any, ...]] = []

    def scale(self, procs: int) -> None:
        self.told.append(("scale", procs))
        self.slots = [SimpleNamespace(index=index, child=object()) for index in range(procs)]

    def renew(self, reason: str, index: int | None = None) -> int:
        self.told.append(("renew", reason, index))
        slots = self.slots if index is None else [self.slots[index]]
        return sum(slot.child is not None for slot in slots)

    def key_of(self, job_id: str) -> Key | None:
        return self.running.get(job_id)

    def abort(self, key: Key, reason: str, *, kill_after_s: float, verdict: Failed) -> bool:
        self.told.append(("abort", key, reason, kill_after_s, verdict))
        return True

    def has(self, child: Any) -> bool:
        return child in self.children


class Server:
    """The keeper of fork servers: `reload` waits for `gate` and then raises `error`, if there is one."""

    def __init__(self) -> None:
        self.generation = self.last_generation = 1
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.tries = 0

    async def reload(self) -> int:
        self.tries += 1
        self.last_generation += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.generation = self.last_generation
        return self.generation


class Desk:
    """Commands with stand-ins for all that they change."""

    def __init__(self, phase: Phase = Phase.RUNNING) -> None:
        self.standing = Standing("w-1")
        self.standing.phase = phase
        self.pool = Yard()
        self.keeper = Server()
        self.waiting: list[Key] = []
        self.cancelled: list[tuple[Key, str]] = []
        self.quieted: list[tuple[str | None, str]] = []
        self.stops: list[str] = []
        self.said: list[tuple[bool, str]] = []
        self.reloading: list[tuple[bool, str]] = []
        events = Events()
        self.recorded = Recorded(events)
        self.commands = Commands(
            self.standing,
            pool=cast(Pool, self.pool),
            keeper=cast(ForkServerKeeper, self.keeper),
            holder=cast(Holder, SimpleNamespace(cancel_waiting=self.cancel_waiting)),
            observer=cast(Observer, SimpleNamespace(snapshot=Snapshot)),
            events=events,
            abort_grace_s=GRACE_S,
            set_quiet=self.set_quiet,
            stop=self.stops.append,
            on_reloaded=lambda: self.pool.told.append(("reloaded",)),
            on_reloading=lambda is_begin, text: self.reloading.append((is_begin, text)),
        )

    def set_quiet(self, reason: str | None, why: str) -> None:
        self.quieted.append((reason, why))
        self.standing.quiet_reason = reason

    def cancel_waiting(self, key: Key, why: str) -> bool:
        if key in self.waiting:
            self.cancelled.append((key, why))
            return True
        return False

    async def answer(self, command: str, **fields: Any) -> Answer:
        async with asyncio.timeout(LIMIT_S):
            return await self.commands.table()[command]({"command": command, **fields})

    async def refusal(self, command: str, **fields: Any) -> str:
        with pytest.raises(Refused) as caught:
            await self.answer(command, **fields)
        return str(caught.value)


def run(main: Any) -> None:
    with asyncio.Runner(loop_factory=timing.new_event_loop, debug=True) as runner:
        runner.run(main)


def told(command: str, *, phase: Phase = Phase.RUNNING, prepare: Callable[[Desk], object] = id, **fields: Any) -> Desk:
    """A desk at which this was asked for; its answer, or why not, is `said`."""

    async def main() -> None:
        desk = Desk(phase)
        prepare(desk)
        try:
            answer = await desk.answer(command, **fields)
            desk.said.append((answer.ok, answer.text))
        except Refused as refused:
            desk.said.append((False, str(refused)))
        desks.append(desk)

    desks: list[Desk] = []
    run(main())
    return desks[0]


def said(desk: Desk) -> tuple[bool, str]:
    """Whether it was done, and what was answered."""
    (answer,) = desk.said
    return answer


# --- while it is not running ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.RUNNING])
@pytest.mark.parametrize(
    ("command", "fields"),
    [("quiet", {}), ("resume", {}), ("scale", {"n": 2}), ("scale", {"step": 1}), ("reload", {}), ("recycle", {})],
)
def test_nothing_is_changed_while_the_supervisor_does_not_run(
    phase: Phase, command: str, fields: Mapping[str, Any]
) -> None:
    desk = told(command, phase=phase, **fields)
    assert said(desk) == (False, f"the supervisor is {phase.name.lower()}")
    assert (desk.pool.told, desk.quieted, desk.reloading, desk.keeper.tries) == ([], [], [], 0)


@pytest.mark.parametrize("command", ["status", "stacks", "stop"])
def test_it_can_be_looked_at_and_stopped_at_any_time(command: str) -> None:
    assert said(told(command, phase=Phase.DRAINING))[0]


# --- quiet and resume -------------------------------------------------------------------------------------------------


def test_quiet_says_how_many_jobs_are_held() -> None:
    desk = told("quiet", by="ctl")
    assert said(desk) == (True, "quiet: nothing more is claimed; jobs held: 2")
    assert desk.quieted == [("ctl", "")]


def test_a_second_quiet_changes_nothing_and_says_why_it_is_quiet() -> None:
    desk = told("quiet", prepare=lambda desk: setattr(desk.standing, "quiet_reason", "SIGTSTP"))
    assert said(desk) == (True, "quiet already: SIGTSTP")
    assert desk.quieted == []


def test_who_asked_for_quiet_is_bounded() -> None:
    desk = told("quiet", by="x" * 5000)
    assert desk.quieted == [("x" * 100, "")]


def test_resume_ends_a_quiet_whoever_began_it() -> None:
    desk = told("resume", prepare=lambda desk: setattr(desk.standing, "quiet_reason", "SIGTSTP"))
    assert said(desk) == (True, "resumed: jobs are claimed again")
    assert desk.quieted == [(None, "an operator")]


def test_resume_while_not_quiet_changes_nothing() -> None:
    desk = told("resume")
    assert said(desk) == (True, "not quiet: jobs are claimed")
    assert desk.quieted == []


# --- scale ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "procs"),
    [({"n": 1}, 1), ({"n": 6}, 6), ({"n": MAX_PROCS}, MAX_PROCS), ({"step": 1}, 4), ({"step": -1}, 2)],
)
def test_scale_says_how_many_there_are_and_were(fields: Mapping[str, Any], procs: int) -> None:
    desk = told("scale", **fields)
    assert said(desk) == (True, f"{procs} children (there were 3)")
    assert desk.pool.told == [("scale", procs)]
    assert desk.recorded.of(Scaled) == [Scaled(3, procs)]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"n": 0}, "scale 0: it must be a whole number from 1 to 1000"),
        ({"n": -1}, "scale -1: it must be a whole number from 1 to 1000"),
        ({"n": 1001}, "scale 1001: it must be a whole number from 1 to 1000"),
        ({"n": 10**30}, f"scale {10**30}: it must be a whole number from 1 to 1000"),
        ({"step": -3}, "scale 0: it must be a whole number from 1 to 1000"),
        ({"n": 2.5}, "n='2.5': it must be a whole number"),
        ({"n": "4"}, "n='4': it must be a whole number"),
        ({"n": True}, "n='True': it must be a whole number"),
        ({"n": None}, "n='None': it must be a whole number"),
        ({}, "step='None': it must be a whole number"),
    ],
)
def test_scale_refuses_what_is_out_of_range_or_no_number(fields: Mapping[str, Any], text: str) -> None:
    desk = told("scale", **fields)
    assert said(desk) == (False, text)
    assert desk.pool.told == []
    assert desk.recorded.all == []


@pytest.mark.parametrize("fields", [{"n": 4}, {"step": 1}, {"n": 2}])
def test_scale_refuses_more_children_than_there_are_descriptors_for(
    monkeypatch: pytest.MonkeyPatch, fields: Mapping[str, Any]
) -> None:
    monkeypatch.setattr(descriptors, "make_room", lambda children: f"{children} do not fit")
    desk = told("scale", **fields)
    if fields == {"n": 2}:  # fewer than now are no reason to ask
        assert said(desk) == (True, "2 children (there were 3)")
    else:
        assert said(desk) == (False, "scale 4: 4 do not fit")
        assert desk.pool.told == []
        assert desk.recorded.all == []


# --- recycle ----------------------------------------------------------------------------------------------------------


def test_recycle_without_a_slot_replaces_all() -> None:
    desk = told("recycle")
    assert said(desk) == (True, "3 children are replaced, busy ones after their job")
    assert desk.pool.told == [("renew", "recycle", None)]


def test_recycle_of_one_slot_replaces_that_one() -> None:
    desk = told("recycle", slot=2)
    assert said(desk) == (True, "the child of slot 2 is replaced, after its job if it has one")
    assert desk.pool.told == [("renew", "recycle", 2)]


@pytest.mark.parametrize("slot", [-1, 3, 99])
def test_recycle_of_an_unknown_slot_is_refused(slot: int) -> None:
    desk = told("recycle", slot=slot)
    assert said(desk) == (False, f"slot {slot}: there are slots 0 to 2")
    assert desk.pool.told == []


def test_recycle_of_an_empty_slot_says_that_a_fresh_child_comes_anyway() -> None:
    desk = told("recycle", slot=1, prepare=lambda desk: setattr(desk.pool.slots[1], "child", None))
    assert said(desk) == (False, "slot 1 has no child now; it gets a fresh one anyway")


# --- kill-job ---------------------------------------------------------------------------------------------------------


def test_kill_job_tells_a_running_one_to_stop_and_fails_it() -> None:
    desk = told("kill-job", id="job-7", prepare=lambda desk: desk.pool.running.update({"job-7": JOB.key}))
    assert said(desk) == (True, "job job-7 is told to stop, and killed after 3 s")
    assert desk.pool.told == [("abort", JOB.key, "operator", GRACE_S, Failed(KILLED_TEXT))]


def test_kill_job_fails_a_waiting_one_at_once() -> None:
    def prepare(desk: Desk) -> None:
        desk.pool.running["job-7"] = JOB.key
        desk.waiting.append(JOB.key)

    desk = told("kill-job", id="job-7", prepare=prepare)
    assert said(desk) == (True, "job job-7 had not started: it is failed")
    assert desk.cancelled == [(JOB.key, KILLED_TEXT)]
    assert desk.pool.told == []


@pytest.mark.parametrize(
    ("fields", "shown"), [({"id": "job-8"}, "'job-8'"), ({}, "''"), ({"id": "x" * 999}, repr("x" * 100))]
)
def test_kill_job_of_an_unknown_one_is_refused(fields: Mapping[str, Any], shown: str) -> None:
    assert said(told("kill-job", **fields)) == (False, f"job {shown} is not here: it neither runs nor waits")


def test_kill_job_works_during_a_drain() -> None:
    def prepare(desk: Desk) -> None:
        desk.pool.running["job-7"] = JOB.key

    assert said(told("kill-job", id="job-7", phase=Phase.DRAINING, prepare=prepare))[0]


# --- reload -----------------------------------------------------------------------------------------------------------


def test_reload_replaces_all_children_by_the_new_generation() -> None:
    desk = told("reload")
    assert said(desk) == (True, "generation 2 is loaded; 3 children are replaced, busy ones after their job")
    assert desk.pool.told == [("reloaded",), ("renew", "reload", None)]
    assert desk.reloading == [(True, "reloading"), (False, "")]
    assert desk.recorded.of(Reloaded) == [Reloaded(2, 3)]


@pytest.mark.parametrize("error", [AppError("shop.py, line 3: SyntaxError"), OSError(12, "no memory")])
def test_reload_of_a_broken_app_changes_nothing_and_says_so(error: Exception) -> None:
    desk = told("reload", prepare=lambda desk: setattr(desk.keeper, "error", error))
    ok, text = said(desk)
    assert not ok
    assert text == f"the app cannot be loaded, generation 1 goes on serving:\n{error}"
    assert desk.pool.told == []
    assert desk.reloading == [(True, "reloading"), (False, "reload failed, generation 1 goes on")]
    assert desk.recorded.of(ReloadFailed) == [ReloadFailed(2, str(error))]


def test_reload_after_a_failed_one_works_again() -> None:
    async def main() -> None:
        desk = Desk()
        desk.keeper.error = AppError("broken")
        await desk.refusal("reload")
        desk.keeper.error = None
        assert (await desk.answer("reload")).text.startswith("generation 3 is loaded")

    run(main())


def test_reload_while_one_is_under_way_is_refused_and_the_first_goes_on() -> None:
    async def main() -> None:
        desk = Desk()
        desk.keeper.gate.clear()
        first = asyncio.ensure_future(desk.answer("reload"))
        while not desk.keeper.tries:
            await asyncio.sleep(0)
        assert await desk.refusal("reload") == "a reload is under way already"
        desk.keeper.gate.set()
        assert (await first).text.startswith("generation 2 is loaded")
        assert desk.keeper.tries == 1

    run(main())


def test_reload_that_is_cancelled_does_not_block_the_next_one() -> None:
    async def main() -> None:
        desk = Desk()
        desk.keeper.gate.clear()
        first = asyncio.ensure_future(desk.answer("reload"))
        while not desk.keeper.tries:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        desk.keeper.gate.set()
        assert (await desk.answer("reload")).ok

    run(main())


@pytest.mark.parametrize("error", [None, AppError("broken")])
def test_a_stop_during_a_reload_is_not_undone_by_its_end(error: Exception | None) -> None:
    """No READY=1 after STOPPING=1, and no children for an app that is about to leave."""

    async def main() -> None:
        desk = Desk()
        desk.keeper.error = error
        desk.keeper.gate.clear()
        reload = asyncio.ensure_future(desk.refusal("reload"))
        while not desk.keeper.tries:
            await asyncio.sleep(0)
        desk.standing.phase = Phase.DRAINING
        desk.keeper.gate.set()
        assert "the supervisor is draining" in await reload
        assert desk.pool.told == []
        assert desk.reloading == [(True, "reloading")]

    run(main())


# --- stacks -----------------------------------------------------------------------------------------------------------


class Busy:
    """A child whose stack is whole at the `after`th look; None: never. One that has ended raises."""

    def __init__(self, slot: int, *, after: int | None = 0, state: ChildState = ChildState.BUSY) -> None:
        self.slot = slot
        self.pid = 1000 + slot
        self.state = state
        self.run = make_run(slot, make_job(id=f"job-{slot}")) if state is not ChildState.IDLE else None
        self.after = after
        self.asked = 0
        self.looks = 0

    def dump_stack(self) -> None:
        self.asked += 1

    def has_whole_stack(self) -> bool:
        self.looks += 1
        return self.after is not None and self.looks > self.after

    def read_stack(self) -> str:
        return f"in line {self.slot}" if self.after is not None and self.looks > self.after else self.part

    part = ""


class Ended(Busy):
    def has_whole_stack(self) -> bool:
        raise OSError(9, "Bad file descriptor")


def stacks_of(*children: Busy, gone: bool = False) -> Desk:
    def prepare(desk: Desk) -> None:
        desk.pool.children = list(children)
        if gone:
            desk.pool.has = lambda child: False  # type: ignore[method-assign]

    return told("stacks", prepare=prepare)


def test_stacks_are_taken_of_all_busy_children_and_told_and_logged() -> None:
    idle, killed = Busy(0, state=ChildState.IDLE), Busy(3, state=ChildState.KILLED)
    one, two = Busy(1), Busy(2, after=2)
    desk = stacks_of(idle, one, two, killed)
    assert said(desk) == (True, "slot 1, job job-1:\nin line 1\nslot 2, job job-2:\nin line 2")
    assert [child.asked for child in (idle, one, two, killed)] == [0, 1, 1, 0]
    assert desk.recorded.of(StackDumped) == [
        StackDumped("job-1", "emails", 1, 1001, "in line 1"),
        StackDumped("job-2", "emails", 2, 1002, "in line 2"),
    ]


def test_stacks_while_nobody_is_busy() -> None:
    assert said(stacks_of(Busy(0, state=ChildState.IDLE))) == (True, "no child is busy")


def test_a_child_that_does_not_answer_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "STACK_LIMIT_S", 0.06)
    desk = stacks_of(Busy(1, after=None))
    assert said(desk) == (True, "slot 1, job job-1:\n(no answer: it is stopped, or deep in the kernel)")
    slow = Busy(1, after=None)
    slow.part = "Current thread 0x"
    assert said(stacks_of(slow)) == (True, "slot 1, job job-1:\nCurrent thread 0x")


def test_any_number_of_children_that_do_not_answer_is_waited_for_no_longer_than_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commands, "STACK_LIMIT_S", 0.5)
    began_at = timing.now()
    ok, text = said(stacks_of(*(Busy(slot, after=None) for slot in range(20))))
    assert (ok, text.count("(no answer: it is stopped, or deep in the kernel)")) == (True, 20)
    assert timing.now() - began_at < 2 * 0.5, "one after the other they would take longer than ctl waits"


def test_a_child_that_has_ended_meanwhile_is_said_to_have() -> None:
    assert said(stacks_of(Ended(1))) == (True, "slot 1, job job-1:\n(it has ended)")
    desk = stacks_of(Ended(1), gone=True)
    assert said(desk) == (True, "no child is busy")
    assert desk.recorded.all == []


# --- stop and status --------------------------------------------------------------------------------------------------


def test_stop_asks_each_time_it_is_asked() -> None:
    async def main() -> None:
        desk = Desk()
        for _ in range(2):
            assert (await desk.answer("stop")).text == "stopping"
        assert desk.stops == ["ctl stop", "ctl stop"]

    run(main())


def test_status_is_the_whole_snapshot() -> None:
    async def main() -> None:
        answer = await Desk().answer("status")
        assert answer.more == {"status": {"phase": "running"}}

    run(main())
