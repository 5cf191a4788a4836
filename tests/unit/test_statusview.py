"""The status table: what it says, how wide it is, what it lets through; and `show` on pipes and on a real terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spooled_supervisor import statusview
from spooled_supervisor.statusview import LEAVE_SCREEN, MIN_WIDTH, cell_width, render, show

REPOSITORY = Path(__file__).parents[2]
JOB = "4da4f9fc-1a69-4b8a-a656-27ac7a97c643"
CHILD = {
    "slot": 0,
    "pid": 4711,
    "generation": 2,
    "state": "busy",
    "queue": "emails",
    "job_id": JOB,
    "elapsed_s": 61.0,
    "deadline_in_s": 3.0,
    "percent": 55.0,
    "message": "page 5 of 9",
    "jobs_done": 3,
    "uptime_s": 20.0,
    "pss_bytes": 50 << 20,
    "uss_bytes": None,
    "cpu_s": 60.5,
}
IDLE = dict.fromkeys(CHILD) | {"slot": 1, "pid": 4712, "generation": 2, "state": "idle"}
STATUS: dict[str, Any] = {
    "phase": "running",
    "worker_id": "w-1",
    "hostname": "host-1",
    "uptime_s": 7322.0,
    "quiet": False,
    "reasons": [],
    "unhealthy": [],
    "queues": [
        {"name": "emails", "weight": 2.0, "max_procs": 3, "in_progress": 1, "waiting": 4}
        | {"done": 100, "failed": 7, "rate_per_min": 12.5, "breaker": "half_open"}
    ],
    "children": [IDLE, CHILD],
    "slots_backed_off": 0,
    "leases_held": 1,
    "outbox_depth": 2,
    "outbox_age_s": 4.0,
    "outbox_on_disk": True,
    "outbox_problem": None,
    "outbox_full": False,
    "heartbeat_age_s": 3.0,
    "procs": 2,
    "generation": 2,
    "failures": [
        {"job_id": "job-9", "queue": "emails", "kind": "timed_out", "error": "timed out\n  File x", "output": ""}
        | {"failed_at": 1.7e9, "slot": 0, "will_retry": False, "duration_s": 1.0}
    ],
    "leases": [{"job_id": JOB, "queue": "emails", "state": "held", "ends_in_s": 25.0, "renew_in_s": 10.0}],
    "pid": 4710,
    "version": "1.2.3",
    "api_url": "https://api.example",
    "load_average": [1.25, 1.0, 0.5],
    "cpu_percent": 71.0,
    "memory_percent": 20.0,
}
EMPTY = STATUS | {"phase": "booting", "queues": [], "children": [], "failures": [], "leases": [], "leases_held": 0}
HOSTILE = "\x1b[31mred\x07\x9b2J\u202egnp\u2028\udcff\r\x00 \u200bmore"


def plain(status: dict[str, Any], width: int = 160, **options: Any) -> str:
    return render(status, width=width, colour=False, **options)


# --- rendering ------------------------------------------------------------------------------------------------------


def test_everything_that_matters_is_in_it() -> None:
    text = plain(STATUS)
    for part in ("running  w-1 on host-1, up 2h02m", "pid 4710, version 1.2.3", "https://api.example", "CPU 71 %"):
        assert part in text
    assert "outbox: 2 waiting, the oldest 4.0s" in text
    assert "1 of 2 busy, generation 2" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["0", "4711", "2", "busy", "emails", JOB, "1m01s", "3.0s", "55%", "######----"] in [
        row[:10] for row in lines
    ]
    assert ["1", "4712", "2", "idle", "-", "-", "-", "-", "-", "-"] in lines
    assert ["emails", "2", "1/3", "4", "100", "7", "12.5", "half", "open"] in lines
    assert [JOB, "emails", "held", "10s", "25s"] in lines
    assert any("timed out" in line and "job-9" in line and "final" in line for line in text.splitlines())


def test_children_are_in_the_order_of_their_slots() -> None:
    text = plain(STATUS)
    assert text.index("4711") < text.index("4712")


def test_a_daemon_that_has_nothing_yet_is_shown() -> None:
    text = plain(EMPTY)
    assert text.startswith("starting")
    assert "none yet" in text
    assert "Last failures" not in text


def test_an_older_daemons_status_is_shown_as_far_as_it_goes() -> None:
    older = {key: STATUS[key] for key in ("phase", "worker_id", "uptime_s", "children", "procs", "generation")}
    older["queues"] = [{"name": "q", "weight": 1.0, "max_procs": None, "in_progress": 0, "waiting": 0}]
    assert "4711" in plain(older)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "running"),
        ({"phase": "booting", "unhealthy": ["starting"]}, "starting"),
        ({"phase": "draining"}, "draining"),
        ({"unhealthy": ["broken"], "reasons": ["x"]}, "not healthy"),
        ({"quiet": True, "reasons": ["quiet: by hand"]}, "quiet"),
        ({"reasons": ["no usable child"]}, "not ready"),
    ],
)
def test_the_first_word_says_how_it_stands_and_the_reasons_follow(changes: dict[str, Any], word: str) -> None:
    text = plain(STATUS | changes)
    assert text.startswith(f"{word}  ")
    for reason in (*changes.get("unhealthy", []), *changes.get("reasons", [])):
        assert text.count(f"  - {reason}\n") == 1


def test_an_outbox_in_trouble_says_so() -> None:
    text = plain(STATUS | {"outbox_on_disk": False, "outbox_problem": "disk full", "outbox_full": True})
    assert "in memory only: disk full; full, nothing is claimed" in text


@pytest.mark.parametrize("width", [1, MIN_WIDTH, 41, 45, 50, 57, 60, 80, 120, 200])
@pytest.mark.parametrize("status", [STATUS, EMPTY], ids=["busy", "empty"])
def test_no_line_is_wider_than_the_terminal(status: dict[str, Any], width: int) -> None:
    long = status | {
        "reasons": ["because " * 40, "x" * 500],
        "worker_id": "w" * 300,
        "api_url": "https://" + "a" * 300,
        "children": [child | {"queue": "日本" * 40, "message": "m" * 500} for child in status["children"]],
        "queues": [queue | {"name": "q" * 300} for queue in status["queues"]],
    }
    for text in (plain(long, width), re.sub(r"\x1b\[[0-9;]*m", "", render(long, width=width, colour=True))):
        assert max(cell_width(line) for line in text.splitlines()) <= max(width, MIN_WIDTH)


def test_what_is_narrow_loses_the_least_important_first() -> None:
    header = next(line for line in plain(STATUS, 80).splitlines() if line.startswith("SLOT"))
    assert header.split() == ["SLOT", "PID", "STATE", "QUEUE", "JOB", "ELAPSED", "DEADLINE", "%", "MEMORY", "MESSAGE"]


def test_columns_stay_in_line_beside_wide_characters() -> None:
    children = [CHILD | {"queue": "日本語"}, IDLE | {"queue": "emails", "job_id": "j"}]
    rows = [line for line in plain(STATUS | {"children": children}).splitlines() if "4711" in line or "4712" in line]
    assert cell_width(rows[0].partition(JOB)[0]) == cell_width(rows[1].partition(" j ")[0] + " ")


@pytest.mark.parametrize("place", ["worker_id", "hostname", "api_url", "outbox_problem", "version"])
def test_hostile_text_is_spelled_out(place: str) -> None:
    assert_harmless(plain(STATUS | {place: HOSTILE}))


def test_hostile_text_from_a_job_is_spelled_out() -> None:
    status = STATUS | {
        "reasons": [HOSTILE],
        "children": [CHILD | {"message": HOSTILE, "queue": HOSTILE, "job_id": HOSTILE, "state": HOSTILE}],
        "queues": [queue | {"name": HOSTILE, "breaker": HOSTILE} for queue in STATUS["queues"]],
        "failures": [dict.fromkeys(STATUS["failures"][0], HOSTILE)],
        "leases": [lease | {"job_id": HOSTILE, "queue": HOSTILE, "state": HOSTILE} for lease in STATUS["leases"]],
    }
    assert_harmless(plain(status))
    assert_harmless(plain(status, 60))
    assert "\\x1b[31mred\\x07\\x9b2J\\u202egnp" in plain(status)


def assert_harmless(text: str) -> None:
    assert all(line.isprintable() for line in text.split("\n"))
    text.encode()


def test_ten_thousand_characters_cost_one_line() -> None:
    text = plain(STATUS | {"children": [CHILD | {"message": "m" * 10_000}]})
    assert len(text.splitlines()) == len(plain(STATUS).splitlines()) - 1


def test_colours_change_nothing_but_colours() -> None:
    coloured = render(STATUS, width=100, colour=True)
    assert "\x1b[32mrunning\x1b[0m" in coloured
    stripped = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in stripped.splitlines()] == plain(STATUS, 100).splitlines()


# --- showing --------------------------------------------------------------------------------------------------------


def fetching(*answers: Any) -> Callable[[], dict[str, Any]]:
    """A fetch that gives these one after the other; exceptions are raised. At the end the user presses Ctrl-C."""
    left = iter(answers)

    def fetch() -> dict[str, Any]:
        answer = next(left, KeyboardInterrupt())
        if isinstance(answer, BaseException):
            raise answer
        return dict(answer)

    return fetch


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statusview, "REDRAW_S", 0.01)
    monkeypatch.delenv("COLUMNS", raising=False)


def test_once_prints_the_table() -> None:
    out = io.StringIO()
    assert show(fetching(STATUS), watch=False, as_json=False, stream=out) == 0
    assert out.getvalue() == plain(STATUS)


def test_the_width_of_a_pipe_is_that_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    out = io.StringIO()
    show(fetching(STATUS), watch=False, as_json=False, stream=out)
    assert out.getvalue() == plain(STATUS, 70)


def test_json_is_the_whole_document_and_plain_ascii() -> None:
    out = io.StringIO()
    status = STATUS | {"worker_id": HOSTILE}
    assert show(fetching(status), watch=False, as_json=True, stream=out) == 0
    assert json.loads(out.getvalue()) == status
    assert out.getvalue().isascii()


@pytest.mark.parametrize("watch", [False, True])
@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("error", [ConnectionRefusedError(111, "Connection refused"), ValueError("no \x1b[2J sense")])
def test_without_a_daemon_it_says_so_and_fails(
    watch: bool, as_json: bool, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    out = io.StringIO()
    assert show(fetching(error), watch=watch, as_json=as_json, stream=out) == 1
    assert out.getvalue() == ""
    complaint = capsys.readouterr().err
    assert complaint.startswith("spooled-supervisor: the daemon is not reachable: ")
    assert complaint.strip().isprintable()


def test_watching_into_a_pipe_prints_one_table_after_the_other() -> None:
    out = io.StringIO()
    assert show(fetching(STATUS, EMPTY), watch=True, as_json=False, stream=out) == 0
    assert out.getvalue() == plain(STATUS) + "\n" + plain(EMPTY)


def test_watching_in_json_is_a_line_for_each_look_and_goes_on_after_a_gap(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    answers = fetching(STATUS, ConnectionRefusedError(111, "Connection refused"), EMPTY)
    assert show(answers, watch=True, as_json=True, stream=out) == 0
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [STATUS, EMPTY]
    assert "not reachable" in capsys.readouterr().err


def test_a_reader_that_has_left_is_no_missing_daemon(capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    assert show(fetching(STATUS), watch=False, as_json=False, stream=stream) == 1
    assert capsys.readouterr().err == ""
    with contextlib.suppress(BrokenPipeError):
        stream.close()


def test_a_terminal_that_knows_ascii_only_gets_ascii() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    assert show(fetching(STATUS | {"worker_id": "日本"}), watch=False, as_json=False, stream=stream) == 0
    assert b"?? on host-1" in raw.getvalue()


# --- on a terminal --------------------------------------------------------------------------------------------------

_WATCHER = """
import os, sys
sys.path.insert(0, {root!r})
from tests.unit.test_statusview import STATUS
from spooled_supervisor import statusview
statusview.REDRAW_S = 0.05
looks = 0
def fetch():
    global looks
    looks += 1
    if os.path.exists({gone!r}):
        raise ConnectionRefusedError(111, "Connection refused")
    return STATUS | {{"worker_id": f"look-{{looks}}"}}
