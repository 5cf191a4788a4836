"""One systemd and one server for the tests of a module; each test has the unit to itself.

A module's `FLAVOUR` says where that systemd runs: `unified` (the default) and `hybrid` are those of bed.py, `vm` is the
virtual machine of vm.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.devserver import DevServer, Producer, dev_server
from tests.systemd import vm
from tests.systemd.bed import Bed, boot, why_not
from tests.systemd.service import Journal, Service, service_in

MACHINE = pytest.StashKey[vm.Machine]()


# --- the fixtures ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bed(request: pytest.FixtureRequest) -> Iterator[Bed]:
    flavour = getattr(request.module, "FLAVOUR", "unified")
    if _is_inside(request.config):
        yield Bed(1)
        return
    reason = vm.why_not(_cache(request.config)) if flavour == "vm" else why_not()
    if reason:
        pytest.skip(f"no systemd can be booted: {reason}")
    with boot(flavour) as running:
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


# --- tests in the virtual machine -------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _is_for_machine(item):
            item.add_marker("alone")
            item.add_marker(pytest.mark.timeout(vm.PREPARE_LIMIT_S + vm.LIMIT_S))  # the first one waits for the machine


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A test of flavour `vm` is not run here: what became of it in the virtual machine is told."""
    if not _is_for_machine(item) or _is_inside(item.config) or vm.why_not(_cache(item.config)):
        return None
    machine = _machine(item)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    try:
        for data in machine.reports(item.nodeid):
            report = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
            item.ihook.pytest_runtest_logreport(report=report)
    except EOFError as error:
        item.ihook.pytest_runtest_logreport(report=_failure(item, f"the virtual machine has ended:\n{error}"))
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    if nextitem is None or not _is_for_machine(nextitem):
        machine.close()
    return True


def _is_for_machine(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and getattr(item.module, "FLAVOUR", "") == "vm"


def _is_inside(config: pytest.Config) -> bool:
    return config.pluginmanager.hasplugin(vm.PLUGIN)


def _cache(config: pytest.Config) -> Path:
    """Where pytest keeps things between runs (below .pytest_cache)."""
    assert config.cache is not None, "-p no:cacheprovider: there is no place to keep the kernel of the virtual machine"
    return config.cache.mkdir("vm")


def _machine(item: pytest.Item) -> vm.Machine:
    """The one that runs all the tests which were chosen for it; started for the first of them."""
    if MACHINE not in item.config.stash:
        chosen = [each.nodeid for each in item.session.items if _is_for_machine(each)]
        item.config.stash[MACHINE] = vm.Machine(_cache(item.config), chosen)
        item.config.add_cleanup(item.config.stash[MACHINE].close)  # if the run is given up half-way
    return item.config.stash[MACHINE]


def _failure(item: pytest.Item, text: str) -> pytest.TestReport:
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "setup")
