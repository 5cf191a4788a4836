"""When the machine has no room for more work, by its load and by the kernel's memory pressure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spooled_supervisor.pressure import LOOK_INTERVAL_S, Pressure

V2 = "29 22 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw"
V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
PSI = "some avg10={} avg60=0.00 avg300=0.00 total=12345\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=1\n"
OWN_V2 = "sys/fs/cgroup/system.slice/a.service/memory.pressure"
OWN_V1 = "sys/fs/cgroup/memory/a.service/memory.pressure"
MACHINE = "proc/pressure/memory"

Tree = Callable[..., Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Plants files below a root; `version` says which control groups there are."""

    def plant(version: int | None = 2, **files: str) -> Path:
        groups = {
            None: {},
            1: {"proc/self/cgroup": "4:memory:/a.service\n0::/other", "proc/self/mountinfo": V1},
            2: {"proc/self/cgroup": "0::/system.slice/a.service", "proc/self/mountinfo": V2},
        }[version]
        names = {"own_v2": OWN_V2, "own_v1": OWN_V1, "machine": MACHINE}
        for name, text in {**groups, **{names[key]: text for key, text in files.items()}}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return plant


def by_load(*loads: float, limit: float = 2.0) -> Pressure:
    """One that reads these loads, one after the other."""
    readings: Iterator[float] = iter(loads)
    return Pressure(max_load=limit, max_memory_pressure=None, read_load=lambda: next(readings))


def by_memory(root: Path, limit: float = 10.0) -> Pressure:
    return Pressure(max_load=None, max_memory_pressure=limit, root=root, read_load=lambda: 1e9)


# --- load -------------------------------------------------------------------------------------------------------------


def test_without_limits_nothing_is_read_and_nothing_held_back(tmp_path: Path) -> None:
    def never() -> float:
        raise AssertionError("it was read")

    assert Pressure(max_load=None, max_memory_pressure=None, root=tmp_path, read_load=never).reason(0.0) is None


def test_a_load_above_the_limit_is_a_reason_with_both_figures() -> None:
    assert by_load(2.349).reason(0.0) == "the load is 2.35, above --max-load 2"


@pytest.mark.parametrize("load", [0.0, 1.99, 2.0])
def test_a_load_up_to_the_limit_is_none(load: float) -> None:
    assert by_load(load).reason(0.0) is None


def test_a_limit_of_zero_is_a_limit() -> None:
    assert by_load(0.01, limit=0.0).reason(0.0) == "the load is 0.01, above --max-load 0"


def test_it_is_read_once_a_second_whoever_asks() -> None:
    pressure = by_load(3.0, 1.0, 5.0)
    high = pressure.reason(100.0)
    assert high is not None
    assert [pressure.reason(100.0 + n * LOOK_INTERVAL_S / 10) for n in range(10)] == [high] * 10
    assert pressure.reason(100.0 + LOOK_INTERVAL_S) is None
    assert pressure.reason(100.5 + LOOK_INTERVAL_S) is None
    assert pressure.reason(100.0 + 2 * LOOK_INTERVAL_S) == "the load is 5.00, above --max-load 2"


def test_the_load_of_this_machine_can_be_read() -> None:
    assert Pressure(max_load=1e6, max_memory_pressure=None).reason(0.0) is None


def test_a_load_that_cannot_be_read_holds_nothing_back() -> None:
    def hidden() -> float:
        raise OSError("Load averages are unobtainable")

    assert Pressure(max_load=0.0, max_memory_pressure=None, read_load=hidden).reason(0.0) is None


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "files"),
    [
        (2, {"own_v2": PSI.format("12.34"), "machine": PSI.format("0.00")}),
        (2, {"machine": PSI.format("12.34")}),
        (1, {"own_v1": PSI.format("12.34"), "machine": PSI.format("0.00")}),
        (1, {"machine": PSI.format("12.34")}),
        (None, {"machine": PSI.format("12.34")}),
    ],
    ids=["v2 our own", "v2 without one", "v1 our own", "v1 without one", "no cgroups"],
)
def test_memory_pressure_is_that_of_our_own_cgroup_else_of_the_machine(
    tree: Tree, version: int | None, files: dict[str, str]
) -> None:
    reason = by_memory(tree(version, **files)).reason(0.0)
    assert reason == "the memory pressure is 12.3 %, above --max-memory-pressure 10"


def test_our_own_calm_counts_even_if_the_machine_is_pressed(tree: Tree) -> None:
    assert by_memory(tree(own_v2=PSI.format("0.00"), machine=PSI.format("80.00"))).reason(0.0) is None


def test_up_to_the_limit_is_fine(tree: Tree) -> None:
    assert by_memory(tree(own_v2=PSI.format("10.00"))).reason(0.0) is None


@pytest.mark.parametrize("version", [None, 1, 2])
def test_a_kernel_without_such_figures_holds_nothing_back(tree: Tree, version: int | None) -> None:
    assert by_memory(tree(version), limit=0.0).reason(0.0) is None


@pytest.mark.parametrize("text", ["", "some", "some avg10=", "some avg10=much avg60=1", "\0", "full"])
def test_a_file_without_sense_is_passed_over(tree: Tree, text: str) -> None:
    assert by_memory(tree(own_v2=text, machine=PSI.format("50.00"))).reason(0.0) is not None
    assert by_memory(tree(own_v2=text, machine=text)).reason(0.0) is None


def test_a_file_that_is_not_text_is_passed_over(tree: Tree) -> None:
    root = tree(own_v2="", machine=PSI.format("50.00"))
    (root / OWN_V2).write_bytes(b"\xff\xfe some avg10=99")
    assert by_memory(root).reason(0.0) is not None


def test_pressure_comes_and_goes(tree: Tree) -> None:
    root = tree(own_v2=PSI.format("50.00"))
    pressure = by_memory(root)
    assert pressure.reason(0.0) is not None
    (root / OWN_V2).write_text(PSI.format("1.00"))
    assert pressure.reason(1.0) is None
    (root / OWN_V2).unlink()
    assert pressure.reason(2.0) is None
    (root / MACHINE).parent.mkdir(parents=True)
    (root / MACHINE).write_text(PSI.format("11.00"))
    assert pressure.reason(3.0) == "the memory pressure is 11.0 %, above --max-memory-pressure 10"


def test_the_load_is_told_first_if_both_are_too_high(tree: Tree) -> None:
    root = tree(own_v2=PSI.format("50.00"))
    both = Pressure(max_load=1.0, max_memory_pressure=1.0, root=root, read_load=lambda: 9.0)
    assert both.reason(0.0) == "the load is 9.00, above --max-load 1"
