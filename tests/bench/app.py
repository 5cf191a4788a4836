"""The app that the benchmark runs: one queue per kind of job. Small on purpose; `heavy_app.py` is the large one."""

from __future__ import annotations

import gc
import time

from spooled_supervisor import App, JobContext
from tests.bench.records import Writer

app = App()
records = Writer()
app.on_child_start(records.open)


@app.handler("noop")
def noop(ctx: JobContext) -> None:
    """Nothing: all that it costs is the daemon's."""


@app.handler("busy")
def busy(ctx: JobContext) -> None:
    """Keep the child busy for `payload` seconds of wall time, without ever letting the processor go."""
    started_at = ended_at = time.monotonic()
    end = started_at + ctx.payload
    while ended_at < end:
        ended_at = time.monotonic()
    records.write(0.0, started_at, ended_at)


@app.handler("stamp")
def stamp(ctx: JobContext) -> None:
    """Write down when it started; `payload` is when it was offered (CLOCK_MONOTONIC)."""
    started_at = time.monotonic()
    records.write(ctx.payload, started_at, started_at)


@app.handler("stuck")
def stuck(ctx: JobContext) -> None:
    """Go on whatever it is told."""
    while True:
        pass


@app.handler("collect")
def collect(ctx: JobContext) -> None:
    """A full garbage collection, then busy for `payload` seconds, so that the other children get their share."""
    gc.collect()
    busy(ctx)
