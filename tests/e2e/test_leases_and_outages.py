"""The service slow, silent, gone, forgetful, or of another opinion: who may run a job, and what is reported for it."""

from __future__ import annotations

import itertools
import os
import signal
import time
from typing import Any

import pytest

from tests.e2e.conftest import STUB_KEY, stub_worker
from tests.support.daemon import Daemon, is_alive, wait_until
from tests.support.stub_api import Reply, StubApi
from tests.support.transports import REST_ONLY

SHORT = ("--lease-duration", "5", "--abort-grace", "0.5")
"""Renewed after 2.5 s; told to stop after 4.0 s, killed after 4.5 s."""


def start_of(worker: Daemon, job_id: str) -> dict[str, Any]:
    return dict(worker.ledger.wait_for("start", job=job_id)[0])


def last_sign_of_life(worker: Daemon, job_id: str) -> float:
    return float(max(entry["at"] for entry in worker.ledger.entries(job=job_id)))


# --- renewals ------------------------------------------------------------------------------------------------------


def test_long_jobs_on_all_slots_are_renewed_and_run_once(stub: StubApi) -> None:
    with stub_worker(stub, options=SHORT) as worker:
        jobs = [stub.add_job(payload={"mode": "spin", "seconds": 7.0}) for _ in range(2)]
        wait_until(lambda: len(stub.completed) == 2, "both jobs", 30)
        for job_id in jobs:
            renewals = [r.at for r in stub.of("renew") if r.job_id == job_id]
            assert len(renewals) >= 2
            claimed = next(r.at for r in stub.of("claim") if r.at < renewals[0])
            spacing = [b - a for a, b in zip([claimed, *renewals], renewals, strict=False)]
            assert max(spacing) < 4.0
            assert worker.ledger.runs(job_id) == 1


def test_renewal_while_a_c_call_holds_the_interpreter(stub: StubApi) -> None:
    """Liveness is not judged by a thread in the child."""
    with stub_worker(stub, options=SHORT, procs=1):
        stub.add_job(payload={"mode": "sleep", "seconds": 6.0})
        wait_until(lambda: len(stub.completed) == 1, "the job", 30)


@pytest.mark.parametrize("status", [409, 404])
def test_refused_renewal_stops_that_job_only_and_nothing_is_reported_for_it(stub: StubApi, status: int) -> None:
    with stub_worker(stub, options=SHORT) as worker:
        victim = stub.add_job(payload={"mode": "family", "then": "spin"})
        family = [e["process"] for e in worker.ledger.wait_for("process", 6, job=victim)]
        other = stub.add_job(payload={"mode": "spin", "seconds": 4.0})
        start_of(worker, other)
        stub.leases[victim] = "another lease" if status == 409 else stub.leases[victim]
        if status == 404:
            del stub.leases[victim]
        lost = worker.wait_for_event("job_lease_lost", job_id=victim)
        wait_until(lambda: not any(map(is_alive, family)), "the end of its family", 3.0)
        assert last_sign_of_life(worker, victim) < lost["seen_at"] + 1.5
        wait_until(lambda: other in stub.completed, "the other job")
        assert not [r for r in (*stub.of("complete"), *stub.of("fail")) if r.job_id == victim]
        assert worker.metrics()["spooled_supervisor_leases_lost_total"] == 1
        assert worker.metrics()["spooled_supervisor_leases_held"] == 0


def test_cooperative_job_learns_that_its_lease_is_lost(stub: StubApi) -> None:
    with stub_worker(stub, options=SHORT) as worker:
        job_id = stub.add_job(payload={"mode": "cooperative"})
        start_of(worker, job_id)
        stub.leases[job_id] = "another lease"
        (told,) = worker.ledger.wait_for("told", job=job_id)
        assert told["reason"] == "lease_lost"
        worker.wait_for_event("job_lease_lost")
        assert worker.stop() == 0
        assert not stub.of("complete")
        assert not stub.of("fail")


@pytest.mark.parametrize("how", ["hangs", "fails", "is gone", "trickles"])
def test_lease_that_cannot_be_renewed_fences_itself(stub: StubApi, how: str) -> None:
    """The child is dead before the lease ends; nothing is reported; afterwards the worker goes on."""
    reply = {
        "hangs": Reply(hang="before commit"),
        "fails": Reply.error(500),
        "is gone": Reply(reset="before commit"),
        "trickles": Reply(trickle_s=0.5),
    }[how]
    with stub_worker(stub, options=SHORT) as worker:
        job_id = stub.add_job(payload={"mode": "family", "then": "spin"})
        started_at = start_of(worker, job_id)["at"]
        stub.on("renew", reply, times=None)
        # A stream's job counts from the renewal that comes before its start.
        claim_at = max(r.at for r in (*stub.of("claim"), *stub.of("renew")) if r.at <= started_at)
        family = [e["process"] for e in worker.ledger.wait_for("process", 6, job=job_id)]
        worker.wait_for_event("job_lease_lost", job_id=job_id)
        worker.wait_for_event("child_exited", reason="lease_lost")
        wait_until(lambda: not any(map(is_alive, family)), "the end of its family", 2.0)
        assert time.monotonic() < claim_at + 5.0 + 0.5
        assert last_sign_of_life(worker, job_id) < claim_at + 5.0
        assert len([r for r in stub.of("renew") if started_at < r.at < claim_at + 5.0]) >= 1
        stub.clear("renew")
        following = stub.add_job(payload={"mode": "ok"})
        wait_until(lambda: following in stub.completed, "another job")
        assert not [r for r in (*stub.of("complete"), *stub.of("fail")) if r.job_id == job_id]


