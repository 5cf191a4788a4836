"""An app that starts a thread while it is imported."""

from __future__ import annotations

import threading
import time
from typing import Any

from spooled_supervisor import App, JobContext

app = App()
threading.Thread(target=time.sleep, args=(600,), name="the app's poller", daemon=True).start()


@app.handler("q")
def handle(ctx: JobContext) -> Any:
    return "ok"
