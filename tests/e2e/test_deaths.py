"""kill -9 of a child, of the fork server, of the supervisor; children that cannot start, or not in time."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import Site, check_only_its_own, stub_worker
from tests.support.daemon import is_alive, parent_of, wait_until
from tests.support.stub_api import StubApi

# --- a child -------------------------------------------------------------------------------------------------------


def test_kill_of_an_idle_child_costs_nothing(site: Site) -> None:
    with site.worker() as worker:
        worker.wait_until_running()
        pid = worker.children()[0]
        os.kill(pid, signal.SIGKILL)
        assert worker.wait_for_event("child_exited", pid=pid)["signal"] == "SIGKILL"
        site.check_slots(worker)
        assert not worker.events("job_failed")


def test_kill_of_a_busy_child_fails_its_job_once_and_no_other(site: Site) -> None:
    with site.worker() as worker:
        victim, other = site.add("spin", max_retries=0), site.add("spin", seconds=1.0)
        (start,) = worker.ledger.wait_for("start", job=victim)
        worker.ledger.wait_for("start", job=other)
        began = time.monotonic()
        os.kill(start["pid"], signal.SIGKILL)
        job = site.end(victim)
        assert time.monotonic() - began < 1.5
        assert "killed by SIGKILL without an outcome" in job["last_error"]
        assert site.events(victim) == ["created", "claimed", "failed"]
        assert site.end(other)["status"] == "completed"
        site.check_slots(worker)


def test_all_children_killed_at_once_are_all_noticed(site: Site) -> None:
    with site.worker(procs=4) as worker:
        for _ in range(3):
            jobs = [site.add("spin") for _ in range(4)]
            pids = [worker.ledger.wait_for("start", job=job_id)[0]["pid"] for job_id in jobs]
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            for job_id in jobs:
                assert "SIGKILL" in site.end(job_id)["last_error"]
                assert site.events(job_id).count("failed") == 1
            site.check_slots(worker, 4)
        check_only_its_own(worker)


def test_kills_of_idle_children_while_jobs_arrive_lose_and_repeat_none(site: Site) -> None:
    with site.worker() as worker:
        worker.wait_until_running()
        ids: list[str] = []
        for n in range(12):
            ids += site.client.bulk(site.prefix + "q", [{"mode": "ok", "n": n}] * 3, default_max_retries=3)
            idle = [c["pid"] for c in worker.status()["children"] if c["state"] == "idle"]
            for pid in idle[:1]:
                with contextlib.suppress(ProcessLookupError):  # it has been replaced
                    os.kill(pid, signal.SIGKILL)
        for job_id in ids:
            job = site.end(job_id)
            assert job["status"] == "completed"
            starts, failures = worker.ledger.runs(job_id), site.events(job_id).count("failed")
            assert starts <= failures + 1
            assert failures <= 1


def test_stopped_child_is_noticed_by_its_timeout_only(site: Site) -> None:
    with site.worker(options=["--abort-grace", "0.3"]) as worker:
        job_id = site.add("spin", fields={"timeout_seconds": 1})
        (start,) = worker.ledger.wait_for("start", job=job_id)
        os.kill(start["pid"], signal.SIGSTOP)
        assert site.end(job_id)["last_error"].startswith("timed out")
        site.check_slots(worker)


# --- the fork server -----------------------------------------------------------------------------------------------


def test_kill_of_the_fork_server_while_idle_starts_another(site: Site) -> None:
    with site.worker() as worker:
        worker.wait_until_running()
        children = worker.children()
        os.kill(worker.fork_server, signal.SIGKILL)
        worker.wait_for_event("fork_server_ready", generation=2)
        assert worker.children() == children, "its death costs no child"
        os.kill(children[0], signal.SIGKILL)
        worker.wait_for_event("child_ready", generation=2)
        site.check_slots(worker)


def test_kill_of_the_fork_server_while_jobs_run_costs_none(site: Site) -> None:
    with site.worker() as worker:
        jobs = [site.add("spin", seconds=1.0) for _ in range(2)]
        for job_id in jobs:
            worker.ledger.wait_for("start", job=job_id)
        os.kill(worker.fork_server, signal.SIGKILL)
        for job_id in jobs:
            assert site.end(job_id)["status"] == "completed"
        worker.wait_for_event("fork_server_ready", generation=2)
        site.check_slots(worker)


def test_fork_server_that_is_stopped_is_replaced_when_a_child_is_needed(site: Site) -> None:
    with site.worker(options=["--boot-timeout", "1"]) as worker:
        worker.wait_until_running()
        os.kill(worker.fork_server, signal.SIGSTOP)
        os.kill(worker.children()[0], signal.SIGKILL)
        worker.wait_for_event("fork_server_ready", generation=2)
        site.check_slots(worker)


def test_handler_that_kills_its_parent_kills_the_supervisor_and_nothing_stays(site: Site) -> None:
    """Children hang directly off the supervisor: this is a supervisor that was killed."""
    with site.worker() as worker:
        worker.exit_may_be = None
        site.add("kill_parent")
        assert worker.wait() == -signal.SIGKILL
        worker.assert_nothing_left(2.0)


# --- the supervisor ------------------------------------------------------------------------------------------------


def test_kill_of_the_supervisor_ends_children_and_all_they_started(site: Site, tmp_path: Path) -> None:
    with site.worker(state_dir=tmp_path / "state") as worker:
        job_id = site.add("family", then="spin", max_retries=1)
        family = [e["process"] for e in worker.ledger.wait_for("process", 6, job=job_id)]
        children = worker.children()
        worker.kill()
        worker.assert_nothing_left(2.0)
        wait_until(lambda: not any(map(is_alive, [*children, *family])), "the end of all", 2.0)
        ticks = len(worker.ledger.entries("tick"))
        time.sleep(0.3)
        assert len(worker.ledger.entries("tick")) == ticks, "nobody works on"


def test_restart_after_a_kill_works_at_once_on_the_same_state_directory(site: Site, tmp_path: Path) -> None:
    state = tmp_path / "state"
    with site.worker(state_dir=state) as worker:
        job_id = site.add("spin")
        worker.ledger.wait_for("start", job=job_id)
        worker_id = worker.events("supervisor_started")[0]["worker_id"]
        port = worker.http_port
        worker.kill()
        began = time.monotonic()
        with site.worker(state_dir=state, options=["--http-listen", f"127.0.0.1:{port}"]) as again:
            assert again.wait_for_event("supervisor_started")["worker_id"] == worker_id
            assert time.monotonic() - began < 5.0
            reported = again.wait_for_event("leftover_reported", job_id=job_id)
            assert not reported["finished"]
            wait_until(lambda: site.events(job_id).count("failed") == 1, "the failure of the job that was running")
            site.check_slots(again)
            again.signal(signal.SIGQUIT)
            assert again.wait() == 0
        worker.ledger.assert_no_overlap()


def test_kill_of_the_supervisor_during_a_fork_storm_leaves_nothing(site: Site, tmp_path: Path) -> None:
    for n in range(4):
        with site.worker(procs=4, state_dir=tmp_path / f"state{n}") as worker:
            worker.wait_for_event("child_started", count=1 + n % 3)
            worker.kill()
            worker.assert_nothing_left(2.0)


def test_outcome_that_was_not_sent_before_a_kill_is_sent_by_the_next_start(stub: StubApi, tmp_path: Path) -> None:
    with stub_worker(stub, state_dir=tmp_path / "state") as worker:
        job_id = stub.add_job(payload={"mode": "spin", "seconds": 0.5})
        worker.ledger.wait_for("start", job=job_id)
        stub.down()
        worker.wait_for_event("job_completed", job_id=job_id)
        worker.wait_for_event("api_troubled", operation="settle")
        worker.kill()
    stub.up()
    with stub_worker(stub, state_dir=tmp_path / "state") as again:
        wait_until(lambda: stub.completed, "the result")
        assert stub.completed == {job_id: b'"spun"'}
        assert again.ledger.runs(job_id) == 0


# --- children that do not start ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["crash", "exit", "raise"])
def test_children_that_cannot_start_degrade_the_worker_until_they_can(site: Site, tmp_path: Path, how: str) -> None:
    boot = tmp_path / "boot"
    boot.mkdir()
    with site.worker(app="boot", env={"BOOT_DIR": str(boot)}) as worker:
        worker.wait_until_running()
        (boot / how).touch()
        for pid in worker.children():
            os.kill(pid, signal.SIGKILL)
        failed = worker.wait_for_event("child_failed_to_boot", count=3)
        assert {"crash": "SIGKILL", "exit": "status 0", "raise": "the database is down"}[how] in failed["cause"]

        def is_degraded() -> bool:
            """Not so in the moment in which a child is tried again."""
            status, body = worker.health()
            return status == 503 and "every child fails" in str(body["reasons"])

        wait_until(is_degraded, "degraded")
        wait_until(lambda: worker.readyz()[0] == 503, "not ready")
        job_id = site.add("ok")
        boots, cpu, began = len(worker.ledger.entries("boot")), worker.cpu_s(), time.monotonic()
        worker.wait_for_event("child_failed_to_boot", count=len(worker.events("child_failed_to_boot")) + 2)
        elapsed = time.monotonic() - began
        assert len(worker.ledger.entries("boot")) - boots <= 4 + 4 * elapsed, "the pauses grow"
        assert worker.cpu_s() - cpu < 0.2 + 0.2 * elapsed
        assert site.client.job(job_id)["status"] == "pending", "nothing is claimed"
        (boot / how).unlink()
        assert site.end(job_id, timeout_s=30)["status"] == "completed", "it heals by itself"
        wait_until(lambda: worker.health()[0] == 200, "healthy again", 30)


def test_start_that_takes_too_long_is_ended_with_its_family_and_says_so(site: Site, tmp_path: Path) -> None:
    boot = tmp_path / "boot"
    boot.mkdir()
    for name in ("hang", "family"):
        (boot / name).touch()
    with site.worker(app="boot", procs=1, env={"BOOT_DIR": str(boot)}, options=["--boot-timeout", "1"]) as worker:
        failed = worker.wait_for_event("child_failed_to_boot")
        assert "--boot-timeout 1 s" in failed["cause"]
        started = worker.ledger.entries("process")[0]["process"]
        wait_until(lambda: not is_alive(started), "the end of what the hook had started", 3.0)
        (boot / "hang").unlink()
        job_id = site.add("ok")
        assert site.end(job_id, timeout_s=30)["status"] == "completed"


def test_slow_start_within_the_limit_is_waited_for(site: Site, tmp_path: Path) -> None:
    (tmp_path / "slow").write_text("1.0")
    job_id = site.add("ok")
    with site.worker(app="boot", env={"BOOT_DIR": str(tmp_path)}) as worker:
        worker.wait_for_event("fork_server_ready")
        assert worker.health()[0] == 503
        assert worker.health()[1]["state"] == "booting"
        assert site.end(job_id)["status"] == "completed"
        assert not worker.events("child_failed_to_boot")


def test_children_that_die_soon_after_their_hello_back_off(site: Site, tmp_path: Path) -> None:
    (tmp_path / "die").touch()
    with site.worker(app="boot", procs=1, env={"BOOT_DIR": str(tmp_path)}) as worker:
        worker.wait_for_event("child_failed_to_boot", count=4)
        delays = [e["retry_in_s"] for e in worker.events("child_failed_to_boot")]
        assert delays[3] > delays[0], "the pauses grow"


def test_stop_hook_that_hangs_does_not_hold_the_daemon(site: Site, tmp_path: Path) -> None:
    (tmp_path / "stop-hang").touch()
    with site.worker(app="boot", env={"BOOT_DIR": str(tmp_path)}) as worker:
        worker.wait_until_running()
        began = time.monotonic()
        assert worker.stop() == 0
        assert time.monotonic() - began < 6.0


def test_async_hooks_run_on_the_loop_of_the_handlers(site: Site) -> None:
    with site.worker(app="async_hooks", procs=1) as worker:
        assert site.end(site.add("any"))["result"] is True
        assert worker.stop() == 0
        assert [e["same_loop"] for e in worker.ledger.entries("child_stop")] == [True]


def test_children_are_the_supervisors_own_and_lead_sessions(site: Site) -> None:
    with site.worker() as worker:
        worker.wait_until_running()
        for pid in worker.children():
            assert parent_of(pid) == worker.pid
            assert os.getsid(pid) == pid
            assert os.getpgid(pid) == pid
