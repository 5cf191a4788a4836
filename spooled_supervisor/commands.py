"""What the control socket, signals and the service can ask of a running supervisor: one method per command.

Every command answers with what it did, or raises `Refused` with why not. It changes the supervisor only through the
parts that own things: pool, keeper, claimer.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from spooled_supervisor import descriptors
from spooled_supervisor import events as ev
from spooled_supervisor.childlink import ChildLink
from spooled_supervisor.control import Answer, Command, Refused
from spooled_supervisor.errors import AppError
from spooled_supervisor.events import Events
from spooled_supervisor.forkclient import ForkServerKeeper
from spooled_supervisor.holding import Holder
from spooled_supervisor.job import Failed
from spooled_supervisor.lifecycle import ChildState, Phase
from spooled_supervisor.observer import Observer, Standing
from spooled_supervisor.pool import Pool

MAX_PROCS = 1000
STACK_LIMIT_S = 1.0
STACK_LOOK_S = 0.02
KILLED_TEXT = "stopped by an operator"


class Commands:
    """For one supervisor."""

    def __init__(
        self,
        standing: Standing,
        *,
        pool: Pool,
        keeper: ForkServerKeeper,
        holder: Holder,
        observer: Observer,
        events: Events,
        abort_grace_s: float,
        set_quiet: Callable[[str | None, str], None],
        stop: Callable[[str], None],
        on_reloaded: Callable[[], None],
        on_reloading: Callable[[bool, str], None],
    ) -> None:
        self._standing = standing
        self._pool = pool
        self._keeper = keeper
        self._holder = holder
        self._observer = observer
        self._events = events
        self._abort_grace_s = abort_grace_s
        self._set_quiet = set_quiet
        self._stop = stop
        self._on_reloaded = on_reloaded
        self._on_reloading = on_reloading
        self._is_reloading = False

    def table(self) -> Mapping[str, Command]:
        """By name, as the control socket takes them."""
        return {
            "status": self.status,
            "quiet": self.quiet,
            "resume": self.resume,
            "scale": self.scale,
            "reload": self.reload,
            "recycle": self.recycle,
            "kill-job": self.kill_job,
            "stacks": self.stacks,
            "stop": self.stop,
        }

    async def status(self, _request: Mapping[str, Any]) -> Answer:
        """The whole snapshot."""
        return Answer("", more={"status": dataclasses.asdict(self._observer.snapshot())})

    async def quiet(self, request: Mapping[str, Any]) -> Answer:
        """Claim nothing until resumed; what is held goes on."""
        self._refuse_if_stopping()
        if self._standing.quiet_reason is not None:
            return Answer(f"quiet already: {self._standing.quiet_reason}")
        self._set_quiet(str(request.get("by", "an operator"))[:100], "")
        return Answer(f"quiet: nothing more is claimed; jobs held: {self._pool.jobs_held}")

    async def resume(self, _request: Mapping[str, Any]) -> Answer:
        """Claim again."""
        self._refuse_if_stopping()
        if self._standing.quiet_reason is None:
            return Answer("not quiet: jobs are claimed")
        self._set_quiet(None, "an operator")
        return Answer("resumed: jobs are claimed again")

    async def scale(self, request: Mapping[str, Any]) -> Answer:
        """Have `n` children, or `step` more (fewer)."""
        self._refuse_if_stopping()
        before = len(self._pool.slots)
        procs = _whole(request["n"], "n") if "n" in request else before + _whole(request.get("step"), "step")
        if not 1 <= procs <= MAX_PROCS:
            raise Refused(f"scale {procs}: it must be a whole number from 1 to {MAX_PROCS}")
        if procs > before and (lack := descriptors.make_room(procs)):
            raise Refused(f"scale {procs}: {lack}")
        self._pool.scale(procs)
        self._events.emit(ev.Scaled(before, procs))
        return Answer(f"{procs} children (there were {before})")

    async def reload(self, _request: Mapping[str, Any]) -> Answer:
        """Import the app anew and replace all children, each when its job is done. A broken app changes nothing."""
        self._refuse_if_stopping()
        if self._is_reloading:
            raise Refused("a reload is under way already")
        self._is_reloading = True
        self._on_reloading(True, "reloading")
        try:
            generation = await self._keeper.reload()
        except (AppError, OSError) as error:
            self._refuse_if_stopping()
            self._events.emit(ev.ReloadFailed(self._keeper.last_generation, str(error)))
            self._on_reloading(False, f"reload failed, generation {self._keeper.generation} goes on")
            going_on = f"generation {self._keeper.generation} goes on serving"
            raise Refused(f"the app cannot be loaded, {going_on}:\n{error}") from error
        finally:
            self._is_reloading = False
        self._refuse_if_stopping()  # meanwhile: nobody is told that we are ready, no child is started
        self._on_reloaded()
        renewed = self._pool.renew("reload")
        self._events.emit(ev.Reloaded(generation, renewed))
        self._on_reloading(False, "")
        return Answer(f"generation {generation} is loaded; {renewed} children are replaced, busy ones after their job")

    async def recycle(self, request: Mapping[str, Any]) -> Answer:
        """Replace the child of one slot, or of all, by a fresh one."""
        self._refuse_if_stopping()
        slot = request.get("slot")
        if slot is None:
            return Answer(f"{self._pool.renew('recycle')} children are replaced, busy ones after their job")
        index = _whole(slot, "slot")
        if not 0 <= index < len(self._pool.slots):
            raise Refused(f"slot {index}: there are slots 0 to {len(self._pool.slots) - 1}")
        if not self._pool.renew("recycle", index):
            raise Refused(f"slot {index} has no child now; it gets a fresh one anyway")
        return Answer(f"the child of slot {index} is replaced, after its job if it has one")

    async def kill_job(self, request: Mapping[str, Any]) -> Answer:
        """Tell a job to stop, kill its family after the grace, and fail it (with retry)."""
        job_id = str(request.get("id", ""))
        key = self._pool.key_of(job_id)
        if key is None:
            raise Refused(f"job {job_id[:100]!r} is not here: it neither runs nor waits")
        if self._holder.cancel_waiting(key, KILLED_TEXT):
            return Answer(f"job {job_id} had not started: it is failed")
        self._pool.abort(key, "operator", kill_after_s=self._abort_grace_s, verdict=Failed(KILLED_TEXT))
        return Answer(f"job {job_id} is told to stop, and killed after {self._abort_grace_s:g} s")

    async def stacks(self, _request: Mapping[str, Any]) -> Answer:
        """Write the Python stacks of all busy children to the log."""
        children = self._pool.children
        busy = [child for child in children if child.run is not None and child.state is not ChildState.KILLED]
        for child in busy:
            child.dump_stack()
        runs = [child.run for child in busy]
        stacks = await asyncio.gather(*map(_stack_of, busy))
        texts = []
        for child, run, stack in zip(busy, runs, stacks, strict=True):
            if run is not None and self._pool.has(child):
                self._events.emit(ev.StackDumped(run.job.id, run.job.queue_name, child.slot, child.pid, stack))
                texts.append(f"slot {child.slot}, job {run.job.id}:\n{stack}")
        return Answer("\n".join(texts) or "no child is busy")

    async def stop(self, _request: Mapping[str, Any]) -> Answer:
        """Drain and exit; asked again, stop at once."""
        self._stop("ctl stop")
        return Answer("stopping")

    def _refuse_if_stopping(self) -> None:
        if self._standing.phase is not Phase.RUNNING:
            raise Refused(f"the supervisor is {self._standing.phase.name.lower()}")


def _whole(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Refused(f"{name}={str(value)[:50]!r}: it must be a whole number")
    return value


async def _stack_of(child: ChildLink) -> str:
    """The stack, once all of it is there: a child that does not run on any CPU now writes it late."""
    try:
        for _ in range(int(STACK_LIMIT_S / STACK_LOOK_S)):
            if child.has_whole_stack():
                break
            await asyncio.sleep(STACK_LOOK_S)
        return child.read_stack() or "(no answer: it is stopped, or deep in the kernel)"
    except OSError:
        return "(it has ended)"
