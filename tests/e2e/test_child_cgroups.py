"""A cgroup of its own for each child, on a real hierarchy: a directory that the test makes is delegated to the daemon.

What systemd makes of it is tested in tests/systemd. Memory is limited by the kernel only where its controller can be
had below our own cgroup; elsewhere the limit is watched, and both is tested where it is so.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Site, check_only_its_own
from tests.support.cgroups import below, has_memory, inside, mark, own_cgroup, place_of, stranger_in
from tests.support.daemon import APPS, Daemon, environment, is_alive, wait_until

MIB = 1 << 20
TREE = Path(__file__).parents[2]


@pytest.fixture
def delegated() -> Iterator[Path]:
    with own_cgroup(is_delegated=True) as cgroup:
        yield cgroup


def worker_in(cgroup: Path, site: Site, **more: Any) -> AbstractContextManager[Daemon]:
    return site.worker(wrap=inside(cgroup), **more)


def cgroup_of(pid: int, delegated: Path) -> Path:
    """The directory of a child's own cgroup."""
    place = place_of(pid)
    assert place.rpartition("/")[0].endswith(delegated.name), place
    return delegated / place.rpartition("/")[2]


# --- where they are -----------------------------------------------------------------------------------------------


def test_every_child_has_a_cgroup_of_its_own_and_all_are_gone_at_the_end(site: Site, delegated: Path) -> None:
    with worker_in(delegated, site) as worker:
        worker.wait_until_running()
        children = worker.children()
        assert {cgroup_of(pid, delegated).name for pid in children} == {
            f"child-{slot}-{pid}" for slot, pid in enumerate(children)
        }
        for pid in (worker.pid, worker.fork_server):
            assert cgroup_of(pid, delegated).name == "supervisor"
        told = worker.wait_for_event("cgroup_delegated")
        assert (told["directory"], told["memory"]) == (str(delegated), has_memory(delegated))
        assert site.result("ok")["retry_count"] == 0
        assert worker.stop() == 0
        assert not worker.events("cgroup_failed")
    assert below(delegated) == []


def test_what_hooks_and_jobs_start_is_born_there(site: Site, delegated: Path) -> None:
    with worker_in(delegated, site, options=["--leftovers", "keep"], procs=1) as worker:
        worker.wait_until_running()
        (child,) = worker.children()
        assert site.result("family") == "left a family"
        family = [entry["process"] for entry in worker.ledger.entries("process")]
        assert len(family) == 6
        assert {place_of(pid) for pid in family} == {place_of(child)}
        assert site.run("ok")["status"] == "completed"
        assert all(map(is_alive, family)), "they are kept as long as the child lives"
        os.kill(child, signal.SIGTERM)
        worker.wait_for_event("child_exited", pid=child)
        wait_until(lambda: not any(map(is_alive, family)), "nobody outlives the child")
        wait_until(lambda: len(below(delegated)) == 2, "its cgroup is removed")


def test_leftovers_of_a_job_are_killed_and_the_child_goes_on(site: Site, delegated: Path) -> None:
    with worker_in(delegated, site, procs=1) as worker:
        worker.wait_until_running()
        (child,) = worker.children()
        assert site.result("family") == "left a family"
        family = [entry["process"] for entry in worker.ledger.entries("process")]
        wait_until(lambda: not any(map(is_alive, family)), "they are killed")
        assert worker.wait_for_event("leftovers_found")["names"]
        assert worker.children() == [child]


def test_replaced_and_reloaded_children_leave_no_cgroup_behind(site: Site, delegated: Path) -> None:
    with worker_in(delegated, site, options=["--max-jobs-per-child", "1"]) as worker:
        worker.wait_until_running()
        for _ in range(5):
            site.result("ok")
        worker.signal(signal.SIGHUP)
        worker.wait_for_event("reloaded")
        worker.wait_for_event("child_ready", generation=2, count=2)
        children = worker.wait_for_children("idle", 2)
        wait_until(
            lambda: below(delegated) == sorted(["supervisor", *(cgroup_of(pid, delegated).name for pid in children)]),
            "only the cgroups of those that live",
        )
        check_only_its_own(worker)


def test_supervisor_that_was_started_in_the_leaf_stays_there(site: Site, delegated: Path) -> None:
    """As with systemd's DelegateSubgroup=supervisor."""
    leaf = delegated / "supervisor"
    leaf.mkdir()
    with worker_in(leaf, site, procs=1) as worker:
        worker.wait_until_running()
        assert worker.wait_for_event("cgroup_delegated")["directory"] == str(delegated)
        assert place_of(worker.pid).endswith(f"{delegated.name}/supervisor")
        (child,) = worker.children()
        assert below(delegated) == [f"child-0-{child}", "supervisor"]


# --- kills --------------------------------------------------------------------------------------------------------


