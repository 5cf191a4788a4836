"""A real Prometheus scrapes the daemon: what it has seen agrees with the daemon's own log, and its alerts come and go.

The rules are those that are shipped; only the minutes for which an alert must be true are made seconds.
"""

from __future__ import annotations

import contextlib
import datetime
import http.client
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spooled_supervisor.telemetry.metrics import JOB_BOUNDS_S
from tests.e2e.conftest import Site
from tests.support.daemon import REPOSITORY, Daemon, wait_until
from tests.support.devserver import DevServer, Producer

SCRAPE_INTERVAL_S = 0.5
SLOW_SCRAPE_S = 0.25
PAGE = 1024.0

pytestmark = pytest.mark.timeout(120)


# --- the server ----------------------------------------------------------------------------------------------------


@dataclass
class Prometheus:
    """A running server. `query` gives what it holds now, `wait_for` waits until it holds something."""

    port: int

    def get(self, path: str, **parameters: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10.0)
        with contextlib.closing(connection):
            connection.request("GET", f"/api/v1/{path}?{urllib.parse.urlencode(parameters)}")
            answer = json.loads(connection.getresponse().read())
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, text: str, **parameters: str) -> list[dict[str, Any]]:
        """Samples: labels as `metric`, and the value as a number."""
        found = self.get("query", query=text, **parameters)["result"]
        return [{**sample, "value": float(sample["value"][1])} for sample in found]

    def value(self, text: str, **parameters: str) -> float:
        """Of a query with one sample."""
        (sample,) = self.query(text, **parameters)
        return float(sample["value"])

    def wait_for(self, text: str, timeout_s: float = 30.0) -> list[dict[str, Any]]:
        """Until the query has a sample."""
        return list(wait_until(lambda: self.query(text), f"{text} in Prometheus", timeout_s))

    def is_up(self) -> bool:
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1.0)
            with contextlib.closing(connection):
                connection.request("GET", "/-/ready")
                return connection.getresponse().status == 200
        return False


