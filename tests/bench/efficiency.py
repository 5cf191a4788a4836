"""How much of their time children work, with short jobs: the gaps between jobs are the supervisor's."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Mapping
from itertools import pairwise

from tests.bench.figures import Bound, Figure, at_least
from tests.bench.records import Record
from tests.bench.scenario import Effort, Scenario
from tests.bench.stage import NotMeasured, stage

BOUNDS: Mapping[tuple[int, int, int], Bound] = {
    (10, 1, 0): at_least(0.95),
    (10, 1, 1): at_least(0.95),
    (10, 10, 50): at_least(0.93),
    (100, 1, 0): at_least(0.99),
}
"""By job length in ms, prefetch and the round trip to the server in ms, for any number of children."""

MIN_WARMUP_JOBS = 3
MIN_JOBS = 5


def run(job_ms: int, prefetch: int, children: int, away_ms: int, effort: Effort) -> dict[str, float]:
    job_s = job_ms / 1000
    warmup = max(MIN_WARMUP_JOBS, round(effort.busy_s / job_s / 10))
    counted = max(MIN_JOBS, round(effort.busy_s / job_s))
    enough = (warmup + counted) * children
    left_over = children * (2 + prefetch)  # so that nobody runs dry before the last one counts
    jobs = {"busy": [job_s] * (enough + left_over)}
    away_s = away_ms / 1000
    with stage(before=jobs, queue="busy", procs=children, prefetch=prefetch, round_trip_s=away_s) as (_, daemon):
        daemon.wait_for_count("job_completed", enough)
        done = daemon.records()[:enough]
    worked, lasted, gaps = tally(done, job_s, warmup)
    if len({record.pid for record in done}) != children:
        raise NotMeasured(f"not all of the {children} children had jobs")
    return {"efficiency": worked / lasted, "gap_ms": 1000 * statistics.median(gaps)}


def tally(records: Iterable[Record], job_s: float, warmup: int) -> tuple[float, float, list[float]]:
    """Seconds of work done, seconds they took, and the gaps between jobs; each child for itself, then added up.

    From a child's first start after the warm-up to its last start there are as many jobs as gaps: no edge counts.
    """
    by_child: dict[int, list[Record]] = {}
    for record in records:
        by_child.setdefault(record.pid, []).append(record)
    worked = lasted = 0.0
    gaps: list[float] = []
    for runs in (runs[warmup:] for runs in by_child.values() if len(runs) > warmup + 1):
        worked += (len(runs) - 1) * job_s
        lasted += runs[-1].started_at - runs[0].started_at
        gaps += [later.started_at - earlier.ended_at for earlier, later in pairwise(runs)]
    if not gaps:
        raise NotMeasured("no child had enough jobs")
    return worked, lasted, gaps


def scenario(job_ms: int, prefetch: int, children: int, away_ms: int = 0) -> Scenario:
    of = f"{job_ms} ms jobs, prefetch {prefetch}, {children} {'child' if children == 1 else 'children'}"
    if away_ms:
        of += f", server {away_ms} ms away"
    figures = (
        Figure("efficiency", f"efficiency, {of}", "", BOUNDS.get((job_ms, prefetch, away_ms))),
        Figure("gap_ms", f"gap between jobs, {of}", "ms"),
    )
    name = f"efficiency-{job_ms}ms-p{prefetch}-c{children}{f'-away{away_ms}ms' if away_ms else ''}"
    measure = functools.partial(run, job_ms, prefetch, children, away_ms)
    return Scenario(name, figures, measure, is_typical=(job_ms, prefetch, children, away_ms) == (10, 1, 2, 1))


SCENARIOS = (
    scenario(10, 0, 2),
    scenario(10, 1, 1),
    scenario(10, 1, 2),
    scenario(10, 1, 2, away_ms=1),
    scenario(10, 10, 2, away_ms=50),
    scenario(100, 0, 2),
    scenario(100, 1, 2),
)
