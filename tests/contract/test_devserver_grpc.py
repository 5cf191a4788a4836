"""The embedded server's gRPC side, from outside: by the service's own SDK and its stubs."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from spooled.errors import (
    AuthenticationError,
    ConflictError,
    NotFoundError,
    QuotaExceededError,
    ValidationError,
    is_lease_expired,
)
from spooled.grpc import SpooledGrpcClient
from spooled.grpc.client import (
    GrpcCompleteRequest,
    GrpcDequeueRequest,
    GrpcFailRequest,
    GrpcRenewLeaseRequest,
    ProcessRequest,
)
from spooled.grpc.stubs import spooled_pb2 as sdk_pb

from spooled_supervisor.devserver.grpc_queue import QueueService
from spooled_supervisor.devserver.grpc_worker import WorkerService
from spooled_supervisor.proto import spooled_pb2 as pb
from tests.support.devserver import DevServer, command, dev_server, local_server

LIMIT_S = 10.0
SERVING = b"\x08\x01"


@pytest.fixture(scope="module")
def server() -> Iterator[DevServer]:
    options = {"retry_base_s": 0.01, "lease_recovery_interval_s": 0.1, "min_lease_s": 1, "stream_poll_s": 0.05}
    with dev_server(grpc_port=0, **options) as server:
        yield server


@pytest.fixture(scope="module")
def eager() -> Iterator[DevServer]:
    with dev_server(grpc_port=0, eager_streams=True, stream_poll_s=0.05) as server:
        yield server


def channel_to(server: DevServer) -> Any:
    return grpc.insecure_channel(server.grpc_address)


def sdk(server: DevServer, api_key: str = "") -> Any:
    return SpooledGrpcClient(server.grpc_address, api_key or server.api_key, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def client(server: DevServer) -> Iterator[Any]:
    with sdk(server) as client:
        client.workers.heartbeat("warm-up")  # connects, as the next line does: what is open then is nobody's leak
        server.client.workers()
        yield client


def running(client: Any, queue_name: str, **fields: Any) -> Any:
    """A job just made and leased."""
    client.queue.enqueue(queue_name, {}, **fields)
    (job,) = client.queue.dequeue(queue_name, "w").jobs
    return job


class Reader:
    """Reads a stream in a thread, as it never ends by itself."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.jobs: list[Any] = []
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            for job in self._stream:
                with self._changed:
                    self.jobs.append(job)
                    self._changed.notify_all()
        except Exception:  # the cancellation, as the SDK words it
            pass

    def wait_for(self, count: int, timeout_s: float = LIMIT_S) -> list[Any]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.jobs) >= count, timeout_s), self.jobs
            return list(self.jobs)

    def has_more_than(self, count: int, within_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: len(self.jobs) > count, within_s)

    def close(self) -> None:
        self._stream.cancel()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


# --- unary calls ------------------------------------------------------------------------------------------------------


def test_a_job_is_made_leased_and_completed(client: Any, server: DevServer) -> None:
    payload = {"n": 1, "deep": {"list": [1, "two", None, True, 2.5]}}
    made = client.queue.enqueue("unary", payload, priority=7, max_retries=2, timeout_seconds=60, tags={"a": "b"})
    assert made.created is True
    (job,) = client.queue.dequeue("unary", "w", lease_duration_secs=60).jobs
    assert (job.id, job.payload, job.retry_count, job.max_retries, job.timeout_seconds) == (
        made.job_id, payload, 0, 2, 60,
    )  # fmt: skip
    assert job.lease_id
    assert client.queue.renew_lease(job.id, "w", 120, lease_id=job.lease_id).success
    assert client.queue.complete(job.id, "w", {"sum": 3}, lease_id=job.lease_id).success
    seen = server.client.job(job.id)
    assert (seen["status"], seen["result"], seen["tags"], seen["priority"]) == ("completed", {"sum": 3}, {"a": "b"}, 7)
    assert client.queue.get_job(job.id).job.result == {"sum": 3}
    stats = client.queue.get_queue_stats("unary")
    assert (stats.completed, stats.total) == (1, 1)


def test_a_known_idempotency_key_gives_the_old_job(client: Any) -> None:
    first = client.queue.enqueue("idem", {}, idempotency_key="grpc-1")
    second = client.queue.enqueue("idem", {}, idempotency_key="grpc-1")
    assert (first.job_id, first.created, second.created) == (second.job_id, True, False)


