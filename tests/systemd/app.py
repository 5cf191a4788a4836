"""The app that the unit serves in the test bed: the modes of the other tests, and some that have to do with systemd.

Files in $BED_GATES, which tests make and remove while it runs, decide how it is imported and how its children start:
`version` is a text that jobs give back, with `broken` the import fails, `hold` keeps children from getting ready, and
with `forge` these say to systemd what only the supervisor may.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spooled_supervisor import JobContext
from tests.support.apps.ledger import Run, note
from tests.support.apps.modes import app, mode, spin_for

GATES = Path(os.environ["BED_GATES"])
VERSION = (GATES / "version").read_text() if (GATES / "version").exists() else ""
NOTIFY_SOCKET = "/run/systemd/notify"
"""Where systemd listens; every process can find that out, whatever its environment says."""

__all__ = ["app"]

if (GATES / "broken").exists():
    raise RuntimeError("this version of the app is broken")


def say(*lines: str) -> str:
    """Send this to systemd; what came of it here."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            sender.sendto("\n".join(lines).encode(), NOTIFY_SOCKET)
        except OSError as error:
            return type(error).__name__
    return "sent"


@app.on_child_start
def start() -> None:
    if (GATES / "forge").exists():
        note("forged", came=say("READY=1", "STATUS=forged by a child", f"MAINPID={os.getpid()}", "WATCHDOG=1"))
    note("boot")
    while (GATES / "hold").exists():
        time.sleep(0.005)


@mode
def version(ctx: JobContext, run: Run) -> Any:
    """The version that was imported, at once or when the gate is open."""
    while (gate := ctx.payload.get("gate")) and not (GATES / gate).exists():
        run.tick()
        time.sleep(0.005)
    return VERSION


@mode
def pet_watchdog(ctx: JobContext, run: Run) -> Any:
    """On behalf of the supervisor, faster than it would have to."""
    while True:
        run.note("petted", came=say("WATCHDOG=1", "EXTEND_TIMEOUT_USEC=60000000"))
        time.sleep(0.1)


@mode
def note_term(ctx: JobContext, run: Run) -> Any:
    """Work on when told to stop, and write down every TERM that comes by."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda got, _: run.note("signal", number=got))
    run.note("listening")
    ctx.signal.wait(600)
    spin_for(run, ctx.payload["seconds"])
    return f"finished after {ctx.signal.reason}"


@mode
def sandbox(ctx: JobContext, run: Run) -> Any:
    """What a job is, and what it may do."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)

    def outcome(act: Callable[[], Any]) -> str:
        try:
            act()
        except OSError as error:
            return type(error).__name__
        return "done"

    def write(path: str) -> Callable[[], Any]:
        return lambda: Path(path).write_text("x")

    forbidden = {
        "write /usr": write("/usr/x"),
        "write /etc": write("/etc/x"),
        "write /run/systemd": write("/run/systemd/x"),
        "read the key": lambda: Path("/etc/spooled/api-key").read_text(),
        "read shadow": lambda: Path("/etc/shadow").read_text(),
        "list /root": lambda: list(Path("/root").iterdir()),
        "another address family": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close(),
        "a raw socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW).close(),
        "signal init": lambda: os.kill(1, 0),
    }
    allowed = {
        "write /tmp": write("/tmp/x"),
        "write the state directory": write(os.environ["STATE_DIRECTORY"] + "/by-a-job"),
    }
    with contextlib.suppress(OSError):
        os.unlink(os.environ["STATE_DIRECTORY"] + "/by-a-job")
    return {
        "uid": os.getuid(),
        "nice": os.nice(0),
        "oom_score_adj": int(Path("/proc/self/oom_score_adj").read_text()),
        "capabilities": int(status["CapEff"], 16),
        "no_new_privileges": status["NoNewPrivs"],
        "environment": sorted(os.environ),
        "forbidden": {name: outcome(act) for name, act in forbidden.items()},
        "allowed": {name: outcome(act) for name, act in allowed.items()},
    }
