"""A daemon with nothing to do, event stream on: what its rest costs, in its first minute and when it has settled."""

from __future__ import annotations

import functools
import time

from tests.bench.figures import Figure, at_most
from tests.bench.scenario import Effort, Scenario
from tests.bench.stage import REQUESTS, stage

CHILDREN = 16


def run(is_settled: bool, effort: Effort) -> dict[str, float]:
    with stage(before={"noop": [None]}, queue="noop", procs=CHILDREN) as (_, daemon):
        daemon.wait_for("worker_registered")
        daemon.wait_for("job_completed")
        began_at = time.monotonic() + (effort.rest_after_s if is_settled else 0.0)
        daemon.listen_until(began_at)
        counters = daemon.metrics()
        daemon.listen_until(began_at + effort.settle_s)  # the last children are born, the first heartbeat is sent
        children = daemon.child_pids()
        begin = daemon.cpu(children)
        daemon.listen_until(began_at + (effort.rest_s if is_settled else effort.idle_s))
        spent, minutes = daemon.cpu(children).since(begin), (time.monotonic() - began_at) / 60
        requests = daemon.metrics()[REQUESTS] - counters[REQUESTS]
    return {
        "percent": 100 * spent.daemon / spent.at,
        "supervisor_percent": 100 * spent.supervisor / spent.at,
        "requests": requests / minutes,
    }


def scenario(*, is_settled: bool) -> Scenario:
    when = "once at rest" if is_settled else "in its first minute"
    figures = (
        Figure("percent", f"CPU of an idle daemon, 16 children, {when}", "% of a core", at_most(0.3)),
        Figure("supervisor_percent", f"supervisor's share of it, {when}", "% of a core"),
        Figure("requests", f"requests per idle minute, {when}", "", at_most(8) if is_settled else None),
    )
    name = "idle-settled" if is_settled else "idle"
    measure = functools.partial(run, is_settled)
    return Scenario(name, figures, measure, is_typical=not is_settled, is_long=is_settled, most=1 if is_settled else 2)


SCENARIOS = (scenario(is_settled=False), scenario(is_settled=True))
