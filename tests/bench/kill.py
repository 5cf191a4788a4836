"""Jobs that do not end: how exactly they are told to stop and killed, and when their child is replaced."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tests.bench.figures import Figure, at_most
from tests.bench.scenario import Effort, Scenario
from tests.bench.stage import Daemon, instant, stage

CHILDREN = 2
TIMEOUT_MS = 300
GRACE_MS = 200
POLL_MS = 50


def run(effort: Effort) -> dict[str, float]:
    with stage(
        queue="stuck",
        procs=CHILDREN,
        log_level="debug",
        job_timeout=f"{TIMEOUT_MS}ms",
        abort_grace=f"{GRACE_MS}ms",
        poll_interval=f"{POLL_MS}ms",
    ) as (server, daemon):
        daemon.wait_for_count("child_ready", CHILDREN)
        kills = [_one(daemon, server.client.create("stuck", max_retries=0)) for _ in range(effort.kills)]
    told, killed, ready = zip(*kills, strict=True)
    return {
        **_summary("told", told),
        **_summary("killed", killed),
        **_summary("ready", ready),
    }


def _one(daemon: Daemon, job_id: str) -> tuple[float, float, float]:
    """Milliseconds from the deadline to the abort, from the end of the grace to the kill, from there to a new child."""
    seen = len(daemon.events)
    started, aborting, killed = (
        daemon.wait_for(event, after=seen, job_id=job_id) for event in ("job_started", "job_aborting", "child_killed")
    )
    ready = daemon.wait_for("child_ready", after=daemon.events.index(killed), slot=killed["slot"])
    daemon.wait_for("child_exited", after=seen, pid=killed["pid"])
    return (
        1000 * (instant(aborting) - instant(started)) - TIMEOUT_MS,
        1000 * (instant(killed) - instant(aborting)) - GRACE_MS,
        1000 * (instant(ready) - instant(killed)),
    )


def _summary(key: str, values_ms: Sequence[float]) -> dict[str, float]:
    return {f"{key}_median_ms": statistics.median(values_ms), f"{key}_worst_ms": max(values_ms)}


SCENARIOS = (
    Scenario(
        "kill",
        (
            Figure("told_median_ms", "deadline to abort, median", "ms"),
            Figure("told_worst_ms", "deadline to abort, worst", "ms"),
            Figure("killed_median_ms", "end of grace to SIGKILL, median", "ms"),
            Figure("killed_worst_ms", "end of grace to SIGKILL, worst", "ms", at_most(20)),
            Figure("ready_median_ms", "kill to ready replacement, median", "ms"),
            Figure("ready_worst_ms", "kill to ready replacement, worst", "ms", at_most(30)),
        ),
        run,
    ),
)
