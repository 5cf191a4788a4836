"""All scenarios, in the order of the table."""

from __future__ import annotations

from collections.abc import Sequence

from tests.bench import (
    chatty,
    childside,
    efficiency,
    growth,
    idle,
    importing,
    kill,
    latency,
    leak,
    life,
    many,
    memory,
    noop,
)
from tests.bench.scenario import Scenario

ALL: tuple[Scenario, ...] = (
    *noop.SCENARIOS,
    *efficiency.SCENARIOS,
    *childside.SCENARIOS,
    *latency.SCENARIOS,
    *chatty.SCENARIOS,
    *kill.SCENARIOS,
    *memory.SCENARIOS,
    *many.SCENARIOS,
    *leak.SCENARIOS,
    *idle.SCENARIOS,
    *importing.SCENARIOS,
    *life.SCENARIOS,
    *growth.SCENARIOS,
)


def chosen(beginnings: Sequence[str], *, is_quick: bool = False, is_long: bool = False) -> tuple[Scenario, ...]:
    """Those whose names begin with one of these; without any all, or one of each kind if it has to be quick.

    Those that take minutes only if that is said, or their names begin so. Raises ValueError for a beginning that fits
    nothing.
    """
    for beginning in beginnings:
        if not any(scenario.name.startswith(beginning) for scenario in ALL):
            known = ", ".join(scenario.name for scenario in ALL)
            raise ValueError(f"no scenario begins with {beginning!r}; there are: {known}")
    if beginnings:
        return tuple(scenario for scenario in ALL if scenario.name.startswith(tuple(beginnings)))
    able = (scenario for scenario in ALL if is_long or not scenario.is_long)
    return tuple(scenario for scenario in able if scenario.is_typical or not is_quick)
