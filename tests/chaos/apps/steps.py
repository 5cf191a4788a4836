"""Jobs that wait for the test at every step of their life; what they do is written down."""

from __future__ import annotations

import json
import os
import subprocess
import time
from typing import Any

from spooled_supervisor import App, JobContext

app = App()


def note(what: str, **fields: Any) -> None:
    fd = os.open(os.environ["LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, json.dumps({"at": time.monotonic(), "what": what, **fields}).encode() + b"\n")
    finally:
        os.close(fd)


@app.handler("steps")
def run(ctx: JobContext) -> Any:
    note("start", job=ctx.job_id, run=os.getpid() * 1000 + ctx.retry_count, retry_count=ctx.retry_count)
    what = ctx.payload.get("what", "quick")
    if what == "family":
        family = [
            subprocess.Popen(["sleep", "300"]).pid,
            subprocess.Popen(["sleep", "300"], start_new_session=True).pid,
        ]
        note("family", job=ctx.job_id, run=0, pids=family)
    if what in ("wait", "family"):
        while True:
            time.sleep(0.01)
    if what == "signal":
        os.kill(os.getpid(), ctx.payload["signal"])
    if what == "big":
        return "x" * 200_000
    if what == "sleep":
        time.sleep(ctx.payload["seconds"])
    return {"n": ctx.payload.get("n"), "pid": os.getpid()}


@app.handler("other")
def other(ctx: JobContext) -> Any:
    return {"pid": os.getpid()}
