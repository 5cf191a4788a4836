"""Who waits when the service limits our rate: claims do, acks and renewals do not.

Every request costs the organization one token, but a claim that waits costs nothing, while a renewal that waits may
cost the lease. So whoever is told "too many requests" notes it here, and only claims ask here before they are sent. No
I/O; instants are seconds on `timing.now`.
"""

from __future__ import annotations

import random

CAP_S = 60.0
"""The longest wait. The service's slowest bucket, the API key's own limit, is counted per fixed minute."""

UNHINTED_S = 1.0
"""The wait when the answer carried no hint: token buckets are counted per second."""

SPREAD = 0.1
"""The share of jitter. All workers of an organization get the same hint at the same moment."""


class RateGate:
    """Claims are blocked until the latest of the noted hints has passed.

    >>> gate = RateGate(rng=random.Random(1))
    >>> gate.wait_for_claim(100.0)
    0.0
    >>> gate.note(3.0, 100.0)
    >>> 3.0 <= gate.wait_for_claim(100.0) <= 3.3
    True
    """

    def __init__(self, *, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self.claims_blocked_until = float("-inf")

    def note(self, retry_after_s: float | None, now: float) -> None:
        """Some request was answered "too many" at `now`. Never shortens a wait that is already on."""
        hint = UNHINTED_S if retry_after_s is None else max(retry_after_s, 0.0)
        # Later than the hint, never earlier. At the cap the spread is taken from below, else all would come at once.
        wait = max(hint, UNHINTED_S * SPREAD) * self._rng.uniform(1.0, 1.0 + SPREAD)
        if wait > CAP_S:
            wait = CAP_S * self._rng.uniform(1.0 - SPREAD, 1.0)
        self.claims_blocked_until = max(self.claims_blocked_until, now + wait)

    def wait_for_claim(self, now: float) -> float:
        """How many seconds a claim has to wait; 0.0 when it may be sent."""
        return max(0.0, self.claims_blocked_until - now)
