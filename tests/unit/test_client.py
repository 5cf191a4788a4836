"""`SpooledClient`: what it sends, what it makes of answers, what it repeats. The service is a function of the test."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from spooled_supervisor import client as client_module
from spooled_supervisor import forkserver
from spooled_supervisor.client import BulkCreated, BulkFailed, JobCreated, SpooledClient
from spooled_supervisor.errors import ApiRefused, ApiUnavailable, ConfigError, CredentialsRefused

KEY = "sp_test_0123456789abcdef"
JOB = {
    "id": "j1",
    "queue_name": "q",
    "status": "completed",
    "payload": {"n": 1},
    "result": [2],
    "retry_count": 1,
    "max_retries": 3,
    "priority": 5,
    "timeout_seconds": 60,
    "created_at": "2026-01-01T00:00:00Z",
    "organization_id": "o1",
}

Answer = httpx.Response | Exception


class Service:
    """Answers with what it was given, in turn, the last one again and again; notes what it was asked."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def body(self) -> Any:
        return json.loads(self.requests[-1].content)


def answer(status: int = 200, body: Any = None, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, json=body, headers=named) if body is not None else httpx.Response(status)


def refusal(status: int, code: str, **headers: str) -> httpx.Response:
    return answer(status, {"code": code, "message": f"no, {KEY}"}, **headers)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RETRY_FIRST_S", 0.0001)
    for name in ("SPOOLED_API_KEY", "SPOOLED_API_URL", "SPOOLED_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def made() -> Iterator[Callable[..., tuple[SpooledClient, Service]]]:
    clients: list[SpooledClient] = []

    def make(*answers: Answer, **options: Any) -> tuple[SpooledClient, Service]:
        service = Service(*answers)
        transport = httpx.MockTransport(service)
        client = SpooledClient(KEY, "http://service.test", transport=transport, **options)
        clients.append(client)
        return client, service

    yield make
    for client in clients:
        client.close()


Make = Callable[..., tuple[SpooledClient, Service]]

# --- key and address --------------------------------------------------------------------------------------------------


def test_the_key_is_stripped_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOOLED_API_KEY", f"  {KEY}\n")
    client = SpooledClient()
    assert client.api_key.reveal() == KEY
    assert KEY not in repr(client) + str(client.api_key) + repr(vars(client))
    assert repr(client) == "<SpooledClient of https://api.spooled.cloud>"


@pytest.mark.parametrize("key", [None, "", "   "])
def test_without_a_key_there_is_no_client(key: str | None) -> None:
    with pytest.raises(ConfigError, match="api_key: is required; give it, or set SPOOLED_API_KEY"):
        SpooledClient(key)


def test_in_a_fork_server_a_client_may_be_made_but_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "is_fork_server", True)
    client = SpooledClient()
    with pytest.raises(ConfigError, match="kept from children"):
        client.jobs.stats()


