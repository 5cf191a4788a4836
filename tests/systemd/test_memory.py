"""MemoryMax= of the unit: the kernel kills a child, and that costs its job, which is told why, and nothing else.

Where the machine's memory controller is bound to cgroup v1 the limit bites through v1, and systemd itself does not see
the kill (it reads v2 only); elsewhere v2 is used, if the controller is handed down to where the tests run. All of v2,
whatever the machine has, is in `test_controllers.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.systemd.service import UNIT, Service

IS_V1 = any("memory" in line.split(":")[1].split(",") for line in Path("/proc/self/cgroup").read_text().splitlines())
FLAVOUR = "hybrid" if IS_V1 else "unified"
LIMIT = 160 << 20


def test_child_that_the_memory_limit_kills_costs_its_job_and_is_told_as_that(service: Service) -> None:
    top = service.bed.root / "sys/fs/cgroup"
    if not IS_V1 and "memory" not in (top / "cgroup.controllers").read_text().split():
        pytest.skip("the memory controller is not handed down to the test bed: no MemoryMax=")
    service.configure(f"MemoryMax={LIMIT}", "MemorySwapMax=0", procs=2)
    service.start()
    main = service.main_pid
    beside = service.running("version", gate="go")
    job = service.end(service.add("exhaust_memory"))
    assert "killed by SIGKILL; the memory limit of the service was hit (oom_kill 0 -> 1)" in job["last_error"]
    service.open_gate("go")
    assert service.end(beside)["status"] == "completed"
    assert service.result("ok")["retry_count"] == 0
    assert service.show("MainPID", "NRestarts", "ActiveState") == {
        "MainPID": str(main),
        "NRestarts": "0",
        "ActiveState": "active",
    }
    failure = service.wait_for_event("job_failed", job_id=job["id"])
    assert int(failure["PRIORITY"]) <= 4


def test_in_a_cgroup_of_its_own_a_child_is_killed_and_told_as_that_too(service: Service) -> None:
    """The limit is the service's; where the controller is version 1, children have cgroups without one."""
    if not IS_V1 and "memory" not in (service.bed.root / "sys/fs/cgroup/cgroup.controllers").read_text().split():
        pytest.skip("the memory controller is not handed down to the test bed: no MemoryMax=")
    service.configure(f"MemoryMax={LIMIT}", "MemorySwapMax=0", "Delegate=memory", "ProtectControlGroups=no")
    service.start()
    assert service.wait_for_event("cgroup_delegated")["line"]["memory"] is not IS_V1
    job = service.end(service.add("exhaust_memory"))
    text = r"killed by SIGKILL; the memory limit of the service was hit \(oom_kill 0 -> [12]\)"
    assert re.search(text, job["last_error"]), job["last_error"]
    assert service.result("ok")["retry_count"] == 0


def test_memory_share_in_heartbeats_is_one_of_the_units_limit(service: Service) -> None:
    if not IS_V1 and "memory" not in (service.bed.root / "sys/fs/cgroup/cgroup.controllers").read_text().split():
        pytest.skip("the memory controller is not handed down to the test bed: no MemoryMax=")
    service.configure(f"MemoryMax={LIMIT}")
    service.start()
    service.wait_for_event("worker_registered")
    beat = service.wait_for_event("heartbeat_sent")["line"]
    assert 5.0 < beat["memory_percent"] <= 100.0, "tens of megabytes are a visible share of the limit"
    assert service.shown("MemoryMax") == str(LIMIT), UNIT
