"""Whether the app can be used: it is imported by a real fork server, which is let go again. For `check`."""

from __future__ import annotations

import asyncio
import functools
import os

from spooled_supervisor import timing
from spooled_supervisor.config import Config
from spooled_supervisor.errors import ConfigError
from spooled_supervisor.events import Events
from spooled_supervisor.forkclient import ForkServerKeeper, child_environment
from spooled_supervisor.frames import Preload


def app_problems(config: Config) -> list[str]:
    """What is wrong with the app of this configuration; empty if it can be served."""
    with asyncio.Runner(loop_factory=timing.new_event_loop) as runner:
        return runner.run(_import_app(config))


async def _import_app(config: Config) -> list[str]:
    keeper = ForkServerKeeper(
        functools.partial(preload, config),
        child_environment(os.environ, marker=str(config.state_dir), threads=1),
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
    return []


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
