"""The metrics page: right numbers, closed label sets, valid in both formats, untouched by the environment."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Metric
from prometheus_client import parser as text_parser
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.registry import REGISTRY

from spooled_supervisor import events as happened
from spooled_supervisor.events import Event, Events
from spooled_supervisor.telemetry.metrics import JOB_BOUNDS_S, KILL_REASONS, Metrics
from spooled_supervisor.telemetry.series import Counter, FirstCome, Histogram
from spooled_supervisor.telemetry.snapshot import PHASES, ChildSnapshot, QueueSnapshot, Snapshot

Parse = Callable[[str], Iterable[Metric]]
parse_openmetrics: Parse = openmetrics_parser.text_string_to_metric_families
parse_text: Parse = text_parser.text_string_to_metric_families

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
ODD_NAMES = ["new\nline", 'quo"te', "back\\slash", "sur\udcffrogate", "é", ""]


def a_child(**changes: object) -> ChildSnapshot:
    child = ChildSnapshot(
        slot=0,
        pid=100,
        generation=1,
        state="idle",
        queue=None,
        job_id=None,
        elapsed_s=None,
        deadline_in_s=None,
        percent=None,
        message=None,
        jobs_done=0,
        uptime_s=1.0,
        pss_bytes=None,
        uss_bytes=None,
        cpu_s=None,
    )
    return dataclasses.replace(child, **changes)  # type: ignore[arg-type]


def a_snapshot(**changes: object) -> Snapshot:
    snapshot = Snapshot(
        phase="running",
        worker_id="w-1",
        uptime_s=60.0,
        started_at=1.7e9,
        registered=True,
        quiet=False,
        reasons=(),
        unhealthy=(),
        queues=(QueueSnapshot("emails", 1.0, None, 0, 0),),
        children=(),
        slots_backed_off=0,
        leases_held=0,
        unsettled=0,
        outbox_depth=0,
        outbox_age_s=0.0,
        outbox_on_disk=True,
        heartbeat_age_s=None,
        procs=4,
        generation=1,
    )
    return dataclasses.replace(snapshot, **changes)  # type: ignore[arg-type]


class Page:
    """Metrics with an event bus, a snapshot that a test may replace, and a look at single values."""

    def __init__(self, queues: Iterable[str] = ("emails",)) -> None:
        self.events = Events()
        self.now = a_snapshot()
        self.dropped = 0
        self.metrics = Metrics(self.events, lambda: self.now, log_lines_dropped=lambda: self.dropped)
        self.metrics.declare_queues(queues)

    def emit(self, *events: Event) -> None:
        for event in events:
            self.events.emit(event)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)

    def ours(self, name: str, **labels: str) -> float | None:
        return self.value(f"spooled_supervisor_{name}", **labels)

    def families(self) -> list[Metric]:
        return list(parse_openmetrics(self.metrics.render(OPENMETRICS)[0].decode()))

    def series(self) -> int:
        return sum(len(family.samples) for family in self.families())


@pytest.fixture
def page() -> Page:
    return Page()


VALUES = {"int": 1, "float": 1.0, "str": "text", "bool": True, "tuple[str, ...]": ("a",)}


def some(kind: type[Event], /, **fields: object) -> Event:
    """An event of this class; fields that are not given have some value of their type."""
    types = {name: kind.__annotations__[name].split(" | ")[0] for name in kind.__struct_fields__}
    made: Any = {name: VALUES.get(type_) for name, type_ in types.items()}
    return kind(**{**made, **fields})


def completed(queue: str = "emails", duration_s: float = 0.5) -> Event:
    return some(happened.JobCompleted, queue_name=queue, duration_s=duration_s)


def failed(queue: str = "emails", kind: str = "failed", duration_s: float | None = 0.5) -> Event:
    return some(happened.JobFailed, queue_name=queue, kind=kind, duration_s=duration_s)


def test_jobs_are_counted_by_queue_and_status(page: Page) -> None:
    page.emit(completed(), completed(), failed(), failed(kind="crashed", duration_s=None))
    assert page.value("worker_jobs_processed_total", queue="emails", status="completed") == 2
    assert page.value("worker_jobs_processed_total", queue="emails", status="failed") == 2
    assert page.ours("job_failures_total", queue="emails", kind="crashed") == 1
    assert page.value("worker_job_processing_seconds_count", queue="emails") == 3
    assert page.value("worker_job_processing_seconds_sum", queue="emails") == 1.5


@pytest.mark.parametrize(("seconds", "bucket"), [(0.0, "0.005"), (0.005, "0.005"), (0.006, "0.01"), (8000, "14400.0")])
def test_a_duration_falls_into_its_bucket_and_all_above(page: Page, seconds: float, bucket: str) -> None:
    page.emit(completed(duration_s=seconds))
    counts = {
        bound: page.value("worker_job_processing_seconds_bucket", queue="emails", le=bound)
        for bound in [*(str(float(bound)) for bound in JOB_BOUNDS_S), "+Inf"]
    }
    assert counts == {bound: float(bound == "+Inf" or float(bound) >= float(bucket)) for bound in counts}


def test_the_buckets_reach_from_milliseconds_to_hours() -> None:
    assert JOB_BOUNDS_S[0] == 0.005
    assert JOB_BOUNDS_S[-1] >= 6 * 3600
    assert list(JOB_BOUNDS_S) == sorted(JOB_BOUNDS_S)


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_value_that_makes_no_sense_does_not_let_a_sum_fall(value: float) -> None:
    histogram = Histogram("lateness_seconds", "Text.", (1,))
    histogram.observe(value)
    assert [sample.value for sample in histogram.family().samples] == [1, 1, 1, 0]


def test_what_happened_is_counted(page: Page) -> None:
    page.emit(
        some(happened.JobStarted, queue_name="emails", wait_s=0.25),
        some(happened.ClaimAnswered, queue_name="emails", got=3),
        some(happened.ClaimAnswered, queue_name="emails", got=0),
        some(happened.LeaseRenewed, result="ok"),
        some(happened.LeaseRenewed, result="lost"),
        some(happened.JobLeaseLost),
        some(happened.ApiRequestFinished, operation="claim", status="200"),
        some(happened.ApiRequestFinished, operation="claim", status="timeout"),
        some(happened.ChildReady),
        some(happened.ChildKilled, reason="timeout"),
        some(happened.OrphansKilled, count=3),
        some(happened.OutcomeDropped),
        some(happened.JobOutputDropped, lines=40),
        some(happened.LoopLagged, lag_s=2.0),
        some(happened.Reloaded),
        some(happened.ReloadFailed),
        some(happened.ReloadFailed),
    )
    page.metrics.add_job_cpu("emails", 1.5)
    page.metrics.add_job_cpu("emails", -1.0)
    page.dropped = 7
    assert page.ours("job_wait_seconds_sum", queue="emails") == 0.25
    assert page.ours("claims_total", queue="emails") == 2
    assert page.ours("claims_empty_total", queue="emails") == 1
    assert page.ours("claimed_jobs_total", queue="emails") == 3
    assert page.ours("lease_renewals_total", result="ok") == 1
    assert page.ours("lease_renewals_total", result="lost") == 1
    assert page.ours("lease_renewal_lateness_seconds_count") == 2
    assert page.ours("leases_lost_total") == 1
    assert page.ours("api_requests_total", operation="claim", status="200") == 1
    assert page.ours("api_requests_total", operation="claim", status="timeout") == 1
    assert page.ours("api_request_seconds_count", operation="claim") == 2
    assert page.ours("child_boot_seconds_count") == 1
    assert page.ours("child_kills_total", reason="timeout") == 1
    assert page.ours("orphans_killed_total") == 3
    assert page.ours("outcomes_dropped_total") == 1
    assert page.ours("job_output_dropped_total") == 40
    assert page.ours("loop_lag_seconds_sum") == 2
    assert page.ours("reloads_total", result="ok") == 1
    assert page.ours("reloads_total", result="failed") == 2
    assert page.ours("job_cpu_seconds_total", queue="emails") == 1.5
    assert page.ours("log_lines_dropped_total") == 7


@pytest.mark.parametrize(
    ("reason", "counted_as"),
    [
        ("crash", "crash"),
        ("recycle", "recycle"),
        ("boot", "boot"),
        ("memory", "memory"),
        ("odd", "other"),
        ("scale", None),
        ("shutdown", None),
    ],
)
def test_a_child_that_is_replaced_is_a_restart(page: Page, reason: str, counted_as: str | None) -> None:
    page.emit(some(happened.ChildExited, reason=reason))
    restarts = [family for family in page.families() if family.name == "spooled_supervisor_child_restarts"]
    counts = {sample.labels["reason"]: sample.value for sample in restarts[0].samples if sample.value}
    assert counts == ({counted_as: 1.0} if counted_as else {})


def test_a_declared_queue_shows_all_its_series_at_zero() -> None:
    page = Page(queues=())
    before = page.series()
    page.metrics.declare_queues(["reports"])
    assert page.value("worker_jobs_processed_total", queue="reports", status="completed") == 0
    assert page.value("worker_jobs_processed_total", queue="reports", status="failed") == 0
    assert page.value("worker_job_processing_seconds_count", queue="reports") == 0
    assert page.ours("job_failures_total", queue="reports", kind="timed_out") == 0
    assert page.ours("claims_empty_total", queue="reports") == 0
    declared = page.series()
    assert declared > before
    page.emit(completed("reports"))
    page.metrics.declare_queues(["reports"])
    assert page.series() == declared
    assert page.value("worker_jobs_processed_total", queue="reports", status="completed") == 1


def test_reasons_are_shown_at_zero_before_anything_happens(page: Page) -> None:
    for reason in KILL_REASONS:
        assert page.ours("child_kills_total", reason=reason) == 0
    assert page.ours("orphans_killed_total") == 0
    assert page.ours("loop_lag_seconds_count") == 0


def test_what_is_in_no_closed_set_becomes_other(page: Page) -> None:
    page.emit(
        completed("never declared"),
        failed(kind="strange"),
        some(happened.ChildKilled, reason="strange"),
        some(happened.LeaseRenewed, result="strange"),
        some(happened.ApiRequestFinished, operation="claim", status="799"),
    )
    assert page.value("worker_jobs_processed_total", queue="other", status="completed") == 1
    assert page.ours("job_failures_total", queue="emails", kind="other") == 1
    assert page.ours("child_kills_total", reason="other") == 1
    assert page.ours("lease_renewals_total", result="other") == 1
    assert page.ours("api_requests_total", operation="claim", status="other") == 1


def test_thousands_of_jobs_queues_errors_and_respawns_add_no_series(page: Page) -> None:
    def storm(first: int, last: int) -> None:
        for n in range(first, last):
            page.emit(
                some(happened.JobStarted, job_id=f"job-{n}", queue_name=f"queue-{n}", slot=n, pid=n),
                some(happened.JobFailed, queue_name=f"queue-{n}", kind=f"kind-{n}", error=f"error {n}"),
                some(happened.JobCompleted, job_id=f"job-{n}", queue_name="emails", slot=n),
                some(happened.ClaimAnswered, queue_name=f"queue-{n}"),
                some(happened.LeaseRenewed, job_id=f"job-{n}", result=f"result-{n}"),
                some(happened.ChildKilled, slot=n, generation=n, pid=n, reason=f"reason-{n}"),
                some(happened.ChildExited, slot=n, generation=n, pid=n, reason=f"reason-{n}"),
                some(happened.ApiRequestFinished, operation=f"operation-{n}", status=str(n)),
            )
            page.metrics.add_job_cpu(f"queue-{n}", 0.1)

    storm(0, 1000)
    before = page.series()
    storm(1000, 3000)
    assert page.series() == before


def test_first_come_takes_so_many_and_no_more() -> None:
    label = FirstCome(limit=2)
    assert [label(word) for word in "abcab"] == ["a", "b", "other", "a", "b"]


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_odd_queue_names_do_not_break_the_page(accept: str) -> None:
    page = Page(ODD_NAMES)
    page.now = a_snapshot(queues=tuple(QueueSnapshot(name, 1.0, None, 1, 0) for name in ODD_NAMES))
    page.emit(*(completed(name) for name in ODD_NAMES))
    text = page.metrics.render(accept)[0].decode()
    families = list(parse_openmetrics(text) if accept else parse_text(text))
    found = {s.labels["queue"] for f in families for s in f.samples if s.name == "worker_jobs_processed_total"}
    assert found == {name.encode("utf-8", "backslashreplace").decode() for name in ODD_NAMES}


def test_gauges_tell_the_snapshot_as_it_is_at_the_scrape(page: Page) -> None:
    page.now = a_snapshot(
        queues=(QueueSnapshot("emails", 1.0, None, 2, 1), QueueSnapshot("unknown", 1.0, None, 1, 1)),
        children=(a_child(state="busy"), a_child(slot=1, state="busy"), a_child(slot=2), a_child(slot=3, state="odd")),
        slots_backed_off=1,
        leases_held=4,
        unsettled=5,
        outbox_depth=6,
        outbox_age_s=7.5,
        outbox_on_disk=True,
        heartbeat_age_s=8.5,
        quiet=True,
        held_back="the load is 9, above --max-load 8",
        reasons=("quiet",),
    )
    assert page.value("worker_jobs_in_progress", queue="emails") == 2
    assert page.value("worker_jobs_in_progress", queue="other") == 1
    assert page.ours("jobs_waiting", queue="emails") == 1
    assert page.ours("children", state="busy") == 2
    assert page.ours("children", state="idle") == 1
    assert page.ours("children", state="killed") == 0
    assert page.ours("children", state="other") == 1
    assert page.ours("slots_backed_off") == 1
    assert page.ours("leases_held") == 4
    assert page.ours("unsettled") == 5
    assert page.ours("outbox_depth") == 6
    assert page.ours("outbox_age_seconds") == 7.5
    assert page.ours("heartbeat_age_seconds") == 8.5
    assert page.ours("procs") == 4
    assert page.ours("ready") == 0
    assert page.ours("healthy") == 1
    assert page.ours("quiet") == 1
    assert page.ours("held_back") == 1
    assert page.ours("registered") == 1
    page.now = a_snapshot()
    assert page.value("worker_jobs_in_progress", queue="emails") == 0
    assert page.ours("heartbeat_age_seconds") is None
    assert page.ours("held_back") == 0


@pytest.mark.parametrize("phase", PHASES)
def test_exactly_the_present_phase_is_one(page: Page, phase: str) -> None:
    page.now = a_snapshot(phase=phase)
    assert {name: page.ours("phase", phase=name) for name in PHASES} == {name: float(name == phase) for name in PHASES}


def test_two_children_of_one_slot_are_one_series(page: Page) -> None:
    page.now = a_snapshot(
        children=(
            a_child(slot=1, state="stopping", pss_bytes=100, uss_bytes=10),
            a_child(slot=1, state="starting", pss_bytes=50, uss_bytes=None),
            a_child(slot=2),
        )
    )
    assert page.ours("child_pss_bytes", slot="1") == 150
    assert page.ours("child_uss_bytes", slot="1") == 10
    assert page.ours("child_pss_bytes", slot="2") is None
    page.families()  # the parser refuses series that come twice


def busy_page() -> Page:
    page = Page(["emails", "reports"])
    page.now = a_snapshot(children=(a_child(pss_bytes=1, uss_bytes=1),), heartbeat_age_s=1.0)
    page.emit(
        completed(),
        failed("reports"),
        completed("odd"),
        some(happened.ApiRequestFinished, operation="claim", status="200"),
    )
    return page


def test_names_and_help_follow_the_conventions() -> None:
    for family in busy_page().families():
        assert re.fullmatch(r"(worker|spooled_supervisor|process)_[a-z0-9_]+", family.name), family.name
        assert not re.search(r"_(ms|minutes|percent|kb|mb)$|_total$", family.name), family.name
        assert re.fullmatch(r"[A-Z].*\.", family.documentation), family.name
        assert family.samples, family.name


PROMISED = """
    worker_jobs_processed worker_jobs_in_progress worker_job_processing_seconds children child_restarts child_kills
    child_boot_seconds lease_renewals leases_held leases_lost lease_renewal_lateness_seconds api_requests
    api_request_seconds claims claims_empty claimed_jobs job_wait_seconds outbox_depth outbox_age_seconds unsettled
    reloads child_metrics_dropped
    heartbeat_age_seconds job_cpu_seconds orphans_killed log_lines_dropped loop_lag_seconds child_pss_bytes
    child_uss_bytes build phase
