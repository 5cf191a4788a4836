"""Signals to the supervisor, in every situation: what happens to jobs, to the worker's registration, to processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spooled_supervisor.child import STACK_SIGNAL
from tests.e2e.conftest import STUB_KEY, Site, stub_worker
from tests.support.daemon import Daemon, daemon, is_alive, processes_of, wait_until
from tests.support.stub_api import Reply, StubApi
from tests.support.transports import ASKED_FOR_JOBS


def status_of_worker(site: Site, worker: Daemon) -> str | None:
    """As the service lists it; None if it does not."""
    worker_id = worker.wait_for_event("supervisor_started")["worker_id"]
    return next((str(w["status"]) for w in site.client.workers() if w["id"] == worker_id), None)


# --- idle ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_stop_signal_while_idle_exits_0_at_once_and_deregisters(site: Site, number: signal.Signals) -> None:
    with site.worker() as worker:
        worker.wait_until_running()
        worker.wait_for_event("worker_registered")
        began = time.monotonic()
        worker.signal(number)
        assert worker.wait() == 0
        assert time.monotonic() - began < 3.0
        assert worker.events("worker_deregistered")
        assert worker.events("supervisor_stopped")[0]["unsettled"] == 0
        if number != signal.SIGQUIT:
            assert len(worker.ledger.entries("child_stop")) == 2, "stop hooks run in children that leave in peace"
        assert status_of_worker(site, worker) in (None, "offline")


def test_stop_while_idle_is_idempotent_over_many_starts(site: Site, tmp_path: Path) -> None:
    ids = set()
    for _ in range(3):
        with site.worker(state_dir=tmp_path / "state", procs=1) as worker:
            ids.add(worker.wait_for_event("supervisor_started")["worker_id"])
            assert worker.stop() == 0
    assert len(ids) == 1, "the worker keeps its id"


# --- jobs that finish in time --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_term_while_jobs_run_lets_them_finish(site: Site, number: signal.Signals) -> None:
    with site.worker() as worker:
        jobs = [site.add("spin", seconds=1.0) for _ in range(2)]
        for job_id in jobs:
            worker.ledger.wait_for("start", job=job_id)
        late = site.add("ok")
        worker.signal(number)
        worker.wait_for_event("phase_changed", phase="draining")
        assert worker.health()[0] == 503
        assert worker.health()[1]["status"] == "draining"
        assert worker.readyz()[0] == 503
        assert worker.get("/livez")[0] == 200
        assert worker.wait() == 0
        for job_id in jobs:
            job = site.client.job(job_id)
            assert (job["status"], job["result"]) == ("completed", "spun")
        assert site.client.job(late)["status"] == "pending", "nothing is claimed while draining"
        assert not worker.events("child_killed")


def test_term_tells_jobs_and_keeps_a_result_that_comes_before_the_limit(site: Site) -> None:
    with site.worker() as worker:
        told = site.add("cooperative")
        slow = site.add("finish_after_abort", seconds=0.3)
        for job_id in (told, slow):
            worker.ledger.wait_for("start", job=job_id)
        assert worker.stop() == 0
        assert site.client.job(told)["result"] == {"aborted": True, "reason": "shutdown"}
        assert site.client.job(slow)["result"] == "finished all the same"


def test_job_aborted_for_shutdown_is_failed_with_retry(site: Site) -> None:
    with site.worker(queues=("q", "q-raise")) as worker:
        jobs = [site.add("raise_if_aborted", max_retries=1), site.add("spin", queue="q-raise", max_retries=1)]
        for job_id in jobs:
            worker.ledger.wait_for("start", job=job_id)
        assert worker.stop() == 0
        for job_id in jobs:
            job = site.client.job(job_id)
            assert job["status"] in ("pending", "scheduled")
            assert job["last_error"] == "aborted by worker shutdown"
        assert not worker.events("child_killed")


def test_lease_is_renewed_and_heartbeats_go_on_during_a_drain(stub: StubApi) -> None:
    with stub_worker(stub, options=["--lease-duration", "5"]) as worker:
        stub.add_job(payload={"mode": "spin", "seconds": 6.5})
        worker.ledger.wait_for("start")
        worker.signal(signal.SIGTERM)
        draining = worker.wait_for_event("phase_changed", phase="draining")["seen_at"]
        assert worker.wait(30) == 0
        renewals = [request.at for request in stub.of("renew") if request.at > draining]
        assert len(renewals) >= 2
        assert [request.json["status"] for request in stub.of("heartbeat")][-1] == "draining"
        assert stub.completed == {"job-1": b'"spun"'}
        assert len(stub.of("deregister")) == 1
        assert stub.requests[-1].operation == "deregister", "it leaves the list last"


# --- jobs that do not ----------------------------------------------------------------------------------------------


def test_term_exceeding_the_limit_kills_and_fails_with_retry(site: Site) -> None:
    with site.worker(options=["--shutdown-timeout", "1"]) as worker:
        job_id = site.add("family", then="spin", max_retries=1)
        family = [e["process"] for e in worker.ledger.wait_for("process", 6, job=job_id)]
        began = time.monotonic()
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        assert 1.0 <= time.monotonic() - began < 5.0
        job = site.client.job(job_id)
        assert job["status"] in ("pending", "scheduled"), "another worker gets it"
        assert job["last_error"] == "Worker shutdown timeout"
        assert site.events(job_id).count("failed") == 1
        assert not any(map(is_alive, family))
        assert worker.events("worker_deregistered")


def test_shutdown_limit_of_zero_kills_at_once(site: Site) -> None:
    with site.worker(options=["--shutdown-timeout", "0"]) as worker:
        job_id = site.add("ignore_signals", max_retries=1)
        worker.ledger.wait_for("start", job=job_id)
        began = time.monotonic()
        assert worker.stop() == 0
        assert time.monotonic() - began < 3.0
        assert site.client.job(job_id)["last_error"] == "Worker shutdown timeout"


def test_timeout_during_a_drain_is_a_timeout(site: Site) -> None:
    with site.worker(options=["--abort-grace", "0.3"]) as worker:
        job_id = site.add("spin", max_retries=1, fields={"timeout_seconds": 1})
        worker.ledger.wait_for("start", job=job_id)
        assert worker.stop() == 0
        assert site.client.job(job_id)["last_error"].startswith("timed out")


def test_quit_kills_at_once_and_fails_with_retry(site: Site) -> None:
    with site.worker() as worker:
        job_id = site.add("family", then="spin", max_retries=1)
        family = [e["process"] for e in worker.ledger.wait_for("process", 6, job=job_id)]
        began = time.monotonic()
        worker.signal(signal.SIGQUIT)
        assert worker.wait() == 0
        assert time.monotonic() - began < 3.0
        assert site.client.job(job_id)["last_error"].startswith("Worker shutdown")
        assert not any(map(is_alive, family))


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_second_signal_kills_settles_and_exits_within_its_limit(site: Site, second: signal.Signals) -> None:
    with site.worker() as worker:
        jobs = [site.add("ignore_signals", max_retries=1), site.add("spin", max_retries=1)]
        for job_id in jobs:
            worker.ledger.wait_for("start", job=job_id)
        worker.signal(signal.SIGTERM)
        worker.wait_for_event("phase_changed", phase="draining")
        began = time.monotonic()
        worker.signal(second)
        assert worker.wait() == 0
        assert time.monotonic() - began < 5.0
        for job_id in jobs:
            assert site.client.job(job_id)["last_error"].startswith("Worker shutdown")
            assert site.events(job_id).count("failed") == 1


def test_second_term_with_a_dead_service_exits_1_within_its_limit(stub: StubApi) -> None:
    with stub_worker(stub) as worker:
        stub.add_job(payload={"mode": "spin"})
        worker.ledger.wait_for("start")
        stub.down()
        worker.signal(signal.SIGTERM)
        worker.wait_for_event("phase_changed", phase="draining")
        began = time.monotonic()
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 1
        assert time.monotonic() - began < 6.5
        stub.up()


def test_third_term_ends_it_by_the_signal_and_children_die_with_it(stub: StubApi) -> None:
    stub.on("fail", Reply(hang="before commit"), times=None)
    with stub_worker(stub) as worker:
        stub.add_job(payload={"mode": "family", "then": "spin"})
        family = [e["process"] for e in worker.ledger.wait_for("process", 6)]
        worker.signal(signal.SIGTERM)
        worker.wait_for_event("phase_changed", phase="draining")
        worker.signal(signal.SIGTERM)
        worker.wait_for_event("phase_changed", phase="stopping")
        stub.wait_for("fail")
        worker.signal(signal.SIGTERM)
        began = time.monotonic()
        assert worker.wait() == -signal.SIGTERM
        worker.assert_nothing_left(2.0)
        wait_until(lambda: not any(map(is_alive, family)), "the family's end", 2.0)
        assert time.monotonic() - began < 3.0


def test_three_terms_in_a_row_report_the_job_once(site: Site) -> None:
    with site.worker(options=["--shutdown-timeout", "5"]) as worker:
        worker.exit_may_be = None
        job_id = site.add("spin", max_retries=1, seconds=600)
        worker.ledger.wait_for("start", job=job_id)
        worker.signal(signal.SIGTERM)
        worker.wait_for_event("phase_changed", phase="draining")
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        assert site.events(job_id).count("failed") == 1


# --- during the start ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay_s", [0.0, 0.03, 0.06, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.7])
def test_term_during_the_start_exits_and_leaves_nothing(tmp_path: Path, delay_s: float) -> None:
    """Also where the service cannot be reached. Before Python has come up a signal has its default action."""
    with daemon("modes", url="http://127.0.0.1:9", api_key=STUB_KEY, state_dir=tmp_path / "state") as worker:
        time.sleep(delay_s)  # an instant is what is tested here
        began = time.monotonic()
        worker.exit_may_be = None
        worker.signal(signal.SIGTERM)
        assert worker.wait() in ((0, -signal.SIGTERM) if not worker.lines else (0,))
        assert time.monotonic() - began < 3.0
        worker.assert_nothing_left(1.0)
    with daemon("modes", url="http://127.0.0.1:9", api_key=STUB_KEY, state_dir=tmp_path / "state", procs=1) as again:
        again.wait_for_event("supervisor_started")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_stop_signal_while_the_app_is_imported_exits_0(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "slow.py").write_text("import time, subprocess\nsubprocess.Popen(['sleep', '100'])\ntime.sleep(100)\n")
    with daemon("slow", url="http://127.0.0.1:9", api_key=STUB_KEY, cwd=tmp_path) as worker:
        worker.wait_for_event("fork_server_started")
        wait_until(lambda: len(processes_of(worker.state_dir)) == 2, "the app's own process")
        began = time.monotonic()
        worker.signal(number)
        assert worker.wait() == 0
        assert time.monotonic() - began < 3.0


def test_term_while_children_boot_exits_0(site: Site, tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    with site.worker(app="boot", env={"BOOT_DIR": str(tmp_path)}) as worker:
        worker.ledger.wait_for("boot", 2)
        began = time.monotonic()
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        assert time.monotonic() - began < 4.0


def test_term_before_the_service_was_ever_reached_exits_0(tmp_path: Path) -> None:
    with daemon("modes", url="http://127.0.0.1:9", api_key=STUB_KEY) as worker:
        worker.wait_until_running()
        worker.wait_for_event("api_troubled")
        assert worker.readyz()[0] == 503
        assert worker.stop() == 0


def test_term_with_a_service_that_accepts_and_never_answers(stub: StubApi) -> None:
    for operation in ("register", "claim", "heartbeat", "deregister"):
        stub.on(operation, Reply(hang="before commit"), times=None)
    options = ["--shutdown-timeout", "2", "--lease-duration", "5"]
    with stub_worker(stub, options=options) as worker:
        stub.wait_for("claim")
        stub.wait_for("register")
        began = time.monotonic()
        worker.signal(signal.SIGTERM)
        assert worker.wait() in (0, 1)
        worker.exit_may_be = None
        assert time.monotonic() - began < 8.0


# --- claims in flight ----------------------------------------------------------------------------------------------


@ASKED_FOR_JOBS
def test_job_of_a_claim_that_was_in_flight_at_term_is_given_back(stub: StubApi) -> None:
    stub.on("claim", Reply(), Reply(delay_s=1.0, commit=True))
    with stub_worker(stub, procs=1) as worker:
        stub.wait_for("claim", 2)
        job_id = stub.add_job(payload={"mode": "ok"})
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        assert "not started" in stub.failed[job_id]
        assert len(stub.of("claim")) == 2
        assert worker.ledger.runs(job_id) == 0


@ASKED_FOR_JOBS
def test_job_of_a_claim_that_is_answered_after_the_drains_time_is_given_back_too(stub: StubApi) -> None:
    stub.on("claim", Reply(), Reply(delay_s=2.0, commit=True))
    with stub_worker(stub, procs=1, options=["--shutdown-timeout", "0.5s"]) as worker:
        stub.wait_for("claim", 2)
        job_id = stub.add_job(payload={"mode": "ok"})
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        assert "not started" in stub.failed[job_id]
        assert not stub.leases
        assert worker.ledger.runs(job_id) == 0


@ASKED_FOR_JOBS
def test_last_attempt_that_arrives_during_the_drain_is_run(stub: StubApi) -> None:
    stub.on("claim", Reply(), Reply(delay_s=0.7, commit=True))
    with stub_worker(stub, procs=1) as worker:
        stub.wait_for("claim", 2)
        job_id = stub.add_job(payload={"mode": "ok", "n": 7}, retry_count=3, max_retries=3)
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        assert job_id in stub.completed


def test_job_that_waits_for_a_child_at_term_is_given_back(stub: StubApi) -> None:
    with stub_worker(stub, procs=1, options=["--prefetch", "1"]) as worker:
        first = stub.add_job(payload={"mode": "spin", "seconds": 1.0})
        worker.ledger.wait_for("start", job=first)
        second = stub.add_job(payload={"mode": "ok"})
        worker.wait_for_event("job_claimed", job_id=second)
        assert worker.stop() == 0
        assert first in stub.completed
        assert "not started: the worker is shutting down" in stub.failed[second]


def test_result_that_the_service_does_not_take_during_a_drain_is_delivered_when_it_is_back(stub: StubApi) -> None:
    with stub_worker(stub) as worker:
        stub.add_job(payload={"mode": "spin", "seconds": 1.0})
        worker.ledger.wait_for("start")
        stub.down()
        worker.signal(signal.SIGTERM)
        worker.wait_for_event("job_completed")
        worker.wait_for_event("api_troubled", operation="settle")
        stub.up()
        assert worker.wait() == 0
        assert stub.completed == {"job-1": b'"spun"'}


def test_a_job_whose_start_nobody_knew_of_when_the_drain_began_has_its_own_limit(site: Site) -> None:
    """It is told to stop before its child has said that it runs."""
    options = ["--procs", "1", "--shutdown-timeout", "25s", "--abort-grace", "0.3s"]
    with site.worker(options=options) as worker:
        (child,) = worker.wait_until_running().children()
        os.kill(child, signal.SIGSTOP)
        job_id = site.add("spin", seconds=60.0, fields={"timeout_seconds": 1})
        worker.wait_for_children("busy", 1)
        worker.signal(signal.SIGTERM)
        worker.wait_for_event("phase_changed", phase="draining")
        began = time.monotonic()
        os.kill(child, signal.SIGCONT)
        assert worker.wait() == 0
        assert time.monotonic() - began < 10.0
        assert site.end(job_id)["last_error"].startswith("timed out: the job ran longer than its limit of 1 s")


@contextlib.contextmanager
def drain_with_an_untaken_job(site: Site, *, max_retries: int) -> Iterator[tuple[Daemon, int, str]]:
    """The drain has begun, and the only child, which is stopped, has not taken its job: daemon, child, job."""
    with site.worker(options=["--procs", "1", "--shutdown-timeout", "25s"]) as worker:
        (child,) = worker.wait_until_running().children()
        os.kill(child, signal.SIGSTOP)
        job_id = site.add("ok", max_retries=max_retries)
        worker.wait_for_children("busy", 1)
        worker.signal(signal.SIGTERM)
        worker.wait_for_event("phase_changed", phase="draining")
        yield worker, child, job_id


def test_a_job_that_no_child_has_taken_when_its_own_dies_in_a_drain_goes_back(site: Site) -> None:
    with drain_with_an_untaken_job(site, max_retries=3) as (worker, child, job_id):
        began = time.monotonic()
        os.kill(child, signal.SIGKILL)
        assert worker.wait() == 0
        assert time.monotonic() - began < 10.0
        job = site.client.job(job_id)
        assert (job["status"], job["last_error"]) == ("pending", "not started: the worker is shutting down")
        assert not worker.ledger.runs(job_id)


def test_a_last_attempt_that_no_child_has_taken_when_its_own_dies_in_a_drain_is_run_by_another(site: Site) -> None:
    with drain_with_an_untaken_job(site, max_retries=0) as (worker, child, job_id):
        os.kill(child, signal.SIGKILL)
        assert worker.wait() == 0
        assert site.client.job(job_id)["status"] == "completed"


# --- signals to more than the supervisor ---------------------------------------------------------------------------


def test_term_to_the_whole_process_group_lets_jobs_finish(site: Site) -> None:
    with site.worker() as worker:
        job_id = site.add("spin", seconds=1.0)
        worker.ledger.wait_for("start", job=job_id)
        os.killpg(worker.pid, signal.SIGTERM)
        assert worker.wait() == 0
        assert site.client.job(job_id)["status"] == "completed"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_signal_to_every_process_of_the_unit_lets_jobs_finish(site: Site, number: signal.Signals) -> None:
    """As systemd does with KillMode=control-group; CONT follows TERM there."""
    with site.worker() as worker:
        jobs = [site.add("spin", seconds=1.0) for _ in range(2)]
        for job_id in jobs:
            worker.ledger.wait_for("start", job=job_id)
        for pid in [*worker.leftovers(), worker.pid]:
            os.kill(pid, number)
            os.kill(pid, signal.SIGCONT)
        assert worker.wait() == 0
        for job_id in jobs:
            assert site.client.job(job_id)["status"] == "completed"
        assert not worker.events("job_failed")


@pytest.mark.parametrize(
    "number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTTIN, signal.SIGTTOU, signal.SIGWINCH]
)
def test_other_signals_to_every_process_of_the_unit_disturb_nobody(site: Site, number: signal.Signals) -> None:
    with site.worker() as worker:
        job_id = site.add("spin", seconds=0.7)
        worker.ledger.wait_for("start", job=job_id)
        for pid in [*worker.leftovers(), worker.pid]:  # the supervisor last: on TTOU a child leaves
            os.kill(pid, number)
        assert site.end(job_id)["status"] == "completed"
        site.check_slots(worker, 1 if number == signal.SIGTTOU else 2)  # TTOU takes one child away


@pytest.mark.parametrize("whose", ["child", "supervisor"])
def test_many_signals_at_once_hurt_nobody(site: Site, whose: str) -> None:
    """To who was stopped all come together, each with a frame on the stack of signals."""
    with site.worker() as worker:
        job_id = site.add("spin", seconds=0.7)
        (start,) = worker.ledger.wait_for("start", job=job_id)
        pid = start["pid"] if whose == "child" else worker.pid
        if whose == "child":
            numbers = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, STACK_SIGNAL]
        else:
            numbers = [signal.SIGUSR1, signal.SIGHUP, signal.SIGTTIN, signal.SIGCHLD, signal.SIGTERM]
        os.kill(pid, signal.SIGSTOP)
        for number in numbers:
            os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)
        assert site.end(job_id)["status"] == "completed"
        if whose == "supervisor":
            assert worker.wait() == 0


def test_ctrl_c_in_a_terminal_drains(site: Site) -> None:
    """The terminal sends INT to its foreground group: the supervisor alone, as children lead sessions of their own."""
    primary, secondary = os.openpty()
    try:
        popen = {"stdin": secondary, "start_new_session": True}
        claim_terminal = (
            "import fcntl,os,sys,termios; fcntl.ioctl(0, termios.TIOCSCTTY, 1); os.execvp(sys.argv[1], sys.argv[1:])"
        )
        with site.worker(popen=popen, wrap=["python3", "-c", claim_terminal]) as worker:
            job_id = site.add("spin", seconds=1.0)
            worker.ledger.wait_for("start", job=job_id)
            os.write(primary, b"\x03")
            worker.wait_for_event("command_received", command="SIGINT")
            assert worker.wait() == 0
            assert site.client.job(job_id)["status"] == "completed"
            assert "KeyboardInterrupt" not in worker.log
    finally:
        os.close(primary)
        os.close(secondary)


@ASKED_FOR_JOBS
def test_stop_and_continue_claims_nothing_while_quiet(stub: StubApi) -> None:
    with stub_worker(stub) as worker:
        worker.wait_until_running()
        stub.wait_for("claim", 2)
        worker.signal(signal.SIGTSTP)
        worker.wait_for_event("quieted")
        asked = len(stub.of("claim"))
        job_id = stub.add_job(payload={"mode": "ok"})
        assert worker.readyz()[0] == 503
        assert worker.health()[0] == 200, "quiet is healthy"
        time.sleep(0.5)  # five polls
        assert len(stub.of("claim")) <= asked + 1, "one may have been on its way"
        stub.wait_for("heartbeat")
        worker.signal(signal.SIGCONT)
        wait_until(lambda: job_id in stub.completed, "the job")


# --- signals to one child ------------------------------------------------------------------------------------------


def test_term_to_an_idle_child_replaces_it(site: Site) -> None:
    with site.worker() as worker:
        worker.wait_until_running()
        pid = worker.children()[0]
        os.kill(pid, signal.SIGTERM)
        gone = worker.wait_for_event("child_exited", pid=pid)
        assert gone["exit_code"] == 0
        assert len(worker.ledger.entries("child_stop", pid=pid)) == 1
        worker.wait_for_event("child_ready", count=3)
        site.check_slots(worker)
        assert not worker.events("child_failed_to_boot"), "asked to leave is no failure"
        assert worker.events("phase_changed")[-1]["phase"] == "running"


def test_term_to_a_busy_child_lets_its_job_finish_and_replaces_it(site: Site) -> None:
    with site.worker() as worker:
        job_id = site.add("spin", seconds=0.8)
        (start,) = worker.ledger.wait_for("start", job=job_id)
        os.kill(start["pid"], signal.SIGTERM)
        assert site.end(job_id)["status"] == "completed"
        gone = worker.wait_for_event("child_exited", pid=start["pid"])
        assert gone["reason"] == "terminated"
        site.check_slots(worker)


def test_term_to_each_new_child_at_once_ends_in_full_strength(site: Site) -> None:
    with site.worker() as worker:
        worker.wait_until_running()
        for count in range(3, 9):
            started = worker.wait_for_event("child_started", count=count - 2)
            with_suppressed_kill(started["pid"], signal.SIGTERM)
        site.check_slots(worker)


def with_suppressed_kill(pid: int, number: int) -> None:
    """It may have been faster."""
    subprocess.run(["kill", f"-{number}", str(pid)], stderr=subprocess.DEVNULL, check=False)
