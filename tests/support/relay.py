"""Stands in the middle of TCP connections to a server on this machine, and does to them what a network does.

    with Relay(port) as relay:
        ...                      # connect to relay.port
        relay.hold()             # what the server says from now on stays on the wire, until `release`
        relay.cut()              # all connections are reset
        relay.refuse(True)       # and so are new ones
        relay.slow_down(0.02)    # a byte at a time, this long apart
        relay.spoil()            # bytes that no protocol knows, then the end

All of it may be called from any thread; it runs on a loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType


class Relay:
    """One relay for one server."""

    def __init__(self, server_port: int) -> None:
        self.port = 0
        self._server_port = server_port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="relay")
        self._ready = threading.Event()
        self._flows = asyncio.Event()
        self._is_refusing = False
        self._between_s = 0.0
        self._clients: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    def __enter__(self) -> Relay:
        self._thread.start()
        assert self._ready.wait(10.0), "the relay did not start"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def hold(self) -> None:
        self._do(self._flows.clear)

    def release(self) -> None:
        self._do(self._flows.set)

    def cut(self) -> None:
        def reset_all() -> None:
            for writer in self._clients.values():
                reset(writer)

        self._do(reset_all)

    def refuse(self, is_refusing: bool) -> None:
        self._is_refusing = is_refusing
        if is_refusing:
            self.cut()

    def slow_down(self, between_s: float) -> None:
        """0 is as fast as ever."""
        self._between_s = between_s

    def spoil(self) -> None:
        def garble() -> None:
            for writer in self._clients.values():
                writer.write(random.Random(0).randbytes(200))
                writer.close()

        self._do(garble)

    def _do(self, act: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(act)

    # --- its loop -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._flows.set()
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in self._clients:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._clients, return_exceptions=True))
        self._loop.run_until_complete(asyncio.sleep(0))  # the transports close themselves in the next turn
        self._loop.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._is_refusing:
            reset(writer)
            return
        self._clients[task] = writer
        server = None
        try:
            from_server, server = await asyncio.open_connection("127.0.0.1", self._server_port)
            both = {
                asyncio.ensure_future(self._pass_on(reader, server, is_from_server=False)),
                asyncio.ensure_future(self._pass_on(from_server, writer, is_from_server=True)),
            }
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for flow in both:
                    flow.cancel()
                await asyncio.gather(*both, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # the server is not there, or the relay ends
        finally:
            del self._clients[task]
            for end in filter(None, (writer, server)):
                end.close()
                with contextlib.suppress(OSError, asyncio.CancelledError):
                    await end.wait_closed()

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_from_server: bool) -> None:
        while data := await source.read(1 << 16):
            if is_from_server:
                await self._flows.wait()
                while self._between_s and data:
                    sink.write(data[:1])
                    await sink.drain()
                    data = data[1:]
                    await asyncio.sleep(self._between_s)
            sink.write(data)
            await sink.drain()


def reset(writer: asyncio.StreamWriter) -> None:
    """RST and not FIN: lingering for no time (socket(7), SO_LINGER)."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
