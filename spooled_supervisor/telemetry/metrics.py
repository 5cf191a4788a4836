"""What Prometheus sees: counters and histograms fed by events, gauges read from the supervisor when it is scraped.

Names that begin with `worker_` are those that the service's own guides use for a worker. Label values come from closed
sets or are queues that were declared; anything else becomes `other`, so no job, error text or server can make series.
All counting is in this process: children report events, and no file of a dead one can haunt a page (`series` says why
prometheus_client's own counters are not used). Each series stands beside the event that moves it. What the app's
handlers count themselves is on the same page; `foreign` looks after that.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from spooled_supervisor import __version__
from spooled_supervisor.events import (
    ApiRequestFinished,
    ChildExited,
    ChildKilled,
    ChildReady,
    ClaimAnswered,
    Events,
    JobCompleted,
    JobFailed,
    JobLeaseLost,
    JobOutputDropped,
    JobStarted,
    LeaseRenewed,
    LoopLagged,
    OrphansKilled,
    OutcomeDropped,
    Reloaded,
    ReloadFailed,
)
from spooled_supervisor.telemetry.foreign import ChildMetrics, appears_by
from spooled_supervisor.telemetry.gauges import gauges
from spooled_supervisor.telemetry.series import Closed, Counter, FirstCome, Histogram
from spooled_supervisor.telemetry.snapshot import Snapshot
from spooled_supervisor.telemetry.texts import utf8_text

PREFIX = "spooled_supervisor_"

SHORT_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
JOB_BOUNDS_S = (*SHORT_BOUNDS_S, 120, 300, 600, 1800, 3600, 7200, 14400, 43200)
LAG_BOUNDS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 3600)
LATENESS_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, *LAG_BOUNDS_S)

LEFT_FOR_GOOD = frozenset({"scale", "shutdown"})  # reasons to exit after which no child takes the place
KILL_REASONS = ("boot", "exit", "lease_lost", "memory", "operator", "protocol", "shutdown", "timeout", "unresponsive")
RESTART_REASONS = (
    *(reason for reason in KILL_REASONS if reason not in LEFT_FOR_GOOD),
    *("aborted", "crash", "isolation", "jobs", "recycle", "reload", "terminated", "thread", "descriptors"),
)
RENEWAL_RESULTS = ("lost", "ok", "unavailable")
FAILURE_KINDS = ("crashed", "failed", "released", "timed_out")
JOB_STATUSES = ("completed", "failed")
RELOAD_RESULTS = ("failed", "ok")
API_STATUSES = (
    *("200", "201", "202", "204", "400", "401", "402", "403", "404", "408", "409", "413", "415", "422", "429"),
    *("500", "501", "502", "503", "504", "error", "timeout"),
)

QUEUES = UNDECLARED = ()
"""Label values that are not known beforehand: their series appear with `declare_queues`, or when first counted."""

S = TypeVar("S", Counter, Histogram)


class Metrics(Collector):
    """Counts events and renders the page. `log_lines_dropped` is asked at each scrape."""

    def __init__(
        self,
        events: Events,
        snapshot: Callable[[], Snapshot],
        registry: CollectorRegistry | None = None,
        *,
        log_lines_dropped: Callable[[], int] = lambda: 0,
    ) -> None:
        self._on = events.subscribe
        self._snapshot = snapshot
        self._log_lines_dropped = log_lines_dropped
        self._queue_labels: dict[str, str] = {}
        self._series: list[Counter | Histogram] = []
        self._per_queue: list[tuple[Counter | Histogram, list[tuple[str, ...]]]] = []
        self._job_cpu = self._counter(PREFIX + "job_cpu_seconds_total", "CPU time that jobs used.", queue=QUEUES)
        self._count_jobs()
        self._count_claims()
        self._count_leases()
        self._count_requests()
        self._count_children()
        self._count_reloads()
        self._count_troubles()
        taken = [name for family in self.describe() for name in appears_by(family.name, family.type)]
        self.children = ChildMetrics([*taken, "worker_jobs_in_progress"])
        self._on(lambda event: self.children.gone(event.pid), ChildExited)
        self.registry = CollectorRegistry() if registry is None else registry
        self.registry.register(self)
        self.registry.register(self.children)
        if registry is None:
            ProcessCollector(registry=self.registry)

    def declare_queues(self, names: Iterable[str]) -> None:
        """Give these queues label values of their own and show their series from now on, at zero."""
        for name in names:
            label = self._queue_labels.setdefault(name, utf8_text(name))
            for series, rests in self._per_queue:
                for rest in rests:
                    series.declare(label, *rest)

    def add_job_cpu(self, queue_name: str, cpu_s: float) -> None:
        """Count CPU time that a job of this queue used."""
        self._job_cpu.add(max(0.0, cpu_s), self._queue(queue_name))

    def render(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type, by the request's Accept header (the text format if it says nothing)."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # it asks for a version that is no number
            encode, content_type = choose_encoder("")
        return encode(self.registry), content_type

    def collect(self) -> Iterator[Metric]:
        """All families as they are now; asks for one snapshot."""
        for series in self._series:
            yield series.family()
        yield from gauges(self._snapshot(), self._queue)
        yield CounterMetricFamily(
            PREFIX + "log_lines_dropped_total",
            "Log lines that standard error did not take.",
            value=self._log_lines_dropped(),
        )
        build = {"version": __version__, "python": platform.python_version()}
        yield InfoMetricFamily(PREFIX + "build", "Versions of this package and of its Python.", value=build)

    def describe(self) -> list[Metric]:
        """The families that a registry compares with what it has; asks for no snapshot."""
        return [series.outline() for series in self._series]

    def _count_jobs(self) -> None:
        processed = self._counter(
            "worker_jobs_processed_total", "Jobs that ended, by outcome.", queue=QUEUES, status=JOB_STATUSES
        )
        duration = self._histogram(
            "worker_job_processing_seconds", "How long handlers ran.", JOB_BOUNDS_S, queue=QUEUES
        )
        failures = self._counter(
            PREFIX + "job_failures_total", "Jobs that failed, by kind.", queue=QUEUES, kind=FAILURE_KINDS
        )
        wait = self._histogram(
            PREFIX + "job_wait_seconds", "From the claim's answer to the handler's start.", SHORT_BOUNDS_S, queue=QUEUES
        )
        kind_label = Closed(FAILURE_KINDS)

        def started(event: JobStarted) -> None:
            wait.observe(event.wait_s, self._queue(event.queue_name))

        def completed(event: JobCompleted) -> None:
            queue = self._queue(event.queue_name)
            processed.add(1, queue, "completed")
            duration.observe(event.duration_s, queue)

        def failed(event: JobFailed) -> None:
            queue = self._queue(event.queue_name)
            processed.add(1, queue, "failed")
            failures.add(1, queue, kind_label(event.kind))
            if event.duration_s is not None:
                duration.observe(event.duration_s, queue)

        self._on(started, JobStarted)
        self._on(completed, JobCompleted)
        self._on(failed, JobFailed)

    def _count_claims(self) -> None:
        claims = self._counter(PREFIX + "claims_total", "Claims that were answered.", queue=QUEUES)
        empty = self._counter(PREFIX + "claims_empty_total", "Claims answered without a job.", queue=QUEUES)
        jobs = self._counter(PREFIX + "claimed_jobs_total", "Jobs that claims brought.", queue=QUEUES)

        def answered(event: ClaimAnswered) -> None:
            queue = self._queue(event.queue_name)
            claims.add(1, queue)
            jobs.add(event.got, queue)
            if not event.got:
                empty.add(1, queue)

        self._on(answered, ClaimAnswered)

    def _count_leases(self) -> None:
        renewals = self._counter(PREFIX + "lease_renewals_total", "Lease renewals, by result.", result=RENEWAL_RESULTS)
        late = self._histogram(
            PREFIX + "lease_renewal_lateness_seconds",
            "How long after they were due leases were renewed.",
            LATENESS_BOUNDS_S,
        )
        lost = self._counter(PREFIX + "leases_lost_total", "Leases lost while their job was ours.")
        result_label = Closed(RENEWAL_RESULTS)

        def renewed(event: LeaseRenewed) -> None:
            renewals.add(1, result_label(event.result))
            late.observe(event.late_s)

        self._on(renewed, LeaseRenewed)
        self._on(lambda event: lost.add(1), JobLeaseLost)

    def _count_requests(self) -> None:
        requests = self._counter(
            PREFIX + "api_requests_total", "Requests to the service.", operation=UNDECLARED, status=UNDECLARED
        )
        duration = self._histogram(
            PREFIX + "api_request_seconds", "How long the service took.", SHORT_BOUNDS_S, operation=UNDECLARED
        )
        operation_label, status_label = FirstCome(limit=32), Closed(API_STATUSES)

        def finished(event: ApiRequestFinished) -> None:
            operation = operation_label(event.operation)
            requests.add(1, operation, status_label(event.status))
            duration.observe(event.duration_s, operation)

        self._on(finished, ApiRequestFinished)

    def _count_children(self) -> None:
        restarts = self._counter(
            PREFIX + "child_restarts_total", "Children that left and are replaced, by reason.", reason=RESTART_REASONS
        )
        kills = self._counter(
            PREFIX + "child_kills_total", "Children that were killed, by reason.", reason=KILL_REASONS
        )
        boot = self._histogram(PREFIX + "child_boot_seconds", "From fork to ready.", SHORT_BOUNDS_S)
        restart_label, kill_label = Closed(RESTART_REASONS), Closed(KILL_REASONS)

        def exited(event: ChildExited) -> None:
            if event.reason not in LEFT_FOR_GOOD:
                restarts.add(1, restart_label(event.reason))

        self._on(exited, ChildExited)
        self._on(lambda event: kills.add(1, kill_label(event.reason)), ChildKilled)
        self._on(lambda event: boot.observe(event.boot_s), ChildReady)

    def _count_reloads(self) -> None:
        reloads = self._counter(
            PREFIX + "reloads_total", "Reloads of the app; where one failed the old one goes on.", result=RELOAD_RESULTS
        )
        self._on(lambda event: reloads.add(1, "ok"), Reloaded)
        self._on(lambda event: reloads.add(1, "failed"), ReloadFailed)

    def _count_troubles(self) -> None:
        orphans = self._counter(PREFIX + "orphans_killed_total", "Processes that jobs left behind and we ended.")
        unreported = self._counter(PREFIX + "outcomes_dropped_total", "Outcomes the service will never be told.")
        output = self._counter(PREFIX + "job_output_dropped_total", "Lines of children beyond the allowed rate.")
        lag = self._histogram(PREFIX + "loop_lag_seconds", "Noticed delays of the supervisor's loop.", LAG_BOUNDS_S)
        self._on(lambda event: orphans.add(event.count), OrphansKilled)
        self._on(lambda event: unreported.add(1), OutcomeDropped)
        self._on(lambda event: output.add(event.lines), JobOutputDropped)
        self._on(lambda event: lag.observe(event.lag_s), LoopLagged)

    def _queue(self, name: str) -> str:
        return self._queue_labels.get(name, Closed.OTHER)

    def _counter(self, name: str, text: str, **labels: tuple[str, ...]) -> Counter:
        return self._keep(Counter(name, text, *labels), labels)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...], **labels: tuple[str, ...]) -> Histogram:
        return self._keep(Histogram(name, text, bounds, *labels), labels)

    def _keep(self, series: S, labels: dict[str, tuple[str, ...]]) -> S:
        """Remember a series; what is known of its label values is shown at zero, now or with each queue."""
        self._series.append(series)
        known = [values for name, values in labels.items() if name != "queue"]
        if "queue" in labels:  # always the first label
            self._per_queue.append((series, list(product(*known))))
        else:
            for values in product(*known):
                series.declare(*values)
        return series
