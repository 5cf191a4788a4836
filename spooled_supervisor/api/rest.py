"""The worker-facing calls of the service over REST. Each is one request; who repeats it, and when, is decided above.

This module knows which address, body and reading belong to which call. The rest has homes of its own: `exchange` sends,
`messages` and `claims` have the bodies, `answers` tells what a status means, `values` what we make of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from spooled_supervisor import __version__, timing
from spooled_supervisor.api import answers, claims, messages
from spooled_supervisor.api.answers import Reading
from spooled_supervisor.api.exchange import Exchange, Received
from spooled_supervisor.api.values import Claim, HeartbeatAnswer, Registration, Settled
from spooled_supervisor.errors import ApiUnavailable
from spooled_supervisor.events import Events
from spooled_supervisor.job import Job

if TYPE_CHECKING:
    from spooled_supervisor.api.httpx_wire import Transport

USER_AGENT = f"spooled-supervisor/{__version__}"

MAX_CLAIM_BYTES, MAX_CLAIM_BYTES_PER_JOB = 6 << 20, 3 << 19
"""Payloads are at most 1 MiB on most plans, and 5 MiB on one."""

RENEW_ROUTES = ("heartbeat", "renew-lease")
"""Every service met so far has the first; the published guide has the second."""


class RestApi:
    """Used from one event loop, by any number of tasks, as an async context manager.

    All calls raise ApiUnavailable (try again later), ApiRefused (it will be refused again) or CredentialsRefused (the
    API key is not accepted). All may be cancelled half-way: the service may have carried them out, and the client stays
    usable. Instants are seconds on `timing.now`; `timeout_s` counts from the call.
    """

    def __init__(
        self,
        *,
        base_url: str,
        api_key: Callable[[], str],
        worker_id: str,
        events: Events,
        ca_file: Path | None = None,
        user_agent: str = USER_AGENT,
        transport: Transport | None = None,
    ) -> None:
        """`api_key` is asked before every request, so that a rotated key is picked up; an OSError it raises is passing.

        `ca_file` replaces the usual certificate authorities. A `transport` of the caller's is closed by us, too. Raises
        ConfigError for an address, a CA file or a proxy that cannot be used.
        """
        self._exchange = Exchange(
            base_url, api_key, events, ca_file=ca_file, user_agent=user_agent, transport=transport
        )
        self.base_url = base_url
        self._worker_id = worker_id
        self._known_as = worker_id  # only an old service names us itself; claims and reports go on under our own name
        self._renew_route: str | None = None  # the one that worked
        self._progress_works = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        """Close all connections; calls that are still out fail."""
        await self._exchange.aclose()

    def acting_as(self, worker_id: str) -> RestApi:
        """The same client, reporting under another id: what an earlier life has claimed under that id."""
        twin = copy.copy(self)
        twin._worker_id = worker_id
        return twin

    # --- the worker ---------------------------------------------------------------------------------------------------

    async def register(
        self,
        *,
        queue_names: Sequence[str],
        hostname: str,
        worker_type: str,
        version: str,
        max_concurrency: int,
        metadata: Mapping[str, str],
        timeout_s: float,
    ) -> Registration:
        """`POST /api/v1/workers/register → 201`. An upsert; words and numbers are cut to the service's rules."""
        body = messages.register_body(
            self._worker_id,
            queue_names=queue_names,
            hostname=hostname,
            worker_type=worker_type,
            version=version,
            max_concurrency=max_concurrency,
            metadata=metadata,
        )
        received = await self._exchange.post("register", "/workers/register", body, timing.now() + timeout_s)
        registration = messages.read_registration(self._done("register", received))
        self._known_as = registration.worker_id
        return registration

    async def heartbeat(
        self,
        *,
        status: str,
        current_jobs: int,
        cpu_percent: float,
        memory_percent: float,
        metadata: Mapping[str, Any] | None,
        timeout_s: float,
    ) -> HeartbeatAnswer:
        """`POST /api/v1/workers/{id}/heartbeat → 200`; an unknown worker is an answer, not an error."""
        body = messages.heartbeat_body(
            status=status,
            current_jobs=current_jobs,
            cpu_percent=cpu_percent,
            memory_percent=memory_percent,
            metadata=metadata,
        )
        path = f"/workers/{_segment(self._known_as)}/heartbeat"
        received = await self._exchange.post("heartbeat", path, body, timing.now() + timeout_s)
        if answers.read("heartbeat", received.answer, replay=received.replay) is Reading.UNKNOWN_WORKER:
            return HeartbeatAnswer(known=False)
        return messages.read_heartbeat(self._done("heartbeat", received))

    async def deregister(self, *, timeout_s: float) -> None:
        """`POST /api/v1/workers/{id}/deregister → 204`; fine also when the service has forgotten us."""
        path = f"/workers/{_segment(self._known_as)}/deregister"
        received = await self._exchange.post("deregister", path, b"", timing.now() + timeout_s)
        messages.read_acknowledged("deregister", self._done("deregister", received))

    # --- jobs ---------------------------------------------------------------------------------------------------------

    async def claim(self, queue_name: str, *, limit: int, lease_duration_s: int, timeout_s: float) -> Claim:
        """`POST /api/v1/jobs/claim → 200 {"jobs": [...]}`.

        Never replayed: after an ApiUnavailable that is not `rate_limited`, or when cancelled, jobs may be leased to us
        that we do not know of.
        """
        limit = min(max(limit, 1), messages.MAX_CLAIM)
        lease_s = messages.lease_seconds(lease_duration_s)
        body = messages.claim_body(self._worker_id, queue_name, limit=limit, lease_duration_s=lease_s)
        received = await self._exchange.post(
            "claim",
            "/jobs/claim",
            body,
            timing.now() + timeout_s,
            may_replay=False,
            most_bytes=MAX_CLAIM_BYTES + limit * MAX_CLAIM_BYTES_PER_JOB,
        )
        return claims.read_claim(
            self._done("claim", received),
            queue_name=queue_name,
            lease_duration_s=float(lease_s),
            requested_at=received.started_at,
        )

    async def complete(self, job: Job, result: bytes, *, tries_before: int, deadline: float) -> Settled:
        """`POST /api/v1/jobs/{id}/complete → 200`. `tries_before`: how many tries may have been carried out already.

        Raises LeaseLost, and ProtocolError if `result` is not one JSON value (nothing was sent).
        """
        messages.check_json(result)
        body = messages.complete_body(self._worker_id, job, result)
        return await self._settle("complete", job, body, tries_before, deadline)

    async def fail(self, job: Job, error: str, *, retryable: bool, tries_before: int, deadline: float) -> Settled:
        """`POST /api/v1/jobs/{id}/fail → 200`. `retryable=False` is a hint that not every service obeys.

        Raises LeaseLost. The text is cut to what the service takes, and is never empty.
        """
        body = messages.fail_body(self._worker_id, job, error, retryable=retryable)
        return await self._settle("fail", job, body, tries_before, deadline)

    async def renew(self, job: Job, *, deadline: float) -> float:
        """`POST /api/v1/jobs/{id}/heartbeat` or `.../renew-lease → 200`: when the request that succeeded was started.

        The new lease end is that instant plus `job.lease_duration_s`. Which of the two routes the service has is found
        out once; until then a 404 of the first is believed only after the second was asked too. Raises LeaseLost.
        """
        route = self._renew_route or RENEW_ROUTES[0]
        received = await self._renew_at(route, job, deadline)
        if received.answer.status in (404, 405) and (self._renew_route is None or self._has_no_route(received)):
            other = RENEW_ROUTES[1 - RENEW_ROUTES.index(route)]
            second = await self._renew_at(other, job, deadline)
            if not self._has_no_route(second):
                route, received = other, second
        if answers.read("renew", received.answer, replay=False) in (Reading.OK, Reading.LOST):
            self._renew_route = route
        body = self._done("renew", received, job_id=job.id)
        # What the guide's route answers was never written down: whatever is not an object must at least be a 204.
        if received.answer.status != 204:
            messages.read_settled("renew", body)
        return received.started_at

    async def progress(self, job: Job, percent: float, message: str | None, *, timeout_s: float) -> bool:
        """`POST /api/v1/jobs/{id}/progress → 200`. False: the service has no such route; do not ask again.

        Once it has worked, a 404 is about the job, which the next renewal will find out.
        """
        body = messages.progress_body(percent, message)
        path = f"/jobs/{_segment(job.id)}/progress"
        received = await self._exchange.post("progress", path, body, timing.now() + timeout_s)
        if answers.read("progress", received.answer, replay=received.replay) is Reading.NO_ROUTE:
            return self._progress_works
        messages.read_acknowledged("progress", self._done("progress", received))
        self._progress_works = True
        return True

    # --- shared -----------------------------------------------------------------------------------------------------

    async def _settle(self, operation: str, job: Job, body: bytes, tries_before: int, deadline: float) -> Settled:
        received = await self._exchange.post(operation, f"/jobs/{_segment(job.id)}/{operation}", body, deadline)
        replay = received.replay or tries_before > 0
        if answers.read(operation, received.answer, replay=replay) is Reading.ALREADY:
            return Settled(already=True)
        return messages.read_settled(operation, self._done(operation, received, job_id=job.id, replay=replay))

    async def _renew_at(self, route: str, job: Job, deadline: float) -> Received:
        path = f"/jobs/{_segment(job.id)}/{route}"
        return await self._exchange.post("renew", path, messages.renew_body(self._worker_id, job), deadline)

    def _has_no_route(self, received: Received) -> bool:
        return answers.read("renew", received.answer, replay=False) is Reading.NO_ROUTE

    def _done(self, operation: str, received: Received, *, job_id: str = "", replay: bool = False) -> bytes:
        """The body of a success; raises what the table says of anything else."""
        reading = answers.read(operation, received.answer, replay=replay or received.replay)
        if reading not in (Reading.OK, Reading.ALREADY):
            raise answers.error_of(reading, received.answer, job_id=job_id)
        if received.body is None:
            raise ApiUnavailable(f"the answer to {operation} is content-encoded, which was not asked for")
        return received.body


def _segment(name: str) -> str:
    """`name` as one segment of a path; a name of dots must not climb (RFC 3986, 6.2.2.3)."""
    return quote(name, safe="") if name.strip(".") else name.replace(".", "%2E")
