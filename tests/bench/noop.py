"""No-op jobs: what a job costs that does nothing, and how many of them are done in a second."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from tests.bench.figures import Bound, Figure, at_least, at_most
from tests.bench.scenario import Effort, Scenario
from tests.bench.stage import JOBS, REQUESTS, stage

CHILDREN = 2
ENDED = "job_completed"  # the event: in the log at level info, one per job
QUEUES = {"rest": "noop", "grpc-process": "empty"}
"""Results that are no objects cannot go by gRPC."""

CPU_BOUNDS_MS: Mapping[tuple[str, int], Bound] = {
    ("rest", 0): at_most(0.9),
    ("rest", 4): at_most(0.6),
    ("grpc-process", 4): at_most(0.4),
}
REQUEST_BOUNDS: Mapping[tuple[str, int], Bound] = {("rest", 0): at_most(2.0), ("rest", 4): at_most(1.3)}
SPEED_BOUNDS: Mapping[tuple[str, int], Bound] = {("rest", 4): at_least(600), ("grpc-process", 4): at_least(1500)}
"""By transport and prefetch."""


def run(transport: str, prefetch: int, effort: Effort) -> dict[str, float]:
    warmup = effort.warmup_jobs * CHILDREN
    left_over = warmup + CHILDREN * (1 + prefetch)  # so that the window closes under full load
    queue = QUEUES[transport]
    jobs = {queue: [None] * (warmup + effort.noop_jobs + left_over)}
    with stage(before=jobs, queue=queue, procs=CHILDREN, prefetch=prefetch, transport=transport) as (_, daemon):
        daemon.wait_for_count(ENDED, warmup)
        children = daemon.child_pids()
        counters, begin = daemon.metrics(), daemon.cpu(children)
        daemon.wait_for_count(ENDED, begin.jobs + effort.noop_jobs)
        spent, counted = daemon.cpu(children).since(begin), daemon.metrics()
    requests, completed = (counted[name] - counters[name] for name in (REQUESTS, JOBS))
    return {
        "jobs_per_s": spent.jobs / spent.at,
        "supervisor_ms": 1000 * spent.supervisor / spent.jobs,
        "fork_server_ms": 1000 * spent.fork_server / spent.jobs,
        "children_ms": 1000 * spent.children / spent.jobs,
        "server_ms": 1000 * spent.server / spent.jobs,
        "requests": requests / completed,
    }


def scenario(transport: str, prefetch: int) -> Scenario:
    key = (transport, prefetch)
    by = f", {transport}" if transport != "rest" else ""
    of = f"no-op job{by}, prefetch {prefetch}"
    figures = (
        Figure("supervisor_ms", f"supervisor CPU per {of}", "ms", CPU_BOUNDS_MS.get(key)),
        Figure("children_ms", f"children's CPU per {of}", "ms"),
        Figure("fork_server_ms", f"fork server's CPU per {of}", "ms"),
        Figure("server_ms", f"dev-server's CPU per {of}", "ms"),
        Figure("requests", f"requests per {of}", "", REQUEST_BOUNDS.get(key)),
        Figure("jobs_per_s", f"no-op jobs per second{by}, prefetch {prefetch}", "/s", SPEED_BOUNDS.get(key)),
    )
    name = f"noop-{'' if transport == 'rest' else 'grpc-'}p{prefetch}"
    return Scenario(name, figures, functools.partial(run, transport, prefetch), is_typical=key == ("rest", 1))


SCENARIOS = tuple(
    scenario(*key) for key in (("rest", 0), ("rest", 1), ("rest", 4), ("grpc-process", 0), ("grpc-process", 4))
)
