"""What containers do to a program: it is PID 1, not root, on a read-only root with next to nothing in /dev.

No container runtime is needed: unshare(1) makes the namespaces, and a few mounts the rest. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Site
from tests.support.daemon import Daemon, Ledger, command_line, environment, is_alive, state_of, wait_until
from tests.support.program import program

NOBODY = 65534
MISSING = [name for name in ("unshare", "setpriv", "nsenter") if shutil.which(name) is None]

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="making namespaces needs root"),
    pytest.mark.skipif(bool(MISSING), reason=f"missing: {', '.join(MISSING)} (Debian: util-linux)"),
]

PID_NAMESPACE = ("unshare", "--fork", "--kill-child", "--pid", "--mount-proc")

# $1: what stays writable, $2: prefix of the interpreter; the rest is the program. The interpreter may be below a home
# directory that only its owner may enter, so that one is replaced by an empty one with nothing but the interpreter.
LOCKED = f"""
set -eu
writable=$1 prefix=$2 home=/$(echo "$2" | cut -d/ -f2)
shift 2
mount --bind "$writable" "$writable"
if [ "$home" = /root ] || [ "$home" = /home ]; then
    mount --bind "$prefix" /mnt
    mount -t tmpfs -o mode=0755 container "$home"
    mkdir -p "$prefix"
    mount --bind /mnt "$prefix"
    umount /mnt
fi
mount -t tmpfs -o size=64k,mode=0755 container /mnt
for device in null zero full random urandom; do
    cp --archive /dev/$device /mnt
done
mkdir /mnt/shm
mount -t tmpfs -o size=64k,mode=1777 container /mnt/shm
mount --rbind /mnt /dev
mount -o remount,bind,ro /
exec setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
"""

CLOSED = 'exec "$@" 0<&- 1>&- 2>&-'


class Container:
    """A daemon that is PID 1 of a namespace. `pid` is its number outside."""

    def __init__(self, worker: Daemon) -> None:
        self.worker = worker
        self.pid = wait_until(lambda: first_child(worker.pid), "the first process of the namespace")

    def signal(self, number: signal.Signals) -> None:
        """As a container runtime does: from outside."""
        os.kill(self.pid, number)

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.worker.wait()

    def run(self, *words: str) -> subprocess.Popen[bytes]:
        """As `docker exec`: a process whose parent is outside."""
        line = ["nsenter", "--target", str(self.pid), "--pid", "--mount", *words]
        return subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def members(self) -> list[int]:
        """Numbers, outside, of all processes in it, zombies too."""
        space = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit() and os.readlink(f"/proc/{name}/ns/pid") == space:
                    found.append(int(name))
        return found

    def zombies(self) -> list[int]:
        """A zombie shows no namespace, but its parent."""
        own = set(self.members())
        return [pid for pid in children_of(own) if state_of(pid) == "Z"]


def first_child(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else None
    return None


def children_of(parents: set[int]) -> list[int]:
    found: list[int] = []
    for parent in parents:
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
    return found


@contextlib.contextmanager
def container(site: Site, *, options: Sequence[str] = (), **more: Any) -> Iterator[Container]:
    """Its end is the test's business."""
    with site.worker(wrap=PID_NAMESPACE, options=options, **more) as worker:
        inside = Container(worker)
        try:
            yield inside
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                inside.signal(signal.SIGKILL)
            raise
        if worker.is_running:
            assert inside.stop() == 0, worker.tail()


# --- PID 1 -----------------------------------------------------------------------------------------------------------


def test_pid_1_drains_at_term(site: Site) -> None:
    with container(site) as inside:
        assert inside.worker.wait_for_event("supervisor_started")["pid"] == 1
        job_id = site.add("finish_after_abort")
        inside.worker.ledger.wait_for("start", job=job_id)
        assert inside.stop() == 0
        assert site.client.job(job_id)["result"] == "finished all the same"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_pid_1_ends_by_a_stop_signal_while_it_starts(site: Site, number: signal.Signals) -> None:
    """The kernel gives PID 1 no default action: what it does not handle is lost."""
    with container(site) as inside:
        inside.worker.wait_for_event("fork_server_started")
        began = time.monotonic()
        inside.signal(number)
        assert inside.worker.wait() == 0
        assert time.monotonic() - began < 4.0


