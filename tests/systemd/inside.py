"""The plugin of pytest in the virtual machine: each report goes out by a serial port, as a line of JSON. See vm.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

PORT = Path("/dev/ttyS1")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Reporter(config))


class Reporter:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with PORT.open("w") as port:
            port.write(json.dumps(data) + "\n")
