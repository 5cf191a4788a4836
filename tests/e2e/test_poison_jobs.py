"""Jobs that kill the child that runs them, queues full of them, and children that do not even start."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.stage import start_daemon
from tests.support.daemon import Daemon, wait_until
from tests.support.devserver import DevServer, dev_server
from tests.support.transports import options_of


@pytest.fixture
def server() -> Iterator[DevServer]:
    with dev_server(grpc_port=0, stream_poll_s=0.05, retry_base_s=0.01) as running:
        yield running


def options(
    server: DevServer, folder: Path, transport: str, *, procs: int = 1, queues: tuple[str, ...] = ("steps",)
) -> dict[str, object]:
    named = [word for queue in queues for word in ("--queue", queue)]
    return {
        "url": server.url,
        "api_key": server.api_key,
        "state_dir": folder / "state",
        "ledger": folder / "ledger",
        "procs": procs,
        "options": (*named, *options_of(transport, server.grpc_address), "--poll-interval", "0.05"),
    }


def pids(worker: Daemon, job_id: str) -> list[int]:
    return [entry["run"] // 1000 for entry in worker.ledger.entries("start", job=job_id)]


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL], ids=lambda n: n.name)
def test_the_second_run_is_alone_in_a_fresh_child_and_the_third_is_refused_with_the_evidence(
    server: DevServer, tmp_path: Path, transport: str, number: signal.Signals
) -> None:
    with start_daemon("steps", **options(server, tmp_path, transport)) as worker:
        # Another job has run in the child that the first run gets.
        before = server.client.create("steps", {})
        server.client.wait_for(before, "completed")
        job_id = server.client.create("steps", {"what": "signal", "signal": int(number)}, max_retries=4)
        job = server.client.wait_for(job_id, "deadletter")
        after = server.client.create("steps", {})
        server.client.wait_for(after, "completed")

        first, second = pids(worker, job_id)
        assert first == pids(worker, before)[0]
        assert second not in (first, *pids(worker, after))
        assert job["last_error"].startswith("not run: this job has killed its child 2 times")
        assert number.name in job["last_error"]
        errors = [event["error"] for event in worker.events("job_failed", job_id=job_id)]
        assert [error.startswith("not run") for error in errors] == [False, False, True, True, True]
        assert worker.stop() == 0


def test_a_second_run_that_ends_well_forgives_the_first(server: DevServer, tmp_path: Path, transport: str) -> None:
    with start_daemon("steps", **options(server, tmp_path, transport)) as worker:
        job_id = server.client.create("steps", {"what": "sleep", "seconds": 0.5}, max_retries=5)
        worker.ledger.wait_for("start", job=job_id)
        os.kill(pids(worker, job_id)[0], signal.SIGKILL)
        server.client.wait_for(job_id, "completed")
        _, second = pids(worker, job_id)
        left = worker.wait_for_event("child_exited", pid=second)
        assert left["reason"] == "isolation"
        assert worker.stop() == 0


def test_other_jobs_go_on_beside_a_poison_job(server: DevServer, tmp_path: Path, transport: str) -> None:
    with start_daemon("steps", **options(server, tmp_path, transport, procs=2)) as worker:
        long = server.client.create("steps", {"what": "sleep", "seconds": 1.0}, max_retries=0)
        worker.ledger.wait_for("start", job=long)
        bad = [server.client.create("steps", {"what": "signal", "signal": 11}, max_retries=3) for _ in range(2)]
        good = [server.client.create("steps", {"n": n}, max_retries=0) for n in range(20)]
        for job_id in (long, *good):
            assert server.client.wait_for(job_id, "completed", "deadletter", timeout_s=20.0)["status"] == "completed"
        for job_id in bad:
            server.client.wait_for(job_id, "deadletter", timeout_s=20.0)
            assert len(pids(worker, job_id)) == 2
        assert all(len(pids(worker, job_id)) == 1 for job_id in (long, *good))
        assert worker.stop() == 0


def test_a_restart_forgives_nothing(server: DevServer, tmp_path: Path, transport: str) -> None:
    job_id = server.client.create("steps", {"what": "signal", "signal": 11}, max_retries=3)
    with start_daemon("steps", **options(server, tmp_path, transport)) as worker:
        wait_until(lambda: len(worker.events("job_failed", job_id=job_id)) >= 2, "it has killed two children")
        worker.process.kill()
        worker.process.wait()
    with start_daemon("steps", **options(server, tmp_path, transport)) as worker:
        job = server.client.wait_for(job_id, "deadletter")
        assert job["last_error"].startswith("not run: ")
        assert len(pids(worker, job_id)) == 2
        assert worker.stop() == 0


def test_a_queue_whose_jobs_kill_their_children_is_left_alone_and_probed_and_the_others_are_not(
    server: DevServer, tmp_path: Path, transport: str
) -> None:
    patch = "import spooled_supervisor.breaker as b; b.PAUSE_FIRST_S = 1.0"
    with start_daemon(
        "steps", **options(server, tmp_path, transport, queues=("steps", "other")), patch=patch
    ) as worker:
        bad = [server.client.create("steps", {"what": "signal", "signal": 11}, max_retries=0) for _ in range(6)]
        good = server.client.create("steps", {}, max_retries=0)
        wait_until(lambda: len(worker.events("job_failed")) == 5, "five children have died")
        wait_until(lambda: any("steps" in reason for reason in worker.health()[1]["reasons"]), "it is told")
        other = server.client.create("other", {})
        server.client.wait_for(other, "completed")
        assert server.client.job(bad[5])["status"] == "pending", "nothing of this queue is claimed meanwhile"
        # One at a time: the first probe kills its child, the second one ends the pause.
        server.client.wait_for(bad[5], "deadletter", timeout_s=20.0)
        assert server.client.job(good)["status"] == "pending"
        server.client.wait_for(good, "completed", timeout_s=20.0)
        wait_until(lambda: worker.health()[0] == 200, "it is well again")
        assert worker.stop() == 0


APP = """
import os
from spooled_supervisor import App

