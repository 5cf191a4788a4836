"""Families of real processes, killed in every situation that a handler can bring about."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from spooled_supervisor import cgroups, exits, family, hunt, kernel, processes, resources

pytestmark = pytest.mark.alone

ZOO = Path(__file__).with_name("family_zoo.py")
TREE = Path(__file__).parents[2]
PATIENCE_S = 20.0
is_root = os.geteuid() == 0


def wait_over(pidfd: int, timeout_s: float = PATIENCE_S) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(timeout_s * 1000), "the process did not end"


class Child:
    """A zoo process, its pidfd and the pidfds of all that it told of."""

    def __init__(self, mode: str, argument: str = "", *, prefix: Sequence[str] = (), marker: str | None = None) -> None:
        marked = {} if marker is None else {family.MARKER: marker}
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(ZOO), mode, argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=TREE,
            env=os.environ | {"PYTHONPATH": str(TREE)} | marked,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.pid = self.process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.below: list[int] = json.loads(self.stdout.readline())
        self.below_fds = [os.pidfd_open(pid) for pid in self.below]

    def say(self) -> None:
        self.stdin.write(b"\n")
        self.stdin.flush()

    def status(self) -> int:
        wait_over(self.pidfd)
        status = exits.look(self.pidfd)
        assert status is not None
        return status

    def assert_family_is_dead(self) -> None:
        wait_over(self.pidfd)
        for pidfd in self.below_fds:
            wait_over(pidfd)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.stdin, self.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        for pidfd in (self.pidfd, *self.below_fds):
            os.close(pidfd)


@pytest.fixture(autouse=True)
def subreaper() -> Iterator[None]:
    """We adopt what our children leave behind; in the end there is nobody and no descriptor more than before."""
    fds = len(os.listdir("/proc/self/fd"))
    before = family.strangers(())
    kernel.set_child_subreaper(True)
    yield
    try:
        sweep_clean(before)
        assert family.strangers(before) == []
    finally:
        kernel.set_child_subreaper(False)
    assert len(os.listdir("/proc/self/fd")) == fds


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def begin(mode: str, argument: str = "", **more: Any) -> Child:
        children.append(Child(mode, argument, **more))
        return children[-1]

    yield begin
    for child in children:
        child.close()


@pytest.fixture(params=["lists", "scan"])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernel's lists of children, and as on a kernel without them."""
    if request.param == "scan":
        monkeypatch.setattr(processes, "_kernel_lists_children", lambda: False)


def sweep_clean(known: list[int]) -> family.Swept:
    """Sweep until nobody is left; the sum of all sweeps."""
    found = killed = reaped = 0
    names: tuple[str, ...] = ()
    deadline = time.monotonic() + PATIENCE_S
    while True:
        swept = family.sweep(known, kill=True)
        found, killed, reaped = found + swept.found, killed + swept.killed, reaped + swept.reaped
        names += swept.names
        if swept.left == 0 and not family.strangers(known):
            return family.Swept(found, killed, reaped, 0, names)
        assert time.monotonic() < deadline, "somebody cannot be swept"
        pidfds = [os.pidfd_open(pid) for pid in family.strangers(known)]
        poll = select.poll()
        for pidfd in pidfds:
            poll.register(pidfd, select.POLLIN)
        poll.poll(50)  # somebody's death, or a tick: the sweep may have run out of time before it met them all
        for pidfd in pidfds:
            os.close(pidfd)


def known(*children: Child) -> list[int]:
    return [child.pid for child in children]


# --- the family of a child -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("each_way")
def test_kill_of_child_without_family(start: Callable[..., Child]) -> None:
    child = start("alone")
    assert family.kill_family(child.pid, child.pidfd) == 0
    assert exits.decode(child.status()).words() == "killed by SIGKILL"


