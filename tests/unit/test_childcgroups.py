"""The layout below a delegated directory, on files that stand for the kernel's; tests/e2e has a real hierarchy."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import pytest

from spooled_supervisor import childcgroups
from spooled_supervisor.childcgroups import ChildCgroup, ChildCgroups
from spooled_supervisor.events import CgroupDelegated, CgroupFailed, Events
from spooled_supervisor.family import Swept
from tests.support.fakes import Recorded

MIB = 1 << 20
FILES = ("cgroup.procs", "memory.oom.group", "memory.swap.max", "memory.max", "memory.current", "memory.stat")
"""What the kernel puts into a new directory, as far as we care."""


class Hierarchy:
    """A directory that behaves like a delegated cgroup: what is made below it has files, what is empty can be removed.

    `busy`: names of those that cannot be. `full`: no more can be made.
    """

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.joined: list[str] = []
        self.killed: list[str] = []
        self.busy: set[str] = set()
        self.full = False
        self.files = list(FILES)
        self._mkdir, self._rmdir = os.mkdir, os.rmdir
        monkeypatch.setattr(os, "mkdir", self.mkdir)
        monkeypatch.setattr(os, "rmdir", self.rmdir)
        monkeypatch.setattr(childcgroups, "delegated", lambda: self.path)
        monkeypatch.setattr(childcgroups, "join", self.join)
        monkeypatch.setattr(childcgroups, "kill_cgroup", self.kill)
        self.write("cgroup.controllers", "cpu memory pids")
        self.write("cgroup.subtree_control", "")

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)

    def read(self, name: str) -> str:
        return (self.path / name).read_text()

    def mkdir(self, path: Path, mode: int = 0o777) -> None:
        if self.full:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self._mkdir(path, mode)
        for name in self.files:
            Path(path, name).touch()

    def rmdir(self, path: Path | str) -> None:
        if Path(path).name in self.busy:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        for file in Path(path).glob("*.*"):  # the kernel's files go with the directory
            file.unlink()
        self._rmdir(path)

    def join(self, directory: Path) -> None:
        self.joined.append(directory.name)

    def kill(self, path: Path) -> Swept:
        self.killed.append(path.name)
        self.busy.discard(path.name)
        return Swept()

    @property
    def names(self) -> list[str]:
        return sorted(path.name for path in self.path.iterdir() if path.is_dir())


class Scene:
    """Cgroups of children there, and what they tell."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self.hierarchy = hierarchy
        self.events = Events()
        self.recorded = Recorded(self.events)

    def open(self, memory_limit_bytes: int | None = None) -> ChildCgroups:
        groups = ChildCgroups(self.events, memory_limit_bytes=memory_limit_bytes)
        groups.open()
        return groups

    def make(self, memory_limit_bytes: int | None = None) -> tuple[ChildCgroups, ChildCgroup]:
        groups = self.open(memory_limit_bytes)
        made = groups.make(3, 4711)
        assert made is not None
        return groups, made


@pytest.fixture
def hierarchy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hierarchy:
    return Hierarchy(tmp_path, monkeypatch)


@pytest.fixture
def scene(hierarchy: Hierarchy) -> Scene:
    return Scene(hierarchy)


# --- the directory ----------------------------------------------------------------------------------------------------