def test_renewal_that_fails_for_a_while_is_survived(stub: StubApi) -> None:
    stub.on("renew", Reply.error(500), times=2)
    with stub_worker(stub, options=SHORT) as worker:
        job_id = stub.add_job(payload={"mode": "spin", "seconds": 6.5})
        wait_until(lambda: job_id in stub.completed, "the job", 30)
        assert worker.ledger.runs(job_id) == 1
        assert not worker.events("job_lease_lost")


def test_rate_limited_renewal_is_repeated_in_time(stub: StubApi) -> None:
    stub.on(
        "renew", Reply.error(429, retry_after="1000"), Reply.error(429, retry_after="Wed, 21 Oct 2099 07:28:00 GMT")
    )
    with stub_worker(stub, options=SHORT) as worker:
        job_id = stub.add_job(payload={"mode": "spin", "seconds": 6.5})
        wait_until(lambda: job_id in stub.completed, "the job", 30)
        assert not worker.events("job_lease_lost")


@REST_ONLY
def test_older_service_that_renews_by_another_route(stub: StubApi) -> None:
    stub.renew_routes = ("renew-lease",)
    with stub_worker(stub, options=SHORT):
        job_id = stub.add_job(payload={"mode": "spin", "seconds": 6.5})
        wait_until(lambda: job_id in stub.completed, "the job", 30)


# --- a supervisor that stood still ---------------------------------------------------------------------------------


def test_supervisor_stopped_beyond_the_lease_reports_nothing_with_stale_authority(stub: StubApi) -> None:
    with stub_worker(stub, options=SHORT) as worker:
        done = stub.add_job(payload={"mode": "spin", "seconds": 1.0})
        longer = stub.add_job(payload={"mode": "spin"})
        for job_id in (done, longer):
            start_of(worker, job_id)
        worker.signal(signal.SIGSTOP)
        worker.ledger.wait_for("end", job=done)
        time.sleep(5.2)  # longer than the lease
        mark = len(stub.requests)
        worker.signal(signal.SIGCONT)
        worker.wait_for_event("job_lease_lost", job_id=longer)
        following = stub.add_job(payload={"mode": "ok"})
        wait_until(lambda: following in stub.completed, "another job")
        late = [
            r for r in stub.requests[mark:] if r.operation in ("complete", "fail", "renew") and r.job_id != following
        ]
        assert late == []
        assert worker.events("loop_lagged")


# --- outcomes ------------------------------------------------------------------------------------------------------


def test_service_down_at_the_start_is_waited_for(stub: StubApi) -> None:
    stub.down()
    with stub_worker(stub) as worker:
        worker.wait_until_running()
        worker.wait_for_event("api_troubled", operation="register")
        assert worker.readyz()[0] == 503
        assert worker.get("/livez")[0] == 200
        job_id = stub.add_job(payload={"mode": "ok"})
        stub.up()
        wait_until(lambda: job_id in stub.completed, "the job")
        worker.wait_for_event("worker_registered")
        wait_until(lambda: worker.readyz()[0] == 200, "ready")


def test_outcome_while_the_service_is_down_is_delivered_within_the_lease(stub: StubApi) -> None:
    with stub_worker(stub, options=SHORT) as worker:
        jobs = [stub.add_job(payload={"mode": mode, "seconds": 0.5, "text": "as asked"}) for mode in ("spin", "raise")]
        for job_id in jobs:
            start_of(worker, job_id)
        wait_until(lambda: jobs[1] in stub.failed, "the one that is over at once")
        stub.down()
        worker.wait_for_event("job_completed", job_id=jobs[0])
        worker.wait_for_event("api_troubled", operation="settle")
        stub.up()
        wait_until(lambda: jobs[0] in stub.completed, "the other one")
        assert stub.commits.count(("complete", jobs[0])) == 1


