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
    many_children: int
    many_jobs: int  # of one second, per child
    scrapes: int
    frames: int  # jobs that one child is given by hand
    chatty_s: float
    imports: int
    settle_s: float
    idle_s: float
    leak_jobs: int
    long_leak_jobs: int
    rest_after_s: float
    rest_s: float
    growth_share: float  # of the jobs of each point of a curve


FULL = Effort(
    warmup_jobs=100,
    noop_jobs=1500,
    busy_s=4.0,
    latency_s=10.0,
    latency_jobs_per_s=20.0,
    kills=10,
    preload_mb=500,
    memory_jobs=100,
    many_children=64,
    many_jobs=8,
    scrapes=20,
    frames=2000,
    chatty_s=12.0,
    imports=10,
    settle_s=3.0,
    idle_s=60.0,
    leak_jobs=10_000,
    long_leak_jobs=100_000,
    rest_after_s=65.0,  # the pause of an empty queue has grown to its longest by then
    rest_s=120.0,
    growth_share=1.0,
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
    many_children=4,
    many_jobs=2,
    scrapes=2,
    frames=20,
    chatty_s=4.0,  # there must be a renewal
    imports=1,
    settle_s=0.1,
    idle_s=0.5,
    leak_jobs=100,
    long_leak_jobs=200,
    rest_after_s=0.1,
    rest_s=0.5,
    growth_share=0.1,
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Something to be measured: one run gives a number for each of its figures, by key.

    Raises `stage.NotMeasured` where that was not possible. `is_typical`: the one of its kind that `--quick` runs.
    `is_long`: it takes minutes, and is left out unless it is named or `--long` is said. `most`: what takes long is
    repeated no more often than this, whatever `--repeat` says.
    """

    name: str
    figures: tuple[Figure, ...]
    run: Callable[[Effort], Mapping[str, float]]
    is_typical: bool = True
    is_long: bool = False
    most: int = 1000