def test_a_batch_gives_several_jobs_and_an_empty_queue_none(client: Any) -> None:
    for n in range(3):
        client.queue.enqueue("batch", {"n": n})
    assert len(client.queue.dequeue("batch", "w", batch_size=10).jobs) == 3
    assert client.queue.dequeue("batch", "w").jobs == []
    assert client.queue.dequeue("nobody-knows-it", "w").jobs == []


def test_a_failure_is_retried_unless_it_says_no(client: Any, server: DevServer) -> None:
    job = running(client, "fail", max_retries=3)
    answer = client.queue.fail(job.id, "w", "boom", lease_id=job.lease_id)
    assert (answer.success, answer.will_retry) == (True, True)
    server.client.wait_for(job.id, "pending")
    job = running(client, "fail-for-good", max_retries=3)
    answer = client.queue.fail(job.id, "w", "boom", retry=False, lease_id=job.lease_id)
    assert (answer.success, answer.will_retry) == (True, False)
    assert server.client.job(job.id)["status"] == "deadletter"


def test_a_failure_that_says_nothing_of_a_retry_is_retried(client: Any, server: DevServer) -> None:
    job = running(client, "fail-unset", max_retries=3)
    assert client.queue.fail(job.id, "w", "boom", retry=None, lease_id=job.lease_id).will_retry


def test_a_job_of_rest_with_another_payload_than_an_object_arrives_empty(client: Any, server: DevServer) -> None:
    server.client.create("odd-payload", [1, 2, 3])
    (job,) = client.queue.dequeue("odd-payload", "w").jobs
    assert job.payload == {}


@pytest.mark.parametrize(
    "payload",
    ['{"n": 1' + "0" * 400 + "}", json.dumps({"zeros": [0] * 400_000}, separators=(",", ":"))],
    ids=["number", "size"],
)
def test_a_payload_that_no_message_can_carry_arrives_empty(client: Any, server: DevServer, payload: str) -> None:
    content = f'{{"queue_name": "not-carried", "payload": {payload}}}'
    server.client.http.post("/jobs", content=content, headers={"Content-Type": "application/json"}).raise_for_status()
    server.client.create("not-carried", {"n": 1})
    jobs = client.queue.dequeue("not-carried", "w", batch_size=2).jobs
    assert [job.payload for job in jobs] == [{}, {"n": 1}]


def test_a_batch_is_no_larger_than_a_message_may_be(client: Any, server: DevServer) -> None:
    for _ in range(6):
        server.client.create("large", {"text": "x" * 900_000})
    sizes = []
    while jobs := client.queue.dequeue("large", "w", batch_size=6).jobs:
        sizes.append(len(jobs))
        assert server.client.stats("large")["processing"] == sum(sizes)
    assert sizes == [4, 2]


@pytest.mark.parametrize("method", ["Dequeue", "GetJob", "ProcessJobs"])
def test_a_deeply_nested_payload_goes_out_although_few_decode_it(server: DevServer, method: str) -> None:
    payload: dict[str, Any] = {}
    for _ in range(40):
        payload = {"a": payload}
    job_id = server.client.create(f"nested-{method}", payload)
    dequeue = pb.DequeueRequest(queue_name=f"nested-{method}", worker_id="w")
    credentials = (("x-api-key", server.api_key),)
    with channel_to(server) as channel:
        if method == "ProcessJobs":
            stream = channel.stream_stream("/spooled.v1.QueueService/ProcessJobs")
            request = pb.ProcessRequest(dequeue=dequeue).SerializeToString()
            (answer,) = stream(iter([request]), timeout=LIMIT_S, metadata=credentials)
        else:
            request = (dequeue if method == "Dequeue" else pb.GetJobRequest(job_id=job_id)).SerializeToString()
            call = channel.unary_unary(f"/spooled.v1.QueueService/{method}")
            answer = call(request, timeout=LIMIT_S, metadata=credentials)
    assert job_id.encode() in answer


def test_a_lease_of_one_transport_is_good_on_the_other(client: Any, server: DevServer) -> None:
    job = running(client, "both")
    body = {"worker_id": "w", "lease_id": job.lease_id, "result": [1]}
    assert server.client.call("POST", f"/jobs/{job.id}/complete", body) == {"success": True}