def test_deadline_kills_all_that_is_in_the_cgroup(site: Site, delegated: Path) -> None:
    """A process that is below no child shows that the kernel has done it: nobody who looks through /proc finds it."""
    with worker_in(delegated, site, options=["--abort-grace", "200ms"], procs=1) as worker, ExitStack() as stack:
        worker.wait_until_running()
        (child,) = worker.children()
        own = cgroup_of(child, delegated)
        job = site.add("family", then="spin", fields={"timeout_seconds": 1})
        family = [entry["process"] for entry in worker.ledger.wait_for("process", 6)]
        stranger = stack.enter_context(stranger_in(own))
        assert "timed out" in site.end(job)["last_error"]
        assert stranger.wait() == -signal.SIGKILL
        assert not any(map(is_alive, family)), "a failure is reported when the family is dead"
        assert worker.wait_for_event("child_killed", pid=child)["descendants"] == 7
        wait_until(lambda: not own.exists(), "its cgroup is removed")
        site.check_slots(worker, 1)


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_child_that_dies_by_itself_takes_its_cgroup_along(site: Site, delegated: Path, how: str) -> None:
    with worker_in(delegated, site, procs=1) as worker, ExitStack() as stack:
        worker.wait_until_running()
        (child,) = worker.children()
        own = cgroup_of(child, delegated)
        stranger = stack.enter_context(stranger_in(own))
        job = site.add("family", then=how)
        assert "without an outcome" in site.end(job)["last_error"]
        assert stranger.wait() == -signal.SIGKILL
        assert not any(is_alive(entry["process"]) for entry in worker.ledger.entries("process"))
        assert worker.wait_for_event("orphans_killed")["count"] == 7
        wait_until(lambda: not own.exists(), "its cgroup is removed")


def test_second_signal_kills_all_families_by_their_cgroups(site: Site, delegated: Path) -> None:
    with worker_in(delegated, site) as worker, ExitStack() as stack:
        worker.wait_until_running()
        strangers = [stack.enter_context(stranger_in(cgroup_of(child, delegated))) for child in worker.children()]
        site.add("ignore_signals")
        worker.ledger.wait_for("start")
        worker.signal(signal.SIGTERM)
        worker.wait_for_event("phase_changed", phase="draining")
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        assert [stranger.wait() for stranger in strangers] == [-signal.SIGKILL] * 2
    assert below(delegated) == []


def test_cgroups_that_a_handler_has_made_are_killed_and_removed_too(site: Site, delegated: Path) -> None:
    with worker_in(delegated, site, procs=1) as worker, ExitStack() as stack:
        worker.wait_until_running()
        (child,) = worker.children()
        own = cgroup_of(child, delegated)
        (own / "a/b").mkdir(parents=True)
        stranger = stack.enter_context(stranger_in(own / "a/b"))
        assert "SIGKILL" in site.error("kill_self", signal=int(signal.SIGKILL))
        assert stranger.wait() == -signal.SIGKILL
        wait_until(lambda: not own.exists(), "all of it is removed")


# --- an earlier life ----------------------------------------------------------------------------------------------


