"""An embedded server and a supervisor, as processes of a test: started, waited for, and ended with it.

Each dies with the thread that has started it (prctl(2), PR_SET_PDEATHSIG), so that a killed test run leaves nothing
behind: start them in the main thread. They see none of the settings of a real worker that may be in our environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TypeVar

import httpx

from spooled_supervisor.client import JobInfo, SpooledClient
from spooled_supervisor.errors import SupervisorError
from spooled_supervisor.timing import now

T = TypeVar("T")

READY = re.compile(r"spooled dev-server ready on (http://\S+) \(api key: (\S+)\)")
START_LIMIT_S = 30.0
STOP_LIMIT_S = 45.0
"""Above the supervisor's own shutdown timeout."""
LOOK_S = 0.01
ENDED = ("completed", "deadletter", "failed", "cancelled")

_FOREIGN = re.compile(
    r"SPOOLED_.*|STATE_DIRECTORY|RUNTIME_DIRECTORY|CREDENTIALS_DIRECTORY|NOTIFY_SOCKET|WATCHDOG_.*|.*_PROXY"
)
_DYING_WITH_US = """
import runpy, signal, sys
from spooled_supervisor import kernel
kernel.set_parent_death_signal(signal.SIGKILL)
module = sys.argv.pop(1)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


class ProgramFailed(SupervisorError):
    """A program of the test did not start or did not end; the message has what it said."""


class _Program:
    """A process whose output goes to a file. As a context manager it is ended by SIGTERM."""

    def __init__(self, module: str, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 # closed when the process is dead
        ours = {name: value for name, value in os.environ.items() if not _FOREIGN.fullmatch(name.upper())}
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _DYING_WITH_US, module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**ours, "PYTHONPATH": path, **env},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self._log.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        """All that it has said so far."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode("utf-8", "replace")

    def stop(self) -> int:
        """SIGTERM, if it still runs; its exit code. Raises ProgramFailed if it does not end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise ProgramFailed(f"it did not end within {STOP_LIMIT_S:g} s:\n{self.output}") from None

    def wait_for(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """What it says, once it says it. Raises ProgramFailed if it ends before that, or takes too long."""
        return self.wait_until(lambda: pattern.search(self.output))

    def wait_until(self, look: Callable[[], T | None]) -> T:
        """What `look` finds, once it does. Raises ProgramFailed if it ends before that, or takes too long."""
        give_up_at = now() + START_LIMIT_S
        while True:
            is_over = self.process.poll() is not None
            if (found := look()) is not None:
                return found
            if is_over or now() > give_up_at:
                state = f"ended with {self.process.returncode}" if is_over else "is not ready"
                raise ProgramFailed(f"it {state} and said:\n{self.output}")
            time.sleep(LOOK_S)


class EmbeddedServer(_Program):
    """A server process: `url`, `api_key`, and a `client` to make jobs with and to look at them."""

    def __init__(self, **options: object) -> None:
        """Options are the flags of `spooled-supervisor dev-server`: `retry_base="50ms"`, `strict=True`."""
        super().__init__("spooled_supervisor.devserver", _flags({"port": 0, **options}), {})

    def wait_until_ready(self) -> None:
        found = self.wait_for(READY)
        self.url, self.api_key = found[1], found[2]
        self.client = SpooledClient(self.api_key, self.url, transport=httpx.HTTPTransport())  # it asks for no proxy

    def wait_for_job(self, job_id: str, *statuses: str, timeout_s: float = 30.0) -> JobInfo:
        """The job, once it has one of these statuses (any that is an end, if none is given). Raises TimeoutError."""
        wanted = statuses or ENDED
        give_up_at = now() + timeout_s
        while (job := self.client.jobs.get(job_id)).status not in wanted:
            if now() > give_up_at:
                raise TimeoutError(f"job {job_id} is {job.status}, not {' or '.join(wanted)}, after {timeout_s:g} s")
            time.sleep(LOOK_S)
        return job


class RunningSupervisor(_Program):
    """A supervisor process that is ready for jobs."""

    def __init__(self, app: str, server: EmbeddedServer, state_dir: Path, options: Mapping[str, object]) -> None:
        """Raises ValueError for an option that is not the caller's to choose."""
        fixed = {"api_url": server.url, "state_dir": state_dir, "http_listen": "off", "log_format": "json"}
        if taken := sorted(fixed.keys() & options.keys()):
            raise ValueError(f"not an option of a supervisor of a test, which sets it by itself: {', '.join(taken)}")
        said = {"procs": 1, "poll_interval": "100ms", "log_level": "debug", **options, **fixed, "app": app}
        # sd_notify(3) tells that it is ready, at any log level. Bound to nothing it gets an abstract name (unix(7)).
        self._notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self._notices.bind("")
            address = "@" + self._notices.getsockname()[1:].decode()
            env = {"SPOOLED_API_KEY": server.api_key, "NOTIFY_SOCKET": address}
            super().__init__("spooled_supervisor", ["run", *_flags(said)], env)
        except BaseException:
            self._notices.close()
            raise

    def wait_until_ready(self) -> None:
        with self._notices:
            self.wait_until(self._notice_of_being_ready)

    def _notice_of_being_ready(self) -> bytes | None:
        with contextlib.suppress(BlockingIOError):  # no more of them
            while notice := self._notices.recv(4096):
                if b"READY=1" in notice.split(b"\n"):
                    return notice
        return None

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Its log lines, each an object with `event`; those of one event, if it is named."""
        found = []
        for line in self.output.splitlines():
            with contextlib.suppress(ValueError):  # not a line of ours, or not whole yet
                entry = json.loads(line)
                if isinstance(entry, dict) and name in (None, entry.get("event")):
                    found.append(entry)
        return found


@contextlib.contextmanager
def embedded_server(**options: object) -> Iterator[EmbeddedServer]:
    """A running server on a free port, its jobs in a temporary file. Raises ProgramFailed."""
    with EmbeddedServer(**options) as server:
        server.wait_until_ready()
        with server.client:
            yield server


@contextlib.contextmanager
def supervisor(app: str, server: EmbeddedServer, **options: object) -> Iterator[RunningSupervisor]:
    """A supervisor of this app (`pkg.module` or `pkg.module:name`, importable from here) at this server.

    Options are its flags: `procs=2`, `queue=["emails"]`, `job_timeout=5`. Raises ProgramFailed with its log, ValueError
    for an option that is fixed here (state directory, log format, no listener).
    """
    with (
        tempfile.TemporaryDirectory(prefix="spooled-test-") as state,
        RunningSupervisor(app, server, Path(state), options) as running,
    ):
        running.wait_until_ready()
        yield running


def _flags(options: Mapping[str, object]) -> list[str]:
    """`{"lease_duration": 5, "queue": ["a", "b"], "strict": True}` as a command line; None and False are left out."""
    line = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if one is True:
                line.append(flag)
            elif one is not None and one is not False:
                line += [flag, str(one)]
    return line
