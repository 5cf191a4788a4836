"""Which operations of the service fail at the moment: said once when it begins, once when it ends, and in `reasons`.

An outage of an hour is two lines in the log, not thousands. Its reason may be put in several ways by turns (by our own
wire and by a library, say), or never twice in the same. So each reason is told once in a row of failures, and a further
one RETOLD_S after the last at the earliest. What the reason is now, `reasons` says. No I/O.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from spooled_supervisor.events import ApiRecovered, ApiTroubled, Events
from spooled_supervisor.timing import now

PERSISTENT_FAILURES = 3
"""From so many failures in a row on, an operation's trouble is worth a reason in `/health`."""
RETOLD_S = 60.0
"""From one line about an operation to the next one for another reason at least. A reason that lasts is told then."""
TOLD_KEPT = 16
"""So many of a row's reasons are remembered as told."""
FRESH_S = 60.0
"""How long after its last failure an operation is in trouble; longer (twice the delay) where the next try is far."""


@dataclass(slots=True)
class _Row:
    """What has failed in a row since it worked last."""

    failures: int = 0
    reason: str = ""
    told: deque[str] = field(default_factory=lambda: deque(maxlen=TOLD_KEPT))
    told_at: float = 0.0
    fresh_until: float = 0.0
    is_optional: bool = False


class Troubles:
    """Failures in a row by operation (and queue, where it concerns one)."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._rows: dict[str, _Row] = {}

    def failed(self, operation: str, reason: str, retry_in_s: float | None, *, is_optional: bool = False) -> None:
        """One more failure; the first of a row is told, and now and then one for a reason that was not told yet.

        What is optional is told as well, but we are not the worse for it: it never gets into `reasons`.
        """
        at = now()
        row = self._rows.setdefault(operation, _Row())
        row.failures += 1
        row.reason = reason
        row.fresh_until = at + max(FRESH_S, 2 * (retry_in_s or 0.0))
        row.is_optional = row.is_optional or is_optional
        # What is not tried again is told now or never.
        may_be_told = not row.told or retry_in_s is None or at - row.told_at >= RETOLD_S
        if may_be_told and reason not in row.told:
            row.told.append(reason)
            row.told_at = at
            rounded = None if retry_in_s is None else round(retry_in_s, 3)
            self._events.emit(ApiTroubled(operation, reason, rounded))

    def worked(self, operation: str) -> None:
        """It works (again)."""
        if (row := self._rows.pop(operation, None)) is not None:
            self._events.emit(ApiRecovered(operation, row.failures))

    def forget(self, operation: str) -> None:
        """It will not be tried any more; whether it would work, nobody knows."""
        self._rows.pop(operation, None)

    @property
    def reasons(self) -> list[str]:
        """What has failed several times in a row, in words.

        Without what is not tried any more: a lease has ended, or nothing is claimed for now. Only a success would end
        it, and none may ever come.
        """
        return [
            f"{operation}: {row.reason}"
            for operation, row in self._rows.items()
            if row.failures >= PERSISTENT_FAILURES and not row.is_optional and now() < row.fresh_until
        ]