def test_pid_1_takes_the_other_signals_too(site: Site) -> None:
    with container(site) as inside:
        worker = inside.worker.wait_until_running()
        inside.signal(signal.SIGHUP)
        worker.wait_for_event("reloaded")
        inside.signal(signal.SIGTTIN)
        worker.wait_for_event("scaled", procs=3)
        inside.signal(signal.SIGTSTP)
        worker.wait_for_event("quieted")
        inside.signal(signal.SIGCONT)
        worker.wait_for_event("resumed")
        inside.signal(signal.SIGUSR2)
        assert site.end(site.add("ok"))["status"] == "completed"


def test_pid_1_leaves_at_once_at_the_third_term(site: Site) -> None:
    with container(site, options=["--shutdown-timeout", "20"]) as inside:
        worker = inside.worker
        worker.exit_may_be = None
        job_id = site.add("ignore_signals", max_retries=1)
        worker.ledger.wait_for("start", job=job_id)
        site.server.process.send_signal(signal.SIGSTOP)  # so that the second one has something to wait for
        try:
            inside.signal(signal.SIGTERM)
            worker.wait_for_event("phase_changed", phase="draining")
            inside.signal(signal.SIGTERM)
            worker.wait_for_event("phase_changed", phase="stopping")
            members = inside.members()
            began = time.monotonic()
            inside.signal(signal.SIGTERM)
            worker.wait()
            assert time.monotonic() - began < 2.0
        finally:
            site.server.process.send_signal(signal.SIGCONT)
        assert not any(map(is_alive, members))
        site.client.wait_for(job_id, "pending", "completed", "processing", "deadletter")


def test_a_program_with_a_worker_that_is_pid_1_leaves_at_once_at_the_third_term(site: Site) -> None:
    source = """
        w = worker("q", shutdown_timeout=20)
        @w.process
        def handler(ctx):
            ctx.progress(1)
            time.sleep(60)
        w.on("job:progress", lambda e: say("runs", os.getpid()))
        class Log(logging.Handler):
            def emit(self, record): say(record.getMessage())
        log = logging.getLogger("spooled_supervisor")
        log.setLevel(logging.INFO); log.addHandler(Log())
        create(w, None)
        w.start()
    """
    server = site.server
    options = {"url": server.url, "api_key": server.api_key, "prefix": site.prefix}
    with program(source, wrap=PID_NAMESPACE, **options) as running:
        pid = wait_until(lambda: first_child(running.process.pid), "the first process of the namespace")
        assert running.wait_for_line("runs") == "runs 1"
        server.process.send_signal(signal.SIGSTOP)  # so that the second one has something to wait for
        try:
            os.kill(pid, signal.SIGTERM)
            running.wait_for_line("phase_changed phase=draining")
            os.kill(pid, signal.SIGTERM)
            running.wait_for_line("phase_changed phase=stopping")
            began = time.monotonic()
            os.kill(pid, signal.SIGTERM)
            code, _ = running.wait()
            assert time.monotonic() - began < 2.0
        finally:
            server.process.send_signal(signal.SIGCONT)
        assert code == 128 + signal.SIGTERM


def test_pid_1_reaps_whom_nobody_else_does(site: Site) -> None:
    """Orphans of jobs, and those of processes that were brought in from outside."""
    with container(site) as inside:
        inside.worker.wait_until_running()
        foreign = [inside.run("/bin/sh", "-c", "(sleep 0.1; exit 3) & exit 0") for _ in range(10)]
        assert site.end(site.add("many_orphans", count=50))["status"] == "completed"
        assert site.end(site.add("family", then="exit"))["status"] == "deadletter"
        assert [process.wait(10.0) for process in foreign] == [0] * 10
        family = [entry["process"] for entry in inside.worker.ledger.entries("process")]
        assert len(family) == 6
        wait_until(lambda: not inside.zombies(), "no zombies")
        wait_until(lambda: len(inside.members()) == 4, "supervisor, fork server and two children, nobody else")
        assert site.end(site.add("ok"))["status"] == "completed"


def test_process_from_outside_that_has_its_parent_is_left_alone(site: Site) -> None:
    with container(site) as inside:
        inside.worker.wait_until_running()
        foreign = inside.run("/bin/sleep", "30")
        try:
            wait_until(lambda: len(inside.members()) == 5, "the sleeper inside")
            assert site.end(site.add("family", then="exit"))["status"] == "deadletter"
            assert site.end(site.add("many_orphans", count=20))["status"] == "completed"
            assert foreign.poll() is None
        finally:
            foreign.kill()
            foreign.wait()
            for pid in inside.members():
                if Path(f"/proc/{pid}/comm").read_text() == "sleep\n":
                    os.kill(pid, signal.SIGKILL)


