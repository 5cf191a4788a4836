"""The gRPC clients against the embedded server: unary calls, the job stream, ProcessJobs, and REST beside them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import select
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest

from spooled_supervisor import timing
from spooled_supervisor.api.grpc import MAX_REQUEST_BYTES, GrpcApi, JobStream, host_of
from spooled_supervisor.api.grpc_process import (
    MAX_STREAMS,
    PROXY_VARIABLES,
    WAITING_PER_STREAM,
    GrpcProcessApi,
    is_by_proxy,
)
from spooled_supervisor.api.rest import RestApi
from spooled_supervisor.api.transports import FINAL_TRIES, BothApi
from spooled_supervisor.api.values import NotCarried, Settled, UnreadableJob
from spooled_supervisor.errors import ApiUnavailable, ConfigError, CredentialsRefused, LeaseLost, ProtocolError
from spooled_supervisor.events import ApiRequestFinished, Events
from spooled_supervisor.job import Job
from spooled_supervisor.proto import spooled_pb2 as pb
from tests.chaos.grpc_proxy import GrpcFaultProxy
from tests.chaos.proxy import Faults
from tests.support import certificates
from tests.support.daemon import wait_until
from tests.support.devserver import DevServer, Producer, dev_server
from tests.support.relay import Relay

T = TypeVar("T")
LIMIT_S = 10.0
LEASE_S = 30
KEY = "sp_test_0123456789"


class ByLibrary(GrpcProcessApi):
    """As where the environment names a proxy."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._target = None


PROCESS_KINDS: dict[str, type[GrpcProcessApi]] = {"process": GrpcProcessApi, "process by the library": ByLibrary}
KINDS: dict[str, type[GrpcApi]] = {"unary": GrpcApi, **PROCESS_KINDS}


@pytest.fixture(scope="module")
def running() -> Iterator[DevServer]:
    with dev_server(
        grpc_port=0,
        min_lease_s=1,
        lease_recovery_interval_s=0.05,
        retry_base_s=0.01,
        heartbeat_interval_s=7,
        stream_poll_s=0.05,
    ) as server:
        yield server


@pytest.fixture
def server(running: DevServer) -> Iterator[DevServer]:
    with Producer(running.url, running.api_key) as client:
        yield dataclasses.replace(running, client=client)


@pytest.fixture
def queue_name(request: pytest.FixtureRequest) -> str:
    return f"q{abs(hash(request.node.nodeid))}"


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> type[GrpcApi]:
    return KINDS[request.param]


@pytest.fixture(params=PROCESS_KINDS)
def process_kind(request: pytest.FixtureRequest) -> type[GrpcProcessApi]:
    return PROCESS_KINDS[request.param]


LOST_STATUS = "Internal error from Core"
"""What grpc.aio makes of any status that arrives while a write is on its way: the next attempt is told the real one."""


def run(
    server: DevServer, main: Callable[[Any], Coroutine[Any, Any, T]], kind: type[GrpcApi] = GrpcApi, **options: Any
) -> T:
    async def inside() -> T:
        key = options.pop("api_key", server.api_key)
        events = options.pop("events", Events())
        address = options.pop("address", server.grpc_address)
        async with kind(address=address, api_key=lambda: key, worker_id="w-1", events=events, **options) as api:
            return await main(api)

    with asyncio.Runner(loop_factory=timing.new_event_loop) as runner:
        return runner.run(inside())


def by_both(
    server: DevServer, main: Callable[[BothApi], Coroutine[Any, Any, T]], *, by_grpc: bool, address: str = ""
) -> T:
    async def inside() -> T:
        common: dict[str, Any] = {"api_key": lambda: server.api_key, "worker_id": "w-1", "events": Events()}
        rest = RestApi(base_url=server.url, **common)
        async with BothApi(rest, GrpcApi(address=address or server.grpc_address, **common), by_grpc=by_grpc) as api:
            return await main(api)

    with asyncio.Runner(loop_factory=timing.new_event_loop) as runner:
        return runner.run(inside())


def on_a_stranger(
    methods: dict[str, Any],
    main: Callable[[Any], Coroutine[Any, Any, None]],
    kind: type[GrpcApi] = GrpcApi,
    *,
    host: str = "127.0.0.1",
    credentials: grpc.ServerCredentials | None = None,
    options: Sequence[tuple[str, int]] = (),
    **settings: Any,
) -> None:
    """Against a server of these methods of QueueService, whose messages are bytes."""

    async def inside() -> None:
        server = grpc.aio.server(options=options)
        handlers = grpc.method_handlers_generic_handler("spooled.v1.QueueService", methods)
        server.add_generic_rpc_handlers((handlers,))
        if credentials is None:
            port = server.add_insecure_port(f"{host}:0")
        else:
            port = server.add_secure_port(f"{host}:0", credentials)
        await server.start()
        common: dict[str, Any] = {"api_key": lambda: KEY, "worker_id": "w", "events": Events()}
        try:
            async with kind(address=f"{host}:{port}", **{**common, **settings}) as api:
                await main(api)
        finally:
            await server.stop(0)

    with asyncio.Runner(loop_factory=timing.new_event_loop) as runner:
        runner.run(inside())


async def claimed(api: Any, queue_name: str, limit: int = 1) -> tuple[Job, ...]:
    claim = await api.claim(queue_name, limit=limit, lease_duration_s=LEASE_S, timeout_s=LIMIT_S)
    return tuple(claim.jobs)


