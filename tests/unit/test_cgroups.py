"""Where we are among control groups, and what counts as delegated, from files as kernels and systemd write them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from spooled_supervisor.cgroups import LEAF, delegated, join, memory_cgroup, read_fields, read_number, unified_cgroup
from spooled_supervisor.pressure import Pressure
from spooled_supervisor.resources import FamilyUsage, OomCounter, memory_limit

V2_MOUNT = "29 22 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot"
V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 master:2 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""

Plant = Callable[[dict[str, str | int]], Path]
GIB = 1 << 30
SERVICE = "system.slice/a.service"
USER = 4711
OTHER = 4712


@pytest.fixture
def plant(tmp_path: Path) -> Plant:
    """A root directory with these files."""

    def grow(files: dict[str, str | int]) -> Path:
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{content}\n")
        return tmp_path

    return grow


# --- directories ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cgroup", "mountinfo", "directories"),
    [
        ("0::/a/b", V2_MOUNT, ["a/b", "a", ""]),
        ("0::/", V2_MOUNT, [""]),
        # hybrid: memory is v1, whatever v2 says
        ("4:memory:/m\n0::/u", V1_MOUNTS, ["memory/m", "memory"]),
        # hybrid without memory in v1
        ("2:cpu,cpuacct:/\n0::/u/v", V1_MOUNTS, ["unified/u/v", "unified/u", "unified"]),
        # a container that sees the host's paths, and its own part of the hierarchy only
        ("0::/docker/7f/x", V2_MOUNT.replace(" / /sys", " /docker/7f /sys"), ["x", ""]),
        ("0::/docker/7f", V2_MOUNT.replace(" / /sys", " /docker/7f /sys"), [""]),
        ("0::/docker/7f9", V2_MOUNT.replace(" / /sys", " /docker/7f /sys"), [""]),
        # moved into a cgroup namespace from outside
        ("0::/../../x", V2_MOUNT, [""]),
        ("0::/a..b", V2_MOUNT, ["a..b", ""]),
        # names with blanks, a colon, a backslash
        ("0::/a:b c", V2_MOUNT, ["a:b c", ""]),
        # nothing to see
        ("", V2_MOUNT, [""]),
        ("0::/a", "", []),
        ("4:memory:/m\n0::/a", V2_MOUNT, []),
        ("garbage", "garbage\n1 2\n - \n", []),
    ],
)
def test_cgroup_directories(plant: Plant, cgroup: str, mountinfo: str, directories: list[str]) -> None:
    root = plant({"proc/self/cgroup": cgroup, "proc/self/mountinfo": mountinfo})
    assert memory_cgroup(root) == [root / "sys/fs/cgroup" / name for name in directories]


def test_mount_point_with_a_blank(plant: Plant) -> None:
    mountinfo = V2_MOUNT.replace("/sys/fs/cgroup", "/my\\040cgroup\\134s")
    root = plant({"proc/self/cgroup": "0::/a", "proc/self/mountinfo": mountinfo})
    assert memory_cgroup(root) == [root / "my cgroup\\s" / "a", root / "my cgroup\\s"]


def test_hybrid_has_a_directory_of_each_version(plant: Plant) -> None:
    root = plant({"proc/self/cgroup": "4:memory:/m\n0::/u/v", "proc/self/mountinfo": V1_MOUNTS})
    assert memory_cgroup(root)[0] == root / "sys/fs/cgroup/memory/m"
    assert unified_cgroup(root)[0] == root / "sys/fs/cgroup/unified/u/v"


def test_without_proc_there_is_no_directory(tmp_path: Path) -> None:
    assert (memory_cgroup(tmp_path), unified_cgroup(tmp_path), delegated(tmp_path)) == ([], [], None)


@pytest.mark.parametrize(
    ("text", "fields"),
    [("low 0\noom_kill 3\n", {"low": 0, "oom_kill": 3}), ("", {}), ("a b\nc 1\nd\n", {"c": 1})],
)
def test_fields_of_a_file(plant: Plant, text: str, fields: dict[str, int]) -> None:
    assert read_fields(plant({"a": text}) / "a") == fields


def test_a_file_that_is_not_there_has_neither_fields_nor_number(tmp_path: Path) -> None:
    assert (read_fields(tmp_path / "a"), read_number(tmp_path / "a")) == ({}, None)


@pytest.mark.parametrize(("text", "number"), [("1048576", 1048576), ("max", None), ("", None)])
def test_number_of_a_file(plant: Plant, text: str, number: int | None) -> None:
    assert read_number(plant({"a": text}) / "a") == number


def test_to_join_is_to_write_a_zero(plant: Plant) -> None:
    root = plant({"a/cgroup.procs": ""})
    join(root / "a")
    assert (root / "a/cgroup.procs").read_text() == "0"
    with pytest.raises(FileNotFoundError):
        join(root / "b")


# --- delegation -------------------------------------------------------------------------------------------------------


class Kernel:
    """A version 2 in which we are in a service; who owns it, and what marks it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.top = root / "sys/fs/cgroup"
        self.service = self.top / SERVICE
        self.user = 0
        self.owner = 0
        self.attributes: dict[tuple[Path, str], bytes] = {}
        self.read_only = False
        self._stat = os.stat
        monkeypatch.setattr(os, "getxattr", self.getxattr)
        monkeypatch.setattr(os, "geteuid", lambda: self.user)
        monkeypatch.setattr(os, "stat", self.stat)
        monkeypatch.setattr(os, "access", lambda path, mode: not self.read_only)
        self.move_to(SERVICE)

    def move_to(self, path: str) -> None:
        """We are there, and nobody else is anywhere."""
        files = {"proc/self/cgroup": f"0::/{path}", "proc/self/mountinfo": V2_MOUNT}
        for place in (SERVICE, f"{SERVICE}/{LEAF}"):
            files[f"sys/fs/cgroup/{place}/cgroup.procs"] = str(os.getpid()) if place == path else ""
            files[f"sys/fs/cgroup/{place}/cgroup.subtree_control"] = ""
        for name, content in files.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(f"{content}\n")

    def mark(self, name: str, value: bytes = b"1") -> None:
        self.attributes[self.service, name] = value

    def getxattr(self, path: Path, name: str) -> bytes:
        try:
            return self.attributes[path, name]
        except KeyError:
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA)) from None

    def stat(self, path: Path, **more: bool) -> os.stat_result:
        real = self._stat(path, **more)
        return os.stat_result((*real[:4], self.owner, *real[5:]))


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(tmp_path, monkeypatch)


