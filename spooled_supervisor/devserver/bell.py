"""Wakes who waits for a change of the jobs. It says that something changed, never what: the waiter looks himself."""

from __future__ import annotations

import asyncio


class Bell:
    """From one event loop. Ringing without anybody who waits does nothing."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Event] = set()

    def ring(self) -> None:
        for waiter in self._waiters:
            waiter.set()

    async def wait(self, limit_s: float) -> None:
        """Return at the next ring, or after `limit_s`. Cancel-safe."""
        event = asyncio.Event()
        self._waiters.add(event)
        try:
            async with asyncio.timeout(limit_s):
                await event.wait()
        except TimeoutError:
            pass  # one of the two things waited for
        finally:
            self._waiters.discard(event)
