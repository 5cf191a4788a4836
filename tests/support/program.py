"""Programs that use the library: run to their end, or talked to, and looked after: nothing of them may be left.

Whatever a program forks or starts has a variable of ours in its environment, by which it is found.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.daemon import REPOSITORY, environment

TAG = "TEST_PROGRAM_TAG"
PATIENCE_S = 30.0
PRELUDE = """
import atexit, logging, os, pathlib, signal, subprocess, sys, threading, time
from spooled_supervisor import *
client = SpooledClient()
atexit.register(client.close)
logging.getLogger("spooled_supervisor").addHandler(logging.NullHandler())
def worker(queue, **options):
    quick = {"concurrency": 1, "poll_interval": 0.1, **options}
    return SpooledWorker(client, os.environ["QUEUE_PREFIX"] + queue, **quick)
def create(w, payload, **fields):
    return client.jobs.create(queue_name=w.queue_name, payload=payload, **fields).id
def children_of_ours():
    return pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
def say(*words):
    print(*words, flush=True)
"""


@dataclass
class Program:
    """A program that runs. `lines` is what it has printed, complete after `wait`."""

    process: subprocess.Popen[str]
    tag: str

    def read_line(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def wait_for_line(self, start: str) -> str:
        """The next line that begins so."""
        while True:
            line = self.read_line()
            if line.startswith(start):
                return line
            assert line or self.process.poll() is None, f"it ended without saying {start!r}"

    def wait(self) -> tuple[int, list[str]]:
        """Its exit code and the rest of its output."""
        output, _ = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, output.splitlines()

    def family(self) -> list[int]:
        """Everybody who has its tag, itself excepted."""
        entry = f"{TAG}={self.tag}".encode()
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != self.process.pid:
                with contextlib.suppress(OSError):
                    if entry in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                        found.append(int(name))
        return found

    def titled(self, title: str) -> list[int]:
        """Those of the family whose title has these words."""
        found = []
        for pid in self.family():
            with contextlib.suppress(OSError):
                if title in Path(f"/proc/{pid}/cmdline").read_text(errors="replace"):
                    found.append(pid)
        return found


@contextlib.contextmanager
def program(
    source: str | Path,
    *,
    url: str,
    api_key: str,
    prefix: str = "",
    path: Sequence[str | Path] = (),
    wrap: Sequence[str] = (),
) -> Iterator[Program]:
    """Run Python text after a prelude, or a file as it is. At the end it is gone, and so is all of its family.

    `wrap`: a command in front of the interpreter, which is the process then.
    """
    tag = uuid.uuid4().hex
    if isinstance(source, Path):
        line = ["-W", "error", "-W", "ignore::ResourceWarning", str(source)]  # an example need not close its client
    else:
        line = ["-W", "error", "-c", PRELUDE + textwrap.dedent(source)]
    process = subprocess.Popen(
        [*wrap, sys.executable, *line],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env={
            **environment(api_key),
            "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, *path))),
            "SPOOLED_API_URL": url,
            "QUEUE_PREFIX": prefix,
            TAG: tag,
        },
    )
    running = Program(process, tag)
    try:
        yield running
        process.wait(PATIENCE_S)
        give_up_at = time.monotonic() + 5.0
        while (left := running.family()) and time.monotonic() < give_up_at:
            time.sleep(0.01)
        titles = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in left}
        assert not titles, f"left running by the program: {titles}"
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pid in running.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert process.stdout is not None
        process.stdout.close()
