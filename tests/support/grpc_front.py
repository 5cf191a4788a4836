"""A gRPC server behind a `Relay`; subclasses stand before another server with it.

with SomeFront(...) as front:             # on a loop in a thread of its own
    ...                                   # a client of front.address
    front.relay.cut()                     # what a network does; see there

async with SomeFront(...).serving():      # on this loop: two loops of one process may not share the library's queue
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from tests.support.relay import Relay

Context = Any  # grpc.aio.ServicerContext, generic in what nobody needs here


class GrpcFront:
    """Once. Subclasses have `upstream` and `handlers`, both used on its loop."""

    relay: Relay

    def __init__(self) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="gRPC front")
        self._ready = threading.Event()

    def upstream(self) -> AbstractAsyncContextManager[None]:
        """Open for as long as the server serves."""
        raise NotImplementedError

    def handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        """What is served."""
        raise NotImplementedError

    @property
    def address(self) -> str:
        return self.relay.address

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with self.upstream():
            server = grpc.aio.server()
            server.add_generic_rpc_handlers(tuple(self.handlers()))
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            with Relay(port) as self.relay:
                yield
            await server.stop(0)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10.0), "the gRPC front did not start"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10.0)

    async def _main(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        async with self.serving():
            self._ready.set()
            await self._over.wait()


def key_of(context: Context) -> str:
    """What the client shows as its API key."""
    return str(dict(context.invocation_metadata()).get("x-api-key", ""))
