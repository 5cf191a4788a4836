"""An app with much preloaded: small Python objects, the kind that reference counts make private when touched.

Its own, with nothing in it that writes records: a start hook would count as memory of an idle child.
"""

from __future__ import annotations

import gc
import os
import time

from spooled_supervisor import App, JobContext

app = App()

VARIABLE = "SPOOLED_BENCH_PRELOAD_MB"
CHUNK = 10_000

kept: list[list[tuple[int, str, float, dict[str, int]]]] = []


@app.on_preload
def load() -> None:
    """Make objects until this process has grown by as much as the environment variable says."""
    enough = _resident_bytes() + int(os.environ.get(VARIABLE, "200")) * 1_000_000
    while _resident_bytes() < enough:
        start = len(kept) * CHUNK
        kept.append([(n, f"object {n}", n / 7, {"n": n}) for n in range(start, start + CHUNK)])


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@app.handler("busy")
def busy(ctx: JobContext) -> None:
    """Keep the child busy for `payload` seconds of wall time."""
    end = time.monotonic() + ctx.payload
    while time.monotonic() < end:
        pass


@app.handler("collect")
def collect(ctx: JobContext) -> None:
    """A full garbage collection, then busy, so that the other children get their share."""
    gc.collect()
    busy(ctx)
