"""The event stream, as a listener reads it from a running server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from spooled_supervisor.devserver.errors import ApiError
from spooled_supervisor.devserver.hub import MAX_BACKLOG, MAX_STREAMS, EventFilter, EventHub, EventKind
from tests.support.devserver import DevServer, dev_server, local_server


@pytest.fixture(scope="module")
def server() -> Iterator[DevServer]:
    with dev_server(retry_base_s=0, event_ping_s="50ms", event_health_s="80ms") as server:
        yield server


class Listener:
    """An open stream, read frame by frame."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines

    def frame(self) -> list[str]:
        """The lines up to the next blank one."""
        frame = []
        for line in self._lines:
            if not line:
                break
            frame.append(line)
        return frame

    def event(self) -> tuple[str, dict[str, Any]]:
        """The next frame that is no comment: the name, and the data as sent."""
        while True:
            frame = self.frame()
            assert frame, "the stream ended"
            if not frame[0].startswith(":"):
                name, data = frame
                return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


@contextlib.contextmanager
def listening(server: DevServer, query: str = "events=job.created,job.status,job.completed,job.failed") -> Any:
    # A client of its own: beside an open stream the server's would need a second connection, and keep it.
    authorized = {"Authorization": f"Bearer {server.api_key}"}
    with (
        httpx.Client(base_url=server.client.http.base_url, headers=authorized, trust_env=False) as client,
        client.stream("GET", f"/events?{query}") as response,
    ):
        assert response.status_code == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        listener = Listener(response.iter_lines())
        assert listener.frame() == [": connected"]
        yield listener


def claim(server: DevServer, queue_name: str) -> dict[str, Any]:
    (job,) = server.client.call("POST", "/jobs/claim", {"queue_name": queue_name, "worker_id": "w"})["jobs"]
    return dict(job)


def test_a_jobs_life_is_told_in_events(server: DevServer) -> None:
    with listening(server) as listener:
        job_id = server.client.create("life", priority=3)
        claim(server, "life")
        server.client.call("POST", f"/jobs/{job_id}/fail", {"error": "boom"})
        claim(server, "life")
        server.client.call("POST", f"/jobs/{job_id}/complete", {"result": {"lines": "a\nb"}})
        about = {"job_id": job_id, "queue_name": "life"}
        expected = [
            ("job.created", "JobCreated", {**about, "priority": 3}),
            ("job.status", "JobStatusChange", {**about, "old_status": "processing", "new_status": "pending"}),
            ("job.failed", "JobFailed", {**about, "error": "boom", "retry_count": 1}),
            ("job.completed", "JobCompleted", {**about, "result": {"lines": "a\nb"}}),
        ]
        for name, type_name, data in expected:
            got_name, got = listener.event()
            assert (got_name, got["type"]) == (name, type_name)
            assert got["data"].pop("timestamp")
            got["data"].pop("duration_ms", None)
            assert got["data"] == data


def test_a_result_with_line_breaks_stays_on_one_line(server: DevServer) -> None:
    with listening(server, "events=job.completed") as listener:
        job_id = server.client.create("pretty")
        claim(server, "pretty")
        content = b'{"result": {\n  "a": 1,\r\n  "b": "x\\ny"\n}}'
        headers = {"Content-Type": "application/json"}
        server.client.http.post(f"/jobs/{job_id}/complete", content=content, headers=headers).raise_for_status()
        assert listener.event()[1]["data"]["result"] == {"a": 1, "b": "x\ny"}


def test_cancelling_and_manual_retries_are_told(server: DevServer) -> None:
    with listening(server, "events=job.status") as listener:
        cancelled = server.client.create("manual")
        server.client.call("DELETE", f"/jobs/{cancelled}")
        dead = server.client.create("manual", max_retries=0)
        claim(server, "manual")
        server.client.call("POST", f"/jobs/{dead}/fail", {"error": "boom"})
        server.client.call("POST", f"/jobs/{dead}/retry")
        changes = [listener.event()[1]["data"] for _ in range(3)]
        seen = [(change["old_status"], change["new_status"]) for change in changes]
        assert seen == [("pending", "cancelled"), ("processing", "deadletter"), ("deadletter", "pending")]


