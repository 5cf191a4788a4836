"""The only reader of clocks: instants, back-off with jitter, restart budget, and the event loop's own clock.

Instants inside the package are seconds on CLOCK_BOOTTIME (clock_gettime(2)): it never jumps, and unlike
CLOCK_MONOTONIC it goes on while the machine sleeps, so a lease grows old in a suspended laptop as it does at the
service. Wall time is for people and servers only. This module knows nothing of jobs or processes, and imports asyncio
only where a loop is made, as children import it too.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

Clock = Callable[[], float]

TICK_S = 0.5
"""The longest sleep of the supervisor's loop. epoll_wait(2) counts CLOCK_MONOTONIC, which stands still in a suspend;
a loop that never sleeps longer than this notices at most this late that its own clock has moved on."""


def now() -> float:
    """Seconds on CLOCK_BOOTTIME."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def wall() -> float:
    """Seconds since the epoch: for people, servers and files, never for durations."""
    return time.time()


def timestamp(at_wall: float | None = None) -> str:
    """An instant of wall time as RFC 3339 in UTC with milliseconds."""
    at = wall() if at_wall is None else at_wall
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) + f".{int(at % 1 * 1000):03d}Z"


def new_event_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose `time()` is `now()`: give it to `asyncio.Runner(loop_factory=new_event_loop)`."""
    import asyncio  # here, because children read this module and must not pay for asyncio

    class BoottimeLoop(asyncio.SelectorEventLoop):
        def time(self) -> float:
            return now()

    return BoottimeLoop()


_chance = random.Random()
"""One for all: there is a back-off for each lease and for each report, and seeding a generator takes 10 us."""


class Backoff:
    """Growing, capped, jittered delays: full jitter between half and the whole of `first_s * factor ** n`.

    >>> b = Backoff(1.0, 8.0, rng=random.Random(1))
    >>> [round(b.next_delay() / step, 1) >= 0.5 for step in (1, 2, 4, 8, 8)]
    [True, True, True, True, True]
    """

    def __init__(self, first_s: float, cap_s: float, *, factor: float = 2.0, rng: random.Random | None = None) -> None:
        self._first_s = first_s
        self._cap_s = cap_s
        self._factor = factor
        self._rng = rng or _chance
        self.failures = 0

    def next_delay(self) -> float:
        """Count one failure more and return how long to wait, in seconds."""
        # The exponent is bounded before the power is: an outage of days must not end in OverflowError.
        step = min(self._cap_s, self._first_s * self._factor ** min(self.failures, 64))
        self.failures += 1
        return step * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Forget all failures."""
        self.failures = 0


def jittered(interval_s: float, share: float = 0.1, *, rng: random.Random | None = None) -> float:
    """`interval_s` with up to `share` of it added or taken away, so that a fleet does not march in step."""
    return interval_s * (rng or random).uniform(1 - share, 1 + share)


class RestartBudget:
    """How many restarts are fine within a window: `spend(now)` is False when there were too many.

    >>> budget = RestartBudget(2, 10.0)
    >>> [budget.spend(at) for at in (0.0, 1.0, 2.0, 12.5)]
    [True, True, False, True]
    """

    def __init__(self, restarts: int, window_s: float) -> None:
        self._restarts = restarts
        self._window_s = window_s
        self._spent: deque[float] = deque()

    def spend(self, at: float) -> bool:
        """Count one restart at instant `at`; whether it is still within the budget."""
        while self._spent and at - self._spent[0] > self._window_s:
            self._spent.popleft()
        self._spent.append(at)
        return len(self._spent) <= self._restarts


class Alarm:
    """Sleep until an instant, or until somebody rings: what the supervisor's loops wait on instead of polling."""

    def __init__(self) -> None:
        self._bell: asyncio.Future[None] | None = None
        self._rang = False
        self.when = float("inf")

    def ring(self) -> None:
        """Wake who waits, or who waits next. From the loop's thread only."""
        self._rang = True
        if self._bell is not None and not self._bell.done():
            self._bell.set_result(None)

    async def wait_until(self, when: float) -> None:
        """Return at instant `when` (the loop's clock) or when the alarm rings. For one waiter; cancel-safe."""
        if self._rang:
            self._rang = False
            return
        import asyncio

        loop = asyncio.get_running_loop()
        self.when = when
        self._bell = loop.create_future()
        timer = loop.call_at(when, self.ring) if when != float("inf") else None
        try:
            await self._bell
            self._rang = False  # not when cancelled: a ring that this waiter has not heard is for the next one
        finally:
            if timer is not None:
                timer.cancel()
            self._bell, self.when = None, float("inf")
