"""The unit with the drop-in that is shipped for it: a cgroup for each child, and all that systemd does goes on.

The hierarchy here has no memory controller where the machine's is bound to cgroup v1; what needs it is tested in
`test_controllers.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cgroups import below, place_of
from tests.support.daemon import is_alive, wait_until
from tests.systemd.bed import REPOSITORY, Bed
from tests.systemd.service import DROP_INS, UNIT, Service, check_exposure, check_file

SHIPPED = (REPOSITORY / "systemd/child-cgroups.conf").read_text()
DROP_IN = f"{DROP_INS}/child-cgroups.conf"
QUICK_RESTART = "RestartSec=50ms"


@pytest.fixture(autouse=True)
def drop_in(bed: Bed) -> Iterator[None]:
    """As an administrator installs it; `service` has systemd read it."""
    bed.write(DROP_IN, SHIPPED)
    yield
    (bed.root / DROP_IN.lstrip("/")).unlink()


def group_of(service: Service) -> Path:
    """The unit's directory."""
    return service.bed.root / "sys/fs/cgroup/system.slice" / UNIT


def members(service: Service) -> dict[str, list[int]]:
    """Numbers, outside, of those in each cgroup of the unit."""
    group = group_of(service)
    return {name: [int(pid) for pid in (group / name / "cgroup.procs").read_text().split()] for name in below(group)}


def children_of(service: Service) -> list[str]:
    return [name for name in below(group_of(service)) if name.startswith("child-")]


def wait_for_children(service: Service, count: int = 2) -> list[str]:
    """Names of their cgroups, when all children are there and each is alone in its own."""

    def look() -> list[str] | None:
        found = {name: pids for name, pids in members(service).items() if name.startswith("child-")}
        return sorted(found) if len(found) == count and all(len(pids) == 1 for pids in found.values()) else None

    return list(wait_until(look, f"{count} children in cgroups of their own"))


# --- the file ---------------------------------------------------------------------------------------------------------


def test_systemd_has_nothing_to_say_about_the_unit_with_it(bed: Bed) -> None:
    check_file(bed)


def test_exposure_is_low_with_it(bed: Bed) -> None:
    check_exposure(bed)


def test_manager_takes_it(service: Service) -> None:
    assert service.show("Delegate", "DelegateControllers", "ProtectControlGroups", "ProtectKernelTunables") == {
        "Delegate": "yes",
        "DelegateControllers": "memory",
        "ProtectControlGroups": "no",
        "ProtectKernelTunables": "yes",
    }


# --- where they are ---------------------------------------------------------------------------------------------------


def test_each_child_is_in_a_cgroup_of_its_own_and_the_main_process_in_the_leaf(service: Service) -> None:
    service.start()
    names = wait_for_children(service)
    group = group_of(service)
    main = service.main_pid
    told = service.wait_for_event("cgroup_delegated")["line"]
    assert told["directory"] == f"/sys/fs/cgroup/system.slice/{UNIT}"
    assert told["memory"] == ("memory" in (group / "cgroup.controllers").read_text().split())
    assert (group / "cgroup.procs").read_text() == ""
    place = service.proc(main, "cgroup").read_text().strip()
    assert place.endswith(f"/{UNIT}/supervisor")
    found = members(service)
    assert len(found["supervisor"]) == 2, "supervisor and fork server"
    for name in names:
        assert place_of(found[name][0]).endswith(f"/{UNIT}/{name}")
    uid = int(service.proc(main, "status").read_text().split("Uid:")[1].split()[0])
    assert uid != 0
    assert {group.stat().st_uid, *((group / name).stat().st_uid for name in names)} == {uid}
    assert not service.events("cgroup_failed")
    shown = service.bed.ok("systemctl", "status", UNIT)
    for part in ("Active: active (running)", f"Main PID: {main} ", "supervisor running", *names):
        assert part in shown, shown


