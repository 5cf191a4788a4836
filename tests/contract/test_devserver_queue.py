"""Queues for operators: settings, pause, figures, deletion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.devserver import LocalServer, local_server


@pytest.fixture
def server() -> Iterator[LocalServer]:
    with local_server() as server:
        yield server


def test_a_queue_with_jobs_exists_without_being_set_up(server: LocalServer) -> None:
    server.create()
    expected = {"queue_name": "q", "max_retries": 3, "default_timeout": 300, "rate_limit": None, "enabled": True}
    assert server.ok("GET", "/queues") == [expected]
    queue = server.ok("GET", "/queues/q")
    assert queue["id"] == "implicit:q"
    assert queue.items() >= {**expected, "settings": {}}.items()


def test_setting_something_makes_the_queue_and_keeps_the_rest(server: LocalServer) -> None:
    queue = server.ok("PUT", "/queues/q/config", {"max_retries": 0, "settings": {"a": 1, "b": 2}})
    assert (queue["max_retries"], queue["default_timeout"], queue["settings"]) == (0, 300, {"a": 1, "b": 2})
    server.clock.advance(5)
    changed = server.ok("PUT", "/queues/q/config", {"rate_limit": 9, "settings": {"b": 3}})
    assert (changed["max_retries"], changed["rate_limit"], changed["settings"]) == (0, 9, {"a": 1, "b": 3})
    assert (changed["id"], changed["created_at"]) == (queue["id"], queue["created_at"])
    assert changed["updated_at"] > queue["updated_at"]


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"max_retries": 101}, 400),
        ({"default_timeout": 0}, 400),
        ({"rate_limit": 0}, 400),
        ({"enabled": "yes"}, 422),
        ({"settings": 5}, 400),
    ],
)
def test_settings_that_make_no_sense_are_refused(server: LocalServer, change: dict[str, Any], status: int) -> None:
    assert server.api("PUT", "/queues/q/config", change).status_code == status


def test_a_queue_cannot_be_made_with_a_name_no_job_could_have(server: LocalServer) -> None:
    assert server.api("PUT", "/queues/.q/config", {}).status_code == 400


def test_nothing_is_claimed_from_a_paused_queue_but_what_runs_may_finish(server: LocalServer) -> None:
    running = server.running_job()
    server.create()
    answer = server.ok("POST", "/queues/q/pause", {"reason": "maintenance"})
    assert answer == {
        "queue_name": "q",
        "paused": True,
        "paused_at": "2023-11-14T22:13:20.000000+00:00",
        "reason": "maintenance",
    }
    assert server.claim() == []
    assert server.ok("GET", "/queues/q")["enabled"] is False
    server.ok("POST", f"/jobs/{running['id']}/heartbeat", {})
    server.ok("POST", f"/jobs/{running['id']}/complete", {})
    server.clock.advance(61)
    resumed = server.ok("POST", "/queues/q/resume", content=b"")
    assert resumed == {"queue_name": "q", "resumed": True, "paused_duration_secs": 61}
    assert len(server.claim()) == 1


def test_a_disabled_queue_is_a_paused_one(server: LocalServer) -> None:
    server.ok("PUT", "/queues/q/config", {"enabled": False})
    server.create()
    assert server.claim() == []


def test_pausing_refuses_an_empty_body_that_claims_to_be_json(server: LocalServer) -> None:
    server.create()
    response = server.api("POST", "/queues/q/pause", content=b"")
    assert (response.status_code, response.json()["code"]) == (400, "INVALID_JSON")
    assert server.api("POST", "/queues/q/pause").status_code == 200
    assert server.api("POST", "/queues/q/pause", content=b"{}").status_code == 200


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("POST", "/pause"), ("POST", "/resume"), ("DELETE", "")])
def test_an_unknown_queue_is_not_found(server: LocalServer, method: str, path: str) -> None:
    assert server.api(method, f"/queues/nobody{path}").status_code == 404


def test_a_queue_that_was_never_set_up_cannot_be_resumed(server: LocalServer) -> None:
    server.create()
    assert server.api("POST", "/queues/q/resume").status_code == 404


def test_figures_of_a_queue(server: LocalServer) -> None:
    server.ok("POST", "/workers/register", {"id": "w", "queue_names": ["other", "q"]})
    done = server.running_job()
    server.clock.advance(2)
    server.ok("POST", f"/jobs/{done['id']}/complete", {})
    dead = server.running_job(max_retries=0)
    server.ok("POST", f"/jobs/{dead['id']}/fail", {"error": "e"})
    server.running_job()
    server.create()
    server.create(scheduled_at="2030-01-01T00:00:00Z")
    server.clock.advance(7)
    assert server.ok("GET", "/queues/q/stats") == {
        "queue_name": "q",
        "pending_jobs": 2,
        "processing_jobs": 1,
        "completed_jobs_24h": 1,
        "failed_jobs_24h": 1,
        "avg_processing_time_ms": 2000.0,
        "max_job_age_seconds": 7,
        "active_workers": 1,
    }
    server.clock.advance(86400)
    assert server.ok("GET", "/queues/q/stats")["completed_jobs_24h"] == 0


def test_figures_of_a_queue_that_nobody_used_are_zeros(server: LocalServer) -> None:
    stats = server.ok("GET", "/queues/nobody/stats")
    assert (stats["pending_jobs"], stats["avg_processing_time_ms"], stats["max_job_age_seconds"]) == (0, None, None)


def test_a_busy_queue_is_deleted_only_with_its_jobs(server: LocalServer) -> None:
    server.ok("PUT", "/queues/q/config", {})
    job_id = server.create()
    assert server.api("DELETE", "/queues/q").status_code == 409
    assert server.api("DELETE", "/queues/q?delete_jobs=True").status_code == 204
    assert server.api("GET", f"/jobs/{job_id}").status_code == 404
    assert server.ok("GET", "/queues") == []


def test_a_queue_that_exists_only_through_its_jobs_is_not_deleted_without_them(server: LocalServer) -> None:
    server.api("DELETE", f"/jobs/{server.create()}")
    assert server.api("DELETE", "/queues/q").status_code == 409


def test_deleting_an_idle_queue_keeps_its_finished_jobs(server: LocalServer) -> None:
    server.ok("PUT", "/queues/q/config", {})
    job_id = server.create()
    server.api("DELETE", f"/jobs/{job_id}")
    assert server.api("DELETE", "/queues/q").status_code == 204
    assert server.job(job_id)["status"] == "cancelled"
