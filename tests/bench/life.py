"""A daemon's life with nothing to do: its start, its rest, its end."""

from __future__ import annotations

import time

from tests.bench.figures import Figure, at_most
from tests.bench.scenario import Effort, Scenario
from tests.bench.stage import REQUESTS, stage

CHILDREN = 2


def run(effort: Effort) -> dict[str, float]:
    with stage(before={"stamp": [0.0]}, queue="stamp", procs=CHILDREN) as (_, daemon):
        daemon.wait_for("job_completed")
        daemon.wait_for("worker_registered")
        (first,) = daemon.records()
        daemon.listen_until(time.monotonic() + effort.settle_s)
        children = daemon.child_pids()
        counters, begin = daemon.metrics(), daemon.cpu(children)
        daemon.listen_until(begin.at + effort.idle_s)
        spent, counted = daemon.cpu(children).since(begin), daemon.metrics()
        requests = counted[REQUESTS] - counters[REQUESTS]
        stop_s = daemon.stop()
    return {
        "first_job_s": first.started_at - daemon.started_at,
        "idle_percent": 100 * spent.daemon / spent.at,
        "idle_supervisor_percent": 100 * spent.supervisor / spent.at,
        "idle_requests": 60 * requests / spent.at,
        "stop_ms": 1000 * stop_s,
    }


SCENARIOS = (
    Scenario(
        "life",
        (
            Figure("first_job_s", "start to first job running", "s"),
            Figure("idle_percent", "CPU of the idle daemon, all processes", "% of a core", at_most(1.0)),
            Figure("idle_supervisor_percent", "CPU of the idle supervisor", "% of a core"),
            Figure("idle_requests", "requests per idle minute"),
            Figure("stop_ms", "SIGTERM to exit when idle", "ms"),
        ),
        run,
    ),
)
