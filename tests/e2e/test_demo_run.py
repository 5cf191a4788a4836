"""The demo as a user runs it: what it says, what it leaves (a picture, nothing else), how it is stopped."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from spooled_supervisor import kernel
from tests.support.daemon import PATIENCE_S, environment, title_of, wait_until

SMALL = ("--size", "48x32", "--tiles", "12", "--procs", "2")
QUICK_S = 8.0
"""A stop: a second for jobs that do not listen, and what a loaded machine adds."""
_DYING_WITH_PARENT = "import ctypes,os,sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
_ON_ITS_TERMINAL = (
    "import fcntl,os,sys,termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def adopts_what_is_left() -> Iterator[None]:
    """Processes that outlive the demo become ours, so that it can be seen that there are none."""
    before = kernel.is_child_subreaper()
    kernel.set_child_subreaper(True)
    earlier = descendants()
    yield
    try:
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not (descendants() - earlier), "", 5.0)
        left = {pid: title_of(pid) for pid in descendants() - earlier}
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left
    finally:
        kernel.set_child_subreaper(before)


def descendants() -> set[int]:
    """Our living processes; the dead ones that were left to us are buried on the way."""
    living = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.status() != psutil.STATUS_ZOMBIE:
                living.add(process.pid)
            elif process.ppid() == os.getpid() and process.pid not in _started:
                os.waitpid(process.pid, os.WNOHANG)
    return living


_started: set[int] = set()
"""Those that a Popen object waits for."""


@contextlib.contextmanager
def demo(folder: Path, *arguments: str, wrap: Sequence[str] = (), **streams: int) -> Iterator[subprocess.Popen[str]]:
    """Run it in `folder`, which is its place for temporary files too. `wrap` goes before the command line."""
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [
            sys.executable,
            "-ISc",
            _DYING_WITH_PARENT,
            *wrap,
            sys.executable,
            "-m",
            "spooled_supervisor",
            "demo",
            *arguments,
        ],
        stdin=streams.get("stdin", subprocess.DEVNULL),
        stdout=streams.get("stdout", subprocess.PIPE),
        stderr=streams.get("stderr", subprocess.STDOUT),
        cwd=folder,
        env=environment("sp_live_of_a_real_worker", env={"TMPDIR": str(temporary), "TERM": "xterm-256color"}),
        start_new_session=True,
        text=True,
    )
    _started.add(process.pid)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        _started.discard(process.pid)
        if process.stdout is not None:
            process.stdout.close()


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """To its end: exit status, and all that it said."""
    with demo(folder, *arguments) as process:
        output, _ = process.communicate(timeout=100)
    return process.returncode, output


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """What it says up to the line with this text."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if text in line:
            return said
    raise AssertionError(f"it ended without {text!r}:\n{said}")


def stop(process: subprocess.Popen[str], *signals: signal.Signals) -> tuple[int, str, float]:
    """Send signals; its exit status, what else it said, and how long it took."""
    began = time.monotonic()
    for number in signals:
        process.send_signal(number)
        time.sleep(0.2)  # two that come at once are one to the kernel
    output, _ = process.communicate(timeout=PATIENCE_S)
    return process.returncode, output, time.monotonic() - began


def left_in(folder: Path) -> list[str]:
    """Files, but for the folder of temporary ones, which must be empty."""
    assert list((folder / "tmp").iterdir()) == []
    return sorted(path.name for path in folder.iterdir() if path.name != "tmp")


def size_of_png(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.endswith(struct.pack(">I", 0) + b"IEND" + struct.pack(">I", zlib.crc32(b"IEND")))
    width, height = struct.unpack_from(">II", data, 16)
    return width, height


# --- to its end -------------------------------------------------------------------------------------------------------


def test_the_demo_draws_a_picture_and_tells_of_the_kill_and_the_crash(tmp_path: Path) -> None:
    status, output = run(tmp_path, *SMALL)
    assert status == 0, output
    assert size_of_png(tmp_path / "mandelbrot.png") == (48, 32)
    assert left_in(tmp_path) == ["mandelbrot.png"]
    assert "\x1b" not in output
    lines = output.splitlines()
    assert lines[0] == "Mandelbrot set: 48 x 32 pixels in 12 tiles, drawn by 2 children"
    for told in (
        r" s  tile 1 crashed: killed by SIGSEGV; runs again$",
        r" s  tile 2 loops for ever; its limit of 2 s is over$",
        r" s  tile 2 was killed after \d\.\d s; runs again$",
        r" s  tile 1 is drawn, by another run$",
        r" s  tile 2 is drawn, by another run$",
        r" s  12 of 12 tiles$",
        rf"^picture   {re.escape(str(tmp_path))}/mandelbrot.png \(48 x 32, \d+ KiB\)$",
        r"^jobs      12 tiles in \d+\.\d s by 2 children, \d+\.\d jobs per second$",
        r"^speed-up  \d+\.\d\d times one process: the tiles report \d+\.\d s of CPU time$",
        r"^killed    1: tile 2, which held a child for \d\.\d s; its limit is 2 s$",
        r"^crashed   1: tile 1, killed by SIGSEGV$",
        r"^retried   2: tile \d and tile \d, and then drawn$",
    ):
        assert re.search(told, output, re.MULTILINE), f"{told} is not in:\n{output}"


def test_an_earlier_picture_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "mine.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\nold")
    status, output = run(tmp_path, *SMALL, "--output", "mine.png")
    assert status == 0, output
    assert size_of_png(path) == (48, 32)


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--output", "notes.txt"], 78, "--output notes.txt: exists and is no PNG file, so it is left alone"),
        (["--procs", "0", "--size", "big"], 64, "--size 'big': must be WIDTHxHEIGHT"),
        (["--colour"], 64, "unrecognized arguments: --colour"),
        (["extra"], 64, "unrecognized arguments: extra"),
    ],
)
def test_what_cannot_be_is_refused_at_once(tmp_path: Path, arguments: Sequence[str], status: int, message: str) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("dear diary")
    code, output = run(tmp_path, *arguments)
    assert code == status
    assert message in output
    assert "Traceback" not in output
    assert notes.read_text() == "dear diary"


