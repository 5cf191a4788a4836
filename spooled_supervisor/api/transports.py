"""Which call goes which way: REST alone, REST with gRPC for what only that can say, or gRPC with REST for the rest.

    transport rest, no gRPC address    all by REST
    transport rest, a gRPC address     a failure that is not to be retried goes by gRPC, where `retry=false` counts
    transport grpc-...                 all by gRPC, but for progress, and for results that gRPC cannot carry

A lease is good on both. grpcio is imported only here, when one of the latter two is made.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from spooled_supervisor.api.rest import RestApi
from spooled_supervisor.api.service import Service
from spooled_supervisor.api.values import Claim, HeartbeatAnswer, NotCarried, Registration, Settled
from spooled_supervisor.config import ApiConfig
from spooled_supervisor.errors import ApiRefused, LeaseLost
from spooled_supervisor.events import Events
from spooled_supervisor.job import Job
from spooled_supervisor.timing import now

if TYPE_CHECKING:
    from spooled_supervisor.api.grpc import GrpcApi

FINAL_TRIES = 3
"""So often a final failure is tried by gRPC; after that REST has it, whose word a service may not obey."""
FINAL_TIMEOUT_S = 3.0


class BothApi:
    """REST and gRPC to one service; `main` has the calls that both have. Closes both."""

    def __init__(self, rest: RestApi, grpc: GrpcApi, *, by_grpc: bool) -> None:
        self.base_url = rest.base_url
        self.grpc = grpc
        self._rest = rest
        self._by_grpc = by_grpc

    @property
    def main(self) -> Service:
        return self.grpc if self._by_grpc else self._rest

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_exit(self._rest)
            stack.push_async_exit(self.grpc)

    def acting_as(self, worker_id: str) -> BothApi:
        """See `Service`."""
        twin = copy.copy(self)
        twin._rest, twin.grpc = self._rest.acting_as(worker_id), self.grpc.acting_as(worker_id)
        return twin

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
        """By the main way."""
        return await self.main.register(
            queue_names=queue_names,
            hostname=hostname,
            worker_type=worker_type,
            version=version,
            max_concurrency=max_concurrency,
            metadata=metadata,
            timeout_s=timeout_s,
        )

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
        """By the main way."""
        return await self.main.heartbeat(
            status=status,
            current_jobs=current_jobs,
            cpu_percent=cpu_percent,
            memory_percent=memory_percent,
            metadata=metadata,
            timeout_s=timeout_s,
        )

    async def deregister(self, *, timeout_s: float) -> None:
        """By the main way."""
        await self.main.deregister(timeout_s=timeout_s)

    async def claim(self, queue_name: str, *, limit: int, lease_duration_s: int, timeout_s: float) -> Claim:
        """By the main way."""
        return await self.main.claim(queue_name, limit=limit, lease_duration_s=lease_duration_s, timeout_s=timeout_s)

    async def renew(self, job: Job, *, deadline: float) -> float:
        """By the main way."""
        return await self.main.renew(job, deadline=deadline)

    async def complete(self, job: Job, result: bytes, *, tries_before: int, deadline: float) -> Settled:
        """By the main way, unless only REST can carry the result."""
        if self._by_grpc:
            with contextlib.suppress(NotCarried):
                return await self.grpc.complete(job, result, tries_before=tries_before, deadline=deadline)
        return await self._rest.complete(job, result, tries_before=tries_before, deadline=deadline)

    async def fail(self, job: Job, error: str, *, retryable: bool, tries_before: int, deadline: float) -> Settled:
        """A final failure by gRPC, and by REST when gRPC is out of reach or does not know the lease."""
        if self._by_grpc:
            return await self.grpc.fail(job, error, retryable=retryable, tries_before=tries_before, deadline=deadline)
        if not retryable and tries_before < FINAL_TRIES:
            soon = min(deadline, now() + FINAL_TIMEOUT_S)
            with contextlib.suppress(ApiRefused, LeaseLost):  # of another service perhaps: REST has the last word
                return await self.grpc.fail(job, error, retryable=False, tries_before=tries_before, deadline=soon)
        return await self._rest.fail(job, error, retryable=retryable, tries_before=tries_before, deadline=deadline)

    async def progress(self, job: Job, percent: float, message: str | None, *, timeout_s: float) -> bool:
        """Only REST has it."""
        return await self._rest.progress(job, percent, message, timeout_s=timeout_s)


def make_api(config: ApiConfig, api_key: Callable[[], str], worker_id: str, events: Events) -> RestApi | BothApi:
    """What the configuration asks for, an async context manager; from inside the loop. Raises ConfigError."""
    rest = RestApi(base_url=config.url, api_key=api_key, worker_id=worker_id, events=events, ca_file=config.ca_file)
    if not config.uses_grpc:
        return rest
    # It writes lines of its own to standard error, for what its statuses say too; read when it is loaded.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    logging.getLogger("grpc").setLevel(logging.WARNING)  # it tells of every call at level debug
    from spooled_supervisor.api.grpc import GrpcApi
    from spooled_supervisor.api.grpc_process import GrpcProcessApi

    kind = GrpcProcessApi if config.transport == "grpc-process" else GrpcApi
    grpc = kind(
        address=config.grpc_address, api_key=api_key, worker_id=worker_id, events=events, ca_file=config.ca_file
    )
    return BothApi(rest, grpc, by_grpc=config.transport != "rest")
