"""The ASGI application: all paths of the server, in one place.

Owns the list of routes and the lifetime of the periodic work; the answers are in the route modules. The paths that
workers call all the time come first, because the router tries them in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from spooled_supervisor.devserver.config import ServerConfig
from spooled_supervisor.devserver.errors import ApiError, answer_fault, answer_http_exception, answer_refusal
from spooled_supervisor.devserver.gate import API_PREFIX, Gate
from spooled_supervisor.devserver.routes_auth import AuthRoutes
from spooled_supervisor.devserver.routes_job import JobRoutes
from spooled_supervisor.devserver.routes_lease import LeaseRoutes
from spooled_supervisor.devserver.routes_queue import QueueRoutes
from spooled_supervisor.devserver.routes_system import SystemRoutes
from spooled_supervisor.devserver.routes_worker import WorkerRoutes
from spooled_supervisor.devserver.services import Services


def create_app(config: ServerConfig, *, clock: Callable[[], float] = time.time) -> Starlette:
    """The application with its database open, as `app.state.services`. Raises ConfigError if that cannot be.

    The database is closed when the application's lifespan ends; who never starts it closes `services` himself.
    """
    services = Services(config, clock)
    app = Starlette(
        routes=_routes(services),
        middleware=[Middleware(Gate, tokens=services.tokens)],
        exception_handlers={ApiError: answer_refusal, HTTPException: answer_http_exception, Exception: answer_fault},
        lifespan=_lifespan,
    )
    app.router.redirect_slashes = False  # a path with a slash too many is another path, and there is none
    app.state.services = services
    return app


def _routes(services: Services) -> list[Route]:
    system = SystemRoutes(services)
    parts = (LeaseRoutes, WorkerRoutes, JobRoutes, QueueRoutes, AuthRoutes)
    below_prefix = [route for part in parts for route in part(services).routes()]
    return [*_prefixed(below_prefix + system.event_routes()), *system.health_routes()]


def _prefixed(routes: list[Route]) -> list[Route]:
    """Whole paths instead of a Mount, which would match every path twice."""
    return [Route(API_PREFIX + route.path, route.endpoint, methods=list(route.methods or ())) for route in routes]


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    services: Services = app.state.services
    sweeping = asyncio.create_task(services.sweeps.run(), name="sweeps")
    try:
        yield
    finally:
        sweeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):  # ours, a line above
            await sweeping
        services.close()