def test_outcome_that_cannot_be_delivered_is_dropped_at_the_lease_end_and_told(stub: StubApi) -> None:
    with stub_worker(stub, options=SHORT) as worker:
        worker.exit_may_be = None
        job_id = stub.add_job(payload={"mode": "spin", "seconds": 0.3})
        start_of(worker, job_id)
        stub.down()
        worker.wait_for_event("job_completed", job_id=job_id)
        dropped = worker.wait_for_event("outcome_dropped", job_id=job_id)
        assert dropped["level"] == "error"
        stub.up()
        following = stub.add_job(payload={"mode": "ok"})
        wait_until(lambda: following in stub.completed, "another job")
        assert job_id not in stub.completed


def test_outage_longer_than_the_lease_drops_what_ran_and_recovers(stub: StubApi) -> None:
    with stub_worker(stub, options=SHORT) as worker:
        worker.exit_may_be = None
        jobs = [stub.add_job(payload={"mode": "spin"}) for _ in range(2)]
        for job_id in jobs:
            start_of(worker, job_id)
        stub.down()
        for job_id in jobs:
            worker.wait_for_event("job_lease_lost", job_id=job_id)
        stub.up()
        following = [stub.add_job(payload={"mode": "ok"}) for _ in range(4)]
        wait_until(lambda: set(following) <= set(stub.completed), "jobs after the outage", 40)
        assert not stub.failed


@pytest.mark.parametrize("operation", ["complete", "fail"])
def test_lost_answer_to_a_report_is_no_second_report(stub: StubApi, operation: str) -> None:
    stub.on(operation, Reply(reset="after commit"))
    with stub_worker(stub) as worker:
        job_id = stub.add_job(payload={"mode": "ok" if operation == "complete" else "raise"})
        worker.wait_for_event("outcome_settled", job_id=job_id)
        assert stub.commits == [(operation, job_id)]
        assert not stub.of("fail" if operation == "complete" else "complete")
        assert not worker.events("outcome_dropped")


def test_lost_answer_to_a_claim_is_not_replayed(stub: StubApi) -> None:
    stub.on("claim", Reply(reset="after commit"))
    stranded = stub.add_job(payload={"mode": "ok"})
    with stub_worker(stub, procs=1) as worker:
        worker.wait_for_event("api_troubled", operation=lambda name: name in ("claim q", "stream q"))
        following = stub.add_job(payload={"mode": "ok"})
        wait_until(lambda: following in stub.completed, "the next job")
        assert worker.ledger.runs(stranded) == 0


def test_report_refused_as_lost_is_final_and_quiet(stub: StubApi) -> None:
    with stub_worker(stub) as worker:
        job_id = stub.add_job(payload={"mode": "spin", "seconds": 0.5})
        start_of(worker, job_id)
        stub.leases[job_id] = "another lease"
        worker.wait_for_event("job_lease_lost", job_id=job_id)
        following = stub.add_job(payload={"mode": "ok"})
        wait_until(lambda: following in stub.completed, "another job")
        assert len([r for r in stub.of("complete") if r.job_id == job_id]) == 1
        assert not stub.of("fail")


@REST_ONLY
def test_idle_connections_that_the_service_closes_are_no_trouble(stub: StubApi) -> None:
    with stub_worker(stub) as worker:
        worker.wait_until_running()
        for _ in range(5):
            stub.wait_for("claim", len(stub.of("claim")) + 1)
            stub.drop_idle()
        job_id = stub.add_job(payload={"mode": "ok"})
        wait_until(lambda: job_id in stub.completed, "the job")
        assert worker.is_running


# --- the key, the registration -------------------------------------------------------------------------------------


def test_401_in_the_middle_holds_outcomes_and_claims_until_the_key_is_accepted_again(stub: StubApi) -> None:
    with stub_worker(stub) as worker:
        job_id = stub.add_job(payload={"mode": "spin", "seconds": 0.5})
        start_of(worker, job_id)
        for operation in ("complete", "claim", "renew", "heartbeat"):
            stub.on(operation, Reply.error(401), times=None)
        worker.wait_for_event("job_completed", job_id=job_id)
        wait_until(lambda: worker.readyz()[0] == 503, "not ready")
        assert any("key" in reason for reason in worker.readyz()[1]["reasons"])
        assert worker.is_running, "it may be rotated"
        claims = len(stub.of("claim"))
        worker.wait_for_event("api_troubled", operation="settle")
        stub.wait_for("complete", 2)  # tried again, slowly
        assert len(stub.of("claim")) <= claims + 1
        stub.clear()
        wait_until(lambda: job_id in stub.completed, "the outcome")
        following = stub.add_job(payload={"mode": "ok"})
        wait_until(lambda: following in stub.completed, "another job")
        assert STUB_KEY not in worker.log