def test_status_reload_and_readiness_work_from_the_leaf(service: Service) -> None:
    service.open_gate("version", "old")
    service.start()
    main = service.main_pid
    old = wait_for_children(service)
    assert service.result("version") == "old"
    service.running("cooperative")
    service.wait_for(StatusText="running: 1 of 2 children busy", timeout_s=5.0)
    service.open_gate("version", "new")
    service.bed.systemctl("reload", UNIT)
    service.wait_for_event("reloaded")
    service.wait_for_event("child_exited", generation=1, reason="reload")
    assert service.result("version") == "new"
    assert (service.main_pid, service.shown("NRestarts")) == (main, "0")
    wait_until(
        lambda: len(set(children_of(service)) & set(old)) == 1, "the idle one's cgroup is gone, the busy one's not"
    )


def test_child_still_cannot_speak_for_the_supervisor(service: Service) -> None:
    service.open_gate("forge")
    service.start()
    assert service.ledger.wait_for("forged")[0]["came"] == "sent", "the child could try"
    service.wait_for_message("reception only permitted for main PID")
    assert "forged" not in service.shown("StatusText")


def test_watchdog_is_fed_from_the_leaf(service: Service) -> None:
    service.configure("WatchdogSec=1500ms")
    service.start()
    main = service.main_pid
    service.value(service.running("spin", seconds=4.0))
    assert (service.main_pid, service.shown("NRestarts")) == (main, "0")


# --- kills ------------------------------------------------------------------------------------------------------------


def test_process_that_has_escaped_the_tree_of_its_job_is_dead_after_the_deadline(service: Service) -> None:
    """In sessions of their own, forked twice, without the environment; and one that is below nobody but systemd."""
    service.configure(abort_grace=1)
    service.start()
    wait_for_children(service)
    job = service.add("family", then="spin", fields={"timeout_seconds": 2})
    service.ledger.wait_for("process", 6)
    pid = service.ledger.entries("start", job=job)[0]["pid"]
    (own,) = [name for name in children_of(service) if name.endswith(f"-{pid}")]
    procs = f"/sys/fs/cgroup/system.slice/{UNIT}/{own}/cgroup.procs"
    service.bed.ok("sh", "-c", f"setsid sh -c 'echo $$ >\"{procs}\"; exec sleep 600' >/dev/null 2>&1 </dev/null &")
    wait_until(lambda: len(members(service)[own]) == 8, "the handler, six of its own and the one that is not")
    family = members(service)[own]
    assert "timed out" in service.end(job)["last_error"]
    assert not any(map(is_alive, family))
    wait_until(lambda: own not in children_of(service), "its cgroup is gone")
    assert service.result("ok")["retry_count"] == 0


def test_stop_drains_and_leaves_no_cgroup(service: Service) -> None:
    service.start()
    wait_for_children(service)
    job_id = service.running("note_term", seconds=0.5)
    service.ledger.wait_for("listening", job=job_id)
    service.stop()
    assert service.client.job(job_id)["result"] == "finished after shutdown"
    assert service.ledger.entries("signal") == [], "children get no TERM"
    assert service.show("Result", "ExecMainStatus") == {"Result": "success", "ExecMainStatus": "0"}
    assert not group_of(service).exists()


def test_stop_honours_the_shutdown_timeout(service: Service) -> None:
    service.configure(shutdown_timeout=1)
    service.start()
    job_id = service.running("ignore_signals")
    began = time.monotonic()
    service.stop()
    assert 1.0 <= time.monotonic() - began < 5.0
    assert service.client.job(job_id)["last_error"] == "Worker shutdown timeout"
    assert service.show("Result", "ExecMainStatus") == {"Result": "success", "ExecMainStatus": "0"}


def test_killed_supervisor_is_restarted_and_finds_no_cgroup_of_its_earlier_life(service: Service) -> None:
    service.configure(QUICK_RESTART)
    service.start()
    wait_for_children(service)
    service.running("family", then="spin")
    service.ledger.wait_for("process", 6)
    before, family = children_of(service), service.pids()
    mark = service.mark()
    service.kill_main()
    service.wait_for_event("supervisor_started", after=mark)
    assert not any(map(is_alive, family)), "nobody outlives the supervisor"
    wait_for_children(service)
    assert service.shown("NRestarts") == "1"
    assert not set(children_of(service)) & set(before)
    assert set(below(group_of(service))) == {"supervisor", *children_of(service)}
    assert not service.events("cgroup_failed")
