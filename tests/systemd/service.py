"""The unit in the test bed, as an operator sees it: configuration files, systemctl, journal, state directory."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.daemon import PATIENCE_S, Ledger, wait_until
from tests.support.devserver import DevServer, Producer
from tests.systemd.bed import LIBRARIES, Bed, needs_library_path

UNIT = "spooled-supervisor.service"
PROGRAM = "/opt/spooled-supervisor/venv/bin/spooled-supervisor"
DROP_INS = f"/etc/systemd/system/{UNIT}.d"
DROP_IN = f"{DROP_INS}/50-test.conf"
CONFIG = "/etc/spooled/supervisor.toml"
KEY = "/etc/spooled/api-key"
STATE = "/var/lib/private/spooled-supervisor"
RUNTIME = "/run/spooled-supervisor"
GATES = "/run/bed"
Entry = dict[str, Any]


MAX_EXPOSURE = 15
"""1.5, as `systemd-analyze security` shows it."""


def check_file(bed: Bed) -> None:
    """systemd has nothing to say about the unit that is installed, with its drop-ins."""
    checked = bed.run("systemd-analyze", "verify", f"/etc/systemd/system/{UNIT}")
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def check_exposure(bed: Bed) -> None:
    """It is at most MAX_EXPOSURE."""
    line = ("security", "--offline=true", f"--threshold={MAX_EXPOSURE}", f"/etc/systemd/system/{UNIT}")
    rated = bed.run("systemd-analyze", *line)
    assert rated.returncode == 0, rated.stdout


class Journal:
    """What the journal has of the unit: the daemon's lines, and what systemd says of it.

    A mark is an instant of the clock that entries are stamped with, taken when all that was written before is there.
    """

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self._line = ("journalctl", "--lines=all", "--output=json", f"--unit={UNIT}")
        # nsenter forks, and what it has forked is to end with it
        following = bed.command("setpriv", "--pdeathsig=KILL", *self._line, "--follow")
        self._process = subprocess.Popen(following, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        self._changed = threading.Condition()
        self._entries: list[Entry] = []
        self._reader = threading.Thread(target=self._read, name="journal")
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            entry = _entry(raw)
            with self._changed:
                self._entries.append(entry)
                self._changed.notify_all()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def mark(self) -> int:
        """Now."""
        self._bed.ok("journalctl", "--sync")
        return time.monotonic_ns() // 1000

    def entries(self, after: int) -> list[Entry]:
        """All entries since a mark, those that the follower has not seen yet too."""
        self._bed.ok("journalctl", "--sync")
        found = [_entry(raw) for raw in self._bed.ok(*self._line).splitlines()]
        return [entry for entry in found if entry["at"] > after]

    def wait_for(self, after: int, what: str, fits: Callable[[Entry], bool], timeout_s: float = PATIENCE_S) -> Entry:
        """The first entry since this mark that fits."""
        deadline = time.monotonic() + timeout_s
        place = 0
        while True:
            with self._changed:
                found = self._entries[place:]
                place += len(found)
                if not found:
                    left = deadline - time.monotonic()
                    assert left > 0, f"not within {timeout_s:g} s in the journal: {what}\n{self.tail(after)}"
                    self._changed.wait(left)
            for entry in found:
                if entry["at"] > after and fits(entry):
                    return entry

    def tail(self, after: int = 0, count: int = 50) -> str:
        """For messages."""
        return "\n".join(entry["MESSAGE"] for entry in self.entries(after)[-count:])


def _entry(raw: bytes | str) -> Entry:
    """With the instant as `at`, and the daemon's event, if it is one, as `line`."""
    entry: Entry = json.loads(raw)
    message = entry["MESSAGE"]
    if isinstance(message, list):  # bytes that are no text (systemd.journal-fields(7))
        entry["MESSAGE"] = message = bytes(message).decode(errors="replace")
    entry["at"] = int(entry["__MONOTONIC_TIMESTAMP"])
    with contextlib.suppress(ValueError):
        line = json.loads(message)
        entry["line"] = line if isinstance(line, dict) else {}
    return entry


