"""The parts of one server, put together.

Owns the order in which they are built and closed; holds no state of its own. Routes take what they need from here.
"""

from __future__ import annotations

from collections.abc import Callable

from spooled_supervisor.devserver.auth import Tokens
from spooled_supervisor.devserver.bell import Bell
from spooled_supervisor.devserver.config import ServerConfig
from spooled_supervisor.devserver.database import Database
from spooled_supervisor.devserver.hub import EventHub
from spooled_supervisor.devserver.jobs import Jobs
from spooled_supervisor.devserver.leases import Leases
from spooled_supervisor.devserver.listing import Listing
from spooled_supervisor.devserver.queues import Queues
from spooled_supervisor.devserver.sweeps import Sweeps
from spooled_supervisor.devserver.workers import Workers


class Services:
    """`clock` is wall time in epoch seconds, the only one there is: tests give their own. Raises ConfigError."""

    def __init__(self, config: ServerConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self.clock = clock
        self.bell = Bell()
        self.db = Database(config.db, on_commit=self.bell.ring)
        self.queues = Queues(self.db)
        self.jobs = Jobs(self.db, self.queues)
        self.listing = Listing(self.db)
        self.leases = Leases(self.db, self.queues, config.retry_base_s)
        self.workers = Workers(self.db)
        self.tokens = Tokens(config.api_key, self.db, clock)
        self.hub = EventHub(config.event_ping_s, config.event_health_s)
        self.sweeps = Sweeps(self.db, self.leases, config, clock)

    def close(self) -> None:
        self.hub.close()
        self.db.close()
