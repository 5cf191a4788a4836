"""A server for the session, a site per test: queues of its own there, and daemons that serve them.

Most tests need only `site`. Those that look at handlers and not at the daemon's life share one daemon per module
(`shared`): it is started anew when a test has ended it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon, daemon, processes_of, title_of, wait_until
from tests.support.devserver import DevServer, Producer, dev_server
from tests.support.grpc_bridge import GrpcBridge
from tests.support.stub_api import StubApi, stub_api
from tests.support.transports import REST, options_of

STUB_KEY = "sp_test_0123456789abcdef"
SERVER: dict[str, Any] = {
    "retry_base_s": 0.05,
    "lease_recovery_interval_s": 0.2,
    "scheduled_activation_s": 0.1,
    "stream_poll_s": 0.05,
}
"""Faster than the service is."""

_numbers = itertools.count(1)


class Site:
    """Queues of one test on the session's server, and how a test sees them."""

    def __init__(self, server: DevServer, client: Producer, tmp_path: Path, transport: str = REST) -> None:
        self.server = server
        self.client = client
        self.transport = transport
        self.prefix = f"t{next(_numbers)}-"
        self.tmp_path = tmp_path

    def worker(
        self,
        *,
        app: str = "modes",
        queues: Sequence[str] = ("q",),
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        **more: Any,
    ) -> AbstractContextManager[Daemon]:
        """A daemon that serves these queues."""
        named = [word for queue in queues for word in ("--queue", self.prefix + queue)]
        named += options_of(self.transport, self.server.grpc_address)
        own = {"QUEUE_PREFIX": self.prefix, **(env or {})}
        more.setdefault("api_key", self.server.api_key)
        return daemon(app, url=self.server.url, options=[*named, *options], env=own, **more)

    def add(
        self,
        mode: str,
        *,
        queue: str = "q",
        max_retries: int = 0,
        fields: Mapping[str, Any] | None = None,
        **payload: Any,
    ) -> str:
        """Make a job with this mode and these payload entries; `fields` are fields of the job itself."""
        body = {"mode": mode, **payload}
        return self.client.create(self.prefix + queue, body, max_retries=max_retries, **(fields or {}))

    def end(self, job_id: str, *, timeout_s: float = 20.0) -> dict[str, Any]:
        """The job when the service has its final outcome."""
        return self.client.wait_for(job_id, "completed", "deadletter", timeout_s=timeout_s)

    def run(self, mode: str, **more: Any) -> dict[str, Any]:
        """`add` and `end`."""
        return self.end(self.add(mode, **more))

    def result(self, mode: str, **more: Any) -> Any:
        """What the handler returned; it must have succeeded."""
        job = self.run(mode, **more)
        assert job["status"] == "completed", job["last_error"]
        return job["result"]

    def error(self, mode: str, **more: Any) -> str:
        """The text of the one failure of a job that is not retried."""
        job = self.run(mode, **more)
        assert job["status"] == "deadletter", job
        assert self.events(job["id"]) == ["created", "claimed", "failed"], "one clear failure per job"
        text = str(job["last_error"])
        assert 1 <= len(text) <= 2048
        return text

    def events(self, job_id: str) -> list[str]:
        """What the service has seen of a job, in order."""
        return [entry["event_type"] for entry in self.client.history(job_id)]

    def check_slots(self, worker: Daemon, procs: int = 2) -> None:
        """Plain jobs run on all slots at the same time: no slot is lost."""
        gate = self.tmp_path / f"gate-{next(_numbers)}"
        jobs = [self.add("gate", file=str(gate)) for _ in range(procs)]
        for job_id in jobs:
            worker.ledger.wait_for("start", job=job_id)
        gate.touch()
        for job_id in jobs:
            assert self.end(job_id)["status"] == "completed"
        assert len({worker.ledger.entries("start", job=job_id)[0]["pid"] for job_id in jobs}) == procs


def check_only_its_own(worker: Daemon) -> None:
    """Of all processes with the daemon's marker only fork server and children live."""

    def strangers() -> dict[int, str]:
        own = {worker.fork_server, *worker.children()}
        return {pid: title_of(pid) for pid in processes_of(worker.state_dir) if pid not in own}

    with contextlib.suppress(AssertionError):
        wait_until(lambda: not strangers(), "", 5.0)
    assert not strangers()


@pytest.fixture(scope="session")
def server() -> Iterator[DevServer]:
    with dev_server(grpc_port=0, **SERVER) as running:
        yield running


@pytest.fixture
def client(server: DevServer) -> Iterator[Producer]:
    with Producer(server.url, server.api_key) as producer:
        yield producer


@pytest.fixture
def site(server: DevServer, client: Producer, tmp_path: Path, transport: str) -> Site:
    return Site(server, client, tmp_path, transport)


@pytest.fixture
def stub(transport: str) -> Iterator[StubApi]:
    with stub_api(api_key=STUB_KEY) as running:
        if transport == REST:
            yield running
            return
        with GrpcBridge(running.url, running.is_leased) as bridge:
            running.options = options_of(transport, bridge.address)
            yield running


def stub_worker(
    stub: StubApi, *, app: str = "modes", queues: Sequence[str] = ("q",), options: Sequence[str] = (), **more: Any
) -> AbstractContextManager[Daemon]:
    """A daemon that serves these queues of a stub."""
    named = [word for queue in queues for word in ("--queue", queue)]
    return daemon(app, url=stub.url, api_key=STUB_KEY, options=[*named, *stub.options, *options], **more)


class Shared:
    """One daemon for many tests."""

    def __init__(self, server: DevServer, tmp_path: Path, transport: str) -> None:
        self._stack = contextlib.ExitStack()
        self._worker: Daemon | None = None
        self._queues = Site(server, server.client, tmp_path, transport)
        self.transport = transport
        self.prefix = self._queues.prefix

    def worker(self) -> Daemon:
        """The daemon, running."""
        if self._worker is None or not self._worker.is_running:
            self._stack.close()
            queues = ("q", "q-raise", "q-async", "q-async-raise")
            options = ("--abort-grace", "1", "--lease-duration", "20")
            self._worker = self._stack.enter_context(self._queues.worker(queues=queues, options=options))
            self._worker.wait_until_running()
        return self._worker

    def close(self) -> None:
        """Stop it, with all the checks that this brings."""
        self._stack.close()


@pytest.fixture(scope="module")
def shared(server: DevServer, tmp_path_factory: pytest.TempPathFactory, transport: str) -> Iterator[Shared]:
    daemon_of_module = Shared(server, tmp_path_factory.mktemp("shared"), transport)
    daemon_of_module.worker()
    yield daemon_of_module
    daemon_of_module.close()


class Bench(Site):
    """A site on the shared daemon."""

    def __init__(self, shared: Shared, client: Producer, server: DevServer, tmp_path: Path) -> None:
        super().__init__(server, client, tmp_path, shared.transport)
        self.daemon = shared.worker()
        self.prefix = shared.prefix


@pytest.fixture
def bench(shared: Shared, client: Producer, server: DevServer, tmp_path: Path) -> Iterator[Bench]:
    """Afterwards the daemon is the same, all its slots work, and nothing else of it is left running."""
    site = Bench(shared, client, server, tmp_path)
    yield site
    assert site.daemon.is_running, f"the supervisor ended:\n{site.daemon.tail()}"
    site.check_slots(site.daemon)
    check_only_its_own(site.daemon)
    site.daemon.assert_no_traceback()
