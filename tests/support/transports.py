"""The ways in which a daemon may talk to the service, and which tests run over which of them.

What a daemon promises holds on each (README, gRPC). So tests of recovery and chaos are marked `EVERY_TRANSPORT`, and
run once over each; single ones may name theirs. Their daemons get the options from the fixture `transport`, most by way
of `site` or `stub`. All other tests run over REST, as time is short. With E2E_TRANSPORT=grpc-stream all run over that
one, and only over that one.
"""

from __future__ import annotations

import os

import pytest

REST, STREAM, PROCESS = TRANSPORTS = ("rest", "grpc-stream", "grpc-process")
EVERY_TRANSPORT = pytest.mark.transports(*TRANSPORTS)
REST_ONLY = pytest.mark.transports(REST)
ASKED_FOR_JOBS = pytest.mark.transports(REST, PROCESS)
"""Tests of claims as requests, which a stream has none of."""
CHOSEN = os.environ.get("E2E_TRANSPORT")


def parametrize(metafunc: pytest.Metafunc) -> None:
    """For `pytest_generate_tests`."""
    marker = metafunc.definition.get_closest_marker("transports")
    if marker is not None and "transport" in metafunc.fixturenames:
        names = [name for name in marker.args if CHOSEN in (None, name)] or marker.args[:1]
        metafunc.parametrize("transport", names, indirect=True, scope="module")


def options_of(transport: str, grpc_address: str) -> list[str]:
    """For REST nothing: then nothing of gRPC is loaded."""
    return [] if transport == REST else ["--transport", transport, "--grpc-address", grpc_address]
