"""The end of a child that the supervisor holds: when a dump of stacks is whole."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from spooled_supervisor.childlink import ChildLink

DUMPS = """
import faulthandler, threading
def deep(n):
    if n:
        deep(n - 1)
    else:
        faulthandler.dump_traceback(all_threads=True)
go = threading.Event()
threading.Thread(target=go.wait).start()
deep({depth})
go.set()
"""


@pytest.fixture
def dump() -> Iterator[int]:
    fd = os.memfd_create("dump")
    yield fd
    os.close(fd)


def link_to(dump: int) -> ChildLink:
    link = object.__new__(ChildLink)
    link._born = SimpleNamespace(stack_fd=dump)  # type: ignore[assignment] # all that is looked at
    return link


@pytest.mark.parametrize("depth", [0, 3, 99, 100, 101, 200])
def test_a_dump_of_stacks_is_whole_when_its_last_piece_has_come(dump: int, tmp_path: Path, depth: int) -> None:
    """It is written frame by frame, and what is read meanwhile would end where the handler's own frames begin."""
    script = tmp_path / "dumps.py"
    script.write_text(DUMPS.format(depth=depth))
    text = subprocess.run([sys.executable, script], check=True, capture_output=True).stderr
    assert text.count(b"most recent call first") == 2
    link = link_to(dump)
    for end in range(len(text) - len("  ...\n")):  # dots say nothing more
        os.pwrite(dump, text[end : end + 1], end)
        os.lseek(dump, end, os.SEEK_SET)
        assert not link.has_whole_stack()
    os.pwrite(dump, text, 0)
    os.lseek(dump, len(text), os.SEEK_SET)
    assert link.has_whole_stack()
    assert "deep" in link.read_stack()


def test_without_a_dump_nothing_is_whole(dump: int) -> None:
    assert not link_to(dump).has_whole_stack()
    assert link_to(dump).read_stack() == ""
