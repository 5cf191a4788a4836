"""The two ends of a daemon's life: from its start to its first job, and from SIGTERM to its end."""

from __future__ import annotations

from tests.bench.figures import Figure, at_most
from tests.bench.scenario import Effort, Scenario
from tests.bench.stage import stage

CHILDREN = 2


def run(_: Effort) -> dict[str, float]:
    with stage(before={"stamp": [0.0]}, queue="stamp", procs=CHILDREN) as (_server, daemon):
        daemon.wait_for("job_completed")
        daemon.wait_for("worker_registered")
        (first,) = daemon.records()
        stop_s = daemon.stop()
    return {"first_job_s": first.started_at - daemon.started_at, "stop_ms": 1000 * stop_s}


SCENARIOS = (
    Scenario(
        "life",
        (
            Figure("first_job_s", "start to first job running, small app", "s", at_most(0.5)),
            Figure("stop_ms", "SIGTERM to exit when idle", "ms"),
        ),
        run,
    ),
)