class Service:
    """The unit during one test. `configure` before `start`; what is given there is gone with the test."""

    def __init__(self, bed: Bed, journal: Journal, server: DevServer, client: Producer) -> None:
        self.bed = bed
        self.server = server
        self.client = client
        self.journal = journal
        self.ledger = Ledger(bed.root / STATE.lstrip("/") / "ledger")
        self.traceback_is_fine = False
        self._began = journal.mark()
        (bed.root / GATES.lstrip("/")).mkdir(exist_ok=True)
        self.configure()

    # --- what an administrator writes ------------------------------------------------------------------------------

    def configure(self, *directives: str, key: str | None = None, **settings: Any) -> None:
        """The unit is as it is shipped but for these directives; settings are keys of the TOML file."""
        environment = [f"LEDGER={STATE}/ledger", f"BED_GATES={GATES}"]
        environment += [f"LD_LIBRARY_PATH={LIBRARIES}"] if needs_library_path() else []
        unit = ["[Service]", f"Environment={' '.join(environment)}", *directives]
        self.bed.write(DROP_IN, "\n".join(unit) + "\n")
        wanted = {
            "app": "tests.systemd.app",
            "api_url": self.server.url,
            "procs": 2,
            "poll_interval": 0.1,
            "log_level": "debug",
            "queues": ["q"],
            **settings,
        }
        lines = [f"{name} = {json.dumps(value)}" for name, value in wanted.items()]  # JSON's values are TOML's too
        self.bed.write(CONFIG, "\n".join(lines) + "\n")
        self.bed.write(KEY, (self.server.api_key if key is None else key) + "\n", 0o600)
        self.bed.systemctl("daemon-reload")

    def open_gate(self, name: str, text: str = "") -> None:
        self.bed.write(f"{GATES}/{name}", text)

    def close_gate(self, name: str) -> None:
        (self.bed.root / GATES.lstrip("/") / name).unlink()

    # --- systemctl -------------------------------------------------------------------------------------------------

    def start(self) -> Service:
        """Returns when the daemon has said READY."""
        started = self.bed.run("systemctl", "start", UNIT)
        assert started.returncode == 0, f"{started.stderr}\n{self.journal.tail(self._began)}"
        return self

    def stop(self) -> None:
        """Returns when it is gone."""
        self.bed.systemctl("stop", UNIT)

    def kill_main(self, signal: str = "KILL") -> None:
        self.bed.systemctl("kill", "--kill-who=main", f"--signal={signal}", UNIT)

    def show(self, *names: str) -> dict[str, str]:
        lines = self.bed.systemctl("show", f"--property={','.join(names)}", UNIT).splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def shown(self, name: str) -> str:
        return self.show(name)[name]

    def wait_for(self, timeout_s: float = PATIENCE_S, **properties: str) -> dict[str, str]:
        """Until all these properties are so; systemd has no event for most of them."""

        def look() -> dict[str, str] | None:
            found = self.show(*properties)
            return found if found == properties else None

        try:
            return dict(wait_until(look, f"{properties}", timeout_s))
        except AssertionError as error:
            raise AssertionError(f"{error}, but {self.show(*properties)}\n{self.journal.tail(self._began)}") from None

    @property
    def main_pid(self) -> int:
        """The supervisor's number inside."""
        return int(self.shown("MainPID"))

    def ctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        """The program, as root would call it."""
        return self.bed.run(PROGRAM, *words)

    def proc(self, pid: int, name: str) -> Path:
        """A file of /proc for a number of inside."""
        return self.bed.root / "proc" / str(pid) / name

    def pids(self) -> list[int]:
        """Numbers, outside, of all processes of the unit."""
        pids: list[int] = []
        for mount in ("sys/fs/cgroup/unified", "sys/fs/cgroup"):
            group = self.bed.root / mount / "system.slice" / UNIT
            for procs in group.rglob("cgroup.procs"):
                pids += map(int, procs.read_text().split())
        return pids

    # --- the journal -----------------------------------------------------------------------------------------------

    def mark(self) -> int:
        """A place in the journal: `after=mark` looks at what came later only."""
        return self.journal.mark()

    def entries(self) -> list[Entry]:
        """All of this test."""
        return self.journal.entries(self._began)

    def events(self, name: str, after: int | None = None, **fields: Any) -> list[Entry]:
        """Journal entries of this event; the event itself is in `line`."""
        entries = self.journal.entries(self._began if after is None else after)
        return [entry for entry in entries if _is_event(entry, name, fields)]

    def wait_for_event(
        self, name: str, after: int | None = None, timeout_s: float = PATIENCE_S, **fields: Any
    ) -> Entry:
        start = self._began if after is None else after
        wanted = f"event {name} {fields or ''}"
        return self.journal.wait_for(start, wanted, lambda entry: _is_event(entry, name, fields), timeout_s)

    def wait_for_message(self, part: str, after: int | None = None, timeout_s: float = PATIENCE_S) -> Entry:
        start = self._began if after is None else after
        return self.journal.wait_for(start, repr(part), lambda entry: part in entry["MESSAGE"], timeout_s)

    # --- jobs --------------------------------------------------------------------------------------------------------

    def add(self, mode: str, *, fields: dict[str, Any] | None = None, **payload: Any) -> str:
        return self.client.create("q", {"mode": mode, **payload}, **{"max_retries": 0, **(fields or {})})

    def value(self, job_id: str) -> Any:
        """What the handler of this job returned; it must succeed."""
        job = self.end(job_id)
        assert job["status"] == "completed", job
        return job["result"]

    def end(self, job_id: str, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        return self.client.wait_for(job_id, "completed", "deadletter", timeout_s=timeout_s)

    def result(self, mode: str, **payload: Any) -> Any:
        return self.value(self.add(mode, **payload))

    def running(self, mode: str, **payload: Any) -> str:
        """A job whose handler has begun."""
        job_id = self.add(mode, **payload)
        self.ledger.wait_for("start", job=job_id)
        return job_id

    # --- its end -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Nothing of it lives, nothing of ours has raised, no job ran twice at once."""
        assert self.pids() == [], "processes of the unit are left"
        self.ledger.assert_no_overlap()
        if not self.traceback_is_fine:
            raised = [entry["MESSAGE"] for entry in self.entries() if "Traceback" in entry["MESSAGE"]]
            assert not raised, self.journal.tail(self._began, 200)

    def clean_up(self) -> None:
        """Whatever has happened, the next test finds a unit that was never started."""
        self.bed.run("systemctl", "kill", "--signal=KILL", UNIT)
        self.bed.run("systemctl", "stop", UNIT)
        self.bed.run("systemctl", "reset-failed", UNIT)
        self.bed.run("systemctl", "clean", "--what=state", UNIT)
        for file in (self.bed.root / GATES.lstrip("/")).iterdir():
            file.unlink()


def _is_event(entry: Entry, name: str, fields: dict[str, Any]) -> bool:
    line = entry.get("line", {})
    return line.get("event") == name and all(line.get(key) == value for key, value in fields.items())


@contextlib.contextmanager
def service_in(bed: Bed, journal: Journal, server: DevServer, client: Producer) -> Iterator[Service]:
    """For one test: stopped, checked and cleaned up afterwards."""
    service = Service(bed, journal, server, client)
    try:
        yield service
        service.stop()
        service.check()
    finally:
        service.clean_up()
