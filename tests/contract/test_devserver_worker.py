"""Worker registrations, in both dialects."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.devserver import LocalServer, local_server

OLDER = {"id": "w-1", "queue_names": ["emails", "reports"], "max_concurrent_jobs": 7, "hostname": "h.example.com"}
NEWER = {"worker_id": "w-1", "queue_name": "emails", "max_concurrency": 7, "hostname": "h.example.com"}


@pytest.fixture
def server() -> Iterator[LocalServer]:
    with local_server() as server:
        yield server


def register(server: LocalServer, **changes: Any) -> dict[str, Any]:
    return dict(server.ok("POST", "/workers/register", {**NEWER, **changes}))


def test_the_older_dialect_registers_several_queues(server: LocalServer) -> None:
    response = server.api("POST", "/workers/register", OLDER)
    assert response.status_code == 201
    assert response.json() == {
        "id": "w-1",
        "worker_id": "w-1",
        "queue_name": "emails",
        "queue_names": ["emails", "reports"],
        "status": "healthy",
        "registered_at": "2023-11-14T22:13:20.000000+00:00",
        "lease_duration_secs": 30,
        "heartbeat_interval_secs": 10,
        "heartbeat_interval_seconds": 10,
    }


def test_the_newer_dialect_registers_one_queue(server: LocalServer) -> None:
    answer = register(server, worker_type="python", version="1.2", metadata={"zone": "a"})
    assert (answer["id"], answer["queue_names"]) == ("w-1", ["emails"])
    worker = server.ok("GET", "/workers/w-1")
    assert (
        worker.items()
        >= {
            "id": "w-1",
            "status": "healthy",
            "queue_name": "emails",
            "hostname": "h.example.com",
            "max_concurrency": 7,
            "worker_type": "python",
            "version": "1.2",
            "metadata": {"zone": "a"},
            "current_jobs": 0,
            "jobs_processed": 0,
            "jobs_failed": 0,
        }.items()
    )


def test_a_body_of_both_dialects_is_accepted_by_the_strict_server() -> None:
    with local_server(strict=True) as server:
        assert server.ok("POST", "/workers/register", {**OLDER, **NEWER})["queue_names"] == ["emails", "reports"]


def test_a_worker_without_an_id_is_given_one(server: LocalServer) -> None:
    answer = server.ok("POST", "/workers/register", {"queue_name": "q", "hostname": "h"})
    assert uuid.UUID(answer["id"]).version == 4


def test_an_id_in_camel_case_is_read_too(server: LocalServer) -> None:
    assert server.ok("POST", "/workers/register", {"queue_name": "q", "workerId": "cc"})["id"] == "cc"


def test_the_hostname_may_be_left_out_unless_the_server_is_strict(server: LocalServer) -> None:
    assert server.api("POST", "/workers/register", {"queue_name": "q"}).status_code == 201
    with local_server(strict=True) as strict:
        response = strict.api("POST", "/workers/register", {"queue_names": ["q"]})
        assert response.status_code == 422
        assert {detail["field"] for detail in response.json()["details"]} == {"queue_name", "hostname"}


def test_a_worker_of_no_queue_is_refused(server: LocalServer) -> None:
    assert server.api("POST", "/workers/register", {"hostname": "h"}).status_code == 422
    assert server.api("POST", "/workers/register", {"hostname": "h", "queue_names": []}).status_code == 400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("worker_id", "w" * 129),
        ("worker_id", "with space"),
        ("queue_name", ""),
        ("queue_name", "q" * 101),
        ("queue_name", "a/b"),
        ("hostname", "-h"),
        ("hostname", "h."),
        ("hostname", "h" * 256),
        ("max_concurrency", 0),
        ("max_concurrency", 101),
        ("worker_type", "t" * 51),
        ("version", "v" * 51),
        ("metadata", {"x": "y" * 65536}),
        ("queue_names", ["ok", "not ok"]),
    ],
)
def test_a_registration_that_breaks_a_rule_names_the_field(server: LocalServer, field: str, value: Any) -> None:
    response = server.api("POST", "/workers/register", {**NEWER, field: value})
    assert (response.status_code, response.json()["code"]) == (400, "VALIDATION_ERROR")
    assert response.json()["details"][0]["field"] == field


def test_registering_again_overwrites_and_heals(server: LocalServer) -> None:
    register(server)
    server.ok("POST", "/workers/w-1/heartbeat", {"current_jobs": 2, "status": "draining"})
    server.clock.advance(5)
    answer = register(server, queue_name="other", max_concurrency=9)
    assert (answer["status"], answer["registered_at"]) == ("healthy", "2023-11-14T22:13:20.000000+00:00")
    (worker,) = server.ok("GET", "/workers")
    assert (worker["queue_name"], worker["max_concurrency"]) == ("other", 9)


def test_a_heartbeat_is_acknowledged_and_seen(server: LocalServer) -> None:
    register(server)
    server.clock.advance(9)
    beat = {"status": "degraded", "current_jobs": 5, "cpu_percent": 45, "memory_percent": 60}
    answer = server.ok("POST", "/workers/w-1/heartbeat", beat)
    assert answer == {"acknowledged": True, "next_heartbeat_seconds": 10, "commands": []}
    worker = server.ok("GET", "/workers/w-1")
    assert (worker["status"], worker["current_jobs"]) == ("degraded", 5)
    assert worker["last_heartbeat"] == "2023-11-14T22:13:29.000000+00:00"


def test_a_heartbeat_without_a_status_means_healthy(server: LocalServer) -> None:
    register(server)
    server.ok("POST", "/workers/w-1/heartbeat", {"current_jobs": 0, "status": "draining"})
    server.ok("POST", "/workers/w-1/heartbeat", {"current_jobs": 0})
    assert server.ok("GET", "/workers/w-1")["status"] == "healthy"


def test_a_heartbeat_keeps_the_metadata_unless_it_brings_some(server: LocalServer) -> None:
    register(server, metadata={"a": 1})
    server.ok("POST", "/workers/w-1/heartbeat", {"current_jobs": 0})
    assert server.ok("GET", "/workers/w-1")["metadata"] == {"a": 1}
    server.ok("POST", "/workers/w-1/heartbeat", {"current_jobs": 0, "metadata": [2]})
    assert server.ok("GET", "/workers/w-1")["metadata"] == [2]


@pytest.mark.parametrize(
    ("beat", "status"),
    [
        ({}, 422),
        ({"current_jobs": "5"}, 422),
        ({"current_jobs": 1.5}, 422),
        ({"current_jobs": -1}, 400),
        ({"current_jobs": 1001}, 400),
        ({"current_jobs": 0, "status": "fine"}, 400),
    ],
)
def test_a_heartbeat_that_makes_no_sense_is_refused(server: LocalServer, beat: dict[str, Any], status: int) -> None:
    register(server)
    assert server.api("POST", "/workers/w-1/heartbeat", beat).status_code == status


@pytest.mark.parametrize("path", ["/workers/nobody/heartbeat", "/workers/nobody/deregister"])
def test_an_unknown_worker_is_not_found(server: LocalServer, path: str) -> None:
    assert server.api("POST", path, {"current_jobs": 0}).status_code == 404
    assert server.api("GET", "/workers/nobody").status_code == 404


def test_deregistering_takes_an_empty_body_and_may_be_repeated(server: LocalServer) -> None:
    register(server)
    for _ in range(2):
        response = server.api("POST", "/workers/w-1/deregister", content=b"")
        assert (response.status_code, response.content) == (204, b"")
    assert server.ok("GET", "/workers/w-1")["status"] == "offline"


def test_deregistering_leaves_running_jobs_to_their_leases(server: LocalServer) -> None:
    register(server)
    job = server.running_job(worker_id="w-1")
    server.api("POST", "/workers/w-1/deregister")
    server.services.sweeps.recover(server.clock())
    assert server.job(job["id"])["status"] == "processing"
    server.clock.advance(30)
    server.services.sweeps.recover(server.clock())
    assert server.job(job["id"])["status"] == "pending"


def test_workers_cannot_be_deleted(server: LocalServer) -> None:
    register(server)
    assert server.api("DELETE", "/workers/w-1").status_code == 405


def test_the_list_shows_the_latest_heartbeat_first(server: LocalServer) -> None:
    for name in ("a", "b", "c"):
        register(server, worker_id=name)
        server.clock.advance(1)
    server.ok("POST", "/workers/a/heartbeat", {"current_jobs": 1})
    assert [worker["id"] for worker in server.ok("GET", "/workers")] == ["a", "c", "b"]


def test_the_server_counts_what_a_worker_completed_and_failed(server: LocalServer) -> None:
    register(server)
    for ack, body in (("complete", {}), ("complete", {}), ("fail", {"error": "e"})):
        job = server.running_job(worker_id="w-1")
        server.ok("POST", f"/jobs/{job['id']}/{ack}", {"worker_id": "w-1", "lease_id": job["lease_id"], **body})
    worker = server.ok("GET", "/workers/w-1")
    assert (worker["jobs_processed"], worker["jobs_failed"]) == (2, 1)


def test_the_heartbeat_interval_can_be_set() -> None:
    with local_server(heartbeat_interval_s=2) as server:
        assert register(server)["heartbeat_interval_secs"] == 2
        assert server.ok("POST", "/workers/w-1/heartbeat", {"current_jobs": 0})["next_heartbeat_seconds"] == 2
