"""No-op jobs: what a job costs that does nothing, and how many of them are done in a second."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from tests.bench.figures import Bound, Figure, at_most
from tests.bench.scenario import Effort, Scenario
from tests.bench.stage import JOBS, REQUESTS, stage

CHILDREN = 2
ENDED = "job_completed"  # the event: in the log at level info, one per job

CPU_BOUNDS_MS: Mapping[int, Bound] = {0: at_most(3.0), 1: at_most(3.0), 4: at_most(3.0)}
"""Supervisor CPU per job over REST, by prefetch."""


def run(prefetch: int, effort: Effort) -> dict[str, float]:
    warmup = effort.warmup_jobs * CHILDREN
    left_over = warmup + CHILDREN * (1 + prefetch)  # so that the window closes under full load
    jobs = warmup + effort.noop_jobs + left_over
    with stage(before={"noop": [None] * jobs}, queue="noop", procs=CHILDREN, prefetch=prefetch) as (_, daemon):
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


def scenario(prefetch: int) -> Scenario:
    of = f"no-op job, prefetch {prefetch}"
    figures = (
        Figure("supervisor_ms", f"supervisor CPU per {of}", "ms", CPU_BOUNDS_MS.get(prefetch)),
        Figure("children_ms", f"children's CPU per {of}", "ms"),
        Figure("fork_server_ms", f"fork server's CPU per {of}", "ms"),
        Figure("server_ms", f"dev-server's CPU per {of}", "ms"),
        Figure("requests", f"requests per {of}"),
        Figure("jobs_per_s", f"no-op jobs per second, prefetch {prefetch}", "/s"),
    )
    return Scenario(f"noop-p{prefetch}", figures, functools.partial(run, prefetch), is_typical=prefetch == 1)


SCENARIOS = tuple(scenario(prefetch) for prefetch in (0, 1, 4))
