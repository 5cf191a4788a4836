"""A worker daemon for CPU-bound Spooled Cloud jobs: one supervisor, a pool of forked children.

Handler authors import `App`, `JobContext`, `JobAborted` and `NonRetryableError` from here, programs that run a worker
themselves `SpooledClient`, `SpooledWorker` and `run_workers`. Attributes are loaded when they are first asked for
(PEP 562), so that importing an app costs no HTTP client and no event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from spooled_supervisor.app import AbortSignal, App, JobContext
    from spooled_supervisor.client import SpooledClient
    from spooled_supervisor.errors import JobAborted, NonRetryableError
    from spooled_supervisor.worker import SpooledWorker, run_workers

_HOMES = {
    "App": "app",
    "AbortSignal": "app",
    "JobContext": "app",
    "JobAborted": "errors",
    "NonRetryableError": "errors",
    "SpooledClient": "client",
    "SpooledWorker": "worker",
    "run_workers": "worker",
}

__all__ = [
    "AbortSignal",
    "App",
    "JobAborted",
    "JobContext",
    "NonRetryableError",
    "SpooledClient",
    "SpooledWorker",
    "__version__",
    "run_workers",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
