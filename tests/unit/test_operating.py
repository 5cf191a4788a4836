"""`ctl` and `status`: what is sent for which words, which socket is meant, and the exit codes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from spooled_supervisor import config as configuration
from spooled_supervisor import operating
from spooled_supervisor.control import reachable
from spooled_supervisor.errors import EX_FAILURE, EX_OK, EX_UNAVAILABLE, EX_USAGE, ConfigError
from spooled_supervisor.operating import ANSWER_LIMIT_S, RELOAD_LIMIT_S, run_ctl, run_status


class Line:
    """The supervisor at the other end: answers everything with `answer`, or raises it."""

    def __init__(self) -> None:
        self.asked: list[tuple[Path, Mapping[str, Any], float]] = []
        self.answer: Any = {"ok": True, "text": "done"}

    def __call__(self, path: Path, request: Mapping[str, Any], *, timeout_s: float) -> Any:
        self.asked.append((path, request, timeout_s))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Line:
    line = Line()
    monkeypatch.setattr(operating, "ask", line)
    return line


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """A user's, with a run-time directory and a home."""
    return {"XDG_RUNTIME_DIR": str(tmp_path / "run"), "XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path)}


def touched(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


# --- what is sent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "request_"),
    [
        (["quiet"], {"command": "quiet"}),
        (["resume"], {"command": "resume"}),
        (["scale", "6"], {"command": "scale", "n": 6}),
        (["scale", "0"], {"command": "scale", "n": 0}),
        (["reload"], {"command": "reload"}),
        (["recycle"], {"command": "recycle"}),
        (["recycle", "0"], {"command": "recycle", "slot": 0}),
        (["kill-job", "a-b-c"], {"command": "kill-job", "id": "a-b-c"}),
        (["stacks"], {"command": "stacks"}),
        (["stop"], {"command": "stop"}),
    ],
    ids=" ".join,
)
def test_words_become_a_request(line: Line, words: list[str], request_: dict[str, Any]) -> None:
    assert run_ctl([*words, "--control-socket", "/run/c.sock"], {}) == EX_OK
    limit = RELOAD_LIMIT_S if words[0] == "reload" else ANSWER_LIMIT_S
    assert line.asked == [(Path("/run/c.sock"), {**request_, "by": "ctl"}, limit)]


@pytest.mark.parametrize(
    "words",
    [[], ["jump"], ["scale"], ["scale", "many"], ["scale", "1.5"], ["recycle", "x"], ["kill-job"], ["quiet", "now"]],
    ids=" ".join,
)
def test_words_that_are_no_command_are_a_usage_error(line: Line, words: list[str]) -> None:
    with pytest.raises((ConfigError, SystemExit)) as caught:
        run_ctl([*words, "--control-socket", "/run/c.sock"], {})
    error: Any = caught.value
    assert (error.exit_code if isinstance(error, ConfigError) else error.code) == EX_USAGE
    assert line.asked == []


# --- what is said -----------------------------------------------------------------------------------------------------


def test_what_was_done_goes_to_standard_output(line: Line, capsys: pytest.CaptureFixture[str]) -> None:
    line.answer = {"ok": True, "text": "6 children (there were 3)"}
    assert run_ctl(["scale", "6", "--control-socket", "/c"], {}) == EX_OK
    assert capsys.readouterr() == ("6 children (there were 3)\n", "")


@pytest.mark.parametrize("ok", [True, False])
def test_what_a_child_wrote_does_not_reach_the_terminal_as_it_is(
    line: Line, capsys: pytest.CaptureFixture[str], ok: bool
) -> None:
    frames = "".join(f'  File "/app/jobs.py", line {n} in handle\n' for n in range(200))
    line.answer = {"ok": ok, "text": f"slot 0, job 1:\n{frames}\tin \x1b[2J\x1b]0;x\x07\rgone \x9b1m\u202e \udc9b é"}
    run_ctl(["stacks", "--control-socket", "/c"], {})
    said = "".join(capsys.readouterr())
    assert said == (f"slot 0, job 1:\n{frames}        in \\x1b[2J\\x1b]0;x\\x07\\rgone \\x9b1m\\u202e \\udc9b é\n")


@pytest.mark.parametrize("ok", [False, None, "yes", 1])
def test_a_refusal_goes_to_standard_error_and_exits_1(
    line: Line, capsys: pytest.CaptureFixture[str], ok: object
) -> None:
    line.answer = {"ok": ok, "text": "the supervisor is draining"}
    assert run_ctl(["quiet", "--control-socket", "/c"], {}) == EX_FAILURE
    assert capsys.readouterr() == ("", "the supervisor is draining\n")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (FileNotFoundError(2, "No such file or directory"), "no supervisor listens there"),
        (ConnectionRefusedError(111, "Connection refused"), "no supervisor listens there"),
        (TimeoutError("timed out"), "it does not answer"),
        (PermissionError(13, "Permission denied"), "[Errno 13] Permission denied"),
        (ValueError("the supervisor closed the connection"), "the supervisor closed the connection"),
    ],
)
@pytest.mark.parametrize("run", [run_ctl, run_status], ids=["ctl", "status"])
def test_nobody_there_exits_69_and_names_the_socket(
    line: Line, capsys: pytest.CaptureFixture[str], run: Any, error: Exception, why: str
) -> None:
    line.answer = error
    words = ["quiet"] if run is run_ctl else []
    assert run([*words, "--control-socket", "/run/c.sock"], {}) == EX_UNAVAILABLE
    assert why in capsys.readouterr().err


