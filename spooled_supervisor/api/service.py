"""What every way to the service offers: the calls of a worker, whatever carries them.

All raise ApiUnavailable (try again later), ApiRefused (it will be refused again) or CredentialsRefused (the API key is
not accepted); calls about a job also raise LeaseLost. All may be cancelled half-way: the service may have carried them
out, and the way stays usable. Instants are seconds on `timing.now`; `timeout_s` counts from the call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from spooled_supervisor.api.values import Claim, HeartbeatAnswer, Registration, Settled
from spooled_supervisor.job import Job


class Service(Protocol):
    """`rest.RestApi` says of each call what it means; `base_url` names the service in what is kept on disk."""

    base_url: str

    def acting_as(self, worker_id: str) -> Service:
        """The same way, reporting under another id: what an earlier life has claimed under that id."""

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
        """An upsert."""

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
        """An unknown worker is an answer, not an error."""

    async def deregister(self, *, timeout_s: float) -> None:
        """Fine also when the service has forgotten us."""

    async def claim(self, queue_name: str, *, limit: int, lease_duration_s: int, timeout_s: float) -> Claim:
        """Never replayed."""

    async def complete(self, job: Job, result: bytes, *, tries_before: int, deadline: float) -> Settled:
        """`tries_before`: how many tries may have been carried out already."""

    async def fail(self, job: Job, error: str, *, retryable: bool, tries_before: int, deadline: float) -> Settled:
        """The text is cut to what the service takes, and is never empty."""

    async def renew(self, job: Job, *, deadline: float) -> float:
        """When the request that succeeded was started; the new end is that plus the job's lease duration."""

    async def progress(self, job: Job, percent: float, message: str | None, *, timeout_s: float) -> bool:
        """False: the service has no such call; do not ask again."""
