"""The service's event stream, as a hint that a queue has a job: GET /api/v1/events, Server-Sent Events.

Never needed: what it says only makes the next poll come at once, and whatever goes wrong with it (silence, the cut
after 30 minutes, a body that is no stream, a service without it) leaves polling as it was. Jobs that come back after a
failure, or that were scheduled, give no event at all. No request tokens are spent per event.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from spooled_supervisor.api.wire import WireError
from spooled_supervisor.timing import Backoff, jittered, now
from spooled_supervisor.troubles import Troubles

PATH = "/events?events=job.created,job.status"
SILENCE_S = 45.0
"""Three times the service's comment interval of 15 s: a stream that says nothing for so long is dead."""
RETRY_FIRST_S = 1.0
RETRY_CAP_S = 60.0
ABSENT_RETRY_S = 300.0
"""The service has no such route, or no room for another stream: ask seldom."""
MAX_LINE = 64 * 1024
OPERATION = "events"


class _Data(msgspec.Struct):
    queue_name: str = ""
    new_status: str = ""


class _Event(msgspec.Struct):
    type: str = ""
    data: _Data = msgspec.field(default_factory=_Data)


_decode = msgspec.json.Decoder(_Event).decode


class JobEvents:
    """Listens for one supervisor. `on_job` gets a queue's name, `on_up` whether the stream works."""

    def __init__(
        self,
        base_url: str,
        api_key: Callable[[], str],
        *,
        ca_file: Path | None,
        troubles: Troubles,
        on_job: Callable[[str], None],
        on_up: Callable[[bool], None],
    ) -> None:
        self._url = base_url.rstrip("/").removesuffix("/api/v1") + "/api/v1" + PATH
        self._api_key = api_key
        self._ca_file = ca_file
        self._troubles = troubles
        self._on_job = on_job
        self._on_up = on_up

    async def run(self) -> None:
        """Listen for ever; connects again, with a back-off."""
        backoff = Backoff(RETRY_FIRST_S, RETRY_CAP_S)
        while True:
            began_at = now()
            try:
                async for line in self._lines():
                    if now() - began_at >= RETRY_CAP_S:  # one that is cut at once is not asked for without pause
                        backoff.reset()
                    self._take(line)
                reason, delay = "the stream ended", backoff.next_delay()
            except WireError as error:
                is_absent = error.status in (403, 404, 405, 429)
                reason, delay = str(error), jittered(ABSENT_RETRY_S) if is_absent else backoff.next_delay()
            except TimeoutError:
                reason, delay = f"nothing was heard for {SILENCE_S:g} s", backoff.next_delay()
            finally:
                self._on_up(False)
            self._troubles.failed(OPERATION, reason, delay, is_optional=True)
            await asyncio.sleep(delay)

    async def _lines(self) -> AsyncIterator[str]:
        """Lines of one connection. Raises WireError, and TimeoutError after a silence."""
        from spooled_supervisor.api.httpx_wire import open_lines

        headers = {"Authorization": f"Bearer {self._api_key()}", "Accept": "text/event-stream"}
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(SILENCE_S):
                opened = open_lines(self._url, headers, ca_file=self._ca_file, max_line=MAX_LINE)
                lines = await stack.enter_async_context(opened)
            iterator = aiter(lines)
            while True:
                async with asyncio.timeout(SILENCE_S):
                    line = await anext(iterator, None)
                if line is None:
                    return
                yield line

    def _take(self, line: str) -> None:
        """Any first line shows that the stream works; only `data:` lines of two kinds of event mean something."""
        self._on_up(True)
        self._troubles.worked(OPERATION)
        if not line.startswith("data:"):
            return
        try:
            event = _decode(line[5:])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return
        if event.type == "JobCreated" or (event.type == "JobStatusChange" and event.data.new_status == "pending"):
            self._on_job(event.data.queue_name)
