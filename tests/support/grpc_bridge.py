"""gRPC for a stub that speaks REST only: each call becomes the request that means the same, and its answer comes back.

    with stub_api() as stub, GrpcBridge(stub.url, stub.is_leased) as bridge:
        ...                                      # a client of bridge.address

So whatever a test has planned for an operation happens to a client of gRPC, too: a refusal is the status that means the
same, an answer that does not come does not come, and where REST breaks the connection, the bridge breaks its own. A
stream claims one job every POLL_S, and the next when the stub says that the last one is out no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import httpx
import msgspec

from spooled_supervisor.devserver.errors import ApiError
from spooled_supervisor.devserver.grpc_values import in_band, message_of, status_of
from spooled_supervisor.proto import spooled_pb2 as pb
from spooled_supervisor.proto.structs import fill, plain
from tests.support.grpc_front import Context, GrpcFront, key_of

POLL_S = 0.05
Post = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


class GrpcBridge(GrpcFront):
    """One bridge to one stub; `is_leased(job id, lease id)` says whether a job is still out."""

    def __init__(self, url: str, is_leased: Callable[[str, str], bool]) -> None:
        super().__init__()
        self._url = url
        self._is_leased = is_leased

    @asynccontextmanager
    async def upstream(self) -> AsyncIterator[None]:
        async with httpx.AsyncClient(base_url=f"{self._url}/api/v1", timeout=None) as self._http:
            yield

    def handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        queue = {
            "Dequeue": self._unary(dequeue, pb.DequeueRequest),
            "Complete": self._unary(complete, pb.CompleteRequest),
            "Fail": self._unary(fail, pb.FailRequest),
            "RenewLease": self._unary(renew, pb.RenewLeaseRequest),
            "StreamJobs": grpc.unary_stream_rpc_method_handler(
                self._stream, pb.StreamJobsRequest.FromString, pb.Job.SerializeToString
            ),
            "ProcessJobs": grpc.stream_stream_rpc_method_handler(
                self._process, pb.ProcessRequest.FromString, pb.ProcessResponse.SerializeToString
            ),
        }
        worker = {
            "Register": self._unary(register, pb.RegisterWorkerRequest),
            "Heartbeat": self._unary(heartbeat, pb.HeartbeatRequest),
            "Deregister": self._unary(deregister, pb.DeregisterRequest),
        }
        return [
            grpc.method_handlers_generic_handler("spooled.v1.QueueService", queue),
            grpc.method_handlers_generic_handler("spooled.v1.WorkerService", worker),
        ]

    def _unary(self, call: Callable[[Any, Post], Awaitable[Any]], kind: type[Any]) -> grpc.RpcMethodHandler[Any, Any]:
        async def answered(request: Any, context: Context) -> Any:
            try:
                return await call(request, self._post(context))
            except (ApiError, httpx.HTTPError) as error:
                await self._break_off(error, context)

        return grpc.unary_unary_rpc_method_handler(answered, kind.FromString, lambda answer: answer.SerializeToString())

    async def _stream(self, request: pb.StreamJobsRequest, context: Context) -> AsyncIterator[pb.Job]:
        ask = pb.DequeueRequest(
            queue_name=request.queue_name, worker_id=request.worker_id, lease_duration_secs=request.lease_duration_secs
        )
        try:
            job = pb.Job()
            while True:
                if not self._is_leased(job.id, job.lease_id):
                    for job in (await dequeue(ask, self._post(context))).jobs:  # one at most
                        yield job
                await asyncio.sleep(POLL_S)
        except (ApiError, httpx.HTTPError) as error:
            await self._break_off(error, context)

    async def _process(
        self, requests: AsyncIterator[pb.ProcessRequest], context: Context
    ) -> AsyncIterator[pb.ProcessResponse]:
        try:
            async for request in requests:
                yield await _one_of_many(request, self._post(context))
        except httpx.HTTPError as error:
            await self._break_off(error, context)

    def _post(self, context: Context) -> Post:
        headers = {"authorization": f"Bearer {key_of(context)}", "content-type": "application/json"}

        async def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
            response = await self._http.post(path, content=msgspec.json.encode(body), headers=headers)
            answer = _object(response.content)
            if response.is_error:
                hint = {name: value for name, value in response.headers.items() if name == "retry-after"}
                raise ApiError(response.status_code, answer.get("message", "no"), code=answer.get("code"), headers=hint)
            return answer

        return post

    async def _break_off(self, error: ApiError | httpx.HTTPError, context: Context) -> None:
        if isinstance(error, ApiError):
            hint = tuple((error.headers or {}).items())
            status = grpc.StatusCode.UNAVAILABLE if error.status == 503 else status_of(error)
            await context.abort(status, message_of(error), hint)
        self.relay.cut()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection is lost")


async def _one_of_many(request: pb.ProcessRequest, post: Post) -> pb.ProcessResponse:
    try:
        match request.WhichOneof("request"):
            case "dequeue":
                jobs = (await dequeue(request.dequeue, post)).jobs
                if jobs:
                    return pb.ProcessResponse(job=jobs[0])
                return pb.ProcessResponse(error=pb.ErrorResponse(code="NO_JOBS", message="No jobs available"))
            case "complete":
                return pb.ProcessResponse(complete=await complete(request.complete, post))
            case "fail":
                return pb.ProcessResponse(fail=await fail(request.fail, post))
            case _:
                return pb.ProcessResponse(renew_lease=await renew(request.renew_lease, post))
    except ApiError as error:
        return pb.ProcessResponse(error=in_band(error))


# --- the calls --------------------------------------------------------------------------------------------------------


async def register(request: pb.RegisterWorkerRequest, post: Post) -> pb.RegisterWorkerResponse:
    body = {
        "worker_id": request.worker_id,
        "queue_name": request.queue_name,
        "hostname": request.hostname,
        "max_concurrency": request.max_concurrency,
    }
    answer = await post("/workers/register", body)
    return pb.RegisterWorkerResponse(
        worker_id=answer["id"], heartbeat_interval_secs=answer.get("heartbeat_interval_secs", 0)
    )


async def heartbeat(request: pb.HeartbeatRequest, post: Post) -> pb.HeartbeatResponse:
    body = {"current_jobs": request.current_jobs, "status": request.status}
    try:
        answer = await post(f"/workers/{request.worker_id}/heartbeat", body)
    except ApiError as error:
        if error.status == 404:
            return pb.HeartbeatResponse(acknowledged=False)
        raise
    wants_drain = bool({"drain", "stop"} & set(answer.get("commands", ())))
    return pb.HeartbeatResponse(acknowledged=True, should_drain=wants_drain)


async def deregister(request: pb.DeregisterRequest, post: Post) -> pb.DeregisterResponse:
    await post(f"/workers/{request.worker_id}/deregister", {})
    return pb.DeregisterResponse(success=True)


async def dequeue(request: pb.DequeueRequest, post: Post) -> pb.DequeueResponse:
    body = {
        "queue_name": request.queue_name,
        "worker_id": request.worker_id,
        "limit": max(request.batch_size, 1),
        "lease_duration_secs": request.lease_duration_secs,
    }
    answer = await post("/jobs/claim", body)
    return pb.DequeueResponse(jobs=[_job(record) for record in answer.get("jobs", ())])


async def complete(request: pb.CompleteRequest, post: Post) -> pb.CompleteResponse:
    await post(f"/jobs/{request.job_id}/complete", {**_holder(request), "result": plain(request.result)})
    return pb.CompleteResponse(success=True)


async def fail(request: pb.FailRequest, post: Post) -> pb.FailResponse:
    await post(f"/jobs/{request.job_id}/fail", {**_holder(request), "error": request.error, "retry": request.retry})
    return pb.FailResponse(success=True, will_retry=request.retry)


async def renew(request: pb.RenewLeaseRequest, post: Post) -> pb.RenewLeaseResponse:
    body = {**_holder(request), "lease_duration_secs": request.extension_secs}
    await post(f"/jobs/{request.job_id}/heartbeat", body)
    return pb.RenewLeaseResponse(success=True)


def _holder(request: pb.CompleteRequest | pb.FailRequest | pb.RenewLeaseRequest) -> dict[str, Any]:
    return {"worker_id": request.worker_id, "lease_id": request.lease_id}


def _job(record: dict[str, Any]) -> pb.Job:
    job = pb.Job(
        id=record["id"],
        queue_name=record["queue_name"],
        lease_id=record["lease_id"],
        retry_count=record["retry_count"],
        max_retries=record["max_retries"],
        timeout_seconds=record["timeout_seconds"],
    )
    payload = record["payload"]
    fill(job.payload, payload if isinstance(payload, dict) else {})
    return job


def _object(content: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return value if isinstance(value, dict) else {}
