"""Where a measurement takes place: a dev-server and a daemon, each a process, started and ended here.

    with stage(queue="noop", procs=2, prefetch=1) as (server, daemon):
        daemon.wait_for("worker_registered")
        daemon.wait_for_count("job_completed", 100)

With a distance, the daemon reaches the server through a proxy that is yet another process (`distance.py`).
The daemon's log (JSON, one event a line) is what there is to wait for. It is read only inside the `wait` methods, by
the benchmark's one thread; the pipe holds thousands of lines meanwhile, and a line that was dropped is an error here.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from tests.bench import distance, meters
from tests.bench.meters import die_with_parent
from tests.bench.records import VARIABLE, Record, read
from tests.support.devserver import REPOSITORY, DevServer, dev_server

APP = "tests.bench.app"
WAIT_LIMIT_S = 120.0
STOP_LIMIT_S = 20.0
PIPE_BYTES = 1 << 20
READ_BYTES = 1 << 16
TAIL_LINES = 15
MAX_REQUEST_BYTES = 1_500_000
"""Of payloads in one request; the server takes 2 MiB."""

REQUESTS, JOBS = "spooled_supervisor_api_requests_total", "worker_jobs_processed_total"
"""The daemon's counters that scenarios look at."""

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class NotMeasured(Exception):
    """A measurement went wrong: something did not happen in time, or ended before it should."""


@dataclass(frozen=True, slots=True)
class CpuReading:
    """CPU seconds of all that runs, at an instant of CLOCK_MONOTONIC, and how many jobs had ended by then."""

    at: float
    supervisor: float
    fork_server: float
    children: float
    server: float
    jobs: int

    def since(self, earlier: CpuReading) -> CpuReading:
        return CpuReading(
            self.at - earlier.at,
            self.supervisor - earlier.supervisor,
            self.fork_server - earlier.fork_server,
            self.children - earlier.children,
            self.server - earlier.server,
            self.jobs - earlier.jobs,
        )

    @property
    def daemon(self) -> float:
        return self.supervisor + self.fork_server + self.children