def test_term_within_a_grace_of_thirty_seconds_needs_no_kill(site: Site) -> None:
    """A Pod's terminationGracePeriodSeconds: default settings would take the whole of it, so less is set."""
    with container(site, options=["--shutdown-timeout", "2"]) as inside:
        jobs = [site.add("ignore_signals", max_retries=1), site.add("family", then="spin", max_retries=1)]
        for job_id in jobs:
            inside.worker.ledger.wait_for("start", job=job_id)
        inside.worker.ledger.wait_for("process", 6)
        members = inside.members()
        began = time.monotonic()
        assert inside.stop() == 0
        assert 2.0 <= time.monotonic() - began < 9.0, "far below the grace"
        assert not any(map(is_alive, members))
        for job_id in jobs:
            assert site.client.job(job_id)["last_error"] == "Worker shutdown timeout"


def test_killed_container_leaves_nothing_and_the_next_one_reports(site: Site, tmp_path: Path) -> None:
    """The state directory is a volume; process numbers in it are those of another namespace."""
    state = tmp_path / "state"
    with container(site, state_dir=state) as inside:
        job_id = site.add("spin", max_retries=1, seconds=1.0)
        inside.worker.ledger.wait_for("start", job=job_id)
        members = inside.members()
        inside.worker.exit_may_be = None
        inside.signal(signal.SIGKILL)
        inside.worker.wait()
        wait_until(lambda: not any(map(is_alive, members)), "the end of all")
    with container(site, state_dir=state):
        assert site.end(job_id)["status"] == "completed"
        assert site.events(job_id).count("failed") == 1


# --- not root, nothing writable, bare /dev ---------------------------------------------------------------------------


@contextlib.contextmanager
def writable_place() -> Iterator[Path]:
    """A volume of the container's user."""
    with tempfile.TemporaryDirectory(prefix="spooled-container-") as made:
        place = Path(made)
        place.chmod(0o755)
        (place / "volume").mkdir()
        os.chown(place / "volume", NOBODY, NOBODY)
        yield place / "volume"


def locked(place: Path) -> list[str]:
    return [*PID_NAMESPACE, "sh", "-c", LOCKED, "container", str(place), sys.base_prefix]


@pytest.fixture
def can_lock() -> None:
    """Whether another user can run what is tested at all."""
    with writable_place() as place:
        trial = [sys.executable, "-c", "import spooled_supervisor.supervisor"]
        env = environment(None) | {"PYTHONDONTWRITEBYTECODE": "1"}
        tried = subprocess.run([*locked(place), *trial], env=env, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"another user cannot run this interpreter and this tree: {tried.stderr.strip()[-300:]}")


@pytest.mark.usefixtures("can_lock")
def test_other_user_on_a_read_only_root_with_a_bare_dev(site: Site) -> None:
    with writable_place() as place:
        ledger = Ledger(place / "ledger")
        env = {"LEDGER": str(ledger.path), "QUEUE_PREFIX": site.prefix, "HOME": "/nonexistent"}
        # daemon()'s own wrapping cannot be used: its temporary directory is root's, and closed to others
        options = ["--queue", f"{site.prefix}q", "--control-socket", str(place / "control.sock")]
        line = command_line("modes", url=site.server.url, procs=2, state_dir=place / "state", options=options)
        with site_process([*locked(place), *line], environment(site.server.api_key, None, env)) as worker:
            worker.ledger = ledger
            inside = Container(worker)
            worker.wait_for_event("supervisor_started")
            status = Path(f"/proc/{inside.pid}/status").read_text()
            assert f"Uid:\t{NOBODY}\t" in status
            assert "CapEff:\t0000000000000000" in status
            assert site.end(site.add("ok"))["status"] == "completed"
            assert site.result("pool") == [1, 2], "semaphores in a /dev/shm of sixteen pages"
            assert site.end(site.add("log"))["status"] == "completed"
            assert site.end(site.add("family", then="exit"))["status"] == "deadletter"
            assert "SIGKILL" in site.error("kill_self")
            spinning = site.add("spin", fields={"timeout_seconds": 1})
            assert site.end(spinning)["last_error"].startswith("timed out")
            root_is_read_only = subprocess.run(
                ["nsenter", "--target", str(inside.pid), "--mount", "touch", "/by-the-test"],
                stderr=subprocess.DEVNULL,
                check=False,
            )
            assert root_is_read_only.returncode != 0
            loud = [event for event in worker.events() if event["level"] in ("warn", "error")]
            expected = {"job_failed", "job_logged", "config_warning", "leftovers_found", "orphans_killed"}
            expected |= {"child_killed", "child_exited", "job_aborting"}
            assert {event["event"] for event in loud} <= expected, loud
            assert inside.stop() == 0
            worker.assert_no_traceback()


