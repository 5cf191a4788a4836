"""A queue whose handler kills its children again and again is left alone for a while; the other queues go on.

Closed: claims flow. After CRASHES_TO_OPEN deaths in a row it opens and nothing is claimed. After a growing pause it is
half open: one job at a time is claimed as a probe, and its end decides. Pure; instants are the caller's.
"""

from __future__ import annotations

from spooled_supervisor.timing import Backoff

CRASHES_TO_OPEN = 5
PAUSE_FIRST_S = 5.0
PAUSE_CAP_S = 300.0


class QueueBreaker:
    """One per queue.

    >>> breaker = QueueBreaker()
    >>> for _ in range(CRASHES_TO_OPEN): breaker.crashed(at=0.0)
    >>> breaker.is_open, breaker.allowed(4, at=1.0), breaker.allowed(4, at=PAUSE_FIRST_S)
    (True, 0, 1)
    >>> breaker.answered(); breaker.is_open, breaker.allowed(4, at=6.0)
    (False, 4)
    """

    def __init__(self) -> None:
        self._crashes = 0
        self._pause = Backoff(PAUSE_FIRST_S, PAUSE_CAP_S)
        self._opens_at: float | None = None  # when it is half open; None while closed

    @property
    def is_open(self) -> bool:
        """Whether it holds claims back, or lets only a probe through."""
        return self._opens_at is not None

    def allowed(self, wanted: int, at: float) -> int:
        """How many jobs of this queue may be held at instant `at` out of `wanted`."""
        if self._opens_at is None:
            return wanted
        return min(wanted, 1) if at >= self._opens_at else 0

    @property
    def half_open_at(self) -> float:
        """When a probe may be claimed; only while open."""
        return self._opens_at or 0.0

    def crashed(self, at: float) -> None:
        """A child died in a job of this queue."""
        self._crashes += 1
        # While it is open, this was one that ran already when it opened: only a probe makes the pause longer.
        if self._crashes >= CRASHES_TO_OPEN and (self._opens_at is None or at >= self._opens_at):
            self._opens_at = at + self._pause.next_delay()

    def answered(self) -> None:
        """A job of this queue ended with its child alive, well or not."""
        self._crashes = 0
        self._opens_at = None
        self._pause.reset()
