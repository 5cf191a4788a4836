"""What goes wrong when, decided beforehand by a seed: the same seed gives the same schedule again.

Only the schedule is replayed, not the machine: which process a blow hits, and what it is doing then, is up to the
scheduler. Clocks do not jump here: CLOCK_BOOTTIME, which all deadlines are counted on, cannot be set by anybody.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.chaos.proxy import FAULTS

BURST = 12
REPORTS = ("complete", "fail")
OPERATIONS: tuple[tuple[str, ...] | None, ...] = (None, ("claim",), REPORTS, ("renew",), ("heartbeat", "register"))

KINDS = {"quick": 40, "spin": 25, "raise": 8, "litter": 8, "crash": 5, "stuck": 3, "long": 2}
"""How often each kind of job comes."""


@dataclass(frozen=True)
class Blow:
    """Something that happens `at_s` after the start. `what` is the name of a method of `Stage`."""

    at_s: float
    what: str
    args: tuple[object, ...] = ()

    def __str__(self) -> str:
        return f"{self.at_s:6.2f} s  {self.what}{self.args}"


def make_schedule(seed: int, seconds: float) -> list[Blow]:
    """Blows and bursts of jobs, in order of time."""
    rng = random.Random(seed)
    blows = [Blow(0.0, "make_jobs", (seed, 5 * BURST))]
    at = 0.5
    while at < seconds:
        blows += _next(rng, at)
        at += rng.uniform(0.1, 1.2)
    bursts = [Blow(rng.uniform(0.5, seconds), "make_jobs", (rng.randrange(1 << 30), BURST)) for _ in range(10)]
    return sorted(blows + bursts, key=lambda blow: blow.at_s)


def _next(rng: random.Random, at: float) -> list[Blow]:
    kind = rng.choices(
        ("api", "child", "fork_server", "supervisor", "stop_child", "stop_supervisor", "drain", "disk"),
        (8, 6, 2, 2, 2, 1, 1, 2),
    )[0]
    number = rng.randrange(1 << 16)
    match kind:
        case "api":
            fault = rng.choice(FAULTS)
            operations = None if fault == "down" else rng.choice(OPERATIONS)
            lasts_s = rng.choice((0.3, 1.0, 2.5, 7.0)) * rng.uniform(0.5, 1.0)
            return [Blow(at, "break_api", (fault, operations)), Blow(at + lasts_s, "mend_api")]
        case "child":
            return [Blow(at, "kill_child", (number,))]
        case "fork_server":
            return [Blow(at, "kill_fork_server")]
        case "supervisor":
            return [Blow(at, "kill_supervisor")]
        case "stop_child":
            return [Blow(at, "stop_child", (number,)), Blow(at + rng.uniform(0.2, 3.0), "continue_all")]
        case "stop_supervisor":
            return [Blow(at, "stop_supervisor"), Blow(at + rng.choice((0.5, 2.0, 6.0)), "continue_all")]
        case "drain":
            return [Blow(at, "drain")]
        case _:
            return [Blow(at, "fill_disk"), Blow(at + rng.uniform(0.5, 3.0), "free_disk")]