@pytest.mark.parametrize("mark", ["user.delegate", "trusted.delegate"])
def test_a_marked_directory_is_delegated_whoever_owns_it(kernel: Kernel, mark: str) -> None:
    kernel.mark(mark)
    kernel.mark("user.invocation_id", b"0123456789abcdef0123456789abcdef")
    assert delegated(kernel.root) == kernel.service


def test_a_mark_that_says_no_is_none(kernel: Kernel) -> None:
    kernel.mark("user.delegate", b"0")
    assert delegated(kernel.root) is None


def test_that_root_may_write_is_no_delegation(kernel: Kernel) -> None:
    assert delegated(kernel.root) is None


def test_a_directory_that_was_given_to_our_user_is_delegated(kernel: Kernel) -> None:
    kernel.user = kernel.owner = USER
    assert delegated(kernel.root) == kernel.service


def test_a_directory_of_our_user_in_which_others_are_is_not(kernel: Kernel) -> None:
    """A terminal in a user's session: the shell is there, too."""
    kernel.user = kernel.owner = USER
    with (kernel.service / "cgroup.procs").open("a") as procs:
        procs.write("1\n")
    assert delegated(kernel.root) is None
    kernel.mark("user.delegate")
    assert delegated(kernel.root) == kernel.service, "a mark is for all who are in it"


def test_a_directory_of_another_user_is_not(kernel: Kernel) -> None:
    kernel.user, kernel.owner = USER, OTHER
    assert delegated(kernel.root) is None


def test_a_unit_of_a_systemd_that_marks_is_not_delegated_without_its_mark(kernel: Kernel) -> None:
    kernel.user = kernel.owner = USER
    kernel.mark("user.invocation_id", b"0123456789abcdef0123456789abcdef")
    assert delegated(kernel.root) is None


def test_what_is_read_only_is_of_no_use(kernel: Kernel) -> None:
    kernel.mark("user.delegate")
    kernel.read_only = True
    assert delegated(kernel.root) is None


def test_a_directory_that_is_only_the_nearest_we_can_see_is_not_ours(kernel: Kernel) -> None:
    kernel.mark("user.delegate")
    kernel.move_to(SERVICE + "/elsewhere")
    (kernel.root / "proc/self/mountinfo").write_text(V2_MOUNT.replace(" / /sys/fs/cgroup", f" /{SERVICE} /seen"))
    (kernel.root / "proc/self/cgroup").write_text("0::/../elsewhere\n")
    kernel.attributes[kernel.root / "seen", "user.delegate"] = b"1"
    assert unified_cgroup(kernel.root) == [kernel.root / "seen"]
    assert delegated(kernel.root) is None


def test_from_the_leaf_it_is_the_directory_above(kernel: Kernel) -> None:
    kernel.mark("user.delegate")
    kernel.move_to(f"{SERVICE}/{LEAF}")
    assert delegated(kernel.root) == kernel.service
    assert unified_cgroup(kernel.root) == [kernel.service, kernel.service.parent, kernel.top]


def test_somebody_elses_directory_of_that_name_is_a_directory_like_others(kernel: Kernel) -> None:
    kernel.move_to(f"{SERVICE}/{LEAF}")
    assert delegated(kernel.root) is None
    assert unified_cgroup(kernel.root)[0] == kernel.service / LEAF


# --- the family's figures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [SERVICE, f"{SERVICE}/{LEAF}"], ids=["before the move", "in the leaf"])
def test_figures_are_those_of_the_directory_where_the_children_are(kernel: Kernel, place: str) -> None:
    kernel.mark("user.delegate")
    kernel.move_to(place)
    psi = "some avg10={} avg60=0.00 avg300=0.00 total=1\n"
    for directory, limit, kills, percent in (
        (kernel.service, str(GIB), 3, "12.34"),
        (kernel.service / LEAF, "max", 0, "0.00"),
    ):
        (directory / "memory.max").write_text(f"{limit}\n")
        (directory / "memory.events").write_text(f"oom 1\noom_kill {kills}\n")
        (directory / "memory.pressure").write_text(psi.format(percent))
    assert memory_limit(kernel.root) == FamilyUsage(kernel.root).memory_limit() == GIB
    counter = OomCounter(kernel.root)
    assert counter.read() == 3
    assert counter.words(3, 4) == "the memory limit of the service was hit (oom_kill 3 -> 4)"
    pressure = Pressure(max_load=None, max_memory_pressure=10.0, root=kernel.root)
    assert pressure.reason(0.0) == "the memory pressure is 12.3 %, above --max-memory-pressure 10"
