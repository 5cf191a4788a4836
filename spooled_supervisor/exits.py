"""How a process ended: its wait status taken by pid or pidfd, and said in words that a person can act on.

Owns the encoding of wait(2) and nothing else: it kills nobody and never blocks. A status is looked at first (`look`:
the zombie stays, so its number cannot be reused) and taken last (`reap`, which also gives the rusage). Never
`waitpid(-1)`: it would take statuses that belong to others. Source: waitid(2), wait4(2), pidfd_open(2).
"""

from __future__ import annotations

import os
import resource  # noqa: F401  os.wait4 imports it at its first use, when no descriptor may be left for that
import select
import signal
from dataclasses import dataclass

UNKNOWN = -1
"""Stands for a status that somebody else took (ECHILD, e.g. SIGCHLD was ignored); no wait status is negative."""


@dataclass(frozen=True, slots=True)
class Exit:
    """One of `exit_code` and `signal` is set, or neither where the status is unknown. A core dump changes nothing."""

    exit_code: int | None = None
    signal: str | None = None

    def words(self) -> str:
        """What is said of a death; it goes on with evidence, if there is any: "killed by SIGKILL; the memory ..."."""
        if self.signal is not None:
            return f"killed by {self.signal}"
        if self.exit_code is not None:
            return f"exited with status {self.exit_code}"
        return "ended with unknown status"


@dataclass(frozen=True, slots=True)
class Reaped:
    """What wait4(2) gave. CPU and peak memory (getrusage(2)) count the descendants that the process waited for."""

    status: int
    cpu_s: float = 0.0
    max_rss_bytes: int = 0


def decode(status: int) -> Exit:
    """The meaning of a wait status, or of UNKNOWN."""
    if status < 0:
        return Exit()
    # WIFSIGNALED and not os.waitstatus_to_exitcode: the latter takes the core flag for a part of the signal's number.
    if os.WIFSIGNALED(status):
        return Exit(signal=signal_name(os.WTERMSIG(status)))
    if os.WIFEXITED(status):
        return Exit(exit_code=os.WEXITSTATUS(status))
    return Exit()


def signal_name(number: int) -> str:
    """`SIGSEGV`; `SIGRTMIN+3` for the real-time ones; `signal 32` where there is no name (signal(7))."""
    try:
        return signal.Signals(number).name
    except ValueError:
        if signal.SIGRTMIN < number < signal.SIGRTMAX:
            return f"SIGRTMIN+{number - signal.SIGRTMIN}"
        return f"signal {number}"


def look(pidfd: int) -> int | None:
    """The wait status of a child that has ended, which stays a zombie; None while it lives; UNKNOWN if it was taken.

    A process that is not our child yet (its parent has not left) counts as living.
    """
    try:
        info = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return UNKNOWN if is_over(pidfd) else None
    if info is None:
        return None
    if info.si_code == os.CLD_EXITED:
        return info.si_status << 8
    return info.si_status | (0x80 if info.si_code == os.CLD_DUMPED else 0)


def reap(pid: int) -> Reaped | None:
    """Take the status of a child that has ended; None while it lives. Its number may be reused from now on."""
    try:
        got, status, usage = os.wait4(pid, os.WNOHANG)
    except ChildProcessError:
        return Reaped(UNKNOWN)
    if got == 0:
        return None
    return Reaped(status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def is_over(pidfd: int) -> bool:
    """Whether the process has ended, reaped or not; it need not be a child of ours (pidfd_open(2): readable then)."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