sys.exit(statusview.show(fetch, watch=True, as_json=False, stream=sys.stdout))
"""


class Terminal:
    """`status --watch` on a terminal of its own."""

    def __init__(self, gone: Path, *, leads_its_session: bool = False, **env: str) -> None:
        self.fd, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 90, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WATCHER.format(root=str(REPOSITORY), gone=str(gone))],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            process_group=None if leads_its_session else 0,
            start_new_session=leads_its_session,
            env={**os.environ, "TERM": "xterm", **env},
        )
        os.close(slave)
        self.seen = ""

    def wait_for(self, text: str, *, after: int = 0, timeout_s: float = 20.0) -> int:
        """Read until this has come; where the screen's text then ends."""
        ends_at = time.monotonic() + timeout_s
        while text not in self.seen[after:]:
            assert time.monotonic() < ends_at, f"{text!r} did not come: {self.seen[-500:]!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.fd, 65536).decode()
                except OSError:  # EIO: the other side is closed
                    assert text in self.seen[after:], f"it ended without {text!r}: {self.seen[-500:]!r}"
        return len(self.seen)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)


@pytest.fixture
def gone(tmp_path: Path) -> Path:
    return tmp_path / "gone"


@pytest.fixture
def terminal(gone: Path) -> Iterator[Terminal]:
    it = Terminal(gone)
    yield it
    it.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_watching_redraws_and_gives_the_terminal_back(terminal: Terminal, number: signal.Signals) -> None:
    at = terminal.wait_for("look-3")
    terminal.process.send_signal(number)
    terminal.wait_for(LEAVE_SCREEN, after=at)
    assert terminal.process.wait(10) == 0
    assert "Traceback" not in terminal.seen
    assert terminal.seen.count(LEAVE_SCREEN) == 1


