"""The unit where cgroup v2 has all controllers, as on most machines of today: in the virtual machine.

A start of the daemon takes many seconds there. So the tests of the unit's own limits share one, under all of them, and
each looks at another. It lasts until the end of the module: what needs a start of its own comes before them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from spooled_supervisor.cgroups import read_fields
from tests.support.devserver import DevServer, Producer
from tests.systemd.bed import REPOSITORY, Bed
from tests.systemd.service import DROP_INS, UNIT, Journal, Service, service_in
from tests.systemd.vm import PROCESSORS

FLAVOUR = "vm"
CHILD_LIMIT = 48 << 20
CHILDREN = 2
MEMORY_MAX = 160 << 20
MAX_PRESSURE = 20
GROUP = Path("/sys/fs/cgroup/system.slice") / UNIT
PATIENT = ("TimeoutStartSec=10min", "WatchdogSec=5min")
"""Nobody is quick there, and who is short of memory even less so."""


# --- limits of children -----------------------------------------------------------------------------------------------


@pytest.fixture
def drop_in(bed: Bed) -> Iterator[None]:
    """The one that is shipped, as an administrator installs it; `service` has systemd read it."""
    path = f"{DROP_INS}/child-cgroups.conf"
    bed.write(path, (REPOSITORY / "systemd/child-cgroups.conf").read_text())
    yield
    (bed.root / path.lstrip("/")).unlink()


@pytest.mark.usefixtures("drop_in")
def test_family_that_exceeds_the_limit_of_a_child_dies_alone(service: Service) -> None:
    """By the child's own cgroup: nothing has happened to the unit's or to the supervisor's."""
    service.configure(*PATIENT, child_memory_limit=CHILD_LIMIT)
    service.start()
    main = service.main_pid
    assert service.wait_for_event("cgroup_delegated")["line"]["memory"] is True

    beside = service.running("version", gate="go")
    (pid,) = {entry["pid"] for entry in service.ledger.entries("start", job=beside)}
    (own,) = GROUP.glob(f"child-*-{pid}")
    assert CHILD_LIMIT < int((own / "memory.max").read_text()) < CHILD_LIMIT + (64 << 20), "above what it had"
    assert (own / "memory.oom.group").read_text() == "1\n"

    job = service.end(service.add("exhaust_memory", helper=True))
    text = f"the job needs more memory than --child-memory-limit {CHILD_LIMIT} bytes allows; the kernel killed it"
    proof = re.fullmatch(rf"{re.escape(text)} \(oom_kill 0 -> (\d+)\)", job["last_error"])
    assert proof, job["last_error"]
    total = read_fields(GROUP / "memory.events")
    assert (total["oom_kill"], total["oom_group_kill"]) == (int(proof[1]), 1), "all of them in that child's cgroup"
    assert read_fields(GROUP / "memory.events.local")["oom"] == 0, "the limit was not the unit's"
    supervisor = read_fields(GROUP / "supervisor/memory.events")
    assert not any(supervisor.values()), supervisor
    assert read_fields(own / "memory.events")["oom_kill"] == 0
    service.wait_for_event("child_exited", reason="memory")

    service.open_gate("go")
    assert service.end(beside)["status"] == "completed"
    assert service.result("ok")["retry_count"] == 0
    assert service.show("ActiveState", "Result", "MainPID", "NRestarts") == {
        "ActiveState": "active",
        "Result": "success",
        "MainPID": str(main),
        "NRestarts": "0",
    }


# --- limits of the unit -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def started(bed: Bed, journal: Journal, server: DevServer) -> Iterator[Service]:
    limits = (f"CPUQuota={CHILDREN * 100}%", f"MemoryMax={MEMORY_MAX}", "MemorySwapMax=0")
    with service_in(bed, journal, server, server.client) as unit:
        unit.configure(*PATIENT, *limits, procs="auto", max_memory_pressure=MAX_PRESSURE, lease_duration=600)
        yield unit.start()


@pytest.fixture
def limited(started: Service, client: Producer) -> Service:
    started.client = client  # whose connections end with the test
    return started


def test_auto_is_as_many_children_as_the_quota_has_cpus(limited: Service) -> None:
    assert len(os.sched_getaffinity(0)) == PROCESSORS > CHILDREN
    assert (GROUP / "cpu.max").read_text() == f"{CHILDREN}00000 100000\n"
    assert limited.shown("StatusText") == f"running: 0 of {CHILDREN} children busy"


def test_memory_in_heartbeats_is_a_share_of_the_limit(limited: Service) -> None:
    share = limited.wait_for_event("heartbeat_sent")["line"]["memory_percent"]
    assert (GROUP / "memory.max").read_text() == f"{MEMORY_MAX}\n"
    assert 5.0 < share <= 100.0, "tens of megabytes are a visible share of the limit"


def test_child_that_the_limit_kills_costs_its_job_and_nothing_else(limited: Service) -> None:
    """systemd sees the kill as well, and by OOMPolicy=continue only says so."""
    main = limited.main_pid
    kills = read_fields(GROUP / "memory.events")["oom_kill"]
    beside = limited.running("version", gate="go")
    job = limited.end(limited.add("exhaust_memory"))
    proof = f"killed by SIGKILL; the memory limit of the service was hit (oom_kill {kills} -> {kills + 1})"
    assert proof in job["last_error"]
    assert read_fields(GROUP / "memory.events")["oom_kill"] == kills + 1
    failure = limited.wait_for_event("job_failed", job_id=job["id"])
    assert int(failure["PRIORITY"]) <= 4
    assert proof in failure["line"]["error"]
    limited.wait_for_message(f"{UNIT}: A process of this unit has been killed by the OOM killer.")
    limited.open_gate("go")
    assert limited.end(beside)["status"] == "completed"
    assert limited.result("ok")["retry_count"] == 0
    assert limited.show("ActiveState", "Result", "MainPID", "NRestarts") == {
        "ActiveState": "active",
        "Result": "success",
        "MainPID": str(main),
        "NRestarts": "0",
    }


def test_nothing_is_claimed_while_the_unit_is_short_of_memory(limited: Service) -> None:
    """MemoryHigh= holds up whoever goes above it, which the kernel counts as pressure."""
    used = int((GROUP / "memory.current").read_text())
    mark = limited.mark()
    limited.bed.systemctl("set-property", "--runtime", UNIT, f"MemoryHigh={used + (8 << 20)}")
    try:
        greedy = limited.running("exhaust_memory")
        reason = limited.wait_for_event("pressure_rose", after=mark)["line"]["reason"]
        assert reason.startswith("the memory pressure is "), reason
        assert reason.endswith(f" %, above --max-memory-pressure {MAX_PRESSURE}"), reason
        waiting = limited.add("ok")
        assert limited.ctl("ctl", "kill-job", greedy).returncode == 0
        assert "operator" in limited.end(greedy)["last_error"]
    finally:
        limited.bed.systemctl("set-property", "--runtime", UNIT, "MemoryHigh=infinity")
    assert limited.end(waiting)["status"] == "completed"
    claimed_at = limited.wait_for_event("job_claimed", job_id=waiting)["at"]
    told = limited.events("pressure_rose", after=mark) + limited.events("pressure_fell", after=mark)
    before = max((entry["at"], entry["line"]["event"]) for entry in told if entry["at"] < claimed_at)
    assert before[1] == "pressure_fell"
