"""What must be true after everything has gone wrong."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.support.devserver import Producer

ENDS_A_LEASE = ("completed", "failed", "lease_expired", "worker_lost")
REFUSED = "not run: this job has killed its child"
GOOD_KINDS = ("quick", "spin", "long", "litter", "probe")


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """The lines, in the order in which they were written."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def overlaps(lines: list[dict[str, Any]]) -> list[str]:
    """Pairs of executions of one job that lasted at the same time. One that was killed lasted until its last line."""
    spans: dict[str, dict[tuple[int, float], list[float]]] = defaultdict(dict)
    current: dict[tuple[str, int], tuple[int, float]] = {}
    for line in sorted(lines, key=lambda line: line["at"]):
        who = (line["job"], line["pid"])
        if line["what"] == "start":
            current[who] = (line["pid"], line["at"])
        spans[line["job"]].setdefault(current[who], []).append(line["at"])
    found = []
    for job, runs in spans.items():
        ordered = sorted((min(times), max(times), pid) for (pid, _), times in runs.items())
        for (_, end, pid), (start, _, other) in pairwise(ordered):
            if start < end:
                found.append(f"job {job}: pid {pid} until {end:.3f}, pid {other} from {start:.3f}")
    return found


def unfit_ends(kinds: dict[str, str], jobs: dict[str, dict[str, Any]]) -> list[str]:
    """Jobs whose end does not fit their kind. One that the blows have killed twice may have been refused."""
    found = []
    for job_id, kind in kinds.items():
        job = jobs[job_id]
        status, error = job["status"], job["last_error"] or ""
        if kind in GOOD_KINDS:
            fits = status == "completed" or (status == "deadletter" and error.startswith(REFUSED))
        else:
            fits = status == "deadletter"
        if not fits:
            found.append(f"job {job_id} ({kind}) is {status}: {error[:300]}")
    return found


def doubled_outcomes(histories: dict[str, list[str]]) -> list[str]:
    """Jobs with more than one end of a lease, or with anything at all after their success."""
    found = []
    for job_id, facts in histories.items():
        is_held = False
        for n, fact in enumerate(facts):
            if fact in ENDS_A_LEASE:
                if not is_held:
                    found.append(f"job {job_id}: {fact} without a lease: {facts}")
                is_held = False
                if fact == "completed" and facts[n + 1 :]:
                    found.append(f"job {job_id} went on after its success: {facts}")
            elif fact == "claimed":
                is_held = True
    return found


def successes_without_a_run(
    kinds: dict[str, str], jobs: dict[str, dict[str, Any]], lines: list[dict[str, Any]]
) -> list[str]:
    """Jobs that the service believes done and that nobody has done."""
    ended = {line["job"] for line in lines if line["what"] == "end"}
    return [job_id for job_id in kinds if jobs[job_id]["status"] == "completed" and job_id not in ended]


def runs_after_success(jobs: dict[str, dict[str, Any]], lines: list[dict[str, Any]], wall_of_zero: float) -> list[str]:
    """Jobs that were begun again after the service had accepted their success."""
    from datetime import datetime

    found = []
    for line in lines:
        job = jobs[line["job"]]
        if line["what"] == "start" and job["status"] == "completed":
            completed = datetime.fromisoformat(job["completed_at"]).timestamp()
            if wall_of_zero + line["at"] > completed + 0.002:
                found.append(
                    f"job {line['job']} was begun {wall_of_zero + line['at'] - completed:.3f} s after its success"
                )
    return found


def ask_server(client: Producer, job_ids: list[str]) -> tuple[dict[str, dict[str, Any]], dict[str, list[str]]]:
    """Every job, and the facts of its history in order."""
    jobs = {job_id: client.job(job_id) for job_id in job_ids}
    histories = {job_id: [event["event_type"] for event in client.history(job_id)] for job_id in job_ids}
    return jobs, histories
