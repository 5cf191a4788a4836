"""What the supervisor says of itself: the snapshot behind every endpoint and gauge, and the figures of a heartbeat.

It reads the other parts and changes none. Memory is sampled, one process a SAMPLE_INTERVAL_S in a thread, as the kernel
walks all pages for it: never during a scrape, and seldom of a process that has had nothing to do since.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from spooled_supervisor import __version__, processes
from spooled_supervisor.childlink import ChildLink
from spooled_supervisor.claiming import Claimer
from spooled_supervisor.config import QueueConfig
from spooled_supervisor.forkclient import ForkServerKeeper
from spooled_supervisor.holding import Holder
from spooled_supervisor.leases import Lease, LeaseBook
from spooled_supervisor.lifecycle import LeaseState, Phase
from spooled_supervisor.outbox import Outbox
from spooled_supervisor.pool import Pool
from spooled_supervisor.registration import Registration, Vitals
from spooled_supervisor.resources import TICKS_PER_S, FamilyUsage, pss_uss, read_host
from spooled_supervisor.telemetry.history import History
from spooled_supervisor.telemetry.snapshot import (
    MAX_LEASES,
    STARTING,
    ChildSnapshot,
    LeaseSnapshot,
    QueueSnapshot,
    Snapshot,
)
from spooled_supervisor.timing import now, wall
from spooled_supervisor.troubles import Troubles

SAMPLE_INTERVAL_S = 1.0
RESAMPLE_S = 60.0
"""After so long a process is measured again that has not worked since: what it shares changes with the others."""
STUCK_LOOP_S = 30.0
"""A part that has not turned for so long, though it should have, is a reason in `/health`."""
MAX_MESSAGE_CHARS = 1000
"""Of a job's progress message: a handler may send far more, for each child, and it is for people to read."""


@dataclass(slots=True)
class Standing:
    """What the supervisor knows of itself and nobody else does. Written by the supervisor, read here."""

    worker_id: str
    hostname: str = ""
    api_url: str = ""
    phase: Phase = Phase.BOOTING
    quiet_reason: str | None = None  # claims nothing, on somebody's order
    pressure: str | None = None  # claims nothing, as the machine has no room
    refused: str | None = None  # the API key is not accepted
    is_proven: bool = False  # the service has accepted the key once
    started_at: float = field(default_factory=now)
    started_wall: float = field(default_factory=wall)


@dataclass(frozen=True, slots=True)
class Sample:
    """The memory of a process, None if it could not be read, and how many jobs it had done when it was looked at."""

    pss: int | None
    uss: int | None
    jobs_done: int
    at: float


