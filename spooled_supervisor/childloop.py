"""The event loop that the async handlers of a child share, and whether it is fit for another job.

Loaded with the first async handler: most children need no asyncio.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class ChildLoop:
    """Made once in a child; its threads (`asyncio.to_thread`) are kept from job to job."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._workers = _BusyWorkers(thread_name_prefix="asyncio")
        loop = self._runner.get_loop()
        loop.set_default_executor(self._workers)
        self._fds = {fd: os.fstat(fd).st_ino for fd in _descriptors_of(loop)}

    def run(self, coroutine: Coroutine[Any, Any, Any], context: contextvars.Context) -> Any:
        """Run it to its end; its result."""
        return self._runner.run(coroutine, context=context)

    def unfit(self) -> str | None:
        """Why no other job should use it, in a word."""
        if self._workers.busy:  # of a job that is over: it would work on beside the next one, or its own next attempt
            return "thread"
        try:
            is_whole = all(os.fstat(fd).st_ino == inode for fd, inode in self._fds.items())
        except OSError:  # a handler has closed all from 3 on
            is_whole = False
        return None if is_whole else "closed loop"


class _BusyWorkers(ThreadPoolExecutor):
    """`busy` is how many calls are at work or wait for a thread."""

    busy = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._counting = threading.Lock()

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future = super().submit(function, *arguments, **named)
        with self._counting:
            self.busy += 1
        future.add_done_callback(self._done)
        return future

    def _done(self, _: Future[Any]) -> None:
        with self._counting:
            self.busy -= 1


def _descriptors_of(loop: asyncio.AbstractEventLoop) -> list[int]:
    """Those of asyncio's own loops; another library's may keep them elsewhere."""
    parts = (getattr(loop, name, None) for name in ("_selector", "_ssock", "_csock"))
    return [part.fileno() for part in parts if part is not None]
