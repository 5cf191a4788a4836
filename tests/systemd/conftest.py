"""One systemd and one server for the tests of a module; each test has the unit to itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.devserver import DevServer, Producer, dev_server
from tests.systemd.bed import Bed, boot, why_not
from tests.systemd.service import Journal, Service, service_in


@pytest.fixture(scope="module")
def bed(request: pytest.FixtureRequest) -> Iterator[Bed]:
    """A module's `FLAVOUR` says which cgroups there are."""
    if reason := why_not():
        pytest.skip(f"no systemd can be booted: {reason}")
    with boot(getattr(request.module, "FLAVOUR", "unified")) as running:
        yield running


@pytest.fixture(scope="module")
def journal(bed: Bed) -> Iterator[Journal]:
    following = Journal(bed)
    yield following
    following.close()


@pytest.fixture(scope="module")
def server(bed: Bed) -> Iterator[DevServer]:
    with dev_server(retry_base_s=0.05, lease_recovery_interval_s=0.2, scheduled_activation_s=0.1) as running:
        yield running


@pytest.fixture
def client(server: DevServer) -> Iterator[Producer]:
    with Producer(server.url, server.api_key) as producer:
        yield producer


@pytest.fixture
def service(bed: Bed, journal: Journal, server: DevServer, client: Producer) -> Iterator[Service]:
    with service_in(bed, journal, server, client) as unit:
        yield unit
