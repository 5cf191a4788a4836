"""Options of the pool and of queues, seen from outside."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

import pytest

from tests.e2e.conftest import Site, stub_worker
from tests.support.daemon import is_alive, wait_until
from tests.support.stub_api import StubApi


def test_no_more_is_held_than_children_can_run(stub: StubApi) -> None:
    with stub_worker(stub) as worker:
        worker.wait_until_running()
        for _ in range(6):
            stub.add_job(payload={"mode": "gate", "file": "/never"})
        worker.ledger.wait_for("start", 2)
        time.sleep(0.4)  # several polls
        assert len(stub.leases) == 2
        worker.exit_may_be = None
        worker.signal(3)
        worker.wait()


def test_prefetch_holds_that_many_more_and_renews_them(stub: StubApi, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    options = ["--prefetch", "1", "--lease-duration", "5"]
    with stub_worker(stub, options=options) as worker:
        jobs = [stub.add_job(payload={"mode": "gate", "file": str(gate)}) for _ in range(6)]
        worker.ledger.wait_for("start", 2)
        wait_until(lambda: len(stub.leases) == 4, "two that run and two ahead")
        waiting = [job_id for job_id in stub.leases if not worker.ledger.runs(job_id)]
        assert len(waiting) == 2
        wait_until(lambda: {r.job_id for r in stub.of("renew")} >= set(waiting), "renewals of those that wait")
        gate.touch()
        wait_until(lambda: set(stub.completed) == set(jobs), "all jobs")
        assert all(worker.ledger.runs(job_id) == 1 for job_id in jobs)


@pytest.mark.parametrize("limit", [1, 3])
def test_children_are_replaced_after_so_many_jobs_and_no_job_is_lost(site: Site, limit: int) -> None:
    with site.worker(options=["--max-jobs-per-child", str(limit)]) as worker:
        modes = [{"mode": "ok" if n % 3 else "raise"} for n in range(40)]
        ids = site.client.bulk(site.prefix + "q", modes, default_max_retries=0)
        for job_id in ids:
            site.end(job_id)
            assert worker.ledger.runs(job_id) == 1
            assert len(site.events(job_id)) == 3
        by_child: dict[int, int] = {}
        for entry in worker.ledger.entries("start"):
            by_child[entry["pid"]] = by_child.get(entry["pid"], 0) + 1
        assert max(by_child.values()) <= limit
        assert {e["reason"] for e in worker.events("child_exited")} == {"jobs"}
        assert not worker.events("child_failed_to_boot")
        site.check_slots(worker)


def test_child_beyond_its_memory_is_replaced_after_its_job(site: Site) -> None:
    with site.worker(procs=1, options=["--max-child-memory", "50M"]) as worker:
        small = site.run("allocate", bytes=1 << 20)
        assert small["status"] == "completed"
        pid = worker.children()[0]
        assert site.run("allocate", bytes=100 << 20)["status"] == "completed"
        assert worker.wait_for_event("child_exited", pid=pid)["reason"] == "memory"
        assert site.run("ok")["status"] == "completed"


@pytest.mark.parametrize(("cap", "own", "limit"), [("1s", 60, "1 s"), ("60s", 1, "1 s")])
def test_job_timeout_caps_the_jobs_own(site: Site, cap: str, own: int, limit: str) -> None:
    with site.worker(options=["--job-timeout", cap, "--abort-grace", "0.3"]):
        error = site.error("spin", fields={"timeout_seconds": own})
        assert f"its limit of {limit}" in error


def test_limit_below_a_second_is_kept(site: Site) -> None:
    with site.worker(options=["--job-timeout", "300ms", "--abort-grace", "0"]) as worker:
        assert "its limit of 0.3 s" in site.error("spin")
        (started,) = worker.events("job_started")
        (killed,) = worker.events("child_killed")
        lived = datetime.fromisoformat(killed["ts"]) - datetime.fromisoformat(started["ts"])
        assert 0.25 <= lived.total_seconds() < 1.5


def test_queue_limits_and_timeouts_of_the_file(stub: StubApi, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    file = tmp_path / "conf.toml"
    file.write_text('[queues.q]\nmax_procs = 1\n[queues.q2]\n[queues.q3]\ntimeout = "1s"\n')
    with stub_worker(stub, queues=(), procs=4, options=["--config", str(file), "--abort-grace", "0.3"]) as worker:
        narrow = [stub.add_job(queue_name="q", payload={"mode": "gate", "file": str(gate)}) for _ in range(3)]
        wide = [stub.add_job(queue_name="q2", payload={"mode": "gate", "file": str(gate)}) for _ in range(2)]
        for job_id in wide:
            worker.ledger.wait_for("start", job=job_id)
        limited = stub.add_job(queue_name="q3", payload={"mode": "spin"})
        wait_until(lambda: limited in stub.failed, "the end of the one with a limit")
        assert "its limit of 1 s" in stub.failed[limited]
        assert sum(worker.ledger.runs(job_id) for job_id in narrow) == 1
        assert sum(job_id in stub.leases for job_id in narrow) == 1
        gate.touch()
        wait_until(lambda: set(stub.completed) == {*narrow, *wide}, "all others")


def test_weights_of_the_file_share_the_children(stub: StubApi, tmp_path: Path) -> None:
    file = tmp_path / "conf.toml"
    file.write_text("[queues.q]\nweight = 3\n[queues.q2]\nweight = 1\n")
    for _ in range(60):
        stub.add_job(queue_name="q", payload={"mode": "ok"})
        stub.add_job(queue_name="q2", payload={"mode": "ok"})
    with stub_worker(stub, queues=(), procs=1, options=["--config", str(file)]):
        wait_until(lambda: len(stub.completed) >= 80, "most jobs")
        first = list(stub.commits)[:60]
        heavy = sum(int(job_id.split("-")[1]) % 2 == 1 for _, job_id in first)
        assert 38 <= heavy <= 52, f"{heavy} of 60, where 45 are its share"


def test_queue_whose_jobs_kill_children_is_held_back_and_others_are_not(stub: StubApi) -> None:
    with stub_worker(stub, queues=["q", "q2"]) as worker:
        worker.wait_until_running()
        for _ in range(30):
            stub.add_job(queue_name="q", payload={"mode": "kill_self"})
        worker.wait_for_event("job_failed", kind="crashed", count=5)
        wait_until(lambda: worker.health()[0] == 503, "degraded")
        assert any("queue q:" in reason for reason in worker.health()[1]["reasons"])
        wait_until(lambda: worker.readyz()[0] == 200, "it takes jobs of the other queue")
        good = [stub.add_job(queue_name="q2", payload={"mode": "ok"}) for _ in range(10)]
        wait_until(lambda: set(good) <= set(stub.completed), "the jobs of the other queue")
        assert len(stub.failed) <= 8, "the queue is left alone for a while"


def test_a_worker_whose_every_queue_is_held_back_is_not_ready(stub: StubApi) -> None:
    with stub_worker(stub) as worker:
        worker.wait_until_running()
        wait_until(lambda: worker.readyz()[0] == 200, "it is registered, and ready")
        for _ in range(30):
            stub.add_job(payload={"mode": "kill_self"})
        told = "claims are held back: the jobs of every queue kill their children"
        wait_until(lambda: told in worker.readyz()[1].get("reasons", ()), "not ready")
        assert worker.readyz()[0] == 503
        assert worker.metrics()["spooled_supervisor_ready"] == 0


def test_single_poison_jobs_do_not_disturb_the_good_ones(stub: StubApi) -> None:
    with stub_worker(stub) as worker:
        jobs = {}
        for n in range(40):
            mode = "abort" if n % 5 == 0 else "ok"
            jobs[stub.add_job(payload={"mode": mode})] = mode
        wait_until(lambda: len(stub.completed) + len(stub.failed) == 40, "an end of all", 40)
        assert {job_id for job_id, mode in jobs.items() if mode == "ok"} == set(stub.completed)
        assert worker.health()[0] == 200
        assert len(stub.commits) == 40


def test_jobs_run_in_parallel_on_all_children(site: Site) -> None:
    with site.worker(procs=4) as worker:
        worker.wait_until_running()
        site.check_slots(worker, 4)
        assert all(map(is_alive, worker.children()))


def test_priorities_and_schedules_of_the_service_are_kept(site: Site) -> None:
    later, sooner = site.add("ok", fields={"priority": 0}), site.add("ok", fields={"priority": 10})
    with site.worker(procs=1) as worker:
        for job_id in (later, sooner):
            assert site.end(job_id)["status"] == "completed"
        assert [e["job"] for e in worker.ledger.entries("start")] == [sooner, later]


def test_progress_reaches_the_service_newest_first(site: Site) -> None:
    with site.worker() as worker:
        job_id = site.add("progress", percents=[1, 50, 42.5], seconds=1.0)
        worker.wait_for_event("job_progressed", count=3)
        child = next(c for c in worker.status()["children"] if c["job_id"] == job_id)
        assert (child["percent"], child["message"]) == (42.5, "at 42.5")
        assert site.end(job_id)["status"] == "completed"