def test_status_without_a_snapshot_in_the_answer_says_why(line: Line, capsys: pytest.CaptureFixture[str]) -> None:
    line.answer = {"ok": False, "text": "refused: a job may not control its supervisor"}
    assert run_status(["--json", "--control-socket", "/c"], {}) != EX_OK
    assert "refused: a job may not control its supervisor" in capsys.readouterr().err


# --- which socket -----------------------------------------------------------------------------------------------------


def socket_of(words: list[str], env: Mapping[str, str], line: Line) -> Path:
    """The socket that `ctl` and `status` take; both must agree."""
    line.answer = {"ok": True, "text": "", "status": {"phase": "running"}}
    run_ctl(["quiet", *words], env)
    run_status(["--json", *words], env)
    (by_ctl, _, _), (by_status, _, _) = line.asked
    assert by_ctl == by_status
    return by_ctl


def test_the_socket_that_is_named_is_meant(line: Line, env: dict[str, str]) -> None:
    assert socket_of(["--control-socket", "/x/c.sock", "--app", "shop:app"], env, line) == Path("/x/c.sock")


def test_a_state_directory_has_its_own(line: Line, env: dict[str, str], tmp_path: Path) -> None:
    assert socket_of(["--state-dir", str(tmp_path), "--app", "shop"], env, line) == tmp_path / "control.sock"


def test_an_app_has_one_in_the_users_run_time_directory(line: Line, env: dict[str, str], tmp_path: Path) -> None:
    path = socket_of(["--app", "shop:app"], env, line)
    assert path.parent == tmp_path / "run" / "spooled-supervisor"
    assert path.suffix == ".sock"


def test_a_service_has_one_in_its_run_time_directory(line: Line) -> None:
    assert socket_of([], {"RUNTIME_DIRECTORY": "/run/a"}, line) == Path("/run/a/control.sock")


def test_the_only_one_that_is_found_is_meant(line: Line, env: dict[str, str], tmp_path: Path) -> None:
    path = touched(tmp_path / "run/spooled-supervisor/shop.sock")
    assert socket_of([], env, line) == path


@contextlib.contextmanager
def listening(path: Path) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as sock, reachable(path) as name:
        sock.bind(name)
        sock.listen()
        yield path


def test_of_several_that_are_found_those_of_the_dead_do_not_count(
    line: Line, env: dict[str, str], tmp_path: Path
) -> None:
    with listening(tmp_path / "run/spooled-supervisor/killed.sock"):
        pass
    with listening(tmp_path / "state/spooled-supervisor/mail/control.sock") as alive:
        assert socket_of([], env, line) == alive
    with pytest.raises(ConfigError, match="no supervisor was found"):
        run_ctl(["stop"], env)


@pytest.mark.parametrize(("run", "words"), [(run_ctl, ["stop"]), (run_status, [])], ids=["ctl", "status"])
def test_where_nobody_listens_those_that_do_elsewhere_are_named_and_not_asked(
    line: Line,
    env: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    run: Any,
    words: list[str],
) -> None:
    """A unit's, say, which the app that is named does not lead to; and the app may be another one."""
    here = configuration.usual_sockets
    monkeypatch.setattr(configuration, "usual_sockets", lambda env: here(env, root=tmp_path))
    dead = touched(tmp_path / "run/spooled-supervisor-3/control.sock")
    line.answer = FileNotFoundError(2, "No such file or directory")
    with listening(tmp_path / "run/spooled-supervisor-2/control.sock") as alive:
        assert run([*words, "--app", "shop"], env) == EX_UNAVAILABLE
    said = capsys.readouterr().err
    assert f"shop.sock: no supervisor listens there; listening elsewhere:\n  --control-socket {alive}\n" in said
    assert str(dead) not in said
    assert [path.name for path, _, _ in line.asked] == ["shop.sock"]


def test_several_that_are_found_are_listed_and_none_is_asked(line: Line, env: dict[str, str], tmp_path: Path) -> None:
    with (
        listening(tmp_path / "run/spooled-supervisor/shop.sock") as one,
        listening(tmp_path / "state/spooled-supervisor/mail/control.sock") as two,
        pytest.raises(ConfigError) as caught,
    ):
        run_ctl(["stop"], env)
    assert caught.value.exit_code == EX_USAGE
    assert f"--control-socket {one}" in str(caught.value)
    assert f"--control-socket {two}" in str(caught.value)
    assert line.asked == []


@pytest.mark.parametrize(("run", "words"), [(run_ctl, ["stop"]), (run_status, [])], ids=["ctl", "status"])
def test_none_that_is_found_exits_69_and_says_how_to_name_one(
    line: Line, env: dict[str, str], run: Any, words: list[str]
) -> None:
    with pytest.raises(ConfigError, match="no supervisor was found; say which one with --app") as caught:
        run(words, env)
    assert caught.value.exit_code == EX_UNAVAILABLE
