"""What a hunt and a sweep believe when they cannot look; families of real processes are in tests/e2e."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from spooled_supervisor import family
from spooled_supervisor.hunt import Hunt
from spooled_supervisor.processes import Children


@contextmanager
def no_free_descriptor() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.open(os.devnull, os.O_RDONLY)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def a_program() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as program:
        yield program


def left_of(trunk: int) -> int:
    hunt = Hunt(trunk, kill=False)
    hunt.run()
    return hunt.remaining


@pytest.mark.parametrize("is_own", [True, False], ids=["own", "child"])
def test_who_cannot_look_for_want_of_a_descriptor_does_not_believe_that_nobody_is_there(is_own: bool) -> None:
    with a_program() as program:
        trunk = os.getpid() if is_own else program.pid
        with no_free_descriptor():
            left = left_of(trunk)
        assert left >= 1


def test_below_who_is_gone_there_is_nobody() -> None:
    with a_program() as program:
        program.send_signal(signal.SIGKILL)
    assert left_of(program.pid) == 0


def test_a_sweep_that_cannot_see_its_children_is_to_be_repeated() -> None:
    with no_free_descriptor():
        swept = family.sweep((), kill=False)
    assert swept == family.Swept(left=1)


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_list_of_children_that_may_lack_one_counts_as_one_left(
    monkeypatch: pytest.MonkeyPatch, is_complete: bool
) -> None:
    monkeypatch.setattr(family, "look_around", lambda: lambda pid: Children([], is_complete))
    assert family.sweep((), kill=False) == family.Swept(left=0 if is_complete else 1)
