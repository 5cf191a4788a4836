"""From the supervisor's own events to those of the library face (`workerevents.py`), and to the callbacks.

Runs in the worker's loop thread, as the callbacks do. What a callback raises is logged and changes nothing. A job's end
is told when the service knows it, so that a callback which asks the service finds what it was told.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from typing import Any

from spooled_supervisor import events as ev
from spooled_supervisor import workerevents as we
from spooled_supervisor.childlink import Run
from spooled_supervisor.events import Events
from spooled_supervisor.job import Outcome, Succeeded

Callback = Callable[[Any], object]


class Callbacks:
    """Who listens to which event. Changed from any thread, called from the loop's."""

    def __init__(self) -> None:
        self._by_name: dict[str, tuple[Callback, ...]] = dict.fromkeys(we.NAMES, ())
        self._lock = threading.RLock()

    def add(self, name: str, callback: Callback) -> None:
        """Raises ValueError for a name that is none."""
        with self._lock:
            self._by_name[_known(name)] += (callback,)

    def remove(self, name: str, callback: Callback) -> None:
        """Once, if it is there."""
        with self._lock:
            kept = list(self._by_name[_known(name)])
            if callback in kept:
                kept.remove(callback)
            self._by_name[name] = tuple(kept)

    def wants(self, name: str) -> bool:
        return bool(self._by_name[name])

    def tell(self, name: str, event: object) -> None:
        """Call everybody back."""
        for callback in self._by_name[name]:
            try:
                callback(event)
            except BaseException:  # SystemExit, too: a callback decides nothing; `stop` does
                logging.getLogger("spooled_supervisor").exception("a callback of %r failed", name)


def _known(name: str) -> str:
    if name not in we.NAMES:
        raise ValueError(f"there is no event {name!r}; the events are: {', '.join(we.NAMES)}")
    return name


class Teller:
    """Listens to one run of a supervisor."""

    def __init__(self, events: Events, callbacks: Callbacks) -> None:
        self._callbacks = callbacks
        self._held: dict[str, we.JobCompleted | we.JobFailed | None] = {}  # by job id: how it ended, once that is known
        self._results: dict[str, bytes] = {}
        # Ids of jobs with their slots: one whose lease was lost may run twice for a moment. Read from other threads.
        self.running: set[tuple[str, int | None]] = set()
        for kind, take in (
            (ev.JobClaimed, self._claimed),
            (ev.JobStarted, self._started),
            (ev.JobProgressed, self._progressed),
            (ev.JobCompleted, self._completed),
            (ev.JobFailed, self._failed),
            (ev.OutcomeSettled, self._settled),
            (ev.OutcomeDropped, self._lost),
            (ev.JobLeaseLost, self._lost),
            (ev.ChildStarted, lambda e: callbacks.tell("child:started", we.ChildStarted(e.pid))),
            (ev.ChildExited, lambda e: callbacks.tell("child:exited", we.ChildExited(e.pid, e.reason, e.cause))),
        ):
            events.subscribe(take, kind)

    def on_over(self, run: Run, outcome: Outcome | None) -> None:
        """A run is over; its result, which no event carries, is kept if somebody wants it."""
        self.running.discard((run.job.id, run.slot))
        if isinstance(outcome, Succeeded) and self._callbacks.wants("job:completed"):
            self._results[run.job.id] = outcome.result

    def _claimed(self, event: ev.JobClaimed) -> None:
        self._held[event.job_id] = None
        self._callbacks.tell("job:claimed", we.JobClaimed(event.job_id, event.queue_name, event.retry_count))

    def _started(self, event: ev.JobStarted) -> None:
        self.running.add((event.job_id, event.slot))
        self._callbacks.tell("job:started", we.JobStarted(event.job_id, event.queue_name, event.pid, event.wait_s))

    def _progressed(self, event: ev.JobProgressed) -> None:
        told = we.JobProgress(event.job_id, event.queue_name, event.percent, event.message)
        self._callbacks.tell("job:progress", told)

    def _completed(self, event: ev.JobCompleted) -> None:
        result = json.loads(self._results.pop(event.job_id, b"null"))
        self._held[event.job_id] = we.JobCompleted(event.job_id, event.queue_name, result, event.duration_s)

    def _failed(self, event: ev.JobFailed) -> None:
        self._held[event.job_id] = we.JobFailed(
            event.job_id, event.queue_name, event.error, event.will_retry, event.kind, event.duration_s
        )

    def _settled(self, event: ev.OutcomeSettled) -> None:
        match self._held.pop(event.job_id, None):
            case we.JobCompleted(job_id=job_id, queue_name=queue, duration_s=duration_s) if event.status == "failed":
                text = "the service refused the job's result"
                self._callbacks.tell("job:failed", we.JobFailed(job_id, queue, text, True, "failed", duration_s))
            case we.JobCompleted() as completed:
                self._callbacks.tell("job:completed", completed)
            case we.JobFailed() as failed:
                self._callbacks.tell("job:failed", failed)

    def _lost(self, event: ev.JobLeaseLost | ev.OutcomeDropped) -> None:
        if event.job_id in self._held:
            del self._held[event.job_id]
            told = we.JobLeaseLost(event.job_id, event.queue_name, event.reason)
            self._callbacks.tell("job:lease_lost", told)
