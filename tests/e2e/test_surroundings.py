"""What the daemon, its children and their programs get to see and to hold; and what others see of them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import STUB_KEY, Bench, Site, stub_worker
from tests.support.daemon import (
    Daemon,
    command_line,
    environ_of,
    environment,
    is_alive,
    processes_of,
    state_of,
    title_of,
    wait_until,
)
from tests.support.stub_api import StubApi

SEED_METRICS = ("worker_jobs_processed_total", "worker_jobs_in_progress", "worker_job_processing_seconds")


# --- credentials ---------------------------------------------------------------------------------------------------


def test_key_is_nowhere_but_in_the_supervisor(site: Site, tmp_path: Path) -> None:
    secrets = {
        "CREDENTIALS_DIRECTORY": "/run/credentials/x",
        "NOTIFY_SOCKET": str(tmp_path / "notify"),
        "WATCHDOG_USEC": "30000000",
        "LISTEN_FDS": "1",
        "SPOOLED_API_KEY_FILE": "/nowhere",
    }
    key = site.server.api_key
    with site.worker(env=secrets) as worker:
        worker.wait_until_running()
        seen = site.result("look")
        for name in (*secrets, "SPOOLED_API_KEY", "WATCHDOG_PID", "LISTEN_PID"):
            assert name not in seen["environ"], name
        for pid in (worker.fork_server, *worker.children()):
            assert environ_of(pid), "readable, and it has to be, for the marker"
            assert key not in str(environ_of(pid))
        for pid in (worker.pid, worker.fork_server, *worker.children()):
            assert key not in title_of(pid)
        for page in ("/metrics", "/health", "/status.json", "/readyz"):
            assert key not in worker.get(page)[1]
        site.error("raise", text=f"it is {key}")
        assert key not in worker.log
        status = worker.get("/status.json")[1]
        assert key not in status
        assert "it is ***" in status


def test_handlers_cannot_read_the_supervisors_memory_or_environment(site: Site) -> None:
    with site.worker(options=["--child-nice", "0"]) as worker:
        worker.wait_until_running()
        owner = Path(f"/proc/{worker.pid}/environ").stat().st_uid
        assert owner == 0, "not dumpable: its files belong to root"
        if os.geteuid() != 0:
            assert site.result("read_supervisor") == {"environ": -13, "mem": -13, "maps": -13}


# --- a child -------------------------------------------------------------------------------------------------------


def test_what_a_child_is_born_with(bench: Bench) -> None:
    seen = bench.result("look", fields={"timeout_seconds": 33})
    assert seen["ppid"] == bench.daemon.pid
    assert seen["sid"] == seen["pid"] == seen["pgid"]
    assert seen["nice"] == min(os.nice(0) + 5, 19), "the default, from where the tests themselves are"
    assert seen["oom_score_adj"] >= 300
    assert seen["stdin"] == ""
    assert seen["timeout_s"] == 33
    assert seen["threads"] == 1
    assert seen["cwd"] == str(bench.daemon.process.args and Path(__file__).parents[1] / "support" / "apps")
    assert seen["environ"]["SPOOLED_SUPERVISOR_STATE"] == str(bench.daemon.state_dir)
    foreign = {"httpx", "httpcore", "h11", "anyio", "prometheus_client", "spooled_supervisor.supervisor"}
    assert not foreign.intersection(seen["modules"])


def test_descriptors_of_a_child_are_its_own_and_few(bench: Bench) -> None:
    pids = bench.daemon.children()
    pipes: dict[int, set[str]] = {}
    for pid in pids:
        links = {fd: os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
        assert not [link for link in links.values() if link.startswith("socket:")], links
        assert links["0"] == "/dev/null"
        pipes[pid] = {link for link in links.values() if link.startswith("pipe:")}
        assert len(pipes[pid]) == 3, links
    assert not pipes[pids[0]] & pipes[pids[1]], "no pipe of a sibling"


def test_programs_of_handlers_get_the_standard_streams_only(bench: Bench) -> None:
    assert set(bench.result("look")["program_fds"]) <= {"0", "1", "2", "3"}  # 3: the listing itself


def test_signals_are_neither_blocked_nor_ignored_in_programs_of_handlers(bench: Bench) -> None:
    seen = bench.result("lock_signals")
    assert int(seen["program"]["SigBlk"], 16) == 0
    assert int(seen["own"]["SigBlk"], 16) == 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGCHLD):
        assert not int(seen["program"]["SigIgn"], 16) & 1 << (number - 1), number


def test_random_numbers_differ_from_child_to_child(site: Site) -> None:
    with site.worker(options=["--max-jobs-per-child", "1"]) as worker:
        seen = [site.result("look") for _ in range(6)]
        assert len({s["pid"] for s in seen}) == 6
        assert len({s["random"][0] for s in seen}) == 6
        assert len({s["random"][1] for s in seen}) == 1, "imported once"
        assert worker.events("child_exited")[0]["reason"] == "jobs"


@pytest.mark.parametrize("given", [None, "7"])
def test_numeric_libraries_get_the_childs_share_of_the_cpus(site: Site, given: str | None) -> None:
    cpus = len(os.sched_getaffinity(0))
    with site.worker(procs=cpus, env={} if given is None else {"OMP_NUM_THREADS": given}):
        seen = site.result("look")["environ"]
        assert seen["OMP_NUM_THREADS"] == (given or "1")
        assert seen["OPENBLAS_NUM_THREADS"] == seen["MKL_NUM_THREADS"] == "1"


def test_titles_tell_the_role_and_nothing_else(site: Site) -> None:
    with site.worker() as worker:
        worker.wait_until_running()
        job_id = site.add("spin", seconds=600, secret="payload-of-the-job")
        (start,) = worker.ledger.wait_for("start", job=job_id)
        assert title_of(worker.pid) == "spooled-supervisor: supervisor running"
        assert title_of(worker.fork_server) == "spooled-supervisor: fork server"
        busy = title_of(start["pid"])
        assert re.fullmatch(rf"spooled-supervisor: child [01] running {site.prefix}q", busy), busy
        (idle,) = (title_of(pid) for pid in worker.children() if pid != start["pid"])
        assert re.fullmatch(r"spooled-supervisor: child [01] idle", idle), idle
        worker.signal(signal.SIGQUIT)
        assert worker.wait() == 0


def test_titles_leave_the_environment_readable(bench: Bench) -> None:
    for pid in bench.daemon.children():
        assert environ_of(pid)["SPOOLED_SUPERVISOR_STATE"] == str(bench.daemon.state_dir)


# --- what the endpoints say ----------------------------------------------------------------------------------------


def test_metrics_carry_the_names_of_the_seed_and_count_jobs(site: Site) -> None:
    with site.worker() as worker:
        queue = site.prefix + "q"
        worker.wait_until_running()
        at_start = worker.metrics()
        assert at_start[f'worker_jobs_processed_total{{queue="{queue}",status="completed"}}'] == 0
        site.run("ok")
        site.run("raise")
        site.run("os_exit", status=0)
        job_id = site.add("spin", seconds=600)
        worker.ledger.wait_for("start", job=job_id)
        text = worker.get("/metrics")[1]
        for name in SEED_METRICS:
            assert re.search(rf"^{name}", text, re.MULTILINE), name
        samples = worker.metrics()
        assert samples[f'worker_jobs_processed_total{{queue="{queue}",status="completed"}}'] == 1
        assert samples[f'worker_jobs_processed_total{{queue="{queue}",status="failed"}}'] == 2
        assert samples[f'worker_jobs_in_progress{{queue="{queue}"}}'] == 1
        assert samples[f'worker_job_processing_seconds_count{{queue="{queue}"}}'] == 3
        assert (
            samples[f'spooled_supervisor_job_failures_total{{kind="crashed",queue="{queue}"}}'] == 1
            if (f'spooled_supervisor_job_failures_total{{kind="crashed",queue="{queue}"}}' in samples)
            else samples[f'spooled_supervisor_job_failures_total{{queue="{queue}",kind="crashed"}}'] == 1
        )
        assert samples['spooled_supervisor_child_restarts_total{reason="crash"}'] == 1
        assert samples["spooled_supervisor_leases_held"] == 1
        status, health = worker.health()
        assert status == 200
        assert set(health) >= {"status", "worker_id", "current_jobs", "uptime_seconds", "state", "queues", "children"}
        assert (health["status"], health["current_jobs"]) == ("healthy", 1)
        worker.signal(signal.SIGQUIT)
        assert worker.wait() == 0


def test_series_do_not_grow_with_jobs_and_children(site: Site) -> None:
    with site.worker(options=["--max-jobs-per-child", "2"]) as worker:
        site.run("ok")
        site.run("raise", text="first")
        wait_until(lambda: worker.status()["registered"], "registration")

        def names() -> set[str]:
            return {name for name in worker.metrics() if "api_request" not in name and "child_pss" not in name}

        before = names()
        ids = site.client.bulk(
            site.prefix + "q", [{"mode": "raise", "text": f"t{n}"} for n in range(60)], default_max_retries=0
        )
        for job_id in ids:
            site.end(job_id)
        assert {n for n in names() - before if "child_uss" not in n} == set()


def test_descriptors_memory_and_zombies_are_stable_over_many_children(site: Site) -> None:
    with site.worker(options=["--max-jobs-per-child", "1"]) as worker:
        worker.wait_until_running()
        site.client.bulk(site.prefix + "q", [{"mode": "ok"}] * 10)
        worker.wait_for_event("job_completed", count=10)
        worker.wait_for_children("idle", 2)
        fds = worker.fd_count()
        site.client.bulk(site.prefix + "q", [{"mode": "ok"}] * 60)
        worker.wait_for_event("job_completed", count=70)
        worker.wait_for_children("idle", 2)
        wait_until(lambda: worker.fd_count() <= fds + 2, "no more descriptors than before", 20)
        own = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
        assert not [pid for pid in own if state_of(int(pid)) == "Z"]


def test_idle_daemon_uses_next_to_no_cpu(site: Site) -> None:
    with site.worker(options=["--poll-interval", "1"]) as worker:
        worker.wait_until_running()
        worker.wait_for_event("heartbeat_sent")
        before, began = worker.cpu_s(), time.monotonic()
        time.sleep(3.0)
        share = (worker.cpu_s() - before) / (time.monotonic() - began)
        assert share < 0.03, f"{share:.1%} of a core"


# --- odd surroundings ----------------------------------------------------------------------------------------------


def test_closed_standard_streams_do_no_harm(site: Site, tmp_path: Path) -> None:
    """A service manager may leave 0, 1 and 2 closed: no pipe of ours may get such a number."""
    state = tmp_path / "state"
    line = command_line("modes", url=site.server.url, procs=2, state_dir=state, options=["--queue", site.prefix + "q"])
    env = environment(site.server.api_key, tmp_path / "ledger", {"QUEUE_PREFIX": site.prefix})
    line[line.index("127.0.0.1:0")] = "off"
    close = "import os,sys; os.closerange(0, 3); os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-ISc", close, *line], env=env, cwd=Path(__file__).parents[1] / "support/apps"
    )
    try:
        assert site.result("log") == "logged"
        assert site.result("result", what="large")
        assert "SIGKILL" in site.error("kill_self")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not processes_of(state), "nothing left")


def test_log_that_nobody_reads_does_not_stop_the_daemon(site: Site, tmp_path: Path) -> None:
    """Its standard error is a pipe that is full and stays so."""
    reading, writing = os.pipe()
    state = tmp_path / "state"
    line = command_line("modes", url=site.server.url, procs=2, state_dir=state, options=["--queue", site.prefix + "q"])
    env = environment(site.server.api_key, tmp_path / "ledger", {"QUEUE_PREFIX": site.prefix})
    line[line.index("127.0.0.1:0")] = "off"
    process = subprocess.Popen(
        line, env=env, cwd=Path(__file__).parents[1] / "support/apps", stdout=writing, stderr=writing
    )
    os.close(writing)
    try:
        for _ in range(3):
            assert site.run("flood", lines=3000)["status"] == "completed"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reading)
    wait_until(lambda: not processes_of(state), "nothing left")


def test_inherited_signal_settings_do_no_harm(site: Site) -> None:
    """nohup, and parents that block or ignore: SIGCHLD ignored would take our children's statuses away."""
    script = (
        "import os,signal,sys\n"
        "for n in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT): signal.signal(n, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
        "os.execvp(sys.argv[1], sys.argv[1:])"
    )
    with site.worker(wrap=["python3", "-c", script]) as worker:
        worker.wait_until_running()
        assert "killed by SIGKILL" in site.error("kill_self")
        seen = site.result("lock_signals")
        assert int(seen["program"]["SigBlk"], 16) == 0
        assert not int(seen["program"]["SigIgn"], 16) & 1 << (signal.SIGCHLD - 1)
        site.check_slots(worker)


