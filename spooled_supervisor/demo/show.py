"""The command `demo`: an embedded server, a supervisor, some hundred jobs, a picture.

Owns the order of things: start the server, make the jobs, start the supervisor, follow it until all tiles are here,
stop both, write the picture, say how it went. There is one thread, and it never waits long, so that a signal is soon
seen: the first one stops everything in peace, the second one at once. Whatever happens, both programs are ended before
`run_demo` returns, and nothing is left but the picture.
"""

from __future__ import annotations

import errno
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from spooled_supervisor.demo.display import make_display
from spooled_supervisor.demo.follow import LOOK_S, Follower, TileQueue, server_said
from spooled_supervisor.demo.picture import Picture, output_problem, png, write_png
from spooled_supervisor.demo.plan import Plan, check_installed, parse, seconds_per_pixel
from spooled_supervisor.demo.programs import (
    READY,
    SUPERVISOR_STOP_LIMIT_S,
    DemoFailed,
    Program,
    running_server,
    running_supervisor,
)
from spooled_supervisor.demo.progress import Progress
from spooled_supervisor.errors import EX_OK

SERVER_START_LIMIT_S = 30.0
BUSY_SHARE = 0.15
"""From here on the summary says that tiles had to wait for a CPU, as the speed-up then says less about us."""


def run_demo(argv: list[str], env: Mapping[str, str]) -> int:
    """Run the demo; its exit status. Raises ConfigError for bad options, DemoFailed if there is no picture."""
    options = parse(argv)
    check_installed()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path need not be fit for the terminal
    stop = StopSignals()
    try:
        with stop:
            plan = Plan.of(options, seconds_per_pixel())
            try:
                progress, picture = _render(plan, env, stop)
            except Stopped:
                print("stopped: supervisor and server have ended, no picture was written", flush=True)
                return 128 + stop.numbers[0]
            size = _write(plan.output, picture)
            print("\n".join(["", *summary(plan, progress, size)]), flush=True)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        # Whoever read what we say has gone, a pipe or a terminal; nobody is left to be told.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still to be flushed
        return 128 + (stop.numbers[0] if stop.numbers else signal.SIGPIPE)
    return EX_OK


def _render(plan: Plan, env: Mapping[str, str], stop: StopSignals) -> tuple[Progress, Picture]:
    """Draw it. Raises DemoFailed or Stopped; then, too, both programs have been ended."""
    began = time.monotonic()
    picture = Picture(plan.width, plan.height)
    progress = Progress(plan.tiles, plan.procs, plan.endless_limit_s)

    def elapsed_s() -> float:
        return time.monotonic() - began

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spooled-demo-")))
        display = stack.enter_context(closing(make_display(sys.stdout, env, picture, plan.tiles, plan.title)))
        api_key = f"sp_test_{secrets.token_hex(16)}"
        log = folder / "server.log"
        server = stack.enter_context(running_server(folder, env, api_key, log, is_hurried=stop.is_urgent))
        url = _address(server, log, stop.check, lambda: display.update(progress, elapsed_s()))
        queue = stack.enter_context(TileQueue(url, api_key, log))
        progress.by_job.update(queue.create(plan))
        supervisor = stack.enter_context(running_supervisor(folder, env, api_key, url, plan.procs))
        follower = Follower(supervisor, queue, progress, picture, display, elapsed_s=elapsed_s, check_stop=stop.check)
        try:
            follower.follow()
        finally:
            try:
                display.close()
            finally:  # even if the terminal is gone
                status = supervisor.stop(SUPERVISOR_STOP_LIMIT_S, is_hurried=stop.is_urgent)
        if status != 0:
            raise DemoFailed(f"all tiles have come, but the supervisor then ended with status {status}")
    return progress, picture


def _address(server: Program, log: Path, check_stop: Callable[[], None], wait: Callable[[], None]) -> str:
    """Where the server listens: it says so in the line that tells that it is ready."""
    deadline = time.monotonic() + SERVER_START_LIMIT_S
    while server.ended() is None and time.monotonic() < deadline:
        check_stop()
        for line in server.lines(LOOK_S):
            if found := READY.search(line):
                return found[1].decode()
        wait()
    status = server.ended()
    how = "is not ready" if status is None else f"ended with status {status}"
    raise DemoFailed(f"the embedded server {how}{server_said(log)}")


def _write(path: Path, picture: Picture) -> int:
    """Write the picture; its size in bytes. Raises DemoFailed."""
    data = png(picture)
    try:
        problem = output_problem(path)  # looked at before, but that was a while ago
        if problem is None:
            write_png(path, data)
    except OSError as error:
        problem = error.strerror or str(error)
    if problem is not None:
        raise DemoFailed(f"the picture is drawn, but {path} cannot be written: {problem}")
    return len(data)


def summary(plan: Plan, progress: Progress, png_bytes: int) -> list[str]:
    """What there is to say at the end."""
    wall_s = max(progress.rendering_s, 1e-9)
    rate, factor = progress.total / wall_s, progress.cpu_s / wall_s
    rows = [
        ("picture", f"{plan.output} ({plan.width} x {plan.height}, {png_bytes / 1024:,.0f} KiB)"),
        ("jobs", f"{progress.total} tiles in {wall_s:.1f} s by {plan.children}, {rate:.1f} jobs per second"),
        ("speed-up", f"{factor:.2f} times one process: the tiles report {progress.cpu_s:.1f} s of CPU time"),
    ]
    if progress.waited_share > BUSY_SHARE:
        waited = f"{progress.waited_share:.0%} of their time"
        rows.append(("", f"(they waited {waited} for a CPU: other programs, or more children than CPUs)"))
    for name, runs in (("killed", progress.killed), ("crashed", progress.crashed), ("failed", progress.failed)):
        if runs:
            rows.append((name, f"{len(runs)}: {'; '.join(runs)}"))
    if progress.retried:
        tiles = " and ".join(f"tile {tile.number}" for tile in progress.retried)
        rows.append(("retried", f"{len(progress.retried)}: {tiles}, and then drawn"))
    return [f"{name:<9} {text}" for name, text in rows]


class Stopped(Exception):
    """A signal asked us to end."""


class StopSignals:
    """Remembers the signals that ask to stop, and does nothing else: what must be done is done in order."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._earlier: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup(1)
            self._earlier[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, earlier in self._earlier.items():
            signal.signal(number, earlier)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.numbers.append(number)

    def check(self) -> None:
        """Raises Stopped once there was a signal."""
        if self.numbers:
            raise Stopped

    def is_urgent(self) -> bool:
        """Whether we were asked twice."""
        return len(self.numbers) > 1
