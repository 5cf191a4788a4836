"""Wait statuses in words, for every status there is."""

from __future__ import annotations

import os
import signal

import pytest

from spooled_supervisor.exits import UNKNOWN, Exit, decode, signal_name

NAMES = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    5: "SIGTRAP",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    10: "SIGUSR1",
    11: "SIGSEGV",
    12: "SIGUSR2",
    13: "SIGPIPE",
    14: "SIGALRM",
    15: "SIGTERM",
    16: "SIGSTKFLT",
    24: "SIGXCPU",
    25: "SIGXFSZ",
    29: "SIGIO",
    30: "SIGPWR",
    31: "SIGSYS",
    32: "signal 32",
    33: "signal 33",
    34: "SIGRTMIN",
    37: "SIGRTMIN+3",
    63: "SIGRTMIN+29",
    64: "SIGRTMAX",
}


@pytest.mark.parametrize(("number", "name"), NAMES.items())
@pytest.mark.parametrize("core", [0, 0x80])
def test_death_by_signal_names_it_with_and_without_core(number: int, name: str, core: int) -> None:
    if number == 16 and not hasattr(signal, "SIGSTKFLT"):
        name = "signal 16"  # Python knows it since 3.11 only where the C library does
    ended = decode(number | core)
    assert ended == Exit(signal=name)
    assert ended.words() == f"killed by {name}"


def test_every_signal_has_words() -> None:
    for number in range(1, 65):
        words = decode(number).words()
        assert words.startswith("killed by SIG") or number in (16, 32, 33)
        assert decode(number | 0x80).words() == words


def test_every_exit_code_is_told() -> None:
    for code in range(256):
        assert decode(code << 8) == Exit(exit_code=code)
        assert decode(code << 8).words() == f"exited with status {code}"


@pytest.mark.parametrize("status", [UNKNOWN, 0x137F, 0xFFFF])
def test_status_that_was_taken_or_is_no_end_is_unknown(status: int) -> None:
    assert decode(status) == Exit()
    assert decode(status).words() == "ended with unknown status"


def test_decoding_agrees_with_the_standard_library_where_that_is_right() -> None:
    for status in [*range(1, 65), *(code << 8 for code in range(256))]:
        code = os.waitstatus_to_exitcode(status)
        assert decode(status) == (Exit(signal=signal_name(-code)) if code < 0 else Exit(exit_code=code))
