"""The running server: the listening socket, uvicorn, the ready line, and a stop that is quick.

Owns the socket and the signals while it serves; does not know what the application answers. The socket is bound before
uvicorn sees it, so that a port in use is a message of ours and the ready line comes only when connections are accepted.
Sources: signal(7), socket(7) SO_REUSEADDR, uvicorn's `Server` (its signal handlers re-raise what they caught).
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvicorn

from spooled_supervisor.devserver.app import create_app
from spooled_supervisor.devserver.config import ServerConfig
from spooled_supervisor.devserver.services import Services
from spooled_supervisor.errors import ConfigError

if TYPE_CHECKING:
    from spooled_supervisor.devserver.grpc_serving import GrpcServer

STOP_LIMIT_S = 1
"""How long a stop waits for answers that are being written. Event streams are ended first and take none of it."""

KEEP_ALIVE_S = 75
"""Idle connections stay open longer than clients' pools keep them, so that none is closed under a request."""

BACKLOG = 2048

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Server(uvicorn.Server):
    """uvicorn, plus: says when it is ready, and ends the event streams first when it stops."""

    def __init__(self, config: uvicorn.Config, services: Services, ready_line: str) -> None:
        super().__init__(config)
        self._services = services
        self._ready_line = ready_line
        self._grpc = make_grpc_server(services)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        line = self._ready_line
        if self._grpc is not None:
            line += f", grpc on {await self._grpc.start()}"
        await super().startup(sockets)
        if self.started:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._services.hub.close()
        if self._grpc is not None:
            await self._grpc.stop()
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # its client does not read what is left


def serve(config: ServerConfig, log_level: str) -> None:
    """Serve until a stop signal. Raises ConfigError when the address or the database cannot be used."""
    logging.basicConfig(stream=sys.stderr, level=log_level.upper(), format="spooled dev-server: %(message)s")
    with contextlib.closing(bind(config.host, config.port)) as listener:
        app = create_app(config)
        services: Services = app.state.services
        try:
            settings = uvicorn.Config(
                app,
                log_config=None,
                log_level=log_level,
                access_log=log_level == "debug",
                lifespan="on",
                ws="none",
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=STOP_LIMIT_S,
            )
            server = Server(settings, services, ready_line(config, listener))
            with stopping_quietly(server):
                server.run(sockets=[listener])
        finally:
            services.close()


def make_grpc_server(services: Services) -> GrpcServer | None:
    """None unless one is wanted: only then its libraries are needed."""
    config = services.config
    if config.grpc_port is None:
        return None
    from spooled_supervisor.devserver.grpc_serving import GrpcServer

    return GrpcServer(services, config.host, config.grpc_port)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that uvicorn will listen on. Raises ConfigError with the address in the message."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Listening here, not later in uvicorn: with SO_REUSEADDR two sockets may be bound to a port, only one listens.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


def ready_line(config: ServerConfig, listener: socket.socket) -> str:
    """The one line on stdout; programs that start the server wait for it and take the address from it."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    port = listener.getsockname()[1]
    return f"spooled dev-server ready on http://{host}:{port} (api key: {config.api_key})"


@contextlib.contextmanager
def stopping_quietly(server: uvicorn.Server) -> Iterator[None]:
    """Make a stop signal a clean end: before uvicorn listens to signals, and when it raises them again afterwards."""

    def stop(_number: int, _frame: object) -> None:
        server.should_exit = True

    earlier = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
