"""A fleet: three supervisors on three hosts, each behind a link of its own to one service.

The hosts are network namespaces with a pair of veth devices to a bridge, where the server is. Needs root and ip(8).
"""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon, Ledger, daemon, wait_until
from tests.support.devserver import DevServer, dev_server
from tests.systemd.bed import standing_in_network

HOSTS = ("a", "b", "c")
SERVER_ADDRESS = "10.77.0.1"
LEASE_S = 6

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="there is no ip(8) here (Debian: apt install iproute2)"),
    pytest.mark.timeout(150),
]


class Network:
    """A hub and three hosts; all of it is gone with the namespaces."""

    def __init__(self) -> None:
        self._name = f"spooled-{os.getpid()}"
        self._made: list[str] = []

    def build(self) -> None:
        """Skips the test where namespaces cannot be made."""
        for place in ("hub", *HOSTS):
            tried = subprocess.run(
                ["ip", "netns", "add", self.space(place)], capture_output=True, text=True, check=False
            )
            if tried.returncode != 0:
                pytest.skip(f"no network namespace can be made: {tried.stderr.strip()}")
            self._made.append(place)
            self._ip(place, "link", "set", "lo", "up")
        self._ip("hub", "link", "add", "bridge", "type", "bridge")
        self._ip("hub", "addr", "add", f"{SERVER_ADDRESS}/24", "dev", "bridge")
        self._ip("hub", "link", "set", "bridge", "up")
        for number, host in enumerate(HOSTS, 11):
            self._ip(
                "hub", "link", "add", f"to-{host}", "type", "veth", "peer", "name", "uplink", "netns", self.space(host)
            )
            self._ip("hub", "link", "set", f"to-{host}", "master", "bridge", "up")
            self._ip(host, "addr", "add", f"10.77.0.{number}/24", "dev", "uplink")
            self._ip(host, "link", "set", "uplink", "up")

    def close(self) -> None:
        for place in self._made:
            subprocess.run(["ip", "netns", "delete", self.space(place)], check=True)

    def space(self, place: str) -> str:
        return f"{self._name}-{place}"

    def path(self, place: str) -> Path:
        return Path("/run/netns", self.space(place))

    def cut(self, host: str) -> None:
        """Its cable is pulled: packets go nowhere, and nobody is told."""
        self._ip("hub", "link", "set", f"to-{host}", "down")

    def mend(self, host: str) -> None:
        self._ip("hub", "link", "set", f"to-{host}", "up")

    def _ip(self, place: str, *words: str) -> None:
        subprocess.run(["ip", "-netns", self.space(place), *words], check=True)


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    try:
        made.build()
        yield made
    finally:
        made.close()


@pytest.fixture
def server(network: Network) -> Iterator[DevServer]:
    """On the hub; the test itself is there as well."""
    settings = {"retry_base_s": 0.05, "lease_recovery_interval_s": 0.2, "scheduled_activation_s": 0.1}
    with (
        standing_in_network(network.path("hub")),
        dev_server(host=SERVER_ADDRESS, allow_remote=True, heartbeat_interval_s=1, **settings) as running,
    ):
        yield running


class Fleet:
    """The three daemons. `ledger` has what handlers did on any of them."""

    def __init__(self, workers: dict[str, Daemon], ledger: Ledger) -> None:
        self.workers = workers
        self.ledger = ledger

    def completed(self) -> dict[str, int]:
        """Jobs, by host."""
        return {host: len(worker.events("job_completed")) for host, worker in self.workers.items()}


@pytest.fixture
def fleet(network: Network, server: DevServer, tmp_path: Path) -> Iterator[Fleet]:
    ledger = Ledger(tmp_path / "ledger")
    options = ["--queue", "q", "--lease-duration", str(LEASE_S), "--abort-grace", "1", "--heartbeat-fraction", "0.3"]
    with contextlib.ExitStack() as stack:
        workers = {
            host: stack.enter_context(
                daemon(
                    "modes",
                    url=server.url,
                    api_key=server.api_key,
                    options=[*options, "--hostname", f"host-{host}"],
                    env={"LEDGER": str(ledger.path)},
                    wrap=["nsenter", f"--net={network.path(host)}"],
                )
            )
            for host in HOSTS
        }
        for worker in workers.values():
            worker.wait_for_event("worker_registered")
        yield Fleet(workers, ledger)


