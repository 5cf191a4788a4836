"""Jobs for producers and operators."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.devserver import LocalServer, local_server


@pytest.fixture
def server() -> Iterator[LocalServer]:
    with local_server() as server:
        yield server


def dead_job(server: LocalServer, queue_name: str = "q", **fields: Any) -> str:
    server.create(queue_name, max_retries=0, **fields)
    (job,) = server.claim(queue_name)
    server.ok("POST", f"/jobs/{job['id']}/fail", {"worker_id": "w", "lease_id": job["lease_id"], "error": "boom"})
    return str(job["id"])


def ids(items: list[dict[str, Any]]) -> list[str]:
    return [item["id"] for item in items]


# Creating


def test_a_new_job_is_pending_with_the_defaults(server: LocalServer) -> None:
    response = server.api("POST", "/jobs", {"queue_name": "q", "payload": {"n": 1}})
    assert response.status_code == 201
    assert response.json()["created"] is True
    job = server.job(response.json()["id"])
    assert uuid.UUID(job["id"]).version == 4
    assert (
        job.items()
        >= {
            "queue_name": "q",
            "status": "pending",
            "payload": {"n": 1},
            "result": None,
            "retry_count": 0,
            "max_retries": 3,
            "timeout_seconds": 300,
            "priority": 0,
            "created_at": "2023-11-14T22:13:20.000000+00:00",
            "assigned_worker_id": None,
            "lease_id": None,
            "dependencies_met": True,
        }.items()
    )


def test_everything_a_producer_says_is_kept(server: LocalServer) -> None:
    said: dict[str, Any] = {
        "priority": -5,
        "max_retries": 0,
        "timeout_seconds": 86400,
        "idempotency_key": "k",
        "tags": {"urgent": True},
        "completion_webhook": "https://example.com/hook",
    }
    job_id = server.create(completion_webhook_secret="s", expires_at="2024-01-01T00:00:00+02:00", **said)
    job = server.job(job_id)
    assert job.items() >= said.items()
    assert job["expires_at"] == "2023-12-31T22:00:00.000000+00:00"
    assert "completion_webhook_secret" not in job


def test_unknown_fields_are_ignored(server: LocalServer) -> None:
    assert server.create(colour="green")


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("queue_name", "", 400),
        ("queue_name", "x" * 101, 400),
        ("queue_name", ".hidden", 400),
        ("queue_name", "-dash", 400),
        ("queue_name", "with space", 400),
        ("queue_name", None, 422),
        ("queue_name", 5, 422),
        ("priority", 101, 400),
        ("priority", "1", 422),
        ("priority", True, 422),
        ("priority", 1.0, 422),
        ("max_retries", 101, 400),
        ("max_retries", -1, 400),
        ("timeout_seconds", 0, 400),
        ("timeout_seconds", 86401, 400),
        ("scheduled_at", "tomorrow", 422),
        ("scheduled_at", "2024-01-01T00:00:00", 422),
        ("scheduled_at", "9999-12-31T23:59:59-23:59", 422),
        ("expires_at", "0001-01-01T00:00:00+23:59", 422),
        ("expires_at", 5, 422),
        ("idempotency_key", "k" * 256, 400),
        ("tags", "urgent", 422),
        ("tags", ["x" * 65536], 400),
        ("payload", "x" * (1 << 20), 400),
        ("parent_job_id", "nobody", 400),
    ],
)
def test_a_field_that_is_wrong_is_named(server: LocalServer, field: str, value: Any, status: int) -> None:
    response = server.api("POST", "/jobs", {"queue_name": "q", "payload": {}, field: value})
    body = response.json()
    assert (response.status_code, body["code"]) == (status, "VALIDATION_ERROR")
    assert [detail["field"] for detail in body["details"]] == [field]
    assert body["message"] == body["details"][0]["message"]


def test_a_payload_must_be_given_even_if_it_is_null(server: LocalServer) -> None:
    assert server.api("POST", "/jobs", {"queue_name": "q"}).status_code == 422
    assert server.api("POST", "/jobs", {"queue_name": "q", "payload": None}).status_code == 201


def test_a_payload_of_exactly_a_mebibyte_is_accepted(server: LocalServer) -> None:
    assert server.create(payload="x" * ((1 << 20) - 2))


def test_a_payload_that_is_nested_too_deeply_is_refused(server: LocalServer) -> None:
    """How deeply that is depends on stack and Python: all depths around the usual one are tried, and one more."""
    seen = {
        server.api("POST", "/jobs", content=b'{"queue_name":"q","payload":%s%s}' % (b"[" * n, b"]" * n)).status_code
        for n in (*range(800, 1000), 100_000)
    }
    assert seen == {201, 400}


@pytest.mark.parametrize("name", ["a", "A-b_c.d", "_x", "очередь", "队列1", "x" * 100])
def test_queue_names_are_letters_and_digits_of_any_script(server: LocalServer, name: str) -> None:
    assert server.create(name)
    assert len(server.claim(name)) == 1


def test_a_known_idempotency_key_gives_the_old_job_whatever_its_state(server: LocalServer) -> None:
    first = server.create(idempotency_key="k")
    (job,) = server.claim()
    server.ok("POST", f"/jobs/{job['id']}/complete", {"worker_id": "w", "lease_id": job["lease_id"]})
    response = server.api("POST", "/jobs", {"queue_name": "other", "payload": 2, "idempotency_key": "k"})
    assert response.status_code == 200
    assert response.json() == {"id": first, "created": False}
    assert server.ok("GET", "/jobs/stats")["total"] == 1


def test_a_queue_can_have_defaults_for_its_jobs(server: LocalServer) -> None:
    server.ok("PUT", "/queues/q/config", {"max_retries": 7, "default_timeout": 11})
    job = server.job(server.create())
    assert (job["max_retries"], job["timeout_seconds"]) == (7, 11)


# Creating many


def test_many_jobs_are_made_in_order(server: LocalServer) -> None:
    body = {
        "queue_name": "q",
        "jobs": [{"payload": n} for n in range(100)],
        "default_priority": 4,
        "default_max_retries": 1,
        "default_timeout_seconds": 9,
    }
    answer = server.ok("POST", "/jobs/bulk", body)
    assert (answer["total"], answer["success_count"], answer["failure_count"]) == (100, 100, 0)
    assert [item["index"] for item in answer["succeeded"]] == list(range(100))
    jobs = server.claim(limit=100)
    assert [job["payload"] for job in jobs] == list(range(100))
    assert {(job["max_retries"], job["timeout_seconds"]) for job in jobs} == {(1, 9)}


def test_an_item_that_breaks_a_rule_fails_alone(server: LocalServer) -> None:
    jobs = [{"payload": 1}, {"payload": 2, "priority": 500}, {"payload": 3, "priority": 5}]
    answer = server.ok("POST", "/jobs/bulk", {"queue_name": "q", "jobs": jobs})
    assert [item["index"] for item in answer["succeeded"]] == [0, 2]
    assert answer["failed"] == [{"index": 1, "error": "priority must be between -100 and 100"}]


def test_an_item_of_the_wrong_shape_refuses_all(server: LocalServer) -> None:
    response = server.api("POST", "/jobs/bulk", {"queue_name": "q", "jobs": [{"payload": 1}, {"priority": 1}]})
    assert response.status_code == 422
    assert response.json()["details"][0]["field"] == "jobs[1].payload"
    assert server.ok("GET", "/jobs/stats")["total"] == 0


@pytest.mark.parametrize(
    ("jobs", "status"), [([], 400), ([{"payload": 1}] * 101, 400), ([1], 422), ({}, 422), (None, 422)]
)
def test_a_batch_has_one_to_a_hundred_objects(server: LocalServer, jobs: Any, status: int) -> None:
    assert server.api("POST", "/jobs/bulk", {"queue_name": "q", "jobs": jobs}).status_code == status


def test_equal_keys_in_a_batch_make_one_job(server: LocalServer) -> None:
    jobs = [{"payload": n, "idempotency_key": "same"} for n in range(2)]
    first, second = server.ok("POST", "/jobs/bulk", {"queue_name": "q", "jobs": jobs})["succeeded"]
    assert (first["created"], second["created"]) == (True, False)
    assert first["job_id"] == second["job_id"]


# Listing


def test_lists_are_newest_first_and_say_whether_more_follow(server: LocalServer) -> None:
    made = [server.create() for _ in range(5)]
    response = server.api("GET", "/jobs?limit=3")
    assert ids(response.json()) == made[:1:-1]
    assert response.headers["X-Has-More"] == "true"
    response = server.api("GET", "/jobs?limit=3&offset=3")
    assert ids(response.json()) == made[1::-1]
    assert response.headers["X-Has-More"] == "false"


def test_a_summary_counts_attempts_in_both_spellings(server: LocalServer) -> None:
    job = server.running_job(payload={"job_type": "mail"})
    server.ok("POST", f"/jobs/{job['id']}/fail", {"error": "boom"})
    (summary,) = server.ok("GET", "/jobs")
    assert (summary["attempt"], summary["retry_count"], summary["last_error"]) == (1, 1, "boom")
    assert (summary["job_type"], summary["max_retries"]) == ("mail", 3)


def test_lists_can_be_filtered(server: LocalServer) -> None:
    mail = server.create("mail", {"job_type": "Welcome"}, tags=["urgent", "eu"])
    server.clock.advance(60)
    report = server.create("report", {"job_type": "monthly"}, tags={"urgent": 1})
    cancelled = server.create("report", tags={"late": "urgent"})
    server.api("DELETE", f"/jobs/{cancelled}")

    def found(query: str) -> set[str]:
        return set(ids(server.ok("GET", f"/jobs?{query}")))

    assert found("queue_name=mail") == found("queue=mail") == {mail}
    assert found("status=cancelled") == {cancelled}
    assert found("status=cancelled,pending") == {mail, report, cancelled}
    assert found("job_type=monthly") == {report}
    assert found("q=welc") == found("q=MAIL") == {mail}
    assert found(f"q={report[:10]}") == {report}
    assert found("tag=urgent") == {mail, report}
    assert found("created_after=2023-11-14T22:14:20Z") == {report, cancelled}
    assert found("created_before=2023-11-14T22:14:20Z") == {mail}
    assert found("queue=report&status=pending") == {report}


def test_filters_that_make_no_sense_are_ignored(server: LocalServer) -> None:
    server.create()
    for query in ("status=nonsense", "created_after=yesterday", "limit=many", "offset=-1", "order_by=;drop", "limit=0"):
        assert len(server.ok("GET", f"/jobs?{query}")) == 1


def test_lists_can_be_ordered(server: LocalServer) -> None:
    low, high = server.create(priority=-1), server.create(priority=1)
    assert ids(server.ok("GET", "/jobs?order_by=priority&order_dir=desc")) == [high, low]
    assert ids(server.ok("GET", "/jobs?order_by=priority&order_dir=asc")) == [low, high]


def test_stats_count_jobs_by_status(server: LocalServer) -> None:
    dead_job(server)
    server.running_job()
    server.create(scheduled_at="2030-01-01T00:00:00Z")
    server.api("DELETE", f"/jobs/{server.create()}")
    server.create("other")
    assert server.ok("GET", "/jobs/stats") == {
        "pending": 1,
        "scheduled": 1,
        "processing": 1,
        "completed": 0,
        "failed": 0,
        "deadletter": 1,
        "cancelled": 1,
        "total": 5,
    }
    assert server.ok("GET", "/jobs/stats?queue_name=other")["total"] == 1


def test_statuses_of_several_jobs_leave_unknown_ones_out(server: LocalServer) -> None:
    job_id = server.create()
    assert server.ok("GET", f"/jobs/status?ids=nobody,{job_id}") == [
        {
            "id": job_id,
            "status": "pending",
            "queue_name": "q",
            "retry_count": 0,
            "created_at": "2023-11-14T22:13:20.000000+00:00",
            "completed_at": None,
        }
    ]
    assert server.ok("GET", "/jobs/status") == []
    assert server.api("GET", f"/jobs/status?ids={','.join('x' * 101)}").status_code == 400


def test_the_history_tells_what_happened_in_pages(server: LocalServer) -> None:
    job = server.running_job()
    server.ok("POST", f"/jobs/{job['id']}/fail", {"error": "boom"})
    server.clock.advance(1)
    server.claim()
    server.ok("POST", f"/jobs/{job['id']}/complete", {})
    assert server.history(job["id"]) == ["created", "claimed", "failed", "claimed", "completed"]
    response = server.api("GET", f"/jobs/{job['id']}/history?order_dir=desc&limit=2&offset=2")
    failed, claimed = response.json()
    assert response.headers["X-Has-More"] == "true"
    assert (failed["event_type"], failed["details"]) == ("failed", {"error": "boom", "will_retry": True})
    assert (claimed["event_type"], claimed["worker_id"], claimed["details"]) == ("claimed", "w", None)
    assert claimed["job_id"] == job["id"]


# Changing


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/jobs/nobody", None),
        ("DELETE", "/jobs/nobody", None),
        ("POST", "/jobs/nobody/retry", None),
        ("PUT", "/jobs/nobody/priority", {"priority": 1}),
        ("GET", "/jobs/nobody/history", None),
        ("POST", "/jobs/nobody/complete", {}),
        ("POST", "/jobs/nobody/progress", {"progress": 1}),
    ],
)
def test_an_unknown_job_is_not_found(server: LocalServer, method: str, path: str, body: Any) -> None:
    response = server.api(method, path, body)
    assert (response.status_code, response.json()["code"]) == (404, "NOT_FOUND")
    assert response.json()["message"] == "Resource not found"


def test_a_waiting_job_can_be_cancelled_once(server: LocalServer) -> None:
    for job_id in (server.create(), server.create(scheduled_at="2030-01-01T00:00:00Z")):
        response = server.api("DELETE", f"/jobs/{job_id}")
        assert (response.status_code, response.content) == (204, b"")
        assert server.job(job_id)["status"] == "cancelled"
        assert server.history(job_id) == ["created", "cancelled"]
        assert server.api("DELETE", f"/jobs/{job_id}").status_code == 409


def test_a_running_job_cannot_be_cancelled(server: LocalServer) -> None:
    response = server.api("DELETE", f"/jobs/{server.running_job()['id']}")
    assert (response.status_code, response.json()["code"]) == (409, "CONFLICT")


def test_a_dead_job_gets_all_its_attempts_back(server: LocalServer) -> None:
    job_id = dead_job(server)
    job = server.ok("POST", f"/jobs/{job_id}/retry", content=b"")
    assert (job["id"], job["status"], job["retry_count"], job["last_error"]) == (job_id, "pending", 0, None)
    assert ids(server.claim()) == [job_id]
    assert server.history(job_id)[-2:] == ["retried", "claimed"]


def test_a_job_that_has_not_failed_cannot_be_retried(server: LocalServer) -> None:
    response = server.api("POST", f"/jobs/{server.create()}/retry")
    assert (response.status_code, response.json()["code"]) == (409, "CONFLICT")


def test_a_waiting_jobs_priority_can_be_changed(server: LocalServer) -> None:
    server.create()
    job_id = server.create(priority=-3)
    answer = server.ok("PUT", f"/jobs/{job_id}/priority", {"priority": 0})
    assert answer == {"job_id": job_id, "old_priority": -3, "new_priority": 0}
    server.ok("PUT", f"/jobs/{job_id}/priority", {"priority": 9})
    assert ids(server.claim()) == [job_id]
    assert server.api("PUT", f"/jobs/{job_id}/priority", {"priority": 1}).status_code == 404
    assert server.api("PUT", f"/jobs/{job_id}/priority", {}).status_code == 422


# The dead-letter queue


def test_dead_jobs_are_listed_by_queue(server: LocalServer) -> None:
    first, other = dead_job(server), dead_job(server, "other")
    server.create()
    assert ids(server.ok("GET", "/jobs/dlq")) == [other, first]
    assert ids(server.ok("GET", "/jobs/dlq?queue_name=q&status=pending")) == [first]


def test_dead_jobs_are_revived_by_id_or_queue_up_to_a_limit(server: LocalServer) -> None:
    first, second, other = dead_job(server), dead_job(server), dead_job(server, "other")
    answer = server.ok("POST", "/jobs/dlq/retry", {"job_ids": [second, "nobody"]})
    assert answer == {"retried_count": 1, "retried_jobs": [second], "skipped_jobs": []}
    assert server.ok("POST", "/jobs/dlq/retry", {"queue_name": "other"})["retried_jobs"] == [other]
    assert server.ok("POST", "/jobs/dlq/retry", {"limit": 1})["retried_jobs"] == [first]
    assert server.ok("GET", "/jobs/dlq") == []
    assert server.api("POST", "/jobs/dlq/retry", {"job_ids": ["a", "b"], "limit": 1}).status_code == 400
    assert server.api("POST", "/jobs/dlq/retry", {"job_ids": ["a", 2]}).status_code == 422


def test_dead_jobs_are_purged_only_when_it_is_meant(server: LocalServer) -> None:
    old = dead_job(server)
    server.clock.advance(3600)
    dead_job(server)
    other = dead_job(server, "other")
    for body in ({}, {"confirm": False}):
        assert server.api("POST", "/jobs/dlq/purge", body).status_code == 400
    purge = {"confirm": True, "older_than": "2023-11-14T23:00:00Z"}
    assert server.ok("POST", "/jobs/dlq/purge", purge) == {"purged_count": 1}
    assert server.api("GET", f"/jobs/{old}").status_code == 404
    assert server.ok("POST", "/jobs/dlq/purge", {"confirm": True, "queue_name": "q"}) == {"purged_count": 1}
    assert ids(server.ok("GET", "/jobs/dlq")) == [other]
    assert server.ok("POST", "/jobs/dlq/purge", {"confirm": True, "limit": 1}) == {"purged_count": 1}


# Parents


def test_a_child_waits_for_its_parent(server: LocalServer) -> None:
    parent = server.create()
    child = server.create(parent_job_id=parent)
    assert server.job(child)["dependencies_met"] is False
    assert ids(server.claim(limit=10)) == [parent]
    server.ok("POST", f"/jobs/{parent}/complete", {})
    server.services.sweeps.recover(server.clock())
    assert ids(server.claim()) == [child]
    assert server.job(child)["dependencies_met"] is True


def test_a_child_of_a_completed_parent_need_not_wait(server: LocalServer) -> None:
    parent = server.running_job()["id"]
    server.ok("POST", f"/jobs/{parent}/complete", {})
    child = server.create(parent_job_id=parent)
    assert ids(server.claim()) == [child]


def test_a_child_for_later_still_waits_for_its_time(server: LocalServer) -> None:
    parent = server.running_job()["id"]
    child = server.create(parent_job_id=parent, scheduled_at="2023-11-14T22:14:20Z")
    server.ok("POST", f"/jobs/{parent}/complete", {})
    server.services.sweeps.recover(server.clock())
    assert server.claim() == []
    server.clock.advance(60)
    assert ids(server.claim()) == [child]


@pytest.mark.parametrize("end", ["dead", "cancelled"])
def test_the_children_of_a_parent_that_failed_for_good_are_cancelled(server: LocalServer, end: str) -> None:
    parent = server.create(max_retries=0)
    child = server.create(parent_job_id=parent)
    if end == "dead":
        server.claim()
        server.ok("POST", f"/jobs/{parent}/fail", {"error": "boom"})
    else:
        server.api("DELETE", f"/jobs/{parent}")
    server.services.sweeps.recover(server.clock())
    assert server.job(child)["status"] == "cancelled"


def test_a_parent_must_be_in_the_same_queue(server: LocalServer) -> None:
    parent = server.create("other")
    response = server.api("POST", "/jobs", {"queue_name": "q", "payload": 1, "parent_job_id": parent})
    assert response.status_code == 400
