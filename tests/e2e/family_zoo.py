"""Processes for `test_family_processes.py` to kill: `python family_zoo.py MODE [ARGUMENT]`, each a child with a family.

Like a real child it leads a session and is a subreaper. When all is set up it prints one JSON line with the pids below
it; then it sleeps. Everybody has an alarm, so that nobody outlives a broken test for long.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from spooled_supervisor import kernel

SYS_EXIT = {"x86_64": 60}.get(os.uname().machine, 93)


def sleep_forever() -> NoReturn:
    signal.alarm(100)
    while True:
        signal.pause()


def fork(then: Callable[[], object] = sleep_forever, *, session: bool = False) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(100)
            if session:
                os.setsid()
            then()
        finally:
            os._exit(0)
    return pid


def born(announce: int) -> NoReturn:
    os.write(announce, b"%d\n" % os.getpid())
    sleep_forever()


def report(pids: list[int]) -> None:
    sys.stdout.write(json.dumps(pids) + "\n")
    sys.stdout.flush()


def heard(pipe: int, count: int) -> list[int]:
    """The pids of those who were born at the other end of `pipe`."""
    lines = b""
    while lines.count(b"\n") < count:
        lines += os.read(pipe, 4096)
    return [int(line) for line in lines.split()]


def alone(_: str) -> None:
    report([])


def many(count: str) -> None:
    report([fork() for _ in range(int(count))])


def brood(_: str) -> None:
    """Everything by which a descendant can escape a killpg: eight processes."""
    hear, announce = os.pipe()

    def announced() -> None:
        born(announce)

    def stubborn() -> None:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        born(announce)

    def with_child() -> None:
        fork(announced)
        born(announce)

    def subreaper_with_orphan() -> None:
        kernel.set_child_subreaper(True)
        fork(lambda: fork(announced, session=True), session=True)
        born(announce)

    fork(announced)
    fork(announced, session=True)
    os.waitpid(fork(lambda: fork(stubborn)), 0)  # forked twice
    os.waitpid(fork(lambda: fork(announced, session=True), session=True), 0)  # a daemon
    fork(with_child)
    fork(subreaper_with_orphan)
    report(heard(hear, 8))


def stopped(_: str) -> None:
    report([fork()])
    os.kill(os.getpid(), signal.SIGSTOP)


def zombies(_: str) -> None:
    """Two dead ones that nobody waits for and a living one."""
    dead = [fork(lambda: None), fork(lambda: None)]
    for pid in dead:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    report([*dead, fork()])


def careless(_: str) -> None:
    """SIGCHLD is ignored: the kernel reaps, and entries vanish from the list while it is read."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    report([fork() for _ in range(30)])


def headless(_: str) -> None:
    """A descendant whose main thread has left while another one goes on: it looks like a zombie and is none."""
    hear, announce = os.pipe()

    def leave_main_thread() -> None:
        threading.Thread(target=born, args=(announce,)).start()
        ctypes.CDLL(None).syscall(SYS_EXIT, 0)

    pid = fork(leave_main_thread)
    heard(hear, 1)
    while b") Z" not in Path(f"/proc/{pid}/stat").read_bytes():
        os.sched_yield()
    report([pid])


def dies_first(how: str) -> None:
    """The child is gone before it is killed, its family is not."""
    hear, announce = os.pipe()
    fork(lambda: born(announce))
    fork(lambda: born(announce), session=True)
    report(heard(hear, 2))
    sys.stdin.readline()
    if how == "signal":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.abort()
    os._exit(int(how))


def tokens(count: int) -> int:
    """The right to so many forks for whoever reads a byte: a bomb with an end, should it not be killed."""
    bucket, fill = os.pipe()
    os.write(fill, b"." * count)
    os.set_blocking(bucket, False)
    return bucket


def spend(bucket: int) -> bool:
    try:
        return bool(os.read(bucket, 1))
    except BlockingIOError:
        return False


def bomb(kind: str) -> None:
    """Everybody forks as fast as he can, up to some hundreds in all."""
    bucket = tokens(400)
    hear, announce = os.pipe()

    def explode() -> None:
        while spend(bucket):
            fork(explode, session=kind == "sessions")
            os.write(announce, b".")
        sleep_forever()

    fork(explode)
    os.read(hear, 1)
    report([])


def runner(kind: str) -> None:
    """Somebody who is always somebody else: forks, and the parent leaves."""
    bucket = tokens(60000)

    def run() -> None:
        while spend(bucket):
            if os.fork() != 0:
                os._exit(0)
            signal.alarm(100)
            if kind == "sessions":
                os.setsid()
        sleep_forever()

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    fork(run)
    report([])


def subprocesses(_: str) -> None:
    """What most handlers leave behind."""
    report([subprocess.Popen(["sleep", "100"], start_new_session=own).pid for own in (False, True)])


def spins(seconds: str) -> None:
    """Uses so much CPU itself and, in a descendant, the same again."""

    def spin() -> None:
        while sum(os.times()[:2]) < float(seconds):
            pass

    pid = fork(spin)
    spin()
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    report([pid])


if __name__ == "__main__":
    kernel.set_child_subreaper(True)
    if os.getsid(0) != os.getpid():
        os.setsid()
    globals()[sys.argv[1]](sys.argv[2] if len(sys.argv) > 2 else "")
    sleep_forever()
