"""Copies of a program, forked while it has one thread: the library's fork server, and one that stands by for it.

A copy has all that the program had at that moment, so that any callable can be a handler: no name is needed by which
it could be imported. That is only safe in a program with one thread: a fork copies the locks that other threads hold,
but not the threads (fork(2)). Both copies are made at the same time, and the second one runs no user code until it
takes over: when the first one is dead, the program has threads at work. There is no third.

A copy gives up what the program's own business is: the terminal's session, signals, the environment's secrets, standard
input; what it prints goes into a pipe. It keeps the program's memory and its open files. It leaves with the program
(PDEATHSIG until it serves, then the end of its socket), and only through `os._exit`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from typing import NoReturn

from spooled_supervisor import exits, forkserver, kernel
from spooled_supervisor.app import App
from spooled_supervisor.forkclient import NoCopyLeft, Spawned, link
from spooled_supervisor.highfd import move_high

COUNT = 2
CLOSE_LIMIT_S = 1.0

_waiting: list[Spawned] = []
"""Of all workers. A later copy closes what belongs to them: a socket is at its end when nobody has the other one."""


class Copies:
    """The copies for one worker. Made in a program with one thread; `spawn` gives them away, `close` ends the rest."""

    def __init__(self, app: App, env: Mapping[str, str], count: int = COUNT) -> None:
        """`env` is the environment of the copies and so of the children. Raises OSError if there is no room."""
        self._left: list[Spawned] = []
        try:
            for _ in range(count):
                self._left.append(_fork_copy(app, env))
        except BaseException:
            self.close()
            raise

    def spawn(self, _env: Mapping[str, str]) -> Spawned:
        """`forkclient.Spawn`: the next one. Raises NoCopyLeft."""
        if not self._left:
            raise NoCopyLeft("the fork server has died, and the one that stood by for it too")
        spawned = self._left.pop(0)
        _waiting.remove(spawned)
        return spawned

    def close(self) -> None:
        """See the unused ones dead."""
        left, self._left = self._left, []
        for spawned in left:
            _waiting.remove(spawned)
            spawned.control.close()
            os.close(spawned.output_fd)
            with contextlib.suppress(ProcessLookupError):  # dead, and its status taken by somebody else
                _see_dead(spawned.pid)


def _see_dead(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(CLOSE_LIMIT_S * 1000):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            poll.poll(CLOSE_LIMIT_S * 1000)
        exits.reap(pid)
    finally:
        os.close(pidfd)


def _fork_copy(app: App, env: Mapping[str, str]) -> Spawned:
    here, there, output_fd, output = link()
    _flush()  # what waits in a buffer now would be written by the copy as well
    # Blocked until the copy has installed its own handling: a signal in between would run the program's handlers there.
    old_mask = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _be_copy(app, env, there, output, closing=(here, output_fd))
    except BaseException:
        here.close()
        os.close(output_fd)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        there.close()
        os.close(output)
    _waiting.append(Spawned(pid, here, output_fd))
    return _waiting[-1]


def _be_copy(
    app: App, env: Mapping[str, str], control: socket.socket, output: int, *, closing: tuple[socket.socket, int]
) -> NoReturn:
    try:
        for theirs, output_fd in (closing, *((other.control, other.output_fd) for other in _waiting)):
            theirs.close()
            os.close(output_fd)
        os.setsid()
        signal.set_wakeup_fd(-1)
        null = move_high(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))  # the program may have closed the first three
        for fd, source in ((0, null), (1, output), (2, output)):
            os.dup2(source, fd)
        os.close(null)
        os.close(output)
        _print_into_the_pipe()
        kernel.set_title("spooled-supervisor: copy")  # the first one before the environment moves: it looks from there
        os.environ.clear()
        os.environ.update(env)
        forkserver.be_fork_server(control, app)
    finally:
        os._exit(1)


def _print_into_the_pipe() -> None:
    """The program may have put something else in place of its streams (a test runner's capture, a tee), or closed them:
    what is written there stays in the memory of the copy, or comes out where the program's own output does."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        try:
            is_there = getattr(sys, name).fileno() == fd
        except Exception:  # None, closed, or without a descriptor
            is_there = False
        if not is_there:
            stream = os.fdopen(fd, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
            setattr(sys, name, stream)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # None, closed, replaced
            stream.flush()
