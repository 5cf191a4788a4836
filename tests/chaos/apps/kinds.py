"""The app of the chaos suite: jobs of a few kinds, each of whose executions is written down as it really happens.

A line has an instant on CLOCK_BOOTTIME, what happened (`start`, `tick`, `end`), the pid, the job and its attempt; it is
appended in one write, so that lines of many processes do not mix.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from typing import Any

from spooled_supervisor import App, JobContext

app = App()


def note(what: str, ctx: JobContext, **fields: Any) -> None:
    line = {
        "at": time.clock_gettime(time.CLOCK_BOOTTIME),
        "what": what,
        "pid": os.getpid(),
        "job": ctx.job_id,
        "attempt": ctx.retry_count,
        **fields,
    }
    fd = os.open(os.environ["LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, json.dumps(line).encode() + b"\n")
    finally:
        os.close(fd)


def spin(ctx: JobContext, seconds: float) -> None:
    """On the CPU, with a line every 20 ms."""
    end = time.monotonic() + seconds
    next_tick = 0.0
    while (at := time.monotonic()) < end:
        if at > next_tick:
            note("tick", ctx)
            next_tick = at + 0.02


@app.handler("chaos")
def run(ctx: JobContext) -> Any:
    note("start", ctx)
    match ctx.payload["kind"]:
        case "quick":
            pass
        case "spin":
            spin(ctx, 0.05)
        case "long":
            spin(ctx, ctx.payload.get("seconds", 6.0))  # longer than a lease lasts
        case "crash":
            note("end", ctx)
            os.kill(os.getpid(), signal.SIGSEGV)
        case "raise":
            note("end", ctx)
            raise ValueError("as asked")
        case "stuck":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            spin(ctx, 600.0)
        case "litter":
            subprocess.Popen(["sleep", "300"], start_new_session=True)
            os.environ["LEFT"] = "behind"
            os.chdir("/")
        case "probe":
            note("slot", ctx, slot_pid=os.getpid(), left=os.environ.get("LEFT"), cwd=os.getcwd())
            spin(ctx, 0.1)
    note("end", ctx)
    return {"kind": ctx.payload["kind"]}
