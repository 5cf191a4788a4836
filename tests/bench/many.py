"""Many children under one supervisor: what they cost it while all are busy, when it is scraped, and in memory."""

from __future__ import annotations

from tests.bench import meters
from tests.bench.figures import Figure, at_most
from tests.bench.scenario import Effort, Scenario
from tests.bench.stage import stage

JOB_S = 1.0
CHILDREN = 64


def run(effort: Effort) -> dict[str, float]:
    children = effort.many_children
    jobs = {"sleep": [JOB_S] * children * effort.many_jobs}
    with stage(before=jobs, queue="sleep", procs=children) as (_, daemon):
        daemon.wait_for_count("job_completed", children)
        pids = daemon.child_pids()
        begin = daemon.cpu(pids)
        daemon.wait_for_count("job_completed", children * (effort.many_jobs - 1))
        busy = daemon.cpu(pids).since(begin)
        daemon.wait_for_count("job_completed", children * effort.many_jobs)
        daemon.metrics()  # what is made once is not the scrape's
        before = meters.cpu_s(daemon.pid)
        for _ in range(effort.scrapes):
            daemon.metrics()
        scraping_s = meters.cpu_s(daemon.pid) - before
        memory = meters.resident_bytes(daemon.pid)
    return {
        "busy_percent": 100 * busy.supervisor / busy.at,
        "busy_ms": 1000 * busy.supervisor / busy.jobs,
        "scrape_ms": 1000 * scraping_s / effort.scrapes,
        "memory_mb": memory / 1e6,
    }


SCENARIOS = (
    Scenario(
        "many",
        (
            Figure("busy_percent", "supervisor CPU, 64 children busy with 1 s jobs", "% of a core", at_most(10)),
            Figure("busy_ms", "the same per job", "ms"),
            Figure("scrape_ms", "supervisor CPU of one scrape, 64 children", "ms", at_most(20)),
            Figure("memory_mb", "supervisor's memory with 64 children, resident", "MB", at_most(60)),
        ),
        run,
    ),
)
