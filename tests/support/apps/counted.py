"""Handlers with metrics of their own; the payload says what is counted and how the child ends."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from prometheus_client import Counter, Enum, Gauge, Histogram, Info, Summary

from spooled_supervisor import App, JobContext
from tests.support.apps.ledger import note

app = App()

PAGES = Counter("app_pages", "Pages that were rendered.", ["kind"])
SECONDS = Histogram("app_render_seconds", "How long a page takes.", buckets=(0.1, 1, 10))
BYTES = Summary("app_page_bytes", "Size of a page.")
CACHE = Gauge("app_cache_entries", "Entries in the cache of this child.")
STATE = Enum("app_engine", "What the engine does.", states=["cold", "warm"])
MODEL = Info("app_model", "The model that is loaded.")
IMPORTED = Counter("app_imports", "How often the app was imported.")
STARTED = Counter("app_children_started", "Start hooks that have run.")
IMPORTED.inc()
PAGES.labels("a4").inc(1000)  # in the fork server: nobody's


@app.on_child_start
def connect() -> None:
    STARTED.inc()
    MODEL.info({"version": "3"})
    note("environment", multiproc=[name for name in os.environ if "MULTIPROC" in name.upper()])


@app.handler("count")
def count(ctx: JobContext) -> dict[str, Any]:
    n = ctx.payload.get("n", 1)
    PAGES.labels("a4").inc(n)
    for _ in range(n):
        SECONDS.observe(0.5)
        BYTES.observe(100)
    CACHE.set(ctx.payload.get("cache", 7))
    STATE.state("warm")
    match ctx.payload.get("then"):
        case "progress":  # a long job, which shows its counts as it goes
            while not ctx.signal.wait(0.05):
                PAGES.labels("a3").inc()
                ctx.progress(50)
        case "die":
            time.sleep(ctx.payload.get("after", 0))
            os.kill(os.getpid(), signal.SIGKILL)
    return {"pid": os.getpid()}


@app.handler("junk")
def junk(ctx: JobContext) -> None:
    """Nonsense in the registry: it costs the page nothing but what is nonsense."""
    match ctx.payload:
        case "names":
            Gauge("spooled_supervisor_ready", "Not the app's to say.").set(666)
            Gauge("up", "Not the app's to say.").set(666)
        case "series":
            CACHE.set(float("nan"))
            for n in range(1500):
                PAGES.labels(f'kind \n"{n}\\').inc()
