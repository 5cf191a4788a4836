"""How long a job waits at the service, and in the supervisor, while children are idle."""

from __future__ import annotations

import random
import time

from tests.bench.figures import Figure, at_most, quantile
from tests.bench.scenario import Effort, Scenario
from tests.bench.stage import stage

CHILDREN = 2


def run(effort: Effort) -> dict[str, float]:
    with stage(queue="stamp", procs=CHILDREN, log_level="debug") as (server, daemon):
        daemon.wait_for_count("child_ready", CHILDREN)
        daemon.wait_for("worker_registered")
        offered = 0
        instant = time.monotonic()
        end = instant + effort.latency_s
        while (instant := instant + random.expovariate(effort.latency_jobs_per_s)) < end or not offered:
            daemon.listen_until(instant)
            server.client.create("stamp", time.monotonic())
            offered += 1
        daemon.wait_for_count("job_completed", offered)
        from_claim = [event["wait_s"] for event in daemon.events if event["event"] == "job_started"]
        from_offer = [record.started_at - record.offered_at for record in daemon.records()]
    return {
        "claim_median_ms": 1000 * quantile(from_claim, 0.5),
        "claim_p99_ms": 1000 * quantile(from_claim, 0.99),
        "enqueue_median_ms": 1000 * quantile(from_offer, 0.5),
        "enqueue_p99_ms": 1000 * quantile(from_offer, 0.99),
    }


SCENARIOS = (
    Scenario(
        "latency",
        (
            Figure("claim_median_ms", "claim answer to handler start, idle children, median", "ms", at_most(0.5)),
            Figure("claim_p99_ms", "claim answer to handler start, idle children, p99", "ms", at_most(5)),
            Figure("enqueue_median_ms", "enqueue to handler start, idle children, poll 1 s, median", "ms"),
            Figure("enqueue_p99_ms", "enqueue to handler start, idle children, poll 1 s, p99", "ms"),
        ),
        run,
    ),
)
