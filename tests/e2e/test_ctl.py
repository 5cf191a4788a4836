"""What operators tell a running daemon, by the control socket and by signals, in every situation."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from spooled_supervisor.control import MAX_PATH, ask
from tests.e2e.conftest import Site
from tests.support.daemon import Daemon, Finished, environment, run_line, wait_until

INSIDER = """
import json, os, socket, subprocess, sys, time
from pathlib import Path
from spooled_supervisor import App
from spooled_supervisor.control import ask
from tests.support.apps.ledger import Run

app = App()

@app.handler(os.environ["QUEUE_PREFIX"] + "q")
def handle(ctx):
    run = Run(ctx)
    path = Path(ctx.payload["socket"])
    answer = None
    if ctx.payload["who"] == "child":
        answer = ask(path, {"command": "stop"}, timeout_s=10)
    elif ctx.payload["who"] == "program":
        line = [sys.executable, "-m", "spooled_supervisor", "ctl", "stop", "--control-socket", str(path)]
        done = subprocess.run(line, capture_output=True, text=True)
        answer = {"ok": done.returncode == 0, "text": done.stderr.strip()}
    elif ctx.payload["who"] == "orphan":
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(write, json.dumps(ask(path, {"command": "stop"}, timeout_s=10)).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        os.close(write)
        answer = json.loads(os.read(read, 65536))
    else:
        for _ in range(50):
            if (pid := os.fork()) == 0:
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.connect(str(path))
                    sock.sendall(b'{"command": "stop"}\\n')
                os._exit(0)
            os.waitpid(pid, 0)
    run.end()
    return answer
"""


def socket_of(worker: Daemon) -> Path:
    return worker.state_dir / "control.sock"


def tell(worker: Daemon, command: str, **fields: Any) -> dict[str, Any]:
    """One request by the socket, and its answer."""
    return ask(socket_of(worker), {"command": command, **fields}, timeout_s=10.0)


def done(worker: Daemon, command: str, **fields: Any) -> str:
    """The text of an answer that must be good."""
    answer = tell(worker, command, **fields)
    assert answer["ok"], answer
    return str(answer["text"])


def refused(worker: Daemon, command: str, **fields: Any) -> str:
    """The text of a refusal."""
    answer = tell(worker, command, **fields)
    assert not answer["ok"], answer
    return str(answer["text"])


def command(*words: str, cwd: Path) -> Finished:
    """The command line, as a person types it."""
    line = [sys.executable, "-m", "spooled_supervisor", *words]
    return run_line(line, env=environment(None), state_dir=cwd, cwd=cwd)


def held(site: Site, worker: Daemon, count: int = 1) -> tuple[list[str], Path]:
    """Jobs that run until the file is there."""
    gate = site.tmp_path / "gate"
    jobs = [site.add("gate", file=str(gate)) for _ in range(count)]
    for job_id in jobs:
        worker.ledger.wait_for("start", job=job_id)
    return jobs, gate


# --- the socket -------------------------------------------------------------------------------------------------------


def test_the_socket_is_the_owners_only_and_goes_with_the_daemon(site: Site, tmp_path: Path) -> None:
    with site.worker(state_dir=tmp_path / "state") as worker:
        worker.wait_until_running()
        found = socket_of(worker).lstat().st_mode
        assert stat.S_ISSOCK(found)
        assert stat.S_IMODE(found) == 0o600
        assert worker.stop() == 0
        assert not socket_of(worker).exists()


def test_ctl_and_status_find_it_by_the_daemons_own_options_and_have_exit_codes(site: Site, tmp_path: Path) -> None:
    with site.worker(state_dir=tmp_path / "state") as worker:
        worker.wait_until_running()
        where = ("--app", "modes", "--state-dir", str(tmp_path / "state"))
        assert command("ctl", "quiet", *where, cwd=tmp_path).code == 0
        again = command("ctl", "quiet", *where, cwd=tmp_path)
        assert (again.code, again.output) == (0, "quiet already: ctl\n")
        much = command("ctl", "scale", "0", *where, cwd=tmp_path)
        assert (much.code, much.output) == (1, "scale 0: it must be a whole number from 1 to 1000\n")
        assert command("ctl", "scale", "many", *where, cwd=tmp_path).code == 64
        assert command("ctl", "jump", *where, cwd=tmp_path).code == 64
        status = command("status", "--json", *where, cwd=tmp_path)
        assert status.code == 0
        assert json.loads(status.output)["quiet"] is True
        assert command("ctl", "stop", *where, cwd=tmp_path).output == "stopping\n"
        assert worker.wait() == 0
    for words in (("ctl", "quiet"), ("status",)):
        nobody = command(*words, *where, cwd=tmp_path)
        assert nobody.code == 69
        assert f"{tmp_path}/state/control.sock: no supervisor listens there" in nobody.output


def test_a_path_that_is_too_long_for_a_socket_works(site: Site, tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 60) / ("e" * 60)
    path = folder / "c.sock"
    assert len(str(path)) > MAX_PATH
    with site.worker(options=["--control-socket", str(path)]) as worker:
        worker.wait_until_running()
        assert command("ctl", "quiet", "--control-socket", str(path), cwd=tmp_path).code == 0
        assert worker.stop() == 0
        assert not path.exists()


def test_the_file_of_a_killed_daemon_is_replaced(site: Site, tmp_path: Path) -> None:
    with site.worker(state_dir=tmp_path / "state") as worker:
        worker.wait_until_running()
        worker.kill()
        assert socket_of(worker).exists()
    with site.worker(state_dir=tmp_path / "state") as worker:
        worker.wait_until_running()
        assert done(worker, "quiet")


def test_a_second_daemon_at_the_same_socket_is_refused_and_the_first_goes_on(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    with site.worker(options=["--control-socket", str(path)]) as first:
        first.wait_until_running()
        with site.worker(options=["--control-socket", str(path)]) as second:
            assert second.wait() == 78
            assert "another supervisor listens on c.sock (give --control-socket)" in second.log
        assert ask(path, {"command": "quiet"}, timeout_s=10.0)["ok"]


def test_peers_that_do_not_behave_disturb_nobody(site: Site) -> None:
    with site.worker() as worker:
        worker.wait_until_running()
        fds = worker.fd_count()
        socks = []
        for n in range(100):
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(10.0)
            sock.connect(str(socket_of(worker)))
            sock.sendall((b"garbage", b"x" * 100_000, b'{"command": "status"}\n' * 5, b"\xff\n")[n % 4])
            socks.append(sock)
        assert done(worker, "quiet")
        assert done(worker, "resume")
        for sock in socks:
            sock.close()
        wait_until(lambda: worker.fd_count() <= fds + 1, "their connections are closed")
        assert site.result("ok", n=1)["n"] == 1


@pytest.mark.parametrize("who", ["child", "program", "orphan", "hit and run"])
def test_a_job_may_not_control_its_supervisor(site: Site, tmp_path: Path, who: str) -> None:
    (tmp_path / "insider.py").write_text(INSIDER)
    with site.worker(app="insider", cwd=tmp_path) as worker:
        worker.wait_until_running()
        job = site.client.create(site.prefix + "q", {"socket": str(socket_of(worker)), "who": who}, max_retries=0)
        ended = site.end(job)
        assert ended["status"] == "completed", ended["last_error"]
        if who != "hit and run":
            assert ended["result"] == {"ok": False, "text": "refused: a job may not control its supervisor"}
        assert done(worker, "quiet"), "whoever came before has been answered"
        assert worker.status()["phase"] == "running"


# --- quiet and resume -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["ctl", "signal"])
def test_quiet_claims_nothing_and_finishes_what_is_held_until_resumed(site: Site, by: str) -> None:
    with site.worker() as worker:
        worker.wait_until_running()
        (running,), gate = held(site, worker)
        if by == "ctl":
            assert done(worker, "quiet") == "quiet: nothing more is claimed; jobs held: 1"
        else:
            worker.signal(signal.SIGTSTP)
        reason = worker.wait_for_event("quieted")["reason"]
        assert reason == ("an operator" if by == "ctl" else "SIGTSTP")
        late = site.add("ok")
        gate.touch()
        assert site.end(running)["status"] == "completed"
        code, ready = worker.readyz()
        assert code == 503
        assert f"quiet: {reason}" in ready["reasons"]
        assert worker.health()[0] == 200, "it does as it was told"
        assert site.client.job(late)["status"] == "pending"
        if by == "ctl":
            assert done(worker, "resume") == "resumed: jobs are claimed again"
        else:
            worker.signal(signal.SIGCONT)
        worker.wait_for_event("resumed")
        assert site.end(late)["status"] == "completed"
        assert worker.readyz()[0] == 200
        assert done(worker, "resume") == "not quiet: jobs are claimed"


def test_cont_during_a_drain_changes_nothing(site: Site) -> None:
    """systemd sends it after every TERM."""
    with site.worker() as worker:
        worker.wait_until_running()
        (running,), gate = held(site, worker)
        worker.signal(signal.SIGTSTP)
        worker.wait_for_event("quieted")
        worker.signal(signal.SIGTERM)
        worker.wait_for_event("phase_changed", phase="draining")
        late = site.add("ok")
        worker.signal(signal.SIGCONT)
        assert refused(worker, "resume") == "the supervisor is draining"
        assert not worker.events("resumed")
        gate.touch()
        assert worker.wait() == 0
        assert site.client.job(running)["status"] == "completed"
        assert site.client.job(late)["status"] == "pending"


def test_while_draining_everything_that_would_change_it_is_refused(site: Site) -> None:
    with site.worker() as worker:
        worker.wait_until_running()
        _, gate = held(site, worker)
        assert done(worker, "stop") == "stopping"
        worker.wait_for_event("phase_changed", phase="draining")
        for name, fields in (("quiet", {}), ("scale", {"n": 5}), ("reload", {}), ("recycle", {})):
            assert refused(worker, name, **fields) == "the supervisor is draining"
        for number in (signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU):
            worker.signal(number)
        worker.wait_for_event("command_refused", count=3)
        assert len(worker.children()) == 2
        gate.touch()
        assert worker.wait() == 0


# --- scale ------------------------------------------------------------------------------------------------------------


def test_more_children_than_descriptors_allow_are_refused_and_nothing_is_disturbed(site: Site) -> None:
    with site.worker(wrap=["prlimit", "--nofile=67"]) as worker:
        worker.wait_until_running()
        assert "scale 118: 118 children do not fit into the limit of 67 open files" in refused(worker, "scale", n=118)
        worker.signal(signal.SIGTTIN)
        reason = worker.wait_for_event("command_refused")["reason"]
        assert "scale 3: 3 children do not fit into the limit of 67 open files" in reason
        assert worker.readyz()[0] == 200
        site.check_slots(worker)
        assert not worker.events("fork_server_exited")


@pytest.mark.parametrize("by", ["ctl", "signal"])
def test_scale_up_and_down_while_idle(site: Site, by: str) -> None:
    with site.worker() as worker:
        worker.wait_until_running()
        if by == "ctl":
            assert done(worker, "scale", n=4) == "4 children (there were 2)"
        else:
            worker.signal(signal.SIGTTIN)
            worker.wait_for_event("scaled", procs=3)
            worker.signal(signal.SIGTTIN)
        worker.wait_for_event("scaled", procs=4)
        worker.wait_for_children("idle", 4)
        site.check_slots(worker, 4)
        if by == "ctl":
            assert done(worker, "scale", n=1) == "1 children (there were 4)"
        else:
            for procs in (3, 2, 1):
                worker.signal(signal.SIGTTOU)
                worker.wait_for_event("scaled", before=procs + 1, procs=procs)
        (pid,) = worker.wait_for_children("idle", 1)
        assert site.result("ok")["pid"] == pid
        assert {event["reason"] for event in worker.events("child_exited")} == {"scale"}
        assert not worker.events("child_killed")
        assert worker.readyz()[0] == 200


def test_scale_down_lets_busy_children_finish_their_job(site: Site) -> None:
    with site.worker(procs=3) as worker:
        worker.wait_until_running()
        jobs, gate = held(site, worker, 3)
        done(worker, "scale", n=1)
        assert len(worker.children()) == 3
        gate.touch()
        for job_id in jobs:
            assert site.end(job_id)["status"] == "completed"
        worker.wait_for_children("idle", 1)
        assert not worker.events("child_killed")


def test_scale_down_and_up_again_while_jobs_run_gives_new_children_beside_them(site: Site) -> None:
    with site.worker() as worker:
        worker.wait_until_running()
        jobs, gate = held(site, worker, 2)
        done(worker, "scale", n=1)
        done(worker, "scale", n=2)
        wait_until(lambda: len(worker.children()) == 3, "one leaves, its place has a new one already")
        assert site.run("ok")["status"] == "completed"
        gate.touch()
        for job_id in jobs:
            assert site.end(job_id)["status"] == "completed"
        worker.wait_for_children("idle", 2)


def test_the_last_child_stays_whatever_ttou_says(site: Site) -> None:
    with site.worker(procs=1) as worker:
        worker.wait_until_running()
        worker.signal(signal.SIGTTOU)
        assert worker.wait_for_event("command_refused")["reason"] == (
            "scale 0: it must be a whole number from 1 to 1000"
        )
        assert site.run("ok")["status"] == "completed"


# --- recycle ----------------------------------------------------------------------------------------------------------


def test_recycle_one_replaces_that_child_only(site: Site) -> None:
    with site.worker() as worker:
        worker.wait_until_running()
        zero, one = worker.children()
        done(worker, "recycle", slot=1)
        worker.wait_for_event("child_exited", pid=one, reason="recycle")
        wait_until(lambda: len(worker.children()) == 2, "two children")
        assert worker.children()[0] == zero
        ready = worker.wait_for_event("child_ready", count=3)
        assert ready["seen_at"] <= worker.events("child_exited")[0]["seen_at"], "make before break"
        assert refused(worker, "recycle", slot=2) == "slot 2: there are slots 0 to 1"


def test_recycle_all_replaces_busy_ones_after_their_job(site: Site) -> None:
    with site.worker() as worker:
        worker.wait_until_running()
        before = worker.children()
        (running,), gate = held(site, worker)
        busy = worker.ledger.entries("start", job=running)[0]["pid"]
        done(worker, "recycle")
        (idle,) = set(before) - {busy}
        worker.wait_for_event("child_exited", pid=idle)
        assert busy in worker.children()
        gate.touch()
        assert site.end(running)["status"] == "completed"
        worker.wait_for_event("child_exited", pid=busy, reason="recycle")
        worker.wait_for_children("idle", 2)
        assert not set(before) & set(worker.children())
        assert not worker.events("child_killed")


# --- kill-job ---------------------------------------------------------------------------------------------------------


def test_kill_job_tells_a_running_one_why_and_fails_it_with_retry(site: Site) -> None:
    with site.worker() as worker:
        worker.wait_until_running()
        job_id = site.add("cooperative", max_retries=1, seconds=30)
        worker.ledger.wait_for("start", job=job_id)
        done(worker, "quiet")
        assert "is told to stop" in done(worker, "kill-job", id=job_id)
        assert worker.ledger.wait_for("told", job=job_id)[0]["reason"] == "operator"
        failed = worker.wait_for_event("job_failed", job_id=job_id)
        assert failed["will_retry"]
        job = site.client.wait_for(job_id, "pending", "scheduled")
        assert job["last_error"] == "stopped by an operator"
        assert not worker.events("child_killed")


def test_kill_job_kills_one_that_does_not_stop_after_the_grace(site: Site) -> None:
    with site.worker(options=["--abort-grace", "0.3"]) as worker:
        worker.wait_until_running()
        job_id = site.add("ignore_signals")
        worker.ledger.wait_for("start", job=job_id)
        done(worker, "kill-job", id=job_id)
        assert site.end(job_id)["last_error"] == "stopped by an operator"
        assert worker.wait_for_event("child_killed")["reason"] == "operator"
        site.check_slots(worker)


def test_kill_job_fails_a_waiting_one_that_never_starts(site: Site) -> None:
    with site.worker(procs=1, options=["--prefetch", "1"]) as worker:
        worker.wait_until_running()
        _, gate = held(site, worker)
        waiting = site.add("ok")
        worker.wait_for_event("job_claimed", job_id=waiting)
        assert done(worker, "kill-job", id=waiting) == f"job {waiting} had not started: it is failed"
        assert site.end(waiting)["last_error"] == "stopped by an operator"
        assert worker.ledger.runs(waiting) == 0
        gate.touch()


def test_kill_job_of_an_unknown_or_a_finished_one_is_refused(site: Site) -> None:
    with site.worker() as worker:
        worker.wait_until_running()
        finished = site.run("ok")["id"]
        for job_id in (finished, "no-such-job", ""):
            assert refused(worker, "kill-job", id=job_id) == f"job {job_id!r} is not here: it neither runs nor waits"


# --- stacks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["ctl", "USR1"])
def test_stacks_of_busy_children_go_to_the_log_and_the_jobs_go_on(site: Site, by: str) -> None:
    with site.worker() as worker:
        worker.wait_until_running()
        (job_id,), gate = held(site, worker)
        if by == "ctl":
            text = done(worker, "stacks")
            assert f"job {job_id}:" in text
            assert "in gate" in text
        else:
            worker.signal(signal.SIGUSR1)
        dumped = worker.wait_for_event("stack_dumped")
        assert dumped["job_id"] == job_id
        assert "in gate" in dumped["stack"]
        gate.touch()
        assert site.end(job_id)["status"] == "completed"
        wait_until(lambda: done(worker, "stacks") == "no child is busy", "nobody is busy")


# --- stop -------------------------------------------------------------------------------------------------------------


def test_stop_drains_and_exits_0(site: Site) -> None:
    with site.worker() as worker:
        worker.wait_until_running()
        (running,), gate = held(site, worker)
        assert done(worker, "stop") == "stopping"
        assert worker.wait_for_event("phase_changed", phase="draining")["reason"] == "ctl stop"
        gate.touch()
        assert worker.wait() == 0
        assert site.client.job(running)["status"] == "completed"


def test_stop_asked_twice_kills_what_goes_on(site: Site) -> None:
    with site.worker() as worker:
        worker.wait_until_running()
        job_id = site.add("spin", max_retries=1)
        worker.ledger.wait_for("start", job=job_id)
        done(worker, "stop")
        worker.wait_for_event("phase_changed", phase="draining")
        done(worker, "stop")
        assert worker.wait() == 0
        assert worker.events("child_killed", reason="shutdown")
        assert site.client.job(job_id)["last_error"] == "Worker shutdown"


def test_signals_that_mean_nothing_change_nothing(site: Site) -> None:
    with site.worker() as worker:
        worker.wait_until_running()
        worker.signal(signal.SIGUSR2)
        assert not worker.wait_for_event("command_received", command="SIGUSR2")["obeyed"]
        assert site.run("ok")["status"] == "completed"


def test_signals_to_the_whole_unit_reach_the_supervisor_only(site: Site) -> None:
    """`systemctl kill` sends to every process."""
    with site.worker() as worker:
        worker.wait_until_running()
        (running,), gate = held(site, worker)
        before = worker.children()
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTTIN, signal.SIGTTOU, signal.SIGHUP):
            for pid in (worker.fork_server, *before):
                os.kill(pid, number)
        gate.touch()
        ended = site.end(running)
        assert ended["status"] == "completed", (ended["last_error"], worker.tail())
        assert worker.children() == before
        assert not worker.events("reloaded")