def test_without_delegation_there_is_none_and_nothing_is_said(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(childcgroups, "delegated", lambda: None)
    groups = scene.open()
    assert (groups.make(0, 1), groups.leftovers()) == (None, [])
    groups.close()
    assert (scene.recorded.all, scene.hierarchy.names) == ([], [])


def test_before_it_is_opened_there_is_none() -> None:
    groups = ChildCgroups(Events())
    assert (groups.make(0, 1), groups.leftovers()) == (None, [])
    groups.close()


def test_open_moves_us_to_the_leaf_and_enables_memory(scene: Scene, hierarchy: Hierarchy) -> None:
    groups = scene.open()
    assert (hierarchy.joined, hierarchy.names) == (["supervisor"], ["supervisor"])
    assert hierarchy.read("cgroup.subtree_control") == "+memory"
    assert scene.recorded.all == [CgroupDelegated(str(hierarchy.path), True)]
    groups.close()


def test_without_the_memory_controller_there_is_no_word_of_it(scene: Scene, hierarchy: Hierarchy) -> None:
    hierarchy.write("cgroup.controllers", "hugetlb")
    groups, made = scene.make(MIB)
    groups.begin_job(made)
    assert not made.has_memory
    assert (made.path / "memory.max").read_text() == (made.path / "memory.oom.group").read_text() == ""
    assert scene.recorded.all == [CgroupDelegated(str(hierarchy.path), False)]
    groups.close()


def test_memory_that_cannot_be_enabled_is_told_and_children_have_cgroups_without(
    scene: Scene, hierarchy: Hierarchy
) -> None:
    (hierarchy.path / "cgroup.subtree_control").unlink()
    groups, made = scene.make()
    assert not made.has_memory
    assert scene.recorded.all == [
        CgroupFailed("memory cannot be limited: No such file or directory"),
        CgroupDelegated(str(hierarchy.path), False),
    ]
    groups.close()


def test_a_leaf_that_cannot_be_joined_is_told_and_children_get_none(
    scene: Scene, hierarchy: Hierarchy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(directory: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(childcgroups, "join", refuse)
    groups = scene.open()
    assert groups.make(0, 1) is None
    assert scene.recorded.all == [CgroupFailed(f"{hierarchy.path} cannot be used: Permission denied")]
    groups.close()


def test_a_directory_has_one_supervisor_until_that_closes_it(scene: Scene, hierarchy: Hierarchy) -> None:
    first = scene.open()
    second = scene.open()
    assert scene.recorded.all[1:] == [CgroupFailed(f"{hierarchy.path} cannot be used: another supervisor uses it")]
    assert second.make(0, 1) is None
    second.close()
    first.close()
    third = scene.open()
    assert third.make(0, 1) is not None
    third.close()


def test_close_leaves_the_directory_as_it_was(scene: Scene, hierarchy: Hierarchy) -> None:
    groups, _ = scene.make()
    groups.close()
    assert (hierarchy.names, hierarchy.joined) == ([], ["supervisor", hierarchy.path.name])
    assert hierarchy.read("cgroup.subtree_control") == "-memory"
    assert groups.make(0, 2) is None


def test_close_kills_whoever_is_left_and_gives_up_after_a_while(
    scene: Scene, hierarchy: Hierarchy, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = scene.open()
    for pid in (1, 2):
        groups.make(0, pid)
    hierarchy.busy = {"child-0-1", "child-0-2", "supervisor"}
    monkeypatch.setattr(hierarchy, "kill", lambda path: hierarchy.busy.discard("child-0-1"))
    monkeypatch.setattr(childcgroups, "kill_cgroup", hierarchy.kill)
    clock = itertools.count(0.0, childcgroups.CLOSE_LIMIT_S / 4)
    monkeypatch.setattr(childcgroups, "now", lambda: next(clock))
    groups.close()
    assert hierarchy.names == ["child-0-2", "supervisor"]


def test_leftovers_are_those_with_the_names_of_children(scene: Scene, hierarchy: Hierarchy) -> None:
    """systemd's own (.control), a handler's and an administrator's are not ours."""
    groups = scene.open()
    for name in ("child-0-12", "child-7-8", "child-0", "child-0-12x", ".control", "mine"):
        (hierarchy.path / name).mkdir()
    assert [cgroup.path.name for cgroup in groups.leftovers()] == ["child-0-12", "child-7-8"]
    groups.close()
    assert hierarchy.names == [".control", "child-0", "child-0-12x", "mine"]


# --- one child --------------------------------------------------------------------------------------------------------


def test_a_family_dies_together(scene: Scene) -> None:
    groups, made = scene.make()
    assert made.path.name == "child-3-4711"
    assert (made.path / "memory.oom.group").read_text() == "1"
    assert (made.path / "memory.swap.max").read_text() == "", "without a limit it may be swapped"
    groups.begin_job(made)
    assert (made.path / "memory.max").read_text() == ""
    groups.close()


@pytest.mark.parametrize(
    ("stat", "current", "limit"),
    [
        ("anon 0\nfile 0\nkernel 0\nshmem 0", 0, 64 * MIB),
        (f"anon {5 * MIB}\nfile {MIB}\nkernel {2 * MIB}\nshmem {MIB}", 8 * MIB, 72 * MIB),
        # the leavings of earlier jobs are not this one's fault
        (f"anon {100 * MIB}\nfile 0\nkernel 0\nshmem 0", 100 * MIB, 164 * MIB),
        # file cache can be given back, but not now
        (f"anon {MIB}\nfile {500 * MIB}\nkernel 0\nshmem 0", 501 * MIB, 501 * MIB),
        # a kernel that does not count itself (before 5.18)
        (f"anon {MIB}\nfile 0\nshmem 0", 2 * MIB, 65 * MIB),
    ],
    ids=["nothing", "some of each", "a leak", "much cache", "an old kernel"],
)
def test_a_job_may_grow_its_child_by_the_limit(scene: Scene, stat: str, current: int, limit: int) -> None:
    groups, made = scene.make(64 * MIB)
    assert (made.path / "memory.swap.max").read_text() == "0"
    (made.path / "memory.stat").write_text(stat)
    (made.path / "memory.current").write_text(str(current))
    groups.begin_job(made)
    assert (made.path / "memory.max").read_text() == str(limit)
    groups.close()


def test_a_kernel_without_swap_accounting_limits_memory_all_the_same(scene: Scene, hierarchy: Hierarchy) -> None:
    hierarchy.files.remove("memory.swap.max")
    groups, made = scene.make(MIB)
    groups.begin_job(made)
    assert (made.path / "memory.max").read_text() == str(MIB)
    groups.close()


@pytest.mark.parametrize(
    ("events", "kills", "own"),
    [
        ("low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0", 0, False),
        ("low 0\nhigh 0\nmax 35\noom 1\noom_kill 2\noom_group_kill 1", 2, True),
        ("low 0\nhigh 0\nmax 0\noom 0\noom_kill 1\noom_group_kill 1", 1, False),
        ("low 0\nhigh 0\nmax 35\noom 1\noom_kill 0\noom_group_kill 0", 0, False),
        ("", 0, False),
    ],
    ids=["in peace", "its own limit", "a limit above it", "nobody to kill", "no file"],
)
def test_out_of_memory_kills_and_whose_limit_it_was(scene: Scene, events: str, kills: int, own: bool) -> None:
    groups, made = scene.make()
    if events:
        (made.path / "memory.events").write_text(events)
    assert (made.oom_kills(), made.was_killed_by_its_limit()) == (kills, own)
    groups.close()


def test_what_fails_is_told_once(scene: Scene, hierarchy: Hierarchy) -> None:
    groups = scene.open()
    hierarchy.full = True
    assert (groups.make(0, 7), groups.make(1, 8)) == (None, None)
    hierarchy.full = False
    assert groups.make(0, 9) is not None
    hierarchy.full = True
    assert groups.make(1, 10) is None
    told = CgroupFailed("no cgroup can be made for a child: Resource temporarily unavailable")
    assert scene.recorded.all[1:] == [told]
    groups.failed("a child cannot join its cgroup", "Permission denied")
    assert scene.recorded.all[2:] == [CgroupFailed("a child cannot join its cgroup: Permission denied")]
    groups.close()


def test_a_limit_that_cannot_be_set_is_told_and_stops_nothing(scene: Scene) -> None:
    groups, made = scene.make(MIB)
    (made.path / "memory.max").unlink()
    groups.begin_job(made)
    reason = "the memory of a child cannot be limited: No such file or directory"
    assert scene.recorded.all[1:] == [CgroupFailed(reason)]
    groups.close()


def test_a_cgroup_is_removed_with_those_that_a_handler_has_made_below(scene: Scene) -> None:
    groups, made = scene.make()
    (made.path / "a/b").mkdir(parents=True)
    assert made.remove()
    assert not made.path.exists()
    groups.close()


def test_a_cgroup_in_which_somebody_is_has_to_be_tried_again(scene: Scene, hierarchy: Hierarchy) -> None:
    groups, made = scene.make()
    hierarchy.busy.add(made.path.name)
    assert not made.remove()
    hierarchy.busy.clear()
    assert made.remove()
    assert made.remove(), "it is gone"
    groups.close()


def test_a_cgroup_that_never_can_be_removed_is_given_up(scene: Scene) -> None:
    groups, made = scene.make()

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rmdir", refuse)
        assert made.remove()
    groups.close()