class Observer:
    """Observes one supervisor."""

    def __init__(
        self,
        standing: Standing,
        queues: Sequence[QueueConfig],
        *,
        pool: Pool,
        keeper: ForkServerKeeper,
        leases: LeaseBook,
        holder: Holder,
        claimer: Claimer,
        registration: Registration,
        troubles: Troubles,
        outbox: Outbox,
        cpus: float,
        history: History,
        mask: Callable[[str], str],
    ) -> None:
        """`mask` keeps the key out of texts that handlers bring."""
        self._standing = standing
        self._queues = queues
        self._pool = pool
        self._keeper = keeper
        self._leases = leases
        self._holder = holder
        self._claimer = claimer
        self._registration = registration
        self._troubles = troubles
        self._outbox = outbox
        self._cpus = cpus
        self._history = history
        self._mask = mask
        self._usage = FamilyUsage()
        self._cpu_percent: float | None = None  # as the last heartbeat told them: reading begins a new interval
        self._memory_percent: float | None = None
        self._samples: dict[int, Sample] = {}  # by pid

    def set_queues(self, queues: Sequence[QueueConfig]) -> None:
        """Show these from now on: a reload has brought or dropped some."""
        self._queues = queues

    # --- heartbeats ----------------------------------------------------------------------------------------------

    def vitals(self) -> Vitals:
        """For the next heartbeat."""
        pids = self._pool.pids
        pss = {pid: one.pss for pid, one in self._samples.items() if pid in pids and one.pss is not None}
        host = {f"host_{name}": value for name, value in dataclasses.asdict(read_host()).items() if value is not None}
        self._cpu_percent = self._usage.cpu_percent(now(), pids, self._cpus)
        self._memory_percent = self._usage.memory_percent(pss)
        return Vitals(self.status(), self._pool.jobs_held, self._cpu_percent, self._memory_percent, host)

    def status(self) -> str:
        """As the service calls it: healthy, degraded, draining."""
        if self._standing.phase >= Phase.DRAINING:
            return "draining"
        return "degraded" if self._broken() else "healthy"

    # --- health ------------------------------------------------------------------------------------------------------

    def _broken(self) -> list[str]:
        """What of our own is broken: reasons to say `degraded`."""
        reasons: list[str] = []
        if self._standing.phase is Phase.BOOTING:
            return reasons
        if not self._keeper.is_ready:
            reasons.append("the fork server is down")
        if self._pool.backed_off == len(self._pool.slots):
            reasons.append("every child fails: no slot has one that is ready")
        if self._keeper.failed is not None:
            reasons.append(f"the fork server is not looked after: {self._keeper.failed!r}")
        for name, queue in self._claimer.queues.items():
            if queue.breaker.is_open:
                reasons.append(f"queue {name}: its jobs kill their children; claims are held back")
        return reasons

    def unhealthy(self) -> list[str]:
        """Reasons for `/health` to answer 503."""
        reasons = self._broken() + self._troubles.reasons
        if self._standing.phase is Phase.BOOTING:
            reasons.append(f"{STARTING}: no child has been ready yet")
        if self._standing.refused is not None:
            reasons.append(f"the API key is refused: {self._standing.refused}")
        if now() - self._holder.last_tick_at > STUCK_LOOP_S:
            reasons.append("leases are not looked after")
        if (silent_s := self._registration.silent_for_s) is not None:
            reasons.append(f"no heartbeat was accepted for {silent_s:.0f} s")
        return reasons

    def _not_ready(self) -> list[str]:
        """Reasons for `/readyz` to answer 503: why no job would be taken now."""
        standing = self._standing
        reasons = []
        if standing.phase is Phase.BOOTING:
            reasons.append(STARTING)
        elif standing.phase > Phase.RUNNING:
            reasons.append(f"stopping ({standing.phase.name.lower()})")
        if standing.quiet_reason is not None:
            reasons.append(f"quiet: {standing.quiet_reason}")
        if standing.pressure is not None:
            reasons.append(f"claims are held back: {standing.pressure}")
        if standing.refused is not None:
            reasons.append(f"the API key is refused: {standing.refused}")
        elif not standing.is_proven:
            reasons.append("the service has not answered yet")
        if self._outbox.is_full:
            reasons.append(f"the outbox is full: {self._outbox.depth} outcomes wait for the service")
        if self._outbox.problem is not None:
            reasons.append(f"outcomes are kept in memory only: {self._outbox.problem}")
        if not self._keeper.is_ready:
            reasons.append("the fork server is not up")
        if not self._pool.usable:
            reasons.append("no usable child")
        queues = self._claimer.queues.values()
        if queues and all(queue.breaker.is_open for queue in queues):
            reasons.append("claims are held back: the jobs of every queue kill their children")
        return reasons

    # --- the snapshot ------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Everything, as it is now."""
        at = now()
        standing = self._standing
        beat_at = self._registration.last_beat_at
        waiting = [run.job.queue_name for run in self._pool.waiting]
        running = [child.run.job.queue_name for child in self._pool.children if child.run is not None]
        known = {queue.name for queue in self._queues}
        gone = dict.fromkeys(name for name in (*running, *waiting) if name not in known)  # dropped by a reload
        return Snapshot(
            phase=standing.phase.name.lower(),
            worker_id=standing.worker_id,
            uptime_s=round(at - standing.started_at, 3),
            started_at=standing.started_wall,
            registered=self._registration.is_registered,
            quiet=standing.quiet_reason is not None,
            reasons=tuple(self._not_ready()),
            unhealthy=tuple(self.unhealthy()),
            queues=tuple(
                self._queue(queue, waiting.count(queue.name), at) for queue in (*self._queues, *map(QueueConfig, gone))
            ),
            children=tuple(self._child(child, at) for child in self._pool.children),
            slots_backed_off=self._pool.backed_off,
            leases_held=len(self._leases),
            unsettled=sum(lease.state is LeaseState.SETTLING for lease in self._leases),
            outbox_depth=self._outbox.depth,
            outbox_age_s=round(self._outbox.age_s(at), 3),
            outbox_on_disk=self._outbox.problem is None,
            heartbeat_age_s=None if beat_at is None else round(at - beat_at, 3),
            procs=len(self._pool.slots),
            generation=self._keeper.generation,
            quiet_reason=standing.quiet_reason,
            held_back=standing.pressure,
            failures=self._history.failures,
            throughput=self._history.throughput(),
            leases=tuple(_lease(lease, at) for lease in heapq.nsmallest(MAX_LEASES, self._leases, _end_of)),
            outbox_problem=self._outbox.problem,
            outbox_full=self._outbox.is_full,
            **_about_us(standing),
            cpus=self._cpus,
            cpu_percent=self._cpu_percent,
            memory_percent=self._memory_percent,
        )

    def _queue(self, queue: QueueConfig, waiting: int, at: float) -> QueueSnapshot:
        done, failed, rate = self._history.tally(queue.name)
        claimed = self._claimer.queues.get(queue.name)
        breaker = "closed"
        if claimed is not None and claimed.breaker.is_open:
            breaker = "half_open" if claimed.breaker.allowed(1, at) else "open"
        in_progress = self._pool.in_progress(queue.name)
        return QueueSnapshot(
            queue.name, queue.weight, queue.max_procs, in_progress, waiting, done, failed, rate, breaker
        )

    def _child(self, child: ChildLink, at: float) -> ChildSnapshot:
        run = child.run
        sample = self._samples.get(child.pid)
        stat = processes.read_stat(child.pid)
        started_at = run.started_at if run is not None else None
        has_deadline = started_at is not None and child.deadline is not None
        return ChildSnapshot(
            slot=child.slot,
            pid=child.pid,
            generation=child.generation,
            state=child.state.name.lower(),
            queue=None if run is None else run.job.queue_name,
            job_id=None if run is None else run.job.id,
            elapsed_s=None if started_at is None else round(at - started_at, 3),
            deadline_in_s=round(child.deadline - at, 3) if has_deadline and child.deadline is not None else None,
            percent=None if run is None else run.percent,
            message=None if run is None or run.message is None else self._mask(run.message)[:MAX_MESSAGE_CHARS],
            jobs_done=child.jobs_done,
            uptime_s=round(at - child.born_at, 3),
            pss_bytes=None if sample is None else sample.pss,
            uss_bytes=None if sample is None else sample.uss,
            cpu_s=None if stat is None else round(stat.cpu_ticks / TICKS_PER_S, 2),
        )

    async def sample(self) -> None:
        """Measure the memory of one process after the other, for ever."""
        while True:
            await asyncio.sleep(SAMPLE_INTERVAL_S)
            children = {child.pid: child for child in self._pool.children}
            jobs = {pid: children[pid].jobs_done if pid in children else 0 for pid in self._pool.pids}
            busy = {pid for pid, child in children.items() if child.run is not None}
            self._samples = {pid: sample for pid, sample in self._samples.items() if pid in jobs}
            pid = to_be_measured(self._samples, jobs, busy, now())
            if pid is not None:
                pss, uss = await asyncio.to_thread(pss_uss, pid) or (None, None)
                self._samples[pid] = Sample(pss, uss, jobs[pid], now())