needs_namespaces = pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "-pf", "--mount-proc", "true"], capture_output=True, check=False).returncode != 0,
    reason="no PID namespaces here",
)


@needs_namespaces
def test_as_pid_1_it_reaps_orphans_and_obeys_term(site: Site) -> None:
    with site.worker(wrap=["unshare", "-pf", "--mount-proc", "--kill-child"]) as outer:
        outer.exit_may_be = None
        assert outer.wait_for_event("supervisor_started")["pid"] == 1
        (pid,) = children_of(outer.pid)
        for _ in range(3):
            assert site.result("many_orphans", count=30) == "done"
        job_id = site.add("family", then="exit")
        assert site.end(job_id)["status"] == "deadletter"
        wait_until(lambda: not zombies_below(pid), "an end of all zombies")
        site.check_slots(outer)
        os.kill(pid, signal.SIGTERM)
        assert outer.wait() == 0
        assert outer.events("supervisor_stopped")


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def zombies_below(pid: int) -> list[int]:
    return [child for child in children_of(pid) if state_of(child) == "Z"]


def test_port_is_free_again_after_a_kill_though_a_program_of_a_handler_lives(site: Site, tmp_path: Path) -> None:
    with site.worker() as worker:
        site.result("ok")
        port = worker.http_port
        job_id = site.add("family", then="spin")
        worker.ledger.wait_for("process", 6, job=job_id)
        worker.kill()
        with site.worker(options=["--http-listen", f"127.0.0.1:{port}"]) as again:
            assert again.wait_for_event("endpoints_listening")["port"] == port
            again.wait_for_event("supervisor_started")
            again.signal(signal.SIGQUIT)
            assert again.wait() == 0


