"""Jobs that kill the child that runs them. The second run of such a job is alone in a fresh child; after a second death
it is not run any more but failed at once, with the evidence, however often the service hands it out again.

Kept in memory and in the outbox, for MAX_JOBS ids and KEPT_S: a restart of the supervisor forgives nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from spooled_supervisor.outbox import Outbox
from spooled_supervisor.timing import wall

MAX_JOBS = 10_000
KEPT_S = 24 * 3600.0
DEATHS_TO_REFUSE = 2
MAX_EVIDENCE = 500


@dataclass(frozen=True, slots=True)
class Deaths:
    """How often a job has killed its child, and how the last time."""

    count: int
    evidence: str
    last_wall: float


class PoisonList:
    """Looked at for every claimed job: a dict, and nothing is written for jobs that end well."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        rows = outbox.poison(wall() - KEPT_S)
        self._jobs: OrderedDict[str, Deaths] = OrderedDict((row[0], Deaths(*row[1:])) for row in rows)

    def __len__(self) -> int:
        return len(self._jobs)

    def deaths(self, job_id: str) -> Deaths | None:
        """What is known against this job."""
        found = self._jobs.get(job_id)
        if found is not None and found.last_wall < wall() - KEPT_S:
            del self._jobs[job_id]
            return None
        return found

    def died(self, job_id: str, evidence: str) -> None:
        """Its child died in it."""
        before = self._jobs.pop(job_id, None)
        deaths = Deaths(1 if before is None else before.count + 1, evidence[:MAX_EVIDENCE], wall())
        self._jobs[job_id] = deaths
        while len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)
        self._outbox.poisoned(job_id, deaths.count, deaths.evidence, MAX_JOBS, wall() - KEPT_S)

    def answered(self, job_id: str) -> None:
        """It has ended and its child lives."""
        if self._jobs.pop(job_id, None) is not None:
            self._outbox.cured(job_id)
