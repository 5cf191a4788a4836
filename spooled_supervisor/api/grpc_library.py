"""A call with messages both ways by grpcio, for what `grpc_wire.py` does not do: proxies."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from spooled_supervisor.api.grpc_wire import CallEnd, CallOwner


class LibraryCall:
    """A `grpc_wire.Call` around the library's; its messages must be bytes on both sides."""

    def __init__(self, call: Any, owner: CallOwner) -> None:
        self._call = call
        self._owner = owner
        self._is_over = False
        self._woken = asyncio.Event()
        self._tasks = (
            asyncio.create_task(self._write(), name="write to the stream"),
            asyncio.create_task(self._read(), name="read from the stream"),
        )

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        self._is_over = True
        self._call.cancel()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    async def _write(self) -> None:
        """A task of its own: a write that is broken off would end the stream."""
        try:
            while True:
                await self._woken.wait()
                self._woken.clear()
                while (message := self._owner.next_message()) is not None:
                    await self._call.write(message)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            return  # the reader hears of it too, and says why

    async def _read(self) -> None:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self._owner.on_message(message)
                if self._is_over:
                    return
            end = CallEnd("OK")
            if (code := await self._call.code()) is not grpc.StatusCode.OK:
                trailing = await self._call.trailing_metadata()
                end = CallEnd(code.name, await self._call.details() or "", _hint_of(trailing))
        except grpc.aio.AioRpcError as error:
            end = end_of(error)
        except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            end = CallEnd("UNAVAILABLE", str(error))
        if not self._is_over:
            self.close()
            self._owner.on_end(end)


def end_of(error: grpc.aio.AioRpcError) -> CallEnd:
    """How a call of the library's ended."""
    return CallEnd(error.code().name, error.details() or "", _hint_of(error.trailing_metadata()))


def _hint_of(trailing: Any) -> str | None:
    hint = {str(key).lower(): value for key, value in trailing or ()}.get("retry-after")
    return hint if isinstance(hint, str) else None
