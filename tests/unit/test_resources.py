"""Figures from files as kernels of both kinds write them, and CPU shares from histories."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from spooled_supervisor import resources
from spooled_supervisor.resources import FamilyUsage, OomCounter, memory_limit

GIB = 1 << 30
V1_UNLIMITED = 9223372036854771712
V2_MOUNT = "29 22 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot"
V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 master:2 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""

Plant = Callable[[dict[str, str | int]], Path]


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


def v2(**files: str | int) -> dict[str, str | int]:
    base = "sys/fs/cgroup/system.slice"
    return {
        "proc/self/cgroup": "0::/system.slice/spooled.service",
        "proc/self/mountinfo": V2_MOUNT,
        f"{base}/memory.max": files.get("slice_max", "max"),
        f"{base}/spooled.service/memory.max": files.get("max", "max"),
        f"{base}/spooled.service/memory.events": f"low 0\nhigh 0\nmax 35\noom 1\noom_kill {files.get('kills', 0)}\n"
        "oom_group_kill 0",
    }


def v1(**files: str | int) -> dict[str, str | int]:
    base = "sys/fs/cgroup/memory"
    return {
        "proc/self/cgroup": "9:name=systemd:/x\n4:memory:/system.slice/a.service\n2:cpu,cpuacct:/\n0::/other",
        "proc/self/mountinfo": V1_MOUNTS,
        f"{base}/memory.limit_in_bytes": V1_UNLIMITED,
        f"{base}/system.slice/memory.limit_in_bytes": files.get("slice_max", V1_UNLIMITED),
        f"{base}/system.slice/a.service/memory.limit_in_bytes": files.get("max", V1_UNLIMITED),
        f"{base}/system.slice/a.service/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n"
        f"oom_kill {files.get('kills', 0)}",
    }


@pytest.mark.parametrize("version", [v1, v2])
@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"max": 2 * GIB}, 2 * GIB),
        ({"slice_max": GIB}, GIB),
        ({"max": 2 * GIB, "slice_max": GIB}, GIB),
        ({"max": GIB, "slice_max": 2 * GIB}, GIB),
    ],
)
def test_limit_is_the_strictest_above_us(
    plant: Plant, version: Callable[..., dict[str, str | int]], files: dict[str, int], limit: int | None
) -> None:
    assert memory_limit(plant(version(**files))) == limit


@pytest.mark.parametrize("version", [v1, v2])
def test_oom_kills_are_counted_and_told(plant: Plant, version: Callable[..., dict[str, str | int]]) -> None:
    counter = OomCounter(plant(version(kills=3, max=GIB)))
    before = counter.read()
    plant(version(kills=4, max=GIB))
    after = counter.read()
    assert (before, after) == (3, 4)
    assert counter.words(before, after) == "the memory limit of the service was hit (oom_kill 3 -> 4)"
    plant(version(kills=4))
    assert counter.words(before, after) == "the machine ran out of memory (oom_kill 3 -> 4)"


@pytest.mark.parametrize(("before", "after"), [(None, 4), (3, None), (None, None), (4, 4), (4, 3)])
def test_no_proof_no_words(plant: Plant, before: int | None, after: int | None) -> None:
    assert OomCounter(plant(v2(max=GIB))).words(before, after) == ""


def test_without_proc_and_cgroup_nothing_is_known_and_nothing_raised(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None
    assert OomCounter(tmp_path).read() is None


def test_old_or_root_cgroup_has_no_count(plant: Plant) -> None:
    files = v2() | {"sys/fs/cgroup/system.slice/spooled.service/memory.events": "low 0\noom 1"}
    assert OomCounter(plant(files)).read() is None


# --- CPU: histories of (now, CPU seconds so far) and the percentage shown --------------------------------------------

CPU_HISTORIES: dict[str, tuple[float, list[tuple[float, float, float]]]] = {
    "the first figure is 0": (1, [(100, 5000, 0.0)]),
    "idle": (1, [(0, 7, 0.0), (10, 7, 0.0), (20, 7, 0.0)]),
    "half of one CPU": (1, [(0, 7, 0.0), (10, 12, 50.0), (20, 17, 50.0)]),
    "all of four CPUs": (4, [(0, 0, 0.0), (10, 40, 100.0)]),
    "one of four CPUs": (4, [(0, 0, 0.0), (10, 10, 25.0)]),
    "a CPU quota below one": (0.5, [(0, 0, 0.0), (10, 2.5, 50.0)]),
    "more than there is": (1, [(0, 0, 0.0), (10, 1000, 100.0)]),
    # A child with 3600 s dies: its time is nowhere, then it is in ours.
    "dead and not yet reaped": (1, [(0, 3600, 0.0), (10, 3605, 50.0), (20, 7, 50.0), (30, 3615, 50.0)]),
    "reaped between two readings": (1, [(0, 3600, 0.0), (10, 3605, 50.0), (20, 3605, 0.0)]),
    # Nobody waited for it, so its time never comes back.
    "lost": (1, [(0, 3600, 0.0), (10, 3605, 50.0), (20, 7, 50.0), (30, 12, 0.0), (40, 17, 50.0)]),
    "twice at the same instant": (1, [(0, 0, 0.0), (10, 5, 50.0), (10, 5, 50.0), (20, 10, 50.0)]),
    "no CPU at all": (0, [(0, 0, 0.0), (10, 5, 100.0)]),
}


@pytest.mark.parametrize("name", CPU_HISTORIES)
def test_cpu_percent(name: str) -> None:
    cpus, history = CPU_HISTORIES[name]
    readings = iter([cpu_s for _, cpu_s, _ in history])

    def read(_: Iterable[int]) -> float:
        return next(readings)

    usage = FamilyUsage(read_cpu_s=read)
    assert [usage.cpu_percent(now, [], cpus) for now, _, _ in history] == [percent for _, _, percent in history]


# --- memory ----------------------------------------------------------------------------------------------------------


def test_memory_percent_is_of_the_limit(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "own_memory", lambda: GIB // 4)
    monkeypatch.setattr(resources, "total_memory", lambda: 8 * GIB)
    usage = FamilyUsage(plant(v2(max=GIB)))
    assert usage.memory_limit() == GIB
    assert usage.memory_percent({}) == 25.0
    assert usage.memory_percent({1: GIB // 4, 2: GIB // 8}) == 62.5
    assert usage.memory_percent({1: 5 * GIB}) == 100.0


def test_machine_is_the_limit_above_all_others(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "total_memory", lambda: 8 * GIB)
    usage = FamilyUsage(plant(v1(max=64 * GIB)))
    assert usage.memory_limit() == 8 * GIB
    plant(v1(max=2 * GIB))
    assert usage.memory_limit() == 2 * GIB, "a limit may be changed while we run"


def test_own_figures_are_real() -> None:
    assert 1 << 20 < resources.own_memory() < resources.total_memory()
    assert resources.pss_uss(0) is None
    host = resources.read_host()
    assert host.memory_percent is None or 0 <= host.memory_percent <= 100
