"""From a claim to a settled outcome: joins what we hold (leases), who runs it (pool) and who reports it (settler).

Every claimed job is in the lease book from here until its outcome is taken, its lease is refused or its time is over.
Lease ends are looked at first, before anything is sent or started, also after the machine has slept. A lease that is
lost or cannot be renewed ends its run before another worker can hold the job, and nothing is reported for it. Renewal
does not depend on a child, and goes on while an outcome is on its way, but not for ever (`leases`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from spooled_supervisor import events as ev
from spooled_supervisor.api.gate import RateGate
from spooled_supervisor.api.service import Service
from spooled_supervisor.api.values import Claim
from spooled_supervisor.breaker import QueueBreaker
from spooled_supervisor.childlink import Run
from spooled_supervisor.errors import ApiRefused, ApiUnavailable, CredentialsRefused, LeaseLost
from spooled_supervisor.events import Events
from spooled_supervisor.job import Crashed, Failed, Job, Outcome, Released, Succeeded, TimedOut, error_text
from spooled_supervisor.leases import Due, Key, Lease, LeaseBook
from spooled_supervisor.lifecycle import LeaseState
from spooled_supervisor.outbox import Leftover, Outbox
from spooled_supervisor.poison import DEATHS_TO_REFUSE, PoisonList
from spooled_supervisor.pool import Pool
from spooled_supervisor.progress import ProgressSender
from spooled_supervisor.settling import Settler
from spooled_supervisor.timing import TICK_S, Alarm, now

RENEW_TIMEOUT_S = 10.0
LOST_GRACE_S = 1.0
"""A handler whose lease is gone has at most this long to stop by itself."""
WAIT_FOR_CHILD_S = 30.0
"""Claimed jobs wait until no child has been usable at all for so long; then they are given back."""
LAG_WORTH_TELLING_S = 1.0

Spawn = Callable[[Coroutine[Any, Any, None], str], object]


class Holder:
    """Holds jobs for one supervisor. `is_draining` and `job_timeout_s` are the supervisor's to know."""

    def __init__(
        self,
        api: Service,
        pool: Pool,
        leases: LeaseBook,
        settler: Settler,
        *,
        events: Events,
        gate: RateGate,
        progress: ProgressSender,
        outbox: Outbox,
        poison: PoisonList,
        breakers: Mapping[str, QueueBreaker],
        abort_grace_s: float,
        limit_of: Callable[[Job], float],
        is_draining: Callable[[], bool],
        on_refused: Callable[[CredentialsRefused], None],
        on_tick: Callable[[float], None],
        spawn: Spawn,
    ) -> None:
        self._api = api
        self._pool = pool
        self._leases = leases
        self._settler = settler
        self._events = events
        self._gate = gate
        self._progress = progress
        self._outbox = outbox
        self._poison = poison
        self._breakers = breakers
        self._abort_grace_s = abort_grace_s
        self._limit_of = limit_of
        self._is_draining = is_draining
        self._on_refused = on_refused
        self._on_tick = on_tick
        self._spawn = spawn
        self._alarm = Alarm()
        self._settled = Alarm()
        self.last_tick_at = now()
        self._usable_at = now()  # when a child last was
        self._outbox_problem: str | None = None  # the last one that was told
        self._earlier: dict[Key, Service] = {}  # leases of earlier lives, each with a client in its name
        self.given_up = 0  # outcomes that never reached the service

    # --- from the claim -------------------------------------------------------------------------------------------

    def take(self, claim: Claim, asked: int) -> int:
        """The jobs of a claim are ours now: run them; what is unreadable or beyond what was asked for goes back.

        How many will run.
        """
        taken = 0
        self._outbox.hold([*claim.jobs, *(unreadable.job for unreadable in claim.unreadable)])
        for job in claim.jobs[:asked]:
            if (lease := self._hold(job)) is not None:
                taken += self._run_or_return(lease)
        self._pool.turn()
        for job in claim.jobs[asked:]:
            if (lease := self._hold(job)) is not None:
                self._return(lease, "not started: the service gave more jobs than were asked for")
        for unreadable in claim.unreadable:
            if (lease := self._hold(unreadable.job)) is not None:
                self._finish(lease, Failed(f"the job's record cannot be used: {unreadable.reason}", retryable=False))
        if self._leases.next_due() < self._alarm.when:
            self._alarm.ring()
        return taken

    def return_waiting(self) -> None:
        """The drain begins: what no child has goes back, but for last attempts, which that would bury."""
        for run in self._pool.waiting:
            if not run.job.is_last_attempt:
                self._pool.withdraw(run.job.key)
                self._return(run.lease, "not started: the worker is shutting down")

    def return_all_waiting(self) -> None:
        """The drain's time is over: all that no child has goes back."""
        for run in self._pool.withdraw_waiting():
            self._return(run.lease, "not started: the worker is shutting down")

    def cancel_waiting(self, key: Key, why: str) -> bool:
        """Fail a job that no child has yet; False if there is none with this lease."""
        run = self._pool.withdraw(key)
        if run is None:
            return False
        self._finish(run.lease, Failed(why), run)
        return True

    def _hold(self, job: Job) -> Lease | None:
        lease = self._leases.hold(job)
        if lease is not None:
            self._events.emit(ev.JobClaimed(job.id, job.queue_name, job.retry_count))
        return lease

    def _run_or_return(self, lease: Lease) -> bool:
        """Whether it will run."""
        job = lease.job
        deaths = self._poison.deaths(job.id)
        if deaths is not None and deaths.count >= DEATHS_TO_REFUSE:
            text = f"not run: this job has killed its child {deaths.count} times; the last time: {deaths.evidence}"
            self._finish(lease, Failed(text))
        elif self._is_draining() and not (job.is_last_attempt and self._pool.places(0)):
            self._return(lease, "not started: the worker is shutting down")
        else:
            self._pool.submit(lease, timeout_s=self._limit_of(job), is_isolated=deaths is not None)
            return True
        return False

    def _return(self, lease: Lease, why: str) -> None:
        self._finish(lease, Released(why))

    # --- to the outcome ---------------------------------------------------------------------------------------------

    def on_over(self, run: Run, outcome: Outcome | None) -> None:
        """A run is over (`pool.Pool`). None: its lease was lost, nothing is reported."""
        lease = run.lease
        if outcome is None or not lease.is_live:
            if lease.is_live:
                self._leases.dropped(lease)
            self._outbox.forget(lease.job)
            self._settled.ring()
            return
        self._learn(run.job, outcome)
        self._finish(lease, outcome, run)

    def _learn(self, job: Job, outcome: Outcome) -> None:
        """What the end of a run says of its queue and of its job."""
        if isinstance(outcome, Released):
            return
        breaker = self._breakers.get(job.queue_name)
        if isinstance(outcome, Crashed):
            self._poison.died(job.id, outcome.cause)
            if breaker is not None:
                breaker.crashed(now())
        else:
            self._poison.answered(job.id)
            if breaker is not None:
                breaker.answered()

    def _finish(self, lease: Lease, outcome: Outcome, run: Run | None = None) -> None:
        self._leases.decided(lease, now())
        self._outbox.decide(lease.job, outcome, started_at=lease.started_at)
        self._events.emit(_outcome_event(lease.job, outcome, run))
        self._spawn(self._settle(lease, outcome), "settle")

    async def _settle(self, lease: Lease, outcome: Outcome, *, tries: int = 0) -> None:
        """Keep what was decided and report it."""
        await self._outbox.keep(lease.job)
        if not await self._settler.settle(lease, outcome, self._api_of(lease), tries=tries):
            self.given_up += 1
        self._earlier.pop(lease.job.key, None)
        self._outbox.forget(lease.job)
        self._settled.ring()

    def _api_of(self, lease: Lease) -> Service:
        """What an earlier life has claimed only that one can renew or report."""
        return self._earlier.get(lease.job.key, self._api)

    # --- from an earlier life ---------------------------------------------------------------------------------------

    def restore(self, leftovers: Sequence[Leftover]) -> None:
        """Report what an earlier life has left: its outcomes, and a failure for each job that it had not finished.

        Its processes are dead by now. What belongs to another service is kept and named, what is too old forgotten.
        """
        for leftover in leftovers:
            job = leftover.job
            if leftover.api_url != self._api.base_url:
                self._events.emit(ev.LeftoverKept(job.id, job.queue_name, leftover.api_url))
                continue
            lease = self._leases.hold(job) if leftover.end > now() else None
            if lease is None:
                self._outbox.forget(job)
                self._events.emit(ev.LeftoverExpired(job.id, job.queue_name, leftover.outcome is not None))
                continue
            outcome = leftover.outcome or Crashed("the supervisor ended while it held this job; it was started again")
            status = "completed" if isinstance(outcome, Succeeded) else "failed"
            self._events.emit(ev.LeftoverReported(job.id, job.queue_name, status, leftover.outcome is not None))
            self._leases.decided(lease, now())
            self._outbox.decide(job, outcome, started_at=lease.started_at, worker_id=leftover.worker_id)
            # An outcome may have been sent and taken before the end; the failure of an unfinished job cannot have been.
            tries = 1 if leftover.outcome is not None else 0
            self._earlier[job.key] = self._api.acting_as(leftover.worker_id)
            self._spawn(self._settle(lease, outcome, tries=tries), "settle")

    def hold_again(self, missed: Sequence[Leftover]) -> None:
        """The outbox has got its file back: what is held now is not in it, and `missed` was not known at the start."""
        held = [lease for lease in self._leases if lease.state is LeaseState.HELD]
        self._outbox.hold([dataclasses.replace(lease.job, requested_at=lease.started_at) for lease in held])
        self.restore(missed)

    @property
    def held(self) -> int:
        """Leases that are ours: waiting, running or not reported yet."""
        return len(self._leases)

    async def wait_until_settled(self, deadline: float) -> bool:
        """Wait until nothing is held; whether that came true by `deadline`. Cancel-safe."""
        while self.held and now() < deadline:
            await self._settled.wait_until(deadline)
        return not self.held

    # --- leases -----------------------------------------------------------------------------------------------------

    async def keep_leases(self) -> None:
        """Look after all leases when they are due, and after all else every TICK_S, for ever."""
        tick_at = now() + TICK_S
        while True:
            due_at = min(tick_at, self._leases.next_due())
            await self._alarm.wait_until(due_at)
            at = now()
            if at - due_at > LAG_WORTH_TELLING_S:
                self._events.emit(ev.LoopLagged(round(at - due_at, 3)))
            self.last_tick_at = at
            self._act_on(self._leases.due(at), at)
            if at >= tick_at:
                tick_at = at + TICK_S
                self._tick(at)

    def _tick(self, at: float) -> None:
        self._progress.tick(at)
        self._keep_outbox(at)
        self._on_tick(at)
        if self._pool.usable:
            self._usable_at = at
        else:
            self._return_stranded(at)

    def _keep_outbox(self, at: float) -> None:
        self._outbox.tick(at)
        if self._outbox.replaced is not None:
            self._events.emit(ev.OutboxTroubled(self._outbox.replaced))
            self._outbox.replaced = None
        problem = self._outbox.problem
        if problem is not None and self._outbox_problem is None:
            self._events.emit(ev.OutboxTroubled(problem))
        elif problem is None and self._outbox_problem is not None:
            self._events.emit(ev.OutboxRecovered())
        self._outbox_problem = problem

    def _act_on(self, due: Due, at: float) -> None:
        for lease in due.ended:
            if not self._pool.kill(lease.job.key, "lease_lost", is_lost=True):
                self._outbox.forget(lease.job)
            if not lease.aborted:  # else it was told then
                not_done = "its outcome was taken" if lease.has_lapsed else "it could be renewed"
                self._lost(lease, f"it ended before {not_done}")
        for lease in due.kill:
            self._pool.kill(lease.job.key, "lease_lost", is_lost=True)
        for lease in due.abort:
            kill_after_s = max(0.0, lease.kill_at - at)
            if not self._pool.abort(lease.job.key, "lease_lost", kill_after_s=kill_after_s, is_lost=True):
                self._leases.dropped(lease)
                self._outbox.forget(lease.job)
            self._lost(lease, "it could not be renewed in time")
        for lease in due.lapsed:
            job, settling_s = lease.job, round(at - lease.settling_since, 3)
            self._events.emit(ev.LeaseLapsed(job.id, job.queue_name, settling_s, round(lease.end - at, 3)))
        for lease in due.renew:
            self._spawn(self._renew(lease), "renew")

    def _lost(self, lease: Lease, reason: str) -> None:
        """Told once per lease; a run of it that no child has yet is forgotten."""
        self._pool.withdraw(lease.job.key)
        self._events.emit(ev.JobLeaseLost(lease.job.id, lease.job.queue_name, reason))

    async def _renew(self, lease: Lease) -> None:
        late_s = now() - lease.due_at
        is_settling = lease.state is LeaseState.SETTLING
        deadline = min(now() + RENEW_TIMEOUT_S, lease.end if is_settling else lease.abort_at)
        try:
            started_at = await self._api_of(lease).renew(lease.job, deadline=deadline)
        except LeaseLost as lost:
            self._renewal_refused(lease, lost)
            # Where it has crossed the outcome, that was taken as a rule: the report's answer tells if anything is lost.
            result = "lost" if lease.settling_since == float("inf") else None
        except (ApiUnavailable, ApiRefused) as error:
            self._renewal_failed(lease, error)
            result = "unavailable"
        else:
            self._leases.renewed(lease, started_at)
            self._outbox.renewed(lease.job, started_at)
            result = "ok"
        if result is not None:
            self._events.emit(ev.LeaseRenewed(lease.job.id, result, round(late_s, 4)))
        if self._leases.next_due() < self._alarm.when:
            self._alarm.ring()

    def _renewal_refused(self, lease: Lease, lost: LeaseLost) -> None:
        """While an outcome is on its way its own answer decides: it may be what has ended the lease."""
        if lease.state is not LeaseState.HELD:
            self._leases.renewal_failed(lease, now())
            return
        self._leases.refused(lease)
        grace_s = min(self._abort_grace_s, LOST_GRACE_S)
        if not self._pool.abort(lease.job.key, "lease_lost", kill_after_s=grace_s, is_lost=True):
            self._outbox.forget(lease.job)
        self._lost(lease, lost.reason)

    def _renewal_failed(self, lease: Lease, error: ApiUnavailable | ApiRefused) -> None:
        hint = None
        if isinstance(error, CredentialsRefused):
            self._on_refused(error)
        elif isinstance(error, ApiUnavailable):
            hint = error.retry_after_s
            if error.rate_limited:
                self._gate.note(hint, now())
        self._leases.renewal_failed(lease, now(), retry_after_s=hint)

    def _return_stranded(self, at: float) -> None:
        for run in self._pool.waiting:
            if at - max(run.claimed_at, self._usable_at) > WAIT_FOR_CHILD_S:
                self._pool.withdraw(run.job.key)
                self._return(run.lease, "not started: the worker has no usable child")


def _outcome_event(job: Job, outcome: Outcome, run: Run | None) -> ev.Event:
    slot = None if run is None else run.slot
    duration_s = None
    if run is not None and run.started_at is not None:
        duration_s = round((run.ended_at or now()) - run.started_at, 6)
    if isinstance(outcome, Succeeded):
        return ev.JobCompleted(job.id, job.queue_name, slot or 0, duration_s or 0.0, len(outcome.result))
    will_retry = not job.is_last_attempt and not (isinstance(outcome, Failed) and not outcome.retryable)
    kind = _KINDS[type(outcome)]
    return ev.JobFailed(job.id, job.queue_name, slot, kind, error_text(outcome), will_retry, duration_s)


_KINDS: Mapping[type[Outcome], str] = {
    Failed: "failed",
    TimedOut: "timed_out",
    Crashed: "crashed",
    Released: "released",
}
