"""Everything goes wrong at once, and afterwards nothing is lost, nothing was done twice, nothing is left.

CHAOS_SEED=4711 pytest tests/chaos -k grpc-stream      # one schedule again
CHAOS_SECONDS=600 pytest tests/chaos                   # longer ones
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.chaos import verdict
from tests.chaos.schedule import make_schedule
from tests.chaos.stage import PROCS, stage
from tests.support.daemon import processes_of, wait_until
from tests.support.transports import EVERY_TRANSPORT, REST

SECONDS = float(os.environ.get("CHAOS_SECONDS", "10"))
SEED = os.environ.get("CHAOS_SEED")
TAIL_S = 90.0

pytestmark = EVERY_TRANSPORT


def tell(*lines: object) -> None:
    """Shown with a failure, or with -s."""
    sys.stdout.writelines(f"{line}\n" for line in lines)


@pytest.mark.timeout(SECONDS * 2 + 2 * TAIL_S)
def test_nothing_is_lost_and_nothing_runs_twice(transport: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30) if SEED is None else int(SEED)
    schedule = make_schedule(seed, SECONDS)
    tell(f"\nCHAOS_SEED={seed} CHAOS_SECONDS={SECONDS:g}, -k {transport}: repeats this schedule", *schedule)
    wall_of_zero = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    with stage(tmp_path, transport) as play:
        began_at = time.monotonic()
        for blow in schedule:
            while (left := began_at + blow.at_s - time.monotonic()) > 0:
                play.keep_running()
                time.sleep(min(left, 0.02))
            play.keep_running()
            getattr(play, blow.what)(*blow.args)
        play.calm_down()
        play.wait_until_all_is_over(TAIL_S)

        # Every slot works again; a stream that has just broken may wait a little before it is opened anew.
        wait_until(play.is_working, "the daemon works")
        mark, probes = play.daemon.mark(), list[str]()

        def every_slot_works() -> bool:
            probes.extend(play.make_job("probe") for _ in range(8 * PROCS))
            play.wait_until_all_is_over(TAIL_S)
            return {event["slot"] for event in play.daemon.events("job_started", after=mark)} == set(range(PROCS))

        wait_until(every_slot_works, "every slot works")

        # It ends well, and nothing of it is left.
        assert play.daemon.is_running, play.daemon.tail()
        play.daemon.signal(signal.SIGTERM)
        assert play.daemon.wait() == 0, play.daemon.tail()
        wait_until(lambda: not processes_of(play.state_dir), "no process is left")
        for daemon in play.daemons:
            daemon.wait()
            daemon.assert_no_traceback()

        lines = verdict.read_ledger(play.ledger)
        jobs, histories = verdict.ask_server(play.server.client, list(play.kinds))
        refused = [job_id for job_id, job in jobs.items() if (job["last_error"] or "").startswith(verdict.REFUSED)]
        runs = sum(line["what"] == "start" for line in lines)
        tell(f"{len(jobs)} jobs, {runs} executions, {len(play.daemons)} daemons, {len(refused)} refused")
        by_grpc = [passed for passed in play.proxy.passed if passed.path.startswith("/spooled.v1.")]
        tell(f"by gRPC {len(by_grpc)} requests and {sum(bool(passed.fault) for passed in by_grpc)} faults")
        assert bool(by_grpc) == (transport != REST)
        assert not verdict.overlaps(lines)
        assert not verdict.unfit_ends(play.kinds, jobs)
        assert not verdict.doubled_outcomes(histories)
        assert not verdict.successes_without_a_run(play.kinds, jobs, lines)
        assert not verdict.runs_after_success(jobs, lines, wall_of_zero)
        assert all(jobs[job_id]["status"] == "completed" for job_id in probes)
        assert not [line for line in lines if line["what"] == "slot" and (line["left"] or line["cwd"] == "/")]
