"""The two programs that the demo starts: the embedded server and a supervisor. Started, listened to and ended here.

Each leads a session of its own, so that Ctrl-C reaches the demo alone, which then ends them in order; and each is told
by the kernel when the demo is gone (prctl(2), PR_SET_PDEATHSIG), so that not even SIGKILL leaves one behind. Neither
sees our settings of the real service. Whoever starts a program must be the main thread of a process without others:
PDEATHSIG counts the thread, and code runs between fork and exec.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

from spooled_supervisor import kernel
from spooled_supervisor.errors import SupervisorError

READY = re.compile(rb"ready on (http://\S+) ")
PIPE_BYTES = 1 << 20
"""Room for the supervisor's log while we are busy: it does not wait for who reads it, but leaves lines out."""
SERVER_STOP_LIMIT_S = 4.0
SUPERVISOR_STOP_LIMIT_S = 10.0
LOOK_S = 0.05

_FOREIGN = re.compile(
    r"SPOOLED_.*|.*_PROXY|STATE_DIRECTORY|RUNTIME_DIRECTORY|CREDENTIALS_DIRECTORY|NOTIFY_SOCKET|WATCHDOG_.*|LISTEN_.*"
    r"|JOURNAL_STREAM",
    re.IGNORECASE,
)
"""Variables that would make our two programs somebody else's: settings of a real worker, a service's, a proxy."""


class DemoFailed(SupervisorError):
    """There is no picture; the message says why."""


class Program:
    """A running program and the pipe that it talks through."""

    def __init__(
        self, arguments: list[str], env: Mapping[str, str], *, stdout: int | IO[bytes], stderr: int | IO[bytes]
    ) -> None:
        parent = os.getpid()

        def die_with_parent() -> None:
            kernel.set_parent_death_signal(signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        self._process = subprocess.Popen(
            [sys.executable, "-m", "spooled_supervisor", *arguments],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        pipe = self._process.stdout or self._process.stderr
        assert pipe is not None
        self._pipe = pipe
        with contextlib.suppress(OSError):  # more than this user may have; then the pipe is smaller
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._rest = b""
        self._is_open = True

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._process.poll()

    def lines(self, timeout_s: float) -> list[bytes]:
        """What it has said since last time, whole lines only; waits up to `timeout_s` for the first byte."""
        if not self._is_open:
            time.sleep(timeout_s)
            return []
        readable, _, _ = select.select([self._pipe], [], [], timeout_s)
        if not readable:
            return []
        data = os.read(self._pipe.fileno(), PIPE_BYTES)
        self._is_open = bool(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines

    def stop(self, limit_s: float, *, is_hurried: Callable[[], bool]) -> int:
        """Ask it to end and wait; kill it after `limit_s`, or as soon as somebody is in a hurry. Its exit status."""
        deadline = time.monotonic() + limit_s
        with contextlib.suppress(ProcessLookupError):  # gone already
            self._process.terminate()
        while self._process.poll() is None:
            if is_hurried() or time.monotonic() > deadline:
                self._process.kill()
            self.lines(LOOK_S)  # a pipe that nobody empties must not be what it waits for
        return self._process.wait()

    def close(self) -> None:
        """Kill it if it still runs, whatever else went wrong."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._pipe.close()


def environment(env: Mapping[str, str], **more: str) -> dict[str, str]:
    """Ours without what is meant for a real worker, and `more`."""
    return {key: value for key, value in env.items() if not _FOREIGN.fullmatch(key)} | more


@contextlib.contextmanager
def running_server(
    folder: Path, env: Mapping[str, str], api_key: str, log: Path, *, is_hurried: Callable[[], bool]
) -> Iterator[Program]:
    """The embedded server on a free port, with a database in `folder`. It need not be ready yet."""
    arguments = ["dev-server", "--port", "0", "--db", str(folder / "jobs.db")]
    with log.open("wb") as errors:
        server = Program(
            arguments, environment(env, SPOOLED_DEV_API_KEY=api_key), stdout=subprocess.PIPE, stderr=errors
        )
    try:
        yield server
        server.stop(SERVER_STOP_LIMIT_S, is_hurried=is_hurried)
    finally:
        server.close()


@contextlib.contextmanager
def running_supervisor(folder: Path, env: Mapping[str, str], api_key: str, url: str, procs: int) -> Iterator[Program]:
    """A supervisor of the sample app, which logs every event to its pipe. The caller stops it."""
    arguments = [
        *("run", "--app", "spooled_supervisor.demo.mandelbrot"),
        *("--api-url", url),
        *("--procs", str(procs)),
        *("--prefetch", "1"),  # the next tile is here before a child is idle
        *("--poll-interval", "0.25"),
        *("--child-nice", "0"),  # somebody is waiting for the picture
        *("--abort-grace", "0.5"),  # between telling the endless tile to stop and killing it
        *("--shutdown-timeout", "1"),
        *("--state-dir", str(folder / "state")),
        *("--http-listen", "off"),
        *("--log-format", "json", "--log-level", "debug"),
    ]
    supervisor = Program(
        arguments,
        environment(env, SPOOLED_API_KEY=api_key),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        yield supervisor
    finally:
        supervisor.close()
