"""Claiming, settling and renewing: every answer, in both dialects."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import httpx
import pytest

from tests.support.devserver import LocalServer, local_server

LEASE_S = 30

ACKS: dict[str, dict[str, Any]] = {
    "complete": {"result": {"ok": True}},
    "fail": {"error": "boom"},
    "heartbeat": {"lease_duration_secs": LEASE_S},
    "renew-lease": {"extension_seconds": LEASE_S},
}


@pytest.fixture
def server() -> Iterator[LocalServer]:
    with local_server() as server:
        yield server


@pytest.fixture
def strict() -> Iterator[LocalServer]:
    with local_server(strict=True) as server:
        yield server


@pytest.fixture(params=sorted(ACKS))
def ack(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def send(server: LocalServer, ack: str, job: dict[str, Any], worker_id: str = "w", **extra: Any) -> httpx.Response:
    body = {"worker_id": worker_id, "lease_id": job["lease_id"], **ACKS[ack], **extra}
    return server.api("POST", f"/jobs/{job['id']}/{ack}", body)


def outcome(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json().get("code", "")


# Claiming


def test_a_claimed_job_has_everything_a_worker_needs(server: LocalServer) -> None:
    job_id = server.create(payload={"n": 1}, max_retries=5, timeout_seconds=60)
    (job,) = server.claim(lease_duration_secs=45)
    assert job.pop("lease_id")
    assert job == {
        "id": job_id,
        "queue_name": "q",
        "payload": {"n": 1},
        "retry_count": 0,
        "max_retries": 5,
        "timeout_seconds": 60,
        "lease_expires_at": "2023-11-14T22:14:05.000000+00:00",
    }
    assert server.job(job_id)["status"] == "processing"
    assert server.job(job_id)["assigned_worker_id"] == "w"


def test_a_claim_without_a_duration_gets_thirty_seconds(server: LocalServer) -> None:
    job = server.running_job()
    assert job["lease_expires_at"] == "2023-11-14T22:13:50.000000+00:00"


def test_an_empty_and_an_unknown_queue_give_no_jobs(server: LocalServer) -> None:
    assert server.claim("nobody-knows-it") == []


def test_jobs_are_claimed_by_priority_and_then_by_age(server: LocalServer) -> None:
    expected = {}
    for label, priority in (("old", 0), ("low", -100), ("high", 100), ("young", 0)):
        expected[label] = server.create(priority=priority)
        server.clock.advance(1)
    claimed = [server.claim()[0]["id"] for _ in expected]
    assert claimed == [expected[label] for label in ("high", "old", "young", "low")]


def test_a_claim_takes_no_more_than_its_limit_and_gives_each_job_a_lease_of_its_own(server: LocalServer) -> None:
    for _ in range(5):
        server.create()
    jobs = server.claim(limit=3)
    assert len(jobs) == 3
    assert len({job["lease_id"] for job in jobs}) == 3
    assert len(server.claim(limit=100)) == 2


def test_a_job_for_later_is_claimed_once_its_time_has_come(server: LocalServer) -> None:
    job_id = server.create(scheduled_at="2023-11-14T22:13:25Z")
    assert server.job(job_id)["status"] == "scheduled"
    server.clock.advance(4.9)
    assert server.claim() == []
    server.clock.advance(0.1)
    assert [job["id"] for job in server.claim()] == [job_id]


def test_a_job_that_expired_is_not_claimed(server: LocalServer) -> None:
    server.create(expires_at="2023-11-14T22:13:25Z")
    server.clock.advance(5)
    assert server.claim() == []


def test_a_cancelled_job_is_not_claimed(server: LocalServer) -> None:
    server.api("DELETE", f"/jobs/{server.create()}")
    assert server.claim() == []


def test_a_worker_need_not_be_registered_nor_its_id_look_like_one(server: LocalServer) -> None:
    server.create()
    assert len(server.claim(worker_id="a host/with:odd characters")) == 1


@pytest.mark.parametrize("payload", [None, True, 0, "text", [1, 2], {}, {"deep": [{"er": None}]}])
def test_a_payload_may_be_any_json_value(server: LocalServer, payload: Any) -> None:
    assert server.running_job(payload=payload)["payload"] == payload


def test_a_payload_keeps_its_numbers_digit_for_digit(server: LocalServer) -> None:
    text = b'{"big":123456789012345678901234567890,"fine":0.1000000000000000055511151231257827,"exp":1E+2}'
    server.api("POST", "/jobs", content=b'{"queue_name": "q", "payload": ' + text + b"}")
    answer = server.api("POST", "/jobs/claim", {"queue_name": "q", "worker_id": "w"})
    assert text in answer.content


@pytest.mark.parametrize("limit", [0, 101])
def test_a_claim_for_too_few_or_too_many_is_refused(server: LocalServer, limit: int) -> None:
    response = server.api("POST", "/jobs/claim", {"queue_name": "q", "worker_id": "w", "limit": limit})
    assert outcome(response) == (400, "VALIDATION_ERROR")


@pytest.mark.parametrize("duration_s", [4, 3601])
def test_a_lease_that_is_too_short_or_too_long_is_refused(server: LocalServer, duration_s: int) -> None:
    body = {"queue_name": "q", "worker_id": "w", "lease_duration_secs": duration_s}
    assert outcome(server.api("POST", "/jobs/claim", body)) == (400, "VALIDATION_ERROR")


# What an outcome or a renewal is answered


def test_a_live_matching_lease_is_accepted(server: LocalServer, ack: str) -> None:
    job = server.running_job()
    server.clock.advance(LEASE_S - 0.001)
    response = send(server, ack, job)
    assert response.status_code == 200
    assert response.json()["success"] is True


def test_a_lease_is_over_at_the_very_instant_of_its_end(server: LocalServer, ack: str) -> None:
    job = server.running_job()
    server.clock.advance(LEASE_S)
    assert outcome(send(server, ack, job)) == (409, "LEASE_EXPIRED")


def test_another_lease_id_is_refused_as_expired(server: LocalServer, ack: str) -> None:
    job = server.running_job()
    response = send(server, ack, job, lease_id="another")
    assert outcome(response) == (409, "LEASE_EXPIRED")
    assert "does not match the job's current lease" in response.json()["message"]


def test_a_job_that_was_taken_back_is_not_found(server: LocalServer, ack: str) -> None:
    job = server.running_job()
    server.clock.advance(LEASE_S)
    server.services.sweeps.recover(server.clock())
    assert outcome(send(server, ack, job)) == (404, "NOT_FOUND")


def test_a_job_that_another_worker_has_now_is_not_found(server: LocalServer, ack: str) -> None:
    job = server.running_job()
    server.clock.advance(LEASE_S)
    server.services.sweeps.recover(server.clock())
    server.claim(worker_id="another")
    assert outcome(send(server, ack, job)) == (404, "NOT_FOUND")


def test_an_older_lease_of_the_same_worker_is_expired(server: LocalServer, ack: str) -> None:
    job = server.running_job()
    server.clock.advance(LEASE_S)
    server.services.sweeps.recover(server.clock())
    server.claim(worker_id="w")
    assert outcome(send(server, ack, job)) == (409, "LEASE_EXPIRED")


def test_after_a_complete_everything_hears_already_completed(server: LocalServer, ack: str) -> None:
    job = server.running_job()
    send(server, "complete", job)
    response = send(server, ack, job)
    assert outcome(response) == (409, "CONFLICT")
    assert response.json()["message"] == "Job is already completed"


def test_after_a_fail_nothing_is_found(server: LocalServer, ack: str) -> None:
    job = server.running_job()
    send(server, "fail", job)
    assert outcome(send(server, ack, job)) == (404, "NOT_FOUND")


def test_a_job_that_died_of_its_last_lease_hears_already_deadletter(server: LocalServer, ack: str) -> None:
    job = server.running_job(max_retries=0)
    server.clock.advance(LEASE_S)
    server.services.sweeps.recover(server.clock())
    response = send(server, ack, job)
    assert outcome(response) == (409, "CONFLICT")
    assert response.json()["message"] == "Job is already deadletter"


def test_a_job_that_was_deleted_while_it_ran_is_not_found(server: LocalServer, ack: str) -> None:
    job = server.running_job()
    assert server.api("DELETE", "/queues/q?delete_jobs=true").status_code == 204
    assert outcome(send(server, ack, job)) == (404, "NOT_FOUND")


def test_a_job_that_nobody_claimed_is_not_found(server: LocalServer, ack: str) -> None:
    job = {"id": server.create(), "lease_id": "x"}
    assert outcome(send(server, ack, job)) == (404, "NOT_FOUND")


def test_another_workers_job_is_not_found(server: LocalServer, ack: str) -> None:
    job = server.running_job()
    assert outcome(send(server, ack, job, worker_id="another")) == (404, "NOT_FOUND")


# What they do


def test_completing_stores_the_result_as_it_was_sent(server: LocalServer) -> None:
    job = server.running_job()
    text = b'{"n": 123456789012345678901234567890}'
    content = b'{"worker_id": "w", "lease_id": "%s", "result": %s}' % (job["lease_id"].encode(), text)
    server.clock.advance(2)
    assert server.api("POST", f"/jobs/{job['id']}/complete", content=content).json() == {"success": True}
    assert text in server.api("GET", f"/jobs/{job['id']}").content
    done = server.job(job["id"])
    assert (done["status"], done["completed_at"]) == ("completed", "2023-11-14T22:13:22.000000+00:00")
    assert server.history(job["id"]) == ["created", "claimed", "completed"]


def test_completing_without_a_result_leaves_it_null(server: LocalServer) -> None:
    job = server.running_job()
    body = {"worker_id": "w", "lease_id": job["lease_id"]}
    assert server.api("POST", f"/jobs/{job['id']}/complete", body).status_code == 200
    assert server.job(job["id"])["result"] is None


def test_failing_with_retries_left_makes_the_job_pending_after_a_wait(server: LocalServer) -> None:
    job = server.running_job()
    assert send(server, "fail", job).json() == {"success": True, "will_retry": True}
    waiting = server.job(job["id"])
    assert (waiting["status"], waiting["retry_count"], waiting["last_error"]) == ("pending", 1, "boom")
    assert (waiting["assigned_worker_id"], waiting["lease_id"], waiting["lease_expires_at"]) == (None, None, None)
    assert server.claim() == []
    server.clock.advance(1)
    assert server.claim()[0]["retry_count"] == 1


def test_the_wait_doubles_up_to_a_minute(server: LocalServer) -> None:
    job_id = server.create(max_retries=8)
    waits = []
    for _ in range(8):
        (job,) = server.claim()
        send(server, "fail", job)
        waits.append(round(instant(server.job(job_id)["scheduled_at"]) - server.clock()))
        assert server.claim() == []
        server.clock.advance(waits[-1])
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    send(server, "fail", server.claim()[0])
    assert server.job(job_id)["status"] == "deadletter"


def instant(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def test_the_wait_can_be_shortened() -> None:
    with local_server(retry_base_s=0.01) as server:
        send(server, "fail", server.running_job())
        server.clock.advance(0.02)
        assert len(server.claim()) == 1


def test_a_retried_job_goes_before_younger_ones_of_its_priority(server: LocalServer) -> None:
    job = server.running_job()
    server.clock.advance(1)
    server.create()
    send(server, "fail", job)
    server.clock.advance(1)
    assert server.claim()[0]["id"] == job["id"]


def test_failing_without_retries_left_dead_letters_the_job(server: LocalServer) -> None:
    job = server.running_job(max_retries=0)
    assert send(server, "fail", job).json() == {"success": True, "will_retry": False}
    dead = server.job(job["id"])
    assert (dead["status"], dead["retry_count"], dead["last_error"]) == ("deadletter", 0, "boom")


@pytest.mark.parametrize("hint", [{"no_retry": True}, {"retry": False}])
def test_a_failure_that_says_no_retry_is_retried_all_the_same(server: LocalServer, hint: dict[str, Any]) -> None:
    assert send(server, "fail", server.running_job(), **hint).json()["will_retry"] is True


@pytest.mark.parametrize("hint", [{"no_retry": True}, {"retry": False}])
def test_a_failure_that_says_no_retry_ends_the_job_where_that_is_honoured(hint: dict[str, Any]) -> None:
    with local_server(honour_no_retry=True) as server:
        job = server.running_job()
        assert send(server, "fail", job, **hint).json()["will_retry"] is False
        assert server.job(job["id"])["status"] == "deadletter"


@pytest.mark.parametrize("path", ["heartbeat", "renew-lease"])
def test_a_renewal_counts_from_now_and_may_shorten(server: LocalServer, path: str) -> None:
    job = server.running_job()
    server.clock.advance(10)
    field = "lease_duration_secs" if path == "heartbeat" else "extension_seconds"
    body = {"worker_id": "w", "lease_id": job["lease_id"], field: 5}
    answer = server.ok("POST", f"/jobs/{job['id']}/{path}", body)
    assert answer == {"success": True, "lease_expires_at": "2023-11-14T22:13:35.000000+00:00"}
    assert server.job(job["id"])["lease_id"] == job["lease_id"]


def test_a_renewal_without_a_duration_is_for_thirty_seconds(server: LocalServer) -> None:
    job = server.running_job()
    server.clock.advance(10)
    answer = server.ok("POST", f"/jobs/{job['id']}/heartbeat", {"worker_id": "w", "lease_id": job["lease_id"]})
    assert answer["lease_expires_at"] == "2023-11-14T22:14:00.000000+00:00"


def test_renewals_may_go_on_for_ever(server: LocalServer) -> None:
    job = server.running_job()
    for _ in range(50):
        server.clock.advance(LEASE_S - 1)
        assert send(server, "heartbeat", job).status_code == 200
        server.services.sweeps.recover(server.clock())
    assert send(server, "complete", job).status_code == 200


def test_progress_is_kept_until_the_next_run(server: LocalServer) -> None:
    job = server.running_job()
    assert server.ok("POST", f"/jobs/{job['id']}/progress", {"progress": 42.5, "message": "page 3"}) == {
        "success": True
    }
    assert server.job(job["id"])["progress"] == 42.5
    assert server.job(job["id"])["progress_message"] == "page 3"
    send(server, "fail", job)
    server.clock.advance(1)
    server.claim()
    assert server.job(job["id"])["progress"] is None


@pytest.mark.parametrize(
    ("body", "status"), [({"progress": 100.1}, 400), ({"progress": "half"}, 422), ({}, 422), ({"progress": 100}, 200)]
)
def test_progress_is_a_percentage(server: LocalServer, body: dict[str, Any], status: int) -> None:
    job = server.running_job()
    assert server.api("POST", f"/jobs/{job['id']}/progress", body).status_code == status


def test_progress_of_a_job_that_does_not_run_is_refused(server: LocalServer) -> None:
    assert outcome(server.api("POST", f"/jobs/{server.create()}/progress", {"progress": 1})) == (404, "NOT_FOUND")


# Dialects


@pytest.mark.parametrize("missing", [{"worker_id"}, {"lease_id"}, {"worker_id", "lease_id"}])
def test_older_clients_may_leave_out_who_they_are(server: LocalServer, ack: str, missing: set[str]) -> None:
    job = server.running_job()
    body = {"worker_id": "w", "lease_id": job["lease_id"], **ACKS[ack]}
    response = server.api("POST", f"/jobs/{job['id']}/{ack}", {k: v for k, v in body.items() if k not in missing})
    assert response.status_code == 200


def test_what_older_clients_do_send_must_match(server: LocalServer, ack: str) -> None:
    job = server.running_job()
    path = f"/jobs/{job['id']}/{ack}"
    assert outcome(server.api("POST", path, {"worker_id": "another", **ACKS[ack]})) == (404, "NOT_FOUND")
    assert outcome(server.api("POST", path, {"lease_id": "another", **ACKS[ack]})) == (409, "LEASE_EXPIRED")


def test_leaving_them_out_does_not_revive_an_expired_lease(server: LocalServer, ack: str) -> None:
    job = server.running_job()
    server.clock.advance(LEASE_S)
    assert outcome(server.api("POST", f"/jobs/{job['id']}/{ack}", ACKS[ack])) == (409, "LEASE_EXPIRED")


@pytest.mark.parametrize("field", ["worker_id", "lease_id"])
@pytest.mark.parametrize("null", [True, False])
def test_the_strict_server_demands_both(strict: LocalServer, ack: str, field: str, null: bool) -> None:
    job = strict.running_job()
    body = {"worker_id": "w", "lease_id": job["lease_id"], **ACKS[ack]}
    if null:
        body[field] = None
    else:
        del body[field]
    response = strict.api("POST", f"/jobs/{job['id']}/{ack}", body)
    assert outcome(response) == (422, "VALIDATION_ERROR")
    (detail,) = response.json()["details"]
    assert (detail["field"], detail["code"]) == (field, "invalid_type" if null else "missing_field")


def test_the_strict_server_accepts_the_whole_body(strict: LocalServer, ack: str) -> None:
    assert send(strict, ack, strict.running_job()).status_code == 200


def test_a_failure_may_be_called_reason_by_older_clients(server: LocalServer) -> None:
    job = server.running_job()
    assert server.ok("POST", f"/jobs/{job['id']}/fail", {"reason": "no paper"})["success"] is True
    assert server.job(job["id"])["last_error"] == "no paper"


def test_the_strict_server_knows_only_error(strict: LocalServer) -> None:
    job = strict.running_job()
    body = {"worker_id": "w", "lease_id": job["lease_id"], "reason": "no paper"}
    assert outcome(strict.api("POST", f"/jobs/{job['id']}/fail", body)) == (422, "VALIDATION_ERROR")


@pytest.mark.parametrize(("error", "status"), [("", 400), ("x" * 2049, 400), ("x" * 2048, 200), ("ü" * 2048, 200)])
def test_an_error_text_has_one_to_2048_characters(server: LocalServer, error: str, status: int) -> None:
    assert send(server, "fail", server.running_job(), error=error).status_code == status


def test_a_failure_without_any_text_is_refused(server: LocalServer) -> None:
    job = server.running_job()
    body = {"worker_id": "w", "lease_id": job["lease_id"]}
    assert outcome(server.api("POST", f"/jobs/{job['id']}/fail", body)) == (422, "VALIDATION_ERROR")


def test_one_body_serves_both_dialects_of_everything(strict: LocalServer, server: LocalServer) -> None:
    for each in (strict, server):
        job = each.running_job()
        who = {"worker_id": "w", "lease_id": job["lease_id"]}
        renewal = {**who, "lease_duration_secs": 30, "extension_seconds": 30}
        assert each.api("POST", f"/jobs/{job['id']}/heartbeat", renewal).status_code == 200
        assert each.api("POST", f"/jobs/{job['id']}/renew-lease", renewal).status_code == 200
        failure = {**who, "error": "e", "reason": "e", "no_retry": True, "retry": False}
        assert each.api("POST", f"/jobs/{job['id']}/fail", failure).status_code == 200
