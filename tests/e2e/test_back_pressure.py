"""A machine without room, and children that grow: what is held back, who is replaced, who is killed."""

from __future__ import annotations

import os
from pathlib import Path

from tests.e2e.conftest import Site
from tests.support.daemon import wait_until

MIB = 1 << 20
GROWER = """
import os, time
from spooled_supervisor import App
from tests.support.apps.ledger import Run

app = App()

@app.handler(os.environ["QUEUE_PREFIX"] + "q")
def handle(ctx):
    run = Run(ctx)
    blocks = []
    for _ in range(ctx.payload.get("mib", 0)):
        blocks.append(b"x" * (1 << 20))
    if ctx.payload.get("holds"):
        time.sleep(60)
    del blocks
    while (gate := ctx.payload.get("gate")) and not os.path.exists(gate):
        run.tick()
        time.sleep(0.005)
    run.end()
    return os.getpid()
"""

# --- claims are held back ---------------------------------------------------------------------------------------------


def test_above_the_load_limit_nothing_is_claimed_and_readyz_says_so(site: Site) -> None:
    with site.worker(options=["--max-load", "0.0001"]) as worker:
        reason = worker.wait_for_event("pressure_rose")["reason"]
        assert reason.endswith("above --max-load 0.0001")
        worker.wait_until_running()
        waiting = site.add("ok")
        code, ready = worker.readyz()
        assert code == 503
        assert any(r.startswith("claims are held back: the load is ") for r in ready["reasons"]), ready
        assert worker.health()[0] == 200, "it is well: the machine is busy"
        beats = worker.mark()
        worker.wait_for_event("heartbeat_sent")
        assert site.client.job(waiting)["status"] == "pending", worker.tail()
        assert not worker.events("job_claimed", after=beats)
        metrics = worker.metrics()
        claims = [n for name, n in metrics.items() if name.startswith("spooled_supervisor_claims_total")]
        assert claims == [0.0], "not even the first one"
        assert metrics["spooled_supervisor_held_back"] == 1
        assert worker.stop() == 0


def test_below_the_limits_everything_goes_on(site: Site) -> None:
    with site.worker(options=["--max-load", "100000", "--max-memory-pressure", "99.9"]) as worker:
        worker.wait_until_running()
        assert site.run("ok")["status"] == "completed"
        assert worker.readyz()[0] == 200
        assert not worker.events("pressure_rose")


# --- children are replaced --------------------------------------------------------------------------------------------


def test_children_are_replaced_after_so_many_jobs_and_not_all_at_once(site: Site) -> None:
    with site.worker(options=["--max-jobs-per-child", "20"]) as worker:
        worker.wait_until_running()
        for job_id in site.client.bulk(site.prefix + "q", [{"mode": "ok"} for _ in range(160)]):
            assert site.end(job_id)["status"] == "completed"
        left = worker.events("child_exited", reason="jobs")
        assert len(left) >= 4
        assert all(18 <= event["jobs"] <= 20 for event in left), "up to a tenth sooner"
        assert not worker.events("child_killed")
        worker.wait_for_children("idle", 2)
        assert sum(worker.ledger.runs(e["job"]) for e in worker.ledger.entries("start")) == 160


def test_a_child_that_has_grown_is_replaced_after_its_job_and_the_others_are_not(site: Site) -> None:
    with site.worker(options=["--max-child-memory", "64M"]) as worker:
        worker.wait_until_running()
        before = worker.children()
        job = site.add("allocate", bytes=128 * MIB)
        assert site.end(job)["status"] == "completed"
        grown = worker.ledger.entries("start", job=job)[0]["pid"]
        assert worker.wait_for_event("child_exited", pid=grown)["reason"] == "memory"
        worker.wait_for_children("idle", 2)
        (other,) = set(before) - {grown}
        assert other in worker.children()
        assert not worker.events("child_killed")


def test_memory_that_was_given_back_is_no_reason(site: Site, tmp_path: Path) -> None:
    """Growth counts, not its peak."""
    (tmp_path / "grower.py").write_text(GROWER)
    options = ["--max-child-memory", "64M"]
    with site.worker(app="grower", cwd=tmp_path, options=options, procs=1) as worker:
        worker.wait_until_running()
        pids = [site.end(site.client.create(site.prefix + "q", {"mib": mib}))["result"] for mib in (200, 0, 200, 0)]
        assert len(set(pids)) == 1
        assert not worker.events("child_exited")


def test_a_job_that_grows_beyond_the_limit_is_killed_and_says_so_and_its_neighbour_goes_on(
    site: Site, tmp_path: Path
) -> None:
    (tmp_path / "grower.py").write_text(GROWER)
    with site.worker(app="grower", cwd=tmp_path, options=["--child-memory-limit", "128M"]) as worker:
        worker.wait_until_running()
        gate = tmp_path / "gate"
        neighbour = site.client.create(site.prefix + "q", {"gate": str(gate), "mib": 20})
        pid = worker.ledger.wait_for("start", job=neighbour)[0]["pid"]
        grower = site.client.create(site.prefix + "q", {"mib": 300, "holds": True}, max_retries=0)
        error = site.end(grower)["last_error"]
        assert error == f"the job needs more memory than --child-memory-limit {128 * MIB} bytes allows"
        (killed,) = worker.events("child_killed")
        assert (killed["reason"], killed["job_id"]) == ("memory", grower)
        assert worker.metrics()['spooled_supervisor_child_kills_total{reason="memory"}'] == 1
        assert pid in worker.children()
        gate.touch()
        assert site.end(neighbour)["result"] == pid
        worker.wait_for_children("idle", 2)
        assert site.end(site.client.create(site.prefix + "q", {"mib": 20}))["status"] == "completed"


# --- CPUs -------------------------------------------------------------------------------------------------------------


def affinities(pids: list[int]) -> list[set[int]]:
    return [os.sched_getaffinity(pid) for pid in pids]


def test_pinned_children_have_one_cpu_each_and_all_cpus_are_used(site: Site) -> None:
    cpus = os.sched_getaffinity(0)
    with site.worker(procs=2 * len(cpus), options=["--pin-cpus"]) as worker:
        worker.wait_until_running()
        pinned = affinities(worker.children())
        assert all(len(affinity) == 1 for affinity in pinned)
        assert set().union(*pinned) == cpus
        assert [pinned.count({cpu}) for cpu in cpus] == [2] * len(cpus)
        assert os.sched_getaffinity(worker.pid) == cpus
        assert os.sched_getaffinity(worker.fork_server) == cpus


def test_a_replacement_is_pinned_where_its_predecessor_was(site: Site) -> None:
    with site.worker(options=["--pin-cpus"]) as worker:
        worker.wait_until_running()
        before = affinities(worker.children())
        for job_id in [site.add("sys_exit", argument=1), site.add("os_exit", status=1)]:
            site.end(job_id)
        wait_until(lambda: len(worker.wait_for_children("idle", 2)) == 2, "two children")
        assert affinities(worker.children()) == before


def test_only_cpus_that_we_may_use_are_pinned_to(site: Site) -> None:
    cpu = min(os.sched_getaffinity(0))
    with site.worker(options=["--pin-cpus"], wrap=["taskset", "-c", str(cpu)]) as worker:
        worker.wait_until_running()
        assert affinities(worker.children()) == [{cpu}, {cpu}]


def test_without_the_option_children_may_use_all(site: Site) -> None:
    with site.worker() as worker:
        worker.wait_until_running()
        assert affinities(worker.children()) == [os.sched_getaffinity(0)] * 2