@pytest.mark.parametrize("key", ["sp_live_a secret", "sp_live_ä", "sp_live_\x00x"])
def test_what_no_header_can_carry_is_no_key_and_is_not_repeated(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SpooledClient(key)
    assert "cannot be an API key" in str(caught.value)
    assert key not in str(caught.value)


@pytest.mark.parametrize("url", ["ftp://x", "service", "http://user:pw@host", "http://host/?key=1", 7])
def test_all_that_is_wrong_is_told_at_once(url: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        SpooledClient("", url)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["api_key", "base_url"]
    assert "user:pw" not in str(caught.value)


@pytest.mark.parametrize("base", ["http://service.test", "http://service.test/", "http://service.test/api/v1"])
def test_every_way_to_write_the_address_leads_to_the_same_place(base: str) -> None:
    service = Service(answer(200, {"total": 3}))
    with SpooledClient(KEY, base, transport=httpx.MockTransport(service)) as client:
        assert client.jobs.stats().total == 3
    request = service.requests[0]
    assert str(request.url) == "http://service.test/api/v1/jobs/stats"
    assert request.headers["authorization"] == f"Bearer {KEY}"


def test_the_address_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOOLED_BASE_URL", "http://two.test")
    assert SpooledClient(KEY).base_url == "http://two.test"
    monkeypatch.setenv("SPOOLED_API_URL", "http://one.test/")
    assert SpooledClient(KEY).base_url == "http://one.test"


# --- making jobs ------------------------------------------------------------------------------------------------------


def test_create_sends_what_was_said_and_leaves_out_what_was_not(made: Make) -> None:
    client, service = made(answer(201, {"id": "j1", "created": True}))
    created = client.jobs.create(queue_name="q", payload=None, priority=0, tags={"a": "b"})
    assert created == JobCreated("j1", True)
    assert service.body == {"queue_name": "q", "payload": None, "priority": 0, "tags": {"a": "b"}}


def test_create_says_whether_the_key_was_known(made: Make) -> None:
    client, service = made(answer(200, {"id": "j1", "created": False}))
    when = datetime(2026, 1, 1, tzinfo=UTC)
    fields: dict[str, Any] = {"max_retries": 1, "timeout_seconds": 9, "idempotency_key": "k", "parent_job_id": "p"}
    created = client.jobs.create(
        queue_name="q", payload=1, scheduled_at=when, expires_at="2026-02-01T00:00:00Z", **fields
    )
    assert created.created is False
    times = {"scheduled_at": "2026-01-01T00:00:00+00:00", "expires_at": "2026-02-01T00:00:00Z"}
    assert service.body == {"queue_name": "q", "payload": 1, **times, **fields}


def test_a_time_without_a_zone_is_refused(made: Make) -> None:
    client, service = made(answer())
    with pytest.raises(ValueError, match="scheduled_at: 2026-01-01T00:00:00 has no time zone"):
        client.jobs.create(queue_name="q", payload=1, scheduled_at=datetime(2026, 1, 1))
    assert service.requests == []


@pytest.mark.parametrize("payload", [float("nan"), {1, 2}, b"x"])
def test_a_payload_that_is_no_json_is_not_sent(made: Make, payload: Any) -> None:
    client, service = made(answer())
    with pytest.raises((ValueError, TypeError)):
        client.jobs.create(queue_name="q", payload=payload)
    assert service.requests == []


def test_bulk_tells_of_each_job(made: Make) -> None:
    said = {
        "succeeded": [{"index": 2, "job_id": "c", "created": False}, {"index": 0, "job_id": "a", "created": True}],
        "failed": [{"index": 1, "error": "too large"}],
    }
    client, service = made(answer(200, said))
    jobs: list[dict[str, Any]] = [
        {"payload": 1},
        {"payload": 2, "priority": 3},
        {"payload": 3, "scheduled_at": datetime(2026, 1, 1, tzinfo=UTC)},
    ]
    result = client.jobs.bulk(queue_name="q", jobs=jobs, default_priority=1)
    assert result.ids == ["a", "c"]
    assert result.succeeded[1] == BulkCreated(0, "a", True)
    assert result.failed == (BulkFailed(1, "too large"),)
    sent = [{"payload": 1}, {"payload": 2, "priority": 3}, {"payload": 3, "scheduled_at": "2026-01-01T00:00:00+00:00"}]
    assert service.body == {"queue_name": "q", "jobs": sent, "default_priority": 1}


@pytest.mark.parametrize("count", [0, 101])
def test_a_bulk_of_none_or_too_many_is_refused(made: Make, count: int) -> None:
    client, _ = made(answer())
    with pytest.raises(ValueError, match=f"there are {count}, 1 to 100"):
        client.jobs.bulk(queue_name="q", jobs=[{"payload": 1}] * count)


# --- looking at them --------------------------------------------------------------------------------------------------


def test_get_list_stats_cancel_and_retry(made: Make) -> None:
    summary = {"id": "j1", "queue_name": "q", "status": "failed", "attempt": 2, "max_retries": 3, "priority": 0}
    client, service = made(
        answer(200, JOB), answer(200, [summary]), answer(200, {"pending": 1, "total": 1}), answer(204), answer(200, JOB)
    )
    job = client.jobs.get("j/1")
    assert (job.id, job.payload, job.result, job.retry_count, job.last_error) == ("j1", {"n": 1}, [2], 1, None)
    assert job.record["organization_id"] == "o1"
    (listed,) = client.jobs.list(queue_name="q", status="failed", limit=5)
    assert (listed.id, listed.retry_count) == ("j1", 2)
    assert client.jobs.stats("q").pending == 1
    client.jobs.cancel("..")
    assert client.jobs.retry("j1").status == "completed"
    assert [(request.method, request.url.raw_path.decode()) for request in service.requests] == [
        ("GET", "/api/v1/jobs/j%2F1"),
        ("GET", "/api/v1/jobs?queue_name=q&status=failed&limit=5&offset=0"),
        ("GET", "/api/v1/jobs/stats?queue_name=q"),
        ("DELETE", "/api/v1/jobs/%2E%2E"),
        ("POST", "/api/v1/jobs/j1/retry"),
    ]


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (refusal(404, "NOT_FOUND"), ApiRefused),
        (refusal(401, "UNAUTHORIZED"), CredentialsRefused),
        (refusal(403, "FORBIDDEN"), ApiRefused),
        (refusal(503, "UNAVAILABLE"), ApiUnavailable),
        (httpx.Response(200, text="<html>Sign in</html>"), ApiUnavailable),
        (httpx.Response(200, json={"no": "id"}), ApiUnavailable),
        (httpx.Response(302, headers={"location": "https://login.test"}), ApiUnavailable),
        (httpx.ConnectError(f"refused {KEY}"), ApiUnavailable),
    ],
)
def test_errors_are_the_packages_own_and_do_not_repeat_the_key(made: Make, said: Answer, kind: type[Exception]) -> None:
    client, _ = made(said, retries=0)
    with pytest.raises(kind) as caught:
        client.jobs.get("j1")
    assert type(caught.value) is kind
    assert KEY not in str(caught.value)