def test_two_daemons_of_one_machine_have_two_names(stub: StubApi) -> None:
    with stub_worker(stub) as one, stub_worker(stub) as other:
        ids = [worker.wait_for_event("supervisor_started")["worker_id"] for worker in (one, other)]
        for n in range(10):
            stub.add_job(payload={"mode": "ok", "n": n})
        wait_until(lambda: len(stub.completed) == 10, "all jobs")
    assert ids[0] != ids[1]
    assert {r.json["worker_id"] for r in stub.of("register")} == set(ids)


def test_relative_state_directory_and_key_file(stub: StubApi, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{STUB_KEY}\n")
    shutil.copy(Path(__file__).parents[1] / "support/apps/modes.py", tmp_path / "modes.py")
    with stub_worker(
        stub, cwd=tmp_path, options=["--api-key-file", "key"], env={"SPOOLED_API_KEY": "sp_test_of_somebody_else"}
    ) as worker:
        job_id = stub.add_job(payload={"mode": "ok"})
        wait_until(lambda: job_id in stub.completed, "the job")
        assert is_alive(worker.pid)


def test_rotated_key_is_read_again(stub: StubApi, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(STUB_KEY)
    with stub_worker(stub, options=["--api-key-file", str(file)]) as worker:
        worker.wait_until_running()
        wait_until(lambda: worker.readyz()[0] == 200, "ready")
        stub.api_key = "sp_test_the_rotated_one"
        wait_until(lambda: worker.readyz()[0] == 503, "refused")
        file.write_text("sp_test_the_rotated_one\n")
        job_id = stub.add_job(payload={"mode": "ok"})
        wait_until(lambda: job_id in stub.completed, "the job", 30)
        assert not leaks(worker, "rotated_one")


def leaks(worker: Daemon, secret: str) -> bool:
    return secret in worker.log