def soon() -> float:
    return timing.now() + LIMIT_S


# --- unary calls and their like through the stream --------------------------------------------------------------------


def test_a_job_is_claimed_renewed_and_completed(server: DevServer, kind: type[GrpcApi], queue_name: str) -> None:
    payload = {"n": 1, "x": 2.5, "list": [None, True, "text", {"deep": []}]}
    job_id = server.client.create(queue_name, payload, max_retries=2, timeout_seconds=60)

    async def main(api: GrpcApi) -> None:
        before = timing.now()
        (job,) = await claimed(api, queue_name, 5)
        assert (job.id, job.queue_name, job.retry_count, job.max_retries, job.timeout_s) == (
            job_id,
            queue_name,
            0,
            2,
            60,
        )
        assert (job.lease_duration_s, before <= job.requested_at <= timing.now()) == (LEASE_S, True)
        assert json.loads(job.payload) == payload
        started_at = await api.renew(job, deadline=soon())
        assert job.requested_at <= started_at <= timing.now()
        settled = await api.complete(job, b'{"sum":3}', tries_before=0, deadline=soon())
        assert settled == Settled(already=False)
        again = await api.complete(job, b'{"sum":3}', tries_before=1, deadline=soon())
        assert again == Settled(already=True)

    run(server, main, kind)
    assert server.client.job(job_id)["result"] == {"sum": 3}


def test_several_jobs_are_claimed_and_none_more_than_there_are(
    server: DevServer, kind: type[GrpcApi], queue_name: str
) -> None:
    ids = set(server.client.bulk(queue_name, [{"n": n} for n in range(3)]))

    async def main(api: GrpcApi) -> set[str]:
        seen: list[str] = []
        for limit in (2, 5, 5, 5):  # over a stream a claim may give less than there is
            jobs = await claimed(api, queue_name, limit)
            assert len(jobs) <= limit
            seen += [job.id for job in jobs]
        assert await claimed(api, queue_name, 5) == ()
        assert len(seen) == len(set(seen))
        return set(seen)

    assert run(server, main, kind) == ids


@pytest.mark.parametrize(("is_final", "status"), [(True, "deadletter"), (False, "pending")])
def test_a_failure_says_whether_it_is_final(
    server: DevServer, kind: type[GrpcApi], queue_name: str, is_final: bool, status: str
) -> None:
    job_id = server.client.create(queue_name, {}, max_retries=3)

    async def main(api: GrpcApi) -> Settled:
        (job,) = await claimed(api, queue_name)
        return await api.fail(job, "boom", retryable=not is_final, tries_before=0, deadline=soon())

    assert run(server, main, kind) == Settled(already=False, will_retry=not is_final)
    assert server.client.job(job_id)["status"] == status


def test_a_repeated_failure_that_had_landed_is_told_so(server: DevServer, kind: type[GrpcApi], queue_name: str) -> None:
    server.client.create(queue_name, {}, max_retries=0)

    async def main(api: GrpcApi) -> Settled:
        (job,) = await claimed(api, queue_name)
        await api.fail(job, "boom", retryable=True, tries_before=0, deadline=soon())
        return await api.fail(job, "boom", retryable=True, tries_before=1, deadline=soon())

    assert run(server, main, kind).already


def test_a_lease_that_is_over_is_lost(server: DevServer, kind: type[GrpcApi], queue_name: str) -> None:
    server.client.create(queue_name, {})

    async def main(api: GrpcApi) -> None:
        claim = await api.claim(queue_name, limit=1, lease_duration_s=1, timeout_s=LIMIT_S)
        (job,) = claim.jobs
        await asyncio.sleep(1.2)
        with pytest.raises(LeaseLost):
            await api.renew(job, deadline=soon())
        with pytest.raises(LeaseLost):
            await api.complete(job, b"{}", tries_before=0, deadline=soon())
        with pytest.raises(LeaseLost):
            await api.fail(job, "late", retryable=True, tries_before=0, deadline=soon())

    run(server, main, kind)


@pytest.mark.parametrize("result", [b"null", b"[1]", b'"text"', b'{"n":9007199254740993}'])
def test_a_result_that_grpc_cannot_carry_is_not_sent(server: DevServer, queue_name: str, result: bytes) -> None:
    job_id = server.client.create(queue_name, {})

    async def main(api: GrpcApi) -> None:
        (job,) = await claimed(api, queue_name)
        with pytest.raises(NotCarried):
            await api.complete(job, result, tries_before=0, deadline=soon())
        with pytest.raises(ProtocolError):
            await api.complete(job, b"{", tries_before=0, deadline=soon())

    run(server, main)
    assert server.client.job(job_id)["status"] == "processing"


def test_a_wrong_key_is_a_matter_of_credentials(server: DevServer, kind: type[GrpcApi], queue_name: str) -> None:
    async def main(api: GrpcApi) -> str:
        for _ in range(20):
            try:
                await claimed(api, queue_name)
            except CredentialsRefused as refused:
                return str(refused)
            except ApiUnavailable as unavailable:  # a stream that is refused during its first write: grpc loses why
                if LOST_STATUS not in str(unavailable):
                    raise
        return "never told"

    assert "gRPC UNAUTHENTICATED" in run(server, main, kind, api_key="sp_test_wrong_0123456789")


def test_a_server_that_is_not_there_is_unavailable(server: DevServer, kind: type[GrpcApi], queue_name: str) -> None:
    with pytest.raises(ApiUnavailable):
        run(server, lambda api: claimed(api, queue_name), kind, address="127.0.0.1:9")


