"""What a daemon promises, over each of the gRPC transports: the central cases of the other files, and breaks of theirs.

All others of this directory run over another transport with E2E_TRANSPORT=grpc-stream or grpc-process.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import SERVER, Site
from tests.support.daemon import Daemon
from tests.support.devserver import DevServer, Producer, dev_server

TRANSPORTS = ("grpc-stream", "grpc-process")


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.contextmanager
def site_of(server: DevServer, tmp_path: Path) -> Iterator[Site]:
    with Producer(server.url, server.api_key) as client:
        yield Site(server, client, tmp_path)


# --- jobs -------------------------------------------------------------------------------------------------------------


def test_jobs_of_all_kinds_end_as_they_should(site: Site, transport: str) -> None:
    with site.worker(transport=transport) as worker:
        assert site.result("ok", n=7)["n"] == 7
        for value in ({"a": [1, 2.5, None, {"b": True}]}, [1, "two"], "text", None, 2**60):
            job = site.run("echo", value=value)
            assert job["status"] == "completed", job["last_error"]
            # A payload comes through gRPC, where 2**60 is a double; a result that is no object goes out by REST.
            assert job["result"] == (float(2**60) if value == 2**60 else value)
        assert "as asked" in site.error("raise")
        assert "killed by SIGKILL" in site.error("kill_self")
        assert "limit of 1 s" in site.error("spin", fields={"timeout_seconds": 1})
        job = site.run("raise_odd", what="non-retryable", max_retries=3)
        assert job["status"] == "deadletter", "a failure for good is not run again"
        assert site.events(job["id"]) == ["created", "claimed", "failed"]
        retried = site.run("raise", max_retries=1)
        assert site.events(retried["id"]).count("claimed") == 2
        assert worker.ledger.runs(retried["id"]) == 2


def test_many_jobs_are_all_run_once(site: Site, transport: str) -> None:
    with site.worker(transport=transport) as worker:
        ids = site.client.bulk(site.prefix + "q", [{"mode": "ok", "n": n} for n in range(60)])
        for job_id in ids:
            assert site.end(job_id)["status"] == "completed"
        assert {worker.ledger.runs(job_id) for job_id in ids} == {1}
        assert {len(site.events(job_id)) for job_id in ids} == {3}


def test_several_queues_are_served(site: Site, transport: str) -> None:
    with site.worker(transport=transport, queues=("q", "q2", "q3")):
        for queue in ("q", "q2", "q3", "q"):
            site.result("ok", queue=queue)


def test_a_job_longer_than_its_lease_is_renewed(site: Site, transport: str) -> None:
    with site.worker(transport=transport, options=["--lease-duration", "5"]) as worker:
        job_id = site.add("spin", seconds=6.5)
        assert site.end(job_id)["result"] == "spun"
        assert worker.ledger.runs(job_id) == 1


def test_an_idle_daemon_starts_a_job_at_once(site: Site) -> None:
    """Pushed, not polled for."""
    options = ["--poll-interval", "30", "--no-events"]
    with site.worker(transport="grpc-stream", options=options) as worker:
        worker.wait_until_running()
        time.sleep(0.5)
        began = time.monotonic()
        site.result("ok")
        assert time.monotonic() - began < 5.0


def test_the_worker_is_registered_beats_and_leaves(site: Site, transport: str) -> None:
    with site.worker(transport=transport) as worker:
        worker_id = worker.wait_for_event("worker_registered")["worker_id"]
        worker.wait_for_event("heartbeat_sent")
        seen = site.client.call("GET", f"/workers/{worker_id}")
        assert seen["status"] == "healthy"
        assert "cpu_percent" in seen["metadata"], "gRPC has no field for it"
        assert worker.stop() == 0
        assert site.client.call("GET", f"/workers/{worker_id}")["status"] == "offline"


def test_only_the_supervisor_has_loaded_grpc(site: Site, transport: str) -> None:
    with site.worker(transport=transport) as worker:
        worker.wait_until_running()
        site.result("ok")
        maps = {
            pid: Path(f"/proc/{pid}/maps").read_text() for pid in (worker.pid, worker.fork_server, *worker.children())
        }
        assert [pid for pid, text in maps.items() if "cygrpc" in text] == [worker.pid]


# --- stopping ---------------------------------------------------------------------------------------------------------


def test_term_lets_running_jobs_finish_and_takes_no_more(site: Site, transport: str) -> None:
    with site.worker(transport=transport) as worker:
        jobs = [site.add("spin", seconds=1.0) for _ in range(2)]
        for job_id in jobs:
            worker.ledger.wait_for("start", job=job_id)
        worker.signal(signal.SIGTERM)
        worker.wait_for_event("phase_changed", phase="draining")
        late = [site.add("ok") for _ in range(4)]
        assert worker.wait() == 0
        assert [site.client.job(job_id)["status"] for job_id in jobs] == ["completed"] * 2
        assert [site.events(job_id) for job_id in late] == [["created"]] * 4
        assert worker.events("supervisor_stopped")[0]["unsettled"] == 0


def test_quit_kills_running_jobs_and_reports_them(site: Site, transport: str) -> None:
    with site.worker(transport=transport) as worker:
        job_id = site.add("spin")
        worker.ledger.wait_for("start", job=job_id)
        worker.signal(signal.SIGQUIT)
        assert worker.wait() == 0
        assert "Worker shutdown" in site.client.job(job_id)["last_error"]


def test_quiet_takes_nothing_until_it_is_over(site: Site, transport: str) -> None:
    with site.worker(transport=transport) as worker:
        worker.wait_until_running()
        site.result("ok")
        worker.signal(signal.SIGTSTP)
        worker.wait_for_event("quieted")
        time.sleep(1.0)  # streams are closed within this
        waiting = [site.add("ok") for _ in range(3)]
        time.sleep(0.5)
        assert [site.events(job_id) for job_id in waiting] == [["created"]] * 3
        worker.signal(signal.SIGCONT)
        for job_id in waiting:
            assert site.end(job_id)["status"] == "completed"


def test_the_service_may_ask_for_a_drain(transport: str, tmp_path: Path) -> None:
    with (
        dev_server(grpc_port=0, heartbeat_interval_s=1, **SERVER) as own,
        site_of(own, tmp_path) as site,
        site.worker(transport=transport) as worker,
    ):
        worker_id = worker.wait_for_event("worker_registered")["worker_id"]
        body = {"status": "draining", "current_jobs": 0}
        site.client.call("POST", f"/workers/{worker_id}/heartbeat", body)
        assert worker.wait() == 0
        assert worker.events("command_received", source="service", command="drain")


# --- breaks -----------------------------------------------------------------------------------------------------------


def test_a_killed_daemon_is_reported_by_the_next_one(site: Site, transport: str, tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    with site.worker(transport=transport, state_dir=state_dir) as worker:
        job_id = site.add("spin", seconds=2.0, max_retries=1)
        worker.ledger.wait_for("start", job=job_id)
        worker.kill()
    with site.worker(transport=transport, state_dir=state_dir) as worker:
        worker.wait_for_event("leftover_reported", job_id=job_id)
        assert site.end(job_id)["status"] == "completed"
        assert site.events(job_id) == ["created", "claimed", "failed", "claimed", "completed"]


def test_a_job_whose_lease_is_lost_is_told_and_not_reported(site: Site, transport: str) -> None:
    with site.worker(transport=transport, options=["--lease-duration", "5", "--heartbeat-fraction", "0.1"]) as worker:
        job_id = site.add("cooperative")
        worker.ledger.wait_for("start", job=job_id)
        site.client.call("DELETE", f"/queues/{site.prefix}q?delete_jobs=true")
        assert worker.ledger.wait_for("told", job=job_id)[0]["reason"] == "lease_lost"
        worker.wait_for_event("job_lease_lost", job_id=job_id)
        site.result("ok")
        assert not worker.events("outcome_settled", job_id=job_id)


def test_it_goes_on_after_the_server_was_away(transport: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"db": tmp_path / "jobs.sqlite3", **SERVER}
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(dev_server(grpc_port=0, **options))
        options |= {"port": first.port, "grpc_port": first.grpc_address.rpartition(":")[2]}
        site = stack.enter_context(site_of(first, tmp_path))
        worker: Daemon = stack.enter_context(site.worker(transport=transport))
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


def test_an_eager_server_has_its_jobs_run_too(tmp_path: Path) -> None:
    """Older servers push jobs before they are asked for."""
    with (
        dev_server(grpc_port=0, eager_streams=True, **SERVER) as eager,
        site_of(eager, tmp_path) as site,
        site.worker(transport="grpc-stream") as worker,
    ):
        ids = site.client.bulk(site.prefix + "q", [{"mode": "ok", "n": n} for n in range(50)])
        for job_id in ids:
            assert site.end(job_id)["status"] == "completed"
        assert {worker.ledger.runs(job_id) for job_id in ids} == {1}


def test_jobs_that_an_eager_server_has_leased_too_early_come_again(tmp_path: Path) -> None:
    """Their leases end before they are read: nothing of that may be run under them, and it must not go on so."""
    with (
        dev_server(grpc_port=0, eager_streams=True, **SERVER) as eager,
        site_of(eager, tmp_path) as site,
        site.worker(transport="grpc-stream", procs=1, options=["--lease-duration", "5"]) as worker,
    ):
        ids = site.client.bulk(site.prefix + "q", [{"mode": "spin", "seconds": 1.0}] * 9, default_max_retries=3)
        for job_id in ids:
            assert site.end(job_id, timeout_s=40.0)["status"] == "completed"
        assert {worker.ledger.runs(job_id) for job_id in ids} == {1}
        assert worker.events("api_troubled", reason=lambda text: "ahead" in text)


# --- beside REST ------------------------------------------------------------------------------------------------------


def test_a_failure_for_good_is_one_over_rest_too_where_there_is_a_grpc_address(site: Site) -> None:
    options = ["--grpc-address", site.server.grpc_address]
    with site.worker(transport="rest", options=options):
        job = site.run("raise_odd", what="non-retryable", max_retries=3)
        assert job["status"] == "deadletter"
        assert site.events(job["id"]) == ["created", "claimed", "failed"]
        retried = site.run("raise", max_retries=1)
        assert site.events(retried["id"]).count("claimed") == 2


def test_a_failure_for_good_is_reported_by_rest_when_grpc_is_out_of_reach(site: Site) -> None:
    with site.worker(transport="rest", options=["--grpc-address", "127.0.0.1:9"]):
        job = site.run("raise_odd", what="non-retryable", max_retries=1)
        assert "never again" in job["last_error"]
        assert job["status"] == "deadletter"
