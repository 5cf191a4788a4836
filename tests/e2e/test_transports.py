"""What is special about the gRPC transports: what only they can say, and what only they can break.

What a daemon promises over each transport is in the files that are marked EVERY_TRANSPORT.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spooled_supervisor.streaming import PUSHED_LEASE_S
from tests.e2e.conftest import SERVER, Site
from tests.support.daemon import Daemon, wait_until
from tests.support.devserver import DevServer, Producer, dev_server
from tests.support.relay import Relay
from tests.support.transports import PROCESS, REST_ONLY, STREAM

pytestmark = pytest.mark.transports(STREAM, PROCESS)
ON_STREAMS = pytest.mark.transports(STREAM)


@contextlib.contextmanager
def site_of(server: DevServer, tmp_path: Path, transport: str) -> Iterator[Site]:
    with Producer(server.url, server.api_key) as client:
        yield Site(server, client, tmp_path, transport)


# --- jobs -------------------------------------------------------------------------------------------------------------


def test_a_failure_for_good_is_not_run_again(site: Site) -> None:
    with site.worker():
        job = site.run("raise_odd", what="non-retryable", max_retries=3)
        assert job["status"] == "deadletter"
        assert site.events(job["id"]) == ["created", "claimed", "failed"]


def test_several_queues_are_served(site: Site) -> None:
    with site.worker(queues=("q", "q2", "q3")):
        for queue in ("q", "q2", "q3", "q"):
            site.result("ok", queue=queue)


@ON_STREAMS
def test_an_idle_daemon_starts_a_job_at_once(site: Site) -> None:
    """Pushed, not polled for."""
    options = ["--poll-interval", "30", "--no-events"]
    with site.worker(options=options) as worker:
        worker.wait_until_running()
        time.sleep(0.5)
        began = time.monotonic()
        site.result("ok")
        assert time.monotonic() - began < 5.0


def test_the_worker_is_registered_beats_and_leaves(site: Site) -> None:
    with site.worker() as worker:
        worker_id = worker.wait_for_event("worker_registered")["worker_id"]
        worker.wait_for_event("heartbeat_sent")
        seen = site.client.call("GET", f"/workers/{worker_id}")
        assert seen["status"] == "healthy"
        assert "cpu_percent" in seen["metadata"], "gRPC has no field for it"
        assert worker.stop() == 0
        assert site.client.call("GET", f"/workers/{worker_id}")["status"] == "offline"


def test_only_the_supervisor_has_loaded_grpc(site: Site) -> None:
    with site.worker() as worker:
        worker.wait_until_running()
        site.result("ok")
        maps = {
            pid: Path(f"/proc/{pid}/maps").read_text() for pid in (worker.pid, worker.fork_server, *worker.children())
        }
        assert [pid for pid, text in maps.items() if "cygrpc" in text] == [worker.pid]


# --- closing streams --------------------------------------------------------------------------------------------------


@ON_STREAMS
def test_nothing_of_a_backlog_is_lost_however_often_claiming_ends_and_begins(site: Site) -> None:
    """No job may be run a second time, so one that was lost would be a dead letter."""
    with site.worker(procs=4) as worker:
        worker.wait_until_running()
        jobs = site.client.bulk(site.prefix + "q", [{"mode": "ok"}] * 100, default_max_retries=0)
        jobs += site.client.bulk(site.prefix + "q", [{"mode": "spin", "seconds": 0.05}] * 50, default_max_retries=0)
        site.end(jobs[20])
        for n in range(8):
            worker.signal(signal.SIGTSTP)
            worker.wait_for_event("quieted", count=n + 1)
            worker.signal(signal.SIGCONT)
            worker.wait_for_event("resumed", count=n + 1)
            worker.signal(signal.SIGTTOU if n % 2 == 0 else signal.SIGTTIN)
            worker.wait_for_event("scaled", count=n + 1)
        for job_id in jobs:
            job = site.end(job_id)
            assert job["status"] == "completed", (job["last_error"], worker.tail())
        assert {tuple(site.events(job_id)) for job_id in jobs} == {("created", "claimed", "completed")}


@ON_STREAMS
def test_a_job_on_the_wire_when_claiming_ends_is_run_later_and_has_lost_an_attempt(site: Site) -> None:
    """This much no client can help: see `streaming.py`."""
    with Relay(int(site.server.grpc_address.rpartition(":")[2])) as relay:
        options = ["--grpc-address", relay.address, "--lease-duration", "30"]
        with site.worker(procs=1, options=options) as worker:
            worker.wait_until_running()
            site.result("ok")
            time.sleep(1.0)  # the stream has nothing to expect for long
            relay.hold()
            job_id = site.add("ok", max_retries=1)
            wait_until(lambda: "claimed" in site.events(job_id), "it is leased and pushed")
            worker.signal(signal.SIGTSTP)
            worker.wait_for_event("quieted")
            relay.release()
            leased_at = time.monotonic()
            worker.signal(signal.SIGCONT)
            assert site.end(job_id)["status"] == "completed"
            assert time.monotonic() - leased_at < PUSHED_LEASE_S + 5.0, "not for as long as --lease-duration"
            assert site.events(job_id) == ["created", "claimed", "lease_expired", "claimed", "completed"]
            assert worker.ledger.runs(job_id) == 1


# --- stopping ---------------------------------------------------------------------------------------------------------


def test_the_service_may_ask_for_a_drain(transport: str, tmp_path: Path) -> None:
    with (
        dev_server(grpc_port=0, heartbeat_interval_s=1, **SERVER) as own,
        site_of(own, tmp_path, transport) as site,
        site.worker() as worker,
    ):
        worker_id = worker.wait_for_event("worker_registered")["worker_id"]
        body = {"status": "draining", "current_jobs": 0}
        site.client.call("POST", f"/workers/{worker_id}/heartbeat", body)
        assert worker.wait() == 0
        assert worker.events("command_received", source="service", command="drain")


# --- breaks -----------------------------------------------------------------------------------------------------------


def test_it_goes_on_after_the_server_was_away(transport: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"db": tmp_path / "jobs.sqlite3", **SERVER}
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(dev_server(grpc_port=0, **options))
        options |= {"port": first.port, "grpc_port": first.grpc_address.rpartition(":")[2]}
        site = stack.enter_context(site_of(first, tmp_path, transport))
        worker: Daemon = stack.enter_context(site.worker())
        worker.wait_until_running()
        site.result("ok")
        running = site.add("gate", file=str(tmp_path / "gate"))
        worker.ledger.wait_for("start", job=running)
        first.kill()
        worker.wait_for_event("api_troubled")
        (tmp_path / "gate").touch()  # its result finds nobody
        worker.wait_for_event("job_completed", job_id=running)
        second = stack.enter_context(dev_server(**options))
        with Producer(second.url, second.api_key) as client:
            site.client.http.close()
            site.client = client
            assert site.end(running)["status"] == "completed"
            for _ in range(3):
                site.result("ok")
            assert {worker.ledger.runs(running)} == {1}
            assert worker.stop() == 0


@ON_STREAMS
def test_an_eager_server_has_its_jobs_run_too(transport: str, tmp_path: Path) -> None:
    """Older servers push jobs before they are asked for."""
    with (
        dev_server(grpc_port=0, eager_streams=True, **SERVER) as eager,
        site_of(eager, tmp_path, transport) as site,
        site.worker() as worker,
    ):
        ids = site.client.bulk(site.prefix + "q", [{"mode": "ok", "n": n} for n in range(50)])
        for job_id in ids:
            assert site.end(job_id)["status"] == "completed"
        assert {worker.ledger.runs(job_id) for job_id in ids} == {1}


@ON_STREAMS
def test_jobs_that_an_eager_server_has_leased_too_early_come_again(transport: str, tmp_path: Path) -> None:
    """Their leases end before they are read: nothing of that may be run under them, and it must not go on so."""
    with (
        dev_server(grpc_port=0, eager_streams=True, **SERVER) as eager,
        site_of(eager, tmp_path, transport) as site,
        site.worker(procs=1, options=["--lease-duration", "5"]) as worker,
    ):
        ids = site.client.bulk(site.prefix + "q", [{"mode": "spin", "seconds": 1.0}] * 9, default_max_retries=3)
        for job_id in ids:
            assert site.end(job_id, timeout_s=40.0)["status"] == "completed"
        assert {worker.ledger.runs(job_id) for job_id in ids} == {1}
        assert worker.events("api_troubled", reason=lambda text: "ahead" in text)


# --- beside REST ------------------------------------------------------------------------------------------------------


@REST_ONLY
def test_a_failure_for_good_is_one_over_rest_too_where_there_is_a_grpc_address(site: Site) -> None:
    options = ["--grpc-address", site.server.grpc_address]
    with site.worker(options=options):
        job = site.run("raise_odd", what="non-retryable", max_retries=3)
        assert job["status"] == "deadletter"
        assert site.events(job["id"]) == ["created", "claimed", "failed"]
        retried = site.run("raise", max_retries=1)
        assert site.events(retried["id"]).count("claimed") == 2


@REST_ONLY
def test_a_failure_for_good_is_reported_by_rest_when_grpc_is_out_of_reach(site: Site) -> None:
    with site.worker(options=["--grpc-address", "127.0.0.1:9"]):
        job = site.run("raise_odd", what="non-retryable", max_retries=1)
        assert "never again" in job["last_error"]
        assert job["status"] == "deadletter"
