"""Progress to the service: best effort, at most one report per job in INTERVAL_S, the newest wins.

Off for good once the service says that it has no such route, and silent while it limits our rate: nobody's lease or
outcome may wait for a progress bar.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from spooled_supervisor.api.gate import RateGate
from spooled_supervisor.api.service import Service
from spooled_supervisor.childlink import Run
from spooled_supervisor.errors import ApiRefused, ApiUnavailable, LeaseLost
from spooled_supervisor.pool import Pool
from spooled_supervisor.timing import now

INTERVAL_S = 5.0
TIMEOUT_S = 5.0


class ProgressSender:
    """Looks at running jobs when it is asked to."""

    def __init__(
        self,
        api: Service,
        pool: Pool,
        gate: RateGate,
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self._api = api
        self._pool = pool
        self._gate = gate
        self._spawn = spawn
        self._is_on = True

    def tick(self, at: float) -> None:
        """Send what is new and has waited long enough."""
        if not self._is_on or self._gate.wait_for_claim(at) > 0:
            return
        for child in self._pool.children:
            run = child.run
            if run is not None and run.percent is not None and at - run.sent_at >= INTERVAL_S:
                newest = (run.percent, run.message)
                if newest != run.sent_percent:
                    run.sent_percent, run.sent_at = newest, at
                    self._spawn(self._send(run, *newest), "progress")

    async def _send(self, run: Run, percent: float, message: str | None) -> None:
        try:
            self._is_on = await self._api.progress(run.job, percent, message, timeout_s=TIMEOUT_S)
        except ApiUnavailable as error:
            if error.rate_limited:
                self._gate.note(error.retry_after_s, now())
        except (ApiRefused, LeaseLost):
            return  # the renewal and the report say what is to be said about that
