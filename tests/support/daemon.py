"""The daemon under test: started as a user starts it, watched through its log, its endpoints and /proc.

    with daemon("modes", url=server.url, api_key=server.api_key) as worker:
        worker.wait_for_event("supervisor_started")
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0

Leaving the context stops it and then asks three questions of every test: did it end as it should, is any process of it
left, was there a traceback in its log. What is tested is the caller's business.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
APPS = Path(__file__).resolve().with_name("apps")
MARKER = "SPOOLED_SUPERVISOR_STATE"
PATIENCE_S = float(os.environ.get("TESTS_PATIENCE_S", "20"))
"""How long to wait for what must happen; long, as a loaded machine is slow. What must happen *soon* is measured."""
POLL_S = 0.01
GONE_LIMIT_S = 5.0

_DYING_WITH_PARENT = "import ctypes,os,sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
"""PR_SET_PDEATHSIG, SIGKILL: a test run that is killed leaves no daemon behind; kept over execve (prctl(2))."""

_HANDLERS_OWN = ("job_logged", "fork_server_printed", "child_failed_to_boot", "fork_server_failed", "job_failed")
"""Events that may carry a traceback of the app's."""


# --- waiting and looking -------------------------------------------------------------------------------------------


def wait_until(is_true: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Look until `is_true()` says something true, and return that; for facts that nobody tells of by an event."""
    deadline = time.monotonic() + timeout_s
    while not (value := is_true()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(POLL_S)
    return value


def is_alive(pid: int) -> bool:
    """Whether this process exists and is no zombie."""
    return state_of(pid) not in ("", "Z", "X")


def state_of(pid: int) -> str:
    """The letter of proc_pid_stat(5), or nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])


def title_of(pid: int) -> str:
    """What ps(1) shows; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def environ_of(pid: int) -> dict[str, str]:
    """The environment that a process began with; empty if there is none or it may not be read."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def processes_of(state_dir: Path) -> list[int]:
    """Living processes with the marker of this state directory: fork server, children and what these started."""
    entry = f"{MARKER}={state_dir}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if entry in Path(f"/proc/{name}/environ").read_bytes().split(b"\0") and is_alive(int(name)):
                    found.append(int(name))
    return found


# --- what handlers really did --------------------------------------------------------------------------------------