def test_zero_is_the_default_of_leases_and_batches(server: DevServer, client: Any) -> None:
    client.queue.enqueue("zero", {})
    raw = _raw(server, "Dequeue", sdk_pb.DequeueRequest(queue_name="zero", worker_id="w"), sdk_pb.DequeueResponse)
    (job,) = raw.jobs
    left_s = job.lease_expires_at.seconds - client.queue.get_job(job.id).job.started_at.timestamp()
    assert 298 <= left_s <= 301


# --- refusals ---------------------------------------------------------------------------------------------------------


def _raw(server: DevServer, method: str, request: Any, answer: Any, *metadata: tuple[str, str]) -> Any:
    with channel_to(server) as channel:
        call = channel.unary_unary(
            f"/spooled.v1.QueueService/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        return call(request, timeout=LIMIT_S, metadata=metadata or (("x-api-key", server.api_key),))


@pytest.mark.parametrize(
    "metadata",
    [("x-api-key", "{key}"), ("authorization", "Bearer {key}"), ("authorization", "bearer {key}"),
     ("authorization", "{key}")],
)  # fmt: skip
def test_the_key_may_come_in_several_ways(server: DevServer, metadata: tuple[str, str]) -> None:
    request = sdk_pb.GetQueueStatsRequest(queue_name="q")
    shown = (metadata[0], metadata[1].format(key=server.api_key))
    assert _raw(server, "GetQueueStats", request, sdk_pb.GetQueueStatsResponse, shown).queue_name == "q"


def test_a_wrong_key_is_refused_everywhere(server: DevServer) -> None:
    with sdk(server, "sp_test_not_the_right_one") as stranger:
        with pytest.raises(AuthenticationError):
            stranger.queue.dequeue("q", "w")
        with pytest.raises(AuthenticationError):
            next(iter(stranger.queue.stream_jobs("q", "w")))
        with pytest.raises(AuthenticationError):
            stranger.workers.heartbeat("w")


def test_a_token_does_not_count(server: DevServer) -> None:
    token = server.client.call("POST", "/auth/login", {"api_key": server.api_key})["access_token"]
    with sdk(server, token) as stranger, pytest.raises(AuthenticationError):
        stranger.queue.dequeue("q", "w")


def test_what_is_missing_or_malformed_is_an_invalid_argument(client: Any) -> None:
    job = running(client, "invalid")
    calls: tuple[Callable[[], Any], ...] = (
        lambda: client.queue.dequeue("-bad", "w"),
        lambda: client.queue.complete(job.id, "w", lease_id=""),
        lambda: client.workers.register("q", "-host-"),
        lambda: client.queue.enqueue("invalid", {"text": "x" * (1 << 20)}),
    )
    for call in calls:
        with pytest.raises(ValidationError):
            call()


@pytest.mark.parametrize(
    "fields",
    [
        {"idempotency_key": "k" * 256},
        {"max_retries": 101},
        {"max_retries": -1},
        {"timeout_seconds": 86401},
        {"timeout_seconds": -1},
        {"scheduled_at": {"seconds": 253402300800}},
        {"scheduled_at": {"seconds": -62135596801}},
        {"scheduled_at": {"seconds": 10**15}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_new_job_keeps_to_the_limits_of_rest(server: DevServer, fields: dict[str, Any]) -> None:
    with pytest.raises(grpc.RpcError) as refusal:
        _raw(server, "Enqueue", sdk_pb.EnqueueRequest(queue_name="limits", **fields), sdk_pb.EnqueueResponse)
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    (field,) = fields
    assert field in str(refusal.value.details())


def test_a_lease_of_somebody_else_is_not_accepted(client: Any) -> None:
    job = running(client, "foreign")
    with pytest.raises(ConflictError) as refusal:
        client.queue.complete(job.id, "w", lease_id="another")
    assert is_lease_expired(refusal.value)
    with pytest.raises(NotFoundError):
        client.queue.complete(job.id, "somebody", lease_id=job.lease_id)
    client.queue.complete(job.id, "w", lease_id=job.lease_id)
    with pytest.raises(ConflictError, match="already completed"):
        client.queue.complete(job.id, "w", lease_id=job.lease_id)


def test_a_lease_that_is_over_is_told_so_or_taken_back(client: Any, server: DevServer) -> None:
    client.queue.enqueue("over", {})
    (job,) = client.queue.dequeue("over", "w", lease_duration_secs=1).jobs
    server.client.wait_for(job.id, "pending")
    with pytest.raises(NotFoundError):
        client.queue.renew_lease(job.id, "w", lease_id=job.lease_id)


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_stream_gives_one_job_at_a_time(client: Any) -> None:
    for n in range(3):
        client.queue.enqueue("paced", {"n": n})
    reader = Reader(client.queue.stream_jobs("paced", "w", lease_duration_secs=30))
    try:
        for n in range(3):
            job = reader.wait_for(n + 1)[n]
            assert job.payload == {"n": n}
            assert not reader.has_more_than(n + 1, 0.2)
            if n == 1:
                client.queue.fail(job.id, "w", "boom", retry=False, lease_id=job.lease_id)
            else:
                client.queue.complete(job.id, "w", lease_id=job.lease_id)
        client.queue.enqueue("paced", {"n": 3})
        assert reader.wait_for(4)[3].payload == {"n": 3}
    finally:
        reader.close()


def test_a_stream_goes_on_when_a_job_is_taken_back(client: Any) -> None:
    made = client.queue.enqueue("paced-lost", {})
    reader = Reader(client.queue.stream_jobs("paced-lost", "w", lease_duration_secs=1))
    try:
        first, second = reader.wait_for(2)
        assert first.id == second.id == made.job_id
        assert first.lease_id != second.lease_id
    finally:
        reader.close()


def test_two_streams_share_a_queue(client: Any) -> None:
    readers = [Reader(client.queue.stream_jobs("shared", f"w{n}")) for n in range(2)]
    try:
        for _ in range(2):
            client.queue.enqueue("shared", {})
        assert readers[0].wait_for(1)[0].id != readers[1].wait_for(1)[0].id
    finally:
        for reader in readers:
            reader.close()


def test_an_eager_server_pushes_jobs_ahead(eager: DevServer) -> None:
    with sdk(eager) as client:
        for n in range(40):
            client.queue.enqueue("eager", {"n": n})
        reader = Reader(client.queue.stream_jobs("eager", "w"))
        try:
            assert len(reader.wait_for(17)) >= 17
        finally:
            reader.close()


def test_an_eager_stream_does_not_outlive_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no claim today")

    async def read(service: QueueService) -> None:
        async with asyncio.timeout(LIMIT_S):
            async for _ in service.stream(pb.StreamJobsRequest(queue_name="q", worker_id="w")):
                pass

    with local_server(eager_streams=True) as server:
        monkeypatch.setattr(server.services.leases, "claim", fail)
        with pytest.raises(RuntimeError, match="no claim today"):
            asyncio.run(read(QueueService(server.services)))


def test_a_hundred_streams_may_be_open_and_no_more(client: Any) -> None:
    streams = [client.queue.stream_jobs("many", "w") for _ in range(101)]
    try:
        with pytest.raises(QuotaExceededError, match="100"):
            next(streams[-1])
    finally:
        for stream in streams:
            stream.cancel()


def test_process_jobs_answers_in_order(client: Any, server: DevServer) -> None:
    for n in range(2):
        client.queue.enqueue("process", {"n": n}, max_retries=0)
    stream = client.queue.process_jobs()
    answers = stream.receive()
    try:
        dequeue = ProcessRequest(dequeue=GrpcDequeueRequest(queue_name="process", worker_id="w", batch_size=5))
        for _ in range(3):
            stream.send(dequeue)
        first, second, none = (next(answers) for _ in range(3))
        assert (first.job.payload, second.job.payload, none.error_code) == ({"n": 0}, {"n": 1}, "NO_JOBS")
        about = {"job_id": first.job.id, "worker_id": "w", "lease_id": first.job.lease_id}
        stream.send(ProcessRequest(renew_lease=GrpcRenewLeaseRequest(**about, extension_secs=60)))
        stream.send(ProcessRequest(complete=GrpcCompleteRequest(**about, result={"ok": True})))
        stream.send(ProcessRequest(complete=GrpcCompleteRequest(**about | {"lease_id": "another"})))
        failing = {"job_id": second.job.id, "worker_id": "w", "lease_id": "another"}
        stream.send(ProcessRequest(fail=GrpcFailRequest(**failing, error="boom")))
        stream.send(ProcessRequest(fail=GrpcFailRequest(**failing | {"lease_id": second.job.lease_id}, error="boom")))
        renewed, completed, again, lost, failed = (next(answers) for _ in range(5))
        assert renewed.renew_lease.success
        assert completed.complete.success
        assert again.error_code == "NOT_FOUND"
        assert lost.error_code == "LEASE_EXPIRED"
        assert (failed.fail.success, failed.fail.will_retry) == (True, True), "zero retries are the default of three"
        assert server.client.job(first.job.id)["result"] == {"ok": True}
    finally:
        stream.end()
        stream.cancel()


def test_an_empty_request_of_process_jobs_is_answered_too(server: DevServer) -> None:
    with channel_to(server) as channel:
        call = channel.stream_stream(
            "/spooled.v1.QueueService/ProcessJobs",
            request_serializer=sdk_pb.ProcessRequest.SerializeToString,
            response_deserializer=sdk_pb.ProcessResponse.FromString,
        )
        (answer,) = call(iter([sdk_pb.ProcessRequest()]), timeout=LIMIT_S, metadata=(("x-api-key", server.api_key),))
    assert answer.error.code == "INVALID_REQUEST"


# --- workers ----------------------------------------------------------------------------------------------------------


def test_a_worker_registers_beats_and_leaves(client: Any, server: DevServer) -> None:
    answer = client.workers.register("q", "host", worker_id="grpc-w", max_concurrency=500, metadata={"a": "b"})
    assert (answer.worker_id, answer.lease_duration_secs, answer.heartbeat_interval_secs) == ("grpc-w", 300, 10)
    beat = client.workers.heartbeat("grpc-w", current_jobs=2)
    assert (beat.acknowledged, beat.should_drain) == (True, False)
    seen = server.client.call("GET", "/workers/grpc-w")
    assert (seen["current_jobs"], seen["max_concurrency"], seen["metadata"]) == (2, 100, {"a": "b"})
    assert client.workers.deregister("grpc-w").success
    assert server.client.call("GET", "/workers/grpc-w")["status"] == "offline"


def test_an_unknown_worker_is_not_acknowledged(client: Any) -> None:
    assert client.workers.heartbeat("nobody").acknowledged is False
    assert client.workers.deregister("nobody").success is False


def test_draining_stays_until_the_next_registration(client: Any, server: DevServer) -> None:
    worker_id = client.workers.register("q", "host").worker_id
    server.client.call("POST", f"/workers/{worker_id}/heartbeat", {"status": "draining", "current_jobs": 0})
    assert client.workers.heartbeat(worker_id, status="healthy").should_drain
    client.workers.register("q", "host", worker_id=worker_id)
    assert not client.workers.heartbeat(worker_id, status="healthy").should_drain


def test_a_heartbeat_ends_what_silence_has_brought_and_not_what_was_reported() -> None:
    with local_server() as server:
        service = WorkerService(server.services)
        service.register(pb.RegisterWorkerRequest(queue_name="q", hostname="h", worker_id="w"))

        def status_after_beat(status: str = "") -> str:
            service.heartbeat(pb.HeartbeatRequest(worker_id="w", status=status))
            return str(server.ok("GET", "/workers/w")["status"])

        server.clock.advance(25)
        server.services.sweeps.recover(server.clock())
        assert server.ok("GET", "/workers/w")["status"] == "degraded"
        assert status_after_beat() == "healthy"
        assert status_after_beat("degraded") == "degraded"
        server.clock.advance(5)
        assert status_after_beat() == "degraded"


# --- the listener -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", [b"", b"\x0a\x17spooled.v1.QueueService"])
def test_health_needs_no_key(server: DevServer, service: bytes) -> None:
    with channel_to(server) as channel:
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(service, timeout=LIMIT_S) == SERVING
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(service, timeout=LIMIT_S)
        assert next(watch) == SERVING
        watch.cancel()


@pytest.mark.parametrize("service", [b"\x0a\x05other", b"\x0a"])
def test_health_does_not_know_every_service(server: DevServer, service: bytes) -> None:
    with channel_to(server) as channel, pytest.raises(grpc.RpcError) as refusal:
        channel.unary_unary("/grpc.health.v1.Health/Check")(service, timeout=LIMIT_S)
    assert refusal.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_port_in_use_is_refused_in_one_line(server: DevServer) -> None:
    port = server.grpc_address.rpartition(":")[2]
    done = subprocess.run(command(port=0, grpc_port=port), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 78
    assert f"port {port} for gRPC" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_port_nothing_of_grpc_is_loaded() -> None:
    code = (
        "import sys\nfrom spooled_supervisor.devserver import ServerConfig, create_app\n"
        "import spooled_supervisor.devserver.serving\ncreate_app(ServerConfig()).state.services.close()\n"
        "print('grpc' in sys.modules or 'google.protobuf' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
