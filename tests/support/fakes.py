"""Stand-ins for the parts around the one under test: a service that answers by script, a pool that only takes notes.

They have the methods that the parts call and nothing else; `cast` makes them pass for the real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self, TypeVar, cast

from spooled_supervisor.childlink import ChildLink, Run
from spooled_supervisor.events import Event, Events
from spooled_supervisor.job import Job, Outcome
from spooled_supervisor.leases import Key, Lease
from spooled_supervisor.lifecycle import ChildState
from spooled_supervisor.timing import Clock

E = TypeVar("E", bound=Event)


def make_job(
    id: str = "job-1",
    lease_id: str | None = "lease-1",
    queue_name: str = "emails",
    *,
    requested_at: float = 0.0,
    lease_duration_s: float = 30.0,
    retry_count: int = 0,
    max_retries: int = 3,
    timeout_s: float = 60.0,
) -> Job:
    """A job with something in every field."""
    return Job(
        id=id,
        queue_name=queue_name,
        lease_id=lease_id,
        payload=b"{}",
        retry_count=retry_count,
        max_retries=max_retries,
        timeout_s=timeout_s,
        lease_duration_s=lease_duration_s,
        requested_at=requested_at,
    )


def make_lease(job: Job | None = None) -> Lease:
    """A lease that is in no book."""
    lease = Lease(job or make_job(), 0.5, 5.0)
    lease.count_from(lease.job.requested_at)
    return lease


def make_run(number: int = 1, job: Job | None = None, *, claimed_at: float = 0.0, timeout_s: float = 60.0) -> Run:
    """A run that nobody has taken yet."""
    return Run(number, make_lease(job), claimed_at=claimed_at, timeout_s=timeout_s)


def make_child(
    slot: int = 0,
    state: ChildState = ChildState.IDLE,
    *,
    run: Run | None = None,
    deadline: float | None = None,
) -> ChildLink:
    """What a plan reads of a child; it has no process and no pipes."""
    return cast(ChildLink, SimpleNamespace(slot=slot, state=state, run=run, deadline=deadline))


class Recorded:
    """All events of a bus, in order."""

    def __init__(self, events: Events) -> None:
        self.all: list[Event] = []
        events.subscribe(self.all.append)

    def of(self, kind: type[E]) -> list[E]:
        """Those of one type."""
        return [event for event in self.all if isinstance(event, kind)]

    @property
    def names(self) -> list[str]:
        return [event.name for event in self.all]


@dataclass(frozen=True, slots=True)
class Call:
    """One request to the service."""

    operation: str
    at: float
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class FakeApi:
    """Answers every operation by its script: values are returned, exceptions raised; the last one is repeated."""

    def __init__(self, clock: Clock, *, latency_s: float = 0.0) -> None:
        self._clock = clock
        self._scripts: dict[str, list[Any]] = {}
        self.latency_s = latency_s
        self.calls: list[Call] = []
        self.base_url = "http://service"
        self.acted_as: list[str] = []

    def script(self, operation: str, *answers: Any) -> None:
        """What the next calls of this operation are answered with."""
        self._scripts[operation] = list(answers)

    def acting_as(self, worker_id: str) -> Self:
        self.acted_as.append(worker_id)
        return self

    def of(self, operation: str) -> list[Call]:
        """The calls of one operation."""
        return [call for call in self.calls if call.operation == operation]

    def __getattr__(self, operation: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(Call(operation, self._clock(), args, kwargs))
            await asyncio.sleep(self.latency_s)
            script = self._scripts[operation]
            answer = script.pop(0) if len(script) > 1 else script[0]
            if isinstance(answer, BaseException):
                raise answer
            return answer(*args, **kwargs) if callable(answer) else answer

        return call


class FakePool:
    """Takes notes of what it is told to do; what it shows is set by the test."""

    def __init__(self, *, idle: int = 0, usable: int = 1) -> None:
        self.idle = idle
        self.usable = usable
        self.slots = tuple(range(idle))
        self.backed_off = 0
        self.running: dict[Key, Run] = {}
        self.children: list[Any] = []
        self.told: list[tuple[Any, ...]] = []
        self._waiting: list[Run] = []

    @property
    def waiting(self) -> tuple[Run, ...]:
        return tuple(self._waiting)

    def submit(self, lease: Lease, *, timeout_s: float, is_isolated: bool = False) -> None:
        run = Run(
            len(self.told) + 1,
            lease,
            claimed_at=lease.job.requested_at,
            timeout_s=timeout_s,
            is_isolated=is_isolated,
        )
        self._waiting.append(run)
        self.told.append(("submit", lease.job.id, timeout_s))

    def turn(self) -> None:
        return

    def start(self, job_id: str) -> Run:
        """A child takes this job."""
        run = next(run for run in self._waiting if run.job.id == job_id)
        self._waiting.remove(run)
        self.running[run.job.key] = run
        return run

    def withdraw(self, key: Key) -> Run | None:
        for run in self._waiting:
            if run.job.key == key:
                self._waiting.remove(run)
                return run
        return None

    def withdraw_waiting(self) -> list[Run]:
        runs, self._waiting = self._waiting, []
        return runs

    def abort(
        self, key: Key, reason: str, *, kill_after_s: float, verdict: Outcome | None = None, is_lost: bool = False
    ) -> bool:
        self.told.append(("abort", key[0], reason, kill_after_s))
        return self._lose(key, is_lost)

    def kill(self, key: Key, reason: str, *, verdict: Outcome | None = None, is_lost: bool = False) -> bool:
        self.told.append(("kill", key[0], reason))
        return self._lose(key, is_lost)

    def _lose(self, key: Key, is_lost: bool) -> bool:
        run = self.running.get(key)
        if run is not None:
            run.is_lost = run.is_lost or is_lost
        return run is not None

    def in_progress(self, queue_name: str) -> int:
        return sum(run.job.queue_name == queue_name for run in self.running.values())

    def places(self, prefetch: int) -> int:
        return max(0, self.idle + prefetch * self.usable - len(self._waiting))


class Spawned:
    """Tasks that a part has started; as with a TaskGroup, one that fails fails the test."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        return task

    async def finish(self) -> None:
        """Wait until all that was started is done, and what that has started too."""
        while self._tasks:
            tasks, self._tasks = self._tasks, set()
            await asyncio.gather(*tasks)

    async def stop(self) -> None:
        """Cancel what still runs; raise what has failed."""
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result
        self._tasks.clear()