def test_bulk_jobs_are_told_one_by_one_and_known_ones_not_at_all(server: DevServer) -> None:
    with listening(server, "queue=bulk&events=job.created") as listener:
        jobs = [{"payload": 1, "idempotency_key": "twice"}] * 2
        server.client.call("POST", "/jobs/bulk", {"queue_name": "bulk", "jobs": jobs})
        last = server.client.create("bulk")
        listener.event()
        assert listener.event()[1]["data"]["job_id"] == last


def test_a_listener_may_ask_for_one_queue_or_one_job(server: DevServer) -> None:
    with listening(server, "queue=mine&events=job.created") as listener:
        server.client.create("theirs")
        mine = server.client.create("mine")
        assert listener.event()[1]["data"]["job_id"] == mine
    with listening(server, f"job_id={mine}&events=job.status") as listener:
        server.client.call("DELETE", f"/jobs/{server.client.create('mine')}")
        server.client.call("DELETE", f"/jobs/{mine}")
        assert listener.event()[1]["data"]["job_id"] == mine


def test_an_unfiltered_stream_tells_the_servers_health(server: DevServer) -> None:
    with listening(server, "queue=quiet") as listener:
        name, data = listener.event()
        assert (name, data["type"]) == ("system.health", "SystemHealth")
        assert data["data"].keys() == {"database", "redis", "timestamp"}


def test_a_quiet_stream_is_kept_alive_by_comments(server: DevServer) -> None:
    with listening(server, "events=job.created&queue=quiet") as listener:
        assert listener.frame() == [": ping"]
        assert listener.frame() == [": ping"]


def test_a_token_opens_a_stream_from_the_query(server: DevServer) -> None:
    token = server.client.call("POST", "/auth/login", {"api_key": server.api_key})["access_token"]
    headers = {"Authorization": ""}
    with server.client.http.stream("GET", f"/events?token={token}", headers=headers) as response:
        assert response.status_code == 401  # an empty header is a header
    del server.client.http.headers["Authorization"]
    try:
        with listening(server, f"token={token}") as listener:
            assert listener.frame()
    finally:
        server.client.http.headers["Authorization"] = f"Bearer {server.api_key}"


def test_listeners_that_left_make_room_for_others(server: DevServer) -> None:
    for _ in range(MAX_STREAMS + 5):
        with listening(server):
            pass


def test_a_look_at_the_head_alone_opens_no_stream(server: DevServer) -> None:
    authorized = {"Authorization": f"Bearer {server.api_key}"}
    with httpx.Client(base_url=server.client.http.base_url, headers=authorized, timeout=2, trust_env=False) as client:
        head = client.head("/events")
        assert (head.status_code, head.headers["Content-Type"][:17]) == (200, "text/event-stream")
        assert client.get("/jobs/stats").status_code == 200  # on the same connection, so the answer has ended


def test_a_queue_filter_that_no_queue_could_have_is_refused() -> None:
    with local_server() as server:
        assert server.api("GET", "/events?queue=a/b").status_code == 400


# The hub, without a server


def test_there_is_a_limit_to_the_number_of_streams() -> None:
    async def scenario() -> None:
        hub = EventHub(ping_s=1, health_s=1)
        subscriptions = [hub.subscribe(EventFilter()) for _ in range(MAX_STREAMS)]
        with pytest.raises(ApiError, match="event streams"):
            hub.subscribe(EventFilter())
        hub.unsubscribe(subscriptions[0])
        hub.subscribe(EventFilter())

    asyncio.run(scenario())


def test_a_listener_that_does_not_keep_up_loses_its_oldest_events() -> None:
    async def scenario() -> None:
        hub = EventHub(ping_s=1, health_s=1)
        subscription = hub.subscribe(EventFilter())
        for number in range(MAX_BACKLOG + 5):
            hub.publish(EventKind.JOB_CREATED, 0.0, job_id=str(number), queue_name="q", priority=0)
        assert len(subscription.frames) == MAX_BACKLOG
        assert b'"job_id":"5"' in subscription.frames[0]

    asyncio.run(scenario())


def test_closing_the_hub_ends_every_stream() -> None:
    async def scenario() -> None:
        hub = EventHub(ping_s=60, health_s=60)
        subscription = hub.subscribe(EventFilter())
        stream = hub.stream(subscription, 0.0)
        assert await anext(stream) == b": connected\n\n"
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        hub.close()
        with pytest.raises(StopAsyncIteration):
            await waiting

    asyncio.run(scenario())
