"""The gRPC listener: who may call, which call is whose, and the health service.

Owns the port, the API key in the metadata, and how a refusal ends a call; what is answered is in `grpc_queue` and
`grpc_worker`. It runs on the event loop of the HTTP server. Health (grpc.health.v1) needs no key; its two messages are
one field each, so that they are written and read here by hand.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio

from spooled_supervisor.devserver.auth import Tokens
from spooled_supervisor.devserver.database import DatabaseFault
from spooled_supervisor.devserver.errors import ApiError, unauthorized
from spooled_supervisor.devserver.grpc_queue import QueueService
from spooled_supervisor.devserver.grpc_values import MAX_MESSAGE_BYTES, message_of, status_of
from spooled_supervisor.devserver.grpc_worker import WorkerService
from spooled_supervisor.devserver.services import Services
from spooled_supervisor.errors import ConfigError
from spooled_supervisor.proto import spooled_pb2_grpc as generated

_LOG = logging.getLogger(__name__)

PING_EVERY_MS = 10_000
STOP_LIMIT_S = 0.5
"""How long a stop waits for calls; streams never end by themselves, so it is short."""

OPTIONS = (
    ("grpc.so_reuseport", 0),  # else a port in use would be shared instead of refused
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", PING_EVERY_MS),
    ("grpc.http2.min_ping_interval_without_data_ms", PING_EVERY_MS),
    ("grpc.http2.max_ping_strikes", 0),
)

SERVING = b"\x08\x01"  # HealthCheckResponse: field 1 (status), SERVING
SERVICE_UNKNOWN = b"\x08\x03"
SERVICES = frozenset({"", "spooled.v1.QueueService", "spooled.v1.WorkerService"})

Request = TypeVar("Request")
Response = TypeVar("Response")
Context = Any  # grpc.aio.ServicerContext, generic in what nobody needs here


class GrpcServer:
    """One listener. `start` and `stop` on the loop that serves."""

    def __init__(self, services: Services, host: str, port: int) -> None:
        self._services = services
        self._host = f"[{host}]" if ":" in host else host
        self._port = port
        self._server: Any = None

    async def start(self) -> str:
        """Listen; the address as clients write it. Raises ConfigError for an address that cannot be used."""
        server = grpc.aio.server(options=OPTIONS)
        guard = Guard(self._services.tokens)
        generated.add_QueueServiceServicer_to_server(_QueueCalls(QueueService(self._services), guard), server)
        generated.add_WorkerServiceServicer_to_server(_WorkerCalls(WorkerService(self._services), guard), server)
        server.add_generic_rpc_handlers((_health(),))
        try:
            port = server.add_insecure_port(f"{self._host}:{self._port}")
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {self._host} port {self._port} for gRPC: {error}") from error
        self._server = server
        await server.start()
        return f"{self._host}:{port}"

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(STOP_LIMIT_S)


class Guard:
    """Lets a call through that shows the API key, and turns refusals into statuses."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def unary(self, call: Callable[[Request], Response]) -> Callable[[Request, Context], Awaitable[Response]]:
        async def guarded(request: Request, context: Context) -> Response:
            try:
                self._admit(context)
                return call(request)
            except (ApiError, DatabaseFault) as error:
                await _abort(context, error)

        return guarded

    def stream(
        self, call: Callable[[Request], AsyncIterator[Response]]
    ) -> Callable[[Request, Context], AsyncIterator[Response]]:
        async def guarded(request: Request, context: Context) -> AsyncIterator[Response]:
            try:
                self._admit(context)
                async for response in call(request):
                    yield response
            except (ApiError, DatabaseFault) as error:
                await _abort(context, error)

        return guarded

    def _admit(self, context: Context) -> None:
        """`x-api-key`, else `authorization`, with or without a scheme. Tokens do not count, as at the service."""
        given = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        bearer = given.get("authorization", "")
        key = given.get("x-api-key") or bearer.removeprefix("Bearer ").removeprefix("bearer ")
        if not key:
            raise unauthorized("Missing API key")
        if not self._tokens.is_api_key(key):
            raise unauthorized("Invalid API key")


async def _abort(context: Context, error: ApiError | DatabaseFault) -> NoReturn:
    """Ends the call: what `abort` raises is for the library alone."""
    if isinstance(error, ApiError):
        await context.abort(status_of(error), message_of(error))
    else:
        _LOG.error("a call failed: %s", error)
        await context.abort(grpc.StatusCode.INTERNAL, "An internal error occurred")
    raise AssertionError("abort never returns")


class _QueueCalls:
    def __init__(self, service: QueueService, guard: Guard) -> None:
        self.Enqueue = guard.unary(service.enqueue)
        self.Dequeue = guard.unary(service.dequeue)
        self.Complete = guard.unary(service.complete)
        self.Fail = guard.unary(service.fail)
        self.RenewLease = guard.unary(service.renew)
        self.GetJob = guard.unary(service.get_job)
        self.GetQueueStats = guard.unary(service.get_stats)
        self.StreamJobs = guard.stream(service.stream)
        self.ProcessJobs = guard.stream(service.process)


class _WorkerCalls:
    def __init__(self, service: WorkerService, guard: Guard) -> None:
        self.Register = guard.unary(service.register)
        self.Heartbeat = guard.unary(service.heartbeat)
        self.Deregister = guard.unary(service.deregister)


# --- health -----------------------------------------------------------------------------------------------------------


def _health() -> grpc.GenericRpcHandler:
    """Check and Watch of grpc.health.v1.Health; without serializers, requests and responses are bytes."""
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Check": grpc.unary_unary_rpc_method_handler(_check),
        "Watch": grpc.unary_stream_rpc_method_handler(_watch),
    }
    return grpc.method_handlers_generic_handler("grpc.health.v1.Health", handlers)


async def _check(request: bytes, context: Context) -> bytes:
    if _service_in(request) not in SERVICES:
        await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
    return SERVING


async def _watch(request: bytes, _context: Context) -> AsyncIterator[bytes]:
    yield SERVING if _service_in(request) in SERVICES else SERVICE_UNKNOWN
    await asyncio.get_running_loop().create_future()  # until the client or the server leaves


def _service_in(request: bytes) -> str | None:
    """HealthCheckRequest: field 1 (service), a text whose length is one byte."""
    if not request:
        return ""
    is_one_text = len(request) > 1 and request[0] == 0x0A and request[1] == len(request) - 2
    return request[2:].decode(errors="replace") if is_one_text else None
