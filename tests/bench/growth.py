"""How cost grows: supervisor CPU and latency against the number of children, the size of payloads, the number of
leases and the volume of logs.

Each curve is taken at a few points, a daemon for each. What is told of it is the steepest step from one point to the
next, as an exponent: log(cost ratio) / log(ratio of the points). 0 is a cost that stays, 1 one that grows in
proportion; above 1 it grows faster than linearly. Times are per job (leases: per renewal) and not per second, so that
a cost of all jobs together that grows with the children does not count twice.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tests.bench.figures import Figure, Result, aligned, at_most, number, row
from tests.bench.scenario import Effort, Scenario
from tests.bench.stage import Daemon, stage

LINEAR = at_most(1.0)
HEAD = ("cost", "against", "values there", "steepest exponent", "bound", "met")
WAIT = "spooled_supervisor_job_wait_seconds"
RENEWALS = "spooled_supervisor_lease_renewals_total"
LATENESS = "spooled_supervisor_lease_renewal_lateness_seconds"


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one job or renewal: CPU of the supervisor, and how long it waited for it. Milliseconds."""

    cpu_ms: float
    latency_ms: float


@dataclass(frozen=True, slots=True)
class Curve:
    """What the cost is measured against; `latency` says which one."""

    name: str
    against: str
    latency: str
    points: tuple[int, ...]
    measure: Callable[[int, float], Cost]  # at this point, with this share of the jobs


def run(curve: Curve, effort: Effort) -> dict[str, float]:
    costs = [curve.measure(point, effort.growth_share) for point in curve.points]
    values: dict[str, float] = {}
    for key, taken in (("cpu", [cost.cpu_ms for cost in costs]), ("latency", [cost.latency_ms for cost in costs])):
        points = list(zip(curve.points, taken, strict=True))
        values |= {f"{key}_{point}": value for point, value in points}
        values[f"{key}_exponent"] = steepest(points)
    return values


def steepest(points: Iterable[tuple[float, float]]) -> float:
    """The greatest exponent between two neighbours; a point at 0 has none.

    >>> round(steepest([(1, 1), (2, 2), (4, 8)]), 2), round(steepest([(0, 1), (1, 2), (4, 4)]), 2)
    (2.0, 0.5)
    """
    steps = pairwise((x, y) for x, y in points if x > 0)
    return max(math.log(y / y0) / math.log(x / x0) for (x0, y0), (x, y) in steps)


LEFT_OVER = 40
"""More jobs than are counted: by when the first reading is taken, a fast daemon has done some more than the warm-up."""

# --- the curves -------------------------------------------------------------------------------------------------------


def against_children(children: int, share: float) -> Cost:
    """CPU of no-op jobs at full speed, none ahead of the children; latency of jobs that come one at a time."""
    jobs, alone = max(round(1600 * share), 8 * children), round(100 * share)
    before = {"noop": [None] * (jobs + 4 * children)}
    with stage(before=before, queue="noop", procs=children) as (server, daemon):
        cpu_ms = _of_jobs(daemon, jobs, warmup=2 * children).cpu_ms
        daemon.wait_for_count("job_completed", len(before["noop"]))
        counters = daemon.metrics()
        for _ in range(alone):
            server.client.create("noop")
            daemon.wait_for_count("job_completed", daemon.counts["job_completed"] + 1)
        return Cost(cpu_ms, 1000 * _mean(WAIT, counters, daemon.metrics()))


def against_payload(kilobytes: int, share: float) -> Cost:
    """No-op jobs one after the other, so that nothing but its own size delays a job."""
    jobs = max(5, round((600 if kilobytes < 1000 else 60) * share))
    payload = {"text": "x" * (1000 * kilobytes)}
    with stage(before={"noop": [payload] * (jobs + LEFT_OVER)}, queue="noop", procs=1) as (_, daemon):
        return _of_jobs(daemon, jobs, warmup=2)


def against_logs(lines: int, share: float) -> Cost:
    """Jobs of half a second in many children, each with so many lines."""
    children = 16
    jobs = children * max(2, round(10 * share))
    with stage(before={"wordy": [lines] * (jobs + 2 * children)}, queue="wordy", procs=children) as (_, daemon):
        return _of_jobs(daemon, jobs, warmup=children)


