"""What has happened lately, for people: jobs per queue, a chart of the last ten minutes, the last failures.

One subscriber counts. Memory is bounded whatever arrives: a ring of BUCKETS counts, the last MAX_FAILURES failures, at
most MAX_QUEUES queues. Time is cut into buckets of BUCKET_S; the newest one is still filling. Totals are those of this
life of the supervisor; metrics are for the long run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from spooled_supervisor.events import Events, JobCompleted, JobFailed
from spooled_supervisor.telemetry.snapshot import FailureSnapshot
from spooled_supervisor.timing import Clock, now, wall

BUCKET_S = 5
BUCKETS = 120
"""The chart: ten minutes."""
RATE_BUCKETS = 12
"""The rate: the last minute, and what of the current bucket has passed."""
RATE_SHORTEST_S = 5.0
"""A rate over less than this would only jump."""
OUTPUT_MARK = "\nlast output:\n"
"""Where `job.error_text` puts what a dead child printed last."""
MAX_FAILURES = 20
MAX_QUEUES = 1000
"""Jobs of queues beyond these are in the chart and in no queue's figures."""


@dataclass(slots=True)
class Tally:
    """One queue. `counts` of finished jobs: the buckets of the last minute, the newest last."""

    done: int = 0
    failed: int = 0
    counts: deque[int] = field(default_factory=lambda: deque([0] * (RATE_BUCKETS + 1), RATE_BUCKETS + 1))


class History:
    """Counts from the moment that it is made; used from the loop's thread only. `mask` keeps the key out of texts that
    handlers bring; `clock` is for tests."""

    def __init__(self, events: Events, clock: Clock = now, *, mask: Callable[[str], str]) -> None:
        self._mask = mask
        self._clock = clock
        self._began_at = clock()
        self._bucket = int(self._began_at // BUCKET_S)
        self._chart: deque[list[int]] = deque(([0, 0] for _ in range(BUCKETS)), BUCKETS)
        self._tallies: dict[str, Tally] = {}
        self._failures: deque[FailureSnapshot] = deque(maxlen=MAX_FAILURES)
        events.subscribe(self._take, JobCompleted, JobFailed)

    def tally(self, queue_name: str) -> tuple[int, int, float]:
        """Of one queue: jobs done, jobs failed, and how many of both ended per minute lately."""
        at = self._clock()
        self._roll(at)
        tally = self._tallies.get(queue_name)
        if tally is None:
            return 0, 0, 0.0
        seconds = RATE_BUCKETS * BUCKET_S + at - self._bucket * BUCKET_S
        seconds = max(RATE_SHORTEST_S, min(seconds, at - self._began_at))
        return tally.done, tally.failed, round(sum(tally.counts) * 60 / seconds, 2)

    def throughput(self) -> tuple[tuple[float, int, int], ...]:
        """The chart, the oldest bucket first: wall time of its begin, jobs done, jobs failed."""
        at = self._clock()
        self._roll(at)
        newest = wall() - (at - self._bucket * BUCKET_S)
        return tuple(
            (round(newest - (BUCKETS - 1 - n) * BUCKET_S), done, failed) for n, (done, failed) in enumerate(self._chart)
        )

    @property
    def failures(self) -> tuple[FailureSnapshot, ...]:
        """The last ones, the newest first."""
        return tuple(reversed(self._failures))

    def _take(self, event: JobCompleted | JobFailed) -> None:
        at = self._clock()
        if at >= (self._bucket + 1) * BUCKET_S:
            self._roll(at)
        tally = self._tallies.get(event.queue_name) or self._new_tally(event.queue_name)
        tally.counts[-1] += 1
        if isinstance(event, JobCompleted):
            tally.done += 1
            self._chart[-1][0] += 1
        else:
            tally.failed += 1
            self._chart[-1][1] += 1
            self._failures.append(_failure(event, self._mask))

    def _new_tally(self, queue_name: str) -> Tally:
        if len(self._tallies) >= MAX_QUEUES:
            return Tally()
        return self._tallies.setdefault(queue_name, Tally())

    def _roll(self, at: float) -> None:
        """Begin the buckets that time has reached; the clock never goes back, but it may jump far ahead."""
        bucket = int(at // BUCKET_S)
        passed = bucket - self._bucket
        if passed <= 0:
            return
        self._bucket = bucket
        self._chart.extend([0, 0] for _ in range(min(passed, BUCKETS)))
        for tally in self._tallies.values():
            tally.counts.extend([0] * min(passed, RATE_BUCKETS + 1))


def _failure(event: JobFailed, mask: Callable[[str], str]) -> FailureSnapshot:
    """The report to the service carries a dead child's last output in its text; people want to see the two apart."""
    error, output = mask(event.error), ""
    if event.kind == "crashed":
        error, _, output = error.partition(OUTPUT_MARK)
    return FailureSnapshot(
        event.job_id,
        event.queue_name,
        event.kind,
        error,
        output,
        wall(),
        event.slot,
        event.will_retry,
        event.duration_s,
    )
