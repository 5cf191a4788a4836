"""The dev-server for tests: as a process on a free port, or as an application called directly on a clock of the test's.

    with dev_server(retry_base_s=0.01) as server:       # a process; options are the fields of ServerConfig
        job_id = server.client.create("emails", {"n": 1})
        server.client.wait_for(job_id, "completed")

    with local_server(strict=True) as server:           # no process, no socket, no waiting
        server.clock.advance(31)

Owns starting, stopping and talking to it; does not know what is tested. A process that is started here is ended here,
by SIGTERM, must then exit with 0 and must not have logged a traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx

from spooled_supervisor.devserver import ServerConfig, create_app
from spooled_supervisor.devserver.config import flag_of
from spooled_supervisor.devserver.services import Services

REPOSITORY = Path(__file__).resolve().parents[2]
START_TIME = 1_700_000_000.0

_READY = re.compile(r"spooled dev-server ready on (http://\S+) \(api key: (\S+)\)(?:, grpc on (\S+))?\n")
_STOP_LIMIT_S = 10.0
_POLL_S = 0.01
_KEEP_ALIVE_S = 60.0
"""Less than the server's. By httpx's own 5 s a connection that a fixture had opened would be made anew in some slow
test, which then would have left a descriptor behind."""

_DYING_WITH_PARENT = """
import ctypes, runpy
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: prctl(2)
runpy.run_module("spooled_supervisor.devserver", run_name="__main__", alter_sys=True)
"""
"""A test run that is killed leaves no server behind. Done in the program and not as `preexec_fn`, which must not be
used once there are threads. What counts is the *thread* that starts it: start servers in one that outlives them."""


def command(**options: object) -> list[str]:
    """The command line for these options: True is a bare flag, None and False are left out."""
    line = [sys.executable, "-m", "spooled_supervisor.devserver"]
    for name, value in options.items():
        if value is True:
            line.append(flag_of(name))
        elif value is not None and value is not False:
            line += [flag_of(name), str(value)]
    return line


@contextlib.contextmanager
def dev_server(**options: object) -> Iterator[DevServer]:
    """A running server; fields of ServerConfig by name, and `log_level`. The port is a free one unless given."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _DYING_WITH_PARENT, *command(**{"port": 0, **options})[3:]],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=REPOSITORY,
        )
        try:
            url, api_key, grpc_address = _wait_until_ready(process, log)
            with Producer(url, api_key) as client:
                client.stats()  # its one connection belongs to the server's fixture, not to the first test of it
                server = DevServer(process, url, api_key, client, log, grpc_address)
                yield server
                server.stop()
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@dataclass
class DevServer:
    """A server process. `client` talks to it; `kill` and `stop` may be called by the test itself."""

    process: subprocess.Popen[str]
    url: str
    api_key: str
    client: Producer = field(repr=False)
    log: IO[str] = field(repr=False)
    grpc_address: str = ""  # HOST:PORT where `grpc_port` was asked for
    _was_killed: bool = False

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def stop(self) -> None:
        """End it by SIGTERM and check that it ended well. Does nothing after `kill` or a first `stop`."""
        if self._was_killed:
            return
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(_STOP_LIMIT_S)
        text = self.log_text()
        assert status == 0, f"the dev-server exited with {status}:\n{text}"
        assert "Traceback" not in text, text

    def kill(self) -> None:
        """End it by SIGKILL, as a crash would."""
        self._was_killed = True
        self.process.kill()
        self.process.wait()

    def log_text(self) -> str:
        self.log.seek(0)
        return self.log.read()