@pytest.mark.usefixtures("each_way")
def test_kill_reaches_double_forked_and_setsid_descendants(start: Callable[..., Child]) -> None:
    child = start("brood")
    assert family.kill_family(child.pid, child.pidfd) == len(child.below) == 8
    child.assert_family_is_dead()
    swept = sweep_clean(known(child))
    assert swept.killed == 0, "whoever was killed with the family is not counted again"
    assert swept.found == swept.reaped - 8, "only those who went between two others ended by themselves"
    assert swept.reaped >= 8


def test_kill_of_stopped_child(start: Callable[..., Child]) -> None:
    child = start("stopped")
    while (stat := processes.read_stat(child.pid)) is not None and stat.state != "T":
        os.sched_yield()
    assert family.kill_family(child.pid, child.pidfd) == 1
    child.assert_family_is_dead()


def test_kill_of_frozen_child_returns_and_works_when_it_thaws(start: Callable[..., Child]) -> None:
    """A process that even SIGKILL does not reach for now, like one in uninterruptible I/O."""
    cgroup = Path(f"/sys/fs/cgroup/freezer/family-test-{os.getpid()}")
    try:
        cgroup.mkdir()
    except OSError as e:
        pytest.skip(f"no freezer (cgroup v1) for us: {e}")
    child = start("many", "2", prefix=["sh", "-c", f'echo $$ >"{cgroup}/cgroup.procs" && exec "$@"', "sh"])
    try:
        (cgroup / "freezer.state").write_text("FROZEN")
        while "FREEZING" in (cgroup / "freezer.state").read_text():
            os.sched_yield()
        began = time.monotonic()
        assert family.kill_family(child.pid, child.pidfd) == 2
        assert time.monotonic() - began < 2.0
        assert exits.look(child.pidfd) is None
        assert exits.reap(child.pid) is None
        assert family.kill_family(child.pid, child.pidfd) == 0, "nobody is counted again while he is dying"
    finally:
        (cgroup / "freezer.state").write_text("THAWED")
        child.assert_family_is_dead()
        sweep_clean(known(child))
        exits.reap(child.pid)
        cgroup.rmdir()


def test_kill_counts_no_zombies(start: Callable[..., Child]) -> None:
    child = start("zombies")
    assert family.kill_family(child.pid, child.pidfd) == 1
    child.assert_family_is_dead()


def test_kill_while_the_kernel_reaps(start: Callable[..., Child]) -> None:
    child = start("careless")
    assert family.kill_family(child.pid, child.pidfd) == 30
    child.assert_family_is_dead()


def test_kill_sees_through_a_dead_main_thread(start: Callable[..., Child]) -> None:
    child = start("headless")
    assert family.kill_family(child.pid, child.pidfd) == 1
    child.assert_family_is_dead()


def test_second_kill_counts_nobody(start: Callable[..., Child]) -> None:
    child = start("many", "20")
    assert family.kill_family(child.pid, child.pidfd) + family.kill_family(child.pid, child.pidfd) == 20
    child.assert_family_is_dead()


@pytest.mark.parametrize("how", ["3", "signal"])
def test_kill_of_child_that_died_first_leaves_its_family_to_the_sweep(start: Callable[..., Child], how: str) -> None:
    child = start("dies_first", how)
    child.say()
    assert exits.decode(child.status()) == (exits.Exit(3) if how == "3" else exits.Exit(signal="SIGABRT"))
    assert family.kill_family(child.pid, child.pidfd) == 0
    assert exits.reap(child.pid) is not None
    swept = sweep_clean([])
    assert (swept.found, swept.killed, swept.reaped) == (2, 2, 2)
    assert all(name.startswith("python") for name in swept.names)
    child.assert_family_is_dead()


def test_kill_of_reaped_child_touches_nobody(start: Callable[..., Child]) -> None:
    child, bystander = start("alone"), start("many", "2")
    os.kill(child.pid, signal.SIGKILL)
    wait_over(child.pidfd)
    exits.reap(child.pid)
    assert family.kill_family(bystander.pid, child.pidfd) == 0, "the number has passed on to the bystander, so to speak"
    assert exits.look(bystander.pidfd) is None
    assert len(processes.descendants(bystander.pid)) == 2


