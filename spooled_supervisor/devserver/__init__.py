"""The embedded Spooled server: REST and event stream on loopback, kept in one SQLite file.

For users, demos and tests that want a server without a cloud. It speaks the service's protocol (`/api/v1`, both the
older and the newer spelling of the worker calls) and knows nothing of the supervisor it is usually used with. Starlette
and uvicorn come with the extra `dev-server` and are imported only when a server is built, never by importing this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spooled_supervisor.devserver.command import add_arguments, run
from spooled_supervisor.devserver.config import ServerConfig

if TYPE_CHECKING:
    from spooled_supervisor.devserver.app import create_app

__all__ = ["ServerConfig", "add_arguments", "create_app", "run"]


def __getattr__(name: str) -> Any:
    if name != "create_app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from spooled_supervisor.devserver.app import create_app

    return create_app