class Ledger:
    """The file to which the handlers of `apps/` append one line per fact of an execution, with its instant."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0  # bytes that are in `_entries`
        self._entries: list[dict[str, Any]] = []

    def entries(self, what: str | None = None, **fields: Any) -> list[dict[str, Any]]:
        """The lines so far with these values, in order. A line that is being written is not seen yet."""
        self._read_on()
        wanted = fields if what is None else fields | {"what": what}
        return [entry for entry in self._entries if all(entry.get(key) == value for key, value in wanted.items())]

    def _read_on(self) -> None:
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._read)
            whole, end, _ = file.read().rpartition(b"\n")
            self._read += len(whole + end)
            self._entries += [json.loads(line) for line in whole.splitlines()]

    def wait_for(
        self, what: str, count: int = 1, *, timeout_s: float = PATIENCE_S, **fields: Any
    ) -> list[dict[str, Any]]:
        """The lines, once there are that many."""
        reached = lambda: len(self.entries(what, **fields)) >= count  # noqa: E731 # said twice, used once
        wait_until(reached, f"{count} ledger lines {what} {fields}", timeout_s)
        return self.entries(what, **fields)

    def runs(self, job_id: str) -> int:
        """How often a handler was really entered for this job."""
        return len(self.entries("start", job=job_id))

    def assert_no_overlap(self) -> None:
        """No job was run twice at the same time; a run without an end goes on until its last line."""
        by_run: dict[tuple[str, int], list[float]] = {}
        for entry in self.entries():
            if "job" in entry:
                by_run.setdefault((entry["job"], entry["run"]), []).append(entry["at"])
        spans = sorted((job, min(times), max(times)) for (job, _), times in by_run.items())
        for (job, _, end), (other, start, _) in itertools.pairwise(spans):
            assert job != other or end <= start, f"job {job} ran twice at once: until {end}, and from {start} on"


# --- the daemon ----------------------------------------------------------------------------------------------------


@dataclass
class Daemon:
    """A running daemon. `events` and `wait_for_event` see its log from the first line on."""

    process: subprocess.Popen[bytes]
    state_dir: Path
    ledger: Ledger
    exit_may_be: int | None = 0  # what a stop by the context's end must give; None: anything
    traceback_is_fine: bool = False

    def __post_init__(self) -> None:
        self.started_at = time.monotonic()
        self.lines: list[str] = []
        self._events: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._is_over = False
        self._reader = threading.Thread(target=self._read, name="daemon log")
        self._reader.start()

    # --- its log -----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            line = raw.decode(errors="replace").rstrip("\n")
            event: dict[str, Any] = {}
            with contextlib.suppress(ValueError):  # a plain line: a complaint before the log is there
                event = json.loads(line)
            with self._changed:
                self.lines.append(line)
                if isinstance(event, dict) and "event" in event:
                    self._events.append(event | {"seen_at": time.monotonic()})
                self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    @property
    def log(self) -> str:
        with self._changed:
            return "\n".join(self.lines)

    def mark(self) -> int:
        """A place in the log: `after=mark` looks at what came later only."""
        with self._changed:
            return len(self._events)

    def events(self, name: str | None = None, *, after: int = 0, **fields: Any) -> list[dict[str, Any]]:
        """The events so far, in order. A field's value may be a predicate."""
        with self._changed:
            found = self._events[after:]
        return [event for event in found if name in (None, event["event"]) and _fits(event, fields)]

    def wait_for_event(
        self, name: str, *, timeout_s: float = PATIENCE_S, count: int = 1, after: int = 0, **fields: Any
    ) -> dict[str, Any]:
        """The `count`th such event; fails when the daemon ends without it."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                over = self._is_over
                length = len(self._events)
            found = self.events(name, after=after, **fields)
            if len(found) >= count:
                return found[count - 1]
            wanted = f"event {name} {fields or ''} ({len(found)} of {count})"
            assert not over, f"the daemon ended without {wanted}:\n{self.tail()}"
            left = deadline - time.monotonic()
            assert left > 0, f"not within {timeout_s:g} s: {wanted}\n{self.tail()}"
            with self._changed:
                self._changed.wait_for(lambda: len(self._events) > length or self._is_over, left)  # noqa: B023

    def tail(self, lines: int = 60) -> str:
        """For messages."""
        with self._changed:
            return "\n".join(self.lines[-lines:])

    # --- its life ----------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit code, negative for a signal; the log is complete then."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the daemon did not end within {timeout_s:g} s:\n{self.tail()}") from None
        self._reader.join(timeout_s)
        assert not self._reader.is_alive(), "somebody holds the daemon's standard error open"
        return code

    def stop(self, timeout_s: float = PATIENCE_S) -> int:
        """SIGTERM, and its exit code."""
        if self.is_running:
            self.signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL, as the kernel's out-of-memory killer would."""
        self.exit_may_be = None
        self.process.kill()
        self.process.wait()

    # --- what it says of itself --------------------------------------------------------------------------------------

    def wait_until_running(self) -> Daemon:
        """All its children are ready."""
        started = self.wait_for_event("supervisor_started")
        self.wait_for_event("child_ready", count=started["procs"])
        return self

    @property
    def http_port(self) -> int:
        return int(self.wait_for_event("endpoints_listening")["port"])

    def get(self, path: str) -> tuple[int, str]:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=10.0)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def health(self) -> tuple[int, dict[str, Any]]:
        """Status and document of /health."""
        status, text = self.get("/health")
        return status, json.loads(text)

    def readyz(self) -> tuple[int, dict[str, Any]]:
        """Status and document of /readyz."""
        status, text = self.get("/readyz")
        return status, json.loads(text)

    def status(self) -> dict[str, Any]:
        """/status.json"""
        return dict(json.loads(self.get("/status.json")[1]))

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics, by name with labels as they stand there."""
        lines = [line for line in self.get("/metrics")[1].splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def children(self) -> list[int]:
        """Pids of the children, by slot."""
        return [child["pid"] for child in sorted(self.status()["children"], key=lambda c: (c["slot"], c["pid"]))]

    def wait_for_children(self, state: str, count: int) -> list[int]:
        """Pids of those in this state, once there are so many and no others."""

        def look() -> list[int]:
            children = self.status()["children"]
            return [c["pid"] for c in children if c["state"] == state] if len(children) == count else []

        return list(wait_until(lambda: len(pids := look()) == count and pids, f"{count} children {state}"))

    @property
    def fork_server(self) -> int:
        """Pid of the newest fork server."""
        return int(self.events("fork_server_started")[-1]["pid"])

    def cpu_s(self) -> float:
        """CPU time of the supervisor itself so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def fd_count(self) -> int:
        """Open descriptors of the supervisor."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    # --- its end -----------------------------------------------------------------------------------------------------

    def leftovers(self) -> list[int]:
        """Processes with its marker that live now."""
        return processes_of(self.state_dir)

    def assert_nothing_left(self, timeout_s: float = GONE_LIMIT_S) -> None:
        """No process of it lives any more, or not for long."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.leftovers(), "", timeout_s)
        left = {pid: title_of(pid) for pid in self.leftovers()}
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left, f"left running by the daemon: {left}\n{self.tail()}"

    def assert_no_traceback(self) -> None:
        """Nothing of ours has raised, or warned in a destructor, where a warning cannot be an error ("Exception
        ignored in"). What the app printed or raised is the app's."""
        with self._changed:
            suspect = [line for line in self.lines if "Traceback" in line or "Exception ignored" in line]
        bad = [line for line in suspect if not _is_of_handlers(line)]
        assert not bad, "a traceback stands in the log:\n" + "\n".join(bad) + f"\n{self.tail()}"

    def clean_up(self) -> None:
        """After a failed test: nothing of it may disturb the next one."""
        if self.is_running:
            self.process.kill()
        self.process.wait()
        for pid in self.leftovers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._reader.join(GONE_LIMIT_S)
        if self.process.stdout is not None and not self._reader.is_alive():
            self.process.stdout.close()


