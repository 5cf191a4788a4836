"""The app that the benchmark runs: one queue per kind of job. Small on purpose; `heavy_app.py` is the large one."""

from __future__ import annotations

import time

from spooled_supervisor import App, JobContext
from tests.bench.records import Writer

WORDY_S = 0.5
"""So that a hundred lines a job are the 200 lines a second that a child may log."""

app = App()
records = Writer()
app.on_child_start(records.open)


@app.handler("noop")
def noop(ctx: JobContext) -> None:
    """Nothing: all that it costs is the daemon's."""


@app.handler("empty")
def empty(ctx: JobContext) -> dict[str, int]:
    """As `noop`, with a result that gRPC can carry: an object."""
    return {}


@app.handler("sleep")
def sleep(ctx: JobContext) -> None:
    """Keep the child busy for `payload` seconds, and no processor."""
    time.sleep(ctx.payload)


@app.handler("chatty")
def chatty(ctx: JobContext) -> None:
    """Log without pause for `payload` seconds."""
    end = time.monotonic() + ctx.payload
    while time.monotonic() < end:
        ctx.log("info", "still here", seconds_left=end - time.monotonic())


@app.handler("wordy")
def wordy(ctx: JobContext) -> None:
    """Log `payload` lines, and be done after WORDY_S."""
    for number in range(ctx.payload):
        ctx.log("info", "a line like any other", number=number)
    time.sleep(WORDY_S)


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
