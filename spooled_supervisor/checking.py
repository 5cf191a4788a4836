"""Whether the app can be used, and whether the service takes the key; for `check`.

The app is imported by a real fork server, which is let go again. The key is tried with a heartbeat of a worker that
does not exist: that changes nothing, and "unknown worker" is the answer to a key that is good.
"""

from __future__ import annotations

import asyncio
import functools
import os
import secrets

from spooled_supervisor import family, timing
from spooled_supervisor.api.transports import make_api
from spooled_supervisor.config import Config
from spooled_supervisor.errors import EX_UNAVAILABLE, ApiRefused, ApiUnavailable, ConfigError, CredentialsRefused
from spooled_supervisor.events import Events
from spooled_supervisor.forkclient import ForkServerKeeper, child_environment
from spooled_supervisor.frames import Preload

ONLINE_LIMIT_S = 10.0


def app_problems(config: Config) -> list[str]:
    """What is wrong with the app of this configuration; empty if it can be served."""
    with asyncio.Runner(loop_factory=timing.new_event_loop) as runner:
        return runner.run(_import_app(config))


async def _import_app(config: Config) -> list[str]:
    marker = f"check {os.getpid()}"  # not the state directory: a supervisor may be at work there
    keeper = ForkServerKeeper(
        functools.partial(preload, config),
        child_environment(os.environ, marker=marker, threads=1),
        boot_timeout_s=config.pool.boot_timeout_s,
        events=Events(),
        on_ready=lambda: None,
    )
    try:
        await keeper.start()
    except ConfigError as error:
        return error.problems
    finally:
        await keeper.close()
        family.kill_marked(marker)  # what the app has started while it was imported
    return []


def online_problem(config: Config) -> ConfigError | None:
    """What is wrong between us and the service, if anything is, with the exit code for that alone."""
    with asyncio.Runner(loop_factory=timing.new_event_loop) as runner:
        return runner.run(_try_key(config))


async def _try_key(config: Config) -> ConfigError | None:
    stranger = f"check-{secrets.token_hex(8)}"
    address = config.api.url if config.api.transport == "rest" else config.api.grpc_address
    try:
        async with make_api(config.api, config.api.key.reveal, stranger, Events()) as api:
            await api.heartbeat(
                status="healthy",
                current_jobs=0,
                cpu_percent=0.0,
                memory_percent=0.0,
                metadata=None,
                timeout_s=ONLINE_LIMIT_S,
            )
    except CredentialsRefused as error:
        return ConfigError(f"{address}: {error}", exit_code=error.exit_code)
    except ApiUnavailable as error:
        return ConfigError(f"{address}: {error}", exit_code=EX_UNAVAILABLE)
    except ApiRefused as error:
        return ConfigError(f"{address}: {error}")
    return None


def preload(config: Config, generation: int) -> Preload:
    """What the fork server is told."""
    return Preload(
        generation,
        config.app,
        [queue.name for queue in config.queues],
        config.pool.strict_preload,
        config.pool.child_nice,
        config.pool.leftovers == "kill",
        config.pool.pin_cpus,
        config.log.level,
    )