def test_a_deadline_that_has_passed_sends_nothing(server: DevServer, kind: type[GrpcApi], queue_name: str) -> None:
    server.client.create(queue_name, {})

    async def main(api: GrpcApi) -> None:
        with pytest.raises(ApiUnavailable):
            await api.claim(queue_name, limit=1, lease_duration_s=LEASE_S, timeout_s=-1.0)

    run(server, main, kind)
    assert server.client.stats(queue_name)["pending"] == 1


def test_another_host_than_this_machine_gets_tls(server: DevServer) -> None:
    """The embedded server speaks plain text only: whoever greets it with TLS does not get through."""
    port = server.grpc_address.rpartition(":")[2]
    with pytest.raises(ApiUnavailable):
        run(server, lambda api: claimed(api, "q"), address=f"127.0.0.2:{port}")


def test_a_bad_ca_file_is_refused_at_once(server: DevServer, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="CA file"):
        run(server, lambda api: claimed(api, "q"), address="example.org:443", ca_file=tmp_path / "none.pem")


@pytest.mark.parametrize(
    ("address", "host"), [("localhost:1", "localhost"), ("[::1]:50051", "::1"), ("A.example:443", "a.example")]
)
def test_the_host_of_an_address(address: str, host: str) -> None:
    assert host_of(address) == host


def test_requests_are_counted_by_operation_and_nearest_status(server: DevServer, queue_name: str) -> None:
    events, seen = Events(), []
    events.subscribe(lambda event: seen.append((event.operation, event.status)), ApiRequestFinished)

    async def main(api: GrpcApi) -> None:
        await claimed(api, queue_name)
        with pytest.raises(LeaseLost):
            await api.renew(Job("x", queue_name, "l", b"", 0, 0, 1.0, 30.0, 0.0), deadline=soon())

    run(server, main, events=events)
    assert seen == [("claim", "200"), ("renew", "404")]


# --- the worker -------------------------------------------------------------------------------------------------------


async def register(api: Any) -> Any:
    return await api.register(
        queue_names=["q", "another"],
        hostname="a host!",
        worker_type="python",
        version="1.2.3",
        max_concurrency=400,
        metadata={"region": "eu"},
        timeout_s=LIMIT_S,
    )


async def beat(api: Any, status: str = "healthy") -> Any:
    return await api.heartbeat(
        status=status,
        current_jobs=2,
        cpu_percent=41.26,
        memory_percent=12.0,
        metadata={"host": {"load": [1, 2]}},
        timeout_s=LIMIT_S,
    )


def test_a_worker_registers_beats_drains_and_leaves(server: DevServer) -> None:
    async def main(api: GrpcApi) -> None:
        registration = await register(api)
        assert (registration.worker_id, registration.heartbeat_interval_s) == ("w-1", 7.0)
        first = await beat(api)
        assert (first.known, first.should_drain) == (True, False)
        seen = server.client.call("GET", "/workers/w-1")
        assert (seen["current_jobs"], seen["hostname"], seen["max_concurrency"]) == (2, "a-host", 100)
        assert seen["metadata"] == {"cpu_percent": "41.3", "memory_percent": "12.0", "host": '{"load":[1,2]}'}
        assert (await beat(api, "draining")).should_drain
        assert (await beat(api)).should_drain, "until the next registration"
        await api.deregister(timeout_s=LIMIT_S)
        assert server.client.call("GET", "/workers/w-1")["status"] == "offline"

    run(server, main)


def test_an_unknown_worker_is_an_answer(server: DevServer) -> None:
    async def main(api: GrpcApi) -> None:
        stranger = api.acting_as("w-nobody")
        stranger._known_as = "w-nobody"
        assert not (await beat(stranger)).known
        await stranger.deregister(timeout_s=LIMIT_S)

    run(server, main)


# --- streams ----------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def streaming(api: GrpcApi, queue_name: str, lease_duration_s: int = LEASE_S) -> AsyncIterator[JobStream]:
    jobs = api.stream(queue_name, lease_duration_s=lease_duration_s)
    try:
        yield jobs
    finally:
        await jobs.close()


async def next_of(jobs: JobStream) -> Job:
    job = await jobs.next()
    assert isinstance(job, Job)
    return job


def test_a_stream_gives_jobs_as_they_come(server: DevServer, queue_name: str) -> None:
    async def main(api: GrpcApi) -> list[str]:
        seen = []
        async with streaming(api, queue_name) as jobs:
            ids = [server.client.create(queue_name, {"n": n}) for n in range(2)]
            for _ in ids:
                job = await next_of(jobs)
                seen.append(job.id)
                await api.renew(job, deadline=soon())
                await api.complete(job, b"{}", tries_before=0, deadline=soon())
        assert seen == ids
        return seen

    assert all(server.client.job(job_id)["status"] == "completed" for job_id in run(server, main))


def test_a_stream_that_is_refused_or_broken_raises(server: DevServer, queue_name: str) -> None:
    async def first(api: GrpcApi) -> None:
        async with streaming(api, queue_name) as jobs:
            await jobs.next()

    with pytest.raises(CredentialsRefused):
        run(server, first, api_key="sp_test_wrong_0123456789")
    with pytest.raises(ApiUnavailable):
        run(server, first, address="127.0.0.1:9")


