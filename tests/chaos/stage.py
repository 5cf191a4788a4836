"""The real daemon, the real server and the proxy between them, and the hands that do the blows of a schedule.

The daemon is started again whenever it has ended, as a service manager does. What jobs really did is in the ledger,
what the service knows in its history; `verdict.py` compares the two.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.chaos.grpc_proxy import GrpcFaultProxy
from tests.chaos.proxy import FaultProxy
from tests.chaos.schedule import KINDS
from tests.support import daemon as support
from tests.support.daemon import Daemon, Ledger
from tests.support.devserver import DevServer, dev_server
from tests.support.transports import options_of

APPS = Path(__file__).with_name("apps")
QUEUE = "chaos"
PROCS = 3
GOOD_RETRIES = 15
DISK_BYTES = 4 << 20
CONFIG_EXIT = 78

OPTIONS = (
    *("--lease-duration", "5", "--abort-grace", "0.5", "--poll-interval", "0.05", "--shutdown-timeout", "2"),
    *("--log-level", "debug"),
)


@contextlib.contextmanager
def start_daemon(app: str, **settings: Any) -> Iterator[Daemon]:
    """As `launch`; at the end nothing of it is left, however it went."""
    worker = launch(app, **settings)
    try:
        yield worker
        worker.assert_no_traceback()
    finally:
        worker.clean_up()


def launch(
    app: str,
    *,
    url: str,
    api_key: str,
    state_dir: Path,
    ledger: Path,
    procs: int,
    options: Sequence[str] = (),
    patch: str = "",
) -> Daemon:
    """A daemon that is stopped by whoever launched it: its end is a part of the play. `patch` is run before it begins,
    and makes a limit short that would take too long."""
    line = support.command_line(app, url=url, procs=procs, state_dir=state_dir, options=options)
    if patch:
        line[1:3] = ["-c", f"{patch}\nfrom spooled_supervisor.cli import main; main()"]
    process = subprocess.Popen(
        [sys.executable, "-ISc", support._DYING_WITH_PARENT, *line],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=APPS,
        env=support.environment(api_key, ledger),
        start_new_session=True,
    )
    return Daemon(process, state_dir, Ledger(ledger), exit_may_be=None)


class Disk:
    """Where the state directory is, and which can be full: a small tmpfs, or a limit on the supervisor's files.

    The limit (RLIMIT_FSIZE, EFBIG) needs no right, but holds for one process only; so it is set again after a restart.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path = path
        self.is_full = False
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "chaos", str(path)]
        self.is_tmpfs = subprocess.run(mount, check=False, capture_output=True).returncode == 0

    def fill(self, pid: int) -> None:
        self.is_full = True
        if not self.is_tmpfs:
            with contextlib.suppress(OSError):  # it has just ended
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            return
        with contextlib.suppress(FileExistsError):
            fd = os.open(self.path / "ballast", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
            with contextlib.closing(os.fdopen(fd, "wb", buffering=0)) as ballast:
                for size in (65536, 4096, 1):
                    with contextlib.suppress(OSError):  # ENOSPC, in the end
                        while True:
                            ballast.write(b"x" * size)

    def free(self, pid: int) -> None:
        self.is_full = False
        if self.is_tmpfs:
            (self.path / "ballast").unlink(missing_ok=True)
        else:
            with contextlib.suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def close(self) -> None:
        if self.is_tmpfs:
            subprocess.run(["umount", "-l", str(self.path)], check=True)


class Stage:
    """One play: methods named in a schedule are blows."""

    def __init__(
        self, server: DevServer, proxy: FaultProxy, grpc_proxy: GrpcFaultProxy, transport: str, disk: Disk, ledger: Path
    ) -> None:
        self.server = server
        self.proxy = proxy
        self.options = (*OPTIONS, *options_of(transport, grpc_proxy.address))
        self.disk = disk
        self.ledger = ledger
        self.state_dir = disk.path / "state"
        self.kinds: dict[str, str] = {}  # of every job that was made
        self.daemons: list[Daemon] = []
        self.child_kills = 0
        self._draining: Daemon | None = None
        self._without_fork_server: Daemon | None = None
        self._stopped: set[int] = set()
        self._start()

    # --- the service manager ------------------------------------------------------------------------------------------

    @property
    def daemon(self) -> Daemon:
        return self.daemons[-1]

    def _start(self) -> None:
        self.daemons.append(
            launch(
                "kinds",
                url=self.proxy.url,
                api_key=self.server.api_key,
                state_dir=self.state_dir,
                ledger=self.ledger,
                procs=PROCS,
                options=self.options,
            )
        )

    def is_working(self) -> bool:
        """Whether it has a child that is ready; started again if it has ended."""
        self.keep_running()
        return bool(self.daemon.events("supervisor_started"))

    def keep_running(self) -> None:
        """Start it again if it has ended; it must have ended for a reason of ours."""
        code = self.daemon.process.poll()
        if code is None:
            return
        allowed = [-signal.SIGKILL]
        if self.daemon is self._draining:
            allowed += [0, 1]
        if self.disk.is_full and not (self.state_dir / "worker-id").exists():
            allowed += [CONFIG_EXIT]  # it has never started
        if self.daemon is self._without_fork_server and not self.daemon.events("fork_server_ready"):
            allowed += [1]  # its import was killed
        assert code in allowed, f"the daemon ended by itself, with {code}:\n{self.daemon.tail()}"
        self._start()

    # --- blows --------------------------------------------------------------------------------------------------------

    def make_jobs(self, seed: int, count: int) -> None:
        rng = random.Random(seed)
        for kind in rng.choices(list(KINDS), list(KINDS.values()), k=count):
            self.make_job(kind)

    def make_job(self, kind: str) -> str:
        retries = {"crash": 3, "raise": 1, "stuck": 1}.get(kind, GOOD_RETRIES)
        timeout_s = 1 if kind == "stuck" else 30
        job_id = self.server.client.create(QUEUE, {"kind": kind}, max_retries=retries, timeout_seconds=timeout_s)
        self.kinds[job_id] = kind
        return job_id

    def break_api(self, fault: str, operations: tuple[str, ...] | None) -> None:
        self.proxy.set(fault, operations)

    def mend_api(self) -> None:
        self.proxy.clear()

    def kill_child(self, number: int) -> None:
        self._strike("spooled-supervisor: child", signal.SIGKILL, number)
        self.child_kills += 1

    def stop_child(self, number: int) -> None:
        self._strike("spooled-supervisor: child", signal.SIGSTOP, number)

    def kill_fork_server(self) -> None:
        self._without_fork_server = self.daemon
        self._strike("spooled-supervisor: fork server", signal.SIGKILL, 0)

    def kill_supervisor(self) -> None:
        self.daemon.process.kill()
        self.daemon.process.wait()

    def stop_supervisor(self) -> None:
        self._stopped.add(self.daemon.pid)
        self.daemon.signal(signal.SIGSTOP)

    def drain(self) -> None:
        self._draining = self.daemon
        self.daemon.signal(signal.SIGTERM)

    def continue_all(self) -> None:
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stopped.clear()

    def fill_disk(self) -> None:
        self.disk.fill(self.daemon.pid)

    def free_disk(self) -> None:
        self.disk.free(self.daemon.pid)

    def _strike(self, title: str, number: signal.Signals, choice: int) -> None:
        pids = sorted(pid for pid in support.processes_of(self.state_dir) if support.title_of(pid).startswith(title))
        if not pids:
            return
        pid = pids[choice % len(pids)]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            if number is signal.SIGSTOP:
                self._stopped.add(pid)

    # --- the end ------------------------------------------------------------------------------------------------------

    def calm_down(self) -> None:
        """Nothing is broken any more."""
        self.mend_api()
        self.continue_all()
        self.free_disk()

    def wait_until_all_is_over(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            self.keep_running()
            stats = self.server.client.stats(QUEUE)
            open_ones = {name: stats[name] for name in ("pending", "scheduled", "processing") if stats[name]}
            if not open_ones:
                return
            assert time.monotonic() < deadline, f"jobs without an end: {open_ones}\n{self.daemon.tail()}"
            time.sleep(0.1)

    def close(self) -> None:
        self.continue_all()
        for daemon in self.daemons:
            daemon.clean_up()


@contextlib.contextmanager
def stage(folder: Path, transport: str) -> Iterator[Stage]:
    """Everything that a play needs, and the end of it all."""
    server_options = {
        "grpc_port": 0,
        "stream_poll_s": 0.05,
        "retry_base_s": 0.005,
        "lease_recovery_interval_s": 0.3,
        "scheduled_activation_s": 0.2,
        "heartbeat_interval_s": 1,
        "log_level": "warning",
    }
    with (
        dev_server(**server_options) as server,
        FaultProxy(server.port) as proxy,
        GrpcFaultProxy(server.grpc_address, proxy) as grpc_proxy,
    ):
        disk = Disk(folder / "disk")
        try:
            play = Stage(server, proxy, grpc_proxy, transport, disk, folder / "ledger")
            try:
                yield play
            finally:
                play.close()
        finally:
            disk.close()
