"""What a child has of its own, of an app that preloads much."""

from __future__ import annotations

from tests.bench import heavy_app, meters
from tests.bench.figures import Figure, at_most
from tests.bench.scenario import Effort, Scenario
from tests.bench.stage import Daemon, stage

CHILDREN = 2
SHORT_S = 0.001
LONG_S = 0.5
"""A job that lasts so long is still running when the other children are given theirs."""


def run(effort: Effort) -> dict[str, float]:
    with stage(
        app=heavy_app.__name__,
        env={heavy_app.VARIABLE: str(effort.preload_mb)},
        log_level="debug",
        procs=CHILDREN,
        queue=("busy", "collect"),
    ) as (server, daemon):
        daemon.wait_for_count("child_ready", CHILDREN)
        fork_server = meters.resident_bytes(daemon.fork_server_pid())
        idle = _private(daemon)
        jobs = effort.memory_jobs * CHILDREN
        server.client.bulk("busy", [SHORT_S] * jobs)
        daemon.wait_for_count("job_completed", jobs)
        used = _private(daemon)
        server.client.bulk("collect", [LONG_S] * CHILDREN)
        daemon.wait_for_count("job_completed", jobs + CHILDREN)
        collected = _private(daemon)
    sizes = {"fork_server_mb": fork_server, "idle_mb": idle, "used_mb": used, "collected_mb": collected}
    return {key: size / 1e6 for key, size in sizes.items()}


def _private(daemon: Daemon) -> int:
    return max(meters.private_bytes(pid) for pid in daemon.child_pids())


SCENARIOS = (
    Scenario(
        "memory",
        (
            Figure("fork_server_mb", "fork server with 500 MB preloaded, resident", "MB"),
            Figure("idle_mb", "private memory of an idle child of it", "MB", at_most(2.0)),
            Figure("used_mb", "the same after 100 jobs", "MB"),
            Figure("collected_mb", "the same after a full garbage collection in it, too", "MB", at_most(4.0)),
        ),
        run,
    ),
)