def test_hunt_strikes_nobody_whose_number_has_passed_on(
    start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    child, bystander = start("many", "1"), start("many", "1")
    lists = {child.pid: child.below + bystander.below}
    monkeypatch.setattr(hunt, "BUDGET_S", 0.01)
    monkeypatch.setattr(hunt, "look_around", lambda: lambda pid: processes.Children(lists.get(pid, []), True))
    assert family.kill_family(child.pid, child.pidfd) == 1
    child.assert_family_is_dead()
    assert exits.look(bystander.pidfd) is None
    assert not exits.is_over(bystander.below_fds[0])


@pytest.mark.parametrize("kind", ["group", "sessions"])
@pytest.mark.parametrize("mode", ["bomb", "runner"])
def test_kill_while_the_family_forks(start: Callable[..., Child], mode: str, kind: str) -> None:
    marker = f"test-{os.getpid()}-{mode}-{kind}"
    child = start(mode, kind, marker=marker)
    began = time.monotonic()
    family.kill_family(child.pid, child.pidfd)
    took_s = time.monotonic() - began
    wait_over(child.pidfd)
    sweep_clean(known(child))
    assert family.marked_processes(marker) == []
    assert took_s < 2.0


@pytest.fixture
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget is spent after the first descendant."""
    monkeypatch.setattr(hunt, "BUDGET_S", 0.0)


@pytest.mark.usefixtures("no_time")
def test_kill_out_of_time_still_takes_the_whole_group(start: Callable[..., Child]) -> None:
    child, bystander = start("many", "30"), start("many", "1")
    assert family.kill_family(child.pid, child.pidfd) >= 1
    child.assert_family_is_dead()
    assert exits.look(bystander.pidfd) is None


@pytest.mark.usefixtures("no_time")
def test_kill_out_of_time_leaves_the_rest_to_the_sweep(start: Callable[..., Child]) -> None:
    child, bystander = start("brood"), start("brood")
    family.kill_family(child.pid, child.pidfd)
    wait_over(child.pidfd)
    sweep_clean(known(child, bystander))
    child.assert_family_is_dead()
    assert not any(exits.is_over(pidfd) for pidfd in (bystander.pidfd, *bystander.below_fds))


@pytest.mark.usefixtures("no_time")
def test_left_behind_out_of_time_are_killed_in_the_end_and_the_child_lives(start: Callable[..., Child]) -> None:
    child = start("careless")
    killed = 0
    while (swept := family.kill_descendants(child.pid)).left:
        killed += swept.killed
    assert killed >= 1
    for pidfd in child.below_fds:
        wait_over(pidfd)
    assert exits.look(child.pidfd) is None


def test_kill_by_cgroup(start: Callable[..., Child]) -> None:
    with own_cgroup2() as cgroup:
        child = start("brood", prefix=["sh", "-c", f'echo $$ >"{cgroup}/cgroup.procs" && exec "$@"', "sh"])
        assert family.kill_family(child.pid, child.pidfd, cgroup=cgroup) == 8
        child.assert_family_is_dead()
        sweep_clean(known(child))
        child.process.wait()
        assert (cgroup / "cgroup.procs").read_text() == ""


def test_kill_falls_back_when_there_is_no_cgroup(start: Callable[..., Child], tmp_path: Path) -> None:
    child = start("brood")
    assert family.kill_family(child.pid, child.pidfd, cgroup=tmp_path) == 8
    assert list(tmp_path.iterdir()) == []
    child.assert_family_is_dead()


@contextlib.contextmanager
def own_cgroup2() -> Iterator[Path]:
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines() if " - cgroup2 " in line]
    own = next((line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")), "0::/")
    if not mounts:
        pytest.skip("no cgroup2 is mounted")
    cgroup = Path(mounts[0][4]) / own[3:].lstrip("/") / f"family-test-{os.getpid()}"
    try:
        cgroup.mkdir()
    except OSError as e:
        pytest.skip(f"no cgroup is delegated to us: {e}")
    try:
        yield cgroup
    finally:
        cgroup.rmdir()


# --- what a job leaves below a child that lives on -------------------------------------------------------------------


@pytest.mark.usefixtures("each_way")
def test_left_behind_processes_are_killed_and_the_child_lives(start: Callable[..., Child]) -> None:
    child = start("subprocesses")
    swept = family.kill_descendants(child.pid)
    assert (swept.found, swept.killed, swept.names) == (2, 2, ("sleep", "sleep"))
    for pidfd in child.below_fds:
        wait_over(pidfd)
    assert family.kill_descendants(child.pid) == family.Swept()
    assert exits.look(child.pidfd) is None


def test_left_behind_processes_are_counted_where_they_are_kept(start: Callable[..., Child]) -> None:
    child = start("subprocesses")
    for _ in range(2):
        swept = family.kill_descendants(child.pid, kill=False)
        assert swept == family.Swept(found=2, left=2, names=("sleep", "sleep"))


def test_helpers_of_the_child_are_spared_with_all_below_them(start: Callable[..., Child]) -> None:
    child = start("brood")
    spare = [stat.identity for stat in processes.descendants(child.pid)]
    assert family.kill_descendants(child.pid, spare=spare) == family.Swept()
    assert not any(exits.is_over(pidfd) for pidfd in child.below_fds)
    number, began = spare[0]
    passed_on = [(number, began - 1), *spare[1:]]
    assert family.kill_descendants(child.pid, spare=passed_on).killed == 1, "the same number is another process"


def test_descendants_of_nobody(start: Callable[..., Child]) -> None:
    child = start("alone")
    assert family.kill_descendants(child.pid) == family.Swept()
    os.kill(child.pid, signal.SIGKILL)
    wait_over(child.pidfd)
    assert family.kill_descendants(child.pid) == family.Swept()
    exits.reap(child.pid)
    assert family.kill_descendants(child.pid) == family.Swept()


# --- orphans ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("each_way")
def test_sweep_touches_neither_known_children_nor_their_families(start: Callable[..., Child]) -> None:
    quiet, dead = start("brood"), start("dies_first", "0")
    dead.say()
    dead.status()
    assert set(family.strangers(known(quiet))) >= {dead.pid, *dead.below}
    swept = sweep_clean(known(quiet, dead))
    assert (swept.killed, swept.reaped) == (2, 2)
    assert exits.look(dead.pidfd) == 0, "a known zombie keeps its status for its owner"
    assert not any(exits.is_over(pidfd) for pidfd in (quiet.pidfd, *quiet.below_fds))


def test_a_sweep_that_cannot_look_does_not_say_that_nobody_is_left(start: Callable[..., Child]) -> None:
    """Without a free descriptor no list can be read; who goes by it would try a job again beside its orphans."""
    child = start("subprocesses")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(child.below_fds) + 20, before[1]))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        swept = family.sweep((), kill=True)
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert swept.left
    assert exits.look(child.pidfd) is None


def test_sweep_that_keeps_reaps_only_the_dead(start: Callable[..., Child]) -> None:
    child = start("dies_first", "0")
    child.say()
    child.status()
    swept = family.sweep(known(child), kill=False)
    assert swept == family.Swept(left=2)
    os.kill(child.below[0], signal.SIGTERM)
    wait_over(child.below_fds[0])
    swept = family.sweep(known(child), kill=False)
    assert (swept.found, swept.killed, swept.reaped, swept.left) == (1, 0, 1, 1)
    assert not exits.is_over(child.below_fds[1])


def test_sweep_names_are_bounded(start: Callable[..., Child]) -> None:
    child = start("many", "25")
    os.kill(child.pid, signal.SIGKILL)
    wait_over(child.pidfd)
    swept = family.sweep(known(child), kill=True)
    assert swept.found == 25
    assert len(swept.names) == family.MAX_NAMES
    assert all(len(name) <= 15 for name in swept.names)


def test_sweep_in_a_host_program_spares_its_own_children(start: Callable[..., Child]) -> None:
    marker = f"test-{os.getpid()}-host"
    of_host = start("many", "1")
    ours = start("dies_first", "0")
    marked = start("dies_first", "0", marker=marker)
    for child in (ours, marked):
        child.say()
        child.status()
        exits.reap(child.pid)
    swept = family.sweep([], kill=True, ours=family.belonging_to(marker, [ours.pid]))
    assert swept.killed == 3, "one is in our child's session, two began with our marker; one has left both"
    assert not exits.is_over(of_host.pidfd)
    assert exits.look(of_host.pidfd) is None


# --- survivors -------------------------------------------------------------------------------------------------------


def test_marked_processes_are_found_and_killed(start: Callable[..., Child]) -> None:
    marker = f"/var/lib/test {os.getpid()} \udcff"
    marked = start("brood", marker=marker)
    other = start("many", "1", marker=marker + "2")
    spared = start("alone", marker=marker)
    assert set(family.marked_processes(marker)) == {marked.pid, *marked.below, spared.pid}
    swept = family.kill_marked(marker, spare=[spared.pid])
    assert swept.killed == 9
    marked.assert_family_is_dead()
    assert family.kill_marked(marker, spare=[spared.pid]) == family.Swept()
    assert exits.look(spared.pidfd) is None
    assert not exits.is_over(other.below_fds[0])


def test_marked_process_is_still_found_under_a_title() -> None:
    code = "from spooled_supervisor import kernel; kernel.set_title('child ' * 20); print(flush=True); input()"
    marker = f"test-{os.getpid()}-title"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=TREE,
        env=os.environ | {family.MARKER: marker},
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert family.marked_processes(marker) == [process.pid]
        assert family.kill_marked(marker).killed == 1


def test_process_is_the_same_only_with_its_start_time_and_boot(start: Callable[..., Child]) -> None:
    child = start("alone")
    began, boot = processes.start_time(child.pid), processes.boot_id()
    assert began is not None
    assert processes.is_same_process(child.pid, began, boot)
    assert not processes.is_same_process(child.pid, began + 1, boot)
    assert not processes.is_same_process(child.pid, began, "")
    assert not processes.is_same_process(child.pid, began, boot[::-1])
    os.kill(child.pid, signal.SIGKILL)
    wait_over(child.pidfd)
    exits.reap(child.pid)
    assert not processes.is_same_process(child.pid, began, boot)
    assert processes.start_time(child.pid) is None


# --- exits -----------------------------------------------------------------------------------------------------------


def test_status_is_looked_at_and_then_taken_with_its_cost(start: Callable[..., Child]) -> None:
    child = start("spins", "0.1")
    assert exits.look(child.pidfd) is None
    assert exits.reap(child.pid) is None
    os.kill(child.pid, signal.SIGSEGV)
    status = child.status()
    assert exits.decode(status) == exits.Exit(signal="SIGSEGV")
    assert exits.look(child.pidfd) == status, "looking takes nothing"
    reaped = exits.reap(child.pid)
    assert reaped is not None
    assert reaped.status & 0x7F == status & 0x7F
    assert reaped.cpu_s >= 0.1
    assert reaped.max_rss_bytes > 1 << 20
    assert exits.look(child.pidfd) == exits.UNKNOWN
    assert exits.reap(child.pid) == exits.Reaped(exits.UNKNOWN)


def test_process_of_another_parent_counts_as_living(start: Callable[..., Child]) -> None:
    child = start("many", "1")
    assert exits.look(child.below_fds[0]) is None
    os.kill(child.below[0], signal.SIGKILL)
    wait_over(child.below_fds[0])
    assert exits.look(child.below_fds[0]) == exits.UNKNOWN


# --- figures ---------------------------------------------------------------------------------------------------------


def test_cpu_time_is_neither_lost_nor_counted_twice_when_a_child_dies(start: Callable[..., Child]) -> None:
    before = resources.family_cpu_seconds([])
    child = start("spins", "0.2")
    living = resources.family_cpu_seconds([child.pid]) - before
    assert living >= 0.37, "the descendant's time counts, too, though nobody has waited for it"
    family.kill_family(child.pid, child.pidfd)
    wait_over(child.pidfd)
    exits.reap(child.pid)
    sweep_clean([])
    reaped = resources.family_cpu_seconds([]) - before
    assert living - 0.05 <= reaped < living + 1.0


def test_memory_of_the_vanished_is_unknown(start: Callable[..., Child]) -> None:
    child = start("zombies")
    pss, uss = resources.pss_uss(child.pid) or (0, 0)
    assert 0 < uss <= pss
    assert resources.pss_uss(child.below[0]) is None
    family.kill_family(child.pid, child.pidfd)
    wait_over(child.pidfd)
    assert resources.pss_uss(child.pid) is None
    exits.reap(child.pid)
    assert resources.pss_uss(child.pid) is None


# --- in a process of its own -----------------------------------------------------------------------------------------


def run_alone(code: str, *prefix: str) -> dict[str, object]:
    """What a Python program that ends in `say(...)` said."""
    program = f"import json, os, sys\ndef say(**what): print(json.dumps(what))\n{code}"
    done = subprocess.run(
        [*prefix, sys.executable, "-W", "error", "-c", program],
        cwd=TREE,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, object] = json.loads(done.stdout)
    return said


def test_children_may_import_all_this_cheaply() -> None:
    said = run_alone("""
from spooled_supervisor import exits, family, hunt, processes, resources
say(loaded=[m for m in ("psutil", "asyncio", "logging", "httpx", "subprocess") if m in sys.modules])
""")
    assert said == {"loaded": []}


def test_child_lowers_its_own_priority() -> None:
    said = run_alone("""
from spooled_supervisor import family
os.setsid() if os.getsid(0) != os.getpid() else None
score = lambda: int(family.read_file("/proc/self/oom_score_adj"))
before = score()
refused = family.lower_priority(5, family.raised_oom_score())
once = score()
for _ in range(4):
    family.lower_priority(99, family.raised_oom_score())
say(raised=once - before, nice=os.nice(0), score=score(), refused=[text.split(":")[0] for text in refused])
""")
    assert said["score"] == 1000, "never above what the kernel takes"
    assert said["nice"] == 19
    assert said["raised"] in (300, 1000 - 300)
    assert said["refused"] in ([], ["/proc/self/autogroup"])


def test_refused_priority_is_told_with_its_reason() -> None:
    if not is_root:
        pytest.skip("needs to become another user")
    said = run_alone("""
from spooled_supervisor import family
os.setuid(65534)
say(refused=family.lower_priority(-5, -1000))
""")
    refused = said["refused"]
    assert isinstance(refused, list)
    assert [text.split(":")[0] for text in refused] == ["nice", "/proc/self/autogroup", "/proc/self/oom_score_adj"]
    assert "not permitted" in refused[0]


def test_kill_goes_on_around_a_descendant_of_another_user() -> None:
    if not is_root:
        pytest.skip("needs to become another user")
    said = run_alone("""
import signal, time
from spooled_supervisor import exits, family, kernel, processes
kernel.set_child_subreaper(True)
ready, tell = os.pipe()
child = os.fork()
if child == 0:
    os.setsid()
    kernel.set_child_subreaper(True)
    if os.fork() == 0:
        os.close(1), os.close(2)
        signal.alarm(15)
        os.write(tell, b"%d " % os.getpid())
        while True: signal.pause()
    os.setuid(65534)
    for _ in range(2): os.fork() or signal.pause()
    os.write(tell, b"! ")
    signal.pause()
text = b""
while text.count(b" ") < 2: text += os.read(ready, 100)
other = int(text.replace(b"!", b""))
os.setuid(65534)
pidfd = os.pidfd_open(child)
began = time.process_time()
killed = family.kill_family(child, pidfd)
cpu_s = time.process_time() - began
while exits.reap(child) is None: os.sched_yield()
sweeps = [family.sweep([], kill=True) for _ in range(30)]
while sweeps[-1].left > 1: sweeps.append(family.sweep([], kill=True))
began = time.process_time()
family.sweep([], kill=True)
say(killed=killed, cpu_s=cpu_s, lives=processes.read_stat(other).state, left=sweeps[-1].left,
    found=sum(s.found for s in sweeps), sweep_cpu_s=time.process_time() - began)
""")
    assert said["killed"] == 2
    assert said["left"] == 1, "told, and not found anew each time"
    assert said["found"] == 0
    assert said["lives"] in ("S", "R")
    assert said["cpu_s"] < hunt.BUDGET_S / 2, "it does not try again and again"  # type: ignore[operator]
    assert said["sweep_cpu_s"] < hunt.BUDGET_S / 2  # type: ignore[operator]


def test_kill_finds_descendants_whose_proc_entry_is_hidden() -> None:
    if not is_root or shutil.which("unshare") is None:
        pytest.skip("needs its own mounts")
    prefix = ("unshare", "--mount", "sh", "-c", 'mount -t proc -o hidepid=2 proc /proc && exec "$@"', "sh")
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("may not mount a /proc of its own")
    said = run_alone(
        """
import signal, time
from spooled_supervisor import exits, family, kernel, processes
kernel.set_child_subreaper(True)
os.setgroups([])
os.setgid(65534)  # group 0 would see the hidden (proc(5), gid=)
os.setuid(65534)
kernel.set_dumpable(True)
ready, tell = os.pipe()
child = os.fork()
if child == 0:
    os.setsid()
    kernel.set_child_subreaper(True)
    if os.fork() == 0:
        kernel.set_dumpable(False)
        if os.fork() == 0: os.setsid()
        signal.alarm(15)
        os.write(tell, b"%d " % os.getpid())
        while True: signal.pause()
    signal.pause()
text = b""
while text.count(b" ") < 2: text += os.read(ready, 100)
hidden = [int(word) for word in text.split()]
fds = [os.pidfd_open(pid) for pid in hidden]
seen = [pid for pid in hidden if processes.read_stat(pid)]
pidfd = os.pidfd_open(child)
began = time.process_time()
killed = family.kill_family(child, pidfd)
cpu_s = time.process_time() - began
while exits.reap(child) is None: os.sched_yield()
while family.sweep([], kill=True).left: pass
say(seen=seen, killed=killed, dead=[exits.is_over(fd) for fd in fds], cpu_s=cpu_s)
""",
        *prefix,
    )
    assert said["seen"] == [], "else this proves nothing"
    assert said["killed"] == 2
    assert said["dead"] == [True, True]
    assert said["cpu_s"] < hunt.BUDGET_S / 2  # type: ignore[operator]


def test_no_bystander_dies_where_numbers_are_few() -> None:
    """In a pid namespace with room for 100 processes or so, where every number is given eight times meanwhile."""
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    if not is_root or shutil.which("unshare") is None or release < (6, 14):
        pytest.skip("needs pid_max of a pid namespace's own")
    prefix = (
        *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"),
        *('echo 400 >/proc/sys/kernel/pid_max && exec "$@"', "sh"),
    )
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no pid namespace for us")
    said = run_alone(
        """
import signal
from spooled_supervisor import exits, family, kernel
from tests.e2e import family_zoo as zoo
def churn():
    # uses up numbers; leaves if one of its children, each a bystander for a moment, is killed
    while True:
        try: pid = os.fork() or os._exit(0)
        except BlockingIOError: continue
        if os.waitpid(pid, 0)[1] != 0: os._exit(1)
bystanders = [zoo.fork(session=n % 2 == 0) for n in range(20)] + [zoo.fork(churn, session=True)]
fds = [os.pidfd_open(pid) for pid in bystanders]
n = last = rounds = 0
out, (hear, announce) = os.dup(1), os.pipe()
os.dup2(announce, 1)
def child(mode, kind):
    os.setsid(), kernel.set_child_subreaper(True)
    getattr(zoo, mode)(kind), zoo.sleep_forever()
while rounds < 8:
    pid = zoo.fork(lambda: child(("runner", "bomb")[n % 2], ("group", "sessions")[n // 2 % 2]))
    pidfd = os.pidfd_open(pid)
    n, last, rounds = n + 1, pid, rounds + (pid < last)
    os.read(hear, 100)
    family.kill_family(pid, pidfd)
    while exits.look(pidfd) is None: os.sched_yield()
    exits.reap(pid), os.close(pidfd)
    while family.sweep(bystanders, kill=True).left: os.sched_yield()
os.dup2(out, 1)
alive = sum(exits.look(fd) is None for fd in fds)
say(alive=alive, pid_1=os.getpid(), left=len(family.strangers(bystanders)))
""",
        *prefix,
    )
    assert (said["alive"], said["left"], said["pid_1"]) == (21, 0, 1)


def test_figures_are_unknown_where_proc_shows_processes_only() -> None:
    if not is_root or shutil.which("unshare") is None:
        pytest.skip("needs its own mounts")
    prefix = ("unshare", "--mount", "sh", "-c", 'mount -t proc -o subset=pid proc /proc && exec "$@"', "sh")
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("may not mount a /proc of its own")
    said = run_alone(
        """
from dataclasses import astuple
from spooled_supervisor import processes, resources
host = resources.read_host()
usage = resources.FamilyUsage()
say(host=[host.cpu_percent, host.memory_percent], load=host.load_1m is not None, boot=processes.boot_id(),
    same=processes.is_same_process(os.getpid(), processes.start_time(os.getpid()), ""),
    memory=usage.memory_percent({}) > 0, total=resources.total_memory() > 1 << 20)
""",
        *prefix,
    )
    assert said == {"host": [None, None], "load": True, "boot": "", "same": False, "memory": True, "total": True}


def test_oom_kill_is_proved_by_the_counter_of_the_cgroup() -> None:
    own = next(iter(cgroups.memory_cgroup()), None)
    if own is None:
        pytest.skip("no memory cgroup of our own")
    cgroup = own / f"family-test-{os.getpid()}"
    limit = "memory.limit_in_bytes" if (own / "memory.limit_in_bytes").exists() else "memory.max"
    try:
        cgroup.mkdir()
        with (cgroup / limit).open("r+") as file:
            file.write(str(64 << 20))
    except OSError as e:
        if cgroup.exists():
            cgroup.rmdir()
        pytest.skip(f"no memory cgroup is delegated to us: {e}")
    try:
        said = run_alone(
            f"""
with open({str(cgroup / "cgroup.procs")!r}, "w") as procs: procs.write("0")
from spooled_supervisor import exits, resources
counter = resources.OomCounter()
before = counter.read()
pid = os.fork()
if pid == 0:
    hog = []
    while True: hog.append(bytearray(10 << 20))
while (reaped := exits.reap(pid)) is None: os.sched_yield()
say(cause=exits.decode(reaped.status).words(), evidence=counter.words(before, counter.read()),
    limit=resources.memory_limit())
"""
        )
    finally:
        cgroup.rmdir()
    assert said == {
        "cause": "killed by SIGKILL",
        "evidence": "the memory limit of the service was hit (oom_kill 0 -> 1)",
        "limit": 64 << 20,
    }