def test_next_start_kills_and_removes_what_a_killed_supervisor_has_left(
    site: Site, delegated: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        with worker_in(delegated, site, state_dir=tmp_path / "state") as worker:
            worker.wait_until_running()
            old = [cgroup_of(child, delegated) for child in worker.children()]
            stranger = stack.enter_context(stranger_in(old[0]))
            worker.kill()
        assert set(below(delegated)) >= {cgroup.name for cgroup in old}
        # Where a controller is still enabled for others, nobody can begin in the directory itself.
        with worker_in(delegated / "supervisor", site, state_dir=tmp_path / "state") as worker:
            worker.wait_until_running()
            assert stranger.wait() == -signal.SIGKILL
            assert worker.wait_for_event("survivors_killed")["count"] >= 1
            names = {"supervisor", *(cgroup_of(child, delegated).name for child in worker.children())}
            wait_until(lambda: set(below(delegated)) == names, "only those of this life")
    assert below(delegated) == []


def test_second_supervisor_in_a_directory_leaves_the_first_ones_children_alone(site: Site, delegated: Path) -> None:
    with worker_in(delegated, site, procs=1) as first:
        first.wait_until_running()
        child = cgroup_of(first.children()[0], delegated)
        # Where the first has enabled a controller, nobody can begin in the directory itself.
        with worker_in(delegated / "supervisor", site, procs=1) as second:
            second.wait_until_running()
            assert (
                second.wait_for_event("cgroup_failed")["reason"]
                == f"{delegated} cannot be used: another supervisor uses it"
            )
            assert below(delegated) == [child.name, "supervisor"]
            assert site.result("ok")
        assert child.exists()
        assert first.children() == [int(child.name.rpartition("-")[2])]


# --- what cannot be had -------------------------------------------------------------------------------------------


def test_cgroup_that_is_not_delegated_is_left_alone_without_a_word(site: Site) -> None:
    with own_cgroup() as cgroup, worker_in(cgroup, site, procs=1) as worker:
        worker.wait_until_running()
        assert site.result("ok")
        assert below(cgroup) == []
        assert {place_of(pid) for pid in (worker.pid, *worker.children())} == {place_of(worker.pid)}
        assert worker.stop() == 0
        assert not [event for event in worker.events() if "cgroup" in event["event"]]


def test_children_go_on_without_cgroups_that_cannot_be_made(site: Site, delegated: Path) -> None:
    (delegated / "cgroup.max.descendants").write_text("2")  # the leaf, and one child
    with worker_in(delegated, site, procs=3) as worker:
        worker.wait_until_running()
        site.check_slots(worker, 3)
        (failed,) = worker.events("cgroup_failed")
        assert failed["reason"] == "no cgroup can be made for a child: Resource temporarily unavailable"
        assert len(below(delegated)) == 2
        alone = [pid for pid in worker.children() if "child-" not in place_of(pid)]
        assert len(alone) == 2
        job = site.add("family", then="spin", fields={"timeout_seconds": 1})
        assert "timed out" in site.end(job)["last_error"]
        assert not any(is_alive(entry["process"]) for entry in worker.ledger.entries("process"))


UNABLE = """
from spooled_supervisor import cgroups
from tests.support.apps.modes import app

def join(directory):
    raise OSError(16, "Device or resource busy")

cgroups.join = join
"""


def test_child_that_cannot_join_goes_on_and_is_killed_with_its_family_all_the_same(
    site: Site, delegated: Path, tmp_path: Path
) -> None:
    (tmp_path / "unable.py").write_text(UNABLE)
    options = ["--abort-grace", "200ms"]
    with worker_in(delegated, site, options=options, app="unable", cwd=tmp_path) as worker:
        worker.wait_until_running()
        (failed,) = worker.events("cgroup_failed")
        assert failed["reason"] == "a child cannot join its cgroup: Device or resource busy"
        wait_until(lambda: below(delegated) == ["supervisor"], "what nobody has joined is removed")
        job = site.add("family", then="spin", fields={"timeout_seconds": 1})
        assert "timed out" in site.end(job)["last_error"]
        assert not any(is_alive(entry["process"]) for entry in worker.ledger.entries("process"))


# --- memory -------------------------------------------------------------------------------------------------------


def test_memory_limit_without_the_controller_is_watched(site: Site, delegated: Path) -> None:
    if has_memory(delegated):
        pytest.skip("the memory controller can be had here")
    with worker_in(delegated, site, options=["--child-memory-limit", "64M"], procs=1) as worker:
        worker.wait_until_running()
        error = site.error("exhaust_memory")
        assert error == f"the job needs more memory than --child-memory-limit {64 * MIB} bytes allows"
        assert worker.wait_for_event("child_killed")["reason"] == "memory"


def test_kernel_enforces_the_memory_limit_for_the_whole_family(site: Site, delegated: Path) -> None:
    if not has_memory(delegated):
        pytest.skip("the memory controller cannot be had below our cgroup (version 1 has it, or it is not delegated)")
    with worker_in(delegated, site, options=["--child-memory-limit", "64M"]) as worker:
        worker.wait_until_running()
        neighbour = site.add("spin", seconds=3.0)
        beside = worker.ledger.wait_for("start", job=neighbour)[0]["pid"]
        error = site.error("exhaust_memory")
        # A process that dies with its group may be counted for itself and for the group (mm/oom_kill.c).
        text = f"the job needs more memory than --child-memory-limit {64 * MIB} bytes allows; the kernel killed it"
        assert re.fullmatch(rf"{text} \(oom_kill 0 -> [12]\)", error)
        assert not worker.events("child_killed"), "it was not the watch"
        exited = worker.wait_for_event("child_exited", reason="memory")
        assert "its own memory limit was hit" in exited["cause"]
        assert site.end(neighbour)["status"] == "completed"
        assert beside in worker.children()
        assert worker.wait_for_event("job_failed")["kind"] == "failed"
        of_helper = site.error("exhaust_memory", helper=True)
        assert of_helper.startswith(text), "what it starts counts, and dies with it"


@pytest.mark.parametrize("is_delegated", [True, False])
def test_check_says_how_the_kernel_can_be_made_to_enforce_the_limit(tmp_path: Path, is_delegated: bool) -> None:
    options = ["--app", "modes", "--api-url", "http://127.0.0.1:9", "--child-memory-limit", "64M"]
    with own_cgroup(is_delegated=is_delegated) as cgroup:
        line = [*inside(cgroup), sys.executable, "-m", "spooled_supervisor", "check", *options]
        done = subprocess.run(line, cwd=APPS, env=environment("sp_test_x"), capture_output=True, text=True, check=False)
        assert (done.returncode, below(cgroup)) == (0, [])
        assert ("`export systemd-child-cgroups`" in done.stdout) != is_delegated


# --- the module, in a process of its own ------------------------------------------------------------------------


def run_in(cgroup: Path, code: str, *prefix: str) -> Any:
    """What a Python program that begins in this cgroup and ends in `say(...)` said."""
    program = f"import json, os\ndef say(*what): print(json.dumps(what))\n{code}"
    line = [*inside(cgroup), *prefix, sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(line, cwd=TREE, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


OPEN = """
from spooled_supervisor import cgroups, childcgroups, events, pressure, resources
bus = events.Events()
told = []
bus.subscribe(lambda event: told.append([event.name, getattr(event, "reason", "")]))
groups = childcgroups.ChildCgroups(bus)
"""


def test_figures_are_those_of_the_whole_family_after_the_move(delegated: Path) -> None:
    """Pressure, limits and out-of-memory kills are counted where the children are, too."""
    looks = "(str(cgroups.unified_cgroup()[0]), [str(d) for d in cgroups.memory_cgroup()], resources.memory_limit())"
    before, after, leaf = run_in(
        delegated,
        f"{OPEN}before = {looks}\ngroups.open()\nafter = {looks}\n"
        "say(before, after, open('/proc/self/cgroup').read())\ngroups.close()",
    )
    assert "/supervisor" in leaf
    assert before == after
    assert before[0] == str(delegated)


def test_directory_is_as_it_was_found_when_it_is_closed(delegated: Path) -> None:
    told, while_open, after = run_in(
        delegated,
        f"{OPEN}groups.open()\ngroups.make(3, 4711)\nwhile_open = sorted(d.name for d in groups._directory.iterdir()"
        " if d.is_dir())\ndirectory = str(groups._directory)\ngroups.close()\n"
        "say([name for name, _ in told], while_open, sorted(e.name for e in os.scandir(directory) if e.is_dir()))",
    )
    assert told == ["cgroup_delegated"]
    assert while_open == ["child-3-4711", "supervisor"]
    assert after == []
    assert (delegated / "cgroup.subtree_control").read_text().strip() == ""


def test_delegation_to_another_user_counts_without_a_mark() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs to become another user")
    nobody = 65534
    with own_cgroup() as cgroup:
        for name in ("", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads"):
            os.chown(cgroup / name, nobody, nobody)
        become = f"os.setgid({nobody})\nos.setuid({nobody})\n"
        found, told, names = run_in(
            cgroup,
            f"{OPEN}{become}found = str(cgroups.delegated())\ngroups.open()\nmade = groups.make(0, 1)\n"
            "names = sorted(e.name for e in os.scandir(found) if e.is_dir())\n"
            "groups.close()\nsay(found, told, names)",
        )
        assert found == str(cgroup)
        assert told == [["cgroup_delegated", ""]]
        assert names == ["child-0-1", "supervisor"]
        assert below(cgroup) == []
        found, told = run_in(cgroup, f"{OPEN}groups.open()\nsay(str(cgroups.delegated()), told)")
        assert (found, told) == ("None", []), "root is not the one to whom it was given"
        os.setxattr(cgroup, "user.invocation_id", b"0123456789abcdef0123456789abcdef")
        found, _ = run_in(cgroup, f"{OPEN}{become}say(str(cgroups.delegated()), 0)")
        assert found == "None", "a unit of a systemd that has not delegated it"


def test_cgroup_on_a_read_only_mount_is_left_alone_without_a_word(delegated: Path) -> None:
    """Most containers: marked by the runtime's systemd, and mounted read-only."""
    mount = next(str(parent) for parent in delegated.parents if os.path.ismount(parent))
    remount = f'mount --bind "{mount}" "{mount}" && mount -o remount,bind,ro "{mount}" && exec "$@"'
    own = ("unshare", "--mount", "sh", "-c", remount, "sh")
    if subprocess.run([*own, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("may not have mounts of its own")
    assert run_in(delegated, f"{OPEN}groups.open()\nsay(str(cgroups.delegated()), told)", *own) == ["None", []]
    assert below(delegated) == []


def test_mark_is_the_one_that_systemd_leaves() -> None:
    """`mark` here and `cgroups.MARKS` there are the same; tests/systemd shows that systemd's is, too."""
    with own_cgroup() as cgroup:
        asked = "from spooled_supervisor import cgroups\nsay(str(cgroups.delegated()))"
        assert run_in(cgroup, asked) == ["None"]
        mark(cgroup)
        assert run_in(cgroup, asked) == [str(cgroup)]
