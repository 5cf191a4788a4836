"""The same faults for gRPC: stands between the daemon and the server's gRPC port.

    with FaultProxy(server.port) as proxy, GrpcFaultProxy(server.grpc_address, proxy) as grpc_proxy:
        proxy.set("reset_after", {"complete"})       # for both

All calls of a daemon share one connection, so a reset of one is the end of all. Errors are the statuses that mean the
same, in ProcessJobs in band where the service has them so; `garbage` is no HTTP/2, `not_json` no message of this type.
In StreamJobs each job that is pushed is a claim of its own: it is leased by then, and a fault that never asks the
server loses it. A stream has no deadline, so one that hangs ends when the fault does, as with a server that is started
again; calls that hang run into theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NoReturn

import grpc
import grpc.aio

from spooled_supervisor.proto import spooled_pb2 as pb
from tests.chaos.proxy import HANG_S, NEVER_ASKED, SLOW_S, TRICKLE_S, Faults
from tests.support.grpc_front import Context, GrpcFront, key_of

OPERATIONS = {
    "Register": "register",
    "Heartbeat": "heartbeat",
    "Deregister": "deregister",
    "Dequeue": "claim",
    "StreamJobs": "claim",
    "Complete": "complete",
    "Fail": "fail",
    "RenewLease": "renew",
}
IN_STREAM = {"dequeue": "claim", "complete": "complete", "fail": "fail", "renew_lease": "renew"}
STATUSES = {
    "error_500": grpc.StatusCode.INTERNAL,
    "error_503": grpc.StatusCode.UNAVAILABLE,
    "limited": grpc.StatusCode.RESOURCE_EXHAUSTED,
}
IN_BAND = {"error_500": "INTERNAL", "limited": "RATE_LIMIT_EXCEEDED"}
UNREADABLE = b"\xff" * 8
"""No message of protobuf: a field that does not exist, of a kind that does not exist."""
TRICKLES_FOR_S = 1.0
MENDED_WITHIN_S = 0.05

Key = tuple[tuple[str, str], ...]


class GrpcFaultProxy(GrpcFront):
    """One proxy for one server; what is wrong is told by `faults`, and what comes by is noted there."""

    def __init__(self, address: str, faults: Faults) -> None:
        super().__init__()
        self._address = address
        self._faults = faults
        faults.on_change = lambda: self.relay.refuse(faults.is_down)

    @asynccontextmanager
    async def upstream(self) -> AsyncIterator[None]:
        async with grpc.aio.insecure_channel(self._address) as self._channel:
            yield
        del self._channel  # while somebody has it, the library's thread lives on

    def handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        return [_Everything(self)]

    # --- calls --------------------------------------------------------------------------------------------------------

    async def unary(self, method: str, request: bytes, context: Context) -> bytes:
        call: Any = self._channel.unary_unary(method)
        operation = OPERATIONS.get(method.rpartition("/")[2], "other")
        return await self._met(operation, method, request, context, lambda: call(request, metadata=_key(context)))

    async def stream(self, method: str, request: bytes, context: Context) -> AsyncIterator[bytes]:
        call: Any = self._channel.unary_stream(method)
        opened = await self._met("claim", method, request, context, _nothing, has_deadline=False)
        if opened:
            yield opened  # unreadable
        async for message in call(request, metadata=_key(context)):
            yield await self._met("claim", method, request, context, partial(_same, message), has_deadline=False)

    async def process(self, method: str, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        call: Any = self._channel.stream_stream(method)(metadata=_key(context))

        async for request in requests:
            kind = pb.ProcessRequest.FromString(request).WhichOneof("request") or ""

            async def ask(request: bytes = request) -> bytes:
                await call.write(request)
                answer = await call.read()
                return b"" if answer is grpc.aio.EOF else bytes(answer)

            yield await self._met(IN_STREAM.get(kind, "other"), method, request, context, ask, is_in_band=True)

    async def _met(
        self,
        operation: str,
        method: str,
        request: bytes,
        context: Context,
        ask: Callable[[], Awaitable[bytes]],
        *,
        is_in_band: bool = False,
        has_deadline: bool = True,
    ) -> bytes:
        """The answer, or what becomes of it."""
        fault = self._faults.choose(operation)
        answer = b"" if fault in NEVER_ASKED else await ask()
        self._faults.note(operation, method, request, fault, None if fault in NEVER_ASKED else 200)
        match fault:
            case "down" | "reset_before" | "reset_after":
                self.relay.cut()
                await asyncio.sleep(HANG_S)  # it is cancelled now
            case "garbage":
                self.relay.spoil()
                await asyncio.sleep(HANG_S)
            case "hang" if has_deadline:
                await asyncio.sleep(HANG_S)
            case "hang":
                await self._mended()
                await context.abort(grpc.StatusCode.UNAVAILABLE, "it hung")
            case "slow":
                await asyncio.sleep(SLOW_S)
            case "trickle":
                self.relay.slow_down(TRICKLE_S)
                asyncio.get_running_loop().call_later(TRICKLES_FOR_S, self.relay.slow_down, 0.0)
            case "not_json":
                return UNREADABLE
            case _ if fault in IN_BAND and is_in_band:
                error = pb.ErrorResponse(code=IN_BAND[fault], message="no")
                return pb.ProcessResponse(error=error).SerializeToString()
            case _ if fault in STATUSES:
                hint = (("retry-after", "1"),) if fault == "limited" else ()
                await context.abort(STATUSES[fault], "no", hint)
        return answer

    async def _mended(self) -> None:
        while self._faults.is_any:  # noqa: ASYNC110 - changed by another thread, which knows no loop
            await asyncio.sleep(MENDED_WITHIN_S)


class _Everything(grpc.GenericRpcHandler):
    """All methods, by their kinds, with bytes as messages."""

    def __init__(self, proxy: GrpcFaultProxy) -> None:
        self._proxy = proxy

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        method, proxy = handler_call_details.method, self._proxy

        async def unary(request: bytes, context: Context) -> bytes:
            try:
                return await proxy.unary(method, request, context)
            except grpc.aio.AioRpcError as error:
                await _refuse(error, context)

        async def stream(request: bytes, context: Context) -> AsyncIterator[bytes]:
            try:
                async for message in proxy.stream(method, request, context):
                    yield message
            except grpc.aio.AioRpcError as error:
                await _refuse(error, context)

        async def process(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
            try:
                async for message in proxy.process(method, requests, context):
                    yield message
            except grpc.aio.AioRpcError as error:
                await _refuse(error, context)

        if method.endswith("/StreamJobs"):
            return grpc.unary_stream_rpc_method_handler(stream)
        if method.endswith("/ProcessJobs"):
            return grpc.stream_stream_rpc_method_handler(process)
        return grpc.unary_unary_rpc_method_handler(unary)


async def _refuse(error: grpc.aio.AioRpcError, context: Context) -> NoReturn:
    """As the server has refused."""
    await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
    raise AssertionError("abort never returns")


def _key(context: Context) -> Key:
    return (("x-api-key", key_of(context)),)


async def _nothing() -> bytes:
    return b""


async def _same(message: bytes) -> bytes:
    return message