class Daemon:
    """A running daemon and its log."""

    def __init__(self, process: subprocess.Popen[bytes], started_at: float, records: Path, server: DevServer) -> None:
        assert process.stderr is not None
        self.process = process
        self.pid = process.pid
        self.started_at = started_at  # CLOCK_MONOTONIC, before the process was made
        self.events: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self._server = server
        self._records = records
        self._fork_server = self._port = 0  # not known yet
        self._log_fd = process.stderr.fileno()
        self._rest = b""
        self._pidfd = os.pidfd_open(process.pid)
        self._poll = select.poll()
        self._poll.register(self._log_fd, select.POLLIN)
        fcntl.fcntl(self._log_fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(self._log_fd, False)

    # --- its log -----------------------------------------------------------------------------------------------------

    def wait_for(self, event: str, *, after: int = 0, timeout_s: float = WAIT_LIMIT_S, **fields: Any) -> dict[str, Any]:
        """The first event of this name with these fields, at or after this index of `events`."""
        deadline = time.monotonic() + timeout_s
        looked_at = after
        while True:
            for line in self.events[looked_at:]:
                if line["event"] == event and all(line.get(name) == value for name, value in fields.items()):
                    return line
            looked_at = max(looked_at, len(self.events))
            self._read_more(deadline, f"{event} {fields or ''}")

    def wait_for_count(self, event: str, count: int, *, timeout_s: float = WAIT_LIMIT_S) -> None:
        """Until there were so many events of this name since the start."""
        deadline = time.monotonic() + timeout_s
        while self.counts[event] < count:
            self._read_more(deadline, f"{count} x {event}, of which there were {self.counts[event]}")

    def listen_until(self, instant: float) -> None:
        """Take what the log brings until then (CLOCK_MONOTONIC)."""
        while (left := instant - time.monotonic()) > 0:
            if self._poll.poll(max(1, left * 1000) if left > 0.001 else 0):
                self._take()

    def _read_more(self, deadline: float, wanted: str) -> None:
        left = deadline - time.monotonic()
        if left <= 0 or not self._poll.poll(left * 1000):
            raise NotMeasured(f"waited in vain for {wanted}; the log ends with\n{self._tail()}")
        if not self._take():
            raise NotMeasured(f"the daemon ended before {wanted}; the log ends with\n{self._tail()}")

    def _take(self) -> bool:
        """Read all that is there; False at its end."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._log_fd, READ_BYTES):
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    self._note(line)
            return False
        return True

    def _note(self, line: bytes) -> None:
        try:
            event = _decode(line)
        except msgspec.DecodeError:  # a traceback, say
            event = {"event": "not_json", "text": line.decode("utf-8", "replace")}
        self.events.append(event)
        self.counts[event["event"]] += 1
        if event["event"] == "log_lines_dropped":
            raise NotMeasured(f"the benchmark was too slow to read the log: {event}")

    def _tail(self) -> str:
        return "\n".join(str(event) for event in self.events[-TAIL_LINES:])

    # --- its figures -------------------------------------------------------------------------------------------------

    def child_pids(self) -> list[int]:
        return [child["pid"] for child in _decode(self._get("/status.json"))["children"]]

    def fork_server_pid(self) -> int:
        if self._fork_server == 0:
            self._fork_server = int(self.wait_for("fork_server_ready")["pid"])
        return self._fork_server

    def forget_events(self) -> None:
        """Keep the counts only: hundreds of thousands of lines would make this process slow."""
        self.fork_server_pid()
        self._port = self._endpoint_port()
        self.events.clear()

    def metrics(self) -> dict[str, float]:
        return meters.samples(self._get("/metrics").decode())

    def buckets(self, name: str) -> dict[float, float]:
        """A histogram's cumulative counts by their bounds, over all its labels."""
        return meters.buckets(self._get("/metrics").decode(), name)

    def cpu(self, children: list[int]) -> CpuReading:
        """All clocks now; `children` as `child_pids` gave them, since asking costs CPU."""
        self._take()
        return CpuReading(
            time.monotonic(),
            meters.cpu_s(self.pid),
            meters.cpu_s(self.fork_server_pid()),
            meters.total_cpu_s(children),
            meters.cpu_s(self._server.process.pid),
            self.counts["job_completed"],
        )

    def records(self) -> list[Record]:
        """What the handlers have written down so far."""
        return read(self._records)

    def _get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self._endpoint_port(), timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
        if response.status != 200:
            raise NotMeasured(f"GET {path}: {response.status} {body[:300]!r}")
        return body

    def _endpoint_port(self) -> int:
        return self._port or int(self.wait_for("endpoints_listening")["port"])

    # --- its end -----------------------------------------------------------------------------------------------------

    def stop(self) -> float:
        """SIGTERM, and how many seconds until it was gone. It must drain well: exit status 0."""
        asked_at = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        gone = select.poll()
        gone.register(self._pidfd, select.POLLIN)
        is_gone = gone.poll(STOP_LIMIT_S * 1000)
        stop_s = time.monotonic() - asked_at
        self._take()
        if not is_gone:
            raise NotMeasured(f"the daemon did not stop within {STOP_LIMIT_S:g} s; its log ends with\n{self._tail()}")
        status = self.process.wait()
        if status != 0:
            raise NotMeasured(f"the daemon exited with {status}; its log ends with\n{self._tail()}")
        return stop_s

    def close(self) -> None:
        """Give everything back, whatever state it is in."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()
        os.close(self._pidfd)


def instant(event: Mapping[str, Any]) -> float:
    """When the event was logged: seconds since the epoch, cut to milliseconds."""
    return datetime.fromisoformat(event["ts"]).timestamp()


@contextlib.contextmanager
def stage(
    *,
    before: Mapping[str, list[Any]] | None = None,
    app: str = APP,
    env: Mapping[str, str] | None = None,
    round_trip_s: float = 0.0,
    **options: Any,
) -> Iterator[tuple[DevServer, Daemon]]:
    """A server, the jobs of `before` (payloads by queue) in it, and a daemon with these options (as in its help).

    A tuple repeats an option. The daemon is `round_trip_s` away from the server. One that still runs at the end is
    stopped, and must stop well.
    """
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spooled-bench-")))
        by_grpc = str(options.get("transport", "rest")).startswith("grpc")
        server = stack.enter_context(dev_server(grpc_port=0 if by_grpc else None))
        for queue, payloads in (before or {}).items():
            _offer(server, queue, payloads)
        if by_grpc:
            options["grpc_address"] = server.grpc_address
        if round_trip_s:
            port = stack.enter_context(distance.away(server.port, round_trip_s))
            options["api_url"] = f"http://127.0.0.1:{port}"
        daemon = stack.enter_context(run_daemon(server, directory, app=app, env=env or {}, options=options))
        yield server, daemon
        if daemon.process.poll() is None:
            daemon.stop()


def _offer(server: DevServer, queue: str, payloads: list[Any]) -> None:
    """In as few requests as their size allows."""
    at_once = max(1, MAX_REQUEST_BYTES // len(msgspec.json.encode(payloads[0])))
    for start in range(0, len(payloads), at_once):
        server.client.bulk(queue, payloads[start : start + at_once])


@contextlib.contextmanager
def run_daemon(
    server: DevServer, directory: Path, *, app: str, env: Mapping[str, str], options: Mapping[str, Any]
) -> Iterator[Daemon]:
    records = directory / "records"
    defaults: dict[str, Any] = {
        "app": app,
        "api_url": server.url,
        "state_dir": directory / "state",
        "http_listen": "127.0.0.1:0",
        "control_socket": directory / "control.sock",
        "log_format": "json",
    }
    flags = [text for name, value in {**defaults, **options}.items() for text in _flags(name, value)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SPOOLED_")}
    started_at = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "spooled_supervisor", *flags],
        cwd=REPOSITORY,
        env={**inherited, **env, "SPOOLED_API_KEY": server.api_key, VARIABLE: str(records)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=die_with_parent,  # the benchmark has one thread
    )
    daemon = Daemon(process, started_at, records, server)
    try:
        yield daemon
    finally:
        daemon.close()


def _flags(name: str, value: object) -> Iterator[str]:
    for one in value if isinstance(value, tuple) else (value,):
        yield from (f"--{name.replace('_', '-')}", str(one))
