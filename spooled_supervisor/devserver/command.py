"""The command `dev-server`: its flags, its environment variable, and the way from them to a running server.

Owns the flags and the one-line messages of a start that fails; does not know how serving works. Flags win over the
environment. Exit status: 0 after SIGTERM or SIGINT, 78 (sysexits.h, EX_CONFIG) when it cannot start as asked.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import fields

from spooled_supervisor.devserver.config import DEFAULT_API_KEY, ServerConfig, flag_of
from spooled_supervisor.errors import ConfigError

API_KEY_VARIABLE = "SPOOLED_DEV_API_KEY"
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")

_DURATIONS = {
    "lease_recovery_interval_s": "how often expired leases are taken back and silent workers looked for",
    "retry_base_s": "the wait after a job's first failure; it doubles up to 60 times this",
    "scheduled_activation_s": "how often due scheduled jobs turn pending",
    "cleanup_interval_s": "how often expired jobs are deleted",
    "worker_degraded_s": "a worker silent for so long is degraded",
    "worker_offline_s": "a worker silent for so long is offline and loses its jobs",
    "event_ping_s": "how often a quiet event stream gets a comment",
    "event_health_s": "how often an unfiltered event stream gets system.health",
    "stream_poll_s": "how often a gRPC job stream looks for what nobody announced, such as a job that is due",
}
_WHOLE_SECONDS = {
    "heartbeat_interval_s": "the heartbeat interval that workers are told",
    "min_lease_s": "the shortest lease a worker may ask for",
}
_EXTRAS = {"starlette": "dev-server", "uvicorn": "dev-server", "grpc": "grpc", "google": "grpc"}
"""Which extra brings a package that is missing."""

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `dev-server`; every destination is the name of a ServerConfig field, or `log_level`."""
    add, default = parser.add_argument, ServerConfig()
    add("--host", default=default.host, help="address to listen on (default %(default)s)")
    add("--port", type=int, default=default.port, help="port to listen on, 0 for any free one (default %(default)s)")
    add("--grpc-port", type=int, metavar="PORT", help="port to speak gRPC on, 0 for any free one (default: none)")
    add("--db", metavar="PATH", help="SQLite file to keep the jobs in (default: a temporary one, removed at the end)")
    add(
        "--api-key", metavar="KEY", help=f"the key clients must send (or {API_KEY_VARIABLE}; default {DEFAULT_API_KEY})"
    )
    dialect = parser.add_mutually_exclusive_group()
    dialect.add_argument(
        "--strict", action="store_true", help="demand worker_id and lease_id as the newest service does"
    )
    dialect.add_argument("--lenient", dest="strict", action="store_false", help="let them be left out (default)")
    add("--allow-remote", action="store_true", help="allow a --host that other machines can reach")
    add("--honour-no-retry", action="store_true", help="dead-letter a failure that says no_retry at once")
    add("--eager-streams", action="store_true", help="push jobs into gRPC streams ahead of their being read")
    for name, meaning in _DURATIONS.items():
        add(flag_of(name), dest=name, type=duration_s, default=getattr(default, name), metavar="DURATION", help=meaning)
    for name, meaning in _WHOLE_SECONDS.items():
        add(flag_of(name), dest=name, type=int, default=getattr(default, name), metavar="SECONDS", help=meaning)
    add("--log-level", choices=LOG_LEVELS, default="warning", help="what goes to stderr (default %(default)s)")


def duration_s(text: str) -> float:
    """Seconds in `30`, `0.5`, `250ms`, `30s`, `5m` or `1h`."""
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = text[len(number) :] or "s"
    try:
        return float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 30, 30s or 5m") from None


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status of the process."""
    try:
        return _serve(_config_of(args), args.log_level)
    except ConfigError as refusal:
        sys.stderr.write("".join(f"spooled dev-server: {problem}\n" for problem in refusal.problems))
        return refusal.exit_code


def _config_of(args: argparse.Namespace) -> ServerConfig:
    settings = {field.name: getattr(args, field.name) for field in fields(ServerConfig)}
    settings["api_key"] = args.api_key or os.environ.get(API_KEY_VARIABLE) or DEFAULT_API_KEY
    return ServerConfig(**settings)


def _serve(config: ServerConfig, log_level: str) -> int:
    try:
        from spooled_supervisor.devserver.serving import serve

        serve(config, log_level)
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        raise ConfigError(f"{package} is not installed; install spooled-supervisor[{_EXTRAS[package]}]") from missing
    return 0
