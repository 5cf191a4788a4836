"""A virtual machine for tests of what only cgroup v2 has, whatever the machine outside is set up for.

A test module that says `FLAVOUR = "vm"` runs in there, with its fixtures, and looks from outside like any other: its
tests are collected and chosen here, and what became of each in there is reported as if it had been here. So such tests
are written, selected and read like their neighbours in this directory, and share their fixtures.

The machine has Debian's kernel and, under a layer of memory, the files of the machine outside, which it can read and
not write: the same systemd, interpreter and packages as in the other beds, installed by the same `install.sh`. pytest
is a service there and writes each report, as a line of JSON, to a serial port (`inside.py`). There is neither network
nor disk. Its processors are emulated, as a host of tests is often a virtual machine itself and has none to share. That
makes them more than ten times slower: tests there start the daemon once and look at much.

Not taken: a root tree made for it (mmdebstrap, an image). It costs twenty seconds and more packages, and is another
system, with another Python, than all else is tested with.

`why_not()` says what is missing; the kernel comes from apt, and is kept. `vm.sh` and `vm_init.sh` are the other parts.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.systemd.bed import (
    DYING_WITH_PARENT,
    LIBRARIES,
    REPOSITORY,
    missing_programs,
    needs_library_path,
    system_path,
)

SCRIPT = Path(__file__).with_name("vm.sh")
PLUGIN = "tests.systemd.inside"
PROGRAMS = ("qemu-system-x86_64", "busybox", "cpio", "xz", "apt-get", "dpkg-deb", "setpriv", "systemctl", "dbus-daemon")
INSTALLED = "/opt/spooled-supervisor"
PREPARE_LIMIT_S = 150
"""For the kernel: 70 MB."""
PROCESSORS = 3
"""That many are in vm.sh."""
LIMIT_S = 600
"""For everything in there."""
PATIENCE_S = 100
"""What TESTS_PATIENCE_S is in there."""
LAST_WORDS = 5000


def why_not(cache: Path) -> str:
    """Why there can be no virtual machine here; empty if there can. `cache`: where the kernel is kept between runs."""
    return _prepare(cache)[1]


@functools.cache
def _prepare(cache: Path) -> tuple[Path, str]:
    """The kernel's directory, and why there is none."""
    if os.geteuid() != 0:
        return cache, "to read all files of this machine needs root"
    if platform.machine() != "x86_64":
        return cache, f"the machine is an x86-64 one, this is {platform.machine()}"
    if missing := missing_programs(PROGRAMS):
        return cache, f"missing: {missing} (Debian: qemu-system-x86 busybox-static cpio xz-utils systemd dbus)"
    done = subprocess.run(
        ["timeout", str(PREPARE_LIMIT_S), "bash", str(SCRIPT), "kernel", str(cache)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stderr.strip() or f"exit code {done.returncode}"
    return Path(done.stdout.strip()), "" if done.returncode == 0 else f"no kernel linux-image-amd64 from apt: {said}"


class Machine:
    """A machine that runs these tests, one after the other, from when it is made until it is closed."""

    def __init__(self, cache: Path, node_ids: Sequence[str]) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="spooled-vm-")
        self._directory = Path(self._scratch.name)
        (self._directory / "settings").write_text(_settings(node_ids))
        with (self._directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*DYING_WITH_PARENT, "bash", str(SCRIPT), "run", str(_prepare(cache)[0]), str(self._directory)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={"PATH": system_path()},
                start_new_session=True,
            )
        self._timer = threading.Timer(LIMIT_S, self._process.kill)
        self._timer.start()

    def reports(self, node_id: str) -> Iterator[dict[str, Any]]:
        """Of setup, call and teardown of this test, as they come in. Raises EOFError if the machine ends before."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            report: dict[str, Any] = json.loads(line)
            if report["nodeid"] == node_id:
                yield report
                if report["when"] == "teardown":
                    return
        raise EOFError(self._last_words())

    def _last_words(self) -> str:
        files = [self._directory / name for name in ("log", "console")]
        texts = [file.read_text(errors="replace")[-LAST_WORDS:] for file in files if file.exists()]
        return "\n".join([f"exit code {self._process.wait()}", *texts])

    def close(self) -> None:
        """It is switched off."""
        self._timer.cancel()
        self._timer.join()
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._scratch.cleanup()


def _settings(node_ids: Sequence[str]) -> str:
    """What vm_init.sh wants to know."""
    pytest = [f"{INSTALLED}/venv/bin/python", "-m", "pytest", "-p", "no:cacheprovider", "-p", "pytest_timeout"]
    pytest += ["-p", PLUGIN, *node_ids]
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TESTS_PATIENCE_S": str(PATIENCE_S), "LANG": "C.UTF-8"}
    if needs_library_path():
        environment["LD_LIBRARY_PATH"] = LIBRARIES
    settings = {
        "PYTHON": sys.base_prefix,
        "SITE": sysconfig.get_path("purelib"),
        "SOURCE": str(REPOSITORY),
        "TESTS": f"cd {INSTALLED}/source && {_assignments(environment, ' ')} exec {shlex.join(pytest)}",
    }
    return _assignments(settings, "\n")


def _assignments(values: dict[str, str], between: str) -> str:
    return between.join(f"{name}={shlex.quote(value)}" for name, value in values.items())
