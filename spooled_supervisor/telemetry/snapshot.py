"""What the supervisor is doing right now, as one frozen value.

The supervisor fills it anew for each reader (a scrape, a health check, the status page, the control socket); nobody
keeps it. That way no gauge can drift from the truth: there is no second copy to forget to update. Phases and states are
the names of `lifecycle` in lower case. Durations are in seconds, sizes in bytes, `..._at` is wall time in seconds since
the epoch; None means not known or not applicable. Nothing here carries a payload, a result or a secret.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_LEASES = 200
"""So many are listed, those that end first; the numbers count all."""

STARTING = "starting"
"""What every reason begins with that is only that of a start."""
PHASES = ("booting", "running", "draining", "stopping", "stopped")
CHILD_STATES = ("starting", "idle", "busy", "aborting", "stopping", "killed")


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """One configured queue: `in_progress` jobs run in a child, `waiting` ones are claimed and have none yet."""

    name: str
    weight: float
    max_procs: int | None
    in_progress: int
    waiting: int
    done: int = 0  # in this life of the supervisor
    failed: int = 0
    rate_per_min: float = 0.0  # done and failed, in the last minute
    breaker: str = "closed"  # or open: its jobs kill their children, nothing is claimed; half_open: one job is tried


@dataclass(frozen=True, slots=True)
class ChildSnapshot:
    """One child, and the job it runs if it runs one (`queue` to `message`)."""

    slot: int
    pid: int | None
    generation: int
    state: str
    queue: str | None
    job_id: str | None
    elapsed_s: float | None
    deadline_in_s: float | None
    percent: float | None
    message: str | None
    jobs_done: int
    uptime_s: float
    pss_bytes: int | None
    uss_bytes: int | None
    cpu_s: float | None


@dataclass(frozen=True, slots=True)
class FailureSnapshot:
    """A job that failed; `kind`: failed, timed_out, crashed, released; `output` is what a dead child printed last."""

    job_id: str
    queue: str
    kind: str
    error: str
    output: str
    failed_at: float
    slot: int | None
    will_retry: bool
    duration_s: float | None


@dataclass(frozen=True, slots=True)
class LeaseSnapshot:
    """A lease: `held`, or `settling` while its outcome is on its way. Renewed in `renew_in_s`, or over at its end; None
    if it is not renewed any more."""

    job_id: str
    queue: str
    state: str
    ends_in_s: float
    renew_in_s: float | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole supervisor.

    `reasons` says why no job would be taken now (`/readyz`), `unhealthy` what is broken (`/health`): a quiet or busy
    supervisor has the first and not the second. `heartbeat_age_s` is None until the service took a first heartbeat.
    """

    phase: str
    worker_id: str | None
    uptime_s: float
    started_at: float
    registered: bool
    quiet: bool
    reasons: tuple[str, ...]
    unhealthy: tuple[str, ...]
    queues: tuple[QueueSnapshot, ...]
    children: tuple[ChildSnapshot, ...]
    slots_backed_off: int
    leases_held: int
    unsettled: int
    outbox_depth: int
    outbox_age_s: float
    outbox_on_disk: bool
    heartbeat_age_s: float | None
    procs: int
    generation: int
    quiet_reason: str | None = None
    held_back: str | None = None  # the limit of load or memory pressure that is exceeded
    failures: tuple[FailureSnapshot, ...] = ()  # the newest first
    throughput: tuple[tuple[float, int, int], ...] = ()  # buckets, the oldest first: their begin, jobs done, failed
    leases: tuple[LeaseSnapshot, ...] = ()  # at most MAX_LEASES
    outbox_problem: str | None = None
    outbox_full: bool = False
    pid: int | None = None
    version: str = ""
    hostname: str = ""
    api_url: str = ""
    cpus: float | None = None  # that the family may use
    load_average: tuple[float, float, float] | None = None
    cpu_percent: float | None = None  # of the family, as in the last heartbeat
    memory_percent: float | None = None

    @property
    def current_jobs(self) -> int:
        """How many jobs run in a child."""
        return sum(queue.in_progress for queue in self.queues)

    def children_by_state(self) -> dict[str, int]:
        """How many children are in each state; states that no child is in are there with 0."""
        counts = dict.fromkeys(CHILD_STATES, 0)
        for child in self.children:
            counts[child.state] = counts.get(child.state, 0) + 1
        return counts
