"""What a scenario is, and how much of everything it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.bench.figures import Figure


@dataclass(frozen=True, slots=True)
class Effort:
    """The sizes of one repetition."""

    warmup_jobs: int  # per child, not counted
    noop_jobs: int
    busy_s: float  # of work for each child
    latency_s: float
    latency_jobs_per_s: float
    kills: int
    preload_mb: int
    memory_jobs: int  # per child
    settle_s: float
    idle_s: float


FULL = Effort(
    warmup_jobs=100,
    noop_jobs=1500,
    busy_s=4.0,
    latency_s=10.0,
    latency_jobs_per_s=20.0,
    kills=10,
    preload_mb=200,
    memory_jobs=100,
    settle_s=3.0,
    idle_s=20.0,  # two worker heartbeats
)
QUICK = Effort(
    warmup_jobs=5,
    noop_jobs=40,
    busy_s=0.2,
    latency_s=0.5,
    latency_jobs_per_s=20.0,
    kills=1,
    preload_mb=5,
    memory_jobs=5,
    settle_s=0.1,
    idle_s=0.5,
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Something to be measured: one run gives a number for each of its figures, by key.

    Raises `stage.NotMeasured` where that was not possible. `is_typical`: the one of its kind that `--quick` runs.
    """

    name: str
    figures: tuple[Figure, ...]
    run: Callable[[Effort], Mapping[str, float]]
    is_typical: bool = True
