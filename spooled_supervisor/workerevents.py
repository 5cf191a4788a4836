"""What a `SpooledWorker` tells its program: `worker.on(NAME, callback)` calls back with one of these.

| name             | event           | when                                                                        |
|------------------|-----------------|-----------------------------------------------------------------------------|
| `started`        | `WorkerStarted` | the first child is ready; the service need not have answered yet            |
| `stopped`        | `WorkerStopped` | nothing runs any more and nothing is held                                   |
| `error`          | `WorkerErrored` | the worker has ended, or ends, because of this error                        |
| `job:claimed`    | `JobClaimed`    | the job's lease is ours                                                     |
| `job:started`    | `JobStarted`    | a child runs it                                                             |
| `job:progress`   | `JobProgress`   | the handler called `ctx.progress`                                           |
| `job:completed`  | `JobCompleted`  | it succeeded, and the service knows                                         |
| `job:failed`     | `JobFailed`     | it failed, and the service knows                                            |
| `job:lease_lost` | `JobLeaseLost`  | it is not ours any more, or its outcome could not be brought to the service |
| `child:started`  | `ChildStarted`  | a child process was forked                                                  |
| `child:exited`   | `ChildExited`   | one has ended                                                               |

Field names are public. Every job that was claimed ends with exactly one of completed, failed and lease_lost; what is
still unreported when a stop is over has none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    worker_id: str
    queue_name: str


@dataclass(frozen=True, slots=True)
class WorkerStopped:
    """`unsettled` jobs are left to their lease: the service gives them to another worker when it ends."""

    worker_id: str
    reason: str
    unsettled: int


@dataclass(frozen=True, slots=True)
class WorkerErrored:
    worker_id: str | None
    error: BaseException


@dataclass(frozen=True, slots=True)
class JobClaimed:
    job_id: str
    queue_name: str
    retry_count: int


@dataclass(frozen=True, slots=True)
class JobStarted:
    """`pid` is the child's; `wait_s` the time between the claim and this."""

    job_id: str
    queue_name: str
    pid: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class JobProgress:
    """`percent` is 0 to 100."""

    job_id: str
    queue_name: str
    percent: float
    message: str | None


@dataclass(frozen=True, slots=True)
class JobCompleted:
    """`result` is what the handler returned, after its way through JSON."""

    job_id: str
    queue_name: str
    result: Any
    duration_s: float


@dataclass(frozen=True, slots=True)
class JobFailed:
    """`kind`: failed (the handler raised), timed_out, crashed (its child died), released (given back).

    `will_retry` is what the job's own numbers say. `duration_s` is None if no child has run it.
    """

    job_id: str
    queue_name: str
    error: str
    will_retry: bool
    kind: str
    duration_s: float | None


@dataclass(frozen=True, slots=True)
class JobLeaseLost:
    job_id: str
    queue_name: str
    reason: str


@dataclass(frozen=True, slots=True)
class ChildStarted:
    pid: int


@dataclass(frozen=True, slots=True)
class ChildExited:
    """`reason`: why it left (crash, shutdown, timeout, jobs, ...); `cause`: how it ended, in words."""

    pid: int
    reason: str
    cause: str


NAMES: Mapping[str, type] = {
    "started": WorkerStarted,
    "stopped": WorkerStopped,
    "error": WorkerErrored,
    "job:claimed": JobClaimed,
    "job:started": JobStarted,
    "job:progress": JobProgress,
    "job:completed": JobCompleted,
    "job:failed": JobFailed,
    "job:lease_lost": JobLeaseLost,
    "child:started": ChildStarted,
    "child:exited": ChildExited,
}
