"""The client against the embedded server, lenient as for older clients and strict as the service is.

Every body that is sent is also held against the request models of the official SDK, after the fields are taken out that
only the published guide knows; and the fields that the guide's examples send are looked for.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import httpx
import pytest
from spooled.types.jobs import ClaimJobsParams, CompleteJobParams, FailJobParams, JobHeartbeatParams
from spooled.types.workers import RegisterWorkerParams, WorkerHeartbeatParams

from spooled_supervisor import timing
from spooled_supervisor.api.rest import RestApi
from spooled_supervisor.api.values import Claim, HeartbeatAnswer, Registration, Settled
from spooled_supervisor.errors import ApiRefused, CredentialsRefused, LeaseLost
from spooled_supervisor.events import Events
from spooled_supervisor.job import Job
from tests.support.devserver import DevServer, Producer, dev_server

T = TypeVar("T")
LIMIT_S = 10.0
LEASE_S = 30

# Where the body goes to: the SDK's model, what only the guide knows, and what the guide's examples send.
MODELS: dict[str, tuple[Any, set[str], set[str]]] = {
    "/workers/register": (
        RegisterWorkerParams,
        {"id", "queue_names", "max_concurrent_jobs"},
        {"id", "queue_names", "max_concurrent_jobs", "hostname", "metadata"},
    ),
    "/workers/w-1/heartbeat": (
        WorkerHeartbeatParams,
        {"cpu_percent", "memory_percent"},
        {"status", "current_jobs", "cpu_percent", "memory_percent"},
    ),
    "/jobs/claim": (ClaimJobsParams, set(), {"queue_name", "worker_id", "limit"}),
    "/jobs/{id}/complete": (CompleteJobParams, set(), {"worker_id", "lease_id", "result"}),
    "/jobs/{id}/fail": (FailJobParams, {"reason", "no_retry", "retry"}, {"worker_id", "lease_id", "error", "reason"}),
    "/jobs/{id}/heartbeat": (JobHeartbeatParams, {"extension_seconds"}, {"extension_seconds"}),
    "/jobs/{id}/renew-lease": (JobHeartbeatParams, {"extension_seconds"}, {"extension_seconds"}),
}


class Checking(httpx.AsyncHTTPTransport):
    """Holds every body against both dialects before it is sent. `refuse` answers one route as if it did not exist."""

    def __init__(self, refuse: str = "") -> None:
        super().__init__()
        self.checked: list[str] = []
        self._refuse = refuse

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        route = self._route(request)
        if route in MODELS:
            model, only_guide, examples = MODELS[route]
            body = json.loads(await request.aread())
            assert examples <= body.keys(), f"{route}: {body}"
            assert body.get("lease_id", "") is not None, f"{route}: {body}"
            model(**{name: value for name, value in body.items() if name not in only_guide})
        self.checked.append(route)
        if self._refuse and route.endswith(self._refuse):
            return httpx.Response(404, stream=httpx.ByteStream(b""))
        return await super().handle_async_request(request)

    def _route(self, request: httpx.Request) -> str:
        path = request.url.path.removeprefix("/api/v1")
        parts = path.split("/")
        return f"/jobs/{{id}}/{parts[3]}" if parts[1] == "jobs" and len(parts) == 4 else path


@pytest.fixture(scope="module", params=[False, True], ids=["lenient", "strict"])
def running(request: pytest.FixtureRequest) -> Iterator[DevServer]:
    with dev_server(
        strict=request.param, min_lease_s=1, lease_recovery_interval_s=0.05, retry_base_s=0.01, heartbeat_interval_s=7
    ) as server:
        yield server


@pytest.fixture
def server(running: DevServer) -> Iterator[DevServer]:
    """One server for all tests, and for each a producer of its own, whose connections end with it."""
    with Producer(running.url, running.api_key) as client:
        yield dataclasses.replace(running, client=client)


@pytest.fixture
def queue_name(request: pytest.FixtureRequest) -> str:
    """A queue that no other test uses."""
    return f"q{abs(hash(request.node.nodeid))}"


def run(server: DevServer, main: Callable[[RestApi], Coroutine[Any, Any, T]], **options: Any) -> T:
    async def inside() -> T:
        options.setdefault("transport", Checking())
        key = options.pop("api_key", server.api_key)
        async with RestApi(
            base_url=server.url, api_key=lambda: key, worker_id="w-1", events=Events(), **options
        ) as api:
            return await main(api)

    with asyncio.Runner(loop_factory=timing.new_event_loop) as runner:
        return runner.run(inside())


async def register(api: RestApi, queue_name: str = "q") -> Registration:
    return await api.register(
        queue_names=[queue_name, "another"],
        hostname="a host!",
        worker_type="python",
        version="1.2.3",
        max_concurrency=4,
        metadata={"region": "eu"},
        timeout_s=LIMIT_S,
    )


async def heartbeat(api: RestApi) -> HeartbeatAnswer:
    return await api.heartbeat(
        status="draining",
        current_jobs=2,
        cpu_percent=41.26,
        memory_percent=12.0,
        metadata={"host_cpu_percent": 50.0},
        timeout_s=LIMIT_S,
    )


async def claim(api: RestApi, queue_name: str, limit: int = 1, lease_s: int = LEASE_S) -> Claim:
    return await api.claim(queue_name, limit=limit, lease_duration_s=lease_s, timeout_s=LIMIT_S)


async def take(api: RestApi, queue_name: str, lease_s: int = LEASE_S) -> Job:
    (job,) = (await claim(api, queue_name, lease_s=lease_s)).jobs
    return job


async def claimed_in_time(api: RestApi, queue_name: str) -> tuple[Job, ...]:
    """The first jobs that come; a retry waits for its back-off at the server, of which nothing tells."""
    deadline = timing.now() + LIMIT_S
    while timing.now() < deadline:
        if jobs := (await claim(api, queue_name)).jobs:
            return jobs
        await asyncio.sleep(0.01)
    return ()


def leased_calls(api: RestApi, job: Job) -> list[Callable[[], Awaitable[object]]]:
    return [
        lambda: complete(api, job),
        lambda: fail(api, job),
        lambda: api.renew(job, deadline=timing.now() + LIMIT_S),
    ]


async def complete(api: RestApi, job: Job, result: bytes = b"null", tries_before: int = 0) -> Settled:
    return await api.complete(job, result, tries_before=tries_before, deadline=timing.now() + LIMIT_S)


async def fail(
    api: RestApi, job: Job, error: str = "boom", *, retryable: bool = True, tries_before: int = 0
) -> Settled:
    deadline = timing.now() + LIMIT_S
    return await api.fail(job, error, retryable=retryable, tries_before=tries_before, deadline=deadline)


# --- the worker ------------------------------------------------------------------------------------------------------


def test_a_worker_registers_beats_and_leaves(server: DevServer) -> None:
    async def main(api: RestApi) -> None:
        assert await register(api) == Registration("w-1", 7.0)
        assert await register(api) == Registration("w-1", 7.0)
        answer = await heartbeat(api)
        assert answer.known
        assert not answer.commands
        (worker,) = server.client.workers()
        assert (worker["id"], worker["hostname"], worker["status"]) == ("w-1", "a-host", "draining")
        assert worker["current_jobs"] == 2
        await api.deregister(timeout_s=LIMIT_S)
        await api.deregister(timeout_s=LIMIT_S)

    run(server, main)


def test_an_unknown_worker_is_unknown(server: DevServer) -> None:
    async def main(api: RestApi) -> None:
        assert not (await heartbeat(api)).known
        await api.deregister(timeout_s=LIMIT_S)

    async def under_another_name(api: RestApi) -> None:
        api._known_as = "never-seen"
        await main(api)

    run(server, under_another_name)


def test_a_wrong_key_is_refused(server: DevServer) -> None:
    async def main(api: RestApi) -> None:
        with pytest.raises(CredentialsRefused):
            await register(api)

    run(server, main, api_key="sp_test_not_the_key_of_this_server")


# --- jobs ------------------------------------------------------------------------------------------------------------


def test_a_job_is_claimed_renewed_and_completed(server: DevServer, queue_name: str) -> None:
    job_id = server.client.create(queue_name, {"n": [1, 2.5, None, "é"]}, timeout_seconds=60, max_retries=1)

    async def main(api: RestApi) -> None:
        job = await take(api, queue_name)
        assert (job.id, job.queue_name, job.retry_count, job.max_retries) == (job_id, queue_name, 0, 1)
        assert (job.timeout_s, job.lease_duration_s) == (60.0, 30.0)
        assert json.loads(job.payload) == {"n": [1, 2.5, None, "é"]}
        assert job.lease_id
        for _ in range(2):
            assert job.requested_at < await api.renew(job, deadline=timing.now() + LIMIT_S) <= timing.now()
        assert await api.progress(job, 33.3, "a third", timeout_s=LIMIT_S)
        assert await complete(api, job, b'{"pages": [1, 2]}') == Settled(already=False)

    run(server, main)
    job = server.client.job(job_id)
    assert (job["status"], job["result"]) == ("completed", {"pages": [1, 2]})


@pytest.mark.parametrize("payload", [None, [], "text", 0, {"deep": {"er": [{}]}}])
def test_any_payload_and_any_result(server: DevServer, queue_name: str, payload: Any) -> None:
    job_id = server.client.create(queue_name, payload)

    async def main(api: RestApi) -> None:
        job = await take(api, queue_name)
        assert json.loads(job.payload) == payload
        await complete(api, job, job.payload)

    run(server, main)
    assert server.client.job(job_id)["result"] == payload


def test_nothing_to_do_is_an_empty_claim(server: DevServer, queue_name: str) -> None:
    async def main(api: RestApi) -> None:
        assert await claim(api, queue_name, limit=100) == Claim()

    run(server, main)


def test_several_jobs_are_claimed_at_once(server: DevServer, queue_name: str) -> None:
    ids = server.client.bulk(queue_name, [{"n": n} for n in range(5)])

    async def main(api: RestApi) -> None:
        jobs = (await claim(api, queue_name, limit=3)).jobs + (await claim(api, queue_name, limit=3)).jobs
        assert [job.id for job in jobs] == ids
        assert len({job.lease_id for job in jobs}) == 5

    run(server, main)


@pytest.mark.parametrize("error", ["boom", "", "x" * 5000, "nul \x00 and \ud800", "\U0001f600" * 3000])
def test_a_failed_job_comes_back(server: DevServer, queue_name: str, error: str) -> None:
    job_id = server.client.create(queue_name, None, max_retries=1)

    async def main(api: RestApi) -> None:
        assert await fail(api, await take(api, queue_name), error) == Settled(already=False, will_retry=True)
        await asyncio.to_thread(server.client.wait_for, job_id, "pending", "scheduled")
        jobs = await claimed_in_time(api, queue_name)
        assert (jobs[0].retry_count, jobs[0].is_last_attempt) == (1, True)
        assert await fail(api, jobs[0], error, retryable=False) == Settled(already=False, will_retry=False)

    run(server, main)
    assert server.client.job(job_id)["status"] == "deadletter"


def test_reports_repeated_are_known_to_have_landed(server: DevServer, queue_name: str) -> None:
    server.client.bulk(queue_name, [1, 2])

    async def main(api: RestApi) -> None:
        first, second = (await claim(api, queue_name, limit=2)).jobs
        await complete(api, first)
        assert await complete(api, first, tries_before=1) == Settled(already=True)
        with pytest.raises(LeaseLost):
            await complete(api, first)
        await fail(api, second)
        assert await fail(api, second, tries_before=1) == Settled(already=True)

    run(server, main)


def test_a_lease_that_ran_out_is_lost_to_every_call(server: DevServer, queue_name: str) -> None:
    job_id = server.client.create(queue_name, None)

    async def main(api: RestApi) -> None:
        job = await take(api, queue_name, lease_s=1)
        await asyncio.to_thread(server.client.wait_for, job_id, "pending")
        again = await take(api, queue_name)
        assert again.id == job.id
        assert again.lease_id != job.lease_id
        for call in leased_calls(api, job):
            with pytest.raises(LeaseLost):
                await call()
        await complete(api, again)

    run(server, main, transport=None)  # the models do not allow so short a lease


def test_a_job_that_does_not_exist_is_lost(server: DevServer) -> None:
    async def main(api: RestApi) -> None:
        ghost = Job("00000000-0000-4000-8000-000000000000", "q", "lease", b"null", 0, 0, 1.0, 30.0, 0.0)
        for call in leased_calls(api, ghost):
            with pytest.raises(LeaseLost):
                await call()

    run(server, main)


@pytest.mark.parametrize("refused", ["/heartbeat", "/renew-lease"])
def test_either_route_to_renew_will_do(server: DevServer, queue_name: str, refused: str) -> None:
    server.client.create(queue_name, None)
    transport = Checking(refuse=f"{{id}}{refused}")

    async def main(api: RestApi) -> None:
        job = await take(api, queue_name)
        for _ in range(2):
            await api.renew(job, deadline=timing.now() + LIMIT_S)

    run(server, main, transport=transport)
    heartbeats = ["/jobs/{id}/heartbeat"]
    fallback = [*heartbeats, "/jobs/{id}/renew-lease", "/jobs/{id}/renew-lease"]
    assert transport.checked[1:] == (fallback if refused == "/heartbeat" else heartbeats * 2)


def test_a_queue_name_that_is_none_is_refused(server: DevServer) -> None:
    async def main(api: RestApi) -> None:
        with pytest.raises(ApiRefused):
            await claim(api, "no/such name")

    run(server, main)
