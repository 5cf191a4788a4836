"""What the server does by itself: leases that expire, workers that fall silent, jobs that come due or go stale."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spooled_supervisor.devserver import history
from spooled_supervisor.devserver.database import DatabaseFault
from tests.support.devserver import LocalServer, dev_server, local_server

LEASE_S = 30


@pytest.fixture
def server() -> Iterator[LocalServer]:
    with local_server() as server:
        yield server


def sweep(server: LocalServer) -> None:
    server.services.sweeps.recover(server.clock())


def test_a_job_whose_lease_expired_is_pending_at_once(server: LocalServer) -> None:
    job = server.running_job()
    server.clock.advance(LEASE_S - 0.001)
    sweep(server)
    assert server.job(job["id"])["status"] == "processing"
    server.clock.advance(0.001)
    sweep(server)
    back = server.job(job["id"])
    assert (back["status"], back["retry_count"], back["last_error"]) == ("pending", 1, "Lease expired")
    assert (back["assigned_worker_id"], back["lease_id"], back["lease_expires_at"]) == (None, None, None)
    assert server.history(job["id"]) == ["created", "claimed", "lease_expired"]
    assert server.claim()[0]["retry_count"] == 1


def test_a_job_whose_last_lease_expired_is_dead(server: LocalServer) -> None:
    job = server.running_job(max_retries=1)
    for _ in range(2):
        server.clock.advance(LEASE_S)
        sweep(server)
        server.claim()
    dead = server.job(job["id"])
    assert (dead["status"], dead["retry_count"]) == ("deadletter", 1)
    assert [item["id"] for item in server.ok("GET", "/jobs/dlq")] == [job["id"]]


def test_a_silent_worker_is_degraded_and_then_offline(server: LocalServer) -> None:
    server.ok("POST", "/workers/register", {"id": "w", "queue_names": ["q"]})
    seen = []
    for _ in range(6):
        sweep(server)
        seen.append(server.ok("GET", "/workers/w")["status"])
        server.clock.advance(10)
    assert seen == ["healthy", "healthy", "degraded", "degraded", "degraded", "offline"]
    server.ok("POST", "/workers/w/heartbeat", {"current_jobs": 0})
    assert server.ok("GET", "/workers/w")["status"] == "healthy"


def test_a_worker_that_drains_is_not_called_degraded(server: LocalServer) -> None:
    server.ok("POST", "/workers/register", {"id": "w", "queue_names": ["q"]})
    server.ok("POST", "/workers/w/heartbeat", {"current_jobs": 0, "status": "draining"})
    server.clock.advance(20)
    sweep(server)
    assert server.ok("GET", "/workers/w")["status"] == "draining"


def test_an_offline_worker_loses_its_jobs_although_their_leases_live(server: LocalServer) -> None:
    server.ok("POST", "/workers/register", {"id": "w", "queue_names": ["q"]})
    server.create()
    (job,) = server.claim(lease_duration_secs=3600)
    server.clock.advance(50)
    sweep(server)
    assert server.job(job["id"])["status"] == "pending"
    assert server.job(job["id"])["retry_count"] == 1
    assert server.history(job["id"])[-1] == "worker_lost"


def test_a_worker_whose_jobs_could_not_be_taken_back_is_tried_again(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise DatabaseFault("database or disk is full")

    server.ok("POST", "/workers/register", {"id": "w", "queue_names": ["q"]})
    server.create()
    (job,) = server.claim(lease_duration_secs=3600)
    server.clock.advance(50)
    with monkeypatch.context() as full:
        full.setattr(history, "record", fail)
        with pytest.raises(DatabaseFault):
            sweep(server)
    assert server.job(job["id"])["status"] == "processing"
    sweep(server)
    assert server.job(job["id"])["status"] == "pending"
    assert server.ok("GET", "/workers/w")["status"] == "offline"


def test_a_worker_that_never_registered_loses_nothing_by_silence(server: LocalServer) -> None:
    server.create()
    (job,) = server.claim(lease_duration_secs=3600)
    server.clock.advance(500)
    sweep(server)
    assert server.job(job["id"])["status"] == "processing"


def test_due_jobs_turn_pending(server: LocalServer) -> None:
    job_id = server.create(scheduled_at="2023-11-14T22:13:25Z")
    server.clock.advance(4)
    server.services.leases.promote_due(server.clock())
    assert server.job(job_id)["status"] == "scheduled"
    server.clock.advance(1)
    server.services.leases.promote_due(server.clock())
    assert server.job(job_id)["status"] == "pending"


def test_expired_jobs_are_deleted_unless_they_run_or_are_done(server: LocalServer) -> None:
    expiry = {"expires_at": "2023-11-14T22:13:21Z"}
    running = server.running_job(**expiry)["id"]
    done = server.running_job(**expiry)["id"]
    server.ok("POST", f"/jobs/{done}/complete", {})
    waiting, unlimited = server.create(**expiry), server.create()
    server.clock.advance(1)
    server.services.sweeps.clean_up(server.clock())
    assert server.api("GET", f"/jobs/{waiting}").status_code == 404
    assert {server.job(job_id)["status"] for job_id in (running, done, unlimited)} == {
        "processing",
        "completed",
        "pending",
    }


def test_a_running_server_sweeps_by_itself() -> None:
    with dev_server(
        min_lease_s=1, lease_recovery_interval_s="50ms", scheduled_activation_s="50ms", retry_base_s=0.01
    ) as server:
        client = server.client
        job_id = client.create("q", max_retries=1)
        claim = {"queue_name": "q", "worker_id": "w", "lease_duration_secs": 1}
        (job,) = client.call("POST", "/jobs/claim", claim)["jobs"]
        assert client.wait_for(job_id, "pending")["last_error"] == "Lease expired"
        (job,) = client.call("POST", "/jobs/claim", claim)["jobs"]
        client.call("POST", f"/jobs/{job['id']}/fail", {"error": "boom"})
        assert [event["event_type"] for event in client.history(job_id)] == [
            "created",
            "claimed",
            "lease_expired",
            "claimed",
            "failed",
        ]
        client.wait_for(job_id, "deadletter")