def test_a_stream_ends_with_the_server(queue_name: str) -> None:
    with dev_server(grpc_port=0) as dying:

        async def main(api: GrpcApi) -> None:
            async with streaming(api, queue_name) as jobs:
                waiting = asyncio.ensure_future(jobs.next())
                await asyncio.sleep(0.2)
                dying.kill()
                with pytest.raises(ApiUnavailable):
                    await asyncio.wait_for(waiting, LIMIT_S)

        run(dying, main)


def test_a_stream_that_somebody_cancels_on_its_way_is_unavailable(queue_name: str) -> None:
    """What the library makes of that status would otherwise end our task without a word."""

    async def cancelled(request: bytes, context: Any) -> AsyncIterator[bytes]:
        await context.abort(grpc.StatusCode.CANCELLED, "by a proxy")
        yield b""

    async def main(api: GrpcApi) -> None:
        async with streaming(api, queue_name) as jobs:
            with pytest.raises(ApiUnavailable):
                await jobs.next()

    on_a_stranger({"StreamJobs": grpc.unary_stream_rpc_method_handler(cancelled)}, main)


# --- bad days ---------------------------------------------------------------------------------------------------------


def through_faults(
    server: DevServer, main: Callable[[Any, Faults], Coroutine[Any, Any, None]], kind: type[GrpcApi] = GrpcApi
) -> None:
    async def inside() -> None:
        faults = Faults()
        proxy = GrpcFaultProxy(server.grpc_address, faults)
        settings: dict[str, Any] = {"api_key": lambda: server.api_key, "worker_id": "w-1", "events": Events()}
        async with proxy.serving(), kind(address=proxy.address, **settings) as api:
            await main(api, faults)

    with asyncio.Runner(loop_factory=timing.new_event_loop) as runner:
        runner.run(inside())


@pytest.mark.parametrize("fault", ["not_json", "garbage", "error_500", "error_503", "limited", "reset_before"])
def test_whatever_comes_instead_of_an_answer_is_unavailable(
    server: DevServer, kind: type[GrpcApi], queue_name: str, fault: str
) -> None:
    server.client.create(queue_name, {})

    async def main(api: GrpcApi, faults: Faults) -> None:
        (job,) = await claimed(api, queue_name)
        faults.set(fault)
        with pytest.raises(ApiUnavailable):
            await claimed(api, queue_name)
        with pytest.raises(ApiUnavailable):
            await api.renew(job, deadline=soon())
        with pytest.raises(ApiUnavailable):
            await api.complete(job, b"{}", tries_before=0, deadline=soon())
        with pytest.raises(ApiUnavailable):
            await register(api)
        with pytest.raises(ApiUnavailable):
            await beat(api)
        faults.clear()
        while True:  # the library waits a moment before it connects again
            with contextlib.suppress(ApiUnavailable):
                await api.complete(job, b"{}", tries_before=1, deadline=soon())
                return

    through_faults(server, main, kind)


@pytest.mark.parametrize("fault", ["not_json", "garbage", "error_500", "error_503", "limited", "reset_before"])
def test_whatever_comes_instead_of_a_pushed_job_ends_the_stream(server: DevServer, queue_name: str, fault: str) -> None:
    async def main(api: GrpcApi, faults: Faults) -> None:
        async with streaming(api, queue_name) as jobs:
            await asyncio.sleep(0.2)
            faults.set(fault)
            server.client.create(queue_name, {})
            with pytest.raises(ApiUnavailable):
                await asyncio.wait_for(jobs.next(), LIMIT_S)

    through_faults(server, main)


def test_a_renewal_does_not_wait_for_a_process_stream_that_hangs(
    server: DevServer, process_kind: type[GrpcProcessApi], queue_name: str
) -> None:
    """Its answers come in order, so what hangs holds up all that follows; a lease cannot wait for that."""
    server.client.create(queue_name, {})

    async def main(api: GrpcProcessApi, faults: Faults) -> None:
        (job,) = await claimed(api, queue_name)
        faults.set("hang", {"claim"})
        too_many = WAITING_PER_STREAM * MAX_STREAMS + 1
        stuck = [asyncio.ensure_future(claimed(api, queue_name)) for _ in range(too_many)]
        await asyncio.to_thread(wait_until, lambda: len(faults.of("claim")) == 1 + MAX_STREAMS, "all streams hang")
        for _ in range(3):
            await api.renew(job, deadline=timing.now() + 2.0)
        assert not any(task.done() for task in stuck)
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)

    through_faults(server, main, process_kind)


