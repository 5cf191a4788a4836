"""How soon a job starts on an idle daemon: at once by the event stream, within the poll interval without it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import STUB_KEY, Site, stub_worker
from tests.support.daemon import Daemon, wait_until
from tests.support.devserver import DevServer, Producer, dev_server
from tests.support.stub_api import Reply, StubApi
from tests.support.transports import ASKED_FOR_JOBS

MEDIAN_LIMIT_S = 0.05
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n: connected\n\n"
POLL_S = 1.0
SLACK_S = 1.0
"""For a machine with more to do than this test."""


def latencies(site: Site, worker: Daemon, count: int) -> list[float]:
    """From the request that makes a job to the handler's first line; each time on an idle daemon."""
    found = []
    for _ in range(count):
        began = time.monotonic()
        job_id = site.add("ok")
        found.append(worker.ledger.wait_for("start", job=job_id)[0]["at"] - began)
        site.end(job_id)
    return found


def test_with_the_stream_a_job_starts_long_before_the_next_poll(site: Site) -> None:
    with site.worker(options=["--poll-interval", "5s"]) as worker:
        worker.wait_until_running()
        latencies(site, worker, 1)  # the stream may not be up yet
        found = latencies(site, worker, 20)
        assert statistics.median(found) < MEDIAN_LIMIT_S, sorted(round(s, 4) for s in found)
        assert max(found) < 5.0


@ASKED_FOR_JOBS
def test_without_the_stream_a_job_starts_within_the_poll_interval(site: Site) -> None:
    with site.worker(options=["--poll-interval", "1s", "--no-events"]) as worker:
        worker.wait_until_running()
        found = latencies(site, worker, 6)
        assert max(found) < POLL_S * 1.1 + SLACK_S
        assert statistics.median(found) > 0.1, "nobody told it"


def test_a_crowd_of_jobs_is_a_handful_of_claims(site: Site) -> None:
    with site.worker(options=["--poll-interval", "5s"]) as worker:
        worker.wait_until_running()
        latencies(site, worker, 2)
        gate = site.tmp_path / "gate"
        held = [site.add("gate", file=str(gate)) for _ in range(2)]
        for job_id in held:
            worker.ledger.wait_for("start", job=job_id)

        def claims() -> float:
            return sum(
                value
                for name, value in worker.metrics().items()
                if name.startswith("spooled_supervisor_api_requests_total") and 'operation="claim"' in name
            )

        before = claims()
        jobs = site.client.bulk(site.prefix + "q", [{"mode": "ok"} for _ in range(200)])
        assert claims() - before <= 2, "all children are busy: nobody is asked"
        gate.touch()
        for job_id in jobs:
            assert site.end(job_id)["status"] == "completed"
        assert claims() - before <= 220


# --- a stream that does not work --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [
        Reply.error(404),
        Reply.error(503),
        Reply.html(),
        Reply.json({"events": []}),
        Reply(raw=b"garbage\r\n\r\n"),
        Reply(raw=STREAM),
        Reply(hang="before commit"),
        Reply(reset="before commit"),
    ],
    ids=["absent", "HTTP 503", "a web page", "JSON", "garbage", "cut at once", "never answers", "reset"],
)
def test_whatever_is_wrong_with_the_stream_a_job_starts_within_the_poll_interval(stub: StubApi, reply: Reply) -> None:
    stub.on("unknown", reply, times=None)
    with stub_worker(stub, options=["--poll-interval", "1s"]) as worker:
        worker.wait_until_running()
        stub.wait_for("unknown")
        for _ in range(2):
            began = time.monotonic()
            job_id = stub.add_job(payload={"mode": "ok"})
            started = worker.ledger.wait_for("start", job=job_id)[0]["at"]
            assert started - began < POLL_S * 1.1 + SLACK_S
            wait_until(lambda: stub.completed.get(job_id), "its outcome")  # noqa: B023
        assert worker.health()[0] == 200
        assert worker.readyz()[0] == 200


def test_a_stream_that_fails_again_and_again_does_not_make_the_daemon_unhealthy(stub: StubApi) -> None:
    stub.on("unknown", Reply.error(503), times=None)
    with stub_worker(stub) as worker:
        worker.wait_until_running()
        stub.wait_for("unknown", 4, timeout_s=20.0)
        assert worker.health()[0] == 200
        assert len(worker.events("api_troubled", operation="events")) == 1


def test_no_events_never_asks_for_the_stream(stub: StubApi) -> None:
    with stub_worker(stub, options=["--no-events"]) as worker:
        worker.wait_until_running()
        stub.wait_for("claim", 5)
        assert stub.of("unknown") == []


def test_the_stream_is_asked_for_with_the_key(stub: StubApi) -> None:
    with stub_worker(stub) as worker:
        worker.wait_until_running()
        (request, *_) = stub.wait_for("unknown")
        assert request.path.startswith("/api/v1/events?events=job.created")
        assert request.headers["authorization"] == f"Bearer {STUB_KEY}"


# --- a service that comes back ----------------------------------------------------------------------------------------


@pytest.fixture
def own_server() -> Iterator[DevServer]:
    with dev_server() as server:
        yield server


def test_after_a_restart_of_the_service_the_stream_works_again(own_server: DevServer, site: Site) -> None:
    """The jobs of the embedded server are in memory: it is killed with nothing in it."""
    with Producer(own_server.url, own_server.api_key) as client:
        there = Site(own_server, client, site.tmp_path)
        with there.worker(options=["--poll-interval", "5s"]) as worker:
            worker.wait_until_running()
            latencies(there, worker, 2)
            own_server.kill()
            worker.wait_for_event("api_troubled", operation="events")
            with dev_server(port=own_server.port, api_key=own_server.api_key) as again:
                worker.wait_for_event("api_recovered", operation="events", timeout_s=40.0)
                with Producer(again.url, again.api_key) as producer:
                    back = Site(again, producer, site.tmp_path)
                    back.prefix = there.prefix
                    latencies(back, worker, 2)
                    found = latencies(back, worker, 8)
                    assert statistics.median(found) < MEDIAN_LIMIT_S, found
                    assert worker.stop() == 0
