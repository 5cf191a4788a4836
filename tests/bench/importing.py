"""What it costs to import what handler authors import. Every test run and every script of theirs pays it.

CPU time of a fresh interpreter that imports it, less that of one that imports nothing; the least of several, as
everything that comes on top is the machine's.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.bench.figures import Figure, at_most
from tests.bench.meters import die_with_parent
from tests.bench.scenario import Effort, Scenario
from tests.bench.stage import NotMeasured
from tests.support.devserver import REPOSITORY

CODE = "from spooled_supervisor import App, JobContext"


def run(effort: Effort) -> dict[str, float]:
    bare, importing = (min(_cpu_s(code) for _ in range(effort.imports)) for code in ("pass", CODE))
    return {"cpu_ms": 1000 * (importing - bare)}


def _cpu_s(code: str) -> float:
    process = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, preexec_fn=die_with_parent)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise NotMeasured(f"{code!r} exited with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


SCENARIOS = (
    Scenario(
        "import",
        (Figure("cpu_ms", "CPU to import App and JobContext", "ms", at_most(30)),),
        run,
    ),
)
