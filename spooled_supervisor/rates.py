"""How many lines may go to the log: for what a child prints, and for what it says, the same rate. Pure."""

from __future__ import annotations

from spooled_supervisor.timing import Clock, now

LINES_PER_S = 200.0
LINES_BURST = 1000.0


class LineRate:
    """How many lines may be logged: LINES_BURST at once, LINES_PER_S in the long run; what was too much is counted."""

    def __init__(self, clock: Clock = now) -> None:
        self._clock = clock
        self._left = LINES_BURST
        self._filled_at = clock()
        self.dropped = 0

    def allows(self) -> bool:
        """Whether one line more may be logged now."""
        at = self._clock()
        self._left = min(LINES_BURST, self._left + (at - self._filled_at) * LINES_PER_S)
        self._filled_at = at
        if self._left < 1:
            self.dropped += 1
            return False
        self._left -= 1
        return True

    def take_dropped(self) -> int:
        """How many were dropped since this was asked last."""
        dropped, self.dropped = self.dropped, 0
        return dropped