"""


def test_the_page_has_every_metric_that_is_promised() -> None:
    names = {family.name for family in busy_page().families()}
    assert {name if name.startswith("worker_") else f"spooled_supervisor_{name}" for name in PROMISED.split()} <= names
    assert "process_resident_memory_bytes" in names


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version=0.0.4"),
        ("*/*", "text/plain; version=0.0.4"),
        ("text/plain;version=0.0.4;q=0.5", "text/plain; version=0.0.4"),
        (f"{OPENMETRICS},text/plain;q=0.5", "application/openmetrics-text; version=1.0.0"),
        ("text/plain;version=1..", "text/plain; version=0.0.4"),
        (";;;=,,", "text/plain; version=0.0.4"),
    ],
)
def test_the_format_is_negotiated_and_nonsense_means_text(page: Page, accept: str, content_type: str) -> None:
    body, shown = page.metrics.render(accept)
    assert shown.startswith(content_type)
    assert b"worker_jobs_processed_total" in body


def test_a_version_that_is_none_gets_some_page(page: Page) -> None:
    body, _ = page.metrics.render("application/openmetrics-text;version=nonsense")
    assert b"worker_jobs_processed_total" in body


def test_the_build_is_told(page: Page) -> None:
    (build,) = [family for family in page.families() if family.name == "spooled_supervisor_build"]
    assert build.samples[0].labels["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert build.samples[0].labels["version"]


def test_nothing_is_registered_globally(page: Page) -> None:
    assert REGISTRY.get_sample_value("spooled_supervisor_leases_lost_total") is None
    assert page.metrics.registry is not REGISTRY


def test_two_supervisors_may_live_in_one_process_but_not_in_one_registry() -> None:
    one, two = Page(), Page()
    one.emit(completed())
    assert two.value("worker_jobs_processed_total", queue="emails", status="completed") == 0
    registry = CollectorRegistry()
    Metrics(Events(), a_snapshot, registry)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        Metrics(Events(), a_snapshot, registry)


def test_a_registry_of_the_callers_gets_our_families_and_no_process_figures() -> None:
    registry = CollectorRegistry()
    Metrics(Events(), a_snapshot, registry)
    assert registry.get_sample_value("spooled_supervisor_leases_lost_total") == 0
    assert registry.get_sample_value("process_open_fds") is None


def test_a_series_counts_what_it_is_told() -> None:
    counter = Counter("things_total", "Things.", "kind")
    counter.add(2, "a")
    counter.add(0.5, "a")
    counter.declare("a")
    counter.declare("b")
    assert {s.labels["kind"]: s.value for s in counter.family().samples} == {"a": 2.5, "b": 0.0}


COUNT_IN_A_FRESH_PROCESS = """
import sys
if "imported before" in sys.argv:
    import prometheus_client
