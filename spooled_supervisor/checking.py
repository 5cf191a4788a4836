"""Whether the app can be used: it is imported by a real fork server, which is let go again. For `check`."""

from __future__ import annotations

import asyncio
import os

from spooled_supervisor import timing
from spooled_supervisor.config import Config
from spooled_supervisor.errors import ConfigError
from spooled_supervisor.events import Events, ForkServerThreaded
from spooled_supervisor.forkclient import ForkServerKeeper, child_environment
from spooled_supervisor.frames import Preload


def app_problems(config: Config) -> list[str]:
    """What is wrong with the app of this configuration; empty if it can be served."""
    with asyncio.Runner(loop_factory=timing.new_event_loop) as runner:
        return runner.run(_import_app(config))


async def _import_app(config: Config) -> list[str]:
    problems: list[str] = []
    events = Events()

    def on_threads(event: ForkServerThreaded) -> None:
        if config.pool.strict_preload:
            problems.append(f"app {config.app!r} starts threads while it is imported: {', '.join(event.threads)}")

    events.subscribe(on_threads, ForkServerThreaded)
    keeper = ForkServerKeeper(
        lambda generation: preload(config, generation),
        child_environment(os.environ, marker=str(config.state_dir), threads=1),
        boot_timeout_s=config.pool.boot_timeout_s or 60.0,
        events=events,
        on_ready=lambda: None,
    )
    try:
        await keeper.start()
    except ConfigError as error:
        problems += error.problems
    finally:
        await keeper.close()
    return problems


def preload(config: Config, generation: int) -> Preload:
    """What the fork server is told."""
    return Preload(
        generation,
        config.app,
        [queue.name for queue in config.queues],
        config.pool.strict_preload,
        config.pool.child_nice or 0,
        config.log.level or "info",
    )
