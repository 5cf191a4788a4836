"""Jobs at the server, and the supervisor's log: how the demo learns what happens and gets its tiles.

The log tells of everything as it happens, so nothing is polled; a tile is fetched when the log says that the server has
it. Only when no tile has come for a while the server is asked, as the log leaves lines out sooner than it waits.
"""

from __future__ import annotations

import base64
import binascii
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from spooled_supervisor.demo.display import Display
from spooled_supervisor.demo.mandelbrot import QUEUE
from spooled_supervisor.demo.picture import Picture, Tile, payload
from spooled_supervisor.demo.plan import Plan
from spooled_supervisor.demo.programs import DemoFailed, Program
from spooled_supervisor.demo.progress import Progress

LOOK_S = 0.1
ASK_AFTER_S = 3.0
STALL_LIMIT_S = 120.0
REQUEST_TIMEOUT_S = 10.0
TILE_LIMIT_S = 3600
BULK = 100
"""The service's limit for one request (POST /api/v1/jobs/bulk, GET /api/v1/jobs/status)."""
LOG_TAIL = 5


class TileQueue:
    """The producer's side: makes a job for each tile and fetches results. Raises DemoFailed if the server does not."""

    def __init__(self, url: str, api_key: str, server_log: Path) -> None:
        self._server_log = server_log
        self._http = httpx.Client(
            base_url=f"{url}/api/v1",
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=REQUEST_TIMEOUT_S,
            trust_env=False,
        )

    def __enter__(self) -> TileQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def create(self, plan: Plan) -> Iterator[tuple[str, Tile]]:
        """A job for each tile, in their order; yields the jobs' ids as they are made."""
        batch: list[Tile] = []
        for tile in plan.tiles:
            batch.append(tile)
            if tile.mishap == "hang" or len(batch) == BULK:
                yield from self._create_batch(plan, batch)
                batch = []
        yield from self._create_batch(plan, batch)

    def fetch(self, job_id: str) -> tuple[bytes, float]:
        """A tile's pixels, and the CPU seconds that it says it took."""
        job = self._call("GET", f"/jobs/{job_id}")
        try:
            return base64.b64decode(job["result"]["pixels"], validate=True), float(job["result"]["cpu_s"])
        except (KeyError, TypeError, ValueError, binascii.Error) as error:
            raise DemoFailed(f"job {job_id} is {job.get('status')}, but its result is no tile: {error!r}") from error

    def statuses(self, job_ids: list[str]) -> dict[str, str]:
        """What the server says about these jobs."""
        found: list[dict[str, Any]] = []
        for start in range(0, len(job_ids), BULK):
            found += self._call("GET", f"/jobs/status?ids={','.join(job_ids[start : start + BULK])}")
        return {str(job["id"]): str(job["status"]) for job in found}

    def _create_batch(self, plan: Plan, tiles: list[Tile]) -> Iterator[tuple[str, Tile]]:
        """All with the ordinary limit, but the last one if it is the endless one."""
        endless = tiles.pop() if tiles and tiles[-1].mishap == "hang" else None
        size = (plan.width, plan.height)
        if tiles:
            body = {
                "queue_name": QUEUE,
                "default_timeout_seconds": TILE_LIMIT_S,
                "jobs": [{"payload": payload(tile, *size)} for tile in tiles],
            }
            made = self._call("POST", "/jobs/bulk", body)["succeeded"]
            yield from ((str(one["job_id"]), tiles[one["index"]]) for one in made)
        if endless is not None:
            limit_s = plan.endless_limit_s
            body = {"queue_name": QUEUE, "timeout_seconds": limit_s, "payload": payload(endless, *size)}
            yield str(self._call("POST", "/jobs", body)["id"]), endless

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        try:
            return self._http.request(method, path, json=body).raise_for_status().json()
        except httpx.HTTPError as error:
            log = server_said(self._server_log)
            raise DemoFailed(f"the embedded server: {method} {path.partition('?')[0]}: {error}{log}") from error


class Follower:
    """Reads the supervisor's log until all tiles are here."""

    def __init__(
        self,
        supervisor: Program,
        queue: TileQueue,
        progress: Progress,
        picture: Picture,
        display: Display,
        *,
        elapsed_s: Callable[[], float],
        check_stop: Callable[[], None],
    ) -> None:
        self._supervisor = supervisor
        self._queue = queue
        self._progress = progress
        self._picture = picture
        self._display = display
        self._elapsed_s = elapsed_s
        self._check_stop = check_stop
        self._tail: deque[str] = deque(maxlen=LOG_TAIL)

    def follow(self) -> None:
        """Until no tile is missing. Raises DemoFailed, and what `check_stop` raises."""
        came_at = asked_at = time.monotonic()
        while self._progress.missing:
            self._check_stop()
            for line in self._supervisor.lines(LOOK_S):
                self._read(line)
            now = time.monotonic()
            if self._fetch_finished():
                came_at = now
            elif now - max(came_at, asked_at) > ASK_AFTER_S:
                asked_at = now
                self._ask()
            self._display.update(self._progress, self._elapsed_s())
            if now - came_at > STALL_LIMIT_S:
                raise DemoFailed(f"no tile has come for {STALL_LIMIT_S:g} s{self._said()}")
            self._check_supervisor()
        if lost := self._progress.lost:
            errors = self._progress.errors
            reasons = "".join(
                f"\n  tile {tile.number}: {errors.get(tile.number, 'unknown')}" for tile in lost[:LOG_TAIL]
            )
            raise DemoFailed(
                f"{len(lost)} of {self._progress.total} tiles did not come, so there is no picture{reasons}"
            )

    def _read(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):  # what is said before there is a log, or a traceback
            self._tail.append(line.decode("utf-8", "replace"))
            return
        if record.get("level") == "error":
            self._tail.append(str(record.get("error") or record.get("cause") or record.get("message") or line))
        self._progress.observe(record, self._elapsed_s())

    def _fetch_finished(self) -> bool:
        """Get the tiles that the server has; whether there were any."""
        job_ids = self._progress.finished
        self._progress.finished = []
        missing = set(self._progress.missing)
        for job_id in job_ids:
            if job_id in missing:
                tile = self._progress.by_job[job_id]
                pixels, cpu_s = self._queue.fetch(job_id)
                try:
                    self._picture.paste(tile, pixels)
                except ValueError as error:
                    raise DemoFailed(f"tile {tile.number}: {error}") from error
                self._progress.arrived(tile, cpu_s, self._elapsed_s())
        return bool(job_ids)

    def _ask(self) -> None:
        """Whether something has happened that the log did not tell."""
        for job_id, status in self._queue.statuses(self._progress.missing).items():
            if status == "completed":
                self._progress.finished.append(job_id)
            elif status in ("deadletter", "cancelled", "failed"):
                self._progress.lose(self._progress.by_job[job_id])

    def _check_supervisor(self) -> None:
        status = self._supervisor.ended()
        if status is not None and self._progress.missing:
            while lines := self._supervisor.lines(0):
                for line in lines:
                    self._read(line)
            raise DemoFailed(f"the supervisor ended with status {status}{self._said()}")

    def _said(self) -> str:
        return "".join(f"\n  {line[:500]}" for line in self._tail)


def server_said(log: Path) -> str:
    """The last lines of the server's log, for a message; empty if there are none."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL:]
    except OSError:
        return ""
    return "".join(f"\n  {line}" for line in lines)