from spooled_supervisor.events import Events, JobCompleted
from spooled_supervisor.telemetry.metrics import Metrics
from spooled_supervisor.telemetry.snapshot import Snapshot
snapshot = Snapshot("running", "w", 1.0, 1.0, True, False, (), (), (), (), 0, 0, 0, 0, 0.0, True, None, 1, 1)
events = Events()
metrics = Metrics(events, lambda: snapshot)
metrics.declare_queues(["q"])
events.emit(JobCompleted(job_id="job", queue_name="q", slot=0, duration_s=1.0, result_bytes=1))
sys.stdout.buffer.write(metrics.render("")[0])
"""


@pytest.mark.parametrize("order", ["imported after", "imported before"])
@pytest.mark.parametrize("variable", ["PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"])
def test_an_inherited_multiprocess_directory_changes_nothing(variable: str, order: str, tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "not there"):
        page = subprocess.run(
            [sys.executable, "-W", "error", "-c", COUNT_IN_A_FRESH_PROCESS, order],
            env={**os.environ, variable: str(directory)},
            capture_output=True,
            check=True,
        )
        assert b'worker_jobs_processed_total{queue="q",status="completed"} 1.0\n' in page.stdout
        assert page.stderr == b""
        assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (package prometheus) is not installed")
def test_promtool_finds_nothing_to_complain_about() -> None:
    page = busy_page().metrics.render("")[0]
    checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