@contextlib.contextmanager
def site_process(line: Sequence[str], env: dict[str, str], **popen: Any) -> Iterator[Daemon]:
    """A daemon that is started by a whole command line of the test's."""
    with tempfile.TemporaryDirectory(prefix="spooled-e2e-") as made:
        wrapped = ["/usr/bin/setpriv", "--pdeathsig", "KILL", *line]
        process = subprocess.Popen(
            wrapped,
            **{
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.STDOUT,
                "cwd": Path(__file__).resolve().parents[1] / "support" / "apps",
                "env": env,
                "start_new_session": True,
                **popen,
            },
        )
        worker = Daemon(process, Path(made, "state"), Ledger(Path(made, "ledger")))
        try:
            yield worker
        finally:
            # unshare's --kill-child does not reach one that has changed its user (prctl(2), PR_SET_PDEATHSIG)
            if worker.is_running and (pid := first_child(worker.pid)) is not None:
                os.kill(pid, signal.SIGKILL)
            worker.clean_up()


# --- no standard streams ---------------------------------------------------------------------------------------------


def test_closed_standard_streams_cost_no_job(site: Site, tmp_path: Path) -> None:
    """0, 1 and 2 do not become somebody's pipe: what jobs print goes nowhere and harms nobody."""
    state = tmp_path / "state"
    ledger = Ledger(tmp_path / "ledger")
    env = {"QUEUE_PREFIX": site.prefix}
    line = command_line("modes", url=site.server.url, procs=2, state_dir=state, options=["--queue", f"{site.prefix}q"])
    wrapped = [*PID_NAMESPACE, "sh", "-c", CLOSED, "closed", *line]
    with site_process(wrapped, environment(site.server.api_key, ledger.path, env)) as worker:
        job_id = site.add("log")
        assert site.end(job_id)["status"] == "completed"
        inside = Container(worker)
        for number in (0, 1, 2):
            assert os.readlink(f"/proc/{inside.pid}/fd/{number}") == "/dev/null"
        assert site.result("length", value="x" * 100_000) == 100_000
        assert site.end(site.add("raise"))["status"] == "deadletter"
        assert inside.stop() == 0


# --- quotas ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def cpu_quota(cpus: int) -> Iterator[Path]:
    """A new cgroup below ours with that much CPU."""
    found = next(quota_homes(cpus), None)
    if found is None:
        pytest.skip("no cgroup with a CPU quota can be made here")
    group, settings = found
    try:
        for name, value in settings.items():
            (group / name).write_text(value)
        yield group
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "an empty cgroup")
    finally:
        group.rmdir()


def quota_homes(cpus: int) -> Iterator[tuple[Path, dict[str, str]]]:
    """New cgroups that take a quota, v1 or v2, each with what sets it."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = Path("/sys/fs/cgroup", controllers, path.lstrip("/"), f"spooled-quota-{os.getpid()}")
        v1 = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": str(cpus * 100_000)}
        settings = v1 if controllers else {"cpu.max": f"{cpus * 100_000} 100000"}
        with contextlib.suppress(OSError):
            group.mkdir()
            if all((group / name).exists() for name in settings):
                yield group, settings
            else:
                group.rmdir()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a quota below one CPU cannot be told from one CPU")
def test_quota_decides_how_many_children_there_are(site: Site) -> None:
    with cpu_quota(1) as group:
        join = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'
        wrap = ["sh", "-c", join, "join", str(group)]
        with site.worker(wrap=wrap, options=["--procs", "auto"]) as worker:
            assert worker.wait_for_event("supervisor_started")["procs"] == 1
            assert site.end(site.add("ok"))["status"] == "completed"
