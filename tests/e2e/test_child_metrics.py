"""Handlers' own prometheus_client metrics on the supervisor's page, with real children that come, go and are killed."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon, daemon, wait_until
from tests.support.devserver import DevServer, Producer

pytestmark = pytest.mark.timeout(120)


def run(client: Producer, payloads: list[dict[str, Any]], status: str = "completed", **fields: Any) -> None:
    """Make these jobs and see them end."""
    for job_id in [client.create("count", payload, **fields) for payload in payloads]:
        client.wait_for(job_id, status, timeout_s=20)


def wait_for_value(worker: Daemon, name: str, value: float) -> dict[str, float]:
    """The page, once it shows this."""
    wait_until(lambda: worker.metrics().get(name) == value, f"{name} {value}")
    return worker.metrics()


def test_what_handlers_count_is_on_the_page_and_goes_on_when_children_are_replaced(
    server: DevServer, client: Producer, tmp_path: Path
) -> None:
    files = tmp_path / "multiproc"
    files.mkdir()
    env = {"PROMETHEUS_MULTIPROC_DIR": str(files), "prometheus_multiproc_dir": str(files)}
    with daemon("counted", url=server.url, api_key=server.api_key, procs=2, env=env) as worker:
        worker.wait_until_running()
        page = wait_for_value(worker, "app_children_started_total", 2)
        assert page['app_pages_total{kind="a4"}'] == 0  # known before the first page, and not a thousand
        assert page["app_imports_total"] == 0
        assert page['app_model_info{version="3"}'] == 1
        run(client, [{"n": 2}] * 10)
        page = wait_for_value(worker, 'app_pages_total{kind="a4"}', 20)
        assert page["app_render_seconds_count"] == page['app_render_seconds_bucket{le="1.0"}'] == 20
        assert page['app_render_seconds_bucket{le="0.1"}'] == 0
        assert page["app_render_seconds_sum"] == 10
        assert (page["app_page_bytes_count"], page["app_page_bytes_sum"]) == (20, 2000)
        slots = {0, 1}
        assert {page[f'app_cache_entries{{slot="{slot}"}}'] for slot in slots} <= {0, 7}
        assert {page[f'app_engine{{app_engine="warm",slot="{slot}"}}'] for slot in slots} <= {0, 1}
        for round_ in range(1, 4):  # killed at leisure: nothing that was told is lost
            for child in worker.children():
                os.kill(child, signal.SIGKILL)
            worker.wait_for_event("child_ready", count=2 + 2 * round_)
            run(client, [{}])
            page = wait_for_value(worker, 'app_pages_total{kind="a4"}', 20 + round_)
        assert page["app_children_started_total"] == 8
        assert sum(name.startswith("app_cache_entries") for name in page) == 2
        assert all(entry["multiproc"] == [] for entry in worker.ledger.entries("environment"))
        assert list(files.iterdir()) == []


def test_a_gauge_vanishes_with_its_slot(server: DevServer, client: Producer) -> None:
    with daemon("counted", url=server.url, api_key=server.api_key, procs=2) as worker:
        worker.wait_until_running()

        def gauges() -> set[str]:
            return {name for name in worker.metrics() if name.startswith("app_cache_entries")}

        both = {'app_cache_entries{slot="0"}', 'app_cache_entries{slot="1"}'}
        wait_until(lambda: gauges() == both, "the gauges of both children")
        worker.signal(signal.SIGTTOU)
        wait_until(lambda: gauges() == {'app_cache_entries{slot="0"}'}, "one gauge less")


def test_a_child_that_leaves_in_peace_has_told_everything(server: DevServer, client: Producer) -> None:
    options = ["--max-jobs-per-child", "1"]
    with daemon("counted", url=server.url, api_key=server.api_key, procs=1, options=options) as worker:
        run(client, [{"n": 3}] * 4)
        page = wait_for_value(worker, 'app_pages_total{kind="a4"}', 12)
        assert page["app_render_seconds_count"] == 12


def test_a_child_that_dies_loses_its_job_s_counts_and_no_more(server: DevServer, client: Producer) -> None:
    with daemon("counted", url=server.url, api_key=server.api_key, procs=1) as worker:
        worker.wait_until_running()
        run(client, [{"n": 5}])
        wait_for_value(worker, 'app_pages_total{kind="a4"}', 5)
        client.create("count", {"n": 100, "then": "die"}, max_retries=0)
        worker.wait_for_event("child_ready", count=2)
        run(client, [{"n": 1}])
        wait_for_value(worker, 'app_pages_total{kind="a4"}', 6)


def test_a_long_job_shows_its_counts_while_it_tells_its_progress(server: DevServer, client: Producer) -> None:
    options = ["--abort-grace", "5", "--shutdown-timeout", "5"]
    with daemon("counted", url=server.url, api_key=server.api_key, procs=1, options=options) as worker:
        worker.wait_until_running()
        client.create("count", {"n": 1, "then": "progress"}, max_retries=0)

        def counts() -> float:
            return worker.metrics().get('app_pages_total{kind="a3"}', 0)

        first = wait_until(counts, "counts of a running job")
        wait_until(lambda: counts() > first, "more of them")
        assert worker.status()["children"][0]["state"] == "busy"


def test_nonsense_costs_the_page_nothing_else(server: DevServer, client: Producer) -> None:
    with daemon("counted", url=server.url, api_key=server.api_key, procs=1) as worker:
        worker.wait_until_running()
        dropped = 'spooled_supervisor_child_metrics_dropped_total{{reason="{}"}}'.format
        client.create("junk", "names", max_retries=0)
        wait_for_value(worker, dropped("collision"), 2)
        client.create("junk", "series", max_retries=0)
        wait_until(lambda: worker.metrics()[dropped("child")] > 400, "series that are left out")
        page = worker.metrics()
        assert 900 < sum(name.startswith("app_") for name in page) <= 1010
        assert page["spooled_supervisor_ready"] == 1
        assert "up" not in page
        assert math.isnan(page['app_cache_entries{slot="0"}'])
        if shutil.which("promtool"):
            _, text = worker.get("/metrics")
            checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
            assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
