"""The supervisor's view of its children: who runs what; starts, gives, tells to stop, kills, buries.

Facts (a frame, an exit, a deadline, an order) change the records at once and without awaiting; then `turn` asks
`plan.py` what must be done and does it, so that between two awaits nobody meets a half-made decision. Only forking
awaits.

A run is over when its answer is in, or when its whole family is dead; then its outcome is handed on (`on_over`), once:
the first of answer, death, deadline and lease loss decides, the rest is ignored. A child that dies before it has taken
its job from the pipe costs that job nothing: another child gets it.

The pool knows neither the service nor the ends of leases: it is told to abort and to kill.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import random
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, assert_never

from spooled_supervisor import events as ev
from spooled_supervisor import exits, family, frames
from spooled_supervisor.childcgroups import ChildCgroups
from spooled_supervisor.childlink import ChildLink, Run
from spooled_supervisor.config import PoolConfig
from spooled_supervisor.errors import ProtocolError
from spooled_supervisor.events import Events
from spooled_supervisor.forkclient import ForkRefused, ForkServerGone, ForkServerKeeper
from spooled_supervisor.graveyard import Graveyard
from spooled_supervisor.job import Crashed, Failed, Outcome, Released, Succeeded, TimedOut
from spooled_supervisor.leases import Key, Lease
from spooled_supervisor.lifecycle import ChildEvent, ChildState
from spooled_supervisor.plan import ISOLATION, Give, Kill, Retire, Slot, Start, TimeOut, next_deadline, plan
from spooled_supervisor.resources import OomCounter, rss_private
from spooled_supervisor.timing import now

START_LIMIT_S = 30.0
"""A job that its child has not taken from the pipe by then goes to another child."""
LEAVE_LIMIT_S = 5.0
"""A child that holds no job and was asked to leave is killed after this: a thread or a stop hook keeps it."""
FRAGILE_S = 1.0
"""A child that ends by itself, without a job, sooner than this after its hello counts as one that failed to boot."""
BROKEN_LIMIT_S = 1.0
"""How long a child may live on after its pipe ended: its exit, which says more, usually follows at once."""
CLOSE_LIMIT_S = 2.0
CPUS = os.cpu_count() or 1
TELL_DELAY_S = 0.001
LONG_JOB_S = 0.003
"""A child whose last job took so long has, in all likelihood, nothing to tell of its next one for TELL_DELAY_S."""
MAX_TIMES_GIVEN = 3
RECYCLE_JITTER = 0.1


class Pool:
    """All children of one supervisor. Used from the loop's thread only; `start` first, `close` last."""

    def __init__(
        self,
        config: PoolConfig,
        keeper: ForkServerKeeper,
        *,
        events: Events,
        caps: Mapping[str, int],
        on_over: Callable[[Run, Outcome | None], None],
        on_change: Callable[[], None],
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        on_metrics: Callable[[int, int, int, bytes], None] = lambda slot, generation, pid, report: None,
        kin: family.Kin | None = None,
        cgroups: ChildCgroups | None = None,
    ) -> None:
        self._config = config
        self._keeper = keeper
        self._events = events
        self._caps = caps
        self._on_over = on_over
        self._on_change = on_change
        self._spawn = spawn
        self._kin = kin  # in a program that has other children
        self._cgroups = ChildCgroups(events) if cgroups is None else cgroups
        self._on_metrics = on_metrics  # slot, generation, pid of the child, and its report
        self._slots = [Slot(index) for index in range(config.procs)]
        self._children: dict[int, ChildLink] = {}  # by pid, until reaped
        self._waiting: deque[Run] = deque()
        self._next_run = 1
        self._is_replacing = True  # children that are missing are started
        self._is_ending = False  # they never will be again
        self._forks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._ignored: list[ChildLink] = []  # their reports are read when the answers are handed on
        self._answered: list[Run] = []  # their outcomes are known and not handed on yet
        self._tell_timer: asyncio.TimerHandle | None = None
        self._oom = OomCounter()
        self._oom_count = self._oom.read()
        self._graveyard = Graveyard(
            events=events,
            known=lambda: self.pids,
            is_fork_open=lambda: keeper.open_requests > 0,
            on_over=self._on_buried,
            on_free=self.turn,
            kin=kin,
        )
        for leftover in self._cgroups.leftovers():
            self._graveyard.clear(leftover)
        self._loop = asyncio.get_running_loop()
        self._all_gone = asyncio.Event()  # no child is left to be reaped
        self._all_gone.set()

    # --- what it is asked -------------------------------------------------------------------------------------------

    def submit(self, lease: Lease, *, timeout_s: float, is_isolated: bool = False) -> None:
        """Run this job as soon as a child is idle (a fresh one that runs nothing else); it waits here until then.

        Call `turn` when all of a claim are here: to look at all children for each of them would take the square of
        their number.
        """
        run = Run(self._next_run, lease, claimed_at=now(), timeout_s=timeout_s, is_isolated=is_isolated)
        self._waiting.append(run)
        self._next_run += 1

    def withdraw_waiting(self) -> list[Run]:
        """Take back all runs that no child has."""
        runs = list(self._waiting)
        self._waiting.clear()
        return runs

    def withdraw(self, key: Key) -> Run | None:
        """Take back the run with this lease if no child has it yet."""
        for run in self._waiting:
            if run.job.key == key:
                self._waiting.remove(run)
                self._loop.call_soon(self._on_change)  # a drain may be over with it
                return run
        return None

    def abort(
        self, key: Key, reason: str, *, kill_after_s: float, verdict: Outcome | None = None, is_lost: bool = False
    ) -> bool:
        """Tell the running job with this lease to stop, and kill its family after so many seconds.

        `verdict` becomes its outcome unless it has one; `is_lost`: it will have none. False if no child runs it.
        """
        child = self._child_with(key)
        if child is None or child.run is None:
            return False
        _decide(child.run, verdict, is_lost=is_lost)
        self._abort(child, reason, kill_after_s=kill_after_s)
        return True

    def abort_all(self, reason: str) -> None:
        """Ask every running job to stop. Nobody is killed by this, and one that finishes has finished."""
        for child in self.children:
            self._abort(child, reason, kill_after_s=None)

    def kill(self, key: Key, reason: str, *, verdict: Outcome | None = None, is_lost: bool = False) -> bool:
        """Kill the family of the running job with this lease. False if no child runs it."""
        child = self._child_with(key)
        if child is None or child.run is None:
            return False
        _decide(child.run, verdict, is_lost=is_lost)
        self._kill(child, reason)
        return True

    def kill_all(self, reason: str, *, verdict: Outcome | None = None) -> None:
        """Kill every family; nobody is replaced any more, whoever waits."""
        self._is_replacing, self._is_ending = False, True
        for child in self.children:
            if child.run is not None:
                _decide(child.run, verdict)
            self._kill(child, reason)

    def stop_replacing(self) -> None:
        """Children that leave or die are not replaced any more, unless a run that one has not begun needs it."""
        self._is_replacing = False

    def retire_idle(self) -> None:
        """Ask children that have no job to leave, and replace none: the supervisor stops."""
        self._is_replacing = False
        for child in self.children:
            if child.run is None:
                self._ask_to_leave(child, "shutdown")

    def scale(self, procs: int) -> None:
        """Have so many slots. Children of slots that are gone finish their job and leave."""
        while len(self._slots) < procs:
            self._slots.append(Slot(len(self._slots)))
        gone, self._slots[procs:] = self._slots[procs:], []
        for slot in gone:
            for child in (slot.child, slot.successor):
                if child is not None:
                    self._ask_to_leave(child, "scale")
        self.turn()
        self._on_change()

    def renew(self, reason: str, index: int | None = None) -> int:
        """Replace the child of this slot (all: None) by a fresh one, which is ready before the old one leaves.

        A busy child is replaced when its job is done. How many will be replaced.
        """
        slots = self._slots if index is None else self._slots[index : index + 1]
        renewed = [slot for slot in slots if slot.child is not None]
        for slot in renewed:
            slot.renew_reason = reason
            slot.not_before = min(slot.not_before, now())  # asked for: no back-off of before counts
        self.turn()
        return len(renewed)

    def has(self, child: ChildLink) -> bool:
        """Whether it is not reaped yet."""
        return self._children.get(child.pid) is child

    def key_of(self, job_id: str) -> Key | None:
        """The key of the newest run of this job, if there is one."""
        runs = [*self._waiting, *(child.run for child in self._children.values() if child.run is not None)]
        return next((run.job.key for run in reversed(runs) if run.job.id == job_id), None)

    def kill_if_above(self, limit_bytes: int) -> None:
        """Kill the families of children whose job has grown them beyond the limit; the job fails, saying so."""
        for child in self.children:
            run = child.run
            if run is not None and rss_private(child.pid) - run.base_memory_bytes > limit_bytes:
                _decide(run, Failed(_too_much_memory(limit_bytes)))
                self._kill(child, "memory")

    async def close(self) -> None:
        """Kill what is left, see it dead (within CLOSE_LIMIT_S), let the fork server go."""
        self.kill_all("shutdown")
        for task in self._forks:
            task.cancel()
        await asyncio.gather(*self._forks, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._all_gone.wait()
        for timer in (self._timer, self._tell_timer):
            if timer is not None:
                timer.cancel()
        for child in self.children:  # in the kernel's hands: not even SIGKILL has ended it
            child.close()
        self._children.clear()
        await self._keeper.close()
        self._graveyard.close()

    # --- what it shows ----------------------------------------------------------------------------------------------

    @property
    def children(self) -> tuple[ChildLink, ...]:
        """All that are not reaped yet."""
        return tuple(self._children.values())

    @property
    def is_empty(self) -> bool:
        """Whether there is no child, and none is being born."""
        return not self._children and not self._forks

    @property
    def pids(self) -> list[int]:
        """Of the fork server, also one that still imports, and all children."""
        return [*self._children, *self._keeper.pids]

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(self._slots)

    @property
    def waiting(self) -> tuple[Run, ...]:
        return tuple(self._waiting)

    @property
    def idle(self) -> int:
        """Children that could take a job now."""
        return sum(slot.idle_child is not None for slot in self._slots)

    @property
    def usable(self) -> int:
        """Children that run jobs now or could."""
        return sum(slot.child is not None and slot.child.is_usable for slot in self._slots)

    @property
    def backed_off(self) -> int:
        """Slots whose last child failed, and whose next one, if it is there at all, has not become ready."""
        return sum(
            slot.backoff.failures > 0 and (slot.child is None or slot.child.ready_at is None) for slot in self._slots
        )

    @property
    def jobs_held(self) -> int:
        """Runs that are not over."""
        running = sum(child.run is not None for child in self._children.values())
        return len(self._waiting) + running + len(self._graveyard) + len(self._answered)

    def in_progress(self, queue_name: str) -> int:
        """How many children work for this queue."""
        return sum(c.run is not None and c.run.job.queue_name == queue_name for c in self._children.values())

    def places(self, prefetch: int) -> int:
        """How many more jobs may be claimed: one per idle child, and `prefetch` in advance per usable one."""
        return max(0, self.idle + prefetch * self.usable - len(self._waiting))

    # --- plan and perform -------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Do what is due, and wake up again when the next thing is."""
        at = now()
        may_start = self._is_replacing and self._keeper.is_ready and not self._graveyard.is_held_up
        for action in plan(
            at,
            slots=self._slots,
            children=self._children.values(),
            waiting=self._waiting,
            caps=self._caps,
            may_start=may_start,
        ):
            match action:
                case Start(slot=slot):
                    self._start(slot)
                case Give(child=child, run=run):
                    self._give(child, run)
                case TimeOut(child=child):
                    self._time_out(child)
                case Kill(child=child, reason=reason):
                    self._kill(child, reason)
                case Retire(child=child, reason=reason):
                    self._ask_to_leave(child, reason)
                case _:
                    assert_never(action)
        self._arm(next_deadline(at, slots=self._slots, children=self._children.values(), may_start=may_start))

    def _arm(self, when: float) -> None:
        """Have `turn` called at `when`. A timer that is set for earlier is left: it will look again."""
        if when == math.inf:
            return
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        for child in tuple(self._ignored):  # after a stop of ours their time may seem to be over
            child.look()
        self.turn()

    def _start(self, slot: Slot) -> None:
        slot.is_forking = True
        task = self._spawn(self._fork(slot), f"fork {slot.index}")
        self._forks.add(task)
        task.add_done_callback(self._on_fork_done)

    def _on_fork_done(self, task: asyncio.Task[None]) -> None:
        self._forks.discard(task)
        self._on_change()

    async def _fork(self, slot: Slot) -> None:
        try:
            born = await self._keeper.fork(slot.index)
        except ForkServerGone:
            self._loop.call_soon(self.turn)  # another one may have taken over; else the keeper says when there is one
            return
        except (ForkRefused, OSError) as error:  # OSError: no descriptors left for another child's pipes
            cause = str(error)
            self._back_off(slot, lambda delay: ev.ForkFailed(slot.index, cause, delay))
            return
        finally:
            slot.is_forking = False
            self._loop.call_soon(self._graveyard.sweep)  # held up while the fork was open
        child = ChildLink(
            born,
            born_at=now(),
            cgroup=self._cgroups.make(born.slot, born.pid),
            on_message=self._on_message,
            on_broken=self._on_broken,
            on_exit=self._on_exit,
            on_line=self._on_line,
            on_dropped=self._on_dropped,
        )
        self._children[child.pid] = child
        self._all_gone.clear()
        if slot.child is None:
            slot.child = child
        else:
            slot.successor = child
        child.deadline = child.born_at + self._config.boot_timeout_s
        child.jobs_limit = _jittered_limit(self._config.max_jobs_per_child)
        child.send(frames.Adopted(os.getpid(), b"" if child.cgroup is None else os.fsencode(child.cgroup.path)))
        self._events.emit(ev.ChildStarted(slot.index, child.generation, child.pid))
        if not self._is_replacing:
            self._ask_to_leave(child, "shutdown")
        elif slot not in self._slots:
            self._ask_to_leave(child, "scale")
        self.turn()

    def _give(self, child: ChildLink, run: Run, *, is_output_taken: bool = False) -> None:
        """The child counts as busy before the frame is written. `is_output_taken`: up to now."""
        self._waiting.remove(run)
        run.given_at = now()
        run.times_given += 1
        run.slot = child.slot
        if self._config.child_memory_limit_bytes is not None:
            run.base_memory_bytes = rss_private(child.pid)  # what earlier jobs have left there is not its fault
        if child.cgroup is not None:
            self._cgroups.begin_job(child.cgroup)
        if not is_output_taken:
            child.output.begin()  # what was said before is not this job's
        child.run = run
        child.advance(ChildEvent.WAS_GIVEN_JOB, run.given_at + START_LIMIT_S)
        job = run.job
        child.send(
            frames.RunJob(
                run.number,
                job.id,
                job.queue_name,
                job.payload,
                job.retry_count,
                job.max_retries,
                run.timeout_s,
            )
        )

    def _time_out(self, child: ChildLink) -> None:
        assert child.run is not None
        _decide(child.run, TimedOut(child.run.timeout_s))
        self._abort(child, "timeout", kill_after_s=self._config.abort_grace_s, event=ChildEvent.RAN_OUT_OF_TIME)

    def _abort(
        self,
        child: ChildLink,
        reason: str,
        *,
        kill_after_s: float | None,
        event: ChildEvent = ChildEvent.WAS_ASKED_TO_ABORT,
    ) -> None:
        """Tell the child's job to stop. It is told the first reason; a later one can only bring its end nearer.

        Without `kill_after_s` the job's own limit goes on to count, and its passing kills at once.
        """
        run = child.run
        if run is None or child.state not in (ChildState.BUSY, ChildState.ABORTING):
            return
        limit = now() + kill_after_s if kill_after_s is not None else math.inf
        is_over = event is ChildEvent.RAN_OUT_OF_TIME or child.deadline is None
        deadline = limit if is_over else min(limit, child.deadline or 0.0)
        child.advance(event, deadline)
        if run.abort_reason is None:
            child.abort(run.number, reason)
            self._events.emit(ev.JobAborting(run.job.id, run.job.queue_name, child.slot, reason))
        if run.abort_reason is None or limit <= deadline:
            run.abort_reason = reason
        self._arm(deadline)

    def _kill(self, child: ChildLink, reason: str) -> None:
        if child.state in (ChildState.KILLED, ChildState.GONE):
            return
        run = child.run
        if run is not None and run.abort_reason is not None:
            run.stack = child.read_stack()
        if run is not None and reason == "timeout":
            _decide(run, TimedOut(run.timeout_s))
        child.kill_reason = reason
        child.advance(ChildEvent.WAS_KILLED)
        self._vacate(child)
        if self._kin is not None:
            self._kin.strike(child.pid)
        cgroup = None if child.cgroup is None else child.cgroup.path
        descendants = family.kill_family(child.pid, child.pidfd, cgroup=cgroup)
        job_id = None if run is None else run.job.id
        self._events.emit(ev.ChildKilled(child.slot, child.generation, child.pid, reason, job_id, descendants))

    def _ask_to_leave(self, child: ChildLink, reason: str) -> None:
        """Leave after the current job, or now if there is none."""
        child.leave_reason = child.leave_reason or reason
        if child.state in (ChildState.STARTING, ChildState.IDLE):
            child.advance(ChildEvent.WAS_ASKED_TO_LEAVE, now() + LEAVE_LIMIT_S)
            child.send(frames.Leave())
            self._vacate(child)
            self._arm(now() + LEAVE_LIMIT_S)

    def _vacate(self, child: ChildLink) -> None:
        """It takes no more jobs; a replacement for its slot starts beside it, as soon as we are done here."""
        slot = self._slot_of(child)
        if slot is not None:
            if slot.successor is child:
                slot.successor = None
            else:
                slot.child = slot.renew_reason = None  # the next one is fresh anyway
            self._loop.call_soon(self.turn)

    def _succeed(self, slot: Slot) -> None:
        """The successor is ready: it takes the slot, and its predecessor leaves, after its job if it has one."""
        old, slot.child, slot.successor = slot.child, slot.successor, None
        reason, slot.renew_reason = slot.renew_reason or "recycle", None
        if old is not None:
            self._ask_to_leave(old, reason)

    # --- what children tell -----------------------------------------------------------------------------------------

    def _on_message(self, child: ChildLink, message: frames.FromChild) -> None:
        match message:
            case frames.Answer():
                self._on_answer(child, message)
            case frames.Started(run=number, at=at):
                self._on_started(child, _run_of(child, number), at)
            case frames.Progress(run=number, percent=percent, message=text):
                run = _run_of(child, number)
                run.percent, run.message = percent, text
                job = run.job
                self._events.emit(ev.JobProgressed(job.id, job.queue_name, child.slot, percent, text))
            case frames.Log(severity=severity, message=text, meta=meta, source=source):
                self._emit_line(child, severity, text, source, meta)
            case frames.LogsDropped(lines=lines):
                self._on_dropped(child, lines)
            case frames.Metrics(report=report):
                self._on_metrics(child.slot, child.generation, child.pid, report)
            case frames.Hello():
                self._on_hello(child, message)
            case frames.BootFailed(error=error):
                child.boot_error = error
            case frames.Leaving():
                self._ask_to_leave(child, "terminated")  # unless it was asked: then this is only its answer
            case _:
                assert_never(message)

    def _on_hello(self, child: ChildLink, hello: frames.Hello) -> None:
        if (hello.slot, hello.generation, hello.pid) != (child.slot, child.generation, child.pid):
            raise ProtocolError("its hello is somebody else's")
        if child.ready_at is not None:
            raise ProtocolError("it said hello twice")
        child.ready_at = now()
        if hello.cgroup_error:
            self._cgroups.failed("a child cannot join its cgroup", hello.cgroup_error)
            self._clear_cgroup(child)
        if child.state is ChildState.KILLED:
            return
        child.advance(ChildEvent.SAID_HELLO, child.deadline if child.state is ChildState.STOPPING else None)
        child.base_memory_bytes = rss_private(child.pid)
        slot = self._slot_of(child)
        if slot is not None and slot.successor is child:
            self._succeed(slot)
        if slot is not None and child.generation < self._keeper.generation:
            slot.renew_reason = slot.renew_reason or "reload"  # forked before the reload, adopted after it
        boot_s = round(child.ready_at - child.born_at, 4)
        self._events.emit(ev.ChildReady(child.slot, child.generation, child.pid, boot_s))
        self.turn()
        self._on_change()

    def _on_started(self, child: ChildLink, run: Run, at: float) -> None:
        if run.started_at is not None:
            raise ProtocolError("it started a run twice")
        run.started_at = run.believable_start(at, now())
        # Told to stop by a drain before we knew of its start: its own limit counts all the same.
        is_only_asked = child.state is ChildState.ABORTING and run.abort_reason == "shutdown"
        has_no_other_end = child.deadline == run.given_at + START_LIMIT_S
        if child.state is ChildState.BUSY or (is_only_asked and has_no_other_end):
            child.deadline = run.started_at + run.timeout_s
            self._arm(child.deadline)
        job = run.job
        wait_s = round(run.started_at - run.claimed_at, 6)
        self._events.emit(ev.JobStarted(job.id, job.queue_name, child.slot, child.pid, wait_s))

    def _on_answer(self, child: ChildLink, answer: frames.Answer) -> None:
        run = _run_of(child, answer.run)
        if run.started_at is None or (answer.result is None) == (answer.error is None):
            raise ProtocolError("an answer that is none")
        run.cpu_s = min(max(0.0, answer.cpu_s), (now() - run.started_at) * CPUS)  # it cannot have used more
        if answer.left_behind:
            self._events.emit(ev.LeftoversFound(run.job.id, child.slot, tuple(answer.left_behind)))
        _decide(run, _outcome(run, answer))
        if child.state is ChildState.KILLED:
            return  # its family is dying: the run is over when that is done
        if run.abort_reason is not None:
            run.stack = child.read_stack()
        child.output.begin()  # while its lines are still this job's
        child.run = None
        child.jobs_done += 1
        child.advance(ChildEvent.ANSWERED)
        self._recycle_if_due(child, answer.leaving or (ISOLATION if run.is_isolated else None))
        run.ended_at = now()
        self._answered.append(run)
        if self._gives_next(child):
            if run.ended_at - run.started_at >= LONG_JOB_S:
                child.ignore()
                self._ignored.append(child)
        elif self._waiting or self._is_renewed(child):  # else there is nothing to do but what comes with its time
            self.turn()
        if child.run is None:
            self._tell_answered()
        elif self._tell_timer is None:
            self._tell_timer = self._loop.call_later(TELL_DELAY_S, self._tell_answered)

    def _gives_next(self, child: ChildLink) -> bool:
        """What `turn` comes to in the usual case, without a look at all slots and children: this child has answered,
        and gets what has waited longest. The child is without work meanwhile: this takes half of the time."""
        slot = self._slot_of(child)
        may_take = slot is not None and slot.idle_child is child and slot.renew_reason is None
        if not may_take or not self._waiting or self._caps:
            return False
        run = self._waiting[0]
        if run.is_isolated or now() >= run.lease.abort_at:
            return False
        self._give(child, run, is_output_taken=True)
        self._arm(child.deadline or math.inf)
        return True

    def _is_renewed(self, child: ChildLink) -> bool:
        slot = self._slot_of(child)
        return slot is not None and slot.renew_reason is not None

    def _tell_answered(self) -> None:
        """Hand on what has been answered. Where the child got its next job at once, this waits for a moment.

        A child's answer wakes us on its own CPU, and it cannot go on before we sleep: so it gets the job, we sleep, and
        then do what its last one still needs. With 10 ms jobs that is a tenth of all its time.
        """
        if self._tell_timer is not None:
            self._tell_timer.cancel()
            self._tell_timer = None
        answered, self._answered = self._answered, []
        ignored, self._ignored = self._ignored, []
        for child in ignored:
            child.listen()
        for run in answered:
            self._over(run)
        self._on_change()

    def _recycle_if_due(self, child: ChildLink, unfit: str | None) -> None:
        slot = self._slot_of(child)
        if slot is not None:
            slot.backoff.reset()
        if unfit is not None or child.leave_reason is not None:
            self._ask_to_leave(child, child.leave_reason or unfit or "")
        elif child.jobs_limit is not None and child.jobs_done >= child.jobs_limit:
            self._ask_to_leave(child, "jobs")
        elif self._config.max_child_memory_bytes is not None:
            self._recycle_if_fat(child, rss_private(child.pid))

    def _recycle_if_fat(self, child: ChildLink, private_bytes: int) -> None:
        limit = self._config.max_child_memory_bytes
        if limit is not None and private_bytes - child.base_memory_bytes > limit and child.leave_reason is None:
            self._ask_to_leave(child, "memory")

    def _over(self, run: Run) -> None:
        """Hand the outcome on; with the stack, if it was told to stop because of the time."""
        verdict = run.verdict
        if isinstance(verdict, TimedOut):
            verdict = dataclasses.replace(verdict, stack=run.stack)
        self._on_over(run, None if run.is_lost else verdict)

    def _on_line(self, child: ChildLink, line: str) -> None:
        self._emit_line(child, "info", line, "output", None)

    def _emit_line(self, child: ChildLink, severity: str, text: str, source: str, meta: str | None) -> None:
        job = None if child.run is None else child.run.job
        self._events.emit(
            ev.JobLogged(
                None if job is None else job.id,
                None if job is None else job.queue_name,
                child.slot,
                child.pid,
                severity,
                text,
                source,
                meta,
            )
        )

    def _on_dropped(self, child: ChildLink, lines: int) -> None:
        job_id = None if child.run is None else child.run.job.id
        self._events.emit(ev.JobOutputDropped(job_id, child.slot, lines))

    def _on_broken(self, child: ChildLink, why: str, makes_no_sense: bool) -> None:
        """Its pipe has ended: usually its exit follows at once and says more. Or what it says makes no sense: then it
        must get no other job, as nobody would hear that it has started it."""
        if child.state in (ChildState.KILLED, ChildState.GONE):
            return
        child.broken = why
        if makes_no_sense:
            self._vacate(child)
            self._loop.call_soon(self._kill_if_there, child)  # not now: it may be about to be buried
        else:
            self._loop.call_later(BROKEN_LIMIT_S, self._kill_if_there, child)

    def _kill_if_there(self, child: ChildLink) -> None:
        if self.has(child):
            self._kill(child, "protocol")

    # --- ends -------------------------------------------------------------------------------------------------------

    def _on_exit(self, child: ChildLink) -> None:
        """Its pidfd is readable. What it has left in its pipes counts first: an answer may be among it."""
        child.drain_reports()
        reaped = child.reap()
        if reaped is None:
            return
        child.output.drain()  # while its lines are still this job's
        run, child.run = child.run, None
        tail = child.output.tail
        exit = exits.decode(reaped.status)
        cause = self._cause(child, exit)
        self._blame_limit(child, run, exit)
        was_booting = child.ready_at is None
        child.advance(ChildEvent.EXITED)
        del self._children[child.pid]
        if not self._children:
            self._all_gone.set()
        self._keeper.forget(child.pid)
        slot = self._slot_of(child)
        self._vacate(child)
        self._tell_exit(child, reaped, cause)
        child.close()
        if slot is not None and run is None and (was_booting or _is_fragile(child)):
            self._blame_boot(slot, child, cause, tail)
        elif was_booting and child.kill_reason in ("boot", "protocol") and (place := self._place_of(child)) is not None:
            self._blame_boot(place, child, cause, tail)
        if run is not None:
            self._bury(run, cause, tail)
        self._clear_cgroup(child)
        self._graveyard.sweep_soon()
        self._on_change()

    def _cause(self, child: ChildLink, exit: exits.Exit) -> str:
        """Why it ended, in words that a person can act on."""
        words = exit.words()
        if exit.signal == "SIGKILL" and child.kill_reason is None:
            proof = self._proof_of_oom(child)
            return f"{words}; {proof}" if proof else words
        if child.broken is not None and child.kill_reason == "protocol":
            return f"{words}; {child.broken}"
        return words

    def _proof_of_oom(self, child: ChildLink) -> str:
        """Exact where the child has a cgroup that counts; else another one's death may be what was counted."""
        before, self._oom_count = self._oom_count, self._oom.read()
        if child.cgroup is None or not child.cgroup.has_memory:
            return self._oom.words(before, self._oom_count)
        kills = child.cgroup.oom_kills()
        if child.cgroup.was_killed_by_its_limit():
            return f"its own memory limit was hit (oom_kill 0 -> {kills})"
        return self._oom.words(0, kills)

    def _blame_limit(self, child: ChildLink, run: Run | None, exit: exits.Exit) -> None:
        """The kernel has killed it for its own memory limit: that is told as if the watch had done it."""
        limit = self._config.child_memory_limit_bytes
        is_by_kernel = exit.signal == "SIGKILL" and child.kill_reason is None
        if limit is None or not is_by_kernel or child.cgroup is None or not child.cgroup.was_killed_by_its_limit():
            return
        child.kill_reason = "memory"
        if run is not None and run.started_at is not None:
            kills = child.cgroup.oom_kills()
            _decide(run, Failed(f"{_too_much_memory(limit)}; the kernel killed it (oom_kill 0 -> {kills})"))

    def _clear_cgroup(self, child: ChildLink) -> None:
        if child.cgroup is not None:
            self._graveyard.clear(child.cgroup)
            child.cgroup = None

    def _tell_exit(self, child: ChildLink, reaped: exits.Reaped, cause: str) -> None:
        exit = exits.decode(reaped.status)
        self._events.emit(
            ev.ChildExited(
                child.slot,
                child.generation,
                child.pid,
                child.kill_reason or child.leave_reason or ("boot" if child.ready_at is None else "crash"),
                cause,
                exit.signal,
                exit.exit_code,
                round(now() - child.born_at, 3),
                round(reaped.cpu_s, 3),
                reaped.max_rss_bytes,
                child.jobs_done,
            )
        )

    def _blame_boot(self, slot: Slot, child: ChildLink, cause: str, tail: str) -> None:
        if child.leave_reason is not None:
            return  # it was asked to
        if child.kill_reason == "boot":
            cause = f"it was not ready after --boot-timeout {self._config.boot_timeout_s:g} s"
        self._back_off(
            slot,
            lambda delay: ev.ChildFailedToBoot(
                slot.index, child.generation, child.pid, child.boot_error or cause, tail, delay
            ),
        )

    def _back_off(self, slot: Slot, event: Callable[[float], ev.Event]) -> None:
        delay = slot.backoff.next_delay()
        slot.not_before = now() + delay
        self._events.emit(event(round(delay, 3)))
        self._arm(slot.not_before)
        self._on_change()

    def _bury(self, run: Run, cause: str, tail: str) -> None:
        """The child died with this run: it crashed, unless it was decided already or never started."""
        never_started = run.started_at is None and run.verdict is None and not run.is_lost
        is_too_late = run.abort_reason == "shutdown" and not run.job.is_last_attempt  # it would go back in any case
        if never_started and is_too_late:
            _decide(run, Released("not started: the worker is shutting down"))
        elif never_started and run.times_given < MAX_TIMES_GIVEN:
            run.abort_reason = None  # whoever gets it is told anew
            self._waiting.appendleft(run)
            self._is_replacing = not self._is_ending  # in a drain nobody is replaced, but this one needs a child
            self._loop.call_soon(self.turn)  # another one may be idle
            return
        was = "was " if cause.startswith("killed") else ""
        _decide(run, Crashed(f"the child {was}{cause} without an outcome", tail))
        self._graveyard.bury(run)

    def sweep_hint(self) -> None:
        """SIGCHLD: somebody died. Known children are told by their pidfds; this looks after strangers."""
        self._graveyard.hint()

    def _on_buried(self, runs: list[Run]) -> None:
        for run in runs:
            self._over(run)
        self.turn()
        self._on_change()

    def _child_with(self, key: Key) -> ChildLink | None:
        for child in self._children.values():
            if child.run is not None and child.run.job.key == key:
                return child
        return None

    def _slot_of(self, child: ChildLink) -> Slot | None:
        """The slot that it is in; one that leaves or dies has left its slot already."""
        slot = self._place_of(child)
        return slot if slot is not None and child in (slot.child, slot.successor) else None

    def _place_of(self, child: ChildLink) -> Slot | None:
        """The slot that it was started for, if there still is one."""
        return self._slots[child.slot] if child.slot < len(self._slots) else None


def _decide(run: Run, verdict: Outcome | None, *, is_lost: bool = False) -> None:
    """The first verdict counts."""
    run.is_lost = run.is_lost or is_lost
    if run.verdict is None:
        run.verdict = verdict


def _too_much_memory(limit_bytes: int) -> str:
    return f"the job needs more memory than --child-memory-limit {limit_bytes} bytes allows"


def _outcome(run: Run, answer: frames.Answer) -> Outcome:
    if answer.result is not None:
        return Succeeded(answer.result)
    if answer.aborted == "shutdown" and run.abort_reason == "shutdown":
        return Released(answer.error or "")
    return Failed(answer.error or "", retryable=answer.retryable)


def _run_of(child: ChildLink, number: int) -> Run:
    """The child's run, if it has this number. Raises ProtocolError: a child speaks of the one run that it holds."""
    if child.run is None or child.run.number != number:
        raise ProtocolError(f"it spoke of run {number}, which is not its own")
    return child.run


def _is_fragile(child: ChildLink) -> bool:
    """Whether it ended by itself so soon after its hello that its successor should not start at once."""
    is_by_itself = child.kill_reason is None and child.leave_reason is None
    return is_by_itself and child.ready_at is not None and not child.jobs_done and now() - child.ready_at < FRAGILE_S


def _jittered_limit(limit: int | None) -> int | None:
    """Up to a tenth sooner, so that not all children are replaced at once."""
    return None if limit is None else max(1, limit - random.randint(0, int(limit * RECYCLE_JITTER)))
