"""Commands and exit codes, as far as nothing is started."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from spooled_supervisor import __version__, cli
from spooled_supervisor.errors import (
    EX_CONFIG,
    EX_FAILURE,
    EX_NOPERM,
    EX_OK,
    EX_USAGE,
    ConfigError,
    CredentialsRefused,
    ProtocolError,
)
from spooled_supervisor.supervisor import COMMAND_SIGNALS, UNUSED_SIGNALS


class Ended(BaseException):
    """Stands for `os._exit`, which does not return either."""


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The console script with these arguments; its exit code."""
    for name in [name for name in os.environ if name.startswith("SPOOLED_")]:
        monkeypatch.delenv(name)

    def end(code: int) -> None:
        raise Ended(code)

    def main(*argv: str) -> int:
        with monkeypatch.context() as patch:
            patch.setattr(os, "_exit", end)
            with pytest.raises(Ended) as caught:
                cli.main(list(argv))
        (code,) = caught.value.args
        assert isinstance(code, int)
        return code

    return main


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["help"]])
def test_help_lists_the_commands_and_is_no_error(
    main: Callable[..., int], capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert main(*argv) == EX_OK
    said = capsys.readouterr()
    for command in ("run", "demo", "dev-server", "check"):
        assert command in said.out
    assert said.err == ""


def test_an_unknown_command_is_a_usage_error_that_names_the_known_ones(
    main: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("frobnicate", "--procs", "4") == EX_USAGE
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("spooled-supervisor: unknown command 'frobnicate'; the commands are: run, check")


def test_check_names_every_problem_on_a_line_of_its_own(
    main: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOOLED_POLL_INTERVAL", "soon")
    assert main("check") == EX_CONFIG
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("spooled-supervisor: ") for line in lines)
    assert any("app: is required" in line for line in lines)
    assert any("API key: is required" in line for line in lines)
    assert any("SPOOLED_POLL_INTERVAL" in line and "soon" in line for line in lines)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--child-nice", "50"),
        ("--log-level", "loud"),
        ("--pin-cpus", "perhaps"),
        ("--strict-preload", "perhaps"),
        ("--leftovers", "hide"),
        ("--boot-timeout", "soon"),
        ("--ca-file", "/nonexistent"),
        ("--grpc-address", ":"),
    ],
)
def test_check_says_one_thing_of_one_bad_value_and_still_looks_at_the_app(
    main: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flag: str,
    value: str,
) -> None:
    monkeypatch.setenv("SPOOLED_API_KEY", "sp_test_key")
    here = ("--api-url", "http://127.0.0.1:1", "--online")
    assert main("check", "--app", "tests.support.examples.tasks", *here, flag, value) in (EX_USAGE, EX_CONFIG)
    (line,) = capsys.readouterr().err.splitlines()
    assert flag in line
    assert main("check", "--app", "no_such_module_anywhere", *here, flag, value) in (EX_USAGE, EX_CONFIG)
    said = capsys.readouterr().err
    assert flag in said
    assert "No module named 'no_such_module_anywhere'" in said


def test_a_problem_of_the_command_line_is_a_usage_error(
    main: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("check", "--procs", "many") == EX_USAGE
    assert "--procs" in capsys.readouterr().err
    assert main("check", "--no-such-option") == EX_USAGE
    assert "--no-such-option" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["check", "--help"], ["check", "--version"], ["dev-server", "--help"]])
def test_what_argparse_ends_by_itself_is_no_error(
    main: Callable[..., int], capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert main(*argv) == EX_OK
    said = capsys.readouterr().out
    assert (__version__ if "--version" in argv else "usage:") in said
    assert ("--online" in said) == (argv == ["check", "--help"])


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError(["first", "second"]), EX_CONFIG, "spooled-supervisor: first\nspooled-supervisor: second\n"),
        (ConfigError("x", exit_code=EX_USAGE), EX_USAGE, "spooled-supervisor: x\n"),
        (CredentialsRefused(401, "X", "revoked"), EX_NOPERM, "spooled-supervisor: HTTP 401 X: revoked\n"),
        (ProtocolError("x"), EX_FAILURE, "spooled-supervisor: x\n"),
        (SystemExit(3), 3, ""),
        (SystemExit("text"), EX_FAILURE, ""),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_a_command_raises_becomes_its_exit_code(
    main: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    said: str,
) -> None:
    def fails(argv: list[str], env: Mapping[str, str]) -> int:
        raise error

    monkeypatch.setattr(cli, "dispatch", fails)
    assert main() == code
    assert capsys.readouterr().err == said


def test_a_bug_ends_with_its_traceback_and_1(
    main: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(argv: list[str], env: Mapping[str, str]) -> int:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(cli, "dispatch", fails)
    assert main() == EX_FAILURE
    assert "ZeroDivisionError: a bug" in capsys.readouterr().err


@pytest.mark.parametrize("streams", ["none", "closed"])
def test_a_process_without_standard_streams_ends_all_the_same(
    main: Callable[..., int], monkeypatch: pytest.MonkeyPatch, streams: str
) -> None:
    stream: Any = None
    if streams == "closed":
        stream = io.StringIO()
        stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    if streams == "none":
        monkeypatch.setattr(sys, "stderr", stream)
    assert main("frobnicate") == EX_USAGE


def test_run_is_the_command_if_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(argv: list[str], env: Mapping[str, str]) -> int:
        ran.append(argv)
        return 7

    monkeypatch.setattr(cli, "run", run)
    assert cli.dispatch(["--procs", "4"], {}) == 7
    assert cli.dispatch(["run", "--procs", "4"], {}) == 7
    assert cli.dispatch([], {}) == 7
    assert ran == [["--procs", "4"], ["--procs", "4"], []]


EARLY = """
import os, signal
from spooled_supervisor import cli, config

def load(*args, **options):  # the first thing that takes long
    number = {number}
    handled = callable(signal.getsignal(number))  # exec passes on SIG_IGN
    os.kill(os.getpid(), number)
    os._exit(0 if handled else 1)

config.load = load
cli.run([], {{}})
"""


@pytest.mark.parametrize("number", [*COMMAND_SIGNALS, *UNUSED_SIGNALS, signal.SIGTSTP])
def test_a_signal_that_comes_before_there_is_a_daemon_neither_ends_nor_stops_it(number: signal.Signals) -> None:
    line = [sys.executable, "-c", EARLY.format(number=int(number))]
    assert subprocess.run(line, timeout=30, check=False).returncode == 0
