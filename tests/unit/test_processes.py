"""Lines of /proc/PID/stat, taken apart whatever a process calls itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spooled_supervisor.processes import Stat, parse_stat, printable


def line(
    name: bytes = b"python",
    *,
    pid: int = 4711,
    state: str = "S",
    flags: int = 0x400000,
    threads: int = 1,
    pending: int = 0,
    start: int = 123456,
) -> bytes:
    """A line as the kernel writes it (proc_pid_stat(5)): 52 fields, the name in parentheses."""
    fields = f"{state} 100 200 300 0 -1 {flags} 1 2 3 4 50 60 7 8 20 5 {threads} 0 {start} 1 2 3 4 5 6 7 8 {pending} 0"
    return b"%d (%s) %s 0 0 0 0 17 1 0 0 0 0 0 0 0 0 0 0 0 0 0\n" % (pid, name, fields.encode())


def test_fields_are_where_the_manual_says() -> None:
    assert parse_stat(line()) == Stat(
        pid=4711,
        name="python",
        state="S",
        ppid=100,
        pgrp=200,
        session=300,
        start=123456,
        cpu_ticks=50 + 60 + 7 + 8,
        is_zombie=False,
        is_dying=False,
    )


@given(st.binary(min_size=0, max_size=15).filter(lambda name: b"\0" not in name))
def test_no_name_shifts_the_fields(name: bytes) -> None:
    stat = parse_stat(line(name))
    assert stat.identity == (4711, 123456)
    assert (stat.state, stat.ppid) == ("S", 100)
    assert stat.name.isprintable()
    assert len(stat.name) <= 15


@pytest.mark.parametrize("name", [b") R 1 1 (", b"a) Z 1 1 1", b"((", b"))", b" ", b"new\nline"])
def test_names_that_look_like_fields(name: bytes) -> None:
    stat = parse_stat(line(name))
    assert (stat.pid, stat.ppid, stat.start, stat.state) == (4711, 100, 123456, "S")


def test_names_are_fit_for_logs() -> None:
    assert printable(b"a\x1b[31mb\n") == "a?[31mb?"
    assert printable(b"\xff\xfe") == "\N{REPLACEMENT CHARACTER}" * 2
    assert printable(b"a-kernel-thread-with-a-long-name") == "a-kernel-thread"


@pytest.mark.parametrize(
    ("fields", "is_zombie", "is_dying"),
    [
        ({"state": "Z", "threads": 1}, True, True),
        ({"state": "X", "threads": 0}, True, True),
        # the main thread has left, others go on
        ({"state": "Z", "threads": 3, "flags": 0x400004}, False, False),
        ({"state": "Z", "threads": 3, "pending": 0x100}, False, True),
        # on its way out
        ({"flags": 0x400004}, False, True),
        ({"flags": 0x400400, "threads": 9}, False, True),
        ({"state": "T", "pending": 0x100}, False, True),
        ({"state": "D", "pending": 0x4100}, False, True),
        # other signals are no death yet
        ({"state": "T", "pending": 0x4000}, False, False),
        ({"state": "T"}, False, False),
    ],
)
def test_dead_dying_and_alive(fields: dict[str, str | int], is_zombie: bool, is_dying: bool) -> None:
    stat = parse_stat(line(**fields))  # type: ignore[arg-type]
    assert (stat.is_zombie, stat.is_dying) == (is_zombie, is_dying)


@pytest.mark.parametrize("broken", [b"", b"4711 (python", b"4711 (python) S 1", b"x (y) " + b"z " * 50])
def test_lines_that_are_none_raise_what_readers_catch(broken: bytes) -> None:
    with pytest.raises((ValueError, IndexError)):
        parse_stat(broken)
