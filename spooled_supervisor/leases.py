"""What we hold: every lease, when it is due, and when it is lost. No I/O.

Everything is keyed by (job id, lease id): the same job may be claimed again under another lease while the first run is
still being killed, and the two must never be mixed up. Ends are counted from the *start* of the request that won or
renewed the lease, on our own clock (`timing.now`), never from the service's. From `end = request start + duration`:

    kill_at  = end - max(0.5 s, 5 % of the duration)       the family is killed here, so that it is dead before `end`
    abort_at = kill_at - min(abort_grace, duration / 4)    the handler is told to stop
    renew_at = request start + duration * fraction         renewals begin, and are retried until abort_at

So a lease that cannot be renewed fences itself: nothing of ours runs any more when another worker may hold the job.
Renewal goes on until the outcome is settled, during a drain too, and never waits for a child. A supervisor that is
itself stopped (SIGSTOP, a frozen cgroup, a sleeping machine) cannot fence; on waking it looks at the ends first.

But not for ever: a service that renews the lease and never takes the outcome would have the job kept from everybody.
Once its outcome has been on its way for SETTLING_LEASES durations, and SETTLING_AT_LEAST_S, a lease lapses: it is not
renewed any more, and ends as one that cannot be. This is noticed when its next renewal falls due. Time is counted from
the decision, or from the start of the life that has found the outcome on disk.

What is due is found by a heap of looks, so that a thousand leases cost each of them no more than ten do. Leases that
were claimed together would be renewed together, and the last of a thousand wait for the others: each lease is renewed
a little earlier than the one before it (SPREAD_S), and so never again at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count

from spooled_supervisor.config import abort_after_s, kill_after_s
from spooled_supervisor.job import Job
from spooled_supervisor.lifecycle import LEASE, LeaseEvent, LeaseState, advance
from spooled_supervisor.timing import Backoff

RENEW_RETRY_FIRST_S = 0.25
RENEW_RETRY_CAP_S = 5.0
SETTLING_LEASES = 10
SETTLING_AT_LEAST_S = 300.0
"""Outages and rate limits are over by then, as a rule; and short leases are no reason to give up early."""
SPREAD_S = 0.001
"""Three times what it takes to send a renewal."""
MAX_SPREAD = 0.2
"""Of the time from one renewal to the next: so much earlier than it must be a lease is renewed at most."""
STALE_LOOKS = 64
"""So many looks at leases that have left are kept before they are swept out, besides one for each that is there."""

Key = tuple[str, str | None]


@dataclass(slots=True, eq=False)
class Lease:
    """One lease. `book` alone changes it; times are instants on `timing.now`."""

    job: Job
    fraction: float
    abort_grace_s: float
    spread_s: float = 0.0  # how much earlier it is renewed than it must be
    state: LeaseState = LeaseState.HELD
    started_at: float = 0.0
    renew_at: float = 0.0
    due_at: float = 0.0  # when the renewal that is due now was first due: its lateness is measured from here
    look_at: float = float("inf")  # when the book looks at it next
    settling_since: float = float("inf")  # when its outcome was decided
    renewing: bool = False
    aborted: bool = False  # passing abort_at has been told
    killed: bool = False  # passing kill_at has been told
    backoff: Backoff = field(default_factory=lambda: Backoff(RENEW_RETRY_FIRST_S, RENEW_RETRY_CAP_S))

    def count_from(self, started_at: float) -> None:
        """The request that won or renewed it was started then."""
        self.started_at = started_at
        interval_s = self.job.lease_duration_s * self.fraction
        self.renew_at = self.due_at = started_at + interval_s - self.spread_s % (MAX_SPREAD * interval_s)
        self.backoff.reset()

    @property
    def end(self) -> float:
        return self.started_at + self.job.lease_duration_s

    @property
    def kill_at(self) -> float:
        return self.started_at + kill_after_s(self.job.lease_duration_s)

    @property
    def abort_at(self) -> float:
        return self.started_at + abort_after_s(self.job.lease_duration_s, self.abort_grace_s)

    @property
    def renews_until(self) -> float:
        """From then on no renewal is begun; inf while its outcome is not known."""
        return self.settling_since + max(SETTLING_LEASES * self.job.lease_duration_s, SETTLING_AT_LEAST_S)

    @property
    def has_lapsed(self) -> bool:
        """Whether it is never renewed again, as its outcome was not taken for too long."""
        return self.renew_at == float("inf")

    @property
    def is_live(self) -> bool:
        """Whether it is still ours."""
        return self.state in (LeaseState.HELD, LeaseState.SETTLING)

    def next_due(self) -> float:
        """The next instant at which `LeaseBook.due` has something to say about it."""
        if self.state is LeaseState.SETTLING:
            return self.end if self.renewing else min(self.renew_at, self.end)
        if self.killed:
            return self.end
        if self.aborted:
            return self.kill_at
        return self.abort_at if self.renewing else min(self.renew_at, self.abort_at)


@dataclass(slots=True)
class Due:
    """What has to be done now: renewals to send, runs to abort, families to kill; and leases that are over, or that
    are not renewed any more."""

    renew: list[Lease] = field(default_factory=list)
    lapsed: list[Lease] = field(default_factory=list)
    abort: list[Lease] = field(default_factory=list)
    kill: list[Lease] = field(default_factory=list)
    ended: list[Lease] = field(default_factory=list)


class LeaseBook:
    """All live leases by key. Synchronous; used from the loop's thread only."""

    def __init__(self, *, fraction: float, abort_grace_s: float) -> None:
        self._fraction = fraction
        self._abort_grace_s = abort_grace_s
        self._leases: dict[Key, Lease] = {}
        self._looks: list[
            tuple[float, int, Key]
        ] = []  # the earliest first; one counts if its lease's `look_at` says so
        self._order = count()

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(tuple(self._leases.values()))

    def __contains__(self, key: Key) -> bool:
        return key in self._leases

    def get(self, key: Key) -> Lease | None:
        """The live lease with this key."""
        return self._leases.get(key)

    def hold(self, job: Job) -> Lease | None:
        """Take a claimed job into the book; None if this very lease is in it already (an answer that came twice)."""
        if job.key in self._leases:
            return None
        lease = Lease(job, self._fraction, self._abort_grace_s, len(self._leases) * SPREAD_S)
        lease.count_from(job.requested_at)
        self._leases[job.key] = lease
        self._plan_look(lease)
        return lease

    def next_due(self) -> float:
        """No later than the next instant at which `due` will have something to say; inf if nothing is held."""
        return self._looks[0][0] if self._looks else float("inf")

    def due(self, now: float) -> Due:
        """What is due at `now`. A renewal is told when none is under way, all else once."""
        due = Due()
        looked_at = []
        while self._looks and self._looks[0][0] <= now:
            at, _, key = heappop(self._looks)
            lease = self._leases.get(key)
            if lease is not None and lease.look_at == at:
                lease.look_at = float("inf")
                self._look(lease, now, due)
                looked_at.append(lease)
        for lease in looked_at:
            self._plan_look(lease)
        return due

    def _look(self, lease: Lease, now: float, due: Due) -> None:
        runs = lease.state is LeaseState.HELD
        if now >= lease.end:
            due.ended.append(lease)
            self._leave(lease, LeaseEvent.RAN_OUT_OF_TIME)
        elif runs and now >= lease.kill_at and not lease.killed:
            if not lease.aborted:  # the clock has jumped over abort_at
                due.abort.append(lease)
            lease.killed = lease.aborted = True
            due.kill.append(lease)
        elif runs and now >= lease.abort_at and not lease.aborted:
            lease.aborted = True
            due.abort.append(lease)
        elif now >= lease.renew_at and not lease.renewing and not (runs and lease.aborted):
            if now < lease.renews_until:
                lease.renewing = True
                due.renew.append(lease)
            else:
                lease.renew_at = float("inf")
                due.lapsed.append(lease)

    def _plan_look(self, lease: Lease) -> None:
        """See that it is looked at when it is due. A look that comes earlier will plan this one."""
        at = lease.next_due()
        if lease.is_live and at < lease.look_at:
            lease.look_at = at
            heappush(self._looks, (at, next(self._order), lease.job.key))

    def renewed(self, lease: Lease, started_at: float) -> None:
        """A renewal that was started then succeeded. It does not undo an abort that has been told already."""
        lease.renewing = False
        if lease.is_live and not (lease.state is LeaseState.HELD and lease.aborted):
            lease.count_from(max(started_at, lease.started_at))
        self._plan_look(lease)

    def renewal_failed(self, lease: Lease, now: float, *, retry_after_s: float | None = None) -> float:
        """No usable answer; returns the instant of the next try, which never lies beyond abort_at by a hint's will."""
        lease.renewing = False
        delay = lease.backoff.next_delay()
        if retry_after_s is not None:
            delay = max(delay, min(retry_after_s, (lease.abort_at - now) / 2))
        lease.renew_at = now + delay
        self._plan_look(lease)
        return lease.renew_at

    def decided(self, lease: Lease, now: float) -> None:
        """The outcome is known and will be reported."""
        lease.state = advance(LEASE, lease.state, LeaseEvent.WAS_DECIDED)
        lease.settling_since = now
        self._plan_look(lease)  # one that was told to abort is renewed again

    def settled(self, lease: Lease) -> None:
        """The service has the outcome."""
        self._leave(lease, LeaseEvent.WAS_TAKEN)

    def refused(self, lease: Lease) -> None:
        """The service does not accept the lease any more."""
        self._leave(lease, LeaseEvent.WAS_REFUSED)

    def dropped(self, lease: Lease) -> None:
        """We give it up: it ends by itself at the service."""
        self._leave(lease, LeaseEvent.WAS_DROPPED)

    def _leave(self, lease: Lease, event: LeaseEvent) -> None:
        lease.state = advance(LEASE, lease.state, event)
        del self._leases[lease.job.key]
        if len(self._looks) > 2 * len(self._leases) + STALE_LOOKS:
            planned = ((key, lease.look_at) for key, lease in self._leases.items() if lease.look_at < float("inf"))
            self._looks = [(at, next(self._order), key) for key, at in planned]
            heapify(self._looks)