def test_the_missing_extra_is_named(tmp_path: Path) -> None:
    program = "import sys; sys.modules['starlette'] = None; from spooled_supervisor.cli import main; main(['demo'])"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(None),
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 78
    assert done.stderr == (
        "spooled-supervisor: the demo starts the embedded server, which needs starlette: "
        "pip install 'spooled-supervisor[dev-server]'\n"
    )


# --- stopped ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_while_a_tile_loops_for_ever_stops_it(tmp_path: Path, number: signal.Signals, status: int) -> None:
    with demo(tmp_path, *SMALL) as process:
        read_until(process, "tile 1 crashed")
        code, output, seconds = stop(process, number)
    assert code == status
    assert output.splitlines()[-1] == "stopped: supervisor and server have ended, no picture was written"
    assert seconds < QUICK_S
    assert left_in(tmp_path) == []


def test_a_signal_before_anything_runs_stops_it(tmp_path: Path) -> None:
    with demo(tmp_path, *SMALL) as process:
        read_until(process, "Mandelbrot set")
        code, output, seconds = stop(process, signal.SIGTERM)
    assert (code, "Traceback" in output) == (143, False)
    assert seconds < QUICK_S
    assert left_in(tmp_path) == []


def test_a_second_signal_does_not_wait_for_jobs(tmp_path: Path) -> None:
    with demo(tmp_path, *SMALL) as process:
        read_until(process, "tile 1 crashed")
        code, output, _ = stop(process, signal.SIGINT, signal.SIGINT)
    assert (code, "Traceback" in output) == (130, False)
    assert left_in(tmp_path) == []


def test_sigkill_of_the_demo_leaves_nothing_running(tmp_path: Path) -> None:
    with demo(tmp_path, *SMALL) as process:
        read_until(process, "tile 1 crashed")
        process.kill()
        assert process.wait() == -signal.SIGKILL
    # The rest is the fixture's.


def test_a_reader_that_goes_away_ends_it(tmp_path: Path) -> None:
    with demo(tmp_path, *SMALL) as process:
        read_until(process, "Mandelbrot set")
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(PATIENCE_S) == 128 + signal.SIGPIPE
    assert left_in(tmp_path) == []


def test_a_supervisor_that_is_killed_is_a_failure_with_a_reason(tmp_path: Path) -> None:
    with demo(tmp_path, *SMALL) as process:
        read_until(process, "tile 1 crashed")
        supervisors = [p for p in psutil.Process(process.pid).children() if "supervisor running" in title_of(p.pid)]
        assert len(supervisors) == 1
        supervisors[0].kill()
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert output.splitlines()[-1] == "spooled-supervisor: the supervisor ended with status -9"
    assert left_in(tmp_path) == []


# --- on a terminal ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def demo_on_terminal(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process and the terminal's other side, 80 by 24."""
    master, slave = pty.openpty()
    try:
        termios.tcsetwinsize(slave, (24, 80))
        wrap = (sys.executable, "-ISc", _ON_ITS_TERMINAL)
        with demo(folder, *arguments, wrap=wrap, stdin=slave, stdout=slave, stderr=slave) as process:
            os.close(slave)
            slave = -1
            yield process, master
    finally:
        for fd in (master, slave):
            with contextlib.suppress(OSError):  # closed already
                os.close(fd)


def read_terminal(master: int, until: str | None = None) -> str:
    """What it shows, up to a text or to its end."""
    data = b""
    with contextlib.suppress(OSError):  # EIO: nobody has the other side open any more
        while until is None or until.encode() not in data:
            read = os.read(master, 65536)
            if not read:
                break
            data += read
    return data.decode(errors="replace")


def test_on_a_terminal_the_view_is_live_and_the_cursor_comes_back(tmp_path: Path) -> None:
    with demo_on_terminal(tmp_path, *SMALL) as (process, master):
        shown = read_terminal(master)
        assert process.wait(PATIENCE_S) == 0, shown
    assert shown.index("\x1b[?25l") < shown.index("child 0") < shown.rindex("\x1b[?25h")
    assert "over its time" in shown
    assert "12 of 12 tiles" in shown
    assert "\x1b" not in shown[shown.rindex("\x1b[?25h") + 6 :], "the summary is plain text"
    assert shown.rindex("\x1b[?25h") < shown.index("speed-up")


def test_ctrl_c_at_the_terminal_stops_it_in_order(tmp_path: Path) -> None:
    with demo_on_terminal(tmp_path, *SMALL) as (process, master):
        before = read_terminal(master, "tile 1 crashed")
        began = time.monotonic()
        os.write(master, b"\x03")
        shown = before + read_terminal(master)
        assert process.wait(PATIENCE_S) == 130, shown
        assert time.monotonic() - began < QUICK_S
    assert "\x1b[?25h" in shown
    assert "Traceback" not in shown
    assert shown.rstrip().endswith("stopped: supervisor and server have ended, no picture was written")
    assert left_in(tmp_path) == []


def test_a_terminal_that_hangs_up_ends_it(tmp_path: Path) -> None:
    with demo_on_terminal(tmp_path, *SMALL) as (process, master):
        read_terminal(master, "tile 1 crashed")
        os.close(master)
        assert process.wait(PATIENCE_S) == 129
    assert left_in(tmp_path) == []