class Producer:
    """Makes jobs and looks at them, as the programs around a worker do. Raises on answers that are refusals."""

    def __init__(self, url: str, api_key: str) -> None:
        self.http = httpx.Client(
            base_url=f"{url}/api/v1",
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=10.0,
            limits=httpx.Limits(keepalive_expiry=_KEEP_ALIVE_S),
            trust_env=False,
        )

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def create(self, queue_name: str, payload: Any = None, **fields: Any) -> str:
        """Make a job; returns its id."""
        body = {"queue_name": queue_name, "payload": payload, **fields}
        return str(self.call("POST", "/jobs", body)["id"])

    def bulk(self, queue_name: str, payloads: list[Any], **fields: Any) -> list[str]:
        """Make many jobs, in requests of a hundred; returns their ids in order."""
        ids: list[str] = []
        for start in range(0, len(payloads), 100):
            jobs = [{"payload": payload} for payload in payloads[start : start + 100]]
            answer = self.call("POST", "/jobs/bulk", {"queue_name": queue_name, "jobs": jobs, **fields})
            ids += [item["job_id"] for item in answer["succeeded"]]
        return ids

    def job(self, job_id: str) -> dict[str, Any]:
        return dict(self.call("GET", f"/jobs/{job_id}"))

    def stats(self, queue_name: str | None = None) -> dict[str, int]:
        """Jobs by status, and `total`."""
        query = "" if queue_name is None else f"?queue_name={queue_name}"
        return dict(self.call("GET", f"/jobs/stats{query}"))

    def history(self, job_id: str) -> list[dict[str, Any]]:
        return list(self.call("GET", f"/jobs/{job_id}/history?limit=500"))

    def workers(self) -> list[dict[str, Any]]:
        return list(self.call("GET", "/workers"))

    def wait_for(self, job_id: str, *statuses: str, timeout_s: float = 10.0) -> dict[str, Any]:
        """The job, once its status is one of these. The only place where tests poll the server."""
        deadline = time.monotonic() + timeout_s
        while True:
            job = self.job(job_id)
            if job["status"] in statuses:
                return job
            assert time.monotonic() < deadline, f"job {job_id} is {job['status']}, not {statuses}: {job}"
            time.sleep(_POLL_S)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The decoded answer; None if it is empty."""
        response = self.http.request(method, path, json=body)
        assert response.is_success, f"{method} {path}: {response.status_code} {response.text}"
        return response.json() if response.content else None


@dataclass
class Clock:
    """Wall time that stands still until it is told otherwise."""

    now: float = START_TIME

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class LocalServer:
    """The application without a server around it: requests are function calls, and time is `clock`."""

    def __init__(self, config: ServerConfig) -> None:
        self.clock = Clock()
        self.api_key = config.api_key
        self._app = create_app(config, clock=self.clock)
        self.services: Services = self._app.state.services
        self._runner = asyncio.Runner()

    def close(self) -> None:
        self.services.close()
        self._runner.close()

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
        bearer: str | None = None,
    ) -> httpx.Response:
        """Send a request with `body` as JSON, or `content` as it is. `bearer` is the API key unless given."""
        sent = {"Authorization": f"Bearer {self.api_key if bearer is None else bearer}", **(headers or {})}
        if content is None and body is not None:
            content = json.dumps(body).encode()
        if content is not None:
            sent.setdefault("Content-Type", "application/json")
        return self._runner.run(self._send(method, path, content, {k: v for k, v in sent.items() if v}))

    async def _send(self, method: str, path: str, content: bytes | None, headers: dict[str, str]) -> httpx.Response:
        transport = httpx.ASGITransport(app=self._app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://local") as client:
            return await client.request(method, path, content=content, headers=headers)

    def api(self, method: str, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        """A request below /api/v1."""
        return self.request(method, f"/api/v1{path}", body, **kwargs)

    def ok(self, method: str, path: str, body: Any = None, **kwargs: Any) -> Any:
        """The decoded answer of a request below /api/v1 that must succeed."""
        response = self.api(method, path, body, **kwargs)
        assert response.is_success, f"{method} {path}: {response.status_code} {response.text}"
        return response.json() if response.content else None

    def create(self, queue_name: str = "q", payload: Any = None, **fields: Any) -> str:
        return str(self.ok("POST", "/jobs", {"queue_name": queue_name, "payload": payload, **fields})["id"])

    def claim(self, queue_name: str = "q", worker_id: str = "w", **fields: Any) -> list[dict[str, Any]]:
        body = {"queue_name": queue_name, "worker_id": worker_id, **fields}
        return list(self.ok("POST", "/jobs/claim", body)["jobs"])

    def running_job(self, worker_id: str = "w", **fields: Any) -> dict[str, Any]:
        """A job just made and claimed."""
        self.create(**fields)
        (job,) = self.claim(worker_id=worker_id)
        return job

    def job(self, job_id: str) -> dict[str, Any]:
        return dict(self.ok("GET", f"/jobs/{job_id}"))

    def history(self, job_id: str) -> list[str]:
        return [event["event_type"] for event in self.ok("GET", f"/jobs/{job_id}/history")]


@contextlib.contextmanager
def local_server(**settings: Any) -> Iterator[LocalServer]:
    """Settings are the fields of ServerConfig."""
    server = LocalServer(ServerConfig(**settings))
    try:
        yield server
    finally:
        server.close()


def _wait_until_ready(process: subprocess.Popen[str], log: IO[str]) -> tuple[str, str, str]:
    assert process.stdout is not None
    line = process.stdout.readline()
    match = _READY.fullmatch(line)
    if match is None:
        log.seek(0)
        raise AssertionError(f"the dev-server did not get ready, said {line!r} and logged:\n{log.read()}")
    return match.group(1), match.group(2), match.group(3) or ""