app = App()

def is_open(fd):
    return os.path.exists("/proc/self/fd/%d" % fd)

@app.on_child_start
def start():
    {start}

@app.handler("q")
def handle(ctx):
    return os.getpid()
"""


@pytest.mark.parametrize(
    "start",
    [
        "if not os.path.exists('mended'): raise RuntimeError('no database')",
        "if not os.path.exists('mended'): os._exit(3)",
        "if not os.path.exists('mended'): os.kill(os.getpid(), 11)",
        "[os.write(fd, b'\\xff' * 64) for fd in range(3, 600) if not os.path.exists('mended') and is_open(fd)]",
    ],
    ids=["raises", "exits", "dies", "writes garbage"],
)
def test_children_that_do_not_start_are_tried_slowly_claim_nothing_and_heal_by_themselves(
    server: DevServer, tmp_path: Path, transport: str, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "looping.py").write_text(APP.format(start=start))
    monkeypatch.setattr("tests.chaos.stage.APPS", tmp_path)
    with start_daemon("looping", **options(server, tmp_path, transport, queues=("q",))) as worker:
        worker.traceback_is_fine = True
        failed = worker.wait_for_event("child_failed_to_boot", count=4)
        delays = [event["retry_in_s"] for event in worker.events("child_failed_to_boot")[:4]]
        assert delays[3] > delays[0], delays
        assert failed["cause"]
        job_id = server.client.create("q", None)
        status, document = worker.health()
        assert status == 503
        assert document["reasons"]
        assert server.client.job(job_id)["status"] == "pending"
        (tmp_path / "mended").touch()
        server.client.wait_for(job_id, "completed", timeout_s=20.0)
        wait_until(lambda: worker.health()[0] == 200, "it is well again")
        assert worker.stop() == 0
