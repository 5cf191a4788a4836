"""Fixtures for pytest: an embedded server for the session, and supervisors at it.

    # conftest.py
    pytest_plugins = ["spooled_supervisor.testing.pytest_plugin"]

    # test_tasks.py
    def test_a_thumbnail_is_made_end_to_end(spooled_server, spooled_supervisor_daemon):
        spooled_supervisor_daemon("myproject.tasks", procs=2)
        job = spooled_server.client.jobs.create(queue_name="thumbnails", payload={"pages": 3})
        assert spooled_server.wait_for_job(job.id).result == {"pages": 3}

Tests share the server: use queues of their own, or look only at jobs that they have made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from spooled_supervisor.testing.programs import EmbeddedServer, RunningSupervisor, embedded_server, supervisor


@pytest.fixture(scope="session")
def spooled_server() -> Iterator[EmbeddedServer]:
    """A server for all tests of the session; failed jobs are retried after 50 ms and not after seconds."""
    with embedded_server(retry_base="50ms", lease_recovery_interval="200ms", scheduled_activation="100ms") as server:
        yield server


@pytest.fixture
def spooled_supervisor_daemon(spooled_server: EmbeddedServer) -> Iterator[Callable[..., RunningSupervisor]]:
    """Call it with an app and the supervisor's options: it is ready when that returns, and stopped with the test."""
    with contextlib.ExitStack() as stack:

        def start(app: str, **options: object) -> RunningSupervisor:
            return stack.enter_context(supervisor(app, spooled_server, **options))

        yield start