def to_be_measured(
    samples: Mapping[int, Sample], jobs: Mapping[int, int], busy: Collection[int], at: float
) -> int | None:
    """The process that was measured longest ago, of those whose memory may be another one by now; None if none's may.

    `jobs`: how many each process has done; `busy`: those that run one.
    """
    measured_at = {pid: samples[pid].at if pid in samples else -math.inf for pid in jobs}
    due = [
        pid
        for pid, done in jobs.items()
        if pid in busy or at - measured_at[pid] >= RESAMPLE_S or samples[pid].jobs_done != done
    ]
    return min(due, key=measured_at.__getitem__, default=None)


def _end_of(lease: Lease) -> float:
    return lease.end


def _lease(lease: Lease, at: float) -> LeaseSnapshot:
    renew_in_s = None if lease.has_lapsed else round(max(0.0, lease.renew_at - at), 3)
    return LeaseSnapshot(
        lease.job.id, lease.job.queue_name, lease.state.name.lower(), round(lease.end - at, 3), renew_in_s
    )


class _AboutUs(TypedDict):
    pid: int
    version: str
    hostname: str
    api_url: str
    load_average: tuple[float, float, float] | None


def _about_us(standing: Standing) -> _AboutUs:
    """What the snapshot says of this process and its machine, in every phase."""
    try:
        load = os.getloadavg()
    except OSError:
        load = None
    return _AboutUs(
        pid=os.getpid(),
        version=__version__,
        hostname=standing.hostname,
        api_url=standing.api_url,
        load_average=load,
    )


def boot_snapshot(standing: Standing, procs: int) -> Snapshot:
    """Before there is anything to observe: the app is being imported."""
    return Snapshot(
        phase=standing.phase.name.lower(),
        worker_id=standing.worker_id,
        uptime_s=round(now() - standing.started_at, 3),
        started_at=standing.started_wall,
        registered=False,
        quiet=False,
        reasons=(f"{STARTING}: the app is being imported",),
        unhealthy=(f"{STARTING}: the app is being imported",),
        queues=(),
        children=(),
        slots_backed_off=0,
        leases_held=0,
        unsettled=0,
        outbox_depth=0,
        outbox_age_s=0.0,
        outbox_on_disk=True,
        heartbeat_age_s=None,
        procs=procs,
        generation=1,
        **_about_us(standing),
    )
