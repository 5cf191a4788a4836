"""Bring one decided outcome to the service: tried until it is taken, refused for good, or the lease has ended.

A success that the service refuses (too large, a character its database cannot hold) becomes a failure with the reason,
as a job must not hang because of what it returned; a failure that is refused is sent once more with plain text. What is
refused to the key or the plan says nothing of the outcome: that is tried until the lease ends. After an answer was lost
the same report is repeated, never another one: the first may have landed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from spooled_supervisor.api.answers import failure_for_refused_result
from spooled_supervisor.api.gate import RateGate
from spooled_supervisor.api.service import Service
from spooled_supervisor.errors import ApiRefused, ApiUnavailable, CredentialsRefused, LeaseLost, ProtocolError
from spooled_supervisor.events import Events, JobLeaseLost, OutcomeDropped, OutcomeSettled
from spooled_supervisor.job import Failed, Outcome, Succeeded, error_text
from spooled_supervisor.leases import Lease, LeaseBook
from spooled_supervisor.timing import Backoff, now
from spooled_supervisor.troubles import Troubles

TRY_TIMEOUT_S = 10.0
LARGE_BYTES = 64 * 1024
LARGE_AT_ONCE = 4
SLOWEST_BYTES_PER_S = 32_000
"""A large result has more time, and few are sent at once: on a slow line all of them together would reach nobody."""
RETRY_FIRST_S = 0.2
RETRY_CAP_S = 5.0
REFUSED_RETRY_S = 5.0
"""Between tries while the key is refused, or something is refused to it: that may change before the lease ends."""


@dataclass(slots=True)
class _Report:
    """What is being sent, and how often it was."""

    outcome: Outcome
    tries: int = 0
    is_plain: bool = False  # a failure's text has been stripped already
    is_dropped: bool = False  # the service will never have it

    @property
    def status(self) -> str:
        return "completed" if isinstance(self.outcome, Succeeded) else "failed"


class Settler:
    """Settles for one supervisor."""

    def __init__(
        self,
        leases: LeaseBook,
        *,
        events: Events,
        troubles: Troubles,
        gate: RateGate,
        on_refused: Callable[[CredentialsRefused], None],
    ) -> None:
        self._leases = leases
        self._events = events
        self._troubles = troubles
        self._gate = gate
        self._on_refused = on_refused
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)

    async def settle(self, lease: Lease, outcome: Outcome, api: Service, *, tries: int = 0) -> bool:
        """Report the outcome of this lease through `api`; False if it could not be brought to the service.

        `tries`: how often an earlier life may have sent it. Not cancel-safe: the report may have reached the service.
        """
        report = _Report(outcome, tries)
        backoff = Backoff(RETRY_FIRST_S, RETRY_CAP_S)
        while lease.is_live and now() < lease.end:  # the clock too: after a sleep this may run before the book is kept
            delay = await self._try(api, lease, report, backoff)
            if delay is None:
                return not report.is_dropped
            await asyncio.sleep(min(delay, max(0.0, lease.end - now())))
        self._drop(lease, report, "the lease ended before the service took it")
        return False

    async def _try(self, api: Service, lease: Lease, report: _Report, backoff: Backoff) -> float | None:
        """One try. None: it is over, one way or the other; else seconds to wait before the next one."""
        try:
            already = await self._send(api, lease, report)
        except LeaseLost as lost:
            self._lose(lease, report, lost)
            return None
        except CredentialsRefused as refused:
            self._on_refused(refused)
            return self._trouble(report, str(refused), REFUSED_RETRY_S)
        except (ApiRefused, ProtocolError) as refused:
            if isinstance(refused, ApiRefused) and refused.is_of_the_key:
                return self._trouble(report, str(refused), REFUSED_RETRY_S)
            return self._soften(lease, report, refused)
        except ApiUnavailable as unavailable:
            if unavailable.rate_limited:
                self._gate.note(unavailable.retry_after_s, now())  # claims make room for reports
            left = lease.end - now()
            hint = min(unavailable.retry_after_s or 0.0, left / 4)
            return self._trouble(report, str(unavailable), max(backoff.next_delay(), hint))
        self._troubles.worked("settle")
        if lease.is_live:
            self._leases.settled(lease)
        job = lease.job
        self._events.emit(OutcomeSettled(job.id, job.queue_name, report.status, already, report.tries))
        return None

    async def _send(self, api: Service, lease: Lease, report: _Report) -> bool:
        """One request; whether an earlier one had landed already."""
        tries, report.tries = report.tries, report.tries + 1
        match report.outcome:
            case Succeeded(result=result):
                async with self._large if len(result) > LARGE_BYTES else contextlib.nullcontext():
                    deadline = min(now() + TRY_TIMEOUT_S + len(result) / SLOWEST_BYTES_PER_S, lease.end)
                    settled = await api.complete(lease.job, result, tries_before=tries, deadline=deadline)
            case outcome:
                deadline = min(now() + TRY_TIMEOUT_S, lease.end)
                retryable = not isinstance(outcome, Failed) or outcome.retryable
                settled = await api.fail(
                    lease.job, error_text(outcome), retryable=retryable, tries_before=tries, deadline=deadline
                )
        return settled.already

    def _soften(self, lease: Lease, report: _Report, refused: ApiRefused | ProtocolError) -> float | None:
        """The service will never take this report: send one that it will take."""
        match report.outcome:
            case Succeeded():
                text = failure_for_refused_result(refused) if isinstance(refused, ApiRefused) else str(refused)
                report.outcome, report.tries = Failed(text), 0
                return 0.0
            case outcome if not report.is_plain:
                plain = "".join(c if c.isprintable() else " " for c in error_text(outcome))
                retryable = not isinstance(outcome, Failed) or outcome.retryable
                report.outcome, report.is_plain = Failed(plain, retryable=retryable), True
                return 0.0
        if lease.is_live:
            self._leases.dropped(lease)
        self._drop(lease, report, str(refused))
        return None

    def _lose(self, lease: Lease, report: _Report, lost: LeaseLost) -> None:
        self._troubles.worked("settle")  # no answer that one wants, but one
        if lease.is_live:
            self._leases.refused(lease)
        self._events.emit(JobLeaseLost(lease.job.id, lease.job.queue_name, lost.reason))

    def _trouble(self, report: _Report, reason: str, delay_s: float) -> float:
        self._troubles.failed("settle", reason, delay_s)
        return delay_s

    def _drop(self, lease: Lease, report: _Report, reason: str) -> None:
        report.is_dropped = True
        self._events.emit(OutcomeDropped(lease.job.id, lease.job.queue_name, report.status, reason))
