"""Whether the supervisor's memory grows with the jobs that it has seen.

Resident memory after a warm-up (caches, buffers and the allocator's arenas have their size by then), and again after
many jobs more. What grows by no more than NOISE_MB is called none: of 100 000 jobs that is ten bytes for each, less
than any Python object takes.
"""

from __future__ import annotations

import functools

from tests.bench import meters
from tests.bench.figures import Figure, at_most
from tests.bench.scenario import Effort, Scenario
from tests.bench.stage import stage

CHILDREN = 2
PREFETCH = 4
BATCH = 5000
WARMUP_SHARE = 0.5
NOISE_MB = 1.0


def run(is_long: bool, effort: Effort) -> dict[str, float]:
    jobs = effort.long_leak_jobs if is_long else effort.leak_jobs
    warmup = round(jobs * WARMUP_SHARE)
    with stage(queue="noop", procs=CHILDREN, prefetch=PREFETCH) as (server, daemon):
        sizes = []
        done = 0
        for enough in (warmup, warmup + jobs):
            while done < enough:
                batch = min(BATCH, enough - done)
                server.client.bulk("noop", [None] * batch)
                done += batch
                daemon.wait_for_count("job_completed", done)
                daemon.forget_events()
            sizes.append(meters.resident_bytes(daemon.pid))
    before, after = (size / 1e6 for size in sizes)
    return {"growth_mb": after - before, "memory_mb": after}


def scenario(jobs: str, *, is_long: bool) -> Scenario:
    figures = (
        Figure("growth_mb", f"growth of the supervisor's memory over {jobs} jobs", "MB", at_most(NOISE_MB)),
        Figure("memory_mb", f"supervisor's memory after {jobs} jobs, resident", "MB"),
    )
    name = "leak-long" if is_long else "leak"
    return Scenario(
        name,
        figures,
        functools.partial(run, is_long),
        is_typical=not is_long,
        is_long=is_long,
        most=1 if is_long else 2,
    )


SCENARIOS = (scenario("10 000", is_long=False), scenario("100 000", is_long=True))