def _fits(event: dict[str, Any], fields: dict[str, Any]) -> bool:
    for name, wanted in fields.items():
        value = event.get(name)
        if not (wanted(value) if callable(wanted) else value == wanted):
            return False
    return True


def _is_of_handlers(line: str) -> bool:
    with contextlib.suppress(ValueError):
        return json.loads(line).get("event") in _HANDLERS_OWN
    return False


def command_line(app: str, *, url: str, procs: int, state_dir: Path, options: Sequence[str] = ()) -> list[str]:
    """`python -m spooled_supervisor run ...`; of an option that is given twice the last one counts."""
    line = [sys.executable, "-m", "spooled_supervisor", "run", "--app", app, "--api-url", url, "--procs", str(procs)]
    line += ["--state-dir", str(state_dir), "--http-listen", "127.0.0.1:0", "--log-level", "debug"]
    return [*line, "--log-format", "json", "--poll-interval", "0.1", *options]


def environment(
    api_key: str | None, ledger: Path | None = None, env: Mapping[str, str] | None = None
) -> dict[str, str]:
    """What the daemon gets to see of ours: nothing that is named after it, or after systemd."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("SPOOLED_", "XDG_", "NOTIFY_"))}
    ours["PYTHONPATH"] = str(REPOSITORY)
    if api_key is not None:
        ours["SPOOLED_API_KEY"] = api_key
    if ledger is not None:
        ours["LEDGER"] = str(ledger)
    return {**ours, **(env or {})}


@contextlib.contextmanager
def daemon(
    app: str,
    *,
    url: str,
    api_key: str | None,
    procs: int = 2,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    cwd: Path = APPS,
    state_dir: Path | None = None,
    wrap: Sequence[str] = (),
    popen: Mapping[str, Any] | None = None,
) -> Iterator[Daemon]:
    """Run it. `wrap` goes before the command line (`unshare ...`), `popen` to subprocess.Popen.

    When the block ends it is stopped by SIGTERM, if it still runs, and must exit with 0.
    """
    with tempfile.TemporaryDirectory(prefix="spooled-e2e-") as made:
        state = state_dir or Path(made, "state")
        ledger = Ledger(Path(made, "ledger"))
        line = command_line(app, url=url, procs=procs, state_dir=state, options=options)
        process = subprocess.Popen(
            [sys.executable, "-ISc", _DYING_WITH_PARENT, *(["/usr/bin/env", *wrap] if wrap else []), *line],
            **{
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.STDOUT,
                "cwd": cwd,
                "env": environment(api_key, ledger.path, env),
                "start_new_session": True,
                **(popen or {}),
            },
        )
        worker = Daemon(process, state, ledger)
        try:
            yield worker
            was_running = worker.is_running
            code = worker.stop()
            if was_running and worker.exit_may_be is not None:
                assert code == worker.exit_may_be, f"exit code {code}, not {worker.exit_may_be}:\n{worker.tail()}"
            worker.assert_nothing_left()
            if not worker.traceback_is_fine:
                worker.assert_no_traceback()
            ledger.assert_no_overlap()
        finally:
            worker.clean_up()


@dataclass(frozen=True)
class Finished:
    """What a command did that ended by itself."""

    code: int
    output: str
    seconds: float


def run_to_end(
    app: str,
    *,
    url: str = "http://127.0.0.1:9",
    api_key: str | None = "sp_test_0123456789",
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    cwd: Path = APPS,
    state_dir: Path | None = None,
    timeout_s: float = PATIENCE_S,
) -> Finished:
    """Run a daemon that is expected to end by itself, and see that nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="spooled-e2e-") as made:
        state = state_dir or Path(made, "state")
        line = command_line(app, url=url, procs=1, state_dir=state, options=options)
        return run_line(line, env=environment(api_key, None, env), cwd=cwd, timeout_s=timeout_s, state_dir=state)


def run_line(
    line: Sequence[str], *, env: Mapping[str, str], cwd: Path = APPS, timeout_s: float = PATIENCE_S, state_dir: Path
) -> Finished:
    """Run this command to its end; what carries the marker of `state_dir` then is left over."""
    started_at = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-ISc", _DYING_WITH_PARENT, *line],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=cwd,
        env=dict(env),
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"it did not end within {timeout_s:g} s:\n{output.decode(errors='replace')}") from None
    seconds = time.monotonic() - started_at
    wait_until(lambda: not processes_of(state_dir), f"no process of {state_dir}", GONE_LIMIT_S)
    return Finished(process.returncode, output.decode(errors="replace"), seconds)