# --- what is repeated -------------------------------------------------------------------------------------------------


def tries(client: SpooledClient, service: Service, call: Callable[[SpooledClient], object]) -> int:
    with pytest.raises(ApiUnavailable):
        call(client)
    return len(service.requests)


@pytest.mark.parametrize(
    ("call", "count"),
    [
        (lambda client: client.jobs.get("j"), 4),
        (lambda client: client.jobs.cancel("j"), 4),
        (lambda client: client.jobs.stats(), 4),
        (lambda client: client.jobs.create(queue_name="q", payload=1, idempotency_key="k"), 4),
        (lambda client: client.jobs.create(queue_name="q", payload=1), 1),
        (lambda client: client.jobs.bulk(queue_name="q", jobs=[{"payload": 1, "idempotency_key": "k"}]), 4),
        (
            lambda client: client.jobs.bulk(
                queue_name="q", jobs=[{"payload": 1, "idempotency_key": "k"}, {"payload": 2}]
            ),
            1,
        ),
        (lambda client: client.jobs.retry("j"), 1),
    ],
)
@pytest.mark.parametrize("said", [answer(502), httpx.ReadTimeout("late")])
def test_only_what_the_service_does_once_is_repeated(
    made: Make, call: Callable[[SpooledClient], object], count: int, said: Answer
) -> None:
    assert tries(*made(said), call) == count


def test_a_rate_limit_is_waited_for_whatever_was_asked(made: Make) -> None:
    limited = refusal(429, "RATE_LIMIT_EXCEEDED", retry_after="0")
    client, service = made(limited, limited, answer(201, {"id": "j1", "created": True}))
    assert client.jobs.create(queue_name="q", payload=1).id == "j1"
    assert len(service.requests) == 3


def test_a_plan_quota_is_no_rate_limit(made: Make) -> None:
    client, service = made(refusal(429, "QUOTA_EXCEEDED"))
    with pytest.raises(ApiRefused):
        client.jobs.create(queue_name="q", payload=1)
    assert len(service.requests) == 1


@pytest.mark.parametrize("lost", [answer(502), httpx.ReadTimeout("late")])
def test_a_cancel_whose_answer_was_lost_has_succeeded_if_the_job_is_cancelled_or_gone(made: Make, lost: Answer) -> None:
    client, service = made(lost, refusal(409, "CONFLICT"), answer(200, {**JOB, "status": "cancelled"}))
    client.jobs.cancel("j1")
    assert [request.method for request in service.requests] == ["DELETE", "DELETE", "GET"]
    client, _ = made(lost, refusal(404, "NOT_FOUND"))
    client.jobs.cancel("j1")


def test_a_cancel_of_a_job_that_runs_is_refused_after_a_repetition_too(made: Make) -> None:
    client, _ = made(answer(502), refusal(409, "CONFLICT"), answer(200, {**JOB, "status": "processing"}))
    with pytest.raises(ApiRefused, match="409"):
        client.jobs.cancel("j1")
    client, _ = made(answer(502), refusal(401, "UNAUTHORIZED"))
    with pytest.raises(CredentialsRefused):
        client.jobs.cancel("j1")


@pytest.mark.parametrize("status", [404, 409])
def test_a_cancel_that_was_not_lost_is_refused(made: Make, status: int) -> None:
    client, service = made(refusal(429, "RATE_LIMIT_EXCEEDED", retry_after="0"), refusal(status, "CONFLICT"))
    with pytest.raises(ApiRefused, match=str(status)):
        client.jobs.cancel("j1")
    assert len(service.requests) == 2


def test_after_a_fork_and_after_a_close_connections_are_new(made: Make) -> None:
    client, _ = made(answer(200, {"total": 1}))
    client.jobs.stats()
    first = client._http
    client._pid = -1  # as in a child
    client.jobs.stats()
    assert client._http is not first
    assert first is not None
    first.close()
    client.close()
    client.close()
    assert client.jobs.stats().total == 1
