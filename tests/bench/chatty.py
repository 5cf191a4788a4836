"""Whether leases are renewed in time while every child is busy and logs as fast as it can.

Short leases and jobs that wait make many renewals. The lateness is the daemon's own figure, a histogram: what is told
is the upper bound of the bucket that has the 99th of a hundred in it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tests.bench.figures import Figure, at_most
from tests.bench.scenario import Effort, Scenario
from tests.bench.stage import NotMeasured, stage

CHILDREN = 4
PREFETCH = 10
LEASE_S = 5
LATENESS = "spooled_supervisor_lease_renewal_lateness_seconds_bucket"


def run(effort: Effort) -> dict[str, float]:
    jobs = {"chatty": [effort.chatty_s + LEASE_S] * CHILDREN * (1 + PREFETCH)}
    options: dict[str, Any] = {"lease_duration": f"{LEASE_S}s", "abort_grace": "1s", "shutdown_timeout": "1s"}
    with stage(before=jobs, queue="chatty", procs=CHILDREN, prefetch=PREFETCH, **options) as (_, daemon):
        daemon.wait_for("job_logged")
        begin = daemon.cpu([])
        daemon.listen_until(time.monotonic() + effort.chatty_s)
        spent = daemon.cpu([]).since(begin)
        buckets = daemon.buckets(LATENESS)
        lines = daemon.counts["job_logged"]
    return {
        "late_p99_ms": 1000 * quantile_of(buckets, 0.99),
        "lines_per_s": lines / spent.at,
        "supervisor_percent": 100 * spent.supervisor / spent.at,
    }


def quantile_of(buckets: Mapping[float, float], share: float) -> float:
    """The bound below which this share of what a histogram has counted lies; `buckets` are cumulative, by their bound.

    >>> quantile_of({0.1: 90, 0.5: 99, float("inf"): 100}, 0.99)
    0.5
    """
    total = max(buckets.values(), default=0.0)
    if not total:
        raise NotMeasured("nothing was counted")
    return min(bound for bound, count in buckets.items() if count >= share * total)


SCENARIOS = (
    Scenario(
        "chatty",
        (
            Figure("late_p99_ms", "lateness of renewals, children busy and logging, p99", "ms", at_most(100)),
            Figure("lines_per_s", "lines per second that were logged meanwhile", "/s"),
            Figure("supervisor_percent", "supervisor CPU meanwhile", "% of a core"),
        ),
        run,
    ),
)
