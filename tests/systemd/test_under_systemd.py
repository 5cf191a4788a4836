"""The unit as it is shipped, under a real systemd: what is promised to those who operate it.

Only times are changed by a drop-in, where a test would have to wait for them.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import stat
import time
from pathlib import Path

from tests.support.daemon import is_alive, wait_until
from tests.support.devserver import Producer, dev_server
from tests.systemd.bed import Bed
from tests.systemd.service import KEY, RUNTIME, STATE, UNIT, Service, check_exposure, check_file

QUICK_RESTART = "RestartSec=50ms"


# --- the file ------------------------------------------------------------------------------------------------------


def test_systemd_has_nothing_to_say_about_the_installed_unit(bed: Bed) -> None:
    check_file(bed)


def test_exposure_is_low(bed: Bed) -> None:
    check_exposure(bed)


def test_manager_takes_every_directive(service: Service) -> None:
    mark = service.mark()
    service.start()
    said = [entry["MESSAGE"] for entry in service.journal.entries(mark) if entry.get("_PID") == "1"]
    assert not [text for text in said if "ignor" in text or "Failed" in text or "Unknown" in text], said
    assert service.show("Type", "NotifyAccess", "KillMode", "OOMPolicy", "WatchdogUSec") == {
        "Type": "notify",
        "NotifyAccess": "main",
        "KillMode": "mixed",
        "OOMPolicy": "continue",
        "WatchdogUSec": "30s",
    }


# --- start -----------------------------------------------------------------------------------------------------------


def test_start_waits_for_the_first_child_and_no_child_can_say_ready(service: Service) -> None:
    service.open_gate("hold")
    service.open_gate("forge")
    service.bed.systemctl("start", "--no-block", UNIT)
    assert service.ledger.wait_for("forged")[0]["came"] == "sent", "the child could try"
    service.wait_for_message("reception only permitted for main PID")
    shown = service.show("ActiveState", "SubState", "StatusText")
    assert (shown["ActiveState"], shown["SubState"]) == ("activating", "start")
    assert "forged" not in shown["StatusText"]
    opened_at = time.monotonic()
    service.close_gate("hold")
    service.wait_for(ActiveState="active", SubState="running")
    assert int(service.shown("ActiveEnterTimestampMonotonic")) > opened_at * 1_000_000
    assert "forged" not in service.shown("StatusText")
    main = service.main_pid
    assert service.wait_for_event("supervisor_started")["line"]["pid"] == main, "a child cannot become the main process"


def test_start_does_not_wait_for_a_service_that_is_down(service: Service) -> None:
    service.configure(api_url="http://127.0.0.1:9")
    service.start()
    service.wait_for_event("api_troubled")
    wait_until(lambda: "127.0.0.1" in service.shown("StatusText"), "a reason in the status")
    assert service.shown("ActiveState") == "active"


def test_status_text_tells_phase_and_busy_children(service: Service) -> None:
    service.start()
    assert service.shown("StatusText") == "running: 0 of 2 children busy"
    service.running("cooperative")
    service.wait_for(StatusText="running: 1 of 2 children busy", timeout_s=5.0)
    assert 'Status: "running: 1 of 2 children busy"' in service.bed.ok("systemctl", "status", UNIT)


def test_app_that_takes_too_long_to_start_is_a_failure_that_says_so(service: Service) -> None:
    service.configure("TimeoutStartSec=1s", "Restart=no")
    service.open_gate("hold")
    started = service.bed.run("systemctl", "start", UNIT)
    assert started.returncode != 0
    assert service.shown("Result") == "timeout"
    service.wait_for_message("start operation timed out")


# --- stop ------------------------------------------------------------------------------------------------------------


def test_stop_drains_and_children_get_no_term(service: Service) -> None:
    service.start()
    job_id = service.running("note_term", seconds=0.5)
    service.ledger.wait_for("listening", job=job_id)
    service.stop()
    job = service.client.job(job_id)
    assert (job["status"], job["result"]) == ("completed", "finished after shutdown")
    assert service.ledger.entries("signal") == []
    assert service.show("Result", "ExecMainStatus", "NRestarts") == {
        "Result": "success",
        "ExecMainStatus": "0",
        "NRestarts": "0",
    }
    assert service.shown("ActiveState") == "inactive"
    assert service.wait_for_event("supervisor_stopped")["line"]["unsettled"] == 0
    assert service.events("worker_deregistered")


def test_stop_honours_the_shutdown_timeout(service: Service) -> None:
    service.configure(shutdown_timeout=1)
    service.start()
    job_id = service.running("ignore_signals")
    began = time.monotonic()
    service.stop()
    assert 1.0 <= time.monotonic() - began < 5.0
    assert service.client.job(job_id)["last_error"] == "Worker shutdown timeout"
    assert service.show("Result", "ExecMainStatus") == {"Result": "success", "ExecMainStatus": "0"}


def test_drain_longer_than_the_stop_timeout_and_the_watchdog_survives(service: Service) -> None:
    service.configure("TimeoutStopSec=1s", "WatchdogSec=2s")
    service.start()
    job_id = service.running("note_term", seconds=4.5)
    service.ledger.wait_for("listening", job=job_id)
    service.bed.systemctl("stop", "--no-block", UNIT)
    service.wait_for(StatusText="draining: 1 of 2 children busy", ActiveState="deactivating")
    service.wait_for(ActiveState="inactive")
    assert service.show("Result", "ExecMainStatus") == {"Result": "success", "ExecMainStatus": "0"}
    assert service.client.job(job_id)["result"] == "finished after shutdown"


def test_supervisor_that_does_not_stop_is_killed_with_all_its_family(service: Service) -> None:
    """It asks for more time while it turns, and only then."""
    service.configure("TimeoutStopSec=2s")
    service.start()
    service.running("family", then="spin")
    service.ledger.wait_for("process", 6)
    family = service.pids()
    assert len(family) >= 10, "supervisor, fork server, two children, six of the job"
    # systemd's TERM brings a CONT, so it is stopped again until there is nothing left to stop
    service.bed.systemctl("stop", "--no-block", UNIT)
    began = time.monotonic()
    while service.shown("ActiveState") != "failed":
        service.bed.run("systemctl", "kill", "--kill-who=main", "--signal=STOP", UNIT)
        assert time.monotonic() - began < 15.0
    assert not any(map(is_alive, family))
    assert service.shown("Result") == "timeout"


def test_kill_signal_to_every_process_drains_too(service: Service) -> None:
    """`systemctl kill` without --kill-who: the whole unit gets the signal."""
    service.start()
    job_id = service.running("spin", seconds=1.0)
    service.bed.systemctl("kill", "--signal=TERM", UNIT)
    service.wait_for(ActiveState="inactive")
    assert service.client.job(job_id)["status"] == "completed"
    assert service.shown("Result") == "success"


# --- reload ----------------------------------------------------------------------------------------------------------


def test_reload_takes_the_new_app_while_jobs_run_on_the_old_one(service: Service) -> None:
    service.open_gate("version", "old")
    service.start()
    main = service.main_pid
    running = service.running("version", gate="go")
    service.open_gate("version", "new")
    service.bed.systemctl("reload", UNIT)
    service.wait_for_event("reloaded")
    service.wait_for_event("child_exited", generation=1, reason="reload")  # the idle one; until then it takes jobs
    assert service.result("version") == "new"
    service.open_gate("go")
    assert service.value(running) == "old"
    wait_until(lambda: len(service.events("child_exited", generation=1, reason="reload")) == 2, "the busy one replaced")
    assert service.result("version") == "new"
    assert service.main_pid == main
    assert service.shown("NRestarts") == "0"
    service.wait_for(ActiveState="active", StatusText="running: 0 of 2 children busy")


def test_reload_of_a_broken_app_keeps_the_old_one_and_says_so(service: Service) -> None:
    service.open_gate("version", "old")
    service.traceback_is_fine = True
    service.start()
    service.open_gate("broken")
    service.bed.systemctl("reload", UNIT)
    entry = service.wait_for_event("reload_failed")
    assert "this version of the app is broken" in entry["line"]["error"]
    wait_until(lambda: "reload failed" in service.shown("StatusText"), "the failure in the status")
    assert service.shown("ActiveState") == "active"
    assert service.result("version") == "old"


# --- crashes ---------------------------------------------------------------------------------------------------------


def test_killed_supervisor_is_restarted_and_the_outbox_is_replayed(service: Service, tmp_path: Path) -> None:
    """What had finished is reported by the next start, what ran is failed and runs again; never two runs at once."""
    place = {"db": tmp_path / "jobs.db", "retry_base_s": 0.05, "lease_recovery_interval_s": 0.2}
    with dev_server(**place) as server:
        service.configure(QUICK_RESTART, api_url=server.url, lease_duration=60)
        service.start()
        first = server.client.create("q", {"mode": "version", "gate": "go"}, max_retries=0)
        second = server.client.create("q", {"mode": "version", "gate": "never"}, max_retries=1)
        for job_id in (first, second):
            service.ledger.wait_for("start", job=job_id)
        server.kill()
        service.open_gate("version", "after the restart")
        service.open_gate("go")
        service.wait_for_event("job_completed", job_id=first)
        before = service.show("MainPID")
        family = service.pids()
        mark = service.mark()
        service.kill_main()
        service.wait_for_event("supervisor_started", after=mark)
        assert service.show("MainPID") != before
        assert service.shown("NRestarts") == "1"
        assert not any(map(is_alive, family)), "children do not outlive their supervisor"
        service.open_gate("never")
        with dev_server(**place, port=server.port) as server_again, Producer(server.url, server.api_key) as client:
            assert client.wait_for(first, "completed", timeout_s=20)["result"] == ""
            assert client.wait_for(second, "completed", timeout_s=20)["result"] == "after the restart"
            assert service.ledger.runs(first) == 1
            assert service.ledger.runs(second) == 2
            assert [entry["event_type"] for entry in client.history(second)].count("failed") == 1
            service.stop()
            server_again.stop()


def test_watchdog_restarts_a_supervisor_whose_loop_is_blocked_whatever_its_children_say(service: Service) -> None:
    service.traceback_is_fine = True  # faulthandler's, which is what is wanted
    service.configure("WatchdogSec=2s", QUICK_RESTART)
    service.start()
    main = service.main_pid
    service.running("pet_watchdog")
    assert service.ledger.wait_for("petted", 3)[0]["came"] == "sent", "the child could try"
    mark = service.mark()
    began = time.monotonic()
    service.kill_main("STOP")
    service.wait_for_message("Watchdog timeout (limit 2s)!", after=mark)
    assert time.monotonic() - began < 6.0
    service.wait_for_event("supervisor_started", after=mark)
    service.wait_for(NRestarts="1", ActiveState="active")
    assert service.main_pid != main
    service.wait_for_message("Fatal Python error: Aborted", after=mark)
    service.wait_for_message("status=6/ABRT", after=mark)


def test_watchdog_leaves_a_busy_supervisor_alone(service: Service) -> None:
    service.configure("WatchdogSec=1500ms", procs=4)  # more children than most machines of tests have processors
    service.start()
    main = service.main_pid
    jobs = [service.running("spin", seconds=3.5) for _ in range(4)]
    for job_id in jobs:
        service.value(job_id)
    assert service.main_pid == main
    assert service.shown("NRestarts") == "0"


def test_crash_loop_ends_in_failed_with_a_reason(service: Service) -> None:
    service.traceback_is_fine = True
    service.configure(QUICK_RESTART)
    service.start()
    for restarts in range(1, 6):
        service.kill_main("SEGV")
        if restarts < 5:
            service.wait_for(NRestarts=str(restarts), ActiveState="active")
    service.wait_for(ActiveState="failed")
    service.wait_for_message("Start request repeated too quickly.")
    service.wait_for_message("status=11/SEGV")
    shown = service.bed.run("systemctl", "status", UNIT)
    assert shown.returncode == 3
    assert "Start request repeated too quickly." in shown.stdout
    assert service.pids() == []


def test_bad_configuration_exits_78_and_is_not_restarted(service: Service) -> None:
    service.configure(QUICK_RESTART, procs=-1, shutdown_timeot=3)
    assert service.bed.run("systemctl", "start", UNIT).returncode != 0
    assert service.show("ExecMainStatus", "NRestarts", "ActiveState") == {
        "ExecMainStatus": "78",
        "NRestarts": "0",
        "ActiveState": "failed",
    }
    service.wait_for_message("procs")
    service.wait_for_message("shutdown_timeot")
    assert "status=78/CONFIG" in service.bed.run("systemctl", "status", UNIT).stdout


def test_app_that_cannot_be_imported_exits_78_and_is_not_restarted(service: Service) -> None:
    service.traceback_is_fine = True
    service.configure(QUICK_RESTART)
    service.open_gate("broken")
    assert service.bed.run("systemctl", "start", UNIT).returncode != 0
    assert service.show("ExecMainStatus", "NRestarts") == {"ExecMainStatus": "78", "NRestarts": "0"}
    service.wait_for_message("this version of the app is broken")


def test_refused_key_exits_77_and_is_not_restarted(service: Service) -> None:
    service.configure(QUICK_RESTART, key="sp_test_not_the_key_at_all")
    service.bed.run("systemctl", "start", UNIT)  # READY does not wait for the service, so it may even succeed
    service.wait_for(ActiveState="failed")
    assert service.show("ExecMainStatus", "NRestarts") == {"ExecMainStatus": "77", "NRestarts": "0"}
    assert "status=77/NOPERM" in service.bed.run("systemctl", "status", UNIT).stdout
    service.wait_for_message("key")


def test_child_killed_for_its_job_costs_that_job_only(service: Service) -> None:
    service.start()
    main = service.main_pid
    job = service.end(service.add("kill_self", signal=int(signal.SIGKILL)))
    assert "SIGKILL" in job["last_error"]
    assert service.result("version") == ""
    assert service.show("MainPID", "NRestarts") == {"MainPID": str(main), "NRestarts": "0"}


# --- the key, the user, the directories --------------------------------------------------------------------------


def test_credential_delivers_the_key_and_nobody_else_sees_it(service: Service) -> None:
    service.start()
    assert service.result("version") == ""
    key = service.server.api_key.encode()
    main = service.main_pid
    for name in ("environ", "cmdline"):
        assert key not in service.proc(main, name).read_bytes()
    for pid in service.pids():
        with contextlib.suppress(OSError):
            assert key not in Path(f"/proc/{pid}/environ").read_bytes()
            assert key not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert not [entry for entry in service.entries() if key.decode() in entry["MESSAGE"]]
    environment = service.result("sandbox")["environment"]
    ours = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "CREDENTIALS_DIRECTORY", "SPOOLED_API_KEY", "LISTEN_FDS")
    assert not set(ours) & set(environment)


def test_missing_credential_fails_the_start_with_its_name(service: Service) -> None:
    service.configure("Restart=no")
    (service.bed.root / KEY.lstrip("/")).unlink()
    assert service.bed.run("systemctl", "start", UNIT).returncode != 0
    assert service.shown("ExecMainStatus") == "243", "EXIT_CREDENTIALS, systemd.exec(5)"


def test_job_runs_as_a_user_of_its_own_in_a_sandbox(service: Service) -> None:
    service.start()
    found = service.result("sandbox")
    main = service.main_pid
    uid = int(service.proc(main, "status").read_text().split("Uid:")[1].split()[0])
    assert 61184 <= uid <= 65519, "DynamicUser's range"
    assert found["uid"] == uid
    assert found["capabilities"] == 0
    assert found["no_new_privileges"] == "1"
    assert found["nice"] == min(19, os.nice(0) + 5)
    # What the unit says needs CAP_SYS_RESOURCE, which a container's systemd may lack: it is left out then.
    assert found["oom_score_adj"] == int(service.proc(main, "oom_score_adj").read_text()) + 300
    assert set(found["allowed"].values()) == {"done"}, found["allowed"]
    assert "done" not in found["forbidden"].values(), found["forbidden"]


def test_hardening_refuses_nothing_that_the_daemon_needs(service: Service) -> None:
    service.configure(pin_cpus=True, max_jobs_per_child=2, poll_interval=1)
    service.start()
    for _ in range(5):
        service.result("ok")
    service.running("spin", seconds=2.0)
    stacks = service.ctl("ctl", "stacks")
    assert "spin_for" in stacks.stdout, stacks
    service.wait_for_event("heartbeat_sent")
    loud = [entry["MESSAGE"] for entry in service.entries() if entry.get("PRIORITY", "6") < "5"]
    assert not loud


def test_directories_are_private_and_the_state_outlives_the_service(service: Service) -> None:
    root = service.bed.root
    state, runtime = root / STATE.lstrip("/"), root / RUNTIME.lstrip("/")
    service.start()
    uid = int(service.proc(service.main_pid, "status").read_text().split("Uid:")[1].split()[0])
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert stat.S_IMODE(runtime.stat().st_mode) == 0o750
    assert stat.S_IMODE((runtime / "control.sock").stat().st_mode) == 0o600
    assert {path.stat().st_uid for path in (state, runtime, runtime / "control.sock")} == {uid}
    worker_id = service.wait_for_event("supervisor_started")["line"]["worker_id"]
    service.stop()
    assert not runtime.exists()
    assert state.exists()
    mark = service.mark()
    service.start()
    assert service.wait_for_event("supervisor_started", after=mark)["line"]["worker_id"] == worker_id


def test_root_controls_it_without_naming_the_socket(service: Service) -> None:
    service.start()
    for words, part in (
        (("quiet",), "nothing more is claimed"),
        (("resume",), "claimed again"),
        (("scale", "3"), "3 children"),
    ):
        done = service.ctl("ctl", *words)
        assert done.returncode == 0, done
        assert part in done.stdout
    status = service.ctl("status", "--json")
    assert status.returncode == 0, status
    assert '"procs": 3' in status.stdout or '"procs":3' in status.stdout
    stopped = service.ctl("ctl", "stop")
    assert stopped.returncode == 0
    service.wait_for(ActiveState="inactive", Result="success")
    assert service.ctl("status").returncode != 0


def test_endpoints_answer_on_the_loopback(service: Service) -> None:
    service.start()
    service.result("ok")  # the service has answered: only then it is ready for more than systemd
    for path in ("/livez", "/readyz", "/health", "/metrics"):
        connection = http.client.HTTPConnection("127.0.0.1", 9464, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
            assert response.status == 200, (path, body)


# --- the journal --------------------------------------------------------------------------------------------------


def test_journal_lines_have_priority_and_job_fields(service: Service) -> None:
    service.start()
    job_id = service.add("log")
    service.end(job_id)
    failed = service.end(service.add("raise"))
    warned = service.wait_for_event("job_logged", job_id=job_id, message="said by ctx.log")
    assert warned["PRIORITY"] == "4"
    assert warned["line"]["queue_name"] == "q"
    said = {
        entry["line"]["message"]: entry["PRIORITY"]
        for entry in service.events("job_logged")
        if entry["line"]["job_id"] == job_id
    }
    for text in ("said by print", "by os.write", "by a subprocess", "said by logging: yes"):
        assert said[text] == "6", said
    completed = service.wait_for_event("job_completed", job_id=job_id)
    assert completed["PRIORITY"] == "6"
    assert service.wait_for_event("job_claimed", job_id=job_id)["PRIORITY"] == "7"
    assert completed["SYSLOG_IDENTIFIER"] == "spooled-supervisor"
    assert completed["_SYSTEMD_UNIT"] == UNIT
    failure = service.wait_for_event("job_failed", job_id=failed["id"])
    assert int(failure["PRIORITY"]) <= 4
    plain = [entry["MESSAGE"] for entry in service.entries() if entry.get("_PID") != "1"]
    assert not [text for text in plain if text.startswith("<")], "a priority that stayed text"


def test_line_that_is_longer_than_the_journal_likes_stays_one_entry(service: Service) -> None:
    service.start()
    job_id = service.add("echo", value="x" * 200_000)
    assert service.end(job_id)["status"] == "completed"
    raised = service.add("raise", text="y" * 100_000)
    service.end(raised)
    entry = service.wait_for_event("job_failed", job_id=raised)
    assert len(entry["MESSAGE"]) < 8192


def test_journald_that_is_restarted_costs_no_job(service: Service) -> None:
    """The stream of standard error is a socket of journald's; it is handed over by the manager."""
    service.start()
    main = service.main_pid
    service.bed.systemctl("restart", "systemd-journald")
    for _ in range(3):
        assert service.result("ok")["retry_count"] == 0
    assert service.main_pid == main
