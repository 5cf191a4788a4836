"""A real systemd for tests: it runs as PID 1 of namespaces of its own, on a throw-away view of this machine's files.

    with boot() as bed:
        bed.systemctl("start", "spooled-supervisor")

The unit of this repository is installed there as it is, with the interpreter and the packages of the test run where
the unit expects them. Whatever is written there is gone afterwards, and nothing of the machine outside is touched: the
bed has its own processes, mounts, cgroups and a network that is nothing but a loopback interface. Tests stay outside
and look in: commands run by nsenter(1), files are seen through /proc/PID/root, and the calling thread is moved into the
bed's network for the while, so that a server which a test starts is on the bed's loopback.

Needs root and a few programs that every Debian has; `why_not()` says what is missing. `bed.sh` is the other half.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.support.daemon import PATIENCE_S

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("bed.sh")
SYSTEMD = Path("/lib/systemd/systemd")
PROGRAMS = ("bash", "unshare", "nsenter", "pivot_root", "setpriv", "systemctl", "journalctl", "dbus-daemon")
LIBRARIES = "/opt/spooled-supervisor/python/lib"
BOOT_LIMIT_S = 30.0
COMMAND_LIMIT_S = 2.5 * PATIENCE_S
GONE_LIMIT_S = 10.0
POLL_S = 0.02
CLONE_NEWNET = 0x4000_0000

DYING_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")


@functools.cache
def why_not() -> str:
    """Why no systemd can be booted here; empty if it can."""
    if os.geteuid() != 0:
        return "booting a systemd needs root"
    if missing := missing_programs(PROGRAMS):
        return f"missing: {missing} (Debian: systemd dbus util-linux)"
    layers = "lowerdir=/,upperdir=/mnt/a,workdir=/mnt/b"
    trial = f"mount -t tmpfs bed /mnt && mkdir /mnt/a /mnt/b /mnt/c && mount -t overlay -o {layers} bed /mnt/c"
    flags = ["--fork", "--pid", "--mount", "--uts", "--ipc", "--net", "--cgroup", "--propagation", "private"]
    tried = subprocess.run(["unshare", *flags, "sh", "-c", trial], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else f"no namespaces or no overlay here: {tried.stderr.strip()}"


def missing_programs(names: Iterable[str]) -> str:
    """Those that are not here; empty if all are."""
    missing = [name for name in names if shutil.which(name, path=system_path()) is None]
    return ", ".join(missing + [str(SYSTEMD)] * (not SYSTEMD.exists()))


def system_path() -> str:
    return f"/usr/sbin:/usr/bin:/sbin:/bin:{os.environ.get('PATH', '')}"


class Bed:
    """A running systemd. `pid1` is its number where the tests run."""

    def __init__(self, pid1: int) -> None:
        self.pid1 = pid1
        self.root = Path(f"/proc/{pid1}/root")
        """Its root directory, as seen from outside; /proc below it has the numbers of inside."""

    def command(self, *words: str) -> list[str]:
        """The command line that runs these words inside."""
        inside = ["nsenter", "--target", str(self.pid1), "--all", "--", "/usr/bin/env", "-i"]
        env = ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8", "SYSTEMD_PAGER=", "SYSTEMD_COLORS=0"]
        if needs_library_path():
            env.append(f"LD_LIBRARY_PATH={LIBRARIES}")
        return [*inside, *env, *words]

    def run(self, *words: str, timeout_s: float = COMMAND_LIMIT_S) -> subprocess.CompletedProcess[str]:
        """Run a command inside, whatever its exit code."""
        line = self.command(*words)
        return subprocess.run(
            line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def ok(self, *words: str, timeout_s: float = COMMAND_LIMIT_S) -> str:
        """The output of a command that must succeed."""
        done = self.run(*words, timeout_s=timeout_s)
        assert done.returncode == 0, f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def systemctl(self, *words: str) -> str:
        return self.ok("systemctl", *words)

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """A file inside."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)


def needs_library_path() -> bool:
    """Whether the interpreter finds its own library only where it was installed."""
    return sys.base_prefix != "/usr" and bool(sysconfig.get_config_var("Py_ENABLE_SHARED"))