def instant(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))


def test_many_jobs_on_three_hosts_run_once_each(fleet: Fleet, server: DevServer) -> None:
    jobs = server.client.bulk("q", [{"mode": "spin", "seconds": 0.002, "n": n} for n in range(1000)])
    wait_until(lambda: server.client.stats("q")["completed"] == len(jobs), "all jobs completed", 90.0)
    assert sorted(entry["job"] for entry in fleet.ledger.entries("start")) == sorted(jobs)
    assert sorted(entry["job"] for entry in fleet.ledger.entries("end")) == sorted(jobs)
    for worker in fleet.workers.values():
        wait_until(lambda: sum(fleet.completed().values()) == len(jobs), "all of them in the logs")
        assert not worker.events("job_lease_lost")
        assert not worker.events("job_failed")
    shares = fleet.completed()
    assert min(shares.values()) > len(jobs) / 10, f"a fleet shares its work: {shares}"
    assert {found["hostname"] for found in server.client.workers()} == {f"host-{host}" for host in HOSTS}


def test_host_that_is_cut_off_fences_itself_and_heals(fleet: Fleet, server: DevServer, network: Network) -> None:
    """Its jobs are killed there before the service may give them to the others."""
    jobs = server.client.bulk("q", [{"mode": "spin", "seconds": 9.0, "n": n} for n in range(6)], max_retries=3)
    fleet.ledger.wait_for("start", 6)
    cut = fleet.workers["b"]
    cut.wait_for_event("job_started", count=2)  # a handler's line in the ledger may be there before
    mark = cut.mark()
    held = {event["job_id"] for event in cut.events("job_started")}
    assert len(held) == 2
    network.cut("b")
    lost = {}
    for job_id in held:
        lost[job_id] = cut.wait_for_event("job_lease_lost", after=mark, job_id=job_id, timeout_s=2.0 * LEASE_S)
    for job_id in held:
        cut.wait_for_event("child_killed", after=mark, reason="lease_lost", count=2)
        taken_back = wait_for_history(server, job_id, "lease_expired")
        gone_at = max(instant(event["ts"]) for event in cut.events("child_exited", after=mark))
        assert gone_at < instant(taken_back["created_at"]), "dead there before the lease was over"
    for job_id in jobs:
        assert server.client.wait_for(job_id, "completed", timeout_s=60.0)["result"] == "spun"
    fleet.ledger.assert_no_overlap()
    for job_id in jobs:
        runs = fleet.ledger.entries("start", job=job_id)
        assert len(runs) == (2 if job_id in held else 1)
        assert len(fleet.ledger.entries("end", job=job_id)) == 1
    assert cut.is_running
    assert cut.pid == cut.events("supervisor_started")[0]["pid"]

    mark = cut.mark()
    network.mend("b")
    cut.wait_for_event("heartbeat_sent", after=mark, timeout_s=30.0)
    cut.wait_for_event("api_recovered", after=mark, operation="claim q", timeout_s=45.0)  # it had backed off
    more = server.client.bulk("q", [{"mode": "spin", "seconds": 0.5} for _ in range(18)])
    for job_id in more:
        server.client.wait_for(job_id, "completed", timeout_s=40.0)
        assert fleet.ledger.runs(job_id) == 1
    assert cut.events("job_completed", after=mark), "it takes its share again"
    assert not cut.events("job_lease_lost", after=mark)


def wait_for_history(server: DevServer, job_id: str, kind: str) -> dict[str, Any]:
    """The job's first event of this kind."""

    def look() -> dict[str, Any] | None:
        return next((event for event in server.client.history(job_id) if event["event_type"] == kind), None)

    return dict(wait_until(look, f"{kind} of {job_id}: {server.client.history(job_id)}", 30.0))
