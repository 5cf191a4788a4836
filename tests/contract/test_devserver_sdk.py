"""The official Python SDK against the dev-server: what it sends is understood, what it is sent parses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from spooled import SpooledClient, SpooledWorker
from spooled.errors import (
    AuthenticationError,
    ConflictError,
    NotFoundError,
    SpooledError,
    ValidationError,
    is_lease_expired,
)

from tests.support.devserver import DevServer, dev_server

LIMIT_S = 15.0


@pytest.fixture(scope="module")
def server() -> Iterator[DevServer]:
    with dev_server(strict=True, retry_base_s=0.01) as server:
        yield server


@pytest.fixture
def client(server: DevServer) -> Iterator[Any]:
    client = SpooledClient(api_key=server.api_key, base_url=server.url)
    yield client
    client.close()


def claim(client: Any, queue_name: str) -> Any:
    (job,) = client.jobs.claim({"queue_name": queue_name, "worker_id": "w"}).jobs
    return job


def dead_job(client: Any, queue_name: str) -> str:
    client.jobs.create({"queue_name": queue_name, "payload": {}, "max_retries": 0})
    job = claim(client, queue_name)
    client.jobs.fail(job.id, {"worker_id": "w", "lease_id": job.lease_id, "error": "boom"})
    return str(job.id)


def test_jobs_are_created_and_inspected(client: Any) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    params = {
        "queue_name": "sdk-create",
        "payload": {"n": 2**60},
        "priority": 5,
        "max_retries": 2,
        "timeout_seconds": 60,
        "scheduled_at": later,
        "idempotency_key": "sdk-create-1",
        "tags": {"urgent": True},
    }
    made = client.jobs.create(params)
    assert made.created is True
    assert client.jobs.create(params).created is False
    job = client.jobs.get(made.id)
    assert (job.status, job.payload, job.priority, job.tags) == ("scheduled", {"n": 2**60}, 5, {"urgent": True})
    assert abs(job.scheduled_at - later) < timedelta(milliseconds=1)
    assert [event.event_type for event in client.jobs.history(made.id)] == ["created"]


def test_jobs_are_listed_in_pages(client: Any) -> None:
    jobs = [{"payload": {"job_type": "a"}}, {"payload": {"job_type": "b"}}, {"payload": {}}]
    answer = client.jobs.bulk_enqueue({"queue_name": "sdk-list", "jobs": jobs, "default_max_retries": 1})
    assert (answer.success_count, answer.failure_count) == (3, 0)
    page = client.jobs.list({"queue_name": "sdk-list", "limit": 2})
    assert (len(page), page.has_more) == (2, True)
    assert client.jobs.list({"queue_name": "sdk-list", "status": "pending", "job_type": "a"}).has_more is False
    statuses = client.jobs.batch_status([item.job_id for item in answer.succeeded])
    assert {status.status for status in statuses} == {"pending"}
    assert client.jobs.get_stats().total >= 3


def test_jobs_are_cancelled_retried_and_hurried(client: Any) -> None:
    made = client.jobs.create({"queue_name": "sdk-manage", "payload": {}})
    assert client.jobs.boost_priority(made.id, 7).new_priority == 7
    client.jobs.cancel(made.id)
    with pytest.raises(ConflictError):
        client.jobs.cancel(made.id)
    dead = dead_job(client, "sdk-manage")
    assert client.jobs.retry(dead).status == "pending"


def test_the_dead_letter_queue_is_listed_retried_and_purged(client: Any) -> None:
    first, second = dead_job(client, "sdk-dlq"), dead_job(client, "sdk-dlq")
    assert {job.id for job in client.jobs.dlq.list({"queue_name": "sdk-dlq"})} == {first, second}
    assert client.jobs.dlq.retry({"job_ids": [first]}).retried_jobs == [first]
    assert client.jobs.dlq.purge({"queue_name": "sdk-dlq", "confirm": True}).purged_count == 1


def test_a_queue_is_paused_resumed_configured_and_deleted(client: Any) -> None:
    client.jobs.create({"queue_name": "sdk-queue", "payload": {}})
    paused = client.queues.pause("sdk-queue", "maintenance")
    assert (paused.paused, paused.reason) == (True, "maintenance")
    assert client.jobs.claim({"queue_name": "sdk-queue", "worker_id": "w"}).jobs == []
    assert client.queues.resume("sdk-queue").resumed is True
    assert client.queues.update_config("sdk-queue", {"max_retries": 9, "settings": {"a": 1}}).max_retries == 9
    assert client.queues.get("sdk-queue").settings == {"a": 1}
    assert client.queues.get_stats("sdk-queue").pending_jobs == 1
    assert "sdk-queue" in {queue.queue_name for queue in client.queues.list()}
    client.queues.delete("sdk-queue", delete_jobs=True)
    with pytest.raises(NotFoundError):
        client.queues.get("sdk-queue")


def test_workers_register_beat_and_leave(client: Any) -> None:
    params = {"queue_name": "sdk-workers", "hostname": "h", "worker_id": "sdk-w", "metadata": {"a": 1}}
    assert client.workers.register(params).heartbeat_interval_secs == 10
    client.workers.heartbeat("sdk-w", {"current_jobs": 2, "status": "draining"})
    worker = client.workers.get("sdk-w")
    assert (worker.status, worker.current_jobs, worker.max_concurrency) == ("draining", 2, 5)
    assert worker.registered_at is not None
    assert "sdk-w" in {each.id for each in client.workers.list()}
    client.workers.deregister("sdk-w")
    assert client.workers.get("sdk-w").status == "offline"


def test_logging_in_and_out(server: DevServer, client: Any) -> None:
    tokens = client.auth.login({"api_key": server.api_key})
    assert client.auth.validate({"token": tokens.access_token}).valid is True
    assert client.auth.refresh({"refresh_token": tokens.refresh_token}).access_token
    with SpooledClient(access_token=tokens.access_token, base_url=server.url) as other:
        assert other.auth.me().queues == ["*"]
        other.auth.logout(tokens.refresh_token)
        with pytest.raises(AuthenticationError):
            other.auth.me()
    with pytest.raises(AuthenticationError):
        client.auth.refresh({"refresh_token": tokens.refresh_token})


def test_health_parses(client: Any) -> None:
    health = client.health.get()
    assert (health.status, health.database, health.cache) == ("healthy", True, True)
    assert client.health.liveness() is True
    assert client.health.readiness() is True


def test_refusals_arrive_as_the_sdks_errors(client: Any) -> None:
    with pytest.raises(NotFoundError):
        client.jobs.get("nobody")
    with pytest.raises(ValidationError) as caught:
        client.jobs.create({"queue_name": ".hidden", "payload": {}})
    assert isinstance(caught.value.details, list)
    assert caught.value.details[0]["field"] == "queue_name"


def test_a_lost_lease_and_a_repeated_complete_are_told_apart(client: Any) -> None:
    client.jobs.create({"queue_name": "sdk-leases", "payload": {}})
    job = claim(client, "sdk-leases")
    ack = {"worker_id": "w", "lease_id": job.lease_id}
    client.jobs.heartbeat(job.id, ack)
    with pytest.raises(ConflictError) as lost:
        client.jobs.complete(job.id, {**ack, "lease_id": "another"})
    assert is_lease_expired(lost.value)
    client.jobs.complete(job.id, ack)
    with pytest.raises(SpooledError) as repeated:
        client.jobs.complete(job.id, ack)
    assert not is_lease_expired(repeated.value)
    assert "already completed" in str(repeated.value).lower()


def test_its_worker_drains_a_queue(server: DevServer, client: Any) -> None:
    expected = {job_id: n for n, job_id in enumerate(server.client.bulk("sdk-drain", [{"n": n} for n in range(12)]))}
    worker = SpooledWorker(
        client, queue_name="sdk-drain", concurrency=4, poll_interval=0.02, worker_id="sdk-drainer", hostname="h"
    )
    done: set[str] = set()
    all_done = threading.Event()

    def note(event: Any) -> None:
        done.add(event.job_id)
        if len(done) == len(expected):
            all_done.set()

    def handle(job: Any) -> dict[str, int]:
        if job.payload["n"] == 3 and job.retry_count == 0:
            raise RuntimeError("once")
        return {"doubled": 2 * job.payload["n"]}

    worker.process(handle)
    worker.on("job:completed", note)
    running = threading.Thread(target=worker.start)
    running.start()
    try:
        assert all_done.wait(LIMIT_S), f"completed {len(done)} of {len(expected)} jobs"
    finally:
        worker.stop()
        running.join(LIMIT_S)
    assert not running.is_alive()
    for job_id, n in expected.items():
        job = server.client.job(job_id)
        assert (job["status"], job["result"], job["retry_count"]) == ("completed", {"doubled": 2 * n}, int(n == 3))
    drainer = client.workers.get("sdk-drainer")
    assert (drainer.status, drainer.jobs_processed, drainer.jobs_failed) == ("offline", 12, 1)
