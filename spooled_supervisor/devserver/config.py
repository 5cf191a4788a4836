"""What a dev-server can be told, and the rules for it.

Owns names, defaults and the check; knows nothing of flags, sockets or SQL. The defaults are the service's own timing,
where it has one, so that a client tuned against this server behaves the same against the service. Every duration can
be shortened for tests. A `ServerConfig` that exists is valid: a bad one raises ConfigError with all problems at once.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from spooled_supervisor.errors import ConfigError

DEFAULT_API_KEY = "sp_test_local_development_key"

MIN_API_KEY_CHARS = 10
"""POST /api/v1/auth/login refuses a shorter one."""

JWT_PREFIX = "eyJ"
"""Base64 of `{"`: a bearer that begins so is read as a token, never as a key (Authorization header of /api/v1)."""

MAX_LEASE_S = 3600
"""The longest lease of POST /api/v1/jobs/claim and of a renewal."""


@dataclass(frozen=True)
class ServerConfig:
    """Settings of one server. `db` None keeps the jobs in a private temporary file that is removed at the end.

    `strict` asks for what the newest service asks for, where older clients leave it out: `worker_id` and `lease_id` on
    complete, fail and renewal, `error` on fail, `queue_name` and `hostname` on registration.
    `honour_no_retry` lets a fail that says `no_retry: true` or `retry: false` end the job; the service ignores both.
    Without a `grpc_port` there is no gRPC; 0 is any free one. `eager_streams` pushes jobs before they are asked for.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    db: str | None = None
    api_key: str = DEFAULT_API_KEY
    strict: bool = False
    allow_remote: bool = False
    honour_no_retry: bool = False
    retry_base_s: float = 1.0
    lease_recovery_interval_s: float = 10.0
    scheduled_activation_s: float = 5.0
    cleanup_interval_s: float = 300.0
    worker_degraded_s: float = 20.0
    worker_offline_s: float = 50.0
    heartbeat_interval_s: int = 10
    min_lease_s: int = 5
    event_ping_s: float = 15.0
    event_health_s: float = 10.0
    grpc_port: int | None = None
    stream_poll_s: float = 1.0
    eager_streams: bool = False

    def __post_init__(self) -> None:
        problems = [*_address_problems(self), *_key_problems(self.api_key), *_duration_problems(self)]
        if problems:
            raise ConfigError(problems)


def _address_problems(config: ServerConfig) -> list[str]:
    problems = []
    if not config.allow_remote and not is_loopback(config.host):
        problems.append(f"--host {config.host}: not a loopback address; give --allow-remote to serve other machines")
    if not 0 <= config.port <= 65535:
        problems.append(f"--port {config.port}: must be 0 (any free port) to 65535")
    if config.grpc_port is not None and not 0 <= config.grpc_port <= 65535:
        problems.append(f"--grpc-port {config.grpc_port}: must be 0 (any free port) to 65535")
    return problems


def _key_problems(api_key: str) -> list[str]:
    problems = []
    if len(api_key) < MIN_API_KEY_CHARS:
        problems.append(f"--api-key: must have at least {MIN_API_KEY_CHARS} characters")
    if not (api_key.isascii() and api_key.isprintable()) or " " in api_key:
        problems.append("--api-key: must be printable ASCII without spaces")
    if api_key.startswith(JWT_PREFIX):
        problems.append(f"--api-key: must not start with {JWT_PREFIX}, which marks a token")
    return problems


def _duration_problems(config: ServerConfig) -> list[str]:
    durations = {name: value for name, value in vars(config).items() if name.endswith("_s")}
    problems = [
        f"{flag_of(name)} {value:g}: must be more than 0"
        for name, value in durations.items()
        if value <= 0 and name != "retry_base_s"
    ]
    if config.retry_base_s < 0:
        problems.append(f"--retry-base {config.retry_base_s:g}: must not be negative")
    if config.min_lease_s > MAX_LEASE_S:
        problems.append(f"--min-lease {config.min_lease_s}: must not exceed {MAX_LEASE_S}")
    return problems


def flag_of(field_name: str) -> str:
    """The flag that sets a field: `retry_base_s` is `--retry-base`."""
    return "--" + field_name.removesuffix("_s").replace("_", "-")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on `host`. A name other than localhost could be anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