def test_worker_that_the_service_has_forgotten_registers_again_and_jobs_go_on(stub: StubApi) -> None:
    stub.heartbeat_s = 1
    with stub_worker(stub) as worker:
        job_id = stub.add_job(payload={"mode": "spin", "seconds": 3.0})
        start_of(worker, job_id)
        stub.on("heartbeat", Reply.error(404, message="Worker not found"))
        stub.wait_for("register", 2, timeout_s=15)
        wait_until(lambda: job_id in stub.completed, "the job")
        first, second = (r.json["worker_id"] for r in stub.of("register")[:2])
        assert first == second


def test_registration_refused_for_the_plan_does_not_stop_the_work(stub: StubApi) -> None:
    stub.on("register", Reply.error(429, code="QUOTA_EXCEEDED"), times=None)
    with stub_worker(stub) as worker:
        job_id = stub.add_job(payload={"mode": "ok"})
        wait_until(lambda: job_id in stub.completed, "the job")
        worker.wait_for_event("api_troubled", operation="register")
        assert len(stub.of("register")) < 5


@pytest.mark.parametrize("command", ["drain", "stop"])
def test_service_asks_to_drain(stub: StubApi, command: str) -> None:
    stub.heartbeat_s = 1
    answer = {"acknowledged": True, "next_heartbeat_seconds": 1, "commands": [command, "dance"]}
    with stub_worker(stub) as worker:
        worker.wait_until_running()
        job_id = stub.add_job(payload={"mode": "spin", "seconds": 0.5})
        start_of(worker, job_id)
        stub.on("heartbeat", Reply.json(answer))
        assert worker.wait(30) == 0
        assert job_id in stub.completed


@REST_ONLY  # gRPC has no word for it
def test_service_pauses_and_resumes(stub: StubApi) -> None:
    def answer(*commands: str) -> Reply:
        return Reply.json({"acknowledged": True, "next_heartbeat_seconds": 1, "commands": list(commands)})

    stub.on("heartbeat", answer("pause"), answer(), answer("resume"))
    with stub_worker(stub) as worker:
        worker.wait_for_event("quieted")
        asked = len(stub.of("claim"))
        job_id = stub.add_job(payload={"mode": "ok"})
        worker.wait_for_event("resumed")
        wait_until(lambda: job_id in stub.completed, "the job")
        assert asked >= 0


@REST_ONLY  # one stream of several is limited, and the in-band refusal of the other transport has no hint
def test_rate_limit_on_claims_is_obeyed_and_reports_go_on(stub: StubApi) -> None:
    with stub_worker(stub) as worker:
        job_id = stub.add_job(payload={"mode": "spin", "seconds": 0.5})
        start_of(worker, job_id)
        stub.on("claim", Reply.error(429, retry_after="2"), times=1)
        mark = len(stub.of("claim"))
        limited = stub.wait_for("claim", mark + 1)[-1].at
        wait_until(lambda: job_id in stub.completed, "the report, which does not wait")
        following = stub.wait_for("claim", mark + 3)
        gaps = [b.at - a.at for a, b in zip(following[mark - 1 :], following[mark:], strict=False)]
        assert max(gaps) >= 1.9, (limited, gaps)


# --- many at once --------------------------------------------------------------------------------------------------


def test_large_payload_to_a_stopped_child_blocks_nobody(stub: StubApi) -> None:
    """The job is given to a child that does not read; heartbeats, renewals and the other slot go on."""
    stub.heartbeat_s = 1
    with stub_worker(stub, options=SHORT) as worker:
        worker.wait_until_running()
        stopped = worker.children()[0]
        os.kill(stopped, signal.SIGSTOP)
        jobs = [stub.add_job(payload={"mode": "length", "value": "x" * 1_000_000}) for _ in range(2)]
        wait_until(lambda: len(stub.completed) == 1, "the job on the other slot")
        began, beats = time.monotonic(), len(stub.of("heartbeat"))
        stub.wait_for("heartbeat", beats + 3)
        assert time.monotonic() - began < 4.5
        for _ in range(5):
            sent = time.monotonic()
            assert worker.get("/livez")[0] == 200
            assert time.monotonic() - sent < 0.5
        os.kill(stopped, signal.SIGCONT)
        wait_until(lambda: set(stub.completed) == set(jobs), "both jobs")
        assert set(stub.completed.values()) == {b"1000000"}


def test_results_of_a_megabyte_on_all_slots_keep_the_heartbeat(stub: StubApi) -> None:
    stub.heartbeat_s = 1
    with stub_worker(stub, procs=4) as worker:
        worker.wait_until_running()
        jobs = [stub.add_job(payload={"mode": "result", "what": "large"}) for _ in range(40)]
        wait_until(lambda: set(stub.completed) == set(jobs), "all jobs", 40)
        beats = [r.at for r in stub.of("heartbeat")]
        assert all(b - a < 2.5 for a, b in itertools.pairwise(beats))
