"""After a `kill -9` of the supervisor at any step the next start settles what is valid; a bad disk loses no job."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.grpc_proxy import GrpcFaultProxy
from tests.chaos.proxy import FaultProxy
from tests.chaos.stage import Disk, launch
from tests.support.daemon import Daemon, is_alive, processes_of, wait_until
from tests.support.devserver import DevServer, dev_server
from tests.support.transports import EVERY_TRANSPORT, options_of

pytestmark = EVERY_TRANSPORT

START = dict[str, Any]


class Lives:
    """One state directory, one server, a proxy between: daemons that follow upon each other."""

    def __init__(self, server: DevServer, proxy: FaultProxy, options: Sequence[str], folder: Path) -> None:
        self.server = server
        self.proxy = proxy
        self.options = ("--queue", "steps", "--poll-interval", "0.05", "--abort-grace", "0.5", *options)
        self.client = server.client
        self.state_dir = folder / "state"
        self.ledger = folder / "ledger"
        self.stack = ExitStack()

    def start(
        self, *, procs: int = 1, url: str | None = None, patch: str = "", options: tuple[str, ...] = ()
    ) -> Daemon:
        worker = launch(
            "steps",
            url=url or self.proxy.url,
            api_key=self.server.api_key,
            state_dir=self.state_dir,
            ledger=self.ledger,
            procs=procs,
            options=(*self.options, *options),
            patch=patch,
        )
        self.stack.callback(worker.clean_up)
        return worker

    def kill(self, worker: Daemon) -> None:
        """As nobody can prepare for; the next one may start at once."""
        worker.process.kill()
        worker.process.wait()

    def end(self, worker: Daemon) -> None:
        assert worker.stop() == 0, worker.tail()
        worker.assert_no_traceback()
        wait_until(lambda: not processes_of(self.state_dir), "nothing is left")


@pytest.fixture
def lives(tmp_path: Path, transport: str) -> Iterator[Lives]:
    with (
        dev_server(grpc_port=0, stream_poll_s=0.05, retry_base_s=0.01, lease_recovery_interval_s=0.5) as server,
        FaultProxy(server.port) as proxy,
        GrpcFaultProxy(server.grpc_address, proxy) as grpc_proxy,
    ):
        made = Lives(server, proxy, options_of(transport, grpc_proxy.address), tmp_path)
        with made.stack:
            yield made


def facts(lives: Lives, job_id: str) -> list[str]:
    return [event["event_type"] for event in lives.client.history(job_id)]


# --- kill -9 at every step ------------------------------------------------------------------------------------------


def test_killed_while_a_claimed_job_waits_for_a_child(lives: Lives) -> None:
    worker = lives.start(options=("--prefetch", "1"))
    first = lives.client.create("steps", {"what": "wait"}, max_retries=0)
    worker.ledger.wait_for("start", job=first)
    waiting = lives.client.create("steps", {}, max_retries=1)
    worker.wait_for_event("job_claimed", job_id=waiting)
    lives.kill(worker)
    worker = lives.start()
    lives.client.wait_for(waiting, "completed")
    assert "it was started again" in lives.client.wait_for(first, "deadletter")["last_error"]
    told = {event["job_id"]: event["status"] for event in worker.events("leftover_reported")}
    assert told == {first: "failed", waiting: "failed"}
    assert worker.ledger.runs(waiting) == 1
    lives.end(worker)


def test_killed_while_a_job_runs_its_family_dies_and_it_is_failed_at_once(lives: Lives) -> None:
    worker = lives.start()
    job_id = lives.client.create("steps", {"what": "family"}, max_retries=0, timeout_seconds=300)
    (entry,) = worker.ledger.wait_for("family", job=job_id)
    lives.kill(worker)
    worker = lives.start()
    job = lives.client.wait_for(job_id, "deadletter")
    assert "the supervisor ended while it held this job" in job["last_error"]
    assert not any(is_alive(pid) for pid in entry["pids"]), "they were dead before the job was failed"
    (told,) = worker.events("leftover_reported")
    assert (told["job_id"], told["finished"]) == (job_id, False)
    lives.end(worker)


def test_a_survivor_of_an_earlier_life_is_killed_before_its_job_is_failed(lives: Lives) -> None:
    """The fork server is dead, too: nobody but the next start can do it."""
    worker = lives.start()
    job_id = lives.client.create("steps", {"what": "family"}, max_retries=0)
    (entry,) = worker.ledger.wait_for("family", job=job_id)
    os.kill(worker.fork_server, signal.SIGSTOP)
    fork_server = worker.fork_server
    lives.kill(worker)
    os.kill(fork_server, signal.SIGKILL)
    survivors = [pid for pid in entry["pids"] if is_alive(pid)]
    assert survivors, "what a handler starts does not die with the supervisor by itself"
    worker = lives.start()
    lives.client.wait_for(job_id, "deadletter")
    assert not any(is_alive(pid) for pid in survivors)
    assert worker.wait_for_event("survivors_killed")["count"] >= len(survivors)
    lives.end(worker)


@pytest.mark.parametrize("payload", [{}, {"what": "big"}], ids=["small", "big"])
def test_killed_while_the_service_is_down_a_finished_job_is_reported_by_the_next_life(
    lives: Lives, payload: START
) -> None:
    worker = lives.start()
    lives.proxy.set("reset_before", {"complete"})
    job_id = lives.client.create("steps", payload, max_retries=3)
    wait_until(lambda: lives.proxy.of("complete"), "a report was tried")
    lives.kill(worker)
    lives.proxy.clear()
    worker = lives.start()
    lives.client.wait_for(job_id, "completed")
    assert facts(lives, job_id) == ["created", "claimed", "completed"]
    told = worker.wait_for_event("leftover_reported", job_id=job_id)
    assert (told["status"], told["finished"]) == ("completed", True)
    assert worker.ledger.runs(job_id) == 1
    lives.end(worker)


@pytest.mark.parametrize("what", ["complete", "fail"])
def test_killed_after_the_service_took_a_report_whose_answer_was_lost(lives: Lives, what: str) -> None:
    worker = lives.start()
    lives.proxy.set("reset_after", {what})
    payload: START = {} if what == "complete" else {"what": "signal", "signal": int(signal.SIGKILL)}
    job_id = lives.client.create("steps", payload, max_retries=0)
    wait_until(lambda: lives.proxy.of(what), "a report was sent")
    lives.kill(worker)
    lives.proxy.clear()
    worker = lives.start().wait_until_running()
    worker.wait_for_event("leftover_reported", job_id=job_id)
    status = "completed" if what == "complete" else "deadletter"
    lives.client.wait_for(job_id, status)
    lives.end(worker)
    assert facts(lives, job_id) == ["created", "claimed", "completed" if what == "complete" else "failed"]
    assert worker.ledger.runs(job_id) == 1
    # And it is forgotten: a third life has nothing to tell.
    worker = lives.start().wait_until_running()
    assert not worker.events("leftover_reported")
    lives.end(worker)


def test_a_lease_that_has_ended_meanwhile_is_named_and_not_reported(lives: Lives) -> None:
    worker = lives.start(options=("--lease-duration", "5"))
    job_id = lives.client.create("steps", {"what": "wait"}, max_retries=0)
    worker.ledger.wait_for("start", job=job_id)
    lives.kill(worker)
    lives.client.wait_for(job_id, "deadletter", timeout_s=15.0)  # the service has taken it back
    worker = lives.start().wait_until_running()
    assert worker.wait_for_event("leftover_expired")["job_id"] == job_id
    lives.end(worker)
    assert facts(lives, job_id) == ["created", "claimed", "lease_expired"]


def test_outcomes_for_another_service_are_kept_and_named(lives: Lives) -> None:
    worker = lives.start()
    lives.proxy.set("reset_before", {"complete"})
    job_id = lives.client.create("steps", {})
    wait_until(lambda: lives.proxy.of("complete"), "a report was tried")
    lives.kill(worker)
    with dev_server() as other:
        worker = lives.start(url=other.url)
        kept = worker.wait_for_event("leftover_kept")
        assert (kept["job_id"], kept["api_url"]) == (job_id, lives.proxy.url)
        lives.end(worker)
    lives.proxy.clear()
    worker = lives.start()
    lives.client.wait_for(job_id, "completed")
    assert worker.ledger.runs(job_id) == 1
    lives.end(worker)


# --- the state directory --------------------------------------------------------------------------------------------


def test_a_locked_state_directory_names_the_one_that_holds_it(lives: Lives) -> None:
    worker = lives.start().wait_until_running()
    second = lives.start()
    assert second.wait() == 78
    assert f"pid {worker.pid}" in second.log
    assert "--state-dir" in second.log
    lives.end(worker)


def test_a_broken_file_is_put_aside_and_told(lives: Lives) -> None:
    lives.state_dir.mkdir()
    (lives.state_dir / "state.db").write_bytes(b"this is no database" * 500)
    worker = lives.start().wait_until_running()
    told = worker.wait_for_event("outbox_troubled")
    assert told["level"] == "error"
    assert "state.db.broken" in told["reason"]
    job_id = lives.client.create("steps", {})
    lives.client.wait_for(job_id, "completed")
    assert worker.readyz()[0] == 200
    assert (lives.state_dir / "state.db.broken").exists()
    lives.end(worker)


def full(worker: Daemon, disk: Disk) -> Callable[[], None]:
    disk.fill(worker.pid)
    return lambda: disk.free(worker.pid)


def locked(worker: Daemon, disk: Disk) -> Callable[[], None]:
    """Somebody holds a lock on the file for longer than anybody waits."""
    db = sqlite3.connect(worker.state_dir / "state.db", isolation_level=None)
    db.execute("BEGIN IMMEDIATE")
    return db.close


@pytest.mark.parametrize("fault", [full, locked])
def test_a_disk_that_fails_later_means_memory_only_and_costs_no_job(
    lives: Lives, tmp_path: Path, fault: Callable[[Daemon, Disk], Callable[[], None]]
) -> None:
    disk = Disk(tmp_path / "disk")
    lives.stack.callback(disk.close)
    lives.state_dir = disk.path / "state"
    worker = lives.start(patch="import spooled_supervisor.outbox as o; o.REOPEN_INTERVAL_S = 1.0").wait_until_running()
    lives.client.wait_for(lives.client.create("steps", {}), "completed")
    heal = fault(worker, disk)
    jobs = [lives.client.create("steps", payload, max_retries=0) for payload in ({}, {"what": "big"}) * 5]
    for job_id in jobs:
        assert lives.client.wait_for(job_id, "completed", "deadletter")["status"] == "completed"
    assert worker.wait_for_event("outbox_troubled")["level"] == "error"
    status, document = worker.readyz()
    assert status == 503
    assert any("in memory only" in reason for reason in document["reasons"]), document
    assert worker.metrics()["spooled_supervisor_outbox_on_disk"] == 0.0
    heal()
    worker.wait_for_event("outbox_recovered")
    assert worker.readyz()[0] == 200
    assert worker.metrics()["spooled_supervisor_outbox_on_disk"] == 1.0
    # What is held now is on disk again.
    held = lives.client.create("steps", {"what": "wait"}, max_retries=0)
    worker.ledger.wait_for("start", job=held)
    lives.kill(worker)
    worker = lives.start()
    lives.client.wait_for(held, "deadletter")
    assert [event["job_id"] for event in worker.events("leftover_reported")] == [held]
    lives.end(worker)


def test_a_start_on_a_full_disk_works_from_memory(lives: Lives, tmp_path: Path) -> None:
    disk = Disk(tmp_path / "disk")
    lives.stack.callback(disk.close)
    if not disk.is_tmpfs:
        pytest.skip("mounting a small disk is not permitted here")
    lives.state_dir = disk.path / "state"
    lives.end(lives.start().wait_until_running())
    disk.fill(0)
    worker = lives.start().wait_until_running()
    lives.client.wait_for(lives.client.create("steps", {}), "completed")
    worker.wait_for_event("outbox_troubled")
    lives.end(worker)


def test_what_an_earlier_life_has_left_is_settled_by_a_start_on_a_full_disk(lives: Lives, tmp_path: Path) -> None:
    """It can be read there, as long as nothing is written first."""
    disk = Disk(tmp_path / "disk")
    lives.stack.callback(disk.close)
    if not disk.is_tmpfs:
        pytest.skip("mounting a small disk is not permitted here")
    lives.state_dir = disk.path / "state"
    worker = lives.start()
    lives.proxy.set("reset_before", {"complete"})
    job_id = lives.client.create("steps", {})
    wait_until(lambda: lives.proxy.of("complete"), "a report was tried")
    lives.kill(worker)
    disk.fill(0)
    lives.proxy.clear()
    worker = lives.start()
    assert worker.wait_for_event("leftover_reported")["job_id"] == job_id
    lives.client.wait_for(job_id, "completed")
    assert worker.ledger.runs(job_id) == 1
    worker.wait_for_event("outbox_troubled")
    lives.end(worker)


def test_a_full_outbox_stops_claims_until_the_service_takes_reports_again(lives: Lives) -> None:
    worker = lives.start(patch="import spooled_supervisor.outbox as o; o.MAX_OUTCOMES = 2").wait_until_running()
    lives.proxy.set("error_500", {"complete"})
    jobs = [lives.client.create("steps", {"n": n}) for n in range(8)]
    wait_until(lambda: worker.metrics()["spooled_supervisor_outbox_depth"] >= 2, "two outcomes wait")
    status, document = worker.readyz()
    assert status == 503
    assert any("outbox is full" in reason for reason in document["reasons"])
    claimed = len(worker.events("job_claimed"))
    assert claimed <= 3
    lives.proxy.clear()
    for job_id in jobs:
        lives.client.wait_for(job_id, "completed", timeout_s=20.0)
    assert worker.readyz()[0] == 200
    lives.end(worker)