@contextlib.contextmanager
def prometheus(place: Path, target: int) -> Iterator[Prometheus]:
    """One that scrapes 127.0.0.1:`target`; where there is none, the test is skipped."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("there is no prometheus here (Debian: apt install prometheus)")
    rules = (REPOSITORY / "systemd" / "alert-rules.yml").read_text()
    (place / "rules.yml").write_text(re.sub(r"(?m)^(\s+for:) \d+[smh]$", r"\1 1s", rules))
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [
            {"job_name": "spooled-supervisor", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
        ],
    }
    (place / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    port = free_port()
    line = [program, f"--config.file={place}/prometheus.yml", f"--storage.tsdb.path={place}/data"]
    line += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (place / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            ["/usr/bin/setpriv", "--pdeathsig", "KILL", *line], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        server = Prometheus(port)
        wait_until(lambda: server.is_up() or process.poll() is not None, "Prometheus")
        assert process.poll() is None, (place / "prometheus.log").read_text()
        yield server
        process.terminate()
        assert process.wait(20.0) == 0
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


CPUS = len(os.sched_getaffinity(0))
PROCS = 2 * CPUS
BUSY_S = 4.0


@dataclass
class Scene:
    """A daemon with more children than there are processors, and a Prometheus that scrapes it."""

    worker: Daemon
    prometheus: Prometheus
    site: Site

    @property
    def queue(self) -> str:
        return f'queue="{self.site.prefix}q"'


@pytest.fixture(scope="module")
def stage(server: DevServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    place = tmp_path_factory.mktemp("prometheus")
    site = Site(server, server.client, place)
    starting = site.worker(procs=PROCS, options=["--log-level", "info"])
    with starting as worker, prometheus(place, worker.http_port) as running:
        running.wait_for('up{job="spooled-supervisor"} == 1')
        yield Scene(worker, running, site)


@pytest.fixture
def scene(stage: Scene, server: DevServer, client: Producer, tmp_path: Path) -> Scene:
    """With a connection to the service that ends with the test."""
    site = Site(server, client, tmp_path)
    site.prefix = stage.site.prefix
    return Scene(stage.worker, stage.prometheus, site)


def logged_at(event: dict[str, Any]) -> float:
    return datetime.datetime.fromisoformat(event["ts"].replace("Z", "+00:00")).timestamp()


# --- what it has seen ----------------------------------------------------------------------------------------------


def test_target_is_up_and_every_rule_is_well(scene: Scene) -> None:
    assert scene.prometheus.value("up") == 1.0
    (target,) = scene.prometheus.get("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    rules = [rule for group in scene.prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) > 20
    wait_until(
        lambda: all(
            rule["health"] == "ok" for group in scene.prometheus.get("rules")["groups"] for rule in group["rules"]
        ),
        "every rule evaluated without an error",
    )


def test_counts_rates_and_quantiles_agree_with_the_log(scene: Scene) -> None:
    site, worker, prometheus = scene.site, scene.worker, scene.prometheus
    mark = worker.mark()
    began_at = time.time()
    jobs = [site.add("spin", seconds=(n % 10) * 0.02) for n in range(80)]
    jobs += [site.add("raise") for _ in range(10)]
    for job_id in jobs:
        site.end(job_id, timeout_s=60.0)
    completed = [event for event in worker.events("job_completed", after=mark) if event["job_id"] in jobs]
    failed = [event for event in worker.events("job_failed", after=mark) if event["job_id"] in jobs]
    assert (len(completed), len(failed)) == (80, 10)

    total = len(worker.events("job_completed")) + len(worker.events("job_failed"))
    prometheus.wait_for(f"sum(worker_jobs_processed_total{{{scene.queue}}}) == {total}")
    at = str(time.time())
    for status, name in (("completed", "job_completed"), ("failed", "job_failed")):
        seen = prometheus.value(f'worker_jobs_processed_total{{{scene.queue},status="{status}"}}', time=at)
        assert seen == len(worker.events(name)), status

    # The rate over the window in which all of it happened, against the log's count. Prometheus extrapolates to the
    # window's edges by at most half an interval, and sees counters at its scrapes only.
    window_s = math.ceil(float(at) - began_at) + 2
    rate = prometheus.value(f"sum(rate(worker_jobs_processed_total{{{scene.queue}}}[{window_s}s]))", time=at)
    inside = [event for event in (*completed, *failed) if logged_at(event) > float(at) - window_s]
    assert rate * window_s == pytest.approx(len(inside), rel=0.25)

    durations = sorted(
        event["duration_s"]
        for name in ("job_completed", "job_failed")
        for event in worker.events(name)
        if event["duration_s"] is not None
    )
    count = prometheus.value(f"worker_job_processing_seconds_count{{{scene.queue}}}", time=at)
    spent = prometheus.value(f"worker_job_processing_seconds_sum{{{scene.queue}}}", time=at)
    assert count == len(durations)
    assert spent == pytest.approx(sum(durations), rel=0.01)
    for share in (0.5, 0.9, 0.99):
        bucket = f"sum by (le) (worker_job_processing_seconds_bucket{{{scene.queue}}})"
        estimate = prometheus.value(f"histogram_quantile({share}, {bucket})", time=at)
        exact = durations[math.ceil(share * len(durations)) - 1]
        low, high = bucket_of(exact)
        assert low <= estimate <= high, f"{share}: {estimate} for {exact}"


def bucket_of(value: float) -> tuple[float, float]:
    bounds = (0.0, *JOB_BOUNDS_S)
    return next((low, high) for low, high in itertools.pairwise(bounds) if value <= high)


def test_alert_fires_while_it_is_true_and_resolves_after(scene: Scene) -> None:
    firing = 'ALERTS{alertname="SpooledSupervisorQuiet",alertstate="firing"}'
    others = 'ALERTS{alertstate="firing",alertname!="SpooledSupervisorQuiet"}'
    assert scene.prometheus.query(firing) == []
    scene.worker.signal(signal.SIGTSTP)
    (sample,) = scene.prometheus.wait_for(firing)
    assert sample["metric"]["severity"] == "warning"
    assert sample["metric"]["instance"].endswith(str(scene.worker.http_port))
    scene.worker.signal(signal.SIGCONT)
    wait_until(lambda: not scene.prometheus.query(firing), "the alert resolved")
    assert {found["metric"]["alertname"] for found in scene.prometheus.query(others)} <= {"SpooledQueueFailing"}


def test_scrapes_are_fast_while_every_cpu_is_busy(scene: Scene) -> None:
    """Children stand back for the supervisor (nice, autogroup), and a page costs it little."""
    site, worker = scene.site, scene.worker
    jobs = [site.add("spin", seconds=BUSY_S + 2) for _ in range(PROCS)]
    for job_id in jobs:
        worker.ledger.wait_for("start", job=job_id)
    times: list[float] = []
    end = time.monotonic() + BUSY_S
    while (began := time.monotonic()) < end:
        status, page = worker.get("/metrics")
        times.append(time.monotonic() - began)
        assert status == 200
        assert page.endswith("\n")
    assert worker.health()[1]["current_jobs"] == PROCS, "they were busy all the time"
    p50, p95 = statistics.median(times), statistics.quantiles(times, n=20)[-1]
    by_prometheus = scene.prometheus.value("quantile_over_time(0.95, scrape_duration_seconds[3s])")
    sys.stdout.write(
        f"{PROCS} busy children on {CPUS} CPUs, {len(times)} scrapes: "
        f"a page takes {p50 * 1000:.1f} ms (p50), {p95 * 1000:.1f} ms (p95), "
        f"by Prometheus {by_prometheus * 1000:.1f} ms (p95)\n"
    )
    assert p95 < SLOW_SCRAPE_S
    assert by_prometheus < SLOW_SCRAPE_S
    for job_id in jobs:
        site.end(job_id, timeout_s=40.0)


def test_a_thousand_scrapes_leak_nothing(scene: Scene) -> None:
    worker = scene.worker

    def rss_kib() -> float:
        pages = int(Path(f"/proc/{worker.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / PAGE

    def scrape(count: int) -> None:
        accepts = ("text/plain", "application/openmetrics-text;version=1.0.0")
        for n in range(count // 2):
            connection = http.client.HTTPConnection("127.0.0.1", worker.http_port, timeout=10.0)
            with contextlib.closing(connection):
                for _ in range(2):
                    connection.request("GET", "/metrics", headers={"Accept": accepts[n % 2]})
                    response = connection.getresponse()
                    assert response.status == 200
                    response.read()

    scrape(100)
    wait_until(lambda: worker.fd_count() == fds_at_rest(worker), "all connections closed")
    fds, memory = worker.fd_count(), rss_kib()
    scrape(1000)
    wait_until(lambda: worker.fd_count() <= fds, "as many descriptors as before")
    grown = rss_kib() - memory
    sys.stdout.write(f"1000 scrapes: {grown:+.0f} KiB\n")
    assert grown < 1024


def fds_at_rest(worker: Daemon) -> int:
    """The least of a few looks: Prometheus has a connection of its own, kept open."""
    return min(worker.fd_count() for _ in range(20))


def test_target_that_is_gone_is_down_and_fires(site: Site, tmp_path: Path) -> None:
    with site.worker() as worker, prometheus(tmp_path, worker.http_port) as running:
        running.wait_for("up == 1")
        assert worker.stop() == 0
        running.wait_for("up == 0")
        (sample,) = running.wait_for('ALERTS{alertname="SpooledSupervisorDown",alertstate="firing"}')
        assert sample["metric"]["severity"] == "critical"