def test_watching_says_when_the_daemon_is_gone_and_sees_it_come_back(terminal: Terminal, gone: Path) -> None:
    terminal.wait_for("look-2")
    gone.touch()
    at = terminal.wait_for("not reachable: Connection refused; since ")
    gone.unlink()
    at = terminal.wait_for("\x1b[32mrunning", after=at)
    assert terminal.process.poll() is None


def test_a_stop_gives_the_terminal_back_until_it_is_continued(terminal: Terminal) -> None:
    at = terminal.wait_for("look-2")
    terminal.process.send_signal(signal.SIGTSTP)
    at = terminal.wait_for(LEAVE_SCREEN, after=at)
    os.waitid(os.P_PID, terminal.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    terminal.process.send_signal(signal.SIGCONT)
    terminal.wait_for(statusview.ENTER_SCREEN, after=at)
    terminal.wait_for("look-", after=at)


def test_where_no_shell_could_continue_it_a_stop_only_redraws(gone: Path) -> None:
    """As the only program of an `ssh -t` or a `docker exec -t`: stopped there it would hang for good, Ctrl-C or not."""
    with contextlib.closing(Terminal(gone, leads_its_session=True)) as terminal:
        at = terminal.wait_for("look-2")
        terminal.process.send_signal(signal.SIGTSTP)
        terminal.wait_for(LEAVE_SCREEN, after=at)
        left_at = terminal.seen.index(LEAVE_SCREEN, at)  # it may have come with what follows
        terminal.wait_for(statusview.ENTER_SCREEN, after=left_at)
        at = terminal.wait_for("look-", after=terminal.seen.index(statusview.ENTER_SCREEN, left_at))
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for(LEAVE_SCREEN, after=at)
        assert terminal.process.wait(10) == 0


@pytest.mark.parametrize("name", ["dumb", ""])
def test_a_terminal_that_can_move_no_cursor_gets_one_table_after_the_other(gone: Path, name: str) -> None:
    with contextlib.closing(Terminal(gone, TERM=name)) as terminal:
        terminal.wait_for("look-3")
    assert "\x1b" not in terminal.seen


def test_no_color_is_respected(gone: Path) -> None:
    terminal = Terminal(gone, NO_COLOR="1")
    terminal.wait_for("look-2")
    terminal.close()
    assert "\x1b[32m" not in terminal.seen
    assert "running" in terminal.seen


def test_ctrl_c_as_soon_as_the_other_screen_is_there_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(io.StringIO):
        """A terminal whose user presses Ctrl-C while the first thing is written to it."""

        def isatty(self) -> bool:
            return True

        def flush(self) -> None:
            if self.getvalue() == statusview.ENTER_SCREEN:
                raise KeyboardInterrupt

    monkeypatch.setenv("TERM", "xterm")
    out = Interrupted()
    assert show(fetching(STATUS), watch=True, as_json=False, stream=out) == 0
    assert out.getvalue() == statusview.ENTER_SCREEN + LEAVE_SCREEN


def test_what_is_higher_than_the_terminal_is_cut_and_counted() -> None:
    out = io.StringIO()
    statusview._Screen(out).draw([str(n) for n in range(10)], 4)
    drawn = out.getvalue()
    assert "2" in drawn
    assert "7 more lines" in drawn
    assert drawn.count("\r\n") == 3
