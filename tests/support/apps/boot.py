"""An app whose children's start is decided by files in $BOOT_DIR, so that it can break and heal while it runs.

`crash`, `exit`, `raise`, `hang`, `family`: what `on_child_start` does while a file of that name is there; `slow` holds
the seconds that it takes. `die` ends an idle child soon after its hello.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from spooled_supervisor import App, JobContext
from tests.support.apps.ledger import Run, note

BOOT_DIR = Path(os.environ["BOOT_DIR"])
app = App()


@app.on_child_start
def start() -> None:
    note("boot")
    names = set(os.listdir(BOOT_DIR))
    if "crash" in names:
        print("about to crash")
        os.kill(os.getpid(), signal.SIGKILL)
    if "exit" in names:
        os._exit(0)
    if "raise" in names:
        raise RuntimeError("the database is down")
    if "family" in names:
        note("process", process=subprocess.Popen(["sleep", "120"], start_new_session=True).pid)
    if "hang" in names:
        time.sleep(600)
    if "slow" in names:
        time.sleep(float((BOOT_DIR / "slow").read_text()))
    if "die" in names:
        threading.Timer(0.05, os._exit, (1,)).start()


@app.on_child_stop
def stop() -> None:
    note("child_stop")
    if (BOOT_DIR / "stop-hang").exists():
        time.sleep(600)


@app.handler(os.environ.get("QUEUE_PREFIX", "") + "q")
def handle(ctx: JobContext) -> Any:
    run = Run(ctx)
    run.end()
    return "ok"