@contextlib.contextmanager
def boot(flavour: str = "unified") -> Iterator[Bed]:
    """Boot, and stand in the bed's network meanwhile. `flavour`: `hybrid` has the v1 controllers too, where we do."""
    with tempfile.TemporaryDirectory(prefix="spooled-bed-") as scratch, _own_cgroups(flavour) as cgroups:
        line = [*DYING_WITH_PARENT, "bash", str(SCRIPT), "start", scratch, flavour]
        line += [sys.base_prefix, sysconfig.get_path("purelib"), str(REPOSITORY), *map(str, cgroups)]
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": system_path()},
                start_new_session=True,
            )
            try:
                try:
                    bed = _wait_until_up(process)
                except AssertionError as error:
                    log.seek(0)
                    raise AssertionError(f"{error}\n{log.read().decode(errors='replace')}") from None
                with standing_in_network(Path(f"/proc/{bed.pid1}/ns/net")):
                    yield bed
            finally:
                _end(process)


def _wait_until_up(process: subprocess.Popen[bytes]) -> Bed:
    deadline = time.monotonic() + BOOT_LIMIT_S
    bed: Bed | None = None
    state = "not started"
    while state not in ("running", "degraded"):
        assert process.poll() is None, f"the bed ended with {process.returncode} before systemd was up"
        assert time.monotonic() < deadline, f"systemd is not up within {BOOT_LIMIT_S:g} s: {state}"
        time.sleep(POLL_S)
        if bed is None:
            pid1 = _systemd_below(process.pid)
            bed = Bed(pid1) if pid1 is not None else None
        else:
            asked = bed.run("systemctl", "is-system-running")
            state = asked.stdout.strip() or asked.stderr.strip()
    assert bed is not None
    assert state == "running", f"systemd is {state}:\n{bed.run('systemctl', '--failed').stdout}"
    return bed


def _systemd_below(pid: int) -> int | None:
    """unshare's child, once it has become systemd: before, it is a shell that builds the root."""
    with contextlib.suppress(OSError, IndexError):
        child = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        if Path(f"/proc/{child}/comm").read_text().strip() == "systemd":
            return child
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """unshare dies, its child with it, and with PID 1 of a namespace all that is in it."""
    pid1 = _systemd_below(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid if pid1 is None else pid1, signal.SIGKILL)
    try:
        process.wait(GONE_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# --- cgroups --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _own_cgroups(flavour: str) -> Iterator[list[Path]]:
    """A new cgroup below our own in each hierarchy: the roots of the bed's."""
    made = []
    try:
        for directory in _homes():
            for old in directory.glob("spooled-bed-*"):
                if not Path("/proc", old.name.split("-")[2]).exists():  # left by a test run that was killed
                    _prune(old)
            cgroup = directory / f"spooled-bed-{os.getpid()}-{flavour}"
            cgroup.mkdir()
            made.append(cgroup)
            for name in ("cpuset.cpus", "cpuset.mems"):  # v1 starts with none, and takes no process then
                if (cgroup / name).exists() and not (cgroup / "cgroup.events").exists():
                    (cgroup / name).write_text((directory / name).read_text())
        yield made
    finally:
        for cgroup in made:
            _remove(cgroup)


def _homes() -> Iterator[Path]:
    """Where we are, in each hierarchy that is mounted in the usual way."""
    base = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        name = controllers.removeprefix("name=")
        tops = [base / name] if controllers else [base / "unified", base]
        for top in tops:
            home = top / path.lstrip("/")
            if (home / "cgroup.procs").exists():
                yield home
                break


def _remove(cgroup: Path) -> None:
    """The bed's processes are dead; some may still be on their way out of the cgroup."""
    deadline = time.monotonic() + GONE_LIMIT_S
    while cgroup.exists():
        _prune(cgroup)
        if time.monotonic() > deadline:
            return  # an empty directory of the kernel's: not worth a failure
        time.sleep(POLL_S)


def _prune(cgroup: Path) -> None:
    for directory, _, _ in os.walk(cgroup, topdown=False):
        with contextlib.suppress(OSError):  # somebody is in it
            os.rmdir(directory)


# --- the network ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def standing_in_network(space: Path) -> Iterator[None]:
    """The calling thread, and what it starts, is in this network namespace (setns(2))."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    theirs = os.open(space, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _set_network(theirs)
        try:
            yield
        finally:
            _set_network(own)
    finally:
        os.close(own)
        os.close(theirs)


def _set_network(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, CLONE_NEWNET) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