def test_after_a_refused_key_the_next_request_brings_the_new_one(
    process_kind: type[GrpcProcessApi], queue_name: str
) -> None:
    """The service would end such a stream; one that does not must not be asked with the old key for ever."""
    keys = [KEY]

    async def picky(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        is_new = ("x-api-key", "sp_test_the_rotated_one") in context.invocation_metadata()
        async for _ in requests:
            error = pb.ErrorResponse(code="NO_JOBS" if is_new else "UNAUTHENTICATED", message="as it is")
            yield pb.ProcessResponse(error=error).SerializeToString()

    async def main(api: GrpcProcessApi) -> None:
        for answer in await asyncio.gather(*(claimed(api, queue_name) for _ in range(3)), return_exceptions=True):
            assert isinstance(answer, CredentialsRefused)
        with pytest.raises(CredentialsRefused):
            await claimed(api, queue_name)
        keys[:] = ["sp_test_the_rotated_one"]
        assert await claimed(api, queue_name) == ()

    methods: dict[str, Any] = {"ProcessJobs": grpc.stream_stream_rpc_method_handler(picky)}
    on_a_stranger(methods, main, process_kind, api_key=lambda: keys[0])


def test_a_renewal_that_older_services_answer_with_no_success_is_a_lost_lease(queue_name: str) -> None:
    async def renew(request: bytes, context: Any) -> bytes:
        return b""  # RenewLeaseResponse(success=False)

    async def main(api: GrpcApi) -> None:
        with pytest.raises(LeaseLost, match="job x: lease lost: the service did not renew it"):
            await api.renew(Job("x", queue_name, "l", b"", 0, 0, 1.0, 30.0, 0.0), deadline=soon())

    on_a_stranger({"RenewLease": grpc.unary_unary_rpc_method_handler(renew)}, main)


@pytest.mark.parametrize("code", ["PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "INVALID_ARGUMENT"])
def test_what_ends_a_stream_is_no_word_about_the_results_that_wait_on_it(
    process_kind: type[GrpcProcessApi], queue_name: str, code: str
) -> None:
    """A result that is refused would be replaced by a failure; this one is sent again, by itself."""

    async def ends(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            await context.abort(grpc.StatusCode[code], "More than 100 streams: limit reached")
        yield b""

    async def main(api: GrpcProcessApi) -> None:
        job = Job("x", queue_name, "l", b"", 0, 0, 1.0, 30.0, 0.0)
        for report in (
            api.complete(job, b"{}", tries_before=0, deadline=soon()),
            api.fail(job, "no", retryable=True, tries_before=0, deadline=soon()),
        ):
            with pytest.raises(ApiUnavailable):
                await report

    on_a_stranger({"ProcessJobs": grpc.stream_stream_rpc_method_handler(ends)}, main, process_kind)


def test_a_server_that_ends_its_connections_now_and_then_costs_no_request(queue_name: str) -> None:
    """As proxies and load balancers do, too: it says so a moment before (GOAWAY), and nothing new is asked there."""
    streams: list[object] = []

    async def answer(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        streams.append(context)
        async for _ in requests:
            yield pb.ProcessResponse(error=pb.ErrorResponse(code="NO_JOBS")).SerializeToString()

    async def main(api: GrpcProcessApi) -> None:
        async with asyncio.timeout(LIMIT_S):
            while len(streams) < 5:
                assert await asyncio.gather(*(claimed(api, queue_name) for _ in range(3))) == [()] * 3

    ages = (("grpc.max_connection_age_ms", 300), ("grpc.max_connection_age_grace_ms", 200))
    on_a_stranger({"ProcessJobs": grpc.stream_stream_rpc_method_handler(answer)}, main, GrpcProcessApi, options=ages)


class Dealer:
    """Answers dequeues with the jobs and errors it has, once `waits_for` have come in all; then with NO_JOBS."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.waits_for = 1
        self._came = asyncio.Event()

    async def process(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        pending: asyncio.Queue[bytes] = asyncio.Queue()

        async def read() -> None:
            async for request in requests:
                self.asked += 1
                self._came.set()
                pending.put_nowait(request)

        reading = asyncio.create_task(read())
        try:
            while True:
                await pending.get()
                while self.asked < self.waits_for:
                    self._came.clear()
                    await self._came.wait()
                answer = self.answers.pop(0) if self.answers else "NO_JOBS"
                if answer.isupper():
                    yield pb.ProcessResponse(error=pb.ErrorResponse(code=answer)).SerializeToString()
                else:
                    yield pb.ProcessResponse(job=pb.Job(id=answer, lease_id="l")).SerializeToString()
        finally:
            reading.cancel()

    @property
    def methods(self) -> dict[str, Any]:
        return {"ProcessJobs": grpc.stream_stream_rpc_method_handler(self.process)}


def ids(jobs: Sequence[Job]) -> list[str]:
    return [job.id for job in jobs]


def test_an_empty_queue_costs_one_request_a_lone_job_two_and_a_backlog_one_round_trip(queue_name: str) -> None:
    dealer = Dealer(*"abcdefg")

    async def main(api: GrpcProcessApi) -> None:
        for jobs, asked in (("a", 1), ("b", 2), ("cd", 4)):
            assert ids(await claimed(api, queue_name, limit=3)) == list(jobs)
            assert dealer.asked == asked
        dealer.waits_for = 7  # nobody is answered before all have asked
        assert ids(await claimed(api, queue_name, limit=3)) == ["e", "f", "g"]
        assert await claimed(api, queue_name, limit=3) == ()
        dealer.answers = ["h"]
        for jobs, asked in (("h", 11), ("", 12), ("", 13)):
            assert ids(await claimed(api, queue_name, limit=3)) == list(jobs)
            assert dealer.asked == asked

    on_a_stranger(dealer.methods, main, GrpcProcessApi)


def test_jobs_are_not_lost_to_an_error_that_came_with_them(queue_name: str) -> None:
    dealer = Dealer("a", "b", "RATE_LIMIT_EXCEEDED", "c", "RATE_LIMIT_EXCEEDED", "RATE_LIMIT_EXCEEDED", "d")

    async def main(api: GrpcProcessApi) -> None:
        for jobs in "abc":
            assert ids(await claimed(api, queue_name, limit=2)) == [jobs]
        for _ in range(2):
            with pytest.raises(ApiUnavailable, match="RATE_LIMIT_EXCEEDED"):
                await claimed(api, queue_name, limit=2)
        assert ids(await claimed(api, queue_name, limit=2)) == ["d"]

    on_a_stranger(dealer.methods, main, GrpcProcessApi)


def test_a_job_that_comes_after_its_claim_is_in_the_next_one(queue_name: str) -> None:
    """It is leased to us; to forget it would cost it an attempt."""
    dealer = Dealer(*"abcde")

    async def main(api: GrpcProcessApi) -> None:
        for name in "ab":
            assert ids(await claimed(api, queue_name, limit=2)) == [name]
        dealer.waits_for = 5
        with pytest.raises(ApiUnavailable, match="no answer in time"):
            await api.claim(queue_name, limit=2, lease_duration_s=LEASE_S, timeout_s=0.2)
        assert ids(await claimed(api, "another")) == ["e"]
        assert ids(await claimed(api, queue_name, limit=1)) == ["c"]
        (job,) = await claimed(api, queue_name, limit=1)
        assert (job.id, job.queue_name, job.lease_duration_s) == ("d", queue_name, LEASE_S)

    on_a_stranger(dealer.methods, main, GrpcProcessApi)


def test_where_many_requests_wait_another_stream_is_opened(process_kind: type[GrpcProcessApi], queue_name: str) -> None:
    """The server works on the requests of one stream one after the other."""
    streams: list[object] = []
    there_are_two = asyncio.Event()

    async def slow(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        streams.append(context)
        if len(streams) == 2:
            there_are_two.set()
        async for _ in requests:
            await there_are_two.wait()
            yield pb.ProcessResponse(error=pb.ErrorResponse(code="NO_JOBS")).SerializeToString()

    async def main(api: GrpcProcessApi) -> None:
        few = [asyncio.ensure_future(claimed(api, queue_name)) for _ in range(WAITING_PER_STREAM)]
        await until(lambda: len(streams) == 1, "a stream")
        one_more = await asyncio.wait_for(claimed(api, queue_name), LIMIT_S)
        assert [one_more, *await asyncio.gather(*few)] == [()] * (WAITING_PER_STREAM + 1)
        assert await claimed(api, queue_name) == ()
        assert len(streams) == 2

    on_a_stranger({"ProcessJobs": grpc.stream_stream_rpc_method_handler(slow)}, main, process_kind)


def test_a_job_that_cannot_be_decoded_is_known_by_name(kind: type[GrpcApi], queue_name: str) -> None:
    """A stranger's server may nest a payload more deeply than decoders take; the claim is ours all the same."""
    record = pb.Job(id="j", lease_id="l", queue_name=queue_name).SerializeToString() + b"\x2a" + nested(50)
    answer = b"\x0a" + varint(len(record)) + record  # field 1 of both kinds of answers

    async def once(request: bytes, context: Any) -> bytes:
        return answer

    async def in_stream(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield answer

    async def pushed(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield record

    async def main(api: GrpcApi) -> None:
        async with streaming(api, queue_name) as jobs:
            claim = await api.claim(queue_name, limit=1, lease_duration_s=LEASE_S, timeout_s=LIMIT_S)
            for found in (*claim.jobs, *claim.unreadable, await jobs.next()):
                assert isinstance(found, UnreadableJob)
                assert (found.job.id, found.job.lease_id, found.job.queue_name) == ("j", "l", queue_name)
                assert "nested too deeply" in found.reason

    methods: dict[str, Any] = {
        "Dequeue": grpc.unary_unary_rpc_method_handler(once),
        "ProcessJobs": grpc.stream_stream_rpc_method_handler(in_stream),
        "StreamJobs": grpc.unary_stream_rpc_method_handler(pushed),
    }
    on_a_stranger(methods, main, kind)


def varint(number: int) -> bytes:
    return bytes([number & 0x7F | 0x80]) + varint(number >> 7) if number > 0x7F else bytes([number])


def nested(levels: int) -> bytes:
    """A Struct of so many objects within each other, with its length."""
    struct = b""
    for _ in range(levels):
        value = b"\x2a" + varint(len(struct)) + struct
        entry = b"\x0a\x01a\x12" + varint(len(value)) + value
        struct = b"\x0a" + varint(len(entry)) + entry
    return varint(len(struct)) + struct


# --- closing a stream -------------------------------------------------------------------------------------------------


async def until(is_true: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(wait_until, is_true, what, LIMIT_S)


def history(server: DevServer, job_id: str) -> list[str]:
    return [entry["event_type"] for entry in server.client.history(job_id)]


def test_a_job_that_has_arrived_can_be_had_after_its_stream_was_closed(server: DevServer, queue_name: str) -> None:
    async def main(api: GrpcApi) -> None:
        jobs = api.stream(queue_name, lease_duration_s=LEASE_S)
        await asyncio.sleep(0.2)
        job_id = server.client.create(queue_name, {})
        await until(lambda: jobs.has_job, "the job arrives")
        job = await jobs.close()
        assert isinstance(job, Job)
        await api.complete(job, b"{}", tries_before=0, deadline=soon())
        assert history(server, job_id) == ["created", "claimed", "completed"]

    run(server, main)


def test_a_job_that_waits_on_the_wire_is_given_out_again_after_its_lease_and_has_lost_an_attempt(
    server: DevServer, queue_name: str
) -> None:
    """This is what no client can help: a cancellation crosses the job, of which the client never hears."""

    async def main(relay: Relay) -> None:
        settings: dict[str, Any] = {"api_key": lambda: server.api_key, "worker_id": "w-1", "events": Events()}
        async with GrpcApi(address=relay.address, **settings) as api:
            jobs = api.stream(queue_name, lease_duration_s=1)
            await asyncio.sleep(0.2)
            relay.hold()
            job_id = server.client.create(queue_name, {}, max_retries=1)
            await until(lambda: history(server, job_id) == ["created", "claimed"], "it is leased")
            assert await jobs.close() is None
            relay.release()
            await until(lambda: server.client.job(job_id)["status"] == "pending", "its lease is over")
            (job,) = await claimed(api, queue_name)
            assert (job.id, job.retry_count) == (job_id, 1)
            assert history(server, job_id) == ["created", "claimed", "lease_expired", "claimed"]

    port = int(server.grpc_address.rpartition(":")[2])
    with Relay(port) as relay, asyncio.Runner(loop_factory=timing.new_event_loop) as runner:
        runner.run(main(relay))


def test_the_process_stream_keeps_its_order_when_a_caller_goes_away(server: DevServer, queue_name: str) -> None:
    ids = server.client.bulk(queue_name, [{"n": n} for n in range(3)])

    async def main(api: GrpcProcessApi) -> None:
        gone = asyncio.ensure_future(claimed(api, queue_name))
        await asyncio.sleep(0)
        gone.cancel()
        jobs = [*await claimed(api, queue_name, 5)]
        for job in jobs:
            assert job.id in ids
            await api.complete(job, b'{"id":"%b"}' % job.id.encode(), tries_before=0, deadline=soon())
        for job in jobs:
            assert server.client.job(job.id)["result"] == {"id": job.id}

    run(server, main, GrpcProcessApi)


def test_the_process_stream_is_opened_again_after_it_broke(
    process_kind: type[GrpcProcessApi], queue_name: str, tmp_path: Any
) -> None:
    options: dict[str, Any] = {"db": tmp_path / "jobs.sqlite3", "grpc_port": 0}
    with dev_server(**options) as first:
        options["grpc_port"] = first.grpc_address.rpartition(":")[2]

        async def main(api: GrpcProcessApi) -> None:
            assert await claimed(api, queue_name) == ()
            first.stop()
            with pytest.raises(ApiUnavailable):
                await claimed(api, queue_name)
            with dev_server(**options) as second:
                second.client.create(queue_name, {})
                jobs: tuple[Job, ...] = ()
                while not jobs:
                    try:
                        jobs = await claimed(api, queue_name)
                    except ApiUnavailable:
                        await asyncio.sleep(0.1)
                await api.complete(jobs[0], b"{}", tries_before=0, deadline=soon())

        run(first, main, process_kind)


# --- beside REST ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_grpc", [False, True])
def test_a_final_failure_is_final_whatever_the_transport(server: DevServer, queue_name: str, by_grpc: bool) -> None:
    job_id = server.client.create(queue_name, {}, max_retries=3)

    async def main(api: BothApi) -> Settled:
        (job,) = await claimed(api, queue_name)
        return await api.fail(job, "never again", retryable=False, tries_before=0, deadline=soon())

    assert by_both(server, main, by_grpc=by_grpc) == Settled(already=False, will_retry=False)
    job = server.client.job(job_id)
    assert (job["status"], job["last_error"]) == ("deadletter", "never again")


def test_a_final_failure_goes_by_rest_when_grpc_stays_out_of_reach(server: DevServer, queue_name: str) -> None:
    server.client.create(queue_name, {}, max_retries=3)

    async def main(api: BothApi) -> Settled:
        (job,) = await claimed(api, queue_name)
        for tries in range(FINAL_TRIES):
            with pytest.raises(ApiUnavailable):
                await api.fail(job, "boom", retryable=False, tries_before=tries, deadline=soon())
        return await api.fail(job, "boom", retryable=False, tries_before=FINAL_TRIES, deadline=soon())

    assert by_both(server, main, by_grpc=False, address="127.0.0.1:9") == Settled(already=False, will_retry=True)


def test_a_final_failure_goes_by_rest_when_the_grpc_server_is_another_one(server: DevServer, queue_name: str) -> None:
    job_id = server.client.create(queue_name, {}, max_retries=3)

    async def main(api: BothApi) -> Settled:
        (job,) = await claimed(api, queue_name)
        return await api.fail(job, "boom", retryable=False, tries_before=0, deadline=soon())

    with dev_server(grpc_port=0) as another:
        assert by_both(server, main, by_grpc=False, address=another.grpc_address).will_retry
    assert server.client.job(job_id)["last_error"] == "boom"


def test_a_result_that_is_too_large_as_a_message_goes_by_rest(server: DevServer, queue_name: str) -> None:
    """Over ProcessJobs it would end the stream, with all that others have asked on it."""
    job_id = server.client.create(queue_name, {})
    numbers = {"n": [1] * 400_000}  # 0.8 MB as JSON, 4.4 MB as a Struct

    async def main(api: BothApi) -> None:
        (job,) = await claimed(api, queue_name)
        with pytest.raises(NotCarried, match="as a message the result is larger than the service takes"):
            await api.grpc.complete(job, json.dumps(numbers).encode(), tries_before=0, deadline=soon())
        await api.complete(job, json.dumps(numbers).encode(), tries_before=0, deadline=soon())

    by_both(server, main, by_grpc=True)
    assert server.client.job(job_id)["result"] == numbers


def test_a_result_just_below_what_a_message_holds_goes_by_grpc(
    server: DevServer, process_kind: type[GrpcProcessApi], queue_name: str
) -> None:
    job_id = server.client.create(queue_name, {})
    numbers = {"n": [1] * 380_000}

    async def main(api: GrpcProcessApi) -> None:
        (job,) = await claimed(api, queue_name)
        request = api.complete_request(job, json.dumps(numbers).encode())
        assert MAX_REQUEST_BYTES - 20_000 < request.ByteSize() <= MAX_REQUEST_BYTES
        await api.complete(job, json.dumps(numbers).encode(), tries_before=0, deadline=soon())

    run(server, main, process_kind)
    assert server.client.job(job_id)["result"] == numbers


def test_a_result_that_grpc_cannot_carry_goes_by_rest(server: DevServer, queue_name: str) -> None:
    job_id = server.client.create(queue_name, {})

    async def main(api: BothApi) -> Settled:
        (job,) = await claimed(api, queue_name)
        return await api.complete(job, b"[1,2]", tries_before=0, deadline=soon())

    assert by_both(server, main, by_grpc=True) == Settled(already=False)
    assert server.client.job(job_id)["result"] == [1, 2]


def test_an_earlier_life_is_reported_under_its_own_id(server: DevServer, queue_name: str) -> None:
    server.client.create(queue_name, {})

    async def main(api: BothApi) -> None:
        (job,) = await claimed(api.acting_as("w-0"), queue_name)
        with pytest.raises(LeaseLost):
            await api.complete(job, b"{}", tries_before=0, deadline=soon())
        await api.acting_as("w-0").complete(job, b"{}", tries_before=0, deadline=soon())

    by_both(server, main, by_grpc=True)


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Certificate and key of 127.0.0.2, signed by itself."""
    return certificates.certificate(tmp_path, "IP:127.0.0.2")


@pytest.mark.parametrize("is_trusted", [True, False])
def test_tls_is_spoken_and_verified(certificate: tuple[Path, Path], kind: type[GrpcApi], is_trusted: bool) -> None:
    cert, key = certificate
    seen: list[str] = []
    job = pb.Job(id="j", lease_id="l", queue_name="q")

    def look(context: Any) -> None:
        seen.extend(str(value) for name, value in context.invocation_metadata() if name == "x-api-key")

    async def dequeue(request: bytes, context: Any) -> bytes:
        look(context)
        return pb.DequeueResponse(jobs=[job]).SerializeToString()

    async def process(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        look(context)
        async for _ in requests:
            yield pb.ProcessResponse(job=job).SerializeToString()

    async def main(api: Any) -> None:
        assert [job.id for job in await claimed(api, "q")] == ["j"]

    methods: dict[str, Any] = {
        "Dequeue": grpc.unary_unary_rpc_method_handler(dequeue),
        "ProcessJobs": grpc.stream_stream_rpc_method_handler(process),
    }
    with contextlib.nullcontext() if is_trusted else pytest.raises(ApiUnavailable):
        on_a_stranger(
            methods,
            main,
            kind,
            host="127.0.0.2",
            credentials=grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())]),
            ca_file=cert if is_trusted else None,
        )
    assert seen == ([KEY] if is_trusted else []), "the key is shown to nobody else"


@pytest.mark.parametrize(
    ("address", "variables", "is_named"),
    [
        ("grpc.spooled.cloud:443", {}, False),
        ("grpc.spooled.cloud:443", {"https_proxy": "http://10.0.0.1:3128"}, True),
        ("grpc.spooled.cloud:443", {"grpc_proxy": "http://10.0.0.1:3128"}, True),
        ("grpc.spooled.cloud:443", {"http_proxy": ""}, False),
        ("localhost:50051", {"https_proxy": "http://10.0.0.1:3128"}, False),
        ("[::1]:50051", {"grpc_proxy": "http://10.0.0.1:3128"}, False),
    ],
)
def test_where_a_proxy_is_named_the_library_makes_the_streams(
    monkeypatch: pytest.MonkeyPatch, address: str, variables: dict[str, str], is_named: bool
) -> None:
    for name in PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_by_proxy(address) is is_named


def test_a_proxy_carries_the_streams_too(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, queue_name: str
) -> None:
    cert, key = certificate
    asked: list[bytes] = []

    async def process(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield pb.ProcessResponse(job=pb.Job(id="j", lease_id="l")).SerializeToString()

    def tunnel(listening: socket.socket) -> None:
        """One connection, until either side ends it."""
        client, _ = listening.accept()
        with client:
            asked.append(client.recv(4096))
            host, _, port = asked[0].split()[1].decode().rpartition(":")
            with socket.create_connection((host, int(port))) as there:
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                other = {client: there, there: client}
                with contextlib.suppress(OSError):
                    while True:
                        for source in select.select([*other], [], [])[0]:
                            if not (data := source.recv(1 << 16)):
                                return
                            other[source].sendall(data)

    async def main(api: Any) -> None:
        assert [job.id for job in await claimed(api, queue_name)] == ["j"]

    with socket.create_server(("127.0.0.1", 0)) as listening:
        proxy = threading.Thread(target=tunnel, args=(listening,))
        proxy.start()
        for name in PROXY_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("grpc_proxy", f"http://127.0.0.1:{listening.getsockname()[1]}")
        on_a_stranger(
            {"ProcessJobs": grpc.stream_stream_rpc_method_handler(process)},
            main,
            GrpcProcessApi,
            host="127.0.0.2",
            credentials=grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())]),
            ca_file=cert,
        )
        proxy.join(LIMIT_S)
    assert not proxy.is_alive()
    assert asked[0].startswith(b"CONNECT 127.0.0.2:")
