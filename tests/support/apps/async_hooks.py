"""Async hooks and handlers on one loop per child."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from spooled_supervisor import App, JobContext
from tests.support.apps.ledger import note

app = App()
loops: dict[str, int] = {}


@app.on_child_start
async def start() -> None:
    loops["start"] = id(asyncio.get_running_loop())


@app.handler(os.environ.get("QUEUE_PREFIX", "") + "q")
async def handle(ctx: JobContext) -> Any:
    return loops["start"] == id(asyncio.get_running_loop())


@app.on_child_stop
async def stop() -> None:
    note("child_stop", same_loop=loops["start"] == id(asyncio.get_running_loop()))