def against_leases(leases: int, share: float) -> Cost:
    """Jobs that nobody runs yet, of which each lease is renewed every 2.5 seconds."""
    children = 10
    prefetch = leases // children - 1
    options: dict[str, Any] = {"lease_duration": "5s", "abort_grace": "1s", "shutdown_timeout": "1s"}
    jobs = {"sleep": [3600.0] * leases}
    with stage(before=jobs, queue="sleep", procs=children, prefetch=prefetch, **options) as (_, daemon):
        _wait_for_leases(daemon, leases)
        counters, begin = daemon.metrics(), daemon.cpu([])
        daemon.listen_until(begin.at + max(2.5, 7.5 * share))
        spent, counted = daemon.cpu([]).since(begin), daemon.metrics()
    renewals = counted[RENEWALS] - counters[RENEWALS]
    return Cost(1000 * spent.supervisor / renewals, 1000 * _mean(LATENESS, counters, counted))


def _wait_for_leases(daemon: Daemon, leases: int) -> None:
    """Until all are held. The daemon tells of no event for that."""
    while daemon.metrics()["spooled_supervisor_leases_held"] < leases:
        daemon.listen_until(time.monotonic() + 0.1)


def _of_jobs(daemon: Daemon, jobs: int, *, warmup: int) -> Cost:
    """Of so many jobs after the warm-up; more must wait."""
    daemon.wait_for_count("job_completed", warmup)
    counters, begin = daemon.metrics(), daemon.cpu([])
    daemon.wait_for_count("job_completed", begin.jobs + jobs)
    spent, counted = daemon.cpu([]).since(begin), daemon.metrics()
    return Cost(1000 * spent.supervisor / spent.jobs, 1000 * _mean(WAIT, counters, counted))


def _mean(histogram: str, before: Mapping[str, float], after: Mapping[str, float]) -> float:
    total, count = (after[f"{histogram}_{part}"] - before[f"{histogram}_{part}"] for part in ("sum", "count"))
    return total / count


# --- the scenarios ----------------------------------------------------------------------------------------------------

CURVES = (
    Curve("children", "children", "claim answer to start", (1, 4, 16, 64), against_children),
    Curve("payload", "KB of payload", "claim answer to start", (1, 32, 1000), against_payload),
    Curve("leases", "leases held", "lateness of renewals", (20, 100, 1000), against_leases),
    Curve("logs", "lines logged per job", "claim answer to start", (0, 10, 100), against_logs),
)


def costs_of(curve: Curve) -> dict[str, str]:
    """The two costs of a curve: the beginnings of their figures' keys, and what they are called."""
    per = "renewal" if curve.name == "leases" else "job"
    return {"cpu": f"supervisor CPU per {per}", "latency": curve.latency}


def scenario(curve: Curve) -> Scenario:
    figures: list[Figure] = []
    for key, cost in costs_of(curve).items():
        figures += [Figure(f"{key}_{at}", f"{cost}, {at} {curve.against}", "ms") for at in curve.points]
        figures.append(Figure(f"{key}_exponent", f"growth of {cost} with {curve.against}", "", LINEAR))
    is_typical = curve.name == "children"
    return Scenario(_name(curve), tuple(figures), functools.partial(run, curve), is_typical=is_typical, most=1)


def _name(curve: Curve) -> str:
    return f"growth-{curve.name}"


SCENARIOS = tuple(scenario(curve) for curve in CURVES)


def has(result: Result) -> bool:
    """Whether it is one of a curve's."""
    return any(result.scenario == scenario.name for scenario in SCENARIOS)


def table(results: Sequence[Result]) -> str:
    """A line for each cost of each curve that is among the results, and its steepest step against its bound."""
    found = {result.name: result for result in results}
    rows: list[tuple[str, ...]] = [HEAD]
    for curve in CURVES:
        for key, cost in costs_of(curve).items():
            exponent = found.get(f"{_name(curve)}.{key}_exponent")
            if exponent is not None:
                values = (number(found[f"{_name(curve)}.{key}_{at}"].median) for at in curve.points)
                against = f"{curve.against}: {', '.join(map(str, curve.points))}"
                rows.append((cost, against, f"{', '.join(values)} ms", *row(exponent)[1::2], row(exponent)[4]))
    return aligned(rows)
